/* SPDX-License-Identifier: Apache-2.0 */
/* What peers claim of boards and to them, and daemons of the release before. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/cluster/record.h"
#include "tests/lib/board_net.h"
#include "tests/lib/peer_at.h"

/* ---- what others say ---- */

static struct peer *join(void)
{
	struct peer *peer = NULL;

	assert_int_equal(peers_dial(f.n[1].peers, endpoint(0), &peer), 0);
	run_for(S);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	return peer;
}

#define RAW(name, NAME, ...)                                                            \
	do {                                                                            \
		struct wire_##name m_ = __VA_ARGS__;                                    \
		uint8_t body_[9000];                                                    \
		struct cursor c_;                                                       \
		cursor_write(&c_, body_, sizeof(body_));                                \
		assert_int_equal(wire_##name##_put(&c_, &m_), 0);                       \
		assert_int_equal(peer_send_reliable(peer_at(f.n[1].peers, endpoint(0)), \
						    WIRE_T_##NAME, body_, c_.pos),      \
				 0);                                                    \
		run_for(20 * MS);                                                       \
	} while (0)

static struct wire_blob blob_of(const char *text)
{
	return (struct wire_blob){text, strlen(text)};
}

static void hostile_puts_are_refused(void **state)
{
	static char large[DIRECTORY_RECORD_MAX + 2];
	char instance[33];

	(void)state;
	join();
	memset(large, 'x', sizeof(large) - 1);
	RAW(board_put, BOARD_PUT, {.group = "", .record = blob_of("{}")});
	RAW(board_put, BOARD_PUT,
	    {.group = "g", .tp = 1u << 31, .record = blob_of("{}")});
	RAW(board_put, BOARD_PUT, {.group = "g", .worker = "-", .record = blob_of("{}")});
	RAW(board_put, BOARD_PUT, {.group = "g", .record = blob_of(large)});
	RAW(board_put, BOARD_PUT, {.group = "g", .record = {"a\0b", 3}});
	RAW(board_put, BOARD_PUT, {.group = "g", .load = blob_of("{}")});
	/* as another daemon, and with a name that is no instance */
	RAW(board_put, BOARD_PUT,
	    {.group = "kvd.daemons",
	     .worker = "00112233445566778899aabbccddeeff",
	     .record = blob_of("{}")});
	RAW(board_put, BOARD_PUT, {.group = "kvd.homes", .record = blob_of("{}")});
	assert_int_equal(board_count(f.n[0].board), 0);
	assert_int_equal(f.n[0].downs, 0);
	/* of itself it may say what it likes, for as long as the board allows */
	snprintf(instance, sizeof(instance), "%s",
		 peer_at(f.n[0].peers, endpoint(1))->instance_text);
	struct wire_board_put own = {
		.group = "kvd.daemons", .lease_ms = UINT64_MAX, .record = blob_of("{}")};

	strcpy(own.worker, instance);
	RAW(board_put, BOARD_PUT, own);
	assert_int_equal(board_count(f.n[0].board), 1);
	node_stop(1);
	run_for(f.options.lease_max_ns + 2 * S);
	assert_int_equal(board_count(f.n[0].board), 0);
	node_start(1);
}

static void body_cut_short_ends_the_peer(void **state)
{
	const struct wire_board_put m = {.group = "g", .record = {"{}", 2}};
	uint8_t body[256];
	struct cursor c;

	(void)state;
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_board_put_put(&c, &m), 0);
	for (size_t len = 0; len < c.pos; len += 7) {
		unsigned int downs = f.n[0].downs;

		join();
		assert_int_equal(peer_send_reliable(peer_at(f.n[1].peers, endpoint(0)),
						    WIRE_T_BOARD_PUT, body, len),
				 0);
		run_for(20 * MS);
		assert_int_equal(f.n[0].downs, downs + 1);
		assert_int_equal(f.n[0].why.code, ERR_PROTO);
		run_for(10 * S);
	}
}

static void floods_of_one_peer_are_bounded(void **state)
{
	char text[32];

	(void)state;
	node_stop(0);
	f.options.owner_entries_max = 20;
	f.options.owner_watches_max = 10;
	f.options.group_entries_max = 15;
	node_start(0);
	join();
	for (unsigned int i = 0; i < 100; i++)
		RAW(board_put, BOARD_PUT,
		    {.group = "g", .tp = i, .record = blob_of("{}")});
	assert_int_equal(board_count(f.n[0].board), 15);
	for (unsigned int i = 0; i < 100; i++)
		RAW(board_put, BOARD_PUT,
		    {.group = "h", .tp = i, .record = blob_of("{}")});
	assert_int_equal(board_count(f.n[0].board), 20);
	for (unsigned int i = 0; i < 100; i++) {
		struct wire_board_watch m = {.cookie = i};

		snprintf(text, sizeof(text), "w%u", i);
		strcpy(m.group, text);
		RAW(board_watch, BOARD_WATCH, m);
	}
	assert_int_equal(board_watches(f.n[0].board), 10);
	/* the same one again and again is one, and so is each answer */
	unsigned int tolds = f.n[1].tolds;

	for (unsigned int i = 0; i < 50; i++)
		RAW(board_watch, BOARD_WATCH, {.cookie = 3, .group = "w3"});
	assert_int_equal(board_watches(f.n[0].board), 10);
	assert_in_range(f.n[1].tolds - tolds, 1, 50);
	assert_int_equal(f.n[0].downs, 0);
	/* all of it goes with the peer and its lease, which it never named */
	node_stop(1);
	run_for(5 * S);
	assert_int_equal(board_watches(f.n[0].board) + board_count(f.n[0].board), 0);
	assert_int_equal(strmap_count(&f.n[0].board->groups), 0);
	assert_true(list_empty(&f.n[0].board->owners));
	node_start(1);
}

static void lines_that_break_make_no_more_room(void **state)
{
	(void)state;
	node_stop(0);
	f.options.owner_entries_max = 20;
	node_start(0);
	for (unsigned int n = 0; n < 4; n++) {
		unsigned int downs = f.n[0].downs;
		char group[8];

		snprintf(group, sizeof(group), "g%u", n);
		join();
		for (unsigned int i = 0; i < 20; i++) {
			struct wire_board_put m = {
				.tp = i, .lease_ms = 60000, .record = blob_of("{}")};

			strcpy(m.group, group);
			RAW(board_put, BOARD_PUT, m);
		}
		assert_int_equal(board_count(f.n[0].board), 20);
		assert_int_equal(peer_send_reliable(peer_at(f.n[1].peers, endpoint(0)),
						    WIRE_T_BOARD_PUT, "", 0),
				 0);
		run_for(20 * MS);
		assert_int_equal(f.n[0].downs, downs + 1);
		run_for(1 * S);
	}
}

/* ---- what a board says ---- */

static uint64_t last_cookie;

static int steal_cookie(void *owner, struct peer *peer, const struct wire_header *h,
			struct cursor *body)
{
	struct wire_board_watch m;

	(void)owner;
	(void)peer;
	if (h->type == WIRE_T_BOARD_WATCH && wire_board_watch_get(body, &m) == 0)
		last_cookie = m.cookie;
	return 0;
}

static void entry_bytes(struct cursor *c, unsigned int what, const char *worker,
			uint32_t tp, const char *record, size_t more)
{
	cursor_put_u16(
		c, (uint16_t)(1 + 2 + strlen(worker) + 16 + 8 + strlen(record) + more));
	cursor_put_u8(c, (uint8_t)what);
	cursor_put_str(c, worker);
	cursor_put_u32(c, tp);
	for (unsigned int i = 1; i < PLACE_AXES; i++)
		cursor_put_u32(c, 0);
	cursor_put_blob(c, record, strlen(record));
	cursor_put_blob(c, "", 0);
	for (size_t i = 0; i < more; i++)
		cursor_put_u8(c, 9);
}

/* Node 0 is a board of our own making. */
static void told(unsigned int flags, const struct cursor *entries, uint32_t count)
{
	struct wire_board_told m = {.cookie = last_cookie,
				    .flags = (uint8_t)flags,
				    .revision = 5,
				    .young_ms = UINT64_MAX};
	uint8_t blob[8192], body[9000];
	struct cursor c;

	cursor_write(&c, blob, sizeof(blob));
	cursor_put_u32(&c, count);
	cursor_put_bytes(&c, entries->base, entries->pos);
	m.entries = (struct wire_blob){blob, c.pos};
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_board_told_put(&c, &m), 0);
	assert_int_equal(peer_send_reliable(peer_at(f.n[0].peers, endpoint(1)),
					    WIRE_T_BOARD_TOLD, body, c.pos),
			 0);
	run_for(20 * MS);
}

