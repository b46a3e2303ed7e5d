/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target: safetensors headers. The input is the file's beginning; the file is taken to be a
 * megabyte longer. Every entry that is reported lies in the file.
 */
#include "ckpt/part.h"
#include "tests/fuzz/fuzz.h"

struct bounds {
    uint64_t data_bytes;
};

static int check_entry(void *arg, const struct ckpt_st_entry *entry)
{
    const struct bounds *bounds = arg;

    BL_ASSERT(entry->begin <= entry->end && entry->end <= bounds->data_bytes);
    BL_ASSERT(entry->dims <= BL_TENSOR_DIMS_MAX && bl_dtype_bytes(entry->dtype) > 0);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct bl_errmsg why = {{0}};
    struct bounds bounds = {1 << 20};
    uint64_t header_bytes = 0, file_bytes = bytes + bounds.data_bytes;
    int rc;

    if (bytes < 8) {
        return 0;
    }
    rc = ckpt_st_header_bytes(data, file_bytes, &header_bytes, &why);
    if (rc == 0 && header_bytes <= bytes) {
        bounds.data_bytes = file_bytes - header_bytes;
        rc = ckpt_st_header_decode(data, (size_t)header_bytes, file_bytes, check_entry, &bounds,
                                   &why);
    }
    BL_ASSERT(rc >= 0 || why.text[0] != '\0');
    return 0;
}
