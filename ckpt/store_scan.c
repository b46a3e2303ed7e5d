/* SPDX-License-Identifier: Apache-2.0 */
/* Looks at what a root holds: reads and cross-checks manifests, part sizes and indexes. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/part.h"
#include "ckpt/retain.h"
#include "ckpt/store.h"

void ckpt_opened_close(struct ckpt_opened *opened)
{
    if (opened == NULL) {
        return;
    }
    for (uint32_t i = 0; opened->indexes != NULL && i < opened->manifest.part_count; i++) {
        ckpt_index_close(&opened->indexes[i]);
    }
    free(opened->indexes);
    free(opened->text);
    ckpt_manifest_close(&opened->manifest);
    memset(opened, 0, sizeof(*opened));
}

int ckpt_part_size_check(struct ckpt_io *io, const char *path, const char *name,
                         enum ckpt_codec codec, uint64_t bytes, struct bl_errmsg *msg)
{
    char file[CKPT_PART_FILE_MAX], part[CKPT_PATH_MAX];
    uint64_t size = 0;
    int rc;

    ckpt_part_file(file, name, codec);
    rc = ckpt_path_join(part, path, file, NULL, msg);
    if (rc < 0) {
        return rc;
    }
    rc = io->ops->size(io, part, &size);
    if (rc < 0) {
        return bl_err_code(msg, rc, "open %s", part);
    }
    if (size != bytes) {
        return bl_err(msg, BL_EFORMAT, "%s: %llu bytes, not %llu", part, (unsigned long long)size,
                      (unsigned long long)bytes);
    }
    return 0;
}

int ckpt_opened_manifest(struct ckpt_store *store, const char *dir, struct ckpt_opened *ret,
                         struct bl_errmsg *msg)
{
    struct ckpt_opened opened = {0};
    struct ckpt_attempt attempt = {0};
    char path[CKPT_PATH_MAX];
    int rc = ckpt_path_join(path, store->path, dir, CKPT_MANIFEST_FILE, msg);

    if (rc == 0) {
        rc = ckpt_io_read_file(store->io, path, CKPT_MANIFEST_BYTES_MAX, &opened.text,
                               &opened.text_bytes, msg);
    }
    if (rc < 0) {
        return rc;
    }
    rc = ckpt_manifest_decode(&opened.manifest, opened.text, opened.text_bytes, msg);
    if (rc == 0) {
        rc = ckpt_codec_parse(opened.manifest.codec, &opened.codec, msg);
    }
    if (rc == 0) {
        rc = ckpt_manifest_digest(opened.text, opened.text_bytes, &opened.manifest_digest, msg);
    }
    if (rc == 0 && !ckpt_dir_parse(dir, &attempt.step, &attempt.generation) &&
        !ckpt_attempt_parse(dir, &attempt)) {
        rc = bl_err(msg, BL_EFORMAT, "\"%s\" is no checkpoint's name", dir);
    }
    if (rc == 0 && (attempt.step != opened.manifest.step ||
                    attempt.generation != opened.manifest.generation)) {
        rc = bl_err(msg, BL_EFORMAT, "is of step %llu, generation %llu: not of this directory",
                    (unsigned long long)opened.manifest.step,
                    (unsigned long long)opened.manifest.generation);
    }
    if (rc == 0 && store->run[0] != '\0' && strcmp(opened.manifest.run, store->run) != 0) {
        rc = bl_err(msg, BL_EFOREIGN, "is of run %s, not %s", opened.manifest.run, store->run);
    }
    if (rc < 0) {
        ckpt_opened_close(&opened);
        return bl_err_in(msg, rc, "%s", path);
    }
    *ret = opened;
    return 0;
}

bool ckpt_part_is_elsewhere(const struct ckpt_store *store, const struct ckpt_part *part)
{
    return store->owner[0] != '\0' && strcmp(part->node, store->owner) != 0;
}

int ckpt_opened_load(struct ckpt_store *store, const char *dir, struct ckpt_opened *ret,
                     struct bl_errmsg *msg)
{
    struct ckpt_opened opened = {0};
    char path[CKPT_PATH_MAX];
    int rc = ckpt_path_join(path, store->path, dir, NULL, msg);

    if (rc == 0) {
        rc = ckpt_opened_manifest(store, dir, &opened, msg);
    }
    if (rc < 0) {
        return rc;
    }
    opened.indexes = calloc(opened.manifest.part_count + 1u, sizeof(*opened.indexes));
    if (opened.indexes == NULL) {
        rc = bl_err_code(msg, -ENOMEM, "%s", path);
    }
    for (uint32_t i = 0; rc == 0 && i < opened.manifest.part_count; i++) {
        const struct ckpt_part *part = &opened.manifest.parts[i];

        rc = ckpt_part_index_load(store->io, path, part->name, opened.codec, &part->index_digest,
                                  &opened.indexes[i], msg);
        if (rc == -ENOENT && ckpt_part_is_elsewhere(store, part)) {
            rc = 0;
            continue;
        }
        if (rc == 0 && opened.indexes[i].part_bytes != part->bytes) {
            rc = bl_err(msg, BL_EFORMAT, "%s/%s: index and manifest give different sizes", path,
                        part->name);
        }
        if (rc == 0) {
            rc = ckpt_part_size_check(store->io, path, part->name, opened.codec, part->bytes, msg);
        }
        opened.here[i / 64] |= 1ull << i % 64;
        opened.parts_here++;
    }
    if (rc < 0) {
        ckpt_opened_close(&opened);
        return rc;
    }
    *ret = opened;
    return 0;
}

int ckpt_manifest_load(struct ckpt_store *store, const char *dir, struct ckpt_manifest *ret,
                       struct bl_errmsg *msg)
{
    struct ckpt_opened opened = {0};
    int rc = ckpt_opened_load(store, dir, &opened, msg);

    if (rc < 0) {
        return rc;
    }
    for (uint32_t i = 0; i < opened.manifest.part_count; i++) {
        struct bl_extent_list held = opened.manifest.parts[i].held;

        if ((opened.here[i / 64] >> i % 64 & 1) == 0) {
            continue; /* without its offsets */
        }
        opened.manifest.parts[i].held = opened.indexes[i].held;
        opened.indexes[i].held = held;
    }
    *ret = opened.manifest;
    /* What is left for closing: the indexes of as many parts. */
    for (uint32_t i = 0; i < ret->part_count; i++) {
        ckpt_index_close(&opened.indexes[i]);
    }
    memset(&opened.manifest, 0, sizeof(opened.manifest));
    ckpt_opened_close(&opened);
    return 0;
}

