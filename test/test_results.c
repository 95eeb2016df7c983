/*
results.json without a model: lengths and configurations side by side, several writers at once, entries of older
versions, of the published program and of people, and files that are refused.
*/
#include "test_util.h"

#include "../llmc/eval/results.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

static void put(cJSON* entry, size_t length, double accuracy) {
    double depths[] = {0, accuracy};
    int hits[] = {1, accuracy > 0.5};
    PasskeyResult r = {length, 2, accuracy, accuracy / 2, accuracy / 4, depths, hits};
    results_put_length(entry, &r);
}

static void assert_json(const cJSON* json, const char* want) {
    char* got = cJSON_PrintUnformatted(json);
    assert_string_equal(got, want);
    cJSON_free(got);
}

// Results in a scratch folder; the folder's name has 64 bytes.
static Results scratch_results(char* folder) { return results_open(scratch_folder(folder)); }

static void remove_scratch_results(Results* r, const char* folder) {
    unlink(r->path);
    unlink(r->lock_path);
    rmdir(folder);
    results_close(r);
}

static const cJSON* other_passkey(const cJSON* root, int place) {
    return cJSON_GetArrayItem(results_array(root, "passkey_others"), place);
}

static void test_results_merge(void** state) {
    (void)state;
    char folder[64];
    Results r = scratch_results(folder);
    cJSON* of = cJSON_Parse("{\"step\": \"10\", \"weights\": \"a\", \"seed\": 1}");
    char* key = results_passkey_key("equidistant", 2, 5, 0);
    assert_string_equal(key, "('equidistant', 2, 5, 0)");
    results_begin(&r);
    assert_null(results_find_passkey(r.root, key, of));
    cJSON* entry = results_passkey(r.root, key, of, NULL);
    static const size_t lengths[] = {300, 100, 200, 400};
    for (size_t i = 0; i < 4; i++) { put(entry, lengths[i], 0.25); }
    put(entry, 200, 1);  // again
    results_commit(&r);
    results_close(&r);
    r = results_open(folder);
    entry = results_find_passkey(r.root, key, of);
    assert_json(results_array(entry, "seq_lens"), "[100,200,300,400]");
    assert_json(results_array(entry, "accs"), "[0.25,1,0.25,0.25]");
    assert_json(results_array(entry, "natural"), "[0.0625,0.25,0.0625,0.0625]");
    assert_json(results_array(entry, "depths"), "[[0,0.25],[0,1],[0,0.25],[0,0.25]]");
    assert_json(results_array(entry, "hits"), "[[1,0],[1,1],[1,0],[1,0]]");
    int place;
    assert_int_equal(results_find_length(entry, 300, &place), 2);
    assert_int_equal(results_find_length(entry, 301, &place), -1);
    assert_int_equal(place, 3);
    assert_true(results_accuracy(entry, "greedy", 1) == 0.5);
    remove_scratch_results(&r, folder);
    cJSON_Delete(of);
    free(key);
}

// Which of several configurations has the place that the published programs know; none is lost.
static void test_results_places(void** state) {
    (void)state;
    char folder[64];
    Results r = scratch_results(folder);
    static const struct {
        const char *of, *outdated;
        const char* published;  // the `seed` of the entry at the published place afterwards
        int others;
    } steps[] = {
        {"{\"step\":\"10\",\"weights\":\"a\",\"seed\":1}", NULL, "1", 0},
        {"{\"step\":\"10\",\"weights\":\"a\",\"seed\":2}", NULL, "1", 1},  // another setting stands back
        {"{\"step\":\"20\",\"weights\":\"b\",\"seed\":3}", NULL, "3", 2},  // newer weights do not
        {"{\"step\":\"10\",\"weights\":\"a\",\"seed\":1}", NULL, "3", 2},  // an evaluation of old ones that goes on
        {"{\"step\":\"20\",\"weights\":\"b\",\"seed\":4}", NULL, "3", 3},
        // a run that went back to step 10
        {"{\"step\":\"10\",\"weights\":\"a\",\"seed\":1}", "{\"step\":\"20\",\"weights\":\"b\",\"seed\":3}", "1", 3},
        // and once more to the same step, by other weights
        {"{\"step\":\"10\",\"weights\":\"c\",\"seed\":5}", "{\"step\":\"10\",\"weights\":\"a\",\"seed\":1}", "5", 4},
    };
    size_t stored = 0;
    for (size_t i = 0; i < COUNT(steps); i++) {
        cJSON *of = cJSON_Parse(steps[i].of), *outdated = steps[i].outdated ? cJSON_Parse(steps[i].outdated) : NULL;
        results_begin(&r);
        put(results_passkey(r.root, "k", of, outdated), 100 + i, 1);
        results_commit(&r);
        stored++;
        const cJSON* entry = results_published_passkey(r.root, "k");
        assert_json(results_array(results_of_entry(entry), "seed"), steps[i].published);
        assert_null(results_array(entry, "key"));
        int others = cJSON_GetArraySize(results_array(r.root, "passkey_others"));
        assert_int_equal(others, steps[i].others);
        size_t lengths = (size_t)cJSON_GetArraySize(results_array(entry, "seq_lens"));
        for (int k = 0; k < others; k++) {
            const cJSON* other = other_passkey(r.root, k);
            assert_json(results_array(other, "key"), "\"k\"");
            lengths += (size_t)cJSON_GetArraySize(results_array(other, "seq_lens"));
        }
        assert_int_equal(lengths, stored);
        cJSON_Delete(of);
        cJSON_Delete(outdated);
    }
    remove_scratch_results(&r, folder);
}

