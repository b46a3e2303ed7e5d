/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Damage, exhaustively: every bit of every file of a tiny checkpoint flipped, every file cut to
 * every length, and in a larger one the ends and the middle of every frame and table. Each time the
 * verification must find it and name the file, a load must give the true bytes or refuse, and a
 * scan must not take the checkpoint for another one. ckpt-tool must say the same.
 *
 *     test_crash_every_bit [CODEC [all]]      all: also each bit of padding
 *
 * `latest` is only a hint and `verified` only a help: damage to them must change nothing, and never
 * make a checkpoint count as read back.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zstd.h>

#include "ckpt/part.h"
#include "ckpt/store.h"
#include "tests/crash/scene.h"

#define NEWEST     2u
#define FRAMES_MAX 4096

static char root[256];
static struct ckpt_io io;
static char file_name[CKPT_PATH_MAX]; /* of the file under attack, in its directory */
static char file_path[CKPT_PATH_MAX];
static uint64_t tried;
static bool all_bits; /* also of padding */

static void build(uint32_t scale, uint32_t steps)
{
    struct ckpt_store *store;

    sample_scale = scale;
    io = *ckpt_io_real();
    io.disable = CKPT_IO_NO_URING | CKPT_IO_NO_DIRECT; /* a hundred thousand small looks */
    io.queue_depth = 1;
    sample_dir_make(root, access("/dev/shm", W_OK) == 0 ? "/dev/shm" : NULL);
    assert_int_equal(sample_open(&store, root, &io, NULL), 0);
    for (uint64_t step = 1; step <= steps; step++) {
        char dir[CKPT_DIR_MAX];

        assert_int_equal(sample_save(store, SAMPLE_FLAT, 4, step, 1, 1, NULL), 0);
        ckpt_dir_name(dir, step, 1);
        assert_int_equal(scene_tidy(store, dir, NULL), 0); /* marks it as verified */
    }
    ckpt_store_close(store);
    tried = 0;
}

static int setup_tiny(void **state)
{
    (void)state;
    build(0, NEWEST);
    return 0;
}

static int setup_large(void **state)
{
    (void)state;
    build(60, NEWEST);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    sample_dir_remove(root);
    return 0;
}

static const char *dir_of(uint64_t step)
{
    static char dir[CKPT_DIR_MAX];

    ckpt_dir_name(dir, step, 1);
    return dir;
}

/* Chooses the file: of the root when `step` is 0, else of the step's checkpoint. */
static void attack(uint64_t step, const char *name)
{
    snprintf(file_name, sizeof(file_name), "%.200s", name);
    snprintf(file_path, sizeof(file_path), "%.255s/%s%s%.200s", root, step == 0 ? "" : dir_of(step),
             step == 0 ? "" : "/", name);
}

static void attack_part(uint64_t step, const char *name, const char *suffix_none)
{
    char file[64];

    snprintf(file, sizeof(file), "%s%s", name,
             strcmp(sample_codec, "none") == 0 ? suffix_none : ".safetensors.zst");
    attack(step, file);
}

/* ---- The looks ---- */

static void on_finding(void *arg, const char *file, const char *text)
{
    bool *named = arg;

    (void)file;
    *named = *named || strstr(text, file_name) != NULL;
}

/* Does the verification find it and name the file? Also as a person would look, without a run. */
static bool is_found(void)
{
    const struct ckpt_store_config config = {.path = root, .io = &io};
    struct ckpt_verify_result result;
    struct ckpt_store *store;
    struct bl_errmsg why = {0};
    bool named = false;
    const struct ckpt_verify_job job = {.full = true, .finding = on_finding, .arg = &named};

    if (ckpt_store_open(&store, &config, &why) != 0) {
        return strstr(why.text, file_name) != NULL;
    }
    if (ckpt_store_damage(store)[0] != '\0') {
        named = strstr(ckpt_store_damage(store), file_name) != NULL;
    }
    assert_int_equal(ckpt_verify(store, dir_of(NEWEST), &job, &result, NULL), 0);
    ckpt_store_close(store);
    return named;
}

/* Loads step NEWEST in another layout. True bytes (else the test ends in sample_load), or an error
 * with the file's name. */