static void hostile_board_is_checked(void **state)
{
	static struct net_seen seen;
	struct directory_state now;
	uint8_t bytes[8192];
	struct cursor c;

	(void)state;
	f.n[0].peers->callbacks.on_message = steal_cookie;
	assert_int_equal(directory_open(1, endpoint(0), NULL), 0);
	look(1, &seen, true);
	run_for(S);
	cursor_write(&c, bytes, sizeof(bytes));
	entry_bytes(&c, 1, "good", 0, "{}", 11); /* a newer board's: longer */
	entry_bytes(&c, 1, "-", 0, "{}", 0);
	entry_bytes(&c, 1, "a\tb", 0, "{}", 0);
	entry_bytes(&c, 1, "far", PLACE_SIZE_MAX, "{}", 0);
	entry_bytes(&c, 1, "empty", 0, "", 0);
	entry_bytes(&c, 2, "load of what is not there", 0, "", 0);
	entry_bytes(&c, 0, "gone, and never was", 0, "", 0);
	told(3, &c, 7);
	assert_int_equal(seen.count, 1);
	assert_int_equal(seen.synced, 1);
	f.n[1].directory->ops->state(f.n[1].directory, &now);
	assert_int_equal(now.refused, 5);
	/* nothing of it any more: held for as long as a young board may ask for at most
	 */
	cursor_write(&c, bytes, sizeof(bytes));
	told(3, &c, 0);
	assert_int_equal(seen.count, 1);
	run_for(610 * S);
	assert_int_equal(seen.count, 0);
	assert_int_equal(f.n[1].downs, 0);
	/* more entries than there are bytes */
	told(3, &c, UINT32_MAX);
	assert_int_equal(f.n[1].downs, 1);
	assert_int_equal(f.n[1].why.code, ERR_PROTO);
}

