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
    const PosencInfo* info = posenc_info(c->encoding);
    const bool learned = posenc_params(c->encoding) > 0;
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
    if (info->mechanism == POSENC_ROTATE) { cJSON_AddNumberToObject(o, "rope_theta", c->posenc.rotary_theta); }
    if (info->mechanism == POSENC_ADD) {
        cJSON_AddNumberToObject(o, "sinusoidal_theta", c->posenc.sinusoidal_theta);
        // only where it is not the published code's way, which knows no such field
        if (c->posenc.sinusoidal_vaswani) { cJSON_AddStringToObject(o, "sinusoidal_freqs", "vaswani"); }
    }
    const PosencSettings* settings = &c->posenc.settings;
    if (c->encoding == POS_SANDWICH) { cJSON_AddNumberToObject(o, "sandwich_dim", (double)settings->sandwich_dim); }
    if (c->encoding == POS_ALIBI && settings->alibi_geometric) {
        cJSON_AddStringToObject(o, "alibi_slopes", "geometric");  // fields of published runs stay as they are
    }
    for (int t = 0; t < POSENC_TENSOR_COUNT; t++) {
        const PosencTensor* tensor = posenc_tensor(t);
        if (tensor->owner != c->encoding) { continue; }
        cJSON_AddStringToObject(o, tensor->init_name, c->posenc.init[t]);
        cJSON_AddBoolToObject(o, tensor->train_name, c->posenc.trained[t]);
    }
    if (learned) { cJSON_AddBoolToObject(o, "global_positional_encoding", c->global_prior); }
    if (c->ssmax) { cJSON_AddBoolToObject(o, "seq_scale", c->train_seq_scale); }
    if (c->ssmax && info->inside && !c->bias_inside) { cJSON_AddStringToObject(o, "ssmax_prior", "outside"); }
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

// A base of wavelengths, as the flags bound it.
static inline double model_arg_theta(const cJSON* o, const char* path, const char* name, double standard) {
    double x = model_arg_number(o, path, name, standard);
    if (!(x >= MODEL_MIN_THETA && x <= MODEL_MAX_THETA)) {
        fatal("%s: model_args.%s = %g, expected a number from %.15g to %g; the run folder is damaged", path, name, x,
              MODEL_MIN_THETA, MODEL_MAX_THETA);
    }
    return x;
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
    const PosencInfo* info = posenc_info(c.encoding);
    c.posenc = posenc_default_options();
    c.posenc.rotary_theta = model_arg_theta(o, path, "rope_theta", c.posenc.rotary_theta);
    c.posenc.sinusoidal_theta = model_arg_theta(o, path, "sinusoidal_theta", c.posenc.sinusoidal_theta);
    c.posenc.sinusoidal_vaswani = strcmp(model_arg_text(o, "sinusoidal_freqs", "bam"), "vaswani") == 0;
    c.posenc.settings.alibi_geometric = strcmp(model_arg_text(o, "alibi_slopes", "published"), "geometric") == 0;
    c.posenc.settings.sandwich_dim =
        model_arg_size(o, path, "sandwich_dim", c.posenc.settings.sandwich_dim, SANDWICH_MAX_DIM);
    for (int t = 0; t < POSENC_TENSOR_COUNT; t++) {
        const PosencTensor* tensor = posenc_tensor(t);
        c.posenc.init[t] = model_arg_text(o, tensor->init_name, c.posenc.init[t]);
        c.posenc.trained[t] = model_arg_bool(o, tensor->train_name, c.posenc.trained[t]);
    }
    c.global_prior = model_arg_bool(o, "global_positional_encoding", false) && posenc_params(c.encoding) > 0;
    c.bias_inside = info->inside && strcmp(model_arg_text(o, "ssmax_prior", "inside"), "inside") == 0;
    c.train_seq_scale = model_arg_bool(o, "seq_scale", true);
    model_config_check(&c);
    return c;
}

// A field as JSON, or what stands for it where it is missing; a new string.
static inline char* model_arg_print(const cJSON* o, const char* name, const char* missing) {
    const cJSON* item = cJSON_GetObjectItemCaseSensitive(o, name);
    if (!item) { return missing ? text("\"%s\"", missing) : xstrdup("none"); }
    char *json = cJSON_PrintUnformatted(item), *copy = xstrdup(json);
    cJSON_free(json);
    return copy;
}

// Ends the program when the model of a checkpoint is not the one that the flags describe, naming the field.
// Batch size and sequence length may differ; initial values and what is trained may too.
static inline void model_args_check_same(const cJSON* checkpoint, const cJSON* wanted, const char* path) {
    // a text that stands for a missing field
    static const struct {
        const char *name, *missing;
    } fields[] = {{"dim", NULL},
                  {"n_layers", NULL},
                  {"n_heads", NULL},
                  {"n_kv_heads", NULL},
                  {"vocab_size", NULL},
                  {"ffn_dim_multiplier", NULL},
                  {"rope_theta", NULL},
                  {"sinusoidal_theta", NULL},
                  {"sinusoidal_freqs", "bam"},
                  {"alibi_slopes", "published"},
                  {"sandwich_dim", NULL},
                  {"global_positional_encoding", NULL},
                  {"ssmax_prior", "inside"}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        char* found = model_arg_print(checkpoint, fields[i].name, fields[i].missing);
        char* asked = model_arg_print(wanted, fields[i].name, fields[i].missing);
        bool same = strcmp(found, asked) == 0;
        if (same) {
            free(found), free(asked);
            continue;
        }
        fatal(
            "%s: model has %s = %s, the flags ask for %s; use the run's flags (--checkpoint_args), or --init_from to "
            "start another model from these weights",
            path, fields[i].name, found, asked);
    }
}

#endif
