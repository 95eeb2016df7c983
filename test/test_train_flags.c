/*
The command line of train_gpt: what is impossible is refused before any work with one line that says what and why;
what --help prints parses, reaches args.json and has an effect.
*/
#include "train_util.h"

#include "../llmc/model.h"
#include "../llmc/model_args.h"
#include "../llmc/train_args.h"

#define MODEL " --model_size l2 --dim 32 --n_heads 2 --batch_size 2 --sequence_length 32 --tokenizer bytes"
#define STEP MODEL " --tokens_per_step 64 --num_iterations 2 --val_tokens 0"

// Flags behind those of the data; log folder SCRATCH/LOG.
static Run run_flags(const char* log, const char* flags) {
    char* all = text("--data_dir %s/data --dataset easy --log_dir %s/%s%s", scratch, scratch, log, flags);
    Run r = run_train(all);
    free(all);
    return r;
}

// ----------------------------------------------------------------------------
// refusals

static const struct {
    const char *flags, *words;
} refused[] = {
    // what is required, what excludes what
    {MODEL " --num_iterations 3", "missing --tokens_per_step|--min_tokens_per_step|--max_tokens_per_step"},
    {MODEL " --tokens_per_step 64", "missing --num_iterations"},
    {STEP " --max_tokens_per_step 64", "--max_tokens_per_step|--tokens_per_step|excludes"},
    {STEP " --min_val_tokens 64", "--min_val_tokens|--val_tokens|excludes"},
    {STEP " --checkpoint_args", "--checkpoint_args needs --checkpoint"},
    {STEP " --reset_steps", "--reset_steps needs --checkpoint"},
    {STEP " --checkpoint a --init_from b", "--checkpoint and --init_from exclude each other"},
    // sizes of steps and data
    {STEP " --tokens_per_step 100",
     "--tokens_per_step 100 is not a multiple of the 64|use 64 or 128|--min_tokens_per_step"},
    {STEP " --tokens_per_step 32", "--tokens_per_step 32 is less than one batch of 64|--batch_size"},
    {MODEL " --max_tokens_per_step 63 --num_iterations 1", "--max_tokens_per_step 63 is less than one batch of 64"},
    {STEP " --val_tokens 100", "--val_tokens 100 is not a multiple of the 64"},
    {STEP " --tokens_per_step 20032", "data/easy: 20000 tokens|at least 20033"},
    {STEP " --val_tokens 128 --val_tokens_padding 20000", "20000 tokens|val_tokens 128 + val_tokens_padding 20000"},
    {MODEL " --tokens_per_step 64 --num_iterations 2", "20000 tokens|val_tokens 3932160"},
    {STEP " --val_loss_every 5", "--val_loss_every 5|no validation tokens|--val_tokens"},
    {STEP " --dataset nothing", "data/nothing: No such file|dataset/prepare|--dataset"},
    {STEP " --dataset empty", "data/empty: no *.bin file|dataset/prepare"},
    {STEP " --dataset broken", "broken/part.bin: 3 bytes|dataset/prepare"},
    // the model
    {STEP " --dim 33", "--dim 33 is not a multiple of --n_heads 2"},
    {STEP " --dim 24", "head size 12|--dim 24|multiple of 8"},
    {STEP " --dim 512", "head size 256|up to 128"},
    {STEP " --n_heads 4 --n_kv_heads 3", "--n_kv_heads 3 does not divide --n_heads 4"},
    {STEP " --ffn_dim 12", "--ffn_dim 12|multiple of 8"},
    {STEP " --position_encoding bem", "--position_encoding: found 'bem'|bam_ssmax"},
    {STEP " --model_size l3", "--model_size: found 'l3'|l12"},
    {STEP " --theta_mu_init 30", "--theta_mu_init 30|-20 to 20"},
    {STEP " --theta_alpha_init steep", "--theta_alpha_init: found 'steep'|log_slope"},
    {STEP " --dim 65536 --n_heads 1024 --n_layers 1000", "the model needs|free|--model_size"},
    {STEP " --log_dir caf\xE9", "--log_dir|not UTF-8"},
    {STEP " --init_from nowhere.safetensors", "nowhere.safetensors: No such file"},
    // the machine
    {STEP " --dtype float16", "float16 is not supported|bfloat16"},
    {STEP " --dtype int8", "--dtype: found 'int8'|bfloat16"},
    {STEP " --attention cudnn", "--attention cudnn|built for the CPU|make cuda USE_CUDNN=1"},
    {STEP " --device tpu", "--device tpu|expected cpu or auto"},
    // attention
    {STEP " --softcap 0", "--softcap: found '0', expected a number from 1e-06"},
    {STEP " --softcap -3", "--softcap: found '-3'"},
    {STEP " --softcap inf", "--softcap: found 'inf'"},
    {STEP " --softcap nan", "--softcap: found 'nan'"},
    {STEP " --final_softcap 0", "--final_softcap: found '0', expected a number from 1e-06"},
    {STEP " --softcap_approx", "--softcap_approx without --softcap|give --softcap C too"},
    {STEP " --window 9 --attention cudnn", "--attention cudnn has no --window 9|--attention own"},
    {STEP " --window 0", "--window: found '0', expected a whole number from 1"},
    {STEP " --log_scale 1024", "--log_scale 1024: expected N0,ALPHA"},
    {STEP " --log_scale 1024,", "--log_scale 1024,: expected N0,ALPHA"},
    {STEP " --log_scale ,0.1", "--log_scale ,0.1: expected N0,ALPHA"},
    {STEP " --log_scale 0.5,0.1", "--log_scale 0.5,0.1: expected N0,ALPHA|at least 1"},
    {STEP " --log_scale 64,-1", "--log_scale 64,-1: expected N0,ALPHA"},
    {STEP " --log_scale 64,0.1,3", "--log_scale 64,0.1,3: expected N0,ALPHA|as 1024,0.1"},
    {STEP " --log_scale 64,0.1 --position_encoding bam_ssmax", "--log_scale 64,0.1 with Scalable-Softmax|leave one"},
    // samples
    {STEP " --sample_every 1 --tokenizer nowhere.model", "nowhere.model"},
    {STEP " --sample_every 1 --dataset wide", "--tokenizer bytes has 258 tokens, the data 300|--sample_every 0"},
    // spelling and numbers
    {STEP " --learningrate 1", "unknown flag --learningrate|did you mean --learning_rate"},
    {STEP " -n 3", "unknown flag -n"},
    {STEP " many", "unexpected 'many'"},
    {STEP " --seed", "--seed: the value is missing"},
    {STEP " --learning_rate --seed 1", "--learning_rate: the value is missing"},
    {STEP " --no-seed", "--seed is no switch"},
    {STEP " --num_iterations 0", "--num_iterations: found '0'|from 1"},
    {STEP " --num_iterations -5", "--num_iterations: found '-5'"},
    {STEP " --num_iterations 1.5", "--num_iterations: found '1.5'"},
    {STEP " --num_iterations 10x", "--num_iterations: found '10x'"},
    {STEP " --batch_size 0", "--batch_size: found '0'"},
    {STEP " --learning_rate 0", "--learning_rate: found '0'"},
    {STEP " --learning_rate nan", "--learning_rate: found 'nan'"},
    {STEP " --learning_rate -1", "--learning_rate: found '-1'"},
    {STEP " --learning_rate_decay_frac 1.5", "--learning_rate_decay_frac: found '1.5'|from 0 to 1"},
    {STEP " --grad_clip -1", "--grad_clip: found '-1'"},
    {STEP " --top_p 0", "--top_p: found '0'"},
    {STEP " --keep_checkpoints 0", "--keep_checkpoints: found '0'"},
    {STEP " --recompute=maybe", "--recompute: found 'maybe'|true or false"},
};

