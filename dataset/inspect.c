/*
Looks into a token shard: `dataset/inspect data/NAME/NAME_000000.bin` prints its header, counts, document lengths and
first documents, and refuses token ids outside the vocabulary. Reads llm.c's shards too, which name no vocabulary.
*/
#include <fcntl.h>

#include "../llmc/options.h"
#include "../llmc/shard.h"
#include "../llmc/startup.h"
#include "../llmc/tokenizer.h"

enum { CHUNK_TOKENS = 1 << 18, SHOWN_TOKENS = 200 };

typedef struct {
    const char *tokenizer, *file;
    size_t documents;
} Arguments;

typedef struct {
    const char* path;
    FILE* file;
    ShardInfo info;
} Shard;

// Documents of this shard; a first one without BOS began in the shard before, a last one without EOS goes on in the
// next.
typedef struct {
    size_t documents, shortest, longest, tokens;
    bool cut_start, cut_end;
} Lengths;

static int chunk[CHUNK_TOKENS];  // of the shard, while it is read through

static Shard open_shard(const char* path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a named pipe does not wait for its other end
    Shard s = {path, fd < 0 ? NULL : fdopen(fd, "rb"), {0}};
    struct stat info;
    if (!s.file || fstat(fileno(s.file), &info) != 0) {
        fatal("%s: %s; expected a token shard, see --help", path, strerror(errno));
    }
    if (!S_ISREG(info.st_mode)) { fatal("%s: no regular file, expected a token shard", path); }
    int32_t words[SHARD_HEADER_WORDS] = {0};
    size_t bytes = (size_t)info.st_size;
    if (bytes >= SHARD_HEADER_BYTES && fread(words, SHARD_HEADER_BYTES, 1, s.file) != 1) {
        fatal("%s: the header cannot be read: %s", path, strerror(errno));
    }
    s.info = shard_header_read(path, words, bytes);
    return s;
}

// The next tokens as ids in chunk; returns how many.
static size_t read_chunk(const Shard* s) {
    size_t got = fread(chunk, s->info.token_bytes, CHUNK_TOKENS, s->file);
    if (ferror(s->file)) { fatal("%s: cannot be read: %s", s->path, strerror(errno)); }
    for (size_t i = got; s->info.token_bytes == 2 && i-- > 0;) {  // widened in place, from the end
        uint16_t narrow;
        memcpy(&narrow, (const char*)chunk + 2 * i, 2);
        chunk[i] = narrow;
    }
    return got;
}

static void rewind_tokens(const Shard* s) {
    if (fseek(s->file, SHARD_HEADER_BYTES, SEEK_SET) != 0) { fatal("%s: %s", s->path, strerror(errno)); }
}

static void print_number(const char* label, bool known, size_t n) {
    char count[32];
    printf("%-12s %s\n", label, known ? format_count(count, n) : "unknown");
}

static void print_header(const Shard* s) {
    const ShardInfo* h = &s->info;
    printf("%-12s %s\n", "file", s->path);
    printf("%-12s %s, magic %d, version %d\n", "format", h->token_bytes == 2 ? "uint16" : "uint32",
           h->token_bytes == 2 ? SHARD_MAGIC_U16 : SHARD_MAGIC_U32,
           h->token_bytes == 2 ? SHARD_VERSION_U16 : SHARD_VERSION_U32);
    print_number("tokens", true, h->token_count);
    print_number("vocabulary", h->vocab_size > 0, h->vocab_size);
    print_number("BOS", h->bos >= 0, (size_t)h->bos);
    print_number("EOS", h->eos >= 0, (size_t)h->eos);
    if (h->tokenizer_hash) {
        printf("%-12s %08x\n", "tokenizer", h->tokenizer_hash);
    } else {
        printf("%-12s unknown\n", "tokenizer");
    }
}

static void lengths_add(Lengths* l, size_t length) {
    if (l->documents == 0 || length < l->shortest) { l->shortest = length; }
    if (length > l->longest) { l->longest = length; }
    l->documents++;
    l->tokens += length;
}

// One pass over all tokens: checks the ids, measures the documents (each from its BOS to the next).
static Lengths measure(const Shard* s) {
    Lengths l = {0};
    size_t position = 0, start = 0;
    int last = -1;
    for (size_t n; (n = read_chunk(s)) > 0; position += n) {
        for (size_t i = 0; i < n; i++) {
            if (s->info.vocab_size && (uint32_t)chunk[i] >= s->info.vocab_size) {
                fatal(
                    "%s: token %zu is %u, expected below the vocabulary size %zu; write the shard again with "
                    "dataset/prepare",
                    s->path, position + i, (uint32_t)chunk[i], s->info.vocab_size);
            }
            if (position + i == 0) { l.cut_start = chunk[i] != s->info.bos; }
            if (chunk[i] == s->info.bos && position + i > 0) {
                lengths_add(&l, position + i - start);
                start = position + i;
            }
        }
        last = chunk[n - 1];
    }
    if (position > start) { lengths_add(&l, position - start); }
    l.cut_end = s->info.eos >= 0 && last != s->info.eos;
    return l;
}

