/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/backend.h"

#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/file.h"
#include "base/gpu_env.h"
#include "base/nvml.h"

#define DRIVER      "libcuda.so.1"
#define PLUGIN_FILE "belay_cuda.so"

extern char **environ;

/* ---- the environment of libraries that read it when they load ---- */

/* Takes away all that begin like `name` up to its '*', or the one of that name. */
static void unset_all(const char *name)
{
    size_t bytes = strcspn(name, "*");
    char **at = environ;
    if (name[bytes] == 0) {
        unsetenv(name);
        return;
    }
    while (at != NULL && *at != NULL) {
        char full[128];
        size_t n = strcspn(*at, "=");
        if (strncmp(*at, name, bytes) != 0 || n >= sizeof full) {
            at++;
            continue;
        }
        memcpy(full, *at, n);
        full[n] = 0;
        unsetenv(full); /* moves the rest up */
    }
}

static void set_environment(int is_shared, uint32_t local_rank)
{
    const struct bl_gpu_env *row;
    for (uint32_t i = 0; (row = bl_gpu_env_at(i, is_shared)) != NULL; i++) {
        if (row->value == NULL) {
            unset_all(row->name);
        } else {
            setenv(row->name, row->value, 1);
        }
    }
    if (is_shared) { /* NCCL refuses two ranks of one host on one device */
        char id[32];
        snprintf(id, sizeof id, "rank%u", local_rank);
        setenv("NCCL_HOSTID", id, 1);
    }
}

/* ---- the plug-in ---- */

static void *load(const char *path, char *why, size_t bytes_max)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        const char *text = dlerror();
        snprintf(why, bytes_max, "%.150s", text != NULL ? text : path);
    }
    return handle;
}

static int has_driver(char *why, size_t bytes_max)
{
    char text[160];
    if (load(DRIVER, text, sizeof text) != NULL) {
        return 1;
    }
    snprintf(why, bytes_max, "no driver (%s)", text);
    return 0;
}

/* Beside the executable, where a build has it, or where it is installed. */
static void *load_plugin_file(char *why, size_t bytes_max)
{
    char dir[BL_PATH_MAX - 64], path[BL_PATH_MAX];
    const char *named = getenv("BELAY_CUDA_PLUGIN");
    if (named != NULL) {
        return load(named, why, bytes_max);
    }
    if (bl_dir_of_exe(dir, sizeof dir) == 0) {
        snprintf(path, sizeof path, "%s/%s", dir, PLUGIN_FILE);
        void *handle = load(path, why, bytes_max);
        if (handle != NULL) {
            return handle;
        }
    }
    return load(BELAY_PLUGIN_DIR "/" PLUGIN_FILE, why, bytes_max);
}

/* A function of the plug-in that returns a table. */
static const void *table_of(void *handle, const char *name)
{
    union { /* ISO C has no way from an object pointer to a function */
        void *object;
        const void *(*function)(void);
    } symbol = {.object = dlsym(handle, name)};
    return symbol.object == NULL ? NULL : symbol.function();
}

static int load_plugin(struct train_backend *b, char *why, size_t bytes_max)
{
    void *handle;
    if (getenv("BELAY_CUDA_PLUGIN") == NULL && !has_driver(why, bytes_max)) {
        return 0;
    }
    char text[200];
    handle = load_plugin_file(text, sizeof text);
    if (handle == NULL) {
        snprintf(why, bytes_max, "no plug-in (%s)", text);
        return 0;
    }
    const struct kern_plugin *plugin = table_of(handle, KERN_PLUGIN_KERNELS);
    if (plugin == NULL || plugin->abi != KERN_PLUGIN_ABI) {
        snprintf(why, bytes_max, "the plug-in is of another version (abi %u, %u is wanted)",
                 plugin == NULL ? 0 : plugin->abi, KERN_PLUGIN_ABI);
        return 0;
    }
    if (plugin->needs_driver && !has_driver(why, bytes_max)) {
        return 0;
    }
    const char *engine = getenv("BELAY_CUDA_ENGINE");
    if (engine == NULL || strcmp(engine, "staged") != 0) {
        b->engine = table_of(handle, KERN_PLUGIN_COMM);
    }
    b->plugin = plugin;
    return 1;
}

/* ---- the device ---- */

/* Takes the device among Belay's ranks of this machine: a name that lives as long as the process. A
 * device without an address is everybody's. 1: taken, 0: somebody else has it. */
static int claim(struct train_backend *b, uint32_t device)
{
    struct kern_plugin_device who;
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    if (b->plugin->identify(&who, device, NULL) != 0 || who.bus_id[0] == 0) {
        return 1;
    }
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return 1;
    }
    int n = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "belay-device-%s", who.bus_id);
    if (bind(fd, (const struct sockaddr *)&name,
             (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)) != 0) {
        int is_taken = errno == EADDRINUSE;
        close(fd);
        return !is_taken;
    }
    b->claim = fd;
    return 1;
}

static int take_device(struct train_backend *b, uint32_t count, uint32_t local_rank, int is_shared,
                       struct bl_errmsg *msg)
{
    const char *named = getenv("BELAY_DEVICE");
    uint32_t first = named != NULL ? (uint32_t)strtoul(named, NULL, 10) : local_rank;
    if (named != NULL && first >= count) {
        return bl_err(msg, BL_ECONFIG, "BELAY_DEVICE %u: %u %s visible", first, count,
                      count == 1 ? "device is" : "devices are");
    }
    for (uint32_t i = 0; i < (named != NULL ? 1 : count); i++) {
        b->device = (first + i) % count;
        if (is_shared || claim(b, b->device)) {
            return 0;
        }
    }
    return bl_err(msg, BL_ECONFIG,
                  "no device is left for local rank %u: other ranks have taken %s that %s visible",
                  local_rank, count == 1 ? "the one" : "all", count == 1 ? "is" : "are");
}

