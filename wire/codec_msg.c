/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of the structs in wire/msg.h and of extents. */
#include "belay.pb-c.h"
#include "wire/codec.h"
#include "wire/codec_table.h"

static const struct codec_field fields_tensor[] = {
    F_STR(bl_tensor, name),           F_ENUM(bl_tensor, kind, BL_KIND_OTHER),
    F_ENUM(bl_tensor, dtype, BL_I64), F_ENUM(bl_tensor, dims, BL_TENSOR_DIMS_MAX),
    F_WORDS(bl_tensor, shape),
};
static CODEC_TABLE(tensor, bl_tensor, tensor, NULL);

static const struct codec_field fields_extent[] = {
    F_U32(bl_extent, tensor),  F_WORDS(bl_extent, lo),    F_WORDS(bl_extent, hi),
    F_U64(bl_extent, flat_lo), F_U64(bl_extent, flat_hi), F_U64(bl_extent, offset),
};
static CODEC_TABLE(extent, bl_extent, extent, NULL);

static int extent_list_check(const void *message, struct bl_errmsg *msg)
{
    const struct bl_extent_list *list = message;
    for (uint32_t i = 0; i < list->extent_count; i++) {
        const struct bl_extent *extent = &list->extents[i];
        if (extent->tensor >= list->tensor_count) {
            return bl_err(msg, BL_EFORMAT, "extent %u is of tensor %u of %u", i, extent->tensor,
                          list->tensor_count);
        }
        int rc = bl_extent_check(extent, &list->tensors[extent->tensor], msg);
        if (rc) {
            return bl_err_in(msg, rc, "extent %u", i);
        }
    }
    return 0;
}

static const struct codec_field fields_extent_list[] = {
    F_MSGS(bl_extent_list, tensors, tensor_count, WIRE_TENSORS_MAX, &codec_tensor),
    F_MSGS(bl_extent_list, extents, extent_count, WIRE_EXTENTS_MAX, &codec_extent),
};
CODEC_TABLE(extent_list, bl_extent_list, extent_list, extent_list_check);

/* ---- plans ---- */

static const struct codec_field fields_member[] = {
    F_U64(wire_member, incarnation),
    F_STR(wire_member, node),
    F_STR(wire_member, endpoint),
    F_STR(wire_member, vote_addr),
};
static CODEC_TABLE(member, wire_member, member, NULL);

static const struct codec_field fields_copy[] = {
    F_U64(wire_copy, arena),
    F_U32(wire_copy, slot),
    F_STR(wire_copy, node),
    F_STR(wire_copy, bulk_addr),
};
static CODEC_TABLE(copy, wire_copy, plan_copy, NULL);

static const struct codec_field fields_holder[] = {
    F_STR(wire_holder, node),
    F_STR(wire_holder, bulk_addr),
};
CODEC_TABLE(holder, wire_holder, holder, NULL);

static const struct codec_field fields_place[] = {
    F_STR(wire_place, root),
    F_STR(wire_place, dir),
};
static CODEC_TABLE(place, wire_place, place, NULL);

static const struct codec_field fields_plan[] = {
    F_U64(wire_plan, generation),
    F_U64(wire_plan, line),
    F_U64(wire_plan, step),
    F_U32(wire_plan, fresh),
    F_MSGS(wire_plan, members, world, WIRE_RANKS_MAX, &codec_member),
    F_MSGS(wire_plan, copies, copy_count, WIRE_COPIES_MAX, &codec_copy),
    F_STR(wire_plan, disk_root),
    F_STR(wire_plan, disk_dir),
    F_U32(wire_plan, digest_known),
    F_WORDS(wire_plan, digest),
    F_WORDS(wire_plan, comm_key),
    F_U64(wire_plan, save_every),
    F_U32(wire_plan, slots),
    F_MSGS_IN(wire_plan, places, place_count, WIRE_JOB_ROOTS - 1, &codec_place),
    F_U32(wire_plan, tp),
    F_U32(wire_plan, pp),
    F_MSGS(wire_plan, holders, holder_count, WIRE_HOLDERS_MAX, &codec_holder),
};
static int plan_check(const void *message, struct bl_errmsg *msg)
{
    const struct wire_plan *plan = message;
    uint64_t copy = (uint64_t)(plan->tp ? plan->tp : 1) * (plan->pp ? plan->pp : 1);
    if (plan->world % copy) {
        return bl_err(msg, BL_EFORMAT, "%u ranks in copies of %u x %u (tp x pp)", plan->world,
                      plan->tp, plan->pp);
    }
    return 0;
}
static CODEC_TABLE(plan, wire_plan, plan, plan_check);

