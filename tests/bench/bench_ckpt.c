/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures the checkpoint library on a large state, one command a line on standard input, one JSON
 * object a line on standard output, so that a script can put other programs' measurements between
 * them. ./bench is that script. Times are of the wall; cpu_ms is of all threads of this process.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "ckpt/ckpt.h"
#include "ckpt/ckpt_io.h"
#include "tests/bench/bench_codec.h"
#include "tests/bench/bench_state.h"

#define BENCH_RUN "bench-ckpt"

struct bench {
    struct bench_state state;
    struct ckpt_io io;
    const char *root;
    struct ckpt_store *store;
    uint64_t step;
};

static void usage(FILE *to)
{
    fputs("Usage: bench-ckpt --state ROOT --root DIR [--bytes N]\n"
          "       bench-ckpt --run COMMAND [ARGUMENT...]\n"
          "\n"
          "Repeats the newest checkpoint of ROOT to N bytes (default 1 GiB) in memory and\n"
          "then reads commands, each answered by one JSON object on a line:\n"
          "\n"
          "  save CODEC   write a checkpoint of it under DIR, durably, and commit it;\n"
          "               only the newest two are kept\n"
          "  load         read the newest one back and check its digest\n"
          "  encode N     the first N bytes of it through the codec and through zstd -1,\n"
          "               one thread, in turns\n"
          "  rate N       saves and loads keep to N bytes a second; 0: as fast as it goes\n"
          "  io WAY...    how files are written and read from here on: uring (all that\n"
          "               there is), pwrite, nodirect, noregister\n"
          "  depth N      buffers in flight from here on; 0: as the library has it\n"
          "  quit\n"
          "\n"
          "With --run it starts a command, its output on standard error, and prints how\n"
          "long it took, its exit code and its peak memory.\n",
          to);
}

static uint64_t now_us(void)
{
    return bl_now_ns() / 1000;
}

