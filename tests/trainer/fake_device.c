/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_device.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ALIGN         256u
#define BLOCKS_MAX    4096u
#define WITHOUT_ARENA (1ull << 28)
#define FILL_MAX      (1u << 15)
#define PENDING_MAX   1024u

struct block { /* given out, ascending */
    uint64_t at, bytes;
};

struct pending { /* until the next sync */
    void *host;
    void *copy; /* of what is to be there, or of what was uploaded */
    uint64_t bytes;
};

struct fake_device {
    struct kern base;
    struct kern *cpu;
    char *arena;
    uint64_t arena_bytes;
    uint32_t mapped; /* openings */
    struct block blocks[BLOCKS_MAX];
    uint32_t block_count;
    uint64_t used, used_max;
    struct pending downloads[PENDING_MAX], uploads[PENDING_MAX], publishes[PENDING_MAX];
    uint32_t download_count, upload_count, publish_count;
    uint32_t asked; /* publish_done since the last publish */
};

static struct fake_device *of(struct kern *k)
{
    return (struct fake_device *)k;
}

static const struct fake_device *view(const struct kern *k)
{
    return (const struct fake_device *)k;
}

/* ---- memory ---- */

static void dev_map(struct kern *k)
{
    struct fake_device *d = of(k);
    if (d->mapped++ == 0) {
        BL_ASSERT(mprotect(d->arena, d->arena_bytes, PROT_READ | PROT_WRITE) == 0);
    }
}

static void dev_unmap(struct kern *k)
{
    struct fake_device *d = of(k);
    if (--d->mapped == 0) {
        BL_ASSERT(mprotect(d->arena, d->arena_bytes, PROT_NONE) == 0);
    }
}

uint64_t fake_device_used(const struct kern *k)
{
    return view(k)->used;
}

uint64_t fake_device_used_max(const struct kern *k)
{
    return view(k)->used_max;
}

static void *dev_alloc(struct kern *k, uint64_t bytes)
{
    struct fake_device *d = of(k);
    uint64_t at = 0, whole = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    uint32_t i = 0;
    whole = whole == 0 ? ALIGN : whole;
    while (i < d->block_count && d->blocks[i].at - at < whole) {
        at = d->blocks[i].at + d->blocks[i].bytes;
        i++;
    }
    if (d->arena_bytes - at < whole || d->block_count == BLOCKS_MAX) {
        return NULL;
    }
    memmove(&d->blocks[i + 1], &d->blocks[i], (d->block_count - i) * sizeof d->blocks[0]);
    d->blocks[i] = (struct block){at, whole};
    d->block_count++;
    d->used += whole;
    d->used_max = d->used > d->used_max ? d->used : d->used_max;
    dev_map(k);
    /* "Contents undefined". Not of all that is large: each page in use costs time in every call. */
    memset(d->arena + at, 0xA5, whole < FILL_MAX ? whole : FILL_MAX);
    dev_unmap(k);
    return d->arena + at;
}

static void dev_free(struct kern *k, void *p, uint64_t bytes)
{
    struct fake_device *d = of(k);
    uint32_t i = 0;
    (void)bytes;
    if (p == NULL) {
        return;
    }
    while (i < d->block_count && d->arena + d->blocks[i].at != (char *)p) {
        i++;
    }
    BL_ASSERT(i < d->block_count && d->blocks[i].bytes >= bytes);
    d->used -= d->blocks[i].bytes;
    d->block_count--;
    memmove(&d->blocks[i], &d->blocks[i + 1], (d->block_count - i) * sizeof d->blocks[0]);
}

static int is_ours(const struct fake_device *d, const void *p, uint64_t bytes)
{
    const char *c = p;
    return c >= d->arena && c + bytes <= d->arena + d->arena_bytes;
}

/* ---- copies ---- */

static void remember(struct kern *k, struct pending *list, uint32_t *count, void *host,
                     const void *from, uint64_t bytes)
{
    BL_ASSERT(*count < PENDING_MAX && !is_ours(of(k), host, 1));
    struct pending *p = &list[(*count)++];
    *p = (struct pending){host, malloc(bytes + 1), bytes};
    BL_ASSERT(p->copy != NULL);
    dev_map(k);
    memcpy(p->copy, from, bytes);
    dev_unmap(k);
}

static void deliver(struct pending *list, uint32_t *count)
{
    for (uint32_t i = 0; i < *count; i++) {
        memcpy(list[i].host, list[i].copy, list[i].bytes);
        free(list[i].copy);
    }
    *count = 0;
}

