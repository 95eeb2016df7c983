/*
posenc.h and posenc.c: names, slopes, biases at far distances, derivatives of the bias against finite differences,
saturation. Positions that are added or rotate are in test_rope.c.
*/
#include "test_util.h"

#include "../llmc/backend.h"

static const PosencSettings settings = POSENC_DEFAULT_SETTINGS;

static void test_parse(void** state) {
    (void)state;
    const struct {
        const char* name;
        PosKind kind;
        bool ssmax;
    } good[] = {{"nope", POS_NOPE, false},
                {"nope_ssmax", POS_NOPE, true},
                {"sinusoidal", POS_SINUSOIDAL, false},
                {"sinusoidal_ssmax", POS_SINUSOIDAL, true},
                {"learned", POS_LEARNED, false},
                {"learned_ssmax", POS_LEARNED, true},
                {"rotary", POS_ROTARY, false},
                {"rotary_ssmax", POS_ROTARY, true},
                {"alibi", POS_ALIBI, false},
                {"alibi_ssmax", POS_ALIBI, true},
                {"bam", POS_BAM, false},
                {"bam_ssmax", POS_BAM, true},
                {"kerple_log", POS_KERPLE_LOG, false},
                {"kerple_log_ssmax", POS_KERPLE_LOG, true},
                {"kerple_power", POS_KERPLE_POWER, false},
                {"kerple_power_ssmax", POS_KERPLE_POWER, true},
                {"alibi_learned", POS_ALIBI_LEARNED, false},
                {"alibi_learned_ssmax", POS_ALIBI_LEARNED, true},
                {"sandwich", POS_SANDWICH, false},
                {"sandwich_ssmax", POS_SANDWICH, true},
                {"t5", POS_T5, false},
                {"t5_ssmax", POS_T5, true},
                {"table", POS_TABLE, false},
                {"table_ssmax", POS_TABLE, true},
                {"fire", POS_FIRE, false},
                {"fire_ssmax", POS_FIRE, true},
                {"fox", POS_FOX, false},
                {"fox_ssmax", POS_FOX, true},
                {"cable", POS_CABLE, false},
                {"cable_ssmax", POS_CABLE, true},
                {"mix", POS_MIX, false},
                {"mix_ssmax", POS_MIX, true}};
    assert_int_equal(sizeof good / sizeof *good, 2 * POS_COUNT);
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        PosKind kind = POS_COUNT;
        bool ssmax = !good[i].ssmax;
        assert_true(posenc_parse(good[i].name, &kind, &ssmax));
        assert_int_equal(kind, good[i].kind);
        assert_int_equal(ssmax, good[i].ssmax);
    }
    const char* bad[] = {"",           "ssmax",           "_ssmax", "bamx",   "ba",     "BAM", "bam_",
                         "bam_ssmaxx", "bam_ssmax_ssmax", " bam",   "alibi_", "kerple", "t",   "t55"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        PosKind kind;
        bool ssmax;
        assert_false(posenc_parse(bad[i], &kind, &ssmax));
    }
}

// The rule as the paper's code states it: halve to a power of two, then recurse.
static void alibi_slopes_by_rule(double* slopes, size_t n) {
    if ((n & (n - 1)) == 0) {
        double start = pow(2, -pow(2, -(log2((double)n) - 3)));
        for (size_t i = 0; i < n; i++) { slopes[i] = start * pow(start, (double)i); }
        return;
    }
    size_t power = 1;
    while (power * 2 < n) { power *= 2; }
    alibi_slopes_by_rule(slopes, power);
    double* twice = xcalloc(2 * power, sizeof(double));
    alibi_slopes_by_rule(twice, 2 * power);
    for (size_t i = 0; i < n - power; i++) { slopes[power + i] = twice[2 * i]; }
    free(twice);
}

