/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs where rows are short and scattered at both ends: which way is taken and why,
 * that it is seen in the record, and that slices and slots keep every promise when a
 * transfer stops, a peer dies or lies.
 */
#include "tests/lib/verbs_pair.h"

#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/transport/verbs/verbs_pool.h"

#define DEAR 100000u /* ns: any row is cheaper to copy */
#define CHEAP 2u
#define NEVER 0u

/* 2 MiB in 8192 rows: eight slices, scattered at both ends. */
static const struct plan_run rows = {
	.len = 256, .count = 8192, .src_stride = 512, .dst_stride = 320};

static int begin_dear(void **state)
{
	return vp_begin_packing(state, DEAR, DEAR);
}

static int begin_cheap(void **state)
{
	return vp_begin_packing(state, CHEAP, CHEAP);
}

static int begin_one_sided(void **state)
{
	return vp_begin_packing(state, DEAR, NEVER);
}

static void start_of(struct vp_transfer *x, enum xp_kind kind)
{
	vp_transfer_init(x, kind, &rows, 1, 5 * VP_MIB);
	memset(fake_verbs_count(), 0, sizeof(*fake_verbs_count()));
	assert_int_equal(vp_post(x), 0);
}

static void start(struct vp_transfer *x)
{
	start_of(x, XP_WRITE);
}

/* ---- the choice ---- */

static void dear_requests_pack_short_rows(void **state)
{
	struct vp_transfer x;

	(void)state;
	start(&x);
	vp_moved(&x);
	vp_says(&x, true, 8, 8);
	assert_true(x.op.way.packed);
	assert_int_equal(x.op.way.row_bytes, 256);
	assert_int_equal(x.op.way.request_ns, DEAR);
	assert_true(x.op.way.copy_ns > 0);
	assert_int_equal(fake_verbs_count()->writes, 8);
	vp_transfer_fini(&x);
}

/* What is pulled is pushed then, by its source. */
static void dear_requests_pack_short_rows_of_a_pull(void **state)
{
	struct vp_transfer x;

	(void)state;
	start_of(&x, XP_READ);
	vp_moved(&x);
	vp_says(&x, true, 8, 8);
	assert_true(x.op.way.packed);
	assert_false(x.op.way.staged);
	assert_int_equal(x.op.way.row_bytes, 256);
	assert_int_equal(x.op.way.request_ns, DEAR);
	assert_int_equal(fake_verbs_count()->writes, 8);
	assert_int_equal(fake_verbs_count()->reads, 0);
	vp_transfer_fini(&x);
}

static void cheap_requests_pull_row_by_row(void **state)
{
	struct vp_transfer x;

	(void)state;
	start_of(&x, XP_READ);
	vp_moved(&x);
	vp_says(&x, false, 8192, 0);
	assert_false(x.op.way.packed);
	assert_int_equal(x.op.way.row_bytes, 256);
	assert_int_equal(x.op.way.request_ns, CHEAP);
	assert_int_equal(fake_verbs_count()->reads, 8192);
	vp_transfer_fini(&x);
}

static void cheap_requests_take_row_by_row(void **state)
{
	struct vp_transfer x;

	(void)state;
	start(&x);
	vp_moved(&x);
	vp_says(&x, false, 8192, 0);
	assert_false(x.op.way.packed);
	assert_int_equal(x.op.way.row_bytes, 256);
	assert_int_equal(x.op.way.request_ns, CHEAP);
	assert_int_equal(fake_verbs_count()->writes, 8192);
	vp_transfer_fini(&x);
}

static void both_ways_are_the_same_to_memory(void **state)
{
	static const struct plan_run shapes[] = {
		{.src = 64,
		 .dst = 0,
		 .len = 256,
		 .count = 10000,
		 .src_stride = 512,
		 .dst_stride = 300},
		{.src = 0,
		 .dst = 0,
		 .len = 24,
		 .count = 100000,
		 .src_stride = 48,
		 .dst_stride = 56},
		{.src = 1,
		 .dst = 2,
		 .len = 1023,
		 .count = 4099,
		 .src_stride = 1025,
		 .dst_stride = 1111},
		{.src = 0,
		 .dst = 0,
		 .len = 8192,
		 .count = 65,
		 .src_stride = 9000,
		 .dst_stride = 8200},
	};
	struct vp_transfer x;

	(void)state;
	for (size_t i = 0; i < 2 * ARRAY_LEN(shapes); i++) {
		vp_transfer_init(&x, i & 1 ? XP_READ : XP_WRITE, &shapes[i / 2], 1,
				 8 * VP_MIB);
		assert_int_equal(vp_post(&x), 0);
		vp_moved(&x);
		assert_true(x.op.way.packed);
		vp_transfer_fini(&x);
	}
}

