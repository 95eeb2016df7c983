/*
Trains a language model: options, data, training loop. No mathematics: that is in llmc/model.h and the
operators. This is the CUDA translation unit; it also builds for the CPU with `cc -x c`.

On several ranks every rank runs this program on its share of each batch. Rank 0 alone writes files and prints; what
decides about the next step (loss, norm, signals) is agreed first, so that all ranks always do the same.
*/
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // sched_getaffinity
#endif

#include "llmc/checkpoint.h"
#include "llmc/dataloader.h"
#include "llmc/eval/generate.h"
#include "llmc/host_limits.h"
#include "llmc/logger.h"
#include "llmc/model.h"
#include "llmc/model_args.h"
#include "llmc/ranks/model_dist.h"
#include "llmc/ranks/ranks.h"
#include "llmc/startup.h"
#include "llmc/ranks/stop.h"
#include "llmc/tokenizer.h"
#include "llmc/train_args.h"
#include "llmc/trainer.h"

// Updates that may be skipped one after another because of a NaN before the run gives up.
enum { MAX_SKIPPED_STEPS = 10 };

// Has any rank been asked to stop? Collective.
static bool must_stop(Trainer* t) {
    if (!t->stop) { t->stop = stop_agreed(); }
    if (t->stop) { stop_be_patient(0); }
    return t->stop != 0;
}

// ----------------------------------------------------------------------------
// setting up

// Command line, then the checkpoint's run for what it left open, then the checks that need no data.
static void read_arguments(Trainer* t, int argc, char** argv) {
    TrainArgs* a = &t->args;
    t->options = train_options(a);
    options_parse(&t->options, argc, argv);
    if (a->checkpoint_args) {
        if (!a->checkpoint) { fatal("--checkpoint_args needs --checkpoint, the run to take the arguments from"); }
        char* path = checkpoint_args_path(a->checkpoint);
        cJSON* json = read_json(path);
        bool reset_steps = a->reset_steps, init_from = a->init_from != NULL, drop_encoding = a->drop_encoding;
        bool named = a->run_name != NULL;
        options_from_json(&t->options, cJSON_GetObjectItemCaseSensitive(json, "args"), path);
        // how that run itself began is over: going on from it begins no new phase and reads no other weights
        a->reset_steps = reset_steps, a->drop_encoding = drop_encoding;
        if (!init_from) { a->init_from = NULL; }
        if (!named && reset_steps) { a->run_name = NULL; }
        cJSON_Delete(json);
        free(path);
    }
    options_check(&t->options);
    options_check_text(&t->options, NULL);
    if (a->reset_steps && !a->checkpoint) { fatal("--reset_steps needs --checkpoint, the run to go on from"); }
    if (a->checkpoint && a->init_from) {
        fatal("--checkpoint and --init_from exclude each other: resume a run, or start one from weights");
    }
    if (a->drop_encoding && !a->init_from) { fatal("--drop_encoding needs --init_from, weights to drop it from"); }
    train_check_run_name(a);
    if (a->checkpoint && !a->reset_steps && options_source(&t->options, "run_name") == OPTION_FROM_COMMAND_LINE) {
        fatal("--run_name %s is for a new run, and --checkpoint goes on in the folder of its run; leave it out",
              a->run_name);
    }
    t->schedule = schedule_create(a->lr_scheduler, a->num_iterations, a->warmup_iters, a->learning_rate,
                                  a->learning_rate_decay_frac, 0.2);
}

// A list that says the same of all layers is the flag for all layers, or for a window of 0 none.
static void settle_list(Options* o, const char* list, const char* one) {
    Option *from = options_row(o, list), *to = options_row(o, one);
    const OptionSource source = from->source;
    const OptionList values = *(const OptionList*)from->target;
    option_unset(from);
    if (to->type != OPTION_SIZE || values.sizes[0] > 0) { option_set(o, to, source, list, values.items[0]); }
}

