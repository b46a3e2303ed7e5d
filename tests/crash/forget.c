/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/crash/forget.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/digest.h"

#define BLOCK 4096u

static struct forget_node *node_find(struct forget *forget, uint64_t number)
{
    for (uint32_t i = 0; i < forget->node_count; i++) {
        if (forget->nodes[i].number == number) {
            return &forget->nodes[i];
        }
    }
    return NULL;
}

static struct forget_node *node_make(struct forget *forget, uint64_t number)
{
    struct forget_node *node = node_find(forget, number);

    if (node == NULL) {
        BL_ASSERT(forget->node_count < FORGET_NODES_MAX);
        node = &forget->nodes[forget->node_count++];
        memset(node, 0, sizeof(*node));
        node->number = number;
    }
    return node;
}

static uint8_t *read_all(const char *path, uint64_t *ret_bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    uint8_t *data;

    BL_ASSERT(fd >= 0 && fstat(fd, &st) == 0);
    data = malloc((size_t)st.st_size + 1);
    BL_ASSERT(data != NULL && read(fd, data, (size_t)st.st_size) == st.st_size);
    close(fd);
    *ret_bytes = (uint64_t)st.st_size;
    return data;
}

static uint32_t list_entries(const char *path, struct forget_entry *entries)
{
    DIR *dir = opendir(path);
    struct dirent *ent;
    uint32_t count = 0;

    BL_ASSERT(dir != NULL);
    while ((ent = readdir(dir)) != NULL) {
        if (strcmp(ent->d_name, ".") != 0 && strcmp(ent->d_name, "..") != 0) {
            BL_ASSERT(count < FORGET_ENTRIES_MAX);
            BL_ASSERT(strlen(ent->d_name) < sizeof(entries[count].name));
            memcpy(entries[count].name, ent->d_name, strlen(ent->d_name) + 1);
            entries[count++].node = ent->d_ino;
        }
    }
    closedir(dir);
    return count;
}

/* What stands at `path` now is durable from here on: contents of a file, entries of a directory. */
static void make_durable(struct forget *forget, const char *path)
{
    struct forget_node *node;
    struct stat st;

    BL_ASSERT(stat(path, &st) == 0);
    node = node_make(forget, st.st_ino);
    node->is_dir = S_ISDIR(st.st_mode);
    if (node->is_dir) {
        if (node->entries == NULL) {
            node->entries = calloc(FORGET_ENTRIES_MAX, sizeof(*node->entries));
            BL_ASSERT(node->entries != NULL);
        }
        node->entry_count = list_entries(path, node->entries);
    } else {
        free(node->data);
        node->data = read_all(path, &node->bytes);
    }
}

static void make_tree_durable(struct forget *forget, const char *path)
{
    struct forget_entry entries[FORGET_ENTRIES_MAX];
    char below[CKPT_PATH_MAX];
    struct stat st;
    uint32_t count;

    make_durable(forget, path);
    BL_ASSERT(stat(path, &st) == 0);
    if (!S_ISDIR(st.st_mode)) {
        return;
    }
    count = list_entries(path, entries);
    for (uint32_t i = 0; i < count; i++) {
        BL_ASSERT(ckpt_path_join(below, path, entries[i].name, NULL, NULL) == 0);
        make_tree_durable(forget, below);
    }
}

/* 0: there is power for it. */
static int power(struct ckpt_io *io, enum ckpt_op op)
{
    struct forget *forget = (struct forget *)(void *)io;

    if (!forget->dark && op != CKPT_OP_READ && ++forget->count == forget->at) {
        forget->dark = true;
    }
    return forget->dark ? -EIO : 0;
}

static const struct ckpt_io_ops *real(void)
{
    return ckpt_io_real()->ops;
}

static int f_open(struct ckpt_io *io, const char *path, int flags, mode_t mode)
{
    int rc = (flags & O_CREAT) != 0 ? power(io, CKPT_OP_CREATE) : 0;

    return rc < 0 ? rc : real()->open(io, path, flags, mode);
}

static int f_close(struct ckpt_io *io, int fd)
{
    return real()->close(io, fd);
}

