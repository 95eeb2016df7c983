/*
All positional mathematics, once, for host and device: the list of encodings, their initial values,
what they add to the embedding, how they rotate q and k, the relative bias P_h(d) that attention adds
to the logit at distance d = i - j >= 0, its derivatives, Scalable-Softmax and its order.

To add a relative bias: one row in POSENC_LIST, its parameters' names, and its three functions
(initial values, value, derivatives) beside those of BAM. Flags, checkpoints, gradient tests and the
evaluator walk the list.

Values are computed in double and rounded once to fp32: tables are small (NH x T) and positions reach
262,144, where fp32 powers and angles are wrong in the fourth digit.
*/
#ifndef POSENC_H
#define POSENC_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "random.h"

#ifdef __CUDACC__
#define HOST_DEVICE static inline __host__ __device__
#else
#define HOST_DEVICE static inline
#endif

enum { POSENC_MAX_PARAMS = 3 };

// How an encoding acts. Everything else in the program asks for the mechanism, never for a name.
typedef enum { POSENC_NONE, POSENC_ADD, POSENC_ROTATE, POSENC_BIAS } PosencMechanism;

/*
X(KIND, name, mechanism, learned parameters per head, bias inside the SSMax scale by default)
Each row also exists as NAME_ssmax.
*/
#define POSENC_LIST(X)                              \
    X(NOPE, nope, POSENC_NONE, 0, false)            \
    X(SINUSOIDAL, sinusoidal, POSENC_ADD, 0, false) \
    X(ROTARY, rotary, POSENC_ROTATE, 0, false)      \
    X(ALIBI, alibi, POSENC_BIAS, 0, false)          \
    X(BAM, bam, POSENC_BIAS, 3, true)

typedef enum {
#define X(kind, name, mechanism, params, inside) POS_##kind,
    POSENC_LIST(X)
#undef X
        POS_COUNT
} PosKind;

typedef struct {
    const char* name;
    PosencMechanism mechanism;
    int params;
    bool inside;
} PosencInfo;

// What an encoding is, from the list.
static inline const PosencInfo* posenc_info(PosKind kind) {
    static const PosencInfo info[] = {
#define X(kind, name, mechanism, params, inside) {#name, mechanism, params, inside},
        POSENC_LIST(X)
#undef X
    };
    return &info[kind];
}

// Can libraries of attention compute it? Of biases they know ALiBi's only.
static inline bool posenc_in_libraries(PosKind kind) {
    return posenc_info(kind)->mechanism != POSENC_BIAS || kind == POS_ALIBI;
}