static const struct codec_field fields_slot_info[] = {
    F_ENUM(wire_slot_info, state, WIRE_SLOT_SEALED),
    F_U32(wire_slot_info, pinned),
    F_U64(wire_slot_info, generation),
    F_U64(wire_slot_info, line),
    F_U64(wire_slot_info, step),
    F_WORDS(wire_slot_info, digest),
};
static CODEC_TABLE(slot_info, wire_slot_info, slot_info, NULL);

static const struct codec_field fields_arena_info[] = {
    F_U64(wire_arena_info, arena),
    F_U64(wire_arena_info, incarnation),
    F_MSGS_IN(wire_arena_info, slots, slot_count, WIRE_SLOTS_MAX, &codec_slot_info),
    F_MSG(wire_arena_info, extents, &codec_extent_list),
};
static CODEC_TABLE(arena_info, wire_arena_info, arena_info, NULL);

/* ---- ranks ---- */

static const struct codec_field fields_rank_report[] = {
    F_U64(wire_rank_report, run),
    F_U64(wire_rank_report, incarnation),
    F_U64(wire_rank_report, sequence),
    F_ENUM(wire_rank_report, state, WIRE_RANK_EXITED),
    F_U64(wire_rank_report, generation),
    F_U64(wire_rank_report, applied_step),
    F_U64(wire_rank_report, voted_step),
    F_U64(wire_rank_report, arena),
    F_U64(wire_rank_report, function_id),
    F_U64(wire_rank_report, probe),
    F_STR(wire_rank_report, endpoint),
    F_STR(wire_rank_report, vote_addr),
    F_U64(wire_rank_report, failed_generation),
    F_I32(wire_rank_report, failed_code),
    F_STR(wire_rank_report, failed_text),
    F_WORDS(wire_rank_report, ready_digest),
    F_U64(wire_rank_report, request_done),
    F_U64(wire_rank_report, skipped_save),
    F_U32(wire_rank_report, stop_flags),
    F_I32(wire_rank_report, leave_code),
    F_U64(wire_rank_report, directive_node),
    F_U64(wire_rank_report, directive_sequence),
};
CODEC_TABLE(rank_report, wire_rank_report, rank_report, NULL);

static const struct codec_field fields_rank_directive[] = {
    F_U64(wire_rank_directive, run),
    F_U64(wire_rank_directive, incarnation),
    F_U64(wire_rank_directive, sequence),
    F_U64(wire_rank_directive, generation),
    F_ENUM(wire_rank_directive, phase, WIRE_PHASE_DONE),
    F_U32(wire_rank_directive, has_plan),
    F_U32(wire_rank_directive, rank),
    F_MSG(wire_rank_directive, plan, &codec_plan),
    F_U64(wire_rank_directive, request_id),
    F_U32(wire_rank_directive, request_flags),
    F_U64(wire_rank_directive, unpin_through),
    F_U32(wire_rank_directive, leave),
    F_U32(wire_rank_directive, refused),
    F_STR(wire_rank_directive, text),
    F_U64(wire_rank_directive, node_incarnation),
    F_U64(wire_rank_directive, saves_through),
    F_WORDS(wire_rank_directive, saves_kept),
    F_WORDS(wire_rank_directive, every),
};
static int rank_directive_check(const void *message, struct bl_errmsg *msg)
{
    const struct wire_rank_directive *directive = message;
    if (directive->has_plan && directive->rank >= directive->plan.world) {
        return bl_err(msg, BL_EFORMAT, "rank %u in a plan of %u", directive->rank,
                      directive->plan.world);
    }
    return 0;
}
CODEC_TABLE(rank_directive, wire_rank_directive, rank_directive, rank_directive_check);

