/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target: whole roots. The input is a list of files; they are written to a directory and it is
 * looked at as a run does that resumes, and as ckpt-tool does: opened, scanned, verified, loaded,
 * retired, swept. Nothing may crash, an error has a text, and tidying takes no good checkpoint
 * away.
 *
 *     byte 0: 1 the manifests' digests are made right   2 the indexes' and what manifests say of
 * them 4 opened for writing                       8 BELAY's digest is made right then records: u8
 * place, u8 name, u16 length, that many bytes
 *
 * Place and name choose from the tables below.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ckpt/ckpt.h"
#include "ckpt/ckpt_io.h"
#include "ckpt/index.h"
#include "tests/fuzz/fuzz.h"

#define RUN           "00000000000000aa" /* of the golden root */
#define FILES_MAX     24
#define LOAD_MAX      (1u << 20)
#define FLAG_MANIFEST 1u
#define FLAG_INDEX    2u
#define FLAG_WRITE    4u
#define FLAG_BELAY    8u

static const char *const places[] = {
    "",
    "step-000000000007.g2",
    "step-000000000008.g2",
    ".step-000000000009.g2.a1.00c0ffee00c0ffee.tmp",
    ".trash/step-000000000001.g1.0123456789abcdef",
    "step-000000000007.g3",
};
static const char *const names[] = {
    "BELAY",
    "manifest.json",
    "part-0000.safetensors",
    "part-0000.index",
    "part-0001.safetensors",
    "part-0001.index",
    "part-0000.safetensors.zst",
    "part-0001.safetensors.zst",
    "verified",
    "latest",
    ".reserve-n0",
    ".latest.0123456789abcdef.tmp",
    "manifest.json.0123456789abcdef.tmp",
};
#define COUNT(table) (sizeof(table) / sizeof((table)[0]))

struct file {
    uint32_t place, name;
    uint8_t *data; /* owned, exactly `bytes` */
    uint32_t bytes;
};

static char root[64];

static void put_digest_text(char *at, const void *data, size_t bytes)
{
    char text[17];

    snprintf(text, sizeof(text), "%016llx", (unsigned long long)bl_xxh3(data, bytes));
    memcpy(at, text, 16);
}

/* Where `text` last begins in the file's first `end` bytes; NULL when nowhere. */
static uint8_t *find_last(const struct file *file, uint32_t end, const char *text)
{
    uint32_t length = (uint32_t)strlen(text);

    for (uint32_t at = end >= length ? end - length + 1 : 0; at-- > 0;) {
        if (memcmp(file->data + at, text, length) == 0) {
            return file->data + at;
        }
    }
    return NULL;
}

/* The digest that ends a BELAY file or a manifest. */
static void fix_text(struct file *file)
{
    uint8_t *at = find_last(file, file->bytes, "\"digest\":\"");

    if (at != NULL && at + 26 <= file->data + file->bytes) {
        put_digest_text((char *)at + 10, file->data, (size_t)(at - file->data));
    }
}

static uint32_t get32(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* Where the file's index lies: all of an index file; of a part of codec zstd, the content of the
 * skippable frame before the seek table. False when there is none. */
static bool find_index(struct file *file, uint8_t **ret, size_t *ret_bytes)
{
    uint64_t table, frame;

    *ret = file->data;
    *ret_bytes = file->bytes;
    if (strstr(names[file->name], ".zst") != NULL) {
        if (file->bytes < 17) {
            return false;
        }
        table = 17 + 8 * (uint64_t)get32(file->data + file->bytes - 9);
        if (table < 25 || table > file->bytes) {
            return false;
        }
        frame = get32(file->data + file->bytes - 17);
        if (frame < 16 || frame > file->bytes - table) {
            return false;
        }
        *ret = file->data + file->bytes - table - frame + 8;
        *ret_bytes = frame - 8;
    }
    return *ret_bytes >= 8;
}

/* The digest that ends an index, and its number in the manifests of the same place: the k-th part
 * of a manifest is taken to be part-000k. */
static void fix_index(struct file *files, uint32_t count, struct file *file)
{
    uint32_t part = strstr(names[file->name], "0001") != NULL;
    uint8_t *index;
    uint64_t digest;
    size_t bytes;

    if (!find_index(file, &index, &bytes)) {
        return;
    }
    digest = bl_xxh3(index, bytes - 8);
    memcpy(index + bytes - 8, &digest, 8);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t seen = 0;

        for (uint32_t at = 0;
             files[i].place == file->place && files[i].name == 1 && at + 26 <= files[i].bytes;
             at++) {
            if (memcmp(files[i].data + at, "\"index\":\"", 9) == 0 && seen++ == part) {
                put_digest_text((char *)files[i].data + at + 9, index, bytes);
            }
        }
    }
}

