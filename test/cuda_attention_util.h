/*
What the tests of CUDA attention share: random problems on the host and on the device, and a float64 reference that
materialises every row of weights. Inputs are rounded to floatX first, so what is measured is the kernels' own error.
*/
#ifndef CUDA_ATTENTION_UTIL_H
#define CUDA_ATTENTION_UTIL_H

#include <vector>

// before cmocka, which makes a macro of `fail`
#include "../llmc/cuda_device.cuh"
#include "../llmc/attention/cuda_tasks.cuh"
// clang-format off: cmocka needs these in this order, and does not say that it is C
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
extern "C" {
#include <cmocka.h>
}
// clang-format on
#include "test_util.h"
#include "attention_reference.h"

enum { NO_BIAS, BIAS_INSIDE, BIAS_OUTSIDE };
enum { TOKEN_GAP = 8, TABLE_GAP = 3 };  // unused elements after every token and every row of the table

typedef struct {
    size_t B, T, NH, NKV, HS;
    int bias;
    bool scaled, documents;
} Shape;

// Host arrays; q, k and v are interleaved as in the model, with a gap after every token.
struct Problem {
    Shape shape;
    size_t stride, bias_stride, key_column, value_column;
    std::vector<float> qkv, dout, bias, seq_scale, log_count;
    std::vector<int> start;
};

struct Result {
    std::vector<float> out, lse, dqkv, dbias, dseq_scale;
};

struct Reference {
    std::vector<double> out, lse, dqkv, dbias, dseq_scale;
    std::vector<double> scale_noise;  // [NH]: root of the sum over rows of the squared terms of dseq_scale
};

// ----------------------------------------------------------------------------
// problems

static inline float rounded(double x) { return (float)(floatX)(float)x; }

static inline std::vector<float> random_values(size_t n, double scale, Random* random, bool round) {
    std::vector<float> x(n);
    for (float& e : x) {
        e = (float)(scale * random_normal(random));
        if (round) { e = rounded(e); }
    }
    return x;
}

static inline void set_log_counts(Problem& p) {
    const size_t T = p.shape.T;
    for (size_t n = 0; n < p.shape.B * T; n++) { p.log_count[n] = ssmax_log_count(n % T - (size_t)p.start[n] + 1); }
}

static inline Problem make_problem(const Shape& s, uint64_t seed) {
    Problem p;
    Random random = random_stream(seed, 1);
    const size_t N = s.B * s.T;
    p.shape = s;
    p.stride = (s.NH + 2 * s.NKV) * s.HS + TOKEN_GAP, p.bias_stride = s.T + TABLE_GAP;
    p.key_column = s.NH * s.HS, p.value_column = (s.NH + s.NKV) * s.HS;
    p.qkv = random_values(N * p.stride, 1.0, &random, true);
    p.dout = random_values(N * s.NH * s.HS, 1.0, &random, true);
    p.bias = random_values(s.NH * p.bias_stride, 1.0, &random, false);
    p.seq_scale = random_values(s.NH, 0.4, &random, false);
    p.log_count.resize(N), p.start.resize(N);
    for (size_t n = 0; n < N; n++) {
        const double chance = n < s.T ? 0.03 : 0.3;  // long and short documents
        const bool begins = n % s.T == 0 || random_uniform(&random) < chance;
        p.start[n] = !s.documents ? 0 : begins ? (int)(n % s.T) : p.start[n - 1];
    }
    set_log_counts(p);
    return p;
}

// ----------------------------------------------------------------------------
// the device

