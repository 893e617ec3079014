/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Homes of chunks in a cluster of simulated daemons: what they know of whom, and what
 * false, late, doubled and past messages of theirs and of holders can do. Node 0 is the
 * home, 1 and 2 hold, 3 asks.
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
#include "daemon/store/home_key.h"
#include "daemon/store/homes_impl.h"
#include "daemon/store/store_figures.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/cluster_store.h"

#define NODES 4u
#define HOME 0u
#define FINDER 3u
#define CHUNKS 12u
#define TOKENS 16u
#define PAGES 4u /* of a chunk */
#define SUMS_NS (31 * LOOP_NS_PER_S)
#define LIMIT 3000u

struct world {
	struct cluster c;
	struct session *engine[NODES];
	struct cache cache[NODES];
	uint64_t space[NODES];
};

/* What the home of the test's nodes says, instead of the home that it is; NULL: that. */
static void (*liar)(struct remote *remote, const struct wire_index_query *msg);
static int (*true_message)(void *owner, struct remote *remote,
			   const struct wire_header *h, struct cursor *body);

static int on_message(void *owner, struct remote *remote, const struct wire_header *h,
		      struct cursor *body)
{
	struct wire_index_query msg;

	if (!liar || h->type != WIRE_T_INDEX_QUERY)
		return true_message(owner, remote, h, body);
	assert_int_equal(wire_index_query_get(body, &msg), 0);
	liar(remote, &msg);
	return 0;
}

static void wrap(struct kvd *kvd, struct handshake_events *events)
{
	(void)kvd;
	true_message = events->on_message;
	events->on_message = on_message;
}

static struct store *node_store(struct world *w, unsigned int node)
{
	return store_of(&w->c.nodes[node].kvd);
}

static void node_begin(struct world *w, unsigned int node)
{
	const struct cluster_store_args args = {.memory_bytes = 4 << 20};
	struct config *config = &w->c.nodes[node].config;

	snprintf(config->chunk_index, sizeof(config->chunk_index), "%s",
		 w->c.nodes[HOME].endpoint);
	assert_true(cluster_store(&w->c, node, &args));
}

static void node_engine(struct world *w, unsigned int node)
{
	w->engine[node] = cluster_engine(&w->c, node, "e");
	w->cache[node] = cluster_geometry;
	cluster_cache(&w->c, w->engine[node], "kv", 0, &w->cache[node]);
	w->space[node] =
		cluster_space(&w->c, w->engine[node], w->cache[node].pool, TOKENS);
}

static int setup(void **state)
{
	struct world *w = calloc(1, sizeof(*w));

	assert_non_null(w);
	liar = NULL;
	cluster_wrap_events(wrap);
	cluster_new(&w->c, 11, NODES);
	for (unsigned int i = 0; i < NODES; i++)
		node_begin(w, i);
	for (unsigned int i = 1; i < NODES; i++)
		node_engine(w, i);
	cluster_run(&w->c, LOOP_NS_PER_S);
	*state = w;
	return 0;
}

static int teardown(void **state)
{
	struct world *w = *state;

	for (unsigned int i = 1; i < NODES; i++)
		cache_close(&w->cache[i]);
	cluster_free(&w->c);
	cluster_wrap_events(NULL);
	free(w);
	return 0;
}

/* ---- what engines do ---- */

/* first … first + count - 1 of a prompt. */
static const char *ids_text(unsigned int first, unsigned int count)
{
	static char text[CHUNKS * 80 + 16];
	char *at = text;

	at += sprintf(at, "\"ids\":[");
	for (unsigned int i = 0; i < count; i++)
		at += sprintf(at, "%s\"%064x\"", i ? "," : "", first + i + 1);
	sprintf(at, "],\"first\":%u", first);
	return text;
}

static void id_of(unsigned int chunk, uint8_t id[STORE_ID_BYTES])
{
	memset(id, 0, STORE_ID_BYTES);
	id[STORE_ID_BYTES - 1] = (uint8_t)(chunk + 1);
}

