/* SPDX-License-Identifier: Apache-2.0 */
/* Closing and copying of messages. Closing leaves a zeroed struct, so that it may be done twice. */
#include "wire/msg.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

void wire_former_add(struct wire_former *former, uint64_t incarnation)
{
    if (incarnation == 0) {
        return;
    }
    memmove(former->incarnations + 1, former->incarnations,
            (WIRE_FORMER_MAX - 1) * sizeof(former->incarnations[0]));
    former->incarnations[0] = incarnation;
}

int wire_former_has(const struct wire_former *former, uint64_t incarnation)
{
    for (uint32_t i = 0; i < WIRE_FORMER_MAX; i++) {
        if (incarnation && former->incarnations[i] == incarnation) {
            return 1;
        }
    }
    return 0;
}

/* A copy of `count` things of `size` bytes, in *ret; NULL for none. */
static int msg_array_copy(void **ret, const void *from, size_t count, size_t size)
{
    *ret = NULL;
    if (count == 0) {
        return 0;
    }
    *ret = malloc(count * size);
    if (!*ret) {
        return -ENOMEM;
    }
    memcpy(*ret, from, count * size);
    return 0;
}

void wire_plan_close(struct wire_plan *plan)
{
    if (!plan) {
        return;
    }
    free(plan->members);
    free(plan->copies);
    free(plan->holders);
    memset(plan, 0, sizeof(*plan));
}

int wire_plan_copy(struct wire_plan *ret, const struct wire_plan *from)
{
    struct wire_plan plan = *from;
    void *members = NULL;
    void *copies = NULL;
    void *holders = NULL;

    if (msg_array_copy(&members, from->members, from->world, sizeof(*from->members)) ||
        msg_array_copy(&copies, from->copies, from->copy_count, sizeof(*from->copies)) ||
        msg_array_copy(&holders, from->holders, from->holder_count, sizeof(*from->holders))) {
        free(members);
        free(copies);
        return -ENOMEM;
    }
    plan.members = members;
    plan.copies = copies;
    plan.holders = holders;
    *ret = plan;
    return 0;
}

void wire_rank_directive_close(struct wire_rank_directive *directive)
{
    if (!directive) {
        return;
    }
    wire_plan_close(&directive->plan);
    memset(directive, 0, sizeof(*directive));
}

void wire_save_close(struct wire_save *save)
{
    free(save->part_json);
    free(save->arenas);
    free(save->line_ends);
    bl_extent_list_close(&save->pick);
    memset(save, 0, sizeof(*save));
}

static void msg_saves_close(struct wire_save *saves, uint32_t count)
{
    for (uint32_t i = 0; i < count && i < WIRE_SAVES_MAX; i++) {
        wire_save_close(&saves[i]);
    }
}

void wire_report_close(struct wire_report *report)
{
    if (!report) {
        return;
    }
    for (uint32_t i = 0; report->arenas && i < report->arena_count; i++) {
        bl_extent_list_close(&report->arenas[i].extents);
    }
    free(report->arenas);
    free(report->procs);
    free(report->holdings);
    msg_saves_close(report->saves, report->save_count);
    memset(report, 0, sizeof(*report));
}

void wire_directive_close(struct wire_directive *directive)
{
    if (!directive) {
        return;
    }
    wire_plan_close(&directive->plan);
    free(directive->orders);
    free(directive->drop_arenas);
    free(directive->refused);
    free(directive->job_json);
    msg_saves_close(directive->saves, directive->save_count);
    memset(directive, 0, sizeof(*directive));
}

int wire_save_copy(struct wire_save *ret, const struct wire_save *from)
{
    void *arenas = NULL;
    void *ends = NULL;
    struct wire_save save = *from;

    memset(&save.pick, 0, sizeof(save.pick));
    save.part_json = from->part_json ? strdup(from->part_json) : NULL;
    int rc = from->part_json && !save.part_json ? -ENOMEM : 0;
    rc = rc ? rc : msg_array_copy(&arenas, from->arenas, from->arena_count, sizeof(uint64_t));
    rc = rc ? rc
            : msg_array_copy(&ends, from->line_ends, from->line_end_count, sizeof(*save.line_ends));
    save.arenas = arenas;
    save.line_ends = ends;
    if (rc == 0 && from->pick.extent_count) { /* an empty copy would own memory all the same */
        rc = bl_extent_list_copy(&save.pick, &from->pick);
    }
    if (rc < 0) {
        wire_save_close(&save);
        return -ENOMEM;
    }
    *ret = save;
    return 0;
}

