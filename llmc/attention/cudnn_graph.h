/*
Causal attention by cuDNN's graph API in bf16, behind plain functions: cudnn_graph.cpp implements them, and
cudnn.cuh calls them in a build with USE_CUDNN. Compiled and linked, its graphs accepted by cuDNN 9.19 for
Hopper, not yet run on a device.

softmax(q.k / sqrt(HS) + bias) v as in terms.h, with two differences: a row with one visible key has gradients of q and
k that are zero up to rounding, and logits so large that fp32 lse is coarse (beyond about 1000) lose precision.

Either all sequences are one document each (documents == 0), or documents are packed: cuDNN then sees each document as
a sequence of its own in its packed ("ragged") layout, addressed by arrays on the device.
*/
#ifndef ATTENTION_CUDNN_GRAPH_H
#define ATTENTION_CUDNN_GRAPH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// What a graph is built for. Sequences follow one another without a gap: b*T + t is the row of token t.
typedef struct {
    size_t B, T, NH, NKV, HS;
    size_t q_stride, kv_stride;  // elements between rows of q and dq; of k, v, dk and dv
    size_t documents;            // 0: one per sequence; else the length of the arrays below
    bool slopes;                 // the bias -m_h d of Press et al. 2022, the only one that cuDNN has; else none
} CudnnShape;

// On the device: the documents in order, then unused ones of length 0 at the end of the last.
typedef struct {
    int32_t* lengths;                    // [documents]
    int64_t *q, *kv, *out, *statistics;  // [documents + 1] elements before each document in such an array
} CudnnDocuments;

typedef struct {
    const void *q, *k, *v, *out, *dout;
    void *dq, *dk, *dv;
    float* statistics;  // B*T*NH floats, the forward's for the backward: ln of the softmax's denominator, [B,NH,T] when
                        // documents == 0, else [B*T,NH]
} CudnnArrays;

// Bytes of cuDNN's workspace. The first call for a shape builds its graph: parts of a second, or the end of the
// program with one line where cuDNN cannot do it.
size_t attention_cudnn_workspace(const CudnnShape* shape, bool backward);

// Writes out and statistics, or dq, dk and dv. `stream` is a cudaStream_t.
void attention_cudnn_forward(void* out, float* statistics, const CudnnArrays* inputs, const CudnnDocuments* documents,
                             const CudnnShape* shape, void* workspace, void* stream);
void attention_cudnn_backward(const CudnnArrays* arrays, const CudnnDocuments* documents, const CudnnShape* shape,
                              void* workspace, void* stream);

#ifdef __cplusplus
}
#endif

#endif
