/*
What a training run does and leaves behind: the run folder of every encoding, losses that fall, steps that are the
same however they are cut, the handling of NaN, bfloat16.
*/
#include "train_util.h"

#include "../llmc/posenc.h"

enum { L = 2, C = 32, NH = 2, F = 64 };

// ----------------------------------------------------------------------------
// the run folder

static const cJSON* field(const cJSON* object, const char* name) {
    const cJSON* item = cJSON_GetObjectItemCaseSensitive(object, name);
    if (!item) { print_error("args.json has no %s\n", name); }
    assert_non_null(item);
    return item;
}

static void check_fields(const cJSON* object, const char* const* names) {
    for (; *names; names++) { field(object, *names); }
}

// The fields of the published system's args.json, and the provenance of the run.
static void check_args_json(const char* encoding, PosKind kind, bool ssmax) {
    static const char* const common[] = {
        "dim",      "n_layers",       "n_heads",     "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier",
        "norm_eps", "max_batch_size", "max_seq_len", NULL};
    static const char* const bam[] = {"thata_beta_init",
                                      "theta_alpha_init",
                                      "theta_mu_init",
                                      "train_theta_beta",
                                      "train_theta_alpha",
                                      "train_theta_mu",
                                      "global_positional_encoding",
                                      NULL};
    static const char* const build[] = {"commit", "compiler", "flags", "host", "device", NULL};
    static const char* const dataset[] = {"dataset_dir",
                                          "batch_size",
                                          "seq_len",
                                          "grad_accum_steps",
                                          "val_tokens",
                                          "tokens_per_batch",
                                          "val_tokens_padding",
                                          "total_tokens",
                                          "iterations",
                                          "num_processes",
                                          "bos",
                                          "eos",
                                          NULL};
    char* path = run_file("folder", encoding, "args.json");
    cJSON* json = read_json(path);
    const cJSON *args = field(json, "args"), *model = field(json, "model_args");
    assert_int_equal(cJSON_GetArraySize(json), 4);
    assert_string_equal(field(args, "position_encoding")->valuestring, encoding);
    assert_int_equal(field(args, "num_iterations")->valueint, 30);
    check_fields(model, common);
    check_fields(field(json, "build"), build);
    check_fields(field(json, "dataset_args"), dataset);
    assert_int_equal(field(model, "vocab_size")->valueint, BYTES_VOCAB);
    assert_true((int)(field(model, "ffn_dim_multiplier")->valuedouble * C) == F);
    if (kind == POS_BAM) { check_fields(model, bam); }
    assert_true(!!cJSON_GetObjectItem(model, "rope_theta") == (kind == POS_ROTARY));
    assert_true(!!cJSON_GetObjectItem(model, "sinusoidal_theta") == (kind == POS_SINUSOIDAL));
    assert_true(!!cJSON_GetObjectItem(model, "seq_scale") == ssmax);
    assert_true(!!cJSON_GetObjectItem(model, "max_position_embeddings") == (kind == POS_LEARNED));
    assert_true(!!cJSON_GetObjectItem(model, "sandwich_dim") == (kind == POS_SANDWICH));
    assert_null(cJSON_GetObjectItem(model, "alibi_slopes"));  // as published
    // what is as published is left out: the published classes know no such fields
    assert_null(cJSON_GetObjectItem(model, "ssmax_prior"));
    assert_null(cJSON_GetObjectItem(model, "sinusoidal_freqs"));
    assert_null(cJSON_GetObjectItem(model, "rope_type"));
    assert_null(cJSON_GetObjectItem(model, "partial_rotary_factor"));
    cJSON_Delete(json);
    free(path);
}

static size_t check_tensor(const SafeTensors* file, const char* name, size_t ndim, size_t a, size_t b) {
    static const char* const moments[] = {"exp_avg.", "exp_avg_sq."};
    bool optimizer = file->count > 0 && strncmp(file->tensors[0].name, "exp_avg", 7) == 0;
    for (size_t i = 0; i < (optimizer ? 2 : 1); i++) {
        char* full = text("%s%s", optimizer ? moments[i] : "", name);
        const SafeTensor* t = safetensors_find(file, full);
        if (!t) { print_error("%s: no %s\n", file->path, full); }
        assert_non_null(t);
        assert_int_equal(t->type, SAFETENSORS_F32);
        assert_int_equal(t->ndim, ndim);
        size_t shape[4] = {ndim == 4 ? b : a, ndim == 4 ? a : b, 1, 1};
        for (size_t d = 0; d < ndim; d++) { assert_int_equal(t->shape[d], shape[d]); }
        free(full);
    }
    return optimizer ? 2 : 1;
}

