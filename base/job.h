/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The job: what job.yaml says, checked and with defaults filled in. One option table
 * (job_options.c) holds each option's name, type, bounds, default, whether it is frozen or live,
 * and help; errors carry line and column, an unknown key is refused with the nearest known one.
 */
#ifndef BL_BASE_JOB_H
#define BL_BASE_JOB_H

#include <stddef.h>
#include <stdint.h>

#include "base/clock.h" /* bl_time_scaled_ms, for the deadlines */
#include "base/error.h"

#define BL_JOB_NAME_MAX  64
#define BL_PATH_MAX      1024
#define BL_JOB_FILES_MAX 64
#define BL_JOB_ROOTS_MAX 4
#define BL_JOB_ARGS_MAX  64
#define BL_JOB_BYTES_MAX (1024 * 1024) /* of a job file */
#define BL_JOB_AUTO      UINT64_MAX    /* "auto": Belay chooses */

enum bl_arch { BL_ARCH_LLAMA, BL_ARCH_GPT2 }; /* places in the option's choices */

enum bl_recompute { BL_RECOMPUTE_NONE, BL_RECOMPUTE_SELECTIVE, BL_RECOMPUTE_FULL };

enum bl_precision { BL_PRECISION_AUTO, BL_PRECISION_FP32, BL_PRECISION_BF16 };

struct bl_job_model {
    uint32_t arch; /* enum bl_arch */
    uint32_t layers, dim, hidden, heads, kv_heads, vocab;
    uint32_t tied;    /* head shares the embedding's weights */
    uint32_t bias;    /* GPT-2: biases in linear layers and norms */
    uint32_t context; /* GPT-2: rows of the position embedding, at least seq_len; Llama: 0 */
    double rope_theta, norm_eps;
    double rope_factor, rope_low,
        rope_high; /* Llama 3's stretching of positions; factor 1 or 0: none */
    uint32_t rope_context;
};

struct bl_job_train {
    uint32_t global_batch; /* sequences a step over all lanes: lanes * m * micro_batch exactly */
    uint32_t micro_batch;  /* sequences in one forward pass */
    uint32_t seq_len;      /* tokens */
    uint64_t steps;
    double lr, lr_min, weight_decay, beta1, beta2, eps, clip; /* clip 0: none */
    uint64_t warmup;                                          /* steps */
    uint64_t seed;
    char init[BL_PATH_MAX]; /* a checkpoint or root with the first weights; "": random ones */
    uint64_t eval_every;    /* steps; 0 never */
    uint32_t eval_batches;
    double eval_split;       /* last part of the data that is held out, 0 to 0.5 */
    uint32_t reduction_fast; /* 0 exact (default), 1 fast */
    uint32_t recompute;      /* enum bl_recompute */
    uint32_t precision;      /* enum bl_precision: of weights that compute, and activations */
    uint32_t head_chunk;     /* rows of logits at once; 0: all of a micro-batch */
};

struct bl_job_root {
    char path[BL_PATH_MAX];
    uint32_t shared; /* all nodes see the same directory */
    uint64_t every;  /* steps between saves; 0: on request and at the end; BL_JOB_AUTO */
    /* What any rule keeps is kept; two verified ones always are. */
    uint32_t keep;       /* newest */
    uint32_t keep_best;  /* with the lowest loss; 0 none */
    uint64_t keep_every; /* whose step is a multiple of it, for ever; 0 none */
    uint64_t bytes_max;  /* of all: then the oldest go first; 0 no limit */
    uint64_t rate_max;   /* bytes a second, of saves and of reading back; 0 no limit */
    uint32_t verify;     /* read each checkpoint back after its commit */
};

struct bl_job_deadlines { /* milliseconds, before BELAY_TIME_SCALE */
    uint32_t beat;        /* interval of reports and beats */
    uint32_t lease;       /* node silent and no step progress */
    uint32_t step_floor;  /* a step is never called hung before */
    uint32_t step_ceil;   /* nor allowed to take longer, whatever was learned */
    uint32_t init_floor;  /* until a started rank has joined */
    uint32_t load;        /* loading state and building communicators */
    uint32_t save;        /* one save from pin to commit */
    uint32_t join;        /* all wanted ranks present in a new generation */
    uint32_t restart;     /* how long recovery waits for an away daemon */
    uint32_t grace;       /* park and leave before a kill */
    uint32_t root;        /* a root is stuck when its engine does nothing for so long */
};

