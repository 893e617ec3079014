/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks of a cache on a GPU: put into the daemon's memory, found, and fetched into other
 * pages, of a GPU or of the host.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "lib/kvd_attend.h"
#include "tests/gpu/works/works.h"

#define PAGE_TOKENS 16u
#define CHUNK_PAGES 4u
#define HEADS 8u
#define HEAD_BYTES 256u
/* of a page and layer */
#define FIELD_BYTES ((uint64_t)PAGE_TOKENS * HEADS * HEAD_BYTES)
#define TIMES 7u

static uint32_t layers(void)
{
	return cuda.fake ? 2 : 32;
}

static uint32_t chunk_count(void)
{
	return cuda.fake ? 8 : 64;
}

static uint32_t page_count(void)
{
	return chunk_count() * CHUNK_PAGES;
}

static uint64_t cache_bytes(void)
{
	return FIELD_BYTES * 2 * layers() * page_count();
}

/* ---- an engine's cache, and the space of its chunks ---- */

struct cache {
	struct engine engine;
	struct kvd_space *space;
	uint32_t *pages;
};

/* Layer by layer, K and V, as engines have them. */
static void cache_pool(struct engine *e)
{
	struct kvd_layout *layout = need(kvd_layout_new(0));
	struct kvd_pool_args args = {.regions = &e->region, .region_count = 1};
	uint32_t buffer = kvd_layout_buffer(layout, e->bytes);
	uint32_t view = kvd_layout_view(layout, "kv", PAGE_TOKENS, page_count());
	uint64_t offset = 0;

	for (uint32_t i = 0; i < 2 * layers(); i++) {
		const struct kvd_field field = {.name = i % 2 ? "v" : "k",
						.buffer = buffer,
						.offset = offset,
						.unit_bytes = HEAD_BYTES,
						.units = HEADS};

		kvd_layout_heads(layout, view, i / 2, KVD_NHD, &field);
		offset += FIELD_BYTES * page_count();
	}
	well(NULL, kvd_layout_text(layout, &args.layout), "the layout");
	well(e->client, kvd_pool_register(e->client, &args, NULL, &e->pool),
	     "pool.register");
	kvd_layout_free(layout);
}

static void cache_open(struct cache *cache, const struct rig *rig, enum where where)
{
	struct kvd_space_args args = {.model = "works",
				      .scheme = "numbers",
				      .tokens = PAGE_TOKENS * CHUNK_PAGES};
	double until = clock_s() + 30;
	int r;

	engine_open(&cache->engine, rig, 0, where, cache_bytes());
	cache_pool(&cache->engine);
	args.pool = cache->engine.pool;
	do { /* the daemon's memory is being made */
		r = kvd_space_open(cache->engine.client, &args, NULL, &cache->space);
	} while (r == -KVD_E_BUSY && clock_s() < until);
	well(cache->engine.client, r, "space.open");
	cache->pages = need(calloc(page_count(), sizeof(*cache->pages)));
}

static void cache_close(struct cache *cache)
{
	well(cache->engine.client, kvd_space_close(cache->space, NULL), "space.close");
	engine_close(&cache->engine);
	free(cache->pages);
}

static void pages_turn(struct cache *cache, uint32_t by)
{
	for (uint32_t i = 0; i < page_count(); i++)
		cache->pages[i] = (i * 5 + by) % page_count();
}

/* ---- moves ---- */

struct ids {
	uint8_t bytes[64 * KVD_CHUNK_ID_BYTES];
	struct kvd_chunks chunks;
};

static void ids_make(struct ids *ids, uint8_t series)
{
	memset(ids->bytes, series, sizeof(ids->bytes));
	for (uint32_t i = 0; i < chunk_count(); i++)
		memcpy(&ids->bytes[i * KVD_CHUNK_ID_BYTES], &i, sizeof(i));
	ids->chunks = (struct kvd_chunks){.ids = ids->bytes, .count = chunk_count()};
}

