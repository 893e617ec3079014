/* SPDX-License-Identifier: Apache-2.0 */
/* Helper threads: order, cancel, errors, teardown with work left. */
#include "daemon/loop/offload.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"

struct task {
	struct offload_job job;
	struct loop *loop;
	struct offload *offload;
	pthread_t worker;
	unsigned int *order; /* counts works begun, atomic */
	unsigned int begun_as;
	unsigned int dones;
	unsigned int *left; /* dones still to come; 0 stops the loop */
	pthread_mutex_t *gate;
	int result;
	struct task *next; /* submitted by done */
};

static void on_work(struct offload_job *job)
{
	struct task *t = container_of(job, struct task, job);

	t->worker = pthread_self();
	if (t->order)
		t->begun_as = __atomic_add_fetch(t->order, 1, __ATOMIC_RELAXED);
	if (t->gate) {
		pthread_mutex_lock(t->gate);
		pthread_mutex_unlock(t->gate);
	}
	job->result = t->result ? err_raise(ERR_FAULT, "page %d is gone", 7) : 0;
}

static void on_done(struct offload_job *job)
{
	struct task *t = container_of(job, struct task, job);

	assert_false(job->submitted);
	t->dones++;
	if (t->next)
		offload_submit(t->offload, &t->next->job);
	if (t->left && --*t->left == 0)
		loop_stop(t->loop);
}

static struct task task_of(struct loop *loop, struct offload *offload)
{
	return (struct task){.job = {.work = on_work, .done = on_done},
			     .loop = loop,
			     .offload = offload};
}

static void job_on_one_helper_starts_in_order_off_the_loop(void **state)
{
	enum { N = 200 };
	struct task t[N];
	struct offload *offload;
	struct loop *loop;
	unsigned int order = 0, left = N;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	assert_int_equal(offload_new(loop, 1, &offload), 0);
	for (unsigned int i = 0; i < N; i++) {
		t[i] = task_of(loop, offload);
		t[i].order = &order;
		t[i].left = &left;
		offload_submit(offload, &t[i].job);
	}
	assert_int_equal(offload_pending(offload), N);
	loop_run(loop);
	assert_int_equal(offload_pending(offload), 0);
	for (unsigned int i = 0; i < N; i++) {
		assert_int_equal(t[i].dones, 1);
		assert_int_equal(t[i].begun_as, i + 1);
		assert_false(pthread_equal(t[i].worker, pthread_self()));
	}
	offload_free(offload);
	loop_free(loop);
}

static void job_failed_brings_its_fault_to_done(void **state)
{
	struct offload *offload;
	struct loop *loop;
	unsigned int left = 1;
	struct task t;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	assert_int_equal(offload_new(loop, 2, &offload), 0);
	t = task_of(loop, offload);
	t.result = -1;
	t.left = &left;
	offload_submit(offload, &t.job);
	loop_run(loop);
	assert_int_equal(t.job.result, -EFAULT);
	assert_int_equal(t.job.err.code, ERR_FAULT);
	assert_string_equal(t.job.err.text, "page 7 is gone");
	/* the job can be used again, and starts clean */
	t.result = 0;
	left = 1;
	offload_submit(offload, &t.job);
	loop_run(loop);
	assert_int_equal(t.job.result, 0);
	assert_int_equal(t.job.err.code, ERR_OK);
	offload_free(offload);
	loop_free(loop);
}

static void cancel_of_a_waiting_job_keeps_it_from_running(void **state)
{
	pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
	struct offload *offload;
	struct loop *loop;
	unsigned int order = 0, left = 1;
	struct task first, second;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	assert_int_equal(offload_new(loop, 1, &offload), 0);
	first = task_of(loop, offload);
	second = task_of(loop, offload);
	first.gate = &gate;
	first.order = &order;
	first.left = &left;
	assert_false(offload_cancel(offload, &second.job)); /* not submitted */
	pthread_mutex_lock(&gate);
	offload_submit(offload, &first.job);
	while (!__atomic_load_n(&order, __ATOMIC_RELAXED))
		loop_turn(loop, LOOP_NS_PER_MS);
	offload_submit(offload, &second.job);
	assert_false(offload_cancel(offload, &first.job)); /* has begun */
	assert_true(offload_cancel(offload, &second.job));
	assert_false(offload_cancel(offload, &second.job));
	pthread_mutex_unlock(&gate);
	loop_run(loop);
	assert_int_equal(first.dones, 1);
	assert_int_equal(second.dones, 0);
	assert_int_equal(offload_pending(offload), 0);
	offload_free(offload);
	loop_free(loop);
}

