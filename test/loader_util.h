/*
Opens data loaders for tests, and checks that they refuse to.
*/
#ifndef LOADER_UTIL_H
#define LOADER_UTIL_H

#include "shard_util.h"

#include "../llmc/dataloader.h"

static inline DataLoaderConfig config_of(const Folder* f, size_t B, size_t T) {
    return (DataLoaderConfig){.folder = f->path, .B = B, .T = T, .world = 1, .accumulation = 1};
}

// On the heap, so that a loader survives a failed test that leaves its thread running.
static inline DataLoader* loader_open(const DataLoaderConfig* config) {
    DataLoader* dl = (DataLoader*)xcalloc(1, sizeof(DataLoader));
    dataloader_open(dl, config);
    return dl;
}

static inline void loader_close(DataLoader* dl) {
    dataloader_close(dl);
    free(dl);
}

static inline void open_loader(void* config) {
    DataLoader dl;
    dataloader_open(&dl, (const DataLoaderConfig*)config);
}

static inline void expect_refused(DataLoaderConfig config, const char* a, const char* b, const char* c) {
    const char* const words[] = {a, b, c, NULL};
    expect_fatal(open_loader, &config, words);
}

#endif
