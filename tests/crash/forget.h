/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A disk that forgets what was not synced. The io works on a real directory and keeps beside it
 * what a disk would hold for sure: file contents as of their last fsync, directory entries as of
 * the directory's last fsync. At operation `at` the power goes: that operation and all later ones
 * fail. Then forget_materialise writes what is left to a new directory: for every block and every
 * entry that was not synced, `seed` decides whether the change survived (seed 0: none did).
 */
#ifndef BL_TESTS_CRASH_FORGET_H
#define BL_TESTS_CRASH_FORGET_H

#include <stdbool.h>
#include <stdint.h>

#include "ckpt/ckpt_io.h"

#define FORGET_NODES_MAX   4096
#define FORGET_ENTRIES_MAX 64

struct forget_entry {
    char name[160];
    uint64_t node; /* inode number */
};

struct forget_node { /* durable state of an inode */
    uint64_t number;
    bool is_dir;
    uint8_t *data; /* owned */
    uint64_t bytes;
    struct forget_entry *entries; /* owned; FORGET_ENTRIES_MAX */
    uint32_t entry_count;
};

struct forget {
    struct ckpt_io io; /* give &forget.io to the library */
    uint64_t at, count;
    bool dark; /* the power is off */
    struct forget_node nodes[FORGET_NODES_MAX];
    uint32_t node_count;
    uint64_t root; /* inode of the directory */
};

/* All that lies below `path` now counts as durable. */
void forget_init(struct forget *forget, const char *path, uint64_t at);
void forget_close(struct forget *forget);
/* Writes what is left of `path` to `to`, which must not exist. */
void forget_materialise(struct forget *forget, const char *path, const char *to, uint64_t seed);

#endif
