/* SPDX-License-Identifier: Apache-2.0 */
/* `belay-train sample`: continues a prompt with the weights of a committed checkpoint. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "ckpt/ckpt.h"
#include "trainer/data.h"
#include "trainer/model.h"
#include "trainer/options.h"

#define SAMPLE_TOKENS_MAX 65536u

struct sample_args {
    const char *job, *weights, *prompt;
    uint32_t tokens;
    struct train_sample how;
};

static const char help[] =
    "Usage: belay-train sample --job FILE --weights DIR [--prompt TEXT] [--tokens N]\n"
    "                          [--temperature X] [--top-k K] [--seed S]\n"
    "\n"
    "Writes the prompt and N more tokens to standard output. DIR is a committed\n"
    "checkpoint, or a root: then its newest good checkpoint is taken.\n"
    "\n"
    "  --prompt TEXT      what to continue (default: a line break)\n"
    "  --tokens N         how many tokens to add (default 200)\n"
    "  --temperature X    0: always the likeliest token (default 0.8)\n"
    "  --top-k K          choose among the K likeliest only; 0: all (default 0)\n"
    "  --seed S           other seeds, other texts; the same seed, the same text\n"
    "                     (default 1)\n"
    "\n"
    "Examples:\n"
    "  belay-train sample --job job.yaml --weights checkpoints --prompt 'Once upon'\n"
    "  belay-train sample --job job.yaml --weights checkpoints/step-000000001200.g7 \\\n"
    "      --prompt 'The ' --tokens 400 --temperature 0.6 --top-k 20\n"
    "\n"
    "Exit codes: 0 done, 2 the job or the command line is wrong, 3 could not.\n";

static int usage(const char *option, const char *text)
{
    fprintf(stderr, "belay-train sample: --%s %s: not understood; see --help\n", option, text);
    return 2;
}

static int parse_number(const char *text, double max, double *ret)
{
    char *end;
    errno = 0;
    *ret = strtod(text, &end);
    return errno == 0 && *text != 0 && *end == 0 && *ret >= 0 && *ret <= max;
}

/* 0; 2 after complaining; -1 for --help. */
static int parse(struct sample_args *args, int argc, char **argv)
{
    static const struct option options[] = {
        {"job", required_argument, NULL, 'j'},
        {"weights", required_argument, NULL, 'w'},
        {"prompt", required_argument, NULL, 'p'},
        {"tokens", required_argument, NULL, 'n'},
        {"seed", required_argument, NULL, 's'},
        {"temperature", required_argument, NULL, 't'},
        {"top-k", required_argument, NULL, 'k'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    int opt, index;
    while ((opt = getopt_long(argc, argv, "", options, &index)) != -1) {
        double value = 0;
        double max = opt == 'n' ? SAMPLE_TOKENS_MAX : opt == 't' ? 100 : opt == 'k' ? 1e6 : 1e15;
        if (strchr("nstk", opt) != NULL && !parse_number(optarg, max, &value)) {
            return usage(options[index].name, optarg);
        }
        switch (opt) {
        case 'j':
            args->job = optarg;
            break;
        case 'w':
            args->weights = optarg;
            break;
        case 'p':
            args->prompt = optarg;
            break;
        case 'n':
            args->tokens = (uint32_t)value;
            break;
        case 's':
            args->how.seed = (uint64_t)value;
            break;
        case 't':
            args->how.temperature = value;
            break;
        case 'k':
            args->how.top_k = (uint32_t)value;
            break;
        case 'h':
            fputs(help, stdout);
            return -1;
        default:
            return 2;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "belay-train sample: %s: unexpected\n", argv[optind]);
        return 2;
    }
    if (args->job == NULL || args->weights == NULL) {
        fprintf(stderr, "belay-train sample: --%s is missing; see belay-train sample --help\n",
                args->job == NULL ? "job FILE" : "weights DIR");
        return 2;
    }
    if (args->prompt[0] == 0) {
        fputs("belay-train sample: --prompt is empty: give one byte at least\n", stderr);
        return 2;
    }
    return 0;
}

/* Splits ROOT/DIR; takes the newest good checkpoint if `path` is itself a root. */
static int open_checkpoint(const char *path, struct ckpt_store **ret_store, char dir[CKPT_DIR_MAX],
                           struct bl_errmsg *msg)
{
    char root[BL_PATH_MAX];
    struct ckpt_scan scan;
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') {
        length--;
    }
    if (length >= sizeof root) {
        return bl_err_code(msg, -ENAMETOOLONG, "%s", path);
    }
    memcpy(root, path, length);
    root[length] = 0;
    struct ckpt_store_config config = {.path = root};
    char *slash = strrchr(root, '/');
    const char *name = slash != NULL ? slash + 1 : root;
    if (strncmp(name, "step-", 5) == 0 && strlen(name) < CKPT_DIR_MAX) {
        memcpy(dir, name, strlen(name) + 1);
        config.path = slash == NULL ? "." : slash == root ? "/" : root;
        if (slash != NULL) {
            *slash = 0;
        }
        return ckpt_store_open(ret_store, &config, msg);
    }
    int rc = ckpt_store_open(ret_store, &config, msg);
    if (rc != 0) {
        return rc;
    }
    rc = ckpt_scan(*ret_store, &scan, msg);
    if (rc != 0) {
        return rc;
    }
    const struct ckpt_entry *newest = ckpt_scan_newest(&scan, NULL, 0);
    if (newest == NULL) {
        rc = bl_err(msg, BL_ENOSTATE, "%s: no good checkpoint", root);
    } else {
        memcpy(dir, newest->dir, CKPT_DIR_MAX);
    }
    ckpt_scan_close(&scan);
    return rc;
}

/* All weights of the model, where the flat buffer has them. */
static int wanted_weights(const struct train_model *model, struct bl_extent_list *list,
                          struct bl_errmsg *msg)
{
    uint32_t count;
    const struct train_tensor *tensors = train_model_tensors(model, &count);
    memset(list, 0, sizeof *list);
    for (uint32_t i = 0; i < count; i++) {
        struct bl_tensor tensor = {.kind = BL_KIND_PARAM, .dtype = BL_F32, .dims = tensors[i].dims};
        struct bl_extent extent;
        uint32_t index;
        memcpy(tensor.name, tensors[i].name, sizeof tensor.name);
        memcpy(tensor.shape, tensors[i].shape, tensors[i].dims * sizeof tensor.shape[0]);
        int rc = bl_extent_list_tensor(list, &tensor, &index, msg);
        if (rc == 0) {
            bl_extent_whole(&extent, &tensor, index, 0, tensors[i].elems);
            extent.offset = tensors[i].offset * sizeof(float);
            rc = bl_extent_list_add(list, &extent);
        }
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

static int load_weights(const struct train_model *model, const char *path, float *params,
                        struct bl_errmsg *msg)
{
    struct ckpt_store *store = NULL;
    struct bl_extent_list list = {0};
    struct ckpt_load_result result;
    char dir[CKPT_DIR_MAX];
    int rc = open_checkpoint(path, &store, dir, msg);
    if (rc == 0) {
        rc = wanted_weights(model, &list, msg);
    }
    if (rc == 0) {
        const struct ckpt_dest dest = {.list = &list, .base = params};
        rc = ckpt_load(store, dir, &dest, 1, &result, msg);
    }
    bl_extent_list_close(&list);
    ckpt_store_close(store);
    return rc;
}

static int write_sample(const struct train_model *model, const float *params,
                        const struct sample_args *args, struct kern_pool *pool,
                        struct bl_errmsg *msg)
{
    size_t prompt_len = strlen(args->prompt);
    if (prompt_len > SAMPLE_TOKENS_MAX) {
        return bl_err(msg, BL_ELIMIT, "the prompt has more than %u bytes", SAMPLE_TOKENS_MAX);
    }
    int32_t *prompt = calloc(prompt_len, sizeof *prompt);
    int32_t *out = calloc((size_t)args->tokens + 1, sizeof *out);
    int rc = prompt == NULL || out == NULL ? bl_err_code(msg, -ENOMEM, "sample") : 0;
    for (size_t i = 0; rc == 0 && i < prompt_len; i++) {
        prompt[i] = (uint8_t)args->prompt[i];
    }
    if (rc == 0) {
        rc = train_model_sample(model, params, prompt, (uint32_t)prompt_len, out, args->tokens,
                                &args->how, pool, msg);
    }
    if (rc == 0) {
        fputs(args->prompt, stdout);
        for (uint32_t i = 0; i < args->tokens; i++) {
            putchar(out[i] < (int32_t)TRAIN_BYTE_VOCAB ? out[i] : '?');
        }
        putchar('\n');
    }
    free(prompt);
    free(out);
    return rc;
}

static int run(const struct sample_args *args, const struct bl_job *job, struct bl_errmsg *msg)
{
    struct train_model *model = NULL;
    struct kern_pool *pool = NULL;
    float *params = NULL;
    uint64_t bytes = 0;
    uint32_t threads = job->threads != 0 ? job->threads : 1;
    int rc = kern_pool_new(&pool, threads, msg);
    if (rc == 0) {
        rc = train_model_new(&model, &job->model, job->train.seq_len, 1, threads, msg);
    }
    if (rc == 0) {
        bytes = train_model_buffer_elems(model) * sizeof(float);
        params = bl_mem_alloc(bytes);
        rc = params == NULL
                 ? bl_err_code(msg, -ENOMEM, "%llu bytes for weights", (unsigned long long)bytes)
                 : load_weights(model, args->weights, params, msg);
    }
    if (rc == 0) {
        rc = write_sample(model, params, args, pool, msg);
    }
    bl_mem_free(params, bytes);
    train_model_free(model);
    kern_pool_free(pool);
    return rc;
}

int train_sample_main(int argc, char **argv)
{
    struct sample_args args = {
        .prompt = "\n", .tokens = 200, .how = {.temperature = 0.8, .top_k = 0, .seed = 1}};
    int code = parse(&args, argc, argv);
    if (code != 0) {
        return code < 0 ? 0 : code;
    }
    const struct bl_job *job = train_job_load(args.job);
    if (job == NULL) {
        return 2;
    }
    struct bl_errmsg msg = {{0}};
    int rc = run(&args, job, &msg);
    if (rc != 0) {
        fprintf(stderr, "belay-train sample: %s\n", msg.text);
    }
    return rc == 0 ? 0 : rc == BL_ECONFIG || rc == BL_ENOTBUILT ? 2 : 3;
}
