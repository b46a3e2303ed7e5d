/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the crash tests do over and over: save as an engine does, and look at what is left as a run
 * does that resumes.
 */
#ifndef BL_TESTS_CRASH_SCENE_H
#define BL_TESTS_CRASH_SCENE_H

#include <stdbool.h>
#include <stdint.h>

#include "tests/ckpt/sample.h"

#define SCENE_KEEP 2u /* checkpoints that retention keeps */

/* `io`, or the real one for NULL, made to take one transfer buffer only: to zero the memory of more
 * would be most of what these small saves do. */
struct ckpt_io *scene_io(struct ckpt_io *io);

/* Saves step `step` of the sample and commits it; reads it back and marks it verified; retires what
 * is older than the two newest; empties the trash but for what can be recycled. *ret_committed
 * (may be NULL): the commit was acknowledged, whatever came after it. */
int scene_save(const char *root, struct ckpt_io *io, uint64_t step, uint32_t attempt,
               bool *ret_committed, struct bl_errmsg *msg);
/* What of it comes after the commit, for the step in checkpoint `dir`. */
int scene_tidy(struct ckpt_store *store, const char *dir, struct bl_errmsg *msg);

/* The newest checkpoint's step (0: there is none): every byte of it was read, compared with its
 * digests, loaded in another layout and compared with the truth. `what` begins the message with
 * which the test fails when anything under a committed name is broken. */
uint64_t scene_newest(const char *root, const char *what);
/* The same without an end to the test: is step `step` there, and whole? */
bool scene_is_whole(struct ckpt_store *store, const struct ckpt_scan *scan, uint64_t step);

/* Takes the codec to save with from argv[1] ("none" without it). False, with a sentence on standard
 * error, when it is not built: the test is skipped then. */
bool scene_has_codec(int argc, char **argv);

/* Attempts in the root, and directories in .trash. */
uint32_t scene_attempts(const char *root);
uint32_t scene_trash(const char *root);

#endif
