/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_belay.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/failpoint.h"
#include "trainer/options.h"
#include "wire/belay.h"

#define GENERATIONS_MAX 16
#define EXTENTS_MAX     192
#define SLOTS           3
#define SLOT_BYTES      (1u << 20)
#define POLL_US         500

#define NO_RANK UINT32_MAX /* a spare */

enum fake_state { FAKE_FREE, FAKE_STARTED, FAKE_PARKED, FAKE_READY, FAKE_LEAVING, FAKE_LEFT };

struct fake_extent {
    char name[128];
    uint64_t flat_lo, flat_hi, offset;
    uint64_t width;        /* of the logical tensor */
    uint64_t lo[2], hi[2]; /* box */
};

struct fake_arena { /* what one rank holds in one generation */
    uint32_t extent_count;
    struct fake_extent extents[EXTENTS_MAX];
    uint64_t sealed[SLOTS]; /* step + 1; 0: nothing */
    _Alignas(4096) uint8_t slots[SLOTS][SLOT_BYTES];
};

struct fake_proc {
    int pid, event_fd;
    enum fake_state state;
    uint64_t generation; /* that the state is about */
    uint32_t rank;       /* in the plan */
    uint64_t voted;      /* step, in the plan's generation */
    char endpoint[256];
};

struct fake_shared {
    pthread_mutex_t lock; /* robust, of all below */
    uint64_t called;      /* newest generation that was opened */
    uint64_t planned, running;
    uint32_t tp, pp; /* the job's */
    uint32_t world[GENERATIONS_MAX], stages[GENERATIONS_MAX];
    uint64_t source[GENERATIONS_MAX]; /* generation whose arenas hold the plan's step; 0: fresh */
    uint64_t step[GENERATIONS_MAX];   /* the plan's */
    uint64_t result_step;
    uint32_t result_flags, vote_flags;
    int done; /* all may leave */
    struct fake_proc procs[FAKE_PROCS_MAX];
    struct fake_arena arenas[GENERATIONS_MAX][FAKE_PROCS_MAX];
};

static struct fake_shared *shared;

static void lock(void)
{
    if (pthread_mutex_lock(&shared->lock) == EOWNERDEAD) {
        pthread_mutex_consistent(&shared->lock);
    }
}

static void unlock(void)
{
    pthread_mutex_unlock(&shared->lock);
}

/* ---- the rank's side ---- */

struct belay {
    struct fake_proc *proc;
    struct fake_arena *arena;
    uint64_t generation;
    struct belay_peer peers[FAKE_PROCS_MAX];
    int writing; /* slot begun, or -1 */
    uint64_t writing_step;
};

static struct belay fake_job;
static uint32_t fake_self;

static int is_called(const struct belay *b)
{
    return shared->called > b->generation;
}

static void doze(void)
{
    unlock();
    usleep(POLL_US);
    lock();
}

static struct fake_arena *arena_of(uint64_t generation, uint32_t rank)
{
    return &shared->arenas[generation % GENERATIONS_MAX][rank];
}

/* Parks and waits for a plan. BELAY_ESTOPPED for a spare when the run is over. Under lock. */
static int take_plan(struct belay *b, struct belay_plan *plan)
{
    struct fake_proc *p = b->proc;
    uint64_t count;
    p->state = FAKE_PARKED;
    p->generation = shared->called;
    while (shared->planned <= b->generation || shared->planned < shared->called ||
           p->rank == NO_RANK) {
        if (shared->done) {
            return BELAY_ESTOPPED;
        }
        p->generation = shared->called;
        doze();
    }
    ssize_t n = read(p->event_fd, &count, sizeof count);
    (void)n; /* not set is as good */
    uint64_t g = shared->planned;
    b->generation = g;
    b->writing = -1;
    b->arena = arena_of(g, p->rank);
    memset(plan, 0, sizeof *plan);
    for (uint32_t i = 0; i < FAKE_PROCS_MAX; i++) {
        const struct fake_proc *q = &shared->procs[i];
        if (q->state != FAKE_FREE && q->rank != NO_RANK) {
            b->peers[q->rank] = (struct belay_peer){q->endpoint, q->rank % 2 ? "b" : "a", i};
        }
    }
    *plan = (struct belay_plan){.size = sizeof *plan,
                                .version = BELAY_VERSION_ABI,
                                .generation = g,
                                .step = shared->step[g],
                                .fresh = shared->source[g] == 0,
                                .rank = p->rank,
                                .world = shared->world[g],
                                .tp = shared->tp,
                                .pp = shared->stages[g],
                                .load_deadline_ms = 20000,
                                .comm_key = {g, 99},
                                .peers = b->peers};
    return 0;
}

