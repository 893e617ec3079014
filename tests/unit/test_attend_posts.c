/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Posts of query rows between two daemons in virtual time: what they give, what one
 * requester's faults do to others, and that a seat is still once its post has ended.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/base/account.h"
#include "daemon/loop/offload.h"
#include "daemon/math/value.h"
#include "daemon/memory/memory.h"
#include "daemon/session/region.h"
#include "daemon/store/store.h"
#include "daemon/store/store_kv.h"
#include "tests/lib/attend_world.h"

#define SOON (20 * LOOP_NS_PER_MS)

/* The last of its kind that came; those that are to be lost, by type. */
static struct {
	struct wire_attend ask;
	struct wire_attention_result answer;
	uint8_t bytes[4][600000]; /* of its blobs */
	bool lost[WIRE_T_ATTENTION_CANCEL + 1];
	unsigned int count[WIRE_T_ATTENTION_CANCEL + 1];
} tapped;

static void keep_blob(struct wire_blob *blob, unsigned int i)
{
	assert_true(blob->len <= sizeof(tapped.bytes[i]));
	if (blob->len)
		memcpy(tapped.bytes[i], blob->data, blob->len);
	blob->data = tapped.bytes[i];
}

static bool tap(unsigned int node, const struct wire_header *h, struct cursor body,
		void *arg)
{
	(void)node;
	(void)arg;
	tapped.count[h->type]++;
	if (h->type == WIRE_T_ATTEND) {
		assert_int_equal(wire_attend_get(&body, &tapped.ask), 0);
		keep_blob(&tapped.ask.form, 0);
		keep_blob(&tapped.ask.rope, 1);
		keep_blob(&tapped.ask.select, 2);
		keep_blob(&tapped.ask.q, 3);
	} else if (h->type == WIRE_T_ATTENTION_RESULT) {
		assert_int_equal(wire_attention_result_get(&body, &tapped.answer), 0);
	}
	return tapped.lost[h->type];
}

static int setup(void **state)
{
	memset(&tapped, 0, sizeof(tapped));
	attend_world_tap = tap;
	return attend_world_setup(state);
}

static void soon(struct attend_world *w)
{
	cluster_run(&w->c, SOON);
}

static void failed_with(struct attend_world *w, unsigned int seat, enum err_code code)
{
	assert_int_equal(attend_world_state(w, seat), KVD_FAILED);
	assert_int_equal(attend_world_error(w, seat), code);
}

/* ---- what posts give ---- */

static void rows_attend_to_chunks_here_there_and_both(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part parts[2] = {attend_world_part(w->hold),
					 attend_world_part(w->near)};

	for (unsigned int seat = 0; seat < 2; seat++) {
		attend_world_rows(w, seat, seat);
		attend_world_post(w, seat, seat, &parts[seat], 1, NULL, 0);
		soon(w);
		attend_world_right(w, seat, seat, 64, NULL, 0);
	}
	parts[0].count = 2;
	parts[1].first = 2;
	parts[1].count = 2;
	attend_world_rows(w, 2, 9);
	attend_world_post(w, 2, 3, parts, 2, NULL, 0);
	soon(w);
	attend_world_right(w, 2, 3, 64, NULL, 0);
}

/* Many rows of few values, and a selection for each: what is asked, and what is told, are
 * messages of bounded sizes. */
static void post_of_many_rows_is_several_messages(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part part = attend_world_part(w->hold);
	enum { ROWS = 4096, TOKENS = ROWS / AW_HEADS, CHOSEN = 256 };
	static uint32_t select[TOKENS * CHOSEN];
	uint32_t few[2] = {1, 2};

	for (unsigned int i = 0; i < TOKENS * CHOSEN; i++)
		select[i] = 1 + i % 2; /* of them all the same: each of both 128 times */
	w->rows = ROWS;
	w->attend = attend_world_open(w, "");
	attend_world_rows(w, 0, 5);
	part.rows = ROWS;
	part.per_token = CHOSEN;
	attend_world_post(w, 0, 0, &part, 1, select, TOKENS * CHOSEN);
	soon(w);
	assert_true(tapped.count[WIRE_T_ATTEND] >= 4);
	assert_int_equal(attend_world_state(w, 0), KVD_SUCCESS);
	w->rows = 4; /* of the first query token l is 128 times as large */
	for (unsigned int i = 0; i < 4; i++)
		attend_world_floats(w, 0, w->l)[i] /= CHOSEN / 2;
	attend_world_right(w, 0, 0, 0, few, 2);
}

