/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulator: daemons (a member each, the leader on the head), ranks (a real session each),
 * memory, a disk, a store and a network, all in one thread and in virtual time. Everything that
 * happens is drawn from one seed; the same seed gives the same run, event for event.
 *
 *      rank: session <--- votes ---> session :rank          machine crash: ranks, arenas, daemon
 * gone |   arena (slots with values)                      daemon crash: ranks and arenas stay v
 * store: loses what was not acknowledged node: member  <--- messages lost, late, twice --->  leader
 * + store + disk
 *
 * The state of step n is known: sim_truth(n) is a pure function. Each element of it is computed
 * from the former step's slot, so that one wrong copy shows for ever. The checks (sim_check.c) are
 * the rules of recovery, looked at whenever something that they speak of happens.
 */
#ifndef TESTS_SIM_H
#define TESTS_SIM_H

#include <stdarg.h>
#include <stdint.h>

#include "daemon/core/leader.h"
#include "daemon/core/member.h"
#include "wire/belay.h"
#include "wire/session.h"

#define SIM_NODES_MAX 8
#define SIM_ELEMS_MAX 64
#define SIM_STEPS_MAX 128
#define SIM_ROOTS_MAX 3
#define SIM_SLOTS     (2 + SIM_ROOTS_MAX) /* two that rotate, one for each root */
#define SIM_STUCK_MS  400                 /* a root that hangs is told stuck after */
#define SIM_RUN       0x5eedull

struct sim;
struct sim_event;
typedef void (*sim_fn)(struct sim *sim, struct sim_event *event);

struct sim_event {
    uint64_t time, order;
    sim_fn fn;
    uint64_t a, b, c;
    void *payload;
    void (*drop)(void *payload); /* frees it; NULL: nothing to free */
};

struct sim_arena {
    uint64_t id, incarnation;
    uint32_t node;
    struct wire_slot_header slots[SIM_SLOTS];
    struct bl_extent_list extents;
    uint64_t *data[SIM_SLOTS];
    uint32_t elems;
    uint64_t checked[SIM_SLOTS]; /* header checksum for which the content was found right */
};

enum sim_main { /* where a rank's main thread is */
                SIM_INIT,
                SIM_WAIT, /* for a plan */
                SIM_LOAD,
                SIM_CONNECT,
                SIM_READY,
                SIM_COMPUTE,
                SIM_RECEIVE, /* waits for what another pipeline stage sends */
                SIM_COLLECTIVE,
                SIM_VOTE,
                SIM_APPLY,
                SIM_PARK,
                SIM_LEAVE
};

struct sim_rank {
    uint64_t incarnation;
    uint32_t node, index;
    uint32_t alive, stopped, hung, shim; /* stopped: whole process; hung: main thread only */
    uint64_t stopped_ms;
    struct wire_session *session;
    struct sim_arena *arena;
    enum sim_main at;
    uint64_t token; /* of the main thread's present course */
    uint64_t step;  /* being worked on */
    uint32_t pass;  /* of the step's, with pipelines: forwards, then backwards */
    uint32_t want_park, want_leave;
    int prev_slot, next_slot; /* of step - 1 and step */
    uint32_t sealing;         /* the seal thread is at work */
    uint64_t sealing_step;
    int sealing_slot;
    uint32_t result; /* flags of the newest vote */
    uint64_t generation, collective, progress_ms;
    uint32_t waiting, section;
    struct wire_exit status;
    uint64_t last_step_flags;
};

struct sim_node {
    char name[WIRE_NODE_MAX];
    uint32_t index, up, ranks_max;
    uint64_t crashed_ms; /* when the machine last lost its memory */
    struct core_member *member;
    uint64_t incarnation;
    uint64_t connection; /* to the head; 0 none */
    uint64_t linked_ms;  /* since when */
    uint64_t tick_token;
    struct sim_arena **arenas;
    uint32_t arena_count;
};

struct sim_leader {
    struct core_leader *core;
    uint32_t node, in_use;
    uint64_t epoch, incarnation, id;
};

struct sim_store {
    struct wire_record record;
    uint64_t version, epoch;
    uint64_t running_generation; /* newest that was ever durable as RUNNING */
};

struct sim_checkpoint {
    struct core_checkpoint info;
    uint32_t node; /* whose root it is, where each node has its own */
    uint64_t values[SIM_ELEMS_MAX];
};

struct sim_attempt {
    uint64_t id, step;
    uint32_t worded; /* COMMITTING was durable for it */
    uint64_t values[SIM_ELEMS_MAX];
    uint8_t has[SIM_ELEMS_MAX];
};

