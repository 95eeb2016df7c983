/*
Tests of training on several ranks: starting the program under mpirun or, rank by rank, through the environment, and
comparing what such runs leave behind with what one process does.
*/
#ifndef DIST_UTIL_H
#define DIST_UTIL_H

#include "train_util.h"

enum { MOST_RANKS = 4 };

// 12 micro-batches of 24 tokens a step: 1, 2, 3 and 4 ranks divide them. With 32 channels, 4 heads and 1 for keys the
// matrices of a layer do not divide by 3 x 16, the shards' unit; the vocabulary's rows in memory end in padding.
#define DIST_MODEL                                                                                                \
    " --model_size l2 --ffn_dim 56 --batch_size 1 --sequence_length 24 --tokens_per_step 288 --num_iterations 8 " \
    "--val_tokens 288 --val_tokens_padding 0 --val_loss_every 4 --learning_rate 1e-3 --dataset wide --tokenizer bytes"

static inline uint32_t wide_token(size_t position, Random* r) {
    return position % 41 == 0 ? BYTES_BOS : (uint32_t)(random_uniform(r) * 400);
}

// SCRATCH/ROOT/wide: a vocabulary of 400, in two shards.
static inline void make_wide_dataset(const char* root, size_t tokens) {
    Folder folder;
    memset(&folder, 0, sizeof folder);
    snprintf(folder.path, sizeof folder.path, "%s/%s/wide", scratch, root);
    make_directories(folder.path);
    Random random = random_stream(2, 1);
    uint32_t* ids = (uint32_t*)xcalloc(tokens, sizeof(uint32_t));
    for (size_t s = 0; s < 2; s++) {
        for (size_t i = 0; i < tokens; i++) { ids[i] = wide_token(s * tokens + i, &random); }
        ShardInfo info = {2, tokens, 400, BYTES_BOS, BYTES_EOS, 1};
        write_shard(&folder, s ? "part_0001.bin" : "part_0000.bin", &info, ids);
    }
    free(ids);
}

static inline void dist_create(void) {
    scratch_create();
    make_wide_dataset("data", 6000);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
}

// ----------------------------------------------------------------------------
// running

static pid_t watched;

static inline void on_hang(int number) {
    (void)number;
    kill(watched, SIGTERM);
    alarm(5);
}

// Starts a command that may wait for ever: after four minutes it is ended, a status that no test expects.
static inline Run start_ranks(const char* command) {
    Run r = start_command(command);
    watched = r.pid;
    signal(SIGALRM, on_hang);
    alarm(240);
    return r;
}

static inline void finish_ranks(Run* r) {
    finish_train(r);
    alarm(0);
}

#define MPIRUN "mpirun --oversubscribe --bind-to none"

static inline Run start_mpi(const char* program, size_t ranks, const char* flags) {
    char* command = text(MPIRUN " -np %zu %s %s", ranks, program, flags);
    Run r = start_ranks(command);
    free(command);
    return r;
}

static inline Run run_mpi(const char* program, size_t ranks, const char* flags) {
    Run r = start_mpi(program, ranks, flags);
    finish_ranks(&r);
    return r;
}

static inline void assert_success(const Run* r, const char* what) {
    if (!exited_with(r, 0)) { print_error("%s\nwait status %d\n%s%s\n", what, r->status, r->out, r->err); }
    assert_true(exited_with(r, 0));
}

// --data_dir, --log_dir and the flags of a model of DIST_MODEL; release with free().
static inline char* dist_flags(const char* log, const char* flags) {
    return text("--data_dir %s/data --log_dir %s/%s" DIST_MODEL " %s", scratch, scratch, log, flags);
}

// Trains to the end, with one process where ranks is 0; the output is the caller's.
static inline Run train_ranks(const char* program, size_t ranks, const char* log, const char* flags) {
    char *all = dist_flags(log, flags), *alone = text("%s %s", program, all);
    Run r = ranks ? start_mpi(program, ranks, all) : start_ranks(alone);
    finish_ranks(&r);
    assert_success(&r, all);
    free(all), free(alone);
    return r;
}

