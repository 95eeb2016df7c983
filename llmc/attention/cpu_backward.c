/*
Fused causal attention on the CPU, backward: weights are recomputed tile by tile from lse (Dao et al. 2022,
algorithm 4). Contract in terms.h; kernels in cpu_tile.h.

With p the weights, D_i = dout_i.out_i and dZ_ij = p_ij (dout_i.v_j - D_i):
dv_j = sum_i p_ij dout_i, dq_i = g_i / sqrt(HS) sum_j dZ_ij k_j, dk_j = sum_i dZ_ij g_i q_i / sqrt(HS).
With the bias inside the scale, E(d) = sum over i - j = d of dZ_ij ln n_i gives dP(d) = s E(d) and the bias's
part of ds, sum_d P(d) E(d); q's part is sum_i ln n_i q_i.(dq_i without g_i). One-key rows have dZ = 0. With tables
weighted by the query, M_ir = sum_j dZ_ij mixed[r][i - j] gives dmix = g_i M_ir, dmixed[r][d] = sum over i - j = d of
mix[i,r] g_i dZ_ij, and their part of ds, sum_ir ln n_i mix[i,r] M_ir; outside the scale g_i is left out.

Every sum has one order, whatever the number of threads: for each query head in turn key tiles ascend, and
for each key tile query tiles ascend. A thread takes a whole key/value head, or, when heads are few, key
tiles: it then waits at each query tile until the key tile before its own has passed there. That keeps the
order of dq, and of dP too: tiles that meet on a diagonal are passed in the order of their keys, and threads
inside the same head are always at least one key tile and one query tile apart, so on different diagonals.
*/
#include <sched.h>

#include "cpu_backward.h"

// ----------------------------------------------------------------------------
// one query tile against one key tile

typedef struct {
    size_t key, first;           // first key and first query
    size_t live_low, live_high;  // rows of the tile with anything visible
    float *weights, *dscores;    // [QUERY_TILE][SCORE_STRIDE]
    float* dproducts;            // the same array as dscores unless capped
    float* capped;               // [ROW_BLOCK][SCORE_STRIDE]
} TilePair;

// One visible key: weight 1 there, no gradient of the score.
static void one_key_row(float* weights, float* dscores, size_t column) {
    memset(weights, 0, KEY_TILE * sizeof(float));
    memset(dscores, 0, KEY_TILE * sizeof(float));
    weights[column] = 1.0f;
}

// In place: scores become weights, dout.v becomes dZ; columns from `vectors` on become 0.
INLINE void differentiate_row(float* weights, float* dscores, size_t vectors, float reference, float delta) {
    UNROLL for (size_t n = 0; n < TILE_VECTORS; n++) {
        Vector p = splat(0.0f), dz = splat(0.0f);
        if (n < vectors) {
            p = vector_exp2(load(weights + n * LANES) - reference);
            dz = p * (load(dscores + n * LANES) - delta);
        }
        store(weights + n * LANES, p);
        store(dscores + n * LANES, dz);
    }
}

// The same where a part of the row is invisible.
static void differentiate_masked_row(const Head* head, size_t query, size_t key, float* weights, float* dscores,
                                     float reference, float delta) {
    Columns c = visible_columns(head, query, query, key);
    if (sees_one_key(head, query) && c.low < c.high) {
        one_key_row(weights, dscores, c.low);
        return;
    }
    for (size_t n = 0; n < KEY_TILE; n += LANES) {
        Vector p = splat(0.0f), dz = splat(0.0f);
        if (n < c.high && n + LANES > c.low) {
            p = keep_columns(vector_exp2(load(weights + n) - reference), n, c.low, c.high, 0.0f);
            dz = keep_columns(p * (load(dscores + n) - delta), n, c.low, c.high, 0.0f);
        }
        store(weights + n, p);
        store(dscores + n, dz);
    }
}

