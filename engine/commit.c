/* SPDX-License-Identifier: Apache-2.0 */
/* The commit of all parts of a save. What follows it (sweep, reading back, retention) is the
 * verifier's work. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "engine/engine.h"
#include "engine/peers.h"

/* A name and how often it was said; how many parts hold the tensor. */
struct unchanged {
    const char *name;
    uint32_t said, held;
};

static int unchanged_order(const void *a_, const void *b_)
{
    const struct unchanged *a = a_, *b = b_;

    return strcmp(a->name, b->name);
}

/* Keeps those names that every part which holds the tensor has said; sorted. */
static uint32_t unchanged_everywhere(struct unchanged *list, uint32_t count,
                                     const struct ckpt_manifest *manifest)
{
    uint32_t distinct = 0, kept = 0;

    qsort(list, count, sizeof(*list), unchanged_order);
    for (uint32_t i = 0; i < count; i++) {
        if (distinct > 0 && strcmp(list[distinct - 1].name, list[i].name) == 0) {
            list[distinct - 1].said++;
        } else {
            list[distinct++] = list[i];
        }
    }
    for (uint32_t p = 0; p < manifest->part_count; p++) {
        const struct bl_extent_list *held = &manifest->parts[p].held;

        for (uint32_t t = 0; t < held->tensor_count; t++) {
            const struct unchanged key = {.name = held->tensors[t].name};
            struct unchanged *found = bsearch(&key, list, distinct, sizeof(*list), unchanged_order);

            if (found != NULL) {
                found->held++;
            }
        }
    }
    for (uint32_t i = 0; i < distinct; i++) {
        if (list[i].said == list[i].held) {
            list[kept++] = list[i];
        }
    }
    return kept;
}

/* Says which tensors have the bytes of the save before, or "". */
static void warn_unchanged(char ret[WIRE_REASON_MAX], const struct engine_names *names,
                           const struct ckpt_manifest *manifest)
{
    struct unchanged *list = calloc(names->count + 1u, sizeof(*list));
    uint32_t count = 0;
    size_t at;

    ret[0] = '\0';
    for (uint32_t i = 0; list != NULL && i < names->count; i++) {
        list[i] = (struct unchanged){.name = names->names[i], .said = 1};
    }
    if (list != NULL && names->count > 0) {
        count = unchanged_everywhere(list, names->count, manifest);
    }
    if (count > 0) {
        at = (size_t)snprintf(ret, WIRE_REASON_MAX,
                              "%u tensors that should change hold the very bytes of the save "
                              "before:",
                              count);
        for (uint32_t i = 0; i < count && i < 3; i++) {
            at += (size_t)snprintf(ret + at, WIRE_REASON_MAX - at, " %.100s", list[i].name);
        }
        snprintf(ret + at, WIRE_REASON_MAX - at, "%s", count > 3 ? " ..." : "");
    }
    free(list);
}

/* The whole commit, or with COMPOSE the manifest only. */
static int commit(const struct wire_engine_commit *message, struct ckpt_store *store,
                  struct ckpt_commit_result *result, char warning[WIRE_REASON_MAX],
                  struct bl_errmsg *msg)
{
    const struct ckpt_attempt attempt = engine_attempt_of(&message->attempt);
    struct ckpt_manifest manifest = {
        .generation = attempt.generation, .line = message->attempt.line, .step = attempt.step};
    struct engine_names unchanged = {0};
    struct engine_part_said said = {.unchanged = &unchanged};
    int rc = 0;

    snprintf(manifest.run, sizeof(manifest.run), "%s", ckpt_store_run(store));
    manifest.parts = calloc(message->part_count + 1u, sizeof(*manifest.parts));
    if (manifest.parts == NULL) {
        rc = bl_err_code(msg, -ENOMEM, "commit");
    }
    for (uint32_t i = 0; rc == 0 && i < message->part_count; i++) {
        rc = engine_part_parse(&manifest.parts[i], &said, message->parts[i].part_json, msg);
        if (rc == 0 && i > 0 && strcmp(said.codec, manifest.codec) != 0) {
            rc = bl_err(msg, BL_EPROTO, "%s has codec %s, others %s", manifest.parts[i].name,
                        said.codec, manifest.codec);
        }
        snprintf(manifest.codec, sizeof(manifest.codec), "%s", said.codec);
        manifest.part_count = i + (rc == 0);
    }
    rc = rc < 0 ? rc : engine_manifest_fill(&manifest, message->manifest_json, msg);
    if (rc == 0 && message->stage == WIRE_ENGINE_COMPOSE) {
        rc = ckpt_compose(store, &attempt, &manifest, &result->manifest_digest, msg);
    } else if (rc == 0) {
        rc = ckpt_commit(store, &attempt, &manifest, result, msg);
    }
    if (rc == 0) {
        warn_unchanged(warning, &unchanged, &manifest);
    }
    engine_names_close(&unchanged);
    ckpt_manifest_close(&manifest);
    return rc;
}