// Exactly the published system's names and shapes.
static void check_tensors(const char* encoding, const char* name, PosKind kind, bool ssmax) {
    static const struct {
        const char* name;
        size_t rows, cols;
    } matrices[] = {{"attention.wq", C, C},   {"attention.wk", C, C},    {"attention.wv", C, C},
                    {"attention.wo", C, C},   {"feed_forward.w1", F, C}, {"feed_forward.w2", C, F},
                    {"feed_forward.w3", F, C}};
    char* path = run_file("folder", encoding, name);
    SafeTensors file = safetensors_open(path);
    size_t n = check_tensor(&file, "tok_embeddings.weight", 2, BYTES_VOCAB, C);
    n += check_tensor(&file, "output.weight", 2, BYTES_VOCAB, C) + check_tensor(&file, "norm.weight", 1, C, 0);
    if (kind == POS_LEARNED) { n += check_tensor(&file, "position_embeddings.weight", 2, 32, C); }
    for (size_t layer = 0; layer < L; layer++) {
        char full[96];
#define LAYER(...) (snprintf(full, sizeof full, "layers.%zu." __VA_ARGS__), full)
        for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++) {
            n +=
                check_tensor(&file, LAYER("%s.weight", layer, matrices[i].name), 2, matrices[i].rows, matrices[i].cols);
        }
        n += check_tensor(&file, LAYER("attention_norm.weight", layer), 1, C, 0);
        n += check_tensor(&file, LAYER("ffn_norm.weight", layer), 1, C, 0);
        if (ssmax) { n += check_tensor(&file, LAYER("attention.seq_scale", layer), 4, NH, 1); }
        if (kind == POS_MIX) {
            n += check_tensor(&file, LAYER("attention.w_mix.weight", layer), 2, 16 * NH, C);
            n += check_tensor(&file, LAYER("attention.mixed", layer), 2, 16, 1024);
        }
        if (posenc_info(kind)->terms & TERM_KEY) {
            n += check_tensor(&file, LAYER("attention.forget.weight", layer), 2, NH, C);
            n += check_tensor(&file, LAYER("attention.forget.bias", layer), 1, NH, 0);
        }
        for (int t = 0; t < POSENC_TENSOR_COUNT; t++) {
            if (posenc_tensor(t)->owner != kind) { continue; }
            n += check_tensor(&file, LAYER("attention.prior.%s", layer, posenc_tensor(t)->name), 4,
                              posenc_tensor(t)->per_head ? NH : 1, posenc_tensor(t)->rows);
        }
#undef LAYER
    }
    assert_int_equal(file.count, n);  // nothing derived, nothing else
    safetensors_close(&file);
    free(path);
}

// Header, and one row a step: steps, times that grow.
static void check_log(const char* encoding, const char* name, const char* header, size_t rows, size_t every) {
    char *path = run_file("folder", encoding, name), *s = read_text(path, NULL), *first = text("%s\n", header);
    assert_int_equal(strncmp(s, first, strlen(first)), 0);
    double steps[64], times[64];
    assert_int_equal(csv_column(path, 0, steps, 64), rows);
    assert_int_equal(csv_column(path, 1, times, 64), rows);
    for (size_t i = 0; i < rows; i++) {
        assert_true(steps[i] == (double)(i * every));
        assert_true(times[i] > 0 && (i == 0 || times[i] > times[i - 1]));
    }
    free(path), free(s), free(first);
}