static void put(struct world *w, unsigned int node, unsigned int first,
		unsigned int count)
{
	char pages[CHUNKS * PAGES * 2] = "0";

	for (unsigned int i = 1; i < count * PAGES; i++)
		strcat(pages, ",0");
	cluster_ok(&w->c, w->engine[node],
		   "{\"cmd\":\"chunk.put\",\"space\":%llu,\"pool\":%llu,%s,\"views\":{"
		   "\"kv\":{\"pages\":[%s],\"first_token\":%u}}}",
		   (unsigned long long)w->space[node],
		   (unsigned long long)w->cache[node].pool, ids_text(first, count), pages,
		   first * TOKENS);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(node_store(w, node)->chunk_count, first + count);
}

static void drop(struct world *w, unsigned int node, unsigned int first,
		 unsigned int count)
{
	cluster_ok(&w->c, w->engine[node], "{\"cmd\":\"chunk.drop\",\"space\":%llu,%s}",
		   (unsigned long long)w->space[node], ids_text(first, count));
}

static unsigned int far_of(struct world *w, unsigned int count, unsigned int remote_ms)
{
	cJSON *answer = cluster_call(
		&w->c, w->engine[FINDER],
		"{\"cmd\":\"chunk.hold\",\"space\":%llu,%s,\"remote_ms\":%u}",
		(unsigned long long)w->space[FINDER], ids_text(0, count), remote_ms);
	const cJSON *far = cJSON_GetObjectItem(answer, "remote");
	unsigned int n;

	if (!cJSON_IsNumber(far))
		fail_msg("%s", cJSON_PrintUnformatted(answer));
	n = (unsigned int)far->valuedouble;
	cluster_ok(&w->c, w->engine[FINDER], "{\"cmd\":\"chunk.release\",\"hold\":%.0f}",
		   cJSON_GetObjectItem(answer, "hold")->valuedouble);
	cJSON_Delete(answer);
	return n;
}

static struct store_home home(struct world *w)
{
	struct store_home f;

	home_figures(node_store(w, HOME)->home, &f);
	return f;
}

static struct store_homes told(struct world *w, unsigned int node)
{
	struct store_figures f;

	store_figures(node_store(w, node), &f);
	return f.homes;
}

/* ---- what a daemon says ---- */

static struct remote *remote_to(struct world *w, unsigned int from, unsigned int to)
{
	struct remote *remote;

	list_foreach(remote, handshake_remotes(w->c.nodes[from].kvd.handshake), link) {
		if (strcmp(remote->peer->endpoint, w->c.nodes[to].endpoint) == 0)
			return remote;
	}
	fail_msg("no peer");
	return NULL;
}

static bool is_up(struct world *w, unsigned int from, unsigned int to)
{
	return sm_state(&remote_to(w, from, to)->peer->sm) == PEER_UP;
}

static void note(struct world *w, unsigned int from, bool anew, unsigned int first,
		 unsigned int count, bool come)
{
	uint8_t notes[CHUNKS * 16], id[STORE_ID_BYTES];
	const struct store_space *space =
		list_first(&node_store(w, from)->spaces, struct store_space, link);
	struct wire_index_update msg = {.anew = anew};
	struct cursor out;

	cursor_write(&out, notes, sizeof(notes));
	for (unsigned int i = first; i < first + count; i++) {
		struct home_key key;

		id_of(i, id);
		key = home_key_make(home_key_space(space->digest), id);
		cursor_put_u64(&out, key.id);
		cursor_put_u64(&out, key.space | (come ? HOMES_PUT : 0));
	}
	msg.notes.data = notes;
	msg.notes.len = out.pos;
	assert_int_equal(handshake_send_index_update(remote_to(w, from, HOME), &msg), 0);
	cluster_run(&w->c, 10 * LOOP_NS_PER_MS);
}

/* ---- cases ---- */

