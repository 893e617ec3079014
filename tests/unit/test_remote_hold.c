/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks that another daemon holds here, and a peer that asks for more than it may: more
 * than half of a user's share, for ever, by legs that never end, of pools that it was not
 * told of. Node 0 is this daemon, node 1 the peer, whose messages are the test's own and
 * whose answers it reads.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/store/far.h"
#include "daemon/store/remote_hold.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/cluster_store.h"

#define TOKENS 16u
#define CHUNKS 240u
#define MEMORY_BYTES (UINT64_C(4) << 20)

struct world {
	struct cluster c;
	struct session *engine, *other;
	struct cache cache, wide;
	struct store_handle *handle;
};

/* What the peer was answered last, and how often. */
static struct {
	unsigned int tolds, naks;
	uint32_t code, chunks, pools;
	uint64_t pool;
} heard;

static struct kvd *peer_kvd;
static int (*true_message)(void *owner, struct remote *remote,
			   const struct wire_header *h, struct cursor *body);

static void hear_told(struct cursor *body)
{
	struct wire_chunk_lookup_ack msg;
	struct cursor in;

	assert_int_equal(wire_chunk_lookup_ack_get(body, &msg), 0);
	heard.tolds++;
	heard.code = msg.code;
	heard.chunks = heard.pools = 0;
	if (msg.code)
		return;
	cursor_read(&in, msg.runs.data, msg.runs.len);
	heard.pools = cursor_get_u32(&in);
	for (uint32_t i = 0; i < heard.pools; i++)
		heard.pool = cursor_get_u64(&in);
	for (uint32_t n = cursor_get_u32(&in); n > 0; n--) {
		heard.chunks += cursor_get_u32(&in);
		cursor_get_u64(&in);
	}
	assert_false(in.bad);
}

static int on_message(void *owner, struct remote *remote, const struct wire_header *h,
		      struct cursor *body)
{
	struct wire_chunk_offer_nak nak;

	if (remote->kvd->handshake != peer_kvd->handshake)
		return true_message(owner, remote, h, body);
	if (h->type == WIRE_T_CHUNK_LOOKUP_ACK) {
		hear_told(body);
		return 0;
	}
	if (h->type == WIRE_T_CHUNK_OFFER_NAK) {
		assert_int_equal(wire_chunk_offer_nak_get(body, &nak), 0);
		heard.naks++;
		heard.code = nak.code;
		return 0;
	}
	return true_message(owner, remote, h, body);
}

static void wrap(struct kvd *kvd, struct handshake_events *events)
{
	peer_kvd = kvd; /* the last one: node 1 */
	true_message = events->on_message;
	events->on_message = on_message;
}

static struct store *node_store(struct world *w)
{
	return store_of(&w->c.nodes[0].kvd);
}

static struct remote *remote_of(struct world *w, unsigned int node)
{
	struct remote *remote;

	list_foreach(remote, handshake_remotes(w->c.nodes[node].kvd.handshake), link) {
		if (!remote->peer->self)
			return remote;
	}
	fail_msg("no peer");
	return NULL;
}

static struct store_handle *handle_open(struct world *w, struct session *engine,
					uint64_t pool)
{
	return store_handle_find(engine, cluster_space(&w->c, engine, pool, TOKENS));
}

static int setup(void **state)
{
	struct world *w = calloc(1, sizeof(*w));
	struct cluster_store_args args = {.memory_bytes = MEMORY_BYTES};

	assert_non_null(w);
	memset(&heard, 0, sizeof(heard));
	cluster_wrap_events(wrap);
	cluster_new(&w->c, 5, 2);
	args.stores = w->c.nodes[1].endpoint;
	assert_true(cluster_store(&w->c, 0, &args));
	w->engine = cluster_engine(&w->c, 0, "e");
	w->cache = cluster_geometry;
	cluster_cache(&w->c, w->engine, "kv", 0, &w->cache);
	w->handle = handle_open(w, w->engine, w->cache.pool);
	cluster_run(&w->c, LOOP_NS_PER_S);
	*state = w;
	return 0;
}

static int teardown(void **state)
{
	struct world *w = *state;

	cache_close(&w->cache);
	if (w->other)
		cache_close(&w->wide);
	cluster_free(&w->c);
	cluster_wrap_events(NULL);
	free(w);
	return 0;
}