struct hold {
	struct loop_timer timer;
	struct offload *helpers;
};

static void on_hold(struct loop_timer *timer)
{
	offload_hold(container_of(timer, struct hold, timer)->helpers, true);
}

/* A long one is read and looked at by a helper; its engine may end meanwhile. */
static void long_selection_is_read_by_a_helper(void **state)
{
	struct attend_world *w = *state;
	struct offload *helpers = w->c.nodes[AW_REQUESTER].kvd.offload;
	enum { ROWS = 4096, TOKENS = ROWS / AW_HEADS, CHOSEN = 256 };
	struct kvd_ring_part part = attend_world_part(w->hold);
	static uint32_t select[TOKENS * CHOSEN];
	struct hold hold;

	w->rows = ROWS;
	w->attend = attend_world_open(w, "");
	attend_world_rows(w, 0, 5);
	part.rows = ROWS;
	part.per_token = CHOSEN;
	select[TOKENS * CHOSEN - 1] = 64; /* past the last */
	attend_world_post(w, 0, 0, &part, 1, select, TOKENS * CHOSEN);
	soon(w);
	failed_with(w, 0, ERR_RANGE);
	select[TOKENS * CHOSEN - 1] = 63;
	loop_virtual_parts(w->c.loop, 1);
	attend_world_post(w, 0, 0, &part, 1, select, TOKENS * CHOSEN);
	soon(w);
	assert_int_equal(attend_world_state(w, 0), KVD_SUCCESS);
	loop_virtual_parts(w->c.loop, 0);
	hold.helpers = helpers;
	loop_timer_init(&hold.timer, w->c.loop, on_hold);
	loop_timer_start(&hold.timer, 0); /* after a helper has decoded the line */
	attend_world_post(w, 0, 0, &part, 1, select, TOKENS * CHOSEN);
	soon(w);
	assert_int_equal(tapped.count[WIRE_T_ATTEND] > 0, true);
	assert_int_not_equal(attend_world_state(w, 0), KVD_SUCCESS);
	cluster_engine_dies(&w->c, w->engine[AW_REQUESTER]);
	w->engine[AW_REQUESTER] = NULL;
	soon(w);
	offload_hold(helpers, false);
	soon(w);
}

/* As large as a post may be, to a daemon that reads nothing for a while: what waits in a
 * line is bounded, and a line that is full is the end of all that two daemons share. */
static void large_posts_leave_the_line_up(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part parts[64];
	struct kvd_ring_entry cancel = {.op = KVD_RING_CANCEL,
					.a = KVD_RING_IDS + AW_SLOT};
	struct link *link = w->c.nodes[AW_HOLDER].kvd.link;
	struct remote *remote = attend_world_remote(w, AW_REQUESTER);
	uint64_t downs = remote->downs;

	w->rows = 4096;
	w->attend = attend_world_open(w, "");
	attend_world_rows(w, 0, 5);
	for (unsigned int i = 0; i < 64; i++) {
		parts[i] = attend_world_part(w->hold);
		parts[i].rows = w->rows;
	}
	mem_hub_set_queue_max(w->c.links, 4);
	link_mem_freeze(link, true);
	for (unsigned int i = 0; i < 20; i++) {
		attend_world_post(w, 0, 0, parts, 64, NULL, 0);
		cluster_run(&w->c, LOOP_NS_PER_MS);
		assert_int_equal(attend_world_state(w, 0), KVD_TRANSFERRING);
		entry_give(&w->c, w->engine[AW_REQUESTER], &cancel, NULL);
	}
	attend_world_post(w, 0, 0, parts, 64, NULL, 0);
	cluster_run(&w->c, 100 * LOOP_NS_PER_MS);
	link_mem_freeze(link, false);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(remote->downs, downs);
	assert_int_equal(attend_world_state(w, 0), KVD_SUCCESS);
	w->rows = 4;
	for (unsigned int i = 0; i < 4; i++)
		attend_world_floats(w, 0, w->l)[i] /= 64;
	attend_world_right(w, 0, 0, 64, NULL, 0);
	attend_world_quiet(w);
	assert_int_equal(attend_remote(remote)->sent, 0);
	assert_int_equal(attend_remote(remote)->sent_bytes, 0);
	assert_int_equal(attend_remote(remote)->sent_rows, 0);
}

/* Rows are taken, and legs begin, in as many turns as they need: a post may end between
 * them. */
