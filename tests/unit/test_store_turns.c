/* SPDX-License-Identifier: Apache-2.0 */
/* What engines ask of the store comes out the same when a turn has time for one step of
 * it. In-process cluster. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/request/commands.h"
#include "daemon/session/session.h"
#include "daemon/store/store_figures.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/cluster_store.h"

#define MEMORY_BYTES (UINT64_C(64) << 20)
#define SLOTS 16384u /* of 4 KiB */
#define TOKENS 16u
#define PAGES 4u /* of a chunk */
#define PUT 2048u
#define STEP_EVICTS 33u /* a part of a slab, and one more */
#define LEG_CHUNKS 256u

struct world {
	struct cluster c;
	struct session *engines[2];
	struct cache caches[2];
	uint64_t spaces[2];
	struct loop_prepare each_turn;
	uint64_t evicted, most_evicted; /* so far, of a turn */
	const struct store_move *move;	/* being made; or NULL */
	uint32_t longest;		/* of its legs: chunks */
};

/* What came of it. */
struct outcome {
	struct store_move_facts put;
	uint32_t found[2];
	uint64_t evicted;
};

static struct store_figures figures_of(const struct world *w)
{
	struct store_figures f;

	store_figures(store_of(&w->c.nodes[0].kvd), &f);
	return f;
}

static void longest_leg(struct world *w)
{
	const struct store_leg *leg;

	list_foreach(leg, &w->move->legs, link) {
		if (leg->count > w->longest)
			w->longest = leg->count;
	}
}

static bool on_each_turn(struct loop_prepare *prepare)
{
	struct world *w = container_of(prepare, struct world, each_turn);
	uint64_t evicted = figures_of(w).evicted, n = evicted - w->evicted;

	w->most_evicted = n > w->most_evicted ? n : w->most_evicted;
	w->evicted = evicted;
	if (w->move)
		longest_leg(w);
	return false;
}

static void world_open(struct world *w)
{
	const struct cluster_store_args args = {.memory_bytes = MEMORY_BYTES};

	*w = (struct world){.engines = {NULL}};
	cluster_new(&w->c, 5, 1);
	assert_true(cluster_store(&w->c, 0, &args));
	for (unsigned int i = 0; i < 2; i++) {
		w->engines[i] = cluster_engine_of(&w->c, 0, i ? "b" : "a", 1000 + i);
		w->caches[i] = cluster_geometry;
		cluster_cache(&w->c, w->engines[i], "kv", 0, &w->caches[i]);
		w->spaces[i] =
			cluster_space(&w->c, w->engines[i], w->caches[i].pool, TOKENS);
	}
	w->each_turn.on_prepare = on_each_turn;
	loop_prepare_add(w->c.loop, &w->each_turn);
}

static void world_close(struct world *w)
{
	loop_prepare_remove(&w->each_turn);
	for (unsigned int i = 0; i < 2; i++)
		cluster_engine_dies(&w->c, w->engines[i]);
	cluster_run(&w->c, LOOP_NS_PER_S);
	cluster_free(&w->c);
	for (unsigned int i = 0; i < 2; i++)
		cache_close(&w->caches[i]);
}

/* A list of ids, then of pages unless that is NULL. */
static char *ids_text(uint32_t first, uint32_t count)
{
	char *text = malloc((size_t)count * 70 + 1), *at = text;

	assert_non_null(text);
	*at = '\0';
	for (uint32_t i = 0; i < count; i++)
		at += sprintf(at, "%s\"%064x\"", i ? "," : "", first + i);
	return text;
}

static char *pages_text(const struct world *w, uint32_t count)
{
	char *text = malloc((size_t)count * PAGES * 4 + 1), *at = text;

	assert_non_null(text);
	for (uint32_t i = 0; i < count * PAGES; i++)
		at += sprintf(at, "%s%u", i ? "," : "", i % w->caches[0].pages);
	return text;
}

static struct store_move *put(struct world *w, unsigned int who, const char *cmd,
			      uint32_t first, uint32_t count)
{
	char *ids = ids_text(first, count), *pages = pages_text(w, count);
	uint64_t move = cluster_number(
		cluster_call(&w->c, w->engines[who],
			     "{\"cmd\":\"%s\",\"space\":%llu,\"pool\":%llu,\"ids\":[%s],"
			     "\"views\":{\"kv\":{\"pages\":[%s]}}}",
			     cmd, (unsigned long long)w->spaces[who],
			     (unsigned long long)w->caches[who].pool, ids, pages),
		"move");

	free(ids);
	free(pages);
	return store_move_find(w->engines[who], move);
}

