/*
Checkpoints of a run, as safetensors:

  RUN/checkpoints/step_000000500/model.safetensors      weights under the published system's names
                                 optimizer.safetensors  both moments, and the run's state as metadata
  RUN/model.safetensors, RUN/optimizer.safetensors      links to the newest

A step's folder is written under a temporary name and renamed when it is whole, so at every moment the
newest step folder is a good checkpoint, whatever killed the program. Nothing derived is stored. Weights,
moments and state are all that a run depends on: resuming gives the very same bits as never stopping.
*/
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include <dirent.h>

#include "model.h"
#include "model_args.h"
#include "random.h"
#include "safetensors.h"

// What a run knows beside its weights and moments.
typedef struct {
    size_t step;               // steps taken, skipped updates included
    size_t optimizer_step;     // updates made
    size_t schedule_start;     // the step at which the learning-rate schedule began
    uint64_t epoch, position;  // of the data loader
    size_t dataset_tokens;     // of the whole dataset, to notice another one
    size_t val_tokens, tokens_per_step;
    Random sampler;
} RunState;

// ----------------------------------------------------------------------------
// folders

enum { CHECKPOINT_NAME_DIGITS = 9 };

// The number in "step_000000500", or -1 for any other name.
static inline long long checkpoint_name_step(const char* name) {
    if (strncmp(name, "step_", 5) != 0) { return -1; }
    size_t digits = strspn(name + 5, "0123456789");
    return digits >= CHECKPOINT_NAME_DIGITS && name[5 + digits] == '\0' ? atoll(name + 5) : -1;
}

// Steps of the checkpoints in RUN/checkpoints, ascending; release with free().
static inline long long* checkpoint_list(const char* run, size_t* count) {
    char* path = text("%s/checkpoints", run);
    long long* steps = NULL;
    *count = 0;
    DIR* dir = opendir(path);
    for (struct dirent* entry; dir && (entry = readdir(dir));) {
        long long step = checkpoint_name_step(entry->d_name);
        if (step < 0) { continue; }
        steps = (long long*)xrealloc(steps, (*count + 1) * sizeof *steps);
        size_t at = (*count)++;
        for (; at > 0 && steps[at - 1] > step; at--) { steps[at] = steps[at - 1]; }
        steps[at] = step;
    }
    if (dir) { closedir(dir); }
    free(path);
    return steps;
}

static inline char* checkpoint_step_folder(const char* run, long long step) {
    return text("%s/checkpoints/step_%0*lld", run, CHECKPOINT_NAME_DIGITS, step);
}

// Removes a folder of files; one that is not there is fine.
static inline void checkpoint_remove_folder(const char* path) {
    DIR* dir = opendir(path);
    if (!dir) { return; }
    for (struct dirent* entry; (entry = readdir(dir)) != NULL;) {
        if (entry->d_name[0] == '.') { continue; }
        char* file = text("%s/%s", path, entry->d_name);
        unlink(file);
        free(file);
    }
    closedir(dir);
    rmdir(path);
}

// The run folder of a path that is one, or is one of its step folders; release with free().
static inline char* checkpoint_run_folder(const char* path) {
    char* run = xstrdup(path);
    size_t n = strlen(run);
    while (n > 1 && run[n - 1] == '/') { run[--n] = '\0'; }
    char* slash = strrchr(run, '/');
    const char* parent = "/checkpoints";
    size_t tail = strlen(parent);
    if (slash && checkpoint_name_step(slash + 1) >= 0 && (size_t)(slash - run) >= tail &&
        strncmp(slash - tail, parent, tail) == 0) {
        slash[-(ptrdiff_t)tail] = '\0';
    }
    return run;
}

static inline char* checkpoint_args_path(const char* path) {
    char *run = checkpoint_run_folder(path), *file = text("%s/args.json", run);
    if (!file_exists(file)) {
        fatal("%s: not found, expected a run folder with args.json; correct --checkpoint", file);
    }
    free(run);
    return file;
}

