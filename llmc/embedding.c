/*
Token embedding, its gradient, and where documents start. CPU version; contract in ops.h.
*/
#include "backend.h"

void embedding_forward(floatX* out, const int* tokens, const floatX* wte, const float* position, size_t B, size_t T,
                       size_t C) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < B * T; n++) {
        floatX* out_row = out + n * C;
        const floatX* wte_row = wte + (size_t)tokens[n] * C;
        if (!position) {
            memcpy(out_row, wte_row, C * sizeof(floatX));
            continue;
        }
        const float* position_row = position + n % T * C;
#pragma omp simd
        for (size_t c = 0; c < C; c++) { out_row[c] = wte_row[c] + position_row[c]; }
    }
}

// Counting sort of the rows by token: rows first[v] .. first[v+1]-1 of order[N] hold token v, in ascending
// order of n. first has V+2 entries; the last is scratch.
static void sort_rows_by_token(size_t* order, size_t* first, const int* tokens, size_t N, size_t V) {
    memset(first, 0, (V + 2) * sizeof(size_t));
    for (size_t n = 0; n < N; n++) { first[(size_t)tokens[n] + 2]++; }
    for (size_t v = 2; v < V + 2; v++) { first[v] += first[v - 1]; }
    for (size_t n = 0; n < N; n++) { order[first[(size_t)tokens[n] + 1]++] = n; }
}

void embedding_backward(float* dwte, const floatX* dout, const int* tokens, void* workspace, size_t N, size_t C,
                        size_t V) {
    size_t *order = (size_t*)workspace, *first = order + N;
    sort_rows_by_token(order, first, tokens, N, V);
    // One thread adds all rows of a token, so who does it cannot change the result; tokens are handed out
    // dynamically because their counts differ by orders of magnitude.
#pragma omp parallel for schedule(dynamic, 64)
    for (size_t v = 0; v < V; v++) {
        float* dwte_row = dwte + v * C;
        for (size_t i = first[v]; i < first[v + 1]; i++) {
            const floatX* dout_row = dout + order[i] * C;
#pragma omp simd
            for (size_t c = 0; c < C; c++) { dwte_row[c] += dout_row[c]; }
        }
    }
}

size_t embedding_workspace(size_t N, size_t V) { return (N + V + 2) * sizeof(size_t); }

void document_starts(int* start, float* log_count, const int* tokens, int bos, size_t position, int first_start,
                     size_t B, size_t T) {
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < B; b++) {
        int current = first_start;
        for (size_t t = 0; t < T; t++) {
            if (tokens[b * T + t] == bos) { current = (int)(position + t); }
            start[b * T + t] = current;
        }
    }
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < B * T; n++) { log_count[n] = ssmax_log_count(position + n % T - (size_t)start[n] + 1); }
}

void limit_rows(int* start, float* log_count, RowRule rule, size_t position, size_t B, size_t T) {
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < B * T; n++) {
        const size_t at = position + n % T;
        start[n] = window_start(rule, at, start[n]);
        log_count[n] = row_scale_of(rule, at - (size_t)start[n] + 1);
    }
}
