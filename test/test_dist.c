/*
Training on several ranks on the CPU, through MPI: the same numbers as one process, whatever the number of ranks and
the optimiser's shards; going on with another number of ranks; and the end of a job in which one rank fails.
*/
#include "dist_util.h"

// fp32 with sums in another order: 6e-8 a rounding, a few of which add up.
static const double CLOSE = 1e-6;
static const char PROGRAM[] = "./train_gpt";

// ----------------------------------------------------------------------------
// the same as one process

typedef struct {
    size_t ranks, zero, overlap;
} Layout;

static const struct {
    const char *encoding, *flags;
    Layout layouts[6];
} cases[] = {
    {"bam_ssmax",
     "--dim 32 --n_heads 4 --n_kv_heads 1 --global_prior --theta_mu_trainable --weight_decay 0.1 --checkpoint_every 4 "
     "--keep_checkpoints 9 --debug_batches",
     {{2, 0, 1}, {3, 0, 1}, {3, 1, 1}, {4, 0, 0}, {4, 1, 1}, {1, 1, 1}}},
    {"rotary",
     "--dim 24 --n_heads 3 --n_kv_heads 1 --optimizer adamw --weight_decay 0.1 --recompute 1",
     {{2, 1, 0}, {3, 0, 0}, {3, 1, 0}}},
    {"alibi",
     "--dim 40 --n_heads 5 --grad_clip 0.1 --lr_scheduler linear --learning_rate_decay_frac 0.5 --warmup_iters 3",
     {{3, 1, 1}, {4, 1, 0}}},
    {"bam", "--dim 24 --n_heads 3 --n_layers 3 --prior_lr 1e-2", {{3, 1, 1}}},
    {"mix_ssmax", "--dim 32 --n_heads 4 --n_kv_heads 2 --mix_rank 6 --mix_length 10", {{3, 1, 1}}},
    {"learned", "--dim 24 --n_heads 3 --weight_decay 0.1", {{3, 1, 1}}},
    {"rotary_ssmax",
     "--dim 24 --n_heads 3 --n_kv_heads 1 --softcap 2 --sinks --window 9 --final_softcap 5 --qk_norm --gated_attention",
     {{2, 0, 1}, {3, 1, 1}}},
    {"rotary+bam_ssmax+nope", "--layer_encodings rotary,bam_ssmax,nope --n_layers 3 --recompute 1", {{2, 1, 1}}},
    {"fox", "--dim 24 --n_heads 3 --weight_decay 0.1", {{3, 1, 1}}},
};
enum { CASES = sizeof cases / sizeof *cases };

static char* case_flags(size_t c, Layout layout) {
    const bool differ = strchr(cases[c].encoding, '+') != NULL;  // then the flags say it
    return text("%s %s %s --zero_stage %zu --overlap_communication %zu", differ ? "" : "--position_encoding",
                differ ? "" : cases[c].encoding, cases[c].flags, layout.zero, layout.overlap);
}

static char* layout_log(size_t c, Layout l) { return text("case%zu_%zu_%zu_%zu", c, l.ranks, l.zero, l.overlap); }

static char* case_folder(size_t c, Layout layout) {
    char *log = layout_log(c, layout), *folder = run_file(log, cases[c].encoding, "");
    free(log);
    return folder;
}

static const Layout ALONE = {0, 0, 1};

static void train_case(size_t c, Layout layout) {
    char *log = layout_log(c, layout), *flags = case_flags(c, layout);
    Run r = train_ranks(PROGRAM, layout.ranks, log, flags);
    assert_string_equal(r.err, "");
    run_free(&r);
    free(log), free(flags);
}

