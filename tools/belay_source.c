/* SPDX-License-Identifier: Apache-2.0 */
/* Where the job of `belay run` comes from: a file, or the newest good checkpoint of a root. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "ckpt/ckpt.h"
#include "tools/belay.h"

extern char **environ;

/* A mistake of the person who wrote the job, or of the machine. */
static int job_refused(const struct tool_command *command, int code, const struct bl_errmsg *msg)
{
    tool_say(command, "%s", msg->text);
    bool is_usage = code == BL_ECONFIG || code == BL_ENOTBUILT || code == -ENOENT ||
                    code == -EISDIR || code == BL_ELIMIT;
    return is_usage ? TOOL_USAGE : TOOL_COULD_NOT;
}

/* ---- from a checkpoint ---- */

/* The newest good checkpoint's manifest. */
static int manifest_newest(const char *root, struct tool_source *source, struct ckpt_manifest *ret,
                           struct bl_errmsg *msg)
{
    struct ckpt_store_config config = {.path = root};
    struct ckpt_store *store;
    struct ckpt_scan scan;
    int rc = ckpt_store_open(&store, &config, msg);
    if (rc != 0) {
        return rc;
    }
    rc = ckpt_scan(store, &scan, msg);
    if (rc == 0) {
        const struct ckpt_entry *newest = ckpt_scan_newest(&scan, NULL, 0);
        if (newest == NULL && scan.count > 0) {
            rc = bl_err(msg, BL_ENOSTATE, "%s: no good checkpoint; the newest, %s: %s", root,
                        scan.entries[0].dir, scan.entries[0].why);
        } else if (newest == NULL) {
            rc = bl_err(msg, BL_ENOSTATE, "%s: no checkpoint there", root);
        } else {
            snprintf(source->dir, sizeof source->dir, "%s", newest->dir);
            rc = ckpt_manifest_load(store, newest->dir, ret, msg);
        }
        ckpt_scan_close(&scan);
    }
    ckpt_store_close(store);
    return rc;
}

/* A root that was moved: saves go on where the checkpoint is. */
static void roots_follow(struct tool_source *source, FILE *out)
{
    struct bl_job *job = source->job;
    for (uint32_t i = 0; i < job->root_count; i++) {
        if (strcmp(job->roots[i].path, source->root) == 0) {
            return;
        }
    }
    if (job->root_count > 0) {
        fprintf(out, "the checkpoints were in %s; from now on in %s\n", job->roots[0].path,
                source->root);
        snprintf(job->roots[0].path, sizeof job->roots[0].path, "%s", source->root);
    }
}

static int recover_load(struct tool_source *source, const struct tool_command *command,
                        const struct tool_args *args, FILE *out)
{
    struct bl_errmsg msg = {{0}};
    struct ckpt_manifest manifest = {.job = NULL};
    char real[PATH_MAX];
    if (realpath(args->recover, real) == NULL || strlen(real) >= sizeof source->root) {
        tool_say(command, "--recover %s: %s", args->recover, strerror(errno));
        return TOOL_COULD_NOT;
    }
    memcpy(source->root, real, strlen(real) + 1);
    int rc = manifest_newest(real, source, &manifest, &msg);
    struct bl_job *saved = rc == 0 ? malloc(sizeof *saved) : NULL;
    if (rc == 0 && (saved == NULL || manifest.job == NULL)) {
        rc = bl_err(&msg, BL_ENOSTATE, "%s/%s: no job in the manifest", real, source->dir);
    }
    if (rc == 0) {
        rc = bl_job_parse(saved, manifest.job, strlen(manifest.job), source->dir, real, &msg);
    }
    if (rc == 0) {
        fprintf(out, "checkpoint %s/%s: step %llu of run %s\n", real, source->dir,
                (unsigned long long)manifest.step, manifest.run);
    }
    ckpt_manifest_close(&manifest);
    if (rc != 0) {
        free(saved);
        tool_say(command, "--recover: %s", msg.text);
        return TOOL_COULD_NOT;
    }
    if (args->word_count == 0) {
        memcpy(source->job, saved, sizeof *saved);
    } else {
        const char *key = bl_job_frozen_difference(saved, source->job);
        if (key != NULL) {
            tool_say(command, "%s: '%s' differs from the job in %s/%s and cannot be changed",
                     args->words[0], key, real, source->dir);
            free(saved);
            return TOOL_USAGE;
        }
    }
    free(saved);
    roots_follow(source, out);
    return 0;
}

