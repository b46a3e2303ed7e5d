/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a plan of resharding. On disk, in this order:
 *
 *     the attempt's directory      named by the plan; locked against a second run of the same plan
 *     .trash/step-...NONCE/        a file for each part that is still to be written, allocated: the
 *                                  parts' writer takes its files from the trash
 *     parts and indexes            one after the other; those of an earlier run are read back first
 *     the commit                   as of a save
 */
#include "ckpt/reshard.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/failpoint.h"
#include "ckpt/part.h"
#include "ckpt/reshard_stream.h"
#include "ckpt/store.h"

#define MIB (1024ull * 1024)
/* What is not windows and the reader's: the write queue, a codec's chunks in flight, the program.
 */
#define MEMORY_FIXED (40 * MIB)
#define WINDOW_MAX   (64 * MIB)

struct run {
    const struct ckpt_reshard_job *job;
    const struct ckpt_reshard_plan *plan;
    struct ckpt_io *io;
    struct ckpt_attempt attempt;
    enum ckpt_codec codec;
    char dir[CKPT_PATH_MAX];     /* of the attempt */
    char scratch[CKPT_PATH_MAX]; /* in .trash */
    int lock;                    /* fd of the attempt's directory */
    bool *want;                  /* owned; by part: is still to be written */
    struct ckpt_manifest manifest;
    struct reshard_stream *stream;
    uint32_t part; /* that is being written */
    uint64_t done; /* bytes of elements */
    struct ckpt_reshard_result *result;
};

int ckpt_reshard_memory(uint64_t memory_max, uint64_t *ret_window, uint64_t *ret_reader,
                        struct bl_errmsg *msg)
{
    uint64_t memory = memory_max == 0 ? CKPT_RESHARD_MEMORY : memory_max, window;

    if (memory < CKPT_RESHARD_MEMORY_MIN) {
        return bl_err(msg, BL_ECONFIG, "%llu bytes of memory are too little: at least %llu MiB",
                      (unsigned long long)memory, CKPT_RESHARD_MEMORY_MIN / MIB);
    }
    window = (memory - MEMORY_FIXED) / 4 / MIB * MIB;
    *ret_window = window > WINDOW_MAX ? WINDOW_MAX : window;
    *ret_reader = memory - MEMORY_FIXED - 2 * *ret_window;
    return 0;
}

/* ---- Before the first byte ---- */

/* Does part `held` of a checkpoint hold just what `list` plans? Ranges that go on one behind the
 * other are one extent once they are written. */
static bool part_is(const struct bl_extent_list *held, const struct bl_extent_list *list)
{
    uint32_t at = 0;

    for (uint32_t i = 0; i < list->extent_count; at++) {
        struct bl_extent joined = list->extents[i];
        const struct bl_tensor *tensor = &list->tensors[joined.tensor];
        size_t box = tensor->dims * sizeof(joined.lo[0]);

        for (i++; i < list->extent_count; i++) {
            const struct bl_extent *next = &list->extents[i];

            if (next->tensor != joined.tensor || next->flat_lo != joined.flat_hi ||
                memcmp(next->lo, joined.lo, box) != 0 || memcmp(next->hi, joined.hi, box) != 0) {
                break;
            }
            joined.flat_hi = next->flat_hi;
        }
        if (at >= held->extent_count ||
            ckpt_extent_order(&held->extents[at], &held->tensors[held->extents[at].tensor], &joined,
                              tensor) != 0) {
            return false;
        }
    }
    return at == held->extent_count;
}

/* Is a checkpoint of that step there? 1: the very one that is to be made; 0: none, or it may go. */
static int look_at_final(struct run *run, struct bl_errmsg *msg)
{
    const struct ckpt_manifest *wanted = &run->plan->manifest;
    struct ckpt_opened opened = {0};
    char dir[CKPT_DIR_MAX], path[CKPT_PATH_MAX];
    int rc;

    ckpt_dir_name(dir, wanted->step, wanted->generation);
    rc = ckpt_path_join(path, run->job->out->path, dir, NULL, msg);
    if (rc < 0) {
        return rc;
    }
    if (access(path, F_OK) != 0) {
        return 0;
    }
    snprintf(run->result->dir, sizeof(run->result->dir), "%s", dir);
    rc = ckpt_opened_load(run->job->out, dir, &opened, NULL);
    if (rc == 0) {
        bool same = bl_state_digest_equal(&opened.manifest.state, &wanted->state) &&
                    strcmp(opened.manifest.codec, wanted->codec) == 0 &&
                    opened.manifest.part_count == run->plan->part_count;

        for (uint32_t p = 0; same && p < run->plan->part_count; p++) {
            same = strcmp(opened.manifest.parts[p].name, run->plan->parts[p].name) == 0 &&
                   part_is(&opened.indexes[p].held, &run->plan->parts[p].list);
        }
        run->result->manifest_digest = opened.manifest_digest;
        ckpt_opened_close(&opened);
        if (same) {
            return 1;
        }
    }
    return run->job->force
               ? 0
               : bl_err(msg, BL_ECONFLICT, "%s is there already, %s; --force replaces it", path,
                        rc == 0 ? "in another layout" : "and it is broken");
}

