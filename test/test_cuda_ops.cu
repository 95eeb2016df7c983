/*
Every CUDA operator of the forward and backward pass but attention and positions against its CPU operator: values and
gradients, at odd sizes, in the precision of the build. What is compared and how: cuda_ops_util.h.
*/
// so that small sizes make several chunks, groups of rows and blocks
#define CROSS_ENTROPY_CHUNK_LOGITS ((size_t)1 << 13)
#define RMSNORM_BLOCKS ((size_t)4)
#define SORT_WARP_ROWS ((size_t)32)

#include "cuda_ops_util.h"

// ----------------------------------------------------------------------------
// RMSNorm

typedef struct {
    size_t N, C;
} Rows;

// the last two have more rows than all blocks of the backward take at once
static const Rows norm_cases[] = {{1, 1}, {3, 24}, {9, 768}, {20, 2056}, {3, 4099}, {65, 33}, {129, 8}};

static void check_rmsnorm_forward(Rows k, Random* random) {
    const size_t N = k.N, C = k.C, n = N * C;
    float *x = rounded_array(n, 1.0, random), *y = rounded_array(n, 1.0, random), *w = random_array(C, 1.0, random);
    float *out = host_copy(x, n), *rstd = host_copy(x, N), *sum = host_copy(x, n);
    float *out2 = host_copy(x, n), *rstd2 = host_copy(x, N);
    cpu::rmsnorm_forward(out, rstd, x, w, N, C);
    // the GPU's residual stream is rounded before it is normalised
    for (size_t i = 0; i < n; i++) { sum[i] = x[i] + y[i]; }
    cpu::rmsnorm_forward(out2, rstd2, round_array(sum, n), w, N, C);
    floatX *dx = device_copy<floatX>(x, n), *dy = device_copy<floatX>(y, n), *dout = device_copy<floatX>(y, n);
    float *dw = device_copy<float>(w, C), *drstd = device_copy<float>(y, N);
    Result results[5];
    for (unsigned order = 0; order < ORDERS; order++) {
        set_order(order);
        upload(dx, x, n);
        rmsnorm_forward(dout, drstd, dx, dw, N, C);
        check_result(&results[0], "rmsnorm out", dout, out, n, ROUNDING, FP32_NOISE, order);
        check_result(&results[1], "rmsnorm rstd", drstd, rstd, N, 0, FP32_NOISE, order);
        residual_rmsnorm_forward(dx, dout, drstd, dx, dy, dw, N, C);
        check_result(&results[2], "residual", dx, sum, n, 0, 0, order);
        check_result(&results[3], "residual rmsnorm out", dout, out2, n, ROUNDING, FP32_NOISE, order);
        check_result(&results[4], "residual rmsnorm rstd", drstd, rstd2, N, 0, FP32_NOISE, order);
    }
    device_free(dx), device_free(dy), device_free(dout), device_free(dw), device_free(drstd);
    free(x), free(y), free(w), free(out), free(rstd), free(sum), free(out2), free(rstd2);
}

