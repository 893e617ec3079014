/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs when things go wrong: aborts with requests outstanding, what adapters
 * report, a peer that breaks off or says what it must not. After each end the
 * written memory is somebody else's, and the wire carries on with what it still
 * has: not a byte of it may arrive.
 */
#include "tests/lib/verbs_pair.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"

#define ABORTS 200u

static const struct plan_run pages = {.len = 64 * VP_KIB,
				      .count = 60,
				      .src_stride = 66 * VP_KIB,
				      .dst_stride = 65 * VP_KIB};

/* The wire is held; as much of it runs as it takes until bytes are posted, which
 * are a part of all. */
static void start_of(struct vp_transfer *x, enum xp_kind kind, const struct plan_run *run,
		     uint64_t bytes)
{
	vp_peer(&vp_a)->window_bytes = vp_transport(&vp_a)->window_max = VP_MIB;
	fake_verbs_hold(true);
	vp_transfer_init(x, kind, run, 1, bytes);
	assert_int_equal(vp_post(x), 0);
	while (!x->op.impl || !((struct verbs_xfer *)x->op.impl)->posted_bytes) {
		fake_verbs_step(1);
		vp_turn();
	}
	assert_true(fake_verbs_outstanding() > 7);
}

static void start(struct vp_transfer *x, enum xp_kind kind)
{
	start_of(x, kind, &pages, 4 * VP_MIB);
}

/* ---- aborts ---- */

static struct err gone(void)
{
	struct err err;

	err_set(&err, ERR_ABORTED, "the user went away");
	return err;
}

/* Of what is posted a part has run when the abort comes; the rest is outstanding. */
static void abort_one(enum xp_kind kind, bool by_answerer, unsigned int ran)
{
	struct err why = gone();
	struct vp_transfer x;
	unsigned int dones = vp_b.dones;

	start(&x, kind);
	fake_verbs_step(ran % 7);
	if (by_answerer) {
		VP_AWAIT(vp_b.in);
		verbs_transport.revoke(vp_b.in, &why);
	} else {
		verbs_transport.cancel(&x.op, &why);
	}
	assert_true(fake_verbs_outstanding() > 0);
	assert_int_equal(x.done, 0);
	while (!x.done || vp_b.dones == dones) {
		fake_verbs_step(1 + ran % 3);
		vp_turn();
		if (kind == XP_WRITE ? vp_b.dones > dones : x.done != 0) {
			/* the memory's owner was told: it is somebody else's */
			vp_still(&x);
			break;
		}
	}
	vp_failed(&x, ERR_ABORTED, "the user went away");
	VP_AWAIT(vp_b.dones > dones);
	vp_transfer_fini(&x);
	if (vp_a.lost + vp_b.lost) /* the connection lives on */
		fail_msg("%s; %s", vp_a.why.text, vp_b.why.text);
}

static void aborts(enum xp_kind kind)
{
	/* the wire is slower here than any deadline foresees */
	vp_transport(&vp_a)->net.fence_ns = vp_transport(&vp_b)->net.fence_ns =
		VP_WAIT_NS;
	for (unsigned int i = 0; i < ABORTS; i++) {
		abort_one(kind, i & 1, i);
	}
}

static void write_aborted_in_the_middle_lands_no_foreign_byte(void **state)
{
	(void)state;
	aborts(XP_WRITE);
}

static void read_aborted_in_the_middle_lands_no_foreign_byte(void **state)
{
	(void)state;
	aborts(XP_READ);
}

/* The wire stands still: only the death of the written side's queue pairs proves
 * that nothing comes any more. */
static void abort_over_a_frozen_wire_resets_the_owner_s_queue_pairs(void **state)
{
	struct err why = gone();
	struct vp_transfer x;

	(void)state;
	vp_transport(&vp_b)->net.fence_ns = 100 * LOOP_NS_PER_MS;
	start(&x, XP_WRITE);
	verbs_transport.revoke(vp_b.in, &why);
	VP_AWAIT(vp_b.dones);
	assert_int_equal(vp_b.done_err.code, ERR_ABORTED);
	assert_int_equal(fake_verbs_qps(2), 0); /* b's */
	vp_still(&x);
	VP_AWAIT(vp_b.lost && vp_a.lost && x.done);
	assert_int_equal(vp_b.why.code, ERR_FENCE);
	vp_transfer_fini(&x);
}