static void post_starts_in_turns_and_can_end_between(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part parts[8];
	struct kvd_ring_entry cancel = {.op = KVD_RING_CANCEL,
					.a = KVD_RING_IDS + AW_SLOT};

	w->rows = 4096;
	w->attend = attend_world_open(w, "");
	attend_world_rows(w, 0, 5);
	for (unsigned int i = 0; i < 8; i++) {
		parts[i] = attend_world_part(i % 2 ? w->hold : w->near);
		parts[i].rows = w->rows;
	}
	loop_virtual_parts(w->c.loop, 1);
	for (unsigned int turns = 0; turns < 8; turns++) {
		attend_world_post(w, 0, 0, parts, 8, NULL, 0);
		assert_true(attend_world_state(w, 0) < KVD_TRANSFERRING);
		for (unsigned int i = 0; i < turns; i++)
			loop_turn(w->c.loop, 0);
		entry_give(&w->c, w->engine[AW_REQUESTER], &cancel, NULL);
		failed_with(w, 0, ERR_CANCELED);
		attend_world_quiet(w);
		cluster_run(&w->c, LOOP_NS_PER_S);
	}
	attend_world_post(w, 0, 0, parts, 8, NULL, 0);
	assert_true(attend_world_state(w, 0) < KVD_TRANSFERRING);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(attend_world_state(w, 0), KVD_SUCCESS);
	loop_virtual_parts(w->c.loop, 0);
	w->rows = 4;
	for (unsigned int i = 0; i < 4; i++)
		attend_world_floats(w, 0, w->l)[i] /= 8;
	attend_world_right(w, 0, 0, 64, NULL, 0);
}

static uint64_t held_by(const struct account *account)
{
	return account->bytes[ACCOUNT_ATTENDS];
}

/* What rows take is their principal's, at both, until they are gone. */
static void memory_is_charged_to_requester(void **state)
{
	struct attend_world *w = *state;
	struct offload *offload = w->c.nodes[AW_HOLDER].kvd.offload;
	struct kvd_ring_part part = attend_world_part(w->hold);
	struct account *mine = w->engine[AW_REQUESTER]->account;
	struct account *theirs = attend_world_remote(w, AW_HOLDER)->account;
	uint64_t before;

	w->rows = 4096;
	w->attend = attend_world_open(w, "");
	attend_world_rows(w, 0, 5);
	part.rows = w->rows;
	before = held_by(mine);
	offload_hold(offload, true);
	attend_world_post(w, 0, 0, &part, 1, NULL, 0);
	soon(w);
	assert_in_range(held_by(mine) - before, 2 * 4096 * 72, 3 * 4096 * 72);
	assert_in_range(held_by(theirs), 4096 * (32 + 72), 4096 * (32 + 72) + 8192);
	offload_hold(offload, false);
	soon(w);
	assert_int_equal(attend_world_state(w, 0), KVD_SUCCESS);
	assert_int_equal(held_by(mine), before);
	assert_int_equal(held_by(theirs), 0);
	w->c.nodes[AW_HOLDER].kvd.accounts.limit =
		w->c.nodes[AW_HOLDER].kvd.accounts.total;
	attend_world_post(w, 0, 0, &part, 1, NULL, 0);
	soon(w);
	failed_with(w, 0, ERR_LIMIT);
}

/* The pages of a seat that are entirely behind its first rows fault at any access of the
 * daemon's. */
static void rows_behind_are_lost(struct attend_world *w, unsigned int rows, bool lost)
{
	const struct region *region = region_find(w->engine[AW_REQUESTER], w->region);
	const uint64_t begins[] = {
		w->q + rows * AW_DIMS * 2u, w->o + rows * AW_DIMS * sizeof(float),
		w->m + rows * sizeof(float), w->l + rows * sizeof(float)};
	const uint64_t ends[] = {w->o, w->m, w->l, w->seat_bytes};

	for (unsigned int i = 0; i < 4; i++) {
		uint64_t begin = (begins[i] + 4095) & ~UINT64_C(4095);
		uint64_t end = ends[i] & ~UINT64_C(4095);

		assert_true(begin < end);
		assert_int_equal(mprotect(region->memory->base + begin, end - begin,
					  lost ? PROT_NONE : PROT_READ | PROT_WRITE),
				 0);
	}
}

