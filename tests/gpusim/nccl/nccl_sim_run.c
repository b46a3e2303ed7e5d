/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels of NCCL's stand-in do: every call is made of messages between pairs, and sums. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nccl_sim.h"

#define PAUSE_US 50

static const char *const KIND_NAMES[] = {"Send/Recv", "Send/Recv",     "Broadcast", "AllGather",
                                         "AllReduce", "ReduceScatter", "Reduce"};

struct head { /* before the bytes of a message */
    uint64_t kind, bytes;
};

struct part { /* a message on its way */
    struct head head;
    uint8_t *data;
    uint64_t done; /* with the head */
    uint32_t peer;
    int is_send;
    struct head got; /* of a receive */
};

struct run {
    ncclComm_t comm;
    struct part *parts;
    uint32_t count, room;
    uint8_t **temps; /* by op: what its sums are made of */
};

static uint64_t size_of(uint32_t type)
{
    return type == ncclFloat32 ? 4 : type == ncclBfloat16 ? 2 : 1;
}

static void add_part(struct run *r, const struct sim_op *op, uint32_t peer, int is_send,
                     const void *data, uint64_t bytes)
{
    if (r->count == r->room) {
        r->room = 2 * r->room + 64;
        r->parts = realloc(r->parts, r->room * sizeof *r->parts);
        if (!r->parts) {
            abort();
        }
    }
    uint64_t kind = op->kind == SIM_RECV ? SIM_SEND : op->kind;
    r->parts[r->count++] = (struct part){.head = {kind, bytes},
                                         .data = (uint8_t *)(uintptr_t)data,
                                         .peer = peer,
                                         .is_send = is_send};
}

/* Room for what all ranks give to a sum of this rank's. */
static uint8_t *temp_new(struct run *r, uint32_t index, uint64_t bytes)
{
    return r->temps[index] = calloc(r->comm->nranks, bytes + 1);
}

static void plan(struct run *r, const struct sim_op *op, uint32_t index)
{
    uint32_t me = r->comm->rank, n = r->comm->nranks;
    uint64_t bytes = op->count * size_of(op->type);
    if (op->kind == SIM_SEND || op->kind == SIM_RECV) {
        int is_send = op->kind == SIM_SEND;
        add_part(r, op, (uint32_t)op->peer, is_send, is_send ? op->from : op->to, bytes);
        return;
    }
    int has_sum = op->kind == SIM_ALLREDUCE || op->kind == SIM_REDUCESCATTER ||
                  (op->kind == SIM_REDUCE && (uint32_t)op->peer == me);
    uint8_t *temp = has_sum ? temp_new(r, index, bytes) : NULL;
    if (has_sum) {
        memcpy(temp + me * bytes, op->from + (op->kind == SIM_REDUCESCATTER ? me * bytes : 0),
               bytes);
    }
    for (uint32_t p = 0; p < n; p++) {
        int is_root = op->peer == (int)me, is_from_root = op->peer == (int)p;
        if (p == me) {
            continue;
        }
        switch (op->kind) {
        case SIM_BROADCAST:
            if (is_root || is_from_root) {
                add_part(r, op, p, is_root, is_root ? op->from : op->to, bytes);
            }
            break;
        case SIM_ALLGATHER:
            add_part(r, op, p, 1, op->from, bytes);
            add_part(r, op, p, 0, op->to + p * bytes, bytes);
            break;
        case SIM_REDUCE:
            if (is_root || is_from_root) {
                add_part(r, op, p, is_from_root, is_root ? temp + p * bytes : op->from, bytes);
            }
            break;
        default:
            add_part(r, op, p, 1, op->kind == SIM_REDUCESCATTER ? op->from + p * bytes : op->from,
                     bytes);
            add_part(r, op, p, 0, temp + p * bytes, bytes);
        }
    }
}

/* ---- bytes ---- */

static uint64_t ring_move(struct sim_ring *ring, uint8_t *data, uint64_t bytes, int is_write)
{
    uint64_t head = atomic_load(&ring->head), tail = atomic_load(&ring->tail);
    uint64_t room = is_write ? SIM_RING_BYTES - (head - tail) : head - tail;
    uint64_t at = (is_write ? head : tail) % SIM_RING_BYTES;
    uint64_t n = bytes < room ? bytes : room;
    n = n < SIM_RING_BYTES - at ? n : SIM_RING_BYTES - at;
    if (is_write) {
        memcpy(ring->data + at, data, n);
        atomic_store(&ring->head, head + n);
    } else {
        memcpy(data, ring->data + at, n);
        atomic_store(&ring->tail, tail + n);
    }
    return n;
}

static void mismatch(struct run *r, const struct part *p)
{
    snprintf(r->comm->text, sizeof r->comm->text,
             "rank %u is in %s of %llu bytes, rank %u in %s of %llu", r->comm->rank,
             KIND_NAMES[p->head.kind], (unsigned long long)p->head.bytes, p->peer,
             p->got.kind < 7 ? KIND_NAMES[p->got.kind] : "?", (unsigned long long)p->got.bytes);
    atomic_store(&r->comm->state, ncclInvalidUsage);
}

