/*
Checkpoints of a run, as safetensors:

  RUN/checkpoints/step_000000500/model.safetensors      weights under the published system's names
                                 optimizer.safetensors  both moments, and the run's state as metadata
  RUN/model.safetensors, RUN/optimizer.safetensors      links to the newest

A step's folder is written under a temporary name and renamed when it is whole, so at every moment the
newest step folder is a good checkpoint, whatever killed the program (checkpoint_folder.h, checkpoint_save.h). Nothing
derived is stored. Weights, moments and state are all that a run depends on: resuming gives the very same bits as never
stopping.
*/
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include "checkpoint_folder.h"
#include "checkpoint_save.h"
#include "model.h"
#include "model_args.h"
#include "run_state.h"

// The args.json that belongs to the newest checkpoint: of a run whose going back a kill has ended, the one it had
// before.
static inline char* checkpoint_args_path(const char* path) {
    size_t fresh, asides;
    char* run = checkpoint_run_folder(path);
    long long *unfinished = checkpoint_list(run, ".new", &fresh), *back = checkpoint_list(run, ".aside", &asides);
    char* kept = asides > 0 && fresh == 0 ? checkpoint_step_folder(run, back[0], ".aside") : xstrdup(run);
    char* file = text("%s/args.json", kept);
    if (!file_exists(file)) {  // it is back in its place already
        free(file);
        file = text("%s/args.json", run);
    }
    free(unfinished), free(back), free(kept);
    if (!file_exists(file)) {
        fatal("%s: not found, expected a run folder with args.json; correct --checkpoint", file);
    }
    free(run);
    return file;
}

// ----------------------------------------------------------------------------
// which checkpoint

static inline bool checkpoint_twins(const SafeTensor* a, const SafeTensor* b) {
    return b && b->type == SAFETENSORS_F32 && a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, a->ndim * sizeof *a->shape) == 0;
}

// Why a pair of open files is no checkpoint; NULL: it is one.
static inline char* checkpoint_pair_fault(const char* folder, const SafeTensors* weights, const SafeTensors* moments) {
    static const char* const keys[] = {"step",           "optimizer_step", "schedule_start",  "epoch",  "position",
                                       "dataset_tokens", "val_tokens",     "tokens_per_step", "sampler"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const char* value = safetensors_metadata(moments, keys[i]);
        if (!value || value[0] < '0' || value[0] > '9') {
            return text("%s: no %s in its metadata, expected the state of a run; resume from a checkpoint of train_gpt",
                        moments->path, keys[i]);
        }
    }
    const char *step = safetensors_metadata(weights, "step"), *other = safetensors_metadata(moments, "step");
    if (!step || strcmp(step, other) != 0) {
        return text("%s: weights of step %lld, optimiser of step %lld; resume from another checkpoint", folder,
                    step ? atoll(step) : -1, atoll(other));
    }
    if (moments->count != 2 * weights->count) {
        return text("%s: %zu moments for %zu tensors, expected two each; resume from another checkpoint", folder,
                    moments->count, weights->count);
    }
    for (size_t i = 0; i < weights->count; i++) {
        const SafeTensor* t = &weights->tensors[i];
        char *m = text("exp_avg.%s", t->name), *v = text("exp_avg_sq.%s", t->name);
        bool good = checkpoint_twins(t, t) && checkpoint_twins(t, safetensors_find(moments, m)) &&
                    checkpoint_twins(t, safetensors_find(moments, v));
        free(m), free(v);
        if (!good) {
            return text("%s: the moments do not match weight %zu of %zu; resume from another checkpoint", folder, i + 1,
                        weights->count);
        }
    }
    return NULL;
}

// Why a folder holds no whole checkpoint, as an error would say it; NULL: it does.
static inline char* checkpoint_fault(const char* folder) {
    char *model = text("%s/model.safetensors", folder), *optimizer = text("%s/optimizer.safetensors", folder);
    char* why = NULL;
    if (!file_exists(model)) {
        why = text("%s: no model.safetensors, expected a run folder or one of its checkpoints; correct --checkpoint",
                   folder);
    } else if (!file_exists(optimizer)) {
        why = text(
            "%s: weights only, no optimizer.safetensors to resume from; to start a new run from the weights use "
            "--init_from %s",
            folder, model);
    } else {
        SafeTensors weights, moments;
        memset(&moments, 0, sizeof moments);
        bool good = safetensors_try(&weights, model) && safetensors_try(&moments, optimizer);
        why = good ? checkpoint_pair_fault(folder, &weights, &moments)
                   : xstrdup(weights.fault ? weights.fault : moments.fault);
        safetensors_close(&weights);
        safetensors_close(&moments);
    }
    free(model), free(optimizer);
    return why;
}