static void answers_that_nobody_asked_for_are_ignored(void **state)
{
	(void)state;
	join();
	directory_open(1, endpoint(0), NULL);
	run_for(S);
	struct wire_board_ack ack = {.cookie = 77, .code = ERR_EXIST};
	struct wire_board_told m = {.cookie = 78, .flags = 3};
	uint8_t body[600];
	struct cursor c;

	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_board_ack_put(&c, &ack), 0);
	assert_int_equal(peer_send_reliable(peer_at(f.n[0].peers, endpoint(1)),
					    WIRE_T_BOARD_ACK, body, c.pos),
			 0);
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_board_told_put(&c, &m), 0);
	assert_int_equal(peer_send_reliable(peer_at(f.n[0].peers, endpoint(1)),
					    WIRE_T_BOARD_TOLD, body, c.pos),
			 0);
	run_for(S);
	assert_int_equal(f.n[1].downs, 0);
}

/* ---- daemons of before ---- */

static struct wire_blob old_rank(uint8_t *buf, size_t size, uint32_t tp, uint32_t tp_size,
				 const char *at)
{
	struct cursor c;

	cursor_write(&c, buf, size);
	cursor_put_u16(&c, (uint16_t)(32 + 6 + strlen(at) + 2 + 3 + 4));
	for (unsigned int i = 0; i < PLACE_AXES; i++) {
		cursor_put_u32(&c, i ? 0 : tp);
		cursor_put_u32(&c, i ? 1 : tp_size);
	}
	cursor_put_str(&c, at);
	cursor_put_str(&c, "kv");
	cursor_put_str(&c, "sum");
	cursor_put_u32(&c, 7); /* a later release's */
	assert_false(c.bad);
	return (struct wire_blob){buf, c.pos};
}

static struct wire_route route;
static uint8_t route_ranks[4096];