/* Answered by one message, merged, and of one kernel here: 8 rows of a seat of 4096. */
static void post_cost_depends_on_rows_not_seat(void **state)
{
	struct attend_world *w = *state;
	struct attends *attends = attends_of(&w->c.nodes[AW_REQUESTER].kvd);
	struct kvd_ring_part here = attend_world_part(w->near),
			     there = attend_world_part(w->hold);
	struct kvd_ring_part parts[3][2] = {{there, here}, {there}, {here}};
	const struct account *mine = w->engine[AW_REQUESTER]->account;
	uint64_t before, rows = attends->figures.rows;

	parts[0][0].count = parts[0][1].first = parts[0][1].count = 2;
	w->rows = 4096;
	w->attend = attend_world_open(w, "");
	attend_world_rows(w, 0, 5);
	memset(attend_world_floats(w, 0, w->o), 0xa5, w->seat_bytes - w->o);
	rows_behind_are_lost(w, AW_ROWS, true);
	w->rows = AW_ROWS;
	for (unsigned int i = 0; i < 3; i++) {
		before = held_by(mine);
		offload_hold(w->c.nodes[AW_REQUESTER].kvd.offload, true);
		attend_world_post(w, 0, 0, parts[i], i == 0 ? 2 : 1, NULL, 0);
		assert_in_range(held_by(mine) - before, 1, 16384);
		offload_hold(w->c.nodes[AW_REQUESTER].kvd.offload, false);
		soon(w);
		attend_world_right(w, 0, 0, 64, NULL, 0);
		assert_true(attends->figures.rows == rows + (i + 1) * AW_ROWS);
	}
	/* rows before a part's are of the post, and have no tokens */
	there.row = AW_ROWS - AW_HEADS;
	there.rows = AW_HEADS;
	attend_world_post(w, 0, 0, &there, 1, NULL, 0);
	soon(w);
	assert_int_equal(attend_world_state(w, 0), KVD_SUCCESS);
	assert_true(attend_world_floats(w, 0, w->l)[AW_HEADS - 1] == 0);
	assert_true(attend_world_floats(w, 0, w->m)[AW_HEADS - 1] == -INFINITY);
	assert_true(attend_world_floats(w, 0, w->l)[AW_HEADS] > 0);
	rows_behind_are_lost(w, AW_ROWS, false);
	for (uint64_t at = AW_ROWS; at < 4096; at++)
		assert_memory_equal(attend_world_floats(w, 0, w->l) + at,
				    "\xa5\xa5\xa5\xa5", 4);
}

/* Only what crosses to another daemon, and only o: its error is that of one rounding. */
static void results_return_in_bf16_where_that_is_asked(void **state)
{
	struct attend_world *w = *state;
	const struct attends *attends = attends_of(&w->c.nodes[AW_REQUESTER].kvd);
	struct kvd_ring_part here = attend_world_part(w->near),
			     there = attend_world_part(w->hold);
	struct kvd_ring_part parts[3][2] = {{there}, {here}, {there, here}};
	uint64_t both[2] = {w->attend, attend_world_open(w, ",'out_type':'bf16'")};
	const float *o[2] = {attend_world_floats(w, 0, w->o),
			     attend_world_floats(w, 1, w->o)};
	uint64_t bytes;

	parts[2][0].count = parts[2][1].first = parts[2][1].count = 2;
	for (unsigned int i = 0; i < 3; i++) {
		double worst = 0;

		for (unsigned int seat = 0; seat < 2; seat++) {
			w->attend = both[seat];
			bytes = attends->figures.bytes;
			attend_world_rows(w, seat, 5);
			attend_world_post(w, seat, 0, parts[i], i == 2 ? 2 : 1, NULL, 0);
			soon(w);
			assert_int_equal(attend_world_state(w, seat), KVD_SUCCESS);
			assert_int_equal(attends->figures.bytes - bytes,
					 i == 1 ? 0
						: AW_ROWS * (2 * AW_DIMS + 8 +
							     (seat ? 2 : 4) * AW_DIMS));
		}
		for (unsigned int n = 0; n < AW_ROWS * AW_DIMS; n++) {
			worst = fmax(worst, fabs((double)o[1][n] - (double)o[0][n]));
			if (i == 0)
				assert_true(o[1][n] ==
					    value_from_bf16(value_to_bf16(o[0][n])));
		}
		assert_true(i == 1 ? worst == 0 : worst > 0 && worst <= 0x1p-8);
		assert_memory_equal(attend_world_floats(w, 1, w->m),
				    attend_world_floats(w, 0, w->m), AW_ROWS * 4);
		assert_memory_equal(attend_world_floats(w, 1, w->l),
				    attend_world_floats(w, 0, w->l), AW_ROWS * 4);
	}
}

