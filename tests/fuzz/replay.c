/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a fuzz target over files instead of libFuzzer: each file of the directories in the
 * arguments, as it is, and cut short and with single bytes changed in a fixed way, so that the
 * committed corpus goes some way in every build.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/digest.h"
#include "base/file.h"
#include "tests/fuzz/fuzz.h"

#define REPLAY_BYTES_MAX (2UL * 1024 * 1024)
#define REPLAY_CHANGES   300

/* A copy of exactly `bytes`, so that a sanitizer sees a read behind its end. */
static void replay_exactly(const char *data, size_t bytes)
{
    uint8_t *copy = malloc(bytes > 0 ? bytes : 1);
    BL_ASSERT(copy != NULL);
    memcpy(copy, data, bytes);
    LLVMFuzzerTestOneInput(copy, bytes);
    free(copy);
}

static void replay_file(char *data, size_t bytes)
{
    replay_exactly(data, bytes);
    for (uint64_t i = 0; i < REPLAY_CHANGES && bytes > 0; i++) {
        uint64_t word = bl_mix64(i * 1000003 + bytes);
        size_t at = (word >> 8) % bytes;
        char keep = data[at];
        if (word & 1) {
            replay_exactly(data, at);
        }
        data[at] = word & 2 ? (char)(word >> 40) : "\n:{}[]-, \"0x&*!"[(word >> 40) % 15];
        replay_exactly(data, bytes);
        data[at] = keep;
    }
}

static int replay_directory(const char *path, int *count)
{
    DIR *dir = opendir(path);
    if (dir == NULL) {
        perror(path);
        return -1;
    }
    const struct dirent *entry;
    int rc = 0;
    while (rc == 0 && (entry = readdir(dir)) != NULL) {
        char name[4096];
        char *data;
        size_t bytes;
        struct bl_errmsg msg = {{0}};
        if (entry->d_name[0] == '.' || bl_path_join(name, sizeof(name), path, entry->d_name) < 0) {
            continue;
        }
        rc = bl_file_read(name, REPLAY_BYTES_MAX, &data, &bytes, &msg);
        if (rc < 0) {
            fprintf(stderr, "%s\n", msg.text);
            break;
        }
        replay_file(data, bytes);
        free(data);
        (*count)++;
    }
    closedir(dir);
    return rc;
}

int main(int argc, char **argv)
{
    int count = 0;
    for (int i = 1; i < argc; i++) {
        if (replay_directory(argv[i], &count) < 0) {
            return 3;
        }
    }
    printf("%d files\n", count);
    return count > 0 ? 0 : 3;
}