static void chunks_updated_are_found(void **state)
{
	struct world *w = *state;

	assert_int_equal(told(w, FINDER).up, 1);
	assert_int_equal(far_of(w, CHUNKS, 1000), 0);
	put(w, 1, 0, CHUNKS);
	put(w, 2, 0, 5);
	assert_int_equal(home(w).used, CHUNKS + 5);
	assert_int_equal(home(w).holders, NODES); /* the home itself, and who has none */
	assert_int_equal(far_of(w, CHUNKS, 1000), CHUNKS);
	assert_int_equal(told(w, FINDER).dials, 2);
	assert_int_equal(far_of(w, 4, 1000), 4);
	drop(w, 1, 7, CHUNKS - 7);
	drop(w, 1, 0, 0 + 1);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(home(w).used, 6 + 5);
	assert_int_equal(far_of(w, CHUNKS, 1000), 7); /* five at node 2, two at 1 */
	cluster_run(&w->c, SUMS_NS);
	assert_int_equal(home(w).again, 0);
}

static void holder_dead_is_removed_at_once(void **state)
{
	struct world *w = *state;

	put(w, 1, 0, CHUNKS);
	put(w, 2, 0, 5);
	cluster_crash(&w->c, 1, MEM_CRASH_POWER);
	cluster_run(&w->c, 20 * LOOP_NS_PER_S);
	assert_int_equal(home(w).used, 5);
	assert_int_equal(far_of(w, CHUNKS, 1000), 5);
}

static void false_notes_cost_a_miss_and_heal(void **state)
{
	struct world *w = *state;

	put(w, 1, 0, 3);
	note(w, 2, false, 0, CHUNKS, true); /* it has none of them */
	assert_int_equal(home(w).used, 3 + CHUNKS);
	assert_int_equal(far_of(w, CHUNKS, 1000), 3);
	note(w, 1, false, 0, 3, false); /* a holder may lie about itself */
	assert_int_equal(home(w).used, CHUNKS);
	assert_int_equal(far_of(w, CHUNKS, 1000), 0);
	cluster_run(&w->c, SUMS_NS);
	assert_int_equal(home(w).again, 2);
	assert_int_equal(home(w).used, 3);
	assert_int_equal(far_of(w, CHUNKS, 1000), 3);
	cluster_run(&w->c, SUMS_NS);
	assert_int_equal(home(w).again, 2);
}

static void update_repeated_counts_once(void **state)
{
	struct world *w = *state;

	put(w, 1, 0, 3);
	note(w, 1, false, 0, 3, true);
	assert_int_equal(home(w).used, 3);
	note(w, 2, false, 0, 3, false); /* went, and never came */
	assert_int_equal(home(w).used, 3);
	for (unsigned int i = 0; i < 100; i++)
		note(w, 2, true, 0, 3, true); /* anew, and anew */
	assert_in_range(home(w).used, 3, 6);
	cluster_run(&w->c, 2 * SUMS_NS);
	assert_int_equal(home(w).used, 3);
	assert_int_equal(far_of(w, CHUNKS, 1000), 3);
}

static void messages_out_of_form_end_the_peering(void **state)
{
	static const uint8_t bytes[1024];
	struct world *w = *state;
	const struct wire_index_update odd = {.notes = {.data = bytes, .len = 17}};
	const struct wire_index_query many = {.ids = {.data = bytes, .len = 33 * 8}};

	assert_int_equal(handshake_send_index_update(remote_to(w, 1, HOME), &odd), 0);
	cluster_run(&w->c, 10 * LOOP_NS_PER_MS);
	assert_false(is_up(w, 1, HOME));
	assert_int_equal(handshake_send_index_query(remote_to(w, 2, HOME), &many), 0);
	cluster_run(&w->c, 10 * LOOP_NS_PER_MS);
	assert_false(is_up(w, 2, HOME));
	cluster_run(&w->c, 10 * LOOP_NS_PER_S);
	assert_true(is_up(w, 1, HOME) && is_up(w, 2, HOME));
	assert_int_equal(home(w).holders, NODES);
}

