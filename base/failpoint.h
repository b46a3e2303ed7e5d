/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Failpoints: named places at which a test makes the process fail. They are inert without the
 * environment, and are nothing at all in a build without BELAY_FAILPOINTS.
 *
 *     BELAY_FAIL=mid-apply@2:kill:3,save-commit:delay_500:1
 *
 * A list of `name[@rank]:action:count`. With @rank it holds only where BELAY_RANK is that number.
 * The count-th hit in this process, counted over all threads, acts; with 0 each does, and no
 * marker is taken (`before-vote:delay_20:0` paces a run):
 *
 *     kill      raise SIGKILL               segv      raise SIGSEGV with its default action
 *     stop      raise SIGSTOP               exit_CODE _exit(CODE); exit alone: 1
 *     error     the macro returns -EIO      delay_MS  sleeps MS milliseconds, returns 0
 *
 * With BELAY_FAIL_ONCE_DIR set, an entry acts only if it can create <dir>/<name>[@rank] (O_EXCL)
 * first: a process that is started again does not fail again. An entry that cannot be read stops
 * the process with a line on standard error: a test with a typing error must not pass.
 */
#ifndef BL_BASE_FAILPOINT_H
#define BL_BASE_FAILPOINT_H

/* One hit of the failpoint `name`. 0, or -EIO for the action `error`. Any thread. Use the macro. */
int bl_failpoint_hit(const char *name);

#ifdef BELAY_FAILPOINTS
#define BL_FAILPOINT(name) bl_failpoint_hit(name)
#else
#define BL_FAILPOINT(name) 0
#endif

#endif
