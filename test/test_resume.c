/*
Stopping and going on: a run that was stopped, killed or resumed from any of its checkpoints ends with the bytes of
the run that nothing disturbed: weights, moments and state, log rows, batches, samples.
*/
#include "train_util.h"

// ----------------------------------------------------------------------------
// comparing runs

// Every line of a that starts with the prefix is in b. Lines end in '\n'.
static void assert_lines_within(const char* a, const char* b, const char* prefix) {
    for (const char *line = a, *end; (end = strchr(line, '\n')); line = end + 1) {
        if (strncmp(line, prefix, strlen(prefix)) != 0) { continue; }
        char* one = text("%.*s", (int)(end + 1 - line), line);
        if (!strstr(b, one)) { print_error("not in the other run: %s", one); }
        assert_non_null(strstr(b, one));
        free(one);
    }
}

// again: a killed run has served the steps since its last checkpoint twice, and its debug log shows that.
static void assert_same_batches(const char* a, const char* b, bool again) {
    char *path_a = text("%s/batches.log", a), *path_b = text("%s/batches.log", b);
    char *x = read_text(path_a, NULL), *y = read_text(path_b, NULL);
    assert_true(strlen(x) > 0);
    if (again) {
        assert_lines_within(x, y, "");
        assert_lines_within(y, x, "");
    } else {
        assert_string_equal(x, y);
    }
    free(path_a), free(path_b), free(x), free(y);
}

static void assert_same_run(const char* a, const char* b, bool again) {
    assert_identical(a, b);
    assert_same_batches(a, b, again);
}

// ----------------------------------------------------------------------------
// from every kind of step

// In "parts" a step is a shard, so that every save falls on a boundary, and an epoch is 4 steps.
static const struct {
    const char *encoding, *flags;
    bool bfloat16;
    size_t epochs, accumulation, resume_at[4];
} cases[] = {
    {"nope",
     "--tokens_per_step 64 --num_iterations 12 --warmup_iters 5 --learning_rate_decay_frac 0.1",
     false,
     0,
     1,
     {11, 6, 1}},
    {"rotary",
     "--dataset parts --tokens_per_step 128 --num_iterations 10 --lr_scheduler linear",
     false,
     2,
     2,
     {9, 8, 4, 3}},
    {"bam_ssmax",
     "--tokens_per_step 192 --num_iterations 12 --recompute 1 --val_loss_every 3 --val_tokens 128 "
     "--val_tokens_padding 10 --sample_every 2 --sample_length 8 --theta_mu_trainable --prior_lr 3e-3",
     true,
     0,
     3,
     {9, 6, 1}},
    {"alibi_ssmax",
     "--dataset parts --tokens_per_step 128 --num_iterations 10 --optimizer adamw --weight_decay 0.1 "
     "--lr_scheduler wsd --overfit_single_batch --debug_nan_step 4",
     false,
     0,
     2,
     {5, 3}},
};
enum { CASES = sizeof cases / sizeof *cases };

static size_t lines_of_step(const char* batches, size_t step) {
    char *first = text("%zu,", step), *later = text("\n%zu,", step);
    size_t n = count_words(batches, later) + (strncmp(batches, first, strlen(first)) == 0);
    free(first), free(later);
    return n;
}

static void check_resume_at(size_t c, const char* whole, const char* output, size_t step) {
    char *cut = text("%s/cut_%zu_%zu", scratch, c, step), *log = text("%s/batches.log", cut);
    copy_unfinished(whole, cut);
    unlink(log);
    char* from = text("%s/checkpoints/step_%09zu", cut, step);
    Run r = resume(from);
    assert_lines_within(r.out, output, "sample ");
    char *again = read_text(log, NULL), *path = text("%s/batches.log", whole), *all = read_text(path, NULL);
    assert_int_equal(lines_of_step(again, step), cases[c].accumulation);
    assert_int_equal(lines_of_step(again, step - 1), 0);
    assert_lines_within(again, all, "");
    copy_tree(path, log);  // the rest of the comparison is that of two whole runs
    assert_same_run(whole, cut, false);
    free(again), free(path), free(all), free(cut), free(log), free(from);
    run_free(&r);
}

