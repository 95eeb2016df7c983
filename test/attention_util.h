/*
What the tests of attention share: random problems, and a float64 reference that materialises every row of
weights and knows nothing of tiles.
*/
#ifndef ATTENTION_UTIL_H
#define ATTENTION_UTIL_H

#include "test_util.h"
#include "../llmc/backend.h"
#include "attention_reference.h"

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
    double* by_key;                      // NULL before add_terms, as are the next
    float *dby_key, *sink, *dsink;       // by_key has a gap after the last key of a head
    float *mix, *dmix, *mixed, *dmixed;  // NULL before add_mix
    size_t mix_floats, mixed_floats;
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
    unsigned terms = (s.bias == NO_BIAS ? 0u : (unsigned)TERM_DISTANCE) | (s.scaled ? (unsigned)TERM_SCALE : 0u);
    AttentionInput in = {.size = {s.B, s.T, s.T, s.NH, s.NKV, s.HS, terms, 0, 0}};
    in.q = p.qkv, in.k = p.qkv + p.dk, in.v = p.qkv + p.dv;
    in.q_stride = in.kv_stride = stride, in.q_batch = in.kv_batch = s.T * stride;
    in.logit.by_distance = p.bias, in.logit.distance_stride = s.T + GAP, in.logit.inside = s.bias == BIAS_INSIDE;
    in.logit.seq_scale = p.seq_scale, in.logit.log_count = p.log_count;
    in.start = s.documents ? p.start : NULL;
    p.in = in;
    return p;
}

// The terms beside those of a shape: TERM_CAP, TERM_KEY, TERM_SINK.
static inline void add_terms(Problem* p, unsigned terms, float cap, uint64_t seed) {
    Random random = random_stream(seed, 2);
    size_t heads = p->shape.B * p->shape.NH, keys = heads * p->shape.T;
    p->by_key = xcalloc(heads * (p->shape.T + GAP), sizeof(double));
    for (size_t i = 0; i < heads * (p->shape.T + GAP); i++) { p->by_key[i] = random_normal(&random); }
    p->dby_key = random_array(keys, 1.0, &random);
    p->sink = random_array(p->shape.NH, 1.0, &random), p->dsink = xcalloc(p->shape.NH, sizeof(float));
    p->in.size.terms |= terms;
    p->in.logit.cap = cap, p->in.logit.sink = p->sink;
    p->in.logit.by_key = p->by_key, p->in.logit.key_stride = p->shape.T + GAP;
}

// Tables weighted by the query, with a gap after the weights of every query.
static inline void add_mix(Problem* p, size_t mixes, size_t length, uint64_t seed) {
    Random random = random_stream(seed, 3);
    LogitTerms* logit = &p->in.logit;
    p->in.size.terms |= TERM_MIX;
    p->in.size.mixes = mixes, p->in.size.mixed_length = length;
    logit->mix_stride = p->shape.NH * mixes + GAP, logit->mix_batch = p->shape.T * logit->mix_stride;
    p->mix_floats = p->shape.B * logit->mix_batch, p->mixed_floats = mixes * length;
    p->mix = random_array(p->mix_floats, 0.5, &random), p->dmix = random_array(p->mix_floats, 1.0, &random);
    p->mixed = random_array(p->mixed_floats, 1.0, &random), p->dmixed = xcalloc(p->mixed_floats, sizeof(float));
    logit->mix = p->mix, logit->mixed = p->mixed;
}

static inline void free_problem(Problem* p) {
    float* arrays[] = {p->qkv,   p->dqkv,      p->out,        p->dout,      p->lse,     p->bias,
                       p->dbias, p->seq_scale, p->dseq_scale, p->log_count, p->dby_key, p->sink,
                       p->dsink, p->mix,       p->dmix,       p->mixed,     p->dmixed};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) { free(arrays[i]); }
    free(p->start), free(p->by_key);
}

