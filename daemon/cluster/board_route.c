/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ROUTE messages, of daemons that have no PEER_FEATURE_BOARD: they publish ranks of a
 * group here and ask for them. A rank is an entry whose worker is "" and whose record has
 * what they know of: sizes, endpoint, pool and summary.
 *
 * A rank on the wire: u16 length of what follows, tp, pp, dp, cp: u32 rank, u32 size; str
 * endpoint, str pool, str summary.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/cluster/board_impl.h"
#include "daemon/cluster/record.h"

#define RANK_FIXED (2u + 8u * 4u + 3u * 2u)
#define ROUTE_FIXED 64u /* of the message besides: no text goes with ranks */
#define RANK_MAX (RANK_FIXED + LINK_ENDPOINT_MAX + 64u + RECORD_SUMMARY_MAX)

static void rank_put(struct cursor *out, const struct place *place,
		     const struct record *record)
{
	const char *pool = record->pool_count ? record->pools[0].name : "";
	char endpoint[LINK_ENDPOINT_MAX];

	record_dial(record, endpoint);
	cursor_put_u16(out, (uint16_t)(RANK_FIXED - 2 + strlen(endpoint) + strlen(pool) +
				       strlen(record->summary)));
	for (unsigned int i = 0; i < PLACE_AXES; i++) {
		cursor_put_u32(out, place->rank[i]);
		cursor_put_u32(out, record->size[i]);
	}
	cursor_put_str(out, endpoint);
	cursor_put_str(out, pool);
	cursor_put_str(out, record->summary);
}

/* ERR_PROTO: it cannot be decoded. ERR_INVAL: an engine's mistake. */
static int rank_get(const struct wire_blob *blob, const struct board_owner *owner,
		    struct place *place, struct record *record)
{
	char endpoint[LINK_ENDPOINT_MAX];
	struct cursor in, c;
	const void *bytes;
	size_t len;
	int r;

	record_init(record);
	cursor_read(&in, blob->data, blob->len);
	len = cursor_get_u16(&in);
	bytes = cursor_get_bytes(&in, len);
	cursor_read(&c, bytes, bytes ? len : 0);
	for (unsigned int i = 0; i < PLACE_AXES; i++) {
		place->rank[i] = cursor_get_u32(&c);
		record->size[i] = cursor_get_u32(&c);
	}
	cursor_get_str(&c, endpoint, sizeof(endpoint));
	cursor_get_str(&c, record->pools[0].name, sizeof(record->pools[0].name));
	cursor_get_str(&c, record->summary, sizeof(record->summary));
	r = cursor_check(&c, "ROUTE: field rank");
	if (r < 0)
		return err_pass(r);
	wire_text_clean(endpoint);
	wire_text_clean(record->pools[0].name);
	wire_text_clean(record->summary);
	record->pool_count = *record->pools[0].name != '\0';
	snprintf(record->instance, sizeof(record->instance), "%s", owner->instance_text);
	r = record_reach(record, endpoint);
	if (r == 0)
		r = record_check(record, place);
	return err_pass(r);
}

static void route_group(struct place *place, const char *group)
{
	*place = (struct place){.worker = ""};
	snprintf(place->group, sizeof(place->group), "%.*s", (int)PLACE_GROUP_MAX - 1,
		 strlen(group) < PLACE_GROUP_MAX ? group : "");
}

/* ---- a query ---- */

static int encode_group(const struct board *board, const struct board_group *group,
			uint8_t **blob_p, size_t *len_p)
{
	size_t size = board->options.message_bytes - WIRE_HEADER_BYTES - ROUTE_FIXED;
	cleanup_free struct record *record = mem_alloc(sizeof(*record));
	cleanup_free uint8_t *blob = mem_alloc(size);
	const struct roster_entry *entry;
	uint32_t count = 0;
	struct cursor c;

	if (!record || !blob)
		return err_pass(-ENOMEM);
	cursor_write(&c, blob, size);
	cursor_put_u32(&c, 0);
	for (entry = roster_after(&group->roster, 0); entry;
	     entry = roster_next(&group->roster, entry)) {
		if (!entry->record)
			continue;
		if (record_read(entry->record, record) < 0) {
			err_clear();
			continue;
		}
		rank_put(&c, &entry->place, record);
		count++;
	}
	if (c.bad)
		return err_raise(ERR_TOOBIG,
				 "group '%s': its %u ranks are more than a message to "
				 "an older daemon holds",
				 group->name, group->roster.count);
	*len_p = c.pos;
	cursor_write(&c, blob, sizeof(uint32_t));
	cursor_put_u32(&c, count);
	*blob_p = mem_steal(blob);
	return 0;
}

