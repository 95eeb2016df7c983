/*
Matrix products on the CPU: matmul_forward, matmul_backward and the product they are made of, on oneDNN (the
matmul primitive of its C API, versions 2 and 3).

Rows are taken in blocks, so that what is converted for a product is still in cache when the product reads it.
*/
#include <dnnl.h>

#include "matmul_cpu.h"
#include "ops.h"

// ----------------------------------------------------------------------------
// oneDNN's two interfaces: version 2 has structures where version 3 has handles

#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t Layout;
typedef const_dnnl_memory_desc_t ConstLayout;
#else
typedef dnnl_memory_desc_t* Layout;
typedef const dnnl_memory_desc_t* ConstLayout;
#endif

static void check(dnnl_status_t status, const char* what) {
    if (status != dnnl_success) {
        fatal("oneDNN: %s failed with status %d (%s); use another version of oneDNN or --dtype float32", what,
              (int)status, status == dnnl_out_of_memory ? "out of memory" : "see dnnl_status_t");
    }
}

static dnnl_data_type_t factor_type(Precision precision) { return precision == PRECISION_BF16 ? dnnl_bf16 : dnnl_f32; }

// rows x columns, stored as [columns,rows] when transpose; ld elements between stored rows.
static Layout layout_strided(size_t rows, size_t columns, size_t ld, bool transpose, dnnl_data_type_t type) {
    dnnl_dims_t dims = {(dnnl_dim_t)rows, (dnnl_dim_t)columns};
    dnnl_dims_t strides = {transpose ? 1 : (dnnl_dim_t)ld, transpose ? (dnnl_dim_t)ld : 1};
    Layout layout;
#if DNNL_VERSION_MAJOR >= 3
    check(dnnl_memory_desc_create_with_strides(&layout, 2, dims, type, strides), "a memory descriptor");
#else
    layout = (Layout)xcalloc(1, sizeof *layout);
    check(dnnl_memory_desc_init_by_strides(layout, 2, dims, type, strides), "a memory descriptor");
#endif
    return layout;
}

// rows x columns in whatever order the library prefers.
static Layout layout_any(size_t rows, size_t columns, dnnl_data_type_t type) {
    dnnl_dims_t dims = {(dnnl_dim_t)rows, (dnnl_dim_t)columns};
    Layout layout;
#if DNNL_VERSION_MAJOR >= 3
    check(dnnl_memory_desc_create_with_tag(&layout, 2, dims, type, dnnl_format_tag_any), "a memory descriptor");
#else
    layout = (Layout)xcalloc(1, sizeof *layout);
    check(dnnl_memory_desc_init_by_tag(layout, 2, dims, type, dnnl_format_tag_any), "a memory descriptor");
#endif
    return layout;
}

static Layout layout_clone(ConstLayout source) {
    Layout layout;
#if DNNL_VERSION_MAJOR >= 3
    check(dnnl_memory_desc_clone(&layout, source), "a memory descriptor");
#else
    layout = (Layout)xcalloc(1, sizeof *layout);
    *layout = *source;
#endif
    return layout;
}

static void layout_free(Layout layout) {
#if DNNL_VERSION_MAJOR >= 3
    dnnl_memory_desc_destroy(layout);
#else
    free(layout);
#endif
}

static dnnl_status_t matmul_desc_create(dnnl_primitive_desc_t* out, ConstLayout a, ConstLayout b, ConstLayout c,
                                        const_dnnl_primitive_attr_t attributes, dnnl_engine_t engine) {
#if DNNL_VERSION_MAJOR >= 3
    return dnnl_matmul_primitive_desc_create(out, engine, a, b, NULL, c, attributes);
#else
    dnnl_matmul_desc_t description;
    dnnl_status_t status = dnnl_matmul_desc_init(&description, a, b, NULL, c);
    if (status != dnnl_success) { return status; }
    return dnnl_primitive_desc_create(out, &description, attributes, engine, NULL);
#endif
}

static dnnl_status_t append_sum(dnnl_post_ops_t operations) {
#if DNNL_VERSION_MAJOR >= 3
    return dnnl_post_ops_append_sum(operations, 1.0f, 0, dnnl_data_type_undef);
#else
    return dnnl_post_ops_append_sum(operations, 1.0f);
#endif
}

// ----------------------------------------------------------------------------
// kernels, kept by shape

// Many shapes come from evaluating texts of many lengths; the oldest kernel makes room.
enum { MAX_KERNELS = 256 };

typedef struct {
    Product key;
    int threads;
    dnnl_primitive_t primitive;
    dnnl_memory_t a, b, c;
} Kernel;