// The folder that holds both files of the checkpoint that `path` means: itself, or the newest of a run.
static inline char* checkpoint_find(const char* path) {
    size_t count;
    long long* steps = checkpoint_list(path, &count);
    char* folder = count > 0 ? checkpoint_step_folder(path, steps[count - 1]) : xstrdup(path);
    free(steps);
    char *model = text("%s/model.safetensors", folder), *optimizer = text("%s/optimizer.safetensors", folder);
    if (!file_exists(model)) {
        fatal("%s: no model.safetensors, expected a run folder or one of its checkpoints; correct --checkpoint", path);
    }
    if (!file_exists(optimizer)) {
        fatal(
            "%s: weights only, no optimizer.safetensors to resume from; to start a new run from the weights use "
            "--init_from %s",
            path, model);
    }
    free(model);
    free(optimizer);
    return folder;
}

// ----------------------------------------------------------------------------
// saving

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
    const char* const metadata[][2] = {
        {"format", "pt"}, {"step", step}, {"position_encoding", encoding}, {"model_args", args}};
    CheckpointSource source = {model, state_source, STATE_WEIGHTS, NULL, -1};
    safetensors_write(path, entries, model->tensor_count, metadata, 4, checkpoint_source, &source);
    free(entries);
    free(path);
    free(step);
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
    };
    enum { PAIRS = sizeof metadata / sizeof *metadata };
    CheckpointSource source = {model, state_source, STATE_MOMENT1, NULL, -1};
    safetensors_write(path, entries, count, metadata, PAIRS, checkpoint_source, &source);
    for (size_t i = 0; i < count; i++) { free((void*)entries[i].name); }
    for (size_t i = 0; i < PAIRS; i++) { free((void*)metadata[i][1]); }
    free(entries);
    free(path);
}

// RUN/NAME becomes a link to the newest checkpoint's file, or a copy where the file system has no links.
static inline void checkpoint_publish(const char* run, const char* folder, const char* name) {
    char *from = text("%s/%s", folder, name), *to = text("%s/%s", run, name), *temporary = text("%s.tmp", to);
    unlink(temporary);
    if (link(from, temporary) != 0) {
        char *in = text("%s", from), buffer[1 << 16];
        FILE *source = fopen(in, "rb"), *copy = fopen(temporary, "wb");
        size_t n = 0;
        while (source && copy && (n = fread(buffer, 1, sizeof buffer, source)) > 0 && fwrite(buffer, 1, n, copy) == n) {
        }
        bool good = source && copy && n == 0 && !ferror(source);
        if (source) { fclose(source); }
        if (copy && fclose(copy) != 0) { good = false; }
        free(in);
        if (!good) { fatal("%s: cannot write: %s; the checkpoint itself is whole in %s", to, strerror(errno), folder); }
    }
    if (rename(temporary, to) != 0) { fatal("%s: cannot replace: %s", to, strerror(errno)); }
    free(from);
    free(to);
    free(temporary);
}

// The folder being written: removed when the program ends before it is whole (disk full, say).
static char* checkpoint_unfinished;

static inline void checkpoint_remove_unfinished(void) {
    if (checkpoint_unfinished) { checkpoint_remove_folder(checkpoint_unfinished); }
}

// Removes what a killed program left half-written in RUN/checkpoints.
static inline void checkpoint_remove_stale(const char* run) {
    char* path = text("%s/checkpoints", run);
    DIR* dir = opendir(path);
    for (struct dirent* entry; dir && (entry = readdir(dir));) {
        size_t n = strlen(entry->d_name);
        if (n < 4 || strcmp(entry->d_name + n - 4, ".tmp") != 0) { continue; }
        char* stale = text("%s/%s", path, entry->d_name);
        checkpoint_remove_folder(stale);
        free(stale);
    }
    if (dir) { closedir(dir); }
    free(path);
}

// Removes all checkpoints but the `keep` newest up to a step.
static inline void checkpoint_prune(const char* run, size_t step, size_t keep) {
    size_t count, up_to = 0;
    long long* steps = checkpoint_list(run, &count);
    while (up_to < count && steps[up_to] <= (long long)step) { up_to++; }
    for (size_t i = 0; i < count; i++) {
        if (i < up_to && up_to - i <= keep) { continue; }
        char* old = checkpoint_step_folder(run, steps[i]);
        checkpoint_remove_folder(old);
        free(old);
    }
    free(steps);
}

