/* SPDX-License-Identifier: Apache-2.0 */
/* What nodes say of their parts of saves. */
#include "daemon/core/leader_state.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* Does the node still hold what it is to write? A machine that came back does not. */
static int part_has_arenas(const struct core_leader *l, const struct leader_save *s,
                           const struct leader_part *part)
{
    for (uint32_t i = 0; i < part->arena_count; i++) {
        if (!leader_arena_find(l, part->node, s->save.arenas[part->first + i])) {
            return 0;
        }
    }
    return 1;
}

static void part_written(struct leader_part *part, const struct wire_save *said)
{
    if (said->state == WIRE_SAVE_WRITTEN && !part->written) {
        part->written = 1;
        part->bytes = said->bytes;
        part->part_json = strdup(said->part_json ? said->part_json : "{}");
        BL_ASSERT(part->part_json);
    }
}

/* A node cannot name or read back what it has of a committed one: said as the root's damage is. */
static void part_unwell(struct core_leader *l, struct leader_save *s, uint32_t node,
                        const struct wire_save *said)
{
    char text[WIRE_TEXT_MAX];
    int rc = said->state == WIRE_SAVE_DAMAGED ? BL_EDIGEST : -EIO;

    snprintf(text, sizeof(text), "node %.48s: %.180s", l->nodes[node].name, said->text);
    core_leader_on_verified(l, s->save.root, s->save.step, s->save.dir, rc, text,
                            l->now_ms - s->started_ms, l->now_ms);
    leader_save_forget(l, s);
}

/* All have read back what they have? Then older ones may go. */
static void save_verified(struct core_leader *l, struct leader_save *s)
{
    for (uint32_t i = 0; i < s->part_count; i++) {
        if (!s->parts[i].verified) {
            return;
        }
    }
    s->save.state = WIRE_SAVE_VERIFIED;
    leader_save_dirty(l, s);
    core_leader_on_verified(l, s->save.root, s->save.step, s->save.dir, 0, "",
                            l->now_ms - s->started_ms, l->now_ms);
}

/* What a node says of a save that is committed and lies on several nodes. 1: it was forgotten. */
static int save_after_report(struct core_leader *l, struct leader_save *s, uint32_t node,
                             struct leader_part *part, const struct wire_save *said)
{
    if (said->state == WIRE_SAVE_FAILED || said->state == WIRE_SAVE_DAMAGED) {
        part_unwell(l, s, node, said);
        return 1;
    }
    part->published |= said->state == WIRE_SAVE_PUBLISHED || said->state == WIRE_SAVE_VERIFIED;
    part->verified |= said->state == WIRE_SAVE_VERIFIED;
    if (part->verified && !s->is_found) {
        save_verified(l, s);
    }
    int is_over = (int)s->is_found; /* its name was all that was wanted; a scan sees it */
    for (uint32_t i = 0; is_over && i < s->part_count; i++) {
        is_over = (int)s->parts[i].published;
    }
    if (is_over) {
        leader_save_forget(l, s);
    }
    return is_over;
}

/* 1: it was forgotten. */
static int save_part_report(struct core_leader *l, struct leader_save *s, uint32_t node,
                            struct leader_part *part, const struct wire_save *said)
{
    if (s->stage == LEADER_SAVE_ENDED) {
        return s->save.state == WIRE_SAVE_COMMITTED && s->save.apart &&
               save_after_report(l, s, node, part, said);
    }
    if (said->state == WIRE_SAVE_FAILED &&
        (s->stage == LEADER_SAVE_WRITING || s->stage == LEADER_SAVE_PREPARING)) {
        leader_save_fail(l, s, said->text);
    } else if (s->stage == LEADER_SAVE_WRITING) {
        part_written(part, said);
    } else if (s->stage == LEADER_SAVE_PREPARING) {
        part->prepared |= said->state == WIRE_SAVE_PREPARED;
    }
    return 0;
}

void leader_saves_report(struct core_leader *l, uint32_t node)
{
    const struct wire_report *report = &l->nodes[node].report;

    for (uint32_t i = l->save_count; i-- > 0;) {
        struct leader_save *s = &l->saves[i];
        struct leader_part *part = leader_part_find(s, node);
        if (part && s->stage == LEADER_SAVE_WRITING && !part->written &&
            !part_has_arenas(l, s, part)) {
            leader_save_fail(l, s, "a node lost the memory that it was to write");
        }
        int is_gone = part == NULL;
        for (uint32_t k = 0; !is_gone && k < report->save_count; k++) {
            if (report->saves[k].attempt == s->save.attempt) {
                is_gone = save_part_report(l, s, node, part, &report->saves[k]);
            }
        }
    }
}
