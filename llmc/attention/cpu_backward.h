/*
What the backward of CPU attention keeps of heads while it walks over pairs of tiles: the plan of its workspace, packing
at the start, and what is written out at the end. Private to cpu_backward.c, whose head has the formulas.
*/
#ifndef ATTENTION_CPU_BACKWARD_H
#define ATTENTION_CPU_BACKWARD_H

#include "cpu_tile.h"

// Beyond this |lse|, rounding lse to fp32 would show in the weights (half an ulp of 64 is 2e-6): the softmax
// of such rows is computed again instead.
static const float LSE_LIMIT = 64.0f;

// Whole vectors of diagonals of one tile must not reach into those of the next tile pair.
_Static_assert(QUERY_TILE % LANES == 0 && KEY_TILE % LANES == 0 && QUERY_TILE % ROW_BLOCK == 0, "tile sizes");

// What is kept of one key/value head.
typedef struct {
    float *keys, *keys_transposed, *values_transposed;  // [key_tiles] tiles
    float *dkeys, *dvalues;                             // [key_tiles] tiles of rows
} KeyBuffers;

// What is kept of one query head; rows of all queries, up to a multiple of QUERY_TILE.
typedef struct {
    float *q, *dout, *dq;              // [rows][D]; q as in QueryTile; dq without its factor g / sqrt(HS)
    float *reference, *delta, *scale;  // [rows]: log2 of the softmax's denominator, D_i, g_i
    float* capped;                     // [rows]: sum_j dZ_ij c_ij, the capped products' part of the gradient of g_i
    float *mix, *dmix;                 // [rows][columns of MixTables]: as in QueryTile; sum_j dZ_ij mixed[r][i - j]
    float* keyed;  // [query_tiles]: the numbers by key's part of dseq_scale, against the first query's
} RowBuffers;

typedef struct {
    float *weights, *dscores;  // [QUERY_TILE][SCORE_STRIDE], inside the margins
    float* dproducts;          // the same for the gradient of the products, where capping makes it another
    float* capped;             // [ROW_BLOCK][SCORE_STRIDE] capped products
    float *sum, *reference;    // of one row block, to compute a softmax again
} BackwardScratch;

typedef struct {
    const AttentionInput* in;
    AttentionGradients to;
    const floatX *dout, *out;
    const float* lse;
    size_t D, group, key_tiles, query_tiles, slots;
    bool shared;
    Tables tables;
    float *dbias_tables, *dkey_tables;  // [B * NH] reversed tables by distance; [B * NH][key_floats]
    float* dmixed_tables;               // [B * NH][columns][stride] of MixTables
    float *dscale, *dsink;              // [B * NH][query_tiles]: the parts of dseq_scale of products and mix; dsink
    size_t* progress;                   // [slots][key_tiles]: query tiles passed, over all heads of the group
    size_t key_bytes, row_bytes, scratch_bytes;
    char *key_buffers, *row_buffers, *scratch;  // of the slots, of the threads
    size_t bytes;                               // of workspace
} Backward;

// ----------------------------------------------------------------------------
// workspace

static KeyBuffers take_keys(Arena* arena, const Backward* w) {
    size_t floats = w->key_tiles * KEY_TILE * w->D;
    KeyBuffers k;
    k.keys = take(arena, floats);
    k.keys_transposed = take(arena, floats);
    k.values_transposed = take(arena, floats);
    k.dkeys = take(arena, floats);
    k.dvalues = take(arena, floats);
    return k;
}

static RowBuffers take_rows(Arena* arena, const Backward* w) {
    size_t rows = w->query_tiles * QUERY_TILE;
    RowBuffers r;
    r.q = take(arena, rows * w->D);
    r.dout = take(arena, rows * w->D);
    r.dq = take(arena, rows * w->D);
    r.reference = take(arena, rows);
    r.delta = take(arena, rows);
    r.scale = take(arena, rows);
    r.capped = take(arena, attention_has(w->in, TERM_CAP) ? rows : 0);
    r.mix = take(arena, rows * w->tables.mix.columns);
    r.dmix = take(arena, rows * w->tables.mix.columns);
    r.keyed = take(arena, attention_has(w->in, TERM_KEY) ? w->query_tiles : 0);
    return r;
}

static BackwardScratch take_backward_scratch(Arena* arena, const AttentionInput* in) {
    bool capped = attention_has(in, TERM_CAP);
    BackwardScratch s;
    s.weights = take(arena, QUERY_TILE * SCORE_STRIDE);
    s.dscores = take(arena, QUERY_TILE * SCORE_STRIDE);
    s.dproducts = take(arena, capped ? QUERY_TILE * SCORE_STRIDE : 0);
    s.capped = take(arena, capped ? ROW_BLOCK * SCORE_STRIDE : 0);
    s.sum = take(arena, ROW_BLOCK * LANES);
    s.reference = take(arena, ROW_BLOCK);
    if (s.weights) { s.weights += SCORE_MARGIN, s.dscores += SCORE_MARGIN; }
    s.dproducts = capped && s.weights ? s.dproducts + SCORE_MARGIN : s.dscores;
    return s;
}

