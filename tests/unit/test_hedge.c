/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fetches from a holder that is late, with a second one: nodes 0 and 1 hold the same
 * chunks, node 0 one more, so it is asked first. Node 2 fetches. A byte is its place's.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"
#include "proto/kvd_status.h"
#include "daemon/store/far.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/cluster_store.h"

#define ASKER 2u
#define NODES 3u
#define TOKENS 16u
#define CHUNKS 3u /* that both have */
#define PAGES 4u  /* of a chunk */
#define MEMORY_BYTES (UINT64_C(4) << 20)
#define MS LOOP_NS_PER_MS
#define LATE (1000 * MS) /* of a holder that is not known */
#define MARK 0x5a

struct world {
	struct cluster c;
	struct session *engine[NODES];
	struct cache cache[NODES];
	struct cache other;   /* a second one of the asker's engine */
	struct cache half[4]; /* lower and upper heads, of the first and of the asker */
	uint64_t space[NODES];
	uint64_t hold, move;
};

static struct store *store_of(struct world *w)
{
	return w->c.nodes[ASKER].kvd.store;
}

static struct store_far far(struct world *w)
{
	struct store_figures f;

	store_figures(store_of(w), &f);
	return f.far;
}

static struct transport *bytes_of(struct world *w, unsigned int node)
{
	return fake_hub_node(w->c.bytes, node);
}

/* ---- content ---- */

static uint8_t byte_at(uint64_t i)
{
	return (uint8_t)((i * UINT64_C(0x9e3779b97f4a7c15)) >> 56);
}

static void cache_fill(struct cache *cache)
{
	for (uint64_t i = 0; i < cache->bytes; i++)
		cache->base[i] = byte_at(i);
}

/* Of pages [0, pages) all bytes are right, of the others none was touched. */
static bool cache_holds(const struct cache *cache, unsigned int pages)
{
	uint64_t field = cache->bytes / (cache->layers * 2), page = field / cache->pages;

	for (uint64_t i = 0; i < cache->bytes; i++) {
		uint8_t want = i % field < pages * page ? byte_at(i) : MARK;

		if (cache->base[i] != want)
			return false;
	}
	return true;
}

static const char *pages_text(unsigned int count)
{
	static char text[256];
	char *at = text;

	for (unsigned int i = 0; i < count; i++)
		at += sprintf(at, "%s%u", i ? "," : "", i);
	return text;
}

static const char *ids_text(unsigned int seed, unsigned int count)
{
	static char text[(CHUNKS + 1) * 80];
	char *at = text;

	for (unsigned int i = 0; i < count; i++)
		at += sprintf(at, "%s'%064x'", i ? "," : "", seed + i + 1);
	return text;
}

/* ---- the world ---- */

static void engine_begin(struct world *w, unsigned int node)
{
	struct cache *cache = &w->cache[node];

	w->engine[node] = cluster_engine(&w->c, node, "e");
	*cache = cluster_geometry;
	cluster_cache(&w->c, w->engine[node], "kv", 0, cache);
	memset(cache->base, MARK, cache->bytes);
	w->space[node] = cluster_number(
		cluster_call(&w->c, w->engine[node],
			     "{'cmd':'chunk.space','pool':%llu,'model':'m',"
			     "'scheme':'s','tokens':%u}",
			     (unsigned long long)cache->pool, TOKENS),
		"space");
}

static void put(struct world *w, unsigned int node, unsigned int seed, unsigned int count)
{
	cluster_ok(&w->c, w->engine[node],
		   "{'cmd':'chunk.put','space':%llu,'pool':%llu,'ids':[%s],'views':{"
		   "'kv':{'pages':[%s]}}}",
		   (unsigned long long)w->space[node],
		   (unsigned long long)w->cache[node].pool, ids_text(seed, count),
		   pages_text(count * PAGES));
	cluster_run(&w->c, LOOP_NS_PER_S);
}

static uint64_t hold_of(struct world *w, unsigned int seed, unsigned int count,
			unsigned int far_ms)
{
	return cluster_number(
		cluster_call(&w->c, w->engine[ASKER],
			     "{'cmd':'chunk.hold','space':%llu,'ids':[%s],'lease_ms':"
			     "600000,'far_ms':%u}",
			     (unsigned long long)w->space[ASKER], ids_text(seed, count),
			     far_ms),
		"hold");
}

static uint64_t fetch_more(struct world *w, unsigned int chunks, const char *more)
{
	return cluster_number(
		cluster_call(&w->c, w->engine[ASKER],
			     "{'cmd':'chunk.fetch','hold':%llu,'pool':%llu,'views':{"
			     "'kv':{'pages':[%s],'tokens':[0,%u]}}%s}",
			     (unsigned long long)w->hold,
			     (unsigned long long)w->cache[ASKER].pool,
			     pages_text(chunks * PAGES), chunks * TOKENS, more),
		"move");
}

