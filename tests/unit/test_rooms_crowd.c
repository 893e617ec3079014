/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Work that one event or one peer can cause for all rooms of a daemon: events that
 * concern all rooms are processed by some in each turn, by each before its next event;
 * repeated messages of a peer. In-process cluster, virtual time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/peer/peer_impl.h"
#include "daemon/room/room.h"
#include "daemon/room/room_wire.h"
#include "daemon/room/rooms_set.h"
#include "proto/kvd_status.h"
#include "tests/lib/cluster.h"

#define MS LOOP_NS_PER_MS
#define ROOM 7u

static const struct cache geometry = {.layers = 1,
				      .pages = 64,
				      .page_tokens = 1,
				      .units = 1,
				      .total_units = 1,
				      .unit_bytes = 8};

/* node 0 pulls from node 1 */
struct pair {
	struct cluster c;
	struct session *decode, *prefill;
	struct cache dst, src;
};

static unsigned int offers_seen;
static int (*hand_on)(void *owner, struct remote *remote, const struct wire_header *h,
		      struct cursor *body);

static int on_message(void *owner, struct remote *remote, const struct wire_header *h,
		      struct cursor *body)
{
	offers_seen += h->type == WIRE_T_OFFER;
	return hand_on(owner, remote, h, body);
}

static void wrap(struct kvd *kvd, struct handshake_events *events)
{
	(void)kvd;
	hand_on = events->on_message;
	events->on_message = on_message;
}

static int setup(void **state)
{
	struct pair *p = calloc(1, sizeof(*p));

	offers_seen = 0;
	cluster_wrap_events(wrap);
	cluster_new(&p->c, 1, 2);
	p->decode = cluster_engine(&p->c, 0, "decode");
	p->prefill = cluster_engine(&p->c, 1, "prefill");
	p->src = p->dst = geometry;
	cluster_cache(&p->c, p->decode, "kv", 0, &p->dst);
	cluster_cache(&p->c, p->prefill, "kv", 0, &p->src);
	*state = p;
	return 0;
}

static int teardown(void **state)
{
	struct pair *p = *state;

	cluster_free(&p->c);
	cluster_wrap_events(NULL);
	cache_close(&p->src);
	cache_close(&p->dst);
	free(p);
	return 0;
}

/* ---- ends that concern many rooms ---- */

#define ROOMS 60u /* node 0 receives in each from node 1 */
#define A_TURN 8u /* so many see it in one, at most */

static void open_recvs(struct pair *p)
{
	for (unsigned int n = 0; n < ROOMS; n++)
		cluster_ok(&p->c, p->decode,
			   "{'cmd':'room.open','room':'%u','role':'recv','pool':%llu,"
			   "'sources':['%s']}",
			   100 + n, (unsigned long long)p->dst.pool,
			   p->c.nodes[1].endpoint);
	cluster_until_state(&p->c, p->decode, "recv", 100 + ROOMS - 1,
			    KVD_WAITING_FOR_INPUT);
}

static void open_sends(struct pair *p)
{
	for (unsigned int n = 0; n < ROOMS; n++)
		cluster_ok(&p->c, p->prefill,
			   "{'cmd':'room.open','room':'%u','role':'send','pool':%llu}",
			   100 + n, (unsigned long long)p->src.pool);
}

/* All rooms of both sides wait for the prefill's engine. */
static void open_pairs(struct pair *p)
{
	open_recvs(p);
	open_sends(p);
	for (unsigned int n = 0; n < ROOMS; n++)
		cluster_ok(
			&p->c, p->decode,
			"{'cmd':'room.bind','room':'%u','views':{'kv':{'pages':[%u]}}}",
			100 + n, n);
	cluster_until_state(&p->c, p->prefill, "send", 100 + ROOMS - 1,
			    KVD_WAITING_FOR_INPUT);
	cluster_run(&p->c, LOOP_NS_PER_S);
}

static struct room *recv_room(struct pair *p, unsigned int n)
{
	return rooms_find(rooms_of(&p->c.nodes[0].kvd), p->decode, ROOM_RECV, 100 + n);
}

static struct room *send_room(struct pair *p, unsigned int n)
{
	return rooms_find(rooms_of(&p->c.nodes[1].kvd), p->prefill, ROOM_SEND, 100 + n);
}

static unsigned int live(struct pair *p, unsigned int node)
{
	const struct room *room;
	unsigned int n = 0;

	list_foreach(room, &rooms_of(&p->c.nodes[node].kvd)->all, all_link)
		n += room_live(room);
	return n;
}

/* From now on each check finds the turn over. */
static void short_turns(struct pair *p)
{
	loop_virtual_parts(p->c.loop, 1);
}

