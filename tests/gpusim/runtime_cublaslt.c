/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuBLASLt's stand-in. Each element's sum is made in fp32 over k = 0, 1, 2, ..., then scaled, added
 * to beta C, then the bias, and rounded once.
 *
 * The list of algorithms begins with some that nobody who wants one order of sums may take: they
 * cut k into parts. One of them even where the preference forbids it, one that is no success, one
 * whose workspace is too large. A product by a cut algorithm adds its parts in an order that
 * changes from call to call, as atomics would.
 */
#include <cublasLt.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpusim/gpusim_device.h"

#define BLOCK 64u /* elements of a column whose sums are made beside one another */

struct gpusim_lt {
    uint32_t is_open;
};

struct gpusim_lt_desc {
    cublasOperation_t trans_a, trans_b;
    cublasLtEpilogue_t epilogue;
    const void *bias;
};

struct gpusim_lt_layout {
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld;
};

struct gpusim_lt_preference {
    uint64_t workspace_bytes;
    uint32_t reductions;
    uint32_t align[4]; /* of A, B, C, D */
};

/* What an algorithm's 64 bytes mean. */
struct algo {
    uint32_t id, tile, split, reduction, stages, align[4], workspace_bytes;
};

_Static_assert(sizeof(struct algo) <= sizeof(cublasLtMatmulAlgo_t), "fits");

size_t cublasLtGetVersion(void)
{
    return 130000;
}

const char *cublasLtGetStatusName(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
        return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
        return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH:
        return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_EXECUTION_FAILED:
        return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR:
        return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
        return "CUBLAS_STATUS_?";
    }
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    return cublasLtGetStatusName(status);
}

/* ---- objects ---- */

#define GPUSIM_LT_OBJECT(type, create, destroy)                                                    \
    static cublasStatus_t create(type *ret)                                                        \
    {                                                                                              \
        *ret = calloc(1, sizeof **ret);                                                            \
        return *ret ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;                          \
    }                                                                                              \
    cublasStatus_t destroy(type object)                                                            \
    {                                                                                              \
        free(object);                                                                              \
        return CUBLAS_STATUS_SUCCESS;                                                              \
    }

