/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Elementwise and flat operations for CUDA against the CPU's, with counts below and above a pack
 * and a block, from addresses of 16 bytes and one element behind them, on a device of 132
 * multiprocessors and on one so small that threads go round. Flat operations must give the CPU's
 * bits.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/ops.h"
#include "tests/gpusim/harness.h"

static const struct kern_ops OPS = {
    .round = kern_cuda_round,
    .widen = kern_cuda_widen,
    .swiglu_forward = kern_cuda_swiglu_forward,
    .swiglu_backward = kern_cuda_swiglu_backward,
    .gelu_forward = kern_cuda_gelu_forward,
    .gelu_backward = kern_cuda_gelu_backward,
    .add_real = kern_cuda_add_real,
    .add = kern_cuda_add,
    .scale = kern_cuda_scale,
    .sumsq_blocks = kern_cuda_sumsq_blocks,
    .sum_parts = kern_cuda_sum_parts,
    .adamw = kern_cuda_adamw,
};

struct shape {
    uint64_t count;
    uint32_t shift; /* elements that arrays begin behind their memory */
    uint32_t parts;
    int is_small, in_place;
};

static const uint64_t COUNTS[] = {1, 7, 8, 61, 1024, 4099, 8200};

static kern_real *real(const struct harness_run *r, uint32_t i)
{
    const struct shape *s = r->arg;
    if (r->k->is_device) {
        kern_cuda_of(r->k)->sm_count = s->is_small ? 0 : 132;
    }
    return kern_real_at(r->k, r->p[i], s->shift);
}

static float *f32(const struct harness_run *r, uint32_t i)
{
    (void)real(r, i);
    return (float *)r->p[i] + ((const struct shape *)r->arg)->shift;
}

typedef void check_fn(struct harness *h, const struct shape *s, enum kern_type type);

static void for_counts(check_fn *check)
{
    for (uint32_t type = KERN_F32; type <= KERN_BF16; type++) {
        struct harness *h = harness_open((enum kern_type)type, &OPS);
        for (uint32_t i = 0; i < 2 * sizeof COUNTS / sizeof COUNTS[0]; i++) {
            struct shape s = {.count = COUNTS[i / 2],
                              .shift = i % 2,
                              .is_small = i / 2 % 2 == 0,
                              .in_place = i % 2 == 0};
            check(h, &s, (enum kern_type)type);
        }
        harness_close(h);
    }
}

/* One case whose arrays all have `count` elements behind the shift. */
static void check_one(struct harness *h, const struct shape *s, const char *name,
                      void (*call)(struct harness_run *r), const struct harness_array *arrays,
                      uint32_t count)
{
    struct harness_case c = {.name = name, .call = call, .arg = s, .seed = s->count};
    for (uint32_t i = 0; i < count; i++) {
        c.arrays[i] = arrays[i];
        c.arrays[i].count = s->count + s->shift;
    }
    harness_check(h, &c);
}

/* ---- activations ---- */

static void swiglu_forward(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->swiglu_forward(r->k, real(r, 0), real(r, 1), real(r, 2), s->count);
}

/* In place, as the model calls it: dgate over gate, dup over up. */
static void swiglu_backward(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->swiglu_backward(r->k, real(r, 0), real(r, 1), real(r, 2), real(r, 0), real(r, 1),
                            s->count);
}

static void check_swiglu(struct harness *h, const struct shape *s, enum kern_type type)
{
    double ulps = type == KERN_BF16 ? 0.55 : 16;
    const struct harness_array forward[] = {
        {HARNESS_OUT, HARNESS_REAL, .ulps = ulps, .absolute = 1e-6},
        {HARNESS_IN, HARNESS_REAL, .stddev = 4},
        {HARNESS_IN, HARNESS_REAL, .stddev = 1}};
    const struct harness_array backward[] = {
        {HARNESS_INOUT, HARNESS_REAL, .stddev = 4, .ulps = ulps, .absolute = 2e-6},
        {HARNESS_INOUT, HARNESS_REAL, .stddev = 1, .ulps = ulps, .absolute = 2e-6},
        {HARNESS_IN, HARNESS_REAL, .stddev = 1}};
    check_one(h, s, "swiglu_forward", swiglu_forward, forward, 3);
    check_one(h, s, "swiglu_backward", swiglu_backward, backward, 3);
}

static void test_swiglu_is_the_cpus(void **state)
{
    (void)state;
    for_counts(check_swiglu);
}

static void gelu_forward(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->gelu_forward(r->k, real(r, 0), real(r, 1), s->count);
}

static void gelu_backward(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->gelu_backward(r->k, real(r, 0), real(r, 0), real(r, 1), s->count);
}

