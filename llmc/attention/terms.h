/*
Attention: fused, never a T x T matrix in memory (Dao et al. 2022), on the logits of a list of terms. Attention knows no
encoding by name: posenc.h fills terms, and every backend computes them in one order:

  a_ij = q_i.k_j / sqrt(HS)
  c_ij = cap tanh(a_ij / cap)                                       TERM_CAP, else a_ij
  P_ij = by_distance[h][i - j]                                      TERM_DISTANCE, else 0
         + by_key[b,h,j] - by_key[b,h,position of i]                TERM_KEY, else 0
         + sum_r mix[b,i,h,r] mixed[r][i - j] for i - j < mixed_length
                                                                    TERM_MIX, else 0
  g_i  = seq_scale[h] log_count[b,i]                                TERM_SCALE, else 1
  z_ij = g_i (c_ij + P_ij) (inside) or g_i c_ij + P_ij
  out_i = sum_j w_ij v_j / (sum_j w_ij + exp(sink[h])),  w_ij = exp(z_ij)
                                                                    TERM_SINK, else no sink
  over the visible keys start_i <= j <= position of i

Soft-capping acts on the product alone (Gemma 2). Numbers by key are cumulative sums along the sequence (forgetting
attention, Lin et al. 2025); the difference to the query's own is taken first, so that P is as exact as fp32 has it
however large the sums have grown: to |P| 2^-24 + 2^-24, where fp32 sums alone would be off by 0.01 at 262,144. A sink
is a logit without a value (Miller 2023, "softmax1", with a learned logit as in gpt-oss); tables weighted by the query
are the relative logits of Inkling, which are those of Shaw et al. 2018 (equation 5) but that the learned vectors by
distance meet not the query but a few numbers projected beside it. The CUDA kernels have no TERM_CAP, TERM_KEY,
TERM_SINK and TERM_MIX yet and refuse them.

The contract of ops.h holds here too; backend.h defines floatX before. CPU: cpu_forward.c, cpu_backward.c; CUDA:
attention.cu. Each is compiled once for every program and test.
*/
#ifndef ATTENTION_TERMS_H
#define ATTENTION_TERMS_H

#include <stdbool.h>
#include <stddef.h>

#include "../posenc.h"

// The CPU's functions are C's; those of a CUDA build are C++'s, so that a test can hold both.
#if defined(__cplusplus) && !defined(__CUDACC__) && !defined(CUDA_EMULATOR)
extern "C" {
#endif

// Query i is at position Tk - Tq + i of its sequence, 1 <= Tq <= Tk.
typedef struct {
    size_t B, Tq, Tk, NH, NKV, HS;
    unsigned terms;              // TERM_* of posenc.h
    size_t mixes, mixed_length;  // of TERM_MIX: numbers of a query and head, at most MIX_MAX_RANK; distances of a table
} AttentionSizes;

// The arrays of the terms; those of a term that is not in AttentionSizes.terms are not read.
typedef struct {
    const float* by_distance;  // P[NH,distance_stride], P[h][d] at distance d = i - j
    size_t distance_stride;    // at least Tk
    bool inside;               // z = g (c + P), else z = g c + P
    const float* seq_scale;    // s[NH]; g_i = s_h * log_count_i
    const float* log_count;    // [B,Tq]
    float cap;                 // above 0 and finite
    bool cap_approximate;      // tanh within 1e-4 instead of 3e-7
    const double* by_key;      // [B,NH,key_stride]
    size_t key_stride;         // at least Tk
    const float* sink;         // [NH]
    // The numbers of head h of query i: mix + i*mix_stride + h*mixes. They come out of the product that q comes from
    // and are read where it leaves them, so in its type and with strides between queries and between sequences.
    const floatX* mix;
    size_t mix_stride, mix_batch;
    const float* mixed;  // [mixes,mixed_length]
} LogitTerms;

// CUDA reads rows 16 bytes at a time: q, k, v aligned to 16 bytes, strides and HS multiples of 8, HS at most 128.
typedef struct {
    AttentionSizes size;
    const floatX *q, *k, *v;     // head h of token t: pointer + t*stride + h*HS
    size_t q_stride, kv_stride;  // elements between tokens
    size_t q_batch, kv_batch;    // elements between sequences
    const int* start;            // [B,Tq] first visible key, nondecreasing along t; NULL: 0
    size_t documents;            // 0: not known; else each start is its document's first token, without a cache,
                                 // and there are at most this many in the batch
    LogitTerms logit;
} AttentionInput;

// Gradients of what has these names in AttentionInput, in the same layout; those of absent terms are not written.
typedef struct {
    floatX *dq, *dk, *dv;
    float *dby_distance, *dseq_scale, *dby_key, *dsink;
    floatX* dmix;
    float* dmixed;
} AttentionGradients;

#ifdef __CUDACC__
__host__ __device__
#endif
    static inline bool
    attention_has(const AttentionInput* in, unsigned term) {
    return (in->size.terms & term) != 0;
}

// Chooses, once at the start, what computes passes whose documents are known: "own" or "cudnn" (cudnn_graph.h), for
// these terms. Ends the program with one line where the build or the library cannot do it.
void attention_choose(const char* name, unsigned terms);

// out[B,Tq,NH*HS] as above; lse[B,NH,Tq] = the natural logarithm of the softmax's denominator, may be NULL.
// Overwrites both. A query with one visible key and no sink gives exactly that key's value.
void attention_forward(floatX* out, float* lse, const AttentionInput* in, void* workspace);

// Gradients, for Tq == Tk. dq, dk, dv have the strides of q, k, v and are overwritten; dk and dv are summed over the
// query heads that read them; dmix is overwritten likewise. dby_distance[NH,distance_stride], entries d < Tk, is
// overwritten (cuDNN, whose bias is not learned, leaves it alone), dby_key[B,NH,Tk] too; dseq_scale[NH], dsink[NH] and
// dmixed[mixes,mixed_length] accumulate. dout[B,Tq,NH*HS]; out and lse are the forward's results. A query with one
// visible key contributes exactly zero to all but dv: its softmax is constant, and rounding noise must not be
// multiplied by a huge bias.
void attention_backward(const AttentionGradients* gradients, const floatX* dout, const floatX* out, const float* lse,
                        const AttentionInput* in, void* workspace);

// Bytes of workspace for the forward, or for forward and backward, of these sizes and any smaller ones; O(T).
size_t attention_workspace(const AttentionSizes* size, bool backward);

#if defined(__cplusplus) && !defined(__CUDACC__) && !defined(CUDA_EMULATOR)
}
#endif

#endif
