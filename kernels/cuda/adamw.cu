/* SPDX-License-Identifier: Apache-2.0 */
/*
 * AdamW over many ranges at once: kernels/adamw.h's sequence for each element, so the bits are
 * those of the CPU. The ranges go as an argument of the kernel, PARTS to a launch; a block takes
 * CHUNK elements of one of them.
 */
#include "kernels/cuda/pack.cuh"

namespace
{

constexpr uint32_t PARTS = 40, CHUNK = 4096;

struct parts {
    struct kern_adamw_part part[PARTS];
    uint32_t whole[PARTS];      /* all arrays begin at addresses of 16 bytes */
    uint32_t chunks[PARTS + 1]; /* before part i */
    uint32_t count;
};
static_assert(sizeof(struct parts) + sizeof(struct kern_adamw_step) <= 4000,
              "a kernel's arguments are at most 4 KiB");

template <int N>
__device__ __forceinline__ void run(const struct kern_adamw_part &p,
                                    const struct kern_adamw_step &step, uint64_t at)
{
    float param[N], m[N], v[N], grad[N];
    kern_load(param, p.param + at);
    kern_load(m, p.m + at);
    kern_load(v, p.v + at);
    kern_load(grad, p.grad + at);
#pragma unroll
    for (int i = 0; i < N; i++) {
        kern_adamw_element(&param[i], &m[i], &v[i], param[i], m[i], v[i], grad[i], &step,
                           p.weight_decay);
    }
    kern_store(p.out_param + at, param);
    kern_store(p.out_m + at, m);
    kern_store(p.out_v + at, v);
}

__global__ void __launch_bounds__(KERN_THREADS)
    adamw_kernel(const __grid_constant__ struct parts all,
                 const __grid_constant__ struct kern_adamw_step step)
{
    uint32_t low = 0, high = all.count; /* chunks[low] <= block < chunks[high] */
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (all.chunks[middle] <= blockIdx.x) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const struct kern_adamw_part &p = all.part[low];
    enum { W = kern_width<float>::W };
    uint64_t first = (uint64_t)(blockIdx.x - all.chunks[low]) * CHUNK, rest = p.count - first;
    uint32_t here = rest < CHUNK ? (uint32_t)rest : CHUNK;
    uint32_t packed = all.whole[low] ? here - here % W : 0;
    for (uint32_t i = threadIdx.x * W; i < packed; i += KERN_THREADS * W) {
        run<W>(p, step, first + i);
    }
    for (uint32_t i = packed + threadIdx.x; i < here; i += KERN_THREADS) {
        run<1>(p, step, first + i);
    }
}

uint32_t is_whole(const struct kern_adamw_part *p)
{
    return kern_is_whole(p->out_param) && kern_is_whole(p->out_m) && kern_is_whole(p->out_v) &&
           kern_is_whole(p->param) && kern_is_whole(p->m) && kern_is_whole(p->v) &&
           kern_is_whole(p->grad);
}

void launch(struct kern *k, struct parts *all, const struct kern_adamw_step *step)
{
    uint32_t blocks = all->chunks[all->count];
    if (blocks > 0) {
        KERN_LAUNCH(adamw_kernel, blocks, KERN_THREADS, 0, kern_cuda_of(k)->compute, *all, *step);
        kern_cuda_launched(k, "adamw");
    }
    all->count = 0;
}

/* Up to KERN_BLOCKS_MAX chunks of a part; the rest of it is another's. */
uint64_t take(struct parts *all, const struct kern_adamw_part *part, uint64_t from)
{
    uint32_t i = all->count++;
    uint64_t room = (uint64_t)(KERN_BLOCKS_MAX - all->chunks[i]) * CHUNK;
    uint64_t count = part->count - from < room ? part->count - from : room;
    struct kern_adamw_part *p = &all->part[i];
    *p = *part;
    p->out_param += from;
    p->out_m += from;
    p->out_v += from;
    p->param += from;
    p->m += from;
    p->v += from;
    p->grad += from;
    p->count = count;
    all->whole[i] = is_whole(p);
    all->chunks[i + 1] = all->chunks[i] + (uint32_t)((count + CHUNK - 1) / CHUNK);
    return from + count;
}

} // namespace

extern "C" void kern_cuda_adamw(struct kern *k, const struct kern_adamw_part *parts,
                                uint32_t part_count, const struct kern_adamw_step *step)
{
    struct parts all;
    all.count = 0;
    all.chunks[0] = 0;
    for (uint32_t i = 0; i < part_count; i++) {
        for (uint64_t from = 0; from < parts[i].count;) {
            from = take(&all, &parts[i], from);
            if (all.count == PARTS || all.chunks[all.count] == KERN_BLOCKS_MAX) {
                launch(k, &all, step);
            }
        }
    }
    launch(k, &all, step);
}