/* Bytes moved of a message; the head goes first. */
static uint64_t part_move(struct run *r, struct part *p)
{
    struct sim_shared *s = r->comm->shared;
    uint32_t from = p->is_send ? r->comm->rank : p->peer, to = p->is_send ? p->peer : r->comm->rank;
    struct sim_ring *ring = &s->rings[from * SIM_RANKS_MAX + to];
    uint64_t n, moved = 0;
    if (p->done < sizeof p->head) {
        uint8_t *head = (uint8_t *)(p->is_send ? &p->head : &p->got);
        moved = ring_move(ring, head + p->done, sizeof p->head - p->done, p->is_send);
        p->done += moved;
        if (p->done == sizeof p->head && !p->is_send && memcmp(&p->head, &p->got, sizeof p->got)) {
            mismatch(r, p);
            return 0;
        }
    }
    while (p->done >= sizeof p->head && p->done < sizeof p->head + p->head.bytes) {
        uint64_t at = p->done - sizeof p->head;
        n = ring_move(ring, p->data + at, p->head.bytes - at, p->is_send);
        p->done += n;
        moved += n;
        if (n == 0) {
            break;
        }
    }
    return moved;
}

static int is_over(const struct part *p)
{
    return p->done == sizeof p->head + p->head.bytes;
}

/* All messages, those of a direction of a pair one after the other. 0: aborted. */
static int move_all(struct run *r)
{
    for (;;) {
        uint64_t moved = 0;
        uint32_t busy_in = 0, busy_out = 0, open = 0; /* pairs that an earlier message has */
        if (atomic_load(&r->comm->is_aborted)) {
            return 0;
        }
        for (uint32_t i = 0; i < r->count && atomic_load(&r->comm->state) == ncclSuccess; i++) {
            struct part *p = &r->parts[i];
            uint32_t *busy = p->is_send ? &busy_out : &busy_in, bit = 1u << p->peer;
            if (!is_over(p) && !(*busy & bit)) {
                moved += part_move(r, p);
            }
            if (!is_over(p)) {
                *busy |= bit;
                open++;
            }
        }
        if (open == 0 && atomic_load(&r->comm->state) == ncclSuccess) {
            return 1;
        }
        if (moved == 0) {
            usleep(PAUSE_US); /* also after an error: until it is aborted */
        }
    }
}

/* ---- sums ---- */

static float load(const uint8_t *p, uint32_t type)
{
    uint32_t bits = 0;
    float x;
    if (type == ncclBfloat16) {
        uint16_t half;
        memcpy(&half, p, 2);
        bits = (uint32_t)half << 16;
    } else {
        memcpy(&bits, p, 4);
    }
    memcpy(&x, &bits, 4);
    return x;
}

static void store(uint8_t *p, float x, uint32_t type)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (type == ncclBfloat16) {
        uint16_t half = (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
        memcpy(p, &half, 2);
    } else {
        memcpy(p, &bits, 4);
    }
}

/* In an order of its own, as a ring's, and rounded each time: not the order of members. */
static void sum(const struct run *r, const struct sim_op *op, const uint8_t *temp)
{
    uint32_t n = r->comm->nranks;
    uint64_t size = size_of(op->type), bytes = op->count * size;
    for (uint64_t i = 0; i < op->count; i++) {
        store(op->to + i * size, load(temp + (n - 1) * bytes + i * size, op->type), op->type);
        for (uint32_t k = n - 1; k-- > 0;) {
            float a = load(op->to + i * size, op->type);
            store(op->to + i * size, a + load(temp + k * bytes + i * size, op->type), op->type);
        }
    }
}

/* ---- the kernel ---- */

static void finish(struct run *r, const struct sim_batch *b, int is_good)
{
    for (uint32_t i = 0; i < b->count; i++) {
        const struct sim_op *op = &b->ops[i];
        uint64_t bytes = op->count * size_of(op->type);
        int is_own = op->kind == SIM_ALLGATHER ||
                     (op->kind == SIM_BROADCAST && op->peer == (int)r->comm->rank);
        if (!is_good && op->to) {
            memset(op->to, 0xf5, bytes); /* an aborted kernel's buffers hold anything */
        } else if (r->temps[i]) {
            sum(r, op, r->temps[i]);
        } else if (is_own) {
            uint8_t *to = op->to + (op->kind == SIM_ALLGATHER ? r->comm->rank * bytes : 0);
            memmove(to, op->from, bytes);
        }
        free(r->temps[i]);
    }
}

void sim_batch_run(void *arg)
{
    struct sim_batch *b = arg;
    uint8_t *temps[SIM_OPS_MAX] = {NULL};
    struct run r = {.comm = b->comm, .temps = temps};
    for (uint32_t i = 0; i < b->count; i++) {
        plan(&r, &b->ops[i], i);
    }
    if (sim_fault("async")) {
        snprintf(b->comm->text, sizeof b->comm->text, "a fault on demand");
        atomic_store(&b->comm->state, ncclRemoteError);
    }
    while (sim_fault("endless") && !atomic_load(&b->comm->is_aborted)) {
        usleep(PAUSE_US);
    }
    finish(&r, b, move_all(&r));
    free(r.parts);
}

void sim_batch_drop(void *arg)
{
    struct sim_batch *b = arg;
    atomic_fetch_sub(&b->comm->running, 1);
    free(b);
}
