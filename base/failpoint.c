/* SPDX-License-Identifier: Apache-2.0 */
#include "base/failpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define FAIL_ENTRIES_MAX 32
#define FAIL_NAME_MAX    64

enum fail_action { FAIL_KILL, FAIL_SEGV, FAIL_STOP, FAIL_EXIT, FAIL_ERROR, FAIL_DELAY };

static const char *const fail_actions[] = {"kill", "segv", "stop", "exit", "error"};

struct fail_entry {
    char name[FAIL_NAME_MAX];   /* without the rank */
    char marker[FAIL_NAME_MAX]; /* as written, with the rank */
    enum fail_action action;
    unsigned number;  /* delay in ms, or exit code */
    long count;       /* the hit that acts; 0: each */
    atomic_long hits; /* relaxed: only the number matters */
};

/* Read once from the environment, then only the counters change. */
static struct fail_entry fail_entries[FAIL_ENTRIES_MAX];
static int fail_entry_count;
static pthread_once_t fail_once = PTHREAD_ONCE_INIT;

static void fail_refuse(const char *entry)
{
    fprintf(stderr, "belay: BELAY_FAIL: cannot read '%s' (name[@rank]:action:count)\n", entry);
    _exit(2);
}

static int fail_parse_number(const char *text, long *ret)
{
    char *end;
    errno = 0;
    *ret = strtol(text, &end, 10);
    return errno == 0 && end != text && *end == '\0' && *ret >= 0 ? 0 : -EINVAL;
}

static int fail_parse_action(const char *text, struct fail_entry *entry)
{
    for (size_t i = 0; i < sizeof(fail_actions) / sizeof(fail_actions[0]); i++) {
        if (strcmp(text, fail_actions[i]) == 0) {
            entry->action = (enum fail_action)i;
            entry->number = 1; /* of exit */
            return 0;
        }
    }
    long number;
    int exits = strncmp(text, "exit_", 5) == 0;
    if ((!exits && strncmp(text, "delay_", 6) != 0) ||
        fail_parse_number(strchr(text, '_') + 1, &number) < 0 || number > (exits ? 255 : INT_MAX)) {
        return -EINVAL;
    }
    entry->action = exits ? FAIL_EXIT : FAIL_DELAY;
    entry->number = (unsigned)number;
    return 0;
}

/* Does the part behind '@' name this process? */
static int fail_is_our_rank(const char *want)
{
    const char *ours = getenv("BELAY_RANK");
    return ours != NULL && strcmp(ours, want) == 0;
}

/* Parses one `name[@rank]:action:count`, which it takes apart; keeps it if it is for us. */
static void fail_parse_entry(char *text)
{
    char whole[128];
    snprintf(whole, sizeof(whole), "%s", text);
    char *save = NULL;
    char *name = strtok_r(text, ":", &save);
    char *action = strtok_r(NULL, ":", &save);
    char *count = strtok_r(NULL, ":", &save);
    struct fail_entry *entry = &fail_entries[fail_entry_count];
    if (name == NULL || action == NULL || count == NULL || strtok_r(NULL, ":", &save) != NULL ||
        strlen(name) >= FAIL_NAME_MAX || strchr(name, '/') != NULL ||
        fail_parse_action(action, entry) < 0 || fail_parse_number(count, &entry->count) < 0 ||
        fail_entry_count >= FAIL_ENTRIES_MAX - 1) {
        fail_refuse(whole);
    }
    snprintf(entry->marker, sizeof(entry->marker), "%s", name);
    snprintf(entry->name, sizeof(entry->name), "%s", name);
    char *at = strchr(entry->name, '@');
    if (at != NULL) {
        *at = '\0';
        if (!fail_is_our_rank(at + 1)) {
            return;
        }
    }
    fail_entry_count++;
}

static void fail_load(void)
{
    const char *env = getenv("BELAY_FAIL");
    if (env == NULL || env[0] == '\0') {
        return;
    }
    char *text = strdup(env);
    if (text == NULL) {
        fail_refuse(env);
        return;
    }
    char *save = NULL;
    for (char *part = strtok_r(text, ",", &save); part != NULL; part = strtok_r(NULL, ",", &save)) {
        fail_parse_entry(part);
    }
    free(text);
}

/* Takes the marker file, if markers are asked for. */
static int fail_may_act(const struct fail_entry *entry)
{
    const char *dir = getenv("BELAY_FAIL_ONCE_DIR");
    char path[PATH_MAX];
    if (dir == NULL || dir[0] == '\0') {
        return 1;
    }
    int n = snprintf(path, sizeof(path), "%s/%s", dir, entry->marker);
    if (n < 0 || (size_t)n >= sizeof(path)) {
        return 0;
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) {
        return 0;
    }
    close(fd);
    return 1;
}

static void fail_sleep(unsigned ms)
{
    struct timespec left = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
    while (nanosleep(&left, &left) < 0 && errno == EINTR) {
    }
}

static int fail_act(const struct fail_entry *entry)
{
    switch (entry->action) {
    case FAIL_KILL:
        kill(getpid(), SIGKILL);
        break;
    case FAIL_SEGV:
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
        break;
    case FAIL_STOP:
        kill(getpid(), SIGSTOP);
        break;
    case FAIL_EXIT:
        _exit((int)entry->number);
    case FAIL_ERROR:
        return -EIO;
    case FAIL_DELAY:
        fail_sleep(entry->number);
        break;
    }
    return 0;
}

int bl_failpoint_hit(const char *name)
{
    pthread_once(&fail_once, fail_load);
    int rc = 0;
    for (int i = 0; i < fail_entry_count; i++) {
        struct fail_entry *entry = &fail_entries[i];
        if (strcmp(entry->name, name) != 0) {
            continue;
        }
        long hit = atomic_fetch_add_explicit(&entry->hits, 1, memory_order_relaxed) + 1;
        if (entry->count == 0 || (hit == entry->count && fail_may_act(entry))) {
            int acted = fail_act(entry);
            rc = acted < 0 ? acted : rc;
        }
    }
    return rc;
}
