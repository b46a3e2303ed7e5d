/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host communicator: collectives through shared memory, TCP and both; aborts, lost peers, wrong
 * keys, strangers. Ranks are child processes, or threads where a test watches one from outside.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/trainer/comm_world.h"
#include "trainer/comm_host.h"

#define SHORT_MS  300
#define BIG_BYTES (3u << 20) /* many times a ring */

/* ---- collectives ---- */

static int check_allgather(struct comm *c, uint32_t rank, uint64_t share)
{
    struct bl_errmsg msg = {{0}};
    uint32_t world = comm_world(c);
    uint64_t bounds[WORLD_MAX + 1] = {0};
    for (uint32_t r = 0; r < world; r++) { /* rank 1 owns nothing */
        bounds[r + 1] = bounds[r] + (r == 1 ? 0 : share + r);
    }
    uint8_t *data = malloc(bounds[world] + 1);
    CHECK(data != NULL);
    for (uint64_t i = bounds[rank]; i < bounds[rank + 1]; i++) {
        data[i] = pattern(i, rank);
    }
    CHECK(comm_allgather(c, data, bounds, &msg) == 0);
    for (uint32_t r = 0; r < world; r++) {
        for (uint64_t i = bounds[r]; i < bounds[r + 1]; i++) {
            CHECK(data[i] == pattern(i, r));
        }
    }
    free(data);
    return 0;
}

/* Every pair has its own size in each direction. */
static int check_exchange(struct comm *c, uint32_t rank)
{
    struct bl_errmsg msg = {{0}};
    uint32_t world = comm_world(c);
    struct comm_part sends[WORLD_MAX], recvs[WORLD_MAX];
    for (uint32_t r = 0; r < world; r++) {
        sends[r].bytes = (rank * 7919u + r * 104729u) % 500000u;
        recvs[r].bytes = (r * 7919u + rank * 104729u) % 500000u;
        uint8_t *from = malloc(sends[r].bytes + 1);
        CHECK(from != NULL);
        sends[r].data = from;
        recvs[r].data = malloc(recvs[r].bytes + 1);
        CHECK(recvs[r].data != NULL);
        for (uint64_t i = 0; i < sends[r].bytes; i++) {
            from[i] = pattern(i, rank * world + r);
        }
    }
    CHECK(comm_exchange(c, sends, recvs, &msg) == 0);
    for (uint32_t r = 0; r < world; r++) {
        const uint8_t *got = recvs[r].data;
        for (uint64_t i = 0; r != rank && i < recvs[r].bytes; i++) {
            CHECK(got[i] == pattern(i, r * world + rank));
        }
        free(sends[r].data);
        free(recvs[r].data);
    }
    return 0;
}

static int collectives_body(struct world *w, uint32_t rank)
{
    struct bl_errmsg msg = {{0}};
    struct comm *c = NULL;
    CHECK(join(&c, w, rank) == 0);
    for (uint32_t r = 0; r < w->size; r++) {
        int same = strcmp(w->peers[r].node, w->peers[rank].node) == 0 && r != rank;
        CHECK(comm_is_shared(c, r) == same);
    }
    for (int turn = 0; turn < 3; turn++) {
        CHECK(comm_barrier(c, &msg) == 0);
        CHECK(check_allgather(c, rank, 1) == 0);
        CHECK(check_allgather(c, rank, BIG_BYTES / w->size) == 0);
        CHECK(check_exchange(c, rank) == 0);
        uint64_t sums[2] = {rank, UINT64_MAX};
        CHECK(comm_sum_u64(c, sums, 2, &msg) == 0);
        CHECK(sums[0] == (uint64_t)w->size * (w->size - 1) / 2);
        CHECK(sums[1] == (uint64_t)0 - w->size);
        uint64_t word = rank == w->size - 1 ? 4711 : 0;
        CHECK(comm_broadcast(c, w->size - 1, &word, sizeof word, &msg) == 0);
        CHECK(word == 4711);
    }
    comm_free(c);
    return 0;
}

static void test_collectives_agree_through_shared_memory(void **state)
{
    (void)state;
    run_processes("aa", collectives_body);
    run_processes("aaaaa", collectives_body);
}

static void test_collectives_agree_through_tcp(void **state)
{
    (void)state;
    run_processes("abcd", collectives_body);
}

static void test_collectives_agree_when_nodes_are_mixed(void **state)
{
    (void)state;
    run_processes("aabbabc", collectives_body);
}

static void test_collectives_agree_between_threads(void **state)
{
    (void)state;
    run_threads("a", collectives_body);
    run_threads("aab", collectives_body);
}

/* ---- aborts ---- */

struct blocked {
    struct world *world;
    struct comm *comm;
    _Atomic int entered;
    int rc;
};

