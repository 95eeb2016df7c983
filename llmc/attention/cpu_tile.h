/*
What the forward and the backward of CPU attention share: the register-blocked product, packing,
and the softmax of one block of scores. Private to cpu_forward.c and cpu_backward.c.

Keys come in tiles of KEY_TILE, queries in tiles of QUERY_TILE and, inside a tile, in blocks of ROW_BLOCK
rows: the rows whose sums fit in registers beside BLOCK_VECTORS vectors of columns. Packed heads have D
columns, HS rounded up to whole vectors, the rest zero. Scores are in units of log 2: log2(e) is
multiplied into the packed queries and the bias table, and weights are powers of two.
*/
#ifndef ATTENTION_CPU_TILE_H
#define ATTENTION_CPU_TILE_H

#include <math.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "../arena.h"
#include "../backend.h"
#include "cpu_vector.h"

enum {
    ROW_BLOCK = 6,
    QUERY_TILE = 96,
    KEY_TILE = 64,
    TILE_VECTORS = KEY_TILE / LANES,
    SCORE_MARGIN = LANES < 8 ? 8 : LANES,  // on either side of a row of scores: one vector or more
    SCORE_STRIDE = KEY_TILE + 2 * SCORE_MARGIN,
    TABLE_MARGIN = QUERY_TILE + KEY_TILE + LANES,  // zeros around a reversed table: tiles reach past its ends
};

static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

static const float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;

// ----------------------------------------------------------------------------
// products

// sums[rows][vectors] += A B with A's element (r, k) at a[r * a_row + k * a_column] and B[depth][b_row].
// rows and vectors are constants after inlining, so that the sums stay in registers.
INLINE void multiply_block(Vector sums[ROW_BLOCK][BLOCK_VECTORS], size_t rows, size_t vectors, size_t depth,
                           const float* a, size_t a_row, size_t a_column, const float* b, size_t b_row) {
    for (size_t k = 0; k < depth; k++) {
        Vector b_vectors[BLOCK_VECTORS];
        UNROLL for (size_t n = 0; n < vectors; n++) { b_vectors[n] = load(b + k * b_row + n * LANES); }
        UNROLL for (size_t r = 0; r < rows; r++) {
            float x = a[r * a_row + k * a_column];
            UNROLL for (size_t n = 0; n < vectors; n++) { sums[r][n] += x * b_vectors[n]; }
        }
    }
}

// products[ROW_BLOCK][vectors] = a[ROW_BLOCK][D] tile[D][KEY_TILE] + bias[n - r] scale[r]; bias and scale may be NULL.
// The bias comes last: a sum that starts at a large bias would round at every step.
INLINE void score_columns(size_t vectors, size_t D, float* products, const float* a, const float* tile,
                          const float* bias, const float* scale) {
    Vector sums[ROW_BLOCK][BLOCK_VECTORS];
    UNROLL for (size_t r = 0; r < ROW_BLOCK; r++) {
        UNROLL for (size_t n = 0; n < vectors; n++) { sums[r][n] = splat(0.0f); }
    }
    multiply_block(sums, ROW_BLOCK, vectors, D, a, D, 1, tile, KEY_TILE);
    UNROLL for (size_t r = 0; r < ROW_BLOCK; r++) {
        UNROLL for (size_t n = 0; n < vectors; n++) {
            if (bias && scale) { sums[r][n] += load(bias - r + n * LANES) * scale[r]; }
            if (bias && !scale) { sums[r][n] += load(bias - r + n * LANES); }
            store(products + r * SCORE_STRIDE + n * LANES, sums[r][n]);
        }
    }
}

// The same for any number of vectors up to TILE_VECTORS.
INLINE void score_block(size_t vectors, size_t D, float* products, const float* a, const float* tile, const float* bias,
                        const float* scale) {
    size_t column = 0;
    for (; vectors >= BLOCK_VECTORS; vectors -= BLOCK_VECTORS, column += BLOCK_VECTORS * LANES) {
        score_columns(BLOCK_VECTORS, D, products + column, a, tile + column, bias ? bias + column : NULL, scale);
    }
    if (BLOCK_VECTORS > 2 && vectors == 3) {
        score_columns(3, D, products + column, a, tile + column, bias ? bias + column : NULL, scale);
    } else if (BLOCK_VECTORS > 2 && vectors == 2) {
        score_columns(2, D, products + column, a, tile + column, bias ? bias + column : NULL, scale);
    } else if (vectors == 1) {
        score_columns(1, D, products + column, a, tile + column, bias ? bias + column : NULL, scale);
    }
}