static void test_resume_from_any_step(void** state) {
    (void)state;
    bool bfloat16 = has_bfloat16();
    for (size_t c = 0; c < CASES; c++) {
        char* flags = text("--position_encoding %s %s --debug_batches --checkpoint_every 1 --keep_checkpoints 100%s",
                           cases[c].encoding, cases[c].flags, cases[c].bfloat16 && bfloat16 ? " --dtype bfloat16" : "");
        Run r = train_tiny("whole", flags);
        char *whole = run_file("whole", cases[c].encoding, ""), *last = text("%s/optimizer.safetensors", whole);
        assert_true(metadata_number(last, "epoch") == (double)cases[c].epochs);
        assert_int_equal(count_words(r.out, "\nepoch "), cases[c].epochs);
        for (size_t i = 0; i < 4 && cases[c].resume_at[i]; i++) {
            check_resume_at(c, whole, r.out, cases[c].resume_at[i]);
        }
        free(flags), free(whole), free(last);
        run_free(&r);
    }
}

// All that a run folder holds, as text: names and sizes of the step folders, arguments and logs.
static char* picture(const char* folder) {
    static const char* const files[] = {"args.json", "train.log", "eval.log"};
    char *path = text("%s/checkpoints", folder), *all = list_folder(path);
    free(path);
    for (size_t i = 0; i < 3; i++) {
        char *file = text("%s/%s", folder, files[i]), *content = read_text(file, NULL);
        char* longer = text("%s\n%s", all, content);
        free(file), free(content), free(all);
        all = longer;
    }
    return all;
}

// Going back to an earlier step and being killed before the first new checkpoint: nothing is lost, and the run goes on
// as if it had never gone back, with the arguments that it had.
static void test_kill_after_going_back(void** state) {
    (void)state;
    char *whole = run_file("whole", "nope", ""), *cut = text("%s/back", scratch);
    copy_tree(whole, cut);
    char *before = picture(cut), *from = text("%s/checkpoints/step_%09d", cut, 3), *back = resume_flags(from);
    char *flags = text("%s --checkpoint_every 0 --num_iterations 5000000 --learning_rate 1e-3", back),
         *log = text("%s/train.log", cut), *checkpoints = text("%s/checkpoints", cut);
    for (size_t i = 0; i < 2; i++) {
        Run r = start_train(flags);
        assert_true(read_until(&r, " 7/5000000"));
        assert_non_null(strstr(r.out, "later checkpoints (4, 5, 6, 7, 8, 9, 10, 11, 12) and the log after step 3"));
        kill(r.pid, SIGKILL);
        finish_train(&r);
        char* rows = read_text(log, NULL);
        assert_int_equal(count_words(rows, "\n4,"), 1);
        free(rows);
        run_free(&r);
    }
    char* names = list_folder(checkpoints);
    assert_non_null(strstr(names, "step_000000003 step_000000003.aside step_000000004 step_000000005 "));
    Run last = resume(cut);
    assert_non_null(strstr(last.out, "nothing to do: 12 of 12 steps are done"));
    char* after = picture(cut);
    assert_string_equal(before, after);
    assert_identical(whole, cut);
    run_free(&last);
    free(whole), free(cut), free(before), free(from), free(back), free(flags), free(log), free(checkpoints),
        free(names);
    free(after);
}

// The first new checkpoint takes the place of those that come after the step gone back to, also when the program is
// killed while it does so.
static void test_first_checkpoint_after_going_back(void** state) {
    (void)state;
    char *whole = run_file("whole", "nope", ""), *cut = text("%s/anew", scratch);
    copy_tree(whole, cut);
    char *from = text("%s/checkpoints/step_%09d", cut, 3), *back = resume_flags(from);
    char *flags = text("%s --checkpoint_every 5", back), *checkpoints = text("%s/checkpoints", cut);
    Run r = start_train(flags);
    assert_true(read_until(&r, "saved step 5 "));
    kill(r.pid, SIGKILL);
    finish_train(&r);
    char* names = list_folder(checkpoints);
    assert_int_equal(strncmp(names, "step_000000001 step_000000002 step_000000003 step_000000005 ", 60), 0);
    assert_null(strstr(names, "aside"));
    assert_null(strstr(names, "step_000000011"));
    free(names);
    run_free(&r);

    // as if it had been killed the moment that the checkpoint of step 5 was whole
    char *again = text("%s/anew_again", scratch), *fresh = text("%s/checkpoints/step_000000005.new", again),
         *taken = text("%s/checkpoints/step_000000005", again), *model = text("%s/model.safetensors", again);
    char *list = text("%s/checkpoints", again), *aside = text("%s/checkpoints/step_000000003.aside", again),
         *log = text("%s/train.log", again);
    copy_tree(whole, again);
    assert_int_equal(rename(taken, fresh), 0);
    make_directories(aside);
    copy_tree(log, aside);
    Run last = resume(again);
    assert_non_null(strstr(last.out, "checkpoints/step_000000005 at step 5\n"));
    char* after = list_folder(list);
    assert_non_null(strstr(after, "step_000000003 step_000000005 step_000000006 "));
    assert_null(strstr(after, "step_000000004 "));
    assert_identical(whole, again);
    run_free(&last);
    free(whole), free(cut), free(from), free(back), free(flags), free(checkpoints), free(again), free(fresh);
    free(taken), free(model), free(list), free(aside), free(log), free(after);
}

