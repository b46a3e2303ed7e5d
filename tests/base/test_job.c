/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/file.h"
#include "base/job.h"

static struct bl_job job;
static struct bl_job other;

static const char good[] = "name: tiny\n"                       /* line 1 */
                           "ranks: 3\n"                         /* 2 */
                           "lanes: 4\n"                         /* 3 */
                           "model:\n"                           /* 4 */
                           "  layers: 2\n"                      /* 5 */
                           "  dim: 64\n"                        /* 6 */
                           "  heads: 4\n"                       /* 7 */
                           "  kv_heads: 2\n"                    /* 8 */
                           "data:\n"                            /* 9 */
                           "  files: [a.txt, /b/c.txt]\n"       /* 10 */
                           "train:\n"                           /* 11 */
                           "  global_batch: 16\n"               /* 12 */
                           "  micro_batch: 2\n"                 /* 13 */
                           "  seq_len: 64\n"                    /* 14 */
                           "  steps: 100\n"                     /* 15 */
                           "  betas: [0.8, 0.99]\n"             /* 16 */
                           "snapshot: {bytes_max: 64MiB}\n"     /* 17 */
                           "roots:\n"                           /* 18 */
                           "  - path: ckpt\n"                   /* 19 */
                           "    shared: true\n"                 /* 20 */
                           "    every: 10\n"                    /* 21 */
                           "  - {path: /fast, keep: 7}\n"       /* 22 */
                           "deadlines:\n"                       /* 23 */
                           "  lease: 3s\n"                      /* 24 */
                           "command: [./train, '', \"--x\"]\n"; /* 25 */

static int parse(const char *text, struct bl_errmsg *msg)
{
    memset(msg, 0, sizeof(*msg));
    return bl_job_parse(&job, text, strlen(text), "job.yaml", "/base", msg);
}

/* `good` with its line `line` (from 1) replaced; NULL leaves the line out. */
static const char *with_line(int line, const char *text)
{
    static char out[4096];
    size_t used = 0;
    int at = 1;
    for (const char *p = good; *p != '\0'; at++) {
        size_t bytes = strcspn(p, "\n") + 1;
        const char *from = at == line ? text : p;
        size_t take = at == line ? (text != NULL ? strlen(text) : 0) : bytes;
        memcpy(out + used, from != NULL ? from : "", take);
        used += take;
        if (at == line && text != NULL) {
            out[used++] = '\n';
        }
        p += bytes;
    }
    out[used] = '\0';
    return out;
}

static void test_job_file_is_read_with_defaults_filled_in(void **state)
{
    (void)state;
    struct bl_errmsg msg;
    int rc = parse(good, &msg);
    assert_string_equal(msg.text, "");
    assert_int_equal(rc, 0);
    assert_string_equal(job.name, "tiny");
    assert_string_equal(job.run_dir, "/base/belay-run");
    assert_int_equal(job.ranks, 3);
    assert_int_equal(job.lanes, 4);
    assert_int_equal(job.zero, 1);
    assert_int_equal(job.nodes_min, 1);
    assert_int_equal(job.model.hidden, 192);
    assert_int_equal(job.model.kv_heads, 2);
    assert_int_equal(job.model.vocab, 256);
    assert_true(job.model.rope_theta == 10000.0);
    assert_int_equal(job.data_file_count, 2);
    assert_string_equal(job.data_files[0], "/base/a.txt");
    assert_string_equal(job.data_files[1], "/b/c.txt");
    assert_string_equal(job.tokenizer, "bytes");
    assert_true(job.train.beta1 == 0.8 && job.train.beta2 == 0.99);
    assert_true(job.train.lr == 3e-4);
    assert_int_equal(job.snapshot_bytes_max, 64 << 20);
    assert_int_equal(job.snapshot_every, 1);
    assert_int_equal(job.root_count, 2);
    assert_string_equal(job.roots[0].path, "/base/ckpt");
    assert_int_equal(job.roots[0].shared, 1);
    assert_int_equal(job.roots[0].every, 10);
    assert_int_equal(job.roots[0].keep, 3);
    assert_string_equal(job.roots[1].path, "/fast");
    assert_int_equal(job.roots[1].every, 100);
    assert_int_equal(job.roots[1].keep, 7);
    assert_int_equal(job.deadlines.lease, 3000);
    assert_int_equal(job.deadlines.beat, 200);
    assert_int_equal(job.deadlines.save, 600000);
    assert_int_equal(job.command_count, 3);
    assert_string_equal(job.command[0], "./train");
    assert_string_equal(job.command[1], "");
    assert_string_equal(job.backend, "auto");
    assert_string_equal(job.codec, "auto");
}

