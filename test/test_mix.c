/*
The encoding mix in the programs: what a run folder holds of it, going on from checkpoints and from other weights, the
evaluator beyond the tables and through its cache, and what is refused. Its mathematics is tested in
test_attention_terms.c and, with whole models, in test_model.c.
*/
#include "evaluate_util.h"

#define TRAIN                                                                                              \
    "--dataset letters --tokens_per_step 64 --num_iterations 4 --checkpoint_every 1 --keep_checkpoints 9 " \
    "--prior_lr 0.01 "
#define STILL TRAIN "--learning_rate 1e-30 --prior_lr 0 --num_iterations 1 "

static const struct {
    const char *label, *encoding, *flags;
    size_t heads, rank, length;
} runs[] = {
    {"plain", "mix", "", 2, 16, 1024},
    {"short", "mix_ssmax", "--mix_rank 4 --mix_length 5 --n_kv_heads 1 --recompute 1", 2, 4, 5},
    {"outside", "mix_ssmax", "--mix_rank 12 --mix_length 40 --ssmax_prior outside --optimizer adamw", 2, 12, 40},
};
enum { RUNS = sizeof runs / sizeof *runs };

static char* run_of(size_t i, const char* file) { return run_file(runs[i].label, runs[i].encoding, file); }

static void check_tensor(const SafeTensors* trained, const SafeTensors* initial, const char* name, size_t rows,
                         size_t cols) {
    const SafeTensor *t = safetensors_find(trained, name), *u = safetensors_find(initial, name);
    assert_true(t && u);
    assert_true(t->ndim == 2 && t->shape[0] == rows && t->shape[1] == cols);
    // both from the first step on: neither gradient waits for the other to become something
    assert_true(tensor_distance(t, u, 1e-6) > 1e-6);
}

static void test_tensors_of_a_run(void** state) {
    (void)state;
    for (size_t i = 0; i < RUNS; i++) {
        char *flags = text(TRAIN "--position_encoding %s %s", runs[i].encoding, runs[i].flags),
             *still = text(STILL "--position_encoding %s %s", runs[i].encoding, runs[i].flags),
             *log = text("still_%s", runs[i].label);
        train_tiny_quietly(runs[i].label, flags);
        train_tiny_quietly(log, still);
        char *first = run_of(i, "checkpoints/step_000000001/model.safetensors"),
             *initial = run_file(log, runs[i].encoding, "model.safetensors"), *folder = run_of(i, "args.json");
        SafeTensors a = safetensors_open(first), b = safetensors_open(initial);
        for (int layer = 0; layer < 2; layer++) {
            char *weights = text("layers.%d.attention.w_mix.weight", layer),
                 *tables = text("layers.%d.attention.mixed", layer);
            check_tensor(&a, &b, weights, runs[i].heads * runs[i].rank, 32);
            check_tensor(&a, &b, tables, runs[i].rank, runs[i].length);
            free(weights), free(tables);
        }
        safetensors_close(&a), safetensors_close(&b);
        cJSON *json = read_json(folder), *model = cJSON_GetObjectItem(json, "model_args");
        assert_int_equal(cJSON_GetObjectItem(model, "mix_rank")->valueint, runs[i].rank);
        assert_int_equal(cJSON_GetObjectItem(model, "mix_length")->valueint, runs[i].length);
        cJSON_Delete(json);
        free(flags), free(still), free(log), free(first), free(initial), free(folder);
    }
}

static void test_resume(void** state) {
    (void)state;
    for (size_t i = 0; i < RUNS; i++) {
        char* whole = run_of(i, "");
        check_resumed(whole, 2);
        free(whole);
    }
}

static void test_recompute_changes_no_bit(void** state) {
    (void)state;
    train_tiny_quietly("again", TRAIN "--position_encoding mix --recompute 1");
    char *kept = run_of(0, "model.safetensors"), *again = run_file("again", "mix", "model.safetensors");
    assert_true(weights_distance(kept, again) == 0);
    free(kept), free(again);
}

