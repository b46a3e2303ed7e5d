/* SPDX-License-Identifier: Apache-2.0 */
/* Retention: each rule, their combinations, what nothing may override; and the mark of verified. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ckpt/retain.h"
#include "ckpt/store.h"
#include "tests/ckpt/sample.h"

#define ENTRIES 40

/* ---- by hand ---- */

/* Good ones of steps 100 * count, ..., 200, 100, all verified, 10 bytes each, loss = step. */
static uint32_t entries_make(struct ckpt_entry *entries, uint32_t count)
{
    memset(entries, 0, count * sizeof(*entries));
    for (uint32_t i = 0; i < count; i++) {
        entries[i] = (struct ckpt_entry){.state = CKPT_GOOD,
                                         .step = 100 * (count - i),
                                         .generation = 1,
                                         .bytes = 10,
                                         .loss = 100.0 * (count - i),
                                         .verified_unix_s = 1};
    }
    return count;
}

/* Decides, and compares with a picture: '.' kept, 'x' removed. */
static void check(const struct ckpt_entry *entries, uint32_t count, const struct ckpt_keep *keep,
                  const struct ckpt_cut *cuts, uint32_t cut_count, const char *picture)
{
    struct ckpt_decision decisions[ENTRIES];
    char found[ENTRIES + 1] = "";

    assert_int_equal(ckpt_retain_decide(decisions, entries, count, keep, cuts, cut_count, NULL), 0);
    for (uint32_t i = 0; i < count; i++) {
        found[i] = decisions[i].remove ? 'x' : '.';
        assert_true(decisions[i].why[0] != '\0');
    }
    assert_string_equal(found, picture);
}

static void check_why(const struct ckpt_entry *entries, uint32_t count,
                      const struct ckpt_keep *keep, uint32_t index, const char *part)
{
    struct ckpt_decision decisions[ENTRIES];

    assert_int_equal(ckpt_retain_decide(decisions, entries, count, keep, NULL, 0, NULL), 0);
    if (strstr(decisions[index].why, part) == NULL) {
        fail_msg("\"%s\" is not in \"%s\"", part, decisions[index].why);
    }
}

static void test_retain_keeps_the_newest_by_number(void **state)
{
    struct ckpt_entry entries[ENTRIES];
    uint32_t n = entries_make(entries, 6);

    (void)state;
    check(entries, n, &(struct ckpt_keep){0}, NULL, 0, "......");
    check(entries, n, &(struct ckpt_keep){.keep = 4}, NULL, 0, "....xx");
    check(entries, n, &(struct ckpt_keep){.keep = 6}, NULL, 0, "......");
    check(entries, n, &(struct ckpt_keep){.keep = 1}, NULL, 0, "..xxxx"); /* never fewer than two */
    check_why(entries, n, &(struct ckpt_keep){.keep = 4}, 3, "one of the 4 newest");
    check_why(entries, n, &(struct ckpt_keep){.keep = 4}, 4, "older than the 4 newest");
}

static void test_retain_keeps_every_mth_for_ever(void **state)
{
    struct ckpt_entry entries[ENTRIES];
    uint32_t n = entries_make(entries, 9); /* 900 ... 100 */
    const struct ckpt_keep keep = {.keep = 2, .keep_every = 300};

    (void)state;
    check(entries, n, &keep, NULL, 0, "..x" /* 900 800 700 */ ".xx" /* 600 */ ".xx" /* 300 */);
    check_why(entries, n, &keep, 3, "multiple of 300");
    check(entries, n, &(struct ckpt_keep){.keep = 2, .keep_every = 300, .bytes_max = 1}, NULL, 0,
          "..x.xx.xx"); /* bytes do not take them */
}

static void test_retain_keeps_the_best_by_loss(void **state)
{
    struct ckpt_entry entries[ENTRIES];
    uint32_t n = entries_make(entries, 6);
    const struct ckpt_keep keep = {.keep = 2, .keep_best = 2};

    (void)state;
    check(entries, n, &keep, NULL, 0, "..xx..");
    check_why(entries, n, &keep, 5, "loss of 100 is one of the 2 lowest");
    entries[4].loss = entries[3].loss = 100.0; /* of equal ones the newest */
    check(entries, n, &keep, NULL, 0, "..x..x");
    entries[3].loss = (double)NAN; /* a loss that is not known is no good one */
    entries[4].loss = -(double)INFINITY;
    check(entries, n, &keep, NULL, 0, "...xx.");
}