/* A reply as long as one in fp32 would be, and a type that there is not. */
static void forged_types_of_results_are_refused(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part part = attend_world_part(w->hold);
	static const uint8_t values[AW_ROWS * (AW_DIMS + 2) * 4];
	struct wire_attention_result forged = {.attend = 2,
					       .values = {values, sizeof(values)}};

	w->attend = attend_world_open(w, ",'out_type':'bf16'");
	attend_world_post(w, 0, 0, &part, 1, NULL, 0);
	soon(w);
	assert_int_equal(attend_world_state(w, 0), KVD_SUCCESS);
	assert_int_equal(tapped.bytes[0][3], 1);
	tapped.bytes[0][3] = 2;
	tapped.ask.attend = 1000;
	assert_int_equal(
		handshake_send_attend(attend_world_remote(w, AW_REQUESTER), &tapped.ask),
		0);
	soon(w);
	assert_int_equal(tapped.answer.attend, 1000);
	assert_int_equal(tapped.answer.code, ERR_PROTO);
	tapped.lost[WIRE_T_ATTEND] = true;
	attend_world_post(w, 0, 0, &part, 1, NULL, 0);
	soon(w);
	assert_int_equal(handshake_send_attention_result(
				 attend_world_remote(w, AW_HOLDER), &forged),
			 0);
	soon(w);
	failed_with(w, 0, ERR_PEER); /* the line ends */
}

/* A query token whose answer is longer than a message of the daemon's may be. */
static void rows_too_large_for_a_message_are_refused(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part part = attend_world_part(w->hold);
	struct remote *remote = attend_world_remote(w, AW_REQUESTER);

	attend_world_rows(w, 0, 5);
	w->c.nodes[AW_REQUESTER].config.peer_message_bytes = 8192 + 96 + 512;
	attend_world_post(w, 0, 0, &part, 1, NULL, 0);
	soon(w);
	assert_int_equal(attend_world_state(w, 0), KVD_SUCCESS); /* two messages */
	assert_int_equal(tapped.count[WIRE_T_ATTEND], 2);
	w->c.nodes[AW_REQUESTER].config.peer_message_bytes = 8192 + 96 + 255;
	attend_world_post(w, 0, 0, &part, 1, NULL, 0);
	soon(w);
	failed_with(w, 0, ERR_TOOBIG);
	w->c.nodes[AW_HOLDER].config.peer_message_bytes = 8192 + 96 + 255;
	assert_int_equal(handshake_send_attend(remote, &tapped.ask), 0);
	soon(w);
	assert_int_equal(tapped.answer.code, ERR_TOOBIG);
}

static void code_unknown_from_peer_is_mapped(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part part = attend_world_part(w->hold);
	const struct wire_attention_result forged = {
		.attend = 1, .code = 60000, .text = "?"};

	tapped.lost[WIRE_T_ATTEND] = true;
	attend_world_post(w, 0, 0, &part, 1, NULL, 0);
	soon(w);
	assert_int_equal(handshake_send_attention_result(
				 attend_world_remote(w, AW_HOLDER), &forged),
			 0);
	soon(w);
	failed_with(w, 0, ERR_INTERNAL);
}

/* A rank that holds each second page of a prompt: its pages are not the tokens'. */
static void tokens_of_one_rank_in_two_are_not_read_as_all(void **state)
{
	struct attend_world *w = *state;
	struct session *half = cluster_engine(&w->c, AW_REQUESTER, "half");
	struct cache cache = cluster_geometry;
	struct store_kv *kv = NULL;
	struct store_hold *hold;
	uint64_t classes = 0;

	cache.shard_size = 2;
	cache.shard_run = 4;
	cluster_cache(&w->c, half, "half", 0, &cache);
	w->engine[AW_REQUESTER] = half;
	w->cache[AW_REQUESTER].pool = cache.pool;
	attend_world_put(w, AW_REQUESTER, 21, 2, 2);
	hold = store_hold_find(half, attend_world_hold(w, AW_REQUESTER, 21, 2, 600000));
	assert_non_null(hold);
	assert_int_equal(store_hold_chunks(hold), 2);
	assert_int_equal(store_kv_classes(hold, 0, 2, &classes), 0);
	assert_true(store_kv_of_hold(hold, (unsigned int)__builtin_ctzll(classes), 0, 2,
				     NULL, &kv) < 0);
	assert_int_equal(err_last()->code, ERR_REQUIRE);
	cache_close(&cache);
}

