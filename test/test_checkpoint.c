/*
Checkpoints that cannot be used, disks that are full, folders that stay in order, and runs that start from the
weights of another file.
*/
#include "train_util.h"

#define STEPS " --tokens_per_step 64 --num_iterations 8 --checkpoint_every 4 --keep_checkpoints 9 --seed 3"

static char* copy_of(const char* log, const char* encoding) {
    static size_t number;
    char *from = run_file(log, encoding, ""), *to = text("%s/copy_%zu", scratch, number++);
    copy_tree(from, to);
    free(from);
    return to;
}

static Run run_checkpoint(const char* folder, const char* flags) {
    char* all = text("--checkpoint %s %s", folder, flags);
    Run r = run_train(all);
    free(all);
    return r;
}

// A refusal changes nothing in the run folder.
static void assert_refused_untouched(const char* folder, const char* flags, const char* words) {
    static const char* const kept[] = {"args.json", "train.log"};
    char *before[2], *paths[2], *names = list_folder(folder);
    for (size_t i = 0; i < 2; i++) {
        paths[i] = text("%s/%s", folder, kept[i]);
        before[i] = file_exists(paths[i]) ? read_text(paths[i], NULL) : NULL;
    }
    Run r = run_checkpoint(folder, flags);
    assert_refused(&r, words);
    assert_folder(folder, names);
    for (size_t i = 0; i < 2; i++) {
        if (before[i]) {
            char* after = read_text(paths[i], NULL);
            assert_string_equal(before[i], after);
            free(after);
        }
        free(before[i]), free(paths[i]);
    }
    free(names);
    run_free(&r);
}

// ----------------------------------------------------------------------------
// another model than the flags describe