static void peer_lost_while_bytes_move_is_quiesced(void **state)
{
	struct vp_transfer x;

	(void)state;
	for (unsigned int i = 0; i < 20; i++) {
		fake_verbs_hold(true);
		vp_transfer_init(&x, i & 1 ? XP_READ : XP_WRITE, &pages, 1, 4 * VP_MIB);
		assert_int_equal(vp_post(&x), 0);
		for (unsigned int n = 0; n < 20 + 3 * i; n++) {
			fake_verbs_step(1);
			vp_turn();
		}
		vp_close_peer(i & 1 ? &vp_a : &vp_b); /* takes the queue pairs down */
		if (i & 1 ? x.done != 0 : vp_b.dones == vp_b.requests)
			vp_still(&x);
		fake_verbs_hold(false);
		VP_AWAIT(x.done && vp_b.dones == vp_b.requests);
		vp_close_peer(&vp_a);
		vp_close_peer(&vp_b);
		vp_transfer_fini(&x);
		vp_join();
	}
}

/* ---- what a request's failure says ---- */

static const struct {
	enum ibv_wc_status status;
	enum err_code code;
	const char *words;
} statuses[] = {
	{IBV_WC_RETRY_EXC_ERR, ERR_PEER, "all retries timed out"},
	{IBV_WC_RNR_RETRY_EXC_ERR, ERR_PROTO, "no receive posted"},
	{IBV_WC_REM_ACCESS_ERR, ERR_REVOKED, "remote access error"},
	{IBV_WC_LOC_PROT_ERR, ERR_INTERNAL, "local protection error"},
	{IBV_WC_REM_OP_ERR, ERR_TRANSPORT, "could not execute a request"},
	{IBV_WC_FATAL_ERR, ERR_IO, "the adapter is broken"},
	{IBV_WC_GENERAL_ERR, ERR_TRANSPORT, "a request failed"},
};

static void request_failed_names_device_port_and_peer(void **state)
{
	struct vp_transfer x;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(statuses); i++) {
		start(&x, XP_WRITE);
		fake_verbs_fail_next(0, statuses[i].status);
		fake_verbs_hold(false);
		vp_failed(&x, statuses[i].code, statuses[i].words);
		assert_non_null(strstr(x.op.err.text, "mlx5_0:1"));
		assert_non_null(strstr(x.op.err.text, vp_peer(&vp_a)->net.name));
		assert_true(x.op.err.retryable);
		assert_int_equal(x.op.err.scope, ERR_SCOPE_PEER);
		VP_AWAIT(vp_a.lost && vp_b.lost);
		vp_still(&x);
		vp_transfer_fini(&x);
		vp_close_peer(&vp_a);
		vp_close_peer(&vp_b);
		vp_join(); /* fresh queue pairs, fresh keys */
	}
}

static void stale_key_is_found_before_it_is_used(void **state)
{
	struct vp_transfer x;
	struct xp_reg *old;

	(void)state;
	vp_transfer_init(&x, XP_WRITE, &pages, 1, 4 * VP_MIB);
	old = x.dst.reg;
	assert_int_equal(verbs_transport.mem_reg(vp_b.xp, x.dst.memory, &x.dst.reg), 0);
	x.dst.local.reg = x.dst.reg;
	verbs_transport.mem_dereg(old);
	assert_int_equal(vp_post(&x), 0);
	vp_failed(&x, ERR_REVOKED, "re-registered");
	assert_int_equal(vp_a.lost + vp_b.lost, 0); /* it did not cost the connection */
	VP_AWAIT(vp_b.dones == vp_b.requests);
	vp_transfer_fini(&x);
}

static void chain_posted_in_part_loses_its_peer_only(void **state)
{
	const struct plan_run rows = {
		.len = 512, .count = 3000, .src_stride = 1024, .dst_stride = 1200};
	struct vp_transfer x;

	(void)state;
	vp_transfer_init(&x, XP_WRITE, &rows, 1, 4 * VP_MIB);
	fake_verbs_rules()->post_errno = ENOMEM; /* of the next chain */
	assert_int_equal(vp_post(&x), 0);
	vp_failed(&x, ERR_TRANSPORT, "post");
	VP_AWAIT(vp_a.lost && vp_b.lost);
	vp_still(&x);
	vp_transfer_fini(&x);
}

static void refusal_has_text_of_peer(void **state)
{
	struct vp_transfer x;

	(void)state;
	vp_b.answer = VP_REFUSE;
	vp_transfer_init(&x, XP_WRITE, &pages, 1, 4 * VP_MIB);
	assert_int_equal(vp_post(&x), 0);
	vp_failed(&x, ERR_REVOKED, "not this time");
	assert_int_equal(vp_a.lost, 0);
	vp_transfer_fini(&x);
}

