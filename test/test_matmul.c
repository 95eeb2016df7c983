/*
matmul_forward and matmul_backward in both precisions against float64, and the device: memory, options, rate.
*/
#include "precision_util.h"

#include "../llmc/backend.h"

// Accumulating K products in fp32 is off by about K^(1/2) 2^-24 of the largest sum; K is at most 1100 here.
static const double TOLERANCE = 1e-6;
static const unsigned char CANARY = 0xA5;
enum { CANARY_BYTES = 256 };

typedef struct {
    size_t N, C, OC;
} Shape;

static const Shape shapes[] = {{1, 8, 8},    {1, 64, 300}, {7, 24, 40}, {33, 64, 48},   {33, 50, 77},   {63, 32, 64},
                               {64, 32, 64}, {65, 33, 1},  {65, 1, 33}, {128, 72, 200}, {1024, 16, 24}, {1100, 40, 24}};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

// n values as a product in this precision sees them.
static double* as_factors(const float* x, size_t n, Precision precision) {
    double* y = xcalloc(n, sizeof *y);
    for (size_t i = 0; i < n; i++) { y[i] = precision == PRECISION_BF16 ? to_bf16(x[i]) : x[i]; }
    return y;
}

// c[m,n] += op(a) op(b), the factor (i, j) of a at a[i*ai + j*aj] and of b at b[i*bi + j*bj].
static void reference(double* c, const double* a, size_t ai, size_t aj, const double* b, size_t bi, size_t bj, size_t m,
                      size_t n, size_t k) {
    for (size_t i = 0; i < m; i++) {
        for (size_t j = 0; j < n; j++) {
            for (size_t l = 0; l < k; l++) { c[i * n + j] += a[i * ai + l * aj] * b[l * bi + j * bj]; }
        }
    }
}

static float* filled(size_t n, float value) {
    float* x = xcalloc(n, sizeof *x);
    for (size_t i = 0; i < n; i++) { x[i] = value; }
    return x;
}

// A workspace of exactly the promised size, followed by bytes that must not change.
static char* guarded_workspace(size_t bytes) {
    char* workspace = xcalloc(bytes + CANARY_BYTES, 1);
    memset(workspace, CANARY, bytes + CANARY_BYTES);
    return workspace;
}

static void check_workspace(const char* workspace, size_t bytes) {
    for (size_t i = 0; i < CANARY_BYTES; i++) { assert_int_equal((unsigned char)workspace[bytes + i], CANARY); }
}

// Inputs, float64 results and outputs of one shape.
typedef struct {
    Shape s;
    float *inp, *weight, *dout, *initial;
    double *want_out, *want_dinp, *want_dweight;
    float *out, *dinp, *dweight;
    size_t bytes;
    char* workspace;
} Case;

static Case case_create(Shape s, Precision precision) {
    Random r = {s.N * 1000003 + s.C * 1009 + s.OC};
    Case c = {.s = s};
    c.inp = random_array(s.N * s.C, 1, &r);
    c.weight = random_array(s.OC * s.C, 1, &r);
    c.dout = random_array(s.N * s.OC, 1, &r);
    c.initial = random_array(s.OC * s.C, 1, &r);
    double* inp = as_factors(c.inp, s.N * s.C, precision);
    double* weight = as_factors(c.weight, s.OC * s.C, precision);
    double* dout = as_factors(c.dout, s.N * s.OC, precision);
    c.want_out = xcalloc(s.N * s.OC, sizeof(double));
    c.want_dinp = xcalloc(s.N * s.C, sizeof(double));
    c.want_dweight = as_factors(c.initial, s.OC * s.C, PRECISION_FP32);
    reference(c.want_out, inp, s.C, 1, weight, 1, s.C, s.N, s.OC, s.C);
    reference(c.want_dinp, dout, s.OC, 1, weight, s.C, 1, s.N, s.C, s.OC);
    reference(c.want_dweight, dout, 1, s.OC, inp, s.C, 1, s.OC, s.C, s.N);
    c.out = filled(s.N * s.OC, NAN);
    c.dinp = filled(s.N * s.C, NAN);
    c.dweight = filled(s.OC * s.C, 0);
    memcpy(c.dweight, c.initial, s.OC * s.C * sizeof(float));
    c.bytes = matmul_workspace(s.N, s.C, s.OC);
    c.workspace = guarded_workspace(c.bytes);
    free(inp);
    free(weight);
    free(dout);
    return c;
}

