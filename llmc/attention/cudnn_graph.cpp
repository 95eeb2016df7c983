// Graphs of cuDNN's attention and their execution; contract in cudnn_graph.h. The only file that includes the
// cuDNN frontend: it takes most of a minute to compile.
#include "cudnn_graph.h"

#include <math.h>

#include <map>
#include <memory>
#include <tuple>
#include <unordered_map>

#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include "../util.h"

namespace fe = cudnn_frontend;
typedef std::shared_ptr<fe::graph::Tensor_attributes> Tensor;
typedef std::unordered_map<int64_t, void*> Pointers;

// How the graphs know their tensors.
enum {
    ID_Q = 1,
    ID_K,
    ID_V,
    ID_OUT,
    ID_STATISTICS,
    ID_DOUT,
    ID_DQ,
    ID_DK,
    ID_DV,
    ID_Q_LENGTHS,
    ID_KV_LENGTHS,
    ID_Q_OFFSETS,
    ID_KV_OFFSETS,
    ID_OUT_OFFSETS,
    ID_STATISTICS_OFFSETS
};

// Statistics in the packed layout, heads that share keys there, documents without queries and keys. (Queries without
// keys, which there are none of here, give NaN before 9.25.)
enum { CUDNN_OLDEST = 90600 };

static void check_frontend(fe::error_t error, const char* file, int line) {
    if (!error.is_bad()) { return; }
    std::string message = error.get_message();
    for (char& c : message) { c = c == '\n' ? ' ' : c; }
    fatal("%s:%d: cuDNN %zu: %s; use --attention own", file, line, cudnnGetVersion(), message.c_str());
}

#define frontendCheck(call) check_frontend((call), __FILE__, __LINE__)

#define cudnnCheck(call)                                                                                      \
    do {                                                                                                      \
        cudnnStatus_t status_ = (call);                                                                       \
        if (status_ != CUDNN_STATUS_SUCCESS) {                                                                \
            fatal("%s:%d: cuDNN: %s; use --attention own", __FILE__, __LINE__, cudnnGetErrorString(status_)); \
        }                                                                                                     \
    } while (0)

static cudnnHandle_t cudnn_handle(void) {
    static cudnnHandle_t handle;
    if (handle) { return handle; }
    size_t version = cudnnGetVersion();
    if (version < CUDNN_OLDEST) {
        fatal("cuDNN: found version %zu, expected at least %d; install a newer one, or use --attention own", version,
              CUDNN_OLDEST);
    }
    cudnnCheck(cudnnCreate(&handle));
    // Gradients in a fixed order take T x T terms in the workspace; on Hopper, from cuDNN 9.25 on, only up to this many
    // bytes, and beyond them a slower engine that takes none.
    setenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", "268435456", 0);
    return handle;
}

// ----------------------------------------------------------------------------
// tensors

struct Plan {
    fe::graph::Graph graph;
    size_t workspace;
};

// A graph under construction. Offsets and lengths are NULL without packed documents.
struct Builder {
    fe::graph::Graph* graph;
    const CudnnShape* shape;
    int64_t sequences;
    Tensor q_offsets, kv_offsets, out_offsets, statistics_offsets, q_lengths, kv_lengths;
};

static Tensor index_array(Builder* b, int64_t id, int64_t count, fe::DataType_t type) {
    return b->graph->tensor(fe::graph::Tensor_attributes()
                                .set_uid(id)
                                .set_dim({count, 1, 1, 1})
                                .set_stride({1, 1, 1, 1})
                                .set_data_type(type));
}

static Builder open_builder(fe::graph::Graph* graph, const CudnnShape* s) {
    graph->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    Builder b;
    b.graph = graph, b.shape = s;
    b.sequences = (int64_t)(s->documents ? s->documents : s->B);
    if (!s->documents) { return b; }
    b.q_offsets = index_array(&b, ID_Q_OFFSETS, b.sequences + 1, fe::DataType_t::INT64);
    b.kv_offsets = index_array(&b, ID_KV_OFFSETS, b.sequences + 1, fe::DataType_t::INT64);
    b.out_offsets = index_array(&b, ID_OUT_OFFSETS, b.sequences + 1, fe::DataType_t::INT64);
    b.statistics_offsets = index_array(&b, ID_STATISTICS_OFFSETS, b.sequences + 1, fe::DataType_t::INT64);
    b.q_lengths = index_array(&b, ID_Q_LENGTHS, b.sequences, fe::DataType_t::INT32);
    b.kv_lengths = index_array(&b, ID_KV_LENGTHS, b.sequences, fe::DataType_t::INT32);
    return b;
}

