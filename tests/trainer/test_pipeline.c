/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/pipeline.h"

#define STAGES_MAX 9

struct scene {
    uint32_t pp, chunks, micros;
    struct train_pipeline stages[STAGES_MAX];
};

static void scene_open(struct scene *s, uint32_t pp, uint32_t chunks, uint32_t micros, int backward)
{
    *s = (struct scene){.pp = pp, .chunks = chunks, .micros = micros};
    for (uint32_t p = 0; p < pp; p++) {
        struct bl_errmsg msg = {{0}};
        if (train_pipeline_make(&s->stages[p], pp, p, chunks, micros, backward, &msg) != 0) {
            fail_msg("%u stages, %u chunks, %u micro-batches: %s", pp, chunks, micros, msg.text);
        }
    }
}

static void scene_close(struct scene *s)
{
    for (uint32_t p = 0; p < s->pp; p++) {
        train_pipeline_close(&s->stages[p]);
    }
}

/* Whether the operation's input is there, by how many micro-batches went through each virtual
 * stage; all go in order. */
static int is_fed(const struct scene *s, uint32_t p, const struct train_pipe_op *op,
                  const uint32_t *forward, const uint32_t *backward)
{
    uint32_t v = op->chunk * s->pp + p;
    if (!op->backward) {
        return v == 0 || forward[v - 1] > op->micro;
    }
    return forward[v] > op->micro && (v + 1 == s->pp * s->chunks || backward[v + 1] > op->micro);
}

/* Every stage works through its list, one operation whenever its input is there: other costs and
 * other interleavings than the generator's own. All must end, each chunk in order. */
static void run_to_the_end(const struct scene *s, uint32_t first, uint32_t per_turn)
{
    uint32_t forward[64] = {0}, backward[64] = {0};
    uint64_t at[STAGES_MAX] = {0};
    for (int moved = 1; moved;) {
        moved = 0;
        for (uint32_t i = 0; i < s->pp; i++) {
            uint32_t p = (first + i) % s->pp;
            for (uint32_t k = 0; k < per_turn && at[p] < s->stages[p].op_count; k++) {
                const struct train_pipe_op *op = &s->stages[p].ops[at[p]];
                if (!is_fed(s, p, op, forward, backward)) {
                    break;
                }
                uint32_t *done = op->backward ? backward : forward;
                assert_int_equal(op->micro, done[op->chunk * s->pp + p]++);
                at[p]++;
                moved = 1;
            }
        }
    }
    for (uint32_t p = 0; p < s->pp; p++) {
        assert_int_equal(at[p], s->stages[p].op_count);
    }
    for (uint32_t v = 0; v < s->pp * s->chunks; v++) {
        assert_int_equal(forward[v], s->micros);
        assert_int_equal(backward[v],
                         s->stages[0].op_count == (uint64_t)s->micros * s->chunks ? 0 : s->micros);
    }
}

/* No set is used twice at a time, none is more than the stage has, all are used. */
static void check_sets(const struct scene *s, uint32_t p)
{
    const struct train_pipeline *stage = &s->stages[p];
    static int64_t in[4096]; /* chunk and micro-batch that the set holds, or -1 */
    uint32_t flying = 0, most = 0;
    assert_true(stage->sets <= 4096);
    for (uint32_t i = 0; i < stage->sets; i++) {
        in[i] = -1;
    }
    for (uint64_t i = 0; i < stage->op_count; i++) {
        const struct train_pipe_op *op = &stage->ops[i];
        int64_t what = (int64_t)op->chunk << 32 | op->micro;
        assert_true(op->set < stage->sets);
        assert_true(in[op->set] == (op->backward ? what : -1));
        in[op->set] = op->backward ? -1 : what;
        flying = op->backward ? flying - 1 : flying + 1;
        most = flying > most ? flying : most;
    }
    assert_int_equal(most, stage->sets);
    assert_true(most <= train_pipeline_bound(s->pp, p, s->chunks));
}

static void test_every_schedule_runs_to_its_end_in_order_with_few_sets(void **state)
{
    (void)state;
    for (uint32_t pp = 1; pp <= 6; pp++) {
        for (uint32_t chunks = 1; chunks <= 4; chunks++) {
            for (uint32_t micros = 1; micros <= 21; micros++) {
                struct scene s;
                scene_open(&s, pp, chunks, micros, 1);
                run_to_the_end(&s, 0, 1);
                run_to_the_end(&s, pp - 1, UINT32_MAX);
                run_to_the_end(&s, 0, UINT32_MAX);
                for (uint32_t p = 0; p < pp; p++) {
                    check_sets(&s, p);
                    assert_int_equal(s.stages[p].op_count, 2 * chunks * micros);
                    assert_int_equal(s.stages[p].span, s.stages[0].span);
                    assert_int_equal(s.stages[p].busy, 3 * chunks * micros);
                }
                scene_close(&s);
            }
        }
    }
}

/* Two stages send in the same order as the other takes, so that streams need not be sorted: the
 * forwards of all virtual stages of a neighbour pair, and the backwards. */
