/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The receiver's side of a push. Its daemon decides everything: which source sends which
 * units (cover), the destination of each byte (its own plan from its own pages), and when
 * the room is complete.
 *
 * From every source a known number of bytes is due. Chunks reserve their tokens in the
 * source's coverage before any byte is written, so repeated tokens are refused (EDUP),
 * and the room is complete when the received bytes equal the due ones; fewer after the
 * source's last chunk is ESHORT.
 *
 * The fence is local: only this daemon's threads (or its NIC, behind revoke()) write
 * these pages. ABORTING ends when every inbound operation has ended.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/room/room_cover.h"
#include "daemon/room/room_mail.h"
#include "daemon/room/room_wire.h"
#include "daemon/room/rooms.h"
#include "daemon/session/session.h"

/* ---- bind, cover, TRANSFER_INFO ---- */

int recv_bind(struct room *room, struct room_maps *maps, struct wait_spec *wait)
{
	assert(room->role == ROOM_RECV || room->role == ROOM_PULL);
	if (!room_live(room))
		return err_pass(room_refuse_over(room));
	if (room_bound(room))
		return err_raise(ERR_STATE, "room %llu is bound already",
				 (unsigned long long)room->number);
	room_bind_pages(room, maps, wait);
	room_trace(room, TRACE_BOUND, NULL, 0);
	room_kick(room);
	return 0;
}

static int info_put(const struct party *party, struct wire_blob views,
		    struct wire_blob wants, struct cursor *out)
{
	const struct room *room = party->room;
	struct wire_transfer_info msg = {.room = party->room_there,
					 .recv_gen = room->gen,
					 .src_pool = party->pool->id,
					 .dst_pool = room->pool->id,
					 .receivers = room->receivers,
					 .named = party->named,
					 .views = views,
					 .wants = wants};

	room_names_tell(room->names, msg.request_id, msg.traceparent);
	memcpy(msg.ticket, room->admit.ticket, sizeof(msg.ticket));
	return err_pass(wire_transfer_info_put(out, &msg));
}

/* Send a source its part: a message of many pages takes a turn. */
static int room_recv_ask(struct party *party)
{
	sm_move(&party->sm, PARTY_ASKED);
	handshake_announce(party->remote, party->room->pool);
	room_trace(party->room, TRACE_INFO_OUT, party, party->gen);
	return err_pass(mail_tell(party, WIRE_T_TRANSFER_INFO, info_put));
}

static int plan_room(struct room *room)
{
	int r = room_cover(room);

	if (r)
		return err_pass(r);
	room->pages.phase = PAGES_PLANNED;
	room_progress(room);
	return 0;
}

/* ---- chunks ---- */

static void release_tokens(struct move *move, size_t pairs)
{
	struct room *room = move->room;

	for (size_t i = 0; i < pairs; i++) {
		const struct plan_map *pair = &move->pairs[i];
		const struct room_map *map =
			room_maps_find(&room->pages.maps, pair->view);

		if (coverage_remove(
			    &move->party->due.coverage[map - room->pages.maps.maps],
			    pair->layers, pair->token_begin, pair->token_end) < 0)
			err_clear(); /* the room is failing: it reports fewer pages */
	}
	move->reserved = false;
}

static int reserve_tokens(struct move *move)
{
	struct room *room = move->room;

	for (size_t i = 0; i < move->pair_count; i++) {
		const struct plan_map *pair = &move->pairs[i];
		const struct room_map *map =
			room_maps_find(&room->pages.maps, pair->view);
		int r = coverage_add(
			&move->party->due.coverage[map - room->pages.maps.maps],
			pair->layers, pair->token_begin, pair->token_end);

		if (r < 0) {
			release_tokens(move, i);
			return err_prefix(r, "chunk %llu view %s",
					  (unsigned long long)move->seq, pair->view);
		}
	}
	move->reserved = true;
	return 0;
}

static void room_recv_land(struct move *move)
{
	struct xp_sides sides;
	struct err why;

	if (move_sides(move, &sides) < 0) {
		err_take(&why);
		room_fail(move->room, &why, NULL);
		move_answer(move, NULL, &why);
		return;
	}
	if (!move->plan->bytes)
		sides.plan = NULL;
	move_answer(move, &sides, NULL);
}

static int check_plan(const struct move *move)
{
	int r = plan_check(move->plan, move->digest, move->bytes, move->in->bytes);

	return r < 0 ? err_prefix(r, "chunk %llu", (unsigned long long)move->seq) : 0;
}

