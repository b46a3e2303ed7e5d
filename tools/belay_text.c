/* SPDX-License-Identifier: Apache-2.0 */
/* Text for people. */
#include <math.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "tools/belay.h"

volatile sig_atomic_t tool_signal;

static void on_signal(int number)
{
    tool_signal = number;
}

void tool_signals_catch(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal; /* without SA_RESTART: it ends a poll */
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

void tool_format_ms(uint64_t ms, char *out, size_t bytes)
{
    unsigned long long s = ms / 1000;
    if (ms == TOOL_NUMBER_NONE) {
        snprintf(out, bytes, "?");
    } else if (ms < 1000) {
        snprintf(out, bytes, "%llu ms", (unsigned long long)ms);
    } else if (s < 60) {
        snprintf(out, bytes, "%.1f s", (double)ms / 1000);
    } else if (s < 3600) {
        snprintf(out, bytes, "%llu min %llu s", s / 60, s % 60);
    } else {
        snprintf(out, bytes, "%llu h %llu min", s / 3600, s / 60 % 60);
    }
}

void tool_format_rate(double value, char *out, size_t bytes)
{
    if (isnan(value)) {
        snprintf(out, bytes, "?");
    } else if (value < 1000) {
        snprintf(out, bytes, "%.0f", value);
    } else if (value < 1e6) {
        snprintf(out, bytes, "%.1fk", value / 1e3);
    } else {
        snprintf(out, bytes, "%.1fM", value / 1e6);
    }
}

/* Control characters never reach a terminal. */
static void make_plain(char *text)
{
    for (; *text != '\0'; text++) {
        if ((unsigned char)*text < 0x20 || *text == 0x7f) {
            *text = ' ';
        }
    }
}

/* Fields that say nothing to a person, or that stand in the text already. */
static bool is_noise(const char *key)
{
    static const char *const noise[] = {"job", "text", "incarnation", "run"};
    for (size_t i = 0; i < sizeof noise / sizeof *noise; i++) {
        if (strcmp(key, noise[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* Appends "name=value" pairs of the event's fields. */
static void fields_append(const json_t *event, char *out, size_t bytes)
{
    const char *key;
    json_t *value;
    const char *before = "; ";
    json_object_foreach(json_object_get(event, "fields"), key, value)
    {
        size_t have = strlen(out);
        if (is_noise(key)) {
            continue;
        }
        if (json_is_string(value)) {
            snprintf(out + have, bytes - have, "%s%s=%s", before, key, json_string_value(value));
        } else if (json_is_integer(value)) {
            snprintf(out + have, bytes - have, "%s%s=%lld", before, key,
                     (long long)json_integer_value(value));
        } else if (json_is_number(value)) {
            snprintf(out + have, bytes - have, "%s%s=%g", before, key, json_number_value(value));
        } else {
            continue;
        }
        before = " ";
    }
}

void tool_format_event(const json_t *event, char *out, size_t bytes)
{
    uint64_t ms = tool_member_number(event, "ms");
    char clock[16] = "--:--:--";
    time_t seconds = (time_t)(ms / 1000);
    struct tm parts;
    if (ms != TOOL_NUMBER_NONE && localtime_r(&seconds, &parts) != NULL) {
        strftime(clock, sizeof clock, "%H:%M:%S", &parts);
    }
    snprintf(out, bytes, "%s %-7s %s %s", clock, tool_member_text(event, "severity"),
             tool_member_text(event, "code"), tool_member_text(event, "name"));
    const char *text = tool_member_text(event, "text");
    if (*text != '\0') {
        size_t have = strlen(out);
        snprintf(out + have, bytes - have, ": %s", text);
    }
    fields_append(event, out, bytes);
    make_plain(out);
}

bool tool_event_is_news(const json_t *event)
{
    return strcmp(tool_member_text(event, "severity"), "info") != 0;
}

void tool_screen_init(struct tool_screen *ret, FILE *file)
{
    const char *term = getenv("TERM");
    ret->file = file;
    ret->is_terminal = isatty(fileno(file)) && (term == NULL || strcmp(term, "dumb") != 0);
    ret->has_live = false;
}

void tool_screen_clear(struct tool_screen *screen)
{
    if (screen->has_live) {
        fputs("\r\033[K", screen->file);
        fflush(screen->file);
        screen->has_live = false;
    }
}

void tool_screen_line(struct tool_screen *screen, const char *text)
{
    tool_screen_clear(screen);
    fprintf(screen->file, "%s\n", text);
    fflush(screen->file);
}

void tool_screen_live(struct tool_screen *screen, const char *text)
{
    struct winsize size;
    if (!screen->is_terminal) {
        return;
    }
    int width = 80;
    if (ioctl(fileno(screen->file), TIOCGWINSZ, &size) == 0 && size.ws_col > 1) {
        width = size.ws_col;
    }
    fprintf(screen->file, "\r\033[K%.*s", width - 1, text);
    fflush(screen->file);
    screen->has_live = true;
}

void tool_format_progress(const struct tool_state *state, char *out, size_t bytes)
{
    char step[48] = "step -", loss[24] = "-", rate[24], saved[32] = "none";
    if (state->step != TOOL_NUMBER_NONE) {
        snprintf(step, sizeof step, "step %llu", (unsigned long long)state->step);
    }
    if (state->steps != TOOL_NUMBER_NONE) {
        size_t have = strlen(step);
        snprintf(step + have, sizeof step - have, "/%llu", (unsigned long long)state->steps);
    }
    if (!isnan(state->loss)) {
        snprintf(loss, sizeof loss, "%.4f", state->loss);
    }
    tool_format_rate(state->tokens_per_s, rate, sizeof rate);
    if (state->disk.step != TOOL_NUMBER_NONE) {
        snprintf(saved, sizeof saved, "%llu", (unsigned long long)state->disk.step);
    }
    unsigned long long world = state->world != TOOL_NUMBER_NONE ? state->world : 0;
    unsigned long long wanted = state->ranks_wanted != TOOL_NUMBER_NONE ? state->ranks_wanted : 0;
    snprintf(out, bytes, "%s  loss %s  %s tokens/s  %llu/%llu ranks  saved %s", step, loss, rate,
             world, wanted, saved);
    if (strcmp(state->verdict, "healthy") != 0) {
        size_t have = strlen(out);
        const char *need = json_string_value(json_array_get(state->needs, 0));
        snprintf(out + have, bytes - have, "  %s%s%s", state->verdict, need != NULL ? ": " : "",
                 need != NULL ? need : "");
    }
    make_plain(out);
}
