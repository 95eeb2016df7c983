/*
Matrix products of cuBLASLt, real or emulated, against float64: types, transposes, leading dimensions, strided
batches, scaling, accumulation; and that wrong calls are refused.
*/
#include "emu_util.h"

#include <cublasLt.h>

// Column-major D[m,n] = alpha op(A) op(B) + beta D, as the library defines it.
typedef struct {
    const char* name;
    cudaDataType_t factors, result;
    cublasComputeType_t compute;
    bool transpose_a, transpose_b;
    size_t m, n, k, padding;  // added to every leading dimension
    size_t batches;
    float alpha, beta;
    double sum_error, rounding;  // allowed, relative to the sum of the absolute products and to the result
} Case;

// Products of bf16 are exact in fp32; a bf16 result is rounded once, by half of 2^-7; TF32 rounds each factor by half
// of 2^-10.
static const double SUM = 1e-6, SUM_TF32 = 0x1p-10, TO_BF16 = 0x1p-8;
#define B16 CUDA_R_16BF
#define F32 CUDA_R_32F
#define FULL CUBLAS_COMPUTE_32F
static const Case cases[] = {
    {"bf16 NN", B16, B16, FULL, false, false, 24, 40, 56, 0, 1, 1, 0, SUM, TO_BF16},
    {"bf16 TN", B16, B16, FULL, true, false, 24, 40, 56, 0, 1, 1, 0, SUM, TO_BF16},
    {"bf16 NT accumulates in fp32", B16, F32, FULL, false, true, 24, 40, 136, 0, 1, 1, 1, SUM, 0},
    {"bf16 TT padded", B16, F32, FULL, true, true, 16, 8, 32, 8, 1, 0.5f, 0, SUM, 0},
    {"bf16 batched", B16, B16, FULL, true, false, 16, 24, 32, 8, 3, 2, 0, SUM, TO_BF16},
    {"fp32 NN", F32, F32, FULL, false, false, 33, 17, 65, 0, 1, 1, 0, SUM, 0},
    {"fp32 NT accumulates", F32, F32, FULL, false, true, 33, 17, 65, 3, 1, 1, 1, SUM, 0},
    {"fp32 TN batched", F32, F32, FULL, true, false, 9, 8, 7, 1, 4, -1.5f, 0.25f, SUM, 0},
    {"tf32 outer product", F32, F32, CUBLAS_COMPUTE_32F_FAST_TF32, true, false, 32, 24, 1, 7, 1, 1, 0, SUM_TF32, 0},
    {"tf32 TN", F32, F32, CUBLAS_COMPUTE_32F_FAST_TF32, true, false, 32, 24, 64, 0, 1, 1, 0, SUM_TF32, 0},
};

// A matrix with its batches: on the host in fp32 (rounded to the type), and on the device.
typedef struct {
    cudaDataType_t type;
    size_t rows, columns, leading, stride, elements;
    float* host;
    void* device;
    cublasLtMatrixLayout_t layout;
} Matrix;

static void round_to_bf16(float* x) {
    uint32_t u;
    memcpy(&u, x, 4);
    u = (u + 0x7fffu + (u >> 16 & 1)) & 0xffff0000u;
    memcpy(x, &u, 4);
}

static Matrix matrix_create(cudaDataType_t type, size_t rows, size_t columns, const Case* c, Random* r) {
    Matrix m = {type, rows, columns, rows + c->padding, 0, 0, NULL, NULL, NULL};
    m.stride = (m.leading * columns + 15) / 8 * 8;
    m.elements = m.stride * c->batches;
    m.host = random_array(m.elements, 1, r);
    if (type == CUDA_R_32F) {
        m.device = device_copy(m.host, m.elements);
    } else {
        uint16_t* half = (uint16_t*)xcalloc(m.elements, 2);
        for (size_t i = 0; i < m.elements; i++) {
            uint32_t u;
            round_to_bf16(&m.host[i]);
            memcpy(&u, &m.host[i], 4);
            half[i] = (uint16_t)(u >> 16);
        }
        m.device = device_copy(half, m.elements);
        free(half);
    }
    assert_int_equal(cublasLtMatrixLayoutCreate(&m.layout, type, rows, columns, (int64_t)m.leading), 0);
    if (c->batches > 1) {
        int32_t count = (int32_t)c->batches;
        int64_t stride = (int64_t)m.stride;
        cublasLtMatrixLayoutSetAttribute(m.layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count);
        cublasLtMatrixLayoutSetAttribute(m.layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride);
    }
    return m;
}

