/* SPDX-License-Identifier: Apache-2.0 */
/* Fetches from a holder that is late, while engines publish and withdraw the same chunks;
 * and what far holds keep. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"
#include "daemon/store/far.h"
#include "proto/kvd_status.h"
#include "tests/lib/hedge_world.h"

/* ---- with what engines publish ---- */

static void publish(struct hedge_world *w, unsigned int count)
{
	cluster_ok(&w->c, w->engine[REQUESTER],
		   "{'cmd':'chunk.publish','space':%llu,'pool':%llu,'ids':[%s],"
		   "'views':{'kv':{'pages':[%s]}}}",
		   (unsigned long long)w->space[REQUESTER],
		   (unsigned long long)w->cache[REQUESTER].pool, hedge_ids(0, count),
		   hedge_pages(count * PAGES));
	cluster_run(&w->c, MS);
}

static uint64_t withdraw(struct hedge_world *w, unsigned int grace_ms)
{
	return cluster_number(
		cluster_call(&w->c, w->engine[REQUESTER],
			     "{'cmd':'chunk.withdraw','space':%llu,'ids':[%s],"
			     "'grace_ms':%u}",
			     (unsigned long long)w->space[REQUESTER],
			     hedge_ids(0, CHUNKS), grace_ms),
		"move");
}

static uint64_t found(struct hedge_world *w)
{
	return cluster_number(cluster_call(&w->c, w->engine[REQUESTER],
					   "{'cmd':'chunk.find','space':%llu,'ids':[%s]}",
					   (unsigned long long)w->space[REQUESTER],
					   hedge_ids(0, CHUNKS)),
			      "chunks");
}

static void other_begin(struct hedge_world *w)
{
	w->other = cluster_geometry;
	cluster_cache(&w->c, w->engine[REQUESTER], "other", 0, &w->other);
	memset(w->other.base, MARK, w->other.bytes);
	hedge_fill(&w->cache[REQUESTER]);
}

/* By a call, not a command, so that it is done in this turn. */
static void publish_again(struct hedge_world *w, const struct store_ids *ids)
{
	struct session *engine = w->engine[REQUESTER];
	struct store_move_args args = {
		.pool = pool_find(engine, w->cache[REQUESTER].pool), .publish = true};
	struct store_move *move;
	struct room_map *map;

	assert_int_equal(room_maps_begin(&args.maps, 1), 0);
	map = &args.maps.maps[args.maps.count++];
	*map = (struct room_map){.view = "kv",
				 .layers = {0, UINT32_MAX},
				 .token_end = CHUNKS * TOKENS,
				 .page_count = CHUNKS * PAGES};
	map->pages = mem_calloc(map->page_count, sizeof(*map->pages));
	assert_non_null(map->pages);
	for (uint32_t i = 0; i < map->page_count; i++)
		map->pages[i] = i;
	assert_int_equal(store_put(store_handle_find(engine, w->space[REQUESTER]), ids,
				   &args, &move),
			 0);
}

/* They are there again before what read them has ended. */
static void chunk_republished_is_read_again(void **state)
{
	struct hedge_world *w = *state;
	uint8_t bytes[CHUNKS * STORE_ID_BYTES] = {0};
	const struct store_ids ids = {.bytes = bytes, .count = CHUNKS};
	struct store_handle *handle =
		store_handle_find(w->engine[REQUESTER], w->space[REQUESTER]);
	struct store_move *move;

	for (unsigned int i = 0; i < CHUNKS; i++)
		bytes[(i + 1) * STORE_ID_BYTES - 1] = (uint8_t)(i + 1);
	other_begin(w);
	publish(w, CHUNKS);
	w->hold = hedge_hold(w, 0, CHUNKS, 0);
	fake_node_freeze(hedge_bytes(w, REQUESTER), true);
	w->move = hedge_fetch_to(w, &w->other, CHUNKS, "");
	cluster_run(&w->c, MS);
	assert_int_equal(hedge_state(w, w->move), KVD_TRANSFERRING);
	assert_int_equal(store_withdraw(handle, &ids, 0, &move), 0);
	publish_again(w, &ids);
	fake_node_freeze(hedge_bytes(w, REQUESTER), false);
	hedge_succeeds(w);
	assert_true(hedge_holds(&w->other, CHUNKS * PAGES));
}

/* What reads its pages keeps no pool: it fails. */
static void pool_being_read_is_removed(void **state)
{
	struct hedge_world *w = *state;

	other_begin(w);
	publish(w, CHUNKS);
	w->hold = hedge_hold(w, 0, CHUNKS, 0);
	hedge_reads_late(w, REQUESTER);
	w->move = hedge_fetch_to(w, &w->other, CHUNKS, "");
	cluster_run(&w->c, MS);
	assert_int_equal(hedge_state(w, w->move), KVD_TRANSFERRING);
	cluster_ok(&w->c, w->engine[REQUESTER], "{'cmd':'pool.unregister','pool':%llu}",
		   (unsigned long long)w->cache[REQUESTER].pool);
	cluster_until(&w->c, hedge_is_over, w, "the fetch");
	assert_int_equal(hedge_state(w, w->move), KVD_FAILED);
}

