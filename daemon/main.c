/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "daemon/daemon.h"
#include "daemon/engine_client.h"
#include "daemon/notify.h"
#include "daemon/replica.h"
#include "daemon/status.h"
#include "wire/sock.h"

#define MAIN_STATUS_MS 1000 /* the service manager's status line */

struct main_handles {
    uv_signal_t term, interrupt, hangup;
    uv_timer_t watchdog, status;
};

uint64_t daemon_now_ms(void)
{
    return bl_boot_ns() / 1000000;
}

void daemon_hex(uint64_t value, char text[17])
{
    snprintf(text, 17, "%016llx", (unsigned long long)value);
}

uint64_t daemon_unhex(const char *text)
{
    return strtoull(text, NULL, 16);
}

/* ---- ending ---- */

static void on_store_closed(void *arg)
{
    (void)arg;
}

static void close_rest(uv_handle_t *handle, void *arg)
{
    (void)arg;
    if (!uv_is_closing(handle) && (handle->type == UV_SIGNAL || handle->type == UV_TIMER)) {
        uv_close(handle, NULL);
    }
}

static void daemon_stop(struct daemon *daemon, int signal_number)
{
    uint32_t ranks = 0;

    if (daemon->stopping) {
        return;
    }
    daemon->stopping = 1;
    for (uint32_t i = 0; i < daemon->run_count; i++) {
        ranks += daemon->runs[i]->proc_count;
    }
    notify_send("STOPPING=1\nSTATUS=leaving; %u ranks go on", ranks);
    event(daemon->events, EVENT_DAEMON_STOPPING, "node=%s pid=%d signal=%d ranks=%u",
          daemon->config.name, (int)getpid(), signal_number, ranks);
    unix_server_close(daemon);
    control_close(daemon);
    engine_close(daemon);
    replica_close(daemon);
    tools_close(daemon);
    while (daemon->run_count > 0) {
        run_close(daemon->runs[0]);
    }
    store_close(daemon->store, on_store_closed, NULL);
    uv_stop(daemon->loop);
}

static void on_signal(uv_signal_t *handle, int signal_number)
{
    daemon_stop(handle->data, signal_number);
}

static void on_hangup(uv_signal_t *handle, int signal_number)
{
    (void)handle;
    (void)signal_number; /* a terminal that closes is no reason to leave */
}

static void on_watchdog(uv_timer_t *timer)
{
    (void)timer;
    notify_send("WATCHDOG=1");
}

static void on_status(uv_timer_t *timer)
{
    struct daemon *daemon = timer->data;
    uint32_t ranks = 0;

    for (uint32_t i = 0; i < daemon->run_count; i++) {
        ranks += daemon->runs[i]->proc_count;
    }
    notify_send("STATUS=%s; %u jobs, %u ranks", daemon->is_head ? "head" : "member",
                daemon->run_count, ranks);
}

/* ---- starting ---- */

/* One daemon per state directory, for as long as the descriptor is open. */
static int state_lock(const struct daemon *daemon, struct bl_errmsg *msg)
{
    char path[1100], text[32] = "";
    int rc = bl_mkdir_p(daemon->config.state_dir, msg);

    if (rc != 0) {
        return rc;
    }
    snprintf(path, sizeof(path), "%s/lock", daemon->config.state_dir);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0640);

    if (fd < 0) {
        return bl_err_code(msg, -errno, "open %s", path);
    }
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        ssize_t n = read(fd, text, sizeof(text) - 1);

        text[n > 0 ? strcspn(text, "\n") : 0] = '\0';
        close(fd);
        return bl_err(msg, -EADDRINUSE,
                      "another belayd (pid %s) uses the state directory %s: end it, or use another "
                      "--state-dir",
                      text, daemon->config.state_dir);
    }
    BL_IGNORE(ftruncate(fd, 0) != 0, "the pid in it is for people");
    dprintf(fd, "%d\n", (int)getpid());
    return 0;
}

static void epoch_load(struct daemon *daemon)
{
    char path[1100], *text;
    size_t bytes;

    snprintf(path, sizeof(path), "%s/epoch", daemon->config.state_dir);
    if (bl_file_read(path, 64, &text, &bytes, NULL) == 0) {
        daemon->head_epoch = strtoull(text, NULL, 10);
        free(text);
    }
    if (daemon->is_head && daemon->head_epoch == 0) {
        daemon->head_epoch = 1;
    }
}