// From dZ of a row block through the cap, slope 1 - (c / cap)^2, to the gradient of the products; and sum_j dZ_ij c_ij.
static void differentiate_cap(const Head* head, float* dproducts, const float* dscores, const float* capped,
                              const float* scale, float* sums) {
    float inverse = 1.0f / head->in->logit.cap;
    for (size_t r = 0; r < ROW_BLOCK; r++) {
        Vector sum = splat(0.0f);
        for (size_t n = 0; n < KEY_TILE; n += LANES) {
            size_t at = r * SCORE_STRIDE + n;
            Vector dz = load(dscores + at), c = load(capped + at), share = c * inverse;
            IntVector none = (IntVector)(dz == 0.0f);  // capped is not set in columns that nobody sees
            sum += select_lanes(none, splat(0.0f), dz * c);
            store(dproducts + at, select_lanes(none, splat(0.0f), dz * (1.0f - share * share) * scale[r]));
        }
        sums[r] += sum_lanes(sum);
    }
}

// Weights and dZ of all live rows, and their part of dq.
INLINE void differentiate_rows(size_t D, size_t HS, const Backward* w, const Head* head, const KeyBuffers* k,
                               const RowBuffers* rows, TilePair* pair, Prefetch* prefetch) {
    size_t Tq = w->in->size.Tq, at = pair->key * D;
    pair->live_low = pair->live_high = 0;
    for (size_t r = 0; r < QUERY_TILE && pair->first + r < Tq; r += ROW_BLOCK) {
        size_t first = pair->first + r, last = min_size(first + ROW_BLOCK, Tq) - 1;
        Columns c = visible_columns(head, first, last, pair->key);
        if (c.low >= c.high) {
            if (pair->live_high > 0) { break; }
            continue;
        }
        if (pair->live_high == 0) { pair->live_low = r; }
        pair->live_high = r + ROW_BLOCK;
        size_t vectors = (c.high + LANES - 1) / LANES;
        float *weights = pair->weights + r * SCORE_STRIDE, *dscores = pair->dscores + r * SCORE_STRIDE;
        prefetch_rows(prefetch, 2, HS);
        const float* mix = head->mix ? rows->mix + first * head->mix->columns : NULL;
        score_rows(head, D, weights, pair->capped, vectors, first, pair->key, rows->q + first * D, rows->scale + first,
                   mix, k->keys_transposed + at);
        score_block(vectors, D, dscores, rows->dout + first * D, k->values_transposed + at, NULL, NULL);
        for (size_t u = 0; u < ROW_BLOCK; u++, weights += SCORE_STRIDE, dscores += SCORE_STRIDE) {
            float reference = rows->reference[first + u], delta = rows->delta[first + u];
            if (c.masked) {
                size_t query = min_size(first + u, last);
                differentiate_masked_row(head, query, pair->key, weights, dscores, reference, delta);
            } else {
                differentiate_row(weights, dscores, vectors, reference, delta);
            }
        }
        float* dproducts = pair->dproducts + r * SCORE_STRIDE;
        if (head->mix) {
            mix_accumulate_weights(rows->dmix + first * head->mix->columns, head->mix, pair->dscores + r * SCORE_STRIDE,
                                   c.low, c.high, positions_after(head, first, pair->key));
        }
        if (head->capped) {
            differentiate_cap(head, dproducts, pair->dscores + r * SCORE_STRIDE, pair->capped, rows->scale + first,
                              rows->capped + first);
        }
        accumulate_rows(ROW_BLOCK, D, rows->dq + first * D, c.high - c.low, dproducts + c.low, SCORE_STRIDE, 1,
                        k->keys + at + c.low * D);
    }
}

// dk += dZ^T q and dv += weights^T dout, a few keys at a time; q and dout are those of the tile's first row.
INLINE void accumulate_keys(const Head* head, size_t D, const TilePair* pair, const float* q, const float* dout,
                            float* dkeys, float* dvalues) {
    for (size_t c = 0; c < KEY_TILE; c += ROW_BLOCK) {
        size_t position = head->offset + pair->first, low = pair->live_low;
        if (pair->key + c > position + low) { low = pair->key + c - position; }  // earlier queries do not see it
        if (low >= pair->live_high) { break; }
        size_t depth = pair->live_high - low;
        const float *weights = pair->weights + low * SCORE_STRIDE + c, *dz = pair->dproducts + low * SCORE_STRIDE + c;
        float *dvalue = dvalues + c * D, *dkey = dkeys + c * D;
        if (c + ROW_BLOCK <= KEY_TILE) {
            accumulate_rows(ROW_BLOCK, D, dvalue, depth, weights, 1, SCORE_STRIDE, dout + low * D);
            accumulate_rows(ROW_BLOCK, D, dkey, depth, dz, 1, SCORE_STRIDE, q + low * D);
        } else {
            accumulate_rows(KEY_TILE % ROW_BLOCK, D, dvalue, depth, weights, 1, SCORE_STRIDE, dout + low * D);
            accumulate_rows(KEY_TILE % ROW_BLOCK, D, dkey, depth, dz, 1, SCORE_STRIDE, q + low * D);
        }
    }
}

