/* SPDX-License-Identifier: Apache-2.0 */
/* libbelay's control thread: one poll loop; and what the session's effects do. */
#include "wire/libbelay.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"

void lb_wake(struct belay *b)
{
    uint64_t one = 1;
    if (b->wake_fd >= 0) {
        BL_IGNORE(write(b->wake_fd, &one, sizeof(one)) < 0, "a full counter wakes as well");
    }
}

static void generation_over(struct belay *b)
{
    uint64_t one = 1;
    b->over = 1;
    b->planned = 0;
    b->go = 0;
    BL_IGNORE(write(b->event_fd, &one, sizeof(one)) < 0, "a full counter is readable as well");
    pthread_cond_broadcast(&b->changed);
}

void lb_fail(struct belay *b, int code, const char *text)
{
    if (!wire_session_plan(b->session, NULL) || b->ending) {
        return;
    }
    wire_session_failed(b->session, code, text);
    generation_over(b);
}

static void effect_do(struct belay *b, const struct wire_session_effect *effect)
{
    switch (effect->kind) {
    case WIRE_EFFECT_NONE:
        return;
    case WIRE_EFFECT_REPORT:
        lb_link_report(b);
        return;
    case WIRE_EFFECT_VOTE:
        lb_votes_send(b, effect->to, &effect->vote);
        return;
    case WIRE_EFFECT_VOTE_DONE:
        b->vote_step = effect->vote.step;
        b->vote_flags = effect->vote.flags;
        b->ending |= (effect->vote.flags & (BELAY_VOTE_STOP | BELAY_VOTE_FINAL)) != 0;
        break;
    case WIRE_EFFECT_GENERATION:
        generation_over(b);
        return;
    case WIRE_EFFECT_PLAN:
        b->planned = 1;
        b->ending = 0;
        b->vote_step = UINT64_MAX;
        break;
    case WIRE_EFFECT_GO:
        b->go = 1;
        break;
    case WIRE_EFFECT_LEAVE:
        b->leave = 1;
        break;
    case WIRE_EFFECT_STOPPED: {
        uint64_t one = 1;
        b->stopped = 1;
        BL_IGNORE(write(b->event_fd, &one, sizeof(one)) < 0, "a full counter is readable as well");
        break;
    }
    case WIRE_EFFECT_REFUSED:
        b->refused = 1;
        break;
    }
    pthread_cond_broadcast(&b->changed);
}

void lb_pump(struct belay *b)
{
    struct wire_session_effect effect;
    while (wire_session_next_effect(b->session, &effect)) {
        effect_do(b, &effect);
    }
}

static short sock_events(const struct wire_sock *sock)
{
    return (short)(POLLIN | (sock->out_done < sock->out_bytes ? POLLOUT : 0));
}

enum { POLL_WAKE, POLL_LISTEN, POLL_DAEMON, POLL_PEERS };

static nfds_t poll_fill(struct belay *b, struct pollfd *fds)
{
    fds[POLL_WAKE] = (struct pollfd){.fd = b->wake_fd, .events = POLLIN};
    fds[POLL_LISTEN] = (struct pollfd){.fd = b->listen_fd, .events = POLLIN};
    fds[POLL_DAEMON] = (struct pollfd){.fd = b->daemon.fd, .events = sock_events(&b->daemon)};
    for (uint32_t i = 0; i < b->vote_peer_count; i++) {
        const struct lb_peer *peer = b->vote_peers[i];
        fds[POLL_PEERS + i] = (struct pollfd){
            .fd = peer->sock.fd, .events = peer->connecting ? POLLOUT : sock_events(&peer->sock)};
    }
    return POLL_PEERS + b->vote_peer_count;
}

static void poll_handle(struct belay *b, const struct pollfd *fds, nfds_t count, uint64_t *next)
{
    uint64_t now = lb_now_ms();
    if (fds[POLL_WAKE].revents) {
        uint64_t unused;
        BL_IGNORE(read(b->wake_fd, &unused, sizeof(unused)) < 0, "woken is woken");
    }
    /* From the end: a connection that goes away moves only those behind it. */
    for (uint32_t i = (uint32_t)(count - POLL_PEERS); i > 0; i--) {
        if (fds[POLL_PEERS + i - 1].revents) {
            lb_votes_read(b, i - 1, fds[POLL_PEERS + i - 1].revents);
        }
    }
    if (fds[POLL_LISTEN].revents) {
        lb_votes_accept(b, now);
    }
    uint64_t link = lb_link_tick(b, now, fds[POLL_DAEMON].revents);
    uint64_t session = wire_session_on_tick(b->session, now);
    lb_pump(b);
    lb_votes_tidy(b, now);
    *next = link < session ? link : session;
}

void *lb_control_main(void *arg)
{
    struct belay *b = arg;
    struct pollfd fds[POLL_PEERS + LB_PEERS_MAX];
    uint64_t next = 0;
    pthread_mutex_lock(&b->lock);
    wire_session_on_link_up(b->session);
    lb_pump(b);
    lb_link_tick(b, lb_now_ms(), POLLIN); /* frames that came with the hello */
    while (!b->quit) {
        nfds_t count = poll_fill(b, fds);
        pthread_mutex_unlock(&b->lock);
        uint64_t now = lb_now_ms();
        uint64_t left = next > now ? next - now : 0;
        int rc = poll(fds, count, left > LB_ALIVE_MS ? LB_ALIVE_MS : (int)left);
        if (rc < 0) { /* EINTR, or the kernel is out of memory for a moment: look at timers only */
            for (nfds_t i = 0; i < count; i++) {
                fds[i].revents = 0;
            }
        }
        atomic_store_explicit(&b->page->alive_ns, bl_now_ns(), memory_order_relaxed);
        pthread_mutex_lock(&b->lock);
        poll_handle(b, fds, count, &next);
    }
    pthread_mutex_unlock(&b->lock);
    return NULL;
}
