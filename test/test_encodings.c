/*
That the lists of llmc/posenc.h are all that an encoding needs: everything here walks them, and they hold the encodings
of test/encodings.h besides. Derivatives against differences, by the table and through a whole model; and the programs
in ENCODINGS_FOLDER, which know those encodings too: flags, tensors, what is trained, args.json, resume, evaluate.
*/
#include "evaluate_util.h"
#include "gradient_util.h"

static const PosencSettings settings = POSENC_DEFAULT_SETTINGS;

// ----------------------------------------------------------------------------
// derivatives

// sum over the table of weight * P, in double from numbers in double.
static double weighted_sum(PosKind kind, const double* numbers, const float* weight, size_t NH, size_t T) {
    double sum = 0, theta[POSENC_ALL_ROWS];
    for (size_t h = 0; h < NH; h++) {
        const PosencHead head = {h, NH, settings, NULL};
        for (size_t p = 0; p < posenc_params(kind); p++) { theta[p] = numbers[posenc_place(kind, p, h, NH)]; }
        for (size_t d = 0; d < T; d++) { sum += weight[h * T + d] * posenc_bias_unclamped(kind, theta, head, d); }
    }
    return sum;
}

// Central differences of step 1e-5: off by 1e-10 of the third derivative and 1e-11 of the sum; fp32 rounds to 6e-8.
static void check_derivatives(PosKind kind, size_t NH, size_t T) {
    size_t n = posenc_numbers(kind, NH);
    Random r = random_stream(4, (uint64_t)kind);
    float *numbers = random_array(n, 0.4, &r), *weight = random_array(NH * T, 1.0, &r);
    float *before = random_array(n, 1.0, &r), *got = xcalloc(n, sizeof(float));
    memcpy(got, before, n * sizeof(float));
    bias_table_backward(got, weight, kind, settings, numbers, NH, T);
    double *moved = xcalloc(n, sizeof(double)), *want = xcalloc(n, sizeof(double));
    for (size_t i = 0; i < n; i++) { moved[i] = numbers[i]; }
    for (size_t i = 0; i < n; i++) {
        moved[i] = numbers[i] + 1e-5;
        want[i] = weighted_sum(kind, moved, weight, NH, T);
        moved[i] = numbers[i] - 1e-5;
        want[i] = before[i] + (want[i] - weighted_sum(kind, moved, weight, NH, T)) / 2e-5;
        moved[i] = numbers[i];
        // no number is without effect, but for units of FIRE that are off everywhere
        assert_true(fabs(want[i] - before[i]) > 1e-7 || (kind == POS_FIRE && got[i] == before[i]));
    }
    assert_error_below(relative_error(got, want, n), 1e-6);
    free(numbers), free(weight), free(before), free(got), free(moved), free(want);
}

static void test_derivatives(void** state) {
    (void)state;
    size_t learned = 0;
    for (int kind = 0; kind < POS_COUNT; kind++) {
        if (posenc_params((PosKind)kind) == 0) { continue; }
        const size_t T = kind == POS_TABLE ? 520 : kind == POS_T5 ? 120 : 40;  // as long as all numbers have an effect
        check_derivatives((PosKind)kind, 3, T);
        check_derivatives((PosKind)kind, 1, T);
        learned++;
    }
    assert_true(learned >= 3);
    assert_int_equal(posenc_params(POS_FADE), 3);
    assert_int_equal(posenc_params(POS_BINS), 4);
    assert_int_equal(posenc_numbers(POS_FADE, 5), 15);
    assert_int_equal(posenc_numbers(POS_BINS, 5), 16);
}

// ----------------------------------------------------------------------------
// through a model

enum { B = 2, T = 48, V = 40, DIM = 32, HEADS = 2 };

