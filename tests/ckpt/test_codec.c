/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Codec zstd: planes and back, chunks and back, whole parts and back, bit by bit, whatever the
 * sizes, types and bits; what is no frame is refused. With BELAY_CODEC_WRITE=DIR two checkpoints of
 * one state, without and with the codec, are written there for tests/ckpt/zstd_part.py.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/digest.h"
#include "base/file.h"
#include "ckpt/codec.h"
#include "ckpt/codec_zstd.h"
#include "ckpt/crew.h"
#include "ckpt/part.h"
#include "tests/ckpt/sample.h"

#define CHUNK (1u << 20)

/* ---- Bits of every kind ---- */

enum filling { FILL_NOISE, FILL_ZERO, FILL_NORMAL, FILL_ODD, FILL_COUNT };

/* Weights are about normal; the odd ones are NaNs with payloads, infinities, denormals, both zeros.
 */
static void fill(void *to, size_t bytes, enum filling filling, uint64_t seed)
{
    static const uint32_t odd[] = {0x7fc00001, 0xffc12345, 0x7f800000, 0xff800000, 0x00000001,
                                   0x80000001, 0x007fffff, 0x80000000, 0x00000000, 0x7f7fffff};
    uint8_t *at = to;

    memset(to, 0, bytes);
    for (size_t i = 0; filling != FILL_ZERO && i < bytes; i += 4) {
        uint64_t random = bl_mix64(seed + i);
        float value = 0;
        uint32_t bits = (uint32_t)random;

        if (filling == FILL_NORMAL) {
            for (int k = 0; k < 6; k++) {
                value += (float)(bl_mix64(random + (uint64_t)k) >> 40) / (1 << 24) - 0.5f;
            }
            value *= 0.02f;
            memcpy(&bits, &value, 4);
        } else if (filling == FILL_ODD) {
            bits = odd[random % 10];
        }
        memcpy(at + i, &bits, bytes - i < 4 ? bytes - i : 4);
    }
}

/* ---- Planes ---- */

static void test_planes_are_what_the_format_says(void **state)
{
    static uint8_t words[8 * 300 + 8], planes[8 * 300 + 8], back[8 * 300 + 8];

    (void)state;
    fill(words, sizeof(words), FILL_NOISE, 7);
    for (uint32_t width = 2; width <= 8; width *= 2) {
        for (size_t count = 0; count <= 300; count++) {
            const uint8_t *from[CKPT_PLANES_MAX];
            uint8_t *to[CKPT_PLANES_MAX];
            size_t shift = count % 3; /* any alignment */

            for (uint32_t p = 0; p < width; p++) {
                from[p] = to[p] = planes + shift + p * count;
            }
            ckpt_planes_split(to, words + 1, count, width);
            for (uint32_t p = 0; p < width; p++) {
                for (size_t i = 0; i < count; i++) { /* byte p of the word rotated left by one */
                    uint8_t byte = words[1 + i * width + p];
                    uint8_t below = words[1 + i * width + (p + width - 1) % width];

                    assert_int_equal(from[p][i], (uint8_t)(byte << 1 | below >> 7));
                }
            }
            memset(back, 0xee, sizeof(back));
            ckpt_planes_join(back + 1, from, count, width);
            assert_memory_equal(back + 1, words + 1, count * width);
            assert_int_equal(back[0], 0xee);
            assert_int_equal(back[1 + count * width], 0xee);
        }
    }
}

/* ---- Chunks ---- */

static void check_chunk(struct ckpt_coder *coder, const uint8_t *data, uint32_t bytes,
                        uint32_t planes, bool raw)
{
    size_t bound = ckpt_codec_chunk_bound(bytes, planes), stored, sum = 0;
    uint32_t frames[CKPT_PLANES_MAX] = {0};
    uint8_t *out = malloc(bound), *back = malloc(bytes + 1u); /* exactly: sanitizers see more */

    assert_non_null(out);
    assert_non_null(back);
    stored = ckpt_codec_chunk_encode(coder, data, bytes, planes, raw, out, frames);
    for (uint32_t p = 0; p < planes; p++) {
        assert_true(frames[p] <= ckpt_zstd_raw_bytes(bytes / planes));
        sum += frames[p];
    }
    assert_true(sum == stored && stored <= bound);
    OK(ckpt_codec_chunk_decode(coder, out, frames, planes, back, bytes, msg));
    assert_memory_equal(back, data, bytes);
    free(out);
    free(back);
}