// What is at the published place but is no whole entry of ours, by hand or of the published program, is kept too.
static void test_results_foreign(void** state) {
    (void)state;
    static const char* const entries[] = {"{\"seq_lens\":[1,2],\"accs\":[1,0]}", "3", "null",
                                          "{\"seq_lens\":[1],\"accs\":[],\"of\":{}}"};
    cJSON* of = cJSON_Parse("{\"step\": \"10\"}");
    for (size_t i = 0; i < COUNT(entries); i++) {
        char folder[64];
        Results r = scratch_results(folder);
        cJSON_AddItemToObject(results_array(r.root, "passkey"), "k", cJSON_Parse(entries[i]));
        put(results_passkey(r.root, "k", of, NULL), 100, 1);
        put(results_passkey(r.root, "k", of, NULL), 200, 1);
        assert_json(results_array(results_published_passkey(r.root, "k"), "seq_lens"), "[100,200]");
        assert_int_equal(cJSON_GetArraySize(results_array(r.root, "passkey_others")), 1);
        assert_json(results_array(other_passkey(r.root, 0), "key"), "\"k\"");
        remove_scratch_results(&r, folder);
    }
    cJSON_Delete(of);
}

// Entries of versions that did not know the hash of the weights are those of the same step.
static void test_results_older_version(void** state) {
    (void)state;
    char folder[64];
    Results r = scratch_results(folder);
    cJSON *old = cJSON_Parse("{\"step\":\"10\",\"dtype\":\"float32\"}"),
          *of = cJSON_Parse("{\"step\":\"10\",\"weights\":\"a\",\"dtype\":\"float32\"}");
    put(results_passkey(r.root, "k", old, NULL), 100, 1);
    put(results_passkey(r.root, "k", of, NULL), 200, 1);
    assert_json(results_array(results_published_passkey(r.root, "k"), "seq_lens"), "[100,200]");
    assert_int_equal(cJSON_GetArraySize(results_array(r.root, "passkey_others")), 0);
    remove_scratch_results(&r, folder);
    cJSON_Delete(old);
    cJSON_Delete(of);
}

enum { WRITERS = 6, WRITES = 20 };

// One of several programs that store at the same time: lengths of its own, for one of three configurations.
static void write_results(const char* folder, size_t writer) {
    Results r = results_open(folder);
    char* text_of = text("{\"step\":\"1\",\"seed\":%zu}", writer % 3);
    cJSON* of = cJSON_Parse(text_of);
    for (size_t i = 0; i < WRITES; i++) {
        results_begin(&r);
        put(results_passkey(r.root, "k", of, NULL), 1 + i * WRITERS + writer, 1);
        results_commit(&r);
    }
    _exit(0);
}

static void test_results_writers(void** state) {
    (void)state;
    char folder[64];
    Results r = scratch_results(folder);
    fflush(NULL);
    for (size_t w = 0; w < WRITERS; w++) {
        if (fork() == 0) { write_results(folder, w); }
    }
    for (size_t w = 0; w < WRITERS; w++) {
        int status = -1;
        wait(&status);
        assert_int_equal(status, 0);
    }
    results_read(&r);
    size_t lengths = (size_t)cJSON_GetArraySize(results_array(results_published_passkey(r.root, "k"), "seq_lens"));
    for (int i = 0; i < 2; i++) {
        lengths += (size_t)cJSON_GetArraySize(results_array(other_passkey(r.root, i), "seq_lens"));
    }
    assert_int_equal(lengths, WRITERS * WRITES);
    assert_int_equal(cJSON_GetArraySize(results_array(r.root, "passkey_others")), 2);
    remove_scratch_results(&r, folder);
}

static cJSON* perplexity_of(const char* dataset, const char* policy, const char* of, int articles, double value) {
    cJSON* e = cJSON_CreateObject();
    cJSON_AddNumberToObject(e, "window_size", 512);
    cJSON_AddStringToObject(e, "dataset_dir", dataset);
    if (policy) { cJSON_AddStringToObject(e, "bos", policy); }
    if (of) {
        cJSON_AddNumberToObject(e, "articles", articles);
        cJSON_AddItemToObject(e, "of", cJSON_Parse(of));
        cJSON_AddItemToObject(e, "standard_error", cJSON_Parse("[1]"));
        cJSON_AddNumberToObject(e, "mean", value);
    }
    cJSON_AddItemToObject(e, "perplexity", cJSON_CreateDoubleArray(&value, 1));
    cJSON_AddItemToObject(e, "positions", cJSON_Parse("[512]"));
    return e;
}

