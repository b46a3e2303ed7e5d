/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define STATE_ALIGN 64u /* as slots have it: then both look alike and a copy is one piece */

static uint64_t extent_bytes(const struct train_extent *e)
{
    return (e->flat_hi - e->flat_lo) * sizeof(float);
}

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + STATE_ALIGN - 1) / STATE_ALIGN * STATE_ALIGN;
}

/* ---- life ---- */

uint64_t train_state_bytes(const struct train_shard *shard)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < shard->extent_count; i++) {
        bytes += TRAIN_PARTS * aligned(extent_bytes(&shard->extents[i]));
    }
    return bytes;
}

static float *place(struct train_state *s, uint64_t *at, const struct train_extent *e)
{
    float *here = (float *)(void *)(s->memory + *at);
    *at += aligned(extent_bytes(e));
    return here;
}

/* All weights, all first moments, all second moments, as a slot has them. */
static void place_parts(struct train_state *s)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < s->shard->extent_count; i++) {
        s->parts[i].out_param = place(s, &at, &s->shard->extents[i]);
    }
    for (uint32_t i = 0; i < s->shard->extent_count; i++) {
        s->parts[i].out_m = place(s, &at, &s->shard->extents[i]);
    }
    for (uint32_t i = 0; i < s->shard->extent_count; i++) {
        struct kern_adamw_part *p = &s->parts[i];
        p->out_v = place(s, &at, &s->shard->extents[i]);
        p->param = p->out_param;
        p->m = p->out_m;
        p->v = p->out_v;
        p->count = s->shard->extents[i].flat_hi - s->shard->extents[i].flat_lo;
    }
    BL_ASSERT(at == s->bytes);
}

int train_state_init(struct train_state *state, struct kern *kern, const struct train_shard *shard,
                     struct bl_errmsg *msg)
{
    memset(state, 0, sizeof *state);
    state->kern = kern;
    state->shard = shard;
    state->bytes = train_state_bytes(shard);
    state->parts = calloc((size_t)shard->extent_count + 1, sizeof *state->parts);
    if (state->bytes != 0) { /* a rank may own nothing */
        state->memory = kern->ops->alloc(kern, state->bytes);
    }
    if (state->parts == NULL || (state->bytes != 0 && state->memory == NULL)) {
        uint64_t bytes = state->bytes;
        train_state_close(state);
        return bl_err_code(msg, -ENOMEM, "%llu bytes of the device for weights and moments",
                           (unsigned long long)bytes);
    }
    if (state->bytes != 0) { /* what lies between extents is copied out with them */
        kern->ops->zero(kern, state->memory, state->bytes);
    }
    place_parts(state);
    return 0;
}

void train_state_forget(struct train_state *state)
{
    for (uint32_t i = 0; i < TRAIN_STATE_HOSTS; i++) {
        struct train_state_host *h = &state->hosts[i];
        if (h->memory != NULL) {
            state->kern->ops->host_unregister(state->kern, h->memory, h->bytes);
        }
        *h = (struct train_state_host){NULL, 0};
    }
}

void train_state_close(struct train_state *state)
{
    if (state->kern != NULL) {
        BL_IGNORE(train_state_wait(state, NULL), "nobody wants the slot any more");
        train_state_forget(state);
        state->kern->ops->free(state->kern, state->memory, state->bytes);
    }
    free(state->parts);
    memset(state, 0, sizeof *state);
}

/* ---- copies ---- */

/* A run of state and slot that is one copy. */
struct state_run {
    char *device, *host;
    uint64_t bytes;
};

/* Whether the next part goes on where the run ends, but for the same few bytes of padding. */
static int is_next(const struct state_run *run, const char *device, const char *host)
{
    return run->bytes != 0 && device - run->device == host - run->host &&
           device >= run->device + run->bytes &&
           device - (run->device + run->bytes) < (ptrdiff_t)STATE_ALIGN;
}

static void copy_run(struct train_state *s, const struct state_run *run, int out)
{
    if (run->bytes == 0) {
        return;
    }
    if (out) {
        s->kern->ops->publish(s->kern, run->host, run->device, run->bytes);
    } else {
        s->kern->ops->upload(s->kern, run->device, run->host, run->bytes);
    }
}