/* ---- what is here ---- */

static void id_of(uint32_t n, uint8_t id[STORE_ID_BYTES])
{
	memset(id, 0, STORE_ID_BYTES);
	memcpy(id, &n, sizeof(n));
}

/* A part of the chunk, of the handle's kind: filled, or an engine fills it. */
static struct store_part *part_put(struct store_handle *handle, uint32_t n, bool full)
{
	struct store_class *class;
	struct store_chunk *chunk;
	struct store_part *part;
	uint8_t id[STORE_ID_BYTES];

	id_of(n, id);
	assert_true(store_class_of(handle, &class) >= 0);
	assert_int_equal(store_chunk_get(handle->space, id, n, TOKENS, &chunk), 0);
	assert_int_equal(store_part_new(chunk, class, PART_FILLING, &part), 0);
	if (!full)
		return part; /* pinned */
	store_part_ready(part);
	store_chunk_unpin(chunk);
	return part;
}

static void fill(struct world *w, uint32_t count)
{
	for (uint32_t n = 0; n < count; n++)
		part_put(w->handle, n, true);
	cluster_run(&w->c, LOOP_NS_PER_S); /* its pool is made, and known to the peer */
}

/* As if it were on its way from a file. */
static void part_loads(struct store_part *part, bool begins)
{
	uint64_t bit = UINT64_C(1) << part->class->index;

	part->file = begins ? PART_FILED : PART_UNFILED;
	if (begins)
		part->chunk->filed |= bit;
	else
		part->chunk->filed &= ~bit;
}

static uint64_t pinned(struct world *w)
{
	return arena_owner_pinned(w->handle->space->tenant->owner);
}

static uint64_t share(struct world *w)
{
	return arena_owner_share(w->handle->space->tenant->owner);
}

/* ---- what the peer says ---- */

static void ask_send(struct world *w, uint64_t number, uint32_t first, uint32_t count,
		     uint64_t lease_ms)
{
	static uint8_t ids[STORE_IDS_MAX * STORE_ID_BYTES];
	struct wire_chunk_lookup msg = {
		.ask = number,
		.first = first,
		.lease_ms = lease_ms,
		.ids = {.data = ids, .len = (size_t)count * STORE_ID_BYTES}};

	for (uint32_t n = 0; n < count; n++)
		id_of(first + n, ids + (size_t)n * STORE_ID_BYTES);
	memcpy(msg.space, w->handle->space->digest, sizeof(msg.space));
	assert_int_equal(handshake_send_chunk_lookup(remote_of(w, 1), &msg), 0);
}

static void ask(struct world *w, uint64_t number, uint32_t first, uint32_t count,
		uint64_t lease_ms)
{
	ask_send(w, number, first, count, lease_ms);
	cluster_run(&w->c, 10 * LOOP_NS_PER_MS);
}

static void release(struct world *w, uint64_t number)
{
	const struct wire_chunk_release msg = {.ask = number};

	assert_int_equal(handshake_send_chunk_release(remote_of(w, 1), &msg), 0);
}

static void leg(struct world *w, uint64_t number, uint64_t pool, uint32_t first,
		uint32_t count)
{
	static uint64_t room = 1000;
	const struct wire_chunk_offer msg = {.ask = number,
					     .room = ++room,
					     .pool = pool,
					     .first = first,
					     .count = count,
					     .begin = first * (uint64_t)TOKENS,
					     .end = (first + count) * (uint64_t)TOKENS};

	assert_int_equal(handshake_send_chunk_offer(remote_of(w, 1), &msg), 0);
	cluster_run(&w->c, 10 * LOOP_NS_PER_MS);
}

/* ---- pins ---- */

