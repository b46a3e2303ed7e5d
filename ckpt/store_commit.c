/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attempts and their commit. What is on disk, in this order, each step durable before the next:
 *
 *     parts and indexes (every engine)  ->  temporary name  ->  manifest.json in the attempt
 *         ->  the attempt's directory renamed (the commit)  ->  the root synced  ->  latest
 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <time.h>

#include "base/failpoint.h"
#include "ckpt/part.h"
#include "ckpt/store.h"

int ckpt_attempt_begin(struct ckpt_store *store, const struct ckpt_attempt *attempt,
                       struct bl_errmsg *msg)
{
    char name[CKPT_DIR_MAX], path[CKPT_PATH_MAX];
    int rc = ckpt_store_writable(store, msg);

    if (rc < 0) {
        return rc;
    }
    ckpt_attempt_name(name, attempt);
    rc = ckpt_path_join(path, store->path, name, NULL, msg);
    if (rc == 0) {
        rc = ckpt_io_mkdir(store->io, path, msg);
    }
    return rc < 0 ? rc : ckpt_io_fsync_path(store->io, store->path, msg);
}

/* A disk that is full is said with what it claims to have: it may be wrong, or a quota smaller. */
static int save_error(const struct ckpt_store *store, const struct ckpt_attempt *attempt, int rc,
                      const struct bl_errmsg *why, struct bl_errmsg *msg)
{
    struct statvfs disk;

    if ((rc == -ENOSPC || rc == -EDQUOT) && statvfs(store->path, &disk) == 0) {
        return bl_err(msg, rc, "step %llu: %s (the file system reports %llu bytes free)",
                      (unsigned long long)attempt->step, why->text,
                      (unsigned long long)disk.f_bavail * disk.f_frsize);
    }
    return bl_err(msg, rc, "step %llu: %s", (unsigned long long)attempt->step, why->text);
}

int ckpt_save_part(struct ckpt_store *store, const struct ckpt_attempt *attempt,
                   const struct ckpt_part_job *job, struct ckpt_part_result *ret,
                   struct bl_errmsg *msg)
{
    char name[CKPT_DIR_MAX], path[CKPT_PATH_MAX], trash[CKPT_PATH_MAX];
    struct bl_errmsg why = {0};
    int rc = ckpt_store_writable(store, msg);

    if (rc < 0) {
        return rc;
    }
    ckpt_attempt_name(name, attempt);
    rc = ckpt_path_join(path, store->path, name, NULL, msg);
    if (rc == 0) {
        rc = ckpt_path_join(trash, store->path, CKPT_TRASH_DIR, NULL, msg);
    }
    if (rc == 0) {
        rc = ckpt_part_write(store->io, path, trash, job, ret, &why);
        return rc < 0 ? save_error(store, attempt, rc, &why, msg) : 0;
    }
    return bl_err_in(msg, rc, "step %llu", (unsigned long long)attempt->step);
}

int ckpt_attempt_drop(struct ckpt_store *store, const struct ckpt_attempt *attempt,
                      struct bl_errmsg *msg)
{
    char name[CKPT_DIR_MAX];
    int rc = ckpt_store_writable(store, msg);

    ckpt_attempt_name(name, attempt);
    return rc < 0 ? rc : ckpt_trash_move(store, name, msg);
}

static bool state_is_zero(const struct bl_state_digest *state)
{
    return state->sum[0] == 0 && state->sum[1] == 0;
}

/* Reads one part's index and checks it against what its engine reported. */
static int gather_part(struct ckpt_store *store, const char *path, enum ckpt_codec codec,
                       struct ckpt_part *part, struct bl_state_digest *sum, struct bl_errmsg *msg)
{
    struct ckpt_index index = {0};
    int rc =
        ckpt_part_index_load(store->io, path, part->name, codec, &part->index_digest, &index, msg);

