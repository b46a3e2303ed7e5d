/* SPDX-License-Identifier: Apache-2.0 */
/* belay-train: trains a Llama or GPT-2 model, alone or as a rank under belayd. */
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/dryrun.h"
#include "trainer/options.h"
#include "wire/belay.h"

#define EXIT_USAGE 2

static const char help[] =
    "Usage: belay-train --job FILE [--ranks P] [--threads T] [--steps N] [--digest]\n"
    "       belay-train --check FILE\n"
    "       belay-train --dry-run FILE [--ranks-per-node N] [--json]\n"
    "       belay-train --describe-layout FILE [--json]\n"
    "       belay-train --probe --job FILE\n"
    "       belay-train tokenize --merges FILE --out NAME [OPTION...] TEXT...\n"
    "       belay-train sample --model PATH [OPTION...]\n"
    "\n"
    "Trains the model of a job file. Started by belayd (BELAY_SOCKET is\n"
    "set) it is one rank of a supervised run; started by hand it trains alone.\n"
    "\n"
    "  --job FILE       the job (YAML or JSON)\n"
    "  --ranks P        processes that share the work; the result is the same bits\n"
    "                   for every P (default: the job's ranks)\n"
    "  --threads T      threads of each rank (default: the job's); same bits too\n"
    "  --steps N        stop after N steps; the schedule stays the job's\n"
    "  --digest         print the digest of weights and moments at the end\n"
    "  --nodes N        let the ranks play N nodes, between which they use TCP\n"
    "  --metrics FILE   append one JSON object per step\n"
    "  --tensorboard DIR  write TensorBoard's event files there\n"
    "  --ledger FILE    write \"step lane sample\" lines to FILE.RANK\n"
    "  --check FILE     check job, data and memory, start nothing\n"
    "  --dry-run FILE   say what a job of any size takes: memory, FLOPs, steps of\n"
    "                   an epoch, bubble, bytes on the wire; needs no data\n"
    "  --ranks-per-node N  of --dry-run (default: by placement.nodes)\n"
    "  --describe-layout FILE  a table of all ranks: place, groups, layers, state\n"
    "  --json           one JSON object instead of text\n"
    "  --probe          print the function id and the numeric probe\n"
    "  --help, --version\n"
    "\n"
    "Examples:\n"
    "  belay-train --check job.yaml\n"
    "  belay-train --job job.yaml --ranks 4 --digest\n"
    "  belay-train sample --model ckpt/step-000000001200.g7 \\\n"
    "      --prompt 'Once upon a time' --tokens 200 --temperature 0.8\n"
    "\n"
    "Exit codes: 0 done, 2 the job or the command line is wrong, 3 could not.\n";

enum {
    OPT_CHECK = 256,
    OPT_DRY_RUN,
    OPT_LAYOUT,
    OPT_PER_NODE,
    OPT_JSON,
    OPT_PROBE,
    OPT_DIGEST,
    OPT_NODES,
    OPT_METRICS,
    OPT_LEDGER,
    OPT_EVENTS,
    OPT_VERSION
};

static const struct option options[] = {
    {"job", required_argument, NULL, 'j'},
    {"ranks", required_argument, NULL, 'p'},
    {"threads", required_argument, NULL, 't'},
    {"steps", required_argument, NULL, 's'},
    {"digest", no_argument, NULL, OPT_DIGEST},
    {"nodes", required_argument, NULL, OPT_NODES},
    {"metrics", required_argument, NULL, OPT_METRICS},
    {"ledger", required_argument, NULL, OPT_LEDGER},
    {"tensorboard", required_argument, NULL, OPT_EVENTS},
    {"check", required_argument, NULL, OPT_CHECK},
    {"dry-run", required_argument, NULL, OPT_DRY_RUN},
    {"describe-layout", required_argument, NULL, OPT_LAYOUT},
    {"ranks-per-node", required_argument, NULL, OPT_PER_NODE},
    {"json", no_argument, NULL, OPT_JSON},
    {"probe", no_argument, NULL, OPT_PROBE},
    {"help", no_argument, NULL, 'h'},
    {"version", no_argument, NULL, OPT_VERSION},
    {NULL, 0, NULL, 0},
};

