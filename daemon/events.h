/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events: what happened, as a row of events.def (this daemon's) or core/event.h (the run's). Each
 * goes to events.jsonl in the state directory
 * (append-only, one JSON object a line), to the daemon's log, and into a ring in memory that
 * `belay events` reads and `belay events --follow` waits on.
 *
 *     {"schema":1,"seq":17,"time":"2026-01-31T23:59:59.123Z","ms":..,"code":"BLY-221",
 *      "name":"PROC_EXITED","severity":"warning","node":"n1","run":"..","text":"..",
 *      "todo":"..","fields":{...}}
 */
#ifndef DAEMON_EVENTS_H
#define DAEMON_EVENTS_H

#include <stdint.h>

#include "base/error.h"
#include "daemon/core/event.h"
#include "daemon/events.def"

#define EVENTS_RING       1024 /* kept in memory */
#define EVENTS_LINE_BYTES 2048
#define EVENTS_FILE_BYTES                                                                          \
    (64u << 20) /* events.jsonl is renamed to .1 before it grows over this                         \
                 */

#define EVENT_ENUM(name, number, severity, fields, happened, done, person) EVENT_##name = number,
enum event_code { DAEMON_EVENTS(EVENT_ENUM) };
#undef EVENT_ENUM

struct event_row {
    uint32_t code;
    const char *name;
    enum core_severity severity;
    const char *fields, *what, *does, *person; /* fields "" for those of the core */
};

/* Row number `index` of both tables, by number; 0, or -ENOENT behind the last. */
int event_row_at(uint32_t index, struct event_row *ret);
/* "info", "notice", "warning", "alarm". */
const char *event_severity_name(enum core_severity severity);

struct events; /* opaque; loop thread only */

/* Opens DIR/events.jsonl. Sequence numbers go on after those there. Owned. */
BL_MUST_CHECK int events_open(struct events **ret, const char *dir, const char *node,
                              struct bl_errmsg *msg);
void events_close(struct events *events);

/* `fmt` lists the fields as "name=%..." pairs, separated by blanks, in the row's order:
 *     event(ev, EVENT_PROC_EXITED, "job=%s rank=%u signal=%d", ...)
 * A value goes to the next " name=" of the row; numbers become JSON numbers, others texts. */
void event(struct events *events, enum event_code code, const char *fmt, ...) BL_PRINTF(3, 4);

/* An event of a machine of `job`. Fields that are 0 or empty are left out. */
void event_core(struct events *events, const char *job, uint64_t run,
                const struct core_event *core);

/* Sequence number of the newest; 0 none. */
uint64_t events_newest(const struct events *events);
/* The JSON line (no newline) of event `seq`, a view until the next event; NULL when it is not in
 * the ring. */
const char *events_line(const struct events *events, uint64_t seq);
/* One line for people of the newest event of at least that severity, "" if none. View. */
const char *events_newest_text(const struct events *events, enum core_severity at_least);

/* The JSON line of the newest event of at least that severity; view, NULL if none is in the ring.
 */
const char *events_newest_line(const struct events *events, enum core_severity at_least);

/* Called after each event; NULL: nobody. */
void events_listen(struct events *events, void (*fn)(void *arg), void *arg);

#endif
