/*
The option table: every spelling, every refusal, --help, the printed settings, JSON out and in.
*/
#include "test_util.h"

#include "../llmc/options.h"

typedef struct {
    const char *dataset, *checkpoint_args, *dtype, *thata_beta_init;
    size_t batch_size, num_iterations, warmup_iters, min_tokens_per_step, tokens_per_step, val_tokens, max_val_tokens;
    double learning_rate, prior_lr, theta_mu_init;
    bool global_prior, no_seq_scale, shuffle, compile;
    OptionList passkey_seq_lens, prompts;
} Args;

static Options make_options(Args* o) {
    memset(o, 0xff, sizeof *o);  // every field must be set by the table
    Option rows[] = {
        OPT_GROUP("Data"),
        OPT_STRING(o->dataset, "10B", "token shards in data/NAME"),
        OPT_STRING(o->checkpoint_args, NULL,
                   "take arguments from the args.json of an earlier run; the command line wins over it"),
        OPT_SIZE(o->batch_size, "4", 1, 1 << 20, "sequences per forward pass and rank"),
        option_one_of("tokens", option_required(OPT_SIZE(o->min_tokens_per_step, NULL, 1, OPTION_MAX,
                                                         "tokens per step, rounded up to whole passes"))),
        option_one_of("tokens",
                      option_required(OPT_SIZE(o->tokens_per_step, NULL, 1, OPTION_MAX, "tokens per step, exactly"))),
        option_one_of("val", OPT_SIZE(o->val_tokens, "3_932_160", 0, OPTION_MAX, "tokens held out")),
        option_one_of("val", OPT_SIZE(o->max_val_tokens, NULL, 0, OPTION_MAX, "at most so many tokens held out")),
        OPT_GROUP("Optimisation"),
        option_required(OPT_SIZE(o->num_iterations, NULL, 1, OPTION_MAX, "optimizer steps")),
        OPT_SIZE(o->warmup_iters, "0", 0, OPTION_MAX, "steps of linear warm-up"),
        OPT_DOUBLE(o->learning_rate, "1e-3", 0, 100, "peak learning rate"),
        OPT_DOUBLE(o->prior_lr, NULL, 0, HUGE_VAL, "learning rate of the prior, if another one"),
        OPT_CHOICE(o->dtype, "float32", "float32 bfloat16", "precision of the matrix products"),
        OPT_GROUP("Position encoding"),
        option_alias("theta_beta_init",
                     OPT_CHOICE(o->thata_beta_init, "0", "number linear sampled", "first value of theta_beta")),
        OPT_DOUBLE(o->theta_mu_init, "0", -HUGE_VAL, HUGE_VAL, "first value of theta_mu"),
        OPT_BOOL(o->global_prior, "0", "one prior for all layers"),
        OPT_BOOL(o->no_seq_scale, "0", "no learned scale"),
        OPT_BOOL(o->shuffle, "1", "shuffle the shards"),
        OPT_SIZES(o->passkey_seq_lens, "512,1_024", 0, 1 << 20, "prompt lengths"),
        OPT_STRINGS(o->prompts, NULL, "texts to continue"),
        OPT_IGNORED(o->compile, "accepted, changes nothing"),
    };
    return options_create("train_gpt", "Trains a model of the Llama kind with one of several position encodings.", rows,
                          sizeof rows / sizeof *rows);
}

enum { MAX_WORDS = 32 };

// Splits at blanks; "~" stands for an empty argument.
static int split(const char* line, char* buffer, char** argv) {
    static char program[] = "train_gpt", empty[] = "";
    int argc = 1;
    argv[0] = program;
    strcpy(buffer, line);
    for (char* word = strtok(buffer, " "); word; word = strtok(NULL, " ")) {
        assert_true(argc < MAX_WORDS - 1);
        argv[argc++] = strcmp(word, "~") == 0 ? empty : word;
    }
    argv[argc] = NULL;
    return argc;
}

// A parsed table; strings in it live in the static buffer until the next call.
static Options parse(Args* args, const char* line) {
    static char buffer[1024];
    char* argv[MAX_WORDS];
    int argc = split(line, buffer, argv);
    Options o = make_options(args);
    options_parse(&o, argc, argv);
    return o;
}

