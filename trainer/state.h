/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state that a rank owns (fp32 weights, both moments) in the memory of a device, where AdamW
 * updates it in place:
 *
 *     slot n - 1 --load--> | weights | first moments | second moments | --publish--> slot n
 *                              ^ apply: in place
 *
 * publish copies out on a queue of its own, beside the passes of the next step, which only read;
 * the slot is complete, and may be sealed, when train_state_wait has returned or train_state_is_out
 * says so. apply comes after that: never into what is being copied.
 *
 * Back ends in the host's memory have no such state: there AdamW goes from slot to slot (step.h).
 * One thread uses it, that of the back end.
 */
#ifndef TRAIN_TRAINER_STATE_H
#define TRAIN_TRAINER_STATE_H

#include <stdint.h>

#include "base/error.h"
#include "kernels/backend.h"
#include "trainer/shard.h"

#define TRAIN_STATE_HOSTS 8u /* slots that are kept page-locked */

struct train_state_host {
    void *memory;
    uint64_t bytes;
};

struct train_state {
    struct kern *kern;               /* kept; NULL: not in use */
    const struct train_shard *shard; /* kept */
    char *memory;                    /* of the back end */
    uint64_t bytes;
    struct kern_adamw_part *parts; /* by extent; the places of its state */
    int is_publishing;             /* a slot is not complete yet */
    int failed;                    /* the last publish's error: its slot never is */
    struct train_state_host hosts[TRAIN_STATE_HOSTS];
};

/* Bytes that the shard's state takes on a device. */
uint64_t train_state_bytes(const struct train_shard *shard);

/* Takes them. Keeps kern and shard. `state` is caller's memory, ended by train_state_close. -ENOMEM
 * with the number. */
BL_MUST_CHECK int train_state_init(struct train_state *state, struct kern *kern,
                                   const struct train_shard *shard, struct bl_errmsg *msg);
void train_state_close(struct train_state *state); /* a zeroed one is fine; forgets the slots too */

/* Slots that publish met are page-locked until here: before their memory goes. */
void train_state_forget(struct train_state *state);

/* The state is what `slot` holds from now on; waits until it is read. Errors of sync. */
BL_MUST_CHECK int train_state_load(struct train_state *state, const void *slot,
                                   struct bl_errmsg *msg);

/* The own weights of an extent, in the back end's memory. */
const float *train_state_weights(const struct train_state *state, uint32_t extent);

/* kern_adamw_element over extents [first, end), in place. `grads`: of the local order's element
 * `own_lo`, in the back end's memory. Not while a slot is being published. */
void train_state_apply(struct train_state *state, const struct kern_adamw_step *step,
                       float weight_decay, const float *grads, uint32_t first, uint32_t end);

/* Copies all of it to `slot`, behind what was called before; see above. */
void train_state_publish(struct train_state *state, void *slot);
/* Waits until the slot is complete. None under way: 0. Errors of the back end, from then on until
 * the next load: the slot is not complete, and the memory is not to be trusted. */
BL_MUST_CHECK int train_state_wait(struct train_state *state, struct bl_errmsg *msg);
/* Whether train_state_wait would return at once. */
int train_state_is_out(struct train_state *state);

#endif
