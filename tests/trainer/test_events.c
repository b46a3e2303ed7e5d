/* SPDX-License-Identifier: Apache-2.0 */
/* TensorBoard's event files, read back by the format's own rules. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "train_bench.h"
#include "trainer/tb_events.h"

static void test_check_sum_has_its_known_values(void **state)
{
    (void)state;
    /* RFC 3720, B.4 */
    uint8_t zeros[32] = {0}, ones[32], up[32];
    memset(ones, 0xff, sizeof ones);
    for (uint8_t i = 0; i < 32; i++) {
        up[i] = i;
    }
    assert_int_equal(tb_crc32c(zeros, 32), 0x8a9136aa);
    assert_int_equal(tb_crc32c(ones, 32), 0x62a8ab43);
    assert_int_equal(tb_crc32c(up, 32), 0x46dd794e);
    assert_int_equal(tb_crc32c("123456789", 9), 0xe3069283);
}

/* A field of a message: moves *at on. Only what the writer uses. */
struct field {
    uint64_t number, kind, varint;
    const uint8_t *data;
    uint64_t bytes;
};

static uint64_t read_varint(const uint8_t **at)
{
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
        uint8_t byte = *(*at)++;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            return value;
        }
    }
}

static struct field read_field(const uint8_t **at)
{
    struct field f = {.number = read_varint(at)};
    f.kind = f.number & 7;
    f.number >>= 3;
    if (f.kind == 0) {
        f.varint = read_varint(at);
        return f;
    }
    assert_true(f.kind == 1 || f.kind == 2 || f.kind == 5);
    f.bytes = f.kind == 2 ? read_varint(at) : f.kind == 1 ? 8 : 4;
    f.data = *at;
    *at += f.bytes;
    return f;
}

static uint32_t unmasked(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, 4);
    value -= 0xa282ead8;
    return value << 15 | value >> 17;
}

/* Adds "STEP version V", "STEP start" or "STEP TAG=VALUE" lines for the event. */
static void describe(const uint8_t *at, const uint8_t *end, char *text, size_t max)
{
    uint64_t step = 0;
    int has_time = 0;
    while (at < end) {
        struct field f = read_field(&at);
        size_t used = strlen(text);
        if (f.number == 1) {
            double wall;
            memcpy(&wall, f.data, 8);
            has_time = wall > 1.5e9;
        } else if (f.number == 2) {
            step = f.varint;
        } else if (f.number == 3) {
            snprintf(text + used, max - used, "%d version %.*s\n", (int)step, (int)f.bytes, f.data);
        } else if (f.number == 7) {
            assert_memory_equal(f.data, "\x08\x01", 2);
            snprintf(text + used, max - used, "%d start\n", (int)step);
        } else {
            assert_int_equal(f.number, 5);
            for (const uint8_t *v = f.data; v < f.data + f.bytes;) {
                struct field value = read_field(&v);
                const uint8_t *in = value.data;
                struct field tag = read_field(&in), number = read_field(&in);
                float x;
                memcpy(&x, number.data, 4);
                used = strlen(text);
                snprintf(text + used, max - used, "%d %.*s=%g\n", (int)step, (int)tag.bytes,
                         tag.data, (double)x);
            }
        }
    }
    assert_true(has_time && at == end);
}

static void read_events(const char *dir, char *text, size_t max)
{
    char pattern[256];
    glob_t files;
    static uint8_t data[65536];
    text[0] = 0;
    snprintf(pattern, sizeof pattern, "%s/events.out.tfevents.*", dir);
    assert_int_equal(glob(pattern, 0, NULL, &files), 0);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        FILE *f = fopen(files.gl_pathv[i], "re");
        assert_non_null(f);
        size_t bytes = fread(data, 1, sizeof data, f);
        fclose(f);
        for (size_t at = 0; at < bytes;) {
            uint64_t length;
            memcpy(&length, data + at, 8);
            assert_true(at + 16 + length <= bytes);
            assert_int_equal(unmasked(data + at + 8), tb_crc32c(data + at, 8));
            assert_int_equal(unmasked(data + at + 12 + length), tb_crc32c(data + at + 12, length));
            describe(data + at + 12, data + at + 12 + length, text, max);
            at += 16 + length;
        }
    }
    globfree(&files);
}

