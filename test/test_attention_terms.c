/*
The terms of attention beside the table by distance and the row scale, and pairs of all of them drawn at random, against
the float64 reference, whose gradients are in turn compared with differences of its forward.
*/
#include "attention_util.h"

// mixes 0: no tables weighted by the query.
static void check_terms(Shape s, unsigned terms, float cap, size_t mixes, size_t mixed_length, uint64_t seed) {
    Problem p = make_problem(s, seed);
    add_terms(&p, terms, cap, seed);
    if (mixes) { add_mix(&p, mixes, mixed_length, seed); }
    forward(p.out, p.lse, &p.in);
    backward(&p);
    Reference r = reference(&p, true);
    if (relative_error(p.out, r.out, p.q_size) > TOLERANCE || gradient_error(&p, &r, 0, p.dv) > TOLERANCE) {
        print_shape(&s);
        print_error("terms %#x cap %g, %zu tables of %zu\n", p.in.size.terms, (double)cap, mixes, mixed_length);
    }
    check_forward(&p, &r, TOLERANCE);
    check_backward(&p, &r, TOLERANCE);
    check_added_terms(&p, &r, TOLERANCE);
    free_reference(&r);
    free_problem(&p);
}

static size_t drawn(Random* random, size_t n) { return (size_t)(random_uniform(random) * (double)n); }

static void test_random_terms(void** state) {
    (void)state;
    static const size_t lengths[] = {1, 7, 64, 77, 130, 200}, sizes[] = {8, 32, 40, 48, 64, 128},
                        kv_heads[] = {1, 2, 4};
    static const float caps[] = {1.5f, 4.0f, 50.0f};
    static const size_t mixes[] = {0, 0, 1, 5, 16}, mixed_lengths[] = {1, 9, 64, 100, 1000};
    Random random = random_stream(3, 3);
    for (uint64_t n = 0; n < 200; n++) {
        Shape s = {1 + drawn(&random, 2),       lengths[drawn(&random, 6)], 4,
                   kv_heads[drawn(&random, 3)], sizes[drawn(&random, 6)],   (int)drawn(&random, BIAS_CASES),
                   drawn(&random, 2) == 1,      drawn(&random, 2) == 1};
        unsigned terms = 0;
        for (unsigned term = TERM_CAP; term <= TERM_SINK; term <<= 1) { terms |= drawn(&random, 2) ? term : 0; }
        float cap = caps[drawn(&random, 3)];
        size_t tables = mixes[drawn(&random, 5)], length = mixed_lengths[drawn(&random, 5)];
        check_terms(s, terms, cap, tables, length, n);
    }
}

static void test_long_terms(void** state) {
    (void)state;
    check_terms((Shape){1, 600, 2, 1, 48, BIAS_INSIDE, true, false}, TERM_CAP | TERM_KEY | TERM_SINK, 1.5f, 0, 0, 1);
    check_terms((Shape){1, 1000, 2, 1, 48, BIAS_INSIDE, false, false}, TERM_CAP | TERM_KEY | TERM_SINK, 1.5f, 0, 0, 1);
    check_terms((Shape){1, 1000, 2, 2, 64, BIAS_OUTSIDE, true, true}, TERM_CAP, 50.0f, 0, 0, 2);
    check_terms((Shape){1, 1000, 2, 1, 48, BIAS_INSIDE, true, false}, 0, 0.0f, 16, 300, 3);
    check_terms((Shape){1, 1000, 2, 2, 64, NO_BIAS, false, false}, TERM_CAP | TERM_KEY, 1.5f, 16, 1024, 4);
    check_terms((Shape){1, 1000, 2, 2, 32, NO_BIAS, false, true}, TERM_SINK, 0.0f, 3, 40, 5);
}

