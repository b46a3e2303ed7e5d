/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Starting a rank: its beat page, its shim's arguments and environment, and the check that the
 * trainer is still the binary that the run began with.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "daemon/proc.h"

static void on_freed(uv_handle_t *handle)
{
    free(handle);
}

struct spawn { /* argument and environment lists of one shim */
    char paths[4][1200], page_text[8], exe[1024];
    char env_own[10][1200];
    char *argv[16 + BL_JOB_ARGS_MAX];
    char **env;
};

static char **spawn_env(struct spawn *spawn, const struct proc *proc)
{
    extern char **environ;
    struct run *run = proc->run;
    size_t count = 0, own = 0;

    while (environ[count]) {
        count++;
    }
    char **env = calloc(count + 12, sizeof(*env));

    BL_ASSERT(env != NULL);
    count = 0;
    for (char **at = environ; *at; at++) {
        if (strncmp(*at, "BELAYD_", 7) != 0 && strncmp(*at, "NOTIFY_SOCKET=", 14) != 0 &&
            strncmp(*at, "WATCHDOG_", 9) != 0 && strncmp(*at, "LISTEN_", 7) != 0) {
            env[count++] = *at;
        }
    }
#define ENV(...) snprintf(spawn->env_own[own++], sizeof(spawn->env_own[0]), __VA_ARGS__)
    ENV("BELAY_SOCKET=%s", run->daemon->config.socket);
    ENV("BELAY_JOB=%s", run->name);
    ENV("BELAY_RUN=%016llx", (unsigned long long)run->id);
    ENV("BELAY_JOB_FILE=%s/job.json", run->dir);
    ENV("BELAY_RANK=%u", proc->rank);
    ENV("BELAY_LOCAL_RANK=%u", run->proc_count - 1);
    ENV("BELAY_INCARNATION=%016llx", (unsigned long long)proc->incarnation);
    ENV("RANK=%u", proc->rank);
    ENV("LOCAL_RANK=%u", run->proc_count - 1);
    ENV("WORLD_SIZE=%u", run->job->ranks);
#undef ENV
    for (size_t i = 0; i < own; i++) {
        env[count++] = spawn->env_own[i];
    }
    return env;
}

static int spawn_fill(struct spawn *spawn, const struct proc *proc, struct bl_errmsg *msg)
{
    const struct bl_job *job = proc->run->job;
    char **at = spawn->argv;
    char logs[1100];
    int rc = exe_path(job, spawn->exe, sizeof(spawn->exe), msg);

    snprintf(logs, sizeof(logs), "%s/logs", job->run_dir);
    rc = rc ? rc : bl_mkdir_p(logs, msg);
    rc = rc ? rc : bl_dir_of_exe(spawn->paths[0], sizeof(spawn->paths[0]) - 16);
    if (rc != 0) {
        return rc;
    }
    strcat(spawn->paths[0], "/belay-shim");
    proc_path(proc, "sock", spawn->paths[1], sizeof(spawn->paths[1]));
    proc_path(proc, "exit", spawn->paths[2], sizeof(spawn->paths[2]));
    snprintf(spawn->paths[3], sizeof(spawn->paths[3]), "%s/rank-%04u.log", logs, proc->rank);
    *at++ = spawn->paths[0];
    *at++ = (char *)"--socket";
    *at++ = spawn->paths[1];
    *at++ = (char *)"--exit-file";
    *at++ = spawn->paths[2];
    *at++ = (char *)"--log";
    *at++ = spawn->paths[3];
    *at++ = (char *)"--page-fd";
    *at++ = (char *)"3";
    *at++ = (char *)"--cwd";
    *at++ = (char *)job->run_dir;
    *at++ = (char *)"--";
    *at++ = spawn->exe;
    for (uint32_t i = 1; i < job->command_count; i++) {
        *at++ = (char *)job->command[i];
    }
    *at = NULL;
    spawn->env = spawn_env(spawn, proc);
    return 0;
}

