/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs when one of several rails dies: at every step of a push and of a pull, in
 * every way that a rail can, also while the transfer is aborted. The connection goes
 * on over the others, every byte is in its place, and what is still on the wire when
 * a transfer ends arrives nowhere. Devices 0 and 1 are a's rails, 2 and 3 are b's;
 * frames go over the first.
 */
#include "tests/lib/verbs_pair.h"

#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"

#define ROW (256 * VP_KIB)
#define ROWS 17u /* large enough for all queue pairs */
#define BYTES (5 * VP_MIB)

static const struct plan_run large = {
	.len = ROW, .count = ROWS, .src_stride = ROW + 4096, .dst_stride = ROW + 8192};

/* ---- deaths ---- */

static void requests_find_nobody(void)
{
	fake_verbs_fail_next(1, IBV_WC_RETRY_EXC_ERR);
}

static void confirmations_are_lost(void)
{
	fake_verbs_unconfirm_next(1, IBV_WC_RETRY_EXC_ERR);
}

static void mover_gives_up(void)
{
	fake_verbs_async(1, IBV_EVENT_QP_FATAL);
}

static void answerer_gives_up(void)
{
	fake_verbs_async(3, IBV_EVENT_QP_FATAL);
}

static void mover_s_port_is_down(void)
{
	fake_verbs_port(1, false);
}

static void answerer_s_port_is_down(void)
{
	fake_verbs_port(3, false);
}

static void (*const deaths[])(void) = {
	requests_find_nobody, confirmations_are_lost, mover_gives_up,
	answerer_gives_up,    mover_s_port_is_down,   answerer_s_port_is_down,
};

static void resurrect(void)
{
	for (unsigned int i = 1; i < 4; i += 2) {
		fake_verbs_fail_next(i, IBV_WC_SUCCESS);
		fake_verbs_unconfirm_next(i, IBV_WC_SUCCESS);
		fake_verbs_port(i, true);
	}
	VP_AWAIT(!vp_transport(&vp_a)->rails[1].down &&
		 !vp_transport(&vp_b)->rails[1].down);
}

/* ---- a transfer, and what must hold ---- */

static void slow_down(void)
{
	struct vp_node *const nodes[] = {&vp_a, &vp_b};

	for (size_t i = 0; i < ARRAY_LEN(nodes); i++) {
		vp_peer(nodes[i])->window_bytes = vp_transport(nodes[i])->window_max =
			VP_MIB;
		vp_transport(nodes[i])->net.fence_ns = VP_WAIT_NS;
	}
	/* packets of a dead queue pair still arrive, its farewell does not */
	fake_verbs_keep_late(true);
	fake_verbs_rules()->farewells_lost = true;
}

static void step_on(void)
{
	fake_verbs_step(1);
	vp_turn();
}

/* Odd ones have much under way on every queue pair. */
static void start(struct vp_transfer *x, enum xp_kind kind, unsigned int steps)
{
	slow_down();
	if (steps & 1)
		vp_peer(&vp_a)->window_bytes = vp_transport(&vp_a)->window_max =
			8 * VP_MIB;
	fake_verbs_hold(true);
	vp_transfer_init(x, kind, &large, 1, BYTES);
	assert_int_equal(vp_post(x), 0);
	while (!x->op.impl || !((struct verbs_xfer *)x->op.impl)->posted_bytes)
		step_on();
	for (unsigned int i = 0; i < steps; i++)
		step_on();
}

/* It is somebody else's now; whatever is on the wire comes. */
static void give_away_bytes(struct vp_transfer *x, size_t bytes)
{
	uint8_t *dst = x->dst.memory->base;

	memset(dst, 0x33, bytes);
	fake_verbs_late();
	if (dst[0] != 0x33 || memcmp(dst, dst + 1, bytes - 1) != 0)
		fail_msg("memory was written after the end");
}

static void give_away(struct vp_transfer *x)
{
	give_away_bytes(x, BYTES);
}

