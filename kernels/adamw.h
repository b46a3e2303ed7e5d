/* SPDX-License-Identifier: Apache-2.0 */
/*
 * AdamW (Loshchilov and Hutter 2019) as an exact sequence of IEEE operations, shared by all back
 * ends. Each line below is one rounded fp32 operation; on a device with fused multiply-add the
 * macros keep the compiler from contracting them (C: -ffp-contract=off).
 *
 *     g = grad * grad_scale                          m' = beta1 m + (1 - beta1) g
 *     v' = beta2 v + (1 - beta2) g^2                 u  = (m' / bc1) / (sqrt(v' / bc2) + eps)
 *     param' = param - lr (u + weight_decay param)
 *
 * with bc = 1 - beta^step; the divisions by bc are multiplications by its inverse, rounded once
 * from fp64 in kern_adamw_step_init.
 */
#ifndef KERN_KERNELS_ADAMW_H
#define KERN_KERNELS_ADAMW_H

#include <stdint.h>

#ifdef __CUDACC__
#define KERN_ADAMW_FN        __device__ __forceinline__
#define KERN_ADAMW_MUL(a, b) __fmul_rn(a, b)
#define KERN_ADAMW_ADD(a, b) __fadd_rn(a, b)
#define KERN_ADAMW_SUB(a, b) __fsub_rn(a, b)
#define KERN_ADAMW_DIV(a, b) __fdiv_rn(a, b)
#define KERN_ADAMW_SQRT(a)   __fsqrt_rn(a)
#else
#define KERN_ADAMW_FN        static inline
#define KERN_ADAMW_MUL(a, b) ((a) * (b))
#define KERN_ADAMW_ADD(a, b) ((a) + (b))
#define KERN_ADAMW_SUB(a, b) ((a) - (b))
#define KERN_ADAMW_DIV(a, b) ((a) / (b))
#define KERN_ADAMW_SQRT(a)   __builtin_sqrtf(a)
#endif

/* The numbers of one step that are the same for every element. */
struct kern_adamw_step {
    float lr;
    float beta1, beta1_rest; /* beta, 1 - beta */
    float beta2, beta2_rest;
    float bc1_inv, bc2_inv; /* 1 / (1 - beta^step) */
    float eps;
    float grad_scale; /* 1 / tokens times the clip factor; 1: gradients are scaled already */
};

/* Fills `ret` for optimizer step `step` (1 is the first). beta^step by repeated squaring in fp64;
 * each field rounded to fp32 once. Host only. */
void kern_adamw_step_init(struct kern_adamw_step *ret, uint64_t step, double lr, double beta1,
                          double beta2, double eps, float grad_scale);

/* One element: reads the old state, writes the new one. */
KERN_ADAMW_FN void kern_adamw_element(float *out_param, float *out_m, float *out_v, float param,
                                      float m, float v, float grad, const struct kern_adamw_step *s,
                                      float weight_decay)
{
    float g = KERN_ADAMW_MUL(grad, s->grad_scale);
    float m1 = KERN_ADAMW_ADD(KERN_ADAMW_MUL(s->beta1, m), KERN_ADAMW_MUL(s->beta1_rest, g));
    float g2 = KERN_ADAMW_MUL(g, g);
    float v1 = KERN_ADAMW_ADD(KERN_ADAMW_MUL(s->beta2, v), KERN_ADAMW_MUL(s->beta2_rest, g2));
    float root = KERN_ADAMW_SQRT(KERN_ADAMW_MUL(v1, s->bc2_inv));
    float u = KERN_ADAMW_DIV(KERN_ADAMW_MUL(m1, s->bc1_inv), KERN_ADAMW_ADD(root, s->eps));
    float d = KERN_ADAMW_ADD(u, KERN_ADAMW_MUL(weight_decay, param));
    *out_param = KERN_ADAMW_SUB(param, KERN_ADAMW_MUL(s->lr, d));
    *out_m = m1;
    *out_v = v1;
}

#endif
