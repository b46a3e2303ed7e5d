/* SPDX-License-Identifier: Apache-2.0 */
/* One message of the communicator: queues, matching, early messages; point to point. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/comm_host.h"

/* ---- queues ---- */

void comm_queue_init(struct comm_queue *queue)
{
    queue->first = NULL;
    queue->last = &queue->first;
}

static void queue_add(struct comm_queue *queue, struct comm_request *request)
{
    request->next = NULL;
    *queue->last = request;
    queue->last = &request->next;
}

static void queue_remove(struct comm_queue *queue, struct comm_request *request)
{
    struct comm_request **at = &queue->first;
    while (*at != request) {
        at = &(*at)->next;
    }
    *at = request->next;
    if (queue->last == &request->next) {
        queue->last = at;
    }
}

/* The first one of a channel and tag. */
static struct comm_request *queue_find(const struct comm_queue *queue,
                                       const struct comm_frame *frame)
{
    struct comm_request *r = queue->first;
    while (r != NULL && (r->frame.channel != frame->channel || r->frame.tag != frame->tag)) {
        r = r->next;
    }
    return r;
}

void comm_request_finish(struct comm_queue *queue, struct comm_request *request)
{
    queue_remove(queue, request);
    request->is_done = 1;
    if (request->open != NULL) {
        --*request->open;
    }
}

/* ---- matching ---- */

static int size_error(uint32_t peer, const struct comm_frame *sent, uint64_t expected,
                      struct bl_errmsg *msg)
{
    if (sent->channel == COMM_TAGGED) {
        return bl_err(msg, BL_EPROTO, "rank %u sent %llu bytes of tag %llu, expected %llu", peer,
                      (unsigned long long)sent->bytes, (unsigned long long)sent->tag,
                      (unsigned long long)expected);
    }
    return bl_err(msg, BL_EPROTO, "rank %u sent %llu bytes in collective %llu, expected %llu", peer,
                  (unsigned long long)sent->bytes, (unsigned long long)(sent->tag / COMM_STREAMS),
                  (unsigned long long)expected);
}

/* A collective waits for this pair: what comes must be of that collective. */
static int check_collective(const struct comm_link *link, uint32_t peer,
                            const struct comm_frame *sent, struct bl_errmsg *msg)
{
    const struct comm_request *r = link->recvs.first;
    while (r != NULL && r->frame.channel == COMM_TAGGED) {
        r = r->next;
    }
    if (r == NULL || sent->channel == COMM_TAGGED) {
        return 0;
    }
    if (r->frame.channel != sent->channel) {
        return bl_err(msg, BL_EPROTO, "rank %u is in a collective of another group", peer);
    }
    if (r->frame.tag / COMM_STREAMS != sent->tag / COMM_STREAMS) {
        return bl_err(msg, BL_EPROTO,
                      "rank %u is in collective %llu of the group, this one in %llu", peer,
                      (unsigned long long)(sent->tag / COMM_STREAMS),
                      (unsigned long long)(r->frame.tag / COMM_STREAMS));
    }
    return 0;
}

/* Whether the running call waits for a tagged message of this pair. */
static int is_tagged_wanted(const struct comm_queue *recvs)
{
    const struct comm_request *r = recvs->first;
    while (r != NULL && !(r->is_wanted && r->frame.channel == COMM_TAGGED)) {
        r = r->next;
    }
    return r != NULL;
}

static uint64_t early_cost(const struct comm_request *early)
{
    return sizeof *early + early->frame.bytes;
}

static void early_free(struct comm *c, struct comm_link *link, struct comm_request *early)
{
    c->early_bytes -= early_cost(early);
    queue_remove(&link->early, early);
    free(early);
}

/* Keeps the message at the head, if it fits. */
static int keep_early(struct comm *c, struct comm_link *link, struct bl_errmsg *msg)
{
    uint64_t room = c->early_bytes_max - c->early_bytes;
    if (room < sizeof(struct comm_request) || room - sizeof(struct comm_request) < link->in.bytes) {
        link->is_stuck = COMM_FULL;
        return 0;
    }
    struct comm_request *early = calloc(1, sizeof *early + link->in.bytes);
    if (early == NULL) {
        return bl_err_code(msg, -ENOMEM, "message of %llu bytes",
                           (unsigned long long)link->in.bytes);
    }
    early->frame = link->in;
    early->is_early = 1;
    early->data = (uint8_t *)(early + 1);
    c->early_bytes += early_cost(early);
    queue_add(&link->early, early);
    link->to = early;
    return 0;
}

