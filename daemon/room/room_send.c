/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sender's side of a push. Receivers announce themselves (TRANSFER_INFO); when all
 * have, the room is waiting_for_input. Each chunk becomes one move per receiver: pages
 * are paired, planned, wait for their point, and are posted as a WRITE.
 *
 * At the chunk marked `last` the receiver checks that nothing is missing, so it is posted
 * only when every earlier chunk of the room is: plans of large chunks are made on helper
 * threads and could be overtaken.
 *
 * Success is every receiver's ROOM_DONE after every move has ended; a receiver that wants
 * nothing (idle) has confirmed from the start.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/room/room_mail.h"
#include "daemon/room/room_wire.h"
#include "daemon/room/rooms.h"
#include "daemon/session/session.h"

static void send_chunk_free(struct chunk *chunk)
{
	assert(chunk->room->send.chunks_open > 0);
	chunk->room->send.chunks_open--;
	room_figures(chunk->room);
	list_remove(&chunk->link);
	charge_drop(&chunk->charge);
	room_maps_fini(&chunk->maps);
	wait_spec_fini(&chunk->wait);
	mem_free(chunk);
}

static void send_chunk_left(struct chunk *chunk)
{
	assert(chunk->moves > 0);
	if (--chunk->moves == 0 && chunk->dispatched)
		send_chunk_free(chunk);
}

/* ---- receivers ---- */

/* First token that receivers want of this view (NULL: of any but aux). */
static uint64_t first_wanted(const struct room *room, const char *view)
{
	const struct party *party;
	uint64_t first = UINT64_MAX;

	list_foreach(party, &room->parties, link) {
		for (size_t i = 0; i < party->theirs.count; i++) {
			const struct room_map *map = &party->theirs.maps[i];
			bool meant = view ? strcmp(map->view, view) == 0
					  : strcmp(map->view, ROOM_AUX_VIEW) != 0;

			if (meant && map->token_begin < first)
				first = map->token_begin;
		}
	}
	return first;
}

/* Of the first view, which grows with the prompt: the token 0 of a state, or of a
 * window, would mean 0 for a request that has a prefix already. */
static uint64_t first_token(const struct room *room)
{
	const struct layout *layout = room->pool->layout;
	bool aux_first = strcmp(layout->views[0].name, ROOM_AUX_VIEW) == 0;
	uint64_t first = UINT64_MAX;

	if (aux_first < layout->view_count)
		first = first_wanted(room, layout->views[aux_first].name);
	return first != UINT64_MAX ? first : first_wanted(room, NULL);
}

/* All of its TRANSFER_INFO has been read. */
static void info_taken(struct party *party)
{
	sm_move(&party->sm, PARTY_TAKEN);
	party->room->send.first_token = first_token(party->room);
	room_trace(party->room, TRACE_INFO_IN, party, party->gen);
	room_kick(party->room);
}

/* The late half of take_info(). */
static void room_send_on_pages(struct mail *mail, const struct err *why)
{
	struct party *party = mail->party;
	struct room *room = mail->room;

	if (!why) {
		party->theirs = room_maps_steal(&mail->reader.maps);
		info_taken(party);
		return;
	}
	rooms_refuse_info(party, why);
	party_drop(party);
	if (room->party_count == 0)
		room->receivers = 0;
}

static int take_info(struct room *room, struct party *party,
		     const struct wire_transfer_info *info, struct room_message *msg)
{
	const struct layout *here = room->pool->layout;
	const struct layout *there = party->pool->layout;
	struct mail *mail;
	struct cursor in;
	int r = layout_compatible(here, there, &layout_from_source);

	if (r < 0)
		return err_pass(r);
	cursor_read(&in, info->wants.data, info->wants.len);
	r = wants_get(&in, &party->wants, &party->want_count);
	if (r >= 0)
		r = charge_take(&party->send.wants_charge, party->remote->account,
				ACCOUNT_PAGES, party->want_count * sizeof(*party->wants));
	if (r >= 0)
		r = cover_check_wants(here, there, party->wants, party->want_count);
	if (r < 0)
		return err_prefix(r, "TRANSFER_INFO.wants");
	cursor_read(&in, info->views.data, info->views.len);
	party->gen = info->recv_gen;
	r = mail_read(party, NULL, msg, &in, there, NULL, false, room_send_on_pages,
		      &party->theirs, &mail);
	if (r < 0)
		return err_prefix(r, "TRANSFER_INFO");
	if (r == 0)
		info_taken(party);
	return 0;
}

