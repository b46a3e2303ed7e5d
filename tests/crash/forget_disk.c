/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/crash/forget_disk.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/loop.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/digest.h"
#include "base/error.h"

#define ROOM_EXT4 (48ull << 20)
#define ROOM_XFS  (320ull << 20) /* mkfs.xfs makes nothing smaller */
#define GONE_MS   10000 /* for the loop device to let go of the file, and an unmount to succeed */

extern char **environ;

static int failed(char why[FORGET_WHY_MAX], const char *what, const char *on)
{
    int code = errno;

    snprintf(why, FORGET_WHY_MAX, "%s %.200s: %s", what, on, strerror(code));
    return -code;
}

static uint64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static void nap(void)
{
    nanosleep(&(struct timespec){0, 2000000}, NULL);
}

int forget_disk_namespace(char why[FORGET_WHY_MAX])
{
    if (geteuid() != 0) {
        errno = EPERM;
        return failed(why, "become", "root");
    }
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) {
        return failed(why, "enter", "a mount namespace");
    }
    return 0;
}

static void *shared_memory(uint64_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE,
                    -1, 0);

    return at == MAP_FAILED ? NULL : at;
}

/* Mounts the file system of one file, and forks the process that serves it. */
static int serve(struct forget_disk *disk, char why[FORGET_WHY_MAX])
{
    char options[128];
    int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);

    if (fd < 0) {
        return failed(why, "open", "/dev/fuse");
    }
    snprintf(options, sizeof(options), "fd=%d,rootmode=40000,user_id=0,group_id=0", fd);
    if (mount("belay-test", disk->fuse, "fuse", MS_NOSUID | MS_NODEV, options) != 0) {
        int rc = failed(why, "mount FUSE at", disk->fuse);

        close(fd);
        return rc;
    }
    disk->is_served = true;
    fflush(NULL);
    disk->server = fork();
    if (disk->server == 0) {
        /* In a namespace without the file system that stands on it: else its own end would unmount
         * that, and wait for itself. */
        _exit(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && unshare(CLONE_NEWNS) == 0 &&
                      forget_fuse_serve(disk, fd) == 0
                  ? 0
                  : 1);
    }
    close(fd);
    return disk->server < 0 ? failed(why, "fork", "a server") : 0;
}

int forget_disk_open(struct forget_disk *disk, const char *type, char why[FORGET_WHY_MAX])
{
    const char *temp = getenv("TMPDIR");
    int rc;

    memset(disk, 0, sizeof(*disk));
    snprintf(disk->base, sizeof(disk->base), "%.100s/belay-disk-XXXXXX",
             temp == NULL ? "/tmp" : temp);
    if (mkdtemp(disk->base) == NULL) {
        return failed(why, "make a directory", disk->base);
    }
    snprintf(disk->fuse, sizeof(disk->fuse), "%s/fuse", disk->base);
    snprintf(disk->target, sizeof(disk->target), "%s/target", disk->base);
    disk->type = type;
    disk->bytes = strcmp(type, "xfs") == 0 ? ROOM_XFS : ROOM_EXT4;
    disk->shared = shared_memory(sizeof(*disk->shared));
    disk->now = shared_memory(disk->bytes);
    disk->safe = shared_memory(disk->bytes);
    disk->log = shared_memory(FORGET_LOG_BYTES);
    if (disk->shared == NULL || disk->now == NULL || disk->safe == NULL || disk->log == NULL) {
        return failed(why, "map", "memory");
    }
    if (mkdir(disk->fuse, 0700) != 0 || mkdir(disk->target, 0700) != 0) {
        return failed(why, "make directories below", disk->base);
    }
    rc = serve(disk, why);
    rc = rc < 0 ? rc : forget_disk_format(disk, why);
    return rc < 0 ? rc : forget_disk_mount(disk, why);
}

