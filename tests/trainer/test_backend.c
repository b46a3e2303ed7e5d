/* SPDX-License-Identifier: Apache-2.0 */
/* Which back end a job gets on which machine, and what is said about it. Each case is a process:
 * libraries stay loaded. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "trainer/backend.h"

struct answer {
    int rc;
    uint32_t is_cuda, type, device;
    char text[BL_ERRMSG_BYTES]; /* of the error, or `why` */
    char hostid[32], tf32[8], cublas[8];
};

static void answer_of(struct answer *a, const struct bl_job *job, uint32_t local_rank)
{
    struct train_backend b;
    struct bl_errmsg msg = {{0}};
    memset(a, 0, sizeof *a);
    a->rc = train_backend_choose(&b, job, local_rank, &msg);
    snprintf(a->text, sizeof a->text, "%s", a->rc != 0 ? msg.text : b.why);
    if (a->rc == 0) {
        a->is_cuda = b.plugin != NULL;
        a->type = b.type;
        a->device = b.device;
    }
    const char *id = getenv("NCCL_HOSTID"), *tf32 = getenv("NVIDIA_TF32_OVERRIDE");
    const char *cublas = getenv("CUBLAS_WORKSPACE_CONFIG");
    snprintf(a->hostid, sizeof a->hostid, "%s", id != NULL ? id : "-");
    snprintf(a->tf32, sizeof a->tf32, "%s", tf32 != NULL ? tf32 : "-");
    snprintf(a->cublas, sizeof a->cublas, "%s", cublas != NULL ? cublas : "-");
}