int comm_link_match(struct comm *comm, uint32_t peer, struct bl_errmsg *msg)
{
    struct comm_link *link = &comm->links[peer];
    struct comm_request *r = queue_find(&link->recvs, &link->in);
    if (r != NULL) {
        link->to = r;
        return r->frame.bytes == link->in.bytes ? 0
                                                : size_error(peer, &link->in, r->frame.bytes, msg);
    }
    int rc = check_collective(link, peer, &link->in, msg);
    if (rc != 0) {
        return rc;
    }
    if (link->in.channel != COMM_TAGGED && !is_tagged_wanted(&link->recvs)) {
        link->is_stuck = COMM_AHEAD;
        return 0;
    }
    return keep_early(comm, link, msg);
}

void comm_link_arrived(struct comm_link *link)
{
    struct comm_request *r = link->to;
    link->to = NULL;
    link->in_bytes = 0;
    if (r->is_early) {
        r->is_done = 1;
    } else {
        comm_request_finish(&link->recvs, r);
    }
}

/* ---- starting ---- */

static void unstick(struct comm *c, uint32_t peer)
{
    c->links[peer].is_stuck = COMM_MOVES;
    comm_link_wake(c, peer);
}

/* A receive takes over what came before it, whole or in part. */
static int take_early(struct comm *c, struct comm_link *link, struct comm_request *request,
                      struct comm_request *early, struct bl_errmsg *msg)
{
    if (early->frame.bytes != request->frame.bytes) {
        return size_error(request->peer, &early->frame, request->frame.bytes, msg);
    }
    if (early->done > 0) {
        memcpy(request->data, early->data, early->done);
    }
    request->done = early->done;
    queue_add(&link->recvs, request);
    if (early->is_done) {
        comm_request_finish(&link->recvs, request);
    } else {
        link->to = request;
    }
    early_free(c, link, early);
    for (uint32_t i = 0; i < c->world; i++) { /* what waited for room */
        if (c->links[i].is_stuck) {
            unstick(c, i);
        }
    }
    comm_link_wake(c, request->peer); /* its end must show, too */
    return 0;
}

int comm_recv_post(struct comm *comm, struct comm_request *request, struct bl_errmsg *msg)
{
    struct comm_link *link = &comm->links[request->peer];
    request->done = 0;
    request->is_done = 0;
    struct comm_request *early = queue_find(&link->early, &request->frame);
    if (early != NULL) {
        return take_early(comm, link, request, early, msg);
    }
    queue_add(&link->recvs, request);
    for (const struct comm_request *e = link->early.first; e != NULL; e = e->next) {
        int rc = check_collective(link, request->peer, &e->frame, msg);
        if (rc != 0) {
            return rc;
        }
    }
    unstick(comm, request->peer);
    return 0;
}

void comm_send_post(struct comm *comm, struct comm_request *request)
{
    request->done = 0;
    request->is_done = 0;
    queue_add(&comm->links[request->peer].sends, request);
    comm_link_wake(comm, request->peer);
}

/* ---- point to point ---- */

static struct comm_request *request_new(struct comm *c, uint32_t peer, uint64_t tag, void *data,
                                        uint64_t bytes)
{
    struct comm_request *r = c->spare;
    if (r != NULL) {
        c->spare = r->next;
    } else {
        r = calloc(1, sizeof *r);
        if (r == NULL) {
            return NULL;
        }
        r->made = c->made;
        c->made = r;
    }
    r->frame = (struct comm_frame){.channel = COMM_TAGGED, .tag = tag, .bytes = bytes};
    r->data = data;
    r->peer = peer;
    r->is_wanted = 0;
    r->is_engines = 0;
    return r;
}

/* Refuses a broken communicator; else *ret is the new message. */
static int request_make(struct comm_request **ret, struct comm *c, uint32_t peer, uint64_t tag,
                        void *data, uint64_t bytes, struct bl_errmsg *msg)
{
    BL_ASSERT(peer < c->world && peer != c->rank);
    int rc = comm_broken(c, msg);
    if (rc != 0) {
        return rc;
    }
    *ret = request_new(c, peer, tag, data, bytes);
    return *ret != NULL ? 0 : bl_err_code(msg, -ENOMEM, "message to rank %u", peer);
}

