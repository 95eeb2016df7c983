/*
Synthetic corpora: passkey documents, repeated digit strings (which make copying emerge early), the copy task, or a mix.
The same flags give the same bytes.

  passkey  TASK FILLER.. KEY LINE FILLER.. QUESTION KEY   number of fillers and place of the key line uniform
  repeat   583027 583027 583027                           two to --max_repeats times
  copy     Copy: 583027 Answer: 583027

--out NAME.txt or - writes text: a document a line, a blank line after each, which dataset/prepare and spm_train read as
it is. Any other --out is a folder of token shards, like those of dataset/prepare with the same --tokenizer.
*/
#define _GNU_SOURCE
#include <signal.h>

#include "../llmc/options.h"
#include "../llmc/output_file.h"
#include "../llmc/startup.h"
#include "../llmc/tokenizer.h"
#include "../llmc/eval/passkey_text.h"
#include "shard_writer.h"

typedef enum { PASSKEY, REPEAT, COPY, KINDS } Kind;

typedef struct {
    const char *task, *out, *tokenizer;
    size_t seed, documents, bytes, tokens, sequence_length, shard_size;
    bool overwrite, vocabulary_text, hold_out;
    double repeat_share, copy_share;
    size_t digits, min_fillers, max_fillers;
    OptionList exclude_fillers;
    const char *task_text, *filler_text, *key_text, *question_text;
    size_t min_string, max_string, max_repeats;
} Arguments;

typedef struct {
    char* bytes;
    size_t size, capacity;
    Kind kind;
    TokenList ids;  // without BOS and EOS; empty without a tokenizer
} Document;

// What is being made.
typedef struct {
    const Arguments* a;
    const Tokenizer* tokenizer;  // NULL = none
    Random random;
    size_t* fillers;  // the numbers of fillers to choose from
    size_t filler_count;
    size_t used;       // tokens of the sequence that is being filled
    Document waiting;  // does not fit there and begins the next one; size 0 = none
    size_t smallest;   // tokens of the shortest document
    size_t made[KINDS], documents, bytes, tokens;
} Corpus;

// ----------------------------------------------------------------------------
// documents

static void document_clear(Document* d, Kind kind) {
    d->size = d->ids.count = 0;
    d->kind = kind;
}

static void document_add(Document* d, const char* s, size_t n) {
    if (d->size + n > d->capacity) {
        d->capacity = 2 * (d->size + n);
        d->bytes = (char*)xrealloc(d->bytes, d->capacity);
    }
    memcpy(d->bytes + d->size, s, n);
    d->size += n;
}

// A piece, a space before it unless it is the first.
static void document_add_piece(Document* d, const char* s) {
    if (d->size > 0) { document_add(d, " ", 1); }
    document_add(d, s, strlen(s));
}

static void document_encode(const Corpus* c, Document* d) {
    d->ids.count = 0;
    if (c->tokenizer) { tokenizer_encode(c->tokenizer, d->bytes, d->size, &d->ids); }
}

// n random digits into s[n + 1], held-out keys nowhere in them.
static void digit_string(Corpus* c, char* s, size_t n) {
    size_t key = c->a->digits;
    for (size_t i = 0; i < n; i++) {
        do {
            s[i] = (char)('0' + random_below(&c->random, 10));
        } while (c->a->hold_out && i + 1 >= key && passkey_is_held_out(s + i + 1 - key, key));
    }
    s[n] = '\0';
}

static void make_passkey(Corpus* c, Document* d) {
    const Arguments* a = c->a;
    char* key = (char*)xcalloc(a->digits + 1, 1);
    passkey_draw(key, a->digits, a->hold_out ? KEYS_TRAINING : KEYS_ALL, &c->random);
    size_t fillers = c->fillers[random_below(&c->random, c->filler_count)];
    size_t depth = random_below(&c->random, fillers + 1);
    char* line = passkey_key_line(a->key_text, key);
    document_add_piece(d, a->task_text);
    for (size_t i = 0; i <= fillers; i++) {
        if (i == depth) { document_add_piece(d, line); }
        if (i < fillers) { document_add_piece(d, a->filler_text); }
    }
    document_add_piece(d, a->question_text);
    document_add_piece(d, key);
    free(line);
    free(key);
}

