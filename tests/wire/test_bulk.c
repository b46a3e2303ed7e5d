/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <unistd.h>

#include "base/mem.h"
#include "wire/bulk.h"
#include "wire/sock.h"

#define WAIT_MS 10000
#define BYTES   (24u << 20)
#define RUN     5u
#define ARENA   77u

static struct wire_bulk *bulk;
static char addr[WIRE_ADDR_MAX];
static uint32_t *memory;
static const uint64_t key[2] = {11, 12};

static int setup(void **state)
{
    (void)state;
    int fd;
    assert_int_equal(bl_memfd_create("arena", BYTES, &fd, NULL), 0);
    memory = bl_mem_map(fd, BYTES, 1);
    assert_non_null(memory);
    for (uint32_t i = 0; i < BYTES / 4; i++) {
        memory[i] = i * 2654435761u;
    }
    assert_int_equal(wire_bulk_start(&bulk, "127.0.0.1:0", "there", addr, NULL), 0);
    assert_int_equal(wire_bulk_arena_add(bulk, RUN, ARENA, fd, BYTES), 0);
    assert_int_equal(wire_bulk_arena_add(bulk, RUN, ARENA, fd, BYTES), 0);
    assert_int_equal(wire_bulk_key_set(bulk, RUN, 3, key), 0);
    close(fd);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    wire_bulk_stop(bulk);
    bl_mem_free(memory, BYTES);
    return 0;
}

static void reader_open(struct wire_sock *sock)
{
    struct wire_hello hello = {.version = 1, .role = WIRE_ROLE_BULK};
    int fd = wire_tcp_connect(addr, WAIT_MS, NULL);
    assert_true(fd >= 0);
    wire_sock_init(sock, fd);
    assert_int_equal(wire_sock_send(sock, WIRE_TYPE_HELLO, &hello, 0, 0, NULL, 0, WAIT_MS, NULL),
                     0);
    assert_int_equal(wire_sock_expect(sock, WIRE_TYPE_HELLO, &hello, WAIT_MS, NULL), 0);
    assert_string_equal(hello.node, "there");
    wire_hello_free(&hello);
}

static struct wire_bulk_read question_of(uint64_t offset, uint64_t bytes)
{
    struct wire_bulk_read question = {.run = RUN,
                                      .generation = 3,
                                      .key = {key[0], key[1]},
                                      .arena = ARENA,
                                      .offset = offset,
                                      .bytes = bytes};
    return question;
}

static int ask(struct wire_sock *sock, const struct wire_bulk_read *question)
{
    struct wire_bulk_data answer;
    assert_int_equal(
        wire_sock_send(sock, WIRE_TYPE_BULK_READ, question, 0, 0, NULL, 0, WAIT_MS, NULL), 0);
    assert_int_equal(wire_sock_expect(sock, WIRE_TYPE_BULK_DATA, &answer, WAIT_MS, NULL), 0);
    assert_true(answer.rc || answer.bytes == question->bytes);
    assert_true(!answer.rc || answer.text[0]);
    return answer.rc;
}

static void test_ranges_come_as_they_lie(void **state)
{
    (void)state;
    struct wire_sock sock;
    char *out = malloc(BYTES);
    const uint64_t ranges[][2] = {{0, BYTES}, {4096, 1}, {BYTES - 3, 3}, {BYTES, 0}, {17, 9999999}};
    reader_open(&sock);
    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
        struct wire_bulk_read question = question_of(ranges[i][0], ranges[i][1]);
        assert_int_equal(ask(&sock, &question), 0);
        memset(out, 0, BYTES);
        assert_int_equal(wire_sock_recv_raw(&sock, out, ranges[i][1], WAIT_MS, NULL), 0);
        assert_memory_equal(out, (char *)memory + ranges[i][0], ranges[i][1]);
    }
    wire_sock_close(&sock);
    free(out);
}