static void test_job_gpt2_has_defaults_of_its_own(void **state)
{
    (void)state;
    struct bl_errmsg msg;
    struct bl_job again;
    assert_int_equal(parse(with_line(8, "  arch: gpt2\n"), &msg), 0);
    assert_int_equal(job.model.arch, BL_ARCH_GPT2);
    assert_int_equal(job.model.hidden, 256);
    assert_int_equal(job.model.context, 64);
    assert_int_equal(job.model.kv_heads, 4);
    assert_true(job.model.tied && job.model.bias);
    char *text = bl_job_to_json(&job);
    assert_non_null(text);
    assert_int_equal(bl_job_parse(&again, text, strlen(text), "frozen", "/", &msg), 0);
    assert_memory_equal(&again.model, &job.model, sizeof(job.model));
    free(text);
    assert_int_equal(parse(with_line(8, "  arch: gpt2\n  tied: false\n  bias: false\n"), &msg), 0);
    assert_false(job.model.tied || job.model.bias);
}

static void test_job_lanes_default_to_ranks(void **state)
{
    (void)state;
    struct bl_errmsg msg;
    assert_int_equal(parse(with_line(3, NULL), &msg), BL_ECONFIG); /* 16 is no multiple of 3 x 2 */
    assert_string_equal(msg.text,
                        "job.yaml:11:17: train.global_batch: 16 is no multiple of lanes x "
                        "micro_batch (3 x 2 = 6); near it: 12 or 18");
}

struct refusal {
    int line; /* of `good`, replaced by: */
    const char *text;
    int code;
    const char *error;
};

