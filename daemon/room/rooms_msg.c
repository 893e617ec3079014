/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rooms' peer messages: find the room, check that the sender is the party it claims to be
 * (its peer and generation), then call the role. A message for a room that does not exist
 * is kept (orphans), answered (tombstones, refusals) or counted as late; it never creates
 * or changes another room.
 */
#include <assert.h>
#include <stdio.h>

#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/room/room_mail.h"
#include "daemon/room/rooms_set.h"

/* Rooms named in messages, up to date: a room that has not processed the loss of its
 * peer does so before it gets another message of the peer (rooms_loss.c). */
static struct room *by_gen(struct rooms *rooms, uint64_t gen)
{
	struct room *room = rooms_by_gen(rooms, gen);

	if (room)
		rooms_catch_up(room);
	return room;
}

static struct room *by_pool(struct rooms *rooms, uint64_t pool, enum room_role role,
			    uint64_t number)
{
	struct room *room = rooms_by_pool(rooms, pool, role, number);

	if (room)
		rooms_catch_up(room);
	return room;
}

/* ---- partners that are first ---- */

static void refuse_last(struct rooms *rooms, struct remote *remote, enum wire_type type,
			const struct room_message *msg)
{
	struct err why;

	err_take(&why);
	metrics_add(&rooms->kvd->metrics, METRIC_ROOM_REFUSED, 1);
	answer_refuse(remote, type, msg, &why);
}

static int over(const struct room *room)
{
	if (room_live(room))
		return 0;
	if (room->error->code != ERR_OK)
		return err_reraise(room->error);
	return err_raise(ERR_STATE, "room %llu has ended",
			 (unsigned long long)room->number);
}

static int deliver_info(struct room *room, struct remote *remote, struct cursor *in,
			struct room_message *msg)
{
	struct wire_transfer_info info;
	int r = wire_transfer_info_get(in, &info);

	if (r >= 0)
		r = handshake_check_choice(room->rooms->kvd->handshake, remote,
					   info.src_pool, info.named, info.dst_pool);
	if (r >= 0)
		r = answer_admit(room, remote, info.ticket);
	if (r >= 0)
		r = over(room);
	return r < 0 ? err_pass(r) : send_on_info(room, remote, &info, msg);
}

static int deliver_query(struct room *room, struct remote *remote, struct cursor *in)
{
	struct wire_offer_query query;
	int r = wire_offer_query_get(in, &query);

	if (r >= 0)
		r = handshake_check_choice(room->rooms->kvd->handshake, remote,
					   query.src_pool, query.named, query.dst_pool);
	if (r >= 0)
		r = answer_admit(room, remote, query.ticket);
	return r < 0 ? err_pass(r) : offer_on_query(room, remote, &query);
}

static void msg_deliver(struct rooms *rooms, struct room *room, struct remote *remote,
			enum wire_type type, struct room_message *msg)
{
	struct cursor in;
	int r;

	assert(type == WIRE_T_TRANSFER_INFO || type == WIRE_T_OFFER_QUERY);
	cursor_read(&in, msg->body, msg->len);
	if (type == WIRE_T_TRANSFER_INFO)
		r = deliver_info(room, remote, &in, msg);
	else
		r = deliver_query(room, remote, &in);
	if (r < 0)
		refuse_last(rooms, remote, type, msg);
}

void msg_init(struct rooms *rooms)
{
	rooms->deliver = msg_deliver;
}

/* A request for a room. */
struct contact {
	enum wire_type type;
	struct number_key key;
	struct receiver_generation one;
	uint64_t pool; /* its own */
	const uint8_t *ticket;
	uint8_t named; /* fields that selected the pool */
};

/* Deliver, keep, or refuse with a reason. If another pool here matches as well, the
 * request is refused first: it may be for a room of that pool. */
