/*
Pieces of a workspace, one after another. With base NULL an arena only counts, so that one function both says how many
bytes it takes and lays them out.
*/
#ifndef ARENA_H
#define ARENA_H

#include "util.h"

typedef struct {
    char* base;
    size_t used;  // bytes
} Arena;

// The next piece, aligned to 256 bytes as the base is to its own alignment; NULL when only counting.
static inline void* arena_take(Arena* arena, size_t bytes) {
    void* piece = arena->base ? arena->base + arena->used : NULL;
    arena->used += round_up(bytes, 256);
    return piece;
}

#endif
