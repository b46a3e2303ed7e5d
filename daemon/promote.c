/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `belay promote`: the standby's daemon becomes the head. The head epoch is raised, durably, before
 * anything is led: every daemon and rank that has heard of it refuses older heads from then on. The
 * store that was kept here for the head has the runs.
 *
 * The old head's daemon, when it comes back, still believes that it leads. The new one calls at its
 * address until it has told it; it then steps down and becomes a member of the new head by itself.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "daemon/daemon.h"
#include "daemon/replica.h"
#include "wire/sock.h"

/* In the state directory: this daemon leads although its configuration names another head. */
#define PROMOTED_FILE "promoted"
/* In the state directory: the address of the head that took over from this daemon. */
#define DEPOSED_FILE "deposed"

static int count_each(void *arg, const char *key, uint64_t revision, const void *value,
                      size_t bytes)
{
    (void)key;
    (void)revision;
    (void)value;
    (void)bytes;
    ++*(uint32_t *)arg;
    return 0;
}

static int promoted_path(const struct daemon *daemon, char *ret, size_t bytes)
{
    return bl_path_join(ret, bytes, daemon->config.state_dir, PROMOTED_FILE);
}

static int promote_check(struct daemon *daemon, struct bl_errmsg *msg)
{
    uint32_t runs = 0;

    if (daemon->is_head) {
        return bl_err(msg, -EALREADY, "%s is the head already", daemon->config.name);
    }
    if (control_head(daemon)) {
        return bl_err(msg, -EBUSY, "the head at %s is connected: end its belayd first",
                      daemon->config.head);
    }
    int rc = store_each(daemon->store, "run/", count_each, &runs, msg);

    if (rc == 0 && runs == 0) {
        rc = bl_err(msg, BL_ENOSTATE,
                    "%s keeps no copy of the store: promote the daemon that the head named by "
                    "--standby",
                    daemon->config.name);
    }
    return rc;
}

static int promote_now(struct daemon *daemon, struct bl_errmsg *msg)
{
    char path[1100], text[32];
    uint64_t epoch = daemon->head_epoch + 1;
    int n = snprintf(text, sizeof(text), "%llu\n", (unsigned long long)epoch);
    int rc = promote_check(daemon, msg);

    if (rc != 0) {
        return rc;
    }
    snprintf(path, sizeof(path), "%s/epoch", daemon->config.state_dir);
    rc = bl_file_write_atomic(path, text, (size_t)n, msg);
    if (rc == 0 && promoted_path(daemon, path, sizeof(path)) == 0) {
        rc = bl_file_write_atomic(path, text, (size_t)n, msg);
    }
    if (rc != 0) {
        return rc;
    }
    if (bl_path_join(path, sizeof(path), daemon->config.state_dir, DEPOSED_FILE) == 0) {
        unlink(path);
    }
    daemon->head_epoch = epoch;
    daemon->is_head = 1;
    control_head_seek(daemon);
    event(daemon->events, EVENT_PROMOTED, "node=%s epoch=%llu", daemon->config.name,
          (unsigned long long)epoch);
    return submit_load(daemon, msg);
}

void promote_request(struct daemon *daemon, struct conn *conn, const uint64_t id[2])
{
    struct bl_errmsg msg = {{0}};
    char json[64];
    int rc = promote_now(daemon, &msg);

    snprintf(json, sizeof(json), "{\"head_epoch\":%llu}", (unsigned long long)daemon->head_epoch);
    tool_link_reply(daemon, conn, id, rc, msg.text, rc ? NULL : json);
}

int promote_depose(struct daemon *daemon, uint64_t epoch, const char *addr)
{
    char path[1100];

    event(daemon->events, EVENT_OLD_HEAD, "head=%s epoch=%llu newest=%llu", daemon->config.name,
          (unsigned long long)daemon->head_epoch, (unsigned long long)epoch);
    if (addr[0] == '\0' || wire_tcp_addr_check(addr, NULL) != 0) {
        return -EINVAL;
    }
    daemon->is_head = 0;
    snprintf(daemon->config.head, sizeof(daemon->config.head), "%s", addr);
    if (bl_path_join(path, sizeof(path), daemon->config.state_dir, DEPOSED_FILE) != 0 ||
        bl_file_write_atomic(path, addr, strlen(addr), NULL) != 0) {
        bl_log(BL_LOG_WARN, "promote", "cannot remember the new head %s", addr);
    }
    if (promoted_path(daemon, path, sizeof(path)) == 0) {
        unlink(path);
    }
    replica_close(daemon);
    for (uint32_t i = daemon->run_count; i > 0; i--) {
        struct run *run = daemon->runs[i - 1];

        if (run->leader) {
            core_leader_free(run->leader);
            run->leader = NULL;
            core_member_on_link_down(run->member, daemon_now_ms());
            run_pump(run);
        }
    }
    control_head_seek(daemon);
    return 0;
}

void promote_load(struct daemon *daemon)
{
    char path[1100], *text;
    size_t bytes;

    if (bl_path_join(path, sizeof(path), daemon->config.state_dir, DEPOSED_FILE) == 0 &&
        bl_file_read(path, WIRE_ADDR_MAX - 1, &text, &bytes, NULL) == 0) {
        snprintf(daemon->config.head, sizeof(daemon->config.head), "%s", text);
        free(text);
    }
    daemon->is_head = daemon->config.head[0] == '\0' ||
                      (promoted_path(daemon, path, sizeof(path)) == 0 && access(path, F_OK) == 0);
}
