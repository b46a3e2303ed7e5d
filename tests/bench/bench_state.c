/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/bench_state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "ckpt/ckpt.h"

#define STATE_ALIGN     64u /* of a tensor's first byte, as the trainer's arenas have it */
#define STATE_BYTES_MAX (64ull << 30)
#define STATE_TURN      1000003u /* elements by which each copy is turned further */

/* Every tensor of the manifest, whole, one after the other. */
static int seed_list(struct bl_extent_list *list, const struct ckpt_manifest *manifest,
                     uint64_t *ret_bytes, struct bl_errmsg *msg)
{
    uint64_t at = 0;
    int rc = 0;

    for (uint32_t p = 0; p < manifest->part_count; p++) {
        const struct bl_extent_list *held = &manifest->parts[p].held;

        for (uint32_t i = 0; rc == 0 && i < held->tensor_count; i++) {
            const struct bl_tensor *tensor = &held->tensors[i];
            struct bl_extent extent;
            uint32_t before = list->tensor_count, index = 0;

            rc = bl_extent_list_tensor(list, tensor, &index, msg);
            if (rc < 0 || list->tensor_count == before) {
                continue; /* another part has some of it too */
            }
            bl_extent_whole(&extent, tensor, index, 0, bl_tensor_elems(tensor));
            extent.offset = at;
            at += bl_round_up(bl_tensor_elems(tensor) * bl_dtype_bytes(tensor->dtype), STATE_ALIGN);
            rc = bl_extent_list_add(list, &extent);
        }
    }
    *ret_bytes = at;
    return rc;
}

static int seed_load(struct bl_extent_list *list, uint8_t **ret_data, uint64_t *ret_bytes,
                     const char *from, struct bl_errmsg *msg)
{
    const struct ckpt_store_config config = {.path = from};
    const struct ckpt_entry *entry = NULL;
    struct ckpt_load_result result;
    struct ckpt_manifest manifest = {0};
    struct ckpt_store *store = NULL;
    struct ckpt_scan scan = {0};
    struct ckpt_dest dest = {.list = list};
    int rc = ckpt_store_open(&store, &config, msg);

    rc = rc < 0 ? rc : ckpt_scan(store, &scan, msg);
    if (rc == 0) {
        entry = ckpt_scan_newest(&scan, NULL, 0);
        rc = entry == NULL ? bl_err(msg, BL_ENOSTATE, "%s: no good checkpoint", from) : 0;
    }
    rc = rc < 0 ? rc : ckpt_manifest_load(store, entry->dir, &manifest, msg);
    rc = rc < 0 ? rc : seed_list(list, &manifest, ret_bytes, msg);
    if (rc == 0) {
        *ret_data = bl_mem_alloc(*ret_bytes);
        dest.base = *ret_data;
        rc = *ret_data == NULL ? bl_err_code(msg, -ENOMEM, "state of %s", from)
                               : ckpt_load(store, entry->dir, &dest, 1, &result, msg);
    }
    ckpt_manifest_close(&manifest);
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
    return rc;
}

/* Copy `copy` of a seed tensor: its elements turned by copy * STATE_TURN. */
static int copy_add(struct bench_state *state, const struct bl_extent_list *seed, uint32_t index,
                    const uint8_t *from, uint32_t copy, struct bl_errmsg *msg)
{
    const struct bl_extent *had = &seed->extents[index];
    struct bl_tensor tensor = seed->tensors[had->tensor];
    uint32_t each = bl_dtype_bytes(tensor.dtype);
    uint64_t elems = bl_extent_elems(had), turn = (uint64_t)copy * STATE_TURN % elems;
    struct bl_extent extent;
    char name[2 * BL_TENSOR_NAME_MAX];
    int rc;

    snprintf(name, sizeof(name), "copy%04u.%s", copy, tensor.name);
    if (strlen(name) >= sizeof(tensor.name)) {
        return bl_err(msg, BL_ELIMIT, "tensor name %s is too long", name);
    }
    memcpy(tensor.name, name, strlen(name) + 1);
    rc = bl_extent_list_tensor(&state->list, &tensor, &index, msg);
    if (rc < 0) {
        return rc;
    }
    bl_extent_whole(&extent, &tensor, index, 0, elems);
    extent.offset = state->bytes;
    from += had->offset;
    memcpy(state->data + extent.offset, from + turn * each, (elems - turn) * each);
    memcpy(state->data + extent.offset + (elems - turn) * each, from, turn * each);
    state->bytes += bl_round_up(elems * each, STATE_ALIGN);
    return bl_extent_list_add(&state->list, &extent);
}

int bench_state_init(struct bench_state *state, const char *from, uint64_t bytes_min,
                     struct bl_errmsg *msg)
{
    struct bl_extent_list seed = {0};
    uint64_t seed_bytes = 0, room = 0, copies = 0;
    uint8_t *data = NULL;
    int rc;

    memset(state, 0, sizeof(*state));
    rc = seed_load(&seed, &data, &seed_bytes, from, msg);
    if (rc == 0 && (bytes_min > STATE_BYTES_MAX || seed_bytes == 0)) {
        rc = bl_err(msg, BL_ELIMIT, "state of %llu bytes", (unsigned long long)bytes_min);
    }
    if (rc == 0) {
        copies = (bytes_min + seed_bytes - 1) / seed_bytes;
        room = copies * seed_bytes;
        state->data = bl_mem_alloc(room);
        rc = state->data == NULL
                 ? bl_err_code(msg, -ENOMEM, "state of %llu bytes", (unsigned long long)room)
                 : 0;
    }
    for (uint32_t copy = 0; rc == 0 && copy < copies; copy++) {
        for (uint32_t i = 0; rc == 0 && i < seed.extent_count; i++) {
            rc = copy_add(state, &seed, i, data, copy, msg);
        }
    }
    BL_ASSERT(rc < 0 || state->bytes == room);
    if (rc == 0) {
        bl_extent_list_digest(&state->list, state->data, &state->digest);
    }
    bl_mem_free(data, seed_bytes);
    bl_extent_list_close(&seed);
    return rc;
}

void bench_state_close(struct bench_state *state)
{
    bl_mem_free(state->data, state->bytes);
    bl_extent_list_close(&state->list);
    memset(state, 0, sizeof(*state));
}
