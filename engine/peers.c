/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/peers.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "wire/bulk.h"

#define PEER_MS       30000u /* without an answer or a byte: the peer is away */
#define PEER_KEY_MS   3000u  /* so long a peer may not know the newest key yet */
#define PEER_BUSY_MS  30000u /* so long as many as it serves may be at its files */
#define PEER_PAUSE_MS 50u
#define PEER_BREAKS   2 /* connections that break are made anew so often */

static const struct ckpt_io_ops *here(void)
{
    return ckpt_io_real()->ops;
}

/* Root, directory and file that a path below one of the roots names; false: none of them. */
static bool question_of(const struct engine_peers *peers, const char *path,
                        struct wire_bulk_file *ret)
{
    for (uint32_t i = 0; i < peers->root_count; i++) {
        size_t bytes = strlen(peers->roots[i].path);
        const char *rest = path + bytes + 1;
        const char *slash;

        if (strncmp(path, peers->roots[i].path, bytes) != 0 || path[bytes] != '/') {
            continue;
        }
        slash = strchr(rest, '/');
        if (slash == NULL || (size_t)(slash - rest) >= sizeof(ret->dir) ||
            strlen(slash + 1) >= sizeof(ret->file) || strchr(slash + 1, '/') != NULL) {
            continue;
        }
        *ret = (struct wire_bulk_file){.run = peers->run,
                                       .key = {peers->from->key[0], peers->from->key[1]},
                                       .root = peers->roots[i].index};
        snprintf(ret->dir, sizeof(ret->dir), "%.*s", (int)(slash - rest), rest);
        snprintf(ret->file, sizeof(ret->file), "%s", slash + 1);
        return true;
    }
    return false;
}

/* Does a peer that refused deserve the same question once more? */
static bool is_passing(int rc, uint64_t began_ns)
{
    uint32_t patience_ms = rc == -EACCES ? PEER_KEY_MS : rc == -EBUSY ? PEER_BUSY_MS : 0;

    return bl_now_ns() - began_ns < bl_time_scaled_ms(patience_ms) * 1000000;
}

/* Asks a peer, with new connections where old ones broke. One that hangs is asked once: an engine
 * that waits for long is called stuck itself. */
static int peer_ask(struct engine_peers *peers, uint32_t peer, struct wire_bulk_file *question,
                    void *out, uint64_t *ret_file_bytes)
{
    struct wire_sock *sock = &peers->socks[peer];
    uint32_t wait_ms = (uint32_t)bl_time_scaled_ms(PEER_MS);
    struct wire_bulk_question ask = {
        .type = WIRE_TYPE_BULK_FILE, .question = question, .bytes = question->bytes};
    struct bl_errmsg why = {0};
    uint64_t began_ns = bl_now_ns();
    int rc = 0;

    for (int breaks = 0; breaks <= PEER_BREAKS;) {
        struct wire_hello hello = {.run = peers->run};
        const struct timespec pause = {0, PEER_PAUSE_MS * 1000000};

        ask.refused = 0;
        rc = sock->fd >= 0 ? 0
                           : wire_bulk_connect(sock, peers->from->peers[peer].bulk_addr, &hello, 0,
                                               wait_ms, &why);
        rc = rc < 0 ? rc : wire_bulk_ask(sock, &ask, out, wait_ms, &why);
        if (rc == 0) {
            if (ret_file_bytes != NULL) {
                *ret_file_bytes = ask.file_bytes;
            }
            return 0;
        }
        if (!ask.refused) {
            wire_sock_close(sock);
            breaks = rc == BL_EDEADLINE ? PEER_BREAKS + 1 : breaks + 1;
        } else if (!is_passing(rc, began_ns)) {
            break;
        } else {
            nanosleep(&pause, NULL);
        }
    }
    if (rc != -ENOENT) {
        bl_log(BL_LOG_WARN, "engine", "%s/%s of node %s: %s", question->dir, question->file,
               peers->from->peers[peer].node, why.text);
    }
    peers->away[peer] = !ask.refused;
    return rc;
}

/* The peer that wrote a part has its name in it: it is asked first. */
static bool is_namesake(const struct engine_peers *peers, uint32_t peer, const char *file)
{
    const char *node = peers->from->peers[peer].node;
    size_t bytes = strlen(node);

    return strncmp(file, "part-", 5) == 0 && strncmp(file + 5, node, bytes) == 0 &&
           file[5 + bytes] == '.';
}