static bool put_is_over(void *arg)
{
	struct store_move_facts facts;

	store_move_facts(arg, &facts);
	return facts.state >= STORE_MOVE_FAILED;
}

static uint32_t found(struct world *w, unsigned int who, uint32_t first, uint32_t count)
{
	char *ids = ids_text(first, count);
	uint64_t n = cluster_number(
		cluster_call(&w->c, w->engines[who],
			     "{\"cmd\":\"chunk.find\",\"space\":%llu,\"ids\":[%s]}",
			     (unsigned long long)w->spaces[who], ids),
		"chunks");

	free(ids);
	return (uint32_t)n;
}

/* The memory is full of one user's chunks; another's want slabs of it. */
static struct outcome put_into_full(unsigned int parts)
{
	struct outcome outcome;
	struct store_move *move;
	struct world w;

	world_open(&w);
	for (uint32_t i = 0; i < SLOTS; i += PUT)
		cluster_until(&w.c, put_is_over, put(&w, 0, "chunk.put", i, PUT), "put");
	w.evicted = figures_of(&w).evicted;
	w.most_evicted = 0;
	loop_virtual_parts(w.c.loop, parts);
	move = put(&w, 1, "chunk.put", 0, PUT);
	assert_non_null(move);
	w.move = move;
	cluster_until(&w.c, put_is_over, move, "put");
	w.move = NULL;
	assert_in_range(w.longest, 1, LEG_CHUNKS);
	store_move_facts(move, &outcome.put);
	assert_int_equal(outcome.put.state, STORE_MOVE_SUCCESS);
	assert_int_equal(outcome.put.chunks, PUT);
	assert_true(!parts || w.most_evicted <= STEP_EVICTS);
	loop_virtual_parts(w.c.loop, 0);
	outcome.found[0] = found(&w, 0, SLOTS - PUT, PUT);
	outcome.found[1] = found(&w, 1, 0, PUT);
	outcome.evicted = figures_of(&w).evicted;
	world_close(&w);
	return outcome;
}

static void assert_same(const struct outcome *a, const struct outcome *b)
{
	assert_int_equal(a->put.chunks, b->put.chunks);
	assert_int_equal(a->put.there, b->put.there);
	assert_int_equal(a->put.left_out, b->put.left_out);
	assert_int_equal(a->put.done, b->put.done);
	assert_int_equal(a->put.bytes, b->put.bytes);
	assert_int_equal(a->put.prefix_tokens, b->put.prefix_tokens);
	assert_int_equal(a->found[0], b->found[0]);
	assert_int_equal(a->found[1], b->found[1]);
	assert_int_equal(a->evicted, b->evicted);
}

static void put_in_turns_into_full_memory_takes_the_same(void **state)
{
	struct outcome at_once = put_into_full(0), in_turns = put_into_full(1);

	(void)state;
	assert_true(at_once.evicted > 0);
	assert_same(&at_once, &in_turns);
}

static void publication_in_turns_shows_all(void **state)
{
	const uint32_t chunks = cluster_geometry.pages / PAGES;
	struct store_move_facts facts;
	struct store_move *move;
	struct world w;

	(void)state;
	world_open(&w);
	loop_virtual_parts(w.c.loop, 1);
	move = put(&w, 0, "chunk.publish", 0, chunks);
	cluster_until(&w.c, put_is_over, move, "publication");
	store_move_facts(move, &facts);
	loop_virtual_parts(w.c.loop, 0);
	assert_int_equal(facts.state, STORE_MOVE_SUCCESS);
	assert_int_equal(facts.done, chunks);
	assert_int_equal(found(&w, 0, 0, chunks), chunks);
	world_close(&w);
}

static struct session *ended;

static bool store_is_still(void *arg)
{
	return store_module.live(arg) == 0;
}

static struct store_found held(struct world *w, uint32_t first, uint32_t count)
{
	char *ids = ids_text(first, count);
	uint64_t id = cluster_number(
		cluster_call(&w->c, w->engines[0],
			     "{\"cmd\":\"chunk.hold\",\"space\":%llu,\"ids\":[%s],"
			     "\"lease_ms\":1000}",
			     (unsigned long long)w->spaces[0], ids),
		"hold");
	struct store_hold *hold = store_hold_find(w->engines[0], id);
	struct store_hold_facts facts;

