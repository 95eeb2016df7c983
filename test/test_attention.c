/*
Attention against the float64 reference over sequence lengths, head sizes, groups, biases, Scalable-Softmax
and documents; thread counts; prefill in chunks; masks; extreme logits.
*/
#include "attention_util.h"

// ----------------------------------------------------------------------------
// every shape

// What lies between the tokens and beyond the table must stay as it was.
static void check_gaps(const Problem* p) {
    size_t stride = p->in.q_stride;
    for (size_t n = 0; n < p->shape.B * p->shape.T; n++) {
        for (size_t c = stride - GAP; c < stride; c++) { assert_true(p->dqkv[n * stride + c] == UNTOUCHED); }
    }
    for (size_t h = 0; h < p->shape.NH; h++) {
        for (size_t d = p->shape.T; d < p->in.logit.distance_stride; d++) {
            assert_true(p->dbias[h * p->in.logit.distance_stride + d] == UNTOUCHED);
        }
    }
}

static void check_shape(Shape s, uint64_t seed) {
    Problem p = make_problem(s, seed);
    fill(p.dqkv, p.qkv_floats, UNTOUCHED);
    fill(p.dbias, s.NH * p.in.logit.distance_stride, UNTOUCHED);
    forward(p.out, p.lse, &p.in);
    backward(&p);
    Reference r = reference(&p, true);
    bool bad = relative_error(p.out, r.out, p.q_size) > TOLERANCE || gradient_error(&p, &r, 0, p.dv) > TOLERANCE;
    if (bad) { print_shape(&s); }
    check_forward(&p, &r, TOLERANCE);
    check_backward(&p, &r, TOLERANCE);
    check_gaps(&p);
    free_reference(&r);
    free_problem(&p);
}

// Every length with every head size; groups, biases, scale and documents rotate through all their combinations.
static void test_shapes(void** state) {
    (void)state;
    static const size_t lengths[] = {1, 2, 31, 33, 127, 129}, sizes[] = {8, 24, 32, 40, 48, 64, 80, 96, 128};
    static const size_t kv_heads[] = {1, 3, 6};
    uint64_t n = 0;
    for (size_t t = 0; t < 6; t++) {
        for (size_t h = 0; h < 9; h++) {
            for (size_t repeat = 0; repeat < (lengths[t] < 100 ? 4 : 2); repeat++, n++) {
                uint64_t c = n * 7;  // 36 combinations, 7 is coprime
                Shape s = {1 + n % 2, lengths[t], 6, kv_heads[c % 3], sizes[h], (int)(c / 3 % BIAS_CASES),
                           c / 9 % 2, c / 18 % 2};
                check_shape(s, n);
            }
        }
    }
}

static void test_long_shapes(void** state) {
    (void)state;
    static const Shape shapes[] = {
        {1, 1025, 2, 1, 32, BIAS_INSIDE, true, false},   {1, 1025, 2, 2, 48, BIAS_OUTSIDE, true, true},
        {1, 1025, 3, 3, 8, NO_BIAS, false, false},       {1, 1025, 1, 1, 40, BIAS_INSIDE, true, true},
        {1, 1025, 1, 1, 64, BIAS_OUTSIDE, false, false},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) { check_shape(shapes[i], 100 + i); }
}

static void test_accumulates_and_optional_outputs(void** state) {
    (void)state;
    Problem p = make_problem((Shape){2, 70, 4, 2, 24, BIAS_INSIDE, true, true}, 1);
    forward(p.out, p.lse, &p.in);
    backward(&p);
    float* first = xcalloc(p.shape.NH, sizeof(float));
    memcpy(first, p.dseq_scale, p.shape.NH * sizeof(float));
    void* workspace = make_workspace(&p.in, true);
    AttentionGradients gradients = problem_gradients(&p);
    attention_backward(&gradients, p.dout, p.out, p.lse, &p.in, workspace);
    for (size_t h = 0; h < p.shape.NH; h++) { assert_true(p.dseq_scale[h] == first[h] + first[h]); }
    float* out = random_array(p.q_size, 1.0, &(Random){1});
    attention_forward(out, NULL, &p.in, workspace);  // the backward's workspace is enough
    assert_memory_equal(out, p.out, p.q_size * sizeof(float));
    free(workspace), free(first), free(out);
    free_problem(&p);
}

// ----------------------------------------------------------------------------
// threads

static void run_with_threads(Problem* p, int threads) {
    set_threads(threads);
    forward(p->out, p->lse, &p->in);
    backward(p);
}

