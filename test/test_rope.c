/*
Positions that are added or turn q and k, against float64 and frequencies of published models: sinusoids, rotations of
all channels and of a part, scaled ones, learned positions within their table and beyond, and its gradient.
*/
#include "test_util.h"

#include "../llmc/backend.h"

// ----------------------------------------------------------------------------
// tables

// The table of a rotation of all channels that is not scaled.
static void rotary_table(float* table, double theta, size_t T, size_t HS) {
    RopeSettings rope = {theta, HS, ROPE_NONE, NAN, 0, 32, 1, NAN, 1, 4};
    PositionSettings s = {NAN, false, rope_rotation(&rope)};
    position_table(table, POS_ROTARY, &s, T, HS);
}

static void sinusoidal_table(float* table, double theta, bool vaswani, size_t T, size_t C) {
    PositionSettings s;
    memset(&s, 0, sizeof s);
    s.sinusoidal_theta = theta, s.sinusoidal_vaswani = vaswani;
    position_table(table, POS_SINUSOIDAL, &s, T, C);
}

// Frequencies that rope_frequencies() of dev/reference.py gives for models that exist: YaRN's 64k Llama 2, Llama 3.1,
// and heads of which a part turns. The largest error is that of powers in double.
static void test_rope_frequencies(void** state) {
    (void)state;
    static const struct {
        RopeSettings rope;
        double magnitude;
        size_t pairs[6];
        double frequencies[6];
    } rows[] = {
        {{10000, 128, ROPE_YARN, 16, 4096, 32, 1, NAN, 1, 4},
         1.2772588722239782,
         {0, 1, 21, 32, 42, 63},
         {1, 0.86596432336006535, 0.046940859997959404, 0.005673076923076923, 0.00049023591030505377,
          7.2173874043091138e-06}},
        {{500000, 128, ROPE_LLAMA3, 8, 8192, 32, 1, NAN, 1, 4},
         1,
         {0, 1, 21, 32, 42, 63},
         {1, 0.81461723385654472, 0.013490419890226748, 0.00052484616099295468, 2.2748928601828186e-05,
          3.0689259889145111e-07}},
        {{10000, 32, ROPE_NTK, 4, 0, 32, 1, NAN, 1, 4},
         1,
         {0, 1, 5, 8, 10, 15},
         {1, 0.51269923242167048, 0.035425283641654946, 0.0047742080195520833, 0.0012549507210917056,
          4.4456985250973074e-05}},
        {{10000, 24, ROPE_LINEAR, 4, 0, 32, 1, NAN, 1, 4},
         1,
         {0, 1, 4, 6, 8, 11},
         {0.25, 0.46415888336127786 / 4, 0.046415888336127802 / 4, 0.0025, 0.0021544346900318843 / 4,
          0.00021544346900318845 / 4}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        RopeSettings rope = rows[i].rope;
        rope.attention_factor = rope_yarn_attention_factor(rope.factor);
        Rotation r = rope_rotation(&rope);
        assert_int_equal(r.pairs, rope.width / 2);
        assert_error_below(fabs(r.magnitude - rows[i].magnitude), 1e-15);
        for (size_t k = 0; k < 6; k++) {
            assert_error_below(fabs(r.frequency[rows[i].pairs[k]] / rows[i].frequencies[k] - 1), 1e-14);
        }
        for (size_t m = r.pairs; m < ROPE_MAX_PAIRS; m++) { assert_true(r.frequency[m] == 0); }
    }
    assert_int_equal(rope_width(0.4, 80), 32);   // Phi-2
    assert_int_equal(rope_width(0.25, 96), 24);  // GPT-NeoX
    assert_int_equal(rope_width(0.25, 24), 6);
    assert_int_equal(rope_width(0.3, 8), 2);
    assert_int_equal(rope_width(1, 40), 40);
}

// A factor of 1 changes nothing, bit for bit where the formula allows it, and channels that do not turn stay as they
// are.
static void test_rope_limits(void** state) {
    (void)state;
    enum { HS = 48, T = 300 };
    const RopeSettings plain = {10000, HS, ROPE_NONE, NAN, 0, 32, 1, 1, 1, 4};
    const Rotation want = rope_rotation(&plain);
    for (int scaling = ROPE_LINEAR; scaling <= ROPE_LLAMA3; scaling++) {
        RopeSettings rope = plain;
        rope.scaling = (RopeScaling)scaling, rope.factor = 1, rope.original_length = 512;
        rope.attention_factor = rope_yarn_attention_factor(1);
        const Rotation got = rope_rotation(&rope);
        assert_true(got.magnitude == 1);
        for (size_t m = 0; m < HS / 2; m++) {
            assert_error_below(fabs(got.frequency[m] / want.frequency[m] - 1), 4e-16);  // two roundings
        }
    }
    RopeSettings part = plain;
    part.width = 12, part.scaling = ROPE_YARN, part.factor = 8, part.original_length = 64, part.attention_factor = 1.2;
    const PositionSettings s = {NAN, false, rope_rotation(&part)};
    float* table = xcalloc(T * HS, sizeof(float));
    position_table(table, POS_ROTARY, &s, T, HS);
    for (size_t i = 0; i < T * HS; i++) {
        if (i % HS >= 12) { assert_true(table[i] == (i % 2 == 0 ? 1.0f : 0.0f)); }
    }
    assert_error_below(fabs(hypot(table[HS * 7], table[HS * 7 + 1]) - 1.2), 1e-6);
    free(table);
}

// ----------------------------------------------------------------------------
// learned positions

static void test_learned_table(void** state) {
    (void)state;
    enum { ROWS = 9, C = 5, T = 33 };
    Random r = random_stream(6, 0);
    float *learned = random_array(ROWS * C, 1.0, &r), table[T * C];
    for (int interpolated = 0; interpolated < 2; interpolated++) {
        learned_table(table, learned, interpolated, ROWS, ROWS, C);  // as long as the table: its rows
        assert_memory_equal(table, learned, ROWS * C * sizeof(float));
        learned_table(table, learned, interpolated, 4, ROWS, C);
        assert_memory_equal(table, learned, 4 * C * sizeof(float));
        learned_table(table, learned, interpolated, T, ROWS, C);
        for (size_t t = 0; t < T; t++) {
            for (size_t c = 0; c < C; c++) {
                double want = learned[(t < ROWS ? t : ROWS - 1) * C + c];
                if (interpolated) {  // 33 positions over 9 rows: a quarter of a row each
                    size_t row = t / 4;
                    double next = row + 1 < ROWS ? learned[(row + 1) * C + c] : 0, share = (double)(t % 4) / 4;
                    want = (1 - share) * learned[row * C + c] + share * next;
                }
                assert_true(table[t * C + c] == (float)want);
            }
        }
    }
    learned_table(table, learned, true, 4, 1, 1);  // a table of one row
    for (int t = 0; t < 4; t++) { assert_true(table[t] == learned[0]); }
    free(learned);
}

// Sums in the order of the sequences, whatever the threads, added to what is there; other rows are left alone.
static void test_learned_backward(void** state) {
    (void)state;
    enum { B = 5, T = 13, C = 24, ROWS = 20 };
    Random r = random_stream(7, 0);
    float *dout = random_array(B * T * C, 1.0, &r), *before = random_array(ROWS * C, 1.0, &r);
    float want[ROWS * C], got[ROWS * C];
    memcpy(want, before, sizeof want);
    for (size_t b = 0; b < B; b++) {
        for (size_t i = 0; i < T * C; i++) { want[i] += dout[b * T * C + i]; }
    }
    for (int threads = 1; threads <= 3; threads++) {
        set_threads(threads);
        memcpy(got, before, sizeof got);
        learned_backward(got, dout, B, T, C);
        assert_memory_equal(got, want, sizeof got);
    }
    free(dout), free(before);
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rope_frequencies), cmocka_unit_test(test_rope_limits),
        cmocka_unit_test(test_learned_table),    cmocka_unit_test(test_learned_backward),
        cmocka_unit_test(test_tables_far),       cmocka_unit_test(test_rotary),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
