/* SPDX-License-Identifier: Apache-2.0 */
/* The host communicator: listener and life of a communicator. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "trainer/comm_host.h"

#define COMM_BACKLOG 128

/* ---- listener ---- */

static int listener_bind(struct comm_listener *l, const char *host, struct bl_errmsg *msg)
{
    struct sockaddr_in addr = {.sin_family = AF_INET};
    socklen_t len = sizeof addr;
    if (inet_pton(AF_INET, host, &addr.sin_addr) != 1) {
        return bl_err(msg, BL_ECONFIG, "communicator address %s is not an IPv4 address", host);
    }
    l->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (l->fd < 0 || bind(l->fd, (struct sockaddr *)&addr, len) != 0 ||
        listen(l->fd, COMM_BACKLOG) != 0 ||
        getsockname(l->fd, (struct sockaddr *)&addr, &len) != 0) {
        return bl_err_code(msg, -errno, "communicator listens on %s", host);
    }
    snprintf(l->endpoint, sizeof l->endpoint, "%s:%u", host, ntohs(addr.sin_port));
    return 0;
}

int comm_listener_open(struct comm_listener **ret, const char *host, struct bl_errmsg *msg)
{
    struct comm_listener *l = calloc(1, sizeof *l);
    if (l == NULL) {
        return bl_err_code(msg, -ENOMEM, "communicator");
    }
    l->fd = l->bell[0] = l->bell[1] = -1;
    int rc = pipe2(l->bell, O_CLOEXEC | O_NONBLOCK) == 0 ? 0 : -errno;
    if (rc != 0) {
        bl_err_code(msg, rc, "communicator's doorbell");
    } else {
        rc = listener_bind(l, host == NULL ? "127.0.0.1" : host, msg);
    }
    if (rc != 0) {
        comm_listener_close(l);
        return rc;
    }
    *ret = l;
    return 0;
}

const char *comm_listener_endpoint(const struct comm_listener *listener)
{
    return listener->endpoint;
}

void comm_listener_shut(struct comm_listener *listener)
{
    int *fds[3] = {&listener->fd, &listener->bell[0], &listener->bell[1]};
    for (int i = 0; i < 3; i++) {
        if (*fds[i] >= 0) {
            close(*fds[i]);
            *fds[i] = -1;
        }
    }
}

void comm_listener_close(struct comm_listener *listener)
{
    if (listener != NULL) {
        comm_listener_shut(listener);
        free(listener);
    }
}

/* ---- life ---- */

static int parse_endpoint(struct sockaddr_in *addr, const char *endpoint)
{
    char host[INET_ADDRSTRLEN];
    const char *colon = strchr(endpoint, ':');
    if (colon == NULL || (size_t)(colon - endpoint) >= sizeof host) {
        return BL_EFORMAT;
    }
    memcpy(host, endpoint, (size_t)(colon - endpoint));
    host[colon - endpoint] = 0;
    char *end;
    unsigned long port = strtoul(colon + 1, &end, 10);
    if (port == 0 || port > 65535 || (*end != 0 && *end != ';')) {
        return BL_EFORMAT;
    }
    memset(addr, 0, sizeof *addr);
    addr->sin_family = AF_INET;
    addr->sin_port = htons((uint16_t)port);
    return inet_pton(AF_INET, host, &addr->sin_addr) == 1 ? 0 : BL_EFORMAT;
}

static int take_memory(struct comm *c)
{
    size_t world = c->world;
    c->addrs = calloc(world, sizeof *c->addrs);
    c->local_index = calloc(world, sizeof *c->local_index);
    c->links = calloc(world, sizeof *c->links);
    c->shared = calloc(world, sizeof *c->shared);
    c->busy = calloc(world, sizeof *c->busy);
    if (c->addrs == NULL || c->local_index == NULL || c->links == NULL || c->shared == NULL ||
        c->busy == NULL) {
        return -ENOMEM;
    }
    for (size_t i = 0; i < world; i++) {
        struct comm_link *link = &c->links[i];
        link->fd = link->peer_bell = -1;
        comm_queue_init(&link->sends);
        comm_queue_init(&link->recvs);
        comm_queue_init(&link->early);
    }
    return 0;
}

static int take_peers(struct comm *c, const struct comm_peer *peers, struct bl_errmsg *msg)
{
    for (uint32_t i = 0; i < c->world; i++) {
        if (i != c->rank && parse_endpoint(&c->addrs[i], peers[i].endpoint) != 0) {
            return bl_err(msg, BL_EFORMAT, "rank %u has the endpoint \"%.60s\", not ADDRESS:PORT",
                          i, peers[i].endpoint);
        }
        int local = strcmp(peers[i].node, peers[c->rank].node) == 0;
        c->local_index[i] = local ? c->local_count++ : UINT32_MAX;
    }
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    c->spin_us = cpus > 0 && c->local_count <= (uint64_t)cpus ? COMM_SPIN_US : 0;
    return 0;
}

