/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How often to save. A pure function of what a save costs and how often state has to be taken from
 * disk.
 *
 * With d the training time that one save costs and M the mean time between failures, both in
 * seconds, the work between two saves that loses least is, to first order, sqrt(2 d M) (Young 1974,
 * https://doi.org/10.1145/361147.361115). With the higher-order terms (Daly 2006,
 * https://doi.org/10.1016/j.future.2004.11.016, equation 37):
 *
 *      x = sqrt(d / 2M)
 *      tau = sqrt(2 d M) (1 + x / 3 + x^2 / 9) - d      d < 2M
 *      tau = M                                          otherwise
 *
 * What a save costs is not the time it takes to write: training goes on meanwhile, somewhat slower.
 * If a save takes w and steps take a factor f as long while it is written, d = w (1 - 1/f).
 *
 * M is learned from few events. Failures are counted as a Poisson process with a Gamma prior: one
 * failure in CORE_INTERVAL_PRIOR_S. After F failures in T seconds, M = (T + prior) / (F + 1).
 */
#ifndef CORE_INTERVAL_H
#define CORE_INTERVAL_H

#include <stdint.h>

#define CORE_INTERVAL_PRIOR_S   (24.0 * 3600.0)
#define CORE_INTERVAL_MIN_S     5.0    /* no save follows the one before sooner */
#define CORE_INTERVAL_MAX_S     1800.0 /* nobody wants to lose more than half an hour */
#define CORE_INTERVAL_FIRST     100    /* steps, until there is something measured */
#define CORE_INTERVAL_STEPS_MAX (1ull << 32)

struct core_interval_input {
    double save_s;     /* from pin to commit */
    double inflation;  /* step time while a save is written / without; 1 or less: no cost seen */
    double step_s;     /* of a step without a save */
    double run_s;      /* time watched */
    uint64_t failures; /* seen in it: state had to be taken from disk */
};

/* Mean seconds between failures. */
double core_interval_mtbf(double run_s, uint64_t failures);
/* Daly's tau in seconds, for a cost of d > 0 and a mean of m > 0. */
double core_interval_daly(double d, double m);
/* Steps between saves: tau, at least one and a half times what a save takes (they never pile up),
 * within the bounds above, at least 1. */
uint64_t core_interval_steps(const struct core_interval_input *in);

#endif
