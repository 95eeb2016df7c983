/*
Reading long contexts: prefill of a random l12 (bam_ssmax, fp32) in the chunks of evaluate, every chunk bracketed by
measurements of the machine's own matrix-product rate; and the memory that perplexity over 70,000 tokens takes with a
vocabulary of 32768 on a small model, which must stay within 4 GB.

usage: bench_evaluate [--context N] [--chunk N] [--dtype float32|bfloat16] [--cpu-time] [--json FILE] [SIZE]
--cpu-time counts the processor's time instead of the clock's, of the chunks and of the products that they are compared
with, which other programs on the machine disturb less (use OMP_WAIT_POLICY=passive with it). Tokens per second are
those of the clock.
*/
#include <sys/resource.h>
#include <sys/wait.h>

#include "bench_util.h"
#include "../llmc/eval/prefill.h"
#include "../llmc/random.h"

enum { VOCABULARY = 32768, SMALL_CONTEXT = 70000 };
static const double SMALL_LIMIT = 4e9;

typedef struct {
    size_t context, chunk;
    const char *size, *dtype, *encoding;
    bool losses, cpu_time;
    FILE* json;
} Bench;

// Sums over chunks: operations, seconds, and what the matrix rate at that time would have done in these seconds.
typedef struct {
    bool cpu_time;
    double flops, seconds, clock_seconds, possible;
    double before, started, clock_started;
    float* product;  // operands of the reference
    void* workspace;
} Meter;

enum { M = 4096, N = 1024, K = 1024 };

static double seconds(const Meter* m) {
    struct timespec t;
    clock_gettime(m->cpu_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Operations per second of a large product, the best of some.
static double matmul_rate(const Meter* m) {
    double best = 1e30;
    for (int i = 0; i < 4; i++) {
        double started = seconds(m);
        matmul_forward(m->product, m->product + M * N, m->product + M * N + M * K, m->workspace, M, K, N);
        best = fmin(best, seconds(m) - started);
    }
    return 2.0 * M * N * K / best;
}

static void meter_start(Meter* m) {
    m->before = matmul_rate(m);
    m->clock_started = wall_seconds();
    m->started = seconds(m);
}

static Meter meter_open(bool cpu_time) {
    Meter m;
    memset(&m, 0, sizeof m);
    m.cpu_time = cpu_time;
    m.product = (float*)device_malloc((M * N + M * K + N * K) * sizeof(float));
    m.workspace = device_malloc(matmul_workspace(M, K, N));
    matmul_rate(&m);
    return m;
}

static bool on_chunk(void* context, double flops) {
    Meter* m = (Meter*)context;
    double taken = seconds(m) - m->started, before = m->before;
    m->clock_seconds += wall_seconds() - m->clock_started;
    meter_start(m);
    m->flops += flops, m->seconds += taken, m->possible += taken * 0.5 * (before + m->before);
    return true;
}

// Runs in a process of its own, so that peak memory is that of one model alone.
static void run(const Bench* b) {
    static Model model;
    backend_init("cpu", b->dtype);
    ModelConfig config = configuration(b->size, b->encoding, VOCABULARY);
    ModelPlan plan = {MODE_INFERENCE, 1, b->chunk, 1, b->context, 0, 1};
    ModelMemory memory = model_plan(&model, &config, &plan);
    size_t planned = model_memory_total(&memory) + kv_cache_bytes(&config, b->context);
    model_allocate(&model);
    model_init(&model, 42);
    Prefill prefill = prefill_open(&model, b->context);
    int* ids = (int*)xcalloc(b->context + 1, sizeof(int));
    float* losses = (float*)xcalloc(b->context, sizeof(float));
    Random random = random_stream(7, 0);
    for (size_t i = 0; i <= b->context; i++) { ids[i] = (int)(2 + random_below(&random, VOCABULARY - 2)); }
    Meter meter = meter_open(b->cpu_time);
    prefill.on_chunk = on_chunk, prefill.context = &meter;
    meter_start(&meter);
    int prediction;
    if (b->losses) {
        prefill_losses(&prefill, ids, b->context + 1, losses);
    } else {
        prefill_predict(&prefill, ids, b->context, b->context - 1, &prediction);
    }
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double peak = (double)usage.ru_maxrss * 1024, rate = (double)b->context / meter.clock_seconds;
    printf(
        "%-4s %-9s %-9s %6zu tokens, chunk %4zu, %s %6.0f tok/s   %5.1f %% of %4.0f GFLOP/s   peak %.2f GB, planned "
        "%.2f\n",
        b->size, b->dtype, b->encoding, b->context, b->chunk, b->losses ? "losses " : "prefill", rate,
        100 * meter.flops / meter.possible, meter.possible / meter.seconds / 1e9, peak / 1e9, (double)planned / 1e9);
    if (b->json) {
        fprintf(
            b->json,
            "{\"bench\": \"evaluate\", \"work\": \"%s\", \"size\": \"%s\", \"dtype\": \"%s\", \"encoding\": \"%s\", "
            "\"context\": %zu, \"chunk\": %zu, \"tokens_per_second\": %.1f, \"share_of_matmul_rate\": %.4f, "
            "\"matmul_gflops\": %.1f, \"peak_gb\": %.3f, \"planned_gb\": %.3f}\n",
            b->losses ? "losses" : "prefill", b->size, b->dtype, b->encoding, b->context, b->chunk, rate,
            meter.flops / meter.possible, meter.possible / meter.seconds / 1e9, peak / 1e9, (double)planned / 1e9);
        fflush(b->json);
    }
    fflush(stdout);
    if (b->losses && peak > SMALL_LIMIT) { fatal("%.2f GB, expected at most %.2f", peak / 1e9, SMALL_LIMIT / 1e9); }
}

// The child starts before any thread exists, so its libraries start afresh.
static void run_in_child(const Bench* b) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        run(b);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    if (status != 0) { fatal("the benchmark of %s failed", b->size); }
}

int main(int argc, char** argv) {
    Bench b = {32768, 1024, "l12", "float32", "bam_ssmax", false, false, NULL};
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (strcmp(argv[i], "--json") == 0 && more) {
            b.json = fopen(argv[++i], "a");
        } else if (strcmp(argv[i], "--context") == 0 && more) {
            b.context = (size_t)strtoull(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--chunk") == 0 && more) {
            b.chunk = (size_t)strtoull(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--dtype") == 0 && more) {
            b.dtype = argv[++i];
        } else if (strcmp(argv[i], "--cpu-time") == 0) {
            b.cpu_time = true;
        } else {
            b.size = argv[i];
        }
    }
    if (b.chunk == 0 || b.context < b.chunk) {
        fatal("--context %zu, expected at least --chunk %zu", b.context, b.chunk);
    }
    run_in_child(&b);
    b.size = "l2", b.context = SMALL_CONTEXT, b.losses = true;
    run_in_child(&b);
    if (b.json) { fclose(b.json); }
    return 0;
}