static int make_everyone(struct comm *c, struct bl_errmsg *msg)
{
    uint32_t *ranks = calloc(c->world, sizeof *ranks);
    if (ranks == NULL) {
        return bl_err_code(msg, -ENOMEM, "communicator of %u ranks", c->world);
    }
    for (uint32_t i = 0; i < c->world; i++) {
        ranks[i] = i;
    }
    int rc = comm_group_new(&c->everyone, c, ranks, c->world, msg);
    free(ranks);
    return rc;
}

int comm_new(struct comm **ret, struct comm_listener *listener, const struct comm_config *config,
             struct bl_errmsg *msg)
{
    if (config->world == 0 || config->world > COMM_RANKS_MAX || config->rank >= config->world) {
        return bl_err(msg, BL_ELIMIT, "rank %u of %u: at most %u ranks", config->rank,
                      config->world, COMM_RANKS_MAX);
    }
    struct comm *c = calloc(1, sizeof *c);
    if (c == NULL) {
        return bl_err_code(msg, -ENOMEM, "communicator");
    }
    c->listener = listener;
    c->rank = config->rank;
    c->world = config->world;
    c->generation = config->generation;
    c->key[0] = config->key[0];
    c->key[1] = config->key[1];
    c->op_deadline_ms = config->op_deadline_ms;
    c->is_private = config->is_private;
    c->note = config->note;
    c->note_ctx = config->note_ctx;
    c->early_bytes_max = config->early_bytes_max == 0 ? COMM_EARLY_BYTES : config->early_bytes_max;
    c->shm_fd = c->epoll_fd = -1;
    pthread_mutex_init(&c->engine_lock, NULL);
    int rc = take_memory(c);
    if (rc != 0) {
        bl_err_code(msg, rc, "communicator of %u ranks", config->world);
    } else {
        rc = take_peers(c, config->peers, msg);
    }
    if (rc == 0) {
        rc = make_everyone(c, msg);
    }
    if (rc != 0) {
        comm_free(c);
        return rc;
    }
    *ret = c;
    return 0;
}

int comm_connect(struct comm *comm, uint32_t deadline_ms, struct bl_errmsg *msg)
{
    uint64_t deadline_ns = bl_now_ns() + (uint64_t)deadline_ms * 1000000u;
    int rc = comm->world == 1 ? 0 : comm_shm_make(comm, msg);
    if (rc == 0 && comm->world > 1) {
        rc = comm_join_all(comm, deadline_ns, msg);
    }
    if (rc == 0) {
        rc = comm_progress_open(comm, msg);
    }
    if (rc != 0) {
        comm->broken = rc;
        bl_err_code(&comm->why, rc, "communicator is not connected");
    }
    return rc;
}

void comm_abort(struct comm *comm)
{
    pthread_mutex_lock(&comm->engine_lock);
    atomic_store(&comm->aborted, 1);
    if (comm->engine != NULL) {
        comm->ops->abort(comm->engine);
    }
    pthread_mutex_unlock(&comm->engine_lock);
    ssize_t n = write(comm->listener->bell[1], "", 1);
    (void)n; /* a full pipe wakes as well */
}

int comm_is_aborted(const struct comm *comm)
{
    return atomic_load(&comm->aborted);
}

/* After an error the end must reach the peer now, and not behind bytes that it does not take. */
static void link_close(const struct comm *c, struct comm_link *link)
{
    static const struct linger at_once = {.l_onoff = 1};
    if (link->fd >= 0) {
        if (c->broken != 0 || comm_is_aborted(c)) {
            setsockopt(link->fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        }
        close(link->fd);
    }
}

void comm_free(struct comm *comm)
{
    if (comm == NULL) {
        return;
    }
    if (comm->engine != NULL) {
        comm->ops->close(comm->engine);
    }
    pthread_mutex_destroy(&comm->engine_lock);
    comm_group_free(comm->everyone);
    comm_requests_free(comm);
    for (uint32_t i = 0; comm->links != NULL && i < comm->world; i++) {
        comm_shm_drop(&comm->links[i]);
        link_close(comm, &comm->links[i]);
    }
    if (comm->shm != NULL) {
        munmap(comm->shm, comm->shm_bytes);
    }
    if (comm->shm_fd >= 0) {
        close(comm->shm_fd);
    }
    if (comm->epoll_fd >= 0) {
        close(comm->epoll_fd);
    }
    free(comm->addrs);
    free(comm->local_index);
    free(comm->links);
    free(comm->shared);
    free(comm->busy);
    free(comm->channels);
    free(comm);
}

uint32_t comm_rank(const struct comm *comm)
{
    return comm->rank;
}

uint32_t comm_world(const struct comm *comm)
{
    return comm->world;
}

int comm_is_shared(const struct comm *comm, uint32_t peer)
{
    return peer < comm->world && comm->links[peer].shared;
}
