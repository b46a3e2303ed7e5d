/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bulk transfers over a ring or over pread/pwrite. One state per buffer:
 *
 *     free -> taken -> flying -> free             (a write)
 *                            \-> arrived -> free  (a read; `give` frees it)
 */
#include "ckpt/queue.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/mem.h"
#include "ckpt/ring.h"

#define PACE_SLICE_NS 50000000u /* a cancelled wait ends after this long at most */

enum slot_state { SLOT_FREE, SLOT_TAKEN, SLOT_FLYING, SLOT_ARRIVED };

struct slot {
    enum slot_state state;
    bool touched; /* taken at least once */
    bool fixed;   /* registered with the ring */
    bool write;
    bool halve; /* a test wants the first transfer short */
    int fd;
    uint32_t bytes; /* wanted */
    uint32_t done;  /* moved so far */
    uint32_t asked; /* by the transfer in flight */
    uint64_t offset;
};

struct ckpt_queue {
    struct ckpt_io *io;     /* keeps */
    struct ckpt_ring *ring; /* NULL: pread and pwrite */
    struct ckpt_queue_info info;
    uint32_t depth, flying;
    bool room;       /* the ring has room for registered buffers */
    uint8_t *memory; /* depth * CKPT_QUEUE_BYTES */
    struct slot slots[CKPT_QUEUE_DEPTH_MAX];
    uint64_t pace_ns; /* when the next transfer may start */
    uint64_t waited_ns, held_ns;
    int error; /* the first */
    uint64_t error_offset;
};

static uint8_t *slot_data(const struct ckpt_queue *queue, uint32_t slot)
{
    return queue->memory + (size_t)slot * CKPT_QUEUE_BYTES;
}

static void note_set(struct ckpt_queue *queue, const char *text, int code)
{
    if (queue->info.note[0] == '\0') {
        snprintf(queue->info.note, sizeof(queue->info.note), "%s%s%s%s", text, code < 0 ? ": " : "",
                 code < 0 ? bl_strerror(code) : "", code == -ENOMEM ? " (RLIMIT_MEMLOCK)" : "");
    }
}

static void queue_ring_start(struct ckpt_queue *queue)
{
    int rc;

    if ((queue->io->disable & CKPT_IO_NO_URING) != 0) {
        note_set(queue, "io_uring switched off", 0);
        return;
    }
    rc = ckpt_ring_new(&queue->ring, queue->depth);
    if (rc < 0) {
        note_set(queue, "no io_uring here", rc);
        return;
    }
    queue->info.path = CKPT_IO_URING;
    if ((queue->io->disable & CKPT_IO_NO_REGISTER) != 0) {
        note_set(queue, "registered buffers switched off", 0);
        return;
    }
    rc = ckpt_ring_register_room(queue->ring, queue->depth);
    if (rc < 0) {
        note_set(queue, "buffers not registered", rc);
        return;
    }
    queue->room = queue->info.registered = true;
}

/* Before a buffer is used for the first time. */
static void slot_touch(struct ckpt_queue *queue, uint32_t index)
{
    const struct iovec buffer = {slot_data(queue, index), CKPT_QUEUE_BYTES};
    int rc;

    queue->slots[index].touched = true;
    if (!queue->room) {
        return;
    }
    rc = ckpt_ring_register(queue->ring, index, &buffer);
    queue->slots[index].fixed = rc == 0;
    if (rc < 0) { /* the others go on as they are */
        queue->room = queue->info.registered = false;
        note_set(queue, "buffers not registered", rc);
    }
}

int ckpt_queue_new(struct ckpt_queue **ret, struct ckpt_io *io, struct bl_errmsg *msg)
{
    struct ckpt_queue *queue = calloc(1, sizeof(*queue));
    int rc;

    if (queue == NULL) {
        return bl_err_code(msg, -ENOMEM, "transfer queue");
    }
    queue->io = io;
    queue->depth = io->queue_depth == 0 ? CKPT_QUEUE_DEPTH : io->queue_depth;
    if (queue->depth > CKPT_QUEUE_DEPTH_MAX) {
        queue->depth = CKPT_QUEUE_DEPTH_MAX;
    }
    queue->memory = bl_mem_alloc((size_t)queue->depth * CKPT_QUEUE_BYTES); /* huge pages */
    if (queue->memory == NULL) {
        rc = bl_err_code(msg, -ENOMEM, "transfer buffers of %u x %u bytes", queue->depth,
                         CKPT_QUEUE_BYTES);
        free(queue);
        return rc;
    }
    queue->info.path = CKPT_IO_PWRITE;
    queue->info.direct = true;
    queue_ring_start(queue);
    *ret = queue;
    return 0;
}