static Backward plan_backward(const AttentionInput* in, void* workspace) {
    Backward w;
    memset(&w, 0, sizeof w);
    w.in = in;
    w.D = packed_columns(in), w.group = in->size.NH / in->size.NKV;
    w.key_tiles = (in->size.Tk + KEY_TILE - 1) / KEY_TILE;
    w.query_tiles = (in->size.Tq + QUERY_TILE - 1) / QUERY_TILE;
    w.shared = share_heads(in), w.slots = head_slots(in);
    Arena keys = {NULL, 0}, rows = {NULL, 0}, scratch = {NULL, 0}, arena = {(char*)workspace, 0};
    w.tables = take_tables(&arena, in);
    MixTables* mix = &w.tables.mix;
    mix->transposed = take(&arena, mix->columns * mix->stride);
    take_keys(&keys, &w), take_rows(&rows, &w), take_backward_scratch(&scratch, in);
    w.key_bytes = keys.used, w.row_bytes = rows.used, w.scratch_bytes = scratch.used;
    size_t heads = in->size.B * in->size.NH;
    w.dbias_tables = take(&arena, attention_has(in, TERM_DISTANCE) ? heads * table_floats(in) : 0);
    w.dkey_tables = take(&arena, attention_has(in, TERM_KEY) ? heads * key_floats(in) : 0);
    w.dmixed_tables = take(&arena, heads * mix->columns * mix->stride);
    w.dscale = take(&arena, heads * w.query_tiles);
    w.dsink = take(&arena, attention_has(in, TERM_SINK) ? heads * w.query_tiles : 0);
    w.progress = (size_t*)arena_take(&arena, w.slots * w.key_tiles * sizeof(size_t));
    w.key_buffers = (char*)arena_take(&arena, w.slots * w.key_bytes);
    w.row_buffers = (char*)arena_take(&arena, w.slots * (w.shared ? w.group : 1) * w.row_bytes);
    w.scratch = (char*)arena_take(&arena, attention_threads() * w.scratch_bytes);
    w.bytes = arena.used;
    return w;
}

size_t attention_backward_bytes(const AttentionInput* in) { return plan_backward(in, NULL).bytes; }

static KeyBuffers slot_keys(const Backward* w, size_t slot) {
    Arena arena = {w->key_buffers + slot * w->key_bytes, 0};
    return take_keys(&arena, w);
}

static RowBuffers slot_rows(const Backward* w, size_t slot) {
    Arena arena = {w->row_buffers + slot * w->row_bytes, 0};
    return take_rows(&arena, w);
}

static BackwardScratch thread_scratch(const Backward* w) {
    Arena arena = {w->scratch + thread_number() * w->scratch_bytes, 0};
    return take_backward_scratch(&arena, w->in);
}

// ----------------------------------------------------------------------------
// packing and unpacking

INLINE void pack_keys(size_t D, size_t HS, const AttentionInput* in, const KeyBuffers* k, size_t at, size_t first,
                      size_t count) {
    pack_rows(k->keys + at, in->k + first, in->kv_stride, count, D, HS);
    pack_transposed(k->keys_transposed + at, in->k + first, in->kv_stride, count, D, HS);
    pack_transposed(k->values_transposed + at, in->v + first, in->kv_stride, count, D, HS);
    memset(k->dkeys + at, 0, KEY_TILE * D * sizeof(float));
    memset(k->dvalues + at, 0, KEY_TILE * D * sizeof(float));
}

static void open_key_tile(const Backward* w, const KeyBuffers* k, size_t batch, size_t kv_head, size_t tile) {
    const AttentionInput* in = w->in;
    size_t key = tile * KEY_TILE, first = kv_offset(in, batch, kv_head) + key * in->kv_stride;
    WITH_HEAD_SIZE(pack_keys, w->D, in->size.HS, in, k, key * w->D, first, min_size(in->size.Tk - key, KEY_TILE));
}

INLINE void write_keys(size_t D, size_t HS, const Backward* w, const KeyBuffers* k, size_t first, size_t key,
                       size_t count) {
    const float unit = attention_has(w->in, TERM_CAP) ? 1.0f : LN_2;  // the packed queries carry log2(e) or not
    for (size_t j = 0; j < count; j++) {
        size_t at = first + j * w->in->kv_stride, row = (key + j) * D;
        for (size_t d = 0; d < D; d += LANES) {
            store_head(w->to.dk + at, d, HS, load(k->dkeys + row + d) * unit);
            store_head(w->to.dv + at, d, HS, load(k->dvalues + row + d));
        }
    }
}