static void test_questions_that_wait_are_answered_in_turn(void **state)
{
    (void)state;
    struct wire_sock sock;
    struct wire_bulk_data answer;
    char *out = malloc(1u << 20);
    reader_open(&sock);
    for (uint64_t i = 0; i < 8; i++) {
        struct wire_bulk_read question = question_of(i * 1000, 1u << 20);
        assert_int_equal(wire_sock_post(&sock, WIRE_TYPE_BULK_READ, &question, 0, 0, NULL), 0);
    }
    for (uint64_t i = 0; i < 8; i++) {
        assert_int_equal(wire_sock_expect(&sock, WIRE_TYPE_BULK_DATA, &answer, WAIT_MS, NULL), 0);
        assert_int_equal(answer.bytes, 1u << 20);
        assert_int_equal(wire_sock_recv_raw(&sock, out, 1u << 20, WAIT_MS, NULL), 0);
        assert_memory_equal(out, (char *)memory + i * 1000, 1u << 20);
    }
    wire_sock_close(&sock);
    free(out);
}

static void test_what_may_not_be_read_is_refused_and_the_next_is_answered(void **state)
{
    (void)state;
    struct wire_sock sock;
    char byte;
    reader_open(&sock);
    struct wire_bulk_read question = question_of(0, 1);
    question.key[1]++;
    assert_int_equal(ask(&sock, &question), BL_EGEN);
    question = question_of(0, 1);
    question.generation = 2;
    assert_int_equal(ask(&sock, &question), BL_EGEN);
    question = question_of(0, 1);
    question.run++;
    assert_int_equal(ask(&sock, &question), BL_EGEN);
    question = question_of(0, 1);
    question.arena++;
    assert_int_equal(ask(&sock, &question), -ENOENT);
    question = question_of(BYTES, 1);
    assert_int_equal(ask(&sock, &question), -EINVAL);
    question = question_of(UINT64_MAX - 1, 4);
    assert_int_equal(ask(&sock, &question), -EINVAL);
    question = question_of(1, UINT64_MAX);
    assert_int_equal(ask(&sock, &question), -EINVAL);
    question = question_of(3, 1);
    assert_int_equal(ask(&sock, &question), 0);
    assert_int_equal(wire_sock_recv_raw(&sock, &byte, 1, WAIT_MS, NULL), 0);
    assert_int_equal(byte, ((char *)memory)[3]);

    assert_int_equal(wire_bulk_key_set(bulk, RUN, 4, key), 0);
    assert_int_equal(ask(&sock, &question), BL_EGEN);
    assert_int_equal(wire_bulk_key_set(bulk, RUN, 0, key), 0);
    question.generation = 4;
    assert_int_equal(ask(&sock, &question), BL_EGEN);
    wire_sock_close(&sock);
}

static void test_a_read_under_way_survives_the_arenas_removal(void **state)
{
    (void)state;
    struct wire_sock sock;
    char *out = malloc(BYTES);
    reader_open(&sock);
    struct wire_bulk_read question = question_of(0, BYTES);
    assert_int_equal(ask(&sock, &question), 0);
    wire_bulk_arena_remove(bulk, RUN, ARENA);
    wire_bulk_arena_remove(bulk, RUN, ARENA);
    assert_int_equal(wire_sock_recv_raw(&sock, out, BYTES, WAIT_MS, NULL), 0);
    assert_memory_equal(out, memory, BYTES);
    assert_int_equal(ask(&sock, &question), -ENOENT);
    wire_sock_close(&sock);
    free(out);
}

static void test_strangers_are_closed(void **state)
{
    (void)state;
    struct wire_sock sock;
    struct wire_frame frame;
    struct wire_bulk_read question = question_of(0, 1);
    int fd = wire_tcp_connect(addr, WAIT_MS, NULL);
    assert_true(fd >= 0);
    wire_sock_init(&sock, fd);
    assert_int_equal(
        wire_sock_send(&sock, WIRE_TYPE_BULK_READ, &question, 0, 0, NULL, 0, WAIT_MS, NULL), 0);
    assert_int_equal(wire_sock_recv(&sock, &frame, WAIT_MS, NULL), BL_EPEER);
    wire_sock_close(&sock);
    reader_open(&sock); /* left open and in the middle of a read: stop closes it */
    question = question_of(0, BYTES);
    assert_int_equal(ask(&sock, &question), 0);
    wire_bulk_stop(bulk);
    bulk = NULL;
    wire_sock_close(&sock);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_ranges_come_as_they_lie, setup, teardown),
        cmocka_unit_test_setup_teardown(test_questions_that_wait_are_answered_in_turn, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(
            test_what_may_not_be_read_is_refused_and_the_next_is_answered, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_read_under_way_survives_the_arenas_removal, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_strangers_are_closed, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
