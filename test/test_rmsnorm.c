/*
rmsnorm.c against float64 and against finite differences of the float64 forward; aliasing; bitwise equality
over thread counts.
*/
#include "test_util.h"

#include "../llmc/backend.h"

typedef struct {
    size_t N, C;
    double scale;  // of the input: at 1e-3 the epsilon counts
} Case;

static const Case cases[] = {{1, 1, 1.0},    {1, 7, 1e-3},    {3, 24, 1.0},    {65, 33, 1e-3},
                             {64, 768, 1.0}, {130, 512, 1.0}, {200, 48, 10.0}, {2, 4099, 1.0}};
enum { CASES = sizeof cases / sizeof *cases };

static double reference_rstd(const double* x, size_t C) {
    double sum = 0;
    for (size_t c = 0; c < C; c++) { sum += x[c] * x[c]; }
    return 1 / sqrt(sum / (double)C + 1e-5);
}

static double* widen(const float* x, size_t n) {
    double* y = xcalloc(n, sizeof(double));
    for (size_t i = 0; i < n; i++) { y[i] = x[i]; }
    return y;
}

// sums of C squares in fp32, in at least 8 lanes
static const double tolerance = 1e-6;

static void check_forward(const float* out, const float* rstd, const double* x, const float* weight, Case k) {
    double *want = xcalloc(k.N * k.C, sizeof(double)), *want_rstd = xcalloc(k.N, sizeof(double));
    for (size_t n = 0; n < k.N; n++) {
        want_rstd[n] = reference_rstd(x + n * k.C, k.C);
        for (size_t c = 0; c < k.C; c++) { want[n * k.C + c] = x[n * k.C + c] * want_rstd[n] * weight[c]; }
    }
    assert_error_below(relative_error(out, want, k.N * k.C), tolerance);
    assert_error_below(relative_error(rstd, want_rstd, k.N), tolerance);
    free(want), free(want_rstd);
}

static void test_forward(void** state) {
    (void)state;
    for (size_t i = 0; i < CASES; i++) {
        Case k = cases[i];
        Random r = random_stream(1, i);
        size_t n = k.N * k.C;
        float *inp = random_array(n, k.scale, &r), *weight = random_array(k.C, 1.0, &r);
        float *out = random_array(n, 1.0, &r), *rstd = random_array(k.N, 1.0, &r);
        double* x = widen(inp, n);
        rmsnorm_forward(out, rstd, inp, weight, k.N, k.C);
        check_forward(out, rstd, x, weight, k);
        free(inp), free(weight), free(out), free(rstd), free(x);
    }
}

static void test_residual_forward(void** state) {
    (void)state;
    for (size_t i = 0; i < CASES; i++) {
        Case k = cases[i];
        Random r = random_stream(2, i);
        size_t n = k.N * k.C;
        float *a = random_array(n, k.scale, &r), *b = random_array(n, k.scale, &r),
              *weight = random_array(k.C, 1.0, &r);
        float *residual = random_array(n, 1.0, &r), *out = random_array(n, 1.0, &r), *rstd = random_array(k.N, 1.0, &r);
        float *out2 = xcalloc(n, sizeof(float)), *sum = xcalloc(n, sizeof(float));
        for (size_t j = 0; j < n; j++) { sum[j] = a[j] + b[j]; }
        double* x = widen(sum, n);
        residual_rmsnorm_forward(residual, out, rstd, a, b, weight, k.N, k.C);
        assert_memory_equal(residual, sum, n * sizeof(float));
        check_forward(out, rstd, x, weight, k);

        memcpy(residual, a, n * sizeof(float));
        residual_rmsnorm_forward(residual, out2, rstd, residual, b, weight, k.N, k.C);
        assert_memory_equal(residual, sum, n * sizeof(float));
        assert_memory_equal(out2, out, n * sizeof(float));
        memcpy(residual, b, n * sizeof(float));
        residual_rmsnorm_forward(residual, out2, rstd, a, residual, weight, k.N, k.C);
        assert_memory_equal(residual, sum, n * sizeof(float));
        assert_memory_equal(out2, out, n * sizeof(float));
        free(a), free(b), free(weight), free(residual), free(out), free(rstd), free(out2), free(sum), free(x);
    }
}

