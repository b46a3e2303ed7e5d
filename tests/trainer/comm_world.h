/* SPDX-License-Identifier: Apache-2.0 */
/* Worlds of ranks for the tests of the communicator: child processes, or threads of one. */
#ifndef TESTS_TRAINER_COMM_WORLD_H
#define TESTS_TRAINER_COMM_WORLD_H

#include <stdint.h>
#include <stdio.h>

#include "trainer/comm.h"

#define WORLD_MAX  8
#define JOIN_MS    20000
#define TEST_ALARM 120 /* seconds until a hang ends a test program */

struct world {
    uint32_t size;
    uint64_t key[2];
    struct comm_listener *listeners[WORLD_MAX];
    struct comm_peer peers[WORLD_MAX];
};

/* nodes: one letter a rank, "aab": equal letters share memory. */
void world_open(struct world *w, const char *nodes);
void world_close(struct world *w);
struct comm_config world_config(const struct world *w, uint32_t rank);

int join_with(struct comm **ret, struct world *w, const struct comm_config *config,
              uint32_t deadline_ms);
int join(struct comm **ret, struct world *w, uint32_t rank);

/* Returns 0 when all is well, else 1, having said what was not. */
typedef int body_fn(struct world *w, uint32_t rank);
#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "rank %u: %s:%d: %s\n", rank, __FILE__, __LINE__, #cond);              \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

void run_processes(const char *nodes, body_fn *body);
/* One of them ends by a signal. */
void run_processes_but_one(const char *nodes, body_fn *body, uint32_t victim);
void run_threads(const char *nodes, body_fn *body);

/* Byte i of what `rank` has. */
static inline uint8_t pattern(uint64_t i, uint32_t rank)
{
    return (uint8_t)(i * 31 + (i >> 9) + rank * 101);
}

#endif