// The derivative of a prior's parameter is a sum over all pairs of positions, whose terms cancel almost wholly: what is
// left feels every rounding. Returns what batches of another size make of it in one process, and room for bad luck.
static double prior_bound(size_t c, const char* alone) {
    static const size_t sizes[] = {2, 12};
    double worst = 0;
    const bool needed = strstr(cases[c].encoding, "bam") || strstr(cases[c].encoding, "fox");
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && needed; i++) {
        char *base = case_flags(c, ALONE), *flags = text("%s --batch_size %zu", base, sizes[i]);
        char *log = text("case%zu_batch%zu", c, sizes[i]), *folder = run_file(log, cases[c].encoding, "");
        train_ranks_quietly(PROGRAM, 0, log, flags);
        Distance d = run_distance(folder, alone);
        worst = fmax(worst, d.priors);
        free(base), free(flags), free(log), free(folder);
    }
    return 4 * worst;
}

static void test_same_as_one_process(void** state) {
    (void)state;
    for (size_t c = 0; c < CASES; c++) {
        char* alone = case_folder(c, ALONE);
        train_case(c, ALONE);
        double priors = prior_bound(c, alone);
        for (size_t i = 0; i < 6 && cases[c].layouts[i].ranks; i++) {
            train_case(c, cases[c].layouts[i]);
            char* folder = case_folder(c, cases[c].layouts[i]);
            assert_close(folder, alone, CLOSE, priors);
            free(folder);
        }
        free(alone);
    }
}

// With as many ranks: how the optimiser is sharded and when sums are made changes no bit, nor does another run.
static void test_same_bits(void** state) {
    (void)state;
    static const Layout pairs[][2] = {{{3, 0, 1}, {3, 1, 1}}, {{4, 0, 0}, {4, 1, 1}}, {{1, 1, 1}, {0, 0, 1}}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        char *a = case_folder(0, pairs[i][0]), *b = case_folder(0, pairs[i][1]);
        assert_identical(a, b);
        free(a), free(b);
    }
    const Layout again = {3, 1, 1};
    char *folder = case_folder(0, again), *before = text("%s/before", scratch);
    copy_tree(folder, before);
    remove_tree(folder);
    train_case(0, again);
    assert_identical(folder, before);
    free(folder), free(before);
}

// ----------------------------------------------------------------------------
// batches

// Hashes of batches.log, or of a rank's, by step and micro-batch; returns how many.
static size_t read_batches(const char* folder, size_t rank, size_t per_step, unsigned long long* hashes, size_t most) {
    char* path = rank ? text("%s/batches.rank%zu.log", folder, rank) : text("%s/batches.log", folder);
    FILE* f = fopen(path, "r");
    assert_non_null(f);
    size_t n = 0, step, micro;
    unsigned long long hash;
    while (fscanf(f, "%zu,%zu,%llx\n", &step, &micro, &hash) == 3) {
        assert_true(n < most && step == n / per_step && micro == n % per_step);
        hashes[n++] = hash;
    }
    assert_true(feof(f));
    fclose(f);
    free(path);
    return n;
}

// Micro-batch m of rank r is the single process's micro-batch m * ranks + r.
static void test_batches(void** state) {
    (void)state;
    enum { STEPS = 8, MICROS = 12, ALL = STEPS * MICROS };
    char* alone = case_folder(0, ALONE);
    unsigned long long want[ALL + 1], got[ALL + 1];
    assert_int_equal(read_batches(alone, 0, MICROS, want, ALL + 1), ALL);
    for (size_t i = 1; i < ALL; i++) { assert_true(want[i] != want[i - 1]); }
    for (size_t i = 0; i < 6; i++) {
        const size_t n = cases[0].layouts[i].ranks;
        char* folder = case_folder(0, cases[0].layouts[i]);
        for (size_t r = 0; r < n; r++) {
            assert_int_equal(read_batches(folder, r, MICROS / n, got, ALL + 1), ALL / n);
            for (size_t k = 0; k < ALL / n; k++) { assert_true(got[k] == want[k * n + r]); }
        }
        free(folder);
    }
    free(alone);
}

// ----------------------------------------------------------------------------
// stopping and going on