static void check_rmsnorm_backward(Rows k, Random* random) {
    const size_t N = k.N, C = k.C, n = N * C;
    float *x = rounded_array(n, 1.0, random), *dy = rounded_array(n, 1.0, random), *w = random_array(C, 1.0, random);
    float *dx = rounded_array(n, 1.0, random), *dw = random_array(C, 1.0, random), *rstd = random_array(N, 1.0, random);
    void* cpu_workspace = xcalloc(cpu::rmsnorm_workspace(N, C), 1);
    float *want_dx = host_copy(dx, n), *want_dw = host_copy(dw, C);
    cpu::rmsnorm_backward(want_dx, want_dw, dy, x, w, rstd, cpu_workspace, N, C);
    floatX *d_x = device_copy<floatX>(x, n), *d_dy = device_copy<floatX>(dy, n), *d_dx = device_copy<floatX>(dx, n);
    float *d_w = device_copy<float>(w, C), *d_dw = device_copy<float>(dw, C), *d_rstd = device_copy<float>(rstd, N);
    void* workspace = device_malloc(rmsnorm_workspace(N, C));
    Result results[2];
    for (unsigned order = 0; order < ORDERS; order++) {
        set_order(order);
        upload(d_dx, dx, n), upload(d_dw, dw, C);
        rmsnorm_backward(d_dx, d_dw, d_dy, d_x, d_w, d_rstd, workspace, N, C);
        check_result(&results[0], "rmsnorm dinp", d_dx, want_dx, n, ROUNDING, FP32_NOISE, order);
        check_result(&results[1], "rmsnorm dweight", d_dw, want_dw, C, 0, FP32_NOISE, order);
    }
    device_free(d_x), device_free(d_dy), device_free(d_dx), device_free(d_w), device_free(d_dw), device_free(d_rstd);
    device_free(workspace);
    free(x), free(dy), free(w), free(dx), free(dw), free(rstd), free(cpu_workspace), free(want_dx), free(want_dw);
}

static void test_rmsnorm(void** state) {
    (void)state;
    for (size_t i = 0; i < sizeof norm_cases / sizeof *norm_cases; i++) {
        Random r = random_stream(1, i);
        check_rmsnorm_forward(norm_cases[i], &r);
        check_rmsnorm_backward(norm_cases[i], &r);
    }
}

// Heads at the front of wider rows.
static void check_heads(size_t N, size_t heads, size_t HS, Random* random) {
    const size_t stride = heads * HS + 24, n = N * heads * HS, all = N * stride, rows = N * heads;
    float *x = rounded_array(all, 1.0, random), *dy = rounded_array(all, 1.0, random);
    float *w = random_array(HS, 1.0, random), *dw = random_array(HS, 1.0, random);
    float *want = host_copy(x, all), *want_dx = host_copy(dy, all), *want_dw = host_copy(dw, HS);
    float *before = (float*)xcalloc(n, sizeof(float)), *rstd = (float*)xcalloc(rows, sizeof(float));
    void* cpu_workspace = xcalloc(cpu::rmsnorm_workspace(N, heads * HS), 1);
    cpu::heads_rmsnorm_forward(want, stride, before, rstd, w, N, heads, HS);
    cpu::heads_rmsnorm_backward(want_dx, stride, want_dw, before, rstd, w, cpu_workspace, N, heads, HS);
    floatX *d_x = device_copy<floatX>(x, all), *d_dx = device_copy<floatX>(dy, all);
    floatX* d_before = device_copy<floatX>(before, n);
    float *d_w = device_copy<float>(w, HS), *d_dw = device_copy<float>(dw, HS),
          *d_rstd = device_copy<float>(rstd, rows);
    void* workspace = device_malloc(rmsnorm_workspace(N, heads * HS));
    Result results[5];
    for (unsigned order = 0; order < ORDERS; order++) {
        set_order(order);
        upload(d_x, x, all), upload(d_dx, dy, all), upload(d_dw, dw, HS);
        heads_rmsnorm_forward(d_x, stride, d_before, d_rstd, d_w, N, heads, HS);
        heads_rmsnorm_backward(d_dx, stride, d_dw, d_before, d_rstd, d_w, workspace, N, heads, HS);
        check_result(&results[0], "heads out", d_x, want, all, ROUNDING, FP32_NOISE, order);
        check_result(&results[1], "heads before", d_before, before, n, 0, 0, order);
        check_result(&results[2], "heads rstd", d_rstd, rstd, rows, 0, FP32_NOISE, order);
        check_result(&results[3], "heads dx", d_dx, want_dx, all, ROUNDING, FP32_NOISE, order);
        check_result(&results[4], "heads dweight", d_dw, want_dw, HS, 0, FP32_NOISE, order);
    }
    device_free(d_x), device_free(d_dx), device_free(d_before), device_free(d_w), device_free(d_dw);
    device_free(d_rstd), device_free(workspace);
    free(x), free(dy), free(w), free(dw), free(want), free(want_dx), free(want_dw), free(before), free(rstd);
    free(cpu_workspace);
}