static void other_plan_at_the_answerer_is_refused(void **state)
{
	const struct plan_run other = {.len = 64 * VP_KIB,
				       .count = 60,
				       .src_stride = 66 * VP_KIB,
				       .dst_stride = 66 * VP_KIB};
	struct plan *plan = vp_plan(&other, 1);
	struct vp_transfer x;

	(void)state;
	vp_transfer_init(&x, XP_WRITE, &pages, 1, 4 * VP_MIB);
	assert_int_equal(vp_post(&x), 0);
	vp_b.sides.plan = plan;
	vp_failed(&x, ERR_PLAN, "differs from");
	assert_int_equal(vp_a.lost, 0);
	VP_AWAIT(vp_b.dones == vp_b.requests);
	vp_transfer_fini(&x);
	plan_free(plan);
}

/* ---- asynchronous events ---- */

static void adapter_dead_loses_its_connections(void **state)
{
	struct vp_transfer x;

	(void)state;
	start(&x, XP_WRITE);
	fake_verbs_async(0, IBV_EVENT_DEVICE_FATAL);
	VP_AWAIT(vp_a.lost);
	fake_verbs_hold(false);
	vp_failed(&x, ERR_IO, "mlx5_0");
	assert_non_null(strstr(x.op.err.text, "removed or reset"));
	vp_transfer_fini(&x);
}

static void queue_pair_events_lose_the_peer_with_their_text(void **state)
{
	static const struct {
		enum ibv_event_type type;
		const char *words;
	} events[] = {
		{IBV_EVENT_QP_FATAL, "QP fatal"},
		{IBV_EVENT_QP_REQ_ERR, "invalid request"},
		{IBV_EVENT_QP_ACCESS_ERR, "may not be accessed"},
		{IBV_EVENT_PATH_MIG_ERR, "could not migrate"},
		{IBV_EVENT_CQ_ERR, "overrun"},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(events); i++) {
		fake_verbs_async(0, events[i].type);
		VP_AWAIT(vp_a.lost && vp_b.lost);
		assert_non_null(strstr(vp_a.why.text, events[i].words));
		assert_non_null(strstr(vp_a.why.text, "mlx5_0"));
		vp_close_peer(&vp_a);
		vp_close_peer(&vp_b);
		vp_join();
	}
}

static void events_without_harm_change_nothing(void **state)
{
	static const enum ibv_event_type events[] = {
		IBV_EVENT_LID_CHANGE, IBV_EVENT_PKEY_CHANGE,
		IBV_EVENT_GID_CHANGE, IBV_EVENT_SM_CHANGE,
		IBV_EVENT_PATH_MIG,   IBV_EVENT_QP_LAST_WQE_REACHED,
		IBV_EVENT_COMM_EST,
	};
	struct vp_transfer x;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(events); i++)
		fake_verbs_async(0, events[i]);
	vp_transfer_init(&x, XP_WRITE, &pages, 1, 4 * VP_MIB);
	assert_int_equal(vp_post(&x), 0);
	vp_moved(&x);
	assert_int_equal(vp_a.lost + vp_b.lost, 0);
	vp_transfer_fini(&x);
}

static void port_down_is_lost_after_retries_and_restored(void **state)
{
	struct vp_transfer x;

	(void)state;
	start(&x, XP_WRITE);
	fake_verbs_port(0, false);
	VP_AWAIT(vp_transport(&vp_a)->rails[0].down);
	assert_int_equal(vp_a.lost, 0);		       /* nothing is lost yet */
	fake_verbs_fail_next(0, IBV_WC_LOC_QP_OP_ERR); /* as rxe calls it */
	fake_verbs_hold(false);
	vp_failed(&x, ERR_IO, "the port is down");
	VP_AWAIT(vp_a.lost);
	fake_verbs_port(0, true);
	VP_AWAIT(!vp_transport(&vp_a)->rails[0].down);
	vp_close_peer(&vp_a);
	vp_close_peer(&vp_b);
	vp_join();
	vp_transfer_fini(&x);
}

