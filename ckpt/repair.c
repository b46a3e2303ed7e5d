/* SPDX-License-Identifier: Apache-2.0 */
/* The order of a repair: lock, manifest, part by part, each with the manifest if it changed. */
#include "ckpt/repair.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/failpoint.h"
#include "base/file.h"
#include "ckpt/repair_internal.h"

void repair_told(struct repair *repair, const char *file, bool done, const char *fmt, ...)
{
    struct bl_errmsg text = {0};
    va_list args;

    va_start(args, fmt);
    vsnprintf(text.text, sizeof(text.text), fmt, args);
    va_end(args);
    if (done) {
        repair->result->repaired++;
    } else {
        repair->result->failed++;
    }
    if (repair->job->told != NULL) {
        repair->job->told(repair->job->arg, file, text.text, done);
    }
}

int repair_put_file(struct repair *repair, const char *name, const void *data, size_t bytes,
                    struct bl_errmsg *msg)
{
    char temp_name[CKPT_PART_FILE_MAX + 16], temp[CKPT_PATH_MAX], final[CKPT_PATH_MAX];
    int rc;

    if (repair->job->dry_run) {
        return 0;
    }
    snprintf(temp_name, sizeof(temp_name), "%s" REPAIR_SUFFIX, name);
    rc = ckpt_path_join(temp, repair->path, temp_name, NULL, msg);
    rc = rc < 0 ? rc : ckpt_path_join(final, repair->path, name, NULL, msg);
    if (rc < 0) {
        return rc;
    }
    BL_IGNORE(repair->io->ops->unlink(repair->io, temp), "of a killed repair; the next line tells");
    rc = ckpt_io_write_file(repair->io, temp, data, bytes, msg);
    rc = rc < 0 ? rc : BL_FAILPOINT("repair-put");
    rc = rc < 0 ? rc : ckpt_io_rename(repair->io, temp, final, msg);
    repair->result->bytes_written += rc < 0 ? 0 : bytes;
    return rc < 0 ? rc : ckpt_io_fsync_path(repair->io, repair->path, msg);
}

bool repair_same_part(const struct repair *repair, uint32_t c, uint32_t p, bool index, char *path)
{
    const struct ckpt_place *place = &repair->job->copies[c];
    const struct ckpt_manifest *theirs = &repair->copies[c].manifest;
    uint64_t digest = repair->opened.manifest.parts[p].index_digest;
    char file[CKPT_PART_FILE_MAX];

    for (uint32_t i = 0; i < theirs->part_count; i++) {
        if (theirs->parts[i].index_digest != digest) {
            continue;
        }
        if (index) {
            ckpt_part_index_file(file, theirs->parts[i].name, repair->codec);
        } else {
            ckpt_part_file(file, theirs->parts[i].name, repair->codec);
        }
        return ckpt_path_join(path, place->store->path, place->dir, file, NULL) == 0;
    }
    return false;
}

/* ---- The manifest ---- */

/* Does the manifest name every part whose file is here? */
static bool names_all_files(struct repair *repair, const struct ckpt_manifest *theirs,
                            enum ckpt_codec codec)
{
    struct ckpt_names names = {0};
    char file[CKPT_PART_FILE_MAX];
    bool all = repair->io->ops->list(repair->io, repair->path, CKPT_ENTRIES_MAX, &names) == 0;

    for (uint32_t i = 0; all && i < names.count; i++) {
        bool named = !ckpt_part_file_is(names.names[i]);

        for (uint32_t p = 0; !named && p < theirs->part_count; p++) {
            ckpt_part_file(file, theirs->parts[p].name, codec);
            named = strcmp(file, names.names[i]) == 0;
        }
        all = named;
    }
    ckpt_names_close(&names);
    return all;
}

/* Is the copy's manifest of this directory's step, and does it name the parts that are here, and of
 * each the index that is here where that can be read at all? Else the copy is another state, or cut
 * another way, and its manifest is of no use here. */
static bool manifest_fits(struct repair *repair, const struct ckpt_manifest *theirs)
{
    const char *run = repair->job->store->run;
    enum ckpt_codec codec = CKPT_CODEC_NONE;
    uint64_t step = 0, generation = 0;

    if (!ckpt_dir_parse(repair->job->dir, &step, &generation) || theirs->step != step ||
        theirs->generation != generation || (run[0] != '\0' && strcmp(theirs->run, run) != 0) ||
        ckpt_codec_parse(theirs->codec, &codec, NULL) < 0 ||
        !names_all_files(repair, theirs, codec)) {
        return false;
    }
    for (uint32_t i = 0; i < theirs->part_count; i++) {
        const struct ckpt_part *part = &theirs->parts[i];
        struct ckpt_index index = {0};
        int rc =
            ckpt_part_index_load(repair->io, repair->path, part->name, codec, NULL, &index, NULL);
        uint64_t digest = 0;
        uint8_t *data = NULL;
        size_t bytes = 0;
        bool other = false;

        if (rc == 0 && ckpt_index_encode(&index, &data, &bytes, &digest, NULL) == 0) {
            other = digest != part->index_digest;
        }
        free(data);
        ckpt_index_close(&index);
        if (other) {
            return false;
        }
    }
    return true;
}