static void replies_unexpected_are_ignored(void **state)
{
	struct world *w = *state;
	uint64_t before = told(w, 1).resyncs;
	const struct wire_index_digest_ack ack = {.again = 1};
	const struct wire_index_reply found = {.ask = 77};

	put(w, 1, 0, 3);
	for (unsigned int i = 0; i < 3; i++) {
		assert_int_equal(
			handshake_send_index_digest_ack(remote_to(w, HOME, 1), &ack), 0);
		assert_int_equal(
			handshake_send_index_reply(remote_to(w, HOME, 1), &found), 0);
		assert_int_equal(
			handshake_send_index_reply(remote_to(w, 2, HOME), &found), 0);
	}
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(told(w, 1).resyncs, before);
	assert_int_equal(far_of(w, CHUNKS, 1000), 3);
}

/* ---- a home that lies ---- */

static void answer(struct remote *remote, uint64_t ask, const uint8_t *bytes, size_t len)
{
	const struct wire_index_reply msg = {.ask = ask,
					     .holders = {.data = bytes, .len = len}};

	assert_int_equal(handshake_send_index_reply(remote, &msg), 0);
}

/* Names daemons that there are not, of all chunks. */
static void name_many(struct remote *remote, const struct wire_index_query *msg)
{
	static unsigned int turn;
	uint8_t bytes[8192];
	char endpoint[64];
	struct cursor out;

	cursor_write(&out, bytes, sizeof(bytes));
	cursor_put_u32(&out, 100);
	for (unsigned int i = 0; i < 100; i++) {
		snprintf(endpoint, sizeof(endpoint), "tcp://victim%u:%u", i, 1 + turn);
		cursor_put_str(&out, endpoint);
	}
	turn++;
	for (unsigned int i = 0; i < msg->ids.len / 8; i++) {
		cursor_put_u8(&out, 200);
		for (unsigned int k = 0; k < 200; k++)
			cursor_put_u8(&out, (uint8_t)(k + turn));
	}
	assert_false(out.bad);
	answer(remote, msg->ask, bytes, out.pos);
	answer(remote, msg->ask, bytes, out.pos); /* twice */
}

static void index_node_naming_random_endpoints_causes_few_dials(void **state)
{
	struct world *w = *state;
	uint64_t before = told(w, FINDER).dials;

	put(w, 1, 0, 3);
	liar = name_many;
	for (unsigned int i = 0; i < 20; i++)
		assert_int_equal(far_of(w, CHUNKS, 20), 0); /* 0.4 s of asking in all */
	assert_true(told(w, FINDER).dials - before <= 16);
	assert_true(told(w, FINDER).dials_refused > 0);
	assert_true(is_up(w, FINDER, HOME));
	cluster_run(&w->c, 2 * LOOP_NS_PER_S);
	liar = NULL;
	assert_int_equal(far_of(w, CHUNKS, 1000), 3);
}

static void name_victims(struct cursor *out, unsigned int from)
{
	char endpoint[64];

	for (unsigned int i = from; i < from + HOMES_NEW_MAX; i++) {
		snprintf(endpoint, sizeof(endpoint), "tcp://victim%u:1", i);
		cursor_put_str(out, endpoint);
	}
}

/* Of all chunks as many as it may, but of the last one the truth. */
static const char *holder_of_last;

