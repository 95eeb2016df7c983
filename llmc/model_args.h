/*
A model's configuration as JSON: the `model_args` of a run folder and the metadata of a checkpoint, under
the published system's field names, both ways; and the check that two configurations are the same model.
*/
#ifndef MODEL_ARGS_H
#define MODEL_ARGS_H

#include <cjson/cJSON.h>

#include "model_config.h"

// The multiplier that the published code turns back into F: int(multiplier * dim).
static inline double ffn_dim_multiplier(const ModelConfig* c) {
    double multiplier = (double)c->F / (double)c->C;
    while ((size_t)(multiplier * (double)c->C) < c->F) { multiplier = nextafter(multiplier, INFINITY); }
    return multiplier;
}

// A new object with the fields that apply to this model.
static inline cJSON* model_args_json(const ModelConfig* c, size_t batch_size, size_t sequence_length) {
    cJSON* o = cJSON_CreateObject();
    cJSON_AddNumberToObject(o, "dim", (double)c->C);
    cJSON_AddNumberToObject(o, "n_layers", (double)c->L);
    cJSON_AddNumberToObject(o, "n_heads", (double)c->NH);
    cJSON_AddNumberToObject(o, "n_kv_heads", (double)c->NKV);
    cJSON_AddNumberToObject(o, "vocab_size", (double)c->V);
    cJSON_AddNumberToObject(o, "multiple_of", 1);
    cJSON_AddNumberToObject(o, "ffn_dim_multiplier", ffn_dim_multiplier(c));
    cJSON_AddNumberToObject(o, "norm_eps", 1e-5);
    cJSON_AddNumberToObject(o, "max_batch_size", (double)batch_size);
    cJSON_AddNumberToObject(o, "max_seq_len", (double)sequence_length);
    model_options_to_json(o, &c->options, c->encoding, c->ssmax);
    for (int t = 0; t < POSENC_TENSOR_COUNT; t++) {
        const PosencTensor* tensor = posenc_tensor(t);
        if (tensor->owner != c->encoding) { continue; }
        cJSON_AddStringToObject(o, tensor->init_name, c->posenc.init[t]);
        cJSON_AddBoolToObject(o, tensor->train_name, c->posenc.trained[t]);
    }
    return o;
}

static inline double model_arg_number(const cJSON* o, const char* path, const char* name, double standard) {
    const cJSON* item = cJSON_GetObjectItemCaseSensitive(o, name);
    if (cJSON_IsNumber(item)) { return item->valuedouble; }
    if ((!item || cJSON_IsNull(item)) && standard >= 0) { return standard; }
    fatal("%s: model_args.%s is missing or not a number; the run folder is damaged or of another program", path, name);
}

// A whole number from 1 to `most`; `standard` where it is missing, unless that is 0.
static inline size_t model_arg_size(const cJSON* o, const char* path, const char* name, size_t standard, size_t most) {
    double x = model_arg_number(o, path, name, standard > 0 ? (double)standard : -1);
    if (!(x >= 1 && x <= (double)most && x == floor(x))) {
        fatal("%s: model_args.%s = %g, expected a whole number from 1 to %zu; the run folder is damaged", path, name, x,
              most);
    }
    return (size_t)x;
}

static inline const char* model_arg_text(const cJSON* o, const char* name, const char* standard) {
    const cJSON* item = cJSON_GetObjectItemCaseSensitive(o, name);
    return cJSON_IsString(item) ? item->valuestring : standard;
}

static inline bool model_arg_bool(const cJSON* o, const char* name, bool standard) {
    const cJSON* item = cJSON_GetObjectItemCaseSensitive(o, name);
    return cJSON_IsBool(item) ? cJSON_IsTrue(item) : standard;
}

// The configuration behind model_args and the encoding's name; path is for messages. Strings stay those of o.
static inline ModelConfig model_config_from_json(const cJSON* o, const char* encoding, int bos, const char* path) {
    ModelConfig c;
    memset(&c, 0, sizeof c);
    c.C = model_arg_size(o, path, "dim", 0, MODEL_MAX_DIM);
    c.L = model_arg_size(o, path, "n_layers", 0, MODEL_MAX_LAYERS);
    c.NH = model_arg_size(o, path, "n_heads", 0, MODEL_MAX_HEADS);
    c.NKV = model_arg_size(o, path, "n_kv_heads", c.NH, MODEL_MAX_HEADS);
    c.V = model_arg_size(o, path, "vocab_size", 0, (size_t)1 << 31);
    double multiplier = model_arg_number(o, path, "ffn_dim_multiplier", 2), width = multiplier * (double)c.C;
    if (!(width >= 8 && width < MODEL_MAX_FFN_DIM + 1)) {
        fatal("%s: model_args.ffn_dim_multiplier = %g, expected a width of 8 to %d; the run folder is damaged", path,
              multiplier, MODEL_MAX_FFN_DIM);
    }
    c.F = (size_t)width;
    c.bos = bos;
    if (!posenc_parse(encoding, &c.encoding, &c.ssmax)) { fatal("%s: unknown position_encoding '%s'", path, encoding); }
    c.options = model_options_from_json(o, path);
    c.posenc = posenc_default_options();
    for (int t = 0; t < POSENC_TENSOR_COUNT; t++) {
        const PosencTensor* tensor = posenc_tensor(t);
        c.posenc.init[t] = model_arg_text(o, tensor->init_name, c.posenc.init[t]);
        c.posenc.trained[t] = model_arg_bool(o, tensor->train_name, c.posenc.trained[t]);
    }
    model_config_check(&c);
    return c;
}

// Ends the program when a field of a checkpoint's model is not the one that the flags describe. by_default: what a
// missing field means, or NULL.
static inline void model_args_check_field(const cJSON* checkpoint, const cJSON* wanted, const char* field,
                                          const cJSON* by_default, const char* path) {
    const cJSON* found = cJSON_GetObjectItemCaseSensitive(checkpoint, field);
    const cJSON* asked = cJSON_GetObjectItemCaseSensitive(wanted, field);
    found = found ? found : by_default, asked = asked ? asked : by_default;
    if ((!found && !asked) || cJSON_Compare(found, asked, true)) { return; }
    fatal(
        "%s: model has %s = %s, the flags ask for %s; use the run's flags (--checkpoint_args), or --init_from to "
        "start another model from these weights",
        path, field, found ? cJSON_PrintUnformatted(found) : "none", asked ? cJSON_PrintUnformatted(asked) : "none");
}

// Ends the program when the model of a checkpoint is not the one that the flags describe, naming the field.
// Batch size and sequence length may differ; initial values and what is trained may too.
static inline void model_args_check_same(const cJSON* checkpoint, const cJSON* wanted, const char* path) {
    static const char* const sizes[] = {"dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "ffn_dim_multiplier"};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        model_args_check_field(checkpoint, wanted, sizes[i], NULL, path);
    }
    const ModelOptions standard = model_default_options();
    for (int i = 0; i < MODEL_OPTION_COUNT; i++) {
        if (model_option(i)->kept & MODEL_MAY_CHANGE) { continue; }
        cJSON* by_default = model_option_json(i, &standard);
        model_args_check_field(checkpoint, wanted, model_option(i)->field, by_default, path);
        cJSON_Delete(by_default);
    }
}

#endif
