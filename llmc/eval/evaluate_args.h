/*
The arguments of evaluate: the option table and the lengths that follow from it. The names and meanings of the published
system's flags are kept; ours are added beside them.
*/
#ifndef EVALUATE_ARGS_H
#define EVALUATE_ARGS_H

#include "../backend.h"
#include "../model_options.h"
#include "../options.h"
#include "passkey.h"
#include "../text_options.h"

typedef struct {
    const char *log_dir, *data_dir, *tokenizer;
    size_t seq_batch_size;
    const char *dtype, *device;
    size_t linspace_start, linspace_end, linspace_steps;
    OptionList passkey_seq_lens;
    size_t passkey_sample_size, passkey_pred_digits, passkey_prefix_digits, patience, seed;
    const char *passkey_sampling, *passkey_keys, *dump;
    bool perplexity, perplexity_join;
    const char* perplexity_dataset;
    size_t perplexity_seq_len, perplexity_window_size, perplexity_wiki_articles, perplexity_ntokens;
    const char *score, *out;
    TextOptions text;
    ModelOptions model;  // of these the scaled rotation alone
    const char* learned_beyond;
    bool force;
} EvaluateArgs;

enum { MAX_CONTEXT = 1 << 30 };

static inline Options evaluate_options(EvaluateArgs* a) {
    const Option rows[] = {
        OPT_GROUP("Run and data"),
        option_required(OPT_STRING(a->log_dir, NULL, "run folder, such as logs/l12/bam_ssmax/version_00")),
        OPT_STRING(a->data_dir, "data", "where datasets are"),
        OPT_STRING(a->tokenizer, "data/tokenizer.model", "SentencePiece model, or bytes: that of the run's data"),
        OPT_GROUP("Passkey retrieval"),
        OPT_SIZE(a->linspace_start, "0", 0, MAX_CONTEXT, "shortest length, in tokens"),
        OPT_SIZE(a->linspace_end, "32768", 0, MAX_CONTEXT, "longest length"),
        OPT_SIZE(a->linspace_steps, "10", 1, 100000, "lengths, evenly spaced"),
        OPT_SIZES(a->passkey_seq_lens, NULL, 0, MAX_CONTEXT, "these lengths instead"),
        OPT_SIZE(a->passkey_sample_size, "20", 0, 100000, "prompts of each length; 0: no passkey retrieval"),
        OPT_SIZE(a->passkey_pred_digits, "5", 1, PASSKEY_MAX_DIGITS, "digits of the key that must be predicted"),
        OPT_SIZE(a->passkey_prefix_digits, "0", 0, PASSKEY_MAX_DIGITS, "digits before them that are given"),
        OPT_CHOICE(a->passkey_sampling, "equidistant", "equidistant random beginning end", "where the key is hidden"),
        OPT_CHOICE(a->passkey_keys, "all", "all held_out",
                   "all keys, or only those that training data made with --hold_out never contains"),
        OPT_SIZE(a->patience, "0", 0, 100000, "stop after so many lengths in a row without a hit; 0: never"),
        OPT_SIZE(a->seed, "42", 0, OPTION_MAX, "of keys and random depths"),
        OPT_STRING(a->dump, NULL, "write each prompt with its expected and predicted digits to this file"),
        OPT_GROUP("Perplexity by position"),
        OPT_BOOL(a->perplexity, "0", "measure it, too"),
        OPT_STRING(a->perplexity_dataset, "wikipedia", "folder of token shards under --data_dir"),
        OPT_SIZE(a->perplexity_seq_len, "32768", 1, MAX_CONTEXT, "tokens of an article that are scored"),
        OPT_SIZE(a->perplexity_window_size, "1024", 1, MAX_CONTEXT, "tokens of a window"),
        OPT_SIZE(a->perplexity_wiki_articles, "128", 1, 1e9, "articles at most: the first that are long enough"),
        OPT_BOOL(a->perplexity_join, "0",
                 "instead of long articles take the first --perplexity_ntokens tokens without BOS and EOS, documents "
                 "joined, as published for ordinary datasets"),
        OPT_SIZE(a->perplexity_ntokens, "3932160", 1, OPTION_MAX, "tokens read with --perplexity_join"),
        OPT_GROUP("Scores of a text"),
        OPT_STRING(a->score, NULL,
                   "only write the log-probability of every token of this file to --out: a shard .bin, or a text, read "
                   "as dataset/prepare reads it"),
        OPT_CHOICE(a->text.format, NULL, "txt jsonl", TEXT_FORMAT_HELP),
        OPT_STRING(a->text.separator, NULL, TEXT_SEPARATOR_HELP),
        OPT_STRING(a->text.text_field, "text", TEXT_FIELD_HELP),
        OPT_STRING(a->out, NULL, "CSV of --score: document,position,token,logprob"),
        OPT_GROUP("Positions, in place of the model's") MODEL_OPTIONS_OF_ROPE_SCALING(MODEL_OPTION_ROW),
        OPT_CHOICE(a->learned_beyond, NULL, "clamp interpolate",
                   "beyond a learned table: its last row, or the whole sequence laid over it; without it an error"),
        OPT_GROUP("Machine"),
        OPT_SIZE(a->seq_batch_size, "1024", 1, MAX_CONTEXT, "tokens read at once; changes speed and memory only"),
        OPT_CHOICE(a->dtype, BACKEND_DTYPE, "float32 bfloat16", "precision of matrix products"),
        OPT_STRING(a->device, "auto", "auto, or the device of this build"),
        OPT_BOOL(a->force, "0", "measure again what results.json has"),
    };
    return options_create(
        "evaluate",
        "Measures passkey retrieval and perplexity by position of a trained model, far beyond its "
        "training length, and adds them to the run's results.json, which other evaluations of the run "
        "may fill at the same time.",
        rows, sizeof rows / sizeof *rows);
}

