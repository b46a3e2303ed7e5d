/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which layout a generation has, and who sits where in it. Pure: no leader, no state; the leader
 * asks when it plans, and when it wonders whether it could grow.
 *
 *      rank = (d * pp + p) * tp + t          t: tensor parallel, p: pipeline stage, d: replica
 *
 *      d 0 | p 0: t 0  t 1 | p 1: t 0  t 1 |      a *group* is the tp ranks of one (d, p): they
 * talk d 1 | p 0: t 0  t 1 | p 1: t 0  t 1 |      most, and sit on one node where that can be
 *
 * The shape. tp is the job's for ever. As many replicas of the job's pp as there are processes for,
 * at most dp_max. Not one: the pipeline is re-cut to the most stages that there are processes for,
 * as one replica. Fewer than pp_min stages: none; the run waits.
 *
 * The seats. Whoever holds state keeps its rank where the world stays as it was. With fewer
 * replicas those that lost most are dissolved, and what is left closes up in its order: everybody
 * keeps (t, p), and parts of the state that are cut over replicas overlap most. Holes are filled
 * from whoever is left over: from the group's own node first, then by who held the same (t, p) in a
 * dissolved replica, then near the replica, then anybody. After a re-cut the groups that are whole
 * keep their order along the pipeline.
 */
#ifndef CORE_LEADER_LAYOUT_H
#define CORE_LEADER_LAYOUT_H

#include <stdint.h>

#define LEADER_NO_RANK UINT32_MAX /* as CORE_NO_RANK */

struct leader_layout {
    uint32_t dp, tp, pp; /* dp 0: none */
};

struct leader_layout_job {
    uint32_t tp, pp;
    uint32_t pp_min; /* stages below which the run waits; 1 to pp */
    uint32_t dp_max; /* replicas wanted: of the job, at most its lanes */
};

struct leader_layout_proc { /* a process that may be a member */
    uint32_t node;          /* equal numbers are one node; neighbours in number are near */
    uint32_t rank;          /* that it had, or is to replace; LEADER_NO_RANK none */
    uint32_t held;          /* it had that rank in `former` and holds its state */
};

static inline uint32_t leader_layout_world(const struct leader_layout *layout)
{
    return layout->dp * layout->pp * layout->tp;
}

/* The largest layout that `count` processes can form; dp 0: none. O(1). */
struct leader_layout leader_layout_shape(const struct leader_layout_job *job, uint32_t count);

/* Ranks below which nothing runs. */
static inline uint32_t leader_layout_least(const struct leader_layout_job *job)
{
    return job->tp * job->pp_min;
}

/* Seats processes in `shape`: ret_seats[rank] is an index into procs, each at most once. `former`
 * is the layout that the ranks of those that hold state are of; its dp does not matter. Ranks of
 * others are of the job's pp: they count where that is the shape's. There must be enough processes
 * (asserts). O(n log n) in time, O(n) in memory (asserts when there is none). */
void leader_layout_seats(const struct leader_layout_job *job, const struct leader_layout *former,
                         const struct leader_layout *shape, const struct leader_layout_proc *procs,
                         uint32_t count, uint32_t *ret_seats);

#endif
