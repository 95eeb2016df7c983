/*
Checkpoints that cannot be used, disks that are full, and folders that stay in order.
*/
#include "checkpoint_util.h"
#include "../llmc/fingerprint.h"

// A refusal changes nothing in the run folder.
static void assert_refused_untouched(const char* folder, const char* flags, const char* words) {
    static const char* const kept[] = {"args.json", "train.log"};
    char *before[2], *paths[2], *names = list_folder(folder);
    for (size_t i = 0; i < 2; i++) {
        paths[i] = text("%s/%s", folder, kept[i]);
        before[i] = file_exists(paths[i]) ? read_text(paths[i], NULL) : NULL;
    }
    Run r = run_checkpoint(folder, flags);
    assert_refused(&r, words);
    assert_folder(folder, names);
    for (size_t i = 0; i < 2; i++) {
        if (before[i]) {
            char* after = read_text(paths[i], NULL);
            assert_string_equal(before[i], after);
            free(after);
        }
        free(before[i]), free(paths[i]);
    }
    free(names);
    run_free(&r);
}

// ----------------------------------------------------------------------------
// another model than the flags describe

static void test_other_models(void** state) {
    (void)state;
    static const struct {
        const char *encoding, *flags, *words;
    } rows[] = {
        {"rotary_ssmax", "--position_encoding rotary", "rotary_ssmax|rotary;|--position_encoding"},
        {"rotary_ssmax", "--position_encoding bam_ssmax", "rotary_ssmax|bam_ssmax"},
        {"rotary_ssmax", "--rope_theta 10000", "rope_theta = 500000|10000"},
        {"rotary_ssmax", "--dim 64", "dim = 32|64"},
        {"rotary_ssmax", "--n_layers 3", "n_layers = 2|3"},
        {"rotary_ssmax", "--n_layers 1", "n_layers = 2|1"},
        {"rotary_ssmax", "--n_heads 4", "n_heads = 2|4"},
        {"rotary_ssmax", "--n_kv_heads 1", "n_kv_heads = 2|1"},
        {"rotary_ssmax", "--ffn_dim 32", "ffn_dim_multiplier = 2|1"},
        {"rotary_ssmax", "--dataset wide", "vocab_size = 258|300"},
        {"rotary_ssmax", "--dataset short", "run's data has 20000 tokens|has 300|--reset_steps"},
        {"rotary_ssmax", "--dataset noise", "order or contents of shards|--reset_steps"},
        {"rotary_ssmax", "--dataset renamed", "order or contents of shards|--reset_steps"},
        {"rotary_ssmax", "--dataset other_hash --reset_steps", "hash 00000001|00000002"},
        {"rotary_ssmax", "--dataset other_bos --reset_steps", "BOS 256 and EOS 257|has 255 and 257"},
        {"rotary_ssmax", "--optimizer adamw", "--optimizer radam|--init_from"},
        {"rotary_ssmax", "--optimizer adamw --reset_steps", "--optimizer radam|--init_from"},
        {"bam_ssmax", "--ssmax_prior outside", "ssmax_prior|inside|outside"},
        {"bam_ssmax", "--global_prior", "global_positional_encoding = false|true"},
        {"sinusoidal", "--sinusoidal_freqs vaswani", "sinusoidal_freqs|bam|vaswani"},
        {"sinusoidal", "--sinusoidal_theta 500", "sinusoidal_theta = 10000|500"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *folder = run_file("base", rows[i].encoding, ""), *flags = text("--checkpoint_args %s", rows[i].flags);
        assert_refused_untouched(folder, flags, rows[i].words);
        free(folder), free(flags);
    }
}

// ----------------------------------------------------------------------------
// damaged folders

static void cut_short(const char* folder, const char* name) {
    char* path = text("%s/%s", folder, name);
    struct stat status;
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(truncate(path, status.st_size - 1), 0);
    free(path);
}

static void cut_weights(const char* folder) { cut_short(folder, "checkpoints/step_000000008/model.safetensors"); }
static void cut_moments(const char* folder) { cut_short(folder, "checkpoints/step_000000008/optimizer.safetensors"); }
static void cut_arguments(const char* folder) { cut_short(folder, "args.json"), cut_short(folder, "args.json"); }

static void remove_moments(const char* folder) {
    char* path = text("%s/checkpoints/step_000000008/optimizer.safetensors", folder);
    assert_int_equal(unlink(path), 0);
    free(path);
}

static void remove_weights(const char* folder) {
    char* path = text("%s/checkpoints/step_000000008/model.safetensors", folder);
    assert_int_equal(unlink(path), 0);
    free(path);
}

static void remove_arguments(const char* folder) {
    char* path = text("%s/args.json", folder);
    assert_int_equal(unlink(path), 0);
    free(path);
}

static void remove_everything(const char* folder) { remove_tree(folder), make_directories(folder); }

static void mix_steps(const char* folder) {
    char *from = text("%s/checkpoints/step_000000004/model.safetensors", folder),
         *to = text("%s/checkpoints/step_000000008/model.safetensors", folder);
    copy_tree(from, to);
    free(from), free(to);
}

// Moments of another model, and none for some weights.
static void mix_models(const char* folder) {
    char *from = run_file("base", "nope", "optimizer.safetensors"),
         *to = text("%s/checkpoints/step_000000008/optimizer.safetensors", folder);
    copy_tree(from, to);
    free(from), free(to);
}

static const struct {
    void (*damage)(const char* folder);
    const char* words;
} damages[] = {
    {cut_weights, "step_000000008/model.safetensors|damaged"},
    {cut_moments, "step_000000008/optimizer.safetensors|damaged"},
    {remove_moments, "weights only|--init_from"},
    {remove_weights, "no model.safetensors|--checkpoint"},
    {mix_steps, "step 4|step 8"},
    {mix_models, "step_000000008|moments"},
};
enum { DAMAGES = sizeof damages / sizeof *damages };

// A damaged newest checkpoint: the run goes on from the one before it and says so, unless it was asked for by name.
static void test_damaged_newest(void** state) {
    (void)state;
    char* whole = run_file("base", "bam_ssmax", "model.safetensors");
    for (size_t i = 0; i < DAMAGES; i++) {
        char *folder = copy_of("base", "bam_ssmax"), *named = text("%s/checkpoints/step_000000008", folder);
        damages[i].damage(folder);
        assert_refused_untouched(named, "--checkpoint_args", damages[i].words);
        Run r = run_checkpoint(folder, "--checkpoint_args");
        assert_true(exited_with(&r, 0));
        assert_int_equal(strncmp(r.err, "warning: ", 9), 0);
        assert_int_equal(count_words(r.err, "\n"), 1);
        assert_non_null(strstr(r.err, "checkpoints/step_000000008"));
        assert_non_null(strstr(r.err, "going on from the newest whole checkpoint, "));
        assert_non_null(strstr(r.err, "checkpoints/step_000000004\n"));
        assert_non_null(strstr(r.out, "step_000000004 at step 4\n"));
        char* model = text("%s/model.safetensors", folder);
        assert_same_file(model, whole);
        run_free(&r);
        free(folder), free(named), free(model);
    }
    free(whole);
}

static void test_damaged_folders(void** state) {
    (void)state;
    static const struct {
        void (*damage)(const char* folder);
        const char* words;
    } rows[] = {
        {cut_arguments, "args.json|line|JSON"},
        {remove_arguments, "args.json: not found|--checkpoint"},
        {remove_everything, "args.json: not found|--checkpoint"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char* folder = copy_of("base", "bam_ssmax");
        rows[i].damage(folder);
        assert_refused_untouched(folder, "--checkpoint_args", rows[i].words);
        free(folder);
    }
    // no checkpoint is whole: the error is about the newest
    for (size_t i = 0; i < DAMAGES; i++) {
        char *folder = copy_of("base", "bam_ssmax"), *older = text("%s/checkpoints/step_000000004", folder);
        static const char* const links[] = {"model.safetensors", "optimizer.safetensors"};
        damages[i].damage(folder);
        remove_tree(older);
        for (size_t k = 0; k < 2; k++) {
            char* link = text("%s/%s", folder, links[k]);
            unlink(link);
            free(link);
        }
        assert_refused_untouched(folder, "--checkpoint_args", damages[i].words);
        free(folder), free(older);
    }
    // a path that is not there, with and without its arguments
    char *nowhere = text("%s/nowhere", scratch), *flags = tiny_flags("never", STEPS);
    assert_refused_untouched(nowhere, "--checkpoint_args", "nowhere|--checkpoint");
    assert_refused_untouched(nowhere, flags, "nowhere|no model.safetensors");
    assert_false(file_exists(nowhere));
    free(nowhere), free(flags);
}

// ----------------------------------------------------------------------------
// what is not ours

static void make_file(const char* folder, const char* name) {
    char *path = text("%s/%s", folder, name), *parent = xstrdup(path);
    *strrchr(parent, '/') = '\0';
    make_directories(parent);
    write_text_atomically(path, name);
    free(path), free(parent);
}

// Files and folders of others stay through going on, saving over them and pruning; what is left of a checkpoint without
// its files is passed over.
static void test_foreign_entries(void** state) {
    (void)state;
    static const char* const names[] = {
        "checkpoints/.DS_Store",
        "checkpoints/notes/readme",
        "checkpoints/mine.tmp/model.safetensors",
        "checkpoints/step_5.tmp/model.safetensors",
        "checkpoints/step_000000004/.nfs0001",
        "checkpoints/step_000000004/plots/loss.png",
        "checkpoints/step_000000007.tmp/thesis",
        "checkpoints/step_000000008/.DS_Store",
        "checkpoints/step_000000008/plots/loss.png",
        "checkpoints/step_000000010/.nfs0002",
    };
    char *whole = run_file("base", "bam_ssmax", "model.safetensors"), *cut = copy_of("base", "bam_ssmax");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) { make_file(cut, names[i]); }
    char *from = text("%s/checkpoints/step_000000004", cut), *model = text("%s/model.safetensors", cut);
    Run back = run_checkpoint(from, "--checkpoint_args --checkpoint_every 2 --keep_checkpoints 1");
    assert_true(exited_with(&back, 0));
    assert_string_equal(back.err, "");
    assert_same_file(model, whole);
    Run again = run_checkpoint(cut, "--checkpoint_args --num_iterations 12");
    assert_true(exited_with(&again, 0));
    assert_non_null(strstr(again.err, "checkpoints/step_000000010"));
    assert_non_null(strstr(again.out, "at step 8\n"));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *path = text("%s/%s", cut, names[i]), *content = read_text(path, NULL);
        assert_string_equal(content, names[i]);
        free(path), free(content);
    }
    assert_int_equal(access(from, F_OK), 0);
    char* old = text("%s/model.safetensors", from);
    assert_int_not_equal(access(old, F_OK), 0);
    run_free(&back), run_free(&again);
    free(whole), free(cut), free(from), free(model), free(old);
}