static uint64_t fetch(struct world *w)
{
	return fetch_more(w, CHUNKS, "");
}

static unsigned int state_of(struct world *w, uint64_t move)
{
	const struct store_move *m = store_move_find(w->engine[ASKER], move);
	struct store_move_facts facts;

	assert_non_null(m);
	store_move_facts(m, &facts);
	return facts.poll_state;
}

static int setup_with(void **state, uint64_t memory)
{
	struct world *w = calloc(1, sizeof(*w));
	struct cluster_store_args args = {.memory_bytes = memory};
	char stores[160];

	assert_non_null(w);
	cluster_new(&w->c, 9, NODES);
	assert_true(cluster_store(&w->c, 0, &args));
	assert_true(cluster_store(&w->c, 1, &args));
	snprintf(stores, sizeof(stores), "%s %s", w->c.nodes[0].endpoint,
		 w->c.nodes[1].endpoint);
	args.stores = stores;
	assert_true(cluster_store(&w->c, ASKER, &args));
	for (unsigned int node = 0; node < NODES; node++)
		engine_begin(w, node);
	for (unsigned int node = 0; node < ASKER; node++) {
		cache_fill(&w->cache[node]);
		put(w, node, 0, CHUNKS + 1 - node);
	}
	w->hold = hold_of(w, 0, CHUNKS + 1, 2000);
	*state = w;
	return 0;
}

static int setup(void **state)
{
	return setup_with(state, MEMORY_BYTES);
}

static int teardown(void **state)
{
	struct world *w = *state;

	for (unsigned int node = 0; node < NODES; node++) {
		if (w->cache[node].base)
			cache_close(&w->cache[node]);
	}
	if (w->other.base)
		cache_close(&w->other);
	for (unsigned int i = 0; i < ARRAY_LEN(w->half); i++) {
		if (w->half[i].base)
			cache_close(&w->half[i]);
	}
	cluster_free(&w->c);
	free(w);
	return 0;
}

static bool is_over(void *arg)
{
	struct world *w = arg;

	return state_of(w, w->move) == KVD_SUCCESS || state_of(w, w->move) == KVD_FAILED;
}

/* All that the hedges took of the memory is given back, or is content. */
static void nothing_is_left(struct world *w)
{
	const struct store *store = store_of(w);
	const struct store_space *space =
		list_first(&store->spaces, struct store_space, link);

	assert_true(list_empty(&store->hedges));
	assert_int_equal(store->moves_live, 0);
	assert_int_equal(arena_owner_pinned(space->tenant->owner), 0);
	for (uint64_t i = 0; i <= store->bucket_mask; i++) {
		struct store_part *part;

		for (struct store_chunk *k = store->buckets[i]; k; k = k->next)
			list_foreach(part, &k->parts, link)
				assert_true(part->ready);
	}
}

/* ---- cases ---- */

static void late_holder_is_followed_by_the_other(void **state)
{
	struct world *w = *state;

	fake_node_freeze(bytes_of(w, 0), true);
	w->move = fetch(w);
	cluster_run(&w->c, LATE - 10 * MS);
	assert_int_equal(state_of(w, w->move), KVD_TRANSFERRING);
	assert_int_equal(far(w).hedges, 0);
	cluster_run(&w->c, 50 * MS);
	assert_int_equal(far(w).hedges, 1);
	cluster_until(&w->c, is_over, w, "the fetch");
	assert_int_equal(state_of(w, w->move), KVD_SUCCESS);
	assert_true(cache_holds(&w->cache[ASKER], CHUNKS * PAGES));
	assert_int_equal(far(w).hedges_won, 1);
	assert_int_equal(far(w).retries, 0);
	assert_int_equal(store_of(w)->chunk_count, CHUNKS); /* for the next one */
	nothing_is_left(w);
	memset(w->cache[ASKER].base, MARK, w->cache[ASKER].bytes);
	fake_node_freeze(bytes_of(w, 0), false);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_true(cache_holds(&w->cache[ASKER], 0));
}

