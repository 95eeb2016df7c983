/*
cross_entropy_head in both precisions against float64: losses, gradients, padding rows, extreme logits.
*/
#include "precision_util.h"

#include "../llmc/backend.h"

// V 4500 takes five tiles of the vocabulary, N 2100 two chunks of rows; no size is a multiple of anything.
typedef struct {
    size_t N, C, V, Vp;
} Shape;

static const Shape shapes[] = {{1, 8, 2, 2},         {3, 16, 257, 384},     {63, 24, 100, 128},  {64, 24, 100, 100},
                               {65, 33, 4500, 4608}, {130, 40, 2049, 2176}, {7, 16, 4096, 4096}, {2100, 8, 37, 128}};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

static const float DLOSS = 1.0f / 64;
enum { CANARY_BYTES = 256, CANARY = 0xA5 };

// Inputs, outputs and float64 results of one shape.
typedef struct {
    Shape s;
    float cap;  // 0: none
    float *inp, *weight, *initial;
    int* targets;
    float *losses, *dinp, *dweight;
    double *want_losses, *want_dinp, *want_dweight;
    size_t bytes;
    char* workspace;
} Case;

// Inputs are bf16 values already, so that both precisions have the same exact logits.
static Case case_create(Shape s, double scale) {
    Random r = {s.N * 1000003 + s.C * 1009 + s.V};
    Case c = {.s = s};
    c.inp = random_array(s.N * s.C, scale, &r);
    c.weight = random_array(s.Vp * s.C, 1, &r);
    c.initial = random_array(s.Vp * s.C, 1e-3, &r);
    for (size_t i = 0; i < s.N * s.C; i++) { c.inp[i] = (float)to_bf16(c.inp[i]); }
    for (size_t i = 0; i < s.Vp * s.C; i++) { c.weight[i] = (float)to_bf16(c.weight[i]); }
    for (size_t i = s.V * s.C; i < s.Vp * s.C; i++) { c.weight[i] = NAN; }
    c.targets = xcalloc(s.N, sizeof(int));
    for (size_t n = 0; n < s.N; n++) { c.targets[n] = (int)(n % 5 == 0 ? s.V - 1 : n * 7919 % s.V); }
    c.losses = xcalloc(s.N, sizeof(float));
    c.dinp = xcalloc(s.N * s.C, sizeof(float));
    memset(c.losses, 0xff, s.N * sizeof(float));
    memset(c.dinp, 0xff, s.N * s.C * sizeof(float));
    c.dweight = xcalloc(s.Vp * s.C, sizeof(float));
    memcpy(c.dweight, c.initial, s.Vp * s.C * sizeof(float));
    c.bytes = cross_entropy_workspace(s.N, s.C, s.V);
    c.workspace = xcalloc(c.bytes + CANARY_BYTES, 1);
    memset(c.workspace, CANARY, c.bytes + CANARY_BYTES);
    c.want_losses = xcalloc(s.N, sizeof(double));
    c.want_dinp = xcalloc(s.N * s.C, sizeof(double));
    c.want_dweight = xcalloc(s.V * s.C, sizeof(double));
    return c;
}

static void case_free(Case* c) {
    void* all[] = {c->inp,     c->weight,      c->initial,   c->targets,      c->losses,   c->dinp,
                   c->dweight, c->want_losses, c->want_dinp, c->want_dweight, c->workspace};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) { free(all[i]); }
}

// dlogits are rounded to bf16 before their products when low.
static void case_reference(Case* c, bool low) {
    size_t C = c->s.C, V = c->s.V;
    double* z = xcalloc(V, sizeof *z);
    for (size_t i = 0; i < V * C; i++) { c->want_dweight[i] = c->initial[i]; }
    for (size_t n = 0; n < c->s.N; n++) {
        double maximum = -INFINITY, sum = 0;
        for (size_t v = 0; v < V; v++) {
            z[v] = 0;
            for (size_t i = 0; i < C; i++) { z[v] += (double)c->inp[n * C + i] * c->weight[v * C + i]; }
            if (c->cap != 0) { z[v] = c->cap * tanh(z[v] / c->cap); }
            maximum = fmax(maximum, z[v]);
        }
        for (size_t v = 0; v < V; v++) { sum += exp(z[v] - maximum); }
        c->want_losses[n] = maximum + log(sum) - z[c->targets[n]];
        for (size_t v = 0; v < V; v++) {
            double d = DLOSS * (exp(z[v] - maximum) / sum - (v == (size_t)c->targets[n]));
            if (c->cap != 0) { d *= 1 - z[v] / c->cap * (z[v] / c->cap); }
            if (low) { d = to_bf16(d); }
            for (size_t i = 0; i < C; i++) {
                c->want_dinp[n * C + i] += d * c->weight[v * C + i];
                c->want_dweight[v * C + i] += d * c->inp[n * C + i];
            }
        }
    }
    free(z);
}