// table[j - i] += dZ_ij (times ln n_i), one vector of neighbouring diagonals at a time: row r of the diagonals
// from e on lies at column e + r, so the sums stay in registers. The margins of the rows are 0.
static void accumulate_diagonals(const Head* head, const TilePair* pair, const float* row_factor, float* table) {
    size_t rows = min_size(pair->live_high, head->in->size.Tq - pair->first);
    ptrdiff_t live_low = (ptrdiff_t)pair->live_low, live_high = (ptrdiff_t)rows;
    float* origin = table - (head->offset + pair->first) + pair->key;
    for (ptrdiff_t e = -(ptrdiff_t)round_up(rows - 1, LANES); e < KEY_TILE; e += LANES) {
        ptrdiff_t low = -e - LANES + 1 > live_low ? -e - LANES + 1 : live_low;
        ptrdiff_t high = KEY_TILE - e < live_high ? KEY_TILE - e : live_high;
        if (low >= high) { continue; }
        Vector sum = splat(0.0f);
        for (ptrdiff_t r = low; r < high; r++) {
            Vector dz = load(pair->dscores + r * (SCORE_STRIDE + 1) + e);
            sum += row_factor ? dz * row_factor[pair->first + (size_t)r] : dz;
        }
        store(origin + e, load(origin + e) + sum);
    }
}

// sums[j] += the sum over queries of dZ_ij (times ln n_i); `keyed` grows by these sums times the numbers by key,
// against that of the pair's first query, since large numbers would drown it.
static void accumulate_key_sums(const Head* head, const TilePair* pair, const float* row_factor, float* sums,
                                float* keyed) {
    size_t rows = min_size(pair->live_high, head->in->size.Tq - pair->first);
    Vector products = splat(0.0f);
    for (size_t n = 0; n < KEY_TILE; n += LANES) {
        Vector sum = splat(0.0f);
        for (size_t r = pair->live_low; r < rows; r++) {
            Vector dz = load(pair->dscores + r * SCORE_STRIDE + n);
            sum += row_factor ? dz * row_factor[pair->first + r] : dz;
        }
        store(sums + n, load(sums + n) + sum);
        products += sum * key_differences(head, pair->key + n, pair->first);
    }
    *keyed += sum_lanes(products);
}

INLINE void differentiate_pair(size_t D, size_t HS, const Backward* w, const Head* head, const KeyBuffers* k,
                               const RowBuffers* rows, TilePair* pair, Prefetch* prefetch) {
    differentiate_rows(D, HS, w, head, k, rows, pair, prefetch);
    if (pair->live_high == 0) { return; }
    accumulate_keys(head, D, pair, rows->q + pair->first * D, rows->dout + pair->first * D, k->dkeys + pair->key * D,
                    k->dvalues + pair->key * D);
    const AttentionInput* in = w->in;
    const float* row_factor = in->logit.inside ? head->log_count : NULL;
    size_t h = head->batch * in->size.NH + head->query_head;
    if (head->bias) {
        float* table = w->dbias_tables + h * table_floats(in) + TABLE_MARGIN + in->size.Tk - 1;
        accumulate_diagonals(head, pair, row_factor, table);
    }
    if (head->by_key) {
        accumulate_key_sums(head, pair, row_factor, w->dkey_tables + h * key_floats(in) + pair->key,
                            rows->keyed + pair->first / QUERY_TILE);
    }
    if (head->mix) {
        const MixTables* mix = head->mix;
        size_t rows_end = min_size(pair->live_high, in->size.Tq - pair->first);
        mix_accumulate_tables(w->dmixed_tables + h * mix->columns * mix->stride, mix,
                              rows->mix + pair->first * mix->columns, pair->dscores, (ptrdiff_t)pair->live_low,
                              (ptrdiff_t)rows_end, positions_after(head, pair->first, pair->key));
    }
}

