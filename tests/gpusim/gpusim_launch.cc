/* SPDX-License-Identifier: Apache-2.0 */
#include <cuda_runtime.h>
#include <pthread.h>
#include <stdlib.h>

#include "gpusim_device.h"
#include "gpusim_run.h"

#define KERNELS_MAX 512u

struct launch {
    struct gpusim_grid grid;
    uint64_t seed;
    int is_late, is_ecc, is_stuck;
    uint64_t stuck_since; /* of gpusim_stuck_wait */
};

/* Kernels that cudaFuncSetAttribute allowed more shared memory. */
static struct {
    const void *kernel;
    size_t bytes;
} allowed[KERNELS_MAX];
static uint32_t allowed_count;
static uint64_t seed_now, launches;
static bool has_seed;
static pthread_mutex_t launch_lock = PTHREAD_MUTEX_INITIALIZER; /* all above */
static pthread_mutex_t run_lock = PTHREAD_MUTEX_INITIALIZER;    /* one grid at a time */

void gpusim_seed(uint64_t seed)
{
    pthread_mutex_lock(&launch_lock);
    seed_now = seed;
    has_seed = true;
    pthread_mutex_unlock(&launch_lock);
}

uint64_t gpusim_launch_count(void)
{
    pthread_mutex_lock(&launch_lock);
    uint64_t n = launches;
    pthread_mutex_unlock(&launch_lock);
    return n;
}

static size_t shared_allowed(const void *kernel)
{
    for (uint32_t i = 0; i < allowed_count; i++) {
        if (allowed[i].kernel == kernel) {
            return allowed[i].bytes;
        }
    }
    return GPUSIM_SHARED_DEFAULT;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value)
{
    cudaError_t error = gpusim_enter();
    if (error != cudaSuccess || attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
        return gpusim_error(error);
    }
    if (value < 0 || static_cast<size_t>(value) > GPUSIM_SHARED_MAX) {
        return gpusim_error(cudaErrorInvalidValue);
    }
    pthread_mutex_lock(&launch_lock);
    uint32_t i = 0;
    while (i < allowed_count && allowed[i].kernel != kernel) {
        i++;
    }
    if (i == KERNELS_MAX) {
        abort();
    }
    allowed[i].kernel = kernel;
    allowed[i].bytes = static_cast<size_t>(value);
    allowed_count = i == allowed_count ? i + 1 : allowed_count;
    pthread_mutex_unlock(&launch_lock);
    return cudaSuccess;
}

static cudaError_t grid_check(const struct gpusim_grid *grid)
{
    const uint32_t *b = grid->blocks, *t = grid->threads;
    uint64_t threads = static_cast<uint64_t>(t[0]) * t[1] * t[2];
    if (b[0] == 0 || b[1] == 0 || b[2] == 0 || b[0] > 2147483647u || b[1] > 65535 || b[2] > 65535 ||
        t[2] > 64 || threads == 0 || threads > GPUSIM_THREADS_MAX) {
        return cudaErrorInvalidConfiguration;
    }
    return grid->shared_bytes > shared_allowed(grid->kernel) ? cudaErrorInvalidValue : cudaSuccess;
}

static void launch_run(void *arg)
{
    struct launch *l = static_cast<struct launch *>(arg);
    if (l->is_stuck) {
        gpusim_stuck_wait(l->stuck_since);
        return;
    }
    if (l->is_late || l->is_ecc) {
        gpusim_error_stick(l->is_late ? cudaErrorIllegalAddress : cudaErrorECCUncorrectable);
        return;
    }
    pthread_mutex_lock(&run_lock);
    gpusim_grid_run(&l->grid, l->seed);
    pthread_mutex_unlock(&run_lock);
}

static void launch_drop(void *arg)
{
    struct launch *l = static_cast<struct launch *>(arg);
    free(l->grid.arg);
    free(l);
}

void gpusim_grid_submit(const struct gpusim_grid *grid, cudaStream_t stream)
{
    struct launch *l = static_cast<struct launch *>(calloc(1, sizeof *l));
    if (!l) {
        abort();
    }
    l->grid = *grid;
    cudaError_t error = gpusim_enter();
    pthread_mutex_lock(&launch_lock);
    if (!has_seed) {
        seed_now = gpusim_env_u64("GPUSIM_SEED", 0);
        has_seed = true;
    }
    /* Launches differ from one another, and are the same in each run of one seed. */
    l->seed = seed_now ? seed_now * 1000003 + launches : 0;
    launches++;
    if (error == cudaSuccess) {
        error = grid_check(grid);
    }
    pthread_mutex_unlock(&launch_lock);
    if (error == cudaSuccess && gpusim_fault_is_due(GPUSIM_FAULT_LAUNCH)) {
        error = cudaErrorLaunchOutOfResources;
    }
    if (error != cudaSuccess) {
        launch_drop(l);
        gpusim_error(error);
        return;
    }
    l->is_late = gpusim_fault_is_due(GPUSIM_FAULT_LATE);
    l->is_ecc = gpusim_fault_is_due(GPUSIM_FAULT_ECC);
    l->stuck_since = gpusim_stuck_since();
    l->is_stuck = gpusim_fault_is_due(GPUSIM_FAULT_STUCK);
    gpusim_stream_submit(stream, launch_run, launch_drop, l);
}
