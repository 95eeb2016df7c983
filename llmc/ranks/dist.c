/*
Sums and shares over ranks on the CPU, through MPI. Contract in dist.h.

A thread of its own runs the queued operations one after another, so that a backward pass goes on meanwhile. It asks
MPI for progress and sleeps in between, for its core belongs to the computation, until the computation waits for it.
*/
#include "dist.h"

#include <limits.h>
#include <pthread.h>
#ifdef HAVE_MPI
#include <mpi.h>
#endif

#include "ranks.h"

bool dist_needs_mpi(void) { return true; }

const char* dist_device(const char* device) { return device; }

size_t dist_ranks_per_device(void) { return ranks.local_size; }

#ifdef HAVE_MPI

typedef struct {
    DistOperation operation;
    char* data;
    size_t n, element_bytes;
} Job;

static struct {
    bool open, stop, waiting;
    MPI_Comm network;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    Job* jobs;  // since the last dist_wait
    size_t queued, done, room;
    int *counts, *begins;  // of the shards, in elements
    float* scratch;
    size_t scratch_count;
} dist = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

// Drives the operation to its end. Rarely asking costs the network little, for a round of it takes longer.
static void progress(MPI_Request* request) {
    const struct timespec pause = {0, 50000};
    for (int finished = 0;;) {
        MPI_Test(request, &finished, MPI_STATUS_IGNORE);
        if (finished) { return; }
        pthread_mutex_lock(&dist.mutex);
        bool waiting = dist.waiting;
        pthread_mutex_unlock(&dist.mutex);
        if (waiting) {
            sched_yield();
        } else {
            nanosleep(&pause, NULL);
        }
    }
}

static void cut_into_shards(size_t n) {
    if (n > INT_MAX) { fatal("%zu elements to share at once, MPI counts up to %d; use a smaller model", n, INT_MAX); }
    for (size_t r = 0; r < ranks.size; r++) {
        dist.begins[r] = (int)part_begin(n, r, ranks.size);
        dist.counts[r] = (int)part_begin(n, r + 1, ranks.size) - dist.begins[r];
    }
}

static void run_job(const Job* job) {
    MPI_Request request;
    cut_into_shards(job->n);
    size_t own = (size_t)dist.counts[ranks.rank];
    char* shard = job->data + (size_t)dist.begins[ranks.rank] * job->element_bytes;
    MPI_Datatype type = MPI_DATATYPE_NULL;
    switch (job->operation) {
        case ALL_REDUCE:
            MPI_Iallreduce(MPI_IN_PLACE, job->data, (int)job->n, MPI_FLOAT, MPI_SUM, dist.network, &request);
            progress(&request);
            break;
        case REDUCE_SCATTER:
            if (own > dist.scratch_count) {
                dist.scratch = (float*)xrealloc(dist.scratch, own * sizeof(float));
                dist.scratch_count = own;
            }
            MPI_Ireduce_scatter(job->data, dist.scratch, dist.counts, MPI_FLOAT, MPI_SUM, dist.network, &request);
            progress(&request);
            if (own > 0) { memcpy(shard, dist.scratch, own * sizeof(float)); }
            break;
        case ALL_GATHER:
            MPI_Type_contiguous((int)job->element_bytes, MPI_BYTE, &type);
            MPI_Type_commit(&type);
            MPI_Iallgatherv(MPI_IN_PLACE, 0, type, job->data, dist.counts, dist.begins, type, dist.network, &request);
            progress(&request);
            MPI_Type_free(&type);
            break;
    }
}

static void* run_jobs(void* unused) {
    pthread_mutex_lock(&dist.mutex);
    while (!dist.stop) {
        if (dist.done == dist.queued) {
            pthread_cond_wait(&dist.changed, &dist.mutex);
            continue;
        }
        Job job = dist.jobs[dist.done];
        pthread_mutex_unlock(&dist.mutex);
        run_job(&job);
        pthread_mutex_lock(&dist.mutex);
        dist.done++;
        pthread_cond_broadcast(&dist.changed);
    }
    pthread_mutex_unlock(&dist.mutex);
    return unused;
}

static void enqueue(DistOperation operation, void* data, size_t n, size_t element_bytes) {
    if (!dist.open || n == 0) { return; }
    pthread_mutex_lock(&dist.mutex);
    if (dist.queued == dist.room) {
        dist.room = 2 * dist.room + 64;
        dist.jobs = (Job*)xrealloc(dist.jobs, dist.room * sizeof(Job));
    }
    Job job = {operation, (char*)data, n, element_bytes};
    dist.jobs[dist.queued++] = job;
    pthread_cond_broadcast(&dist.changed);
    pthread_mutex_unlock(&dist.mutex);
}

void dist_open(void) {
    if (ranks.size == 1) { return; }
    MPI_Comm_dup(MPI_COMM_WORLD, &dist.network);
    dist.counts = (int*)xcalloc(ranks.size, sizeof(int));
    dist.begins = (int*)xcalloc(ranks.size, sizeof(int));
    if (pthread_create(&dist.thread, NULL, run_jobs, NULL) != 0) {
        fatal("cannot start a thread: %s", strerror(errno));
    }
    dist.open = true;
}

void dist_close(void) {
    if (!dist.open) { return; }
    dist_wait();
    pthread_mutex_lock(&dist.mutex);
    dist.stop = true;
    pthread_cond_broadcast(&dist.changed);
    pthread_mutex_unlock(&dist.mutex);
    pthread_join(dist.thread, NULL);
    MPI_Comm_free(&dist.network);
    free(dist.jobs), free(dist.counts), free(dist.begins), free(dist.scratch);
    dist.open = false;
}

void dist_wait(void) {
    if (!dist.open) { return; }
    pthread_mutex_lock(&dist.mutex);
    dist.waiting = true;
    while (dist.done < dist.queued) { pthread_cond_wait(&dist.changed, &dist.mutex); }
    dist.waiting = false;
    dist.done = dist.queued = 0;
    pthread_mutex_unlock(&dist.mutex);
}

#else

// without MPI there is one rank
static void enqueue(DistOperation operation, void* data, size_t n, size_t element_bytes) {
    (void)operation, (void)data, (void)n, (void)element_bytes;
    assert(ranks.size == 1);
}
void dist_open(void) {}
void dist_close(void) {}
void dist_wait(void) {}

#endif

void dist_all_reduce(float* data, size_t n) { enqueue(ALL_REDUCE, data, n, sizeof(float)); }

void dist_reduce_scatter(float* data, size_t n) { enqueue(REDUCE_SCATTER, data, n, sizeof(float)); }

void dist_all_gather(void* data, size_t n, size_t element_bytes) { enqueue(ALL_GATHER, data, n, element_bytes); }