static void test_defaults(void** state) {
    (void)state;
    Args a;
    Options o = parse(&a, "");
    assert_string_equal(a.dataset, "10B");
    assert_null(a.checkpoint_args);
    assert_int_equal(a.batch_size, 4);
    assert_int_equal(a.num_iterations, 0);
    assert_int_equal(a.val_tokens, 3932160);
    assert_true(a.learning_rate == 1e-3 && isnan(a.prior_lr));
    assert_true(!a.global_prior && a.shuffle && !a.compile);
    assert_int_equal(a.passkey_seq_lens.count, 2);
    assert_int_equal(a.passkey_seq_lens.sizes[1], 1024);
    assert_int_equal(a.prompts.count, 0);
    assert_int_equal(options_source(&o, "batch_size"), OPTION_FROM_DEFAULT);
    assert_int_equal(options_source(&o, "prior_lr"), OPTION_UNSET);
    options_free(&o);
}

// What a command line makes of one option, seen through its JSON.
static void test_spellings(void** state) {
    (void)state;
    static const struct {
        const char *line, *option, *json;
    } cases[] = {
        {"--batch_size 7", "batch_size", "7"},
        {"--batch_size=7", "batch_size", "7"},
        {"--batch_size 7 --batch_size=9", "batch_size", "9"},  // the last one wins
        {"--num_iterations 589_824", "num_iterations", "589824"},
        {"--num_iterations=999999999999999", "num_iterations", "999999999999999"},
        {"--warmup_iters 007", "warmup_iters", "7"},
        {"--learning_rate 1e-4", "learning_rate", "0.0001"},
        {"--learning_rate=.5", "learning_rate", "0.5"},
        {"--learning_rate 0.12345678901234567", "learning_rate", "0.123456789012346"},
        {"--theta_mu_init -1", "theta_mu_init", "-1"},
        {"--theta_mu_init=-1.5e-2", "theta_mu_init", "-0.015"},
        {"--thata_beta_init -1", "thata_beta_init", "-1"},
        {"--theta_beta_init linear", "thata_beta_init", "\"linear\""},
        {"--theta_beta_init=2.5", "thata_beta_init", "2.5"},
        {"--global_prior", "global_prior", "true"},
        {"--global_prior 0", "global_prior", "false"},
        {"--global_prior true", "global_prior", "true"},
        {"--global_prior=false", "global_prior", "false"},
        {"--global_prior --no-global_prior", "global_prior", "false"},
        {"--global_prior --batch_size 1", "global_prior", "true"},
        {"--shuffle=0", "shuffle", "false"},
        {"--no-shuffle", "shuffle", "false"},
        {"--no_seq_scale", "no_seq_scale", "true"},
        {"--no_seq_scale 1", "no_seq_scale", "true"},
        {"--no-no_seq_scale", "no_seq_scale", "false"},
        {"--compile", "compile", "true"},
        {"--compile 1", "compile", "true"},
        {"--compile=0", "compile", "false"},
        {"--no-compile", "compile", "false"},
        {"--dataset -weird", "dataset", "\"-weird\""},
        {"--dataset=--odd", "dataset", "\"--odd\""},
        {"--dataset=a=b", "dataset", "\"a=b\""},
        {"--dtype bfloat16", "dtype", "\"bfloat16\""},
        {"--passkey_seq_lens 1,2,3", "passkey_seq_lens", "[1,2,3]"},
        {"--passkey_seq_lens 1 2 3 --compile", "passkey_seq_lens", "[1,2,3]"},
        {"--passkey_seq_lens=16_384", "passkey_seq_lens", "[16384]"},
        {"--prompts one two", "prompts", "[\"one\",\"two\"]"},
        {"--max_val_tokens 5", "max_val_tokens", "5"},
        {"--max_val_tokens 5", "val_tokens", "null"},  // a default gives way to a row that excludes it
        {"", "val_tokens", "3932160"},
        {"", "prior_lr", "null"},
        {"", "prompts", "null"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Args a;
        Options o = parse(&a, cases[i].line);
        cJSON* json = options_to_json(&o);
        char* got = cJSON_PrintUnformatted(cJSON_GetObjectItemCaseSensitive(json, cases[i].option));
        if (strcmp(got, cases[i].json) != 0) { print_error("'%s' gave %s\n", cases[i].line, got); }
        assert_string_equal(got, cases[i].json);
        free(got);
        cJSON_Delete(json);
        options_free(&o);
    }
}

static void parse_and_check(void* line) {
    Args a;
    Options o = parse(&a, (const char*)line);
    options_check(&o);
    options_free(&o);
}

#define GOOD "--num_iterations 1 --tokens_per_step 1 "

static void test_refusals(void** state) {
    (void)state;
    static const struct {
        const char *line, *words[5];
    } cases[] = {
        {"--batchsize 4", {"--batchsize", "did you mean --batch_size?", "see --help", NULL}},
        {"--batch-size=4", {"unknown flag --batch-size ", "did you mean --batch_size?", NULL}},
        {"--learning 4", {"did you mean --learning_rate?", NULL}},
        {"--theta_beta_int 4", {"did you mean --theta_beta_init?", NULL}},
        {"--no_global_prior", {"did you mean --no-global_prior?", NULL}},
        {"--no-seq_scale", {"did you mean --no_seq_scale?", NULL}},
        {"-batch_size 4", {"unknown flag -batch_size", "did you mean --batch_size?", NULL}},
        {"--zzzzzzzz", {"unknown flag --zzzzzzzz; see --help", NULL}},
        {"--", {"unknown flag --;", NULL}},
        {"-", {"unknown flag -;", NULL}},
        {"train", {"unexpected 'train'", "see --help", NULL}},
        {"-5", {"unexpected '-5'", NULL}},
        {"--global_prior 2", {"'2' after --global_prior", "switches take 0, 1, true, false", NULL}},
        {"--global_prior=yes", {"--global_prior", "'yes'", "0, 1, true or false", NULL}},
        {"--global_prior=", {"--global_prior", "''", NULL}},
        {"--no-global_prior=1", {"--no-global_prior takes no value", NULL}},
        {"--no-dataset", {"--dataset is no switch", NULL}},
        {"--batch_size", {"--batch_size", "missing", "see --help", NULL}},
        {"--batch_size --compile", {"--batch_size", "missing", NULL}},
        {"--dataset ~", {"--dataset", "found ''", "not empty", NULL}},
        {"--batch_size ~", {"--batch_size", "found ''", "whole number from 1 to 1048576", NULL}},
        {"--batch_size=", {"found ''", NULL}},
        {"--batch_size 12abc", {"--batch_size: found '12abc', expected a whole number from 1 to 1048576", NULL}},
        {"--batch_size 1e6", {"'1e6'", NULL}},
        {"--batch_size 4.0", {"'4.0'", NULL}},
        {"--batch_size -4", {"'-4'", NULL}},
        {"--batch_size +4", {"'+4'", NULL}},
        {"--batch_size 0", {"'0'", "from 1", NULL}},
        {"--batch_size 1048577", {"'1048577'", NULL}},
        {"--batch_size 4_", {"'4_'", NULL}},
        {"--batch_size _4", {"'_4'", NULL}},
        {"--batch_size 4__0", {"'4__0'", NULL}},
        {"--batch_size 0x10", {"'0x10'", NULL}},
        {"--num_iterations 1000000000000000", {"999999999999999", NULL}},
        {"--num_iterations 18446744073709551617", {"'18446744073709551617'", NULL}},
        {"--learning_rate 1e-3x", {"'1e-3x'", "a number from 0 to 100", NULL}},
        {"--learning_rate nan", {"'nan'", NULL}},
        {"--learning_rate inf", {"'inf'", NULL}},
        {"--prior_lr 1e999", {"'1e999'", NULL}},
        {"--prior_lr -1", {"'-1'", "from 0", NULL}},
        {"--learning_rate 1e-999", {"'1e-999'", NULL}},
        {"--learning_rate 0x1p3", {"'0x1p3'", NULL}},
        {"--learning_rate 101", {"'101'", NULL}},
        {"--learning_rate ~", {"''", NULL}},
        {"--learning_rate .", {"'.'", NULL}},
        {"--learning_rate 1_0", {"'1_0'", NULL}},
        {"--dtype float16", {"--dtype", "'float16'", "one of:", NULL}},
        {"--dtype float", {"'float'", NULL}},
        {"--thata_beta_init number", {"'number'", NULL}},
        {"--thata_beta_init slope", {"number linear sampled", NULL}},
        {"--passkey_seq_lens 1,,2", {"--passkey_seq_lens", "''", NULL}},
        {"--passkey_seq_lens 1 x", {"'x'", "whole numbers from 0 to 1048576", NULL}},
        {"--passkey_seq_lens", {"missing", NULL}},
        {"--prompts a,", {"--prompts", "''", NULL}},
        {"--tokens_per_step 1 --min_tokens_per_step 1", {"--min_tokens_per_step", "--tokens_per_step", NULL}},
        {"--num_iterations 1", {"missing --min_tokens_per_step or --tokens_per_step", "see --help", NULL}},
        {"--tokens_per_step 1", {"missing --num_iterations", "optimizer steps", NULL}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        expect_fatal(parse_and_check, (void*)cases[i].line, cases[i].words);
    }
    char good[] = GOOD;
    parse_and_check(good);
}

// What a function prints, in a static buffer.
static char* printed(void (*print)(const Options*, FILE*), const Options* o) {
    static char buffer[8192];
    FILE* f = fmemopen(buffer, sizeof buffer, "w");
    print(o, f);
    assert_true(ftell(f) < (long)sizeof buffer - 1);
    fclose(f);
    return buffer;
}

static void assert_lines_fit(const char* s) {
    for (; *s; s += strcspn(s, "\n") + 1) {
        if (strcspn(s, "\n") > 80) { print_error("too wide: %.*s\n", (int)strcspn(s, "\n"), s); }
        assert_true(strcspn(s, "\n") <= 80);
        assert_true(s[0] == '\n' || s[strcspn(s, "\n") - 1] != ' ');
    }
}

// Every flag that --help prints parses, every row is printed, nothing is wider than 80 columns.
static void test_help(void** state) {
    (void)state;
    Args a;
    Options o = make_options(&a);
    char* help = printed(options_print_help, &o);
    assert_lines_fit(help);
    for (size_t i = 0; i < o.count; i++) { assert_non_null(strstr(help, o.rows[i].name)); }
    static const char* const parts[] = {"\nData\n", "\nOptimisation\n", "default 3_932_160", "required", "one of:"};
    for (size_t i = 0; i < 5; i++) { assert_non_null(strstr(help, parts[i])); }
    size_t flags = 0;
    for (const char* c = strstr(help, "\n\n"); (c = strstr(c, "--")) != NULL;) {
        size_t n = strspn(c, "abcdefghijklmnopqrstuvwxyz_-");
        char flag[64], line[128];
        snprintf(flag, sizeof flag, "%.*s", (int)n, c);
        c += n;
        if (strcmp(flag, "--help") == 0) { continue; }
        const Option* r = options_find(&o, flag + 2, n - 2);
        if (!r) { r = options_find(&o, flag + 5, n - 5); }  // --no-flag
        assert_non_null(r);
        bool number = r->type == OPTION_SIZE || r->type == OPTION_SIZES || r->type == OPTION_DOUBLE;
        snprintf(line, sizeof line, "%s %s", flag,
                 option_is_switch(r)     ? ""
                 : number || !r->choices ? "1"
                                         : r->default_text);
        Args again;
        Options parsed = parse(&again, line);
        assert_int_equal(options_source(&parsed, r->name), OPTION_FROM_COMMAND_LINE);
        options_free(&parsed);
        flags++;
    }
    assert_true(flags >= o.count - 3 + 1);  // all rows but three headings, and an alias
    options_free(&o);
}

// --help and -h win over everything else on the line and exit with status 0.
static void test_help_exits(void** state) {
    (void)state;
    static const char* const lines[] = {"--help", "-h", "--nonsense -h"};
    for (size_t i = 0; i < 3; i++) {
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            if (!freopen("/dev/null", "w", stdout)) { _exit(2); }
            Args a;
            parse(&a, lines[i]);
            _exit(3);
        }
        int status;
        waitpid(child, &status, 0);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

static void test_settings(void** state) {
    (void)state;
    Args a;
    Options o = parse(&a, GOOD
                      "--global_prior --no-shuffle --compile --prompts a b --dataset "
                      "a/very/long/path/which/does/not/fit/into/half/a/line");
    char* s = printed(options_print_settings, &o);
    assert_lines_fit(s);
    static const char* const shown[] = {
        "dataset ....", " a/very/long/path", "shuffle ....", " no", "global_prior ....", " yes", " a,b"};
    static const char* const hidden[] = {"prior_lr", "compile", "no_seq_scale", "min_tokens", "batch_size", "512,1024"};
    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++) { assert_non_null(strstr(s, shown[i])); }
    for (size_t i = 0; i < sizeof hidden / sizeof *hidden; i++) { assert_null(strstr(s, hidden[i])); }
    // Aligned: the right column begins at 42 and full lines have 80 columns.
    for (const char* line = s; *line; line += strcspn(line, "\n") + 1) {
        size_t n = strcspn(line, "\n");
        assert_true(n == 80 || n == 38);
        if (n == 80 && strncmp(line + 38, "    ", 4) != 0) { assert_non_null(memchr(line, '/', n)); }
    }
    options_free(&o);
}

// Every kind of value survives JSON text exactly.
static void test_json_round_trip(void** state) {
    (void)state;
    Args a, b;
    Options first = parse(&a, GOOD
                          "--learning_rate 0.30000000000000004 --prior_lr 1e-300 --global_prior --prompts x y "
                          "--theta_beta_init sampled --compile");
    cJSON* json = options_to_json(&first);
    char* string = cJSON_Print(json);
    cJSON* parsed = cJSON_Parse(string);
    Options second = make_options(&b);
    options_from_json(&second, parsed, "args.json");
    options_check(&second);
    cJSON* again = options_to_json(&second);
    assert_true(cJSON_Compare(json, again, true));
    assert_true(a.learning_rate == b.learning_rate && a.prior_lr == b.prior_lr);
    assert_true(b.global_prior && b.compile && b.num_iterations == 1 && b.min_tokens_per_step == 0);
    assert_string_equal(b.prompts.items[1], "y");
    assert_string_equal(b.thata_beta_init, "sampled");
    assert_int_equal(options_source(&second, "num_iterations"), OPTION_FROM_JSON);
    Random r = random_stream(1, 0);
    double whole;
    assert_true(option_parse_whole("999_999_999_999_999", 0, HUGE_VAL, &whole) && whole == OPTION_MAX);
    assert_false(option_parse_whole("1000000000000000", 0, HUGE_VAL, &whole));  // JSON text would lose digits
    for (size_t i = 0; i < 2000; i++) {
        char number[32];
        snprintf(number, sizeof number, "%.17g", random_normal(&r) * pow(10, random_normal(&r) * 20));
        double value = NAN, back = NAN;
        assert_true(option_parse_double(number, -HUGE_VAL, HUGE_VAL, &value));
        cJSON* item = cJSON_CreateNumber(value);
        char* digits = cJSON_PrintUnformatted(item);
        assert_true(option_parse_double(digits, -HUGE_VAL, HUGE_VAL, &back) && back == value);
        free(digits);
        cJSON_Delete(item);
    }
    free(string);
    cJSON_Delete(json);
    cJSON_Delete(parsed);
    cJSON_Delete(again);
    options_free(&first);
    options_free(&second);
}

static void test_command_line_wins_over_json(void** state) {
    (void)state;
    Args a;
    Options o = parse(&a, "--batch_size 4 --tokens_per_step 100 --no-shuffle");
    cJSON* json = cJSON_Parse(
        "{\"batch_size\": 64, \"min_tokens_per_step\": 7, \"num_iterations\": 20, \"shuffle\": true, \"global_prior\": "
        "1,"
        " \"max_val_tokens\": 9, \"theta_beta_init\": -2, \"dataset\": null, \"prompts\": [], \"passkey_seq_lens\": "
        "[8]}");
    options_from_json(&o, json, "args.json");
    cJSON_Delete(json);
    options_check(&o);
    assert_int_equal(a.batch_size, 4);  // the same as the default, but given
    assert_int_equal(a.tokens_per_step, 100);
    assert_int_equal(a.min_tokens_per_step, 0);  // excluded by the command line
    assert_int_equal(a.num_iterations, 20);
    assert_true(!a.shuffle && a.global_prior);
    assert_true(a.max_val_tokens == 9 && a.val_tokens == 0);  // wins over the default it excludes
    assert_string_equal(a.thata_beta_init, "-2");
    assert_string_equal(a.dataset, "10B");
    assert_true(a.passkey_seq_lens.count == 1 && a.passkey_seq_lens.sizes[0] == 8);
    options_free(&o);
}

static void check_text(void* dataset) {
    Args a;
    Options o = make_options(&a);
    char program[] = "train_gpt", flag[] = "--dataset";
    char* argv[] = {program, flag, (char*)dataset, NULL};
    options_parse(&o, 3, argv);
    options_check_text(&o, "dtype");  // another option's
    options_check_text(&o, NULL);
    options_free(&o);
}

// What is recorded as JSON must be UTF-8: the shortest form, no surrogates, nothing beyond U+10FFFF.
static void test_text_that_json_cannot_hold(void** state) {
    (void)state;
    static const char* const good[] = {"10B",          "caf\xC3\xA9",      "\xE2\x96\x81",     "\xED\x9F\xBF",
                                       "\xEE\x80\x80", "\xF0\x9F\x98\x80", "\xF4\x8F\xBF\xBF", "a\tb"};
    static const char* const bad[] = {"caf\xE9",          "\x80",     "\xC3",
                                      "a\xC3z",           "\xC0\xAF", "\xE0\x80\x80",
                                      "\xED\xA0\x80",     "\xE2\x96", "\xF0\x80\x80\x80",
                                      "\xF4\x90\x80\x80", "\xFE",     "\xF0\x9F\x98"};
    static const char* const words[] = {"--dataset", "not UTF-8", NULL};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) { check_text((void*)good[i]); }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) { expect_fatal(check_text, (void*)bad[i], words); }
}

