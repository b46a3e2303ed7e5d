/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The member's saves: what the engine is asked, and what is told of its answers. Where each node
 * has a root for itself, what the leader says takes a save on, and this node says how far it is:
 *
 *      leader   WRITE           PREPARE           COMMITTED              VERIFIED
 *      here     WRITE, WRITTEN  PREPARE, PREPARED COMMITTED, PUBLISHED,  (retains; named no more)
 *                                                 VERIFIED or DAMAGED
 *
 * Everything from PREPARE on can be done by a daemon that knows nothing of what came before: it
 * lies on the disk. A save that the leader does not name any more is forgotten; prepared ones stay
 * on the disk then, as only a leader that looks at all nodes can tell what they are.
 */
#include "daemon/core/member_state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SAVE_TRIES 3 /* of giving a committed attempt its final name */

struct wire_save *member_save_find(struct core_member *m, uint64_t attempt)
{
    for (uint32_t i = 0; i < m->save_count; i++) {
        if (m->saves[i].attempt == attempt) {
            return &m->saves[i];
        }
    }
    return NULL;
}

const struct wire_save *core_member_save(const struct core_member *m, uint64_t attempt)
{
    return member_save_find((struct core_member *)m, attempt);
}

int core_member_has_file_key(const struct core_member *m, const uint64_t key[2])
{
    const uint64_t *own = m->directive.file_key;

    return m->has_directive && (own[0] | own[1]) && ((own[0] ^ key[0]) | (own[1] ^ key[1])) == 0;
}

/* ---- the engine's answers ---- */

void core_member_on_engine_written(struct core_member *m, uint64_t attempt, int rc,
                                   const char *part_json, const char *text, uint64_t bytes,
                                   uint64_t elapsed_ms, uint64_t now_ms)
{
    (void)now_ms;
    for (uint32_t i = 0; i < m->save_count; i++) {
        struct wire_save *save = &m->saves[i];
        if (save->attempt != attempt || save->state != WIRE_SAVE_WRITE) {
            continue;
        }
        save->state = rc < 0 ? WIRE_SAVE_FAILED : WIRE_SAVE_WRITTEN;
        save->bytes = bytes;
        save->elapsed_ms = elapsed_ms;
        snprintf(save->text, sizeof(save->text), "%s", text ? text : "");
        free(save->part_json);
        save->part_json = part_json && rc >= 0 ? strdup(part_json) : NULL;
        if (rc >= 0 && part_json) {
            BL_ASSERT(save->part_json);
        }
        m->report_due = 1;
    }
}

static int save_has_arena(const struct wire_save *save, uint64_t arena)
{
    for (uint32_t i = 0; i < save->arena_count; i++) {
        if (save->arenas[i] == arena) {
            return 1;
        }
    }
    return 0;
}

int core_member_write(const struct core_member *m, uint64_t attempt, struct core_member_write *ret)
{
    const struct wire_save *save = NULL;

    for (uint32_t i = 0; i < m->save_count; i++) {
        save = m->saves[i].attempt == attempt ? &m->saves[i] : save;
    }
    if (!save) {
        return -ENOENT;
    }
    memset(ret, 0, sizeof(*ret));
    ret->attempt = attempt;
    ret->step = save->step;
    ret->generation = save->generation;
    ret->line = save->line;
    ret->root = save->root;
    ret->apart = save->apart;
    ret->pick = &save->pick;
    memcpy(ret->dir, save->dir, sizeof(ret->dir));
    ret->sources = core_alloc(m->arena_count, sizeof(*ret->sources));
    for (uint32_t i = 0; i < m->arena_count; i++) {
        const struct wire_arena_info *info = &m->arenas[i].info;
        int best = -1; /* an arena may also hold a void copy of the step: the newest counts */
        for (uint32_t k = 0; save_has_arena(save, info->arena) && k < info->slot_count; k++) {
            const struct wire_slot_info *slot = &info->slots[k];
            if (slot->state == WIRE_SLOT_SEALED && slot->step == save->step &&
                slot->generation <= save->generation &&
                (best < 0 || slot->generation > info->slots[best].generation)) {
                best = (int)k;
            }
        }
        if (best >= 0) {
            ret->sources[ret->source_count++] = (struct core_member_source){
                .arena = info->arena, .slot = (uint32_t)best, .digest = info->slots[best].digest};
        }
    }
    return 0;
}

