/*
The rotation of q and k: how many channels of a head turn, how fast, and how published methods slow them down so that a
model reads beyond the length of its training. Host only: a head has at most 64 pairs of channels, whose frequencies are
found once. Included by posenc.h only.
*/
#ifndef POSENC_ROPE_H
#define POSENC_ROPE_H

#define ROPE_PI 3.14159265358979323846

enum { ROPE_MAX_PAIRS = 64 };

// The order of the words of --rope_scaling.
typedef enum { ROPE_NONE, ROPE_LINEAR, ROPE_NTK, ROPE_YARN, ROPE_LLAMA3 } RopeScaling;

typedef struct {
    double theta;  // base of the wavelengths
    size_t width;  // channels of a head that turn, from its first on; even
    RopeScaling scaling;
    double factor;                             // how many times the original length is to be read
    double original_length;                    // tokens that the model was trained on before; yarn, llama3
    double beta_fast, beta_slow;               // yarn: turns in the original length
    double attention_factor;                   // yarn: what cosines and sines are multiplied by
    double low_freq_factor, high_freq_factor;  // llama3: turns in the original length
} RopeSettings;

// What a head's pairs turn by at every position. Pair m is the channels (2m, 2m+1).
typedef struct {
    double frequency[ROPE_MAX_PAIRS];  // 0 beyond the pairs that turn
    double magnitude;                  // of the pairs that turn
    size_t pairs;                      // that turn
} Rotation;

// The channels of a head that turn: the first 2 round(fraction HS / 2), as partial rotary factors of GPT-NeoX and Phi.
static inline size_t rope_width(double fraction, size_t HS) { return 2 * (size_t)round(fraction * (double)HS / 2.0); }

// Su et al. 2021, equation 34, over the channels that turn.
static inline double rope_plain_frequency(double theta, size_t m, size_t width) {
    return pow(theta, -2.0 * (double)m / (double)width);
}

// NTK-aware scaling (bloc97 2023; Peng et al. 2023, section 3.1): the base that slows the last pair down by the factor
// and leaves the first one alone.
static inline double rope_ntk_theta(const RopeSettings* s) {
    return s->theta * pow(s->factor, (double)s->width / (double)(s->width - 2));
}

// The pair, as a real number, that turns so many times in the original length.
static inline double rope_yarn_pair(const RopeSettings* s, double turns) {
    return (double)s->width * log(s->original_length / (turns * 2.0 * ROPE_PI)) / (2.0 * log(s->theta));
}

// YaRN, "NTK-by-parts" (Peng et al. 2023, arXiv 2309.00071, section 3.2): pairs that turn more than beta_fast times in
// the original length keep their frequency, those that turn less than beta_slow times are interpolated. In between it
// is a line by the number of the pair, from whole pair to whole pair, as in the published code and Hugging Face's, by
// which models are trained; the paper's text has a line by the number of turns.
static inline double rope_yarn_frequency(const RopeSettings* s, size_t m) {
    double first = fmax(floor(rope_yarn_pair(s, s->beta_fast)), 0.0);
    double last = fmin(ceil(rope_yarn_pair(s, s->beta_slow)), (double)s->width - 1.0);
    if (first == last) { last += 0.001; }
    double slowed = fmin(fmax(((double)m - first) / (last - first), 0.0), 1.0);
    double frequency = rope_plain_frequency(s->theta, m, s->width);
    return frequency * (1.0 - slowed) + frequency / s->factor * slowed;
}

// Llama 3.1 (its published code; rope_type llama3): as YaRN's, but a line by the number of turns.
static inline double rope_llama3_frequency(const RopeSettings* s, size_t m) {
    double frequency = rope_plain_frequency(s->theta, m, s->width);
    double turns = s->original_length * frequency / (2.0 * ROPE_PI);
    double kept = (turns - s->low_freq_factor) / (s->high_freq_factor - s->low_freq_factor);
    kept = fmin(fmax(kept, 0.0), 1.0);
    return frequency * kept + frequency / s->factor * (1.0 - kept);
}

static inline double rope_frequency(const RopeSettings* s, size_t m) {
    switch (s->scaling) {
        case ROPE_LINEAR: return rope_plain_frequency(s->theta, m, s->width) / s->factor;  // Chen et al. 2023
        case ROPE_NTK: return rope_plain_frequency(rope_ntk_theta(s), m, s->width);
        case ROPE_YARN: return rope_yarn_frequency(s, m);
        case ROPE_LLAMA3: return rope_llama3_frequency(s, m);
        default: return rope_plain_frequency(s->theta, m, s->width);
    }
}

// YaRN's temperature (Peng et al. 2023, equations 21 and 22): logits are divided by t, sqrt(1/t) = 0.1 ln factor + 1.
static inline double rope_yarn_attention_factor(double factor) { return 0.1 * log(factor) + 1.0; }

static inline Rotation rope_rotation(const RopeSettings* s) {
    Rotation r;
    memset(&r, 0, sizeof r);
    r.pairs = s->width / 2;
    for (size_t m = 0; m < r.pairs; m++) { r.frequency[m] = rope_frequency(s, m); }
    // q and k are both multiplied by it, so that logits are by its square
    r.magnitude = s->scaling == ROPE_YARN ? s->attention_factor : 1.0;
    return r;
}

// Cosine and sine of pair m at a position. The channels that do not turn keep their values.
HOST_DEVICE void rope_pair(float* pair, const Rotation* r, size_t position, size_t m) {
    const double angle = (double)position * r->frequency[m], magnitude = m < r->pairs ? r->magnitude : 1.0;
    pair[0] = (float)(magnitude * cos(angle));
    pair[1] = (float)(magnitude * sin(angle));
}

#endif
