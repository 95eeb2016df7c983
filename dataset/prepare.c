/*
Text to token shards: `dataset/prepare a.txt b.jsonl --out data/NAME`. Every document becomes BOS, its tokens, EOS.

One thread reads blocks of whole documents and writes their tokens in the order of the blocks; the others turn blocks
into tokens. Blocks live in a ring, so memory stays bounded: a few blocks a thread, more only for documents larger than
a block. The shards do not depend on the number of threads.
*/
#define _GNU_SOURCE
#include <signal.h>

#include "../llmc/host_limits.h"
#include "../llmc/options.h"
#include "../llmc/startup.h"
#include "../llmc/tokenizer.h"
#include "../llmc/text_tally.h"
#include "document_lengths.h"
#include "shard_writer.h"

// Half of the documents shorter than this: too little to learn from how far back a token looks.
enum { SHORT_DOCUMENT = 64, SHORT_DATASET = SHORT_DOCUMENT * SHORT_DOCUMENT };

enum { MAX_THREADS = 1024 };

typedef struct {
    OptionList input;
    TextOptions text;
    const char *tokenizer, *out;
    size_t shard_size, threads;
    bool overwrite;
} Arguments;

// A run of whole documents of one input, and what a worker made of it.
typedef struct {
    bool done;
    TextBlock text;
    TextReport report;
    char* tokens;  // token_bytes each
    size_t token_count, token_capacity;
    size_t* lengths;  // of its documents, in tokens
    size_t length_count, length_capacity;
} Block;

typedef struct {
    const Tokenizer* tokenizer;
    DocumentRules rules;
    size_t token_bytes;
    Block* ring;
    size_t ring_size, filled, taken;  // blocks since the start
    bool ended;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
} Pipeline;

// ----------------------------------------------------------------------------
// progress

typedef struct {
    double started, printed;
    bool terminal;
    size_t total;  // bytes of all inputs, 0 = unknown
    size_t read;
} Progress;

static Progress progress;
static ShardWriter writer;
static DocumentLengths lengths;

// One line that fits 80 columns: in place on a terminal, every ten seconds elsewhere.
static void progress_print(size_t tokens_made, size_t documents_read) {
    double now = wall_seconds(), elapsed = now - progress.started;
    if (now - progress.printed < (progress.terminal ? 0.2 : 10)) { return; }
    progress.printed = now;
    char percent[16] = "", left[32] = "", tokens[32], documents[32], duration[16];
    if (progress.total > 0 && progress.read > 0) {
        double part = (double)progress.read / (double)progress.total;
        if (part > 1) { part = 1; }
        snprintf(percent, sizeof percent, "%5.1f%%  ", 100 * part);
        snprintf(left, sizeof left, "  %s left", format_duration(duration, elapsed * (1 - part) / part));
    }
    fprintf(stderr, "%s%s%.1f MB/s  %s tokens  %s documents%s%s", progress.terminal ? "\r\033[K" : "", percent,
            (double)progress.read / elapsed / 1e6, format_count(tokens, tokens_made),
            format_count(documents, documents_read), left, progress.terminal ? "" : "\n");
    fflush(stderr);
}

static void progress_clear(void) {
    if (progress.terminal) { fputs("\r\033[K", stderr); }
}

// ----------------------------------------------------------------------------
// stopping early

// The line of progress makes room for the error.
static void report_error(const char* message) {
    progress_clear();
    fprintf(stderr, "error: %s\n", message);
}

// Ends a failed run without waiting for the workers, which may be deep in a document.
static void stop_after_error(void) {
    shard_writer_abandon(&writer);
    _exit(1);
}

// Waits for a signal that ends the program, tidies up, and lets it.
static void* signal_thread(void* argument) {
    const sigset_t* signals = (const sigset_t*)argument;
    int number;
    sigwait(signals, &number);
    shard_writer_abandon(&writer);
    progress_clear();
    if (!writer.committed) { fprintf(stderr, "interrupted: nothing was written to %s\n", writer.folder); }
    fflush(stderr);
    signal(number, SIG_DFL);
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, number);
    kill(getpid(), number);
    pthread_sigmask(SIG_UNBLOCK, &one, NULL);
    _exit(128 + number);
}

