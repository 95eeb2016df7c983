/*
What a CUDA step does outside the forward and backward pass: sums for the host, the optimisers against those of the
CPU, stochastic rounding; the choice of device and its memory.
*/
#include "cuda_ops_util.h"

// ----------------------------------------------------------------------------
// sums

static void test_sums(void** state) {
    (void)state;
    static const size_t counts[] = {0, 1, 3, 1024, 5001, 70000};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        const size_t n = counts[i];
        Random r = random_stream(10, i);
        float* x = random_array(n + 1, 1.0, &r);
        float* device = device_copy<float>(x, n + 1);
        for (size_t shift = 0; shift < 2; shift++) {  // aligned and not
            double sum = 0, squares = 0, first_sum = 0, first_squares = 0;
            for (size_t j = 0; j < n; j++) {
                sum += x[shift + j], squares += (double)x[shift + j] * (double)x[shift + j];
            }
            for (unsigned order = 0; order < ORDERS; order++) {
                set_order(order);
                double got_sum = array_sum(device + shift, n), got_squares = sum_of_squares(device + shift, n);
                if (order == 0) { first_sum = got_sum, first_squares = got_squares; }
                assert_true(got_sum == first_sum && got_squares == first_squares);
            }
            assert_error_below(fabs(first_sum - sum), 1e-11);
            assert_error_below(fabs(first_squares - squares), 1e-13 * (squares + 1));
        }
        free(x), device_free(device);
    }
}

static void test_sums_not_finite(void** state) {
    (void)state;
    float x[300] = {0};
    float* device = device_copy<float>(x, 300);
    static const float values[] = {INFINITY, -INFINITY, NAN, 3e38f};
    for (size_t i = 0; i < 4; i++) {
        x[277] = values[i];
        upload(device, x, 300);
        double got = sum_of_squares(device, 300);
        if (isnan(values[i])) { assert_true(isnan(got)); }
        if (isinf(values[i])) { assert_true(isinf(got)); }
        if (isfinite(values[i])) { assert_true(got == (double)values[i] * (double)values[i]); }
    }
    device_free(device);
}

// ----------------------------------------------------------------------------
// optimisers

typedef struct {
    size_t n, steps;
    bool adamw;
} Optimizer;

static OptimizerStep optimizer_step(size_t step) {
    OptimizerStep s;
    s.learning_rate = 1e-2, s.beta1 = 0.9, s.beta2 = 0.95, s.epsilon = 1e-2, s.weight_decay = 0.1;
    s.gradient_scale = 0.5, s.step = step, s.first = 0;
    return s;
}

// Every bf16 copy is one of the two neighbours of its master weight.
static void check_copy(const float* copy, const float* master, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &master[i], sizeof bits);
        uint32_t below_bits = bits & 0xffff0000u, above_bits = below_bits + 0x10000u;
        float below, above;
        memcpy(&below, &below_bits, sizeof below), memcpy(&above, &above_bits, sizeof above);
        assert_true(copy[i] == below || (copy[i] == above && bits != below_bits));
    }
}

static void check_optimizer(Optimizer k, unsigned order, Result* results) {
    const size_t n = k.n;
    Random r = random_stream(11, n);
    float *p = random_array(n, 1.0, &r), *m = (float*)xcalloc(n, sizeof(float)), *v = (float*)xcalloc(n, sizeof(float));
    float* copy = (float*)xcalloc(n, sizeof(float));
    float *d_p = device_copy<float>(p, n), *d_m = device_copy<float>(m, n), *d_v = device_copy<float>(v, n);
    float* d_g = device_copy<float>(p, n);
    floatX* d_copy = sizeof(floatX) == sizeof(float) ? (floatX*)d_p : device_copy<floatX>(p, n);
    set_order(order);
    for (size_t step = 1; step <= k.steps; step++) {
        float* g = random_array(n, 1.0, &r);
        upload(d_g, g, n);
        OptimizerStep s = optimizer_step(step);
        cpu::OptimizerStep cs;
        memcpy(&cs, &s, sizeof cs);
        (k.adamw ? cpu::adamw_update : cpu::radam_update)(p, p, m, v, g, &cs, n);
        (k.adamw ? adamw_update : radam_update)(d_p, d_copy, d_m, d_v, d_g, &s, n);
        free(g);
    }
    check_result(&results[0], "master", d_p, p, n, 0, FP32_NOISE, order);
    check_result(&results[1], "m", d_m, m, n, 0, FP32_NOISE, order);
    check_result(&results[2], "v", d_v, v, n, 0, FP32_NOISE, order);
    check_result(&results[3], "copy", d_copy, p, n, 2 * ROUNDING, FP32_NOISE, order);
    download(copy, d_copy, n), download(p, d_p, n);
    if (sizeof(floatX) < sizeof(float)) { check_copy(copy, p, n); }
    if ((void*)d_copy != (void*)d_p) { device_free(d_copy); }
    device_free(d_p), device_free(d_m), device_free(d_v), device_free(d_g);
    free(p), free(m), free(v), free(copy);
}

