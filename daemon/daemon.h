/* SPDX-License-Identifier: Apache-2.0 */
/*
 * belayd from inside: one loop thread, on which everything here lives. The machines of daemon/core
 * decide; the files of this room carry their effects out and bring what happens back in.
 *
 *      rank_link.c  tool_link.c   control.c (other daemons)   proc.c (shims)   engine_client.c
 *             \          \          |                           /             /
 *              +----------+------- run.c: one struct run per job ------------+
 *                                  |  member_edge.c: core_member   (every node)
 *                                  |  leader_edge.c: core_leader   (the head)
 *                                  store, events
 *
 * Every input ends in run_pump: it takes the machines' effects until there are none and arms the
 * run's timer for the time that they name.
 */
#ifndef DAEMON_DAEMON_H
#define DAEMON_DAEMON_H

#include <stdint.h>
#include <uv.h>

#include "base/job.h"
#include "base/json.h"
#include "daemon/config.h"
#include "daemon/conn.h"
#include "daemon/core/leader.h"
#include "daemon/core/member.h"
#include "daemon/events.h"
#include "daemon/store.h"
#include "wire/slot.h"

#define DAEMON_RUNS_MAX 16 /* jobs on one node at a time */
#define DAEMON_PROCS_MAX                                                                           \
    256 /* processes of one job on one node, dead ones not yet forgotten too                       \
         */
#define DAEMON_ARENAS_MAX 512
#define DAEMON_PEERS_MAX  256

struct daemon;
struct run;
struct engine;
struct control;
struct tools;
struct replica;
struct unix_server;
struct submit;
struct bulk;

struct arena { /* a memfd with slots */
    uint64_t id, incarnation, bytes;
    int fd;
    void *map;   /* read-only, whole; views of a rank's stores */
    int is_kept; /* the shim has a duplicate */
    int has_info;
    struct wire_arena_info info; /* extents read once; slots are read again each time */
};

enum proc_state { PROC_STARTING, PROC_LIVE, PROC_EXITED };

struct proc { /* a rank's process, as this node sees it */
    struct run *run;
    uint64_t incarnation;
    uint32_t rank; /* hint */
    uint32_t pid, shim_pid;
    enum proc_state state;
    int adopted, suspected, released, kill_wanted, stacks_wanted;
    int reattaching; /* live, its shim is being reached again */
    int page_fd;
    int pidfd;              /* of the rank; -1 not known */
    uv_poll_t *dying;       /* on pidfd, after its shim was lost */
    struct wire_page *page; /* NULL until known */
    struct conn *shim_conn; /* NULL: not attached (yet) */
    struct conn *rank_conn; /* NULL: not connected */
    uv_process_t *process;  /* the shim as our child; NULL when adopted */
    uv_timer_t *timer;      /* attach retries */
    uint64_t attach_until_ms;
    struct wire_exit exit;
};

struct run {
    struct daemon *daemon;
    uint64_t id;
    char name[BL_JOB_NAME_MAX];
    char dir[1024]; /* STATE/jobs/NAME */
    struct bl_job *job;
    char *job_json;
    uint64_t exe_digest; /* of the trainer's executable at its first start here; 0 not yet */
    struct core_member *member;
    struct core_leader *leader; /* NULL: not the head, or the run is over */
    uint64_t record_version;
    uv_timer_t timer, beat;
    struct proc *procs[DAEMON_PROCS_MAX];
    uint32_t proc_count;
    struct arena arenas[DAEMON_ARENAS_MAX];
    uint32_t arena_count;
    int pumping, pump_again, adopting, closing;
    uint32_t handles_open;
    enum wire_verdict verdict; /* after FINISHED or DONE */
    char start_text[256];      /* why the last start of a rank failed; "" none did since */
    uint64_t passed_told[16];  /* digests of what was said of checkpoints passed over; a ring */
    uint32_t passed_count;
    uint64_t disk_ms; /* when the newest save was committed; 0 not since we started */
};

struct daemon {
    uv_loop_t *loop;
    struct daemon_config config;
    uint64_t incarnation; /* random, of this process */
    uint64_t head_epoch;  /* newest one seen; durable */
    int is_head, stopping;
    uint64_t started_ms;
    struct events *events;
    struct store *store;    /* on the head and on a standby */
    struct engine *engines; /* a list, one for each root */
    struct control *control;
    struct tools *tools;
    struct replica *replica;
    struct bulk *bulk;
    struct unix_server *unix_server;
    struct submit *submits; /* under way, a list */
    json_t *ended;          /* last status of runs that ended */
    char listen_addr[WIRE_ADDR_MAX], bulk_addr[WIRE_ADDR_MAX];
    struct run *runs[DAEMON_RUNS_MAX];
    uint32_t run_count;
};

