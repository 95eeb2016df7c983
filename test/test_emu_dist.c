/*
Training on several emulated GPUs, through the emulated NCCL, with ranks that mpirun starts or that the environment
names: the same numbers as one GPU; checkpoints for any number of ranks and for the CPU; ranks that fail or are missing.
*/
#include "dist_util.h"

#include <arpa/inet.h>
#include <sys/socket.h>

static const double CLOSE = 1e-6;
static const char FP32[] = EMU_FOLDER "/plain_fp32/train_gpt", BF16[] = EMU_FOLDER "/plain/train_gpt";

// As DIST_MODEL, with few steps, for the emulator is slow: 6 micro-batches of 16 tokens a step.
#define EMU_MODEL                                                                                                \
    "--dim 32 --n_heads 4 --n_kv_heads 1 --ffn_dim 56 --batch_size 1 --sequence_length 16 --tokens_per_step 96 " \
    "--num_iterations 4 --checkpoint_every 2 --keep_checkpoints 9 --val_tokens 96 --val_loss_every 2 "           \
    "--position_encoding rotary "

// ----------------------------------------------------------------------------
// ranks by the environment

typedef struct {
    Run rank[MOST_RANKS];
    size_t count;
} Job;

// Ports that no other job of this program has; most are free on a machine that runs tests.
static int next_port(void) {
    static int port;
    if (port == 0) { port = 20000 + (int)getpid() % 10000; }
    return port++;
}

static Run start_rank(const char* program, size_t rank, size_t size, int port, const char* flags) {
    char* command = text("env RANK=%zu WORLD_SIZE=%zu MASTER_PORT=%d %s %s", rank, size, port, program, flags);
    Run r = start_ranks(command);
    free(command);
    return r;
}

static Job start_job(const char* program, size_t size, int port, const char* flags) {
    Job job;
    job.count = size;
    for (size_t i = size; i-- > 0;) { job.rank[i] = start_rank(program, i, size, port, flags); }
    return job;
}

static void finish_job(Job* job) {
    for (size_t i = 0; i < job->count; i++) { finish_ranks(&job->rank[i]); }
}

static void free_job(Job* job) {
    for (size_t i = 0; i < job->count; i++) { run_free(&job->rank[i]); }
}

static void train_job(const char* program, size_t size, const char* log, const char* flags) {
    char* all = dist_flags(log, flags);
    Job job = start_job(program, size, next_port(), all);
    finish_job(&job);
    for (size_t i = 0; i < size; i++) {
        assert_success(&job.rank[i], all);
        assert_string_equal(job.rank[i].err, "");
        if (i > 0) { assert_string_equal(job.rank[i].out, ""); }
    }
    assert_non_null(strstr(job.rank[0].out, " by environment"));
    free_job(&job);
    free(all);
}

static char* emu_folder(const char* log) { return run_file(log, "rotary", ""); }

static void assert_close_logs(const char* log, const char* other, double bound) {
    char *a = emu_folder(log), *b = emu_folder(other);
    assert_close(a, b, bound, bound);
    free(a), free(b);
}

static void assert_identical_logs(const char* log, const char* other) {
    char *a = emu_folder(log), *b = emu_folder(other);
    assert_identical(a, b);
    free(a), free(b);
}

// ----------------------------------------------------------------------------
// the same numbers

static void test_fp32_same_as_one_rank(void** state) {
    (void)state;
    train_ranks_quietly(FP32, 0, "alone", EMU_MODEL);
    train_ranks_quietly(FP32, 3, "mpi3", EMU_MODEL "--zero_stage 1");
    train_job(FP32, 3, "env3", EMU_MODEL "--zero_stage 1");
    train_job(FP32, 3, "env3_whole", EMU_MODEL "--overlap_communication 0");
    train_job(FP32, 2, "env2", EMU_MODEL "--zero_stage 1 --overlap_communication 0");
    assert_close_logs("mpi3", "alone", CLOSE);
    assert_close_logs("env2", "alone", CLOSE);
    assert_identical_logs("env3", "mpi3");
    assert_identical_logs("env3_whole", "mpi3");
}