static void test_chunks_come_back_whatever_is_in_them(void **state)
{
    static const uint32_t counts[] = {1, 2, 31, 255, 2047, 2048, 2049, 16384, 20001, 65536};
    struct ckpt_coder *coder;
    uint8_t *data = malloc(CHUNK);

    (void)state;
    assert_non_null(data);
    OK(ckpt_coder_new(&coder, CHUNK, msg));
    for (int filling = 0; filling < FILL_COUNT; filling++) {
        fill(data, CHUNK, (enum filling)filling, 3);
        for (uint32_t planes = 1; planes <= 8; planes *= 2) {
            for (uint32_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
                check_chunk(coder, data, counts[i] * planes, planes, false);
            }
            check_chunk(coder, data, CHUNK, planes, true);
            check_chunk(coder, data, CHUNK, planes, false);
        }
    }
    ckpt_coder_free(coder);
    free(data);
}

static void test_frames_that_are_none_are_refused(void **state)
{
    uint8_t data[8192], frame[9000], twice[18000], back[8192];
    struct ckpt_coder *coder;
    uint32_t stored[CKPT_PLANES_MAX];
    size_t bytes;

    (void)state;
    OK(ckpt_coder_new(&coder, CHUNK, msg));
    fill(data, sizeof(data), FILL_ZERO, 1);
    for (int raw = 0; raw < 2; raw++) {
        struct bl_errmsg why = {0};

        bytes = ckpt_codec_chunk_encode(coder, data, sizeof(data), 1, raw != 0, frame, stored);
        OK(ckpt_codec_frame_decode(coder, frame, bytes, back, sizeof(back), msg));
        for (size_t cut = 0; cut < bytes; cut += 1 + cut / 7) { /* cut anywhere */
            uint8_t *exact = malloc(cut + 1);

            assert_non_null(exact);
            memcpy(exact, frame, cut);
            assert_int_equal(ckpt_codec_frame_decode(coder, exact, cut, back, sizeof(back), &why),
                             BL_EFORMAT);
            free(exact);
        }
        /* Another size than said, both ways; two frames; something behind it. */
        assert_int_equal(ckpt_codec_frame_decode(coder, frame, bytes, back, 8191, NULL),
                         BL_EFORMAT);
        memcpy(twice, frame, bytes);
        memcpy(twice + bytes, frame, bytes);
        assert_int_equal(ckpt_codec_frame_decode(coder, twice, 2 * bytes, back, 8192, NULL),
                         BL_EFORMAT);
        assert_int_equal(ckpt_codec_frame_decode(coder, twice, bytes + 1, back, 8192, NULL),
                         BL_EFORMAT);
        assert_non_null(strstr(why.text, "zstd"));
    }
    bytes = ckpt_codec_chunk_encode(coder, data, 100, 1, true, frame, stored);
    assert_int_equal(ckpt_codec_frame_decode(coder, frame, bytes, back, 101, NULL), BL_EFORMAT);
    /* A skippable frame is a frame for zstd, of nothing. */
    memcpy(frame, "\x5b\x2a\x4d\x18\x04\0\0\0abcd", 12);
    assert_int_equal(ckpt_codec_frame_decode(coder, frame, 12, back, 1, NULL), BL_EFORMAT);
    ckpt_coder_free(coder);
}

/* ---- The crew ---- */

static void crew_square(void *arg, uint32_t job, uint32_t worker)
{
    uint64_t *numbers = arg;

    (void)worker;
    numbers[job] = numbers[job] * numbers[job] + 1;
}

