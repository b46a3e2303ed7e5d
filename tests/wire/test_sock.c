/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "wire/sock.h"

#define WAIT_MS 5000

static void pair_open(struct wire_sock pair[2])
{
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    wire_sock_init(&pair[0], fds[0]);
    wire_sock_init(&pair[1], fds[1]);
}

static void pair_close(struct wire_sock pair[2])
{
    wire_sock_close(&pair[0]);
    wire_sock_close(&pair[1]);
}

static int memfd_make(const char *text)
{
    int fd;
    assert_int_equal(bl_memfd_create("test", 4096, &fd, NULL), 0);
    assert_int_equal(pwrite(fd, text, strlen(text), 0), (ssize_t)strlen(text));
    return fd;
}

static void fd_expect(int fd, const char *text)
{
    char have[64] = "";
    assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    assert_int_equal(pread(fd, have, strlen(text), 0), (ssize_t)strlen(text));
    assert_string_equal(have, text);
    close(fd);
}

static void test_messages_arrive_in_order_with_their_descriptors(void **state)
{
    (void)state;
    struct wire_sock pair[2];
    pair_open(pair);
    int first = memfd_make("first");
    int others[2] = {memfd_make("second"), memfd_make("third")};
    struct wire_arena arena = {.request = 1, .arena = 11};
    struct wire_shim_keep keep = {.arena = 12};
    struct wire_shim_kill kill = {.signal = 9};
    assert_int_equal(
        wire_sock_send(&pair[0], WIRE_TYPE_SHIM_KILL, &kill, 0, 0, NULL, 0, WAIT_MS, NULL), 0);
    assert_int_equal(
        wire_sock_send(&pair[0], WIRE_TYPE_ARENA, &arena, 5, 6, &first, 1, WAIT_MS, NULL), 0);
    assert_int_equal(
        wire_sock_send(&pair[0], WIRE_TYPE_SHIM_KEEP, &keep, 0, 0, others, 2, WAIT_MS, NULL), 0);
    close(first);
    close(others[0]);
    close(others[1]);

    int fds[2];
    assert_int_equal(wire_sock_expect(&pair[1], WIRE_TYPE_SHIM_KILL, &kill, WAIT_MS, NULL), 0);
    assert_int_equal(kill.signal, 9);
    assert_int_equal(wire_sock_expect(&pair[1], WIRE_TYPE_ARENA, &arena, WAIT_MS, NULL), 0);
    assert_int_equal(arena.arena, 11);
    assert_int_equal(wire_sock_fds_take(&pair[1], fds, 1), 0);
    fd_expect(fds[0], "first");
    assert_int_equal(wire_sock_expect(&pair[1], WIRE_TYPE_SHIM_KEEP, &keep, WAIT_MS, NULL), 0);
    assert_int_equal(wire_sock_fds_take(&pair[1], fds, 3), BL_EPROTO);
    assert_int_equal(wire_sock_fds_take(&pair[1], fds, 2), 0);
    fd_expect(fds[0], "second");
    fd_expect(fds[1], "third");
    pair_close(pair);
}

static void test_descriptors_nobody_takes_are_bounded_and_closed(void **state)
{
    (void)state;
    struct wire_sock pair[2];
    struct wire_shim_keep keep = {.arena = 1};
    int fds[WIRE_FDS_MAX];
    int before = dup(0);
    pair_open(pair);
    for (int i = 0; i < WIRE_FDS_MAX; i++) {
        fds[i] = 0;
    }
    for (int i = 0; i < 3; i++) {
        assert_int_equal(wire_sock_send(&pair[0], WIRE_TYPE_SHIM_KEEP, &keep, 0, 0, fds,
                                        WIRE_FDS_MAX, WAIT_MS, NULL),
                         0);
    }
    int rc = 0;
    while (rc >= 0) { /* two times sixteen have room */
        rc = wire_sock_read(&pair[1]);
    }
    assert_int_equal(rc, BL_EPROTO);
    pair_close(pair);
    int after = dup(0);
    assert_int_equal(before + 1, after); /* nothing stayed open */
    close(before);
    close(after);
}

static void *reader_main(void *arg)
{
    struct wire_sock *sock = arg;
    struct wire_answer answer;
    struct wire_hello hello;
    intptr_t rc = wire_sock_expect(sock, WIRE_TYPE_ANSWER, &answer, WAIT_MS, NULL);
    if (!rc) {
        rc = strlen(answer.json) == 5u << 20 ? 0 : -1;
        wire_answer_free(&answer);
    }
    if (!rc) {
        rc = wire_sock_expect(sock, WIRE_TYPE_HELLO, &hello, WAIT_MS, NULL);
    }
    if (!rc) {
        wire_hello_free(&hello);
        int fd;
        rc = wire_sock_fds_take(sock, &fd, 1);
        if (!rc) {
            close(fd);
        }
    }
    return (void *)rc;
}