// One kind of attention is chosen for all layers.
static void choose_attention(Trainer* t) {
    const TrainArgs* a = &t->args;
    ModelConfig layers;
    memset(&layers, 0, sizeof layers);
    layers.options = a->model;
    train_model_layers(&layers, a);
    model_check_layers(&layers);
    if (model_has_window(&layers) && strcmp(a->attention, "cudnn") == 0) {
        if (a->layer_windows.count > 0) { fatal("--attention cudnn has no --layer_windows; use --attention own"); }
        fatal("--attention cudnn has no --window %zu; use --attention own", a->model.window);
    }
    attention_choose(a->attention, model_terms(&layers));
    t->encoding = model_encoding_name(&layers);
    if (a->layer_encodings.count > 0 && model_encoding_period(&layers) == 1) {
        settle_list(&t->options, "layer_encodings", "position_encoding");
    }
    if (a->layer_windows.count > 0 && model_window_period(&layers) == 1) {
        settle_list(&t->options, "layer_windows", "window");
    }
}

static void open_data(Trainer* t) {
    const TrainArgs* a = &t->args;
    t->tokens_per_step = train_tokens_per_step(a, ranks.size);
    t->accumulation = t->tokens_per_step / (a->batch_size * a->sequence_length * ranks.size);
    size_t val_tokens = train_val_tokens(a, &t->options, ranks.size);
    if (a->val_loss_every > 0 && val_tokens == 0) {
        fatal("--val_loss_every %zu with no validation tokens; set --val_tokens, or --val_loss_every 0",
              a->val_loss_every);
    }
    DataLoaderConfig c;
    memset(&c, 0, sizeof c);
    char* folder = text("%s/%s", a->data_dir, a->dataset);
    c.folder = folder;
    c.B = a->batch_size, c.T = a->sequence_length, c.rank = ranks.rank, c.world = ranks.size;
    c.accumulation = t->accumulation, c.val_tokens = val_tokens;
    c.val_padding = val_tokens > 0 ? a->val_tokens_padding : 0;
    c.overfit_single_batch = a->overfit_single_batch;
    dataloader_open(&t->loader, &c);
    t->data_hash = data_fingerprint(&t->loader);
    free(folder);
}

// The tokenizer and the prompt of samples, checked before any work.
static void open_tokenizer(Trainer* t) {
    const TrainArgs* a = &t->args;
    if (a->sample_every == 0) { return; }
    t->tokenizer = tokenizer_open(a->tokenizer);
    if (tokenizer_vocab_size(t->tokenizer) != t->loader.vocab_size) {
        fatal("--tokenizer %s has %zu tokens, the data %zu; give the tokenizer that made the data, or --sample_every 0",
              a->tokenizer, tokenizer_vocab_size(t->tokenizer), t->loader.vocab_size);
    }
    int bos = tokenizer_bos(t->tokenizer);
    token_list_append(&t->prompt, &bos, 1);
    tokenizer_encode(t->tokenizer, a->sample_prompt, strlen(a->sample_prompt), &t->prompt);
}

static void print_memory(const Trainer* t, const ModelMemory* memory) {
    char total[16], parameters[16], gradients[16], optimizer[16], activations[16], other[16];
    printf("memory   %s: parameters %s, gradients %s, optimiser %s,\n", format_bytes(total, model_memory_total(memory)),
           format_bytes(parameters, memory->parameters), format_bytes(gradients, memory->gradients),
           format_bytes(optimizer, memory->optimizer));
    printf("         activations %s%s, tables and workspace %s\n", format_bytes(activations, memory->activations),
           t->args.recompute ? " (recomputed)" : "", format_bytes(other, memory->tables + memory->workspace));
}

static void print_ranks(const Trainer* t) {
    if (ranks.size == 1) { return; }
    char bytes[16];
    printf("ranks    %zu on %zu host%s by %s, each sends at least %s a step", ranks.size, ranks.hosts,
           ranks.hosts == 1 ? "" : "s", ranks.way,
           format_bytes(bytes, (size_t)model_network_bytes(&t->model, ranks.size)));
    if (ranks.threads) { printf(", %zu thread%s each", ranks.threads, ranks.threads == 1 ? "" : "s"); }
    printf("\n");
    if (ranks.bound) {
        printf("         bound to part of the cores by the launcher; mpirun --bind-to none frees all\n");
    }
}