int send_on_info(struct room *room, struct remote *remote,
		 const struct wire_transfer_info *info, struct room_message *msg)
{
	struct remote_pool *pool = handshake_pool_by_id(remote, info->dst_pool);
	struct party *party;
	int r;

	assert(room->role == ROOM_SEND);
	if (!pool || pool->is_session)
		return err_raise(ERR_NOTFOUND, "TRANSFER_INFO: no pool %llu of %s",
				 (unsigned long long)info->dst_pool, remote->label);
	party = room_party_by_pool(room, remote, info->dst_pool);
	if (party && party->gen != info->recv_gen)
		return err_raise(ERR_STATE,
				 "TRANSFER_INFO: the room has another generation "
				 "of this receiver");
	if (party) {
		if (party_state(party) != PARTY_READING)
			rooms_ack(party);
		return 0;
	}
	if (info->receivers == 0 || info->receivers > ROOM_PARTIES_MAX)
		return err_raise(ERR_RANGE, "TRANSFER_INFO.receivers: %u is not 1…%u",
				 info->receivers, ROOM_PARTIES_MAX);
	if (room->receivers && room->receivers != info->receivers)
		return err_raise(ERR_INVAL,
				 "TRANSFER_INFO.receivers: %u, another receiver sent %u",
				 info->receivers, room->receivers);
	if (room->party_count >= info->receivers)
		return err_raise(ERR_STATE, "TRANSFER_INFO: already has all %u receivers",
				 info->receivers);
	party = room_party_add(room, remote);
	if (!party)
		return err_pass(-ENOMEM);
	party_use_pool(party, pool);
	r = take_info(room, party, info, msg);
	if (r < 0) {
		party_drop(party);
		return err_pass(r);
	}
	room->receivers = info->receivers;
	room_names_hear(room, info->request_id, info->traceparent);
	return 0;
}

/* All possible operations for its receivers are posted. */
static void send_acks(struct room *room)
{
	struct party *party;

	assert(room->role == ROOM_SEND);
	list_foreach(party, &room->parties, link) {
		if (party_state(party) == PARTY_TAKEN)
			rooms_ack_later(party);
	}
}

void send_on_done(struct room *room, struct party *party)
{
	assert(room->role == ROOM_SEND && party->room == room);
	if (party_state(party) == PARTY_TAKEN)
		rooms_ack(party); /* finished at once: it wants nothing */
	if (sm_can(&party->sm, PARTY_DONE))
		sm_move(&party->sm, PARTY_DONE);
	room_trace(room, TRACE_DONE_IN, party, party->gen);
	room_kick(room);
}

/* It has confirmed, and its peer was lost or its pool withdrawn: the others continue,
 * and an unfinished move to it, a last chunk of no bytes, is irrelevant. */
static bool has_left(const struct party *party)
{
	return party_state(party) == PARTY_DONE && party->want_count > 0 &&
	       (party_lost(party) || party->line == PARTY_POOL_GOING);
}

/* ---- chunks ---- */

static void room_send_on_sent(struct sched_op *op)
{
	struct move *move = op->owner;
	struct room *room = move->room;

	if (op->xp.result >= 0)
		move_done(move, &op->xp.used, &op->xp.way);
	move_end(move);
	rooms_catch_up(room);
	if (op->xp.result >= 0)
		room_count(room, METRIC_CHUNKS_SENT, 1);
	else if (!has_left(move->party))
		room_fail_moving(room, move->party, &op->xp.err);
}