struct sim_own { /* what one node has of an attempt in its own root */
    uint32_t node;
    uint64_t attempt, manifest; /* 0: none yet */
    uint32_t is_written, is_final, is_verified;
    uint64_t values[SIM_ELEMS_MAX];
    uint8_t has[SIM_ELEMS_MAX];
};

struct sim_manifest { /* of a checkpoint that lies on several nodes */
    uint64_t digest, attempt;
    struct core_checkpoint info;
    uint32_t part_count, is_committed;
    uint32_t nodes[SIM_NODES_MAX]; /* of the parts */
};

struct sim_generation { /* what the world knows of a generation, for barriers and checks */
    uint64_t generation, step, print;
    uint32_t world, fresh, tp, pp;
    uint32_t leaders;    /* that had begun by then */
    uint64_t passes[64]; /* done since the generation began, over all steps */
    uint64_t incarnations[64];
    uint32_t nodes[64];
    uint64_t entered[64], voted[64], sealed[64], connected[64];
    uint64_t begun_max, started_ms;
    uint32_t over;      /* a later generation runs */
    uint64_t voted_max; /* newest step that anyone had voted for by then */
};

struct sim_profile { /* chances in 1/1000 unless said */
    uint32_t ranks, nodes, steps, elems, head_ranks;
    uint32_t tp, pp;    /* of a hybrid; else 1 */
    uint32_t is_hybrid; /* state is cut into boxes and stages */
    uint32_t same;      /* replicas hold the same (ZeRO 0) */
    uint32_t only_hangs;
    uint32_t is_tight; /* no room for what a lost node had */
    uint32_t loss, repeat, late;
    uint32_t late_ms;   /* at most */
    uint32_t vote_late; /* votes on top of that, up to two seconds */
    uint32_t faults;    /* how many */
    uint32_t kinds;     /* bits of enum sim_fault */
    uint32_t engine_fail;
    uint32_t slow; /* factor of a step's time */
    uint32_t stop_resume;
    uint32_t roots, every[SIM_ROOTS_MAX];
    uint32_t apart;                    /* each node has root 0 for itself */
    uint32_t root_slow[SIM_ROOTS_MAX]; /* factor of a write's time */
    uint64_t fault_ms;                 /* they come before */
};

enum sim_fault {
    SIM_KILL = 1 << 0,
    SIM_STOP = 1 << 1,
    SIM_HANG = 1 << 2,
    SIM_DAEMON = 1 << 3,
    SIM_MACHINE = 1 << 4,
    SIM_PARTITION = 1 << 5,
    SIM_HEAD = 1 << 6,
    SIM_PROMOTE = 1 << 7,
    SIM_KILL_TWO = 1 << 8,
    SIM_SAVE = 1 << 9,
    SIM_AIM = 1 << 10,  /* a kill at a chosen point */
    SIM_ROOT = 1 << 11, /* a root hangs for a while, or loses all that it has */
    SIM_ALL = (1 << 12) - 1
};
#define SIM_FAULTS 12

enum sim_point { /* where an aimed kill hits */
                 SIM_AT_NONE = 0,
                 SIM_AT_VOTED,     /* unanimous, not yet applied */
                 SIM_AT_MID_APPLY, /* half of the slot is written */
                 SIM_AT_UNSEALED,  /* written, not yet published */
                 SIM_AT_SEALED,    /* published, not yet told */
                 SIM_AT_MID_LOAD,
                 SIM_AT_CONNECT,
                 SIM_AT_READY,
                 SIM_AT_PARKED,
                 SIM_AT_LEAVE,
                 SIM_POINTS
};

struct sim {
    uint64_t seed, random, now, order;
    uint64_t delay_next; /* of the next message, on top */
    uint32_t rules_off, verbose;
    uint32_t only_hybrids; /* whose nodes go for long */
    struct sim_profile profile;
    struct sim_event *heap;
    size_t heap_count, heap_capacity;
    struct sim_node nodes[SIM_NODES_MAX];
    uint32_t cut[SIM_NODES_MAX]; /* partition: nodes of different groups do not hear each other */
    struct sim_rank **ranks;
    uint32_t rank_count;
    uint64_t crash_step; /* at which ranks crashed by themselves last, and how often */
    uint32_t crashes;
    struct sim_leader leaders[16];
    uint32_t leader_count, leaders_begun;
    uint32_t head; /* node where members look for the leader */
    struct sim_store store;
    struct sim_checkpoint *disk;
    uint32_t disk_count;
    uint64_t hang_from[SIM_ROOTS_MAX], hang_until[SIM_ROOTS_MAX];
    struct sim_attempt *attempts;
    uint32_t attempt_count;
    struct sim_own *owns;
    uint32_t own_count;
    struct sim_manifest *manifests;
    uint32_t manifest_count;
    struct sim_generation *generations;
    uint32_t generation_count;
    uint64_t *truth; /* [SIM_STEPS_MAX][SIM_ELEMS_MAX] */
    uint32_t truth_steps;
    uint32_t finished;
    enum wire_verdict verdict;
    uint32_t resumed;
    uint64_t resumed_version; /* of the store when the run was resumed */
    uint64_t faults_over_ms, events, connections;
    uint32_t ranks_wanted;
    uint32_t aim, aim_left; /* enum sim_point; hits at the last of so many passings */
    int failed;
    char why[512];
    uint64_t *log_hash; /* for the determinism test; NULL none */
    uint64_t recoveries, steps_lost, commits;
};