static void hold_with_expired_lease_is_refused(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part part =
		attend_world_part(attend_world_hold(w, AW_REQUESTER, 1, AW_CHUNKS, 1000));

	cluster_run(&w->c, 5 * LOOP_NS_PER_S);
	attend_world_post(w, 0, 0, &part, 1, NULL, 0);
	soon(w);
	failed_with(w, 0, ERR_LEASE);
}

/* ---- slots ---- */

static bool is_free(const struct attend_world *w, unsigned int seat)
{
	return kvd_word_flags(slot_read(w->engine[AW_REQUESTER], AW_SLOT + seat).word) &
	       KVD_FLAG_FREE;
}

/* Released, and its post would write into the slot of the next one. */
static void slot_is_a_posts_until_its_end(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part part = attend_world_part(w->hold);
	struct kvd_ring_entry again,
		release = {.op = KVD_RING_RELEASE, .a = KVD_RING_IDS + AW_SLOT};
	struct kvd_ring_entry close = {.op = KVD_RING_CLOSE, .slot = AW_SLOT, .gen = 1};

	attend_world_rows(w, 0, 1);
	offload_hold(w->c.nodes[AW_HOLDER].kvd.offload, true);
	attend_world_post(w, 0, 0, &part, 1, NULL, 0);
	soon(w);
	assert_int_equal(attend_world_state(w, 0), KVD_TRANSFERRING);
	entry_give(&w->c, w->engine[AW_REQUESTER], &release, NULL);
	entry_give(&w->c, w->engine[AW_REQUESTER], &close, NULL);
	assert_false(is_free(w, 0));
	again = attend_world_entry(w, 0, 0);
	entry_breaks(&w->c, w->engine[AW_REQUESTER], &again, NULL);
	again.op = KVD_RING_POST;
	again.a = KVD_RING_IDS + AW_SLOT;
	entry_breaks(&w->c, w->engine[AW_REQUESTER], &again, NULL);
	w->gens[0]--;
	offload_hold(w->c.nodes[AW_HOLDER].kvd.offload, false);
	soon(w);
	attend_world_right(w, 0, 0, 64, NULL, 0);
	assert_true(is_free(w, 0));
	entry_give(&w->c, w->engine[AW_REQUESTER], &release, NULL);
	attend_world_post(w, 0, 1, &part, 1, NULL, 0);
	soon(w);
	attend_world_right(w, 0, 1, 64, NULL, 0);
}

/* ---- one requester's faults ---- */

static void selection_outside_the_part_is_refused(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part part = attend_world_part(w->near);
	const uint32_t select[4] = {3, 32, UINT32_MAX, 5};

	part.per_token = 2;
	part.count = 2;
	attend_world_rows(w, 0, 1);
	attend_world_post(w, 0, 0, &part, 1, select, 4);
	soon(w);
	failed_with(w, 0, ERR_RANGE);
	part.count = 3;
	attend_world_post(w, 0, 0, &part, 1, select, 4);
	soon(w);
	attend_world_right(w, 0, 0, 0, select, 2);
}

/* What the holder's kernel would refuse, in a message beside others' of the same chunks:
 * they would be one call. */
static void forged_rows_fail_alone(void **state)
{
	struct attend_world *w = *state;
	struct offload *offload = w->c.nodes[AW_HOLDER].kvd.offload;
	struct kvd_ring_part part = attend_world_part(w->hold);
	struct remote *remote = attend_world_remote(w, AW_REQUESTER);
	const uint32_t select[2] = {5, 64};
	struct wire_attend forged;

	for (unsigned int seat = 0; seat < 3; seat++)
		attend_world_rows(w, seat, seat);
	offload_hold(offload, true);
	attend_world_post(w, 0, 0, &part, 1, NULL, 0); /* at work; the others join */
	cluster_run(&w->c, SOON);
	forged = tapped.ask;
	forged.attend = 1000;
	forged.per_token = 1;
	forged.select = (struct wire_blob){select, sizeof(select)};
	assert_int_equal(handshake_send_attend(remote, &forged), 0);
	forged.per_token = 0;
	forged.select.len = 0;
	forged.delta = 0x80000000;
	assert_int_equal(handshake_send_attend(remote, &forged), 0);
	attend_world_post(w, 1, 0, &part, 1, NULL, 0);
	cluster_run(&w->c, SOON);
	assert_int_equal(tapped.count[WIRE_T_ATTENTION_RESULT], 2);
	offload_hold(offload, false);
	soon(w);
	attend_world_right(w, 0, 0, 64, NULL, 0);
	attend_world_right(w, 1, 0, 64, NULL, 0);
}