static void test_refusals(void** state) {
    (void)state;
    char* log = text("%s/refused", scratch);
    dataset_folder("empty");
    Folder folder = dataset_folder("broken");
    write_file(&folder, "part.bin", "bad", 3);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        Run r = run_flags("refused", refused[i].flags);
        assert_refused(&r, refused[i].words);
        assert_int_equal(count_words(r.err, "\n"), 1);
        assert_false(file_exists(log));
        run_free(&r);
    }
    free(log);
}

// A token outside the vocabulary is found when it is read.
static void test_bad_token(void** state) {
    (void)state;
    Run r = run_flags("bad_token", STEP " --dataset outside --num_iterations 9");
    assert_refused(&r, "outside.bin: token id 300 at token 140|below the vocabulary of 258");
    run_free(&r);
    Run blocked = run_flags("data/easy/part_0000.bin", STEP);
    assert_refused(&blocked, "cannot create directory|part_0000.bin");
    run_free(&blocked);
}

// ----------------------------------------------------------------------------
// what --help prints

// A value for a flag of the help: what it takes is behind its name, a word's choices are in the text.
static const char* value_for(const char* name, const char* line, char word[32]) {
    const char* takes = line + strlen("  --") + strlen(name);
    switch (takes[0] == ' ' ? takes[1] : ' ') {
        case 'N': return "8";
        case 'X': return strstr(name, "_theta") ? "2" : "1";
        case 'T': return "x";
        case 'W':
            assert_int_equal(sscanf(strstr(line, "of:") + 3, " %31[a-z0-9_]", word), 1);
            return strcmp(word, "number") == 0 ? "0.5" : word;
        default: return "";
    }
}

