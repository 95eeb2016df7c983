/*
What the tests of attention share: random problems, and a float64 reference that materialises every row of
weights and knows nothing of tiles.
*/
#ifndef ATTENTION_UTIL_H
#define ATTENTION_UTIL_H

#include "test_util.h"
#include "../llmc/backend.h"

// fp32 sums of up to 1025 products: a few ulps (6e-8) times the square root of the length. Largest seen: 3.4e-6.
static const double TOLERANCE = 5e-6;

// The gradient of seq_scale is one number per head that is left when all pairs cancel. Largest seen: 7e-6.
static const double SCALE_TOLERANCE = 1.5e-5;

static const float UNTOUCHED = 12345.0f;

enum { NO_BIAS, BIAS_INSIDE, BIAS_OUTSIDE, BIAS_CASES };

typedef struct {
    size_t B, T, NH, NKV, HS;
    int bias;
    bool scaled, documents;
} Shape;

// One problem with its inputs and results. q, k and v are interleaved as in the model, with a gap after every
// token; columns of the bias beyond T are a gap too.
typedef struct {
    Shape shape;
    AttentionInput in;
    float *qkv, *dqkv, *out, *dout, *lse, *bias, *dbias, *seq_scale, *dseq_scale, *log_count;
    int* start;
    size_t qkv_floats, q_size, dk, dv;  // offsets of the gradients of k and v in dqkv
} Problem;

enum { GAP = 3 };

static inline int* random_starts(const Shape* s, Random* random) {
    int* start = xcalloc(s->B * s->T, sizeof(int));
    for (size_t b = 0; b < s->B; b++) {
        double chance = b == 0 ? 0.03 : 0.3;  // long and short documents
        for (size_t t = 1; t < s->T; t++) {
            start[b * s->T + t] = random_uniform(random) < chance ? (int)t : start[b * s->T + t - 1];
        }
    }
    return start;
}

static inline Problem make_problem(Shape s, uint64_t seed) {
    Problem p;
    memset(&p, 0, sizeof p);
    Random random = random_stream(seed, 1);
    p.shape = s;
    size_t stride = (s.NH + 2 * s.NKV) * s.HS + GAP, N = s.B * s.T;
    p.q_size = N * s.NH * s.HS, p.qkv_floats = N * stride;
    p.dk = s.NH * s.HS, p.dv = (s.NH + s.NKV) * s.HS;
    p.qkv = random_array(p.qkv_floats, 1.0, &random), p.dqkv = random_array(p.qkv_floats, 1.0, &random);
    p.dout = random_array(p.q_size, 1.0, &random), p.out = random_array(p.q_size, 1.0, &random);
    p.lse = random_array(s.B * s.NH * s.T, 1.0, &random);
    p.bias = random_array(s.NH * (s.T + GAP), 1.0, &random), p.dbias = random_array(s.NH * (s.T + GAP), 1.0, &random);
    p.seq_scale = random_array(s.NH, 0.4, &random), p.dseq_scale = xcalloc(s.NH, sizeof(float));
    p.start = random_starts(&s, &random), p.log_count = xcalloc(N, sizeof(float));
    if (!s.documents) { memset(p.start, 0, N * sizeof(int)); }
    for (size_t n = 0; n < N; n++) { p.log_count[n] = ssmax_log_count(n % s.T - (size_t)p.start[n] + 1); }
    AttentionInput in = {.B = s.B, .Tq = s.T, .Tk = s.T, .NH = s.NH, .NKV = s.NKV, .HS = s.HS};
    in.q = p.qkv, in.k = p.qkv + p.dk, in.v = p.qkv + p.dv;
    in.q_stride = in.kv_stride = stride, in.q_batch = in.kv_batch = s.T * stride;
    in.bias = s.bias == NO_BIAS ? NULL : p.bias, in.bias_stride = s.T + GAP, in.bias_inside = s.bias == BIAS_INSIDE;
    in.seq_scale = s.scaled ? p.seq_scale : NULL, in.log_count = s.scaled ? p.log_count : NULL;
    in.start = s.documents ? p.start : NULL;
    p.in = in;
    return p;
}

static inline void free_problem(Problem* p) {
    float* arrays[] = {p->qkv,  p->dqkv,  p->out,       p->dout,       p->lse,
                       p->bias, p->dbias, p->seq_scale, p->dseq_scale, p->log_count};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) { free(arrays[i]); }
    free(p->start);
}

