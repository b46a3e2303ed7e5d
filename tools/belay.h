/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The operator's command. Each command is one file, belay_<command>.c, that leaves a struct
 * tool_command; what they share:
 *
 *     belay_args.c    options, the nearest name for a wrong one, the daemon's socket
 *     belay_link.c    a connection to belayd: hello, requests, answers
 *     belay_state.c   what `status` answers, read strictly
 *     belay_prometheus.c  the same as metrics
 *     belay_text.c    times, sizes and events for people; the line that is written over
 *     belay_wait.c    a long request with its progress
 *     belay_source.c  where the job of `belay run` comes from
 *     belay_follow.c  watching a run to its end
 *
 * One thread. Programs speak, so these functions may print; those that take a struct bl_errmsg do
 * not.
 */
#ifndef TOOLS_BELAY_H
#define TOOLS_BELAY_H

#include <jansson.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/error.h"
#include "base/job.h"
#include "wire/sock.h"

#define TOOL_WORDS_MAX  4
#define TOOL_ANSWER_MS  5000   /* the daemon has this long for what it can answer at once */
#define TOOL_SUBMIT_MS  120000 /* and this for a submit, which scans the roots */
#define TOOL_EVENTS_MAX 65536u

enum tool_exit {
    TOOL_DONE = 0,
    TOOL_FINDING = 1, /* status, doctor: needs attention */
    TOOL_USAGE = 2,
    TOOL_COULD_NOT = 3,
    TOOL_STOPPED = 4, /* run: stopped, resumable */
    TOOL_NO_PROGRESS = 93,
    TOOL_DETACHED = 130 /* run: Ctrl-C; the run goes on */
};

/* ---- commands and their arguments: belay.c, belay_args.c ---- */

enum tool_option {
    TOOL_OPT_SOCKET = 1u << 0,
    TOOL_OPT_JSON = 1u << 1,
    TOOL_OPT_JOB = 1u << 2,
    TOOL_OPT_DETACH = 1u << 3,
    TOOL_OPT_RECOVER = 1u << 4,
    TOOL_OPT_REPLACE_BINARY = 1u << 5,
    TOOL_OPT_ACCEPT_NUMERICS = 1u << 6,
    TOOL_OPT_SINCE = 1u << 7,
    TOOL_OPT_FOLLOW = 1u << 8,
    TOOL_OPT_ABANDON = 1u << 9,
    TOOL_OPT_RESUME = 1u << 10,
    TOOL_OPT_PROMETHEUS = 1u << 11
};

struct tool_args {
    uint32_t given;      /* enum tool_option, of those that were there */
    char socket[1024];   /* always filled for a command that takes --socket */
    const char *job;     /* --job NAME, or NULL: the daemon's only one */
    const char *recover; /* --recover ROOT, or NULL */
    uint64_t since;
    const char *words[TOOL_WORDS_MAX]; /* what is no option */
    uint32_t word_count;
};

struct tool_command {
    const char *name;
    const char *brief;                        /* a line of `belay --help` */
    const char *help;                         /* all of `belay NAME --help` */
    uint32_t options;                         /* enum tool_option, that it takes */
    uint32_t word_count;                      /* at most */
    int (*run)(const struct tool_args *args); /* returns the exit code */
};

/* One in each file of a command. */
extern const struct tool_command tool_run, tool_status, tool_events, tool_save, tool_stop,
    tool_promote, tool_recover, tool_resume, tool_doctor, tool_version;

/* Reads the arguments behind the command's name (argc, argv: those). -1: go on; else the exit code
 * with which to leave, the text is printed. */
BL_MUST_CHECK int tool_args_parse(struct tool_args *ret, const struct tool_command *command,
                                  int argc, char **argv);
/* The nearest of `count` names to `word`; NULL when none is near. */
const char *tool_nearest(const char *word, const char *const *names, size_t count);
/* A line "belay COMMAND: text" on stderr. */
void tool_say(const struct tool_command *command, const char *format, ...) BL_PRINTF(2, 3);

/* ---- the daemon: belay_link.c ---- */

struct tool_link {
    struct wire_sock sock;
    bool is_open;
    char node[WIRE_NODE_MAX];   /* of the daemon that answers */
    char build[WIRE_BUILD_MAX]; /* its version */
};

