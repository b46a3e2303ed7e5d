/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine over NCCL with real processes, over the stand-ins of the runtime and of NCCL: what it
 * moves and sums is what the host's communicator moves and sums, bit for bit; and it ends, within
 * deadlines, whatever the others and NCCL do.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "kernels/cuda/ops.h"
#include "tests/trainer/comm_world.h"
#include "trainer/comm_nccl.h"

#define LARGE    200003u /* elements of a sum in slices */
#define SMALL    37u
#define SHORT_MS 400 /* a deadline that is meant to pass */

static struct bl_errmsg msg; /* of no interest where the code says all */

/* ---- a back end of memory, copies and one kernel ---- */

static void *device_alloc(struct kern *k, uint64_t bytes)
{
    void *p = NULL;
    (void)k;
    return cudaMalloc(&p, bytes) == cudaSuccess ? p : NULL;
}

static void device_free(struct kern *k, void *p, uint64_t bytes)
{
    (void)bytes;
    cudaStreamSynchronize(kern_cuda_of(k)->compute);
    cudaFree(p);
}

static void device_copy(struct kern *k, void *to, const void *from, uint64_t bytes)
{
    cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, kern_cuda_of(k)->compute);
}

static const struct kern_ops device_ops = {.name = "test",
                                           .alloc = device_alloc,
                                           .free = device_free,
                                           .copy = device_copy,
                                           .sum_parts = kern_cuda_sum_parts};

struct rank {
    struct kern_cuda kern;
    struct comm *comm;
    float *device; /* LARGE * 4 elements */
};

static const struct comm_engine_ops *ops(void)
{
    return belay_cuda_comm();
}

/* Joins generation `generation` on the host; the device's memory is taken once. */
static int host_join(struct rank *r, struct world *w, uint32_t rank, uint64_t generation,
                     uint32_t op_ms)
{
    struct comm_config config = world_config(w, rank);
    config.generation = generation;
    config.op_deadline_ms = op_ms;
    if (r->device == NULL) {
        r->kern.base.ops = &device_ops;
        r->kern.base.is_device = 1;
        CHECK(cudaStreamCreateWithFlags(&r->kern.compute, cudaStreamNonBlocking) == cudaSuccess);
        r->device = device_alloc(&r->kern.base, 4 * LARGE * sizeof(float));
        CHECK(r->device != NULL);
    }
    CHECK(join_with(&r->comm, w, &config, JOIN_MS) == 0);
    return 0;
}

static int attach(struct rank *r, uint32_t deadline_ms, struct bl_errmsg *why)
{
    struct comm_engine *engine;
    int rc = ops()->open(&engine, &r->kern.base, r->comm, deadline_ms, why);
    if (rc == 0) {
        comm_attach(r->comm, ops(), engine);
    }
    return rc;
}

static int all_of(struct comm_group **ret, struct rank *r, struct bl_errmsg *why)
{
    static const uint32_t ranks[] = {0, 1, 2, 3};
    return comm_group_on_engine(ret, r->comm, ranks, comm_world(r->comm), why);
}

static int open_all(struct rank *r, struct comm_group **ret, struct world *w, uint32_t rank,
                    uint32_t op_ms)
{
    CHECK(host_join(r, w, rank, 1, op_ms) == 0);
    CHECK(attach(r, JOIN_MS, &msg) == 0);
    CHECK(all_of(ret, r, &msg) == 0);
    return 0;
}

static void put(struct rank *r, const void *host, uint64_t bytes)
{
    cudaMemcpyAsync(r->device, host, bytes, cudaMemcpyHostToDevice, r->kern.compute);
}

static int get(struct rank *r, void *host, uint64_t bytes)
{
    cudaMemcpyAsync(host, r->device, bytes, cudaMemcpyDeviceToHost, r->kern.compute);
    return cudaStreamSynchronize(r->kern.compute) == cudaSuccess ? comm_check(r->comm, &msg) : -1;
}

static void fill(float *x, uint32_t count, uint32_t rank)
{
    for (uint32_t i = 0; i < count; i++) {
        x[i] = (float)((i * 2654435761u + rank * 40503u) % 1000003u) * (rank % 2 ? 1e-3f : 3.7f);
    }
}

/* ---- right answers ---- */