template <typename T>
static inline T* upload(const std::vector<T>& x) {
    T* device = NULL;
    cudaCheck(cudaMalloc(&device, x.size() * sizeof(T)));
    cudaCheck(cudaMemcpy(device, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
    return device;
}

static inline floatX* upload_rounded(const std::vector<float>& x) {
    std::vector<floatX> y(x.size());
    for (size_t i = 0; i < x.size(); i++) { y[i] = (floatX)x[i]; }
    return upload(y);
}

static inline std::vector<float> download(const float* device, size_t n) {
    std::vector<float> x(n);
    cudaCheck(cudaMemcpy(x.data(), device, n * sizeof(float), cudaMemcpyDeviceToHost));
    return x;
}

#ifndef PRECISION_FP32
static inline std::vector<float> download(const floatX* device, size_t n) {
    std::vector<floatX> x(n);
    cudaCheck(cudaMemcpy(x.data(), device, n * sizeof(floatX), cudaMemcpyDeviceToHost));
    return std::vector<float>(x.begin(), x.end());
}
#endif

// n values of which every bit is set: NaN, so that a result that was not written shows.
template <typename T>
static inline T* garbage(size_t n) {
    T* device = NULL;
    cudaCheck(cudaMalloc(&device, n > 0 ? n * sizeof(T) : 1));
    cudaCheck(cudaMemset(device, 0xFF, n * sizeof(T)));
    return device;
}

static inline char* make_workspace(const AttentionInput& in, bool backward) {
    return garbage<char>(attention_workspace(&in.size, backward));
}

// The problem's inputs on the device.
struct Device {
    AttentionInput in;
    floatX *qkv, *dout;
    float *bias, *seq_scale, *log_count;
    int* start;
};

static inline AttentionSizes sizes(const Shape& s) {
    const unsigned terms = (s.bias == NO_BIAS ? 0u : (unsigned)TERM_DISTANCE) | (s.scaled ? (unsigned)TERM_SCALE : 0u);
    return {s.B, s.T, s.T, s.NH, s.NKV, s.HS, terms, 0, 0};
}

static inline Device to_device(const Problem& p) {
    const Shape& s = p.shape;
    Device d;
    memset(&d, 0, sizeof d);
    d.qkv = upload_rounded(p.qkv), d.dout = upload_rounded(p.dout), d.bias = upload(p.bias);
    d.seq_scale = upload(p.seq_scale), d.log_count = upload(p.log_count), d.start = upload(p.start);
    AttentionInput& in = d.in;
    in.size = sizes(s);
    in.q = d.qkv, in.k = d.qkv + p.key_column, in.v = d.qkv + p.value_column;
    in.q_stride = in.kv_stride = p.stride, in.q_batch = in.kv_batch = s.T * p.stride;
    in.logit.by_distance = d.bias, in.logit.distance_stride = p.bias_stride;
    in.logit.inside = s.bias == BIAS_INSIDE;
    in.logit.seq_scale = d.seq_scale, in.logit.log_count = d.log_count;
    in.start = s.documents ? d.start : NULL;
    for (size_t n = 0; n < s.B * s.T; n++) { in.documents += n % s.T == (s.documents ? (size_t)p.start[n] : 0); }
    return d;
}

static inline void free_device(Device& d) {
    void* all[] = {d.qkv, d.dout, d.bias, d.seq_scale, d.log_count, d.start};
    for (void* p : all) { cudaCheck(cudaFree(p)); }
}

static inline std::vector<float> forward(const AttentionInput& in, std::vector<float>* lse) {
    const size_t N = in.size.B * in.size.Tq * in.size.NH;
    floatX* out = garbage<floatX>(N * in.size.HS);
    float* device_lse = lse ? garbage<float>(N) : NULL;
    char* workspace = make_workspace(in, false);
    attention_forward(out, device_lse, &in, workspace);
    cudaCheck(cudaDeviceSynchronize());
    std::vector<float> result = download(out, N * in.size.HS);
    if (lse) { *lse = download(device_lse, N); }
    void* all[] = {out, device_lse, workspace};
    for (void* x : all) { cudaCheck(cudaFree(x)); }
    return result;
}

static inline Result forward_backward(const Problem& p) {
    Device d = to_device(p);
    const Shape& s = p.shape;
    const size_t N = s.B * s.T * s.NH;
    floatX *out = garbage<floatX>(N * s.HS), *dqkv = garbage<floatX>(p.qkv.size());
    float *lse = garbage<float>(N), *dbias = garbage<float>(p.bias.size());
    float* dseq_scale = upload(std::vector<float>(s.NH, 0.0f));
    char* workspace = make_workspace(d.in, true);
    attention_forward(out, lse, &d.in, workspace);
    const AttentionGradients to = {
        dqkv, dqkv + p.key_column, dqkv + p.value_column, dbias, dseq_scale, NULL, NULL, NULL, NULL};
    attention_backward(&to, d.dout, out, lse, &d.in, workspace);
    cudaCheck(cudaDeviceSynchronize());
    Result r;
    r.out = download(out, N * s.HS), r.lse = download(lse, N), r.dqkv = download(dqkv, p.qkv.size());
    r.dbias = download(dbias, p.bias.size()), r.dseq_scale = download(dseq_scale, s.NH);
    void* all[] = {out, dqkv, lse, dbias, dseq_scale, workspace};
    for (void* x : all) { cudaCheck(cudaFree(x)); }
    free_device(d);
    return r;
}

// ----------------------------------------------------------------------------
// reference

static inline AttentionCase reference_case(const Problem& p) {
    const Shape& s = p.shape;
    AttentionCase c;
    memset(&c, 0, sizeof c);
    c.size = sizes(s);
    c.q = p.qkv.data(), c.k = c.q + p.key_column, c.v = c.q + p.value_column;
    c.q_stride = c.kv_stride = p.stride, c.q_batch = c.kv_batch = s.T * p.stride;
    c.start = p.start.data();
    c.by_distance = p.bias.data(), c.distance_stride = p.bias_stride, c.inside = s.bias == BIAS_INSIDE;
    c.seq_scale = p.seq_scale.data(), c.log_count = p.log_count.data();
    return c;
}

static inline Reference reference(const Problem& p, bool gradients) {
    const Shape& s = p.shape;
    Reference r;
    r.out.resize(p.dout.size()), r.lse.resize(s.B * s.NH * s.T), r.dqkv.resize(p.qkv.size());
    r.dbias.resize(p.bias.size()), r.dseq_scale.resize(s.NH), r.scale_noise.resize(s.NH);
    const AttentionCase c = reference_case(p);
    double* dqkv = r.dqkv.data();
    AttentionReference to;
    memset(&to, 0, sizeof to);
    to.out = r.out.data(), to.lse = r.lse.data();
    to.dq = dqkv, to.dk = dqkv + p.key_column, to.dv = dqkv + p.value_column;
    to.dby_distance = r.dbias.data(), to.dseq_scale = r.dseq_scale.data(), to.dscale_noise = r.scale_noise.data();
    attention_reference(&to, &c, gradients ? p.dout.data() : NULL);
    return r;
}

// ----------------------------------------------------------------------------
// comparison

// Root mean square error relative to the root mean square; NaN anywhere gives infinity.
struct Error {
    double difference, size;
};

static inline void add_error(Error* e, double got, double want) {
    const double d = got - want;
    e->difference += isfinite(d) ? d * d : INFINITY;
    e->size += want * want;
}

static inline double relative(const Error& e) { return sqrt(e.difference / fmax(e.size, 1e-30)); }

static inline double array_error(const std::vector<float>& got, const std::vector<double>& want) {
    Error e = {0, 0};
    for (size_t i = 0; i < want.size(); i++) { add_error(&e, got[i], want[i]); }
    return relative(e);
}

// Of columns first..first+count-1 of every token.
static inline double gradient_error(const Problem& p, const Result& got, const Reference& want, size_t first,
                                    size_t count) {
    Error e = {0, 0};
    for (size_t n = 0; n < p.shape.B * p.shape.T; n++) {
        for (size_t c = first; c < first + count; c++) {
            add_error(&e, got.dqkv[n * p.stride + c], want.dqkv[n * p.stride + c]);
        }
    }
    return relative(e);
}

static inline double bias_error(const Problem& p, const Result& got, const Reference& want) {
    Error e = {0, 0};
    for (size_t h = 0; h < p.shape.NH; h++) {
        for (size_t d = 0; d < p.shape.T; d++) {
            add_error(&e, got.dbias[h * p.bias_stride + d], want.dbias[h * p.bias_stride + d]);
        }
    }
    return relative(e);
}

// The gradient of seq_scale is what remains when all pairs cancel: its error is relative to the size of a random sum
// of the rows' terms.
static inline double scale_error(const Result& got, const Reference& want) {
    Error e = {0, 0};
    for (size_t h = 0; h < want.dseq_scale.size(); h++) {
        add_error(&e, got.dseq_scale[h], want.dseq_scale[h]);
        e.size += want.scale_noise[h] * want.scale_noise[h] - want.dseq_scale[h] * want.dseq_scale[h];
    }
    return relative(e);
}

// Absolute where lse is small.
static inline double lse_error(const std::vector<float>& got, const std::vector<double>& want) {
    double error = 0;
    for (size_t i = 0; i < want.size(); i++) {
        const double e = fabs((double)got[i] - want[i]) / fmax(1.0, fabs(want[i]));
        error = e <= error ? error : isnan(e) ? INFINITY : e;
    }
    return error;
}

#endif
