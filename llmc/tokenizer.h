/*
Text to token ids and back: SentencePiece models, and the built-in tokenizer "bytes".

"bytes" needs no file: ids 0..255 are the bytes, 256 is BOS, 257 is EOS. Without the SentencePiece library it is the
only one. Encoding adds no BOS and no EOS and treats every text, special-looking or not, as plain text; a SentencePiece
model adds its dummy prefix, so pieces that are encoded one by one each start with a space piece, as in the Hugging Face
tokenizer of Mistral-7B in legacy mode. An open tokenizer is read only: any number of threads may use it at once.
*/
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include "util.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Tokenizer Tokenizer;

// A growable list of ids; start with {0}, release with free(list.ids).
typedef struct {
    int* ids;
    size_t count, capacity;
} TokenList;

// source: "bytes", or the path of a SentencePiece model. Ends the program when it cannot be used, which includes a
// model without BOS or EOS, since documents need both.
Tokenizer* tokenizer_open(const char* source);
void tokenizer_close(Tokenizer* t);

const char* tokenizer_name(const Tokenizer* t);  // the source it was opened with
size_t tokenizer_vocab_size(const Tokenizer* t);
int tokenizer_bos(const Tokenizer* t);
int tokenizer_eos(const Tokenizer* t);
uint32_t tokenizer_hash(const Tokenizer* t);  // FNV-1a of the model file, never 0: tells one tokenizer from another

// Appends the ids of text[length] (any bytes; SentencePiece reads invalid UTF-8 as U+FFFD) to out. The result is
// exactly that of SentencePiece on the whole text; models that allow it are encoded word by word through a cache.
void tokenizer_encode(const Tokenizer* t, const char* text, size_t length, TokenList* out);

// The same ids by one call of the library on the whole text: slow, and memory grows with the text. What tests compare
// tokenizer_encode() with.
void tokenizer_encode_whole(const Tokenizer* t, const char* text, size_t length, TokenList* out);

// Whether tokenizer_encode() may go word by word.
bool tokenizer_is_by_word(const Tokenizer* t);

// The text of ids[n], a new NUL-terminated string (free it); *length, unless NULL, receives its size, as text may hold
// NUL. BOS, EOS and other control ids print as nothing; ids outside the vocabulary print as U+FFFD. The first piece
// loses the dummy prefix, so decode(encode(text)) is the text.
char* tokenizer_decode(const Tokenizer* t, const int* ids, size_t n, size_t* length);

// One id in the vocabulary's own spelling ("▁the", "<0x0A>", "<s>"), "" outside it; lives as long as the tokenizer.
const char* tokenizer_piece(const Tokenizer* t, int id);

static inline void token_list_reserve(TokenList* list, size_t more) {
    if (list->count + more <= list->capacity) { return; }
    list->capacity = 2 * list->capacity + more;
    list->ids = (int*)xrealloc(list->ids, list->capacity * sizeof(int));
}

static inline void token_list_append(TokenList* list, const int* ids, size_t n) {
    token_list_reserve(list, n);
    for (size_t i = 0; i < n; i++) { list->ids[list->count + i] = ids[i]; }
    list->count += n;
}

#ifdef __cplusplus
}
#endif

#endif
