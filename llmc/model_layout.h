/*
The layout of model.h: where every tensor and activation is, what layers share, and the structs of pointers that follow.
Included by model.h only.
*/
#ifndef MODEL_LAYOUT_H
#define MODEL_LAYOUT_H

static inline Tensor* model_add_tensor(Model* model, const char* name, int layer, ParamShape shape, ParamInit init,
                                       ParamGroup group, size_t rows, size_t cols, size_t offset) {
    Tensor t;
    memset(&t, 0, sizeof t);
    if (layer < 0) {
        snprintf(t.name, sizeof t.name, "%s", name);
    } else {
        snprintf(t.name, sizeof t.name, "layers.%d.%s", layer, name);
    }
    t.offset = offset, t.memory_count = rows * cols, t.fan_in = cols, t.init = init, t.group = group;
    t.trainable = true;
    size_t saved_rows = shape == SHAPE_VOCAB ? model->config.V : rows;
    t.count = saved_rows * cols;
    switch (shape) {
        case SHAPE_VOCAB:
        case SHAPE_MATRIX: t.dimensions = 2, t.shape[0] = saved_rows, t.shape[1] = cols; break;
        case SHAPE_VECTOR: t.dimensions = 1, t.shape[0] = cols; break;
        case SHAPE_HEADS: t.dimensions = 4, t.shape[0] = rows, t.shape[1] = cols, t.shape[2] = t.shape[3] = 1; break;
    }
    size_t n = model->tensor_count;
    if ((n & (n - 1)) == 0) { model->tensors = (Tensor*)xrealloc(model->tensors, (n ? 2 * n : 1) * sizeof(Tensor)); }
    model->tensors[model->tensor_count++] = t;
    model->learned_count += t.count;
    return &model->tensors[model->tensor_count - 1];
}

// The tensors that an encoding learns, in the order of its list: "PRIOR.NAME".
static inline void model_add_prior(Model* model, PosKind encoding, const char* prior, int layer, ParamGroup group,
                                   size_t offset) {
    const ModelConfig* c = &model->config;
    for (int i = 0; i < POSENC_TENSOR_COUNT; i++) {
        const PosencTensor* listed = posenc_tensor(i);
        if (listed->owner != encoding) { continue; }
        char* name = text("%s.%s", prior, listed->name);
        Tensor* t = model_add_tensor(model, name, layer, SHAPE_HEADS, INIT_PRIOR, group, listed->rows,
                                     listed->per_head ? c->NH : 1, offset);
        t->posenc_tensor = i, t->trainable = c->posenc.trained[i];
        offset += t->count;
        free(name);
    }
}

// Those of all encodings that share a prior among their layers.
static inline void model_add_global_priors(Model* model, const char* prior, ParamGroup group, size_t offset) {
    for (int kind = 0; kind < POS_COUNT; kind++) {
        if (!model_has_encoding(&model->config, (PosKind)kind)) { continue; }
        const size_t place = model_global_prior_place(&model->config, (PosKind)kind);
        model_add_prior(model, (PosKind)kind, prior, -1, group, offset + place);
    }
}

// Lists the tensors of a layer, or with -1 those of the model, in the order of memory from `offset` on; sets their
// offsets and returns where they end.
static inline size_t model_layout_layer(Model* model, int layer, size_t offset) {
    LAYER_DIMENSIONS(&model->config, layer < 0 ? 0 : (size_t)layer);
    const struct {
        const char* name;
        ParamScope scope;
        size_t rows, cols;
        ParamShape shape;
        ParamInit init;
        ParamGroup group;
    } list[] = {
#define X(type, field, name, scope, rows, cols, shape, init, group) {name, scope, rows, cols, shape, init, group},
        PARAM_LIST(X)
#undef X
    };
    for (int p = 0; p < PARAM_COUNT; p++) {
        if ((list[p].scope == SCOPE_MODEL) != (layer < 0)) { continue; }
        const size_t count = list[p].rows * list[p].cols;
        for (size_t l = layer < 0 ? 0 : (size_t)layer; l < (layer < 0 ? L : (size_t)layer + 1); l++) {
            model->param_offset[l][p] = offset;
        }
        if (count > 0 && list[p].init == INIT_PRIOR && layer < 0) {
            model_add_global_priors(model, list[p].name, list[p].group, offset);
        } else if (count > 0 && list[p].init == INIT_PRIOR) {
            model_add_prior(model, model_layer_encoding(&model->config, (size_t)layer), list[p].name, layer,
                            list[p].group, offset);
        } else if (count > 0) {
            Tensor* t = model_add_tensor(model, list[p].name, layer, list[p].shape, list[p].init, list[p].group,
                                         list[p].rows, list[p].cols, offset);
            t->trainable = p != PARAM_seq_scale || !model->config.options.no_seq_scale;
        }
        offset += round_up(count, 16);  // a cache line of fp32
    }
    return offset;
}

