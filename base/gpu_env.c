/* SPDX-License-Identifier: Apache-2.0 */
#include "base/gpu_env.h"

#include <stddef.h>
#include <string.h>

#define ENV_ROW(name, value, why) {name, value, why},
static const struct bl_gpu_env rows[] = {BL_GPU_ENV(ENV_ROW) BL_GPU_ENV_SHARED(ENV_ROW)};
#define ENV_ONE(name, value, why) +1u
#define ROWS_OF_ALL               (0u BL_GPU_ENV(ENV_ONE))

const struct bl_gpu_env *bl_gpu_env_at(uint32_t index, int is_shared)
{
    size_t count = is_shared ? sizeof(rows) / sizeof(*rows) : ROWS_OF_ALL;

    return index < count ? &rows[index] : NULL;
}

const struct bl_gpu_env *bl_gpu_env_find(const char *text, int is_shared)
{
    const struct bl_gpu_env *row;
    size_t length = strcspn(text, "=");

    for (uint32_t i = 0; (row = bl_gpu_env_at(i, is_shared)) != NULL; i++) {
        size_t name = strcspn(row->name, "*");

        if (strncmp(text, row->name, name) == 0 && (row->name[name] == '*' || length == name)) {
            return row;
        }
    }
    return NULL;
}
