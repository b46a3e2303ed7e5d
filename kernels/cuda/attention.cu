/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Causal attention with grouped queries: the functions of the table, and the path for every
 * head size up to 256 in fp32 and bf16. bf16 with the head sizes of attention_flash.cu goes there.
 *
 * A block has TILE rows (queries; keys in the pass for dK and dV) and eight threads a row, all of
 * one warp. Tiles lie in shared memory as fp32 rows of DP + 4 floats, D up to DP, zeros behind:
 *
 *     scores     thread j of a row has columns j, j + 8, ...: dot products in four lanes over d
 *     weights    one row of TILE floats each, passed on inside the warp
 *     product    thread j has channels 4j + 32i ..: adds weight * tile row by row, in order
 *
 * Rows of DP + 4 floats put eight neighbouring rows into different banks.
 */
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/ops.h"

#define LANES        8U /* threads of a row */
#define HEAD_DIM_MAX 256U

/* rows [first, first + TILE) of one head into fp32, zeros behind `limit` and behind D. `stride`:
 * elements from a row to the next. */
template <typename T, int DP, int TILE>
static __device__ __forceinline__ void tile_load(float *tile, const T *x, uint32_t first,
                                                 uint32_t limit, size_t stride, uint32_t d)
{
    for (uint32_t i = threadIdx.x; i < TILE * DP; i += TILE * LANES) {
        uint32_t row = i / DP, column = i % DP;
        int there = column < d && first + row < limit;
        tile[row * (DP + 4) + column] =
            there ? kern_wide(x[(first + row) * stride + column]) : 0.0f;
    }
}