static void test_heads(void** state) {
    (void)state;
    Random r = random_stream(12, 0);
    check_heads(1, 1, 8, &r);
    check_heads(9, 3, 40, &r);
    check_heads(65, 2, 128, &r);  // more heads than all blocks of the backward take at once
}

// ----------------------------------------------------------------------------
// gate

static void check_gate(size_t n, Random* random) {
    float *x = rounded_array(n, 2.0, random), *g = rounded_array(n, 3.0, random), *dy = rounded_array(n, 1.0, random);
    float *want = host_copy(x, n), *want_dx = host_copy(x, n), *want_dg = host_copy(x, n);
    cpu::gate_forward(want, x, g, n);
    cpu::gate_backward(want_dx, want_dg, dy, x, g, n);
    floatX *d_x = device_copy<floatX>(x, n), *d_g = device_copy<floatX>(g, n), *d_dy = device_copy<floatX>(dy, n);
    floatX* d_out = device_copy<floatX>(x, n);
    Result results[3];
    for (unsigned order = 0; order < ORDERS; order++) {
        set_order(order);
        upload(d_g, g, n), upload(d_dy, dy, n);
        gate_forward(d_out, d_x, d_g, n);
        gate_backward(d_dy, d_g, d_dy, d_x, d_g, n);  // in place, as the model does it
        check_result(&results[0], "gate out", d_out, want, n, ROUNDING, FP32_NOISE, order);
        check_result(&results[1], "gate dinp", d_dy, want_dx, n, ROUNDING, FP32_NOISE, order);
        check_result(&results[2], "gate dgate", d_g, want_dg, n, ROUNDING, FP32_NOISE, order);
    }
    device_free(d_x), device_free(d_g), device_free(d_dy), device_free(d_out);
    free(x), free(g), free(dy), free(want), free(want_dx), free(want_dg);
}

static void test_gate(void** state) {
    (void)state;
    Random r = random_stream(13, 0);
    check_gate(1, &r);
    check_gate(130, &r);
    check_gate(4096, &r);
}

// ----------------------------------------------------------------------------
// matrix products

static void check_matmul(size_t N, size_t C, size_t OC, Random* random) {
    float *x = rounded_array(N * C, 1.0, random), *w = rounded_array(OC * C, 1.0, random);
    float *dy = rounded_array(N * OC, 1.0, random), *dw = random_array(OC * C, 1.0, random);
    float *want_y = host_copy(dy, N * OC), *want_dx = host_copy(x, N * C), *want_dw = host_copy(dw, OC * C);
    void* cpu_workspace = xcalloc(cpu::matmul_workspace(N, C, OC), 1);
    cpu::matmul_forward(want_y, x, w, cpu_workspace, N, C, OC);
    cpu::matmul_backward(want_dx, want_dw, dy, x, w, cpu_workspace, N, C, OC);
    floatX *d_x = device_copy<floatX>(x, N * C), *d_w = device_copy<floatX>(w, OC * C);
    floatX *d_dy = device_copy<floatX>(dy, N * OC), *d_y = device_copy<floatX>(dy, N * OC);
    floatX* d_dx = device_copy<floatX>(x, N * C);
    float* d_dw = device_copy<float>(dw, OC * C);
    void* workspace = device_malloc(matmul_workspace(N, C, OC));
    Result results[3];
    for (unsigned order = 0; order < ORDERS; order++) {
        upload(d_dw, dw, OC * C);
        matmul_forward(d_y, d_x, d_w, workspace, N, C, OC);
        matmul_backward(d_dx, NULL, d_dy, d_x, d_w, workspace, N, C, OC);
        matmul_backward(NULL, d_dw, d_dy, d_x, d_w, workspace, N, C, OC);
        check_result(&results[0], "matmul out", d_y, want_y, N * OC, ROUNDING, FP32_NOISE, order);
        check_result(&results[1], "matmul dinp", d_dx, want_dx, N * C, ROUNDING, FP32_NOISE, order);
        check_result(&results[2], "matmul dweight", d_dw, want_dw, OC * C, 0, FP32_NOISE, order);
    }
    device_free(d_x), device_free(d_w), device_free(d_dy), device_free(d_y), device_free(d_dx), device_free(d_dw);
    device_free(workspace);
    free(x), free(w), free(dy), free(dw), free(want_y), free(want_dx), free(want_dw), free(cpu_workspace);
}

