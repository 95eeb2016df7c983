/*
Passkey retrieval (Mohtashami and Jaggi 2023): the wording, the keys, and which keys are kept for evaluation.

A document is task, fillers, key line, fillers, question, key, joined by single spaces. {key} in the key line stands for
the key. A key is held out when its digits sum to a multiple of ten: one key in ten, and from three digits on every
digit as often as among all keys, at every place, so that training without them hints at nothing. Training text made
with hold_out contains no such digits in a row anywhere.
*/
#ifndef PASSKEY_TEXT_H
#define PASSKEY_TEXT_H

#include "../random.h"
#include "../util.h"

#define PASSKEY_TASK                                                                                        \
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will " \
    "quiz you about the important information there."
#define PASSKEY_FILLER "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
#define PASSKEY_KEY "The pass key is {key}. Remember it. {key} is the pass key."
#define PASSKEY_QUESTION "What is the pass key? The pass key is"

typedef enum { KEYS_ALL, KEYS_HELD_OUT, KEYS_TRAINING } PasskeyKeys;

// line with key in place of every {key}; a new string.
static inline char* passkey_key_line(const char* line, const char* key) {
    static const char mark[] = "{key}";
    size_t n = strlen(key);
    char *result = (char*)xcalloc(strlen(line) * (n + 1) + 1, 1), *out = result;
    for (const char* at; (at = strstr(line, mark)) != NULL; line = at + sizeof mark - 1) {
        memcpy(out, line, (size_t)(at - line));
        memcpy(out + (at - line), key, n);
        out += (size_t)(at - line) + n;
    }
    strcpy(out, line);
    return result;
}

static inline bool passkey_is_held_out(const char* digits, size_t n) {
    unsigned sum = 0;
    for (size_t i = 0; i < n; i++) { sum += (unsigned)(digits[i] - '0'); }
    return sum % 10 == 0;
}

// Uniform among the numbers of n digits of this kind, into key[n + 1]. Numbers of one digit are never held out.
static inline void passkey_draw(char* key, size_t n, PasskeyKeys keys, Random* r) {
    assert(n >= 1 && (n >= 2 || keys != KEYS_HELD_OUT));
    do {
        for (size_t i = 0; i < n; i++) {
            key[i] = (char)(i == 0 ? '1' + random_below(r, 9) : '0' + random_below(r, 10));
        }
    } while (keys != KEYS_ALL && passkey_is_held_out(key, n) != (keys == KEYS_HELD_OUT));
    key[n] = '\0';
}

#endif
