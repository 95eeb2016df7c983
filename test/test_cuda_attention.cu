/*
CUDA attention against the float64 reference: lengths, head sizes, groups, biases, Scalable-Softmax, documents; chunks
and splits over a key/value cache; masks; extreme logits; the same bits under every schedule. Built for the emulator
or for a GPU, in bf16 or fp32. EXHAUSTIVE=1 in the environment runs every combination of sizes (minutes).
*/
#include "cuda_attention_util.h"

// Root mean square errors. bf16: rounding P, dZ and results (2^-9 each) gives 2e-3 to 5e-3, more where dZ nearly
// cancels, as in short rows. fp32: sums of up to 1025 products. Largest seen: the number after each.
typedef struct {
    double out, lse, dq, dk, dv, dbias, dscale, dscale_outside;  // of seq_scale; its sum is not centred there
} Tolerance;

#ifdef PRECISION_FP32
static const Tolerance TOLERANCE = {2e-6, 2e-6, 3e-6, 3e-6,
                                    2e-6, 3e-6, 1e-5, 1e-5};  // 7e-7 1e-6 2e-6 2e-6 8e-7 2e-6 4e-6
#else
static const Tolerance TOLERANCE = {2.2e-3, 1e-6, 6e-3,   4e-3,
                                    2.7e-3, 7e-3, 1.5e-2, 3e-2};  // 2.0e-3 4e-7 4.9 3.4 2.4 5.9 10 17
#endif

// The race checker is slow, sees what is wrong in one order as well as in another, and values no better than others do.
#ifdef EMU_RACE
enum { SCHEDULES = 2, EXTREME_STEP = 4 };
#else
enum { SCHEDULES = 4, EXTREME_STEP = 1 };
#endif

// ----------------------------------------------------------------------------
// every shape

static void check_forward(const Result& got, const Reference& r) {
    assert_error_below(array_error(got.out, r.out), TOLERANCE.out);
    assert_error_below(lse_error(got.lse, r.lse), TOLERANCE.lse);
}

static void check_backward(const Problem& p, const Result& got, const Reference& r) {
    const size_t columns = p.value_column - p.key_column;
    assert_error_below(gradient_error(p, got, r, 0, p.key_column), TOLERANCE.dq);
    assert_error_below(gradient_error(p, got, r, p.key_column, columns), TOLERANCE.dk);
    assert_error_below(gradient_error(p, got, r, p.value_column, columns), TOLERANCE.dv);
    if (p.shape.bias) { assert_error_below(bias_error(p, got, r), TOLERANCE.dbias); }
    const bool outside = p.shape.bias == BIAS_OUTSIDE;
    if (p.shape.scaled) {
        assert_error_below(scale_error(got, r), outside ? TOLERANCE.dscale_outside : TOLERANCE.dscale);
    }
}

// What lies between the tokens and beyond the table keeps the NaN it was filled with.
static void check_gaps(const Problem& p, const Result& got) {
    for (size_t n = 0; n < p.shape.B * p.shape.T; n++) {
        for (size_t c = p.stride - TOKEN_GAP; c < p.stride; c++) { assert_true(isnan(got.dqkv[n * p.stride + c])); }
    }
    for (size_t h = 0; h < p.shape.NH; h++) {
        for (size_t d = p.shape.bias ? p.shape.T : 0; d < p.bias_stride; d++) {
            assert_true(isnan(got.dbias[h * p.bias_stride + d]));
        }
    }
}

static void check_shape(const Shape& s, uint64_t seed) {
    print_message("B %zu T %zu NH %zu NKV %zu HS %zu bias %d scaled %d documents %d\n", s.B, s.T, s.NH, s.NKV, s.HS,
                  s.bias, s.scaled, s.documents);
    const Problem p = make_problem(s, seed);
    const Reference r = reference(p, true);
    const Result got = forward_backward(p);
    check_forward(got, r);
    check_backward(p, got, r);
    check_gaps(p, got);
}