static void check_load(const char *what, uint64_t at)
{
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};
    int rc = sample_open(&store, root, &io, &why);

    rc = rc < 0 ? rc : sample_load(store, dir_of(NEWEST), SAMPLE_ROWS, 3, NEWEST, &why);
    if (rc < 0 && strstr(why.text, file_name) == NULL) {
        fail_msg("%s, %s %llu: the load's error does not name it: %s", file_name, what,
                 (unsigned long long)at, why.text);
    }
    ckpt_store_close(store);
}

/* The scan calls step NEWEST broken and names the file, or takes it for what it is; the older one
 * is good whatever happened. */
static void check_scan(const char *what, uint64_t at, bool must_see)
{
    struct ckpt_store *store = NULL;
    struct bl_errmsg why = {0};
    struct ckpt_scan scan;
    bool older = false, newest = false, named = false;

    if (sample_open(&store, root, &io, &why) != 0) {
        assert_non_null(strstr(why.text, file_name));
        return;
    }
    assert_int_equal(ckpt_scan(store, &scan, NULL), 0);
    for (uint32_t i = 0; i < scan.count; i++) {
        const struct ckpt_entry *entry = &scan.entries[i];

        older = older || (entry->step == NEWEST - 1 && entry->state == CKPT_GOOD);
        newest = newest || (entry->step == NEWEST && entry->state == CKPT_GOOD);
        named = named || (entry->step == NEWEST && strstr(entry->why, file_name) != NULL);
        assert_true(entry->state != CKPT_GOOD || entry->step <= NEWEST);
    }
    if (!older || newest == named || (must_see && !named)) {
        fail_msg("%s, %s %llu: the scan sees %s%s%s", file_name, what, (unsigned long long)at,
                 older ? "the older one " : "", newest ? "the newest " : "",
                 named ? "and names the file" : "");
    }
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
}

/* ---- The damage ---- */

static uint64_t file_bytes(void)
{
    struct stat st;

    assert_int_equal(stat(file_path, &st), 0);
    return (uint64_t)st.st_size;
}

static void flip(uint64_t at, uint32_t bit)
{
    int fd = open(file_path, O_RDWR | O_CLOEXEC);
    uint8_t byte;

    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, (off_t)at), 1);
    byte ^= (uint8_t)(1u << bit);
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    close(fd);
}

/* Flips one bit, looks, and flips it back. */
static void try_bit(uint64_t at, uint32_t bit, bool load, bool scan, bool scan_must_see)
{
    flip(at, bit);
    if (!is_found()) {
        fail_msg("%s: bit %u of byte %llu was flipped and not found", file_name, bit,
                 (unsigned long long)at);
    }
    if (load) {
        check_load("byte", at);
    }
    if (scan) {
        check_scan("byte", at, scan_must_see);
    }
    flip(at, bit);
    tried++;
}

/* Is byte `at` one of many spaces, of which one bit each is enough? */
static bool is_padding(const char *data, uint64_t at, uint64_t bytes)
{
    return !all_bits && at > 0 && at + 1 < bytes && memcmp(data + at - 1, "   ", 3) == 0;
}

/* `scan_must_see`: the file is read by a scan, so the newest checkpoint is not taken for good. */
static void try_every_bit(bool scan_must_see)
{
    size_t bytes = 0;
    char *data = NULL;

    assert_int_equal(ckpt_io_read_file(&io, file_path, 1 << 20, &data, &bytes, NULL), 0);
    assert_false(is_found());
    for (uint64_t at = 0; at < bytes; at++) {
        for (uint32_t bit = 0; bit < 8; bit++) {
            bool more = bit == at % 8;

            if (!more && is_padding(data, at, bytes)) {
                continue;
            }
            try_bit(at, bit, more, more && (scan_must_see || at % 16 == 0), scan_must_see);
        }
    }
    assert_false(is_found());
    free(data);
}

