/* SPDX-License-Identifier: Apache-2.0 */
#include "base/utf8.h"

uint32_t bl_utf8_next(const uint8_t **at, const uint8_t *end)
{
    static const uint8_t lead_mask[] = {0x7f, 0x1f, 0x0f, 0x07};
    static const uint32_t least[] = {0, 0x80, 0x800, 0x10000};
    const uint8_t *c = *at;
    unsigned more = c[0] < 0x80 ? 0 : c[0] < 0xe0 ? 1 : c[0] < 0xf0 ? 2 : 3;
    if ((c[0] >= 0x80 && c[0] < 0xc2) || c[0] > 0xf4 || end - c <= (int)more) {
        return BL_UTF8_BAD;
    }
    uint32_t code = c[0] & lead_mask[more];
    for (unsigned i = 1; i <= more; i++) {
        if ((c[i] & 0xc0) != 0x80) {
            return BL_UTF8_BAD;
        }
        code = code << 6 | (c[i] & 0x3f);
    }
    if (code < least[more] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) {
        return BL_UTF8_BAD;
    }
    *at = c + more + 1;
    return code;
}
