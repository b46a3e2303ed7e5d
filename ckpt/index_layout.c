/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the chunks of a part lie. With codec none they are steps through the file. With codec zstd
 * they follow the extents: large floats are cut into chunks of planes, and what stands between
 * them, with the header, into plain chunks.
 */
#include <errno.h>
#include <stdlib.h>

#include "ckpt/codec.h"
#include "ckpt/index.h"

void ckpt_index_cut(struct ckpt_cutting *ret, enum bl_dtype dtype, uint64_t elems,
                    uint32_t chunk_bytes)
{
    struct ckpt_cutting cut = {.planes = ckpt_codec_planes(dtype)};
    uint64_t each = chunk_bytes / cut.planes;

    if (cut.planes == 1) {
        *ret = cut;
        return;
    }
    cut.each = (uint32_t)each;
    cut.chunks = elems / each;
    cut.tail = (uint32_t)(elems % each);
    cut.tail_planes = cut.tail >= CKPT_PLANE_BYTES_MIN;
    if (cut.chunks == 0 && cut.tail_planes) { /* a single chunk, a short one */
        cut.chunks = 1;
        cut.each = cut.tail;
        cut.tail = 0;
        cut.tail_planes = false;
    }
    *ret = cut;
}

/* Chunks and frames so far; they are written down when there is memory for them. */
struct layout {
    struct ckpt_index *index;
    bool write;
    uint64_t chunks, frames;
    uint64_t plain_from, at; /* plain bytes that are in no chunk yet; the end of what was seen */
};

static void add_chunk(struct layout *layout, uint64_t offset, uint64_t bytes, uint32_t planes)
{
    struct ckpt_index *index = layout->index;

    if (layout->write) {
        index->layout[layout->chunks] =
            (struct ckpt_chunk){offset, (uint32_t)bytes, planes, (uint32_t)layout->frames};
        for (uint32_t p = 0; p < planes; p++) {
            index->frames[layout->frames + p].bytes = (uint32_t)(bytes / planes);
        }
    }
    layout->chunks++;
    layout->frames += planes;
}

static void end_plain(struct layout *layout)
{
    uint64_t step = layout->index->chunk_bytes, bytes = layout->at - layout->plain_from;

    if (layout->write) {
        for (uint64_t done = 0; done < bytes; done += step) {
            add_chunk(layout, layout->plain_from + done, bytes - done < step ? bytes - done : step,
                      1);
        }
    } else {
        layout->chunks += (bytes + step - 1) / step;
        layout->frames += (bytes + step - 1) / step;
    }
    layout->plain_from = layout->at;
}

static void add_planes(struct layout *layout, const struct ckpt_cutting *cut)
{
    uint64_t bytes = (uint64_t)cut->each * cut->planes;

    if (layout->write) {
        for (uint64_t c = 0; c < cut->chunks; c++) {
            add_chunk(layout, layout->at + c * bytes, bytes, cut->planes);
        }
    } else { /* counted without a loop: an index can claim anything */
        layout->chunks += cut->chunks;
        layout->frames += cut->chunks * cut->planes;
    }
    layout->at += cut->chunks * bytes;
    if (cut->tail_planes) {
        add_chunk(layout, layout->at, (uint64_t)cut->tail * cut->planes, cut->planes);
        layout->at += (uint64_t)cut->tail * cut->planes;
    }
    layout->plain_from = layout->at;
}

static void lay_out(struct layout *layout)
{
    const struct bl_extent_list *held = &layout->index->held;

    layout->chunks = layout->frames = 0;
    layout->plain_from = 0;
    layout->at = layout->index->data_offset;
    end_plain(layout); /* the header is in chunks of its own */
    for (uint32_t i = 0; i < held->extent_count; i++) {
        const struct bl_extent *extent = &held->extents[i];
        enum bl_dtype dtype = held->tensors[extent->tensor].dtype;
        uint64_t end = layout->at + bl_extent_elems(extent) * bl_dtype_bytes(dtype);
        struct ckpt_cutting cut;

        ckpt_index_cut(&cut, dtype, bl_extent_elems(extent), layout->index->chunk_bytes);
        if (cut.chunks > 0) {
            end_plain(layout);
            add_planes(layout, &cut);
        }
        layout->at = end;
    }
    end_plain(layout);
}

int ckpt_index_layout(struct ckpt_index *index, struct bl_errmsg *msg)
{
    struct layout layout = {.index = index};

    lay_out(&layout);
    if (layout.frames > UINT32_MAX / sizeof(struct ckpt_frame) ||
        (index->frame_count != 0 && layout.frames != index->frame_count)) {
        return bl_err(msg, BL_EFORMAT, "index: %u frames, its extents make %llu",
                      index->frame_count, (unsigned long long)layout.frames);
    }
    index->layout = calloc(layout.chunks + 1, sizeof(*index->layout));
    index->frames = calloc(layout.frames + 1, sizeof(*index->frames));
    if (index->layout == NULL || index->frames == NULL) {
        return bl_err_code(msg, -ENOMEM, "index of %llu frames", (unsigned long long)layout.frames);
    }
    index->chunk_count = (uint32_t)layout.chunks;
    index->frame_count = (uint32_t)layout.frames;
    layout.write = true;
    lay_out(&layout);
    BL_ASSERT(layout.at == index->raw_bytes && layout.frames == index->frame_count);
    return 0;
}

void ckpt_index_chunk_range(const struct ckpt_index *index, uint32_t chunk, uint64_t *ret_lo,
                            uint64_t *ret_hi)
{
    uint64_t lo, hi;

    BL_ASSERT(chunk < index->chunk_count);
    if (index->codec == CKPT_CODEC_ZSTD) {
        lo = index->layout[chunk].offset;
        hi = lo + index->layout[chunk].bytes;
    } else {
        lo = (uint64_t)chunk * index->chunk_bytes;
        hi = lo + index->chunk_bytes < index->part_bytes ? lo + index->chunk_bytes
                                                         : index->part_bytes;
    }
    *ret_lo = lo;
    *ret_hi = hi;
}

const char *ckpt_index_chunk_tensor(const struct ckpt_index *index, uint32_t chunk)
{
    uint64_t lo, hi;
    uint32_t from = 0, to = index->held.extent_count;

    ckpt_index_chunk_range(index, chunk, &lo, &hi);
    while (from < to) { /* the first extent that does not end before the chunk */
        uint32_t middle = from + (to - from) / 2;
        const struct bl_extent *extent = &index->held.extents[middle];
        uint64_t each = bl_dtype_bytes(index->held.tensors[extent->tensor].dtype);

        if (extent->offset + bl_extent_elems(extent) * each > lo) {
            to = middle;
        } else {
            from = middle + 1;
        }
    }
    if (from == index->held.extent_count || index->held.extents[from].offset >= hi) {
        return "header";
    }
    return index->held.tensors[index->held.extents[from].tensor].name;
}
