/*
cuBLASLt's matrix product on the CPU, with oneDNN: D = alpha op(A) op(B) + beta C, column-major, bf16 or fp32 factors,
fp32 accumulation, bf16 or fp32 results, strided batches. What the library refuses, or would read or write outside
its allocations, is refused here with a line on stderr. The workspace is overwritten with NaN.
*/
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include <cublasLt.h>
#include <dnnl.h>

#include "emulator.h"

namespace {

struct Description {
    cublasComputeType_t compute;
    cublasOperation_t transpose_a, transpose_b;
    cublasLtEpilogue_t epilogue;
};

struct Layout {
    cudaDataType_t type;
    uint64_t rows, columns;
    int64_t leading, stride;
    int32_t batches;
};

struct Preference {
    uint64_t workspace;
    uint32_t alignment[4];  // promised for A, B, C, D
};

struct Algorithm {
    uint64_t magic, workspace;
    uint32_t alignment[4];
};

const uint64_t ALGORITHM_MAGIC = 0x656D756C74000001ull, WANTED_WORKSPACE = 64 << 10;

static_assert(sizeof(Description) <= sizeof(cublasLtMatmulDescOpaque_t), "");
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "");
static_assert(sizeof(Preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "");
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t), "");

template <class T, class Opaque>
T* inside(Opaque* p) {
    return reinterpret_cast<T*>(p);
}

// One product of a batch.
struct Product {
    const Description* description;
    const Layout *a, *b, *c, *d;
    uint64_t m, n, k;
    float alpha, beta;
};

// ----------------------------------------------------------------------------
// checks

cublasStatus_t refuse(const char* what) {
    fprintf(stderr, "emulator: cublasLtMatmul: %s\n", what);
    return CUBLAS_STATUS_INVALID_VALUE;
}

