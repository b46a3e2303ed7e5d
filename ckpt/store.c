/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a root: the BELAY file that says whose it is, names, the reserve, the trash. */
#include "ckpt/store.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "ckpt/part.h"
#include "ckpt/text.h"

void ckpt_dir_name(char ret[CKPT_DIR_MAX], uint64_t step, uint64_t generation)
{
    snprintf(ret, CKPT_DIR_MAX, "step-%012" PRIu64 ".g%" PRIu64, step, generation);
}

bool ckpt_dir_parse(const char *name, uint64_t *ret_step, uint64_t *ret_generation)
{
    char again[CKPT_DIR_MAX];
    uint64_t step, generation;

    if (sscanf(name, "step-%20" SCNu64 ".g%20" SCNu64, &step, &generation) != 2) {
        return false;
    }
    ckpt_dir_name(again, step, generation);
    if (strcmp(name, again) != 0) {
        return false;
    }
    *ret_step = step;
    *ret_generation = generation;
    return true;
}

void ckpt_attempt_name(char ret[CKPT_DIR_MAX], const struct ckpt_attempt *attempt)
{
    snprintf(ret, CKPT_DIR_MAX, ".step-%012" PRIu64 ".g%" PRIu64 ".a%" PRIu32 ".%016" PRIx64 ".tmp",
             attempt->step, attempt->generation, attempt->attempt, attempt->nonce);
}

bool ckpt_attempt_parse(const char *name, struct ckpt_attempt *ret)
{
    struct ckpt_attempt attempt;
    char again[CKPT_DIR_MAX];

    if (sscanf(name, ".step-%20" SCNu64 ".g%20" SCNu64 ".a%10" SCNu32 ".%16" SCNx64, &attempt.step,
               &attempt.generation, &attempt.attempt, &attempt.nonce) != 4) {
        return false;
    }
    ckpt_attempt_name(again, &attempt);
    if (strcmp(name, again) != 0) {
        return false;
    }
    *ret = attempt;
    return true;
}

