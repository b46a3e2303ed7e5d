/* SPDX-License-Identifier: Apache-2.0 */
/* The codec against zstd level 1 as it stands, on one thread. */
#ifndef BL_TESTS_BENCH_CODEC_H
#define BL_TESTS_BENCH_CODEC_H

#include <stdint.h>

#include "base/error.h"
#include "tests/bench/bench_state.h"

struct bench_codec {
    uint64_t bytes; /* of the state that went through both */
    uint64_t stored_bytes, zstd_stored_bytes;
    double encode_ms, decode_ms;           /* processor time of this thread: planes and frames */
    double zstd_encode_ms, zstd_decode_ms; /* one stream of level 1 over the same bytes */
};

/* Encodes and decodes the first `bytes_max` of the state by both, slice by slice in turns, and
 * compares what came back. BL_EDIGEST when it differs, BL_ELIBRARY for an error of zstd's. */
BL_MUST_CHECK int bench_codec_measure(const struct bench_state *state, uint64_t bytes_max,
                                      struct bench_codec *ret, struct bl_errmsg *msg);

#endif
