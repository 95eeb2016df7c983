/*
Fused causal attention on the CPU, forward: tiles of scores stay in the first-level cache and the softmax
is kept running (Dao et al. 2022, algorithm 1). Contract in terms.h; kernels in cpu_tile.h.

A query tile meets its key tiles in ascending order whatever thread works on it and wherever its keys were
packed, so results do not depend on the number of threads. Three ways to share out the work:
- private: a thread packs a whole key/value head and runs every query that reads it;
- shared, when heads are few: all threads pack all heads, then take single query tiles;
- streamed, when the queries of a head fit in one tile (decoding): key tiles are packed as they are met.
*/
#include "cpu_tile.h"

// Rows of query state that a thread has room for when it streams: all queries that read one key/value head.
enum { STREAM_ROWS = 4 * QUERY_TILE };

typedef struct {
    const AttentionInput* in;
    floatX* out;
    float* lse;
    size_t D, group, key_tiles, query_tiles;
    bool shared, streamed;
    Tables tables;
    float *keys, *values;  // per slot: [key_tiles][D][KEY_TILE] and [key_tiles][KEY_TILE][D]
    char* scratch;         // per thread
    size_t scratch_bytes;
    size_t bytes;  // of workspace
} Forward;

typedef struct {
    float *scores, *keys, *values;  // a row block of scores; a streamed tile
    float* rows;                    // query tiles
} ForwardScratch;

static size_t row_floats(const Forward* f) { return 2 * f->D + LANES + 2 + f->tables.mix.columns; }

static ForwardScratch take_scratch(Arena* arena, const Forward* f, size_t rows) {
    ForwardScratch s;
    s.scores = take(arena, ROW_BLOCK * SCORE_STRIDE);
    s.keys = take(arena, KEY_TILE * f->D);
    s.values = take(arena, KEY_TILE * f->D);
    s.rows = take(arena, rows * row_floats(f));
    return s;
}

static Forward plan_forward(const AttentionInput* in, void* workspace) {
    Forward f;
    memset(&f, 0, sizeof f);
    f.in = in;
    f.D = packed_columns(in), f.group = in->size.NH / in->size.NKV;
    f.key_tiles = (in->size.Tk + KEY_TILE - 1) / KEY_TILE;
    f.query_tiles = (in->size.Tq + QUERY_TILE - 1) / QUERY_TILE;
    f.shared = share_heads(in);
    f.streamed = f.query_tiles == 1 && !f.shared && f.group * round_up(in->size.Tq, ROW_BLOCK) <= STREAM_ROWS;
    Arena arena = {(char*)workspace, 0}, one_thread = {NULL, 0};
    f.tables = take_tables(&arena, in);
    take_scratch(&one_thread, &f, STREAM_ROWS);
    f.scratch_bytes = one_thread.used;
    f.keys = take(&arena, head_slots(in) * f.key_tiles * KEY_TILE * f.D);
    f.values = take(&arena, head_slots(in) * f.key_tiles * KEY_TILE * f.D);
    f.scratch = (char*)arena_take(&arena, attention_threads() * f.scratch_bytes);
    f.bytes = arena.used;
    return f;
}

Tables take_tables(Arena* arena, const AttentionInput* in) {
    bool distance = attention_has(in, TERM_DISTANCE), key = attention_has(in, TERM_KEY);
    Tables t;
    t.by_distance = take(arena, distance ? in->size.NH * table_floats(in) : 0);
    t.by_key = take(arena, key ? in->size.B * in->size.NH * 2 * key_floats(in) : 0);
    t.mix = mix_take(arena, in);
    return t;
}

// Distances 0 .. seen-1 of a table of T.
static void reverse_table(float* table, const float* by_distance, size_t T, size_t seen) {
    memset(table, 0, TABLE_MARGIN * sizeof(float));
    memset(table + TABLE_MARGIN + T, 0, TABLE_MARGIN * sizeof(float));
    for (size_t d = 0; d < seen; d++) { table[TABLE_MARGIN + T - 1 - d] = by_distance[d] * LOG2_E; }
}

// Distances that queries see, and those of the rest of their tiles, which are computed and then masked: with a window
// the work for a token does not grow with what lies before it.
static size_t distances_seen(const AttentionInput* in) {
    const AttentionSizes* s = &in->size;
    size_t most = in->start ? 0 : s->Tk;
    for (size_t n = 0; in->start && n < s->B * s->Tq; n++) {
        size_t seen = s->Tk - s->Tq + n % s->Tq + 1 - (size_t)in->start[n];
        most = seen > most ? seen : most;
    }
    return min_size(most + KEY_TILE + ROW_BLOCK, s->Tk);
}