static Model create_model(PosKind kind, PosKind second, bool ssmax, bool global_prior) {
    ModelConfig c;
    memset(&c, 0, sizeof c);
    c.V = V, c.C = DIM, c.L = 2, c.NH = c.NKV = HEADS, c.F = 2 * DIM, c.bos = 0;
    model_set_encoding(&c, kind, ssmax);
    c.layers[1].encoding = second;
    c.options = model_default_options(), c.options.global_prior = global_prior;
    c.posenc = posenc_default_options();
    for (int i = 0; i < POSENC_TENSOR_COUNT; i++) { c.posenc.trained[i] = true; }
    model_config_check(&c);
    Model model;
    ModelPlan plan = {MODE_TRAIN, B, T, 1, T, 0, 1};
    model_plan(&model, &c, &plan);
    model_allocate(&model);
    model_init(&model, 3);
    // priors away from BAM's kink and from where a derivative is zero
    Random r = random_stream(5, 0);
    for (size_t i = 0; i < model.tensor_count; i++) {
        const Tensor* t = &model.tensors[i];
        for (size_t k = 0; k < t->count && t->init == INIT_PRIOR; k++) {
            model.master[t->offset + k] += (float)(0.5 + 0.1 * random_normal(&r));
        }
    }
    model_parameters_changed(&model);
    return model;
}

// Two layers, the second of another encoding or the same.
static void check_model(PosKind kind, PosKind second, bool ssmax, bool global_prior) {
    Model model = create_model(kind, second, ssmax, global_prior);
    int tokens[B * T], targets[B * T];
    Random r = random_stream(8, 0);
    for (size_t i = 0; i < B * T; i++) {
        tokens[i] = i % T == 0 ? 0 : 1 + (int)random_below(&r, V - 1), targets[i] = 1 + (int)random_below(&r, V - 1);
    }
    model_forward(&model, tokens, B, T);
    model_zero_gradients(&model);
    model_backward(&model, targets, 1.0f / (B * T), 0);
    size_t priors = 0;
    for (size_t i = 0; i < model.tensor_count; i++) {
        const Tensor* t = &model.tensors[i];
        if (t->group != GROUP_PRIOR) { continue; }
        assert_int_equal(t->init, INIT_PRIOR);
        check_tensor_gradient(&model, t, tokens, targets);
        priors++;
    }
    size_t listed = 0;
    for (int i = 0; i < POSENC_TENSOR_COUNT; i++) {
        listed += (posenc_tensor(i)->owner == kind) + (posenc_tensor(i)->owner == second);
    }
    assert_int_equal(priors, global_prior && kind == second ? listed / 2 : listed);
    model_free(&model);
}

static void test_model_gradients(void** state) {
    (void)state;
    backend_init("cpu", "float32");
    for (int kind = 0; kind < POS_COUNT; kind++) {
        if (kind == POS_FIRE) { continue; }  // such steps move its units across their kinks: the oracle has it
        for (int i = 0; i < 4 && posenc_params((PosKind)kind) > 0; i++) {
            check_model((PosKind)kind, (PosKind)kind, i & 1, i & 2);
        }
    }
    check_model(POS_FADE, POS_BINS, true, false);
    check_model(POS_BINS, POS_ROTARY, false, false);
    check_model(POS_KERPLE_LOG, POS_FADE, false, true);
}

// ----------------------------------------------------------------------------
// the programs

#define TRAIN "--tokens_per_step 64 --num_iterations 6 --checkpoint_every 1 --keep_checkpoints 9 --prior_lr 0.05 "

static const struct {
    const char *label, *encoding, *flags;
    const char* still;  // tensors that are not trained, each in spaces
    bool global_prior;
} runs[] = {
    {"fade", "fade", "", "", false},
    {"fade_ssmax", "fade_ssmax", "--optimizer adamw --fade_depth_init linear --fade_rate_init=sampled", "", false},
    {"fade_global", "fade", "--global_prior --no-fade_rate_trainable --theta_mu_trainable", " fade_rate ", true},
    {"fade_frozen", "fade", "--fade_depth_trainable 0 --no-fade_slope_trainable --bin_decay_trainable",
     " fade_depth fade_slope ", false},
    {"bins", "bins", "--theta_mu_trainable", " bin_decay ", false},
    {"bins_ssmax", "bins_ssmax", "--bin_decay_trainable --bin_decay_init 0.5 --bin_bias_init sampled", "", false},
    {"bins_global", "bins", "--bin_decay_trainable --global_prior --no-bin_bias_trainable --recompute", " bin_bias ",
     true},
    {"kerple_log", "kerple_log", "--kerple_log_rate_init -1", "", false},
    {"kerple_power_ssmax", "kerple_power_ssmax", "--no-kerple_power_scale_trainable", " kerple_power_scale ", false},
    {"alibi_learned", "alibi_learned", "--optimizer adamw", "", false},
    {"sandwich", "sandwich", "--sandwich_dim 16", "", false},
    {"t5_global", "t5", "--global_prior --t5_bias_init sampled", "", true},
    {"table_ssmax", "table_ssmax", "--ssmax_prior outside", "", false},
    {"fire", "fire", "", "", false},
    {"fire_ssmax_global", "fire_ssmax", "--global_prior --no-fire_scale_trainable --fire_length 100", " fire_scale ",
     true},
    {"fox", "fox", "--n_kv_heads 1", "", false},
    {"fox_ssmax", "fox_ssmax", "--recompute --optimizer adamw", "", false},
    {"cable", "cable", "--dtype bfloat16", "", false},
};
enum { RUNS = sizeof runs / sizeof *runs };

