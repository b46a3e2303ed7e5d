/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The checkpoint engine's library: save parts into an attempt, commit it, find what is there, load
 * any layout from it, verify, retain. docs/format.md says what lies on disk.
 *
 * One save of a shared root, over the engines of all nodes:
 *
 *     every engine   ckpt_store_open, ckpt_attempt_begin, ckpt_save_part -> ckpt_part_result
 *     one engine     ckpt_commit(all parts)             the rename in it is the commit
 *                    ckpt_sweep, ckpt_verify, ckpt_retain
 *
 * Loading: ckpt_scan -> ckpt_scan_newest -> ckpt_load with the extents one wants.
 *
 * Threads: a store belongs to one thread at a time; several stores on one root, in one process or
 * in many on many nodes, are what it is made for. Nothing here logs.
 */
#ifndef BL_CKPT_CKPT_H
#define BL_CKPT_CKPT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/digest.h"
#include "base/error.h"
#include "base/extent.h"
#include "ckpt/manifest.h"

struct ckpt_io;    /* ckpt/ckpt_io.h: all file operations, faults for tests */
struct ckpt_store; /* a root, opened */

#define CKPT_DIR_MAX     96 /* bytes of a checkpoint's directory name, with the NUL */
#define CKPT_WHY_MAX     256
#define CKPT_ENTRIES_MAX 65536 /* directories looked at in a root */

/* ---- Opening a root ---- */

struct ckpt_store_config {
    const char *path;       /* of the root; absolute or not; borrowed for the call */
    const char *run;        /* the run's id; NULL takes whatever run is there and only reads */
    const char *node;       /* name of this node; needed for writing */
    bool create;            /* make root and BELAY file when missing */
    bool shared;            /* every node sees this directory */
    bool apart;             /* writing: it is `node`'s own, and checkpoints lie on several nodes */
    uint64_t reserve_bytes; /* kept for the commit record; 0: none (readers) */
    struct ckpt_io *io;     /* borrowed for the store's life; NULL: the real one */
};

/* Opens `path`. BL_EFOREIGN names the run (or, with apart, the node) that is there and the way out;
 * -ENOENT when there is no root and create is false; BL_EVERSION for a newer format. *ret is owned:
 * ckpt_store_close. */
BL_MUST_CHECK int ckpt_store_open(struct ckpt_store **ret, const struct ckpt_store_config *config,
                                  struct bl_errmsg *msg);
void ckpt_store_close(struct ckpt_store *store);

/* The run that the root belongs to; view of the store. */
const char *ckpt_store_run(const struct ckpt_store *store);
const char *ckpt_store_path(const struct ckpt_store *store);
/* The node that has this root for itself, or "": then a checkpoint is there whole, or broken. */
const char *ckpt_store_owner(const struct ckpt_store *store);
/* What is wrong with the BELAY file of a root that was opened for reading all the same, or "". */
const char *ckpt_store_damage(const struct ckpt_store *store);

/* ---- Saving ---- */

/* One try at saving one step. The leader draws the nonce; all engines of the save get the same. */
struct ckpt_attempt {
    uint64_t step, generation;
    uint32_t attempt; /* counts from 1 */
    uint64_t nonce;
};

/* Makes the attempt's directory, durably; another engine may have made it already. */
BL_MUST_CHECK int ckpt_attempt_begin(struct ckpt_store *store, const struct ckpt_attempt *attempt,
                                     struct bl_errmsg *msg);

/* Where the data of a list of extents comes from. It lies in memory: element i of an extent at
 * base + offset + i * bytes. Or, when base is NULL, it is pulled: `fetch` puts elements [lo, hi) of
 * extents[extent], counted from the extent's own start in its flat order, to `dest`. It is asked in
 * the part's file order, ascending, each element once, by the thread that called; its negative
 * returns end the save. */
