/* SPDX-License-Identifier: Apache-2.0 */
#include "gpusim_shared.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpusim_device.h"

#define ALIGN     128u
#define TAIL      (gpusim_tail_bytes())
#define TAIL_BYTE 0xd7

unsigned char *gpusim_shared_take(size_t bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, ALIGN, bytes + TAIL + (bytes + TAIL == 0))) {
        fprintf(stderr, "gpusim: no memory for %zu bytes of shared memory\n", bytes);
        abort();
    }
    memset(static_cast<char *>(memory) + bytes, TAIL_BYTE, TAIL);
    return static_cast<unsigned char *>(memory);
}

void gpusim_shared_give(unsigned char *shared, size_t bytes)
{
    (void)bytes;
    free(shared);
}

bool gpusim_shared_is_whole(const unsigned char *shared, size_t bytes)
{
    for (size_t i = bytes; i < bytes + TAIL; i++) {
        if (shared[i] != TAIL_BYTE) {
            return false;
        }
    }
    return true;
}

void gpusim_shared_poison(const char *name, unsigned char *shared, size_t bytes)
{
    (void)name;
    gpusim_poison(shared, bytes);
}
