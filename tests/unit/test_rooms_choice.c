/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Selection of the engine for a room's source. Two engines of node 0 have pools of one
 * name, and open rooms of one number; the engine of node 1 requests one. In any order of
 * events, a room never succeeds with the other engine's bytes. In-process cluster,
 * virtual time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/room/room.h"
#include "daemon/room/rooms.h"
#include "proto/kvd_status.h"
#include "tests/lib/cluster.h"
#include "tests/lib/cluster_store.h"

#define MS LOOP_NS_PER_MS
#define S LOOP_NS_PER_S
#define ROOM 100u
#define ORDERS 300u
#define NOWHERE "tcp://10.0.0.3:7400" /* the third node */

enum { A, B, REQUESTER, ENGINES };

struct world {
	struct cluster c;
	struct session *engines[ENGINES];
	struct cache caches[ENGINES];
};

static struct world *world_new(uint64_t seed, unsigned int nodes)
{
	struct world *w = calloc(1, sizeof(*w));

	assert_non_null(w);
	cluster_new(&w->c, seed, nodes);
	return w;
}

/* Its bytes are 0x11, 0x22 or nothing. */
static void engine_comes(struct world *w, unsigned int i)
{
	static const char *const names[] = {"a", "b", "requester"};

	w->engines[i] = cluster_engine(&w->c, i == REQUESTER, names[i]);
	w->caches[i] = cluster_geometry;
	cluster_cache(&w->c, w->engines[i], "kv", 0, &w->caches[i]);
	if (i != REQUESTER)
		memset(w->caches[i].base, (int)(0x11 * (i + 1)), w->caches[i].bytes);
}

static void world_free(struct world *w)
{
	cluster_free(&w->c);
	for (unsigned int i = 0; i < ENGINES; i++) {
		if (w->engines[i])
			cache_close(&w->caches[i]);
	}
	free(w);
}

static int setup(void **state)
{
	struct world *w = world_new(3, 3);

	for (unsigned int i = 0; i < ENGINES; i++)
		engine_comes(w, i);
	*state = w;
	return 0;
}

static int teardown(void **state)
{
	world_free(*state);
	return 0;
}

static void offers(struct world *w, unsigned int i, const char *more)
{
	cluster_ok(&w->c, w->engines[i],
		   "{'cmd':'room.open','room':'%u','role':'offer','pool':%llu,'views':{"
		   "'kv':{'pages':[3]}}%s}",
		   ROOM, (unsigned long long)w->caches[i].pool, more);
}

static void sends(struct world *w, unsigned int i, const char *more)
{
	cluster_ok(&w->c, w->engines[i],
		   "{'cmd':'room.open','room':'%u','role':'send','pool':%llu%s}", ROOM,
		   (unsigned long long)w->caches[i].pool, more);
	/* refused where a receiver that means several engines has failed it */
	cJSON_Delete(cluster_call(
		&w->c, w->engines[i],
		"{'cmd':'room.send','room':'%u','seq':0,'last':true,'views':{'kv':{"
		"'pages':[3]}}}",
		ROOM));
}

/* `sources`: the list, `more`: members with a comma in front. */
static void asks(struct world *w, const char *role, const char *sources, const char *more)
{
	cluster_ok(&w->c, w->engines[REQUESTER],
		   "{'cmd':'room.open','room':'%u','role':'%s','pool':%llu,'sources':[%s]"
		   "%s%s}",
		   ROOM, role, (unsigned long long)w->caches[REQUESTER].pool, sources,
		   strcmp(role, "pull") == 0 ? ",'views':{'kv':{'pages':[7]}}" : "",
		   more);
	if (strcmp(role, "recv") == 0)
		cluster_ok(&w->c, w->engines[REQUESTER],
			   "{'cmd':'room.bind','room':'%u','views':{'kv':{'pages':[7]}}}",
			   ROOM);
}

static const char *by_endpoint(struct world *w, char text[200])
{
	snprintf(text, 200, "'%s'", w->c.nodes[0].endpoint);
	return text;
}

