/* SPDX-License-Identifier: Apache-2.0 */
/* belay.h: joining, generations, leaving. */
#include "wire/libbelay.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"

_Static_assert(BELAY_EGEN == BL_EGEN && BELAY_EREFUSED == BL_ECONFIG &&
                   BELAY_ESTOPPED == BL_ESTOPPED,
               "belay.h repeats the codes of base/error.h");

/* Why the last belay_join of this thread failed, when there is no handle to ask. */
static _Thread_local struct bl_errmsg join_error;

uint64_t lb_now_ms(void)
{
    return bl_now_ns() / 1000000;
}

int lb_over(const struct belay *b)
{
    return b->refused ? BL_ECONFIG : b->stopped ? BL_ESTOPPED : b->over ? BL_EGEN : 0;
}

void lb_wait(struct belay *b, uint64_t deadline_ms)
{
    if (deadline_ms == UINT64_MAX) {
        pthread_cond_wait(&b->changed, &b->lock);
        return;
    }
    struct timespec at = {
        .tv_sec = (time_t)(deadline_ms / 1000),
        .tv_nsec = (long)(deadline_ms % 1000) * 1000000,
    };
    pthread_cond_timedwait(&b->changed, &b->lock, &at);
}

void lb_wait_seal(struct belay *b)
{
    while (b->seal_pending) {
        lb_wait(b, UINT64_MAX);
    }
}

int belay_is_supervised(void)
{
    const char *path = getenv("BELAY_SOCKET");
    return path && *path;
}

const char *belay_error(const struct belay *job)
{
    const char *text = job ? job->error.text : join_error.text;
    return *text ? text : "no error";
}

int belay_event_fd(struct belay *job)
{
    return job->event_fd;
}

/* ---- making and freeing ---- */

static int env_hex(const char *name, uint64_t *ret, struct bl_errmsg *msg)
{
    const char *text = getenv(name);
    char *end = NULL;
    errno = 0;
    unsigned long long value = text && *text ? strtoull(text, &end, 16) : 0;
    if (!end || *end || errno || !value) {
        return bl_err(msg, BL_ECONFIG, "%s is not a hexadecimal number: \"%s\"", name,
                      text ? text : "");
    }
    *ret = value;
    return 0;
}

static int env_read(struct belay *b, struct bl_errmsg *msg)
{
    const char *path = getenv("BELAY_SOCKET");
    const char *job = getenv("BELAY_JOB");
    if (!path || !*path) {
        return bl_err(msg, BL_ECONFIG, "BELAY_SOCKET is not set: no daemon started this process");
    }
    if (strlen(path) >= sizeof(b->socket_path)) {
        return bl_err(msg, BL_ECONFIG, "BELAY_SOCKET is longer than %zu bytes",
                      sizeof(b->socket_path) - 1);
    }
    memcpy(b->socket_path, path, strlen(path) + 1);
    snprintf(b->job_name, sizeof(b->job_name), "%s", job ? job : "");
    int rc = env_hex("BELAY_INCARNATION", &b->incarnation, msg);
    if (!rc && getenv("BELAY_RUN")) {
        rc = env_hex("BELAY_RUN", &b->run, msg);
    }
    return rc;
}

/* The beat page that the shim handed down, or one of our own that nobody reads. */
static int page_open(struct belay *b, struct bl_errmsg *msg)
{
    const char *text = getenv("BELAY_PAGE_FD");
    int fd = text && *text ? atoi(text) : -1;
    void *map = mmap(NULL, WIRE_PAGE_BYTES, PROT_READ | PROT_WRITE,
                     fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
    if (map == MAP_FAILED) {
        return bl_err_code(msg, -errno, "map the beat page (BELAY_PAGE_FD=%s)", text ? text : "");
    }
    b->page = map;
    if (fd < 0) {
        return 0;
    }
    if (b->page->magic != WIRE_PAGE_MAGIC) {
        return bl_err(msg, BL_EFORMAT, "BELAY_PAGE_FD=%s is not a beat page", text);
    }
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    /* Robust and held from here to the end of this thread, which ends with the process: when the
     * kernel lets it go, the shim knows of the death before the memory is torn down. */
    int rc = pthread_mutex_lock(&b->page->life);
    if (rc == EOWNERDEAD) {
        rc = pthread_mutex_consistent(&b->page->life);
    }
    if (rc) {
        return bl_err_code(msg, -rc, "take the beat page's mutex");
    }
    b->page_shared = 1;
    b->page->pid = (uint32_t)getpid();
    return 0;
}

static int job_init(struct belay *b, struct bl_errmsg *msg)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->changed, &attr);
    pthread_cond_init(&b->seal_wanted, &attr);
    pthread_condattr_destroy(&attr);
    b->daemon.fd = -1;
    b->arena.fd = -1;
    b->listen_fd = -1;
    b->writing_index = -1;
    b->wanted_new = 1;
    b->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    b->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (b->event_fd < 0 || b->wake_fd < 0) {
        return bl_err_code(msg, -errno, "eventfd");
    }
    return 0;
}

