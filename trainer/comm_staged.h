/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine that needs nothing but the back end and the host's connections: what is moved goes
 * through the host's memory.
 *
 *     device --download--> staging --comm (host)--> staging --upload--> device
 *
 * Every call waits for the back end, so it is slow; sums are the ordered ones, and the bits are
 * those of any exact engine. It serves a plug-in that has no engine of its own, and tests.
 */
#ifndef TRAIN_TRAINER_COMM_STAGED_H
#define TRAIN_TRAINER_COMM_STAGED_H

#include "trainer/comm_engine.h"

/* Takes COMM_ENGINE_SCRATCH_BYTES of the back end's memory at open, and of the host's what the
 * largest call moves. */
const struct comm_engine_ops *comm_staged_ops(void);

#endif
