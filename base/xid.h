/* SPDX-License-Identifier: Apache-2.0 */
/*
 * XIDs: the error reports of NVIDIA's driver, and what Belay is to do about each. Nothing acts on
 * this table yet: the daemon does not watch for XIDs. Most meanings were written down without
 * NVIDIA's catalog at hand and have to be compared with it before anything relies on them ("Xid
 * Errors", https://docs.nvidia.com/deploy/xid-errors/). The choice of action is Belay's own:
 *
 *     catalog                        action
 *     nothing, informational         log
 *     restart the application        respawn: the rank is killed, and started again on its GPU
 *     reset the GPU or the machine   out: the rank is killed and the GPU is used no more, until
 *                                    it was seen to and the daemon is started again
 */
#ifndef BL_BASE_XID_H
#define BL_BASE_XID_H

#include <stdint.h>

enum bl_xid_action { BL_XID_LOG, BL_XID_RESPAWN, BL_XID_OUT };

/* X(number, action, what it is), ascending. */
/* clang-format off */
#define BL_XIDS(X)                                                                                 \
    X(8, BL_XID_RESPAWN, "the GPU stopped processing")                                             \
    X(13, BL_XID_RESPAWN, "exception of an engine: usually an address out of range in a kernel")   \
    X(31, BL_XID_RESPAWN, "page fault: usually an illegal address in a kernel")                    \
    X(32, BL_XID_RESPAWN, "invalid or corrupted command stream")                                   \
    X(43, BL_XID_RESPAWN, "a process's channel was reset after an error of its own")               \
    X(45, BL_XID_LOG, "channels of a process that ended, or was killed, were torn down")           \
    X(48, BL_XID_OUT, "uncorrectable memory error")                                                \
    X(61, BL_XID_OUT, "breakpoint or warning of the power controller")                             \
    X(62, BL_XID_OUT, "the power controller halted")                                               \
    X(63, BL_XID_LOG, "a memory row or page will be replaced at the next reset")                   \
    X(64, BL_XID_OUT, "a bad memory row or page could not be replaced")                            \
    X(69, BL_XID_RESPAWN, "exception of a graphics class")                                         \
    X(74, BL_XID_OUT, "NVLink error")                                                              \
    X(79, BL_XID_OUT, "the GPU has fallen off the bus")                                            \
    X(92, BL_XID_LOG, "high rate of corrected memory errors")                                      \
    X(94, BL_XID_RESPAWN, "uncorrectable memory error, contained to one process")                  \
    X(95, BL_XID_OUT, "uncorrectable memory error, not contained")                                 \
    X(109, BL_XID_OUT, "a context switch took too long")                                           \
    X(119, BL_XID_OUT, "the GPU's system processor does not answer")                               \
    X(120, BL_XID_OUT, "error of the GPU's system processor")                                      \
    X(140, BL_XID_OUT, "memory error that was not recovered from")                                 \
    X(143, BL_XID_OUT, "the GPU could not be initialised")                                         \
    X(154, BL_XID_LOG, "the driver changed what it recommends to do with the GPU")
/* clang-format on */

struct bl_xid {
    uint32_t number;
    enum bl_xid_action action;
    const char *text;
};

/* Row `index` of the table; NULL behind its end. */
const struct bl_xid *bl_xid_at(uint32_t index);

/* The row of an XID. One that the table does not have is told and nothing is done about it: most
 * are for information, and a rank that it hurt ends or hangs, which is seen anyway. Never NULL. */
const struct bl_xid *bl_xid_find(uint32_t number);

/* "log", "respawn", "out". */
const char *bl_xid_action_name(enum bl_xid_action action);

#endif
