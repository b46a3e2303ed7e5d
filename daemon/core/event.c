/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/core/event.h"

#include <stddef.h>

#define EVENT_ROW(name, number, severity, what, does, person)                                      \
    {CORE_EVENT_##name, severity, #name, what, does, person},
static const struct core_event_info event_table[] = {CORE_EVENTS(EVENT_ROW)};
#undef EVENT_ROW

const struct core_event_info *core_event_table(uint32_t *ret_count)
{
    *ret_count = (uint32_t)(sizeof(event_table) / sizeof(event_table[0]));
    return event_table;
}

const struct core_event_info *core_event_find(enum core_event_code code)
{
    for (size_t i = 0; i < sizeof(event_table) / sizeof(event_table[0]); i++) {
        if (event_table[i].code == code) {
            return &event_table[i];
        }
    }
    return NULL;
}
