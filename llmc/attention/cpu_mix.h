/*
Tables by distance weighted by the query, on the CPU: the bias that a block of scores gets, and the gradients of weights
and tables. Private to cpu_tile.h, whose products it is made of.

In a tile the bias of query u of a block and column n is sum_r mix[u][r] mixed[r][d], d = position + u - key - n. Along
x = n + ROW_BLOCK - 1 - u the distance is the same in all rows, so one product of mix with a band of reversed tables,
KEY_TILE + ROW_BLOCK - 1 wide, serves the whole block; its row u is then read from x = ROW_BLOCK - 1 - u on. The
gradient of mix is a product with the same band: a row of scores and its next one column further have the same x, so a
block of dZ is read with rows of SCORE_STRIDE + 1. The gradient of the tables is a sum along diagonals, weighted by mix.
*/
#ifndef ATTENTION_CPU_MIX_H
#define ATTENTION_CPU_MIX_H

enum { MIX_SKEW = ROW_BLOCK - 1 };

// Compiled once and not with every head size that calls it.
#define ONCE static __attribute__((noinline, unused))

_Static_assert((int)SCORE_MARGIN > (int)MIX_SKEW, "bands of scores reach into the margins of their rows");

// The tables of one layer as tiles read them. mixes is 0 without TERM_MIX.
typedef struct {
    size_t mixes, columns;  // numbers of a query; the same up to whole vectors, the width of packed rows
    size_t length, stride;  // distances below this; elements between reversed tables
    float* reversed;        // [mixes][stride]: distance d at TABLE_MARGIN + length - 1 - d, zeros around
    float* transposed;      // [stride][columns]: the same for the backward; NULL in the forward
} MixTables;

// Sizes alone. Rows that are an odd number of vectors apart do not fall into the same cache sets.
static inline MixTables mix_sizes(const AttentionInput* in) {
    MixTables t;
    memset(&t, 0, sizeof t);
    if (!attention_has(in, TERM_MIX)) { return t; }
    t.mixes = in->size.mixes, t.columns = round_up(in->size.mixes, LANES);
    t.length = min_size(in->size.mixed_length, in->size.Tk);
    t.stride = round_up(t.length + 2 * TABLE_MARGIN, 32) + 16;
    return t;
}

// Where distance d is in a row of a reversed table.
static inline size_t mix_place(const MixTables* t, size_t distance) { return TABLE_MARGIN + t->length - 1 - distance; }

// Where the band of a block begins whose first query is `back` positions after the tile's first key, or before it where
// negative; x = 0 is distance back + MIX_SKEW.
static inline size_t mix_band(const MixTables* t, ptrdiff_t back) {
    return (size_t)((ptrdiff_t)mix_place(t, 0) - back) - MIX_SKEW;
}

// Are all distances of the block beyond the tables?
static inline bool mix_beyond(const MixTables* t, ptrdiff_t back) {
    return back >= (ptrdiff_t)t->length + KEY_TILE - 1;
}

INLINE void mix_columns(size_t vectors, const MixTables* t, float* products, const float* mix, const float* band) {
    Vector sums[ROW_BLOCK][BLOCK_VECTORS];
    UNROLL for (size_t r = 0; r < ROW_BLOCK; r++) {
        UNROLL for (size_t n = 0; n < vectors; n++) { sums[r][n] = splat(0.0f); }
    }
    multiply_block(sums, ROW_BLOCK, vectors, t->mixes, mix, t->columns, 1, band, t->stride);
    UNROLL for (size_t r = 0; r < ROW_BLOCK; r++) {
        UNROLL for (size_t n = 0; n < vectors; n++) { store(products + r * SCORE_STRIDE + n * LANES, sums[r][n]); }
    }
}

// scores[ROW_BLOCK][vectors] += the bias of packed weights mix[ROW_BLOCK][columns].
ONCE void mix_add(float* scores, size_t vectors, const MixTables* t, const float* mix, ptrdiff_t back) {
    if (mix_beyond(t, back)) { return; }
    float products[ROW_BLOCK * SCORE_STRIDE];
    const float* band = t->reversed + mix_band(t, back);
    size_t x = 0, left = vectors + (MIX_SKEW + LANES - 1) / LANES;
    for (; left >= BLOCK_VECTORS; left -= BLOCK_VECTORS, x += BLOCK_VECTORS * LANES) {
        mix_columns(BLOCK_VECTORS, t, products + x, mix, band + x);
    }
    for (; left > 0; left--, x += LANES) { mix_columns(1, t, products + x, mix, band + x); }
    for (size_t r = 0; r < ROW_BLOCK; r++) {
        for (size_t n = 0; n < vectors * LANES; n += LANES) {
            float* at = scores + r * SCORE_STRIDE + n;
            store(at, load(at) + load(products + r * SCORE_STRIDE + n + MIX_SKEW - r));
        }
    }
}

