/*
posenc.h and posenc.c: names, slopes, tables at far positions against long double, derivatives of the bias
against finite differences, saturation, rotation.
*/
#include "test_util.h"

#include "../llmc/backend.h"

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
                {"rotary", POS_ROTARY, false},
                {"rotary_ssmax", POS_ROTARY, true},
                {"alibi", POS_ALIBI, false},
                {"alibi_ssmax", POS_ALIBI, true},
                {"bam", POS_BAM, false},
                {"bam_ssmax", POS_BAM, true}};
    assert_int_equal(sizeof good / sizeof *good, 2 * POS_COUNT);
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        PosKind kind = POS_COUNT;
        bool ssmax = !good[i].ssmax;
        assert_true(posenc_parse(good[i].name, &kind, &ssmax));
        assert_int_equal(kind, good[i].kind);
        assert_int_equal(ssmax, good[i].ssmax);
    }
    const char* bad[] = {"", "ssmax", "_ssmax", "bamx", "ba", "BAM", "bam_", "bam_ssmaxx", "bam_ssmax_ssmax", " bam"};
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
        bias_table_forward(table, POS_ALIBI, NULL, NH, T);
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
    bias_table_forward(table, POS_BAM, *theta, NH, T);
    for (size_t h = 0; h < NH; h++) {
        for (size_t d = T - 1; d < T; d -= 1021) {
            long double want = bam_reference(theta[0][h], theta[1][h], theta[2][h], d);
            assert_true(fabsl(table[h * T + d] / want - 1) < 6e-8L);
        }
    }
    bias_table_forward(table, POS_ALIBI, NULL, NH, T);
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
    bias_table_forward(bam, POS_BAM, *theta, NH, T);
    bias_table_forward(alibi, POS_ALIBI, NULL, NH, T);
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
    bias_table_backward(dtheta, dtable, POS_BAM, *theta, NH, T);
    for (size_t i = 0; i < 3 * NH; i++) { assert_true(fabs(dtheta[i] - want[i]) <= 2e-7 * fabs(want[i]) + 1e-6); }
    bias_table_backward(NULL, dtable, POS_ALIBI, NULL, NH, T);  // no parameters, nothing to write
    free(dtable), free(dtheta);
}

// One head, gradient 1 at one distance.
static void derivatives_at(float* dtheta, const float* theta, size_t d) {
    enum { T = 4 };
    float dtable[T] = {0};
    dtable[d] = 1.0f;
    memset(dtheta, 0, 3 * sizeof(float));
    bias_table_backward(dtheta, dtable, POS_BAM, theta, 1, T);
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
    bias_table_forward(table, POS_BAM, steep, 1, 4);
    assert_true(table[0] == -1e30f);
    assert_true(fabs(table[1] + pow(1 + 1e-5, -8)) < 1e-7);
    derivatives_at(dtheta, steep, 0);
    for (int p = 0; p < 3; p++) { assert_true(dtheta[p] == 0.0f); }
    derivatives_at(dtheta, steep, 1);
    assert_true(fabs(dtheta[0] - (double)table[1]) < 1e-7);
    assert_true(fabs(dtheta[2] - 16 * pow(1 + 1e-5, -9)) < 1e-5);

    const float negative[3] = {0.0f, -1.0f, 0.0f};  // large but representable: 1e5, derivative intact
    bias_table_forward(table, POS_BAM, negative, 1, 4);
    assert_true(fabs(table[0] / -1e5 - 1) < 1e-7);
    derivatives_at(dtheta, negative, 0);
    assert_true(fabs(dtheta[1] / (-1e5 * log(1e-5)) - 1) < 1e-7);

    const float huge[3] = {2000.0f, 5.0f, -6.0f};
    bias_table_forward(table, POS_BAM, huge, 1, 4);
    for (int d = 0; d < 4; d++) { assert_true(table[d] == -1e30f); }
}

