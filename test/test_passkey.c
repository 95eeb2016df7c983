/*
The passkey task without a model: prompts against ids computed elsewhere, lengths, depths and keys, judging with oracles
that copy, err or guess, the order that shares most of a cache; the progress bar.
*/
#include "../llmc/eval/evaluate_args.h"
#include "../llmc/progress.h"
#include "model_util.h"

typedef struct {
    const Tokenizer* bytes;
    const Tokenizer* mistral;
} Tokenizers;

static Tokenizers tokenizers;

static int open_tokenizers(void** state) {
    (void)state;
    const char* path = mistral_path();
    if (!path) { return 1; }
    tokenizers.bytes = tokenizer_open("bytes");
    tokenizers.mistral = tokenizer_open(path);
    return 0;
}

static int close_tokenizers(void** state) {
    (void)state;
    tokenizer_close((Tokenizer*)tokenizers.bytes);
    tokenizer_close((Tokenizer*)tokenizers.mistral);
    return 0;
}

static void append(TokenList* list, const int* ids, size_t n) { token_list_append(list, ids, n); }

static void assert_ids(const TokenList* got, const TokenList* want) {
    assert_int_equal(got->count, want->count);
    assert_memory_equal(got->ids, want->ids, want->count * sizeof(int));
}

// ----------------------------------------------------------------------------
// prompts

// Computed with the Python package sentencepiece from the Mistral model file; the key is 71432.
static const int golden_task[] = {2155, 1117,  1164, 3046, 5699, 8686,  4184, 1032, 2823,  1070, 28499,
                                  3013, 29491, 9537, 1146, 1072, 16354, 1421, 1474, 29491, 1083, 1390,
                                  1294, 1231,  1136, 1452, 1040, 3046,  2639, 1504, 29491};
static const int golden_filler[] = {1183, 10877, 1117,  6112, 29491, 1183, 7980,  1117, 5813, 29491, 1183, 5144,
                                    1117, 10452, 29491, 4771, 1246,  1344, 29491, 2155, 1072, 1620,  1844, 29491};
static const int golden_line[] = {1183,  2223,  2713,  1117, 29473, 29555, 29508, 29549, 29538,
                                  29518, 29491, 14167, 1146, 29491, 29473, 29555, 29508, 29549,
                                  29538, 29518, 1117,  1040, 2223,  2713,  29491};
static const int golden_question[] = {2592, 1117, 1040, 2223, 2713, 29572, 1183, 2223, 2713, 1117};
static const int golden_answer[] = {1027, 29555, 29508, 29549, 29538, 29518};
#define COUNT(array) (sizeof(array) / sizeof *(array))

static void test_golden_prompt(void** state) {
    (void)state;
    Passkey p = passkey_open(tokenizers.mistral, 5, 0);
    PasskeySample sample = {"71432", 1};
    PasskeyPrompt prompt = passkey_prompt(&p, &sample, 3);
    TokenList want = {0}, answer = {(int*)golden_answer, COUNT(golden_answer), 0};
    append(&want, golden_task, COUNT(golden_task));
    append(&want, golden_filler, COUNT(golden_filler));
    append(&want, golden_line, COUNT(golden_line));
    for (int i = 0; i < 2; i++) { append(&want, golden_filler, COUNT(golden_filler)); }
    append(&want, golden_question, COUNT(golden_question));
    assert_ids(&prompt.ids, &want);
    assert_ids(&prompt.answer, &answer);
    // the digits are the ids of the key inside the prompt; only the space before them is another one there
    assert_memory_equal(golden_answer + 1, golden_line + 5, 5 * sizeof(int));
    TokenList natural = passkey_natural(&p, &prompt, "71432");
    append(&want, golden_line + 4, 6);
    assert_ids(&natural, &want);
    free(want.ids);
    free(natural.ids);
    passkey_prompt_free(&prompt);
    passkey_close(&p);
}

