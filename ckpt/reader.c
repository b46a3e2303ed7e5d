/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A checkpoint opened for loading, with its other copies: each level of a load asks one copy for
 * what those before it could not give.
 */
#include "ckpt/reader.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ckpt/copy.h"

struct ckpt_reader {
    struct ckpt_reader_config config;
    struct ckpt_copy *copies; /* owned, by place */
    uint32_t count;
    uint32_t first; /* the copy that is read: the first whose manifest is good */
};

void ckpt_reader_close(struct ckpt_reader *reader)
{
    if (reader == NULL) {
        return;
    }
    for (uint32_t c = 0; reader->copies != NULL && c < reader->count; c++) {
        ckpt_copy_close(&reader->copies[c]);
    }
    free(reader->copies);
    free(reader);
}

static void tell_healed(const struct ckpt_reader *reader, const char *file, uint32_t chunk,
                        const char *tensor, const char *from)
{
    if (reader->config.healed != NULL) {
        reader->config.healed(reader->config.arg, file, chunk, tensor, from);
    }
}

static int copy_file(const struct ckpt_copy *copy, const char *file, char ret[CKPT_PATH_MAX])
{
    return ckpt_path_join(ret, copy->place.store->path, copy->place.dir, file, NULL);
}

/* Has a copy the step that places[0] is named after, and its run? Without the manifest that is all
 * that is known of it. */
static int stand_in_check(const struct ckpt_place *places, const struct ckpt_copy *copy,
                          struct bl_errmsg *msg)
{
    const struct ckpt_manifest *manifest = &copy->opened.manifest;
    const char *run = places[0].store->run;
    struct ckpt_attempt wanted = {0};

    if ((!ckpt_dir_parse(places[0].dir, &wanted.step, &wanted.generation) &&
         !ckpt_attempt_parse(places[0].dir, &wanted)) ||
        manifest->step != wanted.step || (run[0] != '\0' && strcmp(manifest->run, run) != 0)) {
        return bl_err(msg, BL_EFOREIGN, "%s/%s: no copy of %s", copy->place.store->path,
                      copy->place.dir, places[0].dir);
    }
    return 0;
}

/* Opens a place, its store too. */
static int reader_copy_open(struct ckpt_reader *reader, uint32_t c, bool tolerant,
                            const struct ckpt_manifest *like, struct bl_errmsg *msg)
{
    struct ckpt_copy *copy = &reader->copies[c];
    struct ckpt_place place = copy->place;

    if (place.store == NULL) {
        int rc = reader->config.open == NULL
                     ? bl_err(msg, BL_ENOSTATE, "%s: no store", place.dir)
                     : reader->config.open(reader->config.arg, c, &place.store, msg);

        copy->place = place;
        if (rc < 0) {
            return rc;
        }
    }
    return ckpt_copy_open(copy, &place, tolerant, like, msg);
}

/* Opens the first place that has a good manifest. */
static int reader_open_first(struct ckpt_reader *reader, const struct ckpt_place *places,
                             struct bl_errmsg *msg)
{
    char file[CKPT_PATH_MAX], from[CKPT_PATH_MAX];
    int rc = -ENOENT;

    for (uint32_t c = 0; c < reader->count; c++) {
        struct ckpt_copy *copy = &reader->copies[c];
        struct bl_errmsg why = {0};
        int tried = reader_copy_open(reader, c, reader->count > 1, NULL, &why);

        tried = tried < 0 || c == 0 ? tried : stand_in_check(places, copy, &why);
        if (tried == 0) {
            reader->first = c;
            for (uint32_t b = 0; b < c; b++) {
                if (places[b].store != NULL &&
                    ckpt_path_join(file, places[b].store->path, places[b].dir, CKPT_MANIFEST_FILE,
                                   NULL) == 0 &&
                    copy_file(copy, CKPT_MANIFEST_FILE, from) == 0) {
                    tell_healed(reader, file, 0, "manifest", from);
                }
            }
            return 0;
        }
        rc = c == 0 ? bl_err(msg, tried, "%s", why.text) : rc; /* the first place's error counts */
        struct ckpt_place place = copy->place;

        ckpt_copy_close(copy);
        copy->place = place;
        copy->tried = true;
        if (tried == -ENOMEM) {
            return bl_err(msg, tried, "%s", why.text);
        }
    }
    return rc;
}

