/*
Reads input files one after the other in blocks of whole documents. A block holds about TEXT_BLOCK_BYTES, more when one
document is larger; memory grows with the largest document only.
*/
#ifndef TEXT_READER_H
#define TEXT_READER_H

#include <fcntl.h>

#include "documents.h"

enum { TEXT_BLOCK_BYTES = 512 << 10 };

typedef struct {
    const char* path;  // "-" = standard input
    Format format;
} Input;

typedef struct {
    const Input* input;
    bool starts_input;  // the first block of its input
    char* bytes;
    size_t size, capacity;
} TextBlock;

typedef struct {
    const Input* inputs;
    size_t count, opened;
    int file;    // -1 = the next input has to be opened
    char* tail;  // what the last block left over
    size_t tail_size, tail_capacity;
} TextReader;

static inline void text_reserve(char** bytes, size_t* capacity, size_t size) {
    if (size <= *capacity) { return; }
    *capacity = size;
    *bytes = (char*)xrealloc(*bytes, size);
}

static inline void text_block_release_if_large(TextBlock* b) {
    if (b->capacity <= 4 * (size_t)TEXT_BLOCK_BYTES) { return; }
    free(b->bytes);
    b->bytes = NULL;
    b->capacity = 0;
}

static inline void input_failed(const Input* input) {
    fatal("%s: %s; expected text that can be read", input->path, strerror(errno));
}

static inline int input_open(const Input* input) {
    int file = strcmp(input->path, "-") == 0 ? STDIN_FILENO : open(input->path, O_RDONLY);
    if (file < 0) { input_failed(input); }
    return file;
}

// Appends to the block until it holds size bytes; false when the input ends before.
static inline bool text_block_read(TextBlock* b, int file, size_t size) {
    text_reserve(&b->bytes, &b->capacity, size);
    while (b->size < size) {
        ssize_t n = read(file, b->bytes + b->size, size - b->size);
        if (n < 0 && errno == EINTR) { continue; }
        if (n < 0) { input_failed(b->input); }
        if (n == 0) { return false; }
        b->size += (size_t)n;
    }
    return true;
}

// A byte order mark at the start of an input is no text.
static inline void text_block_drop_mark(TextBlock* b) {
    if (b->size < 3 || memcmp(b->bytes, "\xEF\xBB\xBF", 3) != 0) { return; }
    b->size -= 3;
    memmove(b->bytes, b->bytes + 3, b->size);
}

// Reads whole documents into b; false when the open input ended, which leaves all of its rest in b.
static inline bool text_reader_fill(TextReader* r, const DocumentRules* rules, TextBlock* b) {
    size_t searched = 0, want = r->tail_size + TEXT_BLOCK_BYTES;
    text_reserve(&b->bytes, &b->capacity, want);
    if (r->tail_size) { memcpy(b->bytes, r->tail, r->tail_size); }
    b->size = r->tail_size;
    r->tail_size = 0;
    for (bool more = true; more; want += want / 2) {
        more = text_block_read(b, r->file, want);
        if (b->starts_input && searched == 0) { text_block_drop_mark(b); }
        size_t cut = more ? documents_cut(rules, b->input->format, b->bytes, b->size, searched) : 0;
        searched = b->size;
        if (cut == 0) { continue; }
        r->tail_size = b->size - cut;
        text_reserve(&r->tail, &r->tail_capacity, r->tail_size);
        if (r->tail_size) { memcpy(r->tail, b->bytes + cut, r->tail_size); }
        b->size = cut;
        return true;
    }
    return false;
}

// The next documents, all of one input; false when all inputs have ended.
static inline bool text_reader_next(TextReader* r, const DocumentRules* rules, TextBlock* b) {
    for (;;) {
        b->starts_input = r->file < 0;
        if (b->starts_input && r->opened == r->count) { return false; }
        if (b->starts_input) { r->file = input_open(&r->inputs[r->opened++]); }
        b->input = &r->inputs[r->opened - 1];
        if (text_reader_fill(r, rules, b)) { return true; }
        if (r->file != STDIN_FILENO) { close(r->file); }
        r->file = -1;
        if (b->size > 0) { return true; }
    }
}

#endif
