/*
The tokenizer: "bytes"; SentencePiece word by word against SentencePiece on the whole text, for models that may be cut
at words and for models that only look so; and the Mistral model, whose ids must be those of an independent
implementation.
*/
#include <pthread.h>

#include "../llmc/tokenizer.h"
#include "model_util.h"

static void assert_same_ids(const TokenList* got, const int* want, size_t count, const char* text) {
    bool same = got->count == count;
    for (size_t i = 0; same && i < count; i++) { same = got->ids[i] == want[i]; }
    if (same) { return; }
    print_error("text: '%s'\ngot: ", text);
    for (size_t i = 0; i < got->count; i++) { print_error(" %d", got->ids[i]); }
    print_error("\nwant:");
    for (size_t i = 0; i < count; i++) { print_error(" %d", want[i]); }
    print_error("\n");
    fail();
}

// ----------------------------------------------------------------------------
// bytes

static void test_bytes(void** state) {
    (void)state;
    Tokenizer* t = tokenizer_open("bytes");
    assert_int_equal(tokenizer_vocab_size(t), 258);
    assert_int_equal(tokenizer_bos(t), 256);
    assert_int_equal(tokenizer_eos(t), 257);
    assert_int_equal(tokenizer_hash(t), 0x65b1d004);  // FNV-1a of "bytes": shards on disk depend on it
    assert_string_equal(tokenizer_name(t), "bytes");
    assert_string_equal(tokenizer_piece(t, 'A'), "A");
    assert_string_equal(tokenizer_piece(t, 10), "<0x0A>");
    assert_string_equal(tokenizer_piece(t, 256), "<s>");
    assert_string_equal(tokenizer_piece(t, 257), "</s>");
    assert_string_equal(tokenizer_piece(t, 258), "");
    assert_string_equal(tokenizer_piece(t, -1), "");

    char every[256];
    for (size_t i = 0; i < 256; i++) { every[i] = (char)i; }
    TokenList ids = {0};
    tokenizer_encode(t, every, 256, &ids);
    tokenizer_encode(t, "", 0, &ids);
    assert_int_equal(ids.count, 256);
    for (size_t i = 0; i < 256; i++) { assert_int_equal(ids.ids[i], i); }
    size_t length;
    char* text = tokenizer_decode(t, ids.ids, ids.count, &length);
    assert_int_equal(length, 256);
    assert_memory_equal(text, every, 256);
    free(text);
    int marked[] = {256, 'h', 'i', 300, '!', -7, 257};
    text = tokenizer_decode(t, marked, 7, NULL);
    assert_string_equal(text, "hi\xEF\xBF\xBD!\xEF\xBF\xBD");
    free(text);
    free(ids.ids);
    tokenizer_close(t);
}

// ----------------------------------------------------------------------------
// word by word

#define SP "\xE2\x96\x81"
static const char* const plain[] = {SP SP, "ab", SP "a", "aa", SP "ab", "ba", SP SP "a", SP "b",     "bab",
                                    "[x",  "a",  "b",    SP,   "[",     "x",  "]",       "\xC3\xA9", NULL};
static const char* const reaching[] = {"a" SP, "ab", SP "a", "b" SP "a", SP SP, "a", "b", SP, NULL};
static const char* const with_newline[] = {"a\n", "\n\n", "ab", SP "a", "a", "b", SP, "\n", NULL};
static const char* const user[] = {"[x]", "ab]", NULL};
static const char* const user_reaching[] = {"a" SP "b", "b\na", NULL};

// The first two can be cut at words; each of the others breaks one of the conditions.
static const struct {
    const char* name;
    ModelRecipe recipe;
} recipes[] = {
    {"plain", {plain, NULL, 0, MODEL_BPE, true, true, true, false}},
    {"user-defined pieces", {plain, user, 0, MODEL_BPE, true, true, true, false}},
    {"pieces over spaces", {reaching, NULL, 0, MODEL_BPE, true, true, true, false}},
    {"pieces over newlines", {with_newline, NULL, 0, MODEL_BPE, true, true, true, false}},
    {"user-defined pieces over spaces", {plain, user_reaching, 0, MODEL_BPE, true, true, true, false}},
    {"unigram", {plain, NULL, 0, MODEL_UNIGRAM, true, true, true, false}},
    {"no byte pieces", {plain, NULL, 0, MODEL_BPE, false, true, true, false}},
    {"no dummy prefix", {plain, NULL, 0, MODEL_BPE, true, true, false, false}},
    {"trims spaces", {plain, NULL, 0, MODEL_BPE, true, true, true, true}},
};