// The workspace is exactly as large as promised, so that a sanitizer sees any step outside.
static void run_backward(float* dinp, float* dweight, const float* dout, const float* inp, const float* weight,
                         const float* rstd, size_t N, size_t C) {
    size_t bytes = rmsnorm_workspace(N, C);
    void* workspace = xcalloc(bytes, 1);
    memset(workspace, 0xFF, bytes);  // NaN: the operator must not count on zeros
    rmsnorm_backward(dinp, dweight, dout, inp, weight, rstd, workspace, N, C);
    free(workspace);
}

// Gradients of sum(dout * y), added to what dinp and dweight hold.
static void reference_backward(double* dinp, double* dweight, const float* dout, const double* x, const float* weight,
                               size_t N, size_t C) {
    for (size_t n = 0; n < N; n++) {
        const double* row = x + n * C;
        double s = reference_rstd(row, C), dot = 0;
        for (size_t c = 0; c < C; c++) { dot += (double)dout[n * C + c] * weight[c] * row[c]; }
        for (size_t c = 0; c < C; c++) {
            double dy = dout[n * C + c];
            dinp[n * C + c] += s * dy * weight[c] - s * s * s / (double)C * row[c] * dot;
            dweight[c] += dy * row[c] * s;
        }
    }
}

static void test_backward(void** state) {
    (void)state;
    for (size_t i = 0; i < CASES; i++) {
        Case k = cases[i];
        Random r = random_stream(3, i);
        size_t n = k.N * k.C;
        float *inp = random_array(n, k.scale, &r), *weight = random_array(k.C, 1.0, &r);
        float *dout = random_array(n, 1.0, &r), *dinp0 = random_array(n, 1.0, &r),
              *dweight0 = random_array(k.C, 1.0, &r);
        float *out = xcalloc(n, sizeof(float)), *rstd = xcalloc(k.N, sizeof(float));
        rmsnorm_forward(out, rstd, inp, weight, k.N, k.C);
        double *x = widen(inp, n), *want_dinp = widen(dinp0, n), *want_dweight = widen(dweight0, k.C);
        reference_backward(want_dinp, want_dweight, dout, x, weight, k.N, k.C);
        float *dinp[3], *dweight[3];
        for (int threads = 1; threads <= 3; threads++) {
            set_threads(threads);
            float* di = dinp[threads - 1] = xcalloc(n, sizeof(float));
            float* dw = dweight[threads - 1] = xcalloc(k.C, sizeof(float));
            memcpy(di, dinp0, n * sizeof(float));
            memcpy(dw, dweight0, k.C * sizeof(float));
            run_backward(di, dw, dout, inp, weight, rstd, k.N, k.C);
            assert_memory_equal(di, dinp[0], n * sizeof(float));
            assert_memory_equal(dw, dweight[0], k.C * sizeof(float));
        }
        assert_error_below(relative_error(dinp[0], want_dinp, n), tolerance);
        assert_error_below(relative_error(dweight[0], want_dweight, k.C), tolerance);
        for (int t = 0; t < 3; t++) { free(dinp[t]), free(dweight[t]); }
        free(inp), free(weight), free(dout), free(dinp0), free(dweight0), free(out), free(rstd);
        free(x), free(want_dinp), free(want_dweight);
    }
}

// sum(dout * rmsnorm(x)) of one row in float64
static double loss(const double* x, const double* weight, const float* dout, size_t C) {
    double s = reference_rstd(x, C), sum = 0;
    for (size_t c = 0; c < C; c++) { sum += dout[c] * x[c] * s * weight[c]; }
    return sum;
}

