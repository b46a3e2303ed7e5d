/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/watcher.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Waits on the event fd with the lock released; 1 when it fired. */
static int wait_event(struct train_watcher *w)
{
    struct pollfd p[2] = {{.fd = w->event_fd, .events = POLLIN},
                          {.fd = w->stop_fd, .events = POLLIN}};
    pthread_mutex_unlock(&w->lock);
    int n = poll(p, 2, -1);
    pthread_mutex_lock(&w->lock);
    return n > 0 && p[0].revents != 0;
}

static void *watcher_main(void *arg)
{
    struct train_watcher *w = arg;
    pthread_mutex_lock(&w->lock);
    while (!w->stopping) {
        if (!w->armed) {
            pthread_cond_wait(&w->changed, &w->lock);
        } else if (wait_event(w)) {
            w->armed = 0;
            w->called = 1;
            if (w->comm != NULL) {
                comm_abort(w->comm);
            }
        }
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

int train_watcher_start(struct train_watcher *watcher, struct bl_errmsg *msg)
{
    memset(watcher, 0, sizeof *watcher);
    watcher->event_fd = -1;
    watcher->stop_fd = eventfd(0, EFD_CLOEXEC);
    if (watcher->stop_fd < 0) {
        return bl_err_code(msg, -errno, "watcher");
    }
    pthread_mutex_init(&watcher->lock, NULL);
    pthread_cond_init(&watcher->changed, NULL);
    int rc = pthread_create(&watcher->thread, NULL, watcher_main, watcher);
    if (rc != 0) {
        close(watcher->stop_fd);
        return bl_err_code(msg, -rc, "watcher");
    }
    return 0;
}

void train_watcher_stop(struct train_watcher *watcher)
{
    const uint64_t one = 1;
    pthread_mutex_lock(&watcher->lock);
    watcher->stopping = 1;
    pthread_cond_signal(&watcher->changed);
    pthread_mutex_unlock(&watcher->lock);
    ssize_t n = write(watcher->stop_fd, &one, sizeof one);
    (void)n; /* the counter cannot be full */
    pthread_join(watcher->thread, NULL);
    close(watcher->stop_fd);
}

void train_watcher_arm(struct train_watcher *watcher, int event_fd)
{
    pthread_mutex_lock(&watcher->lock);
    watcher->event_fd = event_fd;
    watcher->called = 0;
    watcher->armed = 1;
    pthread_cond_signal(&watcher->changed);
    pthread_mutex_unlock(&watcher->lock);
}

void train_watcher_guard(struct train_watcher *watcher, struct comm *comm)
{
    pthread_mutex_lock(&watcher->lock);
    watcher->comm = comm;
    if (comm != NULL && watcher->called) {
        comm_abort(comm);
    }
    pthread_mutex_unlock(&watcher->lock);
}
