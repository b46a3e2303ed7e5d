/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prints docs/runbook.md from the event tables. Built, not installed; a test compares its output
 * with the page.
 */
#include <ctype.h>
#include <stdio.h>

#include "daemon/events.h"

static void sentence(const char *label, const char *text)
{
    printf("- **%s** %c%s.\n", label, toupper((unsigned char)text[0]), text + 1);
}

int main(void)
{
    struct event_row row;

    puts(
        "# Runbook\n\n"
        "Made from the event tables in `daemon/core/event.h` and `daemon/events.def` by\n"
        "`belay-runbook > docs/runbook.md`. One section per event: what happened, what Belay does\n"
        "about it, what a person does. Numbers are never reused. `belay events` shows events of "
        "the\n"
        "head; `events.jsonl` in each daemon's state directory has those of its node.\n\n"
        "Severities: info (nothing changed), notice (something changed and was dealt with), "
        "warning\n"
        "(something was lost or cost time), alarm (somebody should look).\n");
    for (uint32_t i = 0; event_row_at(i, &row) == 0; i++) {
        printf("## BLY-%03u %s\n\nSeverity: %s.%s%s%s\n\n", row.code, row.name,
               event_severity_name(row.severity), row.fields[0] ? " Fields: " : "", row.fields,
               row.fields[0] ? "." : "");
        sentence("Happened:", row.what);
        sentence("Belay:", row.does);
        sentence("You:", row.person);
        puts("");
    }
    return 0;
}
