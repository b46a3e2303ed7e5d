/* SPDX-License-Identifier: Apache-2.0 */
/*
 * belay-sim: runs seeds; prints the first that fails and how to run it again.
 *
 *      belay-sim --seeds 500                        the protocol as it is: all must pass
 *      belay-sim --seeds 500 --rules-off fence      one rule off: one must fail
 *      belay-sim --seed 17 -v                       one seed, told event for event
 */
#include "tests/sim/sim.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const struct {
    const char *name;
    enum wire_rule rule;
} main_rules[] = {{"vote-needs-seal", WIRE_RULE_VOTE_NEEDS_SEAL},
                  {"apply-needs-vote", WIRE_RULE_APPLY_NEEDS_VOTE},
                  {"keep-pinned", WIRE_RULE_KEEP_PINNED},
                  {"publish-last", WIRE_RULE_PUBLISH_LAST},
                  {"cas-first", WIRE_RULE_CAS_FIRST},
                  {"fence", WIRE_RULE_FENCE},
                  {"park-waits-seal", WIRE_RULE_PARK_WAITS_SEAL},
                  {"keep-sources", WIRE_RULE_KEEP_SOURCES},
                  {"generation-stamp", WIRE_RULE_GENERATION_STAMP},
                  {"line-end", WIRE_RULE_LINE_END},
                  {"commit-needs-generation", WIRE_RULE_COMMIT_NEEDS_GENERATION},
                  {"keep-saved", WIRE_RULE_KEEP_SAVED}};
#define MAIN_RULES (sizeof(main_rules) / sizeof(main_rules[0]))

struct main_options {
    uint64_t seed, seeds;
    uint32_t ranks, nodes, rules_off, verbose, mutations, twice, hybrids;
};

static const char main_help[] =
    "Usage: belay-sim [options]\n"
    "Simulates runs of daemons and ranks in virtual time, with faults, and checks\n"
    "the rules of recovery after every event.\n\n"
    "  --seed S          first seed (1)\n"
    "  --seeds N         how many (1)\n"
    "  --ranks R         ranks (drawn)\n"
    "  --daemons D       nodes, 2 to 8 (drawn)\n"
    "  --rules-off NAME  switch a rule off; --rules-off list names them\n"
    "  --mutations       each rule off in turn must fail within N seeds\n"
    "  --hybrids         tensor and pipeline parallel ranks only, whose nodes go for long\n"
    "  --twice           runs each seed twice: all events must be the same\n"
    "  -v                tells all events\n"
    "  --help            this text\n\n"
    "Example: belay-sim --seeds 500\n"
    "Exit: 0 all passed, 1 a seed failed, 2 usage.\n";

static int sim_one(const struct main_options *o, uint64_t seed, struct sim *sim, uint64_t *hash)
{
    memset(sim, 0, sizeof(*sim));
    sim->seed = seed;
    sim->random = bl_mix64(seed);
    sim->rules_off = o->rules_off;
    sim->verbose = o->verbose;
    sim->log_hash = hash;
    sim->only_hybrids = o->hybrids;
    sim_profile_draw(sim, o->ranks, o->nodes);
    return sim_run(sim);
}

/* First failing seed in [seed, seed + seeds), 0 none; its reason in `why`. */
static uint64_t run_seeds(const struct main_options *o, char why[512], uint64_t totals[5])
{
    for (uint64_t seed = o->seed; seed < o->seed + o->seeds; seed++) {
        struct sim sim;
        uint64_t hash = 0;
        int rc = sim_one(o, seed, &sim, o->twice ? &hash : NULL);
        snprintf(why, 512, "%s", sim.why);
        totals[0] += sim.events;
        totals[1] += sim.recoveries;
        totals[2] += sim.steps_lost;
        totals[3] += sim.commits;
        totals[4] += sim.now;
        sim_close(&sim);
        if (rc == 0 && o->twice) {
            uint64_t again = 0;
            BL_IGNORE(sim_one(o, seed, &sim, &again), "compared by its events");
            sim_close(&sim);
            if (again != hash) {
                snprintf(why, 512, "the same seed gave other events");
                rc = -1;
            }
        }
        if (rc < 0) {
            return seed;
        }
    }
    return 0;
}

