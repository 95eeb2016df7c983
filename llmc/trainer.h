/*
A training run and its folder: starting or going on, saving, the end. Rank 0 alone writes; every function is collective.
*/
#ifndef TRAINER_H
#define TRAINER_H

#include "dataloader.h"
#include "fingerprint.h"
#include "logger.h"
#include "ranks/model_dist.h"
#include "resume.h"
#include "ranks/stop.h"
#include "tokenizer.h"

typedef struct {
    TrainArgs args;
    Options options;
    PosKind encoding;  // what --position_encoding says
    bool ssmax;
    size_t tokens_per_step, accumulation;
    DataLoader loader;
    ModelConfig config;
    Model model;
    Tokenizer* tokenizer;  // NULL when nothing is sampled
    TokenList prompt;      // of samples, BOS included
    Schedule schedule;
    RunState state;
    char* folder;
    RunLogs logs;
    FILE* batch_log;  // NULL unless --debug_batches
    StepTimer timer;
    double peak_flops;
    size_t skipped;      // updates skipped in a row
    bool saved;          // the state is on disk
    bool tidy;           // no more checkpoints are there than are to be kept, or they must wait
    char* checkpoint;    // the last one, of this run or resumed from; NULL: none
    char* proven;        // the last one whose weights have given a finite loss; NULL: none
    uint64_t data_hash;  // fingerprint of the data
    int stop;            // the signal at which all ranks have agreed to stop
} Trainer;

// ----------------------------------------------------------------------------
// going on

// What the run is now that must be the same when it goes on.
static inline void describe_run(const Trainer* t, RunState* state) {
    DataLoaderTokens tokens = dataloader_tokens(&t->loader);
    state->dataset_tokens = tokens.total, state->val_tokens = tokens.validation;
    state->tokens_per_step = t->tokens_per_step;
    state->described = 1, state->fingerprint = t->data_hash;
    state->tokenizer_hash = t->loader.tokenizer_hash, state->bos = t->loader.bos, state->eos = t->loader.eos;
    state->adamw = strcmp(t->args.optimizer, "adamw") == 0;
}

static inline bool same_run(const Trainer* t) { return t->args.checkpoint && !t->args.reset_steps; }

static inline void load_checkpoint(Trainer* t, const RunState* now) {
    const TrainArgs* a = &t->args;
    if (same_run(t) && ranks.rank == 0) { t->folder = checkpoint_run_folder(a->checkpoint); }
    t->checkpoint = resume_choose(a->checkpoint, t->folder);
    t->proven = xstrdup(t->checkpoint);
    checkpoint_load(&t->model, &t->state, t->checkpoint);
    resume_check(&t->state, now, a);
    DataLoaderState position = {t->state.epoch, t->state.position};
    bool same_data = t->state.fingerprint ? t->state.fingerprint == now->fingerprint
                                          : t->state.dataset_tokens == now->dataset_tokens;
    if (same_data) { dataloader_restore(&t->loader, position, a->checkpoint); }
    if (a->reset_steps) { t->state.schedule_start = t->state.step; }
    t->saved = same_run(t);
    printf("resumed  %s at step %zu\n", t->checkpoint, t->state.step);
    if (!t->folder) { return; }
    char* later = checkpoint_later(t->folder, (long long)t->state.step);
    if (!later) { checkpoint_publish_again(t->folder, t->checkpoint, (long long)t->state.step); }
    free(later);
}

// Initial weights, or those of a checkpoint with all that is needed to go on from it.
static inline void load_weights(Trainer* t) {
    const TrainArgs* a = &t->args;
    RunState now;
    memset(&now, 0, sizeof now);
    describe_run(t, &now);
    t->state.sampler = random_stream(a->seed, 1);
    if (a->checkpoint) {
        load_checkpoint(t, &now);
    } else if (a->init_from) {
        checkpoint_init_from(&t->model, &now, a->init_from, a->seed);
    } else {
        model_init(&t->model, a->seed);
    }
    DataLoaderState position = dataloader_state(&t->loader);
    t->state.epoch = position.epoch, t->state.position = position.position;
    describe_run(t, &t->state);
    ranks_check_same("state", &t->state, sizeof t->state);
}