// A copy of a finished run that resumes in its middle.
static char* cut_at_step(const char* folder, size_t step, const char* name) {
    char *cut = text("%s/%s", scratch, name), *last = text("%s/checkpoints/step_%09d", cut, 8);
    copy_tree(folder, cut);
    remove_tree(last);
    free(last);
    for (size_t i = 0; i < 2; i++) {
        char* path = text("%s/%s.safetensors", cut, i ? "optimizer" : "model");
        assert_int_equal(unlink(path), 0);
        free(path);
    }
    last = text("%s/checkpoints/step_%09zu", cut, step);
    assert_true(file_exists(last));
    free(last);
    return cut;
}

static Run resume_ranks(size_t ranks, const char* folder, const char* flags) {
    char* all = text("--checkpoint %s --checkpoint_args %s", folder, flags);
    Run r = run_mpi(PROGRAM, ranks, all);
    assert_success(&r, all);
    free(all);
    return r;
}

// What 4 ranks with shards have saved, taken up by any number of ranks, with shards or without.
static void test_resume_with_other_ranks(void** state) {
    (void)state;
    static const size_t rows[][2] = {{4, 1}, {4, 0}, {1, 0}, {2, 0}, {3, 1}};
    const Layout layout = {4, 1, 1};
    char *whole = case_folder(0, layout), *alone = case_folder(0, ALONE);
    const double priors = prior_bound(0, alone);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *name = text("cut_%zu_%zu", rows[i][0], rows[i][1]), *cut = cut_at_step(whole, 4, name);
        char* flags = text("--zero_stage %zu", rows[i][1]);
        Run r = resume_ranks(rows[i][0], cut, flags);
        assert_non_null(strstr(r.out, "at step 4"));
        if (rows[i][0] == 4) {
            assert_identical(cut, whole);
        } else {
            assert_close(cut, whole, CLOSE, priors);
        }
        run_free(&r);
        free(name), free(cut), free(flags);
    }
    free(whole), free(alone);
}

// Ranks agree on what to go on from when the newest checkpoint is damaged, and when one goes back to an earlier step.
static void test_resume_from_older(void** state) {
    (void)state;
    const Layout layout = {4, 1, 1};
    char *whole = case_folder(0, layout), *cut = text("%s/older", scratch);
    copy_tree(whole, cut);
    char *damaged = text("%s/checkpoints/step_%09d/optimizer.safetensors", cut, 8),
         *from = text("%s/checkpoints/step_%09d", cut, 4);
    assert_int_equal(truncate(damaged, 1000), 0);
    Run r = resume_ranks(4, cut, "");
    assert_non_null(strstr(r.out, "at step 4\n"));
    assert_int_equal(count_words(r.err, "going on from the newest whole checkpoint"), 1);
    assert_identical(cut, whole);
    Run back = resume_ranks(4, from, "");
    assert_non_null(strstr(back.out, "later checkpoints (8) and the log after step 4"));
    assert_identical(cut, whole);
    run_free(&r), run_free(&back);
    free(whole), free(cut), free(damaged), free(from);
}