static void case_free(Case* c) {
    void* all[] = {c->inp,          c->weight, c->dout, c->initial, c->want_out, c->want_dinp,
                   c->want_dweight, c->out,    c->dinp, c->dweight, c->workspace};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) { free(all[i]); }
}

static void backward(Case* c, bool with_dinp, bool with_dweight) {
    matmul_backward(with_dinp ? c->dinp : NULL, with_dweight ? c->dweight : NULL, c->dout, c->inp, c->weight,
                    c->workspace, c->s.N, c->s.C, c->s.OC);
}

static void test_against_float64(void** state) {
    (void)state;
    for (size_t p = 0; p < precision_count(); p++) {
        cpu_precision = precisions[p];
        for (size_t i = 0; i < SHAPES; i++) {
            Case c = case_create(shapes[i], cpu_precision);
            matmul_forward(c.out, c.inp, c.weight, c.workspace, c.s.N, c.s.C, c.s.OC);
            assert_error_below(relative_error(c.out, c.want_out, c.s.N * c.s.OC), TOLERANCE);
            backward(&c, true, true);
            assert_error_below(relative_error(c.dinp, c.want_dinp, c.s.N * c.s.C), TOLERANCE);
            assert_error_below(relative_error(c.dweight, c.want_dweight, c.s.OC * c.s.C), TOLERANCE);
            check_workspace(c.workspace, c.bytes);
            case_free(&c);
        }
    }
}

// Either gradient may be left out without changing a bit of the other.
static void test_skipped_gradients(void** state) {
    (void)state;
    for (size_t p = 0; p < precision_count(); p++) {
        cpu_precision = precisions[p];
        for (size_t i = 0; i < SHAPES; i++) {
            Case both = case_create(shapes[i], cpu_precision), one = case_create(shapes[i], cpu_precision);
            size_t inp_bytes = both.s.N * both.s.C * sizeof(float), weight_bytes = both.s.OC * both.s.C * sizeof(float);
            backward(&both, true, true);
            backward(&one, true, false);
            assert_memory_equal(one.dweight, one.initial, weight_bytes);
            assert_memory_equal(one.dinp, both.dinp, inp_bytes);
            memset(one.dinp, 0x7f, inp_bytes);
            float* untouched = xcalloc(1, inp_bytes);
            memset(untouched, 0x7f, inp_bytes);
            backward(&one, false, true);
            assert_memory_equal(one.dinp, untouched, inp_bytes);
            assert_memory_equal(one.dweight, both.dweight, weight_bytes);
            free(untouched);
            case_free(&both);
            case_free(&one);
        }
    }
}

static void test_repeats_are_equal(void** state) {
    (void)state;
    Shape s = {1100, 136, 264};
    for (size_t p = 0; p < precision_count(); p++) {
        cpu_precision = precisions[p];
        Case first = case_create(s, cpu_precision), again = case_create(s, cpu_precision);
        matmul_forward(first.out, first.inp, first.weight, first.workspace, s.N, s.C, s.OC);
        backward(&first, true, true);
        for (int repeat = 0; repeat < 10; repeat++) {
            memset(again.workspace, repeat, again.bytes);
            memcpy(again.dweight, again.initial, s.OC * s.C * sizeof(float));
            matmul_forward(again.out, first.inp, first.weight, again.workspace, s.N, s.C, s.OC);
            backward(&again, true, true);
            assert_memory_equal(again.out, first.out, s.N * s.OC * sizeof(float));
            assert_memory_equal(again.dinp, first.dinp, s.N * s.C * sizeof(float));
            assert_memory_equal(again.dweight, first.dweight, s.OC * s.C * sizeof(float));
        }
        case_free(&first);
        case_free(&again);
    }
}

// Kernels are kept by shape and the oldest are replaced: more shapes than there is room for, then again.
static void test_many_shapes(void** state) {
    (void)state;
    cpu_precision = PRECISION_FP32;
    for (size_t i = 0; i < 280; i++) {
        size_t n = i % 270 + 1;
        Case c = case_create((Shape){n, 4, 3}, cpu_precision);
        matmul_forward(c.out, c.inp, c.weight, c.workspace, n, 4, 3);
        assert_error_below(relative_error(c.out, c.want_out, n * 3), TOLERANCE);
        case_free(&c);
    }
}