static void test_retain_keeps_within_bytes(void **state)
{
    struct ckpt_entry entries[ENTRIES];
    uint32_t n = entries_make(entries, 6);

    (void)state;
    check(entries, n, &(struct ckpt_keep){.bytes_max = 60}, NULL, 0, "......");
    check(entries, n, &(struct ckpt_keep){.bytes_max = 59}, NULL, 0, ".....x");
    check(entries, n, &(struct ckpt_keep){.bytes_max = 35}, NULL, 0, "...xxx");
    check(entries, n, &(struct ckpt_keep){.bytes_max = 1}, NULL, 0, "..xxxx"); /* two stay */
    check(entries, n, &(struct ckpt_keep){.keep = 3, .bytes_max = 1000}, NULL, 0, "...xxx");
    check(entries, n, &(struct ckpt_keep){.keep = 5, .bytes_max = 40}, NULL, 0, "....xx");
    /* The best go after the newest ones that nothing else keeps. */
    check(entries, n, &(struct ckpt_keep){.keep = 4, .keep_best = 1, .bytes_max = 40}, NULL, 0,
          "...xx.");
    check(entries, n, &(struct ckpt_keep){.keep = 4, .keep_best = 1, .bytes_max = 20}, NULL, 0,
          "..xxxx");
    check_why(entries, n, &(struct ckpt_keep){.bytes_max = 59}, 5, "limit of 59 bytes");
    entries[5].bytes = UINT64_MAX; /* a sum that does not fit is over any limit */
    check(entries, n, &(struct ckpt_keep){.bytes_max = UINT64_MAX - 1}, NULL, 0, ".....x");
}

static void test_retain_removes_nothing_before_two_newer_are_verified(void **state)
{
    struct ckpt_entry entries[ENTRIES];
    uint32_t n = entries_make(entries, 6);
    const struct ckpt_keep keep = {.keep = 2};

    (void)state;
    entries[0].verified_unix_s = 0;
    check(entries, n, &keep, NULL, 0, "...xxx");
    check_why(entries, n, &keep, 2, "one of the two newest that were read back");
    entries[1].verified_unix_s = entries[2].verified_unix_s = 0;
    check(entries, n, &keep, NULL, 0, ".....x");
    check_why(entries, n, &keep, 2, "fewer than two newer ones");
    entries[4].verified_unix_s = 0;
    check(entries, n, &keep, NULL, 0, "......");
    check(entries, n, &(struct ckpt_keep){.bytes_max = 1}, NULL, 0, "......");
}

static void test_retain_lines_that_ended_protect_nothing(void **state)
{
    struct ckpt_entry entries[ENTRIES];
    uint32_t n = entries_make(entries, 6);
    const struct ckpt_cut cut = {2, 300}; /* generation 2 resumed at step 300 */
    const struct ckpt_keep keep = {.keep = 2};

    (void)state;
    /* 600, 500, 400 are beyond it: kept while nothing of the line is newer. */
    check(entries, n, &keep, &cut, 1, ".....x");
    entries[0].generation = entries[2].generation = 2; /* of the line now: 600, 400, 300, ... */
    check(entries, n, &keep, &cut, 1, "...xxx");
    entries[1].generation = 2;
    entries[2].generation = 1;
    check(entries, n, &keep, &cut, 1, "..xxxx");
}

static void test_retain_leaves_alone_what_is_not_its_own(void **state)
{
    struct ckpt_entry entries[ENTRIES];
    uint32_t n = entries_make(entries, 7);
    const struct ckpt_keep keep = {.keep = 2};

    (void)state;
    entries[0].state = CKPT_LEFTOVER;
    entries[1].state = CKPT_BROKEN; /* newer than the second newest: a person should see it */
    entries[4].state = CKPT_BROKEN;
    entries[5].state = CKPT_FOREIGN;
    entries[6].state = CKPT_FORWARD;
    check(entries, n, &keep, NULL, 0, "....x..");
    check_why(entries, n, &keep, 1, "left for a person");
    check_why(entries, n, &keep, 4, "broken, and older");
    check_why(entries, n, &keep, 5, "another run");
    check(entries, n, &(struct ckpt_keep){.bytes_max = 1}, NULL, 0, ".......");
}

/* ---- at random ---- */

static uint64_t seed;

static uint64_t below(uint64_t bound)
{
    seed += 0x9e3779b97f4a7c15ull;
    return bl_mix64(seed) % bound;
}

static int newest_first(const void *a_, const void *b_)
{
    const struct ckpt_entry *a = a_, *b = b_;

    if (a->step != b->step) {
        return a->step > b->step ? -1 : 1;
    }
    return a->generation > b->generation ? -1 : a->generation < b->generation;
}

static uint32_t entries_random(struct ckpt_entry *entries)
{
    uint32_t count = (uint32_t)below(ENTRIES + 1);

    memset(entries, 0, sizeof(*entries) * ENTRIES);
    for (uint32_t i = 0; i < count; i++) {
        entries[i].state = below(4) > 0 ? CKPT_GOOD : (enum ckpt_state)(1 + below(5));
        entries[i].step = below(60) * 10;
        entries[i].generation = 1 + below(3);
        entries[i].bytes = below(100);
        entries[i].loss = below(8) == 0 ? (double)NAN : (double)below(20);
        entries[i].verified_unix_s = below(3) > 0;
    }
    qsort(entries, count, sizeof(*entries), newest_first);
    return count;
}

