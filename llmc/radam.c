/*
Optimisers: RAdam and AdamW share one loop and differ in three scalars, computed once a step in double.
CPU version; contract in ops.h.
*/
#include <math.h>

#include "backend.h"

// Elements a thread updates before it writes their copy: three arrays of them stay in the first-level cache.
enum { CHUNK = 2048 };

// p -= decay p + step_size m / (root_scale sqrt(v) + epsilon), without the denominator unless adaptive. As one
// difference, since 1 - learning_rate * weight_decay in fp32 would lose most digits of a small decay.
typedef struct {
    float decay, step_size, root_scale, epsilon;
    bool adaptive;
} AdamScalars;

// RAdam's l_t = sqrt(1 - beta2^t) / (sqrt(v) + epsilon) puts epsilon beside the uncorrected root.
static AdamScalars radam_scalars(const OptimizerStep* s) {
    double t = (double)s->step, beta2 = s->beta2, beta2_t = pow(beta2, t), lr = s->learning_rate;
    double rho_inf = 2.0 / (1.0 - beta2) - 1.0, rho = rho_inf - 2.0 * t * beta2_t / (1.0 - beta2_t);
    AdamScalars a = {.decay = (float)(lr * s->weight_decay), .root_scale = 1.0f, .epsilon = s->epsilon};
    double step_size = lr / (1.0 - pow(s->beta1, t));
    a.adaptive = rho > 5.0;
    if (a.adaptive) {
        double rectification = (rho - 4.0) * (rho - 2.0) * rho_inf / ((rho_inf - 4.0) * (rho_inf - 2.0) * rho);
        step_size *= sqrt(rectification) * sqrt(1.0 - beta2_t);
    }
    a.step_size = (float)step_size;
    return a;
}

// AdamW adds epsilon to the corrected root.
static AdamScalars adamw_scalars(const OptimizerStep* s) {
    double t = (double)s->step, lr = s->learning_rate;
    AdamScalars a = {.decay = (float)(lr * s->weight_decay), .epsilon = s->epsilon, .adaptive = true};
    a.step_size = (float)(lr / (1.0 - pow(s->beta1, t)));
    a.root_scale = (float)(1.0 / sqrt(1.0 - pow(s->beta2, t)));
    return a;
}

static void update_chunk(float* master, float* m, float* v, const float* gradient, const OptimizerStep* s,
                         AdamScalars a, size_t n) {
    float scale = (float)s->gradient_scale, weight1 = (float)(1.0 - s->beta1);
    float beta2 = (float)s->beta2, weight2 = (float)(1.0 - s->beta2);
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float g = scale * gradient[i];
        float mean = m[i] + weight1 * (g - m[i]), variance = beta2 * v[i] + weight2 * g * g;
        float denominator = a.adaptive ? a.root_scale * sqrtf(variance) + a.epsilon : 1.0f;
        m[i] = mean;
        v[i] = variance;
        master[i] -= a.decay * master[i] + a.step_size * (mean / denominator);
    }
}

static void update(float* master, floatX* copy, float* m, float* v, const float* gradient, const OptimizerStep* s,
                   AdamScalars a, size_t n) {
#pragma omp parallel for schedule(static)
    for (size_t begin = 0; begin < n; begin += CHUNK) {
        size_t count = n - begin < CHUNK ? n - begin : CHUNK;
        update_chunk(master + begin, m + begin, v + begin, gradient + begin, s, a, count);
        if (copy != master) { memcpy(copy + begin, master + begin, count * sizeof(floatX)); }
    }
}

void radam_update(float* master, floatX* copy, float* m, float* v, const float* gradient, const OptimizerStep* step,
                  size_t n) {
    update(master, copy, m, v, gradient, step, radam_scalars(step), n);
}

void adamw_update(float* master, floatX* copy, float* m, float* v, const float* gradient, const OptimizerStep* step,
                  size_t n) {
    update(master, copy, m, v, gradient, step, adamw_scalars(step), n);
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