static void connection_is_whole(void)
{
	struct verbs_peer *a = vp_peer(&vp_a), *b = vp_peer(&vp_b);

	if (vp_a.lost + vp_b.lost)
		fail_msg("%s; %s", vp_a.why.text, vp_b.why.text);
	VP_AWAIT(a->rails_lost == b->rails_lost);
	assert_false(a->rails_lost & 1);
	VP_AWAIT(!a->rails_busy && !b->rails_busy);
	assert_int_equal(a->rails_dead, a->rails_lost);
	assert_int_equal(b->rails_dead, b->rails_lost);
	assert_int_equal(a->inflight_bytes, 0);
	assert_int_equal(b->grant_count, 0);
	assert_true(list_empty(&a->movers) && list_empty(&a->net.xfers));
}

/* Another one, over what is left. */
static void works_on(enum xp_kind kind)
{
	struct vp_transfer x;

	vp_transfer_init(&x, kind, &large, 1, BYTES);
	assert_int_equal(vp_post(&x), 0);
	vp_moved(&x);
	vp_transfer_fini(&x);
	connection_is_whole();
}

static void join_again(void)
{
	fake_verbs_rules()->farewells_lost = false;
	vp_close_peer(&vp_a);
	vp_close_peer(&vp_b);
	resurrect();
	vp_join();
	assert_int_equal(vp_peer(&vp_a)->qps[1].rail->index, 1);
}

/* Nothing ends while a lost rail may still write: at who writes not before it is dead at
 * both sides, at who is written not before it is here. */
static void turn_without_early_end(const struct vp_transfer *x)
{
	struct verbs_peer *a = vp_peer(&vp_a), *b = vp_peer(&vp_b);
	uint32_t open = ((struct verbs_xfer *)x->op.impl)->used & verbs_rail_open(a);
	bool dying = x->kind == XP_WRITE && verbs_rail_dying(b) &&
		     list_empty(&b->net.finished);
	unsigned int dones = vp_b.dones;

	if (!list_empty(&a->net.finished))
		open = 0; /* what was over before the rail was lost */
	vp_turn();
	if (x->done)
		assert_false(open & verbs_rail_open(a));
	if (vp_b.dones > dones && dying)
		assert_false(verbs_rail_dying(b));
}

/* True: the rail died of it. */
static bool dies_at(enum xp_kind kind, void (*die)(void), unsigned int step)
{
	struct vp_transfer x;
	bool died;

	start(&x, kind, step);
	die();
	while (step & 1 && !x.done) {
		fake_verbs_step(1);
		turn_without_early_end(&x);
	}
	fake_verbs_hold(false);
	vp_moved(&x);
	give_away(&x);
	died = vp_peer(&vp_a)->rails_lost != 0;
	connection_is_whole();
	vp_transfer_fini(&x);
	works_on(kind);
	join_again();
	return died;
}

/* Requests of a transfer, its frames and marks: so many steps there are, or fewer. */
#define STEPS (ROWS + 8)

static void dies_at_every_step(enum xp_kind kind)
{
	unsigned int died = 0;

	for (size_t i = 0; i < ARRAY_LEN(deaths); i++)
		for (unsigned int step = 0; step < STEPS; step++)
			died += dies_at(kind, deaths[i], step);
	/* near the end there may be nothing on the rail that could fail */
	assert_true(died > ARRAY_LEN(deaths) * STEPS / 2);
}

static void push_continues_after_rail_death_at_any_time(void **state)
{
	(void)state;
	dies_at_every_step(XP_WRITE);
}

static void pull_continues_after_rail_death_at_any_time(void **state)
{
	(void)state;
	dies_at_every_step(XP_READ);
}

/* What is counted anew from its start is posted when all the rest of it has ended. */
static void transfer_continues_after_slowest_queue_pair_ended(void **state)
{
	struct vp_transfer x;
	struct verbs_xfer *xfer;

	(void)state;
	for (int kind = XP_WRITE; kind <= XP_READ; kind++) {
		start(&x, (enum xp_kind)kind, 1);
		xfer = x.op.impl;
		fake_verbs_stall(vp_peer(&vp_a)->qps[2].qp);
		mover_gives_up();
		while (!vp_peer(&vp_a)->rails_reported)
			step_on();
		for (unsigned int i = 0; i < 4 * STEPS; i++)
			step_on();
		assert_true(xfer->again && xfer->busy);
		fake_verbs_stall(NULL);
		fake_verbs_hold(false);
		fake_verbs_step(1);
		vp_moved(&x);
		give_away(&x);
		connection_is_whole();
		vp_transfer_fini(&x);
		join_again();
	}
}