static void backward_pair(const Backward* w, const Head* head, const KeyBuffers* k, const RowBuffers* rows,
                          size_t key_tile, size_t query_tile, Prefetch* prefetch) {
    BackwardScratch scratch = thread_scratch(w);
    TilePair pair = {key_tile * KEY_TILE, query_tile * QUERY_TILE, 0, 0, scratch.weights, scratch.dscores,
                     scratch.dproducts,   scratch.capped};
    WITH_HEAD_SIZE(differentiate_pair, w->D, w->in->size.HS, w, head, k, rows, &pair, prefetch);
}

// ----------------------------------------------------------------------------
// sharing out the work

// Query tiles first..end-1 see something of a key tile: start never decreases.
static size_t first_query_tile(size_t key_tile) { return key_tile * KEY_TILE / QUERY_TILE; }

static bool tile_is_seen(const Head* head, size_t key_tile, size_t query_tile) {
    return first_visible(head, query_tile * QUERY_TILE) < (key_tile + 1) * KEY_TILE;
}

// The rows that the thread reads after this head.
static Prefetch prefetch_next(const Backward* w, size_t batch, size_t query_head, bool more) {
    const AttentionInput* in = w->in;
    Prefetch prefetch;
    memset(&prefetch, 0, sizeof prefetch);
    query_head++;
    if (query_head == in->size.NH) { query_head = 0, batch++; }
    if (batch == in->size.B || (!more && query_head % w->group == 0)) { return prefetch; }
    size_t output = (batch * in->size.Tq * in->size.NH + query_head) * in->size.HS;
    prefetch.end = in->size.Tq;
    prefetch_add(&prefetch, in->q + batch * in->q_batch + query_head * in->size.HS, in->q_stride);
    prefetch_add(&prefetch, w->out + output, in->size.NH * in->size.HS);
    prefetch_add(&prefetch, w->dout + output, in->size.NH * in->size.HS);
    if (query_head % w->group == 0) {
        size_t first = kv_offset(in, batch, query_head / w->group);
        prefetch_add(&prefetch, in->k + first, in->kv_stride);
        prefetch_add(&prefetch, in->v + first, in->kv_stride);
    }
    return prefetch;
}

static void backward_private(const Backward* w, size_t kv, bool more) {
    size_t batch = kv / w->in->size.NKV, kv_head = kv % w->in->size.NKV;
    KeyBuffers k = slot_keys(w, thread_number());
    RowBuffers rows = slot_rows(w, thread_number());
    for (size_t j = 0; j < w->key_tiles; j++) { open_key_tile(w, &k, batch, kv_head, j); }
    for (size_t h = kv_head * w->group; h < (kv_head + 1) * w->group; h++) {
        Head head = make_head(w->in, batch, h, &w->tables);
        Prefetch prefetch = prefetch_next(w, batch, h, more);
        for (size_t i = 0; i < w->query_tiles; i++) { open_query_tile(w, &head, &k, &rows, i); }
        for (size_t j = 0; j < w->key_tiles; j++) {
            for (size_t i = first_query_tile(j); i < w->query_tiles && tile_is_seen(&head, j, i); i++) {
                backward_pair(w, &head, &k, &rows, j, i, &prefetch);
            }
        }
        for (size_t i = 0; i < w->query_tiles; i++) { close_query_tile(w, &head, &rows, i); }
    }
    for (size_t j = 0; j < w->key_tiles; j++) { close_key_tile(w, &k, batch, kv_head, j); }
}

