/*
embedding.c: forward exact, gradient against float64 and bit for bit in the order of the rows whatever the
thread count, document starts against their definition.
*/
#include "test_util.h"

#include "../llmc/backend.h"

static int* random_tokens(size_t n, size_t V, Random* r) {
    int* tokens = xcalloc(n, sizeof(int));
    for (size_t i = 0; i < n; i++) { tokens[i] = (int)random_below(r, V); }
    return tokens;
}

typedef struct {
    size_t B, T, C, V;
} Shape;

static const Shape shapes[] = {{1, 1, 1, 1}, {1, 7, 3, 5}, {3, 5, 33, 2}, {2, 64, 24, 300}, {4, 129, 48, 17}};

static void test_forward(void** state) {
    (void)state;
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
        Shape s = shapes[k];
        Random r = random_stream(1, k);
        size_t N = s.B * s.T;
        int* tokens = random_tokens(N, s.V, &r);
        float *wte = random_array(s.V * s.C, 1.0, &r), *position = random_array(s.T * s.C, 1.0, &r);
        float* out = random_array(N * s.C, 1.0, &r);
        for (int with_position = 0; with_position < 2; with_position++) {
            embedding_forward(out, tokens, wte, with_position ? position : NULL, s.B, s.T, s.C);
            for (size_t b = 0; b < s.B; b++) {
                for (size_t t = 0; t < s.T; t++) {
                    for (size_t c = 0; c < s.C; c++) {
                        double want = wte[(size_t)tokens[b * s.T + t] * s.C + c];
                        if (with_position) { want += position[t * s.C + c]; }
                        assert_true(out[(b * s.T + t) * s.C + c] == (float)want);  // one addition: exact
                    }
                }
            }
        }
        free(tokens), free(wte), free(position), free(out);
    }
}

// The workspace is exactly as large as promised, so that a sanitizer sees any step outside.
static void run_backward(float* dwte, const float* dout, const int* tokens, size_t N, size_t C, size_t V) {
    void* workspace = xcalloc(embedding_workspace(N, V), 1);
    memset(workspace, 0xA5, embedding_workspace(N, V));
    embedding_backward(dwte, dout, tokens, workspace, N, C, V);
    free(workspace);
}

static void test_backward(void** state) {
    (void)state;
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
        Shape s = shapes[k];
        Random r = random_stream(2, k);
        size_t N = s.B * s.T, n_weights = s.V * s.C;
        int* tokens = random_tokens(N, s.V, &r);
        float *dout = random_array(N * s.C, 1.0, &r), *before = random_array(n_weights, 1.0, &r);
        float *in_order = xcalloc(n_weights, sizeof(float)), *got = xcalloc(n_weights, sizeof(float));
        double* want = xcalloc(n_weights, sizeof(double));
        for (size_t i = 0; i < n_weights; i++) { want[i] = in_order[i] = before[i]; }
        for (size_t n = 0; n < N; n++) {
            for (size_t c = 0; c < s.C; c++) {
                want[(size_t)tokens[n] * s.C + c] += dout[n * s.C + c];
                in_order[(size_t)tokens[n] * s.C + c] += dout[n * s.C + c];
            }
        }
        for (int threads = 1; threads <= 3; threads++) {
            set_threads(threads);
            memcpy(got, before, n_weights * sizeof(float));
            run_backward(got, dout, tokens, N, s.C, s.V);
            assert_memory_equal(got, in_order, n_weights * sizeof(float));
        }
        assert_error_below(relative_error(got, want, n_weights), 2e-6);  // up to 270 rows added in fp32
        free(tokens), free(dout), free(before), free(in_order), free(got), free(want);
    }
}

// Many rows of few tokens in a large vocabulary: what real text looks like.
static void test_backward_duplicates(void** state) {
    (void)state;
    enum { N = 3000, C = 16, V = 20000 };
    Random r = random_stream(3, 0);
    int* tokens = xcalloc(N, sizeof(int));
    for (size_t n = 0; n < N; n++) {
        double u = random_uniform(&r);
        tokens[n] = n % 3 == 0 ? 1 : (int)(V * u * u * u * u);
    }
    tokens[N - 1] = V - 1;
    float *dout = random_array((size_t)N * C, 1.0, &r), *want = xcalloc((size_t)V * C, sizeof(float));
    for (size_t n = 0; n < N; n++) {
        for (size_t c = 0; c < C; c++) { want[(size_t)tokens[n] * C + c] += dout[n * C + c]; }
    }
    for (int threads = 1; threads <= 3; threads++) {
        set_threads(threads);
        float* got = xcalloc((size_t)V * C, sizeof(float));
        run_backward(got, dout, tokens, N, C, V);
        assert_memory_equal(got, want, (size_t)V * C * sizeof(float));
        free(got);
    }
    free(tokens), free(dout), free(want);
}