/* Called where the plan is made, because page lists of a room take as long. */
static int room_send_make_header(struct move *move)
{
	struct party *party = move->party;
	struct chunk_header h = {
		.room = party->room_there,
		.recv_gen = party->gen,
		.send_gen = move->room->gen,
		.src_pool = move->room->pool->id,
		.dst_pool = party->pool->id,
		.seq = move->chunk->seq,
		.digest = move->plan->digest,
		.bytes = move->plan->bytes,
		.last = move->chunk->last,
	};

	return chunk_header_make(&h, &move->chunk->maps, &move->header,
				 &move->header_len);
}

static void room_send_post(struct move *move)
{
	struct room *room = move->room;

	if (move_post(move, XP_WRITE, room_send_on_sent) < 0) {
		room_fail_last(room);
		move_end(move);
		return;
	}
	room_kick(room); /* the last chunk may wait for this */
}

static void room_send_on_wait_over(struct wait *wait)
{
	struct move *move = container_of(wait, struct move, wait);

	rooms_catch_up(move->room);
	if (move_phase(move) == MOVE_WAITING) /* else the room has ended */
		room_send_post(move);
}

static void room_send_on_planned(struct move *move)
{
	struct room *room = move->room;

	if (move->refused.code != ERR_OK) {
		room_fail(room, &move->refused, NULL);
		move_end(move);
		return;
	}
	if (move->plan->bytes == 0 && !move->chunk->last) {
		move_end(move);
		return;
	}
	if (wait_passed(&move->chunk->wait)) {
		room_send_post(move);
		return;
	}
	move_to(move, MOVE_WAITING);
	wait_start(rooms_waits(room->rooms), &move->wait, &move->chunk->wait,
		   room_send_on_wait_over);
}

static void send_on_move_free(struct move *move)
{
	send_chunk_left(move->chunk);
}

static int dispatch_to(struct room *room, struct chunk *chunk, struct party *party)
{
	struct move *move = move_new(room, party);
	int r;

	if (!move)
		return err_pass(-ENOMEM);
	move->chunk = chunk;
	move->on_free = send_on_move_free;
	chunk->moves++;
	r = move_pair(move, &chunk->maps, &party->theirs);
	if (r < 0) {
		move_end(move);
		return err_pass(r);
	}
	move->encode = room_send_make_header;
	move_plan(move, party->wants, party->want_count, room_send_on_planned);
	return 0;
}

static void room_send_dispatch(struct room *room, struct chunk *chunk)
{
	struct party *party;
	uint64_t most = 0, surplus;

	if (sm_state(&room->sm) == ROOM_WAITING)
		room_move(room, ROOM_MOVING);
	chunk->moves++; /* our reference during the loop */
	list_foreach(party, &room->parties, link) {
		if (party->want_count == 0 || has_left(party))
			continue;
		surplus = room_maps_surplus(&chunk->maps, &party->theirs);
		most = surplus > most ? surplus : most;
		if (dispatch_to(room, chunk, party) < 0)
			room_fail_last(room);
		if (!room_live(room))
			break;
	}
	room->surplus += most;
	chunk->dispatched = true;
	send_chunk_left(chunk);
}

/* As tokens of the one layer that `given` has. */
static const struct plan_layers seq_layer = {0, 1};

bool send_was_given(const struct room *room, uint64_t seq)
{
	return seq < UINT64_MAX && room->send.given.sets &&
	       coverage_whole(&room->send.given, seq, seq + 1);
}

/* Consecutive numbers are one interval, for any number of chunks. */
static int chunk_number(struct room *room, uint64_t seq)
{
	int r = 0;

	if (!room->send.given.sets) {
		r = coverage_init(&room->send.given, &seq_layer.begin, 1);
		if (r >= 0)
			r = coverage_charge(&room->send.given, room->session->account,
					    ACCOUNT_CHUNKS);
		if (r < 0)
			coverage_fini(&room->send.given);
	}
	if (r >= 0)
		r = coverage_add(&room->send.given, seq_layer, seq, seq + 1);
	return r < 0 ? err_pass(r) : 0;
}

