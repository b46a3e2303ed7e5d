/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A part: one file of a checkpoint, written by one node. Without a codec it is a plain safetensors
 * file, its header padded so that the data begins 4096-aligned:
 *
 *     0        8                8 + n = data_offset (a multiple of 4096)         part_bytes
 *     | u64 n  | JSON + spaces  | extent 0 | extent 1 | ...                      |
 *     |<-------- chunk 0 (1 MiB of the file) -------->|<----- chunk 1 ----->|<-->|
 *
 * With codec zstd that file, its large floats as byte planes, is what `zstd -d` gives; see codec.h
 * for chunks and index.h for places. The index is in the file then, behind the frames.
 *
 *     | frame 0 | frame 1 | ...        | skippable: index | skippable: seek table |
 *
 * A whole tensor keeps its name as key. A part of one has the key "name@LO-HI" (a flat range of the
 * whole tensor), "name@[lo:hi,lo:hi]" (a box) or "name@[lo:hi,lo:hi]@LO-HI" (a flat range of a
 * box).
 */
#ifndef BL_CKPT_PART_H
#define BL_CKPT_PART_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/extent.h"
#include "ckpt/ckpt.h"
#include "ckpt/ckpt_io.h"
#include "ckpt/index.h"
#include "ckpt/text.h"

#define CKPT_KEY_MAX          512u
#define CKPT_KEY_TAIL         "@tail" /* behind a key: what its chunks of planes leave over */
#define CKPT_HEADER_BYTES_MAX (100u * 1000 * 1000) /* what the safetensors package reads */
#define CKPT_PART_SUFFIX      ".safetensors"       /* codec none, the index beside it */
#define CKPT_PART_ZSTD_SUFFIX ".safetensors.zst"   /* codec zstd, the index inside */
#define CKPT_INDEX_SUFFIX     ".index"
#define CKPT_PART_FILE_MAX    (CKPT_PART_NAME_MAX + 24) /* bytes of a file's name, with the NUL */

/* The codec that a job or a manifest names: NULL, "" and "none"; "zstd" and "auto". BL_ENOTBUILT
 * for others. */
BL_MUST_CHECK int ckpt_codec_parse(const char *name, enum ckpt_codec *ret, struct bl_errmsg *msg);

/* File names of part `name`: of its data, and of the file that holds its index. */
void ckpt_part_file(char ret[CKPT_PART_FILE_MAX], const char *name, enum ckpt_codec codec);
void ckpt_part_index_file(char ret[CKPT_PART_FILE_MAX], const char *name, enum ckpt_codec codec);
/* Is it the name of a part's data file, of any codec? */
bool ckpt_part_file_is(const char *file);

/* Is the box the whole tensor? Does the extent fill its box? */
bool ckpt_extent_is_whole_box(const struct bl_extent *extent, const struct bl_tensor *tensor);
uint64_t ckpt_extent_box_elems(const struct bl_extent *extent, const struct bl_tensor *tensor);

/* Writes the extent's key into `ret`. */
void ckpt_part_key(char ret[CKPT_KEY_MAX], const struct bl_extent *extent,
                   const struct bl_tensor *tensor);

/* Can the name stand in a key? Printable ASCII without space, quote, backslash and '@'. */
bool ckpt_name_is_plain(const char *name);

/* ---- The end of a part of codec zstd: its index as a skippable frame, and the seek table ---- */

#define CKPT_TAIL_PROBE_BYTES 17u /* of the file's end tell where the tail begins */

/* The bytes of the tail, from the index's frame to the end of the file. */
uint64_t ckpt_part_tail_bytes(const struct ckpt_index *index);
/* The tail, owned (free()), and the digest of the index in it. part_bytes must be right. */
BL_MUST_CHECK int ckpt_part_tail_encode(const struct ckpt_index *index, uint8_t **ret_data,
                                        size_t *ret_bytes, uint64_t *ret_digest,
                                        struct bl_errmsg *msg);
/* From the last CKPT_TAIL_PROBE_BYTES of a file: how long its tail is, bounded by file and index.
 */
BL_MUST_CHECK int ckpt_part_tail_find(const uint8_t *last, uint64_t file_bytes, uint64_t *ret_bytes,
                                      struct bl_errmsg *msg);
