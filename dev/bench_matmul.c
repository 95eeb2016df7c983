/*
Speed of the matrix products and the output head at the shapes of training, as a share of the machine's own
matrix-product rate, measured in between. Runs the shipped operators, conversions included, on inputs that are
not in cache. The best of several rounds counts: machines are noisy.

  bench_matmul [--json FILE] [--rows N] [--rounds R]
*/
#include "../llmc/backend.h"

typedef struct {
    const char* name;
    size_t C, OC;
} Layer;

static const Layer layers[] = {{"l6 wqkv", 512, 1536}, {"l6 wo", 512, 512},     {"l6 w13", 512, 2048},
                               {"l6 w2", 1024, 512},   {"l12 wqkv", 768, 2304}, {"l12 wo", 768, 768},
                               {"l12 w13", 768, 3072}, {"l12 w2", 1536, 768}};
static const Layer heads[] = {{"l6 head", 512, 32768}, {"l12 head", 768, 32768}};
enum { LAYERS = sizeof layers / sizeof layers[0], HEADS = sizeof heads / sizeof heads[0] };

// Each call takes the next set of inputs, so that none is still in cache from the last one.
enum { SETS = 3, MAX_RESULTS = 2 * (4 * LAYERS + 2 * HEADS) };

typedef struct {
    const char *name, *part, *dtype;
    double rate, peak;  // GFLOP/s
} Result;

static Result results[MAX_RESULTS];
static size_t result_count;

static void report(const char* name, const char* part, double flops, double seconds, double peak) {
    const char* dtype = cpu_precision == PRECISION_BF16 ? "bfloat16" : "float32";
    Result r = {name, part, dtype, flops / seconds * 1e-9, peak * 1e-9};
    assert(result_count < MAX_RESULTS);
    results[result_count++] = r;
    printf("%-9s %-9s %-17s %8.1f GFLOP/s  %5.1f %%\n", dtype, name, part, r.rate, 100 * r.rate / r.peak);
    fflush(stdout);
}

static float* random_inputs(size_t n) {
    float* x = (float*)device_malloc(n * sizeof(float));
    Random r = {n};
    for (size_t i = 0; i < n; i++) { x[i] = (float)(random_uniform(&r) - 0.5); }
    return x;
}

static double shortest(double best, double start) {
    double t = wall_seconds() - start;
    return t < best ? t : best;
}

static void bench_layer(const Layer* layer, size_t N, int rounds) {
    size_t C = layer->C, OC = layer->OC;
    float *inp[SETS], *out[SETS];
    for (int s = 0; s < SETS; s++) {
        inp[s] = random_inputs(N * C);
        out[s] = random_inputs(N * OC);
    }
    float *weight = random_inputs(OC * C), *dweight = random_inputs(OC * C), *dinp = random_inputs(N * C);
    void* workspace = device_malloc(matmul_workspace(N, C, OC));
    double forward = 1e30, to_inp = 1e30, to_weight = 1e30, both = 1e30, peak = 0;
    for (int r = 0; r < rounds; r++) {
        double rate = backend_matmul_rate();
        if (rate > peak) { peak = rate; }
        for (int s = 0; s < SETS; s++) {
            double t = wall_seconds();
            matmul_forward(out[s], inp[s], weight, workspace, N, C, OC);
            forward = shortest(forward, t);
        }
        for (int s = 0; s < SETS; s++) {
            double t = wall_seconds();
            matmul_backward(dinp, NULL, out[s], inp[s], weight, workspace, N, C, OC);
            to_inp = shortest(to_inp, t);
        }
        for (int s = 0; s < SETS; s++) {
            double t = wall_seconds();
            matmul_backward(NULL, dweight, out[s], inp[s], weight, workspace, N, C, OC);
            to_weight = shortest(to_weight, t);
        }
        for (int s = 0; s < SETS; s++) {
            double t = wall_seconds();
            matmul_backward(dinp, dweight, out[s], inp[s], weight, workspace, N, C, OC);
            both = shortest(both, t);
        }
    }
    double flops = 2.0 * (double)N * (double)C * (double)OC;
    report(layer->name, "forward", flops, forward, peak);
    report(layer->name, "dinp", flops, to_inp, peak);
    report(layer->name, "dweight", flops, to_weight, peak);
    report(layer->name, "dinp and dweight", 2 * flops, both, peak);
    for (int s = 0; s < SETS; s++) {
        device_free(inp[s]);
        device_free(out[s]);
    }
    device_free(weight);
    device_free(dweight);
    device_free(dinp);
    device_free(workspace);
}