/* The memory's own adapter is the one that dies: a farther one does it. */
static void transfer_leaves_dead_nearest_rail(void **state)
{
	struct vp_transfer x;

	(void)state;
	fake_verbs_rules()->memory_node = 1;
	for (int kind = XP_WRITE; kind <= XP_READ; kind++) {
		start(&x, (enum xp_kind)kind, 4);
		assert_int_equal(((struct verbs_xfer *)x.op.impl)->used & 1, 0);
		mover_s_port_is_down();
		fake_verbs_hold(false);
		vp_moved(&x);
		give_away(&x);
		connection_is_whole();
		vp_transfer_fini(&x);
		join_again();
	}
}

/* ---- and an abort ---- */

static void abort_by(struct vp_transfer *x, bool answerer)
{
	struct err why;

	err_set(&why, ERR_ABORTED, "the user went away");
	if (answerer && vp_b.in)
		verbs_transport.revoke(vp_b.in, &why);
	else if (!answerer)
		verbs_transport.cancel(&x->op, &why);
}

/* In which order, how far apart, and by whom. */
static void aborted_at(enum xp_kind kind, void (*die)(void), unsigned int step,
		       unsigned int how)
{
	unsigned int dones = vp_b.dones, apart = how >> 2;
	struct vp_transfer x;
	uint64_t moves;

	start(&x, kind, step);
	if (how & 1)
		die();
	else
		abort_by(&x, how & 2);
	for (unsigned int i = 0; i < apart; i++)
		step_on();
	if (how & 1)
		abort_by(&x, how & 2);
	else
		die();
	VP_AWAIT(fake_verbs_step(1) == 0 || how & 2); /* it has heard of it */
	moves = fake_verbs_count()->moves;
	fake_verbs_hold(false);
	VP_AWAIT(kind == XP_WRITE ? vp_b.dones > dones : x.done);
	if (x.op.result != 0 || !x.done) {
		give_away(&x);
		if (!(how & 2)) /* who has stopped posts nothing more, nor again */
			assert_int_equal(fake_verbs_count()->moves, moves);
		VP_AWAIT(x.done && vp_b.dones > dones);
		give_away(&x);
	}
	VP_AWAIT(x.done && vp_b.dones > dones);
	connection_is_whole();
	vp_transfer_fini(&x);
	works_on(kind);
	join_again();
}

static void aborted_at_every_step(enum xp_kind kind)
{
	for (unsigned int how = 0; how < 8; how++)
		for (unsigned int step = how & 1; step < STEPS; step += 2)
			aborted_at(kind, deaths[(how + step) % ARRAY_LEN(deaths)], step,
				   how);
}

static void push_aborted_while_its_rail_dies_is_quiesced(void **state)
{
	(void)state;
	aborted_at_every_step(XP_WRITE);
}

static void pull_aborted_while_its_rail_dies_is_quiesced(void **state)
{
	(void)state;
	aborted_at_every_step(XP_READ);
}

/* ---- transfers that stay on one queue pair ---- */

#define SMALL 8u

/* Of these nothing is whole when the last one has begun. */
static const struct plan_run small = {.len = 32 * VP_KIB,
				      .count = 60,
				      .src_stride = 64 * VP_KIB,
				      .dst_stride = 96 * VP_KIB};

static struct verbs_xfer *xfer_of(const struct vp_transfer *x)
{
	return x->op.impl;
}

static bool all_posted(const struct vp_transfer *x)
{
	for (unsigned int i = 0; i < SMALL; i++)
		if (xfer_of(&x[i])->posted_bytes < x[i].plan->bytes)
			return false;
	return true;
}