bool forget_disk_is_possible(const char *type)
{
    char why[FORGET_WHY_MAX] = "";
    struct forget_disk disk;
    int rc = forget_disk_namespace(why);

    if (rc == 0) {
        rc = forget_disk_open(&disk, type, why);
        forget_disk_close(&disk);
    }
    if (rc < 0) {
        fprintf(stderr, "skipped: cannot %s\n", why);
    }
    return rc == 0;
}

void forget_disk_close(struct forget_disk *disk)
{
    char why[FORGET_WHY_MAX];

    if (disk->is_mounted) {
        BL_IGNORE(forget_disk_unmount(disk, why), "the namespace ends with this process");
    }
    if (disk->is_served) {
        umount2(disk->fuse, MNT_DETACH);
    }
    if (disk->server > 0) {
        kill(disk->server, SIGKILL);
        waitpid(disk->server, NULL, 0);
    }
    rmdir(disk->fuse);
    rmdir(disk->target);
    rmdir(disk->base);
    if (disk->shared != NULL) {
        munmap(disk->shared, sizeof(*disk->shared));
    }
    for (uint32_t i = 0; i < 3; i++) {
        uint8_t *at = i == 0 ? disk->now : i == 1 ? disk->safe : disk->log;

        if (at != NULL) {
            munmap(at, i == 2 ? FORGET_LOG_BYTES : disk->bytes);
        }
    }
    memset(disk, 0, sizeof(*disk));
}

int forget_disk_format(struct forget_disk *disk, char why[FORGET_WHY_MAX])
{
    char command[600];
    pid_t pid;
    int status = 0;
    /* One block size everywhere, and nothing left to a background thread. */
    const char *with = strcmp(disk->type, "ext4") == 0
                           ? "-q -F -b 4096 -E nodiscard,lazy_itable_init=0,lazy_journal_init=0"
                           : "-q -f -K";
    char *argv[] = {(char *)(uintptr_t) "sh", (char *)(uintptr_t) "-c", command, NULL};

    snprintf(command, sizeof(command),
             "PATH=$PATH:/usr/sbin:/sbin; command -v mkfs.%s >/dev/null || exit 127; "
             "exec mkfs.%s %s '%s/disk' >/dev/null",
             disk->type, disk->type, with, disk->fuse);
    errno = posix_spawn(&pid, "/bin/sh", NULL, NULL, argv, environ);
    if (errno != 0 || waitpid(pid, &status, 0) != pid) {
        return failed(why, "run", "mkfs");
    }
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        errno = WIFEXITED(status) && WEXITSTATUS(status) == 127 ? ENOENT : EIO;
        return failed(why, "make a file system with mkfs of type", disk->type);
    }
    BL_ASSERT(!atomic_load(&disk->shared->dark));
    forget_disk_restore(disk, UINT64_MAX);
    return 0;
}

/* The descriptor of a loop device on the disk's file, which detaches itself; its path in `ret`. */
static int attach(const struct forget_disk *disk, char ret[64], char why[FORGET_WHY_MAX])
{
    struct loop_config config = {.block_size = FORGET_SECTOR};
    char path[300];
    int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    int file = -1, loop = -1, rc = 0;

    snprintf(path, sizeof(path), "%s/disk", disk->fuse);
    if (control < 0) {
        return failed(why, "open", "/dev/loop-control");
    }
    file = open(path, O_RDWR | O_CLOEXEC);
    rc = file < 0 ? failed(why, "open", path) : 0;
    config.fd = (uint32_t)file;
    config.info.lo_flags = LO_FLAGS_AUTOCLEAR;
    for (uint32_t try = 0; rc == 0 && loop < 0; try++) {
        int number = ioctl(control, LOOP_CTL_GET_FREE);

        snprintf(ret, 64, "/dev/loop%d", number);
        if (number < 0) {
            rc = failed(why, "find", "a free loop device");
            break;
        }
        loop = open(ret, O_RDWR | O_CLOEXEC);
        if (loop < 0 && errno == ENOENT && mknod(ret, S_IFBLK | 0600, makedev(7, number)) == 0) {
            loop = open(ret, O_RDWR | O_CLOEXEC);
        }
        if (loop < 0 || ioctl(loop, LOOP_CONFIGURE, &config) != 0) {
            rc = failed(why, "attach", ret);
            if (loop >= 0) {
                close(loop);
                loop = -1;
            }
            rc = rc == -EBUSY && try < 100 ? 0 : rc; /* another took it meanwhile */
        }
    }
    close(control);
    if (file >= 0) {
        close(file);
    }
    return rc < 0 ? rc : loop;
}

