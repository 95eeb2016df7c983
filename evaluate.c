/*
Evaluates a trained model at lengths far beyond its training: passkey retrieval, perplexity by position, and scores of
a text. Results are added to the run's results.json after every finished piece of work, so that an evaluation that was
interrupted goes on where it was. No mathematics: that is in llmc/model.h and the operators.
*/
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // memmem
#endif

#include "llmc/checkpoint.h"
#include "llmc/evaluate_args.h"
#include "llmc/host_limits.h"
#include "llmc/perplexity.h"
#include "llmc/prefill.h"
#include "llmc/progress.h"
#include "llmc/results.h"
#include "llmc/score.h"
#include "llmc/signals.h"
#include "llmc/startup.h"

enum { DEPTH_COLUMNS = 10, SAVE_SECONDS = 10, WINDOW_LINES = 32 };

// What args.json and the weights say about the run.
typedef struct {
    cJSON* json;  // holds the strings of the configuration
    ModelConfig config;
    char *weights, *results, *partial;  // paths
    const char* encoding;
    char* step;  // of the weights
    uint32_t tokenizer_hash;
} RunFolder;

typedef struct {
    EvaluateArgs args;
    Options options;
    RunFolder run;
    Tokenizer* tokenizer;  // NULL when nothing has to be tokenised
    cJSON *results, *of;
    // passkey
    bool passkey_wanted;
    Passkey passkey;
    size_t *fillers, lengths;
    char* passkey_key;
    cJSON* entry;  // in results
    // perplexity
    bool perplexity_wanted;
    TokenStream stream;
    Perplexity perplexity;
    // score
    ScoreInput input;
    // work
    Model model;
    Prefill prefill;
    ProgressBar bar;
    OutputFile dump;
} Evaluation;

static volatile sig_atomic_t stop_signal;

// The first signal asks to stop after the chunk at work; a second one ends the program at once.
static void on_signal(int number) {
    stop_signal = number;
    signal(number, SIG_DFL);
}

static bool on_chunk(void* context, double flops) {
    progress_add((ProgressBar*)context, flops);
    return !stop_signal;
}

// ----------------------------------------------------------------------------
// the run

static const cJSON* run_section(const RunFolder* run, const char* name, const char* path) {
    const cJSON* section = cJSON_GetObjectItemCaseSensitive(run->json, name);
    if (!cJSON_IsObject(section)) {
        fatal("%s: no object \"%s\"; the file is damaged or of another program: restore it", path, name);
    }
    return section;
}

// What the weights say of themselves.
static void check_weights(RunFolder* run) {
    if (!file_exists(run->weights)) {
        fatal("%s: not found; let train_gpt save a checkpoint of this run first", run->weights);
    }
    SafeTensors file = safetensors_open(run->weights);
    const char *encoding = safetensors_metadata(&file, "position_encoding"),
               *step = safetensors_metadata(&file, "step");
    if (encoding && strcmp(encoding, run->encoding) != 0) {
        fatal("%s: weights of a model with %s, args.json says %s; restore the files of one run", run->weights, encoding,
              run->encoding);
    }
    run->step = xstrdup(step ? step : "unknown");
    safetensors_close(&file);
}

static void open_run(Evaluation* e) {
    RunFolder* run = &e->run;
    const char* folder = e->args.log_dir;
    char* path = text("%s/args.json", folder);
    if (!file_exists(path)) {
        fatal("%s: no args.json, expected the folder of a run such as logs/l12/bam_ssmax/version_00; correct --log_dir",
              folder);
    }
    run->json = read_json(path);
    const cJSON *args = run_section(run, "args", path), *model = run_section(run, "model_args", path);
    const cJSON* dataset = run_section(run, "dataset_args", path);
    run->encoding = model_arg_text(args, "position_encoding", NULL);
    if (!run->encoding) { fatal("%s: no args.position_encoding; the file is damaged: restore it", path); }
    const cJSON* bos = cJSON_GetObjectItemCaseSensitive(dataset, "bos");
    const cJSON* hash = cJSON_GetObjectItemCaseSensitive(dataset, "tokenizer_hash");
    run->config = model_config_from_json(model, run->encoding, cJSON_IsNumber(bos) ? (int)bos->valuedouble : -1, path);
    run->tokenizer_hash = cJSON_IsNumber(hash) ? (uint32_t)hash->valuedouble : 0;
    run->weights = text("%s/model.safetensors", folder);
    run->results = text("%s/results.json", folder);
    run->partial = text("%s/perplexity.partial.json", folder);
    check_weights(run);
    free(path);
}