static int sums_body(struct world *w, uint32_t rank)
{
    static float host[LARGE], got[LARGE];
    struct rank r = {0};
    struct comm_group *g;
    CHECK(open_all(&r, &g, w, rank, JOIN_MS) == 0);
    const uint32_t counts[] = {1, SMALL, LARGE};
    for (uint32_t k = 0; k < 3; k++) {
        fill(host, counts[k], rank);
        put(&r, host, counts[k] * sizeof *host);
        CHECK(comm_group_sum(g, r.device, KERN_F32, counts[k], &msg) == 0);
        CHECK(get(&r, got, counts[k] * sizeof *got) == 0);
        CHECK(comm_group_sum(comm_everyone(r.comm), host, KERN_F32, counts[k], &msg) == 0);
        CHECK(memcmp(got, host, counts[k] * sizeof *host) == 0);
    }
    uint64_t bounds[5] = {0};
    for (uint32_t m = 0; m < w->size; m++) { /* uneven, the first empty */
        bounds[m + 1] = m + 1 == w->size ? LARGE : (uint64_t)m * 1001;
    }
    fill(host, LARGE, rank);
    put(&r, host, LARGE * sizeof *host);
    CHECK(comm_group_reduce_scatter(g, r.device, KERN_F32, bounds, &msg) == 0);
    CHECK(get(&r, got, LARGE * sizeof *got) == 0);
    CHECK(comm_group_reduce_scatter(comm_everyone(r.comm), host, KERN_F32, bounds, &msg) == 0);
    CHECK(memcmp(got + bounds[rank], host + bounds[rank],
                 (bounds[rank + 1] - bounds[rank]) * sizeof *host) == 0);
    comm_group_free(g);
    comm_free(r.comm);
    return 0;
}

static void test_sums_have_the_hosts_bits(void **state)
{
    (void)state;
    run_processes("a", sums_body);
    run_processes("aa", sums_body);
    run_processes("aaaa", sums_body);
}

static int fast_body(struct world *w, uint32_t rank)
{
    static float host[LARGE], got[LARGE];
    struct rank r = {0};
    struct comm_group *g;
    uint32_t differ = 0;
    CHECK(open_all(&r, &g, w, rank, JOIN_MS) == 0);
    comm_group_set_fast(g);
    fill(host, LARGE, rank);
    put(&r, host, LARGE * sizeof *host);
    CHECK(comm_group_sum(g, r.device, KERN_F32, LARGE, &msg) == 0);
    CHECK(get(&r, got, LARGE * sizeof *got) == 0);
    CHECK(comm_group_sum(comm_everyone(r.comm), host, KERN_F32, LARGE, &msg) == 0);
    for (uint32_t i = 0; i < LARGE; i++) {
        float off = got[i] - host[i];
        differ += got[i] != host[i];
        CHECK(off < 1.0f && off > -1.0f);
    }
    CHECK(differ > 0); /* another order */
    comm_group_free(g);
    comm_free(r.comm);
    return 0;
}

static void test_fast_sums_are_the_librarys(void **state)
{
    (void)state;
    run_processes("aaa", fast_body);
}

static int moves_body(struct world *w, uint32_t rank)
{
    static uint8_t bytes[4096], got[4096];
    struct rank r = {0};
    struct comm_group *g;
    CHECK(open_all(&r, &g, w, rank, JOIN_MS) == 0);
    uint32_t n = w->size;
    uint8_t *at = (uint8_t *)r.device;
    for (uint32_t is_even = 0; is_even < 2; is_even++) {
        uint64_t bounds[5] = {0};
        for (uint32_t m = 0; m < n; m++) {
            bounds[m + 1] = bounds[m] + (is_even ? 512 : 100 * m);
        }
        for (uint64_t i = bounds[rank]; i < bounds[rank + 1]; i++) {
            bytes[i] = pattern(i, rank);
        }
        put(&r, bytes, sizeof bytes);
        CHECK(comm_group_allgather(g, at, bounds, &msg) == 0);
        CHECK(get(&r, got, sizeof got) == 0);
        for (uint32_t m = 0; m < n; m++) {
            for (uint64_t i = bounds[m]; i < bounds[m + 1]; i++) {
                CHECK(got[i] == pattern(i, m));
            }
        }
    }
    bytes[0] = (uint8_t)(rank + 40);
    put(&r, bytes, sizeof bytes);
    CHECK(comm_group_broadcast(g, n - 1, at, 1, &msg) == 0);
    CHECK(get(&r, got, 1) == 0 && got[0] == 40 + n - 1);
    struct comm_part sends[4], recvs[4];
    for (uint32_t m = 0; m < n; m++) { /* m tells k m + k + 1 bytes, nothing where that is 3 */
        uint64_t size = m + rank == 2 ? 0 : m + rank + 1;
        sends[m] = (struct comm_part){at + 100 * m, size};
        recvs[m] = (struct comm_part){at + 1000 + 100 * m, size};
        memset(bytes + 100 * m, (int)(10 * rank + m), 100);
    }
    put(&r, bytes, sizeof bytes);
    CHECK(comm_group_exchange(g, sends, recvs, &msg) == 0);
    CHECK(get(&r, got, sizeof got) == 0);
    for (uint32_t m = 0; m < n; m++) {
        CHECK(m == rank || recvs[m].bytes == 0 || got[1000 + 100 * m] == 10 * m + rank);
    }
    comm_group_free(g);
    comm_free(r.comm);
    return 0;
}

