/*
The computation of model.h: forward, backward, update, prefill. Included by model.h only.
*/
#ifndef MODEL_FORWARD_H
#define MODEL_FORWARD_H

// One pass of N = B*T rows through the blocks. With a cache, B is 1 and the rows stand at positions
// position .. position + T - 1 of the cached sequence.
typedef struct {
    size_t B, T, position;
    KVCache* cache;
} Pass;

// ----------------------------------------------------------------------------
// tables of positions

// Where in the parameters what the layer's encoding learns stands.
static inline size_t model_prior_offset(const Model* model, size_t layer) {
    const ModelConfig* c = &model->config;
    const size_t* at = model->param_offset[layer];
    return c->options.global_prior
               ? at[PARAM_global_prior] + model_global_prior_place(c, model_layer_encoding(c, layer))
               : at[PARAM_prior];
}

static inline float* model_bias_table(const Model* model, size_t layer) {
    if (model->bias_table[layer] == NO_TABLE) { return NULL; }
    return model->bias_tables + model->bias_table[layer] * model->config.NH * model->plan.max_length;
}

static inline void model_refresh_tables(Model* model) {
    if (!model->tables_stale) { return; }
    const ModelConfig* c = &model->config;
    size_t next = 0;  // each table once, by the first layer that reads it
    for (size_t layer = 0; layer < c->L; layer++) {
        if (model->bias_table[layer] != next) { continue; }
        next++;
        const PosKind encoding = model_layer_encoding(c, layer);
        const bool learned = posenc_params(encoding) > 0;
        if (!learned && model->tables_filled) { continue; }
        bias_table_forward(model_bias_table(model, layer), encoding, model_posenc_settings(c),
                           learned ? model->master + model_prior_offset(model, layer) : NULL, c->NH,
                           model->plan.max_length);
    }
    if (model_learns_positions(c) && model->position_table) {
        learned_table(model->position_table, model_params(model, 0).position_embeddings, c->learned_interpolated,
                      model->positions, c->options.learned_length, c->C);
    }
    model->tables_stale = false, model->tables_filled = true;
}

// Call before a sequence of another length is read through a cache, which must be empty: interpolated positions depend
// on it.
static inline void model_read_length(Model* model, size_t length) {
    assert(length <= model->plan.max_length);
    model->tables_stale |= model->config.learned_interpolated && model->positions != length;
    model->positions = length;
}

// What is added to the embedding at each position; NULL where that is nothing.
static inline const float* model_added_positions(const Model* model) {
    const ModelConfig* c = &model->config;
    if (!model_adds_positions(c)) { return NULL; }
    return model->position_table ? model->position_table : model_params(model, 0).position_embeddings;
}

// The cumulated gates of a layer, [B,NH,stride] from the first position on: in the cache, where there is one.
typedef struct {
    double* at;
    size_t stride;
} ForgetSums;

static inline ForgetSums model_forget_sums(const Model* model, size_t layer, const Pass* pass) {
    ForgetSums sums = {model_activations(model, layer).forget_sums, pass->T};
    if (pass->cache) {
        sums.stride = pass->cache->capacity;
        sums.at = pass->cache->forget_sums + layer * model->config.NH * sums.stride;
    }
    return sums;
}

// What attention reads in this layer: from the layer's own rows, or keys and values from the cache.
static inline AttentionInput model_attention_input(const Model* model, size_t layer, const Pass* pass) {
    LAYER_DIMENSIONS(&model->config, layer);
    Activations a = model_activations(model, layer);
    const float* bias = model_bias_table(model, layer);
    const ModelOptions* o = &model->config.options;
    const unsigned terms = model_layer_terms(&model->config, layer) & ~(unsigned)TERM_SLOPES;
    const AttentionSizes size = {pass->B, pass->T, pass->position + pass->T, NH, NKV, HS, terms, MR, ML};
    AttentionInput in;
    memset(&in, 0, sizeof in);
    in.size = size;
    in.q = a.qkv, in.q_stride = QKV, in.q_batch = pass->T * QKV;
    if (pass->cache) {
        in.k = pass->cache->entries + layer * pass->cache->capacity * 2 * NKV * HS;
        in.v = in.k + NKV * HS;
        in.kv_stride = 2 * NKV * HS, in.kv_batch = pass->cache->capacity * 2 * NKV * HS;
    } else {
        in.k = a.qkv + NH * HS, in.v = in.k + NKV * HS;
        in.kv_stride = QKV, in.kv_batch = pass->T * QKV;
    }
    const size_t rows = model->row_rule[layer] * pass->B * pass->T;
    in.start = a.start + rows, in.documents = model_layer_window(&model->config, layer) ? 0 : model->documents;
    const ForgetSums sums = model_forget_sums(model, layer, pass);
    in.logit.by_key = sums.at, in.logit.key_stride = sums.stride;
    in.logit.by_distance = bias, in.logit.distance_stride = model->plan.max_length;
    in.logit.inside = model_bias_inside(&model->config, layer);
    in.logit.seq_scale = SS ? model_params(model, layer).seq_scale : model->ones,
    in.logit.log_count = a.log_count + rows;
    in.logit.cap = (float)o->softcap, in.logit.cap_approximate = o->softcap_approx;
    in.logit.sink = SK ? model_params(model, layer).sink : NULL;
    in.logit.mix = a.qkv + (NH + 2 * NKV) * HS, in.logit.mixed = model_params(model, layer).mixed;
    in.logit.mix_stride = in.q_stride, in.logit.mix_batch = in.q_batch;
    return in;
}

