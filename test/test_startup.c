/*
What every program does first and last: standard streams that are missing take no file's place, text that cannot be
written is an error, and OpenMP's threads spin for a short while only, unless the user has chosen.
*/
#include "train_util.h"

#define TRAIN "--data_dir data --dataset easy " TINY " --tokens_per_step 64 --num_iterations 3"

// A shell's command in SCRATCH, with the programs' paths in $B; its status.
static int shell(const char* format, const char* command, const char* redirection) {
    char *rest = text(format, command, redirection), *here = realpath(".", NULL);
    char* line = text("cd %s && B=%s && %s", scratch, here, rest);
    int status = system(line);
    if (!WIFEXITED(status)) { print_error("%s: wait status %d\n", line, status); }
    assert_true(WIFEXITED(status));
    free(line), free(rest), free(here);
    return WEXITSTATUS(status);
}

static char* scratch_text(const char* name) {
    char *path = text("%s/%s", scratch, name), *content = read_text(path, NULL);
    free(path);
    return content;
}

static void assert_same(const char* a, const char* b) {
    char *x = text("%s/%s", scratch, a), *y = text("%s/%s", scratch, b);
    assert_same_file(x, y);
    free(x), free(y);
}

// ----------------------------------------------------------------------------
// streams

// The same files come out, byte by byte where they hold no times, whichever streams are there.
static void test_missing_streams(void** state) {
    (void)state;
    static const char* const redirections[] = {"</dev/null >/dev/null 2>/dev/null", "<&- >&- 2>&-", ">&- 2>&-", "2>&-"};
    for (size_t i = 0; i < 4; i++) {
        char* log = text("streams_%zu", i);
        char* prepare = text("$B/dataset/prepare --input corpus.txt --tokenizer bytes --out data/shards_%zu", i);
        assert_int_equal(shell("%s %s", prepare, redirections[i]), 0);
        char* train = text("$B/train_gpt " TRAIN " --dataset shards_0 --log_dir %s", log);
        assert_int_equal(shell("%s %s", train, redirections[i]), 0);
        char* synthetic = text("$B/dataset/synthetic --bytes 20000 --out synthetic_%zu.txt", i);
        assert_int_equal(shell("%s %s", synthetic, redirections[i]), 0);
        char* evaluate = text(
            "$B/evaluate --log_dir %s/l2/nope/version_00 --tokenizer bytes --data_dir data "
            "--passkey_seq_lens 200 --passkey_sample_size 1",
            log);
        assert_int_equal(shell("%s %s", evaluate, redirections[i]), 0);
        if (i > 0) {
            char *first = text("%s/streams_0/l2/nope/version_00", scratch),
                 *this = text("%s/%s/l2/nope/version_00", scratch, log);
            assert_identical(first, this);
            char *shard = text("data/shards_%zu/shards_%zu_000000.bin", i, i), *corpus = text("synthetic_%zu.txt", i);
            assert_same("data/shards_0/shards_0_000000.bin", shard);
            assert_same("synthetic_0.txt", corpus);
            char *a = text("%s/results.json", first), *b = text("%s/results.json", this);
            assert_true(file_exists(a) && file_exists(b));
            free(first), free(this), free(shard), free(corpus), free(a), free(b);
        }
        free(log), free(train), free(prepare), free(synthetic), free(evaluate);
    }
}

// One line says that the output is incomplete, with status 1; what the program was for is done all the same.
static void test_output_that_cannot_be_written(void** state) {
    (void)state;
    static const char* const commands[] = {
        "$B/train_gpt --help",
        "$B/evaluate --help",
        "$B/dataset/prepare --help",
        "$B/dataset/inspect --help",
        "$B/dataset/synthetic --help",
        "$B/train_gpt " TRAIN " --log_dir full",
        "$B/dataset/prepare --input corpus.txt --tokenizer bytes --out data/full",
        "$B/dataset/inspect data/easy/part_0000.bin",
    };
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        assert_int_equal(shell("%s >/dev/full 2>%s", commands[i], "err"), 1);
        char* err = scratch_text("err");
        char* said = strstr(err, "error: cannot write to standard output: ");
        assert_true(said && count_words(err, "error: ") == 1 && strchr(said, '\n')[1] == '\0');
        free(err);
    }
    char *model = run_file("full", "nope", "model.safetensors"), *shard = text("%s/data/full/full_000000.bin", scratch);
    assert_true(file_exists(model) && file_exists(shard));
    // an error that is told already stays the only one
    assert_int_equal(shell("%s >/dev/full 2>%s", "$B/train_gpt --seed x", "err"), 1);
    char* err = scratch_text("err");
    assert_true(strncmp(err, "error: --seed", 13) == 0 && count_words(err, "error: ") == 1);
    free(model), free(shard), free(err);
}

