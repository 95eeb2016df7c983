/*
Relative biases by distance that others published, in the form that posenc.h's lists take: value, derivative, reach
and initial value. Positive numbers are learned as their logarithm, those between 0 and 2 as 2 / (1 + e^-theta), where
the published code clamps them. Included by posenc.h only.
*/
#ifndef POSENC_TABLES_H
#define POSENC_TABLES_H

// ----------------------------------------------------------------------------
// KERPLE (Chi et al. 2022, arXiv 2205.09921), logarithmic: P = -r1 ln(1 + r2 d); theta = (ln r1, ln r2)

HOST_DEVICE double kerple_log_value(const double* theta, PosencHead head, size_t d) {
    (void)head;
    return d == 0 ? 0.0 : -exp(theta[0]) * log1p(exp(theta[1]) * (double)d);
}

HOST_DEVICE double kerple_log_derivative(const double* theta, size_t p, PosencHead head, size_t d) {
    if (p == 0 || d == 0) { return kerple_log_value(theta, head, d); }
    return -exp(theta[0]) / (1.0 + exp(-theta[1]) / (double)d);
}

// A number between `least` and `most`, each as probable as others.
static inline double uniform_between(double least, double most, Random* random) {
    const double x = most * random_uniform(random);
    return x < least ? least : x;
}

// Published: r1 from 0 to 2, r2 from 0 to 1, and at least 0.01.
static inline double kerple_log_initial(const char* word, bool trained, size_t p, size_t h, size_t NH, Random* random) {
    if (strcmp(word, "uniform") == 0) { return log(uniform_between(0.01, p == 0 ? 2.0 : 1.0, random)); }
    return initial_by_word(word, trained, p, h, NH, random);
}

// ----------------------------------------------------------------------------
// KERPLE, power: P = -r1 d^r2, 0 < r2 < 2; theta = (ln r1, ln(r2 / (2 - r2)))

HOST_DEVICE double kerple_power_exponent(double theta) { return 2.0 / (1.0 + exp(-theta)); }

HOST_DEVICE double kerple_power_value(const double* theta, PosencHead head, size_t d) {
    (void)head;
    return d == 0 ? 0.0 : -exp(theta[0] + kerple_power_exponent(theta[1]) * log((double)d));
}

HOST_DEVICE double kerple_power_derivative(const double* theta, size_t p, PosencHead head, size_t d) {
    const double value = kerple_power_value(theta, head, d), exponent = kerple_power_exponent(theta[1]);
    return p == 0 || d == 0 ? value : value * log((double)d) * exponent * (1.0 - 0.5 * exponent);
}

// Published: r1 from 0 to 1, r2 from 0 to 2, and at least 0.01; here r2 ends at 1.99, where theta is still finite.
static inline double kerple_power_initial(const char* word, bool trained, size_t p, size_t h, size_t NH,
                                          Random* random) {
    if (strcmp(word, "uniform") != 0) { return initial_by_word(word, trained, p, h, NH, random); }
    if (p == 0) { return log(uniform_between(0.01, 1.0, random)); }
    const double exponent = fmin(uniform_between(0.01, 2.0, random), 1.99);
    return log(exponent / (2.0 - exponent));
}

// ----------------------------------------------------------------------------
// ALiBi with slopes that are trained: P = -e^theta d

HOST_DEVICE double alibi_learned_value(const double* theta, PosencHead head, size_t d) {
    (void)head;
    return -exp(theta[0]) * (double)d;
}

HOST_DEVICE double alibi_learned_derivative(const double* theta, size_t p, PosencHead head, size_t d) {
    (void)p;
    return alibi_learned_value(theta, head, d);
}

// ----------------------------------------------------------------------------
// Sandwich (Chi et al. 2023, arXiv 2212.10356): the product of the sinusoidal embeddings of query and key, which is a
// function of their distance, P = NH / (8 (h + 1)) sum over i < floor(w/2) of cos(d 10000^(-2i/w))

// As in the published code the sum stands positive, without an offset (it is largest at d = 0, and softmax does not see
// a constant), and head h = 0, 1, ... divides it by 8 (h + 1) / NH. In double, also for every head anew: fp32 angles
// are wrong by 1e-3 at 8192. The frequencies' rounding adds up to 1e-10 at 262,144.
HOST_DEVICE double sandwich_value(const double* theta, PosencHead head, size_t d) {
    (void)theta;
    const size_t w = head.settings.sandwich_dim;
    const double ratio = pow(10000.0, -2.0 / (double)w);
    double sum = 0.0, angle = (double)d;
    for (size_t i = 0; i < w / 2; i++, angle *= ratio) { sum += cos(angle); }
    return sum * (double)head.NH / (8.0 * (double)(head.h + 1));
}

// ----------------------------------------------------------------------------
// T5 (Raffel et al. 2020, arXiv 1910.10683): a learned number for each of 32 buckets of distances, by the causal rule.
// Distances below 16 have buckets of their own; the others grow in proportion and the last begins before 128. In T5
// all layers share the numbers (--global_prior).

enum { T5_BUCKETS = 32, T5_EXACT = 16, T5_OCTAVES = 3 };  // 128 is 3 octaves above 16

