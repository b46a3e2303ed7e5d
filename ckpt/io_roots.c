/* SPDX-License-Identifier: Apache-2.0 */
#include "ckpt/io_roots.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

/* The path under root `index` that is `path` under the first; false: it is under none. */
static bool path_under(const struct ckpt_io_roots *roots, const char *path, uint32_t index,
                       char ret[CKPT_PATH_MAX])
{
    size_t bytes = strlen(roots->roots[0]);

    if (strncmp(path, roots->roots[0], bytes) != 0 || path[bytes] != '/') {
        return false;
    }
    return snprintf(ret, CKPT_PATH_MAX, "%s%s", roots->roots[index], path + bytes) < CKPT_PATH_MAX;
}

static int roots_open(struct ckpt_io *io, const char *path, int flags, mode_t mode)
{
    const struct ckpt_io_roots *roots = (const struct ckpt_io_roots *)io;
    char other[CKPT_PATH_MAX];
    int fd = ckpt_io_real()->ops->open(io, path, flags, mode);

    if ((flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT) != 0) {
        return fd;
    }
    for (uint32_t i = 1; fd == -ENOENT && i < roots->count && path_under(roots, path, i, other);
         i++) {
        fd = ckpt_io_real()->ops->open(io, other, flags, mode);
    }
    return fd;
}

static int roots_size(struct ckpt_io *io, const char *path, uint64_t *ret_bytes)
{
    const struct ckpt_io_roots *roots = (const struct ckpt_io_roots *)io;
    char other[CKPT_PATH_MAX];
    int rc = ckpt_io_real()->ops->size(io, path, ret_bytes);

    for (uint32_t i = 1; rc == -ENOENT && i < roots->count && path_under(roots, path, i, other);
         i++) {
        rc = ckpt_io_real()->ops->size(io, other, ret_bytes);
    }
    return rc;
}

void ckpt_io_roots_init(struct ckpt_io_roots *roots, const char **paths, uint32_t count)
{
    *roots = (struct ckpt_io_roots){
        .io = *ckpt_io_real(), .ops = *ckpt_io_real()->ops, .roots = paths, .count = count};
    roots->ops.open = roots_open;
    roots->ops.size = roots_size;
    roots->io.ops = &roots->ops;
}
