/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The whole back end over the stand-ins, as a program loads it: all operations by its numeric
 * probe, in several orders of threads; refusals; errors that come late.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/cuda/plugin.h"

#define ARENA ((uint64_t)64 << 20)

static const struct kern_plugin *plugin_load(void)
{
    const char *path = getenv("BELAY_CUDA_SIM");
    assert_non_null(path);
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        fail_msg("%s", dlerror());
    }
    union {
        void *object;
        const struct kern_plugin *(*function)(void);
    } symbol = {.object = dlsym(handle, KERN_PLUGIN_KERNELS)};
    assert_non_null(symbol.object);
    const struct kern_plugin *plugin = symbol.function();
    assert_int_equal(plugin->abi, KERN_PLUGIN_ABI);
    assert_int_equal(plugin->needs_driver, 0);
    return plugin;
}

/* Of "NAME=VALUE NAME=VALUE". */
static void environment_set(const char *text)
{
    char copy[256], *rest = copy, *one;
    snprintf(copy, sizeof copy, "%s", text);
    while ((one = strsep(&rest, " ")) != NULL) {
        char *value = strchr(one, '=');
        assert_non_null(value);
        *value++ = 0;
        setenv(one, value, 1);
    }
}

/* What a child with this environment wrote; its exit code. */
static int in_child(const char *environment, void (*body)(int to), void *ret, size_t bytes)
{
    int pipes[2], status;
    assert_int_equal(pipe(pipes), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        environment_set(environment);
        close(pipes[0]);
        body(pipes[1]);
        _exit(0);
    }
    close(pipes[1]);
    memset(ret, 0, bytes);
    for (size_t got = 0; got < bytes;) {
        ssize_t n = read(pipes[0], (char *)ret + got, bytes - got);
        if (n <= 0) {
            break;
        }
        got += (size_t)n;
    }
    close(pipes[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static enum kern_type g_type;

static void probe(int to)
{
    const struct kern_plugin *plugin = plugin_load();
    const struct kern_matmul_shape shapes[] = {{64, 96, 160}, {5, 33, 17}};
    struct bl_errmsg msg = {{0}};
    struct kern *k = NULL;
    uint64_t digest = 0;
    if (plugin->open(&k, 0, g_type, ARENA, &msg) || k->ops->probe(k, shapes, 2, &digest, &msg)) {
        fprintf(stderr, "probe: %s\n", msg.text);
        _exit(1);
    }
    k->ops->close(k);
    if (write(to, &digest, sizeof digest) != sizeof digest) {
        _exit(1);
    }
}

static void test_plugin_probe_has_one_digest_in_every_order(void **state)
{
    (void)state;
    static const char *const environments[] = {
        "GPUSIM_SEED=0",
        "GPUSIM_SEED=11",
        "GPUSIM_SEED=12 GPUSIM_STREAMS=sync GPUSIM_GUARD=1",
    };
    for (int type = KERN_F32; type <= KERN_BF16; type++) {
        uint64_t first = 0, digest;
        g_type = (enum kern_type)type;
        for (size_t i = 0; i < sizeof environments / sizeof environments[0]; i++) {
            assert_int_equal(in_child(environments[i], probe, &digest, sizeof digest), 0);
            assert_true(digest != 0);
            if (i == 0) {
                first = digest;
            }
            assert_true(digest == first);
        }
    }
}

/* Opens, and after a fault waits for the error: its text. */
static void open_and_sync(int to)
{
    const struct kern_plugin *plugin = plugin_load();
    struct bl_errmsg msg = {{0}};
    struct kern *k = NULL;
    int rc = plugin->open(&k, 0, KERN_F32, ARENA, &msg);
    if (rc == 0) {
        float *x = k->ops->alloc(k, 4096);
        k->ops->zero(k, x, 4096);
        k->ops->scale(k, x, 2, 1024);
        rc = k->ops->sync(k, &msg);
    }
    if (write(to, msg.text, sizeof msg.text) != (ssize_t)sizeof msg.text) {
        _exit(1);
    }
    _exit(rc ? 3 : 0);
}

static void test_plugin_errors_name_what_is_wrong(void **state)
{
    (void)state;
    static const struct {
        const char *environment, *text;
    } cases[] = {
        {"GPUSIM_FAULT=late@1", "illegal memory access"},
        {"GPUSIM_FAULT=ecc@1", "ECC"},
        {"GPUSIM_FAULT=launch@1", "too many resources"},
        {"GPUSIM_FAULT=malloc@1", "memory"},
        {"GPUSIM_MEMORY_MIB=32", "MiB"},
        {"GPUSIM_CAPABILITY=75", "7.5"},
        {"GPUSIM_DRIVER=12040", "12.4"},
        {"CUDA_VISIBLE_DEVICES=", "device"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[sizeof((struct bl_errmsg *)0)->text];
        int rc = in_child(cases[i].environment, open_and_sync, text, sizeof text);
        if (rc != 3 || !strstr(text, cases[i].text)) {
            fail_msg("%s: exit %d, said '%s'", cases[i].environment, rc, text);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plugin_probe_has_one_digest_in_every_order),
        cmocka_unit_test(test_plugin_errors_name_what_is_wrong),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