static int session_make(struct belay *b, const struct belay_config *config, struct bl_errmsg *msg)
{
    struct wire_session_config session = {
        .run = b->run,
        .incarnation = b->incarnation,
        .function_id = config->function_id,
        .probe = config->probe,
    };
    const char *endpoint = config->endpoint ? config->endpoint : "";
    if (strlen(endpoint) >= sizeof(session.endpoint)) {
        return bl_err(msg, -EINVAL, "endpoint of %zu bytes, at most %zu", strlen(endpoint),
                      sizeof(session.endpoint) - 1);
    }
    memcpy(session.endpoint, endpoint, strlen(endpoint) + 1);
    b->listen_fd = wire_tcp_listen("127.0.0.1:0", session.vote_addr, msg);
    if (b->listen_fd < 0) {
        return b->listen_fd;
    }
    b->session = wire_session_new(&session);
    return b->session ? 0 : bl_err(msg, -ENOMEM, "out of memory for the session");
}

/* The trainer's signal handlers stay with the trainer's threads. */
static int threads_start(struct belay *b, struct bl_errmsg *msg)
{
    sigset_t all;
    sigset_t old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&b->control, NULL, lb_control_main, b);
    if (!rc) {
        b->threads = 1;
        rc = pthread_create(&b->sealer, NULL, lb_seal_main, b);
        b->threads += !rc;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc ? bl_err_code(msg, -rc, "start a thread") : 0;
}

static void job_free(struct belay *b)
{
    pthread_mutex_lock(&b->lock);
    b->quit = 1;
    pthread_cond_broadcast(&b->seal_wanted);
    pthread_mutex_unlock(&b->lock);
    lb_wake(b);
    if (b->threads > 0) {
        pthread_join(b->control, NULL);
    }
    if (b->threads > 1) {
        pthread_join(b->sealer, NULL);
    }
    lb_votes_close(b);
    wire_sock_close(&b->daemon);
    wire_session_free(b->session);
    lb_arena_close(&b->arena);
    bl_extent_list_close(&b->wanted);
    wire_plan_close(&b->plan);
    free(b->wanted_at);
    free(b->peers);
    free(b->job_json);
    int fds[] = {b->event_fd, b->wake_fd, b->listen_fd};
    for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++) {
        if (fds[i] >= 0) {
            close(fds[i]);
        }
    }
    if (b->page && !b->page_shared) {
        munmap(b->page, WIRE_PAGE_BYTES);
    }
    pthread_cond_destroy(&b->changed);
    pthread_cond_destroy(&b->seal_wanted);
    pthread_mutex_destroy(&b->lock);
    free(b);
}

/* ---- plans ---- */

static void event_clear(struct belay *b)
{
    uint64_t count;
    BL_IGNORE(read(b->event_fd, &count, sizeof(count)) < 0, "not set is as good");
}

