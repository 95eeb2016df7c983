/*
radam.c: both optimisers against float64 written from the published algorithms, step by step; sum of squares.
*/
#include "test_util.h"

#include "../llmc/backend.h"

typedef void Update(float*, floatX*, float*, float*, const float*, const OptimizerStep*, size_t);

typedef struct {
    double p, m, v;
} State;

// Whether step t of RAdam is rectified: rho_t > 5.
static double rho(double beta2, double t) {
    double b = pow(beta2, t);
    return 2 / (1 - beta2) - 1 - 2 * t * b / (1 - b);
}

static void radam_reference(State* s, double g, double lr, double b1, double b2, double eps, double decay, double t) {
    s->p -= lr * decay * s->p;
    s->m = b1 * s->m + (1 - b1) * g;
    s->v = b2 * s->v + (1 - b2) * g * g;
    double m_hat = s->m / (1 - pow(b1, t)), rho_t = rho(b2, t), rho_inf = 2 / (1 - b2) - 1;
    if (rho_t > 5) {
        double l = sqrt(1 - pow(b2, t)) / (sqrt(s->v) + eps);
        double r = sqrt((rho_t - 4) * (rho_t - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho_t));
        s->p -= lr * m_hat * r * l;
    } else {
        s->p -= lr * m_hat;
    }
}

static void adamw_reference(State* s, double g, double lr, double b1, double b2, double eps, double decay, double t) {
    s->p -= lr * decay * s->p;
    s->m = b1 * s->m + (1 - b1) * g;
    s->v = b2 * s->v + (1 - b2) * g * g;
    double m_hat = s->m / (1 - pow(b1, t)), v_hat = s->v / (1 - pow(b2, t));
    s->p -= lr * m_hat / (sqrt(v_hat) + eps);
}

typedef struct {
    bool radam;
    size_t n;
    float learning_rate, beta2, epsilon, weight_decay, gradient_scale;
    double gradient;  // standard deviation; at epsilon's size its place in the formula shows
} Case;

static const Case cases[] = {
    {true, 1, 1e-2f, 0.95f, 1e-8f, 0.0f, 1.0f, 1.0},        {true, 7, 1e-2f, 0.95f, 1e-8f, 0.1f, 1.0f, 1.0},
    {true, 4097, 1e-2f, 0.95f, 1e-8f, 0.5f, 0.37f, 0.1},    {true, 1000, 1e-2f, 0.999f, 1e-3f, 0.1f, 1.0f, 1e-3},
    {true, 1000, 1e-2f, 0.5f, 1e-8f, 0.1f, 1.0f, 1.0},      {true, 1000003, 1e-3f, 0.95f, 1e-8f, 0.1f, 0.5f, 1.0},
    {false, 1, 1e-2f, 0.95f, 1e-8f, 0.0f, 1.0f, 1.0},       {false, 7, 1e-2f, 0.95f, 1e-8f, 0.1f, 1.0f, 1.0},
    {false, 4097, 1e-2f, 0.95f, 1e-8f, 0.5f, 0.37f, 0.1},   {false, 1000, 1e-2f, 0.999f, 1e-3f, 0.1f, 1.0f, 1e-3},
    {false, 1000003, 1e-3f, 0.95f, 1e-8f, 0.1f, 0.5f, 1.0},
};

enum { STEPS = 10 };