static void name_the_true_one_last(struct remote *remote,
				   const struct wire_index_query *msg)
{
	struct home_key last;
	uint8_t bytes[8192], id[STORE_ID_BYTES];
	struct cursor out, in;
	uint64_t of_last = 0;

	id_of(CHUNKS - 1, id);
	last = home_key_make(msg->space, id);
	cursor_read(&in, msg->ids.data, msg->ids.len);
	for (unsigned int i = 0; cursor_left(&in); i++)
		of_last |= (uint64_t)(cursor_get_u64(&in) == last.id) << i;
	assert_true(of_last);
	cursor_write(&out, bytes, sizeof(bytes));
	cursor_put_u32(&out, HOMES_NEW_MAX + 1);
	if (of_last & 1)
		cursor_put_str(&out, holder_of_last);
	name_victims(&out, 0);
	if (!(of_last & 1))
		cursor_put_str(&out, holder_of_last);
	for (unsigned int i = 0; i < msg->ids.len / 8; i++) {
		bool is_last = of_last >> i & 1;

		cursor_put_u8(&out, is_last ? 1 : HOMES_HOLDERS_MAX);
		for (unsigned int k = 0; k < (is_last ? 1 : HOMES_HOLDERS_MAX); k++)
			cursor_put_u8(&out, (uint8_t)(is_last && !(of_last & 1)
							      ? HOMES_NEW_MAX
							      : k + !is_last));
	}
	assert_false(out.bad);
	answer(remote, msg->ask, bytes, out.pos);
}

static void holder_of_most_is_found_among_many_of_the_start(void **state)
{
	struct world *w = *state;

	put(w, 1, 0, CHUNKS);
	holder_of_last = w->c.nodes[1].endpoint;
	liar = name_the_true_one_last;
	assert_int_equal(far_of(w, CHUNKS, 1000), CHUNKS);
}

static void name_the_requester(struct remote *remote, const struct wire_index_query *msg)
{
	uint8_t bytes[1024];
	struct cursor out;

	cursor_write(&out, bytes, sizeof(bytes));
	cursor_put_u32(&out, 3);
	cursor_put_str(&out, remote->peer->endpoint);
	cursor_put_str(&out, "");
	cursor_put_str(&out, "no endpoint at all");
	for (unsigned int i = 0; i < msg->ids.len / 8; i++) {
		cursor_put_u8(&out, 3);
		cursor_put_u8(&out, 0);
		cursor_put_u8(&out, 1);
		cursor_put_u8(&out, 2);
	}
	answer(remote, msg->ask, bytes, out.pos);
}

static void index_reply_without_other_holder_is_a_miss(void **state)
{
	struct world *w = *state;

	put(w, FINDER, 0, 2);
	liar = name_the_requester;
	assert_int_equal(far_of(w, CHUNKS, 1000), 0);
	assert_int_equal(told(w, FINDER).dials, 0);
	assert_true(is_up(w, FINDER, HOME));
}

static void say_half(struct remote *remote, const struct wire_index_query *msg)
{
	uint8_t bytes[] = {200, 0, 0, 0, 1};

	answer(remote, msg->ask, bytes, sizeof(bytes));
}

static void answer_out_of_form_is_a_miss_and_the_peering_s_end(void **state)
{
	struct world *w = *state;

	liar = say_half;
	assert_int_equal(far_of(w, CHUNKS, 1000), 0);
	cluster_run(&w->c, 10 * LOOP_NS_PER_MS);
	assert_false(is_up(w, FINDER, HOME));
}

static void say_nothing(struct remote *remote, const struct wire_index_query *msg)
{
	(void)remote;
	(void)msg;
}

static void index_node_silent_times_out(void **state)
{
	struct world *w = *state;

	put(w, FINDER, 0, 2);
	liar = say_nothing;
	assert_int_equal(far_of(w, CHUNKS, 100), 0);
	assert_int_equal(told(w, FINDER).late, 1);
}

static uint64_t hold_takes_ms(struct world *w)
{
	struct loop *loop = w->c.nodes[FINDER].kvd.loop;
	uint64_t begin_ns = loop_clock_ns(loop);

	assert_int_equal(far_of(w, CHUNKS, 2000), 0);
	return (loop_clock_ns(loop) - begin_ns) / LOOP_NS_PER_MS;
}

