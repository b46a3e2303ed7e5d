/* SPDX-License-Identifier: Apache-2.0 */
/* Random messages of every type, by the codec's own tables. */
#ifndef TESTS_WIRE_MESSAGE_RANDOM_H
#define TESTS_WIRE_MESSAGE_RANDOM_H

#include <stdint.h>

#include "wire/codec.h"

struct random_state {
    uint64_t state;
};

uint64_t random_next(struct random_state *random);
uint64_t random_below(struct random_state *random, uint64_t bound);

/* Fills `message` (its type's struct, zeroed) within all bounds; free by wire_message_close. */
void message_random(enum wire_type type, void *message, struct random_state *random);

/* Every type number. */
extern const enum wire_type message_types[];
extern const unsigned message_type_count;

#endif