// Flags that round would give another number of ranks other steps, or other tokens to validate on.
static void test_resume_rounds_no_more(void** state) {
    (void)state;
    static const struct {
        const char *flags, *words;
    } rows[] = {{"--max_tokens_per_step 100 --val_tokens 0", "give --tokens_per_step 96"},
                {"--tokens_per_step 144 --min_val_tokens 90 --val_tokens_padding 0", "give --val_tokens 96"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *log = text("round%zu", i), *folder = run_file(log, "nope", "");
        char* flags = text("--data_dir %s/data --dataset easy --log_dir %s/%s " TINY_MODEL
                           " --batch_size 1 --sequence_length 24 --num_iterations 2 --tokenizer bytes %s",
                           scratch, scratch, log, rows[i].flags);
        Run first = run_train(flags);
        assert_success(&first, flags);
        run_free(&first);
        char* again = text("--checkpoint %s --checkpoint_args --num_iterations 4", folder);
        Run r = run_mpi(PROGRAM, 3, again);
        assert_error_once(&r, rows[i].words);
        run_free(&r);
        free(log), free(folder), free(flags), free(again);
    }
}

// The job ends within seconds of what happens to it now; generous, for other programs may have the cores.
static const double SOON = 60;

#define LONG_RUN                                                                                                   \
    "--position_encoding bam_ssmax --dim 24 --n_heads 3 --n_kv_heads 1 --tokens_per_step 72 --num_iterations 300 " \
    "--val_loss_every 50 --zero_stage 1 --checkpoint_every 0 "

// SIGUSR1 to mpirun, which passes it on, or SIGTERM to the ranks themselves, as a job manager does: they save once,
// end, and the run goes on as if nothing had been.
static void test_signals(void** state) {
    (void)state;
    train_ranks_quietly(PROGRAM, 3, "long", LONG_RUN);
    char* whole = run_file("long", "bam_ssmax", "");
    for (size_t i = 0; i < 2; i++) {
        char *log = text("signal%zu", i), *flags = dist_flags(log, LONG_RUN), *folder = run_file(log, "bam_ssmax", "");
        Run r = start_mpi(PROGRAM, 3, flags);
        assert_true(read_until(&r, " 20/300"));
        pid_t ranks[4];
        assert_int_equal(children_of(r.pid, ranks, 4), 3);
        for (size_t k = 0; k < 3 && i == 1; k++) { kill(ranks[k], SIGTERM); }
        if (i == 0) { kill(r.pid, SIGUSR1); }
        finish_ranks(&r);
        if (!exited_with(&r, 128 + (i ? SIGTERM : SIGUSR1))) { print_error("status %d: %s", r.status, r.err); }
        assert_true(exited_with(&r, 128 + (i ? SIGTERM : SIGUSR1)));
        assert_int_equal(count_words(r.out, "saved step"), 1);
        assert_int_equal(count_words(r.out, i ? "stopped by SIGTERM" : "stopped by SIGUSR1"), 1);
        assert_null(strstr(r.err, "error: "));
        Run last = resume_ranks(3, folder, "");
        assert_identical(folder, whole);
        run_free(&r), run_free(&last);
        free(log), free(flags), free(folder);
    }
    free(whole);
}

// Asked to stop while the others do not move, a rank gives up after some seconds.
static void test_others_do_not_answer(void** state) {
    (void)state;
    char* flags = dist_flags("silent", LONG_RUN "--num_iterations 99999 --val_loss_every 0");
    Run r = start_mpi(PROGRAM, 3, flags);
    assert_true(read_until(&r, " 20/99999"));
    pid_t ranks[4];
    assert_int_equal(children_of(r.pid, ranks, 4), 3);
    kill(ranks[1], SIGSTOP);
    wait_for_work(ranks[0], 0.2);  // now it waits: what rank 1 had sent before might let it agree with itself to stop
    kill(ranks[0], SIGTERM);
    double started = wall_seconds();
    finish_ranks(&r);
    assert_error_below(wall_seconds() - started, SOON);
    assert_non_null(strstr(r.err, "the other ranks do not answer"));
    assert_false(exited_with(&r, 0));
    run_free(&r);
    free(flags);
}

// SIGTERM to mpirun: from then on it shows nothing, sends SIGTERM a while later and SIGKILL after as long again. Steps
// are slow here, for a rank that prints more than a page meanwhile would wait for mpirun to read it.
static void test_terminated_mpirun(void** state) {
    (void)state;
    char* flags = dist_flags("term",
                             "--dim 24 --n_heads 3 --dataset easy --tokens_per_step 18240 --num_iterations 9999 "
                             "--checkpoint_every 0 --val_loss_every 0 --zero_stage 1");
    char* command = text(MPIRUN " --mca odls_base_sigkill_timeout 2 -np 2 %s %s", PROGRAM, flags);
    char *folder = run_file("term", "nope", ""), *saved = text("%s/optimizer.safetensors", folder);
    Run r = start_ranks(command);
    assert_true(read_until(&r, " 3/9999"));
    kill(r.pid, SIGTERM);
    finish_ranks(&r);
    assert_false(exited_with(&r, 0));
    size_t step = (size_t)metadata_number(saved, "step");
    assert_true(step >= 3);
    char *checkpoints = text("%s/checkpoints", folder), *names = text("step_%09zu ", step);
    assert_folder(checkpoints, names);
    char* last = text("--num_iterations %zu", step + 1);
    Run again = resume_ranks(2, folder, last);
    assert_int_equal((size_t)metadata_number(saved, "step"), step + 1);
    run_free(&r), run_free(&again);
    free(flags), free(command), free(folder), free(saved), free(checkpoints), free(names), free(last);
}

// ----------------------------------------------------------------------------
// losses that are not finite

static double step_distance(const char* folder, size_t step, const char* other, size_t other_step, const char* file) {
    char* a = text("%s/checkpoints/step_%09zu/%s", folder, step, file);
    char* b = text("%s/checkpoints/step_%09zu/%s", other, other_step, file);
    double d = weights_distance(a, b);
    free(a), free(b);
    return d;
}

// One rank's loss is NaN: no rank updates, the row is logged, and training goes on as on one process.
static void test_nan_on_one_rank(void** state) {
    (void)state;
    static const char flags[] =
        "--position_encoding rotary --dim 40 --n_heads 5 --n_kv_heads 1 --debug_nan_step 4 --checkpoint_every 1 "
        "--keep_checkpoints 9";
    train_ranks_quietly(PROGRAM, 0, "nan_alone", flags);
    char* alone = run_file("nan_alone", "rotary", "");
    for (size_t zero = 0; zero < 2; zero++) {
        char *log = text("nan_%zu", zero), *all = text("%s --zero_stage %zu", flags, zero);
        Run r = train_ranks(PROGRAM, 3, log, all);
        char* folder = run_file(log, "rotary", "");
        assert_int_equal(count_words(r.err, "warning: loss or gradient of step 3 is not finite"), 1);
        assert_close(folder, alone, CLOSE, CLOSE);
        char* path = text("%s/train.log", folder);
        double losses[9];
        assert_int_equal(csv_column(path, 2, losses, 9), 8);
        for (size_t i = 0; i < 8; i++) { assert_int_equal(isnan(losses[i]), i == 3); }
        char *skipped = text("%s/checkpoints/step_000000004", folder), *last = text("%s/optimizer.safetensors", folder);
        assert_false(file_exists(skipped));
        assert_true(metadata_number(last, "optimizer_step") == 7);
        assert_true(step_distance(folder, 5, folder, 3, "model.safetensors") > 0);
        free(skipped), free(last);
        run_free(&r);
        free(log), free(all), free(folder), free(path);
    }
    free(alone);
}

// Weights that decay beyond all bounds.
static void test_nan_for_good(void** state) {
    (void)state;
    char* flags = dist_flags("diverged",
                             "--dim 24 --n_heads 3 --num_iterations 40 --optimizer adamw --zero_stage 1 "
                             "--learning_rate 1e6 --weight_decay 1e6 --tokens_per_step 72 "
                             "--val_loss_every 0");
    Run r = run_mpi(PROGRAM, 3, flags);
    assert_error_once(&r, "10 steps in a row without a finite loss; lower --learning_rate and start again");
    run_free(&r);
    free(flags);
}

// ----------------------------------------------------------------------------
// a rank that fails

static void test_killed_rank(void** state) {
    (void)state;
    char* flags = dist_flags("killed", LONG_RUN "--num_iterations 100000 --val_loss_every 0 --checkpoint_every 10");
    char* folder = run_file("killed", "bam_ssmax", "");
    for (size_t last = 0; last < 2; last++) {
        Run r = start_mpi(PROGRAM, 3, flags);
        assert_true(read_until(&r, "saved step "));
        assert_true(read_until(&r, last ? " 55/" : " 25/"));
        pid_t children[8];
        assert_int_equal(children_of(r.pid, children, 8), 3);
        double started = wall_seconds();
        kill(children[last ? 2 : 0], SIGKILL);
        finish_ranks(&r);
        assert_error_below(wall_seconds() - started, SOON);
        assert_false(exited_with(&r, 0));
        run_free(&r);
        free(flags);
        flags = text("--checkpoint %s --checkpoint_args --num_iterations %d", folder, last ? 60 : 100000);
    }
    Run r = resume_ranks(3, folder, "--num_iterations 70");
    assert_non_null(strstr(r.out, "at step 5"));
    run_free(&r);
    free(flags), free(folder);
}

// Two ranks in folders of their own, so that the same flags find other data.
static Run run_two_folders(const char* name, const char* flags) {
    char program[4096];
    assert_non_null(realpath(PROGRAM, program));
    char* all =
        text("%s --data_dir data --log_dir %s/%s" DIST_MODEL " --dim 24 --n_heads 3 %s", program, scratch, name, flags);
    char* command =
        text(MPIRUN " -np 1 -wdir %s/%s_0 %s : -np 1 -wdir %s/%s_1 %s", scratch, name, all, scratch, name, all);
    double started = wall_seconds();
    Run r = start_ranks(command);
    finish_ranks(&r);
    assert_error_below(wall_seconds() - started, SOON);
    free(all), free(command);
    return r;
}

static void test_ranks_that_differ(void** state) {
    (void)state;
    make_wide_dataset("data_0/data", 6000), make_wide_dataset("data_1/data", 5000);
    Run r = run_two_folders("data", "");
    assert_error_once(&r, "rank 1 has other data than rank 0");
    run_free(&r);

    // one rank's second shard is cut off
    make_wide_dataset("cut_0/data", 6000), make_wide_dataset("cut_1/data", 6000);
    char* shard = text("%s/cut_1/data/wide/part_0001.bin", scratch);
    assert_int_equal(truncate(shard, 3000), 0);
    r = run_two_folders("cut", "");
    assert_error_once(&r, "rank 1 of 2|part_0001.bin");
    run_free(&r);
    free(shard);

    // only rank 1 finds nothing at all
    make_wide_dataset("none_0/data", 6000);
    char* empty = text("%s/none_1", scratch);
    make_directories(empty);
    r = run_two_folders("none", "");
    assert_error_once(&r, "rank 1 of 2|data/wide");
    run_free(&r);
    free(empty);

    char *flags = dist_flags("flags", "--dim 24 --n_heads 3"), *second = dist_flags("flags", "--dim 24 --n_heads 1");
    char* command = text(MPIRUN " -np 2 %s %s : -np 1 %s %s", PROGRAM, flags, PROGRAM, second);
    r = start_ranks(command);
    finish_ranks(&r);
    assert_error_once(&r, "rank 2 has other arguments than rank 0");
    run_free(&r);
    free(flags), free(second), free(command);
}

// Rank 0 cannot save while the others wait for it.
static void test_save_fails(void** state) {
    (void)state;
    for (size_t zero = 0; zero < 2; zero++) {
        const Layout layout = {4, 1, 1};
        char *whole = case_folder(0, layout), *cut = text("%s/full_%zu", scratch, zero);
        copy_tree(whole, cut);
        char *checkpoints = text("%s/checkpoints", cut), *args = text("%s/checkpoints/step_%09d", whole, 4);
        remove_tree(checkpoints);
        for (size_t i = 0; i < 2; i++) {
            char* from = text("%s/%s.safetensors", args, i ? "optimizer" : "model");
            copy_tree(from, cut);
            free(from);
        }
        FILE* f = fopen(checkpoints, "w");  // a file where the folder should be
        assert_non_null(f);
        fclose(f);
        char* flags = text("--checkpoint %s --checkpoint_args --checkpoint_every 2 --zero_stage %zu", cut, zero);
        double started = wall_seconds();
        Run r = run_mpi(PROGRAM, 3, flags);
        assert_error_below(wall_seconds() - started, SOON);
        assert_error_once(&r, "checkpoints");
        assert_null(strstr(r.out, "saved step"));
        run_free(&r);
        free(whole), free(cut), free(checkpoints), free(args), free(flags);
    }
}

// ----------------------------------------------------------------------------
// launchers and flags

static void test_launchers(void** state) {
    (void)state;
    static const struct {
        const char *environment, *words;
    } rows[] = {
        {"OMPI_COMM_WORLD_SIZE=4", "mpirun started 4 processes|OMPI_COMM_WORLD_SIZE|MPI knows 1"},
        {"PMI_RANK=0 PMI_SIZE=2", "started 2 processes|PMI_SIZE|MPI knows 1"},
        {"RANK=0 WORLD_SIZE=2", "2 processes|MPI|mpirun"},
        {"SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=3", "3 processes|SLURM_STEP_NUM_TASKS|mpirun"},
        {"RANK=x WORLD_SIZE=2", "RANK=x|expected a number"},
        {"RANK=-1 WORLD_SIZE=2", "RANK=-1|expected a number"},
        {"RANK=0 WORLD_SIZE=2x", "WORLD_SIZE=2x|expected a number"},
        {"WORLD_SIZE=2", "RANK and WORLD_SIZE belong together"},
        {"RANK=1", "RANK and WORLD_SIZE belong together|WORLD_SIZE is missing or empty"},
        {"RANK= WORLD_SIZE=2", "RANK and WORLD_SIZE belong together|RANK is missing or empty"},
        {"OMPI_COMM_WORLD_SIZE=many", "OMPI_COMM_WORLD_SIZE=many|expected a number"},
    };
    char* flags = dist_flags("launch", "--dim 24 --n_heads 3 --num_iterations 1");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char* command = text("env %s %s %s", rows[i].environment, PROGRAM, flags);
        Run r = start_ranks(command);
        finish_ranks(&r);
        assert_error_once(&r, rows[i].words);
        assert_refused(&r, rows[i].words);
        run_free(&r);
        free(command);
    }
    // one process is one process, whatever launched it
    static const char* const single[] = {"RANK=0 WORLD_SIZE=1", "OMPI_COMM_WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=1",
                                         "RANK= WORLD_SIZE= LOCAL_RANK= OMP_NUM_THREADS=",
                                         "OMPI_COMM_WORLD_SIZE= PMI_RANK= PMIX_RANK= SLURM_STEP_NUM_TASKS="};
    for (size_t i = 0; i < sizeof single / sizeof *single; i++) {
        char* command = text("env %s %s %s", single[i], PROGRAM, flags);
        Run r = start_ranks(command);
        finish_ranks(&r);
        assert_success(&r, single[i]);
        run_free(&r);
        free(command);
    }
    free(flags);
}

