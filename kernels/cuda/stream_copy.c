/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The queue of a GPU: errors that come late, waiting, memory and copies.
 *
 * A wait asks the stream again and again instead of blocking in the runtime: then it can be ended,
 * when a peer is lost and a collective on the stream never completes. What the stream still holds
 * cannot be taken back, so a device whose wait was given up is left as it is.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "kernels/cuda/device.h"
#include "kernels/cuda/ops.h"

#define WAIT_SPINS   64U      /* asked at once: what is nearly done */
#define WAIT_NS      50000L   /* then asked this often */
#define CHECK_NS_MIN 1000000L /* `check` is called no more often */

/* ---- errors ---- */

void kern_cuda_note(struct kern *k, cudaError_t error, const char *what)
{
    struct kern_cuda *cuda = kern_cuda_of(k);
    if (error != cudaSuccess && cuda->failed == cudaSuccess) {
        cuda->failed = error;
        snprintf(cuda->failed_in, sizeof cuda->failed_in, "%s", what);
    }
}

int kern_cuda_error(const struct kern_cuda *cuda, cudaError_t error, const char *what,
                    struct bl_errmsg *msg)
{
    return bl_err(msg, BL_EDEVICE, "device %d (%s): %s: %s: %s", cuda->ordinal, cuda->device_name,
                  what, cudaGetErrorName(error), cudaGetErrorString(error));
}

/* ---- waiting ---- */

static cudaError_t ask(cudaStream_t stream, cudaEvent_t event)
{
    cudaError_t error = stream != NULL ? cudaStreamQuery(stream) : cudaEventQuery(event);
    if (error == cudaErrorNotReady) {
        cudaGetLastError(); /* no error, but kept as one: launches would find it */
    }
    return error;
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* Until the stream, or the event where stream is NULL, has nothing left. *ret: the runtime's error.
 * Not 0: the check ended it. */
static int wait_for(struct kern_cuda *cuda, cudaStream_t stream, cudaEvent_t event,
                    cudaError_t *ret, struct bl_errmsg *msg)
{
    const struct timespec pause = {0, WAIT_NS};
    int64_t checked = now_ns();
    for (uint32_t i = 0; (*ret = ask(stream, event)) == cudaErrorNotReady; i++) {
        if (i < WAIT_SPINS) {
            continue;
        }
        nanosleep(&pause, NULL);
        if (cuda->check == NULL || now_ns() - checked < CHECK_NS_MIN) {
            continue;
        }
        int rc = cuda->check(cuda->check_arg, msg);
        if (rc != 0) {
            cuda->is_lost = 1;
            return rc;
        }
        checked = now_ns();
    }
    return 0;
}

static int lost(const struct kern_cuda *cuda, struct bl_errmsg *msg)
{
    return bl_err(msg, BL_EDEVICE, "device %d (%s): a wait for it was given up", cuda->ordinal,
                  cuda->device_name);
}

/* What was downloaded goes to where it was asked for, unless it is not there. */
static void land(struct kern_cuda *cuda, int is_there)
{
    for (uint32_t i = 0; is_there && i < cuda->landing_count; i++) {
        const struct kern_cuda_landing *l = &cuda->landings[i];
        memcpy(l->host, cuda->landing + l->at, l->bytes);
    }
    cuda->landing_used = cuda->landing_count = 0;
}

int kern_cuda_sync(struct kern *k, struct bl_errmsg *msg)
{
    struct kern_cuda *cuda = kern_cuda_of(k);
    cudaError_t error;
    if (cuda->is_lost) {
        return lost(cuda, msg);
    }
    int rc = wait_for(cuda, cuda->compute, NULL, &error, msg);
    if (rc != 0) {
        return rc;
    }
    if (cuda->failed == cudaSuccess && error != cudaSuccess) {
        char what[64]; /* came from the queue: at or before the newest */
        snprintf(what, sizeof what, "%.40s or before", cuda->newest);
        kern_cuda_note(k, error, what);
    }
    land(cuda, cuda->failed == cudaSuccess);
    if (cuda->failed == cudaSuccess) {
        return 0;
    }
    rc = kern_cuda_error(cuda, cuda->failed, cuda->failed_in, msg);
    cuda->failed = cudaSuccess;
    cuda->failed_in[0] = 0;
    return rc;
}

void kern_cuda_drain(struct kern_cuda *cuda)
{
    cudaError_t error;
    if (!cuda->is_lost &&
        (cuda->compute == NULL || wait_for(cuda, cuda->compute, NULL, &error, NULL) == 0) &&
        cuda->out != NULL) {
        BL_IGNORE(wait_for(cuda, cuda->out, NULL, &error, NULL), "is_lost tells it");
    }
}

/* ---- memory ---- */

void *kern_cuda_alloc(struct kern *k, uint64_t bytes)
{
    struct kern_cuda *cuda = kern_cuda_of(k);
    uint64_t offset;
    void *p = NULL;
    if (cuda->memory != NULL) {
        return kern_arena_take(&cuda->arena, bytes, &offset) == 0 ? (char *)cuda->memory + offset
                                                                  : NULL;
    }
    if (cudaMalloc(&p, bytes == 0 ? 1 : bytes) != cudaSuccess) {
        cudaGetLastError(); /* told by the result */
        return NULL;
    }
    return p;
}

void kern_cuda_free(struct kern *k, void *p, uint64_t bytes)
{
    struct kern_cuda *cuda = kern_cuda_of(k);
    (void)bytes;
    if (p == NULL) {
        return;
    }
    kern_cuda_drain(cuda);
    if (cuda->memory != NULL) {
        kern_arena_give(&cuda->arena, (uint64_t)((char *)p - (char *)cuda->memory));
    } else if (!cuda->is_lost) { /* else cudaFree would wait */
        kern_cuda_note(k, cudaFree(p), "free");
    }
}

/* ---- copies ---- */

static void copy_async(struct kern *k, void *to, const void *from, uint64_t bytes,
                       enum cudaMemcpyKind kind, const char *what)
{
    struct kern_cuda *cuda = kern_cuda_of(k);
    if (bytes != 0) {
        cuda->newest = what;
        kern_cuda_note(k, cudaMemcpyAsync(to, from, bytes, kind, cuda->compute), what);
    }
}

void kern_cuda_upload(struct kern *k, void *to, const void *host, uint64_t bytes)
{
    copy_async(k, to, host, bytes, cudaMemcpyHostToDevice, "upload");
}

void kern_cuda_download(struct kern *k, void *host, const void *from, uint64_t bytes)
{
    struct kern_cuda *cuda = kern_cuda_of(k);
    if (bytes <= KERN_CUDA_LANDING_BYTES - cuda->landing_used &&
        cuda->landing_count < KERN_CUDA_LANDING_MAX) {
        struct kern_cuda_landing *l = &cuda->landings[cuda->landing_count++];
        *l = (struct kern_cuda_landing){host, cuda->landing_used, (uint32_t)bytes};
        cuda->landing_used += (uint32_t)bytes;
        host = cuda->landing + l->at;
    }
    copy_async(k, host, from, bytes, cudaMemcpyDeviceToHost, "download");
}

void kern_cuda_copy(struct kern *k, void *to, const void *from, uint64_t bytes)
{
    copy_async(k, to, from, bytes, cudaMemcpyDeviceToDevice, "copy");
}

void kern_cuda_zero(struct kern *k, void *to, uint64_t bytes)
{
    struct kern_cuda *cuda = kern_cuda_of(k);
    if (bytes != 0) {
        cuda->newest = "zero";
        kern_cuda_note(k, cudaMemsetAsync(to, 0, bytes, cuda->compute), "zero");
    }
}

/* ---- copies out, beside the next pass ---- */

void kern_cuda_publish(struct kern *k, void *host, const void *from, uint64_t bytes)
{
    struct kern_cuda *cuda = kern_cuda_of(k);
    cudaError_t error = cuda->failed; /* what was not launched is not in what would be copied */
    if (error == cudaSuccess) {
        error = cudaEventRecord(cuda->made, cuda->compute);
    }
    if (error == cudaSuccess) {
        error = cudaStreamWaitEvent(cuda->out, cuda->made, 0);
    }
    if (error == cudaSuccess && bytes != 0) {
        error = cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, cuda->out);
    }
    if (error == cudaSuccess) {
        error = cudaEventRecord(cuda->copied, cuda->out);
    }
    if (error != cudaSuccess && cuda->out_failed == cudaSuccess) {
        cuda->out_failed = error;
    }
}

