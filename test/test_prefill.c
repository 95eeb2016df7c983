/*
Reading beyond the training length, in this process: the reader against the plain forward for all encodings, what
it reads again and what not, its memory, and perplexity by position against sums made here.
*/
#include "evaluate_util.h"

#include "../llmc/eval/perplexity.h"
#include "../llmc/eval/prefill.h"

// ----------------------------------------------------------------------------
// the reader

enum { V = BYTES_VOCAB, LENGTH = 200, CHUNK = 48, LEARNED_ROWS = 150 };

static Model random_model(const char* encoding, size_t chunk, size_t context) {
    ModelConfig c;
    memset(&c, 0, sizeof c);
    c.V = V, c.C = 32, c.L = 2, c.NH = 4, c.NKV = 2, c.F = 64, c.bos = BYTES_BOS;
    assert_true(posenc_parse(encoding, &c.encoding, &c.ssmax));
    c.options = model_default_options(), c.options.learned_length = LEARNED_ROWS;
    c.posenc = posenc_default_options();
    for (int t = 0; t < POSENC_TENSOR_COUNT; t++) { c.posenc.init[t] = "sampled"; }
    c.posenc.init[POSENC_theta_mu] = "0";
    model_config_check(&c);
    Model model;
    ModelPlan plan = {MODE_INFERENCE, 1, chunk, 1, context, 0, 1};
    model_plan(&model, &c, &plan);
    model_allocate(&model);
    model_init(&model, 3);
    return model;
}

// Encoding e of the list, without Scalable-Softmax or with it.
static const char* encoding_name(size_t e) {
    static char name[64];
    snprintf(name, sizeof name, "%s%s", posenc_info((PosKind)(e / 2))->name, e % 2 ? "_ssmax" : "");
    return name;
}

// Two sequences that part at `branch`, with documents that begin before and behind it.
static void make_sequences(int* a, int* b, size_t branch) {
    Random r = random_stream(4, branch);
    for (size_t i = 0; i < LENGTH; i++) {
        a[i] = i % 61 == 20 ? BYTES_BOS : (int)random_below(&r, 256);
        b[i] = i < branch ? a[i] : i % 53 == 0 ? BYTES_BOS : (int)random_below(&r, 256);
    }
    b[branch] = a[branch] == 7 ? 8 : 7;
}

static void assert_close(const float* got, const float* want, size_t n) {
    double* wide = (double*)xcalloc(n, sizeof(double));
    for (size_t i = 0; i < n; i++) { wide[i] = want[i]; }
    assert_error_below(relative_error(got, wide, n), 3e-6);  // products of few and of many rows are summed differently
    free(wide);
}

// Losses in chunks, and the logits after the end when the cache already holds the beginning, are those of one forward.
static void test_reader_equals_forward(void** state) {
    (void)state;
    static const size_t branches[] = {1, 20, 21, 100, 150, LENGTH - 1};
    int a[LENGTH], b[LENGTH], prediction;
    float losses[LENGTH], want[LENGTH], logits[V];
    for (size_t e = 0; e < 2 * POS_COUNT; e++) {
        Model chunked = random_model(encoding_name(e), CHUNK, LENGTH),
              whole = random_model(encoding_name(e), LENGTH, LENGTH);
        Prefill p = prefill_open(&chunked, LENGTH);
        for (size_t k = 0; k < sizeof branches / sizeof *branches; k++) {
            make_sequences(a, b, branches[k]);
            assert_true(prefill_losses(&p, a, LENGTH, losses));
            assert_int_equal(p.cache.length, LENGTH - 1);  // the last token is only a target
            model_forward(&whole, a, 1, LENGTH - 1);
            model_losses(&whole, a + 1, 0);
            copy_to_host(want, model_activations(&whole, 0).losses, (LENGTH - 1) * sizeof(float));
            assert_close(losses, want, LENGTH - 1);
            assert_true(prefill_predict(&p, b, LENGTH, LENGTH - 1, &prediction));
            model_forward(&whole, b, 1, LENGTH);
            model_logits(&whole, logits, LENGTH - 1);
            assert_close(p.logits, logits, V);
            assert_int_equal(prediction, most_probable_token(p.logits, V));
        }
        prefill_close(&p);
        model_free(&chunked);
        model_free(&whole);
    }
}