static void test_bf16_ways_agree(void** state) {
    (void)state;
    train_ranks_quietly(BF16, 2, "bf16_mpi", EMU_MODEL "--zero_stage 1");
    train_job(BF16, 2, "bf16_env", EMU_MODEL "--zero_stage 1");
    assert_identical_logs("bf16_mpi", "bf16_env");
}

// Collectives (EMU_LATE=1), or kernels (2), as late as the order of streams and events allows: what had not waited for
// them would compute with the wrong numbers.
static void test_streams_wait(void** state) {
    (void)state;
    static const char* const logs[] = {"late0", "late1", "late2"};
    for (size_t i = 0; i < 3; i++) {
        setenv("EMU_LATE", logs[i] + 4, 1);
        train_ranks_quietly(FP32, 2, logs[i], EMU_MODEL "--zero_stage 1");
        if (i > 0) { assert_identical_logs(logs[i], logs[0]); }
    }
    unsetenv("EMU_LATE");
}

// What 2 emulated ranks with shards have saved in bf16 goes on on one rank and on the CPU.
static void test_resume_elsewhere(void** state) {
    (void)state;
    static const char* const programs[] = {EMU_FOLDER "/plain/train_gpt", "./train_gpt"};
    char *whole = emu_folder("bf16_mpi"), *want = text("%s/train.log", whole);
    double losses[2][5];
    assert_int_equal(csv_column(want, 2, losses[0], 5), 4);
    for (size_t i = 0; i < 2; i++) {
        char *cut = text("%s/elsewhere%zu", scratch, i), *log = text("%s/train.log", cut);
        copy_tree(whole, cut);
        char* flags = text("%s --checkpoint %s/checkpoints/step_%09d --checkpoint_args --zero_stage 0%s", programs[i],
                           cut, 2, i ? " --device auto --dtype float32" : "");
        Run r = start_ranks(flags);
        finish_ranks(&r);
        assert_success(&r, flags);
        assert_non_null(strstr(r.out, "at step 2"));
        assert_int_equal(csv_column(log, 2, losses[1], 5), 4);
        // the first loss after the checkpoint feels only bf16's rounding of activations
        for (size_t k = 2; k < 4; k++) { assert_error_below(fabs(losses[1][k] / losses[0][k] - 1), 2e-3); }
        run_free(&r);
        free(cut), free(log), free(flags);
    }
    free(whole), free(want);
}

// ----------------------------------------------------------------------------
// ranks that fail

// Each of the others says who and why, and ends within seconds.
static void test_killed_rank(void** state) {
    (void)state;
    char* flags = dist_flags("killed", EMU_MODEL "--num_iterations 10000 --val_loss_every 0");
    for (size_t victim = 0; victim < 3; victim += 2) {
        Job job = start_job(FP32, 3, next_port(), flags);
        assert_true(read_until(&job.rank[0], "2/10000"));
        double started = wall_seconds();
        kill(job.rank[victim].pid, SIGKILL);
        finish_job(&job);
        assert_error_below(wall_seconds() - started, 60);  // 3 on cores of their own
        for (size_t i = 0; i < 3; i++) {
            if (i == victim) { continue; }
            char* words = text("rank %zu of 3", victim);
            if (!exited_with(&job.rank[i], 1) || !strstr(job.rank[i].err, words)) {
                print_error("rank %zu, status %d: %s", i, job.rank[i].status, job.rank[i].err);
            }
            assert_true(exited_with(&job.rank[i], 1));
            assert_non_null(strstr(job.rank[i].err, words));
            free(words);
        }
        free_job(&job);
    }
    free(flags);
}

