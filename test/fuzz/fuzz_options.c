/*
Command lines of train_gpt and evaluate. Input: which program, then the words, one a line. What is accepted must come
back from args.json as it was, and the model and the step that follow from it be computed or refused.
*/
#include "fuzz.h"

#include "../../llmc/eval/evaluate_args.h"
#include "../../llmc/train_args.h"

enum { MAX_WORDS = 200, EVALUATE = 1 };

static Options create(bool evaluate, TrainArgs* train, EvaluateArgs* evaluation) {
    return evaluate ? evaluate_options(evaluation) : train_options(train);
}

// Through JSON and back.
static void check_round_trip(const Options* given, bool evaluate) {
    TrainArgs train = {0};
    EvaluateArgs evaluation = {0};
    cJSON *json = options_to_json(given), *again;
    char* printed = cJSON_Print(json);
    cJSON* read = cJSON_Parse(printed);
    if (!read) { abort(); }
    Options fresh = create(evaluate, &train, &evaluation);
    options_from_json(&fresh, read, "fuzz");
    again = options_to_json(&fresh);
    if (!cJSON_Compare(json, again, true)) {
        fprintf(stderr, "given %s\nread back %s\n", printed, cJSON_Print(again));
        abort();
    }
    options_free(&fresh);
    cJSON_Delete(json);
    cJSON_Delete(again);
    cJSON_Delete(read);
    cJSON_free(printed);
}

static void fuzz_one(const uint8_t* data, size_t size) {
    bool evaluate = fuzz_take(&data, &size) & EVALUATE;
    char *words = (char*)xcalloc(size + 1, 1), *argv[MAX_WORDS + 2] = {(char*)(uintptr_t) "fuzz"};
    memcpy(words, data, size);
    int argc = 1;
    for (char* word = words; argc <= MAX_WORDS && word < words + size;) {
        argv[argc++] = word;
        word += strcspn(word, "\n");
        *word++ = '\0';
    }
    TrainArgs train = {0};
    EvaluateArgs evaluation = {0};
    Options options = create(evaluate, &train, &evaluation);
    options_parse(&options, argc, argv);
    options_check(&options);
    options_print_settings(&options, stdout);
    check_round_trip(&options, evaluate);
    if (evaluate) {
        evaluate_check(&evaluation);
    } else {
        PosKind encoding;
        bool ssmax;
        if (!posenc_parse(train.position_encoding, &encoding, &ssmax)) { abort(); }
        train_model_config(&train, encoding, ssmax, 258, 256);
        size_t tokens = train_tokens_per_step(&train, 3), batch = train.batch_size * train.sequence_length * 3;
        if (batch && tokens % batch != 0) { abort(); }
        train_val_tokens(&train, &options, 3);
    }
    options_free(&options);
    free(words);
}

static void fuzz_seeds(void) {
    static const char* const train[] = {
        "--help",
        "--dataset\nmytext\n--num_iterations\n200\n--tokens_per_step\n32768\n--position_encoding\nbam_ssmax\n"
        "--model_size\nl6\n--sequence_length\n512\n--batch_size\n8\n--learning_rate\n1e-3\n--val_tokens\n65536",
        "--num_iterations=5\n--min_tokens_per_step=1_000\n--global_prior\n--no-overlap_communication\n--compile\n"
        "true\n--theta_beta_init\nslope\n--theta_mu_init\n-0.5\n--batch_size=4\n--sequence_length=32",
        "--max_tokens_per_step\n99\n--dim\n64\n--n_heads\n4\n--n_kv_heads\n2\n--ffn_dim\n128\n--bacth_size\n1",
        "--checkpoint\nlogs/run\n--checkpoint_args\n--sample_prompt\nb\xC3\xA9\"\\\t\x01\n--num_iterations\n1",
    };
    static const char* const evaluate[] = {
        "--log_dir\nlogs/run\n--passkey_seq_lens\n512,8192\n262144\n--passkey_sampling\nrandom",
        "--log_dir=logs/run\n--score=a.txt\n--out=b.csv\n--no-force\n--perplexity=0\n--seed\n123456789012345",
        "-h",
    };
    for (size_t i = 0; i < sizeof train / sizeof *train; i++) { fuzz_seed_text(0, train[i]); }
    for (size_t i = 0; i < sizeof evaluate / sizeof *evaluate; i++) { fuzz_seed_text(EVALUATE, evaluate[i]); }
}
