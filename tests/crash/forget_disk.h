/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A disk that forgets, for a real file system to stand on:
 *
 *     ext4 or xfs      mounted at disk->target
 *     /dev/loopN       attached to the file below
 *     disk->fuse/disk  one file with direct_io, served by a process of its own (forget_fuse.c)
 *     memory           the image as it is seen, the image as of the last flush, a log between them
 *
 * A write goes into the log; a flush makes the log durable. The power goes at operation `at`: from
 * then on everything is answered with EIO. forget_disk_restore then makes the image what a disk
 * could hold after that: all that was flushed, and of each write since a random torn part, by
 * sectors of 512 bytes. (A disk may keep a later write and lose an earlier one, so this does too.)
 *
 * Everything is mounted in a mount namespace of this process, the loop device detaches itself with
 * its last user, and the server dies with its parent: nothing stays when a test is killed.
 *
 * One thread. Functions that return int: 0, or -errno with the step that failed in `why`.
 */
#ifndef BL_TESTS_CRASH_FORGET_DISK_H
#define BL_TESTS_CRASH_FORGET_DISK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define FORGET_SECTOR     512u
#define FORGET_WRITE_MAX  (1u << 20)   /* bytes of one write from the kernel */
#define FORGET_LOG_BYTES  (256u << 20) /* of unflushed writes; only touched memory counts */
#define FORGET_LOG_WRITES 65536u
#define FORGET_WHY_MAX    300

struct forget_write {
    uint64_t offset, at; /* in the image / of its bytes in the log */
    uint32_t bytes;
};

struct forget_shared { /* of the server and the test; atomics because they are two processes */
    atomic_bool dark;  /* the power is off */
    atomic_uint_fast64_t count; /* writes and flushes so far */
    atomic_uint_fast64_t at;    /* the power goes at this one; 0: never */
    atomic_uint_fast64_t fail;  /* this one is answered with EIO, once; 0: none */
    atomic_uint write_delay_us; /* a slow disk */
    atomic_uint opens;          /* open descriptors of the file */
    atomic_bool overflowed; /* the log was full and counted as flushed: a disk's cache ends too */
    uint32_t write_count;   /* log entries; the server's while the power is on */
    uint64_t log_bytes;
    struct forget_write writes[FORGET_LOG_WRITES];
};

struct forget_disk {
    char base[200];   /* a directory; its children are: */
    char fuse[220];   /* where the one file is */
    char target[220]; /* where the file system is */
    const char *type; /* "ext4" or "xfs" */
    uint64_t bytes;
    struct forget_shared *shared; /* shared memory, all four */
    uint8_t *now, *safe, *log;
    pid_t server;
    bool is_served, is_mounted;
};

/* Enters a mount namespace of its own. */
int forget_disk_namespace(char why[FORGET_WHY_MAX]);

/* Starts the server, with an empty image large enough for file system `type` and some small
 * checkpoints, below a fresh directory under $TMPDIR or /tmp; makes the file system, mounts it. */
int forget_disk_open(struct forget_disk *disk, const char *type, char why[FORGET_WHY_MAX]);
/* Ends all that, whatever there is of it. */
void forget_disk_close(struct forget_disk *disk);
/* Can this machine do it? Else what is missing is said on standard error. Enters the namespace. */
bool forget_disk_is_possible(const char *type);

/* mkfs; the image as it is then counts as flushed. Not while it is mounted. */
int forget_disk_format(struct forget_disk *disk, char why[FORGET_WHY_MAX]);

/* Attaches a loop device and mounts it at disk->target; replays the file system's journal. */
int forget_disk_mount(struct forget_disk *disk, char why[FORGET_WHY_MAX]);
/* Unmounts, and waits until the loop device is gone. */
int forget_disk_unmount(struct forget_disk *disk, char why[FORGET_WHY_MAX]);

/* The power goes at the `operations`-th write or flush from now on; 0: not. */
void forget_disk_cut_in(struct forget_disk *disk, uint64_t operations);
bool forget_disk_is_dark(const struct forget_disk *disk);

/* After a cut and an unmount: what is left, drawn with `seed` (0: nothing that was not flushed),
 * and the power is back. How many unflushed writes there were. */
uint32_t forget_disk_restore(struct forget_disk *disk, uint64_t seed);

/* The server's loop; returns when its file system is unmounted (forget_fuse.c). */
int forget_fuse_serve(struct forget_disk *disk, int fd);

#endif
