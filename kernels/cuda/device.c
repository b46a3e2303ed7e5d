/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which GPUs there are, whether this build runs on one, and taking it. Every refusal is made here,
 * before a kernel runs, with the numbers that it is made from.
 */
#include "kernels/cuda/device.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/human.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/plugin.h"

extern char **environ;

/* Compute capabilities of the machine code in here, ascending; the last also as PTX. */
static const uint32_t archs[] = {KERN_CUDA_ARCHS};
#define ARCH_COUNT (sizeof archs / sizeof *archs)

const char *kern_cuda_built(void)
{
    static char text[128];
    if (text[0] == 0) {
        size_t at = (size_t)snprintf(text, sizeof text, "CUDA %d.%d,", CUDART_VERSION / 1000,
                                     CUDART_VERSION / 10 % 100);
        for (size_t i = 0; i < ARCH_COUNT && at < sizeof text; i++) {
            at += (size_t)snprintf(text + at, sizeof text - at, " sm_%u", archs[i]);
        }
        if (at < sizeof text) {
            snprintf(text + at, sizeof text - at, " compute_%u", archs[ARCH_COUNT - 1]);
        }
    }
    return text;
}

/* ---- which devices ---- */

static int driver_error(cudaError_t error, struct bl_errmsg *msg)
{
    int driver = 0;
    cudaGetLastError();
    if (error != cudaErrorInsufficientDriver) {
        return bl_err(msg, BL_EDEVICE, "the driver does not answer: %s: %s",
                      cudaGetErrorName(error), cudaGetErrorString(error));
    }
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
        return bl_err(msg, BL_EDEVICE, "no driver: libcuda.so.1 was not found");
    }
    return bl_err(msg, BL_EDEVICE,
                  "the driver is too old: it has CUDA %d.%d, this build needs %d.%d", driver / 1000,
                  driver / 10 % 100, CUDART_VERSION / 1000, CUDART_VERSION / 10 % 100);
}

int kern_cuda_count(uint32_t *ret, struct bl_errmsg *msg)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaErrorNoDevice) {
        cudaGetLastError();
        count = 0;
    } else if (error != cudaSuccess) {
        return driver_error(error, msg);
    }
    *ret = (uint32_t)count;
    return 0;
}

static int check_ordinal(uint32_t device, struct bl_errmsg *msg)
{
    uint32_t count = 0;
    int rc = kern_cuda_count(&count, msg);
    if (rc == 0 && device >= count) {
        const char *mask = getenv("CUDA_VISIBLE_DEVICES");
        return bl_err(msg, BL_ECONFIG, "device %u is wanted, %u %s visible%s%.60s", device, count,
                      count == 1 ? "is" : "are", mask != NULL ? " (CUDA_VISIBLE_DEVICES=" : "",
                      mask != NULL ? mask : "");
    }
    return rc;
}

int kern_cuda_identify(struct kern_plugin_device *ret, uint32_t device, struct bl_errmsg *msg)
{
    struct cudaDeviceProp prop;
    int driver = 0, runtime = 0;
    int rc = check_ordinal(device, msg);
    if (rc != 0) {
        return rc;
    }
    memset(ret, 0, sizeof *ret);
    cudaError_t error = cudaGetDeviceProperties(&prop, (int)device);
    if (error == cudaSuccess) {
        error = cudaDeviceGetPCIBusId(ret->bus_id, sizeof ret->bus_id, (int)device);
    }
    if (error == cudaSuccess) {
        error = cudaDriverGetVersion(&driver);
    }
    if (error == cudaSuccess) {
        error = cudaRuntimeGetVersion(&runtime);
    }
    if (error != cudaSuccess) {
        cudaGetLastError();
        return bl_err(msg, BL_EDEVICE, "device %u: %s: %s", device, cudaGetErrorName(error),
                      cudaGetErrorString(error));
    }
    snprintf(ret->name, sizeof ret->name, "%.*s", (int)sizeof ret->name - 1, prop.name);
    ret->major = (uint32_t)prop.major;
    ret->minor = (uint32_t)prop.minor;
    ret->sm_count = (uint32_t)prop.multiProcessorCount;
    ret->memory_bytes = prop.totalGlobalMem;
    ret->driver_version = (uint32_t)driver;
    ret->runtime_version = (uint32_t)runtime;
    return 0;
}

