/*
The data loader: every token once an epoch, ranks that partition a step, exact restore, refusals.
*/
#include "loader_util.h"

static void assert_batch_at(const DataLoader* dl, size_t position, size_t n) {
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(dl->inputs[i], position + i);
        assert_int_equal(dl->targets[i], position + i + 1);
    }
}

// ----------------------------------------------------------------------------
// coverage

typedef struct {
    size_t width, B, T;
    size_t shards[12];  // sizes, ended by SIZE_MAX
} Layout;

static const Layout layouts[] = {
    {2, 1, 1, {5, SIZE_MAX}},
    {4, 1, 1, {2, SIZE_MAX}},
    {2, 2, 8, {100, SIZE_MAX}},
    {4, 2, 8, {100, SIZE_MAX}},
    {2, 2, 8, {16, 16, 16, 1, SIZE_MAX}},            // boundaries on batches, the last target alone in a shard
    {4, 2, 8, {17, 16, 16, SIZE_MAX}},               // the last shard is one batch
    {2, 2, 8, {1, 1, 1, 30, 1, 1, 2, 3, SIZE_MAX}},  // shards smaller than a batch
    {4, 3, 5, {0, 4, 0, 0, 9, 40, 0, SIZE_MAX}},     // empty shards
    {2, 1, 7, {13, 29, 8, 31, 64, 3, SIZE_MAX}},     // T divides nothing
    {2, 4, 512, {30000, 9999, 20000, SIZE_MAX}},
};

static void folder_of_layout(Folder* f, const Layout* layout) {
    folder_open(f);
    for (const size_t* n = layout->shards; *n != SIZE_MAX; n++) { folder_add(f, layout->width, *n); }
}

static void test_every_token_once_an_epoch(void** state) {
    (void)state;
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        Folder f;
        folder_of_layout(&f, &layouts[l]);
        DataLoaderConfig config = config_of(&f, layouts[l].B, layouts[l].T);
        DataLoader* dl = loader_open(&config);
        size_t S = config.B * config.T, steps = (f.tokens - 1) / S;
        DataLoaderTokens tokens = dataloader_tokens(dl);
        assert_int_equal(tokens.total, f.tokens);
        assert_int_equal(tokens.training, f.tokens);
        assert_int_equal(tokens.shards, f.shards);
        assert_int_equal(tokens.per_step, S);
        assert_int_equal(tokens.steps_per_epoch, steps);
        assert_int_equal(tokens.dropped_per_epoch, f.tokens - 1 - steps * S);
        unsigned char* served = xcalloc(f.tokens, 1);
        for (size_t epoch = 0; epoch < 3; epoch++) {
            for (size_t step = 0; step < steps; step++) {
                dataloader_next(dl);
                for (size_t i = 0; i < S; i++) {
                    assert_in_range(dl->inputs[i], 0, f.tokens - 2);
                    assert_int_equal(dl->targets[i], dl->inputs[i] + 1);
                    served[dl->inputs[i]]++;
                }
                bool wrapped = epoch > 0 && step == 0;
                assert_int_equal(dl->wrapped, wrapped);
                assert_int_equal(dl->dropped, wrapped ? f.tokens - 1 - steps * S : 0);
                assert_int_equal(dataloader_state(dl).epoch, epoch);
                assert_int_equal(dataloader_state(dl).position, (step + 1) * S);
            }
            for (size_t i = 0; i < f.tokens; i++) { assert_int_equal(served[i], i < steps * S ? epoch + 1 : 0); }
        }
        free(served);
        loader_close(dl);
        folder_close(&f);
    }
}

static void test_exact_multiple_plus_one(void** state) {
    (void)state;
    enum { S = 24, STEPS = 5 };
    for (size_t extra = 0; extra <= S + 1; extra++) {
        Folder f;
        folder_open(&f);
        folder_add(&f, 2, 2 * S);
        folder_add(&f, 2, STEPS * S + extra - 2 * S);
        DataLoaderConfig config = config_of(&f, 2, 4);
        config.accumulation = 3;
        DataLoader* dl = loader_open(&config);
        size_t steps = extra == 0 ? STEPS - 1 : extra <= S ? STEPS : STEPS + 1, micro = 0;
        do { dataloader_next(dl); } while (++micro < 1000 && !dl->wrapped);
        assert_int_equal(micro - 1, 3 * steps);
        assert_int_equal(dl->dropped, STEPS * S + extra - 1 - steps * S);
        assert_batch_at(dl, 0, 8);
        loader_close(dl);
        folder_close(&f);
    }
}

