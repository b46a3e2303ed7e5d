/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzz target: model.safetensors.index.json. Every file that is reported is a plain name. */
#include <string.h>

#include "ckpt/foreign.h"
#include "tests/fuzz/fuzz.h"

static int check_entry(void *arg, const char *tensor, const char *file)
{
    uint32_t *count = arg;
    size_t bytes = strlen(file);

    BL_ASSERT(strlen(tensor) < BL_TENSOR_NAME_MAX);
    BL_ASSERT(bytes > 12 && strcmp(file + bytes - 12, ".safetensors") == 0);
    BL_ASSERT(file[0] != '.' && strchr(file, '/') == NULL);
    return ++*count > 1000 ? BL_ELIMIT : 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct bl_errmsg why = {{0}};
    uint32_t count = 0;
    int rc = ckpt_hf_index_decode((const char *)data, bytes, check_entry, &count, &why);

    BL_ASSERT(rc >= 0 || why.text[0] != '\0' || count > 1000);
    return 0;
}