// Exactly as many bytes as asked for, so that the address sanitizer sees a step beyond; garbage inside.
static inline void* make_workspace(const AttentionInput* in, bool backward) {
    size_t bytes = attention_workspace(&in->size, backward);
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

static inline AttentionGradients problem_gradients(const Problem* p) {
    return (AttentionGradients){p->dqkv,    p->dqkv + p->dk, p->dqkv + p->dv, p->dbias, p->dseq_scale,
                                p->dby_key, p->dsink,        p->dmix,         p->dmixed};
}

static inline void backward(Problem* p) {
    void* workspace = make_workspace(&p->in, true);
    memset(p->dseq_scale, 0, p->shape.NH * sizeof(float));
    if (p->dsink) { memset(p->dsink, 0, p->shape.NH * sizeof(float)); }
    if (p->dmixed) { memset(p->dmixed, 0, p->mixed_floats * sizeof(float)); }
    AttentionGradients gradients = problem_gradients(p);
    attention_backward(&gradients, p->dout, p->out, p->lse, &p->in, workspace);
    free(workspace);
}

// ----------------------------------------------------------------------------
// reference

typedef struct {
    // dqkv and dmix like those of Problem, others as in the contract
    double *out, *lse, *dqkv, *dbias, *dseq_scale, *dby_key, *dsink, *dmix, *dmixed;
} Reference;

static inline Reference make_reference(const Problem* p) {
    const Shape* s = &p->shape;
    Reference r;
    r.out = xcalloc(p->q_size, sizeof(double)), r.lse = xcalloc(s->B * s->NH * s->T, sizeof(double));
    r.dqkv = xcalloc(p->qkv_floats, sizeof(double));
    r.dbias = xcalloc(s->NH * p->in.logit.distance_stride, sizeof(double)),
    r.dseq_scale = xcalloc(s->NH, sizeof(double));
    r.dby_key = xcalloc(s->B * s->NH * s->T, sizeof(double)), r.dsink = xcalloc(s->NH, sizeof(double));
    r.dmix = xcalloc(p->mix_floats + 1, sizeof(double)), r.dmixed = xcalloc(p->mixed_floats + 1, sizeof(double));
    return r;
}

static inline void free_reference(Reference* r) {
    double* arrays[] = {r->out, r->lse, r->dqkv, r->dbias, r->dseq_scale, r->dby_key, r->dsink, r->dmix, r->dmixed};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) { free(arrays[i]); }
}

static inline AttentionCase reference_case(const AttentionInput* in) {
    AttentionCase c = {.size = in->size, .q = in->q, .k = in->k, .v = in->v, .start = in->start};
    c.q_stride = in->q_stride, c.kv_stride = in->kv_stride, c.q_batch = in->q_batch, c.kv_batch = in->kv_batch;
    c.by_distance = in->logit.by_distance, c.distance_stride = in->logit.distance_stride, c.inside = in->logit.inside;
    c.seq_scale = in->logit.seq_scale, c.log_count = in->logit.log_count;
    c.cap = (double)in->logit.cap, c.sink = in->logit.sink;
    c.by_key = in->logit.by_key, c.key_stride = in->logit.key_stride;
    c.mix = in->logit.mix, c.mixed = in->logit.mixed;
    c.mix_stride = in->logit.mix_stride, c.mix_batch = in->logit.mix_batch;
    return c;
}

static inline Reference reference(const Problem* p, bool gradients) {
    Reference r = make_reference(p);
    AttentionCase c = reference_case(&p->in);
    double* noise = xcalloc(c.size.NH, sizeof(double));
    AttentionReference to = {.out = r.out, .lse = r.lse, .dq = r.dqkv, .dk = r.dqkv + p->dk, .dv = r.dqkv + p->dv};
    to.dby_distance = r.dbias, to.dseq_scale = r.dseq_scale, to.dscale_noise = noise;
    to.dby_key = r.dby_key, to.dsink = r.dsink, to.dmix = r.dmix, to.dmixed = r.dmixed;
    attention_reference(&to, &c, gradients ? p->dout : NULL);
    free(noise);
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
        memcpy(got + h * T, p->dbias + h * p->in.logit.distance_stride, T * sizeof(float));
        memcpy(want + h * T, r->dbias + h * p->in.logit.distance_stride, T * sizeof(double));
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
    if (attention_has(&p->in, TERM_DISTANCE)) { assert_error_below(bias_error(p, r), tolerance); }
    if (attention_has(&p->in, TERM_SCALE)) {
        assert_error_below(relative_error(p->dseq_scale, r->dseq_scale, p->shape.NH), SCALE_TOLERANCE);
    }
}

