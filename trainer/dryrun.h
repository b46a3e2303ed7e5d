/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a job will take, from its options alone: nothing is started, no data is read, no large
 * memory taken. Ranks fall into few classes (place in the slices and stages, load of lanes, size of
 * the cut), each computed once with the same functions that size the buffers of a run, so 10,000
 * ranks take no longer than their classes.
 */
#ifndef TRAINER_DRYRUN_H
#define TRAINER_DRYRUN_H

#include <stdint.h>

#include "base/error.h"
#include "base/job.h"
#include "kernels/backend.h"
#include "trainer/grid.h"

/* Memory of a rank, by what it is for. */
#define TRAIN_DRY_MEMORY(X)                                                                        \
    X(WEIGHTS, "weights", "working buffer of the part; ZeRO 3: the unit in use and the next")      \
    X(TIED_COPY, "tied_copy", "embedding beside a head tied to it on another stage")               \
    X(STATE, "state", "weights and moments that are owned, in a device's memory")                  \
    X(SLOTS, "slots", "weights and moments that are owned, in every slot")                         \
    X(GRADIENTS, "gradients", "stack of gradients, received slices, tied accumulators")            \
    X(MESSAGES, "messages", "streams between stages, and those that neighbours are ahead; tokens") \
    X(GATHER, "gather", "what slices have alike, the norm's sums")                                 \
    X(ACTIVATIONS, "activations", "sets kept from forward to backward")                            \
    X(LOGITS, "logits", "with their gradient, on the last stage")                                  \
    X(SCRATCH, "scratch", "of a pass; recomputed activations")                                     \
    X(COMM, "communicator", "rings with the ranks of the node; a device's scratch for sums")       \
    X(PROCESS, "process", "program, stacks, tables")
#define TRAIN_DRY_MEMORY_ENUM(name, text, help) TRAIN_DRY_##name,
enum train_dry_memory { TRAIN_DRY_MEMORY(TRAIN_DRY_MEMORY_ENUM) TRAIN_DRY_MEMORY_COUNT };
#undef TRAIN_DRY_MEMORY_ENUM

/* Bytes that a rank sends in one step (without votes and sums of a few words). */
#define TRAIN_DRY_WIRE(X)                                                                          \
    X(DP_GRADIENTS, "dp_gradients", "slices to their owners")                                      \
    X(DP_WEIGHTS, "dp_weights", "own weights to the replicas")                                     \
    X(TP, "tp", "sums of the stream between slices")                                               \
    X(PP, "pp", "streams and their gradients to the next stage")
#define TRAIN_DRY_WIRE_ENUM(name, text, help) TRAIN_DRY_WIRE_##name,
enum train_dry_wire { TRAIN_DRY_WIRE(TRAIN_DRY_WIRE_ENUM) TRAIN_DRY_WIRE_COUNT };
#undef TRAIN_DRY_WIRE_ENUM

extern const char *const train_dry_memory_names[TRAIN_DRY_MEMORY_COUNT];
extern const char *const train_dry_wire_names[TRAIN_DRY_WIRE_COUNT];

struct train_dry_rank {                                  /* of the class of a rank */
    uint64_t memory[TRAIN_DRY_MEMORY_COUNT], memory_sum; /* bytes */
    uint64_t device_sum;                                 /* of them on a device; 0: the CPU */
    uint64_t wire[TRAIN_DRY_WIRE_COUNT], wire_sum;       /* bytes sent in one step */
    uint64_t own_elems;                                  /* of weights and of each moment */
    uint32_t lanes;                                      /* of its replica */
    uint32_t sets;                                       /* of activations */
};

struct train_dry;

/* Computes the job's layout for nodes of `per_node` ranks (0: as many as placement.nodes leaves a
 * node), `slots` slots each (0: as under a daemon). Keeps `job`. *ret is owned. BL_ECONFIG for what
 * cannot be, with the numbers and the nearest layout that can; -ENOMEM. */
BL_MUST_CHECK int train_dry_new(struct train_dry **ret, const struct bl_job *job, uint32_t per_node,
                                uint32_t slots, struct bl_errmsg *msg);
void train_dry_free(struct train_dry *dry); /* NULL is fine */

/* Bytes of the device that the rank of a place takes: the arena of its back end, of which sizes are
 * asked. The job's tp, pp and ranks are those of the grid instead. Errors of train_dry_new. One
 * thread at a time. */
BL_MUST_CHECK int train_dry_device_bytes(const struct bl_job *job, const struct train_grid *grid,
                                         struct kern *kern, uint64_t *ret, struct bl_errmsg *msg);

/* A rank's numbers: a view, until the next call. -ENOMEM. */
BL_MUST_CHECK int train_dry_rank(struct train_dry *dry, uint32_t rank,
                                 const struct train_dry_rank **ret, struct bl_errmsg *msg);

struct train_dry_sum {
    uint32_t per_node, slots, chunks;
    uint32_t micros_max; /* micro-batches of the most loaded replica */
    uint32_t rank_max;   /* the first rank with the most memory */
    uint32_t node_max;   /* the first node with the most memory: ranks from node * per_node */
    uint64_t node_bytes; /* of that node, without its devices */
    uint64_t all_bytes;  /* of all ranks */
    uint64_t wire_max, wire_all; /* sent in one step: by the busiest rank, by all */
    double bubble;               /* predicted share of time in which stages idle */
    int is_bubble_exact;         /* by the schedule's generator, else by the formula of 1F1B */
};

/* Over all ranks. */
BL_MUST_CHECK int train_dry_sum(struct train_dry *dry, struct train_dry_sum *ret,
                                struct bl_errmsg *msg);

struct train_dry_model { /* of the model, whatever the layout */
    uint64_t embedding, positions, attention, mlp, norms, head; /* elements */
    uint64_t elems;                                             /* their sum */
    double flops;       /* of a trained token, forward and backward, without recomputing */
    double flops_again; /* of a token, what recomputing adds */
};
BL_MUST_CHECK int train_dry_model(struct train_dry_model *ret, const struct bl_job *job,
                                  struct bl_errmsg *msg);

/* Bytes of memory that this machine or its control group gives to all ranks together; 0: unknown.
 */
uint64_t train_dry_machine_bytes(void);

/* Refuses a job whose `ranks` ranks of one machine, with `slots` slots, take more than `available`
 * bytes: BL_ECONFIG with the numbers and the nearest changes that fit. */
BL_MUST_CHECK int train_dry_fits(const struct bl_job *job, uint32_t ranks, uint32_t slots,
                                 uint64_t available, struct bl_errmsg *msg);

/* Prints the memory of the most loaded rank and of a node. */
BL_MUST_CHECK int train_dry_print_memory(struct train_dry *dry, struct bl_errmsg *msg);

/* `belay-train --dry-run JOB` and `--describe-layout JOB`: exit codes. */
int train_dryrun_main(const char *job_path, uint32_t per_node, int json);
int train_layout_main(const char *job_path, int json);

#endif
