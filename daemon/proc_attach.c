/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reaching shims, and losing them.
 *
 * A generation is over when one of its ranks is known to be dead, so nobody may be called dead that
 * is not. A connection that breaks is no proof: the shim is tried again. Only when nobody listens
 * any more is the shim gone; its rank is then killed (PDEATHSIG does it too) and its end waited for
 * on a pidfd.
 *
 *      connection breaks -> connect again -> answers: goes on
 *                                |
 *                                +-> refused: SHIM_LOST, SIGKILL -> pidfd readable -> exited
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/log.h"
#include "daemon/proc.h"

/* A shim listens, and answers, within this; one that does not is killed, and its rank with it. */
#define PROC_ATTACH_MS 10000
#define PROC_RETRY_MS  5

static void on_freed(uv_handle_t *handle)
{
    free(handle);
}

/* ---- the rank without its shim ---- */

/* Is `pid` a child of `parent` now? */
static int is_child(uint32_t pid, uint32_t parent)
{
    char path[64], text[512];
    int have = 0;

    snprintf(path, sizeof(path), "/proc/%u/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof(text) - 1) : -1;

    if (fd >= 0) {
        close(fd);
    }
    text[n > 0 ? n : 0] = '\0';
    const char *end = strrchr(text, ')'); /* the name before it may hold anything */

    return end && sscanf(end + 1, " %*c %d", &have) == 1 && have == (int)parent;
}

void proc_watch_open(struct proc *proc)
{
    proc->pidfd = (int)syscall(SYS_pidfd_open, (pid_t)proc->pid, 0);
    /* Looked at after: a number that was given to another process has another parent. */
    if (proc->pidfd >= 0 && !is_child(proc->pid, proc->shim_pid)) {
        close(proc->pidfd);
        proc->pidfd = -1;
    }
}

void proc_watch_end(struct proc *proc)
{
    if (proc->dying) {
        uv_close((uv_handle_t *)proc->dying, on_freed);
        proc->dying = NULL;
    }
    if (proc->pidfd >= 0) {
        close(proc->pidfd);
        proc->pidfd = -1;
    }
}

static void on_dead(uv_poll_t *poll, int status, int events)
{
    struct proc *proc = poll->data;
    struct wire_exit ex;

    (void)status;
    (void)events;
    proc_watch_end(proc);
    proc_exit_record_read(proc, &ex);
    proc_exited(proc, &ex, "its shim was lost");
}

static void shim_lost(struct proc *proc)
{
    char hex[17];

    daemon_hex(proc->incarnation, hex);
    event(proc->run->daemon->events, EVENT_SHIM_LOST, "job=%s rank=%u pid=%u incarnation=%s",
          proc->run->name, proc->rank, proc->pid, hex);
    proc->dying = proc->pidfd >= 0 ? calloc(1, sizeof(*proc->dying)) : NULL;
    if (proc->dying && uv_poll_init(proc->run->daemon->loop, proc->dying, proc->pidfd) == 0) {
        BL_IGNORE(syscall(SYS_pidfd_send_signal, proc->pidfd, SIGKILL, NULL, 0) != 0,
                  "it is dead already");
        proc->dying->data = proc;
        uv_poll_start(proc->dying, UV_READABLE, on_dead);
        return;
    }
    free(proc->dying);
    proc->dying = NULL;

    struct wire_exit ex;

    proc_exit_record_read(proc, &ex);
    proc_exited(proc, &ex, "its shim was lost");
}

/* ---- connecting ---- */

static int shim_connect(const char *path)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    const char *slash = strrchr(path, '/');
    int dir = -1, fd;

    if (strlen(path) < sizeof(addr.sun_path)) {
        snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
    } else { /* a socket's path has 107 bytes at most: through the directory's descriptor */
        char text[1024];

        snprintf(text, sizeof(text), "%.*s", (int)(slash - path), path);
        dir = open(text, O_PATH | O_DIRECTORY | O_CLOEXEC);
        snprintf(addr.sun_path, sizeof(addr.sun_path), "/proc/self/fd/%d/%.80s", dir, slash + 1);
    }
    /* A stopped shim with a full backlog must not hold the loop: -EAGAIN then, tried again. */
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&addr, sizeof(addr)) != 0) {
        int rc = -errno;

        close(fd);
        fd = rc;
    } else if (fd < 0) {
        fd = -errno;
    }
    if (dir >= 0) {
        close(dir);
    }
    return fd;
}

