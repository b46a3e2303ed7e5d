/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The two matrix products of llm.c's train_gpt2, on OpenBLAS with its own threads. `./bench train`
 * links this to a copy of that program in which its own two have other names.
 *
 *     out[N,OC] = inp[N,C] weight[OC,C]^T + bias
 *     dinp += dout weight, dweight += dout^T inp, dbias += the sum of dout over rows
 */
#include "tests/bench/llmc_blas.h"

#include <cblas.h>
#include <string.h>

void matmul_forward(float *out, const float *inp, const float *weight, const float *bias, int B,
                    int T, int C, int OC)
{
    int n = B * T;
    if (bias != NULL) {
        for (int row = 0; row < n; row++) {
            memcpy(out + (size_t)row * (size_t)OC, bias, (size_t)OC * sizeof *out);
        }
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, OC, C, 1.0f, inp, C, weight, C,
                bias != NULL ? 1.0f : 0.0f, out, OC);
}

void matmul_backward(float *dinp, float *dweight, float *dbias, const float *dout, const float *inp,
                     const float *weight, int B, int T, int C, int OC)
{
    int n = B * T;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, C, OC, 1.0f, dout, OC, weight, C,
                1.0f, dinp, C);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, OC, C, n, 1.0f, dout, OC, inp, C, 1.0f,
                dweight, C);
    for (int row = 0; dbias != NULL && row < n; row++) {
        for (int o = 0; o < OC; o++) {
            dbias[o] += dout[(size_t)row * (size_t)OC + (size_t)o];
        }
    }
}