/* Turn until some rooms of the node have seen it, and others not. */
static void until_some_have_seen(struct pair *p, unsigned int node)
{
	while (live(p, node) == ROOMS)
		loop_turn(p->c.loop, LOOP_NS_PER_S);
	assert_in_range(live(p, node), 1, ROOMS - 1);
}

static void until_all_have_seen(struct pair *p, unsigned int node)
{
	unsigned int before = live(p, node), turns = 0;

	while (before > 0) {
		unsigned int now;

		loop_turn(p->c.loop, LOOP_NS_PER_S);
		now = live(p, node);
		if (before - now > A_TURN)
			fail_msg("%u rooms in one turn", before - now);
		before = now;
		assert_true(turns++ < 100 * ROOMS);
	}
}

static struct remote *remote_at(struct pair *p, unsigned int node)
{
	return list_first(handshake_remotes(p->c.nodes[node].kvd.handshake),
			  struct remote, link);
}

static void lose_peer(struct pair *p)
{
	fake_link_cut(fake_hub_node(p->c.bytes, 0), fake_hub_node(p->c.bytes, 1));
}

static void peer_lost_fails_its_rooms_in_turns(void **state)
{
	struct pair *p = *state;
	uint64_t begun;

	open_pairs(p);
	short_turns(p);
	lose_peer(p);
	until_some_have_seen(p, 0);
	begun = loop_now_ns(p->c.loop);
	until_all_have_seen(p, 0);
	assert_true(loop_now_ns(p->c.loop) - begun < LOOP_NS_PER_S);
	for (unsigned int n = 0; n < ROOMS; n++) {
		cluster_until_state(&p->c, p->decode, "recv", 100 + n, KVD_FAILED);
		room_failed_with(recv_room(p, n), ERR_PEER, "data connection lost");
		cluster_until_state(&p->c, p->prefill, "send", 100 + n, KVD_FAILED);
	}
}

/* A message of the peer, on its next line, names a room that has not processed the
 * peer's loss yet. */
static void confirmation_before_the_loss_is_seen_does_not_count(void **state)
{
	const struct wire_header h = {.type = WIRE_T_ROOM_DONE};
	struct pair *p = *state;
	struct wire_room_done msg;
	uint8_t body[64];
	struct cursor c;
	struct room *last;

	open_pairs(p);
	short_turns(p);
	lose_peer(p);
	until_some_have_seen(p, 1);
	last = send_room(p, ROOMS - 1);
	assert_true(room_live(last) && rooms_behind(last));
	msg = (struct wire_room_done){.room = last->number,
				      .recv_gen = recv_room(p, ROOMS - 1)->gen,
				      .src_pool = p->src.pool};
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_room_done_put(&c, &msg), 0);
	cursor_read(&c, body, c.pos);
	assert_int_equal(rooms_on_message(remote_at(p, 1), &h, &c), 0);
	room_failed_with(last, ERR_PEER, "data connection lost");
	until_all_have_seen(p, 1);
}

static struct err answered;

static void on_land(struct xp_inbound *in, const struct xp_sides *sides,
		    const struct err *err)
{
	(void)in;
	(void)sides;
	answered = err ? *err : (struct err){0};
}

static void chunk_before_the_loss_is_seen_does_not_count(void **state)
{
	struct pair *p = *state;
	const struct transport_ops *ops;
	struct transport_ops no_line = fake_ops;
	struct xp_inbound in = {.kind = XP_WRITE};
	struct chunk_header h;
	struct room_maps none = {0};
	struct remote *remote;
	struct cursor header;
	struct room *last;
	uint8_t *bytes;

	open_pairs(p);
	short_turns(p);
	lose_peer(p);
	until_some_have_seen(p, 0);
	last = recv_room(p, ROOMS - 1);
	remote = remote_at(p, 0);
	assert_true(room_live(last) && rooms_behind(last));
	h = (struct chunk_header){.room = last->number,
				  .recv_gen = last->gen,
				  .send_gen = send_room(p, ROOMS - 1)->gen,
				  .src_pool = p->src.pool,
				  .dst_pool = p->dst.pool};
	assert_int_equal(chunk_header_make(&h, &none, &bytes, &in.header_len), 0);
	in.header = bytes;
	cursor_read(&header, bytes, in.header_len);
	cursor_get_u8(&header);
	no_line.land = on_land;
	ops = remote->transport->ops;
	remote->transport->ops = &no_line;
	rooms_on_request(remote, &in, REQUEST_CHUNK, &header);
	remote->transport->ops = ops;
	mem_free(bytes);
	assert_null(in.owner);
	assert_int_equal(answered.code, ERR_PEER);
	room_failed_with(last, ERR_PEER, "data connection lost");
	until_all_have_seen(p, 0);
}

