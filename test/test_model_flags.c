/*
The flags of attention in whole models, in this process: pairs of them drawn at random with an encoding, against
differences of the loss, computed again, and through the key/value cache; what windows, sinks and caps must and must not
do. Values are compared with the float64 oracle in test_model.c.
*/
#include "gradient_util.h"

enum { B = 2, T = 77, V = 40, DIM = 32, BOS = 0 };

static ModelConfig plain_config(const char* encoding) {
    ModelConfig c;
    memset(&c, 0, sizeof c);
    c.V = V, c.C = DIM, c.L = 2, c.NH = 2, c.NKV = 1, c.F = 2 * DIM, c.bos = BOS;
    assert_true(model_parse_encoding(&c, encoding));
    c.options = model_default_options();
    c.posenc = posenc_default_options();
    for (int i = 0; i < POSENC_TENSOR_COUNT; i++) { c.posenc.trained[i] = true; }
    return c;
}

// What starts as a constant is moved away from it, so that all of it has an effect.
static void draw_constants(Model* model) {
    Random r = random_stream(5, 0);
    for (size_t i = 0; i < model->tensor_count; i++) {
        const Tensor* t = &model->tensors[i];
        for (size_t k = 0; k < t->count && t->init != INIT_LINEAR && t->init != INIT_NORMAL; k++) {
            model->master[t->offset + k] += (float)(0.2 + 0.2 * random_normal(&r));
        }
        for (size_t k = 0; k < t->count && strstr(t->name, "attention.wq"); k++) {
            model->master[t->offset + k] *= 3.0f;  // attention far from uniform
        }
    }
    model_parameters_changed(model);
}

static Model model_for(ModelConfig c, ModelMode mode) {
    model_config_check(&c);
    Model model;
    ModelPlan plan = {mode, B, T, 1, T, 0, 1};
    model_plan(&model, &c, &plan);
    model_allocate(&model);
    model_init(&model, 3);
    draw_constants(&model);
    return model;
}

// Documents of all lengths from one token on.
static void make_tokens(int* tokens, int* targets, uint64_t seed) {
    Random r = random_stream(8, seed);
    for (size_t i = 0; i < B * T; i++) {
        tokens[i] = i % T == 0 || random_below(&r, 30) == 0 ? BOS : 1 + (int)random_below(&r, V - 1);
        targets[i] = 1 + (int)random_below(&r, V - 1);
    }
    tokens[T - 1] = BOS;
}

static float* logits_of(const Model* model, size_t rows) {
    float* logits = (float*)xcalloc(rows * V, sizeof(float));
    for (size_t n = 0; n < rows; n++) { model_logits(model, logits + n * V, n); }
    return logits;
}

static void gradients(Model* model, const int* tokens, const int* targets) {
    model_forward(model, tokens, B, T);
    model_zero_gradients(model);
    model_backward(model, targets, 1.0f / (B * T), 0);
}

// ----------------------------------------------------------------------------
// pairs of flags

enum { CAP, TIGHT_CAP, SINKS, WINDOW, LOG_SCALE, FINAL_CAP, QK_NORM, GATE, FLAGS };

static void set_flag(ModelOptions* o, size_t flag) {
    switch (flag) {
        case CAP: o->softcap = 50; break;
        case TIGHT_CAP: o->softcap = 1.5; break;
        case SINKS: o->sinks = true; break;
        case WINDOW: o->window = 9; break;
        case LOG_SCALE: o->log_scale = "3,0.5"; break;
        case FINAL_CAP: o->final_softcap = 2; break;
        case QK_NORM: o->qk_norm = true; break;
        default: o->gated_attention = true; break;
    }
}

