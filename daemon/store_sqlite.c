/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The embedded store: one SQLite table on a thread of its own, so that an fsync of a slow disk
 * never holds a beat up.
 *
 *      loop: store_swap -> queue --thread: transaction, fsync--> done queue -> uv_async -> callback
 *
 * With a standby the loop holds the answer back between the last two arrows (a ticket) until
 * store_release.
 */
#include "daemon/store.h"

#include <errno.h>
#include <pthread.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/digest.h"
#include "base/failpoint.h"

#define STORE_DIGEST_BYTES 8 /* XXH3 of key and value, behind each value: SQLite checks none */

struct store_job {
    struct store_job *next;
    char key[STORE_KEY_MAX];
    uint64_t expect;
    int blind; /* store_apply: `expect` is the revision to set */
    void *value;
    size_t bytes;
    store_done_fn done;
    void *arg;
    int rc;
    uint64_t revision, ticket;
    char text[256];
};

struct store_queue {
    struct store_job *first, *last;
};

struct store {
    sqlite3 *db; /* the thread's while it runs, but for store_each, under `db_lock` */
    pthread_mutex_t db_lock;
    pthread_t thread;
    pthread_mutex_t lock; /* guards todo, done, stop */
    pthread_cond_t filled;
    struct store_queue todo, done;
    int stop;
    uv_async_t async;
    /* The loop's own: */
    uint32_t pending;
    struct store_queue held; /* durable here, waiting for the standby */
    store_replicate_fn replicate;
    void *replicate_arg;
    uint64_t ticket;
    void (*closed)(void *arg);
    void *closed_arg;
};

static void queue_put(struct store_queue *queue, struct store_job *job)
{
    job->next = NULL;
    if (queue->last) {
        queue->last->next = job;
    } else {
        queue->first = job;
    }
    queue->last = job;
}

static struct store_job *queue_take(struct store_queue *queue)
{
    struct store_job *job = queue->first;

    if (job) {
        queue->first = job->next;
        if (!queue->first) {
            queue->last = NULL;
        }
    }
    return job;
}

static void job_free(struct store_job *job)
{
    free(job->value);
    free(job);
}

/* SQLite's code as ours; the text stays. */
static int store_error(sqlite3 *db, struct store_job *job, const char *what)
{
    int code = sqlite3_errcode(db);

    snprintf(job->text, sizeof(job->text), "store: %s: %s", what, sqlite3_errmsg(db));
    return code == SQLITE_FULL ? -ENOSPC : BL_ELIBRARY;
}

static int revision_read(sqlite3 *db, struct store_job *job, uint64_t *ret)
{
    sqlite3_stmt *stmt = NULL;

    if (sqlite3_prepare_v2(db, "SELECT revision FROM kv WHERE key = ?", -1, &stmt, NULL) !=
        SQLITE_OK) {
        return store_error(db, job, "read");
    }
    sqlite3_bind_text(stmt, 1, job->key, -1, SQLITE_STATIC);
    int rc = sqlite3_step(stmt);

    *ret = rc == SQLITE_ROW ? (uint64_t)sqlite3_column_int64(stmt, 0) : 0;
    int bad = rc != SQLITE_ROW && rc != SQLITE_DONE ? store_error(db, job, "read") : 0;

    sqlite3_finalize(stmt);
    return bad;
}

static uint64_t value_digest(const char *key, const void *value, size_t bytes)
{
    return bl_xxh3(value, bytes) ^ bl_xxh3(key, strlen(key));
}

/* job->value has room for the digest behind its bytes. */
static int value_write(sqlite3 *db, struct store_job *job)
{
    uint64_t digest = value_digest(job->key, job->value, job->bytes);

    static const char sql[] = "INSERT INTO kv(key, revision, value) VALUES(?1, ?2, ?3) "
                              "ON CONFLICT(key) DO UPDATE SET revision = ?2, value = ?3";
    sqlite3_stmt *stmt = NULL;

    if (sqlite3_prepare_v2(db, sql, -1, &stmt, NULL) != SQLITE_OK) {
        return store_error(db, job, "write");
    }
    sqlite3_bind_text(stmt, 1, job->key, -1, SQLITE_STATIC);
    sqlite3_bind_int64(stmt, 2, (sqlite3_int64)job->revision);
    memcpy((char *)job->value + job->bytes, &digest, STORE_DIGEST_BYTES);
    sqlite3_bind_blob64(stmt, 3, job->value, job->bytes + STORE_DIGEST_BYTES, SQLITE_STATIC);
    int rc = sqlite3_step(stmt) == SQLITE_DONE ? 0 : store_error(db, job, "write");

    sqlite3_finalize(stmt);
    return rc;
}

