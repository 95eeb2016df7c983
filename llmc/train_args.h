/*
The arguments of train_gpt: the option table, and what follows from it (model, tokens per step, schedule).
The names and meanings of the published system's flags are kept; ours are added beside them.
*/
#ifndef TRAIN_ARGS_H
#define TRAIN_ARGS_H

#include "backend.h"
#include "model_config.h"
#include "options.h"
#include "schedule.h"

typedef struct {
    const char *dataset, *data_dir, *log_dir, *run_name, *tokenizer;
    const char *position_encoding, *model_size;
    OptionList layer_encodings, layer_windows;
    size_t dim, n_layers, n_heads, n_kv_heads, ffn_dim;
    ModelOptions model;
    PosencOptions posenc;  // its tensors' initial values and what is trained
    double prior_lr;
    size_t batch_size, sequence_length;
    size_t min_tokens_per_step, tokens_per_step, max_tokens_per_step;
    size_t num_iterations, warmup_iters, seed;
    const char *optimizer, *lr_scheduler;
    double learning_rate, learning_rate_decay_frac, weight_decay, grad_clip, beta1, beta2, adam_eps;
    size_t val_tokens, min_val_tokens, max_val_tokens, val_tokens_padding, val_loss_every;
    size_t sample_every, sample_length;
    const char* sample_prompt;
    double temperature, top_p;
    const char *checkpoint, *init_from;
    bool checkpoint_args, reset_steps, drop_encoding;
    size_t checkpoint_every, keep_checkpoints;
    const char *dtype, *device, *attention;
    bool recompute, compile, tensorcores;
    const char* zero_stage;
    bool overlap_communication;
    bool overfit_single_batch, debug_batches;
    size_t debug_nan_step;
} TrainArgs;

// A flag that the published system calls otherwise, if it does, stands under that name first.
static inline Option option_published(const char* published, Option row) {
    if (!published) { return row; }
    const char* own = row.name;
    row.name = published;
    return option_alias(own, row);
}

// The flags of each tensor that an encoding learns, as rows that follow others.
#define INITIAL_VALUE_OPTION(kind, name, rows, heads, by_default, initial, words, most, published, what)               \
    , option_published(published, option_row(OPTION_CHOICE, #name "_init", &a->posenc.init[POSENC_##name], initial, 0, \
                                             0, words, what " at the start"))
#define TRAINABLE_OPTION(kind, name, rows, heads, by_default, initial, words, most, published, what)                 \
    , option_row(OPTION_BOOL, #name "_trainable", &a->posenc.trained[POSENC_##name], (by_default) ? "1" : "0", 0, 0, \
                 NULL, "train " what)

