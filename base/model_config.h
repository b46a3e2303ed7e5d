/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model's description as Hugging Face's transformers writes it: config.json.
 */
#ifndef BL_BASE_MODEL_CONFIG_H
#define BL_BASE_MODEL_CONFIG_H

#include <jansson.h>
#include <stddef.h>

#include "base/error.h"
#include "base/job.h"

#define BL_MODEL_CONFIG_BYTES_MAX (1u << 20)

/* Reads the text of a config.json. Refused: another model_type than llama and gpt2, quantised
 * weights, biases that Belay's Llama has not, another activation, a head size that is not dim /
 * heads, rope scaling other than Llama 3's (BL_ENOTBUILT); a missing size or a number that is none
 * (BL_EFORMAT). Keys that say nothing about weights are passed over; whether sizes fit each other
 * is for the caller to check. `context` is set for Llama too: max_position_embeddings. rope_factor
 * 0: no scaling. */
BL_MUST_CHECK int bl_model_config_parse(struct bl_job_model *ret, const char *text, size_t bytes,
                                        struct bl_errmsg *msg);

/* Its rope_scaling alone: {"rope_type": "llama3", "factor": ...}, or null, into the model's rope_
 * fields. BL_ENOTBUILT for another type, BL_EFORMAT. */
BL_MUST_CHECK int bl_model_config_scaling(struct bl_job_model *ret, const json_t *scaling,
                                          struct bl_errmsg *msg);

#endif