/* ---- how much waits at a time ---- */

#define SERVES 256u /* of one daemon: messages, and their rows */
#define SERVED_ROWS 8192u
#define POSTS 1024u /* of a session */

/* The last post's message again, of so many rows: the answer is counted. */
static void ask_again(struct attend_world *w, uint64_t number, unsigned int rows)
{
	struct wire_attend again = tapped.ask;

	again.attend = number;
	again.rows = rows;
	again.q.len = (size_t)rows * AW_DIMS * sizeof(uint16_t);
	assert_int_equal(
		handshake_send_attend(attend_world_remote(w, AW_REQUESTER), &again), 0);
}

/* One that waits at the holder, and whose message is tapped. */
static void post_waits(struct attend_world *w, unsigned int rows)
{
	struct kvd_ring_part part = attend_world_part(w->hold);

	w->rows = part.rows = rows;
	w->attend = attend_world_open(w, "");
	attend_world_rows(w, 0, 5);
	offload_hold(w->c.nodes[AW_HOLDER].kvd.offload, true);
	attend_world_post(w, 0, 0, &part, 1, NULL, 0);
	soon(w);
	assert_int_equal(tapped.count[WIRE_T_ATTEND], 1);
}

/* All that was taken is answered, and there is room again. */
static void all_are_answered(struct attend_world *w, unsigned int answers)
{
	offload_hold(w->c.nodes[AW_HOLDER].kvd.offload, false);
	soon(w);
	assert_int_equal(tapped.count[WIRE_T_ATTENTION_RESULT], answers);
	attend_world_right(w, 0, 0, 64, NULL, 0);
	ask_again(w, 900000, AW_HEADS);
	soon(w);
	assert_int_equal(tapped.count[WIRE_T_ATTENTION_RESULT], answers + 1);
	assert_int_equal(tapped.answer.attend, 900000);
	assert_int_equal(tapped.answer.code, ERR_OK);
}

static void messages_waiting_per_daemon_are_bounded(void **state)
{
	struct attend_world *w = *state;

	post_waits(w, AW_ROWS);
	for (unsigned int i = 1; i < SERVES; i++)
		ask_again(w, 1000 + i, AW_HEADS);
	soon(w);
	assert_int_equal(tapped.count[WIRE_T_ATTENTION_RESULT], 0);
	ask_again(w, 5000, AW_HEADS);
	soon(w);
	assert_int_equal(tapped.count[WIRE_T_ATTENTION_RESULT], 1);
	assert_int_equal(tapped.answer.attend, 5000);
	assert_int_equal(tapped.answer.code, ERR_BUSY);
	all_are_answered(w, SERVES + 1);
}

static void rows_waiting_per_daemon_are_bounded(void **state)
{
	struct attend_world *w = *state;

	post_waits(w, SERVED_ROWS / 2);
	ask_again(w, 1001, SERVED_ROWS / 2 - AW_HEADS);
	ask_again(w, 1002, AW_HEADS);
	soon(w);
	assert_int_equal(tapped.count[WIRE_T_ATTENTION_RESULT], 0);
	ask_again(w, 1003, AW_HEADS);
	soon(w);
	assert_int_equal(tapped.count[WIRE_T_ATTENTION_RESULT], 1);
	assert_int_equal(tapped.answer.attend, 1003);
	assert_int_equal(tapped.answer.code, ERR_BUSY);
	all_are_answered(w, 4);
}

/* Post number `i` of a session, in a slot of its own. */
static struct kvd_status_slot post_number(struct attend_world *w, const uint64_t *attends,
					  unsigned int i, uint32_t gen)
{
	struct kvd_ring_part part = attend_world_part(w->near);
	struct kvd_ring_entry e = {.op = KVD_RING_ATTEND,
				   .slot = AW_SLOT + i,
				   .gen = gen,
				   .a = attends[i / 256],
				   .n0 = i % 256};
	struct payload p = {0};

	part.rows = w->rows;
	payload_add(&p, &part, sizeof(part));
	p.views = p.len;
	p.count = 1;
	entry_give(&w->c, w->engine[AW_REQUESTER], &e, &p);
	return slot_read(w->engine[AW_REQUESTER], e.slot);
}