static void print_lengths(const Shard* s, const Lengths* l) {
    char least[32], most[32];
    print_number("documents", s->info.bos >= 0, l->documents);
    if (s->info.bos < 0 || l->documents == 0) { return; }
    printf("%-12s min %s, mean %.1f, max %s tokens with BOS and EOS\n", "lengths", format_count(least, l->shortest),
           (double)l->tokens / (double)l->documents, format_count(most, l->longest));
    if (l->cut_start) { printf("%-12s the first document begins in the shard before\n", ""); }
    if (l->cut_end) { printf("%-12s the last document goes on in the next shard\n", ""); }
}

// The tokenizer to print text with, or NULL after a line that says why ids are printed.
static Tokenizer* find_tokenizer(const Shard* s, const char* source) {
    static const char standard[] = "data/tokenizer.model";
    Tokenizer* bytes = tokenizer_open("bytes");
    bool is_bytes = s->info.tokenizer_hash == tokenizer_hash(bytes);
    if (!source && is_bytes) { return bytes; }
    tokenizer_close(bytes);
    if (!source && (!s->info.tokenizer_hash || !file_exists(standard))) {
        printf("\nids, since %s: give --tokenizer\n",
               s->info.tokenizer_hash ? "data/tokenizer.model is not there" : "the header names no tokenizer");
        return NULL;
    }
    Tokenizer* t = tokenizer_open(source ? source : standard);
    if (s->info.tokenizer_hash == 0 || s->info.tokenizer_hash == tokenizer_hash(t)) { return t; }
    printf("\nids, since the shard was made with tokenizer %08x and %s is %08x\n", s->info.tokenizer_hash,
           tokenizer_name(t), tokenizer_hash(t));
    tokenizer_close(t);
    return NULL;
}

// Control characters could drive the terminal: shown as \xNN.
static void print_text(const char* text, size_t n) {
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        bool control = (c < 0x20 && c != '\n' && c != '\t') || c == 0x7F;
        control ? (void)printf("\\x%02x", c) : (void)putchar(c);
    }
    putchar('\n');
}

static void print_document(size_t index, const TokenList* ids, size_t length, const Tokenizer* t) {
    printf("\n--- document %zu, %zu tokens%s\n", index, length, length > ids->count ? ", the first of them:" : "");
    if (t) {
        size_t n;
        char* s = tokenizer_decode(t, ids->ids, ids->count, &n);
        print_text(s, n);
        free(s);
        return;
    }
    for (size_t i = 0; i < ids->count; i++) { printf("%s%u", i ? " " : "", (uint32_t)ids->ids[i]); }
    putchar('\n');
}

// The first count documents, each up to SHOWN_TOKENS; without a BOS id the shard is one document.
static void print_documents(const Shard* s, size_t count, const Tokenizer* t) {
    TokenList ids = {0};
    size_t index = 0, length = 0;
    for (size_t n; index < count && (n = read_chunk(s)) > 0;) {
        for (size_t i = 0; i < n && index < count; i++) {
            if (chunk[i] == s->info.bos && length > 0) {
                print_document(index++, &ids, length, t);
                ids.count = length = 0;
            }
            if (length++ < SHOWN_TOKENS) { token_list_append(&ids, &chunk[i], 1); }
        }
    }
    if (index < count && length > 0) { print_document(index, &ids, length, t); }
    free(ids.ids);
}

// The file may stand in any place that is not a flag's value; the rest goes to the option table.
static Arguments parse_arguments(int argc, char** argv) {
    Arguments a = {0};
    const Option rows[] = {
        OPT_GROUP("Output"),
        OPT_SIZE(a.documents, "3", 0, OPTION_MAX, "how many documents to print, 200 tokens of each"),
        OPT_STRING(a.tokenizer, NULL,
                   "the tokenizer that made the shard, a SentencePiece model or bytes; without it, bytes or "
                   "data/tokenizer.model, whichever it was"),
    };
    Options options = options_create("dataset/inspect FILE", "Shows what a token shard holds, and checks it.", rows,
                                     sizeof rows / sizeof *rows);
    int kept = 1;
    for (int i = 1; i < argc; i++) {
        bool is_value = i > 1 && strncmp(argv[i - 1], "--", 2) == 0 && !strchr(argv[i - 1], '=');
        if (!a.file && !is_value && argv[i][0] != '-') {
            a.file = argv[i];
        } else {
            argv[kept++] = argv[i];
        }
    }
    options_parse(&options, kept, argv);
    options_free(&options);
    if (!a.file) { fatal("no shard; name one, e.g. data/stories/stories_000000.bin, see --help"); }
    return a;
}

int main(int argc, char** argv) {
    startup_streams();
    Arguments a = parse_arguments(argc, argv);
    Shard s = open_shard(a.file);
    print_header(&s);
    Lengths lengths = measure(&s);
    print_lengths(&s, &lengths);
    if (a.documents > 0 && s.info.token_count > 0) {
        Tokenizer* t = find_tokenizer(&s, a.tokenizer);
        rewind_tokens(&s);
        print_documents(&s, a.documents, t);
        if (t) { tokenizer_close(t); }
    }
    fclose(s.file);
    return 0;
}