/* Seconds that it took until the poller saw its success. */
static double works_move_wait(const struct cache *cache, struct kvd_move *move,
			      double begin)
{
	const struct timespec pause = {.tv_nsec = 5000};
	struct kvd_move_facts facts;
	double seconds;
	int state;

	while ((state = kvd_move_state(move)) != KVD_SUCCESS) {
		if (state < 0 || state == KVD_FAILED || clock_s() > begin + 30) {
			(void)kvd_move_show(move, 1000, &facts);
			die("a move: state %d, %s", state, facts.error.message);
		}
		nanosleep(&pause, NULL);
	}
	seconds = clock_s() - begin;
	well(cache->engine.client, kvd_move_show(move, 5000, &facts), "chunk.show");
	if (facts.done != chunk_count() || facts.left_out)
		die("%ju chunks are done, %ju left out", (uintmax_t)facts.done,
		    (uintmax_t)facts.left_out);
	return seconds;
}

static double works_move_end(const struct cache *cache, struct kvd_move *move,
			     double begin)
{
	double seconds = works_move_wait(cache, move, begin);

	well(cache->engine.client, kvd_move_close(move, NULL), "move.close");
	return seconds;
}

static struct kvd_move_args args_of(const struct cache *cache, struct kvd_view *view)
{
	*view = (struct kvd_view){.pages = cache->pages, .page_count = page_count()};
	return (struct kvd_move_args){
		.pool = cache->engine.pool, .views = view, .view_count = 1};
}

static double cache_put(const struct cache *cache, const struct ids *ids)
{
	struct kvd_view view;
	struct kvd_move_args args = args_of(cache, &view);
	struct kvd_move *move = NULL;
	double begin = clock_s();

	well(cache->engine.client,
	     kvd_put(cache->space, &ids->chunks, &args, NULL, &move), "chunk.put");
	return works_move_end(cache, move, begin);
}

static double cache_fetch(const struct cache *cache, const struct ids *ids)
{
	struct kvd_view view;
	struct kvd_move_args args = args_of(cache, &view);
	struct kvd_hold *hold = NULL;
	struct kvd_move *move = NULL;
	double begin = clock_s(), seconds;

	well(cache->engine.client,
	     kvd_hold_open(cache->space, &ids->chunks, 0, 0, 0, &hold), "chunk.hold");
	well(cache->engine.client, kvd_fetch(hold, &args, NULL, &move), "chunk.fetch");
	seconds = works_move_end(cache, move, begin);
	well(cache->engine.client, kvd_hold_close(hold, NULL), "hold.close");
	return seconds;
}

/* A fetch of keys for `delta` positions later. */
static void cache_splice(const struct cache *cache, const struct ids *ids, int32_t delta)
{
	double inv_freq[HEAD_BYTES / 4];
	struct kvd_view view;
	struct kvd_move_args args = args_of(cache, &view);
	const struct kvd_splice splice = {
		.pool = args.pool,
		.views = &view,
		.view_count = 1,
		.key = "k",
		.type = KVD_BF16,
		.rope = {0, HEAD_BYTES / 2, KVD_HALVES, inv_freq},
		.delta = delta};
	struct kvd_hold *hold = NULL;
	struct kvd_move *move = NULL;
	int r;

	for (unsigned int i = 0; i < HEAD_BYTES / 4; i++)
		inv_freq[i] = 1.0 / (1 + i * i);
	well(cache->engine.client,
	     kvd_hold_open(cache->space, &ids->chunks, 0, 0, 0, &hold), "chunk.hold");
	well(cache->engine.client, kvd_fetch(hold, &args, NULL, &move), "chunk.fetch");
	(void)works_move_wait(cache, move, clock_s());
	r = kvd_move_splice(move, &splice);
	if (r == -KVD_E_REQUIRE)
		skip("%s", kvd_last_error(cache->engine.client)->message);
	well(cache->engine.client, r, "splice");
	well(cache->engine.client, kvd_move_close(move, NULL), "move.close");
	well(cache->engine.client, kvd_hold_close(hold, NULL), "hold.close");
}

