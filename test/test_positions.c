/*
Positions through the programs: partial and scaled rotations and learned positions in training, resumed and by their
fields in model_args; the same rotation given to a trained model at evaluation; positions beyond a learned table; and
that results of changed positions are kept apart from those of the model as it was trained.
*/
#include "evaluate_util.h"

#define TRAIN "--dataset letters --tokens_per_step 64 --num_iterations 6 --checkpoint_every 1 --keep_checkpoints 9 "
#define YARN " --rope_scaling yarn --rope_factor 4 --rope_original_length 16 --rope_beta_fast 4"
#define QUICK "--passkey_seq_lens 0,300 --passkey_sample_size 2" ARTICLES_FLAGS

static char* train_run(const char* label, const char* encoding, const char* flags) {
    char* all = text(TRAIN "--position_encoding %s %s", encoding, flags);
    train_tiny_quietly(label, all);
    free(all);
    return run_file(label, encoding, "");
}

// ----------------------------------------------------------------------------
// training

static void check_setting(const char* folder, const char* name, const char* want) {
    char* path = text("%s/args.json", folder);
    cJSON* json = read_json(path);
    const cJSON* item = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItem(json, "model_args"), name);
    char* found = item ? cJSON_PrintUnformatted(item) : NULL;
    if (!found || strcmp(found, want) != 0) { print_error("%s: %s = %s\n", path, name, found ? found : "none"); }
    assert_true(found && strcmp(found, want) == 0);
    cJSON_free(found);
    cJSON_Delete(json);
    free(path);
}

static const struct {
    const char *label, *encoding, *flags;
    const char *field, *value;          // of model_args
    const char *other, *other_refused;  // a flag with which the run does not go on
} runs[] = {
    {"partial", "rotary_ssmax", "--rotary_fraction 0.5", "partial_rotary_factor", "0.5", "--rotary_fraction 0.25",
     "partial_rotary_factor = 0.5|0.25"},
    {"linear", "rotary", "--rope_scaling linear --rope_factor 2", "rope_type", "\"linear\"", "--rope_factor 4",
     "rope_factor = 2|4"},
    {"ntk", "rotary", "--rope_scaling ntk --rope_factor 2 --recompute", "rope_factor", "2", "--rope_scaling linear",
     "rope_type = \"ntk\"|linear"},
    {"yarn", "rotary", "--rope_attention_factor 1.5" YARN, "beta_fast", "4", "--rope_original_length 32",
     "original_max_position_embeddings = 16|32"},
    {"llama3", "rotary", "--rope_scaling llama3 --rope_factor 8 --rope_original_length 16 --rope_high_freq_factor 3",
     "high_freq_factor", "3", "--rope_high_freq_factor 4", "high_freq_factor = 3|4"},
    {"learned", "learned", "--weight_decay 0.1", "max_position_embeddings", "32", "--learned_length 64",
     "max_position_embeddings = 32|64"},
    {"longer", "learned_ssmax", "--learned_length 40 --optimizer adamw --recompute", "max_position_embeddings", "40",
     "--learned_length 41", "max_position_embeddings = 40|41"},
};
enum { RUNS = sizeof runs / sizeof *runs };

static void test_training(void** state) {
    (void)state;
    for (size_t i = 0; i < RUNS; i++) {
        char* whole = train_run(runs[i].label, runs[i].encoding, runs[i].flags);
        check_setting(whole, runs[i].field, runs[i].value);
        check_resumed(whole, 3);
        char *same = resume_flags(whole), *flags = text("%s --num_iterations 9 %s", same, runs[i].other);
        Run r = run_train(flags);
        assert_refused(&r, runs[i].other_refused);
        run_free(&r);
        const bool learned = strstr(runs[i].encoding, "learned") != NULL;
        evaluate_quietly(whole, learned ? QUICK " --learned_beyond clamp" : QUICK);
        free(whole), free(same), free(flags);
    }
}

