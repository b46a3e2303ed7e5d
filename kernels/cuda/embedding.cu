/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Embedding: out[N,C] = weight[token[n],:], rows [lo, hi) of the table being here; a token of
 * another rank gives zeros. Backward goes by the segments of tokens.h: a warp takes 32 packs of
 * columns of one row of the table, and adds its tokens in the order of n. The bits are those of the
 * CPU.
 */
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/tokens.h"

namespace
{

template <typename T> struct embedding_forward {
    enum { W = kern_width<T>::W };
    T *out;
    const T *weight;
    const int32_t *tokens;
    uint32_t c, lo, hi;
    int whole;

    __device__ __forceinline__ void row(uint64_t row, uint32_t lane) const
    {
        uint32_t token = (uint32_t)tokens[row];
        int here = token >= lo && token < hi;
        const T *from = weight + (uint64_t)(here ? token - lo : 0) * c;
        T *to = out + row * c;
#pragma unroll 2
        for (uint64_t at = lane * W; at < c; at += KERN_WARP * W) {
            float v[W] = {};
            if (here) {
                kern_load_row(v, from, (uint32_t)at, c, whole, 0.0f);
            }
            kern_store_row(to, v, (uint32_t)at, c, whole);
        }
    }
};

template <typename T> struct segments {
    float *dweight;
    const T *dout;
    const uint32_t *rows, *starts, *order;
    uint32_t count, c, tiles;
    int whole;
};

template <typename T>
__global__ void __launch_bounds__(KERN_THREADS) embedding_backward_kernel(struct segments<T> s)
{
    enum { W = kern_width<T>::W };
    uint64_t segment = (uint64_t)blockIdx.x * KERN_WARPS + threadIdx.x / KERN_WARP;
    if (segment >= s.count) {
        return;
    }
    float *to = s.dweight + (uint64_t)s.rows[segment] * s.c;
    uint32_t start = s.starts[segment], end = s.starts[segment + 1];
    for (uint32_t tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
        uint64_t at = ((uint64_t)tile * KERN_WARP + threadIdx.x % KERN_WARP) * W;
        if (at >= s.c) {
            return;
        }
        float sum[W];
        kern_load_row(sum, to, (uint32_t)at, s.c, s.whole, 0.0f);
#pragma unroll 4
        for (uint32_t i = start; i < end; i++) {
            float v[W];
            kern_load_row(v, s.dout + (uint64_t)s.order[i] * s.c, (uint32_t)at, s.c, s.whole, 0.0f);
#pragma unroll
            for (int j = 0; j < W; j++) {
                sum[j] += v[j];
            }
        }
        kern_store_row(to, sum, (uint32_t)at, s.c, s.whole);
    }
}

template <typename T>
void forward(struct kern *k, kern_real *out, const struct kern_tokens *t, const kern_real *weight,
             uint32_t c, uint32_t lo, uint32_t hi)
{
    struct kern_cuda_tokens at = kern_cuda_tokens_at(t->memory, t->n);
    embedding_forward<T> op = {(T *)out, (const T *)weight, at.tokens, c, lo, hi, 0};
    op.whole = kern_is_whole_rows(op.out, c) && kern_is_whole(weight);
    kern_rows(k, "embedding_forward", op, t->n);
}

template <typename T>
void backward(struct kern *k, float *dweight, const kern_real *dout, const struct kern_tokens *t,
              uint32_t c)
{
    struct kern_cuda_tokens at = kern_cuda_tokens_at(t->memory, t->n);
    const uint32_t columns = KERN_WARP * kern_width<T>::W;
    struct segments<T> s = {
        dweight, (const T *)dout, at.rows, at.starts, at.order, t->segments, c,
            c / columns + (c % columns != 0), 0
    };
    s.whole = kern_is_whole_rows(s.dout, c) && kern_is_whole(dweight);
    if (s.count == 0 || s.tiles == 0) {
        return;
    }
    dim3 blocks((s.count - 1) / KERN_WARPS + 1, s.tiles < 65535 ? s.tiles : 65535);
    KERN_LAUNCH((embedding_backward_kernel<T>), blocks, KERN_THREADS, 0, kern_cuda_of(k)->compute,
                s);
    kern_cuda_launched(k, "embedding_backward");
}

} // namespace

extern "C" void kern_cuda_embedding_forward(struct kern *k, kern_real *out,
                                            const struct kern_tokens *t, const kern_real *weight,
                                            uint32_t c, uint32_t lo, uint32_t hi)
{
    KERN_BY_TYPE(k, forward, k, out, t, weight, c, lo, hi);
}

extern "C" void kern_cuda_embedding_backward(struct kern *k, float *dweight, const kern_real *dout,
                                             const struct kern_tokens *t, uint32_t c, uint32_t lo,
                                             uint32_t hi, int add)
{
    uint64_t bytes = (uint64_t)(hi - lo) * c * sizeof(float);
    if (!add && bytes > 0) {
        kern_cuda_note(k, cudaMemsetAsync(dweight, 0, bytes, kern_cuda_of(k)->compute),
                       "embedding_backward");
    }
    KERN_BY_TYPE(k, backward, k, dweight, dout, t, c);
}
