/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of the structs in wire/edge.h. */
#include "belay.pb-c.h"
#include "wire/codec.h"
#include "wire/codec_table.h"

static const struct codec_field fields_store_replica[] = {
    F_U64(wire_store_replica, head_epoch),
    F_U64(wire_store_replica, run),
    F_U64(wire_store_replica, revision),
    F_STR(wire_store_replica, key),
    F_BLOB(wire_store_replica, value, value_bytes, WIRE_JSON_MAX),
    F_U32(wire_store_replica, removed),
};
CODEC_TABLE(store_replica, wire_store_replica, store_replica, NULL);

static const struct codec_field fields_store_ack[] = {
    F_U64(wire_store_ack, head_epoch), F_U64(wire_store_ack, run),  F_U64(wire_store_ack, revision),
    F_I32(wire_store_ack, rc),         F_STR(wire_store_ack, text),
};
CODEC_TABLE(store_ack, wire_store_ack, store_ack, NULL);

static const struct codec_field fields_hello[] = {
    F_U32(wire_hello, version),
    F_STR(wire_hello, build),
    F_ENUM(wire_hello, role, WIRE_ROLE_BULK),
    F_U64(wire_hello, run),
    F_STR(wire_hello, node),
    F_U64(wire_hello, incarnation),
    F_U64(wire_hello, head_epoch),
    F_STR(wire_hello, job),
    F_U32(wire_hello, pid),
    F_TEXT(wire_hello, job_json, WIRE_JSON_MAX),
    F_U32(wire_hello, beat_ms),
    F_U32(wire_hello, lanes),
    F_U32(wire_hello, load_deadline_ms),
    F_STR(wire_hello, addr),
};
CODEC_TABLE(hello, wire_hello, hello, NULL);

static const struct codec_field fields_request[] = {
    F_WORDS(wire_request, id),
    F_ENUM(wire_request, verb, WIRE_VERB_MAX),
    F_TEXT(wire_request, args, WIRE_JSON_MAX),
};
CODEC_TABLE(request, wire_request, request, NULL);

static const struct codec_field fields_answer[] = {
    F_WORDS(wire_answer, id), F_I32(wire_answer, rc),
    F_STR(wire_answer, text), F_TEXT(wire_answer, json, WIRE_JSON_MAX),
    F_U32(wire_answer, more),
};
CODEC_TABLE(answer, wire_answer, answer, NULL);

static const struct codec_field fields_arena_make[] = {
    F_U64(wire_arena_make, request),
    F_U32(wire_arena_make, slot_count),
    F_U64(wire_arena_make, state_bytes),
    F_MSG(wire_arena_make, extents, &codec_extent_list),
};
CODEC_TABLE(arena_make, wire_arena_make, arena_make, NULL);

static const struct codec_field fields_arena[] = {
    F_U64(wire_arena, request), F_I32(wire_arena, rc),    F_STR(wire_arena, text),
    F_U64(wire_arena, arena),   F_U64(wire_arena, bytes),
};
CODEC_TABLE(arena, wire_arena, arena, NULL);

static const struct codec_field fields_arena_drop[] = {
    F_U64(wire_arena_drop, arena),
};
CODEC_TABLE(arena_drop, wire_arena_drop, arena_drop, NULL);

static const struct codec_field fields_copy_open[] = {
    F_U64(wire_copy_open, request),
    F_U64(wire_copy_open, arena),
};
CODEC_TABLE(copy_open, wire_copy_open, copy_open, NULL);

static const struct codec_field fields_copy_opened[] = {
    F_U64(wire_copy_opened, request), F_I32(wire_copy_opened, rc),    F_STR(wire_copy_opened, text),
    F_U64(wire_copy_opened, arena),   F_U64(wire_copy_opened, bytes),
};
CODEC_TABLE(copy_opened, wire_copy_opened, copy_opened, NULL);

static const struct codec_field fields_disk_load[] = {
    F_U64(wire_disk_load, request), F_U64(wire_disk_load, arena),
    F_U32(wire_disk_load, slot),    F_MSG(wire_disk_load, extents, &codec_extent_list),
    F_STR(wire_disk_load, root),    F_STR(wire_disk_load, dir),
};
CODEC_TABLE(disk_load, wire_disk_load, disk_load, NULL);

static const struct codec_field fields_disk_loaded[] = {
    F_U64(wire_disk_loaded, request),
    F_I32(wire_disk_loaded, rc),
    F_STR(wire_disk_loaded, text),
};
CODEC_TABLE(disk_loaded, wire_disk_loaded, disk_loaded, NULL);

static const struct codec_field fields_bulk_read[] = {
    F_U64(wire_bulk_read, run),   F_U64(wire_bulk_read, generation), F_WORDS(wire_bulk_read, key),
    F_U64(wire_bulk_read, arena), F_U64(wire_bulk_read, offset),     F_U64(wire_bulk_read, bytes),
};
CODEC_TABLE(bulk_read, wire_bulk_read, bulk_read, NULL);