static const struct refusal refusals[] = {
    {2, "ranks: 4x", BL_ECONFIG, "job.yaml:2:8: ranks: must be an integer, not '4x'"},
    {2, "ranks: 0", BL_ECONFIG, "job.yaml:2:8: ranks: 0 is not within 1 and 16384"},
    {2, "ranks: 16385", BL_ECONFIG, "job.yaml:2:8: ranks: 16385 is not within 1 and 16384"},
    {2, "ranks: 99999999999999999999", BL_ECONFIG,
     "job.yaml:2:8: ranks: 99999999999999999999 is not within 1 and 16384"},
    {2, "ranks: -1", BL_ECONFIG, "job.yaml:2:8: ranks: must be an integer, not '-1'"},
    {2, "ranks:", BL_ECONFIG, "job.yaml:2:7: ranks: has no value"},
    {2, "ranks: [1]", BL_ECONFIG, "job.yaml:2:8: ranks: must be a single value"},
    {2, "ranks: 5", BL_ECONFIG,
     "job.yaml:3:8: lanes: 4 lanes cannot feed 5 ranks: each rank needs at least one"},
    {2, "ranks: 2\nranks: 2", BL_ECONFIG, "job.yaml:3:1: ranks: given twice, first on line 2"},
    {2, "rnaks: 2", BL_ECONFIG, "job.yaml:2:1: unknown key 'rnaks' (nearest known: 'ranks')"},
    {2, "lr: 2", BL_ECONFIG, "job.yaml:2:1: unknown key 'lr' (nearest known: 'train.lr')"},
    {2, "modle: 2", BL_ECONFIG, "job.yaml:2:1: unknown key 'modle' (nearest known: 'model')"},
    {2, "train.lr: 1", BL_ECONFIG,
     "job.yaml:2:1: unknown key 'train.lr' (write 'lr' under 'train:')"},
    {2, "command[]: 1", BL_ECONFIG,
     "job.yaml:2:1: unknown key 'command[]' (nearest known: 'command')"},
    {2, NULL, BL_ECONFIG, "job.yaml: missing key 'ranks' (trainer processes to start with)"},
    {10, "  tokenizer: bytes", BL_ECONFIG,
     "job.yaml: missing key 'data.files' (text files or token shards, in this order)"},
    {10, "  files: []", BL_ECONFIG, "job.yaml:10:3: data.files[]: 0 items, at least 1 are needed"},
    {10, "  files: a.txt", BL_ECONFIG, "job.yaml:10:10: data.files[]: must be a list"},
    {10, "  files: [\"\"]", BL_ECONFIG, "job.yaml:10:11: data.files[]: must not be empty"},
    {10, "  file: [a]", BL_ECONFIG,
     "job.yaml:10:3: unknown key 'data.file' (nearest known: 'data.files')"},
    {7, "  heads: 3", BL_ECONFIG, "job.yaml:7:10: model.heads: 3 does not divide dim (64)"},
    {7, "  heads: 64", BL_ECONFIG,
     "job.yaml:7:10: model.heads: a head of 1 (dim 64 / heads 64) is odd: rotary positions need "
     "pairs"},
    {8, "  kv_heads: 3", BL_ECONFIG, "job.yaml:8:13: model.kv_heads: 3 does not divide heads (4)"},
    {8, "  vocab: 255", BL_ECONFIG,
     "job.yaml:8:10: model.vocab: 255 is too few for the tokenizer 'bytes', which has 256"},
    {10, "  files: [a, b]\n  weights: [1]", BL_ECONFIG,
     "job.yaml:11:12: data.weights[]: 1 weights for 2 files: give one for each file, or none"},
    {10, "  files: [a]\n  weights: [0]", BL_ECONFIG,
     "job.yaml:11:13: data.weights[]: 0 is not within above 0 and 1e+09"},
    {8, "  arch: bert", BL_ECONFIG,
     "job.yaml:8:9: model.arch: 'bert' is unknown (there is: llama|gpt2)"},
    {8, "  arch: gpt2\n  kv_heads: 2", BL_ECONFIG,
     "job.yaml:9:13: model.kv_heads: 2: gpt2 has as many as heads (4)"},
    {8, "  arch: gpt2\n  context: 63", BL_ECONFIG,
     "job.yaml:9:12: model.context: 63 positions are too few for train.seq_len 64"},
    {8, "  context: 64", BL_ECONFIG,
     "job.yaml:8:12: model.context: 64: llama's rotary positions have no end (leave it out)"},
    {8, "  tied: yes", BL_ECONFIG, "job.yaml:8:9: model.tied: must be true or false, not 'yes'"},
    {8, "  norm_eps: nan", BL_ECONFIG,
     "job.yaml:8:13: model.norm_eps: must be a number, not 'nan'"},
    {8, "  norm_eps: 0x1p-3", BL_ECONFIG,
     "job.yaml:8:13: model.norm_eps: must be a number, not '0x1p-3'"},
    {12, "  global_batch: 12", BL_ECONFIG,
     "job.yaml:12:17: train.global_batch: 12 is no multiple of lanes x micro_batch (4 x 2 = 8); "
     "near it: 8 or 16"},
    {12, "  global_batch: 4", BL_ECONFIG,
     "job.yaml:12:17: train.global_batch: 4 is no multiple of lanes x micro_batch (4 x 2 = 8); "
     "near it: 8"},
    {16, "  betas: [0.9]", BL_ECONFIG,
     "job.yaml:16:3: train.betas[]: 1 items, at least 2 are needed"},
    {16, "  betas: [0.9, 1]", BL_ECONFIG,
     "job.yaml:16:16: train.betas[]: 1 is not within 0 and below 1"},
    {16, "  betas: [0.9, 0.9, 0.9]", BL_ECONFIG,
     "job.yaml:16:21: train.betas[]: more than 2 items"},
    {16, "  warmup: 101", BL_ECONFIG, "job.yaml:16:11: train.warmup: 101 is above steps (100)"},
    {16, "  lr_min: 1", BL_ECONFIG, "job.yaml:16:11: train.lr_min: 1 is above lr (0.0003)"},
    {16, "  reduction: fast", BL_ENOTBUILT,
     "job.yaml:16:14: train.reduction: 'fast' is not built into this version (use exact)"},
    {16, "  eval_every: 5\n  eval_split: 0", BL_ECONFIG,
     "job.yaml:16:15: train.eval_every: evaluation needs an eval_split above 0, or "
     "data.eval_files"},
    {17, "snapshot: {bytes_max: 64MB2}", BL_ECONFIG,
     "job.yaml:17:23: snapshot.bytes_max: must be a size such as 64MiB, not '64MB2'"},
    {17, "snapshot: 5", BL_ECONFIG, "job.yaml:17:11: snapshot: must be a mapping"},
    {17, "snapshot: {every: 2}", BL_ENOTBUILT,
     "job.yaml:17:19: snapshot.every: 2: only 1 is built into this version"},
    {17, "layout: {tp: 2}", BL_ECONFIG,
     "job.yaml:2:8: ranks: 3 ranks are no whole number of copies of 2 (layout.tp 2 x layout.pp 1): "
     "use 2"},
    {17, "layout: {tp: 2, pp: 2}", BL_ECONFIG,
     "job.yaml:2:8: ranks: 3 ranks are no whole number of copies of 4 (layout.tp 2 x layout.pp 2): "
     "use 4"},
    {17, "layout: {pp: 3}", BL_ECONFIG,
     "job.yaml:17:14: layout.pp: 3 stages x 1 chunks are more than 2 layers: at most 2 stages"},
    {17, "layout: {interleave: 2}", BL_ECONFIG,
     "job.yaml:17:22: layout.interleave: 2 chunks want more than one stage (layout.pp)"},
    {17, "layout: {pp_min: 2}", BL_ECONFIG,
     "job.yaml:17:18: layout.pp_min: 2 stages at least are more than the run has (layout.pp 1)"},
    {17, "layout: {sequence: true}", BL_ECONFIG,
     "job.yaml:17:20: layout.sequence: wants tensor parallel ranks (layout.tp above 1)"},
    {17, "layout: {zero: 4}", BL_ECONFIG, "job.yaml:17:16: layout.zero: 4 is not within 0 and 3"},
    {16, "  recompute: some", BL_ECONFIG,
     "job.yaml:16:14: train.recompute: 'some' is unknown (there is: none|selective|full)"},
    {17, "model: {tied: true}", BL_ECONFIG, "job.yaml:17:1: model: given twice"},
    {17, "backend: gpu", BL_ECONFIG,
     "job.yaml:17:10: backend: 'gpu' is unknown (there is: auto|cpu|cuda)"},
    {16, "  precision: fp16", BL_ECONFIG,
     "job.yaml:16:14: train.precision: 'fp16' is unknown (there is: auto|fp32|bf16)"},
    {16, "  precision: bf16\nbackend: cpu", BL_ECONFIG,
     "job.yaml:16:14: train.precision: the CPU computes in fp32 (backend cuda has bf16)"},
    {17, "codec: lz4", BL_ECONFIG,
     "job.yaml:17:8: codec: 'lz4' is unknown (there is: auto|zstd|none)"},
    {17, "protect: peer", BL_ENOTBUILT,
     "job.yaml:17:10: protect: 'peer' is not built into this version (there is: node)"},
    {17, "env: {pass: [PATH]}", BL_ENOTBUILT, "job.yaml:17:1: env: not built into this version"},
    {17, "threads: &x 3", BL_ECONFIG, "job.yaml:17:10: anchors and tags are not allowed"},
    {17, "threads: !!int 3", BL_ECONFIG, "job.yaml:17:10: anchors and tags are not allowed"},
    {17, "? [a, b]\n: c", BL_ECONFIG, "job.yaml:17:3: a key: must be a single word"},
    {17, "a: {b: {c: {d: 1}}}", BL_ECONFIG, NULL},
    {17, "run_dir: \"a\\tb\"", BL_ECONFIG, "job.yaml:17:10: run_dir: has a control character"},
    {17, "run_dir: \"a\\u009eb\"", BL_ECONFIG, "job.yaml:17:10: run_dir: has a control character"},
    {17, "run_dir: \"a\\u2028b\"", BL_ECONFIG, "job.yaml:17:10: run_dir: has a control character"},
    {17, "run_dir: \"a\\0b\"", BL_ECONFIG, "job.yaml:17:10: a NUL character is not allowed"},
    {17, "---", BL_ECONFIG, "job.yaml:17:1: a second document is not allowed"},
    {17, "threads: [", BL_ECONFIG, NULL},
    {1, "name: a/b", BL_ECONFIG,
     "job.yaml:1:7: name: 'a/b' has other characters than letters, digits, '.', '_', '-' or begins "
     "with '.' or '-'"},
    {19, "  - shared: false", BL_ECONFIG,
     "job.yaml:20:5: roots[].shared: given twice, first on line 19"},
    {19, "  - keep: 4", BL_ECONFIG, "job.yaml:19:5: a root needs a path"},
    {22, "  - {path: ckpt}", BL_ECONFIG,
     "job.yaml:22:12: roots[].path: '/base/ckpt' is listed twice"},
    {22, "  - /fast", BL_ECONFIG,
     "job.yaml:22:5: roots[]: must be a list of mappings such as {path: DIR}"},
    {22, "  - {path: /a}\n  - {path: /b}\n  - {path: /c}\n  - {path: /d}", BL_ECONFIG,
     "job.yaml:25:5: roots: more than 4 items"},
    {21, "    every: often", BL_ECONFIG,
     "job.yaml:21:12: roots[].every: must be an integer or auto, not 'often'"},
    {21, "    keep_every: auto", BL_ECONFIG,
     "job.yaml:21:17: roots[].keep_every: must be an integer, not 'auto'"},
    {21, "    rate_max: 100kB", BL_ECONFIG,
     "job.yaml:21:15: roots[].rate_max: 100000 bytes a second is less than 1 MiB: between two "
     "buffers such a root looks stuck"},
    {21, "    keep: 0", BL_ECONFIG, "job.yaml:21:11: roots[].keep: 0 is not within 1 and 1000000"},
    {24, "  lease: 3", BL_ECONFIG,
     "job.yaml:24:10: deadlines.lease: must be a time such as 500ms or 5s, not '3'"},
    {24, "  lease: 100ms", BL_ECONFIG,
     "job.yaml:24:10: deadlines.lease: deadlines.beat (200ms) must be below deadlines.lease "
     "(100ms), or a node would be lost between two beats"},
    {24, "  beat: 6s", BL_ECONFIG,
     "job.yaml:24:9: deadlines.beat: deadlines.beat (6000ms) must be below deadlines.lease "
     "(5000ms), or a node would be lost between two beats"},
    {24, "  step_floor: 2s", BL_ECONFIG,
     "job.yaml:24:15: deadlines.step_floor: 2s is not within 2001ms and 3600000ms"},
    {24, "  join: 30s", BL_ECONFIG,
     "job.yaml:24:9: deadlines.join: deadlines.init_floor (60000ms) must be at most deadlines.join "
     "(30000ms), or a generation would be given up while a rank starts"},
    {24, "  leese: 3s", BL_ECONFIG,
     "job.yaml:24:3: unknown key 'deadlines.leese' (nearest known: 'deadlines.lease')"},
};

