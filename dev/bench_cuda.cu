/*
Speed of the CUDA operators, of whole training steps and of reading long contexts, as rows of Markdown. Needs a GPU,
the CUDA libraries and nothing else: no data, no run folder. Every rate stands beside the device's own copy or matrix
rate, measured in the same process; times are medians between events of the stream.

    bench_cuda operators [--rows N] [--T T] [--repetitions N]     every operator at the sizes of l12, attention at 3 HS
    bench_cuda attention [--rows N] [--T T] [--repetitions N]     attention alone, with cuDNN's where it is built in
    bench_cuda train SIZE ENCODING [--rows N] [--T T] [--repetitions N] [--attention own|cudnn]
    bench_cuda prefill SIZE ENCODING TOKENS [--chunk N]

FLOPs count visible pairs and products only; bytes count every operand once.
*/
#include <algorithm>
#include <vector>

#include "bench_util.h"
#include "../llmc/eval/prefill.h"
#include "../llmc/random.h"

enum { VOCABULARY = 32768 };

typedef struct {
    size_t rows, T, repetitions, chunk;
    const char* attention;
} Bench;

// ----------------------------------------------------------------------------
// measuring

static double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

// Seconds of work() on the device: the median of some calls after one that is not counted.
template <typename Work>
static double time_on_device(size_t repetitions, Work work) {
    cudaEvent_t start, stop;
    cudaCheck(cudaEventCreate(&start));
    cudaCheck(cudaEventCreate(&stop));
    std::vector<double> seconds;
    work();
    for (size_t i = 0; i < repetitions; i++) {
        cudaCheck(cudaEventRecord(start, main_stream));
        work();
        cudaCheck(cudaEventRecord(stop, main_stream));
        cudaCheck(cudaEventSynchronize(stop));
        float milliseconds;
        cudaCheck(cudaEventElapsedTime(&milliseconds, start, stop));
        seconds.push_back(milliseconds * 1e-3);
    }
    cudaCheck(cudaEventDestroy(start));
    cudaCheck(cudaEventDestroy(stop));
    return median(seconds);
}

typedef struct {
    double copy, matmul;  // bytes/s read and written, FLOP/s
} Limits;

static Limits measure_limits(size_t repetitions) {
    const size_t bytes = std::min((size_t)1 << 30, device_memory_available() / 4);
    void *from = device_malloc(bytes), *to = device_malloc(bytes);
    const double seconds = time_on_device(
        repetitions, [&] { cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, main_stream)); });
    device_free(from);
    device_free(to);
    return {2.0 * (double)bytes / seconds, backend_matmul_rate()};
}

typedef struct {
    const Bench* bench;
    Limits limits;
} Table;

// One row; bytes or flops of 0 leave their columns empty. Returns seconds.
template <typename Work>
static double row(const Table* t, const char* name, double bytes, double flops, Work work) {
    const double seconds = time_on_device(t->bench->repetitions, work);
    printf("| %s | %.1f |", name, seconds * 1e6);
    if (bytes > 0) {
        printf(" %.0f | %.0f %% |", bytes / seconds * 1e-9, 100 * bytes / seconds / t->limits.copy);
    } else {
        printf(" | |");
    }
    if (flops > 0) {
        printf(" %.1f | %.0f %% |\n", flops / seconds * 1e-12, 100 * flops / seconds / t->limits.matmul);
    } else {
        printf(" | |\n");
    }
    fflush(stdout);
    return seconds;
}

// ----------------------------------------------------------------------------
// arrays

// A pool of random values over and over: zeros would be multiplied faster than real data.
static floatX* random_device(size_t n) {
    static std::vector<floatX> pool;
    if (pool.empty()) {
        Random random = random_stream(1, 0);
        for (size_t i = 0; i < (size_t)1 << 20; i++) { pool.push_back((floatX)(float)(random_uniform(&random) - 0.5)); }
    }
    floatX* device = (floatX*)device_malloc(n * sizeof(floatX));
    for (size_t i = 0; i < n; i += pool.size()) {
        copy_to_device(device + i, pool.data(), std::min(n - i, pool.size()) * sizeof(floatX));
    }
    return device;
}

static float* floats(size_t n) { return (float*)device_malloc(n * sizeof(float)); }

static int* random_ids(size_t n) {
    std::vector<int> host(n);
    Random random = random_stream(7, 0);
    for (size_t i = 0; i < n; i++) { host[i] = (int)(2 + random_below(&random, VOCABULARY - 2)); }
    int* device = (int*)device_malloc(n * sizeof(int));
    copy_to_device(device, host.data(), n * sizeof(int));
    return device;
}