// [sequences, heads, T, HS] with HS elements between heads and `stride` between rows.
static void describe_rows(Builder* b, fe::graph::Tensor_attributes* t, int64_t id, size_t heads, size_t stride,
                          const Tensor& offsets) {
    const CudnnShape* s = b->shape;
    t->set_uid(id)
        .set_dim({b->sequences, (int64_t)heads, (int64_t)s->T, (int64_t)s->HS})
        .set_stride({(int64_t)(s->T * stride), (int64_t)s->HS, (int64_t)stride, 1});
    if (offsets) { t->set_ragged_offset(offsets); }
}

static Tensor rows(Builder* b, int64_t id, size_t heads, size_t stride, const Tensor& offsets) {
    fe::graph::Tensor_attributes t;
    describe_rows(b, &t, id, heads, stride, offsets);
    return b->graph->tensor(t);
}

static void describe_statistics(Builder* b, fe::graph::Tensor_attributes* t) {
    const int64_t T = (int64_t)b->shape->T, NH = (int64_t)b->shape->NH;
    t->set_uid(ID_STATISTICS).set_data_type(fe::DataType_t::FLOAT).set_dim({b->sequences, NH, T, 1});
    if (b->statistics_offsets) {
        t->set_stride({NH * T, 1, NH, 1}).set_ragged_offset(b->statistics_offsets);
    } else {
        t->set_stride({NH * T, T, 1, 1});
    }
}

// ----------------------------------------------------------------------------
// graphs

// What both directions ask for.
template <typename Attributes>
static Attributes attention_attributes(const Builder* b) {
    Attributes a;
    a.set_attn_scale(1.0f / sqrtf((float)b->shape->HS))
        .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
        .set_diagonal_band_right_bound(0)
        .set_alibi_mask(b->shape->slopes);
    if (b->q_lengths) { a.set_padding_mask(true).set_seq_len_q(b->q_lengths).set_seq_len_kv(b->kv_lengths); }
    return a;
}

static void build_forward(Builder* b) {
    const CudnnShape* s = b->shape;
    Tensor q = rows(b, ID_Q, s->NH, s->q_stride, b->q_offsets);
    Tensor k = rows(b, ID_K, s->NKV, s->kv_stride, b->kv_offsets);
    Tensor v = rows(b, ID_V, s->NKV, s->kv_stride, b->kv_offsets);
    fe::graph::SDPA_attributes attributes = attention_attributes<fe::graph::SDPA_attributes>(b);
    auto [out, statistics] = b->graph->sdpa(q, k, v, attributes.set_generate_stats(true));
    describe_rows(b, out.get(), ID_OUT, s->NH, s->NH * s->HS, b->out_offsets);
    out->set_output(true);
    describe_statistics(b, statistics.get());
    statistics->set_output(true);
}