// Saves the run's state as its newest checkpoint and removes all but the `keep` newest up to it. One rank saves; the
// others call checkpoint_help_save meanwhile when the source needs them.
static inline void checkpoint_save(const char* run, Model* model, StateSource source, const RunState* state,
                                   const char* encoding, const cJSON* model_args, size_t keep) {
    static bool registered;
    if (!registered) { atexit(checkpoint_remove_unfinished); }
    registered = true;
    char *folder = checkpoint_step_folder(run, (long long)state->step), *unfinished = text("%s.tmp", folder);
    checkpoint_remove_stale(run);
    make_directories(unfinished);
    checkpoint_unfinished = unfinished;
    checkpoint_save_weights(unfinished, model, source, state, encoding, model_args);
    checkpoint_save_optimizer(unfinished, model, source, state);
    checkpoint_remove_folder(folder);  // of an earlier run through the same step
    if (rename(unfinished, folder) != 0) { fatal("%s: cannot rename to %s: %s", unfinished, folder, strerror(errno)); }
    checkpoint_unfinished = NULL;
    safetensors_sync_folder(folder);
    checkpoint_publish(run, folder, "model.safetensors");
    checkpoint_publish(run, folder, "optimizer.safetensors");
    checkpoint_prune(run, state->step, keep);
    free(folder);
    free(unfinished);
}

// Asks for the arrays in the order in which the saving rank does.
static inline void checkpoint_help_save(Model* model, StateSource source) {
    for (int which = STATE_WEIGHTS; which <= STATE_MOMENT2; which++) { source(model, (ModelState)which); }
}

// ----------------------------------------------------------------------------
// loading

static inline bool checkpoint_same_shape(const SafeTensor* saved, const Tensor* t) {
    size_t a = 0, b = 0;  // dimensions of 1 do not count: [1,NH,1,1] and [NH] hold the same values
    for (;;) {
        while (a < saved->ndim && saved->shape[a] == 1) { a++; }
        while (b < (size_t)t->dimensions && t->shape[b] == 1) { b++; }
        if (a == saved->ndim || b == (size_t)t->dimensions) { return a == saved->ndim && b == (size_t)t->dimensions; }
        if (saved->shape[a++] != t->shape[b++]) { return false; }
    }
}

static inline void checkpoint_check_shape(const char* path, const SafeTensor* saved, const Tensor* t) {
    if (checkpoint_same_shape(saved, t)) { return; }
    char found[128] = "", wanted[128] = "";
    for (size_t d = 0, n = 0; d < saved->ndim && n < 100; d++) {
        n += (size_t)snprintf(found + n, sizeof found - n, "%s%zu", d ? "," : "", saved->shape[d]);
    }
    for (int d = 0, n = 0; d < t->dimensions; d++) {
        n += snprintf(wanted + n, sizeof wanted - (size_t)n, "%s%zu", d ? "," : "", t->shape[d]);
    }
    fatal("%s: %s has shape [%s], the model needs [%s]; give the flags of the model that was saved", path, saved->name,
          found, wanted);
}

// Reads one tensor of a file into the weights, or into the moments `array` where it is not NULL.
static inline void checkpoint_read_tensor(const SafeTensors* file, const char* name, const Tensor* t, Model* model,
                                          float* array) {
    const SafeTensor* saved = safetensors_find(file, name);
    if (!saved) { fatal("%s: has no tensor %s; the checkpoint is of another model", file->path, name); }
    checkpoint_check_shape(file->path, saved, t);
    float* values = (float*)xcalloc(t->count, sizeof(float));
    safetensors_read_f32(values, saved);
    if (array) {
        model_write_moments(model, array, t, values);
    } else {
        model_write_tensor(model, t, values, 0, t->count);
    }
    free(values);
}

static inline uint64_t checkpoint_number(const SafeTensors* file, const char* key) {
    const char* value = safetensors_metadata(file, key);
    if (!value || value[0] < '0' || value[0] > '9') {
        fatal("%s: no %s in its metadata, expected the state of a run; resume from a checkpoint of train_gpt",
              file->path, key);
    }
    return strtoull(value, NULL, 10);
}

