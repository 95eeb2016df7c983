/*
The output head and its loss: logits, softmax, and in the same call the gradients, over chunks of rows and
tiles of the vocabulary. A chunk's logits are stored tile by tile, each tile dense, so that every product has a
shape and strides at which the library is fast, and reads what the softmax has just written to the cache.

The softmax is online (Milakov & Gimelshein 2018): a tile keeps exp(logit - running maximum) in place of its
logits, and the backward turns it into a probability with one factor per row and tile: one exponential a logit.
*/
#include <math.h>

#include "cpu_math.h"
#include "matmul_cpu.h"
#include "ops.h"

enum { TILE_COLUMNS = 1024, CHUNK_LOGITS = 1 << 24, MIN_CHUNK_ROWS = 256, MAX_CHUNK_ROWS = 2048, FEW_ROWS = 64 };

// How a call is cut up, and where its parts are in the workspace (offsets in bytes).
typedef struct {
    size_t rows, tile, tiles, ld;  // rows of a chunk, columns of a tile, stride of a tile's gradient
    size_t packed_bytes;           // one tile of the weight, packed
    size_t packed, plain, logits, gradient, inp, maxima, state, bytes;
} Head;

// A row's softmax so far.
typedef struct {
    double sum;
    float maximum, target_logit;
} RowState;

static size_t reserve(size_t* bytes, size_t wanted) {
    size_t offset = *bytes;
    *bytes += round_up(wanted, 64);
    return offset;
}

static Head head_layout(size_t N, size_t C, size_t V) {
    Head h = {0};
    h.rows = CHUNK_LOGITS / V;
    if (h.rows < MIN_CHUNK_ROWS) { h.rows = MIN_CHUNK_ROWS; }
    if (h.rows > MAX_CHUNK_ROWS) { h.rows = MAX_CHUNK_ROWS; }
    if (h.rows > N) { h.rows = N; }
    h.tile = V < TILE_COLUMNS ? V : TILE_COLUMNS;
    h.tiles = (V + h.tile - 1) / h.tile;
    h.ld = padded_stride(h.tile);
    h.packed_bytes = product_packed_bytes(C, h.tile);
    h.packed = reserve(&h.bytes, h.tiles * h.packed_bytes);
    h.plain = reserve(&h.bytes, V * C * sizeof(uint16_t));
    h.logits = reserve(&h.bytes, h.tiles * h.rows * h.tile * sizeof(float));
    h.gradient = reserve(&h.bytes, h.rows * h.ld * sizeof(float));
    h.inp = reserve(&h.bytes, h.rows * C * sizeof(uint16_t));
    h.maxima = reserve(&h.bytes, h.tiles * h.rows * sizeof(float));
    h.state = reserve(&h.bytes, h.rows * sizeof(RowState));
    return h;
}

size_t cross_entropy_workspace(size_t N, size_t C, size_t V) { return head_layout(N, C, V).bytes; }

static size_t tile_width(const Head* h, size_t tile, size_t V) {
    return tile + 1 < h->tiles ? h->tile : V - tile * h->tile;
}

// Maxima and sums are kept in LANES parts side by side, since compilers may not reorder a single one.
enum { LANES = 16 };

// The largest of n values and start.
static float row_maximum(const float* x, size_t n, float start) {
    float lanes[LANES], maximum = start;
    for (size_t j = 0; j < LANES; j++) { lanes[j] = start; }
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
#pragma omp simd
        for (size_t j = 0; j < LANES; j++) { lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j]; }
    }
    for (; i < n; i++) { maximum = x[i] > maximum ? x[i] : maximum; }
    for (size_t j = 0; j < LANES; j++) { maximum = lanes[j] > maximum ? lanes[j] : maximum; }
    return maximum;
}

// The sum of exp(x - maximum) over x[0..n), in LANES partial sums; with `replace` the exponentials take the place of x.
static float exponentials_row(float* x, size_t n, float maximum, bool replace) {
    float lanes[LANES] = {0}, unused[LANES], sum = 0;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        float* to = replace ? x + i : unused;
#pragma omp simd
        for (size_t j = 0; j < LANES; j++) {
            to[j] = exp_fast(x[i + j] - maximum);
            lanes[j] += to[j];
        }
    }
    for (; i < n; i++) {
        float* to = replace ? x + i : unused;
        *to = exp_fast(x[i] - maximum);
        sum += *to;
    }
    for (size_t j = 0; j < LANES; j++) { sum += lanes[j]; }
    return sum;
}