static void watch_signals(void) {
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    static sigset_t signals;
    signal(SIGXFSZ, SIG_IGN);  // a file at its size limit: an error of write(), as when the disk is full
    sigemptyset(&signals);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        struct sigaction action;
        sigaction(numbers[i], NULL, &action);
        if (action.sa_handler != SIG_IGN) { sigaddset(&signals, numbers[i]); }
    }
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    pthread_t thread;
    if (pthread_create(&thread, NULL, signal_thread, &signals) != 0) { fatal("cannot start a thread"); }
    pthread_detach(thread);
}

// ----------------------------------------------------------------------------
// workers: text to tokens

// Appends BOS, ids, EOS in the shard's width.
static void block_add_document(const Pipeline* p, Block* b, const TokenList* ids) {
    size_t n = ids->count + 2;
    if (b->token_count + n > b->token_capacity) {
        b->token_capacity = 2 * b->token_capacity + n;
        b->tokens = (char*)xrealloc(b->tokens, b->token_capacity * p->token_bytes);
    }
    for (size_t i = 0; i < n; i++) {
        int id = i == 0 ? tokenizer_bos(p->tokenizer) : i == n - 1 ? tokenizer_eos(p->tokenizer) : ids->ids[i - 1];
        if (p->token_bytes == 2) {
            ((uint16_t*)b->tokens)[b->token_count + i] = (uint16_t)id;
        } else {
            ((uint32_t*)b->tokens)[b->token_count + i] = (uint32_t)id;
        }
    }
    b->token_count += n;
    if (b->length_count == b->length_capacity) {
        b->length_capacity = 2 * b->length_capacity + 64;
        b->lengths = (size_t*)xrealloc(b->lengths, b->length_capacity * sizeof *b->lengths);
    }
    b->lengths[b->length_count++] = n;
}

static void block_encode(const Pipeline* p, Block* b, TokenList* ids) {
    char* document;
    size_t length;
    text_report_begin(&b->report, &b->text);
    while (text_report_next(&b->report, &p->rules, b->text.input->format, &document, &length)) {
        ids->count = 0;
        tokenizer_encode(p->tokenizer, document, length, ids);
        block_add_document(p, b, ids);
    }
}

static void* worker_thread(void* argument) {
    Pipeline* p = (Pipeline*)argument;
    TokenList ids = {0};
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (p->taken == p->filled && !p->ended) { pthread_cond_wait(&p->work, &p->lock); }
        if (p->taken == p->filled) { break; }
        Block* b = &p->ring[p->taken++ % p->ring_size];
        pthread_mutex_unlock(&p->lock);
        block_encode(p, b, &ids);
        pthread_mutex_lock(&p->lock);
        b->done = true;
        pthread_cond_signal(&p->done);
    }
    pthread_mutex_unlock(&p->lock);
    free(ids.ids);
    return NULL;
}

// ----------------------------------------------------------------------------
// the run

// Waits for the workers and writes what they made of the oldest block; its memory is free for the next one.
static void write_block(Pipeline* p, Block* b, TextTally* tally) {
    pthread_mutex_lock(&p->lock);
    while (!b->done) { pthread_cond_wait(&p->done, &p->lock); }
    pthread_mutex_unlock(&p->lock);
    text_tally_add(tally, &p->rules, &b->text, &b->report);
    shard_writer_append(&writer, b->tokens, b->token_count);
    for (size_t i = 0; i < b->length_count; i++) { lengths_add(&lengths, b->lengths[i]); }
    progress.read += b->text.size;
    progress_print(writer.tokens, tally->counts.documents + tally->input_counts.documents);
    text_block_release_if_large(&b->text);
    if (b->token_capacity > TEXT_BLOCK_BYTES) {
        free(b->tokens);
        b->tokens = NULL;
        b->token_capacity = 0;
    }
    b->token_count = b->length_count = 0;
}

