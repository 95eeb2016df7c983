/*
cuDNN in place of our own attention kernels, for passes without a cache: what it can do, the description of packed
documents on the device, its workspace. Private to cuda_forward.cuh and cuda_backward.cuh, in builds with USE_CUDNN.

cuDNN knows no first visible key; a batch with more than one document in a sequence is handed to it as that many
shorter sequences. How many there are is known on the host (AttentionInput.documents), where they are only on the
device. A graph is built for a number of documents, so numbers are rounded up and the rest are of length 0.
*/
#ifndef ATTENTION_CUDNN_CUH
#define ATTENTION_CUDNN_CUH

#include "cuda_tasks.cuh"
#include "cudnn_graph.h"

enum {
    DOCUMENT_THREADS = 1024,
    CUDNN_PLANNED_DOCUMENTS = 2,  // per sequence: batches with more may need memory beside the planned
};

// Chosen once, by attention_choose.
static struct { bool on, slopes; } cudnn_attention;

// ----------------------------------------------------------------------------
// documents

typedef struct {
    CudnnDocuments arrays;
    int64_t* first;  // [documents + 1] row of the document's first token
    size_t documents, bytes;
} DocumentSpace;

static inline DocumentSpace document_space(size_t documents, void* workspace) {
    DocumentSpace d;
    memset(&d, 0, sizeof d);
    d.documents = documents;
    if (documents == 0) { return d; }
    Arena arena = {(char*)workspace, 0};
    const size_t offsets = (documents + 1) * sizeof(int64_t);
    d.arrays.lengths = (int32_t*)arena_take(&arena, documents * sizeof(int32_t));
    d.arrays.q = (int64_t*)arena_take(&arena, offsets);
    d.arrays.kv = (int64_t*)arena_take(&arena, offsets);
    d.arrays.out = (int64_t*)arena_take(&arena, offsets);
    d.arrays.statistics = (int64_t*)arena_take(&arena, offsets);
    d.first = (int64_t*)arena_take(&arena, offsets);
    d.bytes = arena.used;
    return d;
}

// One block. A document begins where a token's first visible key is itself. Each thread takes consecutive rows.
__global__ void __launch_bounds__(DOCUMENT_THREADS)
    attention_documents_kernel(DocumentSpace d, CudnnShape shape, const int* start) {
    SHARED(int, warps, [DOCUMENT_THREADS / 32]);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const size_t N = shape.B * shape.T, share = (N + DOCUMENT_THREADS - 1) / DOCUMENT_THREADS;
    const size_t begin = min(threadIdx.x * share, N), end = min(begin + share, N);
    int count = 0;
    for (size_t n = begin; n < end; n++) { count += start[n] == (int)(n % shape.T); }
    int below = count;  // inclusive sum over the warp's lanes
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, below, offset);
        if (lane >= offset) { below += other; }
    }
    if (lane == 31) { warps[warp] = below; }
    __syncthreads();
    size_t index = (size_t)(below - count), total = 0;
    for (int w = 0; w < DOCUMENT_THREADS / 32; w++) {
        if (w < warp) { index += (size_t)warps[w]; }
        total += (size_t)warps[w];
    }
    for (size_t n = begin; n < end; n++) {
        if (start[n] == (int)(n % shape.T) && index < d.documents) { d.first[index++] = (int64_t)n; }
    }
    for (size_t i = total + threadIdx.x; i <= d.documents; i += DOCUMENT_THREADS) { d.first[i] = (int64_t)N; }
    __syncthreads();
    for (size_t i = threadIdx.x; i <= d.documents; i += DOCUMENT_THREADS) {
        const int64_t row = d.first[i];
        d.arrays.q[i] = row * (int64_t)shape.q_stride, d.arrays.kv[i] = row * (int64_t)shape.kv_stride;
        d.arrays.out[i] = row * (int64_t)(shape.NH * shape.HS), d.arrays.statistics[i] = row * (int64_t)shape.NH;
        if (i < d.documents) { d.arrays.lengths[i] = (int32_t)(d.first[i + 1] - row); }
    }
}

// ----------------------------------------------------------------------------
// shapes and workspace

// 0 for one document per sequence, else B times a power of two: few graphs, whatever the data.
static inline size_t cudnn_documents(size_t documents, size_t B, size_t T) {
    if (documents <= B) { return 0; }
    size_t rounded = B;
    while (rounded < documents) { rounded *= 2; }
    return rounded < B * T ? rounded : B * T;
}

static inline CudnnShape cudnn_shape(const AttentionInput* in) {
    CudnnShape s;
    memset(&s, 0, sizeof s);
    s.B = in->size.B, s.T = in->size.Tq, s.NH = in->size.NH, s.NKV = in->size.NKV, s.HS = in->size.HS;
    s.q_stride = in->q_stride, s.kv_stride = in->kv_stride;
    s.documents = in->start ? cudnn_documents(in->documents, in->size.B, in->size.Tq) : 0;
    s.slopes = attention_has(in, TERM_DISTANCE);  // not in every layer
    return s;
}