// Exactly as many bytes as asked for, so that the address sanitizer sees a step beyond; garbage inside.
static inline void* make_workspace(const AttentionInput* in, bool backward) {
    size_t bytes = attention_workspace(in->B, in->Tq, in->Tk, in->NH, in->NKV, in->HS, backward);
    void* workspace = NULL;
    assert_int_equal(posix_memalign(&workspace, 64, bytes), 0);
    memset(workspace, 0xFF, bytes);  // NaN
    return workspace;
}

static inline void forward(float* out, float* lse, const AttentionInput* in) {
    void* workspace = make_workspace(in, false);
    attention_forward(out, lse, in, workspace);
    free(workspace);
}

static inline void backward(Problem* p) {
    void* workspace = make_workspace(&p->in, true);
    memset(p->dseq_scale, 0, p->shape.NH * sizeof(float));
    attention_backward(p->dqkv, p->dqkv + p->dk, p->dqkv + p->dv, p->dbias, p->dseq_scale, p->dout, p->out, p->lse,
                       &p->in, workspace);
    free(workspace);
}

// ----------------------------------------------------------------------------
// reference

typedef struct {
    double *out, *lse, *dqkv, *dbias, *dseq_scale;  // dqkv like Problem.dqkv, other arrays as in the contract
} Reference;

static inline Reference make_reference(const Problem* p) {
    const Shape* s = &p->shape;
    Reference r;
    r.out = xcalloc(p->q_size, sizeof(double)), r.lse = xcalloc(s->B * s->NH * s->T, sizeof(double));
    r.dqkv = xcalloc(p->qkv_floats, sizeof(double));
    r.dbias = xcalloc(s->NH * p->in.bias_stride, sizeof(double)), r.dseq_scale = xcalloc(s->NH, sizeof(double));
    return r;
}

static inline void free_reference(Reference* r) {
    free(r->out), free(r->lse), free(r->dqkv), free(r->dbias), free(r->dseq_scale);
}