// A finished run has nothing left to do and stays as it is, also when an earlier checkpoint is asked for that is the
// last of a shorter schedule.
static void test_resume_finished(void** state) {
    (void)state;
    static const struct {
        const char *part, *flags, *words;
    } rows[] = {
        {"", "", "nothing to do: 12 of 12 steps are done"},
        {"/checkpoints/step_000000007", "--num_iterations 7", "nothing to do: 7 of 7 steps are done"},
        {"/checkpoints/step_000000007", "--num_iterations 5", "nothing to do: 7 of 5 steps are done"},
        {"/checkpoints/step_000000007", "--num_iterations 7 --val_loss_every 2 --val_tokens 64", NULL},
    };
    char *whole = run_file("whole", "nope", ""), *cut = text("%s/finished", scratch);
    copy_tree(whole, cut);
    char* before = picture(cut);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *from = text("%s%s", cut, rows[i].part),
             *flags = text("--checkpoint %s --checkpoint_args %s", from, rows[i].flags);
        Run r = run_train(flags);
        assert_true(exited_with(&r, rows[i].words ? 0 : 1));
        if (rows[i].words) { assert_non_null(strstr(r.out, rows[i].words)); }
        char* after = picture(cut);
        assert_string_equal(before, after);
        assert_same_run(whole, cut, false);
        run_free(&r);
        free(from), free(flags), free(after);
    }
    free(whole), free(cut), free(before);
}

// A run that was killed between its last checkpoint and its last validation still does that, and the links of one that
// was killed before they were renewed are.
static void test_killed_at_the_end(void** state) {
    (void)state;
    char *whole = run_file("whole", "bam_ssmax", ""), *cut = text("%s/unvalidated", scratch);
    copy_unfinished(whole, cut);
    char *log = text("%s/eval.log", cut), *rows = read_text(log, NULL);
    *(strstr(rows, "\n12,") + 1) = '\0';
    write_text_atomically(log, rows);
    Run r = resume(cut);
    assert_null(strstr(r.out, "nothing to do"));
    assert_same_run(whole, cut, false);
    run_free(&r);
    Run again = resume(cut);
    assert_non_null(strstr(again.out, "nothing to do"));
    run_free(&again);
    free(whole), free(cut), free(log), free(rows);
}

// ----------------------------------------------------------------------------
// signals

#define LONG_RUN                                                                                                  \
    "--position_encoding bam_ssmax --num_iterations 120 --tokens_per_step 64 --val_loss_every 4 --val_tokens 64 " \
    "--val_tokens_padding 0 --sample_every 1 --sample_length 20 --debug_batches --lr_scheduler linear "           \
    "--learning_rate_decay_frac 0.1"

static size_t saved_step(const char* folder) {
    char* path = text("%s/optimizer.safetensors", folder);
    double step = metadata_number(path, "step");
    free(path);
    return (size_t)step;
}

// Sends the signal once the words were printed; appends the output to *all.
static Run interrupt(const char* flags, const char* words, int number, char** all) {
    Run r = start_train(flags);
    assert_true(read_until(&r, words));
    kill(r.pid, number);
    finish_train(&r);
    char* longer = text("%s%s", *all, r.out);
    free(*all);
    *all = longer;
    return r;
}

