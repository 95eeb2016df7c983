/*
What flags say of a model beyond its sizes and what its encoding learns: each flag once, in one list. train_gpt's option
table, the fields of model_args (in args.json and checkpoints) and the comparison of two models walk it.

To add a flag: one row here, and the code that reads `config->options.NAME`.
*/
#ifndef MODEL_OPTIONS_H
#define MODEL_OPTIONS_H

#include "options.h"
#include "posenc.h"

#define MODEL_MIN_THETA 1.000001
#define MODEL_MAX_THETA 1e12
enum { MODEL_MAX_WINDOW = 1 << 24, MODEL_MAX_POSITIONS = 1 << 24 };

// How a field of model_args is kept.
enum {
    MODEL_ALWAYS = 1,  // written where it applies; otherwise only when it is not the default, since programs of others
                       // read these files and know no such field
    MODEL_MAY_CHANGE = 2,  // a run may go on with another value
    MODEL_INVERTED = 4,    // the field says the opposite of the flag
    MODEL_OF_SEQUENCE = 8  // 0 is the run's --sequence_length, and recorded as that: other lengths do not change it
};

/*
X(type, flag, field of model_args, how it is kept, where it applies, default, least, most, words, what it is)
type: SIZE (size_t, 0 without a default), DOUBLE (double, NAN without a default), BOOL, CHOICE (const char*, one of the
words), STRING. It applies where the expression is true for any layer, `is` its encoding (PosencInfo), `learns` whether
that learns anything, `ssmax` whether it has Scalable-Softmax. A flag that does not apply is accepted and changes
nothing, as sweeps over encodings want.
*/
#define MODEL_OPTIONS_OF_ROPE_SCALING(X)                                                                               \
    X(CHOICE, rope_scaling, rope_type, 0, is->mechanism == POSENC_ROTATE, "none", 0, 0, "none linear ntk yarn llama3", \
      "slows the rotation down, to read beyond the original length")                                                   \
    X(DOUBLE, rope_factor, rope_factor, 0, is->mechanism == POSENC_ROTATE, NULL, 1, 1e6, NULL,                         \
      "of --rope_scaling: how many times the original length")                                                         \
    X(SIZE, rope_original_length, original_max_position_embeddings, 0, is->mechanism == POSENC_ROTATE, "0", 0,         \
      MODEL_MAX_POSITIONS, NULL,                                                                                       \
      "of yarn and llama3: tokens of a sequence in the training before; evaluate: in that of the run")                 \
    X(DOUBLE, rope_beta_fast, beta_fast, 0, is->mechanism == POSENC_ROTATE, "32", 1e-6, 1e9, NULL,                     \
      "of yarn: channels that turn more often in the original length are left alone")                                  \
    X(DOUBLE, rope_beta_slow, beta_slow, 0, is->mechanism == POSENC_ROTATE, "1", 1e-6, 1e9, NULL,                      \
      "of yarn: those that turn less often are slowed down by the factor")                                             \
    X(DOUBLE, rope_attention_factor, attention_factor, 0, is->mechanism == POSENC_ROTATE, NULL, 0.01, 100, NULL,       \
      "of yarn: multiplies rotated queries and keys, instead of 0.1 ln(factor) + 1")                                   \
    X(DOUBLE, rope_low_freq_factor, low_freq_factor, 0, is->mechanism == POSENC_ROTATE, "1", 1e-6, 1e9, NULL,          \
      "of llama3: channels that turn less often in the original length are slowed down by the factor")                 \
    X(DOUBLE, rope_high_freq_factor, high_freq_factor, 0, is->mechanism == POSENC_ROTATE, "4", 1e-6, 1e9, NULL,        \
      "of llama3: those that turn more often are left alone")