struct ckpt_source {
    const struct bl_extent_list *list; /* borrowed for the call */
    const void *base;                  /* borrowed; must not change during the call */
    int (*fetch)(void *arg, uint32_t extent, uint64_t lo, uint64_t hi, void *dest,
                 struct bl_errmsg *msg); /* NULL unless base is */
    void *arg;                           /* fetch's */
};

/* Sorts a list's extents into file order (wide types first, then name, box, range): the order in
 * which a part holds them and `fetch` is asked. BL_EFORMAT for an extent of no tensor. */
BL_MUST_CHECK int ckpt_part_sort(struct bl_extent_list *list);

struct ckpt_part_job {
    const char *name;                  /* "part-0003"; one writer only */
    const struct ckpt_source *sources; /* an extent that several hold is written once */
    uint32_t source_count;
    const char *codec;                    /* NULL or "none"; "zstd"; "auto": zstd as it pays */
    const struct bl_state_digest *expect; /* NULL, or what the written extents must add up to */
    const atomic_int *cancel;             /* NULL, or BL_EABORTED soon after it is non-zero */
};

enum ckpt_io_path { CKPT_IO_PWRITE, CKPT_IO_URING }; /* how the bytes went */

struct ckpt_part_result {
    char name[CKPT_PART_NAME_MAX];
    uint64_t bytes, raw_bytes; /* of the part's file; the same with codec none */
    uint64_t index_digest;
    struct bl_state_digest state; /* of the extents written */
    uint32_t extent_count;
    enum ckpt_io_path path;
    bool direct;     /* O_DIRECT */
    bool registered; /* buffers registered with the ring */
    bool recycled;   /* the file came out of .trash */
    bool allocated;  /* its space was allocated before the first write */
    char note[128];  /* why a slower path was taken, or "" */
    uint64_t elapsed_us;
};

/* Writes and fsyncs `name`.safetensors and its index, or `name`.safetensors.zst, into the attempt's
 * directory, and the directory. Errors name path and bytes; what it wrote is removed again where
 * that is possible. A digest that is not `expect`: BL_EDIGEST, nothing left. Memory: the io's queue
 * (32 MiB), with a codec 6 MiB more for each of the io's codec_threads. */
BL_MUST_CHECK int ckpt_save_part(struct ckpt_store *store, const struct ckpt_attempt *attempt,
                                 const struct ckpt_part_job *job, struct ckpt_part_result *ret,
                                 struct bl_errmsg *msg);

struct ckpt_commit_result {
    char dir[CKPT_DIR_MAX];   /* name in the root */
    uint64_t manifest_digest; /* of the one that stands: of two commits at once, one's */
    bool already;             /* the step was there, complete, before: nothing changed */
    bool hint_written;        /* `latest` could be updated */
    bool reserve_used;        /* the disk was full; the reserve made it possible */
};

/* Commits: reads every part's index (its size and digest must be what `manifest->parts` says, and
 * all parts together must hold every element and add up to manifest->state), writes the manifest
 * and renames the attempt to its final name. The caller fills `manifest` but for parts[].held,
 * saved_unix_s (when 0) and writer (when ""), which are filled here. Idempotent. After an error the
 * attempt is still there: repeat, or ckpt_attempt_drop. */
BL_MUST_CHECK int ckpt_commit(struct ckpt_store *store, const struct ckpt_attempt *attempt,
                              struct ckpt_manifest *manifest, struct ckpt_commit_result *ret,
                              struct bl_errmsg *msg);

/* ---- Saving to roots that each node has for itself (config.apart) ----
 *
 *     every node     ckpt_attempt_begin, ckpt_save_part
 *     one node       ckpt_compose              reads all parts' indexes, writes the manifest
 *     every node     ckpt_prepare              takes the manifest
 *     the leader     records its digest: the commit
 *     every node     ckpt_publish              the final name
 */

/* Writes the manifest into this node's attempt, durably, made when it is missing. As ckpt_commit,
 * but that nothing is renamed; the store's io must show the other nodes' parts. *ret_digest is the
 * manifest's. Repeating it may give another digest (the time is in it). */
