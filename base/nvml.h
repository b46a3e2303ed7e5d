/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What NVIDIA's management library (NVML) knows of this machine's GPUs: memory and who holds it,
 * health, and the driver's error reports (XIDs). The library belongs to the driver and is loaded
 * when asked for, by name; without a driver the answer is BL_ENOTBUILT with a text, which is no
 * fault. The prototypes and constants are NVML's public ones, written down here again because no
 * header of it need be there; but for events and processes they were not compared with one yet.
 *
 * A call can stay away for seconds, and for ever where a GPU has fallen off its bus: a program with
 * a loop calls from a thread of its own. One thread at a time uses a handle.
 *
 * BELAY_NVML in the environment names another file to load (the stand-in of the tests).
 */
#ifndef BL_BASE_NVML_H
#define BL_BASE_NVML_H

#include <stdint.h>

#include "base/error.h"

#define BL_NVML_DEVICES_MAX   64
#define BL_NVML_PROCESSES_MAX 128
#define BL_NVML_TEXT_MAX      96
#define BL_NVML_HOLDERS_NAMED 8          /* by bl_nvml_holders_text */
#define BL_NVML_UNKNOWN       UINT64_MAX /* the device does not say */

/* Reasons for clocks below what was asked: bits of NVML's "clocks event reasons". */
enum bl_nvml_slow {
    BL_NVML_SLOW_POWER_CAP = 0x4,      /* software power limit */
    BL_NVML_SLOW_HARDWARE = 0x8,       /* hardware slowdown: heat or power */
    BL_NVML_SLOW_HEAT_SOFTWARE = 0x20, /* the driver, for heat */
    BL_NVML_SLOW_HEAT_HARDWARE = 0x40, /* the chip, for heat */
    BL_NVML_SLOW_POWER_BRAKE = 0x80    /* the machine's power supply asked for it */
};

enum bl_nvml_mode { /* of computing */
                    BL_NVML_MODE_DEFAULT = 0,
                    BL_NVML_MODE_EXCLUSIVE_THREAD = 1,
                    BL_NVML_MODE_PROHIBITED = 2,
                    BL_NVML_MODE_EXCLUSIVE_PROCESS = 3
};

struct bl_nvml_device {
    char name[BL_NVML_TEXT_MAX];
    char uuid[BL_NVML_TEXT_MAX]; /* "GPU-..." as CUDA_VISIBLE_DEVICES takes it */
    char bus[32];                /* PCI bus id */
    uint64_t memory_bytes, used_bytes;
    /* Below: BL_NVML_UNKNOWN where the device does not say. */
    uint64_t mode;                   /* enum bl_nvml_mode */
    uint64_t persistence;            /* 1: the driver stays loaded without a user */
    uint64_t ecc;                    /* 1: on */
    uint64_t corrected, uncorrected; /* errors of memory since the driver was loaded */
    uint64_t remap_pending,
        remap_failed;     /* 1: a bad row waits for a reset; could not be replaced */
    uint64_t slow;        /* bits of enum bl_nvml_slow, and others */
    uint64_t temperature; /* degrees Celsius */
    uint64_t power_mw, power_limit_mw;
};

struct bl_nvml_process {
    uint32_t pid;   /* as the driver sees it: a container may know it by another number */
    uint64_t bytes; /* of the device's memory; BL_NVML_UNKNOWN */
};

struct bl_nvml_event {
    uint32_t device; /* index */
    uint32_t xid;
};

struct bl_nvml; /* opaque */

/* Loads and initialises the library. Owned, bl_nvml_close. BL_ENOTBUILT: there is no driver (no
 * library, or no kernel module); BL_EDEVICE: it is there and fails. */
BL_MUST_CHECK int bl_nvml_open(struct bl_nvml **ret, struct bl_errmsg *msg);
/* NULL is fine. */
void bl_nvml_close(struct bl_nvml *nvml);

/* Versions, of the driver and of NVML; "?" when it does not say. Views. */
const char *bl_nvml_driver(const struct bl_nvml *nvml);
const char *bl_nvml_version(const struct bl_nvml *nvml);

/* Devices by NVML's index, in the order of their PCI bus ids; at most BL_NVML_DEVICES_MAX. */
uint32_t bl_nvml_device_count(const struct bl_nvml *nvml);

/* Reads all of device `index` anew. BL_EDEVICE when name, uuid or memory cannot be had (a GPU that
 * is lost). */
BL_MUST_CHECK int bl_nvml_device_read(struct bl_nvml *nvml, uint32_t index,
                                      struct bl_nvml_device *ret, struct bl_errmsg *msg);

/* Processes that hold memory of the device for computing, into list[max]; *ret_count is how many
 * were written. BL_ELIMIT: there are more than BL_NVML_PROCESSES_MAX or max. BL_ENOTBUILT: this
 * driver does not tell. */
BL_MUST_CHECK int bl_nvml_process_list(struct bl_nvml *nvml, uint32_t index,
                                       struct bl_nvml_process *list, uint32_t max,
                                       uint32_t *ret_count, struct bl_errmsg *msg);

/* From now on bl_nvml_event_wait tells XIDs of the device. BL_ENOTBUILT: it cannot. */
BL_MUST_CHECK int bl_nvml_event_watch(struct bl_nvml *nvml, uint32_t index, struct bl_errmsg *msg);
/* The next XID of a watched device. BL_EDEADLINE: none within timeout_ms (no text). BL_EDEVICE:
 * a device was lost or the library fails. */
BL_MUST_CHECK int bl_nvml_event_wait(struct bl_nvml *nvml, uint32_t timeout_ms,
                                     struct bl_nvml_event *ret, struct bl_errmsg *msg);

/* The device at a PCI bus id, with four or eight digits of the domain, in either case;
 * BL_NVML_DEVICES_MAX: none. */
uint32_t bl_nvml_device_by_bus(struct bl_nvml *nvml, const char *bus);

/* "pid 7 (2.0 GiB), pid 9 (1.0 GiB)" into ret[bytes_max]: who holds memory of the device; "" when
 * nobody does. */
void bl_nvml_holders_text(struct bl_nvml *nvml, uint32_t index, char *ret, size_t bytes_max);

/* "power cap, heat (hardware)" into ret[bytes]; "" for bits that say nothing of health. */
void bl_nvml_slow_text(uint64_t slow, char *ret, size_t bytes);

#endif
