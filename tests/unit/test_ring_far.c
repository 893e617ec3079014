/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Holds by entries of the submission ring that ask another daemon (HOLD_REMOTE): what
 * they find, and what becomes of the slot of one whose answer has not come, when it is
 * released, read by, closed by the socket, or its engine ends. Node 0 asks, node 1 has
 * the chunks, and says nothing while it is mute.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/store/far.h"
#include "daemon/store/store_figures.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/cluster_store.h"
#include "tests/lib/ring_entries.h"

#define T 16u /* tokens of a chunk: four pages */
#define CHUNKS 2u
#define SLOT SESSION_SLOTS
#define LEASE_MS 1000u
#define REMOTE_MS 2000u

struct world {
	struct cluster c;
	struct session *engine[2];
	struct cache cache[2];
	uint64_t space[2];
};

static struct {
	bool mute;
	unsigned int asks;
	struct remote *remote;
	uint64_t ask; /* the last one */
} holder;
static struct kvd *holder_kvd;
static int (*true_message)(void *owner, struct remote *remote,
			   const struct wire_header *h, struct cursor *body);

static int on_message(void *owner, struct remote *remote, const struct wire_header *h,
		      struct cursor *body)
{
	struct wire_chunk_lookup ask;

	if (remote->kvd->handshake != holder_kvd->handshake ||
	    h->type != WIRE_T_CHUNK_LOOKUP || !holder.mute)
		return true_message(owner, remote, h, body);
	assert_int_equal(wire_chunk_lookup_get(body, &ask), 0);
	holder.asks++;
	holder.remote = remote;
	holder.ask = ask.ask;
	return 0;
}

static void wrap(struct kvd *kvd, struct handshake_events *events)
{
	holder_kvd = kvd; /* the last one: node 1 */
	true_message = events->on_message;
	events->on_message = on_message;
}

/* ---- entries ---- */

static void add_ids(struct payload *p, uint8_t from, uint32_t count)
{
	uint8_t id[KVD_RING_ID_BYTES] = {0};

	for (uint32_t i = 0; i < count; i++) {
		id[0] = (uint8_t)(from + i);
		payload_add(p, id, sizeof(id));
	}
	p->views = p->len;
}

static void give(struct world *w, struct kvd_ring_entry e, struct payload *p)
{
	entry_give(&w->c, w->engine[0], &e, p);
}

static struct kvd_ring_entry entry(enum kvd_ring_op op, uint32_t slot, uint64_t a)
{
	return (struct kvd_ring_entry){.op = op, .slot = slot, .gen = 1, .a = a};
}

static void hold_of(struct world *w, uint32_t slot, uint32_t ids, uint32_t remote_ms,
		    uint64_t lease_ms)
{
	const uint8_t secret[KVD_RING_SECRET_BYTES] = {(uint8_t)slot,
						       (uint8_t)(slot >> 8), 1};
	struct kvd_ring_entry e = entry(KVD_RING_HOLD_REMOTE, slot, w->space[0]);
	struct payload p = {0};

	payload_add(&p, secret, sizeof(secret));
	add_ids(&p, 1, ids);
	e.n0 = ids;
	e.n1 = remote_ms;
	e.b = lease_ms;
	give(w, e, &p);
}

static void hold_for(struct world *w, uint32_t slot, uint32_t remote_ms,
		     uint64_t lease_ms)
{
	hold_of(w, slot, CHUNKS + 1, remote_ms, lease_ms);
}

static void hold(struct world *w, uint32_t slot)
{
	hold_for(w, slot, REMOTE_MS, LEASE_MS);
}

static void fetch(struct world *w, uint32_t slot, uint64_t of)
{
	static const uint32_t pages[] = {3, 4, 9, 1, 7, 2, 8, 12};
	struct kvd_ring_entry e = entry(KVD_RING_FETCH, slot, KVD_RING_IDS + of);
	struct payload p = {0};

	e.b = w->cache[0].pool;
	payload_view(&p, "kv", pages, 4 * CHUNKS);
	give(w, e, &p);
}

