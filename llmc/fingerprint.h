/*
A fingerprint of a data set: names, sizes and contents of its shards in their order. Small sets are read whole; of
larger ones, eight blocks of every shard, so that ten billion tokens take a fraction of a second. It tells another set,
order, name or size, and other contents unless they differ nowhere but between the blocks.
*/
#ifndef FINGERPRINT_H
#define FINGERPRINT_H

#include "dataloader.h"

enum { FINGERPRINT_WHOLE = 16 << 20, FINGERPRINT_BLOCK = 4096, FINGERPRINT_BLOCKS = 8 };

static inline uint64_t fingerprint_add(uint64_t hash, const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) { hash = (hash ^ ((const unsigned char*)data)[i]) * 1099511628211ull; }
    return hash;
}

static inline uint64_t fingerprint_add_block(uint64_t hash, int fd, size_t offset, const char* path) {
    unsigned char block[FINGERPRINT_BLOCK];
    ssize_t n = pread(fd, block, sizeof block, (off_t)offset);
    if (n < 0) { fatal("%s: %s; check that the file can be read", path, strerror(errno)); }
    return fingerprint_add(hash, block, (size_t)n);
}

// Adds a file's name, size and contents; `whole`: all of them.
static inline uint64_t fingerprint_add_file(uint64_t hash, const char* path, bool whole) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0) { fatal("%s: %s; check that the file can be read", path, strerror(errno)); }
    const char* slash = strrchr(path, '/');
    const char* name = slash ? slash + 1 : path;
    uint64_t size = (uint64_t)status.st_size;
    hash = fingerprint_add(hash, name, strlen(name) + 1);
    hash = fingerprint_add(hash, &size, sizeof size);
    size_t blocks = ((size_t)size + FINGERPRINT_BLOCK - 1) / FINGERPRINT_BLOCK;
    size_t reads = whole || blocks < FINGERPRINT_BLOCKS ? blocks : (size_t)FINGERPRINT_BLOCKS;
    for (size_t i = 0; i < reads; i++) {
        size_t block = reads == blocks ? i : (size_t)((double)(blocks - 1) * (double)i / (double)(reads - 1));
        hash = fingerprint_add_block(hash, fd, block * FINGERPRINT_BLOCK, path);
    }
    close(fd);
    return hash;
}

// Of the shards of an open loader; never 0.
static inline uint64_t data_fingerprint(const DataLoader* dl) {
    bool whole = dl->total_tokens <= FINGERPRINT_WHOLE / dl->token_bytes;
    uint64_t hash = fnv1a("", 0);
    for (size_t i = 0; i < dl->shard_count; i++) { hash = fingerprint_add_file(hash, dl->shards[i].path, whole); }
    return hash ? hash : 1;
}

#endif