static void check_gradients(ModelConfig c, const int* tokens, const int* targets) {
    Model model = model_for(c, MODE_TRAIN), again = model_for(c, MODE_TRAIN_RECOMPUTE);
    gradients(&model, tokens, targets);
    gradients(&again, tokens, targets);
    assert_memory_equal(model.grads, again.grads, model.param_count * sizeof(float));
    for (size_t i = 0; i < model.tensor_count; i++) {
        if (strstr(model.tensors[i].name, "theta_mu")) { continue; }  // differences cross its kinks
        check_tensor_gradient(&model, &model.tensors[i], tokens, targets);
    }
    model_free(&model), model_free(&again);
}

static void check_cache(ModelConfig c, const int* tokens) {
    static const size_t chunks[] = {1, 7, 64};
    Model model = model_for(c, MODE_INFERENCE);
    model_forward(&model, tokens, 1, T);
    float* full = logits_of(&model, T);
    double* want = (double*)xcalloc(T * V, sizeof(double));
    for (size_t i = 0; i < T * V; i++) { want[i] = full[i]; }
    for (size_t k = 0; k < sizeof chunks / sizeof *chunks; k++) {
        KVCache cache = kv_cache_create(&model.config, T);
        while (cache.length < T) {
            size_t at = cache.length, n = T - at < chunks[k] ? T - at : chunks[k];
            model_prefill(&model, &cache, tokens + at, n);
            float* logits = logits_of(&model, n);
            assert_error_below(relative_error(logits, want + at * V, n * V), 3e-6);
            free(logits);
        }
        kv_cache_free(&cache);
    }
    free(full), free(want);
    model_free(&model);
}

static void test_random_pairs(void** state) {
    (void)state;
    static const char* const encodings[] = {"nope", "sinusoidal", "rotary",       "alibi",
                                            "bam",  "kerple_log", "alibi_learned"};
    enum { ENCODINGS = sizeof encodings / sizeof *encodings };
    Random r = random_stream(1, 1);
    for (uint64_t n = 0; n < 20; n++) {
        char encoding[64];
        const char* suffix = random_below(&r, 2) ? "_ssmax" : "";
        size_t first = n % FLAGS, second = random_below(&r, FLAGS);
        if (first == LOG_SCALE || second == LOG_SCALE) { suffix = ""; }
        snprintf(encoding, sizeof encoding, "%s%s", encodings[random_below(&r, ENCODINGS)], suffix);
        ModelConfig c = plain_config(encoding);
        set_flag(&c.options, first), set_flag(&c.options, second);
        int tokens[B * T], targets[B * T];
        make_tokens(tokens, targets, n);
        check_gradients(c, tokens, targets);
        check_cache(c, tokens);
    }
}

// ----------------------------------------------------------------------------
// windows

// A window that holds all of the sequence is none, bit for bit.
static void test_a_window_of_everything(void** state) {
    (void)state;
    static const char* const encodings[] = {"bam_ssmax", "alibi", "rotary"};
    static const size_t windows[] = {T, T + 1, 16777216};
    int tokens[B * T], targets[B * T];
    make_tokens(tokens, targets, 1);
    for (size_t i = 0; i < B * T; i++) { tokens[i] = i % T > 0 && tokens[i] == BOS ? 1 : tokens[i]; }  // long documents
    for (size_t e = 0; e < 3; e++) {
        ModelConfig c = plain_config(encodings[e]);
        Model none = model_for(c, MODE_TRAIN);
        gradients(&none, tokens, targets);
        for (size_t w = 0; w < 3; w++) {
            c.options.window = windows[w];
            Model all = model_for(c, MODE_TRAIN);
            gradients(&all, tokens, targets);
            assert_memory_equal(none.grads, all.grads, none.param_count * sizeof(float));
            model_free(&all);
        }
        c.options.window = T - 1;
        Model less = model_for(c, MODE_TRAIN);
        gradients(&less, tokens, targets);
        assert_memory_not_equal(none.grads, less.grads, none.param_count * sizeof(float));
        model_free(&none), model_free(&less);
    }
}