// How many documents B sequences hold: each begins one, and so does each token bos.
static inline size_t count_documents(const int* tokens, int bos, size_t B, size_t T) {
    size_t count = 0;
    for (size_t n = 0; n < B * T; n++) { count += n % T == 0 || (bos >= 0 && tokens[n] == bos); }
    return count;
}

// ----------------------------------------------------------------------------
// forward

// From attention_norm to the numbers by key.
static inline void forward_forget(const Model* model, size_t layer, const Pass* pass) {
    LAYER_DIMENSIONS(&model->config, layer);
    Activations a = model_activations(model, layer);
    Params p = model_params(model, layer);
    const ForgetSums sums = model_forget_sums(model, layer, pass);
    forget_gates(a.forget_gates, a.attention_norm, p.forget, p.forget_bias, pass->B * pass->T, C, NH);
    forget_sums(sums.at, a.forget_gates, a.start + model->row_rule[layer] * pass->B * pass->T,
                model_layer_info(&model->config, layer)->mechanism, pass->position, pass->B, pass->T, NH, sums.stride);
}

// From attention_norm to qkv, with q and k normed and rotated where that is asked for.
static inline void forward_qkv(const Model* model, size_t layer, const Pass* pass) {
    LAYER_DIMENSIONS(&model->config, layer);
    Activations a = model_activations(model, layer);
    matmul_forward(a.qkv, a.attention_norm, model_params(model, layer).wq, model->workspace, pass->B * pass->T, C, QKV);
    if (QN) {
        const size_t N = pass->B * pass->T;
        Params p = model_params(model, layer);
        heads_rmsnorm_forward(a.qkv, QKV, a.qk_before, a.qk_rstd, p.q_norm, N, NH, HS);
        heads_rmsnorm_forward(a.qkv + NH * HS, QKV, a.qk_before + N * NH * HS, a.qk_rstd + N * NH, p.k_norm, N, NKV,
                              HS);
    }
    if (model_layer_info(&model->config, layer)->mechanism == POSENC_ROTATE) {
        rotary_forward(a.qkv, model->position_table + pass->position * HS, pass->B, pass->T, NH, NKV, HS);
    }
    if (pass->cache) {
        floatX* entries = pass->cache->entries + (layer * pass->cache->capacity + pass->position) * 2 * NKV * HS;
        copy_columns(entries, 2 * NKV * HS, a.qkv + NH * HS, QKV, pass->T, 2 * NKV * HS);
    }
}

// What wo reads: attention's output, behind its gate where it has one.
static inline const floatX* attention_output(const Model* model, size_t layer, size_t N) {
    MODEL_DIMENSIONS(&model->config);
    Activations a = model_activations(model, layer);
    if (!GA) { return a.attention; }
    gate_forward(a.gated, a.attention, a.gate, N * C);
    return a.gated;
}

