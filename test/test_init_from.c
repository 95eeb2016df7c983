/*
Runs that start from the weights of another file, --init_from.
*/
#include "checkpoint_util.h"

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

// A trained rotation is dropped: the weights are taken, the losses are those of the same weights as NoPE from the first
// step on; what another encoding has learned is drawn anew, and the run goes on like any other.
static void test_drop_encoding(void** state) {
    (void)state;
    char* rotary = run_file("base", "rotary_ssmax", "model.safetensors");
    char* flags = text("--drop_encoding%s --init_from %s", STEPS, rotary);
    Run dropped = train_tiny("dropped", flags);
    assert_non_null(strstr(dropped.out, "dropped  rotary_ssmax of "));
    assert_non_null(strstr(dropped.out, "its weights go on with nope\n"));
    assert_int_equal(count_words(dropped.out, "dropped  layers."), 2);  // the scales of Scalable-Softmax
    assert_non_null(strstr(dropped.out, "weights  21 tensors from "));
    assert_string_equal(dropped.err, "");
    char* run = run_file("dropped", "nope", "");
    char *args = text("%s/args.json", run), *json = read_text(args, NULL);
    assert_non_null(strstr(json, "\"drop_encoding\":\ttrue"));

    // the same weights without the flag, which would be a mistake more often than not
    char* silent = text("%s --init_from %s", STEPS, rotary);
    Run warned = train_tiny("warned", silent);
    assert_non_null(strstr(warned.err, "was trained with rotary_ssmax, this model has nope; give --drop_encoding"));
    char* same = run_file("warned", "nope", "");
    assert_identical(run, same);

    // its checkpoints are those of a run as any other
    char *cut = copy_of("dropped", "nope"), *last = text("%s/checkpoints/step_000000008", cut);
    remove_tree(last);
    Run again = run_checkpoint(cut, "--checkpoint_args");
    assert_true(exited_with(&again, 0));
    assert_null(strstr(again.out, "dropped  layers"));
    assert_identical(run, cut);
    run_free(&dropped), run_free(&warned), run_free(&again);
    free(rotary), free(flags), free(run), free(args), free(json), free(silent), free(same), free(cut), free(last);
}

// What a bias has learned is dropped also where the new model has layers with that bias; Scalable-Softmax stays.
static void test_drop_learned_bias(void** state) {
    (void)state;
    char* bam = run_file("base", "bam_ssmax", "model.safetensors");
    char* flags = text("--drop_encoding --layer_encodings nope_ssmax,bam_ssmax%s --init_from %s", STEPS, bam);
    Run r = train_tiny("partly", flags);
    assert_int_equal(count_words(r.out, "dropped  layers.0.attention.prior.theta_"), 3);
    assert_int_equal(count_words(r.out, "drawn    layers.1.attention.prior.theta_"), 3);
    assert_int_equal(count_words(r.out, "(dropped of "), 3);
    assert_non_null(strstr(r.out, "weights  23 tensors from "));
    run_free(&r);
    free(flags);
    static const struct {
        const char *base, *flags, *words;
    } refused[] = {
        {"bam_ssmax", "--position_encoding bam", "--drop_encoding|trained with bam_ssmax, as the flags ask for"},
        {"nope", "--position_encoding bam", "trained with nope, which is nothing to drop"},
        {NULL, "", "--drop_encoding needs --init_from"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        char* file = refused[i].base ? run_file("base", refused[i].base, "model.safetensors") : NULL;
        char* more =
            text("--drop_encoding %s%s %s %s", refused[i].flags, STEPS, file ? "--init_from" : "", file ? file : "");
        char* all = tiny_flags("refused", more);
        Run no = run_train(all);
        assert_refused(&no, refused[i].words);
        run_free(&no);
        free(file), free(more), free(all);
    }
    free(bam);
}

// The first value of the first tensor becomes NaN.
static void poison(const char* path) {
    SafeTensors file = safetensors_open(path);
    long offset = (long)(file.tensors[0].data - (const unsigned char*)file.map);
    safetensors_close(&file);
    float nan = NAN;
    FILE* f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, offset, SEEK_SET), 0);
    assert_int_equal(fwrite(&nan, sizeof nan, 1, f), 1);
    assert_int_equal(fclose(f), 0);
}

static void test_init_from_refusals(void** state) {
    (void)state;
    char* source = run_file("base", "nope", "model.safetensors");
    char* foreign = convert_weights(source, "foreign.safetensors", SAFETENSORS_F32, "model.");
    char* integers = convert_weights(source, "integers.safetensors", SAFETENSORS_I32, "");
    char* poisoned = convert_weights(source, "poisoned.safetensors", SAFETENSORS_F32, "");
    poison(poisoned);
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
        {poisoned, "", "tok_embeddings.weight|not finite"},
        {source, "--dataset other_hash", "hash 00000001|00000002"},
        {source, "--dataset other_bos", "BOS 256 and EOS 257|has 255 and 257"},
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
    free(source), free(foreign), free(integers), free(poisoned), free(other), free(nowhere);
}

int main(void) {
    static const char* const encodings[] = {"nope", "rotary_ssmax", "bam_ssmax", "sinusoidal"};
    make_bases(encodings, sizeof encodings / sizeof *encodings);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_init_from_types),    cmocka_unit_test(test_init_from_other_encoding),
        cmocka_unit_test(test_init_from_refusals), cmocka_unit_test(test_drop_encoding),
        cmocka_unit_test(test_drop_learned_bias),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