/* An engine uses its room meanwhile: nothing of that is sent. */
static void chunk_given_before_the_loss_is_seen_is_not_sent(void **state)
{
	struct pair *p = *state;
	uint64_t posts;
	struct room *last;

	open_pairs(p);
	short_turns(p);
	lose_peer(p);
	until_some_have_seen(p, 1);
	last = send_room(p, ROOMS - 1);
	assert_true(room_live(last) && rooms_behind(last));
	posts = fake_hub_stats(p->c.bytes)->posts;
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.send','room':'%u','seq':0,'last':true,'views':{'kv':{"
		   "'pages':[1]}}}",
		   100 + ROOMS - 1);
	until_all_have_seen(p, 1);
	assert_int_equal(fake_hub_stats(p->c.bytes)->posts, posts);
	assert_int_equal(sm_state(&last->sm), ROOM_FAILED);
	room_failed_with(last, ERR_PEER, "data connection lost");
}

static void pool_withdrawn_fails_its_rooms_in_turns(void **state)
{
	struct pair *p = *state;
	struct remote *remote;

	open_recvs(p);
	remote = remote_at(p, 0);
	assert_non_null(handshake_pool_by_id(remote, p->src.pool));
	short_turns(p);
	cluster_engine_dies(&p->c, p->prefill);
	until_some_have_seen(p, 0);
	/* it is not returned before the last has released it */
	assert_null(handshake_pool_by_id(remote, p->src.pool));
	assert_int_equal(remote->pools.count, 1);
	until_all_have_seen(p, 0);
	for (unsigned int n = 0; n < ROOMS; n++)
		room_failed_with(recv_room(p, n), ERR_SESSION, "withdrew pool 'kv'");
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(remote->pools.count, 0);
	assert_int_equal(p->c.nodes[1].kvd.session_count, 0);
}

/* Events after the stop, the ends of all sessions, are not the reason. */
static void daemon_stopping_ends_all_rooms(void **state)
{
	struct pair *p = *state;
	struct err why;

	open_pairs(p);
	short_turns(p);
	err_set(&why, ERR_DRAIN, "the daemon is stopping");
	rooms_fail_all(rooms_of(&p->c.nodes[0].kvd), &why);
	assert_in_range(live(p, 0), ROOMS - A_TURN, ROOMS - 1);
	loop_virtual_parts(p->c.loop, 0); /* the session's end overtakes it */
	cluster_engine_dies(&p->c, p->decode);
	assert_int_equal(live(p, 0), 0);
	for (unsigned int n = 0; n < ROOMS; n++) {
		cluster_until_state(&p->c, p->prefill, "send", 100 + n, KVD_FAILED);
		room_failed_with(send_room(p, n), ERR_DRAIN, "the daemon is stopping");
	}
}

static unsigned int visits;

static void on_visit(struct room_sweep *sweep, struct room *room)
{
	(void)sweep;
	visits += room->number == 100 + ROOMS - 1;
}

/* A peer that starts a sweep again and again, faster than it proceeds. */
static void sweep_restarted_reaches_last_room(void **state)
{
	struct room_sweep sweep = {.visit = on_visit};
	struct pair *p = *state;

	open_recvs(p);
	short_turns(p);
	visits = 0;
	for (unsigned int i = 0; i < 10 * ROOMS; i++) {
		room_sweep_begin(rooms_of(&p->c.nodes[0].kvd), &sweep);
		loop_turn(p->c.loop, 0);
	}
	assert_in_range(visits, 10, 10 * ROOMS);
	room_sweep_stop(&sweep);
}

/* ---- repeated queries ---- */

static void open_offer(struct pair *p)
{
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.open','room':'%u','role':'offer','pool':%llu,"
		   "'lease_ms':3600000,'views':{'kv':{'pages':[[0,40]]}}}",
		   ROOM, (unsigned long long)p->src.pool);
}

/* It waits for a word of its engine before it reads. */
static void open_held_pull(struct pair *p)
{
	*(uint64_t *)(p->dst.base + p->dst.bytes - 8) = 0;
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'%u','role':'pull','pool':%llu,"
		   "'sources':['%s'],'views':{'kv':{'pages':[[0,40]]}},'wait':{"
		   "'kind':'seq','region':%llu,'offset':%llu,'value':'1'}}",
		   ROOM, (unsigned long long)p->dst.pool, p->c.nodes[1].endpoint,
		   (unsigned long long)p->dst.region,
		   (unsigned long long)p->dst.bytes - 8);
}

static void release_pull(struct pair *p)
{
	*(uint64_t *)(p->dst.base + p->dst.bytes - 8) = 1;
}

