/*
What --score reads and writes: the documents of a token shard or of a text, and one CSV row for every token but the
first of each. Files named *.bin are shards. Others are texts in the formats of dataset/prepare, which gives each
document its BOS and EOS: *.jsonl, else documents with blank lines between them.
*/
#ifndef SCORE_H
#define SCORE_H

#include "../dataset/documents.h"
#include "articles.h"
#include "logger.h"
#include "output_file.h"
#include "tokenizer.h"

typedef struct {
    TokenList ids;   // of all documents
    size_t* starts;  // [count + 1] where each begins
    size_t count, longest;
} ScoreInput;

static inline bool score_is_shard(const char* path) {
    size_t n = strlen(path);
    return n > 4 && strcmp(path + n - 4, ".bin") == 0;
}

static inline void score_end_document(ScoreInput* in, size_t* capacity) {
    if (in->count + 2 > *capacity) {
        *capacity = 2 * *capacity + 64;
        in->starts = (size_t*)xrealloc(in->starts, *capacity * sizeof(size_t));
    }
    size_t start = in->count ? in->starts[in->count] : 0, length = in->ids.count - start;
    in->starts[0] = 0;
    in->starts[++in->count] = in->ids.count;
    in->longest = length > in->longest ? length : in->longest;
}

static inline void score_read_shard(ScoreInput* in, const char* path, const ExpectedTokens* expected) {
    TokenStream stream = token_stream_open(path, expected);
    ArticleWalk walk = article_walk(&stream);
    Article a;
    size_t capacity = 0;
    token_list_reserve(&in->ids, token_stream_count(&stream));
    while (article_next(&walk, &a)) {
        token_stream_read(&stream, in->ids.ids + in->ids.count, a.begin, a.count);
        in->ids.count += a.count;
        score_end_document(in, &capacity);
    }
    article_walk_end(&walk);
    token_stream_close(&stream);
}

static inline void score_read_text(ScoreInput* in, const char* path, const Tokenizer* tokenizer) {
    size_t size, length, n = strlen(path), capacity = 0;
    char *content = read_text(path, &size), *document;
    Format format = n > 6 && strcmp(path + n - 6, ".jsonl") == 0 ? FORMAT_JSONL : FORMAT_TXT;
    DocumentRules rules = {NULL, 0, "text"};
    DocumentCursor cursor;
    memset(&cursor, 0, sizeof cursor);
    cursor.p = content, cursor.end = content + size;
    int bos = tokenizer_bos(tokenizer), eos = tokenizer_eos(tokenizer);
    while (document_next(&rules, format, &cursor, &document, &length)) {
        token_list_append(&in->ids, &bos, 1);
        tokenizer_encode(tokenizer, document, length, &in->ids);
        token_list_append(&in->ids, &eos, 1);
        score_end_document(in, &capacity);
    }
    if (cursor.failed) { fatal("%s: line %zu: %s; repair the line", path, cursor.line + 1, cursor.json.error); }
    free(content);
}

// tokenizer may be NULL for a shard.
static inline ScoreInput score_read(const char* path, const Tokenizer* tokenizer, const ExpectedTokens* expected) {
    ScoreInput in;
    memset(&in, 0, sizeof in);
    if (score_is_shard(path)) {
        score_read_shard(&in, path, expected);
    } else {
        score_read_text(&in, path, tokenizer);
    }
    if (in.longest < 2) {
        fatal("%s: no document with a token to score; give a text or shard that is not empty", path);
    }
    return in;
}

static inline void score_free(ScoreInput* in) {
    free(in->ids.ids);
    free(in->starts);
}

static inline void score_write_header(OutputFile* out) { fputs("document,position,token,logprob\n", out->file); }

// Rows of a document: ids[count], losses[count-1]; position 0, the document's first token, has no score.
static inline void score_write(OutputFile* out, size_t document, const int* ids, size_t count, const float* losses) {
    char number[32];
    for (size_t i = 1; i < count; i++) {
        fprintf(out->file, "%zu,%zu,%d,%s\n", document, i, ids[i], csv_number(number, -(double)losses[i - 1]));
    }
    output_check(out);
}

#endif
