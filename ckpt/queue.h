/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bulk transfers: a few large aligned buffers and as many reads or writes in flight. The way is
 * io_uring with registered buffers, or without them, or plain pread/pwrite at once, whichever works
 * here; O_DIRECT is dropped from a descriptor when the file system refuses it. Virtual disks take
 * what is queued as one batch and answer when all of it is done: the more is queued, the less they
 * stand still between two batches.
 *
 * Memory comes with use: a buffer is touched and registered when it is taken for the first time,
 * while those before it are in flight.
 *
 * A buffer is taken, filled, written (and free again by itself when done); or taken, read into,
 * waited for, used, given back. Transfers that come back short are carried on with. The first error
 * is remembered and returned by every later call.
 */
#ifndef BL_CKPT_QUEUE_H
#define BL_CKPT_QUEUE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "ckpt/ckpt.h"
#include "ckpt/ckpt_io.h"

#define CKPT_QUEUE_DEPTH     8u
#define CKPT_QUEUE_DEPTH_MAX 64u
#define CKPT_QUEUE_BYTES     (4u * 1024 * 1024) /* of one buffer: few large requests win */
#define CKPT_QUEUE_ALIGN     4096u

struct ckpt_queue;

struct ckpt_queue_info {
    enum ckpt_io_path path;
    bool registered;    /* every buffer that was taken so far */
    bool direct;        /* no descriptor had to give up O_DIRECT so far */
    uint64_t waited_us; /* for transfers, in _take, _wait and _drain: the disk was slower than us */
    uint64_t held_us;   /* back for the sake of io->rate_max */
    char note[128];     /* why a slower way was taken, or "" */
};

/* Maps the memory (at most depth * CKPT_QUEUE_BYTES come in use) and sets the ring up. *ret is
 * owned. -ENOMEM. */
BL_MUST_CHECK int ckpt_queue_new(struct ckpt_queue **ret, struct ckpt_io *io,
                                 struct bl_errmsg *msg);

/* Waits for what is in flight, then frees; NULL is fine. */
void ckpt_queue_free(struct ckpt_queue *queue);

/* Which way the transfers go, and how many can be in flight. */
void ckpt_queue_info(const struct ckpt_queue *queue, struct ckpt_queue_info *ret);
uint32_t ckpt_queue_depth(const struct ckpt_queue *queue);

/* Waits until a buffer is free: its number, and its memory (CKPT_QUEUE_BYTES, aligned). */
BL_MUST_CHECK int ckpt_queue_take(struct ckpt_queue *queue, uint32_t *ret_slot, void **ret_data);
/* Gives a taken buffer back. */
void ckpt_queue_give(struct ckpt_queue *queue, uint32_t slot);

/* Writes `bytes` of a taken buffer to fd at `offset`; the buffer comes back by itself. This and
 * ckpt_queue_read wait first where io->rate_max says so. */
BL_MUST_CHECK int ckpt_queue_write(struct ckpt_queue *queue, uint32_t slot, int fd, uint32_t bytes,
                                   uint64_t offset);

/* Starts to read up to `bytes` into a taken buffer; ckpt_queue_wait says how many came (fewer only
 * at the end of the file). Then the buffer is the caller's until ckpt_queue_give. */
BL_MUST_CHECK int ckpt_queue_read(struct ckpt_queue *queue, uint32_t slot, int fd, uint32_t bytes,
                                  uint64_t offset);
BL_MUST_CHECK int ckpt_queue_wait(struct ckpt_queue *queue, uint32_t slot, uint32_t *ret_bytes);

/* Waits for everything in flight. The first error, if there was one: -errno, and through
 * ret_offset (may be NULL) where in its file. */
BL_MUST_CHECK int ckpt_queue_drain(struct ckpt_queue *queue, uint64_t *ret_offset);

#endif
