/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Three nodes of a cluster on a virtual clock, each with a store, an engine and a cache.
 * What a node has is put by its engine; late, dead or frozen is what a test makes of the
 * first two. Pages of the third are marked, so that a byte which should not have been
 * written is seen.
 */
#include "tests/lib/hedge_world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/session/session.h"
#include "proto/kvd_status.h"

struct store *hedge_store(struct hedge_world *w)
{
	return store_of(&w->c.nodes[REQUESTER].kvd);
}

struct store_remote_figures hedge_remote_figures(struct hedge_world *w)
{
	struct store_figures f;

	store_figures(hedge_store(w), &f);
	return f.remote;
}

struct transport *hedge_bytes(struct hedge_world *w, unsigned int node)
{
	return fake_hub_node(w->c.bytes, node);
}

/* ---- content ---- */

static uint8_t byte_at(uint64_t i)
{
	return (uint8_t)((i * UINT64_C(0x9e3779b97f4a7c15)) >> 56);
}

void hedge_fill(struct cache *cache)
{
	for (uint64_t i = 0; i < cache->bytes; i++)
		cache->base[i] = byte_at(i);
}

/* Of pages [0, pages) all bytes are right, of the others none was touched. */
bool hedge_holds(const struct cache *cache, unsigned int pages)
{
	uint64_t field = cache->bytes / (cache->layers * 2), page = field / cache->pages;

	for (uint64_t i = 0; i < cache->bytes; i++) {
		uint8_t want = i % field < pages * page ? byte_at(i) : MARK;

		if (cache->base[i] != want)
			return false;
	}
	return true;
}

const char *hedge_pages(unsigned int count)
{
	static char text[256];
	char *at = text;

	for (unsigned int i = 0; i < count; i++)
		at += sprintf(at, "%s%u", i ? "," : "", i);
	return text;
}

const char *hedge_ids(unsigned int seed, unsigned int count)
{
	static char text[(CHUNKS + 1) * 80];
	char *at = text;

	for (unsigned int i = 0; i < count; i++)
		at += sprintf(at, "%s'%064x'", i ? "," : "", seed + i + 1);
	return text;
}

/* ---- the world ---- */

static void engine_begin(struct hedge_world *w, unsigned int node)
{
	struct cache *cache = &w->cache[node];

	w->engine[node] = cluster_engine(&w->c, node, "e");
	*cache = cluster_geometry;
	cluster_cache(&w->c, w->engine[node], "kv", 0, cache);
	memset(cache->base, MARK, cache->bytes);
	w->space[node] = cluster_space(&w->c, w->engine[node], cache->pool, TOKENS);
}

void hedge_put(struct hedge_world *w, unsigned int node, unsigned int seed,
	       unsigned int count)
{
	cluster_ok(&w->c, w->engine[node],
		   "{'cmd':'chunk.put','space':%llu,'pool':%llu,'ids':[%s],'views':{"
		   "'kv':{'pages':[%s]}}}",
		   (unsigned long long)w->space[node],
		   (unsigned long long)w->cache[node].pool, hedge_ids(seed, count),
		   hedge_pages(count * PAGES));
	cluster_run(&w->c, LOOP_NS_PER_S);
}

uint64_t hedge_hold(struct hedge_world *w, unsigned int seed, unsigned int count,
		    unsigned int remote_ms)
{
	return cluster_number(
		cluster_call(&w->c, w->engine[REQUESTER],
			     "{'cmd':'chunk.hold','space':%llu,'ids':[%s],'lease_ms':"
			     "600000,'remote_ms':%u}",
			     (unsigned long long)w->space[REQUESTER],
			     hedge_ids(seed, count), remote_ms),
		"hold");
}

uint64_t hedge_fetch_to(struct hedge_world *w, const struct cache *cache,
			unsigned int chunks, const char *more)
{
	return cluster_number(
		cluster_call(&w->c, w->engine[REQUESTER],
			     "{'cmd':'chunk.fetch','hold':%llu,'pool':%llu,'views':{"
			     "'kv':{'pages':[%s],'tokens':[0,%u]}}%s}",
			     (unsigned long long)w->hold, (unsigned long long)cache->pool,
			     hedge_pages(chunks * PAGES), chunks * TOKENS, more),
		"move");
}

uint64_t hedge_fetch(struct hedge_world *w)
{
	return hedge_fetch_to(w, &w->cache[REQUESTER], CHUNKS, "");
}

void hedge_reads_late(struct hedge_world *w, unsigned int node)
{
	const struct fake_rule rule = {.fault = FAKE_LATE,
				       .from = hedge_bytes(w, REQUESTER),
				       .to = hedge_bytes(w, node),
				       .kinds = 1u << XP_READ,
				       .extra_ns = 3000 * MS};

	assert_int_equal(fake_script(w->c.bytes, &rule), 0);
}

unsigned int hedge_state(struct hedge_world *w, uint64_t move)
{
	const struct store_move *m = store_move_find(w->engine[REQUESTER], move);
	struct store_move_facts facts;

	assert_non_null(m);
	store_move_facts(m, &facts);
	return facts.poll_state;
}

static int hedge_setup_with(void **state, uint64_t memory)
{
	struct hedge_world *w = calloc(1, sizeof(*w));
	struct cluster_store_args args = {.memory_bytes = memory};
	char stores[160];

	assert_non_null(w);
	cluster_new(&w->c, 9, NODES);
	assert_true(cluster_store(&w->c, 0, &args));
	assert_true(cluster_store(&w->c, 1, &args));
	snprintf(stores, sizeof(stores), "%s %s", w->c.nodes[0].endpoint,
		 w->c.nodes[1].endpoint);
	args.stores = stores;
	assert_true(cluster_store(&w->c, REQUESTER, &args));
	for (unsigned int node = 0; node < NODES; node++)
		engine_begin(w, node);
	for (unsigned int node = 0; node < REQUESTER; node++) {
		hedge_fill(&w->cache[node]);
		hedge_put(w, node, 0, CHUNKS + 1 - node);
	}
	w->hold = hedge_hold(w, 0, CHUNKS + 1, 2000);
	*state = w;
	return 0;
}

int hedge_setup(void **state)
{
	return hedge_setup_with(state, MEMORY_BYTES);
}

int hedge_teardown(void **state)
{
	struct hedge_world *w = *state;

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

bool hedge_is_over(void *arg)
{
	struct hedge_world *w = arg;

	return hedge_state(w, w->move) == KVD_SUCCESS ||
	       hedge_state(w, w->move) == KVD_FAILED;
}

void hedge_succeeds(struct hedge_world *w)
{
	cluster_until(&w->c, hedge_is_over, w, "the fetch");
	assert_int_equal(hedge_state(w, w->move), KVD_SUCCESS);
}

/* All that the hedges took of the memory is given back, or is content. */
void hedge_nothing_is_left(struct hedge_world *w)
{
	const struct store *store = hedge_store(w);
	const struct store_space *space =
		list_first(&store->spaces, struct store_space, link);

	assert_true(list_empty(&store->hedges));
	assert_int_equal(store->moves_live, 0);
	assert_int_equal(arena_owner_pinned(space->tenant->owner), 0);
	for (uint64_t i = 0; i <= store->bucket_mask; i++) {
		struct store_part *part;

		for (struct store_chunk *k = store->buckets[i]; k; k = k->next)
			list_foreach(part, &k->parts, link)
				assert_true(part->memory == PART_READY);
	}
}