static void test_ranks_partition_a_step(void** state) {
    (void)state;
    enum { PARTS = 12, BT = 10, S = PARTS * BT };
    Folder f;
    folder_open(&f);
    for (size_t n = 1; n < 50; n++) { folder_add(&f, 4, n % 7 * 2 + 1); }
    for (size_t world = 1; world <= 4; world++) {
        for (size_t rank = 0; rank < world; rank++) {
            DataLoaderConfig config = config_of(&f, 2, 5);
            config.rank = rank;
            config.world = world;
            config.accumulation = PARTS / world;
            DataLoader* dl = loader_open(&config);
            size_t steps = dataloader_tokens(dl).steps_per_epoch;
            assert_int_equal(steps, (f.tokens - 1) / S);
            for (size_t step = 0; step < 2 * steps; step++) {
                for (size_t m = 0; m < config.accumulation; m++) {
                    dataloader_next(dl);
                    // part m * world + rank of a step: each of the 12 parts has one owner
                    assert_batch_at(dl, step % steps * S + (m * world + rank) * BT, BT);
                    assert_int_equal(dl->wrapped, step == steps && m == 0);
                    assert_int_equal(dl->mid_step, m + 1 < config.accumulation);
                }
                assert_int_equal(dataloader_state(dl).position, (step % steps + 1) * S);
            }
            loader_close(dl);
        }
    }
    folder_close(&f);
}

static void test_shards_in_byte_order(void** state) {
    (void)state;
    // written in another order than that of their names; other files are not shards
    const char* const names[] = {"b.bin", "Z.bin", "a10.bin", "a9.bin", "\xc3\xa9.bin"};
    const uint32_t first[] = {30, 0, 10, 20, 40};
    Folder f;
    folder_open(&f);
    for (size_t i = 0; i < 5; i++) {
        uint32_t tokens[10];
        for (uint32_t t = 0; t < 10; t++) { tokens[t] = first[i] + t; }
        ShardInfo info = shard_info(2, 10);
        write_shard(&f, names[i], &info, tokens);
    }
    write_file(&f, "README.txt", "text", 4);
    write_file(&f, ".hidden.bin", "text", 4);
    write_file(&f, "a.bin.tmp", "text", 4);
    DataLoaderConfig config = config_of(&f, 1, 49);
    DataLoader* dl = loader_open(&config);
    assert_int_equal(dataloader_tokens(dl).shards, 5);
    dataloader_next(dl);
    assert_batch_at(dl, 0, 49);
    loader_close(dl);
    folder_close(&f);
}

// ----------------------------------------------------------------------------
// restore

static void test_restore_at_every_step(void** state) {
    (void)state;
    enum { STEPS = 24, ACCUMULATION = 3, S = 2 * 2 * 4 * ACCUMULATION };
    // 48 tokens a step: shards end on a step, inside one and one past one; six steps an epoch
    Folder f;
    folder_open(&f);
    const size_t sizes[] = {S, S, 5, S - 5, 1, S, S + 60};
    for (size_t i = 0; i < 7; i++) { folder_add(&f, 2, sizes[i]); }
    for (size_t rank = 0; rank < 2; rank++) {
        DataLoaderConfig config = config_of(&f, 2, 4);
        config.rank = rank;
        config.world = 2;
        config.accumulation = ACCUMULATION;
        DataLoader* dl = loader_open(&config);
        DataLoaderState states[STEPS];
        uint64_t hashes[STEPS][ACCUMULATION];
        bool wrapped[STEPS];
        for (size_t step = 0; step < STEPS; step++) {
            states[step] = dataloader_state(dl);
            for (size_t m = 0; m < ACCUMULATION; m++) {
                dataloader_next(dl);
                hashes[step][m] = dataloader_hash_batch(dl);
                if (m == 0) { wrapped[step] = dl->wrapped; }
            }
        }
        assert_int_equal(states[STEPS - 1].epoch, (STEPS - 2) / 6);
        for (size_t from = 0; from < STEPS; from++) {
            // in a new process, and back and forth in the same one, after an odd number of batches
            DataLoader* other = loader_open(&config);
            dataloader_restore(other, states[from], "args.json");
            dataloader_restore(dl, states[from], "args.json");
            for (size_t step = from; step < STEPS; step++) {
                for (size_t m = 0; m < ACCUMULATION; m++) {
                    dataloader_next(other);
                    assert_true(dataloader_hash_batch(other) == hashes[step][m]);
                    assert_int_equal(other->wrapped, m == 0 && wrapped[step]);
                    if (step > from + 1 && m > 0) { continue; }
                    dataloader_next(dl);
                    if (step <= from + 1) { assert_true(dataloader_hash_batch(dl) == hashes[step][m]); }
                }
            }
            loader_close(other);
        }
        loader_close(dl);
    }
    folder_close(&f);
}

