/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages of the edges: hello, memory, shims, engines, requests of people. Plain structs as in
 * msg.h; codec.h turns all of them into bytes and back. Fields called `text` are sentences for
 * people, `rc` is 0 or a negative code of base/error.h. `owned` members are freed by
 * wire_message_close (codec.h), and so are those of a message that was decoded.
 *
 * File descriptors travel beside a frame (sock.h); `fd_index` counts within the frame, from 0.
 */
#ifndef WIRE_EDGE_H
#define WIRE_EDGE_H

#include "wire/msg.h"

#define WIRE_BUILD_MAX      64   /* bytes of a version text, with the NUL */
#define WIRE_PART_MAX       64   /* of a part's name */
#define WIRE_CODEC_MAX      16   /* of a codec's name */
#define WIRE_FILE_MAX       128  /* of the name of a checkpoint's file */
#define WIRE_KEY_MAX        128  /* of a key in the store */
#define WIRE_FDS_MAX        16   /* descriptors beside one frame */
#define WIRE_REASON_MAX     512  /* of the text of an answer */
#define WIRE_PARTS_MAX      4096 /* of a checkpoint */
#define WIRE_CHECKPOINT_MAX 4096 /* of a root, newest first */

/* ---- hello: the first frame each way ---- */

enum wire_role {
    WIRE_ROLE_NONE = 0,
    WIRE_ROLE_DAEMON = 1, /* member or leader */
    WIRE_ROLE_RANK = 2,
    WIRE_ROLE_SHIM = 3,
    WIRE_ROLE_ENGINE = 4,
    WIRE_ROLE_TOOL = 5, /* `belay` */
    WIRE_ROLE_BULK = 6  /* reads another node's arenas */
};

struct wire_hello {
    uint32_t version; /* of the protocol: WIRE_FRAME_VERSION */
    char build[WIRE_BUILD_MAX];
    enum wire_role role;
    uint64_t run;
    char node[WIRE_NODE_MAX];
    uint64_t incarnation; /* of the sender's process */
    uint64_t head_epoch;
    char job[64]; /* the job's name; rank -> daemon: BELAY_JOB */
    uint32_t pid;
    /* daemon -> rank only */
    char *job_json; /* owned, may be NULL: the frozen job */
    uint32_t beat_ms, lanes, load_deadline_ms;
    char addr[WIRE_ADDR_MAX]; /* daemon -> daemon: where its control port listens */
};

/* ---- memory: rank -> daemon over the UNIX socket. `request` numbers the question of a
 * connection; the answer repeats it. ---- */

struct wire_arena_make {
    uint64_t request;
    uint32_t slot_count;
    uint64_t state_bytes; /* of one slot */
    struct bl_extent_list extents;
};

/* With rc 0 one fd comes along: a memfd of `bytes` bytes, all zero; the rank formats it. Over the
 * node's budget: BL_ELIMIT and a text with the sum. */
struct wire_arena {
    uint64_t request;
    int32_t rc;
    char text[WIRE_REASON_MAX];
    uint64_t arena, bytes;
};

/* An arena that was made for this rank holds nothing and never will: the answer came when nobody
 * waited for it any more. (Arenas with state go when the leader says so.) No answer. */
struct wire_arena_drop {
    uint64_t arena;
};

struct wire_copy_open { /* any arena of this node */
    uint64_t request, arena;
};

struct wire_copy_opened { /* with rc 0 one fd comes along; only ever mapped for reading */
    uint64_t request;
    int32_t rc;
    char text[WIRE_REASON_MAX];
    uint64_t arena, bytes;
};

struct wire_disk_load { /* fill these extents of the slot from the checkpoint ROOT/DIR */
    uint64_t request, arena;
    uint32_t slot;
    struct bl_extent_list extents; /* offsets from the slot's start */
    char root[WIRE_ROOT_MAX];
    char dir[WIRE_DIR_MAX];
};

struct wire_disk_loaded {
    uint64_t request;
    int32_t rc;
    char text[WIRE_REASON_MAX];
};

/* ---- bulk: any process of the run -> bulk port of another node. The connection begins with a
 * hello each way (role WIRE_ROLE_BULK from the reader); then questions, each answered in turn. ----
 */

struct wire_bulk_read {
    uint64_t run, generation;
    uint64_t key[2]; /* the plan's comm_key */
    uint64_t arena;
    uint64_t offset, bytes; /* within the arena's memfd */
};

/* Of a checkpoint that lies on nodes' own directories: a part, its index, or the manifest. */
struct wire_bulk_file {
    uint64_t run;
    uint64_t key[2]; /* the directive's file_key */
    uint32_t root;   /* index in the job's roots */
    char dir[WIRE_DIR_MAX];
    char file[WIRE_FILE_MAX];
    uint64_t offset, bytes; /* of the file; 0 bytes: only its size is wanted */
};