static inline size_t cudnn_bytes(const CudnnShape* s, bool backward) {
    return document_space(s->documents, NULL).bytes + attention_cudnn_workspace(s, backward);
}

// What is planned for: q, k and v side by side; the description of any number of documents, cuDNN's workspace for one
// document per sequence or a few.
static inline size_t cudnn_planned_bytes(const AttentionSizes* size, bool backward) {
    const size_t B = size->B, T = size->Tq, NH = size->NH, NKV = size->NKV, stride = (NH + 2 * NKV) * size->HS;
    CudnnShape s = {B, T, NH, NKV, size->HS, stride, stride, 0, cudnn_attention.slopes};
    size_t most = 0;
    for (size_t documents = 1; documents <= CUDNN_PLANNED_DOCUMENTS; documents++) {
        s.documents = cudnn_documents(documents * B, B, T);
        for (int direction = 0; direction <= (backward ? 1 : 0); direction++) {
            const size_t bytes = attention_cudnn_workspace(&s, direction == 1);
            most = bytes > most ? bytes : most;
        }
    }
    return document_space(B * T, NULL).bytes + most;
}

// The caller's workspace, or memory of our own where a batch needs more than was planned: announced, kept and grown.
static inline void* cudnn_workspace(const CudnnShape* s, const AttentionSizes* size, bool backward, void* planned) {
    static void* extra;
    static size_t extra_bytes;
    const size_t needed = cudnn_bytes(s, backward);
    if (needed <= cudnn_planned_bytes(size, backward)) { return planned; }
    if (needed > extra_bytes) {
        char size[16];
        warn("cuDNN's attention takes %s beside the planned memory, for a batch of up to %zu documents",
             format_bytes(size, needed), s->documents);
        if (extra) { device_free(extra); }
        extra = device_malloc(needed), extra_bytes = needed;
    }
    return extra;
}

// ----------------------------------------------------------------------------
// the operator

// Passes that know their documents have no cache: their queries see nothing but what is in the batch. cuDNN has no
// backward for single tokens.
static inline bool attention_is_cudnn(const AttentionInput* in) {
    return cudnn_attention.on && in->documents > 0 && in->size.Tq == in->size.Tk && in->size.Tq > 1;
}

// Describes the documents at the start of the workspace; returns what is left of it for cuDNN.
static inline void* cudnn_prepare(DocumentSpace* d, const CudnnShape* s, const AttentionInput* in, void* workspace) {
    *d = document_space(s->documents, workspace);
    if (s->documents > 0) {
        LAUNCH(attention_documents_kernel, dim3(1), DOCUMENT_THREADS, 0, main_stream, *d, *s, in->start);
        cudaCheck(cudaGetLastError());
    }
    return (char*)workspace + d->bytes;
}

static inline void cudnn_check(const AttentionInput* in) {
    assert(!attention_has(in, TERM_SCALE) && (!attention_has(in, TERM_DISTANCE) || cudnn_attention.slopes));
    assert(in->q_batch == in->size.Tq * in->q_stride && in->kv_batch == in->size.Tk * in->kv_stride);
}

static inline void attention_forward_cudnn(floatX* out, float* lse, const AttentionInput* in, void* workspace) {
    cudnn_check(in);
    const CudnnShape s = cudnn_shape(in);
    DocumentSpace d;
    void* rest = cudnn_prepare(&d, &s, in, cudnn_workspace(&s, &in->size, false, workspace));
    CudnnArrays arrays;
    memset(&arrays, 0, sizeof arrays);
    arrays.q = in->q, arrays.k = in->k, arrays.v = in->v;
    attention_cudnn_forward(out, lse, &arrays, &d.arrays, &s, rest, main_stream);
}

static inline void attention_backward_cudnn(const AttentionGradients* to, const floatX* dout, const floatX* out,
                                            const float* lse, const AttentionInput* in, void* workspace) {
    cudnn_check(in);
    const CudnnShape s = cudnn_shape(in);
    DocumentSpace d;
    void* rest = cudnn_prepare(&d, &s, in, cudnn_workspace(&s, &in->size, true, workspace));
    CudnnArrays arrays;
    memset(&arrays, 0, sizeof arrays);
    arrays.q = in->q, arrays.k = in->k, arrays.v = in->v, arrays.out = out, arrays.dout = dout;
    arrays.dq = to->dq, arrays.dk = to->dk, arrays.dv = to->dv, arrays.statistics = (float*)lse;
    attention_cudnn_backward(&arrays, &d.arrays, &s, rest, main_stream);
}

#endif