static int64_t f_pwrite(struct ckpt_io *io, int fd, const void *data, size_t bytes, uint64_t offset)
{
    int rc = power(io, CKPT_OP_WRITE);

    return rc < 0 ? rc : real()->pwrite(io, fd, data, bytes, offset);
}

static int64_t f_pread(struct ckpt_io *io, int fd, void *data, size_t bytes, uint64_t offset)
{
    return real()->pread(io, fd, data, bytes, offset);
}

static int f_fsync(struct ckpt_io *io, int fd)
{
    char path[64];
    int rc = power(io, CKPT_OP_FSYNC);

    if (rc == 0) {
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        make_durable((struct forget *)(void *)io, path);
    }
    return rc;
}

static int f_truncate(struct ckpt_io *io, int fd, uint64_t bytes)
{
    int rc = power(io, CKPT_OP_TRUNCATE);

    return rc < 0 ? rc : real()->truncate(io, fd, bytes);
}

static int f_allocate(struct ckpt_io *io, int fd, uint64_t bytes)
{
    int rc = power(io, CKPT_OP_ALLOCATE);

    return rc < 0 ? rc : real()->allocate(io, fd, bytes);
}

static int f_size(struct ckpt_io *io, const char *path, uint64_t *ret_bytes)
{
    return real()->size(io, path, ret_bytes);
}

static int f_rename(struct ckpt_io *io, const char *from, const char *to)
{
    int rc = power(io, CKPT_OP_RENAME);

    return rc < 0 ? rc : real()->rename(io, from, to);
}

static int f_link(struct ckpt_io *io, const char *from, const char *to)
{
    int rc = power(io, CKPT_OP_LINK);

    return rc < 0 ? rc : real()->link(io, from, to);
}

static int f_mkdir(struct ckpt_io *io, const char *path, mode_t mode)
{
    int rc = power(io, CKPT_OP_MKDIR);

    return rc < 0 ? rc : real()->mkdir(io, path, mode);
}

static int f_unlink(struct ckpt_io *io, const char *path)
{
    int rc = power(io, CKPT_OP_UNLINK);

    return rc < 0 ? rc : real()->unlink(io, path);
}

static int f_rmdir(struct ckpt_io *io, const char *path)
{
    int rc = power(io, CKPT_OP_RMDIR);

    return rc < 0 ? rc : real()->rmdir(io, path);
}

static int f_list(struct ckpt_io *io, const char *path, uint32_t count_max, struct ckpt_names *ret)
{
    return real()->list(io, path, count_max, ret);
}

static const struct ckpt_io_ops forget_ops = {
    .open = f_open,
    .close = f_close,
    .pwrite = f_pwrite,
    .pread = f_pread,
    .fsync = f_fsync,
    .truncate = f_truncate,
    .allocate = f_allocate,
    .size = f_size,
    .rename = f_rename,
    .link = f_link,
    .mkdir = f_mkdir,
    .unlink = f_unlink,
    .rmdir = f_rmdir,
    .list = f_list,
    .gate = power,
};

void forget_init(struct forget *forget, const char *path, uint64_t at)
{
    struct stat st;

    memset(forget, 0, sizeof(*forget));
    forget->io.ops = &forget_ops;
    forget->at = at;
    make_tree_durable(forget, path);
    BL_ASSERT(stat(path, &st) == 0);
    forget->root = st.st_ino;
}

void forget_close(struct forget *forget)
{
    for (uint32_t i = 0; i < forget->node_count; i++) {
        free(forget->nodes[i].data);
        free(forget->nodes[i].entries);
    }
    memset(forget, 0, sizeof(*forget));
}

/* One coin for each change. */
static bool survives(uint64_t *seed)
{
    if (*seed == 0) {
        return false;
    }
    *seed = bl_mix64(*seed + 1) | 1;
    return (*seed >> 40) % 2 == 0;
}