uint32_t proc_shim_end(const char *path)
{
    struct ucred peer = {0};
    socklen_t bytes = sizeof(peer);
    int fd = shim_connect(path), rc = -1;

    if (fd >= 0) { /* who is connected to lives, so that the number is its own */
        rc = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes);
    }
    if (rc == 0 && peer.pid > 1) {
        kill(peer.pid, SIGKILL);
    }
    if (fd >= 0) {
        close(fd);
    }
    return rc == 0 && peer.pid > 1 ? (uint32_t)peer.pid : 0;
}

static void shim_attach(struct proc *proc, int fd)
{
    struct daemon *daemon = proc->run->daemon;
    struct wire_hello hello = {.version = WIRE_FRAME_VERSION,
                               .role = WIRE_ROLE_DAEMON,
                               .run = proc->run->id,
                               .incarnation = daemon->incarnation};
    struct wire_shim_attach attach = {proc->run->id, proc->incarnation, daemon->incarnation};
    struct ucred peer = {0};
    socklen_t bytes = sizeof(peer);

    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0) {
        proc->shim_pid = (uint32_t)peer.pid;
    }
    proc->shim_conn = conn_new(daemon->loop, fd, daemon->incarnation, &proc_shim_ops, proc);
    if (!proc->shim_conn) {
        return;
    }
    conn_fds_allow(proc->shim_conn);
    snprintf(hello.node, sizeof(hello.node), "%s", daemon->config.name);
    snprintf(hello.build, sizeof(hello.build), "%s", BELAY_VERSION);
    BL_IGNORE(conn_send(proc->shim_conn, WIRE_TYPE_HELLO, &hello, 0, NULL, 0) != 0 ||
                  conn_send(proc->shim_conn, WIRE_TYPE_SHIM_ATTACH, &attach, 0, NULL, 0) != 0,
              "a broken connection is told by its closing");
}

/* Connected, and no answer: it hangs (stopped?). It goes, and its rank with it. */
static void on_late(uv_timer_t *timer)
{
    struct proc *proc = timer->data;

    bl_log(BL_LOG_WARN, "proc", "the shim (process %u) of rank %u does not answer: killed",
           proc->shim_pid, proc->rank);
    if (proc->shim_pid > 1) { /* still its own: the connection to it is open */
        kill((pid_t)proc->shim_pid, SIGKILL);
    }
}

static void attach_failed(struct proc *proc)
{
    struct wire_exit status;

    if (proc->state == PROC_LIVE) {
        shim_lost(proc);
    } else if (proc->adopted) { /* nobody listens: shim and rank are dead */
        proc_exit_record_read(proc, &status);
        proc_exited(proc, &status, "its shim was gone when the daemon came back");
    } else {
        proc_start_failed(proc, "its shim did not come up in time; see the .shim file beside its "
                                "socket");
    }
}

static void on_retry(uv_timer_t *timer)
{
    struct proc *proc = timer->data;
    uint64_t now = daemon_now_ms();
    char path[1200];

    if (proc->shim_conn) {
        return;
    }
    proc_path(proc, "sock", path, sizeof(path));
    int fd = shim_connect(path);

    if (fd >= 0) {
        uv_timer_start(timer, on_late,
                       proc->attach_until_ms > now ? proc->attach_until_ms - now : 1, 0);
        shim_attach(proc, fd);
        return;
    }
    /* One that listened before and does not now never will again. */
    int is_gone =
        (proc->adopted || proc->state == PROC_LIVE) && (fd == -ECONNREFUSED || fd == -ENOENT);

    if (is_gone || now >= proc->attach_until_ms) {
        uv_timer_stop(timer);
        attach_failed(proc);
    }
}

void proc_attach_begin(struct proc *proc)
{
    proc->attach_until_ms = daemon_now_ms() + bl_time_scaled_ms(PROC_ATTACH_MS);
    uv_timer_start(proc->timer, on_retry, PROC_RETRY_MS, PROC_RETRY_MS);
}

void proc_shim_closed(struct conn *conn, void *arg, const char *text)
{
    struct proc *proc = arg;

    (void)conn;
    proc->shim_conn = NULL;
    if (proc->state == PROC_EXITED) {
        return;
    }
    if (proc->state == PROC_LIVE && !proc->reattaching) {
        bl_log(BL_LOG_INFO, "proc", "connection of the shim of rank %u: %s", proc->rank, text);
        proc->reattaching = 1;
        proc_attach_begin(proc);
        on_retry(proc->timer); /* where nobody listens, the rank's end is not to wait */
    } else {                   /* within the same deadline */
        uv_timer_start(proc->timer, on_retry, PROC_RETRY_MS, PROC_RETRY_MS);
    }
}
