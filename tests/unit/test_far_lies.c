/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A hold whose chunks are at another daemon, which tells what no honest one does, or
 * nothing. Node 0 asks, node 1 is that daemon, whose replies are the test's own.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/hex.h"
#include "daemon/store/far.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/cluster_store.h"

#define TOKENS 16u
#define MEMORY_BYTES (UINT64_C(4) << 20)
#define OWN 240u
#define RANKS 12u /* kinds of parts beside the whole one: of some layers each */

struct world {
	struct cluster c;
	struct session *engine;
	struct cache cache;
	struct store_handle *handle;
};

/* What it says to each CHUNK_LOOKUP. */
static void (*liar)(struct remote *remote, const struct wire_chunk_lookup *msg);
static struct kvd *liar_kvd;
static int (*true_message)(void *owner, struct remote *remote,
			   const struct wire_header *h, struct cursor *body);

static int on_message(void *owner, struct remote *remote, const struct wire_header *h,
		      struct cursor *body)
{
	struct wire_chunk_lookup ask;

	if (remote->kvd->handshake != liar_kvd->handshake ||
	    h->type != WIRE_T_CHUNK_LOOKUP)
		return true_message(owner, remote, h, body);
	assert_int_equal(wire_chunk_lookup_get(body, &ask), 0);
	liar(remote, &ask);
	return 0;
}

static void wrap(struct kvd *kvd, struct handshake_events *events)
{
	liar_kvd = kvd; /* the last one: node 1 */
	true_message = events->on_message;
	events->on_message = on_message;
}

static struct store *node_store(struct world *w)
{
	return store_of(&w->c.nodes[0].kvd);
}

static int setup(void **state)
{
	struct world *w = calloc(1, sizeof(*w));
	struct cluster_store_args args = {.memory_bytes = MEMORY_BYTES};

	assert_non_null(w);
	cluster_wrap_events(wrap);
	cluster_new(&w->c, 5, 2);
	args.stores = w->c.nodes[1].endpoint;
	assert_true(cluster_store(&w->c, 0, &args));
	w->engine = cluster_engine(&w->c, 0, "e");
	w->cache = cluster_geometry;
	cluster_cache(&w->c, w->engine, "kv", 0, &w->cache);
	w->handle = store_handle_find(
		w->engine, cluster_space(&w->c, w->engine, w->cache.pool, TOKENS));
	cluster_run(&w->c, LOOP_NS_PER_S);
	*state = w;
	return 0;
}

static int teardown(void **state)
{
	struct world *w = *state;

	cache_close(&w->cache);
	cluster_free(&w->c);
	cluster_wrap_events(NULL);
	free(w);
	return 0;
}

static void id_of(uint32_t n, uint8_t id[STORE_ID_BYTES])
{
	memset(id, 0, STORE_ID_BYTES);
	memcpy(id, &n, sizeof(n));
}

/* ---- its replies ---- */

static struct {
	uint64_t pools[STORE_CLASSES_MAX];
	uint32_t pool_count, runs, chunks; /* of a run */
	uint64_t (*mask)(uint32_t run);
	unsigned int renewals, asks, replies; /* replies 0: to all */
	uint32_t missing;		      /* tokens of the last chunk */
	uint64_t first[16];		      /* of the asks */
} lie;

static void tell(struct remote *remote, const struct wire_chunk_lookup *asked)
{
	static uint8_t bytes[STORE_IDS_MAX * 12 + 1024];
	struct wire_chunk_lookup_ack msg = {
		.ask = asked->ask,
		.tokens = (uint64_t)lie.runs * lie.chunks * TOKENS - lie.missing};
	struct cursor out;

	if (!asked->ids.len) {
		lie.renewals++;
		return;
	}
	lie.first[lie.asks % ARRAY_LEN(lie.first)] = asked->first;
	lie.asks++;
	if (lie.replies && lie.asks > lie.replies)
		return;
	cursor_write(&out, bytes, sizeof(bytes));
	cursor_put_u32(&out, lie.pool_count);
	for (uint32_t i = 0; i < lie.pool_count; i++)
		cursor_put_u64(&out, lie.pools[i]);
	cursor_put_u32(&out, lie.runs);
	for (uint32_t i = 0; i < lie.runs; i++) {
		cursor_put_u32(&out, lie.chunks);
		cursor_put_u64(&out, lie.mask(i));
	}
	msg.runs.data = bytes;
	msg.runs.len = out.pos;
	assert_int_equal(handshake_send_chunk_lookup_ack(remote, &msg), 0);
}