// A text of up to 40 parts that meet in every way: spaces, newlines, NUL, U+2581 itself, broken UTF-8.
static size_t random_text(char* out, Random* r) {
    static const struct {
        const char* bytes;
        size_t size;
    } parts[] = {{" ", 1},    {"\n", 1},       {"a", 1},    {"b", 1}, {"ab", 2}, {"[x]", 3}, {SP, 3},   {"\xC3\xA9", 2},
                 {"\xFF", 1}, {"\xE2\x96", 2}, {"\x81", 1}, {"", 1},  {"c", 1},  {"a b", 3}, {"  ", 2}, {"\r\n", 2}};
    size_t n = 0;
    for (uint64_t count = random_below(r, 41); count > 0; count--) {
        // Half of the parts are the first six, so that merges are common.
        size_t i = random_below(r, random_below(r, 2) ? 6 : sizeof parts / sizeof *parts);
        memcpy(out + n, parts[i].bytes, parts[i].size);
        n += parts[i].size;
    }
    out[n] = '\0';
    return n;
}

static void check_against_whole(const Tokenizer* t, uint64_t seed, size_t rounds) {
    Random r = {seed};
    TokenList got = {0}, want = {0};
    char text[256];
    for (size_t i = 0; i < rounds; i++) {
        size_t n = random_text(text, &r);
        got.count = want.count = 0;
        tokenizer_encode(t, text, n, &got);
        tokenizer_encode_whole(t, text, n, &want);
        assert_same_ids(&got, want.ids, want.count, text);
    }
    free(got.ids);
    free(want.ids);
}

static void test_words_equal_whole(void** state) {
    (void)state;
    char folder[64];
    char* path = text("%s/m.model", scratch_folder(folder));
    for (size_t i = 0; i < sizeof recipes / sizeof *recipes; i++) {
        model_create(path, &recipes[i].recipe);
        Tokenizer* t = tokenizer_open(path);
        print_message("%s\n", recipes[i].name);
        assert_int_equal(tokenizer_is_by_word(t), i < 2);
        check_against_whole(t, i, 4000);
        tokenizer_close(t);
    }
    unlink(path);
    rmdir(folder);
    free(path);
}

// ----------------------------------------------------------------------------
// refusals

typedef struct {
    const char* path;
} OpenCase;

static void open_it(void* argument) { tokenizer_close(tokenizer_open(((const OpenCase*)argument)->path)); }

