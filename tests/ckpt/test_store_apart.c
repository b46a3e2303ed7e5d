/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints over roots that two nodes have each for itself. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "ckpt/io_roots.h"
#include "ckpt/repair.h"
#include "ckpt/retain.h"
#include "ckpt/store.h"
#include "tests/ckpt/sample.h"

#define WORLD 4 /* two ranks to a part, a part to a node */
#define DIR1  "step-000000000001.g1"

static char roots[2][256];
static const char *both[] = {roots[0], roots[1]};
static struct ckpt_io_roots seen; /* both, from the first node */

static int open_node(struct ckpt_store **ret, uint32_t node, struct ckpt_io *io,
                     struct bl_errmsg *msg)
{
    char name[8];
    const struct ckpt_store_config config = {.path = roots[node],
                                             .run = SAMPLE_RUN,
                                             .node = name,
                                             .create = true,
                                             .apart = true,
                                             .reserve_bytes = 65536,
                                             .io = io};

    snprintf(name, sizeof(name), "n%u", node);
    return ckpt_store_open(ret, &config, msg);
}

static int setup(void **state)
{
    (void)state;
    for (int n = 0; n < 2; n++) {
        sample_dir_make(roots[n], NULL);
    }
    ckpt_io_roots_init(&seen, both, 2);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    for (int n = 0; n < 2; n++) {
        sample_dir_remove(roots[n]);
    }
    return 0;
}

static struct ckpt_attempt attempt_of(uint64_t step)
{
    return (struct ckpt_attempt){step, 1, 1, 0xabcdef0000 + step};
}

/* Parts of both nodes, and the manifest at the first. Its digest. */
static uint64_t compose(uint64_t step)
{
    const struct ckpt_attempt attempt = attempt_of(step);
    struct ckpt_manifest manifest;
    struct ckpt_store *store = NULL;
    uint64_t digest = 0;

    sample_manifest_init(&manifest, &attempt, WORLD);
    for (uint32_t n = 0; n < 2; n++) {
        OK(open_node(&store, n, NULL, msg));
        OK(ckpt_attempt_begin(store, &attempt, msg));
        OK(sample_save_part(store, &attempt, SAMPLE_FLAT, WORLD, n, &manifest.parts[n], msg));
        ckpt_store_close(store);
    }
    OK(open_node(&store, 0, &seen.io, msg));
    OK(ckpt_compose(store, &attempt, &manifest, &digest, msg));
    ckpt_store_close(store);
    ckpt_manifest_close(&manifest);
    return digest;
}

/* The first node's manifest, as the second one sees it. */
static int prepare(struct ckpt_store *store, uint64_t step, uint64_t digest, struct bl_errmsg *msg)
{
    const char *from_second[] = {roots[1], roots[0]};
    const struct ckpt_attempt attempt = attempt_of(step);
    struct ckpt_io_roots other;

    ckpt_io_roots_init(&other, from_second, 2);
    return ckpt_prepare(store, &attempt, &other.io, digest, msg);
}

static void publish(uint32_t node, uint64_t step, uint64_t digest)
{
    const struct ckpt_attempt attempt = attempt_of(step);
    struct ckpt_commit_result result;
    struct ckpt_store *store = NULL;

    OK(open_node(&store, node, NULL, msg));
    OK(ckpt_publish(store, &attempt, digest, &result, msg));
    assert_int_equal(result.manifest_digest, digest);
    ckpt_store_close(store);
}

static void save(uint64_t step)
{
    uint64_t digest = compose(step);
    struct ckpt_store *store = NULL;

    OK(open_node(&store, 1, NULL, msg));
    OK(prepare(store, step, digest, msg));
    ckpt_store_close(store);
    publish(0, step, digest);
    publish(1, step, digest);
}

/* The newest entry that a node's own root has. */
static struct ckpt_entry newest(uint32_t node)
{
    struct ckpt_entry entry = {0};
    struct ckpt_store *store = NULL;
    struct ckpt_scan scan;

    OK(open_node(&store, node, NULL, msg));
    OK(ckpt_scan(store, &scan, msg));
    if (scan.count > 0) {
        entry = scan.entries[0];
    }
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
    return entry;
}

