/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups of a communicator, ordered sums, and messages by tag: through rings, sockets and both, and
 * what the bound of early messages does.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/trainer/comm_world.h"
#include "trainer/comm_host.h"

#define MESSAGES    6
#define LARGE_BYTES (700u * 1024) /* more than a ring and a socket take */
#define SUM_ELEMS   200003u       /* several pieces and a rest */

static struct bl_errmsg msg; /* of no interest where the code says all */

/* ---- groups ---- */

/* Ranks of a 2 x 3 grid: pairs that work at their own pace, columns that meet now and then. */
static int grid_body(struct world *w, uint32_t rank)
{
    struct comm *c = NULL;
    struct comm_group *pair, *column;
    const uint32_t pair_ranks[2] = {rank / 2 * 2, rank / 2 * 2 + 1};
    const uint32_t column_ranks[3] = {rank % 2 + 4, rank % 2, rank % 2 + 2};
    CHECK(join(&c, w, rank) == 0);
    CHECK(comm_group_new(&pair, c, pair_ranks, 2, &msg) == 0);
    CHECK(comm_group_new(&column, c, column_ranks, 3, &msg) == 0);
    CHECK(comm_group_rank(pair) == rank % 2 && comm_group_size(pair) == 2);
    CHECK(comm_group_rank(column) == (rank / 2 + 1) % 3);
    for (uint32_t turn = 0; turn < 10; turn++) {
        for (uint32_t k = 0; k < 7 * (rank / 2); k++) {
            uint64_t sum = rank + k;
            CHECK(comm_group_sum_u64(pair, &sum, 1, &msg) == 0);
            CHECK(sum == pair_ranks[0] + pair_ranks[1] + 2 * k);
        }
        uint64_t word = rank + turn;
        CHECK(comm_group_broadcast(column, turn % 3, &word, sizeof word, &msg) == 0);
        CHECK(word == column_ranks[turn % 3] + turn);
        uint64_t all = 1;
        CHECK(turn % 4 != 0 || comm_sum_u64(c, &all, 1, &msg) == 0);
        CHECK(turn % 4 != 0 || all == w->size);
    }
    comm_group_free(pair);
    comm_group_free(column);
    comm_free(c);
    return 0;
}

static void test_groups_march_by_themselves(void **state)
{
    (void)state;
    run_processes("aaaaaa", grid_body);
    run_processes("abcdef", grid_body);
    run_threads("aabbab", grid_body);
}

static int two_lists_body(struct world *w, uint32_t rank)
{
    struct comm *c = NULL;
    struct comm_group *one, *two;
    const uint32_t ranks[2] = {0, 1}, foreign[1] = {1 - rank}, twice[2] = {rank, rank};
    CHECK(join(&c, w, rank) == 0);
    CHECK(comm_group_new(&one, c, foreign, 1, &msg) == BL_ECONFIG);
    CHECK(comm_group_new(&one, c, twice, 2, &msg) == BL_ECONFIG);
    CHECK(comm_group_new(&one, c, ranks, 2, &msg) == 0);
    CHECK(comm_group_new(&two, c, ranks, 2, &msg) == 0); /* the same list, its own numbers */
    uint64_t sum = 1;
    CHECK(comm_group_sum_u64(one, &sum, 1, &msg) == 0 && sum == 2);
    CHECK(comm_group_sum_u64(two, &sum, 1, &msg) == 0 && sum == 4);
    /* Members that go to different groups find out. */
    int rc = comm_group_sum_u64(rank == 0 ? one : two, &sum, 1, &msg);
    CHECK(rc == BL_EPROTO || rc == BL_EPEER);
    comm_group_free(one);
    comm_group_free(two);
    comm_free(c);
    return 0;
}

static void test_members_in_different_groups_are_an_error_and_no_hang(void **state)
{
    (void)state;
    run_processes("aa", two_lists_body);
    run_processes("ab", two_lists_body);
}

/* ---- sums ---- */

/* Numbers whose sum depends on the order. */
static float addend(uint64_t i, uint32_t member)
{
    uint32_t bits = (uint32_t)(i * 2654435761u) ^ (member * 40503u + 77u) * 2246822519u;
    float scale = (bits & 7) == 0 ? 1e6f : (bits & 7) == 1 ? 1e-5f : 1.0f;
    return ((float)(bits >> 8) / 8388608.0f - 1.0f) * scale;
}