static double cpu_ms(void)
{
    struct rusage use;

    BL_ASSERT(getrusage(RUSAGE_SELF, &use) == 0);
    return 1e3 * (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           1e-3 * (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
}

static const char *flag(bool on)
{
    return on ? "true" : "false";
}

static const char *way(enum ckpt_io_path path)
{
    return path == CKPT_IO_URING ? "io_uring" : "pwrite";
}

/* Commits the one part of the save. */
static int save_commit(struct bench *bench, const struct ckpt_attempt *attempt, const char *codec,
                       const struct ckpt_part_result *part, struct bl_errmsg *msg)
{
    struct ckpt_commit_result done = {0};
    struct ckpt_manifest manifest = {
        .run = BENCH_RUN,
        .generation = attempt->generation,
        .line = 1,
        .step = attempt->step,
        .lanes = 1,
        .layout = {1, 1, 1, 1, 1},
        .state = part->state,
        .part_count = 1,
    };
    int rc = 0;

    snprintf(manifest.codec, sizeof(manifest.codec), "%s",
             strcmp(codec, "none") == 0 ? "none" : "zstd");
    manifest.parts = calloc(1, sizeof(*manifest.parts));
    if (manifest.parts == NULL) {
        return bl_err_code(msg, -ENOMEM, "manifest");
    }
    snprintf(manifest.parts[0].name, sizeof(manifest.parts[0].name), "%s", part->name);
    snprintf(manifest.parts[0].node, sizeof(manifest.parts[0].node), "n0");
    manifest.parts[0].bytes = part->bytes;
    manifest.parts[0].raw_bytes = part->raw_bytes;
    manifest.parts[0].index_digest = part->index_digest;
    rc = ckpt_commit(bench->store, attempt, &manifest, &done, msg);
    ckpt_manifest_close(&manifest);
    return rc;
}

static int bench_save(struct bench *bench, const char *codec, struct bl_errmsg *msg)
{
    const struct ckpt_attempt attempt = {++bench->step, 1, 1, bl_random_u64()};
    const struct ckpt_source source = {.list = &bench->state.list, .base = bench->state.data};
    const struct ckpt_part_job job = {
        .name = "part-0000",
        .sources = &source,
        .source_count = 1,
        .codec = codec,
        .expect = &bench->state.digest,
    };
    struct ckpt_retain_result kept;
    struct ckpt_part_result part = {0};
    uint64_t started = now_us(), done;
    double cpu = cpu_ms();
    int rc = ckpt_attempt_begin(bench->store, &attempt, msg);

    rc = rc < 0 ? rc : ckpt_save_part(bench->store, &attempt, &job, &part, msg);
    rc = rc < 0 ? rc : save_commit(bench, &attempt, codec, &part, msg);
    done = now_us();
    cpu = cpu_ms() - cpu;
    if (rc == 0) { /* what a run does later, at leisure */
        rc = ckpt_retain(bench->store, 2, NULL, 0, &kept, msg);
        rc = rc < 0 ? rc : ckpt_sweep(bench->store, 1, attempt.step, msg);
    }
    if (rc == 0) {
        printf("{\"did\":\"save\",\"codec\":\"%s\",\"ms\":%.1f,\"part_ms\":%.1f,\"cpu_ms\":%.1f,"
               "\"bytes\":%llu,\"raw_bytes\":%llu,\"path\":\"%s\",\"direct\":%s,"
               "\"registered\":%s,\"recycled\":%s,\"note\":\"%s\"}\n",
               codec, 1e-3 * (double)(done - started), 1e-3 * (double)part.elapsed_us, cpu,
               (unsigned long long)part.bytes, (unsigned long long)part.raw_bytes, way(part.path),
               flag(part.direct), flag(part.registered), flag(part.recycled), part.note);
    }
    return rc;
}

/* Loads over the state itself, whose digest is known. */
static int bench_load(struct bench *bench, struct bl_errmsg *msg)
{
    struct bl_state_digest digest = {{0, 0}};
    struct ckpt_scan scan = {0};
    struct ckpt_load_result result = {0};
    struct ckpt_dest dest = {.list = &bench->state.list, .base = bench->state.data};
    const struct ckpt_entry *entry;
    uint64_t started;
    double ms, cpu;
    int rc = ckpt_scan(bench->store, &scan, msg);

    if (rc < 0) {
        return rc;
    }
    entry = ckpt_scan_newest(&scan, NULL, 0);
    if (entry == NULL) {
        ckpt_scan_close(&scan);
        return bl_err_code(msg, BL_ENOSTATE, "load");
    }
    memset(bench->state.data, 0xff, bench->state.bytes);
    cpu = cpu_ms();
    started = now_us();
    rc = ckpt_load(bench->store, entry->dir, &dest, 1, &result, msg);
    ms = 1e-3 * (double)(now_us() - started);
    cpu = cpu_ms() - cpu;
    ckpt_scan_close(&scan);
    if (rc < 0) {
        return rc;
    }
    bl_extent_list_digest(&bench->state.list, bench->state.data, &digest);
    if (!bl_state_digest_equal(&digest, &bench->state.digest)) {
        return bl_err(msg, BL_EDIGEST, "load: the state came back different");
    }
    printf("{\"did\":\"load\",\"ms\":%.1f,\"cpu_ms\":%.1f,\"bytes\":%llu,\"read_bytes\":%llu,"
           "\"path\":\"%s\",\"direct\":%s,\"registered\":%s}\n",
           ms, cpu, (unsigned long long)result.bytes_wanted, (unsigned long long)result.bytes_read,
           way(result.path), flag(result.direct), flag(result.registered));
    return 0;
}

static int bench_encode(struct bench *bench, uint64_t bytes, struct bl_errmsg *msg)
{
    struct bench_codec codec;
    int rc = bench_codec_measure(&bench->state, bytes, &codec, msg);

    if (rc == 0) {
        printf("{\"did\":\"encode\",\"bytes\":%llu,\"stored_bytes\":%llu,\"encode_ms\":%.1f,"
               "\"decode_ms\":%.1f,\"zstd_stored_bytes\":%llu,\"zstd_encode_ms\":%.1f,"
               "\"zstd_decode_ms\":%.1f}\n",
               (unsigned long long)codec.bytes, (unsigned long long)codec.stored_bytes,
               codec.encode_ms, codec.decode_ms, (unsigned long long)codec.zstd_stored_bytes,
               codec.zstd_encode_ms, codec.zstd_decode_ms);
    }
    return rc;
}

static int bench_io(struct bench *bench, char *ways, struct bl_errmsg *msg)
{
    static const struct {
        const char *name;
        unsigned disable;
    } table[] = {
        {"uring", 0},
        {"pwrite", CKPT_IO_NO_URING},
        {"nodirect", CKPT_IO_NO_DIRECT},
        {"noregister", CKPT_IO_NO_REGISTER},
    };
    unsigned disable = 0;

    for (char *word = strtok(ways, " "); word != NULL; word = strtok(NULL, " ")) {
        size_t i = 0;

        while (i < sizeof(table) / sizeof(*table) && strcmp(table[i].name, word) != 0) {
            i++;
        }
        if (i == sizeof(table) / sizeof(*table)) {
            return bl_err(msg, -EINVAL, "io %s: uring, pwrite, nodirect or noregister", word);
        }
        disable |= table[i].disable;
    }
    bench->io.disable = disable;
    printf("{\"did\":\"io\",\"disable\":%u}\n", disable);
    return 0;
}

static int number_parse(const char *text, uint64_t *ret, struct bl_errmsg *msg)
{
    char *end = NULL;

    errno = 0;
    *ret = strtoull(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0) {
        return bl_err(msg, -EINVAL, "'%s': a number expected", text);
    }
    return 0;
}

/* A command with a number. */
static int bench_number(struct bench *bench, const char *name, const char *text,
                        struct bl_errmsg *msg)
{
    uint64_t number = 0;
    int rc = number_parse(text, &number, msg);

    if (rc < 0) {
        return rc;
    }
    if (strcmp(name, "encode") == 0) {
        return bench_encode(bench, number, msg);
    }
    if (strcmp(name, "depth") == 0) {
        bench->io.queue_depth = number > 1024 ? 1024 : (uint32_t)number;
    } else if (strcmp(name, "rate") == 0) {
        bench->io.rate_max = number;
    } else {
        return bl_err(msg, -EINVAL, "unknown command '%s'", name);
    }
    printf("{\"did\":\"%s\",\"value\":%llu}\n", name, (unsigned long long)number);
    return 0;
}

/* One line; 1 ends it all. */
static int bench_command(struct bench *bench, char *line, struct bl_errmsg *msg)
{
    char *rest;

    line[strcspn(line, "\n")] = '\0';
    rest = strchr(line, ' ');
    if (rest == NULL) {
        return strcmp(line, "load") == 0   ? bench_load(bench, msg)
               : strcmp(line, "quit") == 0 ? 1
                                           : bl_err(msg, -EINVAL, "unknown command '%s'", line);
    }
    *rest++ = '\0';
    if (strcmp(line, "save") == 0) {
        return bench_save(bench, rest, msg);
    }
    return strcmp(line, "io") == 0 ? bench_io(bench, rest, msg)
                                   : bench_number(bench, line, rest, msg);
}

static int bench_serve(struct bench *bench, struct bl_errmsg *msg)
{
    const struct ckpt_store_config config = {
        .path = bench->root,
        .run = BENCH_RUN,
        .node = "n0",
        .create = true,
        .reserve_bytes = 256 * 1024,
        .io = &bench->io,
    };
    struct ckpt_scan scan = {0};
    char line[256];
    int rc = ckpt_store_open(&bench->store, &config, msg);

    rc = rc < 0 ? rc : ckpt_scan(bench->store, &scan, msg);
    if (rc == 0) {
        bench->step = scan.count == 0 ? 0 : scan.entries[0].step; /* saves go on from there */
        ckpt_scan_close(&scan);
        printf("{\"did\":\"state\",\"bytes\":%llu,\"tensors\":%u}\n",
               (unsigned long long)bench->state.bytes, bench->state.list.tensor_count);
    }
    while (rc == 0 && fflush(stdout) == 0 && fgets(line, sizeof(line), stdin) != NULL) {
        rc = bench_command(bench, line, msg);
        if (rc == BL_ENOTBUILT) { /* the script shows it as a row of its own */
            printf("{\"did\":\"not built\"}\n");
            rc = 0;
        }
    }
    ckpt_store_close(bench->store);
    return rc < 0 ? rc : 0;
}

/* Runs a command and says what it cost. */
static int bench_run(char **argv)
{
    struct rusage use = {0};
    uint64_t started = now_us();
    int status = 0;
    pid_t child = vfork();

    if (child == 0) {
        dup2(2, 1);
        execvp(argv[0], argv);
        _exit(127);
    }
    if (child < 0 || wait4(child, &status, 0, &use) != child) {
        perror("bench-ckpt");
        return 3;
    }
    printf("{\"did\":\"run\",\"ms\":%.1f,\"cpu_ms\":%.1f,\"peak_kib\":%ld,\"code\":%d}\n",
           1e-3 * (double)(now_us() - started),
           1e3 * (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
               1e-3 * (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec),
           use.ru_maxrss, WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    return 0;
}

int main(int argc, char **argv)
{
    static struct bench bench;
    struct bl_errmsg why = {0};
    const char *from = NULL;
    uint64_t bytes = 1ull << 30;
    int rc;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            usage(stdout);
            return 0;
        }
        if (i + 1 < argc && strcmp(argv[i], "--run") == 0) {
            return bench_run(argv + i + 1);
        }
        if (i + 1 < argc && strcmp(argv[i], "--state") == 0) {
            from = argv[++i];
        } else if (i + 1 < argc && strcmp(argv[i], "--root") == 0) {
            bench.root = argv[++i];
        } else if (i + 1 < argc && strcmp(argv[i], "--bytes") == 0) {
            rc = number_parse(argv[++i], &bytes, &why);
            if (rc < 0) {
                fprintf(stderr, "bench-ckpt: --bytes %s\n", why.text);
                return 2;
            }
        } else {
            fprintf(stderr, "bench-ckpt: %s: unknown option; see --help\n", argv[i]);
            return 2;
        }
    }
    if (from == NULL || bench.root == NULL) {
        fprintf(stderr, "bench-ckpt: --state and --root are needed\n");
        return 2;
    }
    bench.io = *ckpt_io_real();
    rc = bench_state_init(&bench.state, from, bytes, &why);
    rc = rc < 0 ? rc : bench_serve(&bench, &why);
    bench_state_close(&bench.state);
    if (rc < 0) {
        fprintf(stderr, "bench-ckpt: %s\n", why.text[0] != '\0' ? why.text : bl_strerror(rc));
        return 3;
    }
    return 0;
}
