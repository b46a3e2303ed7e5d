/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The dry run against runs: memory of the largest rank in every ZeRO stage and some layouts, what
 * the layouts' sums must add up to, and what is refused with which numbers.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/trainer/train_bench.h"
#include "trainer/dryrun.h"

#define OVER  1.05 /* measured over predicted, at most */
#define UNDER 0.80 /* and at least: the prediction is no guess from above */

static struct train_bench bench;
static struct bl_errmsg msg;

/* A model of some ten MiB, so that the program itself counts little; short sequences. */
static void open_job(uint32_t ranks, uint32_t tp, uint32_t pp, uint32_t zero)
{
    train_bench_open(&bench, 4, 0);
    bench.job.model.layers = 4;
    bench.job.model.dim = 256;
    bench.job.model.hidden = 1024;
    bench.job.train.global_batch = 4;
    bench.job.train.steps = 2;
    bench.job.train.warmup = 1;
    bench.job.train.eval_every = 0;
    bench.job.ranks = ranks;
    bench.job.tp = tp;
    bench.job.pp = pp;
    bench.job.zero = zero;
}

/* Peak memory of the largest of the run's ranks. */
static uint64_t measure(void)
{
    int ends[2], status;
    uint64_t bytes = 0;
    assert_int_equal(pipe(ends), 0);
    fflush(stdout);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct rusage usage;
        const struct train_alone how = {.job = &bench.job};
        int null = open("/dev/null", O_WRONLY);
        alarm(120);
        dup2(null, STDOUT_FILENO);
        int code = train_alone_run(&how);
        getrusage(RUSAGE_CHILDREN, &usage);
        bytes = (uint64_t)usage.ru_maxrss * 1024;
        _exit(write(ends[1], &bytes, sizeof bytes) == (ssize_t)sizeof bytes ? code : 3);
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], &bytes, sizeof bytes), (ssize_t)sizeof bytes);
    close(ends[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    return bytes;
}

static uint64_t predict(void)
{
    struct train_dry *dry;
    struct train_dry_sum sum;
    const struct train_dry_rank *rank;
    assert_int_equal(train_dry_new(&dry, &bench.job, 0, 2, &msg), 0);
    assert_int_equal(train_dry_sum(dry, &sum, &msg), 0);
    assert_int_equal(train_dry_rank(dry, sum.rank_max, &rank, &msg), 0);
    uint64_t bytes = rank->memory_sum;
    train_dry_free(dry);
    return bytes;
}

/* Sanitizers take memory of their own. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif

static void check_memory(uint32_t ranks, uint32_t tp, uint32_t pp, uint32_t zero)
{
    open_job(ranks, tp, pp, zero);
    double predicted = (double)predict(), measured = (double)measure();
    printf("tp %u pp %u dp %u ZeRO %u: %.1f MiB measured, %.1f MiB predicted, ratio %.3f\n", tp, pp,
           ranks / tp / pp, zero, measured / 1048576, predicted / 1048576, measured / predicted);
    assert_true(measured <= OVER * predicted);
    assert_true(measured >= UNDER * predicted);
    train_bench_close(&bench);
}

static void test_rank_takes_what_the_dry_run_says_in_every_zero_stage(void **state)
{
    (void)state;
#if defined(SANITIZED)
    skip(); /* its shadow is not ours */
#endif
    for (uint32_t zero = 0; zero <= 3; zero++) {
        check_memory(2, 1, 1, zero);
    }
    check_memory(4, 2, 2, 1);
}

/* What all ranks own together is the state, once; with ZeRO 0 once a replica. */
static void test_owned_parts_add_up_to_the_model(void **state)
{
    static const uint32_t layouts[][4] = {{1, 1, 1, 1}, {4, 1, 1, 2}, {8, 2, 2, 1},
                                          {8, 2, 1, 3}, {4, 1, 2, 0}, {12, 1, 3, 1}};
    (void)state;
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        struct train_dry *dry;
        struct train_dry_model model;
        uint64_t owned = 0;
        open_job(layouts[i][0], layouts[i][1], layouts[i][2], layouts[i][3]);
        assert_int_equal(train_dry_new(&dry, &bench.job, 0, 0, &msg), 0);
        assert_int_equal(train_dry_model(&model, &bench.job, &msg), 0);
        /* Classes stand for ranks whose cuts differ by a block's content: only whole ones add up.
         */
        for (uint32_t rank = 0; rank < bench.job.ranks; rank++) {
            const struct train_dry_rank *r;
            assert_int_equal(train_dry_rank(dry, rank, &r, &msg), 0);
            assert_true(r->own_elems > 0 && r->memory_sum > 0);
            owned += r->own_elems;
        }
        uint64_t want = model.elems * (layouts[i][3] == 0 ? layouts[i][0] / layouts[i][2] : 1);
        assert_true(owned > want - want / 50 && owned < want + want / 50);
        train_dry_free(dry);
        train_bench_close(&bench);
    }
}

static void test_model_counts_parameters_and_work(void **state)
{
    struct train_dry_model m;
    (void)state;
    open_job(1, 1, 1, 1);
    assert_int_equal(train_dry_model(&m, &bench.job, &msg), 0);
    assert_true(m.embedding == 256 * 256 && m.head == 256 * 256 && m.positions == 0);
    assert_true(m.attention == 4 * 256 * (256 + 128 + 128 + 256));
    assert_true(m.mlp == 4 * 3 * 256 * 1024 && m.norms == 9 * 256);
    double macs = (double)(m.attention + m.mlp + m.head) + 4 * 256 * 16;
    assert_true(m.flops == 6 * macs && m.flops_again == 0);
    bench.job.train.head_chunk = 16; /* all rows */
    assert_int_equal(train_dry_model(&m, &bench.job, &msg), 0);
    assert_true(m.flops_again == 0);
    bench.job.train.head_chunk = 5;
    assert_int_equal(train_dry_model(&m, &bench.job, &msg), 0);
    assert_true(m.flops_again == 2.0 * (double)m.head);
    train_bench_close(&bench);
}