// 1 and 2 heads for 3 threads take the shared path, 6 the private one.
static void test_any_number_of_threads_gives_the_same_bits(void** state) {
    (void)state;
    static const Shape shapes[] = {
        {1, 700, 1, 1, 48, BIAS_INSIDE, true, false}, {1, 517, 4, 1, 32, BIAS_OUTSIDE, true, true},
        {2, 300, 2, 1, 40, BIAS_INSIDE, true, true},  {2, 200, 6, 3, 64, BIAS_INSIDE, true, true},
        {1, 5, 3, 3, 64, BIAS_INSIDE, true, false},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        Problem one = make_problem(shapes[i], i);
        run_with_threads(&one, 1);
        Reference r = reference(&one, true);
        check_forward(&one, &r, TOLERANCE);
        check_backward(&one, &r, TOLERANCE);
        free_reference(&r);
        for (int threads = 2; threads <= 5; threads++) {
            Problem many = make_problem(shapes[i], i);
            run_with_threads(&many, threads);
            assert_memory_equal(one.out, many.out, one.q_size * sizeof(float));
            assert_memory_equal(one.dqkv, many.dqkv, one.qkv_floats * sizeof(float));
            assert_memory_equal(one.dbias, many.dbias, shapes[i].NH * one.in.logit.distance_stride * sizeof(float));
            assert_memory_equal(one.dseq_scale, many.dseq_scale, shapes[i].NH * sizeof(float));
            free_problem(&many);
        }
        free_problem(&one);
    }
}

// ----------------------------------------------------------------------------
// queries at an offset

// Runs queries position..position+count-1 of p against a cache of capacity tokens that holds all earlier keys.
static void run_chunk(const Problem* p, const float* cache, size_t capacity, size_t position, size_t count,
                      float* out) {
    const Shape* s = &p->shape;
    size_t row = s->NKV * s->HS;
    AttentionInput in = p->in;
    in.size.Tq = count, in.size.Tk = position + count;
    in.q = p->qkv + position * in.q_stride;
    in.k = cache, in.v = cache + row, in.kv_stride = 2 * row, in.kv_batch = capacity * 2 * row;
    int* start = xcalloc(s->B * count, sizeof(int));
    float *log_count = xcalloc(s->B * count, sizeof(float)),
          *chunk = xcalloc(s->B * count * s->NH * s->HS, sizeof(float));
    for (size_t b = 0; b < s->B; b++) {
        memcpy(start + b * count, p->start + b * s->T + position, count * sizeof(int));
        memcpy(log_count + b * count, p->log_count + b * s->T + position, count * sizeof(float));
    }
    in.start = in.start ? start : NULL, in.logit.log_count = log_count;
    forward(chunk, NULL, &in);
    size_t C = s->NH * s->HS;
    for (size_t b = 0; b < s->B; b++) {
        memcpy(out + (b * s->T + position) * C, chunk + b * count * C, count * C * sizeof(float));
    }
    free(start), free(log_count), free(chunk);
}

static float* make_cache(const Problem* p, size_t capacity) {
    const Shape* s = &p->shape;
    size_t row = 2 * s->NKV * s->HS;
    float* cache = xcalloc(s->B * capacity * row, sizeof(float));
    fill(cache, s->B * capacity * row, NAN);
    for (size_t n = 0; n < s->B * s->T; n++) {
        float* entry = cache + (n / s->T * capacity + n % s->T) * row;
        memcpy(entry, p->qkv + n * p->in.q_stride + p->dk, row * sizeof(float));
    }
    return cache;
}

static void test_chunks_equal_the_whole(void** state) {
    (void)state;
    static const Shape shapes[] = {
        {2, 300, 6, 3, 48, BIAS_INSIDE, true, true},   {1, 230, 2, 2, 40, BIAS_OUTSIDE, true, false},
        {1, 200, 4, 1, 32, NO_BIAS, false, true},      {1, 150, 64, 1, 8, BIAS_OUTSIDE, false, false},
        {3, 100, 1, 1, 128, BIAS_INSIDE, false, true},
    };
    static const size_t chunks[] = {1, 7, 64, 0};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const Shape* s = &shapes[i];
        Problem p = make_problem(*s, 30 + i);
        Reference r = reference(&p, false);
        size_t capacity = s->T + 11;
        float *cache = make_cache(&p, capacity), *out = xcalloc(p.q_size, sizeof(float));
        for (size_t c = 0; c < 4; c++) {
            for (int threads = 1; threads <= (chunks[c] == 1 ? 1 : 3); threads += 2) {
                set_threads(threads);
                fill(out, p.q_size, NAN);
                size_t chunk = chunks[c] ? chunks[c] : s->T;
                for (size_t t = 0; t < s->T; t += chunk) {
                    run_chunk(&p, cache, capacity, t, t + chunk < s->T ? chunk : s->T - t, out);
                }
                assert_error_below(relative_error(out, r.out, p.q_size), TOLERANCE);
            }
        }
        free(cache), free(out);
        free_reference(&r);
        free_problem(&p);
    }
}

