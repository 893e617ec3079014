/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Levels, and counts that others keep as numbers of their own, are taken when somebody
 * looks: at a scrape, at `stats`. So who changes them pays nothing for it, and a figure
 * is of that moment.
 */
#include "daemon/metrics/figures.h"

#include <stdio.h>
#include <string.h>

#include "daemon/attend/attend.h"
#include "daemon/cost/live.h"
#include "daemon/config/config.h"
#include "daemon/handshake/handshake.h"
#include "daemon/loop/loop.h"
#include "daemon/peer/peer.h"
#include "daemon/room/rooms.h"
#include "daemon/store/store.h"
#include "daemon/transport/transport.h"

/* ---- levels that nobody counts as they change ---- */

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

static void take_homes(struct metrics *m, const struct store_figures *f)
{
	metrics_set(m, METRIC_STORE_HOMES, f->homes.homes);
	metrics_set(m, METRIC_STORE_HOMES_UP, f->homes.up);
	metrics_set(m, METRIC_STORE_HOME_TOLD, f->homes.notes);
	metrics_set(m, METRIC_STORE_HOME_RESYNCS, f->homes.resyncs);
	metrics_set(m, METRIC_STORE_HOME_ASKS, f->homes.asks);
	metrics_set(m, METRIC_STORE_HOME_LATE, f->homes.late);
	metrics_set(m, METRIC_STORE_HOME_DIALS, f->homes.dials);
	metrics_set(m, METRIC_STORE_HOME_UNDIALLED, f->homes.dials_refused);
	metrics_set(m, METRIC_STORE_HOME_HOLDINGS, f->home.used);
	metrics_set(m, METRIC_STORE_HOME_HOLDERS, f->home.holders);
	metrics_set(m, METRIC_STORE_HOME_NOTES, f->home.notes);
	metrics_set(m, METRIC_STORE_HOME_REFUSED, f->home.refused);
	metrics_set(m, METRIC_STORE_HOME_UNKNOWN, f->home.unknown);
	metrics_set(m, METRIC_STORE_HOME_FINDS, f->home.finds);
	metrics_set(m, METRIC_STORE_HOME_AGAIN, f->home.again);
}

static void take_store(struct kvd *kvd)
{
	struct metrics *m = &kvd->metrics;
	struct store_figures f;

	store_figures(store_of(kvd), &f);
	metrics_set(m, METRIC_STORE_MEMORY, f.ready ? f.memory_bytes : 0);
	metrics_set(m, METRIC_STORE_FREE, f.slabs_free * f.slab_bytes);
	metrics_set(m, METRIC_STORE_CHUNKS, f.chunks);
	metrics_set(m, METRIC_STORE_PUBLISHED, f.published);
	metrics_set(m, METRIC_STORE_HOLDS, f.holds);
	metrics_set(m, METRIC_STORE_MOVES, f.moves);
	metrics_set(m, METRIC_STORE_FOUND, f.found);
	metrics_set(m, METRIC_STORE_MISSED, f.missed);
	metrics_set(m, METRIC_STORE_EVICTED, f.evicted);
	metrics_set(m, METRIC_STORE_SPACES, f.spaces);
	metrics_set(m, METRIC_STORE_SPACES_EVICTED, f.spaces_evicted);
	metrics_set(m, METRIC_STORE_PUT_BYTES, f.put_bytes);
	metrics_set(m, METRIC_STORE_FETCHED_BYTES, f.fetched_bytes);
	metrics_set(m, METRIC_STORE_FAR_FOUND, f.far.found);
	metrics_set(m, METRIC_STORE_FAR_BYTES, f.far.bytes);
	metrics_set(m, METRIC_STORE_FAR_RETRIES, f.far.retries);
	metrics_set(m, METRIC_STORE_FAR_HEDGES, f.far.hedges);
	metrics_set(m, METRIC_STORE_FAR_HEDGES_WON, f.far.hedges_won);
	metrics_set(m, METRIC_STORE_FAR_LEFT_OUT, f.far.left_out);
	metrics_set(m, METRIC_STORE_LENDS, f.far.lends);
	metrics_set(m, METRIC_STORE_LENT, f.far.lent);
	take_homes(m, &f);
	metrics_set(m, METRIC_STORE_FILE, f.files.bytes);
	metrics_set(m, METRIC_STORE_FILE_FREE, f.files.free_bytes);
	metrics_set(m, METRIC_STORE_FILE_DISK_FREE, f.files.disk_free_bytes);
	metrics_set(m, METRIC_STORE_FILE_STANDS, f.files.stands);
	metrics_set(m, METRIC_STORE_FILE_FULL, f.files.full);
	metrics_set(m, METRIC_STORE_FILE_WRITTEN, f.files.written_bytes);
	metrics_set(m, METRIC_STORE_FILE_READ, f.files.read_bytes);
	metrics_set(m, METRIC_STORE_FILE_EVICTED, f.files.evicted);
	metrics_set(m, METRIC_STORE_FILE_BAD, f.files.bad);
	metrics_set(m, METRIC_STORE_FILE_FAULTS, f.files.faults);
	metrics_set(m, METRIC_STORE_FILE_READONLY, f.files.readonly);
}

static void take_attends(struct kvd *kvd)
{
	struct metrics *m = &kvd->metrics;
	struct attend_figures f;

	if (!attends_of(kvd))
		return;
	attends_figures(attends_of(kvd), &f);
	metrics_set(m, METRIC_ATTEND_POSTS, f.posts);
	metrics_set(m, METRIC_ATTEND_ROWS, f.rows);
	metrics_set(m, METRIC_ATTEND_FAILED, f.failed);
	metrics_set(m, METRIC_ATTEND_LIVE, f.live);
	metrics_set(m, METRIC_ATTEND_SERVED, f.served);
	metrics_set(m, METRIC_ATTEND_SERVED_ROWS, f.served_rows);
	metrics_set(m, METRIC_ATTEND_REFUSED, f.refused);
	metrics_set(m, METRIC_ATTEND_BATCHES, f.batches);
	metrics_set(m, METRIC_ATTEND_SECONDS, f.attend_us * 1000);
	metrics_set(m, METRIC_ATTEND_WAITING, f.waiting);
	metrics_set(m, METRIC_ATTEND_THREADS, f.threads);
	metrics_set(m, METRIC_ATTEND_LOOKS, f.looks);
	metrics_set(m, METRIC_COST_CALIBRATIONS, f.calibrations);
	metrics_set(m, METRIC_COST_BYTES, f.calibration_bytes);
	metrics_set(m, METRIC_COST_STALE, f.stale);
	metrics_set(m, METRIC_COST_ECHOES, f.echoes);
	if (!store_costs(kvd))
		return;
	metrics_set(m, METRIC_COST_REUSED, cost_page_reused(live_page(store_costs(kvd))));
	metrics_set(m, METRIC_COST_REFUSED, live_refused(store_costs(kvd)));
}

/* Those that have figures of their own: of others there may be thousands. */
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
	take_store(kvd);
	take_attends(kvd);
	take_peers(kvd);
	take_daemon(kvd, f);
	for (unsigned int i = 0; i < METRIC_END; i++)
		copy->value[i] = metrics_get(m, i);
	memcpy(copy->histogram, m->histogram, sizeof(copy->histogram));
	memcpy(copy->peers, m->peers, sizeof(copy->peers));
	copy->peers_other = m->peers_other;
}
