/* SPDX-License-Identifier: Apache-2.0 */
/* `model.config`: a config.json says what the options of the model would. They are set from it, and
 * the frozen job holds them alone. */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/job_options.h"
#include "base/model_config.h"

struct job_config {
    struct bl_job *job;
    struct job_marks *marks; /* may be NULL */
    const char *base_dir;
    struct bl_errmsg *msg;
};

static struct job_mark *mark_of(const struct job_config *c, const char *key)
{
    return c->marks == NULL ? NULL : &c->marks->at[job_option_find(key) - job_options];
}

/* An error at a place of the job file. */
static int fail_at(const struct job_config *c, int code, const struct job_mark *mark)
{
    return c->marks == NULL
               ? code
               : bl_err_in(c->msg, code, "%s:%u:%u", c->marks->where, mark->line, mark->column);
}

/* Sets an option, within its bounds, unless the job sets it as well. */
static int BL_PRINTF(3, 4) take(const struct job_config *c, const char *key, const char *fmt, ...)
{
    char text[64];
    struct job_mark *mark = mark_of(c, key), *config = mark_of(c, "model.config");
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (mark != NULL && mark->line != 0) {
        bl_err(c->msg, BL_ECONFIG, "%s: model.config says it already, %s: give one of them", key,
               text);
        return fail_at(c, BL_ECONFIG, mark);
    }
    int rc = job_value_set(job_option_find(key), c->job, text, c->base_dir, c->msg);
    if (rc < 0) {
        bl_err_in(c->msg, rc, "model.config");
        return fail_at(c, rc, config);
    }
    if (mark != NULL) {
        *mark = *config;
    }
    return 0;
}

static int take_model(const struct job_config *c, const struct bl_job_model *m)
{
    int is_gpt2 = m->arch == BL_ARCH_GPT2, rc;
    if ((rc = take(c, "model.arch", "%s", is_gpt2 ? "gpt2" : "llama")) != 0 ||
        (rc = take(c, "model.layers", "%u", m->layers)) != 0 ||
        (rc = take(c, "model.dim", "%u", m->dim)) != 0 ||
        (rc = take(c, "model.hidden", "%u", m->hidden)) != 0 ||
        (rc = take(c, "model.heads", "%u", m->heads)) != 0 ||
        (rc = take(c, "model.kv_heads", "%u", m->kv_heads)) != 0 ||
        (rc = take(c, "model.vocab", "%u", m->vocab)) != 0 ||
        (rc = take(c, "model.tied", "%s", m->tied ? "true" : "false")) != 0 ||
        (rc = take(c, "model.norm_eps", "%.17g", m->norm_eps)) != 0) {
        return rc;
    }
    if (is_gpt2) {
        rc = take(c, "model.bias", "true");
        return rc != 0 ? rc : take(c, "model.context", "%u", m->context);
    }
    rc = take(c, "model.rope_theta", "%.17g", m->rope_theta);
    if (rc != 0 || m->rope_factor <= 1) {
        return rc;
    }
    if ((rc = take(c, "model.rope_factor", "%.17g", m->rope_factor)) == 0 &&
        (rc = take(c, "model.rope_low", "%.17g", m->rope_low)) == 0 &&
        (rc = take(c, "model.rope_high", "%.17g", m->rope_high)) == 0) {
        rc = take(c, "model.rope_context", "%u", m->rope_context);
    }
    return rc;
}

int job_config_apply(struct bl_job *job, struct job_marks *marks, const char *base_dir,
                     struct bl_errmsg *msg)
{
    const struct job_config c = {job, marks, base_dir, msg};
    char path[BL_PATH_MAX + 16];
    char *text = NULL;
    size_t bytes = 0;
    struct stat st;
    struct bl_job_model model;
    if (job->model_config[0] == '\0') {
        return 0;
    }
    int is_dir = stat(job->model_config, &st) == 0 && S_ISDIR(st.st_mode);
    snprintf(path, sizeof path, "%s%s", job->model_config, is_dir ? "/config.json" : "");
    int rc = bl_file_read(path, BL_MODEL_CONFIG_BYTES_MAX, &text, &bytes, msg);
    if (rc == 0) {
        rc = bl_model_config_parse(&model, text, bytes, msg);
        rc = rc < 0 ? bl_err_in(msg, rc == BL_ENOTBUILT ? rc : BL_ECONFIG, "%s", path) : 0;
    }
    free(text);
    if (rc < 0) {
        bl_err_in(msg, rc, "model.config");
        return fail_at(&c, rc == BL_ENOTBUILT ? rc : BL_ECONFIG, mark_of(&c, "model.config"));
    }
    memset(job->model_config, 0, sizeof job->model_config);
    return take_model(&c, &model);
}
