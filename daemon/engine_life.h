/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Signs of life of an engine, read from /proc and /sys, never from its root: that may hang, and
 * whoever touches it hangs too.
 *
 * A process that computes, reads or writes shows it in its own counters. One that waits for an
 * fsync shows nothing, however much its file system writes meanwhile (also for others: a journal
 * commits what all of them have dirtied). So while it waits in the kernel, what its root's block
 * device moves counts as its progress.
 */
#ifndef DAEMON_ENGINE_LIFE_H
#define DAEMON_ENGINE_LIFE_H

#include <stdint.h>

/* Sum of the numbers behind the names of /proc/PID/io that count bytes. 0 when it cannot be read.
 */
uint64_t engine_life_io(uint32_t pid);

/* Time on a processor, in clock ticks. 0 when it cannot be read. */
uint64_t engine_life_cpu_ticks(uint32_t pid);

/* Does one of its threads wait where no signal reaches (state D)? */
int engine_life_waits(uint32_t pid);

/* Sectors that the block device below `path` has read and written, as /sys counts them; 0 when no
 * block device is below it (a network file system, memory). `mountinfo` is
 * /proc/self/mountinfo, and `sys` /sys/dev/block, or what a test has in their place. */
uint64_t engine_life_sectors(const char *path, const char *mountinfo, const char *sys);

#endif
