/* SPDX-License-Identifier: Apache-2.0 */
/*
 * belay-engine from inside. The main thread owns the socket to the daemon; three workers do what
 * can take long, so that a load never waits behind a save, and nothing waits behind verification:
 *
 *     socket -> main -> writer: write, commit, cancel             nice 10
 *                  \--> reader: scan, load                        a recovery waits for it
 *                       writer -> verifier: sweep, read back,     nice 19, idle disk;
 *                                 retain                          stands still while a save runs
 *     socket <- main <- answers (a list under a lock, an eventfd wakes the main thread)
 *
 * Started as `belay-engine --fd N`, N being one end of a socket pair. It says hello first, answers
 * each question once, and leaves when the other end closes.
 *
 * The JSON that goes through the daemon unread:
 *
 *     part_json      {"name":"part-0003","node":"n3","bytes":123,"index":"0123456789abcdef",
 *                    "codec":"none","unchanged":["tensor",...]}
 *                    unchanged: tensors that hold the bytes of the save before; may be missing
 *     manifest_json  what the parts do not say; each member may be missing, others are passed over:
 *                    {"job":{the frozen job},"layout":{"world":4,"dp":4,"tp":1,"pp":1,"zero":1},
 *                    "lanes":4,"seed":"7","samples":9600,"metrics":{"loss":2.5,"tokens":1228800},
 *                    "function":"16 hex digits","state_digest":"32 hex digits"}
 *                    What is missing is taken from the job where it says it.
 */
#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "ckpt/ckpt.h"
#include "ckpt/ckpt_io.h"
#include "engine/budget.h"
#include "engine/watch.h"
#include "wire/codec.h"

#define ENGINE_QUEUE_MAX  64u   /* questions waiting in one lane; more is a broken daemon */
#define ENGINE_ARENAS_MAX 4096u /* of one write; more is a broken daemon */
/* How long the engine lets its workers finish after the daemon has gone; then it leaves as it is:
 * nothing half-written counts. */
#define ENGINE_LEAVE_MS 5000u
/* How long a load waits for another rank's question about the same checkpoint, after each. They
 * come together, when the plan does; later ones are a load of their own. */
#define ENGINE_GATHER_MS 20u

struct engine_arena { /* of a write, with the descriptor that came for it */
    struct wire_engine_arena arena;
    int fd; /* owned by the task */
};

struct engine_task { /* a question */
    enum wire_type type;
    void *message; /* owned: struct of the type */
    int fds[WIRE_FDS_MAX];
    uint32_t fd_count;           /* owned; a write's are in its arenas */
    struct engine_arena *arenas; /* owned; all of a write, of earlier frames too */
    uint32_t arena_count;
    atomic_int cancel; /* set by the main thread; relaxed order is enough for a flag */
    struct engine_task *next;
};

struct engine_answer {
    enum wire_type type;
    void *message; /* owned: struct of the type */
    struct engine_answer *next;
};

struct engine;

struct engine_lane { /* a worker and its queue */
    struct engine *engine;
    pthread_t thread;
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t wake;
    struct engine_task *first, *last; /* waiting */
    struct engine_task *current;      /* being worked on */
    uint32_t count;
    bool stop;
    bool done; /* the thread has left */
};

struct engine_verifier;

struct engine {
    uint64_t memory_bytes; /* see budget.h; set before the start, then only read */
    struct engine_lane writer, reader;
    struct engine_verifier *verifier;
    struct engine_watch watch; /* the writer's */
    pthread_mutex_t lock;      /* guards the answers */
    struct engine_answer *first, *last;
    int wake_fd; /* eventfd */
};

/* ---- work.c: any thread unless said otherwise ---- */

/* `engine` is zeroed but for its memory_bytes. */
BL_MUST_CHECK int engine_start(struct engine *engine, struct bl_errmsg *msg);
/* Main thread. Cancels all, waits at most ENGINE_LEAVE_MS; false: a worker hangs. */
bool engine_stop(struct engine *engine);
/* Main thread. Takes the task, whatever it returns. BL_ELIMIT when the lane is full. */
BL_MUST_CHECK int engine_submit(struct engine *engine, struct engine_task *task);
/* Main thread. Sets the cancel flag of the write of this attempt, waiting or running. */
void engine_cancel(struct engine *engine, uint64_t attempt);
void engine_task_free(struct engine_task *task);
/* Queues an answer; the message's owned members go with it (it is copied flat). */
void engine_answer(struct engine *engine, enum wire_type type, const void *message);
/* The text of an answer: "" for rc 0, what `why` says, or else the code's sentence. */
void engine_text(char ret[WIRE_REASON_MAX], int rc, const struct bl_errmsg *why);
/* Main thread. The oldest answer, the caller's, or NULL. */
struct engine_answer *engine_answer_take(struct engine *engine);
void engine_answer_free(struct engine_answer *answer);