struct wire_bulk_data { /* with rc 0, `bytes` raw bytes follow the frame */
    int32_t rc;
    char text[WIRE_REASON_MAX];
    uint64_t bytes;
    uint64_t file_bytes; /* of a BULK_FILE: the file's size */
};

/* ---- votes: the first frame of a connection between ranks, from the one that connects ---- */

struct wire_vote_hello {
    uint64_t run, generation;
    uint64_t comm_key[2];
    uint32_t rank; /* of the sender in the plan */
};

/* ---- daemon <-> shim; the shim answers attach with its state and pushes what changes ---- */

struct wire_shim_attach {
    uint64_t run, incarnation, node_incarnation;
};

struct wire_shim_arena {
    uint64_t arena;
    uint32_t fd_index;
};

struct wire_shim_state { /* fds: the beat page and the arenas that it keeps */
    uint64_t run, incarnation;
    uint32_t rank;     /* of BELAY_RANK, a hint */
    uint32_t shim_pid; /* its own */
    uint32_t pid;      /* of the rank; 0 before it started */
    uint32_t exited;   /* `exit` is valid */
    struct wire_exit exit;
    uint64_t started_ms; /* age of the rank's process */
    uint64_t log_bytes, log_dropped;
    uint32_t arena_count;
    struct wire_shim_arena arenas[WIRE_FDS_MAX];
    uint32_t page_fd_index;
    int32_t rc;
    char text[WIRE_REASON_MAX]; /* attach refused, or the start failed */
    uint32_t suspected;         /* the rank is dying: its robust mutex lost its holder */
};

struct wire_shim_keep { /* with one fd: keep a duplicate for the next daemon; or drop it */
    uint64_t arena;
    uint32_t drop;
};

struct wire_shim_kept {
    uint64_t arena;
    int32_t rc;
    char text[WIRE_REASON_MAX];
};

struct wire_shim_kill {
    uint32_t signal;
    uint32_t tree; /* with all descendants */
};

struct wire_shim_stacks { /* take the stacks of all threads; takes seconds */
    uint32_t request;
};

struct wire_shim_stacked {
    uint32_t request;
    int32_t rc;
    char text[WIRE_REASON_MAX];
    char *stacks; /* owned, may be NULL */
};

struct wire_shim_release { /* forget everything and exit; with `kill` end the rank first */
    uint32_t kill;
};

struct wire_shim_exit { /* pushed; RANK.INC.exit is durable already */
    uint64_t incarnation;
    uint32_t pid;
    struct wire_exit exit;
    uint64_t log_bytes, log_dropped;
};

struct wire_shim_started { /* pushed; rc < 0: it could not be started, text says why */
    uint64_t incarnation;
    uint32_t pid;
    int32_t rc;
    char text[WIRE_REASON_MAX];
};

/* ---- store: head -> standby, over the control connection ---- */

struct wire_store_replica { /* one change, in order of revision; durable before the ack */
    uint64_t head_epoch, run, revision;
    char key[WIRE_KEY_MAX];
    uint64_t value_bytes;
    uint8_t *value; /* owned, may be NULL */
    uint32_t removed;
};

struct wire_store_ack { /* rc 0: durable up to `revision` */
    uint64_t head_epoch, run, revision;
    int32_t rc;
    char text[WIRE_REASON_MAX];
};

/* ---- `belay` -> daemon ---- */

enum wire_verb {
    WIRE_VERB_NONE = 0,
    WIRE_VERB_SUBMIT = 1, /* args {job, flags} */
    WIRE_VERB_STATUS = 2,
    WIRE_VERB_EVENTS = 3, /* args {since, follow}: many answers, `more` set in all but the last */
    WIRE_VERB_SAVE = 4,
    WIRE_VERB_STOP = 5,
    WIRE_VERB_PROMOTE = 6,
    WIRE_VERB_RECOVER = 7,
    WIRE_VERB_METRICS = 8,
    WIRE_VERB_WATCH = 9, /* like status, again on each change */
    WIRE_VERB_MAX = 63   /* later ones are answered with BL_ENOTBUILT */
};

struct wire_request {
    uint64_t id[2]; /* random; a repeat gets the stored answer */
    enum wire_verb verb;
    char *args; /* owned, may be NULL; JSON */
};

struct wire_answer {
    uint64_t id[2];
    int32_t rc;
    char text[WIRE_REASON_MAX];
    char *json; /* owned, may be NULL */
    uint32_t more;
};

#endif
