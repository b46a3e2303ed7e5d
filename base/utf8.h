/* SPDX-License-Identifier: Apache-2.0 */
/* Strict UTF-8 (RFC 3629): no overlong forms, no surrogates, nothing above U+10FFFF. */
#ifndef BL_BASE_UTF8_H
#define BL_BASE_UTF8_H

#include <stdint.h>

#define BL_UTF8_BAD UINT32_MAX

/* The character at *at, which is below `end`; moves *at behind it. BL_UTF8_BAD, *at as it was, when
 * there is none or its bytes go on beyond `end`. Any thread. */
uint32_t bl_utf8_next(const uint8_t **at, const uint8_t *end);

#endif
