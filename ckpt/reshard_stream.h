/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of resharding: a thread that reads parts' elements ahead, in the order in which they will
 * be written, into two windows of bounded size.
 */
#ifndef BL_CKPT_RESHARD_STREAM_H
#define BL_CKPT_RESHARD_STREAM_H

#include "ckpt/reshard.h"

struct reshard_stream;

/* Begins to read the parts of the plan for which want[part] is set, in order. All is borrowed until
 * the end. -ENOMEM, -errno. */
BL_MUST_CHECK int reshard_stream_start(struct reshard_stream **ret,
                                       const struct ckpt_reshard_job *job, const bool *want,
                                       struct bl_errmsg *msg);

/* Elements [lo, hi) of an extent of part `part`, which must be what comes next, into dest. The
 * reader's error when it had one. */
BL_MUST_CHECK int reshard_stream_take(struct reshard_stream *stream, uint32_t part, uint32_t extent,
                                      uint64_t lo, uint64_t hi, void *dest, struct bl_errmsg *msg);

/* Stops the thread, wherever it is, and frees all. *ret_bytes_read (may be NULL): from the source.
 * NULL is fine. */
void reshard_stream_stop(struct reshard_stream *stream, uint64_t *ret_bytes_read);

#endif