static void test_alibi_slopes(void** state) {
    (void)state;
    const size_t head_counts[] = {1, 2, 3, 8, 12, 16, 24, 32, 40, 64};
    for (size_t i = 0; i < sizeof head_counts / sizeof *head_counts; i++) {
        size_t NH = head_counts[i];
        enum { T = 5 };
        double want[64];
        float* table = xcalloc(NH * T, sizeof(float));
        alibi_slopes_by_rule(want, NH);
        bias_table_forward(table, POS_ALIBI, settings, NULL, NH, T);
        for (size_t h = 0; h < NH; h++) {
            assert_true(fabs(alibi_slope(h, NH) / want[h] - 1) < 1e-14);
            for (size_t d = 0; d < T; d++) {
                assert_true(fabs(table[h * T + d] + want[h] * (double)d) <= 6e-8 * want[h] * (double)d);
            }
        }
        free(table);
    }
    assert_true(fabs(alibi_slope(8, 12) - 0.70710678118654752) < 1e-15);
    assert_true(alibi_slope(0, 8) == 0.5 && alibi_slope(7, 8) == 1.0 / 256);
    assert_true(fabs(alibi_slope(0, 16) - 0.70710678118654752) < 1e-15);
    assert_true(alibi_slope(16, 24) == alibi_slope(0, 32) && alibi_slope(17, 24) == alibi_slope(2, 32));
}

static long double bam_reference(long double alpha, long double beta, long double m, size_t d) {
    long double mu = expl(m) - expl(-m), delta = -(long double)d - mu;
    return -expl(alpha) * powl(fabsl(delta) + 1e-5L, beta);
}

// Position 262,143 and all others on the way: rounded once to fp32 (2^-24 relative) from double.
static void test_bias_far(void** state) {
    (void)state;
    enum { NH = 3, T = 262144 };
    const float theta[3][NH] = {{0.3f, -2.0f, 1.0f}, {1.0f, 0.37f, -0.8f}, {0.0f, 1.5f, -2.5f}};
    float* table = xcalloc((size_t)NH * T, sizeof(float));
    bias_table_forward(table, POS_BAM, settings, *theta, NH, T);
    for (size_t h = 0; h < NH; h++) {
        for (size_t d = T - 1; d < T; d -= 1021) {
            long double want = bam_reference(theta[0][h], theta[1][h], theta[2][h], d);
            assert_true(fabsl(table[h * T + d] / want - 1) < 6e-8L);
        }
    }
    bias_table_forward(table, POS_ALIBI, settings, NULL, NH, T);
    assert_true(table[T - 1] == -(float)(T - 1) / 16.0f);  // two heads of three follow the rule of two
    free(table);
}

// Slope as log, beta 1, mu 0 is ALiBi up to the epsilon: P = -slope (d + 1e-5). alpha rounded to fp32
// moves P by 5.5 * 2^-24 relative.
static void test_bam_equals_alibi(void** state) {
    (void)state;
    enum { NH = 12, T = 512 };
    PosencOptions options = posenc_default_options();
    options.init[POSENC_theta_alpha] = "log_slope";
    options.init[POSENC_theta_beta] = "1";
    float theta[3][NH], bam[NH * T], alibi[NH * T];
    Random r = random_stream(1, 1);
    for (size_t h = 0; h < NH; h++) {
        for (int p = 0; p < 3; p++) {
            theta[p][h] = (float)posenc_initial(&options, POSENC_theta_alpha + p, h, NH, &r);
        }
    }
    bias_table_forward(bam, POS_BAM, settings, *theta, NH, T);
    bias_table_forward(alibi, POS_ALIBI, settings, NULL, NH, T);
    for (size_t h = 0; h < NH; h++) {
        for (size_t d = 0; d < T; d++) {
            double slope = alibi_slope(h, NH), want = -slope * ((double)d + 1e-5);
            assert_true(fabs(bam[h * T + d] - want) <= 1e-6 * fabs(want));
            assert_true(fabs(bam[h * T + d] - alibi[h * T + d]) <= slope * 1.001e-5 + 1e-6 * fabs(want));
        }
    }
}

