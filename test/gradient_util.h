/*
Gradients of whole models against differences of the loss. The model has gone forward over the batch once.
*/
#ifndef GRADIENT_UTIL_H
#define GRADIENT_UTIL_H

#include "test_util.h"

#include "../llmc/model.h"

static inline double loss_of(Model* model, const int* tokens, const int* targets) {
    model_parameters_changed(model);
    model_forward(model, tokens, model->B, model->T);
    model_losses(model, targets, 0);
    return model_mean_loss(model, 1);
}

// The loss along the gradient of a tensor rises by the gradient's length: differences of fourth order. fp32 leaves some
// 1e-7 of the loss, eight times that over 12 steps, and the fifth derivative the rest.
static inline void check_tensor_gradient(Model* model, const Tensor* t, const int* tokens, const int* targets) {
    enum { SIDES = 4 };
    static const double sides[SIDES] = {-2, -1, 1, 2}, weights[SIDES] = {1, -8, 8, -1};
    const double step = 0.005;
    float *values = model->master + t->offset, *gradient = model->grads + t->offset;
    float* start = (float*)xcalloc(t->count, sizeof(float));
    memcpy(start, values, t->count * sizeof(float));
    double length = sqrt(sum_of_squares(gradient, t->count)), slope = 0;
    if (!(length > 1e-5)) { print_error("%s: gradient %g\n", t->name, length); }
    assert_true(length > 1e-5);
    for (size_t side = 0; side < SIDES; side++) {
        for (size_t i = 0; i < t->count; i++) {
            values[i] = (float)(start[i] + step * sides[side] * gradient[i] / length);
        }
        slope += weights[side] * loss_of(model, tokens, targets) / (12 * step);
    }
    memcpy(values, start, t->count * sizeof(float));
    if (!(fabs(slope - length) <= 2e-3 * length + 5e-5)) {
        print_error("%s: slope %g, gradient %g\n", t->name, slope, length);
    }
    assert_error_below(fabs(slope - length), 2e-3 * length + 5e-5);
    free(start);
}

#endif
