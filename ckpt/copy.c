/* SPDX-License-Identifier: Apache-2.0 */
/* Opens one copy of a checkpoint, with parts that may be missing or damaged. */
#include "ckpt/copy.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/part.h"

void ckpt_copy_close(struct ckpt_copy *copy)
{
    struct ckpt_manifest *manifest = &copy->opened.manifest;

    bl_holdings_free(copy->good);
    bl_holdings_free(copy->lost);
    for (uint32_t p = 0; copy->opened.indexes != NULL && p < manifest->part_count; p++) {
        if (manifest->parts[p].held.extents == copy->opened.indexes[p].held.extents) {
            memset(&manifest->parts[p].held, 0, sizeof(manifest->parts[p].held));
        }
        if (copy->bad != NULL) {
            free(copy->bad[p]);
        }
    }
    free(copy->bad);
    ckpt_opened_close(&copy->opened);
    memset(copy, 0, sizeof(*copy));
}

int ckpt_copy_path(const struct ckpt_copy *copy, uint32_t part, char ret[CKPT_PATH_MAX],
                   struct bl_errmsg *msg)
{
    char file[CKPT_PART_FILE_MAX];

    ckpt_part_file(file, copy->opened.manifest.parts[part].name, copy->opened.codec);
    return ckpt_path_join(ret, copy->place.store->path, copy->place.dir, file, msg);
}

/* Reads the index of a part and looks at its file. */
static int open_part(struct ckpt_copy *copy, const char *dir, uint32_t p, struct bl_errmsg *msg)
{
    const struct ckpt_part *part = &copy->opened.manifest.parts[p];
    struct ckpt_index *index = &copy->opened.indexes[p];
    struct ckpt_io *io = copy->place.store->io;
    int rc = ckpt_part_index_load(io, dir, part->name, copy->opened.codec, &part->index_digest,
                                  index, msg);

    if (rc == 0 && index->part_bytes != part->bytes) {
        rc = bl_err(msg, BL_EFORMAT, "%s/%s: index and manifest give different sizes", dir,
                    part->name);
    }
    if (rc == 0) {
        rc = ckpt_part_size_check(io, dir, part->name, copy->opened.codec, part->bytes, msg);
    }
    if (rc < 0) {
        ckpt_index_close(index);
        memset(index, 0, sizeof(*index));
    }
    return rc;
}

static int open_parts(struct ckpt_copy *copy, bool tolerant, struct bl_errmsg *msg)
{
    struct ckpt_manifest *manifest = &copy->opened.manifest;
    char dir[CKPT_PATH_MAX];
    int rc = ckpt_path_join(dir, copy->place.store->path, copy->place.dir, NULL, msg);

    copy->bad = calloc(manifest->part_count + 1u, sizeof(*copy->bad));
    copy->opened.indexes = calloc(manifest->part_count + 1u, sizeof(*copy->opened.indexes));
    if (copy->bad == NULL || copy->opened.indexes == NULL) {
        return bl_err_code(msg, -ENOMEM, "%s", copy->place.dir);
    }
    for (uint32_t p = 0; rc == 0 && p < manifest->part_count; p++) {
        struct bl_errmsg why = {0};

        rc = open_part(copy, dir, p, &why);
        if (rc == 0) {
            bl_extent_list_close(&manifest->parts[p].held);
            manifest->parts[p].held = copy->opened.indexes[p].held;
        } else if (tolerant && rc != -ENOMEM) {
            copy->bad_rc = copy->bad_rc == 0 ? rc : copy->bad_rc;
            copy->bad[p] = strdup(why.text);
            rc = copy->bad[p] == NULL ? bl_err_code(msg, -ENOMEM, "%s", dir) : 0;
        } else {
            rc = bl_err(msg, rc, "%s", why.text);
        }
    }
    return rc;
}

/* Sorts what the good and the bad parts hold. */
static int open_holdings(struct ckpt_copy *copy, struct bl_errmsg *msg)
{
    const struct ckpt_manifest *manifest = &copy->opened.manifest;
    const struct bl_extent_list **lists = calloc(manifest->part_count + 1u, sizeof(*lists));
    int rc = lists == NULL ? bl_err_code(msg, -ENOMEM, "%s", copy->place.dir) : 0;

    for (uint32_t p = 0; rc == 0 && p < manifest->part_count; p++) {
        lists[p] = copy->bad[p] == NULL ? &manifest->parts[p].held : NULL;
    }
    rc = rc < 0 ? rc : bl_holdings_new(&copy->good, lists, manifest->part_count, msg);
    if (rc == 0 && copy->bad_rc != 0) {
        for (uint32_t p = 0; p < manifest->part_count; p++) {
            lists[p] = copy->bad[p] != NULL ? &manifest->parts[p].held : NULL;
        }
        rc = bl_holdings_new(&copy->lost, lists, manifest->part_count, msg);
    }
    free(lists);
    return rc;
}

int ckpt_copy_open(struct ckpt_copy *copy, const struct ckpt_place *place, bool tolerant,
                   const struct ckpt_manifest *like, struct bl_errmsg *msg)
{
    const struct ckpt_manifest *manifest = &copy->opened.manifest;
    int rc;

    copy->place = *place;
    copy->tried = true;
    rc = ckpt_opened_manifest(place->store, place->dir, &copy->opened, msg);
    if (rc == 0 && like != NULL &&
        (strcmp(manifest->run, like->run) != 0 || manifest->step != like->step ||
         !bl_state_digest_equal(&manifest->state, &like->state))) {
        rc = bl_err(msg, BL_EFOREIGN, "%s/%s: no copy of it, the state differs", place->store->path,
                    place->dir);
    }
    rc = rc < 0 ? rc : open_parts(copy, tolerant, msg);
    rc = rc < 0 ? rc : open_holdings(copy, msg);
    copy->usable = rc == 0;
    return rc;
}
