/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bulk server: ranks of other nodes read this node's arenas. It has a thread and connections of
 * its own, so beats and votes never queue behind a gigabyte; the pages go from the memfd to the
 * socket without a copy in this process. Who asks must know the key of the generation in force.
 *
 * All calls may come from any thread; none waits for the network.
 */
#ifndef WIRE_BULK_H
#define WIRE_BULK_H

#include <stdint.h>

#include "wire/edge.h"

#define WIRE_BULK_PEERS_MAX  256   /* connections; more are closed at once */
#define WIRE_BULK_ARENAS_MAX 65536 /* arenas offered */
#define WIRE_BULK_RUNS_MAX   64    /* runs with a key */
#define WIRE_BULK_IDLE_MS    60000 /* a connection without traffic is closed after this long */

struct wire_bulk; /* opaque */

/* Listens at `addr` (loopback; port 0 takes a free one) and starts the thread. ret_addr: what came
 * of it. *ret is owned: wire_bulk_stop. */
BL_MUST_CHECK int wire_bulk_start(struct wire_bulk **ret, const char *addr, const char *node,
                                  char ret_addr[WIRE_ADDR_MAX], struct bl_errmsg *msg);
/* Ends the thread, closes everything. NULL is fine. */
void wire_bulk_stop(struct wire_bulk *bulk);

/* Offers `bytes` bytes of `fd` (borrowed: duplicated) as this arena. Again is fine. */
BL_MUST_CHECK int wire_bulk_arena_add(struct wire_bulk *bulk, uint64_t run, uint64_t arena, int fd,
                                      uint64_t bytes);
/* Offers it no more; a read under way ends well. Unknown is fine. */
void wire_bulk_arena_remove(struct wire_bulk *bulk, uint64_t run, uint64_t arena);

/* The plan in force of a run: other generations' readers are refused from now on. Generation 0:
 * nobody may read. BL_ELIMIT when there are too many runs. */
BL_MUST_CHECK int wire_bulk_key_set(struct wire_bulk *bulk, uint64_t run, uint64_t generation,
                                    const uint64_t key[2]);

#endif