#define MODEL_OPTIONS_OF_ENCODINGS(X)                                                                                  \
    X(CHOICE, sinusoidal_freqs, sinusoidal_freqs, 0, is->mechanism == POSENC_ADD, "bam", 0, 0, "bam vaswani",          \
      "exponents of the sinusoids")                                                                                    \
    X(DOUBLE, sinusoidal_theta, sinusoidal_theta, MODEL_ALWAYS, is->mechanism == POSENC_ADD, "10000", MODEL_MIN_THETA, \
      MODEL_MAX_THETA, NULL, "base of the sinusoids' wavelengths")                                                     \
    X(DOUBLE, rope_theta, rope_theta, MODEL_ALWAYS, is->mechanism == POSENC_ROTATE, "500000", MODEL_MIN_THETA,         \
      MODEL_MAX_THETA, NULL, "base of the rotation's wavelengths")                                                     \
    X(DOUBLE, rotary_fraction, partial_rotary_factor, 0, is->mechanism == POSENC_ROTATE, "1", 0, 1, NULL,              \
      "share of a head's channels that rotary turns: the first ones, an even number")                                  \
    MODEL_OPTIONS_OF_ROPE_SCALING(X)                                                                                   \
    X(SIZE, learned_length, max_position_embeddings, MODEL_ALWAYS | MODEL_OF_SEQUENCE, is->mechanism == POSENC_LEARN,  \
      "0", 0, MODEL_MAX_POSITIONS, NULL, "positions that learned has a row for; 0: --sequence_length")                 \
    X(CHOICE, alibi_slopes, alibi_slopes, 0, (is->terms & TERM_SLOPES) != 0, "published", 0, 0, "published geometric", \
      "of alibi for numbers of heads that are no power of two: by its code, or 2^(-8(h+1)/heads)")                     \
    X(SIZE, sandwich_dim, sandwich_dim, MODEL_ALWAYS, is == posenc_info(POS_SANDWICH), "128", 2, SANDWICH_MAX_DIM,     \
      NULL, "twice the number of cosines of sandwich")                                                                 \
    X(SIZE, fire_length, fire_length, MODEL_ALWAYS | MODEL_OF_SEQUENCE, is == posenc_info(POS_FIRE), "0", 0,           \
      MODEL_MAX_POSITIONS, NULL, "distance at which the coordinate of fire is 1; 0: --sequence_length")                \
    X(SIZE, mix_rank, mix_rank, MODEL_ALWAYS, (is->terms & TERM_MIX) != 0, "16", 1, MIX_MAX_RANK, NULL,                \
      "tables by distance of each layer of mix, and weights of them that each query and head has")                     \
    X(SIZE, mix_length, mix_length, MODEL_ALWAYS, (is->terms & TERM_MIX) != 0, "1024", 1, MIX_MAX_LENGTH, NULL,        \
      "distances of a table of mix; nothing is added beyond")                                                          \
    X(CHOICE, ssmax_prior, ssmax_prior, 0, ssmax && is->inside, "inside", 0, 0, "inside outside",                      \
      "is a learned bias scaled by Scalable-Softmax?")                                                                 \
    X(BOOL, no_seq_scale, seq_scale, MODEL_ALWAYS | MODEL_MAY_CHANGE | MODEL_INVERTED, ssmax, "0", 0, 0, NULL,         \
      "keep the scale of Scalable-Softmax at 1")                                                                       \
    X(BOOL, global_prior, global_positional_encoding, MODEL_ALWAYS, learns, "0", 0, 0, NULL, "one prior for all layers")

