/*
Readers of texts and JSON Lines. Input: a choice (format, separator), then the text. Read in blocks, the documents must
be those that one walk over the whole text finds.
*/
#include "fuzz.h"

#define TEXT_BLOCK_BYTES 32  // so that many blocks end within an input
#include "../../llmc/text_tally.h"

enum { JSONL = 1, SEPARATOR = 2, ESCAPES = 4 };  // ESCAPES: the separator is the input's first line

// Order and content of the documents so far.
typedef struct {
    uint64_t hash;
    size_t lines;
    TextCounts counts;
    bool failed;
} Seen;

static void see_block(Seen* seen, const DocumentRules* rules, const TextBlock* b, TextReport* report) {
    char* document;
    size_t length;
    text_report_begin(report, b);
    bool valid = utf8_is_valid(b->bytes, b->size);
    while (text_report_next(report, rules, b->input->format, &document, &length)) {
        if (document < b->bytes || document + length > b->bytes + b->size) { abort(); }
        if (valid && b->input->format == FORMAT_JSONL && !utf8_is_valid(document, length)) { abort(); }
        uint64_t parts[3] = {seen->hash, fnv1a(document, length), length};
        seen->hash = fnv1a(parts, sizeof parts);
    }
    text_counts_add(&seen->counts, &report->counts);
    seen->lines += report->cursor.line;
    if (report->cursor.failed) {
        if (!report->cursor.json.error) { abort(); }
        seen->failed = true;
    }
}

static Seen see_in_blocks(const DocumentRules* rules, const Input* input) {
    Seen seen = {0};
    TextReader reader = text_reader(input, 1);
    TextBlock block = {0};
    TextReport report = {0};
    while (!seen.failed && text_reader_next(&reader, rules, &block)) { see_block(&seen, rules, &block, &report); }
    text_reader_free(&reader);
    text_report_free(&report);
    free(block.bytes);
    return seen;
}

static Seen see_at_once(const DocumentRules* rules, const Input* input, const uint8_t* data, size_t size) {
    Seen seen = {0};
    TextReader reader = text_reader(input, 1);
    TextReport report = {0};
    TextBlock block = {.input = input, .bytes = (char*)xcalloc(size, 1), .size = size, .capacity = size};
    memcpy(block.bytes, data, size);
    text_reader_begin_input(&reader, &block);
    if (input->format == FORMAT_TXT && !rules->raw_lines) { text_block_unify_lines(&block, 0, reader.cr_only, false); }
    see_block(&seen, rules, &block, &report);
    text_report_free(&report);
    free(block.bytes);
    return seen;
}

// As evaluate --score reads a text, with all that may be said of it.
static void tally(const DocumentRules* rules, const Input* input) {
    TextReader reader = text_reader(input, 1);
    TextBlock block = {0};
    TextReport report = {0};
    TextTally all = {0};
    char* document;
    size_t length;
    while (text_reader_next(&reader, rules, &block)) {
        text_report_begin(&report, &block);
        while (text_report_next(&report, rules, input->format, &document, &length)) {}
        text_tally_add(&all, rules, &block, &report);
    }
    text_tally_end(&all, rules, input, 1);
    text_tally_warn(&all);
    text_reader_free(&reader);
    text_report_free(&report);
    free(block.bytes);
}

static void fuzz_one(const uint8_t* data, size_t size) {
    uint8_t choice = fuzz_take(&data, &size);
    char separator[64] = "--\n";
    if (choice & ESCAPES) {
        const uint8_t* end = (const uint8_t*)memchr(data, '\n', size);
        size_t n = end ? (size_t)(end - data) : 0;
        snprintf(separator, sizeof separator, "%.*s", (int)n, (const char*)data);
        if (end) { data = end + 1, size -= n + 1; }
    }
    TextOptions options = {NULL, choice & (SEPARATOR | ESCAPES) && *separator ? separator : NULL, NULL};
    DocumentRules rules = document_rules(&options);
    Input input = {.path = fuzz_file(data, size), .name = "fuzz", .format = choice & JSONL ? FORMAT_JSONL : FORMAT_TXT};
    input.regular = choice & 8;
    Seen in_blocks = see_in_blocks(&rules, &input), at_once = see_at_once(&rules, &input, data, size);
    // whether lines end in \r alone is decided by the first block, so that a text with both may differ
    bool decided = input.format == FORMAT_JSONL || !memchr(data, '\r', size) || rules.raw_lines;
    if (decided && memcmp(&in_blocks, &at_once, sizeof in_blocks) != 0) { abort(); }
    tally(&rules, &input);
    document_rules_free(&rules);
}

static void fuzz_seeds(void) {
    static const char* const texts[] = {"one\n\ntwo\nlines\n\n\n\nthree",
                                        "a\r\nb\r\n\r\nc\r\n",
                                        "a\rb\r\rc\r",
                                        "--\nx\n--\n\n--\ny\n",
                                        "\xEF\xBB\xBFMark\n\n",
                                        "caf\xC3\xA9 \xF0\x9F\x98\x80\n\n\xFF",
                                        "",
                                        "\n",
                                        "PAR1\x15",
                                        "a first document that is longer than a block is\n\na second one"};
    static const char* const lines[] = {
        "{\"text\": \"a\"}\n{\"id\": [1, 2.5e-3, {\"x\": null}], \"text\": \"b\\n\\u00e9\"}\n",
        "{\"text\": \"\\ud83d\\ude00 \\ud800 \\\\ \\/ \\b\\f\\t\\r\\\"\"}\r\n\r\n",
        "{\"text\": \"first\", \"text\": \"last\"}\n  \n{\"text\":\"\\u0000\"}",
        "{\"other\": true, \"more\": [[[[]]], false, -0.0E+1]}\n{\"text\": 5}\n",
        "{\"bamc_stream\": \"begins\"}\n{\"text\": \"a\"}\n{\"bamc_stream\": \"ends after 1 documents\"}\n",
        "{\"text\": \"b\"}\n{\"bamc_stream\": \"begins\"}\n{\"bamc_stream\": \"failed: no\\nnet\"}\n",
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        fuzz_seed_text(0, texts[i]);
        fuzz_seed_text(SEPARATOR, texts[i]);
        char* escaped = text("\\r\\x2d%s\n%s", i % 2 ? "\\n" : "", texts[i]);
        fuzz_seed_text(ESCAPES, escaped);
        free(escaped);
    }
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) { fuzz_seed_text(JSONL, lines[i]); }
}
