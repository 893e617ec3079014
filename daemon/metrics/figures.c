/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gauges, and counters that other modules keep as their own numbers, are read on demand:
 * at a scrape or at `stats`. So changing them costs nothing extra, and all values are of
 * one moment.
 */
#include "daemon/metrics/figures.h"

#include <stdio.h>
#include <string.h>

#include "daemon/config/config.h"
#include "daemon/handshake/handshake.h"
#include "daemon/loop/loop.h"
#include "daemon/peer/peer.h"
#include "daemon/room/rooms.h"

/* ---- gauges without a counter of changes ---- */

static void take_loop(struct kvd *kvd)
{
	const struct loop_stats *stats = loop_stats(kvd->loop);
	struct metrics *m = &kvd->metrics;

	metrics_set(m, METRIC_LOOP_TURNS, stats->busy.count);
	metrics_set(m, METRIC_LOOP_SLOW_TURNS, stats->over);
	metrics_set(m, METRIC_LOOP_LONGEST, stats->busy.max);
	m->histogram[METRIC_LOOP_BUSY] = stats->busy;
	m->histogram[METRIC_LOOP_CPU] = stats->cpu;
	m->histogram[METRIC_LOOP_LATE] = stats->late;
}

static void take_rooms(struct kvd *kvd)
{
	uint64_t now_ns = loop_now_ns(kvd->loop), since_ns;

	for (unsigned int i = 0; i < ROOM_STATES; i++) {
		since_ns = rooms_oldest_ns(rooms_of(kvd), (enum room_state)i);
		metrics_set(&kvd->metrics, METRIC_AT(ROOM_OLDEST, i, 0),
			    since_ns ? now_ns - since_ns : 0);
	}
	metrics_set(&kvd->metrics, METRIC_ORPHANS, rooms_orphans(rooms_of(kvd)));
}

static void take_modules(struct kvd *kvd, struct figures *f)
{
	MODULES_EACH(kvd, m)
	{
		if (!m->figures)
			continue;
		memset(f->cells[m->id], 0, sizeof(f->cells[m->id]));
		if (kvd->part[m->id])
			m->figures(kvd->part[m->id], f->cells[m->id]);
	}
}

/* Those with their own counters: there may be thousands of others. */
static void take_peers(struct kvd *kvd)
{
	struct metrics *m = &kvd->metrics;

	for (unsigned int i = 0; kvd->peers && i <= PEER_DOWN; i++)
		metrics_set(m, METRIC_AT(PEERS, i, 0),
			    peers_in(kvd->peers, (enum peer_state)i));
	for (unsigned int i = 0; i <= METRIC_PEER_OTHER; i++) {
		const struct remote *remote =
			i < METRIC_PEERS_MAX ? m->peers[i].owner : NULL;
		uint64_t rtt_ns = remote ? remote->peer->rtt_ns : 0;

		metrics_set(m, METRIC_AT(PEER_RTT, i, 0),
			    rtt_ns ? rtt_ns : METRIC_ABSENT);
		metrics_set(m, METRIC_AT(PEER_INFLIGHT, i, 0),
			    remote ? remote->line.bytes_posted : METRIC_ABSENT);
	}
}

static void take_daemon(struct kvd *kvd, struct figures *f)
{
	struct metrics *m = &kvd->metrics;
	struct err why = {.code = ERR_OK};

	f->modules = kvd->modules;
	snprintf(f->name, sizeof(f->name), "%s", kvd->config->name);
	f->health = health_of(kvd, &why);
	snprintf(f->why, sizeof(f->why), "%s", why.code != ERR_OK ? why.text : "");
	for (unsigned int i = 0; i <= HEALTH_DEGRADED; i++)
		metrics_set(m, METRIC_AT(STATE, i, 0), i == f->health);
	metrics_set(m, METRIC_BUILD, 1);
	metrics_set(m, METRIC_ACCOUNT_LIMIT, kvd->accounts.limit);
	metrics_set(m, METRIC_DEAD_AFTER, kvd->config->dead_after_ns);
	metrics_set(m, METRIC_INSECURE, kvd->config->insecure);
	metrics_set(m, METRIC_PLAIN_PEERS,
		    kvd->handshake ? handshake_plain_peers(kvd->handshake) : 0);
	for (unsigned int i = 0; i < TRANSPORTS_MAX; i++)
		f->transports[i] =
			i < kvd->transport_count ? kvd->transports[i]->ops->name : NULL;
}

void figures_take(struct kvd *kvd, struct figures *f)
{
	struct metrics *m = &kvd->metrics, *copy = &f->metrics;

	take_loop(kvd);
	if (rooms_of(kvd))
		take_rooms(kvd);
	take_modules(kvd, f);
	take_peers(kvd);
	take_daemon(kvd, f);
	for (unsigned int i = 0; i < METRIC_END; i++)
		copy->value[i] = metrics_get(m, i);
	memcpy(copy->histogram, m->histogram, sizeof(copy->histogram));
	memcpy(copy->peers, m->peers, sizeof(copy->peers));
	copy->peers_other = m->peers_other;
}

void figures_families(const struct figures *f,
		      void (*each)(void *arg, const struct figures_family *family),
		      void *arg)
{
	struct figures_family family;

	for (size_t i = 0; i < METRIC_ROWS; i++) {
		bool counts = metric_rows[i].type != METRIC_HISTOGRAM;

		family = (struct figures_family){.row = &metric_rows[i],
						 .cells = counts ? f->metrics.value
								 : NULL};
		each(arg, &family);
	}
	MODULES_EACH(f, m)
	{
		for (unsigned int i = 0; i < m->metric_count; i++) {
			family = (struct figures_family){.row = &m->metrics[i],
							 .cells = f->cells[m->id] + i};
			each(arg, &family);
		}
	}
}
