/* SPDX-License-Identifier: Apache-2.0 */
/* `belay-train tokenize`: text files to token shards in llm.c's layout (trainer/token_file.h). */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/progress.h"
#include "trainer/bpe.h"
#include "trainer/options.h"
#include "trainer/token_file.h"

#define SHARD_TOKENS_MAX     ((1ull << 31) - 1) /* the header's count is an int32 */
#define SHARD_TOKENS_DEFAULT 100000000ull

static const char help[] =
    "Usage: belay-train tokenize --merges FILE --out NAME [OPTION...] TEXT...\n"
    "\n"
    "Encodes text files with GPT-2's byte pairs and writes token shards in llm.c's\n"
    "layout: NAME_val.bin with the first tokens, NAME_train.bin with the rest (or\n"
    "NAME_train_000001.bin, ... when there are more than a shard takes). A job reads\n"
    "them with data.tokenizer: shards. Each document begins with the end-of-text\n"
    "token.\n"
    "\n"
    "  --merges FILE        the list of merges (GPT-2's vocab.bpe or merges.txt)\n"
    "  --out NAME           path of the shards, without their endings\n"
    "  --documents KIND     file: each file is a document (default); paragraph: a\n"
    "                       new one begins after each empty line\n"
    "  --val-tokens N       tokens of NAME_val.bin (default 0: no such file)\n"
    "  --shard-tokens N     largest shard (default 100000000)\n"
    "  --force              replace shards that are there\n"
    "  --quiet              no progress\n"
    "  --help               this text\n"
    "\n"
    "Examples:\n"
    "  belay-train tokenize --merges vocab.bpe --out data/books book1.txt book2.txt\n"
    "  belay-train tokenize --merges vocab.bpe --documents paragraph \\\n"
    "      --val-tokens 32768 --out tiny_shakespeare input.txt\n"
    "\n"
    "Exit codes: 0 done, 2 the command line or a file is wrong, 3 could not.\n";

struct writer {
    const char *name;
    uint64_t val_tokens, shard_tokens;
    int force;
    uint32_t vocab;
    uint64_t written;        /* tokens in all */
    uint64_t in_shard, room; /* of the open one */
    uint32_t train_shards;   /* begun */
    int is_val;              /* the open one */
    FILE *file;              /* NULL: none open */
    char temp[BL_PATH_MAX];  /* its name until it is finished */
    struct bl_errmsg *msg;
};

static uint32_t writer_width(const struct writer *writer)
{
    return writer->vocab <= 65536 ? 2 : 4;
}

static int writer_fail(const struct writer *writer, const char *path)
{
    int rc = -errno;
    return bl_err(writer->msg, rc, "%s: %s", path, strerror(-rc));
}

/* Name of a shard: `number` 0 is the only one for training. */
static void shard_path(const struct writer *writer, int is_val, uint32_t number,
                       char ret[BL_PATH_MAX])
{
    if (is_val) {
        snprintf(ret, BL_PATH_MAX, "%s_val.bin", writer->name);
    } else if (number == 0) {
        snprintf(ret, BL_PATH_MAX, "%s_train.bin", writer->name);
    } else {
        snprintf(ret, BL_PATH_MAX, "%s_train_%06u.bin", writer->name, number);
    }
}

static int header_write(struct writer *writer, uint32_t count)
{
    int narrow = writer_width(writer) == 2;
    const uint32_t head[TOKEN_LLMC_HEADER_BYTES / 4] = {
        narrow ? TOKEN_LLMC_MAGIC_U16 : TOKEN_LLMC_MAGIC_U32, narrow ? 1 : 7, count};
    if (fseek(writer->file, 0, SEEK_SET) != 0 || fwrite(head, sizeof head, 1, writer->file) != 1) {
        return writer_fail(writer, writer->temp);
    }
    return 0;
}

static int path_is_free(const struct writer *writer, int is_val, uint32_t number)
{
    char path[BL_PATH_MAX];
    shard_path(writer, is_val, number, path);
    if (writer->force || access(path, F_OK) != 0) {
        return 0;
    }
    return bl_err(writer->msg, -EEXIST, "%s: is there already; --force replaces it", path);
}

