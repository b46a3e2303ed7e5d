/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job comes in, or comes back.
 *
 *      parse -> who owns run_dir? -> scan each root (belongs to another run?) -> make the run
 *                  nobody: a new run, or with "recover" the run that the root holds
 *                  a run of our store that is over: resumed
 *                  anything else: refused, and nothing is touched
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "daemon/daemon.h"
#include "daemon/engine_client.h"
#include "daemon/status.h"

#define OWNER_FILE "belay.run" /* in run_dir: the run's id */

struct submit {
    struct submit *next;
    struct daemon *daemon;
    struct conn *conn; /* NULL: gone */
    uint64_t id[2];
    char *job_json;
    struct bl_job *job; /* NULL: recovering by the saved job, not yet known */
    char recover[WIRE_ROOT_MAX];
    int replace_binary;
    uint64_t run;              /* 0: new */
    struct wire_record record; /* of the run that is resumed or recovered */
    int has_record;
    uint64_t record_version, exe_version, exe_frozen;
    uint32_t root; /* being scanned */
};

static void submit_end(struct submit *submit, int rc, const char *text, const char *json)
{
    struct submit **at = &submit->daemon->submits;

    if (rc != 0) {
        event(submit->daemon->events, EVENT_JOB_REFUSED, "job=%s reason=%s",
              submit->job ? submit->job->name : submit->recover, text);
    }
    tool_link_reply(submit->daemon, submit->conn, submit->id, rc, text, json);
    while (*at != submit) {
        at = &(*at)->next;
    }
    *at = submit->next;
    if (submit->has_record) {
        wire_record_close(&submit->record);
    }
    free(submit->job);
    free(submit->job_json);
    free(submit);
}

void submit_gone(struct daemon *daemon, struct conn *conn)
{
    for (struct submit *submit = daemon->submits; submit; submit = submit->next) {
        if (submit->conn == conn) {
            submit->conn = NULL;
        }
    }
}

/* ---- who owns run_dir ---- */

static int owner_read(const char *run_dir, uint64_t *ret)
{
    char path[1200], *text;
    size_t bytes;
    int rc = bl_path_join(path, sizeof(path), run_dir, OWNER_FILE);

    rc = rc ? rc : bl_file_read(path, 64, &text, &bytes, NULL);
    if (rc == 0) {
        *ret = daemon_unhex(text);
        free(text);
    }
    return rc;
}

static int owner_write(const char *run_dir, uint64_t run, struct bl_errmsg *msg)
{
    char path[1200], text[20];
    int rc = bl_path_join(path, sizeof(path), run_dir, OWNER_FILE);

    snprintf(text, sizeof(text), "%016llx\n", (unsigned long long)run);
    rc = rc ? rc : bl_mkdir_p(run_dir, msg);
    return rc ? rc : bl_file_write_atomic(path, text, 17, msg);
}

struct lookup {
    char key[STORE_KEY_MAX];
    const void *value;
    struct wire_record *record;
    uint64_t revision, exe;
    int found;
};

static int lookup_record(void *arg, const char *key, uint64_t revision, const void *value,
                         size_t bytes)
{
    struct lookup *lookup = arg;

    if (strcmp(key, lookup->key) != 0) {
        return 0;
    }
    lookup->revision = revision;
    lookup->found = 1;
    return wire_record_decode(lookup->record, value, bytes, NULL);
}

static int lookup_exe(void *arg, const char *key, uint64_t revision, const void *value,
                      size_t bytes)
{
    struct lookup *lookup = arg;
    char text[17] = "";

    (void)key;
    memcpy(text, value, bytes < 16 ? bytes : 16);
    lookup->revision = revision;
    lookup->exe = daemon_unhex(text);
    return 0;
}

static int record_find(struct submit *submit, uint64_t run, struct bl_errmsg *msg)
{
    struct lookup lookup = {.record = &submit->record};

    snprintf(lookup.key, sizeof(lookup.key), "run/%016llx", (unsigned long long)run);
    int rc = store_each(submit->daemon->store, lookup.key, lookup_record, &lookup, msg);

    if (rc == 0 && lookup.found) {
        submit->has_record = 1;
        submit->record_version = lookup.revision;
    }
    return rc;
}