static void note_entered(void *ctx, uint64_t sequence, uint32_t waiting)
{
    struct blocked *b = ctx;
    if (sequence == 1 && waiting) {
        atomic_store(&b->entered, 1);
    }
}

static void *blocked_main(void *arg)
{
    struct blocked *b = arg;
    struct bl_errmsg msg = {{0}};
    b->rc = comm_barrier(b->comm, &msg);
    return NULL;
}

static void *join_main(void *arg)
{
    struct blocked *b = arg;
    struct bl_errmsg msg = {{0}};
    b->rc = comm_connect(b->comm, JOIN_MS, &msg);
    return NULL;
}

/* Rank 1 joins and then never enters the barrier in which rank 0 waits. */
static void abort_blocked(const char *nodes)
{
    struct world w;
    struct bl_errmsg msg = {{0}};
    struct comm *other;
    world_open(&w, nodes);
    struct blocked b = {.world = &w};
    struct comm_config config = world_config(&w, 0);
    config.op_deadline_ms = 0;
    config.note = note_entered;
    config.note_ctx = &b;
    assert_int_equal(comm_new(&b.comm, w.listeners[0], &config, &msg), 0);
    pthread_t joiner, waiter;
    assert_int_equal(pthread_create(&joiner, NULL, join_main, &b), 0);
    assert_int_equal(join(&other, &w, 1), 0);
    pthread_join(joiner, NULL);
    assert_int_equal(b.rc, 0);
    assert_int_equal(pthread_create(&waiter, NULL, blocked_main, &b), 0);
    while (!atomic_load(&b.entered)) {
        sched_yield();
    }
    usleep(20000); /* lets it fall asleep; awake it is woken as well */
    uint64_t before = bl_now_ns();
    comm_abort(b.comm);
    pthread_join(waiter, NULL);
    assert_int_equal(b.rc, BL_EABORTED);
    assert_true(bl_now_ns() - before < 1000000000u);
    assert_int_equal(comm_barrier(b.comm, &msg), BL_EABORTED);
    comm_free(b.comm);
    comm_free(other);
    world_close(&w);
}

static void test_abort_wakes_a_blocked_collective(void **state)
{
    (void)state;
    abort_blocked("aa");
    abort_blocked("ab");
}

static void test_abort_wakes_a_rank_that_joins(void **state)
{
    (void)state;
    for (uint32_t rank = 0; rank < 2; rank++) { /* as answerer and as caller */
        struct world w;
        struct bl_errmsg msg = {{0}};
        world_open(&w, "aa");
        struct blocked b = {.world = &w};
        struct comm_config config = world_config(&w, rank);
        assert_int_equal(comm_new(&b.comm, w.listeners[rank], &config, &msg), 0);
        pthread_t joiner;
        assert_int_equal(pthread_create(&joiner, NULL, join_main, &b), 0);
        comm_abort(b.comm);
        pthread_join(joiner, NULL);
        assert_int_equal(b.rc, BL_EABORTED);
        comm_free(b.comm);
        world_close(&w);
    }
}

/* ---- lost peers ---- */

static int lost_peer_body(struct world *w, uint32_t rank)
{
    struct bl_errmsg msg = {{0}};
    struct comm *c = NULL;
    CHECK(join(&c, w, rank) == 0);
    CHECK(comm_barrier(c, &msg) == 0);
    if (rank == 1) {
        kill(getpid(), SIGKILL);
    }
    int rc = comm_barrier(c, &msg);
    CHECK(rc == BL_EPEER);
    CHECK(comm_barrier(c, &msg) == BL_EPEER);
    comm_free(c);
    return 0;
}

static void test_killed_peer_is_an_error_at_once(void **state)
{
    (void)state;
    run_processes_but_one("abc", lost_peer_body, 1);
    run_processes_but_one("aaa", lost_peer_body, 1);
    run_processes_but_one("aab", lost_peer_body, 1);
}

static int deadline_body(struct world *w, uint32_t rank)
{
    struct bl_errmsg msg = {{0}};
    struct comm *c = NULL;
    struct comm_config config = world_config(w, rank);
    config.op_deadline_ms = rank == 0 ? SHORT_MS : JOIN_MS;
    CHECK(join_with(&c, w, &config, JOIN_MS) == 0);
    if (rank == 0) {
        CHECK(comm_barrier(c, &msg) == BL_EDEADLINE);
        CHECK(strstr(msg.text, "rank 1") != NULL);
        comm_free(c);
        return 0;
    }
    struct pollfd end = {.fd = c->links[0].fd, .events = POLLRDHUP};
    CHECK(poll(&end, 1, JOIN_MS) == 1); /* rank 0 closes its end when it gave up */
    comm_free(c);
    return 0;
}

static void test_deadline_names_the_rank_that_is_missing(void **state)
{
    (void)state;
    run_threads("aa", deadline_body);
}

