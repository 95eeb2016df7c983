/*
Speed of attention as a share of oneDNN's fp32 matrix-product rate, which is measured in the same run just
before every repetition: machines are shared, and only the ratio means something. Medians over repetitions.

    bench_attention [--T 512,4096] [--HS 32,48,64] [--NH 16] [--tokens 4096] [--repetitions 9] [--cpu-time]
                    [--json FILE]

FLOPs count visible pairs only: 4 HS each forward, 10 HS backward. --cpu-time counts the processor's time
instead of the wall's (set OMP_WAIT_POLICY=passive): less disturbed where others share the cores.
*/
#include <dnnl.h>
#include <math.h>

#include "../llmc/backend.h"
#include "../llmc/random.h"

enum { MAX_VALUES = 16, MAX_REPETITIONS = 101, MIXES = 16, MIXED_LENGTH = 1024 };

typedef struct {
    const char* name;
    unsigned terms;
    size_t document;  // length, or 0
    size_t group;     // query heads per key/value head
} Variant;

static const Variant VARIANTS[] = {
    {"plain", 0, 0, 1},
    {"bias inside + ssmax", TERM_DISTANCE | TERM_SCALE, 0, 1},
    {"documents of 128", 0, 128, 1},
    {"grouped by 4", 0, 0, 4},
    {"soft-cap", TERM_CAP, 0, 1},
    {"soft-cap, approximate", TERM_CAP, 0, 1},
    {"number by key", TERM_KEY, 0, 1},
    {"sink", TERM_SINK, 0, 1},
    {"16 tables by query", TERM_MIX, 0, 1},
};

typedef struct {
    size_t T[MAX_VALUES], HS[MAX_VALUES], T_count, HS_count;
    size_t NH, tokens, repetitions;
    bool cpu_time;
    const char* json;
} Options;

typedef struct {
    double forward, backward, forward_share, backward_share, both_share, matmul_rate;  // seconds, ratios, FLOP/s
} Result;

// ----------------------------------------------------------------------------
// options

static size_t parse_list(size_t values[MAX_VALUES], const char* flag, const char* list) {
    size_t count = 0;
    for (const char* p = list;; p++) {
        char* end;
        unsigned long long value = strtoull(p, &end, 10);
        if (end == p || value == 0 || count == MAX_VALUES || (*end != ',' && *end != '\0')) {
            fatal("%s: found '%s', expected positive numbers separated by commas", flag, list);
        }
        values[count++] = (size_t)value;
        if (*end == '\0') { return count; }
        p = end;
    }
}

static size_t parse_one(const char* flag, const char* word) {
    size_t values[MAX_VALUES];
    if (parse_list(values, flag, word) != 1) { fatal("%s: found '%s', expected one number", flag, word); }
    return values[0];
}

static Options parse_options(int argc, char** argv) {
    Options o = {{512, 4096}, {32, 48, 64}, 2, 3, 16, 4096, 9, false, NULL};
    for (int i = 1; i < argc; i++) {
        const char* flag = argv[i];
        if (strcmp(flag, "--cpu-time") == 0) {
            o.cpu_time = true;
            continue;
        }
        if (++i == argc) { fatal("%s: a value is missing, or the flag is unknown", flag); }
        if (strcmp(flag, "--T") == 0) {
            o.T_count = parse_list(o.T, flag, argv[i]);
        } else if (strcmp(flag, "--HS") == 0) {
            o.HS_count = parse_list(o.HS, flag, argv[i]);
        } else if (strcmp(flag, "--NH") == 0) {
            o.NH = parse_one(flag, argv[i]);
        } else if (strcmp(flag, "--tokens") == 0) {
            o.tokens = parse_one(flag, argv[i]);
        } else if (strcmp(flag, "--repetitions") == 0) {
            o.repetitions = parse_one(flag, argv[i]);
        } else if (strcmp(flag, "--json") == 0) {
            o.json = argv[i];
        } else {
            fatal("unknown flag %s; expected --T, --HS, --NH, --tokens, --repetitions, --cpu-time or --json", flag);
        }
    }
    if (o.NH % 4 != 0) { fatal("--NH: found %zu, expected a multiple of 4", o.NH); }
    if (o.repetitions > MAX_REPETITIONS) { fatal("--repetitions: at most %d", MAX_REPETITIONS); }
    return o;
}

// ----------------------------------------------------------------------------
// measuring

