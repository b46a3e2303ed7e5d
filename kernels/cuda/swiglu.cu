/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SwiGLU, elementwise: out = gate sigmoid(gate) up. expf is the device's (2 ulp); the division is
 * IEEE's.
 */
#include "kernels/cuda/pack.cuh"

namespace
{

__device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

template <typename T> struct swiglu_forward {
    enum { W = kern_width<T>::W };
    T *out;
    const T *gate, *up;

    template <int N> __device__ __forceinline__ void run(uint64_t at) const
    {
        float g[N], u[N];
        kern_load(g, gate + at);
        kern_load(u, up + at);
#pragma unroll
        for (int i = 0; i < N; i++) {
            g[i] = (g[i] * sigmoid(g[i])) * u[i];
        }
        kern_store(out + at, g);
    }
};

template <typename T> struct swiglu_backward {
    enum { W = kern_width<T>::W };
    T *dgate, *dup;
    const T *dout, *gate, *up;

    template <int N> __device__ __forceinline__ void run(uint64_t at) const
    {
        float d[N], g[N], u[N];
        kern_load(d, dout + at);
        kern_load(g, gate + at);
        kern_load(u, up + at);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float s = sigmoid(g[i]), du = d[i] * u[i];
            u[i] = d[i] * (g[i] * s);
            g[i] = du * (s * (1.0f + g[i] * (1.0f - s)));
        }
        kern_store(dgate + at, g);
        kern_store(dup + at, u);
    }
};

template <typename T>
void forward(struct kern *k, kern_real *out, const kern_real *gate, const kern_real *up,
             uint64_t count)
{
    swiglu_forward<T> op = {(T *)out, (const T *)gate, (const T *)up};
    kern_map(k, "swiglu_forward", op, count,
             kern_is_whole(out) && kern_is_whole(gate) && kern_is_whole(up));
}

template <typename T>
void backward(struct kern *k, kern_real *dgate, kern_real *dup, const kern_real *dout,
              const kern_real *gate, const kern_real *up, uint64_t count)
{
    swiglu_backward<T> op = {(T *)dgate, (T *)dup, (const T *)dout, (const T *)gate, (const T *)up};
    kern_map(k, "swiglu_backward", op, count,
             kern_is_whole(dgate) && kern_is_whole(dup) && kern_is_whole(dout) &&
                 kern_is_whole(gate) && kern_is_whole(up));
}

} // namespace

extern "C" void kern_cuda_swiglu_forward(struct kern *k, kern_real *out, const kern_real *gate,
                                         const kern_real *up, uint64_t count)
{
    KERN_BY_TYPE(k, forward, k, out, gate, up, count);
}

extern "C" void kern_cuda_swiglu_backward(struct kern *k, kern_real *dgate, kern_real *dup,
                                          const kern_real *dout, const kern_real *gate,
                                          const kern_real *up, uint64_t count)
{
    KERN_BY_TYPE(k, backward, k, dgate, dup, dout, gate, up, count);
}