int forget_disk_mount(struct forget_disk *disk, char why[FORGET_WHY_MAX])
{
    char device[64];
    int loop = attach(disk, device, why), rc = 0;

    if (loop < 0) {
        return loop;
    }
    if (mount(device, disk->target, disk->type, MS_NOSUID | MS_NODEV, NULL) != 0) {
        rc = failed(why, "mount", device);
    }
    disk->is_mounted = rc == 0;
    close(loop);
    return rc;
}

int forget_disk_unmount(struct forget_disk *disk, char why[FORGET_WHY_MAX])
{
    uint64_t deadline = now_ms() + GONE_MS;

    /* A ring that was just closed holds its files a little longer. */
    while (umount(disk->target) != 0) {
        if (errno != EBUSY || now_ms() > deadline) {
            int rc = failed(why, "unmount", disk->target);

            umount2(disk->target, MNT_DETACH);
            disk->is_mounted = false;
            return rc;
        }
        nap();
    }
    disk->is_mounted = false;
    while (atomic_load(&disk->shared->opens) > 0) {
        if (now_ms() > deadline) {
            errno = ETIMEDOUT;
            return failed(why, "detach", "the loop device");
        }
        nap();
    }
    return 0;
}

void forget_disk_cut_in(struct forget_disk *disk, uint64_t operations)
{
    uint64_t now = atomic_load(&disk->shared->count);

    atomic_store(&disk->shared->at, operations == 0 ? 0 : now + operations);
}

bool forget_disk_is_dark(const struct forget_disk *disk)
{
    return atomic_load(&disk->shared->dark);
}

static uint64_t draw(uint64_t *seed)
{
    *seed = bl_mix64(*seed + 1) | 1;
    return *seed >> 20;
}

/* What of one write is on the disk: all, nothing, its beginning, or any of its sectors. */
static void survive(struct forget_disk *disk, const struct forget_write *write, uint64_t *seed)
{
    uint64_t kind = draw(seed) % 8;
    uint32_t sectors = write->bytes / FORGET_SECTOR;
    uint32_t first = kind == 6 ? (uint32_t)(draw(seed) % (sectors + 1)) : 0;

    if (kind < 3) {
        return;
    }
    for (uint32_t s = 0; s < sectors; s++) {
        if (kind < 6 || (kind == 6 ? s < first : draw(seed) % 2 == 0)) {
            memcpy(disk->safe + write->offset + (uint64_t)s * FORGET_SECTOR,
                   disk->log + write->at + (uint64_t)s * FORGET_SECTOR, FORGET_SECTOR);
        }
    }
}

uint32_t forget_disk_restore(struct forget_disk *disk, uint64_t seed)
{
    struct forget_shared *shared = disk->shared;
    uint32_t count = shared->write_count;
    uint64_t coins = seed;

    for (uint32_t i = 0; seed != 0 && i < count; i++) {
        const struct forget_write *write = &shared->writes[i];

        if (seed == UINT64_MAX) {
            memcpy(disk->safe + write->offset, disk->log + write->at, write->bytes);
        } else {
            survive(disk, write, &coins);
        }
    }
    for (uint32_t i = 0; i < count; i++) { /* no other place differs */
        const struct forget_write *write = &shared->writes[i];

        memcpy(disk->now + write->offset, disk->safe + write->offset, write->bytes);
    }
    shared->write_count = 0;
    shared->log_bytes = 0;
    atomic_store(&shared->at, 0);
    atomic_store(&shared->dark, false);
    return count;
}