static double seconds(bool cpu_time) {
    if (!cpu_time) { return wall_seconds(); }
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static float* random_floats(size_t n, Random* random) {
    float* x = aligned_alloc(64, round_up(n * sizeof(float), 64));
    if (!x) { fatal("out of memory: %zu floats asked for", n); }
    for (size_t i = 0; i < n; i++) { x[i] = (float)(2.0 * random_uniform(random) - 1.0); }
    return x;
}

// FLOP/s of one product of the size of a layer's.
static double matmul_rate(const Options* o) {
    enum { M = 4096, N = 1024, K = 1024 };
    static float *a, *b, *c;
    if (!a) {
        Random random = random_stream(1, 1);
        a = random_floats((size_t)M * K, &random);
        b = random_floats((size_t)K * N, &random);
        c = random_floats((size_t)M * N, &random);
    }
    double start = seconds(o->cpu_time);
    dnnl_sgemm('N', 'N', M, N, K, 1.0f, a, K, b, N, 0.0f, c, N);
    return 2.0 * M * N * K / (seconds(o->cpu_time) - start);
}

static int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

static double median(double* x, size_t n) {
    qsort(x, n, sizeof *x, compare_doubles);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

typedef struct {
    AttentionInput in;
    float *qkv, *dqkv, *out, *dout, *lse, *bias, *dbias, *seq_scale, *dseq_scale, *log_count, *dby_key, *sink, *dsink,
        *mix, *dmix, *mixed, *dmixed;
    double* by_key;
    int* start;
    void* workspace;
} Case;

static Case make_case(const Options* o, const Variant* variant, size_t T, size_t HS) {
    Case c;
    memset(&c, 0, sizeof c);
    Random random = random_stream(1, 2);
    size_t B = o->tokens / T ? o->tokens / T : 1, NH = o->NH, NKV = NH / variant->group;
    size_t stride = (NH + 2 * NKV) * HS;
    c.qkv = random_floats(B * T * stride, &random), c.dqkv = random_floats(B * T * stride, &random);
    c.out = random_floats(B * T * NH * HS, &random), c.dout = random_floats(B * T * NH * HS, &random);
    c.lse = random_floats(B * NH * T, &random), c.bias = random_floats(NH * T, &random);
    c.dbias = random_floats(NH * T, &random), c.seq_scale = random_floats(NH, &random);
    c.dseq_scale = random_floats(NH, &random), c.log_count = random_floats(B * T, &random);
    c.by_key = (double*)xcalloc(B * NH * T, sizeof(double));
    for (size_t i = 0; i < B * NH * T; i++) { c.by_key[i] = random_normal(&random); }
    c.dby_key = random_floats(B * NH * T, &random);
    c.sink = random_floats(NH, &random), c.dsink = random_floats(NH, &random);
    c.mix = random_floats(B * T * NH * MIXES, &random), c.dmix = random_floats(B * T * NH * MIXES, &random);
    c.mixed = random_floats(MIXES * MIXED_LENGTH, &random), c.dmixed = random_floats(MIXES * MIXED_LENGTH, &random);
    c.start = xcalloc(B * T, sizeof(int));
    for (size_t i = 0; i < B * T; i++) {
        size_t t = i % T, start = variant->document ? t - t % variant->document : 0;
        c.start[i] = (int)start;
        c.log_count[i] = ssmax_log_count(t - start + 1);
    }
    AttentionInput in = {.size = {B, T, T, NH, NKV, HS, variant->terms, MIXES, MIXED_LENGTH}};
    c.workspace = aligned_alloc(64, round_up(attention_workspace(&in.size, true), 64));
    in.q = c.qkv, in.k = c.qkv + NH * HS, in.v = c.qkv + (NH + NKV) * HS;
    in.q_stride = in.kv_stride = stride, in.q_batch = in.kv_batch = T * stride;
    in.logit.by_distance = c.bias, in.logit.distance_stride = T, in.logit.inside = true;
    in.logit.seq_scale = c.seq_scale, in.logit.log_count = c.log_count;
    in.logit.cap = 20.0f, in.logit.cap_approximate = strstr(variant->name, "approximate") != NULL;
    in.logit.by_key = c.by_key, in.logit.key_stride = T, in.logit.sink = c.sink;
    in.logit.mix = c.mix, in.logit.mixed = c.mixed;
    in.logit.mix_stride = NH * MIXES, in.logit.mix_batch = T * NH * MIXES;
    in.start = variant->document ? c.start : NULL;
    c.in = in;
    return c;
}

static void free_case(Case* c) {
    float* arrays[] = {c->qkv,   c->dqkv,      c->out,        c->dout,      c->lse,     c->bias,
                       c->dbias, c->seq_scale, c->dseq_scale, c->log_count, c->dby_key, c->sink,
                       c->dsink, c->mix,       c->dmix,       c->mixed,     c->dmixed};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) { free(arrays[i]); }
    free(c->start), free(c->by_key);
    free(c->workspace);
}

static double visible_pairs(const Variant* variant, size_t B, size_t T) {
    double pairs = 0;
    for (size_t t = 0; t < T; t++) { pairs += (double)((variant->document ? t % variant->document : t) + 1); }
    return pairs * (double)B;
}

static Result measure(const Options* o, const Variant* variant, size_t T, size_t HS) {
    Case c = make_case(o, variant, T, HS);
    const AttentionInput* in = &c.in;
    size_t NH = in->size.NH, dk = NH * HS, dv = dk + in->size.NKV * HS;
    AttentionGradients gradients = {c.dqkv,    c.dqkv + dk, c.dqkv + dv, c.dbias, c.dseq_scale,
                                    c.dby_key, c.dsink,     c.dmix,      c.dmixed};
    double flops = 4.0 * (double)HS * (double)NH * visible_pairs(variant, in->size.B, T);
    double forward[MAX_REPETITIONS], backward[MAX_REPETITIONS], rate[MAX_REPETITIONS];
    double forward_share[MAX_REPETITIONS], backward_share[MAX_REPETITIONS], both_share[MAX_REPETITIONS];
    matmul_rate(o);
    for (size_t r = 0; r < o->repetitions; r++) {
        double before = matmul_rate(o), start = seconds(o->cpu_time);
        attention_forward(c.out, c.lse, in, c.workspace);
        double middle = seconds(o->cpu_time);
        attention_backward(&gradients, c.dout, c.out, c.lse, in, c.workspace);
        double end = seconds(o->cpu_time);
        rate[r] = (before + matmul_rate(o)) / 2;
        forward[r] = middle - start, backward[r] = end - middle;
        forward_share[r] = flops / forward[r] / rate[r];
        backward_share[r] = 2.5 * flops / backward[r] / rate[r];
        both_share[r] = 3.5 * flops / (end - start) / rate[r];
    }
    size_t n = o->repetitions;
    Result result = {median(forward, n),        median(backward, n),   median(forward_share, n),
                     median(backward_share, n), median(both_share, n), median(rate, n)};
    free_case(&c);
    return result;
}

// ----------------------------------------------------------------------------
// reporting

static void print_row(const Variant* variant, size_t T, size_t HS, const Result* r) {
    double rate = r->matmul_rate * 1e-9;
    printf("%6zu %4zu  %-22s %9.2f %7.0f %6.1f %% %9.2f %7.0f %6.1f %% %7.1f %% %8.0f\n", T, HS, variant->name,
           r->forward * 1e3, r->forward_share * rate, r->forward_share * 100, r->backward * 1e3,
           r->backward_share * rate, r->backward_share * 100, r->both_share * 100, rate);
    fflush(stdout);
}

static void write_json(FILE* file, const Variant* variant, size_t T, size_t HS, const Result* r) {
    fprintf(file,
            "{\"name\": \"attention\", \"variant\": \"%s\", \"T\": %zu, \"HS\": %zu, \"forward_seconds\": %.6g, "
            "\"backward_seconds\": %.6g, \"forward_share\": %.4f, \"backward_share\": %.4f, \"share\": %.4f, "
            "\"matmul_flops\": %.4g}\n",
            variant->name, T, HS, r->forward, r->backward, r->forward_share, r->backward_share, r->both_share,
            r->matmul_rate);
}

int main(int argc, char** argv) {
    Options o = parse_options(argc, argv);
    FILE* json = o.json ? fopen(o.json, "w") : NULL;
    if (o.json && !json) { fatal("%s: cannot be written: %s", o.json, strerror(errno)); }
    printf("%6s %4s  %-22s %9s %7s %8s %9s %7s %8s %9s %8s\n", "T", "HS", "variant", "fwd ms", "GFLOP/s", "share",
           "bwd ms", "GFLOP/s", "share", "both", "matmul");
    for (size_t t = 0; t < o.T_count; t++) {
        for (size_t s = 0; s < o.HS_count; s++) {
            for (size_t v = 0; v < sizeof VARIANTS / sizeof *VARIANTS; v++) {
                Result r = measure(&o, &VARIANTS[v], o.T[t], o.HS[s]);
                print_row(&VARIANTS[v], o.T[t], o.HS[s], &r);
                if (json) { write_json(json, &VARIANTS[v], o.T[t], o.HS[s], &r); }
            }
        }
    }
    if (json && fclose(json) != 0) { fatal("%s: cannot be written: %s", o.json, strerror(errno)); }
    return 0;
}
