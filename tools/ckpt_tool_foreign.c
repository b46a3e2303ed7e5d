/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/ckpt_tool_foreign.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#define SHOWN_MAX 100u

bool tool_pick(struct ckpt_store *store, const uint64_t *step, char dir[CKPT_DIR_MAX])
{
    const struct ckpt_entry *picked = NULL;
    struct bl_errmsg why = {0};
    struct ckpt_scan scan;

    if (ckpt_scan(store, &scan, &why) < 0) {
        ckpt_tool_fail("%s", why.text);
        return false;
    }
    if (step == NULL) {
        picked = ckpt_scan_newest(&scan, NULL, 0);
    }
    for (uint32_t i = 0; step != NULL && picked == NULL && i < scan.count; i++) {
        if (scan.entries[i].step == *step && scan.entries[i].state == CKPT_GOOD) {
            picked = &scan.entries[i];
        }
    }
    if (picked != NULL) {
        snprintf(dir, CKPT_DIR_MAX, "%s", picked->dir);
    } else if (step != NULL) {
        ckpt_tool_fail("%s: no good checkpoint of step %llu in it", ckpt_store_path(store),
                       (unsigned long long)*step);
    } else {
        ckpt_tool_fail("%s: no good checkpoint in it", ckpt_store_path(store));
    }
    ckpt_scan_close(&scan);
    return picked != NULL;
}

/* A file that does not call itself safetensors. */
static bool is_llama2c(const char *path)
{
    size_t bytes = strlen(path), end = strlen(".safetensors");
    struct stat st;

    return stat(path, &st) == 0 && S_ISREG(st.st_mode) &&
           !(bytes > end && strcmp(path + bytes - end, ".safetensors") == 0);
}

static int open_llama2c(struct tool_source *source, const char *path, struct bl_errmsg *msg)
{
    struct ckpt_model model;
    int rc = ckpt_llama2c_open(&source->view, &model, path, msg);

    if (rc == 0) {
        rc = ckpt_map_make(&source->maps, &model, CKPT_NAMES_LLAMA2C, msg);
    }
    return rc < 0 ? rc : ckpt_view_ours(&source->ours, source->view, &source->maps, msg);
}

bool tool_source_ours(struct tool_source *source, struct ckpt_view **ret)
{
    struct bl_errmsg why = {0};
    struct ckpt_model model;
    int rc = 0;

    if (source->store == NULL && source->ours == NULL) {
        rc = ckpt_foreign_model(&model, source->path, &why);
        if (rc == -ENOENT || rc == -ENOTDIR || (rc == 0 && model.arch == CKPT_ARCH_LLAMA)) {
            *ret = source->view;
            return true;
        }
        if (rc == 0) {
            rc = ckpt_map_make(&source->maps, &model, ckpt_foreign_naming(source->view, model.arch),
                               &why);
        }
        if (rc == 0) {
            struct tool_findings findings = {0};

            ckpt_map_compare(&source->maps, source->view, tool_findings_add, &findings);
            source->findings = findings.count;
            rc = ckpt_view_ours(&source->ours, source->view, &source->maps, &why);
        }
    }
    if (rc < 0) {
        ckpt_tool_fail("%s", why.text);
        return false;
    }
    *ret = source->ours != NULL ? source->ours : source->view;
    return true;
}

bool tool_source_open(struct tool_source *ret, const char *path, const uint64_t *step)
{
    struct bl_errmsg why = {0};
    int rc;

    memset(ret, 0, sizeof(*ret));
    snprintf(ret->path, sizeof(ret->path), "%s", path);
    if (ckpt_foreign_is(path)) {
        rc = is_llama2c(path) ? open_llama2c(ret, path, &why)
                              : ckpt_foreign_open(&ret->view, path, &why);
    } else {
        struct ckpt_place place = {.dir = ret->dir};

        ret->store = ckpt_tool_open(path, ret->dir);
        if (ret->store == NULL || (ret->dir[0] == '\0' && !tool_pick(ret->store, step, ret->dir))) {
            tool_source_close(ret);
            return false;
        }
        place.store = ret->store;
        rc = ckpt_view_checkpoint(&ret->view, &place, 1, NULL, &why);
    }
    if (rc < 0) {
        ckpt_tool_fail("%s", why.text);
        tool_source_close(ret);
        return false;
    }
    return true;
}

void tool_source_close(struct tool_source *source)
{
    ckpt_view_close(source->ours);
    ckpt_view_close(source->view);
    ckpt_map_close(&source->maps);
    ckpt_store_close(source->store);
    memset(source, 0, sizeof(*source));
}

/* Is `name` among the texts? Marks its bit. */
static bool waives(const struct ckpt_tool_texts *texts, const char *name, uint64_t *used)
{
    for (uint32_t i = 0; texts != NULL && i < texts->count; i++) {
        if (strcmp(texts->at[i], name) == 0) {
            *used |= 1ull << i;
            return true;
        }
    }
    return false;
}

void tool_findings_add(void *arg, const char *kind, const char *name, const char *text)
{
    struct tool_findings *findings = arg;

    if ((strcmp(kind, "missing") == 0 &&
         waives(findings->allow_missing, name, &findings->used[0])) ||
        (strcmp(kind, "extra") == 0 && waives(findings->allow_extra, name, &findings->used[1]))) {
        findings->waived++;
        return;
    }
    if (strcmp(kind, "shape") == 0 &&
        (strstr(name, "embed_tokens") != NULL || strstr(name, "wte.") != NULL ||
         strcmp(name, "lm_head.weight") == 0)) {
        findings->shape_vocab = true;
    }
    if (findings->count++ < SHOWN_MAX) {
        fprintf(stderr, "%s: %s %s\n", kind, name, text);
    } else if (findings->count == SHOWN_MAX + 1) {
        fprintf(stderr, "... and more\n");
    }
}

static const char *unused_of(const struct ckpt_tool_texts *texts, uint64_t used)
{
    for (uint32_t i = 0; texts != NULL && i < texts->count; i++) {
        if ((used >> i & 1) == 0) {
            return texts->at[i];
        }
    }
    return NULL;
}

const char *tool_findings_unused(const struct tool_findings *findings)
{
    const char *name = unused_of(findings->allow_missing, findings->used[0]);

    return name != NULL ? name : unused_of(findings->allow_extra, findings->used[1]);
}
