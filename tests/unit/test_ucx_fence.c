/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ucx, the promise "still": refused, canceled, revoked, closed, killed, frozen,
 * in the middle of a transfer; afterwards no byte changes.
 */
#include "tests/lib/ucx_pair.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

/* ---- refusal, stop ---- */

static void request_refused_has_the_text(void **state)
{
	struct up_big big;

	(void)state;
	up_b.answer = ANSWER_REFUSE;
	up_big_start(&big, XP_WRITE, false);
	await(big.op.done && up_b.dones);
	assert_int_equal(big.op.op.err.code, ERR_REVOKED);
	assert_string_equal(big.op.op.err.text, "not this time");
	assert_int_equal(up_b.failures, 1);
	up_big_end(&big);
	up_big_start(&big, XP_READ, false);
	await(big.op.done && up_b.dones == 2);
	assert_int_equal(big.op.op.result, -err_errno(ERR_REVOKED));
	up_big_end(&big);
}

static void plans_different_fail_both_sides(void **state)
{
	static const struct plan_run other = {.len = 4096, .count = 1};
	struct plan *plan = up_plan(&other, 1);
	struct up_big big;

	(void)state;
	up_b.answer = ANSWER_HOLD;
	up_big_start(&big, XP_WRITE, false);
	await(up_b.held);
	up_b.sides.plan = plan;
	up_b.t->ops->land(up_b.held, &up_b.sides, NULL);
	await(big.op.done && up_b.dones);
	assert_int_equal(big.op.op.err.code, ERR_PLAN);
	assert_int_equal(up_b.done_err.code, ERR_PLAN);
	up_big_end(&big);
	plan_free(plan);
}

static void cancel(struct up_op *op)
{
	struct err why;

	err_set(&why, ERR_ABORTED, "an engine said so");
	up_a.t->ops->cancel(&op->op, &why);
	up_a.t->ops->cancel(&op->op, &why);
	assert_int_equal(op->done, 0);
}

static void cancel_in_flight(enum xp_kind kind, bool rows)
{
	struct up_big big;
	unsigned int dones = up_b.dones;

	up_big_start(&big, kind, rows);
	await(big.op.op.moved > 0);
	assert_true(big.op.op.moved < big.plan->bytes);
	cancel(&big.op);
	await(big.op.done);
	if (kind == XP_WRITE)
		assert_int_equal(up_b.dones, dones + 1);
	assert_int_equal(big.op.op.err.code, ERR_ABORTED);
	up_assert_still(&big);
	assert_int_equal(big.op.done, 1);
	await(up_b.dones == dones + 1);
	assert_int_equal(up_b.done_err.code, ERR_ABORTED);
	up_big_end(&big);
}

static void cancel_in_flight_leaves_memory_quiesced(void **state)
{
	(void)state;
	cancel_in_flight(XP_WRITE, false);
	cancel_in_flight(XP_WRITE, true);
	cancel_in_flight(XP_READ, false);
	cancel_in_flight(XP_READ, true);
	assert_false(up_a.lost || up_b.lost);
	up_b.failures = 0;
	up_every_shape(XP_WRITE, false, false);
}

static void cancel_before_the_answer_ends_both(void **state)
{
	struct up_big big;

	(void)state;
	up_b.answer = ANSWER_HOLD;
	up_big_start(&big, XP_WRITE, false);
	await(up_b.held);
	cancel(&big.op);
	await(big.op.done && up_b.dones);
	assert_int_equal(up_b.failures, 1);
	assert_null(up_b.held);
	up_big_end(&big);
}

static void cancel_before_the_request_left_is_local(void **state)
{
	struct up_big big;

	(void)state;
	up_big_start(&big, XP_WRITE, false);
	cancel(&big.op);
	await(big.op.done);
	assert_int_equal(big.op.op.err.code, ERR_ABORTED);
	up_spin_ms(100);
	assert_int_equal(up_b.requests, 0);
	up_big_end(&big);
}

