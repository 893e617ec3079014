/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What daemons tell each other of their memory: a list that is too large for one
 * message is refused by name and costs no peering; a pool is found at the
 * same cost however many a peer has. And by which transport: both sides take the one
 * that the dialling side can connect by. In-process cluster.
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
#include "daemon/base/hex.h"
#include "daemon/handshake/handshake.h"
#include "daemon/room/room.h"
#include "daemon/room/rooms.h"
#include "lib/kvd.h"
#include "daemon/session/region.h"
#include "tests/lib/accounts.h"
#include "tests/lib/cluster.h"
#include "tests/lib/file.h"

#define MANY 2100u /* regions, whose keys do not fit in a frame at XP_KEY_MAX each */
#define PAGE 4096u

struct pair {
	struct cluster c;
	struct session *me, *you;
	struct cache mine, yours;
};

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

static int long_key_unpack(struct xp_peer *peer, const void *buf, size_t len, void *owner,
			   struct xp_key **key_p)
{
	assert_int_equal(len, XP_KEY_MAX);
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

static cJSON *attach(struct pair *p)
{
	char secret[33];

	hex_write(p->you->secret, 16, secret);
	return cluster_call(&p->c, p->me,
			    "{'cmd':'peer.attach','endpoint':'%s','session':'%llu',"
			    "'secret':'%s'}",
			    p->c.nodes[1].endpoint, (unsigned long long)p->you->epoch,
			    secret);
}

static struct remote *remote_at(struct pair *p, unsigned int node)
{
	return list_first(handshake_remotes(p->c.nodes[node].kvd.handshake),
			  struct remote, link);
}

static void assert_attaches(struct pair *p)
{
	cJSON *answer = attach(p);

	if (cJSON_GetObjectItem(answer, "error"))
		fail_msg("%s", cJSON_PrintUnformatted(answer));
	cJSON_Delete(answer);
}

static void session_too_large_to_be_told_is_refused_by_name(void **state)
{
	struct pair *p = *state;
	unsigned int first = register_many(p, MANY);
	cJSON *answer = attach(p);
	const cJSON *error = cJSON_GetObjectItem(answer, "error");
	const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(error, "message"));

	assert_non_null(text);
	if (!strstr(text, "session 'me' takes more than"))
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
	assert_attaches(p); /* what is left fits */
}

/* So many buffers, each a region of its own; the first holds its one field. */
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

	list_foreach(pool, &remote->pools, link) {
		if (strcmp(pool->name, name) == 0)
			return true;
	}
	return false;
}

static void pool_too_large_to_be_told_costs_no_peering(void **state)
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

static void pool_is_found_until_it_goes(void **state)
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
	/* the session's list is told anew: the newest is found */
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
	/* with its peer all goes, and comes again */
	remote->reaches++;
	fake_link_cut(fake_hub_node(p->c.bytes, 0), fake_hub_node(p->c.bytes, 1));
	while (sm_state(&remote->peer->sm) == PEER_UP)
		loop_turn(p->c.loop, LOOP_NS_PER_S);
	assert_null(handshake_pool_by_id(remote, p->mine.pool));
	assert_null(handshake_pool_by_id(remote, p->me->epoch));
	assert_attaches(p);
	assert_non_null(handshake_pool_by_id(remote_at(p, 1), p->mine.pool));
	handshake_release(p->c.nodes[1].kvd.handshake, remote);
}

/* The peer has no place for one pool; when another goes, it is told of it again. */
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
	const struct wire_attend_stop stop = {.attend = 1}; /* nobody knows it */

	assert_int_equal(handshake_tell_attend_stop(remote_at(p, node), &stop), 0);
	cluster_run(&p->c, LOOP_NS_PER_MS);
}

static void message_that_was_taken_is_told_with_the_next_one_or_soon(void **state)
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

static void many_messages_that_were_taken_are_told_at_once(void **state)
{
	struct pair *p = *state;

	long_keys.land = count_land;
	assert_attaches(p);
	cluster_run(&p->c, LOOP_NS_PER_S);
	landed = 0;
	for (unsigned int i = 0; i < PEER_EXPRESS_MAX / 4; i++) {
		const struct wire_attend_stop stop = {.attend = 1};

		assert_int_equal(landed, 0);
		assert_int_equal(handshake_tell_attend_stop(remote_at(p, 0), &stop), 0);
	}
	cluster_run(&p->c, LOOP_NS_PER_MS);
	assert_int_equal(landed, PEER_EXPRESS_MAX / 4);
}

static void pool_refused_at_the_cap_is_told_again_when_another_goes(void **state)
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

