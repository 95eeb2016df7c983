/*
Positional tables and the rotation: loops over the formulas of posenc.h. CPU version; contract in ops.h.
*/
#include "backend.h"

void position_table(float* table, PosKind kind, const PositionSettings* settings, size_t T, size_t width) {
    const PosencMechanism mechanism = posenc_info(kind)->mechanism;
#pragma omp parallel for schedule(static)
    for (size_t t = 0; t < T; t++) {
        float* row = table + t * width;
        for (size_t m = 0; m < width / 2; m++) { position_pair(row + 2 * m, mechanism, settings, t, m, width); }
    }
}

void learned_table(float* table, const float* learned, bool interpolated, size_t T, size_t rows, size_t C) {
#pragma omp parallel for schedule(static)
    for (size_t t = 0; t < T; t++) {
        const double row = learned_row(t, rows, T, interpolated);
        for (size_t c = 0; c < C; c++) { table[t * C + c] = learned_value(learned, row, rows, c, C); }
    }
}

void learned_backward(float* dlearned, const floatX* dout, size_t B, size_t T, size_t C) {
#pragma omp parallel for schedule(static)
    for (size_t t = 0; t < T; t++) {
        float* row = dlearned + t * C;
        for (size_t b = 0; b < B; b++) {
            const floatX* dout_row = dout + (b * T + t) * C;
#pragma omp simd
            for (size_t c = 0; c < C; c++) { row[c] += dout_row[c]; }
        }
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

// What head h learned, in double: out[params].
static void load_head_parameters(double* out, PosKind kind, const float* theta, size_t params, size_t h, size_t NH) {
    for (size_t p = 0; p < params; p++) { out[p] = posenc_parameter(kind, theta, p, h, NH); }
}

// The coordinates of T distances, a new array; NULL for encodings without them. All heads have head 0's.
static double* distance_coordinates(PosKind kind, PosencSettings settings, const float* theta, size_t NH, size_t T) {
    if (!posenc_has_coordinates(kind)) { return NULL; }
    const size_t params = posenc_params(kind);
    double *head_theta = (double*)xcalloc(params, sizeof(double)), *at = (double*)xcalloc(T, sizeof(double));
    load_head_parameters(head_theta, kind, theta, params, 0, NH);
#pragma omp parallel for schedule(static)
    for (size_t d = 0; d < T; d++) { at[d] = posenc_coordinate(kind, head_theta, settings, d); }
    free(head_theta);
    return at;
}

void bias_table_forward(float* table, PosKind kind, PosencSettings settings, const float* theta, size_t NH, size_t T) {
    const size_t params = posenc_params(kind);
    double* head_theta = (double*)xcalloc(params + 1, sizeof(double));
    double* coordinates = distance_coordinates(kind, settings, theta, NH, T);
    for (size_t h = 0; h < NH; h++) {
        const PosencHead head = {h, NH, settings, coordinates};
        load_head_parameters(head_theta, kind, theta, params, h, NH);
#pragma omp parallel for schedule(static)
        for (size_t d = 0; d < T; d++) { table[h * T + d] = posenc_bias(kind, head_theta, head, d); }
    }
    free(head_theta), free(coordinates);
}

void bias_table_backward(float* dtheta, const float* dtable, PosKind kind, PosencSettings settings, const float* theta,
                         size_t NH, size_t T) {
    const size_t params = posenc_params(kind);
    if (params == 0) { return; }
    // for each head what it learned and the sums of the derivatives by it, in cache lines of their own
    const size_t stride = round_up(2 * params, 16);
    double* heads = (double*)xcalloc(NH * stride, sizeof(double));
    bool* clamped = (bool*)xcalloc(NH * T, sizeof(bool));
    double* coordinates = distance_coordinates(kind, settings, theta, NH, T);
#pragma omp parallel for schedule(static)
    for (size_t h = 0; h < NH; h++) {
        const PosencHead head = {h, NH, settings, coordinates};
        double *head_theta = heads + h * stride, *sum = head_theta + params;
        load_head_parameters(head_theta, kind, theta, params, h, NH);
        for (size_t d = 0; d < T; d++) { clamped[h * T + d] = posenc_bias_clamped(kind, head_theta, head, d); }
        for (size_t p = 0; p < params; p++) {
            const PosencReach reach = posenc_reach(kind, p);
            for (size_t d = reach.first; d < T && d < reach.end; d++) {
                double slope = clamped[h * T + d] ? 0.0 : posenc_derivative_unclamped(kind, head_theta, p, head, d);
                sum[p] += (double)dtable[h * T + d] * slope;
            }
        }
    }
    for (size_t p = 0; p < params; p++) {
        double sum = 0;
        for (size_t h = 0; h < NH; h++) {
            size_t place = posenc_place(kind, p, h, NH);
            sum += heads[h * stride + params + p];
            // the heads that share a number come to its place one after another
            if (h + 1 < NH && posenc_place(kind, p, h + 1, NH) == place) { continue; }
            dtheta[place] += (float)sum;
            sum = 0;
        }
    }
    free(heads), free(clamped), free(coordinates);
}