/* Reads a tail of a file of file_bytes: the index's digest must be `expect` unless that is NULL,
 * and every byte must be what the index makes it. ckpt_index_close. */
BL_MUST_CHECK int ckpt_part_tail_decode(struct ckpt_index *ret, const uint8_t *data, size_t bytes,
                                        uint64_t file_bytes, const uint64_t *expect,
                                        struct bl_errmsg *msg);

/* Order of extents in files: name, box, flat range. Negative, 0, positive. */
int ckpt_extent_order(const struct bl_extent *a, const struct bl_tensor *a_tensor,
                      const struct bl_extent *b, const struct bl_tensor *b_tensor);

/* The header of a part that holds these extents in this order, length field and padding included;
 * with codec zstd in chunks of chunk_bytes. Sets each extent's offset in raw part space, and
 * *ret_raw_bytes, its end. Text is the caller's to close. */
BL_MUST_CHECK int ckpt_part_header(struct bl_extent_list *held, enum ckpt_codec codec,
                                   uint32_t chunk_bytes, struct ckpt_text *ret,
                                   uint64_t *ret_raw_bytes, struct bl_errmsg *msg);

/* One entry of a safetensors header. */
struct ckpt_st_entry {
    char key[CKPT_KEY_MAX];
    enum bl_dtype dtype;
    uint32_t dims;
    uint64_t shape[BL_TENSOR_DIMS_MAX];
    uint64_t begin, end; /* bytes, from the start of the data */
};

/* Reads the header of any safetensors file of file_bytes, whose first header_bytes are `data`,
 * calling `entry` for each tensor in file order. Checks lengths against the file first, dtype,
 * shape times size against the range, each range inside the file; a negative return of `entry` ends
 * it. */
BL_MUST_CHECK int ckpt_st_header_decode(const uint8_t *data, size_t header_bytes,
                                        uint64_t file_bytes,
                                        int (*entry)(void *arg, const struct ckpt_st_entry *entry),
                                        void *arg, struct bl_errmsg *msg);

/* The length of the whole header (8 + n) from the first 8 bytes, checked against the file. */
BL_MUST_CHECK int ckpt_st_header_bytes(const uint8_t first[8], uint64_t file_bytes,
                                       uint64_t *ret_bytes, struct bl_errmsg *msg);

/* Reads and decodes the index of part `name` in directory `dir` (a path). Its digest must be
 * `expect` unless that is NULL. ckpt_index_close. */
BL_MUST_CHECK int ckpt_part_index_load(struct ckpt_io *io, const char *dir, const char *name,
                                       enum ckpt_codec codec, const uint64_t *expect,
                                       struct ckpt_index *ret, struct bl_errmsg *msg);

/* Writes a part and its index into directory `dir`; a file of `trash` (NULL: none) is recycled. */
BL_MUST_CHECK int ckpt_part_write(struct ckpt_io *io, const char *dir, const char *trash,
                                  const struct ckpt_part_job *job, struct ckpt_part_result *ret,
                                  struct bl_errmsg *msg);

/* A range of a part's file, verified: bytes [offset, offset + bytes) lie at data. Negative ends. */
typedef int ckpt_part_window_fn(void *arg, uint64_t offset, const uint8_t *data, uint32_t bytes,
                                struct bl_errmsg *msg);

/* How a part is read: whole windows of chunks, those that `wanted` says (NULL: all). */
struct ckpt_part_reader {
    struct ckpt_io *io;
    const char *path; /* of the part's file, for errors and opening */
    const struct ckpt_index *index;
    bool (*wanted)(void *arg, uint64_t lo, uint64_t hi); /* asked in ascending order */
    ckpt_part_window_fn *window;                         /* in ascending order */
    /* NULL: BL_EDIGEST (BL_EFORMAT when a frame with a good digest cannot be decoded). Else it is
     * told and may let it pass: with codec none the window holds the chunk as it is, with zstd
     * there is no window of it. */
    int (*bad_chunk)(void *arg, uint32_t chunk, const char *why, struct bl_errmsg *msg);
    void *arg;
    const atomic_int *cancel;        /* may be NULL */
    struct ckpt_load_result *result; /* counts are added */
};
BL_MUST_CHECK int ckpt_part_read(const struct ckpt_part_reader *reader, struct bl_errmsg *msg);

#endif
