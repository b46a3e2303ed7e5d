/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What follows a commit, on a thread of its own that is as kind as a thread can be: sweep what dead
 * attempts left, read back what was committed, and only then let older ones go.
 *
 *     commits -> | newest .. oldest | -> sweep -> read back -> mark -> retain -> ENGINE_VERIFIED
 *
 * The newest commit comes first: with it and the one before verified, retention can let go of all
 * that is older, read back or not. A save has precedence: while one is asked for or written, the
 * verifier stands still between two buffers. Where saves follow each other so closely that commits
 * wait here, it no longer does: a disk that fills up would end the saves too.
 *
 * Of a checkpoint that lies on several nodes each reads back what it has, and nothing goes. When
 * all have, the leader says so (RETAIN): only then is it marked here, and counts for retention.
 *
 * Who was verified is recorded in the checkpoint's directory; where that cannot be written (a full
 * disk), this process remembers it, so that retention can make room all the same. Who was found
 * damaged is remembered too, and protects nothing.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "ckpt/retain.h"
#include "engine/engine.h"

#define PENDING_MAX 16u  /* commits that wait; the oldest is let go unverified */
#define BEHIND      2u   /* so many waiting: saves no longer hold it up */
#define KNOWN_MAX   256u /* checkpoints remembered */

struct pending { /* a commit and what is to follow it */
    struct wire_engine_root root;
    struct ckpt_keep keep;
    bool verify;
    bool retain; /* of RETAIN: it was verified everywhere, on all nodes that have it */
    uint64_t attempt, step, generation;
    char dir[WIRE_DIR_MAX];
    uint64_t manifest_digest;
    struct ckpt_cut *cuts; /* owned */
    uint32_t cut_count;
    struct pending *next; /* older */
};

struct known {
    uint64_t manifest_digest;
    bool good;
};

struct engine_verifier {
    struct engine *engine;
    pthread_t thread;
    pthread_mutex_t lock; /* guards the six below */
    pthread_cond_t wake;
    struct pending *first;
    uint32_t count;
    int saves; /* asked for and not answered */
    bool stop, done;
    atomic_int cancel; /* what ckpt_verify looks at */
    /* The thread's own. */
    struct known known[KNOWN_MAX]; /* a ring */
    uint32_t known_count;
};

static uint64_t now_ms(void)
{
    return bl_now_ns() / 1000000;
}

static void pending_free(struct pending *pending)
{
    if (pending != NULL) {
        free(pending->cuts);
        free(pending);
    }
}

/* ---- standing still ---- */

/* Until no save runs, or too much waits. */
static void wait_for_saves(struct engine_verifier *verifier)
{
    pthread_mutex_lock(&verifier->lock);
    while (verifier->saves > 0 && verifier->count < BEHIND && !verifier->stop) {
        pthread_cond_wait(&verifier->wake, &verifier->lock);
    }
    pthread_mutex_unlock(&verifier->lock);
}

static void on_progress(void *arg, uint64_t bytes_done, uint64_t bytes_all)
{
    (void)bytes_done;
    (void)bytes_all;
    wait_for_saves(arg);
}

void engine_verifier_saves(struct engine_verifier *verifier, int change)
{
    pthread_mutex_lock(&verifier->lock);
    verifier->saves += change;
    BL_ASSERT(verifier->saves >= 0);
    if (verifier->saves == 0) {
        pthread_cond_broadcast(&verifier->wake);
    }
    pthread_mutex_unlock(&verifier->lock);
}

/* ---- what is known of a checkpoint ---- */

static const struct known *known_find(const struct engine_verifier *verifier, uint64_t digest)
{
    for (uint32_t i = 0; i < KNOWN_MAX && i < verifier->known_count; i++) {
        if (verifier->known[i].manifest_digest == digest) {
            return &verifier->known[i];
        }
    }
    return NULL;
}

static void known_add(struct engine_verifier *verifier, uint64_t digest, bool good)
{
    for (uint32_t i = 0; i < KNOWN_MAX && i < verifier->known_count; i++) {
        if (verifier->known[i].manifest_digest == digest) {
            verifier->known[i].good = good; /* what was found last counts */
            return;
        }
    }
    verifier->known[verifier->known_count++ % KNOWN_MAX] = (struct known){digest, good};
    if (verifier->known_count == 2 * KNOWN_MAX) {
        verifier->known_count = KNOWN_MAX;
    }
}

/* ---- reading back ---- */

static void mark(struct ckpt_store *store, const char *dir, uint64_t manifest_digest)
{
    struct bl_errmsg why = {0};

    if (ckpt_verified_mark(store, dir, manifest_digest, &why) < 0) {
        bl_log(BL_LOG_WARN, "engine", "%s: cannot be marked as verified: %s", dir, why.text);
    }
}

