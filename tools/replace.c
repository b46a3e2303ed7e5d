/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/replace.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"

/* Cuts `path` into parent and name. */
static int split(struct tool_replace *replace, const char *path, struct bl_errmsg *msg)
{
    size_t bytes = strlen(path), at;

    while (bytes > 1 && path[bytes - 1] == '/') {
        bytes--;
    }
    for (at = bytes; at > 0 && path[at - 1] != '/'; at--) {
    }
    if (bytes == 0 || at == bytes || bytes - at > 200 || bytes + 32 > TOOL_REPLACE_PATH_MAX ||
        strncmp(path + at, ".", bytes - at) == 0 || strncmp(path + at, "..", bytes - at) == 0) {
        return bl_err(msg, BL_EFORMAT, "\"%.80s\" is no name for a new directory", path);
    }
    snprintf(replace->place, sizeof(replace->place), "%.*s", (int)bytes, path);
    snprintf(replace->name, sizeof(replace->name), "%.*s", (int)(bytes - at), path + at);
    if (at == 0) {
        snprintf(replace->parent, sizeof(replace->parent), ".");
    } else {
        snprintf(replace->parent, sizeof(replace->parent), "%.*s", at > 1 ? (int)at - 1 : 1, path);
    }
    snprintf(replace->temp_name, sizeof(replace->temp_name), ".%s.belay-tmp", replace->name);
    return bl_path_join(replace->temp, sizeof(replace->temp), replace->parent, replace->temp_name);
}

/* What is at the place: 0 nothing or an empty directory, 1 what may be replaced. */
static int look(const struct tool_replace *replace, bool force, bool (*is_ours)(const char *name),
                struct bl_errmsg *msg)
{
    DIR *dir = opendir(replace->place);
    const struct dirent *entry;
    int rc = 0;

    if (dir == NULL) {
        return errno == ENOENT ? 0 : bl_err_code(msg, -errno, "%s", replace->place);
    }
    while (rc >= 0 && (entry = readdir(dir)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) {
            continue;
        }
        if (!force) {
            rc = bl_err(msg, -EEXIST, "%s is there already and not empty: --force replaces it",
                        replace->place);
        } else if (!is_ours(entry->d_name)) {
            rc = bl_err(msg, BL_EFOREIGN,
                        "%s holds \"%.80s\", which is not of such work: not "
                        "replaced",
                        replace->place, entry->d_name);
        } else {
            rc = 1;
        }
    }
    closedir(dir);
    return rc;
}

int tool_replace_check(const char *path, bool force, bool (*is_ours)(const char *name),
                       struct bl_errmsg *msg)
{
    struct tool_replace replace = {.fd = -1};
    int rc = split(&replace, path, msg);

    rc = rc < 0 ? rc : look(&replace, force, is_ours, msg);
    return rc < 0 ? rc : 0;
}

static int lock_temp(struct tool_replace *replace, struct bl_errmsg *msg)
{
    int rc;

    replace->fd = open(replace->temp, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (replace->fd < 0) {
        return bl_err_code(msg, -errno, "%s", replace->temp);
    }
    if (flock(replace->fd, LOCK_EX | LOCK_NB) == 0) {
        return 0;
    }
    rc = errno == EWOULDBLOCK
             ? bl_err(msg, -EBUSY, "%s is being written by another process", replace->temp)
             : bl_err_code(msg, -errno, "%s: lock", replace->temp);
    close(replace->fd);
    replace->fd = -1;
    return rc;
}

/* An empty, locked directory under the temporary name. */
static int make_temp(struct tool_replace *replace, struct bl_errmsg *msg)
{
    int rc;

    if (mkdir(replace->temp, 0755) == 0) {
        return lock_temp(replace, msg);
    }
    if (errno != EEXIST) {
        return bl_err_code(msg, -errno, "%s", replace->temp);
    }
    rc = lock_temp(replace, msg); /* nobody else's: what a killed run left */
    if (rc < 0) {
        return rc;
    }
    rc = bl_rm_tree(replace->parent, replace->temp_name, msg);
    close(replace->fd);
    replace->fd = -1;
    if (rc == 0 && mkdir(replace->temp, 0755) < 0) {
        rc = bl_err_code(msg, -errno, "%s", replace->temp);
    }
    return rc < 0 ? rc : lock_temp(replace, msg);
}

int tool_replace_begin(struct tool_replace *replace, const char *path, bool force,
                       bool (*is_ours)(const char *name), struct bl_errmsg *msg)
{
    int rc;

    memset(replace, 0, sizeof(*replace));
    replace->fd = -1;
    rc = split(replace, path, msg);
    if (rc == 0) {
        rc = look(replace, force, is_ours, msg);
        replace->occupied = rc > 0;
    }
    if (rc >= 0) {
        rc = bl_mkdir_p(replace->parent, msg);
    }
    return rc < 0 ? rc : make_temp(replace, msg);
}

int tool_replace_commit(struct tool_replace *replace, struct bl_errmsg *msg)
{
    char old_name[300], old[TOOL_REPLACE_PATH_MAX];
    int rc;

    snprintf(old_name, sizeof(old_name), ".%s.belay-old", replace->name);
    rc = bl_path_join(old, sizeof(old), replace->parent, old_name);
    if (rc < 0 || fsync(replace->fd) < 0) {
        return bl_err_code(msg, rc < 0 ? rc : -errno, "%s", replace->temp);
    }
    if (replace->occupied) {
        rc = bl_rm_tree(replace->parent, old_name, msg);
        if (rc == 0 && rename(replace->place, old) < 0) {
            rc = bl_err_code(msg, -errno, "%s: rename to %s", replace->place, old);
        }
    }
    if (rc == 0 && rename(replace->temp, replace->place) < 0) {
        rc = bl_err_code(msg, -errno, "%s: rename to %s", replace->temp, replace->place);
        if (replace->occupied) {
            BL_IGNORE(rename(old, replace->place), "the first error is what is told");
        }
    }
    if (rc == 0) {
        rc = bl_fsync_dir(replace->parent, msg);
    }
    if (rc == 0 && replace->occupied) {
        rc = bl_rm_tree(replace->parent, old_name, msg);
    }
    return rc;
}

void tool_replace_close(struct tool_replace *replace)
{
    if (replace->fd < 0) {
        return;
    }
    BL_IGNORE(bl_rm_tree(replace->parent, replace->temp_name, NULL), "the next run removes it");
    close(replace->fd);
    replace->fd = -1;
}
