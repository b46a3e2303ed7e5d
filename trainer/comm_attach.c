/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls that an attached engine serves. They get the frame that comm_drive gives the host's: a
 * broken communicator refuses, the flight recorder hears of each, the first error stays.
 */
#include "kernels/backend.h"
#include "trainer/comm_host.h"

void comm_attach(struct comm *comm, const struct comm_engine_ops *ops, struct comm_engine *engine)
{
    BL_ASSERT(comm->engine == NULL && engine != NULL);
    pthread_mutex_lock(&comm->engine_lock);
    comm->ops = ops;
    comm->engine = engine;
    if (comm_is_aborted(comm)) {
        ops->abort(engine);
    }
    pthread_mutex_unlock(&comm->engine_lock);
}

const struct comm_engine_ops *comm_engine_attached(const struct comm *comm)
{
    return comm->ops;
}

int comm_aborted_error(struct comm *comm, struct bl_errmsg *msg)
{
    struct bl_errmsg why = {{0}};
    int rc = comm->engine == NULL ? 0 : comm->ops->check(comm->engine, &why);
    if (rc != 0 && rc != BL_EABORTED) {
        return bl_err(msg, rc, "%s", why.text);
    }
    return bl_err_code(msg, BL_EABORTED, "call %llu", (unsigned long long)comm->calls);
}

/* ---- the frame of a call ---- */

static int enter(struct comm *c, struct bl_errmsg *msg)
{
    struct bl_errmsg why = {{0}};
    int rc = comm_broken(c, msg);
    if (rc != 0) {
        return rc;
    }
    if (comm_is_aborted(c)) {
        return comm_fail(c, comm_aborted_error(c, &why), &why, msg);
    }
    c->calls++;
    if (c->note != NULL) {
        c->note(c->note_ctx, c->calls, 1);
    }
    return 0;
}

static int leave(struct comm *c, int rc, const struct bl_errmsg *why, struct bl_errmsg *msg)
{
    if (rc != 0) {
        return comm_fail(c, rc, why, msg);
    }
    if (c->note != NULL) {
        c->note(c->note_ctx, c->calls, 0);
    }
    return 0;
}

int comm_check(struct comm *comm, struct bl_errmsg *msg)
{
    struct bl_errmsg why = {{0}};
    int rc = comm_broken(comm, msg);
    if (rc != 0 || comm->engine == NULL) {
        return rc;
    }
    rc = comm_is_aborted(comm) ? comm_aborted_error(comm, &why)
                               : comm->ops->check(comm->engine, &why);
    return rc == 0 ? 0 : comm_fail(comm, rc, &why, msg);
}

/* ---- groups ---- */

int comm_group_on_engine(struct comm_group **ret, struct comm *comm, const uint32_t *ranks,
                         uint32_t count, struct bl_errmsg *msg)
{
    struct bl_errmsg why = {{0}};
    struct comm_group *g;
    BL_ASSERT(comm->engine != NULL);
    int rc = comm_group_new(&g, comm, ranks, count, msg);
    if (rc != 0) {
        return rc;
    }
    rc = enter(comm, msg);
    if (rc == 0) {
        g->is_engines = 1;
        rc = count == 1 ? 0 : comm->ops->group_open(comm->engine, ranks, count, &g->engine, &why);
        rc = leave(comm, rc, &why, msg);
    }
    if (rc != 0) {
        comm_group_free(g);
        return rc;
    }
    *ret = g;
    return 0;
}

void comm_group_set_fast(struct comm_group *group)
{
    group->is_fast = 1;
}

int comm_attached_exchange(struct comm_group *group, const struct comm_part *sends,
                           const struct comm_part *recvs, struct bl_errmsg *msg)
{
    struct comm *c = group->comm;
    struct bl_errmsg why = {{0}};
    int rc = enter(c, msg);
    if (rc != 0) {
        return rc;
    }
    rc = group->engine == NULL ? 0 : c->ops->exchange(group->engine, sends, recvs, &why);
    return leave(c, rc, &why, msg);
}

