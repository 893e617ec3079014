/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The decode side of a pull: request the offer of each source, cover the bound pages from
 * the sources' layouts, READ the bytes due from each, then send PULL_DONE: the read is
 * valid only if the answer confirms the lease epoch.
 *
 * A source with nothing due is sent PULL_DONE, too, so that it frees its pages.
 * Heartbeats extend the leases while the room lives.
 *
 * A room that is opened without pages requests the offers as well: the leases hold while
 * its engine allocates pages. It is WAITING when all offers have arrived, and reads when
 * pages are bound; binding none returns the offers.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/room/room_cover.h"
#include "daemon/room/room_mail.h"
#include "daemon/room/room_wire.h"
#include "daemon/session/session.h"

/* The lease of a peer is input: no heartbeat of microseconds, no wrap. */
#define HEARTBEAT_MIN_NS (10 * LOOP_NS_PER_MS)
#define LEASE_MAX_MS (UINT64_C(24) * 3600 * 1000)

static int room_pull_ask(struct party *party)
{
	struct room *room = party->room;
	struct wire_offer_query msg = {.room = party->room_there,
				       .pull_gen = room->gen,
				       .src_pool = party->pool->id,
				       .dst_pool = room->pool->id,
				       .receivers = room->receivers,
				       .named = party->named};

	room_names_tell(room->names, msg.request_id, msg.traceparent);
	memcpy(msg.ticket, room->admit.ticket, sizeof(msg.ticket));
	sm_move(&party->sm, PARTY_ASKED);
	handshake_announce(party->remote, room->pool);
	room_trace(room, TRACE_INFO_OUT, party, 0);
	return handshake_send_offer_query(party->remote, &msg);
}

static void start_beating(struct room *room);

/* All of its pages have been read; `maps` is taken. */
static int take_offer(struct party *party, const struct wire_offer *offer,
		      struct room_maps maps)
{
	int r = 0;

	if (party->due.theirs_json) {
		r = room_maps_parse(party->due.theirs_json, -1, party->pool->layout,
				    party->room->session->account, &party->theirs);
		if (r >= 0)
			r = room_maps_within(&party->theirs, &maps, party->pool->layout);
		room_maps_fini(&maps);
		if (r < 0)
			return err_prefix(r, "remote");
		cJSON_Delete(mem_steal(party->due.theirs_json));
		charge_less(&party->room->charge, party->due.json_bytes);
		party->due.json_bytes = 0;
	} else {
		party->theirs = maps;
	}
	party->gen = offer->offer_gen;
	party->due.lease_epoch = offer->lease_epoch;
	party->due.lease_ns =
		(offer->lease_ms < LEASE_MAX_MS ? offer->lease_ms : LEASE_MAX_MS) *
		LOOP_NS_PER_MS;
	sm_move(&party->sm, PARTY_ANSWERED);
	start_beating(
		party->room); /* the offers of others may take longer than its lease */
	room_trace(party->room, TRACE_ACK_IN, party, party->gen);
	room_kick(party->room);
	return 0;
}

/* The late half of pull_on_offer(). */
static void room_pull_on_pages(struct mail *mail, const struct err *why)
{
	if (why)
		room_fail(mail->room, why, NULL);
	else if (take_offer(mail->party, &mail->offer,
			    room_maps_steal(&mail->reader.maps)) < 0)
		room_fail_last(mail->room);
}

int pull_on_offer(struct room *room, struct party *party, const struct wire_offer *offer,
		  struct room_message *msg)
{
	struct room_maps maps;
	struct mail *mail;
	struct cursor in;
	int r;

	assert(room->role == ROOM_PULL && party->room == room);
	if (party_state(party) != PARTY_ASKED || !room_live(room))
		return 0; /* not requested, repeated, or too late */
	cursor_read(&in, offer->views.data, offer->views.len);
	r = mail_read(party, NULL, msg, &in, party->pool->layout, NULL, false,
		      room_pull_on_pages, &maps, &mail);
	if (r < 0)
		return err_prefix(r, "OFFER");
	if (r == 0)
		return err_pass(take_offer(party, offer, maps));
	sm_move(&party->sm, PARTY_READING);
	mail->offer = *offer;
	return 0;
}

