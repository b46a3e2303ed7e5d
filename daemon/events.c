/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/events.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"

#define EVENT_ROW(name, number, severity, fields, what, does, person)                              \
    {number, #name, severity, fields, what, does, person},
static const struct event_row rows[] = {DAEMON_EVENTS(EVENT_ROW)};
#define EVENTS_LOAD_BYTES (512u * 1024) /* of the file, at the start */
#define ROW_COUNT         (sizeof(rows) / sizeof(rows[0]))

struct events {
    char path[1024], node[64];
    int fd;
    uint64_t bytes, newest;
    char *ring[EVENTS_RING];
    char text[4][512]; /* newest of each severity, for people */
    uint64_t text_seq[4];
    void (*listen)(void *arg);
    void *listen_arg;
};

struct line { /* a JSON line under construction; cut, never overrun */
    char bytes[EVENTS_LINE_BYTES];
    size_t count;
};

const char *event_severity_name(enum core_severity severity)
{
    static const char *const names[] = {"info", "notice", "warning", "alarm"};

    return names[severity];
}

int event_row_at(uint32_t index, struct event_row *ret)
{
    uint32_t count;
    const struct core_event_info *core = core_event_table(&count);

    if (index < count) {
        *ret = (struct event_row){
            (uint32_t)core[index].code, core[index].name, core[index].severity, "",
            core[index].what,           core[index].does, core[index].person};
        return 0;
    }
    if (index - count < ROW_COUNT) {
        *ret = rows[index - count];
        return 0;
    }
    return -ENOENT;
}

static const struct event_row *row_find(enum event_code code)
{
    for (size_t i = 0; i < ROW_COUNT; i++) {
        if (rows[i].code == (uint32_t)code) {
            return &rows[i];
        }
    }
    return NULL;
}

static void line_add(struct line *line, const char *fmt, ...) BL_PRINTF(2, 3);
static void line_add(struct line *line, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    int n = vsnprintf(line->bytes + line->count, sizeof(line->bytes) - line->count, fmt, ap);
    va_end(ap);
    if (n > 0 && line->count + (size_t)n < sizeof(line->bytes)) {
        line->count += (size_t)n;
    }
}

static int is_number(const char *text, size_t bytes)
{
    size_t i = text[0] == '-' && bytes > 1;

    if (bytes - i > 18 || bytes == i || (text[i] == '0' && bytes - i > 1 && text[i + 1] != '.')) {
        return 0; /* incarnations in hex and the like stay texts */
    }
    int dots = 0;

    for (; i < bytes; i++) {
        dots += text[i] == '.';
        if (!isdigit((unsigned char)text[i]) && text[i] != '.') {
            return 0;
        }
    }
    return dots <= 1 && isdigit((unsigned char)text[bytes - 1]);
}

static void line_add_text(struct line *line, const char *text, size_t bytes)
{
    line_add(line, "\"");
    for (size_t i = 0; i < bytes && line->count + 64 < sizeof(line->bytes); i++) {
        unsigned char c = (unsigned char)text[i];

        if (c == '"' || c == '\\') {
            line_add(line, "\\%c", c);
        } else if (c < 0x20 || c >= 0x7f) {
            line_add(line, "\\u%04x", c < 0x20 ? c : '?');
        } else {
            line_add(line, "%c", c);
        }
    }
    line_add(line, "\"");
}

/* Does `at` begin with " name=" (or "name=" at the start) of one of the row's fields? Returns the
 * length of the name, 0 if not. */
static size_t field_at(const struct event_row *row, const char *at)
{
    const char *field = row->fields;

    while (*field) {
        size_t n = strcspn(field, " ");

        if (strncmp(at, field, n) == 0 && at[n] == '=') {
            return n;
        }
        field += n + (field[n] == ' ');
    }
    return 0;
}

static void line_add_fields(struct line *line, const struct event_row *row, const char *text)
{
    const char *at = text, *separator = "";
    size_t name;

    line_add(line, "\"fields\":{");
    while ((name = field_at(row, at)) > 0) {
        const char *value = at + name + 1, *end = value;

        while (*end && !(*end == ' ' && field_at(row, end + 1) > 0)) {
            end++;
        }
        line_add(line, "%s\"%.*s\":", separator, (int)name, at);
        if (is_number(value, (size_t)(end - value))) {
            line_add(line, "%.*s", (int)(end - value), value);
        } else {
            line_add_text(line, value, (size_t)(end - value));
        }
        separator = ",";
        at = *end ? end + 1 : end;
    }
    line_add(line, "}}");
}

static void events_append(struct events *events, const char *line)
{
    char old[1100];
    size_t bytes = strlen(line);

    if (events->bytes + bytes + 1 > EVENTS_FILE_BYTES) {
        snprintf(old, sizeof(old), "%s.1", events->path);
        int fd = rename(events->path, old) == 0
                     ? open(events->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640)
                     : -1;

        if (fd >= 0) {
            close(events->fd);
            events->fd = fd;
            events->bytes = 0;
        }
    }
    char out[EVENTS_LINE_BYTES + 2];
    int n = snprintf(out, sizeof(out), "%s\n", line);

    ssize_t done = write(events->fd, out, (size_t)n);

    if (done == n) {
        events->bytes += (uint64_t)n;
        return;
    }
    bl_log(BL_LOG_ERROR, "events", "cannot write %s: %s", events->path,
           bl_strerror(done < 0 ? -errno : -ENOSPC));
    if (done > 0) { /* a piece of a line would spoil the next one */
        BL_IGNORE(ftruncate(events->fd, (off_t)events->bytes) != 0, "readers pass over it");
    }
}

static void line_begin(struct events *events, struct line *line, const struct event_row *row,
                       uint64_t run, const char *text)
{
    char when[BL_CLOCK_TEXT_BYTES];
    uint64_t ms = bl_wall_ms();

    bl_wall_format(ms, when);
    line_add(line,
             "{\"schema\":1,\"seq\":%llu,\"time\":\"%s\",\"ms\":%llu,\"code\":\"BLY-%03u\","
             "\"name\":\"%s\",\"severity\":\"%s\",\"node\":\"%s\",",
             (unsigned long long)++events->newest, when, (unsigned long long)ms, row->code,
             row->name, event_severity_name(row->severity), events->node);
    if (run != 0) {
        line_add(line, "\"run\":\"%016llx\",", (unsigned long long)run);
    } else {
        line_add(line, "\"run\":\"\",");
    }
    line_add(line, "\"text\":");
    line_add_text(line, text, strlen(text));
    line_add(line, ",\"todo\":");
    line_add_text(line, strcmp(row->person, "nothing") == 0 ? "" : row->person,
                  strcmp(row->person, "nothing") == 0 ? 0 : strlen(row->person));
    line_add(line, ",");
}

static void line_end(struct events *events, const struct line *line, uint32_t code,
                     const char *name, enum core_severity severity, const char *text)
{
    static const enum bl_log_level levels[] = {BL_LOG_INFO, BL_LOG_INFO, BL_LOG_WARN, BL_LOG_ERROR};
    uint64_t seq = events->newest;

    free(events->ring[seq % EVENTS_RING]);
    events->ring[seq % EVENTS_RING] = strdup(line->bytes);
    snprintf(events->text[severity], sizeof(events->text[0]), "BLY-%03u %s %s", code, name, text);
    events->text_seq[severity] = seq;
    events_append(events, line->bytes);
    bl_log(levels[severity], "event", "BLY-%03u %s %s", code, name, text);
    if (events->listen) {
        events->listen(events->listen_arg);
    }
}

void event(struct events *events, enum event_code code, const char *fmt, ...)
{
    const struct event_row *row = row_find(code);
    struct line line = {.count = 0};
    char text[1024];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    line_begin(events, &line, row, 0, row->what);
    line_add_fields(&line, row, text);
    line_end(events, &line, row->code, row->name, row->severity, text);
}

struct core_text { /* the fields of a core event, as JSON and for people */
    struct line *line;
    char people[768];
    size_t count;
};

static void people_add(struct core_text *text, const char *fmt, ...) BL_PRINTF(2, 3);
static void people_add(struct core_text *text, const char *fmt, ...)
{
    size_t room = sizeof(text->people) - text->count;
    va_list ap;

    va_start(ap, fmt);
    int n = vsnprintf(text->people + text->count, room, fmt, ap);
    va_end(ap);
    text->count += n > 0 && (size_t)n < room ? (size_t)n : room - 1;
}

static void core_number(struct core_text *text, const char *name, uint64_t value)
{
    line_add(text->line, ",\"%s\":%llu", name, (unsigned long long)value);
    people_add(text, " %s=%llu", name, (unsigned long long)value);
}

static void core_word(struct core_text *text, const char *name, const char *value)
{
    if (value[0] == '\0') {
        return;
    }
    line_add(text->line, ",\"%s\":", name);
    line_add_text(text->line, value, strlen(value));
    people_add(text, " %s=%s", name, value);
}

void event_core(struct events *events, const char *job, uint64_t run, const struct core_event *core)
{
    const struct core_event_info *info = core_event_find(core->code);
    struct line line = {.count = 0};
    struct core_text text = {.line = &line};

    BL_ASSERT(info != NULL);
    struct event_row row = {(uint32_t)info->code, info->name, info->severity, "",
                            info->what,           info->does, info->person};

    line_begin(events, &line, &row, run, core->text[0] ? core->text : info->what);
    line_add(&line, "\"fields\":{\"job\":\"%s\"", job);
    core_number(&text, "generation", core->generation);
    core_number(&text, "step", core->step);
    if (core->rank != CORE_NO_RANK) {
        core_number(&text, "rank", core->rank);
    }
    if (core->incarnation != 0) {
        char hex[17];

        snprintf(hex, sizeof(hex), "%016llx", (unsigned long long)core->incarnation);
        core_word(&text, "incarnation", hex);
    }
    if (core->signal != 0) {
        core_number(&text, "signal", (uint64_t)core->signal);
        core_word(&text, "signal_name",
                  sigabbrev_np(core->signal) ? sigabbrev_np(core->signal) : "");
    } else if (core->exit_code != 0) {
        line_add(&line, ",\"code\":%d", core->exit_code);
    }
    if (core->value_ms != 0) {
        core_number(&text, "value_ms", core->value_ms);
    }
    if (core->count != 0) {
        core_number(&text, "count", core->count);
    }
    core_word(&text, "node", core->node);
    core_word(&text, "text", core->text);
    line_add(&line, "}}");
    line_end(events, &line, (uint32_t)info->code, info->name, info->severity, text.people);
}

/* The newest lines of the file: who asks for events does not see a restart, and numbers never
 * repeat within a state directory. A last line that was cut off by a crash is passed over. */
static int events_load(struct events *events)
{
    uint64_t bytes = events->bytes < EVENTS_LOAD_BYTES ? events->bytes : EVENTS_LOAD_BYTES;
    char *tail = malloc((size_t)bytes + 1);

    if (!tail) {
        return -ENOMEM;
    }
    ssize_t n = pread(events->fd, tail, (size_t)bytes, (off_t)(events->bytes - bytes));

    tail[n > 0 ? n : 0] = '\0';
    for (char *at = tail, *end; (end = strchr(at, '\n')); at = end + 1) {
        const char *number = strstr(at, "\"seq\":");

        *end = '\0';
        if (at[0] != '{' || !number || number > end) { /* the first one may be a part */
            continue;
        }
        events->newest = strtoull(number + 6, NULL, 10);
        free(events->ring[events->newest % EVENTS_RING]);
        events->ring[events->newest % EVENTS_RING] = strdup(at);
    }
    free(tail);
    return 0;
}

int events_open(struct events **ret, const char *dir, const char *node, struct bl_errmsg *msg)
{
    struct events *events = calloc(1, sizeof(*events));
    struct stat st;

    if (!events) {
        return bl_err_code(msg, -ENOMEM, "events");
    }
    snprintf(events->node, sizeof(events->node), "%s", node);
    int rc = bl_path_join(events->path, sizeof(events->path), dir, "events.jsonl");

    events->fd = rc == 0 ? open(events->path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0640) : -1;
    if (events->fd < 0 || fstat(events->fd, &st) != 0) {
        rc = bl_err_code(msg, rc ? rc : -errno, "open %s/events.jsonl", dir);
        events_close(events);
        return rc;
    }
    events->bytes = (uint64_t)st.st_size;
    rc = events_load(events);
    if (rc != 0) {
        events_close(events);
        return bl_err_code(msg, rc, "read %s", dir);
    }
    *ret = events;
    return 0;
}

void events_close(struct events *events)
{
    if (!events) {
        return;
    }
    for (size_t i = 0; i < EVENTS_RING; i++) {
        free(events->ring[i]);
    }
    if (events->fd >= 0) {
        close(events->fd);
    }
    free(events);
}

uint64_t events_newest(const struct events *events)
{
    return events->newest;
}

const char *events_line(const struct events *events, uint64_t seq)
{
    if (seq == 0 || seq > events->newest || seq + EVENTS_RING <= events->newest) {
        return NULL;
    }
    return events->ring[seq % EVENTS_RING];
}

const char *events_newest_text(const struct events *events, enum core_severity at_least)
{
    int best = -1;

    for (int i = (int)at_least; i <= CORE_ALARM; i++) {
        if (events->text_seq[i] > 0 && (best < 0 || events->text_seq[i] > events->text_seq[best])) {
            best = i;
        }
    }
    return best < 0 ? "" : events->text[best];
}

const char *events_newest_line(const struct events *events, enum core_severity at_least)
{
    uint64_t seq = 0;

    for (int i = (int)at_least; i <= CORE_ALARM; i++) {
        seq = events->text_seq[i] > seq ? events->text_seq[i] : seq;
    }
    return events_line(events, seq);
}

void events_listen(struct events *events, void (*fn)(void *arg), void *arg)
{
    events->listen = fn;
    events->listen_arg = arg;
}
