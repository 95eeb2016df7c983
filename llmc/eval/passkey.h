/*
Passkey retrieval (Mohtashami & Jaggi 2023; the wording is in passkey_text.h): a number hidden between fillers,
asked for at the end. This file makes the prompts and judges predictions; whoever predicts is a callback, so that a
test's oracle can stand in for the model.

Prompt     task, `depth` fillers, key line, the other fillers, question; each piece tokenised alone, without BOS, and
           the ids put one after another.
Length     for a wanted length N there are n = max(0, (N - task - key line - question) div filler) fillers; the
           real length is what is reported. Below the template's own length n is 0: the documented minimum.
Answer     " " + key tokenised alone. Its first token is a space as it stands at the beginning of a text, which for some
           tokenizers is not the id that a space has inside one.

Three measures of a sample, each 1 if every digit is right:
forced     prompt + answer go in, the arg-max at each predicted digit counts. The published measure.
greedy     only the prompt goes in; what the model itself writes must begin with the key, spaces aside.
natural    as forced, with the text of prompt and answer tokenised as one.
*/
#ifndef PASSKEY_H
#define PASSKEY_H

#include "passkey_text.h"
#include "../tokenizer.h"

enum { PASSKEY_MAX_DIGITS = 18, PASSKEY_MAX_TEXT = 128 };

// predictions[i] = the most probable token after ids[0..first+i], for first + i < count; false to stop.
typedef bool (*PredictFunction)(void* context, const int* ids, size_t count, size_t first, int* predictions);

typedef struct {
    const Tokenizer* tokenizer;
    size_t pred_digits, prefix_digits, digits;  // digits: their sum
    TokenList task, filler, question;
    size_t key_line_count, answer_count;  // tokens
} Passkey;

typedef struct {
    char key[PASSKEY_MAX_DIGITS + 1];
    size_t depth;  // fillers before the key
} PasskeySample;

typedef struct {
    TokenList ids, answer;
} PasskeyPrompt;

typedef struct {
    bool forced, greedy, natural;
    char forced_text[PASSKEY_MAX_TEXT], greedy_text[PASSKEY_MAX_TEXT], natural_text[PASSKEY_MAX_TEXT];
} PasskeyOutcome;

// ----------------------------------------------------------------------------
// pieces

static inline void passkey_encode(const Passkey* p, const char* piece, TokenList* out) {
    tokenizer_encode(p->tokenizer, piece, strlen(piece), out);
}

static inline void passkey_encode_key_line(const Passkey* p, const char* key, TokenList* out) {
    char* line = passkey_key_line(PASSKEY_KEY, key);
    passkey_encode(p, line, out);
    free(line);
}

static inline void passkey_encode_answer(const Passkey* p, const char* key, TokenList* out) {
    char answer[PASSKEY_MAX_DIGITS + 2];
    snprintf(answer, sizeof answer, " %s", key);
    passkey_encode(p, answer, out);
}

// The measures compare token by token, so the ids must end in one token for each digit of the key.
static inline void passkey_check_digits(const Passkey* p, const TokenList* ids, const char* key) {
    bool good = ids->count >= p->digits;
    for (size_t i = 0; good && i < p->digits; i++) {
        char* digit = tokenizer_decode(p->tokenizer, ids->ids + ids->count - p->digits + i, 1, NULL);
        good = digit[0] == key[i] && digit[1] == '\0';
        free(digit);
    }
    if (!good) {
        fatal("%s: the tokenizer does not write %s as one token for each digit; use a tokenizer that splits digits",
              tokenizer_name(p->tokenizer), key);
    }
}

static inline Passkey passkey_open(const Tokenizer* tokenizer, size_t pred_digits, size_t prefix_digits) {
    Passkey p;
    memset(&p, 0, sizeof p);
    p.tokenizer = tokenizer;
    p.pred_digits = pred_digits, p.prefix_digits = prefix_digits, p.digits = pred_digits + prefix_digits;
    if (pred_digits == 0 || p.digits > PASSKEY_MAX_DIGITS) {
        fatal(
            "keys of %zu predicted and %zu prefix digits, expected at least 1 predicted and at most %d in all; correct "
            "--passkey_pred_digits, --passkey_prefix_digits",
            pred_digits, prefix_digits, PASSKEY_MAX_DIGITS);
    }
    passkey_encode(&p, PASSKEY_TASK, &p.task);
    passkey_encode(&p, PASSKEY_FILLER, &p.filler);
    passkey_encode(&p, PASSKEY_QUESTION, &p.question);
    char nines[PASSKEY_MAX_DIGITS + 1] = "";
    memset(nines, '9', p.digits);
    TokenList line = {NULL, 0, 0}, answer = {NULL, 0, 0};
    passkey_encode_key_line(&p, nines, &line);
    passkey_encode_answer(&p, nines, &answer);
    passkey_check_digits(&p, &answer, nines);
    p.key_line_count = line.count, p.answer_count = answer.count;
    free(line.ids);
    free(answer.ids);
    return p;
}

