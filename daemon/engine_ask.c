/* SPDX-License-Identifier: Apache-2.0 */
/* Questions to the engines: write, cancel, commit, scan. (Loads: engine_load.c.) */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "daemon/engine_state.h"
#include "daemon/manifest.h"

#define ENGINE_RESERVE_BYTES (1u << 20) /* of each root, kept for the commit record */

int engine_root_path(const char *node, const char *path, char *ret, size_t bytes)
{
    static const char name[] = "{node}";
    const char *at = strstr(path, name);
    int n =
        at ? snprintf(ret, bytes, "%.*s%s%s", (int)(at - path), path, node, at + sizeof(name) - 1)
           : snprintf(ret, bytes, "%s", path);

    return n < 0 || (size_t)n >= bytes ? BL_ELIMIT : 0;
}

void engine_root_fill(const struct run *run, uint32_t index, int create,
                      struct wire_engine_root *ret)
{
    const struct bl_job_root *root = &run->job->roots[index];

    memset(ret, 0, sizeof(*ret));
    BL_IGNORE(engine_root_path(run->daemon->config.name, root->path, ret->path, sizeof(ret->path)),
              "run_open has looked");
    ret->index = index;
    ret->run = run->id;
    snprintf(ret->node, sizeof(ret->node), "%s", run->daemon->config.name);
    ret->nodes = run->job->nodes_min;
    ret->shared = root->shared;
    ret->create = (uint32_t)create;
    ret->reserve_bytes = create ? ENGINE_RESERVE_BYTES : 0;
    ret->rate_max = root->rate_max;
}

/* ---- saves ---- */

static void write_refused(struct run *run, uint64_t attempt, uint64_t step, int rc,
                          const char *text)
{
    event(run->daemon->events, EVENT_PART_FAILED, "job=%s step=%llu reason=%s", run->name,
          (unsigned long long)step, text);
    core_member_on_engine_written(run->member, attempt, rc, NULL, text, 0, 0, daemon_now_ms());
    run_pump(run);
}

/* Descriptors ride beside frames, so many at most: the first of many go ahead of the question. */
static int write_send_ahead(struct engine *engine, uint64_t attempt,
                            const struct wire_engine_arena *arenas, const int *fds, uint32_t count)
{
    uint32_t sent = 0;

    while (count - sent > WIRE_FDS_MAX) {
        struct wire_engine_arenas message = {.attempt = attempt, .arena_count = WIRE_FDS_MAX};

        for (uint32_t i = 0; i < WIRE_FDS_MAX; i++) {
            message.arenas[i] = arenas[sent + i];
            message.arenas[i].fd_index = i;
        }
        if (engine->conn && !engine->is_stuck) {
            BL_IGNORE(conn_send(engine->conn, WIRE_TYPE_ENGINE_ARENAS, &message, 0, &fds[sent],
                                WIRE_FDS_MAX),
                      "the question behind it fails");
        }
        sent += WIRE_FDS_MAX;
    }
    return (int)sent;
}

/* The arenas of the write, in `arenas` and `fds` (room for source_count). How many are there. */
static uint32_t write_arenas(struct run *run, const struct core_member_write *job,
                             struct wire_engine_arena *arenas, int *fds)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < job->source_count; i++) {
        const struct arena *arena = arena_find(run, job->sources[i].arena);

        if (arena) {
            arenas[count].arena = arena->id;
            arenas[count].slot = job->sources[i].slot;
            fds[count++] = arena->fd;
        }
    }
    return count;
}

static void write_send(struct run *run, struct engine *engine, struct engine_pending *pending,
                       const struct core_member_write *job, const struct wire_engine_arena *arenas,
                       const int *fds, uint32_t count)
{
    struct wire_engine_write message = {0};

    engine_root_fill(run, job->root, 1, &message.root);
    message.root.apart = job->apart;
    message.attempt = (struct wire_engine_attempt){.attempt = job->attempt,
                                                   .step = job->step,
                                                   .generation = job->generation,
                                                   .line = job->line,
                                                   .count = 1};
    snprintf(message.attempt.dir, sizeof(message.attempt.dir), "%s", job->dir);
    snprintf(message.part, sizeof(message.part), "part-%.56s", run->daemon->config.name);
    snprintf(message.codec, sizeof(message.codec), "%s", run->job->codec);
    message.pick = *job->pick; /* a view: the message is not closed */
    if (!engine->conn && !engine->is_stuck && engine->stillborn <= 1) {
        engine_start(engine);
    }
    uint32_t sent = (uint32_t)write_send_ahead(engine, job->attempt, arenas, fds, count);

    for (uint32_t i = sent; i < count; i++) {
        message.arenas[message.arena_count] = arenas[i];
        message.arenas[message.arena_count].fd_index = message.arena_count;
        message.arena_count++;
    }
    engine_ask(engine, pending, WIRE_TYPE_ENGINE_WRITE, &message, &fds[sent], count - sent);
}

