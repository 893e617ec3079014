/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What goes wrong around the engines: lines, transfers, memory, helpers. The
 * control lines may lose frames only together with the line, as the link's
 * contract says; the data lines do what the fake transport can be told to do.
 */
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/loop/offload.h"
#include "tests/sim/sim.h"

static struct transport *data_of(struct sim *sim, unsigned int place)
{
	return sim_kvd(sim, place)->transports[0];
}

static const char *endpoint_of(const struct sim *sim, unsigned int place)
{
	return sim->c.nodes[sim->at[place]].endpoint;
}

uint64_t sim_troubles(const struct sim *sim)
{
	return sim->troubles + fake_hub_stats(sim->c.bytes)->faults +
	       fake_hub_stats(sim->c.bytes)->lost + mem_hub_stats(sim->c.links)->lost;
}

static void hurt(struct sim *sim)
{
	sim->lines_hurt++;
	sim->trouble_ns = UINT64_MAX;
}

void sim_heal(struct sim *sim)
{
	mem_fail_at(0);
	for (unsigned int a = 0; a < sim->script->places; a++) {
		for (unsigned int b = 0; b < a; b++) {
			mem_hub_partition(sim->c.links, endpoint_of(sim, a),
					  endpoint_of(sim, b), false);
			fake_link_down(data_of(sim, a), data_of(sim, b), false);
		}
		link_mem_freeze(sim_kvd(sim, a)->link, false);
		fake_node_freeze(data_of(sim, a), false);
		offload_hold(sim_kvd(sim, a)->offload, false);
	}
	mem_hub_set_queue_max(sim->c.links, 1000);
	sim_ask_heal(sim);
	if (sim->lines_hurt)
		sim->trouble_ns = loop_now_ns(sim->c.loop);
	sim->lines_hurt = 0;
}

/* ---- how the network is ---- */

static void knob(struct sim *sim, struct sim_draw *d)
{
	struct fake_profile *p = fake_hub_profile(sim->c.bytes);
	struct mem_path path = {.delay_ns = sim_below(d, 3) * SIM_MS / 2,
				.jitter_ns = sim_below(d, 5) * SIM_MS};
	bool calm = sim->script->calm;

	switch (sim_below(d, calm ? 12 : 19)) {
	case 0:
	case 1:
		mem_hub_set_default(sim->c.links, &path);
		break;
	case 2:
	case 3:
		p->delay_max_ns = (1 + sim_below(d, 400)) * SIM_MS / 20;
		break;
	case 4:
		p->done_max_ns = sim_below(d, 20) * SIM_MS;
		break;
	case 5:
		p->key_ns = sim_below(d, 20) * SIM_MS;
		break;
	case 6:
		p->slice_bytes = 32u << sim_below(d, 7);
		break;
	case 7:
		p->window = 1 + sim_below(d, 16);
		break;
	case 8:
		p->reorder = true;
		break;
	case 9:
		p->check = true;
		break;
	case 10:
		p->need_keys = true;
		break;
	case 11:
		p->discard = true;
		break;
	case 12:
		p->refuse_pm = sim_below(d, 100);
		break;
	case 13:
		p->nomem_pm = sim_below(d, 100);
		break;
	case 14:
		p->error_pm = sim_below(d, 150);
		break;
	case 15:
		p->stuck_pm = sim_below(d, 150);
		break;
	case 16:
		p->slow_pm = sim_below(d, 200);
		break;
	case 17:
		p->late_pm = sim_below(d, 200);
		break;
	default:
		path.break_ppm = sim_below(d, 3000);
		mem_hub_set_default(sim->c.links, &path);
		sim->trouble_ns = UINT64_MAX; /* from now on, until healed */
		sim->lines_hurt++;
		break;
	}
}

static void rule(struct sim *sim, struct sim_draw *d, unsigned int a, unsigned int b)
{
	static const enum fake_fault faults[] = {
		FAKE_REFUSE, FAKE_NOMEM, FAKE_NOMEM_THERE, FAKE_NOMEM_KEY,
		FAKE_SLOW,   FAKE_ERROR, FAKE_STUCK,	   FAKE_SLOW,
		FAKE_LATE,   FAKE_CUT,	 FAKE_ERROR,	   FAKE_STUCK,
	};
	struct fake_rule rule = {.fault = faults[sim_below(d, ARRAY_LEN(faults))],
				 .from = sim_chance(d, 50) ? data_of(sim, a) : NULL,
				 .to = sim_chance(d, 50) ? data_of(sim, b) : NULL,
				 .skip = sim_below(d, 3),
				 .times = 1,
				 .at_bytes = sim_below(d, 1200)};

	if (fake_script(sim->c.bytes, &rule) < 0)
		fake_script_clear(sim->c.bytes);
}

void sim_trouble(struct sim *sim, const struct sim_event *event)
{
	struct sim_draw d = {event->draw ^ 0x77};
	unsigned int a = sim_below(&d, sim->script->places);
	unsigned int b = sim_below(&d, sim->script->places);

	if (event->kind > SIM_KNOB) {
		sim->troubles += sim_ask_act(sim, event);
		return;
	}
	switch (event->kind) {
	case SIM_KNOB:
		knob(sim, &d);
		return;
	case SIM_HEAL:
		sim_heal(sim);
		return;
	case SIM_GO:
		offload_hold(sim_kvd(sim, a)->offload, false);
		return;
	case SIM_HOLD:
		offload_hold(sim_kvd(sim, a)->offload, true);
		hurt(sim); /* registrations, and so peers, wait for helpers */
		break;
	case SIM_BREAK:
		if (a != b)
			mem_hub_break(sim->c.links, endpoint_of(sim, a),
				      endpoint_of(sim, b));
		sim->trouble_ns = sim->lines_hurt ? UINT64_MAX : loop_now_ns(sim->c.loop);
		break;
	case SIM_PARTITION:
		if (a == b)
			return;
		mem_hub_partition(sim->c.links, endpoint_of(sim, a), endpoint_of(sim, b),
				  true);
		hurt(sim);
		break;
	case SIM_CUT:
		if (a != b)
			fake_link_cut(data_of(sim, a), data_of(sim, b));
		sim->trouble_ns = sim->lines_hurt ? UINT64_MAX : loop_now_ns(sim->c.loop);
		break;
	case SIM_DOWN:
		if (a == b)
			return;
		fake_link_down(data_of(sim, a), data_of(sim, b), true);
		hurt(sim);
		break;
	case SIM_MUTE:
		link_mem_freeze(sim_kvd(sim, a)->link, true);
		fake_node_freeze(data_of(sim, a), true);
		hurt(sim);
		break;
	case SIM_RULE:
		rule(sim, &d, a, b);
		break;
	case SIM_MEMORY:
		mem_fail_at(1 + sim_below(&d, 200));
		break;
	case SIM_QUEUE:
		mem_hub_set_queue_max(sim->c.links, 1 + sim_below(&d, 12));
		hurt(sim);
		break;
	case SIM_REPLAY:
		if (!sim_past_replay(sim, &d))
			return;
		break;
	case SIM_LIE: {
		struct sim_request *req = sim_past_lie(sim, &d);

		if (!req)
			return;
		req->lied = true;
		break;
	}
	default:
		return;
	}
	sim->troubles++;
}