// How B[k,n] is packed: the preferred layout and the reorder into it. With layout == NULL the product takes any.
typedef struct {
    Product key;
    int threads;
    dnnl_primitive_t primitive;
    dnnl_memory_t from, to;
    Layout layout;
} Packing;

static dnnl_engine_t cpu_engine(void) {
    static dnnl_engine_t engine;
    if (!engine) { check(dnnl_engine_create(&engine, dnnl_cpu, 0), "creating the CPU engine"); }
    return engine;
}

static dnnl_stream_t cpu_stream(void) {
    static dnnl_stream_t stream;
    if (!stream) { check(dnnl_stream_create(&stream, cpu_engine(), dnnl_stream_default_flags), "creating a stream"); }
    return stream;
}

// The description of a product whose B is laid out as given.
static dnnl_status_t describe_product(dnnl_primitive_desc_t* out, const Product* p, ConstLayout b) {
    dnnl_primitive_attr_t attributes;
    dnnl_post_ops_t operations;
    check(dnnl_primitive_attr_create(&attributes), "an attribute");
    check(dnnl_post_ops_create(&operations), "an attribute");
    if (p->accumulate) { check(append_sum(operations), "an attribute"); }
    check(dnnl_primitive_attr_set_post_ops(attributes, operations), "an attribute");
    Layout a = layout_strided(p->m, p->k, p->lda, p->transpose_a, factor_type(p->precision));
    Layout c = layout_strided(p->m, p->n, p->ldc, false, dnnl_f32);
    dnnl_status_t status = matmul_desc_create(out, a, b, c, attributes, cpu_engine());
    layout_free(a);
    layout_free(c);
    dnnl_post_ops_destroy(operations);
    dnnl_primitive_attr_destroy(attributes);
    return status;
}

// The library's preferred layout of B; asked for one m, so that it is the same for every m.
static Layout preferred_layout(const Product* p) {
    Product typical = {1024, p->n, p->k, p->k, p->n, p->n, false, false, true, false, p->precision};
    Layout any = layout_any(p->k, p->n, factor_type(p->precision));
    dnnl_primitive_desc_t description;
    check(describe_product(&description, &typical, any), "describing a matrix product");
    Layout layout = layout_clone(dnnl_primitive_desc_query_md(description, dnnl_query_weights_md, 0));
    dnnl_primitive_desc_destroy(description);
    layout_free(any);
    return layout;
}

static Packing packing_create(const Product* p, int threads) {
    Packing x = {*p, threads, NULL, NULL, NULL, preferred_layout(p)};
    Layout from = layout_strided(p->k, p->n, p->ldb, p->transpose_b, dnnl_f32);
    dnnl_primitive_desc_t description;
    check(dnnl_reorder_primitive_desc_create(&description, from, cpu_engine(), x.layout, cpu_engine(), NULL),
          "describing a reorder");
    check(dnnl_primitive_create(&x.primitive, description), "creating a reorder");
    dnnl_primitive_desc_destroy(description);
    check(dnnl_memory_create(&x.from, from, cpu_engine(), DNNL_MEMORY_NONE), "a memory object");
    check(dnnl_memory_create(&x.to, x.layout, cpu_engine(), DNNL_MEMORY_NONE), "a memory object");
    layout_free(from);
    return x;
}

static void packing_free(Packing* x) {
    dnnl_primitive_destroy(x->primitive);
    dnnl_memory_destroy(x->from);
    dnnl_memory_destroy(x->to);
    layout_free(x->layout);
}

static const Packing* packing_for(const Product* p) {
    static Packing packings[MAX_KERNELS];
    static size_t used, oldest;
    int threads = omp_get_max_threads();
    for (size_t i = 0; i < used; i++) {
        const Packing* x = &packings[i];
        const Product* q = &x->key;
        if (q->k == p->k && q->n == p->n && q->ldb == p->ldb && q->transpose_b == p->transpose_b &&
            q->precision == p->precision && x->threads == threads) {
            return x;
        }
    }
    size_t slot = used < MAX_KERNELS ? used++ : oldest++ % MAX_KERNELS;
    if (oldest) { packing_free(&packings[slot]); }
    packings[slot] = packing_create(p, threads);
    return &packings[slot];
}

