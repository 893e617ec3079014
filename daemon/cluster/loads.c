/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A session's own numbers (rooms, their bytes and failures) are counted by its pools; the
 * queues of connections to peers are the daemon's, which serves one.
 *
 * Loads of all sessions together are published at the rate of one: they share one budget.
 * A load is published at each place of its session. The first session changes with each
 * scan.
 */
#include "daemon/cluster/loads.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/groups.h"
#include "daemon/cluster/load.h"
#include "daemon/handshake/handshake.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"

#define LOADS_EVERY_NS LOOP_NS_PER_S

/* A session with places. */
struct loads_of {
	struct list link;
	uint64_t session, seq;
	bool seen; /* in this scan */
	struct load_meter meter;
	struct load_gate gate;
};

struct loads {
	struct kvd *kvd;
	struct loop_timer timer;
	struct list of;		 /* struct loads_of.link */
	struct idmap by_session; /* of them */
	struct load_budget budget;
	uint64_t peer_bytes[METRIC_PEERS_MAX + 1]; /* at the last scan, by figures */
	uint64_t peers_at_ns;
	struct load_peer peers[LOAD_PEERS_MAX];
	unsigned int peer_count;
};

/* ---- peers ---- */

/* Among those with most, in order. */
static void loads_peer_add(struct loads *loads, const struct remote *remote, double gbps)
{
	unsigned int at = loads->peer_count;

	while (at > 0 && loads->peers[at - 1].gbps < gbps)
		at--;
	if (at == LOAD_PEERS_MAX)
		return;
	if (loads->peer_count < LOAD_PEERS_MAX)
		loads->peer_count++;
	memmove(&loads->peers[at + 1], &loads->peers[at],
		(loads->peer_count - at - 1) * sizeof(loads->peers[0]));
	loads->peers[at].gbps = gbps;
	snprintf(loads->peers[at].instance, sizeof(loads->peers[at].instance), "%.16s",
		 remote->peer->instance_text);
}

/* Figures of peers past the 64th are not attributed. */
static void loads_peers_look(struct loads *loads, uint64_t now_ns)
{
	double seconds = (double)(now_ns - loads->peers_at_ns) / 1e9;
	const struct metrics *m = &loads->kvd->metrics;
	const struct remote *remote;

	loads->peer_count = 0;
	list_foreach(remote, handshake_remotes(loads->kvd->handshake), link) {
		uint64_t bytes, *last;

		if (!remote->ready || remote->figures >= METRIC_PEER_OTHER)
			continue;
		bytes = metrics_get(m,
				    METRIC_AT(PEER_BYTES, remote->figures, METRIC_IN)) +
			metrics_get(m,
				    METRIC_AT(PEER_BYTES, remote->figures, METRIC_OUT));
		last = &loads->peer_bytes[remote->figures];
		if (bytes > *last && loads->peers_at_ns)
			loads_peer_add(loads, remote,
				       (double)(bytes - *last) / seconds / 1e9);
		*last = bytes;
	}
	loads->peers_at_ns = now_ns;
}

/* ---- sessions ---- */

static void loads_count(const struct loads *loads, const struct session *session,
			struct load_counts *counts_p)
{
	struct load_counts counts = {0};
	struct idmap_cursor at;

	idmap_foreach(&session->pools, at) {
		const struct pool_work *work = &((const struct pool *)at.value)->work;

		counts.waiting += work->waiting;
		counts.running += work->running;
		counts.moved += work->moved;
		counts.failed += work->failed;
		counts.firsts += work->firsts;
		counts.first_ns += work->first_ns;
	}
	handshake_bytes(loads->kvd->handshake, &counts.queued, &counts.moving);
	*counts_p = counts;
}

void loads_session_init(struct session *session)
{
	struct loads_session *said = session->part[MODULE_CLUSTER];

	said->load = ENGINE_LOAD_NONE;
}