// Whole numbers of up to 2^24 are exact in fp32, and so are their differences; what is left of a number is at most a
// half and rounded by 2^-26.
static void split_keys(float* to, const double* by_key, size_t T, size_t padded) {
    for (size_t j = 0; j < padded; j++) {
        to[j] = j < T ? (float)rint(by_key[j]) : 0.0f;
        to[padded + j] = j < T ? (float)(by_key[j] - (double)to[j]) : 0.0f;
    }
}

void fill_tables(const Tables* tables, const AttentionInput* in) {
    size_t T = in->size.Tk, distances = attention_has(in, TERM_DISTANCE) ? in->size.NH : 0;
    size_t keys = attention_has(in, TERM_KEY) ? in->size.B * in->size.NH : 0;
    size_t seen = distances > 0 ? distances_seen(in) : 0;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < distances + keys; n++) {
        size_t row = n < distances ? n : n - distances;
        if (n < distances) {
            reverse_table(tables->by_distance + row * table_floats(in),
                          in->logit.by_distance + row * in->logit.distance_stride, T, seen);
        } else {
            split_keys(tables->by_key + row * 2 * key_floats(in), in->logit.by_key + row * in->logit.key_stride, T,
                       key_floats(in));
        }
    }
    if (attention_has(in, TERM_MIX)) { mix_reverse(&tables->mix, in); }
}

void attention_choose(const char* name, unsigned terms) {
    (void)terms;
    if (strcmp(name, "own") == 0) { return; }
    fatal(
        "--attention %s: this program was built for the CPU; build the one for CUDA with 'make cuda USE_CUDNN=1', or "
        "use --attention own",
        name);
}

size_t attention_workspace(const AttentionSizes* size, bool backward) {
    AttentionInput in;
    memset(&in, 0, sizeof in);
    in.size = *size;
    size_t bytes = 0;
    // fewer sequences may share heads and need more: enough for any number up to B, as for any shorter sequence
    for (in.size.B = 1; in.size.B <= size->B; in.size.B++) {
        size_t forward_bytes = plan_forward(&in, NULL).bytes;
        size_t backward_bytes = backward ? attention_backward_bytes(&in) : 0;
        size_t larger = forward_bytes > backward_bytes ? forward_bytes : backward_bytes;
        bytes = larger > bytes ? larger : bytes;
    }
    return bytes;
}

// ----------------------------------------------------------------------------
// tiles

INLINE void attend_rows(size_t D, size_t HS, const Head* head, QueryTile* tile, size_t key, const float* keys,
                        const float* values, float* scores, Prefetch* prefetch) {
    for (size_t row = 0; row < tile->count; row += ROW_BLOCK) {
        Columns c = softmax_block(head, D, tile, row, key, keys, scores);
        if (c.low >= c.high) { continue; }
        prefetch_rows(prefetch, 2, HS);
        accumulate_rows(ROW_BLOCK, D, tile->out + row * D, c.high - c.low, scores + c.low, SCORE_STRIDE, 1,
                        values + c.low * D);
    }
}

// Adds what the query tile sees in the key tile at `key`.
static void attend_tile(const Head* head, size_t D, QueryTile* tile, size_t key, const float* keys, const float* values,
                        float* scores, Prefetch* prefetch) {
    WITH_HEAD_SIZE(attend_rows, D, head->in->size.HS, head, tile, key, keys, values, scores, prefetch);
}

// Packs queries first.. of a head into the next piece of `rows`.
static QueryTile open_query_tile(const Head* head, size_t D, size_t first, float* rows) {
    QueryTile tile;
    tile.first = first;
    tile.count = min_size(head->in->size.Tq - first, QUERY_TILE);
    size_t padded = round_up(tile.count, ROW_BLOCK);
    tile.q = rows;
    tile.out = tile.q + padded * D;
    tile.sum = tile.out + padded * D;
    tile.mix = tile.sum + padded * LANES;
    tile.scale = tile.mix + padded * (head->mix ? head->mix->columns : 0);
    tile.reference = tile.scale + padded;
    WITH_HEAD_SIZE(pack_queries, D, head->in->size.HS, head, &tile);
    reset_softmax(&tile, D);
    return tile;
}

// What the sums of a row are multiplied by, and the logarithm to base 2 of the softmax's denominator, sink included.
typedef struct {
    float factor, log2_sum;
} Normalizer;

