/*
The tokenizer of tokenizer.h: "bytes", and SentencePiece where the library is there (HAVE_SENTENCEPIECE).

SentencePiece encodes 4 MB/s and keeps about 100 bytes a byte of text, for the whole text. Most BPE models (Mistral's,
Llama's) let the text be cut, exactly: a merge needs the merged piece to be in the vocabulary, so where no piece holds a
word's last character followed by a space, and none holds a newline, no merge reaches over such a place, and the merges
on one side (highest score first, then leftmost) do not depend on the other side. splits_at_words() checks this in the
model file. Words then are encoded one at a time and their ids kept in a cache per thread.
*/
#include "tokenizer.h"

#include <atomic>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#ifdef HAVE_SENTENCEPIECE
#include <sentencepiece_processor.h>
#endif

enum { BYTES_BOS = 256, BYTES_EOS = 257, BYTES_VOCAB = 258 };

struct Tokenizer {
    std::string name;
    std::vector<std::string> pieces;
    std::vector<bool> control;
    int bos, eos;
    uint32_t hash;
    bool bytes;
    bool by_word;  // splits_at_words()
#ifdef HAVE_SENTENCEPIECE
    sentencepiece::SentencePieceProcessor processor;
    uint64_t serial;               // tells the caches of two tokenizers apart
    std::vector<int> space_ids;    // of a lone space
    std::vector<int> newline_ids;  // of a newline
#endif
};

static uint32_t fnv1a(std::string_view data) {
    uint32_t h = 2166136261u;
    for (unsigned char c : data) { h = (h ^ c) * 16777619u; }
    return h ? h : 1;
}

static Tokenizer* open_bytes() {
    Tokenizer* t = new Tokenizer();
    t->bytes = true, t->by_word = false;
    t->bos = BYTES_BOS, t->eos = BYTES_EOS;
    t->hash = fnv1a("bytes");
    for (int i = 0; i < 256; i++) {
        char hex[8];
        snprintf(hex, sizeof hex, "<0x%02X>", (unsigned)i);
        t->pieces.push_back(i > ' ' && i < 127 ? std::string(1, (char)i) : std::string(hex));
    }
    t->pieces.push_back("<s>");
    t->pieces.push_back("</s>");
    t->control.assign(BYTES_VOCAB, false);
    t->control[BYTES_BOS] = t->control[BYTES_EOS] = true;
    return t;
}

static void encode_bytes(const char* text, size_t length, TokenList* out) {
    token_list_reserve(out, length);
    for (size_t i = 0; i < length; i++) { out->ids[out->count + i] = (unsigned char)text[i]; }
    out->count += length;
}

#ifdef HAVE_SENTENCEPIECE
// ----------------------------------------------------------------------------
// the model file: is the word a unit?

// A protocol buffer message, read field by field. Varint and fixed values land in number, the others in data.
struct Message {
    std::string_view rest;
    bool ok = true;
    unsigned field = 0;
    uint64_t number = 0;
    std::string_view data;

    explicit Message(std::string_view s) : rest(s) {}

    uint64_t varint() {
        uint64_t value = 0;
        for (unsigned shift = 0; shift < 64 && !rest.empty(); shift += 7) {
            unsigned char c = (unsigned char)rest.front();
            rest.remove_prefix(1);
            value |= (uint64_t)(c & 127) << shift;
            if (c < 128) { return value; }
        }
        ok = false;
        return 0;
    }

    bool next() {
        if (rest.empty() || !ok) { return false; }
        uint64_t key = varint();
        field = (unsigned)(key >> 3);
        unsigned wire = key & 7;
        if (wire == 0) {
            number = varint();
            return ok;
        }
        uint64_t size = wire == 1 ? 8 : wire == 5 ? 4 : wire == 2 ? varint() : UINT64_MAX;
        if (size > rest.size()) { ok = false; }
        if (!ok) { return false; }
        data = rest.substr(0, size);
        rest.remove_prefix(size);
        return true;
    }
};

