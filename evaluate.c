/*
Evaluates a trained model at lengths far beyond its training: passkey retrieval, perplexity by position, and scores of
a text. Results are added to the run's results.json after every finished piece of work, so that an evaluation that was
interrupted goes on where it was. No mathematics: that is in llmc/model.h and the operators.
*/
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // memmem
#endif

#include "llmc/eval/evaluate_passkey.h"
#include "llmc/eval/evaluate_perplexity.h"
#include "llmc/host_limits.h"
#include "llmc/startup.h"

// ----------------------------------------------------------------------------
// what is left to do

static void open_tokenizer(Evaluation* e) {
    const EvaluateArgs* a = &e->args;
    bool scores_text = a->score && !score_is_shard(a->score);
    if (!scores_text && (a->score || a->passkey_sample_size == 0)) { return; }
    e->tokenizer = tokenizer_open(a->tokenizer);
    run_check_tokenizer(&e->run, e->tokenizer, a->log_dir);
}

static void plan_score(Evaluation* e) {
    if (!e->args.score) { return; }
    ExpectedTokens expected = expected_tokens(e);
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

static bool same_file(const char* a, const char* b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

// Notices before any measuring what could not be written after it.
static void open_outputs(Evaluation* e) {
    const EvaluateArgs* a = &e->args;
    if (e->passkey_wanted || e->perplexity_wanted) { results_check_writable(&e->results); }
    if (a->dump && e->passkey_wanted) { e->dump = output_open(a->dump); }
    if (!a->score) { return; }
    if (same_file(a->score, a->out)) { fatal("--out %s is the text to score; give another file", a->out); }
    e->out = output_open(a->out);
}

// ----------------------------------------------------------------------------
// the model

static void print_header(const Evaluation* e, const ModelMemory* m, size_t cache, size_t context) {
    char a[32], total[16], weights[16], keys[16], chunk[16], other[16], device[256];
    options_print_settings(&e->options, stdout);
    printf("\nmodel    %s %s: %s parameters, step %s\n", e->args.log_dir, e->run.encoding,
           format_count(a, e->model.learned_count), e->run.step);
    if (e->positions) { printf("changed  positions: %s\n", e->positions); }
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
    check_positions(e, context);
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
    run_load_weights(&e->run, &e->model);
    e->prefill = prefill_open(&e->model, context);
    e->prefill.on_chunk = on_chunk, e->prefill.context = &e->bar, e->prefill.weights = e->run.weights.path;
}

// ----------------------------------------------------------------------------
// score

static void run_score(Evaluation* e) {
    if (!e->args.score) { return; }
    const ScoreInput* in = &e->input;
    float* losses = (float*)xcalloc(in->longest, sizeof(float));
    double total = 0, sum = 0;
    size_t scored = 0, d = 0;
    for (size_t i = 0; i < in->count; i++) {
        size_t n = in->starts[i + 1] - in->starts[i];
        total += prefill_flops(&e->run.config, 0, n - 1) + head_flops(&e->run.config, n - 1);
    }
    progress_start(&e->bar, "score", total);
    score_write_header(&e->out);
    for (; d < in->count && !stop_signal; d++) {
        const int* ids = in->ids.ids + in->starts[d];
        size_t n = in->starts[d + 1] - in->starts[d];
        snprintf(e->bar.detail, sizeof e->bar.detail, "%zu/%zu", d + 1, in->count);
        read_length(e, n - 1);
        if (!prefill_losses(&e->prefill, ids, n, losses)) { break; }
        score_write(&e->out, d, ids, n, losses);
        sum += array_sum(losses, n - 1);
        scored += n - 1;
    }
    progress_clear(&e->bar);
    free(losses);
    if (d < in->count) { return; }  // interrupted: the unfinished file goes
    double perplexity = exp(sum / (double)scored);
    prefill_check(&e->prefill, "the perplexity", perplexity, scored - 1);
    output_close(&e->out);
    printf("scored   %zu tokens of %zu documents: mean log-probability %.6f, perplexity %.6f\n", scored, in->count,
           -sum / (double)scored, perplexity);
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
    char* hash = text("%016llx", (unsigned long long)e->run.weights_hash);
    e->results = results_open(e->args.log_dir);
    e->of = cJSON_CreateObject();
    cJSON_AddStringToObject(e->of, "step", e->run.step);
    cJSON_AddStringToObject(e->of, "weights", hash);
    cJSON_AddStringToObject(e->of, "dtype", e->args.dtype);
    if (e->positions) { cJSON_AddStringToObject(e->of, "positions", e->positions); }
    free(hash);
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
    free(e->partial);
    free(e->positions);
    cJSON* objects[] = {e->of, e->passkey_of, e->passkey_outdated, e->perplexity_entry, e->perplexity_outdated};
    for (size_t i = 0; i < sizeof objects / sizeof *objects; i++) { cJSON_Delete(objects[i]); }
    results_close(&e->results);
    run_folder_close(&e->run);
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
    e->run = run_folder_open(e->args.log_dir);
    change_positions(e);
    open_tokenizer(e);
    open_results(e);
    plan_passkey(e);
    plan_perplexity(e);
    plan_score(e);
    signals_to_stop_by(on_signal);
    if (e->passkey_wanted || e->perplexity_wanted || e->args.score) {
        open_outputs(e);
        build_model(e);
    } else {
        printf("nothing left to do: %s has it all; --force measures again\n", e->results.path);
    }
    run_passkey(e);
    run_perplexity(e);
    run_score(e);
    print_matrix(e);
    print_perplexity(e);
    if (stop_signal && e->args.score) {
        printf("stopped: nothing was written\n");
    } else if (stop_signal) {
        printf("stopped: %s has what is finished, the same command goes on\n", e->results.path);
    }
    release(e);
    return stop_signal ? 128 + stop_signal : 0;
}
