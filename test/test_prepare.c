/*
dataset/prepare as a program: what counts as a document, order and completeness for any number of
threads, shard boundaries, refusals, interruption. Expected documents are written by hand, and
shards are read by code that shares nothing with the writer but the header.
*/
#include "prepare_util.h"

#include "../dataset/shard_writer.h"

static int make_scratch(void** state) {
    (void)state;
    scratch_folder(scratch);
    return 0;
}

static int drop_scratch(void** state) {
    (void)state;
    remove_scratch("");
    return 0;
}

// The documents of scratch/folder, made with the tokenizer; each has '|' behind it.
static Bytes documents_of(const char* folder, const char* tokenizer, size_t shard_size) {
    Tokenizer* t = tokenizer_open(tokenizer);
    ShardInfo info;
    TokenList ids = read_shards(folder, shard_size, &info);
    assert_int_equal(info.vocab_size, tokenizer_vocab_size(t));
    assert_int_equal(info.bos, tokenizer_bos(t));
    assert_int_equal(info.eos, tokenizer_eos(t));
    assert_int_equal(info.tokenizer_hash, tokenizer_hash(t));
    assert_int_equal(info.token_bytes, info.vocab_size > 65536 ? 4 : 2);
    Bytes b = decode_documents(&ids, t);
    free(ids.ids);
    tokenizer_close(t);
    return b;
}

// ----------------------------------------------------------------------------
// what a document is

#define BYTES(s) s, sizeof(s) - 1
static const struct {
    const char* name;
    const char* content;
    size_t size;
    const char* flags;
    const char* documents;
    size_t documents_size;
    const char* warning;
} texts[] = {
    {"a.txt", BYTES("one\n\ntwo\nlines\n\n\n\nthree"), "", BYTES("one|two\nlines|three|"), ""},
    {"a.txt", BYTES("\n\n\none\n\n"), "", BYTES("one|"), ""},
    {"a.txt", BYTES("one\r\nmore\r\n\r\ntwo\r\n\r\n\r\nthree\r\n"), "", BYTES("one\nmore|two|three|"),
     ": lines end in CR LF"},
    {"a.txt", BYTES("one\rmore\r\rtwo\r\r\rthree\r"), "", BYTES("one\nmore|two|three|"), ": lines end in CR alone"},
    {"a.txt", BYTES("one\rmore\n\ntwo\r"), "", BYTES("one\rmore|two|"), ""},
    {"a.txt", BYTES("one\n \ntwo\n\t\n\nthree\n\r"), "", BYTES("one\n \ntwo\n\t|three|"), ""},
    {"a.txt", BYTES("nul \0 byte\n\n \xFF\xC3 bad\n\n\xE6\x97\xA5"), "",
     BYTES("nul \0 byte| \xFF\xC3 bad|\xE6\x97\xA5|"), "1 documents with invalid UTF-8"},
    {"a.txt", BYTES("\xEF\xBB\xBFmark\n"), "", BYTES("mark|"), ""},
    {"a.txt", BYTES("a<end>b\n\nc<end><end>\nd\n<end>\n"), "--separator '<end>'", BYTES("a|b\n\nc|d|"),
     "1 empty documents"},
    {"a.txt", BYTES("a\r\n--\r\n\r\nb\n\n--\nc--"), "--separator=--", BYTES("a|\nb\n|c|"), ": lines end in CR LF"},
    {"a.txt", BYTES("a\r\n==\r\nb\r\nc\r\n"), "--separator '\\n==\\n'", BYTES("a|b\nc|"), ": lines end in CR LF"},
    {"a.txt", BYTES("a\r\n==\r\nb\n==\nc"), "--separator '\\r\\n==\\r\\n'", BYTES("a|b|c|"), ": lines end in CR LF"},
    {"a.txt", BYTES("a\rb\r\nc\r\r"), "--separator '\\r\\r'", BYTES("a\rb\r\nc|"), "1 documents hold CR LF"},
    {"a.txt", BYTES("a\rb\r"), "--separator '\\r'", BYTES("a|b|"), ""},
    {"a.txt", BYTES("a\0b\n\0c\0"), "--separator '\\0'", BYTES("a|b|c|"), ""},
    {"a.txt",
     BYTES("a\x1E"
           "b\tc"),
     "--separator '\\x1e'", BYTES("a|b\tc|"), ""},
    {"a.txt", BYTES("a\\nb\nc"), "--separator '\\\\n'", BYTES("a|b\nc|"), ""},
    {"a.txt", BYTES("one\n\ntwo"), "--separator '##'", BYTES("one\n\ntwo|"), "the --separator does not occur"},
    {"a.jsonl", BYTES("{\"text\":\"a\\r\\nb\"}\r\n{\"text\":\"c\\rd\"}"), "", BYTES("a\r\nb|c\rd|"),
     "1 documents hold CR LF"},
    {"a.txt", BYTES("a\n==\nb==c\n==\n\n"), "--separator '\\n==\\n'", BYTES("a|b==c|"), ""},
    {"a.txt", BYTES("aaaxaa"), "--separator aa", BYTES("ax|"), "1 empty documents"},
    {"a.jsonl", BYTES("{\"text\": \"one\\n\\ntwo\"}\n\n  \t\r\n{\"id\":7,\"text\":\"x\"}"), "", BYTES("one\n\ntwo|x|"),
     ""},
    {"a.jsonl", BYTES("{\"text\":\"\\u0041\\u00e9\\u65E5\\ud83D\\ude00 \\\"\\\\\\/\\b\\f\\r\\t\\u0000.\"}\r\n"), "",
     BYTES("A\xC3\xA9\xE6\x97\xA5\xF0\x9F\x98\x80 \"\\/\b\f\r\t\0.|"), ""},
    {"a.jsonl", BYTES("{\"text\":\"\\ud83dx\\udc00\\ud800\\u0041\"}"), "",
     BYTES("\xEF\xBF\xBDx\xEF\xBF\xBD\xEF\xBF\xBD"
           "A|"),
     "1 documents with invalid UTF-8"},
    {"a.jsonl", BYTES("{\"a\":{\"text\":\"no\"},\"b\":[{\"text\":1},-0.5e+3,[],{},true,false,null],\"text\":\"yes\"}"),
     "", BYTES("yes|"), ""},
    {"a.jsonl", BYTES("{\"text\":\"first\",\"text\":\"last\"}\n{\"te\\u0078t\":\"key\"}\n"), "", BYTES("last|key|"),
     ""},
    {"a.jsonl", BYTES("{\"text\":\"no\",\"body\":\"yes\"}\n{\"body\":\"\"}\n"), "--text_field body", BYTES("yes|"),
     "1 empty documents"},
    {"a.jsonl", BYTES("\xEF\xBB\xBF{\"text\":\"bad \xC3 utf\"}"), "", BYTES("bad \xC3 utf|"),
     "1 documents with invalid"},
    {"a.data", BYTES("{\"text\":\"given\"}"), "--format jsonl", BYTES("given|"), ""},
};

