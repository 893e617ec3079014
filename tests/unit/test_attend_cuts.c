/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one post is cut into, in virtual time: how many calls and messages it may be,
 * calls of bounded work by many tokens, and what those of one daemon share.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/base/account.h"
#include "daemon/loop/offload.h"
#include "daemon/session/session.h"
#include "daemon/store/store_kv.h"
#include "tests/lib/attend_world.h"

#define SOON (20 * LOOP_NS_PER_MS)
#define ROWS 4096u
#define TOKENS (AW_LONG_CHUNKS * AW_LONG)

/* Messages that came to the holder. */
static struct {
	unsigned int count;
	uint64_t most; /* rows x tokens of one */
} asked;

static bool tap(unsigned int node, const struct wire_header *h, struct cursor body,
		void *arg)
{
	struct wire_attend ask;

	(void)arg;
	if (node != AW_HOLDER || h->type != WIRE_T_ATTEND)
		return false;
	assert_int_equal(wire_attend_get(&body, &ask), 0);
	asked.count++;
	if (ask.rows * ask.tokens > asked.most)
		asked.most = ask.rows * ask.tokens;
	return false;
}

static int setup(void **state)
{
	struct attend_world *w;

	attend_world_tap = tap;
	attend_world_setup(state);
	w = *state;
	w->rows = ROWS;
	w->attend = attend_world_open(w, "");
	memset(&asked, 0, sizeof(asked));
	return 0;
}

static struct kvd_ring_part all_rows(uint64_t hold, unsigned int chunks)
{
	return (struct kvd_ring_part){.hold = hold, .rows = ROWS, .count = chunks};
}

/* With all chunks of attend_world_long(). */
static struct kvd_ring_part long_rows(struct attend_world *w, unsigned int first)
{
	return all_rows(attend_world_hold(w, AW_REQUESTER, first, AW_LONG_CHUNKS, 600000),
			AW_LONG_CHUNKS);
}

/* Each query token is the first one's. */
static void rows_alike(struct attend_world *w)
{
	uint8_t *q = (uint8_t *)attend_world_floats(w, 0, w->q);
	size_t one = (size_t)AW_HEADS * AW_DIMS * 2;

	attend_world_rows(w, 0, 5);
	for (unsigned int i = 1; i < ROWS / AW_HEADS; i++)
		memcpy(q + i * one, q, one);
}

static void rows_alike_are_right(struct attend_world *w)
{
	const float *o = attend_world_floats(w, 0, w->o);
	const float *l = attend_world_floats(w, 0, w->l);

	assert_int_equal(attend_world_state(w, 0), KVD_SUCCESS);
	for (unsigned int i = AW_HEADS; i < ROWS; i++) {
		unsigned int first = i % AW_HEADS;

		assert_true(fabsf(l[i] / l[first] - 1) < 1e-3f);
		for (unsigned int d = 0; d < AW_DIMS; d++)
			assert_true(fabsf(o[i * AW_DIMS + d] - o[first * AW_DIMS + d]) <
				    1e-3f);
	}
	w->rows = AW_HEADS;
	attend_world_right(w, 0, 0, TOKENS, NULL, 0);
}

/* Messages of a query token each, and one call here. */
static void calls_and_messages_of_a_post_are_bounded(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part parts[5] = {
		all_rows(w->hold, AW_CHUNKS), all_rows(w->hold, AW_CHUNKS),
		all_rows(w->near, AW_CHUNKS), all_rows(w->hold, AW_CHUNKS),
		all_rows(w->hold, AW_CHUNKS)};

	attend_world_rows(w, 0, 5);
	w->c.nodes[AW_REQUESTER].config.peer_message_bytes = 8192 + 96 + 512;
	parts[4].rows = (4096 - 3 * ROWS / AW_HEADS - 1) * AW_HEADS;
	attend_world_post(w, 0, 0, parts, 5, NULL, 0);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(attend_world_state(w, 0), KVD_FAILED);
	assert_int_equal(attend_world_error(w, 0), ERR_TOOBIG);
	assert_int_equal(asked.count, 0);
	parts[4].rows -= AW_HEADS;
	attend_world_post(w, 0, 0, parts, 5, NULL, 0);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(attend_world_state(w, 0), KVD_SUCCESS);
	assert_int_equal(asked.count, 4096 - 2);
	w->rows = AW_HEADS;
	for (unsigned int i = 0; i < AW_HEADS; i++)
		attend_world_floats(w, 0, w->l)[i] /= 5;
	attend_world_right(w, 0, 0, AW_CHUNKS * AW_CHUNK, NULL, 0);
}

/* All rows would be two messages, of 16 M rows x tokens each. */
static void rows_there_are_cut_by_tokens(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part part;

	attend_world_long(w, AW_HOLDER, 101);
	attend_world_long(w, AW_REQUESTER, 201);
	part = long_rows(w, 101);
	rows_alike(w);
	attend_world_post(w, 0, 0, &part, 1, NULL, 0);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(asked.count, (uint64_t)ROWS * TOKENS / COMPUTE_WORK);
	assert_int_equal(asked.most, COMPUTE_WORK);
	rows_alike_are_right(w);
}

static const struct attend_post *only_post(const struct attend_world *w)
{
	const struct list *posts = &attends_of(&w->c.nodes[AW_REQUESTER].kvd)->posts;

	assert_false(list_empty(posts));
	return list_entry(posts->next, struct attend_post, link);
}

/* The addresses of a part's chunks, and their pins, are there once, and charged once. */
static void calls_of_one_daemon_share_reads(void **state)
{
	struct attend_world *w = *state;
	struct offload *offload = w->c.nodes[AW_REQUESTER].kvd.offload;
	const uint64_t *held = &w->engine[AW_REQUESTER]->account->bytes[ACCOUNT_ATTENDS];
	uint64_t before, values = values_count(ROWS, AW_DIMS) * sizeof(float);
	const struct store_kv *kv = NULL;
	struct kvd_ring_part part;
	unsigned int legs = 0;
	struct leg *leg;

	attend_world_long(w, AW_REQUESTER, 201);
	part = long_rows(w, 201);
	rows_alike(w);
	before = *held;
	offload_hold(offload, true);
	attend_world_post(w, 0, 0, &part, 1, NULL, 0);
	cluster_run(&w->c, SOON);
	list_foreach(leg, &only_post(w)->legs, link) {
		if (!kv)
			kv = leg->item.kv;
		assert_ptr_equal(leg->item.kv, kv);
		legs++;
	}
	assert_int_equal(legs, (uint64_t)ROWS * TOKENS / COMPUTE_WORK);
	assert_int_equal(kv->others, legs - 1);
	assert_int_equal(*held - before, sizeof(struct attend_post) + values +
						 legs * sizeof(struct leg) + values +
						 (uint64_t)ROWS * AW_DIMS * 2 +
						 store_kv_bytes(kv));
	offload_hold(offload, false);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(*held, before);
	attend_world_long(w, AW_HOLDER, 101); /* has the values that are expected */
	rows_alike_are_right(w);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, attend_world_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(calls_and_messages_of_a_post_are_bounded),
		CASE(rows_there_are_cut_by_tokens),
		CASE(calls_of_one_daemon_share_reads),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
