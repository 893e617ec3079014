/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Names in requests on a data line. The line itself is authenticated, so its other end is
 * a daemon of the cluster; but it may be wrong, late, or another's. A chunk is valid only
 * from the peer and pool that the room requested, for the pool and in the live
 * generations, if both sides make the same plan. In-process cluster; the forger posts
 * requests on its own, valid line.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/room/room.h"
#include "daemon/room/room_wire.h"
#include "daemon/room/rooms.h"
#include "proto/kvd_status.h"
#include "tests/lib/accounts.h"
#include "tests/lib/cluster.h"

#define ROOM 5u
#define FORGED_BYTES 64u

/* 0 sends to 1; 2 has a line to 1 and no business with the room */
struct world {
	struct cluster c;
	struct session *engines[3];
	struct cache caches[3];
	struct remote *lines[3]; /* of nodes 0 and 2: node 1 */
	struct room *room;	 /* node 1's */
	struct chunk_header good;
};

static void open_recv(struct world *w, unsigned int room, unsigned int from)
{
	cluster_ok(&w->c, w->engines[1],
		   "{'cmd':'room.open','room':'%u','role':'recv','pool':%llu,"
		   "'sources':['%s']}",
		   room, (unsigned long long)w->caches[1].pool,
		   w->c.nodes[from].endpoint);
}

static void open_send(struct world *w, unsigned int room, unsigned int from)
{
	cluster_ok(&w->c, w->engines[from],
		   "{'cmd':'room.open','room':'%u','role':'send','pool':%llu}", room,
		   (unsigned long long)w->caches[from].pool);
}

static void bind(struct world *w, unsigned int room, const char *pages)
{
	cluster_ok(&w->c, w->engines[1],
		   "{'cmd':'room.bind','room':'%u','views':{'kv':{'pages':[%s]}}}", room,
		   pages);
}

static void send_all(struct world *w, unsigned int room, unsigned int from,
		     const char *pages)
{
	cluster_ok(&w->c, w->engines[from],
		   "{'cmd':'room.send','room':'%u','seq':0,'last':true,'views':{'kv':{"
		   "'pages':[%s]}}}",
		   room, pages);
}

/* A room of these two connects them. */
static void meet(struct world *w)
{
	open_recv(w, 6, 2);
	open_send(w, 6, 2);
	bind(w, 6, "0");
	send_all(w, 6, 2, "0");
	cluster_until_state(&w->c, w->engines[1], "recv", 6, KVD_SUCCESS);
	cluster_until_state(&w->c, w->engines[2], "send", 6, KVD_SUCCESS);
}

static struct room *room_of(struct world *w, unsigned int node, enum room_role role)
{
	return rooms_find(rooms_of(&w->c.nodes[node].kvd), w->engines[node], role, ROOM);
}

static int setup(void **state)
{
	static const char *const names[] = {"prefill", "decode", "forger"};
	struct world *w = calloc(1, sizeof(*w));
	struct room *sender;

	cluster_new(&w->c, 3, 3);
	for (unsigned int i = 0; i < 3; i++) {
		w->engines[i] = cluster_engine(&w->c, i, names[i]);
		w->caches[i] = cluster_geometry;
		cluster_cache(&w->c, w->engines[i], "kv", 0, &w->caches[i]);
		memset(w->caches[i].base, (int)(0x11 * (i + 1)), w->caches[i].bytes);
	}
	meet(w);
	open_recv(w, ROOM, 0);
	bind(w, ROOM, "7,2,8,12");
	open_send(w, ROOM, 0);
	cluster_until_state(&w->c, w->engines[0], "send", ROOM, KVD_WAITING_FOR_INPUT);
	cluster_run(&w->c, LOOP_NS_PER_S); /* the answer has arrived, too */
	for (unsigned int i = 0; i < 3; i += 2)
		assert_int_equal(handshake_reach(w->c.nodes[i].kvd.handshake,
						 w->c.nodes[1].endpoint, NULL,
						 &w->lines[i]),
				 0);
	w->room = room_of(w, 1, ROOM_RECV);
	sender = room_of(w, 0, ROOM_SEND);
	w->good = (struct chunk_header){
		.room = ROOM,
		.recv_gen = w->room->gen,
		.send_gen = sender->gen,
		.src_pool = w->caches[0].pool,
		.dst_pool = w->caches[1].pool,
		.bytes = FORGED_BYTES,
	};
	*state = w;
	return 0;
}

static int teardown(void **state)
{
	struct world *w = *state;

	for (unsigned int i = 0; i < 3; i += 2)
		handshake_release(w->lines[i]);
	cluster_free(&w->c);
	for (unsigned int i = 0; i < 3; i++)
		cache_close(&w->caches[i]);
	free(w);
	return 0;
}

