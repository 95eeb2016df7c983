/*
The whole model against the float64 oracle (dev/reference.py): every file of test/fixtures is one case with
its logits, loss, gradients and optimiser steps; and the ways of computing the same thing against each other:
recomputation, gradient accumulation, the key/value cache, packed documents.
*/
#include "test_util.h"

#include <dirent.h>

#include "../llmc/checkpoint.h"
#include "../llmc/model.h"

#define FIXTURES "test/fixtures"

// The CPU chooses its precision at run time; a CUDA build has one.
#if defined(__CUDACC__) || defined(CUDA_EMULATOR)
static const char* const DEVICE = "cuda";
static const bool HAS_FP32 = sizeof(floatX) == sizeof(float), HAS_BF16 = sizeof(floatX) != sizeof(float);
enum { LACKING_TERMS = TERM_CAP | TERM_SINK | TERM_KEY | TERM_MIX };  // what its kernels of attention do not have
#else
static const char* const DEVICE = "cpu";
static const bool HAS_FP32 = true, HAS_BF16 = true;
enum { LACKING_TERMS = 0 };
#endif

typedef struct {
    char* path;
    SafeTensors file;
    ModelConfig config;
    size_t B, T;
    const int *tokens, *targets;
} Case;

static double number(const Case* c, const char* key) { return atof(safetensors_metadata(&c->file, key)); }
static bool flag(const Case* c, const char* key) { return strcmp(safetensors_metadata(&c->file, key), "1") == 0; }

static const int* integers(const SafeTensors* file, const char* name) {
    const SafeTensor* t = safetensors_find(file, name);
    int* values = (int*)xcalloc(t->count, sizeof(int));
    memcpy(values, t->data, t->bytes);
    return values;
}

// The flags that the oracle says it was given, defaults for the others.
static ModelOptions model_options(const SafeTensors* file) {
    ModelOptions o;
    Option rows[MODEL_OPTION_COUNT];
    for (int i = 0; i < MODEL_OPTION_COUNT; i++) { rows[i] = model_option_row(i, &o); }
    Options options = options_create("", "", rows, MODEL_OPTION_COUNT);
    for (int i = 0; i < MODEL_OPTION_COUNT; i++) {
        const char* value = safetensors_metadata(file, rows[i].name);
        if (value) { option_set(&options, &options.rows[i], OPTION_FROM_JSON, rows[i].name, value); }
    }
    options_free(&options);
    return o;
}

// The encodings of the layers, separated by commas, and their windows, if the fixture has such.
static void set_layers(ModelConfig* m, const char* encodings, const char* windows) {
    char *names = xstrdup(encodings), *at = NULL;
    size_t count = 0;
    for (char* name = strtok_r(names, ",", &at); name; name = strtok_r(NULL, ",", &at)) {
        assert_true(model_parse_layer(m, count++, name));
    }
    model_repeat_encodings(m, count);
    free(names);
    size_t list[8], n = 0;
    for (const char* c = windows; c; c = strchr(c, ',') ? strchr(c, ',') + 1 : NULL) { list[n++] = (size_t)atoi(c); }
    if (n > 0) { model_set_windows(m, list, n); }
}

static Case case_open(const char* path) {
    Case c;
    memset(&c, 0, sizeof c);
    c.path = xstrdup(path);
    c.file = safetensors_open(path);
    ModelConfig* m = &c.config;
    set_layers(m, safetensors_metadata(&c.file, "encoding"), safetensors_metadata(&c.file, "layer_windows"));
    m->V = (size_t)number(&c, "vocab_size"), m->C = (size_t)number(&c, "dim"), m->L = (size_t)number(&c, "n_layers");
    m->NH = (size_t)number(&c, "n_heads"), m->NKV = (size_t)number(&c, "n_kv_heads");
    m->F = (size_t)number(&c, "ffn_dim"), m->bos = (int)number(&c, "bos");
    m->options = model_options(&c.file);
    m->posenc = posenc_default_options();
    for (int t = 0; t < POSENC_TENSOR_COUNT; t++) {
        if (!model_has_encoding(m, posenc_tensor(t)->owner)) { continue; }
        char* name = text("%s_trainable", posenc_tensor(t)->name);
        m->posenc.trained[t] = flag(&c, name);
        free(name);
    }
    model_config_check(m);
    c.B = (size_t)number(&c, "batch"), c.T = (size_t)number(&c, "seq_len");
    c.tokens = integers(&c.file, "tokens"), c.targets = integers(&c.file, "targets");
    return c;
}

