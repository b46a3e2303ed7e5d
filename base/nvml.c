/* SPDX-License-Identifier: Apache-2.0 */
/* NVML through dlopen: the only file that knows its functions, structures and codes. */
#include "base/nvml.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/human.h"

/* NVML's own numbers (NVML API reference, "NVML constants" and "enums"). */
enum {
    NVML_SUCCESS = 0,
    NVML_NOT_SUPPORTED = 3,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_DRIVER_NOT_LOADED = 9,
    NVML_TIMEOUT = 10,
    NVML_EVENT_XID = 8
};

typedef struct nvml_device_opaque *nvml_handle;
typedef struct nvml_set_opaque *nvml_set;

struct nvml_memory {
    unsigned long long total, free, used;
};

struct nvml_pci {
    char bus_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

struct nvml_process {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};

struct nvml_event {
    nvml_handle device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

struct nvml_calls {
    int (*init)(void);
    int (*shutdown)(void);
    const char *(*error_string)(int rc);
    int (*driver)(char *text, unsigned bytes);
    int (*version)(char *text, unsigned bytes);
    int (*count)(unsigned *ret);
    int (*handle)(unsigned index, nvml_handle *ret);
    int (*name)(nvml_handle device, char *text, unsigned bytes);
    int (*uuid)(nvml_handle device, char *text, unsigned bytes);
    int (*pci)(nvml_handle device, struct nvml_pci *ret);
    int (*memory)(nvml_handle device, struct nvml_memory *ret);
    int (*mode)(nvml_handle device, unsigned *ret);
    int (*persistence)(nvml_handle device, unsigned *ret);
    int (*ecc_mode)(nvml_handle device, unsigned *ret_now, unsigned *ret_next);
    int (*ecc_errors)(nvml_handle device, int uncorrected, int aggregate, unsigned long long *ret);
    int (*remapped)(nvml_handle device, unsigned *ret_corrected, unsigned *ret_uncorrected,
                    unsigned *ret_pending, unsigned *ret_failed);
    int (*slow)(nvml_handle device, unsigned long long *ret);
    int (*temperature)(nvml_handle device, int sensor, unsigned *ret);
    int (*power)(nvml_handle device, unsigned *ret_mw);
    int (*power_limit)(nvml_handle device, unsigned *ret_mw);
    int (*processes)(nvml_handle device, unsigned *count, struct nvml_process *list);
    int (*set_create)(nvml_set *ret);
    int (*set_free)(nvml_set set);
    int (*set_register)(nvml_handle device, unsigned long long types, nvml_set set);
    int (*set_wait)(nvml_set set, struct nvml_event *ret, unsigned timeout_ms);
};

/* Names, newest first; a driver has at least one of each that is needed. */
static const struct {
    size_t offset;
    int is_needed;
    const char *names[2];
} call_names[] = {
#define CALL(field, needed, ...)                                                                   \
    {                                                                                              \
        offsetof(struct nvml_calls, field), needed,                                                \
        {                                                                                          \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    }
    CALL(init, 1, "nvmlInit_v2"),
    CALL(shutdown, 1, "nvmlShutdown"),
    CALL(error_string, 1, "nvmlErrorString"),
    CALL(driver, 1, "nvmlSystemGetDriverVersion"),
    CALL(version, 1, "nvmlSystemGetNVMLVersion"),
    CALL(count, 1, "nvmlDeviceGetCount_v2"),
    CALL(handle, 1, "nvmlDeviceGetHandleByIndex_v2"),
    CALL(name, 1, "nvmlDeviceGetName"),
    CALL(uuid, 1, "nvmlDeviceGetUUID"),
    CALL(pci, 1, "nvmlDeviceGetPciInfo_v3"),
    CALL(memory, 1, "nvmlDeviceGetMemoryInfo"),
    CALL(mode, 0, "nvmlDeviceGetComputeMode"),
    CALL(persistence, 0, "nvmlDeviceGetPersistenceMode"),
    CALL(ecc_mode, 0, "nvmlDeviceGetEccMode"),
    CALL(ecc_errors, 0, "nvmlDeviceGetTotalEccErrors"),
    CALL(remapped, 0, "nvmlDeviceGetRemappedRows"),
    CALL(slow, 0, "nvmlDeviceGetCurrentClocksEventReasons",
         "nvmlDeviceGetCurrentClocksThrottleReasons"),
    CALL(temperature, 0, "nvmlDeviceGetTemperature"),
    CALL(power, 0, "nvmlDeviceGetPowerUsage"),
    CALL(power_limit, 0, "nvmlDeviceGetEnforcedPowerLimit"),
    /* Of the same shape; the first one's entries are sorted out by MIG instance. */
    CALL(processes, 0, "nvmlDeviceGetComputeRunningProcesses_v3",
         "nvmlDeviceGetComputeRunningProcesses_v2"),
    CALL(set_create, 0, "nvmlEventSetCreate"),
    CALL(set_free, 0, "nvmlEventSetFree"),
    CALL(set_register, 0, "nvmlDeviceRegisterEvents"),
    CALL(set_wait, 0, "nvmlEventSetWait_v2"),
#undef CALL
};

struct bl_nvml {
    void *library;
    struct nvml_calls call;
    char driver[BL_NVML_TEXT_MAX], version[BL_NVML_TEXT_MAX];
    uint32_t count;
    nvml_handle devices[BL_NVML_DEVICES_MAX];
    nvml_set set; /* NULL: nothing is watched */
};

static int nvml_error(const struct bl_nvml *nvml, int rc, struct bl_errmsg *msg, const char *what,
                      uint32_t index)
{
    const char *text = nvml->call.error_string(rc);

    return bl_err(msg, rc == NVML_NOT_SUPPORTED ? BL_ENOTBUILT : BL_EDEVICE,
                  "GPU %u: %s: %s (NVML %d)", index, what, text ? text : "error", rc);
}

static int calls_find(struct bl_nvml *nvml, const char *path, struct bl_errmsg *msg)
{
    for (size_t i = 0; i < sizeof(call_names) / sizeof(*call_names); i++) {
        void *at = NULL;

        for (int k = 0; k < 2 && !at && call_names[i].names[k]; k++) {
            at = dlsym(nvml->library, call_names[i].names[k]);
        }
        if (!at && call_names[i].is_needed) {
            return bl_err(msg, BL_EDEVICE, "%s has no %s: another library, or a driver before 450",
                          path, call_names[i].names[0]);
        }
        memcpy((char *)&nvml->call + call_names[i].offset, &at, sizeof(at));
    }
    return 0;
}

/* After init: what does not change. */
static int devices_find(struct bl_nvml *nvml, struct bl_errmsg *msg)
{
    unsigned count = 0;
    int rc = nvml->call.count(&count);

    if (rc != NVML_SUCCESS) {
        return bl_err(msg, BL_EDEVICE, "NVML counts no devices: %s", nvml->call.error_string(rc));
    }
    if (nvml->call.driver(nvml->driver, sizeof(nvml->driver)) != NVML_SUCCESS) {
        snprintf(nvml->driver, sizeof(nvml->driver), "?");
    }
    if (nvml->call.version(nvml->version, sizeof(nvml->version)) != NVML_SUCCESS) {
        snprintf(nvml->version, sizeof(nvml->version), "?");
    }
    for (unsigned i = 0; i < count && i < BL_NVML_DEVICES_MAX; i++) {
        if (nvml->call.handle(i, &nvml->devices[i]) != NVML_SUCCESS) {
            nvml->devices[i] = NULL; /* told when it is asked for */
        }
        nvml->count = i + 1;
    }
    return 0;
}

int bl_nvml_open(struct bl_nvml **ret, struct bl_errmsg *msg)
{
    const char *path = getenv("BELAY_NVML");
    struct bl_nvml *nvml = calloc(1, sizeof(*nvml));
    int rc;

    path = path && path[0] ? path : "libnvidia-ml.so.1";
    if (!nvml) {
        return bl_err_code(msg, -ENOMEM, "NVML");
    }
    nvml->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!nvml->library) {
        const char *text = dlerror();

        free(nvml);
        return bl_err(msg, BL_ENOTBUILT, "no driver: %s", text ? text : path);
    }
    rc = calls_find(nvml, path, msg);
    int nvml_rc = rc == 0 ? nvml->call.init() : NVML_SUCCESS;

    if (nvml_rc != NVML_SUCCESS) {
        rc = bl_err(msg, nvml_rc == NVML_DRIVER_NOT_LOADED ? BL_ENOTBUILT : BL_EDEVICE,
                    "no driver: NVML does not start: %s (NVML %d)",
                    nvml->call.error_string(nvml_rc), nvml_rc);
    }
    if (rc != 0) {
        dlclose(nvml->library);
        free(nvml);
        return rc;
    }
    rc = devices_find(nvml, msg);
    if (rc != 0) {
        bl_nvml_close(nvml);
        return rc;
    }
    *ret = nvml;
    return 0;
}

void bl_nvml_close(struct bl_nvml *nvml)
{
    if (nvml) {
        if (nvml->set) {
            nvml->call.set_free(nvml->set);
        }
        nvml->call.shutdown();
        dlclose(nvml->library);
        free(nvml);
    }
}

const char *bl_nvml_driver(const struct bl_nvml *nvml)
{
    return nvml->driver;
}

const char *bl_nvml_version(const struct bl_nvml *nvml)
{
    return nvml->version;
}

uint32_t bl_nvml_device_count(const struct bl_nvml *nvml)
{
    return nvml->count;
}

static int handle_find(const struct bl_nvml *nvml, uint32_t index, nvml_handle *ret,
                       struct bl_errmsg *msg)
{
    if (index >= nvml->count) {
        return bl_err(msg, -EINVAL, "GPU %u: there are %u", index, nvml->count);
    }
    if (!nvml->devices[index]) {
        return bl_err(msg, BL_EDEVICE, "GPU %u: NVML has no handle of it: it is lost", index);
    }
    *ret = nvml->devices[index];
    return 0;
}

/* One number that a device may not have. */
static uint64_t number_read(int (*call)(nvml_handle, unsigned *), nvml_handle device)
{
    unsigned value = 0;

    return call && call(device, &value) == NVML_SUCCESS ? value : BL_NVML_UNKNOWN;
}

static void health_read(const struct nvml_calls *call, nvml_handle device,
                        struct bl_nvml_device *ret)
{
    unsigned now = 0, next = 0, corrected, uncorrected, pending = 0, failed = 0, celsius = 0;
    unsigned long long value = 0;