static int ports_publish(const struct daemon *daemon, struct bl_errmsg *msg)
{
    char path[1100], text[2048];
    int n = snprintf(text, sizeof(text),
                     "{\"schema\":1,\"pid\":%d,\"node\":\"%s\",\"control\":\"%s\",\"bulk\":\"%s\","
                     "\"socket\":\"%s\"}\n",
                     (int)getpid(), daemon->config.name, daemon->listen_addr, daemon->bulk_addr,
                     daemon->config.socket);

    snprintf(path, sizeof(path), "%s/ports.json", daemon->config.state_dir);
    return bl_file_write_atomic(path, text, (size_t)n, msg);
}

static int socket_dir_make(const char *socket_path, struct bl_errmsg *msg)
{
    char dir[1024];
    const char *slash = strrchr(socket_path, '/');

    snprintf(dir, sizeof(dir), "%.*s", (int)(slash - socket_path), socket_path);
    return dir[0] ? bl_mkdir_p(dir, msg) : 0;
}

static int daemon_start(struct daemon *daemon, struct bl_errmsg *msg)
{
    char path[1100];
    int rc = state_lock(daemon, msg);

    promote_load(daemon);
    epoch_load(daemon);
    rc = rc ? rc : events_open(&daemon->events, daemon->config.state_dir, daemon->config.name, msg);
    snprintf(path, sizeof(path), "%s/store.db", daemon->config.state_dir);
    rc = rc ? rc : store_open(&daemon->store, daemon->loop, path, msg);
    rc = rc ? rc : tools_open(daemon, msg);
    rc = rc ? rc : control_open(daemon, msg);
    rc = rc ? rc : bulk_open(daemon, msg);
    rc = rc ? rc : socket_dir_make(daemon->config.socket, msg);
    rc = rc ? rc : unix_server_open(daemon, msg);
    rc = rc ? rc : ports_publish(daemon, msg);
    rc = rc ? rc : replica_open(daemon, msg);
    if (rc != 0) {
        return rc;
    }
    event(daemon->events, EVENT_DAEMON_STARTED, "node=%s pid=%d version=%s role=%s",
          daemon->config.name, (int)getpid(), BELAY_VERSION, daemon->is_head ? "head" : "member");
    status_load(daemon);
    adopt_scan(daemon);
    if (!daemon->is_head) {
        return 0;
    }
    rc = submit_load(daemon, msg);
    if (rc == 0) {
        submit_load_unborn(daemon);
    }
    return rc;
}

static void handles_start(struct daemon *daemon, struct main_handles *handles)
{
    uint64_t watchdog = notify_watchdog_ms();

    uv_signal_init(daemon->loop, &handles->term);
    uv_signal_init(daemon->loop, &handles->interrupt);
    uv_signal_init(daemon->loop, &handles->hangup);
    handles->term.data = handles->interrupt.data = daemon;
    uv_signal_start(&handles->term, on_signal, SIGTERM);
    uv_signal_start(&handles->interrupt, on_signal, SIGINT);
    uv_signal_start(&handles->hangup, on_hangup, SIGHUP);
    uv_timer_init(daemon->loop, &handles->watchdog);
    uv_timer_init(daemon->loop, &handles->status);
    handles->status.data = daemon;
    if (watchdog > 0) {
        uv_timer_start(&handles->watchdog, on_watchdog, 0, watchdog);
    }
    if (getenv("NOTIFY_SOCKET")) {
        uv_timer_start(&handles->status, on_status, MAIN_STATUS_MS, MAIN_STATUS_MS);
    }
}

int main(int argc, char **argv)
{
    static struct daemon daemon;
    static struct main_handles handles;
    struct bl_errmsg msg = {{0}};
    int rc = daemon_config_parse(&daemon.config, argc, argv, &msg);

    rc = rc ? rc : wire_tcp_addr_check(daemon.config.listen, &msg);
    rc = rc ? rc : wire_tcp_addr_check(daemon.config.bulk, &msg);
    rc = rc || !daemon.config.head[0] ? rc : wire_tcp_addr_check(daemon.config.head, &msg);
    if (rc != 0) {
        fprintf(stderr, "belayd: %s\n", msg.text);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    daemon.loop = uv_default_loop();
    daemon.incarnation = bl_random_u64() | 1;
    daemon.started_ms = daemon_now_ms();
    handles_start(&daemon, &handles);
    rc = daemon_start(&daemon, &msg);
    if (rc != 0) {
        fprintf(stderr, "belayd: %s\n", msg.text);
        return 3;
    }
    notify_send("READY=1");
    uv_run(daemon.loop, UV_RUN_DEFAULT);
    uv_walk(daemon.loop, close_rest, NULL);
    uv_run(daemon.loop, UV_RUN_NOWAIT);
    bulk_close(&daemon);
    status_close(&daemon);
    events_close(daemon.events);
    return 0;
}