static inline Options train_options(TrainArgs* a) {
    const Option rows[] = {
        OPT_GROUP("Data and folders"),
        OPT_STRING(a->dataset, "10B", "folder of token shards under --data_dir"),
        OPT_STRING(a->data_dir, "data", "where datasets are"),
        OPT_STRING(a->log_dir, "logs", "where run folders are made"),
        OPT_STRING(a->run_name, NULL, "name of the new run's folder, instead of version_00, version_01, ..."),
        OPT_STRING(a->tokenizer, "data/tokenizer.model", "SentencePiece model, or bytes; read only to print samples"),
        OPT_GROUP("Model"),
        option_one_of("encoding", OPT_CHOICE(a->position_encoding, "nope", posenc_choices(), "positional encoding")),
        option_one_of("encoding", OPT_CHOICES(a->layer_encodings, NULL, posenc_choices(),
                                              "encodings of the layers, repeated: rotary,rotary,rotary,nope")),
        OPT_CHOICE(a->model_size, "l12", "l2 l4 l6 l8 l12 l15 l18 l24", "named size"),
        OPT_SIZE(a->dim, NULL, 8, MODEL_MAX_DIM, "channels, instead of the size's"),
        OPT_SIZE(a->n_layers, NULL, 1, MODEL_MAX_LAYERS, "layers, instead of the size's"),
        OPT_SIZE(a->n_heads, NULL, 1, MODEL_MAX_HEADS, "query heads, instead of the size's"),
        OPT_SIZE(a->n_kv_heads, NULL, 1, MODEL_MAX_HEADS, "key/value heads, instead of one per query head"),
        OPT_SIZE(a->ffn_dim, NULL, 8, MODEL_MAX_FFN_DIM, "feed-forward width, instead of twice the channels"),
        OPT_GROUP("Positional encodings") MODEL_OPTIONS_OF_ENCODINGS(MODEL_OPTION_ROW)
            POSENC_TENSORS(INITIAL_VALUE_OPTION) POSENC_TENSORS(TRAINABLE_OPTION),
        OPT_DOUBLE(a->prior_lr, NULL, 0, 1e6, "peak learning rate of the prior, instead of --learning_rate"),
        OPT_GROUP("Attention") MODEL_OPTIONS_OF_ATTENTION(MODEL_OPTION_ROW),
        OPT_SIZES(a->layer_windows, NULL, 0, MODEL_MAX_WINDOW,
                  "instead of --window: those of the layers, repeated, 0 for none: 512,512,0"),
        OPT_GROUP("Batches"),
        OPT_SIZE(a->batch_size, "4", 1, 1048576, "sequences per forward pass and rank"),
        OPT_SIZE(a->sequence_length, "64", 1, 16777216, "tokens per sequence"),
        option_required(option_one_of("tokens per step", OPT_SIZE(a->tokens_per_step, NULL, 1, OPTION_MAX,
                                                                  "tokens per optimiser step, exactly"))),
        option_required(option_one_of("tokens per step", OPT_SIZE(a->min_tokens_per_step, NULL, 1, OPTION_MAX,
                                                                  "the same, rounded up to whole batches"))),
        option_required(option_one_of("tokens per step", OPT_SIZE(a->max_tokens_per_step, NULL, 1, OPTION_MAX,
                                                                  "the same, rounded down to whole batches"))),
        OPT_GROUP("Optimisation"),
        option_required(OPT_SIZE(a->num_iterations, NULL, 1, 1e12, "optimiser steps")),
        OPT_CHOICE(a->optimizer, "radam", "radam adamw", "both with decoupled weight decay"),
        OPT_DOUBLE(a->learning_rate, "1e-4", 1e-30, 1e6, "peak learning rate"),
        OPT_CHOICE(a->lr_scheduler, "cosine", "cosine linear wsd constant", "learning rate after the warm-up"),
        OPT_SIZE(a->warmup_iters, "0", 0, 1e12, "steps of linear warm-up"),
        OPT_DOUBLE(a->learning_rate_decay_frac, "1", 0, 1, "share of the learning rate that is left at the end"),
        OPT_DOUBLE(a->weight_decay, "0", 0, 1e6, "of matrices; norms, scales and priors have none"),
        OPT_DOUBLE(a->beta1, "0.9", 0, 0.999999, "share of the gradients' mean that a step keeps"),
        OPT_DOUBLE(a->beta2, "0.95", 0, 0.999999, "share of the squared gradients' mean that a step keeps"),
        OPT_DOUBLE(a->adam_eps, "1e-8", 1e-30, 1, "added to the root of the squared gradients' mean"),
        OPT_DOUBLE(a->grad_clip, "1", 0, 1e12, "largest global norm of the gradient; 0: no clipping"),
        OPT_SIZE(a->seed, "42", 0, OPTION_MAX, "of initial weights and samples"),
        OPT_GROUP("Validation"),
        OPT_SIZE(a->val_loss_every, "0", 0, 1e12, "steps between validations; 0: never"),
        option_one_of("validation tokens",
                      OPT_SIZE(a->val_tokens, NULL, 0, OPTION_MAX,
                               "first tokens of the data, kept for validation [3932160, rounded down]")),
        option_one_of("validation tokens", OPT_SIZE(a->min_val_tokens, NULL, 0, OPTION_MAX, "the same, rounded up")),
        option_one_of("validation tokens", OPT_SIZE(a->max_val_tokens, NULL, 0, OPTION_MAX, "the same, rounded down")),
        OPT_SIZE(a->val_tokens_padding, "1000000", 0, OPTION_MAX, "tokens skipped between validation and training"),
        OPT_GROUP("Samples"),
        OPT_SIZE(a->sample_every, "0", 0, 1e12, "steps between samples of text; 0: never"),
        OPT_STRING(a->sample_prompt, "Clearly, the meaning of life is", "what a sample continues"),
        OPT_SIZE(a->sample_length, "64", 1, 1048576, "tokens of a sample"),
        OPT_DOUBLE(a->temperature, "0.6", 0, 100, "of sampling; 0: the most probable token"),
        OPT_DOUBLE(a->top_p, "0.9", 0.000001, 1, "probability mass that is sampled from"),
        OPT_GROUP("Checkpoints"),
        OPT_SIZE(a->checkpoint_every, "500", 0, 1e12, "steps between checkpoints; 0: only at the end"),
        OPT_SIZE(a->keep_checkpoints, "1", 1, 1e6, "how many of the last checkpoints stay on disk"),
        OPT_STRING(a->checkpoint, NULL, "run folder, or one of its checkpoints, to resume from"),
        OPT_BOOL(a->checkpoint_args, "0", "take all arguments from the checkpoint's run; flags given here win"),
        OPT_BOOL(a->reset_steps, "0", "start the schedule anew from the checkpoint, in a new run folder"),
        OPT_STRING(a->init_from, NULL,
                   "safetensors file or run folder to start the weights from; what it lacks is drawn"),
        OPT_BOOL(a->drop_encoding, "0",
                 "take the weights of --init_from without the encoding that they were trained with"),
        OPT_GROUP("Machine"),
        OPT_CHOICE(a->dtype, BACKEND_DTYPE, "float32 bfloat16", "precision of matrix products"),
        OPT_STRING(a->device, "auto", "auto, or the device of this build"),
        OPT_CHOICE(a->attention, "own", "own cudnn", "whose kernels; cudnn where the CUDA build has it"),
        OPT_BOOL(a->recompute, "0", "compute activations again in the backward pass: less memory, more time"),
        OPT_CHOICE(a->zero_stage, "0", "0 1", "1: each rank holds and updates its share of the optimiser's state"),
        OPT_BOOL(a->overlap_communication, "1", "sum gradients over ranks during the backward pass"),
        OPT_IGNORED(a->compile, "accepted, changes nothing"),
        OPT_IGNORED(a->tensorcores, "accepted, changes nothing"),
        OPT_GROUP("Debugging"),
        OPT_BOOL(a->overfit_single_batch, "0", "train on the first batch only"),
        OPT_BOOL(a->debug_batches, "0", "log a hash of every batch to batches.log, not only of steps that are skipped"),
        OPT_SIZE(a->debug_nan_step, "0", 0, 1e12,
                 "take the last rank's loss of the Nth step for NaN, which is step N - 1 of train.log; 0: never"),
    };
    return options_create("train_gpt", "Trains a language model on token shards and writes a run folder.", rows,
                          sizeof rows / sizeof *rows);
}

