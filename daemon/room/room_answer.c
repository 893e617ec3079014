/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Answers of rooms to their peers: acknowledgements, refusals, and the receipt of an
 * ABORT. A line that cannot take one is going down, which its room will detect.
 *
 * A TRANSFER_INFO is acknowledged before the loop sleeps: this message is not urgent, and
 * operations that the room has posted for the receiver meanwhile are sent first.
 */
#include <assert.h>
#include <stdio.h>

#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/room/room_mail.h"
#include "daemon/room/rooms_set.h"

/* A line that cannot take a small message is going down. */
static void sent(int r)
{
	if (r < 0)
		err_clear();
}

/* ---- refusals ---- */

static void refuse_info(struct remote *remote, const struct wire_transfer_info *info,
			const struct err *why)
{
	struct wire_transfer_info_nak nak = {.room = info->room,
					     .recv_gen = info->recv_gen,
					     .src_pool = info->src_pool,
					     .code = why->code};

	snprintf(nak.text, sizeof(nak.text), "%s", why->text);
	sent(handshake_send_transfer_info_nak(remote, &nak));
}

static void refuse_query(struct remote *remote, const struct wire_offer_query *query,
			 const struct err *why)
{
	struct wire_offer_nak nak = {.room = query->room,
				     .pull_gen = query->pull_gen,
				     .src_pool = query->src_pool,
				     .code = why->code};

	snprintf(nak.text, sizeof(nak.text), "%s", why->text);
	sent(handshake_send_offer_nak(remote, &nak));
}

void answer_refuse(struct remote *remote, enum wire_type type,
		   const struct room_message *msg, const struct err *why)
{
	struct wire_transfer_info info;
	struct wire_offer_query query;
	struct cursor in;

	assert(why->code != ERR_OK);
	cursor_read(&in, msg->body, msg->len);
	if (type == WIRE_T_TRANSFER_INFO && wire_transfer_info_get(&in, &info) >= 0)
		refuse_info(remote, &info, why);
	else if (type == WIRE_T_OFFER_QUERY && wire_offer_query_get(&in, &query) >= 0)
		refuse_query(remote, &query, why);
}

void rooms_refuse_info(const struct party *party, const struct err *why)
{
	struct rooms *rooms = party->room->rooms;
	struct wire_transfer_info info = {.room = party->room_there,
					  .recv_gen = party->gen,
					  .src_pool = party->room->pool->id};

	assert(party->room->role == ROOM_SEND);
	metrics_add(&rooms->kvd->metrics, METRIC_ROOM_REFUSED, 1);
	refuse_info(party->remote, &info, why);
}

int answer_admit(const struct room *room, const struct remote *remote,
		 const uint8_t ticket[TICKET_BYTES])
{
	int r = room_admit_check(&room->admit, room->number, remote->peer, ticket);
	char number[24];

	if (r >= 0)
		return 0;
	room_count(room, METRIC_ROOM_UNAUTHORIZED, 1);
	snprintf(number, sizeof(number), "%llu", (unsigned long long)room->number);
	log_warn("room", number, "unauthorized peer refused", "peer='%s' why='%s'",
		 remote->label, err_last()->text);
	return err_pass(r);
}

/* ---- TRANSFER_INFO_ACK ---- */

void rooms_ack(struct party *party)
{
	const struct room *room = party->room;
	struct wire_transfer_info_ack ack = {.room = room->number,
					     .recv_gen = party->gen,
					     .src_pool = room->pool->id,
					     .send_gen = room->gen};

	list_remove(&party->send.ack_link);
	if (party_state(party) == PARTY_TAKEN)
		sm_move(&party->sm, party->want_count ? PARTY_ANSWERED : PARTY_DONE);
	room_trace(party->room, TRACE_ACK_OUT, party, party->gen);
	sent(handshake_send_transfer_info_ack(party->remote, &ack));
}

void rooms_ack_later(struct party *party)
{
	assert(party_state(party) == PARTY_TAKEN);
	list_remove(&party->send.ack_link);
	list_push_back(&party->room->rooms->acks, &party->send.ack_link);
	loop_defer(party->room->rooms->kvd->loop, &party->room->rooms->acks_go);
}

/* Behind the operations that the room's step has posted, and written with them. */
static void on_acks_go(struct loop_defer *defer)
{
	struct rooms *rooms = container_of(defer, struct rooms, acks_go);
	struct party *party;

	while ((party = list_first(&rooms->acks, struct party, send.ack_link)))
		rooms_ack(party);
}

void answer_init(struct rooms *rooms)
{
	list_init(&rooms->acks);
	loop_defer_init(&rooms->acks_go, on_acks_go);
}

void answer_fini(struct rooms *rooms)
{
	assert(list_empty(&rooms->acks));
	loop_defer_cancel(&rooms->acks_go);
}

/* ---- abort ---- */

void answer_abort(struct remote *remote, uint64_t number, uint64_t gen)
{
	struct wire_abort_ack ack = {.room = number, .to_gen = gen};

	sent(handshake_send_abort_ack(remote, &ack));
}
