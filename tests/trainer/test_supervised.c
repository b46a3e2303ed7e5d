/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The supervised life of ranks, with a stand-in for the daemon: killed at every failpoint,
 * respawned or not, a run ends in the digest of an undisturbed run alone.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/job.h"
#include "fake_belay.h"
#include "train_bench.h"
#include "trainer/data.h"

#define STEPS 6

struct setup {
    struct train_bench bench;
    char job_path[96], once[96], metrics[128];
    char digest[BL_STATE_DIGEST_TEXT_BYTES]; /* of the undisturbed run */
};

/* `ranks` and `layout` are lines of the job. */
static void setup_layout(struct setup *s, uint32_t ranks, const char *layout)
{
    struct bl_errmsg msg = {{0}};
    train_bench_open(&s->bench, 4, 0);
    snprintf(s->job_path, sizeof s->job_path, "%s/job.yaml", s->bench.dir);
    snprintf(s->once, sizeof s->once, "%s/once", s->bench.dir);
    snprintf(s->metrics, sizeof s->metrics, "%s/run/metrics.jsonl", s->bench.dir);
    FILE *f = fopen(s->job_path, "we");
    assert_non_null(f);
    fprintf(f,
            "name: fake\nrun_dir: run\nranks: %u\nlanes: 4\n%s"
            "model: {layers: 2, dim: 32, hidden: 72, heads: 4, kv_heads: 2}\n"
            "data: {files: [text]}\n"
            "train: {global_batch: 8, micro_batch: 1, seq_len: 16, steps: %d, lr: 1e-2, "
            "warmup: 2, eval_every: 2, precision: fp32}\n",
            ranks, layout, STEPS);
    assert_int_equal(fclose(f), 0);
    if (bl_job_load(&s->bench.job, s->job_path, &msg) != 0) {
        fail_msg("%s", msg.text);
    }
    struct bl_job *job = &s->bench.job;
    uint32_t pp = job->pp, zero = job->zero;
    const struct train_alone how = {.job = job, .ranks = job->tp, .digest = 1};
    job->pp = job->zero = 1;
    train_bench_run(&how, s->digest, NULL, 0);
    job->pp = pp;
    job->zero = zero;
}

static void setup_open(struct setup *s)
{
    setup_layout(s, 3, "");
}

static void run_and_compare(struct setup *s, struct fake_run *run, uint32_t deaths)
{
    struct fake_result result;
    char digest[BL_STATE_DIGEST_TEXT_BYTES];
    char command[512];
    snprintf(command, sizeof command, "rm -rf '%s' '%s' && mkdir '%s'", s->once, s->metrics,
             s->once);
    assert_int_equal(system(command), 0);
    run->job_path = s->job_path;
    run->once = s->once;
    fake_belay_run(run, &result);
    bl_state_digest_format(&result.digest, digest);
    printf("%-24s respawn %u: %u generations, %u deaths, %s\n", run->fail ? run->fail : "-",
           run->respawn, result.generations, result.deaths, digest);
    assert_int_equal(result.deaths, deaths);
    assert_int_equal(result.generations, deaths + 1);
    assert_int_equal(result.step, STEPS);
    assert_string_equal(digest, s->digest);
}

static void test_undisturbed_run_has_the_digest_of_a_run_alone(void **state)
{
    (void)state;
    struct setup s;
    setup_open(&s);
    for (uint32_t ranks = 1; ranks <= 4; ranks++) {
        struct fake_run run = {.ranks = ranks};
        run_and_compare(&s, &run, 0);
    }
    train_bench_close(&s.bench);
}