void ckpt_queue_free(struct ckpt_queue *queue)
{
    if (queue == NULL) {
        return;
    }
    BL_IGNORE(ckpt_queue_drain(queue, NULL), "buffers must not be in flight when they go");
    ckpt_ring_free(queue->ring);
    bl_mem_free(queue->memory, (size_t)queue->depth * CKPT_QUEUE_BYTES);
    free(queue);
}

void ckpt_queue_info(const struct ckpt_queue *queue, struct ckpt_queue_info *ret)
{
    *ret = queue->info;
    ret->waited_us = queue->waited_ns / 1000;
    ret->held_us = queue->held_ns / 1000;
}

uint32_t ckpt_queue_depth(const struct ckpt_queue *queue)
{
    return queue->depth;
}

static void queue_fail(struct ckpt_queue *queue, int code, uint64_t offset)
{
    if (queue->error == 0) {
        queue->error = code;
        queue->error_offset = offset;
    }
}

static void slot_finish(struct ckpt_queue *queue, struct slot *slot)
{
    slot->state = slot->write ? SLOT_FREE : SLOT_ARRIVED;
    queue->flying--;
}

static bool fd_is_direct(int fd)
{
    int flags = fcntl(fd, F_GETFL);

    return flags >= 0 && (flags & O_DIRECT) != 0;
}

static void fd_drop_direct(struct ckpt_queue *queue, int fd)
{
    int flags = fcntl(fd, F_GETFL);

    if (flags >= 0) {
        BL_IGNORE(fcntl(fd, F_SETFL, flags & ~O_DIRECT), "the next transfer tells");
    }
    queue->info.direct = false;
}

static void slot_settle(struct ckpt_queue *queue, uint32_t index, int64_t res);

/* Starts the rest of a slot's transfer. Without a ring it is done on return. */
static void slot_start(struct ckpt_queue *queue, uint32_t index)
{
    struct slot *slot = &queue->slots[index];
    uint8_t *data = slot_data(queue, index) + slot->done;
    struct ckpt_ring_op op;
    int rc;

    slot->asked = slot->bytes - slot->done;
    if (slot->halve && slot->asked > 1) {
        slot->halve = false;
        slot->asked /= 2;
    }
    if (fd_is_direct(slot->fd)) {
        if (!slot->write) { /* the end of a file: more is asked for than is there */
            slot->asked = (slot->asked + CKPT_QUEUE_ALIGN - 1) & ~(CKPT_QUEUE_ALIGN - 1);
        }
        if (slot->asked % CKPT_QUEUE_ALIGN != 0 || slot->done % CKPT_QUEUE_ALIGN != 0) {
            fd_drop_direct(queue, slot->fd); /* the rest of a short transfer */
            slot->asked = slot->bytes - slot->done;
        }
    }
    if (slot->fd >= CKPT_FAR_FD) {
        slot_settle(queue, index,
                    queue->io->ops->pread(queue->io, slot->fd, data, slot->asked,
                                          slot->offset + slot->done));
        return;
    }
    if (queue->ring == NULL) {
        int64_t n = slot->write
                        ? ckpt_io_real()->ops->pwrite(queue->io, slot->fd, data, slot->asked,
                                                      slot->offset + slot->done)
                        : ckpt_io_real()->ops->pread(queue->io, slot->fd, data, slot->asked,
                                                     slot->offset + slot->done);
        slot_settle(queue, index, n);
        return;
    }
    op = (struct ckpt_ring_op){
        .write = slot->write,
        .fixed = slot->fixed,
        .buffer = index,
        .fd = slot->fd,
        .data = data,
        .bytes = slot->asked,
        .offset = slot->offset + slot->done,
        .tag = index,
    };
    rc = ckpt_ring_submit(queue->ring, &op);
    if (rc < 0) {
        queue_fail(queue, rc, slot->offset + slot->done);
        slot_finish(queue, slot);
    }
}

/* A transfer came back: done, carried on with, tried another way, or failed. */
static void slot_settle(struct ckpt_queue *queue, uint32_t index, int64_t res)
{
    struct slot *slot = &queue->slots[index];

    if (res == -EINTR || res == -EAGAIN) {
        slot_start(queue, index);
        return;
    }
    if (res == -EINVAL && fd_is_direct(slot->fd)) {
        fd_drop_direct(queue, slot->fd);
        slot_start(queue, index);
        return;
    }
    if (res == -EFAULT && slot->fixed) {
        slot->fixed = queue->room = queue->info.registered = false;
        note_set(queue, "registered buffers did not work", 0);
        slot_start(queue, index);
        return;
    }
    if (res < 0 || (res == 0 && slot->write)) {
        queue_fail(queue, res < 0 ? (int)res : -EIO, slot->offset + slot->done);
        slot_finish(queue, slot);
        return;
    }
    slot->done += (uint32_t)res;
    if (res == 0 || slot->done >= slot->bytes) {
        slot_finish(queue, slot);
        return;
    }
    slot_start(queue, index);
}