static inline void train_ranks_quietly(const char* program, size_t ranks, const char* log, const char* flags) {
    Run r = train_ranks(program, ranks, log, flags);
    run_free(&r);
}

// The processes that a process has started; returns how many.
static inline size_t children_of(pid_t parent, pid_t* children, size_t most) {
    char *path = text("/proc/%d/task/%d/children", (int)parent, (int)parent), *list = read_text(path, NULL);
    size_t n = 0;
    for (char *word = list, *end; n < most; word = end) {
        long pid = strtol(word, &end, 10);
        if (end == word) { break; }
        children[n++] = (pid_t)pid;
    }
    free(path), free(list);
    return n;
}

// ----------------------------------------------------------------------------
// comparing

// Largest relative difference of a column of two logs; NaN equals NaN.
static inline double column_distance(const char* a, const char* b, unsigned column) {
    enum { MOST = 200 };
    double x[MOST], y[MOST], worst = 0;
    size_t n = csv_column(a, column, x, MOST), m = csv_column(b, column, y, MOST);
    assert_int_equal(n, m);
    assert_true(n > 0);
    for (size_t i = 0; i < n; i++) {
        if (isnan(x[i]) && isnan(y[i])) { continue; }
        double d = fabs(x[i] - y[i]) / fmax(fabs(y[i]), 1e-30);
        worst = isnan(d) ? INFINITY : fmax(worst, d);
    }
    return worst;
}

// What two runs differ in, all relative: the logs; the weights and moments of everything but priors; those of priors
// and of forget gates, whose gradients are sums of the same kind.
typedef struct {
    double logs, tensors, priors;
} Distance;

static inline Distance run_distance(const char* a, const char* b) {
    static const char* const files[] = {"model.safetensors", "optimizer.safetensors"};
    static const struct {
        const char* log;
        unsigned column;
    } columns[] = {{"train.log", 2}, {"train.log", 3}, {"train.log", 4}, {"eval.log", 2}};
    Distance d = {0, 0, 0};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) {
        char *x = text("%s/%s", a, columns[i].log), *y = text("%s/%s", b, columns[i].log);
        d.logs = fmax(d.logs, column_distance(x, y, columns[i].column));
        free(x), free(y);
    }
    for (size_t f = 0; f < 2; f++) {
        char *path_a = text("%s/%s", a, files[f]), *path_b = text("%s/%s", b, files[f]);
        SafeTensors x = safetensors_open(path_a), y = safetensors_open(path_b);
        assert_int_equal(x.count, y.count);
        for (size_t i = 0; i < x.count; i++) {
            const SafeTensor* t = &x.tensors[i];
            double* sum = strstr(t->name, "prior.") || strstr(t->name, ".forget.") ? &d.priors : &d.tensors;
            *sum = fmax(*sum, tensor_distance(t, safetensors_find(&y, t->name), 1e-30));
        }
        safetensors_close(&x), safetensors_close(&y);
        free(path_a), free(path_b);
    }
    return d;
}

static inline void assert_close(const char* a, const char* b, double bound, double prior_bound) {
    Distance d = run_distance(a, b);
    if (!(d.logs <= bound && d.tensors <= bound && d.priors <= prior_bound)) {
        print_error("%s against %s: logs %g, tensors %g of %g, priors %g of %g\n", a, b, d.logs, d.tensors, bound,
                    d.priors, prior_bound);
        fail();
    }
}

// ----------------------------------------------------------------------------
// errors

// The job ended with an error, said once and with all the words that | separates.
static inline void assert_error_once(const Run* r, const char* words) {
    const char* error = strstr(r->err, "error: ");
    bool good = WIFEXITED(r->status) && WEXITSTATUS(r->status) != 0 && error && count_words(r->err, "error: ") == 1;
    char* line = error ? text("%.*s", (int)strcspn(error, "\n"), error) : xstrdup("");
    char *list = xstrdup(words), *at = NULL;
    for (char* word = strtok_r(list, "|", &at); word; word = strtok_r(NULL, "|", &at)) {
        good = good && strstr(line, word);
    }
    if (!good) { print_error("expected one error with '%s', got status %d: %s\n", words, r->status, r->err); }
    assert_true(good);
    free(list), free(line);
}

#endif
