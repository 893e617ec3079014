/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Query rows with chunks whose parts are of several ranks, in virtual time: each head is
 * read from the rank that has it, here and at another daemon, and results are as those of
 * one rank with all heads.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/base/account.h"
#include "tests/lib/attend_world.h"

#define SOON (20 * LOOP_NS_PER_MS)
#define RANKS_MOST 8u
#define TOKENS (AW_CHUNKS * AW_CHUNK)

static struct cache ranks[RANKS_MOST];
static unsigned int rank_count;

/* Messages to the holder: rows of each, and which KV heads were asked for. */
static struct {
	unsigned int count, rows, heads[8];
	struct wire_attend last;
	uint8_t bytes[4][1 << 18];
	bool lost; /* the last is kept from the holder */
} asked;

static void keep_blob(struct wire_blob *blob, unsigned int i)
{
	assert_true(blob->len <= sizeof(asked.bytes[i]));
	if (blob->len)
		memcpy(asked.bytes[i], blob->data, blob->len);
	blob->data = asked.bytes[i];
}

static bool tap(unsigned int node, const struct wire_header *h, struct cursor body,
		void *arg)
{
	struct cursor in;
	struct form form;

	(void)arg;
	if (node != AW_HOLDER || h->type != WIRE_T_ATTEND)
		return false;
	assert_int_equal(wire_attend_get(&body, &asked.last), 0);
	keep_blob(&asked.last.form, 0);
	keep_blob(&asked.last.rope, 1);
	keep_blob(&asked.last.select, 2);
	keep_blob(&asked.last.q, 3);
	cursor_read(&in, asked.last.form.data, asked.last.form.len);
	assert_int_equal(form_get(&in, &form), 0);
	for (unsigned int i = 0; i < form.shape.kv_heads; i++)
		asked.heads[form.first_head + i]++;
	asked.count++;
	asked.rows += asked.last.rows;
	return asked.lost && form.first_head > 0;
}

static int setup(void **state)
{
	memset(&asked, 0, sizeof(asked));
	rank_count = 0;
	attend_world_tap = tap;
	return attend_world_setup(state);
}

static int teardown(void **state)
{
	int r = attend_world_teardown(state);

	while (rank_count > 0)
		cache_close(&ranks[--rank_count]);
	return r;
}

/* An engine of the node has heads [begin, begin + heads) of the same values, and puts
 * chunks `first` to `first + AW_CHUNKS`, or fewer. */
static void rank_puts(struct attend_world *w, unsigned int node, unsigned int first,
		      unsigned int begin, unsigned int heads)
{
	struct session *engine = w->engine[node];
	struct cache whole = w->cache[node], *cache = &ranks[rank_count];
	uint64_t space = w->space[node];
	char name[16];

	assert_true(rank_count < RANKS_MOST);
	snprintf(name, sizeof(name), "rank%u", rank_count++);
	w->engine[node] = cluster_engine(&w->c, node, name);
	*cache = cluster_geometry;
	cache->units = heads;
	cache->first_unit = begin;
	cluster_cache(&w->c, w->engine[node], name, 0, cache);
	for (unsigned int i = 0; i < cache->layers * 2 * TOKENS; i++) {
		unsigned int layer = i / TOKENS / 2, field = i / TOKENS % 2,
			     page = i % TOKENS / cache->page_tokens,
			     token = i % cache->page_tokens;

		memcpy(cache_at(cache, layer, field, page, token, begin, 0),
		       cache_at(&w->cache[0], layer, field, page, token, begin, 0),
		       heads * cache->unit_bytes);
	}
	w->cache[node] = *cache;
	attend_world_put(w, node, first, AW_CHUNKS, 4);
	w->engine[node] = engine;
	w->cache[node] = whole;
	w->space[node] = space;
}

static void posted(struct attend_world *w, const struct kvd_ring_part *parts,
		   unsigned int count, const uint32_t *select, unsigned int numbers)
{
	memset(&asked, 0, sizeof(asked));
	attend_world_rows(w, 0, 3);
	memset(attend_world_floats(w, 0, w->o), 0x5a, w->seat_bytes - w->o);
	attend_world_post(w, 0, 2, parts, count, select, numbers);
	cluster_run(&w->c, SOON);
}

