/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A page's words are a hash of who may have written it (pattern, room, page of the
 * request, field) and their place, so a page in another's place, one of an earlier
 * room and one that is half new all differ from what is wanted.
 */
#include "tests/integration/faults/cache.h"

#include <stdio.h>
#include <stdlib.h>

#define LAYERS 2u
#define FIELDS 4u /* k and v of each layer */
#define HEADS 2u
#define HEAD_BYTES 512u
#define PAGE_BYTES (PAGE_TOKENS * HEADS * HEAD_BYTES)
#define PAGE_WORDS (PAGE_BYTES / 8u)
#define WORDS_BYTES 4096u

enum { CONTENT = 1, REUSE, CANARY };

static void die(const struct kvd_client *client, const char *what)
{
	const struct kvd_error *error = kvd_last_error(client);

	fprintf(stderr, "%s: %s: %s\n", what, kvd_code_name(error->code), error->message);
	exit(1);
}

static const char *layout_make(struct kvd_layout *layout, uint32_t pages)
{
	struct kvd_field field = {.unit_bytes = HEAD_BYTES, .units = HEADS};
	uint32_t view = kvd_layout_view(layout, "kv", PAGE_TOKENS, pages);
	const char *text;

	for (uint32_t f = 0; f < FIELDS; f++) {
		field.name = f % 2 ? "v" : "k";
		field.buffer = kvd_layout_buffer(layout, (uint64_t)pages * PAGE_BYTES);
		kvd_layout_heads(layout, view, f / 2, KVD_NHD, &field);
	}
	if (kvd_layout_text(layout, &text))
		die(NULL, "layout");
	return text;
}

static uint64_t mix(uint64_t x)
{
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

static uint64_t seed_of(unsigned int pattern, uint64_t room, uint32_t index,
			uint32_t field)
{
	return mix(mix(room << 3 | pattern) + ((uint64_t)index << 4 | field));
}

static uint64_t *page_at(const struct cache *cache, uint32_t field, uint32_t page)
{
	return (uint64_t *)(void *)((char *)cache->memory.address +
				    ((uint64_t)field * cache->pages + page) * PAGE_BYTES);
}

static void page_fill(struct cache *cache, uint32_t page, unsigned int pattern,
		      uint64_t room, uint32_t index)
{
	for (uint32_t f = 0; f < FIELDS; f++) {
		uint64_t *words = page_at(cache, f, page),
			 seed = seed_of(pattern, room, index, f);

		for (uint64_t i = 0; i < PAGE_WORDS; i++)
			words[i] = seed + i * 0x9e3779b97f4a7c15u;
	}
}

static bool page_holds(const struct cache *cache, uint32_t page, unsigned int pattern,
		       uint64_t room, uint32_t index)
{
	uint64_t differs = 0;

	for (uint32_t f = 0; f < FIELDS; f++) {
		const uint64_t *words = page_at(cache, f, page);
		uint64_t seed = seed_of(pattern, room, index, f);

		for (uint64_t i = 0; i < PAGE_WORDS; i++)
			differs |= words[i] ^ (seed + i * 0x9e3779b97f4a7c15u);
	}
	return differs == 0;
}

void cache_open(struct kvd_client *client, const char *pool, uint32_t pages,
		struct cache *cache)
{
	struct kvd_layout *layout = kvd_layout_new(0);
	uint64_t bytes = (uint64_t)FIELDS * pages * PAGE_BYTES;
	struct kvd_region *regions[FIELDS];
	uint64_t offsets[FIELDS];
	struct kvd_pool_args args = {.name = pool,
				     .regions = regions,
				     .offsets = offsets,
				     .region_count = FIELDS};

	cache->pages = pages;
	cache->owned = calloc(pages, sizeof(*cache->owned));
	if (!layout || !cache->owned ||
	    kvd_memory_alloc(bytes + WORDS_BYTES, "faults", &cache->memory))
		die(NULL, "cache memory");
	cache->words_at = bytes;
	cache->words = (uint64_t *)(void *)((char *)cache->memory.address + bytes);
	for (uint32_t page = 0; page < pages; page++)
		page_fill(cache, page, CANARY, 0, page);
	if (kvd_region_memory(client, &cache->memory, NULL, &cache->region))
		die(client, "region.register");
	for (uint32_t f = 0; f < FIELDS; f++) {
		regions[f] = cache->region;
		offsets[f] = f * (uint64_t)pages * PAGE_BYTES;
	}
	args.layout = layout_make(layout, pages);
	if (kvd_pool_register(client, &args, NULL, &cache->pool))
		die(client, "pool.register");
	kvd_layout_free(layout);
}

uint32_t cache_page(const struct cache_run *run, uint32_t index)
{
	return run->base + 2 * (run->reversed ? run->count - 1 - index : index);
}

bool cache_run_fits(const struct cache *cache, const struct cache_run *run)
{
	if (!run->count || run->base >= cache->pages ||
	    run->count > (cache->pages - run->base + 1) / 2)
		return false;
	for (uint32_t i = 0; i < run->count; i++)
		if (cache->owned[cache_page(run, i)])
			return false;
	return true;
}

void cache_content(struct cache *cache, const struct cache_run *run)
{
	for (uint32_t i = 0; i < run->count; i++) {
		cache->owned[cache_page(run, i)] = true;
		page_fill(cache, cache_page(run, i), CONTENT, run->room, i);
	}
}

void cache_reuse(struct cache *cache, const struct cache_run *run)
{
	for (uint32_t i = 0; i < run->count; i++) {
		cache->owned[cache_page(run, i)] = true;
		page_fill(cache, cache_page(run, i), REUSE, run->room, i);
	}
}

void cache_canary(struct cache *cache, const struct cache_run *run)
{
	for (uint32_t i = 0; i < run->count; i++) {
		uint32_t page = cache_page(run, i);

		page_fill(cache, page, CANARY, 0, page);
		cache->owned[page] = false;
	}
}

static uint32_t run_wrong(const struct cache *cache, const struct cache_run *run,
			  unsigned int pattern)
{
	uint32_t wrong = 0;

	for (uint32_t i = 0; i < run->count; i++)
		wrong += !page_holds(cache, cache_page(run, i), pattern, run->room, i);
	return wrong;
}

uint32_t cache_content_wrong(const struct cache *cache, const struct cache_run *run)
{
	return run_wrong(cache, run, CONTENT);
}

uint32_t cache_reuse_wrong(const struct cache *cache, const struct cache_run *run)
{
	return run_wrong(cache, run, REUSE);
}

uint32_t cache_strayed(const struct cache *cache)
{
	uint32_t strayed = 0;

	for (uint32_t page = 0; page < cache->pages; page++)
		strayed +=
			!cache->owned[page] && !page_holds(cache, page, CANARY, 0, page);
	return strayed;
}
