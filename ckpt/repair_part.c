/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Repairs of one part. The least that helps is done: bad chunks are written over in place with the
 * bytes that their digest names (they were bad before, so a kill in the middle loses nothing), a
 * bad index is replaced, and only a part that cannot be had otherwise is written again.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>

#include "base/failpoint.h"
#include "base/file.h"
#include "ckpt/repair_internal.h"
#include "ckpt/reshard_stream.h"

/* ---- A look at the part ---- */

struct look {
    struct repair *repair;
    struct ckpt_index index;
    bool index_good, bytes_good;
    uint32_t *bad; /* owned; chunks */
    uint32_t bad_count, bad_room;
    struct bl_errmsg why; /* of the index, or why the bytes cannot be read */
};

static int look_window(void *arg, uint64_t offset, const uint8_t *data, uint32_t bytes,
                       struct bl_errmsg *msg)
{
    struct look *look = arg;
    struct repair *repair = look->repair;

    (void)offset, (void)data, (void)msg;
    repair->bytes_done += bytes;
    if (repair->job->progress != NULL) {
        repair->job->progress(repair->job->arg, repair->bytes_done, repair->bytes_all);
    }
    return 0;
}

static int look_bad_chunk(void *arg, uint32_t chunk, const char *why, struct bl_errmsg *msg)
{
    struct look *look = arg;

    (void)why;
    if (look->bad_count == look->bad_room) {
        uint32_t room = look->bad_room == 0 ? 64 : 2 * look->bad_room;
        uint32_t *grown = realloc(look->bad, room * sizeof(*grown));

        if (grown == NULL) {
            return bl_err_code(msg, -ENOMEM, "list of %u bad chunks", room);
        }
        look->bad = grown;
        look->bad_room = room;
    }
    look->bad[look->bad_count++] = chunk;
    return 0;
}

/* Fills `look`; negative only when there is no memory, or it was cancelled. */
static int look_at(struct look *look, uint32_t p, const char *path, struct bl_errmsg *msg)
{
    struct repair *repair = look->repair;
    const struct ckpt_part *part = &repair->opened.manifest.parts[p];
    struct ckpt_load_result counts = {0};
    const struct ckpt_part_reader reader = {.io = repair->io,
                                            .path = path,
                                            .index = &look->index,
                                            .window = look_window,
                                            .bad_chunk = look_bad_chunk,
                                            .arg = look,
                                            .cancel = repair->job->cancel,
                                            .result = &counts};
    uint64_t size = 0;
    int rc = ckpt_part_index_load(repair->io, repair->path, part->name, repair->codec,
                                  &part->index_digest, &look->index, &look->why);

    if (rc < 0) {
        return rc == -ENOMEM ? bl_err(msg, rc, "%s", look->why.text) : 0;
    }
    look->index_good = true;
    rc = repair->io->ops->size(repair->io, path, &size);
    if (rc < 0 || size != part->bytes) {
        rc = rc < 0 ? bl_err_code(&look->why, rc, "open %s", path)
                    : bl_err(&look->why, BL_EFORMAT, "%s: %llu bytes, not %llu", path,
                             (unsigned long long)size, (unsigned long long)part->bytes);
        return 0;
    }
    rc = ckpt_part_read(&reader, &look->why);
    if (rc == BL_EABORTED || rc == -ENOMEM) {
        return bl_err(msg, rc, "%s", look->why.text);
    }
    look->bytes_good = rc == 0;
    return 0;
}

/* ---- Chunks in place ---- */

struct stretch { /* stored bytes with a digest of their own: a chunk, or a frame of one */
    uint64_t at, digest;
    uint32_t bytes;
};

