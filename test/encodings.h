/*
Encodings that only tests have, added to the lists of llmc/posenc.h as its POSENC_EXTRA: one that learns three tensors,
which is the example of README.md, and one whose two tensors are of several rows and shared by all heads.
*/

// fade: P = -e^depth (1 - e^(-rate d)) - e^slope d, rate = e^theta[1]: steep at first, then a line
HOST_DEVICE double fade_value(const double* theta, PosencHead head, size_t d) {
    (void)head;
    return exp(theta[0]) * expm1(-exp(theta[1]) * (double)d) - exp(theta[2]) * (double)d;
}

HOST_DEVICE double fade_derivative(const double* theta, size_t p, PosencHead head, size_t d) {
    (void)head;
    double fall = exp(theta[1]) * (double)d;
    switch (p) {
        case 0: return exp(theta[0]) * expm1(-fall);
        case 1: return -exp(theta[0] - fall) * fall;
        default: return -exp(theta[2]) * (double)d;
    }
}

// bins: P = bias of the bin of d (0 to 3, 4 to 15, 16 and more) - e^decay ln(1 + d)
HOST_DEVICE size_t bin_of(size_t d) { return d < 4 ? 0 : d < 16 ? 1 : 2; }

HOST_DEVICE double bins_value(const double* theta, PosencHead head, size_t d) {
    (void)head;
    return theta[bin_of(d)] - exp(theta[3]) * log1p((double)d);
}

HOST_DEVICE double bins_derivative(const double* theta, size_t p, PosencHead head, size_t d) {
    (void)head;
    return p < 3 ? (double)(bin_of(d) == p) : -exp(theta[3]) * log1p((double)d);
}

#define POSENC_LIST_EXTRA(X)                                                                                  \
    X(FADE, fade, POSENC_NONE, TERM_DISTANCE, true, fade_value, fade_derivative, everywhere, initial_by_word) \
    X(BINS, bins, POSENC_NONE, TERM_DISTANCE, false, bins_value, bins_derivative, everywhere, initial_by_word)

#define POSENC_TENSORS_EXTRA(X)                                                                                   \
    X(FADE, fade_depth, 1, POSENC_PER_HEAD, true, "0", "number linear", INFINITY, NULL, "depth exponent of fade") \
    X(FADE, fade_rate, 1, POSENC_PER_HEAD, true, "-1", "number sampled", 20, NULL, "rate exponent of fade")       \
    X(FADE, fade_slope, 1, POSENC_PER_HEAD, true, "log_slope", "number log_slope", INFINITY, NULL,                \
      "slope exponent of fade")                                                                                   \
    X(BINS, bin_bias, 3, POSENC_PER_HEAD, true, "0", "number sampled", INFINITY, NULL, "biases of bins")          \
    X(BINS, bin_decay, 1, POSENC_SHARED, false, "-2", "number", 20, NULL, "decay exponent of bins")