// Refuses weights of another encoding or size than the model that the flags describe.
static inline void checkpoint_check_model(const SafeTensors* file, const ModelConfig* config) {
    const char *saved = safetensors_metadata(file, "position_encoding"),
               *args = safetensors_metadata(file, "model_args");
    const char *name = posenc_info(config->encoding)->name, *suffix = config->ssmax ? "_ssmax" : "";
    char* wanted = text("%s%s", name, suffix);
    if (!saved || !args) {
        fatal("%s: no model_args in its metadata; use --init_from for foreign weights", file->path);
    }
    if (strcmp(saved, wanted) != 0) {
        fatal("%s: trained with %s, the flags ask for %s; correct --position_encoding, or use --init_from", file->path,
              saved, wanted);
    }
    cJSON *found = cJSON_Parse(args), *asked = model_args_json(config, 1, 1);
    model_args_check_same(found, asked, file->path);
    cJSON_Delete(found);
    cJSON_Delete(asked);
    free(wanted);
}

// Loads weights, moments and state of the checkpoint that `path` means; the model is allocated for training.
static inline void checkpoint_load(Model* model, RunState* state, const char* path) {
    char* folder = checkpoint_find(path);
    char *model_path = text("%s/model.safetensors", folder), *optimizer_path = text("%s/optimizer.safetensors", folder);
    SafeTensors weights = safetensors_open(model_path), moments = safetensors_open(optimizer_path);
    checkpoint_check_model(&weights, &model->config);
    state->step = checkpoint_number(&moments, "step");
    if (checkpoint_number(&weights, "step") != state->step) {
        fatal("%s: weights of step %s, optimiser of step %zu; resume from a folder in %s/checkpoints", folder,
              safetensors_metadata(&weights, "step"), state->step, path);
    }
    state->optimizer_step = checkpoint_number(&moments, "optimizer_step");
    state->schedule_start = checkpoint_number(&moments, "schedule_start");
    state->epoch = checkpoint_number(&moments, "epoch"), state->position = checkpoint_number(&moments, "position");
    state->dataset_tokens = checkpoint_number(&moments, "dataset_tokens");
    state->val_tokens = checkpoint_number(&moments, "val_tokens");
    state->tokens_per_step = checkpoint_number(&moments, "tokens_per_step");
    state->sampler.state = checkpoint_number(&moments, "sampler");
    for (size_t i = 0; i < model->tensor_count; i++) {
        const Tensor* t = &model->tensors[i];
        char *m = text("exp_avg.%s", t->name), *v = text("exp_avg_sq.%s", t->name);
        checkpoint_read_tensor(&weights, t->name, t, model, NULL);
        checkpoint_read_tensor(&moments, m, t, model, model->m);
        checkpoint_read_tensor(&moments, v, t, model, model->v);
        free(m);
        free(v);
    }
    model_parameters_restored(model, state->optimizer_step);
    safetensors_close(&weights);
    safetensors_close(&moments);
    free(model_path);
    free(optimizer_path);
    free(folder);
}

// The weights of an open file into a model built for inference.
static inline void checkpoint_load_weights(Model* model, const SafeTensors* file) {
    for (size_t i = 0; i < model->tensor_count; i++) {
        checkpoint_read_tensor(file, model->tensors[i].name, &model->tensors[i], model, NULL);
    }
    model_parameters_changed(model);
}

// Weights alone, matched by name, from any safetensors file. What the file lacks is drawn and listed, what the
// model lacks is listed; a wrong shape, or no match at all, ends the program.
static inline void checkpoint_init_from(Model* model, const char* path, uint64_t seed) {
    SafeTensors file = safetensors_open(path);
    size_t matched = 0;
    for (size_t i = 0; i < model->tensor_count; i++) {
        const Tensor* t = &model->tensors[i];
        if (safetensors_find(&file, t->name)) {
            checkpoint_read_tensor(&file, t->name, t, model, NULL);
            matched++;
        } else {
            model_init_tensor(model, t, seed);
            printf("drawn    %s (not in %s)\n", t->name, path);
        }
    }
    if (matched == 0) {
        fatal("%s: none of its %zu tensors has a name of this model, such as %s", path, file.count,
              model->tensors[0].name);
    }
    for (size_t i = 0; i < file.count; i++) {
        if (!model_find_tensor(model, file.tensors[i].name)) {
            printf("unused   %s of %s\n", file.tensors[i].name, path);
        }
    }
    printf("weights  %zu tensors from %s\n", matched, path);
    model_parameters_changed(model);
    safetensors_close(&file);
}

#endif
