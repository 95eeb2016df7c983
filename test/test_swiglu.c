/*
swiglu.c against float64 and finite differences of the float64 forward, saturated gates and aliasing;
exp_fast of cpu_math.h over the whole range of fp32.
*/
#include <float.h>

#include "test_util.h"

#include "../llmc/backend.h"
#include "../llmc/cpu_math.h"

// In units of the last place of want, for normal results.
static double ulp_error(float got, double want) { return fabs(got - want) / ldexp(1.0, ilogb(want) - 23); }

static void check_exp(float x, float got) {
    double want = exp((double)x);
    bool right;
    if (isnan(x)) {
        right = isnan(got);
    } else if (want > FLT_MAX) {
        right = got == INFINITY;
    } else if (want < FLT_MIN) {
        right = got == 0.0f;  // flushed
    } else {
        right = ulp_error(got, want) < 1.05;  // worst over all floats: 1.02
    }
    if (!right) {
        print_error("exp(%a) = %a, expected %a\n", x, got, want);
        fail();
    }
}

// Every 1021st bit pattern, both signs, plus the borders; vectorised as in the operators.
static void test_exp_fast(void** state) {
    (void)state;
    enum { BLOCK = 4096 };
    static float x[BLOCK], y[BLOCK];
    for (uint64_t bits = 0; bits < 1ull << 32;) {
        for (size_t i = 0; i < BLOCK; i++, bits += 1021) { x[i] = float_from_bits((uint32_t)bits); }
#pragma omp simd
        for (size_t i = 0; i < BLOCK; i++) { y[i] = exp_fast(x[i]); }
        for (size_t i = 0; i < BLOCK; i++) { check_exp(x[i], y[i]); }
    }
    for (float border = -87.4f; border < -87.3f; border = nextafterf(border, 0.0f)) {
        check_exp(border, exp_fast(border));
    }
    for (float border = 88.7f; border < 88.75f; border = nextafterf(border, 100.0f)) {
        check_exp(border, exp_fast(border));
    }
    assert_true(exp_fast(0.0f) == 1.0f && exp_fast(-0.0f) == 1.0f);
    assert_true(exp_fast(-INFINITY) == 0.0f && exp_fast(INFINITY) == INFINITY);
    assert_true(isnan(exp_fast(NAN)) && isnan(exp_fast(-NAN)));
}

static double silu(double g) { return g / (1 + exp(-g)); }

typedef struct {
    size_t N, F;
} Shape;

static const Shape shapes[] = {{1, 1}, {7, 1}, {1, 7}, {3, 33}, {5, 1024}, {1, 1000003}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

// Single precision with an exponential good to 1 ulp.
static const double tolerance = 3e-7;

static void test_forward(void** state) {
    (void)state;
    for (size_t k = 0; k < SHAPES; k++) {
        size_t N = shapes[k].N, F = shapes[k].F;
        Random r = random_stream(1, k);
        float *gate_up = random_array(N * 2 * F, 4.0, &r), *out = random_array(N * F, 1.0, &r);
        double* want = xcalloc(N * F, sizeof(double));
        for (size_t n = 0; n < N; n++) {
            const float *gate = gate_up + n * 2 * F, *up = gate + F;
            for (size_t f = 0; f < F; f++) { want[n * F + f] = silu(gate[f]) * up[f]; }
        }
        swiglu_forward(out, gate_up, N, F);
        assert_error_below(relative_error(out, want, N * F), tolerance);
        free(gate_up), free(out), free(want);
    }
}

// Central differences of silu in float64 with h = 1e-4: truncation h^2/6 silu''' (below 1e-9), rounding 1e-11.
static void test_backward(void** state) {
    (void)state;
    const double h = 1e-4;
    for (size_t k = 0; k < SHAPES; k++) {
        size_t N = shapes[k].N, F = shapes[k].F;
        Random r = random_stream(2, k);
        float *gate_up = random_array(N * 2 * F, 4.0, &r), *dout = random_array(N * F, 1.0, &r);
        float* got = random_array(N * 2 * F, 1.0, &r);
        double* want = xcalloc(N * 2 * F, sizeof(double));
        for (size_t n = 0; n < N; n++) {
            for (size_t f = 0; f < F; f++) {
                double dy = dout[n * F + f], g = gate_up[n * 2 * F + f], up = gate_up[n * 2 * F + F + f];
                want[n * 2 * F + f] = dy * up * (silu(g + h) - silu(g - h)) / (2 * h);
                want[n * 2 * F + F + f] = dy * silu(g);
            }
        }
        swiglu_backward(got, dout, gate_up, N, F);
        assert_error_below(relative_error(got, want, N * 2 * F), tolerance);

        swiglu_backward(gate_up, dout, gate_up, N, F);
        assert_memory_equal(gate_up, got, N * 2 * F * sizeof(float));
        free(gate_up), free(dout), free(got), free(want);
    }
}

// Gates where a careless sigmoid overflows: silu is 0 or the gate itself, its derivative 0 or 1.
static void test_saturation(void** state) {
    (void)state;
    const struct {
        float gate, silu, derivative;
    } table[] = {{-1e4f, 0, 0}, {-200, 0, 0}, {-89, 0, 0},   {-88, 0, 0},    {0, 0, 0.5f},
                 {88, 88, 1},   {89, 89, 1},  {200, 200, 1}, {1e4f, 1e4f, 1}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        float gate_up[2] = {table[i].gate, 3.0f}, out, dgate_up[2], dout = 1.0f;
        swiglu_forward(&out, gate_up, 1, 1);
        swiglu_backward(dgate_up, &dout, gate_up, 1, 1);
        assert_true(fabsf(out - 3.0f * table[i].silu) < 1e-30f);
        assert_true(fabsf(dgate_up[0] - 3.0f * table[i].derivative) < 1e-30f);
        assert_true(fabsf(dgate_up[1] - table[i].silu) < 1e-30f);
    }
    float gate_up[2] = {NAN, 1.0f}, out;
    swiglu_forward(&out, gate_up, 1, 1);
    assert_true(isnan(out));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp_fast),
        cmocka_unit_test(test_forward),
        cmocka_unit_test(test_backward),
        cmocka_unit_test(test_saturation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