// ----------------------------------------------------------------------------
// the run folder

static inline cJSON* dataset_args_json(const Trainer* t) {
    DataLoaderTokens tokens = dataloader_tokens(&t->loader);
    cJSON* o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "dataset_dir", t->args.dataset);
    cJSON_AddNumberToObject(o, "batch_size", (double)t->args.batch_size);
    cJSON_AddNumberToObject(o, "seq_len", (double)t->args.sequence_length);
    cJSON_AddNumberToObject(o, "grad_accum_steps", (double)t->accumulation);
    cJSON_AddNumberToObject(o, "val_tokens", (double)tokens.validation);
    cJSON_AddNumberToObject(o, "tokens_per_batch", (double)t->tokens_per_step);
    cJSON_AddNumberToObject(o, "val_tokens_padding", (double)tokens.padding);
    cJSON_AddNumberToObject(o, "total_tokens", (double)tokens.total);
    cJSON_AddNumberToObject(o, "iterations", (double)tokens.steps_per_epoch);
    cJSON_AddNumberToObject(o, "num_processes", (double)ranks.size);
    cJSON_AddNumberToObject(o, "bos", t->loader.bos);
    cJSON_AddNumberToObject(o, "eos", t->loader.eos);
    cJSON_AddNumberToObject(o, "tokenizer_hash", t->loader.tokenizer_hash);
    return o;
}

// Keeps what a run has that goes back to an earlier step, and says so.
static inline void keep_later(Trainer* t) {
    char* later = checkpoint_later(t->folder, (long long)t->state.step);
    if (later) {
        checkpoint_set_aside(t->folder, (long long)t->state.step);
        t->tidy = true;
        printf(
            "         later checkpoints (%s) and the log after step %zu stay until the next one is whole, then they "
            "go\n",
            later, t->state.step);
    }
    free(later);
}

// Rank 0's part: the folder, args.json, the logs.
static inline void create_run(Trainer* t) {
    const TrainArgs* a = &t->args;
    if (same_run(t)) {
        keep_later(t);
    } else {
        t->folder = run_folder_create(a->log_dir, a->model_size, a->position_encoding);
        run_lock(t->folder);
    }
    char device[256];
    backend_describe(device, sizeof device);
    cJSON* build = build_info();
    cJSON_AddStringToObject(build, "device", device);
    write_args_json(t->folder, options_to_json(&t->options), dataset_args_json(t),
                    model_args_json(&t->config, a->batch_size, a->sequence_length), build);
    t->logs = run_logs_open(t->folder, same_run(t) ? t->state.step : 0);
}

static inline void open_batch_log(Trainer* t) {
    char* path =
        ranks.rank == 0 ? text("%s/batches.log", t->folder) : text("%s/batches.rank%zu.log", t->folder, ranks.rank);
    t->batch_log = fopen(path, "a");
    if (!t->batch_log) { fatal("cannot write %s: %s", path, strerror(errno)); }
    free(path);
}

// A resumed run goes on in its own folder; a new one, or a new phase, gets the next free number.
static inline void open_run_folder(Trainer* t) {
    ranks_barrier();  // all have read the checkpoint before anything changes
    if (ranks.rank == 0) { create_run(t); }
    t->folder = ranks_share_text(t->folder);
    if (t->args.debug_batches) { open_batch_log(t); }
    printf("run      %s\n\n", t->folder);
    fflush(stdout);
}

// ----------------------------------------------------------------------------
// saving

