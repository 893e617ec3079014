/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The prefill side of a pull: pages that may be read until the lease ends.
 *
 * The lease epoch makes a stale read fail: it is incremented when the lease ends or the
 * engine takes the pages back, and PULL_DONE (and every request) must name the current
 * one. A puller's heartbeats extend the lease. A puller that gives up reports that, and
 * the pages are free as if it had read them, except that the room does not succeed. One
 * that failed with a retryable error (a stall, no memory) may be replaced by another
 * attempt, until the lease ends.
 */
#include <assert.h>
#include <errno.h>

#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/room/room_mail.h"
#include "daemon/room/room_wire.h"
#include "daemon/session/session.h"

/* Time until a repeated query of an answered puller gets another answer: doubles each
 * time. */
#define OFFER_AGAIN_NS LOOP_NS_PER_S
#define OFFER_AGAIN_DOUBLINGS 20u

static int offer_put(const struct party *party, struct wire_blob views,
		     struct wire_blob wants, struct cursor *out)
{
	const struct room *room = party->room;
	struct wire_offer msg = {.room = party->room_there,
				 .pull_gen = party->gen,
				 .offer_gen = room->gen,
				 .src_pool = room->pool->id,
				 .lease_epoch = room->offer.lease_epoch,
				 .lease_ms = room->offer.lease_ns / LOOP_NS_PER_MS,
				 .views = views};

	(void)wants; /* the puller's own matter */
	return err_pass(wire_offer_put(out, &msg));
}

/* A query is small and its answer may be a MiB, so repeated queries must not produce
 * answers at the same rate. The line loses nothing, so one answer is enough; a puller
 * that repeats its query from time to time gets more, at growing intervals. */
static bool may_answer(const struct party *party)
{
	uint64_t now = loop_now_ns(party->room->session->kvd->loop);
	unsigned int doublings = party->offer.answers < OFFER_AGAIN_DOUBLINGS
					 ? party->offer.answers
					 : OFFER_AGAIN_DOUBLINGS;

	return party->offer.answers == 0 ||
	       now - party->offer.answered_ns >= OFFER_AGAIN_NS << (doublings - 1);
}

static int give_answer(struct party *party)
{
	if (sm_state(&party->room->sm) == ROOM_BOOT || party->room->pages.wait.region ||
	    mail_telling(party))
		return 0; /* its pages are not computed yet, or its offer is being written
			   */
	if (!may_answer(party)) {
		room_count(party->room, METRIC_ROOM_REFUSED, 1);
		return 0;
	}
	if (party_state(party) == PARTY_NEW)
		sm_move(&party->sm, PARTY_ANSWERED);
	party->offer.answers++;
	party->offer.answered_ns = loop_now_ns(party->room->session->kvd->loop);
	room_trace(party->room, TRACE_ACK_OUT, party, party->gen);
	return err_pass(mail_tell(party, WIRE_T_OFFER, offer_put));
}

/* The number of pullers: set by them, or by the engine. */
static int check_receivers(struct room *room, uint32_t told)
{
	if (room->offer.receivers_from_pullers && room->receivers == 0)
		room->receivers = told ? told : 1;
	if (told == 0 || told == room->receivers)
		return 0;
	return err_raise(
		ERR_INVAL, "receivers: offer %llu has %u, this puller expects %u%s",
		(unsigned long long)room->number, room->receivers, told,
		room->offer.receivers_from_pullers ? " (set by an earlier puller)" : "");
}

static uint32_t pullers(const struct room *room)
{
	const struct party *party;
	uint32_t n = 0;

	list_foreach(party, &room->parties, link)
		n += party_state(party) != PARTY_AWAY;
	return n;
}