// ----------------------------------------------------------------------------
// what follows from the arguments

// Warns of what was given on the command line and has no effect together with the rest. Not refused, since sweeps over
// encodings and schedules hand every flag to every run.
static inline void train_warn_unused(const TrainArgs* a, const Options* o, const ModelConfig* c) {
    char* list = xstrdup("");
    const char* names[MODEL_OPTION_COUNT + 2 * POSENC_TENSOR_COUNT + 1];
    size_t count = 0;
    char trainable[POSENC_TENSOR_COUNT][64];
    bool applies[MODEL_OPTION_COUNT];
    model_options_applied(c, applies);
    for (int i = 0; i < MODEL_OPTION_COUNT; i++) {
        if (!applies[i]) { names[count++] = model_option(i)->flag; }
    }
    for (int t = 0; t < POSENC_TENSOR_COUNT; t++) {
        const PosencTensor* tensor = posenc_tensor(t);
        if (model_has_encoding(c, tensor->owner)) { continue; }
        snprintf(trainable[t], sizeof trainable[t], "%s_trainable", tensor->name);
        names[count++] = tensor->init_name, names[count++] = trainable[t];
    }
    if (!model_learns(c)) { names[count++] = "prior_lr"; }
    for (size_t i = 0; i < count; i++) {
        if (options_source(o, names[i]) < OPTION_FROM_COMMAND_LINE) { continue; }
        char* longer = text("%s%s--%s", list, *list ? ", " : "", names[i]);
        free(list);
        list = longer;
    }
    char* encoding = model_encoding_name(c);
    if (*list) { warn("not used by --position_encoding %s: %s", encoding, list); }
    free(list), free(encoding);
    bool schedule_given = options_source(o, "lr_scheduler") == OPTION_FROM_COMMAND_LINE;
    if (schedule_given && a->learning_rate_decay_frac >= 1 && strcmp(a->lr_scheduler, "constant") != 0) {
        warn(
            "--lr_scheduler %s changes nothing while --learning_rate_decay_frac is 1; give that, too, such as "
            "--learning_rate_decay_frac 0.1",
            a->lr_scheduler);
    }
}