static int msg_saves_copy(struct wire_save *ret, const struct wire_save *from, uint32_t count)
{
    for (uint32_t i = 0; i < count && i < WIRE_SAVES_MAX; i++) {
        if (wire_save_copy(&ret[i], &from[i]) < 0) {
            msg_saves_close(ret, i);
            return -ENOMEM;
        }
    }
    return 0;
}

static int report_arenas_copy(struct wire_report *ret, const struct wire_report *from)
{
    ret->arena_count = 0;
    ret->arenas = from->arena_count ? calloc(from->arena_count, sizeof(*ret->arenas)) : NULL;
    if (from->arena_count && !ret->arenas) {
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < from->arena_count; i++) {
        ret->arenas[i] = from->arenas[i];
        int rc = bl_extent_list_copy(&ret->arenas[i].extents, &from->arenas[i].extents);
        if (rc < 0) {
            return rc;
        }
        ret->arena_count = i + 1;
    }
    return 0;
}

int wire_report_copy(struct wire_report *ret, const struct wire_report *from)
{
    struct wire_report report = *from;
    void *procs = NULL;
    void *holdings = NULL;

    report.arenas = NULL;
    report.arena_count = 0;
    report.save_count = 0;
    if (msg_array_copy(&procs, from->procs, from->proc_count, sizeof(*from->procs)) ||
        msg_array_copy(&holdings, from->holdings, from->holding_count, sizeof(*from->holdings))) {
        free(procs);
        return -ENOMEM;
    }
    report.procs = procs;
    report.holdings = holdings;
    if (report_arenas_copy(&report, from) < 0 ||
        msg_saves_copy(report.saves, from->saves, from->save_count) < 0) {
        wire_report_close(&report);
        return -ENOMEM;
    }
    report.save_count = from->save_count;
    *ret = report;
    return 0;
}

int wire_directive_copy(struct wire_directive *ret, const struct wire_directive *from)
{
    struct wire_directive d = *from;
    void *orders = NULL;
    void *drops = NULL;
    void *refused = NULL;

    memset(&d.plan, 0, sizeof(d.plan));
    d.save_count = 0;
    d.job_json = NULL;
    int rc = msg_array_copy(&orders, from->orders, from->order_count, sizeof(*from->orders));
    d.orders = orders;
    rc = rc ? rc : msg_array_copy(&drops, from->drop_arenas, from->drop_count, sizeof(uint64_t));
    d.drop_arenas = drops;
    rc = rc ? rc : msg_array_copy(&refused, from->refused, from->refused_count, sizeof(uint64_t));
    d.refused = refused;
    rc = rc ? rc : wire_plan_copy(&d.plan, &from->plan);
    rc = rc ? rc : msg_saves_copy(d.saves, from->saves, from->save_count);
    if (!rc) {
        d.save_count = from->save_count;
        d.job_json = from->job_json ? strdup(from->job_json) : NULL;
        rc = from->job_json && !d.job_json ? -ENOMEM : 0;
    }
    if (rc < 0) {
        wire_directive_close(&d);
        return rc;
    }
    *ret = d;
    return 0;
}

void wire_record_close(struct wire_record *record)
{
    if (!record) {
        return;
    }
    wire_plan_close(&record->plan);
    free(record->line_ends);
    free(record->job_json);
    memset(record, 0, sizeof(*record));
}

int wire_record_copy(struct wire_record *ret, const struct wire_record *from)
{
    struct wire_record record = *from;
    void *ends = NULL;

    memset(&record.plan, 0, sizeof(record.plan));
    record.job_json = NULL;
    record.line_ends = NULL;
    if (msg_array_copy(&ends, from->line_ends, from->line_end_count, sizeof(*from->line_ends))) {
        return -ENOMEM;
    }
    record.line_ends = ends;
    if (from->job_json && !(record.job_json = strdup(from->job_json))) {
        wire_record_close(&record);
        return -ENOMEM;
    }
    if (wire_plan_copy(&record.plan, &from->plan)) {
        wire_record_close(&record);
        return -ENOMEM;
    }
    *ret = record;
    return 0;
}
