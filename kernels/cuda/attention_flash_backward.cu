/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention backward on tensor cores, in two passes that compute the scores again: one for dK and
 * dV, whose blocks own keys, and one for dQ, whose blocks own queries. No number is added to by two
 * blocks, so there are no atomics, at seven products in place of five.
 */
#include "kernels/cuda/attention_flash.cuh"

/* Of an element: s becomes p, dp becomes ds. */
static __device__ __forceinline__ void flash_backward_element(float *s, float *dp, float c,
                                                              float log_sum, float delta, int seen)
{
    float p = seen ? kern_exp2(fmaf(*s, c, -log_sum)) : 0.0f;
    *s = p;
    *dp = p * (*dp - delta);
}

/* ---- dQ: rows are queries, columns keys ---- */

template <int D, int WARPS, int KEYS> struct flash_dq_memory {
    static constexpr int ROW = flash_row<D>::STEP;
    kern_bf16 q[WARPS * FLASH_ROWS][ROW], dout[WARPS * FLASH_ROWS][ROW];
    kern_bf16 k[2][KEYS][ROW], v[2][KEYS][ROW];
};

/* `key`: of column 0; `last`: the last key that row g sees. */
template <int N>
static __device__ __forceinline__ void dq_elements(float s[N / 8][4], float dp[N / 8][4],
                                                   const struct attention_row of[2], float c,
                                                   uint32_t key, uint32_t last, uint32_t lane)
{
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t column = key + 8 * n + 2 * (lane % 4) + i % 2;
            flash_backward_element(&s[n][i], &dp[n][i], c, of[i / 2].log_sum, of[i / 2].delta,
                                   column <= last + i / 2 * 8);
        }
    }
}

template <int D, int WARPS, int KEYS>
static __global__ void __launch_bounds__(WARPS *KERN_WARP, FLASH_BLOCKS(D))
    flash_dq_kernel(kern_bf16 *dq, const kern_bf16 *dout, const kern_bf16 *q, const kern_bf16 *kk,
                    const kern_bf16 *v, const struct attention_row *rows, struct attention_dims a)
{
    KERN_SHARED_DYNAMIC(memory);
    constexpr int THREADS = WARPS * KERN_WARP, TILE = WARPS * FLASH_ROWS;
    struct flash_dq_memory<D, WARPS, KEYS> *m = (struct flash_dq_memory<D, WARPS, KEYS> *)memory;
    struct attention_place at =
        attention_place_of(blockIdx.x, a.batch, a.heads, attention_tiles(a.q_len, TILE), TILE, 1);
    uint32_t warp = threadIdx.x / KERN_WARP, lane = threadIdx.x % KERN_WARP;
    uint32_t first = at.first + warp * FLASH_ROWS; /* the warp's first query */
    uint32_t keys = attention_keys_seen(a, at.first + TILE), tiles = attention_tiles(keys, KEYS);
    size_t q_row = (size_t)a.heads * D, k_row = (size_t)a.kv_heads * D;
    size_t q_at = attention_at(at.batch, a.q_len, 0, a.heads, at.head, D);
    size_t k_at = attention_at(at.batch, a.kv_len, 0, a.kv_heads, at.head / a.group, D);
    const struct attention_row *from =
        rows + ((size_t)at.batch * a.heads + at.head) * a.q_pad + first + lane / 4;
    struct attention_row of[2] = {from[0], from[8]};
    float sum[D / 8][4], s[KEYS / 8][4], dp[KEYS / 8][4], c = a.scale * ATTENTION_LOG2E;
    flash_clear<D>(sum);
    flash_load<D, TILE, THREADS>(m->q[0], q + q_at, at.first, a.q_len, q_row);
    flash_load<D, TILE, THREADS>(m->dout[0], dout + q_at, at.first, a.q_len, q_row);
    flash_load<D, KEYS, THREADS>(m->k[0][0], kk + k_at, 0, a.kv_len, k_row);
    flash_load<D, KEYS, THREADS>(m->v[0][0], v + k_at, 0, a.kv_len, k_row);
    kern_copy_commit();
    for (uint32_t tile = 0; tile < tiles; tile++) {
        uint32_t key = tile * KEYS, now = tile % 2;
        if (tile + 1 < tiles) {
            flash_load<D, KEYS, THREADS>(m->k[1 - now][0], kk + k_at, key + KEYS, a.kv_len, k_row);
            flash_load<D, KEYS, THREADS>(m->v[1 - now][0], v + k_at, key + KEYS, a.kv_len, k_row);
        }
        kern_copy_commit();
        kern_copy_wait<1>();
        __syncthreads();
        if (key <= first + a.before + FLASH_ROWS - 1) { /* the warp's last query sees some */
            flash_scores<D, KEYS>(s, m->q[warp * FLASH_ROWS], m->k[now][0], lane);
            flash_scores<D, KEYS>(dp, m->dout[warp * FLASH_ROWS], m->v[now][0], lane);
            dq_elements<KEYS>(s, dp, of, c, key, first + a.before + lane / 4, lane);
            flash_product<D, D, KEYS>(sum, dp, m->k[now][0], 0, lane);
        }
        __syncthreads();
    }
    flash_store<D, D>(dq + q_at + first * q_row, sum, a.scale, a.scale, m->q[warp * FLASH_ROWS],
                      first, a.q_len, q_row, lane);
}