// A rotation that the weights go on with, and the same one that only an evaluation asks for: the same answers, digit by
// digit. The first run's only step moves no weight.
static void test_evaluation_equals_training(void** state) {
    (void)state;
    static const char* const scalings[] = {
        "--rope_scaling linear --rope_factor 2",
        "--rope_scaling ntk --rope_factor 8",
        "--rope_scaling yarn --rope_factor 8 --rope_original_length 32",
        "--rope_scaling llama3 --rope_factor 8 --rope_original_length 32",
    };
    char *plain = train_run("plain", "rotary", ""), *words = text("%s/words.txt", scratch);
    write_text_atomically(words, "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz");
    char* csv[3];
    for (size_t i = 0; i < 3; i++) { csv[i] = text("%s/%zu.csv", scratch, i); }
    char* unscaled = text("--score %s --out %s", words, csv[2]);
    evaluate_quietly(plain, unscaled);
    for (size_t i = 0; i < sizeof scalings / sizeof *scalings; i++) {
        char *label = text("scaled_%zu", i), *init = text("%s/model.safetensors", plain);
        char* flags = text("%s --init_from %s --learning_rate 1e-30 --num_iterations 1", scalings[i], init);
        char* trained = train_run(label, "rotary", flags);
        char* own = text("--score %s --out %s", words, csv[0]);
        char* asked = text("--score %s --out %s %s", words, csv[1], scalings[i]);
        evaluate_quietly(trained, own);
        evaluate_quietly(plain, asked);
        assert_same_file(csv[0], csv[1]);
        char *a = read_text(csv[1], NULL), *b = read_text(csv[2], NULL);
        assert_true(strcmp(a, b) != 0);  // it does something
        // and back: the scaled model without its scaling is the plain one
        char* back = text("--score %s --out %s --rope_scaling none", words, csv[1]);
        evaluate_quietly(trained, back);
        assert_same_file(csv[1], csv[2]);
        free(label), free(init), free(flags), free(trained), free(own), free(asked), free(a), free(b), free(back);
    }
    for (size_t i = 0; i < 3; i++) { free(csv[i]); }
    free(plain), free(words), free(unscaled);
}

// ----------------------------------------------------------------------------
// results

static size_t count_of(const cJSON* results, const char* section) {
    return (size_t)cJSON_GetArraySize(cJSON_GetObjectItem(results, section));
}

// The entry among others whose positions are these, NULL without one.
static const cJSON* entry_with(const cJSON* results, const char* section, const char* positions) {
    const cJSON* entry;
    cJSON_ArrayForEach(entry, cJSON_GetObjectItem(results, section)) {
        const cJSON* found = cJSON_GetObjectItem(cJSON_GetObjectItem(entry, "of"), "positions");
        if (cJSON_IsString(found) && strcmp(found->valuestring, positions) == 0) { return entry; }
    }
    return NULL;
}

static void expect_measured(const char* run, const char* flags, bool measured) {
    char *all = text(QUICK " %s", flags), *out = evaluate_run(run, all);
    assert_true((strstr(out, "nothing left to do") == NULL) == measured);
    free(all), free(out);
}

// Each configuration has entries of its own, whatever is measured first; the published places are for the model as it
// was trained; flags that change nothing, or say a default, are not another configuration.
static void test_results(void** state) {
    (void)state;
    static const char yarn[] = "rope_scaling yarn rope_factor 8 rope_original_length 32";
    char* run = run_file("plain", "rotary", "");
    expect_measured(run, "--rope_scaling yarn --rope_factor 8", true);
    cJSON* results = results_of(run);
    assert_int_equal(count_of(results, "passkey"), 0);
    assert_int_equal(count_of(results, "perplexity"), 0);
    assert_non_null(entry_with(results, "passkey_others", yarn));
    double scaled = cJSON_GetObjectItem(entry_with(results, "perplexity_others", yarn), "mean")->valuedouble;
    cJSON_Delete(results);
    expect_measured(run, "--rope_scaling yarn --rope_factor 8 --rope_original_length 32 --rope_beta_slow 1", false);
    expect_measured(run, "", true);
    expect_measured(run, "--rope_scaling none", false);
    expect_measured(run, "--rope_scaling ntk --rope_factor 2.5", true);
    expect_measured(run, "--rope_scaling yarn --rope_factor 8", false);
    results = results_of(run);
    assert_int_equal(count_of(results, "passkey"), 1);
    assert_int_equal(count_of(results, "passkey_others"), 2);
    assert_int_equal(count_of(results, "perplexity_others"), 2);
    const cJSON* plain = cJSON_GetObjectItem(results, "perplexity")->child;
    assert_null(cJSON_GetObjectItem(cJSON_GetObjectItem(plain, "of"), "positions"));
    assert_true(cJSON_GetObjectItem(plain, "mean")->valuedouble != scaled);
    assert_non_null(entry_with(results, "passkey_others", "rope_scaling ntk rope_factor 2.5"));
    cJSON_Delete(results);
    free(run);
    run = run_file("yarn", "rotary", "");  // its own scaling is no change, to have none is one
    expect_measured(run, "--rope_attention_factor 1.5" YARN, false);
    expect_measured(run, "--rope_scaling none", true);
    results = results_of(run);
    assert_non_null(entry_with(results, "passkey_others", "rope_scaling none"));
    cJSON_Delete(results);
    free(run);
}