static void first_contact(struct rooms *rooms, struct remote *remote,
			  const struct contact *from, struct room_message *msg)
{
	const struct number_key *key = &from->key;
	struct room *room =
		by_pool(rooms, key->owner, (enum room_role)key->role, key->number);
	const struct tombstone *tomb = tomb_find(rooms, key);
	bool past = room && tomb && room_generations_has(&tomb->known, from->one);
	int r = handshake_check_choice(rooms->kvd->handshake, remote, key->owner,
				       from->named, from->pool);

	if (r < 0) {
		refuse_last(rooms, remote, from->type, msg);
		return;
	}
	if (room && !past && !room_is_before(room, from->one)) {
		msg_deliver(rooms, room, remote, from->type, msg);
		return;
	}
	if (past || (!room && tomb && !room_generations_before(&tomb->known, from->one) &&
		     tomb_admits(tomb, remote->peer, from->ticket)))
		r = err_raise(tomb->code, "room %llu has ended: %s",
			      (unsigned long long)key->number, tomb->text);
	else if (rooms->kvd->draining)
		r = err_raise(ERR_DRAIN, "no new rooms: the daemon is draining");
	else if (!handshake_pool_is_ours(rooms->kvd->handshake, key->owner))
		r = err_raise(ERR_NOTFOUND, "no pool %llu",
			      (unsigned long long)key->owner);
	else
		r = orphan_keep(rooms, remote, from->type, key, from->one.gen,
				from->ticket, msg);
	if (r < 0)
		refuse_last(rooms, remote, from->type, msg);
}

/* A body inside a frame, or in its own memory. */
static struct room_message message_of(struct remote *remote, const struct cursor *body)
{
	return (struct room_message){.body = body->base + body->pos,
				     .len = cursor_left(body),
				     .owned = peer_body_take(remote->peer)};
}

static int contact_take(struct rooms *rooms, struct remote *remote,
			const struct contact *from, const struct cursor *body)
{
	struct room_message msg = message_of(remote, body);

	first_contact(rooms, remote, from, &msg);
	mem_free(msg.owned);
	return 0;
}

static int on_transfer_info(struct rooms *rooms, struct remote *remote,
			    struct cursor *body)
{
	struct cursor in = *body;
	struct wire_transfer_info m;
	int r = wire_transfer_info_get(&in, &m);
	const struct contact from = {
		.type = WIRE_T_TRANSFER_INFO,
		.key = {m.src_pool, ROOM_SEND, m.room},
		.one = receiver_generation(remote, m.dst_pool, m.recv_gen),
		.pool = m.dst_pool,
		.ticket = m.ticket,
		.named = m.named};

	return r < 0 ? err_pass(r) : contact_take(rooms, remote, &from, body);
}

static int on_offer_query(struct rooms *rooms, struct remote *remote, struct cursor *body)
{
	struct cursor in = *body;
	struct wire_offer_query m;
	int r = wire_offer_query_get(&in, &m);
	const struct contact from = {
		.type = WIRE_T_OFFER_QUERY,
		.key = {m.src_pool, ROOM_OFFER, m.room},
		.one = receiver_generation(remote, m.dst_pool, m.pull_gen),
		.pool = m.dst_pool,
		.ticket = m.ticket,
		.named = m.named};

	return r < 0 ? err_pass(r) : contact_take(rooms, remote, &from, body);
}

/* ---- answers ---- */

/* The party of room `gen` (of `role`) with this remote's pool. */
static struct party *party_at(struct rooms *rooms, uint64_t gen, enum room_role role,
			      const struct remote *remote, uint64_t pool)
{
	struct room *room = by_gen(rooms, gen);

	if (room && room->role == role)
		return room_party_by_pool(room, remote, pool);
	metrics_add(&rooms->kvd->metrics, METRIC_ROOM_LATE, 1);
	return NULL;
}