static bool names(const char* list, const char* name) {
    char* word = text(" %s ", name);
    bool found = strstr(list, word) != NULL;
    free(word);
    return found;
}

static PosKind kind_of(const char* encoding) {
    PosKind kind = POS_COUNT;
    bool ssmax;
    assert_true(posenc_parse(encoding, &kind, &ssmax));
    return kind;
}

// Name, shape, and whether training moved it, of every tensor of the prior; nothing else is called one.
static void check_tensors(size_t run, const char* trained, const char* initial) {
    SafeTensors a = safetensors_open(trained), b = safetensors_open(initial);
    size_t listed = 0, found = 0;
    for (int i = 0; i < POSENC_TENSOR_COUNT; i++) {
        const PosencTensor* tensor = posenc_tensor(i);
        if (tensor->owner != kind_of(runs[run].encoding)) { continue; }
        for (int layer = 0; layer < (runs[run].global_prior ? 1 : 2); layer++) {
            char* name = runs[run].global_prior ? text("prior.%s", tensor->name)
                                                : text("layers.%d.attention.prior.%s", layer, tensor->name);
            const SafeTensor *t = safetensors_find(&a, name), *u = safetensors_find(&b, name);
            assert_non_null(t);
            assert_int_equal(t->ndim, 4);
            assert_true(t->shape[0] == tensor->rows && t->shape[1] == (tensor->per_head ? 2 : 1));
            bool moved = tensor_distance(t, u, 1e-3) > 0;
            if (moved == names(runs[run].still, tensor->name)) {
                print_error("%s: %s was %s\n", runs[run].label, name, moved ? "trained" : "not trained");
            }
            assert_true(moved != names(runs[run].still, tensor->name));
            listed++;
            free(name);
        }
    }
    for (size_t i = 0; i < a.count; i++) { found += strstr(a.tensors[i].name, "prior.") != NULL; }
    assert_int_equal(found, listed);
    safetensors_close(&a), safetensors_close(&b);
}

// model_args has the fields of this encoding's tensors, with what the flags said, and no other encoding's.
static void check_fields(size_t run, const char* path) {
    cJSON *json = read_json(path), *model = cJSON_GetObjectItem(json, "model_args");
    cJSON* args = cJSON_GetObjectItem(json, "args");
    for (int i = 0; i < POSENC_TENSOR_COUNT; i++) {
        const PosencTensor* tensor = posenc_tensor(i);
        const cJSON* init = cJSON_GetObjectItemCaseSensitive(model, tensor->init_name);
        const cJSON* train = cJSON_GetObjectItemCaseSensitive(model, tensor->train_name);
        bool own = tensor->owner == kind_of(runs[run].encoding);
        assert_true(own ? cJSON_IsString(init) && cJSON_IsBool(train) : !init && !train);
        if (own) { assert_true(cJSON_IsTrue(train) != names(runs[run].still, tensor->name)); }
        assert_non_null(cJSON_GetObjectItemCaseSensitive(args, tensor->init_name));
    }
    assert_true(cJSON_IsTrue(cJSON_GetObjectItem(model, "global_positional_encoding")) == runs[run].global_prior);
    cJSON_Delete(json);
}