static inline void passkey_close(Passkey* p) {
    free(p->task.ids);
    free(p->filler.ids);
    free(p->question.ids);
    memset(p, 0, sizeof *p);
}

// ----------------------------------------------------------------------------
// lengths, depths, keys

static inline size_t passkey_length(const Passkey* p, size_t fillers) {
    return p->task.count + fillers * p->filler.count + p->key_line_count + p->question.count;
}

static inline size_t passkey_fillers(const Passkey* p, size_t wanted_length) {
    size_t fixed = passkey_length(p, 0);
    return wanted_length > fixed ? (wanted_length - fixed) / p->filler.count : 0;
}

// Tokens of the longest sequence that judging a prompt needs, with room for a natural answer of other length.
static inline size_t passkey_capacity(const Passkey* p, size_t fillers) {
    return passkey_length(p, fillers) + p->answer_count + PASSKEY_MAX_DIGITS;
}

// Value i of `steps` evenly spaced whole numbers from start to end, both included: integer parts, exactly.
static inline size_t passkey_spaced(size_t start, size_t end, size_t steps, size_t i) {
    if (steps < 2) { return start; }
    if (end < start) { return start - (size_t)(((unsigned __int128)(start - end) * i + steps - 2) / (steps - 1)); }
    return start + (size_t)((unsigned __int128)(end - start) * i / (steps - 1));
}

static inline size_t passkey_depth(const char* sampling, size_t fillers, size_t samples, size_t i, Random* random) {
    if (strcmp(sampling, "equidistant") == 0) { return passkey_spaced(0, fillers, samples, i); }
    if (strcmp(sampling, "random") == 0) { return (size_t)random_below(random, (uint64_t)fillers + 1); }
    return strcmp(sampling, "end") == 0 ? fillers : 0;
}

// Depths and keys of the samples of one length. They depend on nothing but the arguments, so an evaluation that goes
// on after an interruption asks what it would have asked. Release with free().
static inline PasskeySample* passkey_samples(const Passkey* p, const char* sampling, PasskeyKeys keys, size_t fillers,
                                             size_t count, uint64_t seed) {
    PasskeySample* s = (PasskeySample*)xcalloc(count, sizeof *s);
    Random random = random_stream(seed, fillers);
    for (size_t i = 0; i < count; i++) {
        s[i].depth = passkey_depth(sampling, fillers, count, i, &random);
        passkey_draw(s[i].key, p->digits, keys, &random);
    }
    return s;
}

typedef struct {
    size_t depth, index;
} PasskeyPlace;

static inline int passkey_compare_places(const void* a, const void* b) {
    const PasskeyPlace *x = (const PasskeyPlace*)a, *y = (const PasskeyPlace*)b;
    if (x->depth != y->depth) { return x->depth < y->depth ? -1 : 1; }
    return (x->index > y->index) - (x->index < y->index);
}

// The order in which samples share most of what a cache holds: by depth. Read downwards, the fillers of the deepest
// prompt serve all others; read upwards they are left whole for a longer prompt that is then read downwards.
// order[samples] is overwritten.
static inline void passkey_order(size_t* order, const PasskeySample* s, size_t samples, bool descending) {
    PasskeyPlace* places = (PasskeyPlace*)xcalloc(samples, sizeof *places);
    for (size_t i = 0; i < samples; i++) { places[i].depth = s[i].depth, places[i].index = i; }
    qsort(places, samples, sizeof *places, passkey_compare_places);
    for (size_t i = 0; i < samples; i++) { order[descending ? samples - 1 - i : i] = places[i].index; }
    free(places);
}

// ----------------------------------------------------------------------------
// prompts

