/* SPDX-License-Identifier: Apache-2.0 */
/* NVML through a stand-in library: devices, health, who holds memory, XIDs, and no driver at all.
 * And the two tables beside it. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/gpu_env.h"
#include "base/nvml.h"
#include "base/xid.h"

static char scene_path[64];

static void scene(const char *text)
{
    FILE *file = fopen(scene_path, "we");

    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void test_no_driver_is_an_answer(void **state)
{
    struct bl_nvml *nvml = NULL;
    struct bl_errmsg msg = {{0}};
    char *had = strdup(getenv("BELAY_NVML"));

    (void)state;
    setenv("BELAY_NVML", "/nonexistent/libnvidia-ml.so.1", 1);
    assert_int_equal(bl_nvml_open(&nvml, &msg), BL_ENOTBUILT);
    assert_non_null(strstr(msg.text, "no driver: /nonexistent"));
    setenv("BELAY_NVML", "libm.so.6", 1);
    assert_int_equal(bl_nvml_open(&nvml, &msg), BL_EDEVICE);
    assert_non_null(strstr(msg.text, "has no nvmlInit_v2"));
    setenv("BELAY_NVML", had, 1);
    free(had);
    scene("fail init 9\n");
    assert_int_equal(bl_nvml_open(&nvml, &msg), BL_ENOTBUILT);
    assert_non_null(strstr(msg.text, "Driver Not Loaded"));
    scene("fail init 15\n");
    assert_int_equal(bl_nvml_open(&nvml, &msg), BL_EDEVICE);
    assert_null(nvml);
    bl_nvml_close(NULL);
}

static void test_devices_tell_what_they_have(void **state)
{
    struct bl_nvml *nvml = NULL;
    struct bl_nvml_device device;
    struct bl_errmsg msg = {{0}};
    char slow[128];

    (void)state;
    scene("device GPU-aa 80000000000 1000\n"
          "device GPU-bb 4000 3000\n"
          "set 1 ecc 1\nset 1 mode 3\nset 1 uncorrected 2\nset 1 pending 1\nset 1 failed 0\n"
          "set 1 slow 69\nset 1 temperature 81\nset 1 power 650000\nset 1 limit 700000\n");
    assert_int_equal(bl_nvml_open(&nvml, &msg), 0);
    assert_int_equal(bl_nvml_device_count(nvml), 2);
    assert_string_equal(bl_nvml_driver(nvml), "580.95.05");
    assert_string_equal(bl_nvml_version(nvml), "13.580.95.05");
    assert_int_equal(bl_nvml_device_read(nvml, 0, &device, &msg), 0);
    assert_string_equal(device.uuid, "GPU-aa");
    assert_true(device.memory_bytes == 80000000000 && device.used_bytes == 1000);
    assert_true(device.ecc == BL_NVML_UNKNOWN && device.slow == BL_NVML_UNKNOWN);
    bl_nvml_slow_text(device.slow, slow, sizeof(slow));
    assert_string_equal(slow, "");
    assert_int_equal(bl_nvml_device_read(nvml, 1, &device, &msg), 0);
    assert_string_equal(device.bus, "00000000:11:00.0");
    assert_true(device.mode == BL_NVML_MODE_EXCLUSIVE_PROCESS && device.uncorrected == 2);
    assert_true(device.remap_pending == 1 && device.remap_failed == 0);
    assert_true(device.corrected == BL_NVML_UNKNOWN && device.temperature == 81);
    bl_nvml_slow_text(device.slow, slow, sizeof(slow));
    assert_string_equal(slow, "power cap, heat (hardware)");
    bl_nvml_slow_text(device.slow, slow, 8);
    assert_string_equal(slow, "power c");
    assert_int_equal(bl_nvml_device_read(nvml, 2, &device, &msg), -EINVAL);
    scene("device GPU-aa 1 1\ndevice GPU-bb 1 1\nfail read 15\n");
    assert_int_equal(bl_nvml_device_read(nvml, 1, &device, &msg), BL_EDEVICE);
    assert_string_equal(msg.text, "GPU 1: read: GPU is lost (NVML 15)");
    bl_nvml_close(nvml);
}

static void test_processes_that_hold_memory(void **state)
{
    struct bl_nvml *nvml = NULL;
    struct bl_nvml_process list[2];
    struct bl_errmsg msg = {{0}};
    uint32_t count = 77;

    (void)state;
    scene("device GPU-aa 10 0\ndevice GPU-bb 10 0\nheld 1 4242 5\nheld 1 4243 6\n");
    assert_int_equal(bl_nvml_open(&nvml, &msg), 0);
    assert_int_equal(bl_nvml_process_list(nvml, 0, list, 2, &count, &msg), 0);
    assert_int_equal(count, 0);
    assert_int_equal(bl_nvml_process_list(nvml, 1, list, 2, &count, &msg), 0);
    assert_int_equal(count, 2);
    assert_true(list[1].pid == 4243 && list[1].bytes == 6);
    assert_int_equal(bl_nvml_process_list(nvml, 1, list, 1, &count, &msg), BL_ELIMIT);
    scene("device GPU-aa 10 0\ndevice GPU-bb 10 0\nfail processes 3\n");
    assert_int_equal(bl_nvml_process_list(nvml, 1, list, 2, &count, &msg), BL_ENOTBUILT);
    bl_nvml_close(nvml);
}

static void test_xids_are_told_once(void **state)
{
    struct bl_nvml *nvml = NULL;
    struct bl_nvml_event event;
    struct bl_errmsg msg = {{0}};

    (void)state;
    scene("device GPU-aa 10 0\ndevice GPU-bb 10 0\nxid 1 13\n");
    assert_int_equal(bl_nvml_open(&nvml, &msg), 0);
    assert_int_equal(bl_nvml_event_wait(nvml, 0, &event, &msg), -EINVAL);
    assert_int_equal(bl_nvml_event_watch(nvml, 1, &msg), 0);
    assert_int_equal(bl_nvml_event_wait(nvml, 0, &event, &msg), BL_EDEADLINE);
    scene("device GPU-aa 10 0\ndevice GPU-bb 10 0\nxid 1 13\nxid 0 48\nxid 1 79\n");
    assert_int_equal(bl_nvml_event_wait(nvml, 0, &event, &msg), 0);
    assert_true(event.device == 1 && event.xid == 79);
    assert_int_equal(bl_nvml_event_wait(nvml, 20, &event, &msg), BL_EDEADLINE);
    scene("fail wait 15\n");
    assert_int_equal(bl_nvml_event_wait(nvml, 20, &event, &msg), BL_EDEVICE);
    bl_nvml_close(nvml);
}

static void test_xid_table_is_in_order(void **state)
{
    const struct bl_xid *row;
    uint32_t before = 0;

    (void)state;
    for (uint32_t i = 0; (row = bl_xid_at(i)) != NULL; i++) {
        assert_true(row->number > before);
        assert_ptr_equal(bl_xid_find(row->number), row);
        before = row->number;
    }
    assert_int_equal(bl_xid_find(79)->action, BL_XID_OUT);
    assert_int_equal(bl_xid_find(31)->action, BL_XID_RESPAWN);
    assert_int_equal(bl_xid_find(45)->action, BL_XID_LOG);
    assert_int_equal(bl_xid_find(99999)->action, BL_XID_LOG);
    assert_string_equal(bl_xid_action_name(BL_XID_OUT), "out");
}

static void test_environment_of_ranks(void **state)
{
    (void)state;
    assert_null(bl_gpu_env_find("NCCL_COMM_BLOCKING=1", 0)->value);
    assert_null(bl_gpu_env_find("CUBLASLT_LOG_LEVEL=5", 0)->value);
    assert_string_equal(bl_gpu_env_find("NCCL_RAS_ENABLE", 0)->value, "0");
    assert_null(bl_gpu_env_find("NCCL_COMM_BLOCKING_NOT=1", 0));
    assert_null(bl_gpu_env_find("NCCL_DEBUG=INFO", 1));
    assert_null(bl_gpu_env_find("NCCL_NET=IB", 0));
    assert_string_equal(bl_gpu_env_find("NCCL_NET=IB", 1)->value, "Socket");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_driver_is_an_answer),
        cmocka_unit_test(test_devices_tell_what_they_have),
        cmocka_unit_test(test_processes_that_hold_memory),
        cmocka_unit_test(test_xids_are_told_once),
        cmocka_unit_test(test_xid_table_is_in_order),
        cmocka_unit_test(test_environment_of_ranks),
    };

    snprintf(scene_path, sizeof(scene_path), "/tmp/belay-nvml.%d", (int)getpid());
    setenv("BELAY_NVML_STANDIN", scene_path, 1);
    int rc = cmocka_run_group_tests(tests, NULL, NULL);

    unlink(scene_path);
    return rc;
}
