/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What `belay status --json` has, in Prometheus' text exposition format (version 0.0.4), for the
 * node exporter's textfile collector. One table says what becomes which series: rows of one name
 * stand together and are one family. What the daemon does not know (null) has no sample.
 *
 * https://prometheus.io/docs/instrumenting/exposition_formats/
 */
#include <string.h>

#include "tools/belay.h"

enum scope {          /* whose member it is: a sample for each, with these labels */
             OF_RUN,  /* job */
             OF_ROOT, /* job, root */
             OF_SAVE, /* job, root, step: under way */
             OF_NODE, /* job, node */
             OF_RANK  /* job, rank, node, incarnation */
};

struct metric {
    const char *name; /* without "belay_" */
    enum scope scope;
    const char *object; /* member that holds it, or NULL: the scope's own */
    const char *member;
    const char *label, *value; /* a further label, or NULL */
    const char *is;            /* 1 where the member is this text, 0 where it is another; or NULL */
    double scale;
    const char *type, *help;
};

/* A number. */
#define NUMBER(name, scope, object, member, type, help)                                            \
    {                                                                                              \
        name, scope, object, member, NULL, NULL, NULL, 1.0, type, help                             \
    }
/* Milliseconds as seconds. */
#define TIME(name, scope, object, member, help)                                                    \
    {                                                                                              \
        name, scope, object, member, NULL, NULL, NULL, 0.001, "gauge", help                        \
    }
#define STATE(name, scope, member, state, help)                                                    \
    {                                                                                              \
        name, scope, NULL, member, member, state, state, 1.0, "gauge", help                        \
    }
#define LABEL(name, scope, object, member, label, value, type, help)                               \
    {                                                                                              \
        name, scope, object, member, label, value, NULL, 1.0, type, help                           \
    }

#define VERDICT   "The run's verdict: 1 for the one that holds."
#define LAYOUT    "Ranks along an axis of the layout."
#define WANTED    "The same as the job wants it."
#define SAVES     "Saves to all roots since the daemon knows the run."
#define ROOT_SAVE "Saves to a root since the daemon knows the run."
#define SAVE_IS   "A save under way: 1 for its state."
#define NEWEST    "The newest complete checkpoint of a root: 1 for how far it has come."
#define NODE_IS   "1 for the state of a node."
#define RANK_IS   "1 for the state of a rank's process."

