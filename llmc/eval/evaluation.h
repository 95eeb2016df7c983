/*
What the parts of evaluate share: the arguments, the run, its results and the work at hand. One program includes this.
*/
#ifndef EVALUATION_H
#define EVALUATION_H

#include "evaluate_args.h"
#include "../output_file.h"
#include "perplexity.h"
#include "prefill.h"
#include "../progress.h"
#include "results.h"
#include "../run_folder.h"
#include "score.h"
#include "../ranks/signals.h"

typedef struct {
    EvaluateArgs args;
    Options options;
    RunFolder run;
    Tokenizer* tokenizer;  // NULL when nothing has to be tokenised
    Results results;
    char* positions;  // what the flags changed of the model's positions; NULL: nothing
    cJSON* of;        // what is measured: weights, precision and changed positions
    // passkey
    bool passkey_wanted;
    Passkey passkey;
    size_t *fillers, lengths;
    char* passkey_key;
    cJSON *passkey_of, *passkey_outdated;  // also the seed and keys; what is stored of other weights, NULL = nothing
    OutputFile dump;
    // perplexity
    bool perplexity_wanted;
    TokenStream stream;
    Perplexity perplexity;
    cJSON *perplexity_entry, *perplexity_outdated;  // the entry's beginning, without results
    char* partial;                                  // path of what an interrupted evaluation leaves
    // score
    ScoreInput input;
    OutputFile out;
    // work
    Model model;
    Prefill prefill;
    ProgressBar bar;
} Evaluation;

static volatile sig_atomic_t stop_signal;

// The first signal asks to stop after the chunk at work; a second one ends the program at once.
static void on_signal(int number) {
    stop_signal = number;
    signal(number, SIG_DFL);
}

static bool on_chunk(void* context, double flops) {
    progress_add((ProgressBar*)context, flops);
    return !stop_signal;
}

// What token shards must agree with.
static inline ExpectedTokens expected_tokens(const Evaluation* e) {
    const RunFolder* run = &e->run;
    ExpectedTokens expected = {run->config.V, run->tokenizer_hash, run->bos, run->eos, e->args.log_dir};
    return expected;
}

// A copy of what an entry was measured of when it is not of these weights; NULL otherwise.
static inline cJSON* evaluation_outdated(const Evaluation* e, const cJSON* entry) {
    const cJSON* of = results_of_entry(entry);
    return cJSON_IsObject(of) && !results_same_weights(of, e->of) ? cJSON_Duplicate(of, true) : NULL;
}

#endif