/* An engine's memory is its own again, whatever the peer does. */
static void pool_that_a_peer_does_not_let_go_of_costs_it_the_peering(void **state)
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
	/* it may come back, and finds what is there by then */
	assert_attaches(p);
	assert_null(handshake_pool_by_id(remote_at(p, 1), pool));
	assert_non_null(handshake_pool_by_id(remote_at(p, 1), p->mine.pool));
	handshake_pool_unuse(held);
}

/* Where only this daemon reaches the memory, nobody is waited for; and what the answers
 * free at the peer is still used. */
static void pool_that_only_we_reach_is_not_waited_for(void **state)
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
	assert_int_equal(remote_at(p, 0)->unanswered, 1);
	handshake_pool_unuse(held); /* it answers now */
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(remote_at(p, 0)->unanswered, 0);
	assert_non_null(handshake_pool_by_id(remote, other));
}

/* The least that 100 times looking for both take. */
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

/* ---- the data line's transport ---- */

/* As shm is: of one host, and it may be that this daemon cannot connect by it. */
static struct transport_ops near;
static bool near_blocked[3]; /* by node */
static bool near_dropped[3]; /* no packet of its reaches the other's data port */
static bool near_broken[3];  /* it can open nothing, as when descriptors run out */
static bool near_holds[3];   /* a closed line of its is not reported yet: */
static void (*near_held)(void *arg);
static void *near_held_arg;

static int near_open(const struct xp_env *env, const struct xp_callbacks *callbacks,
		     struct transport **transport_p)
{
	int r = fake_ops.open(env, callbacks, transport_p);

	assert_int_equal(r, 0);
	(*transport_p)->ops = &near;
	(*transport_p)->caps |= XP_CAP_SAME_HOST;
	return 0;
}

static int near_peer_open(struct transport *transport, const struct xp_peer_args *args,
			  struct xp_peer **peer_p)
{
	unsigned int node = (unsigned int)(transport->env.config->name[1] - '0');

	struct xp_peer_args lost = *args;
	uint8_t nowhere[64];

	if (near_broken[node])
		return err_raise(ERR_IO, "near has no descriptor");
	if (args->dial && near_blocked[node])
		return err_raise(ERR_REQUIRE, "near needs a way that n%u has not", node);
	if (!args->dial || !near_dropped[node])
		return fake_ops.peer_open(transport, args, peer_p);
	assert_in_range(args->address_len, 1, sizeof(nowhere));
	memcpy(nowhere, args->address, args->address_len);
	nowhere[args->address_len - 1] ^= 0x80; /* of an incarnation that is none */
	lost.address = nowhere;
	return fake_ops.peer_open(transport, &lost, peer_p);
}

static void near_on_closed(void *arg)
{
	(void)arg;
}

static void near_peer_close(struct xp_peer *peer, void (*on_closed)(void *arg), void *arg)
{
	const struct transport *transport = ((struct xp_peer_base *)peer)->transport;

	if (!near_holds[transport->env.config->name[1] - '0']) {
		fake_ops.peer_close(peer, on_closed, arg);
		return;
	}
	near_held = on_closed;
	near_held_arg = arg;
	fake_ops.peer_close(peer, near_on_closed, NULL);
}

static int choice_setup(void **state)
{
	struct pair *p = calloc(1, sizeof(*p));

	near = fake_ops;
	near.name = "near";
	near.open = near_open;
	near.peer_open = near_peer_open;
	near.peer_close = near_peer_close;
	memset(near_blocked, 0, sizeof(near_blocked));
	memset(near_dropped, 0, sizeof(near_dropped));
	memset(near_broken, 0, sizeof(near_broken));
	memset(near_holds, 0, sizeof(near_holds));
	cluster_prefer(&near);
	cluster_new(&p->c, 1, 2);
	p->me = cluster_engine(&p->c, 0, "me");
	p->you = cluster_engine(&p->c, 1, "you");
	*state = p;
	return 0;
}

static int choice_teardown(void **state)
{
	struct pair *p = *state;

	cluster_wrap_events(NULL);
	cluster_prefer(NULL);
	cluster_free(&p->c);
	free(p);
	return 0;
}

static void connect_peer(struct pair *p)
{
	cluster_ok(&p->c, p->me, "{'cmd':'peer.connect','endpoint':'%s'}",
		   p->c.nodes[1].endpoint);
}