/* Waits for one completion. */
static void queue_reap(struct ckpt_queue *queue)
{
    uint64_t tag = 0, from = bl_now_ns();
    int res = 0;
    int rc = ckpt_ring_wait(queue->ring, &tag, &res);

    queue->waited_ns += bl_now_ns() - from;
    BL_ASSERT(rc == 0 && tag < queue->depth); /* the ring itself is broken: nothing can be known */
    slot_settle(queue, (uint32_t)tag, res);
}

int ckpt_queue_take(struct ckpt_queue *queue, uint32_t *ret_slot, void **ret_data)
{
    for (;;) {
        if (queue->error != 0) {
            return queue->error;
        }
        for (uint32_t i = 0; i < queue->depth; i++) {
            if (queue->slots[i].state == SLOT_FREE) {
                queue->slots[i].state = SLOT_TAKEN;
                if (!queue->slots[i].touched) {
                    slot_touch(queue, i);
                }
                *ret_slot = i;
                *ret_data = slot_data(queue, i);
                return 0;
            }
        }
        BL_ASSERT(queue->flying > 0); /* else the caller holds all of them */
        queue_reap(queue);
    }
}

void ckpt_queue_give(struct ckpt_queue *queue, uint32_t slot)
{
    BL_ASSERT(slot < queue->depth && queue->slots[slot].state != SLOT_FLYING);
    queue->slots[slot].state = SLOT_FREE;
}

/* Waits until the rate allows another `bytes`. What was slept too long is made up for, up to the
 * time of one buffer, so that the average is the rate; longer pauses are not. */
static void queue_pace(struct ckpt_queue *queue, uint32_t bytes)
{
    const struct ckpt_io *io = queue->io;
    uint64_t now, from, credit;

    if (io->rate_max == 0) {
        return;
    }
    now = from = bl_now_ns();
    while (now < queue->pace_ns && (io->cancel == NULL || atomic_load(io->cancel) == 0)) {
        uint64_t left = queue->pace_ns - now;
        struct timespec nap = {0, (long)(left < PACE_SLICE_NS ? left : PACE_SLICE_NS)};

        BL_IGNORE(nanosleep(&nap, NULL) < 0, "a signal only makes the nap shorter");
        now = bl_now_ns();
    }
    queue->held_ns += now - from;
    credit = (uint64_t)(CKPT_QUEUE_BYTES * 1e9 / (double)io->rate_max);
    if (queue->pace_ns == 0 || queue->pace_ns + credit < now) {
        queue->pace_ns = now;
    }
    queue->pace_ns += (uint64_t)((double)bytes * 1e9 / (double)io->rate_max);
}

static int queue_submit(struct ckpt_queue *queue, uint32_t index, bool write, int fd,
                        uint32_t bytes, uint64_t offset)
{
    struct slot *slot = &queue->slots[index];
    int gate = queue->io->ops->gate == NULL
                   ? 0
                   : queue->io->ops->gate(queue->io, write ? CKPT_OP_WRITE : CKPT_OP_READ);

    BL_ASSERT(index < queue->depth && slot->state == SLOT_TAKEN && bytes <= CKPT_QUEUE_BYTES);
    if (gate < 0) {
        queue_fail(queue, gate, offset);
    }
    if (queue->error != 0) {
        slot->state = SLOT_FREE;
        return queue->error;
    }
    queue_pace(queue, bytes);
    slot->state = SLOT_FLYING;
    slot->write = write;
    slot->halve = gate > 0;
    slot->fd = fd;
    slot->bytes = bytes;
    slot->done = 0;
    slot->offset = offset;
    queue->flying++;
    slot_start(queue, index);
    return 0;
}

int ckpt_queue_write(struct ckpt_queue *queue, uint32_t slot, int fd, uint32_t bytes,
                     uint64_t offset)
{
    return queue_submit(queue, slot, true, fd, bytes, offset);
}

int ckpt_queue_read(struct ckpt_queue *queue, uint32_t slot, int fd, uint32_t bytes,
                    uint64_t offset)
{
    return queue_submit(queue, slot, false, fd, bytes, offset);
}

int ckpt_queue_wait(struct ckpt_queue *queue, uint32_t slot, uint32_t *ret_bytes)
{
    while (queue->slots[slot].state == SLOT_FLYING) {
        queue_reap(queue);
    }
    if (queue->error != 0) {
        return queue->error;
    }
    *ret_bytes = queue->slots[slot].done < queue->slots[slot].bytes ? queue->slots[slot].done
                                                                    : queue->slots[slot].bytes;
    return 0;
}

int ckpt_queue_drain(struct ckpt_queue *queue, uint64_t *ret_offset)
{
    while (queue->flying > 0) {
        queue_reap(queue);
    }
    if (queue->error != 0 && ret_offset != NULL) {
        *ret_offset = queue->error_offset;
    }
    return queue->error;
}
