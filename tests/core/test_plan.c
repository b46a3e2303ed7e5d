/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Planning for many ranks: the whole way from a dead rank to go, at growing sizes. The time for
 * twice the ranks may grow little more than twice (the fit's exponent is printed and bounded).
 *
 *      test_core_plan [ranks]      one size, default: 1250 to 10000
 */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"
#include "tests/core/cluster.h"

/* One recovery of `ranks` ranks on a node for every 100. */
static double plan_recover(uint32_t ranks)
{
    struct cluster c;
    struct core_status status;
    cluster_init(&c, (ranks + 99) / 100, ranks, 101);
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
        printf("%u ranks: %.3f s\n", ranks, plan_recover(ranks));
        return 0;
    }
    double first = 0;
    double last = 0;
    for (uint32_t ranks = 1250; ranks <= 10000; ranks *= 2) {
        last = plan_recover(ranks);
        first = first > 0 ? first : last;
        printf("%5u ranks: one recovery decided in %.3f s\n", ranks, last);
        fflush(stdout);
    }
    double exponent = log2(last / first) / 3;
    printf("grows as ranks^%.2f\n", exponent);
    return exponent < 1.6 ? 0 : 1;
}