static int exe_find(struct submit *submit, struct bl_errmsg *msg)
{
    struct lookup lookup = {0};
    char key[STORE_KEY_MAX];

    snprintf(key, sizeof(key), "exe/%016llx", (unsigned long long)submit->run);
    int rc = store_each(submit->daemon->store, key, lookup_exe, &lookup, msg);

    submit->exe_version = lookup.revision;
    submit->exe_frozen = lookup.exe;
    return rc;
}

static int resume_check(struct submit *submit, struct bl_errmsg *msg)
{
    struct bl_job *old = run_job_parse(submit->record.job_json, msg);

    if (!old) {
        return BL_ECONFIG;
    }
    uint64_t was = bl_job_function_digest(old), is = bl_job_function_digest(submit->job);
    const char *differs = bl_job_frozen_difference(old, submit->job);

    free(old);
    if (submit->record.phase != WIRE_PHASE_DONE) {
        return bl_err(msg, -EALREADY, "%s is running already: belay status", submit->job->name);
    }
    if (submit->record.verdict == WIRE_VERDICT_FINISHED && was == is) {
        return bl_err(msg, -EALREADY, "%s finished in %s: use another run_dir to train again",
                      submit->job->name, submit->job->run_dir);
    }
    if (was != is) {
        return bl_err(msg, BL_ECONFIG,
                      "%s holds run %016llx with another job, %s differs: its weights would not be "
                      "what this file describes; use another run_dir",
                      submit->job->run_dir, (unsigned long long)submit->run,
                      differs ? differs : "something");
    }
    return 0;
}

static int binary_check(struct submit *submit, struct bl_errmsg *msg)
{
    char path[1024];
    uint64_t digest;
    int rc = exe_path(submit->job, path, sizeof(path), msg);

    rc = rc ? rc : exe_digest(path, &digest, msg);
    rc = rc ? rc : exe_find(submit, msg);
    if (rc == 0 && submit->exe_frozen != 0 && submit->exe_frozen != digest &&
        !submit->replace_binary) {
        char now[17], frozen[17];

        daemon_hex(digest, now);
        daemon_hex(submit->exe_frozen, frozen);
        return bl_err(msg, BL_ECONFIG,
                      "%s was rebuilt (digest %s, the run began with %s): put the old one back, or "
                      "belay run --replace-binary",
                      path, now, frozen);
    }
    submit->exe_frozen = digest;
    return rc;
}

/* Was a rank ever started there? A daemon that died between taking run_dir and the run's first
 * record leaves an owner that nobody knows and nothing else. */
static int run_dir_is_used(const char *run_dir)
{
    char path[1200];

    return bl_path_join(path, sizeof(path), run_dir, "logs") != 0 || access(path, F_OK) == 0;
}

/* Whose is run_dir? Fills run and record. */
static int owner_check(struct submit *submit, struct bl_errmsg *msg)
{
    struct run *active = run_find_name(submit->daemon, submit->job->name);
    int rc = owner_read(submit->job->run_dir, &submit->run);

    if (active) {
        return bl_err(msg, -EEXIST, "a job called %s runs already: belay status", active->name);
    }
    if (rc == -ENOENT) {
        submit->run = submit->has_record ? submit->record.run : 0;
        return 0;
    }
    if (rc != 0) {
        return bl_err_code(msg, rc, "read %s/" OWNER_FILE, submit->job->run_dir);
    }
    if (submit->has_record) { /* recovering: the root says which run, run_dir must agree */
        return submit->run == submit->record.run
                   ? 0
                   : bl_err(msg, BL_EFOREIGN, "%s belongs to run %016llx, the root to %016llx",
                            submit->job->run_dir, (unsigned long long)submit->run,
                            (unsigned long long)submit->record.run);
    }
    rc = record_find(submit, submit->run, msg);
    if (rc == 0 && !submit->has_record && !run_dir_is_used(submit->job->run_dir)) {
        return 0; /* the unfinished submission is finished now, under its id */
    }
    if (rc == 0 && !submit->has_record) {
        rc = bl_err(msg, BL_EFOREIGN,
                    "%s belongs to run %016llx, which this head does not know: use another "
                    "run_dir, or belay run --recover ROOT to take that run up",
                    submit->job->run_dir, (unsigned long long)submit->run);
        event(submit->daemon->events, EVENT_ROOT_FOREIGN, "job=%s root=%s reason=%s",
              submit->job->name, submit->job->run_dir, msg->text);
    }
    return rc ? rc : resume_check(submit, msg);
}

/* ---- making the run ---- */

