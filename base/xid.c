/* SPDX-License-Identifier: Apache-2.0 */
#include "base/xid.h"

#include <stddef.h>

#define XID_ROW(number, action, text) {number, action, text},
static const struct bl_xid rows[] = {BL_XIDS(XID_ROW)};
#define ROW_COUNT (sizeof(rows) / sizeof(*rows))

const struct bl_xid *bl_xid_at(uint32_t index)
{
    return index < ROW_COUNT ? &rows[index] : NULL;
}

const struct bl_xid *bl_xid_find(uint32_t number)
{
    static const struct bl_xid unknown = {0, BL_XID_LOG, "not in Belay's table: see NVIDIA's"};

    for (size_t i = 0; i < ROW_COUNT; i++) {
        if (rows[i].number == number) {
            return &rows[i];
        }
    }
    return &unknown;
}

const char *bl_xid_action_name(enum bl_xid_action action)
{
    static const char *const names[] = {"log", "respawn", "out"};

    return names[action];
}
