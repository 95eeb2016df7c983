/*
The learning rate of a step: linear warm-up, then one of a few decays. Steps count from 0; N is the number of
steps, w those of the warm-up, so that 0..w-1 rise to the peak and w..N-1 decay to the minimum = peak * decay_frac.

  progress   p = (step - w + 1) / (N - w): 0 at the last step of the warm-up, 1 at step N-1
  cosine     minimum + (peak - minimum) * (1 + cos(pi p)) / 2
  linear     minimum + (peak - minimum) * (1 - p)
  wsd        warm-up, stable, decay: peak, then linear over the last decay_share of all N steps
             (Hu et al. 2024, MiniCPM)
  constant   peak; decay_frac does not matter

The reference takes p = (step - w) / (N - w): the same curve one step later, which reaches its minimum at step N,
a step that is never taken. Here the last step taken has exactly the minimum.

Corners. w = 0: the first step is already below the peak. w >= N: warm-up only, which ends at peak * N / w.
N = 1 and w = 0: the one step is also the last and has the minimum; if that is 0 it has the peak, so that a step
always trains. Steps from N on: as step N-1.
*/
#ifndef SCHEDULE_H
#define SCHEDULE_H

#include <math.h>

#include "util.h"

typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_WSD, SCHEDULE_CONSTANT } ScheduleKind;

#define SCHEDULE_NAMES "cosine linear wsd constant"  // in the order of ScheduleKind

typedef struct {
    ScheduleKind kind;
    size_t num_iterations, warmup;
    double peak;         // > 0
    double decay_frac;   // minimum / peak, 0 ... 1
    double decay_share;  // wsd: the part of all steps that decays, 0 ... 1
} Schedule;

// A checked schedule; kind is a word of SCHEDULE_NAMES.
static inline Schedule schedule_create(const char* kind, size_t num_iterations, size_t warmup, double peak,
                                       double decay_frac, double decay_share) {
    static const char* const names[] = {"cosine", "linear", "wsd", "constant"};
    size_t k = 0;
    while (k < 4 && strcmp(kind, names[k]) != 0) { k++; }
    if (k == 4) { fatal("learning-rate schedule '%s' is unknown; choose one of: %s", kind, SCHEDULE_NAMES); }
    if (num_iterations == 0) { fatal("a schedule of 0 steps; ask for at least 1"); }
    if (!(peak > 0 && isfinite(peak))) { fatal("learning rate %g, expected a number above 0", peak); }
    if (!(decay_frac >= 0 && decay_frac <= 1)) {
        fatal("learning rate decay fraction %g, expected 0 (decay to nothing) to 1 (no decay)", decay_frac);
    }
    if (!(decay_share >= 0 && decay_share <= 1)) {
        fatal("decay share %g, expected 0 to 1, the part of all steps that decays", decay_share);
    }
    Schedule s = {(ScheduleKind)k, num_iterations, warmup, peak, decay_frac, decay_share};
    return s;
}

// How far the decay has come at a step from w to N-1: 0 = peak, 1 = minimum.
static inline double schedule_decay(const Schedule* s, size_t step) {
    size_t n = s->num_iterations, steps = n - s->warmup;  // decaying steps, >= 1
    if (s->kind == SCHEDULE_WSD) {
        double wanted = floor(s->decay_share * (double)n + 0.5);
        if (wanted < (double)steps) { steps = wanted > 1 ? (size_t)wanted : 1; }
    }
    size_t first = n - steps;
    double p = step < first ? 0 : (double)(step - first + 1) / (double)steps;
    switch (s->kind) {
        case SCHEDULE_CONSTANT: return 0;
        case SCHEDULE_COSINE: return 0.5 * (1.0 - cos(3.14159265358979323846 * p));
        default: return p;
    }
}

static inline double learning_rate_at(const Schedule* s, size_t step) {
    size_t n = s->num_iterations;
    double minimum = s->peak * s->decay_frac;
    if (step >= n) { step = n - 1; }
    if (step < s->warmup) { return s->peak * ((double)(step + 1) / (double)s->warmup); }
    if (n == 1 && minimum == 0) { return s->peak; }
    double decay = schedule_decay(s, step);
    return decay < 1 ? s->peak - (s->peak - minimum) * decay : minimum;  // no rounding at either end
}

#endif