/* Nobody else may work on the same attempt. */
static int lock_attempt(struct run *run, struct bl_errmsg *msg)
{
    run->lock = open(run->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (run->lock < 0) {
        return bl_err_code(msg, -errno, "open %s", run->dir);
    }
    if (flock(run->lock, LOCK_EX | LOCK_NB) != 0) {
        return errno == EWOULDBLOCK
                   ? bl_err(msg, BL_ECONFLICT, "%s: another process works on it", run->dir)
                   : bl_err_code(msg, -errno, "lock %s", run->dir);
    }
    return 0;
}

static int ignore_window(void *arg, uint64_t offset, const uint8_t *data, uint32_t bytes,
                         struct bl_errmsg *msg)
{
    (void)arg, (void)offset, (void)data, (void)bytes, (void)msg;
    return 0;
}

/* Is part `p` there from an earlier run, with the planned extents, and does every byte of it check
 * out? Then it goes into the manifest. */
static bool part_is_done(struct run *run, uint32_t p)
{
    const struct ckpt_reshard_part *part = &run->plan->parts[p];
    struct ckpt_load_result counts = {0};
    struct ckpt_index index = {0};
    char file[CKPT_PART_FILE_MAX], path[CKPT_PATH_MAX];
    const struct ckpt_part_reader reader = {.io = run->io,
                                            .path = path,
                                            .index = &index,
                                            .window = ignore_window,
                                            .cancel = run->job->cancel,
                                            .result = &counts};
    uint64_t digest = 0;
    uint8_t *data = NULL;
    size_t bytes = 0;
    bool good;

    ckpt_part_file(file, part->name, run->codec);
    if (ckpt_path_join(path, run->dir, file, NULL, NULL) < 0 ||
        ckpt_part_index_load(run->io, run->dir, part->name, run->codec, NULL, &index, NULL) < 0) {
        return false;
    }
    good = part_is(&index.held, &part->list);
    good = good && ckpt_index_encode(&index, &data, &bytes, &digest, NULL) == 0 &&
           ckpt_part_read(&reader, NULL) == 0;
    free(data);
    if (good) {
        struct ckpt_part *made = &run->manifest.parts[p];

        snprintf(made->name, sizeof(made->name), "%s", part->name);
        snprintf(made->node, sizeof(made->node), "%s", part->node);
        made->bytes = index.part_bytes;
        made->raw_bytes = index.raw_bytes;
        made->index_digest = digest;
        run->done += part->bytes;
        run->result->parts_kept++;
    }
    ckpt_index_close(&index);
    return good;
}

/* What an earlier run left of a part: its file is as good as allocated space, so it goes there. */
static int clear_part(struct run *run, uint32_t p, struct bl_errmsg *msg)
{
    const struct ckpt_reshard_part *part = &run->plan->parts[p];
    char file[CKPT_PART_FILE_MAX], path[CKPT_PATH_MAX], to[CKPT_PATH_MAX];
    int rc;

    ckpt_part_file(file, part->name, run->codec);
    rc = ckpt_path_join(path, run->dir, file, NULL, msg);
    rc = rc < 0 ? rc : ckpt_path_join(to, run->scratch, file, NULL, msg);
    if (rc < 0) {
        return rc;
    }
    rc = run->io->ops->rename(run->io, path, to);
    if (rc < 0 && rc != -ENOENT) {
        return bl_err_code(msg, rc, "rename %s to %s", path, to);
    }
    if (run->codec == CKPT_CODEC_NONE) {
        ckpt_part_index_file(file, part->name, run->codec);
        rc = ckpt_path_join(path, run->dir, file, NULL, msg);
        rc = rc < 0 ? rc : run->io->ops->unlink(run->io, path);
        if (rc < 0 && rc != -ENOENT) {
            return bl_err_code(msg, rc, "unlink %s", path);
        }
    }
    return 0;
}

/* Allocates the file that a part will take. Where the file system cannot allocate, writing tells.
 */
static int allocate_part(struct run *run, uint32_t p, struct bl_errmsg *msg)
{
    const struct ckpt_reshard_part *part = &run->plan->parts[p];
    char file[CKPT_PART_FILE_MAX], path[CKPT_PATH_MAX];
    int fd, rc;

    ckpt_part_file(file, part->name, run->codec);
    rc = ckpt_path_join(path, run->scratch, file, NULL, msg);
    if (rc < 0) {
        return rc;
    }
    fd = run->io->ops->open(run->io, path, O_WRONLY | O_CREAT, 0644);
    if (fd < 0) {
        return bl_err_code(msg, fd, "create %s", path);
    }
    rc = run->io->ops->allocate(run->io, fd, part->bytes);
    BL_IGNORE(run->io->ops->close(run->io, fd), "nothing was written");
    if (rc == -EOPNOTSUPP || rc == -ENOSYS) {
        rc = 0;
    }
    return rc < 0 ? bl_err_code(msg, rc, "allocate %llu bytes of %llu in %s",
                                (unsigned long long)part->bytes,
                                (unsigned long long)run->plan->scratch_bytes, path)
                  : 0;
}

/* All or nothing: after an error what was allocated is given back. */
static int allocate_all(struct run *run, struct bl_errmsg *msg)
{
    char file[CKPT_PART_FILE_MAX], path[CKPT_PATH_MAX];
    uint32_t p = 0;
    int rc = 0;

    for (; rc == 0 && p < run->plan->part_count; p++) {
        rc = run->want[p] ? clear_part(run, p, msg) : 0;
        rc = rc < 0 || !run->want[p] ? rc : allocate_part(run, p, msg);
    }
    for (uint32_t i = 0; rc < 0 && i < p; i++) {
        ckpt_part_file(file, run->plan->parts[i].name, run->codec);
        if (ckpt_path_join(path, run->scratch, file, NULL, NULL) == 0) {
            BL_IGNORE(run->io->ops->unlink(run->io, path), "swept later");
        }
    }
    if (rc < 0) {
        BL_IGNORE(run->io->ops->rmdir(run->io, run->scratch), "swept later");
    }
    return rc;
}

static int prepare(struct run *run, struct bl_errmsg *msg)
{
    const struct ckpt_reshard_plan *plan = run->plan;
    struct ckpt_store *out = run->job->out;
    char trash[CKPT_PATH_MAX], name[CKPT_DIR_MAX + 32], attempt[CKPT_DIR_MAX];
    int rc = ckpt_attempt_begin(out, &run->attempt, msg);

    ckpt_attempt_name(attempt, &run->attempt);
    /* Named as a retired checkpoint is: from there the parts' writer takes files. */
    snprintf(name, sizeof(name), "step-%012" PRIu64 ".g%" PRIu64 ".%016" PRIx64, run->attempt.step,
             run->attempt.generation, plan->nonce);
    rc = rc < 0 ? rc : ckpt_path_join(run->dir, out->path, attempt, NULL, msg);
    rc = rc < 0 ? rc : lock_attempt(run, msg);
    rc = rc < 0 ? rc : ckpt_path_join(trash, out->path, CKPT_TRASH_DIR, NULL, msg);
    rc = rc < 0 ? rc : ckpt_io_mkdir(run->io, trash, msg);
    rc = rc < 0 ? rc : ckpt_path_join(run->scratch, trash, name, NULL, msg);
    rc = rc < 0 ? rc : ckpt_io_mkdir(run->io, run->scratch, msg);
    for (uint32_t p = 0; rc == 0 && p < plan->part_count; p++) {
        run->want[p] = !part_is_done(run, p);
        if (run->job->progress != NULL) {
            run->job->progress(run->job->arg, run->done);
        }
        if (run->job->cancel != NULL && atomic_load(run->job->cancel) != 0) {
            rc = bl_err(msg, BL_EABORTED, "cancelled");
        }
    }
    return rc < 0 ? rc : allocate_all(run, msg);
}

/* ---- The parts ---- */

static int fetch(void *arg, uint32_t extent, uint64_t lo, uint64_t hi, void *dest,
                 struct bl_errmsg *msg)
{
    struct run *run = arg;
    const struct bl_extent_list *list = &run->plan->parts[run->part].list;
    int rc = reshard_stream_take(run->stream, run->part, extent, lo, hi, dest, msg);

    if (rc == 0) {
        run->done += (hi - lo) * bl_dtype_bytes(list->tensors[list->extents[extent].tensor].dtype);
        if (run->job->progress != NULL) {
            run->job->progress(run->job->arg, run->done);
        }
    }
    return rc;
}

static int write_part(struct run *run, uint32_t p, struct bl_errmsg *msg)
{
    const struct ckpt_reshard_part *part = &run->plan->parts[p];
    const struct ckpt_source source = {.list = &part->list, .fetch = fetch, .arg = run};
    const struct ckpt_part_job job = {.name = part->name,
                                      .sources = &source,
                                      .source_count = 1,
                                      .codec = run->plan->manifest.codec,
                                      .cancel = run->job->cancel};
    struct ckpt_part_result written = {0};
    struct ckpt_part *made = &run->manifest.parts[p];
    int rc;

    run->part = p;
    rc = ckpt_save_part(run->job->out, &run->attempt, &job, &written, msg);
    if (rc == 0) {
        snprintf(made->name, sizeof(made->name), "%s", part->name);
        snprintf(made->node, sizeof(made->node), "%s", part->node);
        made->bytes = written.bytes;
        made->raw_bytes = written.raw_bytes;
        made->index_digest = written.index_digest;
        run->result->bytes_written += written.bytes;
        rc = BL_FAILPOINT("reshard-part");
    }
    return rc;
}

static int write_parts(struct run *run, struct bl_errmsg *msg)
{
    bool any = false;
    int rc = 0;

    for (uint32_t p = 0; p < run->plan->part_count; p++) {
        any = any || run->want[p];
    }
    if (any) {
        rc = reshard_stream_start(&run->stream, run->job, run->want, msg);
    }
    for (uint32_t p = 0; rc == 0 && p < run->plan->part_count; p++) {
        rc = run->want[p] ? write_part(run, p, msg) : 0;
    }
    reshard_stream_stop(run->stream, &run->result->bytes_read);
    run->stream = NULL;
    return rc;
}

/* The one that is replaced goes to the trash only when all of the new one is durable, its manifest
 * too: from there on whoever opens the root next finishes what is cut off. */
static int commit(struct run *run, struct bl_errmsg *msg)
{
    struct ckpt_commit_result committed = {0};
    int rc = 0;

    if (run->job->force && run->result->dir[0] != '\0') {
        rc = ckpt_compose(run->job->out, &run->attempt, &run->manifest,
                          &run->result->manifest_digest, msg);
        rc = rc < 0 ? rc : ckpt_trash_move(run->job->out, run->result->dir, msg);
    }
    rc = rc < 0 ? rc : BL_FAILPOINT("reshard-commit");
    rc = rc < 0 ? rc : ckpt_commit(run->job->out, &run->attempt, &run->manifest, &committed, msg);
    if (rc == 0) {
        memcpy(run->result->dir, committed.dir, sizeof(run->result->dir));
        run->result->manifest_digest = committed.manifest_digest;
        BL_IGNORE(run->io->ops->rmdir(run->io, run->scratch), "swept later");
    }
    return rc;
}

int ckpt_reshard_run(const struct ckpt_reshard_job *job, struct ckpt_reshard_result *ret,
                     struct bl_errmsg *msg)
{
    const struct ckpt_reshard_plan *plan = job->plan;
    struct ckpt_reshard_result result = {0};
    struct run run = {.job = job,
                      .plan = plan,
                      .io = job->out->io,
                      .attempt = {.step = plan->manifest.step,
                                  .generation = plan->manifest.generation,
                                  .attempt = 1,
                                  .nonce = plan->nonce},
                      .lock = -1,
                      .manifest = plan->manifest,
                      .result = &result};
    int there, rc = ckpt_codec_parse(plan->manifest.codec, &run.codec, msg);

    if (rc < 0) {
        return rc;
    }
    there = look_at_final(&run, msg);
    if (there != 0) {
        result.already = there > 0;
        *ret = result;
        return there < 0 ? there : 0;
    }
    run.want = calloc(plan->part_count + 1u, sizeof(*run.want));
    run.manifest.parts = calloc(plan->part_count + 1u, sizeof(*run.manifest.parts));
    run.manifest.part_count = plan->part_count;
    run.manifest.job = plan->manifest.job == NULL ? NULL : strdup(plan->manifest.job);
    rc = run.want == NULL || run.manifest.parts == NULL ||
                 (plan->manifest.job != NULL && run.manifest.job == NULL)
             ? bl_err_code(msg, -ENOMEM, "%u parts", plan->part_count)
             : prepare(&run, msg);
    rc = rc < 0 ? rc : write_parts(&run, msg);
    rc = rc < 0 ? rc : commit(&run, msg);
    if (run.lock >= 0) {
        close(run.lock);
    }
    free(run.want);
    ckpt_manifest_close(&run.manifest);
    if (rc == 0) {
        *ret = result;
    }
    return rc;
}
