/* SPDX-License-Identifier: Apache-2.0 */
/* Rings in shared memory between the ranks of a node, and the doorbells that end a sleep. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "trainer/comm_host.h"

int comm_shm_make(struct comm *comm, struct bl_errmsg *msg)
{
    if (comm->local_count < 2) {
        return 0;
    }
    comm->shm_bytes = sizeof(struct comm_shm) + comm->local_count * sizeof(struct comm_ring);
    comm->shm_fd = memfd_create("belay-comm", MFD_CLOEXEC);
    if (comm->shm_fd < 0) {
        return bl_err_code(msg, -errno, "memfd_create");
    }
    if (ftruncate(comm->shm_fd, (off_t)comm->shm_bytes) != 0) {
        return bl_err_code(msg, -errno, "shared memory of %llu bytes",
                           (unsigned long long)comm->shm_bytes);
    }
    void *base = mmap(NULL, comm->shm_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, comm->shm_fd, 0);
    if (base == MAP_FAILED) {
        return bl_err_code(msg, -errno, "map shared memory");
    }
    comm->shm = base;
    comm->shm->magic = COMM_SHM_MAGIC;
    if (getrandom(comm->shm->nonce, sizeof comm->shm->nonce, 0) !=
        (ssize_t)sizeof comm->shm->nonce) {
        return bl_err_code(msg, -errno, "getrandom");
    }
    return 0;
}

static int open_of_process(int pid, int fd, int flags)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    int got = open(path, flags | O_CLOEXEC);
    return got < 0 ? -errno : got;
}

/* Maps the peer's memory if it is what the peer said it is. */
static int map_peer(struct comm *comm, struct comm_link *link, int pid, int shm_fd,
                    const uint64_t nonce[2])
{
    int fd = open_of_process(pid, shm_fd, O_RDWR);
    if (fd < 0) {
        return fd;
    }
    off_t size = lseek(fd, 0, SEEK_END);
    if (size < 0 || (uint64_t)size != comm->shm_bytes) {
        close(fd);
        return BL_EFORMAT;
    }
    void *base = mmap(NULL, comm->shm_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (base == MAP_FAILED) {
        return -errno;
    }
    link->peer_shm = base;
    link->peer_shm_bytes = comm->shm_bytes;
    if (link->peer_shm->magic != COMM_SHM_MAGIC || link->peer_shm->nonce[0] != nonce[0] ||
        link->peer_shm->nonce[1] != nonce[1]) {
        return BL_EFORMAT;
    }
    return 0;
}

int comm_shm_open(struct comm *comm, uint32_t peer, int pid, int shm_fd, int bell_fd,
                  const uint64_t nonce[2])
{
    struct comm_link *link = &comm->links[peer];
    if (comm->shm == NULL || comm->local_index[peer] == UINT32_MAX || shm_fd < 0 || pid <= 0) {
        return -ENOENT;
    }
    int rc = map_peer(comm, link, pid, shm_fd, nonce);
    if (rc == 0) {
        /* O_RDWR: with a reader of our own, a write to a dead peer's bell is no SIGPIPE. */
        int bell = open_of_process(pid, bell_fd, O_RDWR | O_NONBLOCK);
        link->peer_bell = bell < 0 ? -1 : bell;
        rc = bell < 0 ? bell : 0;
    }
    if (rc != 0) {
        comm_shm_drop(link);
        return rc;
    }
    link->tx = &link->peer_shm->rings[comm->local_index[comm->rank]];
    link->rx = &comm->shm->rings[comm->local_index[peer]];
    return 0;
}

void comm_shm_drop(struct comm_link *link)
{
    if (link->peer_shm != NULL) {
        munmap(link->peer_shm, link->peer_shm_bytes);
        link->peer_shm = NULL;
    }
    if (link->peer_bell >= 0) {
        close(link->peer_bell);
        link->peer_bell = -1;
    }
    link->tx = NULL;
    link->rx = NULL;
    link->shared = 0;
}

uint64_t comm_ring_write(struct comm_ring *ring, const uint8_t *data, uint64_t bytes)
{
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    uint64_t room = COMM_RING_BYTES - (head - atomic_load(&ring->tail));
    if (room > COMM_RING_BYTES) {
        return 0; /* a peer that broke its own tail gets nothing */
    }
    uint64_t n = bytes < room ? bytes : room;
    uint64_t at = head & (COMM_RING_BYTES - 1);
    uint64_t first = n < COMM_RING_BYTES - at ? n : COMM_RING_BYTES - at;
    memcpy(ring->data + at, data, first);
    memcpy(ring->data, data + first, n - first);
    if (n > 0) {
        atomic_store(&ring->head, head + n);
    }
    return n;
}

uint64_t comm_ring_read(struct comm_ring *ring, uint8_t *data, uint64_t bytes)
{
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    uint64_t filled = atomic_load(&ring->head) - tail;
    if (filled > COMM_RING_BYTES) {
        return 0;
    }
    uint64_t n = bytes < filled ? bytes : filled;
    uint64_t at = tail & (COMM_RING_BYTES - 1);
    uint64_t first = n < COMM_RING_BYTES - at ? n : COMM_RING_BYTES - at;
    memcpy(data, ring->data + at, first);
    memcpy(data + first, ring->data, n - first);
    if (n > 0) {
        atomic_store(&ring->tail, tail + n);
    }
    return n;
}

void comm_bell_ring(struct comm_link *link)
{
    if (atomic_load(&link->peer_shm->sleeping) != 0 &&
        atomic_exchange(&link->peer_shm->sleeping, 0) != 0) {
        ssize_t n = write(link->peer_bell, "", 1);
        (void)n; /* a full pipe wakes as well; a dead peer needs no waking */
    }
}

void comm_bell_drain(struct comm_listener *listener)
{
    char sink[256];
    while (read(listener->bell[0], sink, sizeof sink) == (ssize_t)sizeof sink) {
    }
}
