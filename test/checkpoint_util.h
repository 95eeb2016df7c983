/*
What the tests of checkpoints and of --init_from share: short runs, copies of them, data that differs a little.
*/
#ifndef CHECKPOINT_UTIL_H
#define CHECKPOINT_UTIL_H

#include "train_util.h"

#define STEPS " --tokens_per_step 64 --num_iterations 8 --checkpoint_every 4 --keep_checkpoints 9 --seed 3"

static inline char* copy_of(const char* log, const char* encoding) {
    static size_t number;
    char *from = run_file(log, encoding, ""), *to = text("%s/copy_%zu", scratch, number++);
    copy_tree(from, to);
    free(from);
    return to;
}

static inline Run run_checkpoint(const char* folder, const char* flags) {
    char* all = text("--checkpoint %s %s", folder, flags);
    Run r = run_train(all);
    free(all);
    return r;
}

// The corpus "easy" with another header, or in a shard of another name.
static inline void make_variant(const char* name, const char* file, int bos, uint32_t hash) {
    Folder folder = dataset_folder(name);
    ShardInfo info = {2, 20000, BYTES_VOCAB, bos, BYTES_EOS, hash};
    uint32_t* ids = xcalloc(info.token_count, sizeof(uint32_t));
    for (size_t i = 0; i < info.token_count; i++) { ids[i] = easy_token(i, NULL); }
    write_shard(&folder, file, &info, ids);
    free(ids);
}

// A run of each of these encodings under "base", and data of other vocabularies, tokenizers and names.
static inline void make_bases(const char* const* encodings, size_t count) {
    scratch_create();
    make_variant("renamed", "aaa.bin", BYTES_BOS, 1);
    make_variant("other_hash", "part_0000.bin", BYTES_BOS, 2);
    make_variant("other_bos", "part_0000.bin", 255, 1);
    make_dataset("short", easy_token, 1, 300);
    Folder wide = dataset_folder("wide");
    ShardInfo info = {2, 2000, 300, BYTES_BOS, BYTES_EOS, 1};
    uint32_t* tokens = xcalloc(info.token_count, sizeof(uint32_t));
    write_shard(&wide, "wide.bin", &info, tokens);
    free(tokens);
    for (size_t i = 0; i < count; i++) {
        char* flags = text("--position_encoding %s%s", encodings[i], STEPS);
        train_tiny_quietly("base", flags);
        free(flags);
    }
}

#endif