/* A slice that is under way lands behind the cancel, and before the fence. */
static void pages_wait_for_the_fence_of_what_is_late(void **state)
{
	struct world *w = *state;
	const struct fake_rule rule = {.fault = FAKE_LATE,
				       .from = bytes_of(w, ASKER),
				       .to = bytes_of(w, 0),
				       .kinds = 1u << XP_READ,
				       .extra_ns = 3000 * MS};

	assert_int_equal(fake_script(w->c.bytes, &rule), 0);
	w->move = fetch(w);
	cluster_run(&w->c, LATE + 500 * MS);
	assert_int_equal(store_of(w)->chunk_count, CHUNKS);
	assert_true(list_empty(&store_of(w)->hedges));		     /* it has landed */
	assert_false(cache_holds(&w->cache[ASKER], CHUNKS * PAGES)); /* and waits */
	assert_int_equal(state_of(w, w->move), KVD_TRANSFERRING);
	assert_int_equal(far(w).hedges_won, 0);
	cluster_until(&w->c, is_over, w, "the fetch");
	memset(w->cache[ASKER].base, MARK, w->cache[ASKER].bytes);
	assert_int_equal(state_of(w, w->move), KVD_SUCCESS);
	assert_int_equal(far(w).hedges_won, 1);
	cluster_run(&w->c, 10 * LOOP_NS_PER_S);
	assert_true(cache_holds(&w->cache[ASKER], 0));
	nothing_is_left(w);
}

static void hedge_that_is_not_needed_ends(void **state)
{
	struct world *w = *state;

	fake_node_freeze(bytes_of(w, 0), true);
	fake_node_freeze(bytes_of(w, 1), true);
	w->move = fetch(w);
	cluster_run(&w->c, LATE + 100 * MS);
	assert_int_equal(far(w).hedges, 1);
	assert_false(list_empty(&store_of(w)->hedges));
	fake_node_freeze(bytes_of(w, 0), false);
	cluster_until(&w->c, is_over, w, "the fetch");
	assert_int_equal(state_of(w, w->move), KVD_SUCCESS);
	assert_true(cache_holds(&w->cache[ASKER], CHUNKS * PAGES));
	assert_int_equal(far(w).hedges_won, 0);
	fake_node_freeze(bytes_of(w, 1), false);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(store_of(w)->chunk_count, 0);
	nothing_is_left(w);
}

/* Which dies, and when: before the leg is late, or with the hedge under way. */
static void holder_that_dies_is_followed(struct world *w, unsigned int dies, bool hedged)
{
	struct transport *lives = bytes_of(w, 1 - dies);

	fake_node_freeze(bytes_of(w, 0), true);
	if (hedged)
		fake_node_freeze(bytes_of(w, 1), true);
	w->move = fetch(w);
	cluster_run(&w->c, hedged ? LATE + 100 * MS : LATE / 2);
	assert_int_equal(far(w).hedges, hedged);
	cluster_crash(&w->c, dies, MEM_CRASH_KILLED);
	cluster_run(&w->c, 100 * MS);
	if (hedged)
		fake_node_freeze(lives, false);
	cluster_until(&w->c, is_over, w, "the fetch");
	assert_int_equal(state_of(w, w->move), KVD_SUCCESS);
	assert_true(cache_holds(&w->cache[ASKER], CHUNKS * PAGES));
	cluster_run(&w->c, LOOP_NS_PER_S);
	nothing_is_left(w);
}

static void first_dies_before_it_is_late(void **state)
{
	struct world *w = *state;

	holder_that_dies_is_followed(w, 0, false);
	assert_int_equal(far(w).retries, 1);
}

static void first_dies_with_a_hedge_under_way(void **state)
{
	struct world *w = *state;

	holder_that_dies_is_followed(w, 0, true);
	assert_int_equal(far(w).retries, 1);
}

static void second_dies_with_a_hedge_under_way(void **state)
{
	holder_that_dies_is_followed(*state, 1, true);
}

static void second_dies_before_it_is_asked(void **state)
{
	struct world *w = *state;

	fake_node_freeze(bytes_of(w, 0), true);
	cluster_crash(&w->c, 1, MEM_CRASH_KILLED);
	w->move = fetch(w);
	cluster_run(&w->c, 2 * LATE);
	assert_int_equal(far(w).hedges, 0);
	fake_node_freeze(bytes_of(w, 0), false);
	cluster_until(&w->c, is_over, w, "the fetch");
	assert_int_equal(state_of(w, w->move), KVD_SUCCESS);
}

/* The second has not what is asked for: the fetch waits for the first. */
static void hedge_that_is_refused_costs_nothing(void **state)
{
	struct world *w = *state;

	fake_node_freeze(bytes_of(w, 0), true);
	w->move = fetch_more(w, CHUNKS + 1, ""); /* one leg, of what the second lacks */
	cluster_run(&w->c, 2 * LATE);
	assert_int_equal(far(w).hedges, 0);
	fake_node_freeze(bytes_of(w, 0), false);
	cluster_until(&w->c, is_over, w, "the fetch");
	assert_int_equal(state_of(w, w->move), KVD_SUCCESS);
	assert_true(cache_holds(&w->cache[ASKER], (CHUNKS + 1) * PAGES));
	nothing_is_left(w);
}