int offer_on_query(struct room *room, struct remote *remote,
		   const struct wire_offer_query *query)
{
	struct remote_pool *pool = handshake_pool_by_id(remote, query->dst_pool);
	struct party *party = room_party_by_gen(room, remote, query->pull_gen);
	int r;

	assert(room->role == ROOM_OFFER);
	if (!room_live(room))
		return room->error->code != ERR_OK
			       ? err_reraise(room->error)
			       : err_raise(ERR_STATE, "offer %llu is complete",
					   (unsigned long long)room->number);
	if (!pool || !pool->layout)
		return err_raise(ERR_NOTFOUND, "OFFER_QUERY: no pool %llu of %s",
				 (unsigned long long)query->dst_pool, remote->label);
	r = layout_compatible(room->pool->layout, pool->layout, &layout_from_source);
	if (r < 0)
		return err_pass(r);
	r = check_receivers(room, query->receivers);
	if (r < 0)
		return err_pass(r);
	if (!party) {
		if (pullers(room) >= room->receivers)
			return err_raise(
				ERR_STATE, "offer %llu: already has all %u pullers",
				(unsigned long long)room->number, room->receivers);
		party = room_party_add(room, remote);
		if (!party)
			return err_pass(-ENOMEM);
		party_use_pool(party, pool);
		party->gen = query->pull_gen;
		party->room_there = query->room;
		room_names_hear(room, query->request_id, query->traceparent);
		room_trace(room, TRACE_INFO_IN, party, party->gen);
	}
	return err_pass(give_answer(party));
}

/* ---- requests ---- */

static int check_request(struct room *room, struct party *party,
			 const struct pull_header *h)
{
	if (!room_live(room))
		return room->error->code != ERR_OK
			       ? err_reraise(room->error)
			       : err_raise(ERR_LEASE, "offer %llu is complete",
					   (unsigned long long)room->number);
	if (h->lease_epoch != room->offer.lease_epoch)
		return err_raise(ERR_LEASE, "offer %llu: the lease expired",
				 (unsigned long long)room->number);
	if (!party || party_state(party) >= PARTY_DONE || !party->pool ||
	    party->pool->id != h->dst_pool || room->pool->id != h->src_pool)
		return err_raise(ERR_STATE, "offer %llu: no such puller",
				 (unsigned long long)room->number);
	return 0;
}

/* Refuse a request after a later check. */
static void room_offer_refuse(struct move *move, const struct err *why)
{
	room_count(move->room, METRIC_ROOM_REFUSED, 1);
	move_answer(move, NULL, why);
}

static void room_offer_on_planned(struct move *move)
{
	struct xp_sides sides;

	if (move->refused.code == ERR_OK &&
	    (plan_check(move->plan, move->digest, move->bytes, move->in->bytes) < 0 ||
	     move_sides(move, &sides) < 0))
		err_take(&move->refused);
	if (move->refused.code != ERR_OK)
		move_answer(move, NULL, &move->refused);
	else
		move_answer(move, &sides, NULL);
}

static void room_offer_on_served(struct inbound_owner *inbound, const struct err *err)
{
	struct move *move = container_of(inbound, struct move, inbound);
	const struct xp_inbound *in = move->in;
	struct room *room = move->room;

	if (!err) {
		room_count(room, METRIC_PULLS_SERVED, 1);
		move_done(move, in ? &in->used : NULL, in ? &in->way : NULL);
	} /* else the puller knows, and reports in PULL_DONE whether it gives up */
	move_end(move);
}

/* Both sides' pages are known. */
static int room_offer_serve(struct move *move)
{
	struct room *room = move->room;
	int r = move_pair(move, &move->maps, &move->maps_dst);

	if (r < 0)
		return err_pass(r);
	if (sm_state(&room->sm) == ROOM_WAITING)
		room_move(room, ROOM_MOVING);
	if (move->in->kind == XP_CHECK) { /* the bytes were read: was the read valid? */
		move_answer(move, &(struct xp_sides){0}, NULL);
		return 0;
	}
	move_plan(move, move->wants, move->want_count, room_offer_on_planned);
	return 0;
}

static void on_dst_pages(struct mail *mail, const struct err *why)
{
	struct move *move = mail->move;
	struct err e;

	if (!why) {
		move->maps_dst = room_maps_steal(&mail->reader.maps);
		if (room_offer_serve(move) >= 0)
			return;
		err_take(&e);
		why = &e;
	}
	room_offer_refuse(move, why);
}

/* The offered pages are known; the puller's follow in the header. */
static int read_dst(struct move *move, struct cursor *header)
{
	struct party *party = move->party;
	struct mail *mail;
	int r = mail_read(party, move, NULL, header, party->pool->layout, NULL, true,
			  on_dst_pages, &move->maps_dst, &mail);

	if (r < 0)
		return err_pass(r);
	return r == 0 ? err_pass(room_offer_serve(move)) : 0;
}