static void test_stopped_job(void** state) {
    (void)state;
    char* flags = dist_flags("stopped", EMU_MODEL "--num_iterations 10000 --val_loss_every 0 --checkpoint_every 0");
    Job job = start_job(FP32, 2, next_port(), flags);
    assert_true(read_until(&job.rank[0], "2/10000"));
    kill(job.rank[1].pid, SIGTERM);  // to one is enough
    finish_job(&job);
    for (size_t i = 0; i < 2; i++) {
        if (!exited_with(&job.rank[i], 128 + SIGTERM)) { print_error("rank %zu: %s\n", i, job.rank[i].err); }
        assert_true(exited_with(&job.rank[i], 128 + SIGTERM));
    }
    assert_int_equal(count_words(job.rank[0].out, "saved step"), 1);
    free_job(&job);
    free(flags);
}

static void test_missing_rank(void** state) {
    (void)state;
    char* flags = dist_flags("missing", EMU_MODEL);
    setenv("RENDEZVOUS_TIMEOUT", "2", 1);
    int port = next_port();
    // rank 1 never comes; then rank 1 looks for rank 0 at another port
    Run r = start_rank(FP32, 0, 2, port, flags);
    finish_ranks(&r);
    assert_refused(&r, "rank");
    assert_non_null(strstr(r.err, "1 of 2"));
    run_free(&r);
    Run zero = start_rank(FP32, 0, 2, port, flags), one = start_rank(FP32, 1, 2, next_port(), flags);
    finish_ranks(&zero), finish_ranks(&one);
    assert_refused(&zero, "rank");
    assert_refused(&one, "MASTER_PORT");
    run_free(&zero), run_free(&one);
    unsetenv("RENDEZVOUS_TIMEOUT");
    free(flags);
}

static void wait_for_port(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (double started = wall_seconds(); wall_seconds() - started < 120; usleep(50000)) {
        int s = socket(AF_INET, SOCK_STREAM, 0);
        bool open = connect(s, (struct sockaddr*)&address, sizeof address) == 0;
        close(s);
        if (open) { return; }
    }
    fail_msg("nobody listens at port %d", port);
}

// Two jobs with one port: the second rank 0 is refused; a rank that strays into the other job is found out.
static void test_port_in_use(void** state) {
    (void)state;
    char *flags = dist_flags("port", EMU_MODEL), *second = dist_flags("port2", EMU_MODEL);
    int port = next_port();
    char* number = text("%d", port);
    Run zero = start_rank(FP32, 0, 2, port, flags);
    wait_for_port(port);
    Run r = start_rank(FP32, 0, 2, port, second);
    finish_ranks(&r);
    assert_refused(&r, number);
    run_free(&r);
    Run one = start_rank(FP32, 1, 2, port, flags);
    finish_ranks(&zero), finish_ranks(&one);
    assert_success(&zero, flags), assert_success(&one, flags);
    run_free(&zero), run_free(&one);

    zero = start_rank(FP32, 0, 2, port, flags), one = start_rank(FP32, 1, 2, port, second);
    finish_ranks(&zero), finish_ranks(&one);
    assert_refused(&zero, "rank 1 has other arguments than rank 0");
    assert_true(exited_with(&one, 1));
    run_free(&zero), run_free(&one);
    free(flags), free(second), free(number);
}

// A Slurm step whose job has a number of ten digits and whose hosts are in brackets.
static void test_slurm_variables(void** state) {
    (void)state;
    char* flags = dist_flags("slurm", EMU_MODEL);
    Run ranks[2];
    for (size_t i = 0; i < 2; i++) {
        char* command = text(
            "env SLURM_PROCID=%zu SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=%zu SLURM_JOB_ID=4123456789 "
            "SLURM_STEP_ID=4294967290 SLURM_STEP_NODELIST=127.[0-3].0.[1,5-7],other[1-2] %s %s",
            i, i, FP32, flags);
        ranks[i] = start_ranks(command);
        free(command);
    }
    for (size_t i = 0; i < 2; i++) {
        finish_ranks(&ranks[i]);
        assert_success(&ranks[i], flags);
        run_free(&ranks[i]);
    }
    free(flags);
}

