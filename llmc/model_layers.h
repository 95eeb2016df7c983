/*
Layers that differ: the encoding and the window of each, what they share, and the name of it all. A pattern repeats over
the layers; one encoding for all is a pattern of one. Included by model_config.h only.
*/
#ifndef MODEL_LAYERS_H
#define MODEL_LAYERS_H

// ----------------------------------------------------------------------------
// setting

static inline void model_set_encoding(ModelConfig* c, PosKind encoding, bool ssmax) {
    for (size_t l = 0; l < MODEL_MAX_LAYERS; l++) { c->layers[l].encoding = encoding, c->layers[l].ssmax = ssmax; }
}

// The layer's encoding by a name such as "bam_ssmax"; false for a name that is not in the list.
static inline bool model_parse_layer(ModelConfig* c, size_t layer, const char* name) {
    return posenc_parse(name, &c->layers[layer].encoding, &c->layers[layer].ssmax);
}

static inline bool model_parse_encoding(ModelConfig* c, const char* name) {
    PosKind encoding;
    bool ssmax;
    if (!posenc_parse(name, &encoding, &ssmax)) { return false; }
    model_set_encoding(c, encoding, ssmax);
    return true;
}

// After the encodings of the first `count` layers: the others repeat them.
static inline void model_repeat_encodings(ModelConfig* c, size_t count) {
    for (size_t l = count; l < MODEL_MAX_LAYERS; l++) {
        c->layers[l].encoding = c->layers[l - count].encoding, c->layers[l].ssmax = c->layers[l - count].ssmax;
    }
}

// Windows of the layers, which repeat them.
static inline void model_set_windows(ModelConfig* c, const size_t* windows, size_t count) {
    for (size_t l = 0; l < MODEL_MAX_LAYERS; l++) { c->layers[l].window = windows[l % count]; }
}

// ----------------------------------------------------------------------------
// asking

static inline PosKind model_layer_encoding(const ModelConfig* c, size_t layer) { return c->layers[layer].encoding; }
static inline bool model_layer_ssmax(const ModelConfig* c, size_t layer) { return c->layers[layer].ssmax; }

// Keys that a query sees at most, itself included; 0: its whole document.
static inline size_t model_layer_window(const ModelConfig* c, size_t layer) {
    return c->options.window ? c->options.window : c->layers[layer].window;
}

// Tables by distance that the queries of a layer weight, 0 without; of any layer.
static inline size_t model_layer_mix_rank(const ModelConfig* c, size_t layer) {
    return posenc_info(c->layers[layer].encoding)->terms & TERM_MIX ? c->options.mix_rank : 0;
}

static inline size_t model_mix_rank(const ModelConfig* c) {
    size_t rank = 0;
    for (size_t l = 0; l < c->L; l++) { rank |= model_layer_mix_rank(c, l); }
    return rank;
}

// Is attention given cumulative sums of forget gates in this layer; in any?
static inline bool model_layer_has_forget_gates(const ModelConfig* c, size_t layer) {
    return (posenc_info(c->layers[layer].encoding)->terms & TERM_KEY) != 0;
}

static inline bool model_has_forget_gates(const ModelConfig* c) {
    bool found = false;
    for (size_t l = 0; l < c->L; l++) { found |= model_layer_has_forget_gates(c, l); }
    return found;
}

static inline bool model_has_window(const ModelConfig* c) {
    bool found = false;
    for (size_t l = 0; l < c->L; l++) { found |= model_layer_window(c, l) > 0; }
    return found;
}

static inline const PosencInfo* model_layer_info(const ModelConfig* c, size_t layer) {
    return posenc_info(c->layers[layer].encoding);
}

// What attention is given in this layer besides q, k and v: the terms of its encoding and those of flags.
static inline unsigned model_layer_terms(const ModelConfig* c, size_t layer) {
    const ModelOptions* o = &c->options;
    unsigned terms = posenc_terms(c->layers[layer].encoding, c->layers[layer].ssmax);
    // libraries know the published slopes alone
    if (strcmp(o->alibi_slopes, "geometric") == 0) { terms &= ~(unsigned)TERM_SLOPES; }
    terms |= o->log_scale ? (unsigned)TERM_SCALE : 0u;
    return terms | (isnan(o->softcap) ? 0u : (unsigned)TERM_CAP) | (o->sinks ? (unsigned)TERM_SINK : 0u);
}

// What attention is given in any layer. TERM_SLOPES stays where no other layer has another bias.
static inline unsigned model_terms(const ModelConfig* c) {
    unsigned all = 0, slopes = TERM_SLOPES;
    for (size_t l = 0; l < c->L; l++) {
        const unsigned terms = model_layer_terms(c, l);
        all |= terms;
        if ((terms & TERM_DISTANCE) && !(terms & TERM_SLOPES)) { slopes = 0; }
    }
    return (all & ~(unsigned)TERM_SLOPES) | (all & slopes);
}

static inline bool model_has_encoding(const ModelConfig* c, PosKind encoding) {
    bool found = false;
    for (size_t l = 0; l < c->L; l++) { found |= c->layers[l].encoding == encoding; }
    return found;
}