static void write_file(struct forget *forget, uint64_t number, const char *live, const char *to,
                       uint64_t *seed)
{
    const struct forget_node *node = node_find(forget, number);
    uint64_t live_bytes = 0, old_bytes = node == NULL ? 0 : node->bytes;
    uint8_t *now = live == NULL ? NULL : read_all(live, &live_bytes);
    uint64_t bytes = now != NULL && survives(seed) ? live_bytes : old_bytes;
    int fd = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

    BL_ASSERT(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    for (uint64_t at = 0; at < bytes; at += BLOCK) {
        bool new = now != NULL &&survives(seed);
        const uint8_t *from = new ? now : node == NULL ? NULL : node->data;
        uint64_t have = new ? live_bytes : old_bytes;
        uint64_t end = at + BLOCK < bytes ? at + BLOCK : bytes;

        end = end < have ? end : have;
        if (from != NULL && at < end) {
            BL_ASSERT(pwrite(fd, from + at, (size_t)(end - at), (off_t)at) == (ssize_t)(end - at));
        }
    }
    close(fd);
    free(now);
}

static const struct forget_entry *entry_find(const struct forget_entry *entries, uint32_t count,
                                             const char *name)
{
    for (uint32_t i = 0; i < count; i++) {
        if (strcmp(entries[i].name, name) == 0) {
            return &entries[i];
        }
    }
    return NULL;
}

/* Where inode `number` stands below `path` now; false when nowhere. */
static bool live_path(const char *path, uint64_t number, char *ret, size_t room)
{
    struct forget_entry entries[FORGET_ENTRIES_MAX];
    char below[CKPT_PATH_MAX];
    struct stat st;
    uint32_t count;

    if (stat(path, &st) != 0) {
        return false;
    }
    if (st.st_ino == number) {
        snprintf(ret, room, "%s", path);
        return true;
    }
    if (!S_ISDIR(st.st_mode)) {
        return false;
    }
    count = list_entries(path, entries);
    for (uint32_t i = 0; i < count; i++) {
        BL_ASSERT(ckpt_path_join(below, path, entries[i].name, NULL, NULL) == 0);
        if (live_path(below, number, ret, room)) {
            return true;
        }
    }
    return false;
}

static void write_node(struct forget *forget, const char *top, uint64_t number, const char *to,
                       uint64_t *seed)
{
    struct forget_entry live[FORGET_ENTRIES_MAX], chosen[2 * FORGET_ENTRIES_MAX];
    struct forget_node *node = node_find(forget, number);
    char where[CKPT_PATH_MAX], below[CKPT_PATH_MAX];
    bool is_live = live_path(top, number, where, sizeof(where));
    uint32_t live_count = 0, count = 0;
    struct stat st;
    bool is_dir = node != NULL && node->is_dir;

    if (is_live) {
        BL_ASSERT(stat(where, &st) == 0);
        is_dir = S_ISDIR(st.st_mode);
    }
    if (!is_dir) {
        write_file(forget, number, is_live ? where : NULL, to, seed);
        return;
    }
    live_count = is_live ? list_entries(where, live) : 0;
    for (uint32_t i = 0; node != NULL && i < node->entry_count; i++) {
        const struct forget_entry *now = entry_find(live, live_count, node->entries[i].name);

        if (now != NULL && now->node != node->entries[i].node) {
            chosen[count++] = survives(seed) ? *now : node->entries[i];
        } else if (now != NULL || !is_live || !survives(seed)) {
            chosen[count++] = node->entries[i]; /* its removal was forgotten */
        }
    }
    for (uint32_t i = 0; i < live_count; i++) {
        if ((node == NULL || entry_find(node->entries, node->entry_count, live[i].name) == NULL) &&
            survives(seed)) {
            chosen[count++] = live[i];
        }
    }
    BL_ASSERT(mkdir(to, 0755) == 0);
    for (uint32_t i = 0; i < count; i++) {
        BL_ASSERT(ckpt_path_join(below, to, chosen[i].name, NULL, NULL) == 0);
        write_node(forget, top, chosen[i].node, below, seed);
    }
}

void forget_materialise(struct forget *forget, const char *path, const char *to, uint64_t seed)
{
    uint64_t coins = seed;

    write_node(forget, path, forget->root, to, &coins);
}