// Of attention in all layers, whatever the encoding; a flag that was not given leaves its term out.
#define MODEL_OPTIONS_OF_ATTENTION(X)                                                                           \
    X(DOUBLE, softcap, softcap, 0, true, NULL, 1e-6, 1e6, NULL,                                                 \
      "largest size of q.k/sqrt(head size), as c tanh(x/c), before biases and scales")                          \
    X(BOOL, softcap_approx, softcap_approx, 0, true, "0", 0, 0, NULL, "a cheaper tanh for --softcap")           \
    X(BOOL, sinks, sinks, 0, true, "0", 0, 0, NULL, "a learned logit per head in the softmax's denominator")    \
    X(SIZE, window, window, 0, true, NULL, 1, MODEL_MAX_WINDOW, NULL,                                           \
      "a token sees itself and the window - 1 before it")                                                       \
    X(STRING, log_scale, log_scale, 0, true, NULL, 0, 0, NULL,                                                  \
      "N0,ALPHA: q.k times 1 + ALPHA log(max(1, n / N0)), n the number of visible keys")                        \
    X(DOUBLE, final_softcap, final_softcap, 0, true, NULL, 1e-6, 1e6, NULL,                                     \
      "largest size of the output's logits, as c tanh(x/c)")                                                    \
    X(BOOL, qk_norm, qk_norm, 0, true, "0", 0, 0, NULL, "RMS norm of each head's q and k, before any rotation") \
    X(BOOL, gated_attention, gated_attention, 0, true, "0", 0, 0, NULL,                                         \
      "a sigmoid gate from the block's normalised input on attention's output")

#define MODEL_OPTIONS(X) MODEL_OPTIONS_OF_ENCODINGS(X) MODEL_OPTIONS_OF_ATTENTION(X)

#define MODEL_TYPE_SIZE size_t
#define MODEL_TYPE_DOUBLE double
#define MODEL_TYPE_BOOL bool
#define MODEL_TYPE_CHOICE const char*
#define MODEL_TYPE_STRING const char*

typedef struct {
#define X(type, flag, ...) MODEL_TYPE_##type flag;
    MODEL_OPTIONS(X)
#undef X
} ModelOptions;

// A row of the list.
typedef struct {
    OptionType type;
    const char *flag, *field;
    int kept;
    const char* by_default;
    double least, most;
    const char *words, *what;
    size_t offset;  // in ModelOptions
} ModelOption;

// MODEL_OPTION_rope_theta, ...: a row's place in the list.
enum {
#define X(type, flag, ...) MODEL_OPTION_##flag,
    MODEL_OPTIONS(X)
#undef X
        MODEL_OPTION_COUNT
};

