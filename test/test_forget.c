/*
forget.c against its definition in long double and against differences of that; chunks behind one another; the bits of
several threads; and what attention makes of the sums behind 262,144 tokens.
*/
#include "test_util.h"

#include "../llmc/backend.h"

typedef struct {
    size_t B, T, C, NH;
    PosencMechanism kind;
    float *inp, *weight, *bias, *wanted;  // wanted[B,NH,T]: what the sums are multiplied by
    int* start;
} Problem;

static Problem make_problem(size_t B, size_t T, size_t C, size_t NH, PosencMechanism kind, uint64_t seed) {
    Random r = random_stream(seed, 1);
    Problem p = {B, T, C, NH, kind, NULL, NULL, NULL, NULL, NULL};
    p.inp = random_array(B * T * C, 1.0, &r), p.weight = random_array(NH * C, 1.0 / sqrt((double)C), &r);
    p.bias = random_array(NH, 1.0, &r), p.wanted = random_array(B * NH * T, 1.0, &r);
    p.start = (int*)xcalloc(B * T, sizeof(int));
    for (size_t n = 0; n < B * T; n++) {
        const bool begins = n % T > 0 && random_uniform(&r) < 0.05;
        p.start[n] = n % T == 0 ? 0 : begins ? (int)(n % T) : p.start[n - 1];
    }
    return p;
}

static void free_problem(Problem* p) { free(p->inp), free(p->weight), free(p->bias), free(p->wanted), free(p->start); }

static long double gate_of(const Problem* p, size_t row, size_t h) {
    long double gate = p->bias[h];
    for (size_t c = 0; c < p->C; c++) { gate += (long double)p->inp[row * p->C + c] * p->weight[h * p->C + c]; }
    return gate;
}

static long double increment(PosencMechanism kind, long double gate) {
    return kind == POSENC_FORGET ? -logl(1 / (1 + expl(-gate))) : logl(1 + expl(gate));
}

static long double number_by_definition(const Problem* p, size_t b, size_t h, size_t t) {
    long double sum = 0;
    for (size_t l = (size_t)p->start[b * p->T + t] + 1; l <= t; l++) {
        sum += increment(p->kind, gate_of(p, b * p->T + l, h));
    }
    return sum;
}

// sum over all keys of wanted times the number; of one sequence and head, or all.
static long double weighted_sum(const Problem* p, size_t b, size_t h) {
    long double total = 0, sum = 0;
    for (size_t t = 0; t < p->T; t++) {
        const bool begins = (size_t)p->start[b * p->T + t] == t;
        sum = begins ? 0 : sum + increment(p->kind, gate_of(p, b * p->T + t, h));
        total += sum * p->wanted[(b * p->NH + h) * p->T + t];
    }
    return total;
}

static long double difference(Problem* p, float* x, size_t b_end, size_t b, size_t h_end, size_t h) {
    long double sides[2];
    const float old = *x, moved[2] = {old + 0x1p-10f, old - 0x1p-10f};
    for (int side = 0; side < 2; side++) {
        *x = moved[side], sides[side] = 0;
        for (size_t i = b; i < b_end; i++) {
            for (size_t k = h; k < h_end; k++) { sides[side] += weighted_sum(p, i, k); }
        }
    }
    *x = old;
    return (sides[0] - sides[1]) / ((long double)moved[0] - moved[1]);
}

typedef struct {
    float *gates, *dinp, *dweight, *dbias;
    double* sums;
} Results;

static Results compute(const Problem* p) {
    const size_t N = p->B * p->T;
    Results r = {(float*)xcalloc(N * p->NH, sizeof(float)), (float*)xcalloc(N * p->C, sizeof(float)),
                 (float*)xcalloc(p->NH * p->C, sizeof(float)), (float*)xcalloc(p->NH, sizeof(float)),
                 (double*)xcalloc(N * p->NH, sizeof(double))};
    for (size_t i = 0; i < N * p->C; i++) { r.dinp[i] = 1.0f; }
    for (size_t i = 0; i < p->NH * p->C; i++) { r.dweight[i] = 2.0f; }
    for (size_t h = 0; h < p->NH; h++) { r.dbias[h] = 3.0f; }
    forget_gates(r.gates, p->inp, p->weight, p->bias, N, p->C, p->NH);
    forget_sums(r.sums, r.gates, p->start, p->kind, 0, p->B, p->T, p->NH, p->T);
    float* dgates = (float*)xcalloc(N * p->NH, sizeof(float));
    memcpy(dgates, r.gates, N * p->NH * sizeof(float));
    void* workspace = xcalloc(forget_workspace(N, p->C, p->NH) + 1, 1);
    forget_sums_backward(dgates, p->wanted, dgates, p->start, p->kind, p->B, p->T, p->NH);
    forget_gates_backward(r.dinp, r.dweight, r.dbias, dgates, p->inp, p->weight, workspace, N, p->C, p->NH);
    free(dgates), free(workspace);
    return r;
}