// Every length, head size, group size, bias, scale and document setting, and their pairs.
static const Shape SHAPES[] = {
    {2, 1, 2, 1, 48, BIAS_INSIDE, true, false},     {1, 1, 3, 3, 128, NO_BIAS, false, false},
    {1, 33, 12, 12, 48, BIAS_INSIDE, true, true},   {1, 33, 48, 3, 32, BIAS_OUTSIDE, true, false},
    {2, 33, 12, 3, 40, BIAS_OUTSIDE, false, true},  {1, 33, 3, 1, 96, NO_BIAS, true, true},
    {1, 127, 2, 2, 64, BIAS_INSIDE, true, true},    {1, 127, 3, 1, 48, NO_BIAS, true, false},
    {1, 127, 1, 1, 128, BIAS_INSIDE, true, true},   {1, 129, 2, 1, 32, BIAS_INSIDE, true, false},
    {2, 129, 1, 1, 48, BIAS_OUTSIDE, false, false}, {1, 129, 1, 1, 96, BIAS_INSIDE, true, true},
    {1, 129, 2, 1, 64, NO_BIAS, false, true},       {2, 200, 2, 1, 48, BIAS_INSIDE, true, true},
    {1, 200, 1, 1, 64, BIAS_INSIDE, true, false},   {1, 200, 1, 1, 128, BIAS_OUTSIDE, true, false},
    {1, 200, 2, 2, 32, NO_BIAS, false, false},      {1, 200, 1, 1, 8, BIAS_INSIDE, false, true},
};

static void test_shapes(void** state) {
    (void)state;
    for (size_t i = 0; i < sizeof SHAPES / sizeof *SHAPES; i++) { check_shape(SHAPES[i], i); }
}

static void test_every_combination(void** state) {
    (void)state;
    if (!getenv("EXHAUSTIVE")) { skip(); }
    static const size_t lengths[] = {1, 33, 64, 127, 129, 200, 333}, sizes[] = {32, 48, 64, 96, 128, 40, 72};
    uint64_t n = 0;
    for (size_t T : lengths) {
        for (size_t HS : sizes) {
            for (int c = 0; c < 12; c++, n++) {
                const size_t NKV = n % 3 == 0 ? 1 : n % 3 == 1 ? 2 : 4;
                check_shape({1 + n % 2, T, 4, NKV, HS, c % 3, c / 3 % 2 == 0, c / 6 == 0}, n);
            }
        }
    }
}

// ----------------------------------------------------------------------------
// schedules

static bool same_bits(const std::vector<float>& x, const std::vector<float>& y) {
    return memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
}

static void set_schedule(unsigned seed) {
#ifdef CUDA_EMULATOR
    emu::config().seed = seed;
#else
    (void)seed;
#endif
}

static void test_any_schedule_gives_the_same_bits(void** state) {
    (void)state;
    static const Shape shapes[] = {
        {1, 150, 4, 2, 48, BIAS_INSIDE, true, true},
        {1, 140, 1, 1, 64, BIAS_OUTSIDE, true, false},
        {1, 140, 1, 1, 96, NO_BIAS, true, true},
        {1, 131, 2, 2, 32, BIAS_INSIDE, true, false},
    };
    for (const Shape& s : shapes) {
        const Problem p = make_problem(s, 7);
        set_schedule(0);
        const Result first = forward_backward(p);
        for (unsigned seed = 1; seed < SCHEDULES; seed++) {
            set_schedule(seed);
            const Result again = forward_backward(p);
            assert_true(same_bits(first.out, again.out) && same_bits(first.lse, again.lse));
            assert_true(same_bits(first.dqkv, again.dqkv) && same_bits(first.dbias, again.dbias));
            assert_true(same_bits(first.dseq_scale, again.dseq_scale));
        }
        set_schedule(0);
    }
}

// ----------------------------------------------------------------------------
// queries at an offset