/* Reads `dir` back and says so. False: the engine leaves. */
static bool read_back(struct engine_verifier *verifier, const struct pending *pending,
                      struct ckpt_store *store, const char *dir, uint64_t manifest_digest,
                      struct wire_engine_verified *answer)
{
    const struct ckpt_verify_job job = {
        .full = true, .progress = on_progress, .arg = verifier, .cancel = &verifier->cancel};
    uint64_t began = now_ms();
    struct ckpt_verify_result result = {0};
    struct bl_errmsg why = {0};
    int rc;

    BL_IGNORE(BL_FAILPOINT("verify-begin"), "only a delay makes sense here");
    rc = ckpt_verify(store, dir, &job, &result, &why);
    if (rc == BL_EABORTED) {
        return false;
    }
    answer->rc = rc == 0 && result.findings > 0 ? BL_EDIGEST : rc;
    answer->bytes = result.bytes_read;
    answer->elapsed_ms = now_ms() - began;
    snprintf(answer->dir, sizeof(answer->dir), "%s", dir);
    engine_text(answer->text, answer->rc, &why);
    if (answer->rc < 0 || !pending->root.apart) {
        known_add(verifier, manifest_digest, answer->rc == 0);
    }
    if (answer->rc < 0) {
        bl_log(BL_LOG_ERROR, "engine", "%s/%s: read back: %s", pending->root.path, dir,
               answer->text);
        ckpt_verified_clear(store, dir);
        return true;
    }
    bl_log(BL_LOG_INFO, "engine", "%s: read back, %llu bytes in %llu ms", dir,
           (unsigned long long)answer->bytes, (unsigned long long)answer->elapsed_ms);
    if (!pending->root.apart) {
        mark(store, dir, manifest_digest);
    }
    return true;
}

/* ---- retention ---- */

/* What this process knows joins what the disk says. */
static void scan_complete(const struct engine_verifier *verifier, struct ckpt_scan *scan)
{
    for (uint32_t i = 0; i < scan->count; i++) {
        const struct known *known = known_find(verifier, scan->entries[i].manifest_digest);

        if (known != NULL && known->good && scan->entries[i].verified_unix_s == 0) {
            scan->entries[i].verified_unix_s = 1;
        } else if (known != NULL && !known->good) {
            scan->entries[i].verified_unix_s = 0; /* its mark may still be there */
        }
    }
}

/* The newest good one that nobody has read back, if something waits for that. NULL: none. */
static const struct ckpt_entry *retain_waits_for(const struct engine_verifier *verifier,
                                                 const struct ckpt_scan *scan,
                                                 const struct ckpt_decision *decisions,
                                                 const struct pending *pending)
{
    bool waits = false;

    for (uint32_t i = 0; i < scan->count; i++) {
        waits = waits || decisions[i].waits;
    }
    for (uint32_t i = 0; waits && i < scan->count; i++) {
        const struct ckpt_entry *entry = &scan->entries[i];

        if (entry->verified_unix_s == 0 &&
            ckpt_entry_admitted(entry, pending->cuts, pending->cut_count) &&
            known_find(verifier, entry->manifest_digest) == NULL) {
            return entry;
        }
    }
    return NULL;
}

/* One look: removes what may go. *ret_next is what has to be read back before more may. */
static int retain_once(struct engine_verifier *verifier, const struct pending *pending,
                       struct ckpt_store *store, uint32_t *removed, struct ckpt_entry *ret_next,
                       struct bl_errmsg *msg)
{
    struct ckpt_retain_result result = {0};
    struct ckpt_decision *decisions = NULL;
    const struct ckpt_entry *next = NULL;
    struct ckpt_scan scan = {0};
    int rc = ckpt_scan(store, &scan, msg);

    if (rc < 0) {
        return rc;
    }
    scan_complete(verifier, &scan);
    decisions = calloc(scan.count + 1u, sizeof(*decisions));
    rc = decisions == NULL ? bl_err_code(msg, -ENOMEM, "retention") : 0;
    rc = rc < 0 ? rc
                : ckpt_retain_decide(decisions, scan.entries, scan.count, &pending->keep,
                                     pending->cuts, pending->cut_count, msg);
    rc = rc < 0 ? rc : ckpt_retain_remove(store, scan.entries, decisions, scan.count, &result, msg);
    for (uint32_t i = 0; rc == 0 && i < scan.count; i++) {
        if (decisions[i].remove) {
            bl_log(BL_LOG_INFO, "engine", "%s: retired: %s", scan.entries[i].dir, decisions[i].why);
        }
    }
    if (rc == 0 && !pending->root.apart) { /* else the leader knows when all have read it */
        next = retain_waits_for(verifier, &scan, decisions, pending);
        memset(ret_next, 0, sizeof(*ret_next));
        *ret_next = next == NULL ? *ret_next : *next;
    }
    *removed += result.removed;
    free(decisions);
    ckpt_scan_close(&scan);
    return rc;
}