GPUSIM_LT_OBJECT(cublasLtHandle_t, handle_new, cublasLtDestroy)
GPUSIM_LT_OBJECT(cublasLtMatmulDesc_t, desc_new, cublasLtMatmulDescDestroy)
GPUSIM_LT_OBJECT(cublasLtMatrixLayout_t, layout_new, cublasLtMatrixLayoutDestroy)
GPUSIM_LT_OBJECT(cublasLtMatmulPreference_t, preference_new, cublasLtMatmulPreferenceDestroy)

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    return gpusim_enter() == cudaSuccess ? handle_new(handle) : CUBLAS_STATUS_NOT_INITIALIZED;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    if ((compute != CUBLAS_COMPUTE_32F && compute != CUBLAS_COMPUTE_32F_PEDANTIC) ||
        scale != CUDA_R_32F) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    cublasStatus_t status = desc_new(desc);
    if (status == CUBLAS_STATUS_SUCCESS) {
        (*desc)->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    }
    return status;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes)
{
    void *to = NULL;
    size_t size = 4;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        to = &desc->trans_a;
        break;
    case CUBLASLT_MATMUL_DESC_TRANSB:
        to = &desc->trans_b;
        break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        to = &desc->epilogue;
        break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        to = &desc->bias;
        size = sizeof desc->bias;
        break;
    default:
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (bytes != size) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    memcpy(to, value, size);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld)
{
    if ((type != CUDA_R_32F && type != CUDA_R_16BF) || rows == 0 || cols == 0 ||
        ld < (int64_t)rows) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    cublasStatus_t status = layout_new(layout);
    if (status == CUBLAS_STATUS_SUCCESS) {
        **layout = (struct gpusim_lt_layout){.type = type, .rows = rows, .cols = cols, .ld = ld};
    }
    return status;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
    cublasStatus_t status = preference_new(preference);
    if (status == CUBLAS_STATUS_SUCCESS) {
        **preference = (struct gpusim_lt_preference){.reductions = CUBLASLT_REDUCTION_SCHEME_MASK,
                                                     .align = {256, 256, 256, 256}};
    }
    return status;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t bytes)
{
    if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) {
        if (bytes != sizeof preference->workspace_bytes) {
            return CUBLAS_STATUS_INVALID_VALUE;
        }
        memcpy(&preference->workspace_bytes, value, bytes);
        return CUBLAS_STATUS_SUCCESS;
    }
    if (bytes != sizeof(uint32_t)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_SEARCH_MODE:
        return CUBLAS_STATUS_SUCCESS;
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        memcpy(&preference->reductions, value, bytes);
        return CUBLAS_STATUS_SUCCESS;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        memcpy(&preference->align[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value,
               bytes);
        return CUBLAS_STATUS_SUCCESS;
    default:
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

/* ---- algorithms ---- */

static struct algo algo_of(const cublasLtMatmulAlgo_t *opaque)
{
    struct algo algo;
    memcpy(&algo, opaque, sizeof algo);
    return algo;
}

static int shapes_fit(const struct gpusim_lt_desc *desc, const struct gpusim_lt_layout *a,
                      const struct gpusim_lt_layout *b, const struct gpusim_lt_layout *d)
{
    uint64_t k = desc->trans_a ? a->rows : a->cols;
    return (desc->trans_a ? a->cols : a->rows) == d->rows &&
           (desc->trans_b ? b->rows : b->cols) == d->cols &&
           (desc->trans_b ? b->cols : b->rows) == k && a->type == b->type &&
           (d->type == a->type || d->type == CUDA_R_32F);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int count_max,
                                              cublasLtMatmulHeuristicResult_t *results, int *count)
{
    static const struct {
        struct algo algo;
        cublasStatus_t state;
        int ignores_preference;
    } known[] = {
        {{.id = 66, .tile = 20, .split = 4, .reduction = 2, .workspace_bytes = 4096}, 0, 0},
        {{.id = 66, .tile = 20, .split = 2, .reduction = 1}, 0, 1},
        {{.id = 31, .tile = 18, .split = 1}, CUBLAS_STATUS_NOT_SUPPORTED, 0},
        {{.id = 31, .tile = 18, .split = 3, .reduction = 0}, 0, 0},
        {{.id = 21, .tile = 15, .split = 1, .stages = 9, .workspace_bytes = 1u << 30}, 0, 1},
        {{.id = 21, .tile = 15, .split = 1, .stages = 8}, 0, 0},
        {{.id = 21, .tile = 15, .split = 1, .stages = 7, .workspace_bytes = 1024}, 0, 0},
        {{.id = 10, .tile = 15, .split = 1}, 0, 0},
    };
    (void)handle;
    (void)c;
    *count = 0;
    int is_lost = desc->epilogue == CUBLASLT_EPILOGUE_BIAS && desc->bias == NULL;
    if (is_lost || !shapes_fit(desc, a, b, d)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    for (size_t i = 0; i < sizeof known / sizeof known[0] && *count < count_max; i++) {
        struct algo algo = known[i].algo;
        if (!known[i].ignores_preference && ((algo.reduction & ~preference->reductions) != 0 ||
                                             algo.workspace_bytes > preference->workspace_bytes)) {
            continue;
        }
        for (int operand = 0; operand < 4; operand++) {
            uint32_t align = preference->align[operand];
            algo.align[operand] = align > 16 ? 16 : align;
        }
        cublasLtMatmulHeuristicResult_t *to = &results[(*count)++];
        memset(to, 0, sizeof *to);
        memcpy(&to->algo, &algo, sizeof algo);
        to->workspaceSize = algo.workspace_bytes;
        to->state = known[i].state;
        to->wavesCount = 1;
    }
    return *count > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *opaque,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    void *value, size_t bytes, size_t *written)
{
    struct algo algo = algo_of(opaque);
    uint32_t got = 0;
    size_t size = attribute == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID ||
                          attribute == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID
                      ? 2
                      : 4;
    switch (attribute) {
    case CUBLASLT_ALGO_CONFIG_ID:
        got = algo.id;
        break;
    case CUBLASLT_ALGO_CONFIG_TILE_ID:
        got = algo.tile;
        break;
    case CUBLASLT_ALGO_CONFIG_SPLITK_NUM:
        got = algo.split;
        break;
    case CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME:
        got = algo.reduction;
        break;
    case CUBLASLT_ALGO_CONFIG_STAGES_ID:
        got = algo.stages;
        break;
    default:
        break;
    }
    if (bytes < size) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    memcpy(value, &got, size);
    if (written) {
        *written = size;
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- products ---- */

struct product {
    struct gpusim_lt_desc desc;
    struct gpusim_lt_layout a_layout, b_layout, c_layout, d_layout;
    const void *a, *b, *c;
    void *d;
    float alpha, beta;
    uint32_t split; /* parts of k */
};

static float load(const struct gpusim_lt_layout *l, const void *p, uint64_t i)
{
    if (l->type == CUDA_R_32F) {
        return ((const float *)p)[i];
    }
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void store(const struct gpusim_lt_layout *l, void *p, uint64_t i, float x)
{
    if (l->type == CUDA_R_32F) {
        ((float *)p)[i] = x;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    int is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    ((uint16_t *)p)[i] = is_nan ? 0x7fff : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* to[outer, inner] in fp32 of an operand whose element (inner, outer) lies at inner + ld outer, or,
 * transposed, at outer + ld inner. */
static float *widen(const struct gpusim_lt_layout *l, const void *p, uint64_t inner, uint64_t outer,
                    int is_transposed)
{
    float *to = malloc(inner * outer * sizeof *to);
    uint64_t ld = (uint64_t)l->ld;
    if (!to) {
        abort();
    }
    for (uint64_t o = 0; o < outer; o++) {
        for (uint64_t i = 0; i < inner; i++) {
            to[o * inner + i] = load(l, p, is_transposed ? o + i * ld : i + o * ld);
        }
    }
    return to;
}

/* sums[0..count) of a column, rows from `first`, over [from, to) of k in ascending order. */
static void add_column(float sums[BLOCK], const float *a, const float *b, uint64_t m,
                       uint64_t first, uint64_t count, uint64_t from, uint64_t to)
{
    for (uint64_t k = from; k < to; k++) {
        const float *row = a + k * m + first;
        float factor = b[k];
        if (count == BLOCK) {
            for (uint64_t i = 0; i < BLOCK; i++) {
                sums[i] += row[i] * factor;
            }
            continue;
        }
        for (uint64_t i = 0; i < count; i++) {
            sums[i] += row[i] * factor;
        }
    }
}

static void finish(const struct product *p, const float *sums, uint64_t column, uint64_t first,
                   uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        uint64_t row = first + i, at = row + column * (uint64_t)p->d_layout.ld;
        float x = p->alpha * sums[i];
        if (p->beta != 0) {
            x += p->beta * load(&p->c_layout, p->c, row + column * (uint64_t)p->c_layout.ld);
        }
        if (p->desc.epilogue == CUBLASLT_EPILOGUE_BIAS) {
            x += load(&p->d_layout, p->desc.bias, row);
        }
        store(&p->d_layout, p->d, at, x);
    }
}

static void product_run(void *arg)
{
    static atomic_uint arrivals;
    const struct product *p = arg;
    uint64_t m = p->d_layout.rows, n = p->d_layout.cols;
    uint64_t k = p->desc.trans_a ? p->a_layout.rows : p->a_layout.cols;
    float *a = widen(&p->a_layout, p->a, m, k, p->desc.trans_a != CUBLAS_OP_N);
    float *b = widen(&p->b_layout, p->b, k, n, p->desc.trans_b != CUBLAS_OP_N);
    uint32_t comes_first = p->split > 1 ? atomic_fetch_add(&arrivals, 1) % p->split : 0;
    for (uint64_t column = 0; column < n; column++) {
        for (uint64_t first = 0; first < m; first += BLOCK) {
            uint64_t count = m - first < BLOCK ? m - first : BLOCK;
            float sums[BLOCK] = {0};
            for (uint32_t i = 0; i < p->split; i++) {
                uint32_t part = (comes_first + i) % p->split;
                add_column(sums, a, b + column * k, m, first, count, k * part / p->split,
                           k * (part + 1) / p->split);
            }
            finish(p, sums, column, first, count);
        }
    }
    free(a);
    free(b);
}

static int is_aligned(const void *p, uint32_t align)
{
    return align == 0 || (uintptr_t)p % align == 0;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *opaque,
                              void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
    struct algo algo = algo_of(opaque);
    if (!handle || !shapes_fit(desc, a_layout, b_layout, d_layout) ||
        !is_aligned(a, algo.align[0]) || !is_aligned(b, algo.align[1]) ||
        !is_aligned(c, algo.align[2]) || !is_aligned(d, algo.align[3]) ||
        (desc->epilogue == CUBLASLT_EPILOGUE_BIAS && !desc->bias) ||
        algo.workspace_bytes > workspace_bytes || (algo.workspace_bytes > 0 && !workspace)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    struct product *p = malloc(sizeof *p);
    if (!p) {
        return CUBLAS_STATUS_ALLOC_FAILED;
    }
    *p = (struct product){.desc = *desc,
                          .a_layout = *a_layout,
                          .b_layout = *b_layout,
                          .c_layout = *c_layout,
                          .d_layout = *d_layout,
                          .a = a,
                          .b = b,
                          .c = c,
                          .d = d,
                          .split = algo.split};
    memcpy(&p->alpha, alpha, sizeof p->alpha);
    memcpy(&p->beta, beta, sizeof p->beta);
    return gpusim_stream_submit(stream, product_run, free, p) == cudaSuccess
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_EXECUTION_FAILED;
}
