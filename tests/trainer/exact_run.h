/* SPDX-License-Identifier: Apache-2.0 */
/* Runs of one job in many layouts, which must end in the same bits. */
#ifndef TESTS_TRAINER_EXACT_RUN_H
#define TESTS_TRAINER_EXACT_RUN_H

#include <stddef.h>
#include <stdint.h>

#include "base/job.h"

struct exact_layout {
    uint32_t dp, threads;
    int nodes; /* 0: all share memory; else they play so many, with TCP between them */
    uint32_t pp, interleave, zero, recompute;
    uint32_t tp, sequence; /* 0: 1 */
    uint32_t head_chunk;
};

/* A GPT-2 and a Llama of five layers, with tied heads; views of static memory. */
const struct bl_job_model *exact_gpt2(void);
const struct bl_job_model *exact_llama(void);

/* Runs `lanes` lanes of the model (NULL: the bench's Llama of two layers, `tied` or not) in each
 * layout, alone, and fails the test unless all digests, losses and norms are equal. `micros`: of a
 * lane. */
void exact_compare(const struct bl_job_model *model, uint32_t lanes, uint32_t tied, uint32_t micros,
                   const struct exact_layout *layouts, size_t count);

#endif
