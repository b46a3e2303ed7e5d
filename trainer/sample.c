/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `belay-train sample`: continues a prompt. Two ways to say what with: --model (the files say which
 * model they are of) and --job with --weights (the job does; its tokens are bytes).
 */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "trainer/data.h"
#include "trainer/options.h"
#include "trainer/sample_text.h"
#include "trainer/weights.h"

#define SAMPLE_TOKENS_MAX  65536u
#define SAMPLE_THREADS_MAX 16

struct sample_args {
    const char *job, *weights, *model, *tokenizer, *prompt;
    uint32_t tokens; /* to add; 0: what `steps` leaves */
    uint32_t steps;  /* positions in all, the prompt's included */
    uint32_t threads;
    struct train_sample how;
};

static const char help[] =
    "Usage: belay-train sample --model PATH [--tokenizer FILE] [OPTION...]\n"
    "       belay-train sample --job FILE --weights DIR [OPTION...]\n"
    "\n"
    "Continues a prompt and writes the text to standard output. PATH is a committed\n"
    "checkpoint, a root (then its newest good checkpoint is taken), a directory of\n"
    "Hugging Face's with a Llama in it, or a llama2.c file.\n"
    "\n"
    "  --tokenizer FILE   llama2.c's (tok512.bin) or GPT-2's merges (vocab.bpe); without\n"
    "                     it a token is a byte\n"
    "  --prompt TEXT      what to continue (default: nothing with a tokenizer, else\n"
    "                     a line break)\n"
    "  --steps N          end after N tokens, those of the prompt included, or where\n"
    "                     the model ends the text (default 256)\n"
    "  --tokens N         instead: N tokens behind the prompt (default with --job:\n"
    "                     200)\n"
    "  --temperature X    0: always the likeliest token (default 0.8)\n"
    "  --top-k K          choose among the K likeliest only; 0: all (default 0)\n"
    "  --top-p P          choose among the likeliest that together have more than the\n"
    "                     share P only; 1: all (default 1)\n"
    "  --seed S           other seeds, other texts; the same seed, the same text\n"
    "                     (default 1)\n"
    "  --threads N        the same bits with any number (default: the processors)\n"
    "\n"
    "Examples:\n"
    "  belay-train sample --model stories --tokenizer tok512.bin --temperature 0 \\\n"
    "      --steps 200\n"
    "  belay-train sample --model checkpoints --prompt 'Once upon' --top-p 0.9\n"
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

/* The largest value of a numeric option; 0 for one that is none. */
static double option_max(int opt)
{
    switch (opt) {
    case 'n':
    case 'S':
        return SAMPLE_TOKENS_MAX;
    case 'k':
        return 1e6;
    case 'P':
        return 1;
    case 'h':
    case 'j':
    case 'w':
    case 'm':
    case 'z':
    case 'p':
        return 0;
    case 't':
        return 100;
    case 'T':
        return KERN_THREADS_MAX;
    default:
        return 1e15;
    }
}

static void set_number(struct sample_args *args, int opt, double value)
{
    switch (opt) {
    case 'n':
        args->tokens = (uint32_t)value;
        break;
    case 'S':
        args->steps = (uint32_t)value;
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
    case 'P':
        args->how.top_p = value;
        break;
    default:
        args->threads = (uint32_t)value;
        break;
    }
}

static void set_text(struct sample_args *args, int opt, const char *text)
{
    switch (opt) {
    case 'j':
        args->job = text;
        break;
    case 'w':
        args->weights = text;
        break;
    case 'm':
        args->model = text;
        break;
    case 'z':
        args->tokenizer = text;
        break;
    default:
        args->prompt = text;
        break;
    }
}

/* What goes together; 2 after complaining. */
static int check(const struct sample_args *args)
{
    const char *why = NULL;
    if (args->model != NULL) {
        why = args->job != NULL || args->weights != NULL
                  ? "--model stands without --job and --weights"
              : args->steps != 0 && args->tokens != 0 ? "--steps or --tokens, not both"
                                                      : NULL;
    } else if (args->job == NULL && args->weights == NULL) {
        why = "--model PATH is missing";
    } else if (args->job == NULL || args->weights == NULL) {
        why = args->job == NULL ? "--job FILE is missing" : "--weights DIR is missing";
    } else if (args->tokenizer != NULL || args->steps != 0) {
        why = "--tokenizer and --steps stand with --model";
    }
    if (why == NULL && args->prompt != NULL && args->prompt[0] == 0 && args->tokenizer == NULL) {
        why = "--prompt is empty: give one byte at least";
    }
    if (why == NULL && args->prompt != NULL && strlen(args->prompt) > SAMPLE_TOKENS_MAX) {
        why = "--prompt is over 65536 bytes";
    }
    if (why != NULL) {
        fprintf(stderr, "belay-train sample: %s; see belay-train sample --help\n", why);
    }
    return why == NULL ? 0 : 2;
}

