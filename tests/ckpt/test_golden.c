/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Golden files. tests/golden/v1/good is a root that version 1 wrote: it must be readable for ever,
 * and saving the same state must give the same bytes until the format gets a new version. Each root
 * in tests/golden/v1/bad is refused, with the sentence that its file `expect` holds. good-zstd is a
 * root of codec zstd; what another version of zstd writes may differ from it, so it is only read.
 * With BELAY_GOLDEN_WRITE=DIR the good root is written to DIR instead, and good-zstd to DIR-zstd.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <dirent.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/ckpt/sample.h"

#define GOLDEN_RUN "00000000000000aa"
#define GOLDEN_DIR "step-000000000007.g2"

static char golden[512];

/* Half `rank` of 2 of a state that can be read by eye. */
static void tiny_init(struct bl_extent_list *list, uint8_t data[256], uint32_t rank)
{
    static const struct bl_tensor tensors[] = {
        {"w", BL_KIND_PARAM, BL_F32, 2, {3, 4}},
        {"w.m", BL_KIND_MOMENT1, BL_F32, 2, {3, 4}},
        {"h", BL_KIND_PARAM, BL_BF16, 1, {5}},
    };
    uint64_t at = 0;

    memset(list, 0, sizeof(*list));
    for (uint32_t t = 0; t < 3; t++) {
        uint64_t elems = bl_tensor_elems(&tensors[t]), lo = elems * rank / 2;
        struct bl_extent extent;
        uint32_t index;

        assert_int_equal(bl_extent_list_tensor(list, &tensors[t], &index, NULL), 0);
        bl_extent_whole(&extent, &tensors[t], index, lo, elems * (rank + 1) / 2);
        if (t == 0) { /* two boxes: rows 0 and 1, row 2 */
            bl_extent_whole(&extent, &tensors[t], index, 0, elems);
            extent.lo[0] = rank == 0 ? 0 : 2;
            extent.hi[0] = rank == 0 ? 2 : 3;
            extent.flat_hi = (extent.hi[0] - extent.lo[0]) * 4;
            lo = extent.lo[0] * 4;
        }
        extent.offset = at;
        assert_int_equal(bl_extent_list_add(list, &extent), 0);
        for (uint64_t k = 0; k < bl_extent_elems(&extent); k++) {
            float value = (float)(t * 100 + lo + k);
            uint16_t half;

            memcpy(&half, (uint8_t *)&value + 2, 2);
            memcpy(data + at, t == 2 ? (void *)&half : (void *)&value, t == 2 ? 2 : 4);
            at += t == 2 ? 2 : 4;
        }
    }
}

/* The state of good-zstd: enough floats for planes, small ones, and bytes. */
static void coded_init(struct bl_extent_list *list, uint8_t data[32768])
{
    static const struct bl_tensor tensors[] = {
        {"big", BL_KIND_PARAM, BL_F32, 2, {700, 3}}, {"half", BL_KIND_MOMENT1, BL_BF16, 1, {2049}},
        {"small", BL_KIND_PARAM, BL_F32, 2, {3, 4}}, {"bytes", BL_KIND_OTHER, BL_U8, 1, {5}},
        {"step", BL_KIND_OTHER, BL_I64, 0, {0}},
    };
    uint64_t at = 0;

    memset(list, 0, sizeof(*list));
    for (uint32_t t = 0; t < 5; t++) {
        uint32_t width = bl_dtype_bytes(tensors[t].dtype), index;
        struct bl_extent extent;

        assert_int_equal(bl_extent_list_tensor(list, &tensors[t], &index, NULL), 0);
        bl_extent_whole(&extent, &tensors[t], index, 0, bl_tensor_elems(&tensors[t]));
        extent.offset = at;
        assert_int_equal(bl_extent_list_add(list, &extent), 0);
        for (uint64_t k = 0; k < bl_extent_elems(&extent); k++, at += width) {
            float value = (float)((double)(k % 89) * 0.25 - 11.0) * (t == 1 ? 0.001f : 1.0f);
            uint64_t bits = k + 7;

            if (width == 4) {
                memcpy(&bits, &value, 4);
            } else if (width == 2) {
                memcpy(&bits, (uint8_t *)&value + 2, 2);
            }
            memcpy(data + at, &bits, width);
        }
        at = (at + 7) / 8 * 8;
    }
    assert_true(at <= 32768);
}

