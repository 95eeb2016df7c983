/*
forget.cuh against the CPU's operators, in every order of execution.
*/
#include "cuda_ops_util.h"

#include "../llmc/forget.cuh"

static int* random_starts(size_t B, size_t T, Random* r) {
    int* start = (int*)xcalloc(B * T, sizeof(int));
    for (size_t n = 0; n < B * T; n++) {
        const bool begins = n % T > 0 && random_uniform(r) < (n < T ? 0.003 : 0.05);
        start[n] = n % T == 0 ? 0 : begins ? (int)(n % T) : start[n - 1];
    }
    return start;
}

static void check_gates(size_t N, size_t C, size_t NH, Random* r) {
    float *inp = rounded_array(N * C, 1.0, r), *weight = random_array(NH * C, 0.1, r), *bias = random_array(NH, 1.0, r);
    float *dgates = random_array(N * NH, 1.0, r), *dinp = rounded_array(N * C, 1.0, r);
    float *dweight = random_array(NH * C, 1.0, r), *dbias = random_array(NH, 1.0, r);
    float *want = host_copy(dgates, N * NH), *want_dinp = host_copy(dinp, N * C);
    float *want_dweight = host_copy(dweight, NH * C), *want_dbias = host_copy(dbias, NH);
    cpu::forget_gates(want, inp, weight, bias, N, C, NH);
    cpu::forget_gates_backward(want_dinp, want_dweight, want_dbias, dgates, inp, weight, NULL, N, C, NH);
    floatX *d_inp = device_copy<floatX>(inp, N * C), *d_dinp = device_copy<floatX>(dinp, N * C);
    float *d_weight = device_copy<float>(weight, NH * C), *d_bias = device_copy<float>(bias, NH);
    float *d_dgates = device_copy<float>(dgates, N * NH), *d_gates = device_copy<float>(dgates, N * NH);
    float *d_dweight = device_copy<float>(dweight, NH * C), *d_dbias = device_copy<float>(dbias, NH);
    void* workspace = device_malloc(forget_workspace(N, C, NH));
    Result results[4];
    for (unsigned order = 0; order < ORDERS; order++) {
        set_order(order);
        upload(d_dinp, dinp, N * C), upload(d_dweight, dweight, NH * C), upload(d_dbias, dbias, NH);
        forget_gates(d_gates, d_inp, d_weight, d_bias, N, C, NH);
        forget_gates_backward(d_dinp, d_dweight, d_dbias, d_dgates, d_inp, d_weight, workspace, N, C, NH);
        check_result(&results[0], "gates", d_gates, want, N * NH, 0, 2e-6, order);
        check_result(&results[1], "gates dinp", d_dinp, want_dinp, N * C, ROUNDING, FP32_NOISE, order);
        check_result(&results[2], "gates dweight", d_dweight, want_dweight, NH * C, 0, 2e-6, order);
        check_result(&results[3], "gates dbias", d_dbias, want_dbias, NH, 0, 1e-6, order);
    }
    device_free(d_inp), device_free(d_dinp), device_free(d_weight), device_free(d_bias), device_free(d_dgates);
    device_free(d_gates), device_free(d_dweight), device_free(d_dbias), device_free(workspace);
    free(inp), free(weight), free(bias), free(dgates), free(dinp), free(dweight), free(dbias);
    free(want), free(want_dinp), free(want_dweight), free(want_dbias);
}

static void test_gates(void** state) {
    (void)state;
    Random r = random_stream(1, 1);
    check_gates(1, 8, 1, &r);
    check_gates(37, 40, 3, &r);
    check_gates(130, 264, 9, &r);
}

// Sums in double of another order: their difference is far below the rounding to fp32, in which they are compared.
static void check_sums(PosencMechanism kind, size_t B, size_t T, size_t NH, size_t chunk, Random* r) {
    const size_t N = B * T, stride = T + 5;
    float *gates = random_array(N * NH, 1.0, r), *dsums = random_array(N * NH, 1.0, r);
    float* want_dgates = host_copy(gates, N * NH);
    int* start = random_starts(B, T, r);
    for (size_t n = 0; n < N && NH == 2; n++) {  // a window of 9
        start[n] = start[n] > (int)(n % T) - 8 ? start[n] : (int)(n % T) - 8;
    }
    int* d_start = device_ints(start, N);
    double *want = (double*)xcalloc(B * NH * stride, sizeof(double)), *got = (double*)xcalloc(B * NH * stride, 8);
    cpu::forget_sums(want, gates, start, kind, 0, B, T, NH, stride);
    cpu::forget_sums_backward(want_dgates, dsums, gates, start, kind, B, T, NH);
    float *d_gates = device_copy<float>(gates, N * NH), *d_dsums = device_copy<float>(dsums, N * NH);
    float* d_dgates = device_copy<float>(gates, N * NH);
    double* d_sums = (double*)device_malloc(B * NH * stride * sizeof(double));
    Result result;
    for (unsigned order = 0; order < ORDERS; order++) {
        set_order(order);
        for (size_t at = 0, n; at < T; at += n) {
            n = T - at < chunk ? T - at : chunk;
            forget_sums(d_sums, d_gates + at * NH, d_start + at, kind, at, B, n, NH, stride);
        }
        copy_to_host(got, d_sums, B * NH * stride * sizeof(double));
        for (size_t i = 0; i < B * NH * stride; i++) {
            if (i % stride < T) { assert_true(fabs(got[i] - want[i]) <= 1e-13 * (1 + fabs(want[i]))); }
        }
        forget_sums_backward(d_dgates, d_dsums, d_gates, d_start, kind, B, T, NH);
        check_result(&result, "dgates", d_dgates, want_dgates, N * NH, 0, 1e-6, order);
    }
    upload(d_gates, gates, N * NH);
    forget_sums_backward(d_gates, d_dsums, d_gates, d_start, kind, B, T, NH);  // may alias
    download(gates, d_gates, N * NH);
    assert_true(excess_error(gates, want_dgates, N * NH, 0) <= 1e-6);
    device_free(d_gates), device_free(d_dsums), device_free(d_dgates), device_free(d_sums), device_free(d_start);
    free(gates), free(dsums), free(want_dgates), free(start), free(want), free(got);
}

static void test_sums(void** state) {
    (void)state;
    Random r = random_stream(2, 1);
    check_sums(POSENC_FORGET, 1, 1, 1, 1, &r);
    check_sums(POSENC_FORGET, 2, 77, 3, 77, &r);
    check_sums(POSENC_SOFTPLUS, 2, 600, 2, 600, &r);
    check_sums(POSENC_FORGET, 1, 700, 1, 700, &r);
    check_sums(POSENC_SOFTPLUS, 1, 300, 2, 7, &r);
    check_sums(POSENC_FORGET, 1, 600, 1, 257, &r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gates),
        cmocka_unit_test(test_sums),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