static float sum_of_all(uint64_t i, uint32_t count)
{
    float sum = addend(i, 0);
    for (uint32_t m = 1; m < count; m++) {
        sum += addend(i, m);
    }
    return sum;
}

static int check_sums(struct comm_group *g, uint32_t rank, uint64_t count)
{
    uint32_t me = comm_group_rank(g), size = comm_group_size(g);
    float *data = malloc(count * sizeof *data + 1);
    uint64_t bounds[WORLD_MAX + 1] = {0};
    CHECK(data != NULL);
    for (uint64_t i = 0; i < count; i++) {
        data[i] = addend(i, me);
    }
    CHECK(comm_group_sum_f32(g, data, count, &msg) == 0);
    for (uint64_t i = 0; i < count; i++) {
        float want = sum_of_all(i, size);
        CHECK(memcmp(&data[i], &want, sizeof want) == 0);
        data[i] = addend(i, me);
    }
    for (uint32_t m = 1; m <= size; m++) { /* member 0 has two shares, member 1 none */
        bounds[m] = m == size ? count : count * (m == 1 ? 2 : m) / size;
    }
    CHECK(comm_group_reduce_scatter_f32(g, data, bounds, &msg) == 0);
    for (uint64_t i = 0; i < count; i++) {
        float want = i >= bounds[me] && i < bounds[me + 1] ? sum_of_all(i, size) : addend(i, me);
        CHECK(memcmp(&data[i], &want, sizeof want) == 0);
    }
    free(data);
    return 0;
}

static int is_private; /* set before ranks start */

static int sums_body(struct world *w, uint32_t rank)
{
    struct comm *c = NULL;
    struct comm_group *turned;
    uint32_t ranks[WORLD_MAX];
    for (uint32_t i = 0; i < w->size; i++) {
        ranks[i] = (i + 1) % w->size;
    }
    struct comm_config config = world_config(w, rank);
    config.is_private = is_private && rank == w->size - 1; /* one is enough for all */
    CHECK(join_with(&c, w, &config, JOIN_MS) == 0);
    CHECK(comm_group_new(&turned, c, ranks, w->size, &msg) == 0);
    static const uint64_t counts[] = {0, 1, 17, 5000, SUM_ELEMS};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        CHECK(check_sums(turned, rank, counts[i]) == 0);
        CHECK(check_sums(comm_everyone(c), rank, counts[i]) == 0);
    }
    comm_group_free(turned);
    comm_free(c);
    return 0;
}

static void test_sums_are_in_the_order_of_the_list(void **state)
{
    (void)state;
    for (is_private = 0; is_private < 2; is_private++) {
        run_processes("aa", sums_body);
        run_threads("aaa", sums_body);
    }
    run_threads("a", sums_body);
    run_processes("abcd", sums_body);
    run_threads("aabab", sums_body);
}

/* ---- messages ---- */

static int fill(uint8_t **ret, uint64_t bytes, uint32_t seed)
{
    uint8_t *data = malloc(bytes + 1);
    if (data == NULL) {
        return 1;
    }
    for (uint64_t i = 0; i < bytes; i++) {
        data[i] = pattern(i, seed);
    }
    *ret = data;
    return 0;
}

static int is_filled(const uint8_t *data, uint64_t bytes, uint32_t seed)
{
    for (uint64_t i = 0; i < bytes; i++) {
        if (data[i] != pattern(i, seed)) {
            return 0;
        }
    }
    return 1;
}

