/* SPDX-License-Identifier: Apache-2.0 */
/* `belay-train sample`: the weights of a committed checkpoint, whoever had which part of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ckpt/ckpt.h"
#include "train_bench.h"
#include "trainer/options.h"
#include "trainer/shard.h"

#define PARTS 3

struct setup {
    struct train_bench bench;
    char job_path[96], root[96], dir[256];
    struct kern_pool *pool;
    struct kern *kern;
    struct train_model *model;
    float *params; /* what the checkpoint must give back */
};

static void write_job(struct setup *s)
{
    struct bl_errmsg msg = {{0}};
    snprintf(s->job_path, sizeof s->job_path, "%s/job.yaml", s->bench.dir);
    FILE *f = fopen(s->job_path, "we");
    assert_non_null(f);
    fprintf(f, "name: sample\nrun_dir: run\nranks: 1\nlanes: 1\n"
               "model: {layers: 2, dim: 32, hidden: 72, heads: 4, kv_heads: 2}\n"
               "data: {files: [text]}\n"
               "train: {global_batch: 1, micro_batch: 1, seq_len: 16, steps: 1}\n");
    assert_int_equal(fclose(f), 0);
    if (bl_job_load(&s->bench.job, s->job_path, &msg) != 0) {
        fail_msg("%s", msg.text);
    }
}

/* The part of rank `r`: its weights and moments as a trainer would name them. */
static void save_part(struct setup *s, struct ckpt_store *store, const struct ckpt_attempt *attempt,
                      uint32_t r, struct ckpt_part *ret_part, struct bl_state_digest *state)
{
    struct bl_errmsg msg = {{0}};
    struct train_shard shard;
    struct bl_extent_list list = {0};
    struct ckpt_part_result result;
    uint32_t count;
    const struct train_tensor *tensors = train_model_tensors(s->model, &count);
    struct train_grid grid;
    assert_int_equal(train_grid_make(&grid, r, PARTS, 1, 1, &msg), 0);
    assert_int_equal(train_shard_init(&shard, s->model, &grid, 1, &msg), 0);
    train_shard_layout(&shard);
    void *slot = calloc(1, shard.slot_bytes + 1);
    assert_non_null(slot);
    train_shard_fresh(&shard, slot, 5, s->pool);
    for (uint32_t i = 0; i < shard.extent_count; i++) {
        const struct train_extent *e = &shard.extents[i];
        const struct train_tensor *t = &tensors[e->tensor];
        memcpy(s->params + e->at, train_extent_view(slot, e, TRAIN_WEIGHT),
               (e->flat_hi - e->flat_lo) * sizeof(float));
        struct bl_tensor tensor = {.kind = BL_KIND_PARAM, .dtype = BL_F32, .dims = t->dims};
        struct bl_extent extent;
        uint32_t index;
        memcpy(tensor.name, t->name, sizeof tensor.name);
        memcpy(tensor.shape, t->shape, t->dims * sizeof tensor.shape[0]);
        assert_int_equal(bl_extent_list_tensor(&list, &tensor, &index, &msg), 0);
        bl_extent_whole(&extent, &tensor, index, e->flat_lo, e->flat_hi);
        extent.offset = e->offset[TRAIN_WEIGHT];
        assert_int_equal(bl_extent_list_add(&list, &extent), 0);
    }
    char name[32];
    snprintf(name, sizeof name, "part-%04u", r);
    const struct ckpt_source source = {.list = &list, .base = slot};
    const struct ckpt_part_job job = {.name = name, .sources = &source, .source_count = 1};
    if (ckpt_save_part(store, attempt, &job, &result, &msg) != 0) {
        fail_msg("%s", msg.text);
    }
    snprintf(ret_part->name, sizeof ret_part->name, "%s", name);
    snprintf(ret_part->node, sizeof ret_part->node, "here");
    ret_part->bytes = result.bytes;
    ret_part->raw_bytes = result.raw_bytes;
    ret_part->index_digest = result.index_digest;
    bl_state_digest_merge(state, &result.state);
    bl_extent_list_close(&list);
    train_shard_close(&shard);
    free(slot);
}

static void save_checkpoint(struct setup *s)
{
    struct bl_errmsg msg = {{0}};
    struct ckpt_store *store;
    const struct ckpt_attempt attempt = {.step = 12, .generation = 1, .attempt = 1, .nonce = 77};
    struct ckpt_commit_result result;
    struct ckpt_part parts[PARTS] = {0};
    struct ckpt_manifest manifest = {
        .generation = 1, .line = 1, .step = 12, .lanes = 1, .parts = parts, .part_count = PARTS};
    snprintf(s->root, sizeof s->root, "%s/root", s->bench.dir);
    snprintf(manifest.run, sizeof manifest.run, "0123456789abcdef");
    snprintf(manifest.codec, sizeof manifest.codec, "none");
    const struct ckpt_store_config config = {
        .path = s->root, .run = manifest.run, .node = "here", .create = true, .shared = true};
    if (ckpt_store_open(&store, &config, &msg) != 0 ||
        ckpt_attempt_begin(store, &attempt, &msg) != 0) {
        fail_msg("%s", msg.text);
    }
    for (uint32_t r = 0; r < PARTS; r++) {
        save_part(s, store, &attempt, r, &parts[r], &manifest.state);
    }
    if (ckpt_commit(store, &attempt, &manifest, &result, &msg) != 0) {
        fail_msg("%s", msg.text);
    }
    snprintf(s->dir, sizeof s->dir, "%s/%s", s->root, result.dir);
    for (uint32_t r = 0; r < PARTS; r++) {
        bl_extent_list_close(&parts[r].held);
    }
    ckpt_store_close(store);
}

