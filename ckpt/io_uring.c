/* SPDX-License-Identifier: Apache-2.0 */
/* liburing behind ring.h: nothing else of Belay includes it. */
#include "ckpt/ring.h"

#include <errno.h>
#include <liburing.h>
#include <stdatomic.h>
#include <stdlib.h>

struct ckpt_ring {
    struct io_uring uring;
};

/* liburing maps and unmaps by bare system calls, which a race detector does not see: it takes a
 * ring at an address where another thread's ring was before for shared memory. This orders the two.
 */
static atomic_uint rings_freed;

int ckpt_ring_new(struct ckpt_ring **ret, uint32_t depth)
{
    struct ckpt_ring *ring = calloc(1, sizeof(*ring));
    int rc;

    if (ring == NULL) {
        return -ENOMEM;
    }
    (void)atomic_load_explicit(&rings_freed, memory_order_acquire);
    rc = io_uring_queue_init(depth, &ring->uring, 0);
    if (rc < 0) {
        free(ring);
        return rc;
    }
    *ret = ring;
    return 0;
}

void ckpt_ring_free(struct ckpt_ring *ring)
{
    if (ring == NULL) {
        return;
    }
    io_uring_queue_exit(&ring->uring);
    atomic_fetch_add_explicit(&rings_freed, 1, memory_order_release);
    free(ring);
}

int ckpt_ring_register_room(struct ckpt_ring *ring, uint32_t count)
{
    return io_uring_register_buffers_sparse(&ring->uring, count);
}

int ckpt_ring_register(struct ckpt_ring *ring, uint32_t index, const struct iovec *buffer)
{
    const __u64 no_tag = 0;
    int rc = io_uring_register_buffers_update_tag(&ring->uring, index, buffer, &no_tag, 1);

    return rc < 0 ? rc : 0; /* else how many were updated */
}

int ckpt_ring_submit(struct ckpt_ring *ring, const struct ckpt_ring_op *op)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
    int rc;

    BL_ASSERT(sqe != NULL); /* each submit below empties the queue */
    if (op->fixed && op->write) {
        io_uring_prep_write_fixed(sqe, op->fd, op->data, op->bytes, op->offset, (int)op->buffer);
    } else if (op->fixed) {
        io_uring_prep_read_fixed(sqe, op->fd, op->data, op->bytes, op->offset, (int)op->buffer);
    } else if (op->write) {
        io_uring_prep_write(sqe, op->fd, op->data, op->bytes, op->offset);
    } else {
        io_uring_prep_read(sqe, op->fd, op->data, op->bytes, op->offset);
    }
    io_uring_sqe_set_data64(sqe, op->tag);
    do {
        rc = io_uring_submit(&ring->uring);
    } while (rc == -EINTR || rc == -EAGAIN || rc == -EBUSY);
    return rc < 0 ? rc : 0;
}

int ckpt_ring_wait(struct ckpt_ring *ring, uint64_t *ret_tag, int *ret_res)
{
    struct io_uring_cqe *cqe = NULL;
    int rc;

    do {
        rc = io_uring_wait_cqe(&ring->uring, &cqe);
    } while (rc == -EINTR || rc == -EAGAIN);
    if (rc < 0) {
        return rc;
    }
    *ret_tag = io_uring_cqe_get_data64(cqe);
    *ret_res = cqe->res;
    io_uring_cqe_seen(&ring->uring, cqe);
    return 0;
}