static void check_run_folder(const char* encoding, PosKind kind, bool ssmax) {
    char* flags = text(
        "--tokens_per_step 64 --num_iterations 30 --position_encoding %s --val_tokens 128 --val_tokens_padding 64 "
        "--val_loss_every 10",
        encoding);
    train_tiny_quietly("folder", flags);
    char* folder = run_file("folder", encoding, "");
    assert_folder(folder, "args.json checkpoints eval.log model.safetensors optimizer.safetensors train.log ");
    check_args_json(encoding, kind, ssmax);
    check_tensors(encoding, "model.safetensors", kind, ssmax);
    check_tensors(encoding, "optimizer.safetensors", kind, ssmax);
    check_log(encoding, "train.log", "step,time,loss,norm,lr,exec_time,tok/sec", 30, 1);
    check_log(encoding, "eval.log", "step,time,loss,exec_time,tok/sec", 4, 10);
    double losses[30];
    losses_of("folder", encoding, losses, 30);
    // untrained logits have variance 1/3, which costs 1/6 beyond ln V; a corpus of 28 different tokens
    assert_error_below(fabs(losses[0] - log(BYTES_VOCAB) - 1.0 / 6), 0.2);
    assert_true(losses[29] < losses[0] - 1.5);
    free(folder), free(flags);
}

static void test_run_folder(void** state) {
    (void)state;
    for (int kind = 0; kind < POS_COUNT; kind++) {
        for (int ssmax = 0; ssmax < 2; ssmax++) {
            char* name = text("%s%s", posenc_info((PosKind)kind)->name, ssmax ? "_ssmax" : "");
            check_run_folder(name, (PosKind)kind, ssmax);
            free(name);
        }
    }
}

// A prior for all layers has its own names; a second run gets the next number and the same bits.
static void test_global_prior_and_versions(void** state) {
    (void)state;
    const char* flags = "--tokens_per_step 64 --num_iterations 3 --position_encoding bam_ssmax --global_prior";
    train_tiny_quietly("twice", flags);
    train_tiny_quietly("twice", flags);
    char *folder = text("%s/twice/l2/bam_ssmax", scratch), *a = run_file("twice", "bam_ssmax", "model.safetensors");
    char* b = text("%s/version_01/model.safetensors", folder);
    assert_folder(folder, "version_00 version_01 ");
    assert_same_file(a, b);
    SafeTensors file = safetensors_open(a);
    assert_non_null(safetensors_find(&file, "prior.theta_alpha"));
    assert_null(safetensors_find(&file, "layers.0.attention.prior.theta_alpha"));
    assert_int_equal(file.count, 3 + L * 9 + 3 + L);
    safetensors_close(&file);
    free(folder), free(a), free(b);
}

// Plain text outside a terminal: no carriage returns, no escapes, lines of at most 80 columns.
static void test_output(void** state) {
    (void)state;
    Run r = train_tiny("output",
                       "--tokens_per_step 128 --num_iterations 12 --val_tokens 128 --val_loss_every 4 "
                       "--val_tokens_padding 0 --sample_every 6 --sample_length 20 --checkpoint_every 5");
    assert_string_equal(r.err, "");
    assert_int_equal(count_words(r.out, "/12 loss "), 12);
    assert_non_null(strstr(r.out, " 0/12 loss "));
    assert_non_null(strstr(r.out, "11/12 loss "));
    assert_int_equal(count_words(r.out, "val  "), 4);
    assert_int_equal(count_words(r.out, "\nsample "), 3);
    assert_int_equal(count_words(r.out, "saved step "), 3);
    for (const char *line = r.out, *end; (end = strchr(line, '\n')); line = end + 1) {
        bool own = strncmp(line, "sample", 6) != 0 && !strstr(line, scratch) && strncmp(line, "device", 6) != 0;
        if (own && end - line > 80) { print_error("%td columns: %.*s\n", end - line, (int)(end - line), line); }
        assert_true(!own || end - line <= 80);
        for (const char* c = line; c < end; c++) { assert_true((unsigned char)*c >= ' ' && *c != 0x7f); }
    }
    run_free(&r);
}

// ----------------------------------------------------------------------------
// the same step, cut in other ways

