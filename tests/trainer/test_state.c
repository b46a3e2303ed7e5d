/* SPDX-License-Identifier: Apache-2.0 */
/* State in a device's memory: the same bits as from slot to slot, and never a slot too early. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fake_device.h"
#include "trainer/state.h"

#define ARENA (64u << 20)
#define STEPS 5u
#define DP    3u /* replicas; the middle one is tried */

struct bench {
    struct kern *kern;
    struct train_model *model;
    struct train_shard shard;
    struct train_state state;
    void *slots[2]; /* of the device, of the CPU */
    float *grads;   /* of the host */
    float *device_grads;
    uint64_t own;
};

/* Zeros behind what is written, so that whole slots can be compared. */
static void *new_slot(const struct bench *b)
{
    void *slot = calloc(1, b->shard.slot_bytes + 1);
    assert_non_null(slot);
    return slot;
}

static void bench_open(struct bench *b, uint32_t zero)
{
    static const struct bl_job_model config = {.layers = 3,
                                               .dim = 48,
                                               .hidden = 80,
                                               .heads = 4,
                                               .kv_heads = 2,
                                               .vocab = 301,
                                               .rope_theta = 10000,
                                               .norm_eps = 1e-5};
    const struct train_part whole = TRAIN_PART_WHOLE;
    struct train_grid grid;
    memset(b, 0, sizeof *b);
    assert_int_equal(fake_device_open(&b->kern, ARENA, NULL), 0);
    assert_int_equal(train_model_new_table(&b->model, &config, &whole, 16, 1, NULL), 0);
    assert_int_equal(train_grid_make(&grid, 1, DP, 1, 1, NULL), 0);
    assert_int_equal(train_shard_init(&b->shard, b->model, &grid, zero, NULL), 0);
    train_shard_layout(&b->shard);
    assert_int_equal(train_state_init(&b->state, b->kern, &b->shard, NULL), 0);
    b->slots[0] = new_slot(b);
    b->slots[1] = new_slot(b);
    b->own = b->shard.own_hi - b->shard.own_lo;
    b->grads = calloc(b->own, sizeof *b->grads);
    b->device_grads = b->kern->ops->alloc(b->kern, b->own * sizeof *b->grads);
    assert_non_null(b->grads);
    assert_non_null(b->device_grads);
    train_shard_fresh(&b->shard, b->slots[1], 3, NULL);
    memcpy(b->slots[0], b->slots[1], b->shard.slot_bytes);
}

static void bench_close(struct bench *b)
{
    train_state_close(&b->state);
    b->kern->ops->free(b->kern, b->device_grads, b->own * sizeof *b->grads);
    assert_int_equal(fake_device_used(b->kern), 0);
    train_shard_close(&b->shard);
    train_model_free(b->model);
    b->kern->ops->close(b->kern);
    free(b->slots[0]);
    free(b->slots[1]);
    free(b->grads);
}

static void make_grads(struct bench *b, uint64_t step)
{
    for (uint64_t i = 0; i < b->own; i++) {
        b->grads[i] = (float)(int64_t)(bl_mix64(step << 32 | i) % 2001) / 1000.0f - 1.0f;
    }
    b->kern->ops->upload(b->kern, b->device_grads, b->grads, b->own * sizeof *b->grads);
    assert_int_equal(b->kern->ops->sync(b->kern, NULL), 0);
}

/* One step of the CPU, in its slot. */
static void step_on_cpu(struct bench *b, const struct kern_adamw_step *k)
{
    uint32_t count;
    const struct train_tensor *tensors = train_model_tensors(b->model, &count);
    for (uint32_t i = 0; i < b->shard.extent_count; i++) {
        const struct train_extent *e = &b->shard.extents[i];
        float *w = train_extent_data(b->slots[1], e, TRAIN_WEIGHT);
        float *m = train_extent_data(b->slots[1], e, TRAIN_MOMENT1);
        float *v = train_extent_data(b->slots[1], e, TRAIN_MOMENT2);
        kern_adamw(NULL, w, m, v, w, m, v, b->grads + (e->at - b->shard.own_lo),
                   e->flat_hi - e->flat_lo, k, tensors[e->tensor].decay ? 0.1f : 0.0f);
    }
}

static void run_steps(uint32_t zero, uint64_t gap)
{
    struct bench b;
    bench_open(&b, zero);
    if (gap != 0) { /* slots of somebody else's layout: places that do not follow one another */
        b.shard.slot_bytes += gap * TRAIN_PARTS * b.shard.extent_count;
        for (int s = 0; s < 2; s++) {
            free(b.slots[s]);
            b.slots[s] = new_slot(&b);
        }
        for (uint32_t i = 0; i < b.shard.extent_count; i++) {
            for (int part = 0; part < TRAIN_PARTS; part++) {
                b.shard.extents[i].offset[part] +=
                    gap * ((uint64_t)part * b.shard.extent_count + i);
            }
        }
        train_shard_fresh(&b.shard, b.slots[1], 3, NULL);
        memcpy(b.slots[0], b.slots[1], b.shard.slot_bytes);
    }
    assert_int_equal(train_state_load(&b.state, b.slots[0], NULL), 0);
    for (uint64_t step = 1; step <= STEPS; step++) {
        struct kern_adamw_step k;
        uint32_t half = b.shard.extent_count / 2;
        make_grads(&b, step);
        kern_adamw_step_init(&k, step, 1e-2, 0.9, 0.95, 1e-8, 0.5f);
        train_state_apply(&b.state, &k, 0.1f, b.device_grads, 0, half);
        train_state_apply(&b.state, &k, 0.1f, b.device_grads, half, b.shard.extent_count);
        train_state_publish(&b.state, b.slots[0]);
        assert_false(train_state_is_out(&b.state));
        step_on_cpu(&b, &k);
        assert_memory_not_equal(b.slots[0], b.slots[1], b.shard.slot_bytes); /* not there yet */
        if (step % 2 == 0) {
            while (!train_state_is_out(&b.state)) {
            }
        }
        assert_int_equal(train_state_wait(&b.state, NULL), 0);
        assert_true(train_state_is_out(&b.state));
        assert_memory_equal(b.slots[0], b.slots[1], b.shard.slot_bytes);
    }
    bench_close(&b);
}

static void test_state_on_a_device_has_the_bits_of_slots(void **state)
{
    (void)state;
    run_steps(0, 0);
    run_steps(1, 0);
}

static void test_state_finds_its_places_in_any_slot(void **state)
{
    (void)state;
    run_steps(1, 192);
}

static void test_state_says_how_much_a_device_lacks(void **state)
{
    (void)state;
    struct bench b;
    struct train_state other;
    struct bl_errmsg msg = {{0}};
    bench_open(&b, 0);
    uint64_t left = ARENA - fake_device_used(b.kern) - b.state.bytes / 2;
    void *hog = b.kern->ops->alloc(b.kern, left / 256 * 256);
    assert_non_null(hog);
    assert_int_equal(train_state_init(&other, b.kern, &b.shard, &msg), -ENOMEM);
    assert_non_null(strstr(msg.text, "bytes of the device for weights and moments"));
    b.kern->ops->free(b.kern, hog, left / 256 * 256);
    bench_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_state_on_a_device_has_the_bits_of_slots),
        cmocka_unit_test(test_state_finds_its_places_in_any_slot),
        cmocka_unit_test(test_state_says_how_much_a_device_lacks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
