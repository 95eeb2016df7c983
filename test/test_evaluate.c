/*
The program evaluate on a run of the real train_gpt: results.json, going on after an interruption, scores of every
token, several evaluations at once, weights that change. What it refuses is in test_evaluate_refuses.c.
*/
#include "evaluate_util.h"

#include "../llmc/eval/results.h"

// ----------------------------------------------------------------------------
// the program

#define PASSKEY_FLAGS "--passkey_seq_lens 0,1,242,500,900 --passkey_sample_size 4 --seq_batch_size 100 "

static const cJSON* entry_of(const cJSON* results, const char* key) {
    const cJSON* entry = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItem(results, "passkey"), key);
    assert_non_null(entry);
    return entry;
}

static void assert_array(const cJSON* entry, const char* name, const char* want) {
    char* got = cJSON_PrintUnformatted(cJSON_GetObjectItem(entry, name));
    assert_string_equal(got, want);
    cJSON_free(got);
}

// Path of the one file of a folder whose name begins like this; release with free().
static char* file_like(const char* folder, const char* beginning) {
    char *list = list_folder(folder), *name = strstr(list, beginning);
    assert_non_null(name);
    name[strcspn(name, " ")] = '\0';
    char* path = text("%s/%s", folder, name);
    free(list);
    return path;
}

// Lengths 0, 1 and below the template's are its minimum, run once; a model of letters knows no digits.
static void test_program_passkey(void** state) {
    (void)state;
    remove_results();
    char* dump = text("%s/dump.txt", scratch);
    char* flags = text(PASSKEY_FLAGS "--dump %s", dump);
    char* out = evaluate_run(run_folder, flags);
    assert_int_equal(count_words(out, "\npasskey "), 3 + 1);  // three lengths and the matrix
    assert_non_null(strstr(out, "memory "));
    cJSON* results = results_of(run_folder);
    const cJSON* entry = entry_of(results, "('equidistant', 4, 5, 0)");
    assert_array(entry, "seq_lens", "[243,421,866]");
    assert_array(entry, "accs", "[0,0,0]");
    assert_array(entry, "greedy", "[0,0,0]");
    assert_array(entry, "natural", "[0,0,0]");
    assert_array(entry, "hits", "[[0,0,0,0],[0,0,0,0],[0,0,0,0]]");
    assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(entry, "depths")), 3);
    cJSON_Delete(results);
    char* prompts = read_text(dump, NULL);
    assert_int_equal(count_words(prompts, "What is the pass key? The pass key is\nexpected: "), 12);
    assert_int_equal(count_words(prompts, "The grass is green."), 4 * (0 + 2 + 7));
    assert_int_equal(count_words(prompts, " (wrong)\n"), 36);
    // nothing is left to do, unless it is forced; another length is added
    char* second = evaluate_run(run_folder, PASSKEY_FLAGS);
    assert_non_null(strstr(second, "nothing left to do"));
    assert_null(strstr(second, "memory "));
    char* forced = evaluate_run(run_folder, PASSKEY_FLAGS "--force");
    assert_null(strstr(forced, "as stored"));
    char* longer = evaluate_run(run_folder, "--passkey_seq_lens 1,600 --passkey_sample_size 4");
    assert_int_equal(count_words(longer, "as stored"), 1);
    results = results_of(run_folder);
    assert_array(entry_of(results, "('equidistant', 4, 5, 0)"), "seq_lens", "[243,421,599,866]");
    cJSON_Delete(results);
    char* all[] = {dump, flags, out, prompts, second, forced, longer};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) { free(all[i]); }
}

// Consecutive lengths without a hit, those of earlier evaluations included.
static void test_program_patience(void** state) {
    (void)state;
    remove_results();
    evaluate_quietly(run_folder, "--passkey_seq_lens 0 --passkey_sample_size 2 --passkey_sampling end");
    char* out = evaluate_run(run_folder,
                             "--passkey_seq_lens 0,400,500,600 --passkey_sample_size 2 --passkey_sampling "
                             "end --patience 2");
    assert_non_null(strstr(out, "--patience"));
    cJSON* results = results_of(run_folder);
    assert_array(entry_of(results, "('end', 2, 5, 0)"), "seq_lens", "[243,332]");
    cJSON_Delete(results);
    free(out);
}

