/*
The run that is evaluated: args.json and the weights, which are opened once. Step, encoding, configuration and weights
all come from that one open file, so a training that saves meanwhile changes nothing; args.json, which people edit and
copy, must agree with it.
*/
#ifndef RUN_FOLDER_H
#define RUN_FOLDER_H

#include "checkpoint.h"
#include "tokenizer.h"

typedef struct {
    cJSON *json, *saved;  // args.json; what the weights say of their model (they hold the configuration's strings)
    SafeTensors weights;
    ModelConfig config;
    const char *encoding, *step;
    uint64_t weights_hash;
    int bos, eos;             // of the data, -1 = unknown
    uint32_t tokenizer_hash;  // 0 = unknown
} RunFolder;

static inline const cJSON* run_section(const cJSON* json, const char* name, const char* path) {
    const cJSON* section = cJSON_GetObjectItemCaseSensitive(json, name);
    if (!cJSON_IsObject(section)) {
        fatal("%s: no object \"%s\"; the file is damaged or of another program: restore it", path, name);
    }
    return section;
}

// A whole number of a section, `standard` where it is missing.
static inline double run_number(const cJSON* section, const char* name, double standard, double least, double most,
                                const char* path) {
    const cJSON* item = cJSON_GetObjectItemCaseSensitive(section, name);
    if (!item || cJSON_IsNull(item)) { return standard; }
    double x = cJSON_IsNumber(item) ? item->valuedouble : NAN;
    if (!(x >= least && x <= most && x == floor(x))) {
        fatal("%s: dataset_args.%s is no whole number from %.0f to %.0f; the file is damaged: restore it", path, name,
              least, most);
    }
    return x;
}

// A sample of every tensor, all of which change with every step.
static inline uint64_t run_weights_hash(const SafeTensors* file) {
    enum { SAMPLE = 4096 };
    uint64_t hash = 0;
    for (size_t i = 0; i < file->count; i++) {
        const SafeTensor* t = &file->tensors[i];
        uint64_t part[2] = {hash, fnv1a(t->data, t->bytes < SAMPLE ? t->bytes : (size_t)SAMPLE)};
        hash = fnv1a(part, sizeof part);
    }
    return hash;
}

static inline SafeTensors run_open_weights(const char* folder) {
    char* path = text("%s/model.safetensors", folder);
    if (!file_exists(path)) { fatal("%s: not found; let train_gpt save a checkpoint of this run first", path); }
    SafeTensors file = safetensors_open(path);
    free(path);
    return file;
}

static inline bool run_ends_with(const char* s, const char* end) {
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

// Fields of model_args that say how the model was trained: a run may go on with other ones.
static inline bool run_may_differ(const char* field) {
    static const char* const fields[] = {"max_batch_size", "max_seq_len"};
    bool listed = false;
    for (int i = 0; i < MODEL_OPTION_COUNT; i++) {
        listed = listed || ((model_option(i)->kept & MODEL_MAY_CHANGE) && strcmp(field, model_option(i)->field) == 0);
    }
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) { listed = listed || strcmp(field, fields[i]) == 0; }
    return listed || strncmp(field, "train_", 6) == 0 || run_ends_with(field, "_init");
}

// A field as text, "none" where it is missing; release with free().
static inline char* run_printed(const cJSON* o, const char* field) {
    const cJSON* item = cJSON_GetObjectItemCaseSensitive(o, field);
    char *json = item ? cJSON_PrintUnformatted(item) : NULL, *printed = xstrdup(json ? json : "none");
    cJSON_free(json);
    return printed;
}

// Refuses a field of the weights' model that args.json does not have, or has another value of. Both are written anew
// from the configurations, so that fields which are left out mean the same as their defaults.
static inline void run_check_fields(const RunFolder* run, const cJSON* from, const cJSON* found, const cJSON* said) {
    const cJSON* item;
    cJSON_ArrayForEach(item, from) {
        const char* field = item->string;
        const cJSON* a = cJSON_GetObjectItemCaseSensitive(found, field);
        const cJSON* b = cJSON_GetObjectItemCaseSensitive(said, field);
        if (run_may_differ(field) || (a && b && cJSON_Compare(a, b, true))) { continue; }
        fatal("%s: weights of a model with %s = %s, args.json says %s; restore the files of one run", run->weights.path,
              field, run_printed(found, field), run_printed(said, field));
    }
}

// What both args.json and the weights may say of the data's tokenizer, -1 = unknown: that of the weights counts.
static inline double run_mark(const RunFolder* run, const char* key, int base, const char* name, double said) {
    const char* recorded = safetensors_metadata(&run->weights, key);
    double saved = recorded ? (double)strtoll(recorded, NULL, base) : -1;
    if (saved < 0 || saved > (base == 16 ? UINT32_MAX : INT32_MAX) || (base == 16 && saved == 0)) { return said; }
    if (said >= 0 && said != saved) {
        fatal("%s: weights of data with %s %.0f, args.json says %.0f; restore the files of one run", run->weights.path,
              name, saved, said);
    }
    return saved;
}

