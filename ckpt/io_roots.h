/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Several roots seen as one: what the first does not have is looked for under the same name in the
 * others. So the parts of a checkpoint that lies on several nodes, each with a root of its own, are
 * read as if they lay together. For reading only.
 */
#ifndef BL_CKPT_IO_ROOTS_H
#define BL_CKPT_IO_ROOTS_H

#include "base/error.h"
#include "ckpt/ckpt_io.h"

struct ckpt_io_roots {
    struct ckpt_io io; /* give &roots.io to a store on roots[0] */
    struct ckpt_io_ops ops;
    const char **roots; /* borrowed; paths without a slash at the end */
    uint32_t count;
};

/* Prepares `roots` (the caller's memory) over the real one. `paths` is borrowed for its life. Any
 * number of stores in one thread. */
void ckpt_io_roots_init(struct ckpt_io_roots *roots, const char **paths, uint32_t count);

#endif
