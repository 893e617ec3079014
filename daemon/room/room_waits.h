/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room_waits: what a room is blocked on, and which party can unblock it. Computed from
 * the room on demand.
 */
#ifndef KVD_ROOM_WAITS_H
#define KVD_ROOM_WAITS_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/room/room.h"

struct room_waits {
	char what[280]; /* reads after "waits for" */
	char who[96];	/* "engine 'vllm'", "peer p0", "this daemon" */
	uint64_t since_ns;
	uint64_t until_ns; /* when it fails otherwise; on the loop's clock */
};

/* False: it has ended. */
bool room_waits(const struct room *room, struct room_waits *waits);

#endif
