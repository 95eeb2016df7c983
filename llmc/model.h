/*
The transformer, once, for every backend: configuration, parameters, activations, forward, backward,
update, and the forward through a key/value cache.

  h = x + Wo attention(rmsnorm(x)),  out = h + W2 (silu(W1 n) * W3 n),  n = rmsnorm(h)
  logits = Wout rmsnorm(x) after the last block

No biases but those of forget gates; embedding and output head are separate. Operators are those of ops.h;
positional mathematics is in posenc.h, and nothing here asks for an encoding by name. Parameters are known by name
through PARAM_LIST, activations through ACTIVATION_LIST; both lists drive structs, sizes and layout.
*/
#ifndef MODEL_H
#define MODEL_H

#include "backend.h"
#include "model_config.h"

// ----------------------------------------------------------------------------
// parameters

typedef enum { SCOPE_MODEL, SCOPE_LAYER } ParamScope;
// How a tensor is shaped in a checkpoint: [V,cols] (memory has Vp rows), [rows,cols], [cols], [rows,cols,1,1]
typedef enum { SHAPE_VOCAB, SHAPE_MATRIX, SHAPE_VECTOR, SHAPE_HEADS } ParamShape;
typedef enum { INIT_NORMAL, INIT_LINEAR, INIT_ONES, INIT_ZEROS, INIT_PRIOR, INIT_MIXED } ParamInit;
typedef enum { GROUP_MATRIX, GROUP_VECTOR, GROUP_PRIOR } ParamGroup;

/*
X(type, field, name in a checkpoint, scope, rows, cols, shape, initialisation, optimiser group)
Rows or columns of 0 leave a parameter out of a layer. wq, wk, wv, w_mix and w1, w3 follow one another in memory, so
that each group is one matrix for one product: w_mix gives the weights by which each query and head adds up the tables
by distance `mixed`. A prior is the tensors of the encoding one after another, each with a name of its own.
Learned positions begin like the token embeddings that they are added to, neither louder nor softer (GPT-2 has 0.02 for
both), and decay like them, as in GPT-2's reimplementations; they are read in fp32, as computed positions are.
The projection to forget gates is fp32 and a product of its own: rounding to bf16 would stay in the sums of gates.
*/
#define PARAM_LIST(X)                                                                                                \
    X(floatX, tok_embeddings, "tok_embeddings.weight", SCOPE_MODEL, Vp, C, SHAPE_VOCAB, INIT_NORMAL, GROUP_MATRIX)   \
    X(floatX, output, "output.weight", SCOPE_MODEL, Vp, C, SHAPE_VOCAB, INIT_LINEAR, GROUP_MATRIX)                   \
    X(float, norm, "norm.weight", SCOPE_MODEL, 1, C, SHAPE_VECTOR, INIT_ONES, GROUP_VECTOR)                          \
    X(float, position_embeddings, "position_embeddings.weight", SCOPE_MODEL, PE, C, SHAPE_MATRIX, INIT_NORMAL,       \
      GROUP_MATRIX)                                                                                                  \
    X(float, global_prior, "prior", SCOPE_MODEL, 1, PG, SHAPE_HEADS, INIT_PRIOR, GROUP_PRIOR)                        \
    X(floatX, wq, "attention.wq.weight", SCOPE_LAYER, NH* HS, C, SHAPE_MATRIX, INIT_LINEAR, GROUP_MATRIX)            \
    X(floatX, wk, "attention.wk.weight", SCOPE_LAYER, NKV* HS, C, SHAPE_MATRIX, INIT_LINEAR, GROUP_MATRIX)           \
    X(floatX, wv, "attention.wv.weight", SCOPE_LAYER, NKV* HS, C, SHAPE_MATRIX, INIT_LINEAR, GROUP_MATRIX)           \
    X(floatX, w_mix, "attention.w_mix.weight", SCOPE_LAYER, NH* MR, C, SHAPE_MATRIX, INIT_LINEAR, GROUP_MATRIX)      \
    X(floatX, wo, "attention.wo.weight", SCOPE_LAYER, C, NH* HS, SHAPE_MATRIX, INIT_LINEAR, GROUP_MATRIX)            \
    X(floatX, gate, "attention.gate.weight", SCOPE_LAYER, GA* NH* HS, C, SHAPE_MATRIX, INIT_LINEAR, GROUP_MATRIX)    \
    X(floatX, w1, "feed_forward.w1.weight", SCOPE_LAYER, F, C, SHAPE_MATRIX, INIT_LINEAR, GROUP_MATRIX)              \
    X(floatX, w3, "feed_forward.w3.weight", SCOPE_LAYER, F, C, SHAPE_MATRIX, INIT_LINEAR, GROUP_MATRIX)              \
    X(floatX, w2, "feed_forward.w2.weight", SCOPE_LAYER, C, F, SHAPE_MATRIX, INIT_LINEAR, GROUP_MATRIX)              \
    X(float, attention_norm, "attention_norm.weight", SCOPE_LAYER, 1, C, SHAPE_VECTOR, INIT_ONES, GROUP_VECTOR)      \
    X(float, ffn_norm, "ffn_norm.weight", SCOPE_LAYER, 1, C, SHAPE_VECTOR, INIT_ONES, GROUP_VECTOR)                  \
    X(float, q_norm, "attention.q_norm.weight", SCOPE_LAYER, QN, HS, SHAPE_VECTOR, INIT_ONES, GROUP_VECTOR)          \
    X(float, k_norm, "attention.k_norm.weight", SCOPE_LAYER, QN, HS, SHAPE_VECTOR, INIT_ONES, GROUP_VECTOR)          \
    X(float, forget, "attention.forget.weight", SCOPE_LAYER, FH, C, SHAPE_MATRIX, INIT_LINEAR, GROUP_MATRIX)         \
    X(float, forget_bias, "attention.forget.bias", SCOPE_LAYER, FH / NH, FH, SHAPE_VECTOR, INIT_ZEROS, GROUP_VECTOR) \
    X(float, seq_scale, "attention.seq_scale", SCOPE_LAYER, SS, NH, SHAPE_HEADS, INIT_ONES, GROUP_VECTOR)            \
    X(float, sink, "attention.sink", SCOPE_LAYER, SK, NH, SHAPE_HEADS, INIT_ZEROS, GROUP_VECTOR)                     \
    X(float, prior, "attention.prior", SCOPE_LAYER, 1, PL, SHAPE_HEADS, INIT_PRIOR, GROUP_PRIOR)                     \
    X(float, mixed, "attention.mixed", SCOPE_LAYER, MR, ML, SHAPE_MATRIX, INIT_MIXED, GROUP_PRIOR)

