/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pulls whose engine allocates pages later; offers that wait for their stream, whose
 * lease is extended, or that get their number from the pullers; and retries of failed
 * pullers.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "daemon/room/room.h"
#include "daemon/room/rooms.h"
#include "proto/kvd_status.h"
#include "tests/lib/room_pair.h"
#include "tests/sim/fake.h"

#define MS LOOP_NS_PER_MS
#define S LOOP_NS_PER_S

static int setup(void **state)
{
	static const struct cache geometry = {.layers = 2,
					      .pages = 16,
					      .page_tokens = 4,
					      .units = 2,
					      .total_units = 2,
					      .unit_bytes = 32};
	struct room_pair *p = room_pair_new(&geometry, 1);

	memset(p->src.base + 8, 7, p->src.bytes - 8); /* the first word is a `wait`'s */
	*state = p;
	return 0;
}

static const struct room *room_of(struct room_pair *p, unsigned int node,
				  enum room_role role, uint64_t number)
{
	return rooms_find(rooms_of(&p->c.nodes[node].kvd), node ? p->decode : p->prefill,
			  role, number);
}

static void open_offer(struct room_pair *p, uint64_t room, const char *more)
{
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.open','room':'%llu','role':'offer','pool':%llu,'views':{"
		   "'kv':{'pages':[3,4],'tokens':[0,7]}}%s}",
		   (unsigned long long)room, (unsigned long long)p->src.pool, more);
}

static void open_pull(struct room_pair *p, uint64_t room, const char *more)
{
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'%llu','role':'pull','pool':%llu,'sources':"
		   "['%s']%s}",
		   (unsigned long long)room, (unsigned long long)p->dst.pool,
		   p->c.nodes[0].endpoint, more);
}

static void bind(struct room_pair *p, uint64_t room, const char *views)
{
	cluster_ok(&p->c, p->decode, "{'cmd':'room.bind','room':'%llu','views':%s}",
		   (unsigned long long)room, views);
}

static const char *const all = "{'kv':{'pages':[7,2],'tokens':[0,7]}}";

static uint64_t landed(const struct room_pair *p)
{
	uint64_t n = 0;

	for (uint64_t i = 0; i < p->dst.bytes; i++)
		n += p->dst.base[i] == 7;
	return n;
}

#define TOKEN_BYTES (2u * 2 * 2 * 32)

static void both_succeed(struct room_pair *p, uint64_t room, uint64_t tokens)
{
	cluster_until_state(&p->c, p->decode, "pull", room, KVD_SUCCESS);
	cluster_until_state(&p->c, p->prefill, "offer", room, KVD_SUCCESS);
	assert_int_equal(landed(p), tokens * TOKEN_BYTES);
}

/* ---- late pages ---- */

static void pull_without_pages_keeps_lease_and_reads_bound_pages(void **state)
{
	struct room_pair *p = *state;

	open_offer(p, 1, ",'lease_ms':300");
	open_pull(p, 1, "");
	cluster_until_state(&p->c, p->decode, "pull", 1, KVD_WAITING_FOR_INPUT);
	cluster_run(&p->c, 3 * S);
	assert_int_equal(cluster_state(&p->c, p->prefill, "offer", 1),
			 KVD_WAITING_FOR_INPUT);
	bind(p, 1, "{'kv':{'pages':[7],'first_token':4,'tokens':[4,7]}}");
	both_succeed(p, 1, 3); /* a prefix hit of four tokens */
	cluster_refused(&p->c, p->decode, "ESTATE",
			"{'cmd':'room.bind','room':'1','views':%s}", all);
}

static void pull_is_waiting_when_the_offer_is_there(void **state)
{
	struct room_pair *p = *state;

	open_pull(p, 2, "");
	cluster_run(&p->c, S);
	assert_int_equal(cluster_state(&p->c, p->decode, "pull", 2), KVD_BOOTSTRAPPING);
	open_offer(p, 2, "");
	cluster_until_state(&p->c, p->decode, "pull", 2, KVD_WAITING_FOR_INPUT);
	bind(p, 2, all);
	both_succeed(p, 2, 7);
	open_pull(p, 3, "");
	bind(p, 3, all); /* before there is an offer */
	cluster_run(&p->c, S);
	memset(p->dst.base, 0, p->dst.bytes);
	open_offer(p, 3, "");
	both_succeed(p, 3, 7);
}

