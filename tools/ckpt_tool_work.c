/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/ckpt_tool_work.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "tools/ckpt_tool_foreign.h"

atomic_int tool_cancel;

static void on_signal(int number)
{
    (void)number;
    atomic_store(&tool_cancel, 1);
}

void tool_cancel_on_signals(void)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};

    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGHUP, &action, NULL);
}

int tool_checkpoint_open(struct tool_checkpoint *source, const char *path, const char *step)
{
    uint64_t number = 0;

    if (step != NULL && !ckpt_tool_parse_count(step, &number)) {
        return ckpt_tool_usage(NULL, "--step", "a whole number is wanted");
    }
    source->store = ckpt_tool_open(path, source->dir);
    if (source->store == NULL) {
        return TOOL_COULD_NOT;
    }
    if (source->dir[0] != '\0') {
        return TOOL_GOOD;
    }
    return tool_pick(source->store, step == NULL ? NULL : &number, source->dir) ? TOOL_GOOD
                                                                                : TOOL_COULD_NOT;
}

int tool_checkpoint_open_like(struct tool_checkpoint *source, const char *path, const char *dir)
{
    source->store = ckpt_tool_open(path, source->dir);
    if (source->store == NULL) {
        return TOOL_COULD_NOT;
    }
    if (source->dir[0] == '\0') {
        snprintf(source->dir, sizeof(source->dir), "%s", dir);
    }
    return TOOL_GOOD;
}

int tool_checkpoint_manifest(struct tool_checkpoint *source)
{
    struct bl_errmsg why = {0};

    return ckpt_manifest_load(source->store, source->dir, &source->manifest, &why) < 0
               ? ckpt_tool_fail("%s", why.text)
               : TOOL_GOOD;
}

void tool_checkpoint_close(struct tool_checkpoint *source)
{
    ckpt_manifest_close(&source->manifest);
    ckpt_store_close(source->store);
    source->store = NULL;
}

int tool_reopen_writing(struct ckpt_store **store)
{
    const struct ckpt_store_config config = {.path = ckpt_store_path(*store),
                                             .run = ckpt_store_run(*store),
                                             .node = "ckpt-tool",
                                             .shared = false};
    struct ckpt_store *writing = NULL;
    struct bl_errmsg why = {0};

    if (ckpt_store_damage(*store)[0] != '\0') {
        return ckpt_tool_fail("%s; repair it first", ckpt_store_damage(*store));
    }
    if (ckpt_store_open(&writing, &config, &why) < 0) {
        return ckpt_tool_fail("%s", why.text);
    }
    ckpt_store_close(*store);
    *store = writing;
    return TOOL_GOOD;
}

int tool_open_root(struct ckpt_store **ret, const char *path, bool writing)
{
    char dir[CKPT_DIR_MAX];
    struct ckpt_store *store = ckpt_tool_open(path, dir);
    int code = TOOL_GOOD;

    if (store == NULL) {
        return TOOL_COULD_NOT;
    }
    if (dir[0] != '\0') {
        code = ckpt_tool_fail("%s: a root is wanted, not one checkpoint", path);
    } else if (writing) {
        code = tool_reopen_writing(&store);
    }
    if (code != TOOL_GOOD) {
        ckpt_store_close(store);
        return code;
    }
    *ret = store;
    return TOOL_GOOD;
}

bool tool_is_there(const struct ckpt_store *store, const char *dir)
{
    char path[4200];
    struct stat st;

    snprintf(path, sizeof(path), "%s/%s", ckpt_store_path(store), dir);
    return stat(path, &st) == 0 || errno != ENOENT;
}

static void on_finding(void *arg, const char *file, const char *text)
{
    struct tool_verify *verify = arg;

    if (!tool_is_there(verify->store, verify->dir)) {
        verify->gone = true; /* its files go under our eyes: nothing more to learn */
        atomic_store(&verify->stop, 1);
    } else if (json_array_size(verify->findings) < TOOL_FINDINGS_MAX) {
        json_array_append_new(verify->findings, json_pack("{ss ss}", "file", file, "text", text));
    }
}

static void on_progress(void *arg, uint64_t bytes_done, uint64_t bytes_all)
{
    struct tool_verify *verify = arg;

    if (atomic_load(&tool_cancel) != 0) {
        atomic_store(&verify->stop, 1);
    }
    if (verify->progress != NULL) {
        verify->progress->all = bytes_all;
        bl_progress_show(verify->progress, bytes_done);
    }
}

int tool_verify_run(struct tool_verify *verify)
{
    const struct ckpt_verify_job job = {.full = verify->full,
                                        .finding = on_finding,
                                        .progress = on_progress,
                                        .arg = verify,
                                        .cancel = &verify->stop};
    struct bl_errmsg why = {0};
    int rc;

    verify->findings = json_array();
    rc = ckpt_verify(verify->store, verify->dir, &job, &verify->result, &why);
    if ((rc < 0 || verify->result.findings > 0) && !tool_is_there(verify->store, verify->dir)) {
        verify->gone = true;
    }
    if (verify->progress != NULL) {
        bl_progress_clear(verify->progress);
    }
    if (verify->gone) {
        json_array_clear(verify->findings);
        verify->result.findings = 0;
        return TOOL_GOOD;
    }
    if (rc < 0) {
        return atomic_load(&tool_cancel) != 0 ? ckpt_tool_fail("interrupted")
                                              : ckpt_tool_fail("%s", why.text);
    }
    return verify->result.findings == 0 ? TOOL_GOOD : TOOL_FINDING;
}

json_t *tool_layout_json(const struct ckpt_layout *layout)
{
    return json_pack("{si si si si si}", "world", (int)layout->world, "dp", (int)layout->dp, "tp",
                     (int)layout->tp, "pp", (int)layout->pp, "zero", (int)layout->zero);
}