int belay_is_supervised(void)
{
    return 1;
}

int belay_join(const struct belay_config *config, struct belay **job, struct belay_plan *plan)
{
    struct belay *b = &fake_job;
    b->proc = &shared->procs[fake_self];
    lock();
    snprintf(b->proc->endpoint, sizeof b->proc->endpoint, "%s", config->endpoint);
    int rc = take_plan(b, plan);
    unlock();
    *job = b;
    return rc;
}

int belay_next(struct belay *b, struct belay_plan *plan)
{
    lock();
    int rc = take_plan(b, plan);
    unlock();
    return rc;
}

int belay_tensor(struct belay *b, struct belay_tensor_desc *desc, void *ptr)
{
    struct fake_arena *a = b->arena;
    const struct fake_extent *before = a->extent_count ? &a->extents[a->extent_count - 1] : NULL;
    assert_null(ptr);
    assert_true(a->extent_count < EXTENTS_MAX);
    struct fake_extent *e = &a->extents[a->extent_count++];
    snprintf(e->name, sizeof e->name, "%s", desc->name);
    e->flat_lo = desc->flat_lo;
    e->flat_hi = desc->flat_hi;
    e->width = desc->dims == 2 ? desc->shape[1] : 1;
    for (uint32_t i = 0; i < 2; i++) {
        e->lo[i] = i < desc->dims ? desc->box_lo[i] : 0;
        e->hi[i] = i < desc->dims ? desc->box_hi[i] : 1;
    }
    e->offset = before == NULL ? 0 : before->offset + (before->flat_hi - before->flat_lo) * 4;
    e->offset = (e->offset + 63) / 64 * 64;
    assert_true(e->offset + (e->flat_hi - e->flat_lo) * 4 <= SLOT_BYTES);
    desc->slot_offset = e->offset;
    return 0;
}

static const uint8_t *sealed_slot(const struct fake_arena *a, uint64_t step)
{
    for (int i = 0; i < SLOTS; i++) {
        if (a->sealed[i] == step + 1) {
            return a->slots[i];
        }
    }
    return NULL;
}

/* The same part of the same tensor, but for the range. */
static int is_same_box(const struct fake_extent *a, const struct fake_extent *b)
{
    return strcmp(a->name, b->name) == 0 && memcmp(a->lo, b->lo, sizeof a->lo) == 0 &&
           memcmp(a->hi, b->hi, sizeof a->hi) == 0;
}

/* Copies what the arenas of the source generation hold of one extent; elements copied. Equal
 * replicas hold everything: the first is enough. */
static uint64_t fill_extent(const struct fake_extent *want, uint8_t *to, uint64_t source,
                            uint64_t step)
{
    uint64_t copied = 0;
    uint64_t wanted = want->flat_hi - want->flat_lo;
    for (uint32_t r = 0; copied < wanted && r < shared->world[source]; r++) {
        const struct fake_arena *a = arena_of(source, r);
        const uint8_t *from = sealed_slot(a, step);
        for (uint32_t i = 0; from != NULL && i < a->extent_count; i++) {
            const struct fake_extent *e = &a->extents[i];
            uint64_t lo = e->flat_lo > want->flat_lo ? e->flat_lo : want->flat_lo;
            uint64_t hi = e->flat_hi < want->flat_hi ? e->flat_hi : want->flat_hi;
            if (lo < hi && is_same_box(e, want)) {
                memcpy(to + want->offset + (lo - want->flat_lo) * 4,
                       from + e->offset + (lo - e->flat_lo) * 4, (hi - lo) * 4);
                copied += hi - lo;
            }
        }
    }
    return copied;
}