// The workspace of a longer pass is enough for any shorter one.
static size_t workspace_of(size_t B, size_t Tq, size_t Tk, bool backward) {
    AttentionSizes size = {B, Tq, Tk, 6, 2, 48, TERM_DISTANCE | TERM_SCALE | TERM_MIX, 16, 300};
    return attention_workspace(&size, backward);
}

static void test_workspace_grows_with_every_size(void** state) {
    (void)state;
    for (int threads = 1; threads <= 5; threads++) {
        set_threads(threads);
        for (int backward = 0; backward < 2; backward++) {
            size_t largest = workspace_of(4, 700, 700, backward);
            for (size_t B = 1; B <= 4; B++) {
                for (size_t T = 1; T <= 700; T += 99) {
                    assert_true(workspace_of(B, T, 700, false) <= largest);
                    assert_true(workspace_of(B, T, T, backward) <= largest);
                }
            }
            size_t twice = workspace_of(4, 1400, 1400, backward);
            assert_true(twice < 3 * largest);  // O(T)
        }
    }
}

// ----------------------------------------------------------------------------
// documents and masks

static void test_packed_documents_equal_separate_ones(void** state) {
    (void)state;
    static const size_t lengths[] = {1, 64, 2, 96, 33, 1, 61};
    Shape s = {1, 258, 4, 2, 32, BIAS_INSIDE, true, true};
    Problem packed = make_problem(s, 5);
    for (size_t doc = 0, first = 0; doc < sizeof lengths / sizeof *lengths; first += lengths[doc++]) {
        for (size_t t = first; t < first + lengths[doc]; t++) {
            packed.start[t] = (int)first;
            packed.log_count[t] = ssmax_log_count(t - first + 1);
        }
    }
    forward(packed.out, packed.lse, &packed.in);
    size_t C = s.NH * s.HS;
    for (size_t doc = 0, first = 0; doc < sizeof lengths / sizeof *lengths; first += lengths[doc++]) {
        AttentionInput in = packed.in;
        in.size.Tq = in.size.Tk = lengths[doc], in.start = NULL, in.logit.log_count += first;
        in.q += first * in.q_stride, in.k += first * in.kv_stride, in.v += first * in.kv_stride;
        float* out = xcalloc(lengths[doc] * C, sizeof(float));
        double* want = xcalloc(lengths[doc] * C, sizeof(double));
        forward(out, NULL, &in);
        for (size_t i = 0; i < lengths[doc] * C; i++) { want[i] = (double)packed.out[first * C + i]; }
        assert_error_below(relative_error(out, want, lengths[doc] * C), 2e-6);
        free(out), free(want);
    }
    free_problem(&packed);
}

// Keys and values that a query must not see, made huge, change no bit of its output or of its dq.
static void test_nothing_leaks(void** state) {
    (void)state;
    enum { T = 200, DOCUMENT = 77, CHANGED = 130 };
    Shape s = {1, T, 2, 1, 40, BIAS_INSIDE, true, true};
    Problem p = make_problem(s, 9), q = make_problem(s, 9);
    Problem* both[] = {&p, &q};
    for (size_t n = 0; n < 2; n++) {
        for (size_t t = 0; t < T; t++) {
            size_t start = t < DOCUMENT ? 0 : DOCUMENT;
            both[n]->start[t] = (int)start;
            both[n]->log_count[t] = ssmax_log_count(t - start + 1);
        }
    }
    for (size_t t = 0; t < T; t++) {
        for (size_t d = 0; d < 2 * s.HS && (t < DOCUMENT || t >= CHANGED); d++) {
            q.qkv[t * q.in.q_stride + q.dk + d] = d % 3 ? 1e30f : -1e18f;
        }
    }
    for (size_t n = 0; n < 2; n++) {
        forward(both[n]->out, both[n]->lse, &both[n]->in);
        backward(both[n]);
    }
    for (size_t t = DOCUMENT; t < CHANGED; t++) {
        size_t C = s.NH * s.HS;
        assert_memory_equal(p.out + t * C, q.out + t * C, C * sizeof(float));
        assert_memory_equal(p.dqkv + t * p.in.q_stride, q.dqkv + t * p.in.q_stride, C * sizeof(float));
    }
    free_problem(&p), free_problem(&q);
}