static void test_bfloat16(void** state) {
    (void)state;
    if (!has_bfloat16()) { skip(); }
    train_tiny_quietly("bf16", TRAIN "--position_encoding mix --dtype bfloat16");
    double want[4], got[4];
    assert_int_equal(losses_of("plain", "mix", want, 4), 4);
    assert_int_equal(losses_of("bf16", "mix", got, 4), 4);
    for (size_t i = 0; i < 4; i++) { assert_error_below(fabs(got[i] - want[i]), 2e-2); }
}

// Weights of a model without tables go on with them; what it lacks is drawn.
static void test_init_from(void** state) {
    (void)state;
    train_tiny_quietly("nope", TRAIN "--position_encoding nope");
    char* nope = run_file("nope", "nope", "model.safetensors");
    char* flags = text(STILL " --init_from %s --position_encoding mix", nope);
    train_tiny_quietly("from_nope", flags);
    char* mix = run_file("from_nope", "mix", "model.safetensors");
    SafeTensors from = safetensors_open(nope), to = safetensors_open(mix);
    for (size_t i = 0; i < from.count; i++) {
        const SafeTensor* t = &from.tensors[i];
        assert_true(tensor_distance(t, safetensors_find(&to, t->name), 1e-3) < 1e-12);
    }
    assert_non_null(safetensors_find(&to, "layers.1.attention.mixed"));
    safetensors_close(&from), safetensors_close(&to);
    free(nope), free(flags), free(mix);
}

// Losses do not depend on the chunks in which the cache is filled, also beyond the tables' end.
static void test_evaluate_in_chunks(void** state) {
    (void)state;
    static const char* const chunks[] = {"64", "7", "1"};
    for (size_t i = 0; i < RUNS; i++) {
        char* folder = run_of(i, "");
        double mean[3];
        for (size_t k = 0; k < 3; k++) {
            char* flags = text("--passkey_sample_size 0 --force --seq_batch_size %s" ARTICLES_FLAGS, chunks[k]);
            evaluate_quietly(folder, flags);
            cJSON* results = results_of(folder);
            mean[k] = cJSON_GetObjectItem(cJSON_GetObjectItem(results, "perplexity")->child, "mean")->valuedouble;
            assert_error_below(fabs(mean[k] / mean[0] - 1), 2e-6);  // products of few and of many rows
            cJSON_Delete(results);
            free(flags);
        }
        evaluate_quietly(folder, "--passkey_seq_lens 300,1200 --passkey_sample_size 1");
        free(folder);
    }
}

static void test_refused(void** state) {
    (void)state;
    static const struct {
        const char *flags, *words;
    } cases[] = {
        {"--position_encoding mix --mix_rank 17", "--mix_rank: found '17'|from 1 to 16"},
        {"--position_encoding mix --mix_length 0", "--mix_length: found '0'|from 1 to 262144"},
        {"--position_encoding mix --mix_rank 3", "--mix_rank 3 of --n_heads 2: 6 weights|a multiple of 8"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *some = text(TRAIN "%s", cases[i].flags), *flags = tiny_flags("refused", some);
        Run r = run_train(flags);
        assert_refused(&r, cases[i].words);
        run_free(&r);
        free(some), free(flags);
    }
    char *folder = run_of(1, ""), *same = resume_flags(folder),
         *flags = text("%s --num_iterations 9 --mix_length 6", same);
    Run r = run_train(flags);
    assert_refused(&r, "model has mix_length = 5, the flags ask for 6|--checkpoint_args");
    run_free(&r);
    free(folder), free(same), free(flags);
}

static int prepare(void** state) {
    (void)state;
    scratch_create();
    make_documents("articles", article_lengths, ARTICLES);
    size_t lengths[200];
    for (size_t i = 0; i < 200; i++) { lengths[i] = 20 + i % 50; }
    make_documents("letters", lengths, 200);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tensors_of_a_run),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_recompute_changes_no_bit),
        cmocka_unit_test(test_bfloat16),
        cmocka_unit_test(test_init_from),
        cmocka_unit_test(test_evaluate_in_chunks),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, prepare, NULL);
}