/* Which peer has the file, and how large it is. -ENOENT: none, and all were asked. */
static int far_find(struct engine_peers *peers, struct wire_bulk_file *question, uint32_t *ret_peer,
                    uint64_t *ret_bytes)
{
    int rc = -ENOENT;

    question->offset = question->bytes = 0;
    for (int namesakes = 1; namesakes >= 0; namesakes--) {
        for (uint32_t i = 0; i < peers->from->peer_count; i++) {
            int tried;

            if (is_namesake(peers, i, question->file) != namesakes) {
                continue;
            }
            tried = peers->away[i] ? BL_EPEER : peer_ask(peers, i, question, NULL, ret_bytes);
            if (tried == 0) {
                *ret_peer = i;
                return 0;
            }
            rc = tried == -ENOENT ? rc : tried;
        }
    }
    return rc;
}

static int peers_open(struct ckpt_io *io, const char *path, int flags, mode_t mode)
{
    struct engine_peers *peers = (struct engine_peers *)io;
    struct wire_bulk_file question;
    int fd = here()->open(io, path, flags, mode);

    if (fd != -ENOENT || (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_DIRECTORY)) ||
        !question_of(peers, path, &question)) {
        return fd;
    }
    for (uint32_t i = 0; i < ENGINE_PEER_FILES; i++) {
        struct engine_peer_file *file = &peers->files[i];

        if (!file->open) {
            int rc = far_find(peers, &question, &file->peer, &file->bytes);

            file->question = question;
            file->open = rc == 0;
            return rc < 0 ? rc : CKPT_FAR_FD + (int)i;
        }
    }
    return -EMFILE;
}

static int peers_size(struct ckpt_io *io, const char *path, uint64_t *ret_bytes)
{
    struct engine_peers *peers = (struct engine_peers *)io;
    struct wire_bulk_file question;
    uint32_t peer;
    int rc = here()->size(io, path, ret_bytes);

    if (rc != -ENOENT || !question_of(peers, path, &question)) {
        return rc;
    }
    return far_find(peers, &question, &peer, ret_bytes);
}

static int64_t peers_pread(struct ckpt_io *io, int fd, void *data, size_t bytes, uint64_t offset)
{
    struct engine_peers *peers = (struct engine_peers *)io;
    struct engine_peer_file *file;
    int rc;

    if (fd < CKPT_FAR_FD) {
        return here()->pread(io, fd, data, bytes, offset);
    }
    BL_ASSERT(fd - CKPT_FAR_FD < (int)ENGINE_PEER_FILES);
    file = &peers->files[fd - CKPT_FAR_FD];
    if (offset >= file->bytes) {
        return 0;
    }
    file->question.offset = offset;
    file->question.bytes = bytes < file->bytes - offset ? bytes : file->bytes - offset;
    rc = peer_ask(peers, file->peer, &file->question, data, NULL);
    return rc < 0 ? rc : (int64_t)file->question.bytes;
}

static int peers_close_fd(struct ckpt_io *io, int fd)
{
    struct engine_peers *peers = (struct engine_peers *)io;

    if (fd < CKPT_FAR_FD) {
        return here()->close(io, fd);
    }
    peers->files[fd - CKPT_FAR_FD].open = false;
    return 0;
}

int engine_peers_init(struct engine_peers *peers, const struct wire_engine_peers *from,
                      uint64_t run, struct bl_errmsg *msg)
{
    *peers = (struct engine_peers){.io = *ckpt_io_real(), .ops = *here(), .from = from, .run = run};
    peers->ops.open = peers_open;
    peers->ops.size = peers_size;
    peers->ops.pread = peers_pread;
    peers->ops.close = peers_close_fd;
    peers->io.ops = &peers->ops;
    peers->socks = calloc(from->peer_count + 1u, sizeof(*peers->socks));
    peers->away = calloc(from->peer_count + 1u, sizeof(*peers->away));
    for (uint32_t i = 0; peers->socks != NULL && i < from->peer_count; i++) {
        peers->socks[i].fd = -1;
    }
    if (peers->socks == NULL || peers->away == NULL) {
        engine_peers_close(peers);
        return bl_err_code(msg, -ENOMEM, "%u peers", from->peer_count);
    }
    return 0;
}

void engine_peers_root(struct engine_peers *peers, const struct wire_engine_root *root)
{
    struct engine_peer_root *added = &peers->roots[peers->root_count];
    size_t bytes;

    if (peers->root_count == WIRE_JOB_ROOTS + 1) {
        return;
    }
    snprintf(added->path, sizeof(added->path), "%s", root->path);
    bytes = strlen(added->path);
    while (bytes > 1 && added->path[bytes - 1] == '/') {
        added->path[--bytes] = '\0';
    }
    added->index = root->index;
    peers->root_count++;
}

void engine_peers_close(struct engine_peers *peers)
{
    for (uint32_t i = 0; peers->socks != NULL && i < peers->from->peer_count; i++) {
        wire_sock_close(&peers->socks[i]);
    }
    free(peers->socks);
    free(peers->away);
    memset(peers, 0, sizeof(*peers));
}