// Beyond the table only as the flags say; within it they change no number.
static void test_learned_beyond(void** state) {
    (void)state;
    static const char* const beyond[] = {"clamp", "interpolate"};
    char* run = run_file("learned", "learned", "");
    expect_refusal(run, QUICK, "tokens|learned 32 positions|--learned_beyond clamp or interpolate");
    const char* within =
        "--passkey_sample_size 0 --perplexity --perplexity_dataset articles --perplexity_seq_len 32 "
        "--perplexity_window_size 16";
    evaluate_quietly(run, within);
    double means[2];
    for (size_t i = 0; i < 2; i++) {
        char *flags = text("--learned_beyond %s", beyond[i]), *of = text("learned_beyond %s", beyond[i]);
        char* short_flags = text("%s %s --force", within, flags);
        expect_measured(run, flags, i > 0);  // test_training has measured the first
        cJSON* results = results_of(run);
        assert_non_null(entry_with(results, "passkey_others", of));
        means[i] = cJSON_GetObjectItem(entry_with(results, "perplexity_others", of), "mean")->valuedouble;
        cJSON_Delete(results);
        evaluate_quietly(run, short_flags);
        results = results_of(run);
        const cJSON *plain = cJSON_GetObjectItem(results, "perplexity")->child, *entry;
        cJSON_ArrayForEach(entry, cJSON_GetObjectItem(results, "perplexity_others")) {
            if (cJSON_GetObjectItem(entry, "seq_len")->valueint != 32) { continue; }
            assert_true(cJSON_Compare(cJSON_GetObjectItem(entry, "perplexity"),
                                      cJSON_GetObjectItem(plain, "perplexity"), true));
        }
        cJSON_Delete(results);
        free(flags), free(of), free(short_flags);
    }
    assert_true(means[0] != means[1]);
    free(run);
}

// ----------------------------------------------------------------------------
// refusals

static void test_refused(void** state) {
    (void)state;
    static const struct {
        const char *flags, *words;
    } training[] = {
        {"--rope_factor 2", "--rope_factor needs --rope_scaling linear, ntk, yarn or llama3|found --rope_scaling none"},
        {"--rope_scaling ntk", "--rope_scaling ntk needs --rope_factor"},
        {"--rope_scaling yarn --rope_factor 2", "--rope_scaling yarn needs --rope_original_length"},
        {"--rope_scaling linear --rope_factor 2 --rope_original_length 32",
         "--rope_original_length needs|yarn or llama3"},
        {"--rope_low_freq_factor 5" YARN,
         "--rope_low_freq_factor needs --rope_scaling llama3|found --rope_scaling yarn"},
        {"--rope_beta_slow 4" YARN, "--rope_beta_fast 4 is not above --rope_beta_slow 4"},
        {"--rope_scaling llama3 --rope_factor 2 --rope_original_length 32 --rope_low_freq_factor 4",
         "--rope_high_freq_factor 4 is not above --rope_low_freq_factor 4"},
        {"--rope_scaling linear --rope_factor 0.5", "--rope_factor|0.5"},
        {"--rope_scaling fast", "--rope_scaling: found 'fast'|llama3"},
        {"--rotary_fraction 0.05", "--rotary_fraction 0.05 of heads of 16 channels turns 0, expected at least 2"},
        {"--rotary_fraction 0.125 --rope_scaling ntk --rope_factor 2", "turns 2, expected at least 4"},
        {"--rotary_fraction 1.5", "--rotary_fraction|1.5"},
        {"--position_encoding learned --learned_length 31", "--learned_length 31 is less than --sequence_length 32"},
    };
    for (size_t i = 0; i < sizeof training / sizeof *training; i++) {
        char *some = text(TRAIN "--position_encoding rotary %s", training[i].flags),
             *flags = tiny_flags("refused", some);
        Run r = run_train(flags);
        assert_refused(&r, training[i].words);
        run_free(&r);
        free(some), free(flags);
    }
    static const struct {
        const char *label, *encoding, *flags, *words;
    } evaluation[] = {
        {"learned", "learned", "--rope_scaling yarn --rope_factor 8", "a model with learned, which rotates nothing"},
        {"plain", "rotary", "--learned_beyond clamp", "a model with rotary, which learned no table of positions"},
        {"plain", "rotary", "--rope_factor 8", "--rope_factor needs --rope_scaling"},
        {"plain", "rotary", "--rope_scaling yarn", "--rope_scaling yarn needs --rope_factor"},
        {"partial", "rotary_ssmax", "--rope_scaling linear --rope_factor 2 --rope_beta_fast 8",
         "--rope_beta_fast needs"},
    };
    for (size_t i = 0; i < sizeof evaluation / sizeof *evaluation; i++) {
        char* run = run_file(evaluation[i].label, evaluation[i].encoding, "");
        expect_refusal(run, evaluation[i].flags, evaluation[i].words);
        free(run);
    }
}

int main(void) {
    scratch_create();
    make_documents("articles", article_lengths, ARTICLES);
    size_t lengths[200];
    for (size_t i = 0; i < 200; i++) { lengths[i] = 20 + i % 50; }
    make_documents("letters", lengths, 200);
    // the later ones read the runs of those before
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_training), cmocka_unit_test(test_evaluation_equals_training),
        cmocka_unit_test(test_results),  cmocka_unit_test(test_learned_beyond),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