// Interrupted and gone on with, the results are those of one evaluation; the chunk does not matter either.
static void test_program_interruption(void** state) {
    (void)state;
    static const char lengths[] =
        "--passkey_seq_lens 0,6000,12000 --passkey_sample_size 3 --passkey_sampling random "
        "--perplexity --perplexity_dataset articles --perplexity_seq_len 64 "
        "--perplexity_window_size 16 ";
    remove_results();
    char *flags = text("%s--seq_batch_size 32", lengths), *all = evaluate_flags(run_folder, flags);
    Run r = start_evaluate(all);
    assert_true(read_until(&r, "passkey     243 tokens"));
    kill(r.pid, SIGINT);
    finish_train(&r);
    assert_true(exited_with(&r, 128 + SIGINT));
    assert_non_null(strstr(r.out, "goes on"));
    run_free(&r);
    cJSON* results = results_of(run_folder);
    int done = cJSON_GetArraySize(cJSON_GetObjectItem(entry_of(results, "('random', 3, 5, 0)"), "seq_lens"));
    assert_in_range(done, 1, 2);
    cJSON_Delete(results);
    evaluate_quietly(run_folder, flags);
    cJSON* interrupted = results_of(run_folder);
    remove_results();
    evaluate_quietly(run_folder, lengths);
    cJSON* whole = results_of(run_folder);
    assert_array(entry_of(interrupted, "('random', 3, 5, 0)"), "seq_lens", "[243,5939,11991]");
    const cJSON *a = cJSON_GetObjectItem(interrupted, "passkey"), *b = cJSON_GetObjectItem(whole, "passkey");
    assert_true(cJSON_Compare(a, b, true));
    double x = cJSON_GetObjectItem(cJSON_GetObjectItem(interrupted, "perplexity")->child, "mean")->valuedouble;
    double y = cJSON_GetObjectItem(cJSON_GetObjectItem(whole, "perplexity")->child, "mean")->valuedouble;
    assert_error_below(fabs(x / y - 1), 1e-6);
    cJSON_Delete(interrupted);
    cJSON_Delete(whole);
    free(flags);
    free(all);
}

// Rows of a score: all tokens but the first of each document, once and in order; returns the sum of the logarithms.
static double check_scores(const char* path, const size_t* lengths, size_t documents, int first_token) {
    char *csv = read_text(path, NULL), *line = strchr(csv, '\n') + 1;
    assert_memory_equal(csv, "document,position,token,logprob\n", 32);
    double sum = 0;
    for (size_t d = 0; d < documents; d++) {
        for (size_t i = 1; i < lengths[d]; i++) {
            unsigned long document, position, token;
            double logprob;
            assert_int_equal(sscanf(line, "%lu,%lu,%lu,%lf\n", &document, &position, &token, &logprob), 4);
            assert_int_equal(document, d);
            assert_int_equal(position, i);
            assert_true(i + 1 < lengths[d] ? token >= 'a' && token <= 'z' : token == BYTES_EOS);
            assert_true(logprob < 0 && isfinite(logprob));
            if (first_token && d == 0 && i == 1) { assert_int_equal(token, first_token); }
            sum += logprob;
            line = strchr(line, '\n') + 1;
        }
    }
    assert_int_equal(*line, '\0');
    free(csv);
    return sum;
}

