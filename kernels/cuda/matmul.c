/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrix products by cuBLASLt. Row-major arrays are its column-major ones transposed:
 *
 *     product                   as cuBLASLt sees it          m  n  k
 *     y[N,O]  = x w^T + bias    D = op_T(w) x  (+ bias)      O  N  I
 *     dx[N,I] = dy w            D = w dy                     I  N  O
 *     dw[O,I] = dy^T x          D = x op_T(dy)               I  O  N
 *
 * Sums are made in fp32, and for fp32 arrays of fp32 factors (no TF32); dw comes out in fp32.
 *
 * The algorithm of a product is chosen once, by matmul_plan: the first of the library's list, which
 * is in the order of the time it expects, that makes each element's sum in one block, without
 * split-K. A split sum is added either by atomics, in the order of arrival, or in the type of the
 * output, or in a workspace in an order that the library does not promise; and the number of parts
 * would follow the number of SMs. What was chosen is a line of a table, whose digest is in the
 * build name: two ranks whose libraries choose differently never train together.
 */
#include <cublasLt.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/digest.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/ops.h"

#define CANDIDATES_MAX 32
#define ALIGN_MAX      16U /* bytes: the widest load of a thread */

enum product { FORWARD, FORWARD_BIAS, DX, DW, PRODUCTS };

static const char *const product_names[PRODUCTS] = {"forward", "forward+bias", "dx", "dw"};

/* One line of the table: a product of one shape, ready to be called. */
struct planned {
    enum product product;
    struct kern_matmul_shape shape;
    cublasLtMatmulDesc_t desc; /* owned, as the layouts */
    cublasLtMatrixLayout_t a, b, d;
    uint32_t align_a, align_b, align_d; /* bytes that pointers must be aligned to */
    cublasLtMatmulAlgo_t algo;
    size_t workspace_bytes;
    uint32_t id, tile, stages, swizzle, custom;
    uint16_t inner, cluster;
};

struct kern_cuda_matmul {
    cublasLtHandle_t handle;
    void *workspace; /* of the compute stream */
    struct planned *planned;
    uint32_t count, capacity;
};

static int lt_error(const struct kern_cuda *cuda, cublasStatus_t status, const char *what,
                    struct bl_errmsg *msg)
{
    return bl_err(msg, BL_ELIBRARY, "device %d (%s): cuBLASLt: %s: %s", cuda->ordinal,
                  cuda->device_name, what, cublasLtGetStatusName(status));
}

/* ---- life ---- */

int kern_cuda_matmul_open(struct kern_cuda *cuda, struct bl_errmsg *msg)
{
    struct kern_cuda_matmul *m = calloc(1, sizeof *m);
    if (m == NULL) {
        return bl_err_code(msg, -ENOMEM, "matrix products");
    }
    cuda->matmul = m;
    cublasStatus_t status = cublasLtCreate(&m->handle);
    if (status != CUBLAS_STATUS_SUCCESS) {
        m->handle = NULL;
        return lt_error(cuda, status, "start", msg);
    }
    cudaError_t error = cudaMalloc(&m->workspace, KERN_CUDA_WORKSPACE);
    return error == cudaSuccess ? 0 : kern_cuda_error(cuda, error, "workspace of products", msg);
}

static void planned_close(struct planned *p)
{
    if (p->desc != NULL) {
        cublasLtMatmulDescDestroy(p->desc);
    }
    cublasLtMatrixLayout_t layouts[] = {p->a, p->b, p->d};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        if (layouts[i] != NULL) {
            cublasLtMatrixLayoutDestroy(layouts[i]);
        }
    }
}

void kern_cuda_matmul_close(struct kern_cuda *cuda)
{
    struct kern_cuda_matmul *m = cuda->matmul;
    if (m == NULL) {
        return;
    }
    for (uint32_t i = 0; i < m->count; i++) {
        planned_close(&m->planned[i]);
    }
    if (m->handle != NULL) {
        cublasLtDestroy(m->handle);
    }
    cudaFree(m->workspace);
    free(m->planned);
    free(m);
    cuda->matmul = NULL;
}

uint64_t kern_cuda_matmul_version(void)
{
    return cublasLtGetVersion();
}

/* ---- one product as cuBLASLt wants it ---- */

/* A row-major array [rows, columns] of elements of `bytes` each is its columns x rows. */
static cublasStatus_t make_layout(cublasLtMatrixLayout_t *ret, cudaDataType_t type, uint64_t rows,
                                  uint64_t columns, uint32_t *ret_align)
{
    uint64_t row_bytes = columns * (type == CUDA_R_16BF ? 2 : 4);
    uint32_t align = ALIGN_MAX;
    while (row_bytes % align != 0) {
        align /= 2;
    }
    *ret_align = align; /* that any row of the array has */
    return cublasLtMatrixLayoutCreate(ret, type, columns, rows, (int64_t)columns);
}

