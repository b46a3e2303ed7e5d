/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A daemon and leader in one for the test of libbelay: one poll loop in the test's own thread,
 * driven by the test. It answers ranks, keeps their arenas, and does what the test says: opens a
 * generation, makes a plan of it, lets it run. Ranks are forked processes that run a small
 * "trainer" (rank_main) whose state after n steps is a function of n alone.
 */
#ifndef TESTS_WIRE_FAKE_DAEMON_H
#define TESTS_WIRE_FAKE_DAEMON_H

#include <stdatomic.h>
#include <sys/types.h>

#include "wire/sock.h"

#define FAKE_RANKS_MAX  16
#define FAKE_ARENAS_MAX 64
#define FAKE_ROWS       77u /* of the weight, which is cut into columns, as tensor parallelism does */
#define FAKE_COLUMNS    39u
#define FAKE_ELEMS      (FAKE_ROWS * FAKE_COLUMNS) /* of each of the two tensors */
#define FAKE_RUN        0x1234abcdull

struct fake_shared {                          /* with the ranks */
    _Atomic uint64_t limit[FAKE_RANKS_MAX];   /* rank i does not compute a step above it */
    _Atomic uint64_t voted[FAKE_RANKS_MAX];   /* newest step whose vote came back */
    _Atomic uint64_t vote_ns[FAKE_RANKS_MAX]; /* all votes together */
    _Atomic uint64_t votes[FAKE_RANKS_MAX];
    _Atomic uint64_t egen[FAKE_RANKS_MAX]; /* calls of belay_next */
    uint64_t steps;                        /* of the run */
};

struct fake_rank {
    pid_t pid;
    uint64_t incarnation;
    int index; /* in fake_shared */
    int dead;
    struct wire_sock sock;
    int said_hello;
    struct wire_rank_report report; /* the newest */
    struct wire_page *page;
    uint64_t sequence;
    int exit_status;
};

struct fake_arena {
    uint64_t id, owner;
    int fd;
    void *map;
    size_t bytes;
};

struct fake {
    char dir[64], path[96];
    int listener, bulk_listener;
    char bulk_addr[WIRE_ADDR_MAX];
    uint64_t node_incarnation;
    struct wire_sock fresh[FAKE_RANKS_MAX]; /* connections that have not said hello */
    struct wire_sock bulk[FAKE_RANKS_MAX];
    struct fake_rank ranks[FAKE_RANKS_MAX];
    uint32_t rank_count;
    struct fake_arena arenas[FAKE_ARENAS_MAX];
    uint32_t arena_count;
    struct fake_shared *shared;
    uint64_t generation;
    enum wire_phase phase;
    struct wire_plan plan;
    uint32_t request_flags;
    uint64_t request_id;
    uint64_t unpin_through;
    int leave;
    int copies_remote; /* plans say that the copies are on another node */
    int disk_only;     /* plans have no copies but a checkpoint */
    uint64_t disk_step;
    uint32_t disk_loads, copy_opens, bulk_reads, arena_makes;
    const char *fail; /* BELAY_FAIL of ranks started from now on; NULL none */
    int foreign;      /* ranks started from now on have another function id */
    int hang_ups;     /* so many questions are answered by closing the connection */
    int bulk_denials; /* so many bulk reads are told that the key is unknown */
    int refusals;     /* so many arenas are refused for want of memory */
    int early;        /* first directives come in one read with the hello; none is repeated */
};

void fake_open(struct fake *fake, uint64_t steps);
void fake_close(struct fake *fake); /* kills what is left; again is fine */
/* Forks a rank; its number in fake_shared. */
int fake_rank_start(struct fake *fake);
/* Runs the loop until `done` says so; fails the test after 20 s, naming `what`. */
void fake_until(struct fake *fake, int (*done)(struct fake *fake, uint64_t arg), uint64_t arg,
                const char *what);
/* Closes the listener and all connections, as a daemon that dies; and comes back as another. */
void fake_down(struct fake *fake);
void fake_up(struct fake *fake);
/* Calls a new generation. */
void fake_generation_open(struct fake *fake);
/* Waits for all live ranks to park and plans the newest complete step, or a fresh start. */
void fake_generation_plan(struct fake *fake);
/* The same, waits until all are ready and their digests add up, and says go. */
void fake_generation_run(struct fake *fake);
void fake_plan(struct fake *fake);
/* Sends everybody the present view. */
void fake_directive(struct fake *fake);
void fake_kill(struct fake *fake, int index);
/* Waits until the rank killed itself (a failpoint). */
void fake_died(struct fake *fake, int index);
int fake_all_exited(struct fake *fake, uint64_t unused);

/* Fills `out` with `count` elements of tensor `which` after `step`, from flat_lo on. */
void fake_state(float *out, int which, uint64_t step, uint64_t flat_lo, uint64_t count);
/* The digest of the whole state after `step`. */
struct bl_state_digest fake_state_digest(uint64_t step);

#define FAKE_FUNCTION_ID 77u

/* What a rank does; never returns. */
void fake_rank_main(struct fake_shared *shared, int index, uint64_t function_id)
    __attribute__((noreturn));

#endif