static void test_other_models(void** state) {
    (void)state;
    static const struct {
        const char *encoding, *flags, *words;
    } rows[] = {
        {"rotary_ssmax", "--position_encoding rotary", "rotary_ssmax|rotary;|--position_encoding"},
        {"rotary_ssmax", "--position_encoding bam_ssmax", "rotary_ssmax|bam_ssmax"},
        {"rotary_ssmax", "--rope_theta 10000", "rope_theta = 500000|10000"},
        {"rotary_ssmax", "--dim 64", "dim = 32|64"},
        {"rotary_ssmax", "--n_layers 3", "n_layers = 2|3"},
        {"rotary_ssmax", "--n_layers 1", "n_layers = 2|1"},
        {"rotary_ssmax", "--n_heads 4", "n_heads = 2|4"},
        {"rotary_ssmax", "--n_kv_heads 1", "n_kv_heads = 2|1"},
        {"rotary_ssmax", "--ffn_dim 32", "ffn_dim_multiplier = 2|1"},
        {"rotary_ssmax", "--dataset wide", "vocab_size = 258|300"},
        {"rotary_ssmax", "--dataset short", "run's data has 20000 tokens|has 300|--reset_steps"},
        {"bam_ssmax", "--ssmax_prior outside", "ssmax_prior|inside|outside"},
        {"bam_ssmax", "--global_prior", "global_positional_encoding = false|true"},
        {"sinusoidal", "--sinusoidal_freqs vaswani", "sinusoidal_freqs|bam|vaswani"},
        {"sinusoidal", "--sinusoidal_theta 500", "sinusoidal_theta = 10000|500"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *folder = run_file("base", rows[i].encoding, ""), *flags = text("--checkpoint_args %s", rows[i].flags);
        assert_refused_untouched(folder, flags, rows[i].words);
        free(folder), free(flags);
    }
}

// ----------------------------------------------------------------------------
// damaged folders

static void cut_short(const char* folder, const char* name) {
    char* path = text("%s/%s", folder, name);
    struct stat status;
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(truncate(path, status.st_size - 1), 0);
    free(path);
}

static void cut_weights(const char* folder) { cut_short(folder, "checkpoints/step_000000008/model.safetensors"); }
static void cut_moments(const char* folder) { cut_short(folder, "checkpoints/step_000000008/optimizer.safetensors"); }
static void cut_arguments(const char* folder) { cut_short(folder, "args.json"), cut_short(folder, "args.json"); }

static void remove_moments(const char* folder) {
    char* path = text("%s/checkpoints/step_000000008/optimizer.safetensors", folder);
    assert_int_equal(unlink(path), 0);
    free(path);
}

static void remove_weights(const char* folder) {
    char* path = text("%s/checkpoints/step_000000008/model.safetensors", folder);
    assert_int_equal(unlink(path), 0);
    free(path);
}

static void remove_arguments(const char* folder) {
    char* path = text("%s/args.json", folder);
    assert_int_equal(unlink(path), 0);
    free(path);
}

static void remove_everything(const char* folder) { remove_tree(folder), make_directories(folder); }

static void mix_steps(const char* folder) {
    char *from = text("%s/checkpoints/step_000000004/model.safetensors", folder),
         *to = text("%s/checkpoints/step_000000008/model.safetensors", folder);
    copy_tree(from, to);
    free(from), free(to);
}

static void test_damaged_checkpoints(void** state) {
    (void)state;
    static const struct {
        void (*damage)(const char* folder);
        const char *flags, *words;
    } rows[] = {
        {cut_weights, "--checkpoint_args", "step_000000008/model.safetensors|damaged"},
        {cut_moments, "--checkpoint_args", "step_000000008/optimizer.safetensors|damaged"},
        {remove_moments, "--checkpoint_args", "weights only|--init_from"},
        {remove_weights, "--checkpoint_args", "no model.safetensors|--checkpoint"},
        {mix_steps, "--checkpoint_args", "step 4|step 8"},
        {cut_arguments, "--checkpoint_args", "args.json|line|JSON"},
        {remove_arguments, "--checkpoint_args", "args.json: not found|--checkpoint"},
        {remove_everything, "--checkpoint_args", "args.json: not found|--checkpoint"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char* folder = copy_of("base", "bam_ssmax");
        rows[i].damage(folder);
        assert_refused_untouched(folder, rows[i].flags, rows[i].words);
        free(folder);
    }
    // a path that is not there, with and without its arguments
    char *nowhere = text("%s/nowhere", scratch), *flags = tiny_flags("never", STEPS);
    assert_refused_untouched(nowhere, "--checkpoint_args", "nowhere|--checkpoint");
    assert_refused_untouched(nowhere, flags, "nowhere|no model.safetensors");
    assert_false(file_exists(nowhere));
    free(nowhere), free(flags);
}

// What a killed program may leave is no hindrance and is cleaned up: a half-written folder, final files that are
// older than the newest checkpoint.
static void test_leftovers_of_a_kill(void** state) {
    (void)state;
    char *whole = run_file("base", "bam_ssmax", ""), *cut = copy_of("base", "bam_ssmax");
    char *last = text("%s/checkpoints/step_000000008", cut), *half = text("%s/checkpoints/step_000000006.tmp", cut);
    char *old = text("%s/checkpoints/step_000000004/model.safetensors", cut),
         *model = text("%s/model.safetensors", cut);
    assert_int_equal(rename(last, half), 0);
    copy_tree(old, model);
    cut_short(half, "model.safetensors");
    Run r = run_checkpoint(cut, "--checkpoint_args");
    assert_true(exited_with(&r, 0));
    assert_non_null(strstr(r.out, "at step 4\n"));
    char *checkpoints = text("%s/checkpoints", cut), *expected = text("%s/model.safetensors", whole);
    assert_folder(checkpoints, "step_000000004 step_000000008 ");
    assert_same_file(model, expected);
    run_free(&r);
    free(whole), free(cut), free(last), free(half), free(old), free(model), free(checkpoints), free(expected);
}

// ----------------------------------------------------------------------------
// full disk, number of checkpoints

// The disk refuses the optimiser's file, the weights, or the very first file of the resumed run.
static void test_full_disk(void** state) {
    (void)state;
    static const struct {
        rlim_t bytes;
        const char* words;
    } rows[] = {{250000, "optimizer.safetensors"}, {100000, "model.safetensors"}, {300, "args.json"}};
    char *whole = run_file("base", "nope", ""), *cut = copy_of("base", "nope");
    char *last = text("%s/checkpoints/step_000000008", cut), *checkpoints = text("%s/checkpoints", cut);
    remove_tree(last);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        file_size_limit = rows[i].bytes;
        Run r = run_checkpoint(cut, "--checkpoint_args");
        file_size_limit = RLIM_INFINITY;
        assert_refused(&r, rows[i].words);
        assert_non_null(strstr(r.err, "File too large"));
        assert_folder(checkpoints, "step_000000004 ");
        assert_folder(cut, "args.json checkpoints eval.log model.safetensors optimizer.safetensors train.log ");
        run_free(&r);
    }
    Run r = run_checkpoint(cut, "--checkpoint_args");
    assert_true(exited_with(&r, 0));
    char *x = text("%s/optimizer.safetensors", whole), *y = text("%s/optimizer.safetensors", cut);
    assert_same_file(x, y);
    run_free(&r);
    free(whole), free(cut), free(last), free(checkpoints), free(x), free(y);
}

static void test_keep_checkpoints(void** state) {
    (void)state;
    static const struct {
        const char *flags, *names;
    } rows[] = {
        {"--checkpoint_every 2 --keep_checkpoints 1", "step_000000007 "},
        {"--checkpoint_every 2 --keep_checkpoints 3", "step_000000004 step_000000006 step_000000007 "},
        {"--checkpoint_every 0 --keep_checkpoints 3", "step_000000007 "},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *log = text("keep_%zu", i), *flags = text("--tokens_per_step 64 --num_iterations 7 %s", rows[i].flags);
        train_tiny_quietly(log, flags);
        char* checkpoints = run_file(log, "nope", "checkpoints");
        assert_folder(checkpoints, rows[i].names);
        free(log), free(flags), free(checkpoints);
    }
}

// ----------------------------------------------------------------------------
// --init_from

// Rounds a positive or negative normal number down to 16 bits.
static uint16_t narrow(float x, SafeTensorsType type) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (type == SAFETENSORS_BF16) { return (uint16_t)(bits >> 16); }
    int exponent = (int)(bits >> 23 & 255) - 112;
    assert_true(exponent < 31);
    return (uint16_t)(bits >> 16 & 0x8000) | (exponent <= 0 ? 0 : (uint16_t)(exponent << 10 | (bits >> 13 & 1023)));
}