// Ten steps. Parameters stay below 0.25, so rounding them to fp32 costs up to 10 * 2^-27 in all and a third of it
// in practice; the rest is a few roundings of the movement.
static void check_case(const Case* k, bool separate_copy) {
    size_t n = k->n;
    Random r = random_stream(1, n);
    float *master = random_array(n, 0.03, &r), *m = xcalloc(n, sizeof(float)), *v = xcalloc(n, sizeof(float));
    float *copy = separate_copy ? xcalloc(n, sizeof(float)) : master, *gradient = xcalloc(n, sizeof(float));
    State* want = xcalloc(n, sizeof(State));
    double* start = xcalloc(n, sizeof(double));
    for (size_t i = 0; i < n; i++) { want[i].p = master[i], start[i] = master[i]; }
    Update* update = k->radam ? radam_update : adamw_update;
    for (unsigned long long t = 1; t <= STEPS; t++) {
        for (size_t i = 0; i < n; i++) { gradient[i] = (float)(k->gradient * (3 * random_uniform(&r) - 1)); }
        OptimizerStep step = {k->learning_rate, 0.9, k->beta2, k->epsilon, k->weight_decay, k->gradient_scale, t, 1};
        set_threads(1 + (int)(t % 3));
        update(master, copy, m, v, gradient, &step, n);
        for (size_t i = 0; i < n; i++) {
            (k->radam ? radam_reference : adamw_reference)(want + i, (double)k->gradient_scale * gradient[i],
                                                           k->learning_rate, 0.9, k->beta2, k->epsilon, k->weight_decay,
                                                           (double)t);
        }
        assert_memory_equal(copy, master, n * sizeof(float));
    }
    double error[3] = {0}, size[3] = {0};
    for (size_t i = 0; i < n; i++) {
        double e[3] = {fabs(master[i] - want[i].p), fabs(m[i] - want[i].m), fabs(v[i] - want[i].v)};
        double s[3] = {fabs(want[i].p - start[i]), fabs(want[i].m), fabs(want[i].v)};
        for (int j = 0; j < 3; j++) {
            error[j] = isnan(e[j]) ? INFINITY : fmax(error[j], e[j]);
            size[j] = fmax(size[j], s[j]);
        }
    }
    assert_error_below(error[0], 5e-7 * size[0] + 4e-8);
    assert_error_below(error[1] / size[1], 5e-7);
    assert_error_below(error[2] / size[2], 1e-6);
    if (separate_copy) { free(copy); }
    free(master), free(m), free(v), free(gradient), free(want), free(start);
}

static void test_updates(void** state) {
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) { check_case(&cases[i], i % 2 == 0); }
    // the table covers both sides of the switch, and a beta2 that never leaves plain momentum
    assert_true(rho(0.95, 5) < 5 && rho(0.95, STEPS) > 5 && rho(0.999, 5) < 5 && rho(0.999, 6) > 5);
    assert_true(rho(0.5, STEPS) < 5);
}

// By hand: at the first step m / (1 - beta1) = g and sqrt(v / (1 - beta2)) = |g|.
static void test_first_step(void** state) {
    (void)state;
    OptimizerStep step = {0.125f, 0.9, 0.95, 1e-8, 0.5, 2.0, 1, 1};
    float p[2] = {1.0f, 1.0f}, m[2] = {0}, v[2] = {0};
    const float g[2] = {0.25f, -3.0f};
    radam_update(p, p, m, v, g, &step, 2);  // (1 - 0.0625) - 0.125 * 2 g
    assert_true(fabs(p[0] - 0.875) < 1e-6 && fabs(p[1] - 1.6875) < 1e-6);
    float p2[2] = {1.0f, 1.0f}, m2[2] = {0}, v2[2] = {0};
    adamw_update(p2, p2, m2, v2, g, &step, 2);  // (1 - 0.0625) - 0.125 sign(g)
    assert_true(fabs(p2[0] - 0.8125) < 1e-6 && fabs(p2[1] - 1.0625) < 1e-6);
    assert_memory_equal(m, m2, sizeof m);
    assert_memory_equal(v, v2, sizeof v);
}

static void test_sum_of_squares(void** state) {
    (void)state;
    const size_t sizes[] = {0, 1, 7, 255, 256, 257, 1000, 1000003};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        size_t n = sizes[k];
        Random r = random_stream(2, k);
        float* x = random_array(n, 1e15, &r);  // squares past the range of fp32 once summed
        long double want = 0;
        for (size_t i = 0; i < n; i++) {
            if (i % 3 == 0) { x[i] *= 1e10f; }
            want += (long double)x[i] * x[i];
        }
        double got[3];
        for (int threads = 1; threads <= 3; threads++) {
            set_threads(threads);
            got[threads - 1] = sum_of_squares(x, n);
            assert_true(got[threads - 1] == got[0]);
        }
        assert_true(fabsl(got[0] - want) <= 1e-14L * want);
        const float bad[] = {INFINITY, -INFINITY, NAN};
        const size_t where[] = {0, n / 2, n - 1};
        for (size_t i = 0; i < 9 && n > 0; i++) {
            float keep = x[where[i / 3]];
            x[where[i / 3]] = bad[i % 3];
            assert_false(isfinite(sum_of_squares(x, n)));
            x[where[i / 3]] = keep;
        }
        free(x);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_updates),
        cmocka_unit_test(test_first_step),
        cmocka_unit_test(test_sum_of_squares),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
