/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device memory is host memory with bytes behind it that must not change; large allocations are
 * mapped, and only their ends are poisoned, so that they cost what is touched.
 *
 * GPUSIM_GUARD=1: all of it is mapped, and nobody may touch it but while an operation of a stream
 * runs: a host that reads device memory by mistake dies of SIGSEGV, surely so with
 * GPUSIM_STREAMS=sync.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "tests/gpusim/gpusim_device.h"

#define ALIGN           ((size_t)256)
#define LARGE           ((size_t)16 << 20)
#define EDGE            ((size_t)4096) /* poisoned of a large one */
#define TAIL            ((size_t)256)
#define TAIL_BYTE       0xb9
#define HOST_RANGES_MAX 4096

struct allocation {
    struct allocation *next;
    char *memory; /* as the caller knows it */
    size_t bytes;
    int is_mapped, is_host;
};

static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER; /* all below */
static struct allocation *g_all;
static uint64_t g_used;
static uint32_t g_inside; /* operations that run */
static int g_is_guarded = -1;
static struct {
    char *memory;
    size_t bytes;
} g_registered[HOST_RANGES_MAX];
static uint32_t g_registered_count;

static uint64_t memory_total(void)
{
    return gpusim_env_u64("GPUSIM_MEMORY_MIB", 81920) << 20;
}

/* Under the lock. */
static int is_guarded(void)
{
    if (g_is_guarded < 0) {
        g_is_guarded = gpusim_env_u64("GPUSIM_GUARD", 0) != 0;
    }
    return g_is_guarded;
}

static void guard_all(int protection)
{
    for (const struct allocation *a = g_all; a; a = a->next) {
        if (a->is_mapped && !a->is_host) {
            mprotect(a->memory, a->bytes + TAIL, protection);
        }
    }
}

void gpusim_memory_enter(void)
{
    pthread_mutex_lock(&g_lock);
    if (is_guarded() && g_inside++ == 0) {
        guard_all(PROT_READ | PROT_WRITE);
    }
    pthread_mutex_unlock(&g_lock);
}

void gpusim_memory_leave(void)
{
    pthread_mutex_lock(&g_lock);
    if (is_guarded() && --g_inside == 0) {
        guard_all(PROT_NONE);
    }
    pthread_mutex_unlock(&g_lock);
}

static void tail_check(const struct allocation *a)
{
    for (size_t i = 0; i < TAIL; i++) {
        if ((unsigned char)a->memory[a->bytes + i] != TAIL_BYTE) {
            fprintf(stderr, "gpusim: something wrote %zu bytes behind an allocation of %zu bytes\n",
                    i, a->bytes);
            abort();
        }
    }
}

/* Exactly as long as asked for under ASan, which then sees each byte beyond. */
static char *memory_take(size_t bytes, int is_mapped)
{
    void *memory = NULL;
    if (is_mapped) {
        memory = mmap(NULL, bytes + TAIL, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        return memory == MAP_FAILED ? NULL : memory;
    }
    return posix_memalign(&memory, ALIGN, bytes + gpusim_tail_bytes()) ? NULL : memory;
}

static cudaError_t allocate(void **ret, size_t bytes, int is_host)
{
    struct allocation *a = calloc(1, sizeof *a);
    if (!a) {
        return cudaErrorMemoryAllocation;
    }
    a->bytes = bytes;
    a->is_host = is_host;
    pthread_mutex_lock(&g_lock);
    int guarded = is_guarded() && !is_host;
    pthread_mutex_unlock(&g_lock);
    a->is_mapped = bytes >= LARGE || guarded;
    a->memory = memory_take(bytes, a->is_mapped);
    if (!a->memory) {
        free(a);
        return cudaErrorMemoryAllocation;
    }
    size_t edge = bytes >= LARGE ? EDGE : bytes;
    gpusim_poison(a->memory, edge);
    gpusim_poison(a->memory + bytes - edge, edge);
    if (a->is_mapped || gpusim_tail_bytes()) {
        memset(a->memory + bytes, TAIL_BYTE, TAIL);
    }
    pthread_mutex_lock(&g_lock);
    a->next = g_all;
    g_all = a;
    g_used += is_host ? 0 : bytes;
    if (guarded && g_inside == 0) {
        mprotect(a->memory, bytes + TAIL, PROT_NONE);
    }
    pthread_mutex_unlock(&g_lock);
    *ret = a->memory;
    return cudaSuccess;
}

static cudaError_t release(void *memory, int is_host)
{
    if (!memory) {
        return cudaSuccess;
    }
    pthread_mutex_lock(&g_lock);
    struct allocation **link = &g_all;
    while (*link && ((*link)->memory != memory || (*link)->is_host != is_host)) {
        link = &(*link)->next;
    }
    struct allocation *a = *link;
    if (a) {
        *link = a->next;
        g_used -= is_host ? 0 : a->bytes;
    }
    pthread_mutex_unlock(&g_lock);
    if (!a) {
        return gpusim_error(cudaErrorInvalidValue);
    }
    if (a->is_mapped) {
        mprotect(a->memory, a->bytes + TAIL, PROT_READ | PROT_WRITE);
    }
    if (a->is_mapped || gpusim_tail_bytes()) {
        tail_check(a);
    }
    if (a->is_mapped) {
        munmap(a->memory, a->bytes + TAIL);
    } else {
        free(a->memory);
    }
    free(a);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **memory, size_t bytes)
{
    cudaError_t error = gpusim_enter();
    if (error != cudaSuccess) {
        return gpusim_error(error);
    }
    *memory = NULL;
    if (bytes == 0) {
        return cudaSuccess;
    }
    pthread_mutex_lock(&g_lock);
    int fits = bytes <= memory_total() - g_used;
    pthread_mutex_unlock(&g_lock);
    if (!fits || gpusim_fault_is_due(GPUSIM_FAULT_MALLOC)) {
        return gpusim_error(cudaErrorMemoryAllocation);
    }
    return gpusim_error(allocate(memory, bytes, 0));
}

cudaError_t cudaFree(void *memory)
{
    cudaError_t error = memory ? cudaDeviceSynchronize() : cudaSuccess;
    return error != cudaSuccess ? error : release(memory, 0);
}

cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned int flags)
{
    cudaError_t error = gpusim_enter();
    (void)flags;
    return gpusim_error(error != cudaSuccess ? error : allocate(memory, bytes, 1));
}