/* All ranks send large messages to all others before anyone starts a receive. */
static int both_ways_body(struct world *w, uint32_t rank)
{
    struct comm *c = NULL;
    struct comm_request *sends[WORLD_MAX][MESSAGES], *recvs[WORLD_MAX][MESSAGES];
    uint8_t *out[WORLD_MAX][MESSAGES], *in[WORLD_MAX][MESSAGES];
    CHECK(join(&c, w, rank) == 0);
    for (uint32_t r = 0; r < w->size; r++) {
        for (uint32_t k = 0; r != rank && k < MESSAGES; k++) {
            CHECK(fill(&out[r][k], LARGE_BYTES, rank * 50 + k) == 0);
            CHECK(comm_send_start(c, r, k / 2, out[r][k], LARGE_BYTES, &sends[r][k], &msg) == 0);
        }
    }
    for (uint32_t r = 0; r < w->size; r++) { /* tags backwards, equal tags in order */
        for (uint32_t k = MESSAGES; r != rank && k-- > 0;) {
            uint32_t at = k ^ 1;
            CHECK(fill(&in[r][at], LARGE_BYTES, 0) == 0);
            CHECK(comm_recv_start(c, r, at / 2, in[r][at], LARGE_BYTES, &recvs[r][at], &msg) == 0);
        }
    }
    CHECK(comm_barrier(c, &msg) == 0); /* passes what is under way */
    for (uint32_t r = 0; r < w->size; r++) {
        for (uint32_t k = 0; r != rank && k < MESSAGES; k++) {
            CHECK(comm_wait(c, recvs[r][k], &msg) == 0);
            CHECK(comm_wait(c, sends[r][k], &msg) == 0);
            CHECK(is_filled(in[r][k], LARGE_BYTES, r * 50 + k));
            free(out[r][k]);
            free(in[r][k]);
        }
    }
    CHECK(comm_wait(c, NULL, &msg) == 0);
    comm_free(c);
    return 0;
}

static void test_many_large_messages_go_both_ways_at_once(void **state)
{
    (void)state;
    run_processes("aa", both_ways_body);
    run_processes("abc", both_ways_body);
    run_threads("aab", both_ways_body);
}

/* Rank 0 waits for what stands behind messages that nobody has asked for yet. */
static int early_body(struct world *w, uint32_t rank)
{
    struct comm *c = NULL;
    struct comm_request *r[3] = {NULL};
    uint8_t *data = NULL, *got = NULL;
    CHECK(join(&c, w, rank) == 0);
    CHECK(fill(&data, LARGE_BYTES, 9) == 0 && fill(&got, LARGE_BYTES, 0) == 0);
    uint8_t small = 5, none = 0;
    if (rank == 1) {
        CHECK(comm_send_start(c, 0, 70, data, LARGE_BYTES, &r[0], &msg) == 0);
        CHECK(comm_send_start(c, 0, 71, &none, 0, &r[1], &msg) == 0);
        CHECK(comm_send_start(c, 0, 72, &small, 1, &r[2], &msg) == 0);
    } else {
        uint8_t last = 0;
        CHECK(comm_recv_start(c, 1, 72, &last, 1, &r[2], &msg) == 0);
        CHECK(comm_wait(c, r[2], &msg) == 0 && last == small);
        CHECK(comm_recv_start(c, 1, 71, &none, 0, &r[1], &msg) == 0);
        CHECK(comm_is_done(r[1]));
        CHECK(comm_recv_start(c, 1, 70, got, LARGE_BYTES, &r[0], &msg) == 0);
        r[2] = NULL;
    }
    for (int i = 0; i < 3; i++) {
        CHECK(comm_wait(c, r[i], &msg) == 0);
    }
    CHECK(rank == 1 || is_filled(got, LARGE_BYTES, 9));
    CHECK(comm_barrier(c, &msg) == 0);
    free(data);
    free(got);
    comm_free(c);
    return 0;
}

static void test_early_message_is_kept(void **state)
{
    (void)state;
    run_processes("aa", early_body);
    run_processes("ab", early_body);
}

/* A message over the bound waits at its sender's side until its receive is started; others pass. */
static int bound_body(struct world *w, uint32_t rank)
{
    struct comm *c = NULL;
    struct comm_request *large, *token;
    uint8_t *data = NULL, word = 5;
    struct comm_config config = world_config(w, rank);
    config.early_bytes_max = LARGE_BYTES / 2;
    CHECK(join_with(&c, w, &config, JOIN_MS) == 0);
    CHECK(fill(&data, LARGE_BYTES, rank) == 0);
    if (rank == 1) {
        CHECK(comm_send_start(c, 0, 70, data, LARGE_BYTES, &large, &msg) == 0);
        CHECK(comm_send_start(c, 2, 1, &word, 1, &token, &msg) == 0);
        CHECK(comm_wait(c, token, &msg) == 0);
        CHECK(comm_wait(c, large, &msg) == 0);
    } else {
        CHECK(comm_recv_start(c, rank == 2 ? 1 : 2, 1, &word, 1, &token, &msg) == 0);
        CHECK(comm_wait(c, token, &msg) == 0);
        if (rank == 0) {
            CHECK(comm_recv_start(c, 1, 70, data, LARGE_BYTES, &large, &msg) == 0);
            CHECK(comm_wait(c, large, &msg) == 0);
            CHECK(is_filled(data, LARGE_BYTES, 1));
        } else {
            CHECK(comm_send_start(c, 0, 1, &word, 1, &token, &msg) == 0);
            CHECK(comm_wait(c, token, &msg) == 0);
        }
    }
    CHECK(comm_barrier(c, &msg) == 0);
    free(data);
    comm_free(c);
    return 0;
}

