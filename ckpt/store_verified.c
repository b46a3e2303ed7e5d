/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The file `verified` in a checkpoint's directory: when it was read back whole. A help for
 * retention and for people, never proof: who needs proof reads the bytes. It names the digest of
 * the manifest, so that it says nothing about another checkpoint under the same name, and carries
 * its own, so that a damaged one says nothing at all.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/digest.h"
#include "ckpt/store.h"
#include "ckpt/text.h"

static int verified_encode(struct ckpt_text *text, uint64_t manifest_digest, uint64_t unix_s)
{
    ckpt_text_printf(text, "{\"belay_verified\":%d,\n\"manifest\":\"%016" PRIx64 "\",\n",
                     CKPT_FORMAT_VERSION, manifest_digest);
    ckpt_text_printf(text, "\"unix_s\":%" PRIu64 ",\n", unix_s);
    if (!text->failed) {
        ckpt_text_printf(text, "\"digest\":\"%016" PRIx64 "\"}\n",
                         bl_xxh3(text->data, text->bytes));
    }
    return text->failed ? -ENOMEM : 0;
}

int ckpt_verified_mark(struct ckpt_store *store, const char *dir, uint64_t manifest_digest,
                       struct bl_errmsg *msg)
{
    char path[CKPT_PATH_MAX], temp[CKPT_PATH_MAX], final[CKPT_PATH_MAX];
    struct ckpt_text text = {0};
    int rc = ckpt_store_writable(store, msg);

    rc = rc < 0 ? rc : ckpt_path_join(path, store->path, dir, NULL, msg);
    rc = rc < 0 ? rc : ckpt_path_join(temp, path, CKPT_VERIFIED_TEMP_FILE, NULL, msg);
    rc = rc < 0 ? rc : ckpt_path_join(final, path, CKPT_VERIFIED_FILE, NULL, msg);
    if (rc < 0) {
        return rc;
    }
    rc = verified_encode(&text, manifest_digest, (uint64_t)time(NULL));
    rc = rc < 0 ? bl_err_code(msg, rc, "%s", final) : 0;
    if (rc == 0) {
        BL_IGNORE(store->io->ops->unlink(store->io, temp), "of a crash; the next line tells");
        rc = ckpt_io_write_file(store->io, temp, text.data, text.bytes, msg);
    }
    if (rc == 0) {
        rc = ckpt_io_rename(store->io, temp, final, msg);
        rc = rc < 0 ? rc : ckpt_io_fsync_path(store->io, path, msg);
    }
    ckpt_text_close(&text);
    return rc;
}

void ckpt_verified_clear(struct ckpt_store *store, const char *dir)
{
    char path[CKPT_PATH_MAX];

    if (store->writable && ckpt_path_join(path, store->path, dir, CKPT_VERIFIED_FILE, NULL) == 0) {
        BL_IGNORE(store->io->ops->unlink(store->io, path), "there may be none");
    }
}

static int verified_decode(const char *text, size_t bytes, uint64_t manifest_digest,
                           uint64_t *ret_unix_s)
{
    struct ckpt_json reader;
    uint64_t digest = 0;

    if (ckpt_manifest_digest(text, bytes, &digest, NULL) < 0) {
        return BL_EDIGEST;
    }
    ckpt_json_init(&reader, text, bytes);
    ckpt_json_want(&reader, '{');
    ckpt_json_key(&reader, "belay_verified");
    if (ckpt_json_u64(&reader) != CKPT_FORMAT_VERSION) {
        ckpt_json_fail(&reader, BL_EVERSION, "of another version");
    }
    ckpt_json_want(&reader, ',');
    ckpt_json_key(&reader, "manifest");
    if (ckpt_json_hex(&reader, 16) != manifest_digest) {
        ckpt_json_fail(&reader, BL_EDIGEST, "of another manifest");
    }
    ckpt_json_want(&reader, ',');
    ckpt_json_key(&reader, "unix_s");
    *ret_unix_s = ckpt_json_u64(&reader);
    return ckpt_json_error(&reader, NULL);
}

uint64_t ckpt_verified_read(struct ckpt_store *store, const char *dir, uint64_t manifest_digest)
{
    char path[CKPT_PATH_MAX];
    char *text = NULL;
    size_t bytes = 0;
    uint64_t unix_s = 0;

    if (ckpt_path_join(path, store->path, dir, CKPT_VERIFIED_FILE, NULL) < 0 ||
        ckpt_io_read_file(store->io, path, CKPT_ROOT_FILE_MAX, &text, &bytes, NULL) < 0) {
        return 0;
    }
    if (verified_decode(text, bytes, manifest_digest, &unix_s) < 0) {
        unix_s = 0;
    }
    free(text);
    return unix_s;
}