// Takes n logits of a row into its state; with `replace` leaves exp(logit - maximum so far) in their place.
static void softmax_row(RowState* state, float* logits, size_t n, bool replace) {
    float maximum = row_maximum(logits, n, state->maximum);
    float reference = maximum == -INFINITY ? 0.0f : maximum;  // a logit of -infinity adds 0, a NaN stays one
    float sum = exponentials_row(logits, n, reference, replace);
    state->sum = state->sum * exp_fast(state->maximum - reference) + sum;
    state->maximum = maximum;
}

// x = cap tanh(x / cap)
static void cap_row(float* x, size_t n, float cap) {
    const float inverse = 1.0f / cap;
#pragma omp simd
    for (size_t i = 0; i < n; i++) { x[i] = cap * tanh_fast(x[i] * inverse); }
}

// The slope of the cap where its value is x.
static inline float cap_slope(float x, float cap) { return 1.0f - x / cap * (x / cap); }

// Capped logits x become exp(x - maximum) times the slope of the cap.
static void weigh_capped_row(float* x, size_t n, float maximum, float cap) {
    const float inverse = 1.0f / cap;
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float share = x[i] * inverse;
        x[i] = exp_fast(x[i] - maximum) * (1.0f - share * share);
    }
}

// One tile of a chunk: columns first.. of the vocabulary. maxima[rows] receives what the tile is relative to. Capped
// logits stay what they are, for the gradient needs their slope.
static void softmax_tile(RowState* states, float* maxima, float* logits, const int* targets, float cap, size_t rows,
                         size_t first, size_t width) {
#pragma omp parallel for schedule(static) if (rows * width >= PARALLEL_ELEMENTS)
    for (size_t r = 0; r < rows; r++) {
        float* row = logits + r * width;
        size_t target = (size_t)targets[r];
        if (cap != 0) { cap_row(row, width, cap); }
        if (target >= first && target < first + width) { states[r].target_logit = row[target - first]; }
        softmax_row(&states[r], row, width, cap == 0);
        maxima[r] = states[r].maximum;
    }
}

// gradient[rows,width] with stride ld = d(loss)/d(logits) of one tile, from what softmax_tile left there.
static void gradient_tile(void* gradient, size_t ld, float* exponentials, const RowState* states, const float* maxima,
                          const int* targets, float dloss, float cap, size_t rows, size_t first, size_t width,
                          Precision precision) {
#pragma omp parallel for schedule(static) if (rows * width >= PARALLEL_ELEMENTS)
    for (size_t r = 0; r < rows; r++) {
        float* restrict row = exponentials + r * width;
        float relative = cap != 0 ? states[r].maximum : maxima[r], slope = 1.0f;
        float factor = (float)(dloss * exp((double)relative - states[r].maximum) / states[r].sum);
        size_t target = (size_t)targets[r];
        bool here = target >= first && target < first + width;
        if (cap != 0) {
            weigh_capped_row(row, width, states[r].maximum, cap);
            slope = cap_slope(states[r].target_logit, cap);
        }
        float at_target = here ? row[target - first] * factor - dloss * slope : 0;
        if (precision == PRECISION_BF16) {
            uint16_t* restrict out = (uint16_t*)gradient + r * ld;
            for (size_t i = 0; i < width; i++) { out[i] = bf16_round(row[i] * factor); }
            if (here) { out[target - first] = bf16_round(at_target); }
        } else {
            float* restrict out = (float*)gradient + r * ld;
            for (size_t i = 0; i < width; i++) { out[i] = row[i] * factor; }
            if (here) { out[target - first] = at_target; }
        }
    }
}

// What one call works on.
typedef struct {
    Head h;
    size_t C, V;
    float cap;
    Precision precision;
    bool packed;
    const float* weight;
    char* workspace;
} Call;