static int on_info_ack(struct rooms *rooms, struct remote *remote, struct cursor *body)
{
	struct wire_transfer_info_ack m;
	struct party *party;
	int r = wire_transfer_info_ack_get(body, &m);

	if (r < 0)
		return err_pass(r);
	party = party_at(rooms, m.recv_gen, ROOM_RECV, remote, m.src_pool);
	if (!party || !party_asked(party))
		return 0;
	if (party->gen == 0)
		party->gen = m.send_gen;
	if (party_state(party) < PARTY_ANSWERED || party_state(party) == PARTY_CLOSING)
		room_trace(party->room, TRACE_ACK_IN, party, party->gen);
	if (sm_can(&party->sm, PARTY_ANSWERED))
		sm_move(&party->sm, PARTY_ANSWERED);
	return 0;
}

static void refused_by(struct party *party, uint32_t code, const char *text)
{
	struct err why;

	peer_report(party->remote->peer, code, text, &why);
	room_fail_remote(party->room, &why, party);
}

static int on_info_nak(struct rooms *rooms, struct remote *remote, struct cursor *body)
{
	struct wire_transfer_info_nak m;
	struct party *party;
	int r = wire_transfer_info_nak_get(body, &m);

	if (r < 0)
		return err_pass(r);
	party = party_at(rooms, m.recv_gen, ROOM_RECV, remote, m.src_pool);
	if (party)
		refused_by(party, m.code, m.text);
	return 0;
}

static int on_room_done(struct rooms *rooms, struct remote *remote, struct cursor *body)
{
	struct wire_room_done m;
	struct party *party = NULL;
	struct room *room;
	int r = wire_room_done_get(body, &m);

	if (r < 0)
		return err_pass(r);
	room = by_pool(rooms, m.src_pool, ROOM_SEND, m.room);
	if (room)
		party = room_party_by_gen(room, remote, m.recv_gen);
	if (party)
		send_on_done(room, party);
	else
		metrics_add(&rooms->kvd->metrics, METRIC_ROOM_LATE, 1);
	return 0;
}

static int on_offer(struct rooms *rooms, struct remote *remote, struct cursor *body)
{
	struct cursor in = *body;
	struct room_message msg;
	struct wire_offer m;
	struct party *party;
	int r = wire_offer_get(&in, &m);

	if (r < 0)
		return err_pass(r);
	msg = message_of(remote, body);
	party = party_at(rooms, m.pull_gen, ROOM_PULL, remote, m.src_pool);
	if (party && pull_on_offer(party->room, party, &m, &msg) < 0)
		room_fail_last(party->room);
	mem_free(msg.owned);
	return 0;
}

static int on_offer_nak(struct rooms *rooms, struct remote *remote, struct cursor *body)
{
	struct wire_offer_nak m;
	struct party *party;
	int r = wire_offer_nak_get(body, &m);

	if (r < 0)
		return err_pass(r);
	party = party_at(rooms, m.pull_gen, ROOM_PULL, remote, m.src_pool);
	if (party)
		refused_by(party, m.code, m.text);
	return 0;
}

static int on_pull_done(struct rooms *rooms, struct remote *remote, struct cursor *body)
{
	struct wire_pull_ack ack = {0};
	struct wire_pull_done m;
	enum err_code code = ERR_LEASE;
	struct room *room;
	int r = wire_pull_done_get(body, &m);

	if (r < 0)
		return err_pass(r);
	room = by_gen(rooms, m.offer_gen);
	if (room && room->role == ROOM_OFFER)
		offer_on_pull_done(room, room_party_by_gen(room, remote, m.pull_gen), &m,
				   &code);
	else
		metrics_add(&rooms->kvd->metrics, METRIC_ROOM_LATE, 1);
	ack.room = m.room;
	ack.pull_gen = m.pull_gen;
	ack.offer_gen = m.offer_gen;
	ack.code = code;
	if (code != ERR_OK)
		snprintf(ack.text, sizeof(ack.text), "the lease of offer %llu expired",
			 (unsigned long long)m.room);
	if (handshake_send_pull_ack(remote, &ack) < 0)
		err_clear(); /* its line is going down */
	return 0;
}