// For a head with a sink.
static Normalizer normalize_row(const Head* head, float sum, float reference) {
    Normalizer n;
    float highest = reference > head->sink ? reference : head->sink;
    float weights = exp2f(reference - highest), all = sum * weights + exp2f(head->sink - highest);
    n.factor = weights / all, n.log2_sum = highest + log2f(all);
    return n;
}

// Divides by the weights' sum and writes out and lse.
INLINE void write_rows(size_t D, size_t HS, const Forward* f, const Head* head, const QueryTile* tile) {
    const AttentionInput* in = f->in;
    for (size_t r = 0; r < tile->count; r++) {
        size_t query = tile->first + r, position = head->offset + query;
        float* out = f->out + ((head->batch * in->size.Tq + query) * in->size.NH + head->query_head) * HS;
        float sum = sum_lanes(load(tile->sum + r * LANES)), lse = tile->reference[r] * LN_2 + logf(sum);
        if (sees_one_key(head, query)) {
            const float* value = in->v + kv_offset(in, head->batch, head->kv_head) + position * in->kv_stride;
            memcpy(out, value, HS * sizeof(float));
        } else {
            float normalizer = 1.0f / sum;
            if (head->sink > -INFINITY) {
                Normalizer n = normalize_row(head, sum, tile->reference[r]);
                normalizer = n.factor, lse = n.log2_sum * LN_2;
            }
            for (size_t d = 0; d < D; d += LANES) { store_head(out, d, HS, load(tile->out + r * D + d) * normalizer); }
        }
        if (f->lse) { f->lse[(head->batch * in->size.NH + head->query_head) * in->size.Tq + query] = lse; }
    }
}

static void close_query_tile(const Forward* f, const Head* head, const QueryTile* tile) {
    WITH_HEAD_SIZE(write_rows, f->D, f->in->size.HS, f, head, tile);
}

INLINE void pack_keys(size_t D, size_t HS, const AttentionInput* in, size_t first, size_t count, float* keys,
                      float* values) {
    pack_transposed(keys, in->k + first, in->kv_stride, count, D, HS);
    pack_rows(values, in->v + first, in->kv_stride, count, D, HS);
}

static void pack_key_tile(const Forward* f, size_t batch, size_t kv_head, size_t key, float* keys, float* values) {
    const AttentionInput* in = f->in;
    size_t first = kv_offset(in, batch, kv_head) + key * in->kv_stride;
    size_t count = min_size(in->size.Tk - key, KEY_TILE);
    WITH_HEAD_SIZE(pack_keys, f->D, in->size.HS, in, first, count, keys, values);
}

// ----------------------------------------------------------------------------
// sharing out the work

static ForwardScratch thread_scratch(const Forward* f) {
    Arena arena = {f->scratch + thread_number() * f->scratch_bytes, 0};
    return take_scratch(&arena, f, STREAM_ROWS);
}

// First and one past the last key tile that a tile's queries see.
static size_t first_key_tile(const Head* head, size_t first_query) {
    return first_visible(head, first_query) / KEY_TILE;
}

static size_t end_key_tile(const Head* head, const QueryTile* tile) {
    return (head->offset + tile->first + tile->count - 1) / KEY_TILE + 1;
}

static void forward_query_tile(const Forward* f, const Head* head, size_t slot, size_t first, Prefetch* prefetch) {
    ForwardScratch scratch = thread_scratch(f);
    QueryTile tile = open_query_tile(head, f->D, first, scratch.rows);
    size_t tile_floats = KEY_TILE * f->D;
    for (size_t t = first_key_tile(head, first); t < end_key_tile(head, &tile); t++) {
        size_t at = (slot * f->key_tiles + t) * tile_floats;
        attend_tile(head, f->D, &tile, t * KEY_TILE, f->keys + at, f->values + at, scratch.scores, prefetch);
    }
    close_query_tile(f, head, &tile);
}

// The rows that the thread reads after query head `query_head` of a sequence; nothing when `more` is false.
static Prefetch prefetch_next(const AttentionInput* in, size_t batch, size_t query_head, bool more) {
    Prefetch prefetch;
    memset(&prefetch, 0, sizeof prefetch);
    query_head++;
    if (query_head == in->size.NH) { query_head = 0, batch++; }
    size_t group = in->size.NH / in->size.NKV;
    if (batch == in->size.B || (!more && query_head % group == 0)) { return prefetch; }
    prefetch.end = in->size.Tq;
    prefetch_add(&prefetch, in->q + batch * in->q_batch + query_head * in->size.HS, in->q_stride);
    if (query_head % group == 0) {
        size_t first = kv_offset(in, batch, query_head / group);
        prefetch_add(&prefetch, in->k + first, in->kv_stride);
        prefetch_add(&prefetch, in->v + first, in->kv_stride);
    }
    return prefetch;
}