// fp32 rounds sums of 256 rows to some 1e-7; the first steps of RAdam divide by nothing, so weights stay as close.
static void test_accumulation(void** state) {
    (void)state;
    double want[3], losses[3];
    for (size_t batch = 8; batch >= 2; batch /= 2) {
        char *log = text("batch_%zu", batch), *first = run_file("batch_8", "bam_ssmax", "model.safetensors");
        char* flags = text(
            "--dataset noise --position_encoding bam_ssmax --batch_size %zu --tokens_per_step 256 --num_iterations 3 "
            "--learning_rate 0.1",
            batch);
        train_tiny_quietly(log, flags);
        char* model = run_file(log, "bam_ssmax", "model.safetensors");
        assert_int_equal(losses_of(log, "bam_ssmax", batch == 8 ? want : losses, 3), 3);
        for (size_t i = 0; batch < 8 && i < 3; i++) { assert_error_below(fabs(losses[i] - want[i]), 2e-6); }
        assert_error_below(weights_distance(first, model), 2e-6);
        free(log), free(first), free(flags), free(model);
    }
}

static void test_validation_batches(void** state) {
    (void)state;
    double loss[2], want = 0, uniform = log(BYTES_VOCAB);
    for (size_t batch = 1; batch <= 4; batch *= 2) {
        char *log = text("validate_%zu", batch), *path = run_file(log, "nope", "eval.log");
        char* flags = text(
            "--dataset noise --batch_size %zu --tokens_per_step 128 --num_iterations 1 --val_loss_every 1 "
            "--val_tokens 512",
            batch);
        char* all = text("%s --val_tokens_padding 1", flags);
        train_tiny_quietly(log, all);
        assert_int_equal(csv_column(path, 2, loss, 2), 2);
        want = batch == 1 ? loss[0] : want;
        assert_error_below(fabs(loss[0] - want), 1e-6);
        assert_error_below(fabs(want - uniform - 1.0 / 6), 0.2);
        free(log), free(path), free(flags), free(all);
    }
}

static void test_recompute(void** state) {
    (void)state;
    const char* base = "--position_encoding rotary_ssmax --tokens_per_step 128 --num_iterations 4";
    char* again = text("%s --recompute", base);
    train_tiny_quietly("kept", base);
    train_tiny_quietly("recomputed", again);
    char* a = run_file("kept", "rotary_ssmax", "model.safetensors");
    char* b = run_file("recomputed", "rotary_ssmax", "model.safetensors");
    assert_true(weights_distance(a, b) == 0);
    free(again), free(a), free(b);
}

// Validation and samples, also such that are longer than the sequences of training, leave training as it is.
static void test_samples_change_nothing(void** state) {
    (void)state;
    const char* base = "--dataset noise --position_encoding bam_ssmax --tokens_per_step 64 --num_iterations 8";
    const char* val = "--val_tokens 64 --val_tokens_padding 0";
    char* plain = text("%s %s", base, val);
    char* watched = text("%s --val_loss_every 3 --sample_every 2 --sample_length 40", plain);
    train_tiny_quietly("plain", plain);
    train_tiny_quietly("watched", watched);
    char* a = run_file("plain", "bam_ssmax", "model.safetensors");
    char* b = run_file("watched", "bam_ssmax", "model.safetensors");
    assert_true(weights_distance(a, b) == 0);
    free(plain), free(watched), free(a), free(b);
}

// Noise cannot be learned, except when every step has the same 64 tokens.
static void test_overfit_single_batch(void** state) {
    (void)state;
    double losses[60];
    train_tiny_quietly("overfit", "--dataset noise --overfit_single_batch --tokens_per_step 64 --num_iterations 60");
    assert_int_equal(losses_of("overfit", "nope", losses, 60), 60);
    assert_true(losses[59] < 0.5 * losses[0]);
    train_tiny_quietly("no_overfit", "--dataset noise --tokens_per_step 64 --num_iterations 60");
    assert_int_equal(losses_of("no_overfit", "nope", losses, 60), 60);
    assert_true(losses[59] > 0.9 * losses[0]);
}

// bfloat16 products round factors to 8 bits; the losses follow those of fp32.
static void test_bfloat16(void** state) {
    (void)state;
    if (!has_bfloat16()) { skip(); }
    double narrow[10], full[10];
    train_tiny_quietly("fp32", "--position_encoding bam_ssmax --tokens_per_step 64 --num_iterations 10");
    train_tiny_quietly("bf16",
                       "--position_encoding bam_ssmax --tokens_per_step 64 --num_iterations 10 --dtype bfloat16");
    assert_int_equal(losses_of("bf16", "bam_ssmax", narrow, 10), 10);
    assert_int_equal(losses_of("fp32", "bam_ssmax", full, 10), 10);
    for (size_t i = 0; i < 10; i++) { assert_error_below(fabs(narrow[i] - full[i]), 2e-2); }
    assert_true(narrow[9] != full[9]);
}