static const struct codec_field fields_vote[] = {
    F_U64(wire_vote, run),       F_U64(wire_vote, generation), F_U64(wire_vote, line),
    F_U64(wire_vote, step),      F_U32(wire_vote, from),       F_U32(wire_vote, flags),
    F_U32(wire_vote, is_result),
};
CODEC_TABLE(vote, wire_vote, vote, NULL);

/* ---- member and leader ---- */

static const struct codec_field fields_beat[] = {
    F_U32(wire_beat, section),    F_U32(wire_beat, waiting),         F_U64(wire_beat, step),
    F_U64(wire_beat, collective), F_U64(wire_beat, progress_age_ms), F_U64(wire_beat, alive_age_ms),
};
static CODEC_TABLE(beat, wire_beat, beat, NULL);

static const struct codec_field fields_exit[] = {
    F_I32(wire_exit, code),
    F_I32(wire_exit, signal),
    F_U32(wire_exit, core),
    F_U32(wire_exit, by_us),
};
CODEC_TABLE(exit, wire_exit, exit, NULL);

static const struct codec_field fields_proc_report[] = {
    F_MSG(wire_proc_report, rank, &codec_rank_report),
    F_U32(wire_proc_report, pid),
    F_MSG(wire_proc_report, beat, &codec_beat),
    F_MSG(wire_proc_report, exit, &codec_exit),
    F_U64(wire_proc_report, started_ms),
};
static CODEC_TABLE(proc_report, wire_proc_report, proc_report, NULL);

static const struct codec_field fields_line_end[] = {
    F_U64(wire_line_end, generation),
    F_U64(wire_line_end, step),
};
CODEC_TABLE(line_end, wire_line_end, line_end, NULL);

static const struct codec_field fields_save[] = {
    F_U64(wire_save, attempt),
    F_U64(wire_save, step),
    F_U64(wire_save, generation),
    F_U64(wire_save, line),
    F_U32(wire_save, root),
    F_ENUM(wire_save, state, WIRE_SAVE_DAMAGED),
    F_STR(wire_save, dir),
    F_TEXT(wire_save, part_json, WIRE_JSON_MAX),
    F_STR(wire_save, text),
    F_U64S(wire_save, arenas, arena_count, WIRE_ARENAS_MAX),
    F_U64(wire_save, bytes),
    F_U64(wire_save, elapsed_ms),
    F_U32(wire_save, apart),
    F_U64(wire_save, manifest_digest),
    F_STR(wire_save, source),
    F_MSGS(wire_save, line_ends, line_end_count, WIRE_LINES_MAX, &codec_line_end),
    F_MSG(wire_save, pick, &codec_extent_list),
};
static CODEC_TABLE(save, wire_save, save, NULL);

static const struct codec_field fields_holding[] = {
    F_U32(wire_holding, root),     F_U64(wire_holding, attempt),
    F_U64(wire_holding, step),     F_U64(wire_holding, generation),
    F_U64(wire_holding, line),     F_U64(wire_holding, function_id),
    F_WORDS(wire_holding, digest), F_U64(wire_holding, manifest_digest),
    F_U32(wire_holding, part),     F_U32(wire_holding, part_count),
    F_U32(wire_holding, verified), F_STR(wire_holding, dir),
    F_STR(wire_holding, node),
};
static CODEC_TABLE(holding, wire_holding, holding, NULL);

static const struct codec_field fields_report[] = {
    F_STR(wire_report, node),
    F_U64(wire_report, node_incarnation),
    F_U64(wire_report, run),
    F_U64(wire_report, sequence),
    F_U64(wire_report, generation),
    F_ENUM(wire_report, phase, WIRE_PHASE_DONE),
    F_STR(wire_report, bulk_addr),
    F_U32(wire_report, ranks_max),
    F_MSGS(wire_report, procs, proc_count, WIRE_PROCS_MAX, &codec_proc_report),
    F_MSGS(wire_report, arenas, arena_count, WIRE_ARENAS_MAX, &codec_arena_info),
    F_MSGS_IN(wire_report, saves, save_count, WIRE_SAVES_MAX, &codec_save),
    F_U64(wire_report, leader_incarnation),
    F_U64(wire_report, directive_sequence),
    F_U64(wire_report, scan_id),
    F_U32(wire_report, scan_failed),
    F_U32(wire_report, scan_told),
    F_MSGS(wire_report, holdings, holding_count, WIRE_HOLDINGS_MAX, &codec_holding),
};
CODEC_TABLE(report, wire_report, report, NULL);

