/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Descriptions of memory between daemons: a list that is too large for one message is
 * refused by name and does not end the peering; a pool is found at the same cost for any
 * number of pools of a peer. In-process cluster.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/peer/peer_impl.h"
#include "daemon/session/region.h"
#include "tests/lib/accounts.h"
#include "tests/lib/file.h"
#include "tests/lib/told_pair.h"

#define MANY 2100u /* regions, whose keys do not fit in a frame at XP_KEY_MAX each */
#define PAGE 4096u

/* ---- keys as long as a transport may make them ---- */

static int long_key_pack(struct xp_reg *reg, struct xp_peer *peer, void *buf, size_t size,
			 size_t *len_p)
{
	uint8_t *key = buf;
	int r = fake_ops.key_pack(reg, peer, buf, size, len_p);

	assert_true(r == 0 && size == XP_KEY_MAX && *len_p < XP_KEY_MAX - 1);
	memset(key + *len_p, 0, XP_KEY_MAX - *len_p);
	key[XP_KEY_MAX - 1] = (uint8_t)*len_p;
	*len_p = XP_KEY_MAX;
	return 0;
}

static unsigned int keys_until_lack; /* 0: there is memory for all */

static int long_key_unpack(struct xp_peer *peer, const void *buf, size_t len, void *owner,
			   struct xp_key **key_p)
{
	assert_int_equal(len, XP_KEY_MAX);
	if (keys_until_lack && --keys_until_lack == 0)
		return err_raise(ERR_NOMEM, "no memory for a key");
	return fake_ops.key_unpack(peer, buf, ((const uint8_t *)buf)[len - 1], owner,
				   key_p);
}

static struct transport_ops long_keys;

static int setup(void **state)
{
	struct pair *p = calloc(1, sizeof(*p));

	long_keys = fake_ops;
	long_keys.key_pack = long_key_pack;
	long_keys.key_unpack = long_key_unpack;
	cluster_new(&p->c, 1, 2);
	for (unsigned int i = 0; i < 2; i++) {
		p->c.nodes[i].kvd.transports[0]->ops = &long_keys;
		p->c.nodes[i].config.session_regions_max = 4096;
	}
	p->me = cluster_engine(&p->c, 0, "me");
	p->you = cluster_engine(&p->c, 1, "you");
	p->mine = p->yours = (struct cache){.layers = 1,
					    .pages = 16,
					    .page_tokens = 1,
					    .units = 1,
					    .total_units = 1,
					    .unit_bytes = 8};
	cluster_cache(&p->c, p->me, "mine", 0, &p->mine);
	cluster_cache(&p->c, p->you, "yours", 0, &p->yours);
	*state = p;
	return 0;
}

static int teardown(void **state)
{
	struct pair *p = *state;

	cluster_free(&p->c);
	cache_close(&p->mine);
	cache_close(&p->yours);
	free(p);
	return 0;
}

/* ---- lists ---- */

/* The number of the first of `count` regions; the others follow. */
static unsigned int register_many(struct pair *p, unsigned int count)
{
	int fd = memfd_create("many", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	unsigned int first = 0;

	assert_true(fd >= 0 && file_fill(fd, (size_t)count * PAGE) == 0);
	for (unsigned int i = 0; i < count; i++) {
		const cJSON *id;
		cJSON *answer;
		char text[200];

		snprintf(text, sizeof(text),
			 "{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,"
			 "\"offset\":%u,\"length\":%u,\"address\":\"%llu\"}",
			 i * PAGE, PAGE, (1ull << 40) + (unsigned long long)i * PAGE);
		answer = cluster_call_fd(&p->c, p->me, dup(fd), NULL, text);
		id = cJSON_GetObjectItem(answer, "region");
		if (!cJSON_IsNumber(id))
			fail_msg("%s", cJSON_PrintUnformatted(answer));
		first = i ? first : (unsigned int)id->valueint;
		assert_int_equal(id->valueint, first + i);
		cJSON_Delete(answer);
	}
	close(fd);
	return first;
}

static void session_too_large_to_register_is_refused_by_name(void **state)
{
	struct pair *p = *state;
	unsigned int first = register_many(p, MANY);
	cJSON *answer = attach(p);
	const cJSON *error = cJSON_GetObjectItem(answer, "error");
	const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(error, "message"));

	assert_non_null(text);
	if (!strstr(text, "session 'me' needs more than"))
		fail_msg("%s", text);
	assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(error, "code")),
			    "ETOOBIG");
	cJSON_Delete(answer);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_non_null(remote_at(p, 0));
	assert_int_equal(sm_state(&remote_at(p, 0)->peer->sm), PEER_UP);
	for (unsigned int i = 0; i < MANY / 2; i++)
		cluster_ok(&p->c, p->me, "{'cmd':'region.unregister','region':%u}",
			   first + i);
	assert_attaches(p); /* the rest fits */
}