static const struct metric metrics[] = {
    STATE("verdict", OF_RUN, "verdict", "healthy", VERDICT),
    STATE("verdict", OF_RUN, "verdict", "recovering", VERDICT),
    STATE("verdict", OF_RUN, "verdict", "waiting", VERDICT),
    STATE("verdict", OF_RUN, "verdict", "held", VERDICT),
    STATE("verdict", OF_RUN, "verdict", "attention", VERDICT),
    STATE("verdict", OF_RUN, "verdict", "done", VERDICT),
    STATE("verdict", OF_RUN, "verdict", "stopped", VERDICT),
    STATE("verdict", OF_RUN, "verdict", "failed", VERDICT),
    STATE("verdict", OF_RUN, "verdict", "no_progress", VERDICT),
    STATE("verdict", OF_RUN, "verdict", "idle", VERDICT),
    NUMBER("exit_code", OF_RUN, NULL, "exit_code", "gauge", "What belay run leaves with."),
    NUMBER("generation", OF_RUN, NULL, "generation", "gauge", "The generation that runs."),
    NUMBER("ranks", OF_RUN, NULL, "world", "gauge", "Ranks that train."),
    NUMBER("ranks_wanted", OF_RUN, NULL, "ranks_wanted", "gauge", "Ranks that the job wants."),
    LABEL("layout", OF_RUN, "layout", "dp", "axis", "dp", "gauge", LAYOUT),
    LABEL("layout", OF_RUN, "layout", "tp", "axis", "tp", "gauge", LAYOUT),
    LABEL("layout", OF_RUN, "layout", "pp", "axis", "pp", "gauge", LAYOUT),
    LABEL("layout_wanted", OF_RUN, "layout", "dp_wanted", "axis", "dp", "gauge", WANTED),
    LABEL("layout_wanted", OF_RUN, "layout", "pp_wanted", "axis", "pp", "gauge", WANTED),
    NUMBER("step", OF_RUN, NULL, "step", "gauge", "The newest step; recoveries take it back."),
    NUMBER("steps", OF_RUN, NULL, "steps", "gauge", "Steps that the job wants."),
    NUMBER("loss", OF_RUN, NULL, "loss", "gauge", "Loss of the newest step."),
    NUMBER("learning_rate", OF_RUN, NULL, "lr", "gauge", "Learning rate of the newest step."),
    NUMBER("gradient_norm", OF_RUN, NULL, "grad_norm", "gauge", "Of the newest step."),
    NUMBER("tokens_per_second", OF_RUN, NULL, "tokens_per_s", "gauge", "Training speed."),
    LABEL("newest_step", OF_RUN, "newest_memory", "step", "where", "memory", "gauge",
          "Newest complete state in memory, and on disk."),
    LABEL("newest_step", OF_RUN, "newest_disk", "step", "where", "disk", "gauge", ""),
    {"newest_age_seconds", OF_RUN, "newest_memory", "age_ms", "where", "memory", NULL, 0.001,
     "gauge", "Its age."},
    {"newest_age_seconds", OF_RUN, "newest_disk", "age_ms", "where", "disk", NULL, 0.001, "gauge",
     ""},
    LABEL("saves_total", OF_RUN, "saves", "committed", "result", "committed", "counter", SAVES),
    LABEL("saves_total", OF_RUN, "saves", "failed", "result", "failed", "counter", SAVES),
    LABEL("saves_total", OF_RUN, "saves", "skipped", "result", "skipped", "counter", SAVES),
    STATE("save_state", OF_SAVE, "state", "staged", SAVE_IS),
    STATE("save_state", OF_SAVE, "state", "written", SAVE_IS),
    TIME("save_age_seconds", OF_SAVE, NULL, "age_ms", "Since the save under way began."),
    NUMBER("save_parts", OF_SAVE, NULL, "parts", "gauge", "Parts of the save under way."),
    NUMBER("save_parts_written", OF_SAVE, NULL, "written", "gauge", "Those that are durable."),
    STATE("root_state", OF_ROOT, "state", "good", "1 for the state of a root."),
    STATE("root_state", OF_ROOT, "state", "stuck", "1 for the state of a root."),
    NUMBER("root_interval_steps", OF_ROOT, NULL, "every", "gauge", "From one save to the next."),
    NUMBER("root_interval_auto", OF_ROOT, NULL, "auto", "gauge", "1: chosen by what is measured."),
    STATE("root_checkpoint", OF_ROOT, "checkpoint", "none", NEWEST),
    STATE("root_checkpoint", OF_ROOT, "checkpoint", "committed", NEWEST),
    STATE("root_checkpoint", OF_ROOT, "checkpoint", "replicated", NEWEST),
    STATE("root_checkpoint", OF_ROOT, "checkpoint", "verified", NEWEST),
    STATE("root_checkpoint", OF_ROOT, "checkpoint", "damaged", NEWEST),
    NUMBER("root_step", OF_ROOT, NULL, "step", "gauge", "Step of the newest checkpoint."),
    NUMBER("root_replicated", OF_ROOT, NULL, "replicated", "gauge",
           "1: the newest checkpoint is in another root too."),
    NUMBER("root_verified_step", OF_ROOT, NULL, "verified_step", "gauge",
           "Newest step that was read back, and was right."),
    NUMBER("root_damaged_step", OF_ROOT, NULL, "damaged_step", "gauge",
           "Newest step that was read back, and was damaged."),
    LABEL("root_saves_total", OF_ROOT, NULL, "committed", "result", "committed", "counter",
          ROOT_SAVE),
    LABEL("root_saves_total", OF_ROOT, NULL, "failed", "result", "failed", "counter", ROOT_SAVE),
    LABEL("root_saves_total", OF_ROOT, NULL, "skipped", "result", "skipped", "counter", ROOT_SAVE),
    TIME("root_last_save_seconds", OF_ROOT, "last", "duration_ms", "Duration of the last save."),
    NUMBER("root_last_save_bytes", OF_ROOT, "last", "bytes", "gauge", "Written by it."),
    NUMBER("root_last_save_raw_bytes", OF_ROOT, "last", "raw_bytes", "gauge", "Without codec."),
    NUMBER("root_last_save_ratio", OF_ROOT, "last", "ratio", "gauge", "Raw by written bytes."),
    NUMBER("root_last_save_step_inflation", OF_ROOT, "last", "step_inflation", "gauge",
           "How many times as long steps took meanwhile."),
    TIME("root_last_save_stall_seconds", OF_ROOT, "last", "stall_ms", "What it cost the steps."),
    STATE("node_state", OF_NODE, "state", "up", NODE_IS),
    STATE("node_state", OF_NODE, "state", "away", NODE_IS),
    STATE("node_state", OF_NODE, "state", "lost", NODE_IS),
    NUMBER("node_head", OF_NODE, NULL, "head", "gauge", "1: it leads."),
    NUMBER("node_processes", OF_NODE, NULL, "procs", "gauge", "Ranks' processes on a node."),
    NUMBER("rank_step", OF_RANK, NULL, "step", "gauge", "Step of a rank."),
    NUMBER("rank_pid", OF_RANK, NULL, "pid", "gauge", "Process of a rank."),
    NUMBER("last_recovery_steps_lost", OF_RUN, "last_recovery", "steps_lost", "gauge",
           "Steps that the last recovery took back."),
    NUMBER("store_replicated", OF_RUN, "store", "replicated", "gauge",
           "1: a standby has all of the store."),
};

