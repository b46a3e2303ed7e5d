/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The option table. It is the one home of every option's type, bounds, default and help; the
 * reader, the canonical text, `belay set`, the help and the manual page all come from it.
 */
#include "base/job_options.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define FIELD(name) offsetof(struct bl_job, name)
#define ROOT(name)  offsetof(struct bl_job_root, name)

/* clang-format off: a table is read by column. */
#define TEXT(k, c, f, cap, def, help)                                                              \
    {                                                                                              \
        k, JOB_TEXT, c, 0, f, cap, 0, 0, 0, 0, def, NULL, NULL, help                               \
    }
#define PATH(k, c, fl, f, def, help)                                                               \
    {                                                                                              \
        k, JOB_PATH, c, fl, f, BL_PATH_MAX, 0, 0, 0, 0, def, NULL, NULL, help                      \
    }
#define CHOICE(k, c, fl, f, cap, def, ch, plan, help)                                              \
    {                                                                                              \
        k, JOB_CHOICE, c, fl, f, cap, 0, 0, 0, 0, def, ch, plan, help                              \
    }
#define U32(k, c, fl, f, lo, hi, def, help)                                                        \
    {                                                                                              \
        k, JOB_U32, c, fl, f, 0, lo, hi, 0, 0, def, NULL, NULL, help                               \
    }
#define U64(k, c, fl, f, lo, hi, def, help)                                                        \
    {                                                                                              \
        k, JOB_U64, c, fl, f, 0, lo, hi, 0, 0, def, NULL, NULL, help                               \
    }
#define SIZE(k, c, f, lo, hi, def, help)                                                           \
    {                                                                                              \
        k, JOB_SIZE, c, 0, f, 0, lo, hi, 0, 0, def, NULL, NULL, help                               \
    }
#define MS(k, f, lo, hi, def, help)                                                                \
    {                                                                                              \
        k, JOB_MS, JOB_LIVE, 0, FIELD(f), 0, lo, hi, 0, 0, def, NULL, NULL, help                   \
    }
#define REAL(k, c, fl, f, lo, hi, def, help)                                                       \
    {                                                                                              \
        k, JOB_REAL, c, fl, f, 0, 0, 0, lo, hi, def, NULL, NULL, help                              \
    }
#define BOOL(k, c, fl, f, def, help)                                                               \
    {                                                                                              \
        k, JOB_BOOL, c, fl, f, 0, 0, 1, 0, 0, def, NULL, NULL, help                                \
    }
#define LATER(k, help)                                                                             \
    {                                                                                              \
        k, JOB_TEXT, JOB_FROZEN, JOB_ABSENT, JOB_NO_FIELD, 0, 0, 0, 0, 0, "", NULL, NULL, help     \
    }

#define FN        JOB_FUNCTION
#define STEPS_MAX (1ULL << 40)
#define HOUR_MS   3600000ULL