static const char *by_session(struct world *w, unsigned int i, char text[200])
{
	snprintf(text, 200, "{'endpoint':'%s','session':'%llu'}", w->c.nodes[0].endpoint,
		 (unsigned long long)w->engines[i]->epoch);
	return text;
}

static const struct room *asked(struct world *w, enum room_role role)
{
	return rooms_find(rooms_of(&w->c.nodes[1].kvd), w->engines[REQUESTER], role,
			  ROOM);
}

static bool has_ended(void *arg)
{
	const struct room *const *room = arg;

	return room_terminal(*room);
}

static const struct room *ended(struct world *w, enum room_role role)
{
	const struct room *room = asked(w, role);

	cluster_until(&w->c, has_ended, &room, "the room ends");
	return room;
}

/* The byte in page 7 of the requester; all of it is of one engine. */
static unsigned int bytes_of(struct world *w)
{
	const uint8_t *first = cache_at(&w->caches[REQUESTER], 0, 0, 7, 0, 0, 0);
	const struct cache *cache = &w->caches[REQUESTER];

	for (unsigned int token = 0; token < cache->page_tokens; token++)
		assert_int_equal(*cache_at(cache, 1, 1, 7, token, 1, 5), *first);
	return *first;
}

/* ---- two engines that are there ---- */

static void endpoint_alone_of_two_engines_names_the_remedy(void **state)
{
	static const char *const roles[] = {"pull", "recv"};
	struct world *w = *state;
	char text[200];

	for (unsigned int i = 0; i < 2; i++) {
		enum room_role role = i ? ROOM_RECV : ROOM_PULL;

		asks(w, roles[i], by_endpoint(w, text), "");
		room_failed_with(
			ended(w, role), ERR_INVAL,
			"has several matching pools ('kv' rank 0, 'kv' rank 0); set "
			"the source's field session, or its group and worker");
	}
}

static void session_names_one_of_two_engines(void **state)
{
	struct world *w = *state;
	char text[200];

	for (unsigned int i = A; i <= B; i++) {
		offers(w, i, "");
		sends(w, i, "");
	}
	asks(w, "pull", by_session(w, B, text), "");
	assert_int_equal(room_poll_state(ended(w, ROOM_PULL)), KVD_SUCCESS);
	assert_int_equal(bytes_of(w), 0x22);
	asks(w, "recv", by_session(w, A, text), "");
	assert_int_equal(room_poll_state(ended(w, ROOM_RECV)), KVD_SUCCESS);
	assert_int_equal(bytes_of(w), 0x11);
	assert_int_equal(cluster_state(&w->c, w->engines[A], "offer", ROOM),
			 KVD_WAITING_FOR_INPUT);
	assert_int_equal(cluster_state(&w->c, w->engines[B], "send", ROOM),
			 KVD_BOOTSTRAPPING);
}

static void session_is_named_with_endpoint(void **state)
{
	struct world *w = *state;

	cluster_refused(
		&w->c, w->engines[REQUESTER], "EINVAL",
		"{'cmd':'room.open','room':'1','role':'recv','pool':%llu,'sources':"
		"[{'group':'g','session':'7'}]}",
		(unsigned long long)w->caches[REQUESTER].pool);
}

/* A receiver that fails before it is known to its sender fails that one's room alone. */
static void early_end_applies_to_named_session(void **state)
{
	struct world *w = *state;

	for (unsigned int i = A; i <= B; i++)
		cluster_ok(&w->c, w->engines[i],
			   "{'cmd':'room.open','room':'%u','role':'send','pool':%llu}",
			   ROOM, (unsigned long long)w->caches[i].pool);
	cluster_ok(&w->c, w->engines[REQUESTER],
		   "{'cmd':'room.open','room':'%u','role':'recv','pool':%llu,'sources':[{"
		   "'endpoint':'%s','session':'%llu','pool':'none'}]}",
		   ROOM, (unsigned long long)w->caches[REQUESTER].pool,
		   w->c.nodes[0].endpoint, (unsigned long long)w->engines[A]->epoch);
	cluster_run(&w->c, S);
	cluster_ok(&w->c, w->engines[REQUESTER], "{'cmd':'room.abort','room':'%u'}",
		   ROOM);
	cluster_until_state(&w->c, w->engines[A], "send", ROOM, KVD_FAILED);
	cluster_run(&w->c, S);
	assert_int_equal(cluster_state(&w->c, w->engines[B], "send", ROOM),
			 KVD_BOOTSTRAPPING);
}