/* s[j] = row . (row lane + 8 j of tile). */
template <int DP, int TILE>
static __device__ __forceinline__ void row_scores(float s[TILE / LANES], const float *row,
                                                  const float *tile, uint32_t lane, uint32_t d)
{
    float4 sum[TILE / LANES];
#pragma unroll
    for (int j = 0; j < (int)(TILE / LANES); j++) {
        sum[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    for (uint32_t i = 0; i < d; i += 4) {
        float4 x = *(const float4 *)(row + i);
#pragma unroll
        for (int j = 0; j < (int)(TILE / LANES); j++) {
            float4 y = *(const float4 *)(tile + (lane + LANES * j) * (DP + 4) + i);
            sum[j].x = fmaf(x.x, y.x, sum[j].x);
            sum[j].y = fmaf(x.y, y.y, sum[j].y);
            sum[j].z = fmaf(x.z, y.z, sum[j].z);
            sum[j].w = fmaf(x.w, y.w, sum[j].w);
        }
    }
#pragma unroll
    for (int j = 0; j < (int)(TILE / LANES); j++) {
        s[j] = (sum[j].x + sum[j].y) + (sum[j].z + sum[j].w);
    }
}

/* sum += weights[0..count) of the rows of tile, in order. */
template <int DP>
static __device__ __forceinline__ void row_product(float4 sum[DP / 32], const float *weights,
                                                   const float *tile, uint32_t lane, int count)
{
    for (int c = 0; c < count; c++) {
        float w = weights[c];
#pragma unroll
        for (int i = 0; i < DP / 32; i++) {
            float4 y = *(const float4 *)(tile + c * (DP + 4) + 4 * lane + 32 * i);
            sum[i].x = fmaf(w, y.x, sum[i].x);
            sum[i].y = fmaf(w, y.y, sum[i].y);
            sum[i].z = fmaf(w, y.z, sum[i].z);
            sum[i].w = fmaf(w, y.w, sum[i].w);
        }
    }
}

template <int DP> static __device__ __forceinline__ void row_clear(float4 sum[DP / 32])
{
#pragma unroll
    for (int i = 0; i < DP / 32; i++) {
        sum[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

template <int DP>
static __device__ __forceinline__ void row_scale(float4 sum[DP / 32], float factor)
{
#pragma unroll
    for (int i = 0; i < DP / 32; i++) {
        sum[i].x *= factor;
        sum[i].y *= factor;
        sum[i].z *= factor;
        sum[i].w *= factor;
    }
}

template <typename T, int DP>
static __device__ __forceinline__ void row_store(T *out, const float4 sum[DP / 32], uint32_t lane,
                                                 uint32_t d)
{
#pragma unroll
    for (int i = 0; i < DP / 32; i++) {
        const float part[4] = {sum[i].x, sum[i].y, sum[i].z, sum[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t column = 4 * lane + 32 * i + j;
            if (column < d) {
                out[column] = kern_narrow<T>(part[j]);
            }
        }
    }
}

/* Over the eight threads of a row, the same bits in each. */
static __device__ __forceinline__ float row_max(float x)
{
    for (int step = 4; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(KERN_FULL, x, step));
    }
    return x;
}

static __device__ __forceinline__ float row_sum(float x)
{
    for (int step = 4; step > 0; step /= 2) {
        x += __shfl_xor_sync(KERN_FULL, x, step);
    }
    return x;
}

/* ---- forward ---- */

template <typename T, int DP, int TILE>
static __global__ void __launch_bounds__(TILE *LANES, 2)
    attention_forward_kernel(T *out, float *stats, const T *q, const T *kk, const T *v,
                             struct attention_dims a)
{
    KERN_SHARED_DYNAMIC(memory);
    constexpr int SIZE = TILE * (DP + 4);
    float *qs = (float *)memory, *ks = qs + SIZE, *vs = ks + SIZE, *ps = vs + SIZE;
    struct attention_place at =
        attention_place_of(blockIdx.x, a.batch, a.heads, attention_tiles(a.q_len, TILE), TILE, 1);
    uint32_t row = threadIdx.x / LANES, lane = threadIdx.x % LANES, query = at.first + row;
    uint32_t kv_head = at.head / a.group, keys = attention_keys_seen(a, at.first + TILE);
    size_t q_row = (size_t)a.heads * a.head_dim, k_row = (size_t)a.kv_heads * a.head_dim;
    size_t q_at = attention_at(at.batch, a.q_len, 0, a.heads, at.head, a.head_dim);
    size_t k_at = attention_at(at.batch, a.kv_len, 0, a.kv_heads, kv_head, a.head_dim);
    float *mine = ps + row * (TILE + 1), c = a.scale * ATTENTION_LOG2E;
    float top = -INFINITY, sum = 0.0f, s[TILE / LANES];
    float4 o[DP / 32];
    row_clear<DP>(o);
    tile_load<T, DP, TILE>(qs, q + q_at, at.first, a.q_len, q_row, a.head_dim);
    for (uint32_t first = 0; first < keys; first += TILE) {
        __syncthreads(); /* the tiles before are read */
        tile_load<T, DP, TILE>(ks, kk + k_at, first, a.kv_len, k_row, a.head_dim);
        tile_load<T, DP, TILE>(vs, v + k_at, first, a.kv_len, k_row, a.head_dim);
        __syncthreads();
        row_scores<DP, TILE>(s, qs + row * (DP + 4), ks, lane, a.head_dim);
        float before = top;
#pragma unroll
        for (int j = 0; j < (int)(TILE / LANES); j++) {
            s[j] = first + lane + LANES * j <= query + a.before ? s[j] : -INFINITY;
            top = fmaxf(top, s[j]);
        }
        top = row_max(top); /* finite: each query sees key 0, of the first tile */
        float shrink = exp2f((before - top) * c);
        sum *= shrink;
        row_scale<DP>(o, shrink);
#pragma unroll
        for (int j = 0; j < (int)(TILE / LANES); j++) {
            float p = exp2f((s[j] - top) * c);
            sum += p;
            mine[lane + LANES * j] = p;
        }
        __syncwarp(); /* a row's threads are of one warp */
        row_product<DP>(o, mine, vs, lane, TILE);
    }
    float inverse = 1.0f / row_sum(sum);
    if (query < a.q_len) {
        row_scale<DP>(o, inverse);
        row_store<T, DP>(out + q_at + query * q_row, o, lane, a.head_dim);
        if (lane == 0) {
            float *to = stats + (((size_t)at.batch * a.heads + at.head) * a.q_len + query) * 2;
            to[0] = top * a.scale;
            to[1] = inverse;
        }
    }
}

/* ---- backward ---- */

/* Two neighbours; `whole`: at once, from an address of that size. */
static __device__ __forceinline__ float2 pair_load(const float *x, int whole)
{
    return whole ? *(const float2 *)x : make_float2(x[0], x[1]);
}

static __device__ __forceinline__ float2 pair_load(const kern_bf16 *x, int whole)
{
    if (whole) {
        uint32_t two = *(const uint32_t *)x;
        return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
    }
    return make_float2(kern_wide(x[0]), kern_wide(x[1]));
}

/* A warp for each row of scratch: lane i adds channels 2i, 2i + 1, 2i + 64, ..., then the lanes. */
template <typename T>
static __global__ void __launch_bounds__(256)
    attention_rows_kernel(struct attention_row *rows, const T *dout, const T *out,
                          const float *stats, int whole, struct attention_dims a)
{
    uint64_t index = (uint64_t)blockIdx.x * (blockDim.x / KERN_WARP) + threadIdx.x / KERN_WARP;
    uint32_t lane = threadIdx.x % KERN_WARP, query = (uint32_t)(index % a.q_pad);
    uint64_t head = index / a.q_pad;
    if (head >= (uint64_t)a.batch * a.heads) {
        return;
    }
    struct attention_row row = {INFINITY, 0.0f};
    if (query < a.q_len) {
        size_t at = attention_at((uint32_t)(head / a.heads), a.q_len, query, a.heads,
                                 (uint32_t)(head % a.heads), a.head_dim);
        float sum = 0.0f;
        for (uint32_t d = 2 * lane; d < a.head_dim; d += 2 * KERN_WARP) {
            if (d + 1 == a.head_dim) {
                sum = fmaf(kern_wide(dout[at + d]), kern_wide(out[at + d]), sum);
                break;
            }
            float2 x = pair_load(dout + at + d, whole), y = pair_load(out + at + d, whole);
            sum = fmaf(x.x, y.x, sum);
            sum = fmaf(x.y, y.y, sum);
        }
        const float *of = stats + (head * a.q_len + query) * 2;
        row.delta = kern_warp_sum(sum);
        row.log_sum = of[0] * ATTENTION_LOG2E - log2f(of[1]);
    }
    if (lane == 0) {
        rows[index] = row;
    }
}

/* s becomes p and dp becomes ds, of one query (row) and one key. */
static __device__ __forceinline__ void score_backward(float *s, float *dp, int seen, float c,
                                                      struct attention_row row)
{
    float p = seen ? exp2f(*s * c - row.log_sum) : 0.0f;
    *s = p;
    *dp = p * (*dp - row.delta);
}

template <typename T, int DP, int TILE>
static __global__ void __launch_bounds__(TILE *LANES, 2)
    attention_dq_kernel(T *dq, const T *dout, const T *q, const T *kk, const T *v,
                        const struct attention_row *rows, struct attention_dims a)
{
    KERN_SHARED_DYNAMIC(memory);
    constexpr int SIZE = TILE * (DP + 4);
    float *qs = (float *)memory, *os = qs + SIZE, *ks = os + SIZE, *vs = ks + SIZE, *ps = vs + SIZE;
    struct attention_place at =
        attention_place_of(blockIdx.x, a.batch, a.heads, attention_tiles(a.q_len, TILE), TILE, 1);
    uint32_t row = threadIdx.x / LANES, lane = threadIdx.x % LANES, query = at.first + row;
    uint32_t kv_head = at.head / a.group, keys = attention_keys_seen(a, at.first + TILE);
    size_t q_row = (size_t)a.heads * a.head_dim, k_row = (size_t)a.kv_heads * a.head_dim;
    size_t q_at = attention_at(at.batch, a.q_len, 0, a.heads, at.head, a.head_dim);
    size_t k_at = attention_at(at.batch, a.kv_len, 0, a.kv_heads, kv_head, a.head_dim);
    struct attention_row of = rows[((size_t)at.batch * a.heads + at.head) * a.q_pad + query];
    float *mine = ps + row * (TILE + 1), c = a.scale * ATTENTION_LOG2E;
    float s[TILE / LANES], dp[TILE / LANES];
    float4 sum[DP / 32];
    row_clear<DP>(sum);
    tile_load<T, DP, TILE>(qs, q + q_at, at.first, a.q_len, q_row, a.head_dim);
    tile_load<T, DP, TILE>(os, dout + q_at, at.first, a.q_len, q_row, a.head_dim);
    for (uint32_t first = 0; first < keys; first += TILE) {
        __syncthreads(); /* the tiles before are read */
        tile_load<T, DP, TILE>(ks, kk + k_at, first, a.kv_len, k_row, a.head_dim);
        tile_load<T, DP, TILE>(vs, v + k_at, first, a.kv_len, k_row, a.head_dim);
        __syncthreads();
        row_scores<DP, TILE>(s, qs + row * (DP + 4), ks, lane, a.head_dim);
        row_scores<DP, TILE>(dp, os + row * (DP + 4), vs, lane, a.head_dim);
#pragma unroll
        for (int j = 0; j < (int)(TILE / LANES); j++) {
            int seen = first + lane + LANES * j <= query + a.before;
            score_backward(&s[j], &dp[j], seen, c, of);
            mine[lane + LANES * j] = dp[j];
        }
        __syncwarp(); /* a row's threads are of one warp */
        row_product<DP>(sum, mine, ks, lane, TILE);
    }
    if (query < a.q_len) {
        row_scale<DP>(sum, a.scale);
        row_store<T, DP>(dq + q_at + query * q_row, sum, lane, a.head_dim);
    }
}

template <typename T, int DP, int TILE>
static __global__ void __launch_bounds__(TILE *LANES, 2)
    attention_dkv_kernel(T *dk, T *dv, const T *dout, const T *q, const T *kk, const T *v,
                         const struct attention_row *rows, struct attention_dims a)
{
    KERN_SHARED_DYNAMIC(memory);
    constexpr int SIZE = TILE * (DP + 4);
    float *ks = (float *)memory, *vs = ks + SIZE, *qs = vs + SIZE, *os = qs + SIZE, *ps = os + SIZE;
    struct attention_place at = attention_place_of(blockIdx.x, a.batch, a.kv_heads,
                                                   attention_tiles(a.kv_len, TILE), TILE, 0);
    uint32_t row = threadIdx.x / LANES, lane = threadIdx.x % LANES, key = at.first + row;
    size_t q_row = (size_t)a.heads * a.head_dim, k_row = (size_t)a.kv_heads * a.head_dim;
    size_t k_at = attention_at(at.batch, a.kv_len, 0, a.kv_heads, at.head, a.head_dim);
    float *mine = ps + row * (TILE + 1), *mine_ds = mine + TILE * (TILE + 1);
    float s[TILE / LANES], dp[TILE / LANES], c = a.scale * ATTENTION_LOG2E;
    float4 sum_k[DP / 32], sum_v[DP / 32];
    row_clear<DP>(sum_k);
    row_clear<DP>(sum_v);
    tile_load<T, DP, TILE>(ks, kk + k_at, at.first, a.kv_len, k_row, a.head_dim);
    tile_load<T, DP, TILE>(vs, v + k_at, at.first, a.kv_len, k_row, a.head_dim);
    uint32_t start = at.first > a.before ? (at.first - a.before) / TILE * TILE : 0;
    for (uint32_t head = at.head * a.group; head < (at.head + 1) * a.group; head++) {
        size_t q_at = attention_at(at.batch, a.q_len, 0, a.heads, head, a.head_dim);
        const struct attention_row *of = rows + ((size_t)at.batch * a.heads + head) * a.q_pad;
        for (uint32_t first = start; first < a.q_len; first += TILE) {
            __syncthreads(); /* the tiles before are read */
            tile_load<T, DP, TILE>(qs, q + q_at, first, a.q_len, q_row, a.head_dim);
            tile_load<T, DP, TILE>(os, dout + q_at, first, a.q_len, q_row, a.head_dim);
            __syncthreads();
            row_scores<DP, TILE>(s, ks + row * (DP + 4), qs, lane, a.head_dim);
            row_scores<DP, TILE>(dp, vs + row * (DP + 4), os, lane, a.head_dim);
#pragma unroll
            for (int j = 0; j < (int)(TILE / LANES); j++) {
                uint32_t query = first + lane + LANES * j;
                score_backward(&s[j], &dp[j], key <= query + a.before, c, of[query]);
                mine[lane + LANES * j] = s[j];
                mine_ds[lane + LANES * j] = dp[j];
            }
            __syncwarp(); /* a row's threads are of one warp */
            row_product<DP>(sum_v, mine, os, lane, TILE);
            row_product<DP>(sum_k, mine_ds, qs, lane, TILE);
        }
    }
    if (key < a.kv_len) {
        row_scale<DP>(sum_k, a.scale);
        row_store<T, DP>(dk + k_at + key * k_row, sum_k, lane, a.head_dim);
        row_store<T, DP>(dv + k_at + key * k_row, sum_v, lane, a.head_dim);
    }
}

/* ---- launches ---- */

template <typename T, int DP, int TILE>
static void forward_sized(struct kern *k, T *out, float *stats, const T *q, const T *kk, const T *v,
                          const struct attention_dims &a)
{
    size_t shared = (3 * TILE * (DP + 4) + TILE * (TILE + 1)) * sizeof(float);
    uint32_t blocks = a.batch * a.heads * attention_tiles(a.q_len, TILE);
    attention_shared(k, attention_forward_kernel<T, DP, TILE>, shared);
    KERN_LAUNCH((attention_forward_kernel<T, DP, TILE>), blocks, TILE * LANES, shared,
                kern_cuda_of(k)->compute, out, stats, q, kk, v, a);
}

template <typename T, int DP, int TILE>
static void backward_sized(struct kern *k, T *dq, T *dk, T *dv, const T *dout, const T *q,
                           const T *kk, const T *v, const struct attention_row *rows,
                           const struct attention_dims &a)
{
    size_t shared = (4 * TILE * (DP + 4) + 2 * TILE * (TILE + 1)) * sizeof(float);
    uint32_t q_blocks = a.batch * a.heads * attention_tiles(a.q_len, TILE);
    uint32_t k_blocks = a.batch * a.kv_heads * attention_tiles(a.kv_len, TILE);
    attention_shared(k, attention_dq_kernel<T, DP, TILE>, shared);
    attention_shared(k, attention_dkv_kernel<T, DP, TILE>, shared);
    KERN_LAUNCH((attention_dkv_kernel<T, DP, TILE>), k_blocks, TILE * LANES, shared,
                kern_cuda_of(k)->compute, dk, dv, dout, q, kk, v, rows, a);
    KERN_LAUNCH((attention_dq_kernel<T, DP, TILE>), q_blocks, TILE * LANES, shared,
                kern_cuda_of(k)->compute, dq, dout, q, kk, v, rows, a);
}

template <typename T>
static void forward_typed(struct kern *k, T *out, float *stats, const T *q, const T *kk, const T *v,
                          const struct attention_dims &a)
{
    if (a.head_dim <= 32) {
        forward_sized<T, 32, 32>(k, out, stats, q, kk, v, a);
    } else if (a.head_dim <= 64) {
        forward_sized<T, 64, 32>(k, out, stats, q, kk, v, a);
    } else if (a.head_dim <= 128) {
        forward_sized<T, 128, 32>(k, out, stats, q, kk, v, a);
    } else {
        forward_sized<T, 256, 16>(k, out, stats, q, kk, v, a);
    }
}

template <typename T>
static void backward_typed(struct kern *k, T *dq, T *dk, T *dv, const T *dout, const T *q,
                           const T *kk, const T *v, const struct attention_row *rows,
                           const struct attention_dims &a)
{
    if (a.head_dim <= 32) {
        backward_sized<T, 32, 32>(k, dq, dk, dv, dout, q, kk, v, rows, a);
    } else if (a.head_dim <= 64) {
        backward_sized<T, 64, 32>(k, dq, dk, dv, dout, q, kk, v, rows, a);
    } else if (a.head_dim <= 128) {
        backward_sized<T, 128, 32>(k, dq, dk, dv, dout, q, kk, v, rows, a);
    } else {
        backward_sized<T, 256, 16>(k, dq, dk, dv, dout, q, kk, v, rows, a);
    }
}

template <typename T>
static void rows_typed(struct kern *k, struct attention_row *rows, const T *dout, const T *out,
                       const float *stats, const struct attention_dims &a)
{
    uint64_t count = (uint64_t)a.batch * a.heads * a.q_pad, each = 256 / KERN_WARP;
    int whole = ((uintptr_t)dout | (uintptr_t)out) % (2 * sizeof(T)) == 0 && a.head_dim % 2 == 0;
    KERN_LAUNCH(attention_rows_kernel<T>, (uint32_t)((count + each - 1) / each), 256, 0,
                kern_cuda_of(k)->compute, rows, dout, out, stats, whole, a);
}

/* 0: no path has heads this large; the error comes out of the next sync. */
static int has_path(struct kern *k, const struct attention_dims &a)
{
    if (a.head_dim > HEAD_DIM_MAX) {
        kern_cuda_note(k, cudaErrorInvalidValue, "attention: heads of more than 256 channels");
        return 0;
    }
    return 1;
}

extern "C" uint64_t kern_cuda_attention_scratch(struct kern *k,
                                                const struct kern_attention_shape *shape)
{
    (void)k;
    struct attention_dims a = attention_dims_of(shape);
    return (uint64_t)a.batch * a.heads * a.q_pad * sizeof(struct attention_row);
}

extern "C" void kern_cuda_attention_forward(struct kern *k, kern_real *out, float *stats,
                                            const kern_real *q, const kern_real *kk,
                                            const kern_real *v, void *scratch,
                                            const struct kern_attention_shape *shape)
{
    (void)scratch;
    struct attention_dims a = attention_dims_of(shape);
    if (!has_path(k, a)) {
        return;
    }
    if (attention_is_flash(k, a)) {
        attention_flash_forward(k, (kern_bf16 *)out, stats, (const kern_bf16 *)q,
                                (const kern_bf16 *)kk, (const kern_bf16 *)v, a);
    } else if (k->type == KERN_BF16) {
        forward_typed(k, (kern_bf16 *)out, stats, (const kern_bf16 *)q, (const kern_bf16 *)kk,
                      (const kern_bf16 *)v, a);
    } else {
        forward_typed(k, (float *)out, stats, (const float *)q, (const float *)kk, (const float *)v,
                      a);
    }
    kern_cuda_launched(k, "attention_forward");
}

extern "C" void kern_cuda_attention_backward(struct kern *k, kern_real *dq, kern_real *dk,
                                             kern_real *dv, const kern_real *dout,
                                             const kern_real *out, const float *stats,
                                             const kern_real *q, const kern_real *kk,
                                             const kern_real *v, void *scratch,
                                             const struct kern_attention_shape *shape)
{
    struct attention_dims a = attention_dims_of(shape);
    if (!has_path(k, a)) {
        return;
    }
    struct attention_row *rows = (struct attention_row *)scratch;
    if (k->type == KERN_BF16) {
        rows_typed(k, rows, (const kern_bf16 *)dout, (const kern_bf16 *)out, stats, a);
    } else {
        rows_typed(k, rows, (const float *)dout, (const float *)out, stats, a);
    }
    if (attention_is_flash(k, a)) {
        attention_flash_backward(k, (kern_bf16 *)dq, (kern_bf16 *)dk, (kern_bf16 *)dv,
                                 (const kern_bf16 *)dout, (const kern_bf16 *)q,
                                 (const kern_bf16 *)kk, (const kern_bf16 *)v, rows, a);
    } else if (k->type == KERN_BF16) {
        backward_typed(k, (kern_bf16 *)dq, (kern_bf16 *)dk, (kern_bf16 *)dv,
                       (const kern_bf16 *)dout, (const kern_bf16 *)q, (const kern_bf16 *)kk,
                       (const kern_bf16 *)v, rows, a);
    } else {
        backward_typed(k, (float *)dq, (float *)dk, (float *)dv, (const float *)dout,
                       (const float *)q, (const float *)kk, (const float *)v, rows, a);
    }
    kern_cuda_launched(k, "attention_backward");
}