cudaError_t cudaMallocHost(void **memory, size_t bytes)
{
    return cudaHostAlloc(memory, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void *memory)
{
    cudaError_t error = memory ? cudaDeviceSynchronize() : cudaSuccess;
    return error != cudaSuccess ? error : release(memory, 1);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    cudaError_t error = gpusim_enter();
    if (error != cudaSuccess) {
        return gpusim_error(error);
    }
    uint64_t held = gpusim_env_u64("GPUSIM_MEMORY_HELD_MIB", 0) << 20;
    pthread_mutex_lock(&g_lock);
    *total_bytes = memory_total();
    *free_bytes = g_used + held < *total_bytes ? *total_bytes - g_used - held : 0;
    pthread_mutex_unlock(&g_lock);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned int flags)
{
    cudaError_t error = gpusim_enter();
    char *from = memory;
    (void)flags;
    if (error != cudaSuccess || !memory || bytes == 0) {
        return gpusim_error(error != cudaSuccess ? error : cudaErrorInvalidValue);
    }
    pthread_mutex_lock(&g_lock);
    for (uint32_t i = 0; i < g_registered_count; i++) {
        if (from < g_registered[i].memory + g_registered[i].bytes &&
            g_registered[i].memory < from + bytes) {
            error = cudaErrorHostMemoryAlreadyRegistered;
        }
    }
    if (error == cudaSuccess && g_registered_count == HOST_RANGES_MAX) {
        error = cudaErrorMemoryAllocation;
    }
    if (error == cudaSuccess) {
        g_registered[g_registered_count].memory = memory;
        g_registered[g_registered_count++].bytes = bytes;
    }
    pthread_mutex_unlock(&g_lock);
    return gpusim_error(error);
}

cudaError_t cudaHostUnregister(void *memory)
{
    cudaError_t error = cudaErrorHostMemoryNotRegistered;
    pthread_mutex_lock(&g_lock);
    for (uint32_t i = 0; i < g_registered_count; i++) {
        if (g_registered[i].memory == memory) {
            g_registered[i] = g_registered[--g_registered_count];
            error = cudaSuccess;
            break;
        }
    }
    pthread_mutex_unlock(&g_lock);
    return gpusim_error(error);
}

int gpusim_memory_is_device(const void *memory, size_t bytes)
{
    const char *from = memory;
    int is_inside = 0;
    pthread_mutex_lock(&g_lock);
    for (const struct allocation *a = g_all; a && !is_inside; a = a->next) {
        is_inside = !a->is_host && from >= a->memory && from < a->memory + a->bytes &&
                    bytes <= (size_t)(a->memory + a->bytes - from);
    }
    pthread_mutex_unlock(&g_lock);
    return is_inside;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *memory)
{
    cudaError_t error = gpusim_enter();
    if (error != cudaSuccess) {
        return gpusim_error(error);
    }
    memset(attributes, 0, sizeof *attributes);
    attributes->type =
        gpusim_memory_is_device(memory, 1) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    attributes->devicePointer = (void *)(uintptr_t)memory;
    return cudaSuccess;
}
