/*
Folders of token shards for tests, written without the code under test except for the header. Unless a test
writes its own, the token at stream position i is i, so that what is read shows where it was read.
*/
#ifndef SHARD_UTIL_H
#define SHARD_UTIL_H

#include <dirent.h>

#include "test_util.h"

#include "../llmc/shard.h"

enum { VOCAB_U16 = 60000, VOCAB_U32 = 1 << 20 };

// ----------------------------------------------------------------------------
// folders of shards

typedef struct {
    char path[128];
    size_t tokens, shards;
} Folder;

static inline void folder_open(Folder* f) {
    memset(f, 0, sizeof *f);
    scratch_folder(f->path);
}

static inline void folder_close(Folder* f) {
    DIR* dir = opendir(f->path);
    assert_non_null(dir);
    for (struct dirent* entry; (entry = readdir(dir));) {
        char* path = text("%s/%s", f->path, entry->d_name);
        remove(path);
        free(path);
    }
    closedir(dir);
    rmdir(f->path);
}

static inline void write_file(const Folder* f, const char* name, const void* data, size_t bytes) {
    char* path = text("%s/%s", f->path, name);
    FILE* file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
    free(path);
}

// The shard's first file_bytes bytes, or two zero bytes more than it has; word < 0: header as info says.
static inline void write_damaged(const Folder* f, const char* name, const ShardInfo* info, const uint32_t* tokens,
                                 int word, int32_t value, size_t file_bytes) {
    unsigned char* file = xcalloc(SHARD_HEADER_BYTES + info->token_count * info->token_bytes + 2, 1);
    int32_t header[SHARD_HEADER_WORDS];
    shard_header_write(header, info);
    if (word >= 0) { header[word] = value; }
    memcpy(file, header, sizeof header);
    for (size_t i = 0; i < info->token_count; i++) {
        for (size_t b = 0; b < info->token_bytes; b++) {
            file[SHARD_HEADER_BYTES + i * info->token_bytes + b] = (unsigned char)(tokens[i] >> 8 * b);
        }
    }
    write_file(f, name, file, file_bytes);
    free(file);
}

static inline void write_shard(const Folder* f, const char* name, const ShardInfo* info, const uint32_t* tokens) {
    write_damaged(f, name, info, tokens, -1, 0, SHARD_HEADER_BYTES + info->token_count * info->token_bytes);
}

static inline ShardInfo shard_info(size_t width, size_t count) {
    return (ShardInfo){width, count, width == 2 ? VOCAB_U16 : VOCAB_U32, 1, 2, 77};
}

// Appends a shard that continues the count.
static inline void folder_add(Folder* f, size_t width, size_t count) {
    ShardInfo info = shard_info(width, count);
    uint32_t* tokens = xcalloc(count, sizeof(uint32_t));
    for (size_t i = 0; i < count; i++) { tokens[i] = (uint32_t)(f->tokens + i); }
    char* name = text("part_%04zu.bin", f->shards++);
    write_shard(f, name, &info, tokens);
    f->tokens += count;
    free(name);
    free(tokens);
}

#endif
