/*
All positional mathematics, once, for host and device: what encodings add to the embedding, how they rotate q and k,
the relative bias P_h(d) that attention adds to the logit at distance d = i - j >= 0, its derivatives and initial
values, the lists of encodings and of the tensors that they learn, Scalable-Softmax and its order.

To add a relative bias: its functions (value, derivative, reach, initial value) beside those of BAM, one row in
POSENC_LIST, and one in POSENC_TENSORS for each tensor that it learns. Flags, args.json, checkpoints, the optimiser,
gradient tests and the evaluator walk the lists.

Values are computed in double and rounded once to fp32: tables are small (NH x T) and positions reach
262,144, where fp32 powers and angles are wrong in the fourth digit.
*/
#ifndef POSENC_H
#define POSENC_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "random.h"

#ifdef __CUDACC__
#define HOST_DEVICE static inline __host__ __device__
#else
#define HOST_DEVICE static inline
#endif

// ----------------------------------------------------------------------------
// what the formulas of relative biases are given and say

enum { SANDWICH_MAX_DIM = 65536, MIX_MAX_RANK = 16, MIX_MAX_LENGTH = 262144 };

// What flags say of the formulas of biases.
typedef struct {
    size_t sandwich_dim;   // twice the number of Sandwich's cosines
    bool alibi_geometric;  // ALiBi's slopes of any number of heads are 2^(-8(h+1)/NH); else as published
    size_t fire_length;    // the distance at which FIRE's coordinate is 1
} PosencSettings;

#define POSENC_DEFAULT_SETTINGS \
    { 128, false, 512 }

// The head whose bias it is.
typedef struct {
    size_t h, NH;
    PosencSettings settings;
    const double* coordinates;  // those of all distances, where they are dear and known already; else NULL
} PosencHead;

// Distances first <= d < end.
typedef struct {
    size_t first, end;
} PosencReach;

// What an encoding does before attention: nothing, add to the token embedding (what is computed, or what is learned),
// rotate q and k, or project the block's input to a gate for each head, whose -ln sigmoid or softplus attention is
// given cumulated (ops.h, forget.c).
typedef enum { POSENC_NONE, POSENC_ADD, POSENC_LEARN, POSENC_ROTATE, POSENC_FORGET, POSENC_SOFTPLUS } PosencMechanism;

// ----------------------------------------------------------------------------
// gates: what one token adds to the cumulative sums, ln(1 + e^-x) = -ln sigmoid(x) or ln(1 + e^x)

HOST_DEVICE double posenc_gate(PosencMechanism kind, double x) {
    if (kind == POSENC_FORGET) { x = -x; }
    return (x > 0 ? x : 0.0) + log1p(exp(-fabs(x)));
}

HOST_DEVICE double posenc_gate_slope(PosencMechanism kind, double x) {
    return kind == POSENC_FORGET ? -1.0 / (1.0 + exp(x)) : 1.0 / (1.0 + exp(-x));
}

// ----------------------------------------------------------------------------
// sinusoidal: added to the token embedding (Vaswani et al. 2017, section 3.5)

// Value at channel c of C: sine in even channels, cosine in odd ones. Channel c = 2i and c = 2i + 1 share
// the exponent 2i/C in Vaswani's form; in the form published with BAM each channel has its own, c/C.
HOST_DEVICE float sinusoidal_value(size_t position, size_t c, size_t C, double theta, bool vaswani) {
    size_t exponent = vaswani ? c - c % 2 : c;
    double angle = (double)position * pow(theta, -(double)exponent / (double)C);
    return (float)(c % 2 == 0 ? sin(angle) : cos(angle));
}

// ----------------------------------------------------------------------------
// rotary: pair (2m, 2m+1) of q and k turns by an angle (Su et al. 2021)

#include "posenc_rope.h"

// ----------------------------------------------------------------------------
// learned: a row of a trained table is added to the token embedding (Radford et al. 2019, GPT-2)

