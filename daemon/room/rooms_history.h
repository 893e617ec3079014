/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rooms_history: records of the rooms that ended last, for operators: a ring of fixed
 * size, allocated with the first record; its memory is touched as it fills. It outlives
 * rooms, sessions and peers, so it has copies of their names.
 */
#ifndef KVD_ROOMS_HISTORY_H
#define KVD_ROOMS_HISTORY_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/room/room.h"

#define HISTORY_ROOMS 4096u

struct ended_room {
	uint64_t number, session;
	uint64_t bytes, expected;
	uint64_t tokens;    /* bound or offered, of the longest view */
	uint64_t surplus;   /* tokens of its chunks that no receiver had bound */
	uint64_t opened_ns; /* the loop's clock; others 0: state not reached */
	uint64_t waiting_ns, moving_ns, ended_ns;
	uint64_t gen, layout; /* the pool's digest */
	struct room_trace trace;
	struct room_names *names; /* heap; NULL: none, or there was no memory */
	enum room_role role;
	enum err_code code; /* OK: it succeeded */
	enum err_scope scope;
	bool retryable;
	uint32_t peers;
	char engine[40];    /* name of its engine */
	char peer[80];	    /* the first one's name */
	char transport[16]; /* of that one; "" = none was chosen */
	char text[200];	    /* the error's */
};

struct history {
	struct ended_room *ring; /* NULL: no room has ended yet */
	uint64_t count;		 /* rooms ended so far; also the number of the next one */
};

/* Record an ended room, if there is memory. */
void history_put(struct history *history, const struct room *room);
/* The record number `seq`, from 0; NULL: not yet there, or overwritten. */
const struct ended_room *history_at(const struct history *history, uint64_t seq);
void history_fini(struct history *history);

#endif
