/*
Runs dataset/prepare and dataset/inspect, the real programs, and reads back what they wrote. BAMC_PREPARE and
BAMC_INSPECT name other builds of them.
*/
#ifndef PREPARE_UTIL_H
#define PREPARE_UTIL_H

#include <dirent.h>
#include <signal.h>

#include "../llmc/shard.h"
#include "../llmc/tokenizer.h"
#include "model_util.h"

static char scratch[64];  // of this process; holds everything that a test writes

typedef struct {
    char* bytes;
    size_t size;
} Bytes;

static inline Bytes read_bytes(const char* path) {
    FILE* f = fopen(path, "rb");
    if (!f) { fail_msg("%s: %s", path, strerror(errno)); }
    Bytes b = {NULL, 0};
    size_t n;
    do {
        b.bytes = (char*)xrealloc(b.bytes, b.size + 65537);
        n = fread(b.bytes + b.size, 1, 65536, f);
        b.size += n;
    } while (n > 0);
    fclose(f);
    b.bytes[b.size] = '\0';
    return b;
}

// Writes scratch/name and returns its path, which free() releases.
static inline char* write_bytes(const char* name, const char* bytes, size_t size) {
    char* path = text("%s/%s", scratch, name);
    FILE* f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, size, f), size);
    assert_int_equal(fclose(f), 0);
    return path;
}

static inline const char* program(const char* name) {
    const char* given = getenv(strcmp(name, "prepare") == 0 ? "BAMC_PREPARE" : "BAMC_INSPECT");
    return given ? given : strcmp(name, "prepare") == 0 ? "dataset/prepare" : "dataset/inspect";
}

static Bytes output, errors;  // of the last run()

// Runs the program by the shell; the exit status, 128 + signal when killed.
__attribute__((format(printf, 2, 3))) static inline int run(const char* name, const char* format, ...) {
    char arguments[4096];
    va_list list;
    va_start(list, format);
    vsnprintf(arguments, sizeof arguments, format, list);
    va_end(list);
    char* command = text("%s %s >%s/out 2>%s/err", program(name), arguments, scratch, scratch);
    int status = system(command);
    free(command);
    free(output.bytes);
    free(errors.bytes);
    char *out = text("%s/out", scratch), *err = text("%s/err", scratch);
    output = read_bytes(out);
    errors = read_bytes(err);
    free(out);
    free(err);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static inline void assert_contains(const Bytes* b, const char* words) {
    if (!strstr(b->bytes, words)) { fail_msg("expected '%s' in: %s", words, b->bytes); }
}

static inline void assert_succeeded(int status) {
    if (status != 0) { fail_msg("exit status %d: %s", status, errors.bytes); }
}

// Exit status 1 after exactly one line "error: ..." that holds the words.
static inline void assert_refused(int status, const char* words) {
    char* newline = strchr(errors.bytes, '\n');
    if (status != 1 || strncmp(errors.bytes, "error: ", 7) != 0 || !newline || newline[1] != '\0') {
        fail_msg("expected status 1 and one error line, got %d: %s", status, errors.bytes);
    }
    assert_contains(&errors, words);
}

// How many entries of scratch/folder end in suffix; -1 when there is no such folder.
static inline int count_files(const char* folder, const char* suffix) {
    char* path = text("%s/%s", scratch, folder);
    DIR* directory = opendir(path);
    free(path);
    if (!directory) { return -1; }
    int count = 0;
    size_t n = strlen(suffix);
    for (struct dirent* e; (e = readdir(directory));) {
        size_t m = strlen(e->d_name);
        count += e->d_name[0] != '.' && m >= n && strcmp(e->d_name + m - n, suffix) == 0;
    }
    closedir(directory);
    return count;
}

// All tokens of scratch/folder in order; every shard but the last must have shard_size tokens, the last at least one.
static inline TokenList read_shards(const char* folder, size_t shard_size, ShardInfo* info) {
    TokenList all = {0};
    int shards = count_files(folder, ".bin");
    assert_int_equal(count_files(folder, ""), shards);
    assert_true(shards > 0);
    for (int i = 0; i < shards; i++) {
        char* path = text("%s/%s/%s_%06d.bin", scratch, folder, folder, i);
        Bytes b = read_bytes(path);
        *info = shard_header_read(path, (const int32_t*)(const void*)b.bytes, b.size);
        if (i < shards - 1) { assert_int_equal(info->token_count, shard_size); }
        assert_in_range(info->token_count, 1, shard_size);
        for (size_t k = 0; k < info->token_count; k++) {
            const char* at = b.bytes + SHARD_HEADER_BYTES + k * info->token_bytes;
            uint32_t id = 0;  // the low bytes: the machine is little endian, like the file
            memcpy(&id, at, info->token_bytes);
            token_list_append(&all, (const int[]){(int)id}, 1);
        }
        free(b.bytes);
        free(path);
    }
    return all;
}

// The text of the documents, each with '|' behind it; checks that every document is BOS ... EOS.
static inline Bytes decode_documents(const TokenList* ids, const Tokenizer* t) {
    Bytes all = {(char*)xcalloc(1, 1), 0};
    for (size_t i = 0; i < ids->count;) {
        size_t start = i + 1, n;
        assert_int_equal(ids->ids[i], tokenizer_bos(t));
        while (++i < ids->count && ids->ids[i] != tokenizer_eos(t)) {
            assert_int_not_equal(ids->ids[i], tokenizer_bos(t));
        }
        assert_true(i < ids->count);
        char* s = tokenizer_decode(t, ids->ids + start, i++ - start, &n);
        all.bytes = (char*)xrealloc(all.bytes, all.size + n + 2);
        memcpy(all.bytes + all.size, s, n);
        memcpy(all.bytes + all.size + n, "|", 2);
        all.size += n + 1;
        free(s);
    }
    return all;
}

static inline void remove_scratch(const char* name) {
    char* command = text("rm -rf %s/%s", scratch, name);
    assert_int_equal(system(command), 0);
    free(command);
}

#endif