static inline const ModelOption* model_option(int i) {
    static const ModelOption rows[] = {
#define X(type, flag, field, kept, applies, by_default, least, most, words, what) \
    {OPTION_##type, #flag, #field, kept, by_default, least, most, words, what, offsetof(ModelOptions, flag)},
        MODEL_OPTIONS(X)
#undef X
    };
    return &rows[i];
}

// Does a layer with this encoding ask for row i?
static inline bool model_option_applies(int i, PosKind encoding, bool ssmax) {
    const PosencInfo* is = posenc_info(encoding);
    const bool learns = posenc_params(encoding) > 0;
    const bool applies[] = {
#define X(type, flag, field, kept, applies, ...) applies,
        MODEL_OPTIONS(X)
#undef X
    };
    return applies[i];
}

// A row of an option table, whose value goes to where it is in o.
static inline Option model_option_row(int i, ModelOptions* o) {
    const ModelOption* m = model_option(i);
    return option_row(m->type, m->flag, (char*)o + m->offset, m->by_default, m->least, m->most, m->words, m->what);
}

// The rows of a part of the list, as rows of an option table that follow others; its values go to a->model.
#define MODEL_OPTION_ROW(type, flag, ...) , model_option_row(MODEL_OPTION_##flag, &a->model)

// What the flags say that nobody gave.
static inline ModelOptions model_default_options(void) {
    ModelOptions o;
    Option rows[MODEL_OPTION_COUNT];
    for (int i = 0; i < MODEL_OPTION_COUNT; i++) { rows[i] = model_option_row(i, &o); }
    Options defaults = options_create("", "", rows, MODEL_OPTION_COUNT);
    options_free(&defaults);
    return o;
}

// ----------------------------------------------------------------------------
// fields of model_args

// The value of row i as JSON, a new item; NULL where it has none.
static inline cJSON* model_option_json(int i, const ModelOptions* o) {
    const ModelOption* m = model_option(i);
    const void* value = (const char*)o + m->offset;
    switch (m->type) {
        case OPTION_SIZE:
            if (!m->by_default && *(const size_t*)value == 0) { return NULL; }
            return cJSON_CreateNumber((double)*(const size_t*)value);
        case OPTION_DOUBLE: return isnan(*(const double*)value) ? NULL : cJSON_CreateNumber(*(const double*)value);
        case OPTION_BOOL: return cJSON_CreateBool(*(const bool*)value != ((m->kept & MODEL_INVERTED) != 0));
        default: return *(const char* const*)value ? cJSON_CreateString(*(const char* const*)value) : NULL;
    }
}

// Adds the fields of the rows that apply.
static inline void model_options_to_json(cJSON* to, const ModelOptions* o, const bool* applies) {
    const ModelOptions standard = model_default_options();
    for (int i = 0; i < MODEL_OPTION_COUNT; i++) {
        if (!applies[i]) { continue; }
        cJSON *value = model_option_json(i, o), *by_default = model_option_json(i, &standard);
        const bool changed = !cJSON_Compare(value, by_default, true);
        cJSON_Delete(by_default);
        if (value && ((model_option(i)->kept & MODEL_ALWAYS) || changed)) {
            cJSON_AddItemToObject(to, model_option(i)->field, value);
        } else {
            cJSON_Delete(value);
        }
    }
}

// Ends the program because a field is not what row m says; path is for messages.
static inline void model_option_refuse(const ModelOption* m, const cJSON* item, const char* path) {
    char* found = cJSON_PrintUnformatted(item);
    if (m->words) {
        fatal("%s: model_args.%s = %s, expected one of: %s; the run folder is damaged", path, m->field, found,
              m->words);
    }
    if (m->type == OPTION_STRING) {
        fatal("%s: model_args.%s = %s, expected text; the run folder is damaged", path, m->field, found);
    }
    if (m->type == OPTION_BOOL) {
        fatal("%s: model_args.%s = %s, expected true or false; the run folder is damaged", path, m->field, found);
    }
    fatal("%s: model_args.%s = %s, expected a %snumber from %.15g to %g; the run folder is damaged", path, m->field,
          found, m->type == OPTION_SIZE ? "whole " : "", m->least, m->most);
}

// Takes row m from a field of model_args. Strings stay those of the item.
static inline void model_option_read(const ModelOption* m, ModelOptions* o, const cJSON* item, const char* path) {
    void* to = (char*)o + m->offset;
    const double x = cJSON_IsNumber(item) ? item->valuedouble : NAN;
    const bool within = x >= m->least && x <= m->most;
    if (m->type == OPTION_BOOL && cJSON_IsBool(item)) {
        *(bool*)to = cJSON_IsTrue(item) != ((m->kept & MODEL_INVERTED) != 0);
    } else if (m->type == OPTION_DOUBLE && within) {
        *(double*)to = x;
    } else if (m->type == OPTION_SIZE && within && x == floor(x)) {
        *(size_t*)to = (size_t)x;
    } else if (m->type == OPTION_CHOICE && cJSON_IsString(item) && option_allows(m->words, item->valuestring)) {
        *(const char**)to = item->valuestring;
    } else if (m->type == OPTION_STRING && cJSON_IsString(item)) {
        *(const char**)to = item->valuestring;
    } else {
        model_option_refuse(m, item, path);
    }
}

// The options that model_args has, defaults where it is silent.
static inline ModelOptions model_options_from_json(const cJSON* model_args, const char* path) {
    ModelOptions o = model_default_options();
    for (int i = 0; i < MODEL_OPTION_COUNT; i++) {
        const cJSON* item = cJSON_GetObjectItemCaseSensitive(model_args, model_option(i)->field);
        if (item && !cJSON_IsNull(item)) { model_option_read(model_option(i), &o, item, path); }
    }
    return o;
}

#endif