/* The stretches of a chunk; how many. */
static uint32_t chunk_stretches(const struct ckpt_index *index, uint32_t chunk,
                                struct stretch ret[8])
{
    if (index->codec == CKPT_CODEC_NONE) {
        uint64_t at = (uint64_t)chunk * index->chunk_bytes, left = index->part_bytes - at;

        ret[0] = (struct stretch){at, index->chunks[chunk],
                                  left < index->chunk_bytes ? (uint32_t)left : index->chunk_bytes};
        return 1;
    }
    for (uint32_t i = 0; i < index->layout[chunk].planes; i++) {
        const struct ckpt_frame *frame = &index->frames[index->layout[chunk].frame + i];

        ret[i] = (struct stretch){frame->at, frame->digest, frame->stored};
    }
    return index->layout[chunk].planes;
}

static bool read_stretch(struct ckpt_io *io, const char *path, const struct stretch *stretch,
                         uint8_t *data)
{
    int fd = io->ops->open(io, path, O_RDONLY, 0);
    uint64_t done = 0;

    while (fd >= 0 && done < stretch->bytes) {
        int64_t n = io->ops->pread(io, fd, data + done, stretch->bytes - done, stretch->at + done);

        if (n <= 0) {
            break;
        }
        done += (uint64_t)n;
    }
    if (fd >= 0) {
        BL_IGNORE(io->ops->close(io, fd), "opened for reading");
    }
    return done == stretch->bytes && bl_xxh3(data, stretch->bytes) == stretch->digest;
}

/* Finds the right bytes of a stretch in some copy; which, or -1. */
static int find_stretch(struct repair *repair, uint32_t p, const struct stretch *stretch,
                        uint8_t *data, char *path)
{
    for (uint32_t c = 0; c < repair->job->copy_count; c++) {
        if (repair_same_part(repair, c, p, false, path) &&
            read_stretch(repair->io, path, stretch, data)) {
            return (int)c;
        }
    }
    return -1;
}

static int write_stretch(struct repair *repair, int fd, const char *path,
                         const struct stretch *stretch, const uint8_t *data, struct bl_errmsg *msg)
{
    uint64_t done = 0;

    while (done < stretch->bytes) {
        int64_t n = repair->io->ops->pwrite(repair->io, fd, data + done, stretch->bytes - done,
                                            stretch->at + done);

        if (n <= 0) {
            return bl_err_code(msg, n == 0 ? -EIO : (int)n, "write %s (at byte %llu)", path,
                               (unsigned long long)(stretch->at + done));
        }
        done += (uint64_t)n;
    }
    repair->result->bytes_written += stretch->bytes;
    return BL_FAILPOINT("repair-chunk");
}

/* One bad chunk. 1: repaired; 0: no copy has its bytes; negative: it cannot be written. */
static int patch_chunk(struct repair *repair, uint32_t p, const struct look *look, uint32_t chunk,
                       int fd, const char *path, uint8_t *data, struct bl_errmsg *msg)
{
    struct stretch stretches[8];
    uint32_t count = chunk_stretches(&look->index, chunk, stretches);
    char from[CKPT_PATH_MAX] = "", file[CKPT_PART_FILE_MAX];
    int rc = 0;

    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        if (read_stretch(repair->io, path, &stretches[i], data)) {
            continue; /* another frame of the chunk is the bad one */
        }
        if (find_stretch(repair, p, &stretches[i], data, from) < 0) {
            return 0;
        }
        rc = repair->job->dry_run ? 0 : write_stretch(repair, fd, path, &stretches[i], data, msg);
    }
    if (rc < 0) {
        return rc;
    }
    ckpt_part_file(file, repair->opened.manifest.parts[p].name, repair->codec);
    repair_told(repair, file, true, "chunk %u (tensor %s): digest differs; taken from %s", chunk,
                ckpt_index_chunk_tensor(&look->index, chunk), from[0] == '\0' ? path : from);
    return 1;
}

/* Opens a part to write into it. Beside a running job its checkpoint may be retired at any moment,
 * and the file used again for the next save: who writes into one holds its lock, and what was
 * locked must still be the checkpoint's. */