static void release(struct world *w, uint32_t slot)
{
	give(w, entry(KVD_RING_RELEASE, 0, KVD_RING_IDS + slot), NULL);
}

/* ---- what came of them ---- */

static struct kvd_status_slot slot_at(const struct world *w, uint32_t slot)
{
	return slot_read(w->engine[0], slot);
}

static unsigned int state_of(const struct world *w, uint32_t slot)
{
	return kvd_word_state(slot_at(w, slot).word);
}

static void failed_with(const struct world *w, uint32_t slot, enum err_code code)
{
	assert_int_equal(state_of(w, slot), KVD_FAILED);
	assert_int_equal(kvd_word_error(slot_at(w, slot).word), code);
}

static bool is_free(const struct world *w, uint32_t slot)
{
	return kvd_word_flags(slot_at(w, slot).word) & KVD_FLAG_FREE;
}

static uint64_t charged(const struct world *w)
{
	return w->engine[0]->account->bytes[ACCOUNT_CHUNKS];
}

static struct store_figures figures(const struct world *w, unsigned int node)
{
	struct store_figures f;

	store_figures(store_of(&w->c.nodes[node].kvd), &f);
	return f;
}

/* ---- the world ---- */

static void node_begin(struct world *w, unsigned int node, const char *stores)
{
	const struct cluster_store_args args = {.memory_bytes = 4 << 20,
						.stores = stores};

	assert_true(cluster_store(&w->c, node, &args));
	w->engine[node] = cluster_engine(&w->c, node, "e");
	w->cache[node] = cluster_geometry;
	cluster_cache(&w->c, w->engine[node], "kv", 0, &w->cache[node]);
	w->space[node] = cluster_space(&w->c, w->engine[node], w->cache[node].pool, T);
}

static void put_there(struct world *w)
{
	struct kvd_ring_entry e = entry(KVD_RING_PUT, SLOT, w->space[1]);
	static const uint32_t pages[] = {3, 4, 9, 1, 7, 2, 8, 12};
	struct payload p = {0};

	memset(w->cache[1].base, 0x5a, w->cache[1].bytes);
	e.b = w->cache[1].pool;
	e.n0 = CHUNKS;
	add_ids(&p, 1, CHUNKS);
	payload_view(&p, "kv", pages, 4 * CHUNKS);
	entry_give(&w->c, w->engine[1], &e, &p);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(figures(w, 1).chunks, CHUNKS);
}

static int setup(void **state)
{
	struct world *w = calloc(1, sizeof(*w));

	assert_non_null(w);
	memset(&holder, 0, sizeof(holder));
	cluster_wrap_events(wrap);
	cluster_new(&w->c, 3, 2);
	node_begin(w, 1, NULL);
	node_begin(w, 0, w->c.nodes[1].endpoint);
	put_there(w);
	*state = w;
	return 0;
}

static int teardown(void **state)
{
	struct world *w = *state;

	for (unsigned int i = 0; i < 2; i++)
		cache_close(&w->cache[i]);
	cluster_free(&w->c);
	cluster_wrap_events(NULL);
	free(w);
	return 0;
}

/* A hold that is not answered yet. */
static void hold_pending(struct world *w, uint32_t slot)
{
	unsigned int asks = holder.asks;

	holder.mute = true;
	hold(w, slot);
	cluster_run(&w->c, 10 * LOOP_NS_PER_MS);
	assert_int_equal(holder.asks, asks + 1);
	assert_int_equal(state_of(w, slot), KVD_BOOTSTRAPPING);
}

/* ---- answers ---- */