static void test_job_file_is_refused_with_line_and_column(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]); i++) {
        const struct refusal *refusal = &refusals[i];
        struct bl_errmsg msg;
        int rc = parse(with_line(refusal->line, refusal->text), &msg);
        if (refusal->error != NULL) {
            assert_string_equal(msg.text, refusal->error);
        }
        assert_int_equal(rc, refusal->code);
        assert_int_equal(strncmp(msg.text, "job.yaml:", 9), 0);
    }
}

static void test_job_text_that_is_no_job_is_refused(void **state)
{
    (void)state;
    struct bl_errmsg msg;
    const char *texts[] = {"",        "# nothing\n", "- a\n",  "just words",
                           "a: b: c", "\xff\xfe",    "%YAML 9"};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        assert_int_equal(parse(texts[i], &msg), BL_ECONFIG);
        assert_int_equal(strncmp(msg.text, "job.yaml:", 9), 0);
    }
    assert_int_equal(bl_job_parse(&job, good, BL_JOB_BYTES_MAX + 1, "job.yaml", "/", &msg),
                     BL_ECONFIG);
    assert_int_equal(bl_job_parse(&job, "a", 1, "job.yaml", "/", NULL), BL_ECONFIG);
}

static void test_job_json_parses_back_to_the_same_job(void **state)
{
    (void)state;
    struct bl_errmsg msg;
    assert_int_equal(parse(good, &msg), 0);
    char *json = bl_job_to_json(&job);
    assert_non_null(json);
    memset(&msg, 0, sizeof(msg));
    int rc = bl_job_parse(&other, json, strlen(json), "frozen", "/elsewhere", &msg);
    assert_string_equal(msg.text, "");
    assert_int_equal(rc, 0);
    assert_memory_equal(&job, &other, sizeof(job));
    char *again = bl_job_to_json(&other);
    assert_string_equal(json, again);
    assert_int_equal(bl_job_function_digest(&job), bl_job_function_digest(&other));
    free(json);
    free(again);
}