void engine_write(struct run *run, uint64_t attempt)
{
    struct core_member_write job;

    if (core_member_write(run->member, attempt, &job) != 0) {
        return; /* nobody wants it any more */
    }
    struct engine *engine = job.root < run->job->root_count
                                ? engine_of(run->daemon, run->job->roots[job.root].path)
                                : NULL;
    struct engine_pending *pending =
        engine ? engine_pending_add(engine, ENGINE_ASKED_WRITE, attempt, run->id) : NULL;

    if (!pending) {
        free(job.sources);
        write_refused(run, attempt, job.step, BL_ELIMIT, "too many saves under way");
        return;
    }
    pending->step = job.step;
    struct wire_engine_arena *arenas = calloc(job.source_count + 1, sizeof(*arenas));
    int *fds = calloc(job.source_count + 1, sizeof(*fds));

    BL_ASSERT(arenas && fds);
    uint32_t count = write_arenas(run, &job, arenas, fds);

    if (count == job.source_count) {
        write_send(run, engine, pending, &job, arenas, fds, count);
    } else {
        struct engine_pending none;

        BL_IGNORE(engine_pending_take(engine, ENGINE_ASKED_WRITE, attempt, &none), "just added");
        write_refused(run, attempt, job.step, BL_ENOSTATE, "memory of the step is gone");
    }
    free(job.sources);
    free(arenas);
    free(fds);
}

void engine_cancel(struct run *run, uint64_t attempt)
{
    const struct wire_directive *directive = core_member_directive(run->member);
    struct wire_engine_cancel message = {0};
    struct engine_pending pending;

    for (uint32_t i = 0; directive && i < directive->save_count; i++) {
        const struct wire_save *save = &directive->saves[i];

        if (save->attempt != attempt || save->root >= run->job->root_count) {
            continue;
        }
        struct engine *engine = engine_of(run->daemon, run->job->roots[save->root].path);

        if (!engine) {
            continue;
        }
        BL_IGNORE(engine_pending_take(engine, ENGINE_ASKED_WRITE, attempt, &pending) == 0,
                  "it was done already");
        engine_root_fill(run, save->root, 0, &message.root);
        message.attempt = (struct wire_engine_attempt){.attempt = attempt,
                                                       .step = save->step,
                                                       .generation = save->generation,
                                                       .line = save->line,
                                                       .count = 1};
        snprintf(message.attempt.dir, sizeof(message.attempt.dir), "%s", save->dir);
        BL_IGNORE(engine->conn &&
                      conn_send(engine->conn, WIRE_TYPE_ENGINE_CANCEL, &message, 0, NULL, 0) != 0,
                  "the next save sweeps");
    }
}

static void keep_fill(const struct bl_job_root *root, struct wire_engine_commit *message)
{
    message->keep = (struct wire_engine_keep){.keep = root->keep,
                                              .keep_best = root->keep_best,
                                              .keep_every = root->keep_every,
                                              .bytes_max = root->bytes_max};
    message->verify = root->verify;
}

void engine_peers_open(const struct run *run, uint32_t count, struct wire_engine_peers *ret)
{
    const struct wire_directive *directive = core_member_directive(run->member);

    memset(ret, 0, sizeof(*ret));
    if (directive) {
        memcpy(ret->key, directive->file_key, sizeof(ret->key));
    }
    ret->peers = calloc(count + 1, sizeof(*ret->peers));
    BL_ASSERT(ret->peers);
}

void engine_peers_add(const struct run *run, struct wire_engine_peers *peers, const char *node,
                      const char *addr)
{
    if (addr[0] && strcmp(node, run->daemon->config.name) != 0) {
        struct wire_holder *peer = &peers->peers[peers->peer_count++];

        snprintf(peer->node, sizeof(peer->node), "%s", node);
        snprintf(peer->bulk_addr, sizeof(peer->bulk_addr), "%s", addr);
    }
}

static void commit_fill(struct run *run, const struct core_commit *commit,
                        struct wire_engine_commit *message)
{
    const struct bl_job_root *root = &run->job->roots[commit->root];

