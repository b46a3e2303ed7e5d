/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where a rank computes: `backend: auto|cpu|cuda` of a job, resolved on the machine at hand.
 *
 *     cpu     threads of this process, fp32
 *     cuda    the plug-in belay_cuda.so, one GPU a rank, bf16 unless train.precision says fp32
 *     auto    cuda when the driver (libcuda.so.1) loads, the plug-in loads, and there is a device;
 *             else cpu
 *
 * The plug-in is looked for beside the executable, then in the library directory; BELAY_CUDA_PLUGIN
 * names another file (tests). BELAY_CUDA_ENGINE=staged moves what goes between ranks through the
 * host's memory (comm_staged.h), as with a plug-in that has no engine. What was chosen is part of
 * the function id, so the ranks of a run cannot choose differently.
 */
#ifndef TRAIN_TRAINER_BACKEND_H
#define TRAIN_TRAINER_BACKEND_H

#include <stdint.h>

#include "base/error.h"
#include "base/job.h"
#include "kernels/backend.h"
#include "kernels/cuda/plugin.h"
#include "trainer/comm_engine.h"

struct train_backend {
    const struct kern_plugin *plugin;     /* NULL: the CPU */
    const struct comm_engine_ops *engine; /* of the plug-in; NULL: comm_staged.h */
    enum kern_type type;
    uint32_t device;
    int claim;     /* fd by which other ranks see that the device is taken; 0: none */
    char why[256]; /* one line: what is used, and why not the other */
};

/* Chooses for the job, and takes a device of those that are visible: that of `local_rank`, this
 * process's among those of its machine, or the next that no other rank has taken (a rank that is
 * started again may get another number). BELAY_DEVICE in the environment names the device instead;
 * BELAY_CUDA_SHARED lets ranks share devices, for tests. May initialise the driver, so: after a
 * fork. BL_ECONFIG or BL_ENOTBUILT, with the reason, where `backend: cuda` cannot be, where no
 * device is left, and for a precision that the back end has not. `ret` is caller's memory, ended by
 * train_backend_close, which comes after the back end's own close. */
BL_MUST_CHECK int train_backend_choose(struct train_backend *ret, const struct bl_job *job,
                                       uint32_t local_rank, struct bl_errmsg *msg);

void train_backend_close(struct train_backend *backend); /* a zeroed one is fine */

/* Whether a job's ranks would compute on the CPU here, as far as can be told without a driver being
 * initialised (before a fork). */
int train_backend_is_cpu(const struct bl_job *job);

/* Opens it: the CPU on `pool`, a device with `arena_bytes` of its memory. *ret is owned. Errors of
 * kern_cpu_open and of the plug-in. */
BL_MUST_CHECK int train_backend_open(struct kern **ret, const struct train_backend *backend,
                                     struct kern_pool *pool, uint64_t arena_bytes,
                                     struct bl_errmsg *msg);

#endif
