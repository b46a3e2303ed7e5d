/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt-tool verify: reads every byte of one checkpoint, or of all in a root. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/json.h"
#include "tools/ckpt_tool.h"

struct verify {
    struct ckpt_store *store;
    const char *dir;
    bool json, fast, terminal;
    json_t *list;     /* of checkpoints */
    json_t *findings; /* of the one that is looked at */
    double started, shown;
    uint64_t findings_all;
};

static double now_s(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

static void on_finding(void *arg, const char *file, const char *text)
{
    struct verify *verify = arg;

    if (verify->json) {
        json_array_append_new(verify->findings, json_pack("{ss ss}", "file", file, "text", text));
    } else {
        printf("%s%s\n", verify->terminal ? "\r\033[K" : "", text);
    }
}

/* On a terminal, ten times a second: how far, how fast, how long yet. */
static void on_progress(void *arg, uint64_t done, uint64_t all)
{
    struct verify *verify = arg;
    char size[TOOL_TEXT_MAX], total[TOOL_TEXT_MAX], rate[TOOL_TEXT_MAX], left[TOOL_TEXT_MAX];
    double now = now_s(), elapsed = now - verify->started;

    if (!verify->terminal || (now - verify->shown < 0.1 && done < all) || elapsed <= 0) {
        return;
    }
    verify->shown = now;
    fprintf(stderr, "\r\033[K%s: %3.0f %%, %s of %s, %s/s, %s left", verify->dir,
            all == 0 ? 100 : 100 * (double)done / (double)all, ckpt_tool_size(size, done),
            ckpt_tool_size(total, all), ckpt_tool_size(rate, (uint64_t)((double)done / elapsed)),
            ckpt_tool_seconds(left, done == 0 ? 0 : (double)(all - done) * elapsed / (double)done));
    fflush(stderr);
}

/* An exit code. */
static int verify_one(struct verify *verify, const char *dir)
{
    const struct ckpt_verify_job job = {
        .full = !verify->fast, .finding = on_finding, .progress = on_progress, .arg = verify};
    struct ckpt_verify_result result = {0};
    struct bl_errmsg why = {0};
    char size[TOOL_TEXT_MAX], took[TOOL_TEXT_MAX];
    int rc;

    verify->dir = dir;
    verify->started = now_s();
    verify->findings = json_array();
    rc = ckpt_verify(verify->store, dir, &job, &result, &why);
    if (verify->terminal) {
        fputs("\r\033[K", stderr);
    }
    if (rc < 0) {
        json_decref(verify->findings);
        return ckpt_tool_fail("%s", why.text);
    }
    verify->findings_all += result.findings;
    if (verify->json) {
        json_array_append_new(
            verify->list, json_pack("{ss sb sI si so}", "dir", dir, "good", result.findings == 0,
                                    "bytes_read", (json_int_t)result.bytes_read, "parts",
                                    (int)result.parts, "findings", verify->findings));
        return result.findings == 0 ? TOOL_GOOD : TOOL_FINDING;
    }
    json_decref(verify->findings);
    printf("%s: ", dir);
    if (result.findings == 0) {
        printf("good (%u part%s, %s read in %s%s)\n", result.parts, result.parts == 1 ? "" : "s",
               ckpt_tool_size(size, result.bytes_read),
               ckpt_tool_seconds(took, now_s() - verify->started),
               verify->fast ? ", parts' bytes not looked at" : "");
    } else {
        printf("%llu finding%s\n", (unsigned long long)result.findings,
               result.findings == 1 ? "" : "s");
    }
    return result.findings == 0 ? TOOL_GOOD : TOOL_FINDING;
}

static int verify_all(struct verify *verify)
{
    struct bl_errmsg why = {0};
    struct ckpt_scan scan;
    int code = TOOL_GOOD, one;

    if (ckpt_scan(verify->store, &scan, &why) < 0) {
        return ckpt_tool_fail("%s", why.text);
    }
    for (uint32_t i = scan.count; i-- > 0;) {
        if (scan.entries[i].state == CKPT_LEFTOVER) {
            continue; /* being written, or of a save that never ended: no checkpoint */
        }
        one = verify_one(verify, scan.entries[i].dir);
        code = one > code ? one : code;
    }
    ckpt_scan_close(&scan);
    return code;
}

struct verify_options {
    bool fast;
};

static int run(const struct ckpt_tool_call *call)
{
    const struct verify_options *options = call->options;
    char dir[CKPT_DIR_MAX];
    struct verify verify = {
        .json = call->json,
        .fast = options->fast,
        .terminal = !call->json && isatty(STDERR_FILENO),
    };
    int code;

    verify.store = ckpt_tool_open(call->paths[0], dir);
    if (verify.store == NULL) {
        return TOOL_COULD_NOT;
    }
    verify.list = json_array();
    code = dir[0] != '\0' ? verify_one(&verify, dir) : verify_all(&verify);
    if (ckpt_store_damage(verify.store)[0] != '\0') {
        verify.findings_all++;
        code = code == TOOL_GOOD ? TOOL_FINDING : code;
        if (!call->json) {
            printf("%s\n", ckpt_store_damage(verify.store));
        }
    }
    if (call->json && code != TOOL_COULD_NOT) {
        code = ckpt_tool_print_json(
            json_pack("{si ss sb ss sO}", "schema", 1, "root", ckpt_store_path(verify.store),
                      "good", verify.findings_all == 0, "root_damage",
                      ckpt_store_damage(verify.store), "checkpoints", verify.list),
            code);
    }
    json_decref(verify.list);
    ckpt_store_close(verify.store);
    return code;
}

static const struct ckpt_tool_option table[] = {
    {"--fast", NULL, TOOL_FLAG, offsetof(struct verify_options, fast),
     "manifests, sizes and indexes; not the parts' bytes"},
};

const struct ckpt_tool_verb ckpt_tool_verb_verify = {
    .name = "verify",
    .paths = "PATH",
    .paths_min = 1,
    .paths_max = 1,
    .summary = "reads and compares every byte; of a root, of all in it",
    .text = "Verifies checkpoints.",
    .examples = "  ckpt-tool verify /scratch/run7/step-000000001200.g7\n",
    .options = table,
    .option_count = sizeof(table) / sizeof(table[0]),
    .options_bytes = sizeof(struct verify_options),
    .has_progress = true,
    .run = run,
};