/* The first start on this node fixes what binary the run is made of. */
static int exe_check(struct run *run, const char *path, struct bl_errmsg *msg)
{
    uint64_t digest;
    char now[17], frozen[17];
    int rc = exe_digest(path, &digest, msg);

    if (rc != 0) {
        return rc;
    }
    if (run->exe_digest == 0) {
        run->exe_digest = digest;
        run_remember(run);
    }
    if (run->exe_digest == digest) {
        return 0;
    }
    daemon_hex(digest, now);
    daemon_hex(run->exe_digest, frozen);
    event(run->daemon->events, EVENT_BINARY_CHANGED, "job=%s path=%s digest=%s frozen=%s",
          run->name, path, now, frozen);
    return bl_err(msg, BL_ECONFIG,
                  "%s was rebuilt (digest %s, the run began with %s): put the old one back, or "
                  "belay stop, then belay run --replace-binary",
                  path, now, frozen);
}

static int proc_spawn(struct proc *proc, const struct spawn *spawn, struct bl_errmsg *msg)
{
    uv_stdio_container_t stdio[4] = {{.flags = UV_IGNORE}};
    uv_process_options_t options = {.exit_cb = proc_on_shim_exit,
                                    .file = spawn->argv[0],
                                    .args = (char **)spawn->argv,
                                    .env = spawn->env,
                                    .flags = UV_PROCESS_DETACHED,
                                    .stdio_count = 4,
                                    .stdio = stdio};
    char path[1200];

    proc_path(proc, "shim", path, sizeof(path));
    int err = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640);

    stdio[1].flags = UV_IGNORE;
    stdio[2].flags = err >= 0 ? UV_INHERIT_FD : UV_IGNORE;
    stdio[2].data.fd = err;
    stdio[3].flags = UV_INHERIT_FD;
    stdio[3].data.fd = proc->page_fd;
    proc->process = calloc(1, sizeof(*proc->process));
    BL_ASSERT(proc->process != NULL);
    proc->process->data = proc;
    int rc = uv_spawn(proc->run->daemon->loop, proc->process, &options);

    if (err >= 0) {
        close(err);
    }
    if (rc != 0) {
        proc->process->data = NULL;
        uv_close((uv_handle_t *)proc->process, on_freed);
        proc->process = NULL;
        return bl_err_code(msg, rc, "start %s", spawn->argv[0]);
    }
    uv_unref((uv_handle_t *)proc->process);
    return 0;
}

void proc_start(struct run *run, uint64_t incarnation, uint32_t rank)
{
    static struct spawn spawn; /* large; the loop thread's only */
    struct bl_errmsg msg = {{0}};

    if (proc_find(run, incarnation)) {
        return;
    }
    if (run->proc_count == DAEMON_PROCS_MAX) {
        struct wire_exit status = {.code = 3};

        event(run->daemon->events, EVENT_PROC_START_FAILED, "job=%s rank=%u reason=%s", run->name,
              rank, "too many processes of this job, dead ones included, are on this node");
        core_member_on_proc_exit(run->member, incarnation, &status, "too many processes",
                                 daemon_now_ms());
        return;
    }
    struct proc *proc = proc_new(run, incarnation, rank);

    memset(&spawn, 0, sizeof(spawn));
    int rc = bl_memfd_create("belay-page", WIRE_PAGE_BYTES, &proc->page_fd, &msg);

    if (rc == 0) {
        proc->page = bl_mem_map(proc->page_fd, WIRE_PAGE_BYTES, 1);
        rc = spawn_fill(&spawn, proc, &msg);
    }
    rc = rc ? rc : exe_check(run, spawn.exe, &msg);
    rc = rc ? rc : proc_spawn(proc, &spawn, &msg);
    free(spawn.env);
    if (rc != 0) {
        proc_start_failed(proc, msg.text);
        return;
    }
    proc_attach_begin(proc);
}