static void case_close(Case* c) {
    safetensors_close(&c->file);
    free(c->path);
    free((void*)c->tokens);
    free((void*)c->targets);
}

static void load_weights(Model* model, const SafeTensors* file) {
    for (size_t i = 0; i < model->tensor_count; i++) {
        checkpoint_read_tensor(file, model->tensors[i].name, &model->tensors[i], model, NULL);
    }
    model_parameters_changed(model);
}

static Model model_of(const Case* c, ModelMode mode, size_t B, size_t slots) {
    Model model;
    ModelPlan plan = {mode, B, c->T, slots, c->T, 0, 1};
    model_plan(&model, &c->config, &plan);
    model_allocate(&model);
    load_weights(&model, &c->file);
    return model;
}

static double* expected(const Case* c, const char* name, size_t* count) {
    const SafeTensor* t = safetensors_find(&c->file, name);
    if (!t) { fatal("%s has no %s", c->path, name); }
    float* values = (float*)xcalloc(t->count, sizeof(float));
    double* wide = (double*)xcalloc(t->count, sizeof(double));
    safetensors_read_f32(values, t);
    for (size_t i = 0; i < t->count; i++) { wide[i] = values[i]; }
    if (count) { *count = t->count; }
    free(values);
    return wide;
}

static float* all_logits(const Model* model, size_t rows) {
    size_t V = model->config.V;
    float* logits = (float*)xcalloc(rows * V, sizeof(float));
    for (size_t n = 0; n < rows; n++) { model_logits(model, logits + n * V, n); }
    return logits;
}

// The measure of one tensor: |got - want| as a length (all elements) or its largest element, relative to the same
// measure of want, or to `floor` when want is smaller: zero but for rounding.
static double tensor_error(const float* got, const double* want, size_t n, bool largest, double floor) {
    double error = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)got[i] - want[i]), w = fabs(want[i]);
        error = isnan(e) ? INFINITY : largest ? fmax(error, e) : error + e * e;
        size = largest ? fmax(size, w) : size + w * w;
    }
    return largest ? error / fmax(size, floor) : sqrt(error) / fmax(sqrt(size), floor);
}

typedef struct {
    double matrices, heads;  // tolerances; heads: seq_scale and priors
    bool largest;            // measure single elements, else the whole tensor
    double floor;
} Tolerance;

// An array of the model, its gradients or weights, in the host's memory; release with free().
static float* array_of(const Model* model, const float* device) {
    float* array = (float*)xcalloc(model->param_count, sizeof(float));
    copy_to_host(array, device, model->param_count * sizeof(float));
    return array;
}

// Compares an array of the model with the fixture's tensors PREFIX.NAME.
static void check_tensors(const Case* c, const Model* model, const float* device, const char* prefix,
                          Tolerance allowed) {
    float* array = array_of(model, device);
    for (size_t i = 0; i < model->tensor_count; i++) {
        const Tensor* t = &model->tensors[i];
        char* name = text("%s.%s", prefix, t->name);
        size_t n;
        double* want = expected(c, name, &n);
        assert_int_equal(n, t->count);
        double error = tensor_error(array + t->offset, want, n, allowed.largest, allowed.floor);
        double tolerance = t->dimensions == 4 ? allowed.heads : allowed.matrices;
        if (!(error <= tolerance)) { print_error("%s %s: error %g, allowed %g\n", c->path, name, error, tolerance); }
        assert_true(error <= tolerance);
        free(want);
        free(name);
    }
    free(array);
}