/* 0; 2 after complaining; -1 for --help. */
static int parse(struct sample_args *args, int argc, char **argv)
{
    static const struct option options[] = {
        {"job", required_argument, NULL, 'j'},
        {"weights", required_argument, NULL, 'w'},
        {"model", required_argument, NULL, 'm'},
        {"tokenizer", required_argument, NULL, 'z'},
        {"prompt", required_argument, NULL, 'p'},
        {"tokens", required_argument, NULL, 'n'},
        {"steps", required_argument, NULL, 'S'},
        {"seed", required_argument, NULL, 's'},
        {"temperature", required_argument, NULL, 't'},
        {"top-k", required_argument, NULL, 'k'},
        {"top-p", required_argument, NULL, 'P'},
        {"threads", required_argument, NULL, 'T'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    int opt, index;
    while ((opt = getopt_long(argc, argv, "", options, &index)) != -1) {
        double value, max = option_max(opt);
        if (opt == 'h') {
            fputs(help, stdout);
            return -1;
        }
        if (opt == '?') {
            return 2;
        }
        if (max == 0) {
            set_text(args, opt, optarg);
        } else if (parse_number(optarg, max, &value)) {
            set_number(args, opt, value);
        } else {
            return usage(options[index].name, optarg);
        }
    }
    if (optind < argc) {
        fprintf(stderr, "belay-train sample: %s: unexpected\n", argv[optind]);
        return 2;
    }
    return check(args);
}

static uint32_t threads_of(const struct sample_args *args, const struct bl_job *job)
{
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    if (args->threads != 0) {
        return args->threads;
    }
    if (job != NULL) {
        return job->threads != 0 ? job->threads : 1;
    }
    return processors < 1                    ? 1
           : processors > SAMPLE_THREADS_MAX ? SAMPLE_THREADS_MAX
                                             : (uint32_t)processors;
}

static int sample(const struct sample_args *args, struct train_weights *weights, uint32_t threads,
                  struct bl_errmsg *msg)
{
    struct train_model *model = NULL;
    struct kern_pool *pool = NULL;
    struct kern *kern = NULL;
    struct sample_text text = {0};
    float *params = NULL;
    uint64_t bytes = 0;
    int rc = sample_text_open(&text, args->tokenizer, args->prompt, weights->config.vocab,
                              args->job != NULL, msg);
    if (rc == 0) {
        rc = sample_text_room(&text, args->tokens, args->steps, msg);
    }
    if (rc == 0) {
        rc = kern_pool_new(&pool, threads, msg);
    }
    if (rc == 0) {
        rc = kern_cpu_open(&kern, pool, msg);
    }
    if (rc == 0) {
        rc = train_model_new(&model, kern, &weights->config, 1, 1, msg);
    }
    if (rc == 0) {
        bytes = train_model_buffer_elems(model) * sizeof(float);
        params = bl_mem_alloc(bytes);
        rc = params == NULL
                 ? bl_err_code(msg, -ENOMEM, "%llu bytes for weights", (unsigned long long)bytes)
                 : train_weights_load(weights, model, params, msg);
    }
    if (rc == 0) {
        rc = train_model_sample(model, kern_real_f32_view(params), text.prompt, text.prompt_len,
                                text.out, text.out_len, &args->how, msg);
    }
    if (rc == 0) {
        sample_text_write(&text);
    }
    sample_text_close(&text);
    bl_mem_free(params, bytes);
    train_model_free(model);
    if (kern != NULL) {
        kern->ops->close(kern);
    }
    kern_pool_free(pool);
    return rc;
}

static int run(struct sample_args *args, const struct bl_job *job, struct bl_errmsg *msg)
{
    struct train_weights weights;
    int rc = train_weights_open(&weights, args->model != NULL ? args->model : args->weights,
                                job != NULL ? &job->model : NULL, msg);
    if (args->tokens == 0 && args->steps == 0) {
        args->tokens = job != NULL ? 200 : 0;
        args->steps = 256;
    }
    if (rc == 0 && weights.context != 0 && args->steps > weights.context) {
        fprintf(stderr, "belay-train sample: %u steps, but the model's context is %u\n",
                args->steps, weights.context);
    }
    if (rc == 0) {
        rc = sample(args, &weights, threads_of(args, job), msg);
    }
    train_weights_close(&weights);
    return rc;
}

int train_sample_main(int argc, char **argv)
{
    struct sample_args args = {.how = {.temperature = 0.8, .top_k = 0, .top_p = 1, .seed = 1}};
    const struct bl_job *job = NULL;
    struct bl_errmsg msg = {{0}};
    int code = parse(&args, argc, argv);
    if (code != 0) {
        return code < 0 ? 0 : code;
    }
    if (args.job != NULL) {
        job = train_job_load(args.job);
        if (job == NULL) {
            return 2;
        }
    }
    int rc = run(&args, job, &msg);
    if (rc != 0) {
        fprintf(stderr, "belay-train sample: %s\n", msg.text);
    }
    return rc == 0 ? 0 : rc == BL_ECONFIG || rc == BL_ENOTBUILT ? 2 : 3;
}