HOST_DEVICE size_t t5_bucket(size_t d) {
    if (d < T5_EXACT) { return d; }
    const double octaves = log2((double)d / T5_EXACT);
    const size_t bucket = T5_EXACT + (size_t)(octaves * (T5_BUCKETS - T5_EXACT) / T5_OCTAVES);
    return bucket < T5_BUCKETS ? bucket : T5_BUCKETS - 1;
}

// The first distance of a bucket. Those of 17 and more are no whole numbers before they are rounded up.
HOST_DEVICE size_t t5_first(size_t bucket) {
    if (bucket <= T5_EXACT) { return bucket; }
    const double octaves = (double)((bucket - T5_EXACT) * T5_OCTAVES) / (T5_BUCKETS - T5_EXACT);
    return (size_t)ceil(T5_EXACT * exp2(octaves));
}

HOST_DEVICE double t5_value(const double* theta, PosencHead head, size_t d) {
    (void)head;
    return theta[t5_bucket(d)];
}

HOST_DEVICE double t5_derivative(const double* theta, size_t p, PosencHead head, size_t d) {
    (void)theta, (void)head;
    return (double)(t5_bucket(d) == p);
}

HOST_DEVICE PosencReach t5_reach(size_t p) {
    PosencReach reach = {t5_first(p), p + 1 < T5_BUCKETS ? t5_first(p + 1) : SIZE_MAX};
    return reach;
}

// ----------------------------------------------------------------------------
// table: a learned number for each distance (Shaw et al. 2018, arXiv 1803.02155, as a bias); those beyond the last have
// the last one's

enum { TABLE_LENGTH = 512 };

HOST_DEVICE size_t distance_row(size_t d) { return d < TABLE_LENGTH ? d : TABLE_LENGTH - 1; }

HOST_DEVICE double table_value(const double* theta, PosencHead head, size_t d) {
    (void)head;
    return theta[distance_row(d)];
}

HOST_DEVICE double table_derivative(const double* theta, size_t p, PosencHead head, size_t d) {
    (void)theta, (void)head;
    return (double)(distance_row(d) == p);
}

HOST_DEVICE PosencReach table_reach(size_t p) {
    PosencReach reach = {p, p + 1 < TABLE_LENGTH ? p + 1 : SIZE_MAX};
    return reach;
}

// ----------------------------------------------------------------------------
// FIRE (Li et al. 2024, arXiv 2310.04418): a network with one hidden layer that all heads share, and an output for
// each, of x = ln(1 + c d) / ln(1 + c L): P = sum over k of v_k max(0, w_k x + b_k); theta = (ln c, w, b, v).
// Published, the denominator has the query's position where that is beyond L, so that x ends at 1; here it is a
// function of distance alone, L the training length, and x goes on above 1 beyond it. An output's bias would be
// constant in every row.

enum { FIRE_UNITS = 32 };

HOST_DEVICE double fire_coordinate(const double* theta, PosencSettings settings, size_t d) {
    const double c = exp(theta[0]);
    return log1p(c * (double)d) / log1p(c * (double)settings.fire_length);
}

HOST_DEVICE double fire_coordinate_of(const double* theta, PosencHead head, size_t d) {
    return head.coordinates ? head.coordinates[d] : fire_coordinate(theta, head.settings, d);
}

HOST_DEVICE double fire_value(const double* theta, PosencHead head, size_t d) {
    const double x = fire_coordinate_of(theta, head, d), *w = theta + 1, *b = w + FIRE_UNITS, *v = b + FIRE_UNITS;
    double sum = 0.0;
    for (size_t k = 0; k < FIRE_UNITS; k++) {
        const double unit = w[k] * x + b[k];
        sum += unit > 0 ? v[k] * unit : 0.0;
    }
    return sum;
}

// By ln c through every unit; by any other number through its own alone.
HOST_DEVICE double fire_derivative(const double* theta, size_t p, PosencHead head, size_t d) {
    const double x = fire_coordinate_of(theta, head, d), *w = theta + 1, *b = w + FIRE_UNITS, *v = b + FIRE_UNITS;
    if (p > 0) {
        const size_t k = (p - 1) % FIRE_UNITS;
        const double unit = w[k] * x + b[k];
        if (!(unit > 0)) { return 0.0; }
        return p <= FIRE_UNITS ? v[k] * x : p <= 2 * FIRE_UNITS ? v[k] : unit;
    }
    double slope = 0.0;  // by x
    for (size_t k = 0; k < FIRE_UNITS; k++) { slope += w[k] * x + b[k] > 0 ? v[k] * w[k] : 0.0; }
    const double near = exp(theta[0]) * (double)d, far = exp(theta[0]) * (double)head.settings.fire_length;
    return slope * (near / (1.0 + near) - x * far / (1.0 + far)) / log1p(far);
}

// As PyTorch begins linear layers: uniform up to 1 / sqrt(inputs) on either side. Published, c begins at 0.1.
static inline double fire_initial(const char* word, bool trained, size_t p, size_t h, size_t NH, Random* random) {
    if (strcmp(word, "uniform") != 0) { return initial_by_word(word, trained, p, h, NH, random); }
    return (2.0 * random_uniform(random) - 1.0) / (p > 2 * FIRE_UNITS ? sqrt((double)FIRE_UNITS) : 1.0);
}

#endif
