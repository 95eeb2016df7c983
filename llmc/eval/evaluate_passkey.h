/*
Passkey retrieval of evaluate: what is left to measure, the samples of a length, their results, the picture in figures.
*/
#ifndef EVALUATE_PASSKEY_H
#define EVALUATE_PASSKEY_H

#include "positions.h"

enum { DEPTH_COLUMNS = 10 };

// The results of this configuration, NULL before the first.
static inline cJSON* passkey_entry(const Evaluation* e) {
    return results_find_passkey(e->results.root, e->passkey_key, e->passkey_of);
}

static bool is_finished(const Evaluation* e, size_t i) {
    size_t length = passkey_length(&e->passkey, e->fillers[i]);
    return !e->args.force && results_find_length(passkey_entry(e), length, NULL) >= 0;
}

// Says where the results go when their place is taken. What was measured of these weights before, and moved away when
// others were the run's, comes back.
static void settle_passkey(Evaluation* e) {
    const cJSON* published = results_published_passkey(e->results.root, e->passkey_key);
    const cJSON* entry = passkey_entry(e);
    e->passkey_outdated = evaluation_outdated(e, published);
    if (!published || entry == published) { return; }
    bool takes = results_takes_passkey(e->results.root, e->passkey_key, e->passkey_of, e->passkey_outdated);
    printf("passkey  %s was measured with other weights or settings: %s in passkey_others\n", e->passkey_key,
           takes ? "kept" : "these results are kept");
    if (takes && entry) {
        results_begin(&e->results);
        results_passkey(e->results.root, e->passkey_key, e->passkey_of, e->passkey_outdated);
        results_commit(&e->results);
    }
}

static void plan_passkey(Evaluation* e) {
    const EvaluateArgs* a = &e->args;
    if (a->score || a->passkey_sample_size == 0) { return; }
    e->passkey = passkey_open(e->tokenizer, a->passkey_pred_digits, a->passkey_prefix_digits);
    e->fillers = evaluate_fillers(a, &e->passkey, &e->lengths);
    e->passkey_key = results_passkey_key(a->passkey_sampling, a->passkey_sample_size, a->passkey_pred_digits,
                                         a->passkey_prefix_digits);
    e->passkey_of = cJSON_Duplicate(e->of, true);
    cJSON_AddNumberToObject(e->passkey_of, "seed", (double)a->seed);
    cJSON_AddStringToObject(e->passkey_of, "keys", a->passkey_keys);
    settle_passkey(e);
    for (size_t i = 0; i < e->lengths; i++) { e->passkey_wanted = e->passkey_wanted || !is_finished(e, i); }
}

// ----------------------------------------------------------------------------
// one length

// Roughly the operations of judging one sample when the cache holds its first `shared` tokens: reading the rest, and
// three short readings of the answer.
static double sample_flops(const Evaluation* e, size_t shared, size_t length) {
    size_t answer = e->passkey.answer_count;
    return prefill_flops(&e->run.config, shared, length - shared) +
           3 * (prefill_flops(&e->run.config, length, answer) + head_flops(&e->run.config, answer));
}

// Operations of a length whose samples are read in this order; held fillers are in the cache.
static double length_flops(const Evaluation* e, const PasskeySample* s, const size_t* order, size_t fillers,
                           size_t held) {
    const Passkey* p = &e->passkey;
    size_t length = passkey_length(p, fillers);
    double sum = 0;
    for (size_t i = 0; i < e->args.passkey_sample_size; i++) {
        size_t depth = s[order[i]].depth, common = held < depth ? held : depth;
        sum += sample_flops(e, p->task.count + common * p->filler.count, length);
        held = depth;
    }
    return sum;
}