static void gathered_and_few_and_long_rows_are_not_packed(void **state)
{
	static const struct plan_run shapes[] = {
		/* whole at the far side: a request gathers many */
		{.len = 4096, .count = 600, .src_stride = 8192, .dst_stride = 4096},
		{.len = 256, .count = 60, .src_stride = 512, .dst_stride = 300},
		{.len = 65536, .count = 70, .src_stride = 65600, .dst_stride = 65700},
		/* ... of a pull the far side is the source */
		{.len = 4096, .count = 600, .src_stride = 4096, .dst_stride = 8192},
	};
	struct vp_transfer x;

	(void)state;
	for (size_t i = 0; i < 2 * ARRAY_LEN(shapes); i++) {
		bool read = i & 1;

		if (i / 2 == (read ? 0 : 3))
			continue; /* whole at the near side only */
		vp_transfer_init(&x, read ? XP_READ : XP_WRITE, &shapes[i / 2], 1,
				 8 * VP_MIB);
		assert_int_equal(vp_post(&x), 0);
		vp_moved(&x);
		assert_false(x.op.way.packed);
		vp_transfer_fini(&x);
	}
}

/* Their length does not fit the record's field: it is the most that does. */
static void rows_of_gigabytes_are_not_packed(void **state)
{
	const uint64_t gib4 = UINT64_C(4) << 30;
	const uint64_t lengths[] = {gib4 - 1, gib4, gib4 + 256, 2 * gib4};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(lengths); i++) {
		const struct plan_run row = {.len = lengths[i], .count = 1};
		struct plan *plan = vp_plan(&row, 1);

		assert_int_equal(pack_request_bytes(plan, true, PACK_SGE_MAX),
				 UINT32_MAX);
		assert_int_equal(pack_request_bytes(plan, false, PACK_SGE_MAX),
				 UINT32_MAX);
		plan_free(plan);
	}
}

static void responder_without_packing_gets_rows(void **state)
{
	struct vp_transfer x;

	(void)state;
	start(&x);
	vp_moved(&x);
	assert_false(x.op.way.packed);
	assert_int_equal(fake_verbs_count()->writes, 8192);
	vp_transfer_fini(&x);
	start_of(&x, XP_READ);
	vp_moved(&x);
	assert_false(x.op.way.packed);
	assert_int_equal(fake_verbs_count()->reads, 8192);
	vp_transfer_fini(&x);
}

static void responder_record_has_path(void **state)
{
	struct vp_transfer x;

	(void)state;
	fake_verbs_hold(true);
	start(&x);
	while (!vp_b.in || !vp_b.in->way.packed) {
		fake_verbs_step(1);
		vp_turn();
	}
	assert_int_equal(vp_b.in->way.row_bytes, 256);
	fake_verbs_hold(false);
	vp_moved(&x);
	vp_transfer_fini(&x);
}

/* ---- slots ---- */

static void more_transfers_than_slots_all_end(void **state)
{
	struct vp_transfer xs[5];

	(void)state;
	/* all of one plan and one place: the answer is the same for each */
	vp_transfer_init(&xs[0], XP_WRITE, &rows, 1, 5 * VP_MIB);
	for (size_t i = 1; i < ARRAY_LEN(xs); i++) {
		xs[i] = xs[0];
		xs[i].op.owner = &xs[i];
	}
	for (size_t i = 0; i < ARRAY_LEN(xs); i++)
		assert_int_equal(vp_post(&xs[i]), 0);
	for (size_t i = 0; i < ARRAY_LEN(xs); i++)
		vp_moved(&xs[i]);
	vp_transfer_fini(&xs[0]);
}

/* ---- stopping ---- */

static struct err gone(void)
{
	struct err err;

	err_set(&err, ERR_ABORTED, "the user went away");
	return err;
}

