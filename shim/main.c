/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "shim/shim.h"

enum { POLL_PIPE, POLL_LISTEN, POLL_SIGNAL, POLL_LIFE, POLL_CLIENTS };

static const char help[] =
    "Usage: belay-shim --socket PATH --exit-file PATH --log PATH --page-fd N\n"
    "                  --cwd DIR -- COMMAND [ARGUMENT...]\n"
    "\n"
    "The parent of one rank, started by belayd and not by hand. It outlives belayd,\n"
    "writes the rank's output to a log (rotated, 64 MiB x 4), keeps duplicates of its\n"
    "memory, records its exit status, and dies together with it.\n"
    "\n"
    "  --socket PATH     where belayd attaches (same user or root only)\n"
    "  --exit-file PATH  the exit record, written durably before anybody is told;\n"
    "                    stacks go beside it, into NAME.stacks\n"
    "  --log PATH        the rank's standard output and standard error\n"
    "  --page-fd N       the descriptor of the rank's beat page\n"
    "  --cwd DIR         the rank's working directory\n"
    "  --help, --version\n"
    "\n"
    "Example (page: an open memfd of one page as descriptor 3):\n"
    "  belay-shim --socket j/0.sock --exit-file j/0.exit --log 0.log --page-fd 3 \\\n"
    "             --cwd /data/run -- belay-train --job job.yaml\n";

uint64_t shim_now_ms(void)
{
    return bl_now_ns() / 1000000;
}

static int options_parse(struct shim_options *options, int argc, char **argv)
{
    static const struct option longs[] = {
        {"socket", required_argument, NULL, 's'}, {"exit-file", required_argument, NULL, 'e'},
        {"log", required_argument, NULL, 'l'},    {"page-fd", required_argument, NULL, 'p'},
        {"cwd", required_argument, NULL, 'c'},    {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'v'},      {NULL, 0, NULL, 0}};
    int opt;

    options->page_fd = -1;
    while ((opt = getopt_long(argc, argv, "+h", longs, NULL)) != -1) {
        switch (opt) {
        case 's':
            options->socket_path = optarg;
            break;
        case 'e':
            options->exit_path = optarg;
            break;
        case 'l':
            options->log_path = optarg;
            break;
        case 'p':
            options->page_fd = atoi(optarg);
            break;
        case 'c':
            options->cwd = optarg;
            break;
        case 'h':
            fputs(help, stdout);
            exit(0);
        case 'v':
            printf("belay-shim %s\n", BELAY_VERSION);
            exit(0);
        default:
            return 2;
        }
    }
    options->argv = argv + optind;
    const char *missing = !options->socket_path  ? "--socket"
                          : !options->exit_path  ? "--exit-file"
                          : !options->log_path   ? "--log"
                          : options->page_fd < 0 ? "--page-fd"
                          : !options->cwd        ? "--cwd"
                          : optind == argc       ? "the command"
                                                 : NULL;
    if (missing) {
        fprintf(stderr, "belay-shim: %s is missing\n", missing);
        return 2;
    }
    const char *incarnation = getenv("BELAY_INCARNATION");

    options->incarnation = incarnation ? strtoull(incarnation, NULL, 16) : 0;
    return 0;
}

/* Everything that is in the pipe now, but not for ever: a rank that never stops writing must not
 * keep the loop from its other work. */
static void pipe_drain(struct shim *shim)
{
    static char chunk[65536];

    for (int i = 0; i < 16 && shim->pipe_fd >= 0; i++) {
        ssize_t n = read(shim->pipe_fd, chunk, sizeof(chunk));

        if (n > 0) {
            shim->log_bytes += (uint64_t)n;
            shim_log_put(shim->log, chunk, (size_t)n);
        } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
            close(shim->pipe_fd);
            shim->pipe_fd = -1;
        } else {
            return;
        }
    }
}

static void rank_gone(struct shim *shim, int status)
{
    for (int i = 0; i < 8 && shim_rank_sweep(shim) > 0; i++) {
    }
    pipe_drain(shim);
    shim_exit_record(shim, status);
    shim_link_push_exit(shim);
    if (WIFSIGNALED(status)) {
        shim_log_note(shim->log, "rank ended by signal %d (%s)%s", WTERMSIG(status),
                      strsignal(WTERMSIG(status)), WCOREDUMP(status) ? ", core dumped" : "");
    } else {
        shim_log_note(shim->log, "rank ended with code %d", WEXITSTATUS(status));
    }
}

static void children_reap(struct shim *shim)
{
    int status;
    pid_t pid;

    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid == shim->pid && !shim->exit.known) {
            rank_gone(shim, status);
        } else if (pid == shim->stacks_pid) {
            shim_stacks_end(shim, WIFEXITED(status) && WEXITSTATUS(status) == 0
                                      ? NULL
                                      : "eu-stack could not read all stacks");
        }
    }
}