static void setup_open(struct setup *s)
{
    struct bl_errmsg msg = {{0}};
    train_bench_open(&s->bench, 1, 0);
    write_job(s);
    assert_int_equal(kern_pool_new(&s->pool, 1, &msg), 0);
    assert_int_equal(kern_cpu_open(&s->kern, s->pool, &msg), 0);
    assert_int_equal(train_model_new(&s->model, s->kern, &s->bench.job.model, 16, 1, &msg), 0);
    s->params = calloc(train_model_buffer_elems(s->model), sizeof *s->params);
    assert_non_null(s->params);
    save_checkpoint(s);
}

static void setup_close(struct setup *s)
{
    free(s->params);
    train_model_free(s->model);
    s->kern->ops->close(s->kern);
    kern_pool_free(s->pool);
    train_bench_close(&s->bench);
}

/* Runs the command in a child; its exit code and what it wrote. */
static int run_sample(const char *const *args, char *text, size_t bytes_max, size_t *ret_bytes)
{
    char *argv[24] = {(char *)(uintptr_t) "sample"};
    int argc = 1, ends[2], status;
    for (; args[argc - 1] != NULL; argc++) {
        argv[argc] = (char *)(uintptr_t)args[argc - 1];
    }
    assert_int_equal(pipe(ends), 0);
    fflush(stdout);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(ends[1], STDOUT_FILENO);
        optind = 1;
        int code = train_sample_main(argc, argv);
        fflush(stdout);
        _exit(code);
    }
    close(ends[1]);
    *ret_bytes = 0;
    ssize_t n;
    while ((n = read(ends[0], text + *ret_bytes, bytes_max - *ret_bytes)) > 0) {
        *ret_bytes += (size_t)n;
    }
    close(ends[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void test_sample_continues_with_the_weights_of_a_checkpoint(void **state)
{
    (void)state;
    struct setup s;
    struct bl_errmsg msg = {{0}};
    setup_open(&s);
    int32_t prompt[3] = {'a', 'b', 'c'}, out[20];
    const struct train_sample how = {.temperature = 0.9, .top_k = 40, .seed = 3};
    assert_int_equal(
        train_model_sample(s.model, kern_real_f32_view(s.params), prompt, 3, out, 20, &how, &msg),
        0);
    const char *paths[2] = {s.dir, s.root};
    for (int i = 0; i < 2; i++) {
        const char *args[] = {
            "--job",         s.job_path, "--weights", paths[i], "--prompt", "abc", "--tokens", "20",
            "--temperature", "0.9",      "--top-k",   "40",     "--seed",   "3",   NULL};
        char text[256];
        size_t bytes;
        assert_int_equal(run_sample(args, text, sizeof text, &bytes), 0);
        assert_int_equal(bytes, 3 + 20 + 1);
        for (int k = 0; k < 20; k++) {
            assert_int_equal((uint8_t)text[3 + k], out[k]);
        }
    }
    setup_close(&s);
}

/* A share that one token has alone leaves only that one; all leave all. */
static void test_top_p_keeps_the_likeliest_only(void **state)
{
    (void)state;
    struct setup s;
    struct bl_errmsg msg = {{0}};
    setup_open(&s);
    int32_t prompt[1] = {'a'}, greedy[20], narrow[20], wide[20], all[20];
    const struct train_sample how[4] = {{.temperature = 0},
                                        {.temperature = 2, .top_p = 1e-9, .seed = 4},
                                        {.temperature = 2, .top_p = 1, .seed = 4},
                                        {.temperature = 2, .seed = 4}};
    int32_t *outs[4] = {greedy, narrow, wide, all};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(train_model_sample(s.model, kern_real_f32_view(s.params), prompt, 1,
                                            outs[i], 20, &how[i], &msg),
                         0);
    }
    assert_memory_equal(greedy, narrow, sizeof greedy);
    assert_memory_equal(wide, all, sizeof all);
    assert_memory_not_equal(greedy, all, sizeof all);
    setup_close(&s);
}

static void test_sample_refuses_what_is_missing(void **state)
{
    (void)state;
    struct setup s;
    char text[256], path[300];
    size_t bytes;
    setup_open(&s);
    const char *no_weights[] = {"--job", s.job_path, NULL};
    assert_int_equal(run_sample(no_weights, text, sizeof text, &bytes), 2);
    const char *bad_number[] = {"--job", s.job_path, "--weights", s.dir, "--tokens", "ten", NULL};
    assert_int_equal(run_sample(bad_number, text, sizeof text, &bytes), 2);
    snprintf(path, sizeof path, "%s/step-000000000099.g1", s.root);
    const char *no_dir[] = {"--job", s.job_path, "--weights", path, NULL};
    assert_int_equal(run_sample(no_dir, text, sizeof text, &bytes), 3);
    setup_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sample_continues_with_the_weights_of_a_checkpoint),
        cmocka_unit_test(test_top_p_keeps_the_likeliest_only),
        cmocka_unit_test(test_sample_refuses_what_is_missing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