static Kernel kernel_create(const Product* p, int threads) {
    Kernel x = {*p, threads, NULL, NULL, NULL, NULL};
    Layout b =
        p->packed ? preferred_layout(p) : layout_strided(p->k, p->n, p->ldb, p->transpose_b, factor_type(p->precision));
    dnnl_primitive_desc_t description;
    check(describe_product(&description, p, b), "describing a matrix product");
    check(dnnl_primitive_create(&x.primitive, description), "creating a matrix product");
    ConstLayout a = dnnl_primitive_desc_query_md(description, dnnl_query_src_md, 0);
    ConstLayout c = dnnl_primitive_desc_query_md(description, dnnl_query_dst_md, 0);
    check(dnnl_memory_create(&x.a, a, cpu_engine(), DNNL_MEMORY_NONE), "a memory object");
    check(dnnl_memory_create(&x.b, b, cpu_engine(), DNNL_MEMORY_NONE), "a memory object");
    check(dnnl_memory_create(&x.c, c, cpu_engine(), DNNL_MEMORY_NONE), "a memory object");
    dnnl_primitive_desc_destroy(description);
    layout_free(b);
    return x;
}

static void kernel_free(Kernel* x) {
    dnnl_primitive_destroy(x->primitive);
    dnnl_memory_destroy(x->a);
    dnnl_memory_destroy(x->b);
    dnnl_memory_destroy(x->c);
}

static bool same_product(const Product* p, const Product* q) {
    return p->m == q->m && p->n == q->n && p->k == q->k && p->lda == q->lda && p->ldc == q->ldc &&
           p->transpose_a == q->transpose_a && p->packed == q->packed && p->accumulate == q->accumulate &&
           p->precision == q->precision && (p->packed || (p->ldb == q->ldb && p->transpose_b == q->transpose_b));
}

static const Kernel* kernel_for(const Product* p) {
    static Kernel kernels[MAX_KERNELS];
    static size_t used, oldest;
    int threads = omp_get_max_threads();
    for (size_t i = 0; i < used; i++) {
        if (same_product(p, &kernels[i].key) && kernels[i].threads == threads) { return &kernels[i]; }
    }
    size_t slot = used < MAX_KERNELS ? used++ : oldest++ % MAX_KERNELS;
    if (oldest) { kernel_free(&kernels[slot]); }
    kernels[slot] = kernel_create(p, threads);
    return &kernels[slot];
}

static void set_handle(dnnl_memory_t memory, const void* data) {
    check(dnnl_memory_set_data_handle(memory, (void*)(uintptr_t)data), "setting a memory handle");
}

void product(float* c, const void* a, const void* b, const Product* p) {
    assert(!p->packed || (p->ldc == p->n && (p->transpose_a || p->lda == p->k)));
    const Kernel* x = kernel_for(p);
    set_handle(x->a, a);
    set_handle(x->b, b);
    set_handle(x->c, c);
    dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, x->a}, {DNNL_ARG_WEIGHTS, x->b}, {DNNL_ARG_DST, x->c}};
    check(dnnl_primitive_execute(x->primitive, cpu_stream(), 3, arguments), "a matrix product");
    check(dnnl_stream_wait(cpu_stream()), "a matrix product");
}

void product_pack(void* packed, const float* b, const Product* p) {
    const Packing* x = packing_for(p);
    assert(dnnl_memory_desc_get_size(x->layout) <= product_packed_bytes(p->k, p->n));
    set_handle(x->from, b);
    set_handle(x->to, packed);
    dnnl_exec_arg_t arguments[] = {{DNNL_ARG_FROM, x->from}, {DNNL_ARG_TO, x->to}};
    check(dnnl_primitive_execute(x->primitive, cpu_stream(), 2, arguments), "a reorder");
    check(dnnl_stream_wait(cpu_stream()), "a reorder");
}

// Blocked layouts round both sizes up to at most 64.
size_t product_packed_bytes(size_t k, size_t n) { return round_up(k, 64) * round_up(n, 64) * sizeof(float); }

bool product_supported(Precision precision) {
    Product p = {64, 64, 64, 64, 64, 64, false, false, false, false, precision};
    Layout b = layout_strided(p.k, p.n, p.ldb, false, factor_type(precision));
    dnnl_primitive_desc_t description;
    bool supported = describe_product(&description, &p, b) == dnnl_success;
    if (supported) { dnnl_primitive_desc_destroy(description); }
    layout_free(b);
    return supported;
}

void factor_copy(void* out, size_t ld_out, const float* inp, size_t ld_inp, size_t rows, size_t columns,
                 Precision precision) {
#pragma omp parallel for schedule(static) if (rows * columns >= PARALLEL_ELEMENTS)
    for (size_t r = 0; r < rows; r++) {
        const float* restrict from = inp + r * ld_inp;
        if (precision == PRECISION_BF16) {
            uint16_t* restrict to = (uint16_t*)out + r * ld_out;
            for (size_t i = 0; i < columns; i++) { to[i] = bf16_round(from[i]); }
        } else {
            memcpy((float*)out + r * ld_out, from, columns * sizeof(float));
        }
    }
}