    engine_root_fill(run, commit->root, (int)commit->apart, &message->root);
    message->root.apart = commit->apart;
    message->stage = commit->apart ? WIRE_ENGINE_COMPOSE : WIRE_ENGINE_WHOLE;
    message->attempt = (struct wire_engine_attempt){.attempt = commit->attempt,
                                                    .step = commit->step,
                                                    .generation = commit->generation,
                                                    .line = commit->line,
                                                    .count = 1};
    snprintf(message->attempt.dir, sizeof(message->attempt.dir), "%s", commit->dir);
    message->manifest_json = manifest_json(run, commit);
    keep_fill(root, message);
    message->part_count = commit->part_count;
    message->parts = calloc(commit->part_count + 1, sizeof(*message->parts));
    message->line_end_count = commit->line_end_count;
    message->line_ends = calloc(commit->line_end_count + 1, sizeof(*message->line_ends));
    BL_ASSERT(message->parts && message->line_ends);
    engine_peers_open(run, commit->apart ? commit->part_count : 0, &message->peers);
    for (uint32_t i = 0; i < commit->part_count; i++) {
        message->parts[i].part_json = strdup(commit->parts[i].part_json);
        if (commit->apart) {
            engine_peers_add(run, &message->peers, commit->parts[i].node,
                             commit->parts[i].bulk_addr);
        }
    }
    if (commit->line_end_count) {
        memcpy(message->line_ends, commit->line_ends,
               commit->line_end_count * sizeof(*message->line_ends));
    }
}

void engine_commit(struct run *run, uint64_t attempt)
{
    struct core_commit commit;
    struct wire_engine_commit message = {0};

    if (core_leader_commit(run->leader, attempt, &commit) != 0) {
        return; /* given up meanwhile */
    }
    struct engine *engine = commit.root < run->job->root_count
                                ? engine_of(run->daemon, run->job->roots[commit.root].path)
                                : NULL;
    struct engine_pending *pending =
        engine ? engine_pending_add(engine, ENGINE_ASKED_COMMIT, attempt, run->id) : NULL;

    if (!pending) {
        free(commit.parts);
        core_leader_on_commit_done(run->leader, attempt, BL_EABORTED, "too many saves", 0,
                                   daemon_now_ms());
        return;
    }
    commit_fill(run, &commit, &message);
    free(commit.parts);
    engine_ask(engine, pending, WIRE_TYPE_ENGINE_COMMIT, &message, NULL, 0);
    wire_engine_commit_free(&message);
}

static void stage_fill(struct run *run, const struct wire_save *save, enum wire_engine_stage stage,
                       struct wire_engine_commit *message)
{
    engine_root_fill(run, save->root, 0, &message->root);
    message->root.apart = 1;
    message->stage = stage;
    message->attempt = (struct wire_engine_attempt){.attempt = save->attempt,
                                                    .step = save->step,
                                                    .generation = save->generation,
                                                    .line = save->line,
                                                    .count = 1};
    snprintf(message->attempt.dir, sizeof(message->attempt.dir), "%s", save->dir);
    snprintf(message->final_dir, sizeof(message->final_dir), "%s", save->dir);
    message->manifest_digest = save->manifest_digest;
    keep_fill(&run->job->roots[save->root], message);
    message->verify = 1; /* of its own node knows none that the others are right: all read back */
    message->line_end_count = save->line_end_count;
    message->line_ends = save->line_ends; /* a view */
    engine_peers_open(run, 1, &message->peers);
    if (stage == WIRE_ENGINE_PREPARE) {
        engine_peers_add(run, &message->peers, "", save->source);
    }
}

void engine_stage(struct run *run, uint64_t attempt, enum wire_engine_stage stage)
{
    const struct wire_save *save = core_member_save(run->member, attempt);
    struct wire_engine_commit message = {0};

    if (!save || save->root >= run->job->root_count) {
        return; /* nobody wants it any more */
    }
    struct engine *engine = engine_of(run->daemon, run->job->roots[save->root].path);
    struct engine_pending *pending =
        engine && stage != WIRE_ENGINE_RETAIN
            ? engine_pending_add(engine, ENGINE_ASKED_STAGE, attempt, run->id)
            : NULL;

    stage_fill(run, save, stage, &message);
    if (pending) {
        engine_ask(engine, pending, WIRE_TYPE_ENGINE_COMMIT, &message, NULL, 0);
    } else if (stage != WIRE_ENGINE_RETAIN) {
        core_member_on_engine_stage(run->member, attempt, BL_ELIMIT, "too many saves under way",
                                    daemon_now_ms());
    } else if (engine && engine->conn && !engine->is_stuck) {
        BL_IGNORE(conn_send(engine->conn, WIRE_TYPE_ENGINE_COMMIT, &message, 0, NULL, 0),
                  "the next one retains");
    }
    free(message.peers.peers);
}

/* ---- reading ---- */

void engine_scan_root(struct daemon *daemon, const char *path, const struct wire_engine_root *root,
                      int own, engine_scanned_fn done, void *arg)
{
    struct engine *engine = engine_of(daemon, path);
    struct wire_engine_scan message = {.root = *root, .own = (uint32_t)own};

    message.request = engine ? ++engine->next_request : 0;
    struct engine_pending *pending =
        engine ? engine_pending_add(engine, ENGINE_ASKED_SCAN, message.request, 0) : NULL;

    if (!pending) {
        done(arg, NULL);
        return;
    }
    pending->scanned = done;
    pending->arg = arg;
    engine_ask(engine, pending, WIRE_TYPE_ENGINE_SCAN, &message, NULL, 0);
}