/* What `from` had in its pages is in those of `to`. */
static void cache_check(const uint8_t *had, const struct cache *from, struct cache *to)
{
	uint8_t *has = need(malloc(cache_bytes()));

	engine_get(&to->engine, 0, has, cache_bytes());
	for (uint64_t f = 0; f < 2 * (uint64_t)layers(); f++) {
		for (uint32_t i = 0; i < page_count(); i++) {
			uint64_t a = (f * page_count() + from->pages[i]) * FIELD_BYTES;
			uint64_t b = (f * page_count() + to->pages[i]) * FIELD_BYTES;

			if (memcmp(had + a, has + b, FIELD_BYTES) != 0)
				die("page %u of layer %ju differs", i,
				    (uintmax_t)(f / 2));
		}
	}
	free(has);
}

/* ---- test and bench ---- */

static void store_start(struct rig *rig)
{
	static char more[64];

	snprintf(more, sizeof(more), "[chunks]\nchunk_memory = %s\n",
		 cuda.fake ? "128 MiB" : "1536 MiB");
	*rig = (struct rig){.more = more};
	rig_start(rig, 1, "local shm");
}

void chunks_test(void)
{
	uint8_t *had = need(malloc(cache_bytes()));
	struct cache gpu, host;
	struct rig rig;
	struct ids ids;

	store_start(&rig);
	cache_open(&gpu, &rig, AT_GPU);
	cache_open(&host, &rig, AT_HOST);
	ids_make(&ids, 1);
	pages_turn(&gpu, 3);
	pages_turn(&host, 0);
	engine_pattern(&gpu.engine, 42);
	engine_get(&gpu.engine, 0, had, cache_bytes());
	(void)cache_put(&gpu, &ids);
	engine_fill(&gpu.engine, 0xee);
	(void)cache_fetch(&host, &ids);
	cache_check(had, &gpu, &host);
	engine_get(&host.engine, 0, had, cache_bytes());
	pages_turn(&gpu, 7);
	(void)cache_fetch(&gpu, &ids);
	cache_check(had, &host, &gpu);
	cache_close(&gpu);
	cache_close(&host);
	rig_stop(&rig);
	free(had);
}

/* Finite numbers of bf16: what a NaN becomes is each processor's own. */
static void cache_numbers(struct cache *cache)
{
	uint16_t *all = need(malloc(cache_bytes()));

	engine_pattern(&cache->engine, 43);
	engine_get(&cache->engine, 0, all, cache_bytes());
	for (uint64_t i = 0; i < cache_bytes() / sizeof(*all); i++)
		all[i] &= 0xbfff;
	engine_put(&cache->engine, 0, all, cache_bytes());
	free(all);
}

/* By the GPU in its memory, by the CPU in the host's. */
void splice_test(void)
{
	uint8_t *had = need(malloc(cache_bytes())), *has = need(malloc(cache_bytes()));
	struct cache gpu, host;
	struct rig rig;
	struct ids ids;

	store_start(&rig);
	cache_open(&gpu, &rig, AT_GPU);
	cache_open(&host, &rig, AT_HOST);
	ids_make(&ids, 1);
	pages_turn(&gpu, 3);
	pages_turn(&host, 0);
	cache_numbers(&gpu);
	(void)cache_put(&gpu, &ids);
	pages_turn(&gpu, 7);
	(void)cache_fetch(&host, &ids);
	engine_get(&host.engine, 0, had, cache_bytes());
	cache_splice(&host, &ids, 4321);
	engine_get(&host.engine, 0, has, cache_bytes());
	if (memcmp(had, has, cache_bytes()) == 0)
		die("the keys are the old ones");
	cache_splice(&gpu, &ids, 4321);
	cache_check(has, &host, &gpu);
	cache_close(&gpu);
	cache_close(&host);
	rig_stop(&rig);
	free(had);
	free(has);
}

/* Where a token of the prompt is: in all its layers, K and V, FIELD_BYTES * page_count()
 * apart. */
static uint64_t token_place(const struct cache *cache, uint32_t token)
{
	return cache->pages[token / PAGE_TOKENS] * FIELD_BYTES +
	       token % PAGE_TOKENS * HEADS * HEAD_BYTES;
}