static float* matrix_fetch(const Matrix* m) {
    float* x = (float*)xcalloc(m->elements, sizeof(float));
    if (m->type == CUDA_R_32F) {
        fetch(x, (const float*)m->device, m->elements);
        return x;
    }
    uint16_t* half = (uint16_t*)xcalloc(m->elements, 2);
    fetch(half, (const uint16_t*)m->device, m->elements);
    for (size_t i = 0; i < m->elements; i++) {
        uint32_t u = (uint32_t)half[i] << 16;
        memcpy(&x[i], &u, 4);
    }
    free(half);
    return x;
}

static void matrix_free(Matrix* m) {
    free(m->host);
    check_cuda(cudaFree(m->device));
    cublasLtMatrixLayoutDestroy(m->layout);
}

// The reference, and the size of its terms for the tolerance.
static double product_reference(double* size, const Case* c, const Matrix* a, const Matrix* b, const Matrix* d,
                                size_t batch, size_t i, size_t j) {
    const float *A = a->host + batch * a->stride, *B = b->host + batch * b->stride;
    double before = c->beta != 0 ? c->beta * (double)d->host[batch * d->stride + j * d->leading + i] : 0, sum = before;
    *size = fabs(before);
    for (size_t k = 0; k < c->k; k++) {
        double x = c->transpose_a ? A[i * a->leading + k] : A[k * a->leading + i];
        double y = c->transpose_b ? B[k * b->leading + j] : B[j * b->leading + k];
        sum += c->alpha * x * y;
        *size += fabs(c->alpha * x * y);
    }
    return sum;
}

static const size_t WORKSPACE = 1 << 20;

typedef struct {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t operation;
    cublasLtMatmulHeuristicResult_t heuristic;
    void* workspace;
} Plan;

static Plan plan_create(const Case* c, const Matrix* a, const Matrix* b, const Matrix* d, uint32_t alignment) {
    Plan p;
    const cublasOperation_t ta = c->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t tb = c->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtMatmulPreference_t preference;
    int found = 0;
    assert_int_equal(cublasLtCreate(&p.handle), 0);
    assert_int_equal(cublasLtMatmulDescCreate(&p.operation, c->compute, CUDA_R_32F), 0);
    assert_int_equal(cublasLtMatmulDescSetAttribute(p.operation, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta), 0);
    assert_int_equal(cublasLtMatmulDescSetAttribute(p.operation, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb), 0);
    assert_int_equal(cublasLtMatmulPreferenceCreate(&preference), 0);
    const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (cublasLtMatmulPreferenceAttributes_t attribute : alignments) {
        cublasLtMatmulPreferenceSetAttribute(preference, attribute, &alignment, sizeof alignment);
    }
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE,
                                         sizeof WORKSPACE);
    assert_int_equal(cublasLtMatmulAlgoGetHeuristic(p.handle, p.operation, a->layout, b->layout, d->layout, d->layout,
                                                    preference, 1, &p.heuristic, &found),
                     0);
    assert_int_equal(found, 1);
    cublasLtMatmulPreferenceDestroy(preference);
    p.workspace = device_array<char>(WORKSPACE);
    return p;
}

static cublasStatus_t plan_run(const Plan* p, const Case* c, const Matrix* a, const Matrix* b, Matrix* d,
                               size_t workspace_bytes) {
    return cublasLtMatmul(p->handle, p->operation, &c->alpha, a->device, a->layout, b->device, b->layout, &c->beta,
                          d->device, d->layout, d->device, d->layout, &p->heuristic.algo, p->workspace, workspace_bytes,
                          0);
}

static void plan_free(Plan* p) {
    check_cuda(cudaFree(p->workspace));
    cublasLtMatmulDescDestroy(p->operation);
    cublasLtDestroy(p->handle);
}

