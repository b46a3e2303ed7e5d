/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Planning for many ranks: the whole way from a dead rank to go, at growing sizes. The time for
 * twice the ranks may grow little more than twice (the fit's exponent is printed and bounded), and
 * tensor and pipeline parallel ranks may cost little more than others.
 *
 *      test_core_plan [ranks [tp pp]]      one size, default: 1250 to 10000, and 10000 as 8 x 10
 */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"
#include "tests/core/cluster.h"

/* One recovery of `ranks` ranks, in replicas of tp x pp, on a node for every 100. */
static double plan_recover(uint32_t ranks, uint32_t tp, uint32_t pp)
{
    struct cluster c;
    struct core_status status;
    cluster_init(&c, (ranks + 99) / 100, ranks, 101);
    c.config.tp = tp;
    c.config.pp = pp;
    cluster_pass(&c, 200);
    cluster_step(&c);
    cluster_die(&c, cluster_rank(&c, ranks / 2), -1, SIGKILL);
    c.leader_s = 0;
    cluster_pass(&c, 100);
    double took = c.leader_s;
    core_leader_status(c.leader, &status, c.now);
    BL_ASSERT(status.phase == WIRE_PHASE_RUNNING && status.generation == 2);
    BL_ASSERT(status.world == ranks && status.memory_step == 1);
    core_status_close(&status);
    cluster_close(&c);
    return took;
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        uint32_t ranks = (uint32_t)strtoul(argv[1], NULL, 10);
        uint32_t tp = argc > 3 ? (uint32_t)strtoul(argv[2], NULL, 10) : 1;
        uint32_t pp = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 1;
        printf("%u ranks, tp %u x pp %u: %.3f s\n", ranks, tp, pp, plan_recover(ranks, tp, pp));
        return 0;
    }
    double first = 0;
    double last = 0;
    for (uint32_t ranks = 1250; ranks <= 10000; ranks *= 2) {
        last = plan_recover(ranks, 1, 1);
        first = first > 0 ? first : last;
        printf("%5u ranks: one recovery decided in %.3f s\n", ranks, last);
        fflush(stdout);
    }
    double exponent = log2(last / first) / 3;
    printf("grows as ranks^%.2f\n", exponent);
    double hybrid = plan_recover(10000, 8, 10);
    printf("10000 ranks as dp 125 x tp 8 x pp 10: %.3f s, %.2f times as long\n", hybrid,
           hybrid / last);
    return exponent < 1.6 && hybrid < 3 * last ? 0 : 1;
}