// ----------------------------------------------------------------------------
// NaN

static char* step_file(const char* log, size_t step, const char* name) {
    char *part = text("checkpoints/step_%09zu/%s", step, name), *path = run_file(log, "nope", part);
    free(part);
    return path;
}

// batches.log without the rows of other steps, or "" without the file; release with free().
static char* batches_of_step(const char* log, size_t step) {
    char *path = run_file(log, "nope", "batches.log"), *rows = xstrdup(""), *prefix = text("%zu,", step);
    char* s = file_exists(path) ? read_text(path, NULL) : xstrdup("");
    for (char *line = s, *end; (end = strchr(line, '\n')); line = end + 1) {
        if (strncmp(line, prefix, strlen(prefix)) != 0) { continue; }
        char* longer = text("%s%.*s", rows, (int)(end + 1 - line), line);
        free(rows);
        rows = longer;
    }
    free(path), free(prefix), free(s);
    return rows;
}

// The step is logged as nan with the hashes of its batches, changes neither weights nor moments, is not saved, and the
// run goes on.
static void test_nan_step(void** state) {
    (void)state;
    static const char flags[] =
        "--tokens_per_step 128 --num_iterations 6 --debug_nan_step 3 --checkpoint_every 1 --keep_checkpoints 9 "
        "--weight_decay 0.1";
    char* debug = text("%s --debug_batches", flags);
    train_tiny_quietly("nan_debug", debug);
    Run r = train_tiny("nan", flags);
    double losses[6];
    assert_int_equal(losses_of("nan", "nope", losses, 6), 6);
    for (size_t i = 0; i < 6; i++) { assert_true(!!isnan(losses[i]) == (i == 2)); }
    char *path = run_file("nan", "nope", "train.log"), *checkpoints = run_file("nan", "nope", "checkpoints");
    char* s = read_text(path, NULL);
    assert_int_equal(count_words(s, ",nan,"), 1);
    assert_folder(checkpoints, "step_000000001 step_000000002 step_000000004 step_000000005 step_000000006 ");
    assert_non_null(strstr(r.out, "step 3 is not saved"));
    char *last = step_file("nan", 6, "optimizer.safetensors"), *batches = batches_of_step("nan", 2),
         *all = batches_of_step("nan_debug", 2), *others = batches_of_step("nan", 1);
    assert_true(metadata_number(last, "optimizer_step") == 5);
    assert_string_equal(batches, all);
    assert_int_equal(count_words(batches, "\n"), 2);
    assert_string_equal(others, "");
    char* warning = text(
        "warning: loss or gradient of step 2 is not finite; its update is skipped (first batch %.16s, all in "
        "batches.log)\n",
        batches + strlen("2,0,"));
    assert_string_equal(r.err, warning);
    run_free(&r);
    free(debug), free(path), free(checkpoints), free(s), free(last), free(batches), free(all), free(others);
    free(warning);
}

static void enlarge(void* context, size_t index, size_t offset, void* chunk, size_t bytes) {
    const SafeTensor* t = &((const SafeTensors*)context)->tensors[index];
    memcpy(chunk, t->data + offset, bytes);
    if (strcmp(t->name, "tok_embeddings.weight") == 0) { ((float*)chunk)['~' * C] = 1e38f; }  // it comes in one piece
}