static void test_runs(void** state) {
    (void)state;
    for (size_t i = 0; i < RUNS; i++) {
        char* flags = text(TRAIN "--position_encoding %s %s", runs[i].encoding, runs[i].flags);
        char *still = text("%s --learning_rate 1e-30 --prior_lr 0 --num_iterations 1", flags),
             *log = text("still_%s", runs[i].label);
        train_tiny_quietly(runs[i].label, flags);
        train_tiny_quietly(log, still);
        char *whole = run_file(runs[i].label, runs[i].encoding, ""), *path = text("%s/args.json", whole);
        char* trained = text("%s/model.safetensors", whole);
        char* initial = run_file(log, runs[i].encoding, "model.safetensors");
        check_tensors(i, trained, initial);
        check_fields(i, path);
        check_resumed(whole, 3);
        evaluate_quietly(whole, "--passkey_seq_lens 300 --passkey_sample_size 2");
        cJSON* results = results_of(whole);
        assert_non_null(cJSON_GetObjectItem(results, "passkey"));
        cJSON_Delete(results);
        free(flags), free(still), free(log), free(whole), free(path), free(trained), free(initial);
    }
}

// What another encoding's flags say changes nothing, and a run of one encoding is not taken for one of another.
static void test_flags(void** state) {
    (void)state;
    static const struct {
        const char *flags, *words;
    } refused[] = {
        {"--position_encoding fadd", "--position_encoding: found 'fadd'|bam bam_ssmax|fade fade_ssmax bins bins_ssmax"},
        {"--fade_rate_init steep", "--fade_rate_init: found 'steep'|number sampled"},
        {"--position_encoding fade --fade_rate_init -21", "--fade_rate_init -21, expected -20 to 20"},
        {"--bin_decay_trainable=x", "--bin_decay_trainable: found 'x'|true or false"},
        {"--fade_slop_init 1", "unknown flag --fade_slop_init|did you mean --fade_slope_init"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        char *some = text(TRAIN "%s", refused[i].flags), *flags = tiny_flags("refused", some);
        Run r = run_train(flags);
        assert_refused(&r, refused[i].words);
        run_free(&r);
        free(some), free(flags);
    }
    train_tiny_quietly("others", TRAIN
                       "--position_encoding fade --bin_decay_trainable --theta_mu_trainable --theta_mu_init 1 "
                       "--no-theta_alpha_trainable --thata_beta_init sampled --bin_bias_init 3");
    char *a = run_file("fade", "fade", "model.safetensors"), *b = run_file("others", "fade", "model.safetensors");
    assert_same_file(a, b);
    char* other = text("%s/fade/l2/fade/version_00", scratch);
    char *same = resume_flags(other), *flags = text("%s --position_encoding bins --num_iterations 9", same);
    Run r = run_train(flags);
    assert_refused(&r, "trained with fade, the flags ask for bins|--position_encoding");
    run_free(&r);
    free(a), free(b), free(other), free(same), free(flags);
}

// What a run's model_args say of a setting; NULL where they do not.
static char* setting_of(const char* folder, const char* name) {
    char* path = text("%s/args.json", folder);
    cJSON* json = read_json(path);
    const cJSON* item = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItem(json, "model_args"), name);
    char* found = item ? cJSON_PrintUnformatted(item) : NULL;
    cJSON_Delete(json);
    free(path);
    return found;
}

static void assert_setting(const char* folder, const char* name, const char* want) {
    char* found = setting_of(folder, name);
    assert_true(want ? found && strcmp(found, want) == 0 : !found);
    free(found);
}

static void assert_resume_refused(const char* folder, const char* more, const char* words) {
    char *same = resume_flags(folder), *flags = text("%s --num_iterations 9 %s", same, more);
    Run r = run_train(flags);
    assert_refused(&r, words);
    run_free(&r);
    free(same), free(flags);
}

