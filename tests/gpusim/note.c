/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What kernels want of kernels/cuda/device.c, for tests of kernels without the rest of it.
 */
#include "kernels/cuda/device.h"

#include <stdio.h>

void kern_cuda_note(struct kern *k, cudaError_t error, const char *what)
{
    struct kern_cuda *cuda = kern_cuda_of(k);
    if (error != cudaSuccess && cuda->failed == cudaSuccess) {
        cuda->failed = error;
        snprintf(cuda->failed_in, sizeof cuda->failed_in, "%s", what);
    }
}