static void entry_fill(struct ckpt_entry *entry, const struct ckpt_opened *opened)
{
    const struct ckpt_manifest *manifest = &opened->manifest;

    entry->line = manifest->line;
    entry->samples = manifest->samples;
    entry->saved_unix_s = manifest->metrics.saved_unix_s;
    entry->part_count = manifest->part_count;
    entry->world = manifest->layout.world;
    entry->layout = manifest->layout;
    memcpy(entry->codec, manifest->codec, sizeof(entry->codec));
    entry->loss = manifest->metrics.loss;
    entry->digest = manifest->state;
    entry->manifest_digest = opened->manifest_digest;
    entry->function_id = manifest->function_id;
    entry->parts_here = opened->parts_here;
    memcpy(entry->here, opened->here, sizeof(entry->here));
    for (uint32_t i = 0; i < manifest->part_count; i++) {
        if ((opened->here[i / 64] >> i % 64 & 1) != 0) {
            entry->bytes += manifest->parts[i].bytes;
        } else if (entry->lacks[0] == '\0') {
            memcpy(entry->lacks, manifest->parts[i].node, sizeof(entry->lacks));
        }
    }
}

/* An attempt that has everything gets its final name, in stores that may write. */
static int entry_forward(struct ckpt_store *store, struct ckpt_entry *entry,
                         const struct ckpt_manifest *manifest)
{
    struct bl_errmsg why = {0};
    bool already = false;
    int rc;

    if (!store->writable) {
        snprintf(entry->why, sizeof(entry->why),
                 "its commit was cut off; the next start of the "
                 "run finishes it");
        return 0;
    }
    rc = ckpt_finish_forward(store, entry->dir, manifest, &already, &why);
    if (rc < 0) {
        snprintf(entry->why, sizeof(entry->why), "%.*s", CKPT_WHY_MAX - 1, why.text);
        return 0;
    }
    entry->state = CKPT_GOOD;
    ckpt_dir_name(entry->dir, entry->step, entry->generation);
    return already ? 1 : 0;
}

#define SCAN_TRIES 10 /* while somebody renames under our eyes */

static bool is_gone(struct ckpt_store *store, const char *name)
{
    struct ckpt_names names = {0};
    char path[CKPT_PATH_MAX];
    int rc = ckpt_path_join(path, store->path, name, NULL, NULL);

    rc = rc < 0 ? rc : store->io->ops->list(store->io, path, CKPT_ENTRIES_MAX, &names);
    ckpt_names_close(&names);
    return rc == -ENOENT;
}

bool ckpt_error_is_of_disk(int rc)
{
    return rc > BL_EGEN && rc != -ENOENT && rc != -ENOTDIR && rc != -EISDIR && rc != -EINVAL;
}