int send_chunk(struct room *room, struct chunk *chunk)
{
	int r = 0;

	assert(room->role == ROOM_SEND && room_live(room));
	if (room->send.chunks_open >= ROOM_CHUNKS_MAX)
		r = err_raise(ERR_LIMIT, "more than %u chunks in a room",
			      ROOM_CHUNKS_MAX);
	else if (chunk->seq == UINT64_MAX)
		r = err_raise(ERR_RANGE, "seq: 2^64 - 1");
	if (r >= 0)
		r = charge_take(&chunk->charge, room->session->account, ACCOUNT_CHUNKS,
				sizeof(*chunk));
	if (r >= 0)
		r = chunk_number(room, chunk->seq);
	if (r < 0) {
		charge_drop(&chunk->charge);
		if (room->send.chunks_given == 0)
			coverage_fini(&room->send.given);
		return err_pass(r);
	}
	chunk->room = room;
	room->send.chunks_open++;
	room->send.chunks_given++;
	room->send.latest_seq = chunk->seq;
	list_push_back(&room->send.chunks, &chunk->link);
	room->send.last_given = room->send.last_given || chunk->last;
	room_trace_chunk(room, TRACE_GIVEN, NULL,
			 &(struct trace_chunk){.seq = chunk->seq});
	room_kick(room);
	return 0;
}

static bool all_posted(const struct room *room)
{
	const struct move *move;

	list_foreach(move, &room->moves, link) {
		if (move_phase(move) != MOVE_POSTED)
			return false;
	}
	return true;
}

/* They are dispatched in order, so waiting ones are at the end of the list. */
static struct list *first_waiting(const struct room *room)
{
	struct list *at = room->send.chunks.prev;

	while (at != &room->send.chunks &&
	       !list_entry(at, struct chunk, link)->dispatched)
		at = at->prev;
	return at->next;
}

/* Many may have waited for the receivers. */
static void dispatch_all(struct room *room)
{
	struct loop *loop = room->session->kvd->loop;

	for (struct list *at = first_waiting(room), *next; at != &room->send.chunks;
	     at = next) {
		struct chunk *chunk = list_entry(at, struct chunk, link);

		next = at->next; /* one without receivers is finished at once */

		if (chunk->last && !all_posted(room))
			return;
		room_send_dispatch(room, chunk);
		if (!room_live(room))
			return;
		if (next != &room->send.chunks && loop_enough(loop)) {
			room_kick(room);
			return;
		}
	}
}

static void room_send_step(struct room *room)
{
	if (sm_state(&room->sm) == ROOM_BOOT) {
		if (!room->receivers || room->party_count < room->receivers ||
		    !list_empty(&room->mails))
			return;
		room_move(room, ROOM_WAITING);
	}
	dispatch_all(room);
	if (!room_live(room) || !room->send.last_given || room->busy > 0)
		return;
	if (first_waiting(room) == &room->send.chunks && room_parties_done(room))
		room_move(room, ROOM_SUCCESS);
}

/* A receiver that has confirmed may be lost, and nothing more is posted for it; any
 * other is needed. */
static bool room_send_without(struct party *party, const struct err *why)
{
	struct move *move;

	(void)why;
	if (!has_left(party))
		return false;
	list_foreach_safe(move, &party->room->moves, link) {
		if (move->party == party && move_phase(move) != MOVE_POSTED)
			move_end(move);
	}
	mails_drop(party->room, party);
	return true;
}

/* ---- life ---- */

static void room_send_init(struct room *room)
{
	list_init(&room->send.chunks);
	room->send.first_token = UINT64_MAX;
}

static void room_send_fini(struct room *room)
{
	struct chunk *chunk;

	list_foreach_safe(chunk, &room->send.chunks, link)
		send_chunk_free(chunk);
	coverage_fini(&room->send.given);
}

static void send_party_fini(struct party *party)
{
	charge_drop(&party->send.wants_charge);
	if (party_state(party) == PARTY_TAKEN)
		rooms_ack(party);
}

const struct role_ops room_send_ops = {
	.init = room_send_init,
	.fini = room_send_fini,
	.party_fini = send_party_fini,
	.free_ended = moves_free_ended,
	.step = room_send_step,
	.stepped = send_acks,
	.stop = moves_stop,
	.without = room_send_without,
};