static void test_job_roots_have_rules_of_their_own(void **state)
{
    (void)state;
    struct bl_errmsg msg;
    const char *text = with_line(22, "  - {path: /fast, every: auto, keep: 2, keep_every: 1000, "
                                     "keep_best: 4, bytes_max: 3GiB, rate_max: 50MB, "
                                     "verify: false}");
    assert_int_equal(parse(text, &msg), 0);
    const struct bl_job_root *plain = &job.roots[0];
    assert_int_equal(plain->keep_every + plain->keep_best + plain->bytes_max + plain->rate_max, 0);
    assert_int_equal(plain->verify, 1);
    struct bl_job_root fast = job.roots[1];
    assert_true(fast.every == BL_JOB_AUTO);
    assert_int_equal(fast.keep, 2);
    assert_int_equal(fast.keep_every, 1000);
    assert_int_equal(fast.keep_best, 4);
    assert_int_equal(fast.bytes_max, 3ull << 30);
    assert_int_equal(fast.rate_max, 50000000);
    assert_int_equal(fast.verify, 0);
    char *json = bl_job_to_json(&job);
    assert_non_null(json);
    assert_non_null(strstr(json, "\"every\":\"auto\""));
    assert_int_equal(bl_job_parse(&other, json, strlen(json), "again", "/", &msg), 0);
    assert_memory_equal(&other.roots[1], &fast, sizeof(fast));
    free(json);
}