// ----------------------------------------------------------------------------
// the same run under other names, and runs of older programs

static void test_paths(void** state) {
    (void)state;
    static const struct {
        const char *from, *path;  // "@": the run folder
        size_t step;
    } rows[] = {
        {"@", ".", 8},
        {"@", "./", 8},
        {"@", "checkpoints/step_000000004", 4},
        {"@", "./checkpoints//step_000000004//", 4},
        {"@/checkpoints", "step_000000004", 4},
        {"@/checkpoints/step_000000004", ".", 4},
        {"@/checkpoints/step_000000004", "../..", 8},
        {"/", "@/link", 4},
        {"/", "@//checkpoints/./step_000000004", 4},
    };
    char* whole = run_file("base", "bam_ssmax", "model.safetensors");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *run = copy_of("base", "bam_ssmax"), *link = text("%s/link", run);
        assert_int_equal(symlink("checkpoints/step_000000004", link), 0);
        bool in_run = rows[i].from[0] == '@', to_run = rows[i].path[0] == '@';
        char* folder = text("%s%s", in_run ? run : "", rows[i].from + in_run);
        char* flags =
            text("--checkpoint %s%s --checkpoint_args --num_iterations 10", to_run ? run : "", rows[i].path + to_run);
        Run r = start_train_in(folder, "", flags);
        finish_train(&r);
        if (!exited_with(&r, 0)) { print_error("%s in %s: %s\n", flags, folder, r.err); }
        assert_true(exited_with(&r, 0));
        char *at = text("at step %zu\n", rows[i].step), *checkpoints = text("%s/checkpoints", run);
        assert_non_null(strstr(r.out, at));
        assert_folder(run, "args.json checkpoints eval.log link model.safetensors optimizer.safetensors train.log ");
        assert_folder(checkpoints, "step_000000004 step_000000008 step_000000010 ");
        run_free(&r);
        free(run), free(link), free(folder), free(flags), free(at), free(checkpoints);
    }
    free(whole);
}

