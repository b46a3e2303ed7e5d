/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes manifests, and the checks that need the whole of one. The text has a fixed order of
 * members, one part and one tensor a line, tensors by name; its last member is the digest of all
 * bytes before it.
 */
#include "ckpt/manifest.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/part.h"
#include "ckpt/text.h"

#define DIGEST_TAIL_BYTES 30u /* "digest":"0123456789abcdef"} and a newline */

void ckpt_manifest_close(struct ckpt_manifest *manifest)
{
    if (manifest == NULL) {
        return;
    }
    for (uint32_t i = 0; manifest->parts != NULL && i < manifest->part_count; i++) {
        bl_extent_list_close(&manifest->parts[i].held);
    }
    free(manifest->parts);
    free(manifest->job);
    memset(manifest, 0, sizeof(*manifest));
}

/* One extent of one part, to be sorted. */
struct ref {
    uint32_t part, extent;
    const struct ckpt_part *parts;
};

static const struct bl_extent *ref_extent(const struct ref *ref)
{
    return &ref->parts[ref->part].held.extents[ref->extent];
}

static const struct bl_tensor *ref_tensor(const struct ref *ref)
{
    return &ref->parts[ref->part].held.tensors[ref_extent(ref)->tensor];
}

static int ref_order(const void *a_, const void *b_)
{
    const struct ref *a = a_, *b = b_;
    int order = ckpt_extent_order(ref_extent(a), ref_tensor(a), ref_extent(b), ref_tensor(b));

    if (order == 0 && a->part != b->part) {
        return a->part < b->part ? -1 : 1;
    }
    return order;
}

/* All extents of all parts, sorted; owned by the caller. */
static int refs_make(const struct ckpt_manifest *manifest, struct ref **ret, size_t *ret_count,
                     struct bl_errmsg *msg)
{
    size_t count = 0;
    struct ref *refs;

    for (uint32_t p = 0; p < manifest->part_count; p++) {
        count += manifest->parts[p].held.extent_count;
    }
    if (count > CKPT_EXTENTS_MAX) {
        return bl_err(msg, BL_ELIMIT, "%zu extents, at most %d go into a checkpoint", count,
                      CKPT_EXTENTS_MAX);
    }
    refs = calloc(count + 1, sizeof(*refs));
    if (refs == NULL) {
        return bl_err_code(msg, -ENOMEM, "list of %zu extents", count);
    }
    count = 0;
    for (uint32_t p = 0; p < manifest->part_count; p++) {
        for (uint32_t e = 0; e < manifest->parts[p].held.extent_count; e++) {
            refs[count++] = (struct ref){p, e, manifest->parts};
        }
    }
    qsort(refs, count, sizeof(*refs), ref_order);
    *ret = refs;
    *ret_count = count;
    return 0;
}

static bool tensor_same(const struct bl_tensor *a, const struct bl_tensor *b)
{
    return a->dtype == b->dtype && a->kind == b->kind && a->dims == b->dims &&
           memcmp(a->shape, b->shape, sizeof(uint64_t) * a->dims) == 0;
}

static const char *kind_name(enum bl_tensor_kind kind)
{
    static const char *const names[] = {"", "param", "moment1", "moment2", "other"};

    return kind >= BL_KIND_PARAM && kind <= BL_KIND_OTHER ? names[kind] : "";
}

static void add_extent(struct ckpt_text *text, const struct ref *ref)
{
    const struct bl_extent *extent = ref_extent(ref);
    const struct bl_tensor *tensor = ref_tensor(ref);
    const uint64_t flat[2] = {extent->flat_lo, extent->flat_hi};
    char key[CKPT_KEY_MAX];

    ckpt_part_key(key, extent, tensor);
    ckpt_text_printf(text, "{\"part\":%u,\"key\":", ref->part);
    ckpt_text_string(text, key);
    ckpt_text_printf(text, ",\"lo\":");
    ckpt_text_u64s(text, extent->lo, tensor->dims);
    ckpt_text_printf(text, ",\"hi\":");
    ckpt_text_u64s(text, extent->hi, tensor->dims);
    ckpt_text_printf(text, ",\"flat\":");
    ckpt_text_u64s(text, flat, 2);
    ckpt_text_add(text, "}", 1);
}

static int add_tensors(struct ckpt_text *text, const struct ckpt_manifest *manifest,
                       struct bl_errmsg *msg)
{
    struct ref *refs = NULL;
    size_t count = 0;
    int rc = refs_make(manifest, &refs, &count, msg);

