/* SPDX-License-Identifier: Apache-2.0 */
/*
 * More of everything than there is room for. Node 2 speaks for itself: it sends node
 * 0 whatever a daemon could say, a hundred thousand times. Node 1 is an honest
 * partner of node 0: its rooms work during all of it, what is kept stays within its
 * cap, and when it is over everything is as before. In-process cluster, virtual time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/handshake/handshake_impl.h"
#include "daemon/room/rooms_set.h"
#include "daemon/base/share.h"
#include "proto/kvd_status.h"
#include "proto/wire.h"
#include "tests/lib/cluster.h"
#include "tests/lib/peer_at.h"

#define MS LOOP_NS_PER_MS
#define STORM 100000u
#define BODY_MAX (1u << 20)

static const struct cache geometry = {.layers = 2,
				      .pages = 16,
				      .page_tokens = 4,
				      .units = 4,
				      .total_units = 4,
				      .unit_bytes = 32};

struct storm {
	struct cluster c;
	struct session *prefill, *decode;
	struct cache src, dst;
	struct peer *victim; /* node 0, as node 2 sees it */
	uint64_t next_room;
	uint8_t body[BODY_MAX];
	int64_t blocks; /* of the heap, before */
};

static void holds_nothing_more(struct storm *p)
{
	cluster_run(&p->c, LOOP_NS_PER_S);
	/* frames of pings are under way at any time */
	if (mem_live() > p->blocks + 8)
		fail_msg("%lld blocks of memory, before %lld", (long long)mem_live(),
			 (long long)p->blocks);
}

/* A push that begins with its request for a sender that is not there yet. */
static void honest_room_works(struct storm *p)
{
	unsigned long long room = p->next_room++;

	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'%llu','role':'recv','pool':%llu,"
		   "'sources':['%s']}",
		   room, (unsigned long long)p->dst.pool, p->c.nodes[0].endpoint);
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.bind','room':'%llu','views':{'kv':{'pages':[7,2]}}}",
		   room);
	cluster_run(&p->c, 5 * MS);
	assert_int_equal(cluster_state(&p->c, p->decode, "recv", room),
			 KVD_WAITING_FOR_INPUT);
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.open','room':'%llu','role':'send','pool':%llu}", room,
		   (unsigned long long)p->src.pool);
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.send','room':'%llu','seq':0,'last':true,'views':{'kv':{"
		   "'pages':[3,4]}}}",
		   room);
	cluster_until_state(&p->c, p->decode, "recv", room, KVD_SUCCESS);
	cluster_until_state(&p->c, p->prefill, "send", room, KVD_SUCCESS);
	cluster_ok(&p->c, p->decode, "{'cmd':'room.close','room':'%llu','role':'recv'}",
		   room);
	cluster_ok(&p->c, p->prefill, "{'cmd':'room.close','room':'%llu','role':'send'}",
		   room);
}

static int setup(void **state)
{
	struct storm *p = calloc(1, sizeof(*p));
	struct session *flooder;

	cluster_new(&p->c, 1, 3);
	p->next_room = UINT64_C(1) << 40;
	p->prefill = cluster_engine(&p->c, 0, "prefill");
	p->decode = cluster_engine(&p->c, 1, "decode");
	flooder = cluster_engine(&p->c, 2, "flooder");
	p->src = p->dst = geometry;
	cluster_cache(&p->c, p->prefill, "kv", 0, &p->src);
	cluster_cache(&p->c, p->decode, "kv", 0, &p->dst);
	cluster_ok(&p->c, flooder, "{'cmd':'peer.connect','endpoint':'%s'}",
		   p->c.nodes[0].endpoint);
	p->victim = peer_at(p->c.nodes[2].kvd.peers, p->c.nodes[0].endpoint);
	peer_hold(p->victim);
	honest_room_works(p);
	cluster_run(&p->c, LOOP_NS_PER_S);
	p->blocks = mem_live();
	*state = p;
	return 0;
}

static int teardown(void **state)
{
	struct storm *p = *state;

	if (p->victim)
		peer_release(p->victim);
	cluster_free(&p->c);
	cache_close(&p->src);
	cache_close(&p->dst);
	free(p);
	return 0;
}

static uint64_t counted(struct storm *p, enum metric metric)
{
	return metrics_get(&p->c.nodes[0].kvd.metrics, metric);
}

static struct rooms *victims_rooms(struct storm *p)
{
	return rooms_of(&p->c.nodes[0].kvd);
}

/* The flooder, as node 0 sees it. */
static struct remote *flooder_of(struct storm *p)
{
	struct remote *remote;

	list_foreach(remote, &p->c.nodes[0].kvd.handshake->remotes, link) {
		if (strcmp(remote->peer->endpoint, p->c.nodes[2].endpoint) == 0)
			return remote;
	}
	fail_msg("the flooder was cut");
	return NULL;
}