/* The first of two offers is held while the second is still being computed. */
static void lease_is_kept_while_another_offer_is_awaited(void **state)
{
	struct room_pair *p = *state;
	struct session *other = cluster_engine(&p->c, 0, "other");
	struct cache half[2] = {p->src, p->src};

	for (unsigned int i = 0; i < 2; i++) {
		half[i].units = 1;
		half[i].first_unit = i;
		cluster_cache(&p->c, i ? other : p->prefill, "half", i, &half[i]);
		memset(half[i].base, 7, half[i].bytes);
	}
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'9','role':'pull','pool':%llu,'sources':["
		   "{'endpoint':'%s','pool':'half','rank':0},{'endpoint':'%s','pool':"
		   "'half','rank':1}],'views':%s}",
		   (unsigned long long)p->dst.pool, p->c.nodes[0].endpoint,
		   p->c.nodes[0].endpoint, all);
	for (unsigned int i = 0; i < 2; i++) {
		cluster_ok(
			&p->c, i ? other : p->prefill,
			"{'cmd':'room.open','room':'9','role':'offer','pool':%llu,"
			"'lease_ms':300,'views':{'kv':{'pages':[3,4],'tokens':[0,7]}}}",
			(unsigned long long)half[i].pool);
		cluster_run(&p->c, 2 * S);
	}
	both_succeed(p, 9, 7);
	cache_close(&half[0]);
	cache_close(&half[1]);
}

static void pull_without_an_offer_names_it(void **state)
{
	struct room_pair *p = *state;

	open_pull(p, 4, ",'timeouts':{'bootstrap_ms':500}");
	cluster_until_state(&p->c, p->decode, "pull", 4, KVD_FAILED);
	room_failed_with(room_of(p, 1, ROOM_PULL, 4), ERR_TIMEOUT,
			 "peer n0 (pool 'kv') to offer room 4");
}

static void pull_without_bound_pages_releases_the_offer(void **state)
{
	struct room_pair *p = *state;

	open_offer(p, 5, "");
	open_pull(p, 5, "");
	cluster_until_state(&p->c, p->decode, "pull", 5, KVD_WAITING_FOR_INPUT);
	bind(p, 5, "{}");
	both_succeed(p, 5, 0);
}

static void pull_aborted_before_pages_releases_the_offer(void **state)
{
	struct room_pair *p = *state;

	open_offer(p, 6, "");
	open_pull(p, 6, "");
	cluster_until_state(&p->c, p->decode, "pull", 6, KVD_WAITING_FOR_INPUT);
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.abort','room':'6','reason':'no room'}");
	cluster_run(&p->c, 100 * MS);
	room_failed_with(room_of(p, 0, ROOM_OFFER, 6), ERR_ABORTED, "no room");
	room_failed_with(room_of(p, 1, ROOM_PULL, 6), ERR_ABORTED, "no room");
	/* and in the other order */
	open_offer(p, 7, "");
	open_pull(p, 7, "");
	cluster_until_state(&p->c, p->decode, "pull", 7, KVD_WAITING_FOR_INPUT);
	cluster_ok(&p->c, p->prefill, "{'cmd':'room.abort','room':'7','reason':'mine'}");
	cluster_run(&p->c, 100 * MS);
	room_failed_with(room_of(p, 1, ROOM_PULL, 7), ERR_ABORTED, "mine");
	cluster_refused(&p->c, p->decode, "EABORTED",
			"{'cmd':'room.bind','room':'7','views':%s}", all);
}

static void wait_without_pages_is_refused(void **state)
{
	struct room_pair *p = *state;

	cluster_refused(
		&p->c, p->decode, "EINVAL",
		"{'cmd':'room.open','room':'8','role':'pull','pool':%llu,'sources':"
		"['%s'],'wait':{'kind':'seq','region':%llu,'offset':0,'value':'1'}}",
		(unsigned long long)p->dst.pool, p->c.nodes[0].endpoint,
		(unsigned long long)p->dst.region);
}

/* ---- leases ---- */

