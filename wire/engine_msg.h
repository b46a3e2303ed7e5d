/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages between a daemon and its engine, over a socket pair. Each question has one answer, in
 * any order; `attempt` (saves) and `request` (scans, loads) match them. Arenas come as file
 * descriptors beside the frame; the engine maps them, reads their headers itself and closes them
 * when the answer is out.
 *
 * Unasked comes ENGINE_VERIFIED: what was committed has been read back whole, after the answer to
 * the commit and whenever there was time for it. A write of more arenas than fit beside one frame
 * has ENGINE_ARENAS before it, which have no answer of their own.
 */
#ifndef WIRE_ENGINE_MSG_H
#define WIRE_ENGINE_MSG_H

#include "wire/edge.h"

struct wire_engine_hello { /* the engine's first frame */
    uint32_t version;
    char build[WIRE_BUILD_MAX];
    uint32_t pid;
};

struct wire_engine_root {
    char path[WIRE_ROOT_MAX];
    uint64_t run;             /* 0: whatever is there (reading) */
    char node[WIRE_NODE_MAX]; /* that writes */
    uint32_t nodes;           /* of the job */
    uint32_t shared;          /* all nodes see the same directory */
    uint32_t create;          /* make it when it is missing */
    uint64_t reserve_bytes;   /* kept for the commit record */
    uint64_t rate_max;        /* bytes a second, for saves and for verification each; 0: none */
    uint32_t index;           /* in the job's roots: other nodes' files are asked for by it */
    uint32_t
        apart; /* this save lies on several nodes, each of which has this directory for itself */
};

struct wire_engine_peers { /* where files are read that this node's root does not have */
    uint64_t key[2];       /* that opens the run's files there */
    uint32_t peer_count;
    struct wire_holder *peers; /* owned */
};

struct wire_engine_attempt {
    uint64_t attempt; /* random id, the nonce of the directory */
    uint64_t step, generation, line;
    uint32_t count;         /* the first attempt at this step is 1 */
    char dir[WIRE_DIR_MAX]; /* of the attempt, below the root, where the leader named it */
};

struct wire_engine_arena {
    uint64_t arena;
    uint32_t slot; /* the one to write: sealed with (line, step) of the attempt, else BL_ENOSTATE */
    uint32_t fd_index;
};

struct wire_engine_arenas { /* the first of many arenas of a write that follows; no answer */
    uint64_t attempt;
    uint32_t arena_count;
    struct wire_engine_arena arenas[WIRE_FDS_MAX];
};

struct wire_engine_write {
    struct wire_engine_root root;
    struct wire_engine_attempt attempt;
    char part[WIRE_PART_MAX];   /* "part-0003" */
    char codec[WIRE_CODEC_MAX]; /* "none" */
    uint32_t arena_count;
    struct wire_engine_arena arenas[WIRE_FDS_MAX]; /* the last, after those of ENGINE_ARENAS */
    struct bl_extent_list pick; /* owned: what of the arenas is written; empty: all of it */
};

struct wire_engine_written { /* rc 0: durable */
    uint64_t attempt;
    int32_t rc;
    char text[WIRE_REASON_MAX];
    char *part_json; /* owned; the part's description, for the manifest */
    uint64_t bytes, elapsed_ms;
};

struct wire_engine_part {
    char *part_json; /* owned; as an engine's written said */
};

struct wire_engine_keep { /* what a rule keeps is kept, and two verified ones; all 0: everything */
    uint32_t keep;        /* newest; 0: no limit by number */
    uint32_t keep_best;   /* with the lowest loss */
    uint64_t keep_every;  /* whose step is a multiple of it: for ever */
    uint64_t bytes_max;   /* of all: then the oldest go first, but for those kept for ever */
};

enum wire_engine_stage {                        /* of a commit: */
                         WIRE_ENGINE_WHOLE = 0, /* manifest and rename, at once */
                         WIRE_ENGINE_COMPOSE =
                             1, /* apart: write the manifest into this node's attempt, of the parts
                                   that the peers hold; answered with its digest */
                         WIRE_ENGINE_PREPARE =
                             2, /* apart: take the manifest of that digest from a peer */
                         WIRE_ENGINE_PUBLISH =
                             3, /* apart: the final name; then sweep and read back */
                         WIRE_ENGINE_RETAIN =
                             4 /* apart: it was read back everywhere: mark it, retain; no answer */
};

