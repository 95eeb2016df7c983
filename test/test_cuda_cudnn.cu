/*
cuDNN's attention against the float64 reference of our own. In a build with USE_CUDNN, for a GPU, cuDNN itself computes.
In the emulator a stand-in does, on the host: it reads tensors and the arrays that describe documents as
cudnn_graph.h has them, so what is tested is everything on our side of that interface.
*/
#ifndef USE_CUDNN
#define USE_CUDNN
#define STAND_IN
#endif
#include "cuda_attention_util.h"
#include "../llmc/attention/attention.cu"  // as a build with USE_CUDNN has it

// Relative root mean square errors. cuDNN rounds weights, their gradients and results to bf16 as our kernels do, whose
// errors are 2e-3 (out) and up to 5e-3 (gradients); the stand-in rounds results only.
#if defined(STAND_IN) && defined(PRECISION_FP32)
static const double OUT_TOLERANCE = 1e-6, GRADIENT_TOLERANCE = 1e-6;
#elif defined(STAND_IN)
static const double OUT_TOLERANCE = 2.2e-3, GRADIENT_TOLERANCE = 2.2e-3;
#else
static const double OUT_TOLERANCE = 4e-3, GRADIENT_TOLERANCE = 1e-2;
#endif

template <typename T>
static std::vector<T> fetch(const T* device, size_t n) {
    std::vector<T> x(n);
    cudaCheck(cudaMemcpy(x.data(), device, n * sizeof(T), cudaMemcpyDeviceToHost));
    return x;
}

// ----------------------------------------------------------------------------
// the stand-in

#ifdef STAND_IN
enum { STAND_IN_BYTES = 1000 };  // of workspace, per document

static struct {
    CudnnShape shape;
    size_t forwards, backwards;
} seen;

size_t attention_cudnn_workspace(const CudnnShape* s, bool backward) {
    return STAND_IN_BYTES * (s->documents ? s->documents : s->B) + (backward ? 100 : 0);
}

// Rows of `heads` heads, `stride` elements apart, and where they are on the device.
struct Rows {
    size_t stride, count;
    const floatX* device;
    std::vector<floatX> host;
    float get(size_t at) const { return (float)host[at]; }
};

static Rows fetch_rows(const void* device, size_t N, size_t stride, size_t heads, size_t HS) {
    Rows r = {stride, (N - 1) * stride + heads * HS, (const floatX*)device, {}};
    r.host.resize(r.count);
    cudaCheck(cudaMemcpy(r.host.data(), device, r.count * sizeof(floatX), cudaMemcpyDeviceToHost));
    return r;
}

// Only what belongs to the heads: other columns are other tensors' or gaps.
static void put_rows(void* device, const std::vector<double>& x, size_t N, size_t stride, size_t columns) {
    for (size_t n = 0; n < N; n++) {
        std::vector<floatX> row(columns);
        for (size_t c = 0; c < columns; c++) { row[c] = (floatX)(float)x[n * stride + c]; }
        cudaCheck(
            cudaMemcpy((floatX*)device + n * stride, row.data(), columns * sizeof(floatX), cudaMemcpyHostToDevice));
    }
}

// One query of one head of one document: offsets of its elements, weights over the document's first keys.
struct Query {
    size_t q, kv, out, statistic;  // kv: of the document's first key
    std::vector<double> weights, logits;
};

