/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the daemon's side of the engines: one engine, and what its files share. */
#ifndef DAEMON_ENGINE_STATE_H
#define DAEMON_ENGINE_STATE_H

#include "daemon/engine_client.h"

enum engine_question {
    ENGINE_ASKED_NONE,
    ENGINE_ASKED_WRITE,
    ENGINE_ASKED_COMMIT,
    ENGINE_ASKED_STAGE,
    ENGINE_ASKED_SCAN,
    ENGINE_ASKED_LOAD
};

struct engine_pending { /* a question under way; fails when the engine dies */
    enum engine_question kind;
    uint64_t key; /* attempt or request */
    uint64_t run;
    uint64_t step; /* of a write, for its event */
    engine_scanned_fn scanned;
    engine_loaded_fn loaded;
    void *arg;
};

struct engine_child { /* a process; it outlives its engine's interest in it until it is reaped */
    uv_process_t process;      /* first: freed by its handle */
    struct engine *engine;     /* NULL: nobody cares any more */
    struct engine_child *next; /* of the engine's former ones */
};

struct engine {
    struct daemon *daemon;
    struct engine *next;
    char path[WIRE_ROOT_MAX];
    struct engine_child *child, *former; /* former: killed, not yet reaped */
    uv_timer_t *restart;                 /* owned; after an end, or a pause while stuck */
    uv_timer_t *watch;                   /* owned; runs while something is asked */
    struct conn *conn;
    uint32_t pid;
    int greeted;        /* the child has said hello */
    uint32_t stillborn; /* children in a row that did not */
    uint64_t next_request;
    struct engine_pending pending[ENGINE_PENDING_MAX];
    uint32_t asked; /* questions under way */
    int closing;
    uint64_t used_ms; /* when it was last asked */

    /* Does it move? */
    uint64_t moved_ms, io_count, cpu_ticks, looked_ms;
    uint64_t alone_ms; /* when it last moved by itself, not only its disk */
    uint64_t sectors;  /* of its disk */
    int is_stuck;
    uint32_t stuck_count; /* in a row */
};

/* ---- engine_client.c ---- */

/* The engine of this root, made when there is none; NULL: too many. */
struct engine *engine_of(struct daemon *daemon, const char *path);
/* A place for a question, or NULL. */
struct engine_pending *engine_pending_add(struct engine *engine, enum engine_question kind,
                                          uint64_t key, uint64_t run);
/* Takes the question out of the table: 1 and a copy in *ret, or 0. */
int engine_pending_take(struct engine *engine, enum engine_question kind, uint64_t key,
                        struct engine_pending *ret);
/* It will not be answered: whoever asked is told. */
void engine_pending_fail(struct engine *engine, const struct engine_pending *pending,
                         const char *text);
void engine_pending_fail_all(struct engine *engine, const char *text);
/* Sends the question; one that cannot be sent fails at once. */
void engine_ask(struct engine *engine, struct engine_pending *pending, enum wire_type type,
                const void *message, const int *fds, uint32_t fd_count);
/* Starts a child unless there is one. */
void engine_start(struct engine *engine);
/* Then a child is started, or a stuck root is tried. */
void engine_restart_in(struct engine *engine, uint64_t ms);
/* Kills the child and forgets it: it is reaped when it can die. */
void engine_child_abandon(struct engine *engine);
void engine_written_tell(struct engine *engine, const struct engine_pending *pending, int rc,
                         const struct wire_engine_written *answer, const char *text);

/* ---- engine_ask.c ---- */

/* The run's file key, and room for `count` peers (owned by the caller: free() its `peers`). */
void engine_peers_open(const struct run *run, uint32_t count, struct wire_engine_peers *ret);
/* Another node where files may be read; this one is left out. */
void engine_peers_add(const struct run *run, struct wire_engine_peers *peers, const char *node,
                      const char *addr);

/* ---- engine_watch.c ---- */

/* Something was asked, or came. */
void engine_watch_begin(struct engine *engine);
void engine_watch_moved(struct engine *engine);
/* The pause of a stuck root is over. */
void engine_watch_try(struct engine *engine);
/* An answer came: it is not stuck, if it was. */
void engine_watch_answered(struct engine *engine);
/* "root PATH does not answer": for who asks meanwhile. View, until the next call. */
const char *engine_watch_text(const struct engine *engine);

#endif