/* The text behind "root/" where it begins with that; view of `text`. */
const char *engine_text_without(const char *text, const char *root);
/* The reader's worker. Loads from the same checkpoint as `task`, taken out of the queue, chained by
 * `next` and the caller's; waits a moment for more of them. */
struct engine_task *engine_loads_take(struct engine *engine, const struct engine_task *task);

/* ---- question.c: main thread ---- */

/* Descriptors that came ahead of their write. */
struct engine_collected {
    uint64_t attempt;
    struct engine_arena *arenas; /* owned */
    uint32_t count;
};
void engine_collected_close(struct engine_collected *collected);
/* Turns a frame into a task and queues it, or collects what it brings. */
struct wire_sock;
BL_MUST_CHECK int engine_question(struct engine *engine, struct engine_collected *collected,
                                  struct wire_sock *sock, const struct wire_frame *frame,
                                  struct bl_errmsg *msg);

/* ---- save.c, commit.c, fetch.c, fill.c: workers ---- */

void engine_write(struct engine *engine, struct engine_task *task);
void engine_commit(struct engine *engine, struct engine_task *task);
void engine_cancelled(struct engine *engine, struct engine_task *task);
void engine_scan(struct engine *engine, struct engine_task *task);
void engine_load(struct engine *engine, struct engine_task *task);
/* Opens the root that a message names. *ret is owned. */
BL_MUST_CHECK int engine_root_open(struct ckpt_store **ret, const struct wire_engine_root *root,
                                   struct bl_errmsg *msg);
/* The same over `io`, which lives as long as the store. */
BL_MUST_CHECK int engine_root_open_io(struct ckpt_store **ret, struct ckpt_io *io,
                                      const struct wire_engine_root *root, struct bl_errmsg *msg);
/* The same at the root's pace: `io` is the caller's and lives as long as the store; a wait ends
 * soon after *cancel is set. */
BL_MUST_CHECK int engine_root_open_paced(struct ckpt_store **ret, struct ckpt_io *io,
                                         const struct wire_engine_root *root,
                                         const atomic_int *cancel, struct bl_errmsg *msg);
struct ckpt_attempt engine_attempt_of(const struct wire_engine_attempt *attempt);

/* ---- arenas.c: the writer ---- */

struct engine_mapped {                  /* the ranks' arenas of one write, mapped */
    struct engine_mapped_arena *arenas; /* owned */
    struct ckpt_source *bases;          /* owned: all of each arena's slot */
    uint32_t count;
    struct engine_pick *pick;          /* owned, or NULL: all is written */
    struct ckpt_source picked;         /* with pick: pulls what was picked */
    const struct ckpt_source *sources; /* what is written: bases, or &picked */
    uint32_t source_count;
    bool repeats;                  /* some extent lies in two arenas; it is written once */
    struct bl_state_digest expect; /* of all slots; of what is written without pick and repeats */
};

/* Maps the arenas of the write and checks that their slots are sealed with its line and step.
 * engine_mapped_close in any case. */
BL_MUST_CHECK int engine_mapped_open(struct engine_mapped *ret, const struct engine_task *task,
                                     struct bl_errmsg *msg);
/* Are they still what they were? BL_ENOSTATE when not. */
BL_MUST_CHECK int engine_mapped_recheck(const struct engine_mapped *mapped,
                                        const struct engine_task *task, struct bl_errmsg *msg);
void engine_mapped_close(struct engine_mapped *mapped);

/* ---- verify.c ---- */

BL_MUST_CHECK int engine_verifier_start(struct engine *engine, struct bl_errmsg *msg);
/* Main thread: asks it to leave; has it left? Then joins and frees it. */
void engine_verifier_stop(struct engine_verifier *verifier);
bool engine_verifier_is_done(struct engine_verifier *verifier);
void engine_verifier_join(struct engine_verifier *verifier);
/* Any thread: a save was asked for (+1), or is answered (-1). It stands still meanwhile. */
void engine_verifier_saves(struct engine_verifier *verifier, int change);
/* Writer: what follows this commit, whose checkpoint is `dir`. Copies what it needs. */
void engine_verifier_push(struct engine_verifier *verifier,
                          const struct wire_engine_commit *message, const char *dir,
                          uint64_t manifest_digest);

/* ---- describe.c ---- */

/* The JSON of a part that was written with `codec` ("" is none; auto counts as what it stores);
 * owned, NULL when out of memory. */
char *engine_part_json(const struct ckpt_part_result *part, const char *node, const char *codec,
                       const struct engine_watch *watch);
/* What else a part says for its manifest. */
struct engine_part_said {
    char codec[CKPT_CODEC_MAX];
    struct engine_names *unchanged; /* added to: tensors that did not change in it */
};
BL_MUST_CHECK int engine_part_parse(struct ckpt_part *ret, struct engine_part_said *said,
                                    const char *json, struct bl_errmsg *msg);
/* Fills what manifest_json says; the caller has set run, generation, line, step. */
BL_MUST_CHECK int engine_manifest_fill(struct ckpt_manifest *manifest, const char *json,
                                       struct bl_errmsg *msg);

#endif