static void test_early_message_over_the_bound_waits_at_the_sender(void **state)
{
    (void)state;
    run_processes("aaa", bound_body);
    run_processes("abc", bound_body);
}

/* Rank 0 waits for what can never come: it stands behind a message over the bound. */
static int over_bound_body(struct world *w, uint32_t rank)
{
    struct comm *c = NULL;
    struct comm_request *first, *second;
    struct bl_errmsg why = {{0}};
    uint8_t *data = NULL, small = 5;
    struct comm_config config = world_config(w, rank);
    config.early_bytes_max = LARGE_BYTES / 2;
    CHECK(join_with(&c, w, &config, JOIN_MS) == 0);
    CHECK(fill(&data, LARGE_BYTES, 9) == 0);
    if (rank == 1) {
        CHECK(comm_send_start(c, 0, 70, data, LARGE_BYTES, &first, &msg) == 0);
        CHECK(comm_send_start(c, 0, 71, &small, 1, &second, &msg) == 0);
        int rc = comm_wait(c, second, &msg);                       /* a socket may take all of it */
        CHECK((rc == 0 ? comm_barrier(c, &msg) : rc) == BL_EPEER); /* rank 0 gave up */
    } else {
        CHECK(comm_recv_start(c, 1, 71, &small, 1, &second, &msg) == 0);
        CHECK(comm_wait(c, second, &why) == BL_ELIMIT);
        CHECK(strstr(why.text, "rank 1") != NULL && strstr(why.text, "early_bytes_max") != NULL);
        CHECK(comm_barrier(c, &msg) == BL_ELIMIT);
    }
    free(data);
    comm_free(c);
    return 0;
}

static void test_call_that_waits_behind_the_bound_is_refused(void **state)
{
    (void)state;
    run_processes("aa", over_bound_body);
    run_processes("ab", over_bound_body);
}

static void note_last(void *ctx, uint64_t sequence, uint32_t waiting)
{
    uint64_t *last = ctx;
    (void)waiting;
    *last = sequence;
}

/* Rank 0 has two messages for rank 1, rank 2 none: all make one call. */
static int wait_all_body(struct world *w, uint32_t rank)
{
    struct comm *c = NULL;
    struct comm_request *r[2] = {NULL};
    uint8_t *data[2] = {NULL};
    uint64_t calls = 0;
    uint32_t count = rank == 2 ? 0 : 2;
    struct comm_config config = world_config(w, rank);
    config.note = note_last;
    config.note_ctx = &calls;
    CHECK(join_with(&c, w, &config, JOIN_MS) == 0);
    for (uint32_t i = 0; i < count; i++) {
        CHECK(fill(&data[i], LARGE_BYTES, rank * 2 + i) == 0);
        CHECK((rank == 0 ? comm_send_start(c, 1, i, data[i], LARGE_BYTES, &r[i], &msg)
                         : comm_recv_start(c, 0, i, data[i], LARGE_BYTES, &r[i], &msg)) == 0);
    }
    CHECK(comm_wait_all(c, r, count, &msg) == 0 && calls == 1);
    for (uint32_t i = 0; i < count; i++) {
        CHECK(is_filled(data[i], LARGE_BYTES, i));
        free(data[i]);
    }
    CHECK(comm_barrier(c, &msg) == 0 && calls == 2);
    comm_free(c);
    return 0;
}

static void test_waiting_for_all_is_one_call_of_any_number(void **state)
{
    (void)state;
    run_processes("aaa", wait_all_body);
    run_processes("abc", wait_all_body);
}