static void on_far_found(void *arg, struct store_hold *hold, const struct err *why)
{
	assert_non_null(hold);
	assert_null(why);
	*(uint32_t *)arg = hold->away;
}

/* Within a second *found_p of `count` chunks come to the hold from the holder. */
static void far_open(struct world *w, uint32_t count, struct store_hold **hold_p,
		     uint32_t *found_p)
{
	static uint8_t ids[STORE_IDS_MAX * STORE_ID_BYTES];
	const struct store_ids asked = {.bytes = ids, .count = count, .first = 0};
	const struct store_hold_args args = {.lease_ns = 100 * LOOP_NS_PER_S,
					     .far_ns = LOOP_NS_PER_S,
					     .on_done = on_far_found,
					     .arg = found_p};

	for (uint32_t n = 0; n < count; n++)
		id_of(5000 + n, ids + (size_t)n * STORE_ID_BYTES);
	*found_p = UINT32_MAX;
	assert_int_equal(store_hold_open(w->handle, &asked, &args, hold_p), 1);
}

static uint32_t far_chunks(struct world *w, uint32_t count, struct store_hold **hold_p)
{
	uint32_t found;

	far_open(w, count, hold_p, &found);
	cluster_run(&w->c, 2 * LOOP_NS_PER_S);
	assert_int_not_equal(found, UINT32_MAX);
	return found;
}

/* The peer's pools: each has half of the heads, of which none serves alone. */
static void peer_pools(struct world *w, struct cache *caches)
{
	struct session *engine = cluster_engine(&w->c, 1, "remote");

	for (unsigned int i = 0; i < RANKS; i++) {
		char name[16];

		snprintf(name, sizeof(name), "r%u", i);
		caches[i] = cluster_geometry;
		caches[i].units = 2;
		caches[i].first_unit = i % 2 * 2;
		cluster_cache(&w->c, engine, name, i, &caches[i]);
		lie.pools[i] = caches[i].pool;
	}
	lie.pool_count = RANKS;
	cluster_run(&w->c, LOOP_NS_PER_S);
}

/* Never the same, and none of the even ones: half of the heads are nowhere. */
static uint64_t mask_of_half(uint32_t run)
{
	uint64_t mask = 0;

	for (unsigned int i = 0; i < RANKS / 2; i++)
		mask |= (uint64_t)((run + 1) >> i & 1) << (2 * i + 1);
	return mask;
}

static uint64_t mask_of_two(uint32_t run)
{
	return 3 | (uint64_t)(run % 1000) << 2;
}

/* A lower half and an upper one, each pair once: none of them tells of another. */
static uint64_t mask_of_pairs(uint32_t run)
{
	const uint32_t each = RANKS / 2;

	return UINT64_C(1) << run % each * 2 | UINT64_C(2) << run / each % each * 2;
}

static uint64_t mask_of_one_rank(uint32_t run)
{
	(void)run;
	return 3;
}

static uint64_t mask_of_none_told(uint32_t run)
{
	return UINT64_C(3) << (run % 2 ? RANKS : 0);
}

static void holder_with_many_masks_needs_few_covers(void **state)
{
	struct world *w = *state;
	struct store *store = node_store(w);
	struct cache caches[RANKS];
	struct store_hold *hold, *joined;
	const struct store_hold_args args = {.lease_ns = LOOP_NS_PER_S};
	uint64_t before;

	peer_pools(w, caches);
	liar = tell;
	lie.runs = RANKS / 2 * RANKS / 2;
	lie.chunks = 1;
	lie.mask = mask_of_pairs;
	before = store->covers;
	assert_int_equal(far_chunks(w, lie.runs, &hold), STORE_COVERS_NEW);
	assert_int_equal(store->covers - before, STORE_COVERS_NEW);
	store_hold_close(hold);
	lie.runs = 60;
	lie.mask = mask_of_half;
	before = store->covers;
	assert_int_equal(far_chunks(w, 60, &hold), 0);
	assert_int_equal(store->covers - before, 1); /* the first that fails ends it */
	store_hold_close(hold);
	lie.runs = 1000;
	lie.mask = mask_of_two;
	before = store->covers;
	assert_int_equal(far_chunks(w, 1000, &hold), 1000);
	assert_int_equal(store->covers - before, 1); /* two that serve serve all */
	for (uint32_t i = 0; i < 1000; i++)
		assert_int_equal(far_hold_sources(hold->far, i), 3);
	assert_int_equal(far_hold_sources(hold->far, 1000), 0);
	assert_int_equal(store_hold_join(w->handle, hold->secret, &args, &joined), 0);
	assert_int_equal(store->covers - before, 2);
	store_hold_close(joined);
	store_hold_close(hold);
	for (unsigned int i = 0; i < RANKS; i++)
		cache_close(&caches[i]);
}