// out[rows][vectors] += A b[depth][vectors]; rows of out and b are D apart.
INLINE void accumulate_columns(size_t rows, size_t vectors, size_t D, float* out, size_t depth, const float* a,
                               size_t a_row, size_t a_column, const float* b) {
    Vector sums[ROW_BLOCK][BLOCK_VECTORS];
    UNROLL for (size_t r = 0; r < rows; r++) {
        UNROLL for (size_t n = 0; n < vectors; n++) { sums[r][n] = load(out + r * D + n * LANES); }
    }
    multiply_block(sums, rows, vectors, depth, a, a_row, a_column, b, D);
    UNROLL for (size_t r = 0; r < rows; r++) {
        UNROLL for (size_t n = 0; n < vectors; n++) { store(out + r * D + n * LANES, sums[r][n]); }
    }
}

// out[rows][D] += A b[depth][D], A as in multiply_block.
INLINE void accumulate_rows(size_t rows, size_t D, float* out, size_t depth, const float* a, size_t a_row,
                            size_t a_column, const float* b) {
    size_t vectors = D / LANES, d = 0;
    for (; vectors >= BLOCK_VECTORS; vectors -= BLOCK_VECTORS, d += BLOCK_VECTORS * LANES) {
        accumulate_columns(rows, BLOCK_VECTORS, D, out + d, depth, a, a_row, a_column, b + d);
    }
    if (BLOCK_VECTORS > 2 && vectors == 3) {
        accumulate_columns(rows, 3, D, out + d, depth, a, a_row, a_column, b + d);
    } else if (BLOCK_VECTORS > 2 && vectors == 2) {
        accumulate_columns(rows, 2, D, out + d, depth, a, a_row, a_column, b + d);
    } else if (vectors == 1) {
        accumulate_columns(rows, 1, D, out + d, depth, a, a_row, a_column, b + d);
    }
}

// ----------------------------------------------------------------------------
// packing: rows of heads lie kilobytes apart in the caller's arrays and would share few cache sets

// Columns d..d+LANES-1 of a head's row; 0 past its end.
INLINE Vector load_head(const float* row, size_t d, size_t HS) {
    if (d + LANES <= HS) { return load(row + d); }
    float part[LANES] = {0};
    memcpy(part, row + d, (HS - d) * sizeof(float));
    return load(part);
}

INLINE void store_head(float* row, size_t d, size_t HS, Vector x) {
    if (d + LANES <= HS) {
        store(row + d, x);
    } else {
        float part[LANES];
        store(part, x);
        memcpy(row + d, part, (HS - d) * sizeof(float));
    }
}

// packed[KEY_TILE][D] from `count` rows of a head; missing rows are 0.
INLINE void pack_rows(float* packed, const float* rows, size_t stride, size_t count, size_t D, size_t HS) {
    for (size_t j = 0; j < KEY_TILE; j++) {
        for (size_t d = 0; d < D; d += LANES) {
            store(packed + j * D + d, j < count ? load_head(rows + j * stride, d, HS) : splat(0.0f));
        }
    }
}

// LANES x LANES transposed by log2(LANES) perfect shuffles.
INLINE void transpose_square(Vector x[LANES]) {
    UNROLL for (int step = 1; step < LANES; step *= 2) {
        Vector y[LANES];
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = interleave_low(x[i], x[i + LANES / 2]);
            y[2 * i + 1] = interleave_high(x[i], x[i + LANES / 2]);
        }
        UNROLL for (int i = 0; i < LANES; i++) { x[i] = y[i]; }
    }
}

// packed[D][KEY_TILE] from `count` rows of a head; missing rows are 0.
INLINE void pack_transposed(float* packed, const float* rows, size_t stride, size_t count, size_t D, size_t HS) {
    for (size_t j = 0; j < KEY_TILE; j += LANES) {
        for (size_t d = 0; d < D; d += LANES) {
            Vector x[LANES];
            UNROLL for (size_t i = 0; i < LANES; i++) {
                x[i] = j + i < count ? load_head(rows + (j + i) * stride, d, HS) : splat(0.0f);
            }
            transpose_square(x);
            UNROLL for (size_t i = 0; i < LANES; i++) { store(packed + (d + i) * KEY_TILE + j, x[i]); }
        }
    }
}