int kern_cuda_publish_wait(struct kern *k, struct bl_errmsg *msg)
{
    struct kern_cuda *cuda = kern_cuda_of(k);
    cudaError_t error = cudaSuccess;
    if (cuda->is_lost) {
        return lost(cuda, msg);
    }
    int rc = wait_for(cuda, NULL, cuda->copied, &error, msg);
    if (rc != 0) {
        return rc;
    }
    error = cuda->out_failed != cudaSuccess ? cuda->out_failed : error;
    cuda->out_failed = cudaSuccess;
    return error == cudaSuccess ? 0 : kern_cuda_error(cuda, error, "copy out", msg);
}

int kern_cuda_publish_done(struct kern *k)
{
    struct kern_cuda *cuda = kern_cuda_of(k);
    return cuda->is_lost || ask(NULL, cuda->copied) != cudaErrorNotReady;
}

/* ---- the host's side of copies ---- */

int kern_cuda_host_register(struct kern *k, void *host, uint64_t bytes, struct bl_errmsg *msg)
{
    cudaError_t error = cudaHostRegister(host, bytes, cudaHostRegisterDefault);
    if (error == cudaSuccess) {
        return 0;
    }
    cudaGetLastError(); /* told here; without it copies are slower, not wrong */
    return kern_cuda_error(kern_cuda_of(k), error, "page-locking host memory", msg);
}

void kern_cuda_host_unregister(struct kern *k, void *host, uint64_t bytes)
{
    (void)bytes;
    if (!kern_cuda_of(k)->is_lost) { /* else it would wait */
        kern_cuda_drain(kern_cuda_of(k));
        kern_cuda_note(k, cudaHostUnregister(host), "unlocking host memory");
    }
}