int comm_host_send(struct comm *comm, uint32_t to, uint64_t tag, const void *data, uint64_t bytes,
                   struct comm_request **ret, struct bl_errmsg *msg)
{
    struct comm_request *r;
    int rc = request_make(&r, comm, to, tag, (void *)(uintptr_t)data, bytes, msg);
    if (rc == 0) {
        comm_send_post(comm, r);
        comm_link_push(comm, to);
        *ret = r;
    }
    return rc;
}

int comm_host_recv(struct comm *comm, uint32_t from, uint64_t tag, void *data, uint64_t bytes,
                   struct comm_request **ret, struct bl_errmsg *msg)
{
    struct bl_errmsg why = {{0}};
    struct comm_request *r;
    int rc = request_make(&r, comm, from, tag, data, bytes, msg);
    if (rc != 0) {
        return rc;
    }
    rc = comm_recv_post(comm, r, &why);
    if (rc != 0) {
        return comm_fail(comm, rc, &why, msg);
    }
    *ret = r;
    return 0;
}

/* A message that the engine moves. */
static int engine_start(struct comm *comm, uint32_t peer, uint64_t tag, void *data, uint64_t bytes,
                        int is_send, struct comm_request **ret, struct bl_errmsg *msg)
{
    struct comm_request *r;
    int rc = request_make(&r, comm, peer, tag, data, bytes, msg);
    if (rc != 0) {
        return rc;
    }
    r->is_engines = 1;
    r->is_done = 1;
    rc = is_send ? comm_attached_send(comm, peer, r, msg) : comm_attached_recv(comm, peer, r, msg);
    if (rc == 0) {
        *ret = r;
    }
    return rc;
}

int comm_send_start(struct comm *comm, uint32_t to, uint64_t tag, const void *data, uint64_t bytes,
                    struct comm_request **ret, struct bl_errmsg *msg)
{
    return comm->engine == NULL
               ? comm_host_send(comm, to, tag, data, bytes, ret, msg)
               : engine_start(comm, to, tag, (void *)(uintptr_t)data, bytes, 1, ret, msg);
}

int comm_recv_start(struct comm *comm, uint32_t from, uint64_t tag, void *data, uint64_t bytes,
                    struct comm_request **ret, struct bl_errmsg *msg)
{
    return comm->engine == NULL ? comm_host_recv(comm, from, tag, data, bytes, ret, msg)
                                : engine_start(comm, from, tag, data, bytes, 0, ret, msg);
}

struct wait_list {
    struct comm_request *const *requests;
    uint32_t left; /* those behind are done */
};

static int is_list_over(void *ctx, struct bl_errmsg *msg)
{
    struct wait_list *list = ctx;
    (void)msg;
    while (list->left > 0 && list->requests[list->left - 1]->is_done) {
        list->left--;
    }
    return list->left == 0;
}

int comm_wait_all(struct comm *comm, struct comm_request *const *requests, uint32_t count,
                  struct bl_errmsg *msg)
{
    struct wait_list list = {requests, count};
    int rc = comm->engine == NULL ? 0 : comm_attached_wait(comm, requests, count, msg);
    for (uint32_t i = 0; i < count; i++) {
        if (!requests[i]->is_engines) {
            requests[i]->is_wanted = 1;
            unstick(comm, requests[i]->peer);
        }
    }
    rc = rc == 0 ? comm_drive(comm, is_list_over, &list, msg) : rc;
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        requests[i]->next = comm->spare;
        comm->spare = requests[i];
    }
    return rc;
}

int comm_wait(struct comm *comm, struct comm_request *request, struct bl_errmsg *msg)
{
    return request == NULL ? 0 : comm_wait_all(comm, &request, 1, msg);
}

int comm_is_done(const struct comm_request *request)
{
    return request == NULL || request->is_done;
}

void comm_requests_free(struct comm *comm)
{
    for (uint32_t i = 0; comm->links != NULL && i < comm->world; i++) {
        struct comm_request *next;
        for (struct comm_request *r = comm->links[i].early.first; r != NULL; r = next) {
            next = r->next;
            free(r);
        }
    }
    while (comm->made != NULL) {
        struct comm_request *r = comm->made;
        comm->made = r->made;
        free(r);
    }
}
