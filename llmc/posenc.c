/*
Positional tables and the rotation: loops over the formulas of posenc.h. CPU version; contract in ops.h.
*/
#include "backend.h"

void sinusoidal_table(float* table, double theta, bool vaswani, size_t T, size_t C) {
#pragma omp parallel for schedule(static)
    for (size_t t = 0; t < T; t++) {
        for (size_t c = 0; c < C; c++) { table[t * C + c] = sinusoidal_value(t, c, C, theta, vaswani); }
    }
}

void rotary_table(float* table, double theta, size_t T, size_t HS) {
#pragma omp parallel for schedule(static)
    for (size_t t = 0; t < T; t++) {
        float* row = table + t * HS;
        for (size_t m = 0; m < HS / 2; m++) {
            double angle = rotary_angle(t, m, HS, theta);
            row[2 * m] = (float)cos(angle);
            row[2 * m + 1] = (float)sin(angle);
        }
    }
}

void position_table(float* table, PosKind kind, const PosencOptions* options, size_t T, size_t C, size_t HS) {
    switch (posenc_info(kind)->mechanism) {
        case POSENC_ADD: sinusoidal_table(table, options->sinusoidal_theta, options->sinusoidal_vaswani, T, C); break;
        case POSENC_ROTATE: rotary_table(table, options->rotary_theta, T, HS); break;
        default: break;
    }
}

// Turns the pairs of one head by the angles of one table row; direction = -1 turns back.
static inline void rotate_head(floatX* restrict x, const float* restrict table_row, float direction, size_t HS) {
#pragma omp simd
    for (size_t m = 0; m < HS / 2; m++) {
        float cosine = table_row[2 * m], sine = direction * table_row[2 * m + 1];
        float x0 = x[2 * m], x1 = x[2 * m + 1];
        x[2 * m] = x0 * cosine - x1 * sine;
        x[2 * m + 1] = x1 * cosine + x0 * sine;
    }
}

// Query and key heads are the first NH + NKV heads of a token.
static void rotate_queries_and_keys(floatX* qkv, const float* table, float direction, size_t B, size_t T, size_t NH,
                                    size_t NKV, size_t HS) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < B * T; n++) {
        floatX* token = qkv + n * (NH + 2 * NKV) * HS;
        const float* table_row = table + n % T * HS;
        for (size_t h = 0; h < NH + NKV; h++) { rotate_head(token + h * HS, table_row, direction, HS); }
    }
}

void rotary_forward(floatX* qkv, const float* table, size_t B, size_t T, size_t NH, size_t NKV, size_t HS) {
    rotate_queries_and_keys(qkv, table, 1.0f, B, T, NH, NKV, HS);
}

void rotary_backward(floatX* dqkv, const float* table, size_t B, size_t T, size_t NH, size_t NKV, size_t HS) {
    rotate_queries_and_keys(dqkv, table, -1.0f, B, T, NH, NKV, HS);
}

// Parameters of head h from theta[params,NH], in double; params may be 0.
static void load_head_parameters(double* out, const float* theta, int params, size_t h, size_t NH) {
    for (int p = 0; p < POSENC_MAX_PARAMS; p++) { out[p] = p < params ? (double)theta[(size_t)p * NH + h] : 0.0; }
}

void bias_table_forward(float* table, PosKind kind, const float* theta, size_t NH, size_t T) {
    int params = posenc_info(kind)->params;
    for (size_t h = 0; h < NH; h++) {
        double head_theta[POSENC_MAX_PARAMS];
        load_head_parameters(head_theta, theta, params, h, NH);
#pragma omp parallel for schedule(static)
        for (size_t d = 0; d < T; d++) { table[h * T + d] = posenc_bias(kind, head_theta, h, NH, d); }
    }
}

void bias_table_backward(float* dtheta, const float* dtable, PosKind kind, const float* theta, size_t NH, size_t T) {
    int params = posenc_info(kind)->params;
#pragma omp parallel for schedule(static)
    for (size_t h = 0; h < NH; h++) {
        double head_theta[POSENC_MAX_PARAMS], gradient[POSENC_MAX_PARAMS], sum[POSENC_MAX_PARAMS] = {0};
        load_head_parameters(head_theta, theta, params, h, NH);
        for (size_t d = 0; d < T; d++) {
            posenc_bias_derivatives(gradient, kind, head_theta, h, NH, d);
            for (int p = 0; p < params; p++) { sum[p] += (double)dtable[h * T + d] * gradient[p]; }
        }
        for (int p = 0; p < params; p++) { dtheta[(size_t)p * NH + h] += (float)sum[p]; }
    }
}
