/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/replica.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"

struct replica {
    struct daemon *daemon;
    struct conn *conn;    /* of the standby; NULL: not connected */
    int lost;             /* told, until it confirms again */
    uint64_t sent, acked; /* tickets; the frame's revision field carries the key's own */
    uv_timer_t *timer;    /* runs while something is unconfirmed */
};

struct ack { /* a standby's change on its way to the disk */
    struct daemon *daemon;
    uint64_t epoch, run, ticket;
};

static void on_freed(uv_handle_t *handle)
{
    free(handle);
}

static void replica_lose(struct replica *replica, const char *reason)
{
    if (!replica->lost) {
        replica->lost = 1;
        event(replica->daemon->events, EVENT_STANDBY_LOST, "standby=%s reason=%s",
              replica->daemon->config.standby, reason);
    }
    uv_timer_stop(replica->timer);
    replica->acked = replica->sent;
    store_release(replica->daemon->store, replica->sent);
}

static void on_deadline(uv_timer_t *timer)
{
    replica_lose(timer->data, "no confirmation in time");
}

static void replica_send(struct replica *replica, uint64_t ticket, const char *key,
                         const void *value, size_t bytes, uint64_t revision)
{
    struct wire_store_replica change = {.head_epoch = replica->daemon->head_epoch,
                                        .run = ticket,
                                        .revision = revision,
                                        .value = (uint8_t *)(uintptr_t)value,
                                        .value_bytes = bytes};

    snprintf(change.key, sizeof(change.key), "%s", key);
    if (conn_send(replica->conn, WIRE_TYPE_STORE_REPLICA, &change, 0, NULL, 0) != 0) {
        replica_lose(replica, "it does not read");
    }
}

/* A change is durable here. */
static void on_change(void *arg, uint64_t ticket, const char *key, const void *value, size_t bytes,
                      uint64_t revision)
{
    struct replica *replica = arg;

    replica->sent = ticket;
    if (!replica->conn) {
        replica_lose(replica, "not connected");
        return;
    }
    replica_send(replica, ticket, key, value, bytes, revision);
    if (replica->lost) {
        replica_lose(replica, "");
    } else if (!uv_is_active((uv_handle_t *)replica->timer)) {
        uv_timer_start(replica->timer, on_deadline, bl_time_scaled_ms(REPLICA_WAIT_MS), 0);
    }
}

static int send_each(void *arg, const char *key, uint64_t revision, const void *value, size_t bytes)
{
    struct replica *replica = arg;

    replica_send(replica, replica->sent, key, value, bytes, revision);
    return 0;
}

void replica_node_up(struct daemon *daemon, const char *node, struct conn *conn)
{
    struct replica *replica = daemon->replica;
    struct bl_errmsg msg = {{0}};

    if (!replica || strcmp(node, daemon->config.standby) != 0) {
        return;
    }
    replica->conn = conn;
    if (store_each(daemon->store, "", send_each, replica, &msg) != 0) {
        bl_log(BL_LOG_ERROR, "replica", "%s", msg.text);
        return;
    }
    if (replica->lost) {
        replica->lost = 0;
        event(daemon->events, EVENT_STANDBY_BACK, "standby=%s", node);
    }
}

void replica_node_down(struct daemon *daemon, const char *node)
{
    struct replica *replica = daemon->replica;

    if (replica && strcmp(node, daemon->config.standby) == 0) {
        replica->conn = NULL;
        replica_lose(replica, "its connection closed");
    }
}

int replica_on_ack(struct daemon *daemon, const char *node, const struct wire_frame *frame)
{
    struct replica *replica = daemon->replica;
    struct wire_store_ack ack;
    int rc = wire_store_ack_decode(&ack, frame->payload, frame->payload_bytes, NULL);

    if (rc != 0 || !replica || strcmp(node, daemon->config.standby) != 0) {
        return rc ? rc : BL_EPROTO;
    }
    if (ack.rc != 0) {
        replica_lose(replica, ack.text);
    } else if (ack.run > replica->acked) {
        replica->acked = ack.run;
        store_release(daemon->store, ack.run);
        if (replica->acked == replica->sent) {
            uv_timer_stop(replica->timer);
        }
    }
    return 0;
}

/* ---- the standby's side ---- */

static void on_applied(void *arg, int rc, uint64_t revision, const char *text)
{
    struct ack *ack = arg;
    struct conn *head = control_head(ack->daemon);
    struct wire_store_ack answer = {
        .head_epoch = ack->epoch, .run = ack->ticket, .revision = revision, .rc = rc};

    snprintf(answer.text, sizeof(answer.text), "%s", text);
    if (head) {
        BL_IGNORE(conn_send(head, WIRE_TYPE_STORE_ACK, &answer, 0, NULL, 0) != 0,
                  "the head's deadline takes care of it");
    }
    free(ack);
}

int replica_on_change(struct daemon *daemon, struct conn *conn, const struct wire_frame *frame)
{
    struct wire_store_replica change;
    int rc = wire_store_replica_decode(&change, frame->payload, frame->payload_bytes, NULL);

    (void)conn;
    if (rc != 0) {
        return rc;
    }
    struct ack *ack = calloc(1, sizeof(*ack));

    BL_ASSERT(ack != NULL);
    *ack = (struct ack){daemon, change.head_epoch, change.run, change.run};
    if (change.head_epoch < daemon->head_epoch) {
        on_applied(ack, BL_ECONFLICT, 0, "an older head");
    } else {
        rc = store_apply(daemon->store, change.key, change.revision,
                         change.value ? (void *)change.value : (void *)"", change.value_bytes,
                         on_applied, ack);
        if (rc != 0) {
            on_applied(ack, rc, 0, bl_strerror(rc));
        }
    }
    wire_store_replica_free(&change);
    return 0;
}

const char *replica_state(const struct daemon *daemon)
{
    const struct replica *replica = daemon->replica;

    return !replica ? "none" : replica->lost || !replica->conn ? "lost" : "in step";
}

int replica_open(struct daemon *daemon, struct bl_errmsg *msg)
{
    struct replica *replica;

    if (!daemon->is_head || daemon->config.standby[0] == '\0') {
        return 0;
    }
    replica = calloc(1, sizeof(*replica));
    if (!replica || !(replica->timer = calloc(1, sizeof(*replica->timer)))) {
        free(replica);
        return bl_err_code(msg, -ENOMEM, "standby");
    }
    replica->daemon = daemon;
    uv_timer_init(daemon->loop, replica->timer);
    replica->timer->data = replica;
    daemon->replica = replica;
    store_replicate(daemon->store, on_change, replica);
    return 0;
}

void replica_close(struct daemon *daemon)
{
    struct replica *replica = daemon->replica;

    if (replica) {
        store_replicate(daemon->store, NULL, NULL);
        uv_close((uv_handle_t *)replica->timer, on_freed);
        free(replica);
        daemon->replica = NULL;
    }
}