    ret->mode = number_read(call->mode, device);
    ret->persistence = number_read(call->persistence, device);
    ret->power_mw = number_read(call->power, device);
    ret->power_limit_mw = number_read(call->power_limit, device);
    ret->ecc = ret->corrected = ret->uncorrected = BL_NVML_UNKNOWN;
    ret->remap_pending = ret->remap_failed = ret->slow = ret->temperature = BL_NVML_UNKNOWN;
    if (call->ecc_mode && call->ecc_mode(device, &now, &next) == NVML_SUCCESS) {
        ret->ecc = now;
    }
    if (call->ecc_errors && call->ecc_errors(device, 0, 0, &value) == NVML_SUCCESS) {
        ret->corrected = value;
    }
    if (call->ecc_errors && call->ecc_errors(device, 1, 0, &value) == NVML_SUCCESS) {
        ret->uncorrected = value;
    }
    if (call->remapped &&
        call->remapped(device, &corrected, &uncorrected, &pending, &failed) == NVML_SUCCESS) {
        ret->remap_pending = pending;
        ret->remap_failed = failed;
    }
    if (call->slow && call->slow(device, &value) == NVML_SUCCESS) {
        ret->slow = value;
    }
    if (call->temperature && call->temperature(device, 0, &celsius) == NVML_SUCCESS) {
        ret->temperature = celsius;
    }
}

int bl_nvml_device_read(struct bl_nvml *nvml, uint32_t index, struct bl_nvml_device *ret,
                        struct bl_errmsg *msg)
{
    struct bl_nvml_device out;
    struct nvml_memory memory;
    struct nvml_pci pci;
    nvml_handle device = NULL;
    int rc = handle_find(nvml, index, &device, msg);