static void test_rank_killed_at_any_failpoint_changes_no_bit(void **state)
{
    (void)state;
    static const char *const fails[] = {"mid-load@1:kill:1",    "mid-gather@1:kill:1",
                                        "mid-forward@1:kill:3", "mid-backward@0:kill:6",
                                        "before-vote@1:kill:2", "voted-unapplied@1:kill:3",
                                        "mid-apply@0:kill:3",   "mid-gather@2:kill:4",
                                        "before-vote@1:segv:6", "voted-unapplied@0:kill:6"};
    struct setup s;
    setup_open(&s);
    for (size_t i = 0; i < sizeof fails / sizeof *fails; i++) {
        struct fake_run run = {.ranks = 3, .respawn = 1, .fail = fails[i]};
        run_and_compare(&s, &run, 1);
    }
    train_bench_close(&s.bench);
}

static void test_others_go_on_without_a_lost_rank(void **state)
{
    (void)state;
    static const char *const fails[] = {"mid-backward@1:kill:3", "voted-unapplied@0:kill:2",
                                        "mid-apply@3:kill:5"};
    struct setup s;
    setup_open(&s);
    for (size_t i = 0; i < sizeof fails / sizeof *fails; i++) {
        struct fake_run run = {.ranks = 4, .fail = fails[i]};
        run_and_compare(&s, &run, 1);
    }
    train_bench_close(&s.bench);
}

/* Every failpoint on the ranks of two replicas of two stages; half of the runs without the one who
 * died: then a replica is left, and its other rank a spare. */
static void kill_in_grid(const char *layout, size_t stride)
{
    static const char *const fails[] = {"mid-load@1:kill:1",    "mid-gather@2:kill:1",
                                        "mid-forward@3:kill:3", "mid-backward@0:kill:6",
                                        "before-vote@1:kill:2", "voted-unapplied@2:kill:3",
                                        "mid-apply@3:kill:3",   "mid-gather@0:kill:4"};
    struct setup s;
    setup_layout(&s, 4, layout);
    for (size_t i = 0; i < sizeof fails / sizeof *fails; i += stride) {
        struct fake_run run = {.ranks = 4, .pp = 2, .respawn = i % 2, .fail = fails[i]};
        run_and_compare(&s, &run, 1);
    }
    train_bench_close(&s.bench);
}

static void test_rank_of_a_pipeline_killed_at_any_failpoint_changes_no_bit(void **state)
{
    (void)state;
    kill_in_grid("layout: {pp: 2}\n", 1);
}

static void test_zero_0_replicas_of_a_pipeline_survive_kills(void **state)
{
    (void)state;
    kill_in_grid("layout: {pp: 2, zero: 0}\n", 3);
}

/* Two replicas, or one on two stages, of two tensor parallel ranks each. */
static void test_tensor_parallel_ranks_survive_kills(void **state)
{
    (void)state;
    static const char *const layouts[] = {"layout: {tp: 2}\n", "layout: {tp: 2, pp: 2}\n"};
    static const char *const fails[] = {"mid-forward@3:kill:3", "voted-unapplied@1:kill:2",
                                        "mid-apply@2:kill:3", "mid-gather@1:kill:3"};
    for (uint32_t pp = 1; pp <= 2; pp++) {
        struct setup s;
        setup_layout(&s, 4, layouts[pp - 1]);
        for (size_t i = pp - 1; i < sizeof fails / sizeof *fails; i += 2) {
            struct fake_run run = {
                .ranks = 4, .tp = 2, .pp = pp, .respawn = i < 2, .fail = fails[i]};
            run_and_compare(&s, &run, 1);
        }
        train_bench_close(&s.bench);
    }
}

/* ZeRO 3 gathers a stage's weights at once, and layer by layer when one stage is left. */
static void test_pipeline_is_cut_again_when_no_replica_fits(void **state)
{
    (void)state;
    static const char *const layouts[] = {"layout: {pp: 2}\n", "layout: {pp: 2, zero: 3}\n"};
    for (size_t i = 0; i < 2; i++) {
        struct setup s;
        setup_layout(&s, 2, layouts[i]);
        struct fake_run run = {.ranks = 2, .pp = 2, .fail = "mid-apply@1:kill:3"};
        run_and_compare(&s, &run, 1);
        train_bench_close(&s.bench);
    }
}

