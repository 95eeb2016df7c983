/*
What a run knows beside its weights and moments: all that it depends on to go on to the very same bits, and what tells
whether it is given the same data, tokenizer and optimiser again.
*/
#ifndef RUN_STATE_H
#define RUN_STATE_H

#include "random.h"
#include "util.h"

// Numbers of eight bytes only, so that ranks can compare it byte by byte.
typedef struct {
    size_t step;               // steps taken, skipped updates included
    size_t optimizer_step;     // updates made
    size_t schedule_start;     // the step at which the learning-rate schedule began
    uint64_t epoch, position;  // of the data loader
    size_t dataset_tokens;     // of the whole dataset, to notice another one
    size_t val_tokens, tokens_per_step;
    Random sampler;
    uint64_t described;  // 0: the checkpoint is of an older program and does not say what follows
    uint64_t fingerprint;
    uint64_t tokenizer_hash;  // 0: the data do not say
    int64_t bos, eos;
    uint64_t adamw;
} RunState;

#endif