static void golden_save(const char *root, bool zstd)
{
    const struct ckpt_store_config config = {
        .path = root, .run = GOLDEN_RUN, .node = "n0", .create = true, .shared = true};
    const struct ckpt_attempt attempt = {7, 2, 1, 1};
    struct ckpt_part parts[2] = {0};
    struct ckpt_manifest manifest = {
        .run = GOLDEN_RUN,
        .generation = 2,
        .line = 1,
        .step = 7,
        .function_id = 0x0123456789abcdef,
        .samples = 56,
        .seed = 18446744073709551615u,
        .lanes = 4,
        .layout = {zstd ? 1 : 2, zstd ? 1 : 2, 1, 1, 1},
        .metrics = {2.5, 3584, 1735689600},
        .job = strdup("{\"name\":\"golden\"}"),
        .writer = "belay golden",
        .parts = parts,
        .part_count = zstd ? 1 : 2,
    };
    struct ckpt_commit_result committed;
    struct ckpt_store *store;
    struct bl_errmsg why = {0};

    snprintf(manifest.codec, sizeof(manifest.codec), "%s", zstd ? "zstd" : "none");
    assert_int_equal(ckpt_store_open(&store, &config, NULL), 0);
    assert_int_equal(ckpt_attempt_begin(store, &attempt, NULL), 0);
    for (uint32_t rank = 0; rank < manifest.part_count; rank++) {
        struct bl_extent_list list;
        uint8_t data[32768];
        struct ckpt_source source = {.list = &list, .base = data};
        char name[16];
        const struct ckpt_part_job job = {
            .name = name, .sources = &source, .source_count = 1, .codec = manifest.codec};
        struct ckpt_part_result result;

        snprintf(name, sizeof(name), "part-%04u", rank);
        if (zstd) {
            coded_init(&list, data);
        } else {
            tiny_init(&list, data, rank);
        }
        assert_int_equal(ckpt_save_part(store, &attempt, &job, &result, NULL), 0);
        snprintf(parts[rank].name, sizeof(parts[rank].name), "%s", name);
        snprintf(parts[rank].node, sizeof(parts[rank].node), "n%u", rank);
        parts[rank].bytes = result.bytes;
        parts[rank].index_digest = result.index_digest;
        bl_extent_list_close(&list);
    }
    if (ckpt_commit(store, &attempt, &manifest, &committed, &why) != 0) {
        fail_msg("%s", why.text);
    }
    for (uint32_t rank = 0; rank < 2; rank++) {
        bl_extent_list_close(&parts[rank].held);
    }
    free(manifest.job);
    ckpt_store_close(store);
}

static char *read_whole(const char *dir, const char *name, size_t *ret_bytes)
{
    char path[1024];
    char *data = NULL;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    if (ckpt_io_read_file(ckpt_io_real(), path, 1 << 20, &data, ret_bytes, NULL) != 0) {
        fail_msg("%s: cannot be read", path);
    }
    return data;
}

static void test_golden_same_state_gives_the_same_bytes(void **state)
{
    static const char *const files[] = {
        "BELAY",
        "latest",
        GOLDEN_DIR "/manifest.json",
        GOLDEN_DIR "/part-0000.safetensors",
        GOLDEN_DIR "/part-0000.index",
        GOLDEN_DIR "/part-0001.safetensors",
        GOLDEN_DIR "/part-0001.index",
    };
    char root[256], good[600];

    (void)state;
    sample_dir_make(root, NULL);
    golden_save(root, false);
    snprintf(good, sizeof(good), "%s/good", golden);
    for (uint32_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        size_t wanted_bytes = 0, bytes = 0;
        char *wanted = read_whole(good, files[i], &wanted_bytes);
        char *found = read_whole(root, files[i], &bytes);

        if (bytes != wanted_bytes || memcmp(found, wanted, bytes) != 0) {
            fail_msg("%s differs from the golden one", files[i]);
        }
        free(wanted);
        free(found);
    }
    sample_dir_remove(root);
}

static void test_golden_is_read_in_another_cut(void **state)
{
    struct ckpt_store_config config = {0};
    const struct ckpt_verify_job job = {.full = true};
    struct ckpt_verify_result verified;
    struct ckpt_load_result result;
    struct ckpt_store *store;
    struct bl_extent_list list = {0};
    struct bl_tensor w = {"w", BL_KIND_PARAM, BL_F32, 2, {3, 4}};
    struct bl_tensor m = {"w.m", BL_KIND_MOMENT1, BL_F32, 2, {3, 4}};
    struct bl_extent extent;
    struct ckpt_dest dest;
    float data[7];
    char good[600];
    uint32_t index;

    (void)state;
    snprintf(good, sizeof(good), "%s/good", golden);
    config.path = good;
    assert_int_equal(ckpt_store_open(&store, &config, NULL), 0);
    assert_int_equal(ckpt_verify(store, GOLDEN_DIR, &job, &verified, NULL), 0);
    assert_int_equal(verified.findings, 0);
    assert_int_equal(bl_extent_list_tensor(&list, &w, &index, NULL), 0);
    bl_extent_whole(&extent, &w, index, 0, 12); /* column 2 */
    extent.lo[1] = 2;
    extent.hi[1] = 3;
    extent.flat_hi = 3;
    assert_int_equal(bl_extent_list_add(&list, &extent), 0);
    assert_int_equal(bl_extent_list_tensor(&list, &m, &index, NULL), 0);
    bl_extent_whole(&extent, &m, index, 4, 8); /* over the border between the parts */
    extent.offset = 12;
    assert_int_equal(bl_extent_list_add(&list, &extent), 0);
    dest = (struct ckpt_dest){&list, data};
    assert_int_equal(ckpt_load(store, GOLDEN_DIR, &dest, 1, &result, NULL), 0);
    for (int i = 0; i < 3; i++) {
        assert_true(data[i] == (float)(2 + 4 * i));
    }
    for (int i = 0; i < 4; i++) {
        assert_true(data[3 + i] == (float)(104 + i));
    }
    bl_extent_list_close(&list);
    ckpt_store_close(store);
}