static void check_result(const Case* c, const Matrix* a, const Matrix* b, const Matrix* d) {
    float* got = matrix_fetch(d);
    for (size_t batch = 0; batch < c->batches; batch++) {
        for (size_t i = 0; i < d->stride; i++) {
            size_t row = i % d->leading, column = i / d->leading, at = batch * d->stride + i;
            if (row >= d->rows || column >= d->columns) {
                assert_true(got[at] == d->host[at]);  // what lies between the columns is left alone
                continue;
            }
            double size, want = product_reference(&size, c, a, b, d, batch, row, column);
            if (!(fabs(got[at] - want) <= c->sum_error * size + c->rounding * fabs(want))) {
                print_error("%s: D[%zu,%zu] = %g, expected %g\n", c->name, row, column, (double)got[at], want);
                fail();
            }
        }
    }
    free(got);
}

static void test_products(void**) {
    for (const Case& c : cases) {
        Random r = random_stream(5, 0);
        Matrix a = matrix_create(c.factors, c.transpose_a ? c.k : c.m, c.transpose_a ? c.m : c.k, &c, &r);
        Matrix b = matrix_create(c.factors, c.transpose_b ? c.n : c.k, c.transpose_b ? c.k : c.n, &c, &r);
        Matrix d = matrix_create(c.result, c.m, c.n, &c, &r);
        Plan p = plan_create(&c, &a, &b, &d, 16);
        assert_int_equal(plan_run(&p, &c, &a, &b, &d, WORKSPACE), CUBLAS_STATUS_SUCCESS);
        check_result(&c, &a, &b, &d);
        plan_free(&p);
        matrix_free(&a);
        matrix_free(&b);
        matrix_free(&d);
    }
}

#ifdef CUDA_EMULATOR
// A GPU may crash, or be silently right, where the emulator refuses.
static void test_refused(void**) {
    const Case* c = &cases[0];
    Random r = random_stream(6, 0);
    Matrix a = matrix_create(c->factors, c->m, c->k, c, &r), b = matrix_create(c->factors, c->k, c->n, c, &r);
    Matrix d = matrix_create(c->result, c->m, c->n, c, &r), wide = matrix_create(c->factors, c->m, c->k + 1, c, &r);
    Plan p = plan_create(c, &a, &b, &d, 256);
    assert_int_equal(plan_run(&p, c, &a, &b, &d, WORKSPACE), CUBLAS_STATUS_SUCCESS);
    assert_int_not_equal(plan_run(&p, c, &a, &b, &d, 0), CUBLAS_STATUS_SUCCESS);          // workspace too small
    assert_int_not_equal(plan_run(&p, c, &b, &b, &d, WORKSPACE), CUBLAS_STATUS_SUCCESS);  // shapes
    assert_int_not_equal(plan_run(&p, c, &wide, &b, &d, WORKSPACE), CUBLAS_STATUS_SUCCESS);

    Matrix shifted = a;
    shifted.device = static_cast<char*>(a.device) + 16;  // less aligned than promised
    assert_int_not_equal(plan_run(&p, c, &shifted, &b, &d, WORKSPACE), CUBLAS_STATUS_SUCCESS);
    shifted.device = static_cast<char*>(a.device) + 256;  // past the end
    assert_int_not_equal(plan_run(&p, c, &shifted, &b, &d, WORKSPACE), CUBLAS_STATUS_SUCCESS);
    shifted.device = a.host;  // not on the device
    assert_int_not_equal(plan_run(&p, c, &shifted, &b, &d, WORKSPACE), CUBLAS_STATUS_SUCCESS);

    float* scratch = (float*)xcalloc(WORKSPACE, 1);  // what lies in the workspace is lost
    fetch((char*)scratch, (const char*)p.workspace, p.heuristic.workspaceSize);
    assert_true(p.heuristic.workspaceSize > 0 && isnan(scratch[0]));
    free(scratch);
    plan_free(&p);
    matrix_free(&a);
    matrix_free(&b);
    matrix_free(&d);
    matrix_free(&wide);
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),
#ifdef CUDA_EMULATOR
        cmocka_unit_test(test_refused),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