int ckpt_reader_open(struct ckpt_reader **ret, const struct ckpt_place *places,
                     uint32_t place_count, const struct ckpt_reader_config *config,
                     struct bl_errmsg *msg)
{
    struct ckpt_reader *reader;
    int rc;

    if (place_count == 0 || place_count > CKPT_PLACES_MAX) {
        return bl_err(msg, BL_ELIMIT, "%u copies of a checkpoint, 1 to %u can be read", place_count,
                      CKPT_PLACES_MAX);
    }
    reader = calloc(1, sizeof(*reader));
    if (reader != NULL) {
        reader->copies = calloc(place_count, sizeof(*reader->copies));
        reader->count = place_count;
        reader->config = config != NULL ? *config : (struct ckpt_reader_config){0};
    }
    if (reader == NULL || reader->copies == NULL) {
        ckpt_reader_close(reader);
        return bl_err_code(msg, -ENOMEM, "load");
    }
    for (uint32_t c = 0; c < place_count; c++) {
        reader->copies[c].place = places[c];
    }
    rc = reader_open_first(reader, places, msg);
    if (rc < 0) {
        ckpt_reader_close(reader);
        return rc;
    }
    *ret = reader;
    return 0;
}

const struct ckpt_manifest *ckpt_reader_manifest(const struct ckpt_reader *reader)
{
    return &reader->copies[reader->first].opened.manifest;
}

/* ---- a load ---- */

struct level { /* a copy that was asked, and what it could not give */
    uint32_t copy;
    struct ckpt_holes holes;
};

/* The next copy behind `copy` that can be used, opened when it was not yet; count: none. Why the
 * newest one cannot goes into `why`. */
static int reader_next(struct ckpt_reader *reader, uint32_t copy, uint32_t *ret,
                       struct bl_errmsg *why)
{
    for (uint32_t c = copy + 1; c < reader->count; c++) {
        struct ckpt_copy *next = &reader->copies[c];
        int rc = 0;

        if (!next->tried) {
            rc = reader_copy_open(reader, c, true, ckpt_reader_manifest(reader), why);
        }
        if (rc < 0) {
            struct ckpt_place place = next->place;

            ckpt_copy_close(next);
            next->place = place;
            next->tried = true;
        }
        if (rc == -ENOMEM) {
            return rc;
        }
        if (next->usable) {
            *ret = c;
            return 0;
        }
    }
    *ret = reader->count;
    return 0;
}

/* Where the bytes of a part came from: the same part of the copy if it has it, else the copy. */
static int healed_from(const struct ckpt_copy *copy, const struct ckpt_part *part,
                       char ret[CKPT_PATH_MAX])
{
    for (uint32_t p = 0; p < copy->opened.manifest.part_count; p++) {
        if (copy->opened.manifest.parts[p].index_digest == part->index_digest) {
            return ckpt_copy_path(copy, p, ret, NULL);
        }
    }
    return copy_file(copy, NULL, ret);
}

static void tell_levels(const struct ckpt_reader *reader, const struct level *levels,
                        uint32_t level_count, struct ckpt_load_result *result)
{
    char file[CKPT_PATH_MAX], from[CKPT_PATH_MAX];

    for (uint32_t l = 0; l + 1 < level_count; l++) {
        const struct ckpt_copy *copy = &reader->copies[levels[l].copy];
        const struct ckpt_copy *next = &reader->copies[levels[l + 1].copy];

        for (size_t h = 0; h < levels[l].holes.count; h++) {
            const struct ckpt_hole *hole = &levels[l].holes.at[h];

            result->healed++;
            if (ckpt_copy_path(copy, hole->part, file, NULL) == 0 &&
                healed_from(next, &copy->opened.manifest.parts[hole->part], from) == 0) {
                tell_healed(reader, file, hole->chunk, hole->tensor, from);
            }
        }
    }
}