/* Both are of root, as administrators are. */
static void engine_aborts_no_other_engines_room(void **state)
{
	struct world *w = *state;

	offers(w, A, "");
	cluster_refused(&w->c, w->engines[B], "ENOTFOUND",
			"{'cmd':'room.abort','room':'%u'}", ROOM);
	cluster_refused(&w->c, w->engines[B], "ENOTFOUND",
			"{'cmd':'room.show','room':'%u'}", ROOM);
	cluster_until_state(&w->c, w->engines[A], "offer", ROOM, KVD_WAITING_FOR_INPUT);
	/* one that has registered nothing is a tool */
	cluster_ok(&w->c, cluster_engine(&w->c, 0, "tool"),
		   "{'cmd':'room.abort','room':'%u'}", ROOM);
	cluster_until_state(&w->c, w->engines[A], "offer", ROOM, KVD_FAILED);
}

/* ---- one source named twice ---- */

static void source_named_twice_is_refused(void **state)
{
	static const char *const roles[] = {"pull", "recv"};
	struct world *w = *state;
	char text[200];

	for (unsigned int i = 0; i < 2; i++) {
		const char *source = by_session(w, A, text);

		cluster_refused(&w->c, w->engines[REQUESTER], "EDUP",
				"{'cmd':'room.open','room':'1','role':'%s','pool':%llu,"
				"'sources':[%s,%s]}",
				roles[i], (unsigned long long)w->caches[REQUESTER].pool,
				source, source);
		cluster_refused(&w->c, w->engines[REQUESTER], "EDUP",
				"{'cmd':'room.open','room':'1','role':'%s','pool':%llu,"
				"'sources':['%s','%s']}",
				roles[i], (unsigned long long)w->caches[REQUESTER].pool,
				w->c.nodes[0].endpoint, w->c.nodes[0].endpoint);
		cluster_refused(&w->c, w->engines[REQUESTER], "EDUP",
				"{'cmd':'room.open','room':'1','role':'%s','pool':%llu,"
				"'sources':[{'group':'g','worker':'a'},"
				"{'group':'g','worker':'a'}]}",
				roles[i], (unsigned long long)w->caches[REQUESTER].pool);
		assert_null(asked(w, i ? ROOM_RECV : ROOM_PULL));
	}
}

static void source_named_twice_differently_fails(void **state)
{
	static const char *const roles[] = {"pull", "recv"};
	struct world *w = *state;

	for (unsigned int i = 0; i < 2; i++) {
		char sources[400], text[200];

		snprintf(sources, sizeof(sources),
			 "%s,{'endpoint':'%s','session':'%llu','pool':'kv'}",
			 by_session(w, A, text), w->c.nodes[0].endpoint,
			 (unsigned long long)w->engines[A]->epoch);
		asks(w, roles[i], sources, "");
		room_failed_with(ended(w, i ? ROOM_RECV : ROOM_PULL), ERR_DUP,
				 "is named twice");
	}
}

/* ---- later events ---- */

/* The request of an endpoint is in transit when its daemon gets another engine that
 * the requester does not know. */