/* All of them, posted whole; returns the queue pairs of each. */
static void post_small(struct vp_transfer *x, uint32_t used[SMALL])
{
	struct xp_inbound *in[SMALL];
	struct xp_sides sides[SMALL];

	slow_down();
	vp_peer(&vp_a)->window_bytes = vp_transport(&vp_a)->window_max = 64 * VP_MIB;
	vp_b.answer = VP_HOLD;
	for (unsigned int i = 0; i < SMALL; i++) {
		vp_transfer_init(&x[i], i & 1 ? XP_READ : XP_WRITE, &small, 1,
				 6 * VP_MIB);
		assert_int_equal(vp_post(&x[i]), 0);
		VP_AWAIT(vp_b.requests == i + 1);
		in[i] = vp_b.in;
		sides[i] = vp_b.sides;
	}
	fake_verbs_hold(true);
	for (unsigned int i = 0; i < SMALL; i++)
		verbs_transport.land(in[i], &sides[i], NULL);
	while (!all_posted(x))
		step_on();
	vp_b.answer = VP_LAND;
	for (unsigned int i = 0; i < SMALL; i++) {
		assert_non_null(x[i].op.impl);
		assert_int_equal(xfer_of(&x[i])->posted_bytes, x[i].plan->bytes);
		used[i] = xfer_of(&x[i])->used;
		assert_int_equal(__builtin_popcount(used[i]), 1);
	}
}

/* Those on the dead rail are posted again, those on the other one are not. */
static void transfers_of_other_rails_are_not_touched(void **state)
{
	const uint32_t dead = 1u << 1 | 1u << 3;
	unsigned int there = 0, again = 0;
	struct vp_transfer x[SMALL];
	uint32_t used[SMALL];

	(void)state;
	post_small(x, used);
	fake_verbs_count()->moves = 0;
	mover_s_port_is_down();
	for (bool done = false; !done;) {
		done = true;
		fake_verbs_step(1);
		vp_turn();
		for (unsigned int i = 0; i < SMALL; i++) {
			done &= x[i].done != 0;
			if (x[i].op.impl && !(used[i] & dead)) {
				assert_int_equal(xfer_of(&x[i])->posted_bytes,
						 x[i].plan->bytes);
				assert_int_equal(xfer_of(&x[i])->used, used[i]);
			}
		}
	}
	fake_verbs_hold(false);
	for (unsigned int i = 0; i < SMALL; i++) {
		vp_moved(&x[i]);
		give_away_bytes(&x[i], 6 * VP_MIB);
		there += !!(used[i] & dead);
		vp_transfer_fini(&x[i]);
	}
	again = (unsigned int)fake_verbs_count()->moves;
	assert_true(there > 0 && there < SMALL);
	assert_true(again > 0 && again <= there * small.count);
	connection_is_whole();
}

/* ---- one after the other ---- */

static int begin_three_rails(void **state)
{
	vp_begin(state);
	fake_verbs_device("mlx5_4", "eth4", "10.9.2.1", 0);
	fake_verbs_device("mlx5_5", "eth5", "10.9.2.2", 0);
	assert_int_equal(vp_open(&vp_a, "mlx5_0 mlx5_1 mlx5_4"), 0);
	assert_int_equal(vp_open(&vp_b, "mlx5_2 mlx5_3 mlx5_5"), 0);
	vp_join();
	return 0;
}

static void last_but_one_rail_carries_on(void **state)
{
	unsigned int lost = 0, plays = 0;
	struct vp_transfer x;

	(void)state;
	for (unsigned int step = 0; step < 2 * STEPS; step += 3, plays++) {
		start(&x, XP_WRITE, step % STEPS);
		mover_s_port_is_down();
		for (unsigned int i = 0; i < 2 + step / 3; i++)
			step_on();
		fake_verbs_port(5, false);
		fake_verbs_hold(false);
		vp_moved(&x);
		give_away(&x);
		lost += vp_peer(&vp_a)->rails_lost == 6;
		connection_is_whole();
		vp_transfer_fini(&x);
		works_on(XP_WRITE);
		fake_verbs_port(5, true);
		join_again();
	}
	assert_true(lost > plays / 3);
}