/* They are not found at once, and are the engine's once what was under way has landed. */
static void withdrawal_waits_for_readers(void **state)
{
	struct hedge_world *w = *state;
	uint64_t gone;

	other_begin(w);
	publish(w, CHUNKS);
	w->hold = hedge_hold(w, 0, CHUNKS, 0);
	hedge_reads_late(w, REQUESTER);
	w->move = hedge_fetch_to(w, &w->other, CHUNKS, "");
	cluster_run(&w->c, MS);
	gone = withdraw(w, 60000);
	assert_int_equal(hedge_store(w)->chunk_count, CHUNKS); /* names that are held */
	assert_int_equal(found(w), 0);
	cluster_run(&w->c, 2 * LOOP_NS_PER_S);
	assert_int_equal(hedge_state(w, w->move), KVD_TRANSFERRING);
	assert_int_equal(hedge_state(w, gone), KVD_TRANSFERRING);
	hedge_succeeds(w);
	assert_true(hedge_holds(&w->other, CHUNKS * PAGES));
	w->move = gone;
	hedge_succeeds(w);
}

/* Long before what is under way lands. */
static void readers_fail_when_their_grace_is_over(void **state)
{
	static const unsigned int grace_ms[] = {0, 500};
	struct hedge_world *w = *state;
	uint64_t gone;

	other_begin(w);
	hedge_reads_late(w, REQUESTER);
	for (unsigned int i = 0; i < ARRAY_LEN(grace_ms); i++) {
		publish(w, CHUNKS);
		w->hold = hedge_hold(w, 0, CHUNKS, 0);
		w->move = hedge_fetch_to(w, &w->other, CHUNKS, "");
		cluster_run(&w->c, MS);
		gone = withdraw(w, grace_ms[i]);
		if (grace_ms[i]) {
			cluster_run(&w->c, (grace_ms[i] - 10) * MS);
			assert_int_equal(hedge_state(w, gone), KVD_TRANSFERRING);
		}
		cluster_run(&w->c, LOOP_NS_PER_S);
		assert_int_equal(hedge_state(w, gone), KVD_SUCCESS);
		cluster_until(&w->c, hedge_is_over, w, "the fetch");
		assert_int_equal(hedge_state(w, w->move), KVD_FAILED);
	}
}

/* Its engine cannot withdraw what somebody has dropped: a hold of it reads no pages. */
static void chunk_dropped_is_not_read(void **state)
{
	struct hedge_world *w = *state;

	other_begin(w);
	publish(w, CHUNKS);
	w->hold = hedge_hold(w, 0, CHUNKS, 0);
	cluster_ok(&w->c, w->engine[REQUESTER],
		   "{'cmd':'chunk.drop','space':%llu,'ids':[%s]}",
		   (unsigned long long)w->space[REQUESTER], hedge_ids(0, CHUNKS));
	w->move = withdraw(w, 0);
	hedge_succeeds(w);
	w->move = hedge_fetch_to(w, &w->other, CHUNKS, "");
	cluster_until(&w->c, hedge_is_over, w, "the fetch");
	assert_int_equal(hedge_state(w, w->move), KVD_FAILED);
	assert_true(hedge_holds(&w->other, 0));
}

static void chunk_in_memory_is_read_before_pages(void **state)
{
	struct hedge_world *w = *state;

	other_begin(w);
	publish(w, CHUNKS);
	hedge_put(w, REQUESTER, 0, CHUNKS);
	memset(w->cache[REQUESTER].base, MARK, w->cache[REQUESTER].bytes);
	w->hold = hedge_hold(w, 0, CHUNKS, 0);
	w->move = hedge_fetch_to(w, &w->other, CHUNKS, "");
	hedge_succeeds(w);
	assert_true(hedge_holds(&w->other, CHUNKS * PAGES));
}

/* Published here while a leg is late: it is read here. Withdrawn as the leg ends: then
 * it is the hedge's, or the holder's again. */
static void pages_published_overtake_late_leg(void **state)
{
	struct hedge_world *w = *state;

	other_begin(w);
	fake_node_freeze(hedge_bytes(w, 0), true);
	fake_node_freeze(hedge_bytes(w, 1), true);
	w->move = hedge_fetch_to(w, &w->other, CHUNKS, "");
	cluster_run(&w->c, LATE + 100 * MS);
	assert_int_equal(hedge_remote_figures(w).hedges, 1);
	publish(w, CHUNKS);
	hedge_succeeds(w);
	assert_true(hedge_holds(&w->other, CHUNKS * PAGES));
	assert_int_equal(hedge_remote_figures(w).hedges_won, 1);
	withdraw(w, 0);
	fake_node_freeze(hedge_bytes(w, 0), false);
	fake_node_freeze(hedge_bytes(w, 1), false);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(hedge_store(w)->chunk_count, 0);
	hedge_nothing_is_left(w);
}