static void test_documents(void** state) {
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char* path = write_bytes(texts[i].name, texts[i].content, texts[i].size);
        const char* format = strcmp(texts[i].name, "a.txt") == 0 ? "txt" : "jsonl";
        for (int standard = 0; standard < 2; standard++) {
            print_message("text %zu%s\n", i, standard ? " from standard input" : "");
            const char *flags = texts[i].flags, *common = "--tokenizer bytes --overwrite --threads 2";
            assert_succeeded(
                standard ? run("prepare", "- --format %s %s --out %s/d %s <%s", format, flags, scratch, common, path)
                         : run("prepare", "%s %s --out %s/d %s", path, flags, scratch, common));
            if (*texts[i].warning) { assert_contains(&errors, texts[i].warning); }
            assert_true(*texts[i].warning == '\0' || strstr(errors.bytes, "\n") == errors.bytes + errors.size - 1);
            if (!*texts[i].warning) { assert_int_equal(errors.size, 0); }
            Bytes got = documents_of("d", "bytes", 100000000);
            if (got.size != texts[i].documents_size) { print_error("got: %s\n", got.bytes); }
            assert_int_equal(got.size, texts[i].documents_size);
            assert_memory_equal(got.bytes, texts[i].documents, got.size);
            free(got.bytes);
        }
        free(path);
    }
    remove_scratch("d");
}

