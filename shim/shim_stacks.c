/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The stacks of all threads of a rank, before it is killed: by eu-stack into RANK.INC.stacks beside
 * the exit record, within a deadline. Never holds a kill up for longer than that.
 */
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/job.h"
#include "shim/shim.h"

extern char **environ;

static void stacks_path(const struct shim *shim, char *path, size_t bytes)
{
    size_t n = strlen(shim->options.exit_path);

    if (n > 5 && strcmp(shim->options.exit_path + n - 5, ".exit") == 0) {
        n -= 5;
    }
    snprintf(path, bytes, "%.*s.stacks", (int)n, shim->options.exit_path);
}

static int stacks_spawn(struct shim *shim, int fd)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attr;
    sigset_t none;
    char pid_text[16];
    char *argv[] = {(char *)"eu-stack", (char *)"-p", pid_text, NULL};

    snprintf(pid_text, sizeof(pid_text), "%d", (int)shim->pid);
    sigemptyset(&none);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fd, 1);
    posix_spawn_file_actions_adddup2(&actions, fd, 2);
    posix_spawnattr_init(&attr);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK);
    int rc = posix_spawnp(&shim->stacks_pid, "eu-stack", &actions, &attr, argv, environ);

    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attr);
    if (rc != 0) {
        shim->stacks_pid = 0;
    }
    return -rc;
}

void shim_stacks_begin(struct shim *shim, int kill_after)
{
    char path[1100];

    shim->kill_after_stacks |= kill_after;
    if (shim->stacks_pid != 0) {
        return;
    }
    if (shim->exit.known) {
        shim_stacks_end(shim, NULL);
        return;
    }
    stacks_path(shim, path, sizeof(path));
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640);
    int rc = fd < 0 ? -errno : stacks_spawn(shim, fd);

    if (rc == 0) {
        shim->stacks_deadline_ms = shim_now_ms() + bl_time_scaled_ms(SHIM_STACKS_MS);
        close(fd);
        return;
    }
    if (fd >= 0) {
        dprintf(fd, "no stacks: eu-stack: %s%s\n", bl_strerror(rc),
                rc == -ENOENT ? "; install elfutils to have them" : "");
        close(fd);
    }
    shim_stacks_end(shim, rc == -ENOENT ? "no stacks: eu-stack is not installed (elfutils)"
                                        : bl_strerror(rc));
}

void shim_stacks_end(struct shim *shim, const char *note)
{
    if (note) {
        shim_log_note(shim->log, "%s", note);
    }
    shim->stacks_pid = 0;
    shim->stacks_deadline_ms = 0;
    shim_link_push_stacked(shim, note ? BL_EABORTED : 0, note);
    if (shim->kill_after_stacks) {
        shim->kill_after_stacks = 0;
        shim_rank_kill(shim);
    }
}
