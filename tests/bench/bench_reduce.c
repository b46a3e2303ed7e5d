/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench-reduce RANKS BYTES TURNS [nodes]: the time of an ordered all-reduce of BYTES of floats
 * between RANKS processes of this machine, one line of milliseconds a turn; with "nodes" each rank
 * is a node of its own, so bytes go through TCP. Sums are compared with what they must be.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "trainer/comm.h"

#define RANKS_MAX   64u
#define DEADLINE_MS 60000u

struct bench {
    uint32_t ranks, turns;
    uint64_t elems;
    struct comm_listener *listeners[RANKS_MAX];
    struct comm_peer peers[RANKS_MAX];
    char nodes[RANKS_MAX][16];
};

static int die(const struct bl_errmsg *msg)
{
    fprintf(stderr, "bench-reduce: %s\n", msg->text);
    return 3;
}

static int is_sum_right(const struct bench *b, const float *data)
{
    float want = (float)b->ranks * (float)(b->ranks + 1) / 2;
    for (uint64_t i = 0; i < b->elems; i++) {
        if (data[i] != want) {
            return 0;
        }
    }
    return 1;
}

static double cpu_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static int turn(struct bench *b, struct comm *c, float *data, int is_shown, struct bl_errmsg *msg)
{
    uint32_t rank = comm_rank(c);
    for (uint64_t i = 0; i < b->elems; i++) {
        data[i] = (float)(rank + 1);
    }
    int rc = comm_barrier(c, msg);
    uint64_t begun = bl_now_ns();
    double cpu0 = cpu_ms();
    if (rc == 0) {
        rc = comm_group_sum_f32(comm_everyone(c), data, b->elems, msg);
    }
    if (rc == 0) {
        rc = comm_barrier(c, msg); /* until the last one has it */
    }
    uint64_t took = bl_now_ns() - begun;
    double cpu = cpu_ms() - cpu0;
    if (rc == 0 && !is_sum_right(b, data)) {
        rc = bl_err(msg, BL_ENUMERIC, "a wrong sum on rank %u", rank);
    }
    if (rc == 0 && rank == 0 && is_shown) {
        printf("%.3f %.3f\n", (double)took / 1e6, cpu);
    }
    return rc;
}

static int run_rank(struct bench *b, uint32_t rank)
{
    struct bl_errmsg msg = {{0}};
    struct comm *c = NULL;
    struct comm_config config = {.rank = rank,
                                 .world = b->ranks,
                                 .generation = 1,
                                 .key = {1, 2},
                                 .peers = b->peers,
                                 .op_deadline_ms = DEADLINE_MS};
    int rc = comm_new(&c, b->listeners[rank], &config, &msg);
    if (rc == 0) {
        rc = comm_connect(c, DEADLINE_MS, &msg);
    }
    float *data = bl_mem_alloc(b->elems * sizeof *data); /* as the trainer's buffers */
    if (data == NULL) {
        return 3;
    }
    for (uint32_t i = 0; rc == 0 && i <= b->turns; i++) {
        rc = turn(b, c, data, i > 0, &msg); /* the first one warms up */
    }
    bl_mem_free(data, b->elems * sizeof *data);
    comm_free(c);
    return rc == 0 ? fflush(stdout) : die(&msg);
}

int main(int argc, char **argv)
{
    static struct bench b;
    struct bl_errmsg msg = {{0}};
    if (argc < 4 || (b.ranks = (uint32_t)atoi(argv[1])) == 0 || b.ranks > RANKS_MAX) {
        fprintf(stderr, "bench-reduce RANKS BYTES TURNS [nodes]\n");
        return 2;
    }
    b.elems = strtoull(argv[2], NULL, 10) / 64 * 64 / sizeof(float);
    b.turns = (uint32_t)atoi(argv[3]);
    for (uint32_t i = 0; i < b.ranks; i++) {
        if (comm_listener_open(&b.listeners[i], NULL, &msg) != 0) {
            return die(&msg);
        }
        snprintf(b.nodes[i], sizeof b.nodes[i], "n%u", argc > 4 ? i : 0);
        b.peers[i] = (struct comm_peer){comm_listener_endpoint(b.listeners[i]), b.nodes[i]};
    }
    for (uint32_t i = 1; i < b.ranks; i++) {
        if (fork() == 0) {
            return run_rank(&b, i);
        }
    }
    int rc = run_rank(&b, 0), status;
    while (wait(&status) > 0) {
        rc = rc == 0 && status != 0 ? 3 : rc;
    }
    return rc;
}
