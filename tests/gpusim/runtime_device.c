/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Devices (all alike: an H100's numbers), errors, faults on demand.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpusim/gpusim_device.h"

#define DEVICES_MAX 64

/* X(code, text) */
#define GPUSIM_ERRORS(X)                                                                           \
    X(cudaSuccess, "no error")                                                                     \
    X(cudaErrorInvalidValue, "invalid argument")                                                   \
    X(cudaErrorMemoryAllocation, "out of memory")                                                  \
    X(cudaErrorInitializationError, "initialization error")                                        \
    X(cudaErrorInvalidConfiguration, "invalid configuration argument")                             \
    X(cudaErrorInvalidDevicePointer, "invalid device pointer")                                     \
    X(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version") \
    X(cudaErrorNoDevice, "no CUDA-capable device is detected")                                     \
    X(cudaErrorInvalidDevice, "invalid device ordinal")                                            \
    X(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device") \
    X(cudaErrorECCUncorrectable, "uncorrectable ECC error encountered")                            \
    X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                   \
    X(cudaErrorNotReady, "device not ready")                                                       \
    X(cudaErrorIllegalAddress, "an illegal memory access was encountered")                         \
    X(cudaErrorLaunchOutOfResources, "too many resources requested for launch")                    \
    X(cudaErrorHostMemoryAlreadyRegistered, "part or all of the memory is already registered")     \
    X(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered region")      \
    X(cudaErrorLaunchFailure, "unspecified launch failure")                                        \
    X(cudaErrorNotSupported, "operation not supported")                                            \
    X(cudaErrorUnknown, "unknown error")

static const char *const FAULT_NAMES[GPUSIM_FAULT_COUNT] = {"malloc", "launch", "late",
                                                            "ecc",    "stuck",  "copy"};

static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER; /* all below */
static pthread_cond_t g_unstuck = PTHREAD_COND_INITIALIZER;
static cudaError_t g_sticky;
static uint64_t g_due[GPUSIM_FAULT_COUNT]; /* occasions until then; 0: never */
static int g_faults_read;
static uint64_t g_unstick_count;
static _Thread_local cudaError_t t_last;
static _Thread_local int t_device;

uint64_t gpusim_env_u64(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    if (!text || !*text) {
        return otherwise;
    }
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    if (*end) {
        fprintf(stderr, "gpusim: %s=%s is no number\n", name, text);
        abort();
    }
    return value;
}

void gpusim_poison(void *memory, size_t bytes)
{
    const uint16_t pattern = 0x7ff5;
    char *to = memory;
    size_t done = bytes < sizeof pattern ? bytes : sizeof pattern;
    memcpy(to, &pattern, done);
    while (done < bytes) {
        size_t more = done < bytes - done ? done : bytes - done;
        memcpy(to + done, to, more);
        done += more;
    }
}

/* ---- faults ---- */

/* Under the lock. */
static void faults_parse(const char *text)
{
    memset(g_due, 0, sizeof g_due);
    g_faults_read = 1;
    while (text && *text) {
        int fault = 0, used = 0;
        unsigned long long n = 0;
        char name[16];
        if (sscanf(text, "%15[a-z]@%llu%n", name, &n, &used) != 2 || n == 0) {
            break;
        }
        while (fault < GPUSIM_FAULT_COUNT && strcmp(FAULT_NAMES[fault], name) != 0) {
            fault++;
        }
        if (fault == GPUSIM_FAULT_COUNT) {
            break;
        }
        g_due[fault] = n;
        text += used;
        text += *text == ',';
    }
    if (text && *text) {
        fprintf(stderr, "gpusim: GPUSIM_FAULT: '%s' is not NAME@N\n", text);
        abort();
    }
}

void gpusim_fault_set(const char *text)
{
    pthread_mutex_lock(&g_lock);
    faults_parse(text);
    pthread_mutex_unlock(&g_lock);
}

int gpusim_fault_is_due(enum gpusim_fault fault)
{
    pthread_mutex_lock(&g_lock);
    if (!g_faults_read) {
        faults_parse(getenv("GPUSIM_FAULT"));
    }
    int is_due = g_due[fault] == 1;
    g_due[fault] -= g_due[fault] > 0;
    pthread_mutex_unlock(&g_lock);
    return is_due;
}

uint64_t gpusim_stuck_since(void)
{
    pthread_mutex_lock(&g_lock);
    uint64_t since = g_unstick_count;
    pthread_mutex_unlock(&g_lock);
    return since;
}

void gpusim_stuck_wait(uint64_t since)
{
    pthread_mutex_lock(&g_lock);
    while (g_unstick_count == since) {
        pthread_cond_wait(&g_unstuck, &g_lock);
    }
    pthread_mutex_unlock(&g_lock);
}

void gpusim_unstick(void)
{
    pthread_mutex_lock(&g_lock);
    g_unstick_count++;
    pthread_cond_broadcast(&g_unstuck);
    pthread_mutex_unlock(&g_lock);
}

/* ---- errors ---- */

cudaError_t gpusim_error_stuck_to(void)
{
    pthread_mutex_lock(&g_lock);
    cudaError_t error = g_sticky;
    pthread_mutex_unlock(&g_lock);
    return error;
}

void gpusim_error_stick(cudaError_t error)
{
    pthread_mutex_lock(&g_lock);
    g_sticky = g_sticky == cudaSuccess ? error : g_sticky;
    pthread_mutex_unlock(&g_lock);
}

void gpusim_revive(void)
{
    pthread_mutex_lock(&g_lock);
    g_sticky = cudaSuccess;
    pthread_mutex_unlock(&g_lock);
    t_last = cudaSuccess;
}

cudaError_t gpusim_error(cudaError_t error)
{
    if (error != cudaSuccess && error != cudaErrorNotReady) {
        t_last = error;
    }
    return error;
}

cudaError_t cudaPeekAtLastError(void)
{
    cudaError_t sticky = gpusim_error_stuck_to();
    return sticky != cudaSuccess ? sticky : t_last;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = cudaPeekAtLastError();
    t_last = cudaSuccess;
    return error;
}

const char *cudaGetErrorName(cudaError_t error)
{
    switch (error) {
#define X(code, text)                                                                              \
    case code:                                                                                     \
        return #code;
        GPUSIM_ERRORS(X)
#undef X
    default:
        return "unrecognized error code";
    }
}

const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
#define X(code, text)                                                                              \
    case code:                                                                                     \
        return text;
        GPUSIM_ERRORS(X)
#undef X
    default:
        return "unrecognized error code";
    }
}