static void load_json(void* string) {
    Args a;
    Options o = make_options(&a);
    options_from_json(&o, cJSON_Parse((const char*)string), "run/args.json");
    options_free(&o);
}

static void test_json_refusals(void** state) {
    (void)state;
    static const struct {
        const char *json, *words[4];
    } cases[] = {
        {"{\"batch_size\": 1.5}", {"run/args.json: batch_size", "'1.5'", NULL}},
        {"{\"batch_size\": -1}", {"run/args.json: batch_size", "'-1'", NULL}},
        {"{\"batch_size\": 1e15}", {"'1e+15'", NULL}},
        {"{\"batch_size\": \"x\"}", {"'x'", "whole number", NULL}},
        {"{\"batch_size\": true}", {"batch_size", "truth value", NULL}},
        {"{\"batch_size\": [1]}", {"batch_size", "nested", NULL}},
        {"{\"dataset\": {}}", {"dataset", "nested", NULL}},
        {"{\"passkey_seq_lens\": [1, null]}", {"passkey_seq_lens", "''", NULL}},
        {"{\"dtype\": \"int8\"}", {"dtype", "'int8'", "float32 bfloat16", NULL}},
        {"{\"global_prior\": 2}", {"global_prior", "'2'", NULL}},
        {"[1]", {"run/args.json", "object", NULL}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        expect_fatal(load_json, (void*)cases[i].json, cases[i].words);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_spellings),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_help),
        cmocka_unit_test(test_help_exits),
        cmocka_unit_test(test_settings),
        cmocka_unit_test(test_json_round_trip),
        cmocka_unit_test(test_command_line_wins_over_json),
        cmocka_unit_test(test_text_that_json_cannot_hold),
        cmocka_unit_test(test_json_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
