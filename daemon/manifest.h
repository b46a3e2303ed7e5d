/* SPDX-License-Identifier: Apache-2.0 */
/* What a checkpoint's manifest says beside its parts. */
#ifndef DAEMON_MANIFEST_H
#define DAEMON_MANIFEST_H

#include "daemon/daemon.h"

/* The JSON that goes to the engine with a commit: run, step, layout, seed, digest, frozen job; keys
 * as in docs/format.md. Owned (free()). */
char *manifest_json(const struct run *run, const struct core_commit *commit);

/* The loss that the ranks' pages name for `step`; NaN when none does. */
double manifest_loss(const struct run *run, uint64_t step);

#endif
