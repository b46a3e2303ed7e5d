/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The committed digest of a short training: every compiler, level and sanitizer must give it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "model_bench.h"

/* Cores whose BLAS kernels are known, with the digest that every build of ours gives there. A
 * change of arithmetic changes these numbers, KERN_VERSION, and says so in CHANGELOG. */
static const struct {
    const char *core;
    uint64_t llama, gpt2;
} GOLDEN[] = {
    {"Zen", 0xe5bb4ab0da6e237c, 0xa1cdd754e0739a40},
    {"Haswell", 0xe5bb4ab0da6e237c, 0xa1cdd754e0739a40},
};

static int g_unknown_core;

static void test_bits_equal_the_golden_digest(void **state)
{
    (void)state;
    uint64_t llama = model_bench_digest(&MODEL_SMALL, 70, 3, 2);
    uint64_t gpt2 = model_bench_digest(&MODEL_SMALL_GPT2, 70, 3, 2);
    for (size_t i = 0; i < sizeof GOLDEN / sizeof *GOLDEN; i++) {
        if (strcmp(GOLDEN[i].core, kern_core_name()) == 0) {
            printf("%s: %016llx %016llx\n", kern_build_name(), (unsigned long long)llama,
                   (unsigned long long)gpt2);
            assert_int_equal(llama, GOLDEN[i].llama);
            assert_int_equal(gpt2, GOLDEN[i].gpt2);
            return;
        }
    }
    printf("no golden digest for %s (it gives %016llx %016llx)\n", kern_build_name(),
           (unsigned long long)llama, (unsigned long long)gpt2);
    g_unknown_core = 1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits_equal_the_golden_digest),
    };
    int failed = cmocka_run_group_tests_name("trainer/golden", tests, NULL, NULL);
    return failed != 0 ? failed : g_unknown_core ? 77 : 0;
}
