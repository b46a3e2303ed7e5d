/* SPDX-License-Identifier: Apache-2.0 */
/* The thin border to liburing, which only io_uring.c includes. Used by queue.c. One thread. */
#ifndef BL_CKPT_RING_H
#define BL_CKPT_RING_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/error.h"

struct ckpt_ring;

struct ckpt_ring_op {
    bool write;
    bool fixed; /* data lies in registered buffer `buffer` */
    uint32_t buffer;
    int fd;
    void *data; /* borrowed until its completion */
    uint32_t bytes;
    uint64_t offset;
    uint64_t tag; /* comes back with the completion */
};

/* -errno when the kernel has no io_uring for us. *ret is owned. */
BL_MUST_CHECK int ckpt_ring_new(struct ckpt_ring **ret, uint32_t depth);
void ckpt_ring_free(struct ckpt_ring *ring);

/* Makes room for `count` registered buffers, none of them there yet. -errno where the kernel cannot
 * register one after the other (before 5.19). The ring works without. */
BL_MUST_CHECK int ckpt_ring_register_room(struct ckpt_ring *ring, uint32_t count);

/* Registers buffer `index` of that room; its memory is pinned. -ENOMEM over RLIMIT_MEMLOCK. */
BL_MUST_CHECK int ckpt_ring_register(struct ckpt_ring *ring, uint32_t index,
                                     const struct iovec *buffer);

/* Submits one transfer. The caller keeps no more than `depth` in flight. */
BL_MUST_CHECK int ckpt_ring_submit(struct ckpt_ring *ring, const struct ckpt_ring_op *op);

/* Waits for one completion: its tag and its result (bytes or -errno). */
BL_MUST_CHECK int ckpt_ring_wait(struct ckpt_ring *ring, uint64_t *ret_tag, int *ret_res);

#endif