    memset(&out, 0, sizeof(out));
    memset(&memory, 0, sizeof(memory));
    memset(&pci, 0, sizeof(pci));
    if (rc != 0) {
        return rc;
    }
    rc = nvml->call.name(device, out.name, sizeof(out.name));
    rc = rc ? rc : nvml->call.uuid(device, out.uuid, sizeof(out.uuid));
    rc = rc ? rc : nvml->call.memory(device, &memory);
    rc = rc ? rc : nvml->call.pci(device, &pci);
    if (rc != NVML_SUCCESS) {
        return nvml_error(nvml, rc, msg, "read", index);
    }
    out.name[sizeof(out.name) - 1] = out.uuid[sizeof(out.uuid) - 1] = '\0';
    memcpy(out.bus, pci.bus_id, sizeof(out.bus) - 1);
    out.memory_bytes = memory.total;
    out.used_bytes = memory.used;
    health_read(&nvml->call, device, &out);
    *ret = out;
    return 0;
}

int bl_nvml_process_list(struct bl_nvml *nvml, uint32_t index, struct bl_nvml_process *list,
                         uint32_t max, uint32_t *ret_count, struct bl_errmsg *msg)
{
    struct nvml_process found[BL_NVML_PROCESSES_MAX];
    unsigned count = BL_NVML_PROCESSES_MAX;
    nvml_handle device = NULL;
    int rc = handle_find(nvml, index, &device, msg);

    if (rc != 0) {
        return rc;
    }
    if (!nvml->call.processes) {
        return bl_err(msg, BL_ENOTBUILT, "GPU %u: this driver does not list processes", index);
    }
    rc = nvml->call.processes(device, &count, found);
    if (rc == NVML_INSUFFICIENT_SIZE || (rc == NVML_SUCCESS && count > max)) {
        return bl_err(msg, BL_ELIMIT, "GPU %u: %u processes hold memory", index, count);
    }
    if (rc != NVML_SUCCESS) {
        return nvml_error(nvml, rc, msg, "list its processes", index);
    }
    for (unsigned i = 0; i < count; i++) {
        list[i] = (struct bl_nvml_process){found[i].pid, found[i].bytes};
    }
    *ret_count = count;
    return 0;
}

int bl_nvml_event_watch(struct bl_nvml *nvml, uint32_t index, struct bl_errmsg *msg)
{
    nvml_handle device = NULL;
    int rc = handle_find(nvml, index, &device, msg);

    if (rc != 0) {
        return rc;
    }
    if (!nvml->call.set_create || !nvml->call.set_free || !nvml->call.set_register ||
        !nvml->call.set_wait) {
        return bl_err(msg, BL_ENOTBUILT, "GPU %u: this driver tells no events", index);
    }
    rc = nvml->set ? NVML_SUCCESS : nvml->call.set_create(&nvml->set);
    rc = rc ? rc : nvml->call.set_register(device, NVML_EVENT_XID, nvml->set);
    return rc == NVML_SUCCESS ? 0 : nvml_error(nvml, rc, msg, "watch its XIDs", index);
}

int bl_nvml_event_wait(struct bl_nvml *nvml, uint32_t timeout_ms, struct bl_nvml_event *ret,
                       struct bl_errmsg *msg)
{
    struct nvml_event event = {0};