static void plain_source(void* context, size_t index, size_t offset, void* chunk, size_t bytes) {
    memcpy(chunk, ((const SafeTensors*)context)->tensors[index].data + offset, bytes);
}

// Writes a file again without what older programs did not note.
static void strip_description(const char* path) {
    static const char* const left_out[] = {"tokenizer_hash", "bos", "eos", "data_fingerprint", "optimizer"};
    SafeTensors file = safetensors_open(path);
    SafeTensorsEntry* entries = xcalloc(file.count, sizeof *entries);
    for (size_t i = 0; i < file.count; i++) {
        const SafeTensor* t = &file.tensors[i];
        entries[i].name = t->name, entries[i].type = t->type, entries[i].ndim = t->ndim;
        memcpy(entries[i].shape, t->shape, sizeof entries[i].shape);
    }
    const char* metadata[32][2];
    size_t pairs = 0;
    for (const cJSON* pair = file.metadata->child; pair; pair = pair->next) {
        bool kept = true;
        for (size_t i = 0; i < 5; i++) { kept = kept && strcmp(pair->string, left_out[i]) != 0; }
        if (kept) { metadata[pairs][0] = pair->string, metadata[pairs++][1] = pair->valuestring; }
    }
    safetensors_write(path, entries, file.count, (const char* const(*)[2])metadata, pairs, plain_source, &file);
    free(entries);
    safetensors_close(&file);
}