static int repair_manifest(struct repair *repair, struct bl_errmsg *msg)
{
    struct bl_errmsg why = {0};
    int rc = ckpt_opened_manifest(repair->job->store, repair->job->dir, &repair->opened, &why);

    if (rc == 0 || rc == -ENOMEM || rc == BL_EFOREIGN) {
        return rc == 0 ? 0 : bl_err(msg, rc, "%s", why.text);
    }
    for (uint32_t c = 0; c < repair->job->copy_count; c++) {
        const struct ckpt_opened *copy = &repair->copies[c];

        if (copy->text == NULL || !manifest_fits(repair, &copy->manifest)) {
            continue;
        }
        rc = repair_put_file(repair, CKPT_MANIFEST_FILE, copy->text, copy->text_bytes, msg);
        if (rc < 0) {
            return rc;
        }
        repair_told(repair, CKPT_MANIFEST_FILE, true, "%s; taken from %s/%s", why.text,
                    repair->job->copies[c].store->path, repair->job->copies[c].dir);
        return ckpt_manifest_decode(&repair->opened.manifest, copy->text, copy->text_bytes, msg);
    }
    repair_told(
        repair, CKPT_MANIFEST_FILE, false,
        "%s; no other copy has a manifest that fits the parts here (is it cut another way?)",
        why.text);
    return 1;
}

int repair_put_manifest(struct repair *repair, struct bl_errmsg *msg)
{
    char *text = NULL;
    size_t bytes = 0;
    int rc = ckpt_manifest_encode(&repair->opened.manifest, &text, &bytes, msg);

    rc = rc < 0 ? rc : repair_put_file(repair, CKPT_MANIFEST_FILE, text, bytes, msg);
    free(text);
    return rc;
}

/* ---- All of it ---- */

static int lock_checkpoint(struct repair *repair, int *ret_fd, struct bl_errmsg *msg)
{
    int fd = open(repair->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd < 0) {
        return bl_err_code(msg, -errno, "open %s", repair->path);
    }
    *ret_fd = fd;
    if (!repair->job->dry_run && flock(fd, LOCK_EX | LOCK_NB) != 0) {
        return bl_err(msg, BL_ECONFLICT, "%s: another process works on it", repair->path);
    }
    return 0;
}

static int load_copies(struct repair *repair, struct bl_errmsg *msg)
{
    repair->copies = calloc(repair->job->copy_count + 1u, sizeof(*repair->copies));
    if (repair->copies == NULL) {
        return bl_err_code(msg, -ENOMEM, "copies");
    }
    for (uint32_t c = 0; c < repair->job->copy_count; c++) {
        const struct ckpt_place *place = &repair->job->copies[c];

        BL_IGNORE(ckpt_opened_manifest(place->store, place->dir, &repair->copies[c], NULL),
                  "one without a good manifest is no copy");
    }
    return 0;
}

size_t repair_name_base(const char *name)
{
    size_t bytes = strlen(name), end = bytes;

    while (end > 0 && name[end - 1] >= '0' && name[end - 1] <= '9') {
        end--;
    }
    return end < bytes && end > 2 && memcmp(name + end - 2, REPAIR_NAME, 2) == 0 ? end - 2 : bytes;
}

/* The part's name in the name of its file, or of its index file; false: it is neither. */
static bool file_part_name(enum ckpt_codec codec, const char *file, char ret[CKPT_PART_NAME_MAX])
{
    char suffix[CKPT_PART_FILE_MAX];
    size_t bytes = strlen(file);

    for (int index = 0; index < 2; index++) {
        if (index) {
            ckpt_part_index_file(suffix, "", codec);
        } else {
            ckpt_part_file(suffix, "", codec);
        }
        size_t end = strlen(suffix);

        if (bytes > end && bytes - end < CKPT_PART_NAME_MAX &&
            strcmp(file + bytes - end, suffix) == 0) {
            snprintf(ret, CKPT_PART_NAME_MAX, "%.*s", (int)(bytes - end), file);
            return true;
        }
    }
    return false;
}

/* Is the file of a part that the manifest does not name, but one with the same base? Then a repair
 * put it there and was killed before its manifest, or put another in its place. */
