/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A room waits for its next step's requirement: its own engine, a peer or the peer's
 * engine, or this daemon. Of several outstanding ones, the one that blocks the others is
 * reported: first a missing message or a word of an engine, then queued transfers, then
 * moving ones, then chunks that were not sent yet.
 *
 * The two sides of a room complement each other: where one waits for an engine of the
 * peer, the other side names that engine as "engine", or the room as not opened.
 */
#include "daemon/room/room_waits.h"

#include <stdio.h>

#include "daemon/config/config.h"
#include "daemon/base/context.h"
#include "daemon/room/room_mail.h"
#include "daemon/room/room_source.h"
#include "daemon/session/session.h"

static void by_engine(const struct room *room, struct room_waits *w)
{
	snprintf(w->who, sizeof(w->who), "engine '%.63s'", room->session->client);
}

static void by_peer(const struct party *party, struct room_waits *w)
{
	room_peer_name(party->remote, w->who, sizeof(w->who));
}

static void by_daemon(struct room_waits *w, const char *what)
{
	snprintf(w->who, sizeof(w->who), "this daemon");
	snprintf(w->what, sizeof(w->what), "this daemon %s", what);
}

static const char *pool_words(const struct party *party, char *buf, size_t size)
{
	if (party->pool_name[0])
		snprintf(buf, size, "pool '%.63s'", party->pool_name);
	else
		snprintf(buf, size, "a pool");
	return buf;
}

/* ---- until the sources are there ---- */

static bool source_waits(const struct party *party, struct room_waits *w)
{
	const struct remote *remote = party->remote;
	char pool[80], why[ERR_TEXT_MAX];

	by_peer(party, w);
	if (!remote->ready)
		snprintf(w->what, sizeof(w->what), "%.90s: %.180s", w->who,
			 handshake_why_not(remote, why));
	else if (!party->pool)
		snprintf(w->what, sizeof(w->what), "an engine of %.90s to register %s",
			 w->who, pool_words(party, pool, sizeof(pool)));
	else if (!party->pool->ready)
		snprintf(w->what, sizeof(w->what), "%.90s: the keys of %s", w->who,
			 pool_words(party, pool, sizeof(pool)));
	else
		return false;
	return true;
}

/* ---- chunks ---- */

/* The first tokens of [*begin_p, *end_p) that no chunk contained. */
static bool missing_of(const struct coverage_set *set, uint64_t *begin_p, uint64_t *end_p)
{
	uint64_t at = *begin_p;

	for (uint32_t i = 0; i < set->count; i++) {
		if (set->at[i].end <= at)
			continue;
		if (set->at[i].begin > at) {
			if (set->at[i].begin < *end_p)
				*end_p = set->at[i].begin;
			break;
		}
		at = set->at[i].end;
	}
	*begin_p = at;
	return at < *end_p;
}

static void chunk_waits(const struct party *party, struct room_waits *w)
{
	const struct room *room = party->room;

	by_peer(party, w);
	snprintf(w->what, sizeof(w->what), "the next chunk of %.90s", w->who);
	for (size_t i = 0; party->due.coverage && i < room->pages.maps.count; i++) {
		const struct room_map *map = &room->pages.maps.maps[i];
		const struct coverage *cov = &party->due.coverage[i];

		for (uint32_t s = 0; s < (cov->split ? cov->layer_count : 1u); s++) {
			uint64_t begin = map->token_begin, end = map->token_end;

			if (cov->layer_count == 0 ||
			    !missing_of(&cov->sets[s], &begin, &end))
				continue;
			snprintf(w->what, sizeof(w->what),
				 "the next chunk of %.90s (lacks tokens %llu-%llu of "
				 "%llu-%llu, view %.32s)",
				 w->who, (unsigned long long)begin,
				 (unsigned long long)end,
				 (unsigned long long)map->token_begin,
				 (unsigned long long)map->token_end, map->view);
			return;
		}
	}
}