static void print_header(const Trainer* t, const ModelMemory* memory) {
    char a[32], b[32], c[32], device[256];
    DataLoaderTokens tokens = dataloader_tokens(&t->loader);
    options_print_settings(&t->options, stdout);
    printf("\ndata     %s: %s tokens in %zu shard%s, vocabulary %zu\n", t->args.dataset, format_count(a, tokens.total),
           tokens.shards, tokens.shards == 1 ? "" : "s", t->loader.vocab_size);
    printf("         validation %s, training %s, steps an epoch %s\n", format_count(a, tokens.validation),
           format_count(b, tokens.training), format_count(c, tokens.steps_per_epoch));
    printf("step     %s tokens: %zu x %zu, %zu rank%s, %zu accumulation step%s\n", format_count(a, t->tokens_per_step),
           t->args.batch_size, t->args.sequence_length, ranks.size, ranks.size == 1 ? "" : "s", t->accumulation,
           t->accumulation == 1 ? "" : "s");
    printf("model    %s %s: %s parameters\n", t->args.model_size, t->encoding, format_count(a, t->model.learned_count));
    print_memory(t, memory);
    print_ranks(t);
    backend_describe(device, sizeof device);
    printf("device   %s\n", device);
    if (limits_describe(device, sizeof device, "")) { printf("limits   %s\n", device); }
    fflush(stdout);
}

static void build_model(Trainer* t) {
    const TrainArgs* a = &t->args;
    t->config = train_model_config(&t->args, t->loader.vocab_size, t->loader.bos);
    train_warn_unused(a, &t->options, &t->config);
    size_t sample = t->tokenizer ? t->prompt.count + a->sample_length : 0;
    ModelPlan plan;
    plan.mode = a->recompute ? MODE_TRAIN_RECOMPUTE : MODE_TRAIN;
    plan.B = a->batch_size, plan.T = a->sequence_length, plan.slots = t->accumulation;
    plan.max_length = sample > plan.T ? sample : plan.T;
    bool sharded = strcmp(a->zero_stage, "1") == 0;
    plan.shard = sharded ? ranks.rank : 0, plan.shards = sharded ? ranks.size : 1;
    ModelMemory memory = model_plan(&t->model, &t->config, &plan);
    print_header(t, &memory);
    size_t needed = model_memory_total(&memory), available = device_memory_available() / dist_ranks_per_device();
    if (needed > available) {
        char x[16], y[16];
        fatal("the model needs %s, the device has %s free%s; lower --batch_size or --model_size, or use --recompute 1",
              format_bytes(x, needed), format_bytes(y, available), dist_ranks_per_device() > 1 ? " for each rank" : "");
    }
    t->peak_flops = backend_matmul_rate();  // takes memory for a while, so before the model does
    model_allocate(&t->model);
}

// All ranks must have been given the same arguments and data, or they would train different models.
static void check_ranks(Trainer* t) {
    cJSON* json = options_to_json(&t->options);
    DataLoaderTokens tokens = dataloader_tokens(&t->loader);
    char* arguments = cJSON_PrintUnformatted(json);
    char* data = text("%zu %zu %zu %u %llx", tokens.total, tokens.shards, t->loader.vocab_size,
                      t->loader.tokenizer_hash, (unsigned long long)t->data_hash);
    ranks_check_same("arguments", arguments, strlen(arguments));
    ranks_check_same("data", data, strlen(data));
    cJSON_free(arguments);
    cJSON_Delete(json);
    free(data);
}

// ----------------------------------------------------------------------------
// one step