void core_member_on_engine_stage(struct core_member *m, uint64_t attempt, int rc, const char *text,
                                 uint64_t now_ms)
{
    struct wire_save *save = member_save_find(m, attempt);

    (void)now_ms;
    if (!save || (save->state != WIRE_SAVE_PREPARE && save->state != WIRE_SAVE_COMMITTED)) {
        return;
    }
    if (rc >= 0) {
        save->state = save->state == WIRE_SAVE_PREPARE ? WIRE_SAVE_PREPARED : WIRE_SAVE_PUBLISHED;
    } else if (save->state == WIRE_SAVE_PREPARE || ++m->save_tries[save - m->saves] >= SAVE_TRIES) {
        save->state = WIRE_SAVE_FAILED;
        snprintf(save->text, sizeof(save->text), "%s", text ? text : "");
    } else {
        m->save_again[save - m->saves] = 1; /* with the next tick */
        return;
    }
    m->report_due = 1;
}

void core_member_on_engine_verified(struct core_member *m, uint64_t attempt, int rc,
                                    const char *text, uint64_t now_ms)
{
    struct wire_save *save = member_save_find(m, attempt);

    (void)now_ms;
    if (!save || save->state != WIRE_SAVE_PUBLISHED) {
        return;
    }
    save->state = rc == 0                                ? WIRE_SAVE_VERIFIED
                  : rc == BL_EDIGEST || rc == BL_EFORMAT ? WIRE_SAVE_DAMAGED
                                                         : WIRE_SAVE_FAILED;
    snprintf(save->text, sizeof(save->text), "%s", text ? text : "");
    m->report_due = 1;
}

void member_saves_retry(struct core_member *m)
{
    for (uint32_t i = 0; i < m->save_count; i++) {
        if (m->saves[i].state == WIRE_SAVE_COMMITTED && m->save_again[i]) {
            m->save_again[i] = 0;
            member_effect(m, CORE_MEMBER_ENGINE_PUBLISH)->attempt = m->saves[i].attempt;
        }
    }
}

/* ---- what the leader says ---- */

static void save_forget(struct core_member *m, uint32_t index)
{
    uint32_t last = --m->save_count;

    wire_save_close(&m->saves[index]);
    m->saves[index] = m->saves[last];
    m->save_tries[index] = m->save_tries[last];
    m->save_over[index] = m->save_over[last];
    m->save_again[index] = m->save_again[last];
    memset(&m->saves[last], 0, sizeof(m->saves[0]));
    m->save_tries[last] = m->save_over[last] = m->save_again[last] = 0;
    m->report_due = 1;
}

static void save_remove(struct core_member *m, uint32_t index, enum core_member_effect_kind kind)
{
    member_effect(m, kind)->attempt = m->saves[index].attempt;
    save_forget(m, index);
}

static const struct wire_save *save_told(const struct wire_directive *d, uint64_t attempt)
{
    for (uint32_t k = 0; k < d->save_count; k++) {
        if (d->saves[k].attempt == attempt) {
            return &d->saves[k];
        }
    }
    return NULL;
}

/* Takes what the leader says of it over, but not how far it is here. */
static void save_adopt(struct wire_save *save, const struct wire_save *told,
                       enum wire_save_state state)
{
    struct wire_save copy;

    if (wire_save_copy(&copy, told) < 0) {
        return; /* out of memory: the leader repeats it */
    }
    copy.state = state;
    wire_save_close(save);
    *save = copy;
}

/* A known save of a root that this node has for itself. */
static void save_advance(struct core_member *m, uint32_t index, const struct wire_save *told)
{
    struct wire_save *save = &m->saves[index];
    enum wire_save_state state = save->state;

    if (told->state == WIRE_SAVE_PREPARE && state == WIRE_SAVE_WRITTEN) {
        save_adopt(save, told, WIRE_SAVE_PREPARE);
        member_effect(m, CORE_MEMBER_ENGINE_PREPARE)->attempt = save->attempt;
    } else if (told->state == WIRE_SAVE_COMMITTED &&
               (state == WIRE_SAVE_WRITTEN || state == WIRE_SAVE_PREPARE ||
                state == WIRE_SAVE_PREPARED)) {
        save_adopt(save, told, WIRE_SAVE_COMMITTED);
        member_effect(m, CORE_MEMBER_ENGINE_PUBLISH)->attempt = save->attempt;
    } else if (told->state == WIRE_SAVE_VERIFIED && !m->save_over[index]) {
        save_adopt(save, told, WIRE_SAVE_VERIFIED);
        m->save_over[index] = 1;
        m->report_due = 1;
        member_effect(m, CORE_MEMBER_ENGINE_RETAIN)->attempt = save->attempt;
    }
}

