/*
What a model is: its sizes, the encoding of each layer, the named sizes of the paper, and their checks. Host only.
*/
#ifndef MODEL_CONFIG_H
#define MODEL_CONFIG_H

#include "model_options.h"

// The largest sizes that flags and run folders may ask for: beyond those of any model, below what sizes in bytes, as
// products of them, could overflow.
enum { MODEL_MAX_DIM = 65536, MODEL_MAX_LAYERS = 1000, MODEL_MAX_HEADS = 1024, MODEL_MAX_FFN_DIM = 1048576 };

// What layers may differ in.
typedef struct {
    PosKind encoding;
    bool ssmax;     // Scalable-Softmax
    size_t window;  // of this layer, where --window does not say it of all; 0: none
} ModelLayer;

typedef struct {
    size_t V, Vp;                         // vocabulary; rows in memory, a multiple of 128 so that products tile well
    size_t C, L;                          // channels, layers
    size_t NH, NKV;                       // query heads, key/value heads
    size_t HS, F;                         // head size C/NH, feed-forward width
    ModelLayer layers[MODEL_MAX_LAYERS];  // through the functions of model_layers.h
    ModelOptions options;
    PosencOptions posenc;
    int bos;                    // starts a document; -1: sequences are not split into documents
    bool learned_interpolated;  // how learned positions are read beyond their table, see learned_row(); of evaluations
} ModelConfig;

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

#include "model_layers.h"

// The cap of the output's logits; 0: none.
static inline float model_final_cap(const ModelConfig* c) {
    return isnan(c->options.final_softcap) ? 0.0f : (float)c->options.final_softcap;
}

// Does it have a trained table of positions?
static inline bool model_learns_positions(const ModelConfig* c) { return model_has_mechanism(c, POSENC_LEARN); }

static inline RopeScaling model_rope_scaling(const ModelOptions* o) {
    static const char* const words[] = {"none", "linear", "ntk", "yarn", "llama3"};
    size_t i = 0;
    while (strcmp(words[i], o->rope_scaling) != 0) { i++; }  // options.h allows no other
    return (RopeScaling)i;
}

// What the formulas of positions and of biases are given.
static inline PositionSettings model_position_settings(const ModelConfig* c) {
    const ModelOptions* o = &c->options;
    RopeSettings rope;
    rope.theta = o->rope_theta, rope.width = rope_width(o->rotary_fraction, c->HS);
    rope.scaling = model_rope_scaling(o), rope.factor = o->rope_factor;
    rope.original_length = (double)o->rope_original_length;
    rope.beta_fast = o->rope_beta_fast, rope.beta_slow = o->rope_beta_slow;
    rope.attention_factor =
        isnan(o->rope_attention_factor) ? rope_yarn_attention_factor(rope.factor) : o->rope_attention_factor;
    rope.low_freq_factor = o->rope_low_freq_factor, rope.high_freq_factor = o->rope_high_freq_factor;
    PositionSettings s = {o->sinusoidal_theta, strcmp(o->sinusoidal_freqs, "vaswani") == 0, rope_rotation(&rope)};
    return s;
}

static inline PosencSettings model_posenc_settings(const ModelConfig* c) {
    PosencSettings s = POSENC_DEFAULT_SETTINGS;
    s.sandwich_dim = c->options.sandwich_dim, s.alibi_geometric = strcmp(c->options.alibi_slopes, "geometric") == 0;
    if (c->options.fire_length > 0) { s.fire_length = c->options.fire_length; }  // training sets it
    return s;
}