// Calls visit(query) for every query; documents as the arrays have them.
template <typename Visit>
static void for_each_query(const CudnnShape& s, const CudnnDocuments* d, const Rows& q, const Rows& k, Visit visit) {
    const size_t count = s.documents ? s.documents : s.B;
    std::vector<int32_t> lengths(count, (int32_t)s.T);
    std::vector<int64_t> at_q(count), at_kv(count), at_out(count), at_statistics(count);
    for (size_t i = 0; i < count; i++) {
        at_q[i] = (int64_t)(i * s.T * s.q_stride), at_kv[i] = (int64_t)(i * s.T * s.kv_stride);
        at_out[i] = (int64_t)(i * s.T * s.NH * s.HS), at_statistics[i] = (int64_t)(i * s.NH * s.T);
    }
    if (s.documents) {
        lengths = fetch(d->lengths, count), at_q = fetch(d->q, count), at_kv = fetch(d->kv, count);
        at_out = fetch(d->out, count), at_statistics = fetch(d->statistics, count);
    }
    for (size_t i = 0; i < count; i++) {
        for (size_t n = 0; n < (size_t)lengths[i] * s.NH; n++) {
            const size_t t = n / s.NH, h = n % s.NH;
            Query x;
            x.q = (size_t)at_q[i] + t * s.q_stride + h * s.HS;
            x.kv = (size_t)at_kv[i] + h * s.NKV / s.NH * s.HS;
            x.out = (size_t)at_out[i] + (t * s.NH + h) * s.HS;
            x.statistic = (size_t)at_statistics[i] + (s.documents ? t * s.NH + h : h * s.T + t);
            for (size_t j = 0; j <= t; j++) {
                double sum = 0;
                for (size_t c = 0; c < s.HS; c++) {
                    sum += (double)q.get(x.q + c) * (double)k.get(x.kv + j * s.kv_stride + c);
                }
                const double bias = s.slopes ? -alibi_slope(h, s.NH) * (double)(t - j) : 0.0;
                x.logits.push_back(sum / sqrt((double)s.HS) + bias);
            }
            visit(x);
        }
    }
}

void attention_cudnn_forward(void* out, float* statistics, const CudnnArrays* a, const CudnnDocuments* d,
                             const CudnnShape* shape, void* workspace, void* stream) {
    const CudnnShape s = *shape;
    const size_t N = s.B * s.T, C = s.NH * s.HS;
    seen.shape = s, seen.forwards++;
    cudaCheck(cudaStreamSynchronize((cudaStream_t)stream));
    cudaCheck(cudaMemset(workspace, 0xFF, attention_cudnn_workspace(shape, false)));
    const Rows q = fetch_rows(a->q, N, s.q_stride, s.NH, s.HS), k = fetch_rows(a->k, N, s.kv_stride, s.NKV, s.HS);
    const Rows v = fetch_rows(a->v, N, s.kv_stride, s.NKV, s.HS);
    std::vector<double> result(N * C);
    std::vector<float> lse(N * s.NH, NAN);
    for_each_query(s, d, q, k, [&](const Query& x) {
        double largest = -INFINITY, sum = 0;
        for (double y : x.logits) { largest = fmax(largest, y); }
        for (double y : x.logits) { sum += exp(y - largest); }
        lse[x.statistic] = (float)(largest + log(sum));
        for (size_t j = 0; j < x.logits.size(); j++) {
            for (size_t c = 0; c < s.HS; c++) {
                result[x.out + c] += exp(x.logits[j] - largest) / sum * (double)v.get(x.kv + j * s.kv_stride + c);
            }
        }
    });
    put_rows(out, result, N, C, C);
    cudaCheck(cudaMemcpy(statistics, lse.data(), lse.size() * sizeof(float), cudaMemcpyHostToDevice));
}