static int dev_sync(struct kern *k, struct bl_errmsg *msg)
{
    struct fake_device *d = of(k);
    for (uint32_t i = 0; i < d->upload_count; i++) {
        BL_ASSERT(memcmp(d->uploads[i].host, d->uploads[i].copy, d->uploads[i].bytes) == 0);
        free(d->uploads[i].copy);
    }
    d->upload_count = 0;
    deliver(d->downloads, &d->download_count);
    return d->cpu->ops->sync(d->cpu, msg);
}

static void dev_upload(struct kern *k, void *to, const void *host, uint64_t bytes)
{
    struct fake_device *d = of(k);
    BL_ASSERT(is_ours(d, to, bytes));
    remember(k, d->uploads, &d->upload_count, (void *)(uintptr_t)host, host, bytes);
    dev_map(k);
    memcpy(to, host, bytes);
    dev_unmap(k);
}

static void dev_download(struct kern *k, void *host, const void *from, uint64_t bytes)
{
    struct fake_device *d = of(k);
    BL_ASSERT(is_ours(d, from, bytes));
    remember(k, d->downloads, &d->download_count, host, from, bytes);
}

static void dev_publish(struct kern *k, void *host, const void *from, uint64_t bytes)
{
    struct fake_device *d = of(k);
    BL_ASSERT(is_ours(d, from, bytes) && d->publish_count < PENDING_MAX);
    /* Late, from what is there then: whoever changes it meanwhile is found out by the digest. */
    d->publishes[d->publish_count++] = (struct pending){host, (void *)(uintptr_t)from, bytes};
    d->asked = 0;
}

static int dev_publish_wait(struct kern *k, struct bl_errmsg *msg)
{
    struct fake_device *d = of(k);
    (void)msg;
    dev_map(k);
    for (uint32_t i = 0; i < d->publish_count; i++) {
        memcpy(d->publishes[i].host, d->publishes[i].copy, d->publishes[i].bytes);
    }
    dev_unmap(k);
    d->publish_count = 0;
    return 0;
}

static int dev_publish_done(struct kern *k)
{
    struct fake_device *d = of(k);
    return d->publish_count == 0 || d->asked++ > 3;
}

static void dev_copy(struct kern *k, void *to, const void *from, uint64_t bytes)
{
    BL_ASSERT(is_ours(of(k), to, bytes) && is_ours(of(k), from, bytes));
    dev_map(k);
    memmove(to, from, bytes);
    dev_unmap(k);
}

static void dev_zero(struct kern *k, void *to, uint64_t bytes)
{
    BL_ASSERT(is_ours(of(k), to, bytes));
    dev_map(k);
    memset(to, 0, bytes);
    dev_unmap(k);
}

static int dev_host_register(struct kern *k, void *host, uint64_t bytes, struct bl_errmsg *msg)
{
    (void)k;
    (void)host;
    (void)bytes;
    (void)msg;
    return 0;
}

static void dev_host_unregister(struct kern *k, void *host, uint64_t bytes)
{
    (void)k;
    (void)host;
    (void)bytes;
}

/* ---- life ---- */

static void dev_close(struct kern *k)
{
    struct fake_device *d = of(k);
    BL_IGNORE(dev_sync(k, NULL), "it is over");
    d->cpu->ops->close(d->cpu);
    munmap(d->arena, d->arena_bytes);
    free(d);
}

static const char *dev_build_name(struct kern *k)
{
    static char name[256];
    snprintf(name, sizeof name, "device that is none, %s", of(k)->cpu->ops->build_name(of(k)->cpu));
    return name;
}

static int dev_probe(struct kern *k, const struct kern_matmul_shape *shapes, uint32_t count,
                     uint64_t *ret_digest, struct bl_errmsg *msg)
{
    return of(k)->cpu->ops->probe(of(k)->cpu, shapes, count, ret_digest, msg);
}

/* ---- operations: the CPU's, with the memory there ---- */

#define CPU (of(k)->cpu)
#define CALL(call)                                                                                 \
    do {                                                                                           \
        dev_map(k);                                                                                \
        CPU->ops->call;                                                                            \
        dev_unmap(k);                                                                              \
    } while (0)

static void dev_round(struct kern *k, kern_real *out, const float *a, uint64_t count)
{
    CALL(round(CPU, out, a, count));
}

static void dev_widen(struct kern *k, float *out, const kern_real *a, uint64_t count)
{
    CALL(widen(CPU, out, a, count));
}