/* Two chunks of one rank for each query. */
static void liar_tells_two(struct world *w, struct cache caches[RANKS])
{
	peer_pools(w, caches);
	liar = tell;
	lie.chunks = 2;
	lie.runs = 1;
	lie.mask = mask_of_one_rank;
}

static void holder_with_impossible_reply_is_a_miss(void **state)
{
	struct world *w = *state;
	struct cache caches[RANKS];
	struct store_hold *hold;

	liar_tells_two(w, caches);
	assert_int_equal(far_chunks(w, 2, &hold), 2);
	assert_int_equal(far_hold_sources(hold->far, 1), 3);
	store_hold_close(hold);
	lie.runs = 2; /* which an honest one tells as one */
	assert_int_equal(far_chunks(w, 4, &hold), 0);
	store_hold_close(hold);
	lie.mask = mask_of_none_told;
	assert_int_equal(far_chunks(w, 4, &hold), 0);
	store_hold_close(hold);
	for (unsigned int i = 0; i < RANKS; i++)
		cache_close(&caches[i]);
}

static void holder_with_a_piece_for_each_query_has_eight(void **state)
{
	struct world *w = *state;
	struct cache caches[RANKS];
	struct store_hold *hold;

	liar_tells_two(w, caches);
	lie.asks = 0;
	assert_int_equal(far_chunks(w, 100, &hold), 16);
	assert_int_equal(lie.asks, 8);
	for (uint32_t i = 0; i < 16; i++) {
		struct far_hold *far = far_hold_at(hold->far, i);

		assert_int_equal(far_hold_first(far), i / 2 * 2);
		assert_int_equal(far_hold_sources(far, i), 3);
		assert_int_equal(far_hold_sources(far, i ^ 2), 0);
		assert_int_equal(lie.first[i / 2], i / 2 * 2);
	}
	assert_null(far_hold_at(hold->far, 16));
	store_hold_close(hold);
	lie.asks = 0;
	assert_int_equal(far_chunks(w, 5, &hold), 4); /* two of one are too many */
	assert_int_equal(lie.asks, 3);
	store_hold_close(hold);
	lie.missing = 1;
	lie.asks = 0;
	assert_int_equal(far_chunks(w, 100, &hold), 2); /* nothing follows a short one */
	assert_int_equal(hold->tokens, 2 * TOKENS - 1);
	assert_int_equal(lie.asks, 1);
	store_hold_close(hold);
	lie.missing = 0;
	for (unsigned int i = 0; i < RANKS; i++)
		cache_close(&caches[i]);
}

/* Chunk number 2 of the prompt is here: behind a short one of the holder nothing follows.
 */
static void nothing_of_its_own_follows_a_short_piece(void **state)
{
	struct world *w = *state;
	struct cache caches[RANKS];
	struct store_hold *hold;
	uint8_t id[STORE_ID_BYTES];
	char hex[2 * STORE_ID_BYTES + 1];

	liar_tells_two(w, caches);
	id_of(5002, id);
	hex_write(id, sizeof(id), hex);
	hex[2 * sizeof(id)] = 0;
	cluster_ok(&w->c, w->engine,
		   "{'cmd':'chunk.put','space':%llu,'ids':['%s'],'pool':%llu,"
		   "'first':2,'views':{'kv':{'pages':[0,1,2,3],'first_token':%u,"
		   "'tokens':[%u,%u]}}}",
		   (unsigned long long)cluster_space(&w->c, w->engine, w->cache.pool,
						     TOKENS),
		   hex, (unsigned long long)w->cache.pool, 2 * TOKENS, 2 * TOKENS,
		   3 * TOKENS);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(far_chunks(w, 3, &hold), 2);
	assert_int_equal(hold->count, 3);
	store_hold_close(hold);
	lie.missing = 1;
	assert_int_equal(far_chunks(w, 3, &hold), 2);
	assert_int_equal(hold->count, 2);
	assert_int_equal(hold->tokens, 2 * TOKENS - 1);
	store_hold_close(hold);
	lie.missing = 0;
	for (unsigned int i = 0; i < RANKS; i++)
		cache_close(&caches[i]);
}