uint64_t ckpt_nonce(void)
{
    uint64_t nonce = 0;

    if (getrandom(&nonce, sizeof(nonce), 0) != sizeof(nonce)) {
        struct timespec ts;

        clock_gettime(CLOCK_REALTIME, &ts);
        nonce = bl_mix64((uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec);
    }
    return nonce;
}

int ckpt_store_writable(const struct ckpt_store *store, struct bl_errmsg *msg)
{
    return store->writable ? 0 : bl_err(msg, -EROFS, "%s: opened for reading only", store->path);
}

/* One of the root's own files: a number of the version, and a name: of the run, or of the node that
 * has the root for itself. */
struct root_file {
    const char *file, *version_key, *key, *what;
    size_t name_max;
};

static const struct root_file run_file = {CKPT_ROOT_FILE, "belay_root", "run", "a run id",
                                          CKPT_RUN_MAX};
static const struct root_file owner_file = {CKPT_OWNER_FILE, "belay_node", "node", "a node's name",
                                            CKPT_NODE_MAX};

static int root_file_decode(const struct root_file *kind, char *name, const char *text,
                            size_t bytes, struct bl_errmsg *msg)
{
    struct ckpt_json reader;
    uint64_t digest;

    if (ckpt_manifest_digest(text, bytes, &digest, NULL) < 0) {
        return bl_err(msg, BL_EDIGEST, "digest differs");
    }
    ckpt_json_init(&reader, text, bytes);
    ckpt_json_want(&reader, '{');
    ckpt_json_key(&reader, kind->version_key);
    if (ckpt_json_u64(&reader) != CKPT_FORMAT_VERSION) {
        ckpt_json_fail(&reader, BL_EVERSION, "root of another version; this program reads %d",
                       CKPT_FORMAT_VERSION);
    }
    ckpt_json_want(&reader, ',');
    ckpt_json_key(&reader, kind->key);
    ckpt_json_string(&reader, name, kind->name_max);
    if (!ckpt_name_is_plain(name)) {
        ckpt_json_fail(&reader, BL_EFORMAT, "%s expected", kind->what);
    }
    return ckpt_json_error(&reader, msg);
}

/* -ENOENT when it is not there. `name` has room for the kind's. */
static int root_file_read(struct ckpt_store *store, const struct root_file *kind, char *name,
                          struct bl_errmsg *msg)
{
    char path[CKPT_PATH_MAX];
    char *text = NULL;
    size_t bytes = 0;
    int rc = ckpt_path_join(path, store->path, kind->file, NULL, msg);

    if (rc == 0) {
        rc = ckpt_io_read_file(store->io, path, CKPT_ROOT_FILE_MAX, &text, &bytes, msg);
    }
    if (rc < 0) {
        return rc;
    }
    rc = root_file_decode(kind, name, text, bytes, msg);
    free(text);
    return rc < 0 ? bl_err_in(msg, rc, "%s", path) : 0;
}

/* Writes it unless somebody is faster: link is the one step that cannot overwrite. */
static int root_file_write(struct ckpt_store *store, const struct root_file *kind, const char *name,
                           struct bl_errmsg *msg)
{
    struct ckpt_text text = {0};
    char temp_name[64], temp[CKPT_PATH_MAX], path[CKPT_PATH_MAX];
    int rc;

    snprintf(temp_name, sizeof(temp_name), ".BELAY.%016" PRIx64 ".tmp", ckpt_nonce());
    rc = ckpt_path_join(temp, store->path, temp_name, NULL, msg);
    if (rc == 0) {
        rc = ckpt_path_join(path, store->path, kind->file, NULL, msg);
    }
    if (rc < 0) {
        return rc;
    }
    ckpt_text_printf(&text, "{\"%s\":%d,\n\"%s\":", kind->version_key, CKPT_FORMAT_VERSION,
                     kind->key);
    ckpt_text_string(&text, name);
    ckpt_text_printf(&text, ",\n");
    if (!text.failed) {
        ckpt_text_printf(&text, "\"digest\":\"%016llx\"}\n",
                         (unsigned long long)bl_xxh3(text.data, text.bytes));
    }
    rc = text.failed ? bl_err_code(msg, -ENOMEM, "%s", path)
                     : ckpt_io_write_file(store->io, temp, text.data, text.bytes, msg);
    ckpt_text_close(&text);
    if (rc == 0) {
        rc = store->io->ops->link(store->io, temp, path);
        if (rc == -EPERM || rc == -EOPNOTSUPP || rc == -ENOSYS) { /* no hard links here */
            rc = store->io->ops->rename(store->io, temp, path);
        }
        rc = rc == -EEXIST ? 0 : rc;
        rc = rc < 0 ? bl_err_code(msg, rc, "create %s", path) : 0;
    }
    BL_IGNORE(store->io->ops->unlink(store->io, temp), "gone if it was renamed; else swept later");
    return rc < 0 ? rc : ckpt_io_fsync_path(store->io, store->path, msg);
}

static int err_foreign(const struct ckpt_store *store, const char *found, struct bl_errmsg *msg)
{
    return bl_err(msg, BL_EFOREIGN,
                  "%s holds run %s, not %s: give another directory, or go on with that run: "
                  "belay run --recover %s",
                  store->path, found, store->run, store->path);
}

/* A root without BELAY: do its checkpoints belong to somebody else? */
static int check_orphans(struct ckpt_store *store, bool *ret_any, struct bl_errmsg *msg)
{
    struct ckpt_names names = {0};
    uint64_t step, generation;
    int rc = store->io->ops->list(store->io, store->path, CKPT_ENTRIES_MAX, &names);

    if (rc < 0) {
        return bl_err_code(msg, rc, "read directory %s", store->path);
    }
    *ret_any = false;
    for (uint32_t i = 0; rc == 0 && i < names.count; i++) {
        struct ckpt_opened opened = {0};
        char wanted[CKPT_RUN_MAX];

        if (!ckpt_dir_parse(names.names[i], &step, &generation)) {
            continue;
        }
        *ret_any = true;
        memcpy(wanted, store->run, sizeof(wanted));
        store->run[0] = '\0'; /* any run will do for reading */
        if (ckpt_opened_manifest(store, names.names[i], &opened, NULL) < 0) {
            memset(&opened, 0, sizeof(opened));
        }
        memcpy(store->run, wanted, sizeof(wanted));
        if (wanted[0] != '\0' && opened.manifest.run[0] != '\0' &&
            strcmp(opened.manifest.run, wanted) != 0) {
            rc = err_foreign(store, opened.manifest.run, msg);
        }
        ckpt_opened_close(&opened);
    }
    ckpt_names_close(&names);
    return rc;
}

/* Who has this root for itself? Nobody, where every node sees it. A writer that has it for itself
 * says so first, and refuses another's. */
static int owner_open(struct ckpt_store *store, bool create, struct bl_errmsg *msg)
{
    int rc;

    if (store->writable && store->shared) {
        return 0;
    }
    rc = root_file_read(store, &owner_file, store->owner, msg);
    if (rc == -ENOENT && store->apart && create) {
        rc = root_file_write(store, &owner_file, store->node, msg);
        rc = rc < 0 ? rc : root_file_read(store, &owner_file, store->owner, msg);
    }
    if (rc < 0) {
        store->owner[0] = '\0';
        return rc == -ENOENT ? 0 : rc;
    }
    if (store->apart && strcmp(store->owner, store->node) != 0) {
        return bl_err(msg, BL_EFOREIGN,
                      "%s is node %s's own, not %s's: say shared: true where all nodes see it, or "
                      "put {node} into its path (a node that was renamed: remove its file %s)",
                      store->path, store->owner, store->node, CKPT_OWNER_FILE);
    }
    return 0;
}

static int open_for_reading(struct ckpt_store *store, struct bl_errmsg *msg)
{
    struct bl_errmsg why = {0};
    bool any = false;
    int found = root_file_read(store, &run_file, store->run, &why);
    int rc;

    if (found == 0) {
        return 0;
    }
    store->run[0] = '\0';
    rc = check_orphans(store, &any, msg);
    if (rc == 0 && !any) {
        return found == -ENOENT
                   ? bl_err(msg, -ENOENT, "%s is no checkpoint root: it has no BELAY file",
                            store->path)
                   : bl_err(msg, found, "%s", why.text);
    }
    snprintf(store->damage, sizeof(store->damage), "%.*s", CKPT_WHY_MAX - 1, why.text);
    return rc;
}

/* mkdir -p, each directory made durable by an fsync of its parent. */
static int make_directories(struct ckpt_store *store, struct bl_errmsg *msg)
{
    char path[CKPT_PATH_MAX], parent[CKPT_PATH_MAX];
    int rc = 0;

    snprintf(path, sizeof(path), "%s", store->path);
    for (char *c = path + 1; rc == 0; c++) {
        char kept = *c;

        if (kept != '/' && kept != '\0') {
            continue;
        }
        *c = '\0';
        rc = store->io->ops->mkdir(store->io, path, 0755);
        if (rc == 0) {
            char *slash;

            snprintf(parent, sizeof(parent), "%s", path);
            slash = strrchr(parent, '/');
            snprintf(slash == NULL ? parent : slash + (slash == parent), 2, "%s",
                     slash == NULL ? "." : "");
            rc = ckpt_io_fsync_path(store->io, parent, msg);
        } else {
            rc = rc == -EEXIST ? 0 : bl_err_code(msg, rc, "mkdir %s", path);
        }
        *c = kept;
        if (kept == '\0') {
            break;
        }
    }
    return rc;
}

static int open_for_writing(struct ckpt_store *store, bool create, struct bl_errmsg *msg)
{
    char found[CKPT_RUN_MAX] = "";
    bool any = false;
    int rc = root_file_read(store, &run_file, found, msg);

    if (rc == -ENOENT && create) {
        rc = make_directories(store, msg);
        if (rc == 0) {
            rc = check_orphans(store, &any, msg);
        }
        if (rc == 0) {
            rc = root_file_write(store, &run_file, store->run, msg);
        }
        if (rc == 0) {
            rc = root_file_read(store, &run_file, found, msg);
        }
    } else if (rc == BL_EDIGEST || rc == BL_EFORMAT) {
        return bl_err_in(msg, rc, "damaged (remove this file, and it is made anew)");
    }
    if (rc < 0) {
        return rc;
    }
    return strcmp(found, store->run) == 0 ? 0 : err_foreign(store, found, msg);
}

/* Room that the commit record can use when the disk is full. Not having it is not an error here:
 * a run must be able to resume from a full disk. */
static void reserve_hold(struct ckpt_store *store)
{
    char name[CKPT_NODE_MAX + 16], path[CKPT_PATH_MAX];
    int fd;

    snprintf(name, sizeof(name), ".reserve-%s", store->node);
    if (store->reserve_bytes == 0 || ckpt_path_join(path, store->path, name, NULL, NULL) < 0) {
        return;
    }
    fd = store->io->ops->open(store->io, path, O_WRONLY | O_CREAT, 0644);
    if (fd < 0) {
        return;
    }
    BL_IGNORE(store->io->ops->allocate(store->io, fd, store->reserve_bytes), "see above");
    BL_IGNORE(store->io->ops->close(store->io, fd), "nothing was written");
}

static int check_config(const struct ckpt_store_config *config, struct bl_errmsg *msg)
{
    if (strlen(config->path) + 256 > CKPT_PATH_MAX || config->path[0] == '\0') {
        return bl_err(msg, -ENAMETOOLONG, "root path of %zu bytes", strlen(config->path));
    }
    if (config->run == NULL) {
        return config->create ? bl_err(msg, -EINVAL, "a root cannot be made without a run") : 0;
    }
    if (!ckpt_name_is_plain(config->run) || strlen(config->run) >= CKPT_RUN_MAX) {
        return bl_err(msg, -EINVAL, "\"%.64s\" cannot be a run id", config->run);
    }
    if (config->node == NULL || !ckpt_name_is_plain(config->node) ||
        strlen(config->node) >= CKPT_NODE_MAX || strchr(config->node, '/') != NULL) {
        return bl_err(msg, -EINVAL, "\"%.64s\" cannot be a node's name",
                      config->node == NULL ? "" : config->node);
    }
    return 0;
}

int ckpt_store_open(struct ckpt_store **ret, const struct ckpt_store_config *config,
                    struct bl_errmsg *msg)
{
    struct ckpt_store *store;
    size_t bytes;
    int rc = check_config(config, msg);

    if (rc < 0) {
        return rc;
    }
    store = calloc(1, sizeof(*store));
    if (store == NULL) {
        return bl_err_code(msg, -ENOMEM, "root %s", config->path);
    }
    store->io = config->io == NULL ? ckpt_io_real() : config->io;
    snprintf(store->path, sizeof(store->path), "%s", config->path);
    bytes = strlen(store->path);
    while (bytes > 1 && store->path[bytes - 1] == '/') {
        store->path[--bytes] = '\0';
    }
    store->shared = config->shared;
    store->apart = config->apart;
    store->reserve_bytes = config->reserve_bytes;
    if (config->run == NULL) {
        rc = open_for_reading(store, msg);
    } else {
        snprintf(store->run, sizeof(store->run), "%s", config->run);
        snprintf(store->node, sizeof(store->node), "%s", config->node);
        store->writable = true;
        rc = open_for_writing(store, config->create, msg);
    }
    rc = rc < 0 ? rc : owner_open(store, config->create, msg);
    if (rc < 0) {
        free(store);
        return rc;
    }
    if (store->writable) {
        reserve_hold(store);
    }
    *ret = store;
    return 0;
}

void ckpt_store_close(struct ckpt_store *store)
{
    free(store);
}

const char *ckpt_store_run(const struct ckpt_store *store)
{
    return store->run;
}

const char *ckpt_store_path(const struct ckpt_store *store)
{
    return store->path;
}

const char *ckpt_store_owner(const struct ckpt_store *store)
{
    return store->owner;
}

const char *ckpt_store_damage(const struct ckpt_store *store)
{
    return store->damage;
}