// Alone on a command line, a flag that parses leads to the complaint about what is missing.
static void check_flag(const char* name, const char* value) {
    const char* formats[] = {"--%s %s", "--%s=%s", "--%s"};
    for (size_t f = *value ? 0 : 2; f < (*value ? 2 : 3); f++) {
        char flags[128];
        snprintf(flags, sizeof flags, formats[f], name, value);
        Run r = run_train(flags);
        bool needs = strcmp(name, "checkpoint_args") == 0;
        assert_refused(&r, needs ? "needs --checkpoint" : "missing --");
        run_free(&r);
    }
}

static void test_help(void** state) {
    (void)state;
    Run r = run_train("--help");
    assert_true(exited_with(&r, 0));
    assert_string_equal(r.err, "");
    size_t flags = 0;
    for (const char *line = r.out, *end; (end = strchr(line, '\n')); line = end + 1) {
        assert_true(end - line <= 80);
        char name[64], word[32];
        if (strncmp(line, "  --", 4) != 0 || sscanf(line + 4, "%63[a-z0-9_]", name) != 1) { continue; }
        check_flag(name, value_for(name, line, word));
        flags++;
    }
    assert_true(flags >= 60);
    run_free(&r);
}

// ----------------------------------------------------------------------------
// what is accepted

// The published command, with smaller dimensions so that it trains in no time.
static void test_published_command(void** state) {
    (void)state;
    char* flags = text(
        " --num_iterations=3 --tokens_per_step=128 --position_encoding=bam_ssmax --model_size=l12 --compile "
        "--tensorcores --val_loss_every=32 --dtype=%s --val_tokens=128 --val_tokens_padding=64 --batch_size=2 "
        "--sequence_length=32 --warmup_iters=1 --learning_rate=1e-3 --learning_rate_decay_frac=0.1 --weight_decay=0.1 "
        "--grad_clip=1.0 --prior_lr=0.1 --thata_beta_init=0.5 --theta_alpha_init=slope --device=cpu --sample_every=0 "
        "--dim=32 --n_heads=2",
        has_bfloat16() ? "bfloat16" : "float32");
    Run r = run_flags("published", flags);
    assert_true(exited_with(&r, 0));
    char* folder = text("%s/published/l12/bam_ssmax/version_00", scratch);
    assert_folder(folder, "args.json checkpoints eval.log model.safetensors optimizer.safetensors train.log ");
    run_free(&r);
    free(flags), free(folder);
}