// The short names that the lists use. PE: rows of learned positions.
#define COMMON_DIMENSIONS(c)                                                                                 \
    __attribute__((unused)) const size_t V = (c)->V, Vp = (c)->Vp, C = (c)->C, L = (c)->L, NH = (c)->NH,     \
                                         NKV = (c)->NKV, HS = (c)->HS, F = (c)->F,                           \
                                         PE = model_learns_positions(c) ? (c)->options.learned_length : 0,   \
                                         SK = (c)->options.sinks ? 1 : 0, QN = (c)->options.qk_norm ? 1 : 0, \
                                         GA = (c)->options.gated_attention ? 1 : 0

// Of activations and workspace, which serve every layer. MR, ML: tables that queries weight, and distances of each. FH:
// heads with forget gates.
#define MODEL_DIMENSIONS(c)                                                                    \
    COMMON_DIMENSIONS(c);                                                                      \
    __attribute__((unused)) const size_t MR = model_mix_rank(c), ML = (c)->options.mix_length, \
                                         QKV = (NH + 2 * NKV) * HS + NH * MR, FH = model_has_forget_gates(c) ? NH : 0

// Of one layer. PG, PL: numbers of the priors that layers share, and of the layer's own.
#define LAYER_DIMENSIONS(c, layer)                                                                      \
    COMMON_DIMENSIONS(c);                                                                               \
    __attribute__((unused))                                                                             \
    const size_t MR = model_layer_mix_rank(c, layer),                                                   \
                 ML = MR > 0 ? (c)->options.mix_length : 0, QKV = (NH + 2 * NKV) * HS + NH * MR,        \
                 PG = model_global_prior_place(c, POS_COUNT), PL = model_layer_prior_numbers(c, layer), \
                 SS = model_layer_ssmax(c, layer) ? 1 : 0, FH = model_layer_has_forget_gates(c, layer) ? NH : 0

enum {
#define X(type, field, ...) PARAM_##field,
    PARAM_LIST(X)
#undef X
        PARAM_COUNT
};

// Weights as a layer sees them: its own, and those of the model. Matrices in floatX, the rest in fp32.
typedef struct {
#define X(type, field, ...) type* field;
    PARAM_LIST(X)
#undef X
} Params;

typedef struct {
#define X(type, field, ...) float* field;
    PARAM_LIST(X)
#undef X
} Gradients;

