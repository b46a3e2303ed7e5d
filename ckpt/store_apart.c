/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saves to roots that each node has for itself. No directory has the whole checkpoint, so none can
 * tell that it is one: the leader's record does. What lies on a node's disk, each step durable
 * before the next, and what it means:
 *
 *     its parts in the attempt                       nothing yet
 *     the same manifest beside them, on every node   all parts are durable everywhere
 *         the leader records the manifest's digest   THE COMMIT
 *     the attempt has its final name                 so it is said here too
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/failpoint.h"
#include "ckpt/part.h"
#include "ckpt/store.h"

int ckpt_compose(struct ckpt_store *store, const struct ckpt_attempt *attempt,
                 struct ckpt_manifest *manifest, uint64_t *ret_digest, struct bl_errmsg *msg)
{
    char name[CKPT_DIR_MAX], path[CKPT_PATH_MAX];
    bool reserve_used = false;
    char *text = NULL;
    size_t bytes = 0;
    int rc = ckpt_attempt_begin(store, attempt, msg); /* a node without parts has none yet */

    ckpt_attempt_name(name, attempt);
    rc = rc < 0 ? rc : ckpt_path_join(path, store->path, name, NULL, msg);
    rc = rc < 0 ? rc : BL_FAILPOINT("commit-begin");
    rc = rc < 0 ? rc : ckpt_manifest_gather(store, path, manifest, msg);
    rc = rc < 0 ? rc : ckpt_manifest_encode(manifest, &text, &bytes, msg);
    rc = rc < 0 ? rc : ckpt_manifest_digest(text, bytes, ret_digest, msg);
    rc = rc < 0 ? rc : ckpt_manifest_write(store, path, text, bytes, &reserve_used, msg);
    rc = rc < 0 ? rc : BL_FAILPOINT("commit-manifest");
    free(text);
    return rc < 0 ? bl_err_in(msg, rc, "step %llu", (unsigned long long)attempt->step) : 0;
}

/* Are this node's parts what the manifest says, and is it of this attempt? */
static int prepare_check(struct ckpt_store *store, const struct ckpt_attempt *attempt,
                         const char *path, const char *text, size_t bytes, struct bl_errmsg *msg)
{
    struct ckpt_manifest manifest = {0};
    enum ckpt_codec codec = CKPT_CODEC_NONE;
    int rc = ckpt_manifest_decode(&manifest, text, bytes, msg);

    rc = rc < 0 ? rc : ckpt_codec_parse(manifest.codec, &codec, msg);
    if (rc == 0 && (manifest.step != attempt->step || manifest.generation != attempt->generation ||
                    strcmp(manifest.run, store->run) != 0)) {
        rc = bl_err(msg, BL_EFOREIGN, "the manifest is of run %s, step %llu, generation %llu",
                    manifest.run, (unsigned long long)manifest.step,
                    (unsigned long long)manifest.generation);
    }
    for (uint32_t i = 0; rc == 0 && i < manifest.part_count; i++) {
        const struct ckpt_part *part = &manifest.parts[i];
        struct ckpt_index index = {0};

        if (strcmp(part->node, store->node) != 0) {
            continue;
        }
        rc = ckpt_part_index_load(store->io, path, part->name, codec, &part->index_digest, &index,
                                  msg);
        ckpt_index_close(&index);
        rc = rc < 0 ? rc
                    : ckpt_part_size_check(store->io, path, part->name, codec, part->bytes, msg);
    }
    ckpt_manifest_close(&manifest);
    return rc;
}

/* The digest of the manifest in directory `dir`, or 0. */
static uint64_t standing_digest(struct ckpt_store *store, const char *dir)
{
    struct ckpt_opened opened = {0};
    uint64_t digest = 0;

    if (ckpt_opened_load(store, dir, &opened, NULL) == 0) {
        digest = opened.manifest_digest;
        ckpt_opened_close(&opened);
    }
    return digest;
}

int ckpt_prepare(struct ckpt_store *store, const struct ckpt_attempt *attempt, struct ckpt_io *from,
                 uint64_t manifest_digest, struct bl_errmsg *msg)
{
    char name[CKPT_DIR_MAX], path[CKPT_PATH_MAX], file[CKPT_PATH_MAX];
    uint64_t digest = 0;
    bool reserve_used = false;
    char *text = NULL;
    size_t bytes = 0;
    int rc = ckpt_store_writable(store, msg);

    ckpt_attempt_name(name, attempt);
    rc = rc < 0 ? rc : ckpt_path_join(path, store->path, name, NULL, msg);
    rc = rc < 0 ? rc : ckpt_path_join(file, path, CKPT_MANIFEST_FILE, NULL, msg);
    if (rc == 0 && standing_digest(store, name) == manifest_digest) {
        return ckpt_io_fsync_path(store->io, path, msg); /* a repeat, or it was composed here */
    }
    rc = rc < 0 ? rc : ckpt_io_read_file(from, file, CKPT_MANIFEST_BYTES_MAX, &text, &bytes, msg);
    rc = rc < 0 ? rc : ckpt_manifest_digest(text, bytes, &digest, msg);
    if (rc == 0 && digest != manifest_digest) {
        rc = bl_err(msg, BL_EDIGEST, "another manifest came than was asked for");
    }
    rc = rc < 0 ? rc : prepare_check(store, attempt, path, text, bytes, msg);
    rc = rc < 0 ? rc : ckpt_manifest_write(store, path, text, bytes, &reserve_used, msg);
    rc = rc < 0 ? rc : BL_FAILPOINT("commit-prepared");
    free(text);
    return rc < 0 ? bl_err_in(msg, rc, "step %llu", (unsigned long long)attempt->step) : 0;
}

int ckpt_publish(struct ckpt_store *store, const struct ckpt_attempt *attempt,
                 uint64_t manifest_digest, struct ckpt_commit_result *ret, struct bl_errmsg *msg)
{
    struct ckpt_commit_result result = {.manifest_digest = manifest_digest};
    struct ckpt_opened opened = {0};
    char name[CKPT_DIR_MAX];
    int rc = ckpt_store_writable(store, msg);

    ckpt_attempt_name(name, attempt);
    ckpt_dir_name(result.dir, attempt->step, attempt->generation);
    rc = rc < 0 ? rc : BL_FAILPOINT("commit-publish");
    rc = rc < 0 ? rc : ckpt_opened_load(store, name, &opened, msg);
    if (rc == -ENOENT && standing_digest(store, result.dir) == manifest_digest) {
        result.already = true;
        rc = ckpt_io_fsync_path(store->io, store->path, msg);
    } else if (rc == 0 && opened.manifest_digest != manifest_digest) {
        rc = bl_err(msg, BL_EDIGEST, "%s: another manifest than was committed", name);
    } else if (rc == 0) {
        rc = ckpt_finish_forward(store, name, &opened.manifest, &result.already, msg);
    }
    ckpt_opened_close(&opened);
    if (rc < 0) {
        return bl_err_in(msg, rc, "step %llu", (unsigned long long)attempt->step);
    }
    result.hint_written = ckpt_hint_write(store, result.dir);
    *ret = result;
    return 0;
}