static int on_pull_ack(struct rooms *rooms, struct remote *remote, struct cursor *body)
{
	struct wire_pull_ack m;
	struct party *party = NULL;
	struct room *room;
	int r = wire_pull_ack_get(body, &m);

	if (r < 0)
		return err_pass(r);
	room = by_gen(rooms, m.pull_gen);
	if (room && room->role == ROOM_PULL)
		party = room_party_by_gen(room, remote, m.offer_gen);
	if (party)
		pull_on_ack(room, party, &m);
	else
		metrics_add(&rooms->kvd->metrics, METRIC_ROOM_LATE, 1);
	return 0;
}

static int on_lease(struct rooms *rooms, struct remote *remote, struct cursor *body)
{
	struct wire_lease m;
	struct room *room;
	int r = wire_lease_get(body, &m);

	if (r < 0)
		return err_pass(r);
	room = by_gen(rooms, m.offer_gen);
	if (room && room->role == ROOM_OFFER)
		offer_on_lease(room, room_party_by_gen(room, remote, m.pull_gen),
			       m.lease_epoch);
	else
		metrics_add(&rooms->kvd->metrics, METRIC_ROOM_LATE, 1);
	return 0;
}

/* ---- abort ---- */

static struct room *abort_target(struct rooms *rooms, const struct wire_abort *m)
{
	static const enum room_role partner[ROOM_ROLES] = {
		[ROOM_SEND] = ROOM_RECV,
		[ROOM_RECV] = ROOM_SEND,
		[ROOM_OFFER] = ROOM_PULL,
		[ROOM_PULL] = ROOM_OFFER,
	};
	struct room *room;

	if (m->from_role >= ROOM_ROLES)
		return NULL;
	room = m->to_gen ? by_gen(rooms, m->to_gen)
			 : by_pool(rooms, m->pool, partner[m->from_role], m->room);
	return room && room->role == partner[m->from_role] ? room : NULL;
}

/* The party of an ABORT. The generation of a party that has not answered yet is
 * unknown: with several such at one daemon it may be any of them (NULL, and `unsure`). */
static struct party *abort_party(struct room *room, const struct remote *remote,
				 uint64_t gen, bool *unsure_p)
{
	struct party *party = room_party_by_gen(room, remote, gen), *other;
	unsigned int silent = 0;

	*unsure_p = false;
	if (party)
		return party;
	list_foreach(other, &room->parties, link) {
		if (other->remote == remote && other->gen == 0) {
			party = other;
			silent++;
		}
	}
	if (silent > 1) {
		*unsure_p = true;
		return NULL;
	}
	if (party)
		party->gen = gen;
	return party;
}

/* No party matches: it is from a receiver that this side does not know yet, or too
 * late. */
static void abort_of_nobody(struct rooms *rooms, struct remote *remote, struct room *room,
			    const struct wire_abort *m)
{
	struct err why;

	err_set(&why, err_from_wire(m->code), "%.110s: %s", remote->label, m->text);
	err_foreign(&why);
	if (m->from_role != ROOM_RECV || m->to_gen ||
	    !early_abort(rooms, remote, room, m, &why))
		metrics_add(&rooms->kvd->metrics, METRIC_ROOM_LATE, 1);
	answer_abort(remote, m->room, m->from_gen);
}

static int on_abort(struct rooms *rooms, struct remote *remote, struct cursor *body)
{
	struct wire_abort m;
	struct party *party = NULL;
	struct room *room;
	struct err why;
	bool unsure = false;
	int r = wire_abort_get(body, &m);

	if (r < 0)
		return err_pass(r);
	if (m.code == ERR_OK) {
		early_drop(rooms, remote, m.from_gen);
		return 0;
	}
	room = abort_target(rooms, &m);
	if (room)
		party = abort_party(room, remote, m.from_gen, &unsure);
	if (!party && !unsure) /* it may wait for another room of the number */
		orphans_drop(rooms, remote, m.from_gen);
	if ((!party && !unsure) || room_terminal(room)) {
		abort_of_nobody(rooms, remote, room, &m);
		return 0;
	}
	peer_report(remote->peer, m.code, m.text, &why);
	if (unsure) { /* all are notified; the opener answers when quiesced */
		room_fail_remote(room, &why, NULL);
		return 0;
	}
	party->abort |= PARTY_ABORT_RECEIVED;
	room_trace(room, TRACE_ABORT_IN, party, party->gen);
	if (room->role == ROOM_OFFER)
		room->ops->without(party,
				   &why); /* the end of a puller does not end the offer */
	else
		room_fail_remote(room, &why, party);
	return 0;
}