static void try_every_length(void)
{
    uint64_t bytes = file_bytes();
    char *data = malloc(bytes);
    int fd = open(file_path, O_RDWR | O_CLOEXEC);

    assert_true(data != NULL && fd >= 0);
    assert_int_equal(pread(fd, data, bytes, 0), bytes);
    for (uint64_t length = 0; length <= bytes + 1; length++) {
        if (length == bytes) {
            continue; /* one byte more is as wrong as one less */
        }
        assert_int_equal(ftruncate(fd, (off_t)length), 0);
        if (!is_found()) {
            fail_msg("%s: cut to %llu of %llu bytes and not found", file_name,
                     (unsigned long long)length, (unsigned long long)bytes);
        }
        if (length % 8 == 0) {
            check_load("cut to", length);
            check_scan("cut to", length, strcmp(file_name, "BELAY") != 0);
        }
        assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
        assert_int_equal(pwrite(fd, data, bytes, 0), bytes);
        tried++;
    }
    assert_false(is_found());
    close(fd);
    free(data);
}

static void tell(const char *what)
{
    printf("%s: %s, %llu bytes, %llu times\n", what, file_name, (unsigned long long)file_bytes(),
           (unsigned long long)tried);
    tried = 0;
}

static void test_every_bit_of_every_file_is_found_and_named(void **state)
{
    bool is_plain = strcmp(sample_codec, "none") == 0;

    (void)state;
    if (is_plain || all_bits) { /* these are the same with any codec */
        attack(0, "BELAY");
        try_every_bit(false);
        tell("every bit");
        attack(NEWEST, "manifest.json");
        try_every_bit(true);
        tell("every bit");
    }
    attack_part(NEWEST, "part-0000", ".safetensors");
    try_every_bit(false);
    tell("every bit");
    if (is_plain) {
        attack(NEWEST, "part-0001.index");
        try_every_bit(true);
        tell("every bit");
    }
}

static void test_every_length_of_every_file_is_found_and_named(void **state)
{
    (void)state;
    attack(0, "BELAY");
    try_every_length();
    attack(NEWEST, "manifest.json");
    try_every_length();
    attack_part(NEWEST, "part-0001", ".safetensors");
    try_every_length();
    if (strcmp(sample_codec, "none") == 0) {
        attack(NEWEST, "part-0000.index");
        try_every_length();
    }
    tell("every length");
}

/* What a scan says of step NEWEST and when it was read back. */
static uint64_t verified_at(void)
{
    struct ckpt_store *store = NULL;
    struct ckpt_scan scan;
    uint64_t unix_s = UINT64_MAX;

    assert_int_equal(sample_open(&store, root, &io, NULL), 0);
    assert_int_equal(ckpt_scan(store, &scan, NULL), 0);
    if (ckpt_scan_newest(&scan, NULL, 0)->step == NEWEST) {
        unix_s = ckpt_scan_newest(&scan, NULL, 0)->verified_unix_s;
    }
    ckpt_scan_close(&scan);
    ckpt_store_close(store);
    return unix_s;
}

static void test_every_bit_of_the_helps_changes_nothing(void **state)
{
    uint64_t truth = verified_at();

    (void)state;
    assert_true(truth > 0 && truth != UINT64_MAX);
    attack(NEWEST, "verified");
    for (uint64_t at = 0, bytes = file_bytes(); at < bytes; at++) {
        for (uint32_t bit = 0; bit < 8; bit++) {
            uint64_t said;

            flip(at, bit);
            said = verified_at();
            if (said != 0) {
                fail_msg("byte %llu: a damaged mark says %llu", (unsigned long long)at,
                         (unsigned long long)said);
            }
            flip(at, bit);
        }
    }
    attack(0, "latest");
    for (uint64_t at = 0, bytes = file_bytes(); at < bytes; at++) {
        flip(at, (uint32_t)at % 8);
        assert_int_equal(verified_at(), truth);
        flip(at, (uint32_t)at % 8);
    }
    assert_int_equal(unlink(file_path), 0);
    assert_int_equal(verified_at(), truth);
}

/* ---- Larger files: the regions ---- */

/* First bytes of each region: of a zstd file its frames, the seek table's entries and footer; else
 * the header, the data and each chunk. *ret_count regions and the end of the file behind them. */