static int job_run(sqlite3 *db, struct store_job *job)
{
    uint64_t there = 0;

    if (sqlite3_exec(db, "BEGIN IMMEDIATE", NULL, NULL, NULL) != SQLITE_OK) {
        return store_error(db, job, "begin");
    }
    int rc = revision_read(db, job, &there);

    if (rc == 0 && job->blind) {
        job->revision = job->expect;
    } else if (rc == 0 && there != job->expect) {
        job->revision = there;
        snprintf(job->text, sizeof(job->text), "store: %s is at revision %llu, not %llu", job->key,
                 (unsigned long long)there, (unsigned long long)job->expect);
        rc = BL_ECONFLICT;
    } else {
        job->revision = job->expect + 1;
    }
    if (rc == 0) {
        rc = value_write(db, job);
    }
    if (rc == 0 && sqlite3_exec(db, "COMMIT", NULL, NULL, NULL) != SQLITE_OK) {
        rc = store_error(db, job, "commit");
    }
    if (rc != 0) {
        sqlite3_exec(db, "ROLLBACK", NULL, NULL, NULL);
    }
    return rc;
}

static void *store_main(void *arg)
{
    struct store *store = arg;

    pthread_mutex_lock(&store->lock);
    for (;;) {
        struct store_job *job = queue_take(&store->todo);

        if (!job && store->stop) {
            break;
        }
        if (!job) {
            pthread_cond_wait(&store->filled, &store->lock);
            continue;
        }
        pthread_mutex_unlock(&store->lock);
        BL_IGNORE(BL_FAILPOINT("store-write"), "it acts by itself");
        pthread_mutex_lock(&store->db_lock);
        job->rc = job_run(store->db, job);
        pthread_mutex_unlock(&store->db_lock);
        BL_IGNORE(BL_FAILPOINT("store-written"), "it acts by itself");
        pthread_mutex_lock(&store->lock);
        queue_put(&store->done, job);
        uv_async_send(&store->async);
    }
    pthread_mutex_unlock(&store->lock);
    return NULL;
}

static void job_answer(struct store *store, struct store_job *job)
{
    store->pending--;
    if (!store->stop) {
        job->done(job->arg, job->rc, job->revision, job->text);
    }
    job_free(job);
}

static void on_async(uv_async_t *async)
{
    struct store *store = async->data;

    for (;;) {
        pthread_mutex_lock(&store->lock);
        struct store_job *job = queue_take(&store->done);

        pthread_mutex_unlock(&store->lock);
        if (!job) {
            return;
        }
        if (job->rc == 0 && store->replicate && !job->blind) {
            job->ticket = ++store->ticket;
            queue_put(&store->held, job);
            store->replicate(store->replicate_arg, job->ticket, job->key, job->value, job->bytes,
                             job->revision);
        } else if (store->held.first) { /* order is kept: it waits behind those held */
            job->ticket = 0;
            queue_put(&store->held, job);
        } else {
            job_answer(store, job);
        }
    }
}

void store_release(struct store *store, uint64_t ticket)
{
    /* Tickets are released in order: those before it, and failures between, go with it. */
    while (store->held.first && store->held.first->ticket <= ticket) {
        job_answer(store, queue_take(&store->held));
    }
}

void store_replicate(struct store *store, store_replicate_fn fn, void *arg)
{
    store->replicate = fn;
    store->replicate_arg = arg;
}

static int db_open(struct store *store, const char *path, struct bl_errmsg *msg)
{
    static const char setup[] = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;"
                                "CREATE TABLE IF NOT EXISTS kv(key TEXT PRIMARY KEY, "
                                "revision INTEGER NOT NULL, value BLOB NOT NULL) WITHOUT ROWID;";
    char *text = NULL;

    if (sqlite3_open_v2(path, &store->db,
                        SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_FULLMUTEX,
                        NULL) != SQLITE_OK) {
        return bl_err(msg, BL_ELIBRARY, "store %s: %s", path,
                      store->db ? sqlite3_errmsg(store->db) : "out of memory");
    }
    sqlite3_busy_timeout(store->db, 2000);
    if (sqlite3_exec(store->db, setup, NULL, NULL, &text) != SQLITE_OK) {
        int rc = bl_err(msg, BL_ELIBRARY, "store %s: %s", path, text ? text : "cannot be set up");

        sqlite3_free(text);
        return rc;
    }
    return 0;
}

int store_open(struct store **ret, uv_loop_t *loop, const char *path, struct bl_errmsg *msg)
{
    struct store *store = calloc(1, sizeof(*store));

    if (!store) {
        return bl_err_code(msg, -ENOMEM, "store");
    }
    int rc = db_open(store, path, msg);

    if (rc != 0) {
        goto fail;
    }
    pthread_mutex_init(&store->lock, NULL);
    pthread_mutex_init(&store->db_lock, NULL);
    pthread_cond_init(&store->filled, NULL);
    rc = uv_async_init(loop, &store->async, on_async);
    if (rc != 0) {
        bl_err_code(msg, rc, "store");
        goto fail;
    }
    store->async.data = store;
    BL_ASSERT(pthread_create(&store->thread, NULL, store_main, store) == 0);
    *ret = store;
    return 0;
fail:
    sqlite3_close(store->db);
    free(store);
    return rc;
}