static void pool_unknown_to_requester_counts(void **state)
{
	struct world *w = world_new(5, 2);
	struct fake_profile *profile = fake_hub_profile(w->c.bytes);
	const struct fake_profile fast = *profile;
	char text[200];

	(void)state;
	engine_comes(w, A);
	engine_comes(w, REQUESTER);
	asks(w, "pull", by_endpoint(w, text), "");
	offers(w, A, "");
	assert_int_equal(room_poll_state(ended(w, ROOM_PULL)), KVD_SUCCESS);
	cluster_ok(&w->c, w->engines[REQUESTER], "{'cmd':'room.close','room':'%u'}",
		   ROOM);
	profile->delay_min_ns = profile->delay_max_ns =
		S; /* REGISTER takes the data line */
	engine_comes(w, B);
	*profile = fast;
	offers(w, B, "");
	cluster_ok(&w->c, w->engines[A], "{'cmd':'room.close','room':'%u'}", ROOM);
	offers(w, A, "");
	asks(w, "pull", by_endpoint(w, text), "");
	room_failed_with(
		ended(w, ROOM_PULL), ERR_INVAL,
		"sources: pool 'kv' rank 0 is one of 2 matching pools there; set the "
		"source's field session, or its group and worker");
	world_free(w);
}

/* The room waits for its other source when its engine ends and another one registers. */
static void room_does_not_move_to_another_engine(void **state)
{
	struct world *w = world_new(7, 3);
	char text[200], both[300];

	(void)state;
	engine_comes(w, A);
	engine_comes(w, REQUESTER);
	snprintf(both, sizeof(both), "%s,'%s'", by_endpoint(w, text), NOWHERE);
	cluster_ok(&w->c, w->engines[REQUESTER],
		   "{'cmd':'room.open','room':'%u','role':'recv','pool':%llu,'sources':["
		   "%s]}",
		   ROOM, (unsigned long long)w->caches[REQUESTER].pool, both);
	cluster_run(&w->c, 100 * MS);
	engine_comes(w, B);
	cluster_run(&w->c, 100 * MS);
	assert_int_equal(cluster_state(&w->c, w->engines[REQUESTER], "recv", ROOM),
			 KVD_BOOTSTRAPPING);
	cluster_engine_dies(&w->c, w->engines[A]);
	room_failed_with(ended(w, ROOM_RECV), ERR_SESSION, "withdrew pool 'kv'");
	world_free(w);
}

/* Nor while its daemon is disconnected for a moment, when the end of its engine is not
 * reported. */
static void room_does_not_move_to_another_engine_of_a_new_peering(void **state)
{
	struct world *w = world_new(8, 3);
	const struct remote *remote;
	char text[200], both[300];

	(void)state;
	engine_comes(w, A);
	engine_comes(w, REQUESTER);
	snprintf(both, sizeof(both), "%s,'%s'", by_endpoint(w, text), NOWHERE);
	cluster_ok(&w->c, w->engines[REQUESTER],
		   "{'cmd':'room.open','room':'%u','role':'recv','pool':%llu,'sources':["
		   "%s],'timeouts':{'bootstrap_ms':5000}}",
		   ROOM, (unsigned long long)w->caches[REQUESTER].pool, both);
	cluster_run(&w->c, 100 * MS);
	remote = list_first(&asked(w, ROOM_RECV)->parties, struct party, link)->remote;
	peer_kill(remote->peer, &(struct err){.code = ERR_PEER, .text = "for the test"});
	cluster_engine_dies(&w->c, w->engines[A]);
	engine_comes(w, B);
	cluster_run(&w->c, S);
	assert_true(remote->ready && remote->pools.listed);
	room_failed_with(ended(w, ROOM_RECV), ERR_TIMEOUT, "to register pool 'kv'");
	world_free(w);
}