void attention_cudnn_backward(const CudnnArrays* a, const CudnnDocuments* d, const CudnnShape* shape, void* workspace,
                              void* stream) {
    const CudnnShape s = *shape;
    const size_t N = s.B * s.T, C = s.NH * s.HS;
    seen.shape = s, seen.backwards++;
    cudaCheck(cudaStreamSynchronize((cudaStream_t)stream));
    cudaCheck(cudaMemset(workspace, 0xFF, attention_cudnn_workspace(shape, true)));
    const Rows q = fetch_rows(a->q, N, s.q_stride, s.NH, s.HS), k = fetch_rows(a->k, N, s.kv_stride, s.NKV, s.HS);
    const Rows v = fetch_rows(a->v, N, s.kv_stride, s.NKV, s.HS), dout = fetch_rows(a->dout, N, C, s.NH, s.HS);
    const std::vector<float> lse = fetch(a->statistics, N * s.NH);
    std::vector<double> dq(q.count), dk(k.count), dv(v.count);
    for_each_query(s, d, q, k, [&](const Query& x) {
        std::vector<double> w, dp;
        double delta = 0;
        for (size_t j = 0; j < x.logits.size(); j++) {
            double sum = 0;
            for (size_t c = 0; c < s.HS; c++) {
                sum += (double)v.get(x.kv + j * s.kv_stride + c) * (double)dout.get(x.out + c);
            }
            w.push_back(exp(x.logits[j] - (double)lse[x.statistic])), dp.push_back(sum);
            delta += w[j] * sum;
        }
        for (size_t j = 0; j < w.size(); j++) {
            const double dz = w[j] * (dp[j] - delta) / sqrt((double)s.HS);
            const size_t at = x.kv + j * s.kv_stride;
            for (size_t c = 0; c < s.HS; c++) {
                dq[x.q + c] += dz * (double)k.get(at + c), dk[at + c] += dz * (double)q.get(x.q + c);
                dv[at + c] += w[j] * (double)dout.get(x.out + c);
            }
        }
    });
    put_rows(a->dq, dq, N, s.q_stride, C);
    put_rows(a->dk, dk, N, s.kv_stride, s.NKV * s.HS), put_rows(a->dv, dv, N, s.kv_stride, s.NKV * s.HS);
}
#endif

// ----------------------------------------------------------------------------
// documents

// Rows at which documents begin, from starts; the kernel's arrays for `room` documents.
static void check_documents(size_t B, size_t T, const std::vector<int>& start, size_t room) {
    CudnnShape s = {B, T, 4, 2, 24, 200, 104, room, false};
    const size_t bytes = document_space(room, NULL).bytes;
    char* workspace = garbage<char>(bytes + 256);
    const DocumentSpace d = document_space(room, workspace);
    int* device_start = upload(start);
    LAUNCH(attention_documents_kernel, dim3(1), DOCUMENT_THREADS, 0, main_stream, d, s, device_start);
    cudaCheck(cudaDeviceSynchronize());
    std::vector<int64_t> first;
    for (size_t n = 0; n < B * T; n++) {
        if (start[n] == (int)(n % T)) { first.push_back((int64_t)n); }
    }
    assert_true(first.size() <= room);
    first.resize(room + 1, (int64_t)(B * T));
    const std::vector<int32_t> lengths = fetch(d.arrays.lengths, room);
    const std::vector<int64_t> q = fetch(d.arrays.q, room + 1), kv = fetch(d.arrays.kv, room + 1);
    const std::vector<int64_t> out = fetch(d.arrays.out, room + 1), lse = fetch(d.arrays.statistics, room + 1);
    for (size_t i = 0; i <= room; i++) {
        assert_int_equal(q[i], first[i] * 200), assert_int_equal(kv[i], first[i] * 104);
        assert_int_equal(out[i], first[i] * 4 * 24), assert_int_equal(lse[i], first[i] * 4);
        if (i < room) { assert_int_equal(lengths[i], first[i + 1] - first[i]); }
    }
    for (char c : fetch(workspace + bytes, 256)) { assert_int_equal((unsigned char)c, 0xFF); }
    cudaCheck(cudaFree(workspace));
    cudaCheck(cudaFree(device_start));
}

static void test_documents_are_described(void** state) {
    (void)state;
    static const size_t sizes[][2] = {{1, 2}, {3, 7}, {2, 1024}, {5, 333}, {4, 1500}};
    Random random = random_stream(3, 0);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (double chance : {0.0, 0.01, 0.4, 1.0}) {
            const size_t B = sizes[i][0], T = sizes[i][1];
            std::vector<int> start(B * T);
            size_t count = 0;
            for (size_t n = 0; n < B * T; n++) {
                const bool begins = n % T == 0 || random_uniform(&random) < chance;
                start[n] = begins ? (int)(n % T) : start[n - 1];
                count += begins;
            }
            check_documents(B, T, start, count);
            check_documents(B, T, start, count + 1 + i * 700);
        }
    }
}