static inline PasskeyPrompt passkey_prompt(const Passkey* p, const PasskeySample* s, size_t fillers) {
    PasskeyPrompt prompt;
    memset(&prompt, 0, sizeof prompt);
    token_list_reserve(&prompt.ids, passkey_capacity(p, fillers));
    token_list_append(&prompt.ids, p->task.ids, p->task.count);
    for (size_t i = 0; i < s->depth; i++) { token_list_append(&prompt.ids, p->filler.ids, p->filler.count); }
    passkey_encode_key_line(p, s->key, &prompt.ids);
    for (size_t i = s->depth; i < fillers; i++) { token_list_append(&prompt.ids, p->filler.ids, p->filler.count); }
    token_list_append(&prompt.ids, p->question.ids, p->question.count);
    passkey_encode_answer(p, s->key, &prompt.answer);
    passkey_check_digits(p, &prompt.answer, s->key);
    if (prompt.ids.count != passkey_length(p, fillers) || prompt.answer.count != p->answer_count) {
        fatal("%s: the key %s makes a prompt of %zu tokens, others of %zu; use a tokenizer that splits digits",
              tokenizer_name(p->tokenizer), s->key, prompt.ids.count, passkey_length(p, fillers));
    }
    return prompt;
}

static inline void passkey_prompt_free(PasskeyPrompt* prompt) {
    free(prompt->ids.ids);
    free(prompt->answer.ids);
}

// Prompt and answer as one text, tokenised as one.
static inline TokenList passkey_natural(const Passkey* p, const PasskeyPrompt* prompt, const char* key) {
    TokenList ids = {NULL, 0, 0};
    char* question = tokenizer_decode(p->tokenizer, prompt->ids.ids, prompt->ids.count, NULL);
    char* all = text("%s %s", question, key);
    passkey_encode(p, all, &ids);
    passkey_check_digits(p, &ids, key);
    free(question);
    free(all);
    return ids;
}

// ----------------------------------------------------------------------------
// judging

// The text of ids without control characters, which would act on a terminal.
static inline void passkey_readable(const Passkey* p, const int* ids, size_t n, char out[PASSKEY_MAX_TEXT]) {
    char* decoded = tokenizer_decode(p->tokenizer, ids, n, NULL);
    snprintf(out, PASSKEY_MAX_TEXT, "%s", decoded);
    free(decoded);
    for (char* c = out; *c; c++) { *c = (unsigned char)*c < ' ' || *c == 0x7f ? ' ' : *c; }
}

// Whether the last digits of ids[count], given what stands before each, are the most probable.
static inline bool passkey_forced(const Passkey* p, const int* ids, size_t count, PredictFunction predict,
                                  void* context, bool* right, char out[PASSKEY_MAX_TEXT]) {
    int predictions[PASSKEY_MAX_DIGITS];
    size_t first = count - p->pred_digits;
    if (!predict(context, ids, count - 1, first - 1, predictions)) { return false; }
    *right = memcmp(predictions, ids + first, p->pred_digits * sizeof(int)) == 0;
    passkey_readable(p, predictions, p->pred_digits, out);
    return true;
}

// Appends as many tokens as the answer has to ids, each the most probable one.
static inline bool passkey_greedy(const Passkey* p, TokenList* ids, const char* key, PredictFunction predict,
                                  void* context, bool* right, char out[PASSKEY_MAX_TEXT]) {
    size_t start = ids->count;
    for (size_t i = 0; i < p->answer_count; i++) {
        int next;
        if (!predict(context, ids->ids, ids->count, ids->count - 1, &next)) { return false; }
        token_list_append(ids, &next, 1);
    }
    passkey_readable(p, ids->ids + start, p->answer_count, out);
    *right = strncmp(out + strspn(out, " "), key, p->digits) == 0;
    ids->count = start;
    return true;
}

// Judges one prompt by all measures; false when the predictions were stopped.
static inline bool passkey_judge(const Passkey* p, PasskeyPrompt* prompt, const char* key, PredictFunction predict,
                                 void* context, PasskeyOutcome* o) {
    TokenList *ids = &prompt->ids, natural = passkey_natural(p, prompt, key);
    bool going = passkey_greedy(p, ids, key, predict, context, &o->greedy, o->greedy_text);
    size_t length = ids->count;
    token_list_append(ids, prompt->answer.ids, prompt->answer.count);
    going = going && passkey_forced(p, ids->ids, ids->count, predict, context, &o->forced, o->forced_text);
    ids->count = length;
    going = going && passkey_forced(p, natural.ids, natural.count, predict, context, &o->natural, o->natural_text);
    free(natural.ids);
    return going;
}

#endif
