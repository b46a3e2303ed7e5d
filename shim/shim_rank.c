/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "shim/shim.h"

#define RANK_PIPE_BYTES (1 << 20)  /* room for a burst while the shim is not scheduled */
#define RANK_PID_MAX    (4u << 20) /* the kernel's own bound of pid_max */

struct rank_failure { /* sent up by a child that could not become the rank */
    int error;
    char what[64];
};

static void child_fail(int fd, const char *what)
{
    struct rank_failure failure = {.error = errno};

    snprintf(failure.what, sizeof(failure.what), "%s", what);
    BL_IGNORE(write(fd, &failure, sizeof(failure)) < 0, "then the exit code 127 has to do");
    _exit(127);
}

/* In the child. The parent's death signal is armed before the parent is checked: a shim that died
 * in between is then seen by the check. */
static void child_run(const struct shim *shim, pid_t parent, int out, int status)
{
    sigset_t none;
    char fd_text[16];

    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) {
        child_fail(status, "PR_SET_PDEATHSIG");
    }
    if (getppid() != parent) {
        _exit(127);
    }
    setpgid(0, 0);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    int null = open("/dev/null", O_RDONLY);

    if (null < 0 || dup2(null, 0) < 0 || dup2(out, 1) < 0 || dup2(out, 2) < 0) {
        child_fail(status, "redirect");
    }
    if (null > 2) {
        close(null);
    }
    int page = fcntl(shim->options.page_fd, F_DUPFD, 3);

    if (page < 0) {
        child_fail(status, "beat page");
    }
    snprintf(fd_text, sizeof(fd_text), "%d", page);
    setenv("BELAY_PAGE_FD", fd_text, 1);
    if (chdir(shim->options.cwd) != 0) {
        child_fail(status, "chdir to the job's directory");
    }
    execvp(shim->options.argv[0], shim->options.argv);
    child_fail(status, "run the command");
}

/* Waits for the child's exec: end of file is success. */
static int rank_started(struct shim *shim, int status_fd, struct bl_errmsg *msg)
{
    struct rank_failure failure;
    ssize_t n;

    do {
        n = read(status_fd, &failure, sizeof(failure));
    } while (n < 0 && errno == EINTR);
    if (n == (ssize_t)sizeof(failure)) {
        failure.what[sizeof(failure.what) - 1] = '\0';
        return bl_err_code(msg, -failure.error, "%s %s", failure.what, shim->options.argv[0]);
    }
    return 0;
}

int shim_rank_start(struct shim *shim, struct bl_errmsg *msg)
{
    int out[2], status[2];
    pid_t parent = getpid();

    if (pipe2(out, O_CLOEXEC) != 0 || pipe2(status, O_CLOEXEC) != 0) {
        return bl_err_code(msg, -errno, "pipe");
    }
    BL_IGNORE(fcntl(out[0], F_SETPIPE_SZ, RANK_PIPE_BYTES) < 0, "the default size works too");
    BL_IGNORE(fcntl(out[0], F_SETFL, O_NONBLOCK) < 0, "cannot fail on a pipe");
    pid_t pid = fork();

    if (pid < 0) {
        return bl_err_code(msg, -errno, "fork");
    }
    if (pid == 0) {
        child_run(shim, parent, out[1], status[1]);
    }
    close(out[1]);
    close(status[1]);
    shim->pid = pid;
    shim->started_ms = shim_now_ms();
    shim->pipe_fd = out[0];
    shim->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (shim->pidfd >= 0) {
        BL_IGNORE(fcntl(shim->pidfd, F_SETFD, FD_CLOEXEC) < 0, "it is so already");
    }
    int rc = rank_started(shim, status[0], msg);

    close(status[0]);
    return rc;
}

/* The parent of `pid`, or 0. The name in the second field may hold anything: the last ')' ends it.
 */
static pid_t parent_of(pid_t pid)
{
    char path[64], text[512];

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0) {
        return 0;
    }
    ssize_t n = read(fd, text, sizeof(text) - 1);

    close(fd);
    if (n <= 0) {
        return 0;
    }
    text[n] = '\0';
    char *end = strrchr(text, ')');
    char state;
    int parent;

    if (!end || sscanf(end + 1, " %c %d", &state, &parent) != 2 || state == 'Z') {
        return 0;
    }
    return parent;
}

/* Processes of this machine, as many as there are; only those below this one count. */
struct tree {
    struct tree_process {
        pid_t pid, parent;
    } * all;
    size_t count, capacity;
    uint8_t *ours; /* a bit for each pid */
};

static int tree_is_ours(const struct tree *tree, pid_t pid)
{
    return tree->ours[pid / 8] >> (pid % 8) & 1;
}

static void tree_mark(struct tree *tree, pid_t pid)
{
    tree->ours[pid / 8] |= (uint8_t)(1 << (pid % 8));
}

static void tree_add(struct tree *tree, pid_t pid, pid_t parent)
{
    if (tree->count == tree->capacity) {
        size_t grown = tree->capacity ? 2 * tree->capacity : 1024;
        struct tree_process *moved = realloc(tree->all, grown * sizeof(*moved));

        if (!moved) { /* those found so far are killed, the next look finds the others */
            return;
        }
        tree->all = moved;
        tree->capacity = grown;
    }
    tree->all[tree->count++] = (struct tree_process){pid, parent};
}

/* Marks the children of this process and all below them. */
static void tree_find(struct tree *tree, const struct shim *shim)
{
    DIR *proc = opendir("/proc");
    struct dirent *entry;
    int changed = 1;

    while (proc && (entry = readdir(proc))) {
        pid_t pid = (pid_t)atoi(entry->d_name);
        pid_t parent = pid > 0 && (uint32_t)pid < RANK_PID_MAX ? parent_of(pid) : 0;

        if (parent > 0 && pid != shim->stacks_pid) {
            tree_add(tree, pid, parent);
        }
    }
    if (proc) {
        closedir(proc);
    }
    while (changed) {
        changed = 0;
        for (size_t i = 0; i < tree->count; i++) {
            const struct tree_process *one = &tree->all[i];

            if (!tree_is_ours(tree, one->pid) &&
                (one->parent == getpid() || tree_is_ours(tree, one->parent))) {
                tree_mark(tree, one->pid);
                changed = 1;
            }
        }
    }
}

/* Kills every process below this one: the shim is their subreaper, so that none can leave the tree.
 * A process may fork while we look: callers repeat until none is found. */
static int tree_kill(const struct shim *shim)
{
    struct tree tree = {.ours = calloc(RANK_PID_MAX / 8, 1)}; /* pages that are touched, no more */
    int found = 0;

    if (!tree.ours) {
        return 0;
    }
    tree_find(&tree, shim);
    for (size_t i = 0; i < tree.count; i++) {
        if (tree_is_ours(&tree, tree.all[i].pid)) {
            found += kill(tree.all[i].pid, SIGKILL) == 0;
        }
    }
    free(tree.all);
    free(tree.ours);
    return found;
}

void shim_rank_kill(struct shim *shim)
{
    if (!shim->exit.known) {
        kill(shim->pid, SIGKILL);
        kill(-shim->pid, SIGKILL);
    }
    tree_kill(shim);
}

int shim_rank_sweep(struct shim *shim)
{
    return tree_kill(shim);
}
