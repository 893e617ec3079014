/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ROUTE messages, as the meeting point receives them and as the asker does.
 *
 * What we tell others goes out without a promise (peer_send): an answer that
 * does not fit into the line now is asked for again, and so a peer that asks
 * faster than it reads fills no memory of ours.
 *
 * A wrong group, place or endpoint in a publication is the publisher's engine's
 * mistake and is answered; a body that cannot be decoded, or an answer that our
 * own check would have refused, breaks the protocol and ends the peer.
 */
#include "daemon/bootstrap/bootstrap_impl.h"

#include <errno.h>
#include <stdio.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define TTL_MIN_NS LOOP_NS_PER_S
#define RECORD_MIN_BYTES 40u

static int encode_group(const struct board_group *group, uint8_t **blob_p, size_t *len_p)
{
	size_t size = sizeof(uint32_t) + group->bytes;
	uint8_t *blob = mem_zalloc(size);
	const struct board_entry *entry;
	struct cursor c;

	if (!blob)
		return err_pass(-ENOMEM);
	cursor_write(&c, blob, size);
	cursor_put_u32(&c, group->count);
	list_foreach(entry, &group->entries, of_group)
		rank_put(&c, &entry->rank);
	*blob_p = blob;
	*len_p = c.pos;
	return 0;
}

static void answer_query(struct bootstrap *b, struct peer *peer,
			 const struct wire_route_query *query)
{
	const struct board_group *group = board_group(&b->board, query->group);
	struct wire_route m = {.cookie = query->cookie};
	cleanup_free uint8_t *blob = NULL;
	cleanup_free uint8_t *body = NULL;
	size_t len = 0;
	struct cursor c;

	if (!group)
		err_raise(ERR_NOTFOUND, "group '%s': no rank is published", query->group);
	if (!group || encode_group(group, &blob, &len) < 0) {
		m.code = (uint32_t)err_last()->code;
		snprintf(m.text, sizeof(m.text), "%s", err_last()->text);
		err_clear();
	}
	m.ranks = (struct wire_blob){blob, len};
	body = mem_zalloc(sizeof(m) + len);
	cursor_write(&c, body, body ? sizeof(m) + len : 0);
	if (!body || wire_route_put(&c, &m) < 0 ||
	    peer_send(peer, WIRE_T_ROUTE, body, c.pos) < 0) {
		log_warn("bootstrap", peer->shown, "an answer was not sent",
			 "group='%s' why='%s'", query->group, err_last()->text);
		err_clear();
	}
}

static int on_query(struct bootstrap *b, struct peer *peer, struct cursor *body)
{
	struct wire_route_query m;
	int r = wire_route_query_get(body, &m);

	if (r < 0)
		return err_pass(r);
	answer_query(b, peer, &m);
	return 0;
}

static struct bootstrap_call *query_of(struct bootstrap *b, const struct peer *peer,
				       uint64_t cookie)
{
	struct bootstrap_call *call;

	list_foreach(call, &b->calls, link) {
		if (call->query && call->peer == peer && call->cookie == cookie)
			return call;
	}
	return NULL;
}

static int decode_ranks(const struct wire_blob *blob, const char *group,
			struct bootstrap_rank **ranks_p, unsigned int *count_p)
{
	cleanup_free struct bootstrap_rank *ranks = NULL;
	struct cursor c;
	uint32_t count;
	int r;

	cursor_read(&c, blob->data, blob->len);
	count = cursor_get_count(&c, BOOTSTRAP_RANKS_MAX, RECORD_MIN_BYTES);
	r = cursor_check(&c, "ROUTE: field ranks");
	if (r < 0)
		return err_pass(r);
	ranks = mem_calloc(count, sizeof(*ranks));
	if (!ranks)
		return err_pass(-ENOMEM);
	for (uint32_t i = 0; i < count; i++) {
		rank_get(&c, &ranks[i]);
		r = cursor_check(&c, "ROUTE: field ranks");
		if (r == 0)
			r = board_check(group, &ranks[i]);
		if (r < 0)
			return err_prefix(err_raise(ERR_PROTO, "%s", err_last()->text),
					  "ROUTE: rank %u", i);
	}
	*ranks_p = mem_steal(ranks);
	*count_p = count;
	return 0;
}