static void test_matmul(void** state) {
    (void)state;
    Random r = random_stream(2, 0);
    check_matmul(1, 1, 1, &r);
    check_matmul(65, 24, 40, &r);
    check_matmul(33, 37, 19, &r);
    check_matmul(1, 48, 130, &r);
    check_matmul(200, 64, 96, &r);
    assert_true(backend_matmul_rate() > 0);
}

// ----------------------------------------------------------------------------
// SwiGLU

static void check_swiglu(size_t N, size_t F, Random* random) {
    float *x = rounded_array(N * 2 * F, 3.0, random), *dy = rounded_array(N * F, 1.0, random);
    x[0] = -100.0f;  // exp(-x) is infinite
    float *want = host_copy(dy, N * F), *want_dx = host_copy(x, N * 2 * F);
    round_array(x, N * 2 * F);
    cpu::swiglu_forward(want, x, N, F);
    cpu::swiglu_backward(want_dx, dy, x, N, F);
    floatX *d_x = device_copy<floatX>(x, N * 2 * F), *d_dy = device_copy<floatX>(dy, N * F);
    floatX *d_y = device_copy<floatX>(dy, N * F), *d_dx = device_copy<floatX>(x, N * 2 * F);
    Result results[3];
    for (unsigned order = 0; order < ORDERS; order++) {
        set_order(order);
        upload(d_x, x, N * 2 * F);
        swiglu_forward(d_y, d_x, N, F);
        swiglu_backward(d_dx, d_dy, d_x, N, F);
        swiglu_backward(d_x, d_dy, d_x, N, F);
        check_result(&results[0], "swiglu out", d_y, want, N * F, ROUNDING, FP32_NOISE, order);
        check_result(&results[1], "swiglu gradient", d_dx, want_dx, N * 2 * F, ROUNDING, FP32_NOISE, order);
        check_result(&results[2], "swiglu gradient in place", d_x, want_dx, N * 2 * F, ROUNDING, FP32_NOISE, order);
    }
    device_free(d_x), device_free(d_dy), device_free(d_y), device_free(d_dx);
    free(x), free(dy), free(want), free(want_dx);
}

static void test_swiglu(void** state) {
    (void)state;
    Random r = random_stream(3, 0);
    check_swiglu(1, 1, &r);
    check_swiglu(33, 127, &r);
    check_swiglu(5, 264, &r);
    check_swiglu(3, 2056, &r);  // more than one block per row
}

// ----------------------------------------------------------------------------
// embedding and documents