static void run(Case* c, bool gradients) {
    cross_entropy_head(c->losses, gradients ? c->dinp : NULL, gradients ? c->dweight : NULL, c->inp, c->weight,
                       c->targets, DLOSS, c->cap, c->workspace, c->s.N, c->s.C, c->s.V);
    for (size_t i = 0; i < CANARY_BYTES; i++) { assert_int_equal((unsigned char)c->workspace[c->bytes + i], CANARY); }
}

// Logits are sums of at most 40 products and the gradients of up to 4500, in fp32: losses are good to about 1e-6
// of the largest, probabilities (the exponential of a logit near 10) and gradients to about 3e-6. In bf16 an error of
// fp32's size flips the rounding of a few dlogits: 2^-9 of each, averaging out.
static void test_against_float64(void** state) {
    (void)state;
    for (size_t p = 0; p < precision_count(); p++) {
        cpu_precision = precisions[p];
        bool low = cpu_precision == PRECISION_BF16;
        for (size_t i = 0; i < SHAPES; i++) {
            Case c = case_create(shapes[i], 0.5);
            size_t C = c.s.C, V = c.s.V;
            case_reference(&c, low);
            run(&c, true);
            assert_error_below(relative_error(c.losses, c.want_losses, c.s.N), 1e-6);
            assert_error_below(relative_error(c.dinp, c.want_dinp, c.s.N * C), low ? 1e-5 : 3e-6);
            assert_error_below(relative_error(c.dweight, c.want_dweight, V * C), low ? 1e-5 : 3e-6);
            assert_memory_equal(c.dweight + V * C, c.initial + V * C, (c.s.Vp - V) * C * sizeof(float));
            case_free(&c);
        }
    }
}

// The largest error relative to the largest value, or to `least` where all are smaller.
static double error_beside(const float* got, const double* want, size_t n, double least) {
    double error = 0, largest = least;
    for (size_t i = 0; i < n; i++) {
        error = fmax(error, fabs((double)got[i] - want[i])), largest = fmax(largest, fabs(want[i]));
    }
    return error / largest;
}

// Logits of order 1 to 1000 against caps of 1.5 to 60, beyond which exponentials vanish: the tanh is good to 3e-7 of
// itself, its slope to as much of 1, so that gradients are measured beside uncapped ones. In bf16 that flips the
// rounding of a few dlogits, each by at most 2^-8 of the largest there is.
static void test_capped(void** state) {
    (void)state;
    static const float caps[] = {1.5f, 30.0f, 60.0f};
    for (size_t p = 0; p < precision_count(); p++) {
        cpu_precision = precisions[p];
        bool low = cpu_precision == PRECISION_BF16;
        for (size_t i = 0; i < SHAPES * 3; i++) {
            Case c = case_create(shapes[i / 3], i % 3 == 2 ? 100 : 0.5);
            c.cap = caps[i % 3];
            case_reference(&c, low);
            run(&c, false);
            assert_error_below(relative_error(c.losses, c.want_losses, c.s.N), 1e-6);
            run(&c, true);
            assert_error_below(relative_error(c.losses, c.want_losses, c.s.N), 1e-6);
            double scale = i % 3 == 2 ? 100 : 0.5, bound = low ? 0x1p-8 : 5e-6;
            assert_error_below(error_beside(c.dinp, c.want_dinp, c.s.N * c.s.C, DLOSS), bound);
            assert_error_below(error_beside(c.dweight, c.want_dweight, c.s.V * c.s.C, DLOSS * scale), bound);
            case_free(&c);
        }
        Case c = case_create((Shape){2, 8, 100, 128}, 1);
        c.cap = 2, c.inp[0] = NAN;
        run(&c, true);
        assert_true(isnan(c.losses[0]) && isnan(c.dinp[0]) && isfinite(c.losses[1]));
        case_free(&c);
    }
}

