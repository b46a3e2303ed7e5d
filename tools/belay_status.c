/* SPDX-License-Identifier: Apache-2.0 */
/* belay status: how the run stands, the most important first. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/human.h"
#include "base/json.h"
#include "tools/belay.h"

static const char help[] =
    "Usage: belay status [--job NAME] [--socket PATH] [--json | --prometheus]\n"
    "\n"
    "How the run stands. First line: verdict, step, newest step in memory and on disk\n"
    "with its age, nodes; then what needs a person, ranks with node and process,\n"
    "saves, the last recovery.\n"
    "\n"
    "  --job NAME      of several jobs (default: the daemon's only or newest one)\n"
    "  --socket PATH   of the daemon\n"
    "  --json          what the daemon says, one JSON object with \"schema\"\n"
    "  --prometheus    the same as metrics, in Prometheus' text format, for the node\n"
    "                  exporter's textfile collector; exits with 0 if there are any\n"
    "\n"
    "Examples:\n"
    "  belay status\n"
    "  watch -n 1 belay status\n"
    "  belay status --json | jq .step\n"
    "  belay status --prometheus >belay.tmp; mv belay.tmp belay.prom\n"
    "\n"
    "Exit codes: 0 healthy (also: ended well, or no job), 1 needs attention,\n"
    "2 usage, 3 the daemon cannot be reached.\n";

static void print_number(const char *before, uint64_t value)
{
    if (value == TOOL_NUMBER_NONE) {
        printf("%s?", before);
    } else {
        printf("%s%llu", before, (unsigned long long)value);
    }
}

static void print_point(const char *where, const struct tool_point *point)
{
    char age[32];
    if (point->step == TOOL_NUMBER_NONE) {
        printf(", %s none", where);
        return;
    }
    printf(", %s %llu", where, (unsigned long long)point->step);
    if (point->age_ms != TOOL_NUMBER_NONE) {
        tool_format_ms(point->age_ms, age, sizeof age);
        printf(" (%s ago)", age);
    }
}

static void print_first_line(const struct tool_state *state)
{
    size_t up = 0, count = json_array_size(state->nodes);
    for (size_t i = 0; i < count; i++) {
        up += strcmp(tool_member_text(json_array_get(state->nodes, i), "state"), "up") == 0;
    }
    printf("%s", state->verdict);
    if (state->name[0] != '\0') {
        print_number(": step ", state->step);
        print_number("/", state->steps);
        print_point("memory", &state->memory);
        print_point("disk", &state->disk);
    }
    printf(", %zu of %zu nodes up", up, count);
    size_t needs = json_array_size(state->needs);
    if (needs > 0) {
        printf(", needs you: %s", json_string_value(json_array_get(state->needs, 0)));
        if (needs > 1) {
            printf(" (and %zu more)", needs - 1);
        }
    }
    putchar('\n');
}

static void print_run(const struct tool_state *state)
{
    char rate[24];
    printf("run      %s, job %s", state->run, state->name);
    if (state->phase[0] != '\0') {
        printf(", %s", state->phase);
    }
    print_number(", generation ", state->generation);
    print_number(", ranks ", state->world);
    print_number(" of ", state->ranks_wanted);
    putchar('\n');
    if (state->dp != TOOL_NUMBER_NONE && (state->tp > 1 || state->pp_wanted > 1)) {
        print_number("layout   dp ", state->dp);
        print_number(" x tp ", state->tp);
        print_number(" x pp ", state->pp);
        if (state->dp != state->dp_wanted || state->pp != state->pp_wanted) {
            print_number(", wanted dp ", state->dp_wanted);
            print_number(" x pp ", state->pp_wanted);
        }
        putchar('\n');
    }
    if (!isnan(state->loss)) {
        tool_format_rate(state->tokens_per_s, rate, sizeof rate);
        printf("training loss %.4f, %s tokens/s\n", state->loss, rate);
    }
    print_number("saves    committed ", state->saves_committed);
    print_number(", failed ", state->saves_failed);
    print_number(", skipped ", state->saves_skipped);
    if (state->save_writing != TOOL_NUMBER_NONE) {
        print_number(", writing step ", state->save_writing);
    }
    putchar('\n');
    if (state->disk.dir[0] != '\0') {
        printf("newest   %s%s%s\n", state->disk.root, state->disk.root[0] != '\0' ? "/" : "",
               state->disk.dir);
    }
    if (state->digest[0] != '\0') {
        printf("digest   %s\n", state->digest);
    }
}

/* What the newest save cost. */
static void print_cost(const json_t *last)
{
    char took[32], size[BL_HUMAN_MAX];
    uint64_t bytes = tool_member_number(last, "bytes");
    uint64_t ms = tool_member_number(last, "duration_ms");
    const json_t *ratio = json_object_get(last, "ratio");
    const json_t *inflation = json_object_get(last, "step_inflation");
    if (ms == TOOL_NUMBER_NONE || ms == 0) {
        return;
    }
    tool_format_ms(ms, took, sizeof took);
    printf("         last save took %s", took);
    if (bytes != TOOL_NUMBER_NONE && bytes > 0) {
        bl_human_bytes(size, bytes);
        printf(", %s", size);
    }
    if (json_is_number(ratio)) {
        printf(", ratio %.2f", json_number_value(ratio));
    }
    if (json_is_number(inflation)) {
        printf(", steps %.2f times as long meanwhile", json_number_value(inflation));
        print_number(", stall ms ", tool_member_number(last, "stall_ms"));
    }
    putchar('\n');
}

