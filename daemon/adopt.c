/* SPDX-License-Identifier: Apache-2.0 */
/*
 * After a restart: STATE/jobs/NAME has run.json, job.json and a socket RANK.INC.sock per shim. The
 * run is made again from the first two, each shim is attached to, and only when all are settled
 * does the member start to speak: what a started daemon does not report is dead.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "daemon/proc.h"

#define ADOPT_JSON_MAX 4096

/* A run that cannot be taken up (its files are not readable, or were never written for want of
 * room) while ranks of it live: the leader takes them for dead, since nobody reports them. So that
 * is what they must be: their shims are killed, and they with them. */
static void adopt_refuse(const char *dir)
{
    DIR *entries = opendir(dir);
    struct dirent *entry;

    while (entries && (entry = readdir(entries))) {
        char path[1700];
        size_t bytes = strlen(entry->d_name);

        if (bytes < 6 || strcmp(entry->d_name + bytes - 5, ".sock") != 0) {
            continue;
        }
        snprintf(path, sizeof(path), "%s/%s", dir, entry->d_name);
        uint32_t pid = proc_shim_end(path);

        if (pid > 0) {
            bl_log(BL_LOG_ERROR, "adopt", "%s: its run cannot be taken up: process %u killed", path,
                   pid);
        }
    }
    if (entries) {
        closedir(entries);
    }
}

static void adopt_sockets(struct run *run)
{
    DIR *dir = opendir(run->dir);
    struct dirent *entry;

    while (dir && (entry = readdir(dir))) {
        unsigned rank;
        char hex[17], end[6];

        if (sscanf(entry->d_name, "%u.%16[0-9a-f].%5s", &rank, hex, end) == 3 &&
            strcmp(end, "sock") == 0 && run->proc_count < DAEMON_PROCS_MAX) {
            proc_adopt(run, daemon_unhex(hex), rank);
        }
    }
    if (dir) {
        closedir(dir);
    }
}

void adopt_settled(struct run *run)
{
    for (uint32_t i = 0; i < run->proc_count; i++) {
        if (run->procs[i]->state == PROC_STARTING) {
            return;
        }
    }
    run->adopting = 0;
    member_edge_arenas(run);
    run_begin(run);
}

static int adopt_run(struct daemon *daemon, const char *name, struct bl_errmsg *msg)
{
    char dir[1400], path[1500];
    json_t *json = NULL;
    char *job = NULL;
    size_t bytes;
    uint64_t id = 0, exe = 0;
    struct run *run = NULL;

    snprintf(dir, sizeof(dir), "%s/jobs/%s", daemon->config.state_dir, name);
    snprintf(path, sizeof(path), "%s/run.json", dir);
    if (access(path, F_OK) != 0) {
        adopt_refuse(dir); /* an ended run's remains, most likely: then nobody listens */
        return 0;
    }
    int rc = bl_json_load(path, ADOPT_JSON_MAX, &json, msg);

    rc = rc ? rc : bl_json_hex64(json, "run", &id, msg);
    rc = rc ? rc : bl_json_hex64(json, "exe_digest", &exe, msg);
    snprintf(path, sizeof(path), "%s/job.json", dir);
    rc = rc ? rc : bl_file_read(path, BL_JOB_BYTES_MAX, &job, &bytes, msg);
    rc = rc ? rc : run_open(daemon, id, job, &run, msg);
    json_decref(json);
    free(job);
    if (rc != 0) {
        adopt_refuse(dir);
        return bl_err_in(msg, rc, "%s", dir);
    }
    run->exe_digest = exe;
    run->adopting = 1;
    adopt_sockets(run);
    adopt_settled(run);
    return 0;
}

void adopt_scan(struct daemon *daemon)
{
    char path[1100];
    struct dirent *entry;

    snprintf(path, sizeof(path), "%s/jobs", daemon->config.state_dir);
    DIR *dir = opendir(path);

    while (dir && (entry = readdir(dir))) {
        struct bl_errmsg msg = {{0}};

        if (entry->d_name[0] != '.' && adopt_run(daemon, entry->d_name, &msg) != 0) {
            bl_log(BL_LOG_ERROR, "adopt", "%s", msg.text);
        }
    }
    if (dir) {
        closedir(dir);
    }
}