static void test_a_long_message_waits_for_its_reader(void **state)
{
    (void)state;
    struct wire_sock pair[2];
    struct wire_answer answer = {.json = malloc((5u << 20) + 1)};
    struct wire_hello hello = {.version = 1, .job_json = answer.json};
    pthread_t reader;
    void *rc;
    pair_open(pair);
    memset(answer.json, 'j', 5u << 20);
    answer.json[5u << 20] = 0;
    assert_int_equal(wire_sock_send(&pair[0], WIRE_TYPE_ANSWER, &answer, 0, 0, NULL, 0, 50, NULL),
                     BL_EDEADLINE);
    pair_close(pair);

    pair_open(pair);
    assert_int_equal(pthread_create(&reader, NULL, reader_main, &pair[1]), 0);
    assert_int_equal(
        wire_sock_send(&pair[0], WIRE_TYPE_ANSWER, &answer, 0, 0, NULL, 0, WAIT_MS, NULL), 0);
    int fd = memfd_make("x");
    assert_int_equal(wire_sock_send(&pair[0], WIRE_TYPE_HELLO, &hello, 0, 0, &fd, 1, WAIT_MS, NULL),
                     0);
    pthread_join(reader, &rc);
    assert_null(rc);
    close(fd);
    pair_close(pair);
    free(answer.json);
}

static void test_a_peer_that_does_not_read_is_given_up(void **state)
{
    (void)state;
    struct wire_sock pair[2];
    struct wire_answer answer = {.json = malloc((1u << 20) + 1)};
    int rc = 0;
    int posts = 0;
    pair_open(pair);
    memset(answer.json, 'j', 1u << 20);
    answer.json[1u << 20] = 0;
    for (; !rc && posts < 100; posts++) {
        rc = wire_sock_post(&pair[0], WIRE_TYPE_ANSWER, &answer, 0, 0, NULL);
    }
    assert_int_equal(rc, BL_ELIMIT);
    assert_true(posts < 12);
    pair_close(pair);
    free(answer.json);
}

static void test_receiving_ends_at_the_deadline_and_when_the_peer_goes(void **state)
{
    (void)state;
    struct wire_sock pair[2];
    struct wire_frame frame;
    struct wire_vote vote;
    struct bl_errmsg msg = {""};
    pair_open(pair);
    uint64_t begin = bl_now_ns();
    assert_int_equal(wire_sock_recv(&pair[0], &frame, 30, &msg), BL_EDEADLINE);
    assert_true(bl_now_ns() - begin >= 29000000);
    wire_sock_close(&pair[1]);
    assert_int_equal(wire_sock_expect(&pair[0], WIRE_TYPE_VOTE, &vote, WAIT_MS, &msg), BL_EPEER);
    assert_non_null(strstr(msg.text, "VOTE"));
    wire_sock_close(&pair[0]);
    wire_sock_close(&pair[0]);
    assert_int_equal(wire_sock_read(&pair[0]), BL_EPEER);
    assert_int_equal(wire_sock_flush(&pair[0]), BL_EPEER);
}

static void test_only_loopback_addresses_are_spoken_to(void **state)
{
    (void)state;
    struct bl_errmsg msg = {""};
    const char *const good[] = {"127.0.0.1:7420", "127.1.2.3:0", "localhost:1", "[::1]:65535"};
    const char *const bad[] = {"",
                               "127.0.0.1",
                               "127.0.0.1:",
                               ":1",
                               "example.org:1",
                               "127.0.0.1:65536",
                               "127.0.0.1:1x",
                               "[::1:1",
                               "127.0.0.1:-1",
                               "[]:1"};
    const char *const far[] = {"10.0.0.1:7420", "0.0.0.0:7420", "[::]:7420", "[2001:db8::1]:1"};
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        assert_int_equal(wire_tcp_addr_check(good[i], &msg), 0);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(wire_tcp_addr_check(bad[i], &msg), BL_EFORMAT);
    }
    for (size_t i = 0; i < sizeof(far) / sizeof(far[0]); i++) {
        assert_int_equal(wire_tcp_addr_check(far[i], &msg), BL_ECONFIG);
        assert_non_null(strstr(msg.text, far[i]));
        assert_non_null(strstr(msg.text, "TLS"));
        assert_int_equal(wire_tcp_listen(far[i], NULL, NULL), BL_ECONFIG);
        assert_int_equal(wire_tcp_connect(far[i], 10, NULL), BL_ECONFIG);
    }
}

static void test_tcp_port_zero_is_published_and_reached(void **state)
{
    (void)state;
    char addr[WIRE_ADDR_MAX];
    struct wire_sock pair[2];
    struct wire_vote vote = {.step = 42};
    int listener = wire_tcp_listen("127.0.0.1:0", addr, NULL);
    assert_true(listener >= 0);
    assert_int_equal(wire_sock_accept(listener), -EAGAIN);
    int fd = wire_tcp_connect(addr, WAIT_MS, NULL);
    assert_true(fd >= 0);
    struct pollfd ready = {.fd = listener, .events = POLLIN};
    assert_int_equal(poll(&ready, 1, WAIT_MS), 1);
    wire_sock_init(&pair[0], fd);
    wire_sock_init(&pair[1], wire_sock_accept(listener));
    assert_int_equal(wire_sock_post(&pair[0], WIRE_TYPE_VOTE, &vote, 0, 0, NULL), 0);
    memset(&vote, 0, sizeof(vote));
    assert_int_equal(wire_sock_expect(&pair[1], WIRE_TYPE_VOTE, &vote, WAIT_MS, NULL), 0);
    assert_int_equal(vote.step, 42);
    pair_close(pair);
    assert_int_equal(wire_tcp_listen(addr, NULL, NULL), -EADDRINUSE);
    close(listener);
    assert_int_equal(wire_tcp_connect(addr, WAIT_MS, NULL), -ECONNREFUSED);
}

