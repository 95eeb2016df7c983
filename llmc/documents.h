/*
Where documents begin and end, in blocks of an input file that are cut between documents.

  txt    documents are separated by blank lines (nothing but a line end), and lose the line end of their last line; or
         by a separator string, and lose one line end at each end, so that separators may stand on a line of their own;
         or each file is one document, without the blank lines around it and the line end of its last line
  jsonl  one object a line, the document is its text field; blank lines are skipped

documents_cut() finds where a block can be cut, document_next() walks through the block.

A program that streams jsonl may announce it, so that a stream that was cut short is known from a whole one
(stream_marks.h). Its marks are lines of their own: objects whose first key is bamc_stream.
*/
#ifndef DOCUMENTS_H
#define DOCUMENTS_H

#include "json_text.h"

typedef enum { FORMAT_TXT, FORMAT_JSONL } Format;

typedef struct {
    const char* separator;  // separator_length 0 = blank lines
    size_t separator_length;
    const char* text_field;
    bool raw_lines;    // the separator holds a \r without \n: line ends are left as they are
    bool whole_files;  // a txt file is one document
} DocumentRules;

// A line that is no document but says where a stream begins, ends or failed.
typedef struct {
    const char* text;  // in the block
    size_t length;
    size_t line;       // of the block, from 0
    size_t documents;  // of the block before it, empty ones included
} StreamMark;

typedef struct {
    StreamMark* items;
    size_t count, capacity;
} StreamMarks;

// A walk through the documents of text[p..end); line counts from 0 at the start of the block.
typedef struct {
    char *p, *end;
    size_t line;
    size_t documents, separators;  // so far
    StreamMarks* marks;            // where they are put down
    Json json;
    bool failed;  // json.error says why, line where
} DocumentCursor;

static inline DocumentCursor document_cursor(char* block, size_t size, StreamMarks* marks) {
    DocumentCursor c;
    memset(&c, 0, sizeof c);
    c.p = block;
    c.end = block + size;
    c.marks = marks;
    marks->count = 0;
    return c;
}

// Is the newline at block[i] the end of a blank line? The block starts where a line starts.
static inline bool is_blank_line_end(const char* block, size_t i) {
    if (i > 0 && block[i - 1] == '\r') { i--; }
    return i == 0 || block[i - 1] == '\n';
}

// How much of block[size] is whole documents, 0 when none is known to be. Earlier calls found none in block[from].
static inline size_t documents_cut(const DocumentRules* rules, Format format, const char* block, size_t size,
                                   size_t from) {
    size_t n = rules->separator_length, cut = 0;
    if (format == FORMAT_TXT && rules->whole_files) { return 0; }
    if (format == FORMAT_TXT && n > 0) {
        from = from >= n ? from - n + 1 : 0;
        for (const char* s; (s = (const char*)memmem(block + from, size - from, rules->separator, n)) != NULL;) {
            cut = from = (size_t)(s - block) + n;
        }
        return cut;
    }
    for (size_t end = size; end > from;) {
        const char* newline = (const char*)memrchr(block + from, '\n', end - from);
        if (!newline) { return 0; }
        end = (size_t)(newline - block);
        if (format == FORMAT_JSONL || is_blank_line_end(block, end)) { return end + 1; }
    }
    return 0;
}

// The line at c->p without its line end; steps over it.
static inline char* cursor_line(DocumentCursor* c, size_t* length) {
    char *line = c->p, *newline = (char*)memchr(line, '\n', (size_t)(c->end - line));
    char* end = newline ? newline : c->end;
    c->p = newline ? newline + 1 : c->end;
    *length = (size_t)(end - line) - (end > line && end[-1] == '\r');
    return line;
}

static inline bool next_between_blank_lines(DocumentCursor* c, char** text, size_t* length) {
    size_t n;
    char *start = NULL, *end = NULL;
    while (c->p < c->end) {
        char* line = cursor_line(c, &n);
        if (n == 0 && start) { break; }
        if (n == 0) { continue; }
        if (!start) { start = line; }
        end = line + n;
    }
    if (!start) { return false; }
    *text = start;
    *length = (size_t)(end - start);
    return true;
}

