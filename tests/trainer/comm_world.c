/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/trainer/comm_world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

void world_open(struct world *w, const char *nodes)
{
    static const char names[][2] = {"a", "b", "c", "d", "e", "f", "g", "h"};
    struct bl_errmsg msg = {{0}};
    memset(w, 0, sizeof *w);
    w->size = (uint32_t)strlen(nodes);
    w->key[0] = 11;
    w->key[1] = 22;
    for (uint32_t i = 0; i < w->size; i++) {
        assert_int_equal(comm_listener_open(&w->listeners[i], NULL, &msg), 0);
        w->peers[i].endpoint = comm_listener_endpoint(w->listeners[i]);
        w->peers[i].node = names[nodes[i] - 'a'];
    }
}

void world_close(struct world *w)
{
    for (uint32_t i = 0; i < w->size; i++) {
        comm_listener_close(w->listeners[i]);
    }
}

struct comm_config world_config(const struct world *w, uint32_t rank)
{
    return (struct comm_config){.rank = rank,
                                .world = w->size,
                                .generation = 1,
                                .key = {w->key[0], w->key[1]},
                                .peers = w->peers,
                                .op_deadline_ms = JOIN_MS};
}

int join_with(struct comm **ret, struct world *w, const struct comm_config *config,
              uint32_t deadline_ms)
{
    struct bl_errmsg msg = {{0}};
    int rc = comm_new(ret, w->listeners[config->rank], config, &msg);
    if (rc == 0) {
        rc = comm_connect(*ret, deadline_ms, &msg);
    }
    return rc;
}

int join(struct comm **ret, struct world *w, uint32_t rank)
{
    struct comm_config config = world_config(w, rank);
    return join_with(ret, w, &config, JOIN_MS);
}

void run_processes_but_one(const char *nodes, body_fn *body, uint32_t victim)
{
    struct world w;
    pid_t pids[WORLD_MAX];
    world_open(&w, nodes);
    for (uint32_t i = 0; i < w.size; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0) {
            alarm(TEST_ALARM);
            for (uint32_t k = 0; k < w.size; k++) {
                if (k != i) {
                    comm_listener_shut(w.listeners[k]);
                }
            }
            _exit(body(&w, i));
        }
    }
    world_close(&w);
    for (uint32_t i = 0; i < strlen(nodes); i++) {
        int status;
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        if (i == victim) {
            assert_true(WIFSIGNALED(status));
        } else {
            assert_int_equal(status, 0);
        }
    }
}

void run_processes(const char *nodes, body_fn *body)
{
    run_processes_but_one(nodes, body, UINT32_MAX);
}

struct thread_rank {
    struct world *world;
    uint32_t rank;
    body_fn *body;
    int result;
};

static void *thread_main(void *arg)
{
    struct thread_rank *t = arg;
    t->result = t->body(t->world, t->rank);
    return NULL;
}

void run_threads(const char *nodes, body_fn *body)
{
    struct world w;
    pthread_t threads[WORLD_MAX];
    struct thread_rank ranks[WORLD_MAX];
    world_open(&w, nodes);
    for (uint32_t i = 0; i < w.size; i++) {
        ranks[i] = (struct thread_rank){&w, i, body, 1};
        assert_int_equal(pthread_create(&threads[i], NULL, thread_main, &ranks[i]), 0);
    }
    for (uint32_t i = 0; i < w.size; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(ranks[i].result, 0);
    }
    world_close(&w);
}