// Sums the gradients of the step's micro-batches over all ranks, the last one's while they are computed; returns the
// mean loss of this rank's.
static double accumulate_gradients(Trainer* t) {
    const TrainArgs* a = &t->args;
    float scale = (float)(1.0 / (double)t->tokens_per_step);
    model_zero_gradients(&t->model);
    for (size_t micro = 0; micro < t->accumulation; micro++) {
        dataloader_next(&t->loader);
        if (t->loader.wrapped) {
            size_t dropped = t->loader.dropped;
            char* left = text("; its last %zu token%s too few for a step", dropped, dropped == 1 ? " was" : "s were");
            printf("epoch %zu: the data starts again%s\n", (size_t)t->state.epoch + 1, dropped ? left : "");
            free(left);
        }
        if (t->batch_log) {
            fprintf(t->batch_log, "%zu,%zu,%016llx\n", t->state.step, micro,
                    (unsigned long long)dataloader_hash_batch(&t->loader));
            fflush(t->batch_log);
        }
        model_forward(&t->model, t->loader.inputs, a->batch_size, a->sequence_length);
        bool overlap = micro + 1 == t->accumulation && a->overlap_communication;
        t->model.segment_ready = overlap ? model_reduce_segment : NULL;
        model_backward(&t->model, t->loader.targets, scale, micro);
    }
    t->model.segment_ready = NULL;
    if (!a->overlap_communication) { model_reduce_gradients(&t->model); }
    dist_wait();
    return model_mean_loss(&t->model, t->accumulation);
}

// What ranks tell each other about a step.
typedef struct {
    double loss, squares;  // this rank's share of the mean loss and of the gradient's squared norm
    double stop;           // the signal that came to it
} StepReport;

// The sums over ranks, in their order, so that all ranks decide by the same bits.
static StepReport agree_on_step(StepReport mine) {
    StepReport sum = {0, 0, 0}, *all = (StepReport*)xcalloc(ranks.size, sizeof mine);
    ranks_all_gather(all, &mine, sizeof mine);
    for (size_t r = 0; r < ranks.size; r++) {
        sum.loss += all[r].loss, sum.squares += all[r].squares;
        sum.stop = fmax(sum.stop, all[r].stop);
    }
    free(all);
    return sum;
}

static void update_weights(Trainer* t, double norm, double rate) {
    const TrainArgs* a = &t->args;
    UpdateSettings s;
    double prior_peak = options_source(&t->options, "prior_lr") > OPTION_FROM_DEFAULT ? a->prior_lr : a->learning_rate;
    s.learning_rate = rate;
    s.prior_learning_rate = rate * (prior_peak / a->learning_rate);
    s.weight_decay = a->weight_decay;
    s.beta1 = a->beta1, s.beta2 = a->beta2, s.epsilon = a->adam_eps;
    // as torch.nn.utils.clip_grad_norm_ does
    s.gradient_scale = a->grad_clip > 0 && norm + 1e-6 > a->grad_clip ? a->grad_clip / (norm + 1e-6) : 1.0;
    s.step = ++t->state.optimizer_step;
    s.adamw = strcmp(a->optimizer, "adamw") == 0;
    model_update(&t->model, &s);
    model_share_weights(&t->model);
}

static void print_progress(Trainer* t, double loss, double norm, double rate, double seconds) {
    char line[PROGRESS_BUFFER];
    step_timer_add(&t->timer, seconds);
    Progress p;
    p.step = t->state.step - 1, p.num_steps = end_step(t);  // the number of train.log's row
    p.loss = loss, p.norm = norm, p.lr = rate;
    p.step_seconds = seconds;
    p.tokens_per_second = (double)t->tokens_per_step / seconds;
    p.mfu = p.tokens_per_second * model_flops_per_token(&t->config, t->args.sequence_length) /
            (t->peak_flops * (double)ranks.size);
    p.seconds_left = step_timer_seconds(&t->timer) * (double)(p.num_steps - t->state.step);
    puts(format_progress(line, &p));
    fflush(stdout);
}

