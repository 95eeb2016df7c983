/*
Documents of token shards for the evaluator: random access to a folder's (or one shard's) stream of tokens, and a walk
through its documents, each from its BOS to the token before the next BOS.
*/
#ifndef ARTICLES_H
#define ARTICLES_H

#include "../dataloader.h"

// Only the part of a DataLoader that is fixed once its shards are open is used: no batches, no thread.
typedef struct {
    DataLoader loader;
} TokenStream;

// What a stream must agree with: the model that is evaluated and the tokenizer it was trained with.
typedef struct {
    size_t vocab_size;
    uint32_t tokenizer_hash;  // 0 = unknown
    int bos, eos;             // -1 = unknown
    const char* run;
} ExpectedTokens;

static inline void token_stream_check(const TokenStream* s, const ExpectedTokens* expected) {
    const DataLoader* dl = &s->loader;
    const char* path = dl->shards[0].path;
    if (dl->vocab_size != expected->vocab_size) {
        fatal("%s: vocabulary of %zu, the model of %s has %zu; use data made with the run's tokenizer", path,
              dl->vocab_size, expected->run, expected->vocab_size);
    }
    if (dl->tokenizer_hash && expected->tokenizer_hash && dl->tokenizer_hash != expected->tokenizer_hash) {
        fatal("%s: tokenizer hash %08x, the run %s was trained with %08x; use data made with the run's tokenizer", path,
              dl->tokenizer_hash, expected->run, expected->tokenizer_hash);
    }
    bool same_bos = dl->bos < 0 || expected->bos < 0 || dl->bos == expected->bos;
    bool same_eos = dl->eos < 0 || expected->eos < 0 || dl->eos == expected->eos;
    if (!same_bos || !same_eos) {
        fatal("%s: BOS %d and EOS %d, the run %s was trained with %d and %d; use data made with the run's tokenizer",
              path, (int)dl->bos, (int)dl->eos, expected->run, expected->bos, expected->eos);
    }
}

// Opens every shard of a folder, or one shard, as a stream; ends the program on anything that is not valid.
static inline TokenStream token_stream_open(const char* path, const ExpectedTokens* expected) {
    TokenStream s;
    memset(&s, 0, sizeof s);
    struct stat status;
    if (stat(path, &status) != 0) {
        fatal(
            "%s: %s, expected a folder of token shards or one shard; make one with dataset/prepare or correct the path",
            path, strerror(errno));
    }
    s.loader.config.folder = path;
    if (S_ISDIR(status.st_mode)) {
        dataloader_list(&s.loader);
    } else {
        s.loader.shards = (DataShard*)xcalloc(1, sizeof(DataShard));
        s.loader.shards[0].path = xstrdup(path);
        s.loader.shard_count = 1;
    }
    dataloader_open_shards(&s.loader);
    token_stream_check(&s, expected);
    return s;
}

static inline void token_stream_close(TokenStream* s) {
    for (size_t i = 0; i < s->loader.shard_count; i++) {
        munmap((void*)(uintptr_t)s->loader.shards[i].map, s->loader.shards[i].map_bytes);
        free(s->loader.shards[i].path);
    }
    free(s->loader.shards);
    memset(s, 0, sizeof *s);
}

static inline size_t token_stream_count(const TokenStream* s) { return s->loader.total_tokens; }

// out[count] = the tokens from a position on, all checked against the vocabulary; count > 0.
static inline void token_stream_read(TokenStream* s, int* out, size_t position, size_t count) {
    s->loader.batch_tokens = count - 1;  // a batch is read with the target of its last token
    DataFault fault = dataloader_read(&s->loader, out, position);
    dataloader_report(&s->loader, &fault);
}

// ----------------------------------------------------------------------------
// documents

// Tokens begin .. begin+count-1 of the stream; the EOS at the end, if there is one, is counted.
typedef struct {
    size_t begin, count;
    bool ends_with_eos;
} Article;

enum { ARTICLE_BLOCK = 1 << 16 };

typedef struct {
    TokenStream* stream;
    size_t next;          // where the next document begins
    int* block;           // [ARTICLE_BLOCK]
    size_t begin, count;  // of the block in the stream
} ArticleWalk;

static inline ArticleWalk article_walk(TokenStream* stream) {
    ArticleWalk w = {stream, 0, (int*)xcalloc(ARTICLE_BLOCK, sizeof(int)), 0, 0};
    return w;
}

static inline void article_walk_end(ArticleWalk* w) { free(w->block); }

static inline int article_token(ArticleWalk* w, size_t position) {
    if (position < w->begin || position >= w->begin + w->count) {
        size_t left = token_stream_count(w->stream) - position;
        w->begin = position, w->count = left < ARTICLE_BLOCK ? left : (size_t)ARTICLE_BLOCK;
        token_stream_read(w->stream, w->block, w->begin, w->count);
    }
    return w->block[position - w->begin];
}

// The next document; false at the end of the stream. Tokens before the first BOS are a document, too.
static inline bool article_next(ArticleWalk* w, Article* a) {
    const DataLoader* dl = &w->stream->loader;
    size_t end = w->next, total = token_stream_count(w->stream);
    if (end >= total) { return false; }
    int token = article_token(w, end++);
    while (end < total) {
        int next = article_token(w, end);
        if (next == dl->bos && dl->bos >= 0) { break; }
        token = next;
        end++;
    }
    a->begin = w->next, a->count = end - w->next;
    a->ends_with_eos = dl->eos >= 0 && token == dl->eos && a->count > 1;
    w->next = end;
    return true;
}

#endif