/* Both daemons have their data line by `transport`, and say what they passed over. */
static void assert_line(struct pair *p, unsigned int a, unsigned int b,
			const char *transport, const char *passed)
{
	const unsigned int nodes[] = {a, b};

	cluster_run(&p->c, LOOP_NS_PER_S);
	for (unsigned int i = 0; i < 2; i++) {
		const struct remote *remote = remote_at(p, nodes[i]);

		assert_true(remote->ready);
		assert_string_equal(remote->transport->ops->name, transport);
		if (!*passed)
			assert_string_equal(remote->passed, "");
		else if (!strstr(remote->passed, passed))
			fail_msg("passed over: '%s'", remote->passed);
		assert_int_equal(remote->downs, 0);
	}
}

static unsigned int lower_of(struct pair *p)
{
	cluster_run(&p->c, LOOP_NS_PER_S);
	return remote_at(p, 0)->peer->lower ? 0 : 1;
}

static void line_that_cannot_be_connected_gives_way_to_the_next(void **state)
{
	struct pair *p = *state;
	cJSON *answer;

	near_blocked[0] = near_blocked[1] = true;
	answer = cluster_call(&p->c, p->me, "{'cmd':'peer.connect','endpoint':'%s'}",
			      p->c.nodes[1].endpoint);
	if (!strstr(cJSON_GetStringValue(cJSON_GetObjectItem(answer, "passed_over")),
		    "near needs a way"))
		fail_msg("%s", cJSON_PrintUnformatted(answer));
	cJSON_Delete(answer);
	assert_line(p, 0, 1, "fake", "near needs a way");
	assert_attaches(p); /* keys of that transport are told, both ways */
}

static void line_is_the_choice_of_the_side_that_dials(void **state)
{
	struct pair *p = *state;
	struct kvd *other;
	struct transport *first;
	unsigned int lower;

	connect_peer(p);
	lower = lower_of(p);
	assert_line(p, 0, 1, "near", "");
	/* whether the other could connect is not asked */
	near_blocked[!lower] = true;
	other = &p->c.nodes[!lower].kvd;
	first = other->transports[0]; /* nor what it prefers */
	other->transports[0] = other->transports[1];
	other->transports[1] = first;
	peer_kill(remote_at(p, 0)->peer,
		  &(struct err){.code = ERR_PEER, .text = "for the test"});
	cluster_run(&p->c, LOOP_NS_PER_S);
	connect_peer(p);
	assert_line(p, 0, 1, "near", "");
}

static void line_is_chosen_anew_with_each_peering(void **state)
{
	struct pair *p = *state;
	unsigned int again;

	near_blocked[0] = near_blocked[1] = true;
	connect_peer(p);
	assert_line(p, 0, 1, "fake", "near needs a way");
	memset(near_blocked, 0, sizeof(near_blocked));
	cluster_crash(&p->c, 1, MEM_CRASH_KILLED);
	cluster_run(&p->c, 3 * LOOP_NS_PER_S);
	again = cluster_restart(&p->c, 1);
	connect_peer(p);
	assert_line(p, 0, again, "near", "");
}

/* `transports = shm`, say: no other may be taken, and both say what it needs. */
static void line_without_another_way_fails_by_name_on_both_sides(void **state)
{
	struct pair *p = *state;

	near_blocked[0] = near_blocked[1] = true;
	for (unsigned int i = 0; i < 2; i++) {
		strcpy(p->c.nodes[i].config.require.word[0], "near");
		p->c.nodes[i].config.require.count = 1;
	}
	cluster_refused(&p->c, p->me, "EREQUIRE",
			"{'cmd':'peer.connect','endpoint':'%s'}", p->c.nodes[1].endpoint);
	cluster_refused(&p->c, p->you, "EREQUIRE",
			"{'cmd':'peer.connect','endpoint':'%s'}", p->c.nodes[0].endpoint);
	for (unsigned int i = 0; i < 2; i++) {
		const struct remote *remote = remote_at(p, i);

		assert_int_equal(remote->why.code, ERR_REQUIRE);
		if (!strstr(remote->why.text, "near needs a way that"))
			fail_msg("%s", remote->why.text);
		assert_false(remote->ready);
		assert_int_equal(remote->downs, 0);
		p->c.nodes[i].config.require.count = 0;
	}
}

static struct handshake_events real_events[2];

static void on_old_peer_up(void *owner, struct peer *peer)
{
	peer->features &= ~PEER_FEATURE_LINE;
	real_events[0].on_peer_up(owner, peer);
}

static void speak_as_before(struct kvd *kvd, struct handshake_events *events)
{
	(void)kvd;
	real_events[0] = *events;
	events->on_peer_up = on_old_peer_up;
}

