/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one peer can make a daemon do for its rooms: messages that it repeats.
 * In-process cluster, virtual time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/room/room.h"
#include "daemon/room/rooms.h"
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
		rooms_find(p->c.nodes[0].kvd.rooms, p->decode, ROOM_PULL, ROOM);
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

/* Who repeats its query gets no more of the offer, who asks from time to time does. */
static void query_that_is_repeated_makes_no_stream_of_offers(void **state)
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
static void queries_that_come_before_their_offer_get_one_answer(void **state)
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

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(query_that_is_repeated_makes_no_stream_of_offers),
		CASE(queries_that_come_before_their_offer_get_one_answer),
	};

	int failed = cmocka_run_group_tests_name("rooms_crowd", tests, NULL, NULL);

	cluster_short_parts();
	return failed +
	       cmocka_run_group_tests_name("rooms_crowd, long lists", tests, NULL, NULL);
}