// Of several texts each is one document, unless --separator says otherwise.
static void test_several_files(void** state) {
    (void)state;
    static const struct {
        const char *flags, *documents, *said;
    } cases[] = {
        {"", "one\n\ntwo|three\n\n\nfour|", "; documents of txt end with their file\n"},
        {"--separator file", "one\n\ntwo|three\n\n\nfour|", "; documents of txt end with their file\n"},
        {"--separator blank", "one|two|three|four|", "; documents of txt end at blank lines\n"},
        {"--separator o", "ne\n\ntw|three\n\n\nf|ur|", "; documents of txt end at --separator\n"},
    };
    char* first = write_bytes("a.txt", BYTES("\none\n\ntwo\n\n"));
    char *second = write_bytes("b.txt", BYTES("three\r\n\r\n\r\nfour")), *third = write_bytes("c.txt", BYTES("\n\n"));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_succeeded(run("prepare", "%s %s %s %s --tokenizer bytes --out %s/s --overwrite", first, second, third,
                             cases[i].flags, scratch));
        Bytes got = documents_of("s", "bytes", 100000000);
        assert_string_equal(got.bytes, cases[i].documents);
        assert_contains(&output, cases[i].said);
        free(got.bytes);
    }
    // one file alone: blank lines, or what is asked for
    assert_succeeded(run("prepare", "%s --tokenizer bytes --out %s/s --overwrite", second, scratch));
    assert_contains(&output, "/s: 2 documents");
    assert_contains(&output, "minimum 6, median 6, mean 6.5, longest 7; documents of txt end at blank lines\n");
    assert_succeeded(run("prepare", "%s --separator file --tokenizer bytes --out %s/s --overwrite", second, scratch));
    assert_contains(&output, "/s: 1 documents");
    char* stream = write_bytes("stream", BYTES("one\n\ntwo\n\0three\0"));
    assert_succeeded(
        run("prepare", "- --format txt --separator nul --tokenizer bytes --out %s/s --overwrite <%s", scratch, stream));
    Bytes got = documents_of("s", "bytes", 100000000);
    assert_string_equal(got.bytes, "one\n\ntwo|three|");
    free(got.bytes);
    free(first), free(second), free(third), free(stream);
    remove_scratch("s");
}

// The command of README's quick start, on other files, by the tokenizer that needs none.
static void test_quick_start(void** state) {
    (void)state;
    Bytes readme = read_bytes("README.md");
    char* command = strstr(readme.bytes, "dataset/prepare --input $(find /usr/share/perl");
    assert_non_null(command);
    char* end = strstr(command, "\n./train_gpt");
    assert_non_null(end);
    *end = '\0';
    char *script = write_bytes("quick.sh", command, strlen(command)), *folder = text("%s/pages/deep", scratch);
    make_directories(folder);
    char *b = write_bytes("pages/b.pod", BYTES("=head1 B\n\nSecond.\n")),
         *c = write_bytes("pages/c.txt", BYTES("no\n"));
    char* a = write_bytes("pages/a.pod", BYTES("=head1 A\n\nFirst.\n"));
    char* third = write_bytes("pages/deep/d.pod", BYTES("Third.\n"));
    char* edit = text(
        "sed -i -e 's|/usr/share/perl|%s/pages|; s|data/tokenizer.model|bytes|; s|data/mytext|%s/q|; "
        "s|^dataset/prepare|%s|' %s && sh %s >/dev/null",
        scratch, scratch, program("prepare"), script, script);
    assert_int_equal(system(edit), 0);
    Bytes got = documents_of("q", "bytes", 100000000);
    assert_string_equal(got.bytes, "=head1 A\n\nFirst.|=head1 B\n\nSecond.|Third.|");
    free(got.bytes), free(edit), free(script), free(folder), free(readme.bytes);
    free(a), free(b), free(c), free(third);
    remove_scratch("q");
}

// ----------------------------------------------------------------------------
// order, completeness, threads

static const struct {
    const char *name, *flags, *before, *newline, *after;
} styles[] = {
    {"blank.txt", "--separator blank", "", "\n", "\n\n"},
    {"crlf.txt", "--separator blank", "", "\n", "\r\n\r\n"},
    {"separator.txt", "--separator '<|end|>'", "", "\n", "<|end|>"},
    {"lines.jsonl", "", "{\"n\":0,\"text\":\"", "\\n", "\"}\n"},
};

// About size bytes of numbered documents of very different lengths, one larger than any block; what is expected of
// them goes to *documents.
static Bytes make_corpus(size_t size, size_t style, Bytes* documents) {
    Random r = {style};
    Bytes b = {(char*)xcalloc(2 * size + 4000000, 1), 0};
    documents->bytes = (char*)xcalloc(2 * size + 4000000, 1);
    documents->size = 0;
    for (size_t index = 0; b.size < size; index++) {
        size_t words = index == 40 ? 250000 : random_below(&r, random_below(&r, 20) ? 30 : 3000);
        b.size += (size_t)sprintf(b.bytes + b.size, "%s%zu.%zu", styles[style].before, style, index);
        documents->size += (size_t)sprintf(documents->bytes + documents->size, "%zu.%zu", style, index);
        for (size_t i = 0; i < words; i++) {
            size_t word = random_below(&r, 3000);
            bool line = i % 11 == 10;
            b.size += (size_t)sprintf(b.bytes + b.size, "%s%zx", line ? styles[style].newline : " ", word);
            documents->size += (size_t)sprintf(documents->bytes + documents->size, "%c%zx", line ? '\n' : ' ', word);
        }
        documents->bytes[documents->size++] = '|';
        b.size += (size_t)sprintf(b.bytes + b.size, "%s", styles[style].after);
    }
    return b;
}