static void test_any_number_of_threads_gives_the_same_bits(void** state) {
    (void)state;
    Problem one = make_problem((Shape){1, 300, 2, 1, 40, BIAS_INSIDE, true, true}, 5), many = one;
    add_terms(&one, TERM_CAP | TERM_KEY | TERM_SINK, 2.0f, 5);
    add_mix(&one, 7, 120, 5);
    forward(one.out, one.lse, &one.in);
    backward(&one);
    for (int threads = 2; threads <= 5; threads++) {
        set_threads(threads);
        many = make_problem(one.shape, 5);
        add_terms(&many, TERM_CAP | TERM_KEY | TERM_SINK, 2.0f, 5);
        add_mix(&many, 7, 120, 5);
        forward(many.out, many.lse, &many.in);
        backward(&many);
        assert_memory_equal(one.out, many.out, one.q_size * sizeof(float));
        assert_memory_equal(one.dqkv, many.dqkv, one.qkv_floats * sizeof(float));
        assert_memory_equal(one.dby_key, many.dby_key, 600 * sizeof(float));
        assert_memory_equal(one.dsink, many.dsink, 2 * sizeof(float));
        assert_memory_equal(one.dmix, many.dmix, one.mix_floats * sizeof(float));
        assert_memory_equal(one.dmixed, many.dmixed, one.mixed_floats * sizeof(float));
        assert_memory_equal(one.dseq_scale, many.dseq_scale, 2 * sizeof(float));
        free_problem(&many);
    }
    set_threads(1);
    free_problem(&one);
}

// Order: a bias of 20 under a cap of 1.5 must pass by the cap. Capping the sum instead would differ by far more than 1.
static void test_the_cap_acts_on_the_product_alone(void** state) {
    (void)state;
    Problem p = make_problem((Shape){1, 40, 2, 2, 32, BIAS_OUTSIDE, false, false}, 6);
    add_terms(&p, TERM_CAP, 1.5f, 6);
    for (size_t h = 0; h < 2; h++) {
        for (size_t d = 0; d < 40; d++) { p.bias[h * p.in.logit.distance_stride + d] = d % 2 ? 20.0f : 0.0f; }
    }
    forward(p.out, p.lse, &p.in);
    for (size_t n = 0; n < 80; n++) {  // with two keys or more, one of them is at distance 1
        if (n % 40 > 0) { assert_true(p.lse[n] > 18.0f); }
    }
    free_problem(&p);
}

// In the limit of a large cap nothing is capped; at 50 little is, which is why tests of 1.5 stand beside.
static void test_a_large_cap_changes_nothing(void** state) {
    (void)state;
    Problem p = make_problem((Shape){1, 90, 2, 1, 48, BIAS_INSIDE, true, false}, 7);
    forward(p.out, p.lse, &p.in);
    float* plain = xcalloc(p.q_size, sizeof(float));
    memcpy(plain, p.out, p.q_size * sizeof(float));
    add_terms(&p, TERM_CAP, 1e6f, 7);
    forward(p.out, p.lse, &p.in);
    for (size_t i = 0; i < p.q_size; i++) { assert_error_below(fabs((double)p.out[i] - (double)plain[i]), 1e-5); }
    p.in.logit.cap = 1.5f;
    forward(p.out, p.lse, &p.in);
    double largest = 0;
    for (size_t i = 0; i < p.q_size; i++) { largest = fmax(largest, fabs((double)p.out[i] - (double)plain[i])); }
    assert_true(largest > 0.05);
    free(plain);
    free_problem(&p);
}

// Queries at an offset, one by one and in chunks, are those of the whole sequence.
static void test_weighted_tables_at_an_offset(void** state) {
    (void)state;
    static const size_t chunks[] = {1, 7, 64, 130};
    Problem p = make_problem((Shape){1, 260, 4, 2, 48, BIAS_INSIDE, true, true}, 10);
    add_mix(&p, 16, 100, 10);
    Reference r = reference(&p, false);
    const size_t C = 4 * 48;
    float* out = xcalloc(p.q_size, sizeof(float));
    for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
        for (size_t first = 0; first < 260; first += chunks[c]) {
            AttentionInput in = p.in;
            in.size.Tk = first + chunks[c] < 260 ? first + chunks[c] : 260, in.size.Tq = in.size.Tk - first;
            in.q += first * in.q_stride, in.start += first, in.logit.log_count += first;
            in.logit.mix += first * in.logit.mix_stride;
            forward(out + first * C, NULL, &in);
        }
        assert_error_below(relative_error(out, r.out, p.q_size), TOLERANCE);
    }
    free(out);
    free_reference(&r);
    free_problem(&p);
}

