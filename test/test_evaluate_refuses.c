/*
What the program evaluate refuses: runs whose files do not belong together, models that answer with no numbers, places
where nothing can be written, and flags.
*/
#include "evaluate_util.h"

// args.json must be that of the weights and of the tokenizer.
static void test_program_mismatch(void** state) {
    (void)state;
    static const struct {
        const char *section, *from, *to, *words;
    } cases[] = {
        {"model_args", "\"n_heads\":\t2", "\"n_heads\":\t4", "model.safetensors|n_heads = 2|says 4|one run"},
        {"model_args", "\"n_layers\":\t2", "\"n_layers\":\t1", "n_layers = 2|says 1"},
        {"model_args", "\"global_positional_encoding\":\tfalse", "\"global_positional_encoding\":\ttrue",
         "global_positional_encoding = false|says true"},
        {"model_args", "\"dim\"", "\"ssmax_prior\":\t\"outside\", \"dim\"", "ssmax_prior"},
        {"args", "\"position_encoding\":\t\"bam_ssmax\"", "\"position_encoding\":\t\"bam\"",
         "bam_ssmax|args.json says bam"},
        {"dataset_args", "\"bos\":\t256", "\"bos\":\t1", "BOS|256|1"},
        {"dataset_args", "\"eos\":\t257", "\"eos\":\t2", "EOS|257|2"},
        {"dataset_args", "\"bos\":\t256", "\"bos\":\t1e300", "args.json|dataset_args.bos|whole number"},
        {"dataset_args", "\"tokenizer_hash\":\t", "\"tokenizer_hash\":\t-", "dataset_args.tokenizer_hash|whole number"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *name = text("mismatch_%zu", i), *run = copy_run(name), *args = text("%s/args.json", run);
        edit_section(args, cases[i].section, cases[i].from, cases[i].to);
        expect_refusal(run, "--passkey_seq_lens 0", cases[i].words);
        free(name), free(run), free(args);
    }
}

// Weights of another program name neither model nor encoding: args.json says it, and must know all that they learned.
static void test_program_foreign_weights(void** state) {
    (void)state;
    char *run = copy_run("foreign"), *args = text("%s/args.json", run), *path = text("%s/model.safetensors", run);
    size_t size;
    char* weights = read_text(path, &size);
    static const char* const names[] = {"\"model_args\":", "\"position_encoding\":"};
    for (size_t i = 0; i < 2; i++) {
        char* at = (char*)memmem(weights, size, names[i], strlen(names[i]));
        assert_non_null(at);
        at[1] = 'x';
    }
    write_atomically(path, weights, size);
    evaluate_quietly(run, "--passkey_seq_lens 0 --passkey_sample_size 1");
    edit_section(args, "args", "\"position_encoding\":\t\"bam_ssmax\"", "\"position_encoding\":\t\"bam\"");
    char* flags = evaluate_flags(run, "--passkey_seq_lens 400");
    Run r = run_evaluate(flags);
    assert_refused(&r, "model.safetensors|seq_scale|a model with bam has not");
    run_free(&r);
    edit_section(args, "args", "\"position_encoding\":\t\"bam\"", "\"position_encoding\":\t\"bam_ssmax\"");
    edit_section(args, "model_args", "\"n_layers\":\t2", "\"n_layers\":\t3");
    r = run_evaluate(flags);
    assert_refused(&r, "model.safetensors|has no tensor layers.2.");
    run_free(&r);
    free(run), free(args), free(path), free(weights), free(flags);
}

// Writes a value over the first of a tensor.
static void damage_tensor(const char* path, const char* name, float value) {
    SafeTensors file = safetensors_open(path);
    const SafeTensor* t = safetensors_find(&file, name);
    assert_non_null(t);
    off_t offset = (off_t)(t->data - (const unsigned char*)file.map);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(fd, &value, sizeof value, offset), sizeof value);
    close(fd);
    safetensors_close(&file);
}

