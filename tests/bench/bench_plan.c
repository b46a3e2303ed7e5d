/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What planning a load costs: `ranks` ranks hold a flat range each of every one of 1,000 tensors,
 * in parts of 8 ranks; another world wants it. Prints a line of JSON for each size, with seconds of
 * processor time.
 *
 *     bench-plan [EXTENTS_MAX]     from 10^4 extents on, by ten, up to so many (default 10^7)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/extent_plan.h"
#include "ckpt/manifest.h"

#define TENSORS    1000u
#define ROWS       4096u
#define COLS       1024u
#define PART_RANKS 8u

static struct bl_tensor tensor_of(uint32_t index)
{
    struct bl_tensor tensor = {
        .kind = BL_KIND_PARAM, .dtype = BL_F32, .dims = 2, .shape = {ROWS, COLS}};

    snprintf(tensor.name, sizeof(tensor.name), "layers.%u.attention.weight", index);
    return tensor;
}

/* What ranks [first, first + count) of `world` hold, tensor by tensor: a range each, or with
 * `merged` one for all of them. */
static void list_make(struct bl_extent_list *list, uint32_t first, uint32_t count, uint32_t world,
                      bool merged)
{
    const uint64_t elems = (uint64_t)ROWS * COLS;
    const uint32_t each = merged ? 1 : count;
    uint64_t offset = 4096;

    memset(list, 0, sizeof(*list));
    list->tensors = calloc(TENSORS, sizeof(*list->tensors));
    list->extents = calloc((size_t)TENSORS * each, sizeof(*list->extents));
    if (list->tensors == NULL || list->extents == NULL) {
        perror("bench-plan");
        exit(3);
    }
    list->tensor_count = TENSORS;
    for (uint32_t t = 0; t < TENSORS; t++) {
        list->tensors[t] = tensor_of(t);
        for (uint32_t r = 0; r < each; r++) {
            struct bl_extent *extent = &list->extents[list->extent_count];
            uint64_t lo = first + r, hi = merged ? first + count : first + r + 1;

            bl_extent_whole(extent, &list->tensors[t], t, elems * lo / world, elems * hi / world);
            extent->offset = offset;
            offset += bl_extent_elems(extent) * 4;
            list->extent_count += bl_extent_elems(extent) > 0;
        }
    }
}

/* Processor time: planning is one thread and never waits. */
static uint64_t cpu_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static double seconds(uint64_t from_ns)
{
    return (double)(cpu_ns() - from_ns) * 1e-9;
}

static void wrong(int rc, const struct bl_errmsg *why)
{
    if (rc < 0) {
        fprintf(stderr, "bench-plan: %s\n", why->text[0] != '\0' ? why->text : bl_strerror(rc));
        exit(3);
    }
}

struct figures {
    double build_s, node_s, world_s, column_s, encode_s, decode_s;
    uint64_t extents, spans, node_spans, column_spans, manifest_bytes;
};

/* A node of another world, and all nodes of it. */
static void plan_worlds(const struct bl_holdings *holdings, uint32_t world, bool all,
                        struct figures *figures)
{
    struct bl_errmsg why = {0};
    uint64_t from;

    for (uint32_t first = 0; first < world && (all || first == 0); first += PART_RANKS) {
        uint32_t count = world - first < PART_RANKS ? world - first : PART_RANKS;
        struct bl_extent_list wanted;
        struct bl_spans spans = {0};

        list_make(&wanted, first, count, world, false);
        from = cpu_ns();
        wrong(bl_holdings_plan(holdings, &wanted, 0, wanted.extent_count, &spans, &why), &why);
        bl_spans_sort(&spans);
        figures->world_s += seconds(from);
        figures->spans += spans.count;
        if (first == 0) {
            figures->node_s = figures->world_s;
            figures->node_spans = figures->spans;
        }
        if (spans.missing_elems > 0) {
            wrong(BL_ENOSTATE, &why);
        }
        bl_spans_close(&spans);
        bl_extent_list_close(&wanted);
    }
}

/* An eighth of the columns of every tensor, from flat ranges: rows that meet everybody's range. */
static void plan_columns(const struct bl_holdings *holdings, struct figures *figures)
{
    struct bl_errmsg why = {0};
    struct bl_extent_list wanted;
    struct bl_spans spans = {0};
    uint64_t from;

    list_make(&wanted, 0, 1, 1, false);
    for (uint32_t e = 0; e < wanted.extent_count; e++) {
        wanted.extents[e].hi[1] = COLS / 8;
        wanted.extents[e].flat_hi = (uint64_t)ROWS * COLS / 8;
    }
    from = cpu_ns();
    wrong(bl_holdings_plan(holdings, &wanted, 0, wanted.extent_count, &spans, &why), &why);
    bl_spans_sort(&spans);
    figures->column_s = seconds(from);
    figures->column_spans = spans.count;
    bl_spans_close(&spans);
    bl_extent_list_close(&wanted);
}

