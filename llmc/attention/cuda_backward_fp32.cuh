/*
The backward kernels of the fp32 build, see cuda_forward_fp32.cuh. Private to cuda_backward.cuh.
*/
#ifndef ATTENTION_CUDA_BACKWARD_FP32_CUH
#define ATTENTION_CUDA_BACKWARD_FP32_CUH

// The weight of a pair, and dZ: q, k, dout and v are rows of tiles.
__device__ __forceinline__ float2 fp32_pair(const AttentionBackwardTask& task, const AttentionBackwardRow& row,
                                            const float* q, const float* k, const float* dout, const float* v, int h,
                                            int query, int key, int start, float log_sum) {
    const float y = fp32_logit(task.in, q, k, row, h, query, key, start);
    float dp = fp32_dot(dout, v, (int)task.in.size.HS) - row.delta, log_weight = y - row.reference;
    special_pair(log_weight, dp, query, key, start, log_sum);
    const float weight = exp2f(log_weight);
    return make_float2(weight, weight * dp);
}

// dq of one tile of queries, and its part of table[T]; returns this thread's part of the gradient of seq_scale.
// Row r of the tile belongs to threads 4r to 4r+3.
__device__ __forceinline__ float fp32_dq_tile(const AttentionBackwardTask& task, int bh, int q0, float* memory,
                                              float* table) {
    SHARED(float, bias_weights, [FP32_TILE]);
    const AttentionInput& in = task.in;
    const int HS = (int)in.size.HS, stride = fp32_row_stride(in.size.HS), T = (int)in.size.Tq;
    const int b = bh / (int)in.size.NH, h = bh % (int)in.size.NH, r = threadIdx.x / 4, part = threadIdx.x % 4,
              query = q0 + r;
    float *queries = memory, *dout = queries + FP32_TILE * stride, *keys = dout + FP32_TILE * stride;
    float *values = keys + FP32_TILE * stride, *dq = values + FP32_TILE * stride, *dz = dq + FP32_TILE * stride;
    const size_t head = attention_query_offset(in, b, h), out_head = attention_out_offset(in, b, h);
    const size_t kv = attention_kv_offset(in, b, attention_key_head(in, h)), state = (size_t)bh * T + query;
    fp32_load(queries, in.q + head, in.q_stride, q0, T, HS);
    fp32_load(dout, task.dout + out_head, in.size.NH * HS, q0, T, HS);
    fp32_load(keys, task.out + out_head, in.size.NH * HS, q0, T, HS);
    fp32_clear(dq, HS);
    __syncthreads();
    const AttentionRow scales = attention_row(in, b, h, query);
    const int start = query < T ? attention_start(in, b, query) : 0x7fffffff;
    AttentionBackwardRow row = {scales.scale, scales.bias_scale, 0.0f,
                                fp32_dot(dout + r * stride, keys + r * stride, HS)};
    float log_sum = 0.0f;
    if (query < T) {
        const float lse = task.lse[state];
        row.reference = attention_lse_is_coarse(lse) ? task.softmax[state].x : lse * ATTENTION_LOG2_E;
        log_sum = coarse_log_sum(task, bh, query);
        if (part == 0) { task.rows[state] = row; }
    }
    if (part == 0) { bias_weights[r] = scales.bias_weight; }
    for (int k0 = attention_start(in, b, q0) / FP32_TILE * FP32_TILE; k0 < min(q0 + FP32_TILE, T); k0 += FP32_TILE) {
        __syncthreads();
        fp32_load(keys, in.k + kv, in.kv_stride, k0, T, HS);
        fp32_load(values, in.v + kv, in.kv_stride, k0, T, HS);
        __syncthreads();
        for (int c = part; c < FP32_TILE; c += 4) {
            dz[r * FP32_STRIDE + c] = fp32_pair(task, row, queries + r * stride, keys + c * stride, dout + r * stride,
                                                values + c * stride, h, query, k0 + c, start, log_sum)
                                          .y;
        }
        __syncthreads();
        fp32_accumulate(dq, dz, FP32_STRIDE, 1, keys, HS);
        const int difference = (int)threadIdx.x - (FP32_TILE - 1), d = q0 - k0 + difference;  // row less column
        if (attention_has(&in, TERM_DISTANCE) && difference < FP32_TILE && d >= 0 && d < T) {
            float sum = table[d];
            for (int i = max(0, difference); i < min(FP32_TILE, FP32_TILE + difference); i++) {
                sum += bias_weights[i] * dz[i * FP32_STRIDE + i - difference];
            }
            table[d] = sum;
        }
    }
    __syncthreads();
    float dot = 0.0f;
    for (int c = part; c < HS && query < T; c += 4) {
        const float x = dq[r * stride + c];
        dot += x * queries[r * stride + c];
        task.to.dq[head + query * in.q_stride + c] = x * row.scale * ATTENTION_LN_2;
    }
    return dot * scales.log_count * rsqrtf((float)HS);
}

