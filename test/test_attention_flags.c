/*
The flags of attention through the programs: what a run's folder says of them and holds, going on bit for bit, computing
activations again, evaluate, and runs that are not taken for one another.
*/
#include "evaluate_util.h"

#define TRAIN "--tokens_per_step 64 --num_iterations 6 --checkpoint_every 1 --keep_checkpoints 9 "
#define SCALED "--softcap 1.5 --softcap_approx --sinks --window 20 --final_softcap 5 --qk_norm --gated_attention"

static const struct {
    const char *label, *encoding, *flags;
    const char* fields;   // of model_args, as JSON without its braces, each behind a bar
    const char* tensors;  // of every layer, that training moves
} runs[] = {
    {"all", "rotary_ssmax", SCALED,
     "\"softcap\":1.5|\"softcap_approx\":true|\"sinks\":true|\"window\":20|\"final_softcap\":5|\"qk_norm\":true|"
     "\"gated_attention\":true",
     "attention.sink attention.q_norm.weight attention.k_norm.weight attention.gate.weight"},
    {"scale", "bam", "--log_scale 4,0.3 --sinks --optimizer adamw", "\"log_scale\":\"4,0.3\"|\"sinks\":true",
     "attention.sink"},
    {"window", "alibi", "--window 7", "\"window\":7", ""},
    {"none", "alibi", "", "", ""},
};
enum { RUNS = sizeof runs / sizeof *runs, LAST_WITH_FLAGS = 2 };

static void check_fields(size_t run, const char* folder) {
    char* path = text("%s/args.json", folder);
    cJSON *json = read_json(path), *model = cJSON_GetObjectItem(json, "model_args");
    char *printed = cJSON_PrintUnformatted(model), *fields = xstrdup(runs[run].fields);
    size_t listed = 0, found = 0;
    for (char* field = strtok(fields, "|"); field; field = strtok(NULL, "|"), listed++) {
        if (!strstr(printed, field)) { print_error("%s: no %s in %s\n", runs[run].label, field, printed); }
        assert_non_null(strstr(printed, field));
    }
    static const char* const all[] = {"softcap",   "softcap_approx", "sinks",   "window",
                                      "log_scale", "final_softcap",  "qk_norm", "gated_attention"};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) { found += cJSON_HasObjectItem(model, all[i]) != 0; }
    assert_int_equal(found, listed);
    cJSON_free(printed), free(fields);
    cJSON_Delete(json);
    free(path);
}

static void check_tensors(size_t run, const char* folder) {
    static const char* const all[] = {"attention.sink", "attention.q_norm.weight", "attention.k_norm.weight",
                                      "attention.gate.weight"};
    char *last = text("%s/model.safetensors", folder),
         *first = text("%s/checkpoints/step_%09d/model.safetensors", folder, 1);
    SafeTensors a = safetensors_open(last), b = safetensors_open(first);
    for (size_t i = 0; i < sizeof all / sizeof *all * 2; i++) {
        char* name = text("layers.%zu.%s", i % 2, all[i / 2]);
        const SafeTensor *t = safetensors_find(&a, name), *u = safetensors_find(&b, name);
        assert_true((t != NULL) == (strstr(runs[run].tensors, all[i / 2]) != NULL));
        if (t) { assert_true(tensor_distance(t, u, 1e-3) > 0); }
        free(name);
    }
    safetensors_close(&a), safetensors_close(&b);
    free(last), free(first);
}

// Another run with these flags and more has the very same weights.
static void check_same(size_t run, const char* whole, const char* more) {
    static size_t number;
    char *log = text("same_%zu", number++),
         *flags = text(TRAIN "--position_encoding %s %s %s", runs[run].encoding, runs[run].flags, more);
    train_tiny_quietly(log, flags);
    char *a = text("%s/model.safetensors", whole), *b = run_file(log, runs[run].encoding, "model.safetensors");
    assert_same_file(a, b);
    free(log), free(flags), free(a), free(b);
}

static void test_runs(void** state) {
    (void)state;
    for (size_t i = 0; i < RUNS; i++) {
        char* flags = text(TRAIN "--position_encoding %s %s", runs[i].encoding, runs[i].flags);
        train_tiny_quietly(runs[i].label, flags);
        char* whole = run_file(runs[i].label, runs[i].encoding, "");
        check_fields(i, whole);
        check_tensors(i, whole);
        if (i <= LAST_WITH_FLAGS) {
            check_same(i, whole, "--recompute");
            check_resumed(whole, 3);
        }
        evaluate_quietly(whole, "--passkey_seq_lens 300 --passkey_sample_size 2");
        cJSON* results = results_of(whole);
        assert_non_null(cJSON_GetObjectItem(results, "passkey"));
        cJSON_Delete(results);
        free(flags), free(whole);
    }
}

// A run with a flag is not taken for one without it, or with another value.
static void test_other_flags(void** state) {
    (void)state;
    static const struct {
        size_t run;
        const char *flags, *words;
    } rows[] = {
        {0, "--softcap 2", "softcap = 1.5|2"},
        {0, "--window 21", "window = 20|21"},
        {0, "--no-gated_attention", "gated_attention = true|false"},
        {1, "--log_scale 4,0.4", "log_scale = \"4,0.3\"|\"4,0.4\""},
        {3, "--softcap 2", "softcap = none|2"},
        {3, "--sinks", "sinks = false|true"},
        {3, "--window 9", "window = none|9"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char* folder = run_file(runs[rows[i].run].label, runs[rows[i].run].encoding, "");
        char *same = resume_flags(folder), *flags = text("%s --num_iterations 9 %s", same, rows[i].flags);
        Run r = run_train(flags);
        assert_refused(&r, rows[i].words);
        run_free(&r);
        free(folder), free(same), free(flags);
    }
}

// Weights in bfloat16 train with all of them, too.
static void test_bfloat16(void** state) {
    (void)state;
    if (!has_bfloat16()) { skip(); }
    train_tiny_quietly("bf16", TRAIN "--position_encoding rotary_ssmax --dtype bfloat16 " SCALED);
    double losses[6];
    assert_int_equal(losses_of("bf16", "rotary_ssmax", losses, 6), 6);
    for (size_t i = 0; i < 6; i++) { assert_true(losses[i] > 1 && losses[i] < 6); }
}

int main(void) {
    scratch_create();
    // of the tokenizer "bytes", which evaluate compares
    uint32_t* tokens = xcalloc(20000, sizeof(uint32_t));
    for (size_t i = 0; i < 20000; i++) { tokens[i] = easy_token(i, NULL); }
    make_shard("easy", &bytes_info, tokens, 20000);
    free(tokens);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_runs),
        cmocka_unit_test(test_other_flags),
        cmocka_unit_test(test_bfloat16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
