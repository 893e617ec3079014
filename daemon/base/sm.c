/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/sm.h"

#include <assert.h>
#include <stdlib.h>

#include "daemon/base/log.h"

static void (*watcher)(const struct sm *sm, unsigned int from);

void sm_watch(void (*on_move)(const struct sm *sm, unsigned int from))
{
	watcher = on_move;
}

static void check_invariant(const struct sm *sm, unsigned int from)
{
	if (!sm->table->invariant || sm->table->invariant(sm, from))
		return;
	log_error("sm", sm->table->name, "invariant broken", "from=%s to=%s",
		  sm_name_of(sm->table, from), sm_name(sm));
	abort();
}

void sm_init(struct sm *sm, const struct sm_table *table, unsigned int state)
{
	assert(table->count <= SM_STATES_MAX && state < table->count);
	sm->table = table;
	sm->state = state;
	check_invariant(sm, state);
}

bool sm_can(const struct sm *sm, unsigned int to)
{
	return to < sm->table->count && (sm->table->states[sm->state].to & SM_TO(to));
}

void sm_move(struct sm *sm, unsigned int to)
{
	unsigned int from = sm->state;

	if (!sm_can(sm, to)) {
		log_error("sm", sm->table->name, "move not allowed", "from=%s to=%s",
			  sm_name(sm), sm_name_of(sm->table, to));
		abort();
	}
	sm->state = to;
	check_invariant(sm, from);
	if (watcher)
		watcher(sm, from);
}

const char *sm_name(const struct sm *sm)
{
	return sm_name_of(sm->table, sm->state);
}

const char *sm_name_of(const struct sm_table *table, unsigned int state)
{
	return state < table->count ? table->states[state].name : "?";
}