/* The other source's daemon is missing; this one's is restarted, with another engine. */
static void room_does_not_move_to_another_instance(void **state)
{
	struct world *w = world_new(9, 3);
	char text[200], both[300];

	(void)state;
	engine_comes(w, A);
	engine_comes(w, REQUESTER);
	snprintf(both, sizeof(both), "%s,{'endpoint':'%s','pool':'later'}",
		 by_endpoint(w, text), NOWHERE);
	cluster_ok(&w->c, w->engines[REQUESTER],
		   "{'cmd':'room.open','room':'%u','role':'recv','pool':%llu,'sources':["
		   "%s]}",
		   ROOM, (unsigned long long)w->caches[REQUESTER].pool, both);
	cluster_run(&w->c, 100 * MS);
	cluster_crash(&w->c, 0, MEM_CRASH_KILLED);
	cluster_run(&w->c, 100 * MS);
	w->engines[B] = cluster_engine(&w->c, cluster_restart(&w->c, 0), "b");
	w->caches[B] = cluster_geometry;
	cluster_cache(&w->c, w->engines[B], "kv", 0, &w->caches[B]);
	room_failed_with(ended(w, ROOM_RECV), ERR_RESTART, "was restarted");
	world_free(w);
}

static void engine_not_arriving_times_out(void **state)
{
	struct world *w = *state;
	char text[300];

	snprintf(text, sizeof(text), "{'endpoint':'%s','session':'7'}",
		 w->c.nodes[0].endpoint);
	asks(w, "pull", text, ",'timeouts':{'bootstrap_ms':2000}");
	room_failed_with(ended(w, ROOM_PULL), ERR_TIMEOUT, "to register a pool");
}

/* ---- any order ---- */

struct order {
	uint64_t draw;
	bool pull, tickets, endpoint;
	unsigned int meant; /* A or B */
};

static unsigned int below(struct order *o, unsigned int n)
{
	o->draw = o->draw * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (unsigned int)(o->draw >> 33) % n;
}

static void serves(struct world *w, const struct order *o, unsigned int i)
{
	char ticket[80] = "";

	if (o->tickets)
		snprintf(ticket, sizeof(ticket), ",'ticket':'%032x'", 0x11 * (i + 1));
	if (o->pull)
		offers(w, i, ticket);
	else
		sends(w, i, ticket);
}

static void asks_for(struct world *w, const struct order *o)
{
	char ticket[80] = "", text[200];

	if (o->tickets)
		snprintf(ticket, sizeof(ticket), ",'ticket':'%032x'",
			 0x11 * (o->meant + 1));
	asks(w, o->pull ? "pull" : "recv",
	     o->endpoint ? by_endpoint(w, text) : by_session(w, o->meant, text), ticket);
}

/* All events, in an order in which an engine precedes its room; where only the
 * endpoint is named, both engines precede both rooms, because otherwise the first one
 * is meant. */
static void play(struct world *w, struct order *o)
{
	bool came[2] = {false}, served[2] = {false}, done = false;

	while (!served[A] || !served[B] || !done) {
		unsigned int i = below(o, 2), what = below(o, 3);

		if (what == 0 && !came[i]) {
			engine_comes(w, i);
			came[i] = true;
		} else if (what == 1 && came[i] && !served[i] &&
			   (!o->endpoint || came[!i])) {
			serves(w, o, i);
			served[i] = true;
		} else if (what == 2 && !done && (o->endpoint || came[o->meant])) {
			asks_for(w, o);
			done = true;
		}
		if (below(o, 2))
			cluster_run(&w->c, below(o, 20) * MS);
	}
}

static void judge(struct world *w, const struct order *o, uint64_t seed)
{
	const struct room *room = ended(w, o->pull ? ROOM_PULL : ROOM_RECV);

	if (o->endpoint && room_poll_state(room) == KVD_SUCCESS)
		fail_msg("order %llu: an endpoint of two engines: success with %#x",
			 (unsigned long long)seed, bytes_of(w));
	if (o->endpoint) {
		assert_true(room->error->code == ERR_INVAL ||
			    (o->tickets && room->error->code == ERR_AUTH));
		return;
	}
	if (room_poll_state(room) != KVD_SUCCESS || bytes_of(w) != 0x11 * (o->meant + 1))
		fail_msg("order %llu: engine %u is meant: %s, bytes %#x",
			 (unsigned long long)seed, o->meant,
			 room->error->code ? room->error->text : "success", bytes_of(w));
}

