/* SPDX-License-Identifier: Apache-2.0 */
/* belay doctor: GPUs. */
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/gpu_env.h"
#include "base/human.h"
#include "base/nvml.h"
#include "tools/belay_doctor.h"

#define PLUGIN   "belay_cuda.so"
#define TEXT_MAX 512

extern char **environ;

static int is_known(uint64_t value)
{
    return value != BL_NVML_UNKNOWN;
}

static int is_set(uint64_t value)
{
    return is_known(value) && value != 0;
}

static void check_health(struct doctor *doctor, const char *name, const struct bl_nvml_device *gpu)
{
    char slow[TEXT_MAX];
    if (is_set(gpu->remap_failed)) {
        check_add(doctor, name, CHECK_FINDING,
                  "a bad row of its memory could not be replaced: the GPU wants replacing");
    }
    if (is_set(gpu->uncorrected)) {
        check_add(doctor, name, CHECK_FINDING,
                  "%llu uncorrectable memory errors since the driver was loaded%s",
                  (unsigned long long)gpu->uncorrected,
                  is_set(gpu->remap_pending) ? "; a reset would replace the bad row" : "");
    } else if (is_set(gpu->remap_pending)) {
        check_add(doctor, name, CHECK_NOTE, "a bad row of its memory waits for a reset");
    }
    if (is_known(gpu->ecc) && gpu->ecc == 0) {
        check_add(doctor, name, CHECK_NOTE,
                  "ECC is off: a flipped bit of memory changes the run, and nobody is told");
    }
    if (is_known(gpu->mode) && gpu->mode == BL_NVML_MODE_PROHIBITED) {
        check_add(doctor, name, CHECK_FINDING,
                  "compute mode PROHIBITED: no rank can use it (nvidia-smi -c DEFAULT)");
    }
    if (is_known(gpu->persistence) && gpu->persistence == 0) {
        check_add(doctor, name, CHECK_NOTE,
                  "persistence is off: the first rank waits seconds for the driver "
                  "(nvidia-persistenced)");
    }
    bl_nvml_slow_text(is_known(gpu->slow) ? gpu->slow : 0, slow, sizeof slow);
    if (slow[0] != '\0') {
        check_add(doctor, name, CHECK_FINDING, "runs below its clocks: %s", slow);
    }
}

static void check_device(struct doctor *doctor, struct bl_nvml *nvml, uint32_t index)
{
    struct bl_nvml_device gpu;
    struct bl_errmsg msg = {{0}};
    char name[32], used[BL_HUMAN_MAX], all[BL_HUMAN_MAX], heat[32] = "", holders[TEXT_MAX];
    snprintf(name, sizeof name, "gpu %u", index);
    if (bl_nvml_device_read(nvml, index, &gpu, &msg) != 0) {
        check_add(doctor, name, CHECK_FINDING, "%s", msg.text);
        return;
    }
    bl_human_bytes(used, gpu.used_bytes);
    bl_human_bytes(all, gpu.memory_bytes);
    if (is_known(gpu.temperature)) {
        snprintf(heat, sizeof heat, ", %llu C", (unsigned long long)gpu.temperature);
    }
    check_add(doctor, name, CHECK_OK, "%s at %s, %s of %s in use%s", gpu.name, gpu.bus, used, all,
              heat);
    bl_nvml_holders_text(nvml, index, holders, sizeof holders);
    if (holders[0] != '\0') {
        check_add(doctor, name, CHECK_NOTE, "memory is held by %s", holders);
    }
    check_health(doctor, name, &gpu);
}

static void check_plugin(struct doctor *doctor, int has_driver)
{
    char dir[PATH_MAX], beside[PATH_MAX + 32], installed[PATH_MAX + 48];
    if (bl_dir_of_exe(dir, sizeof dir) != 0) {
        snprintf(dir, sizeof dir, ".");
    }
    snprintf(beside, sizeof beside, "%s/%s", dir, PLUGIN);
    snprintf(installed, sizeof installed, "%s/../lib/belay/%s", dir, PLUGIN);
    const char *found = access(beside, R_OK) == 0      ? beside
                        : access(installed, R_OK) == 0 ? installed
                                                       : NULL;
    if (found != NULL) {
        check_add(doctor, "gpu plug-in", CHECK_OK, "%s", found);
    } else {
        check_add(doctor, "gpu plug-in", has_driver ? CHECK_FINDING : CHECK_NOTE,
                  "no %s beside belay or in ../lib/belay: this build computes on the CPU only "
                  "(meson setup -Dcuda=enabled)",
                  PLUGIN);
    }
}

static void check_environment(struct doctor *doctor)
{
    for (char **at = environ; at != NULL && *at != NULL; at++) {
        const struct bl_gpu_env *row = bl_gpu_env_find(*at, 0);
        const char *value = strchr(*at, '=');
        if (row == NULL || value == NULL ||
            (row->value != NULL && strcmp(row->value, value + 1) == 0)) {
            continue;
        }
        check_add(doctor, "environment", CHECK_NOTE, "%s is set here; ranks on GPUs get %s: %s",
                  *at, row->value != NULL ? row->value : "none of it", row->why);
    }
}

void check_gpus(struct doctor *doctor)
{
    struct bl_nvml *nvml = NULL;
    struct bl_errmsg msg = {{0}};
    int rc = bl_nvml_open(&nvml, &msg);
    if (rc != 0) {
        check_add(doctor, "gpu driver", rc == BL_ENOTBUILT ? CHECK_NOTE : CHECK_FINDING, "%s%s",
                  msg.text, rc == BL_ENOTBUILT ? ": backend cpu only" : "");
        check_plugin(doctor, 0);
        return;
    }
    check_add(doctor, "gpu driver", CHECK_OK, "%s, NVML %s, %u devices", bl_nvml_driver(nvml),
              bl_nvml_version(nvml), bl_nvml_device_count(nvml));
    for (uint32_t i = 0; i < bl_nvml_device_count(nvml); i++) {
        check_device(doctor, nvml, i);
    }
    bl_nvml_close(nvml);
    check_plugin(doctor, 1);
    check_environment(doctor);
}