static void on_closed(uv_handle_t *handle)
{
    struct store *store = handle->data;
    struct store_job *job;
    void (*closed)(void *) = store->closed;
    void *arg = store->closed_arg;

    while ((job = queue_take(&store->done)) || (job = queue_take(&store->held))) {
        job_free(job);
    }
    sqlite3_close(store->db);
    free(store);
    closed(arg);
}

void store_close(struct store *store, void (*done)(void *arg), void *arg)
{
    if (!store) {
        done(arg);
        return;
    }
    pthread_mutex_lock(&store->lock);
    store->stop = 1;
    pthread_cond_signal(&store->filled);
    pthread_mutex_unlock(&store->lock);
    pthread_join(store->thread, NULL);
    store->closed = done;
    store->closed_arg = arg;
    uv_close((uv_handle_t *)&store->async, on_closed);
}

static int store_submit(struct store *store, struct store_job *like, const void *value)
{
    if (store->pending >= STORE_PENDING_MAX || like->bytes > STORE_VALUE_MAX) {
        return BL_ELIMIT;
    }
    struct store_job *job = malloc(sizeof(*job));

    if (!job) {
        return -ENOMEM;
    }
    *job = *like;
    job->value = malloc(job->bytes + STORE_DIGEST_BYTES);
    if (!job->value) {
        free(job);
        return -ENOMEM;
    }
    memcpy(job->value, value, job->bytes);
    store->pending++;
    pthread_mutex_lock(&store->lock);
    queue_put(&store->todo, job);
    pthread_cond_signal(&store->filled);
    pthread_mutex_unlock(&store->lock);
    return 0;
}

int store_swap(struct store *store, const char *key, uint64_t expect, const void *value,
               size_t bytes, store_done_fn done, void *arg)
{
    struct store_job job = {.expect = expect, .bytes = bytes, .done = done, .arg = arg};

    snprintf(job.key, sizeof(job.key), "%s", key);
    return store_submit(store, &job, value);
}

int store_apply(struct store *store, const char *key, uint64_t revision, const void *value,
                size_t bytes, store_done_fn done, void *arg)
{
    struct store_job job = {
        .expect = revision, .blind = 1, .bytes = bytes, .done = done, .arg = arg};

    snprintf(job.key, sizeof(job.key), "%s", key);
    return store_submit(store, &job, value);
}

/* One row, if its digest is right. */
static int row_give(sqlite3_stmt *stmt, store_each_fn each, void *arg, struct bl_errmsg *msg)
{
    const char *key = (const char *)sqlite3_column_text(stmt, 0);
    const char *value = sqlite3_column_blob(stmt, 2);
    int bytes = sqlite3_column_bytes(stmt, 2) - STORE_DIGEST_BYTES;
    uint64_t digest = 0;

    if (!key) {
        return bl_err_code(msg, -ENOMEM, "store: read");
    }
    if (value && bytes >= 0) {
        memcpy(&digest, value + bytes, STORE_DIGEST_BYTES);
    }
    if (!value || bytes < 0 || digest != value_digest(key, value, (size_t)bytes)) {
        return bl_err(msg, BL_EDIGEST,
                      "store: %s is damaged: promote the standby, or move store.db away and take "
                      "each run up with belay run --recover ROOT",
                      key);
    }
    return each(arg, key, (uint64_t)sqlite3_column_int64(stmt, 1), value, (size_t)bytes);
}

int store_each(struct store *store, const char *prefix, store_each_fn each, void *arg,
               struct bl_errmsg *msg)
{
    sqlite3_stmt *stmt = NULL;
    int rc = 0, step = SQLITE_DONE;

    pthread_mutex_lock(&store->db_lock);
    if (sqlite3_prepare_v2(store->db,
                           "SELECT key, revision, value FROM kv "
                           "WHERE substr(key, 1, length(?1)) = ?1 ORDER BY key",
                           -1, &stmt, NULL) != SQLITE_OK) {
        rc = bl_err(msg, BL_ELIBRARY, "store: read: %s", sqlite3_errmsg(store->db));
    } else {
        sqlite3_bind_text(stmt, 1, prefix, -1, SQLITE_STATIC);
        while (rc == 0 && (step = sqlite3_step(stmt)) == SQLITE_ROW) {
            rc = row_give(stmt, each, arg, msg);
        }
        if (rc == 0 && step != SQLITE_DONE) {
            rc = bl_err(msg, BL_ELIBRARY, "store: read: %s", sqlite3_errmsg(store->db));
        }
        sqlite3_finalize(stmt);
    }
    pthread_mutex_unlock(&store->db_lock);
    return rc;
}
