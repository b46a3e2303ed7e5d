/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The service manager: state and watchdog by datagrams to NOTIFY_SOCKET (sd_notify's protocol,
 * which is documented and small enough to be spoken without its library). Without the variable all
 * of it does nothing.
 */
#ifndef DAEMON_NOTIFY_H
#define DAEMON_NOTIFY_H

#include <stdint.h>

#include "base/error.h"

/* Sends "READY=1", "STATUS=...", "WATCHDOG=1", lines as they are. Loop thread; never blocks. */
void notify_send(const char *fmt, ...) BL_PRINTF(1, 2);

/* Milliseconds between pats of the watchdog (half of WATCHDOG_USEC), 0 without one. */
uint64_t notify_watchdog_ms(void);

#endif