const struct job_option job_options[] = {
    TEXT("name", JOB_FROZEN, FIELD(name), BL_JOB_NAME_MAX, NULL,
         "name of the run: letters, digits, '.', '_' and '-'"),
    PATH("run_dir", JOB_RESUME, 0, FIELD(run_dir), "belay-run", "directory for logs and metrics"),
    BOOL("tensorboard", JOB_RESUME, 0, FIELD(tensorboard), "false",
         "write TensorBoard's event files to run_dir/tensorboard"),
    U32("ranks", JOB_RESUME, 0, FIELD(ranks), 1, 16384, NULL, "trainer processes to start with"),
    U32("lanes", JOB_FROZEN, FN, FIELD(lanes), 0, 65536, "0",
        "fixed summing order: at least as many as ranks; 0: as many as ranks"),
    U32("layout.tp", JOB_FROZEN, FN, FIELD(tp), 1, 1024, "1", "tensor parallel ranks"),
    U32("layout.pp", JOB_RESUME, 0, FIELD(pp), 1, 1024, "1", "pipeline stages"),
    U32("layout.pp_min", JOB_RESUME, 0, FIELD(pp_min), 1, 1024, "1",
        "fewest stages that a run that lost ranks may be cut to; below them it waits"),
    U32("layout.zero", JOB_RESUME, 0, FIELD(zero), 0, 3, "1", "ZeRO stage"),
    U32("layout.interleave", JOB_RESUME, 0, FIELD(interleave), 1, 64, "1",
        "chunks of layers on each pipeline stage; above 1: interleaved 1F1B"),
    BOOL("layout.sequence", JOB_FROZEN, FN, FIELD(sequence), "false",
         "tensor parallel ranks share what lies between the cut layers by rows"),
    U32("placement.nodes", JOB_RESUME, 0, FIELD(nodes_min), 1, 4096, "1",
        "daemons that must be there before the run starts"),

    PATH("model.config", JOB_RESUME, JOB_EMPTY, FIELD(model_config), "",
         "Hugging Face's config.json, for the options of the model"),
    {"model.arch", JOB_INDEX, JOB_FROZEN, FN, FIELD(model.arch), 0, 0, 0, 0, 0, "llama",
     "llama|gpt2", NULL, "architecture"},
    U32("model.layers", JOB_FROZEN, FN, FIELD(model.layers), 1, 1024, NULL, "transformer blocks"),
    U32("model.dim", JOB_FROZEN, FN, FIELD(model.dim), 1, 65536, NULL, "width"),
    U32("model.hidden", JOB_FROZEN, FN, FIELD(model.hidden), 0, 1048576, "0",
        "width of the feed-forward part; 0: 8/3 dim, up to a multiple of 32 (gpt2: 4 dim)"),
    U32("model.heads", JOB_FROZEN, FN, FIELD(model.heads), 1, 1024, NULL,
        "attention heads; divides dim"),
    U32("model.kv_heads", JOB_FROZEN, FN, FIELD(model.kv_heads), 0, 1024, "0",
        "key and value heads; divides heads; 0: as many as heads"),
    U32("model.vocab", JOB_FROZEN, FN, FIELD(model.vocab), 2, 16777216, "256", "token kinds"),
    BOOL("model.tied", JOB_FROZEN, FN, FIELD(model.tied), "false",
         "the head shares the embedding's weights; gpt2: true when not given"),
    BOOL("model.bias", JOB_FROZEN, FN, FIELD(model.bias), "true",
         "biases in linear layers and norms (gpt2 only)"),
    U32("model.context", JOB_FROZEN, FN, FIELD(model.context), 0, 1U << 20, "0",
        "longest sequence of the position embedding (gpt2 only); 0: train.seq_len"),
    REAL("model.rope_theta", JOB_FROZEN, FN, FIELD(model.rope_theta), 1, 1e9, "10000",
         "base of the rotary positions"),
    REAL("model.rope_factor", JOB_FROZEN, FN, FIELD(model.rope_factor), 1, 1e6, "1",
         "Llama 3's stretching of rotary positions; 1: none"),
    REAL("model.rope_low", JOB_FROZEN, FN, FIELD(model.rope_low), 1e-3, 1e6, "1",
         "waves in rope_context below which positions are stretched"),
    REAL("model.rope_high", JOB_FROZEN, FN, FIELD(model.rope_high), 1e-3, 1e6, "4",
         "waves in rope_context above which they are not"),
    U32("model.rope_context", JOB_FROZEN, FN, FIELD(model.rope_context), 1, 1U << 24, "8192",
        "longest sequence before the stretching"),
    REAL("model.norm_eps", JOB_FROZEN, FN, FIELD(model.norm_eps), 1e-12, 1, "1e-5",
         "added under the root of RMSNorm"),

    {"data.files[]", JOB_PATH, JOB_FROZEN, FN, FIELD(data_files), BL_PATH_MAX, 1, BL_JOB_FILES_MAX,
     0, 0, NULL, NULL, NULL, "text files or token shards, in this order"},
    {"data.weights[]", JOB_REAL, JOB_FROZEN, FN | JOB_ABOVE, FIELD(data_weights), 0, 0,
     BL_JOB_FILES_MAX, 0, 1e9, "", NULL, NULL,
     "share of each file in a mixture; empty: one file after the other"},
    {"data.eval_files[]", JOB_PATH, JOB_FROZEN, FN, FIELD(eval_files), BL_PATH_MAX, 0,
     BL_JOB_FILES_MAX, 0, 0, "", NULL, NULL,
     "for evaluation; empty: train.eval_split of data.files"},
    CHOICE("data.tokenizer", JOB_FROZEN, FN, FIELD(tokenizer), 32, "bytes", "bytes|shards", NULL,
           "bytes: the files are text; shards: they are tokens (llm.c's or Megatron-LM's layout)"),

    U32("train.global_batch", JOB_FROZEN, FN, FIELD(train.global_batch), 1, 1U << 24, NULL,
        "sequences a step: lanes times micro_batch times a whole number"),
    U32("train.micro_batch", JOB_FROZEN, FN, FIELD(train.micro_batch), 1, 65536, "1",
        "sequences in one forward pass"),
    U32("train.seq_len", JOB_FROZEN, FN, FIELD(train.seq_len), 1, 1U << 20, NULL,
        "tokens in a sequence"),
    U64("train.steps", JOB_FROZEN, FN, FIELD(train.steps), 1, STEPS_MAX, NULL, "steps to train"),
    REAL("train.lr", JOB_FROZEN, FN, FIELD(train.lr), 0, 10, "3e-4",
         "learning rate after the warm-up"),
    REAL("train.lr_min", JOB_FROZEN, FN, FIELD(train.lr_min), 0, 10, "0",
         "learning rate at the end of the cosine"),
    U64("train.warmup", JOB_FROZEN, FN, FIELD(train.warmup), 0, STEPS_MAX, "0",
        "steps of linear warm-up"),
    REAL("train.weight_decay", JOB_FROZEN, FN, FIELD(train.weight_decay), 0, 10, "0.1",
         "AdamW's decay of matrices"),
    {"train.betas[]", JOB_REAL, JOB_FROZEN, FN | JOB_BELOW, FIELD(train.beta1), 0, 2, 2, 0, 1,
     "0.9,0.95", NULL, NULL, "AdamW's two decay rates"},
    REAL("train.eps", JOB_FROZEN, FN, FIELD(train.eps), 1e-30, 1, "1e-8", "AdamW's epsilon"),
    REAL("train.clip", JOB_FROZEN, FN, FIELD(train.clip), 0, 1e9, "1",
         "largest norm of the gradient; 0: no clipping"),
    U64("train.seed", JOB_FROZEN, FN, FIELD(train.seed), 0, INT64_MAX, "1",
        "of all random numbers"),
    PATH("train.init", JOB_FROZEN, JOB_EMPTY, FIELD(train.init), "",
         "checkpoint or root whose weights are the first; empty: random ones"),
    {"train.reduction", JOB_INDEX, JOB_FROZEN, FN, FIELD(train.reduction_fast), 0, 0, 0, 0, 0,
     "exact", "exact|fast", NULL, "order of sums over ranks: fixed, or whatever is fastest"},
    {"train.recompute", JOB_INDEX, JOB_RESUME, 0, FIELD(train.recompute), 0, 0, 0, 0, 0, "none",
     "none|selective|full", NULL, "what backward computes again instead of keeping it in memory"},
    {"train.precision", JOB_INDEX, JOB_FROZEN, FN, FIELD(train.precision), 0, 0, 0, 0, 0, "auto",
     "auto|fp32|bf16", NULL,
     "of activations and the weights that compute; the state stays fp32; auto: bf16 on cuda"},
    U32("train.head_chunk", JOB_FROZEN, FN, FIELD(train.head_chunk), 0, 1U << 30, "0",
        "rows of logits in memory at once, made again for backward; 0: all of a micro-batch"),
    U64("train.eval_every", JOB_RESUME, 0, FIELD(train.eval_every), 0, STEPS_MAX, "0",
        "steps between evaluations; 0: never"),
    U32("train.eval_batches", JOB_RESUME, 0, FIELD(train.eval_batches), 1, 1U << 20, "4",
        "micro-batches in an evaluation"),
    REAL("train.eval_split", JOB_FROZEN, FN, FIELD(train.eval_split), 0, 0.5, "0.05",
         "last part of the data, held out for evaluation"),

    CHOICE("backend", JOB_FROZEN, 0, FIELD(backend), 16, "auto", "auto|cpu|cuda", NULL,
           "where the trainer computes; auto: on a GPU where one can be used"),
    REAL("peak_flops", JOB_RESUME, 0, FIELD(peak_flops), 0, 1e18, "0",
         "FLOP/s of a rank's processor by its datasheet, for the MFU beside tok/s; 0: none is "
         "shown"),
    U32("threads", JOB_RESUME, 0, FIELD(threads), 1, 1024, "1", "compute threads of a rank"),
    U64("snapshot.every", JOB_FROZEN, 0, FIELD(snapshot_every), 1, STEPS_MAX, "1",
        "steps between snapshots in memory"),
    SIZE("snapshot.bytes_max", JOB_LIVE, FIELD(snapshot_bytes_max), 0, 1ULL << 50, "0",
         "memory of a node for snapshots; 0: what the node has"),
    CHOICE("protect", JOB_FROZEN, 0, JOB_NO_FIELD, 16, "node", "node", "peer",
           "where a step must be before the next is taken"),
    CHOICE("depth", JOB_FROZEN, 0, JOB_NO_FIELD, 16, "1", "1", "2|3|4|5|6|7|8",
           "steps that may run ahead of their protection"),

    PATH("roots[].path", JOB_RESUME, 0, ROOT(path), NULL,
         "directory for checkpoints; {node} in it is the node's name"),
    BOOL("roots[].shared", JOB_RESUME, 0, ROOT(shared), "false",
         "all nodes see the same directory"),
    U64("roots[].every", JOB_LIVE, JOB_AUTO, ROOT(every), 0, STEPS_MAX, "100",
        "steps between saves; 0: on request and at the end; auto: by cost and failures seen"),
    U32("roots[].keep", JOB_LIVE, 0, ROOT(keep), 1, 1000000, "3", "newest checkpoints to keep"),
    U64("roots[].keep_every", JOB_LIVE, 0, ROOT(keep_every), 0, STEPS_MAX, "0",
        "checkpoints whose step is a multiple of it are kept for ever; 0: none"),
    U32("roots[].keep_best", JOB_LIVE, 0, ROOT(keep_best), 0, 1000000, "0",
        "checkpoints with the lowest loss to keep beside; 0: none"),
    SIZE("roots[].bytes_max", JOB_LIVE, ROOT(bytes_max), 0, 1ULL << 60, "0",
         "bytes that checkpoints may take: then the oldest go first; 0: no limit"),
    SIZE("roots[].rate_max", JOB_LIVE, ROOT(rate_max), 0, 1ULL << 50, "0",
         "bytes a second that a save writes, and reading back reads; 0: no limit"),
    BOOL("roots[].verify", JOB_LIVE, 0, ROOT(verify), "true",
         "read each checkpoint back after its commit, at low priority"),
    CHOICE("codec", JOB_RESUME, 0, FIELD(codec), 16, "auto", "auto|zstd|none", NULL,
           "compression of checkpoints; auto: as far as the target is slower; none: plain files"),

    MS("deadlines.beat", deadlines.beat, 10, HOUR_MS, "200ms", "interval of reports and beats"),
    MS("deadlines.lease", deadlines.lease, 100, HOUR_MS, "5s",
       "a node is lost when silent for this long and no step moves"),
    MS("deadlines.step_floor", deadlines.step_floor, 2001, HOUR_MS, "4s",
       "a step is never called hung before; more than 2s, as a pause of 2s is no hang"),
    MS("deadlines.step_ceil", deadlines.step_ceil, 2001, 24 * HOUR_MS, "600s",
       "nor allowed to take longer, whatever was learned"),
    MS("deadlines.init_floor", deadlines.init_floor, 1000, 24 * HOUR_MS, "60s",
       "until a started rank has joined"),
    MS("deadlines.load", deadlines.load, 1000, 24 * HOUR_MS, "60s",
       "loading state and building communicators"),
    MS("deadlines.save", deadlines.save, 1000, 24 * HOUR_MS, "600s",
       "one save, from pin to commit"),
    MS("deadlines.join", deadlines.join, 1000, 24 * HOUR_MS, "60s",
       "all wanted ranks present in a new generation"),
    MS("deadlines.restart", deadlines.restart, 100, HOUR_MS, "10s",
       "how long recovery waits for a daemon that is away"),
    MS("deadlines.grace", deadlines.grace, 100, HOUR_MS, "10s",
       "to park or leave before a rank is killed"),
    MS("deadlines.root", deadlines.root, 1000, 24 * HOUR_MS, "60s",
       "a root is stuck when it was asked for something and nothing moves for so long"),

    {"command[]", JOB_TEXT, JOB_RESUME, 0, FIELD(command), BL_PATH_MAX, 0, BL_JOB_ARGS_MAX, 0, 0,
     "", NULL, NULL, "the trainer and its arguments; empty: belay-train beside belayd"},
    LATER("launcher", "command to start ranks through"),
    LATER("env", "environment of the ranks"),
    LATER("limits", "resource limits of the ranks"),
};
/* clang-format on */