static void manifest_there_and_back(struct bl_extent_list *parts, uint32_t part_count,
                                    struct figures *figures)
{
    struct ckpt_manifest manifest = {
        .run = "0123456789abcdef", .step = 1, .lanes = 1, .codec = "none"};
    struct ckpt_manifest back = {0};
    struct bl_errmsg why = {0};
    char *text = NULL;
    size_t bytes = 0;
    uint64_t from;

    manifest.parts = calloc(part_count, sizeof(*manifest.parts));
    manifest.part_count = part_count;
    for (uint32_t p = 0; p < part_count; p++) {
        snprintf(manifest.parts[p].name, sizeof(manifest.parts[p].name), "part-%04u", p);
        snprintf(manifest.parts[p].node, sizeof(manifest.parts[p].node), "n%u", p);
        manifest.parts[p].held = parts[p];
    }
    from = cpu_ns();
    wrong(ckpt_manifest_encode(&manifest, &text, &bytes, &why), &why);
    figures->encode_s = seconds(from);
    figures->manifest_bytes = bytes;
    from = cpu_ns();
    wrong(ckpt_manifest_decode(&back, text, bytes, &why), &why);
    figures->decode_s = seconds(from);
    ckpt_manifest_close(&back);
    free(text);
    free(manifest.parts);
}

static void bench(uint32_t ranks, bool merged)
{
    uint32_t part_count = (ranks + PART_RANKS - 1) / PART_RANKS;
    struct bl_extent_list *parts = calloc(part_count, sizeof(*parts));
    const struct bl_extent_list **lists = calloc(part_count, sizeof(*lists));
    struct bl_holdings *holdings = NULL;
    struct bl_errmsg why = {0};
    struct figures figures = {0};
    uint64_t from;

    for (uint32_t p = 0; p < part_count; p++) {
        uint32_t first = p * PART_RANKS;

        list_make(&parts[p], first, ranks - first < PART_RANKS ? ranks - first : PART_RANKS, ranks,
                  merged);
        figures.extents += parts[p].extent_count;
        lists[p] = &parts[p];
    }
    from = cpu_ns();
    wrong(bl_holdings_new(&holdings, lists, part_count, &why), &why);
    figures.build_s = seconds(from);
    plan_worlds(holdings, ranks + ranks / 2 + 1, true, &figures);
    plan_columns(holdings, &figures);
    bl_holdings_free(holdings);
    if (figures.extents <= CKPT_EXTENTS_MAX && part_count <= CKPT_PARTS_MAX) {
        manifest_there_and_back(parts, part_count, &figures);
    }
    printf("{\"ranks\":%u,\"merged\":%s,\"extents\":%llu,\"build_s\":%.3f,\"node_s\":%.4f,"
           "\"node_spans\":%llu,\"world_s\":%.3f,\"world_spans\":%llu,\"ns_per_span\":%.0f,"
           "\"columns_s\":%.3f,\"columns_spans\":%llu,\"manifest_bytes\":%llu,\"encode_s\":%.3f,"
           "\"decode_s\":%.3f}\n",
           ranks, merged ? "true" : "false", (unsigned long long)figures.extents, figures.build_s,
           figures.node_s, (unsigned long long)figures.node_spans, figures.world_s,
           (unsigned long long)figures.spans, figures.world_s * 1e9 / (double)figures.spans,
           figures.column_s, (unsigned long long)figures.column_spans,
           (unsigned long long)figures.manifest_bytes, figures.encode_s, figures.decode_s);
    fflush(stdout);
    for (uint32_t p = 0; p < part_count; p++) {
        bl_extent_list_close(&parts[p]);
    }
    free(parts);
    free(lists);
}

int main(int argc, char **argv)
{
    unsigned long long most = argc > 1 ? strtoull(argv[1], NULL, 10) : 10000000;

    for (uint32_t ranks = 10; (uint64_t)ranks * TENSORS <= most; ranks *= 10) {
        bench(ranks, false);
        bench(ranks, true);
    }
    return 0;
}