// One key tile against all its query tiles, each after the key tile before it has passed there.
static void backward_key_tile(const Backward* w, size_t slot, size_t key_tile) {
    const AttentionInput* in = w->in;
    size_t batch = slot / in->size.NKV, kv_head = slot % in->size.NKV;
    KeyBuffers k = slot_keys(w, slot);
    size_t *progress = w->progress + slot * w->key_tiles + key_tile, passed = 0;
    Prefetch nothing;
    memset(&nothing, 0, sizeof nothing);
    for (size_t g = 0; g < w->group; g++) {
        Head head = make_head(in, batch, kv_head * w->group + g, &w->tables);
        RowBuffers rows = slot_rows(w, slot * w->group + g);
        for (size_t i = first_query_tile(key_tile); i < w->query_tiles && tile_is_seen(&head, key_tile, i); i++) {
            passed = g * w->query_tiles + i + 1;
            while (key_tile > 0 && __atomic_load_n(progress - 1, __ATOMIC_ACQUIRE) < passed) { sched_yield(); }
            backward_pair(w, &head, &k, &rows, key_tile, i, &nothing);
            __atomic_store_n(progress, passed, __ATOMIC_RELEASE);
        }
        passed = (g + 1) * w->query_tiles;
        __atomic_store_n(progress, passed, __ATOMIC_RELEASE);
    }
    close_key_tile(w, &k, batch, kv_head, key_tile);
}

static void backward_shared(const Backward* w) {
    const AttentionInput* in = w->in;
    size_t key_work = w->slots * w->key_tiles, query_work = in->size.B * in->size.NH * w->query_tiles;
    memset(w->progress, 0, key_work * sizeof(size_t));
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < key_work; n++) {
        size_t slot = n / w->key_tiles;
        KeyBuffers k = slot_keys(w, slot);
        open_key_tile(w, &k, slot / in->size.NKV, slot % in->size.NKV, n % w->key_tiles);
    }
#pragma omp parallel for schedule(dynamic)
    for (size_t n = 0; n < query_work; n++) {
        size_t h = n / w->query_tiles;
        Head head = make_head(in, h / in->size.NH, h % in->size.NH, &w->tables);
        KeyBuffers k = slot_keys(w, h / w->group);
        RowBuffers rows = slot_rows(w, h);
        open_query_tile(w, &head, &k, &rows, n % w->query_tiles);
    }
    // key tiles are taken in ascending order, so whatever a thread waits for is already being worked on
    size_t taken = 0;
#pragma omp parallel
    for (size_t n; (n = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED)) < key_work;) {
        backward_key_tile(w, n % w->slots, n / w->slots);
    }
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < query_work; n++) {
        size_t h = n / w->query_tiles;
        Head head = make_head(in, h / in->size.NH, h % in->size.NH, &w->tables);
        RowBuffers rows = slot_rows(w, h);
        close_query_tile(w, &head, &rows, n % w->query_tiles);
    }
}

// ----------------------------------------------------------------------------
// sums over sequences

// The bias's part of the gradient of seq_scale, sum_d P(d) E(d). Without a sink the sum of E is 0 (softmax ignores a
// shift of its row), so P is taken from its mean under |E|: rounding noise is not multiplied by a bias far from 0.
static double bias_part_of_scale(const AttentionInput* in, const float* bias, const float* E) {
    double weight = 0, mean = 0, sum = 0;
    for (size_t d = 0; d < in->size.Tk && !attention_has(in, TERM_SINK); d++) {
        double e = fabs((double)E[d]);
        weight += e, mean += e * (double)bias[d];
    }
    mean = weight > 0 ? mean / weight : 0;
    for (size_t d = 0; d < in->size.Tk; d++) { sum += ((double)bias[d] - mean) * (double)E[d]; }
    return sum;
}

// Gradient of the table by distance from the sums of all sequences; returns its part of the gradient of seq_scale.
static double finish_distances(const Backward* w, size_t h, bool scaled) {
    const AttentionInput* in = w->in;
    float* dbias = w->to.dby_distance + h * in->logit.distance_stride;
    for (size_t d = 0; d < in->size.Tk; d++) {
        float sum = 0.0f;
        for (size_t b = 0; b < in->size.B; b++) {
            sum += w->dbias_tables[(b * in->size.NH + h) * table_floats(in) + TABLE_MARGIN + in->size.Tk - 1 - d];
        }
        dbias[d] = sum;
    }
    if (!scaled) { return 0; }
    double dscale = bias_part_of_scale(in, in->logit.by_distance + h * in->logit.distance_stride, dbias);
    for (size_t d = 0; d < in->size.Tk; d++) { dbias[d] *= in->logit.seq_scale[h]; }
    return dscale;
}