// The block up to its feed-forward activation: everything that a backward pass through the block needs.
static inline void forward_block(const Model* model, size_t layer, const Pass* pass) {
    LAYER_DIMENSIONS(&model->config, layer);
    const size_t N = pass->B * pass->T;
    Activations a = model_activations(model, layer);
    Params p = model_params(model, layer);
    forward_qkv(model, layer, pass);
    if (FH > 0) { forward_forget(model, layer, pass); }
    AttentionInput in = model_attention_input(model, layer, pass);
    attention_forward(a.attention, a.lse, &in, model->workspace);
    if (GA) { matmul_forward(a.gate, a.attention_norm, p.gate, model->workspace, N, C, C); }
    matmul_forward(a.projection, attention_output(model, layer, N), p.wo, model->workspace, N, C, C);
    residual_rmsnorm_forward(a.residual_mid, a.ffn_norm, a.ffn_rstd, a.residual, a.projection, p.ffn_norm, N, C);
    matmul_forward(a.gate_up, a.ffn_norm, p.w1, model->workspace, N, C, 2 * F);
    swiglu_forward(a.swiglu, a.gate_up, N, F);
}

// The end of the block and the norm that follows it: the next block's, or the last.
static inline void forward_block_end(const Model* model, size_t layer, const Pass* pass) {
    MODEL_DIMENSIONS(&model->config);
    const size_t N = pass->B * pass->T;
    Activations a = model_activations(model, layer);
    matmul_forward(a.projection, a.swiglu, model_params(model, layer).w2, model->workspace, N, F, C);
    if (layer + 1 < L) {
        Activations next = model_activations(model, layer + 1);
        residual_rmsnorm_forward(next.residual, next.attention_norm, next.attention_rstd, a.residual_mid, a.projection,
                                 model_params(model, layer + 1).attention_norm, N, C);
    } else {
        residual_rmsnorm_forward(a.residual_final, a.final_norm, a.final_rstd, a.residual_mid, a.projection,
                                 model_params(model, layer).norm, N, C);
    }
}

// What the queries of the layers see, once for each rule.
static inline void forward_rows(const Model* model, const Pass* pass) {
    const size_t N = pass->B * pass->T;
    const int document_start = pass->cache ? pass->cache->document_start : 0;
    Activations a = model_activations(model, 0);
    size_t next = 0;
    for (size_t layer = 0; layer < model->config.L; layer++) {
        if (model->row_rule[layer] != next) { continue; }
        int* start = a.start + next * N;
        float* log_count = a.log_count + next * N;
        const RowRule rule = model_row_rule(&model->config, layer);
        document_starts(start, log_count, a.tokens, model->config.bos, pass->position, document_start, pass->B,
                        pass->T);
        if (rule.window || rule.from > 0) { limit_rows(start, log_count, rule, pass->position, pass->B, pass->T); }
        next++;
    }
}

// From tokens to final_norm, the input of the output head.
static inline void forward_pass(Model* model, const int* tokens, const Pass* pass) {
    MODEL_DIMENSIONS(&model->config);
    const size_t N = pass->B * pass->T;
    assert(N <= model->plan.B * model->plan.T && pass->position + pass->T <= model->plan.max_length);
    model->B = pass->B, model->T = pass->T;
    model->documents = pass->cache ? 0 : count_documents(tokens, model->config.bos, pass->B, pass->T);
    model_refresh_tables(model);
    Activations a = model_activations(model, 0);
    Params p = model_params(model, 0);
    copy_to_device(a.tokens, tokens, N * sizeof(int));
    forward_rows(model, pass);
    const float* added = model_added_positions(model);
    embedding_forward(a.residual, a.tokens, p.tok_embeddings, added ? added + pass->position * C : NULL, pass->B,
                      pass->T, C);
    rmsnorm_forward(a.attention_norm, a.attention_rstd, a.residual, p.attention_norm, N, C);
    for (size_t layer = 0; layer < L; layer++) {
        forward_block(model, layer, pass);
        forward_block_end(model, layer, pass);
    }
}

// Runs B sequences of T tokens, tokens[B*T] on the host. The result stays in the model for model_losses,
// model_backward and model_logits.
static inline void model_forward(Model* model, const int* tokens, size_t B, size_t T) {
    Pass pass = {B, T, 0, NULL};
    forward_pass(model, tokens, &pass);
}

// After a forward: the losses of every row against targets[B*T] (host), into the given slot.
static inline void model_losses(Model* model, const int* targets, size_t slot) {
    const ModelConfig* c = &model->config;
    const size_t N = model->B * model->T;
    Activations a = model_activations(model, 0);
    copy_to_device(a.targets, targets, N * sizeof(int));
    cross_entropy_head(a.losses + slot * N, NULL, NULL, a.final_norm, model_params(model, 0).output, a.targets, 0.0f,
                       model_final_cap(c), model->workspace, N, c->C, c->V);
}