const size_t job_option_count = sizeof(job_options) / sizeof(job_options[0]);
_Static_assert(sizeof(job_options) / sizeof(job_options[0]) <= JOB_OPTIONS_MAX,
               "the marks have a place for every option");
/* The two betas are read as a list of two. */
_Static_assert(offsetof(struct bl_job_train, beta2) ==
                   offsetof(struct bl_job_train, beta1) + sizeof(double),
               "beta1 and beta2 lie side by side");

const struct job_option *job_option_find(const char *key)
{
    for (size_t i = 0; i < job_option_count; i++) {
        if (strcmp(job_options[i].key, key) == 0) {
            return &job_options[i];
        }
    }
    return NULL;
}

int job_section_exists(const char *key)
{
    size_t bytes = strlen(key);
    for (size_t i = 0; i < job_option_count; i++) {
        if (strncmp(job_options[i].key, key, bytes) == 0 && job_options[i].key[bytes] == '.') {
            return 1;
        }
    }
    return 0;
}

int job_option_is_list(const struct job_option *option)
{
    size_t bytes = strlen(option->key);
    return bytes > 2 && strcmp(option->key + bytes - 2, "[]") == 0;
}

size_t job_list_stride(const struct job_option *option)
{
    return option->type == JOB_REAL ? sizeof(double) : option->capacity;
}