/* So many buffers, each in its own region; the first holds its one field. */
static void register_wide_pool(struct pair *p, unsigned int first, unsigned int count)
{
	const size_t size = 32u * count;
	char *regions = malloc(size), *buffers = malloc(size);
	size_t r = 0, b = 0;

	for (unsigned int i = 0; i < count; i++) {
		const char *comma = i ? "," : "";

		r += (size_t)snprintf(regions + r, size - r, "%s{'region':%u}", comma,
				      first + i);
		b += (size_t)snprintf(buffers + b, size - b, "%s%u", comma, PAGE);
	}
	cluster_ok(&p->c, p->me,
		   "{'cmd':'pool.register','name':'wide','regions':[%s],'layout':{"
		   "'rank':0,'buffers':[%s],'views':{'kv':{'page_tokens':1,'pages':4,"
		   "'layers':[{'layer':0,'fields':[{'name':'k','buffer':0,'offset':0,"
		   "'page_stride':8,'token_stride':8,'unit_stride':8,'unit_bytes':8,"
		   "'first_unit':0,'units':1,'total_units':1}]}]}}}}",
		   regions, buffers);
	free(regions);
	free(buffers);
}

static bool knows(const struct remote *remote, const char *name)
{
	const struct remote_pool *pool;

	list_foreach(pool, &remote->pools.list, link) {
		if (strcmp(pool->name, name) == 0)
			return true;
	}
	return false;
}

static void pool_too_large_to_register_keeps_peering(void **state)
{
	struct pair *p = *state;
	unsigned int first = register_many(p, MANY);

	register_wide_pool(p, first, MANY);
	cluster_ok(&p->c, p->me, "{'cmd':'peer.connect','endpoint':'%s'}",
		   p->c.nodes[1].endpoint);
	cluster_run(&p->c, LOOP_NS_PER_S);
	for (unsigned int node = 0; node < 2; node++)
		assert_int_equal(sm_state(&remote_at(p, node)->peer->sm), PEER_UP);
	assert_true(knows(remote_at(p, 1), "mine"));
	assert_false(knows(remote_at(p, 1), "wide"));
	assert_int_equal(remote_at(p, 1)->peer->epoch, 1);
}

/* ---- keys in turns ---- */

#define WIDE 12u

static struct remote_pool *wide_there(struct pair *p)
{
	struct remote_pool *pool;

	register_wide_pool(p, register_many(p, WIDE), WIDE);
	cluster_ok(&p->c, p->me, "{'cmd':'peer.connect','endpoint':'%s'}",
		   p->c.nodes[1].endpoint);
	cluster_run(&p->c, LOOP_NS_PER_S);
	list_foreach(pool, &remote_at(p, 1)->pools.list, link) {
		if (strcmp(pool->name, "wide") == 0)
			return pool;
	}
	fail_msg("the pool is not known");
	return NULL;
}

static unsigned int keys_of(const struct remote_pool *pool)
{
	unsigned int n = 0;

	for (uint32_t i = 0; i < pool->region_count; i++)
		n += pool->regions[i].key != NULL;
	return n;
}