static void make_strings(Corpus* c, Document* d) {
    const Arguments* a = c->a;
    char* s = (char*)xcalloc(a->max_string + 1, 1);
    digit_string(c, s, a->min_string + random_below(&c->random, a->max_string - a->min_string + 1));
    if (d->kind == COPY) {
        document_add_piece(d, "Copy:");
        document_add_piece(d, s);
        document_add_piece(d, "Answer:");
        document_add_piece(d, s);
    } else {
        size_t times = 2 + random_below(&c->random, a->max_repeats - 1);
        for (size_t i = 0; i < times; i++) { document_add_piece(d, s); }
    }
    free(s);
}

static Kind draw_kind(Corpus* c) {
    double u = random_uniform(&c->random);
    return u < c->a->repeat_share ? REPEAT : u < c->a->repeat_share + c->a->copy_share ? COPY : PASSKEY;
}

static void make_document(Corpus* c, Document* d) {
    document_clear(d, draw_kind(c));
    if (d->kind == PASSKEY) {
        make_passkey(c, d);
    } else {
        make_strings(c, d);
    }
    document_encode(c, d);
}

// ----------------------------------------------------------------------------
// whole documents in every sequence

// A document of at most `tokens` with BOS and EOS leaves room for none or for one more.
static bool fits(const Corpus* c, const Document* d, size_t room) {
    size_t tokens = d->ids.count + 2;
    return tokens == room || tokens + c->smallest <= room;
}

// A repeated string cut to exactly `room` tokens with BOS and EOS; false when this one cannot be cut there.
static bool cut_to_room(Corpus* c, Document* d, size_t room) {
    const Arguments* a = c->a;
    size_t n = a->min_string + random_below(&c->random, a->max_string - a->min_string + 1);
    if (n > room / 2) { n = 1 + random_below(&c->random, room / 2); }
    char* s = (char*)xcalloc(n + 1, 1);
    digit_string(c, s, n);
    document_clear(d, REPEAT);
    while (d->size < 4 * room) { document_add_piece(d, s); }
    free(s);
    for (document_encode(c, d); d->ids.count + 2 > room; document_encode(c, d)) { d->size -= d->ids.count + 2 - room; }
    return d->ids.count + 2 == room && d->bytes[d->size - 1] != ' ';
}

static void fill_room(Corpus* c, Document* d, size_t room) {
    for (size_t i = 0; i < 1000; i++) {
        if (cut_to_room(c, d, room)) { return; }
    }
    fatal(
        "%s: no digit string has exactly %zu tokens, as --sequence_length needs; train it with spm_train "
        "--split_digits",
        tokenizer_name(c->tokenizer), room - 2);
}

// A document that can begin a sequence.
static void make_document_for_sequence(Corpus* c, Document* d) {
    size_t T = c->a->sequence_length;
    for (size_t i = 0; i < 1000; i++) {
        make_document(c, d);
        if (fits(c, d, T)) { return; }
        if (d->kind != PASSKEY) { continue; }
        fatal(
            "a passkey document of %zu bytes is %zu tokens, expected at most --sequence_length %zu, or exactly that, "
            "or "
            "%zu less; give fewer --max_fillers, --exclude_fillers, shorter texts or longer sequences",
            d->size, d->ids.count + 2, T, c->smallest);
    }
    fatal("no digit string fits in --sequence_length %zu; give a smaller --min_string", T);
}

static void swap_documents(Document* a, Document* b) {
    Document t = *a;
    *a = *b;
    *b = t;
}

static void next_document(Corpus* c, Document* d) {
    size_t T = c->a->sequence_length;
    if (T == 0) {
        make_document(c, d);
        return;
    }
    if (c->waiting.size == 0) { make_document_for_sequence(c, &c->waiting); }
    if (fits(c, &c->waiting, T - c->used)) {
        swap_documents(d, &c->waiting);
        c->waiting.size = 0;
    } else {
        fill_room(c, d, T - c->used);
    }
    c->used = (c->used + d->ids.count + 2) % T;
}

// ----------------------------------------------------------------------------
// output

static struct {
    FILE* file;          // text
    OutputFile whole;    // the file, unless it is standard output
    ShardWriter shards;  // when there is no file
    void* tokens;        // of one document, in the shard's width
    size_t token_capacity;
} out;

static volatile sig_atomic_t interrupted;

static void on_signal(int number) { interrupted = number; }

static void watch_signals(void) {
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    signal(SIGXFSZ, SIG_IGN);  // a file at its size limit: an error of write(), as when the disk is full
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (signal(numbers[i], on_signal) == SIG_IGN) { signal(numbers[i], SIG_IGN); }
    }
}

static void abandon_shards(void) { shard_writer_abandon(&out.shards); }