/* Until `count` of the works have begun; a principal's that wait need not. */
static void begun_wait(struct loop *loop, const unsigned int *order, unsigned int count)
{
	for (int i = 0; i < 2000 && __atomic_load_n(order, __ATOMIC_RELAXED) < count; i++)
		loop_turn(loop, LOOP_NS_PER_MS);
	assert_int_equal(__atomic_load_n(order, __ATOMIC_RELAXED), count);
}

static void principal_with_long_jobs_leaves_helpers_to_others(void **state)
{
	enum { N = 9 };
	pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
	struct task hog[N], other[3];
	struct offload *offload;
	struct loop *loop;
	unsigned int order = 0, left = N + 3;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	assert_int_equal(offload_new(loop, 4, &offload), 0);
	pthread_mutex_lock(&gate); /* none of its jobs ends */
	for (unsigned int i = 0; i < N; i++) {
		hog[i] = task_of(loop, offload);
		hog[i].job.principal = offload_uid(1000);
		hog[i].order = &order;
		hog[i].left = &left;
		hog[i].gate = &gate;
		offload_submit(offload, &hog[i].job);
	}
	begun_wait(loop, &order, 2);
	for (unsigned int i = 0; i < 3; i++) {
		other[i] = task_of(loop, offload);
		other[i].job.principal = i == 2 ? 0 : offload_uid(1001 + i);
		other[i].order = &order;
		other[i].left = &left;
		offload_submit(offload, &other[i].job);
	}
	begun_wait(loop, &order, 5);
	pthread_mutex_unlock(&gate);
	loop_run(loop);
	for (unsigned int i = 0; i < 3; i++)
		assert_in_range(other[i].begun_as, 3, 5);
	for (unsigned int i = 0; i < N; i++)
		assert_int_equal(hog[i].dones, 1);
	offload_free(offload);
	loop_free(loop);
}

static void principals_take_turns_at_one_helper(void **state)
{
	enum { N = 12 };
	static const uint64_t of[N] = {9, 1, 1, 1, 1, 1, 1, 2, 2, 3, 1, 2};
	/* canceled: the second of 1's, then its first, which the third replaces */
	static const unsigned int begun[N] = {1, 0, 0, 4, 6, 8, 9, 2, 5, 3, 10, 7};
	pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
	struct offload *offload;
	struct loop *loop;
	struct task t[N];
	unsigned int order = 0, left = N - 2;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	assert_int_equal(offload_new(loop, 1, &offload), 0);
	pthread_mutex_lock(&gate);
	for (unsigned int i = 0; i < N; i++) {
		t[i] = task_of(loop, offload);
		t[i].job.principal = of[i];
		t[i].order = &order;
		t[i].left = &left;
		t[i].gate = i == 0 ? &gate : NULL;
		offload_submit(offload, &t[i].job);
		if (i == 0)
			begun_wait(loop, &order, 1);
	}
	assert_true(offload_cancel(offload, &t[2].job));
	assert_true(offload_cancel(offload, &t[1].job)); /* to the end of the turn */
	pthread_mutex_unlock(&gate);
	loop_run(loop);
	for (unsigned int i = 0; i < N; i++)
		assert_int_equal(t[i].begun_as, begun[i]);
	offload_free(offload);
	loop_free(loop);
}

static void free_runs_queued_jobs_and_calls_done(void **state)
{
	enum { N = 50 };
	struct task t[N], late;
	struct offload *offload;
	struct loop *loop;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	assert_int_equal(offload_new(loop, 3, &offload), 0);
	late = task_of(loop, offload);
	for (unsigned int i = 0; i < N; i++) {
		t[i] = task_of(loop, offload);
		offload_submit(offload, &t[i].job);
	}
	t[N - 1].next = &late;
	offload_free(offload);
	for (unsigned int i = 0; i < N; i++)
		assert_int_equal(t[i].dones, 1);
	assert_int_equal(late.dones, 1);
	offload_free(NULL);
	loop_free(loop);
}

static void inline_runs_at_submit_and_done_is_deferred(void **state)
{
	struct offload *offload;
	struct loop *loop;
	unsigned int order = 0;
	struct task t, next;

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	assert_int_equal(offload_new_inline(loop, &offload), 0);
	t = task_of(loop, offload);
	next = task_of(loop, offload);
	t.order = &order;
	t.next = &next;
	t.result = -1;
	err_raise(ERR_BUSY, "the submitter's own");
	offload_submit(offload, &t.job);
	assert_int_equal(err_last()->code, ERR_BUSY);
	assert_int_equal(t.begun_as, 1);
	assert_int_equal(t.dones, 0);
	assert_false(offload_cancel(offload, &t.job));
	loop_run(loop);
	assert_int_equal(t.dones, 1);
	assert_int_equal(t.job.err.code, ERR_FAULT);
	assert_int_equal(next.dones, 1);
	assert_int_equal(offload_pending(offload), 0);
	offload_free(offload);
	loop_free(loop);
}