// The row that a position reads, as a real number: its own within the table; beyond it the last one, or, interpolated,
// the whole sequence of `length` positions is laid over the table (as Chen et al. 2023 do with rotations).
HOST_DEVICE double learned_row(size_t position, size_t rows, size_t length, bool interpolated) {
    if (interpolated && length > rows) { return (double)position * ((double)(rows - 1) / (double)(length - 1)); }
    return (double)(position < rows ? position : rows - 1);
}

// Channel c of what it reads, linear between two rows.
HOST_DEVICE float learned_value(const float* table, double row, size_t rows, size_t c, size_t C) {
    const size_t before = (size_t)row, after = before + 1 < rows ? before + 1 : before;
    const double x = (double)table[before * C + c], share = row - (double)before;
    return (float)(x + share * ((double)table[after * C + c] - x));
}

// ----------------------------------------------------------------------------
// ALiBi: P = -slope_h * d (Press et al. 2022; the rule for other head counts is in their published code)

// Slope of head h: 2^(-8(h+1)/NH) when NH is a power of two. Otherwise the first n heads, n the largest
// power of two below NH, take the slopes of n heads, the rest every other slope of 2n heads.
HOST_DEVICE double alibi_slope(size_t h, size_t NH) {
    size_t n = 1;
    while (2 * n <= NH) { n *= 2; }
    if (h < n) { return exp2(-8.0 * (double)(h + 1) / (double)n); }
    return exp2(-8.0 * (double)(2 * (h - n) + 1) / (double)(2 * n));
}

HOST_DEVICE double alibi_geometric_slope(size_t h, size_t NH) { return exp2(-8.0 * (double)(h + 1) / (double)NH); }

HOST_DEVICE double alibi_value(const double* theta, PosencHead head, size_t d) {
    (void)theta;
    const bool geometric = head.settings.alibi_geometric;
    return -(geometric ? alibi_geometric_slope(head.h, head.NH) : alibi_slope(head.h, head.NH)) * (double)d;
}

// ----------------------------------------------------------------------------
// what encodings share

// Of encodings without a bias, or whose bias is not learned.
HOST_DEVICE double no_value(const double* theta, PosencHead head, size_t d) {
    (void)theta, (void)head, (void)d;
    return 0.0;
}

HOST_DEVICE double no_derivative(const double* theta, size_t p, PosencHead head, size_t d) {
    (void)theta, (void)p, (void)head, (void)d;
    return 0.0;
}

// Of numbers that the bias reads at all distances.
HOST_DEVICE PosencReach everywhere(size_t p) {
    (void)p;
    PosencReach reach = {0, SIZE_MAX};
    return reach;
}

// A number, or a word that says one for head h: ALiBi's slope, its logarithm, 0 to 1 over the heads, a normal number.
static inline double initial_by_word(const char* word, bool trained, size_t p, size_t h, size_t NH, Random* random) {
    (void)trained, (void)p;
    if (strcmp(word, "slope") == 0) { return alibi_slope(h, NH); }
    if (strcmp(word, "log_slope") == 0) { return log(alibi_slope(h, NH)); }
    if (strcmp(word, "linear") == 0) { return NH > 1 ? (double)h / (double)(NH - 1) : 0.0; }
    if (strcmp(word, "sampled") == 0) { return random_normal(random); }
    return atof(word);
}

// ----------------------------------------------------------------------------
// BAM: P = -e^alpha r^beta, r = |D| + 1e-5, D = (j - i) - mu, mu = e^m - e^-m; theta = (alpha, beta, m)
// (Bianchessi et al., arXiv 2505.22842: the logarithm of a generalized Gaussian)

#define BAM_EPSILON 1e-5

HOST_DEVICE double bam_value(const double* theta, PosencHead head, size_t d) {
    (void)head;
    double r = fabs(-(double)d - 2.0 * sinh(theta[2])) + BAM_EPSILON;
    return -exp(theta[0] + theta[1] * log(r));
}

