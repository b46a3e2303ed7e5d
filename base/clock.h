/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The clocks. Deadlines inside a process count on the monotonic clock; leases between machines on
 * the boot clock, which goes on while a machine is suspended; the wall clock is only ever shown.
 * All may be called from any thread and never fail.
 */
#ifndef BL_BASE_CLOCK_H
#define BL_BASE_CLOCK_H

#include <stdint.h>

/* CLOCK_MONOTONIC in nanoseconds. */
uint64_t bl_now_ns(void);

/* CLOCK_BOOTTIME in nanoseconds. */
uint64_t bl_boot_ns(void);

/* CLOCK_REALTIME in milliseconds since 1970. */
uint64_t bl_wall_ms(void);

/* Multiplies by BELAY_TIME_SCALE (a positive decimal number in the environment, default 1); never
 * scales what is not 0 down to 0. */
uint64_t bl_time_scaled_ms(uint64_t ms);

#define BL_CLOCK_TEXT_BYTES 25

/* "2026-01-31T23:59:59.123Z": a wall time in UTC. */
void bl_wall_format(uint64_t wall_ms, char text[BL_CLOCK_TEXT_BYTES]);

#endif
