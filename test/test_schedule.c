/*
The learning-rate schedule: its corners (warm-up 0, N, > N; N = 1), exact ends, monotony, and values against the
formulas written a second time in long double.
*/
#include "test_util.h"

#include "../llmc/schedule.h"

static const char* const kinds[] = {"cosine", "linear", "wsd", "constant"};

// The schedule as its papers define it, from the header's text and in another arithmetic.
static long double expected_rate(const char* kind, size_t n, size_t w, long double peak, long double frac,
                                 long double share, size_t step) {
    if (step < w) { return peak * (long double)(step + 1) / (long double)w; }
    if (strcmp(kind, "constant") == 0) { return peak; }
    long double p = (long double)(step - w + 1) / (long double)(n - w);
    if (strcmp(kind, "cosine") == 0) { return peak * (frac + (1 - frac) * (1 + cosl(acosl(-1) * p)) / 2); }
    if (strcmp(kind, "wsd") == 0) {
        long double decaying = roundl(share * (long double)n);
        if (decaying < 1) { decaying = 1; }
        if (decaying > (long double)(n - w)) { decaying = (long double)(n - w); }
        p = ((long double)(step + 1) - ((long double)n - decaying)) / decaying;
        if (p < 0) { p = 0; }
    }
    return peak * (1 - (1 - frac) * p);
}

static void test_values(void** state) {
    (void)state;
    static const size_t sizes[][2] = {{1, 0},  {2, 0},  {2, 1},    {10, 0},     {10, 3},
                                      {10, 9}, {13, 1}, {200, 20}, {20000, 400}};
    static const double fracs[] = {0, 0.1, 1}, shares[] = {0, 0.2, 0.5, 1};
    for (size_t k = 0; k < 4; k++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            for (size_t f = 0; f < 3; f++) {
                for (size_t h = 0; h < 4; h++) {
                    size_t n = sizes[i][0], w = sizes[i][1];
                    if (n == 1 && fracs[f] == 0) { continue; }
                    Schedule s = schedule_create(kinds[k], n, w, 1e-3, fracs[f], shares[h]);
                    for (size_t step = 0; step<n; step += n> 1000 ? 7 : 1) {
                        double got = learning_rate_at(&s, step);
                        long double want = expected_rate(kinds[k], n, w, 1e-3L, fracs[f], shares[h], step);
                        // A few roundings of double at the size of the peak.
                        assert_error_below(fabs(got - (double)want), 1e-18);
                    }
                }
            }
        }
    }
}

static void test_ends_and_monotony(void** state) {
    (void)state;
    static const double peaks[] = {1e-3, 3e-4, 0.7}, fracs[] = {0, 0.1, 0.3, 1};
    static const size_t lengths[] = {1, 2, 3, 10, 1000};
    for (size_t k = 0; k < 4; k++) {
        for (size_t i = 0; i < 5; i++) {
            size_t n = lengths[i], warmups[] = {0, 1, n / 2, n - 1};
            for (size_t c = 0; c < 4 * 3 * 4; c++) {
                size_t w = warmups[c % 4];
                double peak = peaks[c / 4 % 3], frac = fracs[c / 12];
                if (w >= n) { continue; }
                Schedule s = schedule_create(kinds[k], n, w, peak, frac, 0.2);
                bool single = n == 1 && frac == 0, constant = s.kind == SCHEDULE_CONSTANT;
                assert_true(learning_rate_at(&s, 0) > 0);
                assert_true(learning_rate_at(&s, n - 1) == (single || constant ? peak : peak * frac));
                assert_true(learning_rate_at(&s, n + 5) == learning_rate_at(&s, n - 1));
                if (w > 0) { assert_true(learning_rate_at(&s, w - 1) == peak); }
                for (size_t step = 1; step < n; step++) {
                    double before = learning_rate_at(&s, step - 1), now = learning_rate_at(&s, step);
                    assert_true(step < w ? now > before : now <= before);
                    assert_true(now <= peak && now >= (step < w ? 0 : peak * frac));
                }
            }
        }
    }
}

static void test_warmup_only(void** state) {
    (void)state;
    for (size_t k = 0; k < 4; k++) {
        Schedule same = schedule_create(kinds[k], 10, 10, 1e-3, 0.1, 0.2);
        assert_true(learning_rate_at(&same, 9) == 1e-3);
        Schedule longer = schedule_create(kinds[k], 10, 40, 1e-3, 0.1, 0.2);
        assert_true(learning_rate_at(&longer, 9) == 1e-3 * 0.25);
        assert_true(learning_rate_at(&longer, 0) == 1e-3 * 0.025);
        assert_true(learning_rate_at(&longer, 1000) == 1e-3 * 0.25);
        Schedule one = schedule_create(kinds[k], 1, 2, 1e-3, 0, 0.2);
        assert_true(learning_rate_at(&one, 0) == 5e-4);
    }
}

// Rounding in the last steps of a very long run does not take the rate below the minimum.
static void test_long_runs(void** state) {
    (void)state;
    Random r = random_stream(1, 0);
    for (size_t i = 0; i < 4000; i++) {
        double peak = random_uniform(&r), frac = random_uniform(&r);
        size_t n = 50000000 + random_below(&r, 200000000);
        Schedule s = schedule_create("cosine", n, 1000, peak, frac, 0.2);
        for (size_t step = n - 10; step < n; step++) {
            assert_true(learning_rate_at(&s, step) >= peak * frac);
            assert_true(learning_rate_at(&s, step) <= learning_rate_at(&s, step - 1));
        }
    }
}

// 100 steps of which the last 20 decay: 80 at the peak, then down by a twentieth of the way each.
static void test_wsd_phases(void** state) {
    (void)state;
    Schedule s = schedule_create("wsd", 100, 10, 1.0, 0.0, 0.2);
    for (size_t step = 9; step < 80; step++) { assert_true(learning_rate_at(&s, step) == 1.0); }
    assert_error_below(fabs(learning_rate_at(&s, 80) - 0.95), 1e-15);
    assert_error_below(fabs(learning_rate_at(&s, 98) - 0.05), 1e-15);
}

typedef struct {
    const char* kind;
    size_t n;
    double peak, frac, share;
    const char* words[4];
} BadCase;

static void create_bad(void* argument) {
    const BadCase* c = (const BadCase*)argument;
    schedule_create(c->kind, c->n, 0, c->peak, c->frac, c->share);
}

static void test_refusals(void** state) {
    (void)state;
    static const BadCase cases[] = {
        {"cosin", 10, 1, 0.1, 0.2, {"'cosin'", SCHEDULE_NAMES, NULL}},
        {"cosine", 0, 1, 0.1, 0.2, {"0 steps", NULL}},
        {"cosine", 10, 0, 0.1, 0.2, {"learning rate 0", NULL}},
        {"cosine", 10, NAN, 0.1, 0.2, {"nan", NULL}},
        {"linear", 10, 1, -0.1, 0.2, {"-0.1", "0", "1", NULL}},
        {"linear", 10, 1, 1.5, 0.2, {"1.5", NULL}},
        {"wsd", 10, 1, 0.1, 2, {"decay share 2", NULL}},
        {"wsd", 10, 1, 0.1, NAN, {"share nan", NULL}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        expect_fatal(create_bad, (void*)&cases[i], cases[i].words);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),     cmocka_unit_test(test_ends_and_monotony), cmocka_unit_test(test_warmup_only),
        cmocka_unit_test(test_wsd_phases), cmocka_unit_test(test_long_runs),         cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