static void test_golden_of_codec_zstd_is_read(void **state)
{
    struct ckpt_store_config config = {0};
    const struct ckpt_verify_job job = {.full = true};
    struct ckpt_verify_result verified;
    struct ckpt_load_result result;
    struct ckpt_store *store;
    struct bl_extent_list list;
    uint8_t *wanted = malloc(32768), *found = malloc(32768);
    struct ckpt_dest dest;
    char good[600];

    (void)state;
    assert_non_null(wanted);
    assert_non_null(found);
    memset(wanted, 0, 32768);
    memset(found, 0, 32768);
    coded_init(&list, wanted);
    snprintf(good, sizeof(good), "%s/good-zstd", golden);
    config.path = good;
    assert_int_equal(ckpt_store_open(&store, &config, NULL), 0);
    assert_int_equal(ckpt_verify(store, GOLDEN_DIR, &job, &verified, NULL), 0);
    assert_int_equal(verified.findings, 0);
    dest = (struct ckpt_dest){&list, found};
    assert_int_equal(ckpt_load(store, GOLDEN_DIR, &dest, 1, &result, NULL), 0);
    assert_memory_equal(found, wanted, 32768);
    bl_extent_list_close(&list);
    ckpt_store_close(store);
    free(wanted);
    free(found);
}

static void check_bad(const char *root)
{
    struct ckpt_store_config config = {.path = root};
    const struct ckpt_verify_job job = {.full = true};
    struct ckpt_verify_result verified = {0};
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};
    size_t bytes = 0;
    char *expect = read_whole(root, "expect", &bytes);

    expect[strcspn(expect, "\n")] = '\0';
    if (ckpt_store_open(&store, &config, &why) == 0) {
        assert_int_equal(ckpt_verify(store, GOLDEN_DIR, &job, &verified, &why), 0);
        assert_true(verified.findings > 0 || ckpt_store_damage(store)[0] != '\0');
        if (ckpt_store_damage(store)[0] != '\0') {
            snprintf(why.text, sizeof(why.text), "%s", ckpt_store_damage(store));
        }
        ckpt_store_close(store);
    }
    if (strstr(why.text, expect) == NULL) {
        fail_msg("%s: \"%s\" expected, found \"%s\"", root, expect, why.text);
    }
    free(expect);
}

static void test_golden_bad_ones_are_refused_by_name(void **state)
{
    char path[600];
    struct dirent *ent;
    uint32_t count = 0;
    DIR *dir;

    (void)state;
    snprintf(path, sizeof(path), "%s/bad", golden);
    dir = opendir(path);
    assert_non_null(dir);
    while ((ent = readdir(dir)) != NULL) {
        char root[900];

        if (ent->d_name[0] != '.') {
            snprintf(root, sizeof(root), "%s/%s", path, ent->d_name);
            check_bad(root);
            count++;
        }
    }
    closedir(dir);
    assert_true(count >= 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_same_state_gives_the_same_bytes),
        cmocka_unit_test(test_golden_is_read_in_another_cut),
        cmocka_unit_test(test_golden_of_codec_zstd_is_read),
        cmocka_unit_test(test_golden_bad_ones_are_refused_by_name),
    };
    const char *source = getenv("BELAY_SOURCE");

    if (getenv("BELAY_GOLDEN_WRITE") != NULL) {
        char zstd[600];

        golden_save(getenv("BELAY_GOLDEN_WRITE"), false);
        snprintf(zstd, sizeof(zstd), "%s-zstd", getenv("BELAY_GOLDEN_WRITE"));
        golden_save(zstd, true);
        return 0;
    }
    snprintf(golden, sizeof(golden), "%s/tests/golden/v1", source == NULL ? "." : source);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