static void test_restore_with_another_step_size(void** state) {
    (void)state;
    Folder f;
    folder_open(&f);
    folder_add(&f, 4, 33);
    folder_add(&f, 4, 68);
    DataLoaderConfig config = config_of(&f, 2, 5);
    DataLoader* dl = loader_open(&config);
    for (size_t i = 0; i < 9; i++) { dataloader_next(dl); }
    DataLoaderState place = dataloader_state(dl);
    assert_int_equal(place.position, 90);
    loader_close(dl);

    config.B = 1;
    config.T = 3;
    dl = loader_open(&config);
    dataloader_restore(dl, place, "args.json");
    for (size_t i = 0; i < 3; i++) {
        dataloader_next(dl);
        assert_batch_at(dl, 90 + 3 * i, 3);
        assert_false(dl->wrapped);
    }
    dataloader_next(dl);  // 99 + 3 + 1 > 101
    assert_batch_at(dl, 0, 3);
    assert_true(dl->wrapped);
    assert_int_equal(dl->dropped, 1);
    loader_close(dl);

    config.T = 50;
    dl = loader_open(&config);
    dataloader_restore(dl, place, "args.json");
    dataloader_next(dl);
    assert_batch_at(dl, 0, 50);
    assert_int_equal(dl->dropped, 10);
    assert_int_equal(dataloader_state(dl).epoch, 1);
    loader_close(dl);
    folder_close(&f);
}

// ----------------------------------------------------------------------------
// validation, overfitting, hash, vocabulary

static void test_validation_slice_and_padding(void** state) {
    (void)state;
    Folder f;
    folder_open(&f);
    for (size_t i = 0; i < 20; i++) { folder_add(&f, 2, 3 + i % 5); }
    const size_t paddings[] = {0, 1, 13};
    for (size_t p = 0; p < 3; p++) {
        for (size_t world = 1; world <= 3; world++) {
            for (size_t rank = 0; rank < world; rank++) {
                DataLoaderConfig config = config_of(&f, 1, 4);
                config.world = world;
                config.rank = rank;
                config.val_tokens = 48;
                config.val_padding = paddings[p];
                DataLoader* dl = loader_open(&config);
                assert_int_equal(dataloader_val_batches(dl), 12 / world);
                size_t begin = 48 + paddings[p];
                assert_int_equal(dataloader_state(dl).position, begin);
                assert_int_equal(dataloader_tokens(dl).padding, paddings[p]);
                assert_int_equal(dataloader_tokens(dl).training, f.tokens - begin);
                size_t steps = dataloader_tokens(dl).steps_per_epoch;
                assert_int_equal(steps, (f.tokens - begin - 1) / (4 * world));
                for (size_t step = 0; step < 2 * steps; step++) {  // validation in between moves nothing
                    dataloader_next(dl);
                    assert_batch_at(dl, begin + (step % steps * world + rank) * 4, 4);
                    for (size_t i = 0; i < dataloader_val_batches(dl); i++) {
                        dataloader_val_batch(dl, i);
                        assert_batch_at(dl, (i * world + rank) * 4, 4);
                    }
                }
                loader_close(dl);
            }
        }
    }
    DataLoaderConfig config = config_of(&f, 1, 4);  // without validation nothing is skipped
    config.val_padding = 1000000;
    DataLoader* dl = loader_open(&config);
    assert_int_equal(dataloader_val_batches(dl), 0);
    dataloader_next(dl);
    assert_batch_at(dl, 0, 4);
    loader_close(dl);
    folder_close(&f);
}