static void test_messages_of_a_direction_are_sent_and_taken_in_one_order(void **state)
{
    (void)state;
    for (uint32_t pp = 2; pp <= 5; pp++) {
        for (uint32_t chunks = 1; chunks <= 3; chunks++) {
            struct scene s;
            scene_open(&s, pp, chunks, 13, 1);
            for (uint32_t from = 0; from + 1 < pp; from++) {
                const struct train_pipeline *a = &s.stages[from], *b = &s.stages[from + 1];
                for (int backward = 0; backward < 2; backward++) {
                    uint64_t j = 0;
                    for (uint64_t i = 0; i < a->op_count; i++) {
                        if (a->ops[i].backward == backward) {
                            while (b->ops[j].backward != backward) {
                                j++;
                            }
                            assert_int_equal(a->ops[i].micro, b->ops[j].micro);
                            assert_int_equal(a->ops[i].chunk, b->ops[j].chunk);
                            j++;
                        }
                    }
                }
            }
            scene_close(&s);
        }
    }
}

static void test_one_chunk_idles_as_theory_says(void **state)
{
    (void)state;
    for (uint32_t pp = 1; pp <= 8; pp++) {
        for (uint32_t micros = 1; micros <= 40; micros++) {
            struct scene s;
            scene_open(&s, pp, 1, micros, 1);
            double theory = (double)(pp - 1) / (micros + pp - 1);
            for (uint32_t p = 0; p < pp; p++) {
                double bubble = train_pipeline_bubble(&s.stages[p]);
                assert_true(bubble > theory - 1e-9 && bubble < theory + 1e-9);
                uint32_t most = pp - p < micros ? pp - p : micros;
                assert_int_equal(s.stages[p].sets, most);
            }
            scene_close(&s);
        }
    }
}

/* The same time without work beside v times as many operations. */
static void test_more_chunks_idle_less_where_groups_are_full(void **state)
{
    (void)state;
    for (uint32_t pp = 2; pp <= 6; pp++) {
        for (uint32_t chunks = 2; chunks <= 4; chunks++) {
            for (uint32_t groups = 1; groups <= 5; groups++) {
                struct scene s;
                uint32_t micros = groups * pp;
                scene_open(&s, pp, chunks, micros, 1);
                for (uint32_t p = 0; p < pp; p++) {
                    assert_int_equal(s.stages[p].span - s.stages[p].busy, 3 * (pp - 1));
                }
                scene_close(&s);
            }
        }
    }
}

static void test_evaluation_goes_forward_only(void **state)
{
    (void)state;
    for (uint32_t pp = 1; pp <= 5; pp++) {
        for (uint32_t chunks = 1; chunks <= 3; chunks++) {
            struct scene s;
            scene_open(&s, pp, chunks, 11, 0);
            run_to_the_end(&s, 0, 1);
            assert_int_equal(s.stages[0].sets, 1);
            assert_int_equal(s.stages[0].op_count, 11 * chunks);
            scene_close(&s);
        }
    }
}

static void test_what_is_no_pipeline_is_refused(void **state)
{
    (void)state;
    struct train_pipeline p = {.sets = 77};
    struct bl_errmsg msg = {{0}};
    assert_int_equal(train_pipeline_make(&p, 0, 0, 1, 1, 1, &msg), BL_ELIMIT);
    assert_int_equal(train_pipeline_make(&p, 2, 2, 1, 1, 1, &msg), BL_ELIMIT);
    assert_int_equal(train_pipeline_make(&p, 2, 0, 0, 1, 1, &msg), BL_ELIMIT);
    assert_int_equal(train_pipeline_make(&p, 2, 0, 1, 0, 1, &msg), BL_ELIMIT);
    assert_int_equal(train_pipeline_make(&p, 2, 0, 513, 1, 1, &msg), BL_ELIMIT);
    assert_int_equal(train_pipeline_make(&p, 2, 0, 2, UINT32_MAX, 1, &msg), BL_ELIMIT);
    assert_int_equal(p.sets, 77);
}

static void test_many_micro_batches_take_time_in_proportion(void **state)
{
    (void)state;
    struct train_pipeline p;
    assert_int_equal(train_pipeline_make(&p, 8, 3, 2, 100000, 1, NULL), 0);
    assert_int_equal(p.op_count, 400000);
    assert_true(train_pipeline_bubble(&p) < 0.001);
    train_pipeline_close(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_schedule_runs_to_its_end_in_order_with_few_sets),
        cmocka_unit_test(test_messages_of_a_direction_are_sent_and_taken_in_one_order),
        cmocka_unit_test(test_one_chunk_idles_as_theory_says),
        cmocka_unit_test(test_more_chunks_idle_less_where_groups_are_full),
        cmocka_unit_test(test_evaluation_goes_forward_only),
        cmocka_unit_test(test_what_is_no_pipeline_is_refused),
        cmocka_unit_test(test_many_micro_batches_take_time_in_proportion),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