static void test_refusals(void** state) {
    (void)state;
    char folder[64];
    scratch_folder(folder);
    char *missing = text("%s/none.model", folder), *garbage = text("%s/garbage", folder);
    char* no_text = text("%s/notext", folder);  // a piece without text: the library throws
    char *empty = text("%s/empty", folder), *no_bos = text("%s/nobos", folder), *cut = text("%s/cut", folder);
    FILE* f = fopen(garbage, "wb");
    for (int i = 0; i < 5000; i++) { fputc(i * 7 % 251, f); }
    fclose(f);
    fclose(fopen(empty, "wb"));
    ModelRecipe recipe = {plain, NULL, 0, MODEL_BPE, true, false, true, false};
    model_create(no_bos, &recipe);
    recipe.bos = true;
    model_create(cut, &recipe);
    static const char* const nothing[] = {"a", "", NULL};
    recipe.pieces = nothing, recipe.type = MODEL_UNIGRAM;
    model_create(no_text, &recipe);
    struct stat info;
    assert_int_equal(stat(cut, &info), 0);
    assert_int_equal(truncate(cut, info.st_size - 3), 0);
    const struct {
        const char* path;
        const char* words[4];
    } cases[] = {
        {missing, {missing, "No such file", "get_tokenizer.sh"}},
        {folder, {folder, "directory"}},
        {garbage, {garbage, "5000 bytes", "no SentencePiece model"}},
        {empty, {empty, "0 bytes", "no SentencePiece model"}},
        {cut, {cut, "no SentencePiece model"}},
        {no_bos, {no_bos, "no BOS id"}},
        {no_text, {no_text, "no SentencePiece model"}},
        {"/dev/zero", {"/dev/zero", "too many for a SentencePiece model"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        OpenCase c = {cases[i].path};
        expect_fatal(open_it, &c, cases[i].words);
    }
    char* all[] = {missing, garbage, empty, no_bos, cut, no_text};
    for (size_t i = 0; i < 6; i++) {
        unlink(all[i]);
        free(all[i]);
    }
    rmdir(folder);
}

static void open_and_encode(void* argument) {
    Tokenizer* t = tokenizer_open(((const OpenCase*)argument)->path);
    TokenList ids = {0};
    tokenizer_encode(t, "abc \xFF", 5, &ids);
    free(ids.ids);
    tokenizer_close(t);
}

// The library follows the table of its normaliser blindly: one that leads nowhere is refused before it can.
static void test_damaged_charsmap(void** state) {
    (void)state;
    enum { UNITS = 256 };
    char folder[64];
    scratch_folder(folder);
    char* path = text("%s/charsmap.model", folder);
    static const struct {
        uint32_t bytes;          // of the trie, as the table says
        uint32_t root, a, leaf;  // units 0, 'a', and 200, to which 'a' leads by 'a' ^ 200
        bool good;
    } rows[] = {
        {4 * UNITS, 0, 0, 0, true},                                          // an empty trie
        {4 * UNITS, 0, 'a' | 256 | ('a' ^ 200) << 10, 1u << 31, true},       // "a" becomes the text at 0
        {4 * UNITS, 0, 'a' | 256 | ('a' ^ 200) << 10, 1u << 31 | 2, false},  // at 2, where there is none
        {4 * UNITS, 0, 'a' | 1 << 20, 0, false},                             // children beyond the trie
        {4 * UNITS, 1 << 20, 0, 0, false},
        {4 * UNITS + 2, 0, 0, 0, false},
        {4 * UNITS + 1000, 0, 0, 0, false},
        {0, 0, 0, 0, false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ModelRecipe recipe = {plain, NULL, 0, MODEL_BPE, true, true, true, false};
        model_create(path, &recipe);
        uint32_t map[1 + UNITS] = {rows[i].bytes, rows[i].root};
        map[1 + 'a'] = rows[i].a;
        map[1 + 200] = rows[i].leaf;
        ModelMessage inner = {{0}, 0}, outer = {{0}, 0};
        const char texts[2] = {'b', 0};
        model_varint(&inner, 2 << 3 | 2);
        model_varint(&inner, sizeof map + sizeof texts);
        model_varint(&outer, 3 << 3 | 2);
        model_varint(&outer, inner.size + sizeof map + sizeof texts);
        FILE* f = fopen(path, "ab");
        fwrite(outer.bytes, 1, outer.size, f), fwrite(inner.bytes, 1, inner.size, f);
        fwrite(map, 1, sizeof map, f), fwrite(texts, 1, sizeof texts, f);
        fclose(f);
        OpenCase c = {path};
        const char* words[] = {path, "no SentencePiece model", NULL};
        if (rows[i].good) {
            open_and_encode(&c);
        } else {
            expect_fatal(open_and_encode, &c, words);
        }
    }
    unlink(path), rmdir(folder);
    free(path);
}

// ----------------------------------------------------------------------------
// the Mistral model

static int open_mistral(void** state) {
    const char* path = mistral_path();
    if (!path) { return 1; }
    *state = tokenizer_open(path);
    return 0;
}

static int close_mistral(void** state) {
    tokenizer_close((Tokenizer*)*state);
    return 0;
}

static void test_mistral_facts(void** state) {
    const Tokenizer* t = (const Tokenizer*)*state;
    assert_int_equal(tokenizer_vocab_size(t), 32768);
    assert_int_equal(tokenizer_bos(t), 1);
    assert_int_equal(tokenizer_eos(t), 2);
    assert_int_equal(tokenizer_hash(t), 0x2f658a98);
    assert_string_equal(tokenizer_piece(t, 1183), SP "The");
    assert_true(tokenizer_is_by_word(t));
    assert_string_equal(tokenizer_piece(t, 781), "<0x0A>");
    assert_string_equal(tokenizer_piece(t, 32768), "");
}

// Computed with the Python package sentencepiece 0.2.3 from the same model file. The last five are the pieces of the
// passkey task for K = 71432.
static const struct {
    const char* text;
    size_t count;
    int ids[32];
} golden[] = {
    {"", 0, {0}},
    {"Hello world", 2, {23325, 2294}},
    {" Hello world", 3, {29473, 23325, 2294}},
    {"Hello  world ", 4, {23325, 29473, 2294, 29473}},
    {"The quick brown fox jumps over the lazy dog.",
     12,
     {1183, 3704, 9828, 1053, 1910, 1229, 11343, 1522, 1040, 18666, 4682, 29491}},
    {"It's 3.14159, isn't it?",
     17,
     {1429, 29510, 29481, 29473, 29538, 29491, 29508, 29549, 29508, 29550, 29542, 29493, 3925, 29510, 29475, 1146,
      29572}},
    {"0", 2, {29473, 29502}},
    {"42", 3, {29473, 29549, 29518}},
    {"1234567890", 11, {29473, 29508, 29518, 29538, 29549, 29550, 29552, 29555, 29551, 29542, 29502}},
    {" 00000", 6, {1027, 29502, 29502, 29502, 29502, 29502}},
    {"a\nb", 3, {1032, 781, 29494}},
    {"\n\n\tdef f(x):\n        return x  # two\n",
     17,
     {29473, 781, 781, 780, 2038, 1053, 29500, 29512, 2097, 781, 6158, 1372, 2086, 29473, 1190, 1757, 781}},
    {"caf\xC3"
     "\xA9"
     " na\xC3"
     "\xAF"
     "ve \xC3"
     "\xBC"
     "ber",
     5,
     {29113, 2647, 29688, 1101, 6199}},
    {"\xE6"
     "\x97"
     "\xA5"
     "\xE6"
     "\x9C"
     "\xAC"
     "\xE8"
     "\xAA"
     "\x9E"
     "\xE3"
     "\x81"
     "\xAE"
     "\xE6"
     "\x96"
     "\x87"
     "",
     6,
     {29473, 29910, 29887, 31089, 29761, 29787}},
    {"\xF0"
     "\x9F"
     "\x98"
     "\x80"
     " smile",
     3,
     {29473, 31343, 7226}},
    {"<s>[INST] hi [/INST]</s>",
     14,
     {1291, 29481, 29535, 29560, 17057, 29561, 12782, 1501, 29516, 17057, 29561, 1468, 29481, 29535}},
    {"see [REFERENCE_DOC_3] there", 4, {1800, 29473, 767, 1504}},
    {"x\xE2"
     "\x96"
     "\x81"
     "y",
     2,
     {2086, 1105}},
    {"   ", 1, {1028}},
    {"There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
     "about the important information there.",
     31,
     {2155,  1117, 1164, 3046,  5699, 8686, 4184, 1032, 2823, 1070, 28499, 3013, 29491, 9537, 1146, 1072,
      16354, 1421, 1474, 29491, 1083, 1390, 1294, 1231, 1136, 1452, 1040,  3046, 2639,  1504, 29491}},
    {"The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
     24,
     {1183, 10877, 1117,  6112, 29491, 1183, 7980,  1117, 5813, 29491, 1183, 5144,
      1117, 10452, 29491, 4771, 1246,  1344, 29491, 2155, 1072, 1620,  1844, 29491}},
    {"The pass key is 71432. Remember it. 71432 is the pass key.",
     25,
     {1183,  2223,  2713,  1117,  29473, 29555, 29508, 29549, 29538, 29518, 29491, 14167, 1146,
      29491, 29473, 29555, 29508, 29549, 29538, 29518, 1117,  1040,  2223,  2713,  29491}},
    {"What is the pass key? The pass key is", 10, {2592, 1117, 1040, 2223, 2713, 29572, 1183, 2223, 2713, 1117}},
    {" 71432", 6, {1027, 29555, 29508, 29549, 29538, 29518}},
};

static void test_mistral_golden(void** state) {
    const Tokenizer* t = (const Tokenizer*)*state;
    TokenList ids = {0};
    for (size_t i = 0; i < sizeof golden / sizeof *golden; i++) {
        const char* source = golden[i].text;
        ids.count = 0;
        tokenizer_encode(t, source, strlen(source), &ids);
        assert_same_ids(&ids, golden[i].ids, golden[i].count, source);
        ids.count = 0;
        tokenizer_encode_whole(t, source, strlen(source), &ids);
        assert_same_ids(&ids, golden[i].ids, golden[i].count, source);
        if (strstr(source, SP)) { continue; }  // comes back as a space
        char* back = tokenizer_decode(t, ids.ids, ids.count, NULL);
        assert_string_equal(back, source);
        free(back);
    }
    free(ids.ids);
}

static void test_mistral_decode(void** state) {
    const Tokenizer* t = (const Tokenizer*)*state;
    int ids[] = {1, 23325, 2294, 2, 3, 40000, 781, 4};  // [INST] and [/INST] are control ids too
    char* back = tokenizer_decode(t, ids, 8, NULL);
    assert_string_equal(back, "Hello world\xEF\xBF\xBD\n");
    free(back);
}

static void test_mistral_words_equal_whole(void** state) { check_against_whole((const Tokenizer*)*state, 99, 4000); }

// A word longer than a cache entry, one of more ids than an entry, and words that share a place in the cache.
static void test_mistral_cache(void** state) {
    const Tokenizer* t = (const Tokenizer*)*state;
    TokenList got = {0}, want = {0};
    size_t capacity = 4000000, n = 0;
    char* all = (char*)xcalloc(capacity, 1);
    Random r = {5};
    for (int round = 0; round < 2; round++) {
        n = 0;
        while (n < 300000) {
            size_t value = random_below(&r, 100000), repeat = 1 + random_below(&r, 9);
            for (size_t i = 0; i < repeat; i++) { n += (size_t)sprintf(all + n, "%zx", value); }
            all[n++] = "  \n"[random_below(&r, 3)];
        }
        got.count = want.count = 0;
        tokenizer_encode(t, all, n, &got);
        for (size_t start = 0; start < n;) {  // the reference, a line at a time: the ids of "\n" + line but for two
            size_t end = start;
            while (end < n && all[end] != '\n') { end++; }
            bool first = start == 0;
            size_t from = first ? 0 : start - 1, before = want.count;
            tokenizer_encode_whole(t, all + from, end - from, &want);
            if (!first) {  // drop the dummy prefix of this call
                memmove(want.ids + before, want.ids + before + 1, (want.count - before - 1) * sizeof(int));
                want.count--;
            }
            start = end + 1;
            if (end == n - 1) { token_list_append(&want, (const int[]){781}, 1); }
        }
        assert_same_ids(&got, want.ids, want.count, "random numbers");
    }
    free(all);
    free(got.ids);
    free(want.ids);
}

static void* encode_in_thread(void* argument) {
    check_against_whole((const Tokenizer*)argument, 7, 1500);
    return NULL;
}

static void test_mistral_threads(void** state) {
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++) { assert_int_equal(pthread_create(&threads[i], NULL, encode_in_thread, *state), 0); }
    for (size_t i = 0; i < 4; i++) { pthread_join(threads[i], NULL); }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_words_equal_whole),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_damaged_charsmap),
        cmocka_unit_test_setup_teardown(test_mistral_facts, open_mistral, close_mistral),
        cmocka_unit_test_setup_teardown(test_mistral_golden, open_mistral, close_mistral),
        cmocka_unit_test_setup_teardown(test_mistral_decode, open_mistral, close_mistral),
        cmocka_unit_test_setup_teardown(test_mistral_words_equal_whole, open_mistral, close_mistral),
        cmocka_unit_test_setup_teardown(test_mistral_cache, open_mistral, close_mistral),
        cmocka_unit_test_setup_teardown(test_mistral_threads, open_mistral, close_mistral),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
