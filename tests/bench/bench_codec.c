/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/bench_codec.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <zstd.h>

#include "base/mem.h"
#include "ckpt/codec.h"
#include "ckpt/index.h"

#define SLICE_BYTES (16u * 1024 * 1024) /* by one, then by the other */

struct codec_run {
    const struct bench_state *state;
    struct bench_codec *result;
    struct ckpt_coder *coder; /* owned */
    ZSTD_CCtx *compress;      /* owned */
    ZSTD_DCtx *decompress;    /* owned */
    uint8_t *stored, *back;   /* owned: room for a slice */
    uint8_t *chunk;           /* owned: room for a chunk */
    size_t room;              /* of stored */
    uint32_t extent;          /* where the codec goes on */
    uint64_t done;            /* bytes of it */
};

static double thread_ms(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    return 1e3 * (double)ts.tv_sec + 1e-6 * (double)ts.tv_nsec;
}

/* The codec's turn: about SLICE_BYTES, chunk by chunk, as a part's writer cuts them. */
static int codec_slice(struct codec_run *run, uint64_t *ret_bytes, struct bl_errmsg *msg)
{
    const struct bl_extent_list *list = &run->state->list;
    uint32_t stored[CKPT_PLANES_MAX];
    double from;
    int rc = 0;

    *ret_bytes = 0;
    while (rc == 0 && *ret_bytes < SLICE_BYTES && run->extent < list->extent_count) {
        const struct bl_extent *extent = &list->extents[run->extent];
        enum bl_dtype dtype = list->tensors[extent->tensor].dtype;
        uint64_t left = bl_extent_elems(extent) * bl_dtype_bytes(dtype) - run->done;
        uint32_t bytes = left < CKPT_CHUNK_BYTES ? (uint32_t)left : CKPT_CHUNK_BYTES;
        const uint8_t *data = run->state->data + extent->offset + run->done;
        uint32_t planes = ckpt_codec_planes(dtype);

        from = thread_ms();
        run->result->stored_bytes +=
            ckpt_codec_chunk_encode(run->coder, data, bytes, planes, false, run->stored, stored);
        run->result->encode_ms += thread_ms() - from;
        from = thread_ms();
        rc = ckpt_codec_chunk_decode(run->coder, run->stored, stored, planes, run->chunk, bytes,
                                     msg);
        run->result->decode_ms += thread_ms() - from;
        if (rc == 0 && memcmp(run->chunk, data, bytes) != 0) {
            rc = bl_err(msg, BL_EDIGEST, "codec: a chunk came back different");
        }
        *ret_bytes += bytes;
        run->done += bytes;
        if (bytes == left) {
            run->extent++;
            run->done = 0;
        }
    }
    return rc;
}

static int zstd_error(size_t code, struct bl_errmsg *msg)
{
    return bl_err(msg, BL_ELIBRARY, "zstd: %s", ZSTD_getErrorName(code));
}

/* zstd's turn: bytes [at, at + bytes) of the state, in the same stream as those before. */
static int zstd_slice(struct codec_run *run, uint64_t at, uint64_t bytes, struct bl_errmsg *msg)
{
    ZSTD_inBuffer in = {run->state->data + at, bytes, 0};
    ZSTD_outBuffer out = {run->stored, run->room, 0};
    double from = thread_ms();
    size_t left = ZSTD_compressStream2(run->compress, &out, &in, ZSTD_e_flush);

    run->result->zstd_encode_ms += thread_ms() - from;
    if (ZSTD_isError(left) || left != 0) {
        return zstd_error(left, msg);
    }
    run->result->zstd_stored_bytes += out.pos;
    in = (ZSTD_inBuffer){run->stored, out.pos, 0};
    out = (ZSTD_outBuffer){run->back, bytes, 0};
    from = thread_ms();
    while (in.pos < in.size || out.pos < out.size) {
        size_t before = in.pos + out.pos;

        left = ZSTD_decompressStream(run->decompress, &out, &in);
        if (ZSTD_isError(left) || in.pos + out.pos == before) {
            return zstd_error(left, msg);
        }
    }
    run->result->zstd_decode_ms += thread_ms() - from;
    return memcmp(run->back, run->state->data + at, bytes) != 0
               ? bl_err(msg, BL_EDIGEST, "zstd: a slice came back different")
               : 0;
}

static int codec_start(struct codec_run *run, struct bl_errmsg *msg)
{
    size_t code;

    run->room = ZSTD_compressBound(2 * SLICE_BYTES);
    run->compress = ZSTD_createCCtx();
    run->decompress = ZSTD_createDCtx();
    run->stored = bl_mem_alloc(run->room);
    run->back = bl_mem_alloc(2 * SLICE_BYTES);
    run->chunk = bl_mem_alloc(CKPT_CHUNK_BYTES);
    if (run->compress == NULL || run->decompress == NULL || run->stored == NULL ||
        run->back == NULL || run->chunk == NULL) {
        return bl_err_code(msg, -ENOMEM, "codec");
    }
    memset(run->stored, 1, run->room); /* touched before the clock runs */
    memset(run->back, 1, 2 * SLICE_BYTES);
    code = ZSTD_CCtx_setParameter(run->compress, ZSTD_c_compressionLevel, 1);
    return ZSTD_isError(code) ? zstd_error(code, msg)
                              : ckpt_coder_new(&run->coder, CKPT_CHUNK_BYTES, msg);
}

int bench_codec_measure(const struct bench_state *state, uint64_t bytes_max,
                        struct bench_codec *ret, struct bl_errmsg *msg)
{
    struct codec_run run = {.state = state, .result = ret};
    uint64_t at = 0, bytes = 0;
    int rc;

    memset(ret, 0, sizeof(*ret));
    rc = codec_start(&run, msg);
    while (rc == 0 && at < bytes_max && run.extent < state->list.extent_count) {
        rc = codec_slice(&run, &bytes, msg);
        rc = rc < 0 ? rc : zstd_slice(&run, at, bytes, msg);
        at += bytes; /* tensors follow each other, but for a few bytes of padding */
    }
    ret->bytes = at;
    ckpt_coder_free(run.coder);
    ZSTD_freeCCtx(run.compress);
    ZSTD_freeDCtx(run.decompress);
    bl_mem_free(run.stored, run.room);
    bl_mem_free(run.back, 2 * SLICE_BYTES);
    bl_mem_free(run.chunk, CKPT_CHUNK_BYTES);
    return rc;
}