static void test_zero_3_ranks_survive_kills(void **state)
{
    (void)state;
    static const char *const fails[] = {"mid-forward@1:kill:1", "mid-backward@0:kill:2",
                                        "mid-apply@2:kill:3", "mid-gather@1:kill:2"};
    struct setup s;
    setup_layout(&s, 3, "layout: {zero: 3}\n");
    for (size_t i = 0; i < sizeof fails / sizeof *fails; i++) {
        struct fake_run run = {.ranks = 3, .respawn = i % 2, .fail = fails[i]};
        run_and_compare(&s, &run, 1);
    }
    train_bench_close(&s.bench);
}

static void test_two_ranks_die_one_after_the_other(void **state)
{
    (void)state;
    struct setup s;
    setup_open(&s);
    struct fake_run run = {
        .ranks = 3, .respawn = 1, .fail = "mid-apply@0:kill:2,mid-forward@2:kill:9"};
    run_and_compare(&s, &run, 2);
    run = (struct fake_run){.ranks = 3, .respawn = 1, .kill_at = 3};
    run_and_compare(&s, &run, 1);
    train_bench_close(&s.bench);
}

/* The line of a step without its speed; 0 at the end of the file. */
static int next_line(FILE *f, char *line, size_t bytes, unsigned *ret_step)
{
    if (fgets(line, (int)bytes, f) == NULL) {
        return 0;
    }
    assert_int_equal(sscanf(line, "{\"step\":%u,", ret_step), 1);
    char *speed = strstr(line, ",\"tokens_per_s\"");
    assert_non_null(speed);
    *speed = 0;
    return 1;
}

static void test_metrics_go_on_after_a_recovery_with_the_same_lines(void **state)
{
    (void)state;
    struct setup s;
    setup_open(&s);
    static char clean[STEPS + 1][512], line[512];
    unsigned step, seen = 0;
    struct fake_run run = {.ranks = 3};
    run_and_compare(&s, &run, 0);
    FILE *f = fopen(s.metrics, "re");
    assert_non_null(f);
    while (next_line(f, line, sizeof line, &step)) {
        assert_true(step == seen + 1 && step <= STEPS);
        memcpy(clean[step], line, sizeof line);
        seen = step;
    }
    fclose(f);
    assert_int_equal(seen, STEPS);
    run = (struct fake_run){.ranks = 3, .respawn = 1, .fail = "mid-apply@0:kill:4"};
    run_and_compare(&s, &run, 1);
    f = fopen(s.metrics, "re");
    assert_non_null(f);
    for (seen = 0; next_line(f, line, sizeof line, &step); seen = step) {
        assert_true(step <= seen + 1);
        assert_string_equal(line, clean[step]);
    }
    fclose(f);
    assert_int_equal(seen, STEPS);
    train_bench_close(&s.bench);
}

/* Marks in seen[position] what a ledger file says; every line must be what the order demands. */
static void read_ledger(const char *path, const struct bl_job *job, const struct train_data *data,
                        uint8_t *seen)
{
    uint32_t per_lane = job->train.global_batch / job->lanes;
    unsigned long long step, lane, sample;
    FILE *f = fopen(path, "re");
    assert_non_null(f);
    while (fscanf(f, "%llu %llu %llu", &step, &lane, &sample) == 3) {
        uint64_t first = (step - 1) * job->train.global_batch + lane * per_lane;
        uint64_t at = first;
        while (at < first + per_lane && train_data_at(data, at) != sample) {
            at++;
        }
        assert_true(at < first + per_lane);
        seen[at] = 1;
    }
    fclose(f);
}

