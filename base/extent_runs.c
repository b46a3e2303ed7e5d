/* SPDX-License-Identifier: Apache-2.0 */
/* A plan for one time, as single copies: for memory, where every row is copied by itself. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/extent_plan.h"

#define PLAN_RUNS_MAX ((size_t)1 << 26) /* 3 GiB of them; more is refused */

static int run_order(const void *a, const void *b)
{
    const struct bl_run *x = a;
    const struct bl_run *y = b;
    if (x->src != y->src) {
        return x->src < y->src ? -1 : 1;
    }
    if (x->src_offset != y->src_offset) {
        return x->src_offset < y->src_offset ? -1 : 1;
    }
    return x->dst_offset < y->dst_offset ? -1 : x->dst_offset > y->dst_offset;
}

static void runs_write(struct bl_plan *plan, const struct bl_span *span)
{
    for (uint32_t row = 0; row < span->rows; row++) {
        plan->runs[plan->run_count++] = (struct bl_run){
            .dst_extent = span->dst_extent,
            .src = span->src,
            .src_extent = span->src_extent,
            .dst_offset = span->dst_offset + row * span->dst_stride,
            .src_offset = span->src_offset + row * span->src_stride,
            .bytes = span->bytes,
        };
    }
}

static void runs_merge(struct bl_plan *plan)
{
    size_t out = 0;
    if (plan->run_count == 0) {
        return;
    }
    qsort(plan->runs, plan->run_count, sizeof(*plan->runs), run_order);
    for (size_t i = 1; i < plan->run_count; i++) {
        struct bl_run *last = &plan->runs[out];
        const struct bl_run *run = &plan->runs[i];
        if (last->src == run->src && last->src_extent == run->src_extent &&
            last->dst_extent == run->dst_extent &&
            last->src_offset + last->bytes == run->src_offset &&
            last->dst_offset + last->bytes == run->dst_offset) {
            last->bytes += run->bytes;
        } else {
            plan->runs[++out] = *run;
        }
    }
    plan->run_count = out + 1;
}

static int plan_fill(struct bl_plan *ret, const struct bl_extent_list *wanted,
                     const struct bl_spans *spans, struct bl_errmsg *msg)
{
    struct bl_plan plan = {.missing_elems = spans->missing_elems};
    size_t count = 0;
    for (size_t i = 0; i < spans->count; i++) {
        count += spans->at[i].rows;
    }
    if (count > PLAN_RUNS_MAX) {
        return bl_err(msg, BL_ELIMIT, "plan of %zu copies, at most %zu are made", count,
                      PLAN_RUNS_MAX);
    }
    plan.runs = malloc((count + 1) * sizeof(*plan.runs));
    if (plan.runs == NULL) {
        return bl_err_code(msg, -ENOMEM, "plan of %zu copies", count);
    }
    for (size_t i = 0; i < spans->count; i++) {
        runs_write(&plan, &spans->at[i]);
    }
    runs_merge(&plan);
    if (spans->missing_elems > 0) {
        memcpy(plan.missing_name, wanted->tensors[spans->missing_tensor].name, BL_TENSOR_NAME_MAX);
    }
    *ret = plan;
    return 0;
}

int bl_plan_make(struct bl_plan *ret, const struct bl_extent_list *wanted,
                 const struct bl_extent_list *const *sources, uint32_t source_count,
                 struct bl_errmsg *msg)
{
    struct bl_holdings *holdings = NULL;
    struct bl_spans spans = {0};
    int rc = bl_holdings_new(&holdings, sources, source_count, msg);
    if (rc == 0) {
        rc = bl_holdings_plan(holdings, wanted, 0, wanted->extent_count, &spans, msg);
    }
    if (rc == 0) {
        rc = plan_fill(ret, wanted, &spans, msg);
    }
    bl_spans_close(&spans);
    bl_holdings_free(holdings);
    return rc;
}

void bl_plan_close(struct bl_plan *plan)
{
    if (plan != NULL) {
        free(plan->runs);
        memset(plan, 0, sizeof(*plan));
    }
}