static void both_die_with_a_hedge_under_way(void **state)
{
	struct world *w = *state;

	fake_node_freeze(bytes_of(w, 0), true);
	fake_node_freeze(bytes_of(w, 1), true);
	w->move = fetch(w);
	cluster_run(&w->c, LATE + 100 * MS);
	assert_int_equal(far(w).hedges, 1);
	cluster_crash(&w->c, 0, MEM_CRASH_KILLED);
	cluster_run(&w->c, 100 * MS);
	assert_int_equal(state_of(w, w->move), KVD_TRANSFERRING);
	cluster_crash(&w->c, 1, MEM_CRASH_KILLED);
	cluster_until(&w->c, is_over, w, "the fetch");
	assert_int_equal(state_of(w, w->move), KVD_FAILED);
	assert_true(cache_holds(&w->cache[ASKER], 0));
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(store_of(w)->chunk_count, 0);
	nothing_is_left(w);
}

/* The first chunk is put here, too, by an engine that takes its time: neither a hedge nor
 * the fetch wait for that. */
static void what_an_engine_fills_is_not_waited_for(void **state)
{
	struct world *w = *state;
	struct store_handle *handle =
		store_handle_find(w->engine[ASKER], w->space[ASKER]);
	uint8_t id[STORE_ID_BYTES] = {0};
	struct store_class *class;
	struct store_chunk *chunk;
	struct store_part *part;

	id[STORE_ID_BYTES - 1] = 1;
	assert_true(store_class_of(handle, &class) >= 0);
	assert_int_equal(store_chunk_get(handle->space, id, 0, TOKENS, &chunk), 0);
	assert_int_equal(store_part_new(chunk, class, &part), 0);
	fake_node_freeze(bytes_of(w, 0), true);
	w->move = fetch(w);
	cluster_run(&w->c, LATE + 100 * MS);
	assert_int_equal(far(w).hedges, 0);
	cluster_crash(&w->c, 0, MEM_CRASH_KILLED);
	cluster_until(&w->c, is_over, w, "the fetch");
	assert_int_equal(state_of(w, w->move), KVD_SUCCESS);
	assert_int_equal(far(w).retries, 1);
	assert_true(cache_holds(&w->cache[ASKER], CHUNKS * PAGES));
	store_part_free(part);
	store_chunk_unpin(chunk);
	nothing_is_left(w);
}

static void deadline_ends_both(void **state)
{
	struct world *w = *state;
	const struct store_move *m;

	fake_node_freeze(bytes_of(w, 0), true);
	fake_node_freeze(bytes_of(w, 1), true);
	w->move = fetch_more(w, CHUNKS, ",'deadline_ms':1500");
	cluster_run(&w->c, 1400 * MS);
	assert_int_equal(far(w).hedges, 1);
	assert_int_equal(state_of(w, w->move), KVD_TRANSFERRING);
	cluster_until(&w->c, is_over, w, "the fetch");
	m = store_move_find(w->engine[ASKER], w->move);
	assert_int_equal(m->error.code, ERR_TIMEOUT);
	assert_int_equal(m->prefix_tokens, 0);
	fake_node_freeze(bytes_of(w, 0), false);
	fake_node_freeze(bytes_of(w, 1), false);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_true(cache_holds(&w->cache[ASKER], 0));
	assert_int_equal(store_of(w)->chunk_count, 0);
	nothing_is_left(w);
}

static void engine_that_dies_ends_both(void **state)
{
	struct world *w = *state;

	fake_node_freeze(bytes_of(w, 0), true);
	fake_node_freeze(bytes_of(w, 1), true);
	w->move = fetch(w);
	cluster_run(&w->c, LATE + 100 * MS);
	assert_int_equal(far(w).hedges, 1);
	cluster_engine_dies(&w->c, w->engine[ASKER]);
	fake_node_freeze(bytes_of(w, 0), false);
	fake_node_freeze(bytes_of(w, 1), false);
	cluster_run(&w->c, 10 * LOOP_NS_PER_S);
	assert_int_equal(store_of(w)->chunk_count, 0);
	assert_int_equal(store_of(w)->moves, 0);
}

/* The first hedge fails and leaves names without parts; they are dropped, and the leg is
 * late again. */
