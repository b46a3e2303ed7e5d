/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/core/interval.h"

#include <math.h>

/* A save that cannot be seen in the steps' times still costs something: a vote's flag, a slot that
 * is not reused, processor caches. One thousandth of the time that it is written. */
#define INTERVAL_COST_LEAST 0.001

double core_interval_mtbf(double run_s, uint64_t failures)
{
    return ((run_s > 0 ? run_s : 0) + CORE_INTERVAL_PRIOR_S) / ((double)failures + 1.0);
}

double core_interval_daly(double d, double m)
{
    if (d >= 2 * m) {
        return m;
    }
    double x = sqrt(d / (2 * m));
    return sqrt(2 * d * m) * (1 + x / 3 + x * x / 9) - d;
}

uint64_t core_interval_steps(const struct core_interval_input *in)
{
    double step_s = in->step_s > 1e-6 ? in->step_s : 1e-6;
    double share = in->inflation > 1 ? 1 - 1 / in->inflation : 0;
    double save_s = in->save_s > 1e-3 ? in->save_s : 1e-3;
    double cost = save_s * (share > INTERVAL_COST_LEAST ? share : INTERVAL_COST_LEAST);
    double tau = core_interval_daly(cost, core_interval_mtbf(in->run_s, in->failures));

    tau = tau < CORE_INTERVAL_MAX_S ? tau : CORE_INTERVAL_MAX_S;
    tau = tau > CORE_INTERVAL_MIN_S ? tau : CORE_INTERVAL_MIN_S;
    tau = tau > 1.5 * save_s ? tau : 1.5 * save_s;
    double steps = floor(tau / step_s + 0.5);
    return steps < 1                                 ? 1
           : steps > (double)CORE_INTERVAL_STEPS_MAX ? CORE_INTERVAL_STEPS_MAX
                                                     : (uint64_t)steps;
}