/* It has the pieces that were found, and may be closed meanwhile. */
static void query_for_a_later_piece_without_reply_is_a_miss(void **state)
{
	struct world *w = *state;
	struct cache caches[RANKS];
	struct store_hold *hold;

	liar_tells_two(w, caches);
	lie.replies = 2;
	lie.asks = 0;
	assert_int_equal(far_chunks(w, 100, &hold), 4);
	assert_int_equal(lie.asks, 3);
	assert_int_equal(node_store(w)->figures.remote.found, 4);
	store_hold_close(hold);
	lie.replies = 0;
	for (unsigned int i = 0; i < RANKS; i++)
		cache_close(&caches[i]);
}

static struct {
	struct remote *remote;
	struct wire_chunk_lookup ask;
} kept;

static void tell_later(struct remote *remote, const struct wire_chunk_lookup *asked)
{
	kept.remote = remote;
	kept.ask = *asked;
}

static void queries_for_all_pieces_take_the_time_of_one(void **state)
{
	struct world *w = *state;
	struct cache caches[RANKS];
	struct store_hold *hold;
	uint32_t found;

	peer_pools(w, caches);
	liar = tell_later;
	lie.chunks = 2;
	lie.runs = 1;
	lie.mask = mask_of_one_rank;
	far_open(w, 100, &hold, &found);
	cluster_run(&w->c, 7 * LOOP_NS_PER_S / 10);
	tell(kept.remote, &kept.ask);
	cluster_run(&w->c, LOOP_NS_PER_S / 10);
	assert_int_equal(kept.ask.first, 2);
	assert_int_equal(found, UINT32_MAX);
	cluster_run(&w->c, 3 * LOOP_NS_PER_S / 10);
	assert_int_equal(found, 2);
	store_hold_close(hold);
	for (unsigned int i = 0; i < RANKS; i++)
		cache_close(&caches[i]);
}

/* Own chunks behind a piece of another daemon's count like those before it. */
static void later_piece_ends_at_half_of_a_user_s_share(void **state)
{
	struct world *w = *state;
	const struct arena_owner *owner = w->handle->space->tenant->owner;
	struct store_class *class;
	struct cache caches[RANKS];
	struct store_hold *hold;
	uint64_t pinned;

	assert_true(store_class_of(w->handle, &class) >= 0);
	for (uint32_t n = 2; n < OWN; n++) {
		uint8_t id[STORE_ID_BYTES];
		struct store_chunk *chunk;
		struct store_part *part;

		id_of(5000 + n, id);
		assert_int_equal(store_chunk_get(w->handle->space, id, n, TOKENS, &chunk),
				 0);
		assert_int_equal(store_part_new(chunk, class, PART_FILLING, &part), 0);
		store_part_ready(part);
		store_chunk_unpin(chunk);
	}
	liar_tells_two(w, caches);
	lie.replies = 1;
	lie.asks = 0;
	assert_int_equal(far_chunks(w, OWN, &hold), 2);
	pinned = arena_owner_pinned(owner);
	assert_true(hold->count > OWN / 4 && hold->count < OWN);
	assert_true(pinned > arena_owner_share(owner) / 2);
	assert_true(pinned - pinned / (hold->count - 2) <= arena_owner_share(owner) / 2);
	assert_int_equal(lie.first[1], hold->count); /* others may have the rest */
	store_hold_close(hold);
	lie.replies = 0;
	for (unsigned int i = 0; i < RANKS; i++)
		cache_close(&caches[i]);
}

