/*
The SentencePiece models of the tests: Mistral's, and small ones made up by a test, for which this writes the protocol
buffer of sentencepiece_model.proto by hand.
*/
#ifndef MODEL_UTIL_H
#define MODEL_UTIL_H

#include "test_util.h"

// $BAMC_TOKENIZER, else data/tokenizer.model, else fetched; NULL after a message when it cannot be had.
static inline const char* mistral_path(void) {
    const char* given = getenv("BAMC_TOKENIZER");
    if (given) { return given; }
    if (file_exists("data/tokenizer.model")) { return "data/tokenizer.model"; }
    static const char fetched[] = "build/tokenizer.model";
    if (file_exists(fetched) || system("dataset/get_tokenizer.sh build/tokenizer.model >&2") == 0) { return fetched; }
    print_error("the Mistral tokenizer cannot be fetched; put it at data/tokenizer.model or set BAMC_TOKENIZER\n");
    return NULL;
}

enum { PIECE_NORMAL = 1, PIECE_UNKNOWN = 2, PIECE_CONTROL = 3, PIECE_USER_DEFINED = 4, PIECE_BYTE = 6 };
enum { MODEL_UNIGRAM = 1, MODEL_BPE = 2 };

typedef struct {
    const char* const* pieces;        // NULL-terminated; the earlier, the sooner it is merged
    const char* const* user_defined;  // NULL-terminated, or NULL
    size_t filler;                    // this many more pieces, which never match, in front of the byte pieces
    int type;
    bool byte_pieces, bos, dummy_prefix, trim;
} ModelRecipe;

typedef struct {
    unsigned char bytes[128];
    size_t size;
} ModelMessage;

static inline void model_varint(ModelMessage* m, uint64_t value) {
    for (; value >= 128; value >>= 7) { m->bytes[m->size++] = (unsigned char)(value | 128); }
    m->bytes[m->size++] = (unsigned char)value;
}

static inline void model_number(ModelMessage* m, unsigned field, uint64_t value) {
    model_varint(m, field << 3);
    model_varint(m, value);
}

static inline void model_write(FILE* f, unsigned field, const ModelMessage* m) {
    ModelMessage head = {{0}, 0};
    model_varint(&head, field << 3 | 2);
    model_varint(&head, m->size);
    fwrite(head.bytes, 1, head.size, f);
    fwrite(m->bytes, 1, m->size, f);
}

static inline void model_write_piece(FILE* f, const char* piece, float score, int type) {
    ModelMessage m = {{0}, 0};
    model_varint(&m, 1 << 3 | 2);
    model_varint(&m, strlen(piece));
    memcpy(m.bytes + m.size, piece, strlen(piece));
    m.size += strlen(piece);
    model_varint(&m, 2 << 3 | 5);
    memcpy(m.bytes + m.size, &score, 4);
    m.size += 4;
    model_number(&m, 3, (uint64_t)type);
    model_write(f, 1, &m);
}

// Ids: <unk>, <s> unless left out, </s>, user-defined, pieces, filler, bytes.
static inline void model_create(const char* path, const ModelRecipe* r) {
    FILE* f = fopen(path, "wb");
    assert_non_null(f);
    char name[32];
    model_write_piece(f, "<unk>", 0, PIECE_UNKNOWN);
    if (r->bos) { model_write_piece(f, "<s>", 0, PIECE_CONTROL); }
    model_write_piece(f, "</s>", 0, PIECE_CONTROL);
    for (size_t i = 0; r->user_defined && r->user_defined[i]; i++) {
        model_write_piece(f, r->user_defined[i], 0, PIECE_USER_DEFINED);
    }
    for (size_t i = 0; r->pieces[i]; i++) { model_write_piece(f, r->pieces[i], -1 - (float)i, PIECE_NORMAL); }
    for (size_t i = 0; i < r->filler; i++) {
        snprintf(name, sizeof name, "{%zu}", i);
        model_write_piece(f, name, -1e6f, PIECE_NORMAL);
    }
    for (unsigned i = 0; r->byte_pieces && i < 256; i++) {
        snprintf(name, sizeof name, "<0x%02X>", i);
        model_write_piece(f, name, 0, PIECE_BYTE);
    }
    ModelMessage trainer = {{0}, 0}, normalizer = {{0}, 0};
    model_number(&trainer, 3, (uint64_t)r->type);
    model_number(&trainer, 35, r->byte_pieces);
    model_write(f, 2, &trainer);
    model_number(&normalizer, 3, r->dummy_prefix);
    model_number(&normalizer, 4, r->trim);
    model_write(f, 3, &normalizer);
    assert_int_equal(fclose(f), 0);
}

#endif
