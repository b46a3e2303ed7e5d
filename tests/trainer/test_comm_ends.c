/* SPDX-License-Identifier: Apache-2.0 */
/* What ends a call of the communicator: an abort, and a lost peer, in each of the calls. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/trainer/comm_world.h"
#include "trainer/comm_host.h"

#define LARGE_BYTES (700u * 1024) /* more than a ring and a socket take */
#define SUM_ELEMS   200003u       /* several pieces and a rest */

static struct bl_errmsg msg; /* of no interest where the code says all */

enum call {
    CALL_RECV,
    CALL_SEND,
    CALL_SUM,
    CALL_SCATTER,
    CALL_GATHER,
    CALL_LARGE_GATHER,
    CALL_END
};

/* One call of the group of ranks 0 and 1, which waits for the other one. */
static int run_call(struct comm *c, struct comm_group *g, enum call call, float *data)
{
    struct bl_errmsg why = {{0}};
    struct comm_request *r = NULL;
    uint64_t bounds[3] = {0, SUM_ELEMS / 2, SUM_ELEMS};
    uint32_t other = 1 - comm_rank(c);
    switch (call) {
    case CALL_RECV:
        return comm_recv_start(c, other, 5, data, LARGE_BYTES, &r, &why) != 0
                   ? BL_EGEN
                   : comm_wait(c, r, &why);
    case CALL_SEND: /* more than fits under way; nobody takes it */
        return comm_send_start(c, other, 6, data, (uint64_t)SUM_ELEMS * sizeof *data * 16, &r,
                               &why) != 0
                   ? BL_EGEN
                   : comm_wait(c, r, &why);
    case CALL_SUM:
        return comm_group_sum_f32(g, data, SUM_ELEMS, &why);
    case CALL_SCATTER:
        return comm_group_reduce_scatter_f32(g, data, bounds, &why);
    case CALL_LARGE_GATHER: /* read where it lies, on one node */
        bounds[1] = SUM_ELEMS * sizeof *data / 2;
        bounds[2] = SUM_ELEMS * sizeof *data;
        return comm_group_allgather(g, data, bounds, &why);
    default:
        return comm_group_allgather(g, data, bounds, &why);
    }
}

struct caller {
    struct comm *comm;
    struct comm_group *group;
    enum call call;
    float *data;
    _Atomic int entered;
    int rc;
};

static void note_entered(void *ctx, uint64_t sequence, uint32_t waiting)
{
    struct caller *caller = ctx;
    if (sequence == 2 && waiting) { /* the first one is a barrier */
        atomic_store(&caller->entered, 1);
    }
}

static void *caller_main(void *arg)
{
    struct caller *caller = arg;
    caller->rc = run_call(caller->comm, caller->group, caller->call, caller->data);
    return NULL;
}

static int abort_body(struct world *w, uint32_t rank)
{
    static const uint32_t ranks[2] = {0, 1};
    for (enum call call = 0; call < CALL_END; call++) {
        struct caller caller = {.call = call};
        struct comm_config config = world_config(w, rank);
        config.op_deadline_ms = 0;
        config.generation = 1 + call;
        config.note = note_entered;
        config.note_ctx = &caller;
        CHECK(join_with(&caller.comm, w, &config, JOIN_MS) == 0);
        CHECK(comm_group_new(&caller.group, caller.comm, ranks, 2, &msg) == 0);
        CHECK(comm_barrier(caller.comm, &msg) == 0);
        if (rank == 0) {
            pthread_t thread;
            caller.data = calloc(SUM_ELEMS * 16, sizeof *caller.data);
            CHECK(caller.data != NULL);
            CHECK(pthread_create(&thread, NULL, caller_main, &caller) == 0);
            while (!atomic_load(&caller.entered)) {
                sched_yield();
            }
            usleep(5000); /* lets it fall asleep; awake it is woken as well */
            uint64_t before = bl_now_ns();
            comm_abort(caller.comm);
            pthread_join(thread, NULL);
            CHECK(caller.rc == BL_EABORTED);
            CHECK(bl_now_ns() - before < 1000000000u);
        } else {
            struct pollfd end = {.fd = caller.comm->links[0].fd, .events = POLLRDHUP};
            CHECK(poll(&end, 1, JOIN_MS) == 1); /* rank 0 closes its end when it has left */
        }
        comm_group_free(caller.group);
        comm_free(caller.comm);
        free(caller.data);
    }
    return 0;
}

static void test_abort_wakes_every_call(void **state)
{
    (void)state;
    run_processes("aa", abort_body);
    run_processes("ab", abort_body);
}

static enum call lost_call; /* of the world that is being forked */

static int lost_body(struct world *w, uint32_t rank)
{
    static const uint32_t ranks[2] = {0, 1};
    struct comm *c = NULL;
    struct comm_group *g;
    struct bl_errmsg why = {{0}};
    CHECK(join(&c, w, rank) == 0);
    CHECK(comm_group_new(&g, c, ranks, 2, &msg) == 0);
    CHECK(comm_barrier(c, &msg) == 0);
    if (rank == 1) {
        kill(getpid(), SIGKILL);
    }
    float *data = calloc(SUM_ELEMS * 16, sizeof *data);
    CHECK(data != NULL);
    CHECK(run_call(c, g, lost_call, data) == BL_EPEER);
    CHECK(comm_barrier(c, &why) == BL_EPEER); /* the first error stays, with its text */
    CHECK(strstr(why.text, "rank 1") != NULL);
    free(data);
    comm_group_free(g);
    comm_free(c);
    return 0;
}

static void test_lost_peer_ends_every_call_and_is_named(void **state)
{
    (void)state;
    for (lost_call = 0; lost_call < CALL_END; lost_call++) {
        run_processes_but_one("aa", lost_body, 1);
        run_processes_but_one("ab", lost_body, 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_abort_wakes_every_call),
        cmocka_unit_test(test_lost_peer_ends_every_call_and_is_named),
    };
    alarm(TEST_ALARM);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
