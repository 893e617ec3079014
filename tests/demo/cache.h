/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache: the demo engines' KV cache, shaped like Llama-3-8B's, and the pattern
 * that stands for its contents.
 *
 * 32 layers, 8 KV heads of 128 bf16 values, pages of 16 tokens; keys and values
 * of each layer are an array of pages of their own, as SGLang keeps them. Every
 * byte of a token depends on (request, layer, key or value, token, head, byte),
 * so a byte in a wrong place is a wrong byte. All else holds the guard value.
 */
#ifndef KVD_TESTS_DEMO_CACHE_H
#define KVD_TESTS_DEMO_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/kvd.h"

#define LAYERS 32u
#define HEADS 8u
#define HEAD_BYTES 256u /* 128 x bf16 */
#define PAGE_TOKENS 16u
#define PAGES 128u
#define TOKEN_BYTES (2u * LAYERS * HEADS * HEAD_BYTES) /* of all layers: 128 KiB */

struct cache {
	struct kvd_memory memory;
	struct kvd_region *region;
	struct kvd_pool *pool;
};

/* The pages of one request, in token order. */
struct request {
	uint64_t room;
	uint32_t tokens;
	uint32_t page_count;
	uint32_t pages[PAGES];
};

/* What the two engines hand over; both walk the same list. */
enum act { ACT_PUSH, ACT_PULL, ACT_ABORT, ACT_KILL };
struct act_row {
	enum act act;
	uint64_t room;
	uint32_t tokens;
};
extern struct act_row acts[];
extern uint32_t chunk_tokens;
/* By $KVD_DEMO_SHRINK, where bytes are slow: both engines must have the same. */
void acts_shrink(void);
extern const size_t act_count;

/* Any failure ends the program with its words: a demo has nothing to save. */
void cache_open(struct kvd_client *client, struct cache *cache);
void die(const struct kvd_client *client, const char *what) __attribute__((noreturn));

/* Pages scattered over the pool: the salt makes the two sides' lists differ. */
void request_make(struct request *request, const struct act_row *row, uint32_t salt);
/* The pages and tokens [begin, end) of a request as a view of the pool. */
struct kvd_view request_view(const struct request *request, uint32_t begin, uint32_t end);

void cache_fill(struct cache *cache, const struct request *request, uint32_t begin,
		uint32_t end);
/* Count bytes that are the request's pattern at their place; *wrong_p: bytes
 * outside the request's tokens that are not the guard value any more. */
uint64_t cache_verify(const struct cache *cache, const struct request *request,
		      uint64_t *wrong_p);
/* All of the cache is the guard value. */
void cache_guard(struct cache *cache);
/* Has any head of this token, in any layer, changed from the guard value? */
bool cache_touched(const struct cache *cache, const struct request *request,
		   uint32_t token);
/* A sum over every byte: equal sums, equal caches. */
uint64_t cache_sum(const struct cache *cache);

#endif