// A run's name is one word of a path, and hidden folders are no runs.
static inline void train_check_run_name(const TrainArgs* a) {
    const char* name = a->run_name;
    if (!name) { return; }
    if (name[0] == '.' || strchr(name, '/') || strlen(name) > 200) {
        fatal("--run_name %s, expected a name without '/' that does not begin with '.'; --log_dir says where runs are",
              name);
    }
}

// Refuses initial values that are no use.
static inline void train_check_initial(const TrainArgs* a) {
    for (int t = 0; t < POSENC_TENSOR_COUNT; t++) {
        const PosencTensor* tensor = posenc_tensor(t);
        const char* initial = a->posenc.init[t];
        if (!(fabs(atof(initial)) <= tensor->most)) {
            fatal("--%s %s, expected -%g to %g", tensor->init_name, initial, tensor->most, tensor->most);
        }
    }
}

static inline void train_check_layers(const char* flag, const OptionList* list, size_t layers) {
    if (list->count > layers) {
        fatal("--%s: found %zu entries, the model has %zu layers; give at most one for each", flag, list->count,
              layers);
    }
}

// Gives lengths that nobody gave the run's sequence length, in the arguments, so that args.json says them.
static inline void train_settle_lengths(TrainArgs* a, const ModelConfig* c) {
    bool applies[MODEL_OPTION_COUNT];
    model_options_applied(c, applies);
    for (int i = 0; i < MODEL_OPTION_COUNT; i++) {
        size_t* length = (size_t*)((char*)&a->model + model_option(i)->offset);
        if (!applies[i] || !(model_option(i)->kept & MODEL_OF_SEQUENCE)) { continue; }
        *length = *length == 0 ? a->sequence_length : *length;
    }
    if (model_learns_positions(c) && a->model.learned_length < a->sequence_length) {
        fatal("--learned_length %zu is less than --sequence_length %zu; every position needs a row",
              a->model.learned_length, a->sequence_length);
    }
}

