/* SPDX-License-Identifier: Apache-2.0 */
/* The engine over NCCL: its life, groups and channels. */
#include "trainer/comm_nccl.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"

#define HELLO_TAG   0x6e63000000000000u /* "nc": who is there, at open */
#define GROUP_TAG   0x6e67000000000000u /* "ng", and the group's list below */
#define CHANNEL_TAG 0x6e68000000000000u /* "nh", and the kind below */
#define MEET_US     200                 /* between looks whether a member has come */
#define NAMED_MAX   8                   /* of those who have not */

/* What members tell each other when they meet. */
struct note {
    uint64_t version; /* of NCCL, as its code */
    ncclUniqueId id;  /* of whoever makes it; zeros from the others */
};

/* ---- meeting ---- */

/* A message to each of some ranks, and one from each. */
struct meeting {
    const char *what;
    uint32_t count;
    struct comm_request **requests; /* `count` receives, then `count` sends */
    const uint32_t *ranks;
};

static int meeting_missing(struct comm_engine *e, const struct meeting *m, uint32_t deadline_ms,
                           struct bl_errmsg *msg)
{
    char names[128] = "";
    size_t at = 0;
    uint32_t missing = 0;
    for (uint32_t i = 0; i < m->count; i++) {
        if (comm_is_done(m->requests[i])) {
            continue;
        }
        if (missing++ < NAMED_MAX) {
            at += (size_t)snprintf(names + at, sizeof names - at, "%s%u", at > 0 ? ", " : "",
                                   m->ranks[i]);
        }
    }
    return nccl_fail(e, BL_EDEADLINE, msg, "NCCL: %s: rank %s%s did not come within %u ms", m->what,
                     names, missing > NAMED_MAX ? " and others" : "", deadline_ms);
}

static int is_met(const struct meeting *m)
{
    for (uint32_t i = 0; i < 2 * m->count; i++) {
        if (!comm_is_done(m->requests[i])) {
            return 0;
        }
    }
    return 1;
}

static int meeting_wait(struct comm_engine *e, const struct meeting *m, struct bl_errmsg *msg)
{
    const struct timespec pause = {.tv_nsec = MEET_US * 1000};
    struct bl_errmsg why = {{0}};
    uint64_t until = bl_now_ns() + (uint64_t)e->deadline_ms * 1000000u;
    while (!is_met(m)) {
        comm_poke(e->comm);
        int rc = comm_broken(e->comm, &why);
        if (rc == 0 && comm_is_aborted(e->comm)) {
            rc = bl_err_code(&why, BL_EABORTED, "NCCL: %s", m->what);
        }
        if (rc != 0) {
            return nccl_fail(e, rc, msg, "%s", why.text);
        }
        if (is_met(m)) {
            break;
        }
        if (bl_now_ns() > until) {
            return meeting_missing(e, m, e->deadline_ms, msg);
        }
        nanosleep(&pause, NULL);
    }
    return comm_wait_all(e->comm, m->requests, 2 * m->count, msg);
}

/* Sends mine to all of `ranks` and fills theirs from them, under one tag. */
static int meet(struct comm_engine *e, const char *what, const uint32_t *ranks, uint32_t count,
                uint64_t tag, const struct note *mine, struct note *theirs, struct bl_errmsg *msg)
{
    struct meeting m = {.what = what, .count = count, .ranks = ranks};
    int rc = 0;
    m.requests = calloc(2 * (size_t)count + 1, sizeof *m.requests);
    if (m.requests == NULL) {
        return bl_err_code(msg, -ENOMEM, "NCCL: %s", what);
    }
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        rc =
            comm_host_recv(e->comm, ranks[i], tag, &theirs[i], sizeof *theirs, &m.requests[i], msg);
        if (rc == 0) {
            rc = comm_host_send(e->comm, ranks[i], tag, mine, sizeof *mine, &m.requests[count + i],
                                msg);
        }
    }
    if (rc == 0) {
        rc = meeting_wait(e, &m, msg);
    }
    free(m.requests);
    return rc;
}

/* ---- versions ---- */

static void version_print(char *text, size_t bytes, uint64_t code)
{
    snprintf(text, bytes, "%llu.%llu.%llu", (unsigned long long)(code / 10000),
             (unsigned long long)(code / 100 % 100), (unsigned long long)(code % 100));
}