static void check_ledger(uint32_t ranks, uint32_t pp, const char *layout)
{
    struct setup s;
    struct bl_errmsg msg = {{0}};
    char prefix[96], pattern[128];
    struct train_data *data;
    glob_t files;
    uint8_t seen[STEPS * 8] = {0};
    setup_layout(&s, ranks, layout);
    snprintf(prefix, sizeof prefix, "%s/ledger", s.bench.dir);
    snprintf(pattern, sizeof pattern, "%s.*", prefix);
    struct fake_run run = {.ranks = ranks,
                           .pp = pp,
                           .respawn = 1,
                           .fail = "mid-apply@0:kill:2,mid-forward@2:kill:9",
                           .ledger = prefix};
    run_and_compare(&s, &run, 2);
    assert_int_equal(train_data_open(&data, &s.bench.job, &msg), 0);
    assert_int_equal(glob(pattern, 0, NULL, &files), 0);
    assert_int_equal(files.gl_pathc, ranks + 2); /* of the processes and two that followed */
    for (size_t i = 0; i < files.gl_pathc; i++) {
        read_ledger(files.gl_pathv[i], &s.bench.job, data, seen);
    }
    assert_null(memchr(seen, 0, sizeof seen));
    globfree(&files);
    train_data_close(data);
    train_bench_close(&s.bench);
}

static void test_ledger_has_the_same_samples_after_recoveries(void **state)
{
    (void)state;
    check_ledger(3, 1, "");
    check_ledger(4, 2, "layout: {pp: 2}\n");
}

/* On a device slots are sealed when the copy out of it is complete. */
static void test_ranks_on_devices_have_the_bits_of_the_cpu(void **state)
{
    (void)state;
    static const struct {
        uint32_t respawn, deaths;
        const char *fail;
    } cases[] = {{0, 0, NULL},
                 {1, 1, "mid-backward@1:kill:6"},
                 {1, 1, "voted-unapplied@1:kill:3"},
                 {1, 1, "mid-apply@0:kill:3"},
                 {0, 1, "mid-gather@2:kill:4"}};
    struct setup s;
    char plugin[512];
    const char *build = getenv("BELAY_BUILD");
    snprintf(plugin, sizeof plugin, "%s/tests/trainer/libfake_device.so", build ? build : ".");
    setup_layout(&s, 3, "backend: cpu\n"); /* the digest to reach */
    char digest[BL_STATE_DIGEST_TEXT_BYTES];
    memcpy(digest, s.digest, sizeof digest);
    train_bench_close(&s.bench);
    setenv("BELAY_CUDA_PLUGIN", plugin, 1);
    setup_layout(&s, 3, "backend: cuda\n");
    assert_string_equal(digest, s.digest);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct fake_run run = {.ranks = 3, .respawn = cases[i].respawn, .fail = cases[i].fail};
        run_and_compare(&s, &run, cases[i].deaths);
    }
    train_bench_close(&s.bench);
    unsetenv("BELAY_CUDA_PLUGIN");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ledger_has_the_same_samples_after_recoveries),
        cmocka_unit_test(test_undisturbed_run_has_the_digest_of_a_run_alone),
        cmocka_unit_test(test_rank_killed_at_any_failpoint_changes_no_bit),
        cmocka_unit_test(test_others_go_on_without_a_lost_rank),
        cmocka_unit_test(test_rank_of_a_pipeline_killed_at_any_failpoint_changes_no_bit),
        cmocka_unit_test(test_zero_0_replicas_of_a_pipeline_survive_kills),
        cmocka_unit_test(test_tensor_parallel_ranks_survive_kills),
        cmocka_unit_test(test_pipeline_is_cut_again_when_no_replica_fits),
        cmocka_unit_test(test_zero_3_ranks_survive_kills),
        cmocka_unit_test(test_two_ranks_die_one_after_the_other),
        cmocka_unit_test(test_metrics_go_on_after_a_recovery_with_the_same_lines),
        cmocka_unit_test(test_ranks_on_devices_have_the_bits_of_the_cpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