static void source_part_waits(const struct room *room, struct room_waits *w)
{
	const struct party *party;
	char pool[80];

	by_daemon(w, "to schedule the next step");
	list_foreach(party, &room->parties, link) {
		if (party_state(party) >= PARTY_ANSWERED || party->gen)
			continue;
		by_peer(party, w);
		if (!party_asked(party) || mail_telling(party))
			by_daemon(w, "to query its sources");
		else if (party_state(party) == PARTY_READING)
			by_daemon(w, "to read the offer's pages");
		else
			snprintf(w->what, sizeof(w->what),
				 "an engine of %.90s (%s) to %s room %llu", w->who,
				 pool_words(party, pool, sizeof(pool)),
				 room->role == ROOM_PULL ? "offer" : "open",
				 (unsigned long long)party->room_there);
		return;
	}
	list_foreach(party, &room->parties, link) {
		if (party_done(party) ||
		    (room->role == ROOM_RECV && party->due.got == party->due.expected))
			continue;
		if (room->role == ROOM_RECV) {
			chunk_waits(party, w);
			return;
		}
		if (party_state(party) != PARTY_CLOSING)
			continue;
		by_peer(party, w);
		snprintf(w->what, sizeof(w->what), "%.90s to confirm the lease", w->who);
		return;
	}
}

static void boot_waits(const struct room *room, struct room_waits *w)
{
	const struct party *party;

	by_daemon(w, "to schedule the next step");
	if (room->role == ROOM_SEND) {
		list_foreach(party, &room->parties, link) {
			if (party_state(party) == PARTY_READING) {
				by_daemon(w, "to read a receiver's pages");
				return;
			}
		}
		snprintf(w->who, sizeof(w->who), "a receiver");
		snprintf(w->what, sizeof(w->what),
			 "a receiver to bind its pages (%u of %u)", room->party_count,
			 room->receivers ? room->receivers : 1);
		return;
	}
	if (!list_empty(&room->bind.sources)) {
		snprintf(w->who, sizeof(w->who), "the directory");
		room_sources_text(room, w->what, sizeof(w->what));
		return;
	}
	list_foreach(party, &room->parties, link) {
		if (source_waits(party, w))
			return;
	}
	source_part_waits(room, w);
}

static void receiver_part_waits(const struct room *room, struct room_waits *w)
{
	const struct party *party;

	if (!room->send.last_given) {
		by_engine(room, w);
		snprintf(w->what, sizeof(w->what), "%.90s to send its first chunk",
			 w->who);
		if (room->send.chunks_given)
			snprintf(w->what, sizeof(w->what),
				 "%.90s to send its next chunk (has sent %u, the latest "
				 "is seq %llu)",
				 w->who, room->send.chunks_given,
				 (unsigned long long)room->send.latest_seq);
		return;
	}
	by_daemon(w, "to schedule the next step");
	list_foreach(party, &room->parties, link) {
		if (party_done(party))
			continue;
		by_peer(party, w);
		snprintf(w->what, sizeof(w->what), "%.90s to confirm completion", w->who);
		return;
	}
}

static void offer_waits(const struct room *room, struct room_waits *w)
{
	const struct party *party;

	snprintf(w->who, sizeof(w->who), "a puller");
	snprintf(w->what, sizeof(w->what), "a puller (%u of %u)", room->party_count,
		 room->receivers ? room->receivers : 1);
	list_foreach(party, &room->parties, link) {
		if (party_done(party) || room->party_count < room->receivers)
			continue;
		by_peer(party, w);
		snprintf(w->what, sizeof(w->what), "%.90s to read the pages", w->who);
	}
}

/* ---- in progress ---- */

