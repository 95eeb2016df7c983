/*
What RAdam and AdamW differ in, for every backend: the scalars of one step, computed once in double.
  g = gradient_scale gradient,  m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,
  p -= decay p + step_size m / (root_scale sqrt(v) + epsilon), without the denominator unless adaptive.
As one difference, since 1 - learning_rate * weight_decay in fp32 would lose most digits of a small decay.
*/
#ifndef ADAM_SCALARS_H
#define ADAM_SCALARS_H

#include <math.h>
#include <string.h>

#include "ops.h"

typedef struct {
    float gradient_scale, weight1, beta2, weight2;  // weight = 1 - beta
    float decay, step_size, root_scale, epsilon;
    bool adaptive;
} AdamScalars;

static inline AdamScalars adam_common_scalars(const OptimizerStep* s) {
    AdamScalars a;
    memset(&a, 0, sizeof a);
    a.gradient_scale = (float)s->gradient_scale;
    a.weight1 = (float)(1.0 - s->beta1);
    a.beta2 = (float)s->beta2, a.weight2 = (float)(1.0 - s->beta2);
    a.decay = (float)(s->learning_rate * s->weight_decay);
    a.epsilon = (float)s->epsilon;
    return a;
}

// RAdam's l_t = sqrt(1 - beta2^t) / (sqrt(v) + epsilon) puts epsilon beside the uncorrected root.
static inline AdamScalars radam_scalars(const OptimizerStep* s) {
    AdamScalars a = adam_common_scalars(s);
    double t = (double)s->step, beta2 = s->beta2, beta2_t = pow(beta2, t);
    double rho_inf = 2.0 / (1.0 - beta2) - 1.0, rho = rho_inf - 2.0 * t * beta2_t / (1.0 - beta2_t);
    double step_size = s->learning_rate / (1.0 - pow(s->beta1, t));
    a.adaptive = rho > 5.0;
    if (a.adaptive) {
        double rectification = (rho - 4.0) * (rho - 2.0) * rho_inf / ((rho_inf - 4.0) * (rho_inf - 2.0) * rho);
        step_size *= sqrt(rectification) * sqrt(1.0 - beta2_t);
    }
    a.step_size = (float)step_size;
    a.root_scale = 1.0f;
    return a;
}

// AdamW adds epsilon to the corrected root.
static inline AdamScalars adamw_scalars(const OptimizerStep* s) {
    AdamScalars a = adam_common_scalars(s);
    double t = (double)s->step;
    a.adaptive = true;
    a.step_size = (float)(s->learning_rate / (1.0 - pow(s->beta1, t)));
    a.root_scale = (float)(1.0 / sqrt(1.0 - pow(s->beta2, t)));
    return a;
}

#endif