int comm_attached_allgather(struct comm_group *group, void *base, const uint64_t *bounds,
                            struct bl_errmsg *msg)
{
    struct comm *c = group->comm;
    struct bl_errmsg why = {{0}};
    int rc = enter(c, msg);
    if (rc != 0) {
        return rc;
    }
    rc = group->engine == NULL ? 0 : c->ops->allgather(group->engine, base, bounds, &why);
    return leave(c, rc, &why, msg);
}

int comm_attached_broadcast(struct comm_group *group, uint32_t root, void *data, uint64_t bytes,
                            struct bl_errmsg *msg)
{
    struct comm *c = group->comm;
    struct bl_errmsg why = {{0}};
    int rc = enter(c, msg);
    if (rc != 0) {
        return rc;
    }
    rc = group->engine == NULL ? 0 : c->ops->broadcast(group->engine, root, data, bytes, &why);
    return leave(c, rc, &why, msg);
}

/* ---- sums, of the engine or the host ---- */

static int check_type(uint32_t type, struct bl_errmsg *msg)
{
    return type == KERN_F32 ? 0
                            : bl_err(msg, BL_ENOTBUILT, "sums over the host's memory are of fp32");
}

int comm_group_sum(struct comm_group *group, void *data, uint32_t type, uint64_t count,
                   struct bl_errmsg *msg)
{
    struct comm *c = group->comm;
    struct bl_errmsg why = {{0}};
    if (!group->is_engines) {
        int bad = check_type(type, msg);
        return bad != 0 ? bad : comm_group_sum_f32(group, data, count, msg);
    }
    int rc = enter(c, msg);
    if (rc != 0) {
        return rc;
    }
    rc = group->engine == NULL
             ? 0
             : c->ops->sum(group->engine, data, type, count, group->is_fast, &why);
    return leave(c, rc, &why, msg);
}

int comm_group_reduce_scatter(struct comm_group *group, void *data, uint32_t type,
                              const uint64_t *bounds, struct bl_errmsg *msg)
{
    struct comm *c = group->comm;
    struct bl_errmsg why = {{0}};
    if (!group->is_engines) {
        int bad = check_type(type, msg);
        return bad != 0 ? bad : comm_group_reduce_scatter_f32(group, data, bounds, msg);
    }
    int rc = enter(c, msg);
    if (rc != 0) {
        return rc;
    }
    rc = group->engine == NULL
             ? 0
             : c->ops->reduce_scatter(group->engine, data, type, bounds, group->is_fast, &why);
    return leave(c, rc, &why, msg);
}

/* ---- point to point ---- */

int comm_channels_open(struct comm *comm, const struct comm_channel *channels, uint32_t count,
                       struct bl_errmsg *msg)
{
    struct bl_errmsg why = {{0}};
    BL_ASSERT(comm->engine != NULL);
    int rc = enter(comm, msg);
    if (rc != 0) {
        return rc;
    }
    return leave(comm, comm->ops->channels_open(comm->engine, channels, count, &why), &why, msg);
}

/* An abort shows at the next collective, as with the host's: starting never waits. */
int comm_attached_send(struct comm *comm, uint32_t to, struct comm_request *request,
                       struct bl_errmsg *msg)
{
    struct bl_errmsg why = {{0}};
    int rc = comm->ops->send(comm->engine, to, request->frame.tag, request->data,
                             request->frame.bytes, &request->token, &why);
    return rc == 0 ? 0 : comm_fail(comm, rc, &why, msg);
}

int comm_attached_recv(struct comm *comm, uint32_t from, struct comm_request *request,
                       struct bl_errmsg *msg)
{
    struct bl_errmsg why = {{0}};
    int rc = comm->ops->recv(comm->engine, from, request->frame.tag, request->data,
                             request->frame.bytes, &request->token, &why);
    return rc == 0 ? 0 : comm_fail(comm, rc, &why, msg);
}

int comm_attached_wait(struct comm *comm, struct comm_request *const *requests, uint32_t count,
                       struct bl_errmsg *msg)
{
    struct bl_errmsg why = {{0}};
    int rc = comm_broken(comm, msg);
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        if (requests[i]->is_engines) {
            rc = comm->ops->wait(comm->engine, requests[i]->token, &why);
            rc = rc == 0 ? 0 : comm_fail(comm, rc, &why, msg);
        }
    }
    return rc;
}