/* ---- requests that no room made ---- */

static bool forged_done;

static void on_done(struct xp_op *op)
{
	(void)op;
	forged_done = true;
}

static bool is_done(void *arg)
{
	(void)arg;
	return forged_done;
}

static struct plan *some_bytes(void)
{
	struct plan_builder *builder;
	struct plan *plan;

	assert_int_equal(plan_builder_new(&builder), 0);
	assert_int_equal(plan_builder_add(builder, &(struct plan_run){.len = FORGED_BYTES,
								      .count = 1}),
			 0);
	assert_int_equal(plan_builder_finish(builder, &plan), 0);
	plan_builder_free(builder);
	return plan;
}

/* The answer to the request. */
static struct err request(struct world *w, unsigned int from, enum xp_kind kind,
			  const void *header, size_t len)
{
	struct remote *line = w->lines[from];
	const struct remote_pool *pool = handshake_pool_by_id(line, w->caches[1].pool);
	struct plan *plan = some_bytes();
	struct xp_op op = {
		.kind = kind, .header = header, .header_len = len, .on_done = on_done};
	struct pool *own = idmap_get(&w->engines[from]->pools, w->caches[from].pool);

	assert_non_null(pool);
	op.sides = (struct xp_sides){
		.plan = plan,
		.src = handshake_local_buffers(own, line),
		.src_count = own->layout->buffer_count,
		.dst = pool->buffers,
		.dst_count = pool->layout->buffer_count,
	};
	if (kind == XP_READ) {
		op.sides.dst = op.sides.src;
		op.sides.src = pool->buffers;
	}
	forged_done = false;
	assert_int_equal(line->transport->ops->post(line->xp, &op), 0);
	cluster_until(&w->c, is_done, NULL, "an answer");
	plan_free(plan);
	return op.err;
}

static struct err forge(struct world *w, unsigned int from, enum xp_kind kind,
			const struct chunk_header *h)
{
	struct room_maps none = {0};
	uint8_t *header;
	struct err err;
	size_t len;

	assert_int_equal(chunk_header_make(h, &none, &header, &len), 0);
	err = request(w, from, kind, header, len);
	mem_free(header);
	return err;
}

static void refused(const struct err *err, enum err_code code, const char *words)
{
	if (err->code != code || !strstr(err->text, words))
		fail_msg("%s: %s; not %s: %s", err_name(err->code), err->text,
			 err_name(code), words);
}

static void assert_untouched(struct world *w)
{
	const struct cache *c = &w->caches[1];

	for (uint64_t i = 0; i < c->bytes; i++) /* 0x33: page 0, of room 6 */
		if (c->base[i] != 0x22 && c->base[i] != 0x33)
			fail_msg("byte %ju is %x", (uintmax_t)i, c->base[i]);
}

static void chunk_forged_has_no_effect(void **state)
{
	struct world *w = *state;
	struct {
		unsigned int from;
		enum xp_kind kind;
		uint64_t *what, wrong;
		enum err_code code;
		const char *words;
	} cases[] = {
		/* all is valid except the sender */
		{2, XP_WRITE, &w->good.seq, 0, ERR_NOTFOUND, "has no source"},
		/* a pool of the forger's own, which the room has not asked either */
		{2, XP_WRITE, &w->good.src_pool, w->caches[2].pool, ERR_NOTFOUND,
		 "has no source"},
		{0, XP_WRITE, &w->good.src_pool, 999, ERR_NOTFOUND, "has no source"},
		{0, XP_WRITE, &w->good.recv_gen, w->good.recv_gen ^ 1, ERR_NOTFOUND,
		 "no such room"},
		{0, XP_WRITE, &w->good.recv_gen, 0, ERR_NOTFOUND, "no such room"},
		{0, XP_WRITE, &w->good.send_gen, w->good.send_gen ^ 1, ERR_RESTART,
		 "another generation"},
		{0, XP_WRITE, &w->good.dst_pool, 999, ERR_STATE, "did not request"},
		{0, XP_WRITE, &w->good.room, ROOM + 1, ERR_STATE, "did not request"},
		/* a receiver's memory is not to be read */
		{0, XP_READ, &w->good.seq, 0, ERR_NOTFOUND, "no such room"},
	};

	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		uint64_t was = *cases[i].what;
		struct err err;

		*cases[i].what = cases[i].wrong;
		err = forge(w, cases[i].from, cases[i].kind, &w->good);
		*cases[i].what = was;
		refused(&err, cases[i].code, cases[i].words);
		assert_untouched(w);
		assert_true(room_live(w->room));
	}
	send_all(w, ROOM, 0, "3,4,9,1");
	cluster_until_state(&w->c, w->engines[1], "recv", ROOM, KVD_SUCCESS);
	cluster_until_state(&w->c, w->engines[0], "send", ROOM, KVD_SUCCESS);
	assert_int_equal(*cache_at(&w->caches[1], 0, 0, 7, 0, 0, 0), 0x11);
}