static void what_is_dropped_is_not_hedged_again(void **state)
{
	struct world *w = *state;
	struct store_move *move;
	struct err why;

	fake_node_freeze(bytes_of(w, 0), true);
	fake_node_freeze(bytes_of(w, 1), true);
	w->move = fetch(w);
	cluster_run(&w->c, LATE + 100 * MS);
	assert_int_equal(far(w).hedges, 1);
	err_set(&why, ERR_NOTFOUND, "by the test");
	store_move_abort(list_first(&store_of(w)->hedges, struct store_move, hedge_link),
			 &why);
	fake_node_freeze(bytes_of(w, 1), false);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_true(list_empty(&store_of(w)->hedges));
	assert_int_equal(store_of(w)->chunk_count, CHUNKS);
	cluster_ok(&w->c, w->engine[ASKER],
		   "{'cmd':'chunk.drop','space':%llu,'ids':[%s]}",
		   (unsigned long long)w->space[ASKER], ids_text(0, CHUNKS));
	move = store_move_find(w->engine[ASKER], w->move);
	store_hedge(list_first(&move->legs, struct store_leg, link));
	cluster_run(&w->c, 100 * MS);
	assert_int_equal(far(w).hedges, 1);
	fake_node_freeze(bytes_of(w, 0), false);
	cluster_until(&w->c, is_over, w, "the fetch");
	assert_int_equal(state_of(w, w->move), KVD_SUCCESS);
	assert_true(cache_holds(&w->cache[ASKER], CHUNKS * PAGES));
	assert_int_equal(store_of(w)->chunk_count, 0);
	nothing_is_left(w);
}

/* More than half of the user's share is pinned. */
static void full_memory_is_left_alone(void **state)
{
	struct world *w = *state;
	const struct store_space *space =
		list_first(&store_of(w)->spaces, struct store_space, link);
	const struct arena_owner *owner = space->tenant->owner;
	struct store_class *class;
	struct store_chunk *pinned[256];
	uint32_t n = 0;

	assert_true(store_class_of(store_handle_find(w->engine[ASKER], w->space[ASKER]),
				   &class) >= 0);
	while (arena_owner_pinned(owner) <= arena_owner_share(owner) / 2) {
		uint8_t id[STORE_ID_BYTES] = {0xff};
		struct store_part *part;

		memcpy(id + 1, &n, sizeof(n));
		assert_true(n < ARRAY_LEN(pinned));
		assert_int_equal(store_chunk_get(class->space, id, n, TOKENS, &pinned[n]),
				 0);
		assert_int_equal(store_part_new(pinned[n++], class, &part), 0);
	}
	fake_node_freeze(bytes_of(w, 0), true);
	w->move = fetch(w);
	cluster_run(&w->c, 2 * LATE);
	assert_int_equal(far(w).hedges, 0);
	assert_int_equal(store_of(w)->chunk_count, n);
	fake_node_freeze(bytes_of(w, 0), false);
	cluster_until(&w->c, is_over, w, "the fetch");
	assert_int_equal(state_of(w, w->move), KVD_SUCCESS);
	assert_true(cache_holds(&w->cache[ASKER], CHUNKS * PAGES));
	while (n > 0)
		store_chunk_unpin(pinned[--n]);
}

static void no_hedge_where_it_is_not_wanted(void **state)
{
	struct world *w = *state;

	w->c.nodes[ASKER].config.chunk_hedge = false;
	fake_node_freeze(bytes_of(w, 0), true);
	w->move = fetch(w);
	cluster_run(&w->c, 2 * LATE);
	assert_int_equal(far(w).hedges, 0);
	fake_node_freeze(bytes_of(w, 0), false);
	cluster_until(&w->c, is_over, w, "the fetch");
	assert_int_equal(state_of(w, w->move), KVD_SUCCESS);
}

/* The second fetch waits for what the first one's hedge fills, which goes on when the
 * first is aborted. */
static void two_fetches_share_a_hedge(void **state)
{
	struct world *w = *state;
	struct store_move *hedge;
	uint64_t before, one;
	uint32_t parts = 0;
	struct err why;

	fake_node_freeze(bytes_of(w, 0), true);
	fake_node_freeze(bytes_of(w, 1), true);
	before = far(w).hedges;
	one = fetch(w);
	cluster_run(&w->c, 100 * MS);
	w->move = fetch(w);
	cluster_run(&w->c, LATE + 50 * MS);
	assert_int_equal(far(w).hedges, before + 2);
	list_foreach(hedge, &store_of(w)->hedges, hedge_link) {
		for (uint32_t i = 0; i < hedge->count; i++)
			parts += hedge->pieces[i].part != NULL;
	}
	assert_int_equal(parts, CHUNKS); /* each is pulled once */
	err_set(&why, ERR_ABORTED, "by the test");
	store_move_abort(store_move_find(w->engine[ASKER], one), &why);
	cluster_run(&w->c, 100 * MS);
	assert_int_equal(state_of(w, one), KVD_FAILED);
	fake_node_freeze(bytes_of(w, 1), false);
	cluster_until(&w->c, is_over, w, "the fetch");
	assert_int_equal(state_of(w, w->move), KVD_SUCCESS);
	assert_true(cache_holds(&w->cache[ASKER], CHUNKS * PAGES));
	assert_int_equal(far(w).hedges_won, 1);
	nothing_is_left(w);
	fake_node_freeze(bytes_of(w, 0), false);
	cluster_run(&w->c, LOOP_NS_PER_S);
}