/* The first query waits for it; the one that tries it again does not. */
static void index_node_silent_has_one_query_waiting(void **state)
{
	struct world *w = *state;

	liar = say_nothing;
	assert_in_range(hold_takes_ms(w), 1000, 1100);
	for (unsigned int i = 0; i < 12; i++) {
		cluster_run(&w->c, LOOP_NS_PER_S);
		assert_in_range(hold_takes_ms(w), 0, 50);
	}
	assert_int_equal(told(w, FINDER).late, 1);
	assert_int_equal(told(w, FINDER).asks, 2);
	liar = NULL;
	cluster_run(&w->c, 30 * LOOP_NS_PER_S);
	put(w, 1, 0, CHUNKS);
	far_of(w, CHUNKS, 2000); /* it answers */
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(far_of(w, CHUNKS, 2000), CHUNKS);
}

/* It is no peer, and the question that tries it waits for nothing: the dial goes on. */
static void holder_suspended_is_dialled_for_its_trial(void **state)
{
	const struct peer_client client = {.uid = 0};
	struct world *w = *state;
	struct handshake *hs = w->c.nodes[FINDER].kvd.handshake;
	struct remote *holder;

	put(w, 1, 0, CHUNKS);
	assert_int_equal(handshake_reach(hs, w->c.nodes[1].endpoint, &client, &holder),
			 0);
	far_late(node_store(w, FINDER)->far, holder, "the test");
	handshake_release(holder);
	assert_int_equal(far_of(w, CHUNKS, 1000), 0);
	cluster_run(&w->c, 11 * LOOP_NS_PER_S);
	assert_int_equal(told(w, FINDER).dials, 0);
	assert_int_equal(far_of(w, CHUNKS, 1000), 0);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(far_of(w, CHUNKS, 1000), CHUNKS);
}

/* ---- want of memory, of room ---- */

static void hold_by_homes_without_one_allocation_is_a_miss_or_refused(void **state)
{
	struct world *w = *state;
	bool hit = true;
	char text[2048];

	put(w, 1, 0, CHUNKS);
	snprintf(text, sizeof(text),
		 "{\"cmd\":\"chunk.hold\",\"space\":%llu,%s,\"remote_ms\":1000}",
		 (unsigned long long)w->space[FINDER], ids_text(0, CHUNKS));
	for (uint64_t nth = 1; hit; nth++) {
		struct cluster_lack lack = {.nth = nth, .after_ns = 10 * LOOP_NS_PER_MS};
		cJSON *got = cluster_call_fd(&w->c, w->engine[FINDER], -1, &lack, text);
		const cJSON *hold = cJSON_GetObjectItem(got, "hold");

		assert_true(nth < LIMIT);
		hit = lack.used >= nth;
		if (cJSON_IsNumber(hold))
			cluster_ok(&w->c, w->engine[FINDER],
				   "{\"cmd\":\"chunk.release\",\"hold\":%.0f}",
				   hold->valuedouble);
		cJSON_Delete(got);
		cluster_run(&w->c, 20 * LOOP_NS_PER_S);
		assert_int_equal(far_of(w, CHUNKS, 1000), CHUNKS);
	}
}

static void updates_without_memory_are_sent_later(void **state)
{
	struct world *w = *state;
	bool hit = true;

	for (uint64_t nth = 1; hit; nth++) {
		assert_true(nth < LIMIT);
		put(w, 1, 0, CHUNKS);
		drop(w, 1, 3, CHUNKS - 3);
		mem_fail_at(nth); /* the notes wait yet */
		cluster_run(&w->c, LOOP_NS_PER_S);
		hit = mem_count() >= nth;
		mem_fail_at(0);
		cluster_run(&w->c, 2 * SUMS_NS);
		assert_int_equal(home(w).used, node_store(w, 1)->chunk_count);
		drop(w, 1, 0, CHUNKS);
	}
}

static void on_list(struct world *w, const char *endpoints)
{
	for (unsigned int i = 0; i < NODES; i++)
		members_set(homes_members(node_store(w, i)->homes), endpoints);
	cluster_run(&w->c, LOOP_NS_PER_S);
}

