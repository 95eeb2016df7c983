/*
Token shards: llm.c's file format, read and written by everything that touches tokens.

  256 int32 header, then the tokens, little endian
  word 0  magic:   20240520 with uint16 tokens (version 1), 20240801 with uint32 tokens (version 7)
  word 1  version
  word 2  number of tokens
  word 3  vocabulary size  } ours; llm.c writes 0 here, which means unknown
  word 4  BOS id + 1       }   (+ 1 so that 0 means unknown)
  word 5  EOS id + 1       }
  word 6  tokenizer hash   }   (0 = unknown)

A shard is a stream of documents, each BOS ... EOS.
*/
#ifndef SHARD_H
#define SHARD_H

#include "util.h"

enum { SHARD_HEADER_WORDS = 256, SHARD_HEADER_BYTES = 1024 };
enum { SHARD_MAGIC_U16 = 20240520, SHARD_VERSION_U16 = 1, SHARD_MAGIC_U32 = 20240801, SHARD_VERSION_U32 = 7 };

typedef struct {
    size_t token_bytes;  // 2 or 4
    size_t token_count;
    size_t vocab_size;        // 0 = unknown
    int bos, eos;             // -1 = unknown
    uint32_t tokenizer_hash;  // 0 = unknown
} ShardInfo;

// Fills the header's words from info.
static inline void shard_header_write(int32_t words[SHARD_HEADER_WORDS], const ShardInfo* info) {
    bool wide = info->token_bytes == 4;
    memset(words, 0, SHARD_HEADER_BYTES);
    words[0] = wide ? SHARD_MAGIC_U32 : SHARD_MAGIC_U16;
    words[1] = wide ? SHARD_VERSION_U32 : SHARD_VERSION_U16;
    words[2] = (int32_t)info->token_count;
    words[3] = (int32_t)info->vocab_size;
    words[4] = info->bos + 1;
    words[5] = info->eos + 1;
    words[6] = (int32_t)info->tokenizer_hash;
}

// Reads and checks a header against the file's size; path is for the message. Ends the program on
// anything that is not a whole, valid shard.
static inline ShardInfo shard_header_read(const char* path, const int32_t words[SHARD_HEADER_WORDS],
                                          size_t file_bytes) {
    const char* make = "write it again with dataset/prepare";
    if (file_bytes < SHARD_HEADER_BYTES) {
        fatal("%s: %zu bytes, expected a token shard with a %d-byte header; %s", path, file_bytes, SHARD_HEADER_BYTES,
              make);
    }
    bool narrow = words[0] == SHARD_MAGIC_U16, wide = words[0] == SHARD_MAGIC_U32;
    if (!narrow && !wide) {
        fatal("%s: magic %d, expected %d (uint16 tokens) or %d (uint32 tokens); %s, or move it away if it is no shard",
              path, words[0], SHARD_MAGIC_U16, SHARD_MAGIC_U32, make);
    }
    int version = narrow ? SHARD_VERSION_U16 : SHARD_VERSION_U32;
    if (words[1] != version) {
        fatal("%s: version %d, expected %d for magic %d; %s", path, words[1], version, words[0], make);
    }
    if (words[4] < 0 || words[5] < 0) {
        fatal("%s: BOS %lld and EOS %lld, expected ids, or -1 for none; %s", path, words[4] - 1LL, words[5] - 1LL,
              make);
    }
    ShardInfo info = {narrow ? 2u : 4u, (size_t)(uint32_t)words[2], (size_t)(uint32_t)words[3], words[4] - 1,
                      words[5] - 1,     (uint32_t)words[6]};
    if (file_bytes != SHARD_HEADER_BYTES + info.token_count * info.token_bytes) {
        fatal("%s: %zu bytes, expected %zu (header + %zu tokens of %zu bytes): the file is cut short or damaged; %s",
              path, file_bytes, SHARD_HEADER_BYTES + info.token_count * info.token_bytes, info.token_count,
              info.token_bytes, make);
    }
    return info;
}

#endif