static void lease_extended_lasts(void **state)
{
	struct room_pair *p = *state;

	open_offer(p, 10, ",'lease_ms':500");
	cluster_run(&p->c, 400 * MS);
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.extend','room':'10','lease_ms':5000}");
	cluster_run(&p->c, 4 * S);
	assert_int_equal(cluster_state(&p->c, p->prefill, "offer", 10),
			 KVD_WAITING_FOR_INPUT);
	cluster_run(&p->c, 3 * S);
	room_failed_with(room_of(p, 0, ROOM_OFFER, 10), ERR_LEASE,
			 "the lease of 5000 ms");
	cluster_refused(&p->c, p->prefill, "ELEASE",
			"{'cmd':'room.extend','room':'10','lease_ms':5000}");
	/* a shorter one, too */
	open_offer(p, 11, ",'lease_ms':60000");
	cluster_ok(&p->c, p->prefill, "{'cmd':'room.extend','room':'11','lease_ms':200}");
	cluster_run(&p->c, S);
	room_failed_with(room_of(p, 0, ROOM_OFFER, 11), ERR_LEASE, "the lease of 200 ms");
	open_pull(p, 12, "");
	cluster_refused(&p->c, p->decode, "ESTATE",
			"{'cmd':'room.extend','room':'12','lease_ms':5000}");
	cluster_refused(&p->c, p->decode, "ERANGE",
			"{'cmd':'room.extend','room':'12','lease_ms':0}");
	cluster_ok(&p->c, p->decode, "{'cmd':'room.abort','room':'12'}");
	cluster_until_state(&p->c, p->decode, "pull", 12, KVD_FAILED);
}

/* ---- offers that wait for their stream ---- */

static void offer_with_wait(struct room_pair *p, uint64_t room, const char *more)
{
	char text[160];

	snprintf(text, sizeof(text),
		 ",'wait':{'kind':'seq','region':%llu,'offset':0,'value':'9'}%s",
		 (unsigned long long)p->src.region, more);
	open_offer(p, room, text);
}

static void offer_is_read_when_its_stream_has_passed(void **state)
{
	struct room_pair *p = *state;
	uint64_t *word = (uint64_t *)(void *)p->src.base;

	offer_with_wait(p, 20, "");
	open_pull(p, 20, "");
	bind(p, 20, all);
	*word = 8;
	cluster_run(&p->c, 2 * S);
	assert_int_equal(landed(p), 0);
	assert_int_equal(cluster_state(&p->c, p->decode, "pull", 20),
			 KVD_WAITING_FOR_INPUT);
	*word = 9;
	both_succeed(p, 20, 7);
	/* passed already */
	memset(p->dst.base, 0, p->dst.bytes);
	offer_with_wait(p, 21, "");
	open_pull(p, 21, "");
	bind(p, 21, all);
	both_succeed(p, 21, 7);
}

static void offer_with_lost_stream_ends_with_its_lease(void **state)
{
	struct room_pair *p = *state;

	offer_with_wait(p, 22, ",'lease_ms':300");
	open_pull(p, 22, "");
	cluster_until_state(&p->c, p->prefill, "offer", 22, KVD_FAILED);
	cluster_run(&p->c, 100 * MS);
	room_failed_with(room_of(p, 0, ROOM_OFFER, 22), ERR_LEASE, "the lease of 300 ms");
	room_failed_with(room_of(p, 1, ROOM_PULL, 22), ERR_LEASE, "the lease of 300 ms");
	assert_int_equal(landed(p), 0);
}

/* ---- how many pullers ---- */

static void pull_as(struct room_pair *p, struct session *engine, const struct cache *k,
		    uint64_t room, unsigned int receivers)
{
	cluster_ok(&p->c, engine,
		   "{'cmd':'room.open','room':'%llu','role':'pull','pool':%llu,'sources':"
		   "['%s'],'receivers':%u,'views':{'kv':{'pages':[7,2],'tokens':[0,7]}}}",
		   (unsigned long long)room, (unsigned long long)k->pool,
		   p->c.nodes[0].endpoint, receivers);
}