struct trial {
    struct ckpt_entry entries[ENTRIES];
    struct ckpt_decision decisions[ENTRIES];
    uint32_t count;
    struct ckpt_keep keep;
    struct ckpt_cut cuts[2];
    uint32_t cut_count;
};

static bool is_best(const struct trial *t, uint32_t index)
{
    uint32_t better = 0;

    for (uint32_t i = 0; i < t->count; i++) {
        better += ckpt_entry_admitted(&t->entries[i], t->cuts, t->cut_count) &&
                  (t->entries[i].loss < t->entries[index].loss ||
                   (t->entries[i].loss == t->entries[index].loss && i < index));
    }
    return !isnan(t->entries[index].loss) && better < t->keep.keep_best;
}

/* What must hold for each entry, whatever the rules were. */
static void trial_check(const struct trial *t)
{
    uint32_t verified = 0, rank = 0;
    uint32_t number = t->keep.keep == 0 ? UINT32_MAX : t->keep.keep < 2 ? 2 : t->keep.keep;
    uint64_t total = 0, can_go = 0;

    for (uint32_t i = 0; i < t->count; i++) {
        const struct ckpt_entry *entry = &t->entries[i];
        bool admitted = ckpt_entry_admitted(entry, t->cuts, t->cut_count);
        bool ever = t->keep.keep_every > 0 && entry->step % t->keep.keep_every == 0;
        bool best = admitted && is_best(t, i);
        bool removed = t->decisions[i].remove;

        assert_true(t->decisions[i].why[0] != '\0');
        assert_false(removed && verified < 2);
        assert_false(removed && (entry->state == CKPT_FOREIGN || entry->state == CKPT_LEFTOVER ||
                                 entry->state == CKPT_FORWARD));
        assert_false(removed && admitted && ever);
        assert_false(removed && admitted && t->keep.bytes_max == 0 && (rank < number || best));
        if (ckpt_keep_is_on(&t->keep) && admitted && verified >= 2 && rank >= number && !ever &&
            !best) {
            assert_true(removed);
        }
        total += admitted && !removed ? entry->bytes : 0;
        can_go += admitted && !removed && !ever && verified >= 2;
        rank += admitted;
        verified += admitted && entry->verified_unix_s > 0 && !removed;
    }
    if (t->keep.bytes_max > 0 && total > t->keep.bytes_max) {
        assert_int_equal(can_go, 0);
    }
}

/* What is left stays when it is asked again. */
static void trial_again(struct trial *t)
{
    struct ckpt_decision decisions[ENTRIES];
    uint32_t left = 0;

    for (uint32_t i = 0; i < t->count; i++) {
        if (!t->decisions[i].remove) {
            t->entries[left++] = t->entries[i];
        }
    }
    assert_int_equal(
        ckpt_retain_decide(decisions, t->entries, left, &t->keep, t->cuts, t->cut_count, NULL), 0);
    for (uint32_t i = 0; i < left; i++) {
        if (decisions[i].remove) {
            fail_msg("step %llu: %s", (unsigned long long)t->entries[i].step, decisions[i].why);
        }
    }
}

static void test_retain_holds_its_promises_for_any_list(void **state)
{
    const char *given = getenv("BELAY_SEED");
    uint64_t first = given != NULL ? strtoull(given, NULL, 0) : (uint64_t)getpid() * 1000003u;

    (void)state;
    printf("seeds from %llu (BELAY_SEED repeats)\n", (unsigned long long)first);
    for (uint32_t i = 0; i < 20000; i++) {
        static struct trial t;

        seed = first + i;
        t.count = entries_random(t.entries);
        t.keep = (struct ckpt_keep){.keep = (uint32_t)below(8),
                                    .keep_best = below(2) ? (uint32_t)below(5) : 0,
                                    .keep_every = below(2) ? below(20) * 10 : 0,
                                    .bytes_max = below(2) ? below(2000) : 0};
        t.cut_count = (uint32_t)below(3);
        for (uint32_t k = 0; k < t.cut_count; k++) {
            t.cuts[k] = (struct ckpt_cut){2 + k, below(60) * 10};
        }
        if (ckpt_retain_decide(t.decisions, t.entries, t.count, &t.keep, t.cuts, t.cut_count,
                               NULL) != 0) {
            fail();
        }
        trial_check(&t);
        trial_again(&t);
    }
}

/* ---- on disk ---- */

static char root[256];