static const char SPACE_PIECE[] = "\xE2\x96\x81";  // U+2581, what SentencePiece writes for a space

// Field numbers and values of sentencepiece_model.proto.
enum { MODEL_PIECES = 1, MODEL_TRAINER = 2, MODEL_NORMALIZER = 3, MODEL_DENORMALIZER = 5 };
enum { PIECE_TEXT = 1, PIECE_TYPE = 3, TYPE_NORMAL = 1, TYPE_USER_DEFINED = 4, TYPE_UNUSED = 5, TYPE_BYTE = 6 };
enum { TRAINER_MODEL_TYPE = 3, TRAINER_SPACE_AS_SUFFIX = 24, MODEL_TYPE_BPE = 2 };
enum { NORMALIZER_CHARSMAP = 2, NORMALIZER_DUMMY_PREFIX = 3, NORMALIZER_TRIM = 4, NORMALIZER_ESCAPE = 5 };

// A space after another character, or a newline: then a merge could reach over a place where words are cut.
static bool piece_reaches_over(std::string_view piece) {
    while (piece.substr(0, 3) == SPACE_PIECE) { piece.remove_prefix(3); }
    return piece.find(SPACE_PIECE) != piece.npos || piece.find('\n') != piece.npos;
}

// User-defined pieces are matched in the text itself, before any merge.
static bool user_piece_reaches_over(std::string_view piece) {
    return piece.find(SPACE_PIECE) != piece.npos || piece.find_first_of(" \n") != piece.npos;
}

/*
The library follows the normaliser's table without looking where it leads, so a damaged one must not reach it: the size
of a double-array trie (Darts-clone), the trie, and the texts that its leaves point to. A unit of the trie has its label
in bits 0 to 7, whether it has a leaf in bit 8, and in the others how to get from its place to those of its children.
*/
static bool charsmap_is_whole(std::string_view map) {
    if (map.empty()) { return true; }
    uint32_t bytes = 0;
    if (map.size() <= sizeof bytes) { return false; }
    memcpy(&bytes, map.data(), sizeof bytes);
    map.remove_prefix(sizeof bytes);
    if (bytes >= map.size() || bytes < sizeof(uint32_t) || bytes % sizeof(uint32_t) != 0) { return false; }
    std::vector<uint32_t> units(bytes / sizeof(uint32_t));
    memcpy(units.data(), map.data(), bytes);
    const size_t texts = map.size() - bytes;
    std::vector<bool> seen(units.size());
    std::vector<size_t> waiting(1, 0);
    seen[0] = true;
    while (!waiting.empty()) {
        size_t place = waiting.back();
        waiting.pop_back();
        const uint32_t unit = units[place];
        const size_t children = place ^ ((size_t)(unit >> 10) << ((unit & 512) >> 6));
        if ((children | 255) >= units.size()) { return false; }
        if ((unit & 256) && (units[children] & 0x7fffffffu) >= texts) { return false; }
        for (uint32_t label = 0; label < 256; label++) {  // text may hold zero bytes
            const size_t child = children ^ label;
            if ((units[child] & 0x800000ffu) != label || seen[child]) { continue; }
            seen[child] = true;
            waiting.push_back(child);
        }
    }
    return true;
}