/* Who only receives notices by knocking. */
static void receiver_alone_detects_cut_wire(void **state)
{
	struct vp_transfer x;

	(void)state;
	vp_b.answer = VP_HOLD;
	vp_transfer_init(&x, XP_WRITE, &pages, 1, 4 * VP_MIB);
	assert_int_equal(vp_post(&x), 0);
	VP_AWAIT(vp_b.in);
	fake_verbs_port(0, false);
	VP_AWAIT(vp_b.lost && vp_a.lost);
	assert_int_equal(vp_b.why.code, ERR_PEER);
	fake_verbs_port(0, true);
	vp_transfer_fini(&x);
}

/* ---- rails ---- */

static void works_over(unsigned int rail_of_all)
{
	struct vp_transfer x;

	for (uint32_t i = 0; i < vp_peer(&vp_a)->qp_count; i++)
		if (rail_of_all < 2)
			assert_int_equal(vp_peer(&vp_a)->qps[i].rail->index, rail_of_all);
	for (int kind = XP_WRITE; kind <= XP_READ; kind++) {
		vp_transfer_init(&x, (enum xp_kind)kind, &pages, 1, 4 * VP_MIB);
		assert_int_equal(vp_post(&x), 0);
		vp_moved(&x);
		vp_transfer_fini(&x);
	}
}

/* Devices 0, 1 are a's rails, 2, 3 are b's; with any of them down the other pair
 * serves, frames and all. */
static void rail_down_is_avoided_when_dialling(void **state)
{
	for (unsigned int down = 0; down < 4; down++) {
		vp_begin(state);
		fake_verbs_port(down, false);
		assert_int_equal(vp_open(&vp_a, "mlx5_0 mlx5_1"), 0);
		assert_int_equal(vp_open(&vp_b, "mlx5_2 mlx5_3"), 0);
		vp_join();
		assert_int_equal(vp_peer(&vp_a)->qp_count, 4);
		works_over(!(down % 2));
		vp_end(state);
	}
}

/* Frames go over it, so the connection goes with it (any other one's: test_verbs_rail).
 */
static void first_rail_lost_in_mid_transfer_is_clean_and_the_other_takes_over(
	void **state)
{
	/* large enough for all queue pairs */
	const struct plan_run large = {.len = 64 * VP_KIB,
				       .count = 120,
				       .src_stride = 66 * VP_KIB,
				       .dst_stride = 65 * VP_KIB};
	struct vp_transfer x;

	(void)state;
	start_of(&x, XP_WRITE, &large, 8 * VP_MIB);
	fake_verbs_port(0, false);
	fake_verbs_hold(false);
	VP_AWAIT(x.done);
	VP_AWAIT(vp_a.lost && vp_b.lost);
	vp_still(&x);
	vp_transfer_fini(&x);
	vp_close_peer(&vp_a);
	vp_close_peer(&vp_b);
	vp_join();
	works_over(1);
	fake_verbs_port(0, true);
	VP_AWAIT(!vp_transport(&vp_a)->rails[0].down);
	vp_close_peer(&vp_a);
	vp_close_peer(&vp_b);
	vp_join(); /* back on both */
	assert_int_equal(vp_peer(&vp_a)->qps[0].rail->index, 0);
	works_over(2);
}

int main(void)
{
#define RAILS(test) cmocka_unit_test_setup_teardown(test, vp_begin_two_rails, vp_end)
#define PAIR(test) cmocka_unit_test_setup_teardown(test, vp_begin_pair, vp_end)
	const struct CMUnitTest tests[] = {
		PAIR(write_aborted_in_the_middle_lands_no_foreign_byte),
		PAIR(read_aborted_in_the_middle_lands_no_foreign_byte),
		PAIR(abort_over_a_frozen_wire_resets_the_owner_s_queue_pairs),
		PAIR(peer_lost_while_bytes_move_is_quiesced),
		PAIR(request_failed_names_device_port_and_peer),
		PAIR(stale_key_is_found_before_it_is_used),
		PAIR(chain_posted_in_part_loses_its_peer_only),
		PAIR(refusal_has_text_of_peer),
		PAIR(other_plan_at_the_answerer_is_refused),
		PAIR(adapter_dead_loses_its_connections),
		PAIR(queue_pair_events_lose_the_peer_with_their_text),
		PAIR(events_without_harm_change_nothing),
		PAIR(port_down_is_lost_after_retries_and_restored),
		PAIR(receiver_alone_detects_cut_wire),
		cmocka_unit_test(rail_down_is_avoided_when_dialling),
		RAILS(first_rail_lost_in_mid_transfer_is_clean_and_the_other_takes_over),
	};

	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests_name("verbs_fault", tests, NULL, NULL);
}