// Rows of up to five arrays that the next head will read, fetched into the second-level cache a few at a time
// between tiles: strided rows escape the hardware's prefetcher.
typedef struct {
    const float* rows[5];
    size_t stride[5];
    size_t arrays, next, end;
} Prefetch;

static inline void prefetch_add(Prefetch* prefetch, const float* rows, size_t stride) {
    prefetch->rows[prefetch->arrays] = rows;
    prefetch->stride[prefetch->arrays++] = stride;
}

INLINE void prefetch_rows(Prefetch* prefetch, size_t count, size_t HS) {
    for (; count > 0 && prefetch->next < prefetch->end; count--, prefetch->next++) {
        for (size_t a = 0; a < prefetch->arrays; a++) {
            const float* row = prefetch->rows[a] + prefetch->next * prefetch->stride[a];
            for (size_t d = 0; d < HS; d += 16) { __builtin_prefetch(row + d, 0, 2); }
        }
    }
}

#include "cpu_mix.h"

// Calls an INLINE function f(D, HS, ...) with the usual head sizes as constants, so that inner loops are unrolled.
#define WITH_HEAD_SIZE(f, D, HS, ...)                  \
    do {                                               \
        switch (HS) {                                  \
            case 32: f(32, 32, __VA_ARGS__); break;    \
            case 48: f(48, 48, __VA_ARGS__); break;    \
            case 64: f(64, 64, __VA_ARGS__); break;    \
            case 96: f(96, 96, __VA_ARGS__); break;    \
            case 128: f(128, 128, __VA_ARGS__); break; \
            default: f(D, HS, __VA_ARGS__); break;     \
        }                                              \
    } while (0)

// ----------------------------------------------------------------------------
// one query head

typedef struct {
    const AttentionInput* in;
    size_t batch, query_head, kv_head;
    size_t offset;                      // position of query 0
    const int* start;                   // of this sequence, or NULL
    const float* log_count;             // of this sequence, or NULL
    const float* bias;                  // reversed table times log2(e): bias[j - i] = P(i - j); or NULL
    const float *by_key, *by_key_rest;  // of this head, whole numbers and what is left, up to a whole tile; or NULL
    bool capped;                        // soft-capping: packed queries are without g log2(e)
    float sink;                         // logit of the sink times log2(e), -infinity without one
    const MixTables* mix;               // NULL without tables weighted by the query
} Head;

// Tables that the kernels read in place of the caller's.
typedef struct {
    float *by_distance, *by_key;  // [NH][table_floats], [B * NH][2][key_floats]
    MixTables mix;
} Tables;

static inline size_t table_floats(const AttentionInput* in) { return in->size.Tk + 2 * TABLE_MARGIN; }
static inline size_t key_floats(const AttentionInput* in) { return round_up(in->size.Tk, KEY_TILE); }

static inline Head make_head(const AttentionInput* in, size_t batch, size_t query_head, const Tables* tables) {
    Head head;
    head.in = in;
    head.batch = batch, head.query_head = query_head, head.kv_head = query_head * in->size.NKV / in->size.NH;
    head.offset = in->size.Tk - in->size.Tq;
    head.start = in->start ? in->start + batch * in->size.Tq : NULL;
    head.log_count = attention_has(in, TERM_SCALE) ? in->logit.log_count + batch * in->size.Tq : NULL;
    const float *distances = tables->by_distance + query_head * table_floats(in) + TABLE_MARGIN + in->size.Tk - 1,
                *keys = tables->by_key + (batch * in->size.NH + query_head) * 2 * key_floats(in);
    head.bias = attention_has(in, TERM_DISTANCE) ? distances : NULL;
    head.by_key = attention_has(in, TERM_KEY) ? keys : NULL;
    head.by_key_rest = head.by_key ? keys + key_floats(in) : NULL;
    head.capped = attention_has(in, TERM_CAP);
    head.sink = attention_has(in, TERM_SINK) ? in->logit.sink[query_head] * LOG2_E : -INFINITY;
    head.mix = attention_has(in, TERM_MIX) ? &tables->mix : NULL;
    return head;
}

static inline size_t first_visible(const Head* head, size_t query) {
    return head->start ? (size_t)head->start[query] : 0;
}

// Is the softmax of this query constant? Not beside a sink.
static inline bool sees_one_key(const Head* head, size_t query) {
    return first_visible(head, query) == head->offset + query && head->sink == -INFINITY;
}