// Reads, hands out and writes blocks until the inputs end.
static TextTally run_pipeline(Pipeline* p, const Input* inputs, size_t input_count, size_t threads) {
    TextTally tally = {0};
    TextReader reader = text_reader(inputs, input_count);
    pthread_t* workers = (pthread_t*)xcalloc(threads, sizeof *workers);
    for (size_t i = 0; i < threads; i++) {
        if (pthread_create(&workers[i], NULL, worker_thread, p) != 0) {
            fatal("cannot start thread %zu; give fewer --threads", i + 1);
        }
    }
    size_t written = 0;
    for (bool more = true; more || written < p->filled;) {
        Block* b = &p->ring[(more ? p->filled : written) % p->ring_size];
        if (!more || p->filled - written == p->ring_size) {
            write_block(p, b, &tally);
            written++;
        }
        more = more && text_reader_next(&reader, &p->rules, &b->text);
        if (!more) { continue; }
        pthread_mutex_lock(&p->lock);
        b->done = false;
        p->filled++;
        pthread_cond_signal(&p->work);
        pthread_mutex_unlock(&p->lock);
    }
    pthread_mutex_lock(&p->lock);
    p->ended = true;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (size_t i = 0; i < threads; i++) { pthread_join(workers[i], NULL); }
    free(workers);
    text_reader_free(&reader);
    text_tally_end(&tally, &p->rules, inputs, input_count);
    return tally;
}

// separated: how the documents of txt inputs were told apart, NULL where there are none.
static void print_lengths(const char* separated) {
    size_t median = lengths_median(&lengths);
    printf("tokens of a document: minimum %zu, median %zu, mean %.1f, longest %zu%s%s\n", lengths.shortest, median,
           (double)lengths.tokens / (double)lengths.documents, lengths.longest,
           separated ? "; documents of txt end " : "", separated ? separated : "");
    if (median >= SHORT_DOCUMENT || lengths.tokens < SHORT_DATASET) { return; }
    warn("half of the documents have %zu tokens or fewer, and no token sees beyond its document; %s", median,
         separated ? "if they are parts of longer texts, give one file a text, or --separator file or another one"
                   : "if they are parts of longer texts, join those");
}

static void print_summary(const TextTally* tally, const char* out, const char* separated) {
    size_t bytes = tally->counts.bytes;
    text_tally_warn(tally);
    printf("%s: %zu documents, %zu tokens, %zu bytes, %.4f tokens/byte, %zu shard%s, %.1f s\n", out,
           tally->counts.documents, writer.tokens, bytes, (double)writer.tokens / (double)bytes, writer.shards,
           writer.shards == 1 ? "" : "s", wall_seconds() - progress.started);
    print_lengths(separated);
}

// ----------------------------------------------------------------------------
// the command line

// Moves the input paths from the command line to a list: the words before the first flag, and those after --input.
static OptionList take_inputs(int* argc, char** argv) {
    OptionList list = {0};
    list.items = (const char**)xcalloc((size_t)*argc, sizeof(char*));
    bool wanted = true;
    int kept = 1;
    for (int i = 1; i < *argc; i++) {
        bool flag = argv[i][0] == '-' && argv[i][1] != '\0';
        if (strcmp(argv[i], "--input") == 0) {
            wanted = true;
        } else if (strncmp(argv[i], "--input=", 8) == 0) {
            list.items[list.count++] = argv[i] + 8;
            wanted = false;
        } else if (wanted && !flag) {
            list.items[list.count++] = argv[i];
        } else {
            wanted = false;
            argv[kept++] = argv[i];
        }
    }
    *argc = kept;
    return list;
}