static void peer_pins_no_more_than_half_of_a_user_s_share(void **state)
{
	struct world *w = *state;
	uint32_t most = (uint32_t)(share(w) / 2 / w->handle->canon->slot_bytes);

	fill(w, CHUNKS);
	assert_in_range(most, 10, CHUNKS - 10);
	ask(w, 1, 0, CHUNKS, UINT64_MAX);
	assert_int_equal(heard.code, ERR_OK);
	assert_int_equal(heard.chunks, most);
	assert_in_range(pinned(w), 1, share(w) / 2);
	ask(w, 2, most, CHUNKS - most, UINT64_MAX); /* others: of which none can be */
	assert_int_equal(heard.tolds, 2);
	assert_int_equal(heard.chunks, 0);
	assert_int_equal(node_store(w)->figures.remote.holds, 1);
	ask(w, 3, 0, CHUNKS, UINT64_MAX); /* the same, which are pinned already */
	assert_int_equal(heard.chunks, most);
	assert_in_range(pinned(w), 1, share(w) / 2);
	cluster_run(&w->c, (STORE_LEASE_MS_MAX + FAR_LEASE_MORE_MS) * LOOP_NS_PER_MS);
	assert_int_equal(node_store(w)->figures.remote.holds,
			 0); /* what an engine may ask for */
	assert_int_equal(pinned(w), 0);
}

static void peer_lost_releases_all_holds(void **state)
{
	struct world *w = *state;

	fill(w, CHUNKS);
	for (uint64_t n = 1; n <= 300; n++)
		ask(w, n, 0, 20, 600000);
	assert_int_equal(heard.code, ERR_LIMIT);
	assert_int_equal(node_store(w)->figures.remote.holds, 256);
	ask(w, 1, 0, 20, 600000);
	assert_int_equal(heard.code, ERR_EXIST);
	handshake_close(w->c.nodes[1].kvd.handshake);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(node_store(w)->figures.remote.holds, 0);
	assert_int_equal(pinned(w), 0);
}

static void lease_renewed_is_longer(void **state)
{
	struct world *w = *state;

	fill(w, 10);
	ask(w, 1, 0, 10, 2000);
	cluster_run(&w->c, LOOP_NS_PER_S);
	ask(w, 1, 0, 0, 5000);
	ask(w, 1, 0, 0, 10);   /* not shorter */
	ask(w, 2, 0, 0, 5000); /* of no hold */
	assert_int_equal(heard.tolds, 1);
	cluster_run(&w->c, 4 * LOOP_NS_PER_S);
	assert_int_equal(node_store(w)->figures.remote.holds, 1);
	cluster_run(&w->c, 2 * LOOP_NS_PER_S);
	assert_int_equal(node_store(w)->figures.remote.holds, 0);
}

/* ---- look-ups in turns ---- */

#define HALF 64u /* more than a step, and fewer than a user's holds may pin */

static unsigned int lookups(struct world *w)
{
	return store_remote(remote_of(w, 0))->lookups;
}

/* A step a turn, from now on. */
static void lookup_begins(struct world *w, uint64_t number, uint64_t lease_ms)
{
	unsigned int before = lookups(w);

	loop_virtual_parts(w->c.loop, 1);
	ask_send(w, number, 0, HALF, lease_ms);
	while (lookups(w) == before)
		loop_turn(w->c.loop, LOOP_NS_PER_MS);
	assert_true(pinned(w) > 0);
}

static void assert_no_hold(struct world *w, uint32_t code)
{
	cluster_run(&w->c, 10 * LOOP_NS_PER_MS);
	loop_virtual_parts(w->c.loop, 0);
	assert_int_equal(lookups(w), 0);
	assert_int_equal(node_store(w)->figures.remote.holds, 0);
	assert_int_equal(pinned(w), 0);
	assert_int_equal(heard.code, code);
}

static void lookup_in_turns_reports_the_same(void **state)
{
	struct world *w = *state;
	const unsigned int before = heard.tolds;

	fill(w, HALF);
	lookup_begins(w, 1, 60000);
	ask(w, 1, 0, 0, 120000); /* extends it */
	assert_int_equal(heard.tolds, before + 1);
	assert_int_equal(heard.code, ERR_OK);
	assert_int_equal(heard.chunks, HALF);
	assert_int_equal(lookups(w), 0);
	cluster_run(&w->c, 90 * LOOP_NS_PER_S);
	assert_int_equal(node_store(w)->figures.remote.holds, 1);
	leg(w, 1, heard.pool, 0, HALF);
	assert_int_equal(heard.naks, 0);
	release(w, 1);
	assert_no_hold(w, ERR_LEASE); /* the subtransfer's */
}

static void lookup_ended_early_is_answered(void **state)
{
	struct world *w = *state;

	fill(w, HALF);
	lookup_begins(w, 1, 60000);
	release(w, 1);
	assert_no_hold(w, ERR_LEASE);
	lookup_begins(w, 2, 0); /* a lease that ends at once */
	assert_no_hold(w, ERR_LEASE);
	lookup_begins(w, 3, 60000);
	remote_holds_close(node_store(w));
	assert_no_hold(w, ERR_DRAIN);
	assert_int_equal(heard.tolds, 3);
}

