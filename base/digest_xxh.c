/* SPDX-License-Identifier: Apache-2.0 */
/*
 * XXH3 inlined from its header and compiled for AVX2, where the machine has it: Debian's shared
 * library is compiled for any x86-64 and half as fast. The same bits either way.
 */
#include "base/digest_simd.h"

#if defined(__AVX2__)

#define XXH_INLINE_ALL
#define XXH_VECTOR XXH_AVX2
#include <xxhash.h>

int bl_xxh3_simd(const void *data, size_t bytes, uint64_t *ret_digest)
{
    if (!__builtin_cpu_supports("avx2")) {
        return 0;
    }
    *ret_digest = XXH3_64bits(data, bytes);
    return 1;
}

#else

int bl_xxh3_simd(const void *data, size_t bytes, uint64_t *ret_digest)
{
    (void)data;
    (void)bytes;
    (void)ret_digest;
    return 0;
}

#endif