/* Copies the session's plan and describes it to the trainer. Under lock. */
static int plan_take(struct belay *b, struct belay_plan *ret)
{
    wire_plan_close(&b->plan);
    free(b->peers);
    b->peers = NULL;
    int rc = wire_plan_copy(&b->plan, wire_session_plan(b->session, &b->rank));
    if (!rc) {
        b->peers = calloc(b->plan.world, sizeof(*b->peers));
        rc = b->peers ? 0 : -ENOMEM;
    }
    if (rc) {
        return bl_err(&b->error, rc, "out of memory for a plan of %u ranks", b->plan.world);
    }
    for (uint32_t i = 0; i < b->plan.world; i++) {
        const struct wire_member *member = &b->plan.members[i];
        b->peers[i] = (struct belay_peer){member->endpoint, member->node, member->incarnation};
    }
    struct belay_plan plan = {
        .version = BELAY_VERSION_ABI,
        .run = b->run,
        .generation = b->plan.generation,
        .line = b->plan.line,
        .step = b->plan.step,
        .fresh = b->plan.fresh,
        .rank = b->rank,
        .world = b->plan.world,
        .lanes = b->lanes,
        .load_deadline_ms = b->load_deadline_ms,
        .comm_key = {b->plan.comm_key[0], b->plan.comm_key[1]},
        .peers = b->peers,
        .job_json = b->job_json,
        .save_every = b->plan.save_every,
        .tp = b->plan.tp ? b->plan.tp : 1,
        .pp = b->plan.pp ? b->plan.pp : 1,
    };
    plan.size = ret->size && ret->size < sizeof(plan) ? ret->size : (uint32_t)sizeof(plan);
    memcpy(ret, &plan, plan.size);
    b->planned = 0;
    b->loaded = 0;
    b->wanted_new = 1;
    return 0;
}

/* Parks (unless `parked`: there is nothing to leave yet) and waits for a plan with this process as
 * a member. Under lock. */
static int plan_wait(struct belay *b, struct belay_plan *ret, int parked)
{
    for (;;) {
        if (b->refused) {
            return bl_err(&b->error, BL_ECONFIG, "refused: %s", wire_session_text(b->session));
        }
        if (b->stopped) {
            return bl_err(&b->error, BL_ESTOPPED, "the run is over");
        }
        if (b->over || !parked) { /* a plan that is over before it began is left again */
            parked = 1;
            b->over = b->go = b->planned = 0;
            event_clear(b);
            int rc = wire_session_plan(b->session, NULL) ? wire_session_park(b->session) : 0;
            lb_pump(b);
            if (rc) {
                return bl_err(&b->error, rc, "a slot is begun and not sealed");
            }
        }
        if (b->planned) {
            return plan_take(b, ret);
        }
        lb_wait(b, UINT64_MAX);
    }
}

int belay_join(const struct belay_config *config, struct belay **job, struct belay_plan *plan)
{
    memset(&join_error, 0, sizeof(join_error));
    *job = NULL;
    struct belay *b = calloc(1, sizeof(*b));
    if (!b) {
        return bl_err(&join_error, -ENOMEM, "out of memory");
    }
    b->slot_count = config->slot_count ? config->slot_count : LB_SLOTS;
    int rc = job_init(b, &join_error);
    if (!rc && (b->slot_count < LB_SLOTS || b->slot_count > WIRE_SLOTS_MAX)) {
        rc = bl_err(&join_error, -EINVAL, "%u slots; %d to %d are possible", b->slot_count,
                    LB_SLOTS, WIRE_SLOTS_MAX);
    }
    if (!rc) {
        rc = env_read(b, &join_error);
    }
    if (!rc) {
        rc = page_open(b, &join_error);
    }
    if (!rc) {
        rc = lb_link_join(b, &join_error);
    }
    if (!rc) {
        rc = session_make(b, config, &join_error);
    }
    if (!rc) {
        rc = threads_start(b, &join_error);
    }
    if (!rc) {
        pthread_mutex_lock(&b->lock);
        rc = plan_wait(b, plan, 1);
        pthread_mutex_unlock(&b->lock);
        join_error = b->error;
    }
    if (rc && rc != BL_ESTOPPED) {
        job_free(b);
        return rc;
    }
    *job = b;
    return rc;
}

int belay_next(struct belay *job, struct belay_plan *plan)
{
    pthread_mutex_lock(&job->lock);
    lb_wait_seal(job);
    job->writing_index = -1;
    int rc = plan_wait(job, plan, 0);
    pthread_mutex_unlock(&job->lock);
    return rc;
}

int belay_leave(struct belay *job, int code)
{
    int rc = 0;
    pthread_mutex_lock(&job->lock);
    lb_wait_seal(job);
    job->ending = 1;
    if (!job->refused) {
        wire_session_leave(job->session, code);
        lb_pump(job);
        while (!job->leave && !job->refused && !(job->over && !job->stopped)) {
            lb_wait(job, UINT64_MAX);
        }
        if (!job->leave && !job->refused) {
            job->ending = 0;
            rc = bl_err(&job->error, BL_EGEN, "a new generation was called before the run let go");
        }
    }
    pthread_mutex_unlock(&job->lock);
    if (!rc) {
        job_free(job);
    }
    return rc;
}