static void bench_head(const Layer* head, size_t N, int rounds) {
    size_t C = head->C, V = head->OC;
    float *inp = random_inputs(N * C), *weight = random_inputs(V * C), *dweight = random_inputs(V * C);
    float *dinp = random_inputs(N * C), *losses = random_inputs(N);
    int* targets = (int*)device_malloc(N * sizeof(int));
    for (size_t n = 0; n < N; n++) { targets[n] = (int)(n * 7919 % V); }
    void* workspace = device_malloc(cross_entropy_workspace(N, C, V));
    double forward = 1e30, both = 1e30, peak = 0;
    for (int r = 0; r < rounds; r++) {
        double rate = backend_matmul_rate();
        if (rate > peak) { peak = rate; }
        double t = wall_seconds();
        cross_entropy_head(losses, NULL, NULL, inp, weight, targets, 1.0f / (float)N, 0, workspace, N, C, V);
        forward = shortest(forward, t);
        t = wall_seconds();
        cross_entropy_head(losses, dinp, dweight, inp, weight, targets, 1.0f / (float)N, 0, workspace, N, C, V);
        both = shortest(both, t);
    }
    double flops = 2.0 * (double)N * (double)C * (double)V;
    report(head->name, "loss", flops, forward, peak);
    report(head->name, "loss and gradient", 3 * flops, both, peak);
    void* all[] = {inp, weight, dweight, dinp, losses, targets, workspace};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) { device_free(all[i]); }
}

static void write_json(const char* path, size_t N) {
    FILE* f = fopen(path, "w");
    if (!f) { fatal("%s: cannot write: %s; choose another --json file", path, strerror(errno)); }
    char device[256];
    backend_describe(device, sizeof device);
    fprintf(f, "{\n  \"device\": \"%s\",\n  \"rows\": %zu,\n  \"products\": [", device, N);
    for (size_t i = 0; i < result_count; i++) {
        const Result* r = &results[i];
        fprintf(f,
                "%s\n    {\"name\": \"%s\", \"part\": \"%s\", \"dtype\": \"%s\", \"gflops\": %.1f, \"peak\": %.1f, "
                "\"share\": %.3f}",
                i ? "," : "", r->name, r->part, r->dtype, r->rate, r->peak, r->rate / r->peak);
    }
    fprintf(f, "\n  ]\n}\n");
    if (fclose(f) != 0) { fatal("%s: cannot write: %s; free some disk space", path, strerror(errno)); }
}

// The number after a flag; ends the program unless it is a positive integer.
static size_t parse_count(const char* flag, const char* value) {
    char* end;
    long long n = value ? strtoll(value, &end, 10) : 0;
    if (n <= 0 || *end) { fatal("%s: found %s, expected a positive integer", flag, value ? value : "nothing"); }
    return (size_t)n;
}

int main(int argc, char** argv) {
    const char* json = NULL;
    size_t N = 4096, rounds = 5;
    for (int i = 1; i < argc; i += 2) {
        const char* value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--json") == 0 && value) {
            json = value;
        } else if (strcmp(argv[i], "--rows") == 0) {
            N = parse_count(argv[i], value);
        } else if (strcmp(argv[i], "--rounds") == 0) {
            rounds = parse_count(argv[i], value);
        } else {
            fatal("%s: unknown or without a value; expected --json FILE, --rows N or --rounds R", argv[i]);
        }
    }
    char device[256];
    backend_describe(device, sizeof device);
    printf("%s; %zu rows; the share is of the machine's matrix-product rate in the same precision\n", device, N);
    const char* dtypes[] = {"float32", "bfloat16"};
    for (int d = 0; d < 2; d++) {
        backend_init("cpu", dtypes[d]);
        for (size_t i = 0; i < LAYERS; i++) { bench_layer(&layers[i], N, (int)rounds); }
        for (size_t i = 0; i < HEADS; i++) { bench_head(&heads[i], N, (int)rounds); }
    }
    if (json) { write_json(json, N); }
    return 0;
}
