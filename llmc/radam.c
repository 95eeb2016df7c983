/*
Optimisers: RAdam and AdamW share one loop and differ in the scalars of adam_scalars.h. CPU version; contract in
ops.h.
*/
#include "backend.h"

#include "adam_scalars.h"

// Elements a thread updates before it writes their copy: three arrays of them stay in the first-level cache.
enum { CHUNK = 2048 };

static void update_chunk(float* master, float* m, float* v, const float* gradient, AdamScalars a, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float g = a.gradient_scale * gradient[i];
        float mean = m[i] + a.weight1 * (g - m[i]), variance = a.beta2 * v[i] + a.weight2 * g * g;
        float denominator = a.adaptive ? a.root_scale * sqrtf(variance) + a.epsilon : 1.0f;
        m[i] = mean;
        v[i] = variance;
        master[i] -= a.decay * master[i] + a.step_size * (mean / denominator);
    }
}

static void update(float* master, floatX* copy, float* m, float* v, const float* gradient, AdamScalars a, size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t begin = 0; begin < n; begin += CHUNK) {
        size_t count = n - begin < CHUNK ? n - begin : CHUNK;
        update_chunk(master + begin, m + begin, v + begin, gradient + begin, a, count);
        if (copy != master) { memcpy(copy + begin, master + begin, count * sizeof(floatX)); }
    }
}

void radam_update(float* master, floatX* copy, float* m, float* v, const float* gradient, const OptimizerStep* step,
                  size_t n) {
    update(master, copy, m, v, gradient, radam_scalars(step), n);
}

void adamw_update(float* master, floatX* copy, float* m, float* v, const float* gradient, const OptimizerStep* step,
                  size_t n) {
    update(master, copy, m, v, gradient, adamw_scalars(step), n);
}

// Nothing is rounded here.
void recast_parameters(floatX* copy, const float* master, unsigned long long step, size_t n) {
    (void)step;
    cast_parameters(copy, master, n);
}

// The array is cut into a fixed number of ranges whose sums are added in order, whatever the thread count.
double sum_of_squares(const float* x, size_t n) {
    enum { RANGES = 256 };
    double partial[RANGES], total = 0.0;
    size_t length = n / RANGES + 1;
#pragma omp parallel for schedule(static)
    for (size_t range = 0; range < RANGES; range++) {
        size_t begin = range * length, end = begin + length < n ? begin + length : n;
        double sum = 0.0;
#pragma omp simd reduction(+ : sum)
        for (size_t i = begin; i < end; i++) { sum += (double)x[i] * (double)x[i]; }
        partial[range] = sum;
    }
    for (size_t range = 0; range < RANGES; range++) { total += partial[range]; }
    return total;
}