static void test_optimizers(void** state) {
    (void)state;
    static const Optimizer cases[] = {{1, 8, false}, {7, 3, true}, {1024, 8, false}, {1027, 8, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Result results[4];
        for (unsigned order = 0; order < ORDERS; order++) { check_optimizer(cases[i], order, results); }
    }
}

// The copy of n master weights after an update that leaves them as they are.
static float* rounded_copy(const float* master, size_t n, size_t first, unsigned long long step_number) {
    float *zero = (float*)xcalloc(n, sizeof(float)), *copy = (float*)xcalloc(n, sizeof(float));
    float *d_p = device_copy<float>(master, n), *d_m = device_copy<float>(zero, n), *d_v = device_copy<float>(zero, n);
    float* d_g = device_copy<float>(zero, n);
    floatX* d_copy = (floatX*)device_malloc(n * sizeof(floatX));
    OptimizerStep s = optimizer_step(step_number);
    s.learning_rate = 0, s.first = first;
    adamw_update(d_p, d_copy, d_m, d_v, d_g, &s, n);
    download(copy, d_copy, n);
    device_free(d_p), device_free(d_m), device_free(d_v), device_free(d_g), device_free(d_copy), free(zero);
    return copy;
}

// The copy that is made again, as after loading a checkpoint; `shift` elements beyond what a vector is aligned to.
static float* copy_made_again(const float* master, size_t n, unsigned long long step_number, size_t shift) {
    float *d_p = device_copy<float>(master, n), *copy = (float*)xcalloc(n, sizeof(float));
    floatX* d_copy = (floatX*)device_malloc((n + shift) * sizeof(floatX));
    recast_parameters(d_copy + shift, d_p, step_number, n);
    download(copy, d_copy + shift, n);
    device_free(d_p), device_free(d_copy);
    return copy;
}

static double share_above(const float* copy, size_t n, float limit) {
    size_t above = 0;
    for (size_t i = 0; i < n; i++) { above += copy[i] > limit; }
    return (double)above / (double)n;
}

// The share rounded up is the distance from the lower neighbour, in units of their distance, for either sign.
static void test_stochastic_rounding_unbiased(void** state) {
    (void)state;
    if (sizeof(floatX) == sizeof(float)) { skip(); }
    enum { N = 20000 };
    static const double shares[] = {0.0, 1.0 / 256, 0.3, 0.5, 0.9};
    float* master = (float*)xcalloc(N, sizeof(float));
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++) {
        for (int sign = -1; sign <= 1; sign += 2) {
            for (size_t j = 0; j < N; j++) { master[j] = (float)(sign * (1.0 + 0x1p-7 * shares[i])); }
            float* copy = rounded_copy(master, N, i * N, 1);
            for (size_t j = 0; j < N; j++) { copy[j] *= (float)sign; }
            // five standard deviations of a binomial share
            double bound = 5 * sqrt(shares[i] * (1 - shares[i]) / N);
            assert_error_below(fabs(share_above(copy, N, 1.0f) - shares[i]), bound);
            // elements at any small distance are independent: they agree with p^2 + (1 - p)^2
            double expected = shares[i] * shares[i] + (1 - shares[i]) * (1 - shares[i]);
            for (size_t lag = 1; lag <= 32; lag++) {
                size_t equal = 0;
                for (size_t j = 0; j + lag < N; j++) { equal += copy[j] == copy[j + lag]; }
                double got = (double)equal / (double)(N - lag);
                assert_error_below(fabs(got - expected), 10 * sqrt(expected * (1 - expected) / N));
            }
            free(copy);
        }
    }
    free(master);
}