/* With bounds of uneven ranks, that overlap: begin, heads. */
static void heads_are_read_from_the_ranks_that_have_them(void **state)
{
	static const unsigned int shards[][RANKS_MOST + 1] = {
		{0, 2, 2, 2},
		{0, 1, 1, 3},
		{0, 3, 1, 3},
		{0, 1, 1, 1, 2, 1, 3, 1},
	};
	struct attend_world *w = *state;

	for (unsigned int i = 0; i < ARRAY_LEN(shards); i++) {
		unsigned int first = 100 + 10 * i, legs = i == 3 ? 4 : 2;

		for (unsigned int node = 0; node < 2; node++) {
			struct kvd_ring_part part;

			for (unsigned int r = 0; r < legs; r++)
				rank_puts(w, node, first + 50 * node, shards[i][2 * r],
					  shards[i][2 * r + 1]);
			part = attend_world_part(attend_world_hold(
				w, AW_REQUESTER, first + 50 * node, AW_CHUNKS, 600000));
			assert_true(part.hold != 0);
			posted(w, &part, 1, NULL, 0);
			attend_world_right(w, 0, 2, TOKENS, NULL, 0);
			assert_int_equal(asked.count, node == AW_HOLDER ? legs : 0);
			assert_int_equal(asked.rows, node == AW_HOLDER ? AW_ROWS : 0);
			for (unsigned int h = 0; h < AW_HEADS; h++)
				assert_int_equal(asked.heads[h], node == AW_HOLDER);
		}
		while (rank_count > 0) {
			cluster_engine_dies(&w->c, ranks[--rank_count].session);
			cache_close(&ranks[rank_count]);
		}
	}
}

/* Of some rows, selected, merged with a whole rank's, and of results in bf16. */
static void rows_of_ranks_are_merged_with_others(void **state)
{
	struct attend_world *w = *state;
	const uint32_t select[4] = {3, 40, UINT32_MAX, 63};
	struct kvd_ring_part parts[3];

	rank_puts(w, AW_HOLDER, 101, 0, 2);
	rank_puts(w, AW_HOLDER, 101, 2, 2);
	parts[0] = attend_world_part(
		attend_world_hold(w, AW_REQUESTER, 101, AW_CHUNKS, 600000));
	parts[0].per_token = 2;
	posted(w, parts, 1, select, 4);
	attend_world_right(w, 0, 2, 0, select, 2);
	parts[0].per_token = 0;
	parts[2] = parts[0];
	parts[0].count = 2;
	parts[1] = attend_world_part(w->near);
	parts[1].first = parts[1].count = 2;
	parts[1].rows = AW_HEADS; /* the second query token has the rest there */
	parts[2].first = parts[2].count = 2;
	parts[2].row = parts[2].rows = AW_HEADS;
	posted(w, parts, 3, NULL, 0);
	attend_world_right(w, 0, 2, TOKENS, NULL, 0);
	assert_int_equal(asked.count, 4);
	w->attend = attend_world_open(w, ",'out_type':'bf16'");
	posted(w, parts, 3, NULL, 0);
	attend_world_right(w, 0, 2, TOKENS, NULL, 0);
}

/* Many rows are read in turns, wait for others' replies, and are several messages. */
static void many_rows_of_ranks_are_cut_by_rank_then_by_rows(void **state)
{
	struct attend_world *w = *state;
	const uint64_t *held = &w->engine[AW_REQUESTER]->account->bytes[ACCOUNT_ATTENDS];
	struct kvd_ring_part part, twice[2];
	uint64_t before;

	rank_puts(w, AW_HOLDER, 101, 0, 3);
	rank_puts(w, AW_HOLDER, 101, 3, 1);
	part = attend_world_part(
		attend_world_hold(w, AW_REQUESTER, 101, AW_CHUNKS, 600000));
	w->rows = part.rows = 4096;
	w->attend = attend_world_open(w, "");
	loop_virtual_parts(w->c.loop, 1);
	before = *held;
	twice[0] = twice[1] = part;
	posted(w, twice, 2, NULL, 0);
	cluster_run(&w->c, LOOP_NS_PER_S);
	loop_virtual_parts(w->c.loop, 0);
	assert_int_equal(*held, before);
	assert_int_equal(asked.rows, 2 * 4096);
	assert_int_equal(attend_world_state(w, 0), KVD_SUCCESS);
	for (unsigned int i = 0; i < 4096; i++)
		attend_world_floats(w, 0, w->l)[i] /= 2;
	w->rows = 64;
	attend_world_right(w, 0, 2, TOKENS, NULL, 0);
}

