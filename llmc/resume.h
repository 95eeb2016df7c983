/*
Going on with a run: its lock, the choice of its checkpoint, and what must be the same as before.
*/
#ifndef RESUME_H
#define RESUME_H

#include <sys/file.h>

#include "checkpoint.h"
#include "ranks/ranks.h"
#include "train_args.h"

// Two programs on one run would mix their logs and remove each other's checkpoints. The lock ends with the process. It
// is a file, for NFS locks no folders.
static inline void run_lock(const char* folder) {
    char* path = text("%s/.lock", folder);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) { fatal("%s: %s; check that the folder exists and can be written", path, strerror(errno)); }
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK) { fatal("%s: another train_gpt is at this run; wait for it or stop it", folder); }
        warn("%s: cannot lock: %s; do not start a second train_gpt at this run", path, strerror(errno));
    }
    free(path);
}

// Rank 0's text on every rank; release with free().
static inline char* ranks_share_text(char* mine) {
    size_t length = mine ? strlen(mine) + 1 : 0;
    ranks_broadcast(&length, sizeof length);
    if (ranks.rank > 0) { mine = (char*)xcalloc(length, 1); }
    ranks_broadcast(mine, length);
    return mine;
}

// The checkpoint to go on from, the same on all ranks. `run`, where rank 0 goes on in the same folder, is locked first,
// or another program could write the next checkpoint meanwhile, and put in order. Collective; release with free().
static inline char* resume_choose(const char* path, const char* run) {
    char* folder = NULL;
    if (ranks.rank == 0) {
        char* checkpoints = text("%s/checkpoints", run ? run : path);
        bool nothing = !file_exists(checkpoints) && checkpoint_files_in(run ? run : path) == 0;
        if (run && !nothing) {
            run_lock(run);
            checkpoint_recover(run);
        }
        folder = checkpoint_choose(path);
        free(checkpoints);
    }
    return ranks_share_text(folder);
}

// Refuses other data or, by a rounding flag and another number of ranks, other steps than the run had.
static inline void resume_check_data(const RunState* saved, const RunState* now, const TrainArgs* a) {
    if (saved->dataset_tokens != now->dataset_tokens) {
        fatal(
            "%s: the run's data has %zu tokens, --dataset %s has %zu; give the same data, or --reset_steps to go "
            "on with other data",
            a->checkpoint, saved->dataset_tokens, a->dataset, now->dataset_tokens);
    }
    if (saved->fingerprint && saved->fingerprint != now->fingerprint) {
        fatal(
            "%s: --dataset %s has as many tokens as the run's data, but other names, order or contents of shards "
            "(fingerprint %016llx, expected %016llx); give the same data, or --reset_steps to go on with other data",
            a->checkpoint, a->dataset, (unsigned long long)now->fingerprint, (unsigned long long)saved->fingerprint);
    }
    if (saved->val_tokens != now->val_tokens) {
        fatal("%s: %zu of the run's tokens are for validation, now it would be %zu; give --val_tokens %zu",
              a->checkpoint, saved->val_tokens, now->val_tokens, saved->val_tokens);
    }
    if (saved->tokens_per_step != now->tokens_per_step && a->tokens_per_step == 0) {
        fatal("%s: the run's steps have %zu tokens, on %zu rank%s they would have %zu; give --tokens_per_step %zu",
              a->checkpoint, saved->tokens_per_step, ranks.size, ranks.size == 1 ? "" : "s", now->tokens_per_step,
              saved->tokens_per_step);
    }
}

// Refuses what the run cannot go on with. With --reset_steps data and steps may be others.
static inline void resume_check(const RunState* saved, const RunState* now, const TrainArgs* a) {
    static const char* const names[] = {"radam", "adamw"};
    if (!a->reset_steps) { resume_check_data(saved, now, a); }
    if (!saved->described) {
        warn(
            "%s is of an older train_gpt, which did not note data, tokenizer and optimizer; make sure that they are "
            "those of the run",
            a->checkpoint);
        return;
    }
    checkpoint_check_vocabulary(a->checkpoint, saved, now);
    if (saved->adamw != now->adamw) {
        fatal(
            "%s: trained with --optimizer %s, to whose moments --optimizer %s would give another meaning; give "
            "--optimizer %s, or start a new run from its weights with --init_from",
            a->checkpoint, names[saved->adamw != 0], names[now->adamw != 0], names[saved->adamw != 0]);
    }
}

#endif