// ----------------------------------------------------------------------------
// extreme values

static bool all_finite(const float* x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) { return false; }
    }
    return true;
}

static void zero_queries(Problem* p) {
    for (size_t n = 0; n < p->shape.B * p->shape.T; n++) {
        memset(p->qkv + n * p->in.q_stride, 0, p->shape.NH * p->shape.HS * sizeof(float));
    }
}

// With q = 0 the weights are the softmax of the bias alone: the output is the reference's without any q.k.
static void test_zero_queries_leave_the_bias(void** state) {
    (void)state;
    Problem p = make_problem((Shape){1, 140, 2, 2, 32, BIAS_OUTSIDE, true, false}, 3);
    zero_queries(&p);
    forward(p.out, p.lse, &p.in);
    for (size_t h = 0; h < 2; h++) {
        for (size_t i = 0; i < 140; i++) {
            double sum = 0;
            for (size_t d = 0; d <= i; d++) { sum += exp((double)p.bias[h * p.in.logit.distance_stride + d]); }
            assert_error_below(fabs((double)p.lse[h * 140 + i] - log(sum)), 1e-6);
        }
    }
    Reference r = reference(&p, false);
    check_forward(&p, &r, 1e-6);
    free_reference(&r);
    free_problem(&p);
}

typedef struct {
    const char* name;
    float even, odd;  // bias at even and odd distances
    float slope;      // added per distance
    bool zero_q;      // else scores of order 1 that must vanish beside the bias or be exact
    float q_factor;
} Extreme;

// Values whose fp32 logits are exact or far apart, so that the float64 reference is the right answer.
static const Extreme EXTREMES[] = {
    {"all at -1e6", -1e6f, -1e6f, 0.0f, true, 0.0f},          {"all at -1e30", -1e30f, -1e30f, 0.0f, true, 0.0f},
    {"all at 1e30", 1e30f, 1e30f, 0.0f, true, 0.0f},          {"-1e30 and 1e30", -1e30f, 1e30f, 0.0f, false, 1.0f},
    {"-1e30 and 0", -1e30f, 0.0f, 0.0f, false, 1.0f},         {"0 and -1e30", 0.0f, -1e30f, 0.0f, false, 1.0f},
    {"1e30 and 0", 1e30f, 0.0f, 0.0f, false, 1.0f},           {"falling to -7e10", 0.0f, 0.0f, -5e8f, false, 1.0f},
    {"rising from -7e10", -7e10f, -7e10f, 5e8f, false, 1.0f}, {"products of 1e30", 0.0f, 0.0f, 0.0f, false, 1e30f},
};

static void check_extreme(const Extreme* e, int bias, bool scaled, float seq_scale) {
    Problem p = make_problem((Shape){1, 140, 2, 1, 32, bias, scaled, true}, 17);
    if (e->zero_q) { zero_queries(&p); }
    for (size_t n = 0; n < 140 && !e->zero_q; n++) {
        for (size_t c = 0; c < p.dk; c++) { p.qkv[n * p.in.q_stride + c] *= e->q_factor; }
    }
    for (size_t h = 0; h < 2; h++) {
        p.seq_scale[h] = seq_scale;
        for (size_t d = 0; d < 140; d++) {
            p.bias[h * p.in.logit.distance_stride + d] = (d % 2 ? e->odd : e->even) + e->slope * (float)d;
        }
    }
    forward(p.out, p.lse, &p.in);
    backward(&p);
    bool finite = all_finite(p.out, p.q_size) && all_finite(p.lse, 280) && all_finite(p.dqkv, p.qkv_floats) &&
                  all_finite(p.dbias, 280) && all_finite(p.dseq_scale, 2);
    if (!finite) { print_error("%s: not finite\n", e->name); }
    assert_true(finite);
    // logits one apart, at 1e30, are one and the same in fp32 and not in float64
    bool exact = e->zero_q || e->q_factor > 1.0f || (e->odd <= 0.0f && e->even <= 0.0f);
    Reference r = reference(&p, true);
    double error = exact ? relative_error(p.out, r.out, p.q_size) : 0;
    double dv_error = exact ? gradient_error(&p, &r, p.dv, p.dv - p.dk) : 0;
    if (error > 2e-5 || dv_error > 2e-5) {
        print_error("%s, bias %d, scaled %d: out %g, dv %g\n", e->name, bias, scaled, error, dv_error);
        fail();
    }
    free_reference(&r);
    free_problem(&p);
}