static uint64_t version_code(void)
{
    int code = 0;
    return ncclGetVersion(&code) == ncclSuccess && code > 0 ? (uint64_t)code : 0;
}

/* What is known of a version before it is tried. */
static int check_version(uint64_t code, struct bl_errmsg *msg)
{
    char text[32];
    version_print(text, sizeof text, code);
    if (code < NCCL_OLDEST) {
        return bl_err(msg, BL_EVERSION, "NCCL %s is too old: 2.28.0 or later is needed", text);
    }
    if (code == 23102) {
        return bl_err(msg, BL_EVERSION,
                      "NCCL %s deadlocks with different numbers of ranks on the nodes: use another "
                      "version (tested: %d.%d.%d)",
                      text, NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
    }
    return 0;
}

/* All ranks tell their version, and by that, that they are there. */
static int meet_all(struct comm_engine *e, struct bl_errmsg *msg)
{
    uint32_t world = comm_world(e->comm), count = 0;
    struct note mine = {.version = version_code()};
    uint32_t *ranks = calloc(world, sizeof *ranks);
    struct note *notes = calloc(world, sizeof *notes);
    int rc = ranks == NULL || notes == NULL ? bl_err_code(msg, -ENOMEM, "NCCL") : 0;
    for (uint32_t r = 0; rc == 0 && r < world; r++) {
        if (r != comm_rank(e->comm)) {
            ranks[count++] = r;
        }
    }
    if (rc == 0) {
        rc = meet(e, "opening", ranks, count, HELLO_TAG, &mine, notes, msg);
    }
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        if (notes[i].version != mine.version) {
            char ours[32], theirs[32];
            version_print(ours, sizeof ours, mine.version);
            version_print(theirs, sizeof theirs, notes[i].version);
            rc = nccl_fail(e, BL_EVERSION, msg,
                           "rank %u has NCCL %s, rank %u has %s: one version on all nodes",
                           comm_rank(e->comm), ours, ranks[i], theirs);
        }
    }
    if (rc == 0) {
        struct bl_errmsg why = {{0}};
        rc = check_version(mine.version, &why);
        rc = rc == 0 ? 0 : nccl_fail(e, rc, msg, "%s", why.text);
    }
    free(ranks);
    free(notes);
    return rc;
}

/* ---- life ---- */

static int take_device(struct comm_engine *e, struct bl_errmsg *msg)
{
    int rc = nccl_cuda(e, cudaEventCreateWithFlags(&e->watched, cudaEventDisableTiming),
                       "cudaEventCreate", msg);
    if (rc == 0 && comm_world(e->comm) > 1) {
        e->scratch = e->kern->ops->alloc(e->kern, COMM_ENGINE_SCRATCH_BYTES);
        if (e->scratch == NULL) {
            rc = bl_err_code(msg, -ENOMEM, "%u bytes of the device for sums",
                             COMM_ENGINE_SCRATCH_BYTES);
        }
    }
    return rc;
}

static void engine_close(struct comm_engine *e);

static int engine_open(struct comm_engine **ret, struct kern *kern, struct comm *comm,
                       uint32_t deadline_ms, struct bl_errmsg *msg)
{
    struct comm_engine *e = calloc(1, sizeof *e);
    if (e == NULL) {
        return bl_err_code(msg, -ENOMEM, "NCCL");
    }
    e->kern = kern;
    e->comm = comm;
    e->compute = kern_cuda_of(kern)->compute;
    e->device = kern_cuda_of(kern)->ordinal;
    e->deadline_ms = deadline_ms;
    e->op_deadline_ms = comm->op_deadline_ms;
    int rc = nccl_guard_start(e, msg);
    if (rc == 0) {
        rc = take_device(e, msg);
    }
    if (rc == 0) {
        rc = meet_all(e, msg);
    }
    if (rc != 0) {
        engine_close(e);
        return rc;
    }
    *ret = e;
    return 0;
}

static void channel_close(struct nccl_channel *c)
{
    if (c->ready != NULL) {
        cudaEventDestroy(c->ready);
    }
    if (c->stream != NULL) {
        cudaStreamDestroy(c->stream);
    }
}

