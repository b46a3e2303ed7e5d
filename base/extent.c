/* SPDX-License-Identifier: Apache-2.0 */
#include "base/extent.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/extent_rows.h"

static const struct {
    enum bl_dtype dtype;
    uint32_t bytes;
    const char *name;
} dtype_table[] = {
    {BL_F32, 4, "F32"}, {BL_BF16, 2, "BF16"}, {BL_F16, 2, "F16"}, {BL_F64, 8, "F64"},
    {BL_U8, 1, "U8"},   {BL_I32, 4, "I32"},   {BL_I64, 8, "I64"},
};
#define DTYPE_COUNT (sizeof(dtype_table) / sizeof(dtype_table[0]))

uint32_t bl_dtype_bytes(enum bl_dtype dtype)
{
    for (size_t i = 0; i < DTYPE_COUNT; i++) {
        if (dtype_table[i].dtype == dtype) {
            return dtype_table[i].bytes;
        }
    }
    return 0;
}

const char *bl_dtype_name(enum bl_dtype dtype)
{
    for (size_t i = 0; i < DTYPE_COUNT; i++) {
        if (dtype_table[i].dtype == dtype) {
            return dtype_table[i].name;
        }
    }
    return NULL;
}

enum bl_dtype bl_dtype_parse(const char *name)
{
    for (size_t i = 0; i < DTYPE_COUNT; i++) {
        if (strcmp(dtype_table[i].name, name) == 0) {
            return dtype_table[i].dtype;
        }
    }
    return (enum bl_dtype)0;
}

uint64_t bl_tensor_elems(const struct bl_tensor *tensor)
{
    uint64_t elems = 1;
    if (tensor->dims > BL_TENSOR_DIMS_MAX) {
        return 0;
    }
    for (uint32_t d = 0; d < tensor->dims; d++) {
        if (__builtin_mul_overflow(elems, tensor->shape[d], &elems)) {
            return 0;
        }
    }
    return elems;
}

void bl_extent_whole(struct bl_extent *extent, const struct bl_tensor *tensor, uint32_t index,
                     uint64_t flat_lo, uint64_t flat_hi)
{
    memset(extent, 0, sizeof(*extent));
    extent->tensor = index;
    for (uint32_t d = 0; d < tensor->dims && d < BL_TENSOR_DIMS_MAX; d++) {
        extent->hi[d] = tensor->shape[d];
    }
    extent->flat_lo = flat_lo;
    extent->flat_hi = flat_hi;
}

uint64_t bl_extent_elems(const struct bl_extent *extent)
{
    return extent->flat_hi - extent->flat_lo;
}

int bl_extent_check(const struct bl_extent *extent, const struct bl_tensor *tensor,
                    struct bl_errmsg *msg)
{
    uint32_t elem_bytes = bl_dtype_bytes(tensor->dtype);
    if (memchr(tensor->name, '\0', sizeof(tensor->name)) == NULL || tensor->name[0] == '\0') {
        return bl_err(msg, BL_EFORMAT, "tensor name is empty or too long");
    }
    if (tensor->dims > BL_TENSOR_DIMS_MAX || elem_bytes == 0) {
        return bl_err(msg, BL_EFORMAT, "%s: unknown dtype or more than %d dimensions", tensor->name,
                      BL_TENSOR_DIMS_MAX);
    }
    uint64_t whole_bytes;
    if (__builtin_mul_overflow(bl_tensor_elems(tensor), (uint64_t)elem_bytes, &whole_bytes) ||
        whole_bytes == 0) {
        return bl_err(msg, BL_EFORMAT, "%s: shape is empty or too large", tensor->name);
    }
    uint64_t box_elems = 1;
    for (uint32_t d = 0; d < tensor->dims; d++) {
        if (extent->lo[d] >= extent->hi[d] || extent->hi[d] > tensor->shape[d]) {
            return bl_err(msg, BL_EFORMAT, "%s: box [%llu, %llu) outside dimension %u of %llu",
                          tensor->name, (unsigned long long)extent->lo[d],
                          (unsigned long long)extent->hi[d], d,
                          (unsigned long long)tensor->shape[d]);
        }
        box_elems *= extent->hi[d] - extent->lo[d];
    }
    if (extent->flat_lo > extent->flat_hi || extent->flat_hi > box_elems) {
        return bl_err(msg, BL_EFORMAT, "%s: flat range [%llu, %llu) outside a box of %llu elements",
                      tensor->name, (unsigned long long)extent->flat_lo,
                      (unsigned long long)extent->flat_hi, (unsigned long long)box_elems);
    }
    if (extent->offset > UINT64_MAX - whole_bytes) {
        return bl_err(msg, BL_EFORMAT, "%s: offset too large", tensor->name);
    }
    return 0;
}

void bl_extent_list_close(struct bl_extent_list *list)
{
    if (list != NULL) {
        free(list->tensors);
        free(list->extents);
        memset(list, 0, sizeof(*list));
    }
}