static void on_exe_stored(void *arg, int rc, uint64_t revision, const char *text)
{
    (void)arg;
    (void)revision;
    if (rc != 0) {
        bl_log(BL_LOG_WARN, "submit", "%s", text);
    }
}

static void submit_make(struct submit *submit)
{
    struct daemon *daemon = submit->daemon;
    struct bl_errmsg msg = {{0}};
    struct run *run = NULL;
    char hex[17], key[STORE_KEY_MAX], answer[256];
    int resumed = submit->has_record;

    if (submit->run == 0) {
        submit->run = bl_random_u64() | 1;
    }
    daemon_hex(submit->run, hex);
    int rc = binary_check(submit, &msg);

    rc = rc ? rc : owner_write(submit->job->run_dir, submit->run, &msg);
    rc = rc ? rc : run_open(daemon, submit->run, submit->job_json, &run, &msg);
    if (rc != 0) {
        submit_end(submit, rc, msg.text, NULL);
        return;
    }
    char exe[17];

    snprintf(key, sizeof(key), "exe/%s", hex);
    daemon_hex(submit->exe_frozen, exe);
    rc = store_swap(daemon->store, key, submit->exe_version, exe, 16, on_exe_stored, NULL);
    run->exe_digest = submit->exe_frozen;
    run_remember(run);
    if (resumed) { /* DONE would tell the members that there is nothing to do */
        submit->record.phase = WIRE_PHASE_NONE;
        submit->record.verdict = WIRE_VERDICT_NONE;
        wire_plan_close(&submit->record.plan);
        memset(&submit->record.plan, 0, sizeof(submit->record.plan));
    }
    rc = rc ? rc
            : leader_edge_open(run, resumed ? &submit->record : NULL, submit->record_version,
                               resumed, &msg);
    if (rc != 0) {
        submit_end(submit, rc, msg.text[0] ? msg.text : bl_strerror(rc), NULL);
        run_close(run);
        return;
    }
    event(daemon->events, EVENT_JOB_SUBMITTED, "job=%s run=%s ranks=%u steps=%llu resumed=%d",
          run->name, hex, run->job->ranks, (unsigned long long)run->job->train.steps, resumed);
    snprintf(answer, sizeof(answer),
             "{\"schema\":1,\"job\":\"%s\",\"run\":\"%s\",\"resumed\":%s,\"step\":%llu}", run->name,
             hex, resumed ? "true" : "false",
             resumed && submit->record.committed_step != UINT64_MAX
                 ? (unsigned long long)submit->record.committed_step
                 : 0ull);
    submit_end(submit, 0, "", answer);
    run_begin(run);
}

/* ---- the roots ---- */

static void scan_next(struct submit *submit);

static void on_root_scanned(void *arg, const struct wire_engine_scanned *scanned)
{
    struct submit *submit = arg;
    const char *path = submit->job->roots[submit->root].path;
    char text[WIRE_REASON_MAX + 1200];

    if (!scanned && submit->has_record) { /* the leader waits for it, or does without */
        submit->root++;
        scan_next(submit);
        return;
    }
    if (!scanned) {
        snprintf(text, sizeof(text), "%s could not be looked at: the checkpoint engine failed",
                 path);
        submit_end(submit, -EIO, text, NULL);
        return;
    }
    int is_new = !submit->has_record && scanned->rc == 0 && scanned->run_text[0];

    if (scanned->rc == BL_EFOREIGN || is_new) {
        snprintf(text, sizeof(text),
                 "root %s holds run %s: use another path, or belay run --recover %s", path,
                 scanned->run_text[0] ? scanned->run_text : scanned->text, path);
        event(submit->daemon->events, EVENT_ROOT_FOREIGN, "job=%s root=%s reason=%s",
              submit->job->name, path, text);
        submit_end(submit, BL_EFOREIGN, text, NULL);
        return;
    }
    if (scanned->rc != 0 && scanned->rc != -ENOENT) {
        submit_end(submit, scanned->rc, scanned->text, NULL);
        return;
    }
    submit->root++;
    scan_next(submit);
}

static void root_fill(const struct submit *submit, const char *path, uint64_t run,
                      struct wire_engine_root *ret)
{
    memset(ret, 0, sizeof(*ret));
    BL_IGNORE(engine_root_path(submit->daemon->config.name, path, ret->path, sizeof(ret->path)),
              "a path that was cut is not there, which is said");
    snprintf(ret->node, sizeof(ret->node), "%s", submit->daemon->config.name);
    ret->run = run;
    ret->nodes = 1;
}