static int socket_is_there(const struct shim *shim)
{
    struct stat st;

    return lstat(shim->options.socket_path, &st) == 0 && S_ISSOCK(st.st_mode);
}

static void loop_timers(struct shim *shim, uint64_t *quiet_ms)
{
    uint64_t now = shim_now_ms();

    if (shim->stacks_pid != 0 && now >= shim->stacks_deadline_ms) {
        kill(shim->stacks_pid, SIGKILL);
        shim_stacks_end(shim, "no stacks within the deadline: eu-stack was killed");
    }
    if (now - *quiet_ms >= SHIM_QUIET_MS) {
        *quiet_ms = now;
        shim_log_flush(shim->log);
    }
}

static void loop_once(struct shim *shim, uint64_t *quiet_ms)
{
    struct pollfd fds[POLL_CLIENTS + SHIM_CLIENTS_MAX] = {
        [POLL_PIPE] = {.fd = shim->pipe_fd, .events = POLLIN},
        [POLL_LISTEN] = {.fd = shim->listen_fd, .events = POLLIN},
        [POLL_SIGNAL] = {.fd = shim->signal_fd, .events = POLLIN},
        [POLL_LIFE] = {.fd = shim->life_fd, .events = POLLIN}};
    uint32_t index[SHIM_CLIENTS_MAX];
    uint32_t count = shim_link_poll(shim, fds + POLL_CLIENTS, index);
    struct signalfd_siginfo info;
    uint64_t ticks;

    if (poll(fds, POLL_CLIENTS + count, shim->exit.known ? SHIM_ORPHAN_MS : SHIM_QUIET_MS) < 0) {
        return;
    }
    if (fds[POLL_LIFE].revents && read(shim->life_fd, &ticks, sizeof(ticks)) > 0) {
        /* Where only the thread ended that joined, the process is to end too: it is told to be
         * dead from here on. For one that is dying this changes nothing, not even its status. */
        if (!shim->exit.known) {
            kill(shim->pid, SIGKILL);
        }
        shim->suspected = 1;
        shim_exit_guess(shim);
        shim_link_push_suspect(shim);
    }
    if (fds[POLL_SIGNAL].revents) {
        while (read(shim->signal_fd, &info, sizeof(info)) > 0) {
        }
        children_reap(shim);
    }
    if (fds[POLL_PIPE].revents) {
        pipe_drain(shim);
        *quiet_ms = shim_now_ms();
    }
    for (uint32_t i = 0; i < count; i++) {
        shim_link_event(shim, index[i], fds[POLL_CLIENTS + i].revents);
    }
    if (fds[POLL_LISTEN].revents) {
        shim_link_accept(shim);
    }
    loop_timers(shim, quiet_ms);
}

/* The shim is told to leave, or its rank is gone and nobody can ever ask for it: the state
 * directory was removed. */
static int is_over(const struct shim *shim)
{
    return shim->exit.known && (shim->released || !socket_is_there(shim));
}

static int shim_setup(struct shim *shim, struct bl_errmsg *msg)
{
    sigset_t set;

    setsid(); /* fails when the daemon did it already */
    signal(SIGPIPE, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
    shim->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (shim->signal_fd < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) {
        return bl_err_code(msg, -errno, "set up");
    }
    BL_IGNORE(fcntl(shim->options.page_fd, F_SETFD, FD_CLOEXEC) < 0, "mapping it will tell");
    int rc = shim_life_prepare(shim, msg);

    return rc ? rc : shim_link_listen(shim, msg);
}

int main(int argc, char **argv)
{
    static struct shim shim = {.pidfd = -1, .pipe_fd = -1, .listen_fd = -1};
    struct bl_errmsg msg = {{0}};
    uint64_t quiet_ms = shim_now_ms();
    int rc = options_parse(&shim.options, argc, argv);

    if (rc != 0) {
        return rc;
    }
    rc = shim_setup(&shim, &msg);
    if (rc == 0) { /* forked before there is a second thread */
        rc = shim_rank_start(&shim, &msg);
    }
    if (shim.pid == 0 && rc != 0) {
        fprintf(stderr, "belay-shim: %s\n", msg.text);
        return 3;
    }
    if (rc != 0) { /* the command could not be run: told like an exit, the log says why */
        fprintf(stderr, "belay-shim: %s\n", msg.text);
    }
    struct bl_errmsg more = {{0}};

    if (shim_log_open(&shim.log, shim.options.log_path, SHIM_LOG_FILE_BYTES, &more) != 0 ||
        shim_life_watch(&shim, &more) != 0) {
        fprintf(stderr, "belay-shim: %s\n", more.text);
        kill(shim.pid, SIGKILL);
        return 3;
    }
    if (rc != 0) {
        shim_log_note(shim.log, "%s", msg.text);
    }
    children_reap(&shim);
    while (!is_over(&shim)) {
        loop_once(&shim, &quiet_ms);
    }
    shim_link_close(&shim);
    shim_log_close(shim.log);
    return 0;
}