// Whether encoding words one by one gives the ids of the whole text; *valid is false when this is no model at all.
// Byte pieces are required: without them neighbouring unknown characters become one id, across words.
static bool splits_at_words(std::string_view model, bool* valid) {
    bool bpe = false, suffix = false, charsmap = false, prefix = true, trim = true, escape = true, reaches = false;
    bool whole = true;
    size_t pieces = 0, bytes = 0;
    Message m(model);
    while (m.next()) {
        Message part(m.data);
        std::string_view text;
        uint64_t type = TYPE_NORMAL;
        bool known = m.field <= MODEL_NORMALIZER || m.field == MODEL_DENORMALIZER;
        while (known && part.next()) {
            if (m.field == MODEL_PIECES) {
                if (part.field == PIECE_TEXT) { text = part.data; }
                if (part.field == PIECE_TYPE) { type = part.number; }
            } else if (m.field == MODEL_TRAINER) {
                if (part.field == TRAINER_MODEL_TYPE) { bpe = part.number == MODEL_TYPE_BPE; }
                if (part.field == TRAINER_SPACE_AS_SUFFIX) { suffix = part.number != 0; }
            } else {
                if (part.field == NORMALIZER_CHARSMAP) { whole = whole && charsmap_is_whole(part.data); }
                if (m.field == MODEL_DENORMALIZER) { continue; }
                if (part.field == NORMALIZER_CHARSMAP) { charsmap = !part.data.empty(); }
                if (part.field == NORMALIZER_DUMMY_PREFIX) { prefix = part.number != 0; }
                if (part.field == NORMALIZER_TRIM) { trim = part.number != 0; }
                if (part.field == NORMALIZER_ESCAPE) { escape = part.number != 0; }
            }
        }
        m.ok = m.ok && part.ok;
        if (m.field != MODEL_PIECES) { continue; }
        pieces++;
        bytes += type == TYPE_BYTE;
        if (type == TYPE_USER_DEFINED) { reaches = reaches || user_piece_reaches_over(text); }
        if (type == TYPE_NORMAL || type == TYPE_UNUSED) { reaches = reaches || piece_reaches_over(text); }
    }
    *valid = m.ok && whole && pieces > 0;
    return *valid && bpe && bytes == 256 && prefix && escape && !suffix && !charsmap && !trim && !reaches;
}

// Calls into the library, which throws std::bad_alloc at some damaged models: what it throws is an error like others.
template <typename Call>
static auto guarded(const char* name, const char* task, Call call) -> decltype(call()) {
    try {
        return call();
    } catch (const std::exception& e) {
        fatal("%s: SentencePiece cannot %s: %s; if the model is damaged, get it again with dataset/get_tokenizer.sh",
              name, task, e.what());
    } catch (...) {
        fatal("%s: SentencePiece cannot %s; if the model is damaged, get it again with dataset/get_tokenizer.sh", name,
              task);
    }
}

enum { MOST_MODEL_BYTES = 1 << 28 };  // 50 times the largest vocabularies in use

static std::string read_model(const char* path) {
    FILE* file = fopen(path, "rb");
    if (!file) { fatal("%s: %s; get a model with dataset/get_tokenizer.sh, or use 'bytes'", path, strerror(errno)); }
    std::string model;
    char block[65536];
    for (size_t n; (n = fread(block, 1, sizeof block, file)) > 0;) {
        model.append(block, n);
        if (model.size() > MOST_MODEL_BYTES) {
            fatal(
                "%s: more than %d bytes, too many for a SentencePiece model; get one with dataset/get_tokenizer.sh, or "
                "use 'bytes'",
                path, MOST_MODEL_BYTES);
        }
    }
    if (ferror(file)) {
        fatal("%s: %s; get a model with dataset/get_tokenizer.sh, or use 'bytes'", path, strerror(errno));
    }
    fclose(file);
    return model;
}

// ----------------------------------------------------------------------------
// encoding

static std::vector<int> encode_library(const Tokenizer* t, std::string_view text) {
    std::vector<int> ids;
    auto status = guarded(t->name.c_str(), "encode", [&] { return t->processor.Encode(std::string(text), &ids); });
    if (!status.ok()) { fatal("%s: SentencePiece cannot encode: %s", t->name.c_str(), status.ToString().c_str()); }
    return ids;
}

enum { CACHE_SLOTS = 1 << 16, WORD_BYTES = 30, WORD_IDS = 8 };

// One cache line. An empty slot has no ids.
struct Word {
    uint8_t size, count;  // size has 128 added for a word with a space before it
    char bytes[WORD_BYTES];
    int ids[WORD_IDS];
};

struct Cache {
    uint64_t serial = 0;
    std::vector<Word> slots;
};