static void print_root(const json_t *root)
{
    uint64_t every = tool_member_number(root, "every");
    const char *checkpoint = tool_member_text(root, "checkpoint");
    printf("root     %s", tool_member_text(root, "path"));
    if (strcmp(tool_member_text(root, "state"), "stuck") == 0) {
        printf(", stuck");
    }
    if (every == 0) {
        printf(", on request and at the end");
    } else {
        print_number(", every ", every);
        printf(" steps%s", json_is_true(json_object_get(root, "auto")) ? " (auto)" : "");
    }
    printf(", %s", checkpoint);
    if (strcmp(checkpoint, "none") != 0) {
        print_number(" step ", tool_member_number(root, "step"));
    }
    print_number(" (committed ", tool_member_number(root, "committed"));
    print_number(", failed ", tool_member_number(root, "failed"));
    print_number(", skipped ", tool_member_number(root, "skipped"));
    puts(")");
    print_cost(json_object_get(root, "last"));
}

static void print_roots(const struct tool_state *state)
{
    char age[32];
    for (size_t i = 0; i < json_array_size(state->roots); i++) {
        print_root(json_array_get(state->roots, i));
    }
    for (size_t i = 0; i < json_array_size(state->under_way); i++) {
        const json_t *save = json_array_get(state->under_way, i);
        print_number("save     step ", tool_member_number(save, "step"));
        tool_format_ms(tool_member_number(save, "age_ms"), age, sizeof age);
        printf(" to %s, %s", tool_member_text(save, "root"), tool_member_text(save, "state"));
        print_number(", ", tool_member_number(save, "written"));
        print_number(" of ", tool_member_number(save, "parts"));
        printf(" parts, since %s\n", age);
    }
}

static void print_nodes(const struct tool_state *state)
{
    for (size_t i = 0; i < json_array_size(state->nodes); i++) {
        const json_t *node = json_array_get(state->nodes, i);
        printf("node     %-16s %-5s", tool_member_text(node, "name"),
               tool_member_text(node, "state"));
        print_number(" processes ", tool_member_number(node, "procs"));
        puts(json_is_true(json_object_get(node, "head")) ? ", head" : "");
    }
}

static void print_ranks(const struct tool_state *state)
{
    for (size_t i = 0; i < json_array_size(state->ranks); i++) {
        const json_t *rank = json_array_get(state->ranks, i);
        uint64_t number = tool_member_number(rank, "rank");
        char name[24] = "-";
        if (number != TOOL_NUMBER_NONE) {
            snprintf(name, sizeof name, "%llu", (unsigned long long)number);
        }
        printf("rank %-4s%-16s", name, tool_member_text(rank, "node"));
        print_number(" pid ", tool_member_number(rank, "pid"));
        printf(" %s", tool_member_text(rank, "state"));
        print_number(", step ", tool_member_number(rank, "step"));
        const char *section = tool_member_text(rank, "section");
        printf("%s%s\n", *section != '\0' ? ", " : "", section);
    }
}