static void chunks_of_another_daemon_are_held_and_fetched(void **state)
{
	struct world *w = *state;

	hold(w, SLOT);
	cluster_run(&w->c, 100 * LOOP_NS_PER_MS);
	assert_int_equal(state_of(w, SLOT), KVD_SUCCESS);
	assert_int_equal(slot_at(w, SLOT).total, CHUNKS);
	assert_int_equal(slot_at(w, SLOT).bytes, CHUNKS * T);
	assert_int_equal(kvd_more_rows(slot_at(w, SLOT).more), CHUNKS);
	assert_int_equal(figures(w, 1).remote.holds, 1);
	fetch(w, SLOT + 1, SLOT);
	cluster_run(&w->c, LOOP_NS_PER_S / 2);
	assert_int_equal(state_of(w, SLOT + 1), KVD_SUCCESS);
	assert_int_equal(*cache_at(&w->cache[0], 1, 1, 12, 3, 2, 5), 0x5a);
	assert_int_equal(*cache_at(&w->cache[0], 1, 1, 0, 3, 2, 5), 0);
	release(w, SLOT + 1);
	release(w, SLOT);
	cluster_run(&w->c, 100 * LOOP_NS_PER_MS);
	assert_true(is_free(w, SLOT) && is_free(w, SLOT + 1));
	assert_int_equal(figures(w, 0).holds + figures(w, 1).remote.holds, 0);
}

/* A holder's reply names pools: it is asked when they are known, in any order of
 * messages. */
static void hold_waits_for_holders_pools(void **state)
{
	struct world *w = *state;
	struct kvd *kvd = &w->c.nodes[0].kvd;
	struct remote *remote =
		list_first(handshake_remotes(kvd->handshake), struct remote, link);

	assert_true(remote->ready && remote->pools.listed);
	remote->pools.listed = false; /* as before POOLS */
	hold(w, SLOT);
	cluster_run(&w->c, 10 * LOOP_NS_PER_MS);
	assert_int_equal(state_of(w, SLOT), KVD_BOOTSTRAPPING);
	assert_int_equal(figures(w, 1).remote.holds_total, 0);
	far_on_change(store_of(kvd)->far, remote);
	cluster_run(&w->c, 10 * LOOP_NS_PER_MS);
	assert_int_equal(figures(w, 1).remote.holds_total, 0);
	remote->pools.listed = true;
	far_on_change(store_of(kvd)->far, remote);
	cluster_run(&w->c, 10 * LOOP_NS_PER_MS);
	assert_int_equal(state_of(w, SLOT), KVD_SUCCESS);
	assert_int_equal(slot_at(w, SLOT).total, CHUNKS);
	release(w, SLOT);
}

/* Its query is on its way, in parts of 16 bytes: RELEASE follows the last one. */
static void hold_released_between_parts_of_its_query_leaves_nothing(void **state)
{
	struct world *w = *state;
	const struct remote *remote = list_first(
		handshake_remotes(w->c.nodes[0].kvd.handshake), struct remote, link);
	uint64_t before = remote->peer->messages_out;

	hold(w, SLOT);
	for (unsigned int turns = 0; turns < 6; turns++)
		loop_turn(w->c.loop, 0);
	assert_in_range(remote->peer->messages_out, before + 2, before + 8); /* a PING */
	assert_int_equal(state_of(w, SLOT), KVD_BOOTSTRAPPING);
	release(w, SLOT);
	assert_true(is_free(w, SLOT));
	cluster_run(&w->c, 100 * LOOP_NS_PER_MS);
	assert_int_equal(figures(w, 1).remote.holds_total, 1);
	assert_int_equal(figures(w, 0).holds + figures(w, 1).remote.holds, 0);
}

static void hold_without_remote_query_is_answered_at_once(void **state)
{
	struct world *w = *state;

	hold_for(w, SLOT, 0, LEASE_MS);
	assert_int_equal(state_of(w, SLOT), KVD_SUCCESS);
	assert_int_equal(slot_at(w, SLOT).total, 0);
	assert_int_equal(figures(w, 1).remote.holds_total, 0);
}

/* Other entries of the ring go on meanwhile; its lease begins with the answer. */
static void hold_without_reply_is_empty_in_time(void **state)
{
	struct world *w = *state;
	uint64_t before = charged(w);

	hold_pending(w, SLOT);
	assert_in_range(charged(w), before + (CHUNKS + 1) * STORE_ID_BYTES, UINT32_MAX);
	give(w, entry(KVD_RING_FIND, SLOT + 1, w->space[0]), NULL);
	assert_true(is_free(w, SLOT + 1));
	cluster_run(&w->c, REMOTE_MS * LOOP_NS_PER_MS);
	assert_int_equal(state_of(w, SLOT), KVD_SUCCESS);
	assert_int_equal(slot_at(w, SLOT).total, 0);
	release(w, SLOT);
	assert_true(is_free(w, SLOT));
	assert_int_equal(charged(w), before);
}