static Cache& cache_of(const Tokenizer* t) {
    static thread_local Cache cache;
    if (cache.serial != t->serial) {
        cache.slots.assign(CACHE_SLOTS, Word());
        cache.serial = t->serial;
    }
    return cache;
}

static size_t word_slot(const char* word, size_t size, bool space) {
    uint64_t h = size + (space ? 128 : 0), chunk;
    for (; size >= 8; word += 8, size -= 8) {
        memcpy(&chunk, word, 8);
        h = (h ^ chunk) * 0x9E3779B97F4A7C15ull;
        h ^= h >> 32;
    }
    chunk = 0;
    memcpy(&chunk, word, size);
    h = (h ^ chunk) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 32;
    return (size_t)((h * 0x9E3779B97F4A7C15ull) >> 48) % CACHE_SLOTS;
}

// The ids of one word, with the space before it or without: the library always puts its dummy prefix first, which is
// that space, or else is dropped together with a newline that keeps it from merging.
static std::vector<int> encode_word(const Tokenizer* t, std::string_view word, bool space) {
    if (space) { return word.empty() ? t->space_ids : encode_library(t, word); }
    std::vector<int> ids = encode_library(t, "\n" + std::string(word));
    ids.erase(ids.begin(), ids.begin() + (ptrdiff_t)(t->space_ids.size() + t->newline_ids.size()));
    return ids;
}

static void append_word(const Tokenizer* t, Cache& cache, std::string_view word, bool space, TokenList* out) {
    if (word.empty() && !space) { return; }
    if (word.size() > WORD_BYTES) {
        std::vector<int> ids = encode_word(t, word, space);
        return token_list_append(out, ids.data(), ids.size());
    }
    Word& slot = cache.slots[word_slot(word.data(), word.size(), space)];
    uint8_t size = (uint8_t)(word.size() + (space ? 128 : 0));
    if (slot.count && slot.size == size && memcmp(slot.bytes, word.data(), word.size()) == 0) {
        return token_list_append(out, slot.ids, slot.count);
    }
    std::vector<int> ids = encode_word(t, word, space);
    token_list_append(out, ids.data(), ids.size());
    if (ids.empty() || ids.size() > WORD_IDS) { return; }
    slot.size = size, slot.count = (uint8_t)ids.size();
    memcpy(slot.bytes, word.data(), word.size());
    memcpy(slot.ids, ids.data(), ids.size() * sizeof(int));
}

// Cuts before a space that follows another character, and around newlines. A character that ends in the byte 0x81 may
// be U+2581 itself, which reads as a space: no cut behind it. The text starts as if a space came before it.
static void encode_by_word(const Tokenizer* t, const char* text, size_t length, TokenList* out) {
    Cache& cache = cache_of(t);
    bool space = true;
    for (size_t start = 0;;) {
        size_t end = start;
        for (; end < length && text[end] != '\n'; end++) {
            if (text[end] == ' ' && end > start && text[end - 1] != ' ' && text[end - 1] != '\x81') { break; }
        }
        append_word(t, cache, std::string_view(text + start, end - start), space, out);
        if (end == length) { return; }
        space = text[end] == ' ';
        start = end + 1;
        if (!space) { token_list_append(out, t->newline_ids.data(), t->newline_ids.size()); }
    }
}

static Tokenizer* open_model(const char* path) {
    static std::atomic<uint64_t> opened{0};
    std::string model = read_model(path);
    bool valid = false;
    bool by_word = splits_at_words(model, &valid);
    Tokenizer* t = new Tokenizer();
    if (!valid || !guarded(path, "read it", [&] { return t->processor.LoadFromSerializedProto(model).ok(); })) {
        fatal("%s: %zu bytes that are no SentencePiece model; get one with dataset/get_tokenizer.sh, or use 'bytes'",
              path, model.size());
    }
    t->serial = ++opened;
    t->name = path;
    t->bytes = false;
    t->bos = t->processor.bos_id(), t->eos = t->processor.eos_id();
    if (t->bos < 0 || t->eos < 0) {
        fatal("%s: the model has no %s id, expected both BOS and EOS; use another model or 'bytes'", path,
              t->bos < 0 ? "BOS" : "EOS");
    }
    t->hash = fnv1a(model);
    guarded(path, "list its pieces", [&] {
        for (int i = 0; i < t->processor.GetPieceSize(); i++) {
            t->pieces.push_back(t->processor.IdToPiece(i));
            t->control.push_back(t->processor.IsControl(i));
        }
    });
    std::vector<int> ids = encode_library(t, "\n");
    t->by_word = by_word && ids.size() >= 2;
    if (t->by_word) {
        t->space_ids.assign(ids.begin(), ids.end() - 1);
        t->newline_ids.assign(ids.end() - 1, ids.end());
    }
    return t;
}