/* ---- refusals ---- */

/* Machine code runs on its own major version from its minor on; PTX on all that is newer. */
static int check_arch(const struct kern_plugin_device *d, uint32_t device, struct bl_errmsg *msg)
{
    uint32_t has = d->major * 10 + d->minor;
    for (size_t i = 0; i < ARCH_COUNT; i++) {
        if (archs[i] / 10 == d->major && archs[i] <= has) {
            return 0;
        }
    }
    if (has >= archs[ARCH_COUNT - 1]) {
        return 0;
    }
    return bl_err(msg, BL_ECONFIG,
                  "device %u (%s) has compute capability %u.%u, this build runs on none like it "
                  "(%s): configure it with -Dgpu_archs=%u",
                  device, d->name, d->major, d->minor, kern_cuda_built(), has);
}

/* What would change products behind the function id's back. The trainer unsets it; a library that
 * was loaded before has read it already. */
static int check_environment(struct bl_errmsg *msg)
{
    static const char *const names[] = {"NVIDIA_TF32_OVERRIDE=", "CUBLAS_", "CUBLASLT_"};
    for (char **at = environ; at != NULL && *at != NULL; at++) {
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
            if (strncmp(*at, names[i], strlen(names[i])) == 0) {
                return bl_err(msg, BL_ECONFIG, "%.*s is set: it changes matrix products; unset it",
                              (int)strcspn(*at, "="), *at);
            }
        }
    }
    return 0;
}

static int check_memory(const struct kern_cuda *cuda, uint64_t arena_bytes, uint64_t free_bytes,
                        uint64_t total_bytes, struct bl_errmsg *msg)
{
    char wanted[BL_HUMAN_MAX], arena[BL_HUMAN_MAX], beside[BL_HUMAN_MAX], is_free[BL_HUMAN_MAX];
    char total[BL_HUMAN_MAX];
    if (arena_bytes + KERN_CUDA_WORKSPACE <= free_bytes) {
        return 0;
    }
    return bl_err(
        msg, BL_ECONFIG,
        "device %d (%s): %s of memory are wanted (%s planned, %s beside it for products), "
        "%s of %s are free: see --dry-run; smaller micro-batches, recomputation, "
        "train.head_chunk, a higher ZeRO stage or more ranks take less%s",
        cuda->ordinal, cuda->device_name, bl_human_bytes(wanted, arena_bytes + KERN_CUDA_WORKSPACE),
        bl_human_bytes(arena, arena_bytes), bl_human_bytes(beside, KERN_CUDA_WORKSPACE),
        bl_human_bytes(is_free, free_bytes), bl_human_bytes(total, total_bytes),
        free_bytes < total_bytes / 10 * 9 ? "; other processes hold some" : "");
}

/* ---- taking it ---- */

static int take_memory(struct kern_cuda *cuda, uint64_t arena_bytes, struct bl_errmsg *msg)
{
    size_t free_bytes, total_bytes;
    cudaError_t error = cudaMemGetInfo(&free_bytes, &total_bytes);
    if (error != cudaSuccess) {
        return kern_cuda_error(cuda, error, "memory", msg);
    }
    int rc = check_memory(cuda, arena_bytes, free_bytes, total_bytes, msg);
    if (rc != 0 || arena_bytes == 0) {
        return rc;
    }
    arena_bytes = (arena_bytes + KERN_ARENA_ALIGN - 1) / KERN_ARENA_ALIGN * KERN_ARENA_ALIGN;
    error = cudaMalloc(&cuda->memory, arena_bytes);
    if (error != cudaSuccess) {
        char text[BL_HUMAN_MAX + 32], bytes[BL_HUMAN_MAX];
        cuda->memory = NULL;
        snprintf(text, sizeof text, "%s in one piece", bl_human_bytes(bytes, arena_bytes));
        rc = kern_cuda_error(cuda, error, text, msg);
        return error == cudaErrorMemoryAllocation ? BL_ECONFIG : rc;
    }
    kern_arena_init(&cuda->arena, arena_bytes);
    return 0;
}