    if (rc < 0) {
        return rc;
    }
    ckpt_text_printf(text, "\"tensors\":[");
    for (size_t i = 0; i < count && !text->failed; i++) {
        const struct bl_tensor *tensor = ref_tensor(&refs[i]);
        const struct bl_tensor *last = i == 0 ? NULL : ref_tensor(&refs[i - 1]);

        if (last != NULL && strcmp(last->name, tensor->name) == 0) {
            if (!tensor_same(last, tensor)) {
                free(refs);
                return bl_err(msg, BL_EFORMAT, "tensor %s has two shapes, dtypes or kinds",
                              tensor->name);
            }
            ckpt_text_printf(text, ",");
        } else {
            ckpt_text_printf(text, "%s\n{\"name\":", last == NULL ? "" : "]},");
            ckpt_text_string(text, tensor->name);
            ckpt_text_printf(text, ",\"kind\":\"%s\",\"dtype\":\"%s\",\"shape\":",
                             kind_name(tensor->kind), bl_dtype_name(tensor->dtype));
            ckpt_text_u64s(text, tensor->shape, tensor->dims);
            ckpt_text_printf(text, ",\"extents\":[");
        }
        add_extent(text, &refs[i]);
    }
    ckpt_text_printf(text, "%s\n],\n", count == 0 ? "" : "]}");
    free(refs);
    return 0;
}

static void add_parts(struct ckpt_text *text, const struct ckpt_manifest *manifest)
{
    ckpt_text_printf(text, "\"parts\":[");
    for (uint32_t i = 0; i < manifest->part_count; i++) {
        const struct ckpt_part *part = &manifest->parts[i];

        ckpt_text_printf(text, "%s\n{\"name\":", i == 0 ? "" : ",");
        ckpt_text_string(text, part->name);
        ckpt_text_printf(text, ",\"node\":");
        ckpt_text_string(text, part->node);
        ckpt_text_printf(text, ",\"bytes\":%llu,\"raw_bytes\":%llu,\"index\":\"%016llx\"}",
                         (unsigned long long)part->bytes, (unsigned long long)part->raw_bytes,
                         (unsigned long long)part->index_digest);
    }
    ckpt_text_printf(text, "\n],\n");
}

static void add_facts(struct ckpt_text *text, const struct ckpt_manifest *manifest)
{
    const struct ckpt_layout *layout = &manifest->layout;
    char digest[BL_STATE_DIGEST_TEXT_BYTES];

    ckpt_text_printf(text, "{\"belay_manifest\":%d,\n\"run\":", CKPT_FORMAT_VERSION);
    ckpt_text_string(text, manifest->run);
    ckpt_text_printf(text, ",\"generation\":%llu,\"line\":%llu,\"step\":%llu,\n",
                     (unsigned long long)manifest->generation, (unsigned long long)manifest->line,
                     (unsigned long long)manifest->step);
    ckpt_text_printf(text, "\"function\":\"%016llx\",\"samples\":%llu,\"seed\":\"%llu\",",
                     (unsigned long long)manifest->function_id,
                     (unsigned long long)manifest->samples, (unsigned long long)manifest->seed);
    ckpt_text_printf(text, "\"lanes\":%u,\"codec\":", manifest->lanes);
    ckpt_text_string(text, manifest->codec);
    ckpt_text_printf(text,
                     ",\n\"layout\":{\"world\":%u,\"dp\":%u,\"tp\":%u,\"pp\":%u,\"zero\":%u},\n",
                     layout->world, layout->dp, layout->tp, layout->pp, layout->zero);
    if (isfinite(manifest->metrics.loss)) {
        ckpt_text_printf(text, "\"metrics\":{\"loss\":%.17g,", manifest->metrics.loss);
    } else {
        ckpt_text_printf(text, "\"metrics\":{\"loss\":null,");
    }
    ckpt_text_printf(text, "\"tokens\":%llu,\"saved_unix_s\":%llu},\n",
                     (unsigned long long)manifest->metrics.tokens,
                     (unsigned long long)manifest->metrics.saved_unix_s);
    bl_state_digest_format(&manifest->state, digest);
    ckpt_text_printf(text, "\"state_digest\":\"%s\",\n\"writer\":", digest);
    ckpt_text_string(text, manifest->writer);
    ckpt_text_printf(text, ",\n\"job\":");
    if (manifest->job == NULL) {
        ckpt_text_printf(text, "{}");
    } else {
        ckpt_text_add(text, manifest->job, strlen(manifest->job));
    }
    ckpt_text_printf(text, ",\n");
}

static int check_facts(const struct ckpt_manifest *manifest, struct bl_errmsg *msg)
{
    struct ckpt_json reader;
    const char *from;
    int rc;

    if (!ckpt_name_is_plain(manifest->run) || manifest->part_count > CKPT_PARTS_MAX) {
        return bl_err(msg, BL_EFORMAT, "manifest: bad run id or %u parts", manifest->part_count);
    }
    for (uint32_t i = 0; i < manifest->part_count; i++) {
        const char *name = manifest->parts[i].name;

        if (!ckpt_name_is_plain(name) || name[0] == '.' || strchr(name, '/') != NULL) {
            return bl_err(msg, BL_EFORMAT, "manifest: \"%s\" cannot be a part's name", name);
        }
        for (uint32_t k = 0; k < i; k++) {
            if (strcmp(manifest->parts[k].name, name) == 0) {
                return bl_err(msg, BL_EFORMAT, "manifest: two parts are called %s", name);
            }
        }
    }
    if (manifest->job == NULL) {
        return 0;
    }
    if (strlen(manifest->job) > CKPT_JOB_BYTES_MAX) {
        return bl_err(msg, BL_ELIMIT, "manifest: the frozen job is over %d bytes",
                      CKPT_JOB_BYTES_MAX);
    }
    ckpt_json_init(&reader, manifest->job, strlen(manifest->job));
    if (manifest->job[0] != '{') {
        ckpt_json_fail(&reader, BL_EFORMAT, "'{' expected");
    }
    ckpt_json_skip(&reader, &from);
    if (reader.at != reader.end) {
        ckpt_json_fail(&reader, BL_EFORMAT, "something after the end");
    }
    rc = ckpt_json_error(&reader, msg);
    return rc < 0 ? bl_err_in(msg, rc, "manifest: frozen job") : 0;
}

