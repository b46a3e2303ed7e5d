/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels/cuda/mma.cuh on the simulated device: what a lane gets is where the PTX ISA says, and
 * products built on it are those of three plain loops. Values are small whole numbers, so all sums
 * are exact.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
extern "C" {
#include <cmocka.h>
}

#include "kernels/cuda/mma.cuh"
#include "tests/gpusim/gpusim_control.h"

#define STEP 24 /* elements from a row in shared memory to the next */

/* tile[16][16] into a warp's shared memory, by plain stores. */
static __device__ void tile_fill(kern_bf16 *to, const kern_bf16 *from)
{
    for (uint32_t i = threadIdx.x; i < 256; i += KERN_WARP) {
        to[i / 16 * STEP + i % 16] = from[i];
    }
    __syncwarp();
}

/* out[32][4]: what each lane gets of the four 8x8 tiles of x[16][16]: 0 left above, 1 left below, 2
 * right above, 3 right below. */
static __global__ void ldmatrix_kernel(uint32_t *out, const kern_bf16 *x, int trans)
{
    __shared__ __align__(16) kern_bf16 tile[16 * STEP];
    uint32_t lane = threadIdx.x, r[4];
    tile_fill(tile, x);
    const kern_bf16 *row = tile + lane % 16 * STEP + lane / 16 * 8;
    if (trans) {
        kern_ldmatrix_trans(r, row);
    } else {
        kern_ldmatrix(r, row);
    }
    for (uint32_t i = 0; i < 4; i++) {
        out[lane * 4 + i] = r[i];
    }
}

/* c[16][16] += a[16][16] b, with b[k][n], or b^T with b[n][k]; c where mma.cuh says. */
static __global__ void product_kernel(float *c, const kern_bf16 *a, const kern_bf16 *b, int trans)
{
    __shared__ __align__(16) kern_bf16 a_tile[16 * STEP], b_tile[16 * STEP];
    uint32_t lane = threadIdx.x, ra[4], rb[4];
    tile_fill(a_tile, a);
    tile_fill(b_tile, b);
    kern_ldmatrix(ra, a_tile + lane % 16 * STEP + lane / 16 * 8);
    if (trans) {
        kern_ldmatrix(rb, b_tile + (lane % 8 + lane / 16 * 8) * STEP + lane / 8 % 2 * 8);
    } else {
        kern_ldmatrix_trans(rb, b_tile + lane % 16 * STEP + lane / 16 * 8);
    }
    for (uint32_t half = 0; half < 2; half++) {
        float sum[4];
        for (uint32_t i = 0; i < 4; i++) {
            sum[i] = c[(lane / 4 + i / 2 * 8) * 16 + half * 8 + lane % 4 * 2 + i % 2];
        }
        kern_mma(sum, ra, rb[2 * half], rb[2 * half + 1]);
        for (uint32_t i = 0; i < 4; i++) {
            c[(lane / 4 + i / 2 * 8) * 16 + half * 8 + lane % 4 * 2 + i % 2] = sum[i];
        }
    }
}

/* Thread i copies x[i][4] in two groups (the second: zeros for odd i) and notes what it sees in
 * out[i]: 0, 1 of both before it waits; 2, 3 after a wait that leaves one group; 4, 5 after all. */
static __global__ void copy_kernel(uint32_t *out, const uint32_t *x)
{
    __shared__ __align__(16) uint32_t first[32][4], second[32][4];
    uint32_t i = threadIdx.x;
    kern_copy_async(first[i], x + 4 * i, 1);
    kern_copy_commit();
    kern_copy_async(second[i], x + 4 * i, i % 2 == 0);
    kern_copy_commit();
    out[6 * i] = first[i][3];
    out[6 * i + 1] = second[i][3];
    kern_copy_wait<1>();
    out[6 * i + 2] = first[i][3];
    out[6 * i + 3] = second[i][3];
    kern_copy_wait<0>();
    out[6 * i + 4] = first[i][3];
    out[6 * i + 5] = second[i][3];
}

/* out[i] = pack(x[2i], x[2i + 1]); exps[i] = 2^x[i] */
static __global__ void scalar_kernel(uint32_t *out, float *exps, const float *x)
{
    out[threadIdx.x] = kern_pack_bf16(x[2 * threadIdx.x], x[2 * threadIdx.x + 1]);
    exps[threadIdx.x] = kern_exp2(x[threadIdx.x]);
}