/* Retention may have been faster, or a person. */
static bool is_gone(const struct ckpt_store *store, const char *dir)
{
    char path[CKPT_PATH_MAX];

    return ckpt_path_join(path, ckpt_store_path(store), dir, NULL, NULL) == 0 &&
           access(path, F_OK) != 0 && errno == ENOENT;
}

/* Is this checkpoint's commit among those that wait? Then it need not be read back again. The
 * attempt, or 0. */
static uint64_t pending_done(struct engine_verifier *verifier, uint64_t manifest_digest)
{
    uint64_t attempt = 0;

    pthread_mutex_lock(&verifier->lock);
    for (struct pending *at = verifier->first; at != NULL; at = at->next) {
        if (at->manifest_digest == manifest_digest) {
            at->verify = false;
            attempt = at->attempt;
        }
    }
    pthread_mutex_unlock(&verifier->lock);
    return attempt;
}

/* Retains, reading back what has to be before more may go. `answer` is what was read back before,
 * or NULL: it is sent after the first removal, whose number it carries. */
static int follow_retain(struct engine_verifier *verifier, const struct pending *pending,
                         struct ckpt_store *store, struct wire_engine_verified *answer,
                         struct bl_errmsg *msg)
{
    struct wire_engine_verified other;
    struct ckpt_entry next = {0};
    int rc = 0;

    for (bool more = ckpt_keep_is_on(&pending->keep); more;) {
        uint32_t removed = 0;

        rc = retain_once(verifier, pending, store, &removed, &next, msg);
        if (rc == 0 && removed > 0) {
            rc = ckpt_sweep(store, pending->generation, pending->step, msg);
        }
        if (answer != NULL) {
            answer->removed = removed;
            engine_answer(verifier->engine, WIRE_TYPE_ENGINE_VERIFIED, answer);
            answer = NULL;
        }
        more = rc == 0 && next.dir[0] != '\0';
        if (more) {
            uint64_t attempt = next.manifest_digest == pending->manifest_digest
                                   ? pending->attempt
                                   : pending_done(verifier, next.manifest_digest);

            other = (struct wire_engine_verified){.attempt = attempt, .step = next.step};
            more = read_back(verifier, pending, store, next.dir, next.manifest_digest, &other);
            answer = more ? &other : NULL;
        }
    }
    if (answer != NULL) { /* there is no rule */
        engine_answer(verifier->engine, WIRE_TYPE_ENGINE_VERIFIED, answer);
    }
    return rc;
}

/* All of a commit's aftermath but for the opening. */
static int follow(struct engine_verifier *verifier, const struct pending *pending,
                  struct ckpt_store *store, struct bl_errmsg *msg)
{
    struct wire_engine_verified answer = {.attempt = pending->attempt, .step = pending->step};
    struct bl_errmsg why = {0};

    if (ckpt_sweep(store, pending->generation, pending->step, &why) < 0) {
        bl_log(BL_LOG_WARN, "engine", "%s: leftovers stay: %s", pending->root.path, why.text);
    }
    if (pending->retain) {
        mark(store, pending->dir, pending->manifest_digest);
        known_add(verifier, pending->manifest_digest, true);
    }
    if (!pending->verify || is_gone(store, pending->dir)) {
        return pending->root.apart && !pending->retain
                   ? 0
                   : follow_retain(verifier, pending, store, NULL, msg);
    }
    if (!read_back(verifier, pending, store, pending->dir, pending->manifest_digest, &answer)) {
        return 0; /* the engine leaves */
    }
    if (pending->root.apart) {
        engine_answer(verifier->engine, WIRE_TYPE_ENGINE_VERIFIED, &answer);
        return 0;
    }
    return follow_retain(verifier, pending, store, &answer, msg);
}

/* ---- the thread ---- */

static void pending_work(struct engine_verifier *verifier, const struct pending *pending)
{
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};
    struct ckpt_io io;
    int rc;

    wait_for_saves(verifier);
    rc = engine_root_open_paced(&store, &io, &pending->root, &verifier->cancel, &why);
    rc = rc < 0 ? rc : follow(verifier, pending, store, &why);
    ckpt_store_close(store);
    if (rc < 0) {
        bl_log(BL_LOG_ERROR, "engine", "%s/%s: after the commit: %s", pending->root.path,
               pending->dir, why.text);
    }
}