static void log_committed(const struct wire_engine_commit *message,
                          const struct wire_engine_committed *answer,
                          const struct ckpt_commit_result *result)
{
    unsigned long long step = (unsigned long long)message->attempt.step;

    if (answer->rc < 0) {
        bl_log(BL_LOG_WARN, "engine", "commit: %s", answer->text);
        return;
    }
    if (message->stage == WIRE_ENGINE_COMPOSE || message->stage == WIRE_ENGINE_PREPARE) {
        bl_log(BL_LOG_INFO, "engine", "step %llu: has its manifest", step);
        return;
    }
    bl_log(BL_LOG_INFO, "engine", "step %llu: committed as %s%s%s", step, result->dir,
           result->already ? " (it was there)" : "",
           result->reserve_used ? ", with the reserve of a full disk" : "");
    if (!result->hint_written) {
        bl_log(BL_LOG_WARN, "engine",
               "step %llu: %s/latest could not be written; it is a hint only", step,
               message->root.path);
    }
    if (answer->warning[0] != '\0') {
        bl_log(BL_LOG_WARN, "engine", "step %llu: %s", step, answer->warning);
    }
}

/* Carries the message's stage out. */
static int commit_stage(const struct wire_engine_commit *message, struct ckpt_commit_result *result,
                        char warning[WIRE_REASON_MAX], struct bl_errmsg *msg)
{
    const struct ckpt_attempt attempt = engine_attempt_of(&message->attempt);
    bool is_composed = message->stage == WIRE_ENGINE_COMPOSE;
    struct ckpt_store *store = NULL;
    struct engine_peers *peers = calloc(1, sizeof(*peers));
    int rc = peers == NULL ? bl_err_code(msg, -ENOMEM, "commit")
                           : engine_peers_init(peers, &message->peers, message->root.run, msg);

    if (rc == 0) {
        engine_peers_root(peers, &message->root);
        rc = is_composed ? engine_root_open_io(&store, &peers->io, &message->root, msg)
                         : engine_root_open(&store, &message->root, msg);
    }
    if (rc == 0 && message->stage == WIRE_ENGINE_PREPARE) {
        result->manifest_digest = message->manifest_digest;
        rc = ckpt_prepare(store, &attempt, &peers->io, message->manifest_digest, msg);
    } else if (rc == 0 && message->stage == WIRE_ENGINE_PUBLISH) {
        rc = ckpt_publish(store, &attempt, message->manifest_digest, result, msg);
    } else if (rc == 0) {
        rc = commit(message, store, result, warning, msg);
    }
    ckpt_store_close(store);
    if (peers != NULL) {
        engine_peers_close(peers);
    }
    free(peers);
    return rc;
}

void engine_commit(struct engine *engine, struct engine_task *task)
{
    const struct wire_engine_commit *message = task->message;
    struct wire_engine_committed answer = {.attempt = message->attempt.attempt};
    struct ckpt_commit_result result = {0};
    struct bl_errmsg why = {0};

    if (message->stage == WIRE_ENGINE_RETAIN) {
        engine_verifier_push(engine->verifier, message, message->final_dir,
                             message->manifest_digest);
        return;
    }
    answer.rc = commit_stage(message, &result, answer.warning, &why);
    answer.manifest_digest = result.manifest_digest;
    snprintf(answer.dir, sizeof(answer.dir), "%s", result.dir);
    engine_text(answer.text, answer.rc, &why);
    log_committed(message, &answer, &result);
    engine_answer(engine, WIRE_TYPE_ENGINE_COMMITTED, &answer);
    if (answer.rc == 0 &&
        (message->stage == WIRE_ENGINE_WHOLE || message->stage == WIRE_ENGINE_PUBLISH)) {
        engine_verifier_push(engine->verifier, message, result.dir, result.manifest_digest);
    }
}