static inline bool next_between_separators(const DocumentRules* rules, DocumentCursor* c, char** text, size_t* length) {
    char *start = c->p, *end = c->end, *separator = NULL;
    if (start < end) {
        separator = (char*)memmem(start, (size_t)(end - start), rules->separator, rules->separator_length);
    }
    if (separator) { end = separator; }
    c->separators += separator != NULL;
    c->p = separator ? separator + rules->separator_length : c->end;
    if (start < end && *start == '\r' && end - start > 1 && start[1] == '\n') { start++; }
    if (start < end && *start == '\n') { start++; }
    if (start < end && end[-1] == '\n') {
        end--;
        if (start < end && end[-1] == '\r') { end--; }
    }
    *text = start;
    *length = (size_t)(end - start);
    return separator || *length > 0;
}

static inline bool next_whole_file(DocumentCursor* c, char** text, size_t* length) {
    size_t n;
    char *start = NULL, *end = NULL;
    while (c->p < c->end) {
        char* line = cursor_line(c, &n);
        if (n == 0) { continue; }
        if (!start) { start = line; }
        end = line + n;
    }
    *text = start;
    *length = start ? (size_t)(end - start) : 0;
    return start != NULL;
}

#define STREAM_MARK_KEY "bamc_stream"

// line[n] without blanks before it.
static inline bool is_stream_mark(const char* line, size_t n) {
    static const char key[] = "\"" STREAM_MARK_KEY "\"";
    size_t i = 1;
    if (n == 0 || *line != '{') { return false; }
    while (i < n && (line[i] == ' ' || line[i] == '\t')) { i++; }
    return n - i >= sizeof key - 1 && memcmp(line + i, key, sizeof key - 1) == 0;
}

static inline bool take_stream_mark(DocumentCursor* c, char* line, size_t n, size_t line_number) {
    StreamMarks* marks = c->marks;
    char* said;
    size_t length;
    if (!json_text_field(&c->json, line, n, STREAM_MARK_KEY, &said, &length)) { return false; }
    if (marks->count == marks->capacity) {
        marks->capacity = 2 * marks->capacity + 4;
        marks->items = (StreamMark*)xrealloc(marks->items, marks->capacity * sizeof *marks->items);
    }
    StreamMark mark = {said, length, line_number, c->documents};
    marks->items[marks->count++] = mark;
    return true;
}

static inline bool next_json_line(const DocumentRules* rules, DocumentCursor* c, char** text, size_t* length) {
    while (c->p < c->end) {
        size_t n, line_number = c->line++;
        char* line = cursor_line(c, &n);
        size_t blanks = 0;
        while (blanks < n && (line[blanks] == ' ' || line[blanks] == '\t')) { blanks++; }
        if (blanks == n) { continue; }
        if (is_stream_mark(line + blanks, n - blanks)) {
            if (take_stream_mark(c, line, n, line_number)) { continue; }
        } else if (json_text_field(&c->json, line, n, rules->text_field, text, length)) {
            return true;
        }
        c->line = line_number;
        c->failed = true;
        return false;
    }
    return false;
}

// The next document, a part of the block (JSON is decoded in place); false at the end or when c->failed. Separators
// with nothing between them give an empty document.
static inline bool document_next(const DocumentRules* rules, Format format, DocumentCursor* c, char** text,
                                 size_t* length) {
    c->json.replaced = false;
    bool found = format == FORMAT_JSONL    ? next_json_line(rules, c, text, length)
                 : rules->whole_files      ? next_whole_file(c, text, length)
                 : rules->separator_length ? next_between_separators(rules, c, text, length)
                                           : next_between_blank_lines(c, text, length);
    c->documents += found;
    return found;
}

// The size of the valid UTF-8 sequence at s[n] (Unicode 15, table 3-7), 0 when there is none.
static inline size_t utf8_sequence(const unsigned char* s, size_t n) {
    unsigned char c = s[0];
    if (c < 0x80) { return 1; }
    size_t size = c >= 0xC2 && c < 0xE0 ? 2 : c >= 0xE0 && c < 0xF0 ? 3 : c >= 0xF0 && c < 0xF5 ? 4 : 0;
    if (size == 0 || size > n) { return 0; }
    unsigned char low = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80, high = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
    if (s[1] < low || s[1] > high) { return 0; }
    for (size_t i = 2; i < size; i++) {
        if ((s[i] & 0xC0) != 0x80) { return 0; }
    }
    return size;
}

static inline bool utf8_is_valid(const char* text, size_t n) {
    const unsigned char* s = (const unsigned char*)text;
    for (size_t i = 0, size; i < n; i += size) {
        uint64_t chunk;
        size = 8;
        if (n - i >= 8 && (memcpy(&chunk, s + i, 8), (chunk & 0x8080808080808080ull) == 0)) { continue; }
        size = utf8_sequence(s + i, n - i);
        if (size == 0) { return false; }
    }
    return true;
}

#endif
