/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rotary positions on x[B,T,H,D], halves rotated: (a, b) -> (a cos - b sin, b cos + a sin) with a =
 * x[i], b = x[i + D/2]; backward rotates by the negative angle. Single rounded operations: in fp32
 * the bits are those of the CPU. A warp takes a row, a lane a pack of pairs.
 */
#include "kernels/cuda/pack.cuh"

namespace
{

template <typename T> struct rope {
    enum { W = kern_width<T>::W };
    T *x;
    const float *table;
    uint32_t t_count, heads, half, pos;
    float sign; /* 1 forward, -1 backward */
    int whole;  /* packs do not span heads, and lie at addresses of 16 bytes */

    template <int N>
    __device__ __forceinline__ void walk(T *to, const float *cosine, uint32_t lane) const
    {
        uint32_t per_head = half / N, packs = heads * per_head;
        for (uint32_t p = lane; p < packs; p += KERN_WARP) {
            uint32_t head = p / per_head, i = (p - head * per_head) * N;
            T *low = to + (uint64_t)head * 2 * half + i, *high = low + half;
            float a[N], b[N], c[N], s[N];
            kern_load(a, low);
            kern_load(b, high);
            kern_load(c, cosine + i);
            kern_load(s, cosine + half + i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                float sine = s[j] * sign, was = a[j];
                a[j] = __fsub_rn(__fmul_rn(was, c[j]), __fmul_rn(b[j], sine));
                b[j] = __fadd_rn(__fmul_rn(b[j], c[j]), __fmul_rn(was, sine));
            }
            kern_store(low, a);
            kern_store(high, b);
        }
    }

    __device__ __forceinline__ void row(uint64_t row, uint32_t lane) const
    {
        uint64_t position = (uint64_t)pos + (uint32_t)row % t_count;
        const float *cosine = table + position * 2 * half;
        T *to = x + row * heads * 2 * half;
        if (whole) {
            walk<W>(to, cosine, lane);
        } else {
            walk<1>(to, cosine, lane);
        }
    }
};

template <typename T>
void rotate(struct kern *k, const char *name, kern_real *x, const float *table, uint32_t n,
            uint32_t t_count, uint32_t heads, uint32_t head_dim, uint32_t pos, float sign)
{
    rope<T> op = {(T *)x, table, t_count, heads, head_dim / 2, pos, sign, 0};
    op.whole = kern_is_whole_rows(op.x, op.half) && kern_is_whole(table);
    kern_rows(k, name, op, n);
}

} // namespace

extern "C" void kern_cuda_rope_forward(struct kern *k, kern_real *x, const float *table, uint32_t n,
                                       uint32_t t_count, uint32_t heads, uint32_t head_dim,
                                       uint32_t pos)
{
    KERN_BY_TYPE(k, rotate, k, "rope_forward", x, table, n, t_count, heads, head_dim, pos, 1.0f);
}

extern "C" void kern_cuda_rope_backward(struct kern *k, kern_real *dx, const float *table,
                                        uint32_t n, uint32_t t_count, uint32_t heads,
                                        uint32_t head_dim)
{
    KERN_BY_TYPE(k, rotate, k, "rope_backward", dx, table, n, t_count, heads, head_dim, 0, -1.0f);
}