HOST_DEVICE double bam_derivative(const double* theta, size_t p, PosencHead head, size_t d) {
    (void)head;
    double delta = -(double)d - 2.0 * sinh(theta[2]), log_r = log(fabs(delta) + BAM_EPSILON);
    double sign = (double)(delta > 0) - (double)(delta < 0);
    if (p == 2) { return exp(theta[0] + (theta[1] - 1.0) * log_r) * theta[1] * sign * 2.0 * cosh(theta[2]); }
    double value = -exp(theta[0] + theta[1] * log_r);
    return p == 0 ? value : value * log_r;
}

// theta_beta that is not trained is 1 (ALiBi's shape); a sampled theta_alpha is log-normal.
static inline double bam_initial(const char* word, bool trained, size_t p, size_t h, size_t NH, Random* random) {
    if (p == 1 && !trained) { return 1.0; }
    double x = initial_by_word(word, trained, p, h, NH, random);
    return p == 0 && strcmp(word, "sampled") == 0 ? exp(x) : x;
}

#include "posenc_tables.h"

// ----------------------------------------------------------------------------
// the lists

// A build may add encodings: -DPOSENC_EXTRA='"FILE"' names a header with more rows of both lists and their functions.
#ifdef POSENC_EXTRA
#include POSENC_EXTRA
#else
#define POSENC_LIST_EXTRA(X)
#define POSENC_TENSORS_EXTRA(X)
#endif

// What attention is given besides q, k and v: all that it knows of an encoding.
enum {
    TERM_DISTANCE = 1 << 0,  // a bias P_h(d)
    TERM_SLOPES = 1 << 1,    // which is -slope_h d, the only one that libraries of attention know
    TERM_SCALE = 1 << 2,     // the row scale of Scalable-Softmax
    TERM_CAP = 1 << 3,       // soft-capping of the products
    TERM_KEY = 1 << 4,       // a number for each key and head
    TERM_SINK = 1 << 5,      // a logit in the denominator alone
    TERM_MIX = 1 << 6,       // tables by distance weighted by the query
};

/*
X(KIND, name, mechanism, terms, bias inside the SSMax scale by default, value, derivative, reach, initial value)
Each row also exists as NAME_ssmax. The functions are those of the relative bias; for the learned numbers of head h,
theta[0], theta[1], ... in the order of POSENC_TENSORS:
    double value(const double* theta, PosencHead head, size_t d)                  P_h(d), host and device
    double derivative(const double* theta, size_t p, PosencHead head, size_t d)   dP_h(d) / dtheta[p], the same
    PosencReach reach(size_t p)    the distances outside which that derivative is 0, so that tables with a number for
                                   each distance cost no more than others; host and device
    double initial(const char* word, bool trained, size_t p, size_t h, size_t NH, Random* random)
                                   theta[p] at the start, for the word that the tensor's flag was given; host only
*/
#define POSENC_LIST(X)                                                                                               \
    X(NOPE, nope, POSENC_NONE, 0, false, no_value, no_derivative, everywhere, initial_by_word)                       \
    X(SINUSOIDAL, sinusoidal, POSENC_ADD, 0, false, no_value, no_derivative, everywhere, initial_by_word)            \
    X(LEARNED, learned, POSENC_LEARN, 0, false, no_value, no_derivative, everywhere, initial_by_word)                \
    X(ROTARY, rotary, POSENC_ROTATE, 0, false, no_value, no_derivative, everywhere, initial_by_word)                 \
    X(ALIBI, alibi, POSENC_NONE, TERM_DISTANCE | TERM_SLOPES, false, alibi_value, no_derivative, everywhere,         \
      initial_by_word)                                                                                               \
    X(BAM, bam, POSENC_NONE, TERM_DISTANCE, true, bam_value, bam_derivative, everywhere, bam_initial)                \
    X(KERPLE_LOG, kerple_log, POSENC_NONE, TERM_DISTANCE, true, kerple_log_value, kerple_log_derivative, everywhere, \
      kerple_log_initial)                                                                                            \
    X(KERPLE_POWER, kerple_power, POSENC_NONE, TERM_DISTANCE, true, kerple_power_value, kerple_power_derivative,     \
      everywhere, kerple_power_initial)                                                                              \
    X(ALIBI_LEARNED, alibi_learned, POSENC_NONE, TERM_DISTANCE, true, alibi_learned_value, alibi_learned_derivative, \
      everywhere, initial_by_word)                                                                                   \
    X(SANDWICH, sandwich, POSENC_NONE, TERM_DISTANCE, false, sandwich_value, no_derivative, everywhere,              \
      initial_by_word)                                                                                               \
    X(T5, t5, POSENC_NONE, TERM_DISTANCE, true, t5_value, t5_derivative, t5_reach, initial_by_word)                  \
    X(TABLE, table, POSENC_NONE, TERM_DISTANCE, true, table_value, table_derivative, table_reach, initial_by_word)   \
    X(FIRE, fire, POSENC_NONE, TERM_DISTANCE, true, fire_value, fire_derivative, everywhere, fire_initial)           \
    X(FOX, fox, POSENC_FORGET, TERM_KEY, true, no_value, no_derivative, everywhere, initial_by_word)                 \
    X(CABLE, cable, POSENC_SOFTPLUS, TERM_KEY, true, no_value, no_derivative, everywhere, initial_by_word)           \
    X(MIX, mix, POSENC_NONE, TERM_MIX, true, no_value, no_derivative, everywhere, initial_by_word)                   \
    POSENC_LIST_EXTRA(X)