typedef struct {
    const SafeTensors* file;
    SafeTensorsType type;
} Converted;

static void converted_source(void* context, size_t index, size_t offset, void* chunk, size_t bytes) {
    const Converted* c = (const Converted*)context;
    size_t width = safetensors_type_bytes(c->type), first = offset / width;
    for (size_t i = 0; i < bytes / width; i++) {
        float value;
        memcpy(&value, c->file->tensors[index].data + (first + i) * sizeof value, sizeof value);
        uint16_t half = width == 2 ? narrow(value, c->type) : 0;
        memcpy((char*)chunk + i * width, width == 2 ? (void*)&half : (void*)&value, width);
    }
}

// SCRATCH/NAME: the tensors of an F32 file as another type, under another prefix; no metadata, as foreign files.
static char* convert_weights(const char* from, const char* name, SafeTensorsType type, const char* prefix) {
    SafeTensors file = safetensors_open(from);
    SafeTensorsEntry* entries = xcalloc(file.count, sizeof *entries);
    for (size_t i = 0; i < file.count; i++) {
        entries[i].name = text("%s%s", prefix, file.tensors[i].name);
        entries[i].type = type, entries[i].ndim = file.tensors[i].ndim;
        memcpy(entries[i].shape, file.tensors[i].shape, sizeof entries[i].shape);
    }
    char* to = text("%s/%s", scratch, name);
    Converted c = {&file, type};
    safetensors_write(to, entries, file.count, NULL, 0, converted_source, &c);
    for (size_t i = 0; i < file.count; i++) { free((void*)entries[i].name); }
    free(entries);
    safetensors_close(&file);
    return to;
}

static double last_eval(const char* log, const char* encoding, size_t row) {
    char* path = run_file(log, encoding, "eval.log");
    double losses[16];
    assert_true(csv_column(path, 2, losses, 16) > row);
    free(path);
    return losses[row];
}

// The new run's first validation loss is the old run's last, up to the rounding of the file's type.
static void test_init_from_types(void** state) {
    (void)state;
    static const struct {
        SafeTensorsType type;
        const char* log;
        double tolerance;
    } rows[] = {{SAFETENSORS_F32, "f32", 0}, {SAFETENSORS_F16, "f16", 3e-3}, {SAFETENSORS_BF16, "bf16", 3e-2}};
    const char* validate = "--tokens_per_step 64 --val_tokens 128 --val_tokens_padding 0 --val_loss_every 100";
    char* source_flags = text("%s --num_iterations 40 --position_encoding bam", validate);
    train_tiny_quietly("source", source_flags);
    char* source = run_file("source", "bam", "model.safetensors");
    double trained = last_eval("source", "bam", 1);
    assert_true(trained < last_eval("source", "bam", 0) - 1);
    for (size_t i = 0; i < 3; i++) {
        char *name = text("%s.safetensors", rows[i].log), *file = convert_weights(source, name, rows[i].type, "");
        char* flags = text("%s --num_iterations 1 --position_encoding bam --init_from %s", validate, file);
        train_tiny_quietly(rows[i].log, flags);
        assert_error_below(fabs(last_eval(rows[i].log, "bam", 0) - trained), rows[i].tolerance);
        free(name), free(file), free(flags);
    }
    free(source_flags), free(source);
}