// Any of the three ways to say how much, in dataset_args.
static void test_rounding(void** state) {
    (void)state;
    static const struct {
        const char* flags;
        int tokens, validation, accumulation;
    } rows[] = {
        {" --tokens_per_step 128 --val_tokens 0", 128, 0, 2},
        {" --min_tokens_per_step 129 --min_val_tokens 65 --val_tokens_padding 0", 192, 128, 3},
        {" --max_tokens_per_step 127 --max_val_tokens 191 --val_tokens_padding 0", 64, 128, 1},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *log = text("round_%zu", i), *flags = text("%s%s --num_iterations 1", MODEL, rows[i].flags);
        Run r = run_flags(log, flags);
        assert_true(exited_with(&r, 0));
        char* path = run_file(log, "nope", "args.json");
        cJSON *json = read_json(path), *args = cJSON_GetObjectItem(json, "dataset_args");
        assert_int_equal(cJSON_GetObjectItem(args, "tokens_per_batch")->valueint, rows[i].tokens);
        assert_int_equal(cJSON_GetObjectItem(args, "val_tokens")->valueint, rows[i].validation);
        assert_int_equal(cJSON_GetObjectItem(args, "grad_accum_steps")->valueint, rows[i].accumulation);
        cJSON_Delete(json);
        run_free(&r);
        free(log), free(flags), free(path);
    }
}

// 7 steps of 2857 tokens and the last target are all of the data: nothing is left when it starts again.
static void test_epoch_without_a_rest(void** state) {
    (void)state;
    Run r = run_flags("epoch", STEP " --batch_size 2857 --sequence_length 7 --tokens_per_step 19999 --dim 16");
    assert_true(exited_with(&r, 0));
    assert_non_null(strstr(r.out, "epoch 1: the data starts again\n"));
    run_free(&r);
    Run rest = run_flags("rest", STEP " --batch_size 312 --sequence_length 64 --tokens_per_step 19968 --dim 16");
    assert_non_null(strstr(rest.out, "epoch 1: the data starts again; its last 31 tokens were too few for a step\n"));
    run_free(&rest);
}

// Each flag, on top of the same run, changes the weights that come out of it.
static void test_effects(void** state) {
    (void)state;
    static const char* const effects[] = {
        "",
        "--seed 1",
        "--optimizer adamw",
        "--weight_decay 0.5",
        "--grad_clip 0.01",
        "--learning_rate 0.02",
        "--learning_rate_decay_frac 0.1",
        "--learning_rate_decay_frac 0.1 --lr_scheduler linear",
        "--warmup_iters 4",
        "--prior_lr 0.5",
        "--no_seq_scale",
        "--no-theta_alpha_trainable",
        "--no-theta_beta_trainable",
        "--theta_mu_trainable",
        "--theta_alpha_init slope",
        "--thata_beta_init linear",
        "--theta_beta_init 0.25",
        "--theta_mu_init 1",
        "--ssmax_prior outside",
    };
    enum { EFFECTS = sizeof effects / sizeof *effects };
    char* models[EFFECTS];
    for (size_t i = 0; i < EFFECTS; i++) {
        char *log = text("effect_%zu", i), *flags = text("%s%s --num_iterations 8 --learning_rate 0.01 %s", STEP,
                                                         " --position_encoding bam_ssmax", effects[i]);
        Run r = run_flags(log, flags);
        assert_true(exited_with(&r, 0));
        models[i] = run_file(log, "bam_ssmax", "model.safetensors");
        for (size_t j = 0; j < i; j++) {
            if (weights_distance(models[i], models[j]) == 0) {
                print_error("no difference between '%s' and '%s'\n", effects[i], effects[j]);
                fail();
            }
        }
        run_free(&r);
        free(log), free(flags);
    }
    for (size_t i = 0; i < EFFECTS; i++) { free(models[i]); }
}