// Two inputs of these styles, with three numbers of threads.
static void check_threads(const char* tokenizer, size_t size, size_t first, size_t second) {
    Bytes documents[2], corpus[2];
    char* paths[2];
    for (size_t i = 0; i < 2; i++) {
        size_t style = i ? second : first;
        corpus[i] = make_corpus(size, style, &documents[i]);
        paths[i] = write_bytes(styles[style].name, corpus[i].bytes, corpus[i].size);
        free(corpus[i].bytes);
    }
    static const int threads[] = {1, 2, 5};
    for (size_t i = 0; i < 3; i++) {
        assert_succeeded(run("prepare",
                             "%s --input=%s %s --tokenizer %s --out %s/t%zu/s --threads %d --shard_size 399_989",
                             paths[0], paths[1], styles[first].flags, tokenizer, scratch, i, threads[i]));
        assert_int_equal(strncmp(strchr(output.bytes, '\n'), "\ntokens of a document: ", 23), 0);
        char* same = text("diff -r %s/t0/s %s/t%zu/s", scratch, scratch, i);
        assert_int_equal(system(same), 0);
        free(same);
    }
    char* move = text("mv %s/t0/s %s/s", scratch, scratch);
    assert_int_equal(system(move), 0);
    free(move);
    Bytes got = documents_of("s", tokenizer, 399989);
    assert_int_equal(got.size, documents[0].size + documents[1].size);
    assert_memory_equal(got.bytes, documents[0].bytes, documents[0].size);
    assert_memory_equal(got.bytes + documents[0].size, documents[1].bytes, documents[1].size);
    free(got.bytes);
    for (size_t i = 0; i < 2; i++) {
        free(documents[i].bytes);
        free(paths[i]);
    }
    remove_scratch("s");
    remove_scratch("t?");
}

static void test_threads_bytes(void** state) {
    (void)state;
    check_threads("bytes", 2000000, 0, 1);
    check_threads("bytes", 2000000, 2, 3);
}

static void test_threads_mistral(void** state) {
    (void)state;
    const char* path = mistral_path();
    assert_non_null(path);
    check_threads(path, 1500000, 0, 3);
}

// The end of the first document at every place around the end of the reader's first block of 512 KiB.
static void test_block_edges(void** state) {
    (void)state;
    enum { BLOCK = 512 << 10, AROUND = 9 };
    char* content = (char*)xcalloc(BLOCK + 100, 1);
    for (size_t style = 0; style < 3; style++) {
        for (size_t n = BLOCK - AROUND; n <= BLOCK + 1; n++) {
            memset(content, 'x', n);
            const char* after = styles[style].after;
            size_t size = n + (size_t)sprintf(content + n, "%sb%sc", after, after);
            char* path = write_bytes("edge.txt", content, size);
            assert_succeeded(
                run("prepare", "%s %s --tokenizer bytes --overwrite --out %s/e", path, styles[style].flags, scratch));
            Bytes got = documents_of("e", "bytes", 100000000);
            assert_int_equal(got.size, n + 5);
            assert_memory_equal(got.bytes, content, n);
            assert_string_equal(got.bytes + n, "|b|c|");
            free(got.bytes);
            free(path);
        }
    }
    free(content);
    remove_scratch("e");
}

// Line ends of two bytes, or of \r, at every place around the end of a block.
static void test_block_edges_of_lines(void** state) {
    (void)state;
    enum { BLOCK = 512 << 10, AROUND = 7 };
    static const char* const ends[] = {"\r\n", "\r"};
    char* content = (char*)xcalloc(BLOCK + 100, 1);
    for (size_t k = 0; k < 2; k++) {
        for (size_t n = BLOCK - AROUND; n <= BLOCK + 1; n++) {
            const char* e = ends[k];
            size_t size = (size_t)sprintf(content, "a%s", e);
            memset(content + size, 'x', n - size);
            size = n + (size_t)sprintf(content + n, "%sb%s%s%sc%s", e, e, e, e, e);
            char* path = write_bytes("edge.txt", content, size);
            assert_succeeded(run("prepare", "%s --tokenizer bytes --overwrite --out %s/e", path, scratch));
            Bytes got = documents_of("e", "bytes", 100000000);
            size_t text_size = n - strlen(e) + 1;  // "a\nxx..x"
            assert_int_equal(got.size, text_size + 5);
            assert_memory_equal(got.bytes, "a\nx", 3);
            assert_string_equal(got.bytes + text_size - 1, "x\nb|c|");
            free(got.bytes);
            free(path);
        }
    }
    free(content);
    remove_scratch("e");
}

