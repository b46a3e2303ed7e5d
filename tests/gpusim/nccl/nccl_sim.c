/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's stand-in: ids, communicators, groups of calls. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "nccl_sim.h"
#include "tests/gpusim/gpusim_control.h"

#define POLLS       3 /* until a call is over: ncclInProgress comes so many times */
#define BATCHES_MAX 64u

static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;
static char g_fault[32];
static int g_is_read;
static _Atomic int g_inside;
static _Atomic int g_abort_comms, g_abort_groups;
static _Thread_local int t_depth, t_has_abort;
static _Thread_local struct sim_batch *t_batches[BATCHES_MAX];
static _Thread_local uint32_t t_batch_count;
static _Thread_local int t_has_init;

/* ---- faults ---- */

int sim_fault(const char *name)
{
    pthread_mutex_lock(&g_lock);
    if (!g_is_read) {
        const char *text = getenv("NCCLSIM_FAULT");
        snprintf(g_fault, sizeof g_fault, "%s", text ? text : "");
        g_is_read = 1;
    }
    int is = strcmp(g_fault, name) == 0;
    pthread_mutex_unlock(&g_lock);
    return is;
}

void ncclsim_fault_set(const char *name)
{
    pthread_mutex_lock(&g_lock);
    snprintf(g_fault, sizeof g_fault, "%s", name ? name : "");
    g_is_read = 1;
    pthread_mutex_unlock(&g_lock);
}

void ncclsim_aborts(int *ret_comms, int *ret_groups)
{
    *ret_comms = atomic_load(&g_abort_comms);
    *ret_groups = atomic_load(&g_abort_groups);
}

/* ---- never two threads inside ---- */

static void enter(void)
{
    if (atomic_fetch_add(&g_inside, 1) != 0) {
        fprintf(stderr, "ncclsim: two threads are inside NCCL\n");
        abort();
    }
}

static ncclResult_t leave(ncclResult_t result)
{
    atomic_fetch_sub(&g_inside, 1);
    return result;
}

/* ---- ids and communicators ---- */

ncclResult_t ncclGetVersion(int *version)
{
    *version = sim_fault("version") ? 22900 : NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    enter();
    int fd = memfd_create("ncclsim", 0);
    if (fd < 0 || ftruncate(fd, sizeof(struct sim_shared)) != 0) {
        return leave(ncclSystemError);
    }
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/proc/%d/fd/%d", (int)getpid(), fd);
    return leave(ncclSuccess);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    enter();
    if (config->blocking != 0) {
        fprintf(stderr, "ncclsim: a blocking communicator cannot be aborted\n");
        abort();
    }
    struct ncclComm *c = calloc(1, sizeof *c);
    int fd = open(id.internal, O_RDWR | O_CLOEXEC);
    if (!c || fd < 0 || nranks > (int)SIM_RANKS_MAX) {
        free(c);
        return leave(ncclSystemError);
    }
    c->shared = mmap(NULL, sizeof *c->shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    c->rank = (uint32_t)rank;
    c->nranks = (uint32_t)nranks;
    c->polls = POLLS;
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&c->shared->nranks, &none, c->nranks) &&
        none != c->nranks) {
        snprintf(c->text, sizeof c->text, "rank %d joins %d ranks, another %u", rank, nranks, none);
        atomic_store(&c->state, ncclInvalidUsage);
    }
    if (!sim_fault("never") && atomic_fetch_or(&c->shared->arrived, 1u << rank) & 1u << rank) {
        snprintf(c->text, sizeof c->text, "rank %d joins twice: an id that was used", rank);
        atomic_store(&c->state, ncclInvalidUsage);
    }
    *comm = c;
    t_has_init = 1;
    return leave(ncclInProgress);
}

static void launch(struct sim_batch *b)
{
    ncclComm_t comm = b->comm;
    if (gpusim_stream_submit(b->stream, sim_batch_run, sim_batch_drop, b) != cudaSuccess) {
        atomic_store(&comm->state, ncclUnhandledCudaError);
    }
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state)
{
    enter();
    *state = atomic_load(&comm->state);
    if (*state != ncclSuccess) {
        return leave(ncclSuccess);
    }
    if (!comm->is_joined && atomic_load(&comm->shared->arrived) != (1u << comm->nranks) - 1) {
        *state = ncclInProgress;
    } else if (comm->polls > 0) {
        comm->polls--;
        *state = ncclInProgress;
    } else {
        comm->is_joined = 1;
        if (comm->batch) {
            launch(comm->batch);
            comm->batch = NULL;
        }
    }
    return leave(ncclSuccess);
}

