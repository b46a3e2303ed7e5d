/* SPDX-License-Identifier: Apache-2.0 */
/* Which checkpoints the roots of a run have, all roots at once: for its leader those that every
 * node sees, for this node's member its own. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "daemon/engine_client.h"

struct scan { /* of one run */
    struct daemon *daemon;
    uint64_t run;
    uint32_t open;   /* roots not yet answered, and one for the asking itself */
    uint32_t failed; /* bits of roots */
    uint32_t count;
    int rc;
    struct core_checkpoint *found; /* owned */
    /* Of this node's own: */
    uint64_t own;                  /* the member's number of it; 0: for the leader */
    struct wire_holding *holdings; /* owned; `count` of them */
};

struct scan_root { /* one question */
    struct scan *scan;
    uint32_t root;
};

static void scan_close(struct scan *scan)
{
    struct run *run = run_find(scan->daemon, scan->run);

    if (--scan->open > 0) {
        return;
    }
    if (run && scan->own) {
        core_member_on_scanned(run->member, scan->own, scan->failed, scan->holdings, scan->count,
                               daemon_now_ms());
        run_pump(run);
    } else if (run && run->leader) {
        core_leader_on_scan_done(run->leader, scan->rc, scan->failed, scan->found, scan->count,
                                 daemon_now_ms());
        run_pump(run);
    }
    free(scan->found);
    free(scan->holdings);
    free(scan);
}

static void scan_add(struct scan *scan, uint32_t root, const struct wire_engine_scanned *scanned)
{
    uint32_t count = scanned->checkpoint_count;

    if (count > 0) {
        scan->found = realloc(scan->found, (scan->count + count) * sizeof(*scan->found));
        BL_ASSERT(scan->found != NULL);
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct wire_engine_checkpoint *from = &scanned->checkpoints[i];
        struct core_checkpoint *to = &scan->found[scan->count++];

        memset(to, 0, sizeof(*to));
        to->root = root;
        to->complete = 1;
        to->step = from->step;
        to->generation = from->generation;
        to->line = from->line;
        to->function_id = from->function_id;
        to->manifest_digest = from->manifest_digest;
        to->digest_known = 1;
        to->digest = from->digest;
        to->verified = from->verified;
        snprintf(to->dir, sizeof(to->dir), "%s", from->dir);
    }
}

static void holding_add(struct scan *scan, uint32_t root, const struct wire_engine_checkpoint *from,
                        uint32_t part)
{
    if (scan->count == WIRE_HOLDINGS_MAX) {
        return;
    }
    struct wire_holding *to = &scan->holdings[scan->count++];

    *to = (struct wire_holding){.root = root,
                                .attempt = from->attempt,
                                .step = from->step,
                                .generation = from->generation,
                                .line = from->line,
                                .function_id = from->function_id,
                                .digest = from->digest,
                                .manifest_digest = from->manifest_digest,
                                .part = part,
                                .part_count = from->part_count,
                                .verified = from->verified};
    snprintf(to->dir, sizeof(to->dir), "%s", from->dir);
    snprintf(to->node, sizeof(to->node), "%s", from->lacks);
}

static void holdings_add(struct scan *scan, uint32_t root,
                         const struct wire_engine_scanned *scanned)
{
    if (!scan->holdings) {
        scan->holdings = calloc(WIRE_HOLDINGS_MAX, sizeof(*scan->holdings));
        BL_ASSERT(scan->holdings != NULL);
    }
    for (uint32_t i = 0; i < scanned->checkpoint_count; i++) {
        const struct wire_engine_checkpoint *from = &scanned->checkpoints[i];

        for (uint32_t k = 0; k < from->parts_here; k++) {
            holding_add(scan, root, from, (uint32_t)from->parts[k]);
        }
        if (from->parts_here == 0) {
            holding_add(scan, root, from, UINT32_MAX);
        }
    }
}

/* Scans repeat; what is said of a checkpoint is said once. */
static int passed_is_news(struct run *run, const char *root,
                          const struct wire_engine_passed *passed)
{
    const uint32_t ring = sizeof(run->passed_told) / sizeof(run->passed_told[0]);
    char text[WIRE_ROOT_MAX + WIRE_DIR_MAX + WIRE_REASON_MAX];
    int n = snprintf(text, sizeof(text), "%s/%s: %s", root, passed->dir, passed->text);
    uint64_t digest = bl_xxh3(text, (size_t)n);

    for (uint32_t i = 0; i < ring && i < run->passed_count; i++) {
        if (run->passed_told[i] == digest) {
            return 0;
        }
    }
    run->passed_told[run->passed_count++ % ring] = digest;
    return 1;
}

/* Newer ones that are not good: somebody should know why an older one is used. */
static void scan_passed(const struct scan_root *one, const struct wire_engine_scanned *scanned)
{
    struct run *run = run_find(one->scan->daemon, one->scan->run);

    for (uint32_t i = 0; run && i < scanned->passed_count; i++) {
        if (!passed_is_news(run, run->job->roots[one->root].path, &scanned->passed[i])) {
            continue;
        }
        event(one->scan->daemon->events, EVENT_CHECKPOINT_PASSED_OVER,
              "job=%s root=%s dir=%s reason=%s", run->name, run->job->roots[one->root].path,
              scanned->passed[i].dir, scanned->passed[i].text);
    }
}

static void on_run_scanned(void *arg, const struct wire_engine_scanned *scanned)
{
    struct scan_root *one = arg;
    struct scan *scan = one->scan;

    if (scanned && scanned->rc == 0) {
        scan_passed(one, scanned);
        if (scan->own) {
            holdings_add(scan, one->root, scanned);
        } else {
            scan_add(scan, one->root, scanned);
        }
    } else if (!scanned || scanned->rc != -ENOENT) {
        scan->rc = scanned ? scanned->rc : BL_EABORTED;
        scan->failed |= 1u << one->root;
        bl_log(BL_LOG_ERROR, "engine", "scan: %s", scanned ? scanned->text : "no answer");
    }
    free(one);
    scan_close(scan);
}

/* Asks of all roots that every node sees, or with `own` of those that are this node's. */
static void scan_begin(struct run *run, uint64_t own)
{
    struct scan *scan = calloc(1, sizeof(*scan));

    BL_ASSERT(scan != NULL);
    scan->daemon = run->daemon;
    scan->run = run->id;
    scan->own = own;
    scan->open = 1;
    for (uint32_t r = 0; r < run->job->root_count; r++) {
        if ((run->job->roots[r].shared == 0) != (own != 0)) {
            continue;
        }
        struct scan_root *one = calloc(1, sizeof(*one));
        struct wire_engine_root root;

        BL_ASSERT(one != NULL);
        one->scan = scan;
        one->root = r;
        scan->open++;
        engine_root_fill(run, r, 0, &root);
        engine_scan_root(run->daemon, run->job->roots[r].path, &root, own != 0, on_run_scanned,
                         one);
    }
    scan_close(scan);
}

void engine_scan(struct run *run)
{
    scan_begin(run, 0);
}

void engine_scan_own(struct run *run, uint64_t scan)
{
    scan_begin(run, scan);
}
