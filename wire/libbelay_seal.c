/* SPDX-License-Identifier: Apache-2.0 */
/* belay.h: steps. Beats, metrics, votes, slots; and the thread that digests a finished slot. */
#include "wire/libbelay.h"

#include <errno.h>
#include <string.h>

#include "base/clock.h"
#include "base/failpoint.h"

/* ---- beats: stores into the page, no system call ---- */

static void progress_note(struct wire_page *page)
{
    atomic_store_explicit(&page->progress_ns, bl_now_ns(), memory_order_relaxed);
}

int belay_beat(struct belay *job, enum belay_section section, uint64_t step)
{
    struct wire_page *page = job->page;
    uint32_t had = atomic_load_explicit(&page->section, memory_order_relaxed);
    if (had != (uint32_t)section ||
        atomic_load_explicit(&page->step, memory_order_relaxed) != step) {
        atomic_store_explicit(&page->section, (uint32_t)section, memory_order_relaxed);
        atomic_store_explicit(&page->step, step, memory_order_relaxed);
        progress_note(page);
    }
    return 0;
}

int belay_beat_collective(struct belay *job, uint64_t sequence, uint32_t waiting)
{
    struct wire_page *page = job->page;
    atomic_store_explicit(&page->collective, sequence, memory_order_relaxed);
    atomic_store_explicit(&page->waiting, waiting, memory_order_relaxed);
    progress_note(page);
    return 0;
}