size_t element_bytes(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

// Is the whole matrix, all batches, inside one device allocation, and aligned as promised?
bool matrix_in_memory(const char* name, const void* p, const Layout* l, uint32_t alignment) {
    bool on_device;
    uint64_t batches = static_cast<uint64_t>(l->batches), stride = static_cast<uint64_t>(l->stride);
    uint64_t elements = (batches - 1) * stride + (l->columns - 1) * static_cast<uint64_t>(l->leading) + l->rows;
    emu::Containment where = emu::find_allocation(p, elements * element_bytes(l->type), &on_device);
    if (where != emu::INSIDE || !on_device) {
        fprintf(stderr,
                "emulator: cublasLtMatmul: %s, %lux%lu with leading dimension %ld, is not inside a device allocation\n",
                name, l->rows, l->columns, l->leading);
        return false;
    }
    if (reinterpret_cast<uintptr_t>(p) % alignment != 0) {
        fprintf(stderr, "emulator: cublasLtMatmul: %s is not aligned to %u bytes, which the preference promised\n",
                name, alignment);
        return false;
    }
    return true;
}

// The combinations of types that cuBLASLt documents, as far as bf16 and fp32 go.
bool types_supported(const Product* p) {
    bool fp32 = p->a->type == CUDA_R_32F, known = fp32 || p->a->type == CUDA_R_16BF;
    bool result = p->d->type == CUDA_R_32F || (!fp32 && p->d->type == CUDA_R_16BF);
    cublasComputeType_t compute = p->description->compute;
    bool tf32 = compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    return known && result && p->a->type == p->b->type && p->c->type == p->d->type &&
           (compute == CUBLAS_COMPUTE_32F || (tf32 && fp32)) && p->description->epilogue == CUBLASLT_EPILOGUE_DEFAULT;
}

cublasStatus_t check_shapes(const Product* p) {
    const Layout *a = p->a, *b = p->b;
    bool ta = p->description->transpose_a != CUBLAS_OP_N, tb = p->description->transpose_b != CUBLAS_OP_N;
    if (!types_supported(p)) { return CUBLAS_STATUS_NOT_SUPPORTED; }
    if (p->m == 0 || p->n == 0 || p->k == 0) { return refuse("a dimension is 0"); }
    bool match = (ta ? a->columns : a->rows) == p->m && (tb ? b->columns : b->rows) == p->k &&
                 (tb ? b->rows : b->columns) == p->n && p->c->rows == p->m && p->c->columns == p->n;
    if (!match) { return refuse("the shapes of op(A), op(B), C and D do not fit"); }
    for (const Layout* l : {p->a, p->b, p->c, p->d}) {
        if (l->leading < static_cast<int64_t>(l->rows)) { return refuse("a leading dimension is less than the rows"); }
        if (l->batches != p->d->batches || l->batches < 1) { return refuse("the numbers of batches differ"); }
    }
    return CUBLAS_STATUS_SUCCESS;
}

Product make_product(cublasLtMatmulDesc_t description, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                     cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d) {
    Product p = {inside<Description>(description),
                 inside<Layout>(a),
                 inside<Layout>(b),
                 inside<Layout>(c),
                 inside<Layout>(d),
                 0,
                 0,
                 0,
                 0,
                 0};
    p.m = p.d->rows;
    p.n = p.d->columns;
    p.k = p.description->transpose_a != CUBLAS_OP_N ? p.a->rows : p.a->columns;
    return p;
}

// ----------------------------------------------------------------------------
// arithmetic

float load(const void* p, cudaDataType_t type, uint64_t i) {
    if (type == CUDA_R_32F) { return static_cast<const float*>(p)[i]; }
    return emu::bits<float>(static_cast<uint32_t>(static_cast<const uint16_t*>(p)[i]) << 16);
}

// To 10 bits of mantissa, ties to even.
float round_to_tf32(float x) {
    uint32_t u = emu::bits<uint32_t>(x);
    return isfinite(x) ? emu::bits<float>((u + 0xfffu + (u >> 13 & 1)) & ~0x1fffu) : x;
}

// The matrix in fp32 with leading dimension `rows`.
std::vector<float> unpack(const void* matrix, const Layout* l, uint64_t batch, bool tf32) {
    std::vector<float> x(l->rows * l->columns);
    for (uint64_t j = 0; j < l->columns; j++) {
        uint64_t start = batch * static_cast<uint64_t>(l->stride) + j * static_cast<uint64_t>(l->leading);
        for (uint64_t i = 0; i < l->rows; i++) {
            float v = load(matrix, l->type, start + i);
            x[j * l->rows + i] = tf32 ? round_to_tf32(v) : v;
        }
    }
    return x;
}

void store(void* matrix, const Product* p, const void* c, const std::vector<float>& product, uint64_t batch) {
    const Layout *to = p->d, *from = p->c;
    for (uint64_t j = 0; j < p->n; j++) {
        uint64_t out = batch * static_cast<uint64_t>(to->stride) + j * static_cast<uint64_t>(to->leading);
        uint64_t in = batch * static_cast<uint64_t>(from->stride) + j * static_cast<uint64_t>(from->leading);
        for (uint64_t i = 0; i < p->m; i++) {
            float v = p->alpha * product[j * p->m + i];
            if (p->beta != 0) { v += p->beta * load(c, from->type, in + i); }
            if (to->type == CUDA_R_32F) {
                static_cast<float*>(matrix)[out + i] = v;
            } else {
                static_cast<__nv_bfloat16*>(matrix)[out + i] = __float2bfloat16_rn(v);
            }
        }
        size_t bytes = element_bytes(to->type);
        emu::checker::host_wrote(static_cast<char*>(matrix) + out * bytes, p->m * bytes);
    }
}

// oneDNN's sgemm is row-major, so it is asked for the transposed product.
void multiply(void* d, const Product* p, const void* a, const void* b, const void* c) {
    bool tf32 = p->description->compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    char ta = p->description->transpose_a != CUBLAS_OP_N ? 'T' : 'N';
    char tb = p->description->transpose_b != CUBLAS_OP_N ? 'T' : 'N';
    std::vector<float> product(p->m * p->n);
    for (uint64_t batch = 0; batch < static_cast<uint64_t>(p->d->batches); batch++) {
        std::vector<float> x = unpack(a, p->a, batch, tf32), y = unpack(b, p->b, batch, tf32);
        dnnl_sgemm(tb, ta, static_cast<dnnl_dim_t>(p->n), static_cast<dnnl_dim_t>(p->m), static_cast<dnnl_dim_t>(p->k),
                   1.0f, y.data(), static_cast<dnnl_dim_t>(p->b->rows), x.data(), static_cast<dnnl_dim_t>(p->a->rows),
                   0.0f, product.data(), static_cast<dnnl_dim_t>(p->m));
        store(d, p, c, product, batch);
    }
}

}  // namespace

// ----------------------------------------------------------------------------
// the library's names

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    *handle = static_cast<cublasLtHandle_t>(malloc(1));
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    free(static_cast<void*>(handle));
    return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