static void test_initial_values(void** state) {
    (void)state;
    const struct {
        const char *alpha, *beta, *mu;
        bool beta_trained;
        double want[3][4];
    } table[] = {{"0", "0", "0", true, {{0}, {0}, {0}}},
                 {"slope",
                  "linear",
                  "-0.5",
                  true,
                  {{0.25, 0.0625, 0.015625, 0.00390625}, {0, 1.0 / 3, 2.0 / 3, 1}, {-0.5, -0.5, -0.5, -0.5}}},
                 {"1.25", "0.5", "2", false, {{1.25, 1.25, 1.25, 1.25}, {1, 1, 1, 1}, {2, 2, 2, 2}}}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        PosencOptions o = posenc_default_options();
        o.init[POSENC_theta_alpha] = table[i].alpha, o.init[POSENC_theta_beta] = table[i].beta;
        o.init[POSENC_theta_mu] = table[i].mu;
        o.trained[POSENC_theta_beta] = table[i].beta_trained;
        Random r = random_stream(1, 1);
        for (int p = 0; p < 3; p++) {
            for (size_t h = 0; h < 4; h++) {
                assert_true(fabs(posenc_initial(&o, POSENC_theta_alpha + p, h, 4, &r) - table[i].want[p][h]) < 1e-15);
            }
        }
    }
}

// dtheta must grow by sum_d dtable P'; the derivatives come from central differences in long double
// (h = 1e-6: truncation 1e-12, rounding 1e-13) and never straddle the kink at D = 0.
static void test_bias_derivatives(void** state) {
    (void)state;
    enum { NH = 8, T = 200 };
    const float theta[3][NH] = {{0, 0.5f, -2, 1, 0, -1, 2, 0.1f},
                                {1, 0.5f, 2, -0.5f, -3, 0.25f, 0, 1.5f},
                                {0.3f, -0.3f, 1.1f, -1.7f, 0.7f, -2.2f, -0.4f, -4}};
    Random r = random_stream(2, 1);
    float *dtable = random_array(NH * T, 1.0, &r), *dtheta = random_array(3 * NH, 1.0, &r);
    double want[3 * NH];
    const long double h = 1e-6L;
    for (size_t i = 0; i < NH; i++) {
        for (size_t p = 0; p < 3; p++) {
            long double up[3], down[3], sum = 0;
            for (size_t q = 0; q < 3; q++) { up[q] = down[q] = theta[q][i]; }
            up[p] += h, down[p] -= h;
            for (size_t d = 0; d < T; d++) {
                long double above = bam_reference(up[0], up[1], up[2], d);
                sum += dtable[i * T + d] * (above - bam_reference(down[0], down[1], down[2], d)) / (2 * h);
            }
            want[p * NH + i] = (double)(dtheta[p * NH + i] + sum);
        }
    }
    bias_table_backward(dtheta, dtable, POS_BAM, settings, *theta, NH, T);
    for (size_t i = 0; i < 3 * NH; i++) { assert_true(fabs(dtheta[i] - want[i]) <= 2e-7 * fabs(want[i]) + 1e-6); }
    bias_table_backward(NULL, dtable, POS_ALIBI, settings, NULL, NH, T);  // no parameters, nothing to write
    free(dtable), free(dtheta);
}

// ----------------------------------------------------------------------------
// tables by distance that others published, by their formulas once more

// The first distances of T5's buckets 16 to 31: the published function, tabulated.
static const size_t t5_starts[] = {16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113};

static size_t t5_bucket_by_table(size_t d) {
    size_t bucket = d < 16 ? d : 15;
    for (size_t i = 0; i < 16; i++) { bucket += d >= t5_starts[i]; }
    return bucket;
}

static long double listed_reference(PosKind kind, const long double* theta, size_t h, size_t NH, size_t w, size_t d) {
    const long double x = (long double)d;
    long double sum = 0;
    switch (kind) {
        case POS_KERPLE_LOG: return -expl(theta[0]) * logl(1 + expl(theta[1]) * x);
        case POS_KERPLE_POWER: return -expl(theta[0]) * powl(x, 1 + tanhl(theta[1] / 2));
        case POS_ALIBI_LEARNED: return -expl(theta[0]) * x;
        case POS_SANDWICH:
            for (size_t i = 0; i < w / 2; i++) { sum += cosl(x / powl(10000, 2 * (long double)i / (long double)w)); }
            return sum / (8 * (long double)(h + 1) / (long double)NH);
        case POS_T5: return theta[t5_bucket_by_table(d)];
        case POS_FIRE:
            for (size_t k = 1; k <= 32; k++) {
                const long double unit =
                    theta[k] * logl(1 + expl(theta[0]) * x) / logl(1 + expl(theta[0]) * 512) + theta[32 + k];
                sum += unit > 0 ? theta[64 + k] * unit : 0;
            }
            return sum;
        default: return theta[d < 511 ? d : 511];
    }
}