/* A process of `uid` that connects to `addr`, then waits to be let go or closes at once. */
static pid_t connector_start(const char *addr, uid_t uid, int closes)
{
    pid_t pid = fork();
    if (pid == 0) {
        int fd = setuid(uid) ? -1 : wire_tcp_connect(addr, WAIT_MS, NULL);
        if (fd >= 0 && closes) {
            close(fd);
        }
        pause();
        _exit(1);
    }
    return pid;
}

static int accept_wait(int listener)
{
    struct pollfd ready = {.fd = listener, .events = POLLIN};
    assert_int_equal(poll(&ready, 1, WAIT_MS), 1);
    return wire_sock_accept(listener);
}

static void connector_end(pid_t pid, int fd)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    close(fd);
}

static void test_whose_a_tcp_connection_is(void **state)
{
    (void)state;
    static const char *const listen_at[] = {"127.0.0.1:0", "[::1]:0"};
    for (size_t i = 0; i < 2; i++) {
        char addr[WIRE_ADDR_MAX];
        struct bl_errmsg msg = {""};
        int listener = wire_tcp_listen(listen_at[i], addr, NULL);
        if (listener < 0 && i > 0) {
            continue; /* no IPv6 here */
        }
        pid_t pid = connector_start(addr, geteuid(), 0);
        int fd = accept_wait(listener);
        assert_int_equal(wire_tcp_peer_check(fd, &msg), 0);
        connector_end(pid, fd);
        pid = connector_start(addr, geteuid(), 1);
        fd = accept_wait(listener);
        struct pollfd gone = {.fd = fd, .events = POLLIN};
        assert_int_equal(poll(&gone, 1, WAIT_MS), 1);
        assert_true(wire_tcp_peer_check(fd, &msg) < 0); /* nobody's: not to be taken for root's */
        connector_end(pid, fd);
        if (geteuid() == 0) {
            pid = connector_start(addr, 65534, 0);
            fd = accept_wait(listener);
            assert_int_equal(wire_tcp_peer_check(fd, &msg), -EPERM);
            assert_non_null(strstr(msg.text, "65534"));
            connector_end(pid, fd);
        }
        close(listener);
    }
}

static void test_a_stale_socket_file_is_replaced_and_a_live_one_is_not(void **state)
{
    (void)state;
    char dir[] = "/tmp/belay-sock-XXXXXX";
    char path[64];
    struct bl_errmsg msg = {""};
    struct stat status;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/s", dir);
    int first = wire_unix_listen(path, &msg);
    assert_true(first >= 0);
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
    assert_int_equal(wire_unix_listen(path, &msg), -EADDRINUSE);
    assert_non_null(strstr(msg.text, path));
    close(first);
    assert_int_equal(wire_unix_connect(path, NULL), -ECONNREFUSED);
    int second = wire_unix_listen(path, &msg);
    assert_true(second >= 0);
    int fd = wire_unix_connect(path, NULL);
    assert_true(fd >= 0);
    assert_int_equal(wire_unix_peer_check(fd, NULL), 0);
    close(fd);
    close(second);
    unlink(path);
    FILE *file = fopen(path, "w"); /* not a socket: never removed */
    assert_non_null(file);
    fclose(file);
    assert_int_equal(wire_unix_listen(path, &msg), -EADDRINUSE);
    assert_int_equal(stat(path, &status), 0);
    unlink(path);
    rmdir(dir);
    memset(path, 'x', sizeof(path));
    char longer[200];
    memset(longer, 'x', sizeof(longer));
    longer[199] = 0;
    assert_int_equal(wire_unix_listen(longer, &msg), BL_ECONFIG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_messages_arrive_in_order_with_their_descriptors),
        cmocka_unit_test(test_descriptors_nobody_takes_are_bounded_and_closed),
        cmocka_unit_test(test_a_long_message_waits_for_its_reader),
        cmocka_unit_test(test_a_peer_that_does_not_read_is_given_up),
        cmocka_unit_test(test_receiving_ends_at_the_deadline_and_when_the_peer_goes),
        cmocka_unit_test(test_only_loopback_addresses_are_spoken_to),
        cmocka_unit_test(test_tcp_port_zero_is_published_and_reached),
        cmocka_unit_test(test_whose_a_tcp_connection_is),
        cmocka_unit_test(test_a_stale_socket_file_is_replaced_and_a_live_one_is_not),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