/* Queue pairs with marks of it come before and behind the dead ones. */
static void rail_in_the_middle_dies_at_every_step(void **state)
{
	struct vp_transfer x;

	(void)state;
	for (unsigned int step = 0; step < STEPS; step++) {
		start(&x, XP_WRITE, step);
		fake_verbs_async(step & 2 ? 3 : 5, IBV_EVENT_QP_FATAL);
		for (unsigned int i = 0; step & 1 && i < 2 * STEPS; i++)
			step_on();
		fake_verbs_hold(false);
		vp_moved(&x);
		give_away(&x);
		connection_is_whole();
		vp_transfer_fini(&x);
		join_again();
	}
}

/* ---- packed ones ---- */

static int begin_packing(void **state)
{
	vp_begin(state);
	vp_config.verbs_request_ns = 100000; /* any row is cheaper to copy */
	assert_int_equal(vp_open(&vp_a, "mlx5_0 mlx5_1"), 0);
	assert_int_equal(vp_open(&vp_b, "mlx5_2 mlx5_3"), 0);
	vp_join();
	return 0;
}

/* Over the first rail, all of it: only the mark of a push comes twice. */
static void packed_while_the_other_rail_dies(enum xp_kind kind)
{
	const struct plan_run rows = {
		.len = 256, .count = 8192, .src_stride = 512, .dst_stride = 320};
	struct vp_transfer x;

	for (unsigned int step = 0; step < 40; step++) {
		vp_transfer_init(&x, kind, &rows, 1, BYTES);
		fake_verbs_hold(true);
		assert_int_equal(vp_post(&x), 0);
		for (unsigned int i = 0; i < step; i++)
			step_on();
		fake_verbs_async(step & 1 ? 1 : 3, IBV_EVENT_QP_FATAL);
		vp_turn();
		fake_verbs_hold(false);
		vp_moved(&x);
		assert_true(x.op.way.packed);
		give_away(&x);
		VP_AWAIT(vp_peer(&vp_a)->rails_lost == 2);
		connection_is_whole();
		vp_transfer_fini(&x);
		join_again();
	}
}

static void packed_push_does_not_feel_the_other_rail_die(void **state)
{
	(void)state;
	packed_while_the_other_rail_dies(XP_WRITE);
}

static void packed_pull_does_not_feel_the_other_rail_die(void **state)
{
	(void)state;
	packed_while_the_other_rail_dies(XP_READ);
}

/* ---- as if there were no other ---- */

/* The connection is lost with the rail, and the next one has it all. */
static void costs_the_connection(void (*die)(void), enum err_code code, const char *words)
{
	struct vp_transfer x;

	start(&x, XP_WRITE, 5);
	die();
	fake_verbs_hold(false);
	vp_failed(&x, code, words);
	assert_true(x.op.err.retryable);
	VP_AWAIT(vp_a.lost && vp_b.lost);
	assert_int_equal(vp_peer(&vp_a)->rails_lost, 0);
	give_away(&x);
	vp_transfer_fini(&x);
	fake_verbs_port(0, true);
	VP_AWAIT(!vp_transport(&vp_a)->rails[0].down);
	join_again();
	works_on(XP_WRITE);
}

static void first_port_is_down(void)
{
	fake_verbs_port(0, false);
}

static void adapter_is_gone(void)
{
	fake_verbs_async(1, IBV_EVENT_DEVICE_FATAL);
}

static void key_is_refused(void)
{
	fake_verbs_fail_next(1, IBV_WC_REM_ACCESS_ERR);
}

/* Told in one go: of a connection that ends already no rail is lost. */
static void key_is_refused_and_the_rail_dies(void)
{
	fake_verbs_async(1, IBV_EVENT_QP_ACCESS_ERR);
	fake_verbs_async(1, IBV_EVENT_QP_FATAL);
}

static void memory_is_out(void)
{
	struct err err;

	err_set(&err, ERR_PEER, "retries used up");
	mem_fail_at(1);
	assert_false(verbs_rail_fail(&vp_peer(&vp_a)->qps[1], &err));
	mem_fail_at(0);
	assert_int_equal(err_last()->code, ERR_OK); /* the connection's words say why */
}

