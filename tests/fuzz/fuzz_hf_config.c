/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target: config.json. A model that is accepted comes back the same from the config and the
 * job that are written of it; its table of tensors can be made.
 */
#include <stdlib.h>
#include <string.h>

#include "ckpt/hf.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct bl_errmsg why = {{0}};
    struct ckpt_model model, back;
    struct ckpt_map_list maps;
    char *config, *job;
    int rc = ckpt_model_from_config(&model, (const char *)data, bytes, &why);

    BL_ASSERT(rc >= 0 || why.text[0] != '\0');
    if (rc < 0) {
        return 0;
    }
    config = ckpt_model_to_config(&model, BL_BF16);
    job = ckpt_model_to_job(&model);
    BL_ASSERT(config != NULL && job != NULL);
    if (model.context > 0) { /* without it the config's default is another */
        BL_ASSERT(ckpt_model_from_config(&back, config, strlen(config), &why) == 0);
        BL_ASSERT(ckpt_model_equal(&model, &back));
    }
    BL_ASSERT(ckpt_model_from_job(&back, job, &why) == 0);
    BL_ASSERT(ckpt_model_equal(&model, &back));
    free(config);
    free(job);
    if (model.layers <= 64) {
        BL_ASSERT(ckpt_map_make(&maps, &model, CKPT_NAMES_HF, &why) == 0);
        ckpt_map_close(&maps);
    }
    return 0;
}