// What a model says that is not finite, or too large for a perplexity, is no result.
static void test_program_not_finite(void** state) {
    (void)state;
    char *run = text("%s/diverged", scratch), *weights = text("%s/model.safetensors", run);
    char *words = text("%s/diverged.txt", scratch), *csv = text("%s/diverged.csv", scratch);
    write_text_atomically(words, "abcdefgh");
    char* score = text("--score %s --out %s", words, csv);
    const char* const flags[] = {"--passkey_seq_lens 0 --passkey_sample_size 1",
                                 "--passkey_sample_size 0" ARTICLES_FLAGS, score};
    const float values[] = {NAN, INFINITY, -INFINITY, 3e38f, 1e6f};
    for (size_t v = 0; v < 5; v++) {
        remove_tree(run);
        free(copy_run("diverged"));
        unlink(weights);  // a link to that of the original's checkpoint, perhaps
        char* whole = text("%s/model.safetensors", run_folder);
        copy_tree(whole, weights);
        free(whole);
        damage_tensor(weights, "norm.weight", values[v]);
        for (size_t i = values[v] == 1e6f ? 1 : 0; i < 3; i++) {  // finite logits are answers
            char* all = evaluate_flags(run, flags[i]);
            Run r = run_evaluate(all);
            assert_refused(&r, isfinite(values[v]) ? "model.safetensors|expected a finite number|earlier checkpoint"
                                                   : "model.safetensors|norm.weight|not finite|another checkpoint");
            run_free(&r);
            free(all);
        }
        assert_folder(run, "args.json checkpoints eval.log model.safetensors optimizer.safetensors train.log ");
        assert_false(file_exists(csv));
    }
    free(run), free(weights), free(words), free(csv), free(score);
}

// Where results, scores and prompts cannot be written: noticed before anything is measured.
static void test_program_unwritable(void** state) {
    (void)state;
    char *run = copy_run("unwritable"), *folder = text("%s/folder", scratch), *words = text("%s/w.txt", scratch);
    make_directories(folder);
    write_text_atomically(words, "abc");
    const struct {
        bool score;
        const char *path, *words;
    } cases[] = {
        {true, folder, "is a folder"},
        {true, "/nonexistent/x.csv", "x.csv|No such file"},
        {true, words, "w.txt|the text to score"},
        {false, folder, "is a folder"},
        {false, "/nonexistent/x.txt", "x.txt|No such file"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char* flags = cases[i].score ? text("--score %s --out %s", words, cases[i].path)
                                     : text("--passkey_seq_lens 0 --dump %s", cases[i].path);
        expect_refusal(run, flags, cases[i].words);
        free(flags);
    }
    char* content = read_text(words, NULL);
    assert_string_equal(content, "abc");
    // root without the right to ignore permissions
    const char* program = getenv("EVALUATE");
    char *kept = program ? xstrdup(program) : NULL, *plain = xstrdup(program ? program : "./evaluate");
    char* bound = text("setpriv --inh-caps=-dac_override --bounding-set=-dac_override %s", plain);
    if (geteuid() == 0) { setenv("EVALUATE", bound, 1); }
    chmod(run, 0555);
    expect_refusal(run, "--passkey_seq_lens 0", "unwritable|results cannot be written|Permission denied");
    expect_refusal(run, "--passkey_sample_size 0" ARTICLES_FLAGS, "unwritable|results cannot be written");
    chmod(run, 0755);
    evaluate_quietly(run, "--passkey_seq_lens 0 --passkey_sample_size 1");
    chmod(run, 0555);  // the lock is there now
    expect_refusal(run, "--passkey_seq_lens 400", "unwritable|results cannot be written|Permission denied");
    chmod(run, 0755);
    if (kept) {
        setenv("EVALUATE", kept, 1);
    } else {
        unsetenv("EVALUATE");
    }
    char* texts[] = {run, folder, words, content, kept, plain, bound};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) { free(texts[i]); }
}