// Queries position.. of every sequence against a cache of `capacity` tokens that holds the keys up to them and NaN
// after them; out like Problem.dout, of which only these rows are written.
static void run_chunk(const Problem& p, size_t capacity, size_t position, size_t count, std::vector<float>* out) {
    const Shape& s = p.shape;
    const size_t row = 2 * s.NKV * s.HS, C = s.NH * s.HS, Tk = position + count;
    std::vector<float> cache(s.B * capacity * row, NAN), queries(s.B * count * C), log_count(s.B * count);
    std::vector<int> start(s.B * count);
    for (size_t b = 0; b < s.B; b++) {
        for (size_t t = 0; t < Tk; t++) {
            memcpy(&cache[(b * capacity + t) * row], &p.qkv[(b * s.T + t) * p.stride + p.key_column],
                   row * sizeof(float));
        }
        for (size_t t = 0; t < count; t++) {
            const size_t from = b * s.T + position + t, to = b * count + t;
            memcpy(&queries[to * C], &p.qkv[from * p.stride], C * sizeof(float));
            start[to] = p.start[from], log_count[to] = p.log_count[from];
        }
    }
    floatX *device_cache = upload_rounded(cache), *device_queries = upload_rounded(queries);
    float *bias = upload(p.bias), *seq_scale = upload(p.seq_scale), *device_log_count = upload(log_count);
    int* device_start = upload(start);
    AttentionInput in;
    memset(&in, 0, sizeof in);
    in.size = sizes(s);
    in.size.Tq = count, in.size.Tk = Tk;
    in.q = device_queries, in.q_stride = C, in.q_batch = count * C;
    in.k = device_cache, in.v = device_cache + row / 2, in.kv_stride = row, in.kv_batch = capacity * row;
    in.logit.by_distance = bias, in.logit.distance_stride = p.bias_stride, in.logit.inside = s.bias == BIAS_INSIDE;
    in.logit.seq_scale = seq_scale, in.logit.log_count = device_log_count;
    in.start = s.documents ? device_start : NULL;
    const std::vector<float> chunk = forward(in, NULL);
    for (size_t b = 0; b < s.B; b++) {
        memcpy(&(*out)[(b * s.T + position) * C], &chunk[b * count * C], count * C * sizeof(float));
    }
    void* all[] = {device_cache, device_queries, bias, seq_scale, device_log_count, device_start};
    for (void* x : all) { cudaCheck(cudaFree(x)); }
}

static void test_chunks_equal_the_whole(void** state) {
    (void)state;
    static const Shape shapes[] = {{2, 70, 3, 1, 48, BIAS_INSIDE, true, true},
                                   {1, 70, 2, 2, 40, BIAS_OUTSIDE, true, false}};
    static const size_t chunks[] = {1, 7, 64};
    for (const Shape& s : shapes) {
        const Problem p = make_problem(s, 30);
        const Reference r = reference(p, false);
        for (size_t chunk : chunks) {
            std::vector<float> out(p.dout.size(), NAN);
            // steps of one token cost as much as many: only the first and the last are run one by one
            const size_t skip = chunk == 1 ? 5 : s.T;
            if (chunk == 1) { run_chunk(p, s.T + 3, skip, s.T - 2 * skip, &out); }
            for (size_t t = 0; t < s.T; t += chunk) {
                if (t == skip) { t = s.T - skip; }
                run_chunk(p, s.T + 3, t, t + chunk < s.T ? chunk : s.T - t, &out);
            }
            assert_error_below(array_error(out, r.out), TOLERANCE.out);
        }
    }
}

// Few queries at the end of a long sequence: the keys are split. One sequence's document covers all of it, the other's
// begins in the last split but one.
static void test_splits_equal_the_whole(void** state) {
    (void)state;
    enum { T = 2200, QUERIES = 3, DOCUMENT = 1300 };
    static const int biases[] = {BIAS_INSIDE, NO_BIAS};
    for (int bias : biases) {
        Problem p = make_problem({2, T, 2, 1, 32, bias, true, true}, 31);
        for (size_t n = 0; n < 2 * T; n++) { p.start[n] = n >= T + DOCUMENT ? DOCUMENT : 0; }
        set_log_counts(p);
        std::vector<float> out(p.dout.size(), 0.0f);
        run_chunk(p, T, T - QUERIES, QUERIES, &out);
        AttentionCase c = reference_case(p);
        std::vector<int> start;
        std::vector<float> log_count, got;
        for (size_t n = 0; n < 2 * QUERIES; n++) {
            const size_t token = (n / QUERIES + 1) * T - QUERIES + n % QUERIES;
            start.push_back(p.start[token]), log_count.push_back(p.log_count[token]);
            got.insert(got.end(), &out[token * 64], &out[token * 64] + 64);
        }
        c.size.Tq = QUERIES, c.q += (T - QUERIES) * p.stride, c.start = start.data(), c.log_count = log_count.data();
        std::vector<double> want(got.size()), lse(2 * QUERIES * 2);
        AttentionReference to;
        memset(&to, 0, sizeof to);
        to.out = want.data(), to.lse = lse.data();
        attention_reference(&to, &c, NULL);
        assert_error_below(array_error(got, want), TOLERANCE.out);
    }
    AttentionInput in;
    memset(&in, 0, sizeof in);
    in.size.B = 2, in.size.NH = 2, in.size.Tq = QUERIES, in.size.Tk = T;
    assert_int_equal(attention_splits(&in, attention_rows(32)), 4);
}