static void test_numbers_of_documents_are_rounded(void** state) {
    (void)state;
    assert_int_equal(cudnn_documents(4, 4, 100), 0);
    assert_int_equal(cudnn_documents(5, 4, 100), 8);
    assert_int_equal(cudnn_documents(8, 4, 100), 8);
    assert_int_equal(cudnn_documents(9, 4, 100), 16);
    assert_int_equal(cudnn_documents(400, 4, 100), 400);
    assert_int_equal(cudnn_documents(2, 1, 2), 2);
}

// ----------------------------------------------------------------------------
// results

static Problem make_cudnn_problem(const Shape& s, uint64_t seed) {
    Problem p = make_problem(s, seed);
    for (size_t i = 0; i < p.bias.size(); i++) {
        p.bias[i] = (float)(-alibi_slope(i / p.bias_stride, s.NH) * (double)(i % p.bias_stride));
    }
    return p;
}

static void choose(bool slopes) { cudnn_attention.on = true, cudnn_attention.slopes = slopes; }

static bool same_bits(const std::vector<float>& x, const std::vector<float>& y) {
    return memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
}

#ifdef STAND_IN
static const Shape SHAPES[] = {
    {2, 33, 2, 2, 32, NO_BIAS, false, true},       {3, 20, 4, 2, 48, BIAS_OUTSIDE, false, true},
    {2, 33, 3, 1, 40, NO_BIAS, false, false},      {1, 40, 6, 3, 64, BIAS_OUTSIDE, false, true},
    {2, 25, 5, 5, 24, BIAS_OUTSIDE, false, false},
};
#else
static const Shape SHAPES[] = {
    {2, 512, 4, 4, 48, NO_BIAS, false, true},        {2, 512, 4, 4, 48, NO_BIAS, false, false},
    {3, 200, 4, 2, 32, BIAS_OUTSIDE, false, true},   {2, 130, 6, 3, 64, BIAS_OUTSIDE, false, false},
    {2, 333, 12, 12, 48, BIAS_OUTSIDE, false, true}, {2, 320, 4, 1, 128, NO_BIAS, false, true},
    {2, 256, 2, 2, 96, NO_BIAS, false, true},        {2, 192, 4, 4, 40, NO_BIAS, false, true},
};
#endif

static void test_results_are_those_of_the_reference(void** state) {
    (void)state;
    uint64_t seed = 50;
    for (const Shape& s : SHAPES) {
        print_message("B %zu T %zu NH %zu NKV %zu HS %zu alibi %d documents %d\n", s.B, s.T, s.NH, s.NKV, s.HS,
                      s.bias != NO_BIAS, s.documents);
        choose(s.bias != NO_BIAS);
        const Problem p = make_cudnn_problem(s, seed++);
        const Reference r = reference(p, true);
        const Result got = forward_backward(p);
        const size_t columns = p.value_column - p.key_column;
        print_message("  errors: out %.2g dq %.2g dk %.2g dv %.2g\n", array_error(got.out, r.out),
                      gradient_error(p, got, r, 0, p.key_column), gradient_error(p, got, r, p.key_column, columns),
                      gradient_error(p, got, r, p.value_column, columns));
        assert_error_below(array_error(got.out, r.out), OUT_TOLERANCE);
        assert_error_below(gradient_error(p, got, r, 0, p.key_column), GRADIENT_TOLERANCE);
        assert_error_below(gradient_error(p, got, r, p.key_column, columns), GRADIENT_TOLERANCE);
        assert_error_below(gradient_error(p, got, r, p.value_column, columns), GRADIENT_TOLERANCE);
        if (!s.documents) { assert_error_below(lse_error(got.lse, r.lse), 1e-4); }
        for (size_t n = 0; n < s.B * s.T; n++) {
            for (size_t c = p.stride - TOKEN_GAP; c < p.stride; c++) { assert_true(isnan(got.dqkv[n * p.stride + c])); }
        }
        const Result again = forward_backward(p);
        assert_true(same_bits(got.out, again.out) && same_bits(got.dqkv, again.dqkv));
    }
    cudnn_attention.on = false;
}

