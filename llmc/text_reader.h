/*
Reads input files one after the other in blocks of whole documents, each input opened once. A block holds about
TEXT_BLOCK_BYTES, more when one document is larger; memory grows with the largest document only.

Lines of txt end in \n here: \r\n becomes \n, and in a file whose first block has \r but no \n, so does \r alone. A
separator that holds a lone \r leaves them all as they are. A byte order mark goes. What is no text at all, such as a
compressed file, is refused.
*/
#ifndef TEXT_READER_H
#define TEXT_READER_H

#include <fcntl.h>

#include "text_inputs.h"

#ifndef TEXT_BLOCK_BYTES
#define TEXT_BLOCK_BYTES (512 << 10)  // smaller where tests want many blocks
#endif

typedef struct {
    const Input* input;
    bool starts_input;       // the first block of its input; may be empty
    bool had_crlf, cr_only;  // line ends that became \n
    char* bytes;
    size_t size, capacity;
} TextBlock;

typedef struct {
    const Input* inputs;
    size_t count, opened;
    int file;      // -1 = the next input has to be opened
    bool cr_only;  // the open input's lines end in \r alone
    char* tail;    // what the last block left over
    size_t tail_size, tail_capacity;
} TextReader;

static inline TextReader text_reader(const Input* inputs, size_t count) {
    TextReader r = {inputs, count, 0, -1, false, NULL, 0, 0};
    return r;
}

static inline void text_reader_free(TextReader* r) { free(r->tail); }

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

static inline int input_open(const Input* input) {
    int file = strcmp(input->path, "-") == 0 ? STDIN_FILENO : open(input->path, O_RDONLY | O_CLOEXEC);
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

// ----------------------------------------------------------------------------
// the start of an input

static inline void text_block_refuse_other_kinds(const TextBlock* b) {
    static const struct {
        const char *bytes, *kind, *advice;
        size_t size;
    } kinds[] = {
        {"\x1F\x8B", "a gzip file", "unpack it, e.g. zcat FILE through a pipe to -", 2},
        {"\x28\xB5\x2F\xFD", "a zstd file", "unpack it, e.g. zstdcat FILE through a pipe to -", 4},
        {"\xFD"
         "7zXZ",
         "an xz file", "unpack it, e.g. xzcat FILE through a pipe to -", 5},
        {"BZh91AY&SY", "a bzip2 file", "unpack it, e.g. bzcat FILE through a pipe to -", 10},
        {"PK\x03\x04", "a zip file", "unpack it first", 4},
        {"PAR1\x15", "a parquet file", "dataset/fineweb.py --local FILE reads it", 5},
        {"\xFF\xFE", "UTF-16", "convert it, e.g. iconv -f UTF-16 -t UTF-8 FILE", 2},
        {"\xFE\xFF", "UTF-16", "convert it, e.g. iconv -f UTF-16 -t UTF-8 FILE", 2},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (b->size < kinds[i].size || memcmp(b->bytes, kinds[i].bytes, kinds[i].size) != 0) { continue; }
        fatal("%s: found %s, expected text in UTF-8; %s", b->input->name, kinds[i].kind, kinds[i].advice);
    }
    if (b->input->format == FORMAT_TXT && is_stream_mark(b->bytes, b->size)) {
        fatal("%s: found a stream of JSON Lines, expected txt; give --format jsonl", b->input->name);
    }
}

// A byte order mark at the start of an input is no text.
static inline void text_block_drop_mark(TextBlock* b) {
    if (b->size < 3 || memcmp(b->bytes, "\xEF\xBB\xBF", 3) != 0) { return; }
    b->size -= 3;
    memmove(b->bytes, b->bytes + 3, b->size);
}

static inline void text_reader_begin_input(TextReader* r, TextBlock* b) {
    text_block_refuse_other_kinds(b);
    text_block_drop_mark(b);
    r->cr_only = b->size > 0 && memchr(b->bytes, '\r', b->size) && !memchr(b->bytes, '\n', b->size);
}

// ----------------------------------------------------------------------------
// blocks

// Ends the lines of block[from..] in \n. A \r at its end waits for what comes next when there is more to come.
static inline void text_block_unify_lines(TextBlock* b, size_t from, bool cr_only, bool more) {
    char *end = b->bytes + b->size, *p = b->bytes + from, *out = p;
    while (p < end) {
        char* r = (char*)memchr(p, '\r', (size_t)(end - p));
        size_t run = (size_t)((r ? r : end) - p);
        if (out != p) { memmove(out, p, run); }
        out += run;
        p += run;
        if (p == end) { break; }
        bool last = p + 1 == end, pair = !last && p[1] == '\n';
        *out++ = pair || (cr_only && !(last && more)) ? '\n' : '\r';
        b->had_crlf |= pair;
        b->cr_only |= cr_only && !pair;
        p += pair ? 2 : 1;
    }
    b->size = (size_t)(out - b->bytes);
}

// Reads whole documents into b; false when the open input ended, which leaves all of its rest in b.
static inline bool text_reader_fill(TextReader* r, const DocumentRules* rules, TextBlock* b) {
    bool raw = rules->raw_lines || b->input->format == FORMAT_JSONL, first = b->starts_input;
    size_t searched = 0, want = r->tail_size + TEXT_BLOCK_BYTES;
    text_reserve(&b->bytes, &b->capacity, want);
    if (r->tail_size) { memcpy(b->bytes, r->tail, r->tail_size); }
    b->size = r->tail_size;
    r->tail_size = 0;
    for (bool more = true; more; want += want / 2) {
        size_t unified = b->size && b->bytes[b->size - 1] == '\r' ? b->size - 1 : b->size;
        more = text_block_read(b, r->file, want);
        if (first) { text_reader_begin_input(r, b); }
        first = false;
        if (!raw) { text_block_unify_lines(b, unified, r->cr_only, more); }
        if (!more) { return false; }
        size_t whole = b->size - (!raw && b->size && b->bytes[b->size - 1] == '\r');
        size_t cut = documents_cut(rules, b->input->format, b->bytes, whole, searched);
        searched = whole;
        if (cut == 0) { continue; }
        r->tail_size = b->size - cut;
        text_reserve(&r->tail, &r->tail_capacity, r->tail_size);
        if (r->tail_size) { memcpy(r->tail, b->bytes + cut, r->tail_size); }
        b->size = cut;
        return true;
    }
    return false;
}

// The next documents, all of one input, of which every input has at least one block; false when all have ended.
static inline bool text_reader_next(TextReader* r, const DocumentRules* rules, TextBlock* b) {
    for (;;) {
        b->starts_input = r->file < 0;
        b->had_crlf = b->cr_only = false;
        if (b->starts_input && r->opened == r->count) { return false; }
        if (b->starts_input) { r->file = input_open(&r->inputs[r->opened++]); }
        b->input = &r->inputs[r->opened - 1];
        if (text_reader_fill(r, rules, b)) { return true; }
        if (r->file != STDIN_FILENO) { close(r->file); }
        r->file = -1;
        if (b->size > 0 || b->starts_input) { return true; }
    }
}

#endif