/* ---- checking ---- */

/* The frozen job as a file that a child can read by name. */
static int text_file(const char *text)
{
    int fd = memfd_create("belay-job", 0); /* stays open over exec */
    if (fd >= 0 && bl_fd_write_all(fd, text, strlen(text)) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static int check_spawn(const char *path, FILE *out, pid_t *ret)
{
    char dir[PATH_MAX], program[PATH_MAX + 16];
    char *argv[] = {(char[]){"belay-train"}, (char[]){"--check"}, (char *)(uintptr_t)path, NULL};
    posix_spawn_file_actions_t actions;
    if (posix_spawn_file_actions_init(&actions) != 0) {
        return ENOMEM;
    }
    int rc = posix_spawn_file_actions_adddup2(&actions, fileno(out), STDOUT_FILENO);
    if (rc == 0) {
        rc = ENOENT;
        if (bl_dir_of_exe(dir, sizeof dir) == 0) {
            snprintf(program, sizeof program, "%s/belay-train", dir);
            rc = posix_spawn(ret, program, &actions, NULL, argv, environ);
        }
        if (rc == ENOENT) {
            rc = posix_spawnp(ret, "belay-train", &actions, NULL, argv, environ);
        }
    }
    posix_spawn_file_actions_destroy(&actions);
    return rc;
}

/* belay-train --check: data, tokens, memory. What it says stands on its own. */
static int job_check(const struct tool_command *command, const struct tool_source *source,
                     FILE *out)
{
    char path[64];
    pid_t pid;
    int status = 0, fd = text_file(source->text);
    if (fd < 0) {
        tool_say(command, "a file in memory for the job: %s", strerror(errno));
        return TOOL_COULD_NOT;
    }
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    fflush(out);
    int rc = check_spawn(path, out, &pid);
    close(fd);
    if (rc != 0) {
        tool_say(command,
                 "belay-train, which checks the job, is neither beside belay nor in "
                 "PATH: %s",
                 strerror(rc));
        return TOOL_COULD_NOT;
    }
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        return 0;
    }
    if (WIFSIGNALED(status)) {
        tool_say(command, "belay-train --check died of signal %d; nothing was started",
                 WTERMSIG(status));
        return TOOL_COULD_NOT;
    }
    return WEXITSTATUS(status) == TOOL_USAGE ? TOOL_USAGE : TOOL_COULD_NOT;
}

int tool_source_load(struct tool_source *ret, const struct tool_command *command,
                     const struct tool_args *args, FILE *out)
{
    struct bl_errmsg msg = {{0}};
    memset(ret, 0, sizeof *ret);
    ret->job = calloc(1, sizeof *ret->job);
    BL_ASSERT(ret->job != NULL);
    int rc = 0;
    if (args->word_count > 0) {
        rc = bl_job_load(ret->job, args->words[0], &msg);
        if (rc != 0) {
            return job_refused(command, rc, &msg);
        }
    }
    if (args->recover != NULL) {
        rc = recover_load(ret, command, args, out);
        if (rc != 0) {
            return rc;
        }
    }
    ret->text = bl_job_to_json(ret->job);
    BL_ASSERT(ret->text != NULL);
    /* A foreign trainer knows its data itself. */
    return ret->job->command_count > 0 ? 0 : job_check(command, ret, out);
}

void tool_source_free(struct tool_source *source)
{
    free(source->job);
    free(source->text);
    memset(source, 0, sizeof *source);
}
