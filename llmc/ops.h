/*
The contract of every operator: what it computes, shapes, layout, and whether it overwrites or
accumulates. The CPU version of an operator is in NAME.c, the CUDA version in NAME.cuh, with these
prototypes. backend.h includes this file after defining floatX, the type of weights and activations.

Notation: B batch, T sequence length, N = B*T rows, C channels, NH query heads, NKV key/value heads
(query head h reads key/value head h*NKV/NH), HS head size, F feed-forward width, V vocabulary.
All arrays are row-major and dense unless a stride is named; pointers are device pointers. Outputs come
first, then inputs, then sizes. Inputs and outputs do not overlap unless it says "may alias".
No operator returns an error: sizes are checked by the model, and running out of a resource is fatal().
Gradients named d*: "accumulates" means +=, so that gradient accumulation needs no copy.
Results are bitwise reproducible for the same build, sizes and thread count.
*/
#ifndef OPS_H
#define OPS_H

#include <stddef.h>

#include "attention/terms.h"
#include "posenc.h"

// The CPU's operators are C functions; those of a CUDA build are C++ functions of its one translation unit, so
// that a test can hold both.
#if defined(__cplusplus) && !defined(__CUDACC__) && !defined(CUDA_EMULATOR)
extern "C" {
#endif

// ----------------------------------------------------------------------------
// embedding.c

// out[B,T,C] = wte[tokens[b,t]] + position[t]; position[T,C] fp32 or NULL for none. Overwrites out.
void embedding_forward(floatX* out, const int* tokens, const floatX* wte, const float* position, size_t B, size_t T,
                       size_t C);

// dwte[V,C] += sum over rows n with tokens[n] == v of dout[n,C]. Accumulates, in a fixed order.
void embedding_backward(float* dwte, const floatX* dout, const int* tokens, void* workspace, size_t N, size_t C,
                        size_t V);
size_t embedding_workspace(size_t N, size_t V);  // bytes

// For B sequences whose first token stands at `position` (0, or where a cached sequence goes on) in a document
// that began at `first_start`: start[B,T], the position of the last token bos at or before each token, else
// first_start; log_count[B,T] = ln(position + t - start + 1), the logarithm of the number of visible keys.
// bos < 0: documents are not told apart. Overwrites both.
void document_starts(int* start, float* log_count, const int* tokens, int bos, size_t position, int first_start,
                     size_t B, size_t T);

// From these to what queries see under a rule: start moves to the window's first key, and log_count becomes
// row_scale_of() of the number of keys that are left. In place, both [B,T].
void limit_rows(int* start, float* log_count, RowRule rule, size_t position, size_t B, size_t T);

// ----------------------------------------------------------------------------
// copy.c

// out[r*out_stride + c] = inp[r*inp_stride + c] for r < rows, c < columns. Overwrites.
void copy_columns(floatX* out, size_t out_stride, const floatX* inp, size_t inp_stride, size_t rows, size_t columns);

// copy[n] = master[n] in the precision of the compute copy, rounded to nearest; nothing to do where copy == master.
void cast_parameters(floatX* copy, const float* master, size_t n);

// ----------------------------------------------------------------------------
// rmsnorm.c: y = x / sqrt(mean(x^2) + 1e-5) * weight (Zhang & Sennrich 2019)

// out[N,C], rstd[N] from inp[N,C], weight[C]. Overwrites both.
void rmsnorm_forward(floatX* out, float* rstd, const floatX* inp, const float* weight, size_t N, size_t C);

// residual[N,C] = inp1 + inp2, then out, rstd = rmsnorm(residual). residual may alias inp1 or inp2.
void residual_rmsnorm_forward(floatX* residual, floatX* out, float* rstd, const floatX* inp1, const floatX* inp2,
                              const float* weight, size_t N, size_t C);

// dinp[N,C] += the gradient through the norm (dinp already holds the residual's gradient); dweight[C] +=.
// inp is the forward's input (the residual stream).
void rmsnorm_backward(floatX* dinp, float* dweight, const floatX* dout, const floatX* inp, const float* weight,
                      const float* rstd, void* workspace, size_t N, size_t C);
size_t rmsnorm_workspace(size_t N, size_t C);  // bytes

// The norm of each head of x in place, all heads with weight[HS]: head h of row n is x + n*stride + h*HS (Dehghani et
// al. 2023; Henry et al. 2020). before[N,heads*HS] receives the heads as they were, rstd[N,heads] their factors; both
// are overwritten.
void heads_rmsnorm_forward(floatX* x, size_t stride, floatX* before, float* rstd, const float* weight, size_t N,
                           size_t heads, size_t HS);

// dx, laid out as x, from the gradient of the normed heads to that of the heads before, in place; dweight[HS] +=.
// HS at most 128.
void heads_rmsnorm_backward(floatX* dx, size_t stride, float* dweight, const floatX* before, const float* rstd,
                            const float* weight, void* workspace, size_t N, size_t heads, size_t HS);

// ----------------------------------------------------------------------------
// matmul.c

// out[N,OC] = inp[N,C] * weight[OC,C]^T. Overwrites.
void matmul_forward(floatX* out, const floatX* inp, const floatX* weight, void* workspace, size_t N, size_t C,
                    size_t OC);

// dinp[N,C] = dout[N,OC] * weight[OC,C] (overwrites; NULL skips it);
// dweight[OC,C] += dout^T * inp (accumulates; NULL skips it).
void matmul_backward(floatX* dinp, float* dweight, const floatX* dout, const floatX* inp, const floatX* weight,
                     void* workspace, size_t N, size_t C, size_t OC);
size_t matmul_workspace(size_t N, size_t C, size_t OC);  // bytes, enough for both

// ----------------------------------------------------------------------------
// swiglu.c (Shazeer 2020): gate_up[N,2F] holds the gate (W1 x) in columns 0..F-1, the up projection
// (W3 x) in columns F..2F-1

// out[N,F] = silu(gate) * up. Overwrites.
void swiglu_forward(floatX* out, const floatX* gate_up, size_t N, size_t F);

// dgate_up[N,2F] from dout[N,F]. Overwrites; dgate_up may alias gate_up.
void swiglu_backward(floatX* dgate_up, const floatX* dout, const floatX* gate_up, size_t N, size_t F);

// ----------------------------------------------------------------------------
// gate.c: a gate on attention's output (Qiu et al. 2025)

// out[n] = inp[n] * sigmoid(gate[n]) for n < count. Overwrites.
void gate_forward(floatX* out, const floatX* inp, const floatX* gate, size_t count);

// dinp[n] from dout[n], overwritten, and dgate[n] likewise. dinp may alias dout, dgate may alias gate.
void gate_backward(floatX* dinp, floatX* dgate, const floatX* dout, const floatX* inp, const floatX* gate,
                   size_t count);

// ----------------------------------------------------------------------------
// posenc.c: loops over the formulas of posenc.h

// table[T,width]: what an encoding that adds to the embedding adds at positions 0..T-1, width = C, or cosine and sine
// of every rotation angle there, [T,HS/2,2], width = HS. Overwrites.
void position_table(float* table, PosKind kind, const PositionSettings* settings, size_t T, size_t width);

// table[T,C]: what a sequence of T positions reads of the trained rows learned[rows,C], beyond them the last row or
// interpolated, as learned_row() of posenc.h says. Overwrites.
void learned_table(float* table, const float* learned, bool interpolated, size_t T, size_t rows, size_t C);

// dlearned[T,C] += sum over b of dout[B,T,C]: the gradient of the rows that T positions read. Accumulates, in the order
// of b.
void learned_backward(float* dlearned, const floatX* dout, size_t B, size_t T, size_t C);

// Turns each pair (2m, 2m+1) of every query and key head of qkv[B,T,(NH+2*NKV)*HS] by its angle at
// position t, in place: (x, y) -> (x cos - y sin, x sin + y cos). Values are left alone.
// To start at position p pass table + p*HS.
void rotary_forward(floatX* qkv, const float* table, size_t B, size_t T, size_t NH, size_t NKV, size_t HS);

// The transposed rotation of dqkv, in place.
void rotary_backward(floatX* dqkv, const float* table, size_t B, size_t T, size_t NH, size_t NKV, size_t HS);

// table[NH,T] = P_h(d) for d = 0..T-1 with these settings; theta[posenc_numbers()] is what the encoding learns, tensor
// after tensor (NULL when that is nothing). Overwrites.
void bias_table_forward(float* table, PosKind kind, PosencSettings settings, const float* theta, size_t NH, size_t T);

// dtheta[posenc_numbers()] += sum over d of dtable[h,d] * dP_h(d)/dtheta, and over the heads that share the number: the
// chain rule from the table's gradient.
void bias_table_backward(float* dtheta, const float* dtable, PosKind kind, PosencSettings settings, const float* theta,
                         size_t NH, size_t T);

// ----------------------------------------------------------------------------
// forget.c: numbers by key that a projection of the block's input decides. The number of key j is the sum of
// u(gates[l]) over the tokens l of its document up to j, without the document's first, which no logit holds; attention
// subtracts differences of them. POSENC_FORGET: u(x) = -ln sigmoid(x) (Lin et al. 2025, arXiv 2503.02130, eq. 5);
// POSENC_SOFTPLUS: u(x) = ln(1 + e^x) (Veisi et al. 2025, arXiv 2503.08067). The projection is fp32 in every precision.

// gates[N,NH] = inp[N,C] * weight[NH,C]^T + bias[NH]. Overwrites.
void forget_gates(float* gates, const floatX* inp, const float* weight, const float* bias, size_t N, size_t C,
                  size_t NH);

// sums[B,NH,stride], entries position .. position + T - 1, from gates[B,T,NH] and start[B,T] of the tokens there; the
// entry before them is read, for documents that began earlier. Sums begin anew where a token is the first that it sees
// itself, also behind a window. Overwrites those entries.
void forget_sums(double* sums, const float* gates, const int* start, PosencMechanism kind, size_t position, size_t B,
                 size_t T, size_t NH, size_t stride);

// dgates[B,T,NH] from dsums[B,NH,T], position 0. Overwrites; dgates may alias gates.
void forget_sums_backward(float* dgates, const float* dsums, const float* gates, const int* start, PosencMechanism kind,
                          size_t B, size_t T, size_t NH);

// dinp[N,C] += dgates[N,NH] * weight; dweight[NH,C] += dgates^T * inp; dbias[NH] += column sums of dgates.
void forget_gates_backward(floatX* dinp, float* dweight, float* dbias, const float* dgates, const floatX* inp,
                           const float* weight, void* workspace, size_t N, size_t C, size_t NH);
size_t forget_workspace(size_t N, size_t C, size_t NH);  // bytes

// ----------------------------------------------------------------------------
// cross_entropy.c: output head and loss, in chunks of rows so that N x V logits never exist at once

// losses[N] = -ln softmax(z)[n, targets[n]], overwritten, of the logits z = inp[N,C] * weight[V,C]^T, or, where cap is
// not 0, cap tanh(z / cap) of them (Gemma 2). Only rows 0..V-1 of the
// vocabulary take part; weight and dweight have Vp >= V rows in memory and rows V.. stay untouched.
// With gradients (dinp not NULL): dinp[N,C] = dloss * d(sum of losses)/d(inp) (overwrites), dweight +=.
void cross_entropy_head(float* losses, floatX* dinp, float* dweight, const floatX* inp, const floatX* weight,
                        const int* targets, float dloss, float cap, void* workspace, size_t N, size_t C, size_t V);
size_t cross_entropy_workspace(size_t N, size_t C, size_t V);  // bytes

// sum of x[0..n), in double and in a fixed order; waits for the device and returns the result to the host.
double array_sum(const float* x, size_t n);

// ----------------------------------------------------------------------------
// radam.c

// sum of squares of x[0..n), in double and in a fixed order; infinite or NaN if any element is.
// Waits for the device and returns the result to the host.
double sum_of_squares(const float* x, size_t n);

typedef struct {
    double learning_rate, beta1, beta2, epsilon, weight_decay;
    double gradient_scale;    // multiplies every gradient (clipping)
    unsigned long long step;  // 1 for the first update
    size_t first;             // index of element 0 in the whole array of parameters, see recast_parameters
} OptimizerStep;

// One update of n parameters in one pass, decoupled weight decay. master, m, v are fp32 and updated in place.
// copy is the compute copy in floatX, rewritten from master with stochastic rounding, whose random bits depend on the
// step and on the index of an element among all parameters, not on how they are cut for updates; where floatX is
// fp32 copy == master. RAdam: Liu et al. 2020, algorithm 2, as in PyTorch (plain momentum until rho_t > 5).
void radam_update(float* master, floatX* copy, float* m, float* v, const float* gradient, const OptimizerStep* step,
                  size_t n);

// AdamW: Loshchilov & Hutter 2019, same conventions.
void adamw_update(float* master, floatX* copy, float* m, float* v, const float* gradient, const OptimizerStep* step,
                  size_t n);

// copy[n] as the updates number `step` wrote it that led to master[n], the whole array of parameters.
void recast_parameters(floatX* copy, const float* master, unsigned long long step, size_t n);

#if defined(__cplusplus) && !defined(__CUDACC__) && !defined(CUDA_EMULATOR)
}
#endif

#endif
