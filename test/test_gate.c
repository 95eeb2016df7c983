/*
gate.c against float64 and differences of it, saturated gates and aliasing.
*/
#include "test_util.h"

#include "../llmc/backend.h"

static double gated(double x, double g) { return x / (1 + exp(-g)); }

// Single precision with an exponential good to 1 ulp.
static const double tolerance = 3e-7;

static void check_gate(size_t n) {
    Random r = random_stream(1, n);
    float *x = random_array(n, 2.0, &r), *g = random_array(n, 4.0, &r), *dy = random_array(n, 1.0, &r);
    float *out = xcalloc(n, sizeof(float)), *dx = xcalloc(n, sizeof(float)), *dg = xcalloc(n, sizeof(float));
    double *want = xcalloc(n, sizeof(double)), *want_dx = xcalloc(n, sizeof(double));
    double* want_dg = xcalloc(n, sizeof(double));
    const double h = 1e-5;
    for (size_t i = 0; i < n; i++) {
        double a = (double)x[i], b = (double)g[i], d = (double)dy[i];
        want[i] = gated(a, b), want_dx[i] = d * gated(1, b);
        want_dg[i] = d * (gated(a, b + h) - gated(a, b - h)) / (2 * h);
    }
    gate_forward(out, x, g, n);
    gate_backward(dx, dg, dy, x, g, n);
    assert_error_below(relative_error(out, want, n), tolerance);
    assert_error_below(relative_error(dx, want_dx, n), tolerance);
    assert_error_below(relative_error(dg, want_dg, n), tolerance);
    gate_backward(dy, g, dy, x, g, n);
    assert_memory_equal(dy, dx, n * sizeof(float));
    assert_memory_equal(g, dg, n * sizeof(float));
    free(x), free(g), free(dy), free(out), free(dx), free(dg), free(want), free(want_dx), free(want_dg);
}

static void test_against_float64(void** state) {
    (void)state;
    check_gate(1);
    check_gate(7);
    check_gate(100003);
}

static void test_saturation(void** state) {
    (void)state;
    static const float gates[] = {-1e4f, -89.0f, 0.0f, 89.0f, 1e4f}, values[] = {0.0f, 0.0f, 1.5f, 3.0f, 3.0f};
    for (size_t i = 0; i < 5; i++) {
        float x = 3.0f, dy = 1.0f, out, dx, dg;
        gate_forward(&out, &x, gates + i, 1);
        gate_backward(&dx, &dg, &dy, &x, gates + i, 1);
        assert_true(fabsf(out - values[i]) < 1e-30f && fabsf(dx - values[i] / 3.0f) < 1e-30f);
        assert_true(fabsf(dg - (i == 2 ? 0.75f : 0.0f)) < 1e-30f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_float64),
        cmocka_unit_test(test_saturation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