int belay_load(struct belay *b, uint64_t step)
{
    uint64_t source = shared->source[b->generation];
    BL_IGNORE(BL_FAILPOINT("mid-load"), "it acts by itself");
    for (uint32_t i = 0; source != 0 && i < b->arena->extent_count; i++) {
        const struct fake_extent *e = &b->arena->extents[i];
        assert_int_equal(fill_extent(e, b->arena->slots[0], source, step), e->flat_hi - e->flat_lo);
    }
    if (source != 0) {
        b->arena->sealed[0] = step + 1;
    }
    return 0;
}

int belay_ready(struct belay *b)
{
    lock();
    b->proc->state = FAKE_READY;
    while (!is_called(b) && shared->running < b->generation) {
        doze();
    }
    int rc = is_called(b) ? BELAY_EGEN : 0;
    unlock();
    return rc;
}

int belay_beat(struct belay *b, enum belay_section section, uint64_t step)
{
    (void)b;
    (void)section;
    (void)step;
    return 0;
}

int belay_beat_collective(struct belay *b, uint64_t sequence, uint32_t waiting)
{
    (void)b;
    (void)sequence;
    (void)waiting;
    return 0;
}

int belay_metrics_set(struct belay *b, const struct belay_metrics *metrics)
{
    assert_int_equal(b->proc->rank, 0);
    assert_true(metrics->samples > 0);
    return 0;
}

/* The vote of the last one decides. Under lock. */
static void count_votes(const struct belay *b, uint64_t step)
{
    uint32_t votes = 0;
    for (uint32_t i = 0; i < FAKE_PROCS_MAX; i++) {
        const struct fake_proc *p = &shared->procs[i];
        votes += p->state == FAKE_READY && p->voted == step;
    }
    if (votes == shared->world[b->generation] && !is_called(b)) {
        shared->result_step = step;
        shared->result_flags = shared->vote_flags;
        shared->vote_flags = 0;
    }
}

int belay_vote(struct belay *b, uint64_t step, uint32_t flags, uint32_t *result)
{
    assert_non_null(sealed_slot(b->arena, step - 1));
    lock();
    int rc = is_called(b) ? BELAY_EGEN : 0;
    if (rc == 0) {
        b->proc->voted = step;
        shared->vote_flags |= flags;
        count_votes(b, step);
    }
    while (rc == 0 && shared->result_step != step) {
        doze();
        rc = is_called(b) && shared->result_step != step ? BELAY_EGEN : 0;
    }
    *result = shared->result_flags;
    unlock();
    return rc;
}

int belay_slot_begin(struct belay *b, uint64_t step, void **dst)
{
    int oldest = 0;
    for (int i = 0; i < SLOTS; i++) {
        oldest = b->arena->sealed[i] < b->arena->sealed[oldest] ? i : oldest;
    }
    assert_true(b->writing < 0);
    b->arena->sealed[oldest] = 0;
    b->writing = oldest;
    b->writing_step = step;
    *dst = b->arena->slots[oldest];
    return 0;
}

int belay_slot_seal(struct belay *b, uint64_t step)
{
    assert_true(b->writing >= 0 && b->writing_step == step);
    lock();
    b->arena->sealed[b->writing] = step + 1;
    unlock();
    b->writing = -1;
    return 0;
}

int belay_slot_data(struct belay *b, uint64_t step, const void **data)
{
    *data = sealed_slot(b->arena, step);
    return *data == NULL ? -ENOENT : 0;
}

int belay_event_fd(struct belay *b)
{
    return b->proc->event_fd;
}

int belay_comm_failed(struct belay *b, const char *text)
{
    (void)b;
    (void)text;
    return 0;
}

int belay_leave(struct belay *b, int code)
{
    assert_int_equal(code, 0);
    lock();
    b->proc->state = FAKE_LEAVING;
    while (!shared->done && !is_called(b)) {
        doze();
    }
    int rc = shared->done ? 0 : BELAY_EGEN;
    if (rc == 0) {
        b->proc->state = FAKE_LEFT;
    }
    unlock();
    return rc;
}

const char *belay_error(const struct belay *b)
{
    (void)b;
    return "fake";
}

/* ---- the leader's side ---- */

