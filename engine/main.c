/* SPDX-License-Identifier: Apache-2.0 */
/* belay-engine: speaks with its daemon over one end of a socket pair; the workers do the rest. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/failpoint.h"
#include "base/log.h"
#include "engine/engine.h"
#include "wire/sock.h"

static void usage(FILE *to)
{
    fputs("usage: belay-engine --fd N [--memory MIB]\n"
          "\n"
          "Writes, reads and retires checkpoints for belayd, which starts it with one end\n"
          "of a socket pair as descriptor N. Not for use by hand; see belay-engine(8).\n"
          "\n"
          "  --fd N       the descriptor (default 3)\n"
          "  --memory MIB what it may take beside the ranks' memory (default 416)\n"
          "  --version    print the version\n"
          "  --help       print this\n",
          to);
}

static int read_frames(struct engine *engine, struct engine_collected *collected,
                       struct wire_sock *sock, struct bl_errmsg *msg)
{
    struct wire_frame frame;
    int rc = wire_sock_read(sock);

    if (rc < 0) {
        return rc;
    }
    while ((rc = wire_sock_next(sock, &frame, msg)) > 0) {
        rc = engine_question(engine, collected, sock, &frame, msg);
        if (rc < 0) {
            return rc;
        }
    }
    return rc;
}

static int post_answers(struct engine *engine, struct wire_sock *sock, struct bl_errmsg *msg)
{
    struct engine_answer *answer;
    uint64_t count;
    int rc = 0;

    BL_IGNORE(read(engine->wake_fd, &count, sizeof(count)) < 0, "nobody woke us");
    while (rc == 0 && (answer = engine_answer_take(engine)) != NULL) {
        rc = wire_sock_post(sock, answer->type, answer->message, 0, 0, msg);
        engine_answer_free(answer);
    }
    return rc;
}

static int say_hello(struct wire_sock *sock, struct bl_errmsg *msg)
{
    struct wire_engine_hello hello = {.version = WIRE_FRAME_VERSION, .pid = (uint32_t)getpid()};

    snprintf(hello.build, sizeof(hello.build), "%s", BELAY_VERSION);
    return wire_sock_post(sock, WIRE_TYPE_ENGINE_HELLO, &hello, 0, 0, msg);
}

/* Until the daemon closes its end (0), or something breaks. */
static int serve(struct engine *engine, struct wire_sock *sock, struct bl_errmsg *msg)
{
    struct engine_collected collected = {0};
    int rc = say_hello(sock, msg);

    while (rc == 0) {
        int left = wire_sock_flush(sock);
        struct pollfd polls[2] = {
            {sock->fd, (short)(left > 0 ? POLLIN | POLLOUT : POLLIN), 0},
            {engine->wake_fd, POLLIN, 0},
        };

        if (left < 0) {
            rc = left;
            break;
        }
        if (poll(polls, 2, -1) < 0 && errno != EINTR) {
            rc = bl_err_code(msg, -errno, "poll");
            break;
        }
        if ((polls[1].revents & POLLIN) != 0) {
            rc = post_answers(engine, sock, msg);
        }
        if (rc == 0 && (polls[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
            rc = read_frames(engine, &collected, sock, msg);
        }
    }
    engine_collected_close(&collected);
    return rc == BL_EPEER || rc == -ECONNRESET || rc == -EPIPE ? 0 : rc;
}

struct options {
    int fd;
    uint64_t memory_mib;
};

/* -1: go on; else the exit code. */
static int parse_number(const char *option, const char *text, uint64_t min, uint64_t max,
                        uint64_t *ret)
{
    char *end = NULL;
    unsigned long long value = text == NULL ? 0 : strtoull(text, &end, 10);

    if (text == NULL || text[0] < '0' || text[0] > '9' || *end != '\0' || value < min ||
        value > max) {
        fprintf(stderr, "belay-engine: %s %s: a number from %llu to %llu expected\n", option,
                text == NULL ? "" : text, (unsigned long long)min, (unsigned long long)max);
        return 2;
    }
    *ret = value;
    return -1;
}

static int parse_args(int argc, char **argv, struct options *ret)
{
    uint64_t fd = 3;
    int code = -1;

    *ret = (struct options){.memory_mib = ENGINE_MEMORY_BYTES >> 20};
    for (int i = 1; code < 0 && i < argc; i += 2) {
        if (strcmp(argv[i], "--help") == 0) {
            usage(stdout);
            return 0;
        }
        if (strcmp(argv[i], "--version") == 0) {
            printf("belay-engine %s\n", BELAY_VERSION);
            return 0;
        }
        if (strcmp(argv[i], "--fd") == 0) {
            code = parse_number(argv[i], argv[i + 1], 0, 1 << 20, &fd);
        } else if (strcmp(argv[i], "--memory") == 0) {
            code = parse_number(argv[i], argv[i + 1], ENGINE_MEMORY_BYTES_MIN >> 20, 1 << 30,
                                &ret->memory_mib);
        } else {
            fprintf(stderr, "belay-engine: %s: unknown option; see belay-engine --help\n", argv[i]);
            return 2;
        }
    }
    ret->fd = (int)fd;
    return code;
}

/* A write of many arenas has many descriptors. */
static void files_allow(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        BL_IGNORE(setrlimit(RLIMIT_NOFILE, &limit) < 0, "few arenas fit all the same");
    }
}

int main(int argc, char **argv)
{
    static struct engine engine;
    struct bl_errmsg why = {0};
    struct wire_sock sock;
    struct options options;
    int code = parse_args(argc, argv, &options);
    int rc;

    if (code >= 0) {
        return code;
    }
    signal(SIGPIPE, SIG_IGN);
    signal(SIGINT, SIG_IGN); /* the terminal's: the daemon decides, and closes the socket */
    files_allow();
    rc = wire_unix_peer_check(options.fd, &why);
    if (rc < 0) {
        fprintf(stderr, "belay-engine: descriptor %d is no socket of a daemon: %s\n", options.fd,
                why.text);
        return 3;
    }
    engine_process_kind(ENGINE_NICE_WRITER);
    engine.memory_bytes = options.memory_mib << 20;
    rc = engine_budget_check(engine.memory_bytes, &why);
    rc = rc < 0 ? rc : BL_FAILPOINT("engine-begin");
    rc = rc < 0 ? rc : engine_start(&engine, &why);
    if (rc < 0) {
        fprintf(stderr, "belay-engine: %s\n", why.text[0] != '\0' ? why.text : bl_strerror(rc));
        return 3;
    }
    wire_sock_init(&sock, options.fd);
    rc = serve(&engine, &sock, &why);
    if (rc < 0) {
        bl_log(BL_LOG_ERROR, "engine", "%s", why.text[0] != '\0' ? why.text : bl_strerror(rc));
    }
    if (!engine_stop(&engine)) {
        _exit(rc < 0 ? 3 : 0); /* a worker hangs in a disk; the kernel ends it when it can */
    }
    wire_sock_close(&sock);
    return rc < 0 ? 3 : 0;
}