static int shard_begin(struct writer *writer)
{
    writer->is_val = writer->written < writer->val_tokens;
    writer->room = writer->is_val ? writer->val_tokens : writer->shard_tokens;
    writer->in_shard = 0;
    writer->train_shards += !writer->is_val;
    int rc = path_is_free(writer, writer->is_val, writer->is_val ? 0 : writer->train_shards);
    if (rc == 0 && writer->train_shards == 1) {
        rc = path_is_free(writer, writer->is_val, 0);
    }
    if (rc != 0) {
        return rc;
    }
    snprintf(writer->temp, sizeof writer->temp, "%s_%s.tmp", writer->name,
             writer->is_val ? "val" : "train");
    writer->file = fopen(writer->temp, "we");
    return writer->file == NULL ? writer_fail(writer, writer->temp) : header_write(writer, 0);
}

/* Only a finished shard gets its name. `last`: nothing follows. */
static int shard_end(struct writer *writer, int last)
{
    char path[BL_PATH_MAX];
    shard_path(writer, writer->is_val, last && writer->train_shards == 1 ? 0 : writer->train_shards,
               path);
    int rc = header_write(writer, (uint32_t)writer->in_shard);
    if (rc == 0 && (fflush(writer->file) != 0 || fsync(fileno(writer->file)) != 0)) {
        rc = writer_fail(writer, writer->temp);
    }
    if (fclose(writer->file) != 0 && rc == 0) {
        rc = writer_fail(writer, writer->temp);
    }
    writer->file = NULL;
    if (rc == 0 && rename(writer->temp, path) != 0) {
        rc = writer_fail(writer, path);
    }
    if (rc == 0) {
        printf("%s: %llu tokens\n", path, (unsigned long long)writer->in_shard);
    }
    return rc;
}

static int writer_emit(void *arg, const uint32_t *tokens, size_t count)
{
    struct writer *writer = arg;
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < count; i++) {
        if (writer->file != NULL && writer->in_shard == writer->room) {
            rc = shard_end(writer, 0);
        }
        if (rc == 0 && writer->file == NULL) {
            rc = shard_begin(writer);
        }
        if (rc == 0 && fwrite(&tokens[i], writer_width(writer), 1, writer->file) != 1) {
            rc = writer_fail(writer, writer->temp);
        }
        writer->in_shard++;
        writer->written++;
    }
    return rc;
}

/* ---- the command ---- */

struct tokenize_args {
    const char *merges, *out;
    uint64_t val_tokens, shard_tokens;
    int paragraphs, force, quiet;
};

static int document_encode(struct bpe *bpe, struct writer *writer, const char *path,
                           const char *text, uint64_t at, uint64_t bytes)
{
    struct bl_errmsg why = {{0}};
    uint32_t end = bpe_end_of_text(bpe);
    int rc = writer_emit(writer, &end, 1);
    if (rc == 0 && bytes > 0) {
        rc = bpe_encode(bpe, text + at, bytes, writer_emit, writer, &why);
        if (rc != 0 && why.text[0] != '\0') {
            return bl_err(writer->msg, rc, "%s: of the document at byte %llu: %s", path,
                          (unsigned long long)at, why.text);
        }
    }
    return rc;
}

static int file_encode(struct bpe *bpe, struct writer *writer, struct bl_progress *progress,
                       const struct tokenize_args *args, const char *path)
{
    struct token_file file;
    int rc = token_file_open(&file, path, 0, writer->msg);
    const char *text = (const char *)file.map;
    uint64_t at = 0;
    do { /* an empty file is an empty document */
        uint64_t end = file.map_bytes;
        const char *line = !args->paragraphs || rc != 0 || end == at
                               ? NULL
                               : memmem(text + at, end - at, "\n\n", 2);
        end = line == NULL ? end : (uint64_t)(line - text) + 2;
        rc = rc != 0 ? rc : document_encode(bpe, writer, path, text, at, end - at);
        bl_progress_show(progress, progress->done + end - at);
        at = end;
    } while (rc == 0 && at < file.map_bytes);
    token_file_close(&file);
    return rc;
}