static int keep_route(void *owner, struct peer *peer, const struct wire_header *h,
		      struct cursor *body)
{
	(void)owner;
	(void)peer;
	if (h->type == WIRE_T_ROUTE) {
		assert_int_equal(wire_route_get(body, &route), 0);
		assert_in_range(route.ranks.len, 0, sizeof(route_ranks));
		if (route.ranks.len)
			memcpy(route_ranks, route.ranks.data, route.ranks.len);
	}
	return 0;
}

static void daemon_of_before_publishes_and_asks(void **state)
{
	static struct net_seen seen;
	struct record record;
	uint8_t buf[512];
	static struct net_said said;
	struct cursor c;

	(void)state;
	directory_close(1);
	f.n[1].peers->callbacks.on_message = keep_route;
	join();
	look(2, &seen, false);
	RAW(route_publish, ROUTE_PUBLISH,
	    {.cookie = 5,
	     .ttl_ms = 5000,
	     .group = "prefill",
	     .rank = old_rank(buf, sizeof(buf), 1, 2, endpoint(1))});
	assert_int_equal(seen.count, 1);
	const struct roster_entry *entry =
		roster_find(&board_group_find(f.n[0].board, "prefill")->roster,
			    &(struct place){.group = "prefill", .rank = {1}});

	assert_non_null(entry);
	assert_int_equal(record_read(entry->record, &record), 0);
	assert_string_equal(record.endpoint, endpoint(1));
	assert_string_equal(record.pools[0].name, "kv");
	assert_string_equal(record.summary, "sum");
	assert_int_equal(record.size[PLACE_TP], 2);
	/* what newer ones say, it reads */
	record_init(&record);
	strcpy(record.instance, "00112233445566778899aabbccddeeff");
	strcpy(record.endpoint, endpoint(3));
	char text[DIRECTORY_RECORD_MAX];

	assert_int_equal(record_make(&record, text), 0);
	must_say(3, &said, (struct place){.group = "prefill"}, text);
	RAW(route_query, ROUTE_QUERY, {.cookie = 9, .group = "prefill"});
	assert_int_equal(route.cookie, 9);
	assert_int_equal(route.code, 0);
	cursor_read(&c, route_ranks, route.ranks.len);
	assert_int_equal(cursor_get_u32(&c), 2);
	RAW(route_query, ROUTE_QUERY, {.cookie = 10, .group = "nobody"});
	assert_int_equal(route.code, ERR_NOTFOUND);
	/* mistakes of its engine, and its own */
	RAW(route_publish, ROUTE_PUBLISH,
	    {.cookie = 6,
	     .group = "prefill",
	     .rank = old_rank(buf, sizeof(buf), 2, 2, endpoint(1))});
	RAW(route_publish, ROUTE_PUBLISH,
	    {.cookie = 6,
	     .group = "prefill",
	     .rank = old_rank(buf, sizeof(buf), 0, 2, "file:///etc/x")});
	assert_int_equal(board_count(f.n[0].board), 2);
	RAW(route_withdraw, ROUTE_WITHDRAW,
	    {.group = "prefill", .rank = old_rank(buf, sizeof(buf), 1, 2, endpoint(1))});
	assert_int_equal(board_count(f.n[0].board), 1);
	assert_int_equal(f.n[0].downs, 0);
	RAW(route_publish, ROUTE_PUBLISH, {.group = "prefill", .rank = {buf, 9}});
	assert_int_equal(f.n[0].downs, 1);
	f.n[1].directory = NULL;
}

#define TEST(name) \
	cmocka_unit_test_setup_teardown(name, board_net_setup, board_net_teardown)
#define BARE(name) \
	cmocka_unit_test_setup_teardown(name, board_net_setup_bare, board_net_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		BARE(hostile_puts_are_refused),
		BARE(body_cut_short_ends_the_peer),
		BARE(floods_of_one_peer_are_bounded),
		BARE(lines_that_break_make_no_more_room),
		BARE(hostile_board_is_checked),
		BARE(answers_that_nobody_asked_for_are_ignored),
		TEST(daemon_of_before_publishes_and_asks),
	};

	log_set_level(LOG_LEVEL_ERROR);
	return cmocka_run_group_tests_name("board_hostile", tests, NULL, NULL);
}
