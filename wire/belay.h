/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libbelay: the small C ABI by which a trainer joins a run that belayd supervises.
 *
 * The life of a rank:
 *
 *     belay_join            connect, wait for the first generation
 *     loop over generations:
 *         belay_tensor ...  say which extents this rank owns under the plan's world and rank
 *         belay_load        fill them as the plan says (plan.fresh: the trainer fills step 0)
 *         build communicators to plan.peers (deadline: plan.load_deadline_ms)
 *         belay_ready       report, wait for go
 *         loop over steps:
 *             belay_beat, compute, reduce
 *             belay_vote    unanimous; carries requests
 *             belay_slot_begin -> write state n+1 -> belay_slot_seal
 *         any call may return BELAY_EGEN, and belay_event_fd turns readable: abort
 *         communication, then belay_next (parks, reports the inventory, waits for the next plan)
 *     belay_leave           waits until the daemon says that the run is done with this rank
 *
 * Structs begin with size and version and only ever grow; the caller sets `size` to sizeof. There
 * are no callbacks. Errors are negative: -errno, or the codes below. belay_error() has the text.
 * Calls belong to one thread (the rank's main thread) unless said otherwise. Control traffic
 * reconnects by itself when the daemon restarts; ranks train on meanwhile.
 */
#ifndef BELAY_H
#define BELAY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BELAY_API         __attribute__((visibility("default")))
#define BELAY_VERSION_ABI 1

#define BELAY_EGEN (-5000) /* a new generation was called: park and call belay_next */
#define BELAY_EREFUSED                                                                             \
    (-5009) /* the daemon refuses this process; the text says why; do not retry */
#define BELAY_ESTOPPED (-5016) /* the run is over: call belay_leave */

enum belay_section {
    BELAY_SECTION_INIT = 0, /* before the first generation */
    BELAY_SECTION_LOAD = 1, /* loading state, building communicators */
    BELAY_SECTION_STEP = 2,
    BELAY_SECTION_SAVE = 3, /* inside the trainer's own saving, if it does any */
    BELAY_SECTION_EVAL = 4,
    BELAY_SECTION_LEAVE = 5
};

/* Flags of a vote. A vote's result is the OR of all ranks' flags; all act after the same step. */
#define BELAY_VOTE_SAVE  0x1u  /* pin the slot of this step and save it */
#define BELAY_VOTE_STOP  0x2u  /* this step is the last: seal it, then belay_leave */
#define BELAY_VOTE_GROW  0x4u  /* this step is followed by a new generation that takes in ranks */
#define BELAY_VOTE_BUSY  0x8u  /* set by libbelay: no slot can be pinned, so SAVE is skipped */
#define BELAY_VOTE_FINAL 0x10u /* set by the trainer at its last step: as STOP, and all is done */

struct belay_config {
    uint32_t size, version;
    uint64_t function_id; /* digest of everything that the arithmetic depends on */
    uint64_t probe;       /* digest of the numeric probe on this machine */
    const char *endpoint; /* published to the peers as is: where this rank's communicator listens;
                             at most 255 bytes */
    uint32_t slot_count;  /* snapshot slots; 0: three */
};

struct belay_peer {
    const char *endpoint; /* as its belay_config said; view of libbelay's, until belay_next */
    const char *node;     /* ranks with equal node names share memory */
    uint64_t incarnation;
};

struct belay_plan {
    uint32_t size, version;
    uint64_t run; /* id of the run */
    uint64_t generation;
    uint64_t line;        /* the history that this generation continues */
    uint64_t step;        /* the consistent step to continue from; 0 with fresh */
    uint32_t fresh;       /* nothing exists yet: the trainer initialises step 0 */
    uint32_t rank, world; /* of this process in this generation */
    uint32_t lanes;       /* of the job */
    uint32_t load_deadline_ms;
    uint64_t comm_key[2]; /* secret of this generation, for the trainer's own connections */
    const struct belay_peer *peers; /* world entries; view, valid until the next belay_next */
    const char *job_json;           /* the frozen job; view, valid until belay_leave */
    uint64_t save_every; /* steps between saves (0: none): libbelay sets BELAY_VOTE_SAVE itself */
    uint32_t tp, pp; /* the generation's layout: rank = (d * pp + p) * tp + t with t < tp, p < pp,
                        d < world / (pp * tp). tp is the job's for ever; pp is the job's or less */
};

struct belay_tensor_desc {
    uint32_t size, version;
    const char *name; /* of the logical tensor, at most 127 bytes */
    uint32_t kind;  /* enum bl_tensor_kind: 1 parameter, 2 first moment, 3 second moment, 4 other */
    uint32_t dtype; /* enum bl_dtype: 1 fp32, ... */
    uint32_t dims;
    uint64_t shape[6];         /* global */
    uint64_t flat_lo, flat_hi; /* elements owned, of the row-major order of tensor or box */
    uint64_t slot_offset;      /* out: bytes from the slot's start; 64-aligned */
    /* The box of the tensor that a tensor-parallel rank has; box_hi of zeros, or a `size` that ends
     * before it: the whole tensor. flat_lo and flat_hi count elements of the box. */
    uint64_t box_lo[6], box_hi[6];
};

/* What the trainer tells operators; one store into shared memory, no system call. */
struct belay_metrics {
    uint32_t size, version;
    uint64_t step;
    double loss, lr, grad_norm, tokens_per_s;
    uint64_t samples; /* consumed since step 0 */
};

struct belay; /* one per process; opaque */

/* Is this process run by a daemon (BELAY_SOCKET is set)? Any thread. */
BELAY_API int belay_is_supervised(void);

/* Connects to BELAY_SOCKET, names itself by BELAY_JOB and BELAY_INCARNATION, and waits for the
 * first plan that has this process as a member. *job is owned by the caller until belay_leave; on
 * error it is NULL when nothing can be done with it. A process with another function id or probe
 * than the run's gets BELAY_EREFUSED. */
BELAY_API int belay_join(const struct belay_config *config, struct belay **job,
                         struct belay_plan *plan);

/* Names an extent this rank owns under the newest plan. The order of calls fixes the slot's layout;
 * the first call after belay_join or belay_next begins a new list. `ptr` may be NULL (the state
 * lives in the slots); if not, belay_load also copies the loaded extent there. -EINVAL: no name, or
 * a kind, dtype or `size` that is not known; the text of a box or range that is not in the tensor
 * names the numbers. */
BELAY_API int belay_tensor(struct belay *job, struct belay_tensor_desc *desc, void *ptr);

/* Makes the slots for the extents named (kept as they are when the layout did not change) and fills
 * the slot of `step` (= plan.step) from own slots, the node's memory, peers and disk, as the plan
 * says, checking digests; afterwards belay_slot_data has it, sealed. With plan.fresh the slots are
 * only made: the trainer writes step 0 by belay_slot_begin and belay_slot_seal. What goes wrong
 * while loading is reported to the leader and comes back as BELAY_EGEN (belay_error says what it
 * was): the next generation tries another way. -EINVAL: called out of order. */
BELAY_API int belay_load(struct belay *job, uint64_t step);

/* Loading and communicators are done: reports ready and waits for go. */
BELAY_API int belay_ready(struct belay *job);

/* One store, no system call: what this rank is doing. Called at least once per step and section. */
BELAY_API int belay_beat(struct belay *job, enum belay_section section, uint64_t step);

/* Flight recorder: this rank enters (leaves: waiting = 0) call number `sequence`, which grows by
 * one within a generation with each collective and each message that it waits for. Ranks of one
 * pipeline stage make the same calls in the same order. When a step hangs, whoever waits is a
 * victim; belay_vote says by itself that it waits. One store. Any one thread at a time. */
BELAY_API int belay_beat_collective(struct belay *job, uint64_t sequence, uint32_t waiting);

BELAY_API int belay_metrics_set(struct belay *job, const struct belay_metrics *metrics);

/* Votes for applying `step`: this rank's reduced gradient and clip scale are complete. Waits for
 * its own seal of step - 1, then for all ranks. *result is the OR of all flags; on 0 every rank has
 * voted and `step` must now be applied, whatever happens. */
BELAY_API int belay_vote(struct belay *job, uint64_t step, uint32_t flags, uint32_t *result);

/* The slot to which the state of `step` goes, *dst 2 MiB-aligned and writable until it is sealed.
 */
BELAY_API int belay_slot_begin(struct belay *job, uint64_t step, void **dst);

/* Digests the slot on libbelay's own thread and publishes its header; returns at once. Nothing may
 * be written to the slot afterwards. The next vote waits for it. */
BELAY_API int belay_slot_seal(struct belay *job, uint64_t step);

/* View of the sealed (or just being sealed) slot of `step`; read only. -ENOENT if there is none. */
BELAY_API int belay_slot_data(struct belay *job, uint64_t step, const void **data);

/* Readable when a new generation is called (stays so until belay_next). For poll in any thread;
 * owned by libbelay. */
BELAY_API int belay_event_fd(struct belay *job);

/* The trainer saw a communication error (text for the report, may be NULL). Does not wait. */
BELAY_API int belay_comm_failed(struct belay *job, const char *text);

/* Communication is aborted and no update is half done: waits for the seal, parks, reports the
 * inventory, waits for the next plan. BELAY_ESTOPPED: no next plan, call belay_leave. */
BELAY_API int belay_next(struct belay *job, struct belay_plan *plan);

/* Leaves with `code` (0: this rank's work is done). Waits until the daemon says leave, that is
 * until what this rank holds is safe; frees `job`. 0: the daemon said so; the process may exit with
 * `code`. BELAY_EGEN: a rank was lost before its last step was safe, and this one is wanted once
 * more: call belay_next; `job` is still there. */
BELAY_API int belay_leave(struct belay *job, int code);

/* Text of the last error of this job handle (or of belay_join with NULL); never NULL. */
BELAY_API const char *belay_error(const struct belay *job);

#ifdef __cplusplus
}
#endif

#endif