// The weight as the products want it: packed tiles for the logits, a bf16 copy for dinp.
static void prepare_weight(const Call* call, bool gradients) {
    const Head* h = &call->h;
    size_t C = call->C;
    for (size_t t = 0; call->packed && t < h->tiles; t++) {
        Product p = {0, tile_width(h, t, call->V), C, C, C, h->tile, false, true, true, false, call->precision};
        product_pack(call->workspace + h->packed + t * h->packed_bytes, call->weight + t * h->tile * C, &p);
    }
    if (call->precision == PRECISION_BF16 && (gradients || !call->packed)) {
        factor_copy(call->workspace + h->plain, C, call->weight, C, call->V, C, call->precision);
    }
}

// Rows first.. of the vocabulary's weight, unpacked.
static const void* plain_weight(const Call* call, size_t first) {
    if (call->precision == PRECISION_FP32) { return call->weight + first * call->C; }
    return call->workspace + call->h.plain + first * call->C * sizeof(uint16_t);
}

// Logits and softmax of a chunk. Keeps every tile when gradients follow, else all use the first tile's place.
static void chunk_forward(const Call* call, float* losses, const void* inp, const int* targets, size_t rows,
                          bool keep) {
    const Head* h = &call->h;
    RowState* states = (RowState*)(call->workspace + h->state);
    float* maxima = (float*)(call->workspace + h->maxima);
    for (size_t r = 0; r < rows; r++) {
        assert(targets[r] >= 0 && (size_t)targets[r] < call->V);
        states[r] = (RowState){0, -INFINITY, 0};
    }
    for (size_t t = 0; t < h->tiles; t++) {
        size_t first = t * h->tile, width = tile_width(h, t, call->V), place = keep ? t * h->rows * h->tile : 0;
        float* logits = (float*)(call->workspace + h->logits) + place;
        const void* b = call->packed ? call->workspace + h->packed + t * h->packed_bytes : plain_weight(call, first);
        Product p = {rows, width, call->C, call->C, call->C, width, false, true, call->packed, false, call->precision};
        product(logits, inp, b, &p);
        softmax_tile(states, maxima + t * h->rows, logits, targets, call->cap, rows, first, width);
    }
    for (size_t r = 0; r < rows; r++) {
        losses[r] = (float)(log(states[r].sum) + ((double)states[r].maximum - states[r].target_logit));
    }
}

static void chunk_backward(const Call* call, float* dinp, float* dweight, const void* inp, const int* targets,
                           float dloss, size_t rows) {
    const Head* h = &call->h;
    size_t C = call->C;
    const RowState* states = (const RowState*)(call->workspace + h->state);
    const float* maxima = (const float*)(call->workspace + h->maxima);
    char* gradient = call->workspace + h->gradient;
    for (size_t t = 0; t < h->tiles; t++) {
        size_t first = t * h->tile, width = tile_width(h, t, call->V);
        float* exponentials = (float*)(call->workspace + h->logits) + t * h->rows * h->tile;
        gradient_tile(gradient, h->ld, exponentials, states, maxima + t * h->rows, targets, dloss, call->cap, rows,
                      first, width, call->precision);
        Product to_inp = {rows, C, width, h->ld, C, C, false, false, false, t > 0, call->precision};
        product(dinp, gradient, plain_weight(call, first), &to_inp);
        if (!dweight) { continue; }
        Product to_weight = {width, C, rows, h->ld, C, C, true, false, false, true, call->precision};
        product(dweight + first * C, gradient, inp, &to_weight);
    }
}

void cross_entropy_head(float* losses, floatX* dinp, float* dweight, const floatX* inp, const floatX* weight,
                        const int* targets, float dloss, float cap, void* workspace, size_t N, size_t C, size_t V) {
    Call call = {head_layout(N, C, V), C, V, cap, cpu_precision, N >= FEW_ROWS, weight, (char*)workspace};
    prepare_weight(&call, dinp != NULL);
    for (size_t row = 0; row < N; row += call.h.rows) {
        size_t rows = N - row < call.h.rows ? N - row : call.h.rows;
        const void* x = inp + row * C;
        if (call.precision == PRECISION_BF16) {
            factor_copy(call.workspace + call.h.inp, C, inp + row * C, C, rows, C, call.precision);
            x = call.workspace + call.h.inp;
        }
        chunk_forward(&call, losses + row, x, targets + row, rows, dinp != NULL);
        if (dinp) { chunk_backward(&call, dinp + row * C, dweight, x, targets + row, dloss, rows); }
    }
}

double array_sum(const float* x, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) { sum += x[i]; }
    return sum;
}