// One named tensor of a checkpoint, a dense range of the parameter arrays.
typedef struct {
    char name[96];
    size_t offset, count;  // elements; count is what a checkpoint holds
    size_t memory_count;   // count and, for a vocabulary, its padding rows
    int dimensions;
    size_t shape[4];
    size_t fan_in;
    ParamInit init;
    ParamGroup group;
    int posenc_tensor;  // which tensor of the encoding, for INIT_PRIOR
    bool trainable;
} Tensor;

// A stretch of the parameter arrays whose gradients are complete at the same time: the matrices of a layer, say, or
// all that is no matrix in a layer. With a sharded optimiser only part of a sharded segment is updated here.
typedef struct {
    size_t offset, count;
    size_t begin, end;  // within the segment, what this optimiser updates
    size_t moments;     // where the moments of begin .. end are in m and v
    bool sharded;
} Segment;

// ----------------------------------------------------------------------------
// activations

// STREAM: one per layer, always. LAYER: one per layer, or one in all when nothing is kept for a backward
// pass or it is computed again. MODEL: one. BACKWARD: one, only for training.
typedef enum { ACT_STREAM, ACT_LAYER, ACT_MODEL, ACT_BACKWARD } ActivationScope;

// X(type, field, scope, elements)
#define ACTIVATION_LIST(X)                                                                    \
    X(floatX, residual, ACT_STREAM, N* C) /* input of the block */                            \
    X(floatX, attention_norm, ACT_LAYER, N* C)                                                \
    X(float, attention_rstd, ACT_LAYER, N)                                                    \
    X(floatX, qk_before, ACT_LAYER, QN* N*(NH + NKV) * HS) /* q, then k, before their norm */ \
    X(float, qk_rstd, ACT_LAYER, QN* N*(NH + NKV))                                            \
    X(floatX, qkv, ACT_LAYER, N* QKV) /* after norm and rotation; then mix */                 \
    X(float, forget_gates, ACT_LAYER, N* FH)                                                  \
    X(double, forget_sums, ACT_LAYER, N* FH)                                                  \
    X(floatX, attention, ACT_LAYER, N* C)                                                     \
    X(float, lse, ACT_LAYER, N* NH)                                                           \
    X(floatX, gate, ACT_LAYER, GA* N* C)     /* before the sigmoid */                         \
    X(floatX, gated, ACT_MODEL, GA* N* C)    /* attention behind its gate */                  \
    X(floatX, residual_mid, ACT_LAYER, N* C) /* after attention */                            \
    X(floatX, ffn_norm, ACT_LAYER, N* C)                                                      \
    X(float, ffn_rstd, ACT_LAYER, N)                                                          \
    X(floatX, gate_up, ACT_LAYER, N * 2 * F)                                                  \
    X(floatX, swiglu, ACT_LAYER, N* F)                                                        \
    X(floatX, residual_final, ACT_MODEL, N* C)                                                \
    X(floatX, final_norm, ACT_MODEL, N* C)                                                    \
    X(float, final_rstd, ACT_MODEL, N)                                                        \
    X(floatX, projection, ACT_MODEL, N* C) /* of attention or feed-forward, before the sum */ \
    X(floatX, logits, ACT_MODEL, Vp)       /* of one row, to sample from */                   \
    X(int, tokens, ACT_MODEL, N)                                                              \
    X(int, targets, ACT_MODEL, N)                                                             \
    X(int, start, ACT_MODEL, row_rules* N) /* for each window that layers have */             \
    X(float, log_count, ACT_MODEL, row_rules* N)                                              \
    X(float, losses, ACT_MODEL, N* slots)                                                     \
    X(floatX, d_residual, ACT_BACKWARD, N* C)                                                 \
    X(floatX, d_norm, ACT_BACKWARD, N* C)                                                     \
    X(floatX, d_wide, ACT_BACKWARD, N*(F > QKV ? F : QKV))                                    \
    X(float, d_bias, ACT_BACKWARD, NH* max_length)                                            \
    X(float, d_row_scale, ACT_BACKWARD, NH) /* of what is not learned, unread */              \
    X(float, d_forget_sums, ACT_BACKWARD, N* FH)

enum {
#define X(type, field, ...) ACT_##field,
    ACTIVATION_LIST(X)
#undef X
        ACT_COUNT
};

typedef struct {
#define X(type, field, ...) type* field;
    ACTIVATION_LIST(X)
#undef X
} Activations;