// Samples of length i, in the order in which they are read: downwards in depth, then upwards, and so on.
static PasskeySample* draw_samples(const Evaluation* e, size_t i, bool descending, size_t* order) {
    const EvaluateArgs* a = &e->args;
    PasskeyKeys keys = strcmp(a->passkey_keys, "held_out") == 0 ? KEYS_HELD_OUT : KEYS_ALL;
    PasskeySample* s =
        passkey_samples(&e->passkey, a->passkey_sampling, keys, e->fillers[i], a->passkey_sample_size, a->seed);
    passkey_order(order, s, a->passkey_sample_size, descending);
    return s;
}

static double passkey_flops(const Evaluation* e) {
    size_t *order = (size_t*)xcalloc(e->args.passkey_sample_size, sizeof(size_t)), held = 0;
    double sum = 0;
    bool descending = false;
    for (size_t i = 0; i < e->lengths; i++) {
        if (is_finished(e, i)) { continue; }
        PasskeySample* s = draw_samples(e, i, descending, order);
        sum += length_flops(e, s, order, e->fillers[i], held);
        held = s[order[e->args.passkey_sample_size - 1]].depth;
        descending = !descending;
        free(s);
    }
    free(order);
    return sum;
}

static void dump_sample(Evaluation* e, const PasskeyPrompt* prompt, const PasskeySample* s, const PasskeyOutcome* o,
                        size_t fillers) {
    if (!e->args.dump) { return; }
    static const char* const verdict[] = {"wrong", "right"};
    char* all = tokenizer_decode(e->tokenizer, prompt->ids.ids, prompt->ids.count, NULL);
    fprintf(e->dump.file,
            "length %zu, key after %zu of %zu fillers\n%s\nexpected: %s (the last %zu digits are predicted)\n"
            "forced:   %s (%s)\ngreedy:   %s (%s)\nnatural:  %s (%s)\n\n",
            prompt->ids.count, s->depth, fillers, all, s->key, e->passkey.pred_digits, o->forced_text,
            verdict[o->forced], o->greedy_text, verdict[o->greedy], o->natural_text, verdict[o->natural]);
    free(all);
}

static void store_length(Evaluation* e, const PasskeySample* s, const PasskeyOutcome* o, size_t fillers) {
    size_t n = e->args.passkey_sample_size;
    double* depths = (double*)xcalloc(n, sizeof(double));
    int* hits = (int*)xcalloc(n, sizeof(int));
    PasskeyResult r = {passkey_length(&e->passkey, fillers), n, 0, 0, 0, depths, hits};
    for (size_t i = 0; i < n; i++) {
        depths[i] = fillers > 0 ? (double)s[i].depth / (double)fillers : 0;
        hits[i] = o[i].forced;
        r.forced += o[i].forced, r.greedy += o[i].greedy, r.natural += o[i].natural;
    }
    r.forced /= (double)n, r.greedy /= (double)n, r.natural /= (double)n;
    results_begin(&e->results);
    results_put_length(results_passkey(e->results.root, e->passkey_key, e->passkey_of, e->passkey_outdated), &r);
    results_commit(&e->results);
    free(depths);
    free(hits);
}

static bool run_length(Evaluation* e, size_t i, bool descending) {
    size_t n = e->args.passkey_sample_size, *order = (size_t*)xcalloc(n, sizeof(size_t));
    PasskeySample* s = draw_samples(e, i, descending, order);
    PasskeyOutcome* outcomes = (PasskeyOutcome*)xcalloc(n, sizeof *outcomes);
    bool going = true;
    read_length(e, passkey_capacity(&e->passkey, e->fillers[i]));
    for (size_t k = 0; k < n && going; k++) {
        const PasskeySample* sample = &s[order[k]];
        PasskeyPrompt prompt = passkey_prompt(&e->passkey, sample, e->fillers[i]);
        snprintf(e->bar.detail, sizeof e->bar.detail, "length %zu, %zu/%zu", prompt.ids.count, k + 1, n);
        going = passkey_judge(&e->passkey, &prompt, sample->key, prefill_predict, &e->prefill, &outcomes[order[k]]);
        if (going) { dump_sample(e, &prompt, sample, &outcomes[order[k]], e->fillers[i]); }
        passkey_prompt_free(&prompt);
    }
    if (going) { store_length(e, s, outcomes, e->fillers[i]); }
    free(order);
    free(s);
    free(outcomes);
    return going;
}

