/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Start and identity. This file alone is compiled for the plainest CPU of its architecture, so that
 * it can say what is missing.
 */
#include "kernels/kern.h"

#include <cblas.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* Raised by every change of a kernel that changes bits. */
#define KERN_VERSION 2

#if defined(__x86_64__)
#define KERN_ISA "avx2"
static int isa_is_there(void)
{
    return __builtin_cpu_supports("avx2");
}
#elif defined(__aarch64__)
#define KERN_ISA "aarch64"
static int isa_is_there(void)
{
    return 1;
}
#else
#error "kernels: this architecture has not been tried"
#endif

/* OpenBLAS starts threads in a constructor, before main, and each of them spins for 100 ms before
 * it sleeps: time that another rank on these cores needs, above all while a run recovers. This ends
 * them; its fork handler does the same. Weak: the builds without threads do not have it. */
extern int blas_thread_shutdown_(void) __attribute__((weak));

static pthread_once_t g_once = PTHREAD_ONCE_INIT;
static char g_build[256];
static char g_core[64];

static void start_once(void)
{
    openblas_set_num_threads(1);
    if (blas_thread_shutdown_ != NULL) {
        blas_thread_shutdown_();
    }
    const char *config = openblas_get_config();
    size_t length = strlen(config);
    while (length > 0 && config[length - 1] == ' ') {
        length--;
    }
    snprintf(g_core, sizeof g_core, "%s", openblas_get_corename());
    snprintf(g_build, sizeof g_build, "belay-kern-%d %s %.*s core %s", KERN_VERSION, KERN_ISA,
             (int)length, config, g_core);
}

int kern_start(struct bl_errmsg *msg)
{
    if (!isa_is_there()) {
        return bl_err(msg, BL_ENOTBUILT,
                      "this processor lacks the instructions of this build's kernels (%s)",
                      KERN_ISA);
    }
    pthread_once(&g_once, start_once);
    return 0;
}

const char *kern_build_name(void)
{
    return g_build;
}

const char *kern_core_name(void)
{
    return g_core;
}