// The same for the numbers by key, whose part of the gradient of seq_scale is in that of the products.
static void finish_keys(const Backward* w, size_t h, bool scaled) {
    const AttentionInput* in = w->in;
    size_t T = in->size.Tk;
    for (size_t b = 0; b < in->size.B; b++) {
        size_t row = b * in->size.NH + h;
        float *sums = w->dkey_tables + row * key_floats(in), *to = w->to.dby_key + row * T;
        for (size_t j = 0; j < T; j++) { to[j] = scaled ? sums[j] * in->logit.seq_scale[h] : sums[j]; }
    }
}

// The sum over sequences and query tiles of [B * NH][query_tiles].
static double sum_of_head(const Backward* w, const float* sums, size_t h) {
    double sum = 0;
    for (size_t b = 0; b < w->in->size.B; b++) {
        for (size_t i = 0; i < w->query_tiles; i++) {
            sum += (double)sums[(b * w->in->size.NH + h) * w->query_tiles + i];
        }
    }
    return sum;
}

// Adds the sums of all heads to a vector of distances of one table; the packed weights carry log2(e).
static void finish_mixed(const Backward* w, size_t r, size_t first) {
    const MixTables* mix = &w->tables.mix;
    size_t heads = w->in->size.B * w->in->size.NH, last = min_size(first + LANES, mix->length) - 1;
    const float* at = w->dmixed_tables + r * mix->stride + mix_place(mix, last);
    double sums[LANES] = {0};
    for (size_t h = 0; h < heads; h++, at += mix->columns * mix->stride) {
        for (size_t i = 0; i <= last - first; i++) { sums[i] += (double)at[i]; }
    }
    float* to = w->to.dmixed + r * w->in->size.mixed_length;
    for (size_t d = first; d <= last; d++) { to[d] += (float)(sums[last - d] * (double)LN_2); }
}

static void finish_head(const Backward* w, size_t h) {
    const AttentionInput* in = w->in;
    bool scale = attention_has(in, TERM_SCALE), scaled = scale && in->logit.inside;
    double dscale = scale ? sum_of_head(w, w->dscale, h) : 0;
    if (attention_has(in, TERM_DISTANCE)) { dscale += finish_distances(w, h, scaled); }
    if (attention_has(in, TERM_KEY)) { finish_keys(w, h, scaled); }
    if (attention_has(in, TERM_SINK)) { w->to.dsink[h] += (float)sum_of_head(w, w->dsink, h); }
    if (scale) { w->to.dseq_scale[h] += (float)dscale; }
}

void attention_backward(const AttentionGradients* gradients, const floatX* dout, const floatX* out, const float* lse,
                        const AttentionInput* in, void* workspace) {
    assert(in->size.Tq == in->size.Tk);
    Backward w = plan_backward(in, workspace);
    w.to = *gradients, w.dout = dout, w.out = out, w.lse = lse;
    size_t heads = in->size.B * in->size.NH;
    fill_tables(&w.tables, in);
    if (attention_has(in, TERM_DISTANCE)) { memset(w.dbias_tables, 0, heads * table_floats(in) * sizeof(float)); }
    if (attention_has(in, TERM_KEY)) { memset(w.dkey_tables, 0, heads * key_floats(in) * sizeof(float)); }
    if (attention_has(in, TERM_MIX)) {
        mix_transpose(&w.tables.mix);
        memset(w.dmixed_tables, 0, heads * w.tables.mix.columns * w.tables.mix.stride * sizeof(float));
    }
    memset(w.scratch, 0, attention_threads() * w.scratch_bytes);
    if (w.shared) {
        backward_shared(&w);
    } else {
        size_t heads = in->size.B * in->size.NKV, chunk = heads / (4 * attention_threads());
        chunk = chunk ? chunk : 1;
#pragma omp parallel for schedule(dynamic, chunk)
        for (size_t kv = 0; kv < heads; kv++) { backward_private(&w, kv, (kv + 1) % chunk != 0); }
    }
#pragma omp parallel for schedule(static)
    for (size_t h = 0; h < in->size.NH; h++) { finish_head(&w, h); }
    size_t pieces = (w.tables.mix.length + LANES - 1) / LANES;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < w.tables.mix.mixes * pieces; n++) { finish_mixed(&w, n / pieces, n % pieces * LANES); }
}