struct tool_answer {
    int rc;                     /* of the daemon: 0 or its code */
    char text[WIRE_REASON_MAX]; /* its sentence */
    json_t *json;               /* owned; an object, or NULL */
    bool more;                  /* further answers to this request follow */
};

/* Connects and exchanges hellos. *ret need not be initialised. BL_EVERSION for another protocol. */
BL_MUST_CHECK int tool_link_open(struct tool_link *ret, const char *path, struct bl_errmsg *msg);
void tool_link_close(struct tool_link *link);
/* A random id for a request; the same id for a repeated one. */
void tool_link_id(uint64_t ret[2]);
/* Sends a request; `args` is borrowed, NULL is {}. */
BL_MUST_CHECK int tool_link_send(struct tool_link *link, const uint64_t id[2], enum wire_verb verb,
                                 const json_t *args, struct bl_errmsg *msg);
/* The next answer to `id`; others are dropped. BL_EDEADLINE after `timeout_ms`; other errors end
 * the connection. 0 with the daemon's refusal in ret->rc. tool_answer_close. */
BL_MUST_CHECK int tool_link_wait(struct tool_link *link, const uint64_t id[2], uint32_t timeout_ms,
                                 struct tool_answer *ret, struct bl_errmsg *msg);
void tool_answer_close(struct tool_answer *answer);
/* Both, and the connection too when it is not open: one request, one answer within TOOL_ANSWER_MS
 * (TOOL_SUBMIT_MS). A refusal is returned as its code with its text. *ret is owned, an object; may
 * be NULL to drop it. The connection is closed on errors of its own. */
BL_MUST_CHECK int tool_link_ask(struct tool_link *link, const char *path, enum wire_verb verb,
                                const json_t *args, json_t **ret, struct bl_errmsg *msg);
/* Is this code one of a connection, after which trying again may help? */
bool tool_link_is_away(int code);
/* Says that nobody answers at `path` and how to start a daemon. Returns TOOL_COULD_NOT. */
int tool_unreachable(const struct tool_command *command, const char *path,
                     const struct bl_errmsg *msg);
/* For a request that failed by `code`: the above when there is no socket, or the sentence. */
int tool_refused(const struct tool_command *command, const char *path, int code,
                 const struct bl_errmsg *msg);
/* {"job": name}, or {} for NULL. Owned. */
json_t *tool_job_args(const char *job);

/* ---- what status says: belay_state.c ---- */

#define TOOL_NUMBER_NONE UINT64_MAX /* a number that the daemon does not know */

struct tool_point { /* a state in memory or on disk */
    uint64_t step, age_ms;
    char dir[WIRE_DIR_MAX], root[WIRE_ROOT_MAX];
};

struct tool_state {
    json_t *json; /* owned: the whole answer; nodes, ranks and needs are views of it */
    char verdict[16], run[33], name[BL_JOB_NAME_MAX], phase[16], digest[33];
    uint64_t exit_code, generation, world, ranks_wanted, step, steps;
    uint64_t dp, tp, pp, dp_wanted, pp_wanted; /* of `world` ranks, and what is wanted */
    double loss, tokens_per_s;                 /* NaN: not known */
    struct tool_point memory, disk;
    uint64_t saves_committed, saves_failed, saves_skipped, save_writing;
    const json_t *nodes, *ranks, *needs, *last_recovery, *last_event, *store; /* may be NULL */
    const json_t *roots, *under_way; /* lists; may be NULL */
};

/* Checks and reads a status answer; takes `json`, also on failure. BL_EFORMAT names the member. */
BL_MUST_CHECK int tool_state_read(struct tool_state *ret, json_t *json, struct bl_errmsg *msg);
void tool_state_close(struct tool_state *state);
/* Asks for it. `job` may be NULL. */
BL_MUST_CHECK int tool_state_ask(struct tool_state *ret, struct tool_link *link, const char *path,
                                 const char *job, struct bl_errmsg *msg);
/* A member that may be null or absent: an integer, else TOOL_NUMBER_NONE; a text, else "". */
uint64_t tool_member_number(const json_t *object, const char *key);
const char *tool_member_text(const json_t *object, const char *key);
/* Does the state ask for a person? */
bool tool_state_needs_attention(const struct tool_state *state);