// Does a tensor hold a number for each head, or one for all heads?
enum { POSENC_SHARED, POSENC_PER_HEAD };

/*
X(KIND, name, rows, per head or shared, trained by default, initial value by default, words that are initial values,
  largest initial number, the initial value's name in the published system, what it is)
A name is used once in the list: checkpoints, the flags --NAME_init and --NAME_trainable and the fields of args.json
are called after it. A published name that is NULL is NAME_init; one that is not stands first, and the flag answers
to both.
*/
#define POSENC_TENSORS(X)                                                                                             \
    X(BAM, theta_alpha, 1, POSENC_PER_HEAD, true, "0", "number slope log_slope sampled", INFINITY, NULL,              \
      "BAM's scale exponent")                                                                                         \
    X(BAM, theta_beta, 1, POSENC_PER_HEAD, true, "0", "number linear sampled", INFINITY, "thata_beta_init",           \
      "BAM's shape exponent (1 if not trained)")                                                                      \
    /* mu = 2 sinh(theta_mu): 20 is a distance of 5e8 already */                                                      \
    X(BAM, theta_mu, 1, POSENC_PER_HEAD, false, "0", "number", 20, NULL, "BAM's location parameter")                  \
    X(KERPLE_LOG, kerple_log_scale, 1, POSENC_PER_HEAD, true, "uniform", "number uniform sampled", 20, NULL,          \
      "logarithm of r1 of kerple_log")                                                                                \
    X(KERPLE_LOG, kerple_log_rate, 1, POSENC_PER_HEAD, true, "uniform", "number uniform sampled", 20, NULL,           \
      "logarithm of r2 of kerple_log")                                                                                \
    X(KERPLE_POWER, kerple_power_scale, 1, POSENC_PER_HEAD, true, "uniform", "number uniform log_slope sampled", 20,  \
      NULL, "logarithm of r1 of kerple_power")                                                                        \
    X(KERPLE_POWER, kerple_power_exponent, 1, POSENC_PER_HEAD, true, "uniform", "number uniform sampled", 20, NULL,   \
      "logit of half the exponent of kerple_power")                                                                   \
    X(ALIBI_LEARNED, alibi_log_slope, 1, POSENC_PER_HEAD, true, "log_slope", "number log_slope sampled", 20, NULL,    \
      "logarithms of ALiBi's slopes")                                                                                 \
    X(T5, t5_bias, T5_BUCKETS, POSENC_PER_HEAD, true, "0", "number sampled", 1e6, NULL,                               \
      "T5's biases by bucket of distances")                                                                           \
    X(TABLE, table_bias, TABLE_LENGTH, POSENC_PER_HEAD, true, "0", "number sampled", 1e6, NULL, "biases by distance") \
    X(FIRE, fire_scale, 1, POSENC_SHARED, true, "-2.302585", "number", 20, NULL, "logarithm of c of fire")            \
    X(FIRE, fire_hidden, FIRE_UNITS, POSENC_SHARED, true, "uniform", "number uniform sampled", 1e6, NULL,             \
      "hidden weights of fire")                                                                                       \
    X(FIRE, fire_hidden_bias, FIRE_UNITS, POSENC_SHARED, true, "uniform", "number uniform sampled", 1e6, NULL,        \
      "hidden biases of fire")                                                                                        \
    X(FIRE, fire_output, FIRE_UNITS, POSENC_PER_HEAD, true, "uniform", "number uniform sampled", 1e6, NULL,           \
      "output weights of fire")                                                                                       \
    POSENC_TENSORS_EXTRA(X)

