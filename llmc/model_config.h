/*
What a model is: its sizes, its encoding, the named sizes of the paper, and their checks. Host only.
*/
#ifndef MODEL_CONFIG_H
#define MODEL_CONFIG_H

#include "model_options.h"

typedef struct {
    size_t V, Vp;    // vocabulary; rows in memory, a multiple of 128 so that products tile well
    size_t C, L;     // channels, layers
    size_t NH, NKV;  // query heads, key/value heads
    size_t HS, F;    // head size C/NH, feed-forward width
    PosKind encoding;
    bool ssmax;  // Scalable-Softmax
    ModelOptions options;
    PosencOptions posenc;
    int bos;  // starts a document; -1: sequences are not split into documents
} ModelConfig;

// The largest sizes that flags and run folders may ask for: beyond those of any model, below what sizes in bytes, as
// products of them, could overflow.
enum { MODEL_MAX_DIM = 65536, MODEL_MAX_LAYERS = 1000, MODEL_MAX_HEADS = 1024, MODEL_MAX_FFN_DIM = 1048576 };

// Named sizes; feed-forward width is 2C. l2 and l4 are for tests and laptops, the others those of the paper.
typedef struct {
    const char* name;
    size_t C, L, NH;
} ModelSize;

static const ModelSize MODEL_SIZES[] = {
    {"l2", 128, 2, 4},    {"l4", 256, 4, 8},     {"l6", 512, 6, 16},    {"l8", 768, 8, 16},
    {"l12", 768, 12, 16}, {"l15", 1152, 15, 24}, {"l18", 1536, 18, 32}, {"l24", 2048, 24, 64},
};
enum { MODEL_SIZE_COUNT = sizeof MODEL_SIZES / sizeof *MODEL_SIZES };

static inline const ModelSize* model_size_find(const char* name) {
    for (int i = 0; i < MODEL_SIZE_COUNT; i++) {
        if (strcmp(MODEL_SIZES[i].name, name) == 0) { return &MODEL_SIZES[i]; }
    }
    return NULL;
}

// Is the bias scaled by Scalable-Softmax, too?
static inline bool model_bias_inside(const ModelConfig* c) {
    return posenc_info(c->encoding)->inside && strcmp(c->options.ssmax_prior, "inside") == 0;
}

// Do all layers share what the encoding learns?
static inline bool model_global_prior(const ModelConfig* c) {
    return c->options.global_prior && posenc_params(c->encoding) > 0;
}

// Is attention given cumulative sums of gates?
static inline bool model_has_gates(const ModelConfig* c) { return (posenc_info(c->encoding)->terms & TERM_KEY) != 0; }

// What the formulas of positions and of biases are given.
static inline PositionSettings model_position_settings(const ModelConfig* c) {
    const ModelOptions* o = &c->options;
    PositionSettings s = {o->rope_theta, o->sinusoidal_theta, strcmp(o->sinusoidal_freqs, "vaswani") == 0};
    return s;
}

static inline PosencSettings model_posenc_settings(const ModelConfig* c) {
    PosencSettings s = POSENC_DEFAULT_SETTINGS;
    s.sandwich_dim = c->options.sandwich_dim, s.alibi_geometric = strcmp(c->options.alibi_slopes, "geometric") == 0;
    if (c->options.fire_length > 0) { s.fire_length = c->options.fire_length; }  // training sets it
    return s;
}

// Completes derived fields and refuses what the operators cannot do, naming the flag.
static inline void model_config_check(ModelConfig* c) {
    if (c->NH == 0 || c->C % c->NH != 0) {
        fatal("--dim %zu is not a multiple of --n_heads %zu; head size = dim / n_heads", c->C, c->NH);
    }
    if (c->C > MODEL_MAX_DIM || c->L == 0 || c->L > MODEL_MAX_LAYERS || c->NH > MODEL_MAX_HEADS ||
        c->F > MODEL_MAX_FFN_DIM) {
        fatal("--dim %zu, --n_layers %zu, --n_heads %zu, --ffn_dim %zu: expected at most %d, %d, %d and %d", c->C, c->L,
              c->NH, c->F, MODEL_MAX_DIM, MODEL_MAX_LAYERS, MODEL_MAX_HEADS, MODEL_MAX_FFN_DIM);
    }
    c->HS = c->C / c->NH;
    if (c->HS % 8 != 0 || c->HS > 128) {
        fatal("head size %zu (--dim %zu / --n_heads %zu), expected a multiple of 8 up to 128", c->HS, c->C, c->NH);
    }
    if (c->NKV == 0 || c->NH % c->NKV != 0) { fatal("--n_kv_heads %zu does not divide --n_heads %zu", c->NKV, c->NH); }
    if (c->F == 0 || c->F % 8 != 0) { fatal("--ffn_dim %zu, expected a multiple of 8", c->F); }
    if (c->V < 2 || c->V > (size_t)1 << 31) { fatal("vocabulary of %zu tokens, expected 2 to 2^31", c->V); }
    c->Vp = round_up(c->V, 128);
}

// Floating-point operations of forward and backward per token of a sequence of T tokens, causal:
// 6 per weight of a product, and 6 L C (T + 1) for attention (two products forward, four backward, half of
// the square).
static inline double model_flops_per_token(const ModelConfig* c, size_t T) {
    double C = (double)c->C, L = (double)c->L, kv = (double)(c->NKV * c->HS), F = (double)c->F;
    double weights = L * (2.0 * C * C + 2.0 * C * kv + 3.0 * C * F) + (double)c->V * C;
    return 6.0 * weights + 6.0 * L * C * (double)(T + 1);
}

#endif