static void open_output(const Arguments* a, const Tokenizer* t) {
    if (strcmp(a->out, "-") == 0) {
        out.file = stdout;
        return;
    }
    watch_signals();
    if (ends_with(a->out, ".txt")) {
        if (file_exists(a->out) && !a->overwrite) {
            fatal("--out %s: exists; give --overwrite or another name", a->out);
        }
        out.whole = output_open(a->out);
        out.file = out.whole.file;
        return;
    }
    size_t vocabulary = tokenizer_vocab_size(t);
    ShardInfo info = {
        vocabulary <= 65536 ? 2u : 4u, 0, vocabulary, tokenizer_bos(t), tokenizer_eos(t), tokenizer_hash(t)};
    shard_writer_open(&out.shards, a->out, a->shard_size, info, a->overwrite);
    fatal_hook = abandon_shards;
}

static void write_tokens(const Tokenizer* t, const TokenList* ids) {
    size_t n = ids->count + 2, width = out.shards.info.token_bytes;
    if (n > out.token_capacity) {
        out.token_capacity = 2 * n;
        out.tokens = xrealloc(out.tokens, 2 * n * width);
    }
    for (size_t i = 0; i < n; i++) {
        int id = i == 0 ? tokenizer_bos(t) : i == n - 1 ? tokenizer_eos(t) : ids->ids[i - 1];
        if (width == 2) {
            ((uint16_t*)out.tokens)[i] = (uint16_t)id;
        } else {
            ((uint32_t*)out.tokens)[i] = (uint32_t)id;
        }
    }
    shard_writer_append(&out.shards, out.tokens, n);
}

static void check_written(const Corpus* c) {
    if (ferror(out.file)) {
        fatal("%s: cannot write: %s; free space or choose another place", c->a->out, strerror(errno));
    }
}

static void write_document(const Corpus* c, const Document* d) {
    if (!out.file) {
        write_tokens(c->tokenizer, &d->ids);
        return;
    }
    fwrite(d->bytes, 1, d->size, out.file);
    fputs("\n\n", out.file);
    check_written(c);
}

static void close_output(const Corpus* c) {
    if (out.whole.file) {
        output_close(&out.whole);
    } else if (out.file) {
        fflush(out.file);
        check_written(c);
    } else {
        shard_writer_commit(&out.shards);
    }
    free(out.tokens);
}

// Lets the signal that came end the program, with nothing left behind.
static void stop_if_interrupted(void) {
    if (!interrupted) { return; }
    output_remove_unfinished();
    abandon_shards();
    signal(interrupted, SIG_DFL);
    raise(interrupted);
}

// ----------------------------------------------------------------------------
// the run

static void count_document(Corpus* c, const Document* d) {
    c->made[d->kind]++;
    c->documents++;
    c->bytes += d->size;
    c->tokens += c->tokenizer ? d->ids.count + 2 : 0;
}

// Enough, and no sequence is left half full.
static bool is_finished(const Corpus* c) {
    const Arguments* a = c->a;
    bool enough = a->documents ? c->documents >= a->documents
                  : a->bytes   ? c->bytes >= a->bytes
                               : c->tokens >= a->tokens;
    return enough && c->used == 0;
}

// In place on a terminal, every ten seconds elsewhere.
static void print_progress(const Corpus* c, double started, double* printed) {
    bool terminal = isatty(STDERR_FILENO);
    double now = wall_seconds();
    if (now - *printed < (terminal ? 0.2 : 10)) { return; }
    *printed = now;
    char documents[32], size[16];
    fprintf(stderr, "%s%s documents  %s  %.1f MB/s%s", terminal ? "\r\033[K" : "",
            format_count(documents, c->documents), format_bytes(size, c->bytes),
            (double)c->bytes / (now - started) / 1e6, terminal ? "" : "\n");
    fflush(stderr);
}

static void write_corpus(Corpus* c) {
    Document d = {0};
    double started = wall_seconds(), printed = started;
    while (!is_finished(c)) {
        next_document(c, &d);
        write_document(c, &d);
        count_document(c, &d);
        stop_if_interrupted();
        if (c->documents % 256 == 0) { print_progress(c, started, &printed); }
    }
    if (printed > started && isatty(STDERR_FILENO)) { fputs("\r\033[K", stderr); }
    free(d.bytes);
    free(d.ids.ids);
}