/* A hold of a hundred seconds is joined for ten minutes. */
static void holder_s_lease_is_renewed_while_it_is_held(void **state)
{
	struct world *w = *state;
	struct cache caches[RANKS];
	struct store_hold *hold, *joined;
	const struct store_hold_args args = {.lease_ns = 600 * LOOP_NS_PER_S};
	unsigned int before;

	liar_tells_two(w, caches);
	lie.renewals = 0;
	assert_int_equal(far_chunks(w, 2, &hold), 2);
	assert_int_equal(store_hold_join(w->handle, hold->secret, &args, &joined), 0);
	cluster_run(&w->c, 120 * LOOP_NS_PER_S);
	assert_true(hold->over);
	assert_int_equal(lie.renewals, 0);
	cluster_run(&w->c, 400 * LOOP_NS_PER_S); /* before 160 s, then each 30 s */
	assert_in_range(lie.renewals, 13, 14);
	assert_int_equal(joined->away, 2);
	store_hold_close(joined);
	before = lie.renewals;
	cluster_run(&w->c, 100 * LOOP_NS_PER_S);
	assert_int_equal(lie.renewals, before);
	store_hold_close(hold);
	for (unsigned int i = 0; i < RANKS; i++)
		cache_close(&caches[i]);
}

static unsigned int asked_of_mute;

static void tell_nothing(struct remote *remote, const struct wire_chunk_lookup *asked)
{
	(void)remote;
	(void)asked;
	asked_of_mute++;
}

static void on_closed(void *arg, struct store_hold *hold, const struct err *why)
{
	(void)hold;
	assert_non_null(why);
	*(uint32_t *)arg = why->code;
}

/* A query is sent some time after its hold was opened. */
static void query_of_closed_hold_is_not_sent(void **state)
{
	struct world *w = *state;
	uint8_t id[STORE_ID_BYTES];
	const struct store_ids asked = {.bytes = id, .count = 1, .first = 0};
	uint32_t code = ERR_OK;
	const struct store_hold_args args = {.lease_ns = LOOP_NS_PER_S,
					     .far_ns = LOOP_NS_PER_S,
					     .on_done = on_closed,
					     .arg = &code};
	struct store_hold *hold;

	liar = tell_nothing;
	asked_of_mute = 0;
	id_of(5000, id);
	assert_int_equal(store_hold_open(w->handle, &asked, &args, &hold), 1);
	store_hold_close(hold);
	assert_int_equal(code, ERR_CANCELED);
	cluster_run(&w->c, LOOP_NS_PER_MS);
	assert_int_equal(asked_of_mute, 0);
	assert_int_equal(w->handle->space->tenant->asking, 0);
	assert_int_equal(far_chunks(w, 1, &hold), 0); /* the next one is */
	assert_int_equal(asked_of_mute, 1);
	store_hold_close(hold);
}

/* A lease shorter than the time that others have to answer begins with their answer. */
static void lease_begins_with_the_answer(void **state)
{
	struct world *w = *state;
	uint8_t id[STORE_ID_BYTES];
	const struct store_ids asked = {.bytes = id, .count = 1, .first = 0};
	uint32_t found = UINT32_MAX;
	const struct store_hold_args args = {.lease_ns = LOOP_NS_PER_S / 10,
					     .far_ns = LOOP_NS_PER_S,
					     .on_done = on_far_found,
					     .arg = &found};
	struct store_hold *hold;

	liar = tell_nothing;
	id_of(5000, id);
	assert_int_equal(store_hold_open(w->handle, &asked, &args, &hold), 1);
	while (found == UINT32_MAX) {
		assert_false(hold->over);
		cluster_run(&w->c, LOOP_NS_PER_S / 100);
	}
	assert_int_equal(found, 0);
	assert_false(hold->over);
	cluster_run(&w->c, LOOP_NS_PER_S / 5);
	assert_true(hold->over);
	store_hold_close(hold);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(holder_with_many_masks_needs_few_covers),
		CASE(holder_with_impossible_reply_is_a_miss),
		CASE(holder_with_a_piece_for_each_query_has_eight),
		CASE(nothing_of_its_own_follows_a_short_piece),
		CASE(query_for_a_later_piece_without_reply_is_a_miss),
		CASE(queries_for_all_pieces_take_the_time_of_one),
		CASE(later_piece_ends_at_half_of_a_user_s_share),
		CASE(holder_s_lease_is_renewed_while_it_is_held),
		CASE(lease_begins_with_the_answer),
		CASE(query_of_closed_hold_is_not_sent),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests_name("far_lies", tests, NULL, NULL);
}
