/*
Positions that only an evaluation changes: a rotation that is scaled after training, and how learned positions are read
beyond their table. What was changed is one line of text, the flags that say it, which is part of what results are of.
*/
#ifndef EVAL_POSITIONS_H
#define EVAL_POSITIONS_H

#include "evaluation.h"

enum {
#define X(...) +1
    ROPE_SCALING_OPTIONS = 0 MODEL_OPTIONS_OF_ROPE_SCALING(X)
#undef X
};

// The rows that an evaluation may change, by their place in the list of model_options.h.
static const int rope_scaling_options[] = {
#define X(type, flag, ...) MODEL_OPTION_##flag,
    MODEL_OPTIONS_OF_ROPE_SCALING(X)
#undef X
};

// The flags of a scaled rotation that are not at their defaults, "rope_scaling none" without any; release with free().
static inline char* rope_scaling_text(const ModelOptions* o) {
    const ModelOptions standard = model_default_options();
    char* said = text("rope_scaling %s", o->rope_scaling);
    for (int i = 1; i < ROPE_SCALING_OPTIONS; i++) {
        const int row = rope_scaling_options[i];
        cJSON *value = model_option_json(row, o), *by_default = model_option_json(row, &standard);
        if (value && !cJSON_Compare(value, by_default, true)) {
            char *number = cJSON_PrintUnformatted(value),
                 *longer = text("%s %s %s", said, model_option(row)->flag, number);
            cJSON_free(number);
            free(said);
            said = longer;
        }
        cJSON_Delete(value), cJSON_Delete(by_default);
    }
    return said;
}

// The sequence length that the run's rotation was trained on: what its own scaling says, or that of its training.
static inline size_t trained_length(const RunFolder* run) {
    if (run->config.options.rope_original_length > 0) { return run->config.options.rope_original_length; }
    const cJSON* said = run->saved ? run->saved : cJSON_GetObjectItemCaseSensitive(run->json, "model_args");
    const cJSON* item = cJSON_GetObjectItemCaseSensitive(said, "max_seq_len");
    bool usable = cJSON_IsNumber(item) && item->valuedouble >= 1 && item->valuedouble <= MODEL_MAX_POSITIONS;
    return usable ? (size_t)item->valuedouble : 0;
}

// Puts the flags' rotation in the place of the model's, all of it.
static inline void change_rope_scaling(Evaluation* e) {
    ModelOptions *asked = &e->args.model, *own = &e->run.config.options;
    const RopeScaling scaling = model_rope_scaling(asked);
    if (posenc_info(e->run.config.encoding)->mechanism != POSENC_ROTATE) {
        fatal("--rope_scaling: %s is a model with %s, which rotates nothing; leave the flag out", e->args.log_dir,
              e->run.encoding);
    }
    if ((scaling == ROPE_YARN || scaling == ROPE_LLAMA3) && asked->rope_original_length == 0) {
        asked->rope_original_length = trained_length(&e->run);
    }
    char *before = rope_scaling_text(own), *after = rope_scaling_text(asked);
#define X(type, flag, ...) own->flag = asked->flag;
    MODEL_OPTIONS_OF_ROPE_SCALING(X)
#undef X
    model_check_positions(&e->run.config);
    e->positions = strcmp(before, after) == 0 ? NULL : after;
    free(before);
    if (!e->positions) { free(after); }
}

// Changes the run's configuration as the flags ask for, before anything is measured.
static inline void change_positions(Evaluation* e) {
    if (options_source(&e->options, "rope_scaling") == OPTION_FROM_COMMAND_LINE) {
        change_rope_scaling(e);
    } else {
        model_check_rope_scaling(&e->args.model);  // flags that need it
    }
    const char* beyond = e->args.learned_beyond;
    if (!beyond) { return; }
    if (!model_learns_positions(&e->run.config)) {
        fatal("--learned_beyond: %s is a model with %s, which learned no table of positions; leave the flag out",
              e->args.log_dir, e->run.encoding);
    }
    e->run.config.learned_interpolated = strcmp(beyond, "interpolate") == 0;
    e->positions = text("learned_beyond %s", beyond);
}

// Refuses to read beyond a learned table unless it was said how.
static inline void check_positions(const Evaluation* e, size_t context) {
    const ModelConfig* c = &e->run.config;
    if (!model_learns_positions(c) || e->args.learned_beyond || context <= c->options.learned_length) { return; }
    fatal(
        "a context of %zu tokens: %s learned %zu positions; ask for shorter lengths, or say how to go on with "
        "--learned_beyond clamp or interpolate",
        context, e->args.log_dir, c->options.learned_length);
}

// Call before sequences of another length are read: interpolated positions depend on it, and so do keys and values.
static inline void read_length(Evaluation* e, size_t length) {
    if (!e->run.config.learned_interpolated) { return; }
    if (e->model.positions != length) { e->prefill.cache.length = 0; }
    model_read_length(&e->model, length);
}

#endif