/* Stopped after so many steps of the wire. */
static void abort_after(enum xp_kind kind, unsigned int steps, bool by_answerer)
{
	unsigned int dones = vp_b.dones;
	struct err why = gone();
	struct vp_transfer x;

	fake_verbs_hold(true);
	start_of(&x, kind);
	for (unsigned int i = 0; i < steps; i++) {
		fake_verbs_step(1);
		vp_turn();
	}
	if (by_answerer && vp_b.in)
		verbs_transport.revoke(vp_b.in, &why);
	else
		verbs_transport.cancel(&x.op, &why);
	while (!x.done || vp_b.dones < vp_b.requests) {
		bool write = kind == XP_WRITE, told = write ? vp_b.dones > dones : x.done;

		fake_verbs_step(1);
		vp_turn();
		if (!told && (write ? vp_b.dones > dones : x.done)) {
			vp_still(&x); /* the memory is somebody else's */
			break;
		}
	}
	fake_verbs_hold(false);
	VP_AWAIT(x.done && vp_b.dones == vp_b.requests);
	if (x.op.result)
		vp_failed(&x, ERR_ABORTED, "the user went away");
	assert_int_equal(vp_a.lost + vp_b.lost, 0);
	vp_transfer_fini(&x);
}

static void abort_at_any_step_is_quiesced_and_returns_slots(void **state)
{
	struct vp_transfer x;

	(void)state;
	vp_transport(&vp_a)->net.fence_ns = vp_transport(&vp_b)->net.fence_ns =
		VP_WAIT_NS;
	for (unsigned int steps = 0; steps < 60; steps++)
		abort_after(steps & 2 ? XP_READ : XP_WRITE, steps, steps & 1);
	start(&x); /* all slots are there */
	vp_moved(&x);
	assert_true(x.op.way.packed);
	vp_transfer_fini(&x);
}

static void peer_lost_in_the_middle_is_quiesced(void **state)
{
	struct vp_transfer x;

	(void)state;
	fake_verbs_hold(true);
	start(&x);
	while (!x.op.impl || !((struct verbs_xfer *)x.op.impl)->posted_bytes) {
		fake_verbs_step(1);
		vp_turn();
	}
	vp_close_peer(&vp_a);
	assert_int_equal(x.done, 1);
	assert_int_not_equal(x.op.result, 0);
	fake_verbs_hold(false);
	VP_AWAIT(vp_b.lost == 1);
	vp_still(&x);
	vp_transfer_fini(&x);
}

/* ---- liars ---- */

/* a says this of its running transfer: b ends the connection, with these words. */
static void lie(struct verbs_frame frame, struct vp_node *liar, const char *words)
{
	struct vp_node *other = liar == &vp_a ? &vp_b : &vp_a;
	struct vp_transfer x;

	fake_verbs_hold(true);
	start(&x);
	while (!x.op.impl || !((struct verbs_xfer *)x.op.impl)->posted_bytes) {
		fake_verbs_step(1);
		vp_turn();
	}
	frame.id = ((struct verbs_xfer *)x.op.impl)->net.id;
	verbs_send(vp_peer(liar), verbs_out_new(), &frame, NULL);
	fake_verbs_hold(false);
	VP_AWAIT(other->lost);
	assert_int_equal(other->why.code, ERR_PROTO);
	assert_non_null(strstr(other->why.text, words));
	VP_AWAIT(x.done && vp_b.dones == vp_b.requests);
	vp_transfer_fini(&x);
}

static void slice_beyond_the_slots_ends_the_peer(void **state)
{
	(void)state;
	lie((struct verbs_frame){.type = VERBS_SLICE, .slot = 99, .total = 4}, &vp_a,
	    "a slice");
}

static void slice_out_of_turn_ends_the_peer(void **state)
{
	(void)state;
	lie((struct verbs_frame){.type = VERBS_SLICE, .bytes = 7, .total = 4}, &vp_a,
	    "a slice");
}

static void slice_longer_than_a_slot_ends_the_peer(void **state)
{
	(void)state;
	lie((struct verbs_frame){.type = VERBS_SLICE, .total = 1u << 20}, &vp_a,
	    "a slice");
}