static void test_moves_what_the_host_moves(void **state)
{
    (void)state;
    run_processes("aa", moves_body);
    run_processes("aaaa", moves_body);
}

/* A ring, both directions, receives called before what they depend on is sent. */
static int channels_body(struct world *w, uint32_t rank)
{
    static uint8_t bytes[256], got[256];
    struct rank r = {0};
    struct comm_request *in[2], *out[2];
    uint32_t n = w->size, next = (rank + 1) % n, last = (rank + n - 1) % n, count = 0;
    struct comm_channel list[8];
    CHECK(host_join(&r, w, rank, 1, JOIN_MS) == 0);
    CHECK(attach(&r, JOIN_MS, &msg) == 0);
    for (uint32_t i = 0; i < n; i++) {
        list[count++] = (struct comm_channel){i, (i + 1) % n, COMM_CHANNEL_FORWARD};
        list[count++] = (struct comm_channel){(i + 1) % n, i, COMM_CHANNEL_BACKWARD};
    }
    CHECK(comm_channels_open(r.comm, list, count, &msg) == 0);
    uint64_t forward = (uint64_t)COMM_CHANNEL_FORWARD << 48;
    uint64_t backward = (uint64_t)COMM_CHANNEL_BACKWARD << 48;
    for (uint32_t turn = 0; turn < 5; turn++) {
        uint8_t *at = (uint8_t *)r.device;
        memset(bytes, (int)(rank * 16 + turn), sizeof bytes);
        CHECK(comm_recv_start(r.comm, next, backward | turn, at, 8, &in[0], &msg) == 0);
        CHECK(comm_recv_start(r.comm, last, forward | turn, at + 8, 8, &in[1], &msg) == 0);
        cudaMemcpyAsync(at + 16, bytes, 16, cudaMemcpyHostToDevice, r.kern.compute);
        CHECK(comm_send_start(r.comm, next, forward | turn, at + 16, 8, &out[0], &msg) == 0);
        CHECK(comm_send_start(r.comm, last, backward | turn, at + 24, 8, &out[1], &msg) == 0);
        CHECK(comm_wait_all(r.comm, in, 2, &msg) == 0);
        CHECK(comm_wait_all(r.comm, out, 2, &msg) == 0);
        CHECK(get(&r, got, 16) == 0);
        CHECK(got[0] == next * 16 + turn && got[15] == last * 16 + turn);
    }
    struct bl_errmsg why = {{0}};
    uint64_t fetch = (uint64_t)COMM_CHANNEL_FETCH << 48;
    CHECK(comm_recv_start(r.comm, next, fetch, r.device, 8, &in[0], &why) == BL_ECONFIG);
    comm_free(r.comm);
    return 0;
}

static void test_channels_wait_for_nothing_but_their_messages(void **state)
{
    (void)state;
    run_processes("aa", channels_body);
    run_processes("aaa", channels_body);
}

/* ---- bad ends ---- */

static int missing_body(struct world *w, uint32_t rank)
{
    struct rank r = {0};
    struct bl_errmsg why = {{0}};
    CHECK(host_join(&r, w, rank, 1, JOIN_MS) == 0);
    if (rank == 1) {
        usleep(2 * SHORT_MS * 1000); /* there, but elsewhere: as a stopped one */
    } else {
        CHECK(attach(&r, SHORT_MS, &why) == BL_EDEADLINE);
        CHECK(strstr(why.text, "rank 1 did not come") != NULL);
    }
    comm_free(r.comm);
    return 0;
}