// One key/value head and all queries that read it, by one thread.
static void forward_private(const Forward* f, size_t kv, bool more) {
    const AttentionInput* in = f->in;
    size_t batch = kv / in->size.NKV, kv_head = kv % in->size.NKV, slot = thread_number(),
           tile_floats = KEY_TILE * f->D;
    for (size_t h = kv_head * f->group; h < (kv_head + 1) * f->group; h++) {
        Head head = make_head(in, batch, h, &f->tables);
        for (size_t t = first_key_tile(&head, 0); h == kv_head * f->group && t < f->key_tiles; t++) {
            size_t at = (slot * f->key_tiles + t) * tile_floats;
            pack_key_tile(f, batch, kv_head, t * KEY_TILE, f->keys + at, f->values + at);
        }
        Prefetch prefetch = prefetch_next(in, batch, h, more);
        for (size_t t = 0; t < f->query_tiles; t++) { forward_query_tile(f, &head, slot, t * QUERY_TILE, &prefetch); }
    }
}

// The same, packing each key tile once for the one query tile of every head.
static void forward_streamed(const Forward* f, size_t kv) {
    const AttentionInput* in = f->in;
    size_t batch = kv / in->size.NKV, kv_head = kv % in->size.NKV;
    ForwardScratch scratch = thread_scratch(f);
    Head heads[STREAM_ROWS / ROW_BLOCK];
    QueryTile tiles[STREAM_ROWS / ROW_BLOCK];
    for (size_t g = 0; g < f->group; g++) {
        heads[g] = make_head(in, batch, kv_head * f->group + g, &f->tables);
        float* rows = scratch.rows + g * round_up(in->size.Tq, ROW_BLOCK) * row_floats(f);
        tiles[g] = open_query_tile(&heads[g], f->D, 0, rows);
    }
    Prefetch nothing;
    memset(&nothing, 0, sizeof nothing);
    for (size_t t = first_key_tile(&heads[0], 0); t < f->key_tiles; t++) {
        pack_key_tile(f, batch, kv_head, t * KEY_TILE, scratch.keys, scratch.values);
        for (size_t g = 0; g < f->group; g++) {
            attend_tile(&heads[g], f->D, &tiles[g], t * KEY_TILE, scratch.keys, scratch.values, scratch.scores,
                        &nothing);
        }
    }
    for (size_t g = 0; g < f->group; g++) { close_query_tile(f, &heads[g], &tiles[g]); }
}

// All heads packed by all threads, then single query tiles, the longest first.
static void forward_shared(const Forward* f) {
    const AttentionInput* in = f->in;
    size_t heads = in->size.B * in->size.NKV, tile_floats = KEY_TILE * f->D;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < heads * f->key_tiles; n++) {
        size_t kv = n / f->key_tiles, batch = kv / in->size.NKV, t = n % f->key_tiles;
        Head head = make_head(in, batch, kv % in->size.NKV * f->group, &f->tables);
        if (t < first_key_tile(&head, 0)) { continue; }
        pack_key_tile(f, batch, head.kv_head, t * KEY_TILE, f->keys + n * tile_floats, f->values + n * tile_floats);
    }
    size_t query_heads = in->size.B * in->size.NH;
#pragma omp parallel for schedule(dynamic)
    for (size_t n = 0; n < f->query_tiles * query_heads; n++) {
        size_t t = f->query_tiles - 1 - n / query_heads, h = n % query_heads;
        Head head = make_head(in, h / in->size.NH, h % in->size.NH, &f->tables);
        Prefetch nothing;
        memset(&nothing, 0, sizeof nothing);
        forward_query_tile(f, &head, head.batch * in->size.NKV + head.kv_head, t * QUERY_TILE, &nothing);
    }
}

void attention_forward(floatX* out, float* lse, const AttentionInput* in, void* workspace) {
    Forward f = plan_forward(in, workspace);
    f.out = out, f.lse = lse;
    fill_tables(&f.tables, in);
    if (f.shared) {
        forward_shared(&f);
        return;
    }
    // a thread takes some neighbouring heads at a time, so that prefetching the next one is of use
    size_t heads = in->size.B * in->size.NKV, chunk = heads / (4 * attention_threads());
    chunk = chunk ? chunk : 1;
#pragma omp parallel for schedule(dynamic, chunk)
    for (size_t kv = 0; kv < heads; kv++) {
        if (f.streamed) {
            forward_streamed(&f, kv);
        } else {
            forward_private(&f, kv, (kv + 1) % chunk != 0);
        }
    }
}