static void check_gelu(struct harness *h, const struct shape *s, enum kern_type type)
{
    double ulps = type == KERN_BF16 ? 0.55 : 16;
    const struct harness_array forward[] = {
        {HARNESS_OUT, HARNESS_REAL, .ulps = ulps, .absolute = 1e-6},
        {HARNESS_IN, HARNESS_REAL, .stddev = 3}};
    const struct harness_array backward[] = {
        {HARNESS_INOUT, HARNESS_REAL, .stddev = 1, .ulps = ulps, .absolute = 2e-6},
        {HARNESS_IN, HARNESS_REAL, .stddev = 3}};
    check_one(h, s, "gelu_forward", gelu_forward, forward, 2);
    check_one(h, s, "gelu_backward", gelu_backward, backward, 2);
}

static void test_gelu_is_the_cpus(void **state)
{
    (void)state;
    for_counts(check_gelu);
}

/* ---- far from zero: what saturates must not become a NaN ---- */

static void test_activations_saturate(void **state)
{
    (void)state;
    static const float far[8] = {-200.0f, -90.0f, -60.0f, -0.0f, 0.0f, 60.0f, 90.0f, 200.0f};
    struct shape s = {.count = 8};
    for (uint32_t type = KERN_F32; type <= KERN_BF16; type++) {
        struct harness *h = harness_open((enum kern_type)type, &OPS);
        const struct harness_array x = {HARNESS_IN, HARNESS_REAL, .from = far};
        const struct harness_array ones = {HARNESS_IN, HARNESS_REAL, .mean = 1};
        const struct harness_array out = {HARNESS_OUT, HARNESS_REAL, .ulps = 2, .absolute = 1e-20};
        struct harness_array gate = {HARNESS_INOUT, HARNESS_REAL, .ulps = 2, .absolute = 1e-20};
        struct harness_array up = gate;
        gate.from = far;
        up.mean = 1;
        check_one(h, &s, "swiglu_forward", swiglu_forward,
                  (const struct harness_array[]){out, x, ones}, 3);
        check_one(h, &s, "swiglu_backward", swiglu_backward,
                  (const struct harness_array[]){gate, up, ones}, 3);
        check_one(h, &s, "gelu_forward", gelu_forward, (const struct harness_array[]){out, x}, 2);
        check_one(h, &s, "gelu_backward", gelu_backward, (const struct harness_array[]){up, x}, 2);
        harness_close(h);
    }
}

/* ---- types and sums: the same bits ---- */

static void round_all(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->round(r->k, real(r, 0), f32(r, 1), s->count);
}

static void widen_all(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->widen(r->k, f32(r, 0), real(r, 1), s->count);
}

static void add_real(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->add_real(r->k, real(r, 0), real(r, s->in_place ? 0 : 1), real(r, 2), s->count);
}

static void add(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->add(r->k, f32(r, 0), f32(r, 1), f32(r, s->in_place ? 0 : 2), s->count);
}

static void scale(struct harness_run *r)
{
    r->ops->scale(r->k, f32(r, 0), 0.3f, ((const struct shape *)r->arg)->count);
}

static void check_types_and_sums(struct harness *h, const struct shape *s, enum kern_type type)
{
    (void)type;
    const struct harness_array real_out = {.role = HARNESS_OUT, .kind = HARNESS_REAL};
    const struct harness_array real_in = {HARNESS_IN, HARNESS_REAL, .stddev = 3};
    const struct harness_array real_both = {HARNESS_INOUT, HARNESS_REAL, .stddev = 1};
    const struct harness_array out = {.role = HARNESS_OUT, .kind = HARNESS_F32};
    const struct harness_array in = {HARNESS_IN, HARNESS_F32, .stddev = 3};
    const struct harness_array both = {HARNESS_INOUT, HARNESS_F32, .stddev = 1};
    check_one(h, s, "round", round_all, (const struct harness_array[]){real_out, in}, 2);
    check_one(h, s, "widen", widen_all, (const struct harness_array[]){out, real_in}, 2);
    check_one(h, s, "add_real", add_real,
              (const struct harness_array[]){real_both, real_in, real_in}, 3);
    check_one(h, s, "add", add, (const struct harness_array[]){both, in, in}, 3);
    check_one(h, s, "scale", scale, (const struct harness_array[]){both}, 1);
}

static void test_types_and_sums_have_the_cpus_bits(void **state)
{
    (void)state;
    for_counts(check_types_and_sums);
}

static void sum_parts(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->sum_parts(r->k, s->in_place ? r->p[1] : r->p[0], r->p[1], r->k->type, s->parts,
                      s->count);
}

static void check_sum_parts(struct harness *h, const struct shape *at, enum kern_type type)
{
    (void)type;
    for (uint32_t parts = 1; parts <= 5; parts += 2) {
        struct shape s = *at;
        s.parts = parts;
        harness_check(
            h, &(struct harness_case){.name = "sum_parts",
                                      .call = sum_parts,
                                      .arg = &s,
                                      .seed = parts,
                                      .arrays = {{HARNESS_OUT, HARNESS_REAL, s.count},
                                                 {s.in_place ? HARNESS_INOUT : HARNESS_IN,
                                                  HARNESS_REAL, s.count * parts, .stddev = 1}}});
    }
}

