/* SPDX-License-Identifier: Apache-2.0 */
/* A part's reader from inside: what part_read.c and part_decode.c have in common. */
#ifndef BL_CKPT_PART_READ_H
#define BL_CKPT_PART_READ_H

#include <stdbool.h>

#include "ckpt/part.h"

/* Opens the part's file, with O_DIRECT where that works; its size must be the index's. */
BL_MUST_CHECK int ckpt_part_read_open(const struct ckpt_part_reader *reader, int *ret_fd,
                                      bool *ret_direct, struct bl_errmsg *msg);

/* ckpt_part_read for codec zstd. Memory: the io's queue, and per thread 3 chunks and zstd's, about
 * 4 MiB. */
BL_MUST_CHECK int ckpt_part_read_zstd(const struct ckpt_part_reader *reader, struct bl_errmsg *msg);

#endif