static void on_mask_work(struct offload_job *job)
{
	sigset_t mask;

	pthread_sigmask(SIG_SETMASK, NULL, &mask);
	job->result = sigismember(&mask, SIGTERM) && sigismember(&mask, SIGHUP) ? 0 : -1;
}

/* However many have finished: as many per turn as there is time for, in order; a hold
 * keeps the rest. */
static void dones_are_called_some_per_turn(void **state)
{
	struct offload *offload;
	struct task tasks[5];
	struct loop *loop;
	unsigned int turns = 0;

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	assert_int_equal(offload_new_inline(loop, &offload), 0);
	for (size_t i = 0; i < ARRAY_LEN(tasks); i++) {
		tasks[i] = task_of(loop, offload);
		offload_submit(offload, &tasks[i].job);
	}
	loop_virtual_parts(loop, 1);
	for (size_t i = 0; i < ARRAY_LEN(tasks); i++) {
		if (i == 2) { /* nothing happens meanwhile */
			offload_hold(offload, true);
			loop_turn(loop, 0);
			assert_int_equal(tasks[2].dones, 0);
			offload_hold(offload, false);
		}
		while (!tasks[i].dones && turns++ < 20)
			loop_turn(loop, 0);
		for (size_t k = 0; k < ARRAY_LEN(tasks); k++)
			assert_int_equal(tasks[k].dones, k <= i);
	}
	assert_int_equal(offload_pending(offload), 0);
	/* those that are due when it ends are called, too */
	for (size_t i = 0; i < ARRAY_LEN(tasks); i++) {
		tasks[i] = task_of(loop, offload);
		offload_submit(offload, &tasks[i].job);
	}
	loop_turn(loop, 0);
	assert_int_equal(tasks[0].dones, 1);
	assert_int_equal(tasks[1].dones, 0);
	offload_free(offload);
	for (size_t i = 0; i < ARRAY_LEN(tasks); i++)
		assert_int_equal(tasks[i].dones, 1);
	loop_free(loop);
}

static void helper_takes_no_signals(void **state)
{
	struct offload *offload;
	struct loop *loop;
	unsigned int left = 1;
	struct task t;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	assert_int_equal(offload_new(loop, 1, &offload), 0);
	t = task_of(loop, offload);
	t.job.work = on_mask_work;
	t.left = &left;
	offload_submit(offload, &t.job);
	loop_run(loop);
	assert_int_equal(t.job.result, 0);
	offload_free(offload);
	loop_free(loop);
}

static void discarded_block_is_freed_by_a_helper(void **state)
{
	struct offload *offload;
	struct loop *loop;
	int64_t live;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	assert_int_equal(offload_new(loop, 1, &offload), 0);
	live = mem_live(); /* counts what this thread gets and gives */
	err_raise(ERR_FAULT, "kept");
	offload_discard_block(offload, mem_alloc(MEM_LARGE_BYTES));
	assert_string_equal(err_last()->text, "kept");
	assert_int_equal(offload_pending(offload), 1);
	while (offload_pending(offload))
		loop_turn(loop, LOOP_NS_PER_S);
	assert_int_equal(mem_live(), live + 1); /* the block went elsewhere */
	/* without memory to tell a helper it goes here */
	offload_discard_block(offload, (mem_fail_at(2), mem_alloc(MEM_LARGE_BYTES)));
	mem_fail_at(0);
	assert_int_equal(offload_pending(offload), 0);
	assert_int_equal(mem_live(), live + 1);
	assert_string_equal(err_last()->text, "kept");
	err_clear();
	offload_free(offload);
	loop_free(loop);
}

static void offload_without_memory_is_not_made(void **state)
{
	struct offload *offload;
	struct loop *loop;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	for (uint64_t n = 1; n <= 2; n++) {
		mem_fail_at(n);
		assert_int_equal(offload_new(loop, 2, &offload), -ENOMEM);
	}
	mem_fail_at(0);
	loop_free(loop);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(job_on_one_helper_starts_in_order_off_the_loop),
		cmocka_unit_test(job_failed_brings_its_fault_to_done),
		cmocka_unit_test(cancel_of_a_waiting_job_keeps_it_from_running),
		cmocka_unit_test(principal_with_long_jobs_leaves_helpers_to_others),
		cmocka_unit_test(principals_take_turns_at_one_helper),
		cmocka_unit_test(free_runs_queued_jobs_and_calls_done),
		cmocka_unit_test(inline_runs_at_submit_and_done_is_deferred),
		cmocka_unit_test(dones_are_called_some_per_turn),
		cmocka_unit_test(helper_takes_no_signals),
		cmocka_unit_test(discarded_block_is_freed_by_a_helper),
		cmocka_unit_test(offload_without_memory_is_not_made),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