static void on_bind_over(struct wait *wait)
{
	struct room *room = container_of(wait, struct room, pages.wait_bind);
	struct move *move;

	rooms_catch_up(room);
	if (!room_live(room))
		return;
	wait_spec_fini(&room->pages.wait);
	list_foreach_safe(move, &room->moves, link) {
		if (move_phase(move) == MOVE_WAITING)
			room_recv_land(move);
	}
}

static void room_recv_on_planned(struct move *move)
{
	struct room *room = move->room;
	struct err why;

	if (move->refused.code != ERR_OK || check_plan(move) < 0 ||
	    reserve_tokens(move) < 0) {
		if (move->refused.code != ERR_OK)
			why = move->refused;
		else
			err_take(&why);
		room_fail(room, &why, NULL);
		move_answer(move, NULL, &why);
		return;
	}
	if (move->last) {
		if (sm_can(&move->party->sm,
			   PARTY_CLOSING)) /* else its acknowledgement was repeated */
			sm_move(&move->party->sm, PARTY_CLOSING);
		move->party->due.last_seq = move->seq;
	}
	if (wait_passed(&room->pages.wait)) {
		wait_spec_fini(&room->pages.wait);
		room_recv_land(move);
		return;
	}
	move_to(move, MOVE_WAITING);
	if (!room_awaits_point(room))
		wait_start(rooms_waits(room->rooms), &room->pages.wait_bind,
			   &room->pages.wait, on_bind_over);
}

/* Is this sender, of this generation, expected to send now? */
static int room_recv_admit(struct room *room, struct remote *remote,
			   const struct chunk_header *h, struct party **party_p)
{
	struct party *party = room_party_by_pool(room, remote, h->src_pool);

	/* first: an ended room has released the pools of its sources */
	if (!room_live(room) && room->error->code != ERR_OK)
		return err_reraise(room->error);
	if (!party)
		return err_raise(ERR_NOTFOUND, "room %llu has no source %s pool %llu",
				 (unsigned long long)room->number, remote->label,
				 (unsigned long long)h->src_pool);
	if (!party_asked(party) || h->dst_pool != room->pool->id ||
	    h->room != room->number)
		return err_raise(ERR_STATE, "room %llu did not request this chunk",
				 (unsigned long long)room->number);
	if (party->gen == 0)
		party->gen = h->send_gen;
	if (party->gen != h->send_gen)
		return err_raise(ERR_RESTART,
				 "room %llu: a chunk of another generation of the sender",
				 (unsigned long long)room->number);
	if (party_state(party) == PARTY_CLOSING)
		return err_raise(
			ERR_DUP, "room %llu: chunk %llu after the last one (%llu)",
			(unsigned long long)room->number, (unsigned long long)h->seq,
			(unsigned long long)party->due.last_seq);
	*party_p = party;
	return 0;
}

static void on_landed(struct inbound_owner *inbound, const struct err *err)
{
	struct move *move = container_of(inbound, struct move, inbound);
	const struct xp_inbound *in = move->in;
	struct room *room = move->room;
	struct party *party = move->party;

	if (!err)
		move_done(move, in ? &in->used : NULL, in ? &in->way : NULL);
	move_end(move); /* first: failing the room stops its other moves */
	rooms_catch_up(room);
	if (!err) {
		party->due.got += move->plan->bytes;
		room_count(room, METRIC_CHUNKS_RECEIVED, 1);
	} else if (move->reserved) {
		release_tokens(move, move->pair_count);
	}
	if (err)
		room_fail_moving(room, party, err);
}

/* Its pages are known: pair them with the bound ones. */
static int plan(struct move *move)
{
	struct room *room = move->room;
	struct party *party = move->party;
	int r = move_pair(move, &move->maps, &room->pages.maps);

	if (r < 0)
		return err_pass(r);
	if (party == list_first(&room->parties, struct party, link))
		room->surplus += room_maps_surplus(&move->maps, &room->pages.maps);
	move_plan(move, party->wants, party->want_count, room_recv_on_planned);
	return 0;
}

/* The late half of room_recv_begin(). */
static void room_recv_on_pages(struct mail *mail, const struct err *why)
{
	struct move *move = mail->move;
	struct room *room = move->room;
	struct err e;

	if (!why) {
		move->maps = room_maps_steal(&mail->reader.maps);
		if (plan(move) >= 0)
			return;
		err_take(&e);
		why = &e;
	}
	room_count(room, METRIC_ROOM_REFUSED, 1);
	move_answer(move, NULL, why);
	room_fail(room, why, NULL);
}