// The folder of the checkpoint that `path` means: itself, or the newest whole one of a run, with a warning where that
// is not the newest. Ends the program where there is none. Release with free().
static inline char* checkpoint_choose(const char* path) {
    size_t count = 0;
    long long* steps = checkpoint_is_step(path) ? NULL : checkpoint_list(path, "", &count);
    char* first = NULL;  // what is wrong with the newest
    for (size_t i = count + 1; i-- > 0;) {
        char* folder = i > 0 ? checkpoint_step_folder(path, steps[i - 1], "") : xstrdup(path);
        char* why = checkpoint_fault(folder);
        if (!why) {
            if (first) { warn("%s; going on from the newest whole checkpoint, %s", first, folder); }
            free(first), free(steps);
            return folder;
        }
        if (first) { free(why); }
        if (!first) { first = why; }
        free(folder);
    }
    fatal("%s", first);
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

// What is not finite never becomes finite again.
static inline void checkpoint_check_finite(const char* path, const SafeTensor* saved, const float* values) {
    bool finite = true;
    for (size_t i = 0; i < saved->count; i++) { finite &= isfinite(values[i]) != 0; }
    if (!finite) {
        fatal("%s: %s has values that are not finite, expected numbers; use another checkpoint", path, saved->name);
    }
}

// Reads one tensor of a file into the weights, or into the moments `array` where it is not NULL.
static inline void checkpoint_read_tensor(const SafeTensors* file, const char* name, const Tensor* t, Model* model,
                                          float* array) {
    const SafeTensor* saved = safetensors_find(file, name);
    if (!saved) { fatal("%s: has no tensor %s; the checkpoint is of another model", file->path, name); }
    checkpoint_check_shape(file->path, saved, t);
    float* values = (float*)xcalloc(t->count, sizeof(float));
    safetensors_read_f32(values, saved);
    checkpoint_check_finite(file->path, saved, values);
    if (array) {
        model_write_moments(model, array, t, values);
    } else {
        model_write_tensor(model, t, values, 0, t->count);
    }
    free(values);
}

static inline uint64_t checkpoint_number(const SafeTensors* file, const char* key) {
    return strtoull(safetensors_metadata(file, key), NULL, 10);
}

// Data, tokenizer and optimiser of the run, as far as the file names them.
static inline void checkpoint_read_description(const SafeTensors* file, RunState* state) {
    const char *hash = safetensors_metadata(file, "tokenizer_hash"), *bos = safetensors_metadata(file, "bos"),
               *eos = safetensors_metadata(file, "eos"), *data = safetensors_metadata(file, "data_fingerprint"),
               *optimizer = safetensors_metadata(file, "optimizer");
    state->described = hash && bos && eos;
    state->tokenizer_hash = hash ? strtoull(hash, NULL, 16) : 0;
    state->bos = bos ? atoll(bos) : -1, state->eos = eos ? atoll(eos) : -1;
    state->fingerprint = data ? strtoull(data, NULL, 16) : 0;
    state->adamw = optimizer && strcmp(optimizer, "adamw") == 0;
}

// The vocabulary of a file's weights must be that of the data.
static inline void checkpoint_check_vocabulary(const char* path, const RunState* saved, const RunState* now) {
    if (!saved->described) {
        warn("%s does not say which tokenizer its weights know; make sure that it is that of the data", path);
        return;
    }
    if (saved->tokenizer_hash && now->tokenizer_hash && saved->tokenizer_hash != now->tokenizer_hash) {
        fatal("%s: trained on data of a tokenizer with hash %08llx, the data's has %08llx; give data of that tokenizer",
              path, (unsigned long long)saved->tokenizer_hash, (unsigned long long)now->tokenizer_hash);
    }
    if (saved->bos != now->bos || saved->eos != now->eos) {
        fatal("%s: trained with BOS %lld and EOS %lld, the data has %lld and %lld; give data of the same tokenizer",
              path, (long long)saved->bos, (long long)saved->eos, (long long)now->bos, (long long)now->eos);
    }
    if (!saved->tokenizer_hash != !now->tokenizer_hash) {
        warn("%s: only one of the weights and the data names its tokenizer; make sure that it is the same", path);
    }
}

// Refuses weights of another encoding or size than the model that the flags describe.
static inline void checkpoint_check_model(const SafeTensors* file, const ModelConfig* config) {
    const char *saved = safetensors_metadata(file, "position_encoding"),
               *args = safetensors_metadata(file, "model_args");
    char* wanted = model_encoding_name(config);
    if (!saved || !args) {
        fatal("%s: no model_args in its metadata; use --init_from for foreign weights", file->path);
    }
    if (strcmp(saved, wanted) != 0) {
        fatal("%s: trained with %s, the flags ask for %s; correct --%s, or use --init_from", file->path, saved, wanted,
              model_encoding_period(config) > 1 ? "layer_encodings" : "position_encoding");
    }
    cJSON *found = cJSON_Parse(args), *asked = model_args_json(config, 1, 1);
    model_args_check_same(found, asked, file->path);
    cJSON_Delete(found);
    cJSON_Delete(asked);
    free(wanted);
}

// Loads weights, moments and state from a folder that checkpoint_choose has found; the model is allocated for training.
static inline void checkpoint_load(Model* model, RunState* state, const char* folder) {
    char *model_path = text("%s/model.safetensors", folder), *optimizer_path = text("%s/optimizer.safetensors", folder);
    SafeTensors weights = safetensors_open(model_path), moments = safetensors_open(optimizer_path);
    char* why = checkpoint_pair_fault(folder, &weights, &moments);
    if (why) { fatal("%s", why); }
    checkpoint_check_model(&weights, &model->config);
    state->step = checkpoint_number(&moments, "step");
    state->optimizer_step = checkpoint_number(&moments, "optimizer_step");
    state->schedule_start = checkpoint_number(&moments, "schedule_start");
    state->epoch = checkpoint_number(&moments, "epoch"), state->position = checkpoint_number(&moments, "position");
    state->dataset_tokens = checkpoint_number(&moments, "dataset_tokens");
    state->val_tokens = checkpoint_number(&moments, "val_tokens");
    state->tokens_per_step = checkpoint_number(&moments, "tokens_per_step");
    state->sampler.state = checkpoint_number(&moments, "sampler");
    checkpoint_read_description(&moments, state);
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
}

// The weights of an open file into a model built for inference.
static inline void checkpoint_load_weights(Model* model, const SafeTensors* file) {
    for (size_t i = 0; i < model->tensor_count; i++) {
        checkpoint_read_tensor(file, model->tensors[i].name, &model->tensors[i], model, NULL);
    }
    model_parameters_changed(model);
}

// Are two names of encodings the same but for Scalable-Softmax?
static inline bool checkpoint_same_encoding(const char* a, const char* b) {
    static const char suffix[] = "_ssmax";
    const size_t end = sizeof suffix - 1;
    size_t n = strlen(a), m = strlen(b);
    n -= n > end && strcmp(a + n - end, suffix) == 0 ? end : 0;
    m -= m > end && strcmp(b + m - end, suffix) == 0 ? end : 0;
    return n == m && strncmp(a, b, n) == 0;
}

// Says what becomes of the encoding that weights were trained with when the model has another one. Dropping it is how
// a model learns to do without (Gelberg et al. 2025, arXiv 2512.12167): to be asked for, since leaving out a flag would
// do it, too.
static inline void checkpoint_leave_encoding(const SafeTensors* file, const ModelConfig* config, bool drop) {
    const char* saved = safetensors_metadata(file, "position_encoding");
    char* now = model_encoding_name(config);
    const bool none = saved && checkpoint_same_encoding(saved, "nope");
    const bool same = saved && checkpoint_same_encoding(saved, now);
    if (drop && (none || same)) {
        fatal("--drop_encoding: %s was trained with %s, %s; leave the flag out%s", file->path, saved,
              none ? "which is nothing to drop" : "as the flags ask for", none ? "" : ", or give another encoding");
    }
    if (drop) {
        printf("dropped  %s of %s: its weights go on with %s\n", saved ? saved : "the encoding", file->path, now);
    } else if (saved && !none && !same) {
        warn("%s was trained with %s, this model has %s; give --drop_encoding where that is meant", file->path, saved,
             now);
    }
    free(now);
}

// Weights alone, matched by name, from any safetensors file. What the file lacks is drawn and listed, what the
// model lacks is listed; a wrong shape, another tokenizer, or no match at all, ends the program. With drop_encoding
// nothing is taken that the file's encoding has learned.
static inline void checkpoint_init_from(Model* model, const RunState* now, const char* from, bool drop_encoding,
                                        uint64_t seed) {
    struct stat info;
    bool folder = stat(from, &info) == 0 && S_ISDIR(info.st_mode);  // of a run, or one of its checkpoints
    char* path = folder ? text("%s/model.safetensors", from) : xstrdup(from);
    SafeTensors file = safetensors_open(path);
    checkpoint_leave_encoding(&file, &model->config, drop_encoding);
    RunState saved;
    memset(&saved, 0, sizeof saved);
    checkpoint_read_description(&file, &saved);
    size_t matched = 0;
    for (size_t i = 0; i < model->tensor_count; i++) {
        const Tensor* t = &model->tensors[i];
        const bool found = safetensors_find(&file, t->name), dropped = drop_encoding && t->group == GROUP_PRIOR;
        if (found && !dropped) {
            checkpoint_read_tensor(&file, t->name, t, model, NULL);
            matched++;
        } else {
            model_init_tensor(model, t, seed);
            printf("drawn    %s (%s %s)\n", t->name, found ? "dropped of" : "not in", path);
        }
    }
    if (matched == 0) {
        fatal("%s: none of its %zu tensors has a name of this model, such as %s", path, file.count,
              model->tensors[0].name);
    }
    checkpoint_check_vocabulary(path, &saved, now);
    for (size_t i = 0; i < file.count; i++) {
        if (!model_find_tensor(model, file.tensors[i].name)) {
            printf("%s  %s of %s\n", drop_encoding ? "dropped" : "unused ", file.tensors[i].name, path);
        }
    }
    printf("weights  %zu tensors from %s\n", matched, path);
    model_parameters_changed(model);
    safetensors_close(&file);
    free(path);
}

#endif
