/* SPDX-License-Identifier: Apache-2.0 */
/* SipHash-2-4 after Aumasson and Bernstein, "SipHash: a fast short-input PRF" (2012), section 2. */
#include <string.h>

#include "trainer/comm_host.h"

static uint64_t rotl(uint64_t x, unsigned n)
{
    return (x << n) | (x >> (64 - n));
}

static void sip_round(uint64_t v[4])
{
    v[0] += v[1];
    v[1] = rotl(v[1], 13) ^ v[0];
    v[0] = rotl(v[0], 32);
    v[2] += v[3];
    v[3] = rotl(v[3], 16) ^ v[2];
    v[0] += v[3];
    v[3] = rotl(v[3], 21) ^ v[0];
    v[2] += v[1];
    v[1] = rotl(v[1], 17) ^ v[2];
    v[2] = rotl(v[2], 32);
}

static void sip_absorb(uint64_t v[4], uint64_t word)
{
    v[3] ^= word;
    sip_round(v);
    sip_round(v);
    v[0] ^= word;
}

uint64_t comm_siphash(const uint64_t key[2], const void *data, uint64_t bytes)
{
    uint64_t v[4] = {
        key[0] ^ 0x736f6d6570736575ull,
        key[1] ^ 0x646f72616e646f6dull,
        key[0] ^ 0x6c7967656e657261ull,
        key[1] ^ 0x7465646279746573ull,
    };
    const uint8_t *p = data;
    uint64_t left = bytes;
    for (; left >= 8; left -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        sip_absorb(v, word);
    }
    uint64_t last = bytes << 56;
    for (uint64_t i = 0; i < left; i++) {
        last |= (uint64_t)p[i] << (8 * i);
    }
    sip_absorb(v, last);
    v[2] ^= 0xff;
    for (int i = 0; i < 4; i++) {
        sip_round(v);
    }
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}