// A large text that is one document may be one by mistake.
static void test_one_large_document(void** state) {
    (void)state;
    enum { LINES = 5000 };
    char* content = (char*)xcalloc(LINES, 32);
    size_t size = 0;
    for (int i = 0; i < LINES; i++) { size += (size_t)sprintf(content + size, "a line of text %d\n", i); }
    char* path = write_bytes("lines.txt", content, size);
    assert_succeeded(run("prepare", "%s --tokenizer bytes --out %s/w", path, scratch));
    assert_contains(&errors, "lines.txt: one document, as no line is blank; give --separator");
    assert_succeeded(run("prepare", "%s %s --tokenizer bytes --out %s/w --overwrite", path, path, scratch));
    assert_string_equal(errors.bytes, "");
    assert_succeeded(
        run("prepare", "%s %s --separator blank --tokenizer bytes --out %s/w --overwrite", path, path, scratch));
    assert_contains(&errors, "lines.txt and 1 more: one document");
    assert_succeeded(run("prepare", "%s --separator '\\n' --tokenizer bytes --out %s/w --overwrite", path, scratch));
    assert_contains(&errors, "warning: half of the documents have 21 tokens or fewer");
    assert_contains(&output, "5000 documents");
    free(content);
    free(path);
    remove_scratch("w");
}

// ----------------------------------------------------------------------------
// shards

static void test_shard_boundaries(void** state) {
    (void)state;
    // 10 bytes and 4 bytes: 12 + 6 = 18 tokens
    static const struct {
        size_t shard_size;
        int shards;
    } cases[] = {{5, 4}, {6, 3}, {9, 2}, {12, 2}, {17, 2}, {18, 1}, {19, 1}, {1, 18}, {2147483647, 1}};
    char* path = write_bytes("b.txt", BYTES("0123456789\n\nabcd\n"));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t size = cases[i].shard_size;
        assert_succeeded(run("prepare", "%s --tokenizer bytes --out %s/b/ --shard_size %zu", path, scratch, size));
        assert_int_equal(count_files("b", ".bin"), cases[i].shards);
        Bytes got = documents_of("b", "bytes", size);
        assert_string_equal(got.bytes, "0123456789|abcd|");
        free(got.bytes);
        remove_scratch("b");
    }
    free(path);
}

static void test_summary(void** state) {
    (void)state;
    char* path = write_bytes("b.txt", BYTES("0123456789\n\nabcd\n"));
    assert_succeeded(run("prepare", "%s --tokenizer bytes --out %s/b --shard_size 10", path, scratch));
    assert_contains(&output, "/b: 2 documents, 18 tokens, 14 bytes, 1.2857 tokens/byte, 2 shards, ");
    remove_scratch("b");
    free(path);
}

// More than 65536 tokens: uint32. The byte pieces come last, so that text has ids above 65535.
static void test_wide_tokens(void** state) {
    (void)state;
    static const char* const pieces[] = {"q", "\xE2\x96\x81", NULL};
    ModelRecipe recipe = {pieces, NULL, 70000, MODEL_BPE, true, true, true, false};
    char* model = text("%s/wide.model", scratch);
    model_create(model, &recipe);
    char* path = write_bytes("w.txt", BYTES("qhi\n\nyo"));
    assert_succeeded(run("prepare", "%s --tokenizer %s --out %s/w", path, model, scratch));
    ShardInfo info;
    TokenList ids = read_shards("w", 100000000, &info);
    // 70005 = <0x00>
    static const int want[] = {1, 4, 3, 70005 + 'h', 70005 + 'i', 2};
    assert_int_equal(info.token_bytes, 4);
    assert_int_equal(info.vocab_size, 70261);
    assert_memory_equal(ids.ids, want, sizeof want);
    Bytes got = documents_of("w", model, 100000000);
    assert_string_equal(got.bytes, "qhi|yo|");
    assert_succeeded(run("inspect", "%s/w/w_000000.bin --tokenizer %s", scratch, model));
    assert_contains(&output, "uint32, magic 20240801, version 7");
    assert_contains(&output, "tokens\nqhi\n");
    free(got.bytes);
    free(ids.ids);
    free(model);
    free(path);
    remove_scratch("w");
}

// ----------------------------------------------------------------------------
// refusals