static void print_length(Evaluation* e, size_t length, double seconds) {
    char duration[16];
    const cJSON* entry = passkey_entry(e);
    int place = results_find_length(entry, length, NULL);
    progress_clear(&e->bar);
    printf("passkey %7zu tokens | forced %3.0f %%  greedy %3.0f %%  natural %3.0f %% | %s\n", length,
           100 * results_accuracy(entry, "accs", place), 100 * results_accuracy(entry, "greedy", place),
           100 * results_accuracy(entry, "natural", place),
           seconds < 0 ? "as stored" : format_duration(duration, seconds));
    fflush(stdout);
}

static void run_passkey(Evaluation* e) {
    if (!e->passkey_wanted) { return; }
    progress_start(&e->bar, "passkey", passkey_flops(e));
    bool descending = false;
    size_t misses = 0;
    for (size_t i = 0; i < e->lengths; i++) {
        size_t length = passkey_length(&e->passkey, e->fillers[i]);
        bool finished = is_finished(e, i);
        double started = wall_seconds();
        if (!finished && !run_length(e, i, descending)) { break; }
        if (!finished) { descending = !descending; }
        print_length(e, length, finished ? -1 : wall_seconds() - started);
        const cJSON* entry = passkey_entry(e);
        misses = results_accuracy(entry, "accs", results_find_length(entry, length, NULL)) > 0 ? 0 : misses + 1;
        if (e->args.patience > 0 && misses >= e->args.patience && i + 1 < e->lengths) {
            printf("stopped: no hit at %zu lengths in a row (--patience)\n", misses);
            break;
        }
    }
    progress_clear(&e->bar);
    if (e->args.dump) { output_close(&e->dump); }
}

// Hits by length and depth of the key, teacher forced, in per cent; '.' where no sample is.
static void print_matrix(const Evaluation* e) {
    const cJSON* entry = e->passkey_key ? passkey_entry(e) : NULL;
    if (!entry || stop_signal) { return; }
    printf("\npasskey %s, teacher forced, %% by depth of the key\n  length", e->passkey_key);
    for (int c = 0; c < DEPTH_COLUMNS; c++) { printf("%3d-%d%%", c * 10, c * 10 + 10); }
    printf("\n");
    int rows = cJSON_GetArraySize(results_array(entry, "seq_lens"));
    for (int row = 0; row < rows; row++) {
        const cJSON* depth = cJSON_GetArrayItem(results_array(entry, "depths"), row)->child;
        const cJSON* hit = cJSON_GetArrayItem(results_array(entry, "hits"), row)->child;
        double hits[DEPTH_COLUMNS] = {0}, samples[DEPTH_COLUMNS] = {0};
        for (; depth && hit; depth = depth->next, hit = hit->next) {
            double share = fmin(fmax(depth->valuedouble, 0), 1);
            int column = share < 1 ? (int)(share * DEPTH_COLUMNS) : DEPTH_COLUMNS - 1;
            hits[column] += hit->valuedouble, samples[column]++;
        }
        printf("%8.0f", cJSON_GetArrayItem(results_array(entry, "seq_lens"), row)->valuedouble);
        for (int c = 0; c < DEPTH_COLUMNS; c++) {
            int width = snprintf(NULL, 0, "%3d-%d%%", c * 10, c * 10 + 10);
            if (samples[c] > 0) {
                printf("%*.0f", width, 100 * hits[c] / samples[c]);
            } else {
                printf("%*s", width, ".");
            }
        }
        printf("\n");
    }
}

#endif