static void close_key_tile(const Backward* w, const KeyBuffers* k, size_t batch, size_t kv_head, size_t tile) {
    const AttentionInput* in = w->in;
    size_t key = tile * KEY_TILE, first = kv_offset(in, batch, kv_head) + key * in->kv_stride;
    WITH_HEAD_SIZE(write_keys, w->D, in->size.HS, w, k, first, key, min_size(in->size.Tk - key, KEY_TILE));
}

static size_t output_row(const Head* head, size_t query) {
    const AttentionInput* in = head->in;
    return ((head->batch * in->size.Tq + query) * in->size.NH + head->query_head) * in->size.HS;
}

// Packs dout and sets D_i and the reference of the rows of one query tile; dq = 0.
INLINE void pack_outputs(size_t D, size_t HS, const Backward* w, const Head* head, const RowBuffers* rows,
                         size_t first) {
    const AttentionInput* in = w->in;
    const float* lse = w->lse + (head->batch * in->size.NH + head->query_head) * in->size.Tq;
    for (size_t i = first; i < first + QUERY_TILE; i++) {
        bool real = i < in->size.Tq;
        size_t at = output_row(head, real ? i : 0);
        Vector delta = splat(0.0f);
        for (size_t d = 0; d < D; d += LANES) {
            Vector dout = real ? load_head(w->dout + at, d, HS) : splat(0.0f);
            delta += dout * load_head(w->out + at, d, HS);
            store(rows->dout + i * D + d, dout);
            store(rows->dq + i * D + d, splat(0.0f));
        }
        if (head->capped) { rows->capped[i] = 0.0f; }
        if (head->mix) { memset(rows->dmix + i * head->mix->columns, 0, head->mix->columns * sizeof(float)); }
        rows->delta[i] = real ? sum_lanes(delta) : 0.0f;
        rows->reference[i] = real ? lse[i] * LOG2_E : INFINITY;  // padding rows have weight 0
    }
}

// Rows of a block whose lse is too large: the reference becomes their exact running one, and the division by
// the sum of weights is multiplied into dout and D, which enter every gradient once.
static void recompute_softmax(const Backward* w, const Head* head, const KeyBuffers* k, const RowBuffers* rows,
                              QueryTile* block, const bool* wanted) {
    BackwardScratch scratch = thread_scratch(w);
    block->sum = scratch.sum, block->reference = scratch.reference;
    reset_softmax(block, w->D);
    size_t end = head->offset + block->first + block->count;
    for (size_t key = first_visible(head, block->first) / KEY_TILE * KEY_TILE; key < end; key += KEY_TILE) {
        softmax_block(head, w->D, block, 0, key, k->keys_transposed + key * w->D, scratch.weights);
    }
    for (size_t r = 0; r < block->count; r++) {
        if (!wanted[r]) { continue; }
        size_t i = block->first + r;
        float sum = sum_lanes(load(block->sum + r * LANES)), reference = block->reference[r];
        if (head->sink > -INFINITY) {
            float highest = reference > head->sink ? reference : head->sink;
            sum = sum * exp2f(reference - highest) + exp2f(head->sink - highest);
            reference = highest;
        }
        float normalizer = 1.0f / sum;
        rows->reference[i] = reference;
        rows->delta[i] *= normalizer;
        for (size_t d = 0; d < w->D; d += LANES) {
            float* dout = rows->dout + i * w->D + d;
            store(dout, load(dout) * normalizer);
        }
    }
}

static void open_query_tile(const Backward* w, const Head* head, const KeyBuffers* k, const RowBuffers* rows,
                            size_t tile) {
    const AttentionInput* in = w->in;
    const float* lse = w->lse + (head->batch * in->size.NH + head->query_head) * in->size.Tq;
    size_t first = tile * QUERY_TILE, end = min_size(first + QUERY_TILE, in->size.Tq);
    if (head->by_key) { rows->keyed[tile] = 0.0f; }
    WITH_HEAD_SIZE(pack_outputs, w->D, in->size.HS, w, head, rows, first);
    for (size_t i = first; i < first + QUERY_TILE; i += ROW_BLOCK) {
        QueryTile block;
        memset(&block, 0, sizeof block);
        block.first = i, block.count = i < end ? min_size(end - i, ROW_BLOCK) : 0;
        block.q = rows->q + i * w->D, block.scale = rows->scale + i;
        block.mix = rows->mix + i * w->tables.mix.columns;
        if (block.count == 0) {
            memset(block.q, 0, ROW_BLOCK * w->D * sizeof(float));
            memset(block.scale, 0, ROW_BLOCK * sizeof(float));
            memset(block.mix, 0, ROW_BLOCK * w->tables.mix.columns * sizeof(float));
            continue;
        }
        WITH_HEAD_SIZE(pack_queries, w->D, in->size.HS, head, &block);
        bool wanted[ROW_BLOCK], any = false;
        for (size_t r = 0; r < block.count; r++) {
            wanted[r] = fabsf(lse[i + r]) > LSE_LIMIT && !sees_one_key(head, i + r);
            any = any || wanted[r];
        }
        if (any) { recompute_softmax(w, head, k, rows, &block, wanted); }
    }
}