static void test_open_names_who_did_not_come(void **state)
{
    (void)state;
    run_processes("aaa", missing_body);
}

static int never_body(struct world *w, uint32_t rank)
{
    struct rank r = {0};
    struct comm_group *g;
    struct bl_errmsg why = {{0}};
    int comms, groups;
    CHECK(host_join(&r, w, rank, 1, JOIN_MS) == 0);
    CHECK(attach(&r, SHORT_MS, &msg) == 0);
    ncclsim_fault_set(rank == 1 ? "never" : NULL);
    CHECK(all_of(&g, &r, &why) == BL_EDEADLINE);
    comm_free(r.comm);
    ncclsim_aborts(&comms, &groups);
    CHECK(comms == 1 && groups == 1);
    return 0;
}

static void test_init_ends_at_the_deadline_and_is_aborted(void **state)
{
    (void)state;
    run_processes("aa", never_body);
}

static int version_body(struct world *w, uint32_t rank)
{
    struct rank r = {0};
    struct bl_errmsg why = {{0}};
    CHECK(host_join(&r, w, rank, 1, JOIN_MS) == 0);
    ncclsim_fault_set(rank == 2 ? "version" : NULL);
    int rc = attach(&r, JOIN_MS, &why);
    CHECK(rc == BL_EVERSION || rc == BL_EABORTED || rc == BL_EPEER);
    CHECK(rc != BL_EVERSION || (strstr(why.text, "2.29.0") && strstr(why.text, "2.28.9")));
    CHECK(rank != 2 || rc == BL_EVERSION);
    comm_free(r.comm);
    return 0;
}

static void test_mixed_versions_are_refused_by_name(void **state)
{
    (void)state;
    run_processes("aaa", version_body);
}

static void *abort_later(void *arg)
{
    usleep(150 * 1000);
    comm_abort(arg);
    return NULL;
}

/* Rank 1 dies, or stays away, in the middle: the others are told, and are good for another
 * generation, with fresh ids. */
static int left_alone(struct world *w, uint32_t rank, int is_killed)
{
    static float host[LARGE];
    struct rank r = {0};
    struct comm_group *g, *pair;
    const uint32_t ends[2] = {0, 2};
    pthread_t thread;
    int comms, groups;
    CHECK(open_all(&r, &g, w, rank, 0) == 0);
    CHECK(rank == 1 || comm_group_on_engine(&pair, r.comm, ends, 2, &msg) == 0);
    if (rank == 1 && is_killed) {
        raise(SIGKILL);
    }
    CHECK(pthread_create(&thread, NULL, abort_later, r.comm) == 0);
    int rc = rank == 1 ? BL_EABORTED : comm_group_sum(g, r.device, KERN_F32, LARGE, &msg);
    rc = rc == 0 ? get(&r, host, sizeof host) : rc;
    CHECK(rc == BL_EABORTED || rc == BL_EPEER);
    pthread_join(thread, NULL);
    uint64_t before = bl_now_ns();
    comm_group_free(g);
    if (rank != 1) {
        comm_group_free(pair);
    }
    comm_free(r.comm);
    CHECK(bl_now_ns() - before < 5000000000ull);
    ncclsim_aborts(&comms, &groups);
    CHECK(comms == (rank == 1 ? 1 : 2) && groups == 1);
    if (is_killed) {
        return 0;
    }
    CHECK(host_join(&r, w, rank, 2, JOIN_MS) == 0);
    CHECK(attach(&r, JOIN_MS, &msg) == 0);
    CHECK(all_of(&g, &r, &msg) == 0);
    CHECK(comm_group_sum(g, r.device, KERN_F32, SMALL, &msg) == 0);
    CHECK(get(&r, host, SMALL * sizeof *host) == 0);
    comm_group_free(g);
    comm_free(r.comm);
    return 0;
}

static int stopped_body(struct world *w, uint32_t rank)
{
    return left_alone(w, rank, 0);
}

static int killed_body(struct world *w, uint32_t rank)
{
    return left_alone(w, rank, 1);
}

static void test_all_groups_are_aborted_at_once_and_joined_anew(void **state)
{
    (void)state;
    run_processes("aaa", stopped_body);
}

static void test_a_killed_peer_holds_nobody_after_the_abort(void **state)
{
    (void)state;
    run_processes_but_one("aaa", killed_body, 1);
}