static void check_starts(const int* tokens, const int* want, int bos, size_t B, size_t T) {
    int* start = xcalloc(B * T, sizeof(int));
    float* log_count = xcalloc(B * T, sizeof(float));
    memset(start, 0xA5, B * T * sizeof(int));
    document_starts(start, log_count, tokens, bos, 0, 0, B, T);
    for (size_t n = 0; n < B * T; n++) {
        assert_int_equal(start[n], want[n]);
        assert_true(log_count[n] == (float)log((double)((int)(n % T) - want[n] + 1)));
    }
    free(start), free(log_count);
}

static void test_document_starts(void** state) {
    (void)state;
    const int tokens[2][6] = {{1, 5, 1, 1, 7, 0}, {9, 9, 1, 9, 9, 1}};
    const int bos1[2][6] = {{0, 0, 2, 3, 3, 3}, {0, 0, 2, 2, 2, 5}};
    const int bos0[2][6] = {{0, 0, 0, 0, 0, 5}, {0, 0, 0, 0, 0, 0}};
    const int whole[2][6] = {{0}};
    check_starts(*tokens, *bos1, 1, 2, 6);
    check_starts(*tokens, *bos0, 0, 2, 6);
    check_starts(*tokens, *whole, -1, 2, 6);
    check_starts(*tokens, *whole, 1, 12, 1);

    enum { B = 3, T = 257 };
    Random r = random_stream(4, 0);
    int *random = random_tokens(B * T, 20, &r), *want = xcalloc(B * T, sizeof(int));
    for (size_t b = 0; b < B; b++) {
        for (int t = 0; t < T; t++) {
            int j = t;
            while (j > 0 && random[b * T + (size_t)j] != 3) { j--; }
            want[b * T + (size_t)t] = j;
        }
    }
    check_starts(random, want, 3, B, T);
    free(random), free(want);
}

// A sequence that comes in pieces, as through a cache, has the starts and counts of the whole.
static void test_document_starts_in_pieces(void** state) {
    (void)state;
    enum { T = 64, CHUNK = 7 };
    Random r = random_stream(5, 0);
    int *tokens = random_tokens(T, 12, &r), whole[T], piece[CHUNK], first_start = 0;
    float whole_count[T], piece_count[CHUNK];
    document_starts(whole, whole_count, tokens, 3, 0, 0, 1, T);
    for (size_t at = 0; at < T; at += CHUNK) {
        size_t n = T - at < CHUNK ? T - at : CHUNK;
        document_starts(piece, piece_count, tokens + at, 3, at, first_start, 1, n);
        assert_memory_equal(piece, whole + at, n * sizeof(int));
        assert_memory_equal(piece_count, whole_count + at, n * sizeof(float));
        first_start = piece[n - 1];
    }
    free(tokens);
}

// Windows and scales by the number of visible keys, counted one by one, in batches and where a cached sequence goes on.
static void test_limit_rows(void** state) {
    (void)state;
    enum { T = 60 };
    static const RowRule rules[] = {{1, 0, 0}, {7, 0, 0}, {59, 0, 0}, {60, 0, 0}, {0, 4, 0.5}, {9, 2.5, 0.3}};
    for (size_t i = 0; i < sizeof rules / sizeof *rules * 2; i++) {
        const RowRule rule = rules[i / 2];
        const size_t position = i % 2 ? 1000 : 0;
        int start[2 * T], before[2 * T];
        float count[2 * T] = {0};
        for (size_t n = 0; n < 2 * T; n++) { before[n] = start[n] = n % T < 20 ? 0 : (int)(position + 20); }
        limit_rows(start, count, rule, position, 2, T);
        for (size_t n = 0; n < 2 * T; n++) {
            size_t at = position + n % T, keys = 0;
            for (size_t j = (size_t)before[n]; j <= at; j++) {
                bool visible = rule.window == 0 || at - j < rule.window;
                assert_true(visible == ((int)j >= start[n]));
                keys += visible;
            }
            double more = keys > rule.from ? log((double)keys / rule.from) : 0;
            double want = rule.from == 0 ? log((double)keys) : 1 + rule.slope * more;
            assert_error_below(fabs(count[n] - want), 1e-6);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),
        cmocka_unit_test(test_backward),
        cmocka_unit_test(test_backward_duplicates),
        cmocka_unit_test(test_document_starts),
        cmocka_unit_test(test_document_starts_in_pieces),
        cmocka_unit_test(test_limit_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
