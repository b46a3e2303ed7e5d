/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The types that CUDA's language brings with it (C++ only): vectors, which are aligned as on the
 * device, and dim3.
 */
#ifndef GPUSIM_INCLUDE_CUDA_RUNTIME_H
#define GPUSIM_INCLUDE_CUDA_RUNTIME_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus

#define GPUSIM_VECTORS(name, type)                                                                 \
    struct alignas(2 * sizeof(type)) name##2                                                       \
    {                                                                                              \
        type x, y;                                                                                 \
    };                                                                                             \
    struct name##3                                                                                 \
    {                                                                                              \
        type x, y, z;                                                                              \
    };                                                                                             \
    struct alignas(4 * sizeof(type) > 16 ? 16 : 4 * sizeof(type)) name##4                          \
    {                                                                                              \
        type x, y, z, w;                                                                           \
    };                                                                                             \
    static inline name##2 make_##name##2(type x, type y)                                           \
    {                                                                                              \
        return name##2 {x, y};                                                                     \
    }                                                                                              \
    static inline name##3 make_##name##3(type x, type y, type z)                                   \
    {                                                                                              \
        return name##3 {x, y, z};                                                                  \
    }                                                                                              \
    static inline name##4 make_##name##4(type x, type y, type z, type w)                           \
    {                                                                                              \
        return name##4 {x, y, z, w};                                                               \
    }

GPUSIM_VECTORS(float, float)
GPUSIM_VECTORS(double, double)
GPUSIM_VECTORS(int, int)
GPUSIM_VECTORS(uint, unsigned int)
GPUSIM_VECTORS(ushort, unsigned short)
GPUSIM_VECTORS(uchar, unsigned char)

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1)
        : x(x_), y(y_), z(z_)
    {
    }
};

/* Kernels are not objects: their own overload, as CUDA has one. */
template <typename... P>
static inline cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute,
                                               int value)
{
    return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), attribute, value);
}

#endif

#endif