// ----------------------------------------------------------------------------
// operators

static void bench_products(const Table* t, size_t N, size_t C, size_t OC, const char* name) {
    floatX *inp = random_device(N * C), *weight = random_device(OC * C), *out = random_device(N * OC);
    floatX* dinp = random_device(N * C);
    float* dweight = floats(OC * C);
    void* workspace = device_malloc(matmul_workspace(N, C, OC));
    const double flops = 2.0 * (double)N * (double)C * (double)OC;
    char label[80];
    snprintf(label, sizeof label, "matmul_forward %s %zu x %zu", name, C, OC);
    row(t, label, 0, flops, [&] { matmul_forward(out, inp, weight, workspace, N, C, OC); });
    snprintf(label, sizeof label, "matmul_backward %s %zu x %zu", name, C, OC);
    row(t, label, 0, 2 * flops, [&] { matmul_backward(dinp, dweight, out, inp, weight, workspace, N, C, OC); });
    device_free(inp), device_free(weight), device_free(out), device_free(dinp), device_free(dweight);
    device_free(workspace);
}

static void bench_rows(const Table* t, size_t N, size_t T, size_t C, size_t NH) {
    const double x = (double)sizeof(floatX), n = (double)N * (double)C;
    const size_t HS = C / NH, F = 2 * C, V = VOCABULARY;
    floatX *a = random_device(N * 3 * C), *b = random_device(N * 2 * F), *c = random_device(N * C);
    floatX* wte = random_device(V * C);
    float *weight = floats(C), *dweight = floats(C), *rstd = floats(N), *dwte = floats(V * C), *table = floats(T * HS);
    int* tokens = random_ids(N);
    void* workspace = device_malloc(std::max(rmsnorm_workspace(N, C), embedding_workspace(N, V)));
    row(t, "embedding_forward", 2 * n * x, 0, [&] { embedding_forward(a, tokens, wte, NULL, N / T, T, C); });
    row(t, "embedding_backward", n * (x + 8), 0, [&] { embedding_backward(dwte, a, tokens, workspace, N, C, V); });
    row(t, "residual_rmsnorm_forward", 4 * n * x, 0, [&] { residual_rmsnorm_forward(a, b, rstd, a, c, weight, N, C); });
    row(t, "rmsnorm_backward", 4 * n * x, 0,
        [&] { rmsnorm_backward(a, dweight, b, c, weight, rstd, workspace, N, C); });
    const RopeSettings rope = {500000.0, HS, ROPE_NONE, 1, 0, 32, 1, 1, 1, 4};
    const PositionSettings positions = {10000.0, false, rope_rotation(&rope)};
    position_table(table, POS_ROTARY, &positions, T, HS);
    row(t, "rotary_forward", 4 * n * x, 0, [&] { rotary_forward(a, table, N / T, T, NH, NH, HS); });
    row(t, "swiglu_forward", 3 * (double)(N * F) * x, 0, [&] { swiglu_forward(a, b, N, F); });
    row(t, "swiglu_backward", 5 * (double)(N * F) * x, 0, [&] { swiglu_backward(b, a, b, N, F); });
    device_free(a), device_free(b), device_free(c), device_free(wte), device_free(weight), device_free(dweight);
    device_free(rstd), device_free(dwte), device_free(table), device_free(tokens), device_free(workspace);
}

static void bench_head(const Table* t, size_t N, size_t C) {
    const size_t V = VOCABULARY;
    floatX *inp = random_device(N * C), *dinp = random_device(N * C), *weight = random_device(V * C);
    float *dweight = floats(V * C), *losses = floats(N);
    int* targets = random_ids(N);
    void* workspace = device_malloc(cross_entropy_workspace(N, C, V));
    row(t, "cross_entropy_head and gradients", 0, 6.0 * (double)N * (double)C * (double)V,
        [&] { cross_entropy_head(losses, dinp, dweight, inp, weight, targets, 1e-6f, 0, workspace, N, C, V); });
    device_free(inp), device_free(dinp), device_free(weight), device_free(dweight), device_free(losses);
    device_free(targets), device_free(workspace);
}