static void test_bytes_prompt(void** state) {
    (void)state;
    static const char task[] =
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz "
        "you about the important information there.";
    static const char filler[] =
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";
    char* want = text(
        "%s%s%sThe pass key is 190. Remember it. 190 is the pass key.%sWhat is the pass key? The pass "
        "key is",
        task, filler, filler, filler);
    Passkey p = passkey_open(tokenizers.bytes, 2, 1);
    PasskeySample sample = {"190", 2};
    PasskeyPrompt prompt = passkey_prompt(&p, &sample, 3);
    assert_int_equal(prompt.ids.count, strlen(want));
    for (size_t i = 0; want[i]; i++) { assert_int_equal(prompt.ids.ids[i], want[i]); }
    assert_int_equal(prompt.answer.count, 4);
    for (size_t i = 0; i < 4; i++) { assert_int_equal(prompt.answer.ids[i], " 190"[i]); }
    free(want);
    passkey_prompt_free(&prompt);
    passkey_close(&p);
}

static void open_undivided(void* argument) { passkey_open((const Tokenizer*)argument, 5, 0); }

// A tokenizer with a piece of two digits cannot be compared digit by digit.
static void test_undivided_digits(void** state) {
    (void)state;
    static const char* const pieces[] = {"99", "9", NULL};
    ModelRecipe recipe = {pieces, NULL, 0, MODEL_BPE, true, true, true, false};
    char folder[64], *path = text("%s/m.model", scratch_folder(folder));
    model_create(path, &recipe);
    Tokenizer* t = tokenizer_open(path);
    expect_fatal(open_undivided, t, (const char* const[]){path, "99999", "splits digits", NULL});
    tokenizer_close(t);
    unlink(path);
    rmdir(folder);
    free(path);
}

// ----------------------------------------------------------------------------
// lengths, depths, keys

static void test_lengths(void** state) {
    (void)state;
    Passkey p = passkey_open(tokenizers.mistral, 5, 0);
    assert_int_equal(passkey_length(&p, 0), 31 + 25 + 10);
    static const size_t cases[][2] = {{0, 0},  {1, 0},  {65, 0},    {66, 0},       {67, 0},
                                      {89, 0}, {90, 1}, {1000, 38}, {32768, 1362}, {1000000, 41663}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        assert_int_equal(passkey_fillers(&p, cases[i][0]), cases[i][1]);
        size_t real = passkey_length(&p, cases[i][1]);
        assert_true(cases[i][1] == 0 || (real <= cases[i][0] && real + 24 > cases[i][0]));
        assert_int_equal(passkey_fillers(&p, real), cases[i][1]);  // a real length asks for itself
    }
    passkey_close(&p);
}

static void test_spacing(void** state) {
    (void)state;
    static const size_t standard[] = {0, 3640, 7281, 10922, 14563, 18204, 21845, 25486, 29127, 32768};
    static const size_t depths[] = {0, 0, 1, 2, 3};    // 0, 0.75, 1.5, 2.25, 3
    static const size_t falling[] = {10, 7, 5, 2, 0};  // 10, 7.5, 5, 2.5, 0
    for (size_t i = 0; i < 10; i++) { assert_int_equal(passkey_spaced(0, 32768, 10, i), standard[i]); }
    for (size_t i = 0; i < 5; i++) {
        assert_int_equal(passkey_spaced(0, 3, 5, i), depths[i]);
        assert_int_equal(passkey_spaced(10, 0, 5, i), falling[i]);
        assert_int_equal(passkey_spaced(4, 4, 5, i), 4);
    }
    assert_int_equal(passkey_spaced(3, 9, 1, 0), 3);
}

static void check_fillers(const char* const* flags, int count, const size_t* want, size_t want_count) {
    EvaluateArgs a;
    Options o = evaluate_options(&a);
    options_parse(&o, count, (char**)flags);
    Passkey p = passkey_open(tokenizers.mistral, 5, 0);
    size_t n, *fillers = evaluate_fillers(&a, &p, &n);
    assert_int_equal(n, want_count);
    assert_memory_equal(fillers, want, n * sizeof(size_t));
    free(fillers);
    passkey_close(&p);
    options_free(&o);
}