/* As fast as the line takes it. */
static void flood(struct storm *p, enum wire_type type, size_t len)
{
	while (peer_send(p->victim, type, p->body, len) < 0) {
		assert_int_equal(err_last()->code, ERR_LIMIT);
		err_clear();
		cluster_run(&p->c, MS);
	}
}

static size_t transfer_info(struct storm *p, uint64_t room, uint64_t pool, size_t views)
{
	static uint8_t junk[BODY_MAX];
	struct wire_transfer_info m = {.room = room,
				       .recv_gen = room + 1,
				       .src_pool = pool,
				       .dst_pool = 1,
				       .receivers = 1,
				       .views = {junk, views}};
	struct cursor out;

	cursor_write(&out, p->body, sizeof(p->body));
	assert_int_equal(wire_transfer_info_put(&out, &m), 0);
	return out.pos;
}

static void requests_for_unknown_rooms_are_bounded(void **state)
{
	struct storm *p = *state;
	const size_t cap = p->c.nodes[0].config.early_requests_max;

	for (uint64_t i = 0; i < STORM; i++) {
		flood(p, WIRE_T_TRANSFER_INFO, transfer_info(p, i, p->src.pool, 0));
		if (i % (STORM / 4) == STORM / 8)
			honest_room_works(p);
	}
	cluster_run(&p->c, 10 * MS);
	assert_int_equal(flooder_of(p)->account->objects[ACCOUNT_ORPHANS],
			 share_cap(cap, cap));
	assert_int_equal(counted(p, METRIC_ORPHANS_REFUSED), STORM - share_cap(cap, cap));
	honest_room_works(p); /* with the flooder's share taken */
	cluster_run(&p->c, p->c.nodes[0].config.early_request_ttl_ns);
	assert_int_equal(victims_rooms(p)->orphan_count, 0);
	assert_int_equal(counted(p, METRIC_ORPHANS_EXPIRED), share_cap(cap, cap));
	holds_nothing_more(p);
}

static void requests_are_bounded_in_bytes(void **state)
{
	struct storm *p = *state;
	const size_t views = 1000000;

	struct accounts *accounts = &p->c.nodes[0].kvd.accounts;
	const uint64_t before = accounts->total;

	accounts->limit = UINT64_C(64) << 20;
	for (uint64_t i = 0; i < 200; i++)
		flood(p, WIRE_T_TRANSFER_INFO, transfer_info(p, i, p->src.pool, views));
	cluster_run(&p->c, 100 * MS);
	assert_int_equal(flooder_of(p)->account->objects[ACCOUNT_ORPHANS],
			 (accounts_share(accounts) - before) / views);
	honest_room_works(p);
	cluster_run(&p->c, p->c.nodes[0].config.early_request_ttl_ns);
	assert_int_equal(victims_rooms(p)->orphan_count, 0);
	holds_nothing_more(p);
}

/* What waits is dropped when its peer goes, and leaves no share behind. */
static void requests_of_a_lost_peer_are_dropped(void **state)
{
	struct storm *p = *state;

	for (uint64_t i = 0; i < 1000; i++)
		flood(p, WIRE_T_TRANSFER_INFO, transfer_info(p, i, p->src.pool, 100));
	cluster_run(&p->c, 10 * MS);
	assert_int_equal(victims_rooms(p)->orphan_count, 1000);
	peer_release(p->victim);
	p->victim = NULL;
	cluster_crash(&p->c, 2, MEM_CRASH_KILLED);
	cluster_run(&p->c, 2 * LOOP_NS_PER_S);
	assert_int_equal(victims_rooms(p)->orphan_count, 0);
	honest_room_works(p);
}

static void storms_of_other_messages_keep_nothing(void **state)
{
	struct storm *p = *state;

	for (uint64_t i = 0; i < STORM; i++) {
		struct wire_abort abort = {.room = i,
					   .from_role = ROOM_RECV,
					   .from_gen = i + 7,
					   .pool = p->src.pool,
					   .code = ERR_CANCELED,
					   .text = "no"};
		struct wire_offer_query query = {
			.room = i, .pull_gen = i + 9, .src_pool = 999, .dst_pool = 1};
		struct wire_lease lease = {.room = i, .pull_gen = i, .offer_gen = i};
		struct cursor out;

		cursor_write(&out, p->body, sizeof(p->body));
		switch (i % 4) {
		case 0:
			wire_abort_put(&out, &abort);
			flood(p, WIRE_T_ABORT, out.pos);
			break;
		case 1:
			wire_offer_query_put(&out, &query);
			flood(p, WIRE_T_OFFER_QUERY, out.pos);
			break;
		case 2:
			wire_lease_put(&out, &lease);
			flood(p, WIRE_T_LEASE, out.pos);
			break;
		default:
			flood(p, WIRE_T_TRANSFER_INFO, transfer_info(p, i, 999, 8));
		}
		if (i % (STORM / 4) == STORM / 8)
			honest_room_works(p);
	}
	assert_int_equal(victims_rooms(p)->orphan_count, 0);
	/* the ABORTs may mean rooms that open later; they have a bound, and their time */
	assert_in_range(victims_rooms(p)->early_count, 1,
			p->c.nodes[0].config.early_requests_max);
	cluster_run(&p->c, p->c.nodes[0].config.early_request_ttl_ns);
	assert_int_equal(victims_rooms(p)->early_count, 0);
	holds_nothing_more(p);
}