// The checks that need no files.
static inline void evaluate_check(const EvaluateArgs* a) {
    if (a->score && !a->out) { fatal("--score needs --out FILE.csv, where the scores go"); }
    if (a->out && !a->score) { fatal("--out needs --score FILE, the text to score"); }
    if (!a->score && (a->text.format || a->text.separator)) {
        fatal("%s needs --score FILE, the text that it describes", a->text.format ? "--format" : "--separator");
    }
    if (a->score && a->perplexity) { fatal("--score and --perplexity exclude each other: run evaluate twice"); }
    if (a->passkey_pred_digits + a->passkey_prefix_digits > PASSKEY_MAX_DIGITS) {
        fatal("--passkey_pred_digits %zu and --passkey_prefix_digits %zu, expected at most %d together",
              a->passkey_pred_digits, a->passkey_prefix_digits, PASSKEY_MAX_DIGITS);
    }
    if (strcmp(a->passkey_keys, "held_out") == 0 && a->passkey_pred_digits + a->passkey_prefix_digits < 2) {
        fatal("--passkey_keys held_out needs keys of at least 2 digits; raise --passkey_pred_digits");
    }
    if (a->passkey_sample_size == 0 && !a->perplexity && !a->score) {
        fatal("--passkey_sample_size 0 leaves nothing to do; add --perplexity or --score");
    }
}

static inline int compare_sizes(const void* a, const void* b) {
    size_t x = *(const size_t*)a, y = *(const size_t*)b;
    return (x > y) - (x < y);
}

// Numbers of fillers of the wanted lengths, ascending, each once; release with free().
static inline size_t* evaluate_fillers(const EvaluateArgs* a, const Passkey* p, size_t* count) {
    const OptionList* list = &a->passkey_seq_lens;
    size_t wanted = list->count ? list->count : a->linspace_steps, unique = 0;
    size_t* fillers = (size_t*)xcalloc(wanted, sizeof(size_t));
    for (size_t i = 0; i < wanted; i++) {
        size_t length = list->count ? list->sizes[i] : passkey_spaced(a->linspace_start, a->linspace_end, wanted, i);
        fillers[i] = passkey_fillers(p, length);
    }
    qsort(fillers, wanted, sizeof(size_t), compare_sizes);
    for (size_t i = 0; i < wanted; i++) {
        if (unique == 0 || fillers[i] != fillers[unique - 1]) { fillers[unique++] = fillers[i]; }
    }
    *count = unique;
    return fillers;
}

#endif