    for (int waited = 0; rc == -ENOENT && store->shared && waited < CKPT_VISIBLE_MS; waited += 50) {
        const struct timespec pause = {0, 50 * 1000000};

        nanosleep(&pause, NULL);
        rc = ckpt_part_index_load(store->io, path, part->name, codec, &part->index_digest, &index,
                                  msg);
    }
    if (rc == 0) {
        rc = ckpt_part_size_check(store->io, path, part->name, codec, index.part_bytes, msg);
    }
    if (rc == 0 && part->bytes != index.part_bytes) {
        rc = bl_err(msg, BL_EFORMAT, "%s: reported with %llu bytes, has %llu", part->name,
                    (unsigned long long)part->bytes, (unsigned long long)index.part_bytes);
    }
    if (rc == 0) {
        part->raw_bytes = index.raw_bytes;
        bl_extent_list_close(&part->held);
        part->held = index.held;
        memset(&index.held, 0, sizeof(index.held));
        bl_state_digest_merge(sum, &index.state);
    }
    ckpt_index_close(&index);
    return rc;
}

int ckpt_manifest_gather(struct ckpt_store *store, const char *path, struct ckpt_manifest *manifest,
                         struct bl_errmsg *msg)
{
    struct bl_state_digest sum = {{0, 0}};
    char found[BL_STATE_DIGEST_TEXT_BYTES], wanted[BL_STATE_DIGEST_TEXT_BYTES];
    enum ckpt_codec codec = CKPT_CODEC_NONE;
    int rc = ckpt_codec_parse(manifest->codec, &codec, msg);

    for (uint32_t i = 0; rc == 0 && i < manifest->part_count; i++) {
        rc = gather_part(store, path, codec, &manifest->parts[i], &sum, msg);
    }
    if (rc == 0) {
        rc = ckpt_manifest_complete(manifest, msg);
    }
    if (rc < 0) {
        return rc;
    }
    if (state_is_zero(&manifest->state)) {
        manifest->state = sum;
    }
    if (!bl_state_digest_equal(&manifest->state, &sum)) {
        bl_state_digest_format(&sum, found);
        bl_state_digest_format(&manifest->state, wanted);
        return bl_err(msg, BL_EDIGEST, "the parts' state digest is %s, not %s", found, wanted);
    }
    if (manifest->metrics.saved_unix_s == 0) {
        manifest->metrics.saved_unix_s = (uint64_t)time(NULL);
    } else if (manifest->metrics.saved_unix_s == CKPT_SAVED_UNKNOWN) {
        manifest->metrics.saved_unix_s = 0;
    }
    if (manifest->writer[0] == '\0') {
        snprintf(manifest->writer, sizeof(manifest->writer), "belay %s", BELAY_VERSION);
    }
    snprintf(manifest->codec, sizeof(manifest->codec), "%s",
             codec == CKPT_CODEC_ZSTD ? "zstd" : "none"); /* "auto" is the writer's choice only */
    return 0;
}

/* Gives the reserve up; false when there was none. */
static bool reserve_release(struct ckpt_store *store)
{
    char name[CKPT_NODE_MAX + 16], path[CKPT_PATH_MAX];

    snprintf(name, sizeof(name), ".reserve-%s", store->node);
    return ckpt_path_join(path, store->path, name, NULL, NULL) == 0 &&
           store->io->ops->unlink(store->io, path) == 0;
}

/* Under a name of its own: another engine may be at the same commit, and the rename must not take
 * what that one has half written. */
static int manifest_write(struct ckpt_store *store, const char *path, const char *text,
                          size_t bytes, struct bl_errmsg *msg)
{
    char temp[CKPT_PATH_MAX], final[CKPT_PATH_MAX], name[64];
    int rc;

    snprintf(name, sizeof(name), CKPT_MANIFEST_FILE ".%016llx.tmp",
             (unsigned long long)ckpt_nonce());
    rc = ckpt_path_join(temp, path, name, NULL, msg);
    if (rc == 0) {
        rc = ckpt_path_join(final, path, CKPT_MANIFEST_FILE, NULL, msg);
    }
    if (rc < 0) {
        return rc;
    }
    rc = ckpt_io_write_file(store->io, temp, text, bytes, msg);
    if (rc == 0) {
        rc = ckpt_io_rename(store->io, temp, final, msg);
    }
    if (rc < 0) {
        BL_IGNORE(store->io->ops->unlink(store->io, temp), "goes with the attempt");
        return rc;
    }
    return ckpt_io_fsync_path(store->io, path, msg);
}

int ckpt_manifest_write(struct ckpt_store *store, const char *path, const char *text, size_t bytes,
                        bool *ret_reserve_used, struct bl_errmsg *msg)
{
    struct bl_errmsg why = {0};
    int rc = manifest_write(store, path, text, bytes, &why);

    if ((rc == -ENOSPC || rc == -EDQUOT) && reserve_release(store)) {
        *ret_reserve_used = true;
        rc = manifest_write(store, path, text, bytes, &why);
    }
    return rc < 0 ? bl_err(msg, rc, "%s", why.text) : 0;
}