// Stopped politely three times: exit status 128 + n, saved once, told how to go on.
static void test_stop_and_resume(void** state) {
    (void)state;
    static const struct {
        const char *words, *flags;  // and what the next run gets
        int number;
    } stops[] = {{" 10/120", "--checkpoint_every 0", SIGHUP},
                 {" 40/120", "--checkpoint_every 7", SIGINT},
                 {"\nsample 75", "", SIGTERM}};
    Run whole = train_tiny("long", LONG_RUN);
    char *folder = run_file("long", "bam_ssmax", ""), *cut = run_file("stopped", "bam_ssmax", "");
    char *flags = tiny_flags("stopped", LONG_RUN " --checkpoint_every 1"), *all = xstrdup("");
    for (size_t i = 0; i < 3; i++) {
        Run r = interrupt(flags, stops[i].words, stops[i].number, &all);
        assert_true(exited_with(&r, 128 + stops[i].number));
        assert_string_equal(r.err, "");
        char* advice = resume_flags(cut);
        assert_non_null(strstr(r.out, advice));
        free(flags);
        flags = text("%s %s", advice, stops[i].flags);
        free(advice);
        static const char* const names[] = {"stopped by SIGHUP", "stopped by SIGINT", "stopped by SIGTERM"};
        assert_non_null(strstr(r.out, names[i]));
        char* saved = text("saved step %zu to", saved_step(cut));
        assert_int_equal(count_words(r.out, saved), 1);
        assert_true(saved_step(cut) < 120);
        free(saved);
        run_free(&r);
    }
    Run last = resume(cut);
    assert_same_run(folder, cut, false);
    char* output = text("%s%s", all, last.out);
    assert_lines_within(output, whole.out, "sample ");
    assert_lines_within(whole.out, output, "sample ");
    free(output), free(all), free(flags), free(folder), free(cut);
    run_free(&last), run_free(&whole);
}

// A terminal that ends takes the readers of its pipes with it: the run saves itself. Under nohup it goes on.
static void test_hangup(void** state) {
    (void)state;
    char* flags = tiny_flags("hangup", LONG_RUN " --num_iterations 5000000 --checkpoint_every 0");
    Run r = start_train(flags);
    assert_true(read_until(&r, " 10/5000000"));
    close(r.out_pipe);
    kill(r.pid, SIGHUP);
    waitpid(r.pid, &r.status, 0);
    assert_true(WIFEXITED(r.status));
    char* cut = run_file("hangup", "bam_ssmax", "");
    assert_true(saved_step(cut) >= 10);
    free(flags);
    flags = tiny_flags("nohup", LONG_RUN);
    Run kept = start_train_in(".", "nohup", flags);
    assert_true(read_until(&kept, " 10/120"));
    kill(kept.pid, SIGHUP);
    finish_train(&kept);
    assert_true(exited_with(&kept, 0));
    assert_non_null(strstr(kept.out, "saved step 120 "));
    run_free(&kept);
    unlink(r.err_path), run_free(&r);
    free(flags), free(cut);
}

// Waits until a process has handlers of its own for the signal: from then on it stops politely.
static void wait_for_handler(pid_t process, int number) {
    char* path = text("/proc/%d/status", (int)process);
    for (bool caught = false; !caught && kill(process, 0) == 0; usleep(1000)) {
        char *status = read_text(path, NULL), *mask = strstr(status, "SigCgt:");
        caught = mask && strtoull(mask + strlen("SigCgt:"), NULL, 16) >> (number - 1) & 1;
        free(status);
    }
    free(path);
}

// Before its first step, while it validates, a run has a place in the data to go on from, too. That validation takes a
// minute, so it is interrupted however late the signal comes; nobody waits for its end.
static void test_stop_before_first_step(void** state) {
    (void)state;
    const char* run =
        "--dataset large --n_layers 8 --tokens_per_step 64 --num_iterations 3 --val_tokens 1989952 "
        "--val_tokens_padding 0";
    char *whole = text("%s --val_loss_every 0", run), *long_run = text("%s --val_loss_every 3", run);
    make_dataset("large", noise_token, 1, 2000000);
    train_tiny_quietly("first", whole);
    char *folder = run_file("first", "nope", ""), *cut = run_file("first_cut", "nope", "");
    char *flags = tiny_flags("first_cut", long_run), *again = resume_flags(cut);
    Run r = start_train(flags);
    assert_true(read_until(&r, "run  "));
    wait_for_handler(r.pid, SIGTERM);
    kill(r.pid, SIGTERM);
    finish_train(&r);
    assert_true(exited_with(&r, 128 + SIGTERM));
    assert_null(strstr(r.out, "val  "));
    assert_int_equal(saved_step(cut), 0);
    char* rest = text("%s --val_loss_every 0", again);
    Run last = run_train(rest);
    assert_true(exited_with(&last, 0));
    assert_identical(folder, cut);
    run_free(&r), run_free(&last);
    free(whole), free(long_run), free(folder), free(cut), free(flags), free(again), free(rest);
}