// Mean loss over slots 0 .. slots-1, each of the last pass's rows.
static inline double model_mean_loss(const Model* model, size_t slots) {
    size_t n = slots * model->B * model->T;
    return array_sum(model_activations(model, 0).losses, n) / (double)n;
}

// Logits of one row of the last pass, to host memory logits[V].
static inline void model_logits(const Model* model, float* logits, size_t row) {
    const ModelConfig* c = &model->config;
    Activations a = model_activations(model, 0);
    matmul_forward(a.logits, a.final_norm + row * c->C, model_params(model, 0).output, model->workspace, 1, c->C, c->V);
    copy_floats_to_host(logits, a.logits, c->V);
    const float cap = model_final_cap(c);
    for (size_t i = 0; cap != 0 && i < c->V; i++) { logits[i] = cap * tanhf(logits[i] / cap); }
}

// ----------------------------------------------------------------------------
// key/value cache

static inline size_t kv_cache_bytes(const ModelConfig* c, size_t capacity) {
    const size_t gates = model_has_forget_gates(c) ? c->NH * sizeof(double) : 0;
    return c->L * capacity * (2 * c->NKV * c->HS * sizeof(floatX) + gates);
}

static inline KVCache kv_cache_create(const ModelConfig* c, size_t capacity) {
    const size_t gates = model_has_forget_gates(c) ? c->L * c->NH * capacity * sizeof(double) : 0;
    KVCache cache = {(floatX*)device_malloc(kv_cache_bytes(c, capacity) - gates), capacity, 0, 0, NULL};
    if (gates > 0) { cache.forget_sums = (double*)device_malloc(gates); }
    return cache;
}

static inline void kv_cache_free(KVCache* cache) {
    device_free(cache->entries), device_free(cache->forget_sums);
    memset(cache, 0, sizeof *cache);
}

// Appends n tokens (host) to the cached sequence, n at most the plan's B*T; afterwards row i of the model
// is token i of these.
static inline void model_prefill(Model* model, KVCache* cache, const int* tokens, size_t n) {
    assert(cache->length + n <= cache->capacity);
    Pass pass = {1, n, cache->length, cache};
    forward_pass(model, tokens, &pass);
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] == model->config.bos) { cache->document_start = (int)(cache->length + i); }
    }
    cache->length += n;
}

// ----------------------------------------------------------------------------
// backward

static inline void model_zero_gradients(Model* model) { device_zero(model->grads, model->param_count * sizeof(float)); }

// d_residual: from the gradient of the block's output to that of its middle (after attention).
static inline void backward_ffn(const Model* model, size_t layer, size_t N) {
    MODEL_DIMENSIONS(&model->config);
    Activations a = model_activations(model, layer);
    Params p = model_params(model, layer);
    Gradients g = model_gradients(model, layer);
    matmul_backward(a.d_wide, g.w2, a.d_residual, a.swiglu, p.w2, model->workspace, N, F, C);
    swiglu_backward(a.gate_up, a.d_wide, a.gate_up, N, F);
    matmul_backward(a.d_norm, g.w1, a.gate_up, a.ffn_norm, p.w1, model->workspace, N, C, 2 * F);
    rmsnorm_backward(a.d_residual, g.ffn_norm, a.d_norm, a.residual_mid, p.ffn_norm, a.ffn_rstd, model->workspace, N,
                     C);
}

// From the gradient of the numbers by key: adds to d_norm. The gates are used up.
static inline void backward_forget(const Model* model, size_t layer, const Pass* pass) {
    LAYER_DIMENSIONS(&model->config, layer);
    Activations a = model_activations(model, layer);
    Params p = model_params(model, layer);
    Gradients g = model_gradients(model, layer);
    forget_sums_backward(a.forget_gates, a.d_forget_sums, a.forget_gates,
                         a.start + model->row_rule[layer] * pass->B * pass->T,
                         model_layer_info(&model->config, layer)->mechanism, pass->B, pass->T, NH);
    forget_gates_backward(a.d_norm, g.forget, g.forget_bias, a.forget_gates, a.attention_norm, p.forget,
                          model->workspace, pass->B * pass->T, C, NH);
}

