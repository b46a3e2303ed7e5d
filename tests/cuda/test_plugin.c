/* SPDX-License-Identifier: Apache-2.0 */
/* The real plug-in: it loads whole, and says what is missing where there is no GPU. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <dlfcn.h>

#include "kernels/cuda/plugin.h"

static const struct kern_plugin *load(void)
{
    char path[4096];
    union {
        void *object;
        const struct kern_plugin *(*function)(void);
    } symbol;
    snprintf(path, sizeof path, "%s/belay_cuda.so", getenv("BELAY_BUILD"));
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        print_error("%s\n", dlerror());
    }
    assert_non_null(handle);
    symbol.object = dlsym(handle, KERN_PLUGIN_KERNELS);
    assert_non_null(symbol.object);
    return symbol.function();
}

static void test_plugin_loads_with_all_symbols(void **state)
{
    (void)state;
    const struct kern_plugin *plugin = load();
    assert_int_equal(plugin->abi, KERN_PLUGIN_ABI);
    assert_int_equal(plugin->needs_driver, 1);
    assert_string_equal(plugin->name, "cuda");
    assert_non_null(strstr(plugin->built, "sm_"));
    assert_true(plugin->overhead_bytes(KERN_BF16) > 0);
}

/* Where there is a driver these are skipped: tests/device is for those machines. */
static void test_plugin_says_no_driver(void **state)
{
    (void)state;
    struct bl_errmsg msg = {{0}};
    struct kern_plugin_device device;
    struct kern *k = NULL;
    char text[128];
    uint32_t count = 7;
    const struct kern_plugin *plugin = load();
    if (dlopen("libcuda.so.1", RTLD_LAZY) != NULL) {
        skip();
    }
    assert_int_equal(plugin->count(&count, &msg), BL_EDEVICE);
    assert_int_equal(count, 7);
    assert_string_equal(msg.text, "no driver: libcuda.so.1 was not found");
    assert_int_equal(plugin->identify(&device, 0, &msg), BL_EDEVICE);
    assert_int_equal(plugin->describe(0, text, sizeof text, &msg), BL_EDEVICE);
    memset(&msg, 0, sizeof msg);
    assert_int_equal(plugin->open(&k, 0, KERN_BF16, 1 << 20, &msg), BL_EDEVICE);
    assert_string_equal(msg.text, "no driver: libcuda.so.1 was not found");
    assert_null(k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plugin_loads_with_all_symbols),
        cmocka_unit_test(test_plugin_says_no_driver),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