/* 1: an entry, 0: something else, or the same as another; -ESTALE: renamed or retired meanwhile. */
static int entry_look(struct ckpt_store *store, const char *name, struct ckpt_entry *entry,
                      struct bl_errmsg *msg)
{
    struct ckpt_opened opened = {0};
    struct ckpt_attempt attempt;
    struct bl_errmsg why = {0};
    bool committed;
    int rc;

    memset(entry, 0, sizeof(*entry));
    committed = ckpt_dir_parse(name, &entry->step, &entry->generation);
    if (!committed) {
        if (!ckpt_attempt_parse(name, &attempt)) {
            return 0;
        }
        entry->step = attempt.step;
        entry->generation = attempt.generation;
        entry->nonce = attempt.nonce;
    }
    snprintf(entry->dir, sizeof(entry->dir), "%s", name);
    rc = ckpt_opened_load(store, name, &opened, &why);
    if (rc == -ENOMEM) {
        return bl_err(msg, rc, "%s", why.text);
    }
    if (rc < 0 && is_gone(store, name)) {
        return -ESTALE;
    }
    if (rc < 0) {
        entry->state = rc == BL_EFOREIGN ? CKPT_FOREIGN : committed ? CKPT_BROKEN : CKPT_LEFTOVER;
        entry->unread = ckpt_error_is_of_disk(rc);
        snprintf(entry->why, sizeof(entry->why), "%.*s", CKPT_WHY_MAX - 1, why.text);
        return 1;
    }
    entry_fill(entry, &opened);
    entry->state = committed ? CKPT_GOOD : CKPT_FORWARD;
    if (opened.parts_here < opened.manifest.part_count) {
        entry->state = committed ? CKPT_PARTIAL : CKPT_PREPARED;
    }
    if (committed) {
        entry->verified_unix_s = ckpt_verified_read(store, name, opened.manifest_digest);
    }
    rc = entry->state != CKPT_FORWARD ? 0 : entry_forward(store, entry, &opened.manifest);
    ckpt_opened_close(&opened);
    return rc == 0;
}

static int entry_order(const void *a_, const void *b_)
{
    const struct ckpt_entry *a = a_, *b = b_;

    if (a->step != b->step) {
        return a->step > b->step ? -1 : 1;
    }
    if (a->generation != b->generation) {
        return a->generation > b->generation ? -1 : 1;
    }
    if (a->state != b->state) {
        return a->state < b->state ? -1 : 1;
    }
    return strcmp(a->dir, b->dir);
}

static int scan_once(struct ckpt_store *store, struct ckpt_scan *ret, struct bl_errmsg *msg)
{
    struct ckpt_names names = {0};
    struct ckpt_scan scan = {0};
    int rc = store->io->ops->list(store->io, store->path, CKPT_ENTRIES_MAX, &names);

    if (rc < 0) {
        return bl_err_code(msg, rc, "read directory %s", store->path);
    }
    scan.entries = calloc(names.count + 1u, sizeof(*scan.entries));
    if (scan.entries == NULL) {
        ckpt_names_close(&names);
        return bl_err_code(msg, -ENOMEM, "scan of %s", store->path);
    }
    for (uint32_t i = 0; rc >= 0 && i < names.count; i++) {
        rc = entry_look(store, names.names[i], &scan.entries[scan.count], msg);
        scan.count += rc > 0;
    }
    ckpt_names_close(&names);
    if (rc < 0) {
        ckpt_scan_close(&scan);
        return rc;
    }
    qsort(scan.entries, scan.count, sizeof(*scan.entries), entry_order);
    *ret = scan;
    return 0;
}

int ckpt_scan(struct ckpt_store *store, struct ckpt_scan *ret, struct bl_errmsg *msg)
{
    int rc = -ESTALE;

    for (int i = 0; rc == -ESTALE && i < SCAN_TRIES; i++) {
        rc = scan_once(store, ret, msg);
    }
    return rc == -ESTALE ? bl_err(msg, rc, "%s changes faster than it can be read", store->path)
                         : rc;
}

void ckpt_scan_close(struct ckpt_scan *scan)
{
    free(scan->entries);
    memset(scan, 0, sizeof(*scan));
}

const struct ckpt_entry *ckpt_scan_newest(const struct ckpt_scan *scan, const struct ckpt_cut *cuts,
                                          uint32_t cut_count)
{
    for (uint32_t i = 0; i < scan->count; i++) {
        if (scan->entries[i].state == CKPT_GOOD &&
            ckpt_entry_admitted(&scan->entries[i], cuts, cut_count)) {
            return &scan->entries[i];
        }
    }
    return NULL;
}