// Refuses a flag of scaled rotations that the chosen one does not read.
static inline void model_check_rope_flags(const ModelOptions* o) {
    const RopeScaling scaling = model_rope_scaling(o);
    const bool yarn = scaling == ROPE_YARN, llama3 = scaling == ROPE_LLAMA3;
    const struct {
        const char* flag;
        bool given, read;
        const char* readers;
    } flags[] = {
        {"rope_factor", !isnan(o->rope_factor), scaling != ROPE_NONE, "linear, ntk, yarn or llama3"},
        {"rope_original_length", o->rope_original_length > 0, yarn || llama3, "yarn or llama3"},
        {"rope_beta_fast", o->rope_beta_fast != 32, yarn, "yarn"},
        {"rope_beta_slow", o->rope_beta_slow != 1, yarn, "yarn"},
        {"rope_attention_factor", !isnan(o->rope_attention_factor), yarn, "yarn"},
        {"rope_low_freq_factor", o->rope_low_freq_factor != 1, llama3, "llama3"},
        {"rope_high_freq_factor", o->rope_high_freq_factor != 4, llama3, "llama3"},
    };
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        if (flags[i].given && !flags[i].read) {
            fatal("--%s needs --rope_scaling %s, found --rope_scaling %s", flags[i].flag, flags[i].readers,
                  o->rope_scaling);
        }
    }
}

// Refuses a scaled rotation that lacks a number, or whose numbers contradict each other.
static inline void model_check_rope_scaling(const ModelOptions* o) {
    model_check_rope_flags(o);
    const RopeScaling scaling = model_rope_scaling(o);
    if (scaling == ROPE_NONE) { return; }
    if (isnan(o->rope_factor)) {
        fatal("--rope_scaling %s needs --rope_factor, how many times the original length is read", o->rope_scaling);
    }
    if ((scaling == ROPE_YARN || scaling == ROPE_LLAMA3) && o->rope_original_length == 0) {
        fatal("--rope_scaling %s needs --rope_original_length, the sequence length that wavelengths are compared with",
              o->rope_scaling);
    }
    if (!(o->rope_beta_fast > o->rope_beta_slow)) {
        fatal("--rope_beta_fast %g is not above --rope_beta_slow %g", o->rope_beta_fast, o->rope_beta_slow);
    }
    if (!(o->rope_high_freq_factor > o->rope_low_freq_factor)) {
        fatal("--rope_high_freq_factor %g is not above --rope_low_freq_factor %g", o->rope_high_freq_factor,
              o->rope_low_freq_factor);
    }
}

// Refuses positions that cannot be computed.
static inline void model_check_positions(const ModelConfig* c) {
    const ModelOptions* o = &c->options;
    model_check_rope_scaling(o);
    const size_t least = model_rope_scaling(o) == ROPE_NTK ? 4 : 2, width = rope_width(o->rotary_fraction, c->HS);
    if (width < least) {
        fatal("--rotary_fraction %g of heads of %zu channels turns %zu, expected at least %zu; raise it",
              o->rotary_fraction, c->HS, width, least);
    }
    if (model_learns_positions(c) && o->learned_length == 0) {
        fatal(
            "model_args.max_position_embeddings is missing, the rows of the learned table; the run folder is damaged");
    }
}

// How far queries of a layer see, and what scales their logits beside Scalable-Softmax, from --log_scale "N0,ALPHA".
static inline RowRule model_row_rule(const ModelConfig* c, size_t layer) {
    const ModelOptions* o = &c->options;
    RowRule rule = {model_layer_window(c, layer), 0, 0};
    if (!o->log_scale) { return rule; }
    const char* comma = strchr(o->log_scale, ',');
    size_t length = comma ? (size_t)(comma - o->log_scale) : 0;
    char first[32];
    snprintf(first, sizeof first, "%.*s", (int)length, o->log_scale);
    if (length == 0 || length >= sizeof first || !option_parse_double(first, 1, 1e12, &rule.from) ||
        !option_parse_double(comma + 1, 0, 1e6, &rule.slope)) {
        fatal(
            "--log_scale %s: expected N0,ALPHA, a number of keys of at least 1 and a factor of at least 0, as 1024,0.1",
            o->log_scale);
    }
    return rule;
}

