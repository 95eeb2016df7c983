/*
Reading one sequence after another with a model far beyond its training length: in chunks of the model's plan,
through a key/value cache. The reader remembers the tokens that the cache holds and computes only what follows the
part that a new sequence shares with them, so sequences that begin alike cost their difference. Logits are computed
only for the rows that are asked for. Memory: weights, cache, one chunk.
*/
#ifndef PREFILL_H
#define PREFILL_H

#include "generate.h"
#include "../model.h"

typedef struct {
    Model* model;
    KVCache cache;
    int* tokens;    // [capacity] the cache.length tokens that the cache holds
    float* logits;  // [V]
    // After every chunk, with its floating-point operations; false stops the reading. NULL: nobody listens.
    bool (*on_chunk)(void* context, double flops);
    void* context;
    const char* weights;  // where they are from, for messages; NULL = not known
} Prefill;

// Operations of the blocks for n tokens at position..position+n-1 of one document: two for each weight of a product,
// and two products of C operations each way with every visible key.
static inline double prefill_flops(const ModelConfig* c, size_t position, size_t n) {
    double products = 2.0 * model_block_weights(c) * (double)n;
    return (double)c->L * (products + 4.0 * (double)c->C * model_visible_keys(c, position, n));
}

// Operations of the output head for n rows.
static inline double head_flops(const ModelConfig* c, size_t n) {
    return 2.0 * (double)c->V * (double)c->C * (double)n;
}

static inline Prefill prefill_open(Model* model, size_t capacity) {
    Prefill p;
    memset(&p, 0, sizeof p);
    p.model = model;
    p.cache = kv_cache_create(&model->config, capacity);
    p.tokens = (int*)xcalloc(capacity, sizeof(int));
    p.logits = (float*)xcalloc(model->config.V, sizeof(float));
    return p;
}

static inline void prefill_close(Prefill* p) {
    kv_cache_free(&p->cache);
    free(p->tokens);
    free(p->logits);
}

// Forgets all but the tokens that the cache and ids begin with, `most` of them at the most.
static inline void prefill_rewind(Prefill* p, const int* ids, size_t most) {
    size_t same = 0, limit = most < p->cache.length ? most : p->cache.length;
    while (same < limit && p->tokens[same] == ids[same]) { same++; }
    size_t start = same;
    while (start > 0 && p->tokens[start - 1] != p->model->config.bos) { start--; }
    p->cache.length = same;
    p->cache.document_start = start > 0 ? (int)(start - 1) : 0;
}

// Reads the next chunk of ids[0..count), of which the cache holds the beginning; returns its tokens.
static inline size_t prefill_chunk(Prefill* p, const int* ids, size_t count) {
    size_t at = p->cache.length, chunk = p->model->plan.B * p->model->plan.T;
    size_t n = count - at < chunk ? count - at : chunk;
    assert(count <= p->cache.capacity);
    model_prefill(p->model, &p->cache, ids + at, n);
    memcpy(p->tokens + at, ids + at, n * sizeof(int));
    return n;
}

static inline bool prefill_report(const Prefill* p, size_t at, size_t n, size_t head_rows) {
    const ModelConfig* c = &p->model->config;
    return !p->on_chunk || p->on_chunk(p->context, prefill_flops(c, at, n) + head_flops(c, head_rows));
}

// Ends the program where an answer of the model is not finite: what is measured by it would be no result.
static inline void prefill_check(const Prefill* p, const char* what, double value, size_t position) {
    if (isfinite(value)) { return; }
    fatal(
        "%s: %s after %zu tokens is %s, expected a finite number; the weights are damaged or diverged: evaluate an "
        "earlier checkpoint",
        p->weights ? p->weights : "weights", what, position + 1, isnan(value) ? "NaN" : "infinite");
}

// predictions[i] = the most probable token after ids[0..first+i], for first+i < count. A PredictFunction of
// passkey.h, with a Prefill as its context.
static inline bool prefill_predict(void* context, const int* ids, size_t count, size_t first, int* predictions) {
    Prefill* p = (Prefill*)context;
    prefill_rewind(p, ids, first);
    while (p->cache.length < count) {
        size_t at = p->cache.length, n = prefill_chunk(p, ids, count), from = at > first ? at : first;
        for (size_t i = from; i < at + n; i++) {
            model_logits(p->model, p->logits, i - at);
            for (size_t k = 0; k < p->model->config.V; k++) { prefill_check(p, "a logit", p->logits[k], i); }
            predictions[i - first] = most_probable_token(p->logits, p->model->config.V);
        }
        if (!prefill_report(p, at, n, at + n > from ? at + n - from : 0)) { return false; }
    }
    return true;
}

// losses[i] = -ln p(ids[i+1] | ids[0..i]) for i < count - 1: every token but the first is scored once.
static inline bool prefill_losses(Prefill* p, const int* ids, size_t count, float* losses) {
    prefill_rewind(p, ids, 0);
    while (p->cache.length + 1 < count) {
        size_t at = p->cache.length, n = prefill_chunk(p, ids, count - 1);
        model_losses(p->model, ids + at + 1, 0);
        copy_to_host(losses + at, model_activations(p->model, 0).losses, n * sizeof(float));
        for (size_t i = at; i < at + n; i++) { prefill_check(p, "the loss", losses[i], i); }
        if (!prefill_report(p, at, n, n)) { return false; }
    }
    return true;
}

#endif