struct main_args {
    const char *job, *check, *dry_run, *layout;
    int probe, json;
    uint32_t per_node;
    struct train_alone alone;
};

static uint64_t number(const char *option, const char *text, uint64_t max)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || *text < '0' || *text > '9' || *end != 0 || value == 0 || value > max) {
        fprintf(stderr, "belay-train: --%s %s: not a number from 1 to %llu\n", option, text,
                (unsigned long long)max);
        exit(EXIT_USAGE);
    }
    return value;
}

/* Fills args; ends the program for --help, --version and mistakes. */
static void parse(struct main_args *args, int argc, char **argv)
{
    int opt;
    while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (opt) {
        case 'j':
            args->job = optarg;
            break;
        case 'p':
            args->alone.ranks = (uint32_t)number("ranks", optarg, 1024);
            break;
        case 't':
            args->alone.threads = (uint32_t)number("threads", optarg, 256);
            break;
        case 's':
            args->alone.steps = number("steps", optarg, UINT64_MAX);
            break;
        case OPT_DIGEST:
            args->alone.digest = 1;
            break;
        case OPT_NODES:
            args->alone.nodes = (int)number("nodes", optarg, 64);
            break;
        case OPT_METRICS:
            args->alone.metrics = optarg;
            break;
        case OPT_EVENTS:
            args->alone.tensorboard = optarg;
            break;
        case OPT_LEDGER:
            args->alone.ledger = optarg;
            break;
        case OPT_CHECK:
            args->check = optarg;
            break;
        case OPT_DRY_RUN:
            args->dry_run = optarg;
            break;
        case OPT_LAYOUT:
            args->layout = optarg;
            break;
        case OPT_PER_NODE:
            args->per_node = (uint32_t)number("ranks-per-node", optarg, 16384);
            break;
        case OPT_JSON:
            args->json = 1;
            break;
        case OPT_PROBE:
            args->probe = 1;
            break;
        case 'h':
            fputs(help, stdout);
            exit(0);
        case OPT_VERSION:
            puts("belay-train " BELAY_VERSION);
            exit(0);
        default:
            exit(EXIT_USAGE); /* getopt_long has named it */
        }
    }
    if (optind < argc) {
        fprintf(stderr, "belay-train: %s: no such command; see belay-train --help\n", argv[optind]);
        exit(EXIT_USAGE);
    }
}

int main(int argc, char **argv)
{
    struct main_args args;
    memset(&args, 0, sizeof args);
    signal(SIGPIPE, SIG_IGN);
    if (argc > 1 && strcmp(argv[1], "tokenize") == 0) {
        return train_tokenize_main(argc - 1, argv + 1);
    }
    if (argc > 1 && strcmp(argv[1], "sample") == 0) {
        return train_sample_main(argc - 1, argv + 1);
    }
    parse(&args, argc, argv);
    if (args.check != NULL) {
        return train_check_main(args.check);
    }
    if (args.dry_run != NULL) {
        return train_dryrun_main(args.dry_run, args.per_node, args.json);
    }
    if (args.layout != NULL) {
        return train_layout_main(args.layout, args.json);
    }
    if (args.probe && args.job == NULL) {
        fputs("belay-train: --probe needs --job FILE; see belay-train --help\n", stderr);
        return EXIT_USAGE;
    }
    if (args.probe) {
        return train_probe_main(args.job, args.alone.threads);
    }
    if (belay_is_supervised()) {
        return train_supervised_main(args.job);
    }
    if (args.job == NULL) {
        fputs("belay-train: --job FILE is missing; see belay-train --help\n", stderr);
        return EXIT_USAGE;
    }
    args.alone.job = train_job_load(args.job);
    return args.alone.job == NULL ? EXIT_USAGE : train_alone_run(&args.alone);
}