// One product of one value by 1 shows how bf16 rounds it; infinity and NaN must survive.
static void test_bf16_rounding(void** state) {
    (void)state;
    if (precision_count() < 2) { skip(); }
    cpu_precision = PRECISION_BF16;
    const uint32_t nan_bits = 0x7fffffff;  // adding to it overflows
    float widest_nan;
    memcpy(&widest_nan, &nan_bits, sizeof widest_nan);
    float values[] = {1,      1 + 0x1p-8f, 1 + 0x3p-8f, 1 + 0x1.0002p-8f, 1 - 0x1p-9f, -3.14159f, 0x1.fffffep+100f,
                      1e-30f, 0,           INFINITY,    -INFINITY,        NAN,         widest_nan};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        Case c = case_create((Shape){1, 1, 1}, cpu_precision);
        c.inp[0] = values[i];
        c.weight[0] = 1;
        matmul_forward(c.out, c.inp, c.weight, c.workspace, 1, 1, 1);
        double want = to_bf16(values[i]);
        assert_true(isnan(want) ? isnan(c.out[0]) : (double)c.out[0] == want);
        case_free(&c);
    }
}

// ----------------------------------------------------------------------------
// the device

static void test_device_malloc(void** state) {
    (void)state;
    size_t sizes[] = {0, 1, 4096, 3 << 20};
    for (size_t i = 0; i < 4; i++) {
        unsigned char* p = device_malloc(sizes[i]);
        assert_true((uintptr_t)p % 64 == 0);
        for (size_t j = 0; j < sizes[i]; j++) { assert_int_equal(p[j], 0); }
        memset(p, 1, sizes[i]);
        device_free(p);
    }
}

static void too_much_memory(void* argument) { device_free(device_malloc(*(size_t*)argument)); }

typedef struct {
    const char *device, *dtype;
} Choice;

static void choose(void* argument) { backend_init(((Choice*)argument)->device, ((Choice*)argument)->dtype); }

static void test_backend_errors(void** state) {
    (void)state;
    size_t sizes[] = {(size_t)1 << 60, SIZE_MAX};
    for (size_t i = 0; i < 2; i++) {
        expect_fatal(too_much_memory, &sizes[i], (const char*[]){"out of memory", "lower --batch_size", NULL});
    }
    Choice cuda = {"cuda", "float32"}, half = {"cpu", "float16"}, empty = {"", ""};
    expect_fatal(choose, &cuda, (const char*[]){"--device cuda", "make cuda", NULL});
    expect_fatal(choose, &half, (const char*[]){"--dtype float16", "float32 or bfloat16", NULL});
    expect_fatal(choose, &empty, (const char*[]){"--dtype", "float32 or bfloat16", NULL});
}

static void test_backend(void** state) {
    (void)state;
    const char* devices[] = {"", "auto", "cpu"};
    for (size_t i = 0; i < 3; i++) {
        backend_init(devices[i], precision_count() < 2 ? "float32" : "bfloat16");
        assert_int_equal(cpu_precision, precisions[precision_count() - 1]);
        assert_true(backend_matmul_rate() > 1e8);
        backend_init(devices[i], "float32");
        assert_int_equal(cpu_precision, PRECISION_FP32);
    }
    char line[256];
    backend_describe(line, sizeof line);
    assert_true(strncmp(line, "cpu: ", 5) == 0 && strstr(line, "thread") && strstr(line, "oneDNN "));
    assert_null(strchr(line, '\n'));
    char cut[10];
    backend_describe(cut, sizeof cut);
    assert_int_equal(strlen(cut), 9);
}

// The error tests fork, and come first: afterwards OpenMP's threads exist, which a child process does not have.
int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_backend_errors),    cmocka_unit_test(test_against_float64),
        cmocka_unit_test(test_skipped_gradients), cmocka_unit_test(test_repeats_are_equal),
        cmocka_unit_test(test_many_shapes),       cmocka_unit_test(test_bf16_rounding),
        cmocka_unit_test(test_device_malloc),     cmocka_unit_test(test_backend)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
