/*
Text from a model: token sampling (temperature, top-p) and generation through the key/value cache.
*/
#ifndef GENERATE_H
#define GENERATE_H

#include "../model.h"
#include "../random.h"

typedef struct {
    double temperature;  // 0: always the most probable token
    double top_p;        // sample among the most probable tokens that together reach this mass; 1: all
} SamplingSettings;

// A token's probability and id, to be sorted.
typedef struct {
    float probability;
    int token;
} Candidate;

static inline int candidate_descending(const void* a, const void* b) {
    const Candidate *x = (const Candidate*)a, *y = (const Candidate*)b;
    if (x->probability != y->probability) { return x->probability < y->probability ? 1 : -1; }
    return x->token - y->token;  // a fixed order among equals, so that sampling is reproducible
}

static inline int most_probable_token(const float* logits, size_t V) {
    size_t best = 0;
    for (size_t i = 1; i < V; i++) { best = logits[i] > logits[best] ? i : best; }
    return (int)best;
}

// Draws a token from softmax(logits[V] / temperature), restricted to the nucleus of mass top_p
// (Holtzman et al. 2020). candidates[V] is scratch.
static inline int sample_token(const float* logits, size_t V, const SamplingSettings* settings, Candidate* candidates,
                               Random* random) {
    int best = most_probable_token(logits, V);
    if (settings->temperature <= 0) { return best; }
    double total = 0;
    for (size_t i = 0; i < V; i++) {
        double p = exp(((double)logits[i] - (double)logits[best]) / settings->temperature);
        candidates[i].probability = (float)p, candidates[i].token = (int)i;
        total += p;
    }
    qsort(candidates, V, sizeof *candidates, candidate_descending);
    size_t kept = 0;
    double mass = 0;
    while (kept < V && mass < settings->top_p * total) { mass += candidates[kept++].probability; }
    double left = random_uniform(random) * mass;
    for (size_t i = 0; i < kept; i++) {
        left -= candidates[i].probability;
        if (left < 0) { return candidates[i].token; }
    }
    return candidates[kept > 0 ? kept - 1 : 0].token;
}

// Appends up to max_new tokens to tokens[length], which has room for them, stopping after eos (< 0: never).
// Returns the new length. Reads the prompt in chunks of the model's plan.
static inline size_t generate(Model* model, KVCache* cache, int* tokens, size_t length, size_t max_new, int eos,
                              const SamplingSettings* settings, Random* random) {
    assert(length > 0 && length + max_new <= cache->capacity + 1);
    size_t V = model->config.V, chunk = model->plan.B * model->plan.T;
    float* logits = (float*)xcalloc(V, sizeof(float));
    Candidate* candidates = (Candidate*)xcalloc(V, sizeof(Candidate));
    cache->length = 0, cache->document_start = 0;
    for (size_t produced = 0; produced < max_new; produced++) {
        size_t n = 0;
        while (cache->length < length) {
            n = length - cache->length < chunk ? length - cache->length : chunk;
            model_prefill(model, cache, tokens + cache->length, n);
        }
        model_logits(model, logits, n - 1);
        tokens[length] = sample_token(logits, V, settings, candidates, random);
        if (tokens[length++] == eos) { break; }
    }
    free(logits);
    free(candidates);
    return length;
}

#endif