BL_MUST_CHECK int ckpt_compose(struct ckpt_store *store, const struct ckpt_attempt *attempt,
                               struct ckpt_manifest *manifest, uint64_t *ret_digest,
                               struct bl_errmsg *msg);

/* Takes the manifest of that digest from where `from` shows it (under the attempt's path in this
 * root), checks this node's own parts against it, and writes it into the attempt, durably. It being
 * there is fine. BL_EDIGEST: another manifest came. */
BL_MUST_CHECK int ckpt_prepare(struct ckpt_store *store, const struct ckpt_attempt *attempt,
                               struct ckpt_io *from, uint64_t manifest_digest,
                               struct bl_errmsg *msg);

/* Gives a prepared attempt its final name, durably. Idempotent. -ENOENT when neither is there. */
BL_MUST_CHECK int ckpt_publish(struct ckpt_store *store, const struct ckpt_attempt *attempt,
                               uint64_t manifest_digest, struct ckpt_commit_result *ret,
                               struct bl_errmsg *msg);

/* Moves an attempt that will not be committed to .trash; not being there is fine. */
BL_MUST_CHECK int ckpt_attempt_drop(struct ckpt_store *store, const struct ckpt_attempt *attempt,
                                    struct bl_errmsg *msg);

/* ---- Finding ---- */

enum ckpt_state {
    CKPT_GOOD = 1, /* committed; manifest, parts, sizes and indexes check out */
    CKPT_BROKEN,   /* has a committed name, but something is wrong: why */
    CKPT_FOREIGN,  /* of another run */
    CKPT_FORWARD,  /* an attempt with a valid manifest and all parts, of a crashed commit */
    CKPT_LEFTOVER, /* an attempt without; being written, or dead */
    CKPT_PARTIAL,  /* committed; in a node's own root: manifest and the parts that are here check
                      out, other nodes have the others */
    CKPT_PREPARED  /* the same of an attempt: whether it is committed only the leader knows */
};

#define CKPT_HERE_WORDS (CKPT_PARTS_MAX / 64)

struct ckpt_entry {
    char dir[CKPT_DIR_MAX];
    enum ckpt_state state;
    uint64_t step, generation;
    uint64_t line, samples, bytes, saved_unix_s; /* but of BROKEN, LEFTOVER; bytes: of parts here */
    uint32_t part_count, parts_here, world;
    uint64_t nonce;                 /* of an attempt */
    uint64_t here[CKPT_HERE_WORDS]; /* bit i: part i is here */
    char lacks[CKPT_NODE_MAX];      /* the node that has the first part that is not here, or "" */
    struct ckpt_layout layout;      /* at saving; the world is in it too */
    char codec[CKPT_CODEC_MAX];     /* "none", "zstd" */
    double loss;
    struct bl_state_digest digest;
    uint64_t manifest_digest, function_id;
    uint64_t verified_unix_s; /* when it was last read back whole and found right; 0: never */
    bool unread; /* of BROKEN: the disk failed, or the host; nothing is known of the checkpoint */
    char why[CKPT_WHY_MAX];
};

struct ckpt_scan {
    struct ckpt_entry *entries; /* owned; newest first: by step, then generation */
    uint32_t count;
};

/* A plan that ended a line: states of a generation before `generation` count up to `step` only. */
struct ckpt_cut {
    uint64_t generation, step;
};

/* Looks at every checkpoint and attempt, and checks all but the parts' bytes themselves. A store
 * opened for writing finishes FORWARD ones and they come back GOOD. */
BL_MUST_CHECK int ckpt_scan(struct ckpt_store *store, struct ckpt_scan *ret, struct bl_errmsg *msg);
void ckpt_scan_close(struct ckpt_scan *scan);

/* The newest entry that is good, and whole here, that `cuts` (may be NULL) admits; NULL when there
 * is none. View of scan. */