/* Is there a good checkpoint under the final name, of the same state? 1: yes, 0: there is none that
 * is good, negative: another state, or the disk does not tell. */
static int final_is_there(struct ckpt_store *store, const struct ckpt_manifest *manifest,
                          uint64_t *ret_digest, struct bl_errmsg *msg)
{
    struct ckpt_opened opened = {0};
    char dir[CKPT_DIR_MAX];
    int rc;

    ckpt_dir_name(dir, manifest->step, manifest->generation);
    rc = ckpt_opened_load(store, dir, &opened, msg);
    if (rc < 0) {
        return ckpt_error_is_of_disk(rc) ? rc : 0;
    }
    *ret_digest = opened.manifest_digest;
    rc = state_is_zero(&manifest->state) ||
                 bl_state_digest_equal(&opened.manifest.state, &manifest->state)
             ? 1
             : bl_err(msg, BL_ECONFLICT, "%s/%s is there already, with another state", store->path,
                      dir);
    ckpt_opened_close(&opened);
    return rc;
}

int ckpt_finish_forward(struct ckpt_store *store, const char *attempt_dir,
                        const struct ckpt_manifest *manifest, bool *ret_already,
                        struct bl_errmsg *msg)
{
    char from[CKPT_PATH_MAX], to[CKPT_PATH_MAX], dir[CKPT_DIR_MAX];
    uint64_t digest;
    int there, rc;

    ckpt_dir_name(dir, manifest->step, manifest->generation);
    rc = ckpt_path_join(from, store->path, attempt_dir, NULL, msg);
    if (rc == 0) {
        rc = ckpt_path_join(to, store->path, dir, NULL, msg);
    }
    if (rc < 0) {
        return rc;
    }
    *ret_already = false;
    rc = store->io->ops->rename(store->io, from, to);
    if (rc < 0) { /* the destination is read before judging: a repeat, another engine, a wreck */
        there = final_is_there(store, manifest, &digest, msg);
        if (there < 0) {
            return there;
        }
        if (there > 0) {
            *ret_already = true;
            rc = ckpt_trash_move(store, attempt_dir, msg);
        } else if (rc == -EEXIST || rc == -ENOTEMPTY) {
            rc = ckpt_trash_move(store, dir, msg);
            rc = rc < 0 ? rc : ckpt_io_rename(store->io, from, to, msg);
        } else {
            rc = bl_err_code(msg, rc, "rename %s to %s", from, to);
        }
    }
    return rc < 0 ? rc : ckpt_io_fsync_path(store->io, store->path, msg);
}

/* Only a hint, so failing is not an error. */
bool ckpt_hint_write(struct ckpt_store *store, const char *dir)
{
    char temp_name[64], temp[CKPT_PATH_MAX], path[CKPT_PATH_MAX], line[CKPT_DIR_MAX + 1];

    snprintf(temp_name, sizeof(temp_name), ".latest.%016llx.tmp", (unsigned long long)ckpt_nonce());
    if (ckpt_path_join(temp, store->path, temp_name, NULL, NULL) < 0 ||
        ckpt_path_join(path, store->path, CKPT_LATEST_FILE, NULL, NULL) < 0) {
        return false;
    }
    snprintf(line, sizeof(line), "%s\n", dir);
    if (ckpt_io_write_file(store->io, temp, line, strlen(line), NULL) == 0 &&
        store->io->ops->rename(store->io, temp, path) == 0) {
        return true;
    }
    BL_IGNORE(store->io->ops->unlink(store->io, temp), "swept later");
    return false;
}

/* Manifests that earlier tries of this commit, cut off, left half written. Only under the final
 * name: in the attempt, one of them may be another engine's of this moment. */
static void strays_remove(struct ckpt_store *store, const char *dir)
{
    static const char begin[] = CKPT_MANIFEST_FILE ".";
    struct ckpt_names names = {0};
    char path[CKPT_PATH_MAX], file[CKPT_PATH_MAX];

    if (ckpt_path_join(path, store->path, dir, NULL, NULL) < 0 ||
        store->io->ops->list(store->io, path, CKPT_ENTRIES_MAX, &names) < 0) {
        return;
    }
    for (uint32_t i = 0; i < names.count; i++) {
        if (strncmp(names.names[i], begin, sizeof(begin) - 1) == 0 &&
            ckpt_path_join(file, path, names.names[i], NULL, NULL) == 0) {
            BL_IGNORE(store->io->ops->unlink(store->io, file), "a file in the way of nobody");
        }
    }
    ckpt_names_close(&names);
}