static void test_sum_parts_has_the_cpus_bits(void **state)
{
    (void)state;
    for_counts(check_sum_parts);
}

static void sumsq_blocks(struct harness_run *r)
{
    const struct shape *s = r->arg;
    r->ops->sumsq_blocks(r->k, r->p[0], f32(r, 1), s->count);
}

static void test_sumsq_has_the_cpus_bits(void **state)
{
    (void)state;
    static const uint64_t counts[] = {1, 5, 13, 127, 4096, 4097, 4 * 4096 + 9, 40 * 4096 + 2000};
    struct harness *h = harness_open(KERN_BF16, &OPS);
    for (uint32_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        struct shape s = {.count = counts[i], .shift = i % 2};
        harness_check(h,
                      &(struct harness_case){
                          .name = "sumsq_blocks",
                          .call = sumsq_blocks,
                          .arg = &s,
                          .seed = i,
                          .arrays = {{HARNESS_OUT, HARNESS_F64, (s.count + 4095) / 4096},
                                     {HARNESS_IN, HARNESS_F32, s.count + s.shift, .stddev = 1}}});
    }
    harness_close(h);
}

/* ---- AdamW ---- */

enum { PARTS = 95, STATE = 4 * 9000 + PARTS * 64 };

/* Three launches of parts; long ones, short ones, empty ones, unaligned ones, and every second in
 * place. */
static void adamw(struct harness_run *r)
{
    const struct shape *s = r->arg;
    struct kern_adamw_part parts[PARTS];
    struct kern_adamw_step step;
    float *out[3] = {r->p[0], r->p[1], r->p[2]}, *in[3] = {r->p[3], r->p[4], r->p[5]};
    uint64_t at = 0;
    for (uint32_t i = 0; i < PARTS; i++) {
        uint64_t count = i % 30 == 7 ? 8900 : i % 11 == 3 ? 0 : 1 + i % 60;
        int in_place = i % 2;
        at += in_place ? s->shift : 0;
        assert_true(at + count <= STATE);
        parts[i] = (struct kern_adamw_part){.out_param = (in_place ? in[0] : out[0]) + at,
                                            .out_m = (in_place ? in[1] : out[1]) + at,
                                            .out_v = (in_place ? in[2] : out[2]) + at,
                                            .param = in[0] + at,
                                            .m = in[1] + at,
                                            .v = in[2] + at,
                                            .grad = (const float *)r->p[6] + at,
                                            .count = count,
                                            .weight_decay = i % 3 == 0 ? 0.0f : 0.1f};
        at += count;
    }
    kern_adamw_step_init(&step, 3, 3e-3, 0.9, 0.95, 1e-8, 0.37f);
    r->ops->adamw(r->k, parts, PARTS, &step);
}

static void test_adamw_has_the_cpus_bits(void **state)
{
    (void)state;
    static float m[STATE], v[STATE], grad[STATE];
    for (uint32_t i = 0; i < STATE; i++) {
        /* Moments of any size, some so small that products are flushed to zero. */
        float size = i % 5 == 0 ? 1e-20f : i % 7 == 0 ? 1e-36f : 1e-3f;
        m[i] = (float)(kern_rng_uniform(1, i) - 0.5) * size;
        v[i] = (float)kern_rng_uniform(2, i) * size;
        grad[i] = (float)(kern_rng_uniform(3, i) - 0.5) * (i % 3 == 0 ? 1e-18f : 1.0f);
    }
    struct harness *h = harness_open(KERN_BF16, &OPS);
    for (uint32_t shift = 0; shift < 2; shift++) {
        struct shape s = {.shift = shift};
        harness_check(
            h, &(struct harness_case){.name = "adamw",
                                      .call = adamw,
                                      .arg = &s,
                                      .seed = 5,
                                      .arrays = {{HARNESS_OUT, HARNESS_F32, STATE},
                                                 {HARNESS_OUT, HARNESS_F32, STATE},
                                                 {HARNESS_OUT, HARNESS_F32, STATE},
                                                 {HARNESS_INOUT, HARNESS_F32, STATE, .stddev = 1},
                                                 {HARNESS_INOUT, HARNESS_F32, STATE, .from = m},
                                                 {HARNESS_INOUT, HARNESS_F32, STATE, .from = v},
                                                 {HARNESS_IN, HARNESS_F32, STATE, .from = grad}}});
    }
    harness_close(h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_swiglu_is_the_cpus),
        cmocka_unit_test(test_gelu_is_the_cpus),
        cmocka_unit_test(test_activations_saturate),
        cmocka_unit_test(test_types_and_sums_have_the_cpus_bits),
        cmocka_unit_test(test_sum_parts_has_the_cpus_bits),
        cmocka_unit_test(test_sumsq_has_the_cpus_bits),
        cmocka_unit_test(test_adamw_has_the_cpus_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