static int on_query(const struct board *board, struct board_owner *owner,
		    struct cursor *body)
{
	const struct board_group *group;
	struct wire_route m = {.code = 0};
	cleanup_free uint8_t *ranks = NULL;
	cleanup_free uint8_t *out = NULL;
	struct wire_route_query query;
	struct cursor c;
	size_t len = 0;
	int r = wire_route_query_get(body, &query);

	if (r < 0)
		return err_pass(r);
	m.cookie = query.cookie;
	group = board_group_find(board, query.group);
	if (!group || !group->roster.count)
		r = err_raise(ERR_NOTFOUND, "group '%s': no rank is published",
			      query.group);
	else
		r = encode_group(board, group, &ranks, &len);
	if (r < 0) {
		m.code = (uint32_t)err_last()->code;
		snprintf(m.text, sizeof(m.text), "%s", err_last()->text);
		err_clear();
	}
	m.ranks = (struct wire_blob){ranks, len};
	out = mem_alloc(sizeof(m) + len);
	cursor_write(&c, out, out ? sizeof(m) + len : 0);
	if (!out || wire_route_put(&c, &m) < 0 ||
	    board_say(owner, WIRE_T_ROUTE, out, c.pos) < 0)
		err_clear(); /* it asks again */
	return 0;
}

/* ---- ranks ---- */

static void route_ack(struct board_owner *owner, uint64_t cookie, bool refused)
{
	struct wire_route_publish_ack ack = {.cookie = cookie};
	uint8_t buf[sizeof(ack) + 16];
	struct cursor c;

	if (refused) {
		ack.code = (uint32_t)err_last()->code;
		snprintf(ack.text, sizeof(ack.text), "%s", err_last()->text);
		err_clear();
	}
	cursor_write(&c, buf, sizeof(buf));
	if (wire_route_publish_ack_put(&c, &ack) < 0 ||
	    board_say(owner, WIRE_T_ROUTE_PUBLISH_ACK, buf, c.pos) < 0)
		err_clear(); /* it publishes again */
}

static int on_publish(struct board *board, struct board_owner *owner, struct cursor *body)
{
	cleanup_free struct record *record = mem_alloc(sizeof(*record));
	char text[DIRECTORY_RECORD_MAX];
	struct wire_route_publish m;
	struct place place;
	int r = wire_route_publish_get(body, &m);

	if (r < 0)
		return err_pass(r);
	route_group(&place, m.group);
	r = record ? rank_get(&m.rank, owner, &place, record) : -ENOMEM;
	if (r < 0 && err_last()->code == ERR_PROTO)
		return err_pass(r);
	if (r == 0)
		r = record_make(record, text);
	if (r == 0)
		r = board_put(board, owner, &place, text, NULL,
			      m.ttl_ms < UINT32_MAX ? m.ttl_ms * LOOP_NS_PER_MS
						    : UINT64_MAX);
	route_ack(owner, m.cookie, r < 0);
	return 0;
}

static int on_withdraw(struct board *board, struct board_owner *owner,
		       struct cursor *body)
{
	cleanup_free struct record *record = mem_alloc(sizeof(*record));
	struct wire_route_withdraw m;
	struct place place;
	int r = wire_route_withdraw_get(body, &m);

	if (r < 0)
		return err_pass(r);
	route_group(&place, m.group);
	r = record ? rank_get(&m.rank, owner, &place, record) : -ENOMEM;
	if (r < 0 && err_last()->code == ERR_PROTO)
		return err_pass(r);
	if (r < 0)
		err_clear(); /* there is no such rank */
	else
		board_take(board, owner, &place);
	return 0;
}

int board_on_route(struct board *board, struct board_owner *owner, unsigned int type,
		   struct cursor *body)
{
	switch (type) {
	case WIRE_T_ROUTE_QUERY:
		return err_pass(on_query(board, owner, body));
	case WIRE_T_ROUTE_PUBLISH:
		return err_pass(on_publish(board, owner, body));
	case WIRE_T_ROUTE_WITHDRAW:
		return err_pass(on_withdraw(board, owner, body));
	default:
		return 0; /* answers to nothing that this daemon asked */
	}
}