/* Each by itself: so none may be passed over, for the other would not know. */
static void line_to_an_older_daemon_is_chosen_by_both(void **state)
{
	struct pair *p = *state;
	unsigned int lower;

	cluster_free(&p->c);
	cluster_wrap_events(speak_as_before);
	cluster_new(&p->c, 1, 2);
	p->me = cluster_engine(&p->c, 0, "me");
	p->you = cluster_engine(&p->c, 1, "you");
	connect_peer(p);
	assert_line(p, 0, 1, "near", "");
	lower = lower_of(p);
	near_blocked[0] = near_blocked[1] = true;
	peer_kill(remote_at(p, 0)->peer,
		  &(struct err){.code = ERR_PEER, .text = "for the test"});
	cluster_run(&p->c, LOOP_NS_PER_S);
	cluster_refused(&p->c, lower ? p->you : p->me, "EREQUIRE",
			"{'cmd':'peer.connect','endpoint':'%s'}",
			p->c.nodes[!lower].endpoint);
}

static void line_told_wrongly_costs_the_peering_or_the_line(void **state)
{
	struct pair *p = *state;
	struct wire_line msg = {.transport = "near"};
	unsigned int lower;

	connect_peer(p);
	lower = lower_of(p);
	for (unsigned int from = 0; from < 2; from++) { /* not its turn; twice */
		struct remote *at = remote_at(p, !from);
		const char *words = from == lower ? "LINE: twice" : "LINE: this side";
		uint64_t downs = at->downs;

		at->reaches++; /* it outlives its peering */
		assert_int_equal(handshake_tell_line(remote_at(p, from), &msg), 0);
		cluster_run(&p->c, LOOP_NS_PER_S / 100);
		assert_int_equal(at->downs, downs + 1);
		assert_int_equal(at->down.code, ERR_PROTO);
		if (!strstr(at->down.text, words))
			fail_msg("%s", at->down.text);
		handshake_release(at->hs, at);
		connect_peer(p);
		cluster_run(&p->c, LOOP_NS_PER_S);
	}
}

static void cut_peering(struct pair *p)
{
	peer_kill(remote_at(p, 0)->peer,
		  &(struct err){.code = ERR_PEER, .text = "for the test"});
	cluster_run(&p->c, LOOP_NS_PER_S);
}

/* Whichever of the two it is: who has the lower id is a matter of chance. */
static void line_that_one_side_cannot_dial_is_dialled_by_the_other(void **state)
{
	struct pair *p = *state;

	for (unsigned int node = 0; node < 2; node++) {
		near_dropped[node] = true;
		near_dropped[!node] = false;
		cluster_ok(&p->c, p->me,
			   "{'cmd':'peer.connect','endpoint':'%s','timeout_ms':9000}",
			   p->c.nodes[1].endpoint);
		cluster_run(&p->c, LOOP_NS_PER_S);
		assert_true(remote_at(p, 0)->ready && remote_at(p, 1)->ready);
		assert_attaches(p); /* keys were announced once, and serve */
		cut_peering(p);
	}
}

/* Both have the reasons of both, and the peering goes on. */
static void line_that_nobody_can_dial_is_named_on_both_sides(void **state)
{
	struct pair *p = *state;
	char text[ERR_TEXT_MAX];

	near_dropped[0] = near_dropped[1] = true;
	cluster_refused(&p->c, p->me, "ETIMEOUT",
			"{'cmd':'peer.connect','endpoint':'%s','timeout_ms':9000}",
			p->c.nodes[1].endpoint);
	for (unsigned int i = 0; i < 2; i++) {
		const struct remote *remote = remote_at(p, i);

		assert_int_equal(sm_state(&remote->peer->sm), PEER_UP);
		assert_int_equal(remote->downs, 0);
		assert_int_not_equal(remote->lineless_ns, 0);
		assert_string_equal(handshake_why_not(remote, text),
				    "fake: nobody answers at the address; from there: "
				    "fake: nobody answers at the address");
	}
	memset(near_dropped, 0, sizeof(near_dropped)); /* the firewall is mended */
	connect_peer(p);
	assert_line(p, 0, 1, "near", "");
	assert_int_equal(remote_at(p, 0)->lineless_ns, 0);
}

/* A turn that the chooser could not even begin is one that the other never heard of. */
static void line_turn_that_cannot_begin_costs_no_peering(void **state)
{
	struct pair *p = *state;
	struct remote *remote;
	unsigned int lower;

	near_dropped[0] = near_dropped[1] = true;
	assert_int_equal(handshake_reach(p->c.nodes[0].kvd.handshake,
					 p->c.nodes[1].endpoint, NULL, &remote),
			 0);
	lower = lower_of(p);
	near_broken[lower] = true;
	cluster_run(&p->c, 20 * LOOP_NS_PER_S);
	memset(near_broken, 0, sizeof(near_broken));
	memset(near_dropped, 0, sizeof(near_dropped));
	cluster_run(&p->c, 10 * LOOP_NS_PER_S);
	assert_line(p, 0, 1, "near", "");
	handshake_release(remote->hs, remote);
}

