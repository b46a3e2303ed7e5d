/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers as people read them. Any thread. */
#ifndef BL_BASE_HUMAN_H
#define BL_BASE_HUMAN_H

#include <stdint.h>

#define BL_HUMAN_MAX 32 /* bytes of any text here, with the NUL */

/* "831 B", "12.4 GiB". Into `ret`, which is returned. */
const char *bl_human_bytes(char ret[BL_HUMAN_MAX], uint64_t bytes);
/* "1.8 s", "3 min 20 s", "2 h 05 min". Into `ret`, which is returned. seconds is at least 0. */
const char *bl_human_seconds(char ret[BL_HUMAN_MAX], double seconds);

#endif