static void test_overfit_repeats_the_first_step(void** state) {
    (void)state;
    Folder f;
    folder_open(&f);
    folder_add(&f, 2, 200);
    DataLoaderConfig config = config_of(&f, 1, 8);
    config.world = 2;
    config.rank = 1;
    config.accumulation = 2;
    config.val_tokens = 16;
    config.val_padding = 4;
    config.overfit_single_batch = true;
    DataLoader* dl = loader_open(&config);
    for (size_t step = 0; step < 20; step++) {
        for (size_t m = 0; m < 2; m++) {
            dataloader_next(dl);
            assert_batch_at(dl, 20 + (2 * m + 1) * 8, 8);
            assert_false(dl->wrapped);
        }
        if (step == 10) { dataloader_restore(dl, (DataLoaderState){1, 100}, "args.json"); }
    }
    loader_close(dl);
    folder_close(&f);
}

static void test_hash_is_fnv1a(void** state) {
    (void)state;
    int32_t tokens[3] = {1, 300, 70000};
    DataLoader dl;
    memset(&dl, 0, sizeof dl);
    dl.inputs = tokens;
    dl.batch_tokens = 2;
    assert_true(dataloader_hash_batch(&dl) == 0x301fdb20d7025d81ull);
}

static void test_vocabulary(void** state) {
    (void)state;
    const struct {
        size_t width, vocab, override;
        int bos, eos;
        size_t want_vocab;
        int want_bos, want_eos;
    } cases[] = {
        {2, 0, 0, -1, -1, 50257, 50256, -1},     {4, 0, 0, -1, -1, 128256, 128000, 128001},
        {2, 32768, 0, 1, 2, 32768, 1, 2},        {4, 200000, 0, -1, 5, 200000, -1, 5},
        {2, 0, 50304, -1, -1, 50304, 50256, -1}, {2, 32768, 40000, 1, 2, 40000, 1, 2},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        Folder f;
        folder_open(&f);
        uint32_t tokens[4] = {0, 1, 2, 3};
        ShardInfo info = {cases[c].width, 4, cases[c].vocab, cases[c].bos, cases[c].eos, 9};
        write_shard(&f, "a.bin", &info, tokens);
        DataLoaderConfig config = config_of(&f, 1, 2);
        config.vocab_size = cases[c].override;
        DataLoader* dl = loader_open(&config);
        assert_int_equal(dl->vocab_size, cases[c].want_vocab);
        assert_int_equal(dl->bos, cases[c].want_bos);
        assert_int_equal(dl->eos, cases[c].want_eos);
        assert_int_equal(dl->tokenizer_hash, 9);
        loader_close(dl);
        folder_close(&f);
    }
}

// ----------------------------------------------------------------------------
// refusals

