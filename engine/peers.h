/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files of checkpoints that lie on other nodes, where each node has its own root. A struct ckpt_io
 * that reads a path here if it is here, and else asks the peers' daemons for it by (root,
 * directory, file); ranges only, nothing is copied. The library checks the digests of what comes as
 * of anything else. What is written goes to this node.
 *
 * Belongs to one worker at a time.
 */
#ifndef ENGINE_PEERS_H
#define ENGINE_PEERS_H

#include "ckpt/ckpt_io.h"
#include "wire/engine_msg.h"
#include "wire/sock.h"

#define ENGINE_PEER_FILES 64u /* open at a time */

struct engine_peer_file {
    bool open;
    uint32_t peer;
    uint64_t bytes;
    struct wire_bulk_file question; /* root, dir and file of it */
};

struct engine_peer_root {
    char path[CKPT_PATH_MAX]; /* here */
    uint32_t index;           /* in the job's roots */
};

struct engine_peers {
    struct ckpt_io io; /* for stores */
    struct ckpt_io_ops ops;
    const struct wire_engine_peers *from; /* borrowed */
    uint64_t run;
    struct wire_sock *socks; /* owned; by peer, fd -1: not connected */
    bool *away;              /* owned; could not be reached: not asked again */
    struct engine_peer_root roots[WIRE_JOB_ROOTS + 1];
    uint32_t root_count;
    struct engine_peer_file files[ENGINE_PEER_FILES];
};

/* `from` is borrowed until engine_peers_close; without peers it reads here only. -ENOMEM. */
BL_MUST_CHECK int engine_peers_init(struct engine_peers *peers,
                                    const struct wire_engine_peers *from, uint64_t run,
                                    struct bl_errmsg *msg);
/* Paths below this root may lie on the peers. */
void engine_peers_root(struct engine_peers *peers, const struct wire_engine_root *root);
/* Zeroed peers are fine. */
void engine_peers_close(struct engine_peers *peers);

#endif