size_t job_list_count_offset(const struct job_option *option)
{
    static const struct {
        size_t list, count;
    } counts[] = {
        {FIELD(data_files), FIELD(data_file_count)},
        {FIELD(data_weights), FIELD(data_weight_count)},
        {FIELD(eval_files), FIELD(eval_file_count)},
        {FIELD(command), FIELD(command_count)},
    };
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        if (counts[i].list == option->offset) {
            return counts[i].count;
        }
    }
    return JOB_NO_FIELD;
}

int job_option_is_root(const struct job_option *option)
{
    return strncmp(option->key, JOB_ROOT_PREFIX, strlen(JOB_ROOT_PREFIX)) == 0;
}

/* Edit distance (insert, delete, replace, swap of neighbours); longer names are cut. */
static unsigned near_distance(const char *a, const char *b)
{
    size_t n = strnlen(a, BL_JOB_KEY_MAX);
    size_t m = strnlen(b, BL_JOB_KEY_MAX);
    unsigned d[3][BL_JOB_KEY_MAX + 1];
    for (size_t j = 0; j <= m; j++) {
        d[0][j] = (unsigned)j;
    }
    for (size_t i = 1; i <= n; i++) {
        unsigned *row = d[i % 3];
        const unsigned *above = d[(i - 1) % 3];
        row[0] = (unsigned)i;
        for (size_t j = 1; j <= m; j++) {
            unsigned best = above[j - 1] + (a[i - 1] != b[j - 1]);
            best = above[j] + 1 < best ? above[j] + 1 : best;
            best = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
                unsigned swapped = d[(i - 2) % 3][j - 2] + 1;
                best = swapped < best ? swapped : best;
            }
            row[j] = best;
        }
    }
    return d[n % 3][m];
}