static std::string decode_library(const Tokenizer* t, const std::vector<int>& ids) {
    std::string text;
    auto status = guarded(t->name.c_str(), "decode", [&] { return t->processor.Decode(ids, &text); });
    if (!status.ok()) { fatal("%s: SentencePiece cannot decode: %s", t->name.c_str(), status.ToString().c_str()); }
    return text;
}
#else
static Tokenizer* open_model(const char* path) {
    fatal("%s: this build has no SentencePiece; install libsentencepiece-dev and make again, or use 'bytes'", path);
}
#endif

// ----------------------------------------------------------------------------
// the interface

Tokenizer* tokenizer_open(const char* source) {
    Tokenizer* t = strcmp(source, "bytes") == 0 ? open_bytes() : open_model(source);
    t->name = source;
    return t;
}

void tokenizer_close(Tokenizer* t) { delete t; }
const char* tokenizer_name(const Tokenizer* t) { return t->name.c_str(); }
size_t tokenizer_vocab_size(const Tokenizer* t) { return t->pieces.size(); }
int tokenizer_bos(const Tokenizer* t) { return t->bos; }
int tokenizer_eos(const Tokenizer* t) { return t->eos; }
uint32_t tokenizer_hash(const Tokenizer* t) { return t->hash; }
bool tokenizer_is_by_word(const Tokenizer* t) { return t->by_word; }

void tokenizer_encode_whole(const Tokenizer* t, const char* text, size_t length, TokenList* out) {
    if (t->bytes) { return encode_bytes(text, length, out); }
#ifdef HAVE_SENTENCEPIECE
    std::vector<int> ids = encode_library(t, std::string_view(text, length));
    token_list_append(out, ids.data(), ids.size());
#endif
}

void tokenizer_encode(const Tokenizer* t, const char* text, size_t length, TokenList* out) {
#ifdef HAVE_SENTENCEPIECE
    if (length > 0 && t->by_word) { return encode_by_word(t, text, length, out); }
#endif
    tokenizer_encode_whole(t, text, length, out);
}

// The ids between two that print by themselves go to the library together, as bytes may form characters.
char* tokenizer_decode(const Tokenizer* t, const int* ids, size_t n, size_t* length) {
    std::string text;
    std::vector<int> run;
    auto flush = [&] {
        if (t->bytes) {
            for (int id : run) { text += (char)id; }
        }
#ifdef HAVE_SENTENCEPIECE
        if (!t->bytes && !run.empty()) { text += decode_library(t, run); }
#endif
        run.clear();
    };
    for (size_t i = 0; i < n; i++) {
        bool known = ids[i] >= 0 && (size_t)ids[i] < t->pieces.size();
        if (known && t->control[(size_t)ids[i]]) { continue; }
        if (known) {
            run.push_back(ids[i]);
        } else {
            flush();
            text += "\xEF\xBF\xBD";
        }
    }
    flush();
    if (length) { *length = text.size(); }
    char* result = (char*)xrealloc(NULL, text.size() + 1);
    memcpy(result, text.c_str(), text.size() + 1);
    return result;
}

const char* tokenizer_piece(const Tokenizer* t, int id) {
    return id >= 0 && (size_t)id < t->pieces.size() ? t->pieces[(size_t)id].c_str() : "";
}