typedef enum { MODE_INFERENCE, MODE_TRAIN, MODE_TRAIN_RECOMPUTE } ModelMode;

// What a model is built for.
typedef struct {
    ModelMode mode;
    size_t B, T;           // rows of one forward pass: at most B*T
    size_t slots;          // micro-steps whose losses are kept
    size_t max_length;     // longest context: positions of tables, entries of a cache; at least T
    size_t shard, shards;  // which part of the optimiser's state is here, of how many
} ModelPlan;

typedef struct {
    size_t parameters, gradients, optimizer, activations, tables, workspace;  // bytes
} ModelMemory;

#define NO_TABLE SIZE_MAX

typedef struct Model {
    ModelConfig config;
    ModelPlan plan;

    Tensor* tensors;
    size_t tensor_count;
    size_t (*param_offset)[PARAM_COUNT];  // elements, for each layer; of the model's parameters the same for all
    size_t param_count, learned_count;    // elements in all; parameters that a checkpoint holds
    Segment* segments;  // token embedding, output head, the model's vectors; each layer's matrices, vectors
    size_t segment_count, moment_count;

    // Called in the backward pass whenever a segment's gradients are complete; NULL: nobody wants to know.
    void (*segment_ready)(struct Model* model, const Segment* segment);

    float* master;   // [param_count] fp32
    floatX* params;  // the compute copy, with the same offsets; where floatX is fp32 it is master itself
    float* grads;    // [param_count]
    float *m, *v;    // [moment_count], found through the segments; without shards with the same offsets

    size_t act_offset[ACT_COUNT], act_stride[ACT_COUNT], act_bytes;  // bytes; of layer 0, between layers, in all
    char* activations;
    float* position_table;  // added to the embedding or used to rotate; NULL when no encoding needs one, or when what
                            // it learned has a row for every position
    size_t positions;       // of the sequence that is read, for learned positions that are interpolated
    float* ones;            // [NH], the scale of rows where none is learned
    size_t *row_rule, row_rules;           // which of the rules of what queries see each layer has, of how many
    size_t *bias_table, bias_table_count;  // which of the tables each layer reads; NO_TABLE without a relative bias
    float* bias_tables;                    // [bias_table_count][NH][max_length]; NULL without a relative bias
    bool tables_filled;                    // once, which is enough where nothing is learned
    bool tables_stale;                     // what is learned has changed since the tables were filled
    void* workspace;

    size_t B, T;       // of the last forward pass
    size_t documents;  // in its batch; 0 with a cache
} Model;

// Keys and values of one sequence for every layer: [L][capacity][2*NKV*HS], keys before values.
typedef struct {
    floatX* entries;
    size_t capacity, length;
    int document_start;   // position of the last BOS, 0 before the first
    double* forget_sums;  // [L][NH][capacity], NULL without forget gates
} KVCache;

#include "model_layout.h"

// ----------------------------------------------------------------------------
// memory

static inline size_t model_bias_tables_size(const Model* model) {
    return model->bias_table_count * model->config.NH * model->plan.max_length;
}

static inline size_t model_position_table_size(const ModelConfig* c, size_t length) {
    if (model_learns_positions(c)) { return length > c->options.learned_length ? length * c->C : 0; }
    if (model_has_mechanism(c, POSENC_ADD)) { return length * c->C; }
    return model_has_mechanism(c, POSENC_ROTATE) ? length * c->HS : 0;
}

static inline size_t model_workspace_bytes(const Model* model) {
    MODEL_DIMENSIONS(&model->config);
    const ModelPlan* plan = &model->plan;
    bool training = plan->mode != MODE_INFERENCE;
    size_t N = plan->B * plan->T, T = plan->T;
    const unsigned terms = TERM_DISTANCE | TERM_SCALE | model_terms(&model->config);
    AttentionSizes batch = {plan->B, T, T, NH, NKV, HS, terms, MR, ML}, reading = batch;  // reading: through a cache
    if (!training) { reading.B = 1, reading.Tq = N, reading.Tk = plan->max_length; }
    size_t needs[] = {
        matmul_workspace(N, C, QKV),
        matmul_workspace(N, C, C),
        matmul_workspace(N, C, 2 * F),
        matmul_workspace(N, F, C),
        matmul_workspace(1, C, V),
        cross_entropy_workspace(N, C, V),
        attention_workspace(&reading, training),
        attention_workspace(&batch, training),
        rmsnorm_workspace(N, C),
        embedding_workspace(N, V),
        FH > 0 ? forget_workspace(N, C, NH) : 0,
    };
    size_t most = 0;
    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++) { most = needs[i] > most ? needs[i] : most; }
    return most;
}

