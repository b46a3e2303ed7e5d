/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A library with the functions of NVML that Belay calls, for machines without a GPU: its devices
 * are lines of the file that BELAY_NVML_STANDIN names, read again by each call, so that a test
 * changes them under a running program. Never installed. The lines:
 *
 *     device UUID TOTAL USED        one GPU more, sizes in bytes
 *     set INDEX KEY NUMBER          ecc mode persistence corrected uncorrected pending failed slow
 *                                   temperature power limit
 *     held INDEX PID BYTES          a process with memory
 *     xid INDEX NUMBER              told once, in the order of the lines
 *     fail WHAT CODE                init read processes wait: answered with that NVML code
 *     hang MS                       processes and memory take so long to read
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT   __attribute__((visibility("default")))
#define GPUS_MAX 16
#define ROWS_MAX 64

struct pci {
    char bus_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

struct process {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};

struct event {
    void *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

struct gpu {
    char uuid[64];
    unsigned long long total, used;
    long set[11]; /* -1: not supported */
};

static const char *const keys[11] = {"ecc",         "mode",    "persistence", "corrected",
                                     "uncorrected", "pending", "failed",      "slow",
                                     "temperature", "power",   "limit"};
enum { ECC, MODE, PERSISTENCE, CORRECTED, UNCORRECTED, PENDING, FAILED, SLOW, HEAT, POWER, LIMIT };

struct row {
    unsigned index, number;
    unsigned long long bytes;
};

struct scene {
    struct gpu gpus[GPUS_MAX];
    struct row held[ROWS_MAX], xids[ROWS_MAX];
    unsigned gpu_count, held_count, xid_count;
    int fail_init, fail_read, fail_processes, fail_wait;
    long hang_ms;
};

static unsigned xids_told, watched; /* of this process */

static void line_read(struct scene *s, const char *line)
{
    char word[64], key[32];
    unsigned long long a, b;
    unsigned i, n;

    if (sscanf(line, "device %63s %llu %llu", word, &a, &b) == 3 && s->gpu_count < GPUS_MAX) {
        struct gpu *gpu = &s->gpus[s->gpu_count++];

        memcpy(gpu->uuid, word, sizeof(word));
        gpu->total = a;
        gpu->used = b;
        for (int k = 0; k < 11; k++) {
            gpu->set[k] = -1;
        }
    } else if (sscanf(line, "set %u %31s %llu", &i, key, &a) == 3 && i < s->gpu_count) {
        for (int k = 0; k < 11; k++) {
            if (strcmp(key, keys[k]) == 0) {
                s->gpus[i].set[k] = (long)a;
            }
        }
    } else if (sscanf(line, "held %u %u %llu", &i, &n, &a) == 3 && s->held_count < ROWS_MAX) {
        s->held[s->held_count++] = (struct row){i, n, a};
    } else if (sscanf(line, "xid %u %u", &i, &n) == 2 && s->xid_count < ROWS_MAX) {
        s->xids[s->xid_count++] = (struct row){i, n, 0};
    } else if (sscanf(line, "fail %31s %u", key, &n) == 2) {
        s->fail_init = strcmp(key, "init") == 0 ? (int)n : s->fail_init;
        s->fail_read = strcmp(key, "read") == 0 ? (int)n : s->fail_read;
        s->fail_processes = strcmp(key, "processes") == 0 ? (int)n : s->fail_processes;
        s->fail_wait = strcmp(key, "wait") == 0 ? (int)n : s->fail_wait;
    } else if (sscanf(line, "hang %u", &n) == 1) {
        s->hang_ms = (long)n;
    }
}

static void scene_read(struct scene *s)
{
    const char *path = getenv("BELAY_NVML_STANDIN");
    FILE *file = path ? fopen(path, "re") : NULL;
    char line[256];

    memset(s, 0, sizeof(*s));
    while (file && fgets(line, sizeof(line), file)) {
        line_read(s, line);
    }
    if (file) {
        fclose(file);
    }
}

static void pause_ms(long ms)
{
    struct timespec time = {ms / 1000, (ms % 1000) * 1000000};

    nanosleep(&time, NULL);
}

/* A handle is its index plus one. */
static unsigned index_of(const void *device)
{
    return (unsigned)(size_t)device - 1;
}

EXPORT int nvmlInit_v2(void);
EXPORT int nvmlInit_v2(void)
{
    struct scene s;

    scene_read(&s);
    return s.fail_init;
}

EXPORT int nvmlShutdown(void);
EXPORT int nvmlShutdown(void)
{
    return 0;
}

EXPORT const char *nvmlErrorString(int rc);
EXPORT const char *nvmlErrorString(int rc)
{
    return rc == 9 ? "Driver Not Loaded" : rc == 15 ? "GPU is lost" : "Not Supported";
}

EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned bytes);
EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned bytes)
{
    snprintf(text, bytes, "580.95.05");
    return 0;
}

EXPORT int nvmlSystemGetNVMLVersion(char *text, unsigned bytes);
EXPORT int nvmlSystemGetNVMLVersion(char *text, unsigned bytes)
{
    snprintf(text, bytes, "13.580.95.05");
    return 0;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *ret);
EXPORT int nvmlDeviceGetCount_v2(unsigned *ret)
{
    struct scene s;

    scene_read(&s);
    *ret = s.gpu_count;
    return 0;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **ret);
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **ret)
{
    *ret = (void *)(size_t)(index + 1);
    return 0;
}

EXPORT int nvmlDeviceGetName(void *device, char *text, unsigned bytes);
EXPORT int nvmlDeviceGetName(void *device, char *text, unsigned bytes)
{
    (void)device;
    snprintf(text, bytes, "Stand-in GPU");
    return 0;
}