static int room_pull_say_done(struct party *party, enum err_code code, const char *text)
{
	struct room *room = party->room;
	struct wire_pull_done msg = {.room = party->room_there,
				     .pull_gen = room->gen,
				     .offer_gen = party->gen,
				     .lease_epoch = party->due.lease_epoch,
				     .code = code};

	snprintf(msg.text, sizeof(msg.text), "%.300s", text);
	if (code == ERR_OK)
		sm_move(&party->sm, PARTY_CLOSING);
	room_trace(room, TRACE_DONE_OUT, party, party->gen);
	return handshake_send_pull_done(party->remote, &msg);
}

/* ---- heartbeats ---- */

/* Its pages are held for this room. */
static bool awaits_end(const struct party *party)
{
	return party_state(party) == PARTY_ANSWERED ||
	       party_state(party) == PARTY_CLOSING;
}

static void heartbeat(struct room *room)
{
	struct party *party;

	list_foreach(party, &room->parties, link) {
		struct wire_lease msg = {.room = party->room_there,
					 .pull_gen = room->gen,
					 .offer_gen = party->gen,
					 .lease_epoch = party->due.lease_epoch};

		if (!awaits_end(party) || party_lost(party))
			continue;
		if (handshake_send_lease(party->remote, &msg) < 0)
			err_clear();
	}
}

static void start_beating(struct room *room)
{
	const struct party *party;
	uint64_t shortest = UINT64_MAX;

	list_foreach(party, &room->parties, link) {
		if (awaits_end(party) && party->due.lease_ns < shortest)
			shortest = party->due.lease_ns;
	}
	loop_timer_start(&room->bind.heartbeat, shortest / 6 > HEARTBEAT_MIN_NS
							? shortest / 6
							: HEARTBEAT_MIN_NS);
}

static void pull_on_heartbeat(struct loop_timer *timer)
{
	struct room *room = container_of(timer, struct room, bind.heartbeat);

	assert(room->role == ROOM_PULL);
	if (!room_live(room))
		return;
	heartbeat(room);
	start_beating(room);
}

/* ---- reading ---- */

static void room_pull_on_read(struct sched_op *op)
{
	struct move *move = op->owner;
	struct room *room = move->room;
	struct party *party = move->party;

	if (op->xp.result >= 0 && room_live(room))
		move_done(move, &op->xp.used, &op->xp.way);
	move_end(move);
	rooms_catch_up(room);
	if (op->xp.result < 0) {
		room_fail_moving(room, party, &op->xp.err);
	} else if (room_live(room)) {
		party->due.got = move->plan->bytes;
		if (room_pull_say_done(party, ERR_OK, "") < 0)
			room_fail_last(room);
	}
}

/* Called where the plan is made, because page lists of a room take as long. */
static int room_pull_make_header(struct move *move)
{
	const struct room *room = move->room;
	const struct party *party = move->party;
	struct pull_header h = {.room = party->room_there,
				.offer_gen = party->gen,
				.pull_gen = room->gen,
				.src_pool = party->pool->id,
				.dst_pool = room->pool->id,
				.lease_epoch = party->due.lease_epoch,
				.digest = move->plan->digest,
				.bytes = move->plan->bytes};

	return pull_header_make(&h, party->wants, party->want_count, &party->theirs,
				&room->pages.maps, &move->header, &move->header_len);
}

static void room_pull_on_planned(struct move *move)
{
	const struct party *party = move->party;

	if (move->refused.code == ERR_OK && move->plan->bytes != party->due.expected)
		err_set(&move->refused, ERR_SHORT,
			"%.150s offers %llu of the %llu requested bytes",
			party->remote->label, (unsigned long long)move->plan->bytes,
			(unsigned long long)party->due.expected);
	if (move->refused.code == ERR_OK &&
	    move_post(move, XP_READ, room_pull_on_read) < 0)
		err_take(&move->refused);
	if (move->refused.code == ERR_OK)
		return;
	room_fail(move->room, &move->refused, NULL);
	move_end(move);
}

static bool room_pull_reads(const struct party *party)
{
	return !party->due.reads;
}

