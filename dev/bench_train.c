/*
Training speed and memory: whole optimiser steps of l6 and l12 (B 8, T 512) on random tokens, in both
precisions, with bam_ssmax (or another encoding) and nope in turn. Every step is bracketed by measurements of the
machine's own matrix-product rate, so that MFU and the ratio of the two encodings hold while the machine's speed drifts.

usage: bench_train [--json FILE] [--steps N] [--encoding NAME] [SIZE...]
*/
#include <sys/resource.h>
#include <sys/wait.h>

#include "bench_util.h"
#include "../llmc/random.h"

enum { B = 8, T = 512, ROWS = B * T, VOCABULARY = 32768, MAX_STEPS = 100, ENCODINGS = 2 };
static const char* encodings[ENCODINGS] = {"bam_ssmax", "nope"};

typedef struct {
    double seconds[MAX_STEPS], mfu[MAX_STEPS];
} Series;

static int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

static double median(const double* values, size_t n) {
    double sorted[MAX_STEPS];
    memcpy(sorted, values, n * sizeof(double));
    qsort(sorted, n, sizeof(double), compare_doubles);
    return n % 2 ? sorted[n / 2] : 0.5 * (sorted[n / 2 - 1] + sorted[n / 2]);
}

static void build(Model* model, const char* size, const char* encoding) {
    ModelConfig config = configuration(size, encoding, VOCABULARY);
    ModelPlan plan = {MODE_TRAIN, B, T, 1, T, 0, 1};
    model_plan(model, &config, &plan);
    model_allocate(model);
    model_init(model, 42);
}

// One whole optimiser step, as the trainer makes it.
static void step(Model* model, const int* tokens, size_t number) {
    UpdateSettings s = {1e-4, 1e-4, 0.1, 0.9, 0.95, 1e-8, 1.0, number, false};
    model_zero_gradients(model);
    model_forward(model, tokens, B, T);
    model_backward(model, tokens + 1, 1.0f / ROWS, 0);
    model_mean_loss(model, 1);
    model_gradient_norm(model);
    model_update(model, &s);
    device_synchronize();
}

// Steps of the encodings in turn; the first of each is not counted.
static void measure(Model* models, size_t count, Series* series, size_t steps, double* rate) {
    int* tokens = (int*)xcalloc(ROWS + 1, sizeof(int));
    Random random = random_stream(7, 0);
    for (size_t i = 0; i <= ROWS; i++) { tokens[i] = (int)random_below(&random, VOCABULARY); }
    double rates[MAX_STEPS + 1] = {0};
    for (size_t n = 0; n <= steps; n++) {
        for (size_t e = 0; e < count; e++) {
            double before = backend_matmul_rate(), started = wall_seconds();
            step(&models[e], tokens, n + 1);
            double seconds = wall_seconds() - started, after = backend_matmul_rate();
            if (n == 0) { continue; }
            series[e].seconds[n - 1] = seconds;
            double flops = ROWS * model_flops_per_token(&models[e].config, T);
            series[e].mfu[n - 1] = flops / seconds / (0.5 * (before + after));
            rates[n - 1] = fmax(before, after);
        }
    }
    *rate = median(rates, steps);
    free(tokens);
}

// Runs in a process of its own, so that peak memory is that of one model alone.
static void run_case(const char* size, const char* dtype, size_t first, size_t count, size_t steps, FILE* json) {
    static Model models[ENCODINGS];
    static Series series[ENCODINGS];
    double rate;
    backend_init("cpu", dtype);
    for (size_t e = 0; e < count; e++) { build(&models[e], size, encodings[first + e]); }
    measure(models, count, series, steps, &rate);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double peak_gb = (double)usage.ru_maxrss * 1024 / 1e9;
    double ratios[MAX_STEPS];
    for (size_t n = 0; n < steps; n++) { ratios[n] = series[0].seconds[n] / series[1].seconds[n]; }
    if (count == 1) {
        printf("%-4s %-9s %-10s peak memory %.2f GB\n", size, dtype, encodings[first], peak_gb);
        if (json) {
            fprintf(json, "{\"bench\": \"memory\", \"size\": \"%s\", \"dtype\": \"%s\", \"peak_gb\": %.3f}\n", size,
                    dtype, peak_gb);
        }
    }
    for (size_t e = 0; count > 1 && e < count; e++) {
        double seconds = median(series[e].seconds, steps), mfu = median(series[e].mfu, steps);
        printf("%-4s %-9s %-10s %6.0f ms %6.0f tok/s  mfu %4.1f %% of %4.0f GFLOP/s", size, dtype, encodings[first + e],
               1e3 * seconds, ROWS / seconds, 100 * mfu, rate / 1e9);
        if (e == 0) { printf("  %.3f x nope", median(ratios, steps)); }
        printf("\n");
        if (!json) { continue; }
        fprintf(json,
                "{\"bench\": \"train\", \"size\": \"%s\", \"dtype\": \"%s\", \"encoding\": \"%s\", \"ms\": %.1f, "
                "\"tokens_per_second\": %.1f, \"mfu\": %.4f, \"matmul_gflops\": %.1f",
                size, dtype, encodings[first + e], 1e3 * seconds, ROWS / seconds, mfu, rate / 1e9);
        if (e == 0) { fprintf(json, ", \"ratio_to_nope\": %.4f", median(ratios, steps)); }
        fprintf(json, "}\n");
    }
    if (json) { fflush(json); }
    fflush(stdout);
}

// The child starts before any thread exists, so its libraries start afresh.
static void run_in_child(const char* size, const char* dtype, size_t first, size_t count, size_t steps, FILE* json) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        run_case(size, dtype, first, count, steps, json);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    if (status != 0) { fatal("the benchmark of %s in %s failed", size, dtype); }
}

int main(int argc, char** argv) {
    static const char* const standard[] = {"l6", "l12"};
    const char* sizes[16];
    size_t size_count = 0, steps = 5;
    FILE* json = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
            json = fopen(argv[++i], "a");
        } else if (strcmp(argv[i], "--steps") == 0 && i + 1 < argc) {
            steps = (size_t)atoi(argv[++i]);
        } else if (strcmp(argv[i], "--encoding") == 0 && i + 1 < argc) {
            encodings[0] = argv[++i];
        } else if (size_count < 16) {
            sizes[size_count++] = argv[i];
        }
    }
    if (steps < 1 || steps > MAX_STEPS) { fatal("--steps, expected 1 to %d", MAX_STEPS); }
    if (size_count == 0) {
        memcpy(sizes, standard, sizeof standard);
        size_count = 2;
    }
    static const char* const dtypes[] = {"float32", "bfloat16"};
    for (size_t s = 0; s < size_count; s++) {
        for (size_t d = 0; d < 2; d++) {
            run_in_child(sizes[s], dtypes[d], 0, 1, 1, json);  // memory
            run_in_child(sizes[s], dtypes[d], 0, 2, steps, json);
        }
    }
    if (json) { fclose(json); }
    return 0;
}