static void transfer_uncertain_loses_the_connection(void **state)
{
	(void)state;
	costs_the_connection(first_port_is_down, ERR_IO, "the port is down");
	costs_the_connection(key_is_refused, ERR_REVOKED, "remote access error");
	costs_the_connection(key_is_refused_and_the_rail_dies, ERR_TRANSPORT,
			     "memory that may not be accessed");
	costs_the_connection(memory_is_out, ERR_PEER, "retries used up");
}

/* Its last queue pair is still dialled: who is not connected yet has no rail to lose. */
static void rail_dead_before_connection_is_ready_loses_it(void **state)
{
	struct verbs_peer *a;

	(void)state;
	vp_close_peer(&vp_a);
	vp_close_peer(&vp_b);
	fake_verbs_rules()->connects_left = 3;
	vp_connect(&vp_b, &vp_a, 2, 1);
	vp_connect(&vp_a, &vp_b, 1, 2);
	a = vp_peer(&vp_a);
	VP_AWAIT(a->qps_up == 3);
	assert_int_equal(a->qp_count, 4);
	assert_int_equal(sm_state(&a->qps[1].sm), VERBS_QP_UP);
	mover_gives_up();
	VP_AWAIT(vp_a.lost || a->rails_lost);
	assert_int_equal(a->rails_lost, 0);
	assert_non_null(strstr(vp_a.why.text, "QP fatal"));
	fake_verbs_rules()->connects_left = -1;
	join_again();
	works_on(XP_WRITE);
}

static void adapter_gone_loses_the_connection(void **state)
{
	struct vp_transfer x;

	(void)state;
	start(&x, XP_WRITE, 5);
	adapter_is_gone();
	fake_verbs_hold(false);
	vp_failed(&x, ERR_IO, "removed or reset");
	VP_AWAIT(vp_a.lost && vp_b.lost);
	vp_transfer_fini(&x);
}

/* Receives for one more round of marks: that is the first rail's. */
static void rail_without_spare_receives_loses_the_connection(void **state)
{
	struct vp_transfer x;

	vp_begin(state);
	fake_verbs_rules()->max_qp_wr = VERBS_SQ_DEPTH;
	fake_verbs_device("mlx5_4", "eth4", "10.9.2.1", 0);
	fake_verbs_device("mlx5_5", "eth5", "10.9.2.2", 0);
	assert_int_equal(vp_open(&vp_a, "mlx5_0 mlx5_1 mlx5_4"), 0);
	assert_int_equal(vp_open(&vp_b, "mlx5_2 mlx5_3 mlx5_5"), 0);
	vp_join();
	assert_int_equal(vp_peer(&vp_a)->qps[1].rq_depth, 2 * VERBS_GRANTS);
	start(&x, XP_WRITE, 5);
	fake_verbs_port(4, false);
	fake_verbs_hold(false);
	vp_moved(&x);
	connection_is_whole();
	vp_transfer_fini(&x);
	start(&x, XP_WRITE, 5);
	fake_verbs_port(1, false);
	fake_verbs_hold(false);
	vp_failed(&x, ERR_IO, "the port is down");
	VP_AWAIT(vp_a.lost && vp_b.lost);
	give_away(&x);
	vp_transfer_fini(&x);
	vp_end(state);
}

/* The other side never says that its queue pairs are dead. */
static void rail_dead_unreported_ends_at_the_fence(void **state)
{
	struct vp_transfer x;

	(void)state;
	start(&x, XP_WRITE, 5);
	vp_transport(&vp_a)->net.fence_ns = 50 * LOOP_NS_PER_MS;
	mover_gives_up(); /* and the wire stands still */
	VP_AWAIT(vp_a.lost);
	assert_int_equal(vp_a.why.code, ERR_FENCE);
	assert_int_not_equal(x.op.result, 0);
	fake_verbs_hold(false);
	VP_AWAIT(vp_b.lost);
	give_away(&x);
	vp_transfer_fini(&x);
}