// grid: query_blocks per head.
__global__ void __launch_bounds__(FP32_THREADS, 4) attention_dq_fp32_kernel(AttentionBackwardTask task) {
    DYN_SHARED(float, memory);
    const int T = (int)task.in.size.Tq, blocks = (int)task.query_blocks, bh = blockIdx.x / blocks;
    float* table = task.table_sums + (size_t)blockIdx.x * T;
    for (int d = threadIdx.x; d < T; d += FP32_THREADS) { table[d] = 0.0f; }
    float dscale = 0.0f;
    for (int tile = (T - 1) / FP32_TILE - (int)(blockIdx.x % blocks); tile >= 0; tile -= blocks) {
        __syncthreads();
        dscale += fp32_dq_tile(task, bh, tile * FP32_TILE, memory, table);
    }
    dscale = block_sum(dscale);
    if (threadIdx.x == 0) { task.scale_sums[blockIdx.x] = dscale; }
}

// grid: tiles of keys of all key/value heads. Row r of a tile of queries belongs to threads 4r to 4r+3.
__global__ void __launch_bounds__(FP32_THREADS, 4) attention_dkv_fp32_kernel(AttentionBackwardTask task) {
    DYN_SHARED(float, keys);
    const AttentionInput& in = task.in;
    const int HS = (int)in.size.HS, stride = fp32_row_stride(in.size.HS), T = (int)in.size.Tq,
              tiles = (T + FP32_TILE - 1) / FP32_TILE;
    const int bkv = blockIdx.x / tiles, b = bkv / (int)in.size.NKV, kv_head = bkv % (int)in.size.NKV;
    const int k0 = (int)blockIdx.x % tiles * FP32_TILE, heads = (int)in.size.NH / (int)in.size.NKV;
    const int r = threadIdx.x / 4, part = threadIdx.x % 4;
    float *values = keys + FP32_TILE * stride, *queries = values + FP32_TILE * stride;
    float *dout = queries + FP32_TILE * stride, *dk = dout + FP32_TILE * stride, *dv = dk + FP32_TILE * stride;
    float *weights = dv + FP32_TILE * stride, *dz = weights + FP32_LOGITS;
    const size_t kv = attention_kv_offset(in, b, kv_head);
    fp32_load(keys, in.k + kv, in.kv_stride, k0, T, HS);
    fp32_load(values, in.v + kv, in.kv_stride, k0, T, HS);
    fp32_clear(dk, HS);
    fp32_clear(dv, HS);
    for (int h = kv_head * heads; h < (kv_head + 1) * heads; h++) {
        for (int q0 = k0; q0 < T && attention_start(in, b, q0) < k0 + FP32_TILE; q0 += FP32_TILE) {
            const int query = q0 + r, start = query < T ? attention_start(in, b, query) : 0x7fffffff;
            const size_t bh = (size_t)b * in.size.NH + h;
            AttentionBackwardRow row = {0.0f, 0.0f, 0.0f, 0.0f};
            if (query < T) { row = task.rows[bh * T + query]; }
            const float log_sum = query < T ? coarse_log_sum(task, (int)bh, query) : 0.0f;
            __syncthreads();
            fp32_load(queries, in.q + attention_query_offset(in, b, h), in.q_stride, q0, T, HS);
            fp32_load(dout, task.dout + attention_out_offset(in, b, h), in.size.NH * HS, q0, T, HS);
            __syncthreads();
            for (int c = part; c < FP32_TILE; c += 4) {
                const float2 pair = fp32_pair(task, row, queries + r * stride, keys + c * stride, dout + r * stride,
                                              values + c * stride, h, query, k0 + c, start, log_sum);
                weights[r * FP32_STRIDE + c] = pair.x;
                dz[r * FP32_STRIDE + c] = pair.y * row.scale;
            }
            __syncthreads();
            fp32_accumulate(dv, weights, 1, FP32_STRIDE, dout, HS);
            fp32_accumulate(dk, dz, 1, FP32_STRIDE, queries, HS);
        }
    }
    __syncthreads();
    for (int n = threadIdx.x; n < FP32_TILE * HS; n += FP32_THREADS) {
        const int key = k0 + n / HS, at = n / HS * stride + n % HS;
        if (key >= T) { break; }
        task.to.dk[kv + key * in.kv_stride + n % HS] = dk[at] * ATTENTION_LN_2;
        task.to.dv[kv + key * in.kv_stride + n % HS] = dv[at];
    }
}

static inline void attention_launch_backward(const AttentionBackwardTask& task) {
    const AttentionInput& in = task.in;
    LAUNCH_ATTENTION(attention_dq_fp32_kernel, dim3((unsigned)(in.size.B * in.size.NH * task.query_blocks)),
                     FP32_THREADS, fp32_shared(in.size.HS, 5, 1), task);
    LAUNCH_ATTENTION(attention_dkv_fp32_kernel,
                     dim3((unsigned)(in.size.B * in.size.NKV * ceil_div(in.size.Tk, FP32_TILE))), FP32_THREADS,
                     fp32_shared(in.size.HS, 6, 2), task);
}

#endif