static int room_recv_begin(struct room *room, struct party *party, struct xp_inbound *in,
			   const struct chunk_header *h, struct cursor *header)
{
	struct move *move = move_new(room, party);
	struct mail *mail;
	int r;

	if (!move)
		return err_pass(-ENOMEM);
	move->seq = h->seq;
	move->digest = h->digest;
	move->bytes = h->bytes;
	move->last = h->last;
	move->in = in;
	r = mail_read(party, move, NULL, header, party->pool->layout, NULL, false,
		      room_recv_on_pages, &move->maps, &mail);
	if (r >= 0) {
		move->inbound.on_done = on_landed;
		in->owner = &move->inbound;
		move_arrived(move);
		if (sm_state(&room->sm) == ROOM_WAITING)
			room_move(room, ROOM_MOVING);
		if (r == 0)
			r = plan(move);
	}
	if (r < 0) {
		in->owner = NULL;
		move_end(move);
		return err_pass(r);
	}
	return 0;
}

void recv_on_request(struct room *room, struct remote *remote, struct xp_inbound *in,
		     struct cursor *header)
{
	struct chunk_header h;
	struct party *party = NULL;
	struct err why;
	bool fatal;
	int r = chunk_header_get(header, &h);

	assert(room->role == ROOM_RECV);
	/* all bytes have arrived already and this only confirms it */
	if (r >= 0 && sm_state(&room->sm) == ROOM_SUCCESS && h.bytes == 0 &&
	    in->bytes == 0) {
		remote->transport->ops->land(in, &(struct xp_sides){0}, NULL);
		return;
	}
	if (r >= 0)
		r = room_recv_admit(room, remote, &h, &party);
	/* chunks of unknown senders and late ones are refused without effect on a room */
	fatal = r == -err_errno(ERR_DUP);
	if (r >= 0) {
		r = room_recv_begin(room, party, in, &h, header);
		fatal = r < 0;
	}
	if (r >= 0)
		return;
	err_take(&why);
	room_count(room, METRIC_ROOM_REFUSED, 1);
	remote->transport->ops->land(in, NULL, &why);
	if (fatal)
		room_fail(room, &why, NULL);
}

/* ---- completion ---- */

static void confirm(struct room *room)
{
	struct party *party;

	list_foreach(party, &room->parties, link) {
		struct wire_room_done msg = {.room = party->room_there,
					     .recv_gen = room->gen};

		if (party_lost(party) || !party->pool) /* no room there waits for it */
			continue;
		sm_move(&party->sm, PARTY_DONE);
		msg.src_pool = party->pool->id;
		room_trace(room, TRACE_DONE_OUT, party, party->gen);
		if (handshake_send_room_done(party->remote, &msg) < 0)
			err_clear(); /* its peer is going down: its room fails there */
	}
}

/* Complete? Or can the missing bytes never arrive? */
static void check_complete(struct room *room)
{
	struct party *party;
	char label[300];
	struct err why;

	list_foreach(party, &room->parties, link) {
		if (!party_asked(party))
			return; /* room_parties_act() continues */
		if (party->due.got == party->due.expected)
			continue;
		if (party_state(party) == PARTY_CLOSING && room->busy == 0) {
			err_set(&why, ERR_SHORT,
				"%.200s: sent %llu of %llu bytes, and no chunk follows",
				party_label(party, label, sizeof(label)),
				(unsigned long long)party->due.got,
				(unsigned long long)party->due.expected);
			room_fail(room, &why, NULL);
		}
		return;
	}
	if (room->busy > 0 || !list_empty(&room->mails))
		return;
	confirm(room);
	room_move(room, ROOM_SUCCESS);
}

static void room_recv_step(struct room *room)
{
	if (!room_booted(room))
		return;
	if (room->pages.phase == PAGES_BOUND) {
		if (plan_room(room) < 0) {
			room_fail_last(room);
		} else if (loop_enough(room->session->kvd->loop)) {
			room_kick(room);
			return;
		}
	}
	if (room_live(room) && room_planned(room) &&
	    room_parties_act(room, party_unasked, room_recv_ask) < 0)
		room_fail_last(room);
	if (room_live(room) && room_planned(room))
		check_complete(room);
}

/* A source that has delivered may be lost; one without a message from us may come
 * back. */
static bool room_recv_without(struct party *party, const struct err *why)
{
	bool without = room_source_lost(party);

	(void)why;
	if (without)
		mails_drop(party->room, party);
	return without;
}

const struct role_ops room_recv_ops = {
	.init = bind_init,
	.fini = bind_fini,
	.party_fini = bind_party_fini,
	.free_ended = moves_free_ended,
	.step = room_recv_step,
	.stop = moves_stop,
	.without = room_recv_without,
};