static void test_crew_does_every_job_once_with_any_number_of_threads(void **state)
{
    (void)state;
    for (uint32_t threads = 1; threads <= 5; threads++) {
        uint64_t numbers[8];
        struct ckpt_crew *crew;

        OK(ckpt_crew_new(&crew, threads, 8, crew_square, numbers, msg));
        for (uint32_t i = 0; i < 2000 + 8; i++) {
            if (i >= 8) { /* the oldest must be done, once */
                uint64_t n = i - 8;

                ckpt_crew_wait(crew, i % 8);
                assert_true(numbers[i % 8] == n * n + 1);
            }
            if (i < 2000) {
                numbers[i % 8] = i;
                ckpt_crew_submit(crew, i % 8);
            }
        }
        ckpt_crew_submit(crew, 3); /* nobody waits for it */
        ckpt_crew_free(crew);
    }
}

/* ---- Parts ---- */

static char root[256];

static int setup(void **state)
{
    (void)state;
    sample_dir_make(root, access("/dev/shm", W_OK) == 0 ? "/dev/shm" : NULL);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    sample_dir_remove(root);
    return 0;
}

/* Every dtype; sizes around those where the cutting changes; fillings in turn. */
static const struct {
    const char *name;
    enum bl_dtype dtype;
    uint64_t elems;
} kinds[] = {
    {"f32.one", BL_F32, 1},
    {"f32.2047", BL_F32, 2047},
    {"f32.2048", BL_F32, 2048},
    {"f32.2049", BL_F32, 2049},
    {"f32.chunk", BL_F32, 262144},
    {"f32.chunk.5", BL_F32, 262149},
    {"f32.chunk.t", BL_F32, 265144},
    {"f64.3001", BL_F64, 3001},
    {"f64.chunk.7", BL_F64, 131079},
    {"bf16.9", BL_BF16, 9},
    {"bf16.chunk.3", BL_BF16, 524291},
    {"f16.4097", BL_F16, 4097},
    {"i64.1000", BL_I64, 1000},
    {"i32.77777", BL_I32, 77777},
    {"u8.300001", BL_U8, 300001},
};
#define KINDS (sizeof(kinds) / sizeof(kinds[0]))

struct mixed { /* the state that is made of them, or what is loaded of it */
    struct bl_extent_list list;
    uint8_t *data;
    uint64_t bytes;
};

/* Elements [num/den, num+1/den) of every tensor; filled or zero. */
static void mixed_init(struct mixed *mixed, uint64_t num, uint64_t den, bool filled)
{
    memset(mixed, 0, sizeof(*mixed));
    for (uint32_t k = 0; k < KINDS; k++) {
        struct bl_tensor tensor = {.kind = BL_KIND_PARAM, .dtype = kinds[k].dtype, .dims = 1};
        struct bl_extent extent;
        uint32_t index;

        snprintf(tensor.name, sizeof(tensor.name), "%s", kinds[k].name);
        tensor.shape[0] = kinds[k].elems;
        assert_int_equal(bl_extent_list_tensor(&mixed->list, &tensor, &index, NULL), 0);
        bl_extent_whole(&extent, &tensor, index, kinds[k].elems * num / den,
                        kinds[k].elems * (num + 1) / den);
        mixed->bytes = (mixed->bytes + 7) / 8 * 8;
        extent.offset = mixed->bytes;
        if (bl_extent_elems(&extent) > 0) {
            mixed->bytes += bl_extent_elems(&extent) * bl_dtype_bytes(tensor.dtype);
            assert_int_equal(bl_extent_list_add(&mixed->list, &extent), 0);
        }
    }
    mixed->data = calloc(1, mixed->bytes + 1);
    assert_non_null(mixed->data);
    for (uint32_t e = 0; filled && e < mixed->list.extent_count; e++) {
        const struct bl_extent *extent = &mixed->list.extents[e];
        uint32_t width = bl_dtype_bytes(mixed->list.tensors[extent->tensor].dtype);
        uint8_t *whole = malloc(kinds[extent->tensor].elems * width);

        assert_non_null(whole);
        fill(whole, kinds[extent->tensor].elems * width,
             (enum filling)((extent->tensor + 2) % FILL_COUNT), extent->tensor);
        memcpy(mixed->data + extent->offset, whole + extent->flat_lo * width,
               bl_extent_elems(extent) * width);
        free(whole);
    }
}

static void mixed_close(struct mixed *mixed)
{
    bl_extent_list_close(&mixed->list);
    free(mixed->data);
}