// Interpolated positions: a sequence of another length reads other rows, and so it gives other losses; in chunks those
// of one forward pass of that length alone.
static void test_interpolated_positions(void** state) {
    (void)state;
    static const size_t lengths[] = {LENGTH, 170, LEARNED_ROWS, 40, LENGTH};
    int a[LENGTH], b[LENGTH];
    float losses[LENGTH], want[LENGTH];
    make_sequences(a, b, 100);
    Model chunked = random_model("learned", CHUNK, LENGTH);
    chunked.config.learned_interpolated = true, chunked.tables_stale = true;
    Prefill p = prefill_open(&chunked, LENGTH);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        const size_t n = lengths[i];
        model_read_length(&chunked, n), p.cache.length = 0;
        assert_true(prefill_losses(&p, a, n, losses));
        Model whole = random_model("learned", n, n);
        whole.config.learned_interpolated = true, whole.tables_stale = true;
        model_forward(&whole, a, 1, n - 1);
        model_losses(&whole, a + 1, 0);
        copy_to_host(want, model_activations(&whole, 0).losses, (n - 1) * sizeof(float));
        assert_close(losses, want, n - 1);
        model_free(&whole);
    }
    prefill_close(&p);
    model_free(&chunked);
}

typedef struct {
    double flops;
    size_t chunks, stop_after;
} Listener;

static bool listen(void* context, double flops) {
    Listener* l = (Listener*)context;
    l->flops += flops;
    return ++l->chunks != l->stop_after;
}

// Only what is new is read, only rows that are asked for go through the head, and a listener can stop the reading.
static void test_reader_work(void** state) {
    (void)state;
    int a[LENGTH], b[LENGTH], predictions[3], again[3];
    Listener listener = {0, 0, 0};
    Model model = random_model("bam_ssmax", CHUNK, LENGTH);
    const ModelConfig* c = &model.config;
    Prefill p = prefill_open(&model, LENGTH);
    p.on_chunk = listen, p.context = &listener;
    make_sequences(a, b, 100);
    assert_true(prefill_predict(&p, a, LENGTH, LENGTH - 3, predictions));
    assert_int_equal(listener.chunks, 5);
    double all = prefill_flops(c, 0, LENGTH) + head_flops(c, 3);
    assert_error_below(fabs(listener.flops / all - 1), 1e-12);
    listener.flops = 0;
    assert_true(prefill_predict(&p, b, LENGTH, LENGTH - 1, predictions + 2));
    double rest = prefill_flops(c, 100, LENGTH - 100) + head_flops(c, 1);
    assert_error_below(fabs(listener.flops / rest - 1), 1e-12);
    // weights of a product: L (2 C^2 + 2 C NKV HS + 3 C F); visible keys: 1 + 2 + .. + LENGTH, of C operations times 4
    double weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64), keys = LENGTH * (LENGTH + 1) / 2;
    assert_true(prefill_flops(c, 0, LENGTH) == 2 * weights * LENGTH + 2 * 4 * 32 * keys);
    assert_true(prefill_predict(&p, a, LENGTH, LENGTH - 3, predictions));
    assert_true(prefill_predict(&p, a, LENGTH, LENGTH - 3, again));
    assert_memory_equal(predictions, again, sizeof again);
    listener.stop_after = listener.chunks + 2;
    assert_false(prefill_predict(&p, b, LENGTH, LENGTH - 1, predictions));
    prefill_close(&p);
    model_free(&model);
}

static void test_memory_of_70000_tokens(void** state) {
    (void)state;
    enum { CONTEXT = 70000 };
    ModelConfig c;
    memset(&c, 0, sizeof c);
    const ModelSize* l2 = model_size_find("l2");
    c.V = 32768, c.C = l2->C, c.L = l2->L, c.NH = c.NKV = l2->NH, c.F = 2 * l2->C;
    c.options = model_default_options();
    c.posenc = posenc_default_options();
    posenc_parse("bam_ssmax", &c.encoding, &c.ssmax);
    model_config_check(&c);
    Model model;
    ModelPlan plan = {MODE_INFERENCE, 1, 1024, 1, CONTEXT, 0, 1};
    ModelMemory memory = model_plan(&model, &c, &plan);
    size_t bytes = model_memory_total(&memory) + kv_cache_bytes(&c, CONTEXT);
    assert_true(bytes < (size_t)1 << 30);  // logits of all rows alone would be 9 GB
    free(model.tensors), free(model.segments);
}

// ----------------------------------------------------------------------------
// perplexity

static TokenStream open_stream(const char* name) {
    ExpectedTokens expected = {V, bytes_info.tokenizer_hash, BYTES_BOS, BYTES_EOS, "test"};
    char* path = text("%s/data/%s", scratch, name);
    TokenStream s = token_stream_open(path, &expected);
    free(path);
    return s;
}