// Numbers of tables that no distance reaches, and what stands in the gaps, are left alone.
static void test_weighted_tables_beyond_the_sequence(void** state) {
    (void)state;
    Problem p = make_problem((Shape){2, 50, 2, 1, 32, NO_BIAS, false, false}, 11);
    add_mix(&p, 5, 90, 11);
    fill(p.dmix, p.mix_floats, UNTOUCHED);
    for (size_t r = 0; r < 5; r++) { fill(p.mixed + r * 90 + 50, 40, INFINITY); }
    forward(p.out, p.lse, &p.in);
    backward(&p);
    for (size_t r = 0; r < 5; r++) {
        for (size_t d = 50; d < 90; d++) { assert_true(p.dmixed[r * 90 + d] == 0.0f); }
    }
    for (size_t n = 0; n < p.mix_floats; n++) {
        assert_true((p.dmix[n] == UNTOUCHED) == (n % p.in.logit.mix_stride >= p.in.logit.mix_stride - GAP));
    }
    for (size_t n = 0; n < p.q_size; n++) { assert_true(isfinite(p.out[n])); }
    free_problem(&p);
}

// The cheaper tanh: within 1e-4 of the cap's size.
static void test_the_approximate_cap(void** state) {
    (void)state;
    Problem p = make_problem((Shape){1, 90, 2, 1, 48, NO_BIAS, false, false}, 8);
    add_terms(&p, TERM_CAP, 1.5f, 8);
    p.in.logit.cap_approximate = true;
    forward(p.out, p.lse, &p.in);
    Reference r = reference(&p, false);
    double error = relative_error(p.out, r.out, p.q_size);
    assert_error_below(error, 2e-4);
    assert_true(error > 1e-7);  // another function indeed
    free_reference(&r);
    free_problem(&p);
}

// A sink far above or below all logits; beside it a single visible key is no constant.
static void test_extreme_sinks(void** state) {
    (void)state;
    static const float sinks[] = {-1e30f, -200.0f, 0.0f, 200.0f, 1e30f};
    for (size_t i = 0; i < sizeof sinks / sizeof *sinks; i++) {
        Problem p = make_problem((Shape){1, 70, 2, 1, 32, BIAS_OUTSIDE, true, true}, 9);
        add_terms(&p, TERM_SINK, 0.0f, 9);
        fill(p.sink, 2, sinks[i]);
        forward(p.out, p.lse, &p.in);
        backward(&p);
        Reference r = reference(&p, true);
        assert_error_below(sinks[i] > 100.0f ? fabs((double)p.out[5]) : relative_error(p.out, r.out, p.q_size),
                           TOLERANCE);
        for (size_t h = 0; h < 2; h++) { assert_error_below(fabs((double)p.dsink[h] - r.dsink[h]), 2e-5); }
        for (size_t n = 0; n < p.qkv_floats; n++) { assert_true(isfinite(p.dqkv[n])); }
        free_reference(&r);
        free_problem(&p);
    }
}