static void scan_next(struct submit *submit)
{
    struct wire_engine_root root;

    if (submit->root == submit->job->root_count) {
        submit_make(submit);
        return;
    }
    root_fill(submit, submit->job->roots[submit->root].path, submit->run, &root);
    engine_scan_root(submit->daemon, submit->job->roots[submit->root].path, &root, 0,
                     on_root_scanned, submit);
}

/* ---- recover: the frozen job of the newest checkpoint ---- */

/* The newest one with its final name. In a node's own root it may be but a part: whether it is
 * whole, and whether a newer one is, the leader finds out. */
static const struct wire_engine_checkpoint *
recover_newest(const struct wire_engine_scanned *scanned)
{
    for (uint32_t i = 0; i < scanned->checkpoint_count; i++) {
        if (scanned->checkpoints[i].attempt == 0) {
            return &scanned->checkpoints[i];
        }
    }
    return NULL;
}

static void record_seed(struct submit *submit, const struct wire_engine_scanned *scanned,
                        const struct wire_engine_checkpoint *newest)
{
    struct wire_record *record = &submit->record;

    memset(record, 0, sizeof(*record));
    record->run = scanned->run;
    record->phase = WIRE_PHASE_NONE; /* DONE would tell the members that there is nothing to do */
    record->committed_step = newest->step;
    record->committed_generation = newest->generation;
    record->committed_digest = newest->manifest_digest;
    record->function_id = newest->function_id;
    snprintf(record->committed_dir, sizeof(record->committed_dir), "%s", newest->dir);
    record->root_count = 1;
    record->roots[0] =
        (struct wire_record_root){.path = bl_xxh3(submit->recover, strlen(submit->recover)),
                                  .committed_step = record->committed_step,
                                  .committed_generation = record->committed_generation,
                                  .committed_digest = record->committed_digest};
    memcpy(record->roots[0].committed_dir, record->committed_dir, sizeof(record->committed_dir));
    snprintf(record->name, sizeof(record->name), "%s", submit->job->name);
    record->job_json = strdup(submit->job_json);
    for (uint32_t i = 0; i < scanned->checkpoint_count; i++) {
        if (scanned->checkpoints[i].generation > record->generation) {
            record->generation = scanned->checkpoints[i].generation;
            record->line = scanned->checkpoints[i].line;
        }
    }
    submit->has_record = 1;
}

/* The job that came with the request, when it is of the same function; else the saved one. */
static int recover_job(struct submit *submit, const char *saved_json, struct bl_errmsg *msg)
{
    struct bl_job *saved = run_job_parse(saved_json, msg);
    const char *differs =
        saved && submit->job ? bl_job_frozen_difference(saved, submit->job) : NULL;

    if (!saved || differs) {
        free(saved);
        return differs ? bl_err(msg, BL_ECONFIG, "%s differs from the job in %s and is frozen",
                                differs, submit->recover)
                       : BL_ECONFIG;
    }
    if (submit->job) {
        free(saved);
        return 0;
    }
    submit->job = saved;
    submit->job_json = strdup(saved_json);
    return 0;
}

static void on_recover_scanned(void *arg, const struct wire_engine_scanned *scanned)
{
    struct submit *submit = arg;
    struct bl_errmsg msg = {{0}};
    char text[WIRE_REASON_MAX + 1200];

    const struct wire_engine_checkpoint *newest = scanned ? recover_newest(scanned) : NULL;
    const char *job_json = newest ? scanned->checkpoints[0].job_json : NULL;

    if (!newest || scanned->rc != 0 || !job_json) {
        snprintf(text, sizeof(text), "%s: %s", submit->recover,
                 scanned && scanned->rc ? scanned->text : "no complete checkpoint is there");
        submit_end(submit, BL_ENOSTATE, text, NULL);
        return;
    }
    int rc = recover_job(submit, job_json, &msg);

    rc = rc ? rc : record_find(submit, scanned->run, &msg);
    if (rc == 0 && !submit->has_record) {
        record_seed(submit, scanned, newest);
    } else if (rc == 0 && submit->record.phase != WIRE_PHASE_DONE) {
        rc = bl_err(&msg, -EALREADY, "%s is running already: belay status", submit->job->name);
    }
    rc = rc ? rc : owner_check(submit, &msg);
    if (rc != 0) {
        submit_end(submit, rc, msg.text, NULL);
        return;
    }
    scan_next(submit);
}