static void on_src_pages(struct mail *mail, const struct err *why)
{
	struct move *move = mail->move;
	struct err e;

	if (!why) {
		move->maps = room_maps_steal(&mail->reader.maps);
		if (read_dst(move, &mail->reader.in) >= 0)
			return;
		err_take(&e);
		why = &e;
	}
	room_offer_refuse(move, why);
}

static int room_offer_begin(struct room *room, struct party *party, struct xp_inbound *in,
			    const struct pull_header *h, struct cursor *header)
{
	struct move *move = move_new(room, party);
	struct mail *mail;
	int r;

	if (!move)
		return err_pass(-ENOMEM);
	move->digest = h->digest;
	move->bytes = h->bytes;
	move->in = in;
	move->inbound.on_done = room_offer_on_served;
	in->owner = &move->inbound;
	move_arrived(move);
	r = wants_get(header, &move->wants, &move->want_count);
	if (r >= 0)
		r = cover_check_wants(room->pool->layout, party->pool->layout,
				      move->wants, move->want_count);
	if (r >= 0)
		r = mail_read(party, move, NULL, header, room->pool->layout,
			      &room->pages.maps, false, on_src_pages, &move->maps, &mail);
	if (r == 0)
		r = read_dst(move, header);
	if (r >= 0)
		return 0;
	in->owner = NULL;
	move_end(move);
	return err_pass(r);
}

void offer_on_request(struct room *room, struct remote *remote, struct xp_inbound *in,
		      struct cursor *header)
{
	struct pull_header h;
	struct party *party = NULL;
	struct err why;
	int r = pull_header_get(header, &h);

	assert(room->role == ROOM_OFFER);
	if (r >= 0) {
		party = room_party_by_gen(room, remote, h.pull_gen);
		r = check_request(room, party, &h);
	}
	if (r >= 0)
		r = room_offer_begin(room, party, in, &h, header);
	if (r >= 0)
		return;
	err_take(&why);
	room_count(room, METRIC_ROOM_REFUSED, 1);
	remote->transport->ops->land(in, NULL, &why);
}

static bool party_moves(const struct party *party)
{
	const struct move *move;

	list_foreach(move, &party->room->moves, link) {
		if (move->party == party)
			return true;
	}
	list_foreach(move, &party->room->ended, link) {
		if (move->party == party)
			return true;
	}
	return false;
}

static void drop_away(struct room *room)
{
	struct party *party;

	list_foreach_safe(party, &room->parties, link) {
		if (party_state(party) == PARTY_AWAY && !party_moves(party))
			party_drop(party);
	}
}

/* No memory for its reason. */
static const struct err gave_up_unknown = {.code = ERR_ABORTED,
					   .text = "a puller aborted"};

/* The others continue; the room cannot succeed any more. It ends with the reason of
 * the first. */
static void gave_up(struct party *party, const struct err *why)
{
	struct room *room = party->room;

	if (party_state(party) >= PARTY_DONE)
		return;
	if (!room->offer.gave_up_why) {
		room->offer.gave_up_why = mem_dup(why, sizeof(*why));
		if (!room->offer.gave_up_why) {
			room->offer.gave_up_why = &gave_up_unknown;
			err_clear();
		}
	}
	sm_move(&party->sm, PARTY_DONE);
}

int offer_on_pull_done(struct room *room, struct party *party,
		       const struct wire_pull_done *done, enum err_code *answer_p)
{
	struct err why;
	bool again;

	assert(room->role == ROOM_OFFER);
	*answer_p = ERR_OK;
	if (!party || party_state(party) == PARTY_AWAY || !room_live(room) ||
	    done->lease_epoch != room->offer.lease_epoch) {
		*answer_p = ERR_LEASE;
		return 0;
	}
	room_trace(room, TRACE_DONE_IN, party, party->gen);
	room_trace(room, TRACE_LEASE_OUT, party, party->gen);
	if (done->code == ERR_OK) {
		if (party_state(party) != PARTY_DONE)
			sm_move(&party->sm, PARTY_DONE);
	} else {
		peer_report(party->remote->peer, done->code, done->text, &why);
		/* Retryable errors of the puller's daemon or a transport. A puller that
		 * was lost or aborted, that timed out or lost its connection does not
		 * retry. */
		again = why.code == ERR_BUSY || why.code == ERR_LIMIT ||
			why.code == ERR_NOMEM || why.code == ERR_STALL ||
			why.code == ERR_TRANSPORT || why.code == ERR_FENCE;
		if (party_state(party) == PARTY_DONE || !again) {
			gave_up(party, &why);
		} else { /* its requests are void; those being served end first */
			sm_move(&party->sm, PARTY_AWAY);
			party->gen = 0;
			room_count(room, METRIC_PULLS_TAKEN_BACK, 1);
		}
	}
	room_kick(room);
	return 0;
}