/* ---- samples ---- */

/* Text in a label: backslash, quote and line feed are escaped, nothing else is. */
static void put_text(FILE *out, const char *text)
{
    for (; *text != '\0'; text++) {
        if (*text == '\n') {
            fputs("\\n", out);
        } else {
            if (*text == '\\' || *text == '"') {
                fputc('\\', out);
            }
            fputc(*text, out);
        }
    }
}

static void put_label(FILE *out, const char *before, const char *name, const char *value)
{
    fprintf(out, "%s%s=\"", before, name);
    put_text(out, value);
    fputc('"', out);
}

static void put_number_label(FILE *out, const char *name, const json_t *object, const char *key)
{
    uint64_t number = tool_member_number(object, key);
    char text[24] = "";

    if (number != TOOL_NUMBER_NONE) {
        snprintf(text, sizeof text, "%llu", (unsigned long long)number);
    }
    put_label(out, ",", name, text);
}

/* The labels that say whose sample it is; "{" stands before them. */
static void put_labels(FILE *out, enum scope scope, const json_t *status, const json_t *object)
{
    put_label(out, "{", "job", tool_member_text(status, "name"));
    switch (scope) {
    case OF_ROOT:
        put_label(out, ",", "root", tool_member_text(object, "path"));
        break;
    case OF_SAVE:
        put_label(out, ",", "root", tool_member_text(object, "root"));
        put_number_label(out, "step", object, "step");
        break;
    case OF_NODE:
        put_label(out, ",", "node", tool_member_text(object, "name"));
        break;
    case OF_RANK:
        put_number_label(out, "rank", object, "rank");
        put_label(out, ",", "node", tool_member_text(object, "node"));
        put_label(out, ",", "incarnation", tool_member_text(object, "incarnation"));
        break;
    case OF_RUN:
        break;
    }
}

static void put_value(FILE *out, double value)
{
    if (value >= -9e15 && value <= 9e15 && value == (double)(int64_t)value) {
        fprintf(out, " %lld\n", (long long)value);
    } else {
        fprintf(out, " %.17g\n", value); /* infinities and NaN are no JSON */
    }
}

/* The member as a number; false: it is null, missing, or of another type. */
static bool value_of(const struct metric *metric, const json_t *object, double *ret)
{
    const json_t *holder = metric->object ? json_object_get(object, metric->object) : object;
    const json_t *member = json_object_get(holder, metric->member);

    if (metric->is) {
        *ret = json_is_string(member) && strcmp(json_string_value(member), metric->is) == 0;
        return json_is_string(member);
    }
    if (json_is_boolean(member)) {
        *ret = json_is_true(member);
        return true;
    }
    *ret = json_number_value(member) * metric->scale;
    return json_is_number(member);
}

static void put_sample(FILE *out, const struct metric *metric, const json_t *status,
                       const json_t *object)
{
    double value;

    if (!value_of(metric, object, &value)) {
        return;
    }
    fprintf(out, "belay_%s", metric->name);
    put_labels(out, metric->scope, status, object);
    if (metric->label) {
        put_label(out, ",", metric->label, metric->value);
    }
    fputc('}', out);
    put_value(out, value);
}

