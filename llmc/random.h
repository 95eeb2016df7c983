/*
Random numbers of the host: initial weights, sampling. One 64-bit state per stream, so that a stream's
state is saved and restored exactly. SplitMix64 (Steele, Lea, Flood 2014).
*/
#ifndef RANDOM_H
#define RANDOM_H

#include <math.h>
#include <stdint.h>

typedef struct {
    uint64_t state;
} Random;

// Streams of one seed are independent: give every tensor its own stream number.
static inline Random random_stream(uint64_t seed, uint64_t stream) {
    Random r = {seed * 0x9E3779B97F4A7C15ull ^ (stream + 1) * 0xD1342543DE82EF95ull};
    return r;
}

static inline uint64_t random_u64(Random* r) {
    uint64_t z = (r->state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// Uniform in [0, 1), 53 random bits.
static inline double random_uniform(Random* r) { return (double)(random_u64(r) >> 11) * 0x1p-53; }

// Standard normal by Box and Muller; uses two numbers a call and keeps none, so the state is one word.
static inline double random_normal(Random* r) {
    double u = 1.0 - random_uniform(r), v = random_uniform(r);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586476925 * v);
}

// Uniform integer in [0, n), n > 0; unbiased.
static inline uint64_t random_below(Random* r, uint64_t n) {
    uint64_t limit = UINT64_MAX - UINT64_MAX % n, x = random_u64(r);
    while (x >= limit) { x = random_u64(r); }
    return x % n;
}

#endif
