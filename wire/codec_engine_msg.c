/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of the structs in wire/engine_msg.h. */
#include "belay.pb-c.h"
#include "wire/codec.h"
#include "wire/codec_table.h"

static const struct codec_field fields_engine_hello[] = {
    F_U32(wire_engine_hello, version),
    F_STR(wire_engine_hello, build),
    F_U32(wire_engine_hello, pid),
};
CODEC_TABLE(engine_hello, wire_engine_hello, engine_hello, NULL);

static const struct codec_field fields_engine_root[] = {
    F_STR(wire_engine_root, path),          F_U64(wire_engine_root, run),
    F_STR(wire_engine_root, node),          F_U32(wire_engine_root, nodes),
    F_U32(wire_engine_root, shared),        F_U32(wire_engine_root, create),
    F_U64(wire_engine_root, reserve_bytes), F_U64(wire_engine_root, rate_max),
    F_U32(wire_engine_root, index),         F_U32(wire_engine_root, apart),
};
static CODEC_TABLE(engine_root, wire_engine_root, engine_root, NULL);

static const struct codec_field fields_engine_peers[] = {
    F_WORDS(wire_engine_peers, key),
    F_MSGS(wire_engine_peers, peers, peer_count, WIRE_HOLDERS_MAX, &codec_holder),
};
static CODEC_TABLE(engine_peers, wire_engine_peers, engine_peers, NULL);

static const struct codec_field fields_engine_attempt[] = {
    F_U64(wire_engine_attempt, attempt),    F_U64(wire_engine_attempt, step),
    F_U64(wire_engine_attempt, generation), F_U64(wire_engine_attempt, line),
    F_U32(wire_engine_attempt, count),      F_STR(wire_engine_attempt, dir),
};
static CODEC_TABLE(engine_attempt, wire_engine_attempt, engine_attempt, NULL);

static const struct codec_field fields_engine_arena[] = {
    F_U64(wire_engine_arena, arena),
    F_U32(wire_engine_arena, slot),
    F_U32(wire_engine_arena, fd_index),
};
static CODEC_TABLE(engine_arena, wire_engine_arena, engine_arena, NULL);

static const struct codec_field fields_engine_arenas[] = {
    F_U64(wire_engine_arenas, attempt),
    F_MSGS_IN(wire_engine_arenas, arenas, arena_count, WIRE_FDS_MAX, &codec_engine_arena),
};
CODEC_TABLE(engine_arenas, wire_engine_arenas, engine_arenas, NULL);

static const struct codec_field fields_engine_write[] = {
    F_MSG(wire_engine_write, root, &codec_engine_root),
    F_MSG(wire_engine_write, attempt, &codec_engine_attempt),
    F_STR(wire_engine_write, part),
    F_STR(wire_engine_write, codec),
    F_MSGS_IN(wire_engine_write, arenas, arena_count, WIRE_FDS_MAX, &codec_engine_arena),
    F_MSG(wire_engine_write, pick, &codec_extent_list),
};
CODEC_TABLE(engine_write, wire_engine_write, engine_write, NULL);

static const struct codec_field fields_engine_written[] = {
    F_U64(wire_engine_written, attempt), F_I32(wire_engine_written, rc),
    F_STR(wire_engine_written, text),    F_TEXT(wire_engine_written, part_json, WIRE_JSON_MAX),
    F_U64(wire_engine_written, bytes),   F_U64(wire_engine_written, elapsed_ms),
};
CODEC_TABLE(engine_written, wire_engine_written, engine_written, NULL);

static const struct codec_field fields_engine_part[] = {
    F_TEXT(wire_engine_part, part_json, WIRE_JSON_MAX),
};
static CODEC_TABLE(engine_part, wire_engine_part, engine_part, NULL);

static const struct codec_field fields_engine_keep[] = {
    F_U32(wire_engine_keep, keep),
    F_U32(wire_engine_keep, keep_best),
    F_U64(wire_engine_keep, keep_every),
    F_U64(wire_engine_keep, bytes_max),
};
static CODEC_TABLE(engine_keep, wire_engine_keep, engine_keep, NULL);

static const struct codec_field fields_engine_commit[] = {
    F_MSG(wire_engine_commit, root, &codec_engine_root),
    F_MSG(wire_engine_commit, attempt, &codec_engine_attempt),
    F_STR(wire_engine_commit, final_dir),
    F_TEXT(wire_engine_commit, manifest_json, WIRE_JSON_MAX),
    F_MSG(wire_engine_commit, keep, &codec_engine_keep),
    F_U32(wire_engine_commit, verify),
    F_MSGS(wire_engine_commit, parts, part_count, WIRE_PARTS_MAX, &codec_engine_part),
    F_MSGS(wire_engine_commit, line_ends, line_end_count, WIRE_LINES_MAX, &codec_line_end),
    F_ENUM(wire_engine_commit, stage, WIRE_ENGINE_RETAIN),
    F_U64(wire_engine_commit, manifest_digest),
    F_MSG(wire_engine_commit, peers, &codec_engine_peers),
};
CODEC_TABLE(engine_commit, wire_engine_commit, engine_commit, NULL);

