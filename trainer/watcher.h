/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread that watches for a new generation while the main thread computes or communicates: it
 * polls libbelay's event fd and aborts the communicator in use. It fires once, then rests until it
 * is armed again, because the fd stays readable until belay_next.
 */
#ifndef TRAINER_WATCHER_H
#define TRAINER_WATCHER_H

#include <pthread.h>

#include "base/error.h"
#include "trainer/comm.h"

struct train_watcher {
    pthread_t thread;
    pthread_mutex_t lock; /* of all below */
    pthread_cond_t changed;
    int event_fd; /* borrowed */
    int stop_fd;  /* own; readable: end */
    int armed, stopping;
    int called;        /* a generation was called since the last arming */
    struct comm *comm; /* to be aborted; borrowed */
};

/* Starts the thread, not armed. -errno. */
BL_MUST_CHECK int train_watcher_start(struct train_watcher *watcher, struct bl_errmsg *msg);
/* Ends the thread; after this the event fd may be closed. */
void train_watcher_stop(struct train_watcher *watcher);
/* Main thread, at the start of each generation. */
void train_watcher_arm(struct train_watcher *watcher, int event_fd);
/* The communicator from now on; NULL before it is freed. One that comes after the call is aborted
 * at once. */
void train_watcher_guard(struct train_watcher *watcher, struct comm *comm);

#endif