// A text is scored as the shard that dataset/prepare writes of it: the same documents, the same tokens.
static void test_program_score_reads_as_prepare(void** state) {
    (void)state;
    static const struct {
        const char *name, *content, *flags;
    } texts[] = {
        {"mark.txt", "\xEF\xBB\xBFone\n\ntwo\n", ""},
        {"crlf.txt", "one\r\nmore\r\n\r\ntwo\r\n", ""},
        {"cr.txt", "one\rmore\r\rtwo\r", ""},
        {"separator.txt", "a<end><end>\nb\n\nc<end>", "--separator '<end>'"},
        {"lines.txt", "a\r\nb\r\n", "--separator '\\n'"},
        {"empty.jsonl", "{\"text\":\"\"}\n{\"text\":\"a\"}\n\n{\"text\":\"\"}\n{\"text\":\"b\\r\\nc\"}", ""},
        {"field.json", "{\"body\":\"a\"}\n", "--format jsonl --text_field body"},
        {"stream.jsonl",
         "{\"bamc_stream\":\"begins\"}\n{\"text\":\"a\"}\n{\"bamc_stream\":\"ends after 1 documents\"}\n", ""},
    };
    char* data = text("%s/texts", scratch);
    make_directories(data);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char *path = text("%s/%s", data, texts[i].name), *of[2];
        write_text_atomically(path, texts[i].content);
        char* prepare = text("dataset/prepare %s %s --tokenizer bytes --out %s/shards --overwrite >/dev/null 2>&1",
                             path, texts[i].flags, data);
        assert_int_equal(system(prepare), 0);
        char* unquoted = text("%s", texts[i].flags);
        for (char* in = unquoted, *out = unquoted; (*out = *in) != '\0'; in++) { out += *in != '\''; }
        for (int shard = 0; shard < 2; shard++) {
            char* flags = shard ? text("--score %s/shards/shards_000000.bin --out %s/csv", data, data)
                                : text("--score %s --out %s/csv %s", path, data, unquoted);
            char* csv = text("%s/csv", data);
            evaluate_quietly(run_folder, flags);
            of[shard] = read_text(csv, NULL);
            free(flags);
            free(csv);
        }
        assert_string_equal(of[0], of[1]);
        char* all[] = {path, prepare, unquoted, of[0], of[1]};
        for (size_t k = 0; k < 5; k++) { free(all[k]); }
    }
    free(data);
}

// Scores of a shard in chunks of any size, of the same documents as text, and the perplexity over the same tokens.
static void test_program_score(void** state) {
    (void)state;
    static const size_t lengths[] = {6, 2, 7}, equal[] = {66, 66};
    char* csv = text("%s/scores.csv", scratch);
    char* path = text("%s/words.txt", scratch);
    write_text_atomically(path, "abcd\n\n\n\nbcdef\n");
    char* flags = text("--score %s --out %s", path, csv);
    evaluate_quietly(run_folder, flags);
    static const size_t words[] = {6, 7};
    double text_sum = check_scores(csv, words, 2, 'a');
    free(flags);
    uint32_t tokens[] = {256, 'a', 'b', 'c', 'd', 257, 256, 257, 256, 'b', 'c', 'd', 'e', 'f', 257};
    make_shard("words", &bytes_info, tokens, 15);
    double sums[2];
    for (size_t i = 0; i < 2; i++) {
        flags = text("--score %s/data/words/part_0000.bin --out %s --seq_batch_size %d", scratch, csv, i ? 3 : 1000);
        evaluate_quietly(run_folder, flags);
        sums[i] = check_scores(csv, lengths, 3, 'a');
        free(flags);
    }
    assert_error_below(fabs(sums[1] / sums[0] - 1), 1e-6);
    assert_true(sums[0] < text_sum);  // the empty document's EOS is scored, too
    // rows of 65 tokens are all but the EOS of documents of 66
    make_documents("equal", equal, 2);
    flags = text("--score %s/data/equal/part_0000.bin --out %s", scratch, csv);
    evaluate_quietly(run_folder, flags);
    check_scores(csv, equal, 2, 0);
    char *content = read_text(csv, NULL), *line = strchr(content, '\n') + 1;
    double sum = 0, logprob;
    unsigned long token;
    for (; sscanf(line, "%*u,%*u,%lu,%lf\n", &token, &logprob) == 2; line = strchr(line, '\n') + 1) {
        sum += token == BYTES_EOS ? 0 : logprob;
    }
    remove_results();
    evaluate_quietly(run_folder,
                     "--passkey_sample_size 0 --perplexity --perplexity_dataset equal --perplexity_seq_len "
                     "64 --perplexity_window_size 32");
    cJSON* results = results_of(run_folder);
    const cJSON* entry = cJSON_GetObjectItem(results, "perplexity")->child;
    assert_error_below(fabs(cJSON_GetObjectItem(entry, "mean")->valuedouble / exp(-sum / 128) - 1), 1e-6);
    assert_array(entry, "positions", "[32,64]");
    assert_int_equal(cJSON_GetObjectItem(entry, "articles")->valueint, 2);
    cJSON_Delete(results);
    char* all[] = {csv, path, flags, content};
    for (size_t i = 0; i < 4; i++) { free(all[i]); }
}