static void lookup_ends_with_its_peer(void **state)
{
	struct world *w = *state;

	fill(w, HALF);
	lookup_begins(w, 1, 60000);
	lookup_begins(w, 2, 60000);
	handshake_close(w->c.nodes[1].kvd.handshake);
	cluster_run(&w->c, LOOP_NS_PER_S);
	loop_virtual_parts(w->c.loop, 0);
	assert_int_equal(node_store(w)->figures.remote.holds, 0);
	assert_int_equal(pinned(w), 0);
	assert_int_equal(heard.tolds, 0);
}

/* A peer that does not wait for its reply gets nothing that was not reported. */
static void lookup_in_progress_serves_nothing(void **state)
{
	struct world *w = *state;
	uint64_t pool;

	fill(w, HALF);
	ask(w, 1, 0, 1, 60000);
	pool = heard.pool;
	lookup_begins(w, 2, 60000);
	leg(w, 2, pool, 0, 1);
	assert_int_equal(heard.naks, 1);
	lookup_begins(w, 3, 60000);
	ask_send(w, 3, 0, HALF, 60000);
	cluster_run(&w->c, 10 * LOOP_NS_PER_MS);
	loop_virtual_parts(w->c.loop, 0);
	assert_int_equal(heard.tolds, 4); /* one of them as a duplicate */
	assert_int_equal(node_store(w)->figures.remote.holds, 3);
}

/* Chunks leave the store between two steps. */
static void lookup_skips_no_chunk_dropped_meanwhile(void **state)
{
	static uint8_t ids[HALF * STORE_ID_BYTES];
	const struct store_ids all = {.bytes = ids, .count = HALF};
	struct world *w = *state;

	for (uint32_t n = 0; n < HALF; n++)
		id_of(n, ids + (size_t)n * STORE_ID_BYTES);
	fill(w, HALF);
	lookup_begins(w, 1, 60000);
	assert_int_equal(store_drop(w->handle, &all), HALF);
	cluster_run(&w->c, 10 * LOOP_NS_PER_MS);
	assert_int_equal(heard.code, ERR_OK);
	assert_in_range(heard.chunks, 1, HALF - 1); /* those that it had pinned */
	release(w, 1);
	assert_no_hold(w, ERR_OK);
}

static void lookups_at_once_are_bounded(void **state)
{
	struct world *w = *state;

	fill(w, HALF);
	loop_virtual_parts(w->c.loop, 1);
	for (uint64_t n = 1; n <= 100; n++)
		ask_send(w, n, 0, HALF, 60000);
	while (heard.code != ERR_BUSY) {
		assert_in_range(lookups(w), 0, 64);
		loop_turn(w->c.loop, LOOP_NS_PER_MS);
	}
	assert_int_equal(lookups(w), 64);
	cluster_run(&w->c, LOOP_NS_PER_S);
	loop_virtual_parts(w->c.loop, 0);
	assert_int_equal(heard.tolds, 100);
	assert_int_equal(lookups(w), 0);
}

/* ---- legs ---- */

/* Another rank's kind, and whether its pool is there. */
static struct store_handle *other_kind(struct world *w)
{
	w->other = cluster_engine(&w->c, 0, "o");
	w->wide = cluster_geometry;
	w->wide.units = 2;
	cluster_cache(&w->c, w->other, "kv2", 0, &w->wide);
	return handle_open(w, w->other, w->wide.pool);
}

static void leg_names_reported_pools(void **state)
{
	struct world *w = *state;
	struct store_handle *other = other_kind(w);
	struct store_part *part;

	fill(w, 4);
	part = part_put(other, 2, false); /* an engine fills it when it likes */
	part_put(other, 3, true);
	cluster_run(&w->c, LOOP_NS_PER_S);
	ask(w, 1, 0, 3, 60000);
	assert_int_equal(heard.pools, 1);
	leg(w, 1, part->class->pool->id, 2, 1);
	assert_int_equal(heard.naks, 1);
	assert_int_equal(heard.code, ERR_NOTFOUND);
	ask(w, 2, 0, 4, 60000); /* told, and not for all */
	assert_int_equal(heard.pools, 2);
	leg(w, 2, part->class->pool->id, 2, 2);
	assert_int_equal(heard.naks, 2);
	assert_int_equal(heard.code, ERR_NOTFOUND);
	assert_true(list_empty(&node_store(w)->waiters));
	store_part_ready(part);
	store_chunk_unpin(part->chunk);
}