static void test_flags(void** state) {
    (void)state;
    static const struct {
        const char *flags, *words;
    } rows[] = {
        {"--dim 24 --n_heads 3 --no_such_flag 1", "no_such_flag"},
        {"--dim 24 --n_heads 3 --tokens_per_step 96", "96|72"},
        {"--dim 25 --n_heads 3", "--dim 25"},
        {"--dim 24 --n_heads 3 --dataset absent", "absent"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char* flags = dist_flags("wrong", rows[i].flags);
        Run r = run_mpi(PROGRAM, 3, flags);
        assert_error_once(&r, rows[i].words);
        assert_null(strstr(r.err, "rank 1"));
        run_free(&r);
        free(flags);
    }
    Run r = run_mpi(PROGRAM, 3, "--help");
    assert_success(&r, "--help");
    assert_int_equal(count_words(r.out, "--num_iterations"), 1);
    run_free(&r);
}

int main(void) {
    dist_create();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_as_one_process),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_batches),
        cmocka_unit_test(test_resume_with_other_ranks),
        cmocka_unit_test(test_resume_from_older),
        cmocka_unit_test(test_resume_rounds_no_more),
        cmocka_unit_test(test_signals),
        cmocka_unit_test(test_others_do_not_answer),
        cmocka_unit_test(test_terminated_mpirun),
        cmocka_unit_test(test_nan_on_one_rank),
        cmocka_unit_test(test_nan_for_good),
        cmocka_unit_test(test_killed_rank),
        cmocka_unit_test(test_ranks_that_differ),
        cmocka_unit_test(test_save_fails),
        cmocka_unit_test(test_launchers),
        cmocka_unit_test(test_flags),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