static Arguments parse_arguments(int argc, char** argv) {
    Arguments a = {0};
    OptionList inputs = take_inputs(&argc, argv);
    const Option rows[] = {
        OPT_GROUP("Text"),
        OPT_STRINGS(a.input, NULL, "files, or - for standard input; the word --input may be left out in first place"),
        OPT_CHOICE(a.text.format, NULL, "txt jsonl", TEXT_FORMAT_HELP),
        OPT_STRING(a.text.separator, NULL, TEXT_SEPARATOR_HELP),
        OPT_STRING(a.text.text_field, "text", TEXT_FIELD_HELP),
        OPT_GROUP("Tokens"),
        OPT_STRING(a.tokenizer, "data/tokenizer.model",
                   "a SentencePiece model (dataset/get_tokenizer.sh fetches Mistral's), or bytes"),
        option_required(OPT_STRING(a.out, NULL, "the folder for the shards, data/NAME, which get its name")),
        OPT_SIZE(a.shard_size, "100000000", 1, INT32_MAX, "tokens in a shard"),
        OPT_BOOL(a.overwrite, "0", "replace the shards of a folder that is not empty"),
        OPT_SIZE(a.threads, "0", 0, MAX_THREADS, "threads that turn text into tokens; 0 = one a core"),
    };
    Options options = options_create("dataset/prepare FILE...",
                                     "Turns text into token shards for train_gpt. Every document becomes BOS, its "
                                     "tokens, EOS; their order is that of the files, whatever the number of threads.",
                                     rows, sizeof rows / sizeof *rows);
    options_parse(&options, argc, argv);
    options_check(&options);
    options_free(&options);
    a.input = inputs;
    if (a.input.count == 0) { fatal("no input; name one or more files, or - for standard input, see --help"); }
    if (a.threads == 0) { a.threads = limits_threads(limits_read("").cpus, 1, limits_cores()); }
    return a;
}

int main(int argc, char** argv) {
    startup_streams();
    Arguments a = parse_arguments(argc, argv);
    size_t total_bytes;
    Input* inputs = text_inputs_find(a.input.items, a.input.count, &a.text, &total_bytes);
    Tokenizer* tokenizer = tokenizer_open(a.tokenizer);
    Pipeline p = {.tokenizer = tokenizer,
                  .rules = document_rules_of_inputs(&a.text, inputs, a.input.count),
                  .token_bytes = tokenizer_vocab_size(tokenizer) <= 65536 ? 2 : 4,
                  .ring_size = 2 * a.threads + 2,
                  .lock = PTHREAD_MUTEX_INITIALIZER,
                  .work = PTHREAD_COND_INITIALIZER,
                  .done = PTHREAD_COND_INITIALIZER};
    p.ring = (Block*)xcalloc(p.ring_size, sizeof *p.ring);
    ShardInfo info = {p.token_bytes,
                      0,
                      tokenizer_vocab_size(tokenizer),
                      tokenizer_bos(tokenizer),
                      tokenizer_eos(tokenizer),
                      tokenizer_hash(tokenizer)};
    shard_writer_open(&writer, a.out, a.shard_size, info, a.overwrite);
    fatal_hook = stop_after_error;
    fatal_report = report_error;
    watch_signals();
    progress.started = progress.printed = wall_seconds();
    progress.terminal = isatty(STDERR_FILENO);
    progress.total = total_bytes;
    TextTally tally = run_pipeline(&p, inputs, a.input.count, a.threads);
    progress_clear();
    shard_writer_commit(&writer);
    print_summary(&tally, a.out, document_rules_words(&p.rules, inputs, a.input.count));
    for (size_t i = 0; i < p.ring_size; i++) {
        free(p.ring[i].text.bytes);
        text_report_free(&p.ring[i].report);
        free(p.ring[i].tokens);
        free(p.ring[i].lengths);
    }
    free(p.ring);
    free(lengths.bins);
    document_rules_free(&p.rules);
    free(inputs);
    free(a.input.items);
    tokenizer_close(tokenizer);
    return 0;
}