// The last checkpoint that is good as far as anybody can tell, in the words of a message; release with free().
// Collective.
static inline char* name_checkpoint(const Trainer* t) {
    const char* path = t->proven ? t->proven : t->checkpoint;
    char *why = path && ranks.rank == 0 ? checkpoint_fault(path) : NULL, *name = NULL;
    if (ranks.rank == 0) {
        name = path && !why ? text("resume from %s", path) : xstrdup("start again: it has no checkpoint");
    }
    free(why);
    return ranks_share_text(name);
}

// Removes the oldest checkpoints, down to the number to keep.
static inline void tidy_checkpoints(Trainer* t) {
    if (!t->tidy && ranks.rank == 0) { checkpoint_prune(t->folder, t->state.step, t->args.keep_checkpoints); }
    t->tidy = true;
}

// A finite loss says that the weights are good, and so the checkpoint that holds them: older ones may go.
static inline void prove_checkpoint(Trainer* t) {
    if (t->checkpoint && (!t->proven || strcmp(t->proven, t->checkpoint) != 0)) {
        free(t->proven);
        t->proven = xstrdup(t->checkpoint);
    }
    tidy_checkpoints(t);
}

// Saves the state, unless it is known to be bad: then the checkpoints that are there stay as they are.
static inline void save(Trainer* t) {
    if (t->saved || t->skipped > 0) { return; }
    stop_be_patient(0);
    double started = wall_seconds();
    if (!model_is_finite(&t->model)) {
        fatal("weights or moments after step %zu are not finite and are not saved; lower --learning_rate and %s",
              t->state.step, name_checkpoint(t));
    }
    if (ranks.rank == 0) {
        cJSON* model_args = model_args_json(&t->config, t->args.batch_size, t->args.sequence_length);
        checkpoint_save(t->folder, &t->model, model_whole_state, &t->state, t->args.position_encoding, model_args);
        cJSON_Delete(model_args);
    } else {
        checkpoint_help_save(&t->model, model_whole_state);
        device_synchronize();  // the network has done its part before ranks talk again
    }
    ranks_barrier();  // nobody leaves before the checkpoint is whole
    t->saved = true, t->tidy = false;
    free(t->checkpoint);
    t->checkpoint = checkpoint_step_folder(t->folder, (long long)t->state.step, "");
    printf("saved step %zu to %s (%.1f s)\n", t->state.step, t->folder, wall_seconds() - started);
    fflush(stdout);
}

// ----------------------------------------------------------------------------
// the end

// The step at which the run ends.
static inline size_t end_step(const Trainer* t) { return t->state.schedule_start + t->args.num_iterations; }

// Is a resumed run finished? Not before its last validation is in the log, which a kill may have prevented, where that
// is still the log of this step. Collective.
static inline bool is_finished(const Trainer* t) {
    if (!same_run(t) || t->state.step < end_step(t)) { return false; }
    int finished = 1;
    if (ranks.rank == 0 && t->args.val_loss_every > 0) {
        char* later = checkpoint_later(t->folder, (long long)t->state.step);
        finished = later || eval_log_has(t->folder, t->state.step);
        free(later);
    }
    ranks_broadcast(&finished, sizeof finished);
    return finished;
}

// What a run that ends says about going on, or about a last step that is not worth it.
static inline void end_of_training(Trainer* t) {
    bool ended = t->state.step >= end_step(t);
    if (t->saved) { tidy_checkpoints(t); }
    if (!t->saved && !t->stop) {
        fatal("the last %zu updates were skipped, and the weights are not saved; lower --learning_rate and %s",
              t->skipped, name_checkpoint(t));
    }
    if (!t->stop || (ended && t->saved)) { return; }
    printf("stopped by %s after step %zu", stop_signal_name(t->stop), t->state.step);
    if (t->saved) {
        printf("; resume with\n  --checkpoint %s --checkpoint_args\n", t->folder);
    } else {
        char* advice = name_checkpoint(t);
        printf(", which is not saved; %s\n", advice);
        free(advice);
    }
}

#endif
