/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside libbelay: three threads around one session.
 *
 *     main thread (the trainer's)   calls of belay.h; waits on `changed`
 *     control thread                poll loop: daemon, votes, timers, signs of life
 *     seal thread                   digests a finished slot
 *
 * `lock` guards the session and everything below the line "under lock". Whoever calls the session
 * drains its effects (lb_pump) before the lock is let go, so votes leave from the thread that
 * caused them, without a hop. Sockets are written under the lock and never waited for; only the
 * control thread reads and closes them.
 */
#ifndef WIRE_LIBBELAY_H
#define WIRE_LIBBELAY_H

#include <pthread.h>

#include "wire/belay.h"
#include "wire/session.h"
#include "wire/sock.h"

#define LB_ALIVE_MS          100   /* between two signs of life in the beat page */
#define LB_BACKOFF_MS        20    /* first pause between attempts to reach the daemon */
#define LB_BACKOFF_MAX_MS    1000  /* and the longest */
#define LB_JOIN_MS           20000 /* belay_join gives up: no daemon answers */
#define LB_HELLO_MS          10000 /* for a daemon that accepted to say hello */
#define LB_BULK_MS           20000 /* without any byte of a bulk read */
#define LB_BULK_BREAKS       2     /* of the connection, within one read */
#define LB_BULK_KEY_MS       3000  /* for a node that does not know our generation's key yet */
#define LB_BULK_PAUSE_MS     20    /* between two such questions */
#define LB_PEERS_MAX         64    /* vote connections: 9 neighbours each way, strangers */
#define LB_STRANGER_MS       5000  /* for a vote connection to say hello */
#define LB_SLOTS             3
#define LB_SLOT_OFFSET_ALIGN 64

struct lb_peer { /* one vote connection */
    struct wire_sock sock;
    uint64_t generation; /* 0: came in and has not said hello */
    uint32_t rank;
    int connecting;
    uint64_t since_ms;
};

struct lb_ask { /* a question to the daemon; lives on the asking thread's stack */
    uint64_t request;
    enum wire_type answer_type;
    void *answer; /* decoded here by the control thread */
    int fd;       /* that came with it, or -1 */
    int done, lost;
    int rc;
    struct bl_errmsg *msg;
};

struct lb_arena {
    uint64_t id;
    int fd;
    void *map; /* NULL: none */
    size_t bytes;
    struct bl_extent_list list; /* owned */
};

struct lb_wanted { /* an extent named by belay_tensor */
    void *ptr;     /* the trainer's, or NULL */
};

struct belay {
    /* ---- set by belay_join, constant afterwards ---- */
    char socket_path[108];
    char job_name[64];
    uint64_t run, incarnation;
    uint32_t slot_count, lanes, load_deadline_ms;
    char *job_json; /* owned */
    int event_fd, wake_fd, listen_fd;
    struct wire_page *page;
    int page_shared; /* the shim's: stays mapped for ever */
    pthread_t control, sealer;
    int threads; /* how many of the two run */

    /* ---- main thread only ---- */
    struct bl_errmsg error;
    struct wire_plan plan;    /* owned copy behind the trainer's views */
    struct belay_peer *peers; /* owned */
    uint32_t rank;
    struct bl_extent_list wanted; /* owned: the layout being named */
    struct lb_wanted *wanted_at;  /* owned; one per extent */
    uint64_t wanted_bytes;
    int wanted_new;        /* the next belay_tensor begins a new list */
    struct lb_arena arena; /* the present one */
    int arena_dirty;       /* somebody else may still write there: do not use it again */
    int loaded;            /* belay_load is done in this generation */
    uint64_t writing_step; /* slot between begin and seal */
    int writing_index;     /* -1 none */

    /* ---- under lock ---- */
    pthread_mutex_t lock;
    pthread_cond_t changed, seal_wanted;
    struct wire_session *session;
    struct wire_sock daemon;
    char node[WIRE_NODE_MAX];
    int link_up, link_broken;
    uint64_t link_at_ms; /* next attempt */
    uint32_t backoff_ms;
    uint64_t request; /* of the newest question */
    struct lb_ask *ask;
    struct lb_peer *vote_peers[LB_PEERS_MAX]; /* owned; only the control thread removes */
    uint32_t vote_peer_count;
    int planned, go, leave, stopped, refused;
    int over;   /* this generation is over for the main thread */
    int ending; /* the last step was voted: connections may break */
    int quit;
    uint64_t vote_step; /* newest unanimous one */
    uint32_t vote_flags;
    int seal_pending;
    uint64_t seal_step;
    const void *seal_base;
    struct bl_state_digest seal_digest; /* of the newest sealed slot */
    int seal_rc;
};

/* ---- libbelay.c ---- */
uint64_t lb_now_ms(void);
/* Why the main thread must not go on (BL_ESTOPPED, BL_ECONFIG, BL_EGEN), or 0. Under lock. */
int lb_over(const struct belay *b);
/* Waits for `changed`, at most until `deadline_ms` (UINT64_MAX: for ever). Under lock. */
void lb_wait(struct belay *b, uint64_t deadline_ms);
/* Waits until no seal is under way. Under lock. */
void lb_wait_seal(struct belay *b);

/* ---- libbelay_control.c ---- */
/* Drains the session's effects. Under lock. */
void lb_pump(struct belay *b);
/* This generation failed here: reports it and makes the main thread's calls return. Under lock. */
void lb_fail(struct belay *b, int code, const char *text);
void lb_wake(struct belay *b);
void *lb_control_main(void *arg);

/* ---- libbelay_link.c ---- */
/* Connects and says hello, waiting; fills run, job, lanes. For belay_join. */
BL_MUST_CHECK int lb_link_join(struct belay *b, struct bl_errmsg *msg);
/* Keeps the connection: reconnects when due, reads, handles frames. Under lock. Returns when it
 * wants to be called again (ms). */
uint64_t lb_link_tick(struct belay *b, uint64_t now_ms, short revents);
/* Sends the session's report, when the connection stands. Under lock. */
void lb_link_report(struct belay *b);
/* Gives back an arena of this rank's that holds nothing. Under lock. */
void lb_link_drop(struct belay *b, uint64_t arena);
/* Asks and waits; asks again when the daemon restarts meanwhile. *fd (may be NULL) gets the
 * descriptor that an answer with rc 0 brings. Errors: BL_EGEN, BL_ESTOPPED, BL_EDEADLINE, the
 * answer's rc with its text. `question` begins with uint64_t request. Takes the lock itself. */
BL_MUST_CHECK int lb_link_ask(struct belay *b, enum wire_type type, void *question,
                              enum wire_type answer_type, void *answer, int *fd,
                              struct bl_errmsg *msg);

/* ---- libbelay_votes.c ---- */
/* All under lock. */
void lb_votes_send(struct belay *b, uint32_t to, const struct wire_vote *vote);
void lb_votes_accept(struct belay *b, uint64_t now_ms);
/* Reads connection `index`; it may be gone afterwards. */
void lb_votes_read(struct belay *b, uint32_t index, short revents);
/* Closes connections of other generations and silent strangers. */
void lb_votes_tidy(struct belay *b, uint64_t now_ms);
void lb_votes_close(struct belay *b);

/* ---- libbelay_seal.c ---- */
void *lb_seal_main(void *arg);

/* ---- libbelay_load.c, libbelay_source.c ---- */
void lb_arena_close(struct lb_arena *arena);

struct lb_bulk {           /* the connection to a node's bulk port; all its sources share it */
    const char *addr;      /* view of the plan */
    struct wire_sock sock; /* fd -1: not connected (any more) */
};

struct lb_source {                /* a sealed slot of (line, step) that somebody holds */
    const struct wire_copy *copy; /* view of the plan */
    struct bl_extent_list list;   /* owned */
    void *map;                    /* whole arena, or NULL for a remote one */
    size_t bytes;
    int owned_map;
    uint64_t slot_offset; /* of the slot in the arena */
    struct lb_bulk *bulk; /* of a remote one */
};

struct lb_sources {
    struct lb_source *items; /* owned; room for all copies of the plan */
    uint32_t count;
    struct lb_bulk *bulks; /* owned; the same room */
    uint32_t bulk_count;
};

/* Opens the plan's copies: those in this node's memory (remote 0) or elsewhere (remote 1, at most
 * `max` more). A copy that cannot be read is passed over. */
BL_MUST_CHECK int lb_sources_open(struct belay *b, struct lb_sources *sources, int remote,
                                  struct bl_errmsg *msg);
void lb_sources_close(struct lb_sources *sources);
/* Copies one run to dst + run->dst_offset. */
BL_MUST_CHECK int lb_source_copy(struct belay *b, struct lb_source *source,
                                 const struct bl_run *run, void *dst, struct bl_errmsg *msg);

#endif