static void times_past_the_limits_are_refused(void **state)
{
	struct world *w = *state;

	hold_for(w, SLOT, STORE_REMOTE_MS_MAX + 1, LEASE_MS);
	hold_for(w, SLOT + 1, UINT32_MAX, LEASE_MS);
	hold_for(w, SLOT + 2, REMOTE_MS, 0);
	hold_for(w, SLOT + 3, REMOTE_MS, UINT64_MAX);
	for (uint32_t i = 0; i < 4; i++)
		failed_with(w, SLOT + i, ERR_RANGE);
	assert_int_equal(figures(w, 0).holds, 0);
}

static void lengths_forged_violate_the_protocol(void **state)
{
	struct world *w = *state;
	static const struct {
		uint32_t n0, bytes;
	} lies[] = {{0, 16}, {1, 32}, {1, 47}, {2, 48}, {1u << 27, 16}, {4097, 48}};

	for (size_t i = 0; i < ARRAY_LEN(lies); i++) {
		struct kvd_ring_entry e = entry(KVD_RING_HOLD_REMOTE, SLOT, w->space[0]);
		const uint8_t bytes[64] = {0};
		struct payload p = {0};

		payload_add(&p, bytes, sizeof(bytes));
		e.n0 = lies[i].n0;
		e.n1 = REMOTE_MS;
		e.b = LEASE_MS;
		e.bytes = lies[i].bytes;
		entry_breaks(&w->c, w->engine[0], &e, &p);
	}
	hold(w, SLOT); /* nothing was claimed */
	assert_int_equal(figures(w, 0).holds, 1);
}

/* ---- before the answer ---- */

static void hold_released_during_query_leaks_nothing(void **state)
{
	struct wire_chunk_lookup_ack late = {.code = ERR_OK};
	struct world *w = *state;
	uint64_t before = charged(w);

	hold_pending(w, SLOT);
	release(w, SLOT);
	assert_true(is_free(w, SLOT));
	assert_int_equal(figures(w, 0).holds, 0);
	assert_int_equal(charged(w), before);
	late.ask = holder.ask;
	assert_int_equal(handshake_send_chunk_lookup_ack(holder.remote, &late), 0);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_true(is_free(w, SLOT));
	assert_int_equal(figures(w, 0).holds, 0);
}

/* A fetch by it would use a holder that may still be replaced by a better one. */
static void hold_is_not_read_by_before_its_answer(void **state)
{
	struct world *w = *state;

	hold_pending(w, SLOT);
	fetch(w, SLOT + 1, SLOT);
	failed_with(w, SLOT + 1, ERR_STATE);
	cluster_run(&w->c, REMOTE_MS * LOOP_NS_PER_MS);
	assert_int_equal(state_of(w, SLOT), KVD_SUCCESS);
}

static void engine_ended_during_query_leaks_nothing(void **state)
{
	struct world *w = *state;

	hold_pending(w, SLOT);
	hold_pending(w, SLOT + 1);
	cluster_engine_dies(&w->c, w->engine[0]);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(figures(w, 0).holds, 0);
	assert_int_equal(figures(w, 1).remote.holds, 0);
	w->engine[0] = cluster_engine(&w->c, 0, "e");
}

/* What others are asked at a time is bounded, and charged. */
static void hold_at_once(struct world *w, uint32_t slot)
{
	hold(w, slot);
	assert_int_equal(state_of(w, slot), KVD_SUCCESS);
	assert_int_equal(slot_at(w, slot).total, 0);
}