// Sizes in bytes are products of size_t: refuses what could overflow them, by a bound from above in double.
static inline void model_check_sizes(const ModelConfig* c, const ModelPlan* plan) {
    double rows = (double)plan->B * (double)plan->T, layers = (double)c->L + 8;
    double mixes = (double)(c->NH * model_mix_rank(c));
    double row = 16.0 * (double)(c->C + c->F) + 8.0 * ((double)(c->NH + 2 * c->NKV) * (double)c->HS + mixes);
    double bytes = 8 * layers * rows * row + 8 * rows * (double)plan->slots +
                   16 * layers * (double)(c->NH + c->C + 2 * c->NKV * c->HS) * (double)plan->max_length;
    if (!(bytes < 0x1p62)) {
        fatal(
            "%zu x %zu tokens at once, %zu of context, %zu layers of %zu channels: more bytes than any machine has; "
            "lower --batch_size, --sequence_length or the model's sizes",
            plan->B, plan->T, plan->max_length, c->L, c->C);
    }
}

// Lays the model out without taking memory, and says how much it will take.
static inline ModelMemory model_plan(Model* model, const ModelConfig* config, const ModelPlan* plan) {
    memset(model, 0, sizeof *model);
    model->config = *config;
    model->plan = *plan;
    assert(plan->B > 0 && plan->T > 0 && plan->max_length >= plan->T && plan->slots > 0);
    model_check_sizes(config, plan);
    model_layout_params(model);
    model_layout_segments(model);
    model_layout_rows(model);
    model_layout_tables(model);
    model_layout_activations(model);
    bool training = plan->mode != MODE_INFERENCE;
    size_t fp32 = model->param_count * sizeof(float);
    ModelMemory memory;
    memory.parameters = sizeof(floatX) == sizeof(float) ? fp32 : fp32 + model->param_count * sizeof(floatX);
    memory.gradients = training ? fp32 : 0;
    memory.optimizer = training ? 2 * model->moment_count * sizeof(float) : 0;
    memory.activations = model->act_bytes;
    memory.tables = sizeof(float) *
                    (config->NH + model_position_table_size(config, plan->max_length) + model_bias_tables_size(model));
    memory.workspace = model_workspace_bytes(model);
    return memory;
}

static inline size_t model_memory_total(const ModelMemory* m) {
    return m->parameters + m->gradients + m->optimizer + m->activations + m->tables + m->workspace;
}

static inline void model_fill_position_table(Model* model) {
    const ModelConfig* c = &model->config;
    size_t length = model->plan.max_length, size = model_position_table_size(c, length);
    if (size == 0) { return; }
    model->position_table = (float*)device_malloc(size * sizeof(float));
    if (model_learns_positions(c)) { return; }  // it is filled when the weights are there
    const PositionSettings settings = model_position_settings(c);
    for (size_t layer = 0; layer < c->L; layer++) {
        const PosencMechanism mechanism = model_layer_info(c, layer)->mechanism;
        if (mechanism != POSENC_ADD && mechanism != POSENC_ROTATE) { continue; }
        position_table(model->position_table, model_layer_encoding(c, layer), &settings, length, size / length);
        return;  // all layers that need a table need this one
    }
}

// Takes the memory of a planned model. Parameters are zero until they are initialised or loaded.
static inline void model_allocate(Model* model) {
    size_t n = model->param_count;
    model->master = (float*)device_malloc(n * sizeof(float));
    model->params =
        sizeof(floatX) == sizeof(float) ? (floatX*)model->master : (floatX*)device_malloc(n * sizeof(floatX));
    if (model->plan.mode != MODE_INFERENCE) {
        model->grads = (float*)device_malloc(n * sizeof(float));
        model->m = (float*)device_malloc(model->moment_count * sizeof(float));
        model->v = (float*)device_malloc(model->moment_count * sizeof(float));
    }
    model->activations = (char*)device_malloc(model->act_bytes);
    model_fill_position_table(model);
    size_t tables = model_bias_tables_size(model);
    if (tables) { model->bias_tables = (float*)device_malloc(tables * sizeof(float)); }
    model->tables_stale = true, model->positions = model->plan.max_length;
    float ones[MODEL_MAX_HEADS];
    for (size_t h = 0; h < model->config.NH; h++) { ones[h] = 1.0f; }
    model->ones = (float*)device_malloc(model->config.NH * sizeof(float));
    copy_to_device(model->ones, ones, model->config.NH * sizeof(float));
    model->workspace = device_malloc(model_workspace_bytes(model));
}