static double main_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int main_mutations(struct main_options *o)
{
    int missed = 0;
    for (size_t i = 0; i < MAIN_RULES; i++) {
        uint64_t totals[5] = {0};
        char why[512] = "";
        o->rules_off = main_rules[i].rule;
        uint64_t seed = run_seeds(o, why, totals);
        if (seed) {
            printf("%-24s off: seed %llu fails: %s\n", main_rules[i].name, (unsigned long long)seed,
                   why);
        } else {
            printf("%-24s off: NOTHING fails in %llu seeds\n", main_rules[i].name,
                   (unsigned long long)o->seeds);
            missed = 1;
        }
        fflush(stdout);
    }
    return missed;
}

static int option_rule(struct main_options *o, const char *name)
{
    for (size_t i = 0; i < MAIN_RULES; i++) {
        if (strcmp(name, main_rules[i].name) == 0) {
            o->rules_off |= main_rules[i].rule;
            return 0;
        }
    }
    for (size_t i = 0; i < MAIN_RULES; i++) {
        printf("%s\n", main_rules[i].name);
    }
    return strcmp(name, "list") == 0 ? 1 : 2;
}

static int option_number(const char *name, const char *text, uint64_t max, uint64_t *ret)
{
    char *end = NULL;
    errno = 0;
    unsigned long long value = text ? strtoull(text, &end, 10) : 0;
    if (!text || errno || end == text || *end || value > max) {
        fprintf(stderr, "belay-sim: %s wants a number up to %llu\n", name, (unsigned long long)max);
        return 2;
    }
    *ret = value;
    return 0;
}

/* 0 go on, 1 done, 2 usage. */
static int main_options_parse(int argc, char **argv, struct main_options *o)
{
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        uint64_t number = 0;
        int rc = 0;
        if (strcmp(name, "--help") == 0) {
            fputs(main_help, stdout);
            return 1;
        }
        if (strcmp(name, "-v") == 0) {
            o->verbose = 1;
        } else if (strcmp(name, "--mutations") == 0) {
            o->mutations = 1;
        } else if (strcmp(name, "--hybrids") == 0) {
            o->hybrids = 1;
        } else if (strcmp(name, "--twice") == 0) {
            o->twice = 1;
        } else if (strcmp(name, "--seed") == 0) {
            rc = option_number(name, value, UINT64_MAX, &o->seed);
            i++;
        } else if (strcmp(name, "--seeds") == 0) {
            rc = option_number(name, value, UINT32_MAX, &o->seeds);
            i++;
        } else if (strcmp(name, "--ranks") == 0) {
            rc = option_number(name, value, 12, &number);
            o->ranks = (uint32_t)number;
            i++;
        } else if (strcmp(name, "--daemons") == 0) {
            rc = option_number(name, value, SIM_NODES_MAX, &number);
            o->nodes = number == 1 ? 2 : (uint32_t)number;
            i++;
        } else if (strcmp(name, "--rules-off") == 0) {
            rc = option_rule(o, value ? value : "");
            i++;
        } else {
            fprintf(stderr, "belay-sim: unknown option %s\n", name);
            rc = 2;
        }
        if (rc) {
            return rc;
        }
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct main_options o = {.seed = 1, .seeds = 1};
    uint64_t totals[5] = {0};
    char why[512] = "";
    int rc = main_options_parse(argc, argv, &o);
    if (rc) {
        return rc == 1 ? 0 : 2;
    }
    double start = main_seconds();
    if (o.mutations) {
        rc = main_mutations(&o);
        printf("%.1f s\n", main_seconds() - start);
        return rc;
    }
    uint64_t seed = run_seeds(&o, why, totals);
    if (seed) {
        printf("seed %llu fails: %s\nagain: belay-sim --seed %llu -v%s\n", (unsigned long long)seed,
               why, (unsigned long long)seed, o.rules_off ? " --rules-off ..." : "");
        return 1;
    }
    printf("%llu seeds from %llu passed: %llu events, %llu recoveries, %llu steps lost, %llu "
           "checkpoints, %.0f s of virtual time in %.1f s\n",
           (unsigned long long)o.seeds, (unsigned long long)o.seed, (unsigned long long)totals[0],
           (unsigned long long)totals[1], (unsigned long long)totals[2],
           (unsigned long long)totals[3], (double)totals[4] / 1000.0, main_seconds() - start);
    return 0;
}