// relative_error of the gradient of the weights of tables, whose rows have gaps.
static inline double mix_error(const Problem* p, const Reference* r) {
    size_t N = p->shape.B * p->shape.T, columns = p->shape.NH * p->in.size.mixes, stride = p->in.logit.mix_stride;
    float* got = xcalloc(N * columns, sizeof(float));
    double* want = xcalloc(N * columns, sizeof(double));
    for (size_t n = 0; n < N; n++) {
        memcpy(got + n * columns, p->dmix + n * stride, columns * sizeof(float));
        memcpy(want + n * columns, r->dmix + n * stride, columns * sizeof(double));
    }
    double error = relative_error(got, want, N * columns);
    free(got), free(want);
    return error;
}

// Sums over all queries of terms of order 1, which may cancel where they are few: relative to at least 1.
static inline double mixed_error(const Problem* p, const Reference* r) {
    double largest = 0;
    for (size_t i = 0; i < p->mixed_floats; i++) { largest = fmax(largest, fabs(r->dmixed[i])); }
    return relative_error(p->dmixed, r->dmixed, p->mixed_floats) * fmin(1.0, largest);
}

// What a query's own number takes away may leave next to nothing of a short document: relative to at least 1.
static inline double key_error(const Problem* p, const Reference* r) {
    double error = 0, largest = 1;
    for (size_t i = 0; i < p->shape.B * p->shape.NH * p->shape.T; i++) {
        double e = fabs((double)p->dby_key[i] - r->dby_key[i]);
        error = e <= error ? error : isnan(e) ? INFINITY : e, largest = fmax(largest, fabs(r->dby_key[i]));
    }
    return error / largest;
}

static inline void check_added_terms(const Problem* p, const Reference* r, double tolerance) {
    const Shape* s = &p->shape;
    if (attention_has(&p->in, TERM_KEY)) { assert_error_below(key_error(p, r), tolerance); }
    if (attention_has(&p->in, TERM_SINK)) { assert_error_below(relative_error(p->dsink, r->dsink, s->NH), tolerance); }
    if (attention_has(&p->in, TERM_MIX)) {
        assert_error_below(mix_error(p, r), tolerance);
        assert_error_below(mixed_error(p, r), tolerance);
    }
}

// Teams of threads are slow to meet on a busy machine, so only the tests that are about threads use them.
static inline int one_thread(void** state) {
    (void)state;
    set_threads(1);
    return 0;
}

static inline double reference_loss(const Problem* p) {
    Reference r = reference(p, false);
    double loss = 0;
    for (size_t i = 0; i < p->q_size; i++) { loss += r.out[i] * (double)p->dout[i]; }
    free_reference(&r);
    return loss;
}

// Central difference of the reference's loss by one fp32 number; error of order step^2.
static inline double finite_difference(const Problem* p, float* x) {
    float old = *x, above = old + 0x1p-10f, below = old - 0x1p-10f;
    *x = above;
    double loss_above = reference_loss(p);
    *x = below;
    double loss_below = reference_loss(p);
    *x = old;
    return (loss_above - loss_below) / ((double)above - (double)below);
}

// The same by a number that is double.
static inline double finite_difference_of_double(const Problem* p, double* x) {
    double old = *x;
    *x = old + 0x1p-10;
    double loss_above = reference_loss(p);
    *x = old - 0x1p-10;
    double loss_below = reference_loss(p);
    *x = old;
    return (loss_above - loss_below) / 0x1p-9;
}

static inline void print_shape(const Shape* s) {
    print_error("B %zu T %zu NH %zu NKV %zu HS %zu bias %d scaled %d documents %d\n", s->B, s->T, s->NH, s->NKV, s->HS,
                s->bias, s->scaled, s->documents);
}

static inline void fill(float* x, size_t n, float value) {
    for (size_t i = 0; i < n; i++) { x[i] = value; }
}

#endif