static void test_job_function_digest_sees_arithmetic_only(void **state)
{
    (void)state;
    struct bl_errmsg msg;
    assert_int_equal(parse(good, &msg), 0);
    uint64_t digest = bl_job_function_digest(&job);
    const char *same[][2] = {
        {"ranks", "2"}, {"threads", "3"},          {"deadlines.lease", "4s"},     {"run_dir", "/x"},
        {"name", "x"},  {"train.eval_every", "5"}, {"snapshot.bytes_max", "1GiB"}};
    for (size_t i = 0; i < sizeof(same) / sizeof(same[0]); i++) {
        assert_int_equal(parse(good, &msg), 0);
        assert_int_equal(bl_job_set(&job, same[i][0], same[i][1], "/", NULL), 0);
        assert_int_equal(bl_job_function_digest(&job), digest);
    }
    const char *differs[][2] = {{"lanes", "8"},
                                {"model.dim", "128"},
                                {"train.seed", "2"},
                                {"train.lr", "0.0004"},
                                {"train.steps", "7"},
                                {"model.tied", "true"},
                                {"train.micro_batch", "1"}};
    for (size_t i = 0; i < sizeof(differs) / sizeof(differs[0]); i++) {
        assert_int_equal(parse(good, &msg), 0);
        assert_int_equal(bl_job_set(&job, differs[i][0], differs[i][1], "/", NULL), 0);
        assert_true(bl_job_function_digest(&job) != digest);
    }
}