static void open_tokenizer(Evaluation* e) {
    const EvaluateArgs* a = &e->args;
    bool scores_text = a->score && !score_is_shard(a->score);
    if (!scores_text && (a->score || a->passkey_sample_size == 0)) { return; }
    const Tokenizer* t = e->tokenizer = tokenizer_open(a->tokenizer);
    if (tokenizer_vocab_size(t) != e->run.config.V) {
        fatal("--tokenizer %s has %zu tokens, the model of %s has %zu; give the tokenizer of the run's data",
              a->tokenizer, tokenizer_vocab_size(t), a->log_dir, e->run.config.V);
    }
    if (e->run.tokenizer_hash && tokenizer_hash(t) != e->run.tokenizer_hash) {
        fatal("--tokenizer %s has hash %08x, the data of %s was made with %08x; give the tokenizer of the run's data",
              a->tokenizer, tokenizer_hash(t), a->log_dir, e->run.tokenizer_hash);
    }
}

// ----------------------------------------------------------------------------
// what is left to do

static void plan_passkey(Evaluation* e) {
    const EvaluateArgs* a = &e->args;
    if (a->score || a->passkey_sample_size == 0) { return; }
    e->passkey = passkey_open(e->tokenizer, a->passkey_pred_digits, a->passkey_prefix_digits);
    e->fillers = evaluate_fillers(a, &e->passkey, &e->lengths);
    e->passkey_key = results_passkey_key(a->passkey_sampling, a->passkey_sample_size, a->passkey_pred_digits,
                                         a->passkey_prefix_digits);
    cJSON* of = cJSON_Duplicate(e->of, true);
    cJSON_AddNumberToObject(of, "seed", (double)a->seed);
    cJSON_AddStringToObject(of, "keys", a->passkey_keys);
    bool replaced;
    e->entry = results_passkey(e->results, e->passkey_key, of, &replaced);
    cJSON_Delete(of);
    if (replaced) { printf("passkey  %s was measured with other weights or settings: again\n", e->passkey_key); }
    for (size_t i = 0; i < e->lengths; i++) {
        size_t length = passkey_length(&e->passkey, e->fillers[i]);
        if (a->force || results_find_length(e->entry, length, NULL) < 0) { e->passkey_wanted = true; }
    }
}

// Reads the losses of articles that an interrupted evaluation of the same kind has left.
static void restore_perplexity(Evaluation* e, const cJSON* configuration) {
    if (!file_exists(e->run.partial) || e->args.force) { return; }
    cJSON* json = read_json(e->run.partial);
    if (cJSON_Compare(cJSON_GetObjectItemCaseSensitive(json, "configuration"), configuration, true)) {
        perplexity_restore(&e->perplexity, cJSON_GetObjectItemCaseSensitive(json, "losses"));
    }
    cJSON_Delete(json);
}

// Configuration of the perplexity with what is measured, the beginning of its entry in results.json.
static cJSON* perplexity_configuration(const Evaluation* e) {
    cJSON* configuration = perplexity_json(&e->perplexity, e->args.perplexity_dataset);
    cJSON_AddItemToObject(configuration, "of", cJSON_Duplicate(e->of, true));
    return configuration;
}