// A reader that leaves does not end the training, which then says so.
static void test_closed_pipe(void** state) {
    (void)state;
    char* command = text("{ $B/train_gpt " TRAIN " --log_dir %s 2>err; echo $? >status; } | true", "pipe");
    shell("%s%s", command, "");
    char *status = scratch_text("status"), *err = scratch_text("err");
    char* model = run_file("pipe", "nope", "model.safetensors");
    assert_string_equal(status, "1\n");
    assert_true(strncmp(err, "error: cannot write to standard output: ", 40) == 0 && count_words(err, "\n") == 1);
    assert_true(file_exists(model));
    free(command), free(status), free(err), free(model);
}

// ----------------------------------------------------------------------------
// waiting

#ifdef _OPENMP
// What libgomp has taken is what counts; another OpenMP library has other names for it.
static void test_spinning_is_short(void** state) {
    (void)state;
    static const struct {
        const char *environment, *program, *words;
    } rows[] = {
        {"", "train_gpt", "GOMP_SPINCOUNT = '5000'"},
        {"", "evaluate", "GOMP_SPINCOUNT = '5000'"},
        {"GOMP_SPINCOUNT=77", "train_gpt", "GOMP_SPINCOUNT = '77'"},
        {"OMP_WAIT_POLICY=active", "train_gpt", "OMP_WAIT_POLICY = 'ACTIVE'"},
        {"OMP_WAIT_POLICY=passive", "evaluate", "GOMP_SPINCOUNT = '0'"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char* clean = text("env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT OMP_DISPLAY_ENV=verbose %s $B/%s --help",
                           rows[i].environment, rows[i].program);
        assert_int_equal(shell("%s >out 2>%s", clean, "err"), 0);
        char* err = scratch_text("err");
        char* last = err;  // the program that starts itself again says it twice
        for (char* next; (next = strstr(last + 1, "OPENMP DISPLAY ENVIRONMENT BEGIN"));) { last = next; }
        if (strstr(err, "GOMP_") && !strstr(last, rows[i].words)) {
            print_error("%s %s: %s\n", rows[i].environment, rows[i].program, last);
            fail();
        }
        free(clean), free(err);
    }
}

// Arguments, name, and the way it was found are what they would be without.
static void test_restart_leaves_no_trace(void** state) {
    (void)state;
    static const char* const ways[] = {
        "env -u OMP_WAIT_POLICY GOMP_SPINCOUNT=1000 $B/train_gpt --dataset 'a  b'",
        "env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT $B/train_gpt --dataset 'a  b'",
        "env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT PATH=$B:$PATH train_gpt --dataset 'a  b'",
        "bash -c 'unset OMP_WAIT_POLICY; exec -a another $B/train_gpt --dataset \"a  b\"'",
    };
    char* first = NULL;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        assert_int_equal(shell("export B; %s >out 2>%s", ways[i], "err"), 1);
        char* err = scratch_text("err");
        if (!first) { first = xstrdup(err); }
        assert_string_equal(err, first);
        free(err);
    }
    free(first);
}
#endif

int main(void) {
    scratch_create();
    setenv("OMP_NUM_THREADS", "1", 0);
    char* corpus = text("%s/corpus.txt", scratch);
    FILE* f = fopen(corpus, "w");
    for (int i = 0; i < 300; i++) { fprintf(f, "Document %d.\n\n", i); }
    fclose(f);
    free(corpus);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_missing_streams),   cmocka_unit_test(test_output_that_cannot_be_written),
        cmocka_unit_test(test_closed_pipe),
#ifdef _OPENMP
        cmocka_unit_test(test_spinning_is_short), cmocka_unit_test(test_restart_leaves_no_trace),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
