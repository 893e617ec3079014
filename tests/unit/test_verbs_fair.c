/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs when a large transfer and small ones, or two peers, want the same wire. It runs
 * one request at a time, so what each of them got is counted in requests, not in time.
 */
#include "tests/lib/verbs_pair.h"

#include <string.h>

#include "daemon/base/err.h"

#define ROW 4096u
#define LARGE_ROWS 6144u
#define SMALL_ROWS 8u
#define WINDOW_ROWS 256u /* may be under way to a peer */
#define LARGE_BYTES (72 * VP_MIB)

static const struct plan_run large = {
	.len = ROW, .count = LARGE_ROWS, .src_stride = 2 * ROW, .dst_stride = 3 * ROW};
static const struct plan_run small = {
	.len = ROW, .count = SMALL_ROWS, .src_stride = 2 * ROW, .dst_stride = 3 * ROW};

static struct verbs_xfer *xfer_of(const struct vp_transfer *x)
{
	return x->op.impl;
}

static uint64_t rows_posted(const struct vp_transfer *x)
{
	return x->op.impl ? xfer_of(x)->posted_bytes / ROW : x->plan->bytes / ROW;
}

static void window(struct verbs_peer *peer)
{
	peer->transport->window_max = WINDOW_ROWS * ROW;
	peer->window_bytes = WINDOW_ROWS * ROW;
}

/* What is under way has its bounds, in bytes and in requests, at every step. */
static void within_bounds(const struct verbs_peer *peer)
{
	uint32_t chain = VERBS_CHAIN_WRS * ROW;

	assert_true(peer->inflight_bytes <= peer->transport->window_max + chain);
	for (uint32_t i = 0; i < peer->qp_count; i++)
		assert_true(peer->qps[i].sq_free <= peer->qps[i].sq_depth);
	assert_true(fake_verbs_outstanding() <=
		    2 * (WINDOW_ROWS + VERBS_CHAIN_WRS + 2 * VERBS_SEND_BUFFERS));
}

static void step(void)
{
	fake_verbs_step(1);
	vp_turn();
	within_bounds(vp_peer(&vp_a));
}

static void post(struct vp_transfer *x, enum xp_kind kind, const struct plan_run *run,
		 uint64_t bytes)
{
	unsigned int requests = vp_b.requests;

	vp_transfer_init(x, kind, run, 1, bytes);
	assert_int_equal(vp_post(x), 0);
	while (vp_b.requests == requests) /* sides are those of the last one */
		step();
}

/* Two windows of it have gone: no beginning any more. */
static void start_large(struct vp_transfer *x, enum xp_kind kind)
{
	window(vp_peer(&vp_a));
	fake_verbs_hold(true);
	post(x, kind, &large, LARGE_BYTES);
	while (rows_posted(x) < 3 * WINDOW_ROWS)
		step();
}

static void end(struct vp_transfer *x)
{
	fake_verbs_hold(false);
	vp_moved(x);
	vp_transfer_fini(x);
}

/* It has succeeded while others are still under way. */
static void small_is_there(struct vp_transfer *x)
{
	const struct plan_run *run = &x->plan->runs[0];

	assert_int_equal(x->op.result, 0);
	assert_int_equal(x->op.moved, x->plan->bytes);
	for (uint64_t i = 0; i < run->count; i++)
		assert_memory_equal(x->src.memory->base + i * run->src_stride,
				    x->dst.memory->base + i * run->dst_stride, run->len);
	vp_transfer_fini(x);
}

/* ---- rooms of one peer ---- */

/* From its GO on it waits for one chain of the other's, and what is under way. */
static void small_one_waits_for(struct vp_transfer *big, enum xp_kind kind)
{
	unsigned int steps = 0;
	struct vp_transfer x;
	uint64_t before;

	post(&x, kind, &small, VP_MIB);
	while (!xfer_of(&x)->go)
		step();
	before = rows_posted(big);
	while (rows_posted(&x) < SMALL_ROWS)
		step();
	/* one before it, one behind it in the same turn */
	assert_true(rows_posted(big) - before <= 2 * VERBS_CHAIN_WRS);
	for (; !x.done; steps++)
		step();
	/* what is under way on its queue pair, and on that of its last words */
	assert_true(steps <= 3 * WINDOW_ROWS);
	assert_true(rows_posted(big) < LARGE_ROWS); /* it was there all the time */
	small_is_there(&x);
}

