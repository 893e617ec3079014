/* SPDX-License-Identifier: Apache-2.0 */
/* In place of attend.c, where the module attend is left out: nobody asks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "tests/sim/sim.h"

const bool sim_asks_built = false;

void sim_ask_begin(struct sim *sim)
{
	(void)sim;
}

bool sim_ask_act(struct sim *sim, const struct sim_event *event)
{
	(void)sim;
	(void)event;
	return false;
}

int sim_ask_message(struct sim *sim, struct kvd *kvd, struct remote *remote,
		    const struct wire_header *h, struct cursor *body)
{
	(void)sim;
	(void)kvd;
	(void)remote;
	(void)body;
	fail_msg("a message of type %u, which no daemon here sends", h->type);
	return 0;
}

void sim_ask_heal(struct sim *sim)
{
	(void)sim;
}

void sim_ask_place_dies(struct sim *sim, unsigned int place)
{
	(void)sim;
	(void)place;
}

void sim_ask_place_comes(struct sim *sim, unsigned int place)
{
	(void)sim;
	(void)place;
}

void sim_ask_observe(struct sim *sim)
{
	(void)sim;
}

void sim_ask_check_memory(struct sim *sim)
{
	(void)sim;
}

void sim_ask_check_ended(struct sim *sim)
{
	(void)sim;
}

void sim_ask_leave(struct sim *sim)
{
	(void)sim;
}

void sim_ask_end(struct sim *sim)
{
	(void)sim;
}

void sim_ask_bury(struct sim *sim)
{
	(void)sim;
}