static void queries_beyond_limit_are_not_sent(void **state)
{
	struct wire_chunk_lookup_ack late = {.code = ERR_OK};
	struct world *w = *state;
	uint64_t before = charged(w);
	uint32_t i;

	for (i = 0; i < STORE_ASKING_MAX; i++)
		hold_pending(w, SLOT + i);
	hold_at_once(w, SLOT + i);
	release(w, SLOT + i - 1); /* one that is let go is not answered by that */
	hold_at_once(w, SLOT + i + 1);
	late.ask = holder.ask;
	assert_int_equal(handshake_send_chunk_lookup_ack(holder.remote, &late), 0);
	cluster_run(&w->c, 10 * LOOP_NS_PER_MS);
	hold_pending(w, SLOT + i + 2);
	for (i = 0; i < STORE_ASKING_MAX + 3; i++)
		release(w, SLOT + i);
	cluster_run(&w->c, 2 * REMOTE_MS * LOOP_NS_PER_MS); /* they count still */
	hold_at_once(w, SLOT + i);
	release(w, SLOT + i);
	assert_int_equal(charged(w), before);
	assert_int_equal(figures(w, 0).holds, 0);
	cluster_run(&w->c, 20 * LOOP_NS_PER_S); /* nor do they wait for ever */
	hold_pending(w, SLOT + i + 1);
}

static bool peer_is_up(void *arg)
{
	return peers_in(((struct world *)arg)->c.nodes[0].kvd.peers, PEER_UP) > 0;
}

/* Long ones, to a daemon that reads late: they fill half of its queue and no more. What
 * must be sent goes behind them, and the peering lasts. */
static void queries_leave_space_for_required_messages(void **state)
{
	struct world *w = *state;
	const struct mem_path cut = {.cut = true}, way = {.delay_ns = LOOP_NS_PER_MS};
	const char *from = w->c.nodes[0].endpoint, *to = w->c.nodes[1].endpoint;
	const unsigned int asks = holder.asks;

	holder.mute = true;
	mem_hub_set_queue_max(w->c.links, 1);
	mem_hub_set_path(w->c.links, from, to, &cut);
	for (uint32_t i = 0; i < STORE_ASKING_MAX; i++)
		hold_of(w, SLOT + i, STORE_IDS_MAX, REMOTE_MS, LEASE_MS);
	cluster_run(&w->c, LOOP_NS_PER_MS);
	for (uint32_t i = 0; i < STORE_ASKING_MAX; i++)
		release(w, SLOT + i); /* which must be told */
	cluster_run(&w->c, 500 * LOOP_NS_PER_MS);
	mem_hub_set_path(w->c.links, from, to, &way);
	cluster_run(&w->c, 2 * LOOP_NS_PER_S);
	assert_true(peer_is_up(w));
	assert_int_equal(metrics_get(&w->c.nodes[0].kvd.metrics, METRIC_PEER_LOST), 0);
	assert_in_range(holder.asks - asks, STORE_ASKING_MAX / 4, STORE_ASKING_MAX / 2);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(chunks_of_another_daemon_are_held_and_fetched),
		CASE(hold_waits_for_holders_pools),
		CASE(hold_without_remote_query_is_answered_at_once),
		CASE(hold_without_reply_is_empty_in_time),
		CASE(times_past_the_limits_are_refused),
		CASE(lengths_forged_violate_the_protocol),
		CASE(hold_released_during_query_leaks_nothing),
		CASE(hold_is_not_read_by_before_its_answer),
		CASE(engine_ended_during_query_leaks_nothing),
		CASE(queries_beyond_limit_are_not_sent),
		CASE(queries_leave_space_for_required_messages),
	};
	const struct CMUnitTest long_queries[] = {
		CASE(chunks_of_another_daemon_are_held_and_fetched),
		CASE(hold_released_between_parts_of_its_query_leaves_nothing),
		CASE(hold_without_reply_is_empty_in_time),
		CASE(hold_released_during_query_leaks_nothing),
		CASE(engine_ended_during_query_leaks_nothing),
		CASE(queries_beyond_limit_are_not_sent),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	int failed = cmocka_run_group_tests_name("ring_far", tests, NULL, NULL);

	cluster_short_parts();
	return failed + cmocka_run_group_tests_name("ring_far, long queries",
						    long_queries, NULL, NULL);
}
