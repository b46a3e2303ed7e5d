/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of a root: names, the opened checkpoint, the trash. For the ckpt_*.c files that implement
 * ckpt.h; programs use ckpt.h.
 *
 *     ROOT/BELAY                                   which run this is
 *     ROOT/latest                                  a hint
 *     ROOT/NODE                                    which node has this root for itself
 *     ROOT/step-000000001200.g7/                   committed
 *     ROOT/.step-000000001300.g7.a1.NONCE.tmp/     an attempt
 *     ROOT/.trash/NAME.NONCE/                      retired; its part files are recycled
 *     ROOT/.reserve-NODE                           room for the commit record
 */
#ifndef BL_CKPT_STORE_H
#define BL_CKPT_STORE_H

#include "ckpt/ckpt.h"
#include "ckpt/ckpt_io.h"
#include "ckpt/index.h"

#define CKPT_ROOT_FILE          "BELAY"
#define CKPT_ROOT_FILE_MAX      4096u
#define CKPT_LATEST_FILE        "latest"
#define CKPT_OWNER_FILE         "NODE"
#define CKPT_TRASH_DIR          ".trash"
#define CKPT_MANIFEST_FILE      "manifest.json"
#define CKPT_VERIFIED_FILE      "verified"
#define CKPT_VERIFIED_TEMP_FILE "verified.tmp"
/* A part that another engine says is there may be seen late on a network file system: how long the
 * commit looks for it before it believes that the part is missing. */
#define CKPT_VISIBLE_MS 3000

struct ckpt_store {
    struct ckpt_io *io; /* keeps */
    char path[CKPT_PATH_MAX];
    char run[CKPT_RUN_MAX]; /* "": not known (damage) */
    char node[CKPT_NODE_MAX];
    char owner[CKPT_NODE_MAX]; /* "": every node sees this root, or there is but one */
    char damage[CKPT_WHY_MAX]; /* of the BELAY file; only in stores opened for reading */
    bool writable, shared, apart;
    uint64_t reserve_bytes;
};

/* Directory names. Parsing is exact: only what formatting gives is accepted. */
void ckpt_dir_name(char ret[CKPT_DIR_MAX], uint64_t step, uint64_t generation);
bool ckpt_dir_parse(const char *name, uint64_t *ret_step, uint64_t *ret_generation);
void ckpt_attempt_name(char ret[CKPT_DIR_MAX], const struct ckpt_attempt *attempt);
bool ckpt_attempt_parse(const char *name, struct ckpt_attempt *ret);

/* A random number for temporary names. */
uint64_t ckpt_nonce(void);

/* A checkpoint or attempt read whole but for the parts' bytes. */
struct ckpt_opened {
    enum ckpt_codec codec;         /* of its parts */
    struct ckpt_manifest manifest; /* parts[].held are its own, with offsets of 0: see indexes */
    uint64_t manifest_digest;
    struct ckpt_index *indexes; /* owned; one per part; zeroed for those that are elsewhere */
    uint64_t here[CKPT_HERE_WORDS];
    uint32_t parts_here;
    char *text; /* owned: the manifest's */
    size_t text_bytes;
};
void ckpt_opened_close(struct ckpt_opened *opened);

/* Reads manifest, part sizes and indexes of directory `dir` of the root and checks them against one
 * another. In a node's own root parts of other nodes may be missing. BL_EFOREIGN for another run.
 * Errors name file and what is wrong. */
BL_MUST_CHECK int ckpt_opened_load(struct ckpt_store *store, const char *dir,
                                   struct ckpt_opened *ret, struct bl_errmsg *msg);
/* Is this part another node's, so that it need not be here? */
bool ckpt_part_is_elsewhere(const struct ckpt_store *store, const struct ckpt_part *part);
/* Writes a manifest's text into the directory `path`, under a name of its own first; when the disk
 * is full, with the reserve given up. */
BL_MUST_CHECK int ckpt_manifest_write(struct ckpt_store *store, const char *path, const char *text,
                                      size_t bytes, bool *ret_reserve_used, struct bl_errmsg *msg);
/* Fills the manifest from the parts in directory `path` and checks that they are the whole state.
 */
BL_MUST_CHECK int ckpt_manifest_gather(struct ckpt_store *store, const char *path,
                                       struct ckpt_manifest *manifest, struct bl_errmsg *msg);
/* Writes ROOT/latest; false: it could not. */
bool ckpt_hint_write(struct ckpt_store *store, const char *dir);
/* Does the error tell of the disk or the host, and not of what is there? */
bool ckpt_error_is_of_disk(int rc);
/* Only the manifest. */
BL_MUST_CHECK int ckpt_opened_manifest(struct ckpt_store *store, const char *dir,
                                       struct ckpt_opened *ret, struct bl_errmsg *msg);
/* The size of a part's file is `bytes`? `path` is its directory. */
BL_MUST_CHECK int ckpt_part_size_check(struct ckpt_io *io, const char *path, const char *name,
                                       enum ckpt_codec codec, uint64_t bytes,
                                       struct bl_errmsg *msg);

/* Moves a directory of the root into .trash, durably; its not being there is fine. */
BL_MUST_CHECK int ckpt_trash_move(struct ckpt_store *store, const char *dir, struct bl_errmsg *msg);

/* Renames an attempt with a manifest to its final name, durably. When a good checkpoint of that
 * name and state is there already, the attempt goes to .trash and *ret_already is set; a broken one
 * there makes way. */
BL_MUST_CHECK int ckpt_finish_forward(struct ckpt_store *store, const char *attempt_dir,
                                      const struct ckpt_manifest *manifest, bool *ret_already,
                                      struct bl_errmsg *msg);

/* When a directory's checkpoint was last read back whole, as `verified` says; 0: not known. */
uint64_t ckpt_verified_read(struct ckpt_store *store, const char *dir, uint64_t manifest_digest);

/* BL_EFORMAT unless the store was opened with a run and a node. */
BL_MUST_CHECK int ckpt_store_writable(const struct ckpt_store *store, struct bl_errmsg *msg);

#endif