static void bench_update(const Table* t, size_t n) {
    float *master = floats(n), *m = floats(n), *v = floats(n), *gradient = floats(n);
    floatX* copy = sizeof(floatX) == sizeof(float) ? (floatX*)master : (floatX*)device_malloc(n * sizeof(floatX));
    OptimizerStep step = {1e-4, 0.9, 0.95, 1e-8, 0.1, 1.0, 100, 1};
    const double count = (double)n, stored = sizeof(floatX) == sizeof(float) ? 0 : sizeof(floatX);
    row(t, "sum_of_squares", count * 4, 0, [&] { sum_of_squares(gradient, n); });
    row(t, "radam_update", count * (28 + stored), 0, [&] { radam_update(master, copy, m, v, gradient, &step, n); });
    if ((void*)copy != (void*)master) { device_free(copy); }
    device_free(master), device_free(m), device_free(v), device_free(gradient);
}

// Attention at one size. Biased: a bias inside Scalable-Softmax, as bam_ssmax has, else nope.
typedef struct {
    size_t B, T, NH, HS;
    size_t parts;  // documents per sequence, of equal length
    bool biased;
    const char* kernels;  // as --attention has them
} BenchCase;

static int* document_tokens(const BenchCase* c) {
    std::vector<int> tokens(c->B * c->T);
    for (size_t n = 0; n < tokens.size(); n++) { tokens[n] = n % c->T % (c->T / c->parts) == 0 ? 1 : 2; }
    int* device = (int*)device_malloc(tokens.size() * sizeof(int));
    copy_to_device(device, tokens.data(), tokens.size() * sizeof(int));
    return device;
}

// Three rows: forward, backward, both. Returns the backward's seconds.
static double time_attention(const Table* t, const BenchCase* c, const AttentionInput* in, void* workspace) {
    const size_t N = c->B * c->T, C = c->NH * c->HS, part = c->T / c->parts;
    floatX *out = random_device(N * C), *dout = random_device(N * C), *dqkv = random_device(N * 3 * C);
    float *lse = floats(N * c->NH), *dbias = floats(c->NH * c->T), *dscale = floats(c->NH);
    const double pairs = (double)(c->B * c->NH * c->parts) * (double)part * (double)(part + 1) / 2;
    const double flops = 4.0 * (double)c->HS * pairs;
    char name[80], label[120];
    snprintf(name, sizeof name, "%s T %zu HS %zu%s%s", c->biased ? "bam_ssmax" : "nope", c->T, c->HS,
             c->parts > 1 ? ", packed documents" : "", strcmp(c->kernels, "cudnn") == 0 ? ", cuDNN" : "");
    snprintf(label, sizeof label, "attention_forward %s", name);
    const double forward = row(t, label, 0, flops, [&] { attention_forward(out, lse, in, workspace); });
    snprintf(label, sizeof label, "attention_backward %s", name);
    const AttentionGradients to = {dqkv, dqkv + C, dqkv + 2 * C, dbias, dscale, NULL, NULL};
    const double backward =
        row(t, label, 0, 2.5 * flops, [&] { attention_backward(&to, dout, out, lse, in, workspace); });
    printf("| attention, both, %s | %.1f | | | %.1f | %.0f %% |\n", name, (forward + backward) * 1e6,
           3.5 * flops / (forward + backward) * 1e-12, 100 * 3.5 * flops / (forward + backward) / t->limits.matmul);
    device_free(out), device_free(dout), device_free(dqkv), device_free(lse), device_free(dbias), device_free(dscale);
    return backward;
}

static double bench_attention(const Table* t, const BenchCase* c) {
    const size_t N = c->B * c->T, NH = c->NH, C = NH * c->HS, stride = 3 * C;
    attention_choose(c->kernels, 0);
    floatX* qkv = random_device(N * stride);
    float *bias = floats(NH * c->T), *scale = floats(NH), *log_count = floats(N);
    int *start = (int*)device_malloc(N * sizeof(int)), *tokens = document_tokens(c);
    std::vector<float> ones(NH, 0.4f);
    copy_to_device(scale, ones.data(), NH * sizeof(float));
    document_starts(start, log_count, tokens, 1, 0, 0, c->B, c->T);
    AttentionInput in = {};
    in.size = {c->B, c->T, c->T, NH, NH, c->HS, c->biased ? (unsigned)(TERM_DISTANCE | TERM_SCALE) : 0u};
    void* workspace =
        device_malloc(std::max(attention_workspace(&in.size, false), attention_workspace(&in.size, true)));
    in.q = qkv, in.k = qkv + C, in.v = qkv + 2 * C;
    in.q_stride = in.kv_stride = stride, in.q_batch = in.kv_batch = c->T * stride;
    in.start = start, in.documents = c->B * c->parts;
    in.logit.log_count = log_count, in.logit.distance_stride = c->T, in.logit.inside = true;
    in.logit.by_distance = bias, in.logit.seq_scale = scale;
    const double backward = time_attention(t, c, &in, workspace);
    device_free(qkv), device_free(bias), device_free(scale), device_free(log_count), device_free(start);
    device_free(tokens), device_free(workspace);
    attention_choose("own", 0);
    return backward;
}