static void pullers_send_their_number(void **state)
{
	struct room_pair *p = *state;
	struct session *other = cluster_engine(&p->c, 1, "other");
	struct cache third = p->dst;

	cluster_cache(&p->c, other, "kv", 1, &third);
	open_offer(p, 30, ",'receivers_from_pullers':true");
	pull_as(p, p->decode, &p->dst, 30, 2);
	cluster_until_state(&p->c, p->decode, "pull", 30, KVD_SUCCESS);
	cluster_run(&p->c, S);
	assert_int_equal(cluster_state(&p->c, p->prefill, "offer", 30), KVD_TRANSFERRING);
	pull_as(p, other, &third, 30, 3); /* disagrees */
	cluster_until_state(&p->c, other, "pull", 30, KVD_FAILED);
	room_failed_with(rooms_find(rooms_of(&p->c.nodes[1].kvd), other, ROOM_PULL, 30),
			 ERR_INVAL, "receivers: offer 30 has 2, this puller expects 3");
	cluster_ok(&p->c, other, "{'cmd':'room.close','room':'30'}");
	pull_as(p, other, &third, 30, 2);
	cluster_until_state(&p->c, other, "pull", 30, KVD_SUCCESS);
	cluster_until_state(&p->c, p->prefill, "offer", 30, KVD_SUCCESS);
	/* one that sends no number is the only one; the offer's number counts, too */
	open_offer(p, 31, ",'receivers_from_pullers':true");
	open_pull(p, 31, ",'views':{'kv':{'pages':[7,2],'tokens':[0,7]}}");
	cluster_until_state(&p->c, p->prefill, "offer", 31, KVD_SUCCESS);
	open_offer(p, 32, "");
	pull_as(p, p->decode, &p->dst, 32, 2);
	cluster_until_state(&p->c, p->decode, "pull", 32, KVD_FAILED);
	room_failed_with(room_of(p, 1, ROOM_PULL, 32), ERR_INVAL,
			 "has 1, this puller expects 2");
	cluster_refused(&p->c, p->prefill, "EINVAL",
			"{'cmd':'room.open','room':'33','role':'offer','pool':%llu,"
			"'receivers':2,'receivers_from_pullers':true,"
			"'views':{'kv':{'pages':[3]}}}",
			(unsigned long long)p->src.pool);
	cluster_ok(&p->c, p->prefill, "{'cmd':'room.abort','room':'32'}");
	cluster_until_state(&p->c, p->prefill, "offer", 32, KVD_FAILED);
	cache_close(&third);
}

/* ---- retries of pullers ---- */

static void fault(struct room_pair *p, enum fake_fault kind)
{
	assert_int_equal(
		fake_script(p->c.bytes, &(struct fake_rule){.fault = kind,
							    .kinds = 1 << XP_READ,
							    .times = 1}),
		0);
}

static void comes_again(struct room_pair *p, uint64_t room)
{
	const struct room *offer = room_of(p, 0, ROOM_OFFER, room);

	cluster_until_state(&p->c, p->decode, "pull", room, KVD_FAILED);
	cluster_run(&p->c, 100 * MS);
	assert_true(room_live(offer));
	assert_int_equal(offer->party_count, 0);
	cluster_ok(&p->c, p->decode, "{'cmd':'room.close','room':'%llu'}",
		   (unsigned long long)room);
	open_pull(p, room, "");
	bind(p, room, all);
	both_succeed(p, room, 7);
}

static void puller_failed_may_retry(void **state)
{
	struct room_pair *p = *state;

	open_offer(p, 40, "");
	fault(p, FAKE_ERROR);
	open_pull(p, 40, "");
	bind(p, 40, all);
	comes_again(p, 40);
	assert_int_equal(metrics_get(&p->c.nodes[0].kvd.metrics, METRIC_PULLS_TAKEN_BACK),
			 1);
	memset(p->dst.base, 0, p->dst.bytes);
	open_offer(p, 41, "");
	fault(p, FAKE_STUCK);
	open_pull(p, 41, ",'timeouts':{'stall_ms':500}");
	bind(p, 41, all);
	comes_again(p, 41);
}

static void puller_not_retrying_waits_for_the_lease(void **state)
{
	struct room_pair *p = *state;

	open_offer(p, 42, ",'lease_ms':1000");
	fault(p, FAKE_ERROR);
	open_pull(p, 42, "");
	bind(p, 42, all);
	cluster_until_state(&p->c, p->decode, "pull", 42, KVD_FAILED);
	cluster_run(&p->c, 2 * S);
	room_failed_with(room_of(p, 0, ROOM_OFFER, 42), ERR_LEASE,
			 "the lease of 1000 ms");
}