static void test_tables_far(void** state) {
    (void)state;
    enum { T = 262144, HS = 8, C = 6 };
    // half a unit in the last place below 1, plus the double-precision angle's error (about 5e-11)
    const long double tolerance = 0x1p-25L + 1e-10L;
    float* table = xcalloc((size_t)T * HS, sizeof(float));
    rotary_table(table, 500000.0, T, HS);
    for (size_t t = T - 1; t < T; t -= 509) {
        for (size_t m = 0; m < HS / 2; m++) {
            long double angle = (long double)t * powl(500000.0L, -2.0L * (long double)m / HS);
            assert_true(fabsl(table[t * HS + 2 * m] - cosl(angle)) <= tolerance);
            assert_true(fabsl(table[t * HS + 2 * m + 1] - sinl(angle)) <= tolerance);
        }
    }
    for (int vaswani = 0; vaswani < 2; vaswani++) {
        sinusoidal_table(table, 10000.0, vaswani, T, C);
        for (size_t t = T - 1; t < T; t -= 509) {
            for (size_t i = 0; i < C / 2; i++) {
                long double even = (long double)(2 * i) / C, odd = (long double)(vaswani ? 2 * i : 2 * i + 1) / C;
                long double sine = sinl((long double)t * powl(10000.0L, -even));
                long double cosine = cosl((long double)t * powl(10000.0L, -odd));
                assert_true(fabsl(table[t * C + 2 * i] - sine) <= tolerance);
                assert_true(fabsl(table[t * C + 2 * i + 1] - cosine) <= tolerance);
            }
        }
    }
    free(table);
}

typedef struct {
    size_t B, T, NH, NKV, HS;
} Shape;

// The rotation of query and key heads in float64; values as they are.
static void rotate_reference(double* out, const float* qkv, double theta, Shape s) {
    size_t heads = s.NH + 2 * s.NKV;
    for (size_t n = 0; n < s.B * s.T; n++) {
        for (size_t h = 0; h < heads; h++) {
            for (size_t m = 0; m < s.HS / 2; m++) {
                size_t i = (n * heads + h) * s.HS + 2 * m;
                double angle = (double)(n % s.T) * pow(theta, -2 * (double)m / (double)s.HS);
                if (h >= s.NH + s.NKV) { angle = 0; }
                out[i] = qkv[i] * cos(angle) - qkv[i + 1] * sin(angle);
                out[i + 1] = qkv[i] * sin(angle) + qkv[i + 1] * cos(angle);
            }
        }
    }
}

static void test_rotary(void** state) {
    (void)state;
    const Shape shapes[] = {{1, 1, 1, 1, 2}, {2, 7, 4, 2, 8}, {1, 33, 3, 1, 48}, {3, 16, 2, 2, 32}, {1, 5, 2, 1, 128}};
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
        Shape s = shapes[k];
        Random r = random_stream(3, k);
        size_t row = (s.NH + 2 * s.NKV) * s.HS, n = s.B * s.T * row;
        float *before = random_array(n, 1.0, &r), *x = xcalloc(n, sizeof(float));
        float* table = xcalloc(s.T * s.HS, sizeof(float));
        double* want = xcalloc(n, sizeof(double));
        rotary_table(table, 10000.0, s.T, s.HS);
        rotate_reference(want, before, 10000.0, s);
        memcpy(x, before, n * sizeof(float));
        rotary_forward(x, table, s.B, s.T, s.NH, s.NKV, s.HS);
        for (size_t i = 0; i < n; i++) {
            assert_true(fabs(x[i] - want[i]) < 1e-6);
            bool value = i % row >= (s.NH + s.NKV) * s.HS;
            if (value || i / row % s.T == 0) { assert_true(x[i] == before[i]); }
            if (i % 2 == 0) { assert_true(fabs(hypot(x[i], x[i + 1]) - hypot(before[i], before[i + 1])) < 1e-6); }
        }
        // the last position alone, with the table shifted
        float* last = xcalloc(row, sizeof(float));
        memcpy(last, before + (s.T - 1) * row, row * sizeof(float));
        rotary_forward(last, table + (s.T - 1) * s.HS, 1, 1, s.NH, s.NKV, s.HS);
        assert_memory_equal(last, x + (s.T - 1) * row, row * sizeof(float));

        rotary_backward(x, table, s.B, s.T, s.NH, s.NKV, s.HS);  // transposed = inverse
        for (size_t i = 0; i < n; i++) { assert_true(fabs(x[i] - before[i]) < 1e-6); }
        free(before), free(x), free(table), free(want), free(last);
    }
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
        cmocka_unit_test(test_kink_and_saturation),
        cmocka_unit_test(test_tables_far),
        cmocka_unit_test(test_rotary),
        cmocka_unit_test(test_log_count),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