/* Asks copy after copy until nothing is wanted any more. */
static int reader_load(struct ckpt_reader *reader, const struct ckpt_want *wants,
                       uint32_t want_count, struct ckpt_load_result *result, struct bl_errmsg *msg)
{
    struct level *levels = calloc(reader->count + 1u, sizeof(*levels));
    struct bl_errmsg why = {0};
    uint32_t level = 0, copy = reader->first;
    bool more = true;
    int rc = levels == NULL ? bl_err_code(&why, -ENOMEM, "load") : 0;

    while (rc == 0 && more && copy < reader->count) {
        struct ckpt_holes *holes = &levels[level].holes;
        bool last = copy + 1 == reader->count;

        levels[level++].copy = copy;
        rc = last ? 0 : ckpt_holes_init(holes, wants, want_count, &why);
        if (rc == 0) {
            rc = ckpt_copy_load(&reader->copies[copy], wants, want_count, &reader->config,
                                last ? NULL : holes, result, &why);
        }
        wants = holes->wants;
        more = rc == 0 && holes->rc != 0;
        if (more) {
            rc = reader_next(reader, copy, &copy, &why);
        }
    }
    if (rc == 0 && !more) {
        tell_levels(reader, levels, level, result);
    } else if (level > 0 && levels[0].holes.rc != 0 && rc != -ENOMEM && rc != BL_EABORTED) {
        rc = bl_err(msg, levels[0].holes.rc, "%s; no copy has it: %s", levels[0].holes.why.text,
                    why.text);
    } else {
        rc = bl_err(msg, rc, "%s", why.text);
    }
    for (uint32_t l = 0; l < level; l++) {
        ckpt_holes_close(&levels[l].holes);
    }
    free(levels);
    return rc;
}

int ckpt_reader_load(struct ckpt_reader *reader, const struct ckpt_dest *dests, uint32_t dest_count,
                     struct ckpt_load_result *ret, struct bl_errmsg *msg)
{
    struct ckpt_load_result result = {0};
    struct ckpt_want *wants = calloc(dest_count + 1u, sizeof(*wants));
    struct timespec from, to;
    int rc = wants == NULL ? bl_err_code(msg, -ENOMEM, "load") : 0;

    clock_gettime(CLOCK_MONOTONIC, &from);
    for (uint32_t d = 0; wants != NULL && d < dest_count; d++) {
        wants[d] = (struct ckpt_want){*dests[d].list, dests[d].base};
    }
    rc = rc < 0 ? rc : reader_load(reader, wants, dest_count, &result, msg);
    free(wants);
    if (rc < 0) {
        const char *dir = reader->copies[reader->first].place.dir;

        return msg == NULL || strstr(msg->text, dir) != NULL ? rc : bl_err_in(msg, rc, "%s", dir);
    }
    clock_gettime(CLOCK_MONOTONIC, &to);
    result.elapsed_us =
        (uint64_t)((to.tv_sec - from.tv_sec) * 1000000 + (to.tv_nsec - from.tv_nsec) / 1000);
    *ret = result;
    return 0;
}

int ckpt_load(struct ckpt_store *store, const char *dir, const struct ckpt_dest *dests,
              uint32_t dest_count, struct ckpt_load_result *ret, struct bl_errmsg *msg)
{
    const struct ckpt_place place = {store, dir};
    struct ckpt_reader *reader = NULL;
    int rc = ckpt_reader_open(&reader, &place, 1, NULL, msg);

    if (rc == 0) {
        rc = ckpt_reader_load(reader, dests, dest_count, ret, msg);
    }
    ckpt_reader_close(reader);
    return rc;
}
