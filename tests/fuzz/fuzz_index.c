/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target: index files. The digest in the last 8 bytes is made right first. There is one way to
 * write an index: what the reader takes, the writer gives back byte for byte.
 */
#include <stdlib.h>
#include <string.h>

#include "ckpt/index.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct bl_errmsg why = {{0}};
    struct ckpt_index index = {0};
    uint8_t *copy = malloc(bytes + 1), *again = NULL;
    size_t again_bytes = 0;
    uint64_t digest;
    int rc;

    BL_ASSERT(copy != NULL);
    memcpy(copy, data, bytes);
    if (bytes >= 8) {
        digest = bl_xxh3(copy, bytes - 8);
        memcpy(copy + bytes - 8, &digest, 8);
    }
    rc = ckpt_index_decode(&index, copy, bytes, &why);
    if (rc < 0) {
        BL_ASSERT(why.text[0] != '\0');
    } else {
        BL_ASSERT(ckpt_index_encode(&index, &again, &again_bytes, &digest, NULL) == 0);
        BL_ASSERT(again_bytes == bytes && memcmp(again, copy, bytes) == 0);
        free(again);
        ckpt_index_close(&index);
    }
    free(copy);
    return 0;
}