static void index_nodes_changed_get_full_update(void **state)
{
	struct world *w = *state;
	struct store_home two;
	char both[200];

	put(w, 1, 0, CHUNKS);
	snprintf(both, sizeof(both), "%s %s", w->c.nodes[2].endpoint,
		 w->c.nodes[HOME].endpoint);
	on_list(w, both);
	home_figures(node_store(w, 2)->home, &two);
	assert_true(two.used > 0 && two.used < CHUNKS);
	assert_int_equal(home(w).used + two.used, CHUNKS);
	assert_int_equal(far_of(w, CHUNKS, 1000), CHUNKS);
	on_list(w, w->c.nodes[2].endpoint);
	home_figures(node_store(w, 2)->home, &two);
	assert_int_equal(two.used, CHUNKS);
	assert_int_equal(far_of(w, CHUNKS, 1000), CHUNKS);
	on_list(w, "");
	assert_int_equal(far_of(w, CHUNKS, 1000), 0);
}

#define MANY 7000u

/* They stand in the index of node 1 without bytes. */
static struct store_chunk *many_chunks(struct world *w)
{
	struct store *store = node_store(w, 1);
	struct store_space *space = list_first(&store->spaces, struct store_space, link);
	struct store_chunk *chunks = calloc(MANY, sizeof(*chunks));

	assert_non_null(chunks);
	for (unsigned int i = 0; i < MANY; i++) {
		struct store_chunk **bucket;

		chunks[i].space = space;
		chunks[i].shown = STORE_IN_MEMORY;
		memcpy(chunks[i].id, &i, sizeof(i));
		chunks[i].item.key = home_mix(i);
		bucket = &store->buckets[chunks[i].item.key & store->bucket_mask];
		chunks[i].next = *bucket;
		*bucket = &chunks[i];
	}
	return chunks;
}

static unsigned int chunk_goes(struct world *w, struct store_chunk *chunk)
{
	if (!chunk || !chunk->shown)
		return 0;
	chunk->shown = 0;
	homes_tell(node_store(w, 1)->homes, chunk, false);
	return 1;
}

static unsigned int chunks_go(struct world *w, struct store_chunk *chunks,
			      unsigned int from, unsigned int count)
{
	unsigned int gone = 0;

	for (unsigned int i = from; i < from + count; i++)
		gone += chunk_goes(w, &chunks[i]);
	return gone;
}

/* Those that the walk comes to next, and has just left. */
static unsigned int chunks_go_beside_the_walk(struct world *w)
{
	const struct store *store = node_store(w, 1);
	unsigned int gone = 0;

	for (unsigned int i = 0; i < 2; i++) {
		uint64_t at = store->homes->ones[i].walk_at;

		if (at == 0 || at > store->bucket_mask)
			continue;
		gone += chunk_goes(w, store->buckets[at]);
		gone += chunk_goes(w, store->buckets[at - 1]);
	}
	return gone;
}

static void updates_beyond_line_capacity_are_sent_eventually(void **state)
{
	const struct mem_path path = {.delay_ns = 50 * LOOP_NS_PER_MS};
	struct world *w = *state;
	struct store *store = node_store(w, 1);
	struct store_chunk *chunks = many_chunks(w);
	struct store_home two;
	unsigned int gone = 0, beside = 0;
	uint64_t resyncs;
	char both[200];

	mem_hub_set_default(w->c.links, &path);
	mem_hub_set_queue_max(w->c.links, 2);
	snprintf(both, sizeof(both), "%s %s", w->c.nodes[HOME].endpoint,
		 w->c.nodes[2].endpoint);
	members_set(homes_members(store->homes), both);
	for (unsigned int turn = 0; turn < 40; turn++) { /* while all is being told */
		gone += chunks_go(w, chunks, turn * 50, 50);
		beside += chunks_go_beside_the_walk(w);
		cluster_run(&w->c, 10 * LOOP_NS_PER_MS);
	}
	cluster_run(&w->c, 10 * LOOP_NS_PER_S);
	home_figures(node_store(w, 2)->home, &two);
	assert_true(beside > 4);
	assert_in_range(two.used, 1000, MANY - 3000);
	assert_int_equal(home(w).used + two.used, MANY - gone - beside);
	cluster_run(&w->c, 2 * SUMS_NS);
	assert_int_equal(home(w).again, 0);
	resyncs = told(w, 1).resyncs;
	chunks_go(w, chunks, 2000, MANY - 2000);	   /* more than queues hold */
	assert_int_equal(told(w, 1).resyncs, resyncs + 2); /* all anew */
	resyncs += 2;
	cluster_run(&w->c, 10 * LOOP_NS_PER_S);
	home_figures(node_store(w, 2)->home, &two);
	assert_int_equal(home(w).used + two.used, 0);
	cluster_run(&w->c, 2 * SUMS_NS);
	assert_int_equal(home(w).again, 0);
	assert_int_equal(told(w, 1).resyncs, resyncs);
	memset(store->buckets, 0, (store->bucket_mask + 1) * sizeof(*store->buckets));
	free(chunks);
}