static int on_abort_ack(struct rooms *rooms, struct remote *remote, struct cursor *body)
{
	struct wire_abort_ack m;
	struct party *party;
	struct room *room;
	int r = wire_abort_ack_get(body, &m);

	if (r < 0)
		return err_pass(r);
	room = by_gen(rooms, m.to_gen);
	if (!room) {
		metrics_add(&rooms->kvd->metrics, METRIC_ROOM_LATE, 1);
		return 0;
	}
	list_foreach(party, &room->parties, link) {
		if (party->remote == remote)
			party->abort |= PARTY_QUIESCED;
	}
	return 0;
}

int rooms_on_message(struct remote *remote, const struct wire_header *h,
		     struct cursor *body)
{
	static int (*const handlers[WIRE_T_END])(struct rooms *, struct remote *,
						 struct cursor *) = {
		[WIRE_T_TRANSFER_INFO] = on_transfer_info,
		[WIRE_T_TRANSFER_INFO_ACK] = on_info_ack,
		[WIRE_T_TRANSFER_INFO_NAK] = on_info_nak,
		[WIRE_T_ROOM_DONE] = on_room_done,
		[WIRE_T_ABORT] = on_abort,
		[WIRE_T_ABORT_ACK] = on_abort_ack,
		[WIRE_T_OFFER_QUERY] = on_offer_query,
		[WIRE_T_OFFER] = on_offer,
		[WIRE_T_OFFER_NAK] = on_offer_nak,
		[WIRE_T_PULL_DONE] = on_pull_done,
		[WIRE_T_PULL_ACK] = on_pull_ack,
		[WIRE_T_LEASE] = on_lease,
	};

	assert(h->type < WIRE_T_END);
	if (h->type >= WIRE_T_END || !handlers[h->type])
		return 0; /* of a newer peer: not for this version */
	return handlers[h->type](rooms_of(remote->kvd), remote, body);
}

/* ---- requests on the data line ---- */

/* The receiver's generation is the second field of both headers. */
void rooms_on_request(struct remote *remote, struct xp_inbound *in, unsigned int kind,
		      struct cursor *header)
{
	struct rooms *rooms = rooms_of(remote->kvd);
	struct cursor peek = *header;
	struct room *room;
	struct err why;
	uint64_t gen, bytes;

	assert(kind == REQUEST_CHUNK || kind == REQUEST_PULL);
	cursor_get_u64(&peek);
	gen = cursor_get_u64(&peek);
	room = by_gen(rooms, gen);
	if (room && kind == REQUEST_CHUNK && room->role == ROOM_RECV &&
	    in->kind == XP_WRITE) {
		recv_on_request(room, remote, in, header);
		return;
	}
	if (room && kind == REQUEST_PULL && room->role == ROOM_OFFER &&
	    in->kind != XP_WRITE) {
		offer_on_request(room, remote, in, header);
		return;
	}
	bytes = in->bytes;
	metrics_add(&rooms->kvd->metrics, METRIC_ROOM_LATE, 1);
	if (kind == REQUEST_CHUNK &&
	    bytes == 0) { /* "end of chunks", for a closed room */
		remote->transport->ops->land(in, &(struct xp_sides){0}, NULL);
		return;
	}
	err_set(&why, ERR_NOTFOUND, "no such room");
	remote->transport->ops->land(in, NULL, &why);
}