static void test_extreme_logits(void** state) {
    (void)state;
    for (size_t i = 0; i < sizeof EXTREMES / sizeof *EXTREMES; i++) {
        check_extreme(&EXTREMES[i], BIAS_OUTSIDE, false, 1.0f);
        check_extreme(&EXTREMES[i], BIAS_OUTSIDE, true, 0.5f);
        check_extreme(&EXTREMES[i], BIAS_INSIDE, false, 1.0f);
        check_extreme(&EXTREMES[i], BIAS_INSIDE, true, 0.5f);
        check_extreme(&EXTREMES[i], BIAS_INSIDE, true, -0.5f);
    }
}

// BAM with theta_beta = 2 over 262,144 keys: logits down to -7e10, one query.
static void test_bias_over_a_long_context(void** state) {
    (void)state;
    enum { T = 262144, HS = 8 };
    Random random = random_stream(4, 4);
    float *q = random_array(HS, 1.0, &random), *k = random_array((size_t)T * HS, 1.0, &random);
    float *v = random_array((size_t)T * HS, 1.0, &random), *bias = xcalloc(T, sizeof(float)), out[HS], lse;
    double theta[3] = {0.0, 2.0, 0.0};
    for (size_t d = 0; d < T; d++) {
        bias[d] = posenc_bias(POS_BAM, theta, (PosencHead){0, 1, POSENC_DEFAULT_SETTINGS, NULL}, d);
    }
    AttentionInput in = {.size = {1, 1, T, 1, 1, HS, TERM_DISTANCE, 0, 0}};
    in.q = q, in.k = k, in.v = v, in.q_stride = in.kv_stride = HS, in.q_batch = HS, in.kv_batch = (size_t)T * HS;
    in.logit.by_distance = bias, in.logit.distance_stride = T, in.logit.inside = true;
    forward(out, &lse, &in);
    double want_lse, want[HS] = {0};
    AttentionCase c = reference_case(&in);
    AttentionReference to = {.out = want, .lse = &want_lse};
    attention_reference(&to, &c, NULL);
    assert_error_below(relative_error(out, want, HS), TOLERANCE);
    assert_error_below(fabs((double)lse - want_lse), 1e-6);
    free(q), free(k), free(v), free(bias);
}

// Large logits of both signs: the gradient recomputes the softmax where lse is too coarse.
static void test_gradients_where_lse_is_coarse(void** state) {
    (void)state;
    static const float levels[] = {-2048.0f, 90.0f, 4096.0f};
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++) {
        Problem p = make_problem((Shape){1, 150, 3, 3, 24, BIAS_OUTSIDE, false, true}, 70 + i);
        zero_queries(&p);  // logits of one level are exact, sums of order-1 scores with it are not
        fill(p.bias, p.shape.NH * p.in.logit.distance_stride, levels[i]);
        forward(p.out, p.lse, &p.in);
        backward(&p);
        Reference r = reference(&p, true);
        check_backward(&p, &r, TOLERANCE);
        free_reference(&r);
        free_problem(&p);
    }
}

// The softmax ignores a constant, so no part of it may reach the gradient of the scale as noise.
static void test_a_constant_bias_leaves_the_scale_alone(void** state) {
    (void)state;
    Problem p = make_problem((Shape){1, 150, 2, 1, 32, BIAS_INSIDE, true, true}, 80);
    zero_queries(&p);
    fill(p.bias, p.shape.NH * p.in.logit.distance_stride, -65536.0f);
    forward(p.out, p.lse, &p.in);
    backward(&p);
    for (size_t h = 0; h < 2; h++) { assert_error_below(fabs((double)p.dseq_scale[h]), 1e-9); }
    free_problem(&p);
}