static void engine_close(struct comm_engine *e)
{
    if (e->has_threads) {
        nccl_finalize(e);
    }
    nccl_guard_stop(e);
    while (e->unjoined != NULL) {
        struct comm_engine_group *g = e->unjoined;
        e->unjoined = g->next;
        free(g);
    }
    for (uint32_t i = 0; i < e->channel_count; i++) {
        channel_close(&e->channels[i]);
    }
    while (e->spare != NULL) {
        struct nccl_token *t = e->spare;
        e->spare = t->next;
        cudaEventDestroy(t->done);
        free(t);
    }
    if (e->watched != NULL) {
        cudaEventDestroy(e->watched);
    }
    if (e->scratch != NULL) {
        e->kern->ops->free(e->kern, e->scratch, COMM_ENGINE_SCRATCH_BYTES);
    }
    free(e->channels);
    free(e->comms);
    free(e);
}

/* ---- communicators ---- */

/* Room for `more` communicators. */
static int reserve(struct comm_engine *e, uint32_t more, struct bl_errmsg *msg)
{
    int rc = nccl_enter(e, msg);
    if (rc != 0) {
        return rc;
    }
    ncclComm_t *grown = realloc(e->comms, ((size_t)e->comm_count + more) * sizeof *grown);
    if (grown != NULL) {
        e->comms = grown;
    }
    nccl_leave(e);
    return grown != NULL ? 0 : bl_err_code(msg, -ENOMEM, "NCCL");
}

/* Begins to join; with the lock held. The communicator is to be aborted from now on. */
static ncclResult_t join_begin(struct comm_engine *e, ncclComm_t *ret, const ncclUniqueId *id,
                               uint32_t me, uint32_t count, int ctas_max)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    if (ctas_max > 0) {
        config.maxCTAs = ctas_max;
    }
    *ret = NULL;
    ncclResult_t result = ncclCommInitRankConfig(ret, (int)count, *id, (int)me, &config);
    if (*ret != NULL) {
        e->comms[e->comm_count++] = *ret;
    }
    return result;
}

static int make_id(struct comm_engine *e, ncclUniqueId *ret, struct bl_errmsg *msg)
{
    int rc = nccl_enter(e, msg);
    if (rc != 0) {
        return rc;
    }
    ncclResult_t result = ncclGetUniqueId(ret);
    nccl_leave(e);
    return result == ncclSuccess ? 0
                                 : nccl_fail(e, BL_ELIBRARY, msg, "NCCL: ncclGetUniqueId: %s",
                                             ncclGetErrorString(result));
}

/* ---- groups ---- */

/* The id that the first member made; tells all members that this one has come. */
static int agree(struct comm_engine *e, const uint32_t *ranks, uint32_t count, uint32_t me,
                 ncclUniqueId *ret, struct bl_errmsg *msg)
{
    static const uint64_t key[2] = {1, 2};
    uint64_t tag = GROUP_TAG | comm_siphash(key, ranks, count * sizeof *ranks) >> 16;
    struct note mine;
    memset(&mine, 0, sizeof mine);
    int rc = me == 0 ? make_id(e, &mine.id, msg) : 0;
    uint32_t *others = calloc(count, sizeof *others);
    struct note *theirs = calloc(count, sizeof *theirs);
    if (rc == 0 && (others == NULL || theirs == NULL)) {
        rc = bl_err_code(msg, -ENOMEM, "NCCL");
    }
    if (rc == 0) {
        memcpy(others, ranks, me * sizeof *ranks);
        memcpy(others + me, ranks + me + 1, (count - 1 - me) * sizeof *ranks);
        rc = meet(e, "a group", others, count - 1, tag, &mine, theirs, msg);
    }
    if (rc == 0) {
        *ret = me == 0 ? mine.id : theirs[0].id;
    }
    free(others);
    free(theirs);
    return rc;
}

static int group_join(struct comm_engine_group *g, const ncclUniqueId *id, struct bl_errmsg *msg)
{
    struct comm_engine *e = g->engine;
    char what[64];
    snprintf(what, sizeof what, "joining a group of %u ranks", g->count);
    int rc = reserve(e, 1, msg);
    if (rc == 0) {
        rc = nccl_enter(e, msg);
    }
    if (rc != 0) {
        return rc;
    }
    ncclResult_t result = join_begin(e, &g->comm, id, g->me, g->count, 0);
    nccl_leave(e);
    return nccl_settle(e, g->comm, result, what, msg);
}

static void group_close(struct comm_engine_group *group)
{
    free(group); /* the communicator goes with the engine */
}

