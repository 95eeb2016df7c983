/*
Token shards, as dataset/inspect, the data loader and the evaluator's walk through documents read them.
Input: what to do with them, then the first words of a header and the tokens, or (choice RAW) the file itself.
*/
#include "fuzz.h"

#define main inspect_main
#include "../../dataset/inspect.c"
#undef main
#include "../../llmc/eval/articles.h"

enum { WORDS = 7 };
enum { RAW = 128, OWN_COUNT = 64, TWO_SHARDS = 32 };  // choices; the lowest two bits say who reads

static DataLoader loader;

static void stop_loader(void) { dataloader_stop(&loader); }

// Writes the folder's shards; the second one, if any, has half of the tokens.
static void write_shards(uint8_t choice, const uint8_t* data, size_t size) {
    static unsigned char file[SHARD_HEADER_BYTES + (1 << 16)];
    char second[256];
    snprintf(second, sizeof second, "%s/b.bin", fuzz_folder);
    unlink(second);
    if (choice & RAW) {
        fuzz_named_file("a.bin", data, size);
        return;
    }
    int32_t words[SHARD_HEADER_WORDS] = {0};
    size_t head = size < sizeof(int32_t) * WORDS ? size : sizeof(int32_t) * WORDS;
    memcpy(words, data, head);
    data += head, size -= head;
    size = size < (1 << 16) ? size : 1 << 16;
    size_t width = words[0] == SHARD_MAGIC_U32 ? 4 : 2, parts = choice & TWO_SHARDS ? 2 : 1;
    for (size_t part = 0; part < parts; part++) {
        size_t begin = size / width * part / 2 * width,
               bytes = parts == 1 || part == 1 ? size - begin : size / width / 2 * width;
        if (!(choice & OWN_COUNT)) {
            words[2] = (int32_t)(bytes / width);
            bytes = bytes / width * width;
        }
        memcpy(file, words, sizeof words);
        memcpy(file + sizeof words, data + begin, bytes);
        fuzz_named_file(part ? "b.bin" : "a.bin", file, sizeof words + bytes);
    }
}

static void inspect(const char* path) {
    const char* arguments[] = {"inspect", path, "--documents", "2", NULL};
    inspect_main(4, (char**)(uintptr_t)arguments);
}

static void load(const uint8_t* data, size_t size) {
    uint8_t shape = size > WORDS * 4 ? data[size - 1] : 0;
    DataLoaderConfig config = {.folder = fuzz_folder,
                               .B = 1 + (shape & 3),
                               .T = 1 + (shape >> 2 & 7),
                               .world = 1,
                               .accumulation = 1 + (shape >> 5 & 1),
                               .overfit_single_batch = shape >> 6 & 1};
    config.val_tokens = shape & 128 ? config.B * config.T : 0;
    dataloader_open(&loader, &config);
    for (int i = 0; i < 6; i++) {
        dataloader_next(&loader);
        dataloader_hash_batch(&loader);
    }
    if (config.val_tokens) { dataloader_val_batch(&loader, 0); }
    DataLoaderState state = {1, shape};
    dataloader_restore(&loader, state, "fuzz");
    dataloader_next(&loader);
    dataloader_close(&loader);
}

static void walk(const char* path) {
    ExpectedTokens expected = {.vocab_size = 258, .bos = -1, .eos = -1, .run = "fuzz"};
    TokenStream stream = token_stream_open(path, &expected);
    ArticleWalk walk = article_walk(&stream);
    Article a;
    size_t tokens = 0;
    while (article_next(&walk, &a)) {
        if (a.begin != tokens || a.count == 0) { abort(); }
        tokens += a.count;
    }
    if (tokens != token_stream_count(&stream)) { abort(); }
    article_walk_end(&walk);
    token_stream_close(&stream);
}

static void fuzz_one(const uint8_t* data, size_t size) {
    static char path[256];
    snprintf(path, sizeof path, "%s/a.bin", fuzz_folder);
    fuzz_cleanup = stop_loader;
    uint8_t choice = fuzz_take(&data, &size);
    write_shards(choice, data, size);
    switch (choice & 3) {
        case 0: inspect(path); break;
        case 1: load(data, size); break;
        case 2: walk(path); break;
        default: walk(fuzz_folder); break;
    }
}

static void fuzz_seeds(void) {
    for (uint8_t width = 2; width <= 4; width += 2) {
        unsigned char file[SHARD_HEADER_BYTES + 400] = {0};
        int32_t words[SHARD_HEADER_WORDS];
        ShardInfo info = {width, 100, 258, 256, 257, 0x65b1d004};
        for (uint8_t known = 0; known < 2; known++) {
            shard_header_write(words, &info);
            memcpy(file, words, sizeof words);
            for (size_t i = 0; i < 100; i++) {
                uint16_t token = i % 25 == 0 ? 256 : i % 25 == 24 ? 257 : (uint16_t)('a' + i % 25);
                memcpy(file + sizeof words + width * i, &token, 2);
            }
            for (uint8_t who = 0; who < 4; who++) {
                unsigned char compact[WORDS * 4 + 400];
                memcpy(compact, file, WORDS * 4);
                memcpy(compact + WORDS * 4, file + SHARD_HEADER_BYTES, 100u * width);
                fuzz_seed(who, compact, WORDS * 4 + 100u * width);
                fuzz_seed(who | TWO_SHARDS, compact, WORDS * 4 + 100u * width);
                fuzz_seed(who | OWN_COUNT, compact, WORDS * 4 + 100u * width);
                fuzz_seed(who | RAW, file, SHARD_HEADER_BYTES + 100u * width);
            }
            info.vocab_size = 0, info.bos = info.eos = -1, info.tokenizer_hash = 0;  // as llm.c writes
        }
    }
}