static void test_events_read_back(void **state)
{
    (void)state;
    char dir[64] = "/tmp/belay-events-XXXXXX", text[1024], command[96];
    struct tb_events *events;
    struct bl_errmsg msg = {{0}};
    assert_non_null(mkdtemp(dir));
    assert_int_equal(tb_events_open(&events, dir, &msg), 0);
    const struct tb_scalar scalars[] = {{"train/loss", 2.5}, {"train/lr", 1e-3}};
    tb_events_write(events, 300, scalars, 2);
    tb_events_write(events, 301, scalars, 1);
    tb_events_close(events);
    read_events(dir, text, sizeof text);
    assert_string_equal(text, "0 version brain.Event:2\n300 start\n300 train/loss=2.5\n"
                              "300 train/lr=0.001\n301 train/loss=2.5\n");
    snprintf(command, sizeof command, "rm -r %s", dir);
    assert_int_equal(system(command), 0);
    assert_int_equal(tb_events_open(&events, "/nonexistent/dir", &msg), -2 /* ENOENT */);
    assert_non_null(strstr(msg.text, "/nonexistent/dir"));
}

static void test_a_run_writes_every_step(void **state)
{
    (void)state;
    struct train_bench bench;
    char dir[96], digest[BL_STATE_DIGEST_TEXT_BYTES];
    static char text[65536];
    train_bench_open(&bench, 2, 0);
    snprintf(dir, sizeof dir, "%s/events", bench.dir);
    bench.job.train.eval_every = 2;
    const struct train_alone how = {
        .job = &bench.job, .ranks = 2, .steps = 3, .digest = 1, .tensorboard = dir};
    train_bench_run(&how, digest, NULL, 0);
    read_events(dir, text, sizeof text);
    assert_non_null(strstr(text, "\n1 start\n1 train/loss="));
    assert_non_null(strstr(text, "\n3 train/loss="));
    assert_non_null(strstr(text, "\n3 train/tokens_per_s="));
    assert_non_null(strstr(text, "\n2 eval/loss="));
    assert_null(strstr(text, "\n1 eval/loss="));
    assert_null(strstr(text, "\n4 "));
    train_bench_close(&bench);
}

/* A value of the last line of metrics.jsonl; the key must be there. */
static double metric(const char *path, const char *key)
{
    static char text[65536];
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    size_t bytes = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[bytes] = '\0';
    char *last = text, *next;
    while ((next = strchr(last, '\n')) != NULL && next[1] != '\0') {
        last = next + 1;
    }
    const char *at = strstr(last, key);
    assert_non_null(at);
    return strtod(at + strlen(key), NULL);
}

/* Multiply-adds of a token, counted here by hand: two FLOPs each, forward once, backward twice. */
static void test_mfu_is_what_the_job_says_the_processor_can(void **state)
{
    (void)state;
    struct train_bench bench;
    char dir[96], metrics[96], digest[BL_STATE_DIGEST_TEXT_BYTES];
    static char text[65536];
    train_bench_open(&bench, 2, 0);
    snprintf(dir, sizeof dir, "%s/events", bench.dir);
    snprintf(metrics, sizeof metrics, "%s/metrics.jsonl", bench.dir);
    const struct train_alone how = {.job = &bench.job,
                                    .ranks = 2,
                                    .steps = 2,
                                    .digest = 1,
                                    .metrics = metrics,
                                    .tensorboard = dir};
    const struct bl_job_model *m = &bench.job.model;
    assert_int_equal(m->arch, BL_ARCH_LLAMA);
    double kv = (double)m->dim / m->heads * m->kv_heads;
    double products = m->layers * (2.0 * m->dim * (m->dim + kv) + 3.0 * m->dim * m->hidden) +
                      (double)m->dim * m->vocab;
    double attention =
        (double)m->layers * m->dim * bench.job.train.seq_len; /* causal: half of both */
    bench.job.peak_flops = 3e9;
    train_bench_run(&how, digest, NULL, 0);
    double want = 6 * (products + attention) * metric(metrics, "\"tokens_per_s\":") / (2 * 3e9);
    double mfu = metric(metrics, "\"mfu\":");
    assert_true(mfu > 0.999 * want && mfu < 1.001 * want);
    read_events(dir, text, sizeof text);
    assert_non_null(strstr(text, "\n2 train/mfu="));
    train_bench_close(&bench);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_check_sum_has_its_known_values),
        cmocka_unit_test(test_events_read_back),
        cmocka_unit_test(test_a_run_writes_every_step),
        cmocka_unit_test(test_mfu_is_what_the_job_says_the_processor_can),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