/* sim_world.c: time, chance, network */
uint64_t sim_random(struct sim *sim);
uint64_t sim_below(struct sim *sim, uint64_t bound);
int sim_chance(struct sim *sim, uint32_t per_mille);
void sim_later(struct sim *sim, uint64_t delay, sim_fn fn, uint64_t a, uint64_t b);
/* The same with a payload, which is taken. */
void sim_later_with(struct sim *sim, uint64_t delay, sim_fn fn, uint64_t a, uint64_t b, uint64_t c,
                    void *payload, void (*drop)(void *));
/* A message: it may be lost, late or come twice. `copy` makes the second payload (NULL: never
 * twice). Takes the payload. from and to are nodes. */
void sim_send(struct sim *sim, uint32_t from, uint32_t to, sim_fn fn, uint64_t a, uint64_t b,
              uint64_t c, void *payload, void *(*copy)(const void *), void (*drop)(void *));
int sim_can_hear(const struct sim *sim, uint32_t a, uint32_t b);
void sim_trace(struct sim *sim, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void sim_fail(struct sim *sim, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void *sim_alloc(size_t count, size_t size);
/* Runs one seed. 0, or -1 with sim->why. */
int sim_run(struct sim *sim);
void sim_close(struct sim *sim);
void sim_profile_draw(struct sim *sim, uint32_t ranks, uint32_t nodes);

/* sim_rank.c */
struct sim_rank *sim_rank_start(struct sim *sim, uint32_t node, uint64_t incarnation);
void sim_rank_die(struct sim *sim, struct sim_rank *rank, int code, int signal, int by_us);
void sim_rank_drain(struct sim *sim, struct sim_rank *rank);
struct sim_rank *sim_rank_find(struct sim *sim, uint64_t incarnation);
void sim_rank_free(struct sim_rank *rank);
void sim_barriers(struct sim *sim);
void sim_rank_park(struct sim *sim, struct sim_rank *rank);
void sim_rank_compute(struct sim *sim, struct sim_rank *rank);
void sim_rank_leave(struct sim *sim, struct sim_rank *rank);
/* Schedules the main thread's next action; void when its course changes. */
void sim_main_later(struct sim *sim, struct sim_rank *rank, uint64_t delay, sim_fn fn);
struct sim_rank *sim_main_of(struct sim *sim, struct sim_event *event);
void sim_comm_error(struct sim *sim, struct sim_rank *rank, const char *text);

int sim_rank_in(const struct sim_generation *g, const struct sim_rank *rank);
void sim_rank_progress(struct sim *sim, struct sim_rank *rank, uint32_t section, uint32_t waiting);
/* Is a peer of the generation known to be gone? Then a communication error is on its way. */
int sim_peers_gone(struct sim *sim, struct sim_rank *rank, const struct sim_generation *g);
/* All passes of the step are done: into the collective. */
void sim_rank_enter(struct sim *sim, struct sim_rank *rank);

/* sim_pipe.c: passes of a step through pipeline stages */
void sim_pipe_begin(struct sim *sim, struct sim_rank *rank);
/* Wakes whoever of the generation has got what it waited for. */
void sim_pipe_wake(struct sim *sim, const struct sim_generation *g);
/* Extents of a rank of a hybrid. */
void sim_hybrid_extents(struct sim *sim, struct bl_extent_list *list, uint32_t rank,
                        const struct wire_plan *plan);
void sim_hybrid_draw(struct sim *sim);

/* sim_load.c */
void sim_rank_load(struct sim *sim, struct sim_rank *rank);
void sim_seal_start(struct sim *sim, struct sim_rank *rank, uint64_t step, int slot);

/* sim_node.c */
void sim_daemon_start(struct sim *sim, struct sim_node *node);
void sim_daemon_crash(struct sim *sim, struct sim_node *node);
void sim_machine_crash(struct sim *sim, struct sim_node *node);
void sim_member_drain(struct sim *sim, struct sim_node *node);
void sim_links(struct sim *sim);
void sim_on_rank_report(struct sim *sim, struct sim_event *event);
void sim_on_rank_exit(struct sim *sim, struct sim_event *event);
struct sim_arena *sim_arena_make(struct sim *sim, struct sim_node *node, uint64_t incarnation,
                                 uint32_t rank, const struct wire_plan *plan);
struct sim_arena *sim_arena_find(struct sim *sim, uint64_t id);
void sim_arena_free(struct sim_arena *arena);
void sim_arenas_tell(struct sim *sim, struct sim_node *node);

/* sim_head.c: leader, store, disk */
void sim_leader_start(struct sim *sim, uint32_t node, uint64_t epoch);
void sim_leader_stop(struct sim *sim, struct sim_leader *leader);
struct sim_leader *sim_leader_at(struct sim *sim, uint32_t node);
void sim_leader_drain(struct sim *sim, struct sim_leader *leader);
void sim_on_report(struct sim *sim, struct sim_event *event);
void sim_disk_load(struct sim *sim, const struct wire_plan *plan, struct sim_arena *arena,
                   uint32_t slot, int *ret_rc);
int sim_root_hangs(const struct sim *sim, uint32_t root);
/* The root is wiped, unless it is the only one with a checkpoint. */
void sim_root_lose(struct sim *sim, uint32_t root);
void sim_engine_write(struct sim *sim, struct sim_node *node, uint64_t attempt);

/* sim_apart.c: roots that each node has for itself */
int sim_is_apart(const struct sim *sim, uint32_t root);
/* A record is durable. */
void sim_apart_stored(struct sim *sim, const struct wire_record *record);
void sim_apart_element(struct sim *sim, uint32_t node, uint64_t attempt, uint32_t elem,
                       uint64_t value);
void sim_apart_written(struct sim *sim, uint32_t node, uint64_t attempt);
int sim_apart_compose(struct sim *sim, uint32_t head, const struct core_commit *commit,
                      uint64_t *ret_digest);
/* PREPARE, PUBLISH, RETAIN, CANCEL and SCAN. */
void sim_apart_effect(struct sim *sim, struct sim_node *node, const struct core_member_effect *e);
int sim_apart_load(struct sim *sim, uint32_t at, const char *dir, uint32_t elem, uint64_t *ret);
int sim_apart_can_read(const struct sim *sim, uint32_t at, uint32_t of);
/* Checkpoints on roots that all nodes see. */
uint32_t sim_disk_shared(const struct sim *sim);
void sim_apart_wipe(struct sim *sim, uint32_t node);
void sim_apart_check_end(struct sim *sim);

/* sim_fault.c */
/* 1: the rank was killed here. */
int sim_aimed(struct sim *sim, struct sim_rank *rank, enum sim_point point);
void sim_faults_draw(struct sim *sim);

/* sim_check.c */
uint64_t sim_value(struct sim *sim, uint64_t step, uint32_t elem);
uint64_t sim_next_value(uint64_t value, uint64_t step, uint32_t elem);
struct sim_generation *sim_generation_of(struct sim *sim, uint64_t generation);
/* The plan was handed to a rank: it must be durable and the only one of its generation. */
void sim_check_plan(struct sim *sim, const struct wire_plan *plan);
void sim_check_go(struct sim *sim, uint64_t generation);
/* The leader names a rank that hangs. */
void sim_check_hung(struct sim *sim, const struct core_event *event);
void sim_check_unanimous(struct sim *sim, uint64_t generation, uint64_t step);
void sim_check_begin(struct sim *sim, const struct sim_rank *rank, uint64_t generation,
                     uint64_t step);
void sim_check_parked(struct sim *sim, const struct sim_rank *rank);
void sim_check_arena(struct sim *sim, struct sim_arena *arena);
void sim_check_running(struct sim *sim, const struct wire_record *was,
                       const struct wire_record *is);
void sim_check_commit(struct sim *sim, const struct core_commit *commit,
                      const struct sim_attempt *attempt, uint64_t epoch);
void sim_check_source(struct sim *sim, const struct wire_copy *copy, uint64_t generation);
void sim_check_end(struct sim *sim);
/* Logical index of the e-th element of an arena. */
uint32_t sim_arena_elem(const struct sim_arena *arena, uint32_t e);

#endif