uint64_t daemon_now_ms(void); /* CLOCK_BOOTTIME */
void daemon_hex(uint64_t value, char text[17]);
uint64_t daemon_unhex(const char *text);

/* ---- run.c ---- */

struct run *run_find(struct daemon *daemon, uint64_t id);
struct run *run_find_name(struct daemon *daemon, const char *name);
/* Makes the run's directory, job and member machine; adopts nothing. Owned by the daemon. */
BL_MUST_CHECK int run_open(struct daemon *daemon, uint64_t id, const char *job_json,
                           struct run **ret, struct bl_errmsg *msg);
/* The job as the head says it now: a run that was resumed may have another layout, other roots.
 * Ranks that start from now on read it. BL_ECONFIG: the run keeps the one that it has. */
BL_MUST_CHECK int run_job_set(struct run *run, const char *job_json, struct bl_errmsg *msg);
/* A fresh run's member begins to speak. */
void run_begin(struct run *run);
/* Ends timers, frees the machines, forgets it. Processes must be gone. */
void run_close(struct run *run);
/* Takes effects until there are none; from inside itself it only notes that it is wanted. */
void run_pump(struct run *run);
/* Writes run.json and job.json, for the next daemon. */
void run_remember(struct run *run);
struct bl_job *run_job_parse(const char *json, struct bl_errmsg *msg);

/* ---- member_edge.c ---- */

void member_edge_effects(struct run *run, int *ret_any);
const char *member_edge_verdict(enum wire_verdict verdict); /* "finished", "stopped", ... */
/* Reads all slot headers and tells the machine. */
void member_edge_arenas(struct run *run);
void member_edge_beat(struct run *run); /* pages, arenas */

/* ---- leader_edge.c ---- */

/* A leader for `run`: `record` NULL for a fresh one. */
BL_MUST_CHECK int leader_edge_open(struct run *run, const struct wire_record *record,
                                   uint64_t version, int resume, struct bl_errmsg *msg);
void leader_edge_effects(struct run *run, int *ret_any);
void leader_edge_close(struct run *run);

/* ---- proc.c ---- */

struct proc *proc_find(struct run *run, uint64_t incarnation);
void proc_start(struct run *run, uint64_t incarnation, uint32_t rank);
void proc_kill(struct run *run, uint64_t incarnation, int stacks);
void proc_release(struct run *run, uint64_t incarnation);
/* A shim of a former daemon at this socket; done(run) is called when all are settled. */
void proc_adopt(struct run *run, uint64_t incarnation, uint32_t rank);
/* Keeps or drops an arena's duplicate in the shim of its rank. */
void proc_keep(struct run *run, struct arena *arena);
void proc_drop(struct run *run, uint64_t incarnation, uint64_t arena);
/* The run is over: all shims may go, with what is left of their ranks. */
void proc_release_all(struct run *run);
/* Detaches from all shims without a word: ranks go on. */
void proc_detach_all(struct run *run);
void proc_free(struct proc *proc);

/* ---- arena.c ---- */

BL_MUST_CHECK int arena_make(struct run *run, uint64_t incarnation, uint64_t bytes,
                             struct arena **ret, struct bl_errmsg *msg);
/* Takes `fd`. */
BL_MUST_CHECK int arena_adopt(struct run *run, uint64_t incarnation, uint64_t id, int fd,
                              struct bl_errmsg *msg);
struct arena *arena_find(struct run *run, uint64_t id);
void arena_drop(struct run *run, uint64_t id);
uint64_t arena_bytes_used(const struct run *run);
/* 1 and a fresh view (extents copied) when its header could be read. */
int arena_read(struct arena *arena, struct wire_arena_info *ret);
uint32_t arena_count_of(const struct run *run, uint64_t incarnation);

/* ---- adopt.c ---- */

/* Looks for shims in STATE/jobs and takes their ranks back. */
void adopt_scan(struct daemon *daemon);
/* A proc of an adopting run is settled: attached, or found dead. */
void adopt_settled(struct run *run);

/* ---- exe.c ---- */

