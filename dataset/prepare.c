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
#include "text_reader.h"
#include "shard_writer.h"

enum { MAX_THREADS = 1024 };

typedef struct {
    OptionList input;
    const char *format, *separator, *text_field, *tokenizer, *out;
    size_t shard_size, threads;
    bool overwrite;
} Arguments;

typedef struct {
    size_t documents, tokens, bytes, empty, invalid;
} Counts;

// A run of whole documents of one input, and what a worker made of it.
typedef struct {
    bool done;
    TextBlock text;
    char* tokens;  // token_bytes each
    size_t token_count, token_capacity;
    Counts counts;
    size_t lines;       // of this block, for jsonl
    const char* error;  // NULL, or what is wrong in line error_line (from 0) at error_column
    size_t error_line, error_column;
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

// One line that fits 80 columns: in place on a terminal, every ten seconds elsewhere.
static void progress_print(const Counts* counts) {
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
            (double)progress.read / elapsed / 1e6, format_count(tokens, counts->tokens),
            format_count(documents, counts->documents), left, progress.terminal ? "" : "\n");
    fflush(stderr);
}

static void progress_clear(void) {
    if (progress.terminal) { fputs("\r\033[K", stderr); }
}

// ----------------------------------------------------------------------------
// stopping early

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
}

static void block_encode(const Pipeline* p, Block* b, TokenList* ids) {
    DocumentCursor cursor = {b->text.bytes, b->text.bytes + b->text.size, 0, {0}, false};
    char* text;
    size_t length;
    while (document_next(&p->rules, b->text.input->format, &cursor, &text, &length)) {
        if (length == 0) {
            b->counts.empty++;
            continue;
        }
        ids->count = 0;
        tokenizer_encode(p->tokenizer, text, length, ids);
        block_add_document(p, b, ids);
        b->counts.documents++;
        b->counts.bytes += length;
        b->counts.invalid += cursor.json.replaced || !utf8_is_valid(text, length);
    }
    b->counts.tokens = b->token_count;
    b->lines = cursor.line;
    if (cursor.failed) {
        b->error = cursor.json.error;
        b->error_line = cursor.line;
        b->error_column = (size_t)(cursor.json.p - cursor.json.start);
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

static void counts_add(Counts* total, const Counts* more) {
    total->documents += more->documents;
    total->tokens += more->tokens;
    total->bytes += more->bytes;
    total->empty += more->empty;
    total->invalid += more->invalid;
}

// Waits for the workers and writes what they made of the oldest block; its memory is free for the next one.
static void write_block(Pipeline* p, Block* b, size_t* line, Counts* total) {
    pthread_mutex_lock(&p->lock);
    while (!b->done) { pthread_cond_wait(&p->done, &p->lock); }
    pthread_mutex_unlock(&p->lock);
    if (b->text.starts_input) { *line = 0; }
    if (b->error) {
        progress_clear();
        fatal("%s:%zu:%zu: %s; expected one JSON object a line with the text in \"%s\" (--text_field)",
              b->text.input->path, *line + b->error_line + 1, b->error_column + 1, b->error, p->rules.text_field);
    }
    *line += b->lines;
    shard_writer_append(&writer, b->tokens, b->token_count);
    counts_add(total, &b->counts);
    progress.read += b->text.size;
    progress_print(total);
    text_block_release_if_large(&b->text);
    if (b->token_capacity > TEXT_BLOCK_BYTES) {
        free(b->tokens);
        b->tokens = NULL;
        b->token_capacity = 0;
    }
    Counts none = {0};
    b->counts = none;
    b->token_count = 0;
}

// Reads, hands out and writes blocks until the inputs end.
static Counts run_pipeline(Pipeline* p, const Input* inputs, size_t input_count, size_t threads) {
    Counts total = {0};
    TextReader reader = {inputs, input_count, 0, -1, NULL, 0, 0};
    pthread_t* workers = (pthread_t*)xcalloc(threads, sizeof *workers);
    for (size_t i = 0; i < threads; i++) {
        if (pthread_create(&workers[i], NULL, worker_thread, p) != 0) {
            fatal("cannot start thread %zu; give fewer --threads", i + 1);
        }
    }
    size_t written = 0, line = 0;
    for (bool more = true; more || written < p->filled;) {
        Block* b = &p->ring[(more ? p->filled : written) % p->ring_size];
        if (!more || p->filled - written == p->ring_size) {
            write_block(p, b, &line, &total);
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
    free(reader.tail);
    return total;
}

static void print_summary(const Counts* c, const char* out, size_t shards) {
    if (c->empty) { warn("%zu empty documents skipped", c->empty); }
    if (c->invalid) { warn("%zu documents with invalid UTF-8, passed to the tokenizer as they are", c->invalid); }
    printf("%s: %zu documents, %zu tokens, %zu bytes, %.4f tokens/byte, %zu shard%s, %.1f s\n", out, c->documents,
           c->tokens, c->bytes, (double)c->tokens / (double)c->bytes, shards, shards == 1 ? "" : "s",
           wall_seconds() - progress.started);
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
        OPT_CHOICE(a.format, NULL, "txt jsonl", "needed for - and for names that end in neither .txt nor .jsonl"),
        OPT_STRING(a.separator, NULL,
                   "what separates the documents of a txt file (\\n, \\t, \\\\ are understood); "
                   "without it, blank lines do"),
        OPT_STRING(a.text_field, "text", "the field of a jsonl line that holds the document"),
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

static Format input_format(const char* path, const char* given) {
    bool is_jsonl = given ? strcmp(given, "jsonl") == 0 : ends_with(path, ".jsonl");
    if (!given && !is_jsonl && !ends_with(path, ".txt")) {
        fatal("%s: unknown kind of text, expected a name in .txt or .jsonl; give --format txt or --format jsonl",
              strcmp(path, "-") == 0 ? "standard input" : path);
    }
    return is_jsonl ? FORMAT_JSONL : FORMAT_TXT;
}

// Checks that every input is there and what it is, before any work; adds up the sizes, 0 when one is unknown.
static Input* find_inputs(const Arguments* a, size_t* total) {
    Input* inputs = (Input*)xcalloc(a->input.count, sizeof *inputs);
    bool unknown = false, any_txt = false, has_stdin = false;
    *total = 0;
    for (size_t i = 0; i < a->input.count; i++) {
        Input* input = &inputs[i];
        const char* path = input->path = a->input.items[i];
        bool is_stdin = strcmp(path, "-") == 0;
        if (is_stdin && has_stdin) { fatal("standard input is named twice; give - once"); }
        has_stdin = has_stdin || is_stdin;
        struct stat info;
        int file = input_open(input);
        if (fstat(file, &info) != 0) { input_failed(input); }
        if (!is_stdin) { close(file); }
        if (S_ISDIR(info.st_mode)) { fatal("%s: a folder, expected a file; name the files in it", path); }
        unknown = unknown || !S_ISREG(info.st_mode);
        *total += (size_t)info.st_size;
        input->format = input_format(path, a->format);
        any_txt = any_txt || input->format == FORMAT_TXT;
    }
    if (unknown) { *total = 0; }
    if (a->separator && !any_txt) { fatal("--separator is for txt input, found only jsonl; leave it out"); }
    return inputs;
}

static char* unescape(const char* s) {
    char *result = xstrdup(s), *out = result;
    for (; *s; s++) {
        const char* escape = *s == '\\' && s[1] ? strchr("nt\\", s[1]) : NULL;
        *out++ = !escape ? *s : *escape == 'n' ? '\n' : *escape == 't' ? '\t' : '\\';
        s += escape != NULL;
    }
    *out = '\0';
    return result;
}

int main(int argc, char** argv) {
    startup_streams();
    Arguments a = parse_arguments(argc, argv);
    size_t total_bytes;
    Input* inputs = find_inputs(&a, &total_bytes);
    Tokenizer* tokenizer = tokenizer_open(a.tokenizer);
    char* separator = unescape(a.separator ? a.separator : "");
    Pipeline p = {.tokenizer = tokenizer,
                  .rules = {separator, strlen(separator), a.text_field},
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
    watch_signals();
    progress.started = progress.printed = wall_seconds();
    progress.terminal = isatty(STDERR_FILENO);
    progress.total = total_bytes;
    Counts counts = run_pipeline(&p, inputs, a.input.count, a.threads);
    progress_clear();
    if (counts.documents == 0) {
        fatal("no documents in %s%s; expected text", inputs[0].path, a.input.count > 1 ? " and the other inputs" : "");
    }
    shard_writer_commit(&writer);
    print_summary(&counts, a.out, writer.shards);
    for (size_t i = 0; i < p.ring_size; i++) {
        free(p.ring[i].text.bytes);
        free(p.ring[i].tokens);
    }
    free(p.ring);
    free(separator);
    free(inputs);
    free(a.input.items);
    tokenizer_close(tokenizer);
    return 0;
}