static bool is_replaced(const struct repair *repair, const char *file)
{
    const struct ckpt_manifest *manifest = &repair->opened.manifest;
    char name[CKPT_PART_NAME_MAX];
    bool like = false;

    if (!file_part_name(repair->codec, file, name)) {
        return false;
    }
    for (uint32_t p = 0; p < manifest->part_count; p++) {
        const char *named = manifest->parts[p].name;
        size_t base = repair_name_base(named);

        if (strcmp(named, name) == 0) {
            return false;
        }
        like = like || (base == repair_name_base(name) && strncmp(named, name, base) == 0);
    }
    return like;
}

static void remove_replaced(struct repair *repair)
{
    char path[CKPT_PATH_MAX];
    struct ckpt_names names = {0};

    if (repair->job->dry_run ||
        repair->io->ops->list(repair->io, repair->path, CKPT_ENTRIES_MAX, &names) < 0) {
        return;
    }
    for (uint32_t i = 0; i < names.count; i++) {
        if (is_replaced(repair, names.names[i]) &&
            ckpt_path_join(path, repair->path, names.names[i], NULL, NULL) == 0) {
            BL_IGNORE(repair->io->ops->unlink(repair->io, path), "a file in the way of nobody");
        }
    }
    ckpt_names_close(&names);
}

/* What a killed repair of this checkpoint was writing. */
static int remove_leftovers(struct repair *repair, struct bl_errmsg *msg)
{
    static const char suffix[] = REPAIR_SUFFIX;
    char name[CKPT_DIR_MAX + 16], path[CKPT_PATH_MAX];
    struct ckpt_names names = {0};
    int rc;

    if (repair->job->dry_run) {
        return 0;
    }
    snprintf(name, sizeof(name), REPAIR_DIR, repair->job->dir);
    rc = bl_rm_tree(repair->job->store->path, name, msg);
    if (rc == 0 && repair->io->ops->list(repair->io, repair->path, CKPT_ENTRIES_MAX, &names) < 0) {
        return 0; /* what cannot be listed is told of below */
    }
    for (uint32_t i = 0; rc == 0 && i < names.count; i++) {
        size_t bytes = strlen(names.names[i]), end = sizeof(suffix) - 1;

        if ((strcmp(names.names[i], CKPT_VERIFIED_TEMP_FILE) == 0 ||
             (bytes > end && strcmp(names.names[i] + bytes - end, suffix) == 0)) &&
            ckpt_path_join(path, repair->path, names.names[i], NULL, NULL) == 0) {
            BL_IGNORE(repair->io->ops->unlink(repair->io, path), "a file in the way of nobody");
        }
    }
    ckpt_names_close(&names);
    return rc;
}

static int repair_all(struct repair *repair, struct bl_errmsg *msg)
{
    struct ckpt_manifest *manifest = &repair->opened.manifest;
    int rc = remove_leftovers(repair, msg);

    rc = rc < 0 ? rc : load_copies(repair, msg);
    rc = rc < 0 ? rc : repair_manifest(repair, msg);
    if (rc != 0) {
        return rc < 0 ? rc : 0;
    }
    for (uint32_t c = 0; c < repair->job->copy_count; c++) { /* of another state: no copy */
        if (repair->copies[c].text != NULL &&
            !bl_state_digest_equal(&repair->copies[c].manifest.state, &manifest->state)) {
            ckpt_opened_close(&repair->copies[c]);
        }
    }
    rc = ckpt_codec_parse(manifest->codec, &repair->codec, msg);
    if (rc == 0) {
        remove_replaced(repair);
    }
    for (uint32_t p = 0; p < manifest->part_count; p++) {
        repair->bytes_all += manifest->parts[p].bytes;
    }
    for (uint32_t p = 0; rc == 0 && p < manifest->part_count; p++) {
        rc = repair_part(repair, p, msg);
    }
    if (rc == 0 && repair->manifest_changed) {
        repair_told(repair, CKPT_MANIFEST_FILE, true, "names the parts that were written again");
    }
    return rc;
}

int ckpt_repair(const struct ckpt_repair_job *job, struct ckpt_repair_result *ret,
                struct bl_errmsg *msg)
{
    struct ckpt_repair_result result = {0};
    struct repair repair = {.job = job, .result = &result, .io = job->store->io};
    int fd = -1, rc = job->dry_run ? 0 : ckpt_store_writable(job->store, msg);

    rc = rc < 0 ? rc : ckpt_path_join(repair.path, job->store->path, job->dir, NULL, msg);
    rc = rc < 0 ? rc : lock_checkpoint(&repair, &fd, msg);
    rc = rc < 0 ? rc : repair_all(&repair, msg);
    if (fd >= 0) {
        close(fd);
    }
    for (uint32_t c = 0; repair.copies != NULL && c < job->copy_count; c++) {
        ckpt_opened_close(&repair.copies[c]);
    }
    free(repair.copies);
    ckpt_opened_close(&repair.opened);
    if (rc == 0) {
        *ret = result;
    }
    return rc;
}
