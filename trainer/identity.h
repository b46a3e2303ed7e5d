/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who a trainer is, arithmetically. The function id is a digest of everything that the bits of a
 * run depend on: the job's own part (bl_job_function_digest), the contents of the data files, and
 * the build of kernels and BLAS with the core that it picked, on a device also the device, its
 * libraries and the storage type. The probe is what the kernels really compute here.
 */
#ifndef TRAINER_IDENTITY_H
#define TRAINER_IDENTITY_H

#include <stdint.h>

#include "base/error.h"
#include "trainer/step.h"

struct train_identity {
    uint64_t function_id;
    uint64_t job_digest, data_digest;
    uint64_t probe;
    const char *build; /* view of a static string */
};

/* Of an opened rank, whatever its place: reads all data files and runs the numeric probe. */
BL_MUST_CHECK int train_identity(struct train_rank *rank, struct train_identity *ret,
                                 struct bl_errmsg *msg);

#endif