static int make_streams(struct kern_cuda *cuda, struct bl_errmsg *msg)
{
    cudaError_t error = cudaStreamCreateWithFlags(&cuda->compute, cudaStreamNonBlocking);
    if (error == cudaSuccess) {
        error = cudaStreamCreateWithFlags(&cuda->out, cudaStreamNonBlocking);
    }
    if (error == cudaSuccess) {
        error = cudaEventCreateWithFlags(&cuda->made, cudaEventDisableTiming);
    }
    if (error == cudaSuccess) {
        error = cudaEventCreateWithFlags(&cuda->copied, cudaEventDisableTiming);
    }
    if (error == cudaSuccess) {
        error = cudaHostAlloc((void **)&cuda->landing, KERN_CUDA_LANDING_BYTES, 0);
    }
    return error == cudaSuccess ? 0 : kern_cuda_error(cuda, error, "streams", msg);
}

static int take(struct kern_cuda *cuda, uint64_t arena_bytes, struct bl_errmsg *msg)
{
    cudaError_t error = cudaSetDevice(cuda->ordinal);
    if (error != cudaSuccess) {
        cudaGetLastError();
        return kern_cuda_error(cuda, error, "cannot be taken", msg);
    }
    int rc = take_memory(cuda, arena_bytes, msg);
    rc = rc == 0 ? make_streams(cuda, msg) : rc;
    return rc == 0 ? kern_cuda_matmul_open(cuda, msg) : rc;
}

int kern_cuda_open(struct kern **ret, int device, enum kern_type type, uint64_t arena_bytes,
                   struct bl_errmsg *msg)
{
    struct kern_plugin_device d;
    int rc = check_environment(msg);
    rc = rc == 0 ? kern_cuda_identify(&d, (uint32_t)device, msg) : rc;
    rc = rc == 0 ? check_arch(&d, (uint32_t)device, msg) : rc;
    if (rc != 0) {
        return rc;
    }
    struct kern_cuda *cuda = calloc(1, sizeof *cuda);
    if (cuda == NULL) {
        return bl_err_code(msg, -ENOMEM, "device %d", device);
    }
    cuda->base.ops = &kern_cuda_ops;
    cuda->base.type = type;
    cuda->base.real_bytes = type == KERN_BF16 ? 2 : 4;
    cuda->base.is_device = 1;
    cuda->ordinal = device;
    cuda->sm_count = d.sm_count;
    cuda->capability = d.major * 10 + d.minor;
    cuda->driver_version = d.driver_version;
    cuda->newest = "opening";
    snprintf(cuda->device_name, sizeof cuda->device_name, "%.63s", d.name);
    rc = take(cuda, arena_bytes, msg);
    if (rc != 0) {
        kern_cuda_close(&cuda->base);
        return rc;
    }
    *ret = &cuda->base;
    return 0;
}

/* A device whose wait was given up keeps what it has: every call that frees would wait, too. */
void kern_cuda_close(struct kern *k)
{
    struct kern_cuda *cuda = kern_cuda_of(k);
    kern_cuda_drain(cuda);
    if (!cuda->is_lost) {
        kern_cuda_staging_close(cuda);
        kern_cuda_matmul_close(cuda);
        cudaFreeHost(cuda->landing);
        if (cuda->copied != NULL) {
            cudaEventDestroy(cuda->copied);
        }
        if (cuda->made != NULL) {
            cudaEventDestroy(cuda->made);
        }
        if (cuda->out != NULL) {
            cudaStreamDestroy(cuda->out);
        }
        if (cuda->compute != NULL) {
            cudaStreamDestroy(cuda->compute);
        }
        cudaFree(cuda->memory);
        kern_arena_close(&cuda->arena);
        cudaGetLastError(); /* of a device that failed before */
        free(cuda);
    }
}

const char *kern_cuda_build_name(struct kern *k)
{
    struct kern_cuda *cuda = kern_cuda_of(k);
    snprintf(cuda->build_name, sizeof cuda->build_name,
             "belay-cuda-%d sm_%u x%u %s driver %u runtime %d cublaslt %llu algos %016llx",
             KERN_CUDA_VERSION, cuda->capability, cuda->sm_count,
             cuda->base.type == KERN_BF16 ? "bf16" : "fp32", cuda->driver_version, CUDART_VERSION,
             (unsigned long long)kern_cuda_matmul_version(), (unsigned long long)cuda->algorithms);
    return cuda->build_name;
}
