/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small made-up training state for the tests of the checkpoint library: some tensors of several
 * dtypes whose every element is a function of (tensor, element, step), cut in several ways.
 */
#ifndef BL_TESTS_CKPT_SAMPLE_H
#define BL_TESTS_CKPT_SAMPLE_H

#include <stdint.h>

#include "base/extent.h"
#include "ckpt/ckpt.h"
#include "ckpt/ckpt_io.h"

/* The call, which may use `msg`, must return 0; else the cmocka test fails with its text. */
#define OK(call)                                                                                   \
    do {                                                                                           \
        struct bl_errmsg msg_ = {0};                                                               \
        struct bl_errmsg *msg = &msg_;                                                             \
        int rc_ = (call);                                                                          \
        if (rc_ != 0) {                                                                            \
            fail_msg("%s: %d %s", #call, rc_, msg->text);                                          \
        }                                                                                          \
    } while (0)

#define SAMPLE_RUN "run-0123456789abcdef"

struct sample_shard {
    struct bl_extent_list list; /* owned */
    uint8_t *data;              /* owned; holds the list's extents */
    uint64_t bytes;
};

enum sample_cut {
    SAMPLE_FLAT, /* each tensor in `world` flat ranges */
    SAMPLE_ROWS, /* boxes of rows; tensors with fewer rows than ranks go to rank 0 */
    SAMPLE_COLS  /* boxes of columns of matrices, flat ranges of the rest */
};

/* Scales the big tensors: 1 is about 80 KB of state, 100 about 8 MB; 0: all of it in some 200
 * bytes. */
extern uint32_t sample_scale;
/* Of the parts that are saved: "none" unless a test says "zstd". */
extern const char *sample_codec;

/* What rank `rank` of `world` holds; filled with the state after `step`, or with zeros. */
void sample_shard_init(struct sample_shard *shard, enum sample_cut cut, uint32_t world,
                       uint32_t rank, uint64_t step, bool filled);
void sample_shard_close(struct sample_shard *shard);
/* Every byte as the state after `step` has it? Fails the cmocka test if not. */
void sample_shard_check(const struct sample_shard *shard, uint64_t step);
bool sample_shard_is(const struct sample_shard *shard, uint64_t step);

struct bl_state_digest sample_digest(uint64_t step);

/* A fresh directory under $TMPDIR or /tmp (or `under`), path in ret (at least 256 bytes). */
void sample_dir_make(char *ret, const char *under);
void sample_dir_remove(const char *path);

/* Opens the root for writing. `io` may be NULL. */
int sample_open(struct ckpt_store **ret, const char *root, struct ckpt_io *io,
                struct bl_errmsg *msg);
/* Saves step `step`, cut over `world` ranks, two ranks a part, and commits it. */
int sample_save(struct ckpt_store *store, enum sample_cut cut, uint32_t world, uint64_t step,
                uint64_t generation, uint32_t attempt, struct bl_errmsg *msg);
/* The pieces of it. Part `part_index` holds ranks 2 * part_index and the next; fills what the
 * manifest says of it. */
int sample_save_part(struct ckpt_store *store, const struct ckpt_attempt *attempt,
                     enum sample_cut cut, uint32_t world, uint32_t part_index,
                     struct ckpt_part *part, struct bl_errmsg *msg);
/* All but what sample_save_part fills. ckpt_manifest_close. */
void sample_manifest_init(struct ckpt_manifest *manifest, const struct ckpt_attempt *attempt,
                          uint32_t world);
/* Loads `dir` as `world` ranks would and checks every byte. Fails the test if anything differs. */
void sample_load_check(struct ckpt_store *store, const char *dir, enum sample_cut cut,
                       uint32_t world, uint64_t step);
int sample_load(struct ckpt_store *store, const char *dir, enum sample_cut cut, uint32_t world,
                uint64_t step, struct bl_errmsg *msg);

#endif