static void print_summary(const Corpus* c) {
    FILE* f = out.file == stdout ? stderr : stdout;
    fprintf(f, "%s: %zu documents (%zu passkey, %zu repeat, %zu copy), %zu bytes", c->a->out, c->documents,
            c->made[PASSKEY], c->made[REPEAT], c->made[COPY], c->bytes);
    if (c->tokenizer) { fprintf(f, ", %zu tokens", c->tokens); }
    fputc('\n', f);
}

// Every word of the texts: alone, before a full stop, and as it stands. A unigram model needs to see a word in two
// surroundings to keep it whole; the digits come one by one.
static void write_vocabulary_text(const Corpus* c) {
    const Arguments* a = c->a;
    const char* texts[] = {a->task_text, a->filler_text, a->key_text, a->question_text, "Copy: Answer:"};
    size_t first = a->repeat_share + a->copy_share < 1 ? 0 : 4, last = a->copy_share > 0 ? 5 : 4;
    for (size_t i = first; i < last; i++) {
        char *line = passkey_key_line(texts[i], ""), *rest = line;
        for (char* word; (word = strsep(&rest, " \t"));) {
            size_t n = strlen(word);
            while (n > 0 && strchr(".?!,:;", word[n - 1])) { n--; }
            fprintf(out.file, n ? "%.*s %.*s. %s\n" : "%.*s%.*s%s\n", (int)n, word, (int)n, word, word);
        }
        free(line);
    }
    for (int digit = 0; digit < 10; digit++) { fprintf(out.file, "%d %d.\n", digit, digit); }
    check_written(c);
}

// ----------------------------------------------------------------------------
// the command line

static Options parse_arguments(Arguments* a, int argc, char** argv) {
    const Option rows[] = {
        OPT_GROUP("Corpus"),
        OPT_CHOICE(a->task, "mix", "passkey repeat copy mix", "what the documents are"),
        OPT_DOUBLE(a->repeat_share, "0.3", 0, 1, "of mix: part of the documents that are repeated strings"),
        OPT_DOUBLE(a->copy_share, "0", 0, 1,
                   "of mix: part of the documents that are the copy task; the rest is passkey"),
        option_one_of("size", OPT_SIZE(a->documents, NULL, 1, OPTION_MAX, "how many documents to write")),
        option_one_of("size", OPT_SIZE(a->bytes, NULL, 1, OPTION_MAX, "or how many bytes of text at least")),
        option_one_of("size", OPT_SIZE(a->tokens, NULL, 1, OPTION_MAX, "or how many tokens at least")),
        OPT_SIZE(a->seed, "0", 0, OPTION_MAX, "other random choices"),
        OPT_BOOL(a->vocabulary_text, "0",
                 "write only the words of the texts, for spm_train --model_type=unigram --split_digits "
                 "--character_coverage=1 --vocab_size=200 --hard_vocab_limit=false"),
        OPT_GROUP("Output"),
        option_required(OPT_STRING(a->out, NULL, "NAME.txt, - for standard output, or a folder for shards, data/NAME")),
        OPT_STRING(a->tokenizer, NULL, "a SentencePiece model or bytes; needed for shards, tokens and sequence_length"),
        OPT_SIZE(
            a->sequence_length, "0", 0, OPTION_MAX,
            "no document crosses a multiple of this many tokens; repeated strings fill what is left; 0 = any place"),
        OPT_SIZE(a->shard_size, "100000000", 1, INT32_MAX, "tokens in a shard"),
        OPT_BOOL(a->overwrite, "0", "replace what is there"),
        OPT_GROUP("Passkey"),
        OPT_SIZE(a->digits, "5", 1, 64, "of a key"),
        OPT_SIZE(a->min_fillers, "0", 0, 100000, "fewest fillers of a document"),
        OPT_SIZE(a->max_fillers, "2", 0, 100000, "most fillers of a document"),
        OPT_SIZES(a->exclude_fillers, NULL, 0, 100000, "numbers of fillers that never occur, kept for evaluation"),
        OPT_BOOL(a->hold_out, "1", "write no key, nor a part of a string, whose digits sum to a multiple of ten"),
        OPT_STRING(a->task_text, PASSKEY_TASK, "begins a document"),
        OPT_STRING(a->filler_text, PASSKEY_FILLER, "irrelevant text"),
        OPT_STRING(a->key_text, PASSKEY_KEY, "the key line"),
        OPT_STRING(a->question_text, PASSKEY_QUESTION, "ends a document, with the key behind it"),
        OPT_GROUP("Digit strings"),
        OPT_SIZE(a->min_string, "5", 1, 100000, "fewest digits of a repeated or copied string"),
        OPT_SIZE(a->max_string, "20", 1, 100000, "most digits of a repeated or copied string"),
        OPT_SIZE(a->max_repeats, "4", 2, 100000, "how often a string stands in a repeat document at most"),
    };
    Options options = options_create("dataset/synthetic",
                                     "Writes a synthetic corpus: passkey retrieval, repeated digit strings, the copy "
                                     "task. The same flags give the same bytes.",
                                     rows, sizeof rows / sizeof *rows);
    options_parse(&options, argc, argv);
    options_check(&options);
    return options;
}