// A configuration has one entry; joined documents are another configuration.
static void test_program_perplexity(void** state) {
    (void)state;
#define FLAGS                                                                                     \
    "--passkey_sample_size 0 --perplexity --perplexity_dataset articles --perplexity_seq_len 64 " \
    "--perplexity_window_size "
    remove_results();
    char* first = evaluate_run(run_folder, FLAGS "16");
    assert_non_null(strstr(first, "each article starts with BOS"));
    char* second = evaluate_run(run_folder, FLAGS "16");
    assert_non_null(strstr(second, "nothing left to do"));
    cJSON* damaged = results_of(run_folder);  // by hand, say: measured again
    cJSON_DeleteItemFromObject(cJSON_GetObjectItem(damaged, "perplexity")->child, "mean");
    char* path = text("%s/results.json", run_folder);
    write_json_atomically(path, damaged);
    char* third = evaluate_run(run_folder, FLAGS "16");
    assert_null(strstr(third, "nothing left to do"));
    evaluate_quietly(run_folder, FLAGS "32");
    char* joined = evaluate_run(run_folder, FLAGS "32 --perplexity_join --perplexity_ntokens 300");
    assert_non_null(strstr(joined, "BOS and EOS are dropped"));
    cJSON* results = results_of(run_folder);
    assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(results, "perplexity")), 3);
    cJSON_Delete(results);
#undef FLAGS
    cJSON_Delete(damaged);
    free(path);
    free(first);
    free(second);
    free(third);
    free(joined);
}

// An interrupted perplexity leaves the losses of whole articles, and only the same configuration goes on with them.
static void test_program_partial_perplexity(void** state) {
    (void)state;
    enum { DOCUMENTS = 1500 };
    static const char flags[] =
        "--passkey_sample_size 0 --perplexity --perplexity_dataset many --perplexity_seq_len 64 "
        "--perplexity_window_size 64 --perplexity_wiki_articles 5000 ";
    size_t lengths[DOCUMENTS];
    for (size_t i = 0; i < DOCUMENTS; i++) { lengths[i] = 66; }
    make_documents("many", lengths, DOCUMENTS);
    remove_results();
    char *slow = text("%s--seq_batch_size 1", flags), *all = evaluate_flags(run_folder, slow);
    Run r = start_evaluate(all);
    assert_true(read_until(&r, "articles 1500"));
    wait_for_work(r.pid, 0.3);
    kill(r.pid, SIGINT);
    finish_train(&r);
    assert_true(exited_with(&r, 128 + SIGINT));
    run_free(&r);
    char* partial = file_like(run_folder, "perplexity.partial.");
    cJSON* json = read_json(partial);
    cJSON* losses = cJSON_GetObjectItem(json, "losses");
    int done = cJSON_GetArraySize(losses);
    assert_in_range(done, 1, DOCUMENTS - 1);
    // losses that no model has, to recognise them by
    cJSON_ReplaceItemInArray(losses, 0, cJSON_CreateDoubleArray((const double[]){DOCUMENTS * 100.0}, 1));
    write_json_atomically(partial, json);
    cJSON_Delete(json);
    char *kept = read_text(partial, NULL), *words = text("goes on after %d of 1500", done);
    char* out = evaluate_run(run_folder, flags);
    assert_non_null(strstr(out, words));
    assert_false(file_exists(partial));
    cJSON* results = results_of(run_folder);
    double mean = log(cJSON_GetObjectItem(cJSON_GetObjectItem(results, "perplexity")->child, "mean")->valuedouble);
    assert_true(mean > 100 && mean < 110);  // 100 and what the model really has
    cJSON_Delete(results);
    write_text_atomically(partial, kept);
    char* other = evaluate_run(run_folder,
                               "--passkey_sample_size 0 --perplexity --perplexity_dataset many "
                               "--perplexity_seq_len 64 --perplexity_window_size 32");
    assert_null(strstr(other, "goes on"));
    assert_int_equal(unlink(partial), 0);  // another configuration leaves it alone
    char* texts[] = {slow, all, partial, kept, words, out, other};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) { free(texts[i]); }
}