static uint32_t parse(const uint8_t *data, size_t bytes, struct file *files)
{
    uint32_t count = 0;

    for (size_t at = 1; count < FILES_MAX && at + 4 <= bytes;) {
        size_t length = data[at + 2] | (size_t)data[at + 3] << 8;
        struct file *file = &files[count];

        file->place = data[at] % COUNT(places);
        file->name = data[at + 1] % COUNT(names);
        at += 4;
        length = length < bytes - at ? length : bytes - at;
        file->data = malloc(length + 1);
        BL_ASSERT(file->data != NULL);
        memcpy(file->data, data + at, length);
        file->bytes = (uint32_t)length;
        at += length;
        count++;
    }
    for (uint32_t i = 0; (data[0] & FLAG_INDEX) != 0 && i < count; i++) {
        if (files[i].name == 3 || (files[i].name >= 5 && files[i].name <= 7)) {
            fix_index(files, count, &files[i]);
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        if ((files[i].name == 1 && (data[0] & FLAG_MANIFEST) != 0) ||
            (files[i].name == 0 && (data[0] & FLAG_BELAY) != 0)) {
            fix_text(&files[i]);
        }
    }
    return count;
}

static void empty_below(const char *path)
{
    char below[600];
    struct dirent *entry;
    struct stat st;
    DIR *dir = opendir(path);

    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) {
            continue;
        }
        snprintf(below, sizeof(below), "%.300s/%s", path, entry->d_name);
        if (lstat(below, &st) == 0 && S_ISDIR(st.st_mode)) {
            empty_below(below);
            rmdir(below);
        } else {
            unlink(below);
        }
    }
    if (dir != NULL) {
        closedir(dir);
    }
}

static void write_out(const struct file *files, uint32_t count)
{
    char path[300];

    snprintf(root, sizeof(root), "%s/belay-fuzz-XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    BL_ASSERT(mkdtemp(root) != NULL);
    for (uint32_t i = 0; i < count; i++) {
        int fd;

        if (files[i].place != 0) {
            snprintf(path, sizeof(path), "%s/.trash", root);
            BL_IGNORE(files[i].place == 4 && mkdir(path, 0755) != 0, "it is there");
            snprintf(path, sizeof(path), "%s/%s", root, places[files[i].place]);
            BL_IGNORE(mkdir(path, 0755) != 0, "it is there");
        }
        snprintf(path, sizeof(path), "%s/%s/%s", root, places[files[i].place],
                 names[files[i].name]);
        fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
        BL_ASSERT(fd >= 0);
        BL_ASSERT(write(fd, files[i].data, files[i].bytes) == (ssize_t)files[i].bytes);
        close(fd);
    }
}

/* Loads everything that the checkpoint says it holds. */
static void load(struct ckpt_store *store, const char *dir)
{
    struct ckpt_manifest manifest = {0};
    struct ckpt_load_result result;
    struct bl_errmsg why = {{0}};
    struct ckpt_dest dests[8];
    uint8_t *memory[8] = {0};
    uint32_t count = 0;
    int rc = ckpt_manifest_load(store, dir, &manifest, &why);

    BL_ASSERT(rc == 0 || why.text[0] != '\0');
    for (; rc == 0 && count < manifest.part_count && count < 8; count++) {
        const struct ckpt_part *part = &manifest.parts[count];

        if (part->raw_bytes > LOAD_MAX || (memory[count] = malloc(part->raw_bytes + 1)) == NULL) {
            break;
        }
        dests[count] = (struct ckpt_dest){&part->held, memory[count]};
    }
    if (rc == 0) {
        rc = ckpt_load(store, dir, dests, count, &result, &why);
        BL_ASSERT(rc == 0 || why.text[0] != '\0');
    }
    for (uint32_t i = 0; i < 8; i++) {
        free(memory[i]);
    }
    ckpt_manifest_close(&manifest);
}

/* The newest good step, everything looked at on the way. */
static uint64_t look(struct ckpt_store *store)
{
    const struct ckpt_verify_job job = {.full = true};
    const struct ckpt_entry *newest;
    struct ckpt_verify_result result;
    struct bl_errmsg why = {{0}};
    struct ckpt_scan scan;
    uint64_t step = 0;

    if (ckpt_scan(store, &scan, &why) < 0) {
        BL_ASSERT(why.text[0] != '\0');
        return 0;
    }
    for (uint32_t i = 0; i < scan.count; i++) {
        const struct ckpt_entry *entry = &scan.entries[i];
        int rc = ckpt_verify(store, entry->dir, &job, &result, &why);

        BL_ASSERT(rc == 0 || why.text[0] != '\0');
        BL_ASSERT(entry->state == CKPT_GOOD || entry->state == CKPT_FORWARD ||
                  entry->why[0] != '\0');
        load(store, entry->dir);
    }
    newest = ckpt_scan_newest(&scan, NULL, 0);
    step = newest == NULL ? 0 : newest->step;
    ckpt_scan_close(&scan);
    return step;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct ckpt_io io;
    struct ckpt_store_config config = {.path = root, .io = &io};
    struct file files[FILES_MAX] = {{0}};
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {{0}};
    uint32_t count;

    if (bytes == 0) {
        return 0;
    }
    io = *ckpt_io_real();
    io.disable = CKPT_IO_NO_URING | CKPT_IO_NO_DIRECT;
    io.queue_depth = 1;
    count = parse(data, bytes, files);
    write_out(files, count);
    if ((data[0] & FLAG_WRITE) != 0) {
        config.run = RUN;
        config.node = "n0";
        config.create = true;
    }
    if (ckpt_store_open(&store, &config, &why) < 0) {
        BL_ASSERT(why.text[0] != '\0');
    } else {
        uint64_t step = look(store);
        struct ckpt_retain_result retained;

        if (config.run != NULL) {
            BL_IGNORE(ckpt_retain(store, 2, NULL, 0, &retained, NULL), "the next look tells");
            BL_IGNORE(ckpt_sweep(store, 9, 9, NULL), "the next look tells");
            BL_ASSERT(look(store) == step);
        }
        ckpt_store_close(store);
    }
    for (uint32_t i = 0; i < count; i++) {
        free(files[i].data);
    }
    empty_below(root);
    rmdir(root);
    return 0;
}