static int on_route(struct bootstrap *b, struct peer *peer, struct cursor *body)
{
	cleanup_free struct bootstrap_rank *ranks = NULL;
	struct bootstrap_call *call;
	unsigned int count = 0;
	struct wire_route m;
	struct err err;
	int r;

	r = wire_route_get(body, &m);
	if (r < 0)
		return err_pass(r);
	call = query_of(b, peer, m.cookie);
	if (!call)
		return 0; /* too late */
	if (m.code) {
		err_set(&err, err_from_wire(m.code),
			"meeting point %.100s says: \"%.190s\"", peer->shown, m.text);
		bootstrap_call_finish(call, &err, NULL, 0);
		return 0;
	}
	r = decode_ranks(&m.ranks, call->group, &ranks, &count);
	if (r == 0) {
		bootstrap_call_finish(call, NULL, ranks, count);
		return 0;
	}
	err = *err_last();
	bootstrap_call_finish(call, &err, NULL, 0);
	if (err.code != ERR_PROTO)
		return 0;
	return err_reraise(&err);
}

static int on_publish(struct bootstrap *b, struct peer *peer, struct cursor *body)
{
	struct wire_route_publish m;
	struct wire_route_publish_ack ack = {.code = 0};
	uint8_t buf[sizeof(ack) + 16];
	struct bootstrap_rank rank;
	uint64_t ttl_ns = b->options.ttl_ns;
	struct cursor c;
	int r;

	r = wire_route_publish_get(body, &m);
	if (r < 0)
		return err_pass(r);
	cursor_read(&c, m.rank.data, m.rank.len);
	rank_get(&c, &rank);
	r = cursor_check(&c, "ROUTE_PUBLISH: field rank");
	if (r < 0)
		return err_pass(r);
	if (m.ttl_ms < ttl_ns / LOOP_NS_PER_MS)
		ttl_ns = m.ttl_ms * LOOP_NS_PER_MS;
	if (ttl_ns < TTL_MIN_NS)
		ttl_ns = TTL_MIN_NS;
	ack.cookie = m.cookie;
	if (board_put(&b->board, 0, peer, m.group, &rank, loop_now_ns(b->loop) + ttl_ns) <
	    0) {
		ack.code = (uint32_t)err_last()->code;
		snprintf(ack.text, sizeof(ack.text), "%s", err_last()->text);
		err_clear();
	}
	bootstrap_tick_start(b);
	cursor_write(&c, buf, sizeof(buf));
	if (wire_route_publish_ack_put(&c, &ack) < 0 ||
	    peer_send(peer, WIRE_T_ROUTE_PUBLISH_ACK, buf, c.pos) < 0)
		err_clear(); /* it publishes again */
	return 0;
}

static int on_publish_ack(struct bootstrap *b, struct peer *peer, struct cursor *body)
{
	struct wire_route_publish_ack m;
	struct publication *pub, *found = NULL;
	struct bootstrap_call *call;
	struct err err;
	int r;

	r = wire_route_publish_ack_get(body, &m);
	if (r < 0)
		return err_pass(r);
	list_foreach(pub, &b->publications, link) {
		if (pub->peer == peer && pub->cookie == m.cookie)
			found = pub;
	}
	if (!found)
		return 0; /* withdrawn meanwhile, or an older one's */
	call = found->call;
	if (!m.code) {
		found->established = true;
	} else {
		err_set(&err, err_from_wire(m.code),
			"meeting point %.100s says: \"%.190s\"", peer->shown, m.text);
		log_warn("bootstrap", peer->shown, "a rank is not taken",
			 "group='%s' why='%s'", found->group, m.text);
		if (!found->established)
			bootstrap_publication_free(b, found);
	}
	if (call)
		bootstrap_call_finish(call, m.code ? &err : NULL, NULL, 0);
	return 0;
}

static int on_withdraw(struct bootstrap *b, struct peer *peer, struct cursor *body)
{
	struct wire_route_withdraw m;
	struct bootstrap_rank rank;
	struct cursor c;
	int r;

	r = wire_route_withdraw_get(body, &m);
	if (r < 0)
		return err_pass(r);
	cursor_read(&c, m.rank.data, m.rank.len);
	rank_get(&c, &rank);
	r = cursor_check(&c, "ROUTE_WITHDRAW: field rank");
	if (r < 0)
		return err_pass(r);
	board_take(&b->board, 0, peer, m.group, &rank);
	return 0;
}

int bootstrap_on_message(struct bootstrap *b, struct peer *peer,
			 const struct wire_header *header, struct cursor *body)
{
	static int (*const handlers[WIRE_T_END])(struct bootstrap *, struct peer *,
						 struct cursor *) = {
		[WIRE_T_ROUTE_QUERY] = on_query,
		[WIRE_T_ROUTE] = on_route,
		[WIRE_T_ROUTE_PUBLISH] = on_publish,
		[WIRE_T_ROUTE_PUBLISH_ACK] = on_publish_ack,
		[WIRE_T_ROUTE_WITHDRAW] = on_withdraw,
	};

	if (header->type >= WIRE_T_END || !handlers[header->type])
		return err_raise(ERR_PROTO, "%s is no message of the bootstrap",
				 wire_type_name(header->type));
	return err_pass(handlers[header->type](b, peer, body));
}