// A model whose output weights are 0 gives every token 1/V.
static void test_uniform_model(void** state) {
    (void)state;
    PerplexitySettings s = {64, 16, 1000, 100, false};
    TokenStream stream = open_stream("articles");
    Perplexity p = perplexity_open(&stream, &s, "articles");
    Model model = random_model("alibi", 24, 64);
    device_zero(model.master + model_find_tensor(&model, "output.weight")->offset, V * model.config.C * sizeof(float));
    model_parameters_changed(&model);
    Prefill reader = prefill_open(&model, 64);
    int ids[65];
    float losses[64];
    while (p.done < p.count) {
        perplexity_row(&p, ids, p.done);
        assert_int_equal(ids[0], BYTES_BOS);
        assert_true(prefill_losses(&reader, ids, 65, losses));
        perplexity_add(&p, losses);
    }
    assert_true(p.count > 1);
    for (size_t w = 0; w < 4; w++) {
        WindowPerplexity x = perplexity_window(&p, w);
        assert_error_below(fabs(x.perplexity / V - 1), 1e-6);
        assert_error_below(x.standard_error, 1e-6 * V);
    }
    assert_error_below(fabs(perplexity_overall(&p) / V - 1), 1e-6);
    prefill_close(&reader);
    model_free(&model);
    perplexity_close(&p);
    token_stream_close(&stream);
}

static void test_rows(void** state) {
    (void)state;
    enum { SEQ = 64 };
    TokenStream stream = open_stream("articles");
    size_t total = token_stream_count(&stream), begin = 0, row = 0, n = 0;
    int *all = (int*)xcalloc(total, sizeof(int)), *kept = (int*)xcalloc(total, sizeof(int)), ids[SEQ + 1];
    token_stream_read(&stream, all, 0, total);
    PerplexitySettings s = {SEQ, 32, 1000, 3, false};
    Perplexity p = perplexity_open(&stream, &s, "articles");
    assert_int_equal(p.count, 3);  // of four that are long enough
    for (size_t d = 0; d < ARTICLES && row < 3; begin += article_lengths[d++]) {
        if (article_lengths[d] < SEQ + 2) { continue; }
        perplexity_row(&p, ids, row++);
        assert_memory_equal(ids, all + begin, sizeof ids);
    }
    perplexity_close(&p);
    s.joined = true;
    for (size_t i = 0; i < total; i++) {  // the row that the last of i + 1 tokens completes
        if (all[i] == BYTES_BOS || all[i] == BYTES_EOS) { continue; }
        kept[n++] = all[i];
        if (n % (SEQ + 1) != 0) { continue; }
        s.ntokens = i;
        p = perplexity_open(&stream, &s, "articles");
        assert_int_equal(p.count, n / (SEQ + 1));
        perplexity_row(&p, ids, p.count - 1);
        assert_memory_equal(ids, kept + n - (SEQ + 1), sizeof ids);
        perplexity_close(&p);
    }
    assert_true(n > 2 * (SEQ + 1));
    free(all);
    free(kept);
    token_stream_close(&stream);
}

static void test_windows(void** state) {
    (void)state;
    enum { ROWS = 3, WINDOWS = 2, WINDOW = 4 };
    double losses[ROWS][WINDOWS];
    Perplexity p;
    memset(&p, 0, sizeof p);
    p.settings.seq_len = WINDOWS * WINDOW, p.settings.window = WINDOW;
    p.windows = WINDOWS, p.count = ROWS, p.losses = &losses[0][0];
    double sum[WINDOWS] = {0}, square[WINDOWS] = {0};
    for (size_t r = 0; r < ROWS; r++) {
        float row[WINDOWS * WINDOW];
        for (size_t i = 0; i < WINDOWS * WINDOW; i++) { row[i] = (float)(0.5 + 0.25 * (double)(i * (r + 1) % 7)); }
        perplexity_add(&p, row);
        for (size_t w = 0; w < WINDOWS; w++) {
            double mean = (row[4 * w] + row[4 * w + 1] + row[4 * w + 2] + row[4 * w + 3]) / 4.0;
            sum[w] += mean, square[w] += mean * mean;
        }
    }
    for (size_t w = 0; w < WINDOWS; w++) {
        double mean = sum[w] / ROWS, variance = (square[w] - ROWS * mean * mean) / (ROWS - 1);
        WindowPerplexity x = perplexity_window(&p, w);
        assert_error_below(fabs(x.perplexity / exp(mean) - 1), 1e-12);
        assert_error_below(fabs(x.standard_error / (exp(mean) * sqrt(variance / ROWS)) - 1), 1e-9);
    }
    assert_error_below(fabs(perplexity_overall(&p) / exp((sum[0] + sum[1]) / (ROWS * WINDOWS)) - 1), 1e-12);
    cJSON* json = perplexity_losses_json(&p);
    double before[ROWS][WINDOWS];
    memcpy(before, losses, sizeof losses);
    memset(losses, 0, sizeof losses);
    perplexity_restore(&p, json);
    assert_int_equal(p.done, ROWS);
    assert_memory_equal(losses, before, sizeof losses);
    cJSON_Delete(json);
}

int main(void) {
    backend_init("cpu", "float32");
    scratch_create();
    make_documents("articles", article_lengths, ARTICLES);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reader_equals_forward),
        cmocka_unit_test(test_interpolated_positions),
        cmocka_unit_test(test_reader_work),
        cmocka_unit_test(test_memory_of_70000_tokens),
        cmocka_unit_test(test_uniform_model),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_windows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