struct wire_engine_commit { /* write the manifest and rename; then sweep and retain */
    struct wire_engine_root root;
    struct wire_engine_attempt attempt;
    char final_dir[WIRE_DIR_MAX]; /* "" leaves the name to the engine */
    char *manifest_json;          /* owned; what the parts do not say: job, world, lanes, ... */
    struct wire_engine_keep keep;
    uint32_t verify; /* read it back even when nothing older has to go */
    uint32_t part_count;
    struct wire_engine_part *parts; /* owned */
    uint32_t line_end_count;
    struct wire_line_end *line_ends; /* owned; of the run; what lies beyond them protects nothing */
    uint32_t stage;                  /* enum wire_engine_stage */
    uint64_t manifest_digest;        /* of PREPARE, PUBLISH, RETAIN */
    struct wire_engine_peers peers;  /* of COMPOSE, PREPARE */
};

struct wire_engine_committed { /* rc 0: the checkpoint is there for good */
    uint64_t attempt;
    int32_t rc;
    char text[WIRE_REASON_MAX];
    uint64_t manifest_digest;
    char dir[WIRE_DIR_MAX]; /* its name below the root */
    uint64_t elapsed_ms;
    char warning[WIRE_REASON_MAX]; /* good, but a person should look at it; or "" */
};

struct wire_engine_verified { /* unasked. rc 0: every byte was read back and is right */
    uint64_t attempt;         /* of the commit; 0 when it was committed by an earlier engine */
    uint64_t step;
    int32_t rc;                 /* BL_EDIGEST, BL_EFORMAT: it is damaged; else it could not look */
    char text[WIRE_REASON_MAX]; /* names file, chunk, tensor */
    char dir[WIRE_DIR_MAX];
    uint64_t bytes, elapsed_ms;
    uint32_t removed; /* older checkpoints that were retired after it */
};

struct wire_engine_cancel { /* stop the write of it, if one runs, and remove what it left */
    struct wire_engine_root root;
    struct wire_engine_attempt attempt;
};

struct wire_engine_cancelled {
    uint64_t attempt;
    int32_t rc;
    char text[WIRE_REASON_MAX];
};

struct wire_engine_scan { /* which checkpoints are there */
    uint64_t request;
    struct wire_engine_root root;
    uint32_t own; /* the node has it for itself: parts of checkpoints and prepared attempts too */
};

struct wire_engine_checkpoint {
    char dir[WIRE_DIR_MAX];
    uint64_t step, generation, line;
    struct bl_state_digest digest; /* of the whole state */
    uint64_t manifest_digest;
    uint64_t bytes, saved_unix_s;
    uint64_t function_id;
    char *job_json; /* owned; only of the newest, else NULL */
    /* With `own`: */
    uint64_t attempt;    /* nonce of a prepared attempt; 0: its name is final */
    uint32_t part_count; /* of the manifest */
    uint32_t parts_here;
    uint64_t *parts;           /* owned; which of them are here */
    char lacks[WIRE_NODE_MAX]; /* the node that wrote the first part that is not here; "" none */
    uint32_t verified;         /* marked so */
};

struct wire_engine_passed { /* one that is not good */
    char dir[WIRE_DIR_MAX];
    char text[WIRE_REASON_MAX]; /* why not */
};

struct wire_engine_scanned {
    uint64_t request;
    int32_t rc; /* BL_EFOREIGN: the root is another run's, text says so; -ENOENT: no root */
    char text[WIRE_REASON_MAX];
    char run_text[64]; /* the run id that the root carries */
    uint64_t run;      /* the same as a number, where it is one of ours */
    uint32_t checkpoint_count;
    struct wire_engine_checkpoint *checkpoints; /* owned; good ones, newest first */
    uint32_t passed_count;
    struct wire_engine_passed *passed; /* owned; newer than all good ones, newest first */
};

struct wire_engine_copy { /* the same state elsewhere */
    struct wire_engine_root root;
    char dir[WIRE_DIR_MAX];
};

struct wire_engine_load { /* with the arena's fd, writable: fill a slot's extents from disk */
    uint64_t request;
    struct wire_engine_root root;
    char dir[WIRE_DIR_MAX];
    uint64_t arena;
    uint32_t slot;
    uint64_t data_offset; /* bytes in the arena where the slot's data begins */
    struct bl_extent_list extents;
    uint32_t copy_count;
    struct wire_engine_copy copies[WIRE_JOB_ROOTS]; /* what is damaged is taken from these */
    struct wire_engine_peers peers;                 /* hold what this node does not, of all roots */
};

struct wire_engine_loaded {
    uint64_t request;
    int32_t rc;
    char text[WIRE_REASON_MAX]; /* names file, chunk and tensor, without the root */
    uint64_t bytes, elapsed_ms;
    uint32_t healed;                   /* chunks and whole files that came from a copy */
    char healed_text[WIRE_REASON_MAX]; /* the first: file, chunk, tensor, from where */
};

#endif
