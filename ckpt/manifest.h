/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The manifest of a checkpoint: what it is a checkpoint of, which parts it has, and which extents
 * of which tensors lie in which part. Its text is JSON with a digest of its own in the last line;
 * docs/format.md is the exact specification. One valid manifest proves a checkpoint, because it is
 * written only when every part is durable.
 */
#ifndef BL_CKPT_MANIFEST_H
#define BL_CKPT_MANIFEST_H

#include <stddef.h>
#include <stdint.h>

#include "base/digest.h"
#include "base/error.h"
#include "base/extent.h"

#define CKPT_FORMAT_VERSION     1
#define CKPT_RUN_MAX            64 /* bytes of a run id, with the NUL */
#define CKPT_NODE_MAX           64
#define CKPT_PART_NAME_MAX      64 /* "part-0003", with the NUL */
#define CKPT_CODEC_MAX          16
#define CKPT_PARTS_MAX          4096
#define CKPT_TENSORS_MAX        1000000
#define CKPT_EXTENTS_MAX        4000000
#define CKPT_JOB_BYTES_MAX      (1024 * 1024)
#define CKPT_MANIFEST_BYTES_MAX (256u * 1024 * 1024)

struct ckpt_layout {
    uint32_t world, dp, tp, pp, zero; /* at saving; loading needs none of it */
};

/* For ckpt_commit, as saved_unix_s: the time is to stay unknown (0 would be filled in). */
#define CKPT_SAVED_UNKNOWN UINT64_MAX

struct ckpt_metrics {
    double loss;           /* training loss of the step; NaN: not known */
    uint64_t tokens;       /* consumed up to and including the step */
    uint64_t saved_unix_s; /* wall clock at the commit, for people; 0: not known */
};

struct ckpt_part {
    char name[CKPT_PART_NAME_MAX]; /* file name without its suffixes */
    char node[CKPT_NODE_MAX];      /* who wrote it */
    uint64_t bytes;                /* of the part's file, as stored */
    uint64_t raw_bytes;            /* the same without a codec */
    uint64_t index_digest;         /* XXH3 of the whole index */
    struct bl_extent_list held;    /* owned; offsets are 0 until the index is read */
};

struct ckpt_manifest {
    char run[CKPT_RUN_MAX];
    uint64_t generation, line, step;
    uint64_t function_id; /* bl_job_function_digest and the trainer's own part */
    uint64_t samples;     /* consumed before the next step */
    uint64_t seed;
    uint32_t lanes;
    char codec[CKPT_CODEC_MAX]; /* "none" or "zstd"; a commit takes "" and "auto" too */
    struct ckpt_layout layout;
    struct ckpt_metrics metrics;
    struct bl_state_digest state; /* of the whole state */
    char *job;                    /* owned: the frozen job, one JSON object; NULL is "{}" */
    char writer[32];              /* version of the program that wrote it */
    struct ckpt_part *parts;      /* owned */
    uint32_t part_count;
};

/* Frees what it owns and zeroes it; NULL and zeroed manifests are fine. */
void ckpt_manifest_close(struct ckpt_manifest *manifest);

/* The text of a manifest, owned by the caller (free()); deterministic: equal manifests give equal
 * bytes. BL_EFORMAT when a field cannot be written (a bad run id, a job that is no object). */
BL_MUST_CHECK int ckpt_manifest_encode(const struct ckpt_manifest *manifest, char **ret_text,
                                       size_t *ret_bytes, struct bl_errmsg *msg);

/* Reads a text back. Strict: digest first (BL_EDIGEST), then version (BL_EVERSION), then every
 * field once, no unknown field, every extent inside its tensor (BL_EFORMAT), all counts bounded
 * before memory is taken (BL_ELIMIT). On error *ret is closed. `text` need not end in a NUL. */
BL_MUST_CHECK int ckpt_manifest_decode(struct ckpt_manifest *ret, const char *text, size_t bytes,
                                       struct bl_errmsg *msg);

/* Digest of the text that ends a manifest, as COMMITTED records name it. */
BL_MUST_CHECK int ckpt_manifest_digest(const char *text, size_t bytes, uint64_t *ret_digest,
                                       struct bl_errmsg *msg);

/* Every element of every tensor is held by some part? BL_ENOSTATE names the first that is not. */
BL_MUST_CHECK int ckpt_manifest_complete(const struct ckpt_manifest *manifest,
                                         struct bl_errmsg *msg);

#endif