// ----------------------------------------------------------------------------
// operators

// Rows of a block: large enough for the library's best rate, small enough to stay in cache between the
// conversion and the products. Below FEW_ROWS rows packing the weight costs more than it saves.
enum { BLOCK_ROWS = 1024, FEW_ROWS = 64 };

void matmul_forward(floatX* out, const floatX* inp, const floatX* weight, void* workspace, size_t N, size_t C,
                    size_t OC) {
    Precision precision = cpu_precision;
    char* block = (char*)workspace + product_packed_bytes(C, OC);
    Product p = {0, OC, C, C, C, OC, false, true, N >= FEW_ROWS, false, precision};
    const void* b = weight;
    if (p.packed) {
        product_pack(workspace, weight, &p);
        b = workspace;
    } else if (precision == PRECISION_BF16) {
        factor_copy(workspace, C, weight, C, OC, C, precision);
        b = workspace;
    }
    size_t step = precision == PRECISION_BF16 ? BLOCK_ROWS : N;
    for (size_t row = 0; row < N; row += step) {
        p.m = N - row < step ? N - row : step;
        const void* a = inp + row * C;
        if (precision == PRECISION_BF16) {
            factor_copy(block, C, inp + row * C, C, p.m, C, precision);
            a = block;
        }
        product(out + row * OC, a, b, &p);
    }
}

void matmul_backward(floatX* dinp, float* dweight, const floatX* dout, const floatX* inp, const floatX* weight,
                     void* workspace, size_t N, size_t C, size_t OC) {
    Precision precision = cpu_precision;
    size_t block_rows = N < BLOCK_ROWS ? N : BLOCK_ROWS, dout_ld = padded_stride(OC), inp_ld = padded_stride(C);
    char* dout_block = (char*)workspace + product_packed_bytes(OC, C);
    char* inp_block = dout_block + block_rows * dout_ld * sizeof(float);
    bool low = precision == PRECISION_BF16;
    // In bf16 dinp reads the same padded rows as dweight; in fp32 dout itself, and a packed weight pays.
    Product to_inp = {0, C, OC, low ? dout_ld : OC, C, C, false, false, !low && N >= FEW_ROWS, false, precision};
    Product to_weight = {OC, C, 0, dout_ld, low ? inp_ld : C, C, true, false, false, true, precision};
    const void* b = weight;
    if (dinp && to_inp.packed) {
        product_pack(workspace, weight, &to_inp);
        b = workspace;
    } else if (dinp && low) {
        factor_copy(workspace, C, weight, C, OC, C, precision);
        b = workspace;
    }
    for (size_t row = 0; row < N; row += block_rows) {
        size_t rows = N - row < block_rows ? N - row : block_rows;
        if (low || dweight) { factor_copy(dout_block, dout_ld, dout + row * OC, OC, rows, OC, precision); }
        if (dinp) {
            to_inp.m = rows;
            product(dinp + row * C, low ? (const void*)dout_block : dout + row * OC, b, &to_inp);
        }
        if (!dweight) { continue; }
        if (low) { factor_copy(inp_block, inp_ld, inp + row * C, C, rows, C, precision); }
        to_weight.k = rows;
        product(dweight, dout_block, low ? (const void*)inp_block : inp + row * C, &to_weight);
    }
}

size_t matmul_workspace(size_t N, size_t C, size_t OC) {
    size_t rows = N < BLOCK_ROWS ? N : BLOCK_ROWS;
    return product_packed_bytes(C, OC) + rows * (padded_stride(OC) + padded_stride(C)) * sizeof(float);
}

double backend_matmul_rate(void) {
    enum { M = 4096, N = 1024, K = 1024 };
    Product p = {M, N, K, K, N, N, false, false, true, false, cpu_precision};
    float* memory = (float*)device_malloc((M * K + M * N) * sizeof(float) + product_packed_bytes(K, N));
    float *c = memory + M * K, *b = c + M * N;
    double best = 1e30, start = wall_seconds();
    for (int run = 0; run < 4 || wall_seconds() - start < 0.2; run++) {
        double t = wall_seconds();
        product(c, memory, b, &p);
        t = wall_seconds() - t;
        if (t < best) { best = t; }
    }
    device_free(memory);
    return 2.0 * M * N * K / best;
}