static float *part_place(const struct train_state *s, uint32_t extent, int part)
{
    const struct kern_adamw_part *p = &s->parts[extent];
    return part == TRAIN_WEIGHT ? p->out_param : part == TRAIN_MOMENT1 ? p->out_m : p->out_v;
}

static void copy_all(struct train_state *s, char *slot, int out)
{
    struct state_run run = {NULL, NULL, 0};
    for (int part = 0; part < TRAIN_PARTS; part++) {
        for (uint32_t i = 0; i < s->shard->extent_count; i++) {
            const struct train_extent *e = &s->shard->extents[i];
            char *device = (char *)part_place(s, i, part);
            char *host = (char *)train_extent_data(slot, e, (enum train_state_part)part);
            if (is_next(&run, device, host)) {
                run.bytes = (uint64_t)(device - run.device) + extent_bytes(e);
                continue;
            }
            copy_run(s, &run, out);
            run = (struct state_run){device, host, extent_bytes(e)};
        }
    }
    copy_run(s, &run, out);
}

int train_state_load(struct train_state *state, const void *slot, struct bl_errmsg *msg)
{
    int rc = state->is_publishing ? train_state_wait(state, msg) : 0;
    if (rc == 0) {
        copy_all(state, (char *)(uintptr_t)slot, 0); /* only read from */
        rc = state->kern->ops->sync(state->kern, msg);
    }
    state->failed = rc;
    return rc;
}

/* Bytes of a slot, from its first to the last that extents have. */
static uint64_t slot_bytes(const struct train_shard *shard)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < shard->extent_count; i++) {
        const struct train_extent *e = &shard->extents[i];
        for (int part = 0; part < TRAIN_PARTS; part++) {
            uint64_t here = e->offset[part] + extent_bytes(e);
            end = here > end ? here : end;
        }
    }
    return end;
}

/* Page-locks a slot that comes for the first time. Without it copies are slower, not wrong. */
static void meet(struct train_state *s, void *slot)
{
    for (uint32_t i = 0; i < TRAIN_STATE_HOSTS; i++) {
        struct train_state_host *h = &s->hosts[i];
        if (h->memory == slot) {
            return;
        }
        uint64_t bytes = slot_bytes(s->shard);
        if (h->memory == NULL && bytes != 0) {
            if (s->kern->ops->host_register(s->kern, slot, bytes, NULL) == 0) {
                *h = (struct train_state_host){slot, bytes};
            }
            return;
        }
    }
}

void train_state_publish(struct train_state *state, void *slot)
{
    BL_ASSERT(!state->is_publishing);
    meet(state, slot);
    copy_all(state, slot, 1);
    state->is_publishing = 1;
}

int train_state_wait(struct train_state *state, struct bl_errmsg *msg)
{
    if (state->is_publishing) {
        state->is_publishing = 0;
        state->failed = state->kern->ops->publish_wait(state->kern, msg);
        return state->failed;
    }
    return state->failed == 0 ? 0 : bl_err_code(msg, state->failed, "the state on the device");
}

int train_state_is_out(struct train_state *state)
{
    return !state->is_publishing || state->failed != 0 ||
           state->kern->ops->publish_done(state->kern);
}

/* ---- the update ---- */

const float *train_state_weights(const struct train_state *state, uint32_t extent)
{
    return state->parts[extent].param;
}

void train_state_apply(struct train_state *state, const struct kern_adamw_step *step,
                       float weight_decay, const float *grads, uint32_t first, uint32_t end)
{
    uint32_t count;
    const struct train_tensor *tensors = train_model_tensors(state->shard->model, &count);
    BL_ASSERT(!state->is_publishing);
    for (uint32_t i = first; i < end; i++) {
        const struct train_extent *e = &state->shard->extents[i];
        state->parts[i].grad = grads + (e->at - state->shard->own_lo);
        state->parts[i].weight_decay = tensors[e->tensor].decay ? weight_decay : 0.0f;
    }
    if (first < end) {
        state->kern->ops->adamw(state->kern, state->parts + first, end - first, step);
    }
}
