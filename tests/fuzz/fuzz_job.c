/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target: job files. Whatever the bytes, the reader returns one of its codes with a text that
 * begins with the file's name; and a job that it takes, writes itself as JSON that reads back to
 * the same bytes.
 *
 * With clang and -Dfuzz=true it is a libFuzzer program: fuzz_job tests/fuzz/corpus/job. In every
 * build it is also built with a main of its own (replay.c) that runs the committed corpus.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/job.h"
#include "tests/fuzz/fuzz.h"

static struct bl_job job;
static struct bl_job again;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct bl_errmsg msg = {{0}};
    int rc = bl_job_parse(&job, (const char *)data, bytes, "job.yaml", "/base", &msg);
    if (rc < 0) {
        BL_ASSERT(rc == BL_ECONFIG || rc == BL_ENOTBUILT);
        BL_ASSERT(strncmp(msg.text, "job.yaml:", 9) == 0);
        return 0;
    }
    char *json = bl_job_to_json(&job);
    BL_ASSERT(json != NULL);
    rc = bl_job_parse(&again, json, strlen(json), "frozen", "/elsewhere", &msg);
    BL_ASSERT(rc == 0);
    BL_ASSERT(memcmp(&job, &again, sizeof(job)) == 0);
    free(json);
    return 0;
}