static const PosKind listed[] = {POS_KERPLE_LOG, POS_KERPLE_POWER, POS_ALIBI_LEARNED, POS_SANDWICH,
                                 POS_T5,         POS_TABLE,        POS_FIRE};
enum { LISTED = sizeof listed / sizeof *listed };

static void long_theta(long double* theta, const float* numbers, PosKind kind, size_t h, size_t NH) {
    for (size_t p = 0; p < posenc_params(kind); p++) { theta[p] = posenc_parameter(kind, numbers, p, h, NH); }
}

// Every distance near, some up to 262,143; the sum of Sandwich's cosines may be off by angles in double.
static void test_listed_values(void** state) {
    (void)state;
    enum { T = 262144 };
    static const size_t head_counts[] = {3, 12}, widths[] = {128, 17};
    for (size_t i = 0; i < 2 * LISTED; i++) {
        const PosKind kind = listed[i / 2];
        const size_t NH = head_counts[i % 2];
        const PosencSettings some = {widths[i % 2], false, 512};
        Random r = random_stream(6, i);
        float *numbers = random_array(posenc_numbers(kind, NH) + 1, 1.0, &r), *table = xcalloc(NH * T, sizeof(float));
        bias_table_forward(table, kind, some, numbers, NH, kind == POS_SANDWICH ? T / 8 : T);
        const size_t length = kind == POS_SANDWICH ? T / 8 : T;
        for (size_t h = 0; h < NH; h++) {
            long double theta[POSENC_ALL_ROWS];
            long_theta(theta, numbers, kind, h, NH);
            for (size_t d = 0; d < length; d += d < 600                                ? 1
                                                : d + 1021 < length || d == length - 1 ? 1021
                                                                                       : length - 1 - d) {
                const long double want = listed_reference(kind, theta, h, NH, some.sandwich_dim, d);
                const long double got = table[h * length + d];
                const long double cancelled = kind == POS_SANDWICH ? 1e-8L : kind == POS_FIRE ? 1e-13L : 0.0L;
                assert_true(fabsl(got - want) <= 6e-8L * fabsl(want) + cancelled);
            }
        }
        free(numbers), free(table);
    }
    const PosencHead head = {1, 3, settings, NULL};
    for (size_t d = 262143; d > 262100; d--) {
        const long double want = listed_reference(POS_SANDWICH, NULL, 1, 3, 128, d);
        assert_true(fabsl(posenc_bias(POS_SANDWICH, NULL, head, d) - want) <= 6e-8L * fabsl(want) + 1e-8L);
    }
}

// Central differences in long double, over more distances than any table has numbers.
static void test_listed_derivatives(void** state) {
    (void)state;
    enum { T = 700 };
    for (size_t i = 0; i < 2 * LISTED; i++) {
        const PosKind kind = listed[i / 2];
        const size_t NH = i % 2 ? 12 : 3, params = posenc_params(kind), n = posenc_numbers(kind, NH);
        Random r = random_stream(7, i);
        float *numbers = random_array(n + 1, 0.5, &r), *dtable = random_array(NH * T, 1.0, &r);
        float *before = random_array(n + 1, 1.0, &r), *got = xcalloc(n + 1, sizeof(float));
        memcpy(got, before, n * sizeof(float));
        bias_table_backward(got, dtable, kind, settings, numbers, NH, T);
        // heads that share a number add to its derivative
        long double *sums = xcalloc(n + 1, sizeof(long double)), *sizes = xcalloc(n + 1, sizeof(long double));
        for (size_t h = 0; h < NH; h++) {
            long double theta[POSENC_ALL_ROWS];
            long_theta(theta, numbers, kind, h, NH);
            for (size_t p = 0; p < params; p++) {
                const long double middle = theta[p], step = 1e-6L;
                long double sum = 0, size = 0;
                for (size_t d = 0; d < T; d++) {
                    theta[p] = middle + step;
                    long double slope = listed_reference(kind, theta, h, NH, 0, d);
                    theta[p] = middle - step;
                    slope = (slope - listed_reference(kind, theta, h, NH, 0, d)) / (2 * step);
                    sum += dtable[h * T + d] * slope, size += fabsl(dtable[h * T + d] * slope);
                }
                theta[p] = middle;
                const size_t place = posenc_place(kind, p, h, NH);
                sums[place] += sum, sizes[place] += size;
            }
        }
        for (size_t k = 0; k < n; k++) {
            const long double rounding = 2e-7L * (fabsl(sums[k]) + 1) + 1e-10L * sizes[k];
            assert_true(fabsl(got[k] - before[k] - sums[k]) <= rounding);
        }
        free(numbers), free(dtable), free(before), free(got), free(sums), free(sizes);
    }
}