/* The status answer in Prometheus' text exposition format; NULL: nobody answered, which is said
 * too. `job` was asked for by name, or NULL. Stands in belay_prometheus.c. */
void tool_prometheus_print(FILE *out, const json_t *status, const char *job);

struct tool_events_at { /* how far events are read */
    char log[64];       /* name of the daemon whose log it is; "" not yet known */
    uint64_t since;     /* number of the newest one read */
};

/* What to ask `events` for what comes after `at`. Owned by the caller. Stands in belay_events.c. */
json_t *tool_events_args(const struct tool_events_at *at, bool follows);
/* Reads an answer to `events` and gives each event after `at`, which moves on. When it is another
 * log than before (a new head), it is given from its beginning. Stands in belay_events.c. */
BL_MUST_CHECK int tool_events_read(const json_t *answer, struct tool_events_at *at,
                                   void (*each)(const json_t *event, void *arg), void *arg,
                                   struct bl_errmsg *msg);

/* ---- for people: belay_text.c ---- */

#define TOOL_TEXT_MAX 512

/* "180 ms", "1.8 s", "4 min 10 s", "2 h 5 min"; TOOL_NUMBER_NONE: "?". */
void tool_format_ms(uint64_t ms, char *out, size_t bytes);
/* "940", "12.4k", "3.1M"; NaN: "?". */
void tool_format_rate(double value, char *out, size_t bytes);
/* "12:00:01 warning BLY-110 RANK_EXITED: text, fields" of an event object. */
void tool_format_event(const json_t *event, char *out, size_t bytes);
/* Is it worth a line in `belay run`? Severity notice and above. */
bool tool_event_is_news(const json_t *event);

/* A stream with a last line that is written over, when it is a terminal. */
struct tool_screen {
    FILE *file; /* borrowed */
    bool is_terminal;
    bool has_live; /* a live line stands there */
};
/* Whether `file` is a terminal is looked at once. */
void tool_screen_init(struct tool_screen *ret, FILE *file);
/* A line that stays. */
void tool_screen_line(struct tool_screen *screen, const char *text);
/* The line that is written over; cut to the width. Nothing when it is no terminal. */
void tool_screen_live(struct tool_screen *screen, const char *text);
/* Removes the live line. */
void tool_screen_clear(struct tool_screen *screen);

/* "step 120/150  loss 2.3410  12.4k tokens/s  4/4 ranks  saved 100". */
void tool_format_progress(const struct tool_state *state, char *out, size_t bytes);

/* From here on SIGINT and SIGTERM only set tool_signal: 0, or the signal that came. */
void tool_signals_catch(void);
extern volatile sig_atomic_t tool_signal;

/* ---- waiting: belay_wait.c ---- */

/* Sends `verb` and waits for its answer however long it takes, with progress on stderr; goes on
 * after a restart of the daemon. Ctrl-C ends the waiting, not the request: TOOL_DETACHED. Returns
 * an exit code; 0 with the answer in *ret (owned). */
BL_MUST_CHECK int tool_wait(const struct tool_command *command, const struct tool_args *args,
                            enum wire_verb verb, const char *doing, json_t **ret);

/* ---- run: belay_source.c, belay_follow.c ---- */

struct tool_source {                             /* a job to submit */
    struct bl_job *job;                          /* owned */
    char *text;                                  /* owned: frozen, JSON */
    char root[WIRE_ROOT_MAX], dir[WIRE_DIR_MAX]; /* of --recover, else "" */
};

/* Loads and checks the job of the arguments, with belay-train --check; `out` is for what it says.
 * 0, or an exit code, and then the text is printed. Free it in either case. */
BL_MUST_CHECK int tool_source_load(struct tool_source *ret, const struct tool_command *command,
                                   const struct tool_args *args, FILE *out);
void tool_source_free(struct tool_source *source);

/* Watches the run `run` of job `name` to its end; events after `at` are shown. Returns the exit
 * code of `belay run`. */
BL_MUST_CHECK int tool_follow(const struct tool_command *command, const struct tool_args *args,
                              struct tool_link *link, const char *run, const char *name,
                              const struct tool_events_at *at);

#endif