// Each entry is put in turn; the perplexities of both sections are then these.
static void test_results_perplexity(void** state) {
    (void)state;
    static const char bos[] = "each article starts with BOS", joined[] = "BOS and EOS are dropped, documents joined";
    static const char step1[] = "{\"step\":\"1\"}", step2[] = "{\"step\":\"2\"}", bf16[] = "{\"step\":\"1\",\"d\":1}";
    const struct {
        const char *dataset, *policy, *of;
        int articles;
        const char *published, *others;
    } cases[] = {
        {"wikipedia", bos, step1, 4, "[[1]]", "[]"},         // of an older version
        {"data/wikipedia", bos, step1, 4, "[[2]]", "[]"},    // is the same
        {"data/wikipedia", bos, bf16, 4, "[[2]]", "[[3]]"},  // another setting
        {"data/wikipedia", bos, bf16, 4, "[[2]]", "[[4]]"},  // again
        {"data/wikipedia", bos, step1, 2, "[[2]]", "[[4],[5]]"},
        {"data/wikipedia", joined, step1, 4, "[[2],[6]]", "[[4],[5]]"},
        {"data/wikipedia", bos, step1, 9, "[[7],[6]]", "[[4],[5],[2]]"},      // more articles
        {"data/wikipedia", bos, step2, 4, "[[8],[6]]", "[[4],[5],[2],[7]]"},  // newer weights
        {"data/10B", joined, step1, 4, "[[8],[6],[9]]", "[[4],[5],[2],[7]]"},
    };
    cJSON* root = cJSON_Parse("{\"perplexity\": null, \"mine\": 7}");
    results_section(root, "perplexity", true, "x");
    results_section(root, "perplexity_others", true, "x");
    for (size_t i = 0; i < COUNT(cases); i++) {
        cJSON* entry = perplexity_of(cases[i].dataset, cases[i].policy, cases[i].of, cases[i].articles, (double)i + 1);
        results_put_perplexity(root, entry, NULL);
        assert_ptr_equal(results_find_perplexity(root, entry), entry);
        static const char* const sections[] = {"perplexity", "perplexity_others"};
        for (size_t k = 0; k < 2; k++) {
            cJSON *values = cJSON_CreateArray(), *item;
            cJSON_ArrayForEach(item, results_array(root, sections[k])) {
                cJSON_AddItemToArray(values, cJSON_Duplicate(results_array(item, "perplexity"), true));
            }
            assert_json(values, k ? cases[i].others : cases[i].published);
            cJSON_Delete(values);
        }
    }
    assert_json(cJSON_GetObjectItem(root, "mine"), "7");
    cJSON_Delete(root);
    // an entry of the published program is that of our setting: kept, and not there twice
    static const char* const published[][2] = {{"data/wikipedia", bos}, {"data/10B", joined}};
    for (size_t i = 0; i < 2; i++) {
        root = cJSON_Parse("{\"perplexity\": [], \"perplexity_others\": []}");
        cJSON_AddItemToArray(results_array(root, "perplexity"), perplexity_of(published[i][0], NULL, NULL, 0, 5));
        cJSON* ours = perplexity_of(published[i][0], published[i][1], step1, 4, 6);
        assert_null(results_find_perplexity(root, ours));
        results_put_perplexity(root, ours, NULL);
        assert_int_equal(cJSON_GetArraySize(results_array(root, "perplexity")), 1);
        assert_int_equal(cJSON_GetArraySize(results_array(root, "perplexity_others")), 1);
        cJSON_Delete(root);
    }
}

static void open_results(void* folder) { results_open((const char*)folder); }

static void test_results_damaged(void** state) {
    (void)state;
    static const char* const damaged[][2] = {
        {"[]", "object"}, {"{\"passkey\": 3}", "passkey"}, {"{\"perplexity\": {}}", "perplexity"}, {"{", "JSON"}};
    char folder[64], *path = text("%s/results.json", scratch_folder(folder));
    for (size_t i = 0; i < COUNT(damaged); i++) {
        write_text_atomically(path, damaged[i][0]);
        expect_fatal(open_results, folder, (const char* const[]){path, damaged[i][1], NULL});
    }
    unlink(path);
    rmdir(folder);
    free(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_results_merge),   cmocka_unit_test(test_results_places),
        cmocka_unit_test(test_results_foreign), cmocka_unit_test(test_results_older_version),
        cmocka_unit_test(test_results_writers), cmocka_unit_test(test_results_perplexity),
        cmocka_unit_test(test_results_damaged),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
