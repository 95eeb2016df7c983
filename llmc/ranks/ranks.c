/*
Who the ranks are and what they agree on. Contract in ranks.h.
*/
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // sched_getaffinity
#endif

#include "ranks.h"

#include <signal.h>
#ifdef HAVE_MPI
#include <mpi.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#include "../host_limits.h"
#include "rendezvous.h"

Ranks ranks = {0, 1, 0, 1, 1, 0, false, "alone"};

static enum { ALONE, BY_MPI, BY_ENVIRONMENT } way;
static bool failed;  // this process ends because of an error

// ----------------------------------------------------------------------------
// the environment

// An empty variable counts as unset.
static bool environment_has(const char* name) {
    const char* value = getenv(name);
    return value && *value;
}

// The number in an environment variable, from 0 to `most`; `absent` without it.
static long environment_number_up_to(const char* name, long absent, long most) {
    const char* value = getenv(name);
    if (!environment_has(name)) { return absent; }
    char* end;
    errno = 0;
    long number = strtol(value, &end, 10);
    if (*end != '\0' || errno != 0 || number < 0 || number > most) {
        fatal("%s=%s, expected a number from 0 to %ld; correct the environment, or unset it", name, value, most);
    }
    return number;
}

static long environment_number(const char* name, long absent) {
    return environment_number_up_to(name, absent, 1000000);
}

// What the launcher left in the environment: -1 is unknown.
typedef struct {
    const char *name, *size_name;
    long rank, size, local_rank;
} Launch;

// mpirun of Open MPI; of MPICH and its relatives; srun with MPI support. NULL name: none of them.
static Launch mpi_launch(void) {
    Launch none = {NULL, NULL, -1, -1, -1};
    if (environment_has("OMPI_COMM_WORLD_SIZE")) {
        Launch open_mpi = {"mpirun", "OMPI_COMM_WORLD_SIZE", environment_number("OMPI_COMM_WORLD_RANK", -1),
                           environment_number("OMPI_COMM_WORLD_SIZE", -1),
                           environment_number("OMPI_COMM_WORLD_LOCAL_RANK", -1)};
        return open_mpi;
    }
    if (environment_has("PMI_RANK") || environment_has("PMIX_RANK")) {
        const char* size = environment_has("PMI_SIZE") ? "PMI_SIZE" : "SLURM_STEP_NUM_TASKS";
        Launch other = {"the MPI launcher", size, environment_number("PMI_RANK", -1), environment_number(size, -1),
                        environment_number("SLURM_LOCALID", -1)};
        return other;
    }
    return none;
}

// RANK and its relatives, or those of a Slurm job step (a batch script itself is in no step).
static Launch environment_launch(void) {
    Launch none = {NULL, NULL, -1, -1, -1};
    if (environment_has("WORLD_SIZE") || environment_has("RANK")) {
        Launch named = {"the environment", "WORLD_SIZE", environment_number("RANK", -1),
                        environment_number("WORLD_SIZE", -1), environment_number("LOCAL_RANK", -1)};
        if (named.size == 1) { return none; }
        if (named.rank < 0 || named.size < 0) {
            fatal("RANK and WORLD_SIZE belong together, but %s is missing or empty; set both, or unset both",
                  named.rank < 0 ? "RANK" : "WORLD_SIZE");
        }
        return named;
    }
    if (environment_number("SLURM_STEP_NUM_TASKS", 1) > 1) {
        Launch slurm = {"srun", "SLURM_STEP_NUM_TASKS", environment_number("SLURM_PROCID", -1),
                        environment_number("SLURM_STEP_NUM_TASKS", -1), environment_number("SLURM_LOCALID", -1)};
        return slurm;
    }
    return none;
}

// ----------------------------------------------------------------------------
// errors and the end

// Prints the error of this rank. One that all ranks meet is told once: rank 0 ends the others before they speak.
static void report_fatal(const char* message) {
    if (failed) { return; }
    failed = true;
    if (ranks.rank > 0) {
        signal(SIGTERM, SIG_DFL);  // with which mpirun ends the others
        struct timespec left = {1, 0};
        while (nanosleep(&left, &left) != 0) {}
        fprintf(stderr, "error: rank %zu of %zu: %s\n", ranks.rank, ranks.size, message);
    } else {
        fprintf(stderr, "error: %s\n", message);
    }
    fflush(stderr);
    if (way == BY_ENVIRONMENT) { rendezvous_abort(message); }
}

// At exit, after the handlers that tidy up: ends the others when this rank failed, else waits for them.
static void leave(void) {
    if (way == BY_ENVIRONMENT && !failed) { rendezvous_close(); }
    if (way != BY_MPI) { return; }
#ifdef HAVE_MPI
    int finished;
    MPI_Finalized(&finished);
    if (finished) { return; }
    if (failed && ranks.size > 1) { MPI_Abort(MPI_COMM_WORLD, 1); }
    MPI_Finalize();
#endif
}

