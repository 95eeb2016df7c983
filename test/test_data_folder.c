/*
What the data loader makes of folders that hold more than a dataset, less than one, or more shards than it can map.
*/
#include <sys/resource.h>

#include "loader_util.h"

static void test_refuses_a_foreign_file(void** state) {
    (void)state;
    Folder f;
    folder_open(&f);
    folder_add(&f, 2, 100);
    char thesis[2000];
    memset(thesis, 't', sizeof thesis);
    write_file(&f, "thesis.bin", thesis, sizeof thesis);
    expect_refused(config_of(&f, 1, 4), "thesis.bin", "magic", "move it away if it is no shard");
    folder_close(&f);
}

// dataset/prepare, killed while it gave its shards their names, which it does from the last to the first.
static void test_refuses_half_a_dataset(void** state) {
    (void)state;
    static const struct {
        const char *shard, *left;
        bool refused;
    } cases[] = {
        {"x_000001.bin", "x_000000.bin.tmp", true},  {"x_000000.bin", "x_000000.bin.tmp", false},
        {"x_000000.bin", "x_000001.bin.tmp", false}, {"y_000001.bin", "x_000000.bin.tmp", false},
        {"x_000001.bin", "x_000002.bin.tmp", false},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        Folder f;
        folder_open(&f);
        uint32_t tokens[100] = {0};
        ShardInfo info = shard_info(2, 100);
        write_shard(&f, cases[c].shard, &info, tokens);
        write_file(&f, cases[c].left, tokens, 4);
        DataLoaderConfig config = config_of(&f, 1, 4);
        if (cases[c].refused) {
            expect_refused(config, cases[c].left, "interrupted", "run it again");
        } else {
            loader_close(loader_open(&config));
        }
        folder_close(&f);
    }
}

// ----------------------------------------------------------------------------
// more shards than the system maps

typedef struct {
    size_t shards, limit;
} Maps;

static void check_maps(void* argument) {
    const Maps* m = (const Maps*)argument;
    dataloader_check_maps("data/many", m->shards, m->limit);
}

static void test_too_many_shards(void** state) {
    (void)state;
    Maps many = {64000, 65530}, some = {63000, 65530}, unknown = {1000000, 0};
    const char* const words[] = {"data/many: 64000 shards", "at most 63482", "vm.max_map_count",
                                 "dataset/prepare --shard_size", NULL};
    expect_fatal(check_maps, &many, words);
    check_maps(&some);
    check_maps(&unknown);
}

#ifndef __SANITIZE_ADDRESS__  // which takes terabytes of addresses for itself
// Only 64 MB more than the process has already.
static void open_with_little_memory(void* config) {
    FILE* f = fopen("/proc/self/statm", "r");
    unsigned long pages = 0;
    if (!f || fscanf(f, "%lu", &pages) != 1) { _exit(3); }
    fclose(f);
    struct rlimit limit;
    getrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur = pages * (unsigned long)sysconf(_SC_PAGESIZE) + (64 << 20);
    setrlimit(RLIMIT_AS, &limit);
    open_loader(config);
}

static void test_little_memory(void** state) {
    (void)state;
    Folder f;
    folder_open(&f);
    int32_t header[SHARD_HEADER_WORDS];
    ShardInfo info = shard_info(2, 200 << 20);
    shard_header_write(header, &info);
    write_file(&f, "large.bin", header, sizeof header);
    char* path = text("%s/large.bin", f.path);
    assert_int_equal(truncate(path, SHARD_HEADER_BYTES + 2 * (off_t)info.token_count), 0);  // with a hole
    DataLoaderConfig config = config_of(&f, 1, 4);
    const char* const memory[] = {"large.bin: cannot be mapped into memory, with 1 shards", "ulimit -v", "--shard_size",
                                  NULL};
    expect_fatal(open_with_little_memory, &config, memory);
    free(path);
    folder_close(&f);
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refuses_a_foreign_file),
        cmocka_unit_test(test_refuses_half_a_dataset),
        cmocka_unit_test(test_too_many_shards),
#ifndef __SANITIZE_ADDRESS__
        cmocka_unit_test(test_little_memory),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