static void memory_of(uint32_t head_chunk, struct train_dry_rank *ret)
{
    struct train_dry *dry;
    const struct train_dry_rank *rank;
    bench.job.train.head_chunk = head_chunk;
    assert_int_equal(train_dry_new(&dry, &bench.job, 0, 2, &msg), 0);
    assert_int_equal(train_dry_rank(dry, 0, &rank, &msg), 0);
    *ret = *rank;
    train_dry_free(dry);
}

static void test_logits_in_chunks_take_a_chunks_memory(void **state)
{
    struct train_dry_rank all, some;
    (void)state;
    open_job(2, 2, 1, 1);
    memory_of(0, &all);
    memory_of(8, &some);
    uint64_t logits = all.memory[TRAIN_DRY_LOGITS] - some.memory[TRAIN_DRY_LOGITS];
    /* 8 rows fewer: of logits half of the vocabulary, of what is exchanged 5 words of 2 ranks */
    assert_int_equal(logits, 8 * sizeof(float) * (128 + 2 * 5));
    assert_int_equal(all.memory_sum - some.memory_sum, logits);
    /* backward exchanges a row's largest logit and sums again: 4 lanes of 16 rows */
    assert_int_equal(some.wire_sum - all.wire_sum, 4 * 16 * 5 * sizeof(float));
    train_bench_close(&bench);
}

static void test_ten_thousand_ranks_take_a_second(void **state)
{
    struct train_dry *dry;
    struct train_dry_sum sum;
    (void)state;
    open_job(10240, 4, 4, 1);
    bench.job.lanes = 640;
    bench.job.train.global_batch = 640;
    bench.job.model.kv_heads = 4;
    bench.job.nodes_min = 1280;
    struct timespec begun, end; /* of the processor: the machine may be busy */
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begun);
    assert_int_equal(train_dry_new(&dry, &bench.job, 0, 0, &msg), 0);
    assert_int_equal(train_dry_sum(dry, &sum, &msg), 0);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    assert_int_equal(sum.per_node, 8);
    assert_true(sum.bubble > 0 && sum.bubble < 1);
    assert_true(end.tv_sec - begun.tv_sec <= 1);
    train_dry_free(dry);
    train_bench_close(&bench);
}

static void check_refused(const char *part, const char *way)
{
    struct train_dry *dry;
    struct bl_errmsg why = {{0}};
    assert_int_equal(train_dry_new(&dry, &bench.job, 0, 0, &why), BL_ECONFIG);
    assert_non_null(strstr(why.text, part));
    assert_non_null(strstr(why.text, way));
    train_bench_close(&bench);
}

static void test_layout_that_cannot_be_is_refused_with_the_nearest_that_can(void **state)
{
    (void)state;
    open_job(8, 1, 8, 1); /* more stages than layers */
    bench.job.lanes = bench.job.train.global_batch = 8;
    check_refused("8", "layout.pp 4");
    open_job(8, 8, 1, 1); /* more slices than heads */
    check_refused("layout.tp 8", "layout.tp 4");
    open_job(4, 4, 1, 1); /* 18 rows over 4 ranks */
    bench.job.sequence = 1;
    bench.job.train.seq_len = 18;
    check_refused("18", "layout.tp 2");
    open_job(6, 4, 1, 1); /* no whole number of replicas */
    check_refused("6 ranks", "tp 4");
}

static void test_job_over_the_machines_memory_is_refused_with_what_fits(void **state)
{
    struct bl_errmsg why = {{0}};
    (void)state;
    open_job(4, 1, 1, 0);
    struct train_dry *dry;
    struct train_dry_sum sum;
    bench.job.zero = 3;
    assert_int_equal(train_dry_new(&dry, &bench.job, 4, 2, &msg), 0);
    assert_int_equal(train_dry_sum(dry, &sum, &msg), 0);
    train_dry_free(dry);
    bench.job.zero = 0;
    assert_int_equal(train_dry_fits(&bench.job, 4, 2, sum.node_bytes, &why), BL_ECONFIG);
    assert_non_null(strstr(why.text, "layout.zero"));
    assert_int_equal(train_dry_fits(&bench.job, 4, 2, 1 << 20, &why), BL_ECONFIG);
    assert_non_null(strstr(why.text, "no ZeRO stage"));
    assert_int_equal(train_dry_fits(&bench.job, 4, 2, UINT64_MAX, &why), 0);
    train_bench_close(&bench);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_counts_parameters_and_work),
        cmocka_unit_test(test_logits_in_chunks_take_a_chunks_memory),
        cmocka_unit_test(test_owned_parts_add_up_to_the_model),
        cmocka_unit_test(test_ten_thousand_ranks_take_a_second),
        cmocka_unit_test(test_layout_that_cannot_be_is_refused_with_the_nearest_that_can),
        cmocka_unit_test(test_job_over_the_machines_memory_is_refused_with_what_fits),
        cmocka_unit_test(test_rank_takes_what_the_dry_run_says_in_every_zero_stage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