int ckpt_manifest_encode(const struct ckpt_manifest *manifest, char **ret_text, size_t *ret_bytes,
                         struct bl_errmsg *msg)
{
    struct ckpt_text text = {0};
    int rc = check_facts(manifest, msg);

    if (rc < 0) {
        return rc;
    }
    add_facts(&text, manifest);
    add_parts(&text, manifest);
    rc = add_tensors(&text, manifest, msg);
    if (rc == 0 && !text.failed) {
        ckpt_text_printf(&text, "\"digest\":\"%016llx\"}\n",
                         (unsigned long long)bl_xxh3(text.data, text.bytes));
    }
    if (rc == 0 && text.failed) {
        rc = bl_err_code(msg, -ENOMEM, "manifest");
    }
    if (rc == 0 && text.bytes > CKPT_MANIFEST_BYTES_MAX) {
        rc = bl_err(msg, BL_ELIMIT, "manifest of %zu bytes", text.bytes);
    }
    if (rc < 0) {
        ckpt_text_close(&text);
        return rc;
    }
    *ret_text = text.data;
    *ret_bytes = text.bytes;
    return 0;
}

int ckpt_manifest_digest(const char *text, size_t bytes, uint64_t *ret_digest,
                         struct bl_errmsg *msg)
{
    char tail[DIGEST_TAIL_BYTES];
    uint64_t digest;

    if (bytes < DIGEST_TAIL_BYTES) {
        return bl_err(msg, BL_EFORMAT, "manifest: cut short at %zu bytes", bytes);
    }
    digest = bl_xxh3(text, bytes - (DIGEST_TAIL_BYTES - 1));
    snprintf(tail, sizeof(tail), "\"digest\":\"%016llx\"}\n", (unsigned long long)digest);
    if (memcmp(text + bytes - (DIGEST_TAIL_BYTES - 1), tail, DIGEST_TAIL_BYTES - 1) != 0) {
        return bl_err(msg, BL_EDIGEST, "manifest: digest differs");
    }
    *ret_digest = digest;
    return 0;
}

int ckpt_manifest_complete(const struct ckpt_manifest *manifest, struct bl_errmsg *msg)
{
    struct bl_extent_list whole = {0};
    const struct bl_extent_list **held = NULL;
    struct bl_plan plan = {0};
    struct ref *refs = NULL;
    size_t count = 0;
    uint64_t elems_held = 0, elems_all = 0;
    int rc = refs_make(manifest, &refs, &count, msg);

    if (rc < 0) {
        return rc;
    }
    whole.tensors = calloc(count + 1, sizeof(*whole.tensors));
    whole.extents = calloc(count + 1, sizeof(*whole.extents));
    held = calloc(manifest->part_count + 1u, sizeof(*held));
    if (whole.tensors == NULL || whole.extents == NULL || held == NULL) {
        rc = bl_err_code(msg, -ENOMEM, "list of %zu extents", count);
    }
    for (size_t i = 0; rc == 0 && i < count; i++) {
        const struct bl_tensor *tensor = ref_tensor(&refs[i]);

        elems_held += bl_extent_elems(ref_extent(&refs[i]));
        if (i == 0 || strcmp(ref_tensor(&refs[i - 1])->name, tensor->name) != 0) {
            whole.tensors[whole.tensor_count] = *tensor;
            bl_extent_whole(&whole.extents[whole.tensor_count], tensor, whole.tensor_count, 0,
                            bl_tensor_elems(tensor));
            whole.extent_count = ++whole.tensor_count;
            elems_all += bl_tensor_elems(tensor);
        }
    }
    for (uint32_t p = 0; rc == 0 && p < manifest->part_count; p++) {
        held[p] = &manifest->parts[p].held;
    }
    if (rc == 0) {
        rc = bl_plan_make(&plan, &whole, held, manifest->part_count, msg);
    }
    if (rc == 0 && plan.missing_elems > 0) {
        rc = bl_err(msg, BL_ENOSTATE, "%llu elements are in no part, the first of tensor %s",
                    (unsigned long long)plan.missing_elems, plan.missing_name);
    } else if (rc == 0 && elems_held != elems_all) {
        rc = bl_err(msg, BL_EFORMAT, "%llu elements are in more than one part",
                    (unsigned long long)(elems_held - elems_all));
    }
    bl_plan_close(&plan);
    bl_extent_list_close(&whole);
    free(held);
    free(refs);
    return rc;
}