static int sizes_body(struct world *w, uint32_t rank)
{
    struct comm *c = NULL;
    struct comm_request *r;
    uint8_t word[2] = {0};
    CHECK(join(&c, w, rank) == 0);
    if (rank == 0) {
        struct bl_errmsg why = {{0}};
        int rc = comm_recv_start(c, 1, 8, word, 1, &r, &why);
        rc = rc != 0 ? rc : comm_wait(c, r, &why);
        CHECK(rc == BL_EPROTO && strstr(why.text, "tag 8") != NULL);
    } else {
        CHECK(comm_send_start(c, 0, 8, word, 2, &r, &msg) == 0);
        CHECK(comm_wait(c, r, &msg) == 0);
        CHECK(comm_barrier(c, &msg) == BL_EPEER);
    }
    comm_free(c);
    return 0;
}

static void test_message_of_another_size_is_an_error(void **state)
{
    (void)state;
    run_processes("aa", sizes_body);
    run_processes("ab", sizes_body);
}

static int poke_body(struct world *w, uint32_t rank)
{
    struct comm *c = NULL;
    struct comm_request *r;
    uint8_t *data = NULL;
    CHECK(join(&c, w, rank) == 0);
    CHECK(fill(&data, LARGE_BYTES, rank) == 0);
    CHECK((rank == 0 ? comm_send_start(c, 1, 3, data, LARGE_BYTES, &r, &msg)
                     : comm_recv_start(c, 0, 3, data, LARGE_BYTES, &r, &msg)) == 0);
    uint64_t until = bl_now_ns() + JOIN_MS * 1000000ull;
    while (!comm_is_done(r) && bl_now_ns() < until) { /* no other call moves it */
        comm_poke(c);
        sched_yield();
    }
    CHECK(comm_is_done(r));
    CHECK(comm_wait(c, r, &msg) == 0);
    CHECK(is_filled(data, LARGE_BYTES, 0));
    free(data);
    CHECK(comm_barrier(c, &msg) == 0);
    comm_free(c);
    return 0;
}

static int push_body(struct world *w, uint32_t rank)
{
    struct comm *c = NULL;
    struct comm_request *r;
    uint8_t *data = NULL;
    CHECK(join(&c, w, rank) == 0);
    CHECK(fill(&data, LARGE_BYTES, rank) == 0);
    CHECK((rank == 0 ? comm_send_start(c, 1, 3, data, LARGE_BYTES, &r, &msg)
                     : comm_recv_start(c, 0, 3, data, LARGE_BYTES, &r, &msg)) == 0);
    uint64_t until = bl_now_ns() + JOIN_MS * 1000000ull;
    while (rank == 0 && !comm_is_done(r) && bl_now_ns() < until) {
        comm_push(c, r);
        sched_yield();
    }
    CHECK(rank == 1 || comm_is_done(r));
    CHECK(comm_wait(c, r, &msg) == 0);
    CHECK(is_filled(data, LARGE_BYTES, 0));
    free(data);
    CHECK(comm_barrier(c, &msg) == 0);
    comm_free(c);
    return 0;
}

static void test_push_hands_a_message_to_who_waits(void **state)
{
    (void)state;
    run_processes("aa", push_body);
    run_processes("ab", push_body);
}

static void test_poke_alone_moves_a_message(void **state)
{
    (void)state;
    run_processes("aa", poke_body);
    run_processes("ab", poke_body);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_groups_march_by_themselves),
        cmocka_unit_test(test_members_in_different_groups_are_an_error_and_no_hang),
        cmocka_unit_test(test_sums_are_in_the_order_of_the_list),
        cmocka_unit_test(test_many_large_messages_go_both_ways_at_once),
        cmocka_unit_test(test_early_message_is_kept),
        cmocka_unit_test(test_early_message_over_the_bound_waits_at_the_sender),
        cmocka_unit_test(test_call_that_waits_behind_the_bound_is_refused),
        cmocka_unit_test(test_waiting_for_all_is_one_call_of_any_number),
        cmocka_unit_test(test_message_of_another_size_is_an_error),
        cmocka_unit_test(test_poke_alone_moves_a_message),
        cmocka_unit_test(test_push_hands_a_message_to_who_waits),
    };
    alarm(TEST_ALARM);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