// Notes the batches of a step that is skipped, so that whoever looks for the fault knows them.
static void note_batches(Trainer* t) {
    uint64_t first = 0;
    for (size_t micro = 0; micro < t->accumulation; micro++) {
        uint64_t hash = dataloader_hash_again(&t->loader, micro);
        if (micro == 0) { first = hash; }
        if (t->args.debug_batches) { continue; }
        if (!t->batch_log) { open_batch_log(t); }
        fprintf(t->batch_log, "%zu,%zu,%016llx\n", t->state.step, micro, (unsigned long long)hash);
    }
    fflush(t->batch_log);
    warn("loss or gradient of step %zu is not finite; its update is skipped (first batch %016llx, all in batches.log)",
         t->state.step, (unsigned long long)first);
}

// One optimiser step. A loss or gradient that is not finite skips the update, so the weights stay good, and
// is logged; too many in a row end the run.
static void train_step(Trainer* t) {
    double started = wall_seconds();
    double rate = learning_rate_at(&t->schedule, t->state.step - t->state.schedule_start);
    StepReport report;
    report.loss = accumulate_gradients(t) / (double)ranks.size;
    if (t->args.debug_nan_step == t->state.step + 1 && ranks.rank + 1 == ranks.size) { report.loss = NAN; }
    report.squares = model_gradient_squares(&t->model);
    if (t->model.plan.shards == 1 && ranks.rank > 0) { report.squares = 0; }  // every rank has the whole gradient
    report.stop = stop_signal;
    report = agree_on_step(report);
    t->stop = (int)report.stop;
    if (t->stop) { stop_be_patient(0); }
    double loss = report.loss, norm = sqrt(report.squares);
    bool finite = isfinite(loss) && isfinite(norm);
    if (finite) { update_weights(t, norm, rate); }
    device_synchronize();
    DataLoaderState position = dataloader_state(&t->loader);
    t->state.epoch = position.epoch, t->state.position = position.position;
    double seconds = wall_seconds() - started;
    if (ranks.rank == 0) {
        log_train(&t->logs, t->state.step, loss, norm, rate, seconds, (double)t->tokens_per_step / seconds);
    }
    if (finite) {
        prove_checkpoint(t);
    } else {
        note_batches(t);
    }
    t->state.step++;
    t->saved = false;
    print_progress(t, loss, norm, rate, seconds);
    t->skipped = finite ? 0 : t->skipped + 1;
    if (t->skipped >= MAX_SKIPPED_STEPS) {
        fatal("%d steps in a row without a finite loss; lower --learning_rate and %s", MAX_SKIPPED_STEPS,
              name_checkpoint(t));
    }
}

// ----------------------------------------------------------------------------
// between steps

// Mean loss over the validation tokens: every rank has as many batches of one size, so the mean of their means is the
// mean over tokens.
static void validate(Trainer* t) {
    const TrainArgs* a = &t->args;
    double started = wall_seconds(), sum = 0;
    size_t batches = dataloader_val_batches(&t->loader);
    bool show_batches = is_terminal(stdout) && ranks.size == 1;  // mpirun shows its ranks a terminal, whatever it has
    for (size_t i = 0; i < batches; i++) {
        dataloader_val_batch(&t->loader, i);
        model_forward(&t->model, t->loader.inputs, a->batch_size, a->sequence_length);
        model_losses(&t->model, t->loader.targets, 0);
        sum += model_mean_loss(&t->model, 1);
        if (show_batches) { printf("\rvalidating %zu/%zu", i + 1, batches), fflush(stdout); }
        if (must_stop(t)) { break; }
    }
    if (show_batches) { printf("\r%40s\r", ""); }
    if (t->stop) { return; }
    StepReport report = {sum / (double)(batches * ranks.size), 0, 0};
    double loss = agree_on_step(report).loss, seconds = wall_seconds() - started;
    double tokens = (double)(batches * a->batch_size * a->sequence_length * ranks.size);
    if (ranks.rank == 0) { log_eval(&t->logs, t->state.step, loss, seconds, tokens / seconds); }
    char rate[32];
    printf("val  %zu | loss %.4f perplexity %.2f | %s tok/s\n", t->state.step, loss, exp(loss),
           progress_rate(rate, tokens / seconds));
    fflush(stdout);
}