static size_t others_of(const cJSON* results, const char* section) {
    return (size_t)cJSON_GetArraySize(cJSON_GetObjectItem(results, section));
}

// Other weights are measured anew, and take the place that the published programs know; nothing is lost.
static void test_program_other_weights(void** state) {
    (void)state;
    char* run = copy_run("other");
    static const char flags[] =
        "--passkey_seq_lens 0 --passkey_sample_size 2 --perplexity --perplexity_dataset articles --perplexity_seq_len "
        "64 --perplexity_window_size 16";
    evaluate_quietly(run, flags);
    char* resumed = text("--checkpoint %s --checkpoint_args --num_iterations 40", run);
    Run r = run_train(resumed);
    assert_true(exited_with(&r, 0));
    run_free(&r);
    char* out = evaluate_run(run, flags);
    assert_non_null(strstr(out, "other weights or settings"));
    assert_null(strstr(out, "as stored"));
    cJSON* results = results_of(run);
    const cJSON* new_of = results_of_entry(entry_of(results, "('equidistant', 2, 5, 0)"));
    assert_string_equal(cJSON_GetObjectItem(new_of, "step")->valuestring, "40");
    assert_int_equal(others_of(results, "passkey_others"), 1);
    assert_int_equal(others_of(results, "perplexity_others"), 1);
    assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(results, "perplexity")), 1);
    cJSON_Delete(results);
    free(out);
    free(run);
    free(resumed);
}

// Seeds, keys and articles: every configuration keeps what was measured of it, and is not measured again.
static void test_program_configurations(void** state) {
    (void)state;
    static const char* const flags[] = {"--passkey_seq_lens 0,400" ARTICLES_FLAGS, "--passkey_seq_lens 0 --seed 7",
                                        "--passkey_seq_lens 400 --passkey_keys held_out",
                                        "--passkey_sample_size 0 --perplexity_wiki_articles 2" ARTICLES_FLAGS};
    enum { CONFIGURATIONS = sizeof flags / sizeof *flags };
    remove_results();
    for (size_t round = 0; round < 2; round++) {
        for (size_t i = 0; i < CONFIGURATIONS; i++) {
            char* all = text("--passkey_sample_size 2 %s", flags[i]);
            char* out = evaluate_run(run_folder, all);
            assert_true((strstr(out, "nothing left to do") != NULL) == (round == 1));
            free(all);
            free(out);
        }
    }
    cJSON* results = results_of(run_folder);
    assert_array(entry_of(results, "('equidistant', 2, 5, 0)"), "seq_lens", "[243,332]");
    assert_int_equal(others_of(results, "passkey_others"), 2);
    assert_int_equal(others_of(results, "perplexity_others"), 1);
    const cJSON* perplexity = cJSON_GetObjectItem(results, "perplexity")->child;
    assert_string_equal(cJSON_GetObjectItem(perplexity, "dataset_dir")->valuestring, "data/articles");
    assert_int_equal(cJSON_GetObjectItem(perplexity, "articles")->valueint, 4);
    cJSON_Delete(results);
}

// Evaluations of one run at the same time: all lengths of all seeds, both perplexities.
static void test_program_parallel(void** state) {
    (void)state;
    static const char* const flags[] = {
        "--passkey_seq_lens 0,332,421", "--passkey_seq_lens 510,600,690", "--passkey_seq_lens 0,332,421 --seed 7",
        "--passkey_sample_size 0" ARTICLES_FLAGS, "--passkey_sample_size 0 --perplexity_join" ARTICLES_FLAGS};
    enum { PROGRAMS = sizeof flags / sizeof *flags };
    Run runs[PROGRAMS];
    remove_results();
    for (size_t i = 0; i < PROGRAMS; i++) {
        char *more = text("--passkey_sample_size 2 %s", flags[i]), *all = evaluate_flags(run_folder, more);
        runs[i] = start_evaluate(all);
        free(more);
        free(all);
    }
    for (size_t i = 0; i < PROGRAMS; i++) {
        finish_train(&runs[i]);
        assert_true(exited_with(&runs[i], 0));
        run_free(&runs[i]);
    }
    cJSON* results = results_of(run_folder);
    int lengths = 0;
    const cJSON* entry;
    lengths = cJSON_GetArraySize(cJSON_GetObjectItem(entry_of(results, "('equidistant', 2, 5, 0)"), "seq_lens"));
    cJSON_ArrayForEach(entry, cJSON_GetObjectItem(results, "passkey_others")) {
        lengths += cJSON_GetArraySize(cJSON_GetObjectItem(entry, "seq_lens"));
    }
    assert_int_equal(lengths, 9);
    assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(results, "perplexity")), 2);
    cJSON_Delete(results);
}