static void test_each_node_has_its_part_and_both_together_load(void **state)
{
    struct ckpt_verify_result result;
    const struct ckpt_verify_job job = {.full = true};
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};
    const struct ckpt_store_config reading = {.path = roots[0], .io = &seen.io};

    (void)state;
    save(1);
    for (uint32_t n = 0; n < 2; n++) {
        struct ckpt_entry entry = newest(n);

        assert_int_equal(entry.state, CKPT_PARTIAL);
        assert_int_equal(entry.parts_here, 1);
        assert_int_equal(entry.part_count, 2);
        assert_int_equal(entry.here[0], 1u << n);
        assert_string_equal(entry.lacks, n == 0 ? "n1" : "n0");
        OK(open_node(&store, n, NULL, msg));
        OK(ckpt_verify(store, DIR1, &job, &result, msg));
        assert_int_equal(result.findings, 0);
        assert_int_equal(result.elsewhere, 1);
        assert_int_not_equal(sample_load(store, DIR1, SAMPLE_ROWS, 3, 1, &why), 0);
        ckpt_store_close(store);
    }
    OK(ckpt_store_open(&store, &reading, msg));
    assert_string_equal(ckpt_store_owner(store), "n0");
    OK(sample_load(store, DIR1, SAMPLE_ROWS, 3, 1, msg));
    OK(ckpt_verify(store, DIR1, &job, &result, msg));
    assert_int_equal(result.findings, 0);
    assert_int_equal(result.elsewhere, 0);
    ckpt_store_close(store);
}

static void test_an_attempt_is_no_checkpoint_before_it_is_published(void **state)
{
    uint64_t digest = compose(1);
    struct ckpt_store *store = NULL;

    (void)state;
    assert_int_equal(newest(0).state, CKPT_PREPARED);
    assert_int_equal(newest(0).nonce, attempt_of(1).nonce);
    assert_int_equal(newest(1).state, CKPT_LEFTOVER);
    OK(open_node(&store, 1, NULL, msg));
    OK(prepare(store, 1, digest, msg));
    OK(prepare(store, 1, digest, msg)); /* again is fine */
    assert_int_equal(newest(1).state, CKPT_PREPARED);
    ckpt_store_close(store);
    publish(1, 1, digest);
    publish(1, 1, digest);
    assert_int_equal(newest(1).state, CKPT_PARTIAL);
    assert_int_equal(newest(0).state, CKPT_PREPARED);
}

static void test_what_is_not_the_commits_is_refused(void **state)
{
    const struct ckpt_attempt attempt = attempt_of(1);
    uint64_t digest = compose(1);
    struct ckpt_commit_result result;
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};
    char path[600];

    (void)state;
    OK(open_node(&store, 1, NULL, msg));
    assert_int_equal(prepare(store, 1, digest ^ 1, &why), BL_EDIGEST);
    assert_int_equal(ckpt_publish(store, &attempt, digest, &result, &why), -ENOENT);
    OK(prepare(store, 1, digest, msg));
    assert_int_equal(ckpt_publish(store, &attempt, digest ^ 1, &result, &why), BL_EDIGEST);
    snprintf(path, sizeof(path), "%s/.step-000000000001.g1.a1.%016llx.tmp/part-0001.safetensors",
             roots[1], (unsigned long long)attempt.nonce);
    assert_int_equal(truncate(path, 100), 0);
    assert_int_not_equal(ckpt_publish(store, &attempt, digest, &result, &why), 0);
    ckpt_store_close(store);
    assert_int_equal(newest(1).state, CKPT_LEFTOVER);
}

static void test_a_root_of_another_node_is_refused(void **state)
{
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};

    (void)state;
    save(1);
    snprintf(roots[1], sizeof(roots[1]), "%s", roots[0]);
    assert_int_equal(open_node(&store, 1, NULL, &why), BL_EFOREIGN);
    assert_non_null(strstr(why.text, "shared: true"));
}

static void test_an_own_part_that_is_gone_is_damage_another_node_s_is_not(void **state)
{
    struct ckpt_store *store = NULL;
    struct ckpt_verify_result result;
    const struct ckpt_verify_job job = {.full = true};
    char path[400];

    (void)state;
    save(1);
    snprintf(path, sizeof(path), "%s/" DIR1 "/part-0000.index", roots[0]);
    assert_int_equal(unlink(path), 0);
    snprintf(path, sizeof(path), "%s/" DIR1 "/part-0000.safetensors", roots[0]);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(newest(0).state, CKPT_BROKEN);
    assert_int_equal(newest(1).state, CKPT_PARTIAL);
    OK(open_node(&store, 0, NULL, msg));
    OK(ckpt_verify(store, DIR1, &job, &result, msg));
    assert_int_not_equal(result.findings, 0);
    ckpt_store_close(store);
}