static void build_backward(Builder* b) {
    const CudnnShape* s = b->shape;
    Tensor q = rows(b, ID_Q, s->NH, s->q_stride, b->q_offsets);
    Tensor k = rows(b, ID_K, s->NKV, s->kv_stride, b->kv_offsets);
    Tensor v = rows(b, ID_V, s->NKV, s->kv_stride, b->kv_offsets);
    Tensor out = rows(b, ID_OUT, s->NH, s->NH * s->HS, b->out_offsets);
    Tensor dout = rows(b, ID_DOUT, s->NH, s->NH * s->HS, b->out_offsets);
    fe::graph::Tensor_attributes statistics;
    describe_statistics(b, &statistics);
    fe::graph::SDPA_backward_attributes attributes = attention_attributes<fe::graph::SDPA_backward_attributes>(b);
    attributes.set_deterministic_algorithm(true);
    if (s->documents) {  // else the workspace holds T rows for each of them
        attributes.set_max_total_seq_len_q((int64_t)(s->B * s->T)).set_max_total_seq_len_kv((int64_t)(s->B * s->T));
    }
    auto [dq, dk, dv] = b->graph->sdpa_backward(q, k, v, out, dout, b->graph->tensor(statistics), attributes);
    describe_rows(b, dq.get(), ID_DQ, s->NH, s->q_stride, b->q_offsets);
    describe_rows(b, dk.get(), ID_DK, s->NKV, s->kv_stride, b->kv_offsets);
    describe_rows(b, dv.get(), ID_DV, s->NKV, s->kv_stride, b->kv_offsets);
    dq->set_output(true), dk->set_output(true), dv->set_output(true);
}

typedef std::tuple<size_t, size_t, size_t, size_t, size_t, size_t, size_t, size_t, bool, bool> PlanKey;

// Built once for each shape and kept.
static Plan* find_plan(const CudnnShape* s, bool backward) {
    static std::map<PlanKey, std::unique_ptr<Plan>> plans;
    const PlanKey key(s->B, s->T, s->NH, s->NKV, s->HS, s->q_stride, s->kv_stride, s->documents, s->slopes, backward);
    std::unique_ptr<Plan>& plan = plans[key];
    if (plan) { return plan.get(); }
    const cudnnHandle_t handle = cudnn_handle();
    plan = std::make_unique<Plan>();
    Builder b = open_builder(&plan->graph, s);
    (backward ? build_backward : build_forward)(&b);
    frontendCheck(plan->graph.build(handle, {fe::HeurMode_t::A}));
    int64_t bytes = 0;
    frontendCheck(plan->graph.get_workspace_size(bytes));
    plan->workspace = (size_t)bytes;
    return plan.get();
}

size_t attention_cudnn_workspace(const CudnnShape* shape, bool backward) {
    return find_plan(shape, backward)->workspace;
}

// ----------------------------------------------------------------------------
// execution

static void run(Plan* plan, Pointers* pointers, const CudnnDocuments* d, const CudnnShape* shape, void* workspace,
                void* stream) {
    if (shape->documents) {
        (*pointers)[ID_Q_LENGTHS] = (*pointers)[ID_KV_LENGTHS] = d->lengths;
        (*pointers)[ID_Q_OFFSETS] = d->q, (*pointers)[ID_KV_OFFSETS] = d->kv;
        (*pointers)[ID_OUT_OFFSETS] = d->out, (*pointers)[ID_STATISTICS_OFFSETS] = d->statistics;
    }
    cudnnCheck(cudnnSetStream(cudnn_handle(), (cudaStream_t)stream));
    frontendCheck(plan->graph.execute(cudnn_handle(), *pointers, workspace));
}

static Pointers input_pointers(const CudnnArrays* a) {
    return {{ID_Q, (void*)a->q}, {ID_K, (void*)a->k}, {ID_V, (void*)a->v}};
}

void attention_cudnn_forward(void* out, float* statistics, const CudnnArrays* inputs, const CudnnDocuments* documents,
                             const CudnnShape* shape, void* workspace, void* stream) {
    Pointers pointers = input_pointers(inputs);
    pointers[ID_OUT] = out, pointers[ID_STATISTICS] = statistics;
    run(find_plan(shape, false), &pointers, documents, shape, workspace, stream);
}

void attention_cudnn_backward(const CudnnArrays* a, const CudnnDocuments* documents, const CudnnShape* shape,
                              void* workspace, void* stream) {
    Pointers pointers = input_pointers(a);
    pointers[ID_OUT] = (void*)a->out, pointers[ID_DOUT] = (void*)a->dout, pointers[ID_STATISTICS] = a->statistics;
    pointers[ID_DQ] = a->dq, pointers[ID_DK] = a->dk, pointers[ID_DV] = a->dv;
    run(find_plan(shape, true), &pointers, documents, shape, workspace, stream);
}
