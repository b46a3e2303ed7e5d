/* SPDX-License-Identifier: Apache-2.0 */
#include "gpusim_fibre.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#define GPUSIM_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GPUSIM_ASAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define GPUSIM_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define GPUSIM_TSAN 1
#endif
#endif

#ifdef GPUSIM_ASAN
extern "C" void __sanitizer_start_switch_fiber(void **fake, const void *stack, size_t bytes);
extern "C" void __sanitizer_finish_switch_fiber(void *fake, const void **stack, size_t *bytes);
#endif
#ifdef GPUSIM_TSAN
extern "C" void *__tsan_get_current_fiber(void);
extern "C" void *__tsan_create_fiber(unsigned flags);
extern "C" void __tsan_switch_to_fiber(void *fiber, unsigned flags);
#endif

/* Frames grow under the sanitizers and without optimisation. */
#define STACK_BYTES ((size_t)256 << 10)
#define GUARD_BYTES ((size_t)4096)

#if defined(__x86_64__) && !defined(GPUSIM_UCONTEXT)

/* What the ABI has a callee keep lies on the stack that is left. */
extern "C" void gpusim_stack_switch(void **keep, void *next);
asm(".text\n"
    ".hidden gpusim_stack_switch\n"
    ".globl gpusim_stack_switch\n"
    ".type gpusim_stack_switch, @function\n"
    "gpusim_stack_switch:\n"
    "    pushq %rbp\n"
    "    pushq %rbx\n"
    "    pushq %r12\n"
    "    pushq %r13\n"
    "    pushq %r14\n"
    "    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n"
    "    popq %r14\n"
    "    popq %r13\n"
    "    popq %r12\n"
    "    popq %rbx\n"
    "    popq %rbp\n"
    "    ret\n"
    ".size gpusim_stack_switch, .-gpusim_stack_switch\n");

/* A new stack "returns" to here with entry in %rbx and its argument in %r12. */
extern "C" void gpusim_stack_begin(void);
asm(".text\n"
    ".hidden gpusim_stack_begin\n"
    ".globl gpusim_stack_begin\n"
    ".type gpusim_stack_begin, @function\n"
    "gpusim_stack_begin:\n"
    "    .cfi_startproc\n"
    "    .cfi_undefined rip\n"
    "    movq %r12, %rdi\n"
    "    call *%rbx\n"
    "    ud2\n"
    "    .cfi_endproc\n"
    ".size gpusim_stack_begin, .-gpusim_stack_begin\n");

static void state_make(struct gpusim_context *c, void (*entry)(void *), void *arg)
{
    uintptr_t top = ((uintptr_t)c->stack + c->stack_bytes) & ~(uintptr_t)15;
    void **sp = (void **)top;
    *--sp = NULL; /* aligned so that `call` above enters with what the ABI wants */
    *--sp = NULL;
    *--sp = (void *)gpusim_stack_begin;
    *--sp = NULL;          /* rbp */
    *--sp = (void *)entry; /* rbx */
    *--sp = arg;           /* r12 */
    *--sp = NULL;          /* r13 */
    *--sp = NULL;          /* r14 */
    *--sp = NULL;          /* r15 */
    c->sp = sp;
}

static inline void state_switch(struct gpusim_context *from, struct gpusim_context *to)
{
    gpusim_stack_switch(&from->sp, to->sp);
}

#else

static void state_begin(unsigned entry_high, unsigned entry_low, unsigned arg_high,
                        unsigned arg_low)
{
    uintptr_t entry = ((uintptr_t)entry_high << 32) | entry_low;
    uintptr_t arg = ((uintptr_t)arg_high << 32) | arg_low;
    ((void (*)(void *))entry)((void *)arg);
}

static void state_make(struct gpusim_context *c, void (*entry)(void *), void *arg)
{
    uint64_t e = (uintptr_t)entry, a = (uintptr_t)arg;
    if (getcontext(&c->state)) {
        abort();
    }
    c->state.uc_stack.ss_sp = (void *)c->stack;
    c->state.uc_stack.ss_size = c->stack_bytes;
    c->state.uc_link = NULL;
    makecontext(&c->state, (void (*)(void))state_begin, 4, (unsigned)(e >> 32), (unsigned)e,
                (unsigned)(a >> 32), (unsigned)a);
}

static inline void state_switch(struct gpusim_context *from, struct gpusim_context *to)
{
    swapcontext(&from->state, &to->state);
}

#endif

void gpusim_context_make(struct gpusim_context *c, void (*entry)(void *), void *arg)
{
    char *memory = (char *)mmap(NULL, STACK_BYTES + GUARD_BYTES, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, GUARD_BYTES, PROT_NONE)) {
        fprintf(stderr, "gpusim: no memory for the stack of a thread\n");
        abort();
    }
    c->stack = memory + GUARD_BYTES;
    c->stack_bytes = STACK_BYTES;
    c->asan_fake = NULL;
#ifdef GPUSIM_TSAN
    c->tsan = __tsan_create_fiber(0);
#endif
    state_make(c, entry, arg);
}

void gpusim_context_host(struct gpusim_context *host)
{
    host->asan_fake = NULL;
#ifdef GPUSIM_TSAN
    host->tsan = __tsan_get_current_fiber();
#endif
}

/* Who was left last: its stack's bounds are learnt where it was left for, as ASan knows them only
 * then. Fibres are switched by one thread at a time. */
static struct gpusim_context *left;

static inline void arrive(struct gpusim_context *self)
{
    (void)self;
#ifdef GPUSIM_ASAN
    __sanitizer_finish_switch_fiber(self->asan_fake, &left->stack, &left->stack_bytes);
#endif
}

void gpusim_context_switch(struct gpusim_context *from, struct gpusim_context *to)
{
    left = from;
#ifdef GPUSIM_ASAN
    __sanitizer_start_switch_fiber(&from->asan_fake, to->stack, to->stack_bytes);
#endif
#ifdef GPUSIM_TSAN
    __tsan_switch_to_fiber(to->tsan, 0);
#endif
    state_switch(from, to);
    arrive(from);
}

void gpusim_context_entered(struct gpusim_context *self)
{
    arrive(self);
}