static const char *near_last_part(const char *key)
{
    const char *dot = strrchr(key, '.');
    return dot != NULL ? dot + 1 : key;
}

static int near_same_section(const char *a, const char *b)
{
    size_t n = (size_t)(near_last_part(a) - a);
    return n == (size_t)(near_last_part(b) - b) && strncmp(a, b, n) == 0;
}

static void near_consider(const char *candidate, size_t bytes, unsigned distance, unsigned *best,
                          char out[BL_JOB_KEY_MAX])
{
    if (distance < *best && bytes < BL_JOB_KEY_MAX) {
        *best = distance;
        memcpy(out, candidate, bytes);
        out[bytes] = '\0';
    }
}

void job_option_nearest(const char *key, char out[BL_JOB_KEY_MAX])
{
    unsigned best = UINT32_MAX;
    out[0] = '\0';
    for (size_t i = 0; i < job_option_count; i++) {
        const char *candidate = job_options[i].key;
        if (job_options[i].flags & JOB_ABSENT) {
            continue;
        }
        char name[BL_JOB_KEY_MAX];
        size_t bytes = strcspn(candidate, "[.");
        if (strchr(key, '.') == NULL && candidate[bytes] != '\0') {
            memcpy(name, candidate, bytes);
            name[bytes] = '\0';
            near_consider(candidate, bytes, 2 * near_distance(key, name), &best, out);
        }
        /* By last part; one step more for another section, so that "lr" finds "train.lr". */
        snprintf(name, sizeof(name), "%s", near_last_part(candidate));
        name[strcspn(name, "[")] = '\0';
        unsigned distance =
            2 * near_distance(near_last_part(key), name) + !near_same_section(key, candidate);
        bytes = strlen(candidate) - (job_option_is_list(&job_options[i]) ? 2 : 0);
        near_consider(candidate, bytes, distance, &best, out);
    }
}