static uint64_t dev_tokens_bytes(struct kern *k, uint32_t n)
{
    return CPU->ops->tokens_bytes(CPU, n);
}

static void dev_tokens_set(struct kern *k, struct kern_tokens *t, const int32_t *host, uint32_t n,
                           uint32_t lo, uint32_t hi)
{
    CALL(tokens_set(CPU, t, host, n, lo, hi));
}

static void dev_embedding_forward(struct kern *k, kern_real *out, const struct kern_tokens *t,
                                  const kern_real *weight, uint32_t c, uint32_t lo, uint32_t hi)
{
    CALL(embedding_forward(CPU, out, t, weight, c, lo, hi));
}

static void dev_embedding_backward(struct kern *k, float *dweight, const kern_real *dout,
                                   const struct kern_tokens *t, uint32_t c, uint32_t lo,
                                   uint32_t hi, int add)
{
    CALL(embedding_backward(CPU, dweight, dout, t, c, lo, hi, add));
}

static void dev_position_forward(struct kern *k, kern_real *out, const kern_real *weight,
                                 uint32_t n, uint32_t c, uint32_t t_count, uint32_t pos)
{
    CALL(position_forward(CPU, out, weight, n, c, t_count, pos));
}

static void dev_position_backward(struct kern *k, float *dweight, const kern_real *dout, uint32_t n,
                                  uint32_t c, uint32_t t_count, uint32_t rows, int add)
{
    CALL(position_backward(CPU, dweight, dout, n, c, t_count, rows, add));
}

static void dev_rmsnorm_forward(struct kern *k, kern_real *out, float *rstd, const kern_real *x,
                                const kern_real *weight, uint32_t n, uint32_t c, float eps)
{
    CALL(rmsnorm_forward(CPU, out, rstd, x, weight, n, c, eps));
}

static void dev_rmsnorm_backward(struct kern *k, kern_real *dx, float *dweight,
                                 const kern_real *dout, const kern_real *x, const kern_real *weight,
                                 const float *rstd, void *scratch, uint32_t n, uint32_t c, int add)
{
    CALL(rmsnorm_backward(CPU, dx, dweight, dout, x, weight, rstd, scratch, n, c, add));
}

static void dev_layernorm_forward(struct kern *k, kern_real *out, float *mean, float *rstd,
                                  const kern_real *x, const kern_real *weight,
                                  const kern_real *bias, uint32_t n, uint32_t c, float eps)
{
    CALL(layernorm_forward(CPU, out, mean, rstd, x, weight, bias, n, c, eps));
}

static void dev_layernorm_backward(struct kern *k, kern_real *dx, float *dweight, float *dbias,
                                   const kern_real *dout, const kern_real *x,
                                   const kern_real *weight, const float *mean, const float *rstd,
                                   void *scratch, uint32_t n, uint32_t c, int add)
{
    CALL(layernorm_backward(CPU, dx, dweight, dbias, dout, x, weight, mean, rstd, scratch, n, c,
                            add));
}

static uint64_t dev_norm_scratch(struct kern *k, uint32_t n, uint32_t c)
{
    return CPU->ops->norm_scratch(CPU, n, c);
}

static void dev_rope_forward(struct kern *k, kern_real *x, const float *table, uint32_t n,
                             uint32_t t_count, uint32_t heads, uint32_t head_dim, uint32_t pos)
{
    CALL(rope_forward(CPU, x, table, n, t_count, heads, head_dim, pos));
}

static void dev_rope_backward(struct kern *k, kern_real *dx, const float *table, uint32_t n,
                              uint32_t t_count, uint32_t heads, uint32_t head_dim)
{
    CALL(rope_backward(CPU, dx, table, n, t_count, heads, head_dim));
}

static uint64_t dev_attention_scratch(struct kern *k, const struct kern_attention_shape *shape)
{
    return CPU->ops->attention_scratch(CPU, shape);
}

static void dev_attention_forward(struct kern *k, kern_real *out, float *stats, const kern_real *q,
                                  const kern_real *kk, const kern_real *v, void *scratch,
                                  const struct kern_attention_shape *shape)
{
    CALL(attention_forward(CPU, out, stats, q, kk, v, scratch, shape));
}

static void dev_attention_backward(struct kern *k, kern_real *dq, kern_real *dk, kern_real *dv,
                                   const kern_real *dout, const kern_real *out, const float *stats,
                                   const kern_real *q, const kern_real *kk, const kern_real *v,
                                   void *scratch, const struct kern_attention_shape *shape)
{
    CALL(attention_backward(CPU, dq, dk, dv, dout, out, stats, q, kk, v, scratch, shape));
}