/* The last peering's line may take longer to close than the first turn of this one. */
static void line_that_starts_in_a_later_turn_announces_pools(void **state)
{
	struct pair *p = *state;
	struct remote *remote;
	unsigned int lower;

	assert_int_equal(handshake_reach(p->c.nodes[0].kvd.handshake,
					 p->c.nodes[1].endpoint, NULL, &remote),
			 0);
	lower = lower_of(p);
	near_holds[!lower] = near_dropped[lower] = true;
	cut_peering(p);
	for (unsigned int s = 0; s < 20 && remote_at(p, !lower)->turn == 0; s++)
		cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(remote_at(p, !lower)->turn, 1);
	near_holds[!lower] = false;
	near_held(near_held_arg);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_true(remote->ready && remote_at(p, 0)->listed && remote_at(p, 1)->listed);
	assert_attaches(p);
	handshake_release(remote->hs, remote);
}

/* connect_timeout counts from the first loss, whatever the control line does. */
static void line_that_is_missing_ends_rooms_after_connect_timeout(void **state)
{
	struct pair *p = *state;
	uint64_t begin_ns = loop_now_ns(p->c.loop);
	const struct room *room;

	p->mine = (struct cache){.layers = 1,
				 .pages = 16,
				 .page_tokens = 1,
				 .units = 1,
				 .total_units = 1,
				 .unit_bytes = 8};
	cluster_cache(&p->c, p->me, "mine", 0, &p->mine);
	near_dropped[0] = near_dropped[1] = true;
	cluster_ok(&p->c, p->me,
		   "{'cmd':'room.open','room':'7','role':'recv','pool':%llu,"
		   "'sources':['%s']}",
		   (unsigned long long)p->mine.pool, p->c.nodes[1].endpoint);
	for (unsigned int i = 0; i < 2; i++) {
		cluster_run(&p->c, 3 * LOOP_NS_PER_S);
		cut_peering(p);
	}
	room = rooms_find(p->c.nodes[0].kvd.rooms, p->me, ROOM_RECV, 7);
	assert_int_equal(cluster_state(&p->c, p->me, "recv", 7), KVD_BOOTSTRAPPING);
	cluster_until_state(&p->c, p->me, "recv", 7, KVD_FAILED);
	assert_in_range(loop_now_ns(p->c.loop) - begin_ns, 10 * LOOP_NS_PER_S,
			11 * LOOP_NS_PER_S);
	room_failed_with(room, ERR_PEER, "room 7: fake: nobody answers at the address");
	cluster_engine_dies(&p->c, p->me);
	cluster_run(&p->c, LOOP_NS_PER_S);
	cache_close(&p->mine);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
#define CHOICE(name) cmocka_unit_test_setup_teardown(name, choice_setup, choice_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(session_too_large_to_be_told_is_refused_by_name),
		CASE(pool_too_large_to_be_told_costs_no_peering),
		CASE(pool_is_found_until_it_goes),
		CASE(message_that_was_taken_is_told_with_the_next_one_or_soon),
		CASE(many_messages_that_were_taken_are_told_at_once),
		CASE(pool_refused_at_the_cap_is_told_again_when_another_goes),
		CASE(pool_that_a_peer_does_not_let_go_of_costs_it_the_peering),
		CASE(pool_that_only_we_reach_is_not_waited_for),
		CASE(pool_is_found_as_fast_among_many),
		CHOICE(line_that_cannot_be_connected_gives_way_to_the_next),
		CHOICE(line_is_the_choice_of_the_side_that_dials),
		CHOICE(line_is_chosen_anew_with_each_peering),
		CHOICE(line_without_another_way_fails_by_name_on_both_sides),
		CHOICE(line_to_an_older_daemon_is_chosen_by_both),
		CHOICE(line_told_wrongly_costs_the_peering_or_the_line),
		CHOICE(line_that_one_side_cannot_dial_is_dialled_by_the_other),
		CHOICE(line_that_nobody_can_dial_is_named_on_both_sides),
		CHOICE(line_turn_that_cannot_begin_costs_no_peering),
		CHOICE(line_that_starts_in_a_later_turn_announces_pools),
		CHOICE(line_that_is_missing_ends_rooms_after_connect_timeout),
	};

	return cmocka_run_group_tests_name("handshake", tests, NULL, NULL);
}