static const struct {
    const char* name;
    const char* content;
    size_t size;
    const char* flags;
    const char* words;
} bad[] = {
    {"e.txt", BYTES(""), "", "no documents"},
    {"e.txt", BYTES("\n\r\n\n"), "", "no documents"},
    {"e.jsonl", BYTES("\n"), "", "no documents"},
    {"e.jsonl", BYTES("{\"text\":\"a\"}\n\n{\"text\":\"b\"\n"), "", "e.jsonl:3:12: expected ',' or '}'"},
    {"e.jsonl", BYTES("{\"text\":\"a\"} x"), "", "e.jsonl:1:14: text after the object"},
    {"e.jsonl", BYTES("[\"text\"]"), "", "e.jsonl:1:1: expected an object"},
    {"e.jsonl", BYTES("{\"body\":\"a\"}"), "", "the text field is missing"},
    {"e.jsonl", BYTES("{\"text\":\"a\"}"), "--text_field body", "\"body\""},
    {"e.jsonl", BYTES("{\"text\":5}"), "", "e.jsonl:1:9: the text field is no string"},
    {"e.jsonl", BYTES("{\"text\":\"a\\q\"}"), "", "unknown escape"},
    {"e.jsonl", BYTES("{\"text\":\"a\\u12g4\"}"), "", "four hexadecimal digits"},
    {"e.jsonl", BYTES("{\"text\":\"a\\u12"), "", "four hexadecimal digits"},
    {"e.jsonl", BYTES("{\"text\":\"a\\"), "", "unknown escape"},
    {"e.jsonl", BYTES("{\"text\":\"a"), "", "the string does not end"},
    {"e.jsonl", BYTES("{\"text\":\"a\tb\"}"), "", "control character"},
    {"e.jsonl", BYTES("{\"text\":\"a\0b\"}"), "", "control character"},
    {"e.jsonl", BYTES("{\"text\" \"a\"}"), "", "expected ':'"},
    {"e.jsonl", BYTES("{\"n\":01,\"text\":\"a\"}"), "", "expected ',' or '}'"},
    {"e.jsonl", BYTES("{\"n\":1.,\"text\":\"a\"}"), "", "expected a digit"},
    {"e.jsonl", BYTES("{\"n\":tru,\"text\":\"a\"}"), "", "expected a value"},
    {"e.jsonl", BYTES("{\"n\":[1,],\"text\":\"a\"}"), "", "expected a value"},
    {"e.jsonl", BYTES("{\"text\":\"a\",}"), "", "expected a string"},
    {"e.json", BYTES("{}"), "", "e.json: unknown kind of text, expected a name in .txt or .jsonl; give --format"},
    {"e.txt", BYTES("x"), "--shard_size 2147483648", "--shard_size: found '2147483648'"},
    {"e.txt", BYTES("x"), "--shard_size 0", "--shard_size: found '0'"},
    {"e.txt", BYTES("x"), "--shards 3", "unknown flag --shards"},
    {"e.txt", BYTES("x"), "--tokenizer /nowhere/t.model", "/nowhere/t.model: No such file"},
    {"e.txt", BYTES("x"), "/nowhere/f.txt", "unexpected '/nowhere/f.txt'"},
    {"e.txt", BYTES("x"), "--input /nowhere/f.txt", "/nowhere/f.txt: No such file"},
    {"e.txt", BYTES("x"), "--input /", "/: a folder"},
    {"e.jsonl", BYTES("{\"text\":\"a\"}"), "--separator x", "--separator is for txt"},
    {"e.jsonl", BYTES("{\"text\":\"a\"}"), "--format txt", "found --format txt for a name in .jsonl"},
    {"e.jsonl", BYTES("{\"text\":\"a\"}\r{\"text\":\"b\"}\r"), "", "e.jsonl:1:14: text after the object"},
    {"e.txt", BYTES("x"), "--separator ''", "expected text that is not empty"},
    {"e.txt", BYTES("x"), "--separator '\\end'", "unknown escape at '\\end'"},
    {"e.txt", BYTES("x"), "--separator '\\x1'", "unknown escape at '\\x1'"},
    {"e.txt", BYTES("x"), "--separator 'a\\'", "unknown escape at '\\'"},
    {"e.txt", BYTES("\x1F\x8B\b"), "", "e.txt: found a gzip file, expected text in UTF-8; unpack it"},
    {"e.data", BYTES("\x1F\x8B\b"), "--format jsonl", "e.data: found a gzip file"},
    {"e.txt", BYTES("\x28\xB5\x2F\xFD\1"), "", "a zstd file"},
    {"e.txt", BYTES("\xFF\xFEx\0"), "", "UTF-16"},
    {"e.jsonl", BYTES("\xFE\xFF\0{"), "", "UTF-16"},
    {"e.txt.gz", BYTES("x"), "", "e.txt.gz: unknown kind of text"},
    {"e.txt", BYTES("{\"bamc_stream\":\"begins\"}\n"), "", "give --format jsonl"},
};