void loads_report(struct session *session, const struct engine_load *load)
{
	struct loads_session *said = session->part[MODULE_CLUSTER];

	said->load = *load;
	said->at_ns = loop_now_ns(session->kvd->loop);
}

static void loads_tell(struct loads *loads, struct loads_of *of,
		       const struct session *session, uint64_t now_ns)
{
	const struct loads_session *said = session->part[MODULE_CLUSTER];
	bool old = now_ns - said->at_ns > ENGINE_LOAD_NS;
	struct load load = {.engine = old ? ENGINE_LOAD_NONE : said->load,
			    .peer_count = loads->peer_count};
	struct load_counts counts;
	struct text text = {0};

	memcpy(load.peers, loads->peers, sizeof(load.peers));
	loads_count(loads, session, &counts);
	load_meter_take(&of->meter, &counts, now_ns, &load);
	if (!load_gate_pass(&of->gate, &loads->budget, &load))
		return;
	load_text(&load, ++of->seq, &text);
	if (text.failed ||
	    groups_load(groups_of(loads->kvd), of->session, text.data) < 0) {
		log_warn("cluster", session->client, "publishing its load failed", "%s",
			 text.failed ? "out of memory" : err_last()->text);
		err_clear();
		of->gate.told = false; /* again in the next scan */
	}
	text_fini(&text);
}

static void loads_see(void *arg, uint64_t id)
{
	struct loads *loads = arg;
	struct loads_of *of = idmap_get(&loads->by_session, id);

	if (id == 0)
		return;
	if (!of) {
		of = mem_zalloc(sizeof(*of));
		if (!of || idmap_put(&loads->by_session, id, of) < 0) {
			mem_free(of);
			err_clear(); /* retried in the next scan */
			return;
		}
		of->session = id;
		list_push_back(&loads->of, &of->link);
	}
	of->seen = true;
}

static void loads_forget(struct loads *loads, struct loads_of *of)
{
	idmap_remove(&loads->by_session, of->session);
	list_remove(&of->link);
	mem_free(of);
}

static void loads_on_timer(struct loop_timer *timer)
{
	struct loads *loads = container_of(timer, struct loads, timer);
	uint64_t now_ns = loop_now_ns(loads->kvd->loop);
	struct loads_of *of;

	list_foreach(of, &loads->of, link)
		of->seen = false;
	groups_each_session(groups_of(loads->kvd), loads_see, loads);
	load_budget_fill(&loads->budget, now_ns);
	loads_peers_look(loads, now_ns);
	list_foreach_safe(of, &loads->of, link) {
		const struct session *session = session_by_id(loads->kvd, of->session);

		if (of->seen && session)
			loads_tell(loads, of, session, now_ns);
		else
			loads_forget(loads, of);
	}
	if (list_empty(&loads->of))
		return;
	of = list_first(&loads->of, struct loads_of, link);
	list_remove(&of->link);
	list_push_back(&loads->of, &of->link);
	loop_timer_start(timer, LOADS_EVERY_NS);
}

/* ---- life ---- */

int loads_new(struct kvd *kvd, struct loads **loads_p)
{
	struct loads *loads = mem_zalloc(sizeof(*loads));

	if (!loads)
		return err_pass(-ENOMEM);
	loads->kvd = kvd;
	list_init(&loads->of);
	loop_timer_init(&loads->timer, kvd->loop, loads_on_timer);
	*loads_p = loads;
	return 0;
}

void loads_begin(struct loads *loads, uint64_t session)
{
	struct loads_of *of = idmap_get(&loads->by_session, session);

	if (of)
		of->gate.told = false;
	if (!loop_timer_running(&loads->timer))
		loop_timer_start(&loads->timer, LOADS_EVERY_NS);
}

void loads_free(struct loads *loads)
{
	struct loads_of *of;

	if (!loads)
		return;
	loop_timer_stop(&loads->timer);
	list_foreach_safe(of, &loads->of, link)
		loads_forget(loads, of);
	idmap_fini(&loads->by_session);
	mem_free(loads);
}