static inline void model_free(Model* model) {
    if ((void*)model->params != (void*)model->master) { device_free(model->params); }
    void* memory[] = {model->master,         model->grads, model->m,           model->v,        model->activations,
                      model->position_table, model->ones,  model->bias_tables, model->workspace};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) { device_free(memory[i]); }
    free(model->tensors), free(model->segments), free(model->param_offset), free(model->bias_table);
    free(model->row_rule);
    memset(model, 0, sizeof *model);
}

// ----------------------------------------------------------------------------
// initial values, checkpoint values

typedef enum { STATE_WEIGHTS, STATE_MOMENT1, STATE_MOMENT2 } ModelState;

// The array of the state; moments are those of this optimiser, see Segment.
static inline const float* model_state(Model* model, ModelState which) {
    return which == STATE_WEIGHTS ? model->master : which == STATE_MOMENT1 ? model->m : model->v;
}

// Copies count host values into a tensor, starting at element `first` of it.
static inline void model_write_tensor(Model* model, const Tensor* t, const float* values, size_t first, size_t count) {
    copy_to_device(model->master + t->offset + first, values, count * sizeof(float));
}

// Copies count host values into the moments `array` (m or v) of a tensor, as far as this optimiser has them.
static inline void model_write_moments(Model* model, float* array, const Tensor* t, const float* values) {
    for (size_t i = 0; i < model->segment_count; i++) {
        const Segment* s = &model->segments[i];
        size_t begin = s->offset + s->begin, end = s->offset + s->end;
        begin = begin > t->offset ? begin : t->offset;
        end = end < t->offset + t->count ? end : t->offset + t->count;
        if (begin >= end) { continue; }
        float* moments = array + s->moments + (begin - s->offset - s->begin);
        copy_to_device(moments, values + (begin - t->offset), (end - begin) * sizeof(float));
    }
}

// Call after writing tensors: refreshes what is derived from them.
static inline void model_parameters_changed(Model* model) {
    cast_parameters(model->params, model->master, model->param_count);
    model->tables_stale = true;
}

static inline float initial_value(const Model* model, const Tensor* t, size_t i, Random* random) {
    switch (t->init) {
        case INIT_NORMAL: return (float)random_normal(random);
        case INIT_LINEAR: return (float)((2.0 * random_uniform(random) - 1.0) / sqrt((double)t->fan_in));
        case INIT_ONES: return 1.0f;
        case INIT_ZEROS: return 0.0f;
        // Small, so that training starts near no bias at all, and not 0, so that what weights the tables has a
        // gradient from the first step on; the tables themselves have one, since the weights are drawn as any linear's.
        case INIT_MIXED: return (float)(0.02 * random_normal(random));
        case INIT_PRIOR:
            return (float)posenc_initial(&model->config.posenc, t->posenc_tensor, i, model->config.NH, random);
    }
    return 0.0f;
}

// Draws one tensor's initial values (PyTorch's defaults for Linear and Embedding, as the published system
// uses). Each tensor has a random stream named after it, in blocks that are drawn in parallel, so a value
// depends on nothing but the seed, the name and the index.
static inline void model_init_tensor(Model* model, const Tensor* t, uint64_t seed) {
    enum { BLOCK = 1 << 16 };
    uint64_t name_hash = fnv1a(t->name, strlen(t->name));
    float* values = (float*)xcalloc(t->count, sizeof(float));
    size_t blocks = (t->count + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static)
    for (size_t block = 0; block < blocks; block++) {
        Random random = random_stream(seed, name_hash + block);
        size_t end = (block + 1) * BLOCK < t->count ? (block + 1) * BLOCK : t->count;
        for (size_t i = block * BLOCK; i < end; i++) { values[i] = initial_value(model, t, i, &random); }
    }
    model_write_tensor(model, t, values, 0, t->count);
    free(values);
}

static inline void model_init(Model* model, uint64_t seed) {
    for (size_t i = 0; i < model->tensor_count; i++) { model_init_tensor(model, &model->tensors[i], seed); }
    model_parameters_changed(model);
}

static inline const Tensor* model_find_tensor(const Model* model, const char* name) {
    for (size_t i = 0; i < model->tensor_count; i++) {
        if (strcmp(model->tensors[i].name, name) == 0) { return &model->tensors[i]; }
    }
    return NULL;
}

#include "model_forward.h"

#endif