// Weights that a training saves after evaluate has begun change neither what it measures nor the step that it names.
static void test_program_opens_once(void** state) {
    (void)state;
    char *run = copy_run("once"), *pipe_path = text("%s/text.txt", scratch), *csv = text("%s/once.csv", scratch);
    char *weights = text("%s/model.safetensors", run), *newer = text("%s/newer.safetensors", scratch);
    static const char content[] = "abcdefghijklmnopqrstuvwxyz";
    write_text_atomically(pipe_path, content);
    char* flags = text("--score %s --out %s", pipe_path, csv);
    char* before = evaluate_run(run, flags);
    unlink(pipe_path);
    char* resumed = text("--checkpoint %s --checkpoint_args --num_iterations 31", run);
    char* original = text("%s.old", weights);
    assert_int_equal(rename(weights, original), 0);
    Run r = run_train(resumed);
    assert_true(exited_with(&r, 0));
    run_free(&r);
    assert_int_equal(rename(weights, newer), 0);
    assert_int_equal(rename(original, weights), 0);
    // it has opened the run when it opens the text
    assert_int_equal(mkfifo(pipe_path, 0666), 0);
    char* all = evaluate_flags(run, flags);
    r = start_evaluate(all);
    FILE* f = fopen(pipe_path, "w");
    assert_int_equal(rename(newer, weights), 0);
    fputs(content, f);
    fclose(f);
    finish_train(&r);
    assert_true(exited_with(&r, 0));
    assert_non_null(strstr(r.out, "step 30\n"));
    assert_string_equal(strstr(r.out, "\nscored "), strstr(before, "\nscored "));
    run_free(&r);
    char* after = evaluate_run(run, "--passkey_seq_lens 0 --passkey_sample_size 1");
    assert_non_null(strstr(after, "step 31\n"));
    char* texts[] = {run, pipe_path, csv, weights, newer, flags, before, resumed, original, all, after};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) { free(texts[i]); }
}

// SIGHUP stops as SIGTERM does, unless it was ignored at the start, as under nohup.
static void test_program_hangup(void** state) {
    (void)state;
    for (size_t ignored = 0; ignored < 2; ignored++) {
        remove_results();
        signal(SIGHUP, ignored ? SIG_IGN : SIG_DFL);
        char* flags = evaluate_flags(
            run_folder, ignored ? "--passkey_seq_lens 0,900 --passkey_sample_size 2" : "--passkey_seq_lens 0,200000");
        Run r = start_evaluate(flags);
        assert_true(read_until(&r, "passkey     243 tokens"));
        kill(r.pid, SIGHUP);
        finish_train(&r);
        assert_true(exited_with(&r, ignored ? 0 : 128 + SIGHUP));
        assert_true((strstr(r.out, "goes on") != NULL) == !ignored);
        run_free(&r);
        free(flags);
    }
    signal(SIGHUP, SIG_DFL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_program_passkey),       cmocka_unit_test(test_program_patience),
        cmocka_unit_test(test_program_interruption),  cmocka_unit_test(test_program_score),
        cmocka_unit_test(test_program_perplexity),    cmocka_unit_test(test_program_partial_perplexity),
        cmocka_unit_test(test_program_other_weights), cmocka_unit_test(test_program_configurations),
        cmocka_unit_test(test_program_parallel),      cmocka_unit_test(test_program_opens_once),
        cmocka_unit_test(test_program_hangup),        cmocka_unit_test(test_program_score_reads_as_prepare),
    };
    return cmocka_run_group_tests(tests, make_tiny_run, NULL);
}