static cublasStatus_t make_layouts(struct planned *p, cudaDataType_t type)
{
    struct kern_matmul_shape s = p->shape;
    cublasStatus_t status;
    if (p->product == DX) {
        status = make_layout(&p->a, type, s.o, s.i, &p->align_a);
        status = status ? status : make_layout(&p->b, type, s.n, s.o, &p->align_b);
        return status ? status : make_layout(&p->d, type, s.n, s.i, &p->align_d);
    }
    if (p->product == DW) {
        status = make_layout(&p->a, type, s.n, s.i, &p->align_a);
        status = status ? status : make_layout(&p->b, type, s.n, s.o, &p->align_b);
        return status ? status : make_layout(&p->d, CUDA_R_32F, s.o, s.i, &p->align_d);
    }
    status = make_layout(&p->a, type, s.o, s.i, &p->align_a);
    status = status ? status : make_layout(&p->b, type, s.n, s.i, &p->align_b);
    return status ? status : make_layout(&p->d, type, s.n, s.o, &p->align_d);
}

/* `address`: any address of the device: the library may choose otherwise where it finds none. */
static cublasStatus_t make_desc(struct planned *p, enum kern_type type, const void *address)
{
    /* Pedantic: fp32 factors stay fp32, whatever the library would like. */
    cublasComputeType_t compute =
        type == KERN_BF16 ? CUBLAS_COMPUTE_32F : CUBLAS_COMPUTE_32F_PEDANTIC;
    cublasOperation_t transposed = CUBLAS_OP_T;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    cublasStatus_t status = cublasLtMatmulDescCreate(&p->desc, compute, CUDA_R_32F);
    if (status == CUBLAS_STATUS_SUCCESS && p->product != DX) {
        cublasLtMatmulDescAttributes_t which =
            p->product == DW ? CUBLASLT_MATMUL_DESC_TRANSB : CUBLASLT_MATMUL_DESC_TRANSA;
        status = cublasLtMatmulDescSetAttribute(p->desc, which, &transposed, sizeof transposed);
    }
    if (status == CUBLAS_STATUS_SUCCESS && p->product == FORWARD_BIAS) {
        status = cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                                sizeof epilogue);
    }
    if (status == CUBLAS_STATUS_SUCCESS && p->product == FORWARD_BIAS) {
        status = cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                &address, sizeof address);
    }
    return status;
}

/* ---- choosing ---- */

static cublasStatus_t make_preference(cublasLtMatmulPreference_t *ret, const struct planned *p)
{
    const uint64_t workspace = KERN_CUDA_WORKSPACE;
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE;
    const struct {
        cublasLtMatmulPreferenceAttributes_t which;
        const void *value;
        size_t bytes;
    } attributes[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &p->align_a, sizeof p->align_a},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &p->align_b, sizeof p->align_b},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &p->align_d, sizeof p->align_d},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &p->align_d, sizeof p->align_d},
    };
    cublasStatus_t status = cublasLtMatmulPreferenceCreate(ret);
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes && !status; i++) {
        status = cublasLtMatmulPreferenceSetAttribute(*ret, attributes[i].which,
                                                      attributes[i].value, attributes[i].bytes);
    }
    return status;
}

/* 0 where the library does not know the attribute. */
static uint32_t config_u32(const cublasLtMatmulAlgo_t *algo,
                           cublasLtMatmulAlgoConfigAttributes_t which, size_t bytes)
{
    uint32_t value = 0;
    size_t written = 0;
    if (cublasLtMatmulAlgoConfigGetAttribute(algo, which, &value, bytes, &written) !=
        CUBLAS_STATUS_SUCCESS) {
        return 0;
    }
    return value;
}

/* Whether every element's sum is made in one place: see above. */
static int is_whole(const cublasLtMatmulAlgo_t *algo)
{
    return config_u32(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4) <= 1 &&
           config_u32(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4) ==
               CUBLASLT_REDUCTION_SCHEME_NONE;
}

static void take_algo(struct planned *p, const cublasLtMatmulHeuristicResult_t *result)
{
    const cublasLtMatmulAlgo_t *algo = &result->algo;
    p->algo = *algo;
    p->workspace_bytes = result->workspaceSize;
    p->id = config_u32(algo, CUBLASLT_ALGO_CONFIG_ID, 4);
    p->tile = config_u32(algo, CUBLASLT_ALGO_CONFIG_TILE_ID, 4);
    p->stages = config_u32(algo, CUBLASLT_ALGO_CONFIG_STAGES_ID, 4);
    p->swizzle = config_u32(algo, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4);
    p->custom = config_u32(algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4);
    p->inner = (uint16_t)config_u32(algo, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, 2);
    p->cluster = (uint16_t)config_u32(algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2);
}