    if (!nvml->set) {
        return bl_err(msg, -EINVAL, "no GPU is watched");
    }
    int rc = nvml->call.set_wait(nvml->set, &event, timeout_ms);

    if (rc == NVML_TIMEOUT || (rc == NVML_SUCCESS && event.type != NVML_EVENT_XID)) {
        return BL_EDEADLINE;
    }
    if (rc != NVML_SUCCESS) {
        return bl_err(msg, BL_EDEVICE, "wait for XIDs: %s (NVML %d)", nvml->call.error_string(rc),
                      rc);
    }
    for (uint32_t i = 0; i < nvml->count; i++) {
        if (nvml->devices[i] == event.device) {
            *ret = (struct bl_nvml_event){i, (uint32_t)event.data};
            return 0;
        }
    }
    return BL_EDEADLINE; /* of a device that nobody asked for */
}

void bl_nvml_slow_text(uint64_t slow, char *ret, size_t bytes)
{
    static const struct {
        uint64_t bit;
        const char *text;
    } names[] = {
        {BL_NVML_SLOW_POWER_CAP, "power cap"},
        {BL_NVML_SLOW_HARDWARE, "hardware slowdown"},
        {BL_NVML_SLOW_HEAT_SOFTWARE, "heat (driver)"},
        {BL_NVML_SLOW_HEAT_HARDWARE, "heat (hardware)"},
        {BL_NVML_SLOW_POWER_BRAKE, "power brake"},
    };
    size_t used = 0;

    ret[0] = '\0';
    for (size_t i = 0; slow != BL_NVML_UNKNOWN && i < sizeof(names) / sizeof(*names); i++) {
        if ((slow & names[i].bit) && used < bytes) {
            used +=
                (size_t)snprintf(ret + used, bytes - used, "%s%s", used ? ", " : "", names[i].text);
        }
    }
}

/* ---- who holds memory ---- */

/* Bus ids are written with four or eight digits of the domain, in either case: the end says it. */
static int is_same_bus(const char *a, const char *b)
{
    size_t la = strlen(a), lb = strlen(b), n = sizeof("0000:00:00.0") - 1;

    return la >= n && lb >= n && strcasecmp(a + la - n, b + lb - n) == 0;
}

uint32_t bl_nvml_device_by_bus(struct bl_nvml *nvml, const char *bus)
{
    for (uint32_t i = 0; i < bl_nvml_device_count(nvml); i++) {
        struct bl_nvml_device device;
        if (bl_nvml_device_read(nvml, i, &device, NULL) == 0 && is_same_bus(device.bus, bus)) {
            return i;
        }
    }
    return BL_NVML_DEVICES_MAX;
}

void bl_nvml_holders_text(struct bl_nvml *nvml, uint32_t index, char *ret, size_t bytes_max)
{
    struct bl_nvml_process list[BL_NVML_PROCESSES_MAX];
    uint32_t count = 0;
    size_t at = 0;
    int rc = bl_nvml_process_list(nvml, index, list, BL_NVML_PROCESSES_MAX, &count, NULL);

    ret[0] = 0;
    if (rc != 0 && rc != BL_ELIMIT) {
        snprintf(ret, bytes_max, "processes that the driver does not name");
        return;
    }
    for (uint32_t i = 0; i < count && i < BL_NVML_HOLDERS_NAMED && at < bytes_max; i++) {
        char size[BL_HUMAN_MAX] = "?";
        if (list[i].bytes != BL_NVML_UNKNOWN) {
            bl_human_bytes(size, list[i].bytes);
        }
        at += (size_t)snprintf(ret + at, bytes_max - at, "%spid %u (%s)", i > 0 ? ", " : "",
                               list[i].pid, size);
    }
    if (count > BL_NVML_HOLDERS_NAMED && at < bytes_max) {
        snprintf(ret + at, bytes_max - at, " and %u more", count - BL_NVML_HOLDERS_NAMED);
    }
}
