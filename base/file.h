/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files: whole reads and atomic writes of small files, directories, and reads and writes that do
 * not stop half-way. All block; none is for an event loop's thread except on fast local paths.
 * Errors are -errno with the path in the text. Any thread.
 */
#ifndef BL_BASE_FILE_H
#define BL_BASE_FILE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/error.h"

/* Reads a whole regular file of at most `bytes_max`. *ret_data is owned (free()) and has a NUL
 * behind its *ret_bytes bytes. Larger: BL_ELIMIT. */
BL_MUST_CHECK int bl_file_read(const char *path, size_t bytes_max, char **ret_data,
                               size_t *ret_bytes, struct bl_errmsg *msg);

/* Replaces `path` so that a crash leaves either the old or the new content: temporary name beside
 * it, write, fsync, rename, fsync of the directory. Mode 0644 less the umask. */
BL_MUST_CHECK int bl_file_write_atomic(const char *path, const void *data, size_t bytes,
                                       struct bl_errmsg *msg);

/* Makes a directory and those above it (mode 0755 less the umask). There already: good. */
BL_MUST_CHECK int bl_mkdir_p(const char *path, struct bl_errmsg *msg);

#define BL_RM_TREE_DEPTH_MAX 16

/* Removes `inside`/`name` with all below it. `name` is one component, not "." or "..". Symbolic
 * links are removed, never followed; deeper than BL_RM_TREE_DEPTH_MAX is BL_ELIMIT; another file
 * system (a mount) is -EXDEV. Absent: good. */
BL_MUST_CHECK int bl_rm_tree(const char *inside, const char *name, struct bl_errmsg *msg);

/* fsync of a directory by path. */
BL_MUST_CHECK int bl_fsync_dir(const char *path, struct bl_errmsg *msg);

/* Writes all of `bytes`, resuming after EINTR and short writes; on a non-blocking fd it waits in
 * poll(). 0 or -errno. */
BL_MUST_CHECK int bl_fd_write_all(int fd, const void *data, size_t bytes);
/* Reads exactly `bytes`. Returns the bytes read (fewer only at the end of the file) or -errno. */
BL_MUST_CHECK ssize_t bl_fd_read_all(int fd, void *data, size_t bytes);

/* Joins `dir`/`name` into out (capacity `out_bytes`); an absolute `name` stands alone. BL_ELIMIT if
 * it does not fit. */
BL_MUST_CHECK int bl_path_join(char *out, size_t out_bytes, const char *dir, const char *name);

/* The directory of the running executable. */
BL_MUST_CHECK int bl_dir_of_exe(char *out, size_t out_bytes);

#endif