static void test_stochastic_rounding_deterministic(void** state) {
    (void)state;
    if (sizeof(floatX) == sizeof(float)) { skip(); }
    enum { N = 1003 };
    Random r = random_stream(12, 0);
    float* master = random_array(N, 1.0, &r);
    const uint32_t nan_bits = 0x7fffffffu;  // what a GPU computes; adding to it would give -0
    memcpy(&master[5], &nan_bits, sizeof nan_bits);
    master[6] = 0.0f;
    float *copy = rounded_copy(master, N, 0, 1), *again = rounded_copy(master, N, 0, 1);
    float *elsewhere = rounded_copy(master, N, 4, 1), *other_step = rounded_copy(master, N, 0, 2);
    assert_memory_equal(copy, again, N * sizeof(float));
    // parts, which need not begin or end with a vector, are rounded as in the whole
    static const size_t cuts[] = {0, 7, 16, 500, 997, N};
    for (size_t i = 0; i + 1 < sizeof cuts / sizeof *cuts; i++) {
        size_t begin = cuts[i], n = cuts[i + 1] - begin;
        float* part = rounded_copy(master + begin, n, begin, 1);
        assert_memory_equal(copy + begin, part, n * sizeof(float));
        free(part);
    }
    for (size_t shift = 0; shift < 2; shift++) {
        float* made_again = copy_made_again(master, N, 1, shift);
        assert_memory_equal(copy, made_again, N * sizeof(float));
        free(made_again);
    }
    assert_true(memcmp(copy, elsewhere, N * sizeof(float)) != 0);
    assert_true(memcmp(copy, other_step, N * sizeof(float)) != 0);
    assert_true(isnan(copy[5]) && copy[6] == 0);
    free(master), free(copy), free(again), free(elsewhere), free(other_step);
}

// ----------------------------------------------------------------------------
// device

typedef struct {
    const char *device, *dtype;
} DeviceFlags;

static void call_backend_init(void* argument) {
    const DeviceFlags* flags = (const DeviceFlags*)argument;
    backend_init(flags->device, flags->dtype);
}

static void ask_for_too_much(void* argument) {
    (void)argument;
    device_malloc((size_t)1 << 50);
}

static void test_backend(void** state) {
    (void)state;
    const char* other = sizeof(floatX) == sizeof(float) ? "bfloat16" : "float32";
    DeviceFlags wrong[] = {{"cpu", PRECISION_NAME},     {"cuda:", PRECISION_NAME}, {"cuda:1x", PRECISION_NAME},
                           {"cuda:99", PRECISION_NAME}, {"auto", other},           {"auto", "float16"}};
    const char* words[][4] = {{"--device cpu", "cuda:N", NULL},
                              {"--device cuda:", "cuda:N", NULL},
                              {"cuda:1x", "cuda:N", NULL},
                              {"cuda:99", "below", NULL},
                              {"--dtype", other, "make cuda PRECISION=", NULL},
                              {"float16", "expected", NULL}};
    for (size_t i = 0; i < 6; i++) { expect_fatal(call_backend_init, &wrong[i], words[i]); }
    const char* memory_words[] = {"out of device memory", "1125899906842624 bytes", "free", "--batch_size", NULL};
    expect_fatal(ask_for_too_much, NULL, memory_words);
    const char* right[] = {"auto", "cuda", "cuda:0", "", NULL};
    for (size_t i = 0; i < 5; i++) { backend_init(right[i], PRECISION_NAME); }
    char line[512];
    backend_describe(line, sizeof line);
    assert_non_null(strstr(line, PRECISION_NAME));
    assert_non_null(strstr(line, "cuBLASLt"));
    size_t before = device_memory_available();
    void* p = device_malloc((size_t)8 << 20);
    assert_true(device_memory_available() < before);
    device_free(p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_backend),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_sums_not_finite),
        cmocka_unit_test(test_optimizers),
        cmocka_unit_test(test_stochastic_rounding_unbiased),
        cmocka_unit_test(test_stochastic_rounding_deterministic),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
