/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ucx: who has libucp's worker. What libucp takes long for does not hold the loop, the
 * worker comes back to the loop, and what a peer has unread here is bounded.
 */
#include "tests/lib/ucx_pair.h"

#include <pthread.h>
#include <semaphore.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

static struct ucx_lib held_lib; /* libucp, whose progress may be held on the thread */
static pthread_t loop_thread;
static atomic_bool hold, held;
static sem_t let_go;

static unsigned int progress_held(ucp_worker_h worker)
{
	const struct ucx_lib *lib;

	assert_int_equal(ucx_lib_load(up_config.ucx_library, &lib), 0);
	if (atomic_load(&hold) && !pthread_equal(pthread_self(), loop_thread)) {
		atomic_store(&held, true);
		sem_wait(&let_go);
	}
	return lib->ucp_worker_progress(worker);
}

static struct ucx_worker *worker_of(const struct up_node *n)
{
	return &container_of(n->t, struct ucx_transport, net.base)->worker;
}

static unsigned int ticks;

static void on_tick(struct loop_timer *timer)
{
	ticks++;
	loop_timer_start(timer, LOOP_NS_PER_MS);
}

/* A call of libucp that does not end: timers run, and what needs no libucp ends. */
static void call_slow_does_not_block_the_loop(void **state)
{
	struct ucx_worker *worker = worker_of(&up_a);
	struct loop_timer timer;
	struct up_big big;
	struct up_op op;
	struct err why;

	(void)state;
	await(!worker->away); /* nobody else uses the table */
	loop_thread = pthread_self();
	held_lib = *worker->lib;
	held_lib.ucp_worker_progress = progress_held;
	worker->lib = &held_lib;
	assert_int_equal(sem_init(&let_go, 0, 0), 0);
	atomic_store(&held, false);
	atomic_store(&hold, true);
	up_big_start(&big, XP_WRITE, true);
	await(atomic_load(&held));
	ticks = 0;
	loop_timer_init(&timer, up_loop, on_tick);
	on_tick(&timer);
	await(ticks > 20);
	loop_timer_stop(&timer);
	up_op_init(&op, XP_WRITE, NULL, NULL, NULL);
	assert_int_equal(up_a.t->ops->post(up_a.peer, &op.op), 0);
	err_set(&why, ERR_ABORTED, "an engine said so");
	up_a.t->ops->cancel(&op.op, &why);
	await(op.done);
	assert_int_equal(op.op.err.code, ERR_ABORTED);
	assert_int_equal(big.op.done, 0);
	atomic_store(&hold, false);
	sem_post(&let_go);
	await(big.op.done && up_b.dones);
	assert_int_equal(big.op.op.result, 0);
	await(!worker->away);
	sem_destroy(&let_go);
	up_big_end(&big);
}

/* Do both workers stay with the loop for a transfer of `rows`? */
static bool rows_stay(uint32_t rows)
{
	const struct plan_run run = {
		.len = 65536, .count = rows, .src_stride = 131072, .dst_stride = 131072};
	struct plan *plan = up_plan(&run, 1);
	struct up_place src, dst;
	bool stayed = true;
	struct up_op op;

	up_place_init(&src, &up_a, 3 * (uint64_t)UCX_SMALL_BYTES, false);
	up_place_init(&dst, &up_b, 3 * (uint64_t)UCX_SMALL_BYTES, false);
	up_op_init(&op, XP_WRITE, plan, &src, &dst);
	up_b.sides = op.op.sides;
	await(!worker_of(&up_a)->away && !worker_of(&up_b)->away);
	assert_int_equal(up_a.t->ops->post(up_a.peer, &op.op), 0);
	while (!op.done) {
		up_turn();
		stayed &= !worker_of(&up_a)->away && !worker_of(&up_b)->away;
	}
	assert_int_equal(op.op.result, 0);
	up_place_fini(&src, &up_a);
	up_place_fini(&dst, &up_b);
	plan_free(plan);
	return stayed;
}

static void worker_is_the_loops_for_a_small_transfer(void **state)
{
	(void)state;
	assert_true(rows_stay(1));
	assert_true(rows_stay(UCX_SMALL_BYTES / 65536));
	assert_false(rows_stay(UCX_SMALL_BYTES / 65536 + 1));
}

static const struct ucx_xfer *first_source(void)
{
	return list_first(&((struct ucx_peer *)up_a.peer)->sources, struct ucx_xfer,
			  source_link);
}

