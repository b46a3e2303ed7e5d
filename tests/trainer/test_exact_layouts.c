/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every layout that five layers allow, one after the other: one digest. BELAY_EXACT_STRIDE: only
 * every so-many-th.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>

#include "exact_run.h"

#define LAYOUTS_MAX 1024

static const uint32_t cuts[][2] = {{1, 1}, {2, 1}, {2, 2}, {3, 1}, {5, 1}}; /* pp, interleave */

/* dp 1 to 4, all cuts, all ZeRO stages, all recomputation; threads and nodes in turn. */
static size_t list_layouts(struct exact_layout *layouts, uint32_t stride)
{
    size_t count = 0;
    uint32_t i = 0;
    for (uint32_t dp = 1; dp <= 4; dp++) {
        for (size_t cut = 0; cut < sizeof cuts / sizeof *cuts; cut++) {
            for (uint32_t zero = 0; zero <= 3; zero++) {
                for (uint32_t recompute = 0; recompute < 3; recompute++, i++) {
                    if (i % stride != 0) {
                        continue;
                    }
                    uint32_t pp = cuts[cut][0];
                    layouts[count++] =
                        (struct exact_layout){.dp = dp,
                                              .threads = 1 + i % 2,
                                              .nodes = i % 3 == 0 ? (int)(dp * pp) : (int)(i % 3),
                                              .pp = pp,
                                              .interleave = cuts[cut][1],
                                              .zero = zero,
                                              .recompute = recompute};
                }
            }
        }
    }
    return count;
}

static void compare(const struct bl_job_model *model, uint32_t lanes, uint32_t micros)
{
    static struct exact_layout layouts[LAYOUTS_MAX];
    const char *stride = getenv("BELAY_EXACT_STRIDE");
    size_t count = list_layouts(layouts, stride != NULL ? (uint32_t)atoi(stride) : 1);
    exact_compare(model, lanes, 0, micros, layouts, count);
}

static void test_four_lanes_of_two_micro_batches_in_every_layout(void **state)
{
    (void)state;
    compare(exact_llama(), 4, 2);
}

static void test_seven_lanes_of_one_micro_batch_in_every_layout(void **state)
{
    (void)state;
    compare(exact_gpt2(), 7, 1);
}

static void test_twelve_lanes_of_one_micro_batch_in_every_layout(void **state)
{
    (void)state;
    compare(exact_llama(), 12, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_four_lanes_of_two_micro_batches_in_every_layout),
        cmocka_unit_test(test_seven_lanes_of_one_micro_batch_in_every_layout),
        cmocka_unit_test(test_twelve_lanes_of_one_micro_batch_in_every_layout),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
