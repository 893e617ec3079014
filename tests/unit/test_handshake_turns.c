/* SPDX-License-Identifier: Apache-2.0 */
/* Pools are announced to many peers, one a turn where time is short. In-process cluster.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "daemon/handshake/handshake.h"
#include "lib/kvd.h"
#include "tests/lib/cluster.h"

#define PEERS 6u
#define POOLS 4u

struct star {
	struct cluster c; /* node 0 has the pools */
	struct session *engine;
	struct cache caches[POOLS];
	struct remote *remotes[PEERS]; /* node 0, of each other */
};

static void star_pool(struct star *s, unsigned int i)
{
	char name[8];

	s->caches[i] = cluster_geometry;
	snprintf(name, sizeof(name), "p%u", i);
	cluster_cache(&s->c, s->engine, name, 0, &s->caches[i]);
}

static unsigned int known(const struct star *s)
{
	unsigned int n = 0;

	for (unsigned int i = 0; i < PEERS; i++)
		for (unsigned int p = 0; p < POOLS; p++)
			n += s->caches[p].pool &&
			     handshake_pool_by_id(s->remotes[i], s->caches[p].pool);
	return n;
}

static bool all_known(void *arg)
{
	const struct star *s = arg;
	unsigned int pools = 0;

	for (unsigned int p = 0; p < POOLS; p++)
		pools += s->caches[p].pool != 0;
	for (unsigned int i = 0; i < PEERS; i++)
		if (!s->remotes[i]->ready || !s->remotes[i]->pools.listed)
			return false;
	return known(s) == pools * PEERS;
}

static bool none_known(void *arg)
{
	return known(arg) == 0;
}

/* Ticks can replace turns here: messages of a turn arrive in later ones. */
static void pools_announced_in_turns_reach_all(void **state)
{
	struct star s = {.engine = NULL};
	unsigned int before, most = 0;

	(void)state;
	cluster_new(&s.c, 1, 1 + PEERS);
	s.engine = cluster_engine(&s.c, 0, "engine");
	for (unsigned int p = 0; p + 1 < POOLS; p++)
		star_pool(&s, p);
	loop_virtual_parts(s.c.loop, 1);
	for (unsigned int i = 0; i < PEERS; i++)
		assert_int_equal(handshake_reach(s.c.nodes[1 + i].kvd.handshake,
						 s.c.nodes[0].endpoint, NULL,
						 &s.remotes[i]),
				 0);
	cluster_until(&s.c, all_known, &s, "pools of before");
	star_pool(&s, POOLS - 1);
	while (!all_known(&s)) {
		before = known(&s);
		assert_true(loop_turn(s.c.loop, LOOP_NS_PER_S));
		most = known(&s) - before > most ? known(&s) - before : most;
	}
	assert_int_equal(most, 1);
	cluster_engine_dies(&s.c, s.engine);
	cluster_until(&s.c, none_known, &s, "no pool");
	cluster_run(&s.c, LOOP_NS_PER_S);
	loop_virtual_parts(s.c.loop, 0);
	for (unsigned int i = 0; i < PEERS; i++)
		handshake_release(s.remotes[i]);
	cluster_free(&s.c);
	for (unsigned int p = 0; p < POOLS; p++)
		cache_close(&s.caches[p]);
}

/* A room that names a pool does not wait until all peers know that. */
static void pool_named_by_a_room_is_announced_first(void **state)
{
	struct star s = {.engine = NULL};
	struct session *sender;
	struct cache theirs = cluster_geometry;
	const unsigned int last = PEERS; /* the last in turn */

	(void)state;
	cluster_new(&s.c, 1, 1 + PEERS);
	s.engine = cluster_engine(&s.c, 0, "engine");
	sender = cluster_engine(&s.c, last, "sender");
	cluster_cache(&s.c, sender, "theirs", 0, &theirs);
	for (unsigned int i = 0; i < PEERS; i++)
		assert_int_equal(handshake_reach(s.c.nodes[1 + i].kvd.handshake,
						 s.c.nodes[0].endpoint, NULL,
						 &s.remotes[i]),
				 0);
	cluster_until(&s.c, all_known, &s, "peers");
	cluster_run(&s.c, LOOP_NS_PER_S);
	loop_virtual_parts(s.c.loop, 1);
	star_pool(&s, 0);
	cluster_ok(&s.c, s.engine,
		   "{'cmd':'room.open','room':'7','role':'recv','pool':%llu,"
		   "'sources':['%s']}",
		   (unsigned long long)s.caches[0].pool, s.c.nodes[last].endpoint);
	cluster_ok(&s.c, sender,
		   "{'cmd':'room.open','room':'7','role':'send','pool':%llu}",
		   (unsigned long long)theirs.pool);
	cluster_ok(&s.c, s.engine,
		   "{'cmd':'room.bind','room':'7','views':{'kv':{'pages':[1,2]}}}");
	cluster_ok(&s.c, sender,
		   "{'cmd':'room.send','room':'7','seq':0,'last':true,"
		   "'views':{'kv':{'pages':[3,4]}}}");
	cluster_until_state(&s.c, s.engine, "recv", 7, KVD_SUCCESS);
	cluster_until_state(&s.c, sender, "send", 7, KVD_SUCCESS);
	cluster_until(&s.c, all_known, &s, "the others");
	loop_virtual_parts(s.c.loop, 0);
	cluster_engine_dies(&s.c, s.engine);
	cluster_engine_dies(&s.c, sender);
	cluster_run(&s.c, LOOP_NS_PER_S);
	for (unsigned int i = 0; i < PEERS; i++)
		handshake_release(s.remotes[i]);
	cluster_free(&s.c);
	cache_close(&s.caches[0]);
	cache_close(&theirs);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(pools_announced_in_turns_reach_all),
		cmocka_unit_test(pool_named_by_a_room_is_announced_first),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