void ranks_finish(void) { leave(); }

// ----------------------------------------------------------------------------
// starting

#ifdef HAVE_MPI
static void start_mpi(const Launch* launch) {
    int provided, rank, size, local_rank, local_size;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
    way = BY_MPI;
    atexit(leave);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    ranks.rank = (size_t)rank, ranks.size = (size_t)size, ranks.way = "MPI";
    if (launch->size >= 0 && launch->size != size) {
        fatal(
            "%s started %ld processes (%s), MPI knows %d; start with the mpirun of the MPI that this program was built "
            "with, or srun --mpi=pmix",
            launch->name, launch->size, launch->size_name, size);
    }
    if (provided < MPI_THREAD_SERIALIZED) { fatal("this MPI does not support threads; use Open MPI"); }
    MPI_Comm local;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &local);
    MPI_Comm_rank(local, &local_rank);
    MPI_Comm_size(local, &local_size);
    MPI_Comm_free(&local);
    ranks.local_rank = (size_t)local_rank, ranks.local_size = (size_t)local_size;
}
#endif

// The first host of Slurm's list: "rack[0-1]n[03-05,9]-ib,login" to "rack0n03-ib", each bracket's first number.
static void first_host(char* host, size_t bytes, const char* list) {
    size_t used = 0;
    for (const char* c = list; *c && *c != ',' && used + 1 < bytes; c++) {
        if (*c != '[') {
            host[used++] = *c;
            continue;
        }
        for (c++; *c && !strchr("-,]", *c) && used + 1 < bytes; c++) { host[used++] = *c; }
        c += strcspn(c, "]");
        if (!*c) { break; }
    }
    host[used] = '\0';
}

// A port that jobs on the same host rarely share: MASTER_PORT, or one made of Slurm's job and step.
static int master_port(void) {
    long port = environment_number_up_to("MASTER_PORT", 0, 65535);
    if (port > 0) { return (int)port; }
    long job = environment_number_up_to("SLURM_JOB_ID", -1, UINT32_MAX);
    long step = environment_number_up_to("SLURM_STEP_ID", 0, UINT32_MAX);
    return job < 0 ? 29500 : 20000 + (int)((job * 31 + step) % 12000);
}

static void start_rendezvous(const Launch* launch) {
    char host[256] = "127.0.0.1";
    const char* address = environment_has("MASTER_ADDR") ? getenv("MASTER_ADDR") : NULL;
    const char* nodes = environment_has("SLURM_STEP_NODELIST") ? getenv("SLURM_STEP_NODELIST") : NULL;
    if (launch->rank < 0 || launch->rank >= launch->size) {
        fatal("rank %ld of %ld (%s), expected 0 to %ld; correct the environment", launch->rank, launch->size,
              launch->size_name, launch->size - 1);
    }
    if (!nodes) { nodes = getenv("SLURM_JOB_NODELIST"); }
    if (!address && nodes) { first_host(host, sizeof host, nodes); }
    const char *job_id = getenv("SLURM_JOB_ID"), *step_id = getenv("SLURM_STEP_ID");
    char* job = text("bam.c %ld %s %s", launch->size, job_id ? job_id : "", step_id ? step_id : "");
    RendezvousConfig config;
    memset(&config, 0, sizeof config);
    config.rank = (size_t)launch->rank, config.size = (size_t)launch->size;
    config.address = address ? address : host, config.port = master_port();
    config.job = job, config.timeout = (double)environment_number("RENDEZVOUS_TIMEOUT", 300);
    ranks.rank = config.rank, ranks.size = config.size, ranks.way = "environment";
    rendezvous_open(&config);
    way = BY_ENVIRONMENT;
    atexit(leave);
    free(job);
}

// ----------------------------------------------------------------------------
// hosts and cores

// What tells ranks of one host: its boot, and what this rank may use: cores, and the time that a control group allows.
typedef struct {
    char boot[40];
    cpu_set_t cores;
    double cpus;
    uint64_t cpu_group;
} Place;

static Place this_place(void) {
    Place place;
    memset(&place, 0, sizeof place);
    FILE* f = fopen("/proc/sys/kernel/random/boot_id", "r");
    bool read = f && fscanf(f, "%39s", place.boot) == 1;
    if (f) { fclose(f); }
    if (!read) { gethostname(place.boot, sizeof place.boot - 1); }
    sched_getaffinity(0, sizeof place.cores, &place.cores);
    Limits limits = limits_read("");
    place.cpus = limits.cpus, place.cpu_group = limits.cpu_group;
    return place;
}

