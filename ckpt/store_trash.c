/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The trash. Unlinking large files is slow on many disks and holds other writes up, so retired
 * directories are renamed to .trash, the next save renames their part files back into use, and the
 * rest is unlinked. A move is durable before anything in it is reused: else, after a power loss, a
 * checkpoint could stand under its old name with a newer one's bytes.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "ckpt/part.h"
#include "ckpt/store.h"

int ckpt_trash_move(struct ckpt_store *store, const char *dir, struct bl_errmsg *msg)
{
    char trash[CKPT_PATH_MAX], from[CKPT_PATH_MAX], to[CKPT_PATH_MAX], name[CKPT_DIR_MAX + 32];
    int rc = ckpt_path_join(trash, store->path, CKPT_TRASH_DIR, NULL, msg);

    snprintf(name, sizeof(name), "%s.%016" PRIx64, dir[0] == '.' ? dir + 1 : dir, ckpt_nonce());
    if (rc == 0) {
        rc = ckpt_path_join(from, store->path, dir, NULL, msg);
    }
    if (rc == 0) {
        rc = ckpt_path_join(to, trash, name, NULL, msg);
    }
    if (rc < 0) {
        return rc;
    }
    rc = store->io->ops->rename(store->io, from, to);
    if (rc == -ENOENT) { /* no .trash yet, or nothing to move */
        rc = ckpt_io_mkdir(store->io, trash, msg);
        if (rc < 0) {
            return rc;
        }
        rc = store->io->ops->rename(store->io, from, to);
    }
    if (rc == -ENOENT) {
        return 0;
    }
    if (rc < 0) {
        return bl_err_code(msg, rc, "rename %s to %s", from, to);
    }
    rc = ckpt_io_fsync_path(store->io, trash, msg);
    return rc < 0 ? rc : ckpt_io_fsync_path(store->io, store->path, msg);
}

/* Unlinks what lies in one directory of the trash, but part files when `keep_parts`; the directory
 * too when nothing is left. How many part files stayed. */
static uint32_t trash_empty(struct ckpt_store *store, const char *path, bool keep_parts)
{
    struct ckpt_names names = {0};
    char file[CKPT_PATH_MAX];
    uint32_t stayed = 0;

    if (store->io->ops->list(store->io, path, CKPT_ENTRIES_MAX, &names) < 0) {
        return 0;
    }
    for (uint32_t i = 0; i < names.count; i++) {
        if (keep_parts && ckpt_part_file_is(names.names[i])) {
            stayed++;
        } else if (ckpt_path_join(file, path, names.names[i], NULL, NULL) == 0) {
            BL_IGNORE(store->io->ops->unlink(store->io, file), "swept again next time");
        }
    }
    ckpt_names_close(&names);
    if (stayed == 0) {
        BL_IGNORE(store->io->ops->rmdir(store->io, path), "swept again next time");
    }
    return stayed;
}

/* Temporary files of the root's own files, left by a crash. */
static bool is_root_leftover(const char *name)
{
    size_t bytes = strlen(name);

    return bytes > 4 && strcmp(name + bytes - 4, ".tmp") == 0 &&
           (strncmp(name, ".BELAY.", 7) == 0 || strncmp(name, ".latest.", 8) == 0);
}

static int sweep_root(struct ckpt_store *store, uint64_t generation, uint64_t step,
                      struct bl_errmsg *msg)
{
    struct ckpt_names names = {0};
    struct ckpt_attempt attempt;
    char path[CKPT_PATH_MAX];
    int rc = store->io->ops->list(store->io, store->path, CKPT_ENTRIES_MAX, &names);

    if (rc < 0) {
        return bl_err_code(msg, rc, "read directory %s", store->path);
    }
    for (uint32_t i = 0; rc == 0 && i < names.count; i++) {
        const char *name = names.names[i];

        if (ckpt_attempt_parse(name, &attempt)) {
            if (attempt.generation <= generation && attempt.step <= step) {
                rc = ckpt_trash_move(store, name, msg);
            }
        } else if (is_root_leftover(name) &&
                   ckpt_path_join(path, store->path, name, NULL, NULL) == 0) {
            BL_IGNORE(store->io->ops->unlink(store->io, path), "swept again next time");
        }
    }
    ckpt_names_close(&names);
    return rc;
}

int ckpt_sweep(struct ckpt_store *store, uint64_t generation, uint64_t step, struct bl_errmsg *msg)
{
    struct ckpt_names names = {0};
    char trash[CKPT_PATH_MAX], path[CKPT_PATH_MAX];
    bool kept = false;
    int rc = ckpt_store_writable(store, msg);

    if (rc == 0) {
        rc = sweep_root(store, generation, step, msg);
    }
    if (rc == 0) {
        rc = ckpt_path_join(trash, store->path, CKPT_TRASH_DIR, NULL, msg);
    }
    if (rc < 0) {
        return rc;
    }
    rc = store->io->ops->list(store->io, trash, CKPT_ENTRIES_MAX, &names);
    if (rc == -ENOENT) {
        return 0;
    }
    if (rc < 0) {
        return bl_err_code(msg, rc, "read directory %s", trash);
    }
    for (uint32_t i = 0; i < names.count; i++) { /* one directory's parts are enough for a save */
        if (ckpt_path_join(path, trash, names.names[i], NULL, NULL) == 0) {
            bool keep =
                !kept && strstr(names.names[i], ".tmp") == NULL; /* no attempt's: see recycle */

            kept = trash_empty(store, path, keep) > 0 || kept;
        }
    }
    ckpt_names_close(&names);
    return 0;
}