static void check_texts(const Arguments* a) {
    const char* texts[] = {a->task_text, a->filler_text, a->key_text, a->question_text};
    static const char* const names[] = {"task_text", "filler_text", "key_text", "question_text"};
    for (size_t i = 0; i < 4; i++) {
        if (strpbrk(texts[i], "\n\r")) { fatal("--%s: found a line end, expected one line", names[i]); }
    }
    if (!strstr(a->key_text, "{key}")) {
        fatal("--key_text: found '%s', expected {key} where the key goes", a->key_text);
    }
}

static void check_arguments(Arguments* a) {
    if (strcmp(a->task, "mix") != 0) {
        a->repeat_share = strcmp(a->task, "repeat") == 0;
        a->copy_share = strcmp(a->task, "copy") == 0;
    }
    if (a->repeat_share + a->copy_share > 1 + 1e-9) {
        fatal("--repeat_share %g and --copy_share %g: expected at most 1 together", a->repeat_share, a->copy_share);
    }
    bool is_text = strcmp(a->out, "-") == 0 || ends_with(a->out, ".txt");
    if (a->vocabulary_text && !is_text) { fatal("--out %s: expected NAME.txt or - for --vocabulary_text", a->out); }
    if (!a->vocabulary_text && a->documents + a->bytes + a->tokens == 0) {
        fatal("missing --documents, --bytes or --tokens: how much to write; see --help");
    }
    if (!a->tokenizer && !is_text) { fatal("--out %s: shards need --tokenizer; or give --out NAME.txt", a->out); }
    if (!a->tokenizer && a->tokens) { fatal("--tokens needs --tokenizer; give it, or --bytes"); }
    if (!a->tokenizer && a->sequence_length) { fatal("--sequence_length needs --tokenizer, to count tokens"); }
    if (a->hold_out && a->digits < 2) { fatal("--digits 1: expected 2 or more for --hold_out; give --no-hold_out"); }
    if (a->min_fillers > a->max_fillers) {
        fatal("--min_fillers %zu is above --max_fillers %zu", a->min_fillers, a->max_fillers);
    }
    if (a->min_string > a->max_string) {
        fatal("--min_string %zu is above --max_string %zu", a->min_string, a->max_string);
    }
    check_texts(a);
}

static void find_fillers(Corpus* c) {
    const Arguments* a = c->a;
    c->fillers = (size_t*)xcalloc(a->max_fillers - a->min_fillers + 1, sizeof(size_t));
    for (size_t n = a->min_fillers; n <= a->max_fillers; n++) {
        bool excluded = false;
        for (size_t i = 0; i < a->exclude_fillers.count; i++) { excluded |= a->exclude_fillers.sizes[i] == n; }
        if (!excluded) { c->fillers[c->filler_count++] = n; }
    }
    if (c->filler_count == 0) { fatal("--exclude_fillers leaves none from --min_fillers to --max_fillers"); }
}

int main(int argc, char** argv) {
    startup_streams();
    Arguments a = {0};
    Options options = parse_arguments(&a, argc, argv);
    check_arguments(&a);
    Tokenizer* tokenizer = a.tokenizer ? tokenizer_open(a.tokenizer) : NULL;
    Corpus c = {.a = &a, .tokenizer = tokenizer, .random = random_stream(a.seed, 0)};
    find_fillers(&c);
    Document digit = {0};
    document_add(&digit, "7", 1);
    document_encode(&c, &digit);
    c.smallest = digit.ids.count + 2;
    open_output(&a, tokenizer);
    if (a.vocabulary_text) {
        write_vocabulary_text(&c);
    } else {
        write_corpus(&c);
    }
    close_output(&c);
    if (!a.vocabulary_text) { print_summary(&c); }
    free(digit.bytes);
    free(digit.ids.ids);
    free(c.waiting.bytes);
    free(c.waiting.ids.ids);
    free(c.fillers);
    options_free(&options);
    if (tokenizer) { tokenizer_close(tokenizer); }
    return 0;
}