static void find_neighbours(long local_rank) {
    Place mine = this_place(), *all = (Place*)xcalloc(ranks.size, sizeof(Place));
    ranks_all_gather(all, &mine, sizeof mine);
    size_t before = 0, here = 0, sharing = 0, group = 0;
    cpu_set_t used;
    CPU_ZERO(&used);
    ranks.hosts = 0;
    for (size_t r = 0; r < ranks.size; r++) {
        size_t first = 0;
        while (strcmp(all[first].boot, all[r].boot) != 0) { first++; }
        ranks.hosts += first == r;
        if (strcmp(all[r].boot, mine.boot) != 0) { continue; }
        here++;
        group += all[r].cpu_group == mine.cpu_group;
        before += r < ranks.rank;
        cpu_set_t common;
        CPU_AND(&common, &all[r].cores, &mine.cores);
        sharing += CPU_COUNT(&common) > 0;
        CPU_OR(&used, &used, &all[r].cores);
    }
    free(all);
    if (way == BY_ENVIRONMENT) {
        ranks.local_rank = local_rank >= 0 ? (size_t)local_rank : before;
        ranks.local_size = here;
    }
    if (environment_has("OMP_NUM_THREADS") || ranks.local_size == 1) { return; }
    size_t cores = (size_t)CPU_COUNT(&mine.cores) / (sharing ? sharing : 1);
    ranks.threads = limits_threads(mine.cpus, group, cores);
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    ranks.bound = sharing == 1 && CPU_COUNT(&used) < online;
#ifdef _OPENMP
    omp_set_num_threads((int)ranks.threads);
#endif
}

void ranks_init(bool needs_mpi) {
    Launch mpi = mpi_launch(), other = environment_launch();
#ifndef HAVE_MPI
    if (mpi.size < 0) { mpi.name = NULL; }  // one process, as far as anybody can tell
#endif
    if (mpi.name && mpi.size != 1) {
        fatal_report = report_fatal;
#ifdef HAVE_MPI
        start_mpi(&mpi);
#else
        if (needs_mpi) {
            fatal(
                "%s started %s processes, but this program was built without MPI; install libopenmpi-dev and "
                "openmpi-bin (scripts/install_deps.sh), then make again",
                mpi.name, getenv(mpi.size_name));
        }
        if (mpi.rank < 0 || mpi.size < 0) {
            fatal("%s is not understood without MPI; set RANK and WORLD_SIZE", mpi.name);
        }
        start_rendezvous(&mpi);
        other = mpi;
#endif
    } else if (other.name) {
        if (needs_mpi) {
            fatal(
                "%s asks for %ld processes (%s) without MPI, which ranks on CPUs need; start with mpirun or "
                "srun --mpi=pmix, or unset %s",
                other.name, other.size, other.size_name, other.size_name);
        }
        fatal_report = report_fatal;
        start_rendezvous(&other);
    }
    if (ranks.size > 1) { find_neighbours(other.local_rank); }
    if (ranks.rank > 0) {
        warnings_off = true;
        if (!freopen("/dev/null", "w", stdout)) { fatal("cannot open /dev/null: %s", strerror(errno)); }
    }
}

// ----------------------------------------------------------------------------
// agreement

void ranks_all_gather(void* all, const void* mine, size_t bytes) {
    if (way == ALONE) { memcpy(all, mine, bytes); }
    if (way == BY_ENVIRONMENT) { rendezvous_all_gather(all, mine, bytes); }
#ifdef HAVE_MPI
    if (way == BY_MPI) { MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD); }
#endif
}

void ranks_broadcast(void* data, size_t bytes) {
    if (way == BY_ENVIRONMENT) { rendezvous_broadcast(data, bytes); }
#ifdef HAVE_MPI
    if (way == BY_MPI) { MPI_Bcast(data, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD); }
#endif
}

int ranks_max(int value) {
    int* all = (int*)xcalloc(ranks.size, sizeof(int));
    ranks_all_gather(all, &value, sizeof value);
    for (size_t r = 0; r < ranks.size; r++) { value = all[r] > value ? all[r] : value; }
    free(all);
    return value;
}

void ranks_barrier(void) { ranks_max(0); }

void ranks_check_same(const char* what, const void* data, size_t bytes) {
    uint64_t hash = fnv1a(data, bytes);
    uint64_t* all = (uint64_t*)xcalloc(ranks.size, sizeof hash);
    ranks_all_gather(all, &hash, sizeof hash);
    for (size_t r = 1; r < ranks.size; r++) {
        if (all[r] != all[0]) {
            fatal("rank %zu has other %s than rank 0; give all ranks the same command and the same files", r, what);
        }
    }
    free(all);
}