static void revoke_in_flight(enum xp_kind kind, bool rows)
{
	struct up_big big;
	unsigned int dones = up_b.dones;
	struct xp_inbound *in;
	struct err why;

	up_b.answer = ANSWER_HOLD;
	up_big_start(&big, kind, rows);
	await(up_b.held);
	in = up_b.held;
	up_b.t->ops->land(in, &up_b.sides, NULL);
	await(in->moved > 0 || up_b.dones > dones);
	err_set(&why, ERR_SESSION, "engine gone");
	assert_int_equal(up_b.dones, dones);
	up_b.t->ops->revoke(in, &why);
	up_b.t->ops->revoke(in, &why);
	await(up_b.dones == dones + 1);
	assert_int_equal(up_b.done_err.code, ERR_SESSION);
	if (kind == XP_READ)
		await(big.op.done);
	up_assert_still(&big);
	await(big.op.done);
	assert_int_equal(big.op.op.err.code, ERR_SESSION);
	assert_string_equal(big.op.op.err.text, "engine gone");
	up_big_end(&big);
}

static void revoke_in_flight_leaves_memory_quiesced(void **state)
{
	(void)state;
	revoke_in_flight(XP_WRITE, false);
	revoke_in_flight(XP_WRITE, true);
	revoke_in_flight(XP_READ, false);
	revoke_in_flight(XP_READ, true);
	assert_false(up_a.lost || up_b.lost);
}

static void close_in_flight(enum xp_kind kind, bool rows, struct up_node *closer)
{
	struct up_big big;

	up_b.dones = 0;
	up_big_start(&big, kind, rows);
	await(big.op.op.moved > 0);
	up_close(closer);
	assert_int_equal(closer == &up_a ? big.op.done : up_b.dones, 1);
	await(big.op.done && up_b.dones == 1);
	assert_true(big.op.op.result < 0);
	up_assert_still(&big);
	await(closer == &up_a ? up_b.lost : up_a.lost);
	up_big_end(&big);
	up_rejoin();
}

static void close_in_flight_ends_everything(void **state)
{
	(void)state;
	close_in_flight(XP_WRITE, false, &up_a);
	close_in_flight(XP_WRITE, true, &up_b);
	close_in_flight(XP_READ, true, &up_a);
	close_in_flight(XP_READ, false, &up_b);
}

static void memory_faulted_fails_the_transfer_only(void **state)
{
	static const struct plan_run run = {
		.len = 4096, .count = 100, .src_stride = 8192, .dst_stride = 4096};
	struct plan *plan = up_plan(&run, 1);
	struct up_place src, dst;
	struct up_op op;

	(void)state;
	assert_int_equal(memory_guard_install(), 0); /* cmocka took SIGBUS */
	up_place_init(&src, &up_a, MIB, true);
	up_place_init(&dst, &up_b, MIB, false);
	assert_int_equal(ftruncate(src.memory->fd, 0), 0);
	up_op_init(&op, XP_WRITE, plan, &src, &dst);
	up_b.sides = op.op.sides;
	assert_int_equal(up_a.t->ops->post(up_a.peer, &op.op), 0);
	await(op.done && up_b.dones);
	assert_int_equal(op.op.err.code, ERR_FAULT);
	assert_int_equal(up_b.done_err.code, ERR_FAULT);
	assert_false(up_a.lost || up_b.lost);
	up_place_fini(&src, &up_a);
	up_place_fini(&dst, &up_b);
	plan_free(plan);
}