static void test_refusals(void** state) {
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char* path = write_bytes(bad[i].name, bad[i].content, bad[i].size);
        print_message("bad input %zu\n", i);
        assert_refused(run("prepare", "%s --tokenizer bytes --out %s/r %s", path, scratch, bad[i].flags), bad[i].words);
        assert_int_equal(count_files("r", ""), -1);
        free(path);
    }
    assert_refused(run("prepare", "--out %s/r --tokenizer bytes", scratch), "no input");
    assert_refused(run("prepare", "%s/e.txt --tokenizer bytes", scratch), "missing --out");
    assert_refused(run("prepare", "%s/e.txt --tokenizer bytes --out %s/e.txt", scratch, scratch), "expected a folder");
    assert_refused(run("prepare", "%s/e.txt --tokenizer bytes --out .", scratch), "has no name here");
    assert_int_equal(run("prepare", "--help"), 0);
    assert_contains(&output, "--shard_size");
}

// Far into the file, when shards have been written already.
static void test_late_error(void** state) {
    (void)state;
    size_t good = 200000, size = 0;
    char* content = (char*)xcalloc(good + 2, 32);
    for (size_t i = 0; i < good; i++) { size += (size_t)sprintf(content + size, "{\"text\":\"line %zu\"}\n", i + 1); }
    size += (size_t)sprintf(content + size, "{\"text\":\"no end}\n{}\n");
    char* path = write_bytes("late.jsonl", content, size);
    assert_refused(run("prepare", "%s --tokenizer bytes --out %s/r --shard_size 10000", path, scratch),
                   "late.jsonl:200001:17: the string does not end");
    assert_int_equal(count_files("r", ""), -1);
    free(path);
    // Lines are counted in each input.
    char *fine = write_bytes("fine.jsonl", content, 18 * 3), *broken = write_bytes("broken.jsonl", BYTES("\n{}\n"));
    assert_refused(run("prepare", "%s %s --tokenizer bytes --out %s/r", fine, broken, scratch),
                   "broken.jsonl:2:3: the text");
    free(content);
    free(fine);
    free(broken);
}

static void test_overwrite(void** state) {
    (void)state;
    char *path = write_bytes("o.txt", BYTES("0123456789")), *other = write_bytes("p.txt", BYTES("new"));
    char* broken = write_bytes("q.jsonl", BYTES("{"));
    assert_succeeded(run("prepare", "%s --tokenizer bytes --out %s/o --shard_size 4", path, scratch));
    assert_refused(run("prepare", "%s --tokenizer bytes --out %s/o", other, scratch), "--overwrite");
    assert_int_equal(count_files("o", ".bin"), 3);
    assert_refused(run("prepare", "%s --tokenizer bytes --out %s/o --overwrite", broken, scratch), "q.jsonl:1:2");
    assert_int_equal(count_files("o", ""), 3);  // the old shards stay when the new ones fail
    assert_succeeded(run("prepare", "%s --tokenizer bytes --out %s/o --overwrite", other, scratch));
    Bytes got = documents_of("o", "bytes", 100000000);
    assert_string_equal(got.bytes, "new|");
    free(got.bytes);
    free(path);
    free(other);
    free(broken);
    remove_scratch("o");
}

// --overwrite takes only what the program has written, and says what it leaves.
static void test_overwrite_leaves_other_files(void** state) {
    (void)state;
    static const char* const others[] = {"thesis.bin", "notes.txt", "o_x.bin", "other_000000.bin", "o_1.bin.tmp"};
    char* path = write_bytes("o.txt", BYTES("0123456789"));
    assert_succeeded(run("prepare", "%s --tokenizer bytes --out %s/o --shard_size 4", path, scratch));
    char* make = text("cd %s/o && mv o_000002.bin o_000002.bin.tmp && cp o_000001.bin other_000000.bin", scratch);
    assert_int_equal(system(make), 0);
    for (size_t i = 0; i < 5; i++) {
        char* name = text("o/%s", others[i]);
        if (i != 3) { free(write_bytes(name, BYTES("kept"))); }
        free(name);
    }
    assert_succeeded(run("prepare", "%s --tokenizer bytes --out %s/o --overwrite", path, scratch));
    assert_contains(&errors, " and 2 more: left in place, since dataset/prepare did not write it");
    assert_int_equal(count_files("o", ""), 6);
    for (size_t i = 0; i < 5; i++) {
        char* other = text("%s/o/%s", scratch, others[i]);
        assert_true(file_exists(other));
        free(other);
    }
    // what looks like a shard but is none is neither replaced nor removed
    static const char* const false_shards[] = {"o_000000.bin", "o_000003.bin", "o_000000.bin.tmp"};
    for (size_t i = 0; i < 3; i++) {
        char *name = text("o/%s", false_shards[i]), *file = write_bytes(name, BYTES("a thesis of mine"));
        assert_refused(run("prepare", "%s --tokenizer bytes --out %s/o --overwrite", path, scratch),
                       "has the name of a shard");
        Bytes kept = read_bytes(file);
        assert_string_equal(kept.bytes, "a thesis of mine");
        unlink(file);
        free(kept.bytes);
        free(name);
        free(file);
    }
    free(make);
    free(path);
    remove_scratch("o");
}