/* 1: taken; 0: none of the list will do; negative: no list. */
static int choose(struct kern_cuda *cuda, struct planned *p, struct bl_errmsg *msg)
{
    cublasLtMatmulHeuristicResult_t list[CANDIDATES_MAX];
    cublasLtMatmulPreference_t preference = NULL;
    int count = 0, chosen = 0;
    cublasStatus_t status = make_preference(&preference, p);
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatmulAlgoGetHeuristic(cuda->matmul->handle, p->desc, p->a, p->b, p->d,
                                                p->d, preference, CANDIDATES_MAX, list, &count);
    }
    if (preference != NULL) {
        cublasLtMatmulPreferenceDestroy(preference);
    }
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) {
        return 0;
    }
    if (status != CUBLAS_STATUS_SUCCESS) {
        return lt_error(cuda, status, "algorithms", msg);
    }
    for (int i = 0; i < count && !chosen; i++) {
        if (list[i].state == CUBLAS_STATUS_SUCCESS && is_whole(&list[i].algo) &&
            list[i].workspaceSize <= KERN_CUDA_WORKSPACE) {
            take_algo(p, &list[i]);
            chosen = 1;
        }
    }
    return chosen;
}

static struct planned *find(struct kern_cuda_matmul *m, enum product product,
                            struct kern_matmul_shape s)
{
    for (uint32_t i = 0; i < m->count; i++) {
        struct planned *p = &m->planned[i];
        if (p->product == product && p->shape.n == s.n && p->shape.i == s.i && p->shape.o == s.o) {
            return p;
        }
    }
    return NULL;
}

static int make_room(struct kern_cuda_matmul *m)
{
    if (m->count < m->capacity) {
        return 0;
    }
    uint32_t capacity = m->capacity == 0 ? 64 : 2 * m->capacity;
    struct planned *planned = realloc(m->planned, capacity * sizeof *planned);
    if (planned == NULL) {
        return -ENOMEM;
    }
    m->planned = planned;
    m->capacity = capacity;
    return 0;
}

static int plan(struct kern_cuda *cuda, enum product product, struct kern_matmul_shape s,
                struct bl_errmsg *msg)
{
    struct kern_cuda_matmul *m = cuda->matmul;
    if (s.n == 0 || s.i == 0 || s.o == 0 || find(m, product, s) != NULL) {
        return 0;
    }
    if (make_room(m) != 0) {
        return bl_err_code(msg, -ENOMEM, "table of products");
    }
    struct planned *p = &m->planned[m->count];
    memset(p, 0, sizeof *p);
    p->product = product;
    p->shape = s;
    cublasStatus_t status =
        make_layouts(p, cuda->base.type == KERN_BF16 ? CUDA_R_16BF : CUDA_R_32F);
    status = status ? status : make_desc(p, (enum kern_type)cuda->base.type, m->workspace);
    int rc = status ? lt_error(cuda, status, "a product", msg) : choose(cuda, p, msg);
    if (rc == 1) {
        m->count++;
        return 0;
    }
    planned_close(p);
    return rc < 0 ? rc
                  : bl_err(msg, BL_ELIMIT,
                           "device %d (%s): cuBLASLt %zu has no algorithm without split sums for "
                           "%s of n %u, i %u, o %u",
                           cuda->ordinal, cuda->device_name, cublasLtGetVersion(),
                           product_names[product], s.n, s.i, s.o);
}

int kern_cuda_matmul_plan(struct kern *k, const struct kern_matmul_shape *shapes, uint32_t count,
                          struct bl_errmsg *msg)
{
    int rc = 0;
    for (uint32_t i = 0; i < count && rc == 0; i++) {
        for (int product = 0; product < PRODUCTS && rc == 0; product++) {
            rc = plan(kern_cuda_of(k), (enum product)product, shapes[i], msg);
            if (rc == BL_ELIMIT && product == FORWARD_BIAS) {
                rc = 0; /* the bias is added behind the product then */
            }
        }
    }
    return rc;
}

uint32_t kern_cuda_matmul_mark(const struct kern_cuda *cuda)
{
    return cuda->matmul->count;
}

void kern_cuda_matmul_forget(struct kern_cuda *cuda, uint32_t mark)
{
    while (cuda->matmul->count > mark) {
        planned_close(&cuda->matmul->planned[--cuda->matmul->count]);
    }
}

/* ---- the table as text ---- */