/* It takes half a turn, with a plan of few rows. */
static int room_pull_read(struct party *party)
{
	struct room *room = party->room;
	struct move *move;
	int r;

	party->due.reads = true;
	if (party->want_count == 0)
		return room_pull_say_done(party, ERR_OK, "");
	move = move_new(room, party);
	if (!move)
		return err_pass(-ENOMEM);
	r = move_pair(move, &party->theirs, &room->pages.maps);
	if (r < 0) {
		move_end(move);
		return err_pass(r);
	}
	move->encode = room_pull_make_header;
	move_plan(move, party->wants, party->want_count, room_pull_on_planned);
	return 0;
}

void pull_on_ack(struct room *room, struct party *party, const struct wire_pull_ack *ack)
{
	struct err why;

	assert(room->role == ROOM_PULL && party->room == room);
	room_trace(room, TRACE_LEASE_IN, party, party->gen);
	if (!room_live(room) || party_state(party) == PARTY_DONE)
		return;
	if (ack->code == ERR_OK && party_state(party) == PARTY_CLOSING) {
		sm_move(&party->sm, PARTY_DONE);
		room_cover_landed(party);
		room_kick(room);
		return;
	}
	party->due.got = 0; /* read bytes are discarded */
	if (ack->code == ERR_OK) {
		err_set(&why, ERR_PROTO, "%.100s: PULL_ACK before the end of the read",
			party->remote->label);
		room_fail(room, &why, NULL);
		return;
	}
	peer_report(party->remote->peer, ack->code, ack->text, &why);
	room_fail_remote(room, &why, NULL);
}

/* ---- steps ---- */

static bool all_offered(const struct room *room)
{
	const struct party *party;

	list_foreach(party, &room->parties, link) {
		if (party_state(party) < PARTY_ANSWERED)
			return false;
	}
	return true;
}

static int go_on(struct room *room)
{
	int r = room_parties_act(room, party_unasked, room_pull_ask);

	if (r || (!room_planned(room) && !all_offered(room)))
		return err_pass(r);
	if (sm_state(&room->sm) == ROOM_BOOT)
		room_move(room, ROOM_WAITING);
	if (!room_bound(room) || (!room_planned(room) && !room_await(room)))
		return 0;
	if (!room_planned(room)) {
		r = room_cover(room);
		if (r)
			return err_pass(r);
		room->pages.phase = PAGES_PLANNED;
		room_move(room, ROOM_MOVING);
	}
	return err_pass(room_parties_act(room, room_pull_reads, room_pull_read));
}

static void room_pull_step(struct room *room)
{
	if (!room_booted(room))
		return;
	if (go_on(room) < 0)
		room_fail_last(room);
	if (!room_live(room) || !room_planned(room) || !room_parties_done(room) ||
	    room->busy > 0)
		return;
	loop_timer_stop(&room->bind.heartbeat);
	room_move(room, ROOM_SUCCESS);
}

/* Notify the offers that this puller gives up (instead of an ABORT, which would end
 * the offer for the others). */
static void give_up(struct room *room, const struct err *why)
{
	struct party *party;

	list_foreach(party, &room->parties, link) {
		if (!awaits_end(party) || party_lost(party))
			continue;
		if (room_pull_say_done(party, why->code, why->text) < 0)
			err_clear();
	}
}

static void room_pull_stop(struct room *room, const struct err *why)
{
	loop_timer_stop(&room->bind.heartbeat);
	give_up(room, why);
	moves_stop(room, why);
}

static bool room_pull_without(struct party *party, const struct err *why)
{
	bool without = party_asked(party) ? party_state(party) == PARTY_DONE
					  : room_source_lost(party);

	(void)why;
	if (without)
		mails_drop(party->room, party);
	return without;
}

static void room_pull_init(struct room *room)
{
	bind_init(room);
	loop_timer_init(&room->bind.heartbeat, room->session->kvd->loop,
			pull_on_heartbeat);
}

const struct role_ops room_pull_ops = {
	.init = room_pull_init,
	.fini = bind_fini,
	.party_fini = bind_party_fini,
	.free_ended = moves_free_ended,
	.step = room_pull_step,
	.stop = room_pull_stop,
	.without = room_pull_without,
};