static void await_arrival(struct up_big *big, struct up_node *n)
{
	static const struct plan_run run = {.len = 64 * MIB, .count = 1};

	*big = (struct up_big){.plan = up_plan(&run, 1)};
	big->src_node = big->dst_node = n;
	up_place_init(&big->src, n, 64 * MIB, false);
	up_place_init(&big->dst, n, 64 * MIB, false);
	n->answer = ANSWER_HOLD;
	n->sides = (struct xp_sides){.plan = big->plan,
				     .src = &big->src.buffer,
				     .src_count = 1,
				     .dst = &big->dst.buffer,
				     .dst_count = 1};
	await(n->held);
	n->t->ops->land(n->held, &n->sides, NULL);
	await(n->dones || n->held->moved > 0);
	assert_int_equal(n->dones, 0);
}

/* Long before any timer would (libucp's own keepalive: 20 s), and long enough for a
 * machine that stands still for a while. */
#define SEEN_NS (4 * LOOP_NS_PER_S)

static void process_killed_in_flight_loses_the_peer(void **state)
{
	static const char *const kinds[] = {"writer", "reader"};
	struct up_big big;
	uint64_t killed_ns;
	pid_t pid;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(kinds); i++) {
		pid = up_child_start(kinds[i], &up_b);
		await_arrival(&big, &up_b);
		kill(pid, SIGKILL);
		waitpid(pid, NULL, 0); /* its end is its own business */
		killed_ns = loop_clock_ns(up_loop);
		await(up_b.lost);
		assert_true(loop_clock_ns(up_loop) - killed_ns < SEEN_NS);
		assert_int_equal(up_b.dones, 1);
		assert_int_equal(up_b.failures, 1);
		assert_int_equal(up_b.lost_why.code, ERR_PEER);
		up_assert_still(&big);
		up_big_end(&big);
		up_close(&up_b);
		up_b.lost = up_b.closed = false;
		up_b.dones = up_b.failures = 0;
	}
}

/* A frozen daemon ends nothing: the fence must cut it off. When it runs on, what
 * it still sends meets nobody. */
static void process_frozen_is_cut_off_at_the_fence(void **state)
{
	static const char *const kinds[] = {"writer", "reader"};
	uint64_t stopped_ns;
	struct up_big big;
	struct err why;
	pid_t pid;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(kinds); i++) {
		pid = up_child_start(kinds[i], &up_b);
		await_arrival(&big, &up_b);
		kill(pid, SIGSTOP);
		up_spin_ms(100);
		assert_int_equal(up_b.dones, 0);
		err_set(&why, ERR_SESSION, "engine gone");
		stopped_ns = loop_clock_ns(up_loop);
		up_b.t->ops->revoke(up_b.held, &why);
		await(up_b.dones);
		assert_int_equal(up_b.done_err.code, ERR_SESSION);
		assert_true(loop_clock_ns(up_loop) - stopped_ns <
			    up_config.fence_timeout_ns + SEEN_NS);
		kill(pid, SIGCONT);
		up_assert_still(&big);
		kill(pid, SIGKILL);
		waitpid(pid, NULL, 0);
		up_big_end(&big);
		up_close(&up_b);
		up_b.lost = up_b.closed = false;
		up_b.dones = up_b.failures = 0;
	}
}

int main(void)
{
#define PAIR(test) cmocka_unit_test_setup_teardown(test, up_begin_pair, up_end)
#define WORLD(test) cmocka_unit_test_setup_teardown(test, up_begin, up_end)
	const struct CMUnitTest tests[] = {
		PAIR(request_refused_has_the_text),
		PAIR(plans_different_fail_both_sides),
		PAIR(cancel_in_flight_leaves_memory_quiesced),
		PAIR(cancel_before_the_answer_ends_both),
		PAIR(cancel_before_the_request_left_is_local),
		PAIR(revoke_in_flight_leaves_memory_quiesced),
		PAIR(close_in_flight_ends_everything),
		PAIR(memory_faulted_fails_the_transfer_only),
		WORLD(process_killed_in_flight_loses_the_peer),
		WORLD(process_frozen_is_cut_off_at_the_fence),
	};

	return up_run_tests("ucx fence", tests, ARRAY_LEN(tests));
}
