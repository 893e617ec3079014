/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptors that the loop watches, no longer watches, and meets again. */
#include "daemon/loop/loop.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/mem.h"

struct reader {
	struct loop_fd watch;
	unsigned int reads, writes;
};

static void on_reader(struct loop_fd *watch, int events)
{
	struct reader *r = container_of(watch, struct reader, watch);
	char c;

	if (events & LOOP_READ) {
		assert_int_equal(read(watch->fd, &c, 1), 1);
		r->reads++;
	}
	if (events & LOOP_WRITE) {
		r->writes++;
		assert_int_equal(loop_fd_set(watch, 0), 0);
	}
}

static void fd_changes_of_interest_take_effect(void **state)
{
	struct reader r = {0}, w = {0};
	struct loop *loop;
	int fds[2];

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	assert_int_equal(pipe(fds), 0);
	loop_fd_init(&r.watch, loop, fds[0], on_reader);
	loop_fd_init(&w.watch, loop, fds[1], on_reader);
	assert_int_equal(loop_fd_set(&r.watch, LOOP_READ), 0);
	assert_false(loop_turn(loop, 0));
	assert_int_equal(write(fds[1], "abc", 3), 3);
	assert_true(loop_turn(loop, LOOP_NS_PER_S));
	assert_int_equal(r.reads, 1);
	loop_fd_stop(&r.watch);
	loop_fd_stop(&r.watch);
	assert_false(loop_turn(loop, 0));
	assert_int_equal(loop_fd_set(&w.watch, LOOP_WRITE), 0);
	assert_true(loop_turn(loop, LOOP_NS_PER_S));
	assert_int_equal(w.writes, 1);
	assert_null(w.watch.impl);
	assert_false(loop_turn(loop, 0));
	assert_int_equal(loop_fd_set(&r.watch, LOOP_READ), 0);
	assert_true(loop_turn(loop, LOOP_NS_PER_S));
	assert_int_equal(r.reads, 2);
	loop_fd_stop(&r.watch);
	close(fds[0]);
	close(fds[1]);
	loop_free(loop);
}

static void fd_number_used_again_is_watched(void **state)
{
	struct reader r = {0};
	struct loop *loop;
	int fds[2], again[2];

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	assert_int_equal(pipe(fds), 0);
	loop_fd_init(&r.watch, loop, fds[0], on_reader);
	assert_int_equal(loop_fd_set(&r.watch, LOOP_READ), 0);
	loop_turn(loop, 0);
	loop_fd_stop(&r.watch);
	close(fds[0]);
	close(fds[1]);
	assert_int_equal(pipe(again), 0);
	assert_int_equal(again[0], fds[0]);
	loop_fd_init(&r.watch, loop, again[0], on_reader);
	assert_int_equal(loop_fd_set(&r.watch, LOOP_READ), 0);
	assert_int_equal(write(again[1], "x", 1), 1);
	assert_true(loop_turn(loop, LOOP_NS_PER_S));
	assert_int_equal(r.reads, 1);
	loop_fd_stop(&r.watch);
	close(again[0]);
	close(again[1]);
	loop_free(loop);
}

/* As a helper does that gives a device's queue back: the watch was stopped, and what
 * comes meanwhile is nobody's. */
static void *close_elsewhere(void *arg)
{
	assert_int_equal(close(*(int *)arg), 0);
	return NULL;
}

static void fd_closed_elsewhere_leaves_its_number_to_the_next(void **state)
{
	struct reader old = {0}, new = {0};
	struct loop *loop;
	int fds[2], again[2];
	pthread_t thread;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	for (unsigned int turns = 0; turns < 3; turns++) { /* between stop and close */
		assert_int_equal(pipe(fds), 0);
		loop_fd_init(&old.watch, loop, fds[0], on_reader);
		assert_int_equal(loop_fd_set(&old.watch, LOOP_READ), 0);
		loop_turn(loop, 0);
		loop_fd_stop(&old.watch);
		assert_int_equal(write(fds[1], "x", 1), 1);
		for (unsigned int i = 0; i < turns; i++)
			loop_turn(loop, 0);
		assert_int_equal(pthread_create(&thread, NULL, close_elsewhere, &fds[0]),
				 0);
		pthread_join(thread, NULL);
		close(fds[1]);
		assert_int_equal(pipe(again), 0);
		assert_int_equal(again[0], fds[0]);
		loop_fd_init(&new.watch, loop, again[0], on_reader);
		assert_int_equal(loop_fd_set(&new.watch, LOOP_READ), 0);
		assert_int_equal(write(again[1], "y", 1), 1);
		while (new.reads <= turns)
			loop_turn(loop, LOOP_NS_PER_S);
		assert_int_equal(new.reads, turns + 1);
		loop_fd_stop(&new.watch);
		close(again[0]);
		close(again[1]);
	}
	assert_int_equal(old.reads, 0);
	loop_free(loop);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(fd_changes_of_interest_take_effect),
		cmocka_unit_test(fd_number_used_again_is_watched),
		cmocka_unit_test(fd_closed_elsewhere_leaves_its_number_to_the_next),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
