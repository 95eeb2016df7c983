/*
Perplexity by position: rows of seq_len + 1 tokens, the mean loss of each window of their positions, averaged over rows
and exponentiated. Which rows:

articles   documents of at least seq_len + 1 tokens, the EOS not counted, cut there; each begins with its BOS
joined     the first ntokens + 1 tokens of the data without BOS and EOS, cut into rows: documents follow one another
           and see each other. The published measure on an ordinary dataset.

Window w is the losses of the tokens at positions w*window+1 .. (w+1)*window of a row.
*/
#ifndef PERPLEXITY_H
#define PERPLEXITY_H

#include <cjson/cJSON.h>
#include <math.h>

#include "articles.h"

typedef struct {
    size_t seq_len, window, ntokens, articles;  // articles: at most so many; joined: no limit
    bool joined;
} PerplexitySettings;

// The rows that were found. In joined mode all their tokens are in memory, else they are read one by one.
typedef struct {
    PerplexitySettings settings;
    TokenStream* stream;
    size_t count, windows;
    size_t* begins;  // [count] of articles
    int* joined;     // [count][seq_len+1]
    double* losses;  // [count][windows] mean loss of a window
    size_t done;     // rows whose losses are known
} Perplexity;

static inline const char* perplexity_bos_policy(const PerplexitySettings* s) {
    return s->joined ? "BOS and EOS are dropped, documents joined" : "each article starts with BOS";
}

static inline void perplexity_check(const PerplexitySettings* s) {
    if (s->seq_len % s->window != 0) {
        fatal("--perplexity_seq_len %zu is not a multiple of --perplexity_window_size %zu; use %zu", s->seq_len,
              s->window, s->seq_len < s->window ? s->window : s->seq_len / s->window * s->window);
    }
}

static inline void perplexity_find_articles(Perplexity* p, const char* path) {
    const PerplexitySettings* s = &p->settings;
    ArticleWalk walk = article_walk(p->stream);
    Article a;
    size_t longest = 0, documents = 0;
    p->begins = (size_t*)xcalloc(s->articles, sizeof(size_t));
    while (p->count < s->articles && article_next(&walk, &a)) {
        size_t length = a.count - a.ends_with_eos;
        documents++;
        longest = length > longest ? length : longest;
        if (length > s->seq_len) { p->begins[p->count++] = a.begin; }
    }
    article_walk_end(&walk);
    if (p->count == 0) {
        fatal(
            "%s: none of its %zu documents has %zu tokens (--perplexity_seq_len + 1), the longest has %zu; lower "
            "--perplexity_seq_len, use longer articles, or --perplexity_join",
            path, documents, s->seq_len + 1, longest);
    }
}

static inline void perplexity_join(Perplexity* p, const char* path) {
    const PerplexitySettings* s = &p->settings;
    size_t total = token_stream_count(p->stream), kept = 0, row = s->seq_len + 1;
    size_t count = s->ntokens < total ? s->ntokens + 1 : total;
    p->joined = (int*)xcalloc(count, sizeof(int));
    if (count > 0) { token_stream_read(p->stream, p->joined, 0, count); }
    for (size_t i = 0; i < count; i++) {
        int token = p->joined[i];
        if (token != p->stream->loader.bos && token != p->stream->loader.eos) { p->joined[kept++] = token; }
    }
    p->count = kept / row;
    if (p->count == 0) {
        fatal(
            "%s: %zu tokens without BOS and EOS, expected at least %zu (--perplexity_seq_len + 1); add data, raise "
            "--perplexity_ntokens or lower --perplexity_seq_len",
            path, kept, row);
    }
}

// Finds the rows of the stream, whose path is for messages.
static inline Perplexity perplexity_open(TokenStream* stream, const PerplexitySettings* settings, const char* path) {
    Perplexity p;
    memset(&p, 0, sizeof p);
    p.settings = *settings, p.stream = stream, p.windows = settings->seq_len / settings->window;
    if (settings->joined) {
        perplexity_join(&p, path);
    } else {
        perplexity_find_articles(&p, path);
    }
    p.losses = (double*)xcalloc(p.count * p.windows, sizeof(double));
    return p;
}

static inline void perplexity_close(Perplexity* p) {
    free(p->begins);
    free(p->joined);
    free(p->losses);
}

// The tokens of a row, ids[seq_len+1].
static inline void perplexity_row(const Perplexity* p, int* ids, size_t row) {
    size_t n = p->settings.seq_len + 1;
    if (p->joined) {
        memcpy(ids, p->joined + row * n, n * sizeof(int));
    } else {
        token_stream_read(p->stream, ids, p->begins[row], n);
    }
}