/* One rank's answer is all that lacks, or an error, or another's heads are forged: the
 * post fails, and its seat is still. */
static void without_one_rank_nothing_succeeds(void **state)
{
	struct attend_world *w = *state;
	struct wire_attention_result no = {.code = ERR_NOTFOUND,
					   .text = "a chunk is missing"};
	struct kvd_ring_part part;
	struct wire_attend forged;

	rank_puts(w, AW_HOLDER, 101, 0, 2);
	/* the other rank put nothing: no chunk is found */
	part = attend_world_part(
		attend_world_hold(w, AW_REQUESTER, 101, AW_CHUNKS, 600000));
	posted(w, &part, 1, NULL, 0);
	assert_int_equal(attend_world_state(w, 0), KVD_FAILED);
	assert_int_equal(asked.count, 0);
	rank_puts(w, AW_HOLDER, 101, 2, 2);
	part = attend_world_part(
		attend_world_hold(w, AW_REQUESTER, 101, AW_CHUNKS, 600000));
	posted(w, &part, 1, NULL, 0);
	attend_world_right(w, 0, 2, TOKENS, NULL, 0);
	forged = asked.last; /* of heads 2 and 3: the first rank's pool has others */
	asked.count = 0;
	asked.lost = true;
	memset(attend_world_floats(w, 0, w->o), 0x5a, w->seat_bytes - w->o);
	attend_world_post(w, 0, 2, &part, 1, NULL, 0);
	cluster_run(&w->c, SOON);
	assert_int_equal(attend_world_state(w, 0), KVD_TRANSFERRING);
	assert_true(asked.last.pool == forged.pool);
	no.attend = asked.last.attend;
	assert_int_equal(
		handshake_send_attention_result(attend_world_remote(w, AW_HOLDER), &no),
		0);
	cluster_run(&w->c, SOON);
	assert_int_equal(attend_world_state(w, 0), KVD_FAILED);
	assert_int_equal(attend_world_error(w, 0), ERR_NOTFOUND);
	for (uint64_t i = 0; i < (w->seat_bytes - w->o) / 4; i++)
		assert_memory_equal(attend_world_floats(w, 0, w->o) + i,
				    "\x5a\x5a\x5a\x5a", 4);
	attend_world_quiet(w);
}

/* A rank's pool has its own heads alone, whatever a message says. */
static void heads_of_another_rank_are_refused(void **state)
{
	struct attend_world *w = *state;
	const struct attends *holder = attends_of(&w->c.nodes[AW_HOLDER].kvd);
	struct kvd_ring_part part;
	struct wire_attend forged;
	uint64_t refused, first;

	rank_puts(w, AW_HOLDER, 101, 0, 2);
	rank_puts(w, AW_HOLDER, 101, 2, 2);
	part = attend_world_part(
		attend_world_hold(w, AW_REQUESTER, 101, AW_CHUNKS, 600000));
	part.count = 1;
	posted(w, &part, 1, NULL, 0);
	assert_int_equal(attend_world_state(w, 0), KVD_SUCCESS);
	forged = asked.last;
	forged.attend = 1000;
	refused = holder->figures.refused;
	first = holder->figures.served;
	for (unsigned int begin = 0; begin < 6; begin++) { /* its pool has 2 and 3 */
		asked.bytes[0][12] = (uint8_t)begin;
		forged.form.data = asked.bytes[0];
		assert_int_equal(handshake_send_attend(
					 attend_world_remote(w, AW_REQUESTER), &forged),
				 0);
		cluster_run(&w->c, SOON);
		memset(&asked.bytes[0][12], 0, 4);
	}
	assert_int_equal(holder->figures.refused - refused, 5);
	assert_int_equal(holder->figures.served - first, 1);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(heads_are_read_from_the_ranks_that_have_them),
		CASE(rows_of_ranks_are_merged_with_others),
		CASE(many_rows_of_ranks_are_cut_by_rank_then_by_rows),
		CASE(without_one_rank_nothing_succeeds),
		CASE(heads_of_another_rank_are_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
