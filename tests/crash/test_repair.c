/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A repair that has to write a part again with other bytes than it had, killed at every operation
 * on the disk, and failing at each. Two copies, each with damage where only the other is good: what
 * one of them loses on the way nobody has any more. So after each operation the checkpoint must be
 * good, or damaged just as it was before, and the next repair must end well.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ckpt/part.h"
#include "ckpt/repair.h"
#include "ckpt/store.h"
#include "tests/crash/scene.h"

#define STEP           5
#define DIR_NAME       "step-000000000005.g1"
#define OPERATIONS_MAX 200
#define CHUNK_BYTES    4096u /* of the part that is repaired; one written now has others */

static char root[256];
static char before[BL_ERRMSG_BYTES]; /* what verify says of the damage */

static void path_of(char ret[CKPT_PATH_MAX], const char *name, const char *file)
{
    snprintf(ret, CKPT_PATH_MAX, "%s/%s/" DIR_NAME "/%s", root, name, file);
}

static void flip(const char *path, uint64_t at)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    uint8_t byte;

    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, (off_t)at), 1);
    byte ^= 0x40;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    close(fd);
}

static void store_open(struct ckpt_store **ret, const char *name, struct ckpt_io *io)
{
    char path[CKPT_PATH_MAX];

    snprintf(path, sizeof(path), "%s/%s", root, name);
    OK(sample_open(ret, path, scene_io(io), msg));
}

static void file_put(const char *path, const void *data, size_t bytes)
{
    unlink(path);
    OK(ckpt_io_write_file(ckpt_io_real(), path, data, bytes, msg));
}

/* Gives the second part an index with small chunks, as another writer may, and the manifest that
 * goes with it. Where the last extent of its largest tensor ends, through *ret_end. */
static void chunks_make_small(struct ckpt_store *store, uint64_t *ret_end)
{
    char path[CKPT_PATH_MAX], file[CKPT_PATH_MAX];
    struct ckpt_opened opened = {0};
    struct ckpt_index *index;
    struct ckpt_part *part;
    uint8_t *data = NULL;
    char *text = NULL;
    uint64_t most = 0;
    size_t bytes = 0;

    OK(ckpt_opened_load(store, DIR_NAME, &opened, msg));
    index = &opened.indexes[1];
    part = &opened.manifest.parts[1];
    path_of(file, "out", "part-0001.safetensors");
    OK(ckpt_io_read_file(ckpt_io_real(), file, SIZE_MAX, &text, &bytes, msg));
    index->chunk_bytes = CHUNK_BYTES;
    index->chunk_count = (uint32_t)((bytes + CHUNK_BYTES - 1) / CHUNK_BYTES);
    index->chunks = realloc(index->chunks, (index->chunk_count + 1u) * sizeof(uint64_t));
    assert_non_null(index->chunks);
    for (uint32_t i = 0; i < index->chunk_count; i++) {
        uint64_t left = bytes - (uint64_t)i * CHUNK_BYTES;

        index->chunks[i] =
            bl_xxh3(text + (size_t)i * CHUNK_BYTES, left < CHUNK_BYTES ? left : CHUNK_BYTES);
    }
    for (uint32_t i = 0; i < index->held.extent_count; i++) {
        const struct bl_extent *extent = &index->held.extents[i];
        uint64_t size =
            bl_extent_elems(extent) * bl_dtype_bytes(index->held.tensors[extent->tensor].dtype);

        *ret_end = size > most ? extent->offset + size : *ret_end;
        most = size > most ? size : most;
    }
    assert_true(most > 16 * CHUNK_BYTES);
    free(text);
    OK(ckpt_index_encode(index, &data, &bytes, &part->index_digest, msg));
    path_of(path, "out", "part-0001.index");
    file_put(path, data, bytes);
    free(data);
    OK(ckpt_manifest_encode(&opened.manifest, &text, &bytes, msg));
    path_of(path, "out", "manifest.json");
    file_put(path, text, bytes);
    free(text);
    ckpt_opened_close(&opened);
}

struct findings {
    uint32_t count;
    char text[BL_ERRMSG_BYTES];
};

static void on_finding(void *arg, const char *file, const char *text)
{
    struct findings *findings = arg;

    (void)file;
    if (findings->count++ == 0) {
        snprintf(findings->text, sizeof(findings->text), "%s", text);
    }
}

static void look(struct ckpt_store *store, struct findings *ret)
{
    const struct ckpt_verify_job job = {.full = true, .finding = on_finding, .arg = ret};
    struct ckpt_verify_result verified;

    *ret = (struct findings){0};
    BL_IGNORE(ckpt_verify(store, DIR_NAME, &job, &verified, NULL), "the findings tell");
}