static void save_follow(struct core_member *m, uint32_t index, const struct wire_save *told)
{
    int is_apart = (int)m->saves[index].apart;

    if (!told && is_apart && m->saves[index].manifest_digest) {
        save_forget(m, index); /* what lies on the disk is the next leader's to judge */
    } else if (!told || told->state == WIRE_SAVE_CANCELLED) {
        save_remove(m, index, CORE_MEMBER_ENGINE_CANCEL);
    } else if (is_apart) {
        save_advance(m, index, told);
    } else if (told->state == WIRE_SAVE_COMMITTED) {
        save_remove(m, index, CORE_MEMBER_ENGINE_DONE);
    }
}

static void save_begin(struct core_member *m, const struct wire_save *told)
{
    static const struct {
        enum wire_save_state state;
        enum core_member_effect_kind kind;
    } begins[] = {{WIRE_SAVE_WRITE, CORE_MEMBER_ENGINE_WRITE},
                  {WIRE_SAVE_PREPARE, CORE_MEMBER_ENGINE_PREPARE},
                  {WIRE_SAVE_COMMITTED, CORE_MEMBER_ENGINE_PUBLISH}};

    for (uint32_t i = 0; i < 3 && m->save_count < WIRE_SAVES_MAX; i++) {
        struct wire_save *save = &m->saves[m->save_count];
        if (told->state != begins[i].state || (i > 0 && !told->apart) ||
            wire_save_copy(save, told) < 0) {
            continue;
        }
        free(save->part_json);
        save->part_json = NULL;
        m->save_count++;
        member_effect(m, begins[i].kind)->attempt = told->attempt;
    }
}

void member_saves_directive(struct core_member *m, const struct wire_directive *d)
{
    for (uint32_t i = m->save_count; i-- > 0;) {
        save_follow(m, i, save_told(d, m->saves[i].attempt));
    }
    for (uint32_t k = 0; k < d->save_count; k++) {
        if (!member_save_find(m, d->saves[k].attempt)) {
            save_begin(m, &d->saves[k]);
        }
    }
}

/* ---- scans of own roots ---- */

void member_scan_directive(struct core_member *m, const struct wire_directive *d)
{
    if (d->scan_id == 0 || d->scan_id == m->scan_id) {
        return;
    }
    m->scan_id = d->scan_id;
    m->scan_done = 0;
    m->scan_told = 0;
    member_effect(m, CORE_MEMBER_SCAN)->scan = d->scan_id;
}

void core_member_on_scanned(struct core_member *m, uint64_t scan, uint32_t failed,
                            const struct wire_holding *holdings, uint32_t count, uint64_t now_ms)
{
    (void)now_ms;
    if (scan != m->scan_id || m->scan_done) {
        return;
    }
    count = count < WIRE_HOLDINGS_MAX ? count : WIRE_HOLDINGS_MAX;
    free(m->holdings);
    m->holdings = core_alloc(count, sizeof(*m->holdings));
    if (count) {
        memcpy(m->holdings, holdings, count * sizeof(*m->holdings));
    }
    m->holding_count = count;
    m->scan_failed = failed;
    m->scan_done = 1;
    m->report_due = 1;
}

/* ---- reports ---- */

void member_saves_report(struct core_member *m, struct wire_report *ret)
{
    for (uint32_t i = 0; i < m->save_count; i++) {
        struct wire_save *save = &ret->saves[ret->save_count];
        if (m->save_over[i]) {
            continue;
        }
        ret->save_count++;
        *save = m->saves[i];
        save->arenas = NULL;
        save->arena_count = 0;
        save->line_ends = NULL;
        save->line_end_count = 0;
        memset(&save->pick, 0, sizeof(save->pick));
        if (m->saves[i].part_json) {
            save->part_json = strdup(m->saves[i].part_json);
            BL_ASSERT(save->part_json);
        }
    }
    ret->scan_id = m->scan_done ? m->scan_id : 0;
    ret->scan_failed = m->scan_failed;
    if (m->scan_done && (!m->scan_told || m->scan_told > m->report_acked)) {
        ret->scan_told = 1;
        ret->holding_count = m->holding_count;
        ret->holdings = core_alloc(m->holding_count, sizeof(*ret->holdings));
        if (m->holding_count) {
            memcpy(ret->holdings, m->holdings, m->holding_count * sizeof(*ret->holdings));
        }
        m->scan_told = m->scan_told ? m->scan_told : m->sequence;
    }
}
