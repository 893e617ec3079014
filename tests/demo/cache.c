/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pattern is a hash of (request, layer, key or value, token, head) that seeds
 * 32 words of a head, so a head in another's place, a shifted one and a stale one
 * of an earlier request all differ. Verifying reads the whole cache, not just the
 * request's pages: a byte that strayed anywhere is found.
 */
#include "tests/demo/cache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GUARD 0xa5
#define PAGE_BYTES                                                          \
	((size_t)PAGE_TOKENS * HEADS * HEAD_BYTES) /* of one layer's k or v \
						    */
#define BUFFER_BYTES (PAGES * PAGE_BYTES)
#define BUFFERS (2u * LAYERS)
#define WORDS (HEAD_BYTES / sizeof(uint64_t))

/* Lengths on and off page and chunk boundaries. */
struct act_row acts[] = {
	{ACT_PUSH, 1001, 1},	{ACT_PUSH, 1002, 100},	{ACT_PUSH, 1003, 512},
	{ACT_PUSH, 1004, 1300}, {ACT_PUSH, 1005, 2000}, {ACT_PULL, 2001, 77},
	{ACT_PULL, 2002, 640},	{ACT_PULL, 2003, 1999}, {ACT_ABORT, 3001, 1600},
	{ACT_KILL, 4001, 1600},
};
const size_t act_count = sizeof(acts) / sizeof(acts[0]);
uint32_t chunk_tokens = 512;

void acts_shrink(void)
{
	const char *words = getenv("KVD_DEMO_SHRINK");
	unsigned long by = words ? strtoul(words, NULL, 10) : 1;

	for (size_t i = 0; i < act_count && by > 1; i++)
		acts[i].tokens = (uint32_t)(acts[i].tokens / by + 1);
	if (by > 1)
		chunk_tokens = (uint32_t)(chunk_tokens / by + 1);
}

void die(const struct kvd_client *client, const char *what)
{
	const struct kvd_error *error = kvd_last_error(client);

	fprintf(stderr, "demo: %s: %s: %s\n", what, kvd_code_name(error->code),
		error->message);
	exit(1);
}

static const char *layout_make(struct kvd_layout *layout)
{
	struct kvd_field field = {.unit_bytes = HEAD_BYTES, .units = HEADS};
	uint32_t view = kvd_layout_view(layout, "kv", PAGE_TOKENS, PAGES);
	const char *text;

	for (uint32_t layer = 0; layer < LAYERS; layer++) {
		field.name = "k";
		field.buffer = kvd_layout_buffer(layout, BUFFER_BYTES);
		kvd_layout_heads(layout, view, layer, KVD_NHD, &field);
		field.name = "v";
		field.buffer = kvd_layout_buffer(layout, BUFFER_BYTES);
		kvd_layout_heads(layout, view, layer, KVD_NHD, &field);
	}
	if (kvd_layout_text(layout, &text))
		die(NULL, "layout");
	return text;
}

void cache_open(struct kvd_client *client, struct cache *cache)
{
	struct kvd_layout *layout = kvd_layout_new(0);
	struct kvd_region *regions[BUFFERS];
	uint64_t offsets[BUFFERS];
	struct kvd_pool_args pool = {
		.regions = regions, .offsets = offsets, .region_count = BUFFERS};

	if (!layout ||
	    kvd_memory_alloc(BUFFERS * BUFFER_BYTES, "demo-kv", &cache->memory))
		die(NULL, "cache memory");
	cache_guard(cache);
	if (kvd_region_memory(client, &cache->memory, NULL, &cache->region))
		die(client, "region.register");
	for (uint32_t i = 0; i < BUFFERS; i++) {
		regions[i] = cache->region;
		offsets[i] = i * BUFFER_BYTES;
	}
	pool.layout = layout_make(layout);
	if (kvd_pool_register(client, &pool, NULL, &cache->pool))
		die(client, "pool.register");
	kvd_layout_free(layout);
}

void request_make(struct request *request, const struct act_row *row, uint32_t salt)
{
	request->room = row->room;
	request->tokens = row->tokens;
	request->page_count = (row->tokens + PAGE_TOKENS - 1) / PAGE_TOKENS;
	/* an odd stride visits every page of a power of two once */
	for (uint32_t i = 0; i < request->page_count; i++)
		request->pages[i] =
			(i * (2 * salt + 1) + salt + (uint32_t)row->room) % PAGES;
}

