/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <sqlite3.h>

#include "base/file.h"
#include "daemon/store.h"

struct fixture {
    uv_loop_t loop;
    struct store *store;
    char dir[64], path[128];
    int answers, rc;
    uint64_t revision, ticket;
    int replicated;
};

static void on_done(void *arg, int rc, uint64_t revision, const char *text)
{
    struct fixture *f = arg;

    (void)text;
    f->answers++;
    f->rc = rc;
    f->revision = revision;
}

static void wait_answers(struct fixture *f, int count)
{
    while (f->answers < count) {
        uv_run(&f->loop, UV_RUN_ONCE);
    }
}

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));
    struct bl_errmsg msg = {{0}};

    strcpy(f->dir, "/tmp/belay-store-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    snprintf(f->path, sizeof(f->path), "%s/store.db", f->dir);
    uv_loop_init(&f->loop);
    assert_int_equal(store_open(&f->store, &f->loop, f->path, &msg), 0);
    *state = f;
    return 0;
}

static void on_closed(void *arg)
{
    *(int *)arg = 1;
}

static void close_store(struct fixture *f)
{
    int closed = 0;

    store_close(f->store, on_closed, &closed);
    while (!closed) {
        uv_run(&f->loop, UV_RUN_ONCE);
    }
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    close_store(f);
    uv_loop_close(&f->loop);
    assert_int_equal(bl_rm_tree("/tmp", f->dir + 5, NULL), 0);
    free(f);
    return 0;
}

static void test_swap_conflicts_when_the_revision_is_another(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(store_swap(f->store, "run/1", 0, "a", 1, on_done, f), 0);
    wait_answers(f, 1);
    assert_int_equal(f->rc, 0);
    assert_int_equal(f->revision, 1);
    assert_int_equal(store_swap(f->store, "run/1", 0, "b", 1, on_done, f), 0);
    wait_answers(f, 2);
    assert_int_equal(f->rc, BL_ECONFLICT);
    assert_int_equal(f->revision, 1);
    assert_int_equal(store_swap(f->store, "run/1", 1, "b", 1, on_done, f), 0);
    wait_answers(f, 3);
    assert_int_equal(f->rc, 0);
    assert_int_equal(f->revision, 2);
}

static int look(void *arg, const char *key, uint64_t revision, const void *value, size_t bytes)
{
    char *out = arg;

    snprintf(out + strlen(out), 64, "%s=%.*s@%llu ", key, (int)bytes, (const char *)value,
             (unsigned long long)revision);
    return 0;
}

static void test_values_are_there_when_it_is_opened_again(void **state)
{
    struct fixture *f = *state;
    char text[256] = "";

    assert_int_equal(store_swap(f->store, "run/1", 0, "one", 3, on_done, f), 0);
    assert_int_equal(store_swap(f->store, "exe/1", 0, "two", 3, on_done, f), 0);
    wait_answers(f, 2);
    close_store(f);
    assert_int_equal(store_open(&f->store, &f->loop, f->path, NULL), 0);
    assert_int_equal(store_each(f->store, "run/", look, text, NULL), 0);
    assert_string_equal(text, "run/1=one@1 ");
}

static void db_run(const char *path, const char *sql)
{
    sqlite3 *db = NULL;

    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
}

/* What the disk got wrong is never taken for a run's record. */
static void test_a_damaged_value_is_named_and_given_to_nobody(void **state)
{
    static const char *const damages[] = {
        "UPDATE kv SET value = CAST(replace(CAST(value AS TEXT), 'one', 'ono') AS BLOB)",
        "UPDATE kv SET value = x'00'", "UPDATE kv SET key = 'run/2'"};
    struct fixture *f = *state;

    for (size_t i = 0; i < sizeof(damages) / sizeof(damages[0]); i++) {
        struct bl_errmsg msg = {{0}};
        char text[256] = "";

        f->answers = 0;
        assert_int_equal(store_apply(f->store, "run/1", 1, "one", 3, on_done, f), 0);
        wait_answers(f, 1);
        close_store(f);
        db_run(f->path, damages[i]);
        assert_int_equal(store_open(&f->store, &f->loop, f->path, &msg), 0);
        assert_int_equal(store_each(f->store, "run/", look, text, &msg), BL_EDIGEST);
        assert_string_equal(text, "");
        assert_non_null(strstr(msg.text, "run/"));
        close_store(f);
        db_run(f->path, "DELETE FROM kv");
        assert_int_equal(store_open(&f->store, &f->loop, f->path, &msg), 0);
    }
}

static void test_a_file_that_is_no_database_is_refused(void **state)
{
    struct fixture *f = *state;
    struct bl_errmsg msg = {{0}};
    struct store *other = NULL;
    char path[160];

    snprintf(path, sizeof(path), "%s/other.db", f->dir);
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    for (int i = 0; i < 500; i++) {
        fputs("not a database ", file);
    }
    fclose(file);
    assert_int_equal(store_open(&other, &f->loop, path, &msg), BL_ELIBRARY);
    assert_non_null(strstr(msg.text, path));
}

static void on_change(void *arg, uint64_t ticket, const char *key, const void *value, size_t bytes,
                      uint64_t revision)
{
    struct fixture *f = arg;

    (void)key;
    (void)value;
    (void)bytes;
    (void)revision;
    f->replicated++;
    f->ticket = ticket;
}

static void test_answer_waits_for_the_standby_when_there_is_one(void **state)
{
    struct fixture *f = *state;

    store_replicate(f->store, on_change, f);
    assert_int_equal(store_swap(f->store, "run/1", 0, "a", 1, on_done, f), 0);
    assert_int_equal(store_swap(f->store, "run/1", 0, "b", 1, on_done, f), 0); /* fails behind it */
    while (f->replicated < 1) {
        uv_run(&f->loop, UV_RUN_ONCE);
    }
    uv_run(&f->loop, UV_RUN_NOWAIT);
    assert_int_equal(f->answers, 0);
    store_release(f->store, f->ticket);
    wait_answers(f, 2);
    assert_int_equal(f->rc, BL_ECONFLICT); /* answers keep their order */
}

static void test_standby_takes_a_change_when_its_revision_is_older(void **state)
{
    struct fixture *f = *state;
    char text[256] = "";

    assert_int_equal(store_apply(f->store, "run/9", 41, "x", 1, on_done, f), 0);
    wait_answers(f, 1);
    assert_int_equal(f->revision, 41);
    assert_int_equal(store_each(f->store, "", look, text, NULL), 0);
    assert_string_equal(text, "run/9=x@41 ");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_swap_conflicts_when_the_revision_is_another, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_values_are_there_when_it_is_opened_again, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_a_damaged_value_is_named_and_given_to_nobody, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_a_file_that_is_no_database_is_refused, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_answer_waits_for_the_standby_when_there_is_one, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_standby_takes_a_change_when_its_revision_is_older,
                                        setup, teardown)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