// g of a query: the factor of its logits.
static inline float row_scale(const Head* head, size_t query) {
    return head->log_count ? head->in->logit.seq_scale[head->query_head] * head->log_count[query] : 1.0f;
}

static inline const float* query_row(const Head* head, size_t query) {
    const AttentionInput* in = head->in;
    return in->q + head->batch * in->q_batch + query * in->q_stride + head->query_head * in->size.HS;
}

static inline const float* mix_row(const Head* head, size_t query) {
    const AttentionInput* in = head->in;
    return in->logit.mix + head->batch * in->logit.mix_batch + query * in->logit.mix_stride +
           head->query_head * in->size.mixes;
}

// Where the rows of this head's keys (or values) begin.
static inline size_t kv_offset(const AttentionInput* in, size_t batch, size_t kv_head) {
    return batch * in->kv_batch + kv_head * in->size.HS;
}

// Columns low..high-1 of the tile at `key` hold everything that queries first..last may see.
typedef struct {
    size_t low, high;
    bool masked;  // some query sees only a part of the tile
} Columns;

INLINE Columns visible_columns(const Head* head, size_t first, size_t last, size_t key) {
    size_t end = head->offset + last + 1, start = first_visible(head, first);
    Columns c;
    c.low = start > key ? start - key : 0;
    c.high = end > key ? min_size(end - key, KEY_TILE) : 0;
    c.masked = key + KEY_TILE > head->offset + first + 1 || (head->start && first_visible(head, last) > key);
    return c;
}

// ----------------------------------------------------------------------------
// softmax of one row block

// A tile of packed queries with the state of their running softmax (Milakov & Gimelshein 2018).
typedef struct {
    size_t first, count;  // queries first..first+count-1; rows up to a multiple of ROW_BLOCK are 0
    float* q;             // [rows][D], times g log2(e) / sqrt(HS), or times 1 / sqrt(HS) when capped
    float* scale;         // [rows]: g, 0 in padding rows
    float* out;           // [rows][D], sums of weights times values; NULL when only the weights' sum is wanted
    float* sum;           // [rows][LANES], sums of weights
    float* reference;     // [rows], subtracted from the scores; -infinity before the first visible key
    float* mix;           // [rows][columns of MixTables], times log2(e) and, inside the scale, g
} QueryTile;

INLINE size_t last_of_block(const QueryTile* tile, size_t row) {
    return tile->first + min_size(row + ROW_BLOCK, tile->count) - 1;
}

static inline ptrdiff_t positions_after(const Head* head, size_t first, size_t key) {
    return (ptrdiff_t)(head->offset + first) - (ptrdiff_t)key;
}

// The number of a key less that of another: whole numbers first, which is exact wherever the difference is small.
static inline float key_difference(const Head* head, size_t key, size_t other) {
    return (head->by_key[key] - head->by_key[other]) + (head->by_key_rest[key] - head->by_key_rest[other]);
}

// The same for the keys of a tile.
INLINE Vector key_differences(const Head* head, size_t first_key, size_t other) {
    return (load(head->by_key + first_key) - head->by_key[other]) +
           (load(head->by_key_rest + first_key) - head->by_key_rest[other]);
}

// The position of a query; that of the last one for padding rows.
static inline size_t query_position(const Head* head, size_t query) {
    return min_size(head->offset + query, head->in->size.Tk - 1);
}

// The terms of the general instance: products (with the table by distance, unless they are capped) become scores.
// capped[ROW_BLOCK][SCORE_STRIDE] receives the capped products; NULL where nobody needs them.
static inline void apply_terms(const Head* head, float* scores, float* capped, size_t vectors, size_t first, size_t key,
                               const float* scale, const float* mix) {
    const LogitTerms* logit = &head->in->logit;
    const float* bias = head->capped && head->bias ? head->bias - (head->offset + first) + key : NULL;
    const float inverse = 1.0f / logit->cap;
    const size_t position = query_position(head, first);
    float keys[KEY_TILE];  // against the block's first query
    for (size_t n = 0; head->by_key && n < vectors * LANES; n += LANES) {
        store(keys + n, key_differences(head, key + n, position));
    }
    for (size_t r = 0; r < ROW_BLOCK; r++) {
        const float factor = logit->inside ? scale[r] : 1.0f;
        const float own = head->by_key ? key_difference(head, query_position(head, first + r), position) : 0.0f;
        for (size_t n = 0; n < vectors * LANES; n += LANES) {
            float* at = scores + r * SCORE_STRIDE + n;
            Vector x = load(at);
            if (head->capped) {
                x = vector_tanh(x * inverse, logit->cap_approximate) * logit->cap;
                if (capped) { store(capped + r * SCORE_STRIDE + n, x); }
                x *= scale[r] * LOG2_E;
            }
            if (bias) { x += load(bias - r + n) * factor; }
            if (head->by_key) { x += (load(keys + n) - own) * (factor * LOG2_E); }
            store(at, x);
        }
    }
    if (head->mix) { mix_add(scores, vectors, head->mix, mix, positions_after(head, first, key)); }
}