struct kvd_view request_view(const struct request *request, uint32_t begin, uint32_t end)
{
	uint32_t first = begin / PAGE_TOKENS,
		 last = (end + PAGE_TOKENS - 1) / PAGE_TOKENS;

	return (struct kvd_view){
		.pages = request->pages + first,
		.page_count = last - first,
		.first_token = first * PAGE_TOKENS,
		.token_begin = begin,
		.token_end = end,
	};
}

static uint64_t mix(uint64_t x)
{
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

/* One head of one token: HEAD_BYTES of them. */
static void pattern(uint64_t room, uint32_t buffer, uint32_t token, uint32_t head,
		    uint64_t words[WORDS])
{
	uint64_t seed = mix(mix(room << 32 | buffer) + ((uint64_t)token << 8 | head));

	for (uint64_t i = 0; i < WORDS; i++)
		words[i] = seed + i * 0x9e3779b97f4a7c15u;
}

/* Where (page, token of the page, head) of a buffer lies. */
static uint64_t *head_at(const struct cache *cache, uint32_t buffer, uint32_t page,
			 uint32_t slot, uint32_t head)
{
	return (uint64_t *)(void *)((char *)cache->memory.address +
				    buffer * BUFFER_BYTES + page * PAGE_BYTES +
				    ((size_t)slot * HEADS + head) * HEAD_BYTES);
}

void cache_fill(struct cache *cache, const struct request *request, uint32_t begin,
		uint32_t end)
{
	for (uint32_t buffer = 0; buffer < BUFFERS; buffer++)
		for (uint32_t t = begin; t < end; t++)
			for (uint32_t head = 0; head < HEADS; head++)
				pattern(request->room, buffer, t, head,
					head_at(cache, buffer,
						request->pages[t / PAGE_TOKENS],
						t % PAGE_TOKENS, head));
}

static bool guarded(const uint64_t *words)
{
	for (size_t i = 0; i < WORDS; i++)
		if (words[i] != 0x0101010101010101u * GUARD)
			return false;
	return true;
}

bool cache_touched(const struct cache *cache, const struct request *request,
		   uint32_t token)
{
	for (uint32_t buffer = 0; buffer < BUFFERS; buffer++)
		if (!guarded(head_at(cache, buffer, request->pages[token / PAGE_TOKENS],
				     token % PAGE_TOKENS, 0)))
			return true;
	return false;
}

/* One page of one buffer; `index`: its place in the request, or none. */
static uint64_t page_verify(const struct cache *cache, const struct request *request,
			    uint32_t buffer, uint32_t page, int32_t index,
			    uint64_t *wrong_p)
{
	uint64_t want[WORDS], verified = 0;

	for (uint32_t slot = 0; slot < PAGE_TOKENS; slot++)
		for (uint32_t head = 0; head < HEADS; head++) {
			const uint64_t *at = head_at(cache, buffer, page, slot, head);
			uint32_t token = (uint32_t)index * PAGE_TOKENS + slot;

			if (index < 0 || token >= request->tokens) {
				*wrong_p += guarded(at) ? 0 : HEAD_BYTES;
				continue;
			}
			pattern(request->room, buffer, token, head, want);
			/* of a failed room any part may be there, or none */
			if (!memcmp(at, want, HEAD_BYTES))
				verified += HEAD_BYTES;
		}
	return verified;
}

uint64_t cache_verify(const struct cache *cache, const struct request *request,
		      uint64_t *wrong_p)
{
	int32_t index[PAGES];
	uint64_t verified = 0;

	memset(index, 0xff, sizeof(index));
	for (uint32_t i = 0; i < request->page_count; i++)
		index[request->pages[i]] = (int32_t)i;
	*wrong_p = 0;
	for (uint32_t buffer = 0; buffer < BUFFERS; buffer++)
		for (uint32_t page = 0; page < PAGES; page++)
			verified += page_verify(cache, request, buffer, page, index[page],
						wrong_p);
	return verified;
}

void cache_guard(struct cache *cache)
{
	memset(cache->memory.address, GUARD, cache->memory.bytes);
}

uint64_t cache_sum(const struct cache *cache)
{
	const uint64_t *words = cache->memory.address;
	uint64_t sum = 0;

	for (size_t i = 0; i < cache->memory.bytes / sizeof(*words); i++)
		sum = sum * 31 + words[i];
	return sum;
}
