/*
One string field out of a line of JSON Lines (RFC 8259), decoded in place. The whole line is checked, not only the
field: a damaged line is an error, never a shortened document. Unlike cJSON it keeps \u0000 and allocates nothing.
*/
#ifndef JSON_TEXT_H
#define JSON_TEXT_H

#include "util.h"

enum { JSON_MAX_DEPTH = 256 };

typedef struct {
    char *start, *p, *end;
    const char* error;  // NULL while all is well
    bool replaced;      // half a surrogate pair became U+FFFD
    unsigned depth;
} Json;

// Records the first error; returns false.
static inline bool json_fail(Json* j, const char* error) {
    if (!j->error) { j->error = error; }
    return false;
}

static inline void json_skip_blanks(Json* j) {
    while (j->p < j->end && (*j->p == ' ' || *j->p == '\t' || *j->p == '\r' || *j->p == '\n')) { j->p++; }
}

// Steps over c if it comes next.
static inline bool json_take(Json* j, char c) {
    if (j->p == j->end || *j->p != c) { return false; }
    j->p++;
    return true;
}

static inline char* utf8_write(char* out, uint32_t c) {
    if (c < 0x80) {
        *out++ = (char)c;
    } else if (c < 0x800) {
        *out++ = (char)(0xC0 | c >> 6);
        *out++ = (char)(0x80 | (c & 63));
    } else if (c < 0x10000) {
        *out++ = (char)(0xE0 | c >> 12);
        *out++ = (char)(0x80 | (c >> 6 & 63));
        *out++ = (char)(0x80 | (c & 63));
    } else {
        *out++ = (char)(0xF0 | c >> 18);
        *out++ = (char)(0x80 | (c >> 12 & 63));
        *out++ = (char)(0x80 | (c >> 6 & 63));
        *out++ = (char)(0x80 | (c & 63));
    }
    return out;
}

// The four digits of \uXXXX.
static inline bool json_hex(Json* j, uint32_t* value) {
    if (j->end - j->p < 4) { return json_fail(j, "\\u needs four hexadecimal digits"); }
    *value = 0;
    for (int i = 0; i < 4; i++) {
        char c = *j->p++;
        bool digit = c >= '0' && c <= '9', letter = (c | 32) >= 'a' && (c | 32) <= 'f';
        if (!digit && !letter) { return json_fail(j, "\\u needs four hexadecimal digits"); }
        *value = 16 * *value + (uint32_t)(digit ? c - '0' : (c | 32) - 'a' + 10);
    }
    return true;
}

// What follows \u, second halves included. Halves without their other half are legal JSON but no text.
static inline bool json_unicode(Json* j, char** out) {
    uint32_t c, low;
    if (!json_hex(j, &c)) { return false; }
    if (c >= 0xD800 && c < 0xDC00 && j->end - j->p >= 2 && j->p[0] == '\\' && j->p[1] == 'u') {
        char* second = j->p;
        j->p += 2;
        if (!json_hex(j, &low)) { return false; }
        if (low >= 0xDC00 && low < 0xE000) {
            c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
        } else {
            j->p = second;
        }
    }
    if (c >= 0xD800 && c < 0xE000) {
        c = 0xFFFD;
        j->replaced = true;
    }
    *out = utf8_write(*out, c);
    return true;
}