/* What a message waits for inside libucp is what was posted before it. */
static void large_transfer_posts_little_with_small_ones(void **state)
{
	const struct ucx_peer *peer = (struct ucx_peer *)up_a.peer;
	const struct ucx_xfer *xfer = NULL;
	struct up_big big;
	struct up_op op;

	(void)state;
	await(loop_now_ns(up_loop) >= peer->beside_until_ns);
	up_big_start(&big, XP_WRITE, false);
	await((xfer = first_source()) &&
	      xfer->sending_bytes + UCX_SHARE_BESIDE_BYTES >= UCX_SHARE_BYTES);
	up_op_init(&op, XP_WRITE, NULL, NULL, NULL);
	assert_int_equal(up_a.t->ops->post(up_a.peer, &op.op), 0);
	await(xfer->sending_bytes <= UCX_SHARE_BESIDE_BYTES);
	assert_ptr_equal(first_source(), xfer);
	while (loop_now_ns(up_loop) < peer->beside_until_ns && first_source()) {
		assert_true(xfer->sending_bytes <= UCX_SHARE_BESIDE_BYTES);
		up_turn();
	}
	await(big.op.done && up_b.dones == 2 && op.done);
	assert_int_equal(big.op.op.result, 0);
	up_big_end(&big);
}

/* As libucp would call for them, in one go: messages that are no fault each. */
static void messages_unread_over_the_bound_lose_the_peer(void **state)
{
	const ucp_am_recv_param_t param = {0};
	struct ucx_frame frame = {.type = UCX_SERVE, .length = 9};
	struct ucx_peer *a = (struct ucx_peer *)up_a.peer;
	uint8_t header[UCX_FRAME_BYTES], bytes[9] = {0};

	(void)state;
	await(!worker_of(&up_a)->away);
	memcpy(frame.token, a->net.token_in, sizeof(frame.token));
	ucx_frame_put(&frame, header);
	for (unsigned int i = 0; i < UCX_UNREAD_MAX; i++)
		ucx_line_message(a->transport, header, sizeof(header), bytes,
				 sizeof(bytes), &param);
	await(atomic_load(&a->line.unread) == 0);
	up_spin_ms(10);
	assert_false(up_a.lost); /* so many are none too many */
	for (unsigned int i = 0; i <= UCX_UNREAD_MAX; i++)
		ucx_line_message(a->transport, header, sizeof(header), bytes,
				 sizeof(bytes), &param);
	assert_int_equal(atomic_load(&a->line.unread), UCX_UNREAD_MAX);
	await(up_a.lost && up_b.lost);
	assert_int_equal(up_a.lost_why.code, ERR_PROTO);
	up_rejoin();
}

/* Nothing is left to be had for a message: small ones have the reserve, then it is the
 * connection that ends. */
static void message_without_memory_takes_the_reserve(void **state)
{
	const ucp_am_recv_param_t param = {0};
	struct ucx_frame frame = {.type = UCX_SERVE, .length = 9};
	struct ucx_peer *a = (struct ucx_peer *)up_a.peer;
	uint8_t header[UCX_FRAME_BYTES], bytes[9] = {0};

	(void)state;
	await(!worker_of(&up_a)->away && a->line.reserve);
	memcpy(frame.token, a->net.token_in, sizeof(frame.token));
	ucx_frame_put(&frame, header);
	mem_fail_at(1);
	ucx_line_message(a->transport, header, sizeof(header), bytes, sizeof(bytes),
			 &param);
	mem_fail_at(0);
	assert_null(a->line.reserve);
	net_peer_kick(&a->net);
	await(a->line.reserve);
	assert_false(up_a.lost);
	mem_fail_from(1);
	for (int i = 0; i < 2; i++)
		ucx_line_message(a->transport, header, sizeof(header), bytes,
				 sizeof(bytes), &param);
	mem_fail_at(0);
	await(up_a.lost && up_b.lost);
	assert_int_equal(up_a.lost_why.code, ERR_NOMEM);
	up_rejoin();
}

int main(void)
{
#define PAIR(test) cmocka_unit_test_setup_teardown(test, up_begin_pair, up_end)
	const struct CMUnitTest tests[] = {
		PAIR(call_slow_does_not_block_the_loop),
		PAIR(worker_is_the_loops_for_a_small_transfer),
		PAIR(large_transfer_posts_little_with_small_ones),
		PAIR(messages_unread_over_the_bound_lose_the_peer),
		PAIR(message_without_memory_takes_the_reserve),
	};

	return up_run_tests("ucx worker", tests, ARRAY_LEN(tests));
}
