/*
Streams that announce themselves: dataset/fineweb.py and wikipedia.py begin with a line

    {"bamc_stream": "begins"}

and end with {"bamc_stream": "ends after 8762 documents"}, or with {"bamc_stream": "failed: REASON"}. A stream that was
cut short, by a signal, a full disk or `head`, has no such end and is refused, so that it never passes for a whole one;
the number finds lines that are missing in between. Streams may follow one another, and ordinary lines may stand before
and behind them. Text without such marks is taken as it is.
*/
#ifndef STREAM_MARKS_H
#define STREAM_MARKS_H

#include "documents.h"

// The stream that is being read, over all blocks of an input.
typedef struct {
    bool open;
    size_t begun_line;  // from 1
    size_t documents;   // of it so far
    size_t streams;     // of the input that have begun
} StreamState;

static inline bool stream_mark_says(const StreamMark* m, const char* words) {
    size_t n = strlen(words);
    return m->length >= n && memcmp(m->text, words, n) == 0;
}

static inline bool stream_mark_count(const StreamMark* m, size_t* documents) {
    char* said = text("%.*s", (int)m->length, m->text);
    char rest;
    bool good = sscanf(said, "ends after %zu document%c", documents, &rest) == 2 && rest == 's';
    free(said);
    return good;
}

static inline void stream_begin(StreamState* s, const char* name, size_t line) {
    if (s->open) {
        fatal("%s:%zu: a stream begins before that of line %zu has ended, which was cut short; stream it again", name,
              line, s->begun_line);
    }
    s->open = true;
    s->begun_line = line;
    s->documents = 0;
    s->streams++;
}

static inline void stream_end(StreamState* s, const char* name, size_t line, size_t documents) {
    if (!s->open) {
        fatal(
            "%s:%zu: a stream ends whose beginning is missing; stream it again, or with --no_marks for other programs",
            name, line);
    }
    if (s->documents != documents) {
        fatal("%s:%zu: the stream that begins in line %zu has %zu documents, expected %zu as it says; stream it again",
              name, line, s->begun_line, s->documents, documents);
    }
    s->open = false;
}

// What the marks of a block say, first_line (from 1) being its first and `documents` how many it has in all.
static inline void stream_take_marks(StreamState* s, const char* name, const StreamMarks* marks, size_t first_line,
                                     size_t documents) {
    size_t counted = 0, count;
    for (size_t i = 0; i < marks->count; i++) {
        const StreamMark* m = &marks->items[i];
        size_t line = first_line + m->line;
        s->documents += m->documents - counted;
        counted = m->documents;
        if (stream_mark_says(m, "begins")) {
            stream_begin(s, name, line);
        } else if (stream_mark_count(m, &count)) {
            stream_end(s, name, line, count);
        } else {
            fatal("%s:%zu: the stream %.*s", name, line, (int)m->length, m->text);
        }
    }
    s->documents += documents - counted;
}

// At the end of an input.
static inline void stream_check_ended(const StreamState* s, const char* name) {
    if (!s->open) { return; }
    fatal(
        "%s: the stream that begins in line %zu has no end after %zu documents: what wrote it was killed, or it was "
        "cut; "
        "stream it again (--max_documents N for fewer, --no_marks for other programs)",
        name, s->begun_line, s->documents);
}

#endif
