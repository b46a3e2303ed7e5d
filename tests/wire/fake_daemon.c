/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/wire/fake_daemon.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/extent_rows.h"
#include "base/mem.h"
#include "wire/slot.h"

#define FAKE_DEADLINE_MS 20000

static uint64_t now_ms(void)
{
    return bl_now_ns() / 1000000;
}

/* ---- ranks ---- */

static struct wire_page *page_make(int *ret_fd)
{
    assert_int_equal(bl_memfd_create("page", WIRE_PAGE_BYTES, ret_fd, NULL), 0);
    struct wire_page *page = bl_mem_map(*ret_fd, WIRE_PAGE_BYTES, 1);
    pthread_mutexattr_t attr;
    assert_non_null(page);
    page->magic = WIRE_PAGE_MAGIC;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&page->life, &attr);
    pthread_mutexattr_destroy(&attr);
    return page;
}

int fake_rank_start(struct fake *fake)
{
    assert_true(fake->rank_count < FAKE_RANKS_MAX);
    int index = (int)fake->rank_count++;
    struct fake_rank *rank = &fake->ranks[index];
    int page_fd;
    memset(rank, 0, sizeof(*rank));
    rank->sock.fd = -1;
    rank->index = index;
    rank->incarnation = bl_random_u64() | 1;
    rank->page = page_make(&page_fd);
    fflush(NULL);
    rank->pid = fork();
    assert_true(rank->pid >= 0);
    if (rank->pid == 0) {
        char text[32];
        setenv("BELAY_SOCKET", fake->path, 1);
        setenv("BELAY_JOB", "test", 1);
        snprintf(text, sizeof(text), "%016llx", (unsigned long long)rank->incarnation);
        setenv("BELAY_INCARNATION", text, 1);
        snprintf(text, sizeof(text), "%d", page_fd);
        setenv("BELAY_PAGE_FD", text, 1);
        if (fake->fail) {
            setenv("BELAY_FAIL", fake->fail, 1);
        }
        close(fake->listener);
        close(fake->bulk_listener);
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* also when the test itself fails */
        fake_rank_main(fake->shared, index, FAKE_FUNCTION_ID + (fake->foreign != 0));
    }
    close(page_fd);
    return index;
}

void fake_kill(struct fake *fake, int index)
{
    struct fake_rank *rank = &fake->ranks[index];
    kill(rank->pid, SIGKILL);
    assert_int_equal(waitpid(rank->pid, &rank->exit_status, 0), rank->pid);
    assert_int_equal(pthread_mutex_trylock(&rank->page->life), EOWNERDEAD);
    rank->dead = 1;
    wire_sock_close(&rank->sock);
}

static int is_dead(struct fake *fake, uint64_t index)
{
    return fake->ranks[index].dead;
}