// In a window of 1 a token sees itself: what stands before it changes nothing.
static void test_a_window_of_one(void** state) {
    (void)state;
    int tokens[B * T], targets[B * T];
    make_tokens(tokens, targets, 2);
    ModelConfig c = plain_config("rotary_ssmax");
    c.options.window = 1;
    Model model = model_for(c, MODE_TRAIN);
    gradients(&model, tokens, targets);
    float *before = logits_of(&model, T), after[V];
    for (size_t i = 0; i + 2 < T; i++) { tokens[i] = (tokens[i] + 5) % V; }
    model_forward(&model, tokens, B, T);
    model_logits(&model, after, T - 2);
    assert_memory_equal(before + (T - 2) * V, after, sizeof after);
    for (size_t i = 0; i < model.tensor_count; i++) {  // one key: the softmax is constant
        const Tensor* t = &model.tensors[i];
        for (size_t k = 0; k < t->count && (strstr(t->name, ".wq.") || strstr(t->name, ".wk.")); k++) {
            assert_true(model.grads[t->offset + k] == 0);
        }
    }
    free(before);
    model_free(&model);
}

// The work for a token is bounded by the window: neither keys and values before its tiles nor the table's distances
// beyond them are read, since what stands there would spread.
static void test_nothing_before_the_window_is_read(void** state) {
    (void)state;
    enum { LENGTH = 4000, WINDOW_KEYS = 100, TILE = 256 };
    ModelConfig c = plain_config("bam_ssmax");
    c.options.window = WINDOW_KEYS;
    model_config_check(&c);
    Model model;
    ModelPlan plan = {MODE_INFERENCE, 1, LENGTH, 1, LENGTH, 0, 1};
    model_plan(&model, &c, &plan);
    model_allocate(&model);
    model_init(&model, 3);
    int* tokens = (int*)xcalloc(LENGTH, sizeof(int));
    for (size_t i = 1; i < LENGTH; i++) { tokens[i] = 1 + (int)(i * i % (V - 1)); }
    KVCache cache = kv_cache_create(&c, LENGTH);
    model_prefill(&model, &cache, tokens, LENGTH - 1);
    float want[V], got[V];
    model_prefill(&model, &cache, tokens + LENGTH - 1, 1);
    model_logits(&model, want, 0);
    const size_t row = 2 * c.NKV * c.HS, unseen = LENGTH - WINDOW_KEYS - TILE;
    for (size_t layer = 0; layer < c.L; layer++) {
        float* entries = (float*)cache.entries + layer * LENGTH * row;
        for (size_t i = 0; i < unseen * row; i++) { entries[i] = NAN; }
        for (size_t h = 0; h < c.NH; h++) {
            float* table = model.bias_tables + (layer * c.NH + h) * LENGTH;
            for (size_t d = WINDOW_KEYS + TILE; d < LENGTH; d++) { table[d] = NAN; }
        }
    }
    cache.length = LENGTH - 1;
    model_prefill(&model, &cache, tokens + LENGTH - 1, 1);
    model_logits(&model, got, 0);
    assert_memory_equal(want, got, sizeof want);
    kv_cache_free(&cache);
    free(tokens);
    model_free(&model);
}

static void test_operations(void** state) {
    (void)state;
    ModelConfig c = plain_config("nope"), w = c;
    model_config_check(&c), model_config_check(&w);
    const size_t windows[] = {1, 3, 10, 76, 77, 200};
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++) {
        w.options.window = windows[i];
        for (size_t position = 0; position < 90; position += 13) {
            double keys = 0;
            for (size_t t = 0; t < T; t++) {
                keys += (double)(position + t + 1 < windows[i] ? position + t + 1 : windows[i]);
            }
            assert_true(model_visible_keys(&w, 0, position, T) == keys);
        }
        double less = model_visible_keys(&c, 0, 0, T) - model_visible_keys(&w, 0, 0, T);
        double saved = 12.0 * 2 * DIM * less / T;
        assert_error_below(fabs(model_flops_per_token(&c, T) - model_flops_per_token(&w, T) - saved), 1e-6);
    }
}