static const struct codec_field fields_bulk_data[] = {
    F_I32(wire_bulk_data, rc),
    F_STR(wire_bulk_data, text),
    F_U64(wire_bulk_data, bytes),
    F_U64(wire_bulk_data, file_bytes),
};
CODEC_TABLE(bulk_data, wire_bulk_data, bulk_data, NULL);

static const struct codec_field fields_bulk_file[] = {
    F_U64(wire_bulk_file, run),   F_WORDS(wire_bulk_file, key), F_U32(wire_bulk_file, root),
    F_STR(wire_bulk_file, dir),   F_STR(wire_bulk_file, file),  F_U64(wire_bulk_file, offset),
    F_U64(wire_bulk_file, bytes),
};
CODEC_TABLE(bulk_file, wire_bulk_file, bulk_file, NULL);

static const struct codec_field fields_vote_hello[] = {
    F_U64(wire_vote_hello, run),
    F_U64(wire_vote_hello, generation),
    F_WORDS(wire_vote_hello, comm_key),
    F_U32(wire_vote_hello, rank),
};
CODEC_TABLE(vote_hello, wire_vote_hello, vote_hello, NULL);

static const struct codec_field fields_shim_attach[] = {
    F_U64(wire_shim_attach, run),
    F_U64(wire_shim_attach, incarnation),
    F_U64(wire_shim_attach, node_incarnation),
};
CODEC_TABLE(shim_attach, wire_shim_attach, shim_attach, NULL);

static const struct codec_field fields_shim_arena[] = {
    F_U64(wire_shim_arena, arena),
    F_U32(wire_shim_arena, fd_index),
};
static CODEC_TABLE(shim_arena, wire_shim_arena, shim_arena, NULL);

static const struct codec_field fields_shim_state[] = {
    F_U64(wire_shim_state, run),
    F_U64(wire_shim_state, incarnation),
    F_U32(wire_shim_state, rank),
    F_U32(wire_shim_state, shim_pid),
    F_U32(wire_shim_state, pid),
    F_U32(wire_shim_state, exited),
    F_MSG(wire_shim_state, exit, &codec_exit),
    F_U64(wire_shim_state, started_ms),
    F_U64(wire_shim_state, log_bytes),
    F_U64(wire_shim_state, log_dropped),
    F_MSGS_IN(wire_shim_state, arenas, arena_count, WIRE_FDS_MAX, &codec_shim_arena),
    F_U32(wire_shim_state, page_fd_index),
    F_I32(wire_shim_state, rc),
    F_STR(wire_shim_state, text),
    F_U32(wire_shim_state, suspected),
};
CODEC_TABLE(shim_state, wire_shim_state, shim_state, NULL);

static const struct codec_field fields_shim_keep[] = {
    F_U64(wire_shim_keep, arena),
    F_U32(wire_shim_keep, drop),
};
CODEC_TABLE(shim_keep, wire_shim_keep, shim_keep, NULL);

static const struct codec_field fields_shim_kept[] = {
    F_U64(wire_shim_kept, arena),
    F_I32(wire_shim_kept, rc),
    F_STR(wire_shim_kept, text),
};
CODEC_TABLE(shim_kept, wire_shim_kept, shim_kept, NULL);

static const struct codec_field fields_shim_kill[] = {
    F_U32(wire_shim_kill, signal),
    F_U32(wire_shim_kill, tree),
};
CODEC_TABLE(shim_kill, wire_shim_kill, shim_kill, NULL);

static const struct codec_field fields_shim_stacks[] = {
    F_U32(wire_shim_stacks, request),
};
CODEC_TABLE(shim_stacks, wire_shim_stacks, shim_stacks, NULL);

static const struct codec_field fields_shim_stacked[] = {
    F_U32(wire_shim_stacked, request),
    F_I32(wire_shim_stacked, rc),
    F_STR(wire_shim_stacked, text),
    F_TEXT(wire_shim_stacked, stacks, WIRE_JSON_MAX),
};
CODEC_TABLE(shim_stacked, wire_shim_stacked, shim_stacked, NULL);

static const struct codec_field fields_shim_release[] = {
    F_U32(wire_shim_release, kill),
};
CODEC_TABLE(shim_release, wire_shim_release, shim_release, NULL);

static const struct codec_field fields_shim_exit[] = {
    F_U64(wire_shim_exit, incarnation),       F_U32(wire_shim_exit, pid),
    F_MSG(wire_shim_exit, exit, &codec_exit), F_U64(wire_shim_exit, log_bytes),
    F_U64(wire_shim_exit, log_dropped),
};
CODEC_TABLE(shim_exit, wire_shim_exit, shim_exit, NULL);

static const struct codec_field fields_shim_started[] = {
    F_U64(wire_shim_started, incarnation),
    F_U32(wire_shim_started, pid),
    F_I32(wire_shim_started, rc),
    F_STR(wire_shim_started, text),
};
CODEC_TABLE(shim_started, wire_shim_started, shim_started, NULL);