/* ---- devices ---- */

/* How many CUDA_VISIBLE_DEVICES leaves: up to the first entry that names none. ret_real: the number
 * on the machine of `ordinal`. */
static int visible_count(int ordinal, int *ret_real)
{
    int there = (int)gpusim_env_u64("GPUSIM_DEVICES", 8), count = 0;
    const char *mask = getenv("CUDA_VISIBLE_DEVICES");
    there = there > DEVICES_MAX ? DEVICES_MAX : there;
    if (!mask) {
        *ret_real = ordinal;
        return there;
    }
    while (*mask) {
        char *end;
        long real = strtol(mask, &end, 10);
        if (end == mask || real < 0 || real >= there) {
            break;
        }
        if (count == ordinal) {
            *ret_real = (int)real;
        }
        count++;
        if (*end != ',') {
            break;
        }
        mask = end + 1;
    }
    return count;
}

static cudaError_t device_check(int device, int *ret_real)
{
    cudaError_t error = gpusim_enter();
    if (error != cudaSuccess) {
        return gpusim_error(error);
    }
    if (device < 0 || device >= visible_count(device, ret_real)) {
        return gpusim_error(cudaErrorInvalidDevice);
    }
    return cudaSuccess;
}

cudaError_t gpusim_enter(void)
{
    cudaError_t error = gpusim_error_stuck_to();
    int real;
    if (error == cudaSuccess && visible_count(0, &real) == 0) {
        error = cudaErrorNoDevice;
    }
    return error;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = (int)gpusim_env_u64("GPUSIM_DRIVER", CUDART_VERSION);
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    int real, driver;
    *count = 0;
    cudaDriverGetVersion(&driver);
    if (driver < CUDART_VERSION) {
        return gpusim_error(cudaErrorInsufficientDriver);
    }
    *count = visible_count(0, &real);
    return gpusim_error(*count == 0 ? cudaErrorNoDevice : gpusim_error_stuck_to());
}