/* Nothing else looks at the clock, which is not set back when it is lost once more. */
static void rail_idle_dead_unreported_ends_at_the_fence(void **state)
{
	struct verbs_peer *b = vp_peer(&vp_b);
	uint64_t deadline_ns;
	struct err err;

	(void)state;
	slow_down();
	fake_verbs_hold(true);
	vp_transport(&vp_b)->net.fence_ns = 300 * LOOP_NS_PER_MS;
	assert_false(loop_timer_running(&b->net.timer));
	answerer_gives_up();
	VP_AWAIT(b->rails_lost);
	deadline_ns = b->rails_deadline_ns;
	assert_true(b->net.timer.at_ns <= deadline_ns);
	net_peer_watch(&b->net,
		       loop_now_ns(vp_loop) + LOOP_NS_PER_MS); /* something else */
	vp_spin_ms(2);
	err_set(&err, ERR_PEER, "retries used up");
	assert_true(verbs_rail_fail(&b->qps[1], &err));
	assert_int_equal(b->rails_deadline_ns, deadline_ns);
	VP_AWAIT(vp_b.lost);
	assert_int_equal(vp_b.why.code, ERR_FENCE);
	fake_verbs_hold(false);
}

/* Its marks are posted, and one of them stands still. */
static void start_to_the_marks(struct vp_transfer *x)
{
	start(x, XP_WRITE, 1);
	fake_verbs_stall(vp_peer(&vp_a)->qps[2].qp);
	while (!xfer_of(x)->ended)
		step_on();
}

/* Marks of a new round need a frame, when the first round took the spare one. */
static void last_message_without_memory_loses_the_connection(void **state)
{
	struct vp_transfer x;

	(void)state;
	start_to_the_marks(&x);
	mover_gives_up();
	while (!vp_peer(&vp_b)->rails_lost)
		step_on();
	mem_fail_from(1);
	fake_verbs_stall(NULL);
	fake_verbs_hold(false);
	fake_verbs_step(1);
	VP_AWAIT(vp_a.lost);
	mem_fail_at(0);
	assert_int_equal(vp_a.why.code, ERR_NOMEM);
	VP_AWAIT(x.done && vp_b.lost);
	assert_int_not_equal(x.op.result, 0);
	give_away(&x);
	vp_transfer_fini(&x);
}

/* ---- liars ---- */

static void lie(uint32_t rail, unsigned int times)
{
	const struct verbs_frame frame = {.type = VERBS_RAIL, .slot = rail};

	while (times--)
		verbs_send(vp_peer(&vp_a), verbs_out_new(), &frame, NULL);
	VP_AWAIT(vp_b.lost && vp_a.lost);
	assert_int_equal(vp_b.why.code, ERR_PROTO);
	assert_non_null(strstr(vp_b.why.text, "the loss of rail"));
	vp_close_peer(&vp_a);
	vp_close_peer(&vp_b);
	vp_join();
}

static void rail_report_invalid_ends_the_peer(void **state)
{
	(void)state;
	lie(0, 1);
	lie(2, 1);
	lie(32 + 1, 1);
	lie(UINT32_MAX, 1);
	lie(1, 2);
}

/* It reaps a rail and says DONE behind that, but has not got the new marks. */
static void done_before_the_new_marks_ends_the_peer(void **state)
{
	struct verbs_frame rail = {.type = VERBS_RAIL, .slot = 1};
	struct verbs_frame done = {.type = VERBS_DONE};
	struct vp_transfer x;

	(void)state;
	start_to_the_marks(&x);
	done.id = xfer_of(&x)->net.id;
	verbs_send(vp_peer(&vp_b), verbs_out_new(), &rail, NULL);
	verbs_send(vp_peer(&vp_b), verbs_out_new(), &done, NULL);
	VP_AWAIT(fake_verbs_step(1) == 0 || vp_a.lost || x.done);
	VP_AWAIT(vp_a.lost || x.done);
	assert_int_equal(vp_a.lost, 1);
	assert_int_equal(vp_a.why.code, ERR_PROTO);
	assert_non_null(strstr(vp_a.why.text, "DONE"));
	fake_verbs_stall(NULL);
	fake_verbs_hold(false);
	fake_verbs_step(1);
	VP_AWAIT(x.done && vp_b.lost);
	assert_int_not_equal(x.op.result, 0);
	give_away(&x);
	vp_transfer_fini(&x);
}

