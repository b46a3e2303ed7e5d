/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading a peer's memory where it lies: process_vm_readv copies once, without a ring between. It
 * wants the right to trace the peer (the same user, and a kernel and container that allow it), so a
 * group tries it once, all members together: each tells the address of a random number, and all
 * must have read all the others'. Memory is only ever read, so a process that took over the number
 * of a dead peer loses nothing. The collective that ends every direct one tells that all have read,
 * so that data may change; of whoever got no further than that, because it gave up, another may
 * have read what was no longer there. So what was read counts once its owner has been heard of
 * again: a step is applied after a vote, and weights that are gathered after it are used up before
 * the next.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include "trainer/comm_host.h"

#define DIRECT_READ_BYTES (4u << 20) /* at once: about a millisecond, then an abort is seen */

enum { NO_DIRECT = -1, UNTRIED = 0, DIRECT = 1 };

struct comm_direct { /* what a member tells */
    uint64_t pid;
    uint64_t address; /* of the data */
    uint64_t proof;   /* address of a random number, and the number */
    uint64_t number;
};

/* All members' words to all. */
static int tell(struct comm_group *g, const void *data, const uint64_t *number,
                struct bl_errmsg *msg)
{
    for (uint32_t m = 0; m <= g->count; m++) {
        g->bounds[m] = m * sizeof *g->direct;
    }
    g->direct[g->me] = (struct comm_direct){.pid = (uint64_t)getpid(),
                                            .address = (uint64_t)(uintptr_t)data,
                                            .proof = (uint64_t)(uintptr_t)number,
                                            .number = *number};
    return comm_group_gather_sent(g, g->direct, g->bounds, msg);
}

static int64_t read_of(const struct comm_direct *of, uint64_t address, void *to, uint64_t bytes)
{
    struct iovec local = {to, bytes};
    struct iovec remote = {(void *)(uintptr_t)address, bytes};
    ssize_t n = process_vm_readv((pid_t)of->pid, &local, 1, &remote, 1, 0);
    return n < 0 ? -errno : n;
}

static int is_readable(const struct comm_direct *of)
{
    uint64_t got = ~of->number;
    return read_of(of, of->proof, &got, sizeof got) == (int64_t)sizeof got && got == of->number;
}

static int are_all_shared(const struct comm_group *g)
{
    for (uint32_t m = 0; m < g->count; m++) {
        if (m != g->me && !g->comm->links[g->ranks[m]].shared) {
            return 0;
        }
    }
    return 1;
}

/* Tries it; members that cannot take part take part in the trial. */
static int direct_try(struct comm_group *g, struct bl_errmsg *msg)
{
    uint64_t number = 0, failures = g->comm->is_private || !are_all_shared(g);
    g->direct = calloc(g->count, sizeof *g->direct);
    if (g->direct == NULL || getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number) {
        return bl_err_code(msg, -ENOMEM, "group of %u ranks", g->count);
    }
    int rc = tell(g, NULL, &number, msg);
    for (uint32_t m = 0; rc == 0 && failures == 0 && m < g->count; m++) {
        failures += m != g->me && !is_readable(&g->direct[m]);
    }
    if (rc == 0) {
        rc = comm_group_sum_u64(g, &failures, 1, msg); /* the number stays until all are here */
    }
    if (rc == 0) {
        g->is_direct = failures == 0 ? DIRECT : NO_DIRECT;
    }
    return rc;
}

int comm_direct_meet(struct comm_group *group, const void *data, int *ret_is_direct,
                     struct bl_errmsg *msg)
{
    static const uint64_t zero;
    int rc = comm_broken(group->comm, msg);
    if (rc != 0 || group->count == 1) {
        *ret_is_direct = 0;
        return rc;
    }
    if (group->is_direct == UNTRIED) {
        rc = direct_try(group, msg);
    }
    if (rc == 0 && group->is_direct == DIRECT) {
        rc = tell(group, data, &zero, msg);
    }
    *ret_is_direct = group->is_direct == DIRECT;
    return rc;
}

int comm_direct_part(struct comm_group *group, struct bl_errmsg *msg)
{
    uint64_t zero = 0;
    return comm_group_sum_u64(group, &zero, 1, msg);
}

int comm_direct_read(struct comm_group *group, uint32_t member, uint64_t offset, void *to,
                     uint64_t bytes, struct bl_errmsg *msg)
{
    const struct comm_direct *of = &group->direct[member];
    struct bl_errmsg why = {{0}};
    uint64_t done = 0;
    while (done < bytes) {
        if (comm_is_aborted(group->comm)) {
            bl_err_code(&why, BL_EABORTED, "collective of a group");
            return comm_fail(group->comm, BL_EABORTED, &why, msg);
        }
        uint64_t left = bytes - done < DIRECT_READ_BYTES ? bytes - done : DIRECT_READ_BYTES;
        int64_t n = read_of(of, of->address + offset + done, (uint8_t *)to + done, left);
        if (n <= 0) {
            bl_err_code(&why, BL_EPEER, "rank %u", group->ranks[member]);
            return comm_fail(group->comm, BL_EPEER, &why, msg);
        }
        done += (uint64_t)n;
    }
    return 0;
}
