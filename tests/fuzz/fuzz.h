/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BL_TESTS_FUZZ_FUZZ_H
#define BL_TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>

/* libFuzzer's entry, one for each target: runs one input, returns 0, stops the process on a
 * finding. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

#endif
