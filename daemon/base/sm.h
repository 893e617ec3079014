/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sm: checked state machines. A table names the states and, for each, the states it may
 * move to; only sm_move() writes a state. A move that the table does not allow, or after
 * which the invariant does not hold, is a fault of kvd itself: it is logged by name and
 * ends the process. Events from outside are checked with sm_can() first.
 *
 *   enum { OPEN, BUSY, CLOSED };
 *   static const struct sm_state door_states[] = {
 *           [OPEN] = {"open", SM_TO(BUSY) | SM_TO(CLOSED)},
 *           [BUSY] = {"busy", SM_TO(OPEN)},
 *           [CLOSED] = {"closed", 0},
 *   };
 *   static const struct sm_table door_table = {
 *           .name = "door", .states = door_states, .count = ARRAY_LEN(door_states)};
 */
#ifndef KVD_BASE_SM_H
#define KVD_BASE_SM_H

#include <stdbool.h>
#include <stdint.h>

#define SM_STATES_MAX 32u
#define SM_TO(state) (UINT32_C(1) << (state))

struct sm;

struct sm_state {
	const char *name;
	uint32_t to; /* SM_TO() of each state it may move to; 0 = final */
};

struct sm_table {
	const char *name;
	const struct sm_state *states; /* index = the state's number */
	unsigned int count;	       /* at most SM_STATES_MAX */
	/* Optional, called after each move (and at sm_init with from == now):
	 * false = the owner's invariant does not hold. The owner is found by
	 * container_of. */
	bool (*invariant)(const struct sm *sm, unsigned int from);
};

struct sm {
	const struct sm_table *table;
	unsigned int state; /* written by sm_move() only */
};

void sm_init(struct sm *sm, const struct sm_table *table, unsigned int state);
void sm_move(struct sm *sm, unsigned int to);
static inline unsigned int sm_state(const struct sm *sm)
{
	return sm->state;
}
bool sm_can(const struct sm *sm, unsigned int to);
/* For tests: called after each move. NULL: none. */
void sm_watch(void (*on_move)(const struct sm *sm, unsigned int from));
const char *sm_name(const struct sm *sm);
const char *sm_name_of(const struct sm_table *table, unsigned int state);

#endif