/* The trainer's executable for a job: path in `ret` (bytes long). */
BL_MUST_CHECK int exe_path(const struct bl_job *job, char *ret, size_t bytes,
                           struct bl_errmsg *msg);
/* XXH3 of its bytes. */
BL_MUST_CHECK int exe_digest(const char *path, uint64_t *ret, struct bl_errmsg *msg);

/* ---- rank_link.c, tool_link.c ---- */

BL_MUST_CHECK int unix_server_open(struct daemon *daemon, struct bl_errmsg *msg);
void unix_server_close(struct daemon *daemon);
/* A rank said hello on `conn`; takes it over. */
void rank_link_take(struct daemon *daemon, struct conn *conn, const struct wire_hello *hello);
void rank_link_send(struct run *run, uint64_t incarnation);
BL_MUST_CHECK int tools_open(struct daemon *daemon, struct bl_errmsg *msg);
void tools_close(struct daemon *daemon);
void tool_link_take(struct daemon *daemon, struct conn *conn);
void tool_link_notify(struct daemon *daemon); /* events or states changed */
/* A request that came from a tool, or through another daemon, on `conn`. */
BL_MUST_CHECK int tool_link_request(struct daemon *daemon, struct conn *conn,
                                    const struct wire_frame *frame);
/* The head's answer to a request that we passed on. */
BL_MUST_CHECK int tool_link_answer(struct daemon *daemon, const struct wire_frame *frame);
void tool_link_gone(struct daemon *daemon, struct conn *conn); /* nobody waits there any more */
void tool_link_head_lost(struct daemon *daemon); /* requests passed on are answered with that */
void tool_link_reply(struct daemon *daemon, struct conn *conn, const uint64_t id[2], int rc,
                     const char *text, const char *json); /* json may be NULL; borrows all */

/* ---- control.c: between daemons ---- */

BL_MUST_CHECK int control_open(struct daemon *daemon, struct bl_errmsg *msg);
void control_close(struct daemon *daemon);
/* To the head; dropped while it is away (the machine repeats). */
void control_send_report(struct daemon *daemon, const struct wire_report *report);
/* To a node; dropped when it is not connected. */
void control_send_directive(struct daemon *daemon, const char *node,
                            const struct wire_directive *directive);
/* Whom to call at config.head has changed: as a member its head, as a promoted head the old one. */
void control_head_seek(struct daemon *daemon);
/* The connection to the head, or NULL. */
struct conn *control_head(struct daemon *daemon);
/* Names of connected nodes, this one first; returns how many. */
uint32_t control_nodes(struct daemon *daemon, char names[][WIRE_NODE_MAX], uint32_t max);
/* A directive came, from the head or from our own leader. */
void control_directive(struct daemon *daemon, const struct wire_directive *directive);

/* ---- bulk.c: other nodes read this node's arenas, on a thread of its own ---- */

/* Listens and starts the thread; -errno or BL_E* with text when the address cannot be had. */
BL_MUST_CHECK int bulk_open(struct daemon *daemon, struct bl_errmsg *msg);
void bulk_close(struct daemon *daemon);

/* ---- submit.c ---- */

/* `args`: {"job": {...}, "replace_binary": bool, "recover": {...}}. rc and text, or the run. */
void submit_request(struct daemon *daemon, const char *args, struct conn *conn,
                    const uint64_t id[2]);
void submit_gone(struct daemon *daemon, struct conn *conn); /* nobody waits there any more */
/* Takes up all runs of the store that are not over: the head's start, and a promotion. */
BL_MUST_CHECK int submit_load(struct daemon *daemon, struct bl_errmsg *msg);
/* The head's start, after that: runs that were accepted here and have no record yet, because the
 * daemon died before its first decision. Not after a promotion: such a run may be another head's.
 */
void submit_load_unborn(struct daemon *daemon);

/* ---- promote.c ---- */

/* `belay promote` on this daemon: becomes the head, with a higher epoch. */
void promote_request(struct daemon *daemon, struct conn *conn, const uint64_t id[2]);
/* At the start: is this daemon the head, by its configuration, a promotion or a deposition? */
void promote_load(struct daemon *daemon);
/* The daemon at `addr` leads with a newer epoch: this one becomes its member. Not from inside
 * run_pump. -EINVAL when the address cannot be used: nothing changes. */
int promote_depose(struct daemon *daemon, uint64_t epoch, const char *addr);

#endif