/* BL_ECONFIG when there are devices, but none for this rank. */
static int choose_device(struct train_backend *b, uint32_t local_rank, int is_shared, char *why,
                         size_t bytes_max, struct bl_errmsg *msg)
{
    struct bl_errmsg text = {{0}};
    uint32_t count = 0;
    if (b->plugin->count(&count, &text) != 0) {
        snprintf(why, bytes_max, "%.200s", text.text);
        b->plugin = NULL;
        return 0;
    }
    if (count == 0) {
        const char *mask = getenv("CUDA_VISIBLE_DEVICES");
        snprintf(why, bytes_max, "no device%s%s", mask != NULL ? ": CUDA_VISIBLE_DEVICES is " : "",
                 mask != NULL ? mask : "");
        b->plugin = NULL;
        return 0;
    }
    char device[160];
    int rc = take_device(b, count, local_rank, is_shared, msg);
    rc = rc == 0 ? b->plugin->describe(b->device, device, sizeof device, msg) : rc;
    if (rc == 0) {
        snprintf(b->why, sizeof b->why, "backend %s: device %u: %s; between ranks: %s",
                 b->plugin->name, b->device, device,
                 b->engine != NULL ? b->engine->name : "staged");
    }
    return rc;
}

void train_backend_close(struct train_backend *backend)
{
    if (backend->claim != 0) {
        close(backend->claim);
    }
    memset(backend, 0, sizeof *backend);
}

/* ---- choosing ---- */

static int is_named(const struct bl_job *job, const char *backend)
{
    return strcmp(job->backend, backend) == 0;
}

/* Jobs that were not read from a file say nothing. */
static int says_cpu(const struct bl_job *job)
{
    return job->backend[0] == 0 || is_named(job, "cpu");
}

static int be_cpu(struct train_backend *b, const struct bl_job *job, const char *why,
                  struct bl_errmsg *msg)
{
    if (is_named(job, "cuda")) {
        return bl_err(msg, BL_ENOTBUILT, "backend cuda cannot be used here: %s", why);
    }
    if (job->train.precision == BL_PRECISION_BF16) {
        return bl_err(msg, BL_ECONFIG, "train.precision bf16: the CPU computes in fp32%s%s",
                      why[0] != 0 ? ", and a GPU is not used: " : "", why);
    }
    memset(b, 0, sizeof *b);
    b->type = KERN_F32;
    snprintf(b->why, sizeof b->why, "backend cpu%s%.200s", why[0] != 0 ? ": " : "", why);
    return 0;
}

int train_backend_choose(struct train_backend *ret, const struct bl_job *job, uint32_t local_rank,
                         struct bl_errmsg *msg)
{
    char why[256] = "";
    int is_shared = getenv("BELAY_CUDA_SHARED") != NULL;
    memset(ret, 0, sizeof *ret);
    if (says_cpu(job)) {
        return be_cpu(ret, job, "", msg);
    }
    set_environment(is_shared, local_rank);
    if (!load_plugin(ret, why, sizeof why)) {
        return be_cpu(ret, job, why, msg);
    }
    int rc = choose_device(ret, local_rank, is_shared, why, sizeof why, msg);
    if (rc != 0 || ret->plugin == NULL) {
        return rc != 0 ? rc : be_cpu(ret, job, why, msg);
    }
    ret->type = job->train.precision == BL_PRECISION_FP32 ? KERN_F32 : KERN_BF16;
    return 0;
}

int train_backend_is_cpu(const struct bl_job *job)
{
    char why[256];
    if (says_cpu(job)) {
        return 1;
    }
    if (is_named(job, "cuda")) {
        return 0;
    }
    return getenv("BELAY_CUDA_PLUGIN") == NULL && !has_driver(why, sizeof why);
}

/* Behind a refusal for want of memory: who has it, where the driver tells. */
static void name_holders(const struct train_backend *backend, struct bl_errmsg *msg)
{
    struct kern_plugin_device device;
    struct bl_nvml *nvml = NULL;
    char holders[200] = "";
    if (msg == NULL || strstr(msg->text, "memory") == NULL ||
        backend->plugin->identify(&device, backend->device, NULL) != 0 ||
        bl_nvml_open(&nvml, NULL) != 0) {
        return;
    }
    uint32_t index = bl_nvml_device_by_bus(nvml, device.bus_id);
    if (index != BL_NVML_DEVICES_MAX) {
        bl_nvml_holders_text(nvml, index, holders, sizeof holders);
    }
    bl_nvml_close(nvml);
    size_t at = strlen(msg->text);
    if (holders[0] != 0) {
        snprintf(msg->text + at, sizeof msg->text - at, "; memory is held by %s", holders);
    }
}

int train_backend_open(struct kern **ret, const struct train_backend *backend,
                       struct kern_pool *pool, uint64_t arena_bytes, struct bl_errmsg *msg)
{
    if (backend->plugin == NULL) {
        return kern_cpu_open(ret, pool, msg);
    }
    int rc = backend->plugin->open(ret, (int)backend->device, backend->type, arena_bytes, msg);
    if (rc == BL_ECONFIG) {
        name_holders(backend, msg);
    }
    return rc;
}