// scores[ROW_BLOCK][SCORE_STRIDE] of queries first.. against the key tile at `key`, all terms included; capped as
// above.
INLINE void score_rows(const Head* head, size_t D, float* scores, float* capped, size_t vectors, size_t first,
                       size_t key, const float* q, const float* scale, const float* mix, const float* keys) {
    if (head->capped) {
        score_block(vectors, D, scores, q, keys, NULL, NULL);
        apply_terms(head, scores, capped, vectors, first, key, scale, mix);
        return;
    }
    const float* bias = head->bias ? head->bias - (head->offset + first) + key : NULL;
    if (!bias) {
        score_block(vectors, D, scores, q, keys, NULL, NULL);
    } else if (head->in->logit.inside) {
        score_block(vectors, D, scores, q, keys, bias, scale);
    } else {
        score_block(vectors, D, scores, q, keys, bias, NULL);
    }
    if (head->by_key) {
        apply_terms(head, scores, NULL, vectors, first, key, scale, mix);
    } else if (head->mix) {
        mix_add(scores, vectors, head->mix, mix, positions_after(head, first, key));
    }
}

// Scores of invisible keys become -infinity. Padding rows repeat the last query's mask.
static inline void mask_rows(const Head* head, float* scores, size_t vectors, size_t first, size_t last, size_t key) {
    for (size_t r = 0; r < ROW_BLOCK; r++) {
        size_t query = min_size(first + r, last);
        Columns c = visible_columns(head, query, query, key);
        for (size_t n = 0; n < vectors * LANES; n += LANES) {
            float* x = scores + r * SCORE_STRIDE + n;
            store(x, keep_columns(load(x), n, c.low, c.high, -INFINITY));
        }
    }
}

// The reference of a row moves only when a score exceeds it by more than 8, so weights stay below 2^8 and
// the sums are hardly ever rescaled.
INLINE void raise_references(QueryTile* tile, size_t D, const float* scores, size_t vectors, size_t row) {
    const float limit = 8.0f;
    Vector highest = splat(-INFINITY);
    UNROLL for (size_t r = 0; r < ROW_BLOCK; r++) {
        float reference = tile->reference[row + r];
        UNROLL for (size_t n = 0; n < TILE_VECTORS; n++) {
            // -infinity - -infinity is NaN and is passed over
            if (n < vectors) { highest = vector_max(load(scores + r * SCORE_STRIDE + n * LANES) - reference, highest); }
        }
    }
    if (!any_lane_above(highest, limit)) { return; }
    for (size_t r = 0; r < ROW_BLOCK; r++) {
        Vector row_highest = splat(-INFINITY);
        for (size_t n = 0; n < vectors; n++) {
            row_highest = vector_max(load(scores + r * SCORE_STRIDE + n * LANES), row_highest);
        }
        float old = tile->reference[row + r], reference = largest_lane(row_highest);
        if (!(reference - old > limit)) { continue; }
        tile->reference[row + r] = reference;
        if (old == -INFINITY) { continue; }  // the sums are still 0
        Vector factor = vector_exp2(splat(old - reference));
        for (size_t d = 0; tile->out && d < D; d += LANES) {
            float* out = tile->out + (row + r) * D + d;
            store(out, load(out) * factor);
        }
        store(tile->sum + (row + r) * LANES, load(tile->sum + (row + r) * LANES) * factor);
    }
}

// Turns the scores of a block into weights and adds them to the sums.
INLINE void exponentiate_rows(QueryTile* tile, float* scores, size_t vectors, size_t row) {
    for (size_t r = 0; r < ROW_BLOCK; r++) {
        float reference = tile->reference[row + r];
        if (reference == -INFINITY) { reference = 0.0f; }  // a row that sees nothing yet: all scores are -infinity
        Vector sum = load(tile->sum + (row + r) * LANES);
        UNROLL for (size_t n = 0; n < TILE_VECTORS; n++) {
            if (n < vectors) {
                float* x = scores + r * SCORE_STRIDE + n * LANES;
                Vector weight = vector_exp2(load(x) - reference);
                sum += weight;
                store(x, weight);
            }
        }
        store(tile->sum + (row + r) * LANES, sum);
    }
}