// What the arguments say of the layers: how many, and the encoding and window of each.
static inline void train_model_layers(ModelConfig* c, const TrainArgs* a) {
    const ModelSize* size = model_size_find(a->model_size);
    assert(size);
    c->L = a->n_layers ? a->n_layers : size->L;
    const OptionList *names = &a->layer_encodings, *windows = &a->layer_windows;
    train_check_layers("layer_encodings", names, c->L);
    train_check_layers("layer_windows", windows, c->L);
    if (windows->count > 0 && a->model.window) {
        fatal("--window %zu together with --layer_windows, which excludes it; give only one of the two",
              a->model.window);
    }
    bool known = names->count > 0 || model_parse_encoding(c, a->position_encoding);
    for (size_t l = 0; l < names->count; l++) { known = known && model_parse_layer(c, l, names->items[l]); }
    assert(known);
    (void)known;
    if (names->count > 0) { model_repeat_encodings(c, names->count); }
    if (windows->count > 0) { model_set_windows(c, windows->sizes, windows->count); }
}

// The model that the arguments describe, for a vocabulary that the data brings.
static inline ModelConfig train_model_config(TrainArgs* a, size_t vocab_size, int bos) {
    ModelConfig c;
    memset(&c, 0, sizeof c);
    train_model_layers(&c, a);
    const ModelSize* size = model_size_find(a->model_size);
    c.V = vocab_size, c.bos = bos;
    c.C = a->dim ? a->dim : size->C;
    c.NH = a->n_heads ? a->n_heads : size->NH;
    c.NKV = a->n_kv_heads ? a->n_kv_heads : c.NH;
    c.F = a->ffn_dim ? a->ffn_dim : 2 * c.C;
    train_settle_lengths(a, &c);
    c.options = a->model, c.posenc = a->posenc;
    train_check_initial(a);
    model_config_check(&c);
    return c;
}

// One of three flags fixes a number of tokens: exactly, at least or at most. Returns it as a multiple of
// `batch`, the tokens of one forward pass over all ranks.
static inline size_t whole_batches(const char* flag, size_t exactly, size_t at_least, size_t at_most, size_t batch) {
    if (at_least) { return round_up(at_least, batch); }
    if (at_most) {
        if (at_most < batch) {
            fatal("--max_%s %zu is less than one batch of %zu tokens (batch_size x sequence_length x ranks)", flag,
                  at_most, batch);
        }
        return at_most / batch * batch;
    }
    if (exactly % batch != 0 && exactly < batch) {
        fatal(
            "--%s %zu is less than one batch of %zu tokens (batch_size x sequence_length x ranks); lower --batch_size",
            flag, exactly, batch);
    }
    if (exactly % batch != 0) {
        fatal(
            "--%s %zu is not a multiple of the %zu tokens of a batch (batch_size x sequence_length x ranks); use %zu "
            "or %zu, or --min_%s, --max_%s to round",
            flag, exactly, batch, exactly / batch * batch, round_up(exactly, batch), flag, flag);
    }
    return exactly;
}

static inline size_t train_tokens_per_step(const TrainArgs* a, size_t ranks) {
    return whole_batches("tokens_per_step", a->tokens_per_step, a->min_tokens_per_step, a->max_tokens_per_step,
                         a->batch_size * a->sequence_length * ranks);
}

// Validation tokens: an explicit 0 is none; without a flag the published 3,932,160, rounded down to whole batches.
static inline size_t train_val_tokens(const TrainArgs* a, const Options* options, size_t ranks) {
    const char* const flags[] = {"val_tokens", "min_val_tokens", "max_val_tokens"};
    bool given = false;
    for (int i = 0; i < 3; i++) { given = given || options_source(options, flags[i]) >= OPTION_FROM_JSON; }
    if (given && a->val_tokens + a->min_val_tokens + a->max_val_tokens == 0) { return 0; }
    size_t published = 3932160, batch = a->batch_size * a->sequence_length * ranks;
    if (!given) { return published > batch ? published / batch * batch : batch; }
    return whole_batches("val_tokens", a->val_tokens, a->min_val_tokens, a->max_val_tokens, batch);
}

#endif