static inline double dot(const float* x, const float* y, size_t n) {
    double sums[8] = {0};  // head sizes are multiples of 8
    for (size_t i = 0; i < n; i += 8) {
        for (size_t lane = 0; lane < 8; lane++) { sums[lane] += (double)x[i + lane] * (double)y[i + lane]; }
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

static inline void add_scaled(double* y, double factor, const float* x, size_t n) {
    for (size_t i = 0; i < n; i++) { y[i] += factor * (double)x[i]; }
}

// Weights of query i, and inner_j: what g multiplies in the logit of key j.
static inline void reference_weights(const AttentionInput* in, size_t b, size_t h, size_t i, double* weights,
                                     double* inner, double* lse) {
    size_t position = in->Tk - in->Tq + i, first = in->start ? (size_t)in->start[b * in->Tq + i] : 0;
    double g = in->seq_scale ? (double)in->seq_scale[h] * (double)in->log_count[b * in->Tq + i] : 1.0;
    const float* q = in->q + b * in->q_batch + i * in->q_stride + h * in->HS;
    double largest = -INFINITY, sum = 0;
    for (size_t j = first; j <= position; j++) {
        const float* k = in->k + b * in->kv_batch + j * in->kv_stride + h * in->NKV / in->NH * in->HS;
        double bias = in->bias ? (double)in->bias[h * in->bias_stride + position - j] : 0.0;
        inner[j] = dot(q, k, in->HS) / sqrt((double)in->HS) + (in->bias_inside ? bias : 0.0);
        weights[j] = g * inner[j] + (in->bias_inside ? 0.0 : bias);
        largest = fmax(largest, weights[j]);
    }
    for (size_t j = first; j <= position; j++) { sum += weights[j] = exp(weights[j] - largest); }
    for (size_t j = first; j <= position; j++) { weights[j] /= sum; }
    *lse = largest + log(sum);
}

static inline void reference_row(const Problem* p, Reference* r, size_t b, size_t h, size_t i, double* weights,
                                 double* inner, bool gradients) {
    const AttentionInput* in = &p->in;
    size_t HS = in->HS, row = ((b * in->Tq + i) * in->NH + h) * HS,
           first = in->start ? (size_t)p->start[b * in->Tq + i] : 0;
    double ln_n = in->seq_scale ? (double)in->log_count[b * in->Tq + i] : 0.0;
    double g = in->seq_scale ? (double)in->seq_scale[h] * ln_n : 1.0, root = sqrt((double)HS);
    reference_weights(in, b, h, i, weights, inner, &r->lse[(b * in->NH + h) * in->Tq + i]);
    size_t keys = (size_t)(in->k - in->q) + b * in->kv_batch + h * in->NKV / in->NH * HS;
    size_t values = keys + (size_t)(in->v - in->k), query = b * in->q_batch + i * in->q_stride + h * HS;
    for (size_t j = first; j <= i; j++) {
        add_scaled(r->out + row, weights[j], p->qkv + values + j * in->kv_stride, HS);
    }
    if (!gradients) { return; }
    double delta = 0;
    for (size_t d = 0; d < HS; d++) { delta += r->out[row + d] * (double)p->dout[row + d]; }
    for (size_t j = first; j <= i; j++) {
        size_t k = keys + j * in->kv_stride, v = values + j * in->kv_stride;
        double dz = weights[j] * (dot(p->qkv + v, p->dout + row, HS) - delta);
        if (first == i) { dz = 0; }
        add_scaled(r->dqkv + v, weights[j], p->dout + row, HS);
        add_scaled(r->dqkv + query, dz * g / root, p->qkv + k, HS);
        add_scaled(r->dqkv + k, dz * g / root, p->qkv + query, HS);
        r->dbias[h * in->bias_stride + i - j] += in->bias_inside ? dz * g : dz;
        r->dseq_scale[h] += dz * ln_n * inner[j];
    }
}

static inline Reference reference(const Problem* p, bool gradients) {
    Reference r = make_reference(p);
    const AttentionInput* in = &p->in;
    double *weights = xcalloc(in->Tk, sizeof(double)), *inner = xcalloc(in->Tk, sizeof(double));
    for (size_t n = 0; n < in->B * in->NH * in->Tq; n++) {
        size_t b = n / in->Tq / in->NH, h = n / in->Tq % in->NH;
        reference_row(p, &r, b, h, n % in->Tq, weights, inner, gradients);
    }
    free(weights), free(inner);
    return r;
}

// relative_error of one of the three interleaved gradients.
static inline double gradient_error(const Problem* p, const Reference* r, size_t offset, size_t columns) {
    size_t N = p->shape.B * p->shape.T;
    float* got = xcalloc(N * columns, sizeof(float));
    double* want = xcalloc(N * columns, sizeof(double));
    for (size_t n = 0; n < N; n++) {
        memcpy(got + n * columns, p->dqkv + n * p->in.q_stride + offset, columns * sizeof(float));
        memcpy(want + n * columns, r->dqkv + n * p->in.q_stride + offset, columns * sizeof(double));
    }
    double error = relative_error(got, want, N * columns);
    free(got), free(want);
    return error;
}

static inline double bias_error(const Problem* p, const Reference* r) {
    size_t T = p->shape.T, NH = p->shape.NH;
    float* got = xcalloc(NH * T, sizeof(float));
    double* want = xcalloc(NH * T, sizeof(double));
    for (size_t h = 0; h < NH; h++) {
        memcpy(got + h * T, p->dbias + h * p->in.bias_stride, T * sizeof(float));
        memcpy(want + h * T, r->dbias + h * p->in.bias_stride, T * sizeof(double));
    }
    double error = relative_error(got, want, NH * T);
    free(got), free(want);
    return error;
}

// lse may be near 0, so its error is absolute there: relative to at least 1.
static inline double lse_error(const float* got, const double* want, size_t n) {
    double error = 0;
    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)got[i] - want[i]) / fmax(1.0, fabs(want[i]));
        error = e <= error ? error : isnan(e) ? INFINITY : e;
    }
    return error;
}

static inline void check_forward(const Problem* p, const Reference* r, double tolerance) {
    assert_error_below(relative_error(p->out, r->out, p->q_size), tolerance);
    assert_error_below(lse_error(p->lse, r->lse, p->shape.B * p->shape.NH * p->shape.T), tolerance);
}

static inline void check_backward(const Problem* p, const Reference* r, double tolerance) {
    assert_error_below(gradient_error(p, r, 0, p->dk), tolerance);
    assert_error_below(gradient_error(p, r, p->dk, p->dv - p->dk), tolerance);
    assert_error_below(gradient_error(p, r, p->dv, p->dv - p->dk), tolerance);
    if (p->in.bias) { assert_error_below(bias_error(p, r), tolerance); }
    if (p->in.seq_scale) {
        assert_error_below(relative_error(p->dseq_scale, r->dseq_scale, p->shape.NH), SCALE_TOLERANCE);
    }
}

static inline void print_shape(const Shape* s) {
    print_error("B %zu T %zu NH %zu NKV %zu HS %zu bias %d scaled %d documents %d\n", s->B, s->T, s->NH, s->NKV, s->HS,
                s->bias, s->scaled, s->documents);
}

static inline void fill(float* x, size_t n, float value) {
    for (size_t i = 0; i < n; i++) { x[i] = value; }
}

#endif
