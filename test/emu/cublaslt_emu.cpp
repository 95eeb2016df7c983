// cublaslt_emu.cpp -- link-time replacement of the few cuBLASLt calls a trainer needs (prototypes from the real cublasLt.h); column-major.
#include "cuda_emulator.h"
#include "emu_race.h"
#include <cublasLt.h>
#include <dnnl.h>
#include <vector>
namespace emu { void device_access(bool on); int find_alloc(const void* p, size_t n, bool* dev); }
namespace {
struct Desc { cublasComputeType_t ct; cudaDataType_t st; cublasOperation_t ta, tb; cublasLtEpilogue_t epi; const void* bias; void* aux; int64_t aux_ld; cudaDataType_t bias_type; };
struct Lay { cudaDataType_t t; uint64_t r, c; int64_t ld; int32_t batch; int64_t stride; };
static_assert(sizeof(Desc) <= sizeof(cublasLtMatmulDescOpaque_t) && sizeof(Lay) <= sizeof(cublasLtMatrixLayoutOpaque_t), "");
size_t esz(cudaDataType_t t) { return t == CUDA_R_32F ? 4 : 2; }
float ld(const void* p, cudaDataType_t t, size_t i) { return t == CUDA_R_32F ? ((const float*)p)[i] : __bfloat162float(((const __nv_bfloat16*)p)[i]); }
void st(void* p, cudaDataType_t t, size_t i, float v) { if (t == CUDA_R_32F) ((float*)p)[i] = v; else ((__nv_bfloat16*)p)[i] = __float2bfloat16(v); }
bool in_range(const void* p, const Lay& l) { bool d = false; size_t n = ((size_t)(l.batch - 1) * l.stride + (size_t)(l.c - 1) * l.ld + l.r) * esz(l.t); bool ok = emu::find_alloc(p, n, &d) == 1 && d && !((uintptr_t)p & 15); if (!ok) fprintf(stderr, "emu: cublasLtMatmul: matrix %lux%lu ld %ld at %p is not inside a device allocation or not 16-byte aligned\n", l.r, l.c, l.ld, p); return ok; }
}
extern "C" {
cublasStatus_t cublasLtCreate(cublasLtHandle_t* h) { *h = (cublasLtHandle_t)malloc(1); return CUBLAS_STATUS_SUCCESS; }
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
const char* cublasLtGetStatusString(cublasStatus_t s) { return s == CUBLAS_STATUS_SUCCESS ? "success" : "error"; }
const char* cublasLtGetStatusName(cublasStatus_t s) { return s == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_ERROR"; }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) { free((void*)h); return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t c, cudaDataType_t s) { *d = new cublasLtMatmulDescOpaque_t(); *(Desc*)*d = Desc{c, s, CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT, nullptr, nullptr, 0, CUDA_R_16BF}; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { delete d; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t md, cublasLtMatmulDescAttributes_t a, const void* b, size_t n) {
  Desc* d = (Desc*)md; void* dst;
  switch (a) { case CUBLASLT_MATMUL_DESC_TRANSA: dst = &d->ta; break; case CUBLASLT_MATMUL_DESC_TRANSB: dst = &d->tb; break; case CUBLASLT_MATMUL_DESC_EPILOGUE: dst = &d->epi; break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: dst = &d->bias; break; case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: dst = &d->aux; break; case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: dst = &d->aux_ld; break;
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: dst = &d->bias_type; break; default: return CUBLAS_STATUS_NOT_SUPPORTED; }
  memcpy(dst, b, n); return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType_t t, uint64_t r, uint64_t c, int64_t ld) { *l = new cublasLtMatrixLayoutOpaque_t(); *(Lay*)*l = Lay{t, r, c, ld, 1, 0}; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { delete l; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t ml, cublasLtMatrixLayoutAttribute_t a, const void* b, size_t n) { Lay* l = (Lay*)ml;
  if (a == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) memcpy(&l->batch, b, n); else if (a == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET) memcpy(&l->stride, b, n); else return CUBLAS_STATUS_NOT_SUPPORTED; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) { *p = new cublasLtMatmulPreferenceOpaque_t(); return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { delete p; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t r[], int* n) { memset((void*)r, 0, sizeof r[0]); r[0].state = CUBLAS_STATUS_SUCCESS; *n = 1; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t md, const void* alpha, const void* A, cublasLtMatrixLayout_t la, const void* B, cublasLtMatrixLayout_t lb, const void* beta, const void* C, cublasLtMatrixLayout_t lc, void* D, cublasLtMatrixLayout_t ldd, const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t) {
  const Desc& d = *(Desc*)md; const Lay &a = *(Lay*)la, &b = *(Lay*)lb, &c = *(Lay*)lc, &o = *(Lay*)ldd;
  float al = *(const float*)alpha, be = *(const float*)beta;
  bool ta = d.ta != CUBLAS_OP_N, tb = d.tb != CUBLAS_OP_N;
  uint64_t m = ta ? a.c : a.r, k = ta ? a.r : a.c, n = tb ? b.r : b.c, kb = tb ? b.c : b.r;
  if (k != kb || o.r != m || o.c != n) { fprintf(stderr, "emu: cublasLtMatmul shape mismatch: op(A) %lux%lu op(B) %lux%lu D %lux%lu\n", m, k, kb, n, o.r, o.c); return CUBLAS_STATUS_INVALID_VALUE; }
  if (!in_range(A, a) || !in_range(B, b) || !in_range(D, o) || (be != 0 && !in_range(C, c))) return CUBLAS_STATUS_INVALID_VALUE;
  emu::device_access(true);
  std::vector<float> fa(a.r * a.c), fb(b.r * b.c), fo(m * n);
  for (int bi = 0; bi < o.batch; bi++) {
    const char* Ab = (const char*)A + bi * a.stride * esz(a.t); const char* Bb = (const char*)B + bi * b.stride * esz(b.t); const char* Cb = (const char*)C + bi * c.stride * esz(c.t); char* Db = (char*)D + bi * o.stride * esz(o.t);
    for (uint64_t j = 0; j < a.c; j++) for (uint64_t i = 0; i < a.r; i++) fa[j * a.r + i] = ld(Ab, a.t, j * a.ld + i);
    for (uint64_t j = 0; j < b.c; j++) for (uint64_t i = 0; i < b.r; i++) fb[j * b.r + i] = ld(Bb, b.t, j * b.ld + i);
    if (be != 0) for (uint64_t j = 0; j < n; j++) for (uint64_t i = 0; i < m; i++) fo[j * m + i] = ld(Cb, c.t, j * c.ld + i);
    dnnl_sgemm(tb ? (char)84 : (char)78, ta ? (char)84 : (char)78, (dnnl_dim_t)n, (dnnl_dim_t)m, (dnnl_dim_t)k, al, fb.data(), (dnnl_dim_t)b.r, fa.data(), (dnnl_dim_t)a.r, be, fo.data(), (dnnl_dim_t)m);
    for (uint64_t j = 0; j < n; j++) for (uint64_t i = 0; i < m; i++) { float v = fo[j * m + i];
      if (d.epi == CUBLASLT_EPILOGUE_BIAS) v += ld(d.bias, d.bias_type, i); else if (d.epi != CUBLASLT_EPILOGUE_DEFAULT) { emu::device_access(false); return CUBLAS_STATUS_NOT_SUPPORTED; }
      st(Db, o.t, j * o.ld + i, v); emu::race::on_host_write(Db + (j * o.ld + i) * esz(o.t), esz(o.t)); }
  }
  emu::device_access(false);
  return CUBLAS_STATUS_SUCCESS;
}
}