static size_t workspace_of(const AttentionSizes& size, bool backward) { return attention_workspace(&size, backward); }

static void test_workspace_grows_with_every_size(void** state) {
    (void)state;
    for (int backward = 0; backward < 2; backward++) {
        const size_t largest = workspace_of({40, 1400, 1400, 12, 2, 48, TERM_DISTANCE | TERM_SCALE, 0, 0}, backward);
        for (size_t B = 1; B <= 40; B++) {
            for (size_t T = 1; T <= 1400; T += 99) {
                assert_true(workspace_of({B, T, 1400, 12, 2, 48, TERM_DISTANCE | TERM_SCALE, 0, 0}, false) <= largest);
                assert_true(workspace_of({B, T, T, 12, 2, 48, TERM_DISTANCE | TERM_SCALE, 0, 0}, backward) <= largest);
            }
        }
        assert_true(workspace_of({1, 131072, 131072, 16, 16, 48, TERM_DISTANCE | TERM_SCALE, 0, 0}, backward) <
                    (size_t)131072 * 8192);  // O(T)
    }
}

// ----------------------------------------------------------------------------
// outputs

static void test_accumulates_and_optional_outputs(void** state) {
    (void)state;
    const Problem p = make_problem({2, 70, 4, 2, 24, BIAS_INSIDE, true, true}, 1);
    const Result once = forward_backward(p);
    Device d = to_device(p);
    floatX *out = upload_rounded(once.out), *dqkv = garbage<floatX>(p.qkv.size());
    float *lse = upload(once.lse), *dbias = garbage<float>(p.bias.size()), *dseq_scale = upload(once.dseq_scale);
    char* workspace = make_workspace(d.in, true);
    const AttentionGradients to = {
        dqkv, dqkv + p.key_column, dqkv + p.value_column, dbias, dseq_scale, NULL, NULL, NULL, NULL};
    attention_backward(&to, d.dout, out, lse, &d.in, workspace);
    cudaCheck(cudaDeviceSynchronize());
    const std::vector<float> twice = download(dseq_scale, 4);
    for (size_t h = 0; h < 4; h++) { assert_true(twice[h] == once.dseq_scale[h] + once.dseq_scale[h]); }
    assert_true(same_bits(forward(d.in, NULL), once.out));
    void* all[] = {out, dqkv, lse, dbias, dseq_scale, workspace};
    for (void* x : all) { cudaCheck(cudaFree(x)); }
    free_device(d);
}

static void forward_of_head_size(void* HS) {
    AttentionInput in;
    memset(&in, 0, sizeof in);
    in.size.B = in.size.Tq = in.size.Tk = in.size.NH = in.size.NKV = 1, in.size.HS = *(size_t*)HS;
    attention_forward(NULL, NULL, &in, NULL);
}

static void test_other_head_sizes_are_refused(void** state) {
    (void)state;
    size_t sizes[] = {20, 136};
    const char* const words[2][4] = {{"head size", "20", "128", NULL}, {"head size", "136", "128", NULL}};
    for (int i = 0; i < 2; i++) { expect_fatal(forward_of_head_size, &sizes[i], words[i]); }
}

// ----------------------------------------------------------------------------
// masks and extreme values

// Keys and values that a query must not see, made huge, change no bit of its output or of its dq.
static void test_nothing_leaks(void** state) {
    (void)state;
    enum { T = 150, DOCUMENT = 77, CHANGED = 130 };
    Problem p = make_problem({1, T, 2, 1, 40, BIAS_INSIDE, true, true}, 9);
    for (size_t t = 0; t < T; t++) { p.start[t] = t < DOCUMENT ? 0 : DOCUMENT; }
    set_log_counts(p);
    Problem q = p;
    for (size_t t = 0; t < T; t++) {
        for (size_t d = 0; d < 2 * 40 && (t < DOCUMENT || t >= CHANGED); d++) {
            q.qkv[t * q.stride + q.key_column + d] = rounded(d % 3 ? 1e30 : -1e18);
        }
    }
    const Result a = forward_backward(p), b = forward_backward(q);
    for (size_t t = DOCUMENT; t < CHANGED; t++) {
        assert_memory_equal(&a.out[t * 80], &b.out[t * 80], 80 * sizeof(float));
        assert_memory_equal(&a.dqkv[t * p.stride], &b.dqkv[t * p.stride], 80 * sizeof(float));
    }
}