/* Its cause, and all its members that are times, in the daemon's order. */
static void print_recovery(const json_t *recovery)
{
    const char *key;
    json_t *value;
    if (recovery == NULL) {
        return;
    }
    const char *cause = tool_member_text(recovery, "cause");
    printf("recovery %s", *cause != '\0' ? cause : "of the last fault");
    uint64_t lost = tool_member_number(recovery, "steps_lost");
    if (lost != TOOL_NUMBER_NONE) {
        printf(", steps lost %llu", (unsigned long long)lost);
    }
    json_object_foreach((json_t *)(uintptr_t)recovery, key, value)
    {
        size_t length = strlen(key);
        if (!json_is_integer(value) || length < 4 || strcmp(key + length - 3, "_ms") != 0 ||
            strcmp(key, "cause_ms") == 0) {
            continue;
        }
        printf(", %.*s %lld ms", (int)(length - 3), key, (long long)json_integer_value(value));
    }
    putchar('\n');
}

static void print_rest(const struct tool_state *state)
{
    char line[TOOL_TEXT_MAX];
    for (size_t i = 0; i < json_array_size(state->needs); i++) {
        printf("needs    %s\n", json_string_value(json_array_get(state->needs, i)));
    }
    if (state->name[0] != '\0') {
        print_run(state);
    }
    print_roots(state);
    print_nodes(state);
    print_ranks(state);
    print_recovery(state->last_recovery);
    if (state->last_event != NULL) {
        tool_format_event(state->last_event, line, sizeof line);
        printf("event    %s\n", line);
    }
    if (state->store != NULL) {
        const char *standby = tool_member_text(state->store, "standby");
        if (*standby == '\0') {
            puts("store    no standby: a lost head needs its disk back");
        } else {
            printf("store    standby %s, %s\n", standby,
                   json_is_true(json_object_get(state->store, "replicated")) ? "up to date"
                                                                             : "behind");
        }
    }
}

static int status_run(const struct tool_args *args)
{
    struct bl_errmsg msg = {{0}};
    struct tool_link link = {.is_open = false};
    struct tool_state state;
    bool metrics = (args->given & TOOL_OPT_PROMETHEUS) != 0;
    if (metrics && (args->given & TOOL_OPT_JSON) != 0) {
        tool_say(&tool_status, "--json and --prometheus: one of them");
        return TOOL_USAGE;
    }
    int rc = tool_link_open(&link, args->socket, &msg);
    if (rc != 0) {
        if (metrics) {
            tool_prometheus_print(stdout, NULL, args->job);
        }
        return tool_unreachable(&tool_status, args->socket, &msg);
    }
    rc = tool_state_ask(&state, &link, args->socket, args->job, &msg);
    tool_link_close(&link);
    if (rc != 0) {
        return tool_refused(&tool_status, args->socket, rc, &msg);
    }
    if (metrics) {
        tool_prometheus_print(stdout, state.json, args->job);
        tool_state_close(&state);
        return TOOL_DONE;
    }
    if (args->given & TOOL_OPT_JSON) {
        char *text = json_dumps(state.json, JSON_COMPACT | JSON_PRESERVE_ORDER);
        puts(text != NULL ? text : "{}");
        free(text);
    } else {
        print_first_line(&state);
        print_rest(&state);
    }
    rc = tool_state_needs_attention(&state) ? TOOL_FINDING : TOOL_DONE;
    tool_state_close(&state);
    return rc;
}

const struct tool_command tool_status = {
    .name = "status",
    .brief = "how the run stands, and what needs a person",
    .help = help,
    .options = TOOL_OPT_SOCKET | TOOL_OPT_JSON | TOOL_OPT_PROMETHEUS | TOOL_OPT_JOB,
    .run = status_run,
};