static void test_refuses_bad_folders(void** state) {
    (void)state;
    Folder f;
    folder_open(&f);
    DataLoaderConfig config = config_of(&f, 1, 4);
    expect_refused(config, f.path, "no *.bin", "dataset/prepare");
    config.folder = "/tmp/bamc_no_such_folder";
    expect_refused(config, config.folder, "No such file", "dataset/prepare");
    config.folder = "/dev/null";
    expect_refused(config, config.folder, "Not a directory", "dataset/prepare");
    char* path = text("%s/folder.bin", f.path);
    make_directories(path);
    expect_refused(config_of(&f, 1, 4), "folder.bin", "not a file", "move it elsewhere");
    assert_int_equal(rmdir(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    expect_refused(config_of(&f, 1, 4), "folder.bin", "not a file", "move it elsewhere");
    free(path);
    folder_close(&f);
}

static void test_refuses_damaged_shards(void** state) {
    (void)state;
    const struct {
        size_t bytes;  // of a shard of 5000 tokens: 11024
        int word, value;
        const char *found, *expected;
    } cases[] = {
        {11024, 0, 20240521, "magic 20240521", "20240520"},
        {11024, 0, SHARD_MAGIC_U32, "version 1", "expected 7"},
        {11024, 1, 2, "version 2", "expected 1"},
        {11024, 2, -1, "11024 bytes", "4294967295 tokens"},
        {11024, 3, -1, "vocabulary of 4294967295", "2147483647"},
        {11024, 4, 60001, "BOS 60000", "60000"},
        {11024, 4, INT32_MIN, "BOS -2147483649", "-1 for none"},
        {11024, 5, -5, "EOS -6", "-1 for none"},
        {0, -1, 0, "0 bytes", "1024-byte header"},
        {3, -1, 0, "3 bytes", "1024-byte header"},
        {1023, -1, 0, "1023 bytes", "1024-byte header"},
        {11023, -1, 0, "11023 bytes", "11024"},
        {11024 - 4096, -1, 0, "6928 bytes", "11024"},
        {11025, -1, 0, "11025 bytes", "11024"},
        {11026, -1, 0, "11026 bytes", "11024"},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        Folder f;
        folder_open(&f);
        uint32_t tokens[5000] = {0};
        ShardInfo info = shard_info(2, 5000);
        write_damaged(&f, "odd.bin", &info, tokens, cases[c].word, cases[c].value, cases[c].bytes);
        expect_refused(config_of(&f, 1, 4), "odd.bin", cases[c].found, cases[c].expected);
        folder_close(&f);
    }
}

static void test_refuses_mixed_shards(void** state) {
    (void)state;
    const struct {
        ShardInfo second;
        const char *found, *expected;
    } cases[] = {
        {{4, 10, VOCAB_U16, 1, 2, 77}, "bytes per token: 4", "expected 2"},
        {{2, 10, 50257, 1, 2, 77}, "vocabulary 50257", "expected 60000"},
        {{2, 10, 0, 1, 2, 77}, "vocabulary 0", "expected 60000"},
        {{2, 10, VOCAB_U16, 3, 2, 77}, "BOS 3", "expected 1"},
        {{2, 10, VOCAB_U16, 1, -1, 77}, "EOS -1", "expected 2"},
        {{2, 10, VOCAB_U16, 1, 2, 0xFFFFFFFFu}, "tokenizer hash 4294967295", "expected 77"},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        Folder f;
        folder_open(&f);
        folder_add(&f, 2, 10);
        uint32_t tokens[10] = {0};
        write_shard(&f, "part_0001.bin", &cases[c].second, tokens);
        expect_refused(config_of(&f, 1, 4), "part_0001.bin", cases[c].found, cases[c].expected);
        folder_close(&f);
    }
}

static void test_refuses_impossible_sizes(void** state) {
    (void)state;
    const size_t huge = SIZE_MAX / 8;
    const struct {
        size_t B, T, world, accumulation, val_tokens, val_padding;
        const char* message;  // NULL = fits in 100 tokens
    } cases[] = {
        {0, 4, 1, 1, 0, 0, "batches of 0 x 4 tokens"},
        {4, 0, 1, 1, 0, 0, "batches of 4 x 0 tokens"},
        {4, 4, 0, 1, 0, 0, "0 ranks"},
        {4, 4, 1, 0, 0, 0, "0 micro-batches"},
        {3, 33, 1, 1, 0, 0, NULL},
        {4, 25, 1, 1, 0, 0, "100 tokens in 1 shards, expected at least 101"},
        {1, 5, 4, 5, 0, 0, "a step of 100 + 1"},
        {1, 9, 1, 1, 45, 45, NULL},
        {1, 9, 1, 1, 45, 46, "expected at least 101 (val_tokens 45 + val_tokens_padding 46 + a step of 9 + 1)"},
        {1, 9, 1, 1, 99, 0, "expected at least 109"},
        {1, 9, 1, 1, 9, SIZE_MAX - 3, "expected at least 18446744073709551615"},
        {huge, 8, 1, 1, 0, 0, "lower --batch_size"},
        {huge / 4, 1, 1, 1, 0, 0, "100 tokens in 1 shards"},
        {1 << 20, 1 << 20, 1 << 10, 1 << 14, 0, 0, "lower --batch_size"},
    };
    Folder f;
    folder_open(&f);
    folder_add(&f, 2, 100);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        DataLoaderConfig config = {f.path,
                                   cases[c].B,
                                   cases[c].T,
                                   0,
                                   cases[c].world,
                                   cases[c].accumulation,
                                   cases[c].val_tokens,
                                   cases[c].val_padding,
                                   0,
                                   false};
        if (cases[c].message) {
            expect_refused(config, cases[c].message, "expected", "");
            continue;
        }
        DataLoader* dl = loader_open(&config);
        assert_int_equal(dataloader_tokens(dl).steps_per_epoch, 1);
        assert_int_equal(dataloader_tokens(dl).dropped_per_epoch, 0);
        loader_close(dl);
    }
    folder_close(&f);
}

typedef struct {
    DataLoaderConfig config;
    DataLoaderState place;
    size_t batches;  // good ones before the fatal call
    bool validation;
} Reading;

static void read_on(void* argument) {
    const Reading* r = (const Reading*)argument;
    DataLoader* dl = loader_open(&r->config);
    if (r->place.position) { dataloader_restore(dl, r->place, "run/args.json"); }
    for (size_t i = 0; i <= r->batches; i++) {
        if (r->validation) {
            dataloader_val_batch(dl, i);
        } else {
            dataloader_next(dl);
        }
        if (i == r->batches) { _exit(3); }
    }
}

static void test_refuses_ids_outside_the_vocabulary(void** state) {
    (void)state;
    const struct {
        size_t width;
        uint32_t vocab, id;
    } cases[] = {{2, 1000, 1000},     {2, 1000, 65535},         {2, 0, 50257},
                 {4, 100000, 100000}, {4, 100000, 0xFFFFFFFFu}, {4, 100000, 0x80000000u}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        Folder f;
        folder_open(&f);
        uint32_t tokens[100] = {0};
        for (size_t shard = 0; shard < 2; shard++) {
            ShardInfo info = {cases[c].width, 100, cases[c].vocab, -1, -1, 0};
            tokens[37] = shard ? cases[c].id : (cases[c].vocab ? cases[c].vocab : 50257) - 1;
            write_shard(&f, shard ? "b.bin" : "a.bin", &info, tokens);
        }
        char *id = text("token id %u ", cases[c].id), *where = text("token 37 (byte %zu)", 1024 + 37 * cases[c].width);
        const char* const words[] = {"/b.bin: ", id, where, "dataset/prepare", NULL};
        // stream position 137 is the last target of batch 136 / 8 = 16, and read ahead long before
        Reading training = {config_of(&f, 2, 4), {0, 0}, 17, false};
        expect_fatal(read_on, &training, words);
        Reading target = {config_of(&f, 1, 137), {0, 0}, 0, false};
        expect_fatal(read_on, &target, words);
        Reading validation = {config_of(&f, 2, 4), {0, 0}, 17, true};
        validation.config.val_tokens = 160;
        expect_fatal(read_on, &validation, words);

        DataLoader* dl = loader_open(&training.config);  // the batches before it are good
        for (size_t i = 0; i < 17; i++) { dataloader_next(dl); }
        loader_close(dl);
        free(id);
        free(where);
        folder_close(&f);
    }
}

static void test_refuses_a_place_outside_the_data(void** state) {
    (void)state;
    Folder f;
    folder_open(&f);
    folder_add(&f, 2, 100);
    const uint64_t positions[] = {1, 29, 100, 101, UINT64_MAX};
    for (size_t i = 0; i < 5; i++) {
        Reading r = {config_of(&f, 1, 4), {0, positions[i]}, 0, false};
        r.config.val_tokens = 20;
        r.config.val_padding = 10;
        char* position = text("position %llu ", (unsigned long long)positions[i]);
        const char* const words[] = {"run/args.json", position, "30 ... 99", "resume with", NULL};
        expect_fatal(read_on, &r, words);
        free(position);
    }
    folder_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_token_once_an_epoch),
        cmocka_unit_test(test_exact_multiple_plus_one),
        cmocka_unit_test(test_ranks_partition_a_step),
        cmocka_unit_test(test_shards_in_byte_order),
        cmocka_unit_test(test_restore_at_every_step),
        cmocka_unit_test(test_restore_with_another_step_size),
        cmocka_unit_test(test_validation_slice_and_padding),
        cmocka_unit_test(test_overfit_repeats_the_first_step),
        cmocka_unit_test(test_hash_is_fnv1a),
        cmocka_unit_test(test_vocabulary),
        cmocka_unit_test(test_refuses_bad_folders),
        cmocka_unit_test(test_refuses_damaged_shards),
        cmocka_unit_test(test_refuses_mixed_shards),
        cmocka_unit_test(test_refuses_impossible_sizes),
        cmocka_unit_test(test_refuses_ids_outside_the_vocabulary),
        cmocka_unit_test(test_refuses_a_place_outside_the_data),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