static int group_open(struct comm_engine *e, const uint32_t *ranks, uint32_t count,
                      struct comm_engine_group **ret, struct bl_errmsg *msg)
{
    ncclUniqueId id;
    struct comm_engine_group *g = calloc(1, sizeof *g);
    if (g == NULL) {
        return bl_err_code(msg, -ENOMEM, "NCCL");
    }
    g->engine = e;
    g->count = count;
    while (ranks[g->me] != comm_rank(e->comm)) {
        g->me++;
    }
    int rc = agree(e, ranks, count, g->me, &id, msg);
    if (rc == 0) {
        rc = group_join(g, &id, msg);
    }
    if (rc != 0) {
        g->next = e->unjoined;
        e->unjoined = g;
        return rc;
    }
    *ret = g;
    return 0;
}

/* ---- channels ---- */

static int is_mine(const struct comm_engine *e, const struct comm_channel *c)
{
    return c->from != c->to && (c->from == comm_rank(e->comm) || c->to == comm_rank(e->comm));
}

static uint32_t other_end(const struct comm_engine *e, const struct comm_channel *c)
{
    return c->from == comm_rank(e->comm) ? c->to : c->from;
}

/* Ids of new channels, in the list's order, by whoever sends in them. */
static int channels_agree(struct comm_engine *e, const struct nccl_channel *channels,
                          uint32_t count, ncclUniqueId *ids, struct bl_errmsg *msg)
{
    struct note *mine = calloc(count, sizeof *mine), *theirs = calloc(count, sizeof *theirs);
    uint32_t *ranks = calloc(count, sizeof *ranks);
    struct meeting m = {.what = "a channel", .count = count, .ranks = ranks};
    m.requests = calloc(2 * (size_t)count, sizeof *m.requests);
    int rc = mine == NULL || theirs == NULL || ranks == NULL || m.requests == NULL
                 ? bl_err_code(msg, -ENOMEM, "NCCL")
                 : 0;
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        const struct comm_channel *at = &channels[i].at;
        /* Both directions of a pair have the kind's tag, apart by who makes the id. */
        uint64_t tag = CHANNEL_TAG | (uint64_t)at->kind << 16 | (at->from < at->to);
        ranks[i] = other_end(e, at);
        rc = at->from == comm_rank(e->comm) ? make_id(e, &mine[i].id, msg) : 0;
        if (rc == 0) {
            rc = comm_host_recv(e->comm, ranks[i], tag, &theirs[i], sizeof *theirs, &m.requests[i],
                                msg);
        }
        if (rc == 0) {
            rc = comm_host_send(e->comm, ranks[i], tag, &mine[i], sizeof *mine,
                                &m.requests[count + i], msg);
        }
    }
    rc = rc == 0 ? meeting_wait(e, &m, msg) : rc;
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        ids[i] = channels[i].at.from == comm_rank(e->comm) ? mine[i].id : theirs[i].id;
    }
    free(mine);
    free(theirs);
    free(ranks);
    free(m.requests);
    return rc;
}

/* All channels join in one group call: their other ends do it in another order. */
static int channels_join(struct comm_engine *e, struct nccl_channel *channels, uint32_t count,
                         const ncclUniqueId *ids, ncclComm_t *comms, struct bl_errmsg *msg)
{
    int rc = reserve(e, count, msg);
    if (rc == 0) {
        rc = nccl_enter(e, msg);
    }
    if (rc != 0) {
        return rc;
    }
    ncclResult_t result = ncclGroupStart();
    for (uint32_t i = 0; i < count; i++) {
        ncclResult_t one =
            join_begin(e, &channels[i].comm, &ids[i],
                       channels[i].at.from == comm_rank(e->comm) ? 0 : 1, 2, NCCL_CHANNEL_CTAS);
        comms[i] = channels[i].comm;
        result = one != ncclSuccess && one != ncclInProgress ? one : result;
    }
    ncclResult_t end = ncclGroupEnd();
    nccl_leave(e);
    result = result == ncclSuccess ? end : result;
    return nccl_settle_all(e, comms, count, result, "joining channels", e->deadline_ms, msg);
}

/* A message of one byte through each: NCCL connects two ranks when the first is called, and waits
 * for both. */