// A string at its opening quote; the decoded bytes overwrite it, as they are never longer.
static inline bool json_string(Json* j, char** string, size_t* length) {
    static const char escapes[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    if (!json_take(j, '"')) { return json_fail(j, "expected a string"); }
    char* out = *string = j->p;
    for (;;) {
        char* run = j->p;
        while (j->p < j->end && *j->p != '"' && *j->p != '\\' && (unsigned char)*j->p >= 0x20) { j->p++; }
        size_t n = (size_t)(j->p - run);
        if (out != run) { memmove(out, run, n); }
        out += n;
        if (j->p == j->end) { return json_fail(j, "the string does not end"); }
        char c = *j->p;
        if ((unsigned char)c < 0x20) { return json_fail(j, "control character in a string"); }
        j->p++;
        if (c == '"') { break; }
        c = j->p < j->end ? *j->p++ : '\0';
        const char* escape = c ? strchr(escapes, c) : NULL;
        if (escape) {
            *out++ = meanings[escape - escapes];
        } else if (c != 'u') {
            return json_fail(j, "unknown escape in a string");
        } else if (!json_unicode(j, &out)) {
            return false;
        }
    }
    *length = (size_t)(out - *string);
    return true;
}

static inline bool json_digits(Json* j) {
    char* first = j->p;
    while (j->p < j->end && *j->p >= '0' && *j->p <= '9') { j->p++; }
    return j->p > first || json_fail(j, "expected a digit");
}

static inline bool json_number(Json* j) {
    json_take(j, '-');
    if (!json_take(j, '0') && !json_digits(j)) { return false; }
    if (json_take(j, '.') && !json_digits(j)) { return false; }
    if (json_take(j, 'e') || json_take(j, 'E')) {
        if (!json_take(j, '+')) { json_take(j, '-'); }
        return json_digits(j);
    }
    return true;
}

static inline bool json_word(Json* j, const char* word) {
    size_t n = strlen(word);
    if ((size_t)(j->end - j->p) < n || memcmp(j->p, word, n) != 0) { return json_fail(j, "expected a value"); }
    j->p += n;
    return true;
}

static inline bool json_skip_value(Json* j);

// The rest of an object or array behind its opening bracket. The top object's string called field, if it is there,
// goes to *text; field is NULL further down.
static inline bool json_members(Json* j, char close, const char* field, char** text, size_t* length) {
    if (++j->depth > JSON_MAX_DEPTH) { return json_fail(j, "nested too deeply"); }
    json_skip_blanks(j);
    for (bool more = !json_take(j, close); more;) {
        bool wanted = false;
        if (close == '}') {
            char* key;
            size_t key_length;
            json_skip_blanks(j);
            if (!json_string(j, &key, &key_length)) { return false; }
            wanted = field && key_length == strlen(field) && memcmp(key, field, key_length) == 0;
            json_skip_blanks(j);
            if (!json_take(j, ':')) { return json_fail(j, "expected ':'"); }
        }
        json_skip_blanks(j);
        if (wanted && (j->p == j->end || *j->p != '"')) { return json_fail(j, "the text field is no string"); }
        if (!(wanted ? json_string(j, text, length) : json_skip_value(j))) { return false; }
        json_skip_blanks(j);
        more = json_take(j, ',');
        if (!more && !json_take(j, close)) {
            return json_fail(j, close == '}' ? "expected ',' or '}'" : "expected ',' or ']'");
        }
    }
    j->depth--;
    return true;
}

static inline bool json_skip_value(Json* j) {
    char* string;
    size_t length;
    switch (j->p < j->end ? *j->p : '\0') {
        case '"': return json_string(j, &string, &length);
        case '{': return j->p++, json_members(j, '}', NULL, NULL, NULL);
        case '[': return j->p++, json_members(j, ']', NULL, NULL, NULL);
        case 't': return json_word(j, "true");
        case 'f': return json_word(j, "false");
        case 'n': return json_word(j, "null");
        case '-':
        case '0':
        case '1':
        case '2':
        case '3':
        case '4':
        case '5':
        case '6':
        case '7':
        case '8':
        case '9': return json_number(j);
        default: return json_fail(j, "expected a value");
    }
}

// line[n] must be one object; its string called field becomes text[length], inside line. A field given twice: the last
// one counts. On false j->error says what is wrong and j->p where.
static inline bool json_text_field(Json* j, char* line, size_t n, const char* field, char** text, size_t* length) {
    Json fresh = {line, line, line + n, NULL, false, 0};
    *j = fresh;
    *text = NULL;
    json_skip_blanks(j);
    if (!json_take(j, '{')) { return json_fail(j, "expected an object"); }
    if (!json_members(j, '}', field, text, length)) { return false; }
    json_skip_blanks(j);
    if (j->p < j->end) { return json_fail(j, "text after the object"); }
    return *text || json_fail(j, "the text field is missing");
}

#endif