static void test_job_set_leaves_the_job_alone_when_refused(void **state)
{
    (void)state;
    struct bl_errmsg msg;
    assert_int_equal(parse(good, &msg), 0);
    other = job;
    assert_int_equal(bl_job_set(&job, "ranks", "5", "/", &msg), BL_ECONFIG);
    assert_string_equal(msg.text,
                        "lanes: 4 lanes cannot feed 5 ranks: each rank needs at least one");
    assert_int_equal(bl_job_set(&job, "rank", "5", "/", &msg), BL_ECONFIG);
    assert_string_equal(msg.text, "unknown key 'rank' (nearest known: 'ranks')");
    assert_int_equal(bl_job_set(&job, "data.files[]", "x", "/", &msg), BL_ECONFIG);
    assert_int_equal(bl_job_set(&job, "run_dir", "/\xc0\xaf", "/", &msg), BL_ECONFIG);
    assert_string_equal(msg.text, "run_dir: is not valid UTF-8");
    assert_int_equal(bl_job_set(&job, "run_dir", "a", "/\xed\xa0\x80", &msg), BL_ECONFIG);
    assert_int_equal(bl_job_set(&job, "env", "x", "/", &msg), BL_ENOTBUILT);
    assert_memory_equal(&job, &other, sizeof(job));
}

static void test_job_frozen_difference_names_the_option(void **state)
{
    (void)state;
    struct bl_errmsg msg;
    assert_int_equal(parse(good, &msg), 0);
    other = job;
    assert_null(bl_job_frozen_difference(&job, &other));
    other.ranks = 1;
    assert_null(bl_job_frozen_difference(&job, &other));
    other.train.beta2 = 0.5;
    assert_string_equal(bl_job_frozen_difference(&job, &other), "train.betas[]");
    other.data_files[1][0] = 'x';
    assert_string_equal(bl_job_frozen_difference(&job, &other), "data.files[]");
    other.lanes = 8;
    assert_string_equal(bl_job_frozen_difference(&job, &other), "lanes");
}

static void test_job_load_takes_paths_from_the_files_directory(void **state)
{
    (void)state;
    char dir[] = "/tmp/belay-job-XXXXXX";
    char path[256];
    char want[256];
    struct bl_errmsg msg = {{0}};
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/job.yaml", dir);
    assert_int_equal(bl_file_write_atomic(path, good, strlen(good), NULL), 0);
    assert_int_equal(bl_job_load(&job, path, &msg), 0);
    snprintf(want, sizeof(want), "%s/a.txt", dir);
    assert_string_equal(job.data_files[0], want);
    snprintf(path, sizeof(path), "%s/none.yaml", dir);
    assert_true(bl_job_load(&job, path, &msg) < 0);
    assert_non_null(strstr(msg.text, "none.yaml: No such file or directory"));
    assert_int_equal(bl_rm_tree("/tmp", dir + 5, NULL), 0);
}

static void test_job_options_print_has_every_key(void **state)
{
    (void)state;
    char *text = NULL;
    size_t bytes = 0;
    FILE *file = open_memstream(&text, &bytes);
    assert_non_null(file);
    bl_job_options_print(file);
    fclose(file);
    const char *keys[] = {
        "name\n",      "ranks\n",       "train.lr\n", "roots[].path\n", "deadlines.grace\n",
        "command[]\n", "default 200ms", "required",   "true|false",     "live"};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        assert_non_null(strstr(text, keys[i]));
    }
    for (char *line = text; *line != '\0'; line += strcspn(line, "\n") + 1) {
        assert_true(strcspn(line, "\n") <= 96);
    }
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_job_file_is_read_with_defaults_filled_in),
        cmocka_unit_test(test_job_gpt2_has_defaults_of_its_own),
        cmocka_unit_test(test_job_lanes_default_to_ranks),
        cmocka_unit_test(test_job_file_is_refused_with_line_and_column),
        cmocka_unit_test(test_job_text_that_is_no_job_is_refused),
        cmocka_unit_test(test_job_json_parses_back_to_the_same_job),
        cmocka_unit_test(test_job_roots_have_rules_of_their_own),
        cmocka_unit_test(test_job_function_digest_sees_arithmetic_only),
        cmocka_unit_test(test_job_set_leaves_the_job_alone_when_refused),
        cmocka_unit_test(test_job_frozen_difference_names_the_option),
        cmocka_unit_test(test_job_load_takes_paths_from_the_files_directory),
        cmocka_unit_test(test_job_options_print_has_every_key),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