static void *verifier_main(void *arg)
{
    struct engine_verifier *verifier = arg;

    engine_thread_kind(ENGINE_NICE_VERIFIER, 1);
    pthread_mutex_lock(&verifier->lock);
    while (!verifier->stop) {
        struct pending *pending = verifier->first;

        if (pending == NULL) {
            pthread_cond_wait(&verifier->wake, &verifier->lock);
            continue;
        }
        verifier->first = pending->next;
        verifier->count--;
        pthread_mutex_unlock(&verifier->lock);
        pending_work(verifier, pending);
        pending_free(pending);
        pthread_mutex_lock(&verifier->lock);
    }
    verifier->done = true;
    pthread_mutex_unlock(&verifier->lock);
    return NULL;
}

/* Unlinks the oldest that waits. */
static struct pending *pending_oldest(struct engine_verifier *verifier)
{
    struct pending **at = &verifier->first;
    struct pending *oldest;

    while ((*at)->next != NULL) {
        at = &(*at)->next;
    }
    oldest = *at;
    *at = NULL;
    verifier->count--;
    return oldest;
}

void engine_verifier_push(struct engine_verifier *verifier,
                          const struct wire_engine_commit *message, const char *dir,
                          uint64_t manifest_digest)
{
    struct pending *pending = calloc(1, sizeof(*pending)), *dropped = NULL;

    BL_ASSERT(pending != NULL); /* an engine without memory is started anew */
    *pending = (struct pending){
        .root = message->root,
        .keep = {.keep = message->keep.keep,
                 .keep_best = message->keep.keep_best,
                 .keep_every = message->keep.keep_every,
                 .bytes_max = message->keep.bytes_max},
        .verify = message->verify != 0 && message->stage != WIRE_ENGINE_RETAIN,
        .retain = message->stage == WIRE_ENGINE_RETAIN,
        .attempt = message->attempt.attempt,
        .step = message->attempt.step,
        .generation = message->attempt.generation,
        .manifest_digest = manifest_digest,
        .cuts = calloc(message->line_end_count + 1u, sizeof(*pending->cuts)),
        .cut_count = message->line_end_count,
    };
    BL_ASSERT(pending->cuts != NULL);
    pending->root.create = 0; /* a root that went meanwhile is not made again */
    snprintf(pending->dir, sizeof(pending->dir), "%s", dir);
    for (uint32_t i = 0; i < pending->cut_count; i++) {
        pending->cuts[i] =
            (struct ckpt_cut){message->line_ends[i].generation, message->line_ends[i].step};
    }
    pthread_mutex_lock(&verifier->lock);
    pending->next = verifier->first;
    verifier->first = pending;
    verifier->count++;
    dropped = verifier->count > PENDING_MAX ? pending_oldest(verifier) : NULL;
    pthread_cond_broadcast(&verifier->wake);
    pthread_mutex_unlock(&verifier->lock);
    pending_free(dropped);
}

int engine_verifier_start(struct engine *engine, struct bl_errmsg *msg)
{
    struct engine_verifier *verifier = calloc(1, sizeof(*verifier));
    int rc;

    if (verifier == NULL) {
        return bl_err_code(msg, -ENOMEM, "verifier");
    }
    verifier->engine = engine;
    pthread_mutex_init(&verifier->lock, NULL);
    pthread_cond_init(&verifier->wake, NULL);
    rc = pthread_create(&verifier->thread, NULL, verifier_main, verifier);
    if (rc != 0) {
        free(verifier);
        return bl_err_code(msg, -rc, "thread");
    }
    engine->verifier = verifier;
    return 0;
}

void engine_verifier_stop(struct engine_verifier *verifier)
{
    atomic_store(&verifier->cancel, 1);
    pthread_mutex_lock(&verifier->lock);
    verifier->stop = true;
    pthread_cond_broadcast(&verifier->wake);
    pthread_mutex_unlock(&verifier->lock);
}

bool engine_verifier_is_done(struct engine_verifier *verifier)
{
    bool done;

    pthread_mutex_lock(&verifier->lock);
    done = verifier->done;
    pthread_mutex_unlock(&verifier->lock);
    return done;
}

void engine_verifier_join(struct engine_verifier *verifier)
{
    pthread_join(verifier->thread, NULL);
    while (verifier->first != NULL) {
        struct pending *pending = verifier->first;

        verifier->first = pending->next;
        pending_free(pending);
    }
    free(verifier);
}