static void for_each_case(void (*check)(const Case*)) {
    DIR* dir = opendir(FIXTURES);
    assert_non_null(dir);
    size_t cases = 0;
    bool seen[POS_COUNT][2] = {{false}};
    for (struct dirent* entry; (entry = readdir(dir)) != NULL;) {
        const char* name = entry->d_name;
        size_t n = strlen(name);
        if (n < 12 || strcmp(name + n - 12, ".safetensors") != 0 || strncmp(name, "interop_", 8) == 0) { continue; }
        char* path = text("%s/%s", FIXTURES, name);
        Case c = case_open(path);
        if (!(model_terms(&c.config) & LACKING_TERMS)) { check(&c); }
        for (size_t l = 0; l < c.config.L; l++) { seen[c.config.layers[l].encoding][c.config.layers[l].ssmax] = true; }
        cases++;
        case_close(&c);
        free(path);
    }
    closedir(dir);
    for (int k = 0; k < POS_COUNT; k++) { assert_true(seen[k][0] && seen[k][1]); }  // all encodings
    assert_true(cases >= 10);
}

// ----------------------------------------------------------------------------
// against the oracle

// fp32: every product and sum is rounded to 6e-8 and a logit is some hundred of them. bf16: factors are rounded
// to 4e-3, half of that on average, and errors of many factors average out; measured as the length of the whole
// tensor. The gradients of seq_scale and of the priors are small differences of large sums over all pairs of
// tokens: the same model in fp32 elsewhere is off by 2e-5 of their largest, and by 6e-5 where theta_beta < 0.
typedef struct {
    double logits, loss;
    Tolerance gradients;
} Precisions;
static const Precisions FP32 = {2e-6, 1e-6, {1e-5, 1e-4, true, 0}};
#if defined(__CUDACC__) || defined(CUDA_EMULATOR)
// Here activations, the residual stream and their gradients are stored in bf16 too, once per operator.
static const Precisions BF16 = {3e-2, 5e-3, {5e-2, 1.2e-1, false, 0}};
#else
static const Precisions BF16 = {2e-2, 2e-3, {2e-2, 5e-2, false, 0}};
#endif

static void check_forward_backward(const Case* c, const Precisions* allowed) {
    Model model = model_of(c, MODE_TRAIN, c->B, 1);
    size_t N = c->B * c->T;
    model_forward(&model, c->tokens, c->B, c->T);
    float* logits = all_logits(&model, N);
    double *want = expected(c, "logits", NULL), *loss = expected(c, "loss", NULL);
    double* norm = expected(c, "grad_norm", NULL);
    double error = tensor_error(logits, want, N * c->config.V, allowed->gradients.largest, 0);
    if (!(error <= allowed->logits)) { print_error("%s:\n", c->path); }
    assert_error_below(error, allowed->logits);
    model_zero_gradients(&model);
    model_backward(&model, c->targets, 1.0f / (float)N, 0);
    assert_error_below(fabs(model_mean_loss(&model, 1) - *loss), allowed->loss);
    Tolerance tolerance = allowed->gradients;
    tolerance.floor = 1e-2 * *norm;  // smaller tensors are what is left of larger terms
    check_tensors(c, &model, model.grads, "grad", tolerance);
    assert_error_below(fabs(model_gradient_norm(&model) - *norm) / *norm, tolerance.matrices);
    free(logits);
    free(want);
    free(loss);
    free(norm);
    model_free(&model);
}

static void check_fp32(const Case* c) { check_forward_backward(c, &FP32); }
static void check_bf16(const Case* c) { check_forward_backward(c, &BF16); }

static void test_oracle_fp32(void** state) {
    (void)state;
    if (!HAS_FP32) { skip(); }
    for_each_case(check_fp32);
}