// Without gradients the losses are the same bits, and nothing else is written.
static void test_losses_only(void** state) {
    (void)state;
    for (size_t p = 0; p < precision_count(); p++) {
        cpu_precision = precisions[p];
        for (size_t i = 0; i < SHAPES; i++) {
            Case with = case_create(shapes[i], 1), without = case_create(shapes[i], 1);
            run(&with, true);
            run(&without, false);
            assert_memory_equal(with.losses, without.losses, with.s.N * sizeof(float));
            assert_memory_equal(without.dweight, without.initial, without.s.Vp * without.s.C * sizeof(float));
            case_free(&with);
            case_free(&without);
        }
    }
}

static void test_repeats_are_equal(void** state) {
    (void)state;
    Shape s = {300, 40, 4500, 4608};
    for (size_t p = 0; p < precision_count(); p++) {
        cpu_precision = precisions[p];
        Case first = case_create(s, 1), again = case_create(s, 1);
        run(&first, true);
        for (int repeat = 0; repeat < 10; repeat++) {
            memset(again.workspace, repeat, again.bytes);
            memcpy(again.dweight, again.initial, s.Vp * s.C * sizeof(float));
            run(&again, true);
            assert_memory_equal(again.losses, first.losses, s.N * sizeof(float));
            assert_memory_equal(again.dinp, first.dinp, s.N * s.C * sizeof(float));
            assert_memory_equal(again.dweight, first.dweight, s.Vp * s.C * sizeof(float));
        }
        case_free(&first);
        case_free(&again);
    }
}

// Equal rows of the weight give equal logits: the loss is ln V.
static void test_uniform(void** state) {
    (void)state;
    for (size_t p = 0; p < precision_count(); p++) {
        cpu_precision = precisions[p];
        Case c = case_create((Shape){70, 16, 4500, 4608}, 1);
        for (size_t v = 0; v < c.s.V; v++) { memcpy(c.weight + v * c.s.C, c.weight, c.s.C * sizeof(float)); }
        run(&c, true);
        for (size_t n = 0; n < c.s.N; n++) { assert_error_below(fabs(c.losses[n] - log((double)c.s.V)), 1e-6); }
        case_free(&c);
    }
}

// Logits of +-1e4 in every order of tiles: finite, and the loss is the distance to the largest logit.
static void test_extreme_logits(void** state) {
    (void)state;
    for (size_t p = 0; p < precision_count(); p++) {
        cpu_precision = precisions[p];
        for (int falling = 0; falling < 2; falling++) {
            Case c = case_create((Shape){64, 1, 4500, 4608}, 1);
            for (size_t n = 0; n < c.s.N; n++) { c.inp[n] = n % 2 ? -1 : 1; }
            for (size_t v = 0; v < c.s.V; v++) {
                c.weight[v] = (float)to_bf16((falling ? -1 : 1) * 1e4 * (2.0 * (double)v / (double)c.s.V - 1));
            }
            case_reference(&c, cpu_precision == PRECISION_BF16);
            run(&c, true);
            assert_error_below(relative_error(c.losses, c.want_losses, c.s.N), 1e-6);
            assert_error_below(relative_error(c.dinp, c.want_dinp, c.s.N), 1e-5);
            assert_error_below(relative_error(c.dweight, c.want_dweight, c.s.V), 1e-5);
            case_free(&c);
        }
    }
}

// A NaN in one row makes that row's loss NaN, and no other's.
static void test_nan_is_seen(void** state) {
    (void)state;
    for (size_t p = 0; p < precision_count(); p++) {
        cpu_precision = precisions[p];
        Case c = case_create((Shape){70, 16, 300, 384}, 1);
        c.inp[3 * c.s.C + 5] = NAN;
        run(&c, false);
        for (size_t n = 0; n < c.s.N; n++) { assert_int_equal(isnan(c.losses[n]) != 0, n == 3); }
        case_free(&c);
    }
}