// d_residual: from the gradient of the block's middle to that of its input.
static inline void backward_attention(const Model* model, size_t layer, const Pass* pass) {
    LAYER_DIMENSIONS(&model->config, layer);
    const size_t N = pass->B * pass->T;
    Activations a = model_activations(model, layer);
    Params p = model_params(model, layer);
    Gradients g = model_gradients(model, layer);
    floatX* d_qkv = a.d_wide;
    matmul_backward(a.d_norm, g.wo, a.d_residual, attention_output(model, layer, N), p.wo, model->workspace, N, C, C);
    if (GA) { gate_backward(a.d_norm, a.gate, a.d_norm, a.attention, a.gate, N * C); }
    AttentionInput in = model_attention_input(model, layer, pass);
    const size_t table = in.logit.distance_stride;
    if (attention_has(&in, TERM_DISTANCE)) { device_zero(a.d_bias, NH * table * sizeof(float)); }  // 0 beyond T
    AttentionGradients d;
    memset(&d, 0, sizeof d);
    d.dq = d_qkv, d.dk = d_qkv + NH * HS, d.dv = d_qkv + (NH + NKV) * HS;
    d.dby_distance = a.d_bias, d.dseq_scale = SS ? g.seq_scale : a.d_row_scale, d.dsink = g.sink;
    d.dmix = d_qkv + (NH + 2 * NKV) * HS, d.dmixed = g.mixed;
    d.dby_key = a.d_forget_sums;
    attention_backward(&d, a.d_norm, a.attention, a.lse, &in, model->workspace);
    const PosKind encoding = model_layer_encoding(&model->config, layer);
    if (posenc_params(encoding) > 0) {
        const size_t prior = model_prior_offset(model, layer);
        bias_table_backward(model->grads + prior, a.d_bias, encoding, model_posenc_settings(&model->config),
                            model->master + prior, NH, table);
    }
    if (model_layer_info(&model->config, layer)->mechanism == POSENC_ROTATE) {
        rotary_backward(d_qkv, model->position_table, pass->B, pass->T, NH, NKV, HS);
    }
    if (QN) {
        heads_rmsnorm_backward(d_qkv, QKV, g.q_norm, a.qk_before, a.qk_rstd, p.q_norm, model->workspace, N, NH, HS);
        heads_rmsnorm_backward(d_qkv + NH * HS, QKV, g.k_norm, a.qk_before + N * NH * HS, a.qk_rstd + N * NH, p.k_norm,
                               model->workspace, N, NKV, HS);
    }
    matmul_backward(a.d_norm, g.wq, d_qkv, a.attention_norm, p.wq, model->workspace, N, C, QKV);
    if (FH > 0) { backward_forget(model, layer, pass); }
    rmsnorm_backward(a.d_residual, g.attention_norm, a.d_norm, a.residual, p.attention_norm, a.attention_rstd,
                     model->workspace, N, C);
    if (GA) {  // the norm's gradient is linear in that of its output, so the gate's part is added by itself
        matmul_backward(a.d_norm, g.gate, a.gate, a.attention_norm, p.gate, model->workspace, N, C, C);
        rmsnorm_backward(a.d_residual, g.attention_norm, a.d_norm, a.residual, p.attention_norm, a.attention_rstd,
                         model->workspace, N, C);
    }
}

static inline void segment_ready(Model* model, size_t segment) {
    if (model->segment_ready) { model->segment_ready(model, &model->segments[segment]); }
}

// Adds to the gradients those of scale * (sum of losses over targets[B*T]) after model_forward; the losses
// go to the given slot. The activations are used up.
static inline void model_backward(Model* model, const int* targets, float scale, size_t slot) {
    MODEL_DIMENSIONS(&model->config);
    const size_t N = model->B * model->T;
    Pass pass = {model->B, model->T, 0, NULL};
    Activations a = model_activations(model, 0);
    Params p = model_params(model, 0);
    Gradients g = model_gradients(model, 0);
    copy_to_device(a.targets, targets, N * sizeof(int));
    cross_entropy_head(a.losses + slot * N, a.d_norm, g.output, a.final_norm, p.output, a.targets, scale,
                       model_final_cap(&model->config), model->workspace, N, C, V);
    segment_ready(model, SEGMENT_OUTPUT);
    device_zero(a.d_residual, N * C * sizeof(floatX));
    rmsnorm_backward(a.d_residual, g.norm, a.d_norm, a.residual_final, p.norm, a.final_rstd, model->workspace, N, C);
    for (size_t layer = L; layer-- > 0;) {
        if (model->plan.mode == MODE_TRAIN_RECOMPUTE) {
            Activations b = model_activations(model, layer);
            rmsnorm_forward(b.attention_norm, b.attention_rstd, b.residual, model_params(model, layer).attention_norm,
                            N, C);
            forward_block(model, layer, &pass);
        }
        backward_ffn(model, layer, N);
        backward_attention(model, layer, &pass);
        segment_ready(model, SEGMENT_LAYERS + 2 * layer);
        segment_ready(model, SEGMENT_LAYERS + 2 * layer + 1);
    }
    if (model_learns_positions(&model->config)) {
        learned_backward(g.position_embeddings, a.d_residual, pass.B, pass.T, C);
    }
    segment_ready(model, SEGMENT_VECTORS);
    embedding_backward(g.tok_embeddings, a.d_residual, a.tokens, model->workspace, N, C, V);
    segment_ready(model, SEGMENT_EMBEDDING);
}

