/* SPDX-License-Identifier: Apache-2.0 */
/* Which checkpoints a root has. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/failpoint.h"
#include "base/log.h"
#include "engine/engine.h"

/* "0123456789abcdef" as a number; 0 for the id of somebody else's run. */
static uint64_t run_number(const char *text)
{
    char again[20];
    uint64_t run = 0;

    if (sscanf(text, "%16" SCNx64, &run) != 1) {
        return 0;
    }
    snprintf(again, sizeof(again), "%016" PRIx64, run);
    return strcmp(again, text) == 0 ? run : 0;
}

/* Whose root is it, when it is not ours? */
static void foreign_run(const struct wire_engine_root *root, struct wire_engine_scanned *answer)
{
    const struct ckpt_store_config config = {.path = root->path};
    struct ckpt_store *store = NULL;

    if (ckpt_store_open(&store, &config, NULL) == 0) {
        snprintf(answer->run_text, sizeof(answer->run_text), "%s", ckpt_store_run(store));
        answer->run = run_number(answer->run_text);
        ckpt_store_close(store);
    }
}

static int fill_checkpoint(struct ckpt_store *store, const struct ckpt_entry *entry, bool with_job,
                           struct wire_engine_checkpoint *ret, struct bl_errmsg *msg)
{
    struct ckpt_manifest manifest = {0};
    int rc;

    *ret = (struct wire_engine_checkpoint){
        .step = entry->step,
        .generation = entry->generation,
        .line = entry->line,
        .digest = entry->digest,
        .manifest_digest = entry->manifest_digest,
        .bytes = entry->bytes,
        .saved_unix_s = entry->saved_unix_s,
        .function_id = entry->function_id,
    };
    snprintf(ret->dir, sizeof(ret->dir), "%s", entry->dir);
    snprintf(ret->lacks, sizeof(ret->lacks), "%s", entry->lacks);
    ret->attempt = entry->state == CKPT_PREPARED ? entry->nonce : 0;
    ret->part_count = entry->part_count;
    ret->verified = entry->verified_unix_s > 0;
    ret->parts = calloc(entry->parts_here + 1u, sizeof(*ret->parts));
    if (ret->parts == NULL) {
        return bl_err_code(msg, -ENOMEM, "scan");
    }
    for (uint32_t i = 0; i < entry->part_count; i++) {
        if ((entry->here[i / 64] >> i % 64 & 1) != 0) {
            ret->parts[ret->parts_here++] = i;
        }
    }
    if (!with_job) {
        return 0;
    }
    rc = ckpt_manifest_load(store, entry->dir, &manifest, msg);
    if (rc == 0) {
        ret->job_json = manifest.job;
        manifest.job = NULL;
        ckpt_manifest_close(&manifest);
    } else {
        free(ret->parts);
        ret->parts = NULL;
    }
    return rc;
}

/* Tells of one that would have been the newest. */
static void pass_over(const struct wire_engine_scan *message, const struct ckpt_entry *entry,
                      struct wire_engine_scanned *answer)
{
    struct wire_engine_passed *passed = &answer->passed[answer->passed_count];

    if (answer->checkpoint_count > 0 || answer->passed_count == WIRE_CHECKPOINT_MAX) {
        return;
    }
    answer->passed_count++;
    snprintf(passed->dir, sizeof(passed->dir), "%s", entry->dir);
    snprintf(passed->text, sizeof(passed->text), "%s",
             engine_text_without(entry->why, message->root.path));
}

#define SCAN_TRIES 5 /* while the newest is retired under our eyes */

/* Was it retired since the root was listed? Then there is a newer one, which the list lacks. */
static bool is_gone(const struct wire_engine_scan *message, const char *dir)
{
    char path[CKPT_PATH_MAX];

    return ckpt_path_join(path, message->root.path, dir, NULL, NULL) == 0 &&
           access(path, F_OK) != 0 && errno == ENOENT;
}

/* -ESTALE: once more. */
static int scan(const struct wire_engine_scan *message, struct ckpt_store *store,
                struct wire_engine_scanned *answer, struct bl_errmsg *msg)
{
    struct ckpt_scan found = {0};
    int rc = ckpt_scan(store, &found, msg);

    if (rc < 0) {
        return rc;
    }
    snprintf(answer->run_text, sizeof(answer->run_text), "%s", ckpt_store_run(store));
    answer->run = run_number(answer->run_text);
    answer->checkpoints = calloc(found.count + 1u, sizeof(*answer->checkpoints));
    answer->passed = calloc(found.count + 1u, sizeof(*answer->passed));
    rc = answer->checkpoints == NULL || answer->passed == NULL ? bl_err_code(msg, -ENOMEM, "scan")
                                                               : BL_FAILPOINT("scan-listed");
    for (uint32_t i = 0; rc == 0 && i < found.count; i++) {
        const struct ckpt_entry *entry = &found.entries[i];

        if (entry->state == CKPT_BROKEN || entry->state == CKPT_FOREIGN) {
            bl_log(BL_LOG_WARN, "engine", "%s/%s is passed over: %s", message->root.path,
                   entry->dir, entry->why);
            pass_over(message, entry, answer);
        }
        bool is_wanted =
            entry->state == CKPT_GOOD ||
            (message->own && (entry->state == CKPT_PARTIAL || entry->state == CKPT_PREPARED));

        if (!is_wanted || answer->checkpoint_count >= WIRE_CHECKPOINT_MAX) {
            continue;
        }
        rc = fill_checkpoint(store, entry, answer->checkpoint_count == 0,
                             &answer->checkpoints[answer->checkpoint_count], msg);
        answer->checkpoint_count += rc == 0;
        rc = rc < 0 && rc != -ENOMEM && is_gone(message, entry->dir) ? -ESTALE : rc;
    }
    ckpt_scan_close(&found);
    return rc;
}

void engine_scan(struct engine *engine, struct engine_task *task)
{
    const struct wire_engine_scan *message = task->message;
    struct wire_engine_scanned answer = {.request = message->request};
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};

    answer.rc = engine_root_open(&store, &message->root, &why);
    if (answer.rc == 0) {
        answer.rc = -ESTALE;
        for (int i = 0; answer.rc == -ESTALE && i < SCAN_TRIES; i++) {
            wire_engine_scanned_free(&answer); /* of the try before */
            answer = (struct wire_engine_scanned){.request = message->request};
            answer.rc = scan(message, store, &answer, &why);
        }
    } else if (answer.rc == BL_EFOREIGN) {
        foreign_run(&message->root, &answer);
    }
    ckpt_store_close(store);
    engine_text(answer.text, answer.rc, &why);
    engine_answer(engine, WIRE_TYPE_ENGINE_SCANNED, &answer);
}
