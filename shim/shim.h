/* SPDX-License-Identifier: Apache-2.0 */
/*
 * belay-shim: one tiny parent per rank. It outlives belayd, so that a daemon can be killed,
 * restarted or upgraded while its ranks train on. It holds what must not be lost meanwhile: the
 * end of the rank's output, duplicates of its memfds, its exit status.
 *
 *      belayd <--- UNIX socket ---> shim ---- fork, pipe, pidfd ----> rank
 *                                    |  watcher thread: robust mutex in the beat page
 *                                    |  log thread: writes the rank's output
 *
 * The rank dies with its shim (PR_SET_PDEATHSIG), and the shim leaves only when it is told to and
 * the rank is gone: one rule for both. Everything but the two threads runs in one poll loop.
 */
#ifndef SHIM_SHIM_H
#define SHIM_SHIM_H

#include <signal.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/error.h"
#include "shim/shim_log.h"
#include "wire/edge.h"
#include "wire/slot.h"

#define SHIM_KEEP_MAX    15   /* memfds of one rank; with the beat page all fit beside one frame */
#define SHIM_CLIENTS_MAX 4    /* a daemon, its successor, and two more */
#define SHIM_STACKS_MS   5000 /* eu-stack gets this long; then it is killed and the kill goes on */
#define SHIM_ORPHAN_MS   5000 /* how often a shim of a dead rank looks if its socket still exists */
#define SHIM_QUIET_MS    300  /* a partial line or a repeat count waits at most this long */

struct shim_options {
    const char *socket_path, *exit_path, *log_path, *cwd;
    int page_fd;
    uint64_t incarnation; /* from BELAY_INCARNATION */
    char **argv;          /* of the rank, NULL-terminated; view of main's */
};

struct shim_exit {
    int known;      /* the rank is gone and its status is recorded */
    int32_t code;   /* or -1 */
    int32_t signal; /* or 0 */
    uint32_t core;
    uint32_t by_us; /* a kill was asked for before */
    int64_t unix_ms;
};

struct shim_keep { /* a memfd held for the daemon */
    uint64_t arena;
    int fd;
};

_Static_assert(SHIM_KEEP_MAX + 1 <= WIRE_FDS_MAX, "a state carries them all");

struct shim_client;

struct shim {
    struct shim_options options;
    struct wire_page *page;
    struct shim_log *log;
    pid_t pid; /* of the rank; 0 before */
    int pidfd, pipe_fd, listen_fd, signal_fd, life_fd;
    struct shim_exit exit;
    struct shim_keep keeps[SHIM_KEEP_MAX];
    uint32_t keep_count;
    struct shim_client *clients[SHIM_CLIENTS_MAX];
    uint64_t client_count;       /* that ever came */
    pid_t stacks_pid;            /* of eu-stack, 0 when none runs */
    uint64_t stacks_deadline_ms; /* of the loop's clock */
    int kill_after_stacks;
    int suspected; /* the rank's robust mutex lost its holder */
    uint64_t started_ms, log_bytes;
    int killed;   /* the daemon asked for a kill */
    int released; /* leave when the rank is gone */
};

uint64_t shim_now_ms(void); /* CLOCK_MONOTONIC */

/* ---- shim_rank.c ---- */
/* Maps the beat page, readies the robust mutex, forks, and starts the rank. A command that cannot
 * be run comes back as an error of this call, with no rank. */
BL_MUST_CHECK int shim_rank_start(struct shim *shim, struct bl_errmsg *msg);
/* SIGKILL to the rank, its process group, and every process below this shim but eu-stack. */
void shim_rank_kill(struct shim *shim);
/* Kills what the rank left behind; returns the number of processes found. */
int shim_rank_sweep(struct shim *shim);

/* ---- shim_life.c ---- */
/* Makes the page ready for the rank: magic, version, mutex. */
BL_MUST_CHECK int shim_life_prepare(struct shim *shim, struct bl_errmsg *msg);
/* Starts the thread that waits for the death of the mutex's holder; then life_fd gets readable. */
BL_MUST_CHECK int shim_life_watch(struct shim *shim, struct bl_errmsg *msg);

/* ---- shim_exit.c ---- */
/* From a wait status. Written, fsynced and renamed to exit_path before anybody is told. */
void shim_exit_record(struct shim *shim, int status);
/* Of a rank that is dying but not yet gone: what /proc says of its status, into shim->exit. */
void shim_exit_guess(struct shim *shim);

/* ---- shim_stacks.c ---- */
/* Starts eu-stack for the rank (unless it runs); then, if `kill`, kills the rank. */
void shim_stacks_begin(struct shim *shim, int kill);
/* eu-stack ended (or its deadline passed). */
void shim_stacks_end(struct shim *shim, const char *note);

/* ---- shim_link.c ---- */
BL_MUST_CHECK int shim_link_listen(struct shim *shim, struct bl_errmsg *msg);
void shim_link_accept(struct shim *shim);
/* Fills up to `max` entries; returns how many, of client i the index in ret_index[i]. */
struct pollfd;
uint32_t shim_link_poll(struct shim *shim, struct pollfd *fds, uint32_t *ret_index);
void shim_link_event(struct shim *shim, uint32_t client, short events);
/* To every attached client: the state with suspected; the exit; stacks are done. */
void shim_link_push_suspect(struct shim *shim);
void shim_link_push_exit(struct shim *shim);
void shim_link_push_stacked(struct shim *shim, int rc, const char *text);
void shim_link_close(struct shim *shim);

#endif
