/* SPDX-License-Identifier: Apache-2.0 */
/* Which checkpoints the roots of a run have, one root after the other, for its leader. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "daemon/engine_client.h"

struct scan { /* the roots of one run, one after the other */
    struct daemon *daemon;
    uint64_t run;
    uint32_t root, count;
    int rc;
    struct core_checkpoint *found; /* owned */
};

static void scan_next(struct scan *scan);

static void on_run_scanned(void *arg, const struct wire_engine_scanned *scanned)
{
    struct scan *scan = arg;

    if (!scanned) {
        scan->rc = BL_EABORTED;
    } else if (scanned->rc != 0 && scanned->rc != -ENOENT) {
        scan->rc = scanned->rc;
        bl_log(BL_LOG_ERROR, "engine", "scan: %s", scanned->text);
    }
    uint32_t count = scanned && scanned->rc == 0 ? scanned->checkpoint_count : 0;

    if (count > 0) {
        scan->found = realloc(scan->found, (scan->count + count) * sizeof(*scan->found));
        BL_ASSERT(scan->found != NULL);
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct wire_engine_checkpoint *from = &scanned->checkpoints[i];
        struct core_checkpoint *to = &scan->found[scan->count++];

        memset(to, 0, sizeof(*to));
        to->root = scan->root;
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
    scan->root++;
    scan_next(scan);
}

static void scan_next(struct scan *scan)
{
    struct run *run = run_find(scan->daemon, scan->run);
    struct wire_engine_root root;

    if (run && run->leader && scan->root < run->job->root_count) {
        engine_root_fill(run, scan->root, 0, &root);
        engine_scan_root(scan->daemon, &root, on_run_scanned, scan);
        return;
    }
    if (run && run->leader) {
        core_leader_on_scan_done(run->leader, scan->rc, scan->found, scan->count, daemon_now_ms());
        run_pump(run);
    }
    free(scan->found);
    free(scan);
}

void engine_scan(struct run *run)
{
    struct scan *scan = calloc(1, sizeof(*scan));

    BL_ASSERT(scan != NULL);
    scan->daemon = run->daemon;
    scan->run = run->id;
    scan_next(scan);
}