/* ---- REGISTER ---- */

static size_t session_list(struct storm *p, uint64_t object, uint32_t regions)
{
	static uint8_t list[BODY_MAX];
	struct wire_register m = {.object = object,
				  .kind = 1,
				  .session = object,
				  .name = "",
				  .transport = "fake"};
	struct cursor out;

	cursor_write(&out, list, sizeof(list));
	cursor_put_u32(&out, regions);
	for (uint32_t i = 0; i < regions; i++) {
		cursor_put_u64(&out, i);
		cursor_put_u64(&out, i * UINT64_C(4096));
		cursor_put_u64(&out, 4096);
		cursor_put_u8(&out, 0);
		cursor_put_blob(&out, NULL, 0);
	}
	m.regions = (struct wire_blob){list, out.pos};
	cursor_write(&out, p->body, sizeof(p->body));
	assert_int_equal(wire_register_put(&out, &m), 0);
	return out.pos;
}

static void unregister(struct storm *p, uint64_t object)
{
	struct wire_unregister m = {.object = object};
	struct cursor out;

	cursor_write(&out, p->body, sizeof(p->body));
	wire_unregister_put(&out, &m);
	flood(p, WIRE_T_UNREGISTER, out.pos);
}

static void registers_are_bounded(void **state)
{
	struct storm *p = *state;

	log_set_level(LOG_LEVEL_ERROR);
	for (uint64_t i = 1; i <= 20000; i++) {
		flood(p, WIRE_T_REGISTER, session_list(p, i << 32, 1));
		if (i % 5000 == 0)
			honest_room_works(p);
	}
	assert_int_equal(flooder_of(p)->pools.count, 16384);
	for (uint64_t i = 1; i <= 20000; i++)
		unregister(p, i << 32);
	cluster_run(&p->c, 100 * MS);
	assert_int_equal(flooder_of(p)->pools.count, 0);
	assert_int_equal(flooder_of(p)->account->bytes[ACCOUNT_LAYOUTS], 0);
	honest_room_works(p);
	holds_nothing_more(p);
}

static void registers_are_bounded_in_bytes(void **state)
{
	struct storm *p = *state;
	struct accounts *accounts = &p->c.nodes[0].kvd.accounts;

	accounts->limit = UINT64_C(1) << 30;
	for (uint64_t i = 1; i <= 1300; i++)
		flood(p, WIRE_T_REGISTER, session_list(p, i << 32, 4096));
	cluster_run(&p->c, 100 * MS);
	assert_true(accounts->total <= accounts_share(accounts));
	assert_in_range(flooder_of(p)->pools.count, 300, 1200);
	honest_room_works(p);
	for (uint64_t i = 1; i <= 1300; i++)
		unregister(p, i << 32);
	cluster_run(&p->c, 100 * MS);
	assert_int_equal(flooder_of(p)->account->bytes[ACCOUNT_LAYOUTS], 0);
	holds_nothing_more(p);
}

/* ---- the past ---- */

static void peer_restarting_repeatedly_leaks_nothing(void **state)
{
	struct storm *p = *state;
	unsigned int node = 2, rooms = 0;
	struct remote *remote;

	for (unsigned int i = 0; i < 30; i++) {
		unsigned long long room = p->next_room++;
		struct session *engine;
		struct cache cache = geometry;

		if (i == 0) {
			peer_release(p->victim);
			p->victim = NULL;
		}
		cluster_crash(&p->c, node, MEM_CRASH_KILLED);
		node = cluster_restart(&p->c, node);
		engine = cluster_engine(&p->c, node, "again");
		cluster_cache(&p->c, engine, "kv", 0, &cache);
		/* a room with it that nobody closes */
		cluster_ok(&p->c, p->prefill,
			   "{'cmd':'room.open','room':'%llu','role':'send','pool':%llu}",
			   room, (unsigned long long)p->src.pool);
		cluster_ok(&p->c, engine,
			   "{'cmd':'room.open','room':'%llu','role':'recv','pool':%llu,"
			   "'sources':['%s']}",
			   room, (unsigned long long)cache.pool, p->c.nodes[0].endpoint);
		cluster_ok(
			&p->c, engine,
			"{'cmd':'room.bind','room':'%llu','views':{'kv':{'pages':[1]}}}",
			room);
		cluster_until_state(&p->c, p->prefill, "send", room,
				    KVD_WAITING_FOR_INPUT);
		rooms++;
		cache_close(&cache);
	}
	cluster_crash(&p->c, node, MEM_CRASH_KILLED);
	cluster_run(&p->c, 5 * LOOP_NS_PER_S);
	assert_int_equal(rooms_count(victims_rooms(p)), rooms);
	assert_int_equal(rooms_live(victims_rooms(p)), 0);
	rooms = 0;
	list_foreach(remote, &p->c.nodes[0].kvd.handshake->remotes, link) {
		const struct remote_pool *pool;

		rooms++;
		list_foreach(pool, &remote->pools.dead, link)
			fail_msg("a pool of a dead daemon is kept");
	}
	assert_in_range(rooms, 1, 2); /* node 1, and perhaps the endpoint being dialled */
	honest_room_works(p);
}