static void order_of_opening_never_mixes_engines(void **state)
{
	(void)state;
	for (uint64_t seed = 1; seed <= ORDERS; seed++) {
		struct order o = {.draw = seed * UINT64_C(0x9e3779b97f4a7c15)};
		const struct mem_path path = {.delay_ns = below(&o, 3) * MS,
					      .jitter_ns = below(&o, 10) * MS};
		struct world *w = world_new(seed, 2);

		o.pull = below(&o, 2);
		o.tickets = below(&o, 2);
		o.endpoint = below(&o, 3) == 0;
		o.meant = below(&o, 2);
		mem_hub_set_default(w->c.links, &path);
		fake_hub_profile(w->c.bytes)->delay_max_ns = (1 + below(&o, 20)) * MS;
		engine_comes(w, REQUESTER);
		play(w, &o);
		judge(w, &o, seed);
		world_free(w);
	}
}

/* ---- pools of the daemon's own ---- */

static void pools_of_the_chunk_store_are_no_candidates(void **state)
{
	const struct cluster_store_args args = {.memory_bytes = UINT64_C(16) << 20};
	struct world *w = world_new(11, 2);
	uint64_t space;
	char text[200];

	(void)state;
	assert_true(cluster_store(&w->c, 0, &args));
	engine_comes(w, A);
	engine_comes(w, REQUESTER);
	space = cluster_space(&w->c, w->engines[A], w->caches[A].pool, 16);
	cluster_ok(&w->c, w->engines[A],
		   "{'cmd':'chunk.put','space':%llu,'pool':%llu,'ids':['%064x'],'views':{"
		   "'kv':{'pages':[3,4,5,6]}}}",
		   (unsigned long long)space, (unsigned long long)w->caches[A].pool, 1);
	cluster_run(&w->c, S);
	asks(w, "pull", by_endpoint(w, text), "");
	offers(w, A, "");
	assert_int_equal(room_poll_state(ended(w, ROOM_PULL)), KVD_SUCCESS);
	assert_int_equal(bytes_of(w), 0x11);
	/* a room that waits for an engine does not take the store's either */
	cluster_engine_dies(&w->c, w->engines[A]);
	cluster_run(&w->c, S);
	cluster_ok(&w->c, w->engines[REQUESTER], "{'cmd':'room.close','room':'%u'}",
		   ROOM);
	asks(w, "pull", by_endpoint(w, text), "");
	cluster_run(&w->c, S);
	engine_comes(w, B);
	offers(w, B, "");
	assert_int_equal(room_poll_state(ended(w, ROOM_PULL)), KVD_SUCCESS);
	assert_int_equal(bytes_of(w), 0x22);
	world_free(w);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(
			endpoint_alone_of_two_engines_names_the_remedy, setup, teardown),
		cmocka_unit_test_setup_teardown(session_names_one_of_two_engines, setup,
						teardown),
		cmocka_unit_test_setup_teardown(session_is_named_with_endpoint, setup,
						teardown),
		cmocka_unit_test_setup_teardown(early_end_applies_to_named_session, setup,
						teardown),
		cmocka_unit_test_setup_teardown(engine_aborts_no_other_engines_room,
						setup, teardown),
		cmocka_unit_test_setup_teardown(source_named_twice_is_refused, setup,
						teardown),
		cmocka_unit_test_setup_teardown(source_named_twice_differently_fails,
						setup, teardown),
		cmocka_unit_test(pool_unknown_to_requester_counts),
		cmocka_unit_test(room_does_not_move_to_another_engine),
		cmocka_unit_test(room_does_not_move_to_another_engine_of_a_new_peering),
		cmocka_unit_test(room_does_not_move_to_another_instance),
		cmocka_unit_test_setup_teardown(engine_not_arriving_times_out, setup,
						teardown),
		cmocka_unit_test(order_of_opening_never_mixes_engines),
		cmocka_unit_test(pools_of_the_chunk_store_are_no_candidates),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