// A number's derivative is 0 outside its reach, and somewhere within it is not; the reaches of a table's rows follow
// one another.
static void test_reach(void** state) {
    (void)state;
    const PosencHead head = {0, 1, settings, NULL};
    double theta[POSENC_ALL_ROWS];
    for (size_t p = 0; p < POSENC_ALL_ROWS; p++) { theta[p] = 0.5 - 0.25 * (double)(p % 2); }
    for (size_t i = 0; i < LISTED; i++) {
        const PosKind kind = listed[i];
        size_t next = 0;
        for (size_t p = 0; p < posenc_params(kind); p++) {
            const PosencReach reach = posenc_reach(kind, p);
            if (kind == POS_T5 || kind == POS_TABLE) { assert_true(reach.first == next), next = reach.end; }
            for (size_t d = 0; d < 1000; d++) {
                bool within = d >= reach.first && d < reach.end;
                bool some = posenc_derivative_unclamped(kind, theta, p, head, d) != 0.0;
                assert_true(within || !some);
                if (kind == POS_T5 || kind == POS_TABLE) { assert_true(within == some); }
            }
        }
    }
    for (size_t d = 0; d < 262144; d++) { assert_int_equal(t5_bucket(d), t5_bucket_by_table(d)); }
}

// As published: KERPLE's numbers are uniform and at least 0.01, slopes begin as ALiBi's, tables at 0.
static void test_listed_initial_values(void** state) {
    (void)state;
    PosencOptions o = posenc_default_options();
    Random r = random_stream(1, 1);
    double least[4] = {9, 9, 9, 9}, most[4] = {0}, sum[4] = {0};
    for (size_t i = 0; i < 4000; i++) {
        double x[4];
        for (int t = 0; t < 3; t++) { x[t] = exp(posenc_initial(&o, POSENC_kerple_log_scale + t, i % 4, 4, &r)); }
        x[3] = kerple_power_exponent(posenc_initial(&o, POSENC_kerple_power_exponent, i % 4, 4, &r));
        for (int t = 0; t < 4; t++) {
            least[t] = fmin(least[t], x[t]), most[t] = fmax(most[t], x[t]), sum[t] += x[t] / 4000;
        }
    }
    const double end[4] = {2, 1, 1, 1.99};
    for (int t = 0; t < 4; t++) {
        assert_true(least[t] > 0.01 - 1e-12 && least[t] < 0.012 && most[t] <= end[t] + 1e-12 &&
                    most[t] > end[t] - 0.01);
        assert_true(fabs(sum[t] - end[t] / 2) < 0.04);
    }
    for (size_t h = 0; h < 12; h++) {
        assert_true(exp(posenc_initial(&o, POSENC_alibi_log_slope, h, 12, &r)) / alibi_slope(h, 12) - 1 < 1e-14);
    }
    for (size_t i = 0; i < posenc_numbers(POS_TABLE, 3); i++) {
        assert_true(posenc_initial(&o, POSENC_table_bias, i, 3, &r) == 0.0);
    }
    o.init[POSENC_t5_bias] = "0.25";
    assert_true(posenc_initial(&o, POSENC_t5_bias, 95, 3, &r) == 0.25);
}

