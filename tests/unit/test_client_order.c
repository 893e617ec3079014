/* SPDX-License-Identifier: Apache-2.0 */
/* The guard of ordered requests: words that streams wait for get their values, whatever
 * becomes of the daemon. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/mem.h"
#include "lib/client.h"

#define COUNT 3u
#define LATE_NS (60 * UINT64_C(1000000000))

static _Atomic uint64_t words[COUNT];

static struct client_guard *guard_of(int pidfd)
{
	struct client_order *orders = mem_calloc(COUNT, sizeof(*orders));
	struct client_guard *guard;

	assert_non_null(orders);
	for (unsigned int i = 0; i < COUNT; i++) {
		words[i] = 0;
		orders[i].done = &words[i];
	}
	assert_int_equal(client_guard_new(orders, COUNT, pidfd, &guard), 0);
	return guard;
}

static void word_comes(unsigned int i, uint64_t value)
{
	uint64_t until = clock_ns() + LATE_NS;

	while (atomic_load(&words[i]) != value) {
		assert_true(clock_ns() < until);
		(void)poll(NULL, 0, 1);
	}
}

static void deadline_ends_one(void **state)
{
	struct client_guard *guard = guard_of(-1);
	uint64_t now = clock_ns();

	(void)state;
	assert_int_equal(client_order_next(guard, 0, now + LATE_NS), 1);
	assert_int_equal(client_order_next(guard, 1, now), 1);
	assert_int_equal(client_order_next(guard, 2, now), 1);
	client_order_none(guard, 2);
	word_comes(1, 1);
	assert_true(clock_ns() - now >= UINT64_C(500000000));
	assert_true(client_order_lost(guard, 1));
	assert_false(client_order_lost(guard, 0) || client_order_lost(guard, 2));
	assert_int_equal(words[0], 0);
	assert_int_equal(words[2], 1); /* it counts as ended */
	/* the seat's next request is another, also if the daemon ends it */
	assert_int_equal(client_order_next(guard, 1, now + LATE_NS), 2);
	assert_false(client_order_lost(guard, 1));
	atomic_store(&words[1], 2);
	client_guard_free(guard);
	assert_int_equal(words[0], 1);
	assert_int_equal(words[1], 2);
	assert_int_equal(words[2], 1);
}

/* A lost request stays lost until the seat has another that is sent. */
static void next_request_of_a_seat(void **state)
{
	struct client_guard *guard = guard_of(-1);

	(void)state;
	client_order_next(guard, 0, clock_ns());
	word_comes(0, 1);
	assert_true(client_order_lost(guard, 0));
	client_order_none(guard, 0); /* it is not ordered */
	assert_false(client_order_lost(guard, 0));
	/* the daemon has ended 2, but not stored that yet, when 3 comes */
	assert_int_equal(client_order_next(guard, 0, clock_ns() + LATE_NS), 2);
	assert_int_equal(client_order_next(guard, 0, clock_ns() + LATE_NS), 3);
	assert_int_equal(words[0], 2);
	assert_false(client_order_lost(guard, 0));
	client_guard_free(guard);
}

static void end_of_the_session_ends_all(void **state)
{
	struct client_guard *guard = guard_of(-1);

	(void)state;
	client_guard_lose(NULL);
	client_order_next(guard, 0, clock_ns() + LATE_NS);
	client_guard_lose(guard);
	assert_int_equal(words[0], 1);
	assert_int_equal(words[1], 0);
	assert_true(client_order_lost(guard, 0));
	client_guard_free(guard);
}

/* Words are shared with it: the parent's stream would go on without results. */
static void forked_child_stores_nothing(void **state)
{
	_Atomic uint64_t *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE,
					MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	struct client_order *orders = mem_calloc(1, sizeof(*orders));
	struct client_guard *guard;
	int status;
	pid_t pid;

	(void)state;
	assert_true(shared != MAP_FAILED);
	assert_non_null(orders);
	orders->done = shared;
	assert_int_equal(client_guard_new(orders, 1, -1, &guard), 0);
	client_order_next(guard, 0, clock_ns() + LATE_NS);
	pid = fork();
	if (pid == 0) {
		client_guard_free(guard);
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	assert_int_equal(*shared, 0);
	client_guard_free(guard);
	assert_int_equal(*shared, 1);
	munmap(shared, 4096);
}

static void end_of_the_daemon_ends_all(void **state)
{
	pid_t pid = fork();
	int pidfd;
	struct client_guard *guard;

	(void)state;
	if (pid == 0) {
		(void)pause();
		_exit(0);
	}
	pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	if (pidfd < 0) {
		kill(pid, SIGKILL);
		waitpid(pid, NULL, 0);
		skip(); /* an emulator without pidfd_open() */
	}
	guard = guard_of(pidfd);
	close(pidfd);
	for (unsigned int i = 0; i < COUNT; i++)
		(void)client_order_next(guard, i, clock_ns() + LATE_NS);
	atomic_store(&words[2], 1);
	kill(pid, SIGKILL);
	word_comes(0, 1);
	word_comes(1, 1);
	assert_true(client_order_lost(guard, 0) && client_order_lost(guard, 1));
	assert_false(client_order_lost(guard, 2));
	/* and what is sent after it */
	client_order_next(guard, 2, clock_ns() + LATE_NS);
	word_comes(2, 2);
	assert_true(client_order_lost(guard, 2));
	client_guard_free(guard);
	waitpid(pid, NULL, 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(deadline_ends_one),
		cmocka_unit_test(end_of_the_daemon_ends_all),
		cmocka_unit_test(next_request_of_a_seat),
		cmocka_unit_test(end_of_the_session_ends_all),
		cmocka_unit_test(forked_child_stores_nothing),
	};

	return cmocka_run_group_tests_name("client_order", tests, NULL, NULL);
}
