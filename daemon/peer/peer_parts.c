/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Long messages, in parts.
 *
 * A room of 65 536 scattered pages is a message of half a megabyte, a query for 4096
 * chunks one of 128 KiB. Summed, copied into
 * the link's memory and out of it in one piece, it would block either loop for most of a
 * millisecond. So it is sent as PARTs, one a turn, between which the loops do other work;
 * but no other message to this peer, because both sides rely on the order of messages. A
 * PART is a message like any other: in the sequence, and never lost without the end of
 * the peering.
 *
 * The receiver has memory for one message per peer. The first part gives its size, which
 * is limited by type, and which is charged to its principal: one key may be many daemons,
 * each with a message that never ends. Pages of it are touched as bytes arrive. The bytes
 * must arrive in order and completely; otherwise the peer is disconnected, which frees
 * them. Rooms take the memory as it is and read from it.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/peer/peer_impl.h"

size_t peer_part_bytes(const struct peers *peers)
{
	size_t most = peers->options.message_bytes - WIRE_HEADER_BYTES - PEER_PART_HEAD;

	return peers->options.part_bytes < most ? peers->options.part_bytes : most;
}

/* ---- out ---- */

bool peer_goes_in_parts(const struct peer_impl *impl, const struct peer_message *msg)
{
	return msg->owned && !impl->peer.self && msg->len > peer_part_bytes(impl->peers);
}

int peer_part_send(struct peer_impl *impl, struct peer_message *msg)
{
	size_t most = peer_part_bytes(impl->peers), left = msg->len - msg->sent;
	struct wire_part part = {
		.type = (uint16_t)msg->type,
		.total = (uint32_t)msg->len,
		.at = (uint32_t)msg->sent,
		.bytes = {msg->owned + msg->sent, left < most ? left : most}};
	struct cursor out;
	int r;

	assert(msg->owned && msg->sent < msg->len);
	cursor_write(&out, impl->peers->part, most + PEER_PART_HEAD);
	r = wire_part_put(&out, &part);
	if (r >= 0)
		r = peer_send_now(impl, WIRE_T_PART, out.base, out.pos);
	if (r < 0)
		return err_pass(r);
	msg->sent += part.bytes.len;
	return msg->sent == msg->len;
}

/* ---- messages that cannot be delivered yet ---- */

int peer_keep(struct peer_impl *impl, size_t bytes, bool must)
{
	const struct peers_callbacks *up = &impl->peers->callbacks;
	struct account *account =
		up->account_of ? up->account_of(up->owner, &impl->peer) : NULL;

	if (!must)
		return err_pass(charge_parts(&impl->kept, account, bytes,
					     impl->peers->options.message_bytes));
	if (impl->kept.account)
		charge_more_force(&impl->kept, bytes);
	else
		charge_force(&impl->kept, account, ACCOUNT_PARTS, bytes);
	return 0;
}

void peer_unkeep(struct peer_impl *impl, size_t bytes)
{
	charge_less(&impl->kept, bytes);
	if (impl->kept.bytes == 0)
		charge_drop(&impl->kept);
}

/* ---- in ---- */

void peer_whole_drop(struct peer_impl *impl)
{
	if (impl->whole.bytes)
		peer_unkeep(impl, impl->whole.total);
	mem_free(impl->whole.bytes);
	impl->whole = (struct peer_whole){0};
}

static int peer_parts_begin(struct peer_impl *impl, const struct wire_part *part)
{
	struct peer_whole *whole = &impl->whole;
	int r;

	if (part->at != 0)
		return err_raise(ERR_PROTO, "PART: continuation without a first part");
	if (part->type <= WIRE_T_BYE || part->type == WIRE_T_PART || part->total == 0 ||
	    part->total > wire_body_cap(part->type) ||
	    part->total > impl->peers->options.message_bytes - WIRE_HEADER_BYTES)
		return err_raise(ERR_PROTO, "PART: invalid size of %s: %u bytes",
				 wire_type_name(part->type), part->total);
	/* a query may be lost, so it must not end the peering: one per peer */
	r = peer_keep(impl, part->total, part->type == WIRE_T_CHUNK_LOOKUP);
	if (r < 0)
		return err_pass(r);
	whole->bytes = mem_alloc(part->total);
	if (!whole->bytes) {
		peer_unkeep(impl, part->total);
		return err_pass(-ENOMEM);
	}
	whole->type = part->type;
	whole->total = part->total;
	whole->got = 0;
	return 0;
}

static int peer_parts_take(struct peer_impl *impl, const struct wire_part *part)
{
	struct peer_whole *whole = &impl->whole;
	int r = 0;

	if (!whole->total)
		r = peer_parts_begin(impl, part);
	if (r < 0)
		return err_pass(r);
	if (part->type != whole->type || part->total != whole->total ||
	    part->at != whole->got || part->bytes.len == 0 ||
	    part->bytes.len > whole->total - whole->got)
		return err_raise(ERR_PROTO,
				 "PART: %zu bytes at %u of %u of a %s, expected at %u "
				 "of %u of a %s",
				 part->bytes.len, part->at, part->total,
				 wire_type_name(part->type), whole->got, whole->total,
				 wire_type_name(whole->type));
	memcpy(whole->bytes + whole->got, part->bytes.data, part->bytes.len);
	whole->got += (uint32_t)part->bytes.len;
	return 0;
}

static void deliver(struct peer_impl *impl, const struct wire_header *h)
{
	struct peer_whole whole = impl->whole;
	struct wire_header up = *h;
	struct cursor in;

	impl->whole = (struct peer_whole){0};
	peer_unkeep(impl, whole.total);
	up.type = whole.type;
	up.body_len = whole.total;
	cursor_read(&in, whole.bytes, whole.total);
	peer_deliver_owned(impl, &up, &in, whole.bytes);
}

void peer_part_take(struct peer_impl *impl, const struct wire_header *h,
		    struct cursor *body)
{
	struct wire_part part;
	struct err why;
	int r = wire_part_get(body, &part);

	if (r >= 0)
		r = peer_parts_take(impl, &part);
	if (r < 0) {
		err_take(&why);
		peer_bring_down(impl, &why, true);
	} else if (impl->whole.got == impl->whole.total) {
		deliver(impl, h);
	}
}