static int patch_open(struct repair *repair, const char *path, int *ret_fd, struct bl_errmsg *msg)
{
    int fd = repair->io->ops->open(repair->io, path, O_WRONLY, 0);
    struct stat ours, there;

    if (fd < 0) {
        return bl_err_code(msg, fd, "open %s", path);
    }
    if ((flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) || fstat(fd, &ours) != 0 ||
        stat(path, &there) != 0 || ours.st_dev != there.st_dev || ours.st_ino != there.st_ino) {
        BL_IGNORE(repair->io->ops->close(repair->io, fd), "nothing was written");
        return bl_err(msg, BL_ECONFLICT,
                      "%s: its checkpoint was retired meanwhile, and is used for another", path);
    }
    *ret_fd = fd;
    return 0;
}

/* All bad chunks. 1: all are repaired; 0: some are not, the part must be written again. */
static int patch_chunks(struct repair *repair, uint32_t p, const struct look *look,
                        const char *path, struct bl_errmsg *msg)
{
    uint8_t *data = malloc(CKPT_CHUNK_BYTES_MAX + CKPT_CHUNK_BYTES_MAX / 64);
    int fd = -1, rc = data == NULL ? bl_err_code(msg, -ENOMEM, "a chunk") : 1;

    if (rc > 0 && !repair->job->dry_run) {
        rc = patch_open(repair, path, &fd, msg);
        rc = rc < 0 ? rc : 1;
    }
    for (uint32_t i = 0; rc > 0 && i < look->bad_count; i++) {
        rc = patch_chunk(repair, p, look, look->bad[i], fd, path, data, msg);
    }
    if (fd >= 0) {
        int synced = repair->io->ops->fsync(repair->io, fd);

        BL_IGNORE(repair->io->ops->close(repair->io, fd), "synced");
        rc = rc >= 0 && synced < 0 ? bl_err_code(msg, synced, "fsync %s", path) : rc;
    }
    free(data);
    return rc == -EIO ? 0 : rc; /* a place that cannot be written: the part goes elsewhere */
}

/* ---- Indexes and whole parts ---- */

/* With codec none the index is a file of its own. 1: put right; 0: no copy has it. */
static int patch_index(struct repair *repair, uint32_t p, const struct look *look,
                       struct bl_errmsg *msg)
{
    const struct ckpt_part *part = &repair->opened.manifest.parts[p];
    char file[CKPT_PART_FILE_MAX], from[CKPT_PATH_MAX];

