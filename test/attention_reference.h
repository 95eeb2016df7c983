/*
Attention as terms.h defines it, in float64, one row of weights at a time: what the kernels of both backends are
compared with. It knows nothing of tiles and derives gradients from the formulas of the paper (Dao et al. 2022, appendix
B.4). Plain C, also compiled as C++.
*/
#ifndef ATTENTION_REFERENCE_H
#define ATTENTION_REFERENCE_H

#include <math.h>
#include <string.h>

#include "../llmc/util.h"

// AttentionInput with its arrays on the host, as numbers that the backend's type holds exactly.
typedef struct {
    AttentionSizes size;
    const float *q, *k, *v;
    size_t q_stride, kv_stride, q_batch, kv_batch;
    const int* start;  // NULL: 0
    const float* by_distance;
    size_t distance_stride;
    bool inside;
    const float *seq_scale, *log_count;
    double cap;
    const double* by_key;
    size_t key_stride;
    const float* sink;
    const float *mix, *mixed;
    size_t mix_stride, mix_batch;
} AttentionCase;

// Results in the layouts of the contract; gradients accumulate. dscale_noise[NH]: root of the sum over rows of the
// squares of the terms of dseq_scale, the size of a random sum of them.
typedef struct {
    double *out, *lse, *dq, *dk, *dv, *dby_distance, *dseq_scale, *dscale_noise, *dby_key, *dsink, *dmix, *dmixed;
} AttentionReference;

// One query of one head, and what is known of its row.
typedef struct {
    const AttentionCase* c;
    size_t b, h, i, position, first;  // position of the query in its sequence, first visible key
    double g, log_count;
    double *product, *bias, *weights;  // [Tk]: c_ij, P_ij, p_ij
    double sink;                       // its weight
} ReferenceRow;

