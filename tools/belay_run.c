/* SPDX-License-Identifier: Apache-2.0 */
/* belay run: checks a job, submits it, watches it. */
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "tools/belay.h"

static const char help[] =
    "Usage: belay run JOB.yaml [--detach] [--json] [--socket PATH]\n"
    "       belay run --recover ROOT [JOB.yaml] ...\n"
    "\n"
    "Starts the run that the job file describes, or resumes it where it was stopped,\n"
    "and watches it to its end. The number of ranks may be another than before. The\n"
    "job and its data are checked first; when something is wrong, nothing is started.\n"
    "A restart of the daemon is waited for. Ctrl-C ends the watching, not the run.\n"
    "\n"
    "  --detach        do not watch\n"
    "  --json          the last line on stdout is one JSON object: verdict, step,\n"
    "                  digest of the state, exit_code, run, name, checkpoint;\n"
    "                  everything else goes to stderr\n"
    "  --recover ROOT  begin from the newest good checkpoint in this directory; the\n"
    "                  job is the one that is written there, or JOB.yaml, which may\n"
    "                  differ from it in ranks, places and deadlines\n"
    "  --replace-binary\n"
    "                  resume although the trainer's executable is another one now\n"
    "  --socket PATH   of the daemon\n"
    "\n"
    "Examples:\n"
    "  belay run job.yaml\n"
    "  belay run job.yaml --detach && belay events --follow\n"
    "  belay run --recover /checkpoints/llama-1b\n"
    "\n"
    "Exit codes: 0 done, 2 usage or a wrong job, 3 could not (also: the last save\n"
    "failed), 4 stopped and can be resumed, 93 no progress (do not requeue),\n"
    "130 no longer watched; the run goes on.\n";

static json_t *submit_args(const struct tool_args *args, const struct tool_source *source,
                           struct bl_errmsg *msg)
{
    json_t *job = NULL;
    if (bl_json_parse(source->text, strlen(source->text), &job, msg) != 0) {
        return NULL;
    }
    json_t *asked = json_pack("{s:o,s:b,s:b}", "job", job, "replace_binary",
                              (args->given & TOOL_OPT_REPLACE_BINARY) != 0, "accept_numerics", 0);
    BL_ASSERT(asked != NULL);
    if (source->dir[0] != '\0') {
        json_t *recover = json_pack("{s:s,s:s}", "root", source->root, "dir", source->dir);
        int rc = json_object_set_new(asked, "recover", recover);
        BL_ASSERT(rc == 0);
    }
    return asked;
}

static void event_pass(const json_t *event, void *arg)
{
    (void)event;
    (void)arg;
}

/* Where the newest event is, so that only later ones are shown; the beginning when it is not known.
 */
static struct tool_events_at events_newest(struct tool_link *link, const char *path)
{
    struct bl_errmsg msg = {{0}};
    json_t *answer = NULL;
    struct tool_events_at newest = {.since = 0};
    if (tool_link_ask(link, path, WIRE_VERB_EVENTS, NULL, &answer, &msg) == 0) {
        BL_IGNORE(tool_events_read(answer, &newest, event_pass, NULL, &msg) != 0,
                  "then more events are shown than are new");
    }
    json_decref(answer);
    return newest;
}

/* Submits; 0 with the run's id, or an exit code. */
static int submit(const struct tool_args *args, const struct tool_source *source,
                  struct tool_link *link, char run[33], FILE *out)
{
    struct bl_errmsg msg = {{0}};
    json_t *answer = NULL, *asked = submit_args(args, source, &msg);
    int rc = BL_EFORMAT, resumed = 0;
    uint64_t step = 0;
    if (asked != NULL) {
        rc = tool_link_ask(link, args->socket, WIRE_VERB_SUBMIT, asked, &answer, &msg);
    }
    json_decref(asked);
    if (rc == 0) {
        rc = bl_json_copy_string(answer, "run", run, 33, &msg);
    }
    if (rc == 0) {
        rc = bl_json_bool(answer, "resumed", &resumed, &msg);
    }
    if (rc == 0) {
        rc = bl_json_u64(answer, "step", 0, INT64_MAX, &step, &msg);
    }
    json_decref(answer);
    if (rc == BL_ECONFIG) {
        tool_say(&tool_run, "%s", msg.text);
        return TOOL_USAGE;
    }
    if (rc != 0 && !link->is_open) {
        tool_say(&tool_run,
                 "the daemon went away while it took the job (%s): belay status says "
                 "whether it runs",
                 msg.text);
        return TOOL_COULD_NOT;
    }
    if (rc != 0) {
        return tool_refused(&tool_run, args->socket, rc, &msg);
    }
    if (resumed) {
        fprintf(out, "run %s of %s resumed at step %llu\n", run, source->job->name,
                (unsigned long long)step);
    } else {
        fprintf(out, "run %s of %s started\n", run, source->job->name);
    }
    fflush(out);
    return 0;
}

static int run_source(const struct tool_args *args, const struct tool_source *source, FILE *out)
{
    struct tool_link link;
    struct bl_errmsg msg = {{0}};
    char run[33];
    int rc = tool_link_open(&link, args->socket, &msg);
    if (rc != 0) {
        return tool_unreachable(&tool_run, args->socket, &msg);
    }
    struct tool_events_at at = events_newest(&link, args->socket);
    rc = submit(args, source, &link, run, out);
    if (rc == 0 && (args->given & TOOL_OPT_DETACH) == 0) {
        rc = tool_follow(&tool_run, args, &link, run, source->job->name, &at);
    } else if (rc == 0 && (args->given & TOOL_OPT_JSON) != 0) {
        printf("{\"schema\":1,\"run\":\"%s\",\"name\":\"%s\"}\n", run, source->job->name);
    }
    tool_link_close(&link);
    return rc;
}

static int run_run(const struct tool_args *args)
{
    struct tool_source source;
    FILE *out = (args->given & TOOL_OPT_JSON) ? stderr : stdout;
    if (args->given & TOOL_OPT_ACCEPT_NUMERICS) {
        tool_say(&tool_run, "--accept-numerics-change is not built into this version: resume where "
                            "libraries and processor are as before");
        return TOOL_COULD_NOT;
    }
    if (args->word_count == 0 && args->recover == NULL) {
        tool_say(&tool_run, "which job? belay run JOB.yaml (belay run --help)");
        return TOOL_USAGE;
    }
    int rc = tool_source_load(&source, &tool_run, args, out);
    if (rc == 0) {
        rc = run_source(args, &source, out);
    }
    tool_source_free(&source);
    return rc;
}

const struct tool_command tool_run = {
    .name = "run",
    .brief = "starts or resumes a run and watches it",
    .help = help,
    .options = TOOL_OPT_SOCKET | TOOL_OPT_JSON | TOOL_OPT_DETACH | TOOL_OPT_RECOVER |
               TOOL_OPT_REPLACE_BINARY | TOOL_OPT_ACCEPT_NUMERICS,
    .word_count = 1,
    .run = run_run,
};