static void start_rank(const struct fake_run *run, uint32_t index)
{
    struct fake_proc *p = &shared->procs[index];
    char rank[16];
    memset(p, 0, sizeof *p);
    p->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    p->state = FAKE_STARTED;
    fflush(stdout);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid != 0) { /* the child must not write its own 0 there */
        p->pid = pid;
        return;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    snprintf(rank, sizeof rank, "%u", index);
    setenv("BELAY_RANK", rank, 1);
    if (run->fail != NULL) {
        setenv("BELAY_FAIL", run->fail, 1);
        setenv("BELAY_FAIL_ONCE_DIR", run->once, 1);
    }
    if (run->ledger != NULL) {
        setenv("BELAY_TRAIN_LEDGER", run->ledger, 1);
    }
    fake_self = index;
    int code = train_supervised_main(run->job_path);
    fflush(NULL);
    _exit(code);
}

/* Opens the next generation: all are told. Under lock. */
static void open_generation(void)
{
    const uint64_t one = 1;
    shared->called++;
    assert_true(shared->called < GENERATIONS_MAX);
    for (uint32_t i = 0; i < FAKE_PROCS_MAX; i++) {
        if (shared->procs[i].state != FAKE_FREE) {
            ssize_t n = write(shared->procs[i].event_fd, &one, sizeof one);
            (void)n;
        }
    }
}

/* The newest (step, generation) that all ranks of that generation have sealed; 0 without one. */
static uint64_t newest_state(uint64_t below, uint64_t *ret_step)
{
    uint64_t found = 0;
    *ret_step = 0;
    for (uint64_t g = 1; g < below; g++) {
        for (uint32_t slot = 0; shared->world[g] != 0 && slot < SLOTS; slot++) {
            uint64_t sealed = arena_of(g, 0)->sealed[slot];
            uint32_t have = 0;
            for (uint32_t r = 0; sealed != 0 && r < shared->world[g]; r++) {
                have += sealed_slot(arena_of(g, r), sealed - 1) != NULL;
            }
            if (sealed != 0 && have == shared->world[g] && sealed - 1 >= *ret_step) {
                found = g;
                *ret_step = sealed - 1;
            }
        }
    }
    return found;
}

/* Plans and starts generations when everybody is where he should be. Under lock. */
static void lead(void)
{
    uint32_t live = 0, parked = 0, ready = 0, leaving = 0, members = 0;
    for (uint32_t i = 0; i < FAKE_PROCS_MAX; i++) {
        const struct fake_proc *p = &shared->procs[i];
        live += p->state != FAKE_FREE;
        members += p->state != FAKE_FREE && p->rank != NO_RANK;
        parked += p->state == FAKE_PARKED && p->generation == shared->called;
        ready += p->state == FAKE_READY;
        leaving += p->state == FAKE_LEAVING || p->state == FAKE_LEFT;
    }
    uint64_t g = shared->called;
    if (shared->planned < g && parked == live) {
        uint32_t rank = 0, most = live / shared->tp;
        shared->source[g] = newest_state(g, &shared->step[g]);
        shared->stages[g] = shared->pp < most ? shared->pp : most;
        uint32_t copy = shared->tp * shared->stages[g];
        shared->world[g] = live / copy * copy;
        for (uint32_t i = 0; i < FAKE_PROCS_MAX; i++) {
            if (shared->procs[i].state != FAKE_FREE) {
                shared->procs[i].rank = rank < shared->world[g] ? rank : NO_RANK;
                shared->procs[i].voted = 0;
                rank++;
            }
        }
        shared->result_step = shared->vote_flags = 0;
        shared->planned = g;
    } else if (shared->planned == g && shared->running < g && ready == members) {
        shared->running = g;
    }
    shared->done = shared->done || (live > 0 && shared->planned == g && leaving == members);
}

/* Notes who ended; returns how many are left. */
static uint32_t reap(const struct fake_run *run, struct fake_result *ret)
{
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        uint32_t i = 0;
        while (i < FAKE_PROCS_MAX - 1 && shared->procs[i].pid != pid) {
            i++;
        }
        assert_int_equal(shared->procs[i].pid, pid);
        lock();
        int was_done = shared->procs[i].state == FAKE_LEFT;
        close(shared->procs[i].event_fd);
        shared->procs[i].state = FAKE_FREE;
        if (!was_done) {
            open_generation();
        }
        unlock();
        if (was_done) {
            assert_int_equal(status, 0);
            continue;
        }
        assert_true(WIFSIGNALED(status));
        ret->deaths++;
        if (run->respawn) {
            start_rank(run, i);
        }
    }
    uint32_t left = 0;
    for (uint32_t i = 0; i < FAKE_PROCS_MAX; i++) {
        left += shared->procs[i].state != FAKE_FREE;
    }
    return left;
}

