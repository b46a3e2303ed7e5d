/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Errors. Every fallible function of Belay returns an int: 0 is good, negative is bad. -errno is
 * passed on as it is (libuv and liburing speak it too); our own codes go from -5000 down. Text for
 * people climbs beside the code in a struct bl_errmsg, to which each caller adds its context in
 * front: "step 1200: part 3: chunk 17: digest differs".
 */
#ifndef BL_BASE_ERROR_H
#define BL_BASE_ERROR_H

#include <stddef.h>

#define BL_MUST_CHECK   __attribute__((warn_unused_result))
#define BL_PRINTF(f, a) __attribute__((format(printf, f, a)))

/* Our own codes: name, number, sentence. Numbers are never reused: they go over the wire. */
#define BL_ERROR_CODES(X)                                                                          \
    X(BL_EGEN, -5000, "a new generation was called")                                               \
    X(BL_EDIGEST, -5001, "digest differs")                                                         \
    X(BL_EFORMAT, -5002, "not in the expected format")                                             \
    X(BL_EVERSION, -5003, "version not supported")                                                 \
    X(BL_ELIMIT, -5004, "over a limit")                                                            \
    X(BL_ECONFLICT, -5005, "somebody else changed it first")                                       \
    X(BL_EDEADLINE, -5006, "deadline passed")                                                      \
    X(BL_EABORTED, -5007, "aborted")                                                               \
    X(BL_EPEER, -5008, "a peer was lost")                                                          \
    X(BL_ECONFIG, -5009, "configuration refused")                                                  \
    X(BL_EFOREIGN, -5010, "belongs to another run")                                                \
    X(BL_ENOSTATE, -5011, "no consistent state")                                                   \
    X(BL_ELIBRARY, -5012, "a library call failed")                                                 \
    X(BL_ENOTBUILT, -5013, "not built into this version")                                          \
    X(BL_EPROTO, -5014, "protocol violated")                                                       \
    X(BL_ENUMERIC, -5015, "numeric probe differs")                                                 \
    X(BL_ESTOPPED, -5016, "the run was stopped")                                                   \
    X(BL_EDEVICE, -5017, "a device failed")

#define BL_ERROR_ENUM(name, number, text) name = number,
enum bl_error { BL_ERROR_CODES(BL_ERROR_ENUM) };
#undef BL_ERROR_ENUM

#define BL_ERRMSG_BYTES 512

/* The text of an error, always NUL-terminated once set; longer text is cut at the end. Untouched
 * on success, so zero it first. */
struct bl_errmsg {
    char text[BL_ERRMSG_BYTES];
};

/* Sets the text (msg may be NULL) and returns `code`, so that a caller can `return bl_err(...)`. */
int bl_err(struct bl_errmsg *msg, int code, const char *fmt, ...) BL_PRINTF(3, 4);

/* The same with ": " and the sentence of `code` added at the end: "open /x/y: No such file ...". */
int bl_err_code(struct bl_errmsg *msg, int code, const char *fmt, ...) BL_PRINTF(3, 4);

/* Puts context in front of a text that a callee set ("step 12: " + text). Returns `code`. */
int bl_err_in(struct bl_errmsg *msg, int code, const char *fmt, ...) BL_PRINTF(3, 4);

/* The sentence of a code: ours, or strerror's of -code. Never NULL. Any thread. */
const char *bl_strerror(int code);

/* The name of one of our codes ("BL_EDIGEST") or of an errno ("ENOSPC"). Never NULL. */
const char *bl_errname(int code);

/* Ignoring a must-check result wants its reason beside it, as a string that is never used. */
#define BL_IGNORE(expr, reason)                                                                    \
    do {                                                                                           \
        if (expr) {                                                                                \
            (void)("" reason);                                                                     \
        }                                                                                          \
    } while (0)

/* Broken invariants stop the process in release builds too; what comes from disk, network or a
 * person is never asserted. */
#define BL_ASSERT(cond)                                                                            \
    do {                                                                                           \
        if (__builtin_expect(!(cond), 0)) {                                                        \
            bl_assert_failed(#cond, __FILE__, __LINE__, __func__);                                 \
        }                                                                                          \
    } while (0)
void bl_assert_failed(const char *cond, const char *file, int line, const char *func)
    __attribute__((noreturn));

#endif