// The configuration that the weights name; where they are of another program and name none, that of args.json, whose
// shapes are checked when they are read.
static inline void run_configure(RunFolder* run, const cJSON* model, const char* path) {
    const char* saved_encoding = safetensors_metadata(&run->weights, "position_encoding");
    const char* saved = safetensors_metadata(&run->weights, "model_args");
    if (saved_encoding && strcmp(saved_encoding, run->encoding) != 0) {
        fatal("%s: weights of a model with %s, args.json says %s; restore the files of one run", run->weights.path,
              saved_encoding, run->encoding);
    }
    run->config = model_config_from_json(model, run->encoding, run->bos, path);
    if (!saved) { return; }
    run->saved = cJSON_Parse(saved);
    if (!cJSON_IsObject(run->saved)) {
        fatal("%s: the metadata's model_args are no JSON object; the file is damaged: use another checkpoint",
              run->weights.path);
    }
    ModelConfig config = model_config_from_json(run->saved, run->encoding, run->bos, run->weights.path);
    cJSON *found = model_args_json(&config, 1, 1), *said = model_args_json(&run->config, 1, 1);
    run_check_fields(run, found, found, said);
    run_check_fields(run, said, found, said);
    run->config = config;
    cJSON_Delete(found);
    cJSON_Delete(said);
}

// Opens and checks the run; ends the program if its files are missing, damaged, or not of one run.
static inline RunFolder run_folder_open(const char* folder) {
    RunFolder run;
    memset(&run, 0, sizeof run);
    char* path = text("%s/args.json", folder);
    if (!file_exists(path)) {
        fatal("%s: no args.json, expected the folder of a run such as logs/l12/bam_ssmax/version_00; correct --log_dir",
              folder);
    }
    run.weights = run_open_weights(folder);
    run.json = read_json(path);
    const cJSON *args = run_section(run.json, "args", path), *model = run_section(run.json, "model_args", path);
    const cJSON* dataset = run_section(run.json, "dataset_args", path);
    run.encoding = model_arg_text(args, "position_encoding", NULL);
    if (!run.encoding) { fatal("%s: no args.position_encoding; the file is damaged: restore it", path); }
    double hash = run_number(dataset, "tokenizer_hash", 0, 0, UINT32_MAX, path);
    run.bos = (int)run_mark(&run, "bos", 10, "BOS", run_number(dataset, "bos", -1, -1, INT32_MAX, path));
    run.eos = (int)run_mark(&run, "eos", 10, "EOS", run_number(dataset, "eos", -1, -1, INT32_MAX, path));
    hash = run_mark(&run, "tokenizer_hash", 16, "tokenizer hash", hash > 0 ? hash : -1);
    run.tokenizer_hash = hash > 0 ? (uint32_t)hash : 0;
    run_configure(&run, model, path);
    const char* step = safetensors_metadata(&run.weights, "step");
    run.step = step ? step : "unknown";
    run.weights_hash = run_weights_hash(&run.weights);
    free(path);
    return run;
}

static inline void run_folder_close(RunFolder* run) {
    safetensors_close(&run->weights);
    cJSON_Delete(run->json);
    cJSON_Delete(run->saved);
}

// Refuses a tokenizer that is not that of the run's data.
static inline void run_check_tokenizer(const RunFolder* run, const Tokenizer* t, const char* folder) {
    const char *name = tokenizer_name(t), *advice = "give the tokenizer of the run's data";
    if (tokenizer_vocab_size(t) != run->config.V) {
        fatal("--tokenizer %s has %zu tokens, the model of %s has %zu; %s", name, tokenizer_vocab_size(t), folder,
              run->config.V, advice);
    }
    if (run->tokenizer_hash && tokenizer_hash(t) != run->tokenizer_hash) {
        fatal("--tokenizer %s has hash %08x, the data of %s was made with %08x; %s", name, tokenizer_hash(t), folder,
              run->tokenizer_hash, advice);
    }
    const struct {
        const char* what;
        int has, trained;
    } marks[] = {{"BOS", tokenizer_bos(t), run->bos}, {"EOS", tokenizer_eos(t), run->eos}};
    for (size_t i = 0; i < 2; i++) {
        if (marks[i].trained >= 0 && marks[i].has != marks[i].trained) {
            fatal("--tokenizer %s has token %d as %s, the data of %s has %d; %s", name, marks[i].has, marks[i].what,
                  folder, marks[i].trained, advice);
        }
    }
}

// The weights into the model, which was built from the run's configuration.
static inline void run_load_weights(const RunFolder* run, Model* model) {
    const SafeTensors* file = &run->weights;
    for (size_t i = 0; i < file->count; i++) {
        const char* name = file->tensors[i].name;
        bool learned = strstr(name, "seq_scale") || strstr(name, "prior.") || strstr(name, "position_embeddings");
        if (learned && !model_find_tensor(model, name)) {
            fatal("%s: has a tensor %s, which a model with %s has not; restore the files of one run", file->path, name,
                  run->encoding);
        }
    }
    checkpoint_load_weights(model, file);
}

#endif