#ifdef STAND_IN
// Which passes go to cuDNN, and with what: the rest is left to our own kernels.
static void test_passes_that_cudnn_gets(void** state) {
    (void)state;
    choose(false);
    const Problem p = make_cudnn_problem({2, 30, 2, 1, 16, NO_BIAS, false, true}, 9);
    memset(&seen, 0, sizeof seen);
    forward_backward(p);
    assert_int_equal(seen.forwards, 1), assert_int_equal(seen.backwards, 1);
    assert_true(seen.shape.documents > 2 && seen.shape.B == 2 && seen.shape.T == 30 && !seen.shape.slopes);
    assert_true(seen.shape.q_stride == p.stride && seen.shape.kv_stride == p.stride);
    Device d = to_device(p);
    std::vector<float> lse;
    d.in.documents = 2;
    forward(d.in, &lse);
    assert_int_equal(seen.forwards, 2), assert_int_equal(seen.shape.documents, 0);
    d.in.documents = 0;  // not known
    forward(d.in, &lse);
    d.in.documents = 2, d.in.size.Tq = 29;  // behind a cache
    forward(d.in, &lse);
    d.in.size.Tq = 30;
    forward(d.in, NULL);
    cudnn_attention.on = false;
    forward(d.in, &lse);
    assert_int_equal(seen.forwards, 2);
    free_device(d);
}

// Every token a document of its own: more than was planned, and its workspace is not the caller's.
static void test_batches_with_many_documents(void** state) {
    (void)state;
    choose(true);
    Problem p = make_cudnn_problem({2, 64, 2, 2, 16, BIAS_OUTSIDE, false, true}, 10);
    for (size_t n = 0; n < 128; n++) { p.start[n] = (int)(n % 64); }
    const AttentionSizes size = sizes(p.shape);
    const size_t planned = attention_workspace(&size, true);
    const Result got = forward_backward(p);
    assert_int_equal(seen.shape.documents, 128);
    assert_true(planned < 128 * STAND_IN_BYTES);
    assert_error_below(array_error(got.out, reference(p, false).out), OUT_TOLERANCE);
    cudnn_attention.on = false;
}
#endif

// ----------------------------------------------------------------------------
// the choice

typedef struct {
    const char* name;
    unsigned terms;
} Choice;

static void choose_by_name(void* choice) {
    const Choice* c = (const Choice*)choice;
    attention_choose(c->name, c->terms);
}

static void test_choices(void** state) {
    (void)state;
    Choice learned = {"cudnn", TERM_DISTANCE}, scaled = {"cudnn", TERM_SCALE};
    expect_fatal(choose_by_name, &learned,
                 (const char* const[]){"--attention cudnn", "no bias but ALiBi's", "--attention own", NULL});
    expect_fatal(choose_by_name, &scaled,
                 (const char* const[]){"no scale of rows (Scalable-Softmax", "--attention own", NULL});
    attention_choose("own", TERM_DISTANCE | TERM_SCALE);
    assert_false(cudnn_attention.on);
    attention_choose("cudnn", posenc_terms(POS_ALIBI, false));
    assert_true(cudnn_attention.on && cudnn_attention.slopes);
    attention_choose("cudnn", posenc_terms(POS_ROTARY, false));
    assert_true(cudnn_attention.on && !cudnn_attention.slopes);
    cudnn_attention.on = false;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_documents_are_described),
        cmocka_unit_test(test_numbers_of_documents_are_rounded),
        cmocka_unit_test(test_results_are_those_of_the_reference),
#ifdef STAND_IN
        cmocka_unit_test(test_passes_that_cudnn_gets),
        cmocka_unit_test(test_batches_with_many_documents),
#endif
        cmocka_unit_test(test_choices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