// Ascending, and what comes to the same real length only once.
static void test_wanted_lengths(void** state) {
    (void)state;
    static const char* const list[] = {"evaluate", "--passkey_seq_lens", "114", "0", "900", "66", "1", "89", "100"};
    static const char* const spaced[] = {"evaluate", "--linspace_start=66", "--linspace_end=138", "--linspace_steps=7"};
    check_fillers(list, COUNT(list), (const size_t[]){0, 1, 2, 34}, 4);
    check_fillers(spaced, COUNT(spaced), (const size_t[]){0, 1, 2, 3}, 4);
}

static void test_samples(void** state) {
    (void)state;
    enum { N = 400, FILLERS = 30 };
    Passkey p = passkey_open(tokenizers.bytes, 3, 1);
    static const char* const samplings[] = {"equidistant", "random", "beginning", "end"};
    for (size_t k = 0; k < 4; k++) {
        PasskeyKeys keys = k % 2 ? KEYS_HELD_OUT : KEYS_ALL;
        PasskeySample* s = passkey_samples(&p, samplings[k], keys, FILLERS, N, 5);
        PasskeySample* again = passkey_samples(&p, samplings[k], keys, FILLERS, N, 5);
        PasskeySample* other = passkey_samples(&p, samplings[k], keys, FILLERS, N, 6);
        size_t seen = 0, different = 0, held_out = 0;
        for (size_t i = 0; i < N; i++) {
            assert_int_equal(strlen(s[i].key), 4);
            assert_int_equal(strspn(s[i].key, "0123456789"), 4);
            assert_true(s[i].key[0] != '0' && s[i].depth <= FILLERS);
            assert_string_equal(s[i].key, again[i].key);
            assert_int_equal(s[i].depth, again[i].depth);
            different += strcmp(s[i].key, other[i].key) != 0;
            held_out += (s[i].key[0] + s[i].key[1] + s[i].key[2] + s[i].key[3] - 4 * '0') % 10 == 0;
            seen |= (size_t)1 << s[i].depth;
            if (k == 0) { assert_int_equal(s[i].depth, i * FILLERS / (N - 1)); }
        }
        assert_true(different > N * 9 / 10);
        assert_true(keys == KEYS_ALL ? held_out > N / 20 && held_out < N / 5 : held_out == N);
        static const size_t every = ((size_t)1 << (FILLERS + 1)) - 1;
        assert_int_equal(seen, k < 2 ? every : k == 2 ? 1 : (size_t)1 << FILLERS);
        free(s);
        free(again);
        free(other);
    }
    passkey_close(&p);
}

// ----------------------------------------------------------------------------
// judging

// Reads the key where the prompt tells it and says it after the question, but errs at digit wrong_at (< 0: never), or
// guesses.
typedef struct {
    const Tokenizer* tokenizer;
    int wrong_at, question_end, space;
    bool guess, stop;
    Random random;
    size_t calls;
} Oracle;

static int digit_of(const Oracle* o, int id) {
    const char* piece = tokenizer_piece(o->tokenizer, id);
    return piece[0] >= '0' && piece[0] <= '9' && piece[1] == '\0' ? piece[0] - '0' : -1;
}

static int oracle_next(Oracle* o, const int* ids, size_t count) {
    size_t key = 0, said = 0;
    if (o->guess) { return (int)random_below(&o->random, tokenizer_vocab_size(o->tokenizer)); }
    if (ids[count - 1] == o->question_end) { return o->space; }
    while (digit_of(o, ids[key]) < 0) { key++; }
    while (digit_of(o, ids[count - 1 - said]) >= 0) { said++; }
    return (int)said == o->wrong_at ? o->space : ids[key + said];
}