// A number beyond the host's GPUs is not a rank too many.
static void test_local_rank_beyond_the_gpus(void** state) {
    (void)state;
    char* flags = dist_flags("beyond", EMU_MODEL);
    Run r[2];
    int port = next_port();
    for (size_t i = 0; i < 2; i++) {
        char* command =
            text("env RANK=%zu WORLD_SIZE=2 LOCAL_RANK=%zu MASTER_PORT=%d %s %s", i, 7 * i, port, FP32, flags);
        r[i] = start_ranks(command);
        free(command);
    }
    for (size_t i = 0; i < 2; i++) { finish_ranks(&r[i]); }
    assert_error_once(&r[1], "local rank 7|3 GPUs|0 to 2");
    assert_true(exited_with(&r[0], 1) && exited_with(&r[1], 1));
    for (size_t i = 0; i < 2; i++) { run_free(&r[i]); }
    free(flags);
}

// Every rank that the environment names can be asked for help.
static void test_help(void** state) {
    (void)state;
    Job job = start_job(FP32, 2, next_port(), "--help");
    finish_job(&job);
    for (size_t i = 0; i < 2; i++) { assert_success(&job.rank[i], "--help"); }
    assert_non_null(strstr(job.rank[0].out, "--zero_stage"));
    assert_string_equal(job.rank[1].out, "");
    free_job(&job);
}

static void test_refusals(void** state) {
    (void)state;
    static const struct {
        const char *environment, *flags, *words;
    } rows[] = {
        {"RANK=5 WORLD_SIZE=4", "", "rank 5 of 4|WORLD_SIZE|0 to 3"},
        {"RANK=x WORLD_SIZE=2", "", "RANK=x|expected a number"},
        {"WORLD_SIZE=2", "", "RANK and WORLD_SIZE belong together"},
        {"RANK=0 WORLD_SIZE=2 MASTER_PORT=99999", "", "MASTER_PORT=99999|65535"},
        {"OMPI_COMM_WORLD_SIZE=4", "", "mpirun started 4 processes|MPI knows 1"},
    };
    char* flags = dist_flags("refused", EMU_MODEL);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char* command = text("env %s %s %s %s", rows[i].environment, FP32, flags, rows[i].flags);
        Run r = start_ranks(command);
        finish_ranks(&r);
        assert_refused(&r, rows[i].words);
        run_free(&r);
        free(command);
    }
    // every rank needs a GPU of its own
    char* one = text("%s --device cuda:0", flags);
    Run r = run_mpi(FP32, 2, one);
    assert_error_once(&r, "--device cuda:0|2 ranks");
    run_free(&r);
    char* four = text("%s --tokens_per_step 64 --val_tokens 64", flags);
    r = run_mpi(FP32, 4, four);
    assert_error_once(&r, "4 ranks|3 GPUs");
    run_free(&r);
    setenv("EMU_DEVICES", "1", 1);  // as where a launcher shows each rank a GPU of its own, but here it is the same
    r = run_mpi(FP32, 2, flags);
    assert_error_once(&r, "ranks 0 and 1 are on the same GPU|one rank for each GPU|CUDA_VISIBLE_DEVICES");
    run_free(&r);
    setenv("EMU_DEVICES", "3", 1);
    free(flags), free(one), free(four);
}

int main(void) {
    dist_create();
    setenv("EMU_DEVICES", "3", 1);
    setenv("EMU_MEMORY", "268435456", 1);
    setenv("EMU_PROTECT", "1", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fp32_same_as_one_rank),
        cmocka_unit_test(test_bf16_ways_agree),
        cmocka_unit_test(test_streams_wait),
        cmocka_unit_test(test_resume_elsewhere),
        cmocka_unit_test(test_killed_rank),
        cmocka_unit_test(test_stopped_job),
        cmocka_unit_test(test_missing_rank),
        cmocka_unit_test(test_port_in_use),
        cmocka_unit_test(test_slurm_variables),
        cmocka_unit_test(test_local_rank_beyond_the_gpus),
        cmocka_unit_test(test_help),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