static void free_results(Results* r) { free(r->gates), free(r->dinp), free(r->dweight), free(r->dbias), free(r->sums); }

static const struct {
    size_t B, T, C, NH;
    PosencMechanism kind;
} shapes[] = {
    {1, 1, 8, 1, POSENC_FORGET},    {2, 37, 24, 3, POSENC_FORGET},   {2, 37, 24, 3, POSENC_SOFTPLUS},
    {1, 130, 72, 9, POSENC_FORGET}, {3, 70, 40, 1, POSENC_SOFTPLUS},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

// Gates are fp32 sums of C products; their rounding is what the sums in double are off by.
static void test_definition(void** state) {
    (void)state;
    for (size_t i = 0; i < SHAPES; i++) {
        Problem p = make_problem(shapes[i].B, shapes[i].T, shapes[i].C, shapes[i].NH, shapes[i].kind, i);
        Results r = compute(&p);
        for (size_t row = 0; row < p.B * p.T; row++) {
            for (size_t h = 0; h < p.NH; h++) {
                assert_error_below(fabs((double)(r.gates[row * p.NH + h] - gate_of(&p, row, h))), 2e-6);
                const size_t b = row / p.T, t = row % p.T;
                const double got = r.sums[(b * p.NH + h) * p.T + t];
                assert_error_below(fabs((double)(got - number_by_definition(&p, b, h, t))), 5e-6);
                if ((size_t)p.start[row] == t) { assert_true(got == 0.0); }
            }
        }
        free_results(&r);
        free_problem(&p);
    }
}

// Differences of step 2^-10 are off by 1e-6 of the third derivative; fp32 sums by a few ulps of their largest term.
static void test_differences(void** state) {
    (void)state;
    for (size_t i = 0; i < SHAPES; i++) {
        Problem p = make_problem(shapes[i].B, shapes[i].T, shapes[i].C, shapes[i].NH, shapes[i].kind, i);
        Results r = compute(&p);
        for (size_t n = 0; n < p.B * p.T * p.C; n += 11) {
            const size_t b = n / p.C / p.T;
            const long double want = 1 + difference(&p, p.inp + n, b + 1, b, p.NH, 0);
            assert_error_below(fabs((double)(r.dinp[n] - want)), 1e-5 * (1 + fabs((double)want)));
        }
        for (size_t n = 0; n < p.NH * p.C; n += 7) {
            const size_t h = n / p.C;
            const long double want = 2 + difference(&p, p.weight + n, p.B, 0, h + 1, h);
            assert_error_below(fabs((double)(r.dweight[n] - want)), 1e-5 * (10 + fabs((double)want)));
        }
        for (size_t h = 0; h < p.NH; h++) {
            const long double want = 3 + difference(&p, p.bias + h, p.B, 0, h + 1, h);
            assert_error_below(fabs((double)(r.dbias[h] - want)), 1e-5 * (10 + fabs((double)want)));
        }
        free_results(&r);
        free_problem(&p);
    }
}

// A sequence in pieces of any size, as through a cache: the same bits, also where a document goes on.
static void test_chunks(void** state) {
    (void)state;
    enum { T = 130, NH = 3, STRIDE = 150 };
    Problem p = make_problem(1, T, 24, NH, POSENC_FORGET, 5);
    Results r = compute(&p);
    static const size_t chunks[] = {1, 7, 64, 129};
    for (size_t i = 0; i < 4; i++) {
        double sums[NH * STRIDE];
        for (size_t k = 0; k < NH * STRIDE; k++) { sums[k] = NAN; }
        for (size_t at = 0, n; at < T; at += n) {
            n = T - at < chunks[i] ? T - at : chunks[i];
            forget_sums(sums, r.gates + at * NH, p.start + at, p.kind, at, 1, n, NH, STRIDE);
        }
        for (size_t h = 0; h < NH; h++) {
            assert_memory_equal(sums + h * STRIDE, r.sums + h * T, T * sizeof(double));
            assert_true(isnan(sums[h * STRIDE + T]));
        }
    }
    free_results(&r);
    free_problem(&p);
}

static void test_any_number_of_threads_gives_the_same_bits(void** state) {
    (void)state;
    Problem p = make_problem(2, 150, 136, 17, POSENC_SOFTPLUS, 6);
    set_threads(1);
    Results one = compute(&p);
    for (int threads = 2; threads <= 5; threads += 3) {
        set_threads(threads);
        Results many = compute(&p);
        assert_memory_equal(one.sums, many.sums, p.B * p.T * p.NH * sizeof(double));
        assert_memory_equal(one.dinp, many.dinp, p.B * p.T * p.C * sizeof(float));
        assert_memory_equal(one.dweight, many.dweight, p.NH * p.C * sizeof(float));
        assert_memory_equal(one.dbias, many.dbias, p.NH * sizeof(float));
        free_results(&many);
    }
    set_threads(1);
    free_results(&one);
    free_problem(&p);
}

static void test_extreme_gates(void** state) {
    (void)state;
    assert_true(posenc_gate(POSENC_FORGET, -1e5) == 1e5 && posenc_gate(POSENC_FORGET, 1e5) == 0.0);
    assert_true(posenc_gate(POSENC_SOFTPLUS, 1e5) == 1e5 && posenc_gate(POSENC_SOFTPLUS, -1e5) == 0.0);
    assert_true(posenc_gate_slope(POSENC_FORGET, -1e5) == -1.0 && posenc_gate_slope(POSENC_FORGET, 1e5) == 0.0);
    assert_true(posenc_gate_slope(POSENC_SOFTPLUS, 1e5) == 1.0 && posenc_gate_slope(POSENC_SOFTPLUS, -1e5) == 0.0);
    assert_true(fabs(posenc_gate(POSENC_FORGET, 40.0) / exp(-40.0) - 1) < 1e-15);  // no 1 in the way
}

// 262,144 tokens in one document, whose sums reach 180,000: in double they are off by less than 1e-8, and attention of
// the last query agrees with float64 as it does near the beginning, 5e-6 of the largest output. The number of a key
// rounded to fp32 would be off by 2^-7, its weight by nearly 1 %.
static void test_far(void** state) {
    (void)state;
    enum { T = 262144, HS = 8 };
    Random r = random_stream(9, 1);
    float *gates = random_array(T, 1.0, &r), *kv = random_array((size_t)2 * T * HS, 1.0, &r);
    float *q = random_array(HS, 1.0, &r), out[HS], lse;
    double* sums = (double*)xcalloc(T, sizeof(double));
    int *start = (int*)xcalloc(T, sizeof(int)), zero = 0;
    forget_sums(sums, gates, start, POSENC_FORGET, 0, 1, T, 1, T);
    long double sum = 0;
    for (size_t t = 1; t < T; t++) {
        sum += increment(POSENC_FORGET, gates[t]);
        assert_true(fabsl(sums[t] - sum) < 1e-8L);
    }
    assert_true(sum > 180000);
    AttentionInput in;
    memset(&in, 0, sizeof in);
    in.size = (AttentionSizes){1, 1, T, 1, 1, HS, TERM_KEY, 0, 0};
    in.q = q, in.k = kv, in.v = kv + HS, in.q_stride = HS, in.kv_stride = 2 * HS;
    in.start = &zero, in.logit.by_key = sums, in.logit.key_stride = T;
    void* workspace = NULL;
    assert_int_equal(posix_memalign(&workspace, 64, attention_workspace(&in.size, false)), 0);
    attention_forward(out, &lse, &in, workspace);
    double total = 0, want[HS] = {0};
    for (size_t j = 0; j < T; j++) {
        double z = sums[j] - sums[T - 1];
        for (size_t d = 0; d < HS; d++) { z += (double)q[d] * (double)kv[j * 2 * HS + d] / sqrt(HS); }
        total += exp(z);
        for (size_t d = 0; d < HS; d++) { want[d] += exp(z) * (double)kv[j * 2 * HS + HS + d]; }
    }
    for (size_t d = 0; d < HS; d++) { want[d] /= total; }
    assert_error_below(relative_error(out, want, HS), 5e-6);
    assert_error_below(fabs((double)lse - log(total)), 5e-6);
    free(gates), free(kv), free(q), free(sums), free(start), free(workspace);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_definition),    cmocka_unit_test(test_differences),
        cmocka_unit_test(test_chunks),        cmocka_unit_test(test_any_number_of_threads_gives_the_same_bits),
        cmocka_unit_test(test_extreme_gates), cmocka_unit_test(test_far),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