static void small_transfer_waits_for_a_chain_of_the_large_one(void **state)
{
	struct vp_transfer big;

	(void)state;
	for (int kind = XP_WRITE; kind <= XP_READ; kind++) {
		start_large(&big, (enum xp_kind)kind);
		for (int other = XP_WRITE; other <= XP_READ; other++)
			small_one_waits_for(&big, (enum xp_kind)other);
		end(&big);
	}
}

/* As many small ones as there are always follow each other: each turn of theirs is one
 * of its, too. */
static void large_transfer_is_not_starved_by_small_ones(void **state)
{
	struct vp_transfer big, x[4];
	uint64_t before, chains = 0;

	(void)state;
	start_large(&big, XP_WRITE);
	for (size_t i = 0; i < ARRAY_LEN(x); i++)
		post(&x[i], XP_WRITE, &small, VP_MIB);
	before = rows_posted(&big);
	for (unsigned int i = 0; chains < 40; i++) {
		struct vp_transfer *one = &x[i % ARRAY_LEN(x)];

		while (!one->done && rows_posted(&big) < LARGE_ROWS)
			step();
		if (!one->done)
			break; /* the large one is the first to be whole */
		small_is_there(one);
		chains++;
		post(one, XP_WRITE, &small, VP_MIB);
	}
	assert_true(rows_posted(&big) - before >=
		    (chains / ARRAY_LEN(x)) * VERBS_CHAIN_WRS);
	fake_verbs_hold(false);
	for (size_t i = 0; i < ARRAY_LEN(x); i++)
		end(&x[i]);
	end(&big);
}

/* Equal ones are equally far, whoever came first. */
static void equal_transfers_move_at_one_pace(void **state)
{
	struct vp_transfer x[2];
	uint64_t head_start;

	(void)state;
	start_large(&x[0], XP_WRITE);
	post(&x[1], XP_WRITE, &large, LARGE_BYTES);
	while (!xfer_of(&x[1])->go)
		step();
	head_start = rows_posted(&x[0]);
	while (rows_posted(&x[0]) < LARGE_ROWS) {
		uint64_t first = rows_posted(&x[0]) - head_start,
			 second = rows_posted(&x[1]);

		assert_true(first <= second + 2 * VERBS_CHAIN_WRS);
		assert_true(second <= first + 2 * VERBS_CHAIN_WRS);
		step();
	}
	end(&x[0]);
	end(&x[1]);
}

/* ---- two peers ---- */

/* The same two daemons are joined a second time: two peers for either of them. */
static struct xp_peer *first_a, *first_b;

static void join_twice(void)
{
	first_a = vp_a.peer;
	first_b = vp_b.peer;
	vp_connect(&vp_b, &vp_a, 4, 3);
	vp_connect(&vp_a, &vp_b, 3, 4);
	VP_AWAIT(vp_a.ready && vp_b.ready);
}

static void swap_peers(void)
{
	struct xp_peer *a = vp_a.peer, *b = vp_b.peer;

	vp_a.peer = first_a;
	vp_b.peer = first_b;
	first_a = a;
	first_b = b;
}

/* The large one has filled its peer's window; the other peer's is empty. */
static void small_transfer_of_another_peer_does_not_wait(void **state)
{
	unsigned int steps = 0;
	struct vp_transfer big, x;
	uint64_t before;

	(void)state;
	join_twice();
	window((struct verbs_peer *)first_a);
	start_large(&big, XP_WRITE);
	swap_peers();
	post(&x, XP_WRITE, &small, VP_MIB);
	while (!xfer_of(&x)->go)
		step();
	before = rows_posted(&big);
	while (rows_posted(&x) < SMALL_ROWS)
		step();
	assert_true(rows_posted(&big) - before <= 2 * VERBS_CHAIN_WRS);
	/* its queue pair takes its turn on the wire: two of the other peer have theirs */
	for (; !x.done; steps++)
		step();
	assert_true(steps <= 6 * (SMALL_ROWS + 4));
	small_is_there(&x);
	swap_peers();
	end(&big);
	vp_close_peer(&vp_a);
	vp_close_peer(&vp_b);
	swap_peers();
}

int main(void)
{
#define PAIR(test) cmocka_unit_test_setup_teardown(test, vp_begin_pair, vp_end)
	const struct CMUnitTest tests[] = {
		PAIR(small_transfer_waits_for_a_chain_of_the_large_one),
		PAIR(large_transfer_is_not_starved_by_small_ones),
		PAIR(equal_transfers_move_at_one_pace),
		PAIR(small_transfer_of_another_peer_does_not_wait),
	};

	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests_name("verbs_fair", tests, NULL, NULL);
}
