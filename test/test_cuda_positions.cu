/*
What is CUDA of positions against the CPU's operators: tables, learned positions, rotation, biases by distance. What is
compared and how: cuda_ops_util.h.
*/
// biases whose numbers are several of a tensor, or shared by all heads
#define POSENC_EXTRA "../test/encodings.h"

#include "cuda_ops_util.h"

static void test_position_tables(void** state) {
    (void)state;
    enum { T = 129, C = 48 };
    static const struct {
        PosKind kind;
        bool vaswani;
        RopeSettings rope;
    } rows[] = {
        {POS_SINUSOIDAL, false, {2, 2, ROPE_NONE, 1, 0, 32, 1, 1, 1, 4}},
        {POS_SINUSOIDAL, true, {2, 2, ROPE_NONE, 1, 0, 32, 1, 1, 1, 4}},
        {POS_ROTARY, false, {500000, C, ROPE_NONE, 1, 0, 32, 1, 1, 1, 4}},
        {POS_ROTARY, false, {500000, 20, ROPE_YARN, 8, 64, 32, 1, 1.2, 1, 4}},
        {POS_ROTARY, false, {500000, 34, ROPE_LLAMA3, 8, 64, 32, 1, 1, 1, 4}},
    };
    float want[T * C];
    float* table = (float*)device_malloc(sizeof want);
    Result result;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const PositionSettings s = {10000.0, rows[i].vaswani, rope_rotation(&rows[i].rope)};
        cpu::position_table(want, rows[i].kind, &s, T, C);
        for (unsigned order = 0; order < ORDERS; order++) {
            set_order(order);
            position_table(table, rows[i].kind, &s, T, C);
            check_result(&result, "position table", table, want, T * C, 0x1p-23, 0, order);
        }
    }
    device_free(table);
}

static void check_learned(size_t B, size_t T, size_t rows, size_t C, Random* random) {
    const size_t most = T > rows ? T : rows;
    float *learned = random_array(rows * C, 1.0, random), *dout = rounded_array(B * T * C, 1.0, random);
    float *gradient = random_array(most * C, 1.0, random), *table = host_copy(gradient, most * C);
    float* want = host_copy(gradient, most * C);
    cpu::learned_backward(want, dout, B, T, C);
    float *d_learned = device_copy<float>(learned, rows * C), *d_table = device_copy<float>(table, most * C);
    floatX* d_dout = device_copy<floatX>(dout, B * T * C);
    Result result;
    for (unsigned interpolated = 0; interpolated < 2; interpolated++) {
        cpu::learned_table(table, learned, interpolated, T, rows, C);
        for (unsigned order = 0; order < ORDERS; order++) {
            set_order(order);
            learned_table(d_table, d_learned, interpolated, T, rows, C);
            check_result(&result, "learned table", d_table, table, T * C, 0x1p-23, 0, order);
        }
    }
    for (unsigned order = 0; order < ORDERS; order++) {
        set_order(order);
        upload(d_table, gradient, most * C);
        learned_backward(d_table, d_dout, B, T, C);
        check_result(&result, "learned gradient", d_table, want, most * C, 0, FP32_NOISE, order);
    }
    device_free(d_learned), device_free(d_table), device_free(d_dout);
    free(learned), free(dout), free(gradient), free(table), free(want);
}

static void test_learned(void** state) {
    (void)state;
    Random r = random_stream(9, 0);
    check_learned(1, 1, 1, 1, &r);
    check_learned(3, 17, 9, 33, &r);
    check_learned(2, 9, 20, 264, &r);
    check_learned(4, 5, 3, 2056, &r);  // more than one block per row
}

static void check_rotary(size_t B, size_t T, size_t NH, size_t NKV, size_t HS, Random* random) {
    const size_t n = B * T * (NH + 2 * NKV) * HS;
    float *x = rounded_array(n, 1.0, random), *table = random_array(T * HS, 1.0, random);
    float *forward = host_copy(x, n), *backward = host_copy(x, n);
    cpu::rotary_forward(forward, table, B, T, NH, NKV, HS);
    cpu::rotary_backward(backward, table, B, T, NH, NKV, HS);
    floatX* d_x = device_copy<floatX>(x, n);
    float* d_table = device_copy<float>(table, T * HS);
    Result results[2];
    for (unsigned order = 0; order < ORDERS; order++) {
        set_order(order);
        upload(d_x, x, n);
        rotary_forward(d_x, d_table, B, T, NH, NKV, HS);
        check_result(&results[0], "rotary", d_x, forward, n, ROUNDING, FP32_NOISE, order);
        upload(d_x, x, n);
        rotary_backward(d_x, d_table, B, T, NH, NKV, HS);
        check_result(&results[1], "rotary gradient", d_x, backward, n, ROUNDING, FP32_NOISE, order);
    }
    device_free(d_x), device_free(d_table);
    free(x), free(table), free(forward), free(backward);
}