static void dev_matmul_forward(struct kern *k, kern_real *y, const kern_real *x, const kern_real *w,
                               const kern_real *bias, struct kern_matmul_shape shape)
{
    CALL(matmul_forward(CPU, y, x, w, bias, shape));
}

static void dev_matmul_dx(struct kern *k, kern_real *dx, const kern_real *dy, const kern_real *w,
                          struct kern_matmul_shape shape, int add)
{
    CALL(matmul_dx(CPU, dx, dy, w, shape, add));
}

static void dev_matmul_dw(struct kern *k, float *dw, const kern_real *dy, const kern_real *x,
                          struct kern_matmul_shape shape, int add)
{
    CALL(matmul_dw(CPU, dw, dy, x, shape, add));
}

static int dev_matmul_plan(struct kern *k, const struct kern_matmul_shape *shapes, uint32_t count,
                           struct bl_errmsg *msg)
{
    return CPU->ops->matmul_plan(CPU, shapes, count, msg);
}

static void dev_bias_forward(struct kern *k, kern_real *y, const kern_real *bias, uint32_t n,
                             uint32_t o)
{
    CALL(bias_forward(CPU, y, bias, n, o));
}

static void dev_bias_backward(struct kern *k, float *dbias, const kern_real *dy, void *scratch,
                              uint32_t n, uint32_t o, int add)
{
    CALL(bias_backward(CPU, dbias, dy, scratch, n, o, add));
}

static void dev_swiglu_forward(struct kern *k, kern_real *out, const kern_real *gate,
                               const kern_real *up, uint64_t count)
{
    CALL(swiglu_forward(CPU, out, gate, up, count));
}

static void dev_swiglu_backward(struct kern *k, kern_real *dgate, kern_real *dup,
                                const kern_real *dout, const kern_real *gate, const kern_real *up,
                                uint64_t count)
{
    CALL(swiglu_backward(CPU, dgate, dup, dout, gate, up, count));
}

static void dev_gelu_forward(struct kern *k, kern_real *out, const kern_real *x, uint64_t count)
{
    CALL(gelu_forward(CPU, out, x, count));
}

static void dev_gelu_backward(struct kern *k, kern_real *dx, const kern_real *dout,
                              const kern_real *x, uint64_t count)
{
    CALL(gelu_backward(CPU, dx, dout, x, count));
}

static void dev_add_real(struct kern *k, kern_real *out, const kern_real *a, const kern_real *b,
                         uint64_t count)
{
    CALL(add_real(CPU, out, a, b, count));
}

static void dev_cross_entropy(struct kern *k, kern_real *logits, double *losses,
                              const struct kern_tokens *t, uint32_t first, uint32_t n,
                              uint32_t vocab, int backward)
{
    CALL(cross_entropy(CPU, logits, losses, t, first, n, vocab, backward));
}

static void dev_cross_entropy_top(struct kern *k, float *tops, const kern_real *logits,
                                  const struct kern_tokens *t, uint32_t first, uint32_t n,
                                  uint32_t columns)
{
    CALL(cross_entropy_top(CPU, tops, logits, t, first, n, columns));
}

static void dev_cross_entropy_sum(struct kern *k, double *sums, kern_real *logits,
                                  const float *tops, const struct kern_tokens *t, uint32_t first,
                                  uint32_t n, uint32_t lo, uint32_t columns, int backward)
{
    CALL(cross_entropy_sum(CPU, sums, logits, tops, t, first, n, lo, columns, backward));
}

static void dev_cross_entropy_finish(struct kern *k, kern_real *logits, double *losses,
                                     const float *tops, const double *sums,
                                     const struct kern_tokens *t, uint32_t first, uint32_t n,
                                     uint32_t lo, uint32_t columns, int backward)
{
    CALL(cross_entropy_finish(CPU, logits, losses, tops, sums, t, first, n, lo, columns, backward));
}

static void dev_loss_total(struct kern *k, double *total, const double *losses, uint32_t n, int add)
{
    CALL(loss_total(CPU, total, losses, n, add));
}

static void dev_tops_merge(struct kern *k, float *tops, const float *parts, uint32_t count,
                           uint32_t n)
{
    CALL(tops_merge(CPU, tops, parts, count, n));
}

static void dev_sums_merge(struct kern *k, double *sums, const double *parts, uint32_t count,
                           uint32_t n)
{
    CALL(sums_merge(CPU, sums, parts, count, n));
}