static int channels_connect(struct comm_engine *e, const struct nccl_channel *channels,
                            uint32_t count, const ncclComm_t *comms, struct bl_errmsg *msg)
{
    int rc = nccl_enter(e, msg);
    if (rc != 0) {
        return rc;
    }
    ncclResult_t result = ncclGroupStart();
    for (uint32_t i = 0; i < count; i++) {
        const struct nccl_channel *c = &channels[i];
        uint8_t *byte = (uint8_t *)e->scratch + i % COMM_ENGINE_SCRATCH_BYTES;
        ncclResult_t one = c->at.from == comm_rank(e->comm)
                               ? ncclSend(byte, 1, ncclUint8, 1, c->comm, c->stream)
                               : ncclRecv(byte, 1, ncclUint8, 0, c->comm, c->stream);
        result = one != ncclSuccess && one != ncclInProgress ? one : result;
    }
    ncclResult_t end = ncclGroupEnd();
    nccl_leave(e);
    result = result == ncclSuccess ? end : result;
    rc = nccl_settle_all(e, comms, count, result, "connecting channels", e->deadline_ms, msg);
    /* The bytes may come later, into the scratch: sums on the compute stream stay behind them. */
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        cudaError_t error = cudaEventRecord(channels[i].ready, channels[i].stream);
        error = error ? error : cudaStreamWaitEvent(e->compute, channels[i].ready, 0);
        rc = nccl_cuda(e, error, "waiting for channels", msg);
    }
    return rc;
}

/* Those of the list that this rank is an end of, behind those there are. */
static int channels_add(struct comm_engine *e, const struct comm_channel *list, uint32_t count,
                        uint32_t *ret, struct bl_errmsg *msg)
{
    uint32_t mine = 0;
    for (uint32_t i = 0; i < count; i++) {
        mine += is_mine(e, &list[i]) != 0;
    }
    *ret = mine;
    struct nccl_channel *grown =
        realloc(e->channels, ((size_t)e->channel_count + mine + 1) * sizeof *grown);
    if (grown == NULL) {
        return bl_err_code(msg, -ENOMEM, "NCCL");
    }
    e->channels = grown;
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        if (!is_mine(e, &list[i])) {
            continue;
        }
        struct nccl_channel *c = &e->channels[e->channel_count++];
        *c = (struct nccl_channel){.at = list[i]};
        rc = nccl_cuda(e, cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking),
                       "cudaStreamCreate", msg);
        if (rc == 0) {
            rc = nccl_cuda(e, cudaEventCreateWithFlags(&c->ready, cudaEventDisableTiming),
                           "cudaEventCreate", msg);
        }
    }
    return rc;
}

static int channels_open(struct comm_engine *e, const struct comm_channel *list, uint32_t count,
                         struct bl_errmsg *msg)
{
    uint32_t first = e->channel_count, mine;
    int rc = channels_add(e, list, count, &mine, msg);
    if (rc != 0 || mine == 0) {
        return rc;
    }
    struct nccl_channel *channels = e->channels + first;
    ncclUniqueId *ids = calloc(mine, sizeof *ids);
    ncclComm_t *comms = calloc(mine, sizeof(ncclComm_t));
    rc = ids == NULL || comms == NULL ? bl_err_code(msg, -ENOMEM, "NCCL") : 0;
    if (rc == 0) {
        rc = channels_agree(e, channels, mine, ids, msg);
    }
    if (rc == 0) {
        rc = channels_join(e, channels, mine, ids, comms, msg);
    }
    if (rc == 0) {
        rc = channels_connect(e, channels, mine, comms, msg);
    }
    free(ids);
    free(comms);
    return rc;
}

/* ---- the export ---- */

__attribute__((visibility("default"))) const struct comm_engine_ops *belay_cuda_comm(void)
{
    static char version[64];
    static const struct comm_engine_ops ops = {.name = "nccl",
                                               .version = version,
                                               .open = engine_open,
                                               .close = engine_close,
                                               .abort = nccl_abort,
                                               .check = nccl_check,
                                               .group_open = group_open,
                                               .group_close = group_close,
                                               .exchange = nccl_exchange,
                                               .allgather = nccl_allgather,
                                               .broadcast = nccl_broadcast,
                                               .sum = nccl_sum,
                                               .reduce_scatter = nccl_reduce_scatter,
                                               .channels_open = channels_open,
                                               .send = nccl_send,
                                               .recv = nccl_recv,
                                               .wait = nccl_wait};
    char text[32];
    version_print(text, sizeof text, version_code());
    snprintf(version, sizeof version, "NCCL %s (built with %d.%d.%d)", text, NCCL_MAJOR, NCCL_MINOR,
             NCCL_PATCH);
    return &ops;
}