static void posts_of_a_session_are_bounded(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_entry cancel = {.op = KVD_RING_CANCEL,
					.a = KVD_RING_IDS + AW_SLOT + 7};
	uint64_t attends[POSTS / 256 + 1];
	struct kvd_status_slot slot;
	char at[32];

	w->rows = AW_HEADS;
	w->seat_count = 256;
	for (unsigned int i = 0; i < POSTS / 256 + 1; i++) {
		snprintf(at, sizeof(at), ",'offset':%u", i << 20);
		attends[i] = attend_world_open(w, at);
	}
	offload_hold(w->c.nodes[AW_REQUESTER].kvd.offload, true);
	for (unsigned int i = 0; i < POSTS; i++) {
		slot = post_number(w, attends, i, 1);
		assert_int_equal(kvd_word_state(slot.word), KVD_TRANSFERRING);
	}
	slot = post_number(w, attends, POSTS, 1);
	assert_int_equal(kvd_word_state(slot.word), KVD_FAILED);
	assert_int_equal(kvd_word_error(slot.word), ERR_LIMIT);
	entry_give(&w->c, w->engine[AW_REQUESTER], &cancel, NULL);
	slot = post_number(w, attends, POSTS, 2);
	assert_int_equal(kvd_word_state(slot.word), KVD_TRANSFERRING);
	offload_hold(w->c.nodes[AW_REQUESTER].kvd.offload, false);
	soon(w);
	for (unsigned int i = 0; i <= POSTS; i++) {
		slot = slot_read(w->engine[AW_REQUESTER], AW_SLOT + i);
		assert_int_equal(kvd_word_state(slot.word),
				 i == 7 ? KVD_FAILED : KVD_SUCCESS);
	}
}

/* A call that has begun keeps the pool, and so its memory mapped, whose engine exits. */
static void pool_of_published_pages_outlives_its_engine_for_a_call(void **state)
{
	struct attend_world *w = *state;
	struct kvd *holder = &w->c.nodes[AW_HOLDER].kvd;
	struct kvd_ring_part part;
	uint64_t pools;

	attend_world_publish(w, AW_HOLDER, 31);
	part = attend_world_part(
		attend_world_hold(w, AW_REQUESTER, 31, AW_CHUNKS, 60000));
	attend_world_rows(w, 0, 5);
	attend_world_post(w, 0, 0, &part, 1, NULL, 0);
	soon(w);
	attend_world_right(w, 0, 0, AW_CHUNKS * AW_CHUNK, NULL, 0);
	pools = metrics_get(&holder->metrics, METRIC_POOLS);
	offload_hold(holder->offload, true);
	attend_world_post(w, 1, 0, &part, 1, NULL, 0);
	soon(w);
	cluster_engine_dies(&w->c, w->engine[AW_HOLDER]);
	w->engine[AW_HOLDER] = NULL;
	soon(w);
	assert_int_equal(metrics_get(&holder->metrics, METRIC_POOLS), pools);
	offload_hold(holder->offload, false);
	soon(w);
	failed_with(w, 1, ERR_NOTFOUND);
	assert_int_equal(metrics_get(&holder->metrics, METRIC_POOLS), pools - 1);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, attend_world_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(rows_attend_to_chunks_here_there_and_both),
		CASE(post_of_many_rows_is_several_messages),
		CASE(long_selection_is_read_by_a_helper),
		CASE(large_posts_leave_the_line_up),
		CASE(post_starts_in_turns_and_can_end_between),
		CASE(memory_is_charged_to_requester),
		CASE(post_cost_depends_on_rows_not_seat),
		CASE(results_return_in_bf16_where_that_is_asked),
		CASE(forged_types_of_results_are_refused),
		CASE(rows_too_large_for_a_message_are_refused),
		CASE(code_unknown_from_peer_is_mapped),
		CASE(tokens_of_one_rank_in_two_are_not_read_as_all),
		CASE(hold_with_expired_lease_is_refused),
		CASE(slot_is_a_posts_until_its_end),
		CASE(selection_outside_the_part_is_refused),
		CASE(forged_rows_fail_alone),
		CASE(messages_waiting_per_daemon_are_bounded),
		CASE(rows_waiting_per_daemon_are_bounded),
		CASE(posts_of_a_session_are_bounded),
		CASE(pool_of_published_pages_outlives_its_engine_for_a_call),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests_name("attend_posts", tests, NULL, NULL);
}
