/*
Perplexity by position of evaluate: the articles, going on where an interrupted evaluation was, the result.
*/
#ifndef EVALUATE_PERPLEXITY_H
#define EVALUATE_PERPLEXITY_H

#include "positions.h"

enum { SAVE_SECONDS = 10, WINDOW_LINES = 32 };

// The losses of articles that an interrupted evaluation has left are in a file of each configuration, so that several
// evaluations of one run keep theirs apart.
static char* partial_path(const char* folder, const cJSON* entry) {
    char* configuration = cJSON_PrintUnformatted(entry);
    char* path = text("%s/perplexity.partial.%016llx.json", folder,
                      (unsigned long long)fnv1a(configuration, strlen(configuration)));
    cJSON_free(configuration);
    return path;
}

static void restore_perplexity(Evaluation* e) {
    if (!file_exists(e->partial) || e->args.force) { return; }
    cJSON* json = read_json(e->partial);
    if (cJSON_Compare(cJSON_GetObjectItemCaseSensitive(json, "configuration"), e->perplexity_entry, true)) {
        perplexity_restore(&e->perplexity, cJSON_GetObjectItemCaseSensitive(json, "losses"));
    }
    cJSON_Delete(json);
}

static void plan_perplexity(Evaluation* e) {
    const EvaluateArgs* a = &e->args;
    if (!a->perplexity) { return; }
    PerplexitySettings s = {a->perplexity_seq_len, a->perplexity_window_size, a->perplexity_ntokens,
                            a->perplexity_wiki_articles, a->perplexity_join};
    perplexity_check(&s);
    ExpectedTokens expected = expected_tokens(e);
    char* path = text("%s/%s", a->data_dir, a->perplexity_dataset);
    e->stream = token_stream_open(path, &expected);
    e->perplexity = perplexity_open(&e->stream, &s, path);
    free(path);
    e->perplexity_entry = perplexity_json(&e->perplexity, a->perplexity_dataset);
    cJSON_AddItemToObject(e->perplexity_entry, "of", cJSON_Duplicate(e->of, true));
    e->partial = partial_path(a->log_dir, e->perplexity_entry);
    const cJSON* published = results_published_perplexity(e->results.root, e->perplexity_entry);
    e->perplexity_outdated = evaluation_outdated(e, published);
    e->perplexity_wanted = a->force || !results_find_perplexity(e->results.root, e->perplexity_entry);
    if (e->perplexity_wanted) { restore_perplexity(e); }
}

static void save_partial(const Evaluation* e) {
    cJSON* json = cJSON_CreateObject();
    cJSON_AddItemToObject(json, "configuration", cJSON_Duplicate(e->perplexity_entry, true));
    cJSON_AddItemToObject(json, "losses", perplexity_losses_json(&e->perplexity));
    write_json_atomically(e->partial, json);
    cJSON_Delete(json);
}

static void store_perplexity(Evaluation* e) {
    cJSON* entry = perplexity_result_json(&e->perplexity, e->perplexity_entry, e->prefill.weights);
    results_begin(&e->results);
    results_put_perplexity(e->results.root, entry, e->perplexity_outdated);
    results_commit(&e->results);
    unlink(e->partial);
}

static void run_perplexity(Evaluation* e) {
    if (!e->perplexity_wanted || stop_signal) { return; }
    Perplexity* p = &e->perplexity;
    size_t n = p->settings.seq_len;
    int* ids = (int*)xcalloc(n + 1, sizeof(int));
    float* losses = (float*)xcalloc(n, sizeof(float));
    double row_flops = prefill_flops(&e->run.config, 0, n) + head_flops(&e->run.config, n), saved = wall_seconds();
    if (p->done > 0) { printf("perplexity goes on after %zu of %zu articles\n", p->done, p->count); }
    read_length(e, n);
    progress_start(&e->bar, "perplexity", row_flops * (double)(p->count - p->done));
    while (p->done < p->count) {
        perplexity_row(p, ids, p->done);
        snprintf(e->bar.detail, sizeof e->bar.detail, "article %zu/%zu", p->done + 1, p->count);
        if (!prefill_losses(&e->prefill, ids, n + 1, losses)) { break; }
        perplexity_add(p, losses);
        if (p->done < p->count && wall_seconds() - saved > SAVE_SECONDS) {
            save_partial(e);
            saved = wall_seconds();
        }
    }
    progress_clear(&e->bar);
    if (p->done == p->count) {
        store_perplexity(e);
    } else if (p->done > 0) {
        save_partial(e);
    }
    free(ids);
    free(losses);
}

static void print_perplexity(const Evaluation* e) {
    if (!e->args.perplexity || stop_signal) { return; }
    const cJSON* entry = results_find_perplexity(e->results.root, e->perplexity_entry);
    int windows = cJSON_GetArraySize(results_array(entry, "perplexity")), step = (windows - 1) / WINDOW_LINES + 1;
    printf("\nperplexity on %s: %.4f over %zu articles of %zu tokens; %s\n", e->args.perplexity_dataset,
           results_array(entry, "mean")->valuedouble, e->perplexity.count, e->perplexity.settings.seq_len,
           perplexity_bos_policy(&e->perplexity.settings));
    for (int w = step - 1; w < windows; w += step) {
        const cJSON* error = cJSON_GetArrayItem(results_array(entry, "standard_error"), w);
        printf("  up to %8.0f  %10.4f", cJSON_GetArrayItem(results_array(entry, "positions"), w)->valuedouble,
               cJSON_GetArrayItem(results_array(entry, "perplexity"), w)->valuedouble);
        if (cJSON_IsNumber(error)) { printf(" +- %.4f", error->valuedouble); }
        printf("\n");
    }
}

#endif
