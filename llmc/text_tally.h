/*
What the documents of texts add up to, and what is wrong or odd with them: one place for every program that reads
documents. A TextReport is made block by block, by any thread; a TextTally takes the reports in the order of the blocks,
ends the program on damaged input, and warns of texts that may not split into documents as they were meant to.
*/
#ifndef TEXT_TALLY_H
#define TEXT_TALLY_H

#include "stream_marks.h"
#include "text_reader.h"

// A text larger than this that is one document may have other separators than it was read with.
enum { TEXT_LARGE_DOCUMENT = 64 << 10 };

// Documents that are not empty, their bytes, and of these documents some that are odd; and the empty ones.
typedef struct {
    size_t documents, bytes, empty, invalid, crlf;
} TextCounts;

typedef struct {
    DocumentCursor cursor;
    StreamMarks marks;
    TextCounts counts;
} TextReport;

// Inputs that something is to be said about.
typedef struct {
    const char* first;
    size_t inputs;
} TextNote;

typedef struct {
    TextCounts counts;
    // the input that is being read
    const Input* input;
    size_t line, separators;
    bool had_crlf, cr_only;
    TextCounts input_counts;
    StreamState stream;
    // what to say at the end
    TextNote crlf_lines, cr_lines, keeps_crlf, invalid, unseparated, one_document, without_documents;
} TextTally;

static inline void text_counts_add(TextCounts* total, const TextCounts* more) {
    total->documents += more->documents;
    total->bytes += more->bytes;
    total->empty += more->empty;
    total->invalid += more->invalid;
    total->crlf += more->crlf;
}

// ----------------------------------------------------------------------------
// a block

static inline void text_report_begin(TextReport* r, const TextBlock* b) {
    r->cursor = document_cursor(b->bytes, b->size, &r->marks);
    memset(&r->counts, 0, sizeof r->counts);
}

static inline void text_report_free(TextReport* r) { free(r->marks.items); }

// The next document of the block that is not empty.
static inline bool text_report_next(TextReport* r, const DocumentRules* rules, Format format, char** document,
                                    size_t* length) {
    while (document_next(rules, format, &r->cursor, document, length)) {
        if (*length == 0) {
            r->counts.empty++;
            continue;
        }
        r->counts.documents++;
        r->counts.bytes += *length;
        r->counts.invalid += r->cursor.json.replaced || !utf8_is_valid(*document, *length);
        r->counts.crlf += memmem(*document, *length, "\r\n", 2) != NULL;
        return true;
    }
    return false;
}

// ----------------------------------------------------------------------------
// all blocks

static inline void text_note(TextNote* note, const Input* input, bool applies) {
    if (!applies) { return; }
    if (!note->first) { note->first = input->name; }
    note->inputs++;
}

static inline void text_tally_end_input(TextTally* t, const DocumentRules* rules) {
    const Input* in = t->input;
    if (!in) { return; }
    const TextCounts* c = &t->input_counts;
    bool is_txt = in->format == FORMAT_TXT, some = c->documents > 0, by_separator = rules->separator_length > 0;
    stream_check_ended(&t->stream, in->name);
    if (!in->regular && !some && t->stream.streams == 0) {
        fatal("no documents in %s; expected text: see whether the program that writes it has failed", in->name);
    }
    text_note(&t->without_documents, in, !some);
    text_note(&t->crlf_lines, in, t->had_crlf);
    text_note(&t->cr_lines, in, t->cr_only);
    text_note(&t->keeps_crlf, in, c->crlf > 0);
    text_note(&t->invalid, in, c->invalid > 0);
    text_note(&t->unseparated, in, is_txt && some && by_separator && t->separators == 0);
    text_note(
        &t->one_document, in,
        is_txt && !by_separator && !rules->whole_files && c->documents == 1 && c->bytes > (size_t)TEXT_LARGE_DOCUMENT);
    text_counts_add(&t->counts, c);
    memset(&t->input_counts, 0, sizeof t->input_counts);
    memset(&t->stream, 0, sizeof t->stream);
    t->line = t->separators = 0;
    t->had_crlf = t->cr_only = false;
}

// Takes the report of the next block; ends the program when it found damage.
static inline void text_tally_add(TextTally* t, const DocumentRules* rules, const TextBlock* b, const TextReport* r) {
    const DocumentCursor* c = &r->cursor;
    if (b->starts_input) {
        text_tally_end_input(t, rules);
        t->input = b->input;
    }
    stream_take_marks(&t->stream, b->input->name, &r->marks, t->line + 1, c->documents);
    if (c->failed) {
        fatal("%s:%zu:%zu: %s; expected one JSON object a line with the text in \"%s\" (--text_field)", b->input->name,
              t->line + c->line + 1, (size_t)(c->json.p - c->json.start) + 1, c->json.error, rules->text_field);
    }
    t->line += c->line;
    t->separators += c->separators;
    text_counts_add(&t->input_counts, &r->counts);
    t->had_crlf |= b->had_crlf;
    t->cr_only |= b->cr_only;
}

// After the last block; ends the program when there was no document at all.
static inline void text_tally_end(TextTally* t, const DocumentRules* rules, const Input* inputs, size_t count) {
    text_tally_end_input(t, rules);
    t->input = NULL;
    if (t->counts.documents > 0) { return; }
    fatal("no documents in %s%s; expected text", inputs[0].name, count > 1 ? " and the other inputs" : "");
}

// "warning: FILE and 2 more: WORDS".
__attribute__((format(printf, 2, 3))) static inline void text_note_warn(const TextNote* note, const char* format, ...) {
    if (note->inputs == 0) { return; }
    char words[512];
    va_list args;
    va_start(args, format);
    vsnprintf(words, sizeof words, format, args);
    va_end(args);
    if (note->inputs > 1) {
        warn("%s and %zu more: %s", note->first, note->inputs - 1, words);
    } else {
        warn("%s: %s", note->first, words);
    }
}

static inline void text_tally_warn(const TextTally* t) {
    const TextCounts* c = &t->counts;
    text_note_warn(&t->without_documents, "no documents");
    text_note_warn(&t->unseparated, "the --separator does not occur, so that all is one document; check it");
    text_note_warn(
        &t->one_document,
        "one document, as no line is blank; give --separator if it holds more (--separator '\n': one a line)");
    text_note_warn(&t->cr_lines, "lines end in CR alone; they were read as ending in LF");
    text_note_warn(&t->crlf_lines, "lines end in CR LF; they were read as ending in LF");
    text_note_warn(&t->keeps_crlf, "%zu documents hold CR LF line ends, which stay; replace them unless they are meant",
                   c->crlf);
    text_note_warn(
        &t->invalid,
        "%zu documents with invalid UTF-8, passed to the tokenizer as they are; convert the text, e.g. iconv "
        "-f LATIN1 -t UTF-8",
        c->invalid);
    if (c->empty) { warn("%zu empty documents skipped", c->empty); }
}

#endif