static void hedges_are_no_more_than_the_budget(void **state)
{
	struct world *w = *state;
	uint64_t moves[PACE_BURST + 4];

	fake_node_freeze(bytes_of(w, 0), true);
	fake_node_freeze(bytes_of(w, 1), true);
	for (unsigned int i = 0; i < PACE_BURST + 4; i++)
		moves[i] = fetch(w);
	cluster_run(&w->c, 2 * LATE);
	assert_int_equal(far(w).hedges, PACE_BURST);
	fake_node_freeze(bytes_of(w, 0), false);
	fake_node_freeze(bytes_of(w, 1), false);
	for (unsigned int i = 0; i < PACE_BURST + 4; i++) {
		w->move = moves[i];
		cluster_until(&w->c, is_over, w, "a fetch");
		assert_int_equal(state_of(w, w->move), KVD_SUCCESS);
	}
	cluster_run(&w->c, LOOP_NS_PER_S);
	nothing_is_left(w);
}

/* Nothing is there any more, and of the holders nothing is known. */
static void begin_anew(struct world *w)
{
	struct remote *remote;

	cluster_ok(&w->c, w->engine[ASKER], "{'cmd':'chunk.release','hold':%llu}",
		   (unsigned long long)w->hold);
	cluster_ok(&w->c, w->engine[ASKER],
		   "{'cmd':'chunk.drop','space':%llu,'ids':[%s]}",
		   (unsigned long long)w->space[ASKER], ids_text(0, CHUNKS));
	list_foreach(remote, handshake_remotes(w->c.nodes[ASKER].kvd.handshake), link)
		remote->pace.count = 0;
	store_of(w)->hedging.spent = 0;
	memset(w->cache[ASKER].base, MARK, w->cache[ASKER].bytes);
	w->hold = hold_of(w, 0, CHUNKS + 1, 2000);
}

/* Each allocation of a hedge's beginning fails once. */
static void want_of_memory_costs_the_hedge(void **state)
{
	struct world *w = *state;
	uint64_t won = 0, lost = 0;
	bool all = false;

	for (uint64_t nth = 1; !all; nth++) {
		begin_anew(w);
		fake_node_freeze(bytes_of(w, 0), true);
		w->move = fetch(w);
		cluster_run(&w->c, LATE - 20 * MS);
		mem_fail_at(nth);
		cluster_run(&w->c, 100 * MS);
		all = mem_count() < nth;
		mem_fail_at(0);
		fake_node_freeze(bytes_of(w, 0), false);
		cluster_until(&w->c, is_over, w, "the fetch");
		if (state_of(w, w->move) == KVD_SUCCESS)
			assert_true(cache_holds(&w->cache[ASKER], CHUNKS * PAGES));
		lost += far(w).hedges_won == won;
		won = far(w).hedges_won;
		cluster_run(&w->c, LOOP_NS_PER_S);
		nothing_is_left(w);
		cluster_ok(&w->c, w->engine[ASKER], "{'cmd':'chunk.close','move':%llu}",
			   (unsigned long long)w->move);
	}
	assert_true(won > 0 && lost > 0);
}

/* ---- with what engines publish ---- */

static void publish(struct world *w, unsigned int count)
{
	cluster_ok(&w->c, w->engine[ASKER],
		   "{'cmd':'chunk.publish','space':%llu,'pool':%llu,'ids':[%s],"
		   "'views':{'kv':{'pages':[%s]}}}",
		   (unsigned long long)w->space[ASKER],
		   (unsigned long long)w->cache[ASKER].pool, ids_text(0, count),
		   pages_text(count * PAGES));
	cluster_run(&w->c, MS);
}

static void withdraw(struct world *w, unsigned int count)
{
	cluster_ok(&w->c, w->engine[ASKER],
		   "{'cmd':'chunk.withdraw','space':%llu,'ids':[%s],'grace_ms':0}",
		   (unsigned long long)w->space[ASKER], ids_text(0, count));
}