static void *device_new(const void *from, size_t bytes)
{
    void *p;
    assert_int_equal(cudaMalloc(&p, bytes), cudaSuccess);
    assert_int_equal(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    return p;
}

static void device_take(void *host, void *p, size_t bytes)
{
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    assert_int_equal(cudaMemcpy(host, p, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    assert_int_equal(cudaFree(p), cudaSuccess);
}

static uint16_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* Whole numbers of -8 to 8, of which bf16 has all. */
static float whole(uint32_t seed, uint32_t i)
{
    return (float)((i * 2654435761u + seed * 40503u) >> 13 & 15) - 8.0f;
}

static void test_ldmatrix_gives_lanes_what_the_isa_says(void **state)
{
    (void)state;
    uint16_t x[256];
    uint32_t zeros[128] = {0}, got[128];
    for (uint32_t i = 0; i < 256; i++) {
        x[i] = (uint16_t)(0x4000 + i);
    }
    for (int trans = 0; trans < 2; trans++) {
        void *from = device_new(x, sizeof x), *to = device_new(zeros, sizeof zeros);
        KERN_LAUNCH(ldmatrix_kernel, 1, 32, 0, 0, (uint32_t *)to, (const kern_bf16 *)from, trans);
        device_take(got, to, sizeof got);
        cudaFree(from);
        for (uint32_t i = 0; i < 128; i++) {
            uint32_t g = i / 4 / 4, t = i / 4 % 4, tile = i % 4;
            uint32_t row = tile % 2 * 8, column = tile / 2 * 8, low, high;
            if (trans) {
                low = x[(row + 2 * t) * 16 + column + g];
                high = x[(row + 2 * t + 1) * 16 + column + g];
            } else {
                low = x[(row + g) * 16 + column + 2 * t];
                high = x[(row + g) * 16 + column + 2 * t + 1];
            }
            assert_int_equal(got[i], low | high << 16);
        }
    }
}

static void test_a_product_of_fragments_is_the_plain_product(void **state)
{
    (void)state;
    uint16_t a[256], b[256];
    float c[256], got[256];
    for (uint32_t i = 0; i < 256; i++) {
        a[i] = bits_of(whole(1, i));
        b[i] = bits_of(whole(2, i));
        c[i] = whole(3, i);
    }
    for (int trans = 0; trans < 2; trans++) {
        for (uint64_t seed = 0; seed < 3; seed++) {
            gpusim_seed(seed);
            void *da = device_new(a, sizeof a), *db = device_new(b, sizeof b);
            void *dc = device_new(c, sizeof c);
            KERN_LAUNCH(product_kernel, 1, 32, 0, 0, (float *)dc, (const kern_bf16 *)da,
                        (const kern_bf16 *)db, trans);
            device_take(got, dc, sizeof got);
            cudaFree(da);
            cudaFree(db);
            for (uint32_t i = 0; i < 256; i++) {
                float sum = c[i];
                for (uint32_t k = 0; k < 16; k++) {
                    uint32_t at = trans ? i % 16 * 16 + k : k * 16 + i % 16;
                    sum += whole(1, i / 16 * 16 + k) * whole(2, at);
                }
                assert_true(got[i] == sum);
            }
        }
    }
    gpusim_seed(0);
}

static void test_async_copies_land_when_waited_for(void **state)
{
    (void)state;
    uint32_t x[128], zeros[192] = {0}, got[192];
    for (uint32_t i = 0; i < 128; i++) {
        x[i] = 1000 + i;
    }
    void *from = device_new(x, sizeof x), *to = device_new(zeros, sizeof zeros);
    KERN_LAUNCH(copy_kernel, 1, 32, 0, 0, (uint32_t *)to, (const uint32_t *)from);
    device_take(got, to, sizeof got);
    cudaFree(from);
    for (uint32_t i = 0; i < 32; i++) {
        uint32_t second = i % 2 == 0 ? x[4 * i + 3] : 0;
        const uint32_t expected[6] = {UINT32_MAX, UINT32_MAX,   x[4 * i + 3],
                                      UINT32_MAX, x[4 * i + 3], second};
        assert_memory_equal(&got[6 * i], expected, sizeof expected);
    }
}

static void test_packing_rounds_to_even_and_exp2_has_its_ends(void **state)
{
    (void)state;
    float x[64] = {1.0f, -2.0f, 1.00390625f, 1.01171875f, 3.3895314e38f, 3.4e38f, -INFINITY, 0.5f};
    uint32_t zeros[32] = {0}, packed[32];
    float none[32] = {0}, exps[32];
    for (uint32_t i = 8; i < 64; i++) {
        x[i] = (float)i * 0.37f - 12.0f;
    }
    x[8] = -140.0f; /* a subnormal result */
    void *from = device_new(x, sizeof x), *to = device_new(zeros, sizeof zeros);
    void *to_exps = device_new(none, sizeof none);
    KERN_LAUNCH(scalar_kernel, 1, 32, 0, 0, (uint32_t *)to, (float *)to_exps, (const float *)from);
    device_take(packed, to, sizeof packed);
    device_take(exps, to_exps, sizeof exps);
    cudaFree(from);
    assert_int_equal(packed[0], 0xc0003f80);
    assert_int_equal(packed[1], 0x3f823f80); /* both are ties */
    assert_int_equal(packed[2], 0x7f807f7f);
    assert_int_equal(packed[3], 0x3f00ff80);
    assert_true(exps[0] == 2.0f && exps[1] == 0.25f && exps[6] == 0.0f && exps[8] == 0.0f);
    for (uint32_t i = 9; i < 32; i++) {
        double exact = exp2((double)x[i]);
        assert_true(fabs((double)exps[i] - exact) <= 3e-7 * exact);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ldmatrix_gives_lanes_what_the_isa_says),
        cmocka_unit_test(test_a_product_of_fragments_is_the_plain_product),
        cmocka_unit_test(test_async_copies_land_when_waited_for),
        cmocka_unit_test(test_packing_rounds_to_even_and_exp2_has_its_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
