/* SPDX-License-Identifier: Apache-2.0 */
/*
 * TensorBoard's event files: scalars by step, so that `tensorboard --logdir DIR` draws a run.
 *
 * A file is a row of records: u64 length, u32 check of the length, the bytes, u32 check of the
 * bytes; a check is CRC-32C, rotated right by 15 bits, plus 0xa282ead8. The bytes are a protobuf
 * message Event (https://github.com/tensorflow/tensorboard, tensorboard/compat/proto/event.proto
 * and summary.proto): wall_time 1, step 2, file_version 3, summary 5, session_log 7. A file begins
 * with the version "brain.Event:2" and, at its first step, with a session that starts: of steps
 * that were done again after a recovery TensorBoard then shows the later ones.
 */
#ifndef TRAINER_TB_EVENTS_H
#define TRAINER_TB_EVENTS_H

#include <stdint.h>

#include "base/error.h"

struct tb_events;

struct tb_scalar {
    const char *tag; /* "train/loss"; at most 63 bytes */
    double value;    /* stored as fp32 */
};
#define TB_SCALARS_MAX 8

/* Begins a file of its own in `dir`, which is made when it is missing (not its parents). -errno
 * names the path. *ret is owned. */
BL_MUST_CHECK int tb_events_open(struct tb_events **ret, const char *dir, struct bl_errmsg *msg);
void tb_events_close(struct tb_events *events); /* NULL is fine */

/* Appends one event with these scalars (at most TB_SCALARS_MAX) in one write. A full disk loses it:
 * training goes on. One thread at a time. */
void tb_events_write(struct tb_events *events, uint64_t step, const struct tb_scalar *scalars,
                     uint32_t count);

/* CRC-32C (Castagnoli, reflected 0x82f63b78) of the bytes. */
uint32_t tb_crc32c(const void *data, size_t bytes);

#endif