/* The right sender, of the live generation, with a plan that differs from ours: the
 * room cannot reach the agreed result, and ends; nothing of it was written. */
static void chunk_with_another_plan_fails_the_room_untouched(void **state)
{
	struct world *w = *state;
	struct err err = forge(w, 0, XP_WRITE, &w->good);

	refused(&err, ERR_PLAN, "bytes planned by the requesting daemon");
	cluster_until_state(&w->c, w->engines[1], "recv", ROOM, KVD_FAILED);
	refused(w->room->error, ERR_PLAN, "bytes planned by the requesting daemon");
	assert_untouched(w);
}

/* The room is over: its number and generations, known to everybody, open nothing. */
static void chunk_after_the_end_is_nobodys(void **state)
{
	struct world *w = *state;
	struct err err;

	cluster_ok(&w->c, w->engines[1],
		   "{'cmd':'room.abort','room':'%u','reason':'enough'}", ROOM);
	cluster_until_state(&w->c, w->engines[1], "recv", ROOM, KVD_FAILED);
	err = forge(w, 0, XP_WRITE, &w->good); /* the sender does not know of it yet */
	refused(&err, ERR_ABORTED, "enough");
	cluster_ok(&w->c, w->engines[1], "{'cmd':'room.close','room':'%u'}", ROOM);
	cluster_run(&w->c, LOOP_NS_PER_S);
	err = forge(w, 0, XP_WRITE, &w->good);
	refused(&err, ERR_NOTFOUND, "no such room");
	open_recv(w, ROOM, 0); /* the same number again */
	bind(w, ROOM, "7,2,8,12");
	cluster_run(&w->c, LOOP_NS_PER_S);
	err = forge(w, 0, XP_WRITE, &w->good);
	refused(&err, ERR_NOTFOUND, "no such room");
	assert_untouched(w);
}

/* Bytes that are no header at all, and every beginning of a right one. */
static void header_truncated_or_garbage_is_refused(void **state)
{
	struct world *w = *state;
	struct room_maps none = {0};
	uint8_t garbage[128], *header;
	struct err err;
	size_t len;

	assert_int_equal(chunk_header_make(&w->good, &none, &header, &len), 0);
	for (size_t cut = 0; cut < len; cut += cut < 20 ? 1 : 9) {
		err = request(w, 2, XP_WRITE, header, cut);
		assert_int_not_equal(err.code, ERR_OK);
	}
	for (unsigned int i = 0; i < 64; i++) {
		loop_random(w->c.loop, garbage, sizeof(garbage));
		garbage[0] = (uint8_t)(i % 8);
		err = request(w, 2, i % 2 ? XP_WRITE : XP_READ, garbage, sizeof(garbage));
		assert_int_not_equal(err.code, ERR_OK);
	}
	mem_free(header);
	assert_untouched(w);
	assert_true(room_live(w->room));
}

/* ---- pages ---- */

static struct remote *remote_at(struct world *w, unsigned int node, unsigned int of)
{
	struct remote *remote;

	list_foreach(remote, handshake_remotes(w->c.nodes[node].kvd.handshake), link) {
		if (strcmp(remote->peer->endpoint, w->c.nodes[of].endpoint) == 0)
			return remote;
	}
	fail_msg("node %u does not know %u", node, of);
	return NULL;
}

/* Of one daemon, at a node. */
static uint64_t pages_held(struct world *w, unsigned int node, unsigned int of)
{
	return remote_at(w, node, of)->account->bytes[ACCOUNT_PAGES];
}

static void pages_of_a_request_are_counted_until_its_room_is_closed(void **state)
{
	struct world *w = *state;

	assert_true(pages_held(w, 0, 1) >= 4 * sizeof(uint32_t));
	send_all(w, ROOM, 0, "3,4,9,1");
	cluster_until_state(&w->c, w->engines[1], "recv", ROOM, KVD_SUCCESS);
	cluster_until_state(&w->c, w->engines[0], "send", ROOM, KVD_SUCCESS);
	cluster_ok(&w->c, w->engines[0], "{'cmd':'room.close','room':'%u','role':'send'}",
		   ROOM);
	cluster_ok(&w->c, w->engines[1], "{'cmd':'room.close','room':'%u','role':'recv'}",
		   ROOM);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(pages_held(w, 0, 1), 0);
	assert_int_equal(pages_held(w, 1, 0), 0);
}

