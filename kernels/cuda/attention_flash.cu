/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention forward on tensor cores: bf16, head sizes 32, 64, 96, 128 and 256. A block has 16
 * queries a warp and goes over the keys that its last query sees, KEYS at a time.
 */
#include "kernels/cuda/attention_flash.cuh"

/* The largest and the sum of a warp's rows g and g + 8, of the four lanes that have their columns.
 */
struct flash_softmax {
    float top[2], sum[2];
};

static __device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(KERN_FULL, x, 1));
    return fmaxf(x, __shfl_xor_sync(KERN_FULL, x, 2));
}

static __device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(KERN_FULL, x, 1);
    return x + __shfl_xor_sync(KERN_FULL, x, 2);
}

/* Scores that a query does not see become -infinity. `key`: of column 0; `last`: the last key that
 * row g sees. */
template <int N>
static __device__ __forceinline__ void scores_mask(float s[N / 8][4], uint32_t key, uint32_t last,
                                                   uint32_t lane)
{
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t column = key + 8 * n + 2 * (lane % 4) + i % 2;
            s[n][i] = column <= last + i / 2 * 8 ? s[n][i] : -INFINITY;
        }
    }
}

/* s becomes p with the new maximum; o and the sums shrink to it. */
template <int C, int N>
static __device__ __forceinline__ void softmax_step(float s[N / 8][4], float o[C / 8][4],
                                                    struct flash_softmax *state, float c)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = state->top[r];
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
            top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        }
        top = quad_max(top); /* finite: each query sees key 0, of the first tile */
        float shrink = kern_exp2((state->top[r] - top) * c), base = top * c;
        float sum = state->sum[r] * shrink;
#pragma unroll
        for (int n = 0; n < N / 8; n++) {
            s[n][2 * r] = kern_exp2(fmaf(s[n][2 * r], c, -base));
            s[n][2 * r + 1] = kern_exp2(fmaf(s[n][2 * r + 1], c, -base));
            sum += s[n][2 * r];
            sum += s[n][2 * r + 1];
        }
#pragma unroll
        for (int i = 0; i < C / 8; i++) {
            o[i][2 * r] *= shrink;
            o[i][2 * r + 1] *= shrink;
        }
        state->top[r] = top;
        state->sum[r] = sum;
    }
}

template <int D, int WARPS, int KEYS> struct flash_forward_memory {
    static constexpr int ROW = flash_row<D>::STEP;
    kern_bf16 q[WARPS * FLASH_ROWS][ROW];
    kern_bf16 k[2][KEYS][ROW], v[2][KEYS][ROW];
};

template <int D, int WARPS, int KEYS>
static __global__ void __launch_bounds__(WARPS *KERN_WARP, FLASH_BLOCKS(D))
    flash_forward_kernel(kern_bf16 *out, float *stats, const kern_bf16 *q, const kern_bf16 *kk,
                         const kern_bf16 *v, struct attention_dims a)
{
    KERN_SHARED_DYNAMIC(memory);
    constexpr int THREADS = WARPS * KERN_WARP, TILE = WARPS * FLASH_ROWS;
    struct flash_forward_memory<D, WARPS, KEYS> *m =
        (struct flash_forward_memory<D, WARPS, KEYS> *)memory;
    struct attention_place at =
        attention_place_of(blockIdx.x, a.batch, a.heads, attention_tiles(a.q_len, TILE), TILE, 1);
    uint32_t warp = threadIdx.x / KERN_WARP, lane = threadIdx.x % KERN_WARP;
    uint32_t first = at.first + warp * FLASH_ROWS; /* the warp's first query */
    uint32_t keys = attention_keys_seen(a, at.first + TILE), tiles = attention_tiles(keys, KEYS);
    size_t q_row = (size_t)a.heads * D, k_row = (size_t)a.kv_heads * D;
    size_t q_at = attention_at(at.batch, a.q_len, 0, a.heads, at.head, D);
    size_t k_at = attention_at(at.batch, a.kv_len, 0, a.kv_heads, at.head / a.group, D);
    kern_bf16 *rows = m->q[warp * FLASH_ROWS];
    struct flash_softmax state = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
    float o[D / 8][4], s[KEYS / 8][4], c = a.scale * ATTENTION_LOG2E;
    flash_clear<D>(o);
    flash_load<D, TILE, THREADS>(m->q[0], q + q_at, at.first, a.q_len, q_row);
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
            flash_scores<D, KEYS>(s, rows, m->k[now][0], lane);
            if (key + KEYS - 1 > first + a.before) { /* its first does not see all */
                scores_mask<KEYS>(s, key, first + a.before + lane / 4, lane);
            }
            softmax_step<D, KEYS>(s, o, &state, c);
            flash_product<D, D, KEYS>(o, s, m->v[now][0], 0, lane);
        }
        __syncthreads();
    }
    float inverse[2] = {1.0f / quad_sum(state.sum[0]), 1.0f / quad_sum(state.sum[1])};
    flash_store<D, D>(out + q_at + first * q_row, o, inverse[0], inverse[1], rows, first, a.q_len,
                      q_row, lane);
    for (uint32_t r = 0; r < 2; r++) {
        uint32_t query = first + lane / 4 + 8 * r;
        if (query < a.q_len && lane % 4 == 0) {
            float *to = stats + (((size_t)at.batch * a.heads + at.head) * a.q_len + query) * 2;
            to[0] = state.top[r] * a.scale;
            to[1] = inverse[r];
        }
    }
}

template <int D, int WARPS, int KEYS>
static void forward_sized(struct kern *k, kern_bf16 *out, float *stats, const kern_bf16 *q,
                          const kern_bf16 *kk, const kern_bf16 *v, const struct attention_dims &a)
{
    size_t shared = sizeof(struct flash_forward_memory<D, WARPS, KEYS>);
    uint32_t blocks = a.batch * a.heads * attention_tiles(a.q_len, WARPS * FLASH_ROWS);
    attention_shared(k, flash_forward_kernel<D, WARPS, KEYS>, shared);
    KERN_LAUNCH((flash_forward_kernel<D, WARPS, KEYS>), blocks, WARPS * KERN_WARP, shared,
                kern_cuda_of(k)->compute, out, stats, q, kk, v, a);
}

int attention_is_flash(const struct kern *k, const struct attention_dims &a)
{
    return k->type == KERN_BF16 && (a.head_dim == 32 || a.head_dim == 64 || a.head_dim == 96 ||
                                    a.head_dim == 128 || a.head_dim == 256);
}

void attention_flash_forward(struct kern *k, kern_bf16 *out, float *stats, const kern_bf16 *q,
                             const kern_bf16 *kk, const kern_bf16 *v,
                             const struct attention_dims &a)
{
    switch (a.head_dim) {
    case 32:
        forward_sized<32, 4, 64>(k, out, stats, q, kk, v, a);
        break;
    case 64:
        forward_sized<64, 4, 64>(k, out, stats, q, kk, v, a);
        break;
    case 96:
        forward_sized<96, 4, 64>(k, out, stats, q, kk, v, a);
        break;
    case 128:
        forward_sized<128, 4, 64>(k, out, stats, q, kk, v, a);
        break;
    default:
        forward_sized<256, 4, 32>(k, out, stats, q, kk, v, a);
    }
}