static inline bool model_has_mechanism(const ModelConfig* c, PosencMechanism mechanism) {
    bool found = false;
    for (size_t l = 0; l < c->L; l++) { found |= model_layer_info(c, l)->mechanism == mechanism; }
    return found;
}

// Are positions, computed or learned, added to the embedding?
static inline bool model_adds_positions(const ModelConfig* c) {
    return model_has_mechanism(c, POSENC_ADD) || model_has_mechanism(c, POSENC_LEARN);
}

// Does any layer's encoding learn a bias?
static inline bool model_learns(const ModelConfig* c) {
    bool found = false;
    for (size_t l = 0; l < c->L; l++) { found |= posenc_params(c->layers[l].encoding) > 0; }
    return found;
}

// Which rows of model_options.h apply: those that any layer asks for.
static inline void model_options_applied(const ModelConfig* c, bool* applies) {
    memset(applies, 0, MODEL_OPTION_COUNT * sizeof *applies);
    for (size_t l = 0; l < c->L; l++) {
        for (int i = 0; i < MODEL_OPTION_COUNT; i++) {
            applies[i] |= model_option_applies(i, c->layers[l].encoding, c->layers[l].ssmax);
        }
    }
}

// Is the layer's bias scaled by Scalable-Softmax, too? --log_scale is of the products alone.
static inline bool model_bias_inside(const ModelConfig* c, size_t layer) {
    return !c->options.log_scale && model_layer_info(c, layer)->inside && strcmp(c->options.ssmax_prior, "inside") == 0;
}

// ----------------------------------------------------------------------------
// priors: of each layer, or one of each encoding that its layers share

static inline size_t model_layer_prior_numbers(const ModelConfig* c, size_t layer) {
    return c->options.global_prior ? 0 : posenc_numbers(c->layers[layer].encoding, c->NH);
}

// Where the shared prior of an encoding is among the shared priors of all; of POS_COUNT: how long they are together.
static inline size_t model_global_prior_place(const ModelConfig* c, PosKind encoding) {
    size_t place = 0;
    for (int kind = 0; kind < (int)encoding && c->options.global_prior; kind++) {
        place += model_has_encoding(c, (PosKind)kind) ? posenc_numbers((PosKind)kind, c->NH) : 0;
    }
    return place;
}

// Is the bias of two layers the same? Then they read one table.
static inline bool model_same_bias(const ModelConfig* c, size_t a, size_t b) {
    const bool shared = c->options.global_prior || posenc_params(c->layers[a].encoding) == 0;
    return c->layers[a].encoding == c->layers[b].encoding && (a == b || shared);
}

// ----------------------------------------------------------------------------
// the pattern and its name

// After how many layers the encodings repeat: 1 where all layers have the same.
static inline size_t model_encoding_period(const ModelConfig* c) {
    size_t period = 1;
    for (size_t l = 1; l < c->L; l++) {
        const ModelLayer *a = &c->layers[l], *b = &c->layers[l - period];
        if (a->encoding != b->encoding || a->ssmax != b->ssmax) { l = period++; }
    }
    return period;
}

// The same of their windows.
static inline size_t model_window_period(const ModelConfig* c) {
    size_t period = 1;
    for (size_t l = 1; l < c->L; l++) {
        if (model_layer_window(c, l) != model_layer_window(c, l - period)) { l = period++; }
    }
    return period;
}

static inline char* model_layer_name(const ModelConfig* c, size_t layer) {
    return text("%s%s", model_layer_info(c, layer)->name, c->layers[layer].ssmax ? "_ssmax" : "");
}

// What run folders and checkpoints call the encoding: "bam_ssmax", or the pattern as "3rotary+nope"; where that is
// long, its beginning and a hash. Release with free().
static inline char* model_encoding_name(const ModelConfig* c) {
    enum { LONGEST = 80, BEGINNING = 60 };
    const size_t period = model_encoding_period(c);
    char* name = xstrdup("");
    for (size_t l = 0, n; l < period; l += n) {
        const ModelLayer* layer = &c->layers[l];
        for (n = 1; l + n < period && layer[n].encoding == layer->encoding && layer[n].ssmax == layer->ssmax;) { n++; }
        char *one = model_layer_name(c, l), *times = n > 1 ? text("%zu", n) : xstrdup("");
        char* longer = text("%s%s%s%s", name, l > 0 ? "+" : "", times, one);
        free(one), free(times), free(name);
        name = longer;
    }
    if (strlen(name) > LONGEST) {
        char* cut = text("%.*s+%08x", BEGINNING, name, (unsigned)fnv1a(name, strlen(name)));
        free(name);
        name = cut;
    }
    return name;
}

// Refuses what layers cannot differ in.
static inline void model_check_layers(const ModelConfig* c) {
    if (model_encoding_period(c) == 1) { return; }
    for (size_t l = 0; l < c->L; l++) {
        const PosencInfo* info = model_layer_info(c, l);
        if (info->mechanism == POSENC_ADD || info->mechanism == POSENC_LEARN) {
            fatal(
                "--layer_encodings: %s is added to the embedding, which all layers read; give --position_encoding %s, "
                "or layers without it",
                info->name, info->name);
        }
    }
}

#endif