    if (repair->codec != CKPT_CODEC_NONE) {
        return 0;
    }
    ckpt_part_index_file(file, part->name, repair->codec);
    for (uint32_t c = 0; c < repair->job->copy_count; c++) {
        char *data = NULL;
        size_t bytes = 0;
        int rc;

        if (!repair_same_part(repair, c, p, true, from) ||
            ckpt_io_read_file(repair->io, from, CKPT_INDEX_BYTES_MAX, &data, &bytes, NULL) < 0) {
            continue;
        }
        rc = bl_xxh3(data, bytes) == part->index_digest
                 ? repair_put_file(repair, file, data, bytes, msg)
                 : 1;
        free(data);
        if (rc == 0) {
            repair_told(repair, file, true, "%s; taken from %s", look->why.text, from);
            return 1;
        }
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

struct rebuild {
    struct ckpt_reshard_part part;
    struct ckpt_reshard_plan plan;
    struct reshard_stream *stream;
    bool unreadable; /* the copies do not give it */
};

static int rebuild_fetch(void *arg, uint32_t extent, uint64_t lo, uint64_t hi, void *dest,
                         struct bl_errmsg *msg)
{
    struct rebuild *rebuild = arg;
    int rc = reshard_stream_take(rebuild->stream, 0, extent, lo, hi, dest, msg);

    rebuild->unreadable = rebuild->unreadable || rc < 0;
    return rc;
}

/* Renames file `file` of the directory with what was written to `to_file` of the checkpoint. */
static int place_file(struct repair *repair, const char *temp, const char *file,
                      const char *to_file, struct bl_errmsg *msg)
{
    char from[CKPT_PATH_MAX], to[CKPT_PATH_MAX];
    int rc = ckpt_path_join(from, temp, file, NULL, msg);

    rc = rc < 0 ? rc : ckpt_path_join(to, repair->path, to_file, NULL, msg);
    return rc < 0 ? rc : ckpt_io_rename(repair->io, from, to, msg);
}

/* The part's file (its index file too) under the part's name, or under `name`. The part first, so
 * that an index never stands over bytes that are worse than what it had. */
static int place_files(struct repair *repair, const char *temp, const char *part_name,
                       const char *name, struct bl_errmsg *msg)
{
    char file[CKPT_PART_FILE_MAX], to[CKPT_PART_FILE_MAX];
    int rc;

    ckpt_part_file(file, part_name, repair->codec);
    ckpt_part_file(to, name, repair->codec);
    rc = place_file(repair, temp, file, to, msg);
    if (rc == 0 && repair->codec == CKPT_CODEC_NONE) {
        ckpt_part_index_file(file, part_name, repair->codec);
        ckpt_part_index_file(to, name, repair->codec);
        rc = BL_FAILPOINT("repair-part");
        rc = rc < 0 ? rc : place_file(repair, temp, file, to, msg);
    }
    return rc < 0 ? rc : ckpt_io_fsync_path(repair->io, repair->path, msg);
}

static void remove_files(struct repair *repair, const char *name)
{
    char file[CKPT_PART_FILE_MAX], path[CKPT_PATH_MAX];

    for (int index = 0; index < 2; index++) {
        if (index) {
            ckpt_part_index_file(file, name, repair->codec);
        } else {
            ckpt_part_file(file, name, repair->codec);
        }
        if (ckpt_path_join(path, repair->path, file, NULL, NULL) == 0) {
            BL_IGNORE(repair->io->ops->unlink(repair->io, path), "the next repair removes it");
        }
    }
}

/* NAME-r1, or with a higher number: a name that the manifest does not have. */
static int rebuilt_name(const struct repair *repair, const char *old, char ret[CKPT_PART_NAME_MAX])
{
    const struct ckpt_manifest *manifest = &repair->opened.manifest;
    int base = (int)repair_name_base(old);

    for (uint32_t number = 1; number <= manifest->part_count + 1; number++) {
        uint32_t p = 0;
        int bytes = snprintf(ret, CKPT_PART_NAME_MAX, "%.*s" REPAIR_NAME "%u", base, old, number);

        while (p < manifest->part_count && strcmp(manifest->parts[p].name, ret) != 0) {
            p++;
        }
        if (p == manifest->part_count) {
            return bytes < (int)CKPT_PART_NAME_MAX ? 0 : BL_ELIMIT;
        }
    }
    return BL_ELIMIT;
}

/* Has another node this manifest too, because a part is its? Then it stays as it is: two that
 * differ are two checkpoints, neither of them whole. */
static bool manifest_is_shared(const struct repair *repair)
{
    const struct ckpt_manifest *manifest = &repair->opened.manifest;
    uint32_t p = 0;

    while (p < manifest->part_count &&
           !ckpt_part_is_elsewhere(repair->job->store, &manifest->parts[p])) {
        p++;
    }
    return p < manifest->part_count;
}

/* The part has other bytes than the manifest says (another zstd, another chunk size): it goes
 * beside the old one under a name of its own, and the new manifest is what replaces the one by the
 * other. Before that all is as it was, after that all is good. */
static int place_renamed(struct repair *repair, uint32_t p, const char *temp,
                         const struct ckpt_part_result *written, struct bl_errmsg *msg)
{
    struct ckpt_part *part = &repair->opened.manifest.parts[p], old = *part;
    struct ckpt_index index = {0};
    char name[CKPT_PART_NAME_MAX];
    int rc = rebuilt_name(repair, old.name, name);

    if (manifest_is_shared(repair)) {
        return bl_err(msg, BL_ECONFLICT,
                      "%s: comes out with other bytes, and other nodes have its manifest: make a "
                      "new checkpoint of the copy (ckpt-tool reshard)",
                      old.name);
    }
    if (rc < 0) {
        return bl_err(msg, rc, "%s: no name for the part that replaces it", old.name);
    }
    rc = ckpt_part_index_load(repair->io, temp, old.name, repair->codec, &written->index_digest,
                              &index, msg);
    rc = rc < 0 ? rc : place_files(repair, temp, old.name, name, msg);
    if (rc == 0) {
        memcpy(part->name, name, sizeof(name));
        part->bytes = written->bytes;
        part->raw_bytes = written->raw_bytes;
        part->index_digest = written->index_digest;
        part->held = index.held;
        for (uint32_t i = 0; i < part->held.extent_count; i++) {
            part->held.extents[i].offset = 0; /* as a manifest has them */
        }
        rc = BL_FAILPOINT("repair-manifest");
        rc = rc < 0 ? rc : repair_put_manifest(repair, msg);
        if (rc == 0) {
            index.held = old.held;
            repair->manifest_changed = true;
            remove_files(repair, old.name);
        } else { /* whether the manifest took its place is not known: both parts stay */
            *part = old;
        }
    }
    ckpt_index_close(&index);
    return rc;
}

static int rebuild_place(struct repair *repair, uint32_t p, const char *temp,
                         const struct ckpt_part_result *written, struct bl_errmsg *msg)
{
    const struct ckpt_part *part = &repair->opened.manifest.parts[p];
    int rc = written->index_digest == part->index_digest
                 ? place_files(repair, temp, part->name, part->name, msg)
                 : place_renamed(repair, p, temp, written, msg);

    repair->result->bytes_written += rc < 0 ? 0 : written->bytes;
    return rc;
}

/* *ret_unreadable: an error came from reading the copies, not from writing. */
static int rebuild_write(struct repair *repair, uint32_t p, struct ckpt_reader *reader,
                         uint64_t window_bytes, bool *ret_unreadable, struct bl_errmsg *msg)
{
    const struct ckpt_part *part = &repair->opened.manifest.parts[p];
    static const bool want = true;
    struct rebuild rebuild = {0};
    const struct ckpt_reshard_job job = {
        .plan = &rebuild.plan, .reader = reader, .window_bytes = window_bytes};
    const struct ckpt_source source = {
        .list = &rebuild.part.list, .fetch = rebuild_fetch, .arg = &rebuild};
    const struct ckpt_part_job write = {.name = part->name,
                                        .sources = &source,
                                        .source_count = 1,
                                        .codec = repair->opened.manifest.codec,
                                        .cancel = repair->job->cancel};
    struct ckpt_part_result written = {0};
    char temp[CKPT_PATH_MAX], name[CKPT_DIR_MAX + 16];
    int rc;

    snprintf(name, sizeof(name), REPAIR_DIR, repair->job->dir);
    rc = bl_extent_list_copy(&rebuild.part.list, &part->held);
    rc = rc < 0 ? rc : ckpt_part_sort(&rebuild.part.list);
    rc = rc < 0 ? bl_err_code(msg, rc, "%s", part->name) : 0;
    rebuild.plan.parts = &rebuild.part;
    rebuild.plan.part_count = 1;
    rc = rc < 0 ? rc : ckpt_path_join(temp, repair->job->store->path, name, NULL, msg);
    rc = rc < 0 ? rc : ckpt_io_mkdir(repair->io, temp, msg);
    rc = rc < 0 ? rc : reshard_stream_start(&rebuild.stream, &job, &want, msg);
    rc = rc < 0 ? rc : ckpt_part_write(repair->io, temp, NULL, &write, &written, msg);
    reshard_stream_stop(rebuild.stream, NULL);
    rc = rc < 0 ? rc : BL_FAILPOINT("repair-rebuilt");
    rc = rc < 0 ? rc : rebuild_place(repair, p, temp, &written, msg);
    if (rc != -ENOMEM) {
        BL_IGNORE(bl_rm_tree(repair->job->store->path, name, NULL), "removed by the next repair");
    }
    bl_extent_list_close(&rebuild.part.list);
    *ret_unreadable = rebuild.unreadable;
    return rc;
}

int repair_rebuild(struct repair *repair, uint32_t p, bool *ret_unreadable, struct bl_errmsg *msg)
{
    struct ckpt_place places[CKPT_PLACES_MAX];
    struct ckpt_reader_config config = {.cancel = repair->job->cancel};
    struct ckpt_reader *reader = NULL;
    uint64_t window = 0;
    uint32_t count = 0;
    int rc = ckpt_reshard_memory(repair->job->memory_max, &window, &config.memory_max, msg);

    for (uint32_t c = 0; c < repair->job->copy_count && count + 1 < CKPT_PLACES_MAX; c++) {
        if (repair->copies[c].text != NULL) {
            places[count++] = repair->job->copies[c];
        }
    }
    if (rc == 0 && count == 0) {
        rc = bl_err(msg, BL_ENOSTATE, "there is no other copy of this state");
    }
    *ret_unreadable = true;
    places[count] = (struct ckpt_place){repair->job->store, repair->job->dir};
    rc = rc < 0 ? rc : ckpt_reader_open(&reader, places, count + 1, &config, msg);
    if (rc == 0 && !repair->job->dry_run) {
        rc = rebuild_write(repair, p, reader, window, ret_unreadable, msg);
    }
    ckpt_reader_close(reader);
    return rc;
}

/* ---- One part ---- */

/* What the look found wrong is put right in the cheapest way that works. */
static int part_put_right(struct repair *repair, uint32_t p, struct look *look, const char *file,
                          const char *path, struct bl_errmsg *msg)
{
    struct bl_errmsg why = {0};
    bool unreadable = false;
    int rc = 0;

    if (look->index_good && look->bytes_good) {
        rc = look->bad_count == 0 ? 1 : patch_chunks(repair, p, look, path, msg);
        if (rc != 0) {
            return rc < 0 ? rc : 0;
        }
        bl_err(&look->why, BL_EDIGEST, "%u bad chunk%s, and no copy of the part has %s",
               look->bad_count, look->bad_count == 1 ? "" : "s",
               look->bad_count == 1 ? "it" : "them all");
    }
    rc = repair_rebuild(repair, p, &unreadable, &why);
    if (rc < 0 && (!unreadable || rc == BL_EABORTED || rc == -ENOMEM)) {
        return bl_err(msg, rc, "%s", why.text);
    }
    repair_told(repair, file, rc == 0, "%s; %s", look->why.text,
                rc == 0 ? "written again from other copies" : why.text);
    return 0;
}

/* Is it another node's, and not here? In a root that a node has for itself that is no damage. */
static bool part_is_away(const struct repair *repair, const struct ckpt_part *part,
                         const char *path)
{
    uint64_t size;

    return ckpt_part_is_elsewhere(repair->job->store, part) &&
           repair->io->ops->size(repair->io, path, &size) == -ENOENT;
}

int repair_part(struct repair *repair, uint32_t p, struct bl_errmsg *msg)
{
    const struct ckpt_part *part = &repair->opened.manifest.parts[p];
    struct look look = {.repair = repair};
    char file[CKPT_PART_FILE_MAX], path[CKPT_PATH_MAX];
    bool looked = true;
    int rc;

    ckpt_part_file(file, part->name, repair->codec);
    rc = ckpt_path_join(path, repair->path, file, NULL, msg);
    if (rc == 0 && part_is_away(repair, part, path)) {
        repair->bytes_all -= part->bytes;
        return 0;
    }
    rc = rc < 0 ? rc : look_at(&look, p, path, msg);
    if (rc == 0 && !look.index_good) {
        rc = patch_index(repair, p, &look, msg);
        if (rc > 0) { /* with its index the bytes can be looked at: not in a dry run */
            memset(&look.why, 0, sizeof(look.why));
            looked = !repair->job->dry_run;
            rc = looked ? look_at(&look, p, path, msg) : 0;
        }
    }
    if (rc == 0 && looked) {
        rc = part_put_right(repair, p, &look, file, path, msg);
    }
    ckpt_index_close(&look.index);
    free(look.bad);
    return rc;
}