static void put_row(FILE *out, const struct metric *metric, const json_t *status)
{
    const json_t *list = NULL;

    switch (metric->scope) {
    case OF_RUN:
        put_sample(out, metric, status, status);
        return;
    case OF_ROOT:
        list = json_object_get(status, "roots");
        break;
    case OF_SAVE:
        list = json_object_get(json_object_get(status, "saves"), "under_way");
        break;
    case OF_NODE:
        list = json_object_get(status, "nodes");
        break;
    case OF_RANK:
        list = json_object_get(status, "ranks");
        break;
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        put_sample(out, metric, status, json_array_get(list, i));
    }
}

/* ---- families ---- */

static void put_head(FILE *out, const char *name, const char *type, const char *help)
{
    fprintf(out, "# HELP belay_%s %s\n# TYPE belay_%s %s\n", name, help, name, type);
}

/* Those that no row says: texts as labels, and members whose names the daemon chooses. */
static void put_texts(FILE *out, const json_t *status)
{
    const json_t *recovery = json_object_get(status, "last_recovery");
    const json_t *ranks = json_object_get(status, "ranks"), *value;
    const char *key;
    bool any = false;

    put_head(out, "needs", "gauge", "Things that need a person.");
    fputs("belay_needs", out);
    put_labels(out, OF_RUN, status, status);
    fprintf(out, "} %zu\n", json_array_size(json_object_get(status, "needs")));
    put_head(out, "run_info", "gauge", "Always 1: texts of the run.");
    fputs("belay_run_info", out);
    put_labels(out, OF_RUN, status, status);
    put_label(out, ",", "run", tool_member_text(status, "run"));
    put_label(out, ",", "phase", tool_member_text(status, "phase"));
    put_label(out, ",", "standby", tool_member_text(json_object_get(status, "store"), "standby"));
    fputs("} 1\n", out);
    for (size_t i = 0; i < json_array_size(ranks); i++) {
        const json_t *rank = json_array_get(ranks, i);

        if (i == 0) {
            put_head(out, "rank_info", "gauge", "Always 1: what a rank does.");
        }
        fputs("belay_rank_info", out);
        put_labels(out, OF_RANK, status, rank);
        put_label(out, ",", "state", tool_member_text(rank, "state"));
        put_label(out, ",", "section", tool_member_text(rank, "section"));
        fputs("} 1\n", out);
    }
    json_object_foreach((json_t *)(uintptr_t)recovery, key, value)
    {
        size_t bytes = strlen(key);
        char phase[64];

        if (!json_is_integer(value) || bytes < 4 || bytes > sizeof phase ||
            strcmp(key + bytes - 3, "_ms") != 0 || strcmp(key, "cause_ms") == 0) {
            continue;
        }
        if (!any) {
            put_head(out, "last_recovery_seconds", "gauge", "Times of the last recovery.");
        }
        any = true;
        snprintf(phase, sizeof phase, "%.*s", (int)(bytes - 3), key);
        fputs("belay_last_recovery_seconds", out);
        put_labels(out, OF_RUN, status, status);
        put_label(out, ",", "phase", phase);
        fputc('}', out);
        put_value(out, (double)json_integer_value(value) / 1000.0);
    }
}

void tool_prometheus_print(FILE *out, const json_t *status, const char *job)
{
    const size_t count = sizeof metrics / sizeof *metrics;

    put_head(out, "daemon_up", "gauge", "1: the daemon answers; 0: nothing else is known.");
    fputs("belay_daemon_up", out);
    if (job != NULL) { /* one file for each job: the series must differ */
        put_label(out, "{", "job", job);
        fputc('}', out);
    }
    fprintf(out, " %d\n", status != NULL);
    for (size_t i = 0, end; status != NULL && i < count; i = end) {
        char *text = NULL;
        size_t bytes = 0;
        FILE *samples = open_memstream(&text, &bytes);

        for (end = i; end < count && strcmp(metrics[end].name, metrics[i].name) == 0; end++) {
            if (samples) {
                put_row(samples, &metrics[end], status);
            }
        }
        if (samples && fclose(samples) == 0 && bytes > 0) {
            put_head(out, metrics[i].name, metrics[i].type, metrics[i].help);
            fwrite(text, 1, bytes, out);
        }
        free(text);
    }
    if (status != NULL) {
        put_texts(out, status);
    }
}