int belay_metrics_set(struct belay *job, const struct belay_metrics *metrics)
{
    struct wire_page *page = job->page;
    uint64_t version = atomic_load_explicit(&page->metrics_version, memory_order_relaxed) | 1;
    atomic_store_explicit(&page->metrics_version, version, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    page->metrics_step = metrics->step;
    page->metrics_samples = metrics->samples;
    page->metrics_loss = metrics->loss;
    page->metrics_lr = metrics->lr;
    page->metrics_grad_norm = metrics->grad_norm;
    page->metrics_tokens_per_s = metrics->tokens_per_s;
    atomic_store_explicit(&page->metrics_version, version + 1, memory_order_release);
    return 0;
}

/* ---- votes ---- */

static int over_text(struct belay *b, int rc)
{
    switch (rc) {
    case BL_EGEN:
        return bl_err(&b->error, rc, "a new generation was called");
    case BL_ESTOPPED:
        return bl_err(&b->error, rc, "the run is over");
    case BL_ECONFIG:
        return bl_err(&b->error, rc, "refused: %s", wire_session_text(b->session));
    default:
        return rc;
    }
}

int belay_vote(struct belay *job, uint64_t step, uint32_t flags, uint32_t *result)
{
    pthread_mutex_lock(&job->lock);
    int rc;
    for (;;) {
        rc = lb_over(job);
        if (!rc && !job->seal_pending && job->seal_rc) {
            rc = bl_err(&job->error, job->seal_rc, "the slot of step %llu could not be sealed",
                        (unsigned long long)job->seal_step);
        }
        if (rc) {
            break;
        }
        rc = wire_session_vote(job->session, step, flags, lb_now_ms());
        lb_pump(job);
        if (rc != -EAGAIN) {
            break;
        }
        if (!job->seal_pending) {
            rc = bl_err(&job->error, -EPROTO, "vote for step %llu: step %llu is not sealed",
                        (unsigned long long)step, (unsigned long long)step - 1);
            break;
        }
        lb_wait(job, UINT64_MAX);
    }
    /* Unanimous counts even when a new generation is called in the same moment: others may have
     * applied it. From here on it is the others that are waited for. */
    atomic_store_explicit(&job->page->waiting, 1, memory_order_relaxed);
    while (!rc && job->vote_step != step && !(rc = lb_over(job))) {
        lb_wait(job, UINT64_MAX);
    }
    atomic_store_explicit(&job->page->waiting, 0, memory_order_relaxed);
    if (!rc) {
        *result = job->vote_flags;
    }
    rc = over_text(job, rc);
    pthread_mutex_unlock(&job->lock);
    return rc;
}

/* ---- slots ---- */

int belay_slot_begin(struct belay *job, uint64_t step, void **dst)
{
    if (!job->arena.map) {
        return bl_err(&job->error, -EPROTO, "no slots: belay_load comes first");
    }
    uint32_t index = 0;
    pthread_mutex_lock(&job->lock);
    lb_wait_seal(job);
    int rc = wire_session_slot_begin(job->session, step, &index);
    lb_pump(job);
    pthread_mutex_unlock(&job->lock);
    if (rc) {
        return bl_err_code(&job->error, rc, "a slot for step %llu", (unsigned long long)step);
    }
    job->writing_step = step;
    job->writing_index = (int)index;
    *dst = wire_arena_slot(job->arena.map, index);
    return 0;
}

int belay_slot_seal(struct belay *job, uint64_t step)
{
    if (job->writing_index < 0 || job->writing_step != step) {
        return bl_err(&job->error, -EPROTO, "step %llu has no slot begun",
                      (unsigned long long)step);
    }
    pthread_mutex_lock(&job->lock);
    job->seal_step = step;
    job->seal_base = wire_arena_slot(job->arena.map, (uint32_t)job->writing_index);
    job->seal_pending = 1;
    job->seal_rc = 0;
    pthread_cond_signal(&job->seal_wanted);
    pthread_mutex_unlock(&job->lock);
    return 0;
}

int belay_slot_data(struct belay *job, uint64_t step, const void **data)
{
    if (!job->arena.map) {
        return -ENOENT;
    }
    int index = job->writing_index >= 0 && job->writing_step == step ? job->writing_index : -1;
    if (index < 0) {
        pthread_mutex_lock(&job->lock);
        index = wire_session_slot_find(job->session, step);
        pthread_mutex_unlock(&job->lock);
    }
    if (index < 0) {
        return bl_err(&job->error, -ENOENT, "no slot of step %llu", (unsigned long long)step);
    }
    *data = wire_arena_slot(job->arena.map, (uint32_t)index);
    return 0;
}

void *lb_seal_main(void *arg)
{
    struct belay *b = arg;
    pthread_mutex_lock(&b->lock);
    for (;;) {
        while (!b->seal_pending && !b->quit) {
            pthread_cond_wait(&b->seal_wanted, &b->lock);
        }
        if (!b->seal_pending) {
            break;
        }
        const void *base = b->seal_base;
        uint64_t step = b->seal_step;
        pthread_mutex_unlock(&b->lock);

        /* The main thread changes neither the list nor the arena while a seal is under way. */
        struct bl_state_digest digest = {{0, 0}};
        bl_extent_list_digest(&b->arena.list, base, &digest);

        pthread_mutex_lock(&b->lock);
        b->seal_rc = wire_session_sealed(b->session, step, &digest);
        b->seal_digest = digest;
        b->seal_pending = 0;
        BL_IGNORE(BL_FAILPOINT("sealed-unsent"), "only a kill makes sense here");
        lb_pump(b);
        pthread_cond_broadcast(&b->changed);
    }
    pthread_mutex_unlock(&b->lock);
    return NULL;
}

int belay_comm_failed(struct belay *job, const char *text)
{
    pthread_mutex_lock(&job->lock);
    lb_fail(job, BL_EPEER, text ? text : "communication failed");
    lb_pump(job);
    pthread_mutex_unlock(&job->lock);
    return 0;
}

int belay_ready(struct belay *job)
{
    pthread_mutex_lock(&job->lock);
    lb_wait_seal(job);
    int rc = lb_over(job);
    if (!rc && BL_FAILPOINT("before-ready")) {
        rc = BL_EGEN;
        lb_fail(job, -EIO, "failpoint before-ready");
    }
    if (!rc && job->plan.fresh && !job->loaded) {
        /* Step 0 is the trainer's own: written by slot_begin and slot_seal since belay_load. */
        if (job->writing_index < 0 || job->seal_rc) {
            rc = bl_err(&job->error, -EPROTO, "step %llu is not sealed",
                        (unsigned long long)job->plan.step);
        } else {
            rc = wire_session_loaded(job->session, 0, NULL, &job->seal_digest);
            job->loaded = !rc;
        }
    }
    if (!rc) {
        rc = wire_session_ready(job->session);
    }
    lb_pump(job);
    while (!rc && !job->go && !(rc = lb_over(job))) {
        lb_wait(job, UINT64_MAX);
    }
    rc = over_text(job, rc);
    pthread_mutex_unlock(&job->lock);
    return rc;
}
