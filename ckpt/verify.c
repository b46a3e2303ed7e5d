/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Verifies one checkpoint and goes on after each finding, so that one look tells all that is wrong:
 * manifest, sizes and indexes; with `full` also each part's header against its index, every chunk,
 * and the state digest made again from the bytes on disk.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/part.h"
#include "ckpt/store.h"

struct verifier {
    struct ckpt_store *store;
    const char *dir;
    const struct ckpt_verify_job *job;
    struct ckpt_verify_result *result;
    struct bl_errmsg *msg;
    uint64_t bytes_done, bytes_all; /* as they are without a codec */
    /* The part that is being read. */
    char path[CKPT_PATH_MAX];
    const struct ckpt_index *index;
    uint32_t extent; /* the first that does not end before the window */
    struct bl_state_digest state;
    bool chunks_bad;
    struct ckpt_text header; /* owned; codec zstd: what the header must be */
    bool header_bad;
};

static void finding(struct verifier *verifier, const char *file, const char *fmt, ...)
    BL_PRINTF(3, 4);

static void finding(struct verifier *verifier, const char *file, const char *fmt, ...)
{
    struct bl_errmsg text = {0};
    va_list args;

    va_start(args, fmt);
    vsnprintf(text.text, sizeof(text.text), fmt, args);
    va_end(args);
    if (verifier->result->findings++ == 0 && verifier->msg != NULL) {
        *verifier->msg = text;
    }
    if (verifier->job->finding != NULL) {
        verifier->job->finding(verifier->job->arg, file, text.text);
    }
}

static int verify_bad_chunk(void *arg, uint32_t chunk, const char *why, struct bl_errmsg *msg)
{
    struct verifier *verifier = arg;
    const struct ckpt_index *index = verifier->index;
    uint64_t lo = index->codec == CKPT_CODEC_ZSTD ? index->frames[index->layout[chunk].frame].at
                                                  : (uint64_t)chunk * index->chunk_bytes;

    (void)msg;
    verifier->chunks_bad = true;
    finding(verifier, verifier->path, "%s: chunk %u (from byte %llu, tensor %s): %s",
            verifier->path, chunk, (unsigned long long)lo,
            ckpt_index_chunk_tensor(verifier->index, chunk), why);
    return 0;
}

/* Adds the elements of the window to the state digest. Extents are aligned to their elements, so no
 * element lies in two windows. */
static int verify_window(void *arg, uint64_t offset, const uint8_t *data, uint32_t bytes,
                         struct bl_errmsg *msg)
{
    struct verifier *verifier = arg;
    const struct bl_extent_list *held = &verifier->index->held;
    uint64_t end = offset + bytes;

    (void)msg;
    if (verifier->header.data != NULL && offset < verifier->header.bytes) {
        uint64_t in_header = verifier->header.bytes < end ? verifier->header.bytes : end;

        verifier->header_bad = verifier->header_bad || memcmp(verifier->header.data + offset, data,
                                                              in_header - offset) != 0;
    }
    for (uint32_t i = verifier->extent; i < held->extent_count; i++) {
        const struct bl_extent *extent = &held->extents[i];
        uint64_t each = bl_dtype_bytes(held->tensors[extent->tensor].dtype);
        uint64_t extent_end = extent->offset + bl_extent_elems(extent) * each;
        uint64_t lo = extent->offset > offset ? extent->offset : offset;
        uint64_t hi = extent_end < end ? extent_end : end;
        struct bl_extent piece = *extent;
        const struct bl_extent_list one = {held->tensors, held->tensor_count, &piece, 1};

        if (extent->offset >= end) {
            break;
        }
        if (lo < hi) {
            piece.flat_lo = extent->flat_lo + (lo - extent->offset) / each;
            piece.flat_hi = extent->flat_lo + (hi - extent->offset) / each;
            piece.offset = 0;
            bl_extent_list_digest(&one, data + (lo - offset), &verifier->state);
        }
        verifier->extent = extent_end <= end ? i + 1 : i;
    }
    verifier->bytes_done += bytes;
    if (verifier->job->progress != NULL) {
        verifier->job->progress(verifier->job->arg, verifier->bytes_done, verifier->bytes_all);
    }
    return 0;
}

/* Compares the header's entries with the index, one by one in file order. */
struct header_check {
    const struct ckpt_index *index;
    uint32_t next;
};

static int header_entry(void *arg, const struct ckpt_st_entry *entry)
{
    struct header_check *check = arg;
    const struct bl_extent_list *held = &check->index->held;
    const struct bl_extent *extent;
    const struct bl_tensor *tensor;
    char key[CKPT_KEY_MAX];

    if (check->next >= held->extent_count) {
        return BL_EFORMAT;
    }
    extent = &held->extents[check->next++];
    tensor = &held->tensors[extent->tensor];
    ckpt_part_key(key, extent, tensor);
    return strcmp(entry->key, key) == 0 && entry->dtype == tensor->dtype &&
                   entry->begin == extent->offset - check->index->data_offset
               ? 0
               : BL_EFORMAT;
}

