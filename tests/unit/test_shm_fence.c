/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shm: "terminal means still": what may be written, and what may count, after a
 * cancel, a revoke, a close; each way that bytes go, caught in the middle.
 */
#include "daemon/transport/shm/shm_private.h"

#include <sched.h>

#include "tests/lib/shm_duo.h"

/* ---- still ---- */

static const struct {
	enum xp_kind kind;
	bool vm;
} ways[] = {{XP_WRITE, false}, {XP_WRITE, true}, {XP_READ, false}, {XP_READ, true}};

static void cancel_before_the_answer_is_quiesced(void **state)
{
	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(ways); i++) {
		struct duo *t = duo_pair();
		struct duo_transfer x;

		duo_transfer_init(&x, t, ways[i].kind, 1000, 256, ways[i].vm, false);
		t->b.answer = DUO_HOLD;
		assert_int_equal(duo_post(&x), 0);
		DUO_WAIT(t, t->b.requests == 1);
		duo_cancel(&x);
		assert_int_equal(x.top.calls, 0);
		DUO_WAIT(t, x.top.calls && t->b.inbound_dones);
		duo_assert_done(&x, ERR_ABORTED);
		assert_int_equal(t->b.seen[0].err.code, ERR_ABORTED);
		if (ways[i].kind == XP_WRITE)
			assert_true(duo_dst_is_zero(&x));
		duo_transfer_fini(&x);
		duo_end(t);
	}
}

/* The bytes are in flight; after each side's done, its promise is looked at. */
static void cancel_in_flight_is_quiesced(void **state)
{
	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(ways); i++) {
		struct duo *t = duo_pair_threads(1);
		struct duo_transfer x, y;

		duo_transfer_init_endless(&x, t, ways[i].kind, ways[i].vm);
		assert_int_equal(duo_post(&x), 0);
		DUO_WAIT(t, duo_in_flight(&x));
		assert_int_equal(x.top.calls, 0);
		duo_cancel(&x);
		DUO_WAIT(t, x.top.calls && t->b.inbound_dones == t->b.requests);
		duo_assert_done(&x, ERR_ABORTED);
		if (t->b.requests)
			assert_int_equal(t->b.seen[0].err.code, ERR_ABORTED);
		memset(duo_shared_bytes(&x.dst), 0, x.bytes);
		/* the peer lives on, and carries another transfer meanwhile */
		duo_transfer_init(&y, t, ways[i].kind, 3000, 256, ways[i].vm, false);
		assert_int_equal(duo_post(&y), 0);
		DUO_WAIT(t, y.top.calls);
		duo_assert_done(&y, ERR_OK);
		duo_transfer_check(&y);
		assert_true(duo_dst_is_zero(&x));
		assert_int_equal(t->a.lost + t->b.lost, 0);
		duo_transfer_fini(&x);
		duo_transfer_fini(&y);
		duo_end(t);
	}
}

/* The answerer withdraws while bytes are in flight. */
static void revoke_in_flight_is_quiesced(void **state)
{
	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(ways); i++) {
		struct duo *t = duo_pair_threads(1);
		struct duo_transfer x, y;
		struct err why;

		err_set(&why, ERR_REVOKED, "gone");
		/* the source of a direct READ has nothing in flight but the check */
		t->b.answer =
			ways[i].kind == XP_READ && !ways[i].vm ? DUO_HOLD : DUO_LAND;
		if (t->b.answer == DUO_HOLD)
			duo_transfer_init(&x, t, ways[i].kind, 2048, 256, ways[i].vm,
					  false);
		else
			duo_transfer_init_endless(&x, t, ways[i].kind, ways[i].vm);
		assert_int_equal(duo_post(&x), 0);
		DUO_WAIT(t, duo_in_flight(&x) && t->b.requests);
		assert_int_equal(t->b.inbound_dones, 0);
		t->in_call = true;
		shm_transport.revoke(t->b.seen[0].in, &why);
		shm_transport.revoke(t->b.seen[0].in, &why);
		t->in_call = false;
		DUO_WAIT(t, t->b.inbound_dones);
		if (ways[i].kind == XP_WRITE)
			memset(duo_shared_bytes(&x.dst), 0, x.bytes);
		assert_int_equal(t->b.seen[0].err.code, ERR_REVOKED);
		DUO_WAIT(t, x.top.calls);
		duo_assert_done(&x, ERR_REVOKED);
		t->b.answer = DUO_LAND;
		duo_transfer_init(&y, t, ways[i].kind, 3000, 256, ways[i].vm, false);
		assert_int_equal(duo_post(&y), 0);
		DUO_WAIT(t, y.top.calls);
		duo_assert_done(&y, ERR_OK);
		if (ways[i].kind == XP_WRITE)
			assert_true(duo_dst_is_zero(&x));
		duo_transfer_fini(&x);
		duo_transfer_fini(&y);
		duo_end(t);
	}
}

/* The receiver says COPIED, the initiator has canceled: nothing counts. */
static void copied_after_cancel_does_not_count(void **state)
{
	struct duo *t = duo_pair();
	_Atomic uint64_t *copied;
	struct duo_transfer x;

	(void)state;
	duo_transfer_init(&x, t, XP_WRITE, 4, 64, false, false);
	assert_int_equal(duo_post(&x), 0);
	DUO_WAIT(t, t->b.requests == 1);
	/* until the destination has all bytes; both loops are this one, and
	 * neither has a turn meanwhile */
	copied = &container_of(t->b.seen[0].in, struct shm_xfer, net.in)->job.copied;
	while (atomic_load(copied) < x.plan->bytes)
		sched_yield();
	duo_cancel(&x);
	DUO_WAIT(t, x.top.calls && t->b.inbound_dones);
	duo_assert_done(&x, ERR_ABORTED);
	assert_int_equal(t->b.seen[0].err.code, ERR_ABORTED);
	duo_transfer_fini(&x);
	duo_end(t);
}

static void close_in_flight_ends_both_sides(void **state)
{
	(void)state;
	for (size_t i = 0; i < 2 * ARRAY_LEN(ways); i++) {
		struct duo *t = duo_pair_threads(1);
		struct duo_node *closer = i & 1 ? &t->a : &t->b;
		struct duo_node *other = i & 1 ? &t->b : &t->a;
		struct duo_transfer x;

		duo_transfer_init_endless(&x, t, ways[i / 2].kind, ways[i / 2].vm);
		assert_int_equal(duo_post(&x), 0);
		DUO_WAIT(t, duo_in_flight(&x));
		shm_transport.peer_close(closer->peer, duo_on_closed, closer);
		DUO_WAIT(t, closer->closed && other->lost);
		assert_int_equal(closer->lost, 0);
		duo_assert_done(&x, ERR_PEER);
		memset(duo_shared_bytes(&x.dst), 0, x.bytes);
		for (int turn = 0; turn < 10; turn++)
			loop_turn(t->loop, LOOP_NS_PER_MS);
		assert_true(duo_dst_is_zero(&x));
		assert_int_equal(shm_transport.post(other->peer, &x.top.op),
				 -err_errno(ERR_PEER));
		/* keys are dropped after their peer is gone, in any order */
		duo_transfer_fini(&x);
		duo_end(t);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(cancel_before_the_answer_is_quiesced),
		cmocka_unit_test(cancel_in_flight_is_quiesced),
		cmocka_unit_test(revoke_in_flight_is_quiesced),
		cmocka_unit_test(copied_after_cancel_does_not_count),
		cmocka_unit_test(close_in_flight_ends_both_sides),
	};

	return cmocka_run_group_tests_name("shm_fence", tests, NULL, NULL);
}