static void want_some(struct pair *p, struct remote_pool *pool)
{
	loop_virtual_parts(p->c.loop, 1);
	handshake_pool_use(pool);
	handshake_want_keys(pool);
	loop_turn(p->c.loop, LOOP_NS_PER_S);
	assert_in_range(keys_of(pool), 1, WIDE - 1);
	assert_false(pool->ready);
}

static void keys_are_requested_one_a_turn(void **state)
{
	struct pair *p = *state;
	struct remote_pool *pool = wide_there(p);
	unsigned int before;

	assert_false(pool->wanted);
	fake_hub_profile(p->c.bytes)->key_ns = 1000;
	want_some(p, pool);
	while (!pool->ready) {
		before = keys_of(pool);
		loop_turn(p->c.loop, LOOP_NS_PER_S);
		assert_true(keys_of(pool) <= before + 1);
	}
	assert_int_equal(keys_of(pool), WIDE);
	for (uint32_t i = 0; i < WIDE; i++)
		assert_ptr_equal(pool->buffers[i].key, pool->regions[i].key);
	handshake_pool_unuse(pool);
	loop_virtual_parts(p->c.loop, 0);
}

/* A lack of memory is temporary: they are all requested again. */
static void keys_refused_between_turns_are_requested_again(void **state)
{
	struct pair *p = *state;
	struct remote_pool *pool = wide_there(p);

	want_some(p, pool);
	keys_until_lack = 2;
	for (unsigned int i = 0; i < WIDE; i++)
		loop_turn(p->c.loop, 0);
	assert_int_equal(pool->refused.code, ERR_NOMEM);
	assert_in_range(keys_of(pool), 1, WIDE - 1);
	handshake_want_keys(pool);
	for (unsigned int i = 0; i < WIDE; i++)
		loop_turn(p->c.loop, 0);
	assert_true(pool->ready);
	handshake_pool_unuse(pool);
	loop_virtual_parts(p->c.loop, 0);
}

static void pool_may_go_between_its_keys(void **state)
{
	struct pair *p = *state;
	struct remote_pool *pool = wide_there(p);

	want_some(p, pool);
	cluster_engine_dies(&p->c, p->me);
	handshake_pool_unuse(pool); /* it may be the last use */
	loop_virtual_parts(p->c.loop, 0);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_false(knows(remote_at(p, 1), "wide"));
	p->me = cluster_engine(&p->c, 0, "me");
	pool = wide_there(p);
	want_some(p, pool);
	peer_kill(remote_at(p, 1)->peer,
		  &(struct err){.code = ERR_PEER, .text = "for the test"});
	assert_true(pool->dead);
	assert_int_equal(keys_of(pool), 0);
	loop_turn(p->c.loop, LOOP_NS_PER_S);
	assert_int_equal(pool->refused.code, ERR_OK); /* no more are requested */
	assert_int_equal(keys_of(pool), 0);
	handshake_pool_unuse(pool);
	loop_virtual_parts(p->c.loop, 0);
}

/* ---- quiet ---- */

/* A room that waits for the peer needs its death in time; without it the peer is quiet.
 */
static void peer_that_a_room_waits_for_is_not_quiet(void **state)
{
	struct pair *p = *state;
	const struct peer_impl *peer;

	cluster_ok(&p->c, p->me,
		   "{'cmd':'room.open','room':'7','role':'recv','pool':%llu,'sources':['"
		   "%s']}",
		   (unsigned long long)p->mine.pool, p->c.nodes[1].endpoint);
	cluster_run(&p->c, 5 * LOOP_NS_PER_S);
	peer = remote_at(p, 0)->peer->impl;
	assert_int_equal(sm_state(&peer->peer.sm), PEER_UP);
	assert_false(peer->quiet);
	cluster_ok(&p->c, p->me, "{'cmd':'room.abort','room':'7','role':'recv'}");
	cluster_run(&p->c, 5 * LOOP_NS_PER_S);
	assert_true(peer->quiet);
}

/* ---- finding ---- */