static int header_read(struct ckpt_io *io, const char *path, uint8_t *data, uint64_t bytes,
                       struct bl_errmsg *msg)
{
    int fd = io->ops->open(io, path, O_RDONLY, 0);
    int rc = 0;

    if (fd < 0) {
        return bl_err_code(msg, fd, "open %s", path);
    }
    for (uint64_t done = 0; rc == 0 && done < bytes;) {
        int64_t n = io->ops->pread(io, fd, data + done, (size_t)(bytes - done), done);

        if (n <= 0) {
            rc = bl_err_code(msg, n == 0 ? BL_EFORMAT : (int)n, "read %s", path);
        }
        done += n > 0 ? (uint64_t)n : 0;
    }
    BL_IGNORE(io->ops->close(io, fd), "opened for reading");
    return rc;
}

/* The header is what other programs read: it must say what the index says. */
static void verify_header(struct verifier *verifier)
{
    const struct ckpt_index *index = verifier->index;
    struct header_check check = {index, 0};
    struct bl_errmsg why = {0};
    uint64_t bytes = 0;
    uint8_t *data;
    int rc;

    if (index->data_offset > CKPT_HEADER_BYTES_MAX + 8) {
        finding(verifier, verifier->path, "%s: header too large", verifier->path);
        return;
    }
    data = malloc((size_t)index->data_offset);
    rc = data == NULL
             ? bl_err_code(&why, -ENOMEM, "header")
             : header_read(verifier->store->io, verifier->path, data, index->data_offset, &why);
    if (rc == 0) {
        rc = ckpt_st_header_bytes(data, index->part_bytes, &bytes, &why);
    }
    if (rc == 0 && bytes != index->data_offset) {
        rc = bl_err(&why, BL_EFORMAT, "header of %llu bytes, not %llu", (unsigned long long)bytes,
                    (unsigned long long)index->data_offset);
    }
    if (rc == 0) {
        rc = ckpt_st_header_decode(data, (size_t)bytes, index->part_bytes, header_entry, &check,
                                   &why);
    }
    if (rc == 0 && check.next != index->held.extent_count) {
        rc = bl_err(&why, BL_EFORMAT, "header lacks entries");
    }
    free(data);
    if (rc < 0) {
        finding(verifier, verifier->path, "%s: header: %s", verifier->path, why.text);
    }
}

/* With codec zstd the header is in the frames; there is one way to write it. */
static int header_make(struct verifier *verifier)
{
    const struct ckpt_index *index = verifier->index;
    struct bl_extent_list held = {0};
    struct bl_errmsg why = {0};
    uint64_t raw_bytes = 0;
    int rc;

    verifier->header_bad = false;
    if (index->codec != CKPT_CODEC_ZSTD) {
        return 0;
    }
    rc = bl_extent_list_copy(&held, &index->held);
    if (rc == 0) {
        rc = ckpt_part_header(&held, index->codec, index->chunk_bytes, &verifier->header,
                              &raw_bytes, &why);
    }
    bl_extent_list_close(&held);
    if (rc == -ENOMEM) {
        return bl_err_code(verifier->msg, rc, "header");
    }
    /* The extents follow one another (the index was checked), so this is all that can differ. */
    verifier->header_bad = rc < 0 || verifier->header.bytes != index->data_offset;
    return 0;
}

/* After all bytes went by. */
static void header_check_end(struct verifier *verifier)
{
    if (verifier->index->codec != CKPT_CODEC_ZSTD) {
        verify_header(verifier);
    } else if (verifier->header_bad) {
        finding(verifier, verifier->path, "%s: header: does not say what the index says",
                verifier->path);
    }
}

static int verify_part_bytes(struct verifier *verifier)
{
    struct ckpt_load_result counts = {0};
    struct bl_errmsg why = {0};
    const struct ckpt_part_reader reader = {
        .io = verifier->store->io,
        .path = verifier->path,
        .index = verifier->index,
        .window = verify_window,
        .bad_chunk = verify_bad_chunk,
        .arg = verifier,
        .cancel = verifier->job->cancel,
        .result = &counts,
    };
    int rc = header_make(verifier);

    if (rc < 0) {
        return rc;
    }
    verifier->extent = 0;
    memset(&verifier->state, 0, sizeof(verifier->state));
    verifier->chunks_bad = false;
    rc = ckpt_part_read(&reader, &why);
    ckpt_text_close(&verifier->header);
    verifier->result->bytes_read += counts.bytes_read;
    if (rc == BL_EABORTED || rc == -ENOMEM) {
        return bl_err(verifier->msg, rc, "%s", why.text);
    }
    if (rc < 0) {
        finding(verifier, verifier->path, "%s", why.text);
    } else if (!verifier->chunks_bad) {
        header_check_end(verifier);
        if (!bl_state_digest_equal(&verifier->state, &verifier->index->state)) {
            finding(verifier, verifier->path, "%s: state digest differs from its index's",
                    verifier->path);
        }
    }
    return 0;
}

