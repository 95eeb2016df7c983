/*
dataset/inspect as a program: what it says of shards of dataset/prepare and of others, and what it refuses.
*/
#include "prepare_util.h"

#define BYTES(s) s, sizeof(s) - 1

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

// A shard of uint16 tokens with this header; returns its path.
static char* write_shard(const char* name, ShardInfo info, const uint16_t* tokens, size_t n) {
    int32_t header[SHARD_HEADER_WORDS];
    info.token_count = n;
    shard_header_write(header, &info);
    char* bytes = (char*)xcalloc(SHARD_HEADER_BYTES + 2 * n, 1);
    memcpy(bytes, header, SHARD_HEADER_BYTES);
    memcpy(bytes + SHARD_HEADER_BYTES, tokens, 2 * n);
    char* path = write_bytes(name, bytes, SHARD_HEADER_BYTES + 2 * n);
    free(bytes);
    return path;
}

static void test_inspect(void** state) {
    (void)state;
    char* path = write_bytes("i.txt", BYTES("first one\n\nx\n\nlast \x1B[2J"));
    assert_succeeded(run("prepare", "%s --tokenizer bytes --out %s/i --shard_size 16", path, scratch));
    free(path);
    assert_succeeded(run("inspect", "%s/i/i_000000.bin --documents 2", scratch));
    assert_contains(&output, "format       uint16, magic 20240520, version 1\n");
    assert_contains(&output, "tokens       16\nvocabulary   258\nBOS          256\nEOS          257\n");
    assert_contains(&output, "tokenizer    65b1d004\n");
    assert_contains(&output, "documents    3\nlengths      min 2, mean 5.3, max 11 tokens");
    assert_contains(&output, "the last document goes on in the next shard");
    assert_null(strstr(output.bytes, "begins in the shard before"));
    assert_contains(&output, "--- document 0, 11 tokens\nfirst one\n\n--- document 1, 3 tokens\nx\n");
    assert_null(strstr(output.bytes, "--- document 2"));
    assert_succeeded(run("inspect", "--documents=1 %s/i/i_000001.bin", scratch));
    assert_contains(&output, "the first document begins in the shard before");
    assert_contains(&output, "ast \\x1b[2J\n");  // no control characters to the terminal
    remove_scratch("i");
}

static void test_inspect_others(void** state) {
    (void)state;
    static const uint16_t tokens[] = {50256, 464, 3290, 50256, 65535};
    ShardInfo unknown = {2, 0, 0, -1, -1, 0}, small = {2, 0, 300, 1, 2, 77};
    char* llmc = write_shard("llmc.bin", unknown, tokens, 5);
    assert_succeeded(run("inspect", "%s", llmc));
    assert_contains(&output, "tokens       5\nvocabulary   unknown\nBOS          unknown\nEOS          unknown\n");
    assert_contains(&output, "documents    unknown\n");
    assert_contains(&output, "the header names no tokenizer");
    assert_contains(&output, "50256 464 3290 50256 65535\n");
    char* above = write_shard("above.bin", small, tokens + 1, 2);
    assert_refused(run("inspect", "%s", above), "above.bin: token 0 is 464, expected below the vocabulary size 300");
    static const uint16_t valid[] = {1, 5, 2};
    char* mismatch = write_shard("mismatch.bin", small, valid, 3);
    assert_succeeded(run("inspect", "%s --tokenizer bytes", mismatch));
    assert_contains(&output, "made with tokenizer 0000004d and bytes is 65b1d004");
    assert_contains(&output, "--- document 0, 3 tokens\n1 5 2\n");
    assert_int_equal(truncate(mismatch, SHARD_HEADER_BYTES + 5), 0);
    assert_refused(run("inspect", "%s", mismatch), "cut short or damaged");
    assert_refused(run("inspect", "%s/none.bin", scratch), "none.bin: No such file");
    assert_refused(run("inspect", "--documents 1"), "no shard");
    char* pipe_name = text("%s/pipe.bin", scratch);
    assert_int_equal(mkfifo(pipe_name, 0600), 0);
    assert_refused(run("inspect", "%s", pipe_name), "pipe.bin: no regular file");
    free(pipe_name);
    free(llmc);
    free(above);
    free(mismatch);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_inspect),
        cmocka_unit_test(test_inspect_others),
    };
    return cmocka_run_group_tests(tests, make_scratch, drop_scratch);
}