/* Every third token of layers from 1 on, into the first places of the GPU's pages. */
void gather_test(void)
{
	const uint32_t count = page_count() * PAGE_TOKENS / 3;
	const struct kvd_call post = {.post = true};
	uint8_t *had = need(malloc(cache_bytes())), *has = need(malloc(cache_bytes()));
	uint32_t *select = need(calloc(count, sizeof(*select)));
	struct kvd_hold *hold = NULL;
	struct kvd_move *move = NULL;
	struct kvd_move_args args;
	struct cache gpu, host;
	struct kvd_view view;
	struct rig rig;
	struct ids ids;

	store_start(&rig);
	cache_open(&gpu, &rig, AT_GPU);
	cache_open(&host, &rig, AT_HOST);
	ids_make(&ids, 1);
	pages_turn(&host, 3);
	pages_turn(&gpu, 7);
	engine_pattern(&host.engine, 44);
	engine_get(&host.engine, 0, had, cache_bytes());
	(void)cache_put(&host, &ids);
	engine_fill(&gpu.engine, 0xee);
	for (uint32_t i = 0; i < count; i++)
		select[i] = 3 * i;
	args = args_of(&gpu, &view);
	view.layer_begin = 1;
	view.layer_end = layers();
	view.select = select;
	view.select_count = count;
	well(gpu.engine.client, kvd_hold_open(gpu.space, &ids.chunks, 0, 0, 0, &hold),
	     "chunk.hold");
	if (kvd_fetch(hold, &args, NULL, &move) != -KVD_E_INVAL)
		die("a selection needs call.post");
	well(gpu.engine.client, kvd_fetch(hold, &args, &post, &move), "chunk.fetch");
	(void)works_move_end(&gpu, move, clock_s());
	well(gpu.engine.client, kvd_hold_close(hold, NULL), "hold.close");
	engine_get(&gpu.engine, 0, has, cache_bytes());
	for (uint64_t f = 0; f < 2 * (uint64_t)layers(); f++) {
		for (uint32_t i = 0; i < page_count() * PAGE_TOKENS; i++) {
			const uint8_t *got = has + f * FIELD_BYTES * page_count() +
					     token_place(&gpu, i);
			bool there = f >= 2 && i < count;

			if (there ? memcmp(got,
					   had + f * FIELD_BYTES * page_count() +
						   token_place(&host, 3 * i),
					   HEADS * HEAD_BYTES) != 0
				  : got[0] != 0xee)
				die("place %u of layer %ju is wrong", i,
				    (uintmax_t)(f / 2));
		}
	}
	cache_close(&gpu);
	cache_close(&host);
	rig_stop(&rig);
	free(select);
	free(had);
	free(has);
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static void line(const char *what, double s[TIMES], double limit)
{
	qsort(s, TIMES, sizeof(*s), by_value);
	printf("  %-8s %u chunks of %ju KiB %9.3f ms %8.2f GB/s   %.2f of a pinned "
	       "copy\n",
	       what, chunk_count(), (uintmax_t)(cache_bytes() / chunk_count() / KIB),
	       s[TIMES / 2] * 1e3, (double)cache_bytes() / s[TIMES / 2] * 1e-9,
	       limit / s[TIMES / 2]);
}

void chunks_bench(void)
{
	uint8_t *had = need(malloc(cache_bytes()));
	double puts[TIMES], fetches[TIMES];
	struct cache gpu, from;
	struct rig rig;
	struct ids ids;

	store_start(&rig);
	cache_open(&gpu, &rig, AT_GPU);
	from = gpu;
	from.pages = need(calloc(page_count(), sizeof(*from.pages)));
	pages_turn(&from, 3);
	for (unsigned int i = 0; i < TIMES + 2; i++) { /* two: memory is pinned */
		unsigned int at = i % TIMES;

		ids_make(&ids, (uint8_t)(i + 1));
		pages_turn(&gpu, 3);
		engine_pattern(&gpu.engine, i);
		engine_get(&gpu.engine, 0, had, cache_bytes());
		puts[at] = cache_put(&gpu, &ids);
		engine_fill(&gpu.engine, 0xee);
		pages_turn(&gpu, i);
		fetches[at] = cache_fetch(&gpu, &ids);
		cache_check(had, &from, &gpu);
	}
	line("put", puts, plain_pinned(cache_bytes(), false));
	line("fetch", fetches, plain_pinned(cache_bytes(), true));
	cache_close(&gpu);
	free(from.pages);
	rig_stop(&rig);
	free(had);
}
