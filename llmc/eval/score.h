/*
What --score reads and writes: the documents of a token shard or of a text, and one CSV row for every token but the
first of each. Files named *.bin are shards. Others are texts, which are read as dataset/prepare reads them, so that the
documents are those of the shards that it would write: BOS, tokens, EOS.
*/
#ifndef SCORE_H
#define SCORE_H

#include "articles.h"
#include "../logger.h"
#include "../output_file.h"
#include "../text_tally.h"
#include "../tokenizer.h"

typedef struct {
    TokenList ids;   // of all documents
    size_t* starts;  // [count + 1] where each begins
    size_t count, longest;
} ScoreInput;

static inline bool score_is_shard(const char* path) { return strlen(path) > 4 && ends_with(path, ".bin"); }

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

static inline void score_read_block(ScoreInput* in, size_t* capacity, const DocumentRules* rules,
                                    const TextBlock* block, TextReport* report, const Tokenizer* tokenizer) {
    int bos = tokenizer_bos(tokenizer), eos = tokenizer_eos(tokenizer);
    char* document;
    size_t length;
    text_report_begin(report, block);
    while (text_report_next(report, rules, block->input->format, &document, &length)) {
        token_list_append(&in->ids, &bos, 1);
        tokenizer_encode(tokenizer, document, length, &in->ids);
        token_list_append(&in->ids, &eos, 1);
        score_end_document(in, capacity);
    }
}

static inline void score_read_text(ScoreInput* in, const char* path, const TextOptions* options,
                                   const Tokenizer* tokenizer) {
    size_t bytes, capacity = 0;
    DocumentRules rules = document_rules(options);
    Input* input = text_inputs_find(&path, 1, options, &bytes);
    TextReader reader = text_reader(input, 1);
    TextBlock block;
    TextReport report;
    TextTally tally;
    memset(&block, 0, sizeof block);
    memset(&report, 0, sizeof report);
    memset(&tally, 0, sizeof tally);
    while (text_reader_next(&reader, &rules, &block)) {
        score_read_block(in, &capacity, &rules, &block, &report, tokenizer);
        text_tally_add(&tally, &rules, &block, &report);
    }
    text_tally_end(&tally, &rules, input, 1);
    text_tally_warn(&tally);
    text_reader_free(&reader);
    text_report_free(&report);
    document_rules_free(&rules);
    free(block.bytes);
    free(input);
}

// tokenizer may be NULL for a shard.
static inline ScoreInput score_read(const char* path, const TextOptions* options, const Tokenizer* tokenizer,
                                    const ExpectedTokens* expected) {
    ScoreInput in;
    memset(&in, 0, sizeof in);
    if (score_is_shard(path)) {
        score_read_shard(&in, path, expected);
    } else {
        score_read_text(&in, path, options, tokenizer);
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
