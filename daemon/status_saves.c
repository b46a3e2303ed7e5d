/* SPDX-License-Identifier: Apache-2.0 */
/* What status says of saves and roots. */
#include <string.h>

#include "daemon/status.h"

static json_t *step_json(uint64_t step)
{
    return step == UINT64_MAX ? json_null() : json_integer((json_int_t)step);
}

/* How far the newest checkpoint of a root has come. */
static const char *checkpoint_state(const struct core_status_root *root)
{
    if (root->committed_step == UINT64_MAX) {
        return "none";
    }
    if (root->verify_failed_step == root->committed_step) {
        return "damaged";
    }
    if (root->verified_step == root->committed_step) {
        return "verified";
    }
    return root->replicated ? "replicated" : "committed";
}

json_t *status_saves(const struct core_status *status)
{
    static const char *const states[] = {"staged", "written"};
    json_t *under_way = json_array();

    for (uint32_t i = 0; i < status->save_count; i++) {
        const struct core_status_save *save = &status->saves[i];

        json_array_append_new(
            under_way, json_pack("{ss sI ss sI si si}", "root", status->roots[save->root].path,
                                 "step", (json_int_t)save->step, "state", states[save->state],
                                 "age_ms", (json_int_t)save->age_ms, "parts", (int)save->nodes,
                                 "written", (int)save->written));
    }
    return json_pack("{sI sI sI so so}", "committed", (json_int_t)status->saves_committed, "failed",
                     (json_int_t)status->saves_failed, "skipped", (json_int_t)status->saves_skipped,
                     "writing", status->save_count ? step_json(status->saves[0].step) : json_null(),
                     "under_way", under_way);
}

static json_t *measured_json(const struct core_status_root *root)
{
    double ratio = root->last_bytes ? (double)root->last_raw_bytes / (double)root->last_bytes : 0.0;

    return json_pack("{sI sI sI so so sI}", "duration_ms", (json_int_t)root->last_ms, "bytes",
                     (json_int_t)root->last_bytes, "raw_bytes", (json_int_t)root->last_raw_bytes,
                     "ratio", root->last_bytes ? json_real(ratio) : json_null(), "step_inflation",
                     root->inflation ? json_real(root->inflation / 1000.0) : json_null(),
                     "stall_ms", (json_int_t)root->stall_ms);
}

json_t *status_roots(const struct core_status *status)
{
    json_t *array = json_array();

    for (uint32_t i = 0; i < status->root_count; i++) {
        const struct core_status_root *root = &status->roots[i];

        json_array_append_new(
            array,
            json_pack("{ss ss sI sb so ss ss sb so so sI sI sI so}", "path", root->path, "state",
                      root->stuck ? "stuck" : "good", "every", (json_int_t)root->every, "auto",
                      (int)root->is_auto, "step", step_json(root->committed_step), "dir", root->dir,
                      "checkpoint", checkpoint_state(root), "replicated", (int)root->replicated,
                      "verified_step", step_json(root->verified_step), "damaged_step",
                      step_json(root->verify_failed_step), "committed", (json_int_t)root->committed,
                      "failed", (json_int_t)root->failed, "skipped", (json_int_t)root->skipped,
                      "last", measured_json(root)));
    }
    return array;
}

const char *status_disk_root(const struct core_status *status)
{
    for (uint32_t i = 0; i < status->root_count; i++) {
        if (status->roots[i].committed_step == status->disk_step &&
            strcmp(status->roots[i].dir, status->disk_dir) == 0) {
            return status->roots[i].path;
        }
    }
    return status->root_count ? status->roots[0].path : "";
}

void status_roots_need(const struct core_status *status, json_t *needs)
{
    char text[WIRE_ROOT_MAX + 100];

    for (uint32_t i = 0; i < status->root_count; i++) {
        const struct core_status_root *root = &status->roots[i];

        if (root->stuck) {
            snprintf(text, sizeof(text), "root stuck: %s does not answer; see to its disk or mount",
                     root->path);
            json_array_append_new(needs, json_string(text));
        } else if (root->committed_step != UINT64_MAX &&
                   root->verify_failed_step == root->committed_step) {
            snprintf(text, sizeof(text), "the newest checkpoint in %s is damaged: ckpt-tool verify",
                     root->path);
            json_array_append_new(needs, json_string(text));
        } else if (root->failing > 1 || (root->failing > 0 && root->committed == 0)) {
            snprintf(text, sizeof(text), "saves to %s fail: belay events says why", root->path);
            json_array_append_new(needs, json_string(text));
        }
    }
}