// Writes dmix of queries first..end-1; returns the part of their bias in the gradient of seq_scale.
static double write_mix(const Backward* w, const Head* head, const RowBuffers* rows, size_t first, size_t end) {
    const AttentionInput* in = w->in;
    const bool inside = in->logit.inside;
    double dscale = 0;
    for (size_t i = first; i < end; i++) {
        const float *mix = mix_row(head, i), *sums = rows->dmix + i * head->mix->columns;
        float *dmix = w->to.dmix + (mix - in->logit.mix), factor = inside ? rows->scale[i] : 1.0f, dot = 0.0f;
        for (size_t r = 0; r < head->mix->mixes; r++) {
            dot += sums[r] * mix[r];
            dmix[r] = sums[r] * factor;
        }
        if (inside && head->log_count) { dscale += (double)dot * (double)head->log_count[i]; }
    }
    return dscale;
}

// Writes dq of queries first..end-1 and the products' part of the gradient of seq_scale.
INLINE void write_queries(size_t D, size_t HS, const Backward* w, const Head* head, const RowBuffers* rows,
                          size_t first, size_t end, float* dscale) {
    float scale = 1.0f / sqrtf((float)HS);
    double sum = 0;
    for (size_t i = first; i < end; i++) {
        const float* q = query_row(head, i);
        float *dq = w->to.dq + (q - w->in->q), factor = head->capped ? scale : rows->scale[i] * scale;
        Vector dot = splat(0.0f);
        for (size_t d = 0; d < D; d += LANES) {
            Vector x = load(rows->dq + i * D + d);
            dot += x * load_head(q, d, HS);
            store_head(dq, d, HS, x * factor);
        }
        float products = head->capped ? rows->capped[i] : sum_lanes(dot) * scale;
        if (head->log_count) { sum += (double)products * (double)head->log_count[i]; }
    }
    *dscale = (float)sum;
}

// p_i D_i of a query, p_i the sink's weight: the sink has no value, so the gradient of its logit is -p_i D_i, and the
// dZ of the query's keys add up to p_i D_i. Rows whose softmax was computed again have the division by the sum of
// weights in D_i.
static double sink_share(const Head* head, const RowBuffers* rows, size_t query) {
    float weight = exp2f(head->sink - rows->reference[query]);
    return weight > 0.0f ? (double)weight * (double)rows->delta[query] : 0.0;
}

static float sink_gradient(const Head* head, const RowBuffers* rows, size_t first, size_t end) {
    double sum = 0;
    for (size_t i = first; i < end; i++) { sum -= sink_share(head, rows, i); }
    return (float)sum;
}

// A query's own number by key is taken from all its logits: its gradient is -sum_j dZ_ij, which is 0 but for a sink.
// Takes that from dkeys (in units of ln n_i where that is row_factor), and returns the queries' part of dseq_scale.
static double own_key_gradients(const Head* head, const RowBuffers* rows, size_t first, size_t end,
                                const float* row_factor, float* dkeys) {
    double part = 0;
    for (size_t i = first; i < end && head->sink > -INFINITY; i++) {
        double sum = sink_share(head, rows, i) * (row_factor ? (double)row_factor[i] : 1.0);
        dkeys[i] -= (float)sum;
        part -= sum * (double)key_difference(head, i, first);
    }
    return part;
}

static void close_query_tile(const Backward* w, const Head* head, const RowBuffers* rows, size_t tile) {
    const AttentionInput* in = w->in;
    size_t first = tile * QUERY_TILE, end = min_size(first + QUERY_TILE, in->size.Tq);
    size_t at = (head->batch * in->size.NH + head->query_head) * w->query_tiles + tile;
    WITH_HEAD_SIZE(write_queries, w->D, in->size.HS, w, head, rows, first, end, w->dscale + at);
    if (head->mix) { w->dscale[at] += (float)write_mix(w, head, rows, first, end); }
    if (attention_has(in, TERM_SINK)) { w->dsink[at] = sink_gradient(head, rows, first, end); }
    if (head->by_key) {
        const float* row_factor = in->logit.inside ? head->log_count : NULL;
        float* dkeys = w->dkey_tables + (head->batch * in->size.NH + head->query_head) * key_floats(in);
        double part = own_key_gradients(head, rows, first, end, row_factor, dkeys);
        if (row_factor) { w->dscale[at] += (float)(part + (double)rows->keyed[tile]); }
    }
}

#endif