static bool all_finite(const std::vector<float>& x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) { return false; }
    }
    return true;
}

typedef struct {
    const char* name;
    float even, odd;  // bias at even and odd distances
    float slope;      // added per distance
    float q_factor;
    bool exact;  // fp32 logits are exact or far apart, so that the reference is the right answer
} Extreme;

static const Extreme EXTREMES[] = {
    {"all at -1e6", -1e6f, -1e6f, 0.0f, 0.0f, true}, {"all at -1e30", -1e30f, -1e30f, 0.0f, 0.0f, true},
    {"all at 1e30", 1e30f, 1e30f, 0.0f, 0.0f, true}, {"-1e30 and 1e30", -1e30f, 1e30f, 0.0f, 1.0f, false},
    {"-1e30 and 0", -1e30f, 0.0f, 0.0f, 1.0f, true}, {"0 and -1e30", 0.0f, -1e30f, 0.0f, 1.0f, true},
    {"1e30 and 0", 1e30f, 0.0f, 0.0f, 1.0f, false},  {"falling to -7e10", 0.0f, 0.0f, -5e8f, 1.0f, true},
    {"rising", -7e10f, -7e10f, 5e8f, 1.0f, true},    {"products of 1e30", 0.0f, 0.0f, 0.0f, 1e30f, true},
};

static void check_extreme(const Extreme& e, int bias, bool scaled, float seq_scale) {
    enum { T = 80, HS = 32 };
    Problem p = make_problem({1, T, 2, 1, HS, bias, scaled, true}, 17);
    for (size_t n = 0; n < T; n++) {
        for (size_t c = 0; c < p.key_column; c++) {
            p.qkv[n * p.stride + c] = rounded((double)p.qkv[n * p.stride + c] * (double)e.q_factor);
        }
    }
    for (size_t h = 0; h < 2; h++) {
        p.seq_scale[h] = seq_scale;
        for (size_t d = 0; d < T; d++) {
            p.bias[h * p.bias_stride + d] = (d % 2 ? e.odd : e.even) + e.slope * (float)d;
        }
    }
    const Result got = forward_backward(p);
    bool finite = all_finite(got.out, got.out.size()) && all_finite(got.lse, 2 * T) && all_finite(got.dseq_scale, 2);
    for (size_t n = 0; n < T; n++) {
        for (size_t c = 0; c < p.stride - TOKEN_GAP; c++) { finite = finite && isfinite(got.dqkv[n * p.stride + c]); }
    }
    for (size_t h = 0; h < 2; h++) {
        for (size_t d = 0; d < T; d++) { finite = finite && isfinite(got.dbias[h * p.bias_stride + d]); }
    }
    const Reference r = reference(p, true);
    const double out = e.exact ? array_error(got.out, r.out) : 0.0;
    const double dv = e.exact ? gradient_error(p, got, r, p.value_column, HS) : 0.0;
    const double tolerance = fmax(TOLERANCE.dv, 2e-5);
    if (!finite || out > tolerance || dv > tolerance) {
        print_error("%s, bias %d, scaled %d (%g): finite %d, out %g, dv %g\n", e.name, bias, scaled, (double)seq_scale,
                    finite, out, dv);
        fail();
    }
}

static void test_extreme_logits(void** state) {
    (void)state;
    for (size_t i = 0; i < sizeof EXTREMES / sizeof *EXTREMES; i += EXTREME_STEP) {
        const Extreme& e = EXTREMES[i];
        check_extreme(e, BIAS_OUTSIDE, false, 1.0f);
        check_extreme(e, BIAS_OUTSIDE, true, 0.5f);
        check_extreme(e, BIAS_INSIDE, true, 0.5f);
        check_extreme(e, BIAS_INSIDE, true, -0.5f);
    }
}