/* Whatever operation fails, trying again ends well, and the attempt was never lost. */
static void test_a_failed_operation_is_tried_again(void **state)
{
    bool failed = true;

    (void)state;
    for (uint64_t at = 1; failed; at++) {
        const struct ckpt_attempt attempt = attempt_of(at);
        uint64_t digest = compose(at);
        struct ckpt_commit_result result;
        struct ckpt_store *store = NULL;
        struct ckpt_io_fault fault;
        struct bl_errmsg why = {0};
        int rc;

        OK(open_node(&store, 1, NULL, msg));
        ckpt_store_close(store);
        ckpt_io_fault_init(&fault, CKPT_FAULT_ERROR, at, -EIO);
        rc = open_node(&store, 1, &fault.io, &why);
        rc = rc < 0 ? rc : prepare(store, at, digest, &why);
        rc = rc < 0 ? rc : ckpt_publish(store, &attempt, digest, &result, &why);
        failed = fault.hit != 0;
        ckpt_store_close(store);
        if (rc < 0) {
            struct ckpt_entry entry = newest(1);

            assert_true(failed);
            assert_true(entry.step == at && entry.state >= CKPT_LEFTOVER);
            if (entry.state != CKPT_PARTIAL) { /* else it was the last fsync that failed */
                OK(open_node(&store, 1, NULL, msg));
                OK(prepare(store, at, digest, msg));
                ckpt_store_close(store);
            }
        }
        publish(1, at, digest);
        assert_int_equal(newest(1).state, CKPT_PARTIAL);
        assert_true(at < 100);
    }
}

static void test_retention_counts_what_was_verified_everywhere(void **state)
{
    const struct ckpt_keep keep = {.keep = 2};
    struct ckpt_decision decisions[3];
    struct ckpt_store *store = NULL;
    struct ckpt_scan scan;

    (void)state;
    for (uint64_t step = 1; step <= 3; step++) {
        save(step);
    }
    OK(open_node(&store, 0, NULL, msg));
    OK(ckpt_scan(store, &scan, msg));
    assert_int_equal(scan.count, 3);
    OK(ckpt_retain_decide(decisions, scan.entries, scan.count, &keep, NULL, 0, msg));
    assert_false(decisions[2].remove);
    assert_true(decisions[2].waits);
    for (int i = 0; i < 2; i++) {
        OK(ckpt_verified_mark(store, scan.entries[i].dir, scan.entries[i].manifest_digest, msg));
    }
    ckpt_scan_close(&scan);
    OK(ckpt_scan(store, &scan, msg));
    OK(ckpt_retain_decide(decisions, scan.entries, scan.count, &keep, NULL, 0, msg));
    assert_true(decisions[2].remove);
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
}

static void on_told(void *arg, const char *file, const char *text, bool done)
{
    (void)arg;
    (void)done;
    fail_msg("%s: %s", file, text);
}

/* The other node's part is no damage, and is not brought here from a copy. */
static void test_a_repair_leaves_other_nodes_parts_where_they_are(void **state)
{
    uint64_t digest = compose(1);
    struct ckpt_place copy = {.dir = DIR1};
    struct ckpt_repair_job job = {.dir = DIR1, .copies = &copy, .copy_count = 1, .told = on_told};
    struct ckpt_repair_result result;
    struct ckpt_store *store = NULL;
    struct ckpt_opened opened = {0};

    (void)state;
    OK(open_node(&store, 1, NULL, msg));
    OK(prepare(store, 1, digest, msg));
    publish(0, 1, digest);
    publish(1, 1, digest);
    OK(open_node(&copy.store, 0, NULL, msg));
    job.store = store;
    OK(ckpt_repair(&job, &result, msg));
    assert_int_equal(result.repaired + result.failed, 0);
    OK(ckpt_opened_load(store, DIR1, &opened, msg));
    assert_int_equal(opened.parts_here, 1);
    assert_true(opened.manifest_digest == digest);
    ckpt_opened_close(&opened);
    ckpt_store_close(copy.store);
    ckpt_store_close(store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_each_node_has_its_part_and_both_together_load, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_an_attempt_is_no_checkpoint_before_it_is_published,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_is_not_the_commits_is_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_root_of_another_node_is_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(
            test_an_own_part_that_is_gone_is_damage_another_node_s_is_not, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_repair_leaves_other_nodes_parts_where_they_are,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_failed_operation_is_tried_again, setup, teardown),
        cmocka_unit_test_setup_teardown(test_retention_counts_what_was_verified_everywhere, setup,
                                        teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
