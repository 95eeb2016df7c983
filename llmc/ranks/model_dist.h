/*
A model that several ranks train: gradients are summed segment by segment while the backward pass goes on, and with a
sharded optimiser (ZeRO stage 1, Rajbhandari et al. 2020) each rank holds moments for and updates only its shard of
every matrix, then gives the new weights to the others. Every function is collective, see dist.h.
*/
#ifndef MODEL_DIST_H
#define MODEL_DIST_H

#include "../model.h"
#include DEVICE_NETWORK
#include "ranks.h"

// Queues the sum over ranks of a segment's gradients; model->segment_ready during the last backward pass of a step.
static inline void model_reduce_segment(Model* model, const Segment* s) {
    float* gradients = model->grads + s->offset;
    if (s->sharded) {
        dist_reduce_scatter(gradients, s->count);
    } else {
        dist_all_reduce(gradients, s->count);
    }
}

// The same for all segments at once, after the backward pass.
static inline void model_reduce_gradients(Model* model) {
    for (size_t i = 0; i < model->segment_count; i++) { model_reduce_segment(model, &model->segments[i]); }
}

// Each rank's shards of an array with the parameters' offsets, to all ranks.
static inline void model_share(Model* model, void* array, size_t element_bytes) {
    for (size_t i = 0; i < model->segment_count; i++) {
        const Segment* s = &model->segments[i];
        if (s->sharded) { dist_all_gather((char*)array + s->offset * element_bytes, s->count, element_bytes); }
    }
    dist_wait();
}

// After an update: the weights that the model computes with, complete again on every rank.
static inline void model_share_weights(Model* model) { model_share(model, model->params, sizeof(floatX)); }

// Bytes that a rank sends in a step, at the least.
static inline double model_network_bytes(const Model* model, size_t size) {
    double bytes = 0;
    for (size_t i = 0; i < model->segment_count; i++) {
        const Segment* s = &model->segments[i];
        bytes += dist_bytes(s->count, sizeof(float), size);
        bytes += dist_bytes(s->count, s->sharded ? sizeof(floatX) : sizeof(float), size);
    }
    return bytes;
}

// Are all weights and moments finite? Every rank looks at what it has.
static inline bool model_is_finite(const Model* model) {
    double sum = sum_of_squares(model->master, model->param_count) + sum_of_squares(model->m, model->moment_count) +
                 sum_of_squares(model->v, model->moment_count);
    return ranks_max(!isfinite(sum)) == 0;
}

// For checkpoint_save: one array of the state, complete and with the parameters' offsets. Sharded moments are
// gathered in the place of the gradients, which are free between two steps.
static inline const float* model_whole_state(Model* model, ModelState which) {
    if (model->plan.shards <= 1) { return model_state(model, which); }
    if (which == STATE_WEIGHTS) {
        if ((void*)model->params != (void*)model->master) { model_share(model, model->master, sizeof(float)); }
        return model->master;
    }
    const float* moments = model_state(model, which);
    for (size_t i = 0; i < model->segment_count; i++) {
        const Segment* s = &model->segments[i];
        device_copy(model->grads + s->offset + s->begin, moments + s->moments, (s->end - s->begin) * sizeof(float));
    }
    model_share(model, model->grads, sizeof(float));
    return model->grads;
}

#endif
