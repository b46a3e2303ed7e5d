/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "daemon/core/interval.h"

/* Expected time for a second of work when failures are exponential with mean m, each segment is t
 * of work and d of saving, and a restart costs nothing (Daly 2006, equation 20). */
static double time_per_work(double t, double d, double m)
{
    return m * (exp((t + d) / m) - 1) / t;
}

static double best_by_search(double d, double m)
{
    double best = d;
    for (double t = d / 100; t < 4 * m; t *= 1.001) {
        best = time_per_work(t, d, m) < time_per_work(best, d, m) ? t : best;
    }
    return best;
}

static void test_interval_is_where_the_expected_time_is_least(void **state)
{
    const double pairs[][2] = {{0.5, 3600}, {5, 3600}, {60, 86400}, {300, 3600}, {30, 600}};
    (void)state;
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
        double d = pairs[i][0];
        double m = pairs[i][1];
        double tau = core_interval_daly(d, m);
        double best = best_by_search(d, m);
        assert_true(fabs(tau - best) < 0.02 * best);
        /* The first-order formula is further away wherever the higher terms are seen. */
        double young = sqrt(2 * d * m);
        assert_true(fabs(tau - best) <= fabs(young - best) + 0.002 * best);
    }
}

static void test_interval_is_the_mean_when_saves_cost_more_than_two(void **state)
{
    (void)state;
    assert_true(core_interval_daly(200, 100) == 100);
    assert_true(core_interval_daly(1000, 100) == 100);
    assert_true(fabs(core_interval_daly(199.999, 100) - 100) < 30);
}

static void test_mean_time_begins_at_the_prior_and_follows_what_is_seen(void **state)
{
    (void)state;
    assert_true(core_interval_mtbf(0, 0) == CORE_INTERVAL_PRIOR_S);
    assert_true(core_interval_mtbf(-5, 0) == CORE_INTERVAL_PRIOR_S);
    assert_true(core_interval_mtbf(CORE_INTERVAL_PRIOR_S, 0) == 2 * CORE_INTERVAL_PRIOR_S);
    /* A failure an hour, for a hundred hours. */
    double m = core_interval_mtbf(360000, 100);
    assert_true(m > 3600 && m < 4500);
}

static void test_steps_stay_within_bounds(void **state)
{
    struct core_interval_input in = {.save_s = 0.01, .inflation = 1, .step_s = 1};
    (void)state;
    assert_int_equal(core_interval_steps(&in), (uint64_t)CORE_INTERVAL_MIN_S);
    in.step_s = 100;
    assert_int_equal(core_interval_steps(&in), 1);
    in = (struct core_interval_input){.save_s = 600, .inflation = 2, .step_s = 1};
    assert_int_equal(core_interval_steps(&in), (uint64_t)CORE_INTERVAL_MAX_S);
    /* A save that takes long is never followed before it is over. */
    in = (struct core_interval_input){.save_s = 3000, .inflation = 1, .step_s = 1};
    assert_int_equal(core_interval_steps(&in), 4500);
    in = (struct core_interval_input){.save_s = 0, .inflation = 0, .step_s = 0};
    assert_in_range(core_interval_steps(&in), 1, CORE_INTERVAL_STEPS_MAX);
}

static void test_dearer_saves_are_rarer_and_failures_make_them_denser(void **state)
{
    struct core_interval_input in = {.save_s = 20, .inflation = 1.02, .step_s = 0.5};
    (void)state;
    uint64_t cheap = core_interval_steps(&in);
    in.inflation = 1.2;
    uint64_t dear = core_interval_steps(&in);
    assert_true(dear > cheap);
    in.failures = 20;
    in.run_s = 3600;
    assert_true(core_interval_steps(&in) < dear);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_interval_is_where_the_expected_time_is_least),
        cmocka_unit_test(test_interval_is_the_mean_when_saves_cost_more_than_two),
        cmocka_unit_test(test_mean_time_begins_at_the_prior_and_follows_what_is_seen),
        cmocka_unit_test(test_steps_stay_within_bounds),
        cmocka_unit_test(test_dearer_saves_are_rarer_and_failures_make_them_denser),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
