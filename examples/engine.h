/* SPDX-License-Identifier: Apache-2.0 */
/* What the examples share: an engine with one pool of 64 pages of 16 tokens. */
#ifndef KVD_EXAMPLES_ENGINE_H
#define KVD_EXAMPLES_ENGINE_H

#include <kvd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGES = 64, TOKENS = 16, HEADS = 8, HEAD_BYTES = 256 };
enum { PAGE_BYTES = TOKENS * HEADS * HEAD_BYTES };

struct engine {
	struct kvd_client *client;
	struct kvd_memory memory;
	struct kvd_region *region;
	struct kvd_pool *pool;
};

/* End with the last call's error. */
static inline void die(const struct kvd_client *client, const char *what)
{
	const struct kvd_error *e = kvd_last_error(client);

	fprintf(stderr, "%s: %s: %s\n", what, kvd_code_name(e->code), e->message);
	exit(1);
}

static inline uint8_t *engine_page(const struct engine *engine, uint32_t page)
{
	return (uint8_t *)engine->memory.address + (size_t)page * PAGE_BYTES;
}

/* Once, at start. `socket` NULL: of the environment. */
static inline void engine_open(struct engine *engine, const char *socket)
{
	struct kvd_options options = {.socket = socket};
	struct kvd_field kv = {.name = "kv", .unit_bytes = HEAD_BYTES, .units = HEADS};
	struct kvd_layout *layout = kvd_layout_new(0);
	struct kvd_pool_args pool = {.regions = &engine->region, .region_count = 1};

	if (kvd_open(&options, &engine->client) ||
	    kvd_memory_alloc((size_t)PAGES * PAGE_BYTES, "kv-cache", &engine->memory))
		die(NULL, "start");
	kv.buffer = kvd_layout_buffer(layout, engine->memory.bytes);
	kvd_layout_heads(layout, kvd_layout_view(layout, "kv", TOKENS, PAGES), 0, KVD_NHD,
			 &kv);
	if (kvd_layout_text(layout, &pool.layout))
		die(NULL, "layout");
	if (kvd_region_memory(engine->client, &engine->memory, NULL, &engine->region) ||
	    kvd_pool_register(engine->client, &pool, NULL, &engine->pool))
		die(engine->client, "register");
	kvd_layout_free(layout);
}

static inline void engine_close(struct engine *engine)
{
	kvd_close(engine->client); /* rooms, pool and region go with the session */
	kvd_memory_free(&engine->memory);
}

#endif