// What is not trained keeps its first value exactly.
static void test_frozen(void** state) {
    (void)state;
    static const struct {
        const char *flags, *tensor;
        float value;
    } rows[] = {
        {"--no_seq_scale", "layers.1.attention.seq_scale", 1.0f},
        {"--prior_lr 0 --theta_beta_init 0.25", "layers.0.attention.prior.theta_beta", 0.25f},
        {"--no-theta_alpha_trainable --theta_alpha_init 0.5", "layers.1.attention.prior.theta_alpha", 0.5f},
        {"--theta_mu_init -0.5", "layers.0.attention.prior.theta_mu", -0.5f},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *log = text("frozen_%zu", i),
             *flags = text("%s --num_iterations 8 --weight_decay 0.5 %s", STEP, "--position_encoding bam_ssmax");
        char* all = text("%s %s", flags, rows[i].flags);
        Run r = run_flags(log, all);
        assert_true(exited_with(&r, 0));
        char* path = run_file(log, "bam_ssmax", "model.safetensors");
        SafeTensors file = safetensors_open(path);
        const SafeTensor* t = safetensors_find(&file, rows[i].tensor);
        float values[2];
        assert_true(t && t->count == 2);
        safetensors_read_f32(values, t);
        assert_true(values[0] == rows[i].value && values[1] == rows[i].value);
        safetensors_close(&file);
        run_free(&r);
        free(log), free(flags), free(all), free(path);
    }
}

// ----------------------------------------------------------------------------
// what follows from the arguments, and model_args

// Validation tokens that nobody asked for are whole batches, at most the published number.
static void test_default_validation(void** state) {
    (void)state;
    static const struct {
        const char *batch, *length;
        size_t ranks, tokens;
    } rows[] = {{"64", "512", 1, 3932160},
                {"18", "512", 1, 3926016},
                {"36", "512", 1, 3926016},
                {"36", "512", 3, 3926016 - 3926016 % (36 * 512 * 3)},
                {"4096", "4096", 1, 16777216}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        TrainArgs a;
        char program[] = "train_gpt", batch[] = "--batch_size", length[] = "--sequence_length";
        char* argv[] = {program, batch, (char*)rows[i].batch, length, (char*)rows[i].length, NULL};
        Options o = train_options(&a);
        options_parse(&o, 5, argv);
        assert_int_equal(train_val_tokens(&a, &o, rows[i].ranks), rows[i].tokens);
        options_free(&o);
    }
}

#define GOOD_ARGS "\"dim\": 32, \"n_layers\": 1, \"n_heads\": 2, \"vocab_size\": 258"

static void read_model_args(void* json) {
    model_config_from_json(cJSON_Parse((const char*)json), "rotary", 256, "run/args.json");
}

// Sizes are bounded as those of the flags are; of two equal names the first counts.
static void test_model_args_refusals(void** state) {
    (void)state;
    static const struct {
        const char *json, *words[4];
    } rows[] = {
        {"{\"n_layers\": 1e12, " GOOD_ARGS "}", {"run/args.json: model_args.n_layers = 1e+12", "from 1 to 1000", NULL}},
        {"{\"n_layers\": 0, " GOOD_ARGS "}", {"model_args.n_layers = 0", NULL}},
        {"{\"dim\": 1048576, " GOOD_ARGS "}", {"model_args.dim", "to 65536", NULL}},
        {"{\"n_heads\": 2048, " GOOD_ARGS "}", {"model_args.n_heads", "to 1024", NULL}},
        {"{\"n_kv_heads\": 1e300, " GOOD_ARGS "}", {"model_args.n_kv_heads", NULL}},
        {"{\"vocab_size\": 1e12, " GOOD_ARGS "}", {"model_args.vocab_size", "to 2147483648", NULL}},
        {"{\"ffn_dim_multiplier\": 1e9, " GOOD_ARGS "}", {"model_args.ffn_dim_multiplier", "1048576", NULL}},
        {"{\"ffn_dim_multiplier\": -1, " GOOD_ARGS "}", {"model_args.ffn_dim_multiplier", NULL}},
        {"{\"rope_theta\": 0, " GOOD_ARGS "}", {"model_args.rope_theta = 0", "1.000001", NULL}},
        {"{\"dim\": \"32\", " GOOD_ARGS "}", {"model_args.dim", "not a number", NULL}},
    };
    char good[] = "{" GOOD_ARGS "}";
    read_model_args(good);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        expect_fatal(read_model_args, (void*)rows[i].json, rows[i].words);
    }
}