static void print_operator_header(const Table* t, size_t C) {
    printf("Copy rate %.0f GB/s, matrix rate %.0f TFLOP/s, %s, %zu rows, C %zu.\n\n", t->limits.copy * 1e-9,
           t->limits.matmul * 1e-12, PRECISION_NAME, t->bench->rows, C);
    printf("| operator | us | GB/s | of copy | TFLOP/s | of matrix |\n| --- | --- | --- | --- | --- | --- |\n");
}

// nope and bam_ssmax, and cuDNN's nope beside ours, also with packed documents.
static void bench_attentions(const Table* t) {
    const size_t T = t->bench->T, lengths[] = {T, 8 * T}, head_sizes[] = {32, 48, 64};
    double nope[6], bam[6];
    for (size_t i = 0; i < 6; i++) {
        const size_t length = lengths[i / 3], B = std::max(t->bench->rows / length, (size_t)1);
        BenchCase c = {B, length, 16, head_sizes[i % 3], 1, false, "own"};
        nope[i] = bench_attention(t, &c);
#ifdef USE_CUDNN
        c.kernels = "cudnn";
        bench_attention(t, &c);
        c.parts = 2;
        bench_attention(t, &c);
        c.kernels = "own";
        bench_attention(t, &c);
        c.parts = 1;
#endif
        c.biased = true;
        bam[i] = bench_attention(t, &c);
    }
    printf("\nSpeed of the backward with bam_ssmax relative to nope:");
    for (size_t i = 0; i < 6; i++) {
        printf("%s T %zu HS %zu %.0f %%", i ? "," : "", lengths[i / 3], head_sizes[i % 3], 100 * nope[i] / bam[i]);
    }
    printf(".\n");
}

static void bench_operators(const Bench* bench) {
    const Table t = {bench, measure_limits(bench->repetitions)};
    const size_t N = bench->rows, C = 768, T = bench->T;
    print_operator_header(&t, C);
    bench_rows(&t, N, T, C, 16);
    bench_products(&t, N, C, 3 * C, "qkv");
    bench_products(&t, N, C, C, "out");
    bench_products(&t, N, C, 4 * C, "gate and up");
    bench_products(&t, N, 2 * C, C, "down");
    bench_head(&t, N, C);
    bench_update(&t, N * 4096);
    bench_attentions(&t);
}

static void bench_attention_alone(const Bench* bench) {
    const Table t = {bench, measure_limits(bench->repetitions)};
    print_operator_header(&t, 768);
    bench_attentions(&t);
}

// ----------------------------------------------------------------------------
// whole programs

static size_t start_model(Model* model, const ModelConfig* config, const ModelPlan* plan) {
    ModelMemory memory = model_plan(model, config, plan);
    model_allocate(model);
    model_init(model, 42);
    return model_memory_total(&memory);
}

// One whole optimiser step, as the trainer makes it.
static void train_step(Model* model, const int* tokens, size_t B, size_t T, size_t number) {
    UpdateSettings s = {1e-4, 1e-4, 0.1, 0.9, 0.95, 1e-8, 1.0, number, false};
    model_zero_gradients(model);
    model_forward(model, tokens, B, T);
    model_backward(model, tokens + 1, 1.0f / (float)(B * T), 0);
    model_mean_loss(model, 1);
    model_gradient_norm(model);
    model_update(model, &s);
}

static std::vector<int> host_ids(size_t n) {
    std::vector<int> ids(n);
    Random random = random_stream(7, 0);
    for (int& id : ids) { id = (int)(2 + random_below(&random, VOCABULARY - 2)); }
    return ids;
}

