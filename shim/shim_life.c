/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank holds a robust, shared mutex in its beat page as long as it lives. When it dies the kernel
 * walks its robust list before it tears its memory down, so that the thread waiting here knows
 * within a fraction of a millisecond, while pidfd and sockets tell only after the memory is gone
 * (some 100 ms per GiB).
 */
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "shim/shim.h"

#define LIFE_POLL_MS                                                                               \
    20 /* until the rank has taken the mutex; it is pre-joined that long at most                   \
        */

int shim_life_prepare(struct shim *shim, struct bl_errmsg *msg)
{
    pthread_mutexattr_t attr;

    shim->page =
        mmap(NULL, WIRE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, shim->options.page_fd, 0);
    if (shim->page == MAP_FAILED) {
        shim->page = NULL;
        return bl_err_code(msg, -errno, "map the beat page (fd %d)", shim->options.page_fd);
    }
    memset(shim->page, 0, sizeof(*shim->page));
    int rc = pthread_mutexattr_init(&attr);

    if (rc == 0) {
        rc = pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    }
    if (rc == 0) {
        rc = pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
    }
    if (rc == 0) {
        rc = pthread_mutex_init(&shim->page->life, &attr);
    }
    if (rc != 0) {
        return bl_err_code(msg, -rc, "make the mutex in the beat page");
    }
    shim->page->magic = WIRE_PAGE_MAGIC;
    shim->page->version = 1;
    return 0;
}

/* The mutex is free until the rank has taken it: waits for that without taking it for longer than
 * a moment. */
static void life_wait_held(struct wire_page *page)
{
    const struct timespec pause = {.tv_nsec = LIFE_POLL_MS * 1000000L};

    for (;;) {
        int rc = pthread_mutex_trylock(&page->life);

        if (rc == EBUSY) {
            return;
        }
        if (rc == EOWNERDEAD) { /* taken and lost between two looks */
            pthread_mutex_consistent(&page->life);
            pthread_mutex_unlock(&page->life);
            return;
        }
        if (rc == 0) {
            pthread_mutex_unlock(&page->life);
        }
        nanosleep(&pause, NULL);
    }
}

static void *life_main(void *arg)
{
    struct shim *shim = arg;
    struct wire_page *page = shim->page;
    uint64_t one = 1;

    life_wait_held(page);
    int rc = pthread_mutex_lock(&page->life);

    if (rc == EOWNERDEAD) {
        BL_IGNORE(write(shim->life_fd, &one, sizeof(one)) < 0, "the pidfd tells it too, later");
        pthread_mutex_consistent(&page->life);
    }
    if (rc == 0 || rc == EOWNERDEAD) {
        pthread_mutex_unlock(&page->life);
    }
    return NULL;
}

int shim_life_watch(struct shim *shim, struct bl_errmsg *msg)
{
    pthread_t thread;

    shim->life_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (shim->life_fd < 0) {
        return bl_err_code(msg, -errno, "eventfd");
    }
    int rc = pthread_create(&thread, NULL, life_main, shim);

    if (rc != 0) {
        return bl_err_code(msg, -rc, "start the watcher");
    }
    pthread_detach(thread); /* ends with the process */
    return 0;
}