static inline void model_layout_params(Model* model) {
    MODEL_DIMENSIONS(&model->config);
    model->param_offset = (size_t(*)[PARAM_COUNT])xcalloc(L, sizeof *model->param_offset);
    for (int layer = -1; layer < (int)L; layer++) {
        model->param_count = model_layout_layer(model, layer, model->param_count);
    }
    // what lets one product serve several matrices: holds since C and HS are multiples of 8
    const size_t* at = model->param_offset[0];
    assert(at[PARAM_wk] == at[PARAM_wq] + NH * HS * C);
    assert(at[PARAM_wv] == at[PARAM_wk] + NKV * HS * C);
    assert(at[PARAM_w_mix] == at[PARAM_wv] + NKV * HS * C);
    assert(at[PARAM_w3] == at[PARAM_w1] + F * C);
    (void)at;
}

static inline void model_add_segment(Model* model, size_t offset, size_t end, bool matrices) {
    Segment s = {offset, end - offset, 0, end - offset, model->moment_count, matrices && model->plan.shards > 1};
    if (s.sharded) {
        s.begin = part_begin(s.count, model->plan.shard, model->plan.shards);
        s.end = part_begin(s.count, model->plan.shard + 1, model->plan.shards);
    }
    model->segments[model->segment_count++] = s;
    model->moment_count += s.end - s.begin;
}

enum { SEGMENT_EMBEDDING, SEGMENT_OUTPUT, SEGMENT_VECTORS, SEGMENT_LAYERS };

// Segments in the order of memory; vectors are too small to be worth sharding.
static inline void model_layout_segments(Model* model) {
    const size_t L = model->config.L, *at = model->param_offset[0];
    model->segments = (Segment*)xcalloc(SEGMENT_LAYERS + 2 * L, sizeof(Segment));
    model_add_segment(model, at[PARAM_tok_embeddings], at[PARAM_output], true);
    model_add_segment(model, at[PARAM_output], at[PARAM_norm], true);
    model_add_segment(model, at[PARAM_norm], at[PARAM_wq], false);
    for (size_t layer = 0; layer < L; layer++) {
        at = model->param_offset[layer];
        const size_t end = layer + 1 < L ? model->param_offset[layer + 1][PARAM_wq] : model->param_count;
        model_add_segment(model, at[PARAM_wq], at[PARAM_attention_norm], true);
        model_add_segment(model, at[PARAM_attention_norm], end, false);
    }
}

// Layers with the same window see the same.
static inline void model_layout_rows(Model* model) {
    const ModelConfig* c = &model->config;
    model->row_rule = (size_t*)xcalloc(c->L, sizeof(size_t));
    for (size_t layer = 0; layer < c->L; layer++) {
        size_t first = 0;
        while (model_layer_window(c, first) != model_layer_window(c, layer)) { first++; }
        model->row_rule[layer] = first < layer ? model->row_rule[first] : model->row_rules++;
    }
}

// Layers with the same bias read one table.
static inline void model_layout_tables(Model* model) {
    const ModelConfig* c = &model->config;
    model->bias_table = (size_t*)xcalloc(c->L, sizeof(size_t));
    for (size_t layer = 0; layer < c->L; layer++) {
        size_t first = 0;
        while (!model_same_bias(c, first, layer)) { first++; }
        const bool biased = (model_layer_info(c, layer)->terms & TERM_DISTANCE) != 0;
        model->bias_table[layer] = !biased         ? NO_TABLE
                                   : first < layer ? model->bias_table[first]
                                                   : model->bias_table_count++;
    }
}

static inline void model_layout_activations(Model* model) {
    MODEL_DIMENSIONS(&model->config);
    const ModelPlan* plan = &model->plan;
    const size_t N = plan->B * plan->T, slots = plan->slots, max_length = plan->max_length;
    const size_t row_rules = model->row_rules;
    struct {
        ActivationScope scope;
        size_t bytes;
    } list[] = {
#define X(type, field, scope, count) {scope, (count) * sizeof(type)},
        ACTIVATION_LIST(X)
#undef X
    };
    size_t offset = 0;
    for (int a = 0; a < ACT_COUNT; a++) {
        bool training = plan->mode != MODE_INFERENCE;
        bool per_layer =
            (list[a].scope == ACT_STREAM && training) || (list[a].scope == ACT_LAYER && plan->mode == MODE_TRAIN);
        size_t bytes = list[a].scope == ACT_BACKWARD && !training ? 0 : round_up(list[a].bytes, 64);
        model->act_offset[a] = offset;
        model->act_stride[a] = per_layer ? bytes : 0;
        offset += per_layer ? bytes * L : bytes;
    }
    model->act_bytes = offset;
}

static inline Params model_params(const Model* model, size_t layer) {
    Params p;
    struct {
        floatX* base_floatX;
        float* base_float;
    } from = {model->params, model->master};
    const size_t* at = model->param_offset[layer];
#define X(type, field, ...) p.field = from.base_##type + at[PARAM_##field];
    PARAM_LIST(X)
#undef X
    return p;
}

static inline Gradients model_gradients(const Model* model, size_t layer) {
    Gradients g;
    const size_t* at = model->param_offset[layer];
#define X(type, field, ...) g.field = model->grads + at[PARAM_##field];
    PARAM_LIST(X)
#undef X
    return g;
}

static inline Activations model_activations(const Model* model, size_t layer) {
    Activations a;
#define X(type, field, ...) \
    a.field = (type*)(model->activations + model->act_offset[ACT_##field] + layer * model->act_stride[ACT_##field]);
    ACTIVATION_LIST(X)
#undef X
    return a;
}

#endif