/* ---- dK, dV: rows are keys, columns queries ---- */

template <int D, int WARPS, int QUERIES> struct flash_dkv_memory {
    static constexpr int ROW = flash_row<D>::STEP;
    kern_bf16 k[WARPS * FLASH_ROWS][ROW], v[WARPS * FLASH_ROWS][ROW];
    kern_bf16 q[2][QUERIES][ROW], dout[2][QUERIES][ROW];
    struct attention_row rows[2][QUERIES];
};

/* Step `i` of a block's loop: heads of the group in order, in each the query tiles in order. */
struct flash_dkv_step {
    uint32_t head, query;
};

static __device__ __forceinline__ struct flash_dkv_step dkv_step(uint32_t i, uint32_t tiles,
                                                                 uint32_t first_tile,
                                                                 uint32_t kv_head, uint32_t group,
                                                                 uint32_t queries)
{
    struct flash_dkv_step step;
    step.head = kv_head * group + i / tiles;
    step.query = (first_tile + i % tiles) * queries;
    return step;
}

/* Issues the copies of a step's tiles of q, dout and rows. */
template <int D, int WARPS, int QUERIES>
static __device__ __forceinline__ void
dkv_load(struct flash_dkv_memory<D, WARPS, QUERIES> *m, uint32_t buffer, const kern_bf16 *q,
         const kern_bf16 *dout, const struct attention_row *rows, uint32_t batch,
         struct flash_dkv_step step, const struct attention_dims &a)
{
    constexpr int THREADS = WARPS * KERN_WARP, EACH = 16 / (int)sizeof(struct attention_row);
    size_t q_row = (size_t)a.heads * D;
    size_t q_at = attention_at(batch, a.q_len, 0, a.heads, step.head, D);
    flash_load<D, QUERIES, THREADS>(m->q[buffer][0], q + q_at, step.query, a.q_len, q_row);
    flash_load<D, QUERIES, THREADS>(m->dout[buffer][0], dout + q_at, step.query, a.q_len, q_row);
    /* q_pad and the tile are multiples of EACH, so this is aligned, and within scratch. */
    const struct attention_row *from =
        rows + ((size_t)batch * a.heads + step.head) * a.q_pad + step.query;
    if (threadIdx.x < QUERIES / EACH) {
        kern_copy_async(&m->rows[buffer][threadIdx.x * EACH], from + threadIdx.x * EACH, 1);
    }
}