static void mark_before_the_last_slice_ends_the_peer(void **state)
{
	struct verbs_mark mark = {.count = 1};

	(void)state;
	lie((struct verbs_frame){.type = VERBS_MARK, .slot = verbs_mark_put(&mark)},
	    &vp_a, "before its last slice");
}

static void slot_invalid_ends_the_peer(void **state)
{
	(void)state;
	lie((struct verbs_frame){.type = VERBS_SLOT, .slot = 8}, &vp_b, "slot 8");
}

/* "Nothing is outstanding", says the destination of a pull, of slices that have not
 * left: what is said to have been served was not. */
static void fin_before_the_last_slice_has_left_ends_the_peer(void **state)
{
	const struct plan_run few = {
		.len = 256, .count = 1024, .src_stride = 512, .dst_stride = 320};
	struct verbs_frame fin = {.type = VERBS_FIN};
	struct verbs_xfer *served;
	struct vp_transfer x;

	(void)state;
	vp_peer(&vp_b)->window_bytes = 0; /* nothing leaves */
	vp_transfer_init(&x, XP_READ, &few, 1, VP_MIB);
	assert_int_equal(vp_post(&x), 0);
	VP_AWAIT(vp_b.in);
	served = container_of(vp_b.in, struct verbs_xfer, net.in);
	VP_AWAIT(vp_transport(&vp_b)->pack_pool->free + 1 < 1u << VERBS_SLOTS);
	VP_AWAIT(!served->busy); /* its only slice is gathered */
	fin.id = served->net.id;
	verbs_send(vp_peer(&vp_a), verbs_out_new(), &fin, NULL);
	VP_AWAIT(vp_b.dones == vp_b.requests);
	assert_int_equal(vp_b.failures, 1);
	VP_AWAIT(vp_b.lost);
	assert_int_equal(vp_b.why.code, ERR_PROTO);
	assert_non_null(strstr(vp_b.why.text, "FIN"));
	VP_AWAIT(x.done);
	assert_int_not_equal(x.op.result, 0);
	vp_transfer_fini(&x);
}

/* ---- pools ---- */

/* Closed while the helper that made it is at its last words: another helper lets go of
 * the memory, and is told of first. */
static void pool_closed_before_its_maker_is_back_is_freed_once(void **state)
{
	struct verbs_pool *pool;

	(void)state;
	assert_int_equal(verbs_pool_open(vp_transport(&vp_a), &pool), 0);
	atomic_store(&pool->phase, 1); /* made */
	pool->open.submitted = pool->open.started = true;
	verbs_pool_close(pool);
	VP_AWAIT(!offload_pending(vp_offload));
	pool->open.submitted = false;
	pool->open.done(&pool->open);
}

#define DEARLY(test) cmocka_unit_test_setup_teardown(test, begin_dear, vp_end)

int main(void)
{
	const struct CMUnitTest tests[] = {
		DEARLY(dear_requests_pack_short_rows),
		DEARLY(dear_requests_pack_short_rows_of_a_pull),
		cmocka_unit_test_setup_teardown(cheap_requests_pull_row_by_row,
						begin_cheap, vp_end),
		cmocka_unit_test_setup_teardown(cheap_requests_take_row_by_row,
						begin_cheap, vp_end),
		DEARLY(both_ways_are_the_same_to_memory),
		DEARLY(gathered_and_few_and_long_rows_are_not_packed),
		DEARLY(rows_of_gigabytes_are_not_packed),
		cmocka_unit_test_setup_teardown(responder_without_packing_gets_rows,
						begin_one_sided, vp_end),
		DEARLY(responder_record_has_path),
		DEARLY(more_transfers_than_slots_all_end),
		DEARLY(abort_at_any_step_is_quiesced_and_returns_slots),
		DEARLY(peer_lost_in_the_middle_is_quiesced),
		DEARLY(slice_beyond_the_slots_ends_the_peer),
		DEARLY(slice_out_of_turn_ends_the_peer),
		DEARLY(slice_longer_than_a_slot_ends_the_peer),
		DEARLY(mark_before_the_last_slice_ends_the_peer),
		DEARLY(slot_invalid_ends_the_peer),
		DEARLY(fin_before_the_last_slice_has_left_ends_the_peer),
		DEARLY(pool_closed_before_its_maker_is_back_is_freed_once),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