/* Requests of many pages that never end are in order, each for itself. */
static void pages_beyond_peer_limit_fail_its_room(void **state)
{
	struct world *w = *state;
	struct remote *remote = remote_at(w, 1, 0);
	struct charge filler = {0};
	uint32_t pages[] = {3, 4};
	struct room_map map = {.view = "kv",
			       .token_end = 8,
			       .layers = {0, UINT32_MAX},
			       .pages = pages,
			       .page_count = ARRAY_LEN(pages)};
	struct room_maps maps = {.maps = &map, .count = 1};
	uint8_t *header;
	struct err err;
	size_t len;

	account_leave(remote->account, sizeof(map) + sizeof(uint32_t), &filler);
	assert_int_equal(chunk_header_make(&w->good, &maps, &header, &len), 0);
	err = request(w, 0, XP_WRITE, header, len);
	mem_free(header);
	refused(&err, ERR_LIMIT, "(memory_limit)");
	cluster_until_state(&w->c, w->engines[1], "recv", ROOM, KVD_FAILED);
	refused(w->room->error, ERR_LIMIT, "pages");
	assert_untouched(w);
	open_recv(w, 7, 2); /* another daemon's are its own */
	open_send(w, 7, 2);
	bind(w, 7, "1");
	send_all(w, 7, 2, "1");
	cluster_until_state(&w->c, w->engines[1], "recv", 7, KVD_SUCCESS);
	charge_drop(&filler);
}

/* ---- messages in the middle of a request ---- */

#define OFFERED 9u

static struct move *being_read(struct world *w)
{
	struct room *room = rooms_find(rooms_of(&w->c.nodes[1].kvd), w->engines[1],
				       ROOM_OFFER, OFFERED);
	struct move *move = list_first(&room->moves, struct move, link);

	return move && move_phase(move) == MOVE_READING ? move : NULL;
}

static bool is_being_read(void *arg)
{
	return being_read(arg) != NULL;
}

static void pull(struct world *w, const char *pages)
{
	w->c.nodes[1].config.peer_part_bytes = 16; /* two pages a turn */
	cluster_ok(&w->c, w->engines[1],
		   "{'cmd':'room.open','room':'%u','role':'offer','pool':%llu,"
		   "'lease_ms':3600000,'views':{'kv':{'pages':[%s]}}}",
		   OFFERED, (unsigned long long)w->caches[1].pool, pages);
	cluster_ok(&w->c, w->engines[2],
		   "{'cmd':'room.open','room':'%u','role':'pull','pool':%llu,'sources':['"
		   "%s'],"
		   "'views':{'kv':{'pages':[%s]}}}",
		   OFFERED, (unsigned long long)w->caches[2].pool, w->c.nodes[1].endpoint,
		   pages);
}

/* The puller leaves an offer that it reads, by a word that is not its own in that
 * state, while the request's pages are being read: the request is answered all the same,
 * and the offer ends now, not with its lease. */
static void abort_in_the_middle_of_a_request_leaves_it_answered(void **state)
{
	struct world *w = *state;
	struct wire_header h = {.type = WIRE_T_ABORT};
	struct wire_abort msg = {
		.room = OFFERED, .from_role = ROOM_PULL, .code = ERR_ABORTED};
	struct party *party;
	uint8_t body[1024];
	struct cursor c;

	pull(w, "3,5,9,1,7,11,13,15,0,2");
	cluster_until(&w->c, is_being_read, w, "a request whose pages are being read");
	party = being_read(w)->party;
	msg.from_gen = party->gen;
	msg.to_gen = party->room->gen;
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_abort_put(&c, &msg), 0);
	cursor_read(&c, body, c.pos);
	assert_int_equal(rooms_on_message(party->remote, &h, &c), 0);
	cluster_run(&w->c, 3 * LOOP_NS_PER_S);
	assert_int_equal(cluster_state(&w->c, w->engines[1], "offer", OFFERED),
			 KVD_FAILED);
	assert_int_not_equal(cluster_state(&w->c, w->engines[2], "pull", OFFERED),
			     KVD_TRANSFERRING);
}

int main(void)
{
#define CASE(test) cmocka_unit_test_setup_teardown(test, setup, teardown)
	const struct CMUnitTest tests[] = {
		CASE(chunk_forged_has_no_effect),
		CASE(chunk_with_another_plan_fails_the_room_untouched),
		CASE(chunk_after_the_end_is_nobodys),
		CASE(header_truncated_or_garbage_is_refused),
		CASE(pages_of_a_request_are_counted_until_its_room_is_closed),
		CASE(pages_beyond_peer_limit_fail_its_room),
		CASE(abort_in_the_middle_of_a_request_leaves_it_answered),
	};

	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	int failed = cmocka_run_group_tests_name("rooms_forged", tests, NULL, NULL);

	cluster_short_parts();
	return failed +
	       cmocka_run_group_tests_name("rooms_forged, long lists", tests, NULL, NULL);
}