// dmix[ROW_BLOCK][columns] += dZ times the tables, for dZ in columns low..high-1 and 0 elsewhere, margins included.
ONCE void mix_accumulate_weights(float* dmix, const MixTables* t, const float* dscores, size_t low, size_t high,
                                 ptrdiff_t back) {
    if (mix_beyond(t, back)) { return; }
    const float* band = t->transposed + (mix_band(t, back) + low) * t->columns;
    accumulate_rows(ROW_BLOCK, t->columns, dmix, high - low + MIX_SKEW, dscores + low - MIX_SKEW, SCORE_STRIDE + 1, 1,
                    band);
}

// A vector of neighbouring diagonals, for LANES tables: tables[m] += sum over rows of mix[row][m] dZ[row].
INLINE void mix_diagonals(float* tables, size_t stride, const float* mix, size_t columns, const float* dscores,
                          ptrdiff_t low, ptrdiff_t high) {
    Vector sums[LANES];
    UNROLL for (size_t m = 0; m < LANES; m++) { sums[m] = load(tables + m * stride); }
    for (ptrdiff_t r = low; r < high; r++) {
        Vector dz = load(dscores + r * (SCORE_STRIDE + 1));
        UNROLL for (size_t m = 0; m < LANES; m++) { sums[m] += mix[(size_t)r * columns + m] * dz; }
    }
    UNROLL for (size_t m = 0; m < LANES; m++) { store(tables + m * stride, sums[m]); }
}

// dtables[columns][stride], reversed like the tables, += the diagonals of dZ in rows low..high-1 of a query tile, whose
// first query is `back` positions after the first key (before it where negative).
ONCE void mix_accumulate_tables(float* dtables, const MixTables* t, const float* mix, const float* dscores,
                                ptrdiff_t live_low, ptrdiff_t live_high, ptrdiff_t back) {
    for (ptrdiff_t e = -(ptrdiff_t)round_up((size_t)live_high - 1, LANES); e < KEY_TILE; e += LANES) {
        ptrdiff_t low = -e - LANES + 1 > live_low ? -e - LANES + 1 : live_low;
        ptrdiff_t high = KEY_TILE - e < live_high ? KEY_TILE - e : live_high;
        ptrdiff_t farthest = back - e, nearest = farthest - LANES + 1;
        if (low >= high || farthest < 0 || nearest >= (ptrdiff_t)t->length) { continue; }
        float* tables = dtables + ((ptrdiff_t)mix_place(t, 0) - farthest);
        for (size_t m = 0; m < t->columns; m += LANES) {
            mix_diagonals(tables + m * t->stride, t->stride, mix + m, t->columns, dscores + e, low, high);
        }
    }
}

// ----------------------------------------------------------------------------
// packing

static inline MixTables mix_take(Arena* arena, const AttentionInput* in) {
    MixTables t = mix_sizes(in);
    t.reversed = (float*)arena_take(arena, t.mixes * t.stride * sizeof(float));
    return t;
}

static inline void mix_reverse(const MixTables* t, const AttentionInput* in) {
    memset(t->reversed, 0, t->mixes * t->stride * sizeof(float));
    for (size_t r = 0; r < t->mixes; r++) {
        const float* table = in->logit.mixed + r * in->size.mixed_length;
        for (size_t d = 0; d < t->length; d++) { t->reversed[r * t->stride + mix_place(t, d)] = table[d]; }
    }
}

static inline void mix_transpose(const MixTables* t) {
    memset(t->transposed, 0, t->columns * t->stride * sizeof(float));
    for (size_t i = 0; i < t->stride; i++) {
        for (size_t r = 0; r < t->mixes; r++) { t->transposed[i * t->columns + r] = t->reversed[r * t->stride + i]; }
    }
}

// A packed row: the query's numbers, times a factor, then zeros.
static inline void mix_pack(float* packed, const MixTables* t, const float* mix, float factor) {
    for (size_t r = 0; r < t->columns; r++) { packed[r] = r < t->mixes ? mix[r] * factor : 0.0f; }
}

#endif