static void print_line(const struct planned *p, char *text, size_t bytes_max)
{
    snprintf(text, bytes_max,
             "%s n %u i %u o %u: algo %u tile %u stages %u swizzle %u custom %u inner %u cluster "
             "%u workspace %zu",
             product_names[p->product], p->shape.n, p->shape.i, p->shape.o, p->id, p->tile,
             p->stages, p->swizzle, p->custom, p->inner, p->cluster, p->workspace_bytes);
}

int kern_cuda_matmul_line(struct kern_cuda *cuda, uint32_t index, char *text, size_t bytes_max)
{
    if (index >= cuda->matmul->count) {
        return -ENOENT;
    }
    print_line(&cuda->matmul->planned[index], text, bytes_max);
    return 0;
}

/* A sum, so that it does not matter in which order the products were planned. */
uint64_t kern_cuda_matmul_digest(struct kern_cuda *cuda, const struct kern_matmul_shape *shapes,
                                 uint32_t count)
{
    char line[256];
    uint64_t digest = 0;
    for (uint32_t i = 0; i < count; i++) {
        for (int product = 0; product < PRODUCTS; product++) {
            const struct planned *p = find(cuda->matmul, (enum product)product, shapes[i]);
            if (p != NULL) {
                print_line(p, line, sizeof line);
                digest += bl_mix64(bl_xxh3(line, strlen(line)));
            }
        }
    }
    return digest;
}

/* ---- calls ---- */

static void refuse(struct kern *k, enum product product, struct kern_matmul_shape s,
                   const char *why)
{
    char text[64];
    snprintf(text, sizeof text, "%s %u,%u,%u: %s", product_names[product], s.n, s.i, s.o, why);
    kern_cuda_note(k, cudaErrorInvalidValue, text);
}

static int is_aligned(const void *p, uint32_t align)
{
    return (uintptr_t)p % align == 0;
}

static void multiply(struct kern *k, enum product product, struct kern_matmul_shape s,
                     const void *a, const void *b, void *d, const void *bias, int add)
{
    struct kern_cuda *cuda = kern_cuda_of(k);
    struct kern_cuda_matmul *m = cuda->matmul;
    const float one = 1.0f, beta = add ? 1.0f : 0.0f;
    struct planned *p = find(m, product, s);
    if (p == NULL) {
        refuse(k, product, s, "not planned");
        return;
    }
    /* The bias is read as wide as a row of d is written; NULL is aligned. */
    if (!is_aligned(a, p->align_a) || !is_aligned(b, p->align_b) || !is_aligned(d, p->align_d) ||
        !is_aligned(bias, p->align_d)) {
        refuse(k, product, s, "not aligned");
        return;
    }
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (bias != NULL) {
        status = cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias,
                                                sizeof bias);
    }
    cuda->newest = product_names[product];
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatmul(m->handle, p->desc, &one, a, p->a, b, p->b, &beta, d, p->d, d, p->d,
                                &p->algo, m->workspace, p->workspace_bytes, cuda->compute);
    }
    if (status != CUBLAS_STATUS_SUCCESS) {
        char text[64];
        cudaError_t error = cudaGetLastError();
        snprintf(text, sizeof text, "%s: %.48s", product_names[product],
                 cublasLtGetStatusName(status));
        kern_cuda_note(k, error != cudaSuccess ? error : cudaErrorUnknown, text);
    }
}

void kern_cuda_matmul_forward(struct kern *k, kern_real *y, const kern_real *x, const kern_real *w,
                              const kern_real *bias, struct kern_matmul_shape shape)
{
    if (shape.n == 0 || shape.o == 0) {
        return;
    }
    int has_fused = bias != NULL && find(kern_cuda_of(k)->matmul, FORWARD_BIAS, shape) != NULL;
    multiply(k, has_fused ? FORWARD_BIAS : FORWARD, shape, w, x, y, has_fused ? bias : NULL, 0);
    if (bias != NULL && !has_fused) {
        kern_cuda_bias_forward(k, y, bias, shape.n, shape.o);
    }
}

void kern_cuda_matmul_dx(struct kern *k, kern_real *dx, const kern_real *dy, const kern_real *w,
                         struct kern_matmul_shape shape, int add)
{
    if (shape.n != 0 && shape.i != 0) {
        multiply(k, DX, shape, w, dy, dx, NULL, add);
    }
}

void kern_cuda_matmul_dw(struct kern *k, float *dw, const kern_real *dy, const kern_real *x,
                         struct kern_matmul_shape shape, int add)
{
    if (shape.n != 0) {
        multiply(k, DW, shape, x, dy, dw, NULL, add);
    } else if (!add) {
        kern_cuda_zero(k, dw, (uint64_t)shape.i * shape.o * sizeof(float));
    }
}