static void dev_add(struct kern *k, float *out, const float *a, const float *b, uint64_t count)
{
    CALL(add(CPU, out, a, b, count));
}

static void dev_scale(struct kern *k, float *x, float factor, uint64_t count)
{
    CALL(scale(CPU, x, factor, count));
}

static void dev_sumsq_blocks(struct kern *k, double *sums, const float *x, uint64_t count)
{
    BL_ASSERT(count == 0 || is_ours(of(k), sums, 8));
    CALL(sumsq_blocks(CPU, sums, x, count));
}

static void dev_sum_parts(struct kern *k, void *out, const void *parts, uint32_t type,
                          uint32_t count, uint64_t n)
{
    CALL(sum_parts(CPU, out, parts, type, count, n));
}

static void dev_adamw(struct kern *k, const struct kern_adamw_part *parts, uint32_t part_count,
                      const struct kern_adamw_step *step)
{
    CALL(adamw(CPU, parts, part_count, step));
}

static const struct kern_ops dev_ops = {
    .name = "fake",
    .close = dev_close,
    .sync = dev_sync,
    .alloc = dev_alloc,
    .free = dev_free,
    .upload = dev_upload,
    .download = dev_download,
    .copy = dev_copy,
    .zero = dev_zero,
    .publish = dev_publish,
    .publish_wait = dev_publish_wait,
    .publish_done = dev_publish_done,
    .host_register = dev_host_register,
    .host_unregister = dev_host_unregister,
    .build_name = dev_build_name,
    .probe = dev_probe,
    .round = dev_round,
    .widen = dev_widen,
    .tokens_bytes = dev_tokens_bytes,
    .tokens_set = dev_tokens_set,
    .embedding_forward = dev_embedding_forward,
    .embedding_backward = dev_embedding_backward,
    .position_forward = dev_position_forward,
    .position_backward = dev_position_backward,
    .rmsnorm_forward = dev_rmsnorm_forward,
    .rmsnorm_backward = dev_rmsnorm_backward,
    .layernorm_forward = dev_layernorm_forward,
    .layernorm_backward = dev_layernorm_backward,
    .norm_scratch = dev_norm_scratch,
    .rope_forward = dev_rope_forward,
    .rope_backward = dev_rope_backward,
    .attention_scratch = dev_attention_scratch,
    .attention_forward = dev_attention_forward,
    .attention_backward = dev_attention_backward,
    .matmul_forward = dev_matmul_forward,
    .matmul_dx = dev_matmul_dx,
    .matmul_dw = dev_matmul_dw,
    .matmul_plan = dev_matmul_plan,
    .bias_forward = dev_bias_forward,
    .bias_backward = dev_bias_backward,
    .swiglu_forward = dev_swiglu_forward,
    .swiglu_backward = dev_swiglu_backward,
    .gelu_forward = dev_gelu_forward,
    .gelu_backward = dev_gelu_backward,
    .add_real = dev_add_real,
    .cross_entropy = dev_cross_entropy,
    .cross_entropy_top = dev_cross_entropy_top,
    .cross_entropy_sum = dev_cross_entropy_sum,
    .cross_entropy_finish = dev_cross_entropy_finish,
    .loss_total = dev_loss_total,
    .tops_merge = dev_tops_merge,
    .sums_merge = dev_sums_merge,
    .add = dev_add,
    .scale = dev_scale,
    .sumsq_blocks = dev_sumsq_blocks,
    .sum_parts = dev_sum_parts,
    .adamw = dev_adamw,
};

int fake_device_open(struct kern **ret, uint64_t arena_bytes, struct bl_errmsg *msg)
{
    struct fake_device *d = calloc(1, sizeof *d);
    BL_ASSERT(d != NULL);
    d->arena_bytes = arena_bytes != 0 ? (arena_bytes + 4095) / 4096 * 4096 : WITHOUT_ARENA;
    d->arena =
        mmap(NULL, d->arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (d->arena == MAP_FAILED) {
        int rc = -errno;
        free(d);
        return bl_err_code(msg, rc, "%llu bytes of a device", (unsigned long long)arena_bytes);
    }
    int rc = kern_cpu_open(&d->cpu, NULL, msg);
    if (rc != 0) {
        munmap(d->arena, d->arena_bytes);
        free(d);
        return rc;
    }
    d->base = *d->cpu;
    d->base.ops = &dev_ops;
    d->base.is_device = 1;
    *ret = &d->base;
    return 0;
}