typedef enum {
#define X(kind, ...) POS_##kind,
    POSENC_LIST(X)
#undef X
        POS_COUNT
} PosKind;

// POSENC_theta_alpha, ...: a tensor's place in the list.
enum {
#define X(kind, name, ...) POSENC_##name,
    POSENC_TENSORS(X)
#undef X
        POSENC_TENSOR_COUNT
};

// Rows of all tensors together: more than any encoding has.
enum {
    POSENC_ALL_ROWS = 0
#define X(kind, name, rows, ...) +(rows)
    POSENC_TENSORS(X)
#undef X
};

// What --position_encoding takes, separated by spaces.
static inline const char* posenc_choices(void) {
#define X(kind, name, ...) " " #name " " #name "_ssmax"
    static const char choices[] = POSENC_LIST(X);
#undef X
    return choices + 1;
}

typedef struct {
    const char* name;
    PosencMechanism mechanism;
    unsigned terms;
    bool inside;
} PosencInfo;

// What an encoding is, from the list.
static inline const PosencInfo* posenc_info(PosKind kind) {
    static const PosencInfo info[] = {
#define X(kind, name, mechanism, terms, inside, ...) {#name, mechanism, terms, inside},
        POSENC_LIST(X)
#undef X
    };
    return &info[kind];
}

// What attention is given for this encoding, with Scalable-Softmax or without.
static inline unsigned posenc_terms(PosKind kind, bool ssmax) {
    return posenc_info(kind)->terms | (ssmax ? (unsigned)TERM_SCALE : 0u);
}

typedef struct {
    PosKind owner;
    const char* name;                    // as checkpoints spell it
    size_t rows;                         // learned numbers of a head
    bool per_head;                       // else all heads have the same
    double most;                         // largest initial number
    const char *init_name, *train_name;  // in model_args
} PosencTensor;