// What is not finite in one row of the weight, that of the target or another, in whichever tile or lane, makes losses
// and gradients NaN; a logit of -infinity alone has probability 0.
static void test_not_finite_weights(void** state) {
    (void)state;
    enum { V = 4500, TARGET = 100 };
    static const size_t columns[] = {0, 1, TARGET, 101, 1023, 1024, 4095, 4499};
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t p = 0; p < precision_count(); p++) {
        cpu_precision = precisions[p];
        Case c = case_create((Shape){2, 8, V, 4608}, 1);
        memset(c.inp, 0, 2 * c.s.C * sizeof(float));
        c.inp[0] = 1, c.inp[c.s.C] = 2;
        c.targets[0] = c.targets[1] = TARGET;
        memset(c.weight, 0, V * c.s.C * sizeof(float));
        for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) {
            for (size_t kind = 0; kind < 3; kind++) {
                c.weight[columns[i] * c.s.C] = bad[kind];
                run(&c, false);
                bool harmless = kind == 2 && columns[i] != TARGET;  // exp(-infinity) is 0
                for (size_t n = 0; n < 2; n++) {
                    assert_true(harmless ? fabs(c.losses[n] - log(V - 1.0)) < 1e-5 : !isfinite(c.losses[n]));
                }
                run(&c, true);
                assert_true(!isfinite(c.dinp[0]) && !isfinite(c.dinp[c.s.C]));  // 0 times infinity, too
                c.weight[columns[i] * c.s.C] = 0;
            }
        }
        case_free(&c);
    }
}

// Whole tiles of -infinity, the first one too, are as if they were not there.
static void test_tiles_of_minus_infinity(void** state) {
    (void)state;
    enum { V = 4500, LAST = 7 };
    for (size_t p = 0; p < precision_count(); p++) {
        cpu_precision = precisions[p];
        Case c = case_create((Shape){1, 8, V, 4608}, 1);
        memset(c.inp, 0, c.s.C * sizeof(float));
        c.inp[0] = 1;
        c.targets[0] = V - 1;
        memset(c.weight, 0, V * c.s.C * sizeof(float));
        for (size_t v = 0; v < V - LAST; v++) { c.weight[v * c.s.C] = -INFINITY; }
        run(&c, false);
        assert_error_below(fabs(c.losses[0] - log(LAST)), 1e-6);
        case_free(&c);
    }
}

static void test_array_sum(void** state) {
    (void)state;
    enum { COUNT = 100003 };
    float* x = xcalloc(COUNT, sizeof *x);
    for (size_t i = 0; i < COUNT; i++) { x[i] = 0.1f; }
    assert_true(array_sum(x, 0) == 0);
    assert_error_below(fabs(array_sum(x, COUNT) / (COUNT * (double)0.1f) - 1), 1e-11);
    x[COUNT - 1] = NAN;
    assert_true(isnan(array_sum(x, COUNT)));
    free(x);
}

// More than 2^31 logits (N x V): the rows beyond that count, which 32-bit products of sizes would misplace, have the
// same losses as when they come alone.
static void test_more_than_2_31_logits(void** state) {
    (void)state;
    enum { LAST = 3 };
    const size_t N = 65536 + LAST, C = 8, V = 32768;
    assert_true(N * V > (size_t)1 << 31);
    Random r = random_stream(31, 0);
    float *inp = random_array(N * C, 1, &r), *weight = random_array(V * C, 1, &r);
    float *losses = xcalloc(N, sizeof(float)), alone[LAST];
    int* targets = xcalloc(N, sizeof(int));
    for (size_t n = 0; n < N; n++) { targets[n] = (int)random_below(&r, V); }
    void* workspace = xcalloc(cross_entropy_workspace(N, C, V), 1);
    cpu_precision = PRECISION_FP32;
    cross_entropy_head(losses, NULL, NULL, inp, weight, targets, 0, 0, workspace, N, C, V);
    cross_entropy_head(alone, NULL, NULL, inp + 65536 * C, weight, targets + 65536, 0, 0, workspace, LAST, C, V);
    for (size_t i = 0; i < LAST; i++) { assert_error_below(fabs((double)losses[65536 + i] - alone[i]), 1e-5); }
    for (size_t n = 0; n < N; n++) { assert_true(losses[n] > 0 && losses[n] < 100); }
    free(inp), free(weight), free(losses), free(targets), free(workspace);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_against_float64),
                                       cmocka_unit_test(test_capped),
                                       cmocka_unit_test(test_losses_only),
                                       cmocka_unit_test(test_repeats_are_equal),
                                       cmocka_unit_test(test_uniform),
                                       cmocka_unit_test(test_extreme_logits),
                                       cmocka_unit_test(test_nan_is_seen),
                                       cmocka_unit_test(test_not_finite_weights),
                                       cmocka_unit_test(test_tiles_of_minus_infinity),
                                       cmocka_unit_test(test_array_sum),
                                       cmocka_unit_test(test_more_than_2_31_logits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