// Control characters of generated text would act on the terminal.
static void print_text(const char* s) {
    for (; *s; s++) { putchar((unsigned char)*s < ' ' || *s == 0x7f ? ' ' : *s); }
    putchar('\n');
    fflush(stdout);
}

static void print_sample(Trainer* t) {
    const TrainArgs* a = &t->args;
    SamplingSettings settings = {a->temperature, a->top_p, 0};
    size_t length = t->prompt.count;
    int* tokens = (int*)xcalloc(length + a->sample_length, sizeof(int));
    memcpy(tokens, t->prompt.ids, length * sizeof(int));
    KVCache cache = kv_cache_create(&t->config, length + a->sample_length);
    length = generate(&t->model, &cache, tokens, length, a->sample_length, t->loader.eos, &settings, &t->state.sampler,
                      NULL);
    char* sample = tokenizer_decode(t->tokenizer, tokens, length, NULL);
    printf("sample %zu | ", t->state.step);
    print_text(sample);
    free(sample);
    free(tokens);
    kv_cache_free(&cache);
}

static bool is_due(size_t every, size_t step, bool last) { return every > 0 && (step % every == 0 || last); }

static void train(Trainer* t) {
    const TrainArgs* a = &t->args;
    size_t end = end_step(t);
    while (!must_stop(t)) {
        bool last = t->state.step >= end;
        if (last) { save(t); }  // before anything at the end of a run can go wrong
        if (last && !t->saved) { break; }
        if (is_due(a->val_loss_every, t->state.step, last)) { validate(t); }
        Random sampler = t->state.sampler;
        if (is_due(a->sample_every, t->state.step, last) && !t->stop) {
            stop_be_patient(0);  // rank 0 may take its time
            if (ranks.rank == 0) { print_sample(t); }
        }
        if (last || must_stop(t)) {
            t->state.sampler = sampler;  // a resumed run draws the sample of this step again
            break;
        }
        double usual = step_timer_seconds(&t->timer);
        if (usual > 0) { stop_be_patient(5 + 3 * usual); }
        train_step(t);
        if (!is_due(a->checkpoint_every, t->state.step, false)) { continue; }
        save(t);
        if (!t->saved) { printf("step %zu is not saved: its update was skipped\n", t->state.step); }
    }
    if (t->stop) { save(t); }
    end_of_training(t);
}

int main(int argc, char** argv) {
    static Trainer trainer;
    Trainer* t = &trainer;
    startup_streams();
    startup_choose_waiting(argv);
    signals_to_own_thread();
    signal(SIGXFSZ, SIG_IGN);  // a file at its size limit: an error of write(), as when the disk is full
    ranks_init(dist_needs_mpi());
    read_arguments(t, argc, argv);
    signal(SIGPIPE, SIG_IGN);  // a reader of the progress that is gone: the run goes on, its end tells
    if (ranks.rank == 0) { stop_starting_up(); }
    choose_attention(t);
    backend_init(dist_device(t->args.device), t->args.dtype);
    open_data(t);
    check_ranks(t);
    open_tokenizer(t);
    dist_open();
    build_model(t);
    load_weights(t);
    if (is_finished(t)) {
        printf("nothing to do: %zu of %zu steps are done\n", t->state.step, end_step(t));
    } else {
        stop_catch_signals();  // before anybody is told of the run
        open_run_folder(t);
        train(t);
    }
    dist_close();
    if (t->logs.train.file) { run_logs_close(&t->logs); }
    dataloader_close(&t->loader);
    model_free(&t->model);
    if (t->tokenizer) { tokenizer_close(t->tokenizer); }
    free(t->prompt.ids);
    free(t->folder), free(t->checkpoint), free(t->proven), free(t->encoding);
    if (t->batch_log) { fclose(t->batch_log); }
    options_free(&t->options);
    ranks_finish();
    return t->stop ? 128 + t->stop : 0;
}