// Names of an encoding's learned parameters, as checkpoints spell them; index below posenc_info()->params.
static inline const char* posenc_param_name(PosKind kind, int index) {
    static const char* const bam[] = {"theta_alpha", "theta_beta", "theta_mu"};
    return kind == POS_BAM ? bam[index] : "";
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

// The choices behind the encodings' flags.
typedef struct {
    const char* alpha_init;  // number, "slope", "log_slope" or "sampled"
    const char* beta_init;   // number, "linear" or "sampled"
    const char* mu_init;     // number
    bool trainable[POSENC_MAX_PARAMS];
    double rotary_theta;      // base of the rotation's wavelengths
    double sinusoidal_theta;  // base of the sinusoids' wavelengths
    bool sinusoidal_vaswani;  // both sine and cosine at exponent 2i/C; else as published with BAM
} PosencOptions;

static inline PosencOptions posenc_default_options(void) {
    PosencOptions o = {"0", "0", "0", {true, true, false}, 500000.0, 10000.0, false};
    return o;
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
// rotary: pair (2m, 2m+1) of q and k turns by angle position * theta^(-2m/HS) (Su et al. 2021, eq. 34)

HOST_DEVICE double rotary_angle(size_t position, size_t m, size_t HS, double theta) {
    return (double)position * pow(theta, -2.0 * (double)m / (double)HS);
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

HOST_DEVICE double alibi_value(const double* theta, size_t h, size_t NH, size_t d) {
    (void)theta;
    return -alibi_slope(h, NH) * (double)d;
}

HOST_DEVICE void alibi_derivatives(double* gradient, const double* theta, size_t d) {
    (void)gradient, (void)theta, (void)d;  // nothing is learned
}

// ----------------------------------------------------------------------------
// BAM: P = -e^alpha r^beta, r = |D| + 1e-5, D = (j - i) - mu, mu = e^m - e^-m; theta = (alpha, beta, m)
// (Bianchessi et al., arXiv 2505.22842: the logarithm of a generalized Gaussian)

#define BAM_EPSILON 1e-5

HOST_DEVICE double bam_value(const double* theta, size_t h, size_t NH, size_t d) {
    (void)h, (void)NH;
    double r = fabs(-(double)d - 2.0 * sinh(theta[2])) + BAM_EPSILON;
    return -exp(theta[0] + theta[1] * log(r));
}

HOST_DEVICE void bam_derivatives(double* gradient, const double* theta, size_t d) {
    double delta = -(double)d - 2.0 * sinh(theta[2]), r = fabs(delta) + BAM_EPSILON, log_r = log(r);
    double value = -exp(theta[0] + theta[1] * log_r);
    double sign = (double)(delta > 0) - (double)(delta < 0);
    gradient[0] = value;
    gradient[1] = value * log_r;
    gradient[2] = exp(theta[0] + (theta[1] - 1.0) * log_r) * theta[1] * sign * 2.0 * cosh(theta[2]);
}

// A number, or one of the words that the flags take. theta_beta that is not trained is 1 (ALiBi's shape).
static inline double bam_initial(const PosencOptions* o, int param, size_t h, size_t NH, Random* random) {
    const char* word = param == 0 ? o->alpha_init : param == 1 ? o->beta_init : o->mu_init;
    if (param == 1 && !o->trainable[1]) { return 1.0; }
    if (strcmp(word, "slope") == 0) { return alibi_slope(h, NH); }
    if (strcmp(word, "log_slope") == 0) { return log(alibi_slope(h, NH)); }
    if (strcmp(word, "linear") == 0) { return NH > 1 ? (double)h / (double)(NH - 1) : 0.0; }
    if (strcmp(word, "sampled") == 0) {
        double x = random_normal(random);
        return param == 0 ? exp(x) : x;
    }
    return atof(word);
}

// ----------------------------------------------------------------------------
// the relative bias of any encoding

// Attention multiplies P by the row scale and by log2(e), so P stays this far inside fp32.
#define POSENC_BIAS_LIMIT 1e30

HOST_DEVICE double posenc_bias_unclamped(PosKind kind, const double* theta, size_t h, size_t NH, size_t d) {
    switch (kind) {
        case POS_ALIBI: return alibi_value(theta, h, NH, d);
        case POS_BAM: return bam_value(theta, h, NH, d);
        default: return 0.0;
    }
}

// P_h(d), finite for all parameters: kept within +-POSENC_BIAS_LIMIT (theta_beta = -8 at d = 0 would be 1e40).
HOST_DEVICE float posenc_bias(PosKind kind, const double* theta, size_t h, size_t NH, size_t d) {
    double p = posenc_bias_unclamped(kind, theta, h, NH, d);
    return (float)(p < -POSENC_BIAS_LIMIT ? -POSENC_BIAS_LIMIT : p > POSENC_BIAS_LIMIT ? POSENC_BIAS_LIMIT : p);
}

// Derivatives of P_h(d) by the head's parameters: gradient[POSENC_MAX_PARAMS], overwritten; 0 where P is clamped.
HOST_DEVICE void posenc_bias_derivatives(double* gradient, PosKind kind, const double* theta, size_t h, size_t NH,
                                         size_t d) {
    for (int p = 0; p < POSENC_MAX_PARAMS; p++) { gradient[p] = 0.0; }
    if (!(fabs(posenc_bias_unclamped(kind, theta, h, NH, d)) < POSENC_BIAS_LIMIT)) { return; }
    switch (kind) {
        case POS_ALIBI: alibi_derivatives(gradient, theta, d); break;
        case POS_BAM: bam_derivatives(gradient, theta, d); break;
        default: break;
    }
}

// Initial value of parameter `param` of head h.
static inline double posenc_initial(PosKind kind, const PosencOptions* options, int param, size_t h, size_t NH,
                                    Random* random) {
    return kind == POS_BAM ? bam_initial(options, param, h, NH, random) : 0.0;
}

// ----------------------------------------------------------------------------
// Scalable-Softmax (Nakanishi 2025, arXiv 2501.19399): the logits of query i are multiplied by
// g_i = s_h ln(n_i), n_i the number of keys it sees; with the bias inside, so is the bias.

HOST_DEVICE float ssmax_log_count(size_t visible_keys) { return (float)log((double)visible_keys); }

#endif
