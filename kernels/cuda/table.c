/* SPDX-License-Identifier: Apache-2.0 */
/* The table of the CUDA back end: every operation has its function, or this does not compile. */
#include "kernels/cuda/device.h"
#include "kernels/cuda/ops.h"

#define OPS_HOST(X)                                                                                \
    X(close)                                                                                       \
    X(sync)                                                                                        \
    X(alloc)                                                                                       \
    X(free)                                                                                        \
    X(upload)                                                                                      \
    X(download)                                                                                    \
    X(copy)                                                                                        \
    X(zero)                                                                                        \
    X(publish)                                                                                     \
    X(publish_wait)                                                                                \
    X(publish_done)                                                                                \
    X(host_register)                                                                               \
    X(host_unregister)                                                                             \
    X(build_name)                                                                                  \
    X(probe)

#define OPS_MATMUL(X)                                                                              \
    X(matmul_forward)                                                                              \
    X(matmul_dx)                                                                                   \
    X(matmul_dw)                                                                                   \
    X(matmul_plan)

#define OPS_ATTENTION(X)                                                                           \
    X(attention_scratch)                                                                           \
    X(attention_forward)                                                                           \
    X(attention_backward)

#define OPS_ROWS(X)                                                                                \
    X(tokens_bytes)                                                                                \
    X(tokens_set)                                                                                  \
    X(embedding_forward)                                                                           \
    X(embedding_backward)                                                                          \
    X(position_forward)                                                                            \
    X(position_backward)                                                                           \
    X(rmsnorm_forward)                                                                             \
    X(rmsnorm_backward)                                                                            \
    X(layernorm_forward)                                                                           \
    X(layernorm_backward)                                                                          \
    X(norm_scratch)                                                                                \
    X(rope_forward)                                                                                \
    X(rope_backward)                                                                               \
    X(bias_forward)                                                                                \
    X(bias_backward)

#define OPS_ELEMENTS(X)                                                                            \
    X(round)                                                                                       \
    X(widen)                                                                                       \
    X(swiglu_forward)                                                                              \
    X(swiglu_backward)                                                                             \
    X(gelu_forward)                                                                                \
    X(gelu_backward)                                                                               \
    X(add_real)                                                                                    \
    X(add)                                                                                         \
    X(scale)                                                                                       \
    X(sumsq_blocks)                                                                                \
    X(sum_parts)                                                                                   \
    X(adamw)

#define OPS_LOSS(X)                                                                                \
    X(cross_entropy)                                                                               \
    X(cross_entropy_top)                                                                           \
    X(cross_entropy_sum)                                                                           \
    X(cross_entropy_finish)                                                                        \
    X(loss_total)                                                                                  \
    X(tops_merge)                                                                                  \
    X(sums_merge)

#define OPS(X)                                                                                     \
    OPS_HOST(X)                                                                                    \
    OPS_MATMUL(X)                                                                                  \
    OPS_ATTENTION(X)                                                                               \
    OPS_ROWS(X)                                                                                    \
    OPS_ELEMENTS(X)                                                                                \
    OPS_LOSS(X)

#define ENTRY(op) .op = kern_cuda_##op,
const struct kern_ops kern_cuda_ops = {.name = "cuda", OPS(ENTRY)};

#define ONE(op) +1
/* With `name`, these are all members of struct kern_ops: none is left NULL. */
_Static_assert((OPS(ONE) + 1) * sizeof(void (*)(void)) == sizeof(struct kern_ops),
               "one is missing");