const char* cublasLtGetStatusName(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
        case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
        case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
        default: return "CUBLAS_STATUS_INTERNAL_ERROR";
    }
}
const char* cublasLtGetStatusString(cublasStatus_t status) { return cublasLtGetStatusName(status); }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    if (scale != CUDA_R_32F) { return CUBLAS_STATUS_NOT_SUPPORTED; }
    *description = new cublasLtMatmulDescOpaque_t();
    *inside<Description>(*description) = {compute, CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
    delete description;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t bytes) {
    Description* d = inside<Description>(description);
    if (bytes != sizeof(cublasOperation_t)) { return CUBLAS_STATUS_INVALID_VALUE; }
    switch (attribute) {
        case CUBLASLT_MATMUL_DESC_TRANSA: memcpy(&d->transpose_a, value, bytes); return CUBLAS_STATUS_SUCCESS;
        case CUBLASLT_MATMUL_DESC_TRANSB: memcpy(&d->transpose_b, value, bytes); return CUBLAS_STATUS_SUCCESS;
        case CUBLASLT_MATMUL_DESC_EPILOGUE: memcpy(&d->epilogue, value, bytes); return CUBLAS_STATUS_SUCCESS;
        default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type, uint64_t rows,
                                          uint64_t columns, int64_t leading) {
    *layout = new cublasLtMatrixLayoutOpaque_t();
    *inside<Layout>(*layout) = {type, rows, columns, leading, 0, 1};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    delete layout;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t bytes) {
    Layout* l = inside<Layout>(layout);
    if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT && bytes == sizeof l->batches) {
        memcpy(&l->batches, value, bytes);
    } else if (attribute == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET && bytes == sizeof l->stride) {
        memcpy(&l->stride, value, bytes);
    } else {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    *preference = new cublasLtMatmulPreferenceOpaque_t();
    *inside<Preference>(*preference) = {0, {256, 256, 256, 256}};  // the documented defaults
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    delete preference;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
    Preference* p = inside<Preference>(preference);
    switch (attribute) {
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: memcpy(&p->workspace, value, bytes); break;
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: memcpy(&p->alignment[0], value, bytes); break;
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: memcpy(&p->alignment[1], value, bytes); break;
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: memcpy(&p->alignment[2], value, bytes); break;
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: memcpy(&p->alignment[3], value, bytes); break;
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: break;  // there is only one order of summation here
        default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    return CUBLAS_STATUS_SUCCESS;
}

// One algorithm, which wants as much workspace as it may have, up to 64 KiB.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
    *found = 0;
    if (wanted < 1) { return CUBLAS_STATUS_INVALID_VALUE; }
    Product p = make_product(description, a, b, c, d);
    cublasStatus_t status = check_shapes(&p);
    if (status != CUBLAS_STATUS_SUCCESS) { return status; }
    const Preference* limits = inside<Preference>(preference);
    Algorithm algorithm = {ALGORITHM_MAGIC, min(WANTED_WORKSPACE, limits->workspace), {0}};
    memcpy(algorithm.alignment, limits->alignment, sizeof algorithm.alignment);
    memset(static_cast<void*>(&results[0]), 0, sizeof results[0]);
    memcpy(&results[0].algo, &algorithm, sizeof algorithm);
    results[0].workspaceSize = algorithm.workspace;
    results[0].state = CUBLAS_STATUS_SUCCESS;
    results[0].wavesCount = 1.0f;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t description, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t layout_a, const void* b, cublasLtMatrixLayout_t layout_b,
                              const void* beta, const void* c, cublasLtMatrixLayout_t layout_c, void* d,
                              cublasLtMatrixLayout_t layout_d, const cublasLtMatmulAlgo_t* chosen, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    if (emu::device_failed()) { return CUBLAS_STATUS_EXECUTION_FAILED; }
    Product p = make_product(description, layout_a, layout_b, layout_c, layout_d);
    memcpy(&p.alpha, alpha, sizeof p.alpha);
    memcpy(&p.beta, beta, sizeof p.beta);
    cublasStatus_t status = check_shapes(&p);
    if (status != CUBLAS_STATUS_SUCCESS) { return status; }

    Algorithm algorithm = {ALGORITHM_MAGIC, 0, {16, 16, 16, 16}};
    if (chosen) { memcpy(&algorithm, chosen, sizeof algorithm); }
    if (algorithm.magic != ALGORITHM_MAGIC) { return refuse("the algorithm does not come from the heuristic"); }
    bool in_memory = matrix_in_memory("A", a, p.a, algorithm.alignment[0]) &&
                     matrix_in_memory("B", b, p.b, algorithm.alignment[1]) &&
                     (p.beta == 0 || matrix_in_memory("C", c, p.c, algorithm.alignment[2])) &&
                     matrix_in_memory("D", d, p.d, algorithm.alignment[3]);
    if (!in_memory) { return CUBLAS_STATUS_INVALID_VALUE; }
    bool on_device;
    if (workspace_bytes < algorithm.workspace ||
        (algorithm.workspace > 0 && emu::find_allocation(workspace, algorithm.workspace, &on_device) != emu::INSIDE)) {
        return refuse("the workspace is smaller than the algorithm needs");
    }
    // by value: the caller may destroy the description before a late product runs
    Description what = *p.description;
    Layout layouts[] = {*p.a, *p.b, *p.c, *p.d};
    auto run = [=] {
        Product q = {&what, &layouts[0], &layouts[1], &layouts[2], &layouts[3], p.m, p.n, p.k, p.alpha, p.beta};
        emu::open_device_memory();
        if (algorithm.workspace > 0) { memset(workspace, 0xff, algorithm.workspace); }
        multiply(d, &q, a, b, c);
        emu::close_device_memory();
    };
    if (emu::config().late == emu::KERNELS_LATE) {
        emu::run_late(stream, run);
    } else {
        emu::before_work(stream);
        run();
    }
    return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