// A weight that no loss depends on, the embedding of a token that never comes, grows beyond all bounds: it is not saved
// either.
static void test_infinite_weight(void** state) {
    (void)state;
    char *good = run_file("folder", "nope", "model.safetensors"), *large = text("%s/large.safetensors", scratch);
    SafeTensors file = safetensors_open(good);
    SafeTensorsEntry* entries = xcalloc(file.count, sizeof *entries);
    for (size_t i = 0; i < file.count; i++) {
        const SafeTensor* t = &file.tensors[i];
        entries[i].name = t->name, entries[i].type = t->type, entries[i].ndim = t->ndim;
        memcpy(entries[i].shape, t->shape, sizeof entries[i].shape);
    }
    safetensors_write(large, entries, file.count, NULL, 0, enlarge, &file);
    char* more =
        text("--tokens_per_step 64 --num_iterations 9 --weight_decay 1200 --checkpoint_every 1 --init_from %s", large);
    char *flags = tiny_flags("infinite", more), *checkpoints = run_file("infinite", "nope", "checkpoints");
    Run r = run_train(flags);
    assert_refused(&r, "weights or moments after step 1 are not finite|start again: it has no checkpoint");
    assert_folder(checkpoints, "");
    safetensors_close(&file);
    run_free(&r);
    free(entries), free(good), free(large), free(more), free(flags), free(checkpoints);
}

// Weights that explode: nothing bad takes the place of the last checkpoint whose weights gave a finite loss, whatever
// the run was about to do, and the error names it.
static void test_nan_for_good(void** state) {
    (void)state;
    static const struct {
        const char *flags, *words;
        int number;  // of the signal, 0: none
    } rows[] = {
        {"--checkpoint_every 5 --num_iterations 60", "10 steps in a row|--learning_rate|resume from|step_000000008", 0},
        {"--checkpoint_every 0 --num_iterations 14", "the last|not saved|resume from|step_000000008", 0},
        {"--checkpoint_every 0 --num_iterations 60", NULL, SIGTERM},
    };
    train_tiny_quietly("exploding", "--tokens_per_step 64 --num_iterations 8");
    char* good = run_file("exploding", "nope", "");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *cut = text("%s/exploding_%zu", scratch, i), *kept = text("%s/checkpoints/step_000000008", cut);
        copy_tree(good, cut);
        char* flags =
            text("--checkpoint %s --checkpoint_args --learning_rate 1e6 --weight_decay 1e3 %s", cut, rows[i].flags);
        Run r = start_train(flags);
        if (rows[i].number) {
            assert_true(read_until(&r, "loss    nan"));
            kill(r.pid, rows[i].number);
        }
        finish_train(&r);
        if (rows[i].number) {
            assert_true(exited_with(&r, 128 + rows[i].number));
            assert_non_null(strstr(r.out, "which is not saved; resume from"));
            assert_non_null(strstr(r.out, kept));
        } else {
            assert_refused(&r, rows[i].words);
        }
        static const char* const files[] = {"model.safetensors", "optimizer.safetensors"};
        for (size_t k = 0; k < 2; k++) {
            char *x = text("%s/%s", good, files[k]), *y = text("%s/%s", kept, files[k]);
            assert_same_file(x, y);
            free(x), free(y);
        }
        run_free(&r);
        free(cut), free(kept), free(flags);
    }
    // saved after every step, the loss says of all but the last that they were still good
    char *every = text(
             "--checkpoint %s --checkpoint_args --learning_rate 1e6 --weight_decay 1e3 --checkpoint_every 1 "
             "--num_iterations 60",
             good),
         *folder = text("%s/checkpoints", good);
    Run exploded = run_train(every);
    assert_refused(&exploded, "10 steps in a row|resume from|step_000000009");
    assert_folder(folder, "step_000000009 step_000000010 ");
    run_free(&exploded);
    free(every), free(folder);
    char* flags = tiny_flags("never_good",
                             "--tokens_per_step 64 --num_iterations 60 --learning_rate 1e6 "
                             "--weight_decay 1e3 --checkpoint_every 0");
    Run r = run_train(flags);
    assert_refused(&r, "10 steps in a row|start again: it has no checkpoint");
    run_free(&r);
    free(good), free(flags);
}

int main(void) {
    scratch_create();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_run_folder),
        cmocka_unit_test(test_global_prior_and_versions),
        cmocka_unit_test(test_output),
        cmocka_unit_test(test_accumulation),
        cmocka_unit_test(test_validation_batches),
        cmocka_unit_test(test_recompute),
        cmocka_unit_test(test_samples_change_nothing),
        cmocka_unit_test(test_overfit_single_batch),
        cmocka_unit_test(test_bfloat16),
        cmocka_unit_test(test_nan_step),
        cmocka_unit_test(test_infinite_weight),
        cmocka_unit_test(test_nan_for_good),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
