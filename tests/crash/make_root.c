/* SPDX-License-Identifier: Apache-2.0 */
/* make_root ROOT STEPS CODEC: a root with checkpoints 1 to STEPS of the sample, for scripts. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/ckpt/sample.h"

int main(int argc, char **argv)
{
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};
    int rc = argc == 4 ? sample_open(&store, argv[1], NULL, &why) : -1;

    for (uint64_t step = 1; rc == 0 && step <= strtoull(argv[2], NULL, 10); step++) {
        sample_codec = argv[3];
        rc = sample_save(store, SAMPLE_FLAT, 4, step, 1, 1, &why);
    }
    ckpt_store_close(store);
    if (rc < 0) {
        fprintf(stderr, "make_root: %s\n", argc == 4 ? why.text : "ROOT STEPS CODEC");
    }
    return rc < 0 ? 3 : 0;
}