static void check_embedding(size_t B, size_t T, size_t C, size_t V, bool one_token, Random* random) {
    const size_t N = B * T;
    int* tokens = random_tokens(N, V, random);
    for (size_t i = 0; one_token && i < N; i++) { tokens[i] = (int)V - 1; }
    float *wte = rounded_array(V * C, 1.0, random), *position = random_array(T * C, 1.0, random);
    float *dy = rounded_array(N * C, 1.0, random), *dw = random_array(V * C, 1.0, random);
    float *plain = host_copy(dy, N * C), *added = host_copy(dy, N * C), *want_dw = host_copy(dw, V * C);
    void* cpu_workspace = xcalloc(cpu::embedding_workspace(N, V), 1);
    cpu::embedding_forward(plain, tokens, wte, NULL, B, T, C);
    cpu::embedding_forward(added, tokens, wte, position, B, T, C);
    cpu::embedding_backward(want_dw, dy, tokens, cpu_workspace, N, C, V);
    int* d_tokens = device_ints(tokens, N);
    floatX *d_wte = device_copy<floatX>(wte, V * C), *d_dy = device_copy<floatX>(dy, N * C);
    floatX* d_out = device_copy<floatX>(dy, N * C);
    float *d_position = device_copy<float>(position, T * C), *d_dw = device_copy<float>(dw, V * C);
    void* workspace = device_malloc(embedding_workspace(N, V));
    Result results[3];
    for (unsigned order = 0; order < ORDERS; order++) {
        set_order(order);
        upload(d_dw, dw, V * C);
        embedding_forward(d_out, d_tokens, d_wte, NULL, B, T, C);
        check_result(&results[0], "embedding", d_out, plain, N * C, 0, 0, order);
        embedding_forward(d_out, d_tokens, d_wte, d_position, B, T, C);
        check_result(&results[1], "embedding + position", d_out, added, N * C, ROUNDING, FP32_NOISE, order);
        embedding_backward(d_dw, d_dy, d_tokens, workspace, N, C, V);
        check_result(&results[2], "embedding gradient", d_dw, want_dw, V * C, 0, FP32_NOISE, order);
    }
    device_free(d_tokens), device_free(d_wte), device_free(d_dy), device_free(d_out), device_free(d_position);
    device_free(d_dw), device_free(workspace);
    free(tokens), free(wte), free(position), free(dy), free(dw), free(plain), free(added), free(want_dw);
    free(cpu_workspace);
}

static void test_embedding(void** state) {
    (void)state;
    Random r = random_stream(4, 0);
    check_embedding(1, 1, 8, 1, false, &r);
    check_embedding(2, 33, 24, 50, false, &r);
    check_embedding(3, 67, 37, 1000, false, &r);  // two digits, an odd width
    check_embedding(1, 40, 8, 70000, false, &r);  // three digits
    check_embedding(1, 1100, 8, 300, false, &r);  // five blocks of the sort, more counts than one scan takes
    check_embedding(1, 129, 520, 257, true, &r);  // one token, more than one strip of columns
}

typedef struct {
    int bos;
    size_t position;
    int first_start;
    size_t B, T;
} Documents;

static void test_document_starts(void** state) {
    (void)state;
    static const Documents cases[] = {{1, 0, 0, 1, 1},    {1, 0, 0, 3, 33},      {-1, 0, 0, 2, 127},
                                      {1, 70, 5, 1, 200}, {0, 1000, 900, 1, 33}, {1, 0, 0, 2, 2100}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const Documents k = cases[i];
        const size_t N = k.B * k.T;
        Random r = random_stream(5, i);
        int *tokens = (int*)xcalloc(N, sizeof(int)), *want = (int*)xcalloc(N, sizeof(int));
        int* got = (int*)xcalloc(N, sizeof(int));
        float* want_log = (float*)xcalloc(N, sizeof(float));
        for (size_t n = 0; n < N; n++) { tokens[n] = random_below(&r, 40) ? 2 + (int)random_below(&r, 50) : 1; }
        cpu::document_starts(want, want_log, tokens, k.bos, k.position, k.first_start, k.B, k.T);
        int *d_tokens = device_ints(tokens, N), *d_start = device_ints(tokens, N);
        float* d_log = device_copy<float>(want_log, N);
        Result result;
        for (unsigned order = 0; order < ORDERS; order++) {
            set_order(order);
            document_starts(d_start, d_log, d_tokens, k.bos, k.position, k.first_start, k.B, k.T);
            copy_to_host(got, d_start, N * sizeof(int));
            assert_memory_equal(got, want, N * sizeof(int));
            check_result(&result, "log count", d_log, want_log, N, 0x1p-23, 0, order);
        }
        const RowRule rule = {i % 2 ? (size_t)9 : 0, i % 3 ? 2.5 : 0.0, 0.3};
        cpu::limit_rows(want, want_log, rule, k.position, k.B, k.T);
        for (unsigned order = 0; order < ORDERS; order++) {
            set_order(order);
            document_starts(d_start, d_log, d_tokens, k.bos, k.position, k.first_start, k.B, k.T);
            limit_rows(d_start, d_log, rule, k.position, k.B, k.T);
            copy_to_host(got, d_start, N * sizeof(int));
            assert_memory_equal(got, want, N * sizeof(int));
            check_result(&result, "row scale", d_log, want_log, N, 0x1p-23, 0, order);
        }
        device_free(d_tokens), device_free(d_start), device_free(d_log);
        free(tokens), free(want), free(got), free(want_log);
    }
}