/* Another engine at the same commit may have replaced our manifest by its own before the rename:
 * the digest of the one that stands. Where it cannot be read, *io_digest stays what it is. */
static void standing_digest(struct ckpt_store *store, const char *dir, uint64_t *io_digest)
{
    char path[CKPT_PATH_MAX];
    uint64_t digest = 0;
    char *text = NULL;
    size_t bytes = 0;

    if (ckpt_path_join(path, store->path, dir, CKPT_MANIFEST_FILE, NULL) == 0 &&
        ckpt_io_read_file(store->io, path, CKPT_MANIFEST_BYTES_MAX, &text, &bytes, NULL) == 0 &&
        ckpt_manifest_digest(text, bytes, &digest, NULL) == 0) {
        *io_digest = digest;
    }
    free(text);
}

static int commit_new(struct ckpt_store *store, const char *attempt_dir, const char *path,
                      struct ckpt_manifest *manifest, struct ckpt_commit_result *result,
                      struct bl_errmsg *msg)
{
    char *text = NULL;
    size_t bytes = 0;
    int rc = BL_FAILPOINT("commit-begin");

    rc = rc < 0 ? rc : ckpt_manifest_gather(store, path, manifest, msg);
    if (rc == 0) {
        rc = ckpt_manifest_encode(manifest, &text, &bytes, msg);
    }
    if (rc == 0) {
        rc = ckpt_manifest_digest(text, bytes, &result->manifest_digest, msg);
    }
    if (rc == 0) {
        rc = ckpt_manifest_write(store, path, text, bytes, &result->reserve_used, msg);
    }
    free(text);
    rc = rc < 0 ? rc : BL_FAILPOINT("commit-manifest");
    rc = rc < 0 ? rc : ckpt_finish_forward(store, attempt_dir, manifest, &result->already, msg);
    BL_IGNORE(BL_FAILPOINT("commit-renamed"), "only a kill makes sense here");
    return rc;
}

int ckpt_commit(struct ckpt_store *store, const struct ckpt_attempt *attempt,
                struct ckpt_manifest *manifest, struct ckpt_commit_result *ret,
                struct bl_errmsg *msg)
{
    struct ckpt_commit_result result = {0};
    char name[CKPT_DIR_MAX], path[CKPT_PATH_MAX];
    int there, rc = ckpt_store_writable(store, msg);

    if (rc < 0) {
        return rc;
    }
    if (strcmp(manifest->run, store->run) != 0 || manifest->step != attempt->step ||
        manifest->generation != attempt->generation || manifest->part_count == 0) {
        return bl_err(msg, -EINVAL, "step %llu: manifest and attempt do not belong together",
                      (unsigned long long)attempt->step);
    }
    ckpt_attempt_name(name, attempt);
    ckpt_dir_name(result.dir, attempt->step, attempt->generation);
    rc = ckpt_path_join(path, store->path, name, NULL, msg);
    if (rc < 0) {
        return rc;
    }
    there = final_is_there(store, manifest, &result.manifest_digest, msg);
    if (there < 0) {
        return there;
    }
    if (there > 0) {
        result.already = true;
        rc = ckpt_trash_move(store, name, msg);
        rc = rc < 0 ? rc : ckpt_io_fsync_path(store->io, store->path, msg);
    } else {
        rc = commit_new(store, name, path, manifest, &result, msg);
        /* The attempt is gone: another engine, thought to be dead, made the same commit. */
        if (rc == -ENOENT && final_is_there(store, manifest, &result.manifest_digest, NULL) > 0) {
            result.already = true;
            rc = ckpt_io_fsync_path(store->io, store->path, msg);
        }
    }
    if (rc < 0) {
        return bl_err_in(msg, rc, "step %llu", (unsigned long long)attempt->step);
    }
    standing_digest(store, result.dir, &result.manifest_digest);
    strays_remove(store, result.dir);
    result.hint_written = ckpt_hint_write(store, result.dir);
    *ret = result;
    return 0;
}
