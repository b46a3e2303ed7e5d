/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the parts of attention share: attention.cu (every head size, fp32 and bf16, plain
 * multiply-adds) and attention_flash*.cu (bf16 on tensor cores).
 *
 * Both go over tiles of queries and keys and keep of the scores what a tile needs. With c =
 * log2(e) / sqrt(D), s = q . k, over the keys that a query sees:
 *
 *     forward   p = 2^(c s - c max s), o = sum p v / sum p, tile after tile with the running
 *               maximum (Milakov and Gimelshein 2018; Dao et al. 2022)
 *     rows      L = log2(e) top - log2(inverse), of forward's stats; delta = dout . out
 *     dQ        over key tiles in order: p = 2^(c s - L), ds = p (dout . v - delta),
 *               dq = sum ds k / sqrt(D)
 *     dK, dV    over the group's heads in order, in each over query tiles in order: dv = sum p
 * dout, dk = sum ds q / sqrt(D)
 *
 * Every output element belongs to one thread of one block, which adds in the order of the tiles:
 * sums depend on the shape alone. Tiles that no query of the block sees are not read.
 */
#ifndef KERN_KERNELS_CUDA_ATTENTION_CUH
#define KERN_KERNELS_CUDA_ATTENTION_CUH

#include <math.h>

#include "kernels/cuda/launch.cuh"

#define ATTENTION_LOG2E    1.44269504f
#define ATTENTION_ROWS_PAD 128U /* rows of scratch per head are a multiple: of every query tile */

/* A shape as kernels take it. */
struct attention_dims {
    uint32_t batch, q_len, kv_len, heads, kv_heads, head_dim;
    uint32_t group;  /* heads that read one kv head */
    uint32_t before; /* keys before the first query's own: kv_len - q_len */
    uint32_t q_pad;  /* q_len up to a multiple of ATTENTION_ROWS_PAD */
    float scale;     /* 1 / sqrt(D) */
};

/* Of a query, for backward: scratch[B,H,q_pad]. Rows behind q_len have L = infinity, so p = 0. */
struct __align__(8) attention_row
{
    float log_sum; /* L */
    float delta;
};

/* One tile's place: which batch and head, and its first row. */
struct attention_place {
    uint32_t batch, head, first;
};

static inline struct attention_dims attention_dims_of(const struct kern_attention_shape *shape)
{
    struct attention_dims a;
    a.batch = shape->batch;
    a.q_len = shape->q_len;
    a.kv_len = shape->kv_len;
    a.heads = shape->heads;
    a.kv_heads = shape->kv_heads;
    a.head_dim = shape->head_dim;
    a.group = shape->heads / shape->kv_heads;
    a.before = shape->kv_len - shape->q_len;
    a.q_pad = (shape->q_len + ATTENTION_ROWS_PAD - 1) / ATTENTION_ROWS_PAD * ATTENTION_ROWS_PAD;
    a.scale = 1.0f / sqrtf((float)shape->head_dim);
    return a;
}

static __host__ __device__ __forceinline__ uint32_t attention_tiles(uint32_t length, uint32_t tile)
{
    return (length + tile - 1) / tile;
}

/* Block `index` of batch * heads * tiles; the last tiles of all come first: theirs is the most work
 * of the causal triangle. With `reverse` 0 the first tiles do, whose keys all queries see. */
static __device__ __forceinline__ struct attention_place
attention_place_of(uint32_t index, uint32_t batch, uint32_t heads, uint32_t tiles, uint32_t tile,
                   int reverse)
{
    struct attention_place place;
    uint32_t at = index / (batch * heads), rest = index % (batch * heads);
    place.first = (reverse ? tiles - 1 - at : at) * tile;
    place.batch = rest / heads;
    place.head = rest % heads;
    return place;
}

/* Elements before row `row` of [B,length,heads,D]. */
static __device__ __forceinline__ size_t attention_at(uint32_t batch, uint32_t length, uint32_t row,
                                                      uint32_t heads, uint32_t head, uint32_t d)
{
    return (((size_t)batch * length + row) * heads + head) * d;
}

/* Keys that queries before `query_end` see. */
static __device__ __forceinline__ uint32_t attention_keys_seen(const struct attention_dims &a,
                                                               uint32_t query_end)
{
    uint32_t keys = a.before + query_end;
    return keys < a.kv_len ? keys : a.kv_len;
}

/* Lets a kernel have this much shared memory. */
template <typename F> static inline void attention_shared(struct kern *k, F *kernel, size_t bytes)
{
    if (bytes > 48 * 1024) {
        kern_cuda_note(k,
                       cudaFuncSetAttribute((const void *)kernel,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            (int)bytes),
                       "attention: shared memory");
    }
}

/* attention_flash*.cu: bf16 with a head size of which attention_is_flash is true; arrays are
 * 16-byte aligned. rows: filled. */
int attention_is_flash(const struct kern *k, const struct attention_dims &a);
void attention_flash_forward(struct kern *k, kern_bf16 *out, float *stats, const kern_bf16 *q,
                             const kern_bf16 *kk, const kern_bf16 *v,
                             const struct attention_dims &a);
void attention_flash_backward(struct kern *k, kern_bf16 *dq, kern_bf16 *dk, kern_bf16 *dv,
                              const kern_bf16 *dout, const kern_bf16 *q, const kern_bf16 *kk,
                              const kern_bf16 *v, const struct attention_row *rows,
                              const struct attention_dims &a);

#endif
