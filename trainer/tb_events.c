/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/tb_events.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/job.h" /* BL_PATH_MAX */

#define EVENT_BYTES_MAX 1024u /* eight scalars of at most 80 bytes, and the rest */
#define TAG_BYTES_MAX   63u

struct tb_events {
    int fd;
    int has_session;
};

enum { WIRE_VARINT = 0, WIRE_FIXED64 = 1, WIRE_BYTES = 2, WIRE_FIXED32 = 5 };

struct text { /* a message in the making */
    uint8_t data[EVENT_BYTES_MAX];
    uint32_t bytes;
};

uint32_t tb_crc32c(const void *data, size_t bytes)
{
    const uint8_t *at = data;
    uint32_t crc = ~0u;
    for (size_t i = 0; i < bytes; i++) { /* a few hundred bytes a step: no table needed */
        crc ^= at[i];
        for (int bit = 0; bit < 8; bit++) {
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
        }
    }
    return ~crc;
}

static uint32_t masked(const void *data, size_t bytes)
{
    uint32_t crc = tb_crc32c(data, bytes);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static void put(struct text *text, const void *data, uint32_t bytes)
{
    BL_ASSERT(bytes <= sizeof text->data - text->bytes);
    memcpy(text->data + text->bytes, data, bytes);
    text->bytes += bytes;
}

static void put_varint(struct text *text, uint64_t value)
{
    for (; value >= 0x80; value >>= 7) {
        uint8_t byte = (uint8_t)(value | 0x80);
        put(text, &byte, 1);
    }
    uint8_t last = (uint8_t)value;
    put(text, &last, 1);
}

static void put_key(struct text *text, uint32_t field, uint32_t kind)
{
    put_varint(text, field << 3 | kind);
}

static void put_bytes(struct text *text, uint32_t field, const void *data, uint32_t bytes)
{
    put_key(text, field, WIRE_BYTES);
    put_varint(text, bytes);
    put(text, data, bytes);
}

static void event_begin(struct text *event, uint64_t step)
{
    double wall = (double)bl_wall_ms() / 1000;
    event->bytes = 0;
    put_key(event, 1, WIRE_FIXED64);
    put(event, &wall, sizeof wall);
    put_key(event, 2, WIRE_VARINT);
    put_varint(event, step);
}

/* One record in one write, so that files of two writers at once cannot mix inside of it. */
static int record_write(const struct tb_events *events, const struct text *event)
{
    uint8_t record[EVENT_BYTES_MAX + 16];
    uint64_t length = event->bytes;
    uint32_t check = masked(&length, sizeof length);
    memcpy(record, &length, 8);
    memcpy(record + 8, &check, 4);
    memcpy(record + 12, event->data, event->bytes);
    check = masked(event->data, event->bytes);
    memcpy(record + 12 + event->bytes, &check, 4);
    ssize_t written = write(events->fd, record, event->bytes + 16);
    return written < 0 ? -errno : (size_t)written == event->bytes + 16 ? 0 : -ENOSPC;
}

int tb_events_open(struct tb_events **ret, const char *dir, struct bl_errmsg *msg)
{
    static const char version[] = "brain.Event:2";
    char path[BL_PATH_MAX + 128], host[64] = "host";
    struct text event;
    BL_IGNORE(gethostname(host, sizeof host - 1), "only part of a name");
    if (mkdir(dir, 0755) != 0 && errno != EEXIST) {
        return bl_err_code(msg, -errno, "%s", dir);
    }
    struct tb_events *events = calloc(1, sizeof *events);
    if (events == NULL) {
        return bl_err_code(msg, -ENOMEM, "%s", dir);
    }
    /* Seconds first: TensorBoard reads files in the order of their names. */
    snprintf(path, sizeof path, "%s/events.out.tfevents.%010llu.%s.%d.%llu", dir,
             (unsigned long long)(bl_wall_ms() / 1000), host, (int)getpid(),
             (unsigned long long)bl_now_ns());
    events->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
    int rc = events->fd < 0 ? -errno : 0;
    if (rc == 0) {
        event_begin(&event, 0);
        put_bytes(&event, 3, version, sizeof version - 1);
        rc = record_write(events, &event);
    }
    if (rc != 0) {
        tb_events_close(events);
        return bl_err_code(msg, rc, "%s", path);
    }
    *ret = events;
    return 0;
}

void tb_events_close(struct tb_events *events)
{
    if (events != NULL && events->fd >= 0) {
        close(events->fd);
    }
    free(events);
}

void tb_events_write(struct tb_events *events, uint64_t step, const struct tb_scalar *scalars,
                     uint32_t count)
{
    static const uint8_t session_start[] = {1 << 3 | WIRE_VARINT, 1};
    struct text event, summary = {.bytes = 0}, value;
    BL_ASSERT(count <= TB_SCALARS_MAX);
    if (!events->has_session) {
        event_begin(&event, step);
        put_bytes(&event, 7, session_start, sizeof session_start);
        events->has_session = record_write(events, &event) == 0;
    }
    for (uint32_t i = 0; i < count; i++) {
        float number = (float)scalars[i].value;
        value.bytes = 0;
        put_bytes(&value, 1, scalars[i].tag, (uint32_t)strnlen(scalars[i].tag, TAG_BYTES_MAX));
        put_key(&value, 2, WIRE_FIXED32);
        put(&value, &number, sizeof number);
        put_bytes(&summary, 1, value.data, value.bytes);
    }
    event_begin(&event, step);
    put_bytes(&event, 5, summary.data, summary.bytes);
    BL_IGNORE(record_write(events, &event), "training goes on without");
}