static const struct codec_field fields_engine_committed[] = {
    F_U64(wire_engine_committed, attempt), F_I32(wire_engine_committed, rc),
    F_STR(wire_engine_committed, text),    F_U64(wire_engine_committed, manifest_digest),
    F_STR(wire_engine_committed, dir),     F_U64(wire_engine_committed, elapsed_ms),
    F_STR(wire_engine_committed, warning),
};
CODEC_TABLE(engine_committed, wire_engine_committed, engine_committed, NULL);

static const struct codec_field fields_engine_verified[] = {
    F_U64(wire_engine_verified, attempt),    F_U64(wire_engine_verified, step),
    F_I32(wire_engine_verified, rc),         F_STR(wire_engine_verified, text),
    F_STR(wire_engine_verified, dir),        F_U64(wire_engine_verified, bytes),
    F_U64(wire_engine_verified, elapsed_ms), F_U32(wire_engine_verified, removed),
};
CODEC_TABLE(engine_verified, wire_engine_verified, engine_verified, NULL);

static const struct codec_field fields_engine_cancel[] = {
    F_MSG(wire_engine_cancel, root, &codec_engine_root),
    F_MSG(wire_engine_cancel, attempt, &codec_engine_attempt),
};
CODEC_TABLE(engine_cancel, wire_engine_cancel, engine_cancel, NULL);

static const struct codec_field fields_engine_cancelled[] = {
    F_U64(wire_engine_cancelled, attempt),
    F_I32(wire_engine_cancelled, rc),
    F_STR(wire_engine_cancelled, text),
};
CODEC_TABLE(engine_cancelled, wire_engine_cancelled, engine_cancelled, NULL);

static const struct codec_field fields_engine_scan[] = {
    F_U64(wire_engine_scan, request),
    F_MSG(wire_engine_scan, root, &codec_engine_root),
    F_U32(wire_engine_scan, own),
};
CODEC_TABLE(engine_scan, wire_engine_scan, engine_scan, NULL);

static const struct codec_field fields_engine_checkpoint[] = {
    F_STR(wire_engine_checkpoint, dir),
    F_U64(wire_engine_checkpoint, step),
    F_U64(wire_engine_checkpoint, generation),
    F_U64(wire_engine_checkpoint, line),
    F_WORDS(wire_engine_checkpoint, digest),
    F_U64(wire_engine_checkpoint, manifest_digest),
    F_U64(wire_engine_checkpoint, bytes),
    F_U64(wire_engine_checkpoint, saved_unix_s),
    F_U64(wire_engine_checkpoint, function_id),
    F_TEXT(wire_engine_checkpoint, job_json, WIRE_JSON_MAX),
    F_U64(wire_engine_checkpoint, attempt),
    F_U32(wire_engine_checkpoint, part_count),
    F_U64S(wire_engine_checkpoint, parts, parts_here, WIRE_PARTS_MAX),
    F_STR(wire_engine_checkpoint, lacks),
    F_U32(wire_engine_checkpoint, verified),
};
static CODEC_TABLE(engine_checkpoint, wire_engine_checkpoint, engine_checkpoint, NULL);

static const struct codec_field fields_engine_passed[] = {
    F_STR(wire_engine_passed, dir),
    F_STR(wire_engine_passed, text),
};
static CODEC_TABLE(engine_passed, wire_engine_passed, engine_passed, NULL);

static const struct codec_field fields_engine_scanned[] = {
    F_U64(wire_engine_scanned, request),
    F_I32(wire_engine_scanned, rc),
    F_STR(wire_engine_scanned, text),
    F_STR(wire_engine_scanned, run_text),
    F_U64(wire_engine_scanned, run),
    F_MSGS(wire_engine_scanned, checkpoints, checkpoint_count, WIRE_CHECKPOINT_MAX,
           &codec_engine_checkpoint),
    F_MSGS(wire_engine_scanned, passed, passed_count, WIRE_CHECKPOINT_MAX, &codec_engine_passed),
};
CODEC_TABLE(engine_scanned, wire_engine_scanned, engine_scanned, NULL);

static const struct codec_field fields_engine_copy[] = {
    F_MSG(wire_engine_copy, root, &codec_engine_root),
    F_STR(wire_engine_copy, dir),
};
static CODEC_TABLE(engine_copy, wire_engine_copy, engine_copy, NULL);

static const struct codec_field fields_engine_load[] = {
    F_U64(wire_engine_load, request),
    F_MSG(wire_engine_load, root, &codec_engine_root),
    F_STR(wire_engine_load, dir),
    F_U64(wire_engine_load, arena),
    F_U32(wire_engine_load, slot),
    F_U64(wire_engine_load, data_offset),
    F_MSG(wire_engine_load, extents, &codec_extent_list),
    F_MSGS_IN(wire_engine_load, copies, copy_count, WIRE_JOB_ROOTS, &codec_engine_copy),
    F_MSG(wire_engine_load, peers, &codec_engine_peers),
};
CODEC_TABLE(engine_load, wire_engine_load, engine_load, NULL);

static const struct codec_field fields_engine_loaded[] = {
    F_U64(wire_engine_loaded, request),     F_I32(wire_engine_loaded, rc),
    F_STR(wire_engine_loaded, text),        F_U64(wire_engine_loaded, bytes),
    F_U64(wire_engine_loaded, elapsed_ms),  F_U32(wire_engine_loaded, healed),
    F_STR(wire_engine_loaded, healed_text),
};
CODEC_TABLE(engine_loaded, wire_engine_loaded, engine_loaded, NULL);