static uint64_t register_pool(struct pair *p, struct session *session,
			      const struct cache *cache, unsigned int number)
{
	const cJSON *id;
	uint64_t pool;
	cJSON *answer = cluster_call(
		&p->c, session,
		"{'cmd':'pool.register','name':'p%u','regions':[{'region':%llu}],"
		"'layout':{'rank':0,'buffers':[%llu],'views':{'kv':{'page_tokens':1,"
		"'pages':4,'layers':[{'layer':0,'fields':[{'name':'k','buffer':0,"
		"'offset':0,'page_stride':8,'token_stride':8,'unit_stride':8,"
		"'unit_bytes':8,'first_unit':0,'units':1,'total_units':1}]}]}}}}",
		number, (unsigned long long)cache->region,
		(unsigned long long)cache->bytes);

	id = cJSON_GetObjectItem(answer, "pool");
	if (!cJSON_IsNumber(id))
		fail_msg("%s", cJSON_PrintUnformatted(answer));
	pool = (uint64_t)id->valuedouble;
	cJSON_Delete(answer);
	return pool;
}

static void pool_is_found_until_removed(void **state)
{
	struct pair *p = *state;
	const struct handshake *hs = p->c.nodes[0].kvd.handshake;
	struct remote *remote;
	uint64_t pool;

	assert_attaches(p);
	remote = remote_at(p, 1);
	assert_true(handshake_pool_is_ours(hs, p->mine.pool));
	assert_false(handshake_pool_is_ours(hs, 999));
	assert_non_null(handshake_pool_by_id(remote, p->mine.pool));
	assert_null(handshake_pool_by_id(remote, 999));
	/* the session's list is sent again: the newest is found */
	assert_non_null(handshake_pool_by_id(remote, p->me->epoch));
	assert_int_equal(handshake_pool_by_id(remote, p->me->epoch)->region_count, 1);
	register_many(p, 2);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(handshake_pool_by_id(remote, p->me->epoch)->region_count, 3);
	pool = register_pool(p, p->me, &p->mine, 1);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_non_null(handshake_pool_by_id(remote, pool));
	cluster_ok(&p->c, p->me, "{'cmd':'pool.unregister','pool':%llu}",
		   (unsigned long long)pool);
	assert_false(handshake_pool_is_ours(hs, pool));
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_null(handshake_pool_by_id(remote, pool));
	assert_non_null(handshake_pool_by_id(remote, p->mine.pool));
	/* with its peer all is removed, and announced again */
	remote->reaches++;
	fake_link_cut(fake_hub_node(p->c.bytes, 0), fake_hub_node(p->c.bytes, 1));
	while (sm_state(&remote->peer->sm) == PEER_UP)
		loop_turn(p->c.loop, LOOP_NS_PER_S);
	assert_null(handshake_pool_by_id(remote, p->mine.pool));
	assert_null(handshake_pool_by_id(remote, p->me->epoch));
	assert_attaches(p);
	assert_non_null(handshake_pool_by_id(remote_at(p, 1), p->mine.pool));
	handshake_release(remote);
}

/* The peer has no place for one pool; when another is removed, it is announced again. */
/* ---- messages on the data line ---- */

static unsigned int landed;

static void count_land(struct xp_inbound *in, const struct xp_sides *sides,
		       const struct err *err)
{
	landed++;
	fake_ops.land(in, sides, err);
}

static void tell_something(struct pair *p, unsigned int node)
{
	const struct wire_pull_ack ack = {.room = 1}; /* of none that is there */

	assert_int_equal(handshake_send_pull_ack(remote_at(p, node), &ack), 0);
	cluster_run(&p->c, LOOP_NS_PER_MS);
}

static void message_taken_is_acknowledged_with_next_or_soon(void **state)
{
	struct pair *p = *state;

	long_keys.land = count_land;
	assert_attaches(p);
	cluster_run(&p->c, LOOP_NS_PER_S);
	landed = 0;
	tell_something(p, 0);
	assert_int_equal(landed, 0);
	assert_false(peer_express_quiet(remote_at(p, 0)->peer));
	tell_something(p, 1);
	assert_int_equal(landed, 1);
	assert_true(peer_express_quiet(remote_at(p, 0)->peer));
	cluster_run(&p->c, 30 * LOOP_NS_PER_MS);
	assert_int_equal(landed, 2);
	assert_true(peer_express_quiet(remote_at(p, 1)->peer));
}