void fake_died(struct fake *fake, int index)
{
    fake_until(fake, is_dead, (uint64_t)index, "the failpoint");
    int status = fake->ranks[index].exit_status;
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void ranks_reap(struct fake *fake)
{
    for (uint32_t i = 0; i < fake->rank_count; i++) {
        struct fake_rank *rank = &fake->ranks[i];
        if (!rank->dead && waitpid(rank->pid, &rank->exit_status, WNOHANG) == rank->pid) {
            rank->dead = 1;
            wire_sock_close(&rank->sock);
        }
    }
}

int fake_all_exited(struct fake *fake, uint64_t unused)
{
    (void)unused;
    for (uint32_t i = 0; i < fake->rank_count; i++) {
        if (!fake->ranks[i].dead) {
            return 0;
        }
    }
    return 1;
}

/* ---- directives ---- */

static void directive_send(struct fake *fake, struct fake_rank *rank)
{
    struct wire_rank_directive directive = {
        .run = FAKE_RUN,
        .incarnation = rank->incarnation,
        .sequence = ++rank->sequence,
        .node_incarnation = fake->node_incarnation,
        .generation = fake->generation,
        .phase = fake->phase,
        .request_id = fake->request_id,
        .request_flags = fake->request_flags,
        .unpin_through = fake->unpin_through,
        .leave = (uint32_t)fake->leave,
    };
    for (uint32_t i = 0; i < fake->plan.world; i++) {
        if (fake->plan.members[i].incarnation == rank->incarnation &&
            fake->phase >= WIRE_PHASE_PLANNED) {
            directive.has_plan = 1;
            directive.rank = i;
            directive.plan = fake->plan;
        }
    }
    if (rank->report.function_id != FAKE_FUNCTION_ID) {
        directive.refused = 1;
        snprintf(directive.text, sizeof(directive.text), "another function, by the test");
    }
    BL_IGNORE(wire_sock_send(&rank->sock, WIRE_TYPE_RANK_DIRECTIVE, &directive, fake->generation, 1,
                             NULL, 0, 1000, NULL),
              "a rank that is gone");
}

void fake_directive(struct fake *fake)
{
    for (uint32_t i = 0; i < fake->rank_count; i++) {
        struct fake_rank *rank = &fake->ranks[i];
        if (!rank->dead && rank->sock.fd >= 0 && rank->report.incarnation) {
            directive_send(fake, rank);
        }
    }
}

/* ---- answering ---- */

static struct fake_arena *arena_find(struct fake *fake, uint64_t id)
{
    for (uint32_t i = 0; i < fake->arena_count; i++) {
        if (fake->arenas[i].id == id) {
            return &fake->arenas[i];
        }
    }
    return NULL;
}

static void arena_make(struct fake *fake, struct fake_rank *rank, const struct wire_frame *frame)
{
    struct wire_arena_make make;
    struct wire_arena answer = {0};
    assert_int_equal(wire_arena_make_decode(&make, frame->payload, frame->payload_bytes, NULL), 0);
    uint64_t bytes =
        wire_arena_bytes(make.slot_count, make.state_bytes, wire_arena_table_bytes(&make.extents));
    answer.request = make.request;
    fake->arena_makes++;
    wire_arena_make_free(&make);
    if (fake->refusals > 0) {
        fake->refusals--;
        answer.rc = BL_ELIMIT;
        snprintf(answer.text, sizeof(answer.text), "%llu bytes asked, 5 left",
                 (unsigned long long)bytes);
        assert_int_equal(
            wire_sock_send(&rank->sock, WIRE_TYPE_ARENA, &answer, 0, 1, NULL, 0, 1000, NULL), 0);
        return;
    }
    assert_true(fake->arena_count < FAKE_ARENAS_MAX);
    struct fake_arena *arena = &fake->arenas[fake->arena_count++];
    *arena = (struct fake_arena){.id = bl_random_u64() | 1, .owner = rank->incarnation};
    assert_int_equal(bl_memfd_create("arena", bytes, &arena->fd, NULL), 0);
    arena->bytes = bytes;
    arena->map = bl_mem_map(arena->fd, bytes, 1);
    assert_non_null(arena->map);
    answer.arena = arena->id;
    answer.bytes = bytes;
    assert_int_equal(
        wire_sock_send(&rank->sock, WIRE_TYPE_ARENA, &answer, 0, 1, &arena->fd, 1, 1000, NULL), 0);
}

static void copy_open(struct fake *fake, struct fake_rank *rank, const struct wire_frame *frame)
{
    struct wire_copy_open question;
    struct wire_copy_opened answer = {0};
    assert_int_equal(wire_copy_open_decode(&question, frame->payload, frame->payload_bytes, NULL),
                     0);
    struct fake_arena *arena = arena_find(fake, question.arena);
    assert_non_null(arena);
    fake->copy_opens++;
    answer.request = question.request;
    answer.arena = arena->id;
    answer.bytes = arena->bytes;
    assert_int_equal(wire_sock_send(&rank->sock, WIRE_TYPE_COPY_OPENED, &answer, 0, 1, &arena->fd,
                                    1, 1000, NULL),
                     0);
}

static void arena_drop(struct fake *fake, const struct wire_frame *frame)
{
    struct wire_arena_drop drop;
    assert_int_equal(wire_arena_drop_decode(&drop, frame->payload, frame->payload_bytes, NULL), 0);
    struct fake_arena *arena = arena_find(fake, drop.arena);
    assert_non_null(arena);
    bl_mem_free(arena->map, arena->bytes);
    close(arena->fd);
    *arena = fake->arenas[--fake->arena_count];
}

static void disk_load(struct fake *fake, struct fake_rank *rank, const struct wire_frame *frame)
{
    struct wire_disk_load load;
    struct wire_disk_loaded answer = {0};
    assert_int_equal(wire_disk_load_decode(&load, frame->payload, frame->payload_bytes, NULL), 0);
    struct fake_arena *arena = arena_find(fake, load.arena);
    assert_non_null(arena);
    assert_string_equal(load.root, "/root");
    fake->disk_loads++;
    char *slot = wire_arena_slot(arena->map, load.slot);
    for (uint32_t i = 0; i < load.extents.extent_count; i++) {
        const struct bl_extent *extent = &load.extents.extents[i];
        const struct bl_tensor *tensor = &load.extents.tensors[extent->tensor];
        float *to = (void *)(slot + extent->offset);
        struct bl_extent_rows rows;
        struct bl_extent_row row;
        bl_extent_rows_init(&rows, extent, tensor, NULL, NULL);
        while (bl_extent_rows_next(&rows, &row)) {
            fake_state(to + row.local, tensor->kind == BL_KIND_MOMENT1, fake->disk_step,
                       row.logical, row.count);
        }
    }
    answer.request = load.request;
    wire_disk_load_free(&load);
    assert_int_equal(
        wire_sock_send(&rank->sock, WIRE_TYPE_DISK_LOADED, &answer, 0, 1, NULL, 0, 1000, NULL), 0);
}

static void rank_frame(struct fake *fake, struct fake_rank *rank, const struct wire_frame *frame)
{
    if (fake->hang_ups > 0 && frame->type != WIRE_TYPE_RANK_REPORT) {
        fake->hang_ups--;
        wire_sock_close(&rank->sock);
        return;
    }
    switch (frame->type) {
    case WIRE_TYPE_RANK_REPORT: {
        struct wire_rank_report report;
        assert_int_equal(
            wire_rank_report_decode(&report, frame->payload, frame->payload_bytes, NULL), 0);
        int first = rank->report.incarnation == 0;
        int repeat = report.directive_node != fake->node_incarnation ||
                     report.directive_sequence != rank->sequence;
        assert_int_equal(report.incarnation, rank->incarnation);
        assert_true(report.sequence > rank->report.sequence);
        rank->report = report;
        if ((first || repeat) && !fake->early) {
            directive_send(fake, rank);
        }
        return;
    }
    case WIRE_TYPE_ARENA_MAKE:
        arena_make(fake, rank, frame);
        return;
    case WIRE_TYPE_ARENA_DROP:
        arena_drop(fake, frame);
        return;
    case WIRE_TYPE_COPY_OPEN:
        copy_open(fake, rank, frame);
        return;
    case WIRE_TYPE_DISK_LOAD:
        disk_load(fake, rank, frame);
        return;
    default:
        fail_msg("frame %s from a rank", wire_type_name(frame->type));
    }
}

static void rank_hello(struct fake *fake, struct wire_sock *sock, const struct wire_frame *frame)
{
    struct wire_hello hello;
    assert_int_equal(frame->type, WIRE_TYPE_HELLO);
    assert_int_equal(wire_hello_decode(&hello, frame->payload, frame->payload_bytes, NULL), 0);
    for (uint32_t i = 0; i < fake->rank_count; i++) {
        struct fake_rank *rank = &fake->ranks[i];
        if (rank->incarnation == hello.incarnation) {
            wire_hello_free(&hello);
            wire_sock_close(&rank->sock);
            rank->sock = *sock;
            memset(sock, 0, sizeof(*sock));
            sock->fd = -1;
            struct wire_hello answer = {.version = WIRE_FRAME_VERSION,
                                        .role = WIRE_ROLE_DAEMON,
                                        .run = FAKE_RUN,
                                        .node = "here",
                                        .job_json = (char *)(uintptr_t) "{}",
                                        .beat_ms = 100,
                                        .lanes = 4,
                                        .load_deadline_ms = 10000};
            if (fake->early) { /* a process that is stopped finds both when it goes on */
                int status;
                kill(rank->pid, SIGSTOP);
                assert_int_equal(waitpid(rank->pid, &status, WUNTRACED), rank->pid);
                assert_true(WIFSTOPPED(status));
            }
            assert_int_equal(
                wire_sock_send(&rank->sock, WIRE_TYPE_HELLO, &answer, 0, 1, NULL, 0, 1000, NULL),
                0);
            if (fake->early) {
                rank->report.function_id = FAKE_FUNCTION_ID;
                directive_send(fake, rank);
                kill(rank->pid, SIGCONT);
            }
            return;
        }
    }
    fail_msg("hello of a stranger");
}

static void bulk_frame(struct fake *fake, struct wire_sock *sock, const struct wire_frame *frame)
{
    if (frame->type == WIRE_TYPE_HELLO) {
        struct wire_hello answer = {.version = WIRE_FRAME_VERSION, .role = WIRE_ROLE_DAEMON};
        assert_int_equal(wire_sock_send(sock, WIRE_TYPE_HELLO, &answer, 0, 1, NULL, 0, 1000, NULL),
                         0);
        return;
    }
    struct wire_bulk_read question;
    assert_int_equal(frame->type, WIRE_TYPE_BULK_READ);
    assert_int_equal(wire_bulk_read_decode(&question, frame->payload, frame->payload_bytes, NULL),
                     0);
    struct fake_arena *arena = arena_find(fake, question.arena);
    assert_non_null(arena);
    assert_memory_equal(question.key, fake->plan.comm_key, sizeof(question.key));
    assert_true(question.offset + question.bytes <= arena->bytes);
    if (++fake->bulk_reads == 4) { /* sent away in the middle: it comes back */
        wire_sock_close(sock);
        return;
    }
    struct wire_bulk_data answer = {.bytes = question.bytes};
    if (fake->bulk_denials > 0) {
        fake->bulk_denials--;
        answer.rc = -EACCES;
        assert_int_equal(
            wire_sock_send(sock, WIRE_TYPE_BULK_DATA, &answer, 0, 1, NULL, 0, 1000, NULL), 0);
        return;
    }
    assert_int_equal(wire_sock_send(sock, WIRE_TYPE_BULK_DATA, &answer, 0, 1, NULL, 0, 1000, NULL),
                     0);
    const char *from = (const char *)arena->map + question.offset;
    for (uint64_t done = 0; done < question.bytes;) {
        ssize_t sent = send(sock->fd, from + done, question.bytes - done, MSG_NOSIGNAL);
        assert_true(sent > 0 || errno == EAGAIN);
        done += sent > 0 ? (uint64_t)sent : 0;
    }
}

/* ---- the loop ---- */

static void accept_into(int listener, struct wire_sock *socks)
{
    int fd;
    while ((fd = wire_sock_accept(listener)) >= 0) {
        uint32_t i = 0;
        while (i < FAKE_RANKS_MAX && socks[i].fd >= 0) {
            i++;
        }
        assert_true(i < FAKE_RANKS_MAX);
        wire_sock_init(&socks[i], fd);
    }
}

static void sock_serve(struct fake *fake, struct wire_sock *sock, struct fake_rank *rank, int bulk)
{
    struct wire_frame frame;
    int rc = sock->fd < 0 ? 0 : wire_sock_read(sock);
    while (sock->fd >= 0 && wire_sock_next(sock, &frame, NULL) > 0) {
        if (rank) {
            rank_frame(fake, rank, &frame);
        } else if (bulk) {
            bulk_frame(fake, sock, &frame);
        } else {
            rank_hello(fake, sock, &frame);
        }
    }
    if (rc < 0) {
        wire_sock_close(sock);
    }
}

static void fake_round(struct fake *fake)
{
    struct pollfd fds[2 + 3 * FAKE_RANKS_MAX];
    nfds_t count = 0;
    fds[count++] = (struct pollfd){.fd = fake->listener, .events = POLLIN};
    fds[count++] = (struct pollfd){.fd = fake->bulk_listener, .events = POLLIN};
    for (uint32_t i = 0; i < FAKE_RANKS_MAX; i++) {
        fds[count++] = (struct pollfd){.fd = fake->fresh[i].fd, .events = POLLIN};
        fds[count++] = (struct pollfd){.fd = fake->bulk[i].fd, .events = POLLIN};
        fds[count++] = (struct pollfd){.fd = i < fake->rank_count ? fake->ranks[i].sock.fd : -1,
                                       .events = POLLIN};
    }
    poll(fds, count, 5);
    if (fake->listener >= 0) {
        accept_into(fake->listener, fake->fresh);
    }
    accept_into(fake->bulk_listener, fake->bulk);
    for (uint32_t i = 0; i < FAKE_RANKS_MAX; i++) {
        sock_serve(fake, &fake->fresh[i], NULL, 0);
        sock_serve(fake, &fake->bulk[i], NULL, 1);
    }
    for (uint32_t i = 0; i < fake->rank_count; i++) {
        sock_serve(fake, &fake->ranks[i].sock, &fake->ranks[i], 0);
    }
    ranks_reap(fake);
}

void fake_until(struct fake *fake, int (*done)(struct fake *fake, uint64_t arg), uint64_t arg,
                const char *what)
{
    uint64_t deadline = now_ms() + FAKE_DEADLINE_MS;
    while (!done(fake, arg)) {
        fake_round(fake);
        if (now_ms() > deadline) {
            for (uint32_t i = 0; i < fake->rank_count; i++) {
                const struct fake_rank *rank = &fake->ranks[i];
                fprintf(stderr,
                        "rank %u: dead %d status %x state %u generation %llu applied %llu %s\n", i,
                        rank->dead, (unsigned)rank->exit_status, rank->report.state,
                        (unsigned long long)rank->report.generation,
                        (unsigned long long)rank->report.applied_step, rank->report.failed_text);
            }
            fail_msg("waited in vain: %s", what);
        }
    }
}

/* ---- life ---- */

static void listen_up(struct fake *fake)
{
    struct bl_errmsg msg = {""};
    fake->listener = wire_unix_listen(fake->path, &msg);
    if (fake->listener < 0) {
        fail_msg("%s", msg.text);
    }
    fake->node_incarnation = bl_random_u64() | 1;
}

void fake_open(struct fake *fake, uint64_t steps)
{
    memset(fake, 0, sizeof(*fake));
    snprintf(fake->dir, sizeof(fake->dir), "/tmp/belay-test-XXXXXX");
    assert_non_null(mkdtemp(fake->dir));
    snprintf(fake->path, sizeof(fake->path), "%s/socket", fake->dir);
    for (uint32_t i = 0; i < FAKE_RANKS_MAX; i++) {
        fake->fresh[i].fd = fake->bulk[i].fd = fake->ranks[i].sock.fd = -1;
    }
    listen_up(fake);
    fake->bulk_listener = wire_tcp_listen("127.0.0.1:0", fake->bulk_addr, NULL);
    assert_true(fake->bulk_listener >= 0);
    fake->shared = mmap(NULL, sizeof(*fake->shared), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(fake->shared, MAP_FAILED);
    fake->shared->steps = steps;
    for (uint32_t i = 0; i < FAKE_RANKS_MAX; i++) {
        atomic_store(&fake->shared->limit[i], UINT64_MAX);
    }
}

void fake_down(struct fake *fake)
{
    close(fake->listener);
    fake->listener = -1;
    for (uint32_t i = 0; i < FAKE_RANKS_MAX; i++) {
        wire_sock_close(&fake->fresh[i]);
        wire_sock_close(&fake->ranks[i].sock);
    }
}

void fake_up(struct fake *fake)
{
    listen_up(fake);
    for (uint32_t i = 0; i < fake->rank_count; i++) {
        fake->ranks[i].sequence = 0;
        fake->ranks[i].report.incarnation = 0;
    }
}

void fake_close(struct fake *fake)
{
    if (!fake->shared) {
        return;
    }
    for (uint32_t i = 0; i < fake->rank_count; i++) {
        struct fake_rank *rank = &fake->ranks[i];
        if (!rank->dead) {
            kill(rank->pid, SIGKILL);
            waitpid(rank->pid, &rank->exit_status, 0);
        }
        wire_sock_close(&rank->sock);
        munmap(rank->page, WIRE_PAGE_BYTES);
    }
    for (uint32_t i = 0; i < FAKE_RANKS_MAX; i++) {
        wire_sock_close(&fake->fresh[i]);
        wire_sock_close(&fake->bulk[i]);
    }
    for (uint32_t i = 0; i < fake->arena_count; i++) {
        bl_mem_free(fake->arenas[i].map, fake->arenas[i].bytes);
        close(fake->arenas[i].fd);
    }
    wire_plan_close(&fake->plan);
    munmap(fake->shared, sizeof(*fake->shared));
    if (fake->listener >= 0) {
        close(fake->listener);
    }
    close(fake->bulk_listener);
    unlink(fake->path);
    rmdir(fake->dir);
    memset(fake, 0, sizeof(*fake));
}