/* One part: size, index, and with `full` its bytes. A good index's list goes into the manifest's
 * place. */
static int verify_part(struct verifier *verifier, const char *dir_path, enum ckpt_codec codec,
                       struct ckpt_part *part, struct bl_state_digest *sum)
{
    struct ckpt_index index = {0};
    struct bl_errmsg why = {0};
    char file[CKPT_PART_FILE_MAX];
    int rc = ckpt_part_index_load(verifier->store->io, dir_path, part->name, codec,
                                  &part->index_digest, &index, &why);

    if (rc == -ENOENT && ckpt_part_is_elsewhere(verifier->store, part)) {
        verifier->result->elsewhere++;
        return 0;
    }
    if (rc < 0) {
        ckpt_part_index_file(file, part->name, codec);
        finding(verifier, file, "%s", why.text);
    }
    rc = ckpt_part_size_check(verifier->store->io, dir_path, part->name, codec, part->bytes, &why);
    ckpt_part_file(file, part->name, codec);
    if (rc < 0) {
        finding(verifier, file, "%s", why.text);
    }
    if (index.data_offset == 0 || rc < 0) { /* no index, or no such file */
        ckpt_index_close(&index);
        return 0;
    }
    rc = 0;
    if (index.part_bytes != part->bytes || index.raw_bytes != part->raw_bytes) {
        finding(verifier, file, "%s/%s: index and manifest give different sizes", dir_path, file);
    } else if (verifier->job->full) {
        verifier->index = &index;
        rc = ckpt_path_join(verifier->path, dir_path, file, NULL, verifier->msg);
        rc = rc < 0 ? rc : verify_part_bytes(verifier);
    }
    bl_state_digest_merge(sum, &index.state);
    bl_extent_list_close(&part->held);
    part->held = index.held;
    memset(&index.held, 0, sizeof(index.held));
    ckpt_index_close(&index);
    return rc;
}

/* Whether parts and manifest tell the same: the manifest made again from the indexes is the same
 * text, nothing is missing, and the parts add up to the state's digest. */
static int verify_whole(struct verifier *verifier, const struct ckpt_opened *opened,
                        const struct bl_state_digest *sum)
{
    struct bl_errmsg why = {0};
    char *again = NULL;
    size_t bytes = 0;
    int rc = ckpt_manifest_encode(&opened->manifest, &again, &bytes, &why);

    if (rc == 0 && (bytes != opened->text_bytes || memcmp(again, opened->text, bytes) != 0)) {
        rc = bl_err(&why, BL_EFORMAT, "does not say what the parts' indexes say");
    }
    free(again);
    if (rc == 0) {
        rc = ckpt_manifest_complete(&opened->manifest, &why);
    }
    if (rc == 0 && verifier->result->elsewhere == 0 &&
        !bl_state_digest_equal(sum, &opened->manifest.state)) {
        rc = bl_err(&why, BL_EDIGEST, "the parts' state digest differs");
    }
    if (rc == -ENOMEM) {
        return bl_err(verifier->msg, rc, "%s", why.text);
    }
    if (rc < 0) {
        finding(verifier, CKPT_MANIFEST_FILE, "%s/%s/%s: %s", verifier->store->path, verifier->dir,
                CKPT_MANIFEST_FILE, why.text);
    }
    return 0;
}

int ckpt_verify(struct ckpt_store *store, const char *dir, const struct ckpt_verify_job *job,
                struct ckpt_verify_result *ret, struct bl_errmsg *msg)
{
    struct ckpt_verify_result result = {0};
    struct verifier verifier = {
        .store = store, .dir = dir, .job = job, .result = &result, .msg = msg};
    struct bl_state_digest sum = {{0, 0}};
    struct ckpt_opened opened = {0};
    struct bl_errmsg why = {0};
    char path[CKPT_PATH_MAX];
    int rc = ckpt_path_join(path, store->path, dir, NULL, msg);

    if (rc < 0) {
        return rc;
    }
    rc = ckpt_opened_manifest(store, dir, &opened, &why);
    if (rc == -ENOMEM) {
        return bl_err(msg, rc, "%s", why.text);
    }
    if (rc < 0) {
        finding(&verifier, CKPT_MANIFEST_FILE, "%s", why.text);
        *ret = result;
        return 0;
    }
    for (uint32_t i = 0; i < opened.manifest.part_count; i++) {
        verifier.bytes_all += opened.manifest.parts[i].raw_bytes;
    }
    for (uint32_t i = 0; rc == 0 && i < opened.manifest.part_count; i++) {
        rc = verify_part(&verifier, path, opened.codec, &opened.manifest.parts[i], &sum);
        result.parts++;
        result.tensors += opened.manifest.parts[i].held.tensor_count;
    }
    if (rc == 0 && result.findings == 0) {
        rc = verify_whole(&verifier, &opened, &sum);
    }
    ckpt_opened_close(&opened);
    if (rc < 0) {
        return rc;
    }
    *ret = result;
    return 0;
}
