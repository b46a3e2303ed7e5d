/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The numeric probe tells BLAS cores apart: this program runs itself under OPENBLAS_CORETYPE. Where
 * the BLAS has one core only, 77.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <unistd.h>

#include "kernels/kern.h"

static int g_one_core;

struct answer {
    char core[64];
    unsigned long long digest;
};

/* The child's work: one line, core and digest. */
static int print_probe(uint32_t threads)
{
    const struct kern_matmul_shape shapes[] = {{512, 128, 352}, {512, 352, 128}};
    struct kern_pool *pool;
    uint64_t digest;
    if (kern_pool_new(&pool, threads, NULL) < 0 || kern_probe(pool, shapes, 2, &digest, NULL) < 0) {
        return 1;
    }
    printf("%s %llx\n", kern_core_name(), (unsigned long long)digest);
    kern_pool_free(pool);
    return 0;
}

/* `set` goes before the program on a shell's line. */
static struct answer ask(const char *set, int threads)
{
    char command[256];
    struct answer answer;
    snprintf(command, sizeof command, "env %s /proc/%d/exe probe %d", set, getpid(), threads);
    FILE *child = popen(command, "re");
    assert_non_null(child);
    assert_int_equal(fscanf(child, "%63s %llx", answer.core, &answer.digest), 2);
    assert_int_equal(pclose(child), 0);
    return answer;
}

static void test_probe_differs_on_another_core(void **state)
{
    (void)state;
    struct answer here = ask("-u OPENBLAS_CORETYPE", 1), again = ask("-u OPENBLAS_CORETYPE", 3);
    assert_string_equal(here.core, again.core);
    assert_int_equal(here.digest, again.digest);
    struct answer other = ask("OPENBLAS_CORETYPE=Sandybridge", 1);
    if (strcmp(other.core, here.core) == 0) {
        printf("this BLAS has no core but %s\n", here.core);
        g_one_core = 1;
        return;
    }
    printf("%s %llx, %s %llx\n", here.core, here.digest, other.core, other.digest);
    assert_int_not_equal(here.digest, other.digest);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "probe") == 0) {
        return print_probe((uint32_t)atoi(argv[2]));
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_probe_differs_on_another_core),
    };
    int failed = cmocka_run_group_tests_name("kernels/probe", tests, NULL, NULL);
    return failed != 0 ? failed : g_one_core ? 77 : 0;
}
