/*
Models whose layers differ, through the programs: names of folders and fields, which tensors a checkpoint holds, going
on bit for bit, evaluation in chunks, and what is refused.
*/
#include "evaluate_util.h"

#include "../llmc/model.h"

#define SHORT "--dataset letters --tokens_per_step 64 --num_iterations 6 --checkpoint_every 1 --keep_checkpoints 9 "
#define MIXED SHORT "--n_layers 4 --layer_encodings rotary,nope,bam_ssmax --layer_windows 9,0 "

static const char MIXED_NAME[] = "rotary+nope+bam_ssmax";

// Has the run's args.json this value at "section.field"? NULL: no such field.
static void assert_field(const char* run, const char* section, const char* field, const char* want) {
    char* path = text("%s/args.json", run);
    cJSON* json = read_json(path);
    const cJSON* item = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItem(json, section), field);
    char* found = item ? cJSON_PrintUnformatted(item) : NULL;
    if (!found || !want ? found != want : strcmp(found, want) != 0) {
        print_error("%s: %s is %s, expected %s\n", path, field, found ? found : "missing", want ? want : "nothing");
    }
    assert_true(found && want ? strcmp(found, want) == 0 : !found && !want);
    free(path), free(found);
    cJSON_Delete(json);
}

// ----------------------------------------------------------------------------
// names