static void test_oracle_bf16(void** state) {
    (void)state;
    if (!HAS_BF16) { skip(); }
    backend_init(DEVICE, "bfloat16");
    for_each_case(check_bf16);
    if (HAS_FP32) { backend_init(DEVICE, "float32"); }
}

static UpdateSettings settings_of(const Case* c) {
    UpdateSettings s;
    memset(&s, 0, sizeof s);
    s.learning_rate = number(c, "learning_rate"), s.prior_learning_rate = number(c, "prior_lr");
    s.weight_decay = number(c, "weight_decay");
    s.beta1 = number(c, "beta1"), s.beta2 = number(c, "beta2"), s.epsilon = number(c, "eps");
    s.adamw = strcmp(safetensors_metadata(&c->file, "optimizer"), "adamw") == 0;
    return s;
}

static void check_steps(const Case* c) {
    Model model = model_of(c, MODE_TRAIN, c->B, 1);
    UpdateSettings s = settings_of(c);
    size_t steps = (size_t)number(c, "steps");
    double* losses = expected(c, "losses", NULL);
    double clip = number(c, "grad_clip");
    // Absolute: weights are of order 1 and move by up to 6e-2. From the first step on AdamW divides by gradients that
    // may be hardly more than rounding, so single weights go astray and the whole tensor is measured.
    double allowed = s.adamw ? 1e-4 : 3e-6;
    Tolerance tolerance = {allowed, allowed, !s.adamw, 1.0};
    for (s.step = 1; s.step <= steps; s.step++) {
        model_forward(&model, c->tokens, c->B, c->T);
        model_zero_gradients(&model);
        model_backward(&model, c->targets, 1.0f / (float)(c->B * c->T), 0);
        assert_error_below(fabs(model_mean_loss(&model, 1) - losses[s.step - 1]), 2e-6);
        double norm = model_gradient_norm(&model);
        s.gradient_scale = norm + 1e-6 > clip ? clip / (norm + 1e-6) : 1.0;
        model_update(&model, &s);
        if (s.step == 3) { check_tensors(c, &model, model.master, "step3", tolerance); }
        if (s.step == 8) {
            tolerance.matrices *= 3, tolerance.heads *= 3;  // rounding differences grow from step to step
            check_tensors(c, &model, model.master, "step8", tolerance);
        }
    }
    free(losses);
    model_free(&model);
}

static void test_optimizer_steps(void** state) {
    (void)state;
    if (!HAS_FP32) { skip(); }
    for_each_case(check_steps);
}

// ----------------------------------------------------------------------------
// the same thing computed in other ways

static float* gradients_of(const Case* c, ModelMode mode, size_t micro_steps) {
    Model model = model_of(c, mode, c->B / micro_steps, micro_steps);
    size_t rows = c->B / micro_steps * c->T;
    model_zero_gradients(&model);
    for (size_t m = 0; m < micro_steps; m++) {
        model_forward(&model, c->tokens + m * rows, c->B / micro_steps, c->T);
        model_backward(&model, c->targets + m * rows, 1.0f / (float)(c->B * c->T), m);
    }
    float* grads = array_of(&model, model.grads);
    model_free(&model);
    return grads;
}

static void check_recompute(const Case* c) {
    Model shape;
    ModelPlan plan = {MODE_TRAIN, c->B, c->T, 1, c->T, 0, 1};
    model_plan(&shape, &c->config, &plan);
    float *kept = gradients_of(c, MODE_TRAIN, 1), *again = gradients_of(c, MODE_TRAIN_RECOMPUTE, 1);
    assert_memory_equal(kept, again, shape.param_count * sizeof(float));
    // sequences one by one: sums in another order
    float* split = gradients_of(c, MODE_TRAIN, c->B);
    double difference = 0, square = 0;
    for (size_t i = 0; i < shape.param_count; i++) {
        difference += pow((double)split[i] - kept[i], 2), square += pow(kept[i], 2);
    }
    assert_error_below(sqrt(difference / square), HAS_FP32 ? 1e-6 : 2e-2);
    free(kept);
    free(again);
    free(split);
    model_free(&shape);
}

