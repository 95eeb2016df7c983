/*
Writing a checkpoint: weights, moments and state to step_N.tmp, which is renamed when it is whole.
*/
#ifndef CHECKPOINT_SAVE_H
#define CHECKPOINT_SAVE_H

#include "checkpoint_folder.h"
#include "model.h"
#include "run_state.h"

// Where a saved array comes from: model_state, or model_whole_state where the state is spread over ranks.
typedef const float* (*StateSource)(Model* model, ModelState which);

typedef struct {
    Model* model;
    StateSource source;
    ModelState first;  // array of entries 0 .. tensor_count - 1; the next array's entries follow
    const float* array;
    int held;  // which array that is, -1: none
} CheckpointSource;

static inline void checkpoint_source(void* context, size_t index, size_t offset, void* chunk, size_t bytes) {
    CheckpointSource* s = (CheckpointSource*)context;
    const Tensor* t = &s->model->tensors[index % s->model->tensor_count];
    int wanted = (int)s->first + (int)(index / s->model->tensor_count);
    if (wanted != s->held) { s->array = s->source(s->model, (ModelState)wanted); }
    s->held = wanted;
    copy_to_host(chunk, s->array + t->offset + offset / sizeof(float), bytes);
}

static inline SafeTensorsEntry checkpoint_entry(const Tensor* t, const char* name) {
    SafeTensorsEntry e;
    memset(&e, 0, sizeof e);
    e.name = name, e.type = SAFETENSORS_F32, e.ndim = (size_t)t->dimensions;
    for (int d = 0; d < t->dimensions; d++) { e.shape[d] = t->shape[d]; }
    return e;
}

static inline void checkpoint_save_weights(const char* folder, Model* model, StateSource state_source,
                                           const RunState* state, const char* encoding, const cJSON* model_args) {
    SafeTensorsEntry* entries = (SafeTensorsEntry*)xcalloc(model->tensor_count, sizeof *entries);
    for (size_t i = 0; i < model->tensor_count; i++) {
        entries[i] = checkpoint_entry(&model->tensors[i], model->tensors[i].name);
    }
    char *path = text("%s/model.safetensors", folder), *step = text("%zu", state->step);
    char* args = cJSON_PrintUnformatted(model_args);
    char *hash = text("%08llx", (unsigned long long)state->tokenizer_hash), *bos = text("%lld", (long long)state->bos),
         *eos = text("%lld", (long long)state->eos);
    const char* const metadata[][2] = {{"format", "pt"},     {"step", step},           {"position_encoding", encoding},
                                       {"model_args", args}, {"tokenizer_hash", hash}, {"bos", bos},
                                       {"eos", eos}};
    enum { PAIRS = sizeof metadata / sizeof *metadata };
    CheckpointSource source = {model, state_source, STATE_WEIGHTS, NULL, -1};
    safetensors_write(path, entries, model->tensor_count, metadata, PAIRS, checkpoint_source, &source);
    free(entries);
    free(path);
    free(step), free(hash), free(bos), free(eos);
    cJSON_free(args);
}

static inline void checkpoint_save_optimizer(const char* folder, Model* model, StateSource state_source,
                                             const RunState* state) {
    static const char* const moments[] = {"exp_avg", "exp_avg_sq"};
    size_t count = 2 * model->tensor_count;
    SafeTensorsEntry* entries = (SafeTensorsEntry*)xcalloc(count, sizeof *entries);
    for (size_t i = 0; i < count; i++) {
        const Tensor* t = &model->tensors[i % model->tensor_count];
        entries[i] = checkpoint_entry(t, text("%s.%s", moments[i / model->tensor_count], t->name));
    }
    char* path = text("%s/optimizer.safetensors", folder);
    const char* const metadata[][2] = {
        {"step", text("%zu", state->step)},
        {"optimizer_step", text("%zu", state->optimizer_step)},
        {"schedule_start", text("%zu", state->schedule_start)},
        {"epoch", text("%llu", (unsigned long long)state->epoch)},
        {"position", text("%llu", (unsigned long long)state->position)},
        {"dataset_tokens", text("%zu", state->dataset_tokens)},
        {"val_tokens", text("%zu", state->val_tokens)},
        {"tokens_per_step", text("%zu", state->tokens_per_step)},
        {"sampler", text("%llu", (unsigned long long)state->sampler.state)},
        {"data_fingerprint", text("%016llx", (unsigned long long)state->fingerprint)},
        {"tokenizer_hash", text("%08llx", (unsigned long long)state->tokenizer_hash)},
        {"bos", text("%lld", (long long)state->bos)},
        {"eos", text("%lld", (long long)state->eos)},
        {"optimizer", text("%s", state->adamw ? "adamw" : "radam")},
    };
    enum { PAIRS = sizeof metadata / sizeof *metadata };
    CheckpointSource source = {model, state_source, STATE_MOMENT1, NULL, -1};
    safetensors_write(path, entries, count, metadata, PAIRS, checkpoint_source, &source);
    for (size_t i = 0; i < count; i++) { free((void*)entries[i].name); }
    for (size_t i = 0; i < PAIRS; i++) { free((void*)metadata[i][1]); }
    free(entries);
    free(path);
}

// The folder being written: removed when the program ends before it is whole (disk full, say).
static char* checkpoint_unfinished;

static inline void checkpoint_remove_unfinished(void) {
    if (checkpoint_unfinished) { checkpoint_remove(checkpoint_unfinished); }
}

// Saves the run's state as its newest checkpoint. One rank saves; the others call checkpoint_help_save meanwhile when
// the source needs them.
static inline void checkpoint_save(const char* run, Model* model, StateSource source, const RunState* state,
                                   const char* encoding, const cJSON* model_args) {
    static bool registered;
    if (!registered) { atexit(checkpoint_remove_unfinished); }
    registered = true;
    long long step = (long long)state->step;
    char *half = checkpoint_step_folder(run, step, ".tmp"), *fresh = checkpoint_step_folder(run, step, ".new");
    checkpoint_remove_stale(run);
    make_directories(half);
    checkpoint_unfinished = half;
    checkpoint_save_weights(half, model, source, state, encoding, model_args);
    checkpoint_save_optimizer(half, model, source, state);
    checkpoint_remove(fresh);
    if (rename(half, fresh) != 0) { fatal("%s: cannot rename to %s: %s", half, fresh, strerror(errno)); }
    checkpoint_unfinished = NULL;
    safetensors_sync_folder(fresh);
    checkpoint_take_place(run, step);
    free(half);
    free(fresh);
}

// Asks for the arrays in the order in which the saving rank does.
static inline void checkpoint_help_save(Model* model, StateSource source) {
    for (int which = STATE_WEIGHTS; which <= STATE_MOMENT2; which++) { source(model, (ModelState)which); }
}

#endif