// What the system leaves in a folder does not make it one that is in use.
static void test_hidden_files(void** state) {
    (void)state;
    char *path = write_bytes("h.txt", BYTES("a")), *folder = text("%s/h", scratch);
    make_directories(folder);
    free(write_bytes("h/.nfs0001", BYTES("x")));
    free(write_bytes("h/.thesis.bin", BYTES("x")));
    assert_succeeded(run("prepare", "%s --tokenizer bytes --out %s", path, folder));
    assert_string_equal(errors.bytes, "");
    assert_refused(run("prepare", "%s --tokenizer bytes --out %s", path, folder), "the folder is not empty");
    free(path);
    free(folder);
    remove_scratch("h");
}

// Never more shards than the loader can map: later ones are larger.
static void test_shards_grow(void** state) {
    (void)state;
    static const size_t first[] = {1, 1000, 100000000, INT32_MAX};
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(shard_tokens_at(first[i], 0), first[i]);
        assert_int_equal(shard_tokens_at(first[i], SHARD_GROW_EVERY - 1), first[i]);
        size_t large = first[i] < INT32_MAX / 8 ? 8 * first[i] : INT32_MAX;
        assert_int_equal(shard_tokens_at(first[i], SHARD_GROW_EVERY), large);
        double tokens = 0;
        for (size_t n = 0; n < SHARD_MAX_COUNT; n++) { tokens += (double)shard_tokens_at(first[i], n); }
        assert_true(tokens > 3e13);
    }
}

// ----------------------------------------------------------------------------
// interruption

// Starts prepare on a pipe that never ends, waits until shards are being written, sends the signal; the wait status.
static int interrupt(int signal_number) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    char *out = text("%s/k", scratch), *err = text("%s/err", scratch);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[0], STDIN_FILENO);
        dup2(open(err, O_WRONLY | O_CREAT | O_TRUNC, 0666), STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        execl(program("prepare"), "prepare", "-", "--format", "txt", "--tokenizer", "bytes", "--out", out,
              "--shard_size", "1000000", "--threads", "2", NULL);
        _exit(127);
    }
    close(ends[0]);
    char block[4096];
    for (size_t i = 0; i < sizeof block; i++) { block[i] = i % 64 > 61 ? '\n' : 'x'; }
    for (size_t i = 0; i < 2500; i++) { assert_int_equal(write(ends[1], block, sizeof block), sizeof block); }
    for (int i = 0; i < 12000 && count_files("k", ".bin.tmp") < 2; i++) { usleep(10000); }
    assert_true(count_files("k", ".bin.tmp") >= 2);
    assert_int_equal(count_files("k", ".bin"), 0);
    kill(child, signal_number);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    close(ends[1]);
    free(out);
    free(err);
    return status;
}

static void test_interrupted(void** state) {
    (void)state;
    static const int polite[] = {SIGINT, SIGTERM, SIGHUP};
    for (size_t i = 0; i < 3; i++) {
        int status = interrupt(polite[i]);
        assert_true(WIFSIGNALED(status));
        assert_int_equal(WTERMSIG(status), polite[i]);
        assert_int_equal(count_files("k", ""), -1);
    }
    interrupt(SIGKILL);
    assert_int_equal(count_files("k", ".bin"), 0);
    assert_int_equal(count_files("k", ""), count_files("k", ".bin.tmp"));
    char* path = write_bytes("k.txt", BYTES("after"));
    assert_succeeded(run("prepare", "%s --tokenizer bytes --out %s/k", path, scratch));  // needs no --overwrite
    Bytes got = documents_of("k", "bytes", 100000000);
    assert_string_equal(got.bytes, "after|");
    free(got.bytes);
    free(path);
    remove_scratch("k");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_documents),
        cmocka_unit_test(test_several_files),
        cmocka_unit_test(test_quick_start),
        cmocka_unit_test(test_threads_bytes),
        cmocka_unit_test(test_threads_mistral),
        cmocka_unit_test(test_block_edges),
        cmocka_unit_test(test_block_edges_of_lines),
        cmocka_unit_test(test_one_large_document),
        cmocka_unit_test(test_shard_boundaries),
        cmocka_unit_test(test_summary),
        cmocka_unit_test(test_wide_tokens),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_late_error),
        cmocka_unit_test(test_overwrite),
        cmocka_unit_test(test_overwrite_leaves_other_files),
        cmocka_unit_test(test_hidden_files),
        cmocka_unit_test(test_shards_grow),
        cmocka_unit_test(test_interrupted),
    };
    return cmocka_run_group_tests(tests, make_scratch, drop_scratch);
}
