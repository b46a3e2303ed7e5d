/* SPDX-License-Identifier: Apache-2.0 */
/* The collectives, on comm_exchange alone. */
#include <string.h>

#include "trainer/comm_host.h"

#define SUM_WORDS_MAX 64u

int comm_allgather(struct comm *comm, void *base, const uint64_t *bounds, struct bl_errmsg *msg)
{
    struct comm_part *sends = comm->parts, *recvs = comm->parts + comm->world;
    uint8_t *bytes = base;
    uint32_t me = comm->rank;
    for (uint32_t r = 0; r < comm->world; r++) {
        sends[r] = (struct comm_part){bytes + bounds[me], bounds[me + 1] - bounds[me]};
        recvs[r] = (struct comm_part){bytes + bounds[r], bounds[r + 1] - bounds[r]};
    }
    return comm_exchange(comm, sends, recvs, msg);
}

int comm_broadcast(struct comm *comm, uint32_t root, void *data, uint64_t bytes,
                   struct bl_errmsg *msg)
{
    struct comm_part *sends = comm->parts, *recvs = comm->parts + comm->world;
    for (uint32_t r = 0; r < comm->world; r++) {
        sends[r] = (struct comm_part){data, comm->rank == root ? bytes : 0};
        recvs[r] = (struct comm_part){data, r == root ? bytes : 0};
    }
    return comm_exchange(comm, sends, recvs, msg);
}

int comm_sum_u64(struct comm *comm, uint64_t *values, uint32_t count, struct bl_errmsg *msg)
{
    BL_ASSERT(count <= SUM_WORDS_MAX);
    uint64_t row = count * sizeof *values;
    for (uint32_t r = 0; r <= comm->world; r++) {
        comm->bounds[r] = r * row;
    }
    memcpy(comm->words + comm->rank * count, values, row);
    int rc = comm_allgather(comm, comm->words, comm->bounds, msg);
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        values[i] = 0;
        for (uint32_t r = 0; r < comm->world; r++) {
            values[i] += comm->words[r * count + i];
        }
    }
    return rc;
}

int comm_barrier(struct comm *comm, struct bl_errmsg *msg)
{
    uint64_t zero = 0;
    return comm_sum_u64(comm, &zero, 1, msg);
}