static void test_older_checkpoint(void** state) {
    (void)state;
    static const char* const files[] = {"model.safetensors", "optimizer.safetensors"};
    char *whole = run_file("base", "bam_ssmax", ""), *cut = copy_of("base", "bam_ssmax");
    char* last = text("%s/checkpoints/step_000000008", cut);
    remove_tree(last);
    for (size_t i = 0; i < 2; i++) {
        char *path = text("%s/checkpoints/step_000000004/%s", cut, files[i]), *link = text("%s/%s", cut, files[i]);
        strip_description(path);
        unlink(link);
        free(path), free(link);
    }
    Run r = run_checkpoint(cut, "--checkpoint_args");
    assert_true(exited_with(&r, 0));
    assert_non_null(strstr(r.err, "is of an older train_gpt"));
    assert_int_equal(count_words(r.err, "\n"), 1);
    for (size_t i = 0; i < 2; i++) {
        char *x = text("%s/%s", whole, files[i]), *y = text("%s/%s", cut, files[i]);
        assert_same_file(x, y);
        free(x), free(y);
    }
    run_free(&r);
    free(whole), free(cut), free(last);
}

// What a killed program may leave is no hindrance and is cleaned up: a half-written folder, final files that are
// older than the newest checkpoint.
static void test_leftovers_of_a_kill(void** state) {
    (void)state;
    char *whole = run_file("base", "bam_ssmax", ""), *cut = copy_of("base", "bam_ssmax");
    char *last = text("%s/checkpoints/step_000000008", cut), *half = text("%s/checkpoints/step_000000006.tmp", cut);
    char *old = text("%s/checkpoints/step_000000004/model.safetensors", cut),
         *model = text("%s/model.safetensors", cut);
    assert_int_equal(rename(last, half), 0);
    copy_tree(old, model);
    cut_short(half, "model.safetensors");
    Run r = run_checkpoint(cut, "--checkpoint_args");
    assert_true(exited_with(&r, 0));
    assert_non_null(strstr(r.out, "at step 4\n"));
    char *checkpoints = text("%s/checkpoints", cut), *expected = text("%s/model.safetensors", whole);
    assert_folder(checkpoints, "step_000000004 step_000000008 ");
    assert_same_file(model, expected);
    run_free(&r);
    free(whole), free(cut), free(last), free(half), free(old), free(model), free(checkpoints), free(expected);
}

// ----------------------------------------------------------------------------
// fingerprints of data

static uint64_t fingerprint_of(const char* folder) {
    DataLoader dl;
    DataLoaderConfig c = {.folder = folder, .B = 1, .T = 8, .world = 1, .accumulation = 1};
    dataloader_open(&dl, &c);
    uint64_t hash = data_fingerprint(&dl);
    dataloader_close(&dl);
    return hash;
}

static void write_token(const char* path, long token, uint16_t value) {
    FILE* f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, SHARD_HEADER_BYTES + 2 * token, SEEK_SET), 0);
    assert_int_equal(fwrite(&value, 2, 1, f), 1);
    assert_int_equal(fclose(f), 0);
}