static void messages_taken_are_acknowledged_at_once(void **state)
{
	struct pair *p = *state;

	long_keys.land = count_land;
	assert_attaches(p);
	cluster_run(&p->c, LOOP_NS_PER_S);
	landed = 0;
	for (unsigned int i = 0; i < PEER_EXPRESS_MAX / 4; i++) {
		const struct wire_pull_ack ack = {.room = 1};

		assert_int_equal(landed, 0);
		assert_int_equal(handshake_send_pull_ack(remote_at(p, 0), &ack), 0);
	}
	cluster_run(&p->c, LOOP_NS_PER_MS);
	assert_int_equal(landed, PEER_EXPRESS_MAX / 4);
}

static void pool_refused_at_limit_is_registered_after_removal(void **state)
{
	struct pair *p = *state;
	struct remote *remote;
	uint64_t first, second;
	struct charge filler = {0};

	assert_attaches(p);
	remote = remote_at(p, 1);
	first = register_pool(p, p->me, &p->mine, 1);
	cluster_run(&p->c, LOOP_NS_PER_S);
	account_leave(remote->account, 0, &filler);
	second = register_pool(p, p->me, &p->mine, 2);
	cluster_run(&p->c, LOOP_NS_PER_S);
	charge_drop(&filler);
	assert_non_null(handshake_pool_by_id(remote, first));
	assert_null(handshake_pool_by_id(remote, second));
	cluster_ok(&p->c, p->me, "{'cmd':'pool.unregister','pool':%llu}",
		   (unsigned long long)first);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_null(handshake_pool_by_id(remote, first));
	assert_non_null(handshake_pool_by_id(remote, second));
}

/* An engine gets its memory back, whatever the peer does. */
static void pool_not_released_by_peer_ends_peering(void **state)
{
	struct pair *p = *state;
	struct remote_pool *held;
	uint64_t pool, begin_ns;

	p->c.nodes[0].config.fence_timeout_ns = LOOP_NS_PER_S;
	assert_attaches(p);
	pool = register_pool(p, p->me, &p->mine, 1);
	cluster_run(&p->c, LOOP_NS_PER_S);
	held = handshake_pool_by_id(remote_at(p, 1), pool);
	assert_non_null(held);
	handshake_pool_use(held);
	begin_ns = loop_now_ns(p->c.loop);
	cluster_ok(&p->c, p->me, "{'cmd':'pool.unregister','pool':%llu}",
		   (unsigned long long)pool);
	assert_true(loop_now_ns(p->c.loop) - begin_ns >= 2 * LOOP_NS_PER_S);
	assert_true(loop_now_ns(p->c.loop) - begin_ns < 3 * LOOP_NS_PER_S);
	assert_int_equal(metrics_get(&p->c.nodes[0].kvd.metrics, METRIC_FENCES_WIDENED),
			 1);
	assert_int_equal(remote_at(p, 0)->down.code, ERR_FENCE);
	/* it may come back, and finds the current pools */
	assert_attaches(p);
	assert_null(handshake_pool_by_id(remote_at(p, 1), pool));
	assert_non_null(handshake_pool_by_id(remote_at(p, 1), p->mine.pool));
	handshake_pool_unuse(held);
}

/* If only this daemon accesses the memory, it waits for no peer; and memory that the
 * answers free at the peer is still used. */
