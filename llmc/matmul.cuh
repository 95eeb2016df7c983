/*
Matrix products on cuBLASLt: matmul_forward, matmul_backward and the product they are made of. CUDA version;
contract in ops.h. Factors are floatX, sums fp32: on tensor cores in bf16, without TF32 in fp32.
*/
#ifndef MATMUL_CUH
#define MATMUL_CUH

#include <cublasLt.h>

#include "cuda_common.cuh"
#include "ops.h"

#define cublasCheck(call)                                                                       \
    do {                                                                                        \
        cublasStatus_t status_ = (call);                                                        \
        if (status_ != CUBLAS_STATUS_SUCCESS) {                                                 \
            fatal("%s:%d: cuBLASLt: %s", __FILE__, __LINE__, cublasLtGetStatusString(status_)); \
        }                                                                                       \
    } while (0)

// What NVIDIA recommends for Hopper; the library falls back to slower algorithms with less.
constexpr size_t PRODUCT_WORKSPACE = (size_t)32 << 20;

// out[rows,columns] = A[rows,inner] B[inner,columns], all row-major, ld elements between rows as stored.
typedef struct {
    size_t rows, columns, inner;
    size_t lda, ldb, ldout;
    bool transpose_a, transpose_b;  // stored as [inner,rows], as [columns,inner]
    bool accumulate;                // out is fp32 and added to, else floatX and overwritten
} Product;

// ----------------------------------------------------------------------------
// what the library found for a product, kept by shape

// Many shapes come from evaluating texts of many lengths; the oldest plan makes room.
constexpr size_t MAX_PLANS = 256;

typedef struct {
    Product key;
    uint32_t alignment;  // of every matrix, in bytes
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, out;
    cublasLtMatmulAlgo_t algorithm;
} ProductPlan;

static cublasLtHandle_t cublaslt_handle(void) {
    static cublasLtHandle_t handle;
    if (!handle) { cublasCheck(cublasLtCreate(&handle)); }
    return handle;
}

static bool same_product(const Product* p, const Product* q) {
    return p->rows == q->rows && p->columns == q->columns && p->inner == q->inner && p->lda == q->lda &&
           p->ldb == q->ldb && p->ldout == q->ldout && p->transpose_a == q->transpose_a &&
           p->transpose_b == q->transpose_b && p->accumulate == q->accumulate;
}

static void set_preference(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
                           const void* value, size_t bytes) {
    cublasCheck(cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, bytes));
}

// The library's first choice among algorithms that give the same bits every time.
static void choose_algorithm(ProductPlan* plan) {
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasCheck(cublasLtMatmulPreferenceCreate(&preference));
    set_preference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &PRODUCT_WORKSPACE, sizeof(size_t));
    set_preference(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions);
    const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (int i = 0; i < 4; i++) { set_preference(preference, alignments[i], &plan->alignment, sizeof(uint32_t)); }
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(cublaslt_handle(), plan->operation, plan->b, plan->a,
                                                           plan->out, plan->out, preference, 1, &result, &found);
    if (status != CUBLAS_STATUS_SUCCESS || found == 0) {
        fatal("cuBLASLt has no %s product of %zu x %zu x %zu for this device (%s); update CUDA or change the sizes",
              PRECISION_NAME, plan->key.rows, plan->key.columns, plan->key.inner, cublasLtGetStatusString(status));
    }
    plan->algorithm = result.algo;
    cublasCheck(cublasLtMatmulPreferenceDestroy(preference));
}

// The library is column-major, where a row-major matrix is its transpose: out^T = B^T A^T, so B comes first.
static ProductPlan plan_create(const Product* p, uint32_t alignment) {
    ProductPlan plan;
    memset(&plan, 0, sizeof plan);
    plan.key = *p, plan.alignment = alignment;
    const cudaDataType_t factor = sizeof(floatX) == sizeof(float) ? CUDA_R_32F : CUDA_R_16BF;
    const cublasOperation_t of_b = p->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t of_a = p->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasCheck(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublasCheck(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, &of_b, sizeof of_b));
    cublasCheck(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, &of_a, sizeof of_a));
    cublasCheck(cublasLtMatrixLayoutCreate(&plan.b, factor, p->transpose_b ? p->inner : p->columns,
                                           p->transpose_b ? p->columns : p->inner, (int64_t)p->ldb));
    cublasCheck(cublasLtMatrixLayoutCreate(&plan.a, factor, p->transpose_a ? p->rows : p->inner,
                                           p->transpose_a ? p->inner : p->rows, (int64_t)p->lda));
    cublasCheck(cublasLtMatrixLayoutCreate(&plan.out, p->accumulate ? CUDA_R_32F : factor, p->columns, p->rows,
                                           (int64_t)p->ldout));
    choose_algorithm(&plan);
    return plan;
}

