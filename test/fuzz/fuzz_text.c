/*
Readers of texts and JSON Lines. Input: a choice (format, separator, where the blocks end), then the text. Read in
blocks, the documents must be those that one walk over the whole text finds.
*/
#include "fuzz.h"

#include "../../dataset/text_reader.h"

enum { JSONL = 1, SEPARATOR = 2, FAR = 0xF0 };  // FAR, all of it: a block of the reader ends within the text, slow
enum { HASHED = 8192 };                         // bytes at the end of a document

static DocumentRules rules;

// Order and content of the documents so far.
typedef struct {
    uint64_t hash;
    size_t count;
    bool failed;
} Seen;

static void see(Seen* seen, const char* document, size_t length) {
    size_t skipped = length > HASHED ? length - HASHED : 0;
    uint64_t parts[3] = {seen->hash, fnv1a(document + skipped, length - skipped), length};
    seen->hash = fnv1a(parts, sizeof parts);
    seen->count++;
}

static void see_block(Seen* seen, Format format, char* block, size_t size) {
    DocumentCursor cursor;
    memset(&cursor, 0, sizeof cursor);
    cursor.p = block, cursor.end = block + size;
    char* document;
    size_t length;
    while (document_next(&rules, format, &cursor, &document, &length)) {
        if (document < block || document + length > block + size) { abort(); }
        bool valid = utf8_is_valid(document, length);
        if (format == FORMAT_JSONL && utf8_is_valid(block, size) && !valid) { abort(); }
        see(seen, document, length);
    }
    if (cursor.failed) {
        if (!cursor.json.error) { abort(); }
        seen->failed = true;
    }
}

static void fuzz_one(const uint8_t* data, size_t size) {
    uint8_t choice = fuzz_take(&data, &size);
    Format format = choice & JSONL ? FORMAT_JSONL : FORMAT_TXT;
    rules = (DocumentRules){"--\n", choice & SEPARATOR ? 3 : 0, "text"};
    // a first document of just so many bytes that the block ends in the middle of the input
    size_t before = (choice & FAR) == FAR ? TEXT_BLOCK_BYTES - size / 2 : 0;
    char *whole = (char*)xcalloc(before + size + 1, 1), *mutated = (char*)xcalloc(before + size + 1, 1);
    memset(whole, format == FORMAT_JSONL ? ' ' : 'x', before);
    memcpy(whole + before, data, size);
    memcpy(mutated, whole, before + size);
    Seen in_blocks = {0}, at_once = {0};
    Input input = {fuzz_file(whole, before + size), format};
    TextReader reader = {.inputs = &input, .count = 1, .file = -1};
    static TextBlock block;
    if (!block.bytes) {  // once and for all runs: it is large
        fuzz_runs = false;
        text_reserve(&block.bytes, &block.capacity, 3 * (size_t)TEXT_BLOCK_BYTES);
        fuzz_runs = true;
    }
    while (!in_blocks.failed && text_reader_next(&reader, &rules, &block)) {
        see_block(&in_blocks, format, block.bytes, block.size);
    }
    size_t mark = before + size >= 3 && memcmp(whole, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
    see_block(&at_once, format, mutated + mark, before + size - mark);
    bool same = in_blocks.hash == at_once.hash && in_blocks.count == at_once.count;
    if (in_blocks.failed != at_once.failed || !same) { abort(); }
    free(whole);
    free(mutated);
    free(reader.tail);
}

static void fuzz_seeds(void) {
    static const char* const texts[] = {"one\n\ntwo\nlines\n\n\n\nthree",
                                        "a\r\nb\r\n\r\nc\r\n",
                                        "--\nx\n--\n\n--\ny\n",
                                        "\xEF\xBB\xBFMark\n\n",
                                        "caf\xC3\xA9 \xF0\x9F\x98\x80\n\n\xFF",
                                        "",
                                        "\n"};
    static const char* const lines[] = {
        "{\"text\": \"a\"}\n{\"id\": [1, 2.5e-3, {\"x\": null}], \"text\": \"b\\n\\u00e9\"}\n",
        "{\"text\": \"\\ud83d\\ude00 \\ud800 \\\\ \\/ \\b\\f\\t\\r\\\"\"}\r\n\r\n",
        "{\"text\": \"first\", \"text\": \"last\"}\n  \n{\"text\":\"\\u0000\"}",
        "{\"other\": true, \"more\": [[[[]]], false, -0.0E+1]}\n{\"text\": 5}\n",
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        fuzz_seed_text(0, texts[i]);
        fuzz_seed_text(SEPARATOR, texts[i]);
        fuzz_seed_text(FAR, texts[i]);
        fuzz_seed_text(SEPARATOR | FAR, texts[i]);
    }
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        fuzz_seed_text(JSONL, lines[i]);
        fuzz_seed_text(JSONL | FAR, lines[i]);
    }
}
