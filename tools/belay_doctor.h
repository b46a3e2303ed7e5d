/* SPDX-License-Identifier: Apache-2.0 */
/* What the checks of `belay doctor` share. */
#ifndef BELAY_TOOLS_BELAY_DOCTOR_H
#define BELAY_TOOLS_BELAY_DOCTOR_H

#include <stdbool.h>
#include <stdint.h>

#include <jansson.h>

#include "base/error.h"

enum check_state { CHECK_OK, CHECK_NOTE, CHECK_FINDING };

struct doctor {
    json_t *checks; /* owned */
    uint32_t findings;
    bool as_json;
};

/* One line of the report, printed at once unless it is JSON. */
void check_add(struct doctor *doctor, const char *name, enum check_state state, const char *format,
               ...) BL_PRINTF(4, 5);

/* GPUs: driver, devices and their health, who holds their memory, the plug-in, and settings in the
 * environment that ranks on GPUs will not get. */
void check_gpus(struct doctor *doctor);

#endif