// ----------------------------------------------------------------------------
// copies

static void check_copy_columns(size_t rows, size_t columns, size_t out_stride, size_t inp_stride, Random* random) {
    float *x = rounded_array(rows * inp_stride, 1.0, random), *y = rounded_array(rows * out_stride, 1.0, random);
    float* want = host_copy(y, rows * out_stride);
    cpu::copy_columns(want, out_stride, x, inp_stride, rows, columns);
    floatX *d_x = device_copy<floatX>(x, rows * inp_stride), *d_y = device_copy<floatX>(y, rows * out_stride);
    copy_columns(d_y, out_stride, d_x, inp_stride, rows, columns);
    download(y, d_y, rows * out_stride);
    assert_memory_equal(y, want, rows * out_stride * sizeof(float));
    device_free(d_x), device_free(d_y);
    free(x), free(y), free(want);
}

static void test_copies(void** state) {
    (void)state;
    Random r = random_stream(6, 0);
    check_copy_columns(3, 16, 24, 40, &r);
    check_copy_columns(7, 13, 13, 29, &r);
    check_copy_columns(2, 2400, 2400, 2408, &r);
    // across several pinned buffers, and back
    const size_t n = ((size_t)5 << 18) + 3;
    float *x = random_array(n, 1.0, &r), *y = (float*)xcalloc(n, sizeof(float));
    float* device = device_copy<float>(x, n);
    copy_to_host(y, device, n * sizeof(float));
    assert_memory_equal(x, y, n * sizeof(float));
    // the compute copy: rounded to nearest in bf16, the master itself in fp32
    static const size_t counts[] = {1, 1024, 1027};
    for (size_t i = 0; i < 3 && sizeof(floatX) < sizeof(float); i++) {
        floatX* copy = (floatX*)device_malloc(counts[i] * sizeof(floatX));
        cast_parameters(copy, device, counts[i]);
        copy_floats_to_host(y, copy, counts[i]);
        for (size_t j = 0; j < counts[i]; j++) { assert_true(y[j] == (float)(floatX)x[j]); }
        device_free(copy);
    }
    cast_parameters((floatX*)device, device, sizeof(floatX) == sizeof(float) ? n : 0);
    device_free(device), free(x), free(y);
}

// ----------------------------------------------------------------------------
// output head

/*
Factors are small multiples of 1/8 and 1/4, so that logits are multiples of 1/32 below 8: exact in bf16 as in fp32.
Then losses are exact to fp32, and only the rounding of the logits' gradient (relative ROUNDING each) is left in dinp
and dweight. Rows V.. of the weight are NaN, of its gradient 7: both must stay unread and untouched.
*/
static float* exact_array(size_t n, int range, double unit, Random* r) {
    float* x = (float*)xcalloc(n, sizeof(float));
    for (size_t i = 0; i < n; i++) {
        x[i] = (float)(unit * ((double)random_below(r, (uint64_t)(2 * range + 1)) - range));
    }
    return x;
}

