/*
args.json and results.json of a run folder. Input: which of them, then the file. Arguments are read as a resumed run and
as evaluate read them, up to the plan of the model's memory; results as evaluate reads and merges them.
*/
#include "fuzz.h"

#include "../../llmc/eval/evaluate_args.h"
#include "../../llmc/model.h"
#include "../../llmc/model_args.h"
#include "../../llmc/eval/results.h"
#include "../../llmc/train_args.h"

enum { RESULTS = 1, RESUME = 2 };

static void read_arguments(const char* path, bool resume) {
    cJSON* json = read_json(path);
    const cJSON *args = cJSON_GetObjectItemCaseSensitive(json, "args"),
                *model = cJSON_GetObjectItemCaseSensitive(json, "model_args");
    if (resume) {
        TrainArgs train = {0};
        Options options = train_options(&train);
        options_from_json(&options, args, path);
        options_check(&options);
        PosKind encoding;
        bool ssmax;
        if (!posenc_parse(train.position_encoding, &encoding, &ssmax)) { abort(); }
        ModelConfig config = train_model_config(&train, encoding, ssmax, 258, 256);
        cJSON* asked = model_args_json(&config, 1, 1);
        model_args_check_same(model, asked, path);
        cJSON_Delete(asked);
        options_free(&options);
    } else {
        const char* encoding = model_arg_text(args, "position_encoding", "bam");
        ModelConfig config = model_config_from_json(model, encoding, 256, path);
        cJSON* again = model_args_json(&config, 1, 1);
        model_args_check_same(again, again, path);
        cJSON_Delete(again);
        Model planned;
        const ModelPlan plan = {MODE_INFERENCE, 1, 16, 1, 64, 0, 1};
        ModelMemory memory = model_plan(&planned, &config, &plan);
        if (model_memory_total(&memory) < memory.parameters) { abort(); }
        free(planned.tensors);
        free(planned.segments);
    }
    cJSON_Delete(json);
}

static void put_passkey(cJSON* root, const cJSON* of, const cJSON* outdated) {
    char* key = results_passkey_key("equidistant", 2, 5, 0);
    cJSON* entry = results_passkey(root, key, of, outdated);
    for (size_t length = 64; length <= 256; length += 96) {
        int place, found = results_find_length(entry, length, &place);
        if (found >= 0) {
            results_accuracy(entry, "accs", found);
            results_accuracy(entry, "natural", found);
        }
    }
    const double depths[] = {0, 1};
    const int hits[] = {1, 0};
    PasskeyResult result = {160, 2, 0.5, 0.5, 1, depths, hits};
    results_put_length(entry, &result);
    int place;
    bool found = results_find_passkey(root, key, of) == entry && results_find_length(entry, 160, &place) >= 0;
    if (!results_passkey_is_whole(entry) || !found) { abort(); }
    free(key);
}

static void put_perplexity(cJSON* root, const cJSON* of, const cJSON* outdated) {
    static const char* const arrays[] = {"perplexity", "positions", "standard_error"};
    cJSON* entry = cJSON_CreateObject();
    cJSON_AddNumberToObject(entry, "window_size", 16);
    cJSON_AddStringToObject(entry, "dataset_dir", "data/a");
    cJSON_AddNumberToObject(entry, "mean", 2);
    for (size_t i = 0; i < 3; i++) {
        cJSON_AddItemToArray(cJSON_AddArrayToObject(entry, arrays[i]), cJSON_CreateNumber(7));
    }
    cJSON_AddItemToObject(entry, "of", cJSON_Duplicate(of, true));
    results_put_perplexity(root, entry, outdated);
    if (!results_find_perplexity(root, entry)) { abort(); }
}

static void read_results(const uint8_t* data, size_t size) {
    fuzz_named_file("results.json", data, size);
    Results results = results_open(fuzz_folder);
    cJSON* of = cJSON_CreateObject();
    cJSON_AddStringToObject(of, "step", "12");
    cJSON_AddStringToObject(of, "weights", "1234");
    put_passkey(results.root, of, NULL);
    put_perplexity(results.root, of, of);
    char* printed = cJSON_Print(results.root);
    cJSON* again = cJSON_Parse(printed);
    if (!again) { abort(); }
    cJSON_free(printed);
    cJSON_Delete(again);
    cJSON_Delete(of);
    results_close(&results);
}

