/* SPDX-License-Identifier: Apache-2.0 */
/* Inside of repairs: the checkpoint at hand, its copies, one part of it. */
#ifndef BL_CKPT_REPAIR_INTERNAL_H
#define BL_CKPT_REPAIR_INTERNAL_H

#include "ckpt/part.h"
#include "ckpt/repair.h"
#include "ckpt/store.h"

#define REPAIR_DIR    ".repair-%s.tmp" /* in the root: parts that are written again */
#define REPAIR_SUFFIX ".repair"        /* of a file that will be renamed into place */
#define REPAIR_NAME   "-r"             /* and a number: of a part that replaces another */

struct repair {
    const struct ckpt_repair_job *job;
    struct ckpt_repair_result *result;
    struct ckpt_io *io;
    char path[CKPT_PATH_MAX];       /* of the checkpoint */
    struct ckpt_opened opened;      /* its manifest; indexes not loaded */
    struct ckpt_opened *copies;     /* owned; manifests of the copies, zeroed for those without */
    enum ckpt_codec codec;          /* of the checkpoint */
    bool manifest_changed;          /* a part has other bytes than it had, and another name */
    uint64_t bytes_done, bytes_all; /* of reading the parts */
};

/* Tells of something that was repaired, or could not be. */
void repair_told(struct repair *repair, const char *file, bool done, const char *fmt, ...)
    BL_PRINTF(4, 5);

/* Writes a whole file beside its place and renames it there; nothing in a dry run. */
BL_MUST_CHECK int repair_put_file(struct repair *repair, const char *name, const void *data,
                                  size_t bytes, struct bl_errmsg *msg);

/* How many bytes of a part's name are its own, without what says that it replaces another. */
size_t repair_name_base(const char *name);

/* Writes the checkpoint's manifest as it is in memory; nothing in a dry run. */
BL_MUST_CHECK int repair_put_manifest(struct repair *repair, struct bl_errmsg *msg);

/* Is copy `c` cut so that one of its parts is byte for byte part `p`? Its file's (or, with `index`,
 * its index file's) path into `path`. */
bool repair_same_part(const struct repair *repair, uint32_t c, uint32_t p, bool index, char *path);

/* Writes part `p` again from the elements that the copies, and what is good here, hold. With
 * *ret_unreadable an error means that they do not give it, else that it cannot be written. */
BL_MUST_CHECK int repair_rebuild(struct repair *repair, uint32_t p, bool *ret_unreadable,
                                 struct bl_errmsg *msg);

/* Looks at part `p` and repairs what is wrong with it. Negative only when it cannot go on at all.
 */
BL_MUST_CHECK int repair_part(struct repair *repair, uint32_t p, struct bl_errmsg *msg);

#endif