static void test_recompute_and_accumulation(void** state) {
    (void)state;
    for_each_case(check_recompute);
}

static void check_cache(const Case* c) {
    size_t V = c->config.V, chunks[] = {1, 7, 64, c->T};
    Model model = model_of(c, MODE_INFERENCE, c->B, 1);
    model_forward(&model, c->tokens, c->B, c->T);
    float* full = all_logits(&model, c->B * c->T);
    double* want = (double*)xcalloc(c->T * V, sizeof(double));
    for (size_t b = 0; b < c->B; b++) {
        for (size_t i = 0; i < c->T * V; i++) { want[i] = full[b * c->T * V + i]; }
        for (size_t k = 0; k < sizeof chunks / sizeof *chunks; k++) {
            KVCache cache = kv_cache_create(&c->config, c->T);
            while (cache.length < c->T) {
                size_t at = cache.length, n = c->T - at < chunks[k] ? c->T - at : chunks[k];
                model_prefill(&model, &cache, c->tokens + b * c->T + at, n);
                float* logits = all_logits(&model, n);
                // in fp32 one row of products may be summed in another order than many
                assert_error_below(relative_error(logits, want + at * V, n * V), HAS_FP32 ? 3e-6 : 2e-2);
                free(logits);
            }
            kv_cache_free(&cache);
        }
    }
    free(full);
    free(want);
    model_free(&model);
}

static void test_cache_equals_full_forward(void** state) {
    (void)state;
    for_each_case(check_cache);
}

// A document gives the same logits alone as behind another one, except where the encoding adds the position in
// the sequence (sinusoidal, learned).
static void check_packed(const Case* c) {
    if (model_adds_positions(&c->config)) { return; }
    size_t V = c->config.V, T = c->T, start = 0;
    for (size_t t = T - 1; t > 0 && start == 0; t--) { start = c->tokens[t] == c->config.bos ? t : 0; }
    if (start == 0) { return; }
    Model model = model_of(c, MODE_INFERENCE, c->B, 1);
    model_forward(&model, c->tokens, 1, T);
    float* packed = all_logits(&model, T);
    model_forward(&model, c->tokens + start, 1, T - start);
    float* alone = all_logits(&model, T - start);
    double* want = (double*)xcalloc((T - start) * V, sizeof(double));
    for (size_t i = 0; i < (T - start) * V; i++) { want[i] = packed[start * V + i]; }
    assert_error_below(relative_error(alone, want, (T - start) * V), HAS_FP32 ? 3e-6 : 2e-2);
    free(packed);
    free(alone);
    free(want);
    model_free(&model);
}

static void test_packed_documents(void** state) {
    (void)state;
    for_each_case(check_packed);
}

static void test_documents_are_counted(void** state) {
    (void)state;
    const int tokens[] = {1, 5, 1, 1, 6, 7, 8, 1};  // two sequences
    assert_int_equal(count_documents(tokens, 1, 2, 4), 5);
    assert_int_equal(count_documents(tokens, 9, 2, 4), 2);
    assert_int_equal(count_documents(tokens, -1, 2, 4), 2);
    assert_int_equal(count_documents(tokens, 1, 1, 8), 4);
}

int main(void) {
    backend_init(DEVICE, HAS_FP32 ? "float32" : "bfloat16");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle_fp32),
        cmocka_unit_test(test_oracle_bf16),
        cmocka_unit_test(test_optimizer_steps),
        cmocka_unit_test(test_recompute_and_accumulation),
        cmocka_unit_test(test_cache_equals_full_forward),
        cmocka_unit_test(test_packed_documents),
        cmocka_unit_test(test_documents_are_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
