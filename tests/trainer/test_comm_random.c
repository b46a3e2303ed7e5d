/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random schedules of the communicator against a model: one list of operations that all ranks go
 * through, each doing those that it takes part in; messages are started there and waited for later,
 * in any order. What arrives is computed from the operation alone. COMM_SEED sets the first seed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/trainer/comm_world.h"

#define OPS       160
#define PENDING   24
#define GROUPS    5
#define ELEMS_MAX 40000u
#define BYTES_MAX (300u * 1024)

static uint64_t seed; /* set before ranks start */

static uint64_t next(uint64_t *s) /* splitmix64: Steele, Lea and Flood, 2014 */
{
    uint64_t z = *s += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

struct pending {
    struct comm_request *request;
    uint8_t *data;
    uint64_t bytes;
    uint32_t seed;
    int is_recv;
};

struct walk { /* one rank's way through the list */
    struct comm *comm;
    struct comm_group *groups[GROUPS];
    uint32_t members[GROUPS][WORLD_MAX], sizes[GROUPS];
    struct pending pending[PENDING];
    uint32_t pending_count;
    uint64_t own; /* this rank's random numbers: when it waits */
};

static int finish(struct walk *w, uint32_t rank, uint32_t index)
{
    struct bl_errmsg why = {{0}};
    struct pending p = w->pending[index];
    w->pending[index] = w->pending[--w->pending_count];
    int rc = comm_wait(w->comm, p.request, &why);
    if (rc != 0) {
        fprintf(stderr, "rank %u: wait: %s\n", rank, why.text);
        return 1;
    }
    for (uint64_t i = 0; p.is_recv && i < p.bytes; i++) {
        CHECK(p.data[i] == pattern(i, p.seed));
    }
    free(p.data);
    return 0;
}

static int do_message(struct walk *w, uint32_t rank, uint64_t *s, uint32_t op)
{
    struct bl_errmsg why = {{0}};
    uint32_t world = comm_world(w->comm);
    uint32_t from = (uint32_t)(next(s) % world),
             to = (from + 1 + (uint32_t)(next(s) % (world - 1)));
    uint64_t bytes = next(s) % BYTES_MAX >> next(s) % 19, tag = next(s) % 3;
    to %= world;
    if (rank != from && rank != to) {
        return 0;
    }
    if (w->pending_count == PENDING) {
        CHECK(finish(w, rank, (uint32_t)(next(&w->own) % PENDING)) == 0);
    }
    struct pending *p = &w->pending[w->pending_count++];
    *p = (struct pending){.bytes = bytes, .seed = op, .is_recv = rank == to};
    p->data = malloc(bytes + 1);
    CHECK(p->data != NULL);
    /* A tag of the pair is used by the operation too, so that any order of waits has its message.
     */
    tag += 4 * (uint64_t)op;
    if (p->is_recv) {
        CHECK(comm_recv_start(w->comm, from, tag, p->data, bytes, &p->request, &why) == 0);
        return 0;
    }
    for (uint64_t i = 0; i < bytes; i++) {
        p->data[i] = pattern(i, op);
    }
    CHECK(comm_send_start(w->comm, to, tag, p->data, bytes, &p->request, &why) == 0);
    return 0;
}

static float addend(uint64_t i, uint32_t op, uint32_t member)
{
    return (float)((i * 7919u + op * 31u + member * 1013u) % 65537u) * (member % 2 ? 1e-3f : 1.0f);
}

static int do_sum(struct walk *w, uint32_t rank, uint32_t group, uint64_t count, uint32_t op)
{
    struct bl_errmsg why = {{0}};
    float *data = malloc(count * sizeof *data + 1);
    CHECK(data != NULL);
    for (uint64_t i = 0; i < count; i++) {
        data[i] = addend(i, op, comm_group_rank(w->groups[group]));
    }
    int rc = comm_group_sum_f32(w->groups[group], data, count, &why);
    if (rc != 0) {
        fprintf(stderr, "rank %u: sum: %s\n", rank, why.text);
        return 1;
    }
    for (uint64_t i = 0; i < count; i++) {
        float want = addend(i, op, 0);
        for (uint32_t m = 1; m < w->sizes[group]; m++) {
            want += addend(i, op, m);
        }
        CHECK(memcmp(&data[i], &want, sizeof want) == 0);
    }
    free(data);
    return 0;
}

static int do_broadcast(struct walk *w, uint32_t rank, uint32_t group, uint64_t bytes, uint32_t op)
{
    struct bl_errmsg why = {{0}};
    uint32_t root = op % w->sizes[group];
    uint8_t *data = malloc(bytes + 1);
    CHECK(data != NULL);
    for (uint64_t i = 0; i < bytes; i++) {
        data[i] = rank == w->members[group][root] ? pattern(i, op) : 0;
    }
    CHECK(comm_group_broadcast(w->groups[group], root, data, bytes, &why) == 0);
    for (uint64_t i = 0; i < bytes; i++) {
        CHECK(data[i] == pattern(i, op));
    }
    free(data);
    return 0;
}

static int do_op(struct walk *w, uint32_t rank, uint64_t *s, uint32_t op)
{
    uint64_t kind = next(s) % 8;
    if (kind < 5) {
        return do_message(w, rank, s, op);
    }
    uint32_t group = (uint32_t)(next(s) % GROUPS);
    uint64_t size = next(s) >> next(s) % 16;
    if (w->groups[group] == NULL) {
        return 0;
    }
    return kind < 7 ? do_sum(w, rank, group, size % ELEMS_MAX, op)
                    : do_broadcast(w, rank, group, size % BYTES_MAX, op);
}

/* Groups of random members in a random order; NULL where this rank is none. */
static int make_groups(struct walk *w, uint32_t rank, uint64_t *s)
{
    struct bl_errmsg why = {{0}};
    uint32_t world = comm_world(w->comm);
    for (uint32_t g = 0; g < GROUPS; g++) {
        int is_member = 0;
        for (uint32_t i = 0; i < world; i++) {
            w->members[g][i] = i;
        }
        for (uint32_t i = 0; i < world; i++) {
            uint32_t k = i + (uint32_t)(next(s) % (world - i)), keep = w->members[g][i];
            w->members[g][i] = w->members[g][k];
            w->members[g][k] = keep;
        }
        w->sizes[g] = 1 + (uint32_t)(next(s) % world);
        for (uint32_t i = 0; i < w->sizes[g]; i++) {
            is_member |= w->members[g][i] == rank;
        }
        CHECK(!is_member ||
              comm_group_new(&w->groups[g], w->comm, w->members[g], w->sizes[g], &why) == 0);
    }
    return 0;
}

static int random_body(struct world *world, uint32_t rank)
{
    struct walk w = {.own = seed + 1 + rank};
    uint64_t s = seed;
    struct bl_errmsg why = {{0}};
    struct comm_config config = world_config(world, rank);
    config.is_private = seed % 2 != 0 && rank == 0;
    CHECK(join_with(&w.comm, world, &config, JOIN_MS) == 0);
    CHECK(make_groups(&w, rank, &s) == 0);
    for (uint32_t op = 0; op < OPS; op++) {
        uint64_t of_op = next(&s), choice = next(&w.own) % 6;
        if (choice == 0 && w.pending_count > 0) {
            CHECK(finish(&w, rank, (uint32_t)(next(&w.own) % w.pending_count)) == 0);
        }
        if (choice == 1) {
            comm_poke(w.comm);
        }
        CHECK(do_op(&w, rank, &of_op, op) == 0);
    }
    while (w.pending_count > 0) {
        CHECK(finish(&w, rank, (uint32_t)(next(&w.own) % w.pending_count)) == 0);
    }
    CHECK(comm_barrier(w.comm, &why) == 0);
    for (uint32_t g = 0; g < GROUPS; g++) {
        comm_group_free(w.groups[g]);
    }
    comm_free(w.comm);
    return 0;
}

static void test_random_schedules_give_what_the_model_gives(void **state)
{
    static const char *const worlds[] = {"aaa", "abc", "aabba", "aabbcab"};
    (void)state;
    const char *given = getenv("COMM_SEED");
    uint64_t first = given != NULL ? strtoull(given, NULL, 10) : (uint64_t)time(NULL) * 1000;
    for (uint32_t i = 0; i < 6; i++) {
        seed = first + i;
        printf("COMM_SEED=%llu\n", (unsigned long long)seed);
        fflush(stdout);
        run_threads(worlds[i % 2], random_body);
        run_processes(worlds[i % 4], random_body);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_schedules_give_what_the_model_gives),
    };
    alarm(TEST_ALARM);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