int bl_extent_list_copy(struct bl_extent_list *ret, const struct bl_extent_list *from)
{
    struct bl_extent_list copy = {0};
    copy.tensors = calloc(bl_extent_capacity(from->tensor_count), sizeof(*copy.tensors));
    copy.extents = calloc(bl_extent_capacity(from->extent_count), sizeof(*copy.extents));
    if (copy.tensors == NULL || copy.extents == NULL) {
        bl_extent_list_close(&copy);
        return -ENOMEM;
    }
    if (from->tensor_count > 0) {
        memcpy(copy.tensors, from->tensors, from->tensor_count * sizeof(*copy.tensors));
    }
    if (from->extent_count > 0) {
        memcpy(copy.extents, from->extents, from->extent_count * sizeof(*copy.extents));
    }
    copy.tensor_count = from->tensor_count;
    copy.extent_count = from->extent_count;
    *ret = copy;
    return 0;
}

/* Makes room for one more of `elem_bytes` behind `count`. Capacity is a function of the count: the
 * next power of two. */
static int extent_grow(void **array, uint32_t count, size_t elem_bytes)
{
    if (count != 0 && (count & (count - 1)) != 0) {
        return 0;
    }
    if (count >= (1U << 30)) {
        return BL_ELIMIT;
    }
    void *grown = realloc(*array, bl_extent_capacity(count + 1) * elem_bytes);
    if (grown == NULL) {
        return -ENOMEM;
    }
    *array = grown;
    return 0;
}

static int tensor_same(const struct bl_tensor *a, const struct bl_tensor *b)
{
    if (a->dtype != b->dtype || a->dims != b->dims || strcmp(a->name, b->name) != 0) {
        return 0;
    }
    for (uint32_t d = 0; d < a->dims; d++) {
        if (a->shape[d] != b->shape[d]) {
            return 0;
        }
    }
    return 1;
}

int bl_extent_list_tensor(struct bl_extent_list *list, const struct bl_tensor *tensor,
                          uint32_t *ret_index, struct bl_errmsg *msg)
{
    if (tensor->dims > BL_TENSOR_DIMS_MAX || tensor->name[0] == '\0' ||
        memchr(tensor->name, '\0', sizeof(tensor->name)) == NULL) {
        return bl_err(msg, BL_EFORMAT, "tensor with a bad name or more than %d dimensions",
                      BL_TENSOR_DIMS_MAX);
    }
    for (uint32_t i = list->tensor_count; i-- > 0;) {
        if (strcmp(list->tensors[i].name, tensor->name) != 0) {
            continue;
        }
        if (!tensor_same(&list->tensors[i], tensor) || list->tensors[i].kind != tensor->kind) {
            return bl_err(msg, BL_EFORMAT, "%s: listed twice with different shape, dtype or kind",
                          tensor->name);
        }
        *ret_index = i;
        return 0;
    }
    void *array = list->tensors;
    int rc = extent_grow(&array, list->tensor_count, sizeof(*list->tensors));
    if (rc < 0) {
        return bl_err_code(msg, rc, "%s", tensor->name);
    }
    list->tensors = array;
    list->tensors[list->tensor_count] = *tensor;
    *ret_index = list->tensor_count++;
    return 0;
}

int bl_extent_list_add(struct bl_extent_list *list, const struct bl_extent *extent)
{
    void *array = list->extents;
    int rc = extent_grow(&array, list->extent_count, sizeof(*list->extents));
    if (rc < 0) {
        return rc;
    }
    list->extents = array;
    list->extents[list->extent_count++] = *extent;
    return 0;
}

static int extent_same(const struct bl_extent *a, const struct bl_extent *b, uint32_t dims)
{
    if (a->tensor != b->tensor || a->flat_lo != b->flat_lo || a->flat_hi != b->flat_hi ||
        a->offset != b->offset) {
        return 0;
    }
    for (uint32_t d = 0; d < dims; d++) {
        if (a->lo[d] != b->lo[d] || a->hi[d] != b->hi[d]) {
            return 0;
        }
    }
    return 1;
}

int bl_extent_list_equal(const struct bl_extent_list *a, const struct bl_extent_list *b)
{
    if (a->tensor_count != b->tensor_count || a->extent_count != b->extent_count) {
        return 0;
    }
    for (uint32_t i = 0; i < a->tensor_count; i++) {
        if (!tensor_same(&a->tensors[i], &b->tensors[i]) ||
            a->tensors[i].kind != b->tensors[i].kind) {
            return 0;
        }
    }
    for (uint32_t i = 0; i < a->extent_count; i++) {
        uint32_t tensor = a->extents[i].tensor;
        uint32_t dims = tensor < a->tensor_count ? a->tensors[tensor].dims : 0;
        if (!extent_same(&a->extents[i], &b->extents[i], dims)) {
            return 0;
        }
    }
    return 1;
}

void bl_extent_list_digest(const struct bl_extent_list *list, const void *base,
                           struct bl_state_digest *digest)
{
    for (uint32_t i = 0; i < list->extent_count; i++) {
        const struct bl_extent *extent = &list->extents[i];
        const struct bl_tensor *tensor = &list->tensors[extent->tensor];
        uint64_t name_hash = bl_xxh3(tensor->name, strlen(tensor->name));
        uint32_t elem_bytes = bl_dtype_bytes(tensor->dtype);
        const unsigned char *data = (const unsigned char *)base + extent->offset;
        struct bl_extent_rows rows;
        struct bl_extent_row row;
        bl_extent_rows_init(&rows, extent, tensor, NULL, NULL);
        while (bl_extent_rows_next(&rows, &row)) {
            bl_state_digest_add(digest, name_hash, row.logical, data + row.local * elem_bytes,
                                row.count, elem_bytes);
        }
    }
}