static inline const PosencTensor* posenc_tensor(int tensor) {
    static const PosencTensor tensors[] = {
#define X(kind, name, rows, heads, trained, initial, words, most, published, what) \
    {POS_##kind, #name, rows, heads == POSENC_PER_HEAD, most, published ? published : #name "_init", "train_" #name},
        POSENC_TENSORS(X)
#undef X
    };
    return &tensors[tensor];
}

// Numbers that one head learns.
HOST_DEVICE size_t posenc_params(PosKind kind) {
    size_t params = 0;
#define X(owner, name, rows, ...) params += kind == POS_##owner ? (size_t)(rows) : 0;
    POSENC_TENSORS(X)
#undef X
    return params;
}

// Numbers of one tensor, and all that an encoding learns with NH heads, tensor after tensor: [rows,NH] or [rows].
static inline size_t posenc_tensor_numbers(int tensor, size_t NH) {
    return posenc_tensor(tensor)->rows * (posenc_tensor(tensor)->per_head ? NH : 1);
}

static inline size_t posenc_numbers(PosKind kind, size_t NH) {
    size_t numbers = 0;
    for (int t = 0; t < POSENC_TENSOR_COUNT; t++) {
        numbers += posenc_tensor(t)->owner == kind ? posenc_tensor_numbers(t, NH) : 0;
    }
    return numbers;
}

// Where theta[p] of head h is among them.
HOST_DEVICE size_t posenc_place(PosKind kind, size_t p, size_t h, size_t NH) {
    size_t place = 0;
#define X(owner, name, rows, heads, ...)                                         \
    if (kind == POS_##owner) {                                                   \
        const size_t per_row = heads == POSENC_PER_HEAD ? NH : 1;                \
        if (p < (rows)) { return place + p * per_row + (per_row == 1 ? 0 : h); } \
        p -= (rows), place += (rows)*per_row;                                    \
    }
    POSENC_TENSORS(X)
#undef X
    return place;
}

// theta[p] of head h in double, from all that the encoding learns.
HOST_DEVICE double posenc_parameter(PosKind kind, const float* numbers, size_t p, size_t h, size_t NH) {
    return (double)numbers[posenc_place(kind, p, h, NH)];
}

// Finds "bam", "bam_ssmax", ...; returns false for a name that is not in the list.
static inline bool posenc_parse(const char* name, PosKind* kind, bool* ssmax) {
    for (int k = 0; k < POS_COUNT; k++) {
        const char* base = posenc_info((PosKind)k)->name;
        size_t n = strlen(base);
        if (strncmp(name, base, n) != 0 || (name[n] != '\0' && strcmp(name + n, "_ssmax") != 0)) { continue; }
        *kind = (PosKind)k;
        *ssmax = name[n] != '\0';
        return true;
    }
    return false;
}

// The choices behind the flags of what encodings learn.
typedef struct {
    const char* init[POSENC_TENSOR_COUNT];  // one of the tensor's words
    bool trained[POSENC_TENSOR_COUNT];
} PosencOptions;

static inline PosencOptions posenc_default_options(void) {
    PosencOptions o = {{NULL}, {false}};
#define X(kind, name, rows, heads, learned, initial, ...) \
    o.init[POSENC_##name] = initial, o.trained[POSENC_##name] = learned;
    POSENC_TENSORS(X)
#undef X
    return o;
}

// ----------------------------------------------------------------------------
// the table of positions of any encoding that is computed

// What is added to the embedding and how q and k are rotated.
typedef struct {
    double sinusoidal_theta;  // base of the sinusoids' wavelengths
    bool sinusoidal_vaswani;  // both sine and cosine at exponent 2i/C; else as published with BAM
    Rotation rotation;
} PositionSettings;

// Entries 2m and 2m + 1 of the table's row of `width` numbers: two channels of what is added to the embedding, or
// cosine and sine of a rotation.
HOST_DEVICE void position_pair(float* pair, PosencMechanism mechanism, const PositionSettings* s, size_t position,
                               size_t m, size_t width) {
    if (mechanism == POSENC_ROTATE) {
        rope_pair(pair, &s->rotation, position, m);
    } else {
        pair[0] = sinusoidal_value(position, 2 * m, width, s->sinusoidal_theta, s->sinusoidal_vaswani);
        pair[1] = sinusoidal_value(position, 2 * m + 1, width, s->sinusoidal_theta, s->sinusoidal_vaswani);
    }
}

// ----------------------------------------------------------------------------
// the relative bias of any encoding

// Attention multiplies P by the row scale and by log2(e), so P stays this far inside fp32.
#define POSENC_BIAS_LIMIT 1e30

HOST_DEVICE double posenc_bias_unclamped(PosKind kind, const double* theta, PosencHead head, size_t d) {
    switch (kind) {
#define X(kind, name, mechanism, terms, inside, value, ...) \
    case POS_##kind: return value(theta, head, d);
        POSENC_LIST(X)
#undef X
        default: return 0.0;
    }
}

// What PosencHead.coordinates holds of distance d: a function of what all heads share, 0 for encodings without one.
HOST_DEVICE bool posenc_has_coordinates(PosKind kind) { return kind == POS_FIRE; }

HOST_DEVICE double posenc_coordinate(PosKind kind, const double* theta, PosencSettings settings, size_t d) {
    return kind == POS_FIRE ? fire_coordinate(theta, settings, d) : 0.0;
}

// P_h(d), finite for all parameters: kept within +-POSENC_BIAS_LIMIT (theta_beta = -8 at d = 0 would be 1e40).
HOST_DEVICE float posenc_bias(PosKind kind, const double* theta, PosencHead head, size_t d) {
    double p = posenc_bias_unclamped(kind, theta, head, d);
    return (float)(p < -POSENC_BIAS_LIMIT ? -POSENC_BIAS_LIMIT : p > POSENC_BIAS_LIMIT ? POSENC_BIAS_LIMIT : p);
}

// Derivative by the head's number p of P_h(d) that is not clamped.
HOST_DEVICE double posenc_derivative_unclamped(PosKind kind, const double* theta, size_t p, PosencHead head, size_t d) {
    switch (kind) {
#define X(kind, name, mechanism, terms, inside, value, derivative, ...) \
    case POS_##kind: return derivative(theta, p, head, d);
        POSENC_LIST(X)
#undef X
        default: return 0.0;
    }
}

// The distances outside which the derivative by the head's number p is 0.
HOST_DEVICE PosencReach posenc_reach(PosKind kind, size_t p) {
    switch (kind) {
#define X(kind, name, mechanism, terms, inside, value, derivative, reach, ...) \
    case POS_##kind: return reach(p);
        POSENC_LIST(X)
#undef X
        default: return everywhere(p);
    }
}

// The derivatives are 0 where this is true.
HOST_DEVICE bool posenc_bias_clamped(PosKind kind, const double* theta, PosencHead head, size_t d) {
    return !(fabs(posenc_bias_unclamped(kind, theta, head, d)) < POSENC_BIAS_LIMIT);
}

// Initial value of a tensor's number i.
static inline double posenc_initial(const PosencOptions* options, int tensor, size_t i, size_t NH, Random* random) {
    const PosencTensor* t = posenc_tensor(tensor);
    size_t p = t->per_head ? i / NH : i, h = t->per_head ? i % NH : 0;
    for (int before = 0; before < tensor; before++) {
        p += posenc_tensor(before)->owner == t->owner ? posenc_tensor(before)->rows : 0;
    }
    const char* word = options->init[tensor];
    switch (t->owner) {
#define X(kind, name, mechanism, terms, inside, value, derivative, reach, initial) \
    case POS_##kind: return initial(word, options->trained[tensor], p, h, NH, random);
        POSENC_LIST(X)
#undef X
        default: return 0.0;
    }
}

// ----------------------------------------------------------------------------
// Scalable-Softmax (Nakanishi 2025, arXiv 2501.19399): the logits of query i are multiplied by
// g_i = s_h ln(n_i), n_i the number of keys it sees; with the bias inside, so is the bias.

HOST_DEVICE float ssmax_log_count(size_t visible_keys) { return (float)log((double)visible_keys); }

// ----------------------------------------------------------------------------
// what a query sees

typedef struct {
    size_t window;       // at most this many keys, the last ones (Beltagy et al. 2020); 0: the whole document
    double from, slope;  // g = 1 + slope ln(max(1, n / from)), of n visible keys, in place of ln n; from 0: no
} RowRule;

// The first visible key of the query at `position`, whose document begins at `start`.
HOST_DEVICE int window_start(RowRule rule, size_t position, int start) {
    const long long first = rule.window ? (long long)position + 1 - (long long)rule.window : 0;
    return first > start ? (int)first : start;
}

// What the logits of a query that sees so many keys are multiplied by, besides a learned scale: a temperature that
// falls with the length (Su 2021, "entropy invariance"; Qwen, Llama 4).
HOST_DEVICE float row_scale_of(RowRule rule, size_t visible_keys) {
    if (rule.from == 0) { return ssmax_log_count(visible_keys); }
    const double ratio = (double)visible_keys / rule.from;
    return (float)(1.0 + rule.slope * (ratio > 1 ? log(ratio) : 0.0));
}

#endif