static void plan_free(ProductPlan* plan) {
    cublasCheck(cublasLtMatmulDescDestroy(plan->operation));
    cublasCheck(cublasLtMatrixLayoutDestroy(plan->a));
    cublasCheck(cublasLtMatrixLayoutDestroy(plan->b));
    cublasCheck(cublasLtMatrixLayoutDestroy(plan->out));
}

static const ProductPlan* plan_for(const Product* p, uint32_t alignment) {
    static ProductPlan plans[MAX_PLANS];
    static size_t used, oldest;
    for (size_t i = 0; i < used; i++) {
        if (plans[i].alignment == alignment && same_product(&plans[i].key, p)) { return &plans[i]; }
    }
    size_t slot = used < MAX_PLANS ? used++ : oldest++ % MAX_PLANS;
    if (oldest) { plan_free(&plans[slot]); }
    plans[slot] = plan_create(p, alignment);
    return &plans[slot];
}

// workspace: PRODUCT_WORKSPACE bytes.
static void product(void* out, const floatX* a, const floatX* b, void* workspace, const Product* p) {
    const float one = 1.0f, beta = p->accumulate ? 1.0f : 0.0f;
    const uintptr_t addresses = (uintptr_t)out | (uintptr_t)a | (uintptr_t)b;
    uint32_t alignment = 16;
    while (addresses % alignment) { alignment /= 2; }
    const ProductPlan* plan = plan_for(p, alignment);
    cublasCheck(cublasLtMatmul(cublaslt_handle(), plan->operation, &one, b, plan->b, a, plan->a, &beta, out, plan->out,
                               out, plan->out, &plan->algorithm, workspace, PRODUCT_WORKSPACE, main_stream));
}

// ----------------------------------------------------------------------------
// operators

void matmul_forward(floatX* out, const floatX* inp, const floatX* weight, void* workspace, size_t N, size_t C,
                    size_t OC) {
    const Product p = {N, OC, C, C, C, OC, false, true, false};
    product(out, inp, weight, workspace, &p);
}

void matmul_backward(floatX* dinp, float* dweight, const floatX* dout, const floatX* inp, const floatX* weight,
                     void* workspace, size_t N, size_t C, size_t OC) {
    const Product to_inp = {N, C, OC, OC, C, C, false, false, false};
    const Product to_weight = {OC, C, N, OC, C, C, true, false, true};
    if (dinp) { product(dinp, dout, weight, workspace, &to_inp); }
    if (dweight) { product(dweight, dout, inp, workspace, &to_weight); }
}

size_t matmul_workspace(size_t N, size_t C, size_t OC) {
    (void)N, (void)C, (void)OC;
    return PRODUCT_WORKSPACE;
}

// ----------------------------------------------------------------------------
// the device's rate

// Values in [-1, 1): products of zeros draw less power and run faster than real ones.
__global__ void fill_kernel(floatX* x, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t bits = ((uint32_t)i * 2654435761u) ^ ((uint32_t)i >> 7);
    if (i < n) { x[i] = (floatX)((float)(bits >> 8) * 0x1p-23f - 1.0f); }
}

// Seconds of a square product, the best of runs within a twentieth of a second.
static double time_product(size_t size) {
    const Product p = {size, size, size, size, size, size, false, true, false};
    const size_t n = size * size;
    floatX* matrices = (floatX*)device_malloc(3 * n * sizeof(floatX) + PRODUCT_WORKSPACE);
    void* workspace = matrices + 3 * n;
    LAUNCH(fill_kernel, (unsigned)ceil_div(2 * n, 256), 256, 0, main_stream, matrices, 2 * n);
    cudaCheck(cudaGetLastError());
    double best = INFINITY, start = wall_seconds();
    for (int run = 0; run < 3 || wall_seconds() - start < 0.05; run++) {
        device_synchronize();
        double t = wall_seconds();
        for (int i = 0; i < 4; i++) { product(matrices + 2 * n, matrices, matrices + n, workspace, &p); }
        device_synchronize();
        t = (wall_seconds() - t) / 4;
        best = t < best ? t : best;
    }
    device_free(matrices);
    return best;
}

// Sizes are doubled until the device is busy for long enough to be measured.
double backend_matmul_rate(void) {
    size_t size = 512;
    double seconds = time_product(size);
    while (size < 4096 && seconds < 5e-4) {
        size *= 2;
        seconds = time_product(size);
    }
    return 2.0 * (double)size * (double)size * (double)size / seconds;
}

#endif
