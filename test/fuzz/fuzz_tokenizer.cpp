/*
SentencePiece models, and texts that they encode. Input: how many hundreds of bytes at its end are the text, then the
model, then the text. The ids must be below the vocabulary, and decode.
*/
#include "fuzz.h"

#include "../../llmc/tokenizer.h"

static void fuzz_one(const uint8_t* data, size_t size) {
    size_t text_bytes = 100 * (size_t)(fuzz_take(&data, &size) & 15);
    text_bytes = text_bytes < size ? text_bytes : size;
    const char* text = (const char*)data + size - text_bytes;
    Tokenizer* t = tokenizer_open(fuzz_file(data, size - text_bytes));
    struct Close {  // also when something is refused
        Tokenizer* t;
        TokenList ids;
        char* decoded;
        ~Close() {
            tokenizer_close(t);
            free(ids.ids);
            free(decoded);
        }
    } held = {t, {NULL, 0, 0}, NULL};
    tokenizer_encode(t, text, text_bytes, &held.ids);
    for (size_t i = 0; i < held.ids.count; i++) {
        if (held.ids.ids[i] < 0 || (size_t)held.ids.ids[i] >= tokenizer_vocab_size(t)) { abort(); }
    }
    held.decoded = tokenizer_decode(t, held.ids.ids, held.ids.count, NULL);
}

// ----------------------------------------------------------------------------
// models, written by hand in the protocol buffer of sentencepiece_model.proto

#include <string>

static std::string varint(uint64_t value) {
    std::string s;
    for (; value >= 128; value >>= 7) { s += (char)(value | 128); }
    return s + (char)value;
}

static std::string number(unsigned field, uint64_t value) { return varint(field << 3) + varint(value); }

static std::string bytes(unsigned field, const std::string& data) {
    return varint(field << 3 | 2) + varint(data.size()) + data;
}

static std::string piece(const std::string& spelling, float score, int type) {
    std::string s = bytes(1, spelling) + varint(2 << 3 | 5);
    s.append((const char*)&score, 4);
    return bytes(1, s + number(3, (uint64_t)type));
}

static void seed_model(int type, bool byte_pieces, const std::string& charsmap) {
    std::string model = piece("<unk>", 0, 2) + piece("<s>", 0, 3) + piece("</s>", 0, 3) + piece("[x]", 0, 4);
    static const char space[] = "\xE2\x96\x81", space_a[] = "\xE2\x96\x81\x61";
    static const char* const pieces[] = {space, "a", "b", "ab", space_a, "\xC3\xA9", "c", "bc"};
    for (int i = 0; i < 8; i++) { model += piece(pieces[i], -1 - (float)i, 1); }
    char name[8];
    for (int i = 0; byte_pieces && i < 256; i++) {
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)i);
        model += piece(name, 0, 6);
    }
    model += bytes(2, number(3, (uint64_t)type) + number(35, byte_pieces));
    model += bytes(3, number(3, 1) + number(4, 0) + (charsmap.empty() ? "" : bytes(2, charsmap)));
    std::string text = "ab abc [x] a\nb \xC3\xA9 caf\xC3\xA9 \xE2\x96\x81\x61  b \xFF ";
    text.resize(100, 'a');
    std::string input = model + text;
    fuzz_seed(1, input.data(), input.size());
}

// Writes x for c: a trie of 256 units (see llmc/charsmap.h) and one replacement.
static std::string charsmap(void) {
    uint32_t units[256];
    for (uint32_t& unit : units) { unit = 1u << 31; }
    units[0] = 1 << 10;                                      // children at 1 ^ c
    units[1 ^ 'c'] = 'c' | 1 << 8 | (0x80 ^ 1 ^ 'c') << 10;  // a leaf at 0x80
    units[0x80] = 1u << 31 | 2;
    const uint32_t size = sizeof units;
    std::string map((const char*)&size, 4);
    map.append((const char*)units, sizeof units);
    return map.append("y\0x\0", 4);
}

static void fuzz_seeds(void) {
    for (int type = 1; type <= 4; type++) {
        seed_model(type, false, "");
        seed_model(type, type <= 2, "");
    }
    seed_model(1, true, charsmap());
    seed_model(2, false, charsmap());
}