// The error of central differences of step h is h^2 times the third derivative: about 1e-9 here.
static void test_finite_differences(void** state) {
    (void)state;
    enum { C = 19 };
    const double h = 1e-5;
    Random r = random_stream(4, 0);
    float *inp = random_array(C, 1.0, &r), *weight = random_array(C, 1.0, &r), *dout = random_array(C, 1.0, &r);
    float out[C], rstd, dinp[C] = {0}, dweight[C] = {0};
    rmsnorm_forward(out, &rstd, inp, weight, 1, C);
    run_backward(dinp, dweight, dout, inp, weight, &rstd, 1, C);
    double *x = widen(inp, C), *w = widen(weight, C), want_dinp[C], want_dweight[C];
    for (size_t c = 0; c < C; c++) {
        double keep = x[c];
        x[c] = keep + h;
        double above = loss(x, w, dout, C);
        x[c] = keep - h;
        want_dinp[c] = (above - loss(x, w, dout, C)) / (2 * h);
        x[c] = keep;
        keep = w[c];
        w[c] = keep + h;
        above = loss(x, w, dout, C);
        w[c] = keep - h;
        want_dweight[c] = (above - loss(x, w, dout, C)) / (2 * h);
        w[c] = keep;
    }
    assert_error_below(relative_error(dinp, want_dinp, C), tolerance);
    assert_error_below(relative_error(dweight, want_dweight, C), tolerance);
    free(inp), free(weight), free(dout), free(x), free(w);
}

// Heads in strided rows are rows by themselves, to the bit; only their weight's gradient is summed in other blocks.
static void check_heads(size_t N, size_t heads, size_t HS, size_t gap) {
    const size_t stride = heads * HS + gap, rows = N * heads, n = rows * HS;
    Random r = random_stream(5, n);
    float *x = random_array(N * stride, 1.0, &r), *before = xcalloc(n, sizeof(float));
    float *weight = random_array(HS, 1.0, &r), *out = xcalloc(n, sizeof(float)), *packed = xcalloc(n, sizeof(float));
    float *rstd = xcalloc(rows, sizeof(float)), *want_rstd = xcalloc(rows, sizeof(float)),
          *gaps = xcalloc(N * stride, 4);
    float *dweight = random_array(HS, 1.0, &r), *want_dweight = xcalloc(HS, sizeof(float)), *dx = xcalloc(n, 4);
    memcpy(gaps, x, N * stride * sizeof(float));
    for (size_t i = 0; i < n; i++) { packed[i] = x[i / (heads * HS) * stride + i % (heads * HS)]; }
    heads_rmsnorm_forward(x, stride, before, rstd, weight, N, heads, HS);
    rmsnorm_forward(out, want_rstd, packed, weight, rows, HS);
    assert_memory_equal(before, packed, n * sizeof(float));
    assert_memory_equal(rstd, want_rstd, rows * sizeof(float));
    for (size_t row = 0; row < N; row++) {
        assert_memory_equal(x + row * stride, out + row * heads * HS, heads * HS * sizeof(float));
        assert_memory_equal(x + row * stride + heads * HS, gaps + row * stride + heads * HS, gap * sizeof(float));
    }
    memcpy(want_dweight, dweight, HS * sizeof(float));
    run_backward(dx, want_dweight, out, packed, weight, rstd, rows, HS);
    void* workspace = xcalloc(rmsnorm_workspace(N, heads * HS), 1);
    memset(workspace, 0xFF, rmsnorm_workspace(N, heads * HS));
    heads_rmsnorm_backward(x, stride, dweight, before, rstd, weight, workspace, N, heads, HS);
    for (size_t row = 0; row < N; row++) {
        assert_memory_equal(x + row * stride, dx + row * heads * HS, heads * HS * sizeof(float));
        assert_memory_equal(x + row * stride + heads * HS, gaps + row * stride + heads * HS, gap * sizeof(float));
    }
    double* wide = widen(want_dweight, HS);
    assert_error_below(relative_error(dweight, wide, HS), tolerance);
    free(x), free(before), free(weight), free(out), free(packed), free(rstd), free(want_rstd), free(gaps);
    free(dweight), free(want_dweight), free(dx), free(workspace), free(wide);
}

static void test_heads(void** state) {
    (void)state;
    check_heads(1, 1, 8, 0);
    check_heads(3, 2, 16, 5);
    check_heads(67, 3, 40, 80);
    check_heads(130, 1, 128, 256);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),  cmocka_unit_test(test_residual_forward),
        cmocka_unit_test(test_backward), cmocka_unit_test(test_finite_differences),
        cmocka_unit_test(test_heads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