// Of every number of heads; where that is a power of two they are the published slopes.
static void test_geometric_slopes(void** state) {
    (void)state;
    static const size_t head_counts[] = {1, 2, 3, 8, 12, 24};
    const PosencSettings geometric = {128, true, 512};
    for (size_t i = 0; i < sizeof head_counts / sizeof *head_counts; i++) {
        const size_t NH = head_counts[i];
        float table[24 * 2], published[24 * 2];
        bias_table_forward(table, POS_ALIBI, geometric, NULL, NH, 2);
        bias_table_forward(published, POS_ALIBI, settings, NULL, NH, 2);
        for (size_t h = 0; h < NH; h++) {
            const double want = -pow(256.0, -(double)(h + 1) / (double)NH);
            assert_true(fabs(table[2 * h + 1] / want - 1) < 6e-8);
            if ((NH & (NH - 1)) == 0) { assert_true(table[2 * h + 1] == published[2 * h + 1]); }
        }
    }
}

// One head, gradient 1 at one distance.
static void derivatives_at(float* dtheta, const float* theta, size_t d) {
    enum { T = 4 };
    float dtable[T] = {0};
    dtable[d] = 1.0f;
    memset(dtheta, 0, 3 * sizeof(float));
    bias_table_backward(dtheta, dtable, POS_BAM, settings, theta, 1, T);
}

static void test_kink_and_saturation(void** state) {
    (void)state;
    float dtheta[3], table[4];
    const float kink[3] = {0.5f, 1.0f, 0.0f};  // mu = 0: D = 0 at distance 0
    derivatives_at(dtheta, kink, 0);
    assert_true(dtheta[2] == 0.0f && dtheta[0] < 0.0f && dtheta[1] > 0.0f);
    derivatives_at(dtheta, kink, 1);
    assert_true(fabs(dtheta[2] + 2 * exp(0.5)) < 1e-6);  // D < 0: -e^alpha beta (e^m + e^-m)

    const float steep[3] = {0.0f, -8.0f, 0.0f};  // r^beta = 1e40 at distance 0
    bias_table_forward(table, POS_BAM, settings, steep, 1, 4);
    assert_true(table[0] == -1e30f);
    assert_true(fabs(table[1] + pow(1 + 1e-5, -8)) < 1e-7);
    derivatives_at(dtheta, steep, 0);
    for (int p = 0; p < 3; p++) { assert_true(dtheta[p] == 0.0f); }
    derivatives_at(dtheta, steep, 1);
    assert_true(fabs(dtheta[0] - (double)table[1]) < 1e-7);
    assert_true(fabs(dtheta[2] - 16 * pow(1 + 1e-5, -9)) < 1e-5);

    const float negative[3] = {0.0f, -1.0f, 0.0f};  // large but representable: 1e5, derivative intact
    bias_table_forward(table, POS_BAM, settings, negative, 1, 4);
    assert_true(fabs(table[0] / -1e5 - 1) < 1e-7);
    derivatives_at(dtheta, negative, 0);
    assert_true(fabs(dtheta[1] / (-1e5 * log(1e-5)) - 1) < 1e-7);

    const float huge[3] = {2000.0f, 5.0f, -6.0f};
    bias_table_forward(table, POS_BAM, settings, huge, 1, 4);
    for (int d = 0; d < 4; d++) { assert_true(table[d] == -1e30f); }
}

static void test_log_count(void** state) {
    (void)state;
    assert_true(ssmax_log_count(1) == 0.0f);
    assert_true(ssmax_log_count(2) == (float)0.69314718055994531);
    assert_true(ssmax_log_count(262144) == (float)(18 * 0.69314718055994531));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parse),
        cmocka_unit_test(test_alibi_slopes),
        cmocka_unit_test(test_bias_far),
        cmocka_unit_test(test_bam_equals_alibi),
        cmocka_unit_test(test_initial_values),
        cmocka_unit_test(test_bias_derivatives),
        cmocka_unit_test(test_listed_values),
        cmocka_unit_test(test_listed_derivatives),
        cmocka_unit_test(test_reach),
        cmocka_unit_test(test_listed_initial_values),
        cmocka_unit_test(test_geometric_slopes),
        cmocka_unit_test(test_kink_and_saturation),
        cmocka_unit_test(test_log_count),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