// ----------------------------------------------------------------------------
// update

typedef struct {
    double learning_rate, prior_learning_rate, weight_decay;
    double beta1, beta2, epsilon;
    double gradient_scale;  // what clipping leaves of the gradient
    size_t step;            // 1 for the first update
    bool adamw;             // else RAdam
} UpdateSettings;

// Sum of squares of the gradients of what is trained, over what this optimiser updates; what all shards update counts
// in the first. Gradients of frozen parameters are set to zero on the way.
static inline double model_gradient_squares(Model* model) {
    for (size_t i = 0; i < model->tensor_count; i++) {
        const Tensor* t = &model->tensors[i];
        if (!t->trainable) { device_zero(model->grads + t->offset, t->memory_count * sizeof(float)); }
    }
    if (model->plan.shards <= 1) { return sum_of_squares(model->grads, model->param_count); }
    double sum = 0;
    for (size_t i = 0; i < model->segment_count; i++) {
        const Segment* s = &model->segments[i];
        if (!s->sharded && model->plan.shard > 0) { continue; }
        sum += sum_of_squares(model->grads + s->offset + s->begin, s->end - s->begin);
    }
    return sum;
}

// Global norm of the gradients of what is trained, on one rank.
static inline double model_gradient_norm(Model* model) { return sqrt(model_gradient_squares(model)); }

// Updates the parameters [begin, end) of a segment, which are all of one group.
static inline void update_range(Model* model, const UpdateSettings* s, const Segment* segment, ParamGroup group,
                                size_t begin, size_t end) {
    size_t moments = segment->moments + (begin - segment->offset - segment->begin);
    OptimizerStep step;
    step.learning_rate = group == GROUP_PRIOR ? s->prior_learning_rate : s->learning_rate;
    step.beta1 = s->beta1, step.beta2 = s->beta2, step.epsilon = s->epsilon;
    step.weight_decay = group == GROUP_MATRIX ? s->weight_decay : 0.0;
    step.gradient_scale = s->gradient_scale;
    step.step = s->step, step.first = begin;
    (s->adamw ? adamw_update : radam_update)(model->master + begin, model->params + begin, model->m + moments,
                                             model->v + moments, model->grads + begin, &step, end - begin);
}

// One optimiser step over everything that is trained, as far as this optimiser has it: runs of tensors of a segment
// that share a group and follow one another in memory.
static inline void model_update(Model* model, const UpdateSettings* settings) {
    const Tensor* t = model->tensors;
    size_t first = 0;
    for (size_t i = 0; i < model->segment_count; i++) {
        const Segment* s = &model->segments[i];
        size_t own_begin = s->offset + s->begin, own_end = s->offset + s->end;
        while (first < model->tensor_count && t[first].offset < s->offset + s->count) {
            size_t last = first;
            while (last + 1 < model->tensor_count && t[last + 1].offset < s->offset + s->count &&
                   t[last + 1].group == t[first].group && t[last + 1].trainable == t[first].trainable) {
                last++;
            }
            size_t begin = t[first].offset, end = t[last].offset + t[last].memory_count;
            begin = begin > own_begin ? begin : own_begin;
            end = end < own_end ? end : own_end;
            if (t[first].trainable && begin < end) { update_range(model, settings, s, t[first].group, begin, end); }
            first = last + 1;
        }
    }
    model->tables_stale |= model_learns(&model->config) || model_learns_positions(&model->config);
}

// Call after writing the tensors that this many updates led to: what is derived from them is as those updates left it,
// so that training goes on as if it had not been interrupted.
static inline void model_parameters_restored(Model* model, size_t updates) {
    model_parameters_changed(model);
    if (updates > 0) { recast_parameters(model->params, model->master, updates, model->param_count); }
}

#endif