	free(ids);
	assert_non_null(hold);
	assert_int_equal(store_hold_check(hold), 0);
	store_hold_facts(hold, &facts);
	return facts.found;
}

static void hold_in_turns_has_the_same_chunks(void **state)
{
	struct store_found at_once, in_turns;
	struct world w;

	(void)state;
	world_open(&w);
	cluster_until(&w.c, put_is_over, put(&w, 0, "chunk.put", 0, PUT / 2), "put");
	at_once = held(&w, 0, PUT); /* the second half is a miss */
	loop_virtual_parts(w.c.loop, 1);
	in_turns = held(&w, 0, PUT);
	assert_int_equal(at_once.chunks, PUT / 2);
	assert_int_equal(in_turns.chunks, at_once.chunks);
	assert_int_equal(in_turns.tokens, at_once.tokens);
	cluster_run(&w.c, 2 * LOOP_NS_PER_S); /* the leases */
	loop_virtual_parts(w.c.loop, 0);
	assert_int_equal(figures_of(&w).missed, 2 * (PUT - PUT / 2));
	world_close(&w);
}

static void on_held(void *arg, struct store_hold *hold, const struct err *why)
{
	unsigned int *told = arg;

	(void)hold;
	*told += why ? 100 : 1;
}

/* Closed while its chunks are being taken. */
static void hold_closed_early_is_answered(void **state)
{
	static uint8_t bytes[PUT][STORE_ID_BYTES];
	const struct store_ids ids = {.bytes = bytes[0], .count = PUT / 2};
	unsigned int told = 0;
	const struct store_hold_args args = {
		.lease_ns = LOOP_NS_PER_S, .on_done = on_held, .arg = &told};
	struct store_hold *hold;
	struct world w;

	(void)state;
	for (uint32_t i = 0; i < PUT; i++) {
		bytes[i][STORE_ID_BYTES - 2] = (uint8_t)(i >> 8);
		bytes[i][STORE_ID_BYTES - 1] = (uint8_t)i;
	}
	world_open(&w);
	cluster_until(&w.c, put_is_over, put(&w, 0, "chunk.put", 0, PUT / 2), "put");
	loop_virtual_parts(w.c.loop, 1);
	assert_int_equal(store_hold_open(store_handle_find(w.engines[0], w.spaces[0]),
					 &ids, &args, &hold),
			 1);
	loop_turn(w.c.loop, LOOP_NS_PER_MS);
	assert_true(store_hold_check(hold) < 0);
	err_clear();
	store_hold_close(hold);
	assert_int_equal(told, 100);
	assert_int_equal(store_hold_open(store_handle_find(w.engines[0], w.spaces[0]),
					 &ids, &args, &hold),
			 1);
	cluster_engine_dies(&w.c, w.engines[0]);
	assert_int_equal(told, 200);
	cluster_until(&w.c, store_is_still, store_of(&w.c.nodes[0].kvd), "the end");
	loop_virtual_parts(w.c.loop, 0);
	w.engines[0] = cluster_engine_of(&w.c, 0, "a", 1000);
	world_close(&w);
}

/* Its engine dies while its chunks are being taken, and while they are let go. */
static void put_of_dead_engine_ends(void **state)
{
	(void)state;
	for (unsigned int turns = 1; turns < 2 * PUT; turns = 3 * turns + 1) {
		struct world w;

		world_open(&w);
		loop_virtual_parts(w.c.loop, 1);
		/* the first engine's command is answered when all is taken */
		assert_non_null(put(&w, 0, "chunk.put", 0, PUT / 4));
		for (unsigned int i = 0; i < turns; i++)
			loop_turn(w.c.loop, LOOP_NS_PER_MS);
		ended = w.engines[0];
		cluster_engine_dies(&w.c, ended);
		cluster_until(&w.c, store_is_still, store_of(&w.c.nodes[0].kvd),
			      "the end");
		loop_virtual_parts(w.c.loop, 0);
		w.engines[0] = cluster_engine_of(&w.c, 0, "a", 1000);
		world_close(&w);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(put_in_turns_into_full_memory_takes_the_same),
		cmocka_unit_test(publication_in_turns_shows_all),
		cmocka_unit_test(put_of_dead_engine_ends),
		cmocka_unit_test(hold_in_turns_has_the_same_chunks),
		cmocka_unit_test(hold_closed_early_is_answered),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