void offer_on_lease(struct room *room, struct party *party, uint64_t lease_epoch)
{
	uint64_t now = loop_now_ns(room->session->kvd->loop);

	assert(room->role == ROOM_OFFER);
	if (party && party_state(party) < PARTY_DONE && room_live(room) &&
	    lease_epoch == room->offer.lease_epoch)
		room->offer.lease_end_ns = now + room->offer.lease_ns;
}

int offer_extend(struct room *room, uint64_t lease_ns)
{
	assert(room->role == ROOM_OFFER);
	if (!room_live(room))
		return err_pass(room_refuse_over(room));
	room->offer.lease_ns = lease_ns;
	room->offer.lease_end_ns = loop_now_ns(room->session->kvd->loop) + lease_ns;
	room_clock_set(room);
	return 0;
}

static void offer_check_lease(struct room *room)
{
	const struct party *party;
	uint32_t done = 0;
	struct err why;

	assert(room->role == ROOM_OFFER && room_live(room));
	if (loop_now_ns(room->session->kvd->loop) < room->offer.lease_end_ns)
		return;
	room->offer.lease_epoch++; /* reads are invalid from here on */
	list_foreach(party, &room->parties, link)
		done += party_state(party) == PARTY_DONE;
	err_set(&why, ERR_LEASE,
		"offer %llu: the lease of %llu ms expired; of %u pullers %u joined and "
		"%u finished",
		(unsigned long long)room->number,
		(unsigned long long)(room->offer.lease_ns / LOOP_NS_PER_MS),
		room->receivers, room->party_count, done);
	room_count(room, METRIC_LEASES_EXPIRED, 1);
	room_fail(room, &why, NULL);
}

static int answer_all(struct room *room)
{
	struct party *party;

	list_foreach(party, &room->parties, link) {
		int r = party_state(party) == PARTY_NEW ? give_answer(party) : 0;

		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

static void room_offer_step(struct room *room)
{
	const struct party *party;
	uint32_t done = 0;

	if (sm_state(&room->sm) == ROOM_BOOT)
		room_move(room, ROOM_WAITING);
	if (room_live(room)) {
		(void)room_await(room); /* its answers follow when it has passed */
		if (answer_all(room) < 0)
			room_fail_last(room);
	}
	drop_away(room);
	if (!room_live(room))
		return;
	list_foreach(party, &room->parties, link)
		done += party_state(party) == PARTY_DONE;
	if (room->receivers == 0 || done < room->receivers || room->busy > 0)
		return;
	if (!room->offer.gave_up_why) {
		room_move(room, ROOM_SUCCESS);
		return;
	}
	room->offer.lease_epoch++;
	room_fail_remote(room, room->offer.gave_up_why, NULL);
}

static void room_offer_stop(struct room *room, const struct err *why)
{
	room->offer.lease_epoch++;
	moves_stop(room, why);
}

static bool room_offer_without(struct party *party, const struct err *why)
{
	gave_up(party, why);
	mails_drop(party->room, party);
	room_kick(party->room);
	return true;
}

static void room_offer_init(struct room *room)
{
	room->offer.lease_epoch = 1;
}

static void room_offer_fini(struct room *room)
{
	if (room->offer.gave_up_why != &gave_up_unknown)
		mem_free((void *)(uintptr_t)room->offer.gave_up_why);
	room_maps_fini(&room->pages.maps);
	wait_spec_fini(&room->pages.wait);
}

const struct role_ops room_offer_ops = {
	.init = room_offer_init,
	.fini = room_offer_fini,
	.free_ended = moves_free_ended,
	.step = room_offer_step,
	.on_clock = offer_check_lease,
	.stop = room_offer_stop,
	.without = room_offer_without,
};