static void published_overtakes_and_is_withdrawn(void **state)
{
	struct hedge_world *w = *state;

	other_begin(w);
	hedge_reads_late(w, 0);
	fake_node_freeze(hedge_bytes(w, 1), true);
	w->move = hedge_fetch_to(w, &w->other, CHUNKS, "");
	cluster_run(&w->c, LATE + 100 * MS);
	assert_int_equal(hedge_remote_figures(w).hedges, 1);
	publish(w, CHUNKS);
	cluster_run(&w->c, 10 * MS); /* the late leg is ended, and awaits its fence */
	assert_int_equal(hedge_state(w, w->move), KVD_TRANSFERRING);
	withdraw(w, 0);
	cluster_run(&w->c, 5 * LOOP_NS_PER_S);
	assert_int_equal(hedge_state(w, w->move), KVD_TRANSFERRING); /* the hedge loads */
	fake_node_freeze(hedge_bytes(w, 1), false);
	hedge_succeeds(w);
	assert_true(hedge_holds(&w->other, CHUNKS * PAGES));
	hedge_nothing_is_left(w);
}

/* ---- ranks ---- */

/* A cache with half of the heads, and its space. */
static uint64_t half_begin(struct hedge_world *w, unsigned int node, bool upper)
{
	struct cache *cache = &w->half[(node ? 2 : 0) + upper];

	*cache = cluster_geometry;
	cache->units /= 2;
	cache->first_unit = upper ? cache->units : 0;
	cluster_cache(&w->c, w->engine[node], upper ? "upper" : "lower", upper, cache);
	return cluster_space(&w->c, w->engine[node], cache->pool, TOKENS);
}

/* What a hold of nothing charges its engine when it has been answered. */
static uint64_t hold_costs(struct hedge_world *w, unsigned int remote_ms)
{
	const struct account *account = w->engine[REQUESTER]->account;
	uint64_t before = account->bytes[ACCOUNT_CHUNKS];

	hedge_hold(w, 200, CHUNKS, remote_ms);
	return account->bytes[ACCOUNT_CHUNKS] - before;
}

static void ids_without_holder_are_not_charged(void **state)
{
	struct hedge_world *w = *state;

	assert_int_equal(hold_costs(w, 2000), hold_costs(w, 0));
}

/* The holder has less for the rank that asked than for the one that joins, which is given
 * the same chunks: their ids are known of those alone. */
static void join_has_no_more_chunks_than_the_hold(void **state)
{
	struct hedge_world *w = *state;
	uint64_t lower, upper;
	const char *secret;
	struct store_hold *hold;
	cJSON *answer;

	for (unsigned int half = 0; half < 2; half++) {
		uint64_t space = half_begin(w, 0, half);
		unsigned int count = half ? 1 : CHUNKS;

		cluster_ok(&w->c, w->engine[0],
			   "{'cmd':'chunk.put','space':%llu,'pool':%llu,'ids':[%s],"
			   "'views':{'kv':{'pages':[%s]}}}",
			   (unsigned long long)space,
			   (unsigned long long)w->half[half].pool, hedge_ids(100, count),
			   hedge_pages(count * PAGES));
	}
	cluster_run(&w->c, LOOP_NS_PER_S);
	lower = half_begin(w, REQUESTER, false);
	upper = half_begin(w, REQUESTER, true);
	answer = cluster_call(&w->c, w->engine[REQUESTER],
			      "{'cmd':'chunk.hold','space':%llu,'ids':[%s],'lease_ms':"
			      "600000,'remote_ms':2000}",
			      (unsigned long long)upper, hedge_ids(100, CHUNKS));
	assert_int_equal(cJSON_GetNumberValue(cJSON_GetObjectItem(answer, "chunks")), 1);
	secret = cJSON_GetStringValue(cJSON_GetObjectItem(answer, "secret"));
	hold = store_hold_find(
		w->engine[REQUESTER],
		cluster_number(cluster_call(&w->c, w->engine[REQUESTER],
					    "{'cmd':'chunk.join','space':%llu,"
					    "'secret':'%s','lease_ms':600000}",
					    (unsigned long long)lower, secret),
			       "hold"));
	assert_non_null(hold);
	assert_int_equal(far_hold_chunks(hold->far), 1);
	assert_int_equal(far_hold_tokens(hold->far), TOKENS);
	cJSON_Delete(answer);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, hedge_setup, hedge_teardown)

int main(void)
{
	static const struct CMUnitTest tests[] = {
		CASE(chunk_republished_is_read_again),
		CASE(pool_being_read_is_removed),
		CASE(withdrawal_waits_for_readers),
		CASE(readers_fail_when_their_grace_is_over),
		CASE(chunk_dropped_is_not_read),
		CASE(chunk_in_memory_is_read_before_pages),
		CASE(pages_published_overtake_late_leg),
		CASE(published_overtakes_and_is_withdrawn),
		CASE(ids_without_holder_are_not_charged),
		CASE(join_has_no_more_chunks_than_the_hold),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