static int mixed_fetch(void *arg, uint32_t extent, uint64_t lo, uint64_t hi, void *dest,
                       struct bl_errmsg *msg)
{
    const struct mixed *mixed = arg;
    const struct bl_extent *from = &mixed->list.extents[extent];
    uint32_t width = bl_dtype_bytes(mixed->list.tensors[from->tensor].dtype);

    (void)msg;
    memcpy(dest, mixed->data + from->offset + lo * width, (hi - lo) * width);
    return 0;
}

/* Saves the mixed state in `parts` parts at `step` and commits. Returns the parts' stored bytes. */
static uint64_t mixed_save(struct ckpt_store *store, const char *codec, uint64_t step,
                           uint32_t parts, bool pulled)
{
    const struct ckpt_attempt attempt = {step, 1, 1, 9};
    struct ckpt_manifest manifest = {.run = SAMPLE_RUN,
                                     .generation = 1,
                                     .line = 1,
                                     .step = step,
                                     .lanes = 1,
                                     .layout = {parts, parts, 1, 1, 0},
                                     .metrics = {2.5, 1, 1},
                                     .part_count = parts};
    struct ckpt_commit_result committed;
    uint64_t bytes = 0;

    snprintf(manifest.codec, sizeof(manifest.codec), "%s", codec);
    manifest.parts = calloc(parts, sizeof(*manifest.parts));
    OK(ckpt_attempt_begin(store, &attempt, msg));
    for (uint32_t p = 0; p < parts; p++) {
        struct ckpt_part *part = &manifest.parts[p];
        struct mixed mixed;
        struct ckpt_source source = {.list = &mixed.list};
        const struct ckpt_part_job job = {
            .name = part->name, .sources = &source, .source_count = 1, .codec = codec};
        struct ckpt_part_result result;

        mixed_init(&mixed, p, parts, true);
        source.base = pulled ? NULL : mixed.data;
        source.fetch = pulled ? mixed_fetch : NULL;
        source.arg = &mixed;
        snprintf(part->name, sizeof(part->name), "part-%04u", p);
        snprintf(part->node, sizeof(part->node), "n0");
        OK(ckpt_save_part(store, &attempt, &job, &result, msg));
        part->bytes = result.bytes;
        part->index_digest = result.index_digest;
        bytes += result.bytes;
        mixed_close(&mixed);
    }
    OK(ckpt_commit(store, &attempt, &manifest, &committed, msg));
    ckpt_manifest_close(&manifest);
    return bytes;
}

static void mixed_check(struct ckpt_store *store, uint64_t step, uint64_t num, uint64_t den)
{
    char dir[64];
    struct mixed wanted, found;
    struct ckpt_dest dest;
    struct ckpt_load_result result;

    snprintf(dir, sizeof(dir), "step-%012llu.g1", (unsigned long long)step);
    mixed_init(&wanted, num, den, true);
    mixed_init(&found, num, den, false);
    dest = (struct ckpt_dest){&found.list, found.data};
    OK(ckpt_load(store, dir, &dest, 1, &result, msg));
    assert_memory_equal(found.data, wanted.data, wanted.bytes);
    mixed_close(&wanted);
    mixed_close(&found);
}

static void test_parts_come_back_in_any_cut(void **state)
{
    static const char *const codecs[] = {"zstd", "auto", "none"};
    const struct ckpt_verify_job full = {.full = true};
    struct ckpt_io io = *ckpt_io_real();
    struct ckpt_store *store;

    (void)state;
    for (uint32_t i = 0; i < 6; i++) {
        struct ckpt_verify_result verified;
        struct bl_errmsg why = {0};
        char dir[64];

        io.codec_threads = 1 + i; /* none but the owner, and more */
        io.disable = i == 4 ? CKPT_IO_NO_URING | CKPT_IO_NO_DIRECT : 0;
        OK(sample_open(&store, root, &io, msg));
        mixed_save(store, codecs[i % 3], i + 1, 1 + i % 2 * 2, i >= 3);
        for (uint64_t den = 1; den <= 7; den += 3) {
            mixed_check(store, i + 1, den / 2, den);
        }
        snprintf(dir, sizeof(dir), "step-%012u.g1", i + 1);
        OK(ckpt_verify(store, dir, &full, &verified, &why));
        if (verified.findings != 0) {
            fail_msg("%s: %s", dir, why.text);
        }
        ckpt_store_close(store);
    }
}

