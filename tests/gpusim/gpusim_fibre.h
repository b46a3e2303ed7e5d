/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fibres: stacks of their own, switched by hand on x86-64 and by ucontext elsewhere (or with
 * GPUSIM_UCONTEXT defined). ASan and TSan are told.
 */
#ifndef GPUSIM_GPUSIM_FIBRE_H
#define GPUSIM_GPUSIM_FIBRE_H

#include <stddef.h>

#if !defined(__x86_64__) || defined(GPUSIM_UCONTEXT)
#include <ucontext.h>
#endif

/* Where one can go on from: a fibre, or the thread that runs them. */
struct gpusim_context {
#if defined(__x86_64__) && !defined(GPUSIM_UCONTEXT)
    void *sp;
#else
    ucontext_t state;
#endif
    const void *stack; /* lowest address; of a thread: filled by a switch from it */
    size_t stack_bytes;
    void *asan_fake;
    void *tsan;
};

/* A new fibre that starts in entry(arg), which never returns. Aborts when there is no memory.
 * Stacks are kept for ever and have a page without access below them. */
void gpusim_context_make(struct gpusim_context *c, void (*entry)(void *), void *arg);
/* Begins and ends a stay of this thread in `host`, from which fibres are entered. */
void gpusim_context_host(struct gpusim_context *host);
void gpusim_context_switch(struct gpusim_context *from, struct gpusim_context *to);
/* First thing that a new fibre does. */
void gpusim_context_entered(struct gpusim_context *self);

#endif