static void plan_too_much(void* unused) {
    (void)unused;
    const char* json = "{\"dim\": 65536, \"n_layers\": 1000, \"n_heads\": 1024, \"vocab_size\": 2147483648}";
    ModelConfig c = model_config_from_json(cJSON_Parse(json), "bam_ssmax", -1, "run/args.json");
    ModelPlan plan = {MODE_TRAIN, 1 << 20, 1 << 24, 1, 1 << 24, 0, 1};
    Model m;
    model_plan(&m, &c, &plan);
}

// Sizes whose products no size_t holds are refused before anything is made of them.
static void test_sizes_that_overflow(void** state) {
    (void)state;
    static const char* const words[] = {"1048576 x 16777216 tokens", "--batch_size", NULL};
    expect_fatal(plan_too_much, NULL, words);
}

static void compare_model_args(void* pair) {
    const char* const* json = (const char* const*)pair;
    model_args_check_same(cJSON_Parse(json[0]), cJSON_Parse(json[1]), "run");
}

// A field that the published classes do not know is written only where it is not the default; read, both are the same.
static void test_model_args_defaults(void** state) {
    (void)state;
    const char* same[][2] = {{"{\"ssmax_prior\": \"inside\"}", "{}"},
                             {"{}", "{\"ssmax_prior\": \"inside\"}"},
                             {"{\"sinusoidal_freqs\": \"bam\"}", "{}"},
                             {"{\"ssmax_prior\": \"outside\"}", "{\"ssmax_prior\": \"outside\"}"}};
    const char* other[][2] = {{"{\"ssmax_prior\": \"inside\"}", "{\"ssmax_prior\": \"outside\"}"},
                              {"{}", "{\"ssmax_prior\": \"outside\"}"},
                              {"{\"sinusoidal_freqs\": \"vaswani\"}", "{}"}};
    static const char* const words[] = {"run: model has", "the flags ask for", NULL};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) { compare_model_args(same[i]); }
    for (size_t i = 0; i < sizeof other / sizeof *other; i++) { expect_fatal(compare_model_args, other[i], words); }
}

static void make_special_dataset(const char* name, size_t vocab_size, size_t bad_token) {
    Folder folder = dataset_folder(name);
    ShardInfo info = {2, 2000, vocab_size, BYTES_BOS, BYTES_EOS, 1};
    uint32_t* tokens = xcalloc(info.token_count, sizeof(uint32_t));
    if (bad_token) { tokens[bad_token] = 300; }
    char* file = text("%s.bin", name);
    write_shard(&folder, file, &info, tokens);
    free(tokens), free(file);
}

int main(void) {
    scratch_create();
    make_special_dataset("wide", 300, 0);
    make_special_dataset("outside", BYTES_VOCAB, 140);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_bad_token),
        cmocka_unit_test(test_help),
        cmocka_unit_test(test_published_command),
        cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_epoch_without_a_rest),
        cmocka_unit_test(test_effects),
        cmocka_unit_test(test_frozen),
        cmocka_unit_test(test_default_validation),
        cmocka_unit_test(test_model_args_refusals),
        cmocka_unit_test(test_sizes_that_overflow),
        cmocka_unit_test(test_model_args_defaults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