static void ask_again(struct pair *p, unsigned int times)
{
	struct room *pull =
		rooms_find(rooms_of(&p->c.nodes[0].kvd), p->decode, ROOM_PULL, ROOM);
	const struct party *party = list_first(&pull->parties, struct party, link);
	struct wire_offer_query msg = {.room = ROOM,
				       .pull_gen = pull->gen,
				       .src_pool = p->src.pool,
				       .dst_pool = p->dst.pool};
	struct cursor out;

	for (unsigned int i = 0; i < times; i++) {
		handshake_body(p->c.nodes[0].kvd.handshake, &out);
		assert_int_equal(wire_offer_query_put(&out, &msg), 0);
		assert_int_equal(handshake_send(party->remote, WIRE_T_OFFER_QUERY,
						out.base, out.pos),
				 0);
		if (i % 16 == 0)
			cluster_run(&p->c, MS / 100);
	}
	cluster_run(&p->c, 10 * MS);
}

/* A flood of queries gets no more of the offer; asking from time to time does. */
static void query_repeated_is_answered_once(void **state)
{
	struct pair *p = *state;
	uint64_t pause = LOOP_NS_PER_S;

	open_offer(p);
	open_held_pull(p);
	cluster_run(&p->c, 100 * MS);
	assert_int_equal(offers_seen, 1);
	ask_again(p, 500);
	assert_int_equal(offers_seen, 1);
	for (unsigned int n = 2; n < 6; n++) {
		cluster_run(&p->c, pause);
		ask_again(p, 50);
		assert_int_equal(offers_seen, n);
		cluster_run(&p->c, pause);
		ask_again(p, 50);
		assert_int_equal(offers_seen, n);
		pause *= 2;
	}
	release_pull(p);
	cluster_until_state(&p->c, p->decode, "pull", ROOM, KVD_SUCCESS);
	cluster_until_state(&p->c, p->prefill, "offer", ROOM, KVD_SUCCESS);
}

/* The same before the offer opens: they wait for it, and get one answer. */
static void queries_before_offer_are_answered_once(void **state)
{
	struct pair *p = *state;

	open_held_pull(p);
	cluster_run(&p->c, 100 * MS);
	ask_again(p, 20);
	open_offer(p);
	cluster_run(&p->c, 100 * MS);
	assert_int_equal(offers_seen, 1);
	release_pull(p);
	cluster_until_state(&p->c, p->decode, "pull", ROOM, KVD_SUCCESS);
}

#define PAGES "0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30,32,34,36,38,40,42,44,46,48,50"
#define LIST_BYTES 350u /* a queued message of these pages, at least */

/* A peer that reads late while many rooms send it their pages: long lists wait. */
static void lists_of_pages_do_not_end_the_peering(void **state)
{
	const struct mem_path cut = {.cut = true}, way = {.delay_ns = MS};
	struct pair *p = *state;
	const char *from = p->c.nodes[0].endpoint, *to = p->c.nodes[1].endpoint;

	open_recvs(p);
	open_sends(p);
	p->c.nodes[0].kvd.peers->options.queue_bytes = ROOMS / 2 * LIST_BYTES;
	mem_hub_set_queue_max(p->c.links, 1);
	mem_hub_set_path(p->c.links, from, to, &cut);
	for (unsigned int n = 0; n < ROOMS; n++)
		cluster_ok(&p->c, p->decode,
			   "{'cmd':'room.bind','room':'%u','views':{'kv':{'pages':[" PAGES
			   "]}}}",
			   100 + n);
	cluster_run(&p->c, 500 * MS);
	mem_hub_set_path(p->c.links, from, to, &way);
	cluster_run(&p->c, 2 * LOOP_NS_PER_S);
	assert_int_equal(metrics_get(&p->c.nodes[0].kvd.metrics, METRIC_PEER_LOST), 0);
	for (unsigned int n = 0; n < ROOMS; n++)
		cluster_until_state(&p->c, p->prefill, "send", 100 + n,
				    KVD_WAITING_FOR_INPUT);
	assert_int_equal(live(p, 0), ROOMS);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(peer_lost_fails_its_rooms_in_turns),
		CASE(confirmation_before_the_loss_is_seen_does_not_count),
		CASE(chunk_before_the_loss_is_seen_does_not_count),
		CASE(chunk_given_before_the_loss_is_seen_is_not_sent),
		CASE(pool_withdrawn_fails_its_rooms_in_turns),
		CASE(daemon_stopping_ends_all_rooms),
		CASE(sweep_restarted_reaches_last_room),
		CASE(query_repeated_is_answered_once),
		CASE(queries_before_offer_are_answered_once),
	};
	const struct CMUnitTest long_lists[] = {
		CASE(lists_of_pages_do_not_end_the_peering),
	};

	int failed = cmocka_run_group_tests_name("rooms_crowd", tests, NULL, NULL);

	cluster_short_parts();
	failed +=
		cmocka_run_group_tests_name("rooms_crowd, long lists", tests, NULL, NULL);
	return failed +
	       cmocka_run_group_tests_name("rooms_crowd, waits", long_lists, NULL, NULL);
}
