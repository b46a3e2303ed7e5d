/* SPDX-License-Identifier: Apache-2.0 */
/* A real belay-engine over a socket pair, and ranks' arenas to give it. */
#ifndef BL_TESTS_CKPT_ENGINE_FIXTURE_H
#define BL_TESTS_CKPT_ENGINE_FIXTURE_H

#include <sys/types.h>

#include "tests/ckpt/sample.h"
#include "wire/sock.h"

#define FIXTURE_RUN     0x1122334455667788ull
#define FIXTURE_WAIT_MS 60000 /* the engine is nice, and the machine may be busy */

struct fixture {
    char root[256];
    struct wire_sock sock;
    pid_t pid;
};
extern struct fixture fixture;
extern const char *fixture_codec;   /* of the writes that follow */
extern enum sample_cut fixture_cut; /* of the arenas that are made: flat unless a test says so */

/* For cmocka: a fresh root and an engine; teardown wants it to leave with 0. */
int fixture_setup(void **state);
int fixture_teardown(void **state);
/* The same with BELAY_FAIL in the engine's environment. */
int fixture_setup_failing(const char *failpoints);
/* Another engine in the place of this one, on the same root. */
void fixture_restart(void);

/* Sends a question and takes its answer, which must be the next message. */
void fixture_ask(enum wire_type type, const void *message, const int *fds, uint32_t fd_count,
                 enum wire_type answer_type, void *answer);
void fixture_send(enum wire_type type, const void *message, const int *fds, uint32_t fd_count);
void fixture_expect(enum wire_type type, void *answer);

/* A rank's arena whose slot 1 is sealed as `step`, or empty when `step` is 0. */
struct fixture_arena {
    uint64_t id;
    int fd;
    void *map;
    uint64_t bytes;
    struct sample_shard shard;
};
/* With the state after `data_step` under the label of `step`. */
void fixture_arena_make(struct fixture_arena *arena, uint64_t id, uint32_t world, uint32_t rank,
                        uint64_t step, uint64_t data_step);
void fixture_arena_close(struct fixture_arena *arena);

struct wire_engine_root fixture_root(const char *node);
struct wire_engine_attempt fixture_attempt(uint64_t step);

/* The question that writes arenas (at most WIRE_FDS_MAX) as part "part-NODE". */
void fixture_write_fill(struct wire_engine_write *ret, const char *node, uint64_t step,
                        const struct fixture_arena *arenas, uint32_t count);
/* Asks for it; the answer is the caller's. */
void fixture_write(const char *node, uint64_t step, const struct fixture_arena *arenas,
                   uint32_t count, struct wire_engine_written *answer);

/* Writes ranks 0 and 1 of 2 as a part each, with the data of `data_step`. */
struct fixture_parts {
    struct wire_engine_written written[2];
    struct wire_engine_part parts[2];
    char json[512];
};
void fixture_parts_write(struct fixture_parts *ret, uint64_t step, uint64_t data_step);
void fixture_parts_close(struct fixture_parts *parts);
/* The question that commits them; views of `parts` inside. */
struct wire_engine_commit fixture_commit_of(struct fixture_parts *parts, uint64_t step);
/* Both, keeping two; the answer must be good. */
void fixture_save(uint64_t step, uint32_t verify, struct wire_engine_committed *answer);

/* The next message must say that `step` was read back, with `rc`. */
void fixture_expect_verified(struct wire_engine_verified *answer, uint64_t step, int32_t rc);
/* How many good checkpoints there are, and the newest's step. */
uint32_t fixture_scan_count(uint64_t *ret_newest);

#endif
