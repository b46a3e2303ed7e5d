/* SPDX-License-Identifier: Apache-2.0 */
/* The products that tests/bench/llmc_blas.c gives to llm.c's program: its names, its arguments. */
#ifndef TESTS_BENCH_LLMC_BLAS_H
#define TESTS_BENCH_LLMC_BLAS_H

#include <stddef.h>

/* out[B*T,OC] = inp[B*T,C] weight[OC,C]^T + bias[OC], bias NULL: none. */
void matmul_forward(float *out, const float *inp, const float *weight, const float *bias, int B,
                    int T, int C, int OC);
/* Adds the gradients of inp, weight and bias (NULL: none), given dout[B*T,OC]. */
void matmul_backward(float *dinp, float *dweight, float *dbias, const float *dout, const float *inp,
                     const float *weight, int B, int T, int C, int OC);

#endif