cudaError_t cudaGetDevice(int *device)
{
    *device = t_device;
    return gpusim_error(gpusim_enter());
}

cudaError_t cudaSetDevice(int device)
{
    int real;
    cudaError_t error = device_check(device, &real);
    if (error == cudaSuccess) {
        t_device = device;
    }
    return error;
}

cudaError_t cudaSetDeviceFlags(unsigned int flags)
{
    (void)flags;
    return gpusim_error(gpusim_enter());
}

cudaError_t cudaInitDevice(int device, unsigned int device_flags, unsigned int flags)
{
    int real;
    (void)device_flags;
    (void)flags;
    return device_check(device, &real);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    int real;
    cudaError_t error = device_check(device, &real);
    if (error != cudaSuccess) {
        return error;
    }
    memset(prop, 0, sizeof *prop);
    snprintf(prop->name, sizeof prop->name, "gpusim device");
    snprintf(prop->uuid.bytes, sizeof prop->uuid.bytes, "gpusim-%d", real);
    prop->totalGlobalMem = (size_t)gpusim_env_u64("GPUSIM_MEMORY_MIB", 81920) << 20;
    prop->sharedMemPerBlock = 49152;
    prop->sharedMemPerBlockOptin = 232448;
    prop->warpSize = 32;
    prop->maxThreadsPerBlock = 1024;
    prop->major = (int)gpusim_env_u64("GPUSIM_CAPABILITY", 90) / 10;
    prop->minor = (int)gpusim_env_u64("GPUSIM_CAPABILITY", 90) % 10;
    prop->multiProcessorCount = 132;
    prop->ECCEnabled = 1;
    prop->pciBusID = 16 + real;
    prop->l2CacheSize = 50 << 20;
    prop->memoryBusWidth = 5120;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    struct cudaDeviceProp prop;
    cudaError_t error = cudaGetDeviceProperties(&prop, device);
    if (error != cudaSuccess) {
        return error;
    }
    const struct {
        enum cudaDeviceAttr attribute;
        int value;
    } table[] = {
        {cudaDevAttrMaxThreadsPerBlock, prop.maxThreadsPerBlock},
        {cudaDevAttrMaxSharedMemoryPerBlock, (int)prop.sharedMemPerBlock},
        {cudaDevAttrWarpSize, prop.warpSize},
        {cudaDevAttrClockRate, 1980000},
        {cudaDevAttrMultiProcessorCount, prop.multiProcessorCount},
        {cudaDevAttrIntegrated, 0},
        {cudaDevAttrComputeMode, cudaComputeModeDefault},
        {cudaDevAttrEccEnabled, prop.ECCEnabled},
        {cudaDevAttrPciBusId, prop.pciBusID},
        {cudaDevAttrPciDeviceId, 0},
        {cudaDevAttrMemoryClockRate, 2619000},
        {cudaDevAttrGlobalMemoryBusWidth, prop.memoryBusWidth},
        {cudaDevAttrL2CacheSize, prop.l2CacheSize},
        {cudaDevAttrPciDomainId, 0},
        {cudaDevAttrComputeCapabilityMajor, prop.major},
        {cudaDevAttrComputeCapabilityMinor, prop.minor},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, (int)prop.sharedMemPerBlockOptin},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (table[i].attribute == attribute) {
            *value = table[i].value;
            return cudaSuccess;
        }
    }
    return gpusim_error(cudaErrorInvalidValue);
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device)
{
    struct cudaDeviceProp prop;
    cudaError_t error = cudaGetDeviceProperties(&prop, device);
    if (error == cudaSuccess) {
        snprintf(text, (size_t)bytes, "0000:%02X:00.0", (unsigned)prop.pciBusID);
    }
    return error;
}