// ----------------------------------------------------------------------------
// sinks, caps

// Where each row sees one key, all that learns from the softmax is the sink, and it does learn.
static void test_sinks_of_rows_with_one_key(void** state) {
    (void)state;
    int tokens[B * T], targets[B * T];
    make_tokens(tokens, targets, 3);
    ModelConfig c = plain_config("bam");
    c.options.window = 1, c.options.sinks = true;
    Model model = model_for(c, MODE_TRAIN);
    gradients(&model, tokens, targets);
    for (size_t i = 0; i < model.tensor_count; i++) {
        if (strstr(model.tensors[i].name, "sink")) {
            check_tensor_gradient(&model, &model.tensors[i], tokens, targets);
        }
    }
    model_free(&model);
}

// A sink starts at 0, trained and without weight decay.
static void test_sinks_at_the_start(void** state) {
    (void)state;
    ModelConfig c = plain_config("nope");
    c.options.sinks = true, c.options.no_seq_scale = true;
    model_config_check(&c);
    Model model;
    ModelPlan plan = {MODE_TRAIN, B, T, 1, T, 0, 1};
    model_plan(&model, &c, &plan);
    model_allocate(&model);
    model_init(&model, 3);
    const Tensor* t = model_find_tensor(&model, "layers.1.attention.sink");
    assert_true(t && t->trainable && t->group == GROUP_VECTOR && t->count == 2 && t->dimensions == 4);
    assert_true(model.master[t->offset] == 0 && model.master[t->offset + 1] == 0);
    model_free(&model);
}

static double largest_difference(const float* a, const float* b, size_t n) {
    double largest = 0;
    for (size_t i = 0; i < n; i++) { largest = fmax(largest, fabs((double)a[i] - (double)b[i])); }
    return largest;
}

static float* capped_logits(double softcap, bool approximate, double final_softcap) {
    int tokens[B * T], targets[B * T];
    make_tokens(tokens, targets, 4);
    ModelConfig c = plain_config("bam");
    c.options.softcap = softcap, c.options.softcap_approx = approximate, c.options.final_softcap = final_softcap;
    Model model = model_for(c, MODE_INFERENCE);
    model_forward(&model, tokens, B, T);
    float* logits = logits_of(&model, B * T);
    model_free(&model);
    return logits;
}

static void test_caps(void** state) {
    (void)state;
    const size_t n = B * T * V;
    float *none = capped_logits(NAN, false, NAN), *wide = capped_logits(50, false, NAN),
          *tight = capped_logits(1.5, false, NAN), *cheap = capped_logits(1.5, true, NAN),
          *final = capped_logits(NAN, false, 0.25);
    double of_wide = largest_difference(none, wide, n), of_tight = largest_difference(none, tight, n),
           of_cheap = largest_difference(tight, cheap, n);
    assert_true(of_wide > 0 && of_wide < 0.02 && of_tight > 20 * of_wide);
    assert_true(of_cheap > 0 && of_cheap < 1e-3);
    for (size_t i = 0; i < n; i++) { assert_error_below(fabs(final[i] - 0.25 * tanh((double)none[i] / 0.25)), 1e-6); }
    free(none), free(wide), free(tight), free(cheap), free(final);
}

int main(void) {
    backend_init("cpu", "float32");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_pairs),       cmocka_unit_test(test_a_window_of_everything),
        cmocka_unit_test(test_a_window_of_one),    cmocka_unit_test(test_nothing_before_the_window_is_read),
        cmocka_unit_test(test_operations),         cmocka_unit_test(test_sinks_of_rows_with_one_key),
        cmocka_unit_test(test_sinks_at_the_start), cmocka_unit_test(test_caps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