static void leg_waiting_is_refused_when_hold_ends(void **state)
{
	struct world *w = *state;
	struct store_part *part;

	fill(w, 4);
	part = part_put(w->handle, 4, false);
	part_loads(part, true);
	ask(w, 1, 0, 5, 1000);
	ask(w, 2, 0, 5, 600000);
	assert_int_equal(heard.chunks, 5);
	leg(w, 1, heard.pool, 0, 5);
	leg(w, 2, heard.pool, 0, 5);
	assert_int_equal(heard.naks, 0);
	cluster_run(&w->c, 2 * LOOP_NS_PER_S);
	assert_int_equal(heard.naks, 1);
	assert_int_equal(heard.code, ERR_LEASE);
	remote_holds_close(node_store(w));
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(heard.naks, 2);
	assert_int_equal(heard.code, ERR_DRAIN);
	assert_int_equal(node_store(w)->figures.remote.holds, 0);
	part_loads(part, false);
	store_part_ready(part);
	store_chunk_unpin(part->chunk);
}

/* Of a fetch that was given up before it pulled: nobody will. */
static void legs_end_when_hold_is_released(void **state)
{
	struct world *w = *state;

	fill(w, 10);
	ask(w, 1, 0, 10, 600000);
	leg(w, 1, heard.pool, 0, 10);
	assert_int_equal(heard.naks, 0);
	assert_true(pinned(w) > 0);
	release(w, 1);
	cluster_run(&w->c, 100 * LOOP_NS_PER_MS);
	assert_int_equal(node_store(w)->figures.remote.holds, 0);
	assert_int_equal(pinned(w), 0);
}

#define LEGS 100u
#define LONG 60u

static void legs_waiting_are_checked_once_a_turn(void **state)
{
	struct world *w = *state;
	struct store *store = node_store(w);
	struct store_part *part;
	uint64_t looks;

	fill(w, LONG - 1);
	part = part_put(w->handle, LONG - 1, false);
	part_loads(part, true);
	ask(w, 1, 0, LONG, 600000);
	for (unsigned int i = 0; i < LEGS; i++)
		leg(w, 1, heard.pool, 0, LONG);
	looks = store->remote_leg_checks;
	assert_int_equal(looks, LEGS * LONG);
	for (unsigned int i = 0; i < 1000; i++)
		store_wake(store);
	cluster_run(&w->c, LOOP_NS_PER_MS);
	assert_in_range(store->remote_leg_checks - looks, LEGS, 2 * LEGS);
	looks = store->remote_leg_checks;
	part_loads(part, false);
	store_part_ready(part);
	loop_virtual_parts(w->c.loop, 1); /* one of them a turn */
	store_wake(store);
	loop_turn(w->c.loop, 0);
	assert_in_range(store->remote_leg_checks - looks, 0, 1);
	cluster_run(&w->c, LOOP_NS_PER_MS);
	loop_virtual_parts(w->c.loop, 0);
	assert_int_equal(store->remote_leg_checks - looks, LEGS);
	assert_true(list_empty(&store->waiters));
	assert_int_equal(heard.naks, 0);
	store_chunk_unpin(part->chunk);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(peer_pins_no_more_than_half_of_a_user_s_share),
		CASE(peer_lost_releases_all_holds),
		CASE(lease_renewed_is_longer),
		CASE(lookup_in_turns_reports_the_same),
		CASE(lookup_ended_early_is_answered),
		CASE(lookup_ends_with_its_peer),
		CASE(lookup_in_progress_serves_nothing),
		CASE(lookup_skips_no_chunk_dropped_meanwhile),
		CASE(lookups_at_once_are_bounded),
		CASE(leg_names_reported_pools),
		CASE(leg_waiting_is_refused_when_hold_ends),
		CASE(legs_end_when_hold_is_released),
		CASE(legs_waiting_are_checked_once_a_turn),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests_name("remote_hold", tests, NULL, NULL);
}