static void plan_perplexity(Evaluation* e) {
    const EvaluateArgs* a = &e->args;
    if (!a->perplexity) { return; }
    PerplexitySettings s = {a->perplexity_seq_len, a->perplexity_window_size, a->perplexity_ntokens,
                            a->perplexity_wiki_articles, a->perplexity_join};
    perplexity_check(&s);
    ExpectedTokens expected = {e->run.config.V, e->run.tokenizer_hash, a->log_dir};
    char* path = text("%s/%s", a->data_dir, a->perplexity_dataset);
    e->stream = token_stream_open(path, &expected);
    e->perplexity = perplexity_open(&e->stream, &s, path);
    free(path);
    cJSON* configuration = perplexity_configuration(e);
    int place = results_find_perplexity(e->results, configuration);
    const cJSON* old = place < 0 ? NULL : cJSON_GetArrayItem(results_array(e->results, "perplexity"), place);
    bool same = old && results_perplexity_is_whole(old) &&
                cJSON_Compare(cJSON_GetObjectItemCaseSensitive(old, "of"), e->of, true) &&
                cJSON_Compare(cJSON_GetObjectItemCaseSensitive(old, "articles"),
                              cJSON_GetObjectItemCaseSensitive(configuration, "articles"), true);
    e->perplexity_wanted = a->force || !same;
    if (e->perplexity_wanted) { restore_perplexity(e, configuration); }
    cJSON_Delete(configuration);
}

static void plan_score(Evaluation* e) {
    if (!e->args.score) { return; }
    ExpectedTokens expected = {e->run.config.V, e->run.tokenizer_hash, e->args.log_dir};
    e->input = score_read(e->args.score, &e->args.text, e->tokenizer, &expected);
}

// The longest sequence that will be read.
static size_t longest_context(const Evaluation* e) {
    size_t needs[] = {e->passkey_wanted ? passkey_capacity(&e->passkey, e->fillers[e->lengths - 1]) : 0,
                      e->perplexity_wanted ? e->perplexity.settings.seq_len : 0, e->input.longest};
    size_t most = 0;
    for (size_t i = 0; i < 3; i++) { most = needs[i] > most ? needs[i] : most; }
    return most;
}

// ----------------------------------------------------------------------------
// the model

static void print_header(const Evaluation* e, const ModelMemory* m, size_t cache, size_t context) {
    char a[32], total[16], weights[16], keys[16], chunk[16], other[16], device[256];
    options_print_settings(&e->options, stdout);
    printf("\nmodel    %s %s: %s parameters, step %s\n", e->args.log_dir, e->run.encoding,
           format_count(a, e->model.learned_count), e->run.step);
    printf("memory   %s for %zu tokens of context: weights %s, cache %s,\n",
           format_bytes(total, model_memory_total(m) + cache), context, format_bytes(weights, m->parameters),
           format_bytes(keys, cache));
    printf("         a chunk %s, tables and workspace %s\n", format_bytes(chunk, m->activations),
           format_bytes(other, m->tables + m->workspace));
    backend_describe(device, sizeof device);
    printf("device   %s\n", device);
    if (limits_describe(device, sizeof device, "")) { printf("limits   %s\n", device); }
    if (e->perplexity_wanted) {
        printf("articles %zu of %s x %zu tokens; %s\n", e->perplexity.count, e->args.perplexity_dataset,
               e->perplexity.settings.seq_len, perplexity_bos_policy(&e->perplexity.settings));
    }
    printf("\n");
    fflush(stdout);
}

static void build_model(Evaluation* e) {
    size_t context = longest_context(e), chunk = e->args.seq_batch_size;
    ModelPlan plan;
    plan.mode = MODE_INFERENCE, plan.B = 1, plan.slots = 1, plan.shard = 0, plan.shards = 1;
    plan.T = chunk < context ? chunk : context;
    plan.max_length = context;
    ModelMemory memory = model_plan(&e->model, &e->run.config, &plan);
    size_t cache = kv_cache_bytes(&e->run.config, context), needed = model_memory_total(&memory) + cache;
    print_header(e, &memory, cache, context);
    size_t available = device_memory_available();
    if (needed > available) {
        char x[16], y[16];
        fatal(
            "a context of %zu tokens needs %s, the device has %s free; ask for shorter lengths or lower "
            "--seq_batch_size",
            context, format_bytes(x, needed), format_bytes(y, available));
    }
    model_allocate(&e->model);
    checkpoint_load_weights(&e->model, e->run.weights);
    e->prefill = prefill_open(&e->model, context);
    e->prefill.on_chunk = on_chunk, e->prefill.context = &e->bar;
}

// ----------------------------------------------------------------------------
// passkey

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