static void test_rotary(void** state) {
    (void)state;
    Random r = random_stream(7, 0);
    check_rotary(1, 1, 1, 1, 2, &r);
    check_rotary(2, 33, 4, 2, 48, &r);
    check_rotary(2, 7, 3, 1, 6, &r);
    check_rotary(1, 3, 40, 8, 64, &r);
}

// The table and the derivatives by posenc.h's formulas on the host, added to those in dtheta.
static void host_bias_table(float* table, float* dtheta, const float* dtable, PosKind kind, const float* numbers,
                            size_t NH, size_t T) {
    double theta[POSENC_ALL_ROWS];
    double* sums = (double*)xcalloc(posenc_numbers(kind, NH) + 1, sizeof(double));
    for (size_t h = 0; h < NH; h++) {
        for (size_t p = 0; p < posenc_params(kind); p++) { theta[p] = posenc_parameter(kind, numbers, p, h, NH); }
        for (size_t d = 0; d < T; d++) {
            table[h * T + d] = posenc_bias(kind, theta, {h, NH, POSENC_DEFAULT_SETTINGS, NULL}, d);
            for (size_t p = 0; p < posenc_params(kind); p++) {
                const double slope =
                    posenc_derivative_unclamped(kind, theta, p, {h, NH, POSENC_DEFAULT_SETTINGS, NULL}, d);
                sums[posenc_place(kind, p, h, NH)] += dtable[h * T + d] * slope;
            }
        }
    }
    for (size_t i = 0; i < posenc_numbers(kind, NH); i++) { dtheta[i] += (float)sums[i]; }
    free(sums);
}

static void check_bias_table(PosKind kind, size_t NH, size_t T, Random* random) {
    const size_t numbers = posenc_numbers(kind, NH);
    float *theta = random_array(numbers, 0.5, random), *dtable = random_array(NH * T, 1.0, random);
    float *dtheta = random_array(numbers, 1.0, random), *want_dtheta = host_copy(dtheta, numbers);
    float* want = host_copy(dtable, NH * T);
    host_bias_table(want, want_dtheta, dtable, kind, theta, NH, T);
    float *d_theta = device_copy<float>(theta, numbers), *d_dtable = device_copy<float>(dtable, NH * T);
    float *d_table = device_copy<float>(dtable, NH * T), *d_dtheta = device_copy<float>(dtheta, numbers);
    Result results[2];
    for (unsigned order = 0; order < ORDERS; order++) {
        set_order(order);
        upload(d_dtheta, dtheta, numbers);
        bias_table_forward(d_table, kind, POSENC_DEFAULT_SETTINGS, numbers ? d_theta : NULL, NH, T);
        bias_table_backward(d_dtheta, d_dtable, kind, POSENC_DEFAULT_SETTINGS, numbers ? d_theta : NULL, NH, T);
        // both in double, rounded to fp32 once
        check_result(&results[0], "bias table", d_table, want, NH * T, 0x1p-23, 0, order);
        check_result(&results[1], "bias parameters", d_dtheta, want_dtheta, numbers, 0x1p-23, 0x1p-23, order);
    }
    device_free(d_theta), device_free(d_dtable), device_free(d_table), device_free(d_dtheta);
    free(theta), free(dtable), free(dtheta), free(want_dtheta), free(want);
}

static void test_bias_table(void** state) {
    (void)state;
    static const size_t lengths[] = {1, 33, 127, 700};
    for (int kind = 0; kind < POS_COUNT; kind++) {
        for (size_t i = 0; i < 4 && posenc_info((PosKind)kind)->terms & TERM_DISTANCE; i++) {
            Random r = random_stream(8, i);
            check_bias_table((PosKind)kind, i == 1 ? 12 : 3, lengths[i], &r);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_position_tables),
        cmocka_unit_test(test_learned),
        cmocka_unit_test(test_rotary),
        cmocka_unit_test(test_bias_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