static uint64_t fetch_other(struct world *w)
{
	return cluster_number(
		cluster_call(&w->c, w->engine[ASKER],
			     "{'cmd':'chunk.fetch','hold':%llu,'pool':%llu,'views':{"
			     "'kv':{'pages':[%s],'tokens':[0,%u]}}}",
			     (unsigned long long)w->hold,
			     (unsigned long long)w->other.pool,
			     pages_text(CHUNKS * PAGES), CHUNKS * TOKENS),
		"move");
}

static void other_begin(struct world *w)
{
	w->other = cluster_geometry;
	cluster_cache(&w->c, w->engine[ASKER], "other", 0, &w->other);
	memset(w->other.base, MARK, w->other.bytes);
	cache_fill(&w->cache[ASKER]);
}

/* By a call, not a command, so that it is done in this turn. */
static void publish_again(struct world *w, const struct store_ids *ids)
{
	struct session *engine = w->engine[ASKER];
	struct store_move_args args = {.pool = pool_find(engine, w->cache[ASKER].pool),
				       .publish = true};
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
	assert_int_equal(
		store_put(store_handle_find(engine, w->space[ASKER]), ids, &args, &move),
		0);
}

/* They are there again before what read them has ended. */
static void what_is_published_again_is_read_again(void **state)
{
	struct world *w = *state;
	uint8_t bytes[CHUNKS * STORE_ID_BYTES] = {0};
	const struct store_ids ids = {.bytes = bytes, .count = CHUNKS};
	struct store_handle *handle =
		store_handle_find(w->engine[ASKER], w->space[ASKER]);
	struct store_move *move;

	for (unsigned int i = 0; i < CHUNKS; i++)
		bytes[(i + 1) * STORE_ID_BYTES - 1] = (uint8_t)(i + 1);
	other_begin(w);
	publish(w, CHUNKS);
	w->hold = hold_of(w, 0, CHUNKS, 0);
	fake_node_freeze(bytes_of(w, ASKER), true);
	w->move = fetch_other(w);
	cluster_run(&w->c, MS);
	assert_int_equal(state_of(w, w->move), KVD_TRANSFERRING);
	assert_int_equal(store_withdraw(handle, &ids, 0, &move), 0);
	publish_again(w, &ids);
	fake_node_freeze(bytes_of(w, ASKER), false);
	cluster_until(&w->c, is_over, w, "the fetch");
	assert_int_equal(state_of(w, w->move), KVD_SUCCESS);
	assert_true(cache_holds(&w->other, CHUNKS * PAGES));
}

/* Published here while a leg is late: it is read here. Withdrawn as the leg ends: then
 * it is the hedge's, or the holder's again. */
static void published_overtakes_what_is_late(void **state)
{
	struct world *w = *state;

	other_begin(w);
	fake_node_freeze(bytes_of(w, 0), true);
	fake_node_freeze(bytes_of(w, 1), true);
	w->move = fetch_other(w);
	cluster_run(&w->c, LATE + 100 * MS);
	assert_int_equal(far(w).hedges, 1);
	publish(w, CHUNKS);
	cluster_until(&w->c, is_over, w, "the fetch");
	assert_int_equal(state_of(w, w->move), KVD_SUCCESS);
	assert_true(cache_holds(&w->other, CHUNKS * PAGES));
	assert_int_equal(far(w).hedges_won, 1);
	withdraw(w, CHUNKS);
	fake_node_freeze(bytes_of(w, 0), false);
	fake_node_freeze(bytes_of(w, 1), false);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(store_of(w)->chunk_count, 0);
	nothing_is_left(w);
}

static void published_overtakes_and_is_withdrawn(void **state)
{
	struct world *w = *state;
	const struct fake_rule rule = {.fault = FAKE_LATE,
				       .from = bytes_of(w, ASKER),
				       .to = bytes_of(w, 0),
				       .kinds = 1u << XP_READ,
				       .extra_ns = 3000 * MS};

	other_begin(w);
	assert_int_equal(fake_script(w->c.bytes, &rule), 0);
	fake_node_freeze(bytes_of(w, 1), true);
	w->move = fetch_other(w);
	cluster_run(&w->c, LATE + 100 * MS);
	assert_int_equal(far(w).hedges, 1);
	publish(w, CHUNKS);
	cluster_run(&w->c, 10 * MS); /* the late leg is ended, and awaits its fence */
	assert_int_equal(state_of(w, w->move), KVD_TRANSFERRING);
	withdraw(w, CHUNKS);
	cluster_run(&w->c, 5 * LOOP_NS_PER_S);
	assert_int_equal(state_of(w, w->move), KVD_TRANSFERRING); /* the hedge loads */
	fake_node_freeze(bytes_of(w, 1), false);
	cluster_until(&w->c, is_over, w, "the fetch");
	assert_int_equal(state_of(w, w->move), KVD_SUCCESS);
	assert_true(cache_holds(&w->other, CHUNKS * PAGES));
	nothing_is_left(w);
}