static void test_program_refuses(void** state) {
    (void)state;
    ShardInfo foreign = bytes_info, wide = bytes_info;
    uint32_t tokens[] = {BYTES_BOS, 'a', 'b', BYTES_EOS};
    foreign.tokenizer_hash = 77, wide.vocab_size = 300;
    make_shard("foreign", &foreign, tokens, 4);
    make_shard("wide", &wide, tokens, 4);
    char* damaged = text("%s/damaged", scratch);
    copy_tree(run_folder, damaged);
    char *args = text("%s/args.json", damaged), *words = text("%s/empty.txt", scratch);
    write_text_atomically(args, "{\"args\": {\"position_encoding\"");
    write_text_atomically(words, "\n\n");
    char* unsaved = text("%s/unsaved", scratch);
    copy_tree(run_folder, unsaved);
    char* weights = text("%s/model.safetensors", unsaved);
    unlink(weights);
    const struct {
        const char *run, *flags, *words;
    } cases[] = {
        {"/nonexistent", "", "/nonexistent|no args.json|--log_dir"},
        {damaged, "", "args.json|line 1|JSON"},
        {unsaved, "", "model.safetensors|not found"},
        {run_folder, "--tokenizer /nonexistent.model", "/nonexistent.model"},
        {run_folder, "--prompt a --interactive", "exclude each other"},
        {run_folder, "--prompt a --perplexity", "run evaluate twice"},
        {run_folder, "--prompt_file /nonexistent.txt", "--prompt_file /nonexistent.txt: No such file"},
        {run_folder, "--passkey_sampling middle", "middle|equidistant"},
        {run_folder, "--passkey_pred_digits 12 --passkey_prefix_digits 9", "18"},
        {run_folder, "--passkey_seq_lens 5,x", "passkey_seq_lens|x"},
        {run_folder, "--passkey_seq_lens 1000000000", "999999995|free"},
        {run_folder, "--passkey_sample_size 0", "nothing to do"},
        {run_folder, "--passkey_keys held_out --passkey_pred_digits 1", "held_out"},
        {run_folder, "--score x.txt", "--out"},
        {run_folder, "--out x.csv", "--score"},
        {run_folder, "--score /nonexistent.txt --out x.csv", "/nonexistent.txt"},
        {run_folder, "--score /nonexistent.bin --out x.csv", "/nonexistent.bin"},
        {run_folder, "--separator x", "--separator needs --score"},
        {run_folder, "--score README.md --out x.csv", "README.md|unknown kind of text|--format"},
        {run_folder, "--score - --format txt --out x.csv", "no documents in standard input"},
        {run_folder, "--perplexity --perplexity_dataset none", "data/none"},
        {run_folder, "--perplexity --perplexity_dataset foreign", "hash|foreign"},
        {run_folder, "--perplexity --perplexity_dataset wide", "vocabulary of 300|258"},
        {run_folder, "--perplexity --perplexity_seq_len 100 --perplexity_window_size 30", "multiple|90"},
        {run_folder, "--perplexity --perplexity_dataset articles --perplexity_seq_len 1024", "7 documents|1025|199"},
        {run_folder, "--perplexity --perplexity_dataset articles --perplexity_seq_len 1024 --perplexity_join",
         "--perplexity_ntokens|1025"},
        {run_folder, "--dtype float16", "float16"},
        {run_folder, "--dump /nonexistent/dump.txt --passkey_seq_lens 0 --passkey_sample_size 1 --force", "dump.txt"},
    };
    remove_results();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char* flags = evaluate_flags(cases[i].run, cases[i].flags);
        Run r = run_evaluate(flags);
        assert_refused(&r, cases[i].words);
        run_free(&r);
        free(flags);
    }
    char* empty = text("--score %s --out %s/never.csv", words, scratch);
    char* flags = evaluate_flags(run_folder, empty);
    Run r = run_evaluate(flags);
    assert_refused(&r, "empty.txt|no document");
    run_free(&r);
    assert_folder(run_folder, "args.json checkpoints eval.log model.safetensors optimizer.safetensors train.log ");
    char* all[] = {damaged, args, words, unsaved, weights, empty, flags};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) { free(all[i]); }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_program_mismatch),   cmocka_unit_test(test_program_foreign_weights),
        cmocka_unit_test(test_program_not_finite), cmocka_unit_test(test_program_unwritable),
        cmocka_unit_test(test_program_refuses),
    };
    return cmocka_run_group_tests(tests, make_tiny_run, NULL);
}