static void tombstones_are_a_ring(void **state)
{
	struct storm *p = *state;
	struct rooms *rooms = victims_rooms(p);
	const size_t cap = rooms->tomb_cap;
	int64_t full = 0;

	rooms->tomb_cap = 16;
	for (unsigned int i = 0; i < 500; i++) {
		unsigned long long room = p->next_room++;

		cluster_ok(&p->c, p->prefill,
			   "{'cmd':'room.open','room':'%llu','role':'send','pool':%llu}",
			   room, (unsigned long long)p->src.pool);
		cluster_ok(&p->c, p->prefill, "{'cmd':'room.abort','room':'%llu'}", room);
		cluster_until_state(&p->c, p->prefill, "send", room, KVD_FAILED);
		cluster_ok(&p->c, p->prefill, "{'cmd':'room.close','room':'%llu'}", room);
		if (i == 100)
			full = mem_live();
	}
	assert_int_equal(strmap_count(&rooms->tomb_by_pool), 16);
	assert_true(mem_live() <= full + 4);
	rooms->tomb_cap = cap;
}

/* ---- shares ---- */

static void open_one(struct storm *p, struct session *session, uint64_t pool,
		     const char *code)
{
	unsigned long long room = p->next_room++;

	if (!code)
		cluster_ok(&p->c, session,
			   "{'cmd':'room.open','room':'%llu','role':'send','pool':%llu}",
			   room, (unsigned long long)pool);
	else
		cluster_refused(&p->c, session, code,
				"{'cmd':'room.open','room':'%llu','role':'send',"
				"'pool':%llu}",
				room, (unsigned long long)pool);
}

static void user_at_room_limit_leaves_rooms_for_others(void **state)
{
	struct storm *p = *state;
	struct session *late = cluster_engine_of(&p->c, 0, "late", 1000);
	struct session *second = cluster_engine(&p->c, 0, "second");
	struct cache cache = geometry, own = geometry;

	cluster_cache(&p->c, late, "other", 0, &cache);
	cluster_cache(&p->c, second, "own", 0, &own);
	p->c.nodes[0].config.rooms_max = 1024;
	for (unsigned int i = 0; i < 896; i++)
		open_one(p, p->prefill, p->src.pool, NULL);
	open_one(p, p->prefill, p->src.pool, "ELIMIT");
	open_one(p, second, own.pool, "ELIMIT"); /* the same user's */
	for (unsigned int i = 0; i < 4; i++)
		open_one(p, late, cache.pool, NULL);
	open_one(p, late, cache.pool, "ELIMIT"); /* has a 256th */
	cluster_engine_dies(&p->c, p->prefill);
	cluster_run(&p->c, 50 * MS);
	open_one(p, late, cache.pool, NULL);
	cache_close(&cache);
	cache_close(&own);
}

static void share_of_a_small_table_is_all_of_it(void **state)
{
	(void)state;
	assert_int_equal(share_cap(255, 254), 255);
	assert_int_equal(share_cap(256, 0), 256);
	assert_int_equal(share_cap(256, 1), 224);
	assert_true(share_allows(16, 15, 15));
	assert_false(share_allows(16, 16, 0));
	assert_false(share_allows(256, 224, 224));
	assert_true(share_allows(256, 224, 0));
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(requests_for_unknown_rooms_are_bounded),
		CASE(requests_are_bounded_in_bytes),
		CASE(requests_of_a_lost_peer_are_dropped),
		CASE(storms_of_other_messages_keep_nothing),
		CASE(registers_are_bounded),
		CASE(registers_are_bounded_in_bytes),
		CASE(peer_restarting_repeatedly_leaks_nothing),
		CASE(tombstones_are_a_ring),
		CASE(user_at_room_limit_leaves_rooms_for_others),
		cmocka_unit_test(share_of_a_small_table_is_all_of_it),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