static int async_body(struct world *w, uint32_t rank)
{
    struct rank r = {0};
    struct comm_group *g;
    struct bl_errmsg why = {{0}};
    CHECK(open_all(&r, &g, w, rank, JOIN_MS) == 0);
    ncclsim_fault_set("async");
    int rc = comm_group_sum(g, r.device, KERN_F32, SMALL, &why);
    cudaStreamSynchronize(r.kern.compute); /* the monitor ends it */
    rc = rc == 0 ? comm_check(r.comm, &why) : rc;
    CHECK(rc == BL_EPEER && strstr(why.text, "a fault on demand") != NULL);
    CHECK(comm_barrier(r.comm, &why) == BL_EPEER);
    comm_group_free(g);
    comm_free(r.comm);
    return 0;
}

static void test_an_asynchronous_error_ends_engine_and_host(void **state)
{
    (void)state;
    run_processes("aa", async_body);
}

static int endless_body(struct world *w, uint32_t rank)
{
    struct rank r = {0};
    struct comm_group *g;
    struct bl_errmsg why = {{0}};
    CHECK(open_all(&r, &g, w, rank, JOIN_MS) == 0);
    r.comm->engine->op_deadline_ms = SHORT_MS;
    ncclsim_fault_set("endless");
    int rc = comm_group_sum(g, r.device, KERN_F32, SMALL, &why);
    cudaStreamSynchronize(r.kern.compute);
    rc = rc == 0 ? comm_check(r.comm, &why) : rc;
    CHECK(rc == BL_EDEADLINE);
    comm_group_free(g);
    comm_free(r.comm);
    return 0;
}

static void test_a_kernel_that_never_ends_is_ended_at_the_deadline(void **state)
{
    (void)state;
    run_processes("aa", endless_body);
}

static int mismatch_body(struct world *w, uint32_t rank)
{
    struct rank r = {0};
    struct comm_group *g;
    struct bl_errmsg why = {{0}};
    CHECK(open_all(&r, &g, w, rank, JOIN_MS) == 0);
    int rc = comm_group_sum(g, r.device, KERN_F32, 10 + rank, &why);
    cudaStreamSynchronize(r.kern.compute);
    rc = rc == 0 ? comm_check(r.comm, &why) : rc;
    CHECK(rc == BL_ELIBRARY && strstr(why.text, "of 40") != NULL &&
          strstr(why.text, "of 44") != NULL);
    comm_group_free(g);
    comm_free(r.comm);
    return 0;
}

static void test_sizes_that_differ_are_told(void **state)
{
    (void)state;
    run_processes("aa", mismatch_body);
}

static int hang_body(struct world *w, uint32_t rank)
{
    int status = 0;
    uint64_t before = bl_now_ns();
    pid_t pid = fork();
    if (pid == 0) {
        struct rank r = {0};
        struct comm_group *g;
        setenv("BELAY_TIME_SCALE", "0.05", 1);
        alarm(30);
        if (open_all(&r, &g, w, rank, JOIN_MS) != 0) {
            _exit(1);
        }
        ncclsim_fault_set("hang");
        comm_abort(r.comm);
        comm_group_free(g);
        comm_free(r.comm); /* for ever, but for the deadline */
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == NCCL_EXIT_STUCK);
    CHECK(bl_now_ns() - before < 15000000000ull);
    return 0;
}

static void test_an_abort_that_hangs_ends_the_process(void **state)
{
    (void)state;
    run_processes("aa", hang_body);
}

int main(void)
{
    alarm(TEST_ALARM);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums_have_the_hosts_bits),
        cmocka_unit_test(test_fast_sums_are_the_librarys),
        cmocka_unit_test(test_moves_what_the_host_moves),
        cmocka_unit_test(test_channels_wait_for_nothing_but_their_messages),
        cmocka_unit_test(test_open_names_who_did_not_come),
        cmocka_unit_test(test_init_ends_at_the_deadline_and_is_aborted),
        cmocka_unit_test(test_mixed_versions_are_refused_by_name),
        cmocka_unit_test(test_all_groups_are_aborted_at_once_and_joined_anew),
        cmocka_unit_test(test_a_killed_peer_holds_nobody_after_the_abort),
        cmocka_unit_test(test_an_asynchronous_error_ends_engine_and_host),
        cmocka_unit_test(test_a_kernel_that_never_ends_is_ended_at_the_deadline),
        cmocka_unit_test(test_sizes_that_differ_are_told),
        cmocka_unit_test(test_an_abort_that_hangs_ends_the_process),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
