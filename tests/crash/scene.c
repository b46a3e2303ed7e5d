/* SPDX-License-Identifier: Apache-2.0 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/retain.h"
#include "ckpt/store.h"
#include "tests/crash/scene.h"

struct ckpt_io *scene_io(struct ckpt_io *io)
{
    static struct ckpt_io plain;

    if (io == NULL) {
        io = &plain;
        *io = *ckpt_io_real();
    }
    io->queue_depth = 1;
    return io;
}

static int retain(struct ckpt_store *store, struct bl_errmsg *msg)
{
    const struct ckpt_keep keep = {.keep = SCENE_KEEP};
    struct ckpt_decision *decisions;
    struct ckpt_scan scan;
    int rc = ckpt_scan(store, &scan, msg);

    if (rc < 0) {
        return rc;
    }
    decisions = calloc(scan.count + 1, sizeof(*decisions));
    assert_non_null(decisions);
    rc = ckpt_retain_decide(decisions, scan.entries, scan.count, &keep, NULL, 0, msg);
    rc = rc < 0 ? rc : ckpt_retain_remove(store, scan.entries, decisions, scan.count, NULL, msg);
    free(decisions);
    ckpt_scan_close(&scan);
    return rc;
}

static int read_back(struct ckpt_store *store, const char *dir, struct bl_errmsg *msg)
{
    const struct ckpt_verify_job job = {.full = true};
    struct ckpt_verify_result verified;
    struct ckpt_opened opened = {0};
    int rc = ckpt_opened_manifest(store, dir, &opened, msg);
    uint64_t digest = opened.manifest_digest;

    ckpt_opened_close(&opened);
    rc = rc < 0 ? rc : ckpt_verify(store, dir, &job, &verified, msg);
    if (rc == 0 && verified.findings > 0) {
        return BL_EDIGEST;
    }
    return rc < 0 ? rc : ckpt_verified_mark(store, dir, digest, msg);
}

int scene_tidy(struct ckpt_store *store, const char *dir, struct bl_errmsg *msg)
{
    int rc = ckpt_sweep(store, 1, UINT64_MAX, msg);

    rc = rc < 0 ? rc : read_back(store, dir, msg);
    rc = rc < 0 ? rc : retain(store, msg);
    return rc < 0 ? rc : ckpt_sweep(store, 1, UINT64_MAX, msg);
}

int scene_save(const char *root, struct ckpt_io *io, uint64_t step, uint32_t attempt,
               bool *ret_committed, struct bl_errmsg *msg)
{
    struct ckpt_store *store = NULL;
    char dir[CKPT_DIR_MAX];
    int rc = sample_open(&store, root, scene_io(io), msg);

    ckpt_dir_name(dir, step, 1);
    rc = rc < 0 ? rc : sample_save(store, SAMPLE_FLAT, 4, step, 1, attempt, msg);
    if (ret_committed != NULL) {
        *ret_committed = rc == 0;
    }
    rc = rc < 0 ? rc : scene_tidy(store, dir, msg);
    ckpt_store_close(store);
    return rc;
}

bool scene_is_whole(struct ckpt_store *store, const struct ckpt_scan *scan, uint64_t step)
{
    const struct ckpt_verify_job job = {.full = true};
    struct ckpt_verify_result verified;

    for (uint32_t i = 0; i < scan->count; i++) {
        const struct ckpt_entry *entry = &scan->entries[i];

        if (entry->state == CKPT_GOOD && entry->step == step) {
            return ckpt_verify(store, entry->dir, &job, &verified, NULL) == 0 &&
                   verified.findings == 0 &&
                   sample_load(store, entry->dir, SAMPLE_ROWS, 3, step, NULL) == 0;
        }
    }
    return false;
}

uint64_t scene_newest(const char *root, const char *what)
{
    const struct ckpt_entry *newest;
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};
    struct ckpt_scan scan;
    uint64_t step;

    if (sample_open(&store, root, scene_io(NULL), &why) != 0 ||
        ckpt_scan(store, &scan, &why) != 0) {
        fail_msg("%s: %s", what, why.text);
    }
    for (uint32_t i = 0; i < scan.count; i++) {
        if (scan.entries[i].state == CKPT_BROKEN || scan.entries[i].state == CKPT_FOREIGN) {
            fail_msg("%s: %s: %s", what, scan.entries[i].dir, scan.entries[i].why);
        }
    }
    newest = ckpt_scan_newest(&scan, NULL, 0);
    step = newest == NULL ? 0 : newest->step;
    if (step != 0 && !scene_is_whole(store, &scan, step)) {
        fail_msg("%s: %s is not whole", what, newest->dir);
    }
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
    return step;
}

bool scene_has_codec(int argc, char **argv)
{
    struct bl_errmsg why = {0};
    char root[256];
    int rc;

    sample_codec = argc > 1 ? argv[1] : "none";
    sample_dir_make(root, NULL);
    rc = scene_save(root, NULL, 1, 1, NULL, &why);
    sample_dir_remove(root);
    if (rc < 0) {
        fprintf(stderr, "%s: codec %s: %s\n", rc == BL_ENOTBUILT ? "skipped" : "failed",
                sample_codec, why.text);
    }
    return rc != BL_ENOTBUILT;
}

static uint32_t count_names(const char *path, const char *prefix)
{
    DIR *dir = opendir(path);
    struct dirent *entry;
    uint32_t count = 0;

    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        count += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
                 strncmp(entry->d_name, prefix, strlen(prefix)) == 0;
    }
    if (dir != NULL) {
        closedir(dir);
    }
    return count;
}

uint32_t scene_attempts(const char *root)
{
    return count_names(root, ".step-");
}

uint32_t scene_trash(const char *root)
{
    char path[600];

    snprintf(path, sizeof(path), "%s/" CKPT_TRASH_DIR, root);
    return count_names(path, "");
}