/* `query`: of column 0; `key`: of row g; key <= query + before is seen. */
template <int N>
static __device__ __forceinline__ void
dkv_elements(float s[N / 8][4], float dp[N / 8][4], const struct attention_row *of, float c,
             uint32_t key, uint32_t query, uint32_t before, uint32_t lane)
{
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t column = 8 * n + 2 * (lane % 4) + i % 2;
            flash_backward_element(&s[n][i], &dp[n][i], c, of[column].log_sum, of[column].delta,
                                   key + i / 2 * 8 <= query + column + before);
        }
    }
}

/* C: channels of dK and dV that a block has; blockIdx.y counts D / C. */
template <int D, int C, int WARPS, int QUERIES>
static __global__ void __launch_bounds__(WARPS *KERN_WARP, 2)
    flash_dkv_kernel(kern_bf16 *dk, kern_bf16 *dv, const kern_bf16 *dout, const kern_bf16 *q,
                     const kern_bf16 *kk, const kern_bf16 *v, const struct attention_row *rows,
                     struct attention_dims a)
{
    KERN_SHARED_DYNAMIC(memory);
    constexpr int THREADS = WARPS * KERN_WARP, TILE = WARPS * FLASH_ROWS;
    struct flash_dkv_memory<D, WARPS, QUERIES> *m =
        (struct flash_dkv_memory<D, WARPS, QUERIES> *)memory;
    uint32_t parts = D / C, channel = blockIdx.x % parts * C;
    struct attention_place at = attention_place_of(blockIdx.x / parts, a.batch, a.kv_heads,
                                                   attention_tiles(a.kv_len, TILE), TILE, 0);
    uint32_t warp = threadIdx.x / KERN_WARP, lane = threadIdx.x % KERN_WARP;
    uint32_t first = at.first + warp * FLASH_ROWS; /* the warp's first key */
    uint32_t start = at.first > a.before ? (at.first - a.before) / QUERIES : 0;
    uint32_t tiles = attention_tiles(a.q_len, QUERIES) - start, steps = tiles * a.group;
    size_t k_row = (size_t)a.kv_heads * D;
    size_t k_at = attention_at(at.batch, a.kv_len, 0, a.kv_heads, at.head, D);
    kern_bf16 *k_rows = m->k[warp * FLASH_ROWS], *v_rows = m->v[warp * FLASH_ROWS];
    float sum_k[C / 8][4], sum_v[C / 8][4], s[QUERIES / 8][4], dp[QUERIES / 8][4];
    float c = a.scale * ATTENTION_LOG2E;
    flash_clear<C>(sum_k);
    flash_clear<C>(sum_v);
    flash_load<D, TILE, THREADS>(m->k[0], kk + k_at, at.first, a.kv_len, k_row);
    flash_load<D, TILE, THREADS>(m->v[0], v + k_at, at.first, a.kv_len, k_row);
    struct flash_dkv_step step = dkv_step(0, tiles, start, at.head, a.group, QUERIES), next = step;
    dkv_load<D, WARPS, QUERIES>(m, 0, q, dout, rows, at.batch, step, a);
    kern_copy_commit();
    for (uint32_t i = 0; i < steps; i++, step = next) {
        uint32_t now = i % 2;
        if (i + 1 < steps) {
            next = dkv_step(i + 1, tiles, start, at.head, a.group, QUERIES);
            dkv_load<D, WARPS, QUERIES>(m, 1 - now, q, dout, rows, at.batch, next, a);
        }
        kern_copy_commit();
        kern_copy_wait<1>();
        __syncthreads();
        if (first <= step.query + QUERIES - 1 + a.before) { /* some query sees the first key */
            flash_scores<D, QUERIES>(s, k_rows, m->q[now][0], lane);
            flash_scores<D, QUERIES>(dp, v_rows, m->dout[now][0], lane);
            dkv_elements<QUERIES>(s, dp, m->rows[now], c, first + lane / 4, step.query, a.before,
                                  lane);
            flash_product<D, C, QUERIES>(sum_v, s, m->dout[now][0], channel, lane);
            flash_product<D, C, QUERIES>(sum_k, dp, m->q[now][0], channel, lane);
        }
        __syncthreads();
    }
    size_t to = k_at + first * k_row + channel;
    flash_store<D, C>(dk + to, sum_k, a.scale, a.scale, k_rows, first, a.kv_len, k_row, lane);
    flash_store<D, C>(dv + to, sum_v, 1.0f, 1.0f, v_rows, first, a.kv_len, k_row, lane);
}