static void pool_only_reachable_from_here_is_not_awaited(void **state)
{
	struct pair *p = *state;
	struct remote_pool *held;
	struct remote *remote;
	struct charge filler = {0};
	uint64_t pool, other, begin_ns;

	p->c.nodes[0].config.fence_timeout_ns = LOOP_NS_PER_S;
	assert_attaches(p);
	remote_at(p, 0)->transport->caps |= XP_CAP_ALONE;
	remote = remote_at(p, 1);
	pool = register_pool(p, p->me, &p->mine, 1);
	cluster_run(&p->c, LOOP_NS_PER_S);
	held = handshake_pool_by_id(remote, pool);
	assert_non_null(held);
	handshake_pool_use(held);
	account_leave(remote->account, 0, &filler);
	other = register_pool(p, p->me, &p->mine, 2);
	cluster_run(&p->c, LOOP_NS_PER_S);
	charge_drop(&filler);
	assert_null(handshake_pool_by_id(remote, other));
	begin_ns = loop_now_ns(p->c.loop);
	cluster_ok(&p->c, p->me, "{'cmd':'pool.unregister','pool':%llu}",
		   (unsigned long long)pool);
	assert_true(loop_now_ns(p->c.loop) - begin_ns < LOOP_NS_PER_S / 2);
	cluster_run(&p->c, 5 * LOOP_NS_PER_S);
	assert_int_equal(metrics_get(&p->c.nodes[0].kvd.metrics, METRIC_FENCES_WIDENED),
			 0);
	assert_int_equal(sm_state(&remote_at(p, 0)->peer->sm), PEER_UP);
	assert_int_equal(remote_at(p, 0)->announce.unanswered, 1);
	handshake_pool_unuse(held); /* it answers now */
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(remote_at(p, 0)->announce.unanswered, 0);
	assert_non_null(handshake_pool_by_id(remote, other));
}

/* The minimum of 100 measurements of both look-ups. */
static uint64_t cost_ns(struct pair *p, uint64_t pool)
{
	struct remote *remote = remote_at(p, 1);
	uint64_t least = UINT64_MAX;

	for (unsigned int n = 0; n < 20; n++) {
		uint64_t begun = clock_of(CLOCK_THREAD_CPUTIME_ID), took;

		for (unsigned int i = 0; i < 100; i++) {
			assert_non_null(handshake_pool_by_id(remote, pool));
			assert_true(handshake_pool_is_ours(p->c.nodes[0].kvd.handshake,
							   pool));
		}
		took = clock_of(CLOCK_THREAD_CPUTIME_ID) - begun;
		least = took < least ? took : least;
	}
	return least;
}

static void pool_is_found_as_fast_among_many(void **state)
{
	struct pair *p = *state;
	struct cache caches[40];
	uint64_t few, many, last = 0;

	assert_attaches(p);
	few = cost_ns(p, p->mine.pool);
	for (unsigned int i = 0; i < ARRAY_LEN(caches); i++) {
		struct session *session = cluster_engine(&p->c, 0, "one of many");

		caches[i] = p->mine;
		cluster_cache(&p->c, session, "first", 0, &caches[i]);
		for (unsigned int n = 0; n < 50; n++)
			last = register_pool(p, session, &caches[i], 50 * i + n);
	}
	cluster_run(&p->c, LOOP_NS_PER_S);
	many = cost_ns(p, last);
	if (many > 8 * few)
		fail_msg("%ju ns among 2000 pools, %ju ns among few", (uintmax_t)many,
			 (uintmax_t)few);
	for (unsigned int i = 0; i < ARRAY_LEN(caches); i++) {
		cluster_engine_dies(&p->c, caches[i].session);
		cluster_run(&p->c, LOOP_NS_PER_S / 10);
		cache_close(&caches[i]);
	}
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(session_too_large_to_register_is_refused_by_name),
		CASE(pool_too_large_to_register_keeps_peering),
		CASE(keys_are_requested_one_a_turn),
		CASE(keys_refused_between_turns_are_requested_again),
		CASE(pool_may_go_between_its_keys),
		CASE(peer_that_a_room_waits_for_is_not_quiet),
		CASE(pool_is_found_until_removed),
		CASE(message_taken_is_acknowledged_with_next_or_soon),
		CASE(messages_taken_are_acknowledged_at_once),
		CASE(pool_refused_at_limit_is_registered_after_removal),
		CASE(pool_not_released_by_peer_ends_peering),
		CASE(pool_only_reachable_from_here_is_not_awaited),
		CASE(pool_is_found_as_fast_among_many),
	};

	return cmocka_run_group_tests_name("handshake", tests, NULL, NULL);
}