static void check_head(size_t N, size_t C, size_t V, float cap, Random* random) {
    const size_t Vp = round_up(V, 128);
    const float dloss = 0.125f;
    float *x = exact_array(N * C, 2, 0.125, random), *w = exact_array(Vp * C, 2, 0.25, random);
    float *dw = random_array(Vp * C, 1.0, random), *want_dx = host_copy(x, N * C), *want_loss = host_copy(x, N);
    for (size_t i = V * C; i < Vp * C; i++) { w[i] = NAN, dw[i] = 7.0f; }
    float* want_dw = host_copy(dw, Vp * C);
    int* targets = random_tokens(N, V, random);
    void* cpu_workspace = xcalloc(cpu::cross_entropy_workspace(N, C, V), 1);
    cpu::cross_entropy_head(want_loss, want_dx, want_dw, x, w, targets, dloss, cap, cpu_workspace, N, C, V);
    floatX *d_x = device_copy<floatX>(x, N * C), *d_w = device_copy<floatX>(w, Vp * C);
    floatX* d_dx = device_copy<floatX>(x, N * C);
    float *d_dw = device_copy<float>(dw, Vp * C), *d_loss = device_copy<float>(x, N);
    int* d_targets = device_ints(targets, N);
    void* workspace = device_malloc(cross_entropy_workspace(N, C, V));
    const double loss_noise = sizeof(floatX) == sizeof(float) ? FP32_NOISE : 1e-5;  // of the fast exponential
    Result results[5];
    for (unsigned order = 0; order < ORDERS; order++) {
        set_order(order);
        upload(d_dw, dw, Vp * C), upload(d_dx, x, N * C);
        cross_entropy_head(d_loss, NULL, NULL, d_x, d_w, d_targets, dloss, cap, workspace, N, C, V);
        check_result(&results[0], "losses alone", d_loss, want_loss, N, 0, loss_noise, order);
        cross_entropy_head(d_loss, d_dx, NULL, d_x, d_w, d_targets, dloss, cap, workspace, N, C, V);
        check_result(&results[1], "head dinp alone", d_dx, want_dx, N * C, ROUNDING, ROUNDING + FP32_NOISE, order);
        cross_entropy_head(d_loss, d_dx, d_dw, d_x, d_w, d_targets, dloss, cap, workspace, N, C, V);
        check_result(&results[2], "losses", d_loss, want_loss, N, 0, loss_noise, order);
        check_result(&results[3], "head dinp", d_dx, want_dx, N * C, ROUNDING, ROUNDING + FP32_NOISE, order);
        check_result(&results[4], "head dweight", d_dw, want_dw, Vp * C, 0, ROUNDING / 4 + FP32_NOISE, order);
    }
    device_free(d_x), device_free(d_w), device_free(d_dx), device_free(d_dw), device_free(d_loss);
    device_free(d_targets), device_free(workspace);
    free(x), free(w), free(dw), free(want_dx), free(want_loss), free(want_dw), free(targets), free(cpu_workspace);
}

static void test_cross_entropy(void** state) {
    (void)state;
    Random r = random_stream(9, 0);
    check_head(1, 8, 1, 0, &r);
    check_head(33, 24, 130, 0, &r);   // two chunks
    check_head(20, 48, 1003, 0, &r);  // three chunks, a row that no vector divides
    check_head(9, 37, 4100, 0, &r);   // two chunks, an odd C, more columns than a block takes at once
    check_head(33, 24, 130, 1.5f, &r);
    check_head(9, 37, 4100, 30.0f, &r);
}