/* ---- launches ---- */

template <int D, int WARPS, int KEYS>
static void dq_sized(struct kern *k, kern_bf16 *dq, const kern_bf16 *dout, const kern_bf16 *q,
                     const kern_bf16 *kk, const kern_bf16 *v, const struct attention_row *rows,
                     const struct attention_dims &a)
{
    size_t shared = sizeof(struct flash_dq_memory<D, WARPS, KEYS>);
    uint32_t blocks = a.batch * a.heads * attention_tiles(a.q_len, WARPS * FLASH_ROWS);
    attention_shared(k, flash_dq_kernel<D, WARPS, KEYS>, shared);
    KERN_LAUNCH((flash_dq_kernel<D, WARPS, KEYS>), blocks, WARPS * KERN_WARP, shared,
                kern_cuda_of(k)->compute, dq, dout, q, kk, v, rows, a);
}

template <int D, int C, int WARPS, int QUERIES>
static void dkv_sized(struct kern *k, kern_bf16 *dk, kern_bf16 *dv, const kern_bf16 *dout,
                      const kern_bf16 *q, const kern_bf16 *kk, const kern_bf16 *v,
                      const struct attention_row *rows, const struct attention_dims &a)
{
    size_t shared = sizeof(struct flash_dkv_memory<D, WARPS, QUERIES>);
    uint32_t blocks = D / C * a.batch * a.kv_heads * attention_tiles(a.kv_len, WARPS * FLASH_ROWS);
    attention_shared(k, flash_dkv_kernel<D, C, WARPS, QUERIES>, shared);
    KERN_LAUNCH((flash_dkv_kernel<D, C, WARPS, QUERIES>), blocks, WARPS * KERN_WARP, shared,
                kern_cuda_of(k)->compute, dk, dv, dout, q, kk, v, rows, a);
}

void attention_flash_backward(struct kern *k, kern_bf16 *dq, kern_bf16 *dk, kern_bf16 *dv,
                              const kern_bf16 *dout, const kern_bf16 *q, const kern_bf16 *kk,
                              const kern_bf16 *v, const struct attention_row *rows,
                              const struct attention_dims &a)
{
    switch (a.head_dim) {
    case 32:
        dkv_sized<32, 32, 4, 64>(k, dk, dv, dout, q, kk, v, rows, a);
        dq_sized<32, 4, 64>(k, dq, dout, q, kk, v, rows, a);
        break;
    case 64:
        dkv_sized<64, 64, 4, 64>(k, dk, dv, dout, q, kk, v, rows, a);
        dq_sized<64, 4, 64>(k, dq, dout, q, kk, v, rows, a);
        break;
    case 96:
        dkv_sized<96, 96, 4, 32>(k, dk, dv, dout, q, kk, v, rows, a);
        dq_sized<96, 4, 32>(k, dq, dout, q, kk, v, rows, a);
        break;
    case 128:
        dkv_sized<128, 128, 4, 32>(k, dk, dv, dout, q, kk, v, rows, a);
        dq_sized<128, 4, 32>(k, dq, dout, q, kk, v, rows, a);
        break;
    default:
        dkv_sized<256, 128, 4, 32>(k, dk, dv, dout, q, kk, v, rows, a);
        dq_sized<256, 4, 32>(k, dq, dout, q, kk, v, rows, a);
    }
}