// Weights of rows row..row+ROW_BLOCK-1 of the query tile on the key tile at `key`, left in scores. Returns the
// columns that may be non-zero.
INLINE Columns softmax_block(const Head* head, size_t D, QueryTile* tile, size_t row, size_t key, const float* keys,
                             float* scores) {
    size_t first = tile->first + row, last = last_of_block(tile, row);
    Columns columns = visible_columns(head, first, last, key);
    if (columns.low >= columns.high) { return columns; }
    size_t vectors = (columns.high + LANES - 1) / LANES;
    const float* mix = head->mix ? tile->mix + row * head->mix->columns : NULL;
    score_rows(head, D, scores, NULL, vectors, first, key, tile->q + row * D, tile->scale + row, mix, keys);
    if (columns.masked) { mask_rows(head, scores, vectors, first, last, key); }
    raise_references(tile, D, scores, vectors, row);
    exponentiate_rows(tile, scores, vectors, row);
    return columns;
}

// Packs query rows of the tile: q times g log2(e) / sqrt(HS), or times 1 / sqrt(HS) when capped; and g.
INLINE void pack_queries(size_t D, size_t HS, const Head* head, QueryTile* tile) {
    float factor = (head->capped ? 1.0f : LOG2_E) / sqrtf((float)HS);
    for (size_t r = 0; r < round_up(tile->count, ROW_BLOCK); r++) {
        bool real = r < tile->count;
        float g = real ? row_scale(head, tile->first + r) : 0.0f;
        const float* q = query_row(head, tile->first + (real ? r : 0));
        float row_factor = head->capped ? (real ? 1.0f : 0.0f) : g;
        tile->scale[r] = g;
        for (size_t d = 0; d < D; d += LANES) {
            store(tile->q + r * D + d, load_head(q, d, HS) * (row_factor * factor));
        }
        if (head->mix) {
            float mix_factor = real ? LOG2_E * (head->in->logit.inside ? g : 1.0f) : 0.0f;
            const float* mix = mix_row(head, tile->first + (real ? r : 0));
            mix_pack(tile->mix + r * head->mix->columns, head->mix, mix, mix_factor);
        }
    }
}

static inline void reset_softmax(QueryTile* tile, size_t D) {
    size_t rows = round_up(tile->count, ROW_BLOCK);
    if (tile->out) { memset(tile->out, 0, rows * D * sizeof(float)); }
    memset(tile->sum, 0, rows * LANES * sizeof(float));
    for (size_t r = 0; r < rows; r++) { tile->reference[r] = -INFINITY; }
}

// ----------------------------------------------------------------------------
// threads and workspace

static inline size_t attention_threads(void) {
#ifdef _OPENMP
    return (size_t)omp_get_max_threads();
#else
    return 1;
#endif
}

static inline size_t thread_number(void) {
#ifdef _OPENMP
    return (size_t)omp_get_thread_num();
#else
    return 0;
#endif
}

static inline float* take(Arena* arena, size_t floats) { return (float*)arena_take(arena, floats * sizeof(float)); }

// Whether the threads share each key/value head instead of taking whole ones: when whole heads would leave
// more than an eighth of the threads' time unused.
static inline bool share_heads(const AttentionInput* in) {
    size_t heads = in->size.B * in->size.NKV, threads = attention_threads();
    size_t rounds = (heads + threads - 1) / threads;
    return heads * 8 < rounds * threads * 7;
}

// Packed key/value heads that exist at once.
static inline size_t head_slots(const AttentionInput* in) {
    size_t heads = in->size.B * in->size.NKV, threads = attention_threads();
    return share_heads(in) || heads < threads ? heads : threads;
}

static inline size_t packed_columns(const AttentionInput* in) { return round_up(in->size.HS, LANES); }

// Takes room for the tables of the input's terms; fills them: by_distance reversed between zeros and times log2(e),
// by_key in two parts.
Tables take_tables(Arena* arena, const AttentionInput* in);
void fill_tables(const Tables* tables, const AttentionInput* in);

// Bytes of workspace that attention_backward takes.
size_t attention_backward_bytes(const AttentionInput* in);

#endif