static bool is_finished(const Evaluation* e, size_t i) {
    size_t length = passkey_length(&e->passkey, e->fillers[i]);
    return !e->args.force && results_find_length(e->entry, length, NULL) >= 0;
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
    results_put_length(e->entry, &r);
    write_json_atomically(e->run.results, e->results);
    free(depths);
    free(hits);
}

static bool run_length(Evaluation* e, size_t i, bool descending) {
    size_t n = e->args.passkey_sample_size, *order = (size_t*)xcalloc(n, sizeof(size_t));
    PasskeySample* s = draw_samples(e, i, descending, order);
    PasskeyOutcome* outcomes = (PasskeyOutcome*)xcalloc(n, sizeof *outcomes);
    bool going = true;
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
    int place = results_find_length(e->entry, length, NULL);
    progress_clear(&e->bar);
    printf("passkey %7zu tokens | forced %3.0f %%  greedy %3.0f %%  natural %3.0f %% | %s\n", length,
           100 * results_accuracy(e->entry, "accs", place), 100 * results_accuracy(e->entry, "greedy", place),
           100 * results_accuracy(e->entry, "natural", place),
           seconds < 0 ? "as stored" : format_duration(duration, seconds));
    fflush(stdout);
}

static void run_passkey(Evaluation* e) {
    if (!e->passkey_wanted) { return; }
    if (e->args.dump) { e->dump = output_open(e->args.dump); }
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
        misses = results_accuracy(e->entry, "accs", results_find_length(e->entry, length, NULL)) > 0 ? 0 : misses + 1;
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
    if (!e->entry || stop_signal) { return; }
    printf("\npasskey %s, teacher forced, %% by depth of the key\n  length", e->passkey_key);
    for (int c = 0; c < DEPTH_COLUMNS; c++) { printf("%3d-%d%%", c * 10, c * 10 + 10); }
    printf("\n");
    int rows = cJSON_GetArraySize(results_array(e->entry, "seq_lens"));
    for (int row = 0; row < rows; row++) {
        const cJSON* depth = cJSON_GetArrayItem(results_array(e->entry, "depths"), row)->child;
        const cJSON* hit = cJSON_GetArrayItem(results_array(e->entry, "hits"), row)->child;
        double hits[DEPTH_COLUMNS] = {0}, samples[DEPTH_COLUMNS] = {0};
        for (; depth && hit; depth = depth->next, hit = hit->next) {
            int column = (int)(depth->valuedouble * DEPTH_COLUMNS);
            column = column < 0 ? 0 : column >= DEPTH_COLUMNS ? DEPTH_COLUMNS - 1 : column;
            hits[column] += hit->valuedouble, samples[column]++;
        }
        printf("%8.0f", cJSON_GetArrayItem(results_array(e->entry, "seq_lens"), row)->valuedouble);
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

// ----------------------------------------------------------------------------
// perplexity

static void save_partial(const Evaluation* e) {
    cJSON* json = cJSON_CreateObject();
    cJSON_AddItemToObject(json, "configuration", perplexity_configuration(e));
    cJSON_AddItemToObject(json, "losses", perplexity_losses_json(&e->perplexity));
    write_json_atomically(e->run.partial, json);
    cJSON_Delete(json);
}

static void store_perplexity(Evaluation* e) {
    cJSON* entry = perplexity_result_json(&e->perplexity, e->args.perplexity_dataset);
    cJSON_AddItemToObject(entry, "of", cJSON_Duplicate(e->of, true));
    results_put_perplexity(e->results, entry);
    write_json_atomically(e->run.results, e->results);
    unlink(e->run.partial);
}

static void run_perplexity(Evaluation* e) {
    if (!e->perplexity_wanted || stop_signal) { return; }
    Perplexity* p = &e->perplexity;
    size_t n = p->settings.seq_len;
    int* ids = (int*)xcalloc(n + 1, sizeof(int));
    float* losses = (float*)xcalloc(n, sizeof(float));
    double row_flops = prefill_flops(&e->run.config, 0, n) + head_flops(&e->run.config, n), saved = wall_seconds();
    if (p->done > 0) { printf("perplexity goes on after %zu of %zu articles\n", p->done, p->count); }
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
    cJSON* configuration = perplexity_configuration(e);
    const cJSON* entry =
        cJSON_GetArrayItem(results_array(e->results, "perplexity"), results_find_perplexity(e->results, configuration));
    cJSON_Delete(configuration);
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

// ----------------------------------------------------------------------------
// score

static void run_score(Evaluation* e) {
    if (!e->args.score) { return; }
    const ScoreInput* in = &e->input;
    OutputFile out = output_open(e->args.out);
    float* losses = (float*)xcalloc(in->longest, sizeof(float));
    double total = 0, sum = 0;
    size_t scored = 0, d = 0;
    for (size_t i = 0; i < in->count; i++) {
        size_t n = in->starts[i + 1] - in->starts[i];
        total += prefill_flops(&e->run.config, 0, n - 1) + head_flops(&e->run.config, n - 1);
    }
    progress_start(&e->bar, "score", total);
    score_write_header(&out);
    for (; d < in->count && !stop_signal; d++) {
        const int* ids = in->ids.ids + in->starts[d];
        size_t n = in->starts[d + 1] - in->starts[d];
        snprintf(e->bar.detail, sizeof e->bar.detail, "%zu/%zu", d + 1, in->count);
        if (!prefill_losses(&e->prefill, ids, n, losses)) { break; }
        score_write(&out, d, ids, n, losses);
        sum += array_sum(losses, n - 1);
        scored += n - 1;
    }
    progress_clear(&e->bar);
    free(losses);
    if (d < in->count) { return; }  // interrupted: the unfinished file goes
    output_close(&out);
    printf("scored   %zu tokens of %zu documents: mean log-probability %.6f, perplexity %.6f\n", scored, in->count,
           -sum / (double)scored, exp(sum / (double)scored));
}

// ----------------------------------------------------------------------------

static void read_arguments(Evaluation* e, int argc, char** argv) {
    e->options = evaluate_options(&e->args);
    options_parse(&e->options, argc, argv);
    options_check(&e->options);
    options_check_text(&e->options, "perplexity_dataset");
    evaluate_check(&e->args);
}

static void open_results(Evaluation* e) {
    e->results = results_open(e->run.results);
    e->of = cJSON_CreateObject();
    cJSON_AddStringToObject(e->of, "step", e->run.step);
    cJSON_AddStringToObject(e->of, "dtype", e->args.dtype);
}

static void release(Evaluation* e) {
    if (e->prefill.model) {
        prefill_close(&e->prefill);
        model_free(&e->model);
    }
    if (e->passkey.tokenizer) { passkey_close(&e->passkey); }
    if (e->args.perplexity) {
        perplexity_close(&e->perplexity);
        token_stream_close(&e->stream);
    }
    if (e->tokenizer) { tokenizer_close(e->tokenizer); }
    score_free(&e->input);
    free(e->fillers);
    free(e->passkey_key);
    cJSON_Delete(e->results);
    cJSON_Delete(e->of);
    cJSON_Delete(e->run.json);
    free(e->run.weights);
    free(e->run.results);
    free(e->run.partial);
    free(e->run.step);
    options_free(&e->options);
}

int main(int argc, char** argv) {
    static Evaluation evaluation;
    Evaluation* e = &evaluation;
    startup_streams();
    startup_choose_waiting(argv);
    signals_to_own_thread();
    signal(SIGXFSZ, SIG_IGN);  // a file at its size limit: an error of write(), as when the disk is full
    read_arguments(e, argc, argv);
    signal(SIGPIPE, SIG_IGN);  // a reader of the progress that is gone: the results go on, the end tells
    backend_init(e->args.device, e->args.dtype);
    open_run(e);
    open_tokenizer(e);
    open_results(e);
    plan_passkey(e);
    plan_perplexity(e);
    plan_score(e);
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    if (e->passkey_wanted || e->perplexity_wanted || e->args.score) {
        build_model(e);
    } else {
        printf("nothing left to do: %s has it all; --force measures again\n", e->run.results);
    }
    run_passkey(e);
    run_perplexity(e);
    run_score(e);
    print_matrix(e);
    print_perplexity(e);
    if (stop_signal) { printf("stopped: %s has what is finished, the same command goes on\n", e->run.results); }
    release(e);
    return stop_signal ? 128 + stop_signal : 0;
}
