/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ucx: the worker's thread. A call of libucp that takes long does not hold the loop, and
 * a peer's unread messages are bounded.
 */
#include "tests/lib/ucx_pair.h"

#include <pthread.h>
#include <semaphore.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

static struct ucx_lib held_lib; /* libucp, whose progress may be held */
static atomic_bool hold, held;
static sem_t let_go;

static unsigned int progress_held(ucp_worker_h worker)
{
	const struct ucx_lib *lib;

	if (atomic_load(&hold)) {
		atomic_store(&held, true);
		sem_wait(&let_go);
	}
	return ucx_lib_load(up_config.ucx_library, &lib)
		       ? 0
		       : lib->ucp_worker_progress(worker);
}

static struct ucx_worker *worker_of(const struct up_node *n)
{
	return &container_of(n->t, struct ucx_transport, net.base)->worker;
}

/* On the worker's thread, as libucp's callbacks; the loop stands still meanwhile. */
struct errand {
	struct ucx_call call;
	void (*run)(void *arg);
	void *arg;
	sem_t ran;
	bool done;
};

static void errand_start(struct ucx_call *call)
{
	struct errand *errand = container_of(call, struct errand, call);

	errand->run(errand->arg);
	ucx_call_over(call, UCS_OK, 0);
	sem_post(&errand->ran);
}

static void errand_done(struct ucx_call *call)
{
	container_of(call, struct errand, call)->done = true;
}

static void run_on_thread(struct ucx_worker *worker, void (*run)(void *arg), void *arg)
{
	struct errand errand = {
		.call = {.start = errand_start, .done = errand_done},
		.run = run,
		.arg = arg,
	};

	assert_int_equal(sem_init(&errand.ran, 0, 0), 0);
	ucx_submit(worker, &errand.call);
	ucx_submitted(worker);
	sem_wait(&errand.ran);
	await(errand.done);
	sem_destroy(&errand.ran);
}

static void use_held_lib(void *arg)
{
	struct ucx_worker *worker = arg;

	held_lib = *worker->lib;
	held_lib.ucp_worker_progress = progress_held;
	worker->lib = &held_lib;
}

static unsigned int ticks;

static void on_tick(struct loop_timer *timer)
{
	ticks++;
	loop_timer_start(timer, LOOP_NS_PER_MS);
}

/* A call of libucp that does not end: timers run, and what needs no libucp ends. */
static void call_that_takes_long_holds_no_loop(void **state)
{
	struct ucx_worker *worker = worker_of(&up_a);
	struct loop_timer timer;
	struct up_big big;
	struct up_op op;
	struct err why;

	(void)state;
	run_on_thread(worker, use_held_lib, worker);
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
	sem_destroy(&let_go);
	up_big_end(&big);
}

static const struct ucx_xfer *first_source(void)
{
	return list_first(&((struct ucx_peer *)up_a.peer)->sources, struct ucx_xfer,
			  source_link);
}

/* What a message waits for inside libucp is what was posted before it. */
static void large_transfer_has_little_posted_beside_small_ones(void **state)
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

/* Messages that are no fault each. */
struct messages {
	struct ucx_peer *peer;
	unsigned int count, unread;  /* unread: after them */
	uint64_t fail_at, fail_from; /* of allocations; 0: none fails */
	bool reserve;		     /* is there after them */
};

static void messages_arrive(void *arg)
{
	const ucp_am_recv_param_t param = {0};
	struct ucx_frame frame = {.type = UCX_SERVE, .length = 9};
	struct messages *m = arg;
	uint8_t header[UCX_FRAME_BYTES], bytes[9] = {0};

	memcpy(frame.token, m->peer->net.token_in, sizeof(frame.token));
	ucx_frame_put(&frame, header);
	mem_fail_at(m->fail_at);
	if (m->fail_from)
		mem_fail_from(m->fail_from);
	for (unsigned int i = 0; i < m->count; i++)
		ucx_line_message(m->peer->transport, header, sizeof(header), bytes,
				 sizeof(bytes), &param);
	mem_fail_at(0);
	m->unread = atomic_load(&m->peer->line.unread);
	m->reserve = m->peer->line.reserve != NULL;
}

static void messages_unread_over_the_bound_lose_the_peer(void **state)
{
	struct ucx_peer *a = (struct ucx_peer *)up_a.peer;
	struct messages m = {.peer = a, .count = UCX_UNREAD_MAX};

	(void)state;
	run_on_thread(worker_of(&up_a), messages_arrive, &m);
	await(atomic_load(&a->line.unread) == 0);
	up_spin_ms(10);
	assert_false(up_a.lost); /* so many are none too many */
	m.count++;
	run_on_thread(worker_of(&up_a), messages_arrive, &m);
	assert_int_equal(m.unread, UCX_UNREAD_MAX);
	await(up_a.lost && up_b.lost);
	assert_int_equal(up_a.lost_why.code, ERR_PROTO);
	up_rejoin();
}

/* There is no memory for a message: small ones have the reserve, then it is the
 * connection that ends. */
static void message_without_memory_takes_the_reserve(void **state)
{
	struct ucx_peer *a = (struct ucx_peer *)up_a.peer;
	struct messages m = {.peer = a, .count = 1, .fail_at = 1};

	(void)state;
	await(a->line.reserve);
	run_on_thread(worker_of(&up_a), messages_arrive, &m);
	assert_false(m.reserve);
	net_peer_kick(&a->net);
	await(a->line.reserve);
	assert_false(up_a.lost);
	m = (struct messages){.peer = a, .count = 2, .fail_from = 1};
	run_on_thread(worker_of(&up_a), messages_arrive, &m);
	await(up_a.lost && up_b.lost);
	assert_int_equal(up_a.lost_why.code, ERR_NOMEM);
	up_rejoin();
}

int main(void)
{
#define PAIR(test) cmocka_unit_test_setup_teardown(test, up_begin_pair, up_end)
	const struct CMUnitTest tests[] = {
		PAIR(call_that_takes_long_holds_no_loop),
		PAIR(large_transfer_has_little_posted_beside_small_ones),
		PAIR(messages_unread_over_the_bound_lose_the_peer),
		PAIR(message_without_memory_takes_the_reserve),
	};

	return up_run_tests("ucx worker", tests, ARRAY_LEN(tests));
}