/* Rank of a move as the reason why its room waits. */
static unsigned int weight(const struct move *move)
{
	switch (move_phase(move)) {
	case MOVE_WAITING:
		return 4;
	case MOVE_POSTED:
		return !move->in && sm_state(&move->op.sm) == SCHED_QUEUED ? 3 : 2;
	case MOVE_READING:
	case MOVE_PLANNING:
		return 1;
	default:
		return 0;
	}
}

static bool move_waits(const struct room *room, struct room_waits *w, bool *posted_p)
{
	const struct move *move, *first = NULL;

	list_foreach(move, &room->moves, link) {
		if (weight(move) > (first ? weight(first) : 0))
			first = move;
	}
	*posted_p = first && weight(first) == 2;
	if (!first)
		return false;
	by_peer(first->party, w);
	switch (weight(first)) {
	case 4:
		by_engine(room, w);
		snprintf(w->what, sizeof(w->what), "%.90s to reach its wait point",
			 w->who);
		break;
	case 3:
		snprintf(w->what, sizeof(w->what),
			 "a free transfer slot to %.90s (%u posted, %llu bytes)", w->who,
			 first->party->remote->line.ops_posted,
			 (unsigned long long)first->party->remote->line.bytes_posted);
		break;
	case 2:
		snprintf(w->what, sizeof(w->what), "bytes %s %.90s (%llu of %llu)",
			 room_sends(room) ? "to" : "from", w->who,
			 (unsigned long long)(first->in ? first->in->moved
							: first->op.xp.moved),
			 (unsigned long long)(first->plan ? first->plan->bytes : 0));
		break;
	default:
		by_daemon(w, "to plan a transfer");
	}
	return true;
}

static void fence_waits(const struct room *room, struct room_waits *w)
{
	const struct move *move;

	by_daemon(w, "to finish its operations");
	list_foreach(move, &room->moves, link) {
		if (move_phase(move) != MOVE_POSTED)
			continue;
		by_peer(move->party, w);
		snprintf(w->what, sizeof(w->what), "the fence of %.90s", w->who);
		return;
	}
}

/* ---- all of it ---- */

static void live_waits(const struct room *room, struct room_waits *w, bool *posted_p)
{
	if (move_waits(room, w, posted_p))
		return;
	if (room_awaits_point(room)) {
		by_engine(room, w);
		snprintf(w->what, sizeof(w->what), "%.90s to reach its wait point",
			 w->who);
	} else if (room->role == ROOM_OFFER) {
		offer_waits(room, w);
	} else if (room->role == ROOM_SEND) {
		receiver_part_waits(room, w);
	} else if (!room_bound(room)) {
		by_engine(room, w);
		snprintf(w->what, sizeof(w->what), "%.90s to bind pages", w->who);
	} else {
		source_part_waits(room, w);
	}
}

bool room_waits(const struct room *room, struct room_waits *w)
{
	const uint64_t *limits = room->limits_ns;
	bool posted = false;

	*w = (struct room_waits){.since_ns = room->state_ns};
	if (room_live(room) && room->moved_ns > room->state_ns)
		w->since_ns = room->moved_ns;
	switch ((enum room_state)sm_state(&room->sm)) {
	case ROOM_BOOT:
		boot_waits(room, w);
		w->until_ns = room->opened_ns + limits[LIMIT_BOOTSTRAP];
		break;
	case ROOM_WAITING:
		live_waits(room, w, &posted);
		w->until_ns = room->waiting_ns + limits[LIMIT_WAITING];
		break;
	case ROOM_MOVING:
		live_waits(room, w, &posted);
		w->until_ns =
			room->moved_ns + limits[posted ? LIMIT_STALL : LIMIT_WAITING];
		break;
	case ROOM_ABORTING:
		fence_waits(room, w);
		w->until_ns =
			room->state_ns + room->session->kvd->config->fence_timeout_ns;
		break;
	default:
		return false;
	}
	if (room->role == ROOM_OFFER && room_live(room))
		w->until_ns = room->offer.lease_end_ns;
	return true;
}