EXPORT int nvmlDeviceGetUUID(void *device, char *text, unsigned bytes);
EXPORT int nvmlDeviceGetUUID(void *device, char *text, unsigned bytes)
{
    struct scene s;

    scene_read(&s);
    snprintf(text, bytes, "%s", s.gpus[index_of(device) % GPUS_MAX].uuid);
    return s.fail_read;
}

EXPORT int nvmlDeviceGetPciInfo_v3(void *device, struct pci *ret);
EXPORT int nvmlDeviceGetPciInfo_v3(void *device, struct pci *ret)
{
    memset(ret, 0, sizeof(*ret));
    snprintf(ret->bus_id, sizeof(ret->bus_id), "00000000:%02X:00.0", 16 + index_of(device));
    return 0;
}

EXPORT int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *ret /* total, free, used */);
EXPORT int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *ret)
{
    struct scene s;

    scene_read(&s);
    const struct gpu *gpu = &s.gpus[index_of(device) % GPUS_MAX];

    pause_ms(s.hang_ms);
    ret[0] = gpu->total;
    ret[1] = gpu->total - gpu->used;
    ret[2] = gpu->used;
    return s.fail_read;
}

static int number(void *device, int key, unsigned long long *ret)
{
    struct scene s;

    scene_read(&s);
    long value = s.gpus[index_of(device) % GPUS_MAX].set[key];

    *ret = (unsigned long long)value;
    return value < 0 ? 3 : 0;
}

#define NUMBER(function, key)                                                                      \
    EXPORT int function(void *device, unsigned *ret);                                              \
    EXPORT int function(void *device, unsigned *ret)                                               \
    {                                                                                              \
        unsigned long long value;                                                                  \
        int rc = number(device, key, &value);                                                      \
        *ret = (unsigned)value;                                                                    \
        return rc;                                                                                 \
    }
NUMBER(nvmlDeviceGetComputeMode, MODE)
NUMBER(nvmlDeviceGetPersistenceMode, PERSISTENCE)
NUMBER(nvmlDeviceGetPowerUsage, POWER)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, LIMIT)

EXPORT int nvmlDeviceGetEccMode(void *device, unsigned *ret_now, unsigned *ret_next);
EXPORT int nvmlDeviceGetEccMode(void *device, unsigned *ret_now, unsigned *ret_next)
{
    unsigned long long value;
    int rc = number(device, ECC, &value);

    *ret_now = *ret_next = (unsigned)value;
    return rc;
}

EXPORT int nvmlDeviceGetTotalEccErrors(void *device, int uncorrected, int aggregate,
                                       unsigned long long *ret);
EXPORT int nvmlDeviceGetTotalEccErrors(void *device, int uncorrected, int aggregate,
                                       unsigned long long *ret)
{
    (void)aggregate;
    return number(device, uncorrected ? UNCORRECTED : CORRECTED, ret);
}

EXPORT int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected,
                                     unsigned *pending, unsigned *failed);
EXPORT int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected,
                                     unsigned *pending, unsigned *failed)
{
    unsigned long long a, b;
    int rc = number(device, PENDING, &a);

    rc = rc ? rc : number(device, FAILED, &b);
    *corrected = *uncorrected = 0;
    *pending = rc ? 0 : (unsigned)a;
    *failed = rc ? 0 : (unsigned)b;
    return rc;
}

EXPORT int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *ret);
EXPORT int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *ret)
{
    return number(device, SLOW, ret);
}

EXPORT int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *ret);
EXPORT int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *ret)
{
    unsigned long long value;
    int rc = number(device, HEAT, &value);

    (void)sensor;
    *ret = (unsigned)value;
    return rc;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count,
                                                   struct process *list);
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count,
                                                   struct process *list)
{
    struct scene s;
    unsigned found = 0;

    scene_read(&s);
    pause_ms(s.hang_ms);
    for (unsigned i = 0; i < s.held_count; i++) {
        if (s.held[i].index != index_of(device)) {
            continue;
        }
        if (found < *count) {
            list[found] = (struct process){s.held[i].number, s.held[i].bytes, ~0u, ~0u};
        }
        found++;
    }
    int rc = s.fail_processes ? s.fail_processes : found > *count ? 7 : 0;

    *count = found;
    return rc;
}

EXPORT int nvmlEventSetCreate(void **ret);
EXPORT int nvmlEventSetCreate(void **ret)
{
    struct scene s;

    scene_read(&s);
    xids_told = s.xid_count; /* those before nobody watched */
    *ret = &xids_told;
    return 0;
}

EXPORT int nvmlEventSetFree(void *set);
EXPORT int nvmlEventSetFree(void *set)
{
    (void)set;
    watched = 0;
    return 0;
}

EXPORT int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set);
EXPORT int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set)
{
    (void)set;
    watched |= (types & 8) ? 1u << index_of(device) : 0;
    return 0;
}

EXPORT int nvmlEventSetWait_v2(void *set, struct event *ret, unsigned timeout_ms);
EXPORT int nvmlEventSetWait_v2(void *set, struct event *ret, unsigned timeout_ms)
{
    (void)set;
    for (unsigned waited = 0;; waited += 10) {
        struct scene s;

        scene_read(&s);
        while (xids_told < s.xid_count) {
            struct row xid = s.xids[xids_told++];

            if (watched & (1u << xid.index)) {
                *ret = (struct event){(void *)(size_t)(xid.index + 1), 8, xid.number, ~0u, ~0u};
                return 0;
            }
        }
        if (s.fail_wait || waited >= timeout_ms) {
            return s.fail_wait ? s.fail_wait : 10;
        }
        pause_ms(10);
    }
}
