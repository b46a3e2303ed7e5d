/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events: what happened to the run, from one table. A number is never reused nor renumbered. The
 * edge stores and prints them; the runbook is made of the sentences here.
 */
#ifndef CORE_EVENT_H
#define CORE_EVENT_H

#include <stdint.h>

#include "wire/msg.h"

enum core_severity { CORE_INFO = 0, CORE_NOTICE = 1, CORE_WARNING = 2, CORE_ALARM = 3 };

/* X(name, number, severity, what happened, what Belay does, what a person does) */
#define CORE_EVENTS(X)                                                                             \
    X(RUN_STARTED, 100, CORE_INFO, "the run was taken up by a leader", "members are told",         \
      "nothing")                                                                                   \
    X(GENERATION_OPEN, 101, CORE_NOTICE, "a new generation was opened",                            \
      "ranks park, dead ones are replaced, the newest consistent step is chosen", "nothing")       \
    X(GENERATION_PLANNED, 102, CORE_INFO, "members and step of the generation are fixed",          \
      "ranks load what they miss and connect", "nothing")                                          \
    X(GENERATION_RUNNING, 103, CORE_NOTICE, "the generation runs", "training goes on", "nothing")  \
    X(RECOVERED, 104, CORE_NOTICE, "the first step after a recovery is done", "training goes on",  \
      "nothing")                                                                                   \
    X(BEGUN, 105, CORE_NOTICE, "the first step since the run was started or resumed is done",      \
      "training goes on", "nothing")                                                               \
    X(RANK_EXITED, 110, CORE_WARNING, "a rank's process ended",                                    \
      "a new generation replaces it on the same node", "if it happens again, read the rank's log") \
    X(RANK_FAILED, 111, CORE_WARNING, "a rank reported a failure of its generation",               \
      "a new generation is opened; the process stays", "if it repeats, read the rank's log")       \
    X(RANK_HUNG, 112, CORE_WARNING, "a rank makes no progress",                                    \
      "its stacks are saved, it is killed and replaced", "look at the saved stacks")               \
    X(RANK_STARTED, 113, CORE_INFO, "a rank's process is wanted on a node",                        \
      "the daemon starts it", "nothing")                                                           \
    X(RANK_REFUSED, 114, CORE_ALARM, "a rank cannot be a member: other function or numeric probe", \
      "it stays out; others take its place",                                                       \
      "make binaries, libraries and processors of the nodes alike")                                \
    X(RANK_KILLED, 115, CORE_NOTICE, "a rank was ordered to be killed", "its place is filled",     \
      "nothing")                                                                                   \
    X(HANG_UNKNOWN, 116, CORE_WARNING, "no step progress, and no rank stands out",                 \
      "a new generation is opened without a kill", "if it repeats, look at the network")           \
    X(NODE_AWAY, 120, CORE_NOTICE, "a daemon's connection is gone",                                \
      "its ranks train on; it is waited for", "see to the daemon if it stays away")                \
    X(NODE_BACK, 121, CORE_NOTICE, "a daemon is back", "its ranks and memory are taken up",        \
      "nothing")                                                                                   \
    X(NODE_LOST, 122, CORE_ALARM, "a node is gone: no daemon and no step progress",                \
      "the run goes on without it; it joins again when it is back", "repair or replace the node")  \
    X(NODE_MEMORY_LOST, 123, CORE_WARNING, "a daemon came back without its ranks",                 \
      "they count as dead and are replaced", "nothing")                                            \
    X(STEPS_LOST, 124, CORE_WARNING, "steps have to be done again",                                \
      "the run continues from an older step", "nothing")                                           \
    X(RESHAPED, 130, CORE_WARNING, "the run goes on with fewer ranks than wanted",                 \
      "a replica that lost a rank is dissolved, its other ranks are spares; without a whole one "  \
      "the pipeline is cut to fewer stages; lanes are moved; it grows again when there is room",   \
      "bring nodes back")                                                                          \
    X(GROWN, 131, CORE_NOTICE, "ranks were taken in", "training goes on with more ranks",          \
      "nothing")                                                                                   \
    X(WAITING, 132, CORE_ALARM, "the run waits", "it goes on by itself when it can",               \
      "see what is waited for")                                                                    \
    X(FENCE_WAIT, 133, CORE_ALARM, "nothing proves that the former generation is over",            \
      "the run waits for contact with one of its ranks",                                           \
      "bring the nodes back, or, if they are surely off: belay recover --abandon")                 \
    X(HOLD, 134, CORE_ALARM, "too many recoveries in an hour", "the run is held",                  \
      "find the cause, then: belay resume")                                                        \
    X(NO_PROGRESS, 135, CORE_ALARM, "the same crash at the same step, three times",                \
      "the run is ended with exit code 93", "read the first cause")                                \
    X(SAVE_STARTED, 140, CORE_INFO, "a save began", "the nodes write their parts", "nothing")      \
    X(SAVE_COMMITTED, 141, CORE_INFO, "a checkpoint is committed", "older ones may go", "nothing") \
    X(SAVE_FAILED, 142, CORE_ALARM, "a save failed",                                               \
      "leftovers are removed, the former checkpoint stands, the next save tries again",            \
      "see to the disk")                                                                           \
    X(SAVE_SKIPPED, 143, CORE_WARNING,                                                             \
      "a save was skipped: the one before is still being written", "training is not held",         \
      "make saves rarer or the disk faster")                                                       \
    X(CHECKPOINT_BAD, 144, CORE_ALARM, "a checkpoint could not be loaded", "an older one is used", \
      "ckpt-tool verify it")                                                                       \
    X(MEMORY_BAD, 145, CORE_ALARM, "state in memory did not match its digest",                     \
      "an older state is used", "check the node's memory")                                         \
    X(DIGEST_DIFFERS, 146, CORE_ALARM, "the loaded state's digest differs from the plan's",        \
      "a new generation is opened", "check memory and disks")                                      \
    X(SAVE_VERIFIED, 147, CORE_INFO, "a checkpoint was read back whole and is right",              \
      "older ones may go by the root's rules", "nothing")                                          \
    X(VERIFY_FAILED, 148, CORE_ALARM, "a committed checkpoint is damaged, or cannot be read back", \
      "a damaged one is not loaded and keeps no older one from being kept",                        \
      "ckpt-tool verify names what is damaged; see to the disk")                                   \
    X(SAVE_INTERVAL, 149, CORE_INFO, "the interval between saves was chosen anew",                 \
      "saves follow it from the next multiple on", "nothing")                                      \
    X(STORE_FAILED, 150, CORE_ALARM, "the store does not take a change",                           \
      "nothing is decided until it does; ranks train on", "see to the head's disk")                \
    X(DEPOSED, 151, CORE_ALARM, "another leader has taken over", "this one steps back", "nothing") \
    X(SCAN_FAILED, 152, CORE_ALARM, "a root could not be scanned", "tried again",                  \
      "see to the storage")                                                                        \
    X(ROOT_STUCK, 153, CORE_ALARM, "a root does not answer any more",                              \
      "its saves are given up, the other roots go on; it is tried again, ever more rarely",        \
      "see to the disk, the mount or the server behind it")                                        \
    X(ROOT_BACK, 154, CORE_NOTICE, "a root answers again", "saves go to it again", "nothing")      \
    X(CHECKPOINT_INCOMPLETE, 155, CORE_ALARM,                                                      \
      "a committed checkpoint is not whole: a node that has a part of it is missing",              \
      "it is waited for a little, then an older one or another root is used",                      \
      "bring the node and its disk back")                                                          \
    X(SAVE_GIVEN_UP, 156, CORE_ALARM, "a save that was asked for failed again and again",          \
      "it is not tried any more; saves by interval go on, whoever asked is told",                  \
      "see to the disk, then ask again")                                                           \
    X(FINISHED, 160, CORE_NOTICE, "the run is finished", "ranks leave", "nothing")                 \
    X(STOPPED, 161, CORE_NOTICE, "the run is stopped and can be resumed", "ranks leave",           \
      "belay run resumes it")                                                                      \
    X(LAST_SAVE_FAILED, 162, CORE_ALARM, "the last save failed",                                   \
      "the run ends with exit code 3; older checkpoints stand", "see to the disk, resume")         \
    X(REFUSED, 163, CORE_ALARM, "the run could not start", "nothing is left running",              \
      "see the text")

#define CORE_EVENT_ENUM(name, number, severity, what, does, person) CORE_EVENT_##name = number,
enum core_event_code { CORE_EVENTS(CORE_EVENT_ENUM) };
#undef CORE_EVENT_ENUM

#define CORE_NO_RANK UINT32_MAX

struct core_event {
    enum core_event_code code;
    uint64_t time_ms; /* the machine's clock */
    uint64_t generation, step;
    uint32_t rank; /* CORE_NO_RANK none */
    uint64_t incarnation;
    int32_t exit_code, signal;
    uint64_t value_ms; /* of what the event tells: age, recovery time */
    uint64_t count;    /* steps lost, ranks, parts */
    uint32_t phase;    /* enum wire_phase, or section */
    char node[WIRE_NODE_MAX];
    char text[WIRE_TEXT_MAX];
};

struct core_event_info {
    enum core_event_code code;
    enum core_severity severity;
    const char *name; /* "RANK_EXITED" */
    const char *what, *does, *person;
};

/* The table; *ret_count entries. */
const struct core_event_info *core_event_table(uint32_t *ret_count);
/* NULL for an unknown code. */
const struct core_event_info *core_event_find(enum core_event_code code);

#endif