// Large logits of both signs: the backward computes the softmax again where lse is too coarse.
static void test_gradients_where_lse_is_coarse(void** state) {
    (void)state;
    static const float levels[] = {-65536.0f, 90.0f, 2097152.0f};
    for (float level : levels) {
        Problem p = make_problem({1, 100, 2, 1, 48, BIAS_OUTSIDE, false, true}, 70);
        for (size_t n = 0; n < 100; n++) {  // logits of one level are exact, sums of it with others are not
            for (size_t c = 0; c < p.key_column; c++) { p.qkv[n * p.stride + c] = 0.0f; }
        }
        for (float& x : p.bias) { x = level; }
        const Reference r = reference(p, true);
        const Result got = forward_backward(p);
        check_backward(p, got, r);
    }
}

// The softmax ignores a constant, so no part of it may reach the gradient of the scale as noise.
static void test_a_constant_bias_leaves_the_scale_alone(void** state) {
    (void)state;
    Problem p = make_problem({1, 100, 2, 1, 32, BIAS_INSIDE, true, true}, 80);
    for (size_t n = 0; n < 100; n++) {
        for (size_t c = 0; c < p.key_column; c++) { p.qkv[n * p.stride + c] = 0.0f; }
    }
    for (float& x : p.bias) { x = -65536.0f; }
    const Result got = forward_backward(p);
    // the mean of the logits is rounded to 2^-7 in units of log 2, and multiplies a sum that is rounding noise
    for (size_t h = 0; h < 2; h++) { assert_error_below(fabs((double)got.dseq_scale[h]), 1e-3); }
}

// Documents of one token, also under a bias of 1e30 and with a scale of ln 1 = 0.
static void test_one_visible_key(void** state) {
    (void)state;
    enum { T = 70, HS = 48 };
    static const float biases[] = {0.0f, 1e30f, -1e30f};
    for (int c = 0; c < 9; c++) {
        Problem p = make_problem({1, T, 2, 1, HS, c % 3, c / 3 != 1, true}, 21);
        for (size_t t = 0; t < T; t++) { p.start[t] = (int)t; }
        set_log_counts(p);
        for (float& x : p.bias) { x = biases[c / 3]; }
        const Result got = forward_backward(p);
        assert_true(all_finite(got.lse, 2 * T));
        for (size_t t = 0; t < T; t++) {
            const float *value = &p.qkv[t * p.stride + p.value_column], *gradient = &got.dqkv[t * p.stride];
            for (size_t h = 0; h < 2; h++) {
                assert_memory_equal(&got.out[(t * 2 + h) * HS], value, sizeof(float[HS]));
            }
            for (size_t d = 0; d < p.value_column; d++) { assert_true(gradient[d] == 0.0f); }
            for (size_t d = 0; d < HS; d++) {
                const float sum = p.dout[t * 2 * HS + d] + p.dout[(t * 2 + 1) * HS + d];
                assert_true(gradient[p.value_column + d] == rounded(sum));
            }
        }
        for (size_t d = 0; d < T && p.shape.bias; d++) {
            assert_true(got.dbias[d] == 0.0f && got.dbias[p.bias_stride + d] == 0.0f);
        }
        assert_true(got.dseq_scale[0] == 0.0f && got.dseq_scale[1] == 0.0f);
    }
}

// A NaN must reach the loss, not vanish in a maximum.
static void test_nan_is_not_hidden(void** state) {
    (void)state;
    Problem p = make_problem({1, 100, 1, 1, 32, NO_BIAS, false, false}, 2);
    p.qkv[70 * p.stride + p.key_column + 7] = NAN;  // in a key
    Device d = to_device(p);
    std::vector<float> lse;
    const std::vector<float> out = forward(d.in, &lse);
    assert_true(all_finite(out, 64 * 32));
    for (size_t i = 70; i < 100; i++) { assert_true(isnan(out[i * 32]) && isnan(lse[i])); }
    free_device(d);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_every_combination),
        cmocka_unit_test(test_any_schedule_gives_the_same_bits),
        cmocka_unit_test(test_chunks_equal_the_whole),
        cmocka_unit_test(test_splits_equal_the_whole),
        cmocka_unit_test(test_workspace_grows_with_every_size),
        cmocka_unit_test(test_accumulates_and_optional_outputs),
        cmocka_unit_test(test_other_head_sizes_are_refused),
        cmocka_unit_test(test_nothing_leaks),
        cmocka_unit_test(test_extreme_logits),
        cmocka_unit_test(test_gradients_where_lse_is_coarse),
        cmocka_unit_test(test_a_constant_bias_leaves_the_scale_alone),
        cmocka_unit_test(test_one_visible_key),
        cmocka_unit_test(test_nan_is_not_hidden),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
