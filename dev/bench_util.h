/*
What the benchmarks of whole models share.
*/
#ifndef BENCH_UTIL_H
#define BENCH_UTIL_H

#include "../llmc/model.h"

// A named size with the encoding's defaults, every parameter trained.
static inline ModelConfig configuration(const char* size_name, const char* encoding, size_t vocabulary) {
    ModelConfig c;
    memset(&c, 0, sizeof c);
    const ModelSize* size = model_size_find(size_name);
    if (!size) { fatal("unknown size %s; use l2, l6, l12, ...", size_name); }
    c.V = vocabulary, c.C = size->C, c.L = size->L, c.NH = c.NKV = size->NH, c.F = 2 * size->C, c.bos = 1;
    if (!posenc_parse(encoding, &c.encoding, &c.ssmax)) { fatal("unknown encoding %s; use nope, bam, ...", encoding); }
    c.options = model_default_options();
    c.posenc = posenc_default_options();
    model_config_check(&c);
    return c;
}

#endif