static bool oracle_predict(void* context, const int* ids, size_t count, size_t first, int* predictions) {
    Oracle* o = (Oracle*)context;
    o->calls++;
    for (size_t i = first; i < count; i++) { predictions[i - first] = oracle_next(o, ids, i + 1); }
    return !o->stop;
}

typedef struct {
    size_t forced, greedy, natural;
} Hits;

static Hits judge_all(const Passkey* p, Oracle* o, const char* sampling, size_t fillers, size_t n) {
    Hits hits = {0, 0, 0};
    PasskeySample* s = passkey_samples(p, sampling, KEYS_ALL, fillers, n, 1);
    for (size_t i = 0; i < n; i++) {
        PasskeyPrompt prompt = passkey_prompt(p, &s[i], fillers);
        PasskeyOutcome outcome;
        assert_true(passkey_judge(p, &prompt, s[i].key, oracle_predict, o, &outcome));
        assert_int_equal(prompt.ids.count, passkey_length(p, fillers));
        hits.forced += outcome.forced, hits.greedy += outcome.greedy, hits.natural += outcome.natural;
        if (outcome.greedy) { assert_non_null(strstr(outcome.greedy_text, s[i].key)); }
        if (outcome.forced) { assert_string_equal(outcome.forced_text, s[i].key + p->prefix_digits); }
        passkey_prompt_free(&prompt);
    }
    free(s);
    return hits;
}

static Oracle oracle_of(const Passkey* p, int space, int wrong_at, bool guess) {
    Oracle o;
    memset(&o, 0, sizeof o);
    o.tokenizer = p->tokenizer, o.wrong_at = wrong_at, o.guess = guess, o.random.state = 3;
    o.question_end = p->question.ids[p->question.count - 1];
    o.space = space;
    return o;
}

// An oracle scores 100 %; one that errs scores 0, except that what is wrong about given digits shows only in what it
// says by itself; a guesser scores 0.
static void test_oracles(void** state) {
    (void)state;
    enum { N = 12, PREFIX = 2 };
    static const char* const samplings[] = {"equidistant", "random", "beginning", "end"};
    for (size_t t = 0; t < 2; t++) {
        for (size_t prefix = 0; prefix <= PREFIX; prefix += PREFIX) {
            Passkey p = passkey_open(t ? tokenizers.mistral : tokenizers.bytes, 3, prefix);
            for (size_t k = 0; k < 4; k++) {
                for (int wrong = -1; wrong < (int)p.digits; wrong++) {
                    Oracle o = oracle_of(&p, t ? 29473 : ' ', wrong, false);
                    Hits h = judge_all(&p, &o, samplings[k], 4 * k, N);
                    bool unseen = wrong < (int)prefix;
                    assert_int_equal(h.forced, unseen ? N : 0);
                    assert_int_equal(h.natural, unseen ? N : 0);
                    assert_int_equal(h.greedy, wrong < 0 ? N : 0);
                }
            }
            Oracle o = oracle_of(&p, 0, -1, true);
            Hits h = judge_all(&p, &o, "random", 2, N);
            assert_int_equal(h.forced + h.greedy + h.natural, 0);
            passkey_close(&p);
        }
    }
}

static void test_stopped_predictor(void** state) {
    (void)state;
    Passkey p = passkey_open(tokenizers.bytes, 5, 0);
    PasskeySample s = {"12345", 0};
    PasskeyPrompt prompt = passkey_prompt(&p, &s, 0);
    PasskeyOutcome outcome;
    Oracle o = oracle_of(&p, ' ', -1, false);
    o.stop = true;
    assert_false(passkey_judge(&p, &prompt, s.key, oracle_predict, &o, &outcome));
    assert_int_equal(o.calls, 1);
    passkey_prompt_free(&prompt);
    passkey_close(&p);
}

// ----------------------------------------------------------------------------
// sharing

// Counts the tokens that a cache would have to read.
typedef struct {
    TokenList held;
    size_t read;
} Counter;