// Logits far apart: the online softmax must not overflow and a hopeless target has a large finite loss.
static void test_cross_entropy_extremes(void** state) {
    (void)state;
    enum { C = 8, V = 130 };
    float x[2 * C] = {0}, w[V * C] = {0}, losses[2];
    x[0] = 256.0f, x[C] = -256.0f;
    for (size_t v = 0; v < V; v++) { w[v * C] = v == 5 ? 64.0f : v == 100 ? -64.0f : 0.0f; }
    const int targets[2] = {100, 100};
    floatX *d_x = device_copy<floatX>(x, 2 * C), *d_w = device_copy<floatX>(w, V * C);
    float* d_loss = device_copy<float>(x, 2);
    int* d_targets = device_ints(targets, 2);
    void* workspace = device_malloc(cross_entropy_workspace(2, C, V));
    cross_entropy_head(d_loss, NULL, NULL, d_x, d_w, d_targets, 1.0f, 0, workspace, 2, C, V);
    copy_to_host(losses, d_loss, sizeof losses);
    assert_true(losses[0] == 32768.0f);
    assert_true(losses[1] == 0.0f);
    device_free(d_x), device_free(d_w), device_free(d_loss), device_free(d_targets), device_free(workspace);
}

// What is not finite in one row of the weight, that of the target or another, or in an input, makes the losses and
// gradients that depend on it NaN, and no others, whichever thread meets it; a logit of -infinity alone has
// probability 0.
static void test_cross_entropy_not_finite(void** state) {
    (void)state;
    enum { N = 2, C = 8, V = 4100, TARGET = 100 };
    static const size_t columns[] = {0, 1, 5, TARGET, 101, 2047, 4095, 4096, 4099};  // the last four are no vector's
    const int targets[N] = {TARGET, TARGET};
    int* d_targets = device_ints(targets, N);
    void* workspace = device_malloc(cross_entropy_workspace(N, C, V));
    float *w = (float*)xcalloc(V * C, sizeof(float)), *dw = (float*)xcalloc(V * C, sizeof(float));
    floatX *d_w = device_copy<floatX>(w, V * C), *d_dx = device_copy<floatX>(w, N * C);
    float *d_dw = device_copy<float>(dw, V * C), *d_loss = device_copy<float>(w, N);
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) {
        for (int kind = 0; kind < 4; kind++) {
            const float bad[] = {NAN, INFINITY, -INFINITY, NAN};
            float x[N * C] = {0}, losses[N], dx[N * C];
            x[0] = 1.0f, x[C] = 2.0f;
            w[columns[i] * C] = kind < 3 ? bad[kind] : 0.0f;
            if (kind == 3) { x[C + 3] = NAN; }
            floatX* d_x = device_copy<floatX>(x, N * C);
            upload(d_w, w, V * C), upload(d_dw, dw, V * C);
            cross_entropy_head(d_loss, NULL, NULL, d_x, d_w, d_targets, 1.0f, 0, workspace, N, C, V);
            copy_to_host(losses, d_loss, sizeof losses);
            const bool harmless = kind == 2 && columns[i] != TARGET;  // exp(-infinity) is 0
            assert_true(harmless ? fabsf(losses[0] - logf(V - 1)) < 1e-4f : kind == 3 || !isfinite(losses[0]));
            assert_true(harmless ? losses[1] == losses[0] : !isfinite(losses[1]));
            if (kind == 3) { assert_true(isfinite(losses[0])); }
            cross_entropy_head(d_loss, d_dx, d_dw, d_x, d_w, d_targets, 1.0f, 0, workspace, N, C, V);
            copy_floats_to_host(dx, d_dx, N * C);
            assert_true(!isfinite(dx[C]) && (kind == 3) == (isfinite(dx[0]) != 0));
            w[columns[i] * C] = 0.0f;
            device_free(d_x);
        }
    }
    device_free(d_w), device_free(d_dx), device_free(d_dw), device_free(d_loss), device_free(d_targets);
    device_free(workspace);
    free(w), free(dw);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rmsnorm),
        cmocka_unit_test(test_heads),
        cmocka_unit_test(test_gate),
        cmocka_unit_test(test_matmul),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_embedding),
        cmocka_unit_test(test_document_starts),
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_cross_entropy),
        cmocka_unit_test(test_cross_entropy_extremes),
        cmocka_unit_test(test_cross_entropy_not_finite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