// Killed without warning, mostly in the middle of a save since there is one after every step.
static void test_kill_and_resume(void** state) {
    (void)state;
    static const char* const words[] = {"saved step 7 ", "loss", " 40/120", "saved step 60 ", "\nsample 75"};
    char *folder = run_file("long", "bam_ssmax", ""), *cut = run_file("killed", "bam_ssmax", "");
    char *flags = tiny_flags("killed", LONG_RUN " --checkpoint_every 1"), *all = xstrdup("");
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        Run r = interrupt(flags, words[i], SIGKILL, &all);
        assert_true(WIFSIGNALED(r.status));
        run_free(&r);
        free(flags);
        flags = resume_flags(cut);
    }
    Run last = resume(cut);
    assert_same_run(folder, cut, true);
    char* checkpoints = text("%s/checkpoints", cut);
    assert_folder(checkpoints, "step_000000120 ");  // nothing half-written is left
    run_free(&last);
    free(folder), free(cut), free(flags), free(all), free(checkpoints);
}

// ----------------------------------------------------------------------------
// a new phase

// --reset_steps: the schedule from its beginning, in a new folder; data, moments and the count of steps go on.
static void test_reset_steps(void** state) {
    (void)state;
    const char* base = "--tokens_per_step 64 --warmup_iters 4 --learning_rate_decay_frac 0.1 --debug_batches ";
    char *first = text("%s--num_iterations 10", base), *both = text("%s--num_iterations 20", base);
    train_tiny_quietly("phase", first);
    train_tiny_quietly("both", both);
    char* folder = run_file("phase", "nope", "");
    char* flags =
        text("--checkpoint %s --checkpoint_args --reset_steps --checkpoint_every 3 --keep_checkpoints 9", folder);
    Run r = run_train(flags);
    assert_true(exited_with(&r, 0));
    run_free(&r);
    char* second = text("%s/phase/l2/nope/version_01", scratch);
    char *log_1 = text("%s/train.log", folder), *log_2 = text("%s/train.log", second);
    char *rates_1 = csv_columns(log_1, 1 << 4), *rates_2 = csv_columns(log_2, 1 << 4);
    assert_string_equal(rates_1, rates_2);
    double steps[11];
    assert_int_equal(csv_column(log_2, 0, steps, 11), 10);
    for (size_t i = 0; i < 10; i++) { assert_true(steps[i] == 10 + (double)i); }

    char *batches_1 = text("%s/batches.log", folder), *batches_2 = text("%s/batches.log", second);
    char *x = read_text(batches_1, NULL), *y = read_text(batches_2, NULL), *all = text("%s%s", x, y);
    char* batches_path = run_file("both", "nope", "batches.log");
    char* batches = read_text(batches_path, NULL);
    assert_string_equal(all, batches);

    // the new phase resumes like any run: in its own folder, with the phase's schedule
    char *cut = text("%s/phase_cut", scratch), *from = text("%s/checkpoints/step_000000012", cut);
    char* optimizer = text("%s/optimizer.safetensors", cut);
    copy_unfinished(second, cut);
    Run again = resume(from);
    assert_true(metadata_number(optimizer, "schedule_start") == 10);
    assert_true(metadata_number(optimizer, "optimizer_step") == 20);
    assert_same_run(second, cut, true);
    run_free(&again);
    free(first), free(both), free(folder), free(flags), free(second), free(log_1), free(log_2), free(rates_1);
    free(rates_2), free(batches_1), free(batches_2), free(x), free(y), free(all), free(batches_path), free(batches);
    free(cut), free(from), free(optimizer);
}

int main(void) {
    scratch_create();
    make_dataset("parts", noise_token, 5, 128);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resume_from_any_step),
        cmocka_unit_test(test_kill_after_going_back),
        cmocka_unit_test(test_first_checkpoint_after_going_back),
        cmocka_unit_test(test_resume_finished),
        cmocka_unit_test(test_killed_at_the_end),
        cmocka_unit_test(test_stop_and_resume),
        cmocka_unit_test(test_hangup),
        cmocka_unit_test(test_stop_before_first_step),
        cmocka_unit_test(test_kill_and_resume),
        cmocka_unit_test(test_reset_steps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