static void regions(uint64_t *ret, uint32_t *ret_count)
{
    uint64_t bytes = file_bytes(), at = 0;
    char *data = NULL;
    size_t size = 0;
    uint32_t count = 0;

    if (strstr(file_name, ".zst") == NULL) {
        for (; at < bytes; at += at == 0 ? 4096 : CKPT_CHUNK_BYTES) {
            ret[count++] = at;
        }
    } else {
        assert_int_equal(ckpt_io_read_file(&io, file_path, bytes, &data, &size, NULL), 0);
        while (at < bytes) {
            size_t frame = ZSTD_findFrameCompressedSize(data + at, bytes - at);

            assert_false(ZSTD_isError(frame));
            ret[count++] = at;
            at += frame;
        }
        free(data);
    }
    ret[count] = bytes;
    *ret_count = count;
}

static void try_region(uint64_t from, uint64_t to)
{
    /* Head (magic, descriptor, sizes, block header), middle, and end of it. */
    uint64_t wanted[] = {from,   from + 4, from + 5, from + 6, from + 9, from + 12, (from + to) / 2,
                         to - 9, to - 5,   to - 4,   to - 1};

    for (uint32_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        if (wanted[i] >= from && wanted[i] < to) {
            try_bit(wanted[i], (uint32_t)(wanted[i] + i) % 8, i == 0 || i == 6, false, false);
        }
    }
}

static void test_every_region_of_a_larger_part_is_found_and_named(void **state)
{
    uint64_t starts[FRAMES_MAX + 1];
    uint32_t count = 0;

    (void)state;
    attack_part(NEWEST, "part-0000", ".safetensors");
    regions(starts, &count);
    assert_true(count > 2 && count <= FRAMES_MAX);
    for (uint32_t i = 0; i < count; i++) {
        try_region(starts[i], starts[i + 1]);
    }
    tell("every region");
}

/* ---- The command ---- */

static int tool(char *ret, size_t room)
{
    const char *build_dir = getenv("BELAY_BUILD");
    char command[900];
    FILE *pipe;
    size_t n;

    snprintf(command, sizeof(command), "'%s/ckpt-tool' verify '%s' 2>&1",
             build_dir == NULL ? "." : build_dir, root);
    pipe = popen(command, "r");
    assert_non_null(pipe);
    n = fread(ret, 1, room - 1, pipe);
    ret[n] = '\0';
    return WEXITSTATUS(pclose(pipe));
}

static void test_ckpt_tool_names_what_is_damaged(void **state)
{
    const char *files[] = {"BELAY", "manifest.json", "part-0000.safetensors", "part-0001.index"};
    char text[8192];

    (void)state;
    assert_int_equal(tool(text, sizeof(text)), 0);
    for (uint32_t i = 0; i < 4; i++) {
        if (i < 2) {
            attack(i == 0 ? 0 : NEWEST, files[i]);
        } else {
            attack_part(NEWEST, i == 2 ? "part-0000" : "part-0001",
                        i == 2 ? ".safetensors" : ".index");
        }
        for (uint64_t k = 0, bytes = file_bytes(); k < 4; k++) {
            uint64_t at = k * (bytes - 1) / 3;
            int code;

            flip(at, (uint32_t)k);
            code = tool(text, sizeof(text));
            if (code != 1 || strstr(text, file_name) == NULL) {
                fail_msg("%s, byte %llu: exit %d: %s", file_name, (unsigned long long)at, code,
                         text);
            }
            flip(at, (uint32_t)k);
        }
    }
    assert_int_equal(tool(text, sizeof(text)), 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
#define TINY(name) cmocka_unit_test_setup_teardown(name, setup_tiny, teardown)
        TINY(test_every_bit_of_every_file_is_found_and_named),
        TINY(test_every_length_of_every_file_is_found_and_named),
        TINY(test_every_bit_of_the_helps_changes_nothing),
        TINY(test_ckpt_tool_names_what_is_damaged),
        cmocka_unit_test_setup_teardown(test_every_region_of_a_larger_part_is_found_and_named,
                                        setup_large, teardown),
    };

    all_bits = argc > 2 && strcmp(argv[2], "all") == 0;
    if (!scene_has_codec(argc, argv)) {
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