static int setup(void **state)
{
    (void)state;
    sample_scale = 1;
    sample_dir_make(root, access("/dev/shm", W_OK) == 0 ? "/dev/shm" : NULL);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    sample_dir_remove(root);
    return 0;
}

static void scan_now(struct ckpt_store *store, struct ckpt_scan *scan, uint32_t count)
{
    assert_int_equal(ckpt_scan(store, scan, NULL), 0);
    assert_int_equal(scan->count, count);
}

static void test_retain_mark_of_verified_is_seen_by_the_next_scan(void **state)
{
    struct ckpt_store *store;
    struct ckpt_scan scan;
    char path[400];
    FILE *file;

    (void)state;
    assert_int_equal(sample_open(&store, root, NULL, NULL), 0);
    assert_int_equal(sample_save(store, SAMPLE_FLAT, 2, 10, 1, 1, NULL), 0);
    scan_now(store, &scan, 1);
    assert_true(scan.entries[0].verified_unix_s == 0);
    for (int i = 0; i < 2; i++) { /* again is fine */
        assert_int_equal(
            ckpt_verified_mark(store, scan.entries[0].dir, scan.entries[0].manifest_digest, NULL),
            0);
    }
    snprintf(path, sizeof(path), "%s/%s/verified", root, scan.entries[0].dir);
    ckpt_scan_close(&scan);
    scan_now(store, &scan, 1);
    assert_int_equal(scan.entries[0].state, CKPT_GOOD);
    assert_true(scan.entries[0].verified_unix_s > 1700000000);
    /* Of another manifest, or damaged: nothing is known. */
    assert_int_equal(
        ckpt_verified_mark(store, scan.entries[0].dir, scan.entries[0].manifest_digest + 1, NULL),
        0);
    ckpt_scan_close(&scan);
    scan_now(store, &scan, 1);
    assert_true(scan.entries[0].verified_unix_s == 0);
    assert_int_equal(
        ckpt_verified_mark(store, scan.entries[0].dir, scan.entries[0].manifest_digest, NULL), 0);
    ckpt_scan_close(&scan);
    file = fopen(path, "r+");
    assert_non_null(file);
    assert_int_equal(fseek(file, 30, SEEK_SET), 0);
    fputc('~', file);
    fclose(file);
    scan_now(store, &scan, 1);
    assert_int_equal(scan.entries[0].state, CKPT_GOOD);
    assert_true(scan.entries[0].verified_unix_s == 0);
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
}

static void test_retain_removes_what_it_decided(void **state)
{
    const struct ckpt_keep keep = {.keep = 2, .keep_every = 20};
    struct ckpt_decision decisions[8];
    struct ckpt_retain_result result;
    struct ckpt_store *store;
    struct ckpt_scan scan;

    (void)state;
    assert_int_equal(sample_open(&store, root, NULL, NULL), 0);
    for (uint64_t step = 10; step <= 60; step += 10) {
        assert_int_equal(sample_save(store, SAMPLE_FLAT, 2, step, 1, 1, NULL), 0);
    }
    scan_now(store, &scan, 6);
    for (uint32_t i = 1; i < 3; i++) { /* 50 and 40; not the newest */
        assert_int_equal(
            ckpt_verified_mark(store, scan.entries[i].dir, scan.entries[i].manifest_digest, NULL),
            0);
    }
    ckpt_scan_close(&scan);
    scan_now(store, &scan, 6);
    assert_int_equal(ckpt_retain_decide(decisions, scan.entries, scan.count, &keep, NULL, 0, NULL),
                     0);
    assert_int_equal(ckpt_retain_remove(store, scan.entries, decisions, scan.count, &result, NULL),
                     0);
    assert_int_equal(result.removed, 2); /* 30 and 10 */
    assert_int_equal(result.kept, 4);
    ckpt_scan_close(&scan);
    scan_now(store, &scan, 4);
    assert_int_equal(scan.entries[2].step, 40);
    assert_int_equal(scan.entries[3].step, 20);
    sample_load_check(store, scan.entries[3].dir, SAMPLE_ROWS, 3, 20);
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_retain_keeps_the_newest_by_number),
        cmocka_unit_test(test_retain_keeps_every_mth_for_ever),
        cmocka_unit_test(test_retain_keeps_the_best_by_loss),
        cmocka_unit_test(test_retain_keeps_within_bytes),
        cmocka_unit_test(test_retain_removes_nothing_before_two_newer_are_verified),
        cmocka_unit_test(test_retain_lines_that_ended_protect_nothing),
        cmocka_unit_test(test_retain_leaves_alone_what_is_not_its_own),
        cmocka_unit_test(test_retain_holds_its_promises_for_any_list),
        cmocka_unit_test_setup_teardown(test_retain_mark_of_verified_is_seen_by_the_next_scan,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_retain_removes_what_it_decided, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