/* Kills the process of the highest rank once, when its step is sealed. Under lock. */
static void kill_when_sealed(const struct fake_run *run, int *killed)
{
    uint64_t g = shared->running;
    if (run->kill_at == 0 || *killed || g == 0 || g != shared->called ||
        sealed_slot(arena_of(g, shared->world[g] - 1), (uint64_t)run->kill_at) == NULL) {
        return;
    }
    for (uint32_t i = 0; i < FAKE_PROCS_MAX; i++) {
        if (shared->procs[i].state != FAKE_FREE && shared->procs[i].rank == shared->world[g] - 1) {
            *killed = 1;
            kill(shared->procs[i].pid, SIGKILL);
        }
    }
}

/* Elements of an extent, row by row of the logical tensor. */
static void add_extent(const struct fake_extent *e, const uint8_t *slot,
                       struct bl_state_digest *digest)
{
    uint64_t width = e->hi[1] - e->lo[1];
    for (uint64_t at = e->flat_lo; at < e->flat_hi;) {
        uint64_t column = at % width, row = e->lo[0] + at / width;
        uint64_t n = width - column < e->flat_hi - at ? width - column : e->flat_hi - at;
        bl_state_digest_add(digest, bl_xxh3(e->name, strlen(e->name)),
                            row * e->width + e->lo[1] + column,
                            slot + e->offset + (at - e->flat_lo) * 4, n, 4);
        at += n;
    }
}

/* Equal lists are of equal replicas, and count once. */
static int is_repeated(uint64_t generation, uint32_t r)
{
    const struct fake_arena *a = arena_of(generation, r);
    for (uint32_t k = 0; k < r; k++) {
        const struct fake_arena *b = arena_of(generation, k);
        if (a->extent_count == b->extent_count && a->extent_count != 0 &&
            memcmp(a->extents, b->extents, a->extent_count * sizeof *a->extents) == 0) {
            return 1;
        }
    }
    return 0;
}

static void add_digest(uint64_t generation, uint64_t step, struct bl_state_digest *digest)
{
    for (uint32_t r = 0; r < shared->world[generation]; r++) {
        const struct fake_arena *a = arena_of(generation, r);
        const uint8_t *slot = sealed_slot(a, step);
        for (uint32_t i = 0; !is_repeated(generation, r) && i < a->extent_count; i++) {
            add_extent(&a->extents[i], slot, digest);
        }
    }
}

void fake_belay_run(const struct fake_run *run, struct fake_result *ret)
{
    pthread_mutexattr_t attr;
    int killed = 0;
    memset(ret, 0, sizeof *ret);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(shared != MAP_FAILED);
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&shared->lock, &attr);
    shared->called = 1;
    shared->tp = run->tp != 0 ? run->tp : 1;
    shared->pp = run->pp != 0 ? run->pp : 1;
    for (uint32_t i = 0; i < run->ranks; i++) {
        start_rank(run, i);
    }
    uint64_t until = bl_now_ns() + FAKE_RUN_MS * 1000000ull;
    while (reap(run, ret) > 0) {
        lock();
        lead();
        kill_when_sealed(run, &killed);
        doze();
        unlock();
        if (bl_now_ns() > until) {
            for (uint32_t i = 0; i < FAKE_PROCS_MAX; i++) {
                if (shared->procs[i].state != FAKE_FREE) {
                    kill(shared->procs[i].pid, SIGKILL);
                }
            }
            fail_msg("the run hangs in generation %llu", (unsigned long long)shared->called);
        }
    }
    uint64_t generation = newest_state(GENERATIONS_MAX, &ret->step);
    ret->generations = (uint32_t)shared->called;
    add_digest(generation, ret->step, &ret->digest);
    munmap(shared, sizeof *shared);
}