static inline double reference_dot(const float* x, const float* y, size_t n) {
    double sums[8] = {0};  // head sizes are multiples of 8
    for (size_t i = 0; i < n; i += 8) {
        for (size_t lane = 0; lane < 8; lane++) { sums[lane] += (double)x[i + lane] * (double)y[i + lane]; }
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

static inline void reference_add(double* y, double factor, const float* x, size_t n) {
    for (size_t i = 0; i < n; i++) { y[i] += factor * (double)x[i]; }
}

static inline size_t reference_query(const ReferenceRow* r) {
    return r->b * r->c->q_batch + r->i * r->c->q_stride + r->h * r->c->size.HS;
}

static inline size_t reference_key(const ReferenceRow* r, size_t j) {
    const AttentionSizes* s = &r->c->size;
    return r->b * r->c->kv_batch + j * r->c->kv_stride + r->h * s->NKV / s->NH * s->HS;
}

// Tables weighted by the query: where its weights are, and how many tables reach this far.
static inline size_t reference_mix(const ReferenceRow* r) {
    return r->b * r->c->mix_batch + r->i * r->c->mix_stride + r->h * r->c->size.mixes;
}

static inline size_t reference_mixes(const ReferenceRow* r, size_t distance) {
    const AttentionSizes* s = &r->c->size;
    return (s->terms & TERM_MIX) && distance < s->mixed_length ? s->mixes : 0;
}

// Sets the terms of every visible key and the weights; returns the natural logarithm of their sum.
static inline double reference_weights(ReferenceRow* r) {
    const AttentionCase* c = r->c;
    const AttentionSizes* s = &c->size;
    const double* keys = c->by_key + (r->b * s->NH + r->h) * c->key_stride;
    double sink = s->terms & TERM_SINK ? (double)c->sink[r->h] : -INFINITY, largest = sink, root = sqrt((double)s->HS);
    for (size_t j = r->first; j <= r->position; j++) {
        double a = reference_dot(c->q + reference_query(r), c->k + reference_key(r, j), s->HS) / root, p = 0;
        if (s->terms & TERM_CAP) { a = c->cap * tanh(a / c->cap); }
        if (s->terms & TERM_DISTANCE) { p += (double)c->by_distance[r->h * c->distance_stride + r->position - j]; }
        if (s->terms & TERM_KEY) { p += keys[j] - keys[r->position]; }
        for (size_t m = 0, d = r->position - j; m < reference_mixes(r, d); m++) {
            p += (double)c->mix[reference_mix(r) + m] * (double)c->mixed[m * s->mixed_length + d];
        }
        r->product[j] = a, r->bias[j] = p;
        r->weights[j] = c->inside ? r->g * (a + p) : r->g * a + p;
        largest = fmax(largest, r->weights[j]);
    }
    double sum = r->sink = exp(sink - largest);
    for (size_t j = r->first; j <= r->position; j++) { sum += r->weights[j] = exp(r->weights[j] - largest); }
    for (size_t j = r->first; j <= r->position; j++) { r->weights[j] /= sum; }
    r->sink /= sum;
    return largest + log(sum);
}

// The row's part of every gradient; out is its result, dout the gradient of that.
static inline void reference_gradients(const AttentionReference* to, const ReferenceRow* r, const double* out,
                                       const float* dout) {
    const AttentionCase* c = r->c;
    size_t HS = c->size.HS, query = reference_query(r);
    double delta = 0, dscale = 0, root = sqrt((double)HS);
    for (size_t d = 0; d < HS; d++) { delta += out[d] * (double)dout[d]; }
    for (size_t j = r->first; j <= r->position; j++) {
        size_t key = reference_key(r, j);
        double dz = r->weights[j] * (reference_dot(c->v + key, dout, HS) - delta), share = r->product[j] / c->cap;
        if (r->first == r->position && r->sink == 0) { dz = 0; }
        double da = dz * r->g * (c->size.terms & TERM_CAP ? 1 - share * share : 1), dp = c->inside ? dz * r->g : dz;
        reference_add(to->dv + key, r->weights[j], dout, HS);
        reference_add(to->dq + query, da / root, c->k + key, HS);
        reference_add(to->dk + key, da / root, c->q + query, HS);
        if (c->size.terms & TERM_DISTANCE) { to->dby_distance[r->h * c->distance_stride + r->position - j] += dp; }
        if (c->size.terms & TERM_KEY) {
            double* keys = to->dby_key + (r->b * c->size.NH + r->h) * c->size.Tk;
            keys[j] += dp, keys[r->position] -= dp;
        }
        for (size_t m = 0, d = r->position - j; m < reference_mixes(r, d); m++) {
            size_t weight = reference_mix(r) + m, entry = m * c->size.mixed_length + d;
            to->dmix[weight] += dp * (double)c->mixed[entry];
            to->dmixed[entry] += dp * (double)c->mix[weight];
        }
        dscale += dz * r->log_count * (r->product[j] + (c->inside ? r->bias[j] : 0.0));
    }
    if (c->size.terms & TERM_SINK) { to->dsink[r->h] -= r->sink * delta; }
    if (c->size.terms & TERM_SCALE) { to->dseq_scale[r->h] += dscale, to->dscale_noise[r->h] += dscale * dscale; }
}

// dout NULL: the forward alone, and only out and lse of `to` are used.
static inline void attention_reference(const AttentionReference* to, const AttentionCase* c, const float* dout) {
    const AttentionSizes* s = &c->size;
    double* arrays = (double*)xcalloc(3 * s->Tk, sizeof(double));
    ReferenceRow r = {c, 0, 0, 0, 0, 0, 1.0, 0.0, arrays, arrays + s->Tk, arrays + 2 * s->Tk, 0.0};
    for (size_t n = 0; n < s->B * s->NH * s->Tq; n++) {
        r.b = n / s->Tq / s->NH, r.h = n / s->Tq % s->NH, r.i = n % s->Tq, r.position = s->Tk - s->Tq + r.i;
        size_t row = r.b * s->Tq + r.i, at = (row * s->NH + r.h) * s->HS;
        r.first = c->start ? (size_t)c->start[row] : 0;
        if (s->terms & TERM_SCALE) {
            r.log_count = (double)c->log_count[row];
            r.g = (double)c->seq_scale[r.h] * r.log_count;
        }
        to->lse[n] = reference_weights(&r);
        for (size_t j = r.first; j <= r.position; j++) {
            reference_add(to->out + at, r.weights[j], c->v + reference_key(&r, j), s->HS);
        }
        if (dout) { reference_gradients(to, &r, to->out + at, dout + at); }
    }
    for (size_t h = 0; dout && h < s->NH && s->terms & TERM_SCALE; h++) {
        to->dscale_noise[h] = sqrt(to->dscale_noise[h]);
    }
    free(arrays);
}

#endif