/* ---- ranks ---- */

/* A cache with half of the heads, and its space. */
static uint64_t half_begin(struct world *w, unsigned int node, bool upper)
{
	struct cache *cache = &w->half[(node ? 2 : 0) + upper];

	*cache = cluster_geometry;
	cache->units /= 2;
	cache->first_unit = upper ? cache->units : 0;
	cluster_cache(&w->c, w->engine[node], upper ? "upper" : "lower", upper, cache);
	return cluster_number(cluster_call(&w->c, w->engine[node],
					   "{'cmd':'chunk.space','pool':%llu,'model':'m',"
					   "'scheme':'s','tokens':%u}",
					   (unsigned long long)cache->pool, TOKENS),
			      "space");
}

/* What a hold of nothing charges its engine when it has been answered. */
static uint64_t hold_costs(struct world *w, unsigned int far_ms)
{
	const struct account *account = w->engine[ASKER]->account;
	uint64_t before = account->bytes[ACCOUNT_CHUNKS];

	hold_of(w, 200, CHUNKS, far_ms);
	return account->bytes[ACCOUNT_CHUNKS] - before;
}

static void ids_that_nobody_has_are_not_charged_on(void **state)
{
	struct world *w = *state;

	assert_int_equal(hold_costs(w, 2000), hold_costs(w, 0));
}

/* The holder has less for the rank that asked than for the one that joins, which is given
 * the same chunks: their ids are known of those alone. */
static void join_has_no_more_chunks_than_the_hold(void **state)
{
	struct world *w = *state;
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
			   (unsigned long long)w->half[half].pool, ids_text(100, count),
			   pages_text(count * PAGES));
	}
	cluster_run(&w->c, LOOP_NS_PER_S);
	lower = half_begin(w, ASKER, false);
	upper = half_begin(w, ASKER, true);
	answer = cluster_call(&w->c, w->engine[ASKER],
			      "{'cmd':'chunk.hold','space':%llu,'ids':[%s],'lease_ms':"
			      "600000,'far_ms':2000}",
			      (unsigned long long)upper, ids_text(100, CHUNKS));
	assert_int_equal(cJSON_GetNumberValue(cJSON_GetObjectItem(answer, "chunks")), 1);
	secret = cJSON_GetStringValue(cJSON_GetObjectItem(answer, "secret"));
	hold = store_hold_find(
		w->engine[ASKER],
		cluster_number(cluster_call(&w->c, w->engine[ASKER],
					    "{'cmd':'chunk.join','space':%llu,"
					    "'secret':'%s','lease_ms':600000}",
					    (unsigned long long)lower, secret),
			       "hold"));
	assert_non_null(hold);
	assert_int_equal(far_hold_chunks(hold->far), 1);
	assert_int_equal(far_hold_tokens(hold->far), TOKENS);
	cJSON_Delete(answer);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	static const struct CMUnitTest tests[] = {
		CASE(late_holder_is_followed_by_the_other),
		CASE(pages_wait_for_the_fence_of_what_is_late),
		CASE(hedge_that_is_not_needed_ends),
		CASE(first_dies_before_it_is_late),
		CASE(first_dies_with_a_hedge_under_way),
		CASE(second_dies_with_a_hedge_under_way),
		CASE(second_dies_before_it_is_asked),
		CASE(hedge_that_is_refused_costs_nothing),
		CASE(both_die_with_a_hedge_under_way),
		CASE(what_an_engine_fills_is_not_waited_for),
		CASE(deadline_ends_both),
		CASE(engine_that_dies_ends_both),
		CASE(what_is_dropped_is_not_hedged_again),
		CASE(full_memory_is_left_alone),
		CASE(no_hedge_where_it_is_not_wanted),
		CASE(two_fetches_share_a_hedge),
		CASE(hedges_are_no_more_than_the_budget),
		CASE(want_of_memory_costs_the_hedge),
		CASE(what_is_published_again_is_read_again),
		CASE(published_overtakes_what_is_late),
		CASE(published_overtakes_and_is_withdrawn),
		CASE(ids_that_nobody_has_are_not_charged_on),
		CASE(join_has_no_more_chunks_than_the_hold),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