static void test_names(void** state) {
    (void)state;
    static const struct {
        const char* names[8];
        size_t layers, period;
        const char* name;
    } rows[] = {
        {{"bam_ssmax"}, 3, 1, "bam_ssmax"},
        {{"rotary", "rotary", "rotary", "nope"}, 8, 4, "3rotary+nope"},
        {{"rotary", "rotary", "rotary", "nope"}, 6, 4, "3rotary+nope"},
        {{"rotary", "rotary", "rotary", "nope"}, 3, 1, "rotary"},
        {{"nope", "nope_ssmax", "nope", "nope_ssmax"}, 4, 2, "nope+nope_ssmax"},
        {{"t5", "alibi", "t5", "t5"}, 4, 3, "t5+alibi+t5"},
        {{"t5", "alibi", "alibi"}, 1, 1, "t5"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        static ModelConfig c;
        size_t count = 0;
        c.L = rows[i].layers;
        while (count < 8 && rows[i].names[count]) {
            assert_true(model_parse_layer(&c, count, rows[i].names[count]));
            count++;
        }
        model_repeat_encodings(&c, count);
        char* name = model_encoding_name(&c);
        assert_string_equal(name, rows[i].name);
        assert_int_equal(model_encoding_period(&c), rows[i].period);
        free(name);
    }
}

// A name that is too long for a folder is cut, and still another one for another pattern.
static void test_long_names(void** state) {
    (void)state;
    static ModelConfig c;
    char* names[2];
    for (size_t i = 0; i < 2; i++) {
        c.L = 60;
        for (size_t l = 0; l < c.L; l++) { model_parse_layer(&c, l, l % 7 == 0 || l == 50 + i ? "t5" : "kerple_log"); }
        names[i] = model_encoding_name(&c);
        assert_true(strlen(names[i]) <= 80);
        assert_int_equal(strncmp(names[i], "t5+6kerple_log+t5+6kerple_log+", 30), 0);
    }
    assert_string_not_equal(names[0], names[1]);
    free(names[0]), free(names[1]);
}

// ----------------------------------------------------------------------------
// what a run leaves

static void test_run_folder(void** state) {
    (void)state;
    train_tiny_quietly("mixed", MIXED);
    char *run = run_file("mixed", MIXED_NAME, ""), *model = text("%s/model.safetensors", run);
    assert_field(run, "args", "layer_encodings", "[\"rotary\",\"nope\",\"bam_ssmax\"]");
    assert_field(run, "args", "position_encoding", "null");
    assert_field(run, "model_args", "layer_encodings", "[\"rotary\",\"nope\",\"bam_ssmax\"]");
    assert_field(run, "args", "layer_windows", "[9,0]");
    assert_field(run, "model_args", "layer_windows", "[9,0]");
    assert_field(run, "model_args", "window", NULL);
    assert_field(run, "model_args", "rope_theta", "500000");
    assert_field(run, "model_args", "seq_scale", "true");
    assert_field(run, "model_args", "train_theta_alpha", "true");
    assert_field(run, "model_args", "sandwich_dim", NULL);
    assert_field(run, "model_args", "train_t5_bias", NULL);
    SafeTensors file = safetensors_open(model);
    assert_string_equal(safetensors_metadata(&file, "position_encoding"), "rotary+nope+bam_ssmax");
    for (int layer = 0; layer < 4; layer++) {
        char *scale = text("layers.%d.attention.seq_scale", layer),
             *matrix = text("layers.%d.attention.wq.weight", layer);
        char* prior = text("layers.%d.attention.prior.theta_alpha", layer);
        assert_true(safetensors_find(&file, matrix));
        assert_true((safetensors_find(&file, scale) != NULL) == (layer == 2));
        assert_true((safetensors_find(&file, prior) != NULL) == (layer == 2));
        free(scale), free(matrix), free(prior);
    }
    assert_int_equal(file.count, 3 + 4 * 9 + 1 + 3);
    safetensors_close(&file);
    free(run), free(model);
}

// A list of one encoding for all layers is that encoding.
static void test_uniform_list(void** state) {
    (void)state;
    train_tiny_quietly("one", SHORT "--position_encoding bam_ssmax");
    train_tiny_quietly("list", SHORT "--layer_encodings bam_ssmax,bam_ssmax");
    char *one = run_file("one", "bam_ssmax", ""), *list = run_file("list", "bam_ssmax", "");
    assert_identical(one, list);
    assert_field(list, "args", "position_encoding", "\"bam_ssmax\"");
    assert_field(list, "args", "layer_encodings", "null");
    assert_field(list, "model_args", "layer_encodings", NULL);
    free(one), free(list);
    train_tiny_quietly("window", SHORT "--position_encoding alibi --window 9");
    train_tiny_quietly("windows", SHORT "--position_encoding alibi --layer_windows 9,9");
    train_tiny_quietly("none", SHORT "--position_encoding alibi --layer_windows 0,0");
    train_tiny_quietly("plain", SHORT "--position_encoding alibi");
    static const char* const pairs[][2] = {{"window", "windows"}, {"plain", "none"}};
    for (size_t i = 0; i < 2; i++) {
        char *flag = run_file(pairs[i][0], "alibi", ""), *same = run_file(pairs[i][1], "alibi", "");
        assert_identical(flag, same);
        assert_field(same, "args", "window", i == 0 ? "9" : "null");
        assert_field(same, "args", "layer_windows", "null");
        assert_field(same, "model_args", "window", i == 0 ? "9" : NULL);
        assert_field(same, "model_args", "layer_windows", NULL);
        free(flag), free(same);
    }
}

// One prior of each encoding for all of its layers.
static void test_global_priors(void** state) {
    (void)state;
    train_tiny_quietly("shared", SHORT "--n_layers 4 --layer_encodings bam,t5,bam_ssmax,nope --global_prior");
    char* model = run_file("shared", "bam+t5+bam_ssmax+nope", "model.safetensors");
    SafeTensors file = safetensors_open(model);
    size_t priors = 0;
    for (size_t i = 0; i < file.count; i++) { priors += strncmp(file.tensors[i].name, "prior.", 6) == 0; }
    assert_int_equal(priors, 3 + 1);
    assert_int_equal(file.count, 3 + 4 * 9 + 1 + 4);
    safetensors_close(&file);
    free(model);
}

// ----------------------------------------------------------------------------
// going on

static void test_resume(void** state) {
    (void)state;
    static const struct {
        const char *name, *flags;
    } rows[] = {
        {"nope+2kerple_log_ssmax",
         "--layer_encodings nope,kerple_log_ssmax,kerple_log_ssmax --layer_windows 5,17,0 --recompute 1"},
        {"bam+t5", "--layer_encodings bam,t5 --global_prior --optimizer adamw --sample_every 2 --sample_length 5"},
        {"alibi+rotary_ssmax", "--layer_encodings alibi,rotary_ssmax --n_layers 2 --dtype bfloat16"},
    };
    const bool bfloat16 = has_bfloat16();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (strstr(rows[i].flags, "bfloat16") && !bfloat16) { continue; }
        char *flags = text(SHORT "--n_layers 3 --tokens_per_step 128 %s", rows[i].flags), *log = text("resume_%zu", i);
        train_tiny_quietly(log, flags);
        char* whole = run_file(log, rows[i].name, "");
        check_resumed(whole, 2);
        free(flags), free(log), free(whole);
    }
}

