/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loads any layout from a checkpoint: for each destination a plan over all parts, then each part
 * once from front to back, every wanted chunk read once and handed to all who want bytes of it.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ckpt/part.h"
#include "ckpt/reader.h"
#include "ckpt/store.h"

struct ckpt_reader {
    struct ckpt_place place;
    struct ckpt_reader_config config;
    struct ckpt_opened opened; /* manifest.parts[].held are views of the indexes' lists */
};

/* What one destination takes from the part that is being read: runs [from, to) of its plan. */
struct taker {
    struct bl_plan plan;
    uint8_t *base;
    size_t from, to;
    size_t asked; /* first run that `wanted` has to look at: ones before end earlier */
    size_t given; /* the same for the copies */
};

struct loader {
    struct taker *takers;
    uint32_t count;
    struct ckpt_load_result *result;
};

static uint64_t run_end(const struct bl_run *run)
{
    return run->src_offset + run->bytes;
}

static bool load_wanted(void *arg, uint64_t lo, uint64_t hi)
{
    struct loader *loader = arg;

    for (uint32_t t = 0; t < loader->count; t++) {
        struct taker *taker = &loader->takers[t];

        while (taker->asked < taker->to && run_end(&taker->plan.runs[taker->asked]) <= lo) {
            taker->asked++;
        }
        for (size_t i = taker->asked; i < taker->to && taker->plan.runs[i].src_offset < hi; i++) {
            if (run_end(&taker->plan.runs[i]) > lo) {
                return true;
            }
        }
    }
    return false;
}

static int load_window(void *arg, uint64_t offset, const uint8_t *data, uint32_t bytes,
                       struct bl_errmsg *msg)
{
    struct loader *loader = arg;
    uint64_t end = offset + bytes;

    (void)msg;
    for (uint32_t t = 0; t < loader->count; t++) {
        struct taker *taker = &loader->takers[t];

        while (taker->given < taker->to && run_end(&taker->plan.runs[taker->given]) <= offset) {
            taker->given++;
        }
        for (size_t i = taker->given; i < taker->to && taker->plan.runs[i].src_offset < end; i++) {
            const struct bl_run *run = &taker->plan.runs[i];
            uint64_t lo = run->src_offset > offset ? run->src_offset : offset;
            uint64_t hi = run_end(run) < end ? run_end(run) : end;

            if (lo < hi) {
                memcpy(taker->base + run->dst_offset + (lo - run->src_offset), data + (lo - offset),
                       (size_t)(hi - lo));
                loader->result->bytes_wanted += hi - lo;
            }
        }
    }
    return 0;
}

/* Points each taker at its runs from part `part`; false when nobody wants anything. */
static bool loader_aim(struct loader *loader, uint32_t part)
{
    bool any = false;

    for (uint32_t t = 0; t < loader->count; t++) {
        struct taker *taker = &loader->takers[t];

        taker->from = taker->to; /* runs are sorted by source */
        while (taker->to < taker->plan.run_count && taker->plan.runs[taker->to].src == part) {
            taker->to++;
        }
        taker->asked = taker->given = taker->from;
        any = any || taker->from < taker->to;
    }
    return any;
}

static int loader_plan(struct loader *loader, const struct ckpt_opened *opened,
                       const struct ckpt_dest *dests, struct bl_errmsg *msg)
{
    const struct bl_extent_list **held = calloc(opened->manifest.part_count + 1u, sizeof(*held));
    int rc = held == NULL ? bl_err_code(msg, -ENOMEM, "load") : 0;

    for (uint32_t p = 0; rc == 0 && p < opened->manifest.part_count; p++) {
        held[p] = &opened->indexes[p].held;
    }
    for (uint32_t t = 0; rc == 0 && t < loader->count; t++) {
        struct taker *taker = &loader->takers[t];

        taker->base = dests[t].base;
        rc = bl_plan_make(&taker->plan, dests[t].list, held, opened->manifest.part_count, msg);
        if (rc == 0 && taker->plan.missing_elems > 0) {
            rc = bl_err(msg, BL_ENOSTATE, "%llu elements are not there, the first of tensor %s",
                        (unsigned long long)taker->plan.missing_elems, taker->plan.missing_name);
        }
    }
    free(held);
    return rc;
}