static const struct codec_field fields_proc_order[] = {
    F_U64(wire_proc_order, incarnation), F_U32(wire_proc_order, rank),
    F_U32(wire_proc_order, kill),        F_U32(wire_proc_order, stacks),
    F_U32(wire_proc_order, forget),
};
static CODEC_TABLE(proc_order, wire_proc_order, proc_order, NULL);

static const struct codec_field fields_directive[] = {
    F_U64(wire_directive, run),
    F_U64(wire_directive, head_epoch),
    F_U64(wire_directive, leader_incarnation),
    F_U64(wire_directive, sequence),
    F_U64(wire_directive, generation),
    F_ENUM(wire_directive, phase, WIRE_PHASE_DONE),
    F_ENUM(wire_directive, verdict, WIRE_VERDICT_REFUSED),
    F_MSG(wire_directive, plan, &codec_plan),
    F_MSGS(wire_directive, orders, order_count, WIRE_PROCS_MAX, &codec_proc_order),
    F_U64S(wire_directive, drop_arenas, drop_count, WIRE_ARENAS_MAX),
    F_U64(wire_directive, request_id),
    F_U32(wire_directive, request_flags),
    F_U64(wire_directive, unpin_through),
    F_U32(wire_directive, leave),
    F_MSGS_IN(wire_directive, saves, save_count, WIRE_SAVES_MAX, &codec_save),
    F_U64S(wire_directive, refused, refused_count, WIRE_ARENAS_MAX),
    F_STR(wire_directive, text),
    F_TEXT(wire_directive, job_json, WIRE_JSON_MAX),
    F_U64(wire_directive, node_incarnation),
    F_U64(wire_directive, report_sequence),
    F_U64(wire_directive, saves_through),
    F_WORDS(wire_directive, saves_kept),
    F_WORDS(wire_directive, every),
    F_U64(wire_directive, scan_id),
    F_WORDS(wire_directive, file_key),
};
CODEC_TABLE(directive, wire_directive, directive, NULL);

/* ---- the store's record ---- */

static const struct codec_field fields_record_root[] = {
    F_U64(wire_record_root, path),
    F_U64(wire_record_root, committing_attempt),
    F_U64(wire_record_root, committing_step),
    F_U64(wire_record_root, committed_step),
    F_U64(wire_record_root, committed_generation),
    F_U64(wire_record_root, committed_digest),
    F_STR(wire_record_root, committed_dir),
    F_U64(wire_record_root, every),
};
static CODEC_TABLE(record_root, wire_record_root, record_root, NULL);

static const struct codec_field fields_record[] = {
    F_U64(wire_record, run),
    F_STR(wire_record, name),
    F_U64(wire_record, head_epoch),
    F_U64(wire_record, leader_incarnation),
    F_U64(wire_record, generation),
    F_ENUM(wire_record, phase, WIRE_PHASE_DONE),
    F_ENUM(wire_record, verdict, WIRE_VERDICT_REFUSED),
    F_U64(wire_record, line),
    F_MSG(wire_record, plan, &codec_plan),
    F_MSGS(wire_record, line_ends, line_end_count, WIRE_LINES_MAX, &codec_line_end),
    F_U64(wire_record, function_id),
    F_U64(wire_record, probe),
    F_U64(wire_record, committing_attempt),
    F_U64(wire_record, committing_step),
    F_U64(wire_record, committed_step),
    F_U64(wire_record, committed_generation),
    F_U64(wire_record, committed_digest),
    F_STR(wire_record, committed_dir),
    F_STR(wire_record, cause),
    F_TEXT(wire_record, job_json, WIRE_JSON_MAX),
    F_U64(wire_record, state_elems),
    F_U64(wire_record, end_step),
    F_U32(wire_record, end_digest_known),
    F_WORDS(wire_record, end_digest),
    F_MSGS_IN(wire_record, roots, root_count, WIRE_JOB_ROOTS, &codec_record_root),
};
CODEC_TABLE(record, wire_record, record, NULL);
