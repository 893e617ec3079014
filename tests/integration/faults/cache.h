/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache: an engine's KV cache as the fault matrix wants it: each page holds one
 * of three patterns, so that a byte which moved when it must not is found.
 *
 *   content   what the source fills in for (room, page of the request)
 *   reuse     what an engine writes as soon as a room has ended: its pages belong
 *             to the next request then
 *   canary    pages of no room
 *
 * A room takes every second page, so each of its pages has canaries beside it.
 */
#ifndef TEST_FAULTS_CACHE_H
#define TEST_FAULTS_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/kvd.h"

#define PAGE_TOKENS 16u

struct cache {
	struct kvd_memory memory;
	struct kvd_region *region;
	struct kvd_pool *pool;
	uint32_t pages;
	bool *owned;	 /* of a room; the others are canaries */
	uint64_t *words; /* for kvd_wait, behind the pages */
	uint64_t words_at;
};

/* Memory, region and a pool of that name; exits with words on failure. */
void cache_open(struct kvd_client *client, const char *pool, uint32_t pages,
		struct cache *cache);

/* `room` pages: base, base + 2, …; a destination takes them from the far end. */
struct cache_run {
	uint64_t room;
	uint32_t base, count;
	bool reversed;
};
uint32_t cache_page(const struct cache_run *run, uint32_t index);
bool cache_run_fits(const struct cache *cache, const struct cache_run *run);

void cache_content(struct cache *cache, const struct cache_run *run);
void cache_reuse(struct cache *cache, const struct cache_run *run);
void cache_canary(struct cache *cache, const struct cache_run *run);
/* How many pages of the run do not hold that pattern. */
uint32_t cache_content_wrong(const struct cache *cache, const struct cache_run *run);
uint32_t cache_reuse_wrong(const struct cache *cache, const struct cache_run *run);
/* How many pages of no room were touched. */
uint32_t cache_strayed(const struct cache *cache);

#endif
