/*
The shipped programs compiled for CUDA and executed on the emulated device, beside those of the CPU. EMU_FOLDER is where
test/emu/rules.mk builds them.
*/
#ifndef EMU_PROGRAMS_UTIL_H
#define EMU_PROGRAMS_UTIL_H

#include "evaluate_util.h"

typedef struct {
    const char *folder, *dtype, *precision;  // below EMU_FOLDER; of --dtype; of make cuda
} EmulatedBuild;

enum { EMULATED_FP32, EMULATED_BF16, EMULATED_BUILDS };
static const EmulatedBuild emulated_builds[] = {{"plain_fp32", "float32", "fp32"}, {"plain", "bfloat16", "bf16"}};

// The programs that the next runs start: of this build, or the CPU's with NULL.
static inline void use_programs(const EmulatedBuild* build) {
    char* train = build ? text("%s/%s/train_gpt", EMU_FOLDER, build->folder) : xstrdup("./train_gpt");
    char* evaluate = build ? text("%s/%s/evaluate", EMU_FOLDER, build->folder) : xstrdup("./evaluate");
    setenv("TRAIN_GPT", train, 1);
    setenv("EVALUATE", evaluate, 1);
    free(train), free(evaluate);
}

// A device on which host code that touches device memory crashes.
static inline void emulator_set_up(void) {
    scratch_create();
    setenv("EMU_PROTECT", "1", 1);
    unsetenv("EMU_SEED");
}

// The order in which the emulated device runs threads and blocks, and how many blocks at a time.
static inline void emulated_order(const char* seed, const char* workers) {
    setenv("EMU_SEED", seed, 1);
    setenv("EMU_WORKERS", workers, 1);
}

#endif
