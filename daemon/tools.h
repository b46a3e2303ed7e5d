/* SPDX-License-Identifier: Apache-2.0 */
/* What tool_link.c and tool_wait.c share: the requests of `belay` under way. Loop thread. */
#ifndef DAEMON_TOOLS_H
#define DAEMON_TOOLS_H

#include "daemon/daemon.h"

#define TOOLS_FOLLOWERS_MAX 32
#define TOOLS_STORED_MAX    64
#define TOOLS_PASSED_MAX    64
#define TOOLS_BEHIND_MS     1000 /* a follower that does not read is looked at again */
#define TOOLS_NOTIFY_MS     100  /* followers hear of changes at most this often */

struct follower {
    struct conn *conn;
    uint64_t id[2];
    enum wire_verb verb;
    uint64_t since; /* events told */
};

struct stored { /* the answer to a request that changed something */
    uint64_t id[2];
    int rc;
    char *text, *json;
};

struct waiting { /* a save or stop whose answer comes when it is done */
    struct conn *conn;
    uint64_t id[2], run;
    enum wire_verb verb;
    uint64_t committed, failed; /* saves, when it was asked */
};

struct passed { /* a request that went to the head */
    struct conn *conn;
    uint64_t id[2];
};

struct tools {
    struct daemon *daemon;
    struct follower followers[TOOLS_FOLLOWERS_MAX];
    uint32_t follower_count;
    struct stored stored[TOOLS_STORED_MAX];
    uint32_t stored_next;
    struct waiting waiting[TOOLS_FOLLOWERS_MAX];
    uint32_t waiting_count;
    struct passed passed[TOOLS_PASSED_MAX];
    uint32_t passed_count;
    uv_timer_t *timer;
};

/* One answer to the request of this id. Texts are borrowed. */
void tools_answer(struct conn *conn, const uint64_t id[2], int rc, const char *text,
                  const char *json, uint32_t more);
/* The request's arguments as an object, empty when they are none. Owned. */
json_t *tools_args(const struct wire_request *request);

/* ---- tool_wait.c ---- */

/* Remembers that `conn` waits for the save or stop of `run`. */
void tools_wait_add(struct tools *tools, struct conn *conn, const struct wire_request *request,
                    const struct run *run);
/* Answers those whose save or stop is done, or can no longer be. */
void tools_wait_look(struct tools *tools);
/* A stop that is asked again after the run has stopped: 1 when it was answered. */
int tools_wait_stopped(struct tools *tools, struct conn *conn, const struct wire_request *request);
/* The request will not be answered by a wait / nobody waits on the connection any more. */
void tools_wait_forget(struct tools *tools, const uint64_t id[2]);
void tools_wait_gone(struct tools *tools, const struct conn *conn);

#endif