static void test_only_what_is_wanted_is_read(void **state)
{
    struct bl_extent_list list = {0};
    struct bl_tensor tensor = {"f32.2048", BL_KIND_PARAM, BL_F32, 1, {2048}};
    struct ckpt_load_result result;
    struct bl_extent extent;
    struct ckpt_store *store;
    struct ckpt_dest dest;
    float data[10];
    uint32_t index;

    (void)state;
    OK(sample_open(&store, root, NULL, msg));
    mixed_save(store, "zstd", 1, 1, false);
    OK(bl_extent_list_tensor(&list, &tensor, &index, msg));
    bl_extent_whole(&extent, &tensor, index, 100, 110);
    assert_int_equal(bl_extent_list_add(&list, &extent), 0);
    dest = (struct ckpt_dest){&list, data};
    OK(ckpt_load(store, "step-000000000001.g1", &dest, 1, &result, msg));
    assert_true(result.bytes_read > 0 && result.bytes_read < 16384); /* its four planes */
    bl_extent_list_close(&list);
    ckpt_store_close(store);
}

/* Small tensors must not cost more than a little, and noise no more than its frames. */
static void test_nothing_grows_by_much(void **state)
{
    struct ckpt_store *store;
    uint64_t plain, coded;

    (void)state;
    sample_scale = 1;
    OK(sample_open(&store, root, NULL, msg));
    plain = mixed_save(store, "none", 1, 3, false);
    coded = mixed_save(store, "zstd", 2, 3, false);
    assert_true(coded < plain);
    ckpt_store_close(store);
}

static void test_trained_weights_shrink(void **state)
{
    const char *dir = getenv("BELAY_TEST_DATA");
    struct ckpt_coder *coder;
    char path[600], *data = NULL;
    size_t bytes = 0, stored = 0, raw = 0;
    uint8_t *out = malloc(ckpt_codec_chunk_bound(CHUNK, 4));

    (void)state;
    assert_non_null(out);
    snprintf(path, sizeof(path), "%s/stories260K.bin", dir == NULL ? "" : dir);
    if (dir == NULL || bl_file_read(path, 1 << 24, &data, &bytes, NULL) < 0) {
        free(out);
        skip();
    }
    OK(ckpt_coder_new(&coder, CHUNK, msg));
    for (size_t at = 28; at + 65536 <= bytes;
         at += 65536) { /* behind its header; a layer's scale */
        uint32_t frames[CKPT_PLANES_MAX];

        stored += ckpt_codec_chunk_encode(coder, data + at, 65536, 4, false, out, frames);
        raw += 65536;
    }
    print_message("trained weights: ratio %.4f\n", (double)raw / (double)stored);
    assert_true((double)raw / (double)stored > 1.15);
    ckpt_coder_free(coder);
    free(data);
    free(out);
}

/* For the test that reads parts with other programs. */
static int write_for_others(const char *dir)
{
    struct ckpt_store *store;

    if (sample_open(&store, dir, NULL, NULL) < 0) {
        return 3;
    }
    mixed_save(store, "none", 1, 2, false);
    mixed_save(store, "zstd", 2, 2, false);
    ckpt_store_close(store);
    return 0;
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_planes_are_what_the_format_says),
        cmocka_unit_test(test_chunks_come_back_whatever_is_in_them),
        cmocka_unit_test(test_frames_that_are_none_are_refused),
        cmocka_unit_test(test_crew_does_every_job_once_with_any_number_of_threads),
        TEST(test_parts_come_back_in_any_cut),
        TEST(test_only_what_is_wanted_is_read),
        TEST(test_nothing_grows_by_much),
        cmocka_unit_test(test_trained_weights_shrink),
    };

    if (getenv("BELAY_CODEC_WRITE") != NULL) {
        return write_for_others(getenv("BELAY_CODEC_WRITE"));
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