static void options_print_bounds(FILE *file, const struct job_option *option)
{
    char from[32];
    switch (option->type) {
    case JOB_CHOICE:
    case JOB_INDEX:
        fprintf(file, "%s", option->choices);
        break;
    case JOB_BOOL:
        fprintf(file, "true|false");
        break;
    case JOB_REAL:
        fprintf(file, "number, %s%g to %s%g", option->flags & JOB_ABOVE ? "above " : "",
                option->real_min, option->flags & JOB_BELOW ? "below " : "", option->real_max);
        break;
    case JOB_MS:
        snprintf(from, sizeof(from), "%" PRIu64 "ms", option->min);
        fprintf(file, "time, %s to %" PRIu64 "s", from, option->max / 1000);
        break;
    case JOB_SIZE:
        fprintf(file, "size, at most %" PRIu64 " bytes", option->max);
        break;
    case JOB_U32:
    case JOB_U64:
        fprintf(file, "integer, %" PRIu64 " to %" PRIu64 "%s", option->min, option->max,
                option->flags & JOB_AUTO ? ", or auto" : "");
        break;
    case JOB_TEXT:
    case JOB_PATH:
        fprintf(file, option->type == JOB_PATH ? "path" : "text");
        break;
    }
}

void bl_job_options_print(void *file)
{
    static const char *const change_names[] = {"frozen", "on resume", "live"};
    for (size_t i = 0; i < job_option_count; i++) {
        const struct job_option *option = &job_options[i];
        if (option->flags & JOB_ABSENT) {
            continue;
        }
        fprintf(file, "%s\n    ", option->key);
        if (job_option_is_list(option)) {
            fprintf(file, "list of ");
        }
        options_print_bounds(file, option);
        if (option->fallback == NULL) {
            fprintf(file, "; required");
        } else if (option->fallback[0] != '\0') {
            fprintf(file, "; default %s", option->fallback);
        }
        fprintf(file, "; %s\n    %s\n", change_names[option->change], option->help);
    }
}