/* Its engine, its daemon or its connection has ended: the offer does not wait. */
static void puller_gone_ends_the_offer(void **state)
{
	struct room_pair *p = *state;

	open_offer(p, 43, ",'lease_ms':60000");
	open_pull(p, 43, "");
	cluster_until_state(&p->c, p->decode, "pull", 43, KVD_WAITING_FOR_INPUT);
	fault(p, FAKE_CUT);
	bind(p, 43, all);
	cluster_until_state(&p->c, p->decode, "pull", 43, KVD_FAILED);
	cluster_run(&p->c, 500 * MS);
	assert_int_equal(cluster_state(&p->c, p->prefill, "offer", 43), KVD_FAILED);
	cluster_run(&p->c, 5 * S); /* a new connection */
	open_offer(p, 44, ",'lease_ms':60000");
	open_pull(p, 44, "");
	cluster_until_state(&p->c, p->decode, "pull", 44, KVD_WAITING_FOR_INPUT);
	cluster_engine_dies(&p->c, p->decode);
	cluster_run(&p->c, 500 * MS);
	room_failed_with(room_of(p, 0, ROOM_OFFER, 44), ERR_SESSION, "has ended");
}

/* dead_after is enough, connect_timeout is for daemons that were never up: for the
 * pull that is open when its source ends, for one that starts before that is known,
 * and for a later one. */
static void pull_of_gone_source_fails_soon(void **state)
{
	struct room_pair *p = *state;
	uint64_t begin_ns;

	open_pull(p, 51, ""); /* waits for an offer */
	cluster_run(&p->c, S);
	cluster_crash(&p->c, 0, MEM_CRASH_POWER);
	begin_ns = loop_now_ns(p->c.loop);
	open_pull(p, 52, "");
	cluster_until_state(&p->c, p->decode, "pull", 51, KVD_FAILED);
	cluster_until_state(&p->c, p->decode, "pull", 52, KVD_FAILED);
	room_failed_with(room_of(p, 1, ROOM_PULL, 51), ERR_PEER, "peer ");
	room_failed_with(room_of(p, 1, ROOM_PULL, 52), ERR_PEER, "peer ");
	/* peers have 50 ms here, and waits for a lost one 800 ms */
	assert_true(loop_now_ns(p->c.loop) - begin_ns < 200 * MS);
	for (unsigned int room = 51; room <= 52; room++) /* nothing holds it any more */
		cluster_ok(&p->c, p->decode, "{'cmd':'room.close','room':'%u'}", room);
	cluster_run(&p->c, 20 * S);
	begin_ns = loop_now_ns(p->c.loop);
	open_pull(p, 53, "");
	cluster_until_state(&p->c, p->decode, "pull", 53, KVD_FAILED);
	room_failed_with(room_of(p, 1, ROOM_PULL, 53), ERR_PEER, "cannot be reached");
	assert_in_range(loop_now_ns(p->c.loop) - begin_ns, 700 * MS, 1200 * MS);
}

/* The same for a transfer's session. */
static void attach_to_gone_daemon_fails_soon(void **state)
{
	struct room_pair *p = *state;
	uint64_t begin_ns;

	open_pull(p, 54, "");
	cluster_run(&p->c, S);
	cluster_crash(&p->c, 0, MEM_CRASH_POWER);
	cluster_until_state(&p->c, p->decode, "pull", 54, KVD_FAILED);
	begin_ns = loop_now_ns(p->c.loop);
	cluster_refused(&p->c, p->decode, "EPEER",
			"{'cmd':'peer.attach','endpoint':'%s','session':'1','secret':"
			"'00000000000000000000000000000000'}",
			p->c.nodes[0].endpoint);
	assert_true(loop_now_ns(p->c.loop) - begin_ns < 1200 * MS);
}

int main(void)
{
#define CASE(f) cmocka_unit_test_setup_teardown(f, setup, room_pair_teardown)
	const struct CMUnitTest tests[] = {
		CASE(pull_without_pages_keeps_lease_and_reads_bound_pages),
		CASE(pull_is_waiting_when_the_offer_is_there),
		CASE(lease_is_kept_while_another_offer_is_awaited),
		CASE(pull_without_an_offer_names_it),
		CASE(pull_without_bound_pages_releases_the_offer),
		CASE(pull_aborted_before_pages_releases_the_offer),
		CASE(wait_without_pages_is_refused),
		CASE(lease_extended_lasts),
		CASE(offer_is_read_when_its_stream_has_passed),
		CASE(offer_with_lost_stream_ends_with_its_lease),
		CASE(pullers_send_their_number),
		CASE(puller_failed_may_retry),
		CASE(puller_not_retrying_waits_for_the_lease),
		CASE(puller_gone_ends_the_offer),
		CASE(pull_of_gone_source_fails_soon),
		CASE(attach_to_gone_daemon_fails_soon),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