static void test_refusals(void** state) {
    (void)state;
    static const struct {
        const char *flags, *words;
    } rows[] = {
        {SHORT "--layer_encodings rotary,ropary", "--layer_encodings: found 'ropary'|one of: nope nope_ssmax"},
        {SHORT "--layer_encodings rotary,", "--layer_encodings: found ''|one of"},
        {SHORT "--layer_encodings nope,rotary,nope", "found 3 entries|2 layers"},
        {SHORT "--layer_encodings nope,sinusoidal", "--layer_encodings: sinusoidal is added to the embedding"},
        {SHORT "--layer_encodings nope,rotary --position_encoding nope", "--layer_encodings|excludes"},
        {SHORT "--layer_windows 4,-1", "--layer_windows: found '-1'|from 0 to 16777216"},
        {SHORT "--layer_windows 4,0,0", "--layer_windows: found 3 entries|2 layers"},
        {SHORT "--layer_windows 4,0 --window 4", "--window 4 together with --layer_windows|excludes"},
        {SHORT "--layer_encodings nope,rotary_ssmax --log_scale 8,0.1", "--log_scale 8,0.1 with Scalable-Softmax"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *flags = tiny_flags("refused", rows[i].flags), *log = text("%s/refused", scratch);
        Run r = run_train(flags);
        assert_refused(&r, rows[i].words);
        assert_false(file_exists(log));
        run_free(&r);
        free(flags), free(log);
    }
    static const struct {
        const char *flags, *words;
    } resumed[] = {
        {"--layer_encodings rotary,nope,bam", "trained with rotary+nope+bam_ssmax|ask for rotary+nope+bam|--layer_enc"},
        {"--position_encoding rotary", "trained with rotary+nope+bam_ssmax|the flags ask for rotary|--position_enc"},
        {"--ssmax_prior outside", "ssmax_prior|inside|outside"},
        {"--layer_windows 9", "layer_windows = [9,0]|none"},
        {"--layer_windows 0,9", "layer_windows = [9,0]|[0,9]"},
    };
    char* run = run_file("mixed", MIXED_NAME, "");
    for (size_t i = 0; i < sizeof resumed / sizeof *resumed; i++) {
        char *same = resume_flags(run), *flags = text("%s %s --num_iterations 9", same, resumed[i].flags);
        Run r = run_train(flags);
        assert_refused(&r, resumed[i].words);
        run_free(&r);
        free(same), free(flags);
    }
    free(run);
}

// ----------------------------------------------------------------------------
// evaluating

static size_t scores_of(const char* run, size_t chunk, double* scores, size_t most) {
    char *out = text("%s/scores.csv", scratch),
         *flags = text("--score %s/text.txt --out %s --seq_batch_size %zu", scratch, out, chunk);
    evaluate_quietly(run, flags);
    char* header = read_text(out, NULL);
    unsigned column = 0;
    for (const char* c = header; *c != '\n'; c++) { column += *c == ','; }
    size_t n = csv_column(out, column, scores, most);
    free(out), free(flags), free(header);
    return n;
}

// In chunks through the cache as in one pass, beyond the training length; and args.json must be that of the weights.
static void test_evaluate(void** state) {
    (void)state;
    enum { MOST = 400 };
    char *run = run_file("mixed", MIXED_NAME, ""), *document = text("%s/text.txt", scratch), letters[200];
    for (size_t i = 0; i < sizeof letters; i++) { letters[i] = (char)('a' + i * i % 26); }
    letters[sizeof letters - 1] = '\0';
    write_text_atomically(document, letters);
    double whole[MOST], chunks[MOST];
    size_t n = scores_of(run, 512, whole, MOST);
    assert_true(n >= sizeof letters - 1);
    assert_int_equal(scores_of(run, 7, chunks, MOST), n);
    // written with six digits or more, of sums in another order
    for (size_t i = 0; i < n; i++) { assert_error_below(fabs(whole[i] - chunks[i]), 2e-5); }

    static const struct {
        const char *section, *from, *to, *words;
    } edits[] = {
        {"model_args", "\"rotary\", \"nope\"", "\"rotary\", \"t5\"",
         "rotary+nope+bam_ssmax|args.json says rotary+t5+bam"},
        {"model_args", "\"nope\"", "\"nop\"", "layer_encodings: entry 2 is not the encoding of one of 4 layers"},
        {"model_args", "[\"rotary\", \"nope\", \"bam_ssmax\"]", "[]", "layer_encodings is no list"},
        {"model_args", "\"layer_windows\":\t[9, 0]", "\"layer_windows\":\t[9, 1]", "layer_windows = [9,0]|says [9,1]"},
        {"model_args", "\"layer_windows\":\t[9, 0]", "\"layer_windows\":\t[9, 0.5]", "layer_windows: entry 2"},
        {"\"args\"", "\"position_encoding\":\tnull", "\"position_encoding\":\t\"rotary\"",
         "position_encoding is rotary|rotary+nope+bam_ssmax"},
    };
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        char *copy = text("%s/edited_%zu", scratch, i), *args = text("%s/args.json", copy);
        copy_tree(run, copy);
        edit_section(args, edits[i].section, edits[i].from, edits[i].to);
        expect_refusal(copy, "--passkey_seq_lens 0", edits[i].words);
        free(copy), free(args);
    }
    free(run), free(document);
}

int main(void) {
    scratch_create();
    size_t lengths[200];
    for (size_t i = 0; i < 200; i++) { lengths[i] = 20 + i % 50; }
    make_documents("letters", lengths, 200);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),        cmocka_unit_test(test_long_names),    cmocka_unit_test(test_run_folder),
        cmocka_unit_test(test_uniform_list), cmocka_unit_test(test_global_priors), cmocka_unit_test(test_resume),
        cmocka_unit_test(test_refusals),     cmocka_unit_test(test_evaluate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
