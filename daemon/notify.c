/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/notify.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

void notify_send(const char *fmt, ...)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    char text[512];
    va_list ap;

    if (!path || strlen(path) >= sizeof(addr.sun_path) || (path[0] != '/' && path[0] != '@')) {
        return;
    }
    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    memcpy(addr.sun_path, path, strlen(path));
    if (path[0] == '@') { /* an abstract name */
        addr.sun_path[0] = '\0';
    }
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

    if (fd >= 0 && n > 0) {
        size_t bytes = (size_t)n < sizeof(text) ? (size_t)n : sizeof(text) - 1;

        BL_IGNORE(sendto(fd, text, bytes, MSG_NOSIGNAL | MSG_DONTWAIT, (struct sockaddr *)&addr,
                         (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path))) < 0,
                  "the watchdog tells when the manager hears nothing");
    }
    if (fd >= 0) {
        close(fd);
    }
}

uint64_t notify_watchdog_ms(void)
{
    const char *usec = getenv("WATCHDOG_USEC"), *pid = getenv("WATCHDOG_PID");

    if (!usec || (pid && atol(pid) != (long)getpid())) {
        return 0;
    }
    return strtoull(usec, NULL, 10) / 2000;
}
