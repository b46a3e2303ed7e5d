/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared memory of the block that runs. Between blocks it is filled with NaNs; behind the dynamic
 * part lie bytes that must stay as they are (under ASan: that nobody may touch).
 */
#ifndef GPUSIM_GPUSIM_SHARED_H
#define GPUSIM_GPUSIM_SHARED_H

#include <stddef.h>
#include <stdint.h>

unsigned char *gpusim_shared_take(size_t bytes);
void gpusim_shared_give(unsigned char *shared, size_t bytes);
/* The static variables of a kernel, whose launch is written as `name`: a handle for poison. */
uint32_t gpusim_shared_find(const void *kernel, const char *name);
/* The dynamic part and those. */
void gpusim_shared_poison(uint32_t kernel, unsigned char *shared, size_t bytes);
bool gpusim_shared_is_whole(const unsigned char *shared, size_t bytes);

#endif