static int setup(void **state)
{
    struct ckpt_store *source = NULL, *out = NULL;
    char path[CKPT_PATH_MAX];
    struct findings findings;
    uint64_t end = 0;

    (void)state;
    sample_scale = 12;
    sample_dir_make(root, access("/dev/shm", W_OK) == 0 ? "/dev/shm" : NULL);
    store_open(&source, "source", NULL);
    OK(sample_save(source, SAMPLE_ROWS, 3, STEP, 1, 1, msg));
    store_open(&out, "out", NULL);
    OK(sample_save(out, SAMPLE_FLAT, 4, STEP, 1, 1, msg));
    chunks_make_small(out, &end);
    look(out, &findings);
    assert_int_equal(findings.count, 0);
    /* Of a tensor's second half the last elements: the copy has them in its second part, and it is
     * the first part of the copy that is damaged. */
    path_of(path, "out", "part-0001.safetensors");
    flip(path, end - 2 * CHUNK_BYTES);
    path_of(path, "source", "part-0000.safetensors");
    flip(path, CHUNK_BYTES + 100);
    look(out, &findings);
    assert_int_equal(findings.count, 1);
    snprintf(before, sizeof(before), "%s", findings.text);
    assert_non_null(strstr(before, "chunk"));
    ckpt_store_close(source);
    ckpt_store_close(out);
    snprintf(path, sizeof(path), "cp -a %.200s/out %.200s/damaged", root, root);
    assert_int_equal(system(path), 0); /* NOLINT */
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    sample_dir_remove(root);
    return 0;
}

static void damage_again(void)
{
    char command[1024];

    snprintf(command, sizeof(command), "rm -rf %.200s/out && cp -a %.200s/damaged %.200s/out", root,
             root, root);
    assert_int_equal(system(command), 0); /* NOLINT */
}

static void on_told(void *arg, const char *file, const char *text, bool done)
{
    if (!done) {
        bl_err(arg, BL_EDIGEST, "%s: %s", file, text);
    }
}

/* 0: all is repaired; 1: told that something is not; negative: it could not go on. */
static int repair(struct ckpt_io *io, struct bl_errmsg *msg)
{
    struct ckpt_store *source = NULL, *out = NULL;
    struct ckpt_repair_result result = {0};
    struct ckpt_place copy = {.dir = DIR_NAME};
    int rc;

    store_open(&source, "source", NULL);
    store_open(&out, "out", io);
    copy.store = source;
    const struct ckpt_repair_job job = {.store = out,
                                        .dir = DIR_NAME,
                                        .copies = &copy,
                                        .copy_count = 1,
                                        .told = on_told,
                                        .arg = msg};

    rc = ckpt_repair(&job, &result, msg);
    ckpt_store_close(source);
    ckpt_store_close(out);
    return rc < 0 ? rc : result.failed > 0;
}

/* Good, or as it was? Then a repair ends well, with nothing left over. True: it was good. */
static bool check(uint64_t at)
{
    struct ckpt_store *out = NULL;
    struct ckpt_names names = {0};
    struct findings findings;
    struct bl_errmsg why = {0};
    char path[CKPT_PATH_MAX];
    bool good;

    store_open(&out, "out", NULL);
    look(out, &findings);
    good = findings.count == 0;
    if (findings.count > 1 || (findings.count == 1 && strcmp(findings.text, before) != 0)) {
        fail_msg("operation %llu: %u findings, the first: %s", (unsigned long long)at,
                 findings.count, findings.text);
    }
    if (repair(NULL, &why) != 0) {
        fail_msg("operation %llu: cannot be repaired any more: %s", (unsigned long long)at,
                 why.text);
    }
    look(out, &findings);
    if (findings.count != 0) {
        fail_msg("operation %llu: after the repair: %s", (unsigned long long)at, findings.text);
    }
    sample_load_check(out, DIR_NAME, SAMPLE_ROWS, 3, STEP);
    snprintf(path, sizeof(path), "%s/out/" DIR_NAME, root);
    OK(ckpt_io_real()->ops->list(ckpt_io_real(), path, 100, &names) == 0 ? 0 : -1);
    assert_int_equal(names.count, 5); /* two parts, two indexes, the manifest */
    ckpt_names_close(&names);
    ckpt_store_close(out);
    return good;
}

static void enumerate(enum ckpt_fault_kind kind)
{
    uint64_t at, good = 0;

    for (at = 1; at < OPERATIONS_MAX; at++) {
        int status = 0;
        pid_t pid;

        damage_again();
        pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            struct ckpt_io_fault fault;

            ckpt_io_fault_init(&fault, kind, at, -EIO);
            BL_IGNORE(repair(&fault.io, NULL), "what is left is looked at");
            _exit(fault.hit == 0 ? 0 : 1);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        good += check(at);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
            break;
        }
    }
    printf("%llu operations, %llu times good after them\n", (unsigned long long)at - 1,
           (unsigned long long)good);
    assert_true(at > 15 && at < OPERATIONS_MAX && good > 1 && good < at);
}

static void test_repair_killed_before_any_operation_loses_nothing(void **state)
{
    (void)state;
    enumerate(CKPT_FAULT_KILL);
}

static void test_repair_with_eio_at_any_operation_loses_nothing(void **state)
{
    (void)state;
    enumerate(CKPT_FAULT_ERROR);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_repair_killed_before_any_operation_loses_nothing),
        cmocka_unit_test(test_repair_with_eio_at_any_operation_loses_nothing),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