/* ---- the request ---- */

static int submit_parse(struct submit *submit, const char *args, struct bl_errmsg *msg)
{
    json_t *json = NULL, *job;
    int rc = bl_json_parse(args, strlen(args), &json, msg);

    if (rc != 0) {
        return rc;
    }
    const char *recover =
        json_string_value(json_object_get(json_object_get(json, "recover"), "root"));

    submit->replace_binary = json_is_true(json_object_get(json, "replace_binary"));
    if (recover) {
        snprintf(submit->recover, sizeof(submit->recover), "%s", recover);
    }
    if (!recover || json_object_get(json, "job")) {
        rc = bl_json_object(json, "job", &job, msg);
        char *text = rc == 0 ? bl_json_dump(job) : NULL;

        submit->job = text ? run_job_parse(text, msg) : NULL;
        free(text);
        submit->job_json = submit->job ? bl_job_to_json(submit->job) : NULL;
        rc = submit->job_json ? 0 : BL_ECONFIG;
    }
    json_decref(json);
    return rc;
}

void submit_request(struct daemon *daemon, const char *args, struct conn *conn,
                    const uint64_t id[2])
{
    struct submit *submit = calloc(1, sizeof(*submit));
    struct bl_errmsg msg = {{0}};
    struct wire_engine_root root;

    BL_ASSERT(submit != NULL);
    submit->daemon = daemon;
    submit->conn = conn;
    submit->id[0] = id[0];
    submit->id[1] = id[1];
    submit->next = daemon->submits;
    daemon->submits = submit;
    int rc = submit_parse(submit, args, &msg);

    if (rc == 0 && submit->recover[0]) {
        root_fill(submit, submit->recover, 0, &root);
        engine_scan_root(daemon, submit->recover, &root, 1, on_recover_scanned, submit);
        return;
    }
    rc = rc ? rc : owner_check(submit, &msg);
    if (rc != 0) {
        submit_end(submit, rc, msg.text, NULL);
        return;
    }
    scan_next(submit);
}

/* ---- what the store has ---- */

static int load_each(void *arg, const char *key, uint64_t revision, const void *value, size_t bytes)
{
    struct daemon *daemon = arg;
    struct wire_record record;
    struct bl_errmsg msg = {{0}};
    int rc = wire_record_decode(&record, value, bytes, &msg);
    struct run *run = rc == 0 ? run_find(daemon, record.run) : NULL;

    if (rc != 0) {
        bl_log(BL_LOG_ERROR, "store", "%s: %s", key, msg.text);
        return 0; /* one bad value must not keep the others down */
    }
    if (record.phase == WIRE_PHASE_DONE) {
        status_keep_record(daemon, &record);
    }
    /* One that is over may still have to be told so on this node. */
    if ((record.phase != WIRE_PHASE_DONE || run) && !(run && run->leader)) {
        int is_new = run == NULL;

        rc = run ? 0 : run_open(daemon, record.run, record.job_json, &run, &msg);
        rc = rc ? rc : leader_edge_open(run, &record, revision, 0, &msg);
        if (rc != 0) {
            bl_log(BL_LOG_ERROR, "store", "%s: %s", record.name, msg.text);
        } else if (is_new) {
            run_remember(run);
            run_begin(run);
        } else if (!run->adopting) {
            core_member_on_link_up(run->member, daemon_now_ms());
            run_pump(run);
        }
    }
    wire_record_close(&record);
    return 0;
}

void submit_load_unborn(struct daemon *daemon)
{
    for (uint32_t i = daemon->run_count; i > 0; i--) {
        struct run *run = daemon->runs[i - 1];
        struct bl_errmsg msg = {{0}};

        if (run->leader || run->proc_count > 0) {
            continue;
        }
        if (leader_edge_open(run, NULL, 0, 0, &msg) != 0) {
            bl_log(BL_LOG_ERROR, "store", "%s: %s", run->name, msg.text);
            continue;
        }
        core_member_on_link_up(run->member, daemon_now_ms());
        run_pump(run);
    }
}

int submit_load(struct daemon *daemon, struct bl_errmsg *msg)
{
    return store_each(daemon->store, "run/", load_each, daemon, msg);
}