/* `settings`: "NAME=value NAME=value". */
static struct answer choose(const char *backend, uint32_t precision, uint32_t local_rank,
                            const char *settings)
{
    static struct bl_job job;
    struct answer a;
    int ends[2], status;
    memset(&job, 0, sizeof job);
    snprintf(job.backend, sizeof job.backend, "%s", backend);
    job.train.precision = precision;
    assert_int_equal(pipe(ends), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        char copy[512], *save = NULL;
        snprintf(copy, sizeof copy, "%s", settings);
        for (char *w = strtok_r(copy, " ", &save); w != NULL; w = strtok_r(NULL, " ", &save)) {
            char *equals = strchr(w, '=');
            *equals = 0;
            setenv(w, equals + 1, 1);
        }
        answer_of(&a, &job, local_rank);
        _exit(write(ends[1], &a, sizeof a) == (ssize_t)sizeof a ? 0 : 1);
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], &a, sizeof a), sizeof a);
    close(ends[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    return a;
}

static int has_driver(void)
{
    return dlopen("libcuda.so.1", RTLD_NOW) != NULL;
}

static void with_plugin(char settings[512], const char *more)
{
    snprintf(settings, 512, "BELAY_CUDA_PLUGIN=%s/tests/trainer/libfake_plugin.so %s",
             getenv("BELAY_BUILD"), more);
}

static void test_a_job_on_the_cpu_asks_for_no_driver(void **state)
{
    (void)state;
    struct answer a = choose("cpu", BL_PRECISION_AUTO, 0, "FAKE_PLUGIN_DEVICES=2");
    assert_int_equal(a.rc, 0);
    assert_string_equal(a.text, "backend cpu");
    assert_int_equal(a.type, KERN_F32);
    assert_int_equal(choose("", BL_PRECISION_FP32, 0, "").rc, 0);
    assert_int_equal(choose("cpu", BL_PRECISION_BF16, 0, "").rc, BL_ECONFIG);
}

static void test_a_machine_without_driver_says_so(void **state)
{
    (void)state;
    if (has_driver()) {
        skip();
    }
    struct answer a = choose("auto", BL_PRECISION_AUTO, 0, "");
    assert_int_equal(a.rc, 0);
    assert_int_equal(a.is_cuda, 0);
    assert_non_null(strstr(a.text, "backend cpu: no driver (libcuda.so.1"));
    a = choose("cuda", BL_PRECISION_AUTO, 0, "");
    assert_int_equal(a.rc, BL_ENOTBUILT);
    assert_non_null(strstr(a.text, "backend cuda cannot be used here: no driver"));
    a = choose("auto", BL_PRECISION_BF16, 0, "");
    assert_int_equal(a.rc, BL_ECONFIG);
    assert_non_null(strstr(a.text, "the CPU computes in fp32"));
    char settings[512];
    with_plugin(settings, "FAKE_PLUGIN_DRIVER=1"); /* a plug-in that wants one */
    a = choose("cuda", BL_PRECISION_AUTO, 0, settings);
    assert_non_null(strstr(a.text, "no driver"));
}

static void test_a_device_is_taken_by_local_rank(void **state)
{
    (void)state;
    char settings[512];
    with_plugin(settings, "FAKE_PLUGIN_DEVICES=4");
    struct answer a = choose("auto", BL_PRECISION_AUTO, 3, settings);
    assert_int_equal(a.rc, 0);
    assert_int_equal(a.is_cuda, 1);
    assert_int_equal(a.type, KERN_BF16);
    assert_int_equal(a.device, 3);
    assert_string_equal(a.text,
                        "backend cuda: device 3: device of nothing 3; between ranks: staged");
    assert_string_equal(a.hostid, "-");
    with_plugin(settings, "FAKE_PLUGIN_DEVICES=4 BELAY_DEVICE=4");
    a = choose("cuda", BL_PRECISION_FP32, 0, settings);
    assert_int_equal(a.rc, BL_ECONFIG);
    assert_string_equal(a.text, "BELAY_DEVICE 4: 4 devices are visible");
    assert_int_equal(choose("cuda", BL_PRECISION_FP32, 1, settings).type, KERN_F32);
    with_plugin(settings, "FAKE_PLUGIN_DEVICES=1 BELAY_DEVICE=0"); /* whoever started us masks */
    assert_int_equal(choose("cuda", BL_PRECISION_AUTO, 7, settings).rc, 0);
    with_plugin(settings, "FAKE_PLUGIN_DEVICES=1 BELAY_CUDA_SHARED=1");
    a = choose("cuda", BL_PRECISION_AUTO, 2, settings);
    assert_int_equal(a.rc, 0);
    assert_int_equal(a.device, 0);
    assert_string_equal(a.hostid, "rank2"); /* else NCCL refuses two ranks on one device */
}

/* This process holds one while others choose. */
static void test_a_device_that_another_rank_has_is_not_taken(void **state)
{
    (void)state;
    struct train_backend mine;
    static struct bl_job job;
    char settings[512], more[96], bus[24];
    snprintf(bus, sizeof bus, "test-%d", (int)getpid());
    snprintf(more, sizeof more, "FAKE_PLUGIN_DEVICES=2 FAKE_PLUGIN_BUS=%s", bus);
    with_plugin(settings, more);
    char plugin[512];
    snprintf(plugin, sizeof plugin, "%s/tests/trainer/libfake_plugin.so", getenv("BELAY_BUILD"));
    setenv("BELAY_CUDA_PLUGIN", plugin, 1);
    setenv("FAKE_PLUGIN_DEVICES", "2", 1);
    setenv("FAKE_PLUGIN_BUS", bus, 1);
    snprintf(job.backend, sizeof job.backend, "cuda");
    assert_int_equal(train_backend_choose(&mine, &job, 1, NULL), 0);
    assert_int_equal(mine.device, 1);
    struct answer a = choose("cuda", BL_PRECISION_AUTO, 1, settings); /* started again */
    assert_int_equal(a.rc, 0);
    assert_int_equal(a.device, 0);
    snprintf(more, sizeof more, "FAKE_PLUGIN_DEVICES=2 FAKE_PLUGIN_BUS=%s BELAY_DEVICE=1", bus);
    with_plugin(settings, more);
    a = choose("cuda", BL_PRECISION_AUTO, 0, settings);
    assert_int_equal(a.rc, BL_ECONFIG);
    assert_string_equal(a.text, "no device is left for local rank 0: other ranks have taken all "
                                "that are visible");
    train_backend_close(&mine);
    assert_int_equal(choose("cuda", BL_PRECISION_AUTO, 0, settings).device, 1);
    unsetenv("BELAY_CUDA_PLUGIN");
    unsetenv("FAKE_PLUGIN_DEVICES");
    unsetenv("FAKE_PLUGIN_BUS");
}

static void test_what_a_plug_in_lacks_is_named(void **state)
{
    (void)state;
    char settings[512];
    with_plugin(settings, "FAKE_PLUGIN_OLD=1");
    struct answer a = choose("cuda", BL_PRECISION_AUTO, 0, settings);
    assert_int_equal(a.rc, BL_ENOTBUILT);
    assert_non_null(strstr(a.text, "CUDA 11.4"));
    a = choose("auto", BL_PRECISION_AUTO, 0, settings);
    assert_int_equal(a.rc, 0);
    assert_string_equal(a.text, "backend cpu: the driver has CUDA 11.4, 13.0 is needed");
    with_plugin(settings, "FAKE_PLUGIN_DEVICES=0 CUDA_VISIBLE_DEVICES=none");
    a = choose("cuda", BL_PRECISION_AUTO, 0, settings);
    assert_non_null(strstr(a.text, "no device: CUDA_VISIBLE_DEVICES is none"));
    with_plugin(settings, "FAKE_PLUGIN_ABI=99");
    a = choose("cuda", BL_PRECISION_AUTO, 0, settings);
    assert_non_null(strstr(a.text, "another version (abi 99,"));
    a = choose("cuda", BL_PRECISION_AUTO, 0, "BELAY_CUDA_PLUGIN=/nowhere/plugin.so");
    assert_non_null(strstr(a.text, "no plug-in (/nowhere/plugin.so"));
}

static void test_overrides_of_the_arithmetic_are_scrubbed(void **state)
{
    (void)state;
    char settings[512];
    with_plugin(settings, "NVIDIA_TF32_OVERRIDE=1 CUBLAS_WORKSPACE_CONFIG=:8 NCCL_HOSTID=mine");
    struct answer a = choose("cuda", BL_PRECISION_AUTO, 0, settings);
    assert_int_equal(a.rc, 0);
    assert_string_equal(a.tf32, "-");
    assert_string_equal(a.cublas, "-");
    assert_string_equal(a.hostid, "-");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_job_on_the_cpu_asks_for_no_driver),
        cmocka_unit_test(test_a_machine_without_driver_says_so),
        cmocka_unit_test(test_a_device_is_taken_by_local_rank),
        cmocka_unit_test(test_a_device_that_another_rank_has_is_not_taken),
        cmocka_unit_test(test_what_a_plug_in_lacks_is_named),
        cmocka_unit_test(test_overrides_of_the_arithmetic_are_scrubbed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
