/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target: headers of llama2.c files. The input is the header, then 8 bytes with the file's
 * size. What is accepted has sizes whose tensors fit the file.
 */
#include <string.h>

#include "ckpt/foreign.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct bl_errmsg why = {{0}};
    struct ckpt_model model;
    struct ckpt_map_list maps;
    uint64_t file_bytes = 0, elems = 0;
    int rc;

    if (bytes < CKPT_LLAMA2C_HEADER_BYTES) {
        return 0;
    }
    for (size_t i = CKPT_LLAMA2C_HEADER_BYTES; i < bytes && i < CKPT_LLAMA2C_HEADER_BYTES + 8;
         i++) {
        file_bytes = file_bytes << 8 | data[i];
    }
    rc = ckpt_llama2c_decode(&model, data, file_bytes, &why);
    BL_ASSERT(rc >= 0 || why.text[0] != '\0');
    if (rc < 0) {
        return 0;
    }
    BL_ASSERT(ckpt_map_make(&maps, &model, CKPT_NAMES_LLAMA2C, &why) == 0);
    for (uint32_t i = 0; i < maps.count; i++) {
        elems += bl_tensor_elems(&maps.maps[i].tensor);
    }
    elems += (uint64_t)model.context * (model.dim / model.heads);
    BL_ASSERT(CKPT_LLAMA2C_HEADER_BYTES + elems * sizeof(float) == file_bytes);
    ckpt_map_close(&maps);
    return 0;
}