static void comm_end(ncclComm_t comm)
{
    free(comm->batch);
    munmap(comm->shared, sizeof *comm->shared);
    free(comm);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    enter();
    comm->is_finalized = 1;
    while (atomic_load(&comm->running) > 0 && !atomic_load(&comm->is_aborted)) {
        usleep(100);
    }
    comm->polls = POLLS;
    return leave(ncclInProgress);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    enter();
    if (!comm->is_finalized || atomic_load(&comm->running) > 0) {
        fprintf(stderr, "ncclsim: destroyed before it was finalized\n");
        abort();
    }
    comm_end(comm);
    return leave(ncclSuccess);
}

static ncclComm_t g_aborting[BATCHES_MAX]; /* of the group that is called */
static uint32_t g_aborting_count;

static void abort_all(void)
{
    while (sim_fault("hang")) {
        usleep(1000);
    }
    for (uint32_t i = 0; i < g_aborting_count; i++) {
        while (atomic_load(&g_aborting[i]->running) > (g_aborting[i]->batch != NULL)) {
            usleep(100);
        }
        comm_end(g_aborting[i]);
    }
    g_aborting_count = 0;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    enter();
    atomic_fetch_add(&g_abort_comms, 1);
    atomic_store(&comm->is_aborted, 1);
    g_aborting[g_aborting_count++] = comm;
    t_has_abort = 1;
    if (t_depth == 0) {
        abort_all();
    }
    return leave(ncclSuccess);
}

const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return (unsigned)result < 8 ? texts[result] : "?";
}

const char *ncclGetLastError(ncclComm_t comm)
{
    return comm->text;
}

/* ---- groups of calls ---- */

ncclResult_t ncclGroupStart(void)
{
    enter();
    t_depth++;
    return leave(ncclSuccess);
}

ncclResult_t ncclGroupEnd(void)
{
    enter();
    ncclResult_t result = t_has_init ? ncclInProgress : ncclSuccess;
    if (--t_depth > 0) {
        return leave(ncclSuccess);
    }
    for (uint32_t i = 0; i < t_batch_count; i++) {
        t_batches[i]->comm->batch = t_batches[i];
        t_batches[i]->comm->polls = POLLS;
        result = ncclInProgress;
    }
    t_batch_count = 0;
    t_has_init = 0;
    if (t_has_abort) {
        t_has_abort = 0;
        atomic_fetch_add(&g_abort_groups, 1);
        abort_all();
    }
    return leave(result);
}

static struct sim_batch *batch_of(ncclComm_t comm, cudaStream_t stream)
{
    for (uint32_t i = 0; i < t_batch_count; i++) {
        if (t_batches[i]->comm == comm) {
            return t_batches[i];
        }
    }
    struct sim_batch *b = calloc(1, sizeof *b);
    if (!b || t_batch_count == BATCHES_MAX) {
        abort();
    }
    b->comm = comm;
    b->stream = stream;
    atomic_fetch_add(&comm->running, 1);
    return t_batches[t_batch_count++] = b;
}

static ncclResult_t call(ncclComm_t comm, cudaStream_t stream, struct sim_op op)
{
    enter();
    if (!comm->is_joined || comm->batch || comm->polls > 0) {
        fprintf(stderr, "ncclsim: a call on a communicator whose last one is not over\n");
        return leave(ncclInvalidArgument);
    }
    struct sim_batch *b = batch_of(comm, stream);
    if (b->count == SIM_OPS_MAX || b->stream != stream) {
        return leave(ncclInvalidUsage);
    }
    b->ops[b->count++] = op;
    leave(ncclSuccess);
    if (t_depth > 0) {
        return ncclSuccess;
    }
    t_depth++;
    return ncclGroupEnd();
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    return call(comm, stream, (struct sim_op){SIM_SEND, from, NULL, count, type, peer});
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return call(comm, stream, (struct sim_op){SIM_RECV, NULL, to, count, type, peer});
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream)
{
    return call(comm, stream, (struct sim_op){SIM_BROADCAST, from, to, count, type, root});
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream)
{
    return call(comm, stream, (struct sim_op){SIM_ALLGATHER, from, to, count, type, 0});
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    (void)op;
    return call(comm, stream, (struct sim_op){SIM_ALLREDUCE, from, to, count, type, 0});
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    (void)op;
    return call(comm, stream, (struct sim_op){SIM_REDUCESCATTER, from, to, count, type, 0});
}

ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream)
{
    (void)op;
    return call(comm, stream, (struct sim_op){SIM_REDUCE, from, to, count, type, root});
}