static int mismatch_body(struct world *w, uint32_t rank)
{
    struct bl_errmsg msg = {{0}};
    struct comm *c = NULL;
    CHECK(join(&c, w, rank) == 0);
    uint64_t words[2] = {1, 2};
    int rc = comm_sum_u64(c, words, rank + 1, &msg);
    CHECK(rc == BL_EPROTO || rc == BL_EPEER);
    comm_free(c);
    return 0;
}

static void test_sizes_that_disagree_are_an_error_and_no_hang(void **state)
{
    (void)state;
    run_processes("aa", mismatch_body);
    run_processes("ab", mismatch_body);
}

/* ---- joining ---- */

static int wrong_key_body(struct world *w, uint32_t rank)
{
    struct comm *c = NULL;
    struct comm_config config = world_config(w, rank);
    config.key[1] += rank;
    int rc = join_with(&c, w, &config, SHORT_MS);
    CHECK(rc == (rank == 0 ? BL_EDEADLINE : BL_EFOREIGN));
    comm_free(c);
    return 0;
}

static void test_peer_with_another_key_is_refused(void **state)
{
    (void)state;
    run_processes("aa", wrong_key_body);
    run_processes("ab", wrong_key_body);
}

static int call_stranger(const char *endpoint, const char *text)
{
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    addr.sin_port = htons((uint16_t)atoi(strchr(endpoint, ':') + 1));
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&addr, sizeof addr), 0);
    assert_int_equal(send(fd, text, strlen(text), MSG_NOSIGNAL), (ssize_t)strlen(text));
    return fd;
}

static void test_strangers_do_not_stop_a_join(void **state)
{
    (void)state;
    struct world w;
    struct bl_errmsg msg = {{0}};
    struct comm *other;
    world_open(&w, "ab");
    char noise[65];
    memset(noise, 'x', sizeof noise - 1);
    noise[64] = 0;
    int loud = call_stranger(w.peers[0].endpoint, noise);
    int gone = call_stranger(w.peers[0].endpoint, "short");
    close(gone);
    struct blocked b = {.world = &w};
    struct comm_config config = world_config(&w, 0);
    assert_int_equal(comm_new(&b.comm, w.listeners[0], &config, &msg), 0);
    pthread_t joiner;
    assert_int_equal(pthread_create(&joiner, NULL, join_main, &b), 0);
    assert_int_equal(join(&other, &w, 1), 0);
    pthread_join(joiner, NULL);
    assert_int_equal(b.rc, 0);
    close(loud);
    comm_free(b.comm);
    comm_free(other);
    world_close(&w);
}

/* Rank 0 is one generation late: it turns rank 1 away, which tries until it is there. */
static int late_body(struct world *w, uint32_t rank)
{
    struct bl_errmsg msg = {{0}};
    struct comm *c = NULL;
    struct comm_config config = world_config(w, rank);
    if (rank == 0) {
        CHECK(join_with(&c, w, &config, SHORT_MS) == BL_EDEADLINE);
        comm_free(c);
        c = NULL;
    }
    config.generation = 2;
    CHECK(join_with(&c, w, &config, JOIN_MS) == 0);
    CHECK(comm_barrier(c, &msg) == 0);
    comm_free(c);
    return 0;
}

static void test_rank_of_an_older_generation_is_waited_for(void **state)
{
    (void)state;
    run_processes("aa", late_body);
}

static void test_siphash_gives_the_published_vector(void **state)
{
    (void)state;
    uint8_t bytes[15];
    const uint64_t key[2] = {0x0706050403020100ull, 0x0f0e0d0c0b0a0908ull};
    for (uint8_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = i;
    }
    assert_true(comm_siphash(key, bytes, sizeof bytes) == 0xa129ca6149be45e5ull);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_siphash_gives_the_published_vector),
        cmocka_unit_test(test_collectives_agree_through_shared_memory),
        cmocka_unit_test(test_collectives_agree_through_tcp),
        cmocka_unit_test(test_collectives_agree_when_nodes_are_mixed),
        cmocka_unit_test(test_collectives_agree_between_threads),
        cmocka_unit_test(test_abort_wakes_a_blocked_collective),
        cmocka_unit_test(test_abort_wakes_a_rank_that_joins),
        cmocka_unit_test(test_killed_peer_is_an_error_at_once),
        cmocka_unit_test(test_deadline_names_the_rank_that_is_missing),
        cmocka_unit_test(test_sizes_that_disagree_are_an_error_and_no_hang),
        cmocka_unit_test(test_peer_with_another_key_is_refused),
        cmocka_unit_test(test_strangers_do_not_stop_a_join),
        cmocka_unit_test(test_rank_of_an_older_generation_is_waited_for),
    };
    alarm(TEST_ALARM);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