/* A mark of a generation that never was, or not any more. */
static void mark_of_another_generation_ends_the_peer(void **state)
{
	struct vp_transfer x;

	(void)state;
	for (unsigned int age = 1; age < 4; age++) {
		start(&x, XP_WRITE, 5);
		mover_s_port_is_down();
		while (!vp_peer(&vp_b)->rails_dead)
			step_on();
		xfer_of(&x)->generation += (uint16_t)(age - 1);
		fake_verbs_hold(false);
		if (age == 1) { /* what the mover has, and one more as it hears of it */
			vp_moved(&x);
		} else {
			VP_AWAIT(x.done && vp_a.lost && vp_b.lost);
			assert_int_equal(vp_b.why.code, ERR_PROTO);
		}
		give_away(&x);
		vp_transfer_fini(&x);
		join_again();
	}
}

/* It says those of the round before once more, and never this one's. */
static void mark_of_the_generation_before_is_no_end(void **state)
{
	struct vp_transfer x;

	(void)state;
	start(&x, XP_WRITE, 5);
	mover_s_port_is_down();
	while (!vp_peer(&vp_b)->rails_dead)
		step_on();
	xfer_of(&x)->generation--;
	fake_verbs_hold(false);
	VP_AWAIT(xfer_of(&x)->ended);
	vp_spin_ms(20);
	assert_int_equal(x.done + vp_b.dones + vp_a.lost + vp_b.lost, 0);
	vp_transport(&vp_a)->net.fence_ns = 50 * LOOP_NS_PER_MS;
	abort_by(&x, false);
	VP_AWAIT(vp_a.lost && vp_b.lost);
	assert_int_equal(vp_a.why.code, ERR_FENCE);
	give_away(&x);
	vp_transfer_fini(&x);
}

int main(void)
{
#define RAILS(test) cmocka_unit_test_setup_teardown(test, vp_begin_two_rails, vp_end)
	const struct CMUnitTest tests[] = {
		RAILS(push_continues_after_rail_death_at_any_time),
		RAILS(pull_continues_after_rail_death_at_any_time),
		RAILS(transfer_continues_after_slowest_queue_pair_ended),
		RAILS(transfer_leaves_dead_nearest_rail),
		RAILS(push_aborted_while_its_rail_dies_is_quiesced),
		RAILS(pull_aborted_while_its_rail_dies_is_quiesced),
		RAILS(transfers_of_other_rails_are_not_touched),
		cmocka_unit_test_setup_teardown(last_but_one_rail_carries_on,
						begin_three_rails, vp_end),
		cmocka_unit_test_setup_teardown(rail_in_the_middle_dies_at_every_step,
						begin_three_rails, vp_end),
		cmocka_unit_test_setup_teardown(
			packed_push_does_not_feel_the_other_rail_die, begin_packing,
			vp_end),
		cmocka_unit_test_setup_teardown(
			packed_pull_does_not_feel_the_other_rail_die, begin_packing,
			vp_end),
		RAILS(transfer_uncertain_loses_the_connection),
		RAILS(rail_dead_before_connection_is_ready_loses_it),
		RAILS(adapter_gone_loses_the_connection),
		cmocka_unit_test(rail_without_spare_receives_loses_the_connection),
		RAILS(rail_dead_unreported_ends_at_the_fence),
		RAILS(rail_idle_dead_unreported_ends_at_the_fence),
		RAILS(rail_report_invalid_ends_the_peer),
		RAILS(last_message_without_memory_loses_the_connection),
		RAILS(done_before_the_new_marks_ends_the_peer),
		RAILS(mark_of_another_generation_ends_the_peer),
		RAILS(mark_of_the_generation_before_is_no_end),
	};

	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests_name("verbs_rail", tests, NULL, NULL);
}