// NoPE weights go on as NoPE with Scalable-Softmax: the scales are drawn and listed, the rest is taken over. The new
// run then resumes like any other.
static void test_init_from_other_encoding(void** state) {
    (void)state;
    char* file = run_file("source", "bam", "model.safetensors");
    char* flags = text("--position_encoding nope_ssmax%s --init_from %s", STEPS, file);
    Run r = train_tiny("switched", flags);
    assert_int_equal(count_words(r.out, "drawn    "), 2);
    assert_non_null(strstr(r.out, "drawn    layers.0.attention.seq_scale (not in "));
    assert_non_null(strstr(r.out, "drawn    layers.1.attention.seq_scale (not in "));
    assert_int_equal(count_words(r.out, "unused   "), 6);
    assert_non_null(strstr(r.out, "unused   layers.1.attention.prior.theta_mu of "));
    assert_non_null(strstr(r.out, "weights  21 tensors from "));
    double losses[8];
    assert_int_equal(losses_of("switched", "nope_ssmax", losses, 8), 8);
    assert_true(losses[0] < log(BYTES_VOCAB) - 1);  // weights that know the corpus
    assert_true(losses[7] < losses[0]);
    run_free(&r);

    char *whole = run_file("switched", "nope_ssmax", "model.safetensors"), *cut = copy_of("switched", "nope_ssmax");
    char *last = text("%s/checkpoints/step_000000008", cut), *model = text("%s/model.safetensors", cut);
    remove_tree(last), unlink(model);
    Run again = run_checkpoint(cut, "--checkpoint_args");
    assert_true(exited_with(&again, 0));
    assert_same_file(whole, model);
    run_free(&again);
    free(file), free(flags), free(whole), free(cut), free(last), free(model);
}

static void test_init_from_refusals(void** state) {
    (void)state;
    char* source = run_file("base", "nope", "model.safetensors");
    char* foreign = convert_weights(source, "foreign.safetensors", SAFETENSORS_F32, "model.");
    char* integers = convert_weights(source, "integers.safetensors", SAFETENSORS_I32, "");
    char *other = run_file("base", "nope", "train.log"), *nowhere = text("%s/nowhere.safetensors", scratch);
    const struct {
        const char *file, *flags, *words;
    } rows[] = {
        {source, "--dim 64", "has shape [258,32]|the model needs [258,64]"},
        {source, "--n_kv_heads 1", "wk.weight|[32,32]|[16,32]"},
        {foreign, "", "none of its|such as tok_embeddings.weight"},
        {integers, "", "dtype I32|F32"},
        {other, "", "train.log|safetensors"},
        {nowhere, "", "nowhere.safetensors|No such file"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char* more = text("%s%s --init_from %s", rows[i].flags, STEPS, rows[i].file);
        char *flags = tiny_flags("refused", more), *log = text("%s/refused", scratch);
        Run r = run_train(flags);
        assert_refused(&r, rows[i].words);
        assert_false(file_exists(log));
        run_free(&r);
        free(more), free(flags), free(log);
    }
    free(source), free(foreign), free(integers), free(other), free(nowhere);
}

int main(void) {
    scratch_create();
    make_dataset("short", easy_token, 1, 300);
    Folder wide = dataset_folder("wide");
    ShardInfo info = {2, 2000, 300, BYTES_BOS, BYTES_EOS, 1};
    uint32_t* tokens = xcalloc(info.token_count, sizeof(uint32_t));
    write_shard(&wide, "wide.bin", &info, tokens);
    free(tokens);
    static const char* const encodings[] = {"nope", "rotary_ssmax", "bam_ssmax", "sinusoidal"};
    for (size_t i = 0; i < 4; i++) {
        char* flags = text("--position_encoding %s%s", encodings[i], STEPS);
        train_tiny_quietly("base", flags);
        free(flags);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_other_models),
        cmocka_unit_test(test_damaged_checkpoints),
        cmocka_unit_test(test_leftovers_of_a_kill),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_keep_checkpoints),
        cmocka_unit_test(test_init_from_types),
        cmocka_unit_test(test_init_from_other_encoding),
        cmocka_unit_test(test_init_from_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