struct bl_job {
    char name[BL_JOB_NAME_MAX];
    char run_dir[BL_PATH_MAX]; /* logs, metrics; absolute */
    uint32_t tensorboard;      /* write event files to run_dir/tensorboard */
    uint32_t ranks, lanes;
    uint32_t nodes_min; /* placement.nodes: daemons that must be there before the run starts */
    uint32_t tp, pp, zero;
    uint32_t pp_min;     /* stages below which a run that lost ranks waits instead of going on */
    uint32_t interleave; /* chunks of layers that each stage holds */
    uint32_t sequence;   /* sequence parallel between the layers that tp cuts */
    struct bl_job_model model;
    char model_config[BL_PATH_MAX]; /* a config.json; empty as soon as the job is read */
    char data_files[BL_JOB_FILES_MAX][BL_PATH_MAX];
    uint32_t data_file_count;
    double data_weights[BL_JOB_FILES_MAX]; /* share of each file in the mixture; none: one after
                                              the other */
    uint32_t data_weight_count;            /* 0, or as many as files */
    char eval_files[BL_JOB_FILES_MAX][BL_PATH_MAX]; /* none: train.eval_split of the files */
    uint32_t eval_file_count;
    char tokenizer[32]; /* "bytes" (text files) or "shards" (files of tokens) */
    struct bl_job_train train;
    char backend[16];            /* auto | cpu | cuda */
    double peak_flops;           /* FLOP/s of a rank's processor; 0: not said */
    uint32_t threads;            /* per rank */
    uint64_t snapshot_every;     /* steps; 1 */
    uint64_t snapshot_bytes_max; /* node memory budget for slots */
    struct bl_job_root roots[BL_JOB_ROOTS_MAX];
    uint32_t root_count;
    char codec[16]; /* of checkpoints: "auto", "zstd", "none" */
    struct bl_job_deadlines deadlines;
    char command[BL_JOB_ARGS_MAX]
                [BL_PATH_MAX]; /* the trainer's argv; empty: belay-train beside belayd */
    uint32_t command_count;
};

/* Parses `text` (bytes long, at most BL_JOB_BYTES_MAX); `where` names it in errors
 * ("job.yaml:12:3: ..."). Relative paths are taken from `base_dir`. All checks that need only the
 * file are done (sums that must be exact, bounds); no file is opened but that
 * of model.config. On error *ret is undefined
 * and the code is BL_ECONFIG, or BL_ENOTBUILT for what a later version will have. The struct is
 * large (about 210 KiB): keep it off small stacks. */
BL_MUST_CHECK int bl_job_parse(struct bl_job *ret, const char *text, size_t bytes,
                               const char *where, const char *base_dir, struct bl_errmsg *msg);

/* Reads and parses a job file; paths in it are relative to its own directory. */
BL_MUST_CHECK int bl_job_load(struct bl_job *ret, const char *path, struct bl_errmsg *msg);

/* The frozen job as JSON (owned, free()), canonical: sorted keys, all defaults written out. Parses
 * back by bl_job_parse (JSON is YAML). NULL when out of memory. */
char *bl_job_to_json(const struct bl_job *job);

/* XXH3 over the canonical text of exactly those options that the arithmetic depends on: model,
 * data, train, lanes, tp; not ranks, threads, paths of roots, deadlines. */
uint64_t bl_job_function_digest(const struct bl_job *job);

/* Sets one option by its key ("ranks", "deadlines.beat"; no lists, no roots) and checks the whole
 * again; on error the job is unchanged. BL_ECONFIG or BL_ENOTBUILT. */
BL_MUST_CHECK int bl_job_set(struct bl_job *job, const char *key, const char *value,
                             const char *base_dir, struct bl_errmsg *msg);

/* The key of the first frozen option that differs, or NULL: whether `b` may resume the run of `a`.
 * A view of the table. */
const char *bl_job_frozen_difference(const struct bl_job *a, const struct bl_job *b);

/* Prints the option table for `--help-job` and the manual page: name, type, bounds, default, help.
 */
void bl_job_options_print(void *file /* FILE * */);

#endif