static int files_encode(const struct tokenize_args *args, char **files, int count,
                        struct bl_errmsg *msg)
{
    struct bpe *bpe = NULL;
    struct writer writer = {.name = args->out,
                            .val_tokens = args->val_tokens,
                            .shard_tokens = args->shard_tokens,
                            .force = args->force,
                            .msg = msg};
    struct bl_progress progress;
    uint64_t bytes_all = 0;
    int rc = bpe_open(&bpe, args->merges, msg);
    for (int i = 0; rc == 0 && i < count; i++) { /* all are there, before anything is written */
        struct token_file file;
        rc = token_file_open(&file, files[i], 0, msg);
        bytes_all += file.map_bytes;
        token_file_close(&file);
    }
    bl_progress_start(&progress, "tokenize", bytes_all,
                      args->quiet ? BL_PROGRESS_NONE : BL_PROGRESS_AUTO);
    for (int i = 0; rc == 0 && i < count; i++) {
        writer.vocab = bpe_vocab(bpe);
        rc = file_encode(bpe, &writer, &progress, args, files[i]);
    }
    double seconds = bl_progress_finish(&progress);
    if (rc == 0) {
        rc = shard_end(&writer, 1);
    } else if (writer.file != NULL) {
        fclose(writer.file);
        unlink(writer.temp);
    }
    if (rc == 0) {
        printf("%llu tokens of %llu bytes, vocabulary %u, in %.1f s\n",
               (unsigned long long)writer.written, (unsigned long long)bytes_all, writer.vocab,
               seconds);
    }
    bpe_close(bpe);
    return rc;
}

static int parse_count(const char *option, uint64_t max, uint64_t *ret)
{
    char *end;
    errno = 0;
    *ret = strtoull(optarg, &end, 10);
    if (errno != 0 || *optarg < '0' || *optarg > '9' || *end != 0 || *ret > max) {
        fprintf(stderr, "belay-train tokenize: --%s %s: not a number up to %llu\n", option, optarg,
                (unsigned long long)max);
        return 2;
    }
    return 0;
}

/* 0; 2 after complaining; -1 for --help. */
static int parse(struct tokenize_args *args, int argc, char **argv)
{
    static const struct option options[] = {
        {"merges", required_argument, NULL, 'm'},
        {"out", required_argument, NULL, 'o'},
        {"documents", required_argument, NULL, 'd'},
        {"val-tokens", required_argument, NULL, 'v'},
        {"shard-tokens", required_argument, NULL, 's'},
        {"force", no_argument, NULL, 'f'},
        {"quiet", no_argument, NULL, 'q'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    int opt, rc = 0;
    while (rc == 0 && (opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (opt) {
        case 'm':
            args->merges = optarg;
            break;
        case 'o':
            args->out = optarg;
            break;
        case 'd':
            args->paragraphs = strcmp(optarg, "paragraph") == 0;
            if (!args->paragraphs && strcmp(optarg, "file") != 0) {
                fprintf(stderr, "belay-train tokenize: --documents %s: file or paragraph\n",
                        optarg);
                rc = 2;
            }
            break;
        case 'v':
            rc = parse_count("val-tokens", SHARD_TOKENS_MAX, &args->val_tokens);
            break;
        case 's':
            rc = parse_count("shard-tokens", SHARD_TOKENS_MAX, &args->shard_tokens);
            break;
        case 'f':
            args->force = 1;
            break;
        case 'q':
            args->quiet = 1;
            break;
        case 'h':
            fputs(help, stdout);
            return -1;
        default:
            return 2;
        }
    }
    return rc;
}

int train_tokenize_main(int argc, char **argv)
{
    struct bl_errmsg msg = {{0}};
    struct tokenize_args args = {.shard_tokens = SHARD_TOKENS_DEFAULT};
    int rc = parse(&args, argc, argv);
    if (rc != 0) {
        return rc < 0 ? 0 : rc;
    }
    const char *missing = args.merges == NULL                   ? "--merges FILE"
                          : args.out == NULL                    ? "--out NAME"
                          : optind == argc                      ? "a text file"
                          : args.shard_tokens == 0              ? "--shard-tokens above 0"
                          : strlen(args.out) > BL_PATH_MAX - 64 ? "a shorter --out NAME"
                                                                : NULL;
    if (missing != NULL) {
        fprintf(stderr, "belay-train tokenize: %s is missing; see belay-train tokenize --help\n",
                missing);
        return 2;
    }
    rc = files_encode(&args, argv + optind, argc - optind, &msg);
    if (rc != 0) {
        fprintf(stderr, "belay-train tokenize: %s\n", msg.text);
    }
    return rc == 0 ? 0 : rc == BL_ECONFIG || rc == BL_EFORMAT || rc == -EEXIST ? 2 : 3;
}
