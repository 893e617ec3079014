/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A receiver gets all of its bytes before the others of its room: its later end does not
 * affect them, nor do their bytes affect it. In-process cluster, virtual time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/peer/peer.h"
#include "proto/kvd_status.h"
#include "tests/lib/cluster.h"

#define MS LOOP_NS_PER_MS

static const struct cache geometry = {.layers = 4,
				      .pages = 16,
				      .page_tokens = 4,
				      .units = 2,
				      .total_units = 4,
				      .unit_bytes = 32};

/* node 0 sends; each of the others takes half of the heads */
struct trio {
	struct cluster c;
	struct session *from, *early, *late;
	struct cache src, one, two;
};

static int setup(void **state)
{
	struct trio *p = calloc(1, sizeof(*p));

	cluster_new(&p->c, 1, 3);
	p->from = cluster_engine(&p->c, 0, "from");
	p->early = cluster_engine(&p->c, 1, "early");
	p->late = cluster_engine(&p->c, 2, "late");
	p->src = p->one = p->two = geometry;
	p->src.units = 4;
	p->two.first_unit = 2;
	cluster_cache(&p->c, p->from, "kv", 0, &p->src);
	cluster_cache(&p->c, p->early, "kv", 0, &p->one);
	cluster_cache(&p->c, p->late, "kv", 1, &p->two);
	memset(p->src.base, 0, p->src.bytes); /* its first word is waited for */
	*state = p;
	return 0;
}

static int teardown(void **state)
{
	struct trio *p = *state;

	cluster_free(&p->c);
	cache_close(&p->src);
	cache_close(&p->one);
	cache_close(&p->two);
	free(p);
	return 0;
}

static void open_half(struct trio *p, struct session *engine, const struct cache *half,
		      const char *pages)
{
	cluster_ok(&p->c, engine,
		   "{'cmd':'room.open','room':'1','role':'recv','pool':%llu,"
		   "'receivers':2,'sources':['%s']}",
		   (unsigned long long)half->pool, p->c.nodes[0].endpoint);
	cluster_ok(&p->c, engine,
		   "{'cmd':'room.bind','room':'1','views':{'kv':{'pages':%s}}}", pages);
}

/* Until the early one has all of its bytes. */
static void begin(struct trio *p)
{
	cluster_ok(&p->c, p->from,
		   "{'cmd':'room.open','room':'1','role':'send','pool':%llu}",
		   (unsigned long long)p->src.pool);
	open_half(p, p->early, &p->one, "[7,2]");
	open_half(p, p->late, &p->two, "[7,2,8,12]");
	cluster_until_state(&p->c, p->from, "send", 1, KVD_WAITING_FOR_INPUT);
	cluster_ok(&p->c, p->from,
		   "{'cmd':'room.send','room':'1','seq':0,'views':{'kv':{'pages':[3,4],"
		   "'first_token':0,'tokens':[0,8]}}}");
	cluster_until_state(&p->c, p->early, "recv", 1, KVD_SUCCESS);
	cluster_run(&p->c, 50 * MS);
}

static void send_rest(struct trio *p, bool held)
{
	char wait[96] = "";

	if (held)
		snprintf(wait, sizeof(wait),
			 ",'wait':{'kind':'seq','region':%llu,'offset':0,'value':'1'}",
			 (unsigned long long)p->src.region);
	cluster_ok(&p->c, p->from,
		   "{'cmd':'room.send','room':'1','seq':1,'last':true,'views':{'kv':{"
		   "'pages':[9,1],'first_token':8,'tokens':[8,16]}}%s}",
		   wait);
	cluster_run(&p->c, 50 * MS);
}

static bool early_is_down(void *arg)
{
	struct trio *p = arg;
	const struct remote *remote;

	list_foreach(remote, handshake_remotes(p->c.nodes[0].kvd.handshake), link) {
		if (strcmp(remote->peer->endpoint, p->c.nodes[1].endpoint) == 0)
			return sm_state(&remote->peer->sm) == PEER_DOWN;
	}
	return false;
}

static void partition(struct trio *p, bool on)
{
	mem_hub_partition(p->c.links, p->c.nodes[0].endpoint, p->c.nodes[1].endpoint, on);
	if (on)
		cluster_until(&p->c, early_is_down, p, "the peer down");
}

static void the_late_one_gets_all(struct trio *p)
{
	memset(p->src.base, 0xff, 8);
	cluster_until_state(&p->c, p->late, "recv", 1, KVD_SUCCESS);
	cluster_until_state(&p->c, p->from, "send", 1, KVD_SUCCESS);
	partition(p, false);
}

static void receiver_complete_may_be_lost(void **state)
{
	struct trio *p = *state;

	begin(p);
	partition(p, true);
	send_rest(p, false);
	the_late_one_gets_all(p);
}

static void receiver_complete_may_be_lost_before_a_chunk(void **state)
{
	struct trio *p = *state;

	begin(p);
	send_rest(p, true);
	partition(p, true);
	the_late_one_gets_all(p);
}

static void receiver_complete_may_be_lost_during_a_chunk(void **state)
{
	struct trio *p = *state;
	struct fake_rule stuck = {
		.fault = FAKE_STUCK, .to = p->c.nodes[1].kvd.transports[0], .times = 1};

	begin(p);
	assert_int_equal(fake_script(p->c.bytes, &stuck), 0);
	send_rest(p, false);
	partition(p, true);
	the_late_one_gets_all(p);
	fake_script_clear(p->c.bytes);
}

/* Its memory is its own again, also while a chunk for the others waits. */
static void receiver_complete_may_remove_its_pool(void **state)
{
	struct trio *p = *state;
	uint64_t begin_ns;

	begin(p);
	send_rest(p, true);
	begin_ns = loop_now_ns(p->c.loop);
	cluster_ok(&p->c, p->early, "{'cmd':'room.close','room':'1','role':'recv'}");
	cluster_ok(&p->c, p->early, "{'cmd':'pool.unregister','pool':%llu}",
		   (unsigned long long)p->one.pool);
	assert_true(loop_now_ns(p->c.loop) - begin_ns < LOOP_NS_PER_S);
	the_late_one_gets_all(p);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(receiver_complete_may_be_lost),
		CASE(receiver_complete_may_be_lost_before_a_chunk),
		CASE(receiver_complete_may_be_lost_during_a_chunk),
		CASE(receiver_complete_may_remove_its_pool),
	};

	return cmocka_run_group_tests_name("rooms_leave", tests, NULL, NULL);
}