/* The second of the list keeps no directory: who asks it does so once. */
static void daemon_without_index_is_not_queried_again(void **state)
{
	struct world *w = *state;
	char both[200];

	put(w, 1, 0, CHUNKS);
	home_free(mem_steal(node_store(w, 2)->home));
	snprintf(both, sizeof(both), "%s %s", w->c.nodes[HOME].endpoint,
		 w->c.nodes[2].endpoint);
	members_set(homes_members(node_store(w, 1)->homes), both);
	members_set(homes_members(node_store(w, FINDER)->homes), both);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(told(w, 1).up, 2);
	assert_int_equal(told(w, FINDER).up, 2);
	assert_int_equal(far_of(w, CHUNKS, 1000), CHUNKS); /* the other one names it */
	assert_int_equal(told(w, FINDER).up, 1);
	assert_int_equal(told(w, FINDER).late, 0);
	cluster_run(&w->c, SUMS_NS);
	assert_int_equal(told(w, 1).up, 1);
	assert_int_equal(far_of(w, CHUNKS, 1000), CHUNKS);
}

static void index_node_not_dialable_is_dialled_later(void **state)
{
	struct world *w = *state;
	struct store_home two;

	put(w, 1, 0, CHUNKS);
	mem_fail_at(1);
	members_set(homes_members(node_store(w, 1)->homes), w->c.nodes[2].endpoint);
	assert_true(mem_count() >= 1);
	mem_fail_at(0);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(told(w, 1).up, 0);
	cluster_run(&w->c, SUMS_NS);
	assert_int_equal(told(w, 1).up, 1);
	home_figures(node_store(w, 2)->home, &two);
	assert_int_equal(two.used, CHUNKS);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(chunks_updated_are_found),
		CASE(holder_dead_is_removed_at_once),
		CASE(false_notes_cost_a_miss_and_heal),
		CASE(update_repeated_counts_once),
		CASE(messages_out_of_form_end_the_peering),
		CASE(replies_unexpected_are_ignored),
		CASE(index_node_naming_random_endpoints_causes_few_dials),
		CASE(holder_of_most_is_found_among_many_of_the_start),
		CASE(index_reply_without_other_holder_is_a_miss),
		CASE(answer_out_of_form_is_a_miss_and_the_peering_s_end),
		CASE(index_node_silent_times_out),
		CASE(index_node_silent_has_one_query_waiting),
		CASE(holder_suspended_is_dialled_for_its_trial),
		CASE(hold_by_homes_without_one_allocation_is_a_miss_or_refused),
		CASE(updates_without_memory_are_sent_later),
		CASE(index_nodes_changed_get_full_update),
		CASE(updates_beyond_line_capacity_are_sent_eventually),
		CASE(daemon_without_index_is_not_queried_again),
		CASE(index_node_not_dialable_is_dialled_later),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests_name("homes", tests, NULL, NULL);
}