static void fuzz_one(const uint8_t* data, size_t size) {
    uint8_t choice = fuzz_take(&data, &size);
    if (choice & RESULTS) {
        read_results(data, size);
    } else {
        read_arguments(fuzz_file(data, size), choice & RESUME);
    }
}

static void seed_arguments(const char* encoding) {
    TrainArgs train = {0};
    Options options = train_options(&train);
    char* argv[] = {"fuzz",
                    "--num_iterations",
                    "5",
                    "--tokens_per_step",
                    "64",
                    "--model_size",
                    "l2",
                    "--batch_size",
                    "2",
                    "--sequence_length",
                    "32",
                    "--position_encoding",
                    (char*)(uintptr_t)encoding,
                    NULL};
    options_parse(&options, sizeof argv / sizeof *argv - 1, argv);
    PosKind kind;
    bool ssmax;
    if (!posenc_parse(encoding, &kind, &ssmax)) { abort(); }
    ModelConfig config = train_model_config(&train, kind, ssmax, 258, 256);
    cJSON* json = cJSON_CreateObject();
    cJSON_AddItemToObject(json, "args", options_to_json(&options));
    cJSON_AddItemToObject(json, "model_args", model_args_json(&config, 2, 32));
    char* printed = cJSON_PrintUnformatted(json);
    fuzz_seed_text(0, printed);
    fuzz_seed_text(RESUME, printed);
    cJSON_free(printed);
    cJSON* model = cJSON_CreateObject();  // the model alone, where changes of a few bytes matter more
    cJSON_AddItemToObject(model, "model_args", model_args_json(&config, 2, 32));
    printed = cJSON_PrintUnformatted(model);
    fuzz_seed_text(0, printed);
    cJSON_free(printed);
    cJSON_Delete(model);
    cJSON_Delete(json);
    options_free(&options);
}

static void fuzz_seeds(void) {
    static const char* const encodings[] = {"nope", "sinusoidal", "rotary_ssmax", "alibi", "bam_ssmax"};
    for (size_t i = 0; i < sizeof encodings / sizeof *encodings; i++) { seed_arguments(encodings[i]); }
    static const char* const sizes[] = {
        // that no memory holds, and whose products overflow
        "\"dim\":8,\"n_layers\":1e12,\"n_heads\":1,\"vocab_size\":2",
        "\"dim\":1e12,\"n_layers\":1,\"n_heads\":1e11,\"vocab_size\":2147483648",
        "\"dim\":8,\"n_layers\":1,\"n_heads\":1,\"vocab_size\":2147483648,\"ffn_dim_multiplier\":1e5",
        "\"dim\":65536,\"n_layers\":1000,\"n_heads\":1024,\"vocab_size\":2147483648,\"ffn_dim_multiplier\":16",
        "\"dim\":8,\"n_layers\":-1,\"n_heads\":1.5,\"vocab_size\":0,\"ffn_dim_multiplier\":1e999",
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char* json = text("{\"model_args\":{%s}}", sizes[i]);
        fuzz_seed_text(0, json);
        free(json);
    }
    fuzz_seed_text(RESULTS, "{}");
    fuzz_seed_text(RESULTS, "{\"passkey\":null,\"perplexity\":[{\"window_size\":16,\"dataset_dir\":\"data/a\"}]}");
    fuzz_seed_text(
        RESULTS,
        "{\"passkey\":{\"('equidistant', 2, 5, 0)\":{\"seq_lens\":[64,256],\"accs\":[1,0],\"greedy\":[1,0],"
        "\"natural\":[1,0.5],\"depths\":[[0,1],[0,1]],\"hits\":[[1,1],[0,0]],\"of\":{\"step\":\"12\"}}},"
        "\"perplexity\":[{\"window_size\":16,\"seq_len\":64,\"ntokens\":9,\"dataset_dir\":\"data/a\",\"mean\":"
        "7.5,\"perplexity\":[7,8],\"positions\":[16,32],\"standard_error\":[0.1,null],\"of\":{\"step\":\"11\","
        "\"weights\":\"12\"}}],\"passkey_others\":[{\"key\":"
        "\"('equidistant', 2, 5, 0)\"}],\"perplexity_others\":[{}]}");
}