static void test_finite_differences(void** state) {
    (void)state;
    for (uint64_t c = 0; c < 4; c++) {
        Problem p = make_problem((Shape){2, 19, 2, 1, 8, c % 2 ? BIAS_OUTSIDE : BIAS_INSIDE, true, c < 2}, 60 + c);
        add_terms(&p, TERM_CAP | TERM_KEY | TERM_SINK, 1.5f, 60 + c);
        add_mix(&p, 3, 11, 60 + c);
        forward(p.out, p.lse, &p.in);
        backward(&p);
        for (size_t n = 0; n < 2 * 2 * 19; n += 3) {
            double* x = p.by_key + n / 19 * p.in.logit.key_stride + n % 19;
            assert_error_below(fabs(finite_difference_of_double(&p, x) - (double)p.dby_key[n]), 1e-5);
        }
        for (size_t h = 0; h < 2; h++) {
            assert_error_below(fabs(finite_difference(&p, p.sink + h) - (double)p.dsink[h]), 1e-5);
            assert_error_below(fabs(finite_difference(&p, p.seq_scale + h) - (double)p.dseq_scale[h]), 3e-4);
        }
        for (size_t n = 0; n < p.mix_floats; n += 5) {
            if (n % p.in.logit.mix_stride >= p.in.logit.mix_stride - GAP) { continue; }
            assert_error_below(fabs(finite_difference(&p, p.mix + n) - (double)p.dmix[n]), 1e-5);
        }
        for (size_t n = 0; n < p.mixed_floats; n += 2) {
            assert_error_below(fabs(finite_difference(&p, p.mixed + n) - (double)p.dmixed[n]), 1e-5);
        }
        for (size_t n = 0; n < p.qkv_floats; n += 37) {
            if (n % p.in.q_stride >= p.in.q_stride - GAP) { continue; }
            assert_error_below(fabs(finite_difference(&p, p.qkv + n) - (double)p.dqkv[n]), 1e-5);
        }
        free_problem(&p);
    }
}

// Numbers by key as forgetting attention has them at 262,144 tokens and more: cumulative sums whose differences matter
// where they are small. fp32 sums would be off by 2^-7 and 2^-4 there.
static void test_large_numbers_by_key(void** state) {
    (void)state;
    static const double first[] = {0.0, 180000.0, -2e6};
    for (size_t i = 0; i < 3; i++) {
        for (unsigned terms = TERM_KEY; terms <= (TERM_KEY | TERM_SINK); terms += TERM_SINK) {
            Problem p = make_problem((Shape){1, 300, 2, 1, 32, BIAS_INSIDE, true, false}, 11);
            add_terms(&p, terms, 0.0f, 11);
            Random random = random_stream(11, i);
            for (size_t h = 0; h < 2; h++) {
                p.seq_scale[h] = 0.3f;
            }  // less than 0 would make the farthest keys the heaviest
            for (size_t h = 0; h < 2; h++) {
                double sum = first[i];
                for (size_t t = 0; t < 300; t++) {
                    p.by_key[h * p.in.logit.key_stride + t] = sum += 0.4 * random_uniform(&random);
                }
            }
            forward(p.out, p.lse, &p.in);
            backward(&p);
            Reference r = reference(&p, true);
            check_forward(&p, &r, TOLERANCE);
            check_backward(&p, &r, TOLERANCE);
            check_added_terms(&p, &r, TOLERANCE);
            free_reference(&r);
            free_problem(&p);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_random_terms, one_thread),
        cmocka_unit_test_setup(test_long_terms, one_thread),
        cmocka_unit_test_setup(test_any_number_of_threads_gives_the_same_bits, one_thread),
        cmocka_unit_test_setup(test_the_cap_acts_on_the_product_alone, one_thread),
        cmocka_unit_test_setup(test_a_large_cap_changes_nothing, one_thread),
        cmocka_unit_test_setup(test_weighted_tables_at_an_offset, one_thread),
        cmocka_unit_test_setup(test_weighted_tables_beyond_the_sequence, one_thread),
        cmocka_unit_test_setup(test_the_approximate_cap, one_thread),
        cmocka_unit_test_setup(test_extreme_sinks, one_thread),
        cmocka_unit_test_setup(test_finite_differences, one_thread),
        cmocka_unit_test_setup(test_large_numbers_by_key, one_thread),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