static bool count_predict(void* context, const int* ids, size_t count, size_t first, int* predictions) {
    Counter* c = (Counter*)context;
    size_t same = 0;
    while (same < first && same < c->held.count && c->held.ids[same] == ids[same]) { same++; }
    c->read += count - same;
    c->held.count = 0;
    token_list_append(&c->held, ids, count);
    memset(predictions, 0, (count - first) * sizeof(int));
    return true;
}

static size_t tokens_read(const Passkey* p, Counter* c, size_t fillers, size_t n, bool descending) {
    size_t *order = (size_t*)xcalloc(n, sizeof(size_t)), before = c->read;
    PasskeySample* s = passkey_samples(p, "equidistant", KEYS_ALL, fillers, n, 1);
    passkey_order(order, s, n, descending);
    for (size_t i = 0; i < n; i++) {
        PasskeyPrompt prompt = passkey_prompt(p, &s[order[i]], fillers);
        PasskeyOutcome outcome;
        passkey_judge(p, &prompt, s[order[i]].key, count_predict, c, &outcome);
        passkey_prompt_free(&prompt);
    }
    free(order);
    free(s);
    return c->read - before;
}

// Fillers before a key are read once per length, and downwards not even what the length before has left.
static void test_shared_prefixes(void** state) {
    (void)state;
    enum { SAMPLES = 6, SHORT = 20, LONG = 40 };
    Passkey p = passkey_open(tokenizers.bytes, 5, 0);
    Counter c = {{0}, 0};
    size_t f = p.filler.count, fixed = p.task.count, rest = p.key_line_count + p.question.count;
    // greedy: 6 tokens, the first from the question's end; forced and natural: 5 tokens each or, shared, fewer
    size_t answers = 5 + 5 + 5, slack = SAMPLES * (answers + 16);
    size_t up = tokens_read(&p, &c, SHORT, SAMPLES, false), down = tokens_read(&p, &c, LONG, SAMPLES, true);
    size_t tails_up = 0, tails_down = 0;
    for (size_t i = 0; i < SAMPLES; i++) {
        tails_up += (SHORT - SHORT * i / (SAMPLES - 1)) * f + rest;
        tails_down += (LONG - LONG * i / (SAMPLES - 1)) * f + rest;
    }
    assert_true(up <= fixed + SHORT * f + tails_up + slack && up + slack >= fixed + SHORT * f + tails_up);
    assert_true(down <= (LONG - SHORT) * f + tails_down + slack);
    free(c.held.ids);
    passkey_close(&p);
}

// ----------------------------------------------------------------------------

static void test_progress_bar(void** state) {
    (void)state;
    char line[PROGRESS_BUFFER];
    static const double shares[] = {0, 0.25, 1, 7, -1, NAN}, left[] = {0, 80, 3.5e6, NAN, INFINITY};
    for (size_t i = 0; i < COUNT(shares); i++) {
        for (size_t k = 0; k < COUNT(left); k++) {
            format_progress_bar(line, "perplexity", shares[i], "length 1000000000, 100000/100000", left[k]);
            assert_true(strlen(line) <= PROGRESS_COLUMNS);
        }
    }
    format_progress_bar(line, "passkey", 0.25, "length 3640, 5/20", 80);
    assert_string_equal(line, "passkey [####--------------]  25 % | length 3640, 5/20 | 1m20s left");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_prompt),     cmocka_unit_test(test_bytes_prompt),
        cmocka_unit_test(test_undivided_digits),  cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_spacing),           cmocka_unit_test(test_wanted_lengths),
        cmocka_unit_test(test_samples),           cmocka_unit_test(test_oracles),
        cmocka_unit_test(test_stopped_predictor), cmocka_unit_test(test_shared_prefixes),
        cmocka_unit_test(test_progress_bar),
    };
    return cmocka_run_group_tests(tests, open_tokenizers, close_tokenizers);
}