const struct ckpt_entry *ckpt_scan_newest(const struct ckpt_scan *scan, const struct ckpt_cut *cuts,
                                          uint32_t cut_count);

/* Reads a checkpoint's manifest with the parts' indexes checked (offsets filled).
 * ckpt_manifest_close. */
BL_MUST_CHECK int ckpt_manifest_load(struct ckpt_store *store, const char *dir,
                                     struct ckpt_manifest *ret, struct bl_errmsg *msg);

/* ---- Loading ---- */

struct ckpt_dest {
    const struct bl_extent_list *list; /* wanted; borrowed for the call */
    void *base; /* element i of an extent goes to base + offset + i * bytes */
};

struct ckpt_load_result {
    uint64_t bytes_read, bytes_wanted; /* from disk / into destinations */
    uint64_t healed;                   /* chunks and whole files that came from another copy */
    enum ckpt_io_path path;
    bool direct, registered;
    uint64_t elapsed_us;
};

/* Fills every destination, reading each needed chunk once and checking its digest on the way.
 * Destinations are undefined after an error. BL_ENOSTATE names a tensor that is not there whole;
 * BL_EDIGEST names file, chunk and tensor; -errno names the path. */
BL_MUST_CHECK int ckpt_load(struct ckpt_store *store, const char *dir,
                            const struct ckpt_dest *dests, uint32_t dest_count,
                            struct ckpt_load_result *ret, struct bl_errmsg *msg);

/* ---- Verifying, keeping, cleaning ---- */

struct ckpt_verify_job {
    bool full; /* read every byte; else all but the parts' bytes */
    void (*finding)(void *arg, const char *file, const char *text);       /* NULL: only counted */
    void (*progress)(void *arg, uint64_t bytes_done, uint64_t bytes_all); /* NULL, or per 4 MiB */
    void *arg;
    const atomic_int *cancel; /* NULL, or BL_EABORTED soon after it is non-zero */
};

struct ckpt_verify_result {
    uint64_t findings;
    uint64_t bytes_read;
    uint32_t parts, tensors;
    uint32_t elsewhere; /* of the parts, on other nodes: not looked at */
};

/* Checks one checkpoint, going on after findings. 0: looked at all of it (see findings); else it
 * could not look: -errno. The first finding is also in msg. */
BL_MUST_CHECK int ckpt_verify(struct ckpt_store *store, const char *dir,
                              const struct ckpt_verify_job *job, struct ckpt_verify_result *ret,
                              struct bl_errmsg *msg);

struct ckpt_retain_result {
    uint32_t kept, removed;
};

/* Records in the checkpoint's directory that every byte of it was read back and is right, now.
 * `manifest_digest` is of the manifest that was read. Errors leave the checkpoint as it is. */
BL_MUST_CHECK int ckpt_verified_mark(struct ckpt_store *store, const char *dir,
                                     uint64_t manifest_digest, struct bl_errmsg *msg);

/* Takes that back, as far as it can: the bytes were found wrong. */
void ckpt_verified_clear(struct ckpt_store *store, const char *dir);

/* Keeps the `keep` newest good checkpoints that `cuts` admit, at least two; older good ones go to
 * .trash (their files are recycled by later saves). Takes the caller's word that those which stay
 * were read back; ckpt/retain.h has all the rules, and looks for that itself. Broken ones are left
 * for a person, but for those older than every kept one that were read and found broken. */
BL_MUST_CHECK int ckpt_retain(struct ckpt_store *store, uint32_t keep, const struct ckpt_cut *cuts,
                              uint32_t cut_count, struct ckpt_retain_result *ret,
                              struct bl_errmsg *msg);

/* Moves attempts to .trash that nobody needs once step `step` is committed in `generation`: those
 * up to both (a save of a later step may be under way). Then empties .trash but for the files that
 * the next save can recycle. */
BL_MUST_CHECK int ckpt_sweep(struct ckpt_store *store, uint64_t generation, uint64_t step,
                             struct bl_errmsg *msg);

#endif