// Small data are read whole, of large data at least each shard's beginning and end. Where the folder is does not
// matter.
static void test_fingerprints(void** state) {
    (void)state;
    static const size_t counts[] = {5000, 5000000};
    for (size_t large = 0; large < 2; large++) {
        Folder folder = dataset_folder(large ? "large" : "small");
        size_t n = counts[large];
        uint32_t* ids = xcalloc(n, sizeof(uint32_t));
        for (uint32_t s = 0; s < 2; s++) {
            ShardInfo info = {2, n, BYTES_VOCAB, BYTES_BOS, BYTES_EOS, 1};
            ids[1] = s;
            write_shard(&folder, s ? "b.bin" : "a.bin", &info, ids);
        }
        char *a = text("%s/a.bin", folder.path), *b = text("%s/b.bin", folder.path), *c = text("%s/c.bin", folder.path),
             *elsewhere = text("%s.moved", folder.path);
        uint64_t hash = fingerprint_of(folder.path);
        copy_tree(folder.path, elsewhere);
        assert_true(fingerprint_of(elsewhere) == hash);
        const long places[] = {0, (long)n - 1, 2500};
        for (size_t i = 0; i < (large ? 2 : 3); i++) {
            write_token(b, places[i], 7);
            assert_true(fingerprint_of(folder.path) != hash);
            write_token(b, places[i], 0);
            assert_true(fingerprint_of(folder.path) == hash);
        }
        assert_int_equal(rename(a, c), 0);
        assert_true(fingerprint_of(folder.path) != hash);
        free(ids), free(a), free(b), free(c), free(elsewhere);
    }
}

// ----------------------------------------------------------------------------
// full disk, number of checkpoints

// The disk refuses the optimiser's file, the weights, or the very first file of the resumed run.
static void test_full_disk(void** state) {
    (void)state;
    static const struct {
        rlim_t bytes;
        const char* words;
    } rows[] = {{250000, "optimizer.safetensors"}, {100000, "model.safetensors"}, {300, "args.json"}};
    char *whole = run_file("base", "nope", ""), *cut = copy_of("base", "nope");
    char *last = text("%s/checkpoints/step_000000008", cut), *checkpoints = text("%s/checkpoints", cut);
    remove_tree(last);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        file_size_limit = rows[i].bytes;
        Run r = run_checkpoint(cut, "--checkpoint_args");
        file_size_limit = RLIM_INFINITY;
        assert_refused(&r, rows[i].words);
        assert_non_null(strstr(r.err, "File too large"));
        assert_folder(checkpoints, "step_000000004 ");
        assert_folder(cut, "args.json checkpoints eval.log model.safetensors optimizer.safetensors train.log ");
        run_free(&r);
    }
    Run r = run_checkpoint(cut, "--checkpoint_args");
    assert_true(exited_with(&r, 0));
    char *x = text("%s/optimizer.safetensors", whole), *y = text("%s/optimizer.safetensors", cut);
    assert_same_file(x, y);
    run_free(&r);
    free(whole), free(cut), free(last), free(checkpoints), free(x), free(y);
}

static void test_keep_checkpoints(void** state) {
    (void)state;
    static const struct {
        const char *flags, *names;
    } rows[] = {
        {"--checkpoint_every 2 --keep_checkpoints 1", "step_000000007 "},
        {"--checkpoint_every 2 --keep_checkpoints 3", "step_000000004 step_000000006 step_000000007 "},
        {"--checkpoint_every 0 --keep_checkpoints 3", "step_000000007 "},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *log = text("keep_%zu", i), *flags = text("--tokens_per_step 64 --num_iterations 7 %s", rows[i].flags);
        train_tiny_quietly(log, flags);
        char* checkpoints = run_file(log, "nope", "checkpoints");
        assert_folder(checkpoints, rows[i].names);
        free(log), free(flags), free(checkpoints);
    }
}

int main(void) {
    static const char* const encodings[] = {"nope", "rotary_ssmax", "bam_ssmax", "sinusoidal"};
    make_bases(encodings, sizeof encodings / sizeof *encodings);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_other_models),    cmocka_unit_test(test_damaged_newest),
        cmocka_unit_test(test_damaged_folders), cmocka_unit_test(test_foreign_entries),
        cmocka_unit_test(test_paths),           cmocka_unit_test(test_older_checkpoint),
        cmocka_unit_test(test_fingerprints),    cmocka_unit_test(test_leftovers_of_a_kill),
        cmocka_unit_test(test_full_disk),       cmocka_unit_test(test_keep_checkpoints),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
