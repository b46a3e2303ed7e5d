/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store first: each change of the record is one compare-and-swap, one at a time. Messages speak
 * of the durable record only. A put that fails is tried again; one that finds another version means
 * that somebody else leads.
 */
#include "daemon/core/leader_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

const struct wire_record *leader_said(const struct core_leader *l)
{
    /* The simulator switches the rule off to see that its checks find out. */
    if (!leader_has_rule(l, WIRE_RULE_CAS_FIRST) && l->change_pending) {
        return &l->next;
    }
    return &l->record;
}

int leader_change_is_free(const struct core_leader *l)
{
    return !l->change_pending && !l->deposed && l->now_ms >= l->change_retry_ms;
}

struct wire_record *leader_change_begin(struct core_leader *l, enum leader_change change)
{
    BL_ASSERT(leader_change_is_free(l));
    wire_record_close(&l->next);
    int rc = wire_record_copy(&l->next, &l->record);
    BL_ASSERT(rc == 0);
    l->next.head_epoch = l->config.head_epoch;
    l->next.leader_incarnation = l->config.incarnation;
    l->change = change;
    return &l->next;
}

void leader_change_send(struct core_leader *l)
{
    l->change_pending = 1;
    struct core_leader_effect *e = core_ring_push(&l->effects);
    e->kind = CORE_LEADER_STORE;
    e->op = ++l->op;
    e->expected = l->version;
    if (!leader_has_rule(l, WIRE_RULE_CAS_FIRST)) {
        leader_dirty_all(l);
    }
}

/* What was to follow from the change that failed waits again. */
static void leader_change_undo(struct core_leader *l)
{
    if (l->change == LEADER_OPEN && !l->cause_pending) {
        l->cause_pending = 1;
        memcpy(l->cause, l->next.cause, sizeof(l->cause));
    }
    leader_saves_unstored(l, l->change);
}

void core_leader_on_store_done(struct core_leader *l, uint64_t op, int rc, uint64_t version,
                               uint64_t now_ms)
{
    l->now_ms = now_ms;
    if (!l->change_pending || op != l->op || l->deposed) {
        return;
    }
    l->change_pending = 0;
    if (rc == BL_ECONFLICT) {
        l->deposed = 1;
        leader_event(l, CORE_EVENT_DEPOSED);
        ((struct core_leader_effect *)core_ring_push(&l->effects))->kind = CORE_LEADER_DEPOSED;
        return;
    }
    if (rc < 0) {
        if (!l->store_failed) {
            l->store_failed = 1;
            leader_event(l, CORE_EVENT_STORE_FAILED)->exit_code = rc;
        }
        /* Not stored. When it is tried again, it is decided anew: by then more is known. */
        l->change_retry_ms = now_ms + LEADER_STORE_RETRY_MS;
        leader_change_undo(l);
        return;
    }
    l->store_failed = 0;
    l->version = version;
    wire_record_close(&l->record);
    l->record = l->next;
    memset(&l->next, 0, sizeof(l->next));
    l->claimed = 1;
    leader_dirty_all(l);
    leader_change_done(l);
    leader_stir(l);
}

const struct wire_record *core_leader_record(const struct core_leader *l)
{
    return &l->next;
}
