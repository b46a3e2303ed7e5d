/* SPDX-License-Identifier: Apache-2.0 */
/* Which checkpoints the roots of a run have, all roots at once, for its leader. */
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
    if (run && run->leader) {
        core_leader_on_scan_done(run->leader, scan->rc, scan->failed, scan->found, scan->count,
                                 daemon_now_ms());
        run_pump(run);
    }
    free(scan->found);
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
        snprintf(to->dir, sizeof(to->dir), "%s", from->dir);
    }
}

/* Newer ones that are not good: somebody should know why an older one is used. */
static void scan_passed(const struct scan_root *one, const struct wire_engine_scanned *scanned)
{
    const struct run *run = run_find(one->scan->daemon, one->scan->run);

    for (uint32_t i = 0; run && i < scanned->passed_count; i++) {
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
        scan_add(scan, one->root, scanned);
    } else if (!scanned || scanned->rc != -ENOENT) {
        scan->rc = scanned ? scanned->rc : BL_EABORTED;
        scan->failed |= 1u << one->root;
        bl_log(BL_LOG_ERROR, "engine", "scan: %s", scanned ? scanned->text : "no answer");
    }
    free(one);
    scan_close(scan);
}

void engine_scan(struct run *run)
{
    struct scan *scan = calloc(1, sizeof(*scan));

    BL_ASSERT(scan != NULL);
    scan->daemon = run->daemon;
    scan->run = run->id;
    scan->open = run->job->root_count + 1;
    for (uint32_t r = 0; r < run->job->root_count; r++) {
        struct scan_root *one = calloc(1, sizeof(*one));
        struct wire_engine_root root;

        BL_ASSERT(one != NULL);
        one->scan = scan;
        one->root = r;
        engine_root_fill(run, r, 0, &root);
        engine_scan_root(run->daemon, &root, on_run_scanned, one);
    }
    scan_close(scan);
}