// Documents of one token, also under a bias of 1e30 and with a scale of ln 1 = 0.
static void test_one_visible_key(void** state) {
    (void)state;
    static const float biases[] = {0.0f, 1e30f, -1e30f};
    for (int c = 0; c < 3 * BIAS_CASES * 2; c++) {
        Problem p = make_problem((Shape){1, 100, 2, 1, 48, c / 3 % BIAS_CASES, c / 9 == 1, true}, 21);
        for (size_t t = 0; t < 100; t++) { p.start[t] = (int)t, p.log_count[t] = 0.0f; }
        fill(p.bias, 2 * p.in.logit.distance_stride, biases[c % 3]);
        forward(p.out, p.lse, &p.in);
        backward(&p);
        assert_true(all_finite(p.lse, 200));
        for (size_t t = 0; t < 100; t++) {
            const float *value = p.qkv + t * p.in.kv_stride + p.dv, *gradient = p.dqkv + t * p.in.q_stride;
            for (size_t h = 0; h < 2; h++) { assert_memory_equal(p.out + (t * 2 + h) * 48, value, 48 * sizeof(float)); }
            for (size_t d = 0; d < p.dv; d++) { assert_true(gradient[d] == 0.0f); }
            for (size_t d = 0; d < 48; d++) {
                assert_true(gradient[p.dv + d] == p.dout[t * 96 + d] + p.dout[t * 96 + 48 + d]);
            }
        }
        for (size_t d = 0; d < 100 && attention_has(&p.in, TERM_DISTANCE); d++) {
            assert_true(p.dbias[d] == 0.0f && p.dbias[p.in.logit.distance_stride + d] == 0.0f);
        }
        assert_true(p.dseq_scale[0] == 0.0f && p.dseq_scale[1] == 0.0f);
        free_problem(&p);
    }
}

// A NaN must reach the loss, not vanish in a maximum.
static void test_nan_is_not_hidden(void** state) {
    (void)state;
    Problem p = make_problem((Shape){1, 100, 1, 1, 32, NO_BIAS, false, false}, 2);
    p.qkv[50 * p.in.kv_stride + p.dk + 7] = NAN;  // in a key
    forward(p.out, p.lse, &p.in);
    assert_true(all_finite(p.out, 48 * 32));
    for (size_t i = 50; i < 100; i++) { assert_true(isnan(p.out[i * 32]) && isnan(p.lse[i])); }
    free_problem(&p);
}

// ----------------------------------------------------------------------------
// finite differences

static void test_finite_differences(void** state) {
    (void)state;
    for (int c = 0; c < 4; c++) {
        int bias = c % 2 ? BIAS_OUTSIDE : BIAS_INSIDE;
        Problem p = make_problem((Shape){2, 23, 2, 1, 8, bias, c < 3, c != 1}, 40 + (uint64_t)c);
        forward(p.out, p.lse, &p.in);
        backward(&p);
        for (size_t h = 0; h < 2; h++) {
            for (size_t d = 0; d < 23; d++) {
                size_t at = h * p.in.logit.distance_stride + d;
                assert_error_below(fabs(finite_difference(&p, p.bias + at) - (double)p.dbias[at]), 1e-5);
            }
            double scale_gradient = finite_difference(&p, p.seq_scale + h);
            if (attention_has(&p.in, TERM_SCALE)) {
                assert_error_below(fabs(scale_gradient - (double)p.dseq_scale[h]), 1e-4);
            }
        }
        free_problem(&p);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_shapes, one_thread),
        cmocka_unit_test_setup(test_long_shapes, one_thread),
        cmocka_unit_test_setup(test_accumulates_and_optional_outputs, one_thread),
        cmocka_unit_test_setup(test_any_number_of_threads_gives_the_same_bits, one_thread),
        cmocka_unit_test_setup(test_chunks_equal_the_whole, one_thread),
        cmocka_unit_test_setup(test_workspace_grows_with_every_size, one_thread),
        cmocka_unit_test_setup(test_packed_documents_equal_separate_ones, one_thread),
        cmocka_unit_test_setup(test_nothing_leaks, one_thread),
        cmocka_unit_test_setup(test_zero_queries_leave_the_bias, one_thread),
        cmocka_unit_test_setup(test_extreme_logits, one_thread),
        cmocka_unit_test_setup(test_bias_over_a_long_context, one_thread),
        cmocka_unit_test_setup(test_gradients_where_lse_is_coarse, one_thread),
        cmocka_unit_test_setup(test_a_constant_bias_leaves_the_scale_alone, one_thread),
        cmocka_unit_test_setup(test_one_visible_key, one_thread),
        cmocka_unit_test_setup(test_nan_is_not_hidden, one_thread),
        cmocka_unit_test_setup(test_finite_differences, one_thread),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
