/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A large training state for measurements, made of a small one that was really trained: the tensors
 * of a checkpoint are repeated under other names until there is enough, each copy turned by another
 * distance, so that neither a compressor's window nor a file's blocks see the same bytes again.
 */
#ifndef BL_TESTS_BENCH_STATE_H
#define BL_TESTS_BENCH_STATE_H

#include <stdint.h>

#include "base/error.h"
#include "base/extent.h"

struct bench_state {
    struct bl_extent_list list; /* owned; whole tensors, each extent once */
    uint8_t *data;              /* owned: bl_mem_free with `bytes`; huge pages where there are */
    uint64_t bytes;
    struct bl_state_digest digest; /* of the whole state */
};

/* Reads the newest good checkpoint of root `from` and repeats it to at least `bytes_min` (at most
 * 64 GiB). Every page is touched. BL_ENOSTATE when there is no checkpoint. */
BL_MUST_CHECK int bench_state_init(struct bench_state *state, const char *from, uint64_t bytes_min,
                                   struct bl_errmsg *msg);
void bench_state_close(struct bench_state *state);

#endif
