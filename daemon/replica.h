/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The standby: on the head, changes of the store wait until the daemon named by --standby has them
 * durably too, for a bounded time; without it they count alone, which is told by an event and in
 * the status. On the standby, the head's changes go into a store of its own.
 */
#ifndef DAEMON_REPLICA_H
#define DAEMON_REPLICA_H

#include "daemon/daemon.h"

#define REPLICA_WAIT_MS 1000 /* for one confirmation; then the standby counts as lost */

BL_MUST_CHECK int replica_open(struct daemon *daemon, struct bl_errmsg *msg);
void replica_close(struct daemon *daemon);
/* A node's daemon connected (the standby gets the whole store), or went. */
void replica_node_up(struct daemon *daemon, const char *node, struct conn *conn);
void replica_node_down(struct daemon *daemon, const char *node);
/* Head: the standby confirms. Standby: the head sends a change. */
BL_MUST_CHECK int replica_on_ack(struct daemon *daemon, const char *node,
                                 const struct wire_frame *frame);
BL_MUST_CHECK int replica_on_change(struct daemon *daemon, struct conn *conn,
                                    const struct wire_frame *frame);
/* "none", "in step", "lost": for the status. */
const char *replica_state(const struct daemon *daemon);

#endif