// Refuses flags of attention that make no sense together.
static inline void model_check_attention(const ModelConfig* c) {
    const ModelOptions* o = &c->options;
    if (o->softcap_approx && isnan(o->softcap)) {
        fatal("--softcap_approx without --softcap, whose function it makes cheaper; give --softcap C too, or neither");
    }
    model_row_rule(c, 0);
    bool ssmax = false;
    for (size_t l = 0; l < c->L; l++) { ssmax |= model_layer_ssmax(c, l); }
    if (o->log_scale && ssmax) {
        fatal("--log_scale %s with Scalable-Softmax, which scales by the number of keys itself; leave one of them out",
              o->log_scale);
    }
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
    if (model_mix_rank(c) * c->NH % 8 != 0) {
        fatal("--mix_rank %zu of --n_heads %zu: %zu weights of a token, expected a multiple of 8", c->options.mix_rank,
              c->NH, model_mix_rank(c) * c->NH);
    }
    if (c->F == 0 || c->F % 8 != 0) { fatal("--ffn_dim %zu, expected a multiple of 8", c->F); }
    if (c->V < 2 || c->V > (size_t)1 << 31) { fatal("vocabulary of %zu tokens, expected 2 to 2^31", c->V); }
    model_check_attention(c);
    c->Vp = round_up(c->V, 128);
    model_check_layers(c);
    model_check_positions(c);
}

// Keys that queries at positions position .. position + n - 1 of one document see together when each sees `most` of
// them at most; 0: all.
static inline double keys_within(size_t position, size_t n, size_t most) {
    double first = (double)position + 1, last = (double)position + (double)n, window = (double)most;
    if (window == 0 || last <= window) { return (double)n * 0.5 * (first + last); }
    double rising = first < window ? window - first : 0;  // queries that see less than the window
    return rising * 0.5 * (first + window - 1) + ((double)n - rising) * window;
}

static inline double model_visible_keys(const ModelConfig* c, size_t layer, size_t position, size_t n) {
    return keys_within(position, n, model_layer_window(c, layer));
}

// The same in all layers together.
static inline double model_all_visible_keys(const ModelConfig* c, size_t position, size_t n) {
    double keys = 0;
    for (size_t l = 0; l < c->L; l++) { keys += model_visible_keys(c, l, position, n); }
    return keys;
}

// Of these, keys that tables weighted by the query reach, times the number of tables.
static inline double model_all_mixed_keys(const ModelConfig* c, size_t position, size_t n) {
    double keys = 0;
    for (size_t l = 0; l < c->L; l++) {
        const size_t window = model_layer_window(c, l), length = c->options.mix_length;
        const size_t reached = window > 0 && window < length ? window : length;
        keys += (double)model_layer_mix_rank(c, l) * keys_within(position, n, reached);
    }
    return keys;
}

// Weights of the products of one block, of an average one where layers differ.
static inline double model_block_weights(const ModelConfig* c) {
    double C = (double)c->C, kv = (double)(c->NKV * c->HS), F = (double)c->F, mixes = 0;
    for (size_t l = 0; l < c->L; l++) { mixes += (double)(c->NH * model_layer_mix_rank(c, l)) / (double)c->L; }
    return (c->options.gated_attention ? 3.0 : 2.0) * C * C + 2.0 * C * kv + C * mixes + 3.0 * C * F;
}

// Floating-point operations of forward and backward per token of a sequence of T tokens: 6 per weight of a product,
// 12 C for each visible key of attention in each layer (two products forward, four backward), and 6 for each weight of
// a table that reaches it.
static inline double model_flops_per_token(const ModelConfig* c, size_t T) {
    double C = (double)c->C, weights = (double)c->L * model_block_weights(c) + (double)c->V * C;
    double pairs = 12.0 * C * model_all_visible_keys(c, 0, T) + 6.0 * (double)c->NH * model_all_mixed_keys(c, 0, T);
    return 6.0 * weights + pairs / (double)T;
}

#endif