// Wall-clock time, since what the host does between kernels counts.
static void bench_train(const Bench* bench, const char* size, const char* encoding) {
    static Model model;
    const size_t T = bench->T, B = bench->rows / T;
    const ModelConfig config = configuration(size, encoding, VOCABULARY);
    const ModelPlan plan = {MODE_TRAIN, B, T, 1, T, 0, 1};
    attention_choose(bench->attention, posenc_terms(config.encoding, config.ssmax));
    const size_t bytes = start_model(&model, &config, &plan);
    const std::vector<int> tokens = host_ids(B * T + 1);
    const double rate = backend_matmul_rate();
    std::vector<double> seconds;
    for (size_t step = 1; step <= bench->repetitions + 2; step++) {
        device_synchronize();
        const double started = wall_seconds();
        train_step(&model, tokens.data(), B, T, step);
        device_synchronize();
        if (step > 2) { seconds.push_back(wall_seconds() - started); }
    }
    const double speed = (double)(B * T) / median(seconds), flops = speed * model_flops_per_token(&config, T);
    printf("| %s | %s%s | %zu x %zu | %.0f | %.0f | %.1f %% | %.1f %% | %.1f |\n", size, encoding,
           strcmp(bench->attention, "cudnn") == 0 ? ", cuDNN" : "", B, T, speed, flops * 1e-12, 100 * flops / 989e12,
           100 * flops / rate, (double)bytes / 0x1p30);
}

static void bench_prefill(const Bench* bench, const char* size, const char* encoding, size_t context) {
    static Model model;
    const ModelConfig config = configuration(size, encoding, VOCABULARY);
    const ModelPlan plan = {MODE_INFERENCE, 1, std::min(bench->chunk, context), 1, context, 0, 1};
    const size_t bytes = start_model(&model, &config, &plan) + kv_cache_bytes(&config, context);
    Prefill prefill = prefill_open(&model, context);
    const std::vector<int> ids = host_ids(context);
    const double rate = backend_matmul_rate();
    int prediction;
    const size_t first = std::min(bench->chunk, context);
    prefill_predict(&prefill, ids.data(), first, first - 1, &prediction);
    prefill.cache.length = 0;
    const double started = wall_seconds();
    prefill_predict(&prefill, ids.data(), context, context - 1, &prediction);
    const double seconds = wall_seconds() - started, flops = prefill_flops(&config, 0, context) / seconds;
    printf("| %s | %s | %zu | %.2f | %.0f | %.0f | %.1f %% | %.1f |\n", size, encoding, context, seconds,
           (double)context / seconds, flops * 1e-12, 100 * flops / rate, (double)bytes / 0x1p30);
    prefill_close(&prefill);
}

// ----------------------------------------------------------------------------

static size_t number(const char* flag, const char* word) {
    char* end;
    const unsigned long long value = strtoull(word, &end, 10);
    if (end == word || *end != '\0' || value == 0) { fatal("%s: found '%s', expected a positive number", flag, word); }
    return (size_t)value;
}

int main(int argc, char** argv) {
    Bench bench = {65536, 512, 10, 4096, "own"};
    std::vector<const char*> words;
    for (int i = 1; i < argc; i++) {
        const char* const flags[] = {"--rows", "--T", "--repetitions", "--chunk"};
        size_t* const values[] = {&bench.rows, &bench.T, &bench.repetitions, &bench.chunk};
        size_t f = 0;
        while (f < 4 && strcmp(argv[i], flags[f]) != 0) { f++; }
        const bool attention = strcmp(argv[i], "--attention") == 0;
        if (f == 4 && argv[i][0] == '-' && !attention) { fatal("unknown flag %s", argv[i]); }
        if (f == 4 && !attention) {
            words.push_back(argv[i]);
        } else if (++i == argc) {
            fatal("%s needs a value", argv[i - 1]);
        } else if (attention) {
            bench.attention = argv[i];
        } else {
            *values[f] = number(flags[f], argv[i]);
        }
    }
    if (bench.rows < bench.T) { fatal("--rows %zu is less than one sequence of --T %zu", bench.rows, bench.T); }
    bench.rows -= bench.rows % bench.T;
    const bool operators = words.size() == 1 && strcmp(words[0], "operators") == 0;
    const bool attention = words.size() == 1 && strcmp(words[0], "attention") == 0;
    const bool train = words.size() == 3 && strcmp(words[0], "train") == 0;
    const bool prefill = words.size() == 4 && strcmp(words[0], "prefill") == 0;
    if (!operators && !attention && !train && !prefill) {
        fatal("expected: operators, attention, train SIZE ENCODING, or prefill SIZE ENCODING TOKENS");
    }
    if (strcmp(bench.attention, "own") != 0 && strcmp(bench.attention, "cudnn") != 0) {
        fatal("--attention %s: expected own or cudnn", bench.attention);
    }
    backend_init("cuda", PRECISION_NAME);
    if (operators) { bench_operators(&bench); }
    if (attention) { bench_attention_alone(&bench); }
    if (train) { bench_train(&bench, words[1], words[2]); }
    if (prefill) { bench_prefill(&bench, words[1], words[2], number("TOKENS", words[3])); }
    return 0;
}