static int loader_read(struct loader *loader, const struct ckpt_reader *from, struct bl_errmsg *msg)
{
    const struct ckpt_opened *opened = &from->opened;
    struct ckpt_store *store = from->place.store;
    char file[CKPT_PART_FILE_MAX], path[CKPT_PATH_MAX];
    int rc = 0;

    for (uint32_t p = 0; rc == 0 && p < opened->manifest.part_count; p++) {
        const struct ckpt_part_reader reader = {
            .io = store->io,
            .path = path,
            .index = &opened->indexes[p],
            .wanted = load_wanted,
            .window = load_window,
            .arg = loader,
            .cancel = from->config.cancel,
            .result = loader->result,
        };

        if (!loader_aim(loader, p)) {
            continue;
        }
        ckpt_part_file(file, opened->manifest.parts[p].name, opened->codec);
        rc = ckpt_path_join(path, store->path, from->place.dir, file, msg);
        if (rc == 0) {
            rc = ckpt_part_read(&reader, msg);
        }
    }
    return rc;
}

void ckpt_reader_close(struct ckpt_reader *reader)
{
    if (reader == NULL) {
        return;
    }
    for (uint32_t p = 0; p < reader->opened.manifest.part_count; p++) {
        memset(&reader->opened.manifest.parts[p].held, 0, sizeof(struct bl_extent_list));
    }
    ckpt_opened_close(&reader->opened);
    free(reader);
}

int ckpt_reader_open(struct ckpt_reader **ret, const struct ckpt_place *places,
                     uint32_t place_count, const struct ckpt_reader_config *config,
                     struct bl_errmsg *msg)
{
    struct ckpt_reader *reader = calloc(1, sizeof(*reader));
    int rc;

    if (place_count == 0 || place_count > CKPT_PLACES_MAX) {
        rc = bl_err(msg, BL_ELIMIT, "%u copies of a checkpoint, 1 to %u can be read", place_count,
                    CKPT_PLACES_MAX);
    } else if (place_count > 1) {
        rc = bl_err(msg, BL_ENOTBUILT, "healing from other copies is not built");
    } else if (reader == NULL) {
        rc = bl_err_code(msg, -ENOMEM, "load");
    } else {
        rc = ckpt_opened_load(places[0].store, places[0].dir, &reader->opened, msg);
    }
    if (rc < 0) {
        free(reader);
        return rc;
    }
    reader->place = places[0];
    if (config != NULL) {
        reader->config = *config;
    }
    for (uint32_t p = 0; p < reader->opened.manifest.part_count; p++) {
        struct ckpt_part *part = &reader->opened.manifest.parts[p];

        bl_extent_list_close(&part->held);
        part->held = reader->opened.indexes[p].held;
    }
    *ret = reader;
    return 0;
}

const struct ckpt_manifest *ckpt_reader_manifest(const struct ckpt_reader *reader)
{
    return &reader->opened.manifest;
}

int ckpt_reader_load(struct ckpt_reader *reader, const struct ckpt_dest *dests, uint32_t dest_count,
                     struct ckpt_load_result *ret, struct bl_errmsg *msg)
{
    struct ckpt_load_result result = {0};
    struct loader loader = {.count = dest_count, .result = &result};
    struct timespec from, to;
    int rc;

    clock_gettime(CLOCK_MONOTONIC, &from);
    loader.takers = calloc(dest_count + 1u, sizeof(*loader.takers));
    rc = loader.takers == NULL ? bl_err_code(msg, -ENOMEM, "load") : 0;
    if (rc == 0) {
        rc = loader_plan(&loader, &reader->opened, dests, msg);
    }
    if (rc == 0) {
        rc = loader_read(&loader, reader, msg);
    }
    for (uint32_t t = 0; loader.takers != NULL && t < dest_count; t++) {
        bl_plan_close(&loader.takers[t].plan);
    }
    free(loader.takers);
    if (rc < 0) {
        return bl_err_in(msg, rc, "%s", reader->place.dir);
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
