/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device that is none: the CPU back end behind the rules of one, to find where the trainer breaks
 * them without a GPU. Its memory is not mapped for the host but within calls, so a touch from
 * outside is a SIGSEGV; downloads arrive at the next sync, publishes when they are waited for, and
 * what was uploaded from must be unchanged at the next sync. Storage is fp32: the bits of a run are
 * those of the CPU.
 */
#ifndef TESTS_TRAINER_FAKE_DEVICE_H
#define TESTS_TRAINER_FAKE_DEVICE_H

#include <stdint.h>

#include "kernels/backend.h"

/* On the caller's thread. *ret is owned (ops->close). -ENOMEM. */
BL_MUST_CHECK int fake_device_open(struct kern **ret, uint64_t arena_bytes, struct bl_errmsg *msg);

/* Bytes given out, and the most that ever were. */
uint64_t fake_device_used(const struct kern *k);
uint64_t fake_device_used_max(const struct kern *k);

#endif