// Settings of formulas: kept in the run folder where they matter, and a run of one is not taken for one of another.
static void test_settings(void** state) {
    (void)state;
    const char* heads = TRAIN "--position_encoding alibi --dim 24 --n_heads 3";
    char* geometric_flags = text("%s --alibi_slopes geometric", heads);
    train_tiny_quietly("published", heads);
    train_tiny_quietly("geometric", geometric_flags);
    char *published = run_file("published", "alibi", ""), *geometric = run_file("geometric", "alibi", "");
    char* sandwich = run_file("sandwich", "sandwich", "");
    assert_setting(published, "alibi_slopes", NULL);
    assert_setting(published, "sandwich_dim", NULL);
    assert_setting(geometric, "alibi_slopes", "\"geometric\"");
    assert_setting(sandwich, "sandwich_dim", "16");
    double losses[2][6];
    losses_of("published", "alibi", losses[0], 6);
    losses_of("geometric", "alibi", losses[1], 6);
    for (size_t i = 0; i < 6; i++) { assert_true(losses[0][i] != losses[1][i]); }
    check_resumed(geometric, 3);
    evaluate_quietly(geometric, "--passkey_seq_lens 300 --passkey_sample_size 2");
    assert_resume_refused(published, "--alibi_slopes geometric", "alibi_slopes = \"published\"|geometric");
    assert_resume_refused(geometric, "--alibi_slopes published", "alibi_slopes = \"geometric\"|published");
    assert_resume_refused(sandwich, "--sandwich_dim 32", "sandwich_dim = 16|32");
    // the training length stays that of the first run
    char *fire = run_file("fire", "fire", ""), *fire_ssmax = run_file("fire_ssmax_global", "fire_ssmax", "");
    assert_setting(fire, "fire_length", "32");
    assert_setting(fire_ssmax, "fire_length", "100");
    assert_setting(sandwich, "fire_length", NULL);
    assert_resume_refused(fire, "--fire_length 100", "fire_length = 32|100");
    free(fire), free(fire_ssmax);
    free(published), free(geometric), free(sandwich), free(geometric_flags);
}

static void test_help(void** state) {
    (void)state;
    Run r = run_train("--help");
    assert_true(exited_with(&r, 0));
    for (int i = 0; i < POSENC_TENSOR_COUNT; i++) {
        char *init = text("  --%s WORD", posenc_tensor(i)->init_name),
             *train = text("  --%s_train", posenc_tensor(i)->name);
        assert_int_equal(count_words(r.out, init), 1);
        assert_int_equal(count_words(r.out, train), 1);
        free(init), free(train);
    }
    assert_non_null(strstr(r.out, "also --theta_beta_init"));
    run_free(&r);
}

// ----------------------------------------------------------------------------
// the example of README.md

// Every line of it stands in test/encodings.h, which is compiled here.
static void test_readme(void** state) {
    (void)state;
    char *readme = read_text("README.md", NULL), *source = read_text("test/encodings.h", NULL);
    char *section = strstr(readme, "## How to add an encoding"), *block = section ? strstr(section, "```c\n") : NULL;
    assert_non_null(block);
    char* end = strstr(block + 5, "```");
    assert_non_null(end);
    size_t lines = 0;
    *end = '\0';
    for (char* line = strtok(block + 5, "\n"); line; line = strtok(NULL, "\n")) {
        while (*line == ' ') { line++; }
        if (!strstr(source, line)) { print_error("README.md's example has what is not compiled: %s\n", line); }
        assert_non_null(strstr(source, line));
        lines++;
    }
    assert_true(lines > 10);
    free(readme), free(source);
}

int main(void) {
    setenv("TRAIN_GPT", ENCODINGS_FOLDER "/train_gpt", 1);
    setenv("EVALUATE", ENCODINGS_FOLDER "/evaluate", 1);
    scratch_create();
    // of the tokenizer "bytes", which evaluate compares
    uint32_t* tokens = xcalloc(20000, sizeof(uint32_t));
    for (size_t i = 0; i < 20000; i++) { tokens[i] = easy_token(i, NULL); }
    make_shard("easy", &bytes_info, tokens, 20000);
    free(tokens);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_derivatives), cmocka_unit_test(test_model_gradients),
        cmocka_unit_test(test_runs),        cmocka_unit_test(test_flags),
        cmocka_unit_test(test_help),        cmocka_unit_test(test_settings),
        cmocka_unit_test(test_readme),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