// Takes the losses of the next row, losses[seq_len].
static inline void perplexity_add(Perplexity* p, const float* losses) {
    assert(p->done < p->count);
    double* mean = p->losses + p->done++ * p->windows;
    for (size_t w = 0; w < p->windows; w++) {
        double sum = 0;
        for (size_t i = 0; i < p->settings.window; i++) { sum += losses[w * p->settings.window + i]; }
        mean[w] = sum / (double)p->settings.window;
    }
}

typedef struct {
    double perplexity, standard_error;  // NAN with one row
} WindowPerplexity;

// Perplexity of a window and its standard error over rows: that of the mean loss, times the derivative of exp.
static inline WindowPerplexity perplexity_window(const Perplexity* p, size_t w) {
    double n = (double)p->done, mean = 0, square = 0;
    for (size_t r = 0; r < p->done; r++) { mean += p->losses[r * p->windows + w] / n; }
    for (size_t r = 0; r < p->done; r++) {
        double d = p->losses[r * p->windows + w] - mean;
        square += d * d;
    }
    WindowPerplexity result = {exp(mean), p->done > 1 ? exp(mean) * sqrt(square / (n - 1) / n) : NAN};
    return result;
}

// exp of the mean loss of all tokens; rows and windows are of one size.
static inline double perplexity_overall(const Perplexity* p) {
    double sum = 0;
    for (size_t i = 0; i < p->done * p->windows; i++) { sum += p->losses[i]; }
    return exp(sum / (double)(p->done * p->windows));
}

// ----------------------------------------------------------------------------
// JSON

// The beginning of a result's entry: what is measured. The dataset is named as the published program names it.
static inline cJSON* perplexity_json(const Perplexity* p, const char* dataset) {
    const PerplexitySettings* s = &p->settings;
    char* folder = text("data/%s", dataset);
    cJSON* o = cJSON_CreateObject();
    cJSON_AddNumberToObject(o, "window_size", (double)s->window);
    cJSON_AddNumberToObject(o, "seq_len", (double)s->seq_len);
    cJSON_AddNumberToObject(o, "ntokens", (double)s->ntokens);
    cJSON_AddStringToObject(o, "dataset_dir", folder);
    cJSON_AddStringToObject(o, "bos", perplexity_bos_policy(s));
    cJSON_AddNumberToObject(o, "articles", (double)p->count);
    free(folder);
    return o;
}

// A copy of the beginning with the result. weights: where the model is from, for the message that it has none.
static inline cJSON* perplexity_result_json(const Perplexity* p, const cJSON* beginning, const char* weights) {
    cJSON* o = cJSON_Duplicate(beginning, true);
    cJSON *values = cJSON_AddArrayToObject(o, "perplexity"), *positions = cJSON_AddArrayToObject(o, "positions");
    cJSON* errors = cJSON_AddArrayToObject(o, "standard_error");
    for (size_t w = 0; w < p->windows; w++) {
        WindowPerplexity x = perplexity_window(p, w);
        if (!isfinite(x.perplexity)) {
            fatal(
                "%s: the perplexity up to position %zu is %g, expected a finite number; the weights are damaged or "
                "diverged: evaluate an earlier checkpoint",
                weights, (w + 1) * p->settings.window, x.perplexity);
        }
        cJSON_AddItemToArray(values, cJSON_CreateNumber(x.perplexity));
        cJSON_AddItemToArray(positions, cJSON_CreateNumber((double)((w + 1) * p->settings.window)));
        cJSON_AddItemToArray(errors,
                             isfinite(x.standard_error) ? cJSON_CreateNumber(x.standard_error) : cJSON_CreateNull());
    }
    cJSON_AddNumberToObject(o, "mean", perplexity_overall(p));
    return o;
}

// The losses of the rows that are done, and back: what an interrupted evaluation leaves.
static inline cJSON* perplexity_losses_json(const Perplexity* p) {
    cJSON* rows = cJSON_CreateArray();
    for (size_t r = 0; r < p->done; r++) {
        cJSON_AddItemToArray(rows, cJSON_CreateDoubleArray(p->losses + r * p->windows, (int)p->windows));
    }
    return rows;
}

static inline void perplexity_restore(Perplexity* p, const cJSON* rows) {
    const cJSON* row;
    p->done = 0;
    cJSON_ArrayForEach(row, rows) {
        if (p->done == p->count || cJSON_GetArraySize(row) != (int)p->windows) { return; }
        const cJSON* loss;
        double* out = p->losses + p->done * p->windows;
        cJSON_ArrayForEach(loss, row) {
            if (!cJSON_IsNumber(loss) || !isfinite(loss->valuedouble)) { return; }
            *out++ = loss->valuedouble;
        }
        p->done++;
    }
}

#endif
