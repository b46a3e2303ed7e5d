/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Flat configuration files of programs: one YAML mapping of single values,
 *
 *     name: n1
 *     state-dir: /var/lib/belay
 *
 * which go one by one to the caller's table. Job files have their own reader (base/job.h).
 */
#ifndef BL_BASE_CONFIG_H
#define BL_BASE_CONFIG_H

#include <stddef.h>

#include "base/error.h"

/* Takes one pair; both are views until it returns. An error's text needs no place: the reader puts
 * "FILE:LINE:COLUMN: " in front of it, at the key. */
typedef int (*bl_config_take)(void *context, const char *key, const char *value,
                              struct bl_errmsg *msg);

/* Reads the file (at most `bytes_max` bytes) and calls `take` for each pair in order. An empty file
 * is good. Refused with BL_ECONFIG, line and column: what is not YAML, nested values, lists, a key
 * without a value, keys given twice, anchors, aliases, tags, a second document. Blocks. */
BL_MUST_CHECK int bl_config_read(const char *path, size_t bytes_max, bl_config_take take,
                                 void *context, struct bl_errmsg *msg);

/* The same over text; `where` names it in errors. */
BL_MUST_CHECK int bl_config_parse(const char *text, size_t bytes, const char *where,
                                  bl_config_take take, void *context, struct bl_errmsg *msg);

#endif
