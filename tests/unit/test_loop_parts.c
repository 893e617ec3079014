/* SPDX-License-Identifier: Apache-2.0 */
/* Turns of the loop in which callbacks take longer than they may. */
#include "daemon/loop/loop.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/mem.h"

static void note(char *log, char name)
{
	size_t n = strlen(log);

	log[n] = name;
	log[n + 1] = '\0';
}

#define SLOW_NS (2 * LOOP_TURN_NS)

/* Holds the loop for longer than any part of a turn may take. */
static void hold(const struct loop *loop)
{
	uint64_t until = loop_clock_ns(loop) + SLOW_NS;

	while (loop_clock_ns(loop) < until)
		;
}

struct slow {
	struct loop *loop;
	struct loop_timer timer;
	struct loop_defer defer;
	struct loop_fd fd;
	char *log;
	char name;
};

static void on_slow_timer(struct loop_timer *timer)
{
	struct slow *slow = container_of(timer, struct slow, timer);

	note(slow->log, slow->name);
	hold(slow->loop);
}

static void on_slow_defer(struct loop_defer *defer)
{
	struct slow *slow = container_of(defer, struct slow, defer);

	note(slow->log, slow->name);
	hold(slow->loop);
}

/* Leaves the byte where it is: ready for ever. */
static void on_slow_fd(struct loop_fd *fd, int events)
{
	struct slow *slow = container_of(fd, struct slow, fd);

	assert_int_equal(events, LOOP_READ);
	note(slow->log, slow->name);
	hold(slow->loop);
}

static void slows_init(struct slow slow[3], struct loop *loop, char *log)
{
	for (int i = 0; i < 3; i++) {
		slow[i] =
			(struct slow){.loop = loop, .log = log, .name = (char)('a' + i)};
		loop_timer_init(&slow[i].timer, loop, on_slow_timer);
		loop_defer_init(&slow[i].defer, on_slow_defer);
	}
}

/* The turn ends after it, and the next one continues with the next part. None waits. */
static void parts_slow_run_one_callback_a_turn(void **state)
{
	struct slow timed[3], deferred[3];
	char log[16] = "";
	struct loop *loop;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	slows_init(timed, loop, log);
	slows_init(deferred, loop, log);
	for (int i = 0; i < 3; i++) {
		deferred[i].name = (char)('A' + i);
		loop_timer_start(&timed[i].timer, 0);
		loop_defer(loop, &deferred[i].defer);
	}
	for (size_t ran = 0; ran < 6; ran = strlen(log)) {
		assert_true(loop_turn(loop, LOOP_NS_PER_S)); /* and does not wait */
		assert_in_range(strlen(log), ran, ran + 1);
	}
	assert_string_equal(log, "AaBbCc");
	loop_free(loop);
}

static void defers_cut_off_precede_newer_ones(void **state)
{
	struct slow slow[3];
	char log[16] = "";
	struct loop *loop;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	slows_init(slow, loop, log);
	loop_defer(loop, &slow[0].defer);
	loop_defer(loop, &slow[1].defer);
	loop_turn(loop, 0);
	loop_defer(loop, &slow[2].defer);
	loop_defer(loop, &slow[0].defer);
	while (strlen(log) < 4)
		loop_turn(loop, 0);
	assert_string_equal(log, "abca");
	loop_free(loop);
}

static void fds_always_ready_are_served_in_turn(void **state)
{
	struct slow slow[3];
	char log[64] = "";
	struct loop *loop;
	int pipes[3][2];

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	slows_init(slow, loop, log);
	for (int i = 0; i < 3; i++) {
		assert_int_equal(pipe(pipes[i]), 0);
		assert_int_equal(write(pipes[i][1], "x", 1), 1);
		loop_fd_init(&slow[i].fd, loop, pipes[i][0], on_slow_fd);
		assert_int_equal(loop_fd_set(&slow[i].fd, LOOP_READ), 0);
	}
	for (int turn = 0; turn < 15; turn++)
		loop_turn(loop, LOOP_NS_PER_S);
	for (int i = 0; i < 3; i++) {
		size_t served = 0;

		for (const char *at = log; (at = strchr(at, 'a' + i)); at++)
			served++;
		assert_in_range(served, strlen(log) / 3 - 1, strlen(log) / 3 + 1);
	}
	for (int i = 0; i < 3; i++) {
		loop_fd_stop(&slow[i].fd); /* also of one that waits for its turn */
		close(pipes[i][0]);
		close(pipes[i][1]);
	}
	loop_turn(loop, 0);
	loop_free(loop);
}

static void enough_is_false_on_a_virtual_loop(void **state)
{
	struct loop *loop;

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	loop_turn(loop, LOOP_NS_PER_S);
	assert_false(loop_enough(loop));
	loop_free(loop);
	assert_int_equal(loop_new(&loop), 0);
	loop_turn(loop, 0);
	hold(loop);
	assert_true(loop_enough(loop));
	loop_free(loop);
}

static unsigned int until_enough(struct loop *loop)
{
	unsigned int asked = 1;

	while (!loop_enough(loop) && asked < 100)
		asked++;
	return asked;
}

/* For sweeps: so many asks are a part, in each part anew. */
static void enough_is_true_on_a_counting_virtual_loop(void **state)
{
	struct loop *loop;

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	assert_int_equal(until_enough(loop), 100);
	loop_virtual_parts(loop, 3);
	assert_int_equal(until_enough(loop), 3);
	assert_true(loop_enough(loop));
	loop_turn(loop, 0);
	assert_int_equal(until_enough(loop), 3);
	loop_virtual_parts(loop, 0);
	assert_int_equal(until_enough(loop), 100);
	loop_free(loop);
}

/* ---- a hook that has more to do ---- */

static void burn(const struct loop *loop, uint64_t ns)
{
	uint64_t until = loop_clock_ns(loop) + ns;

	while (loop_clock_ns(loop) < until)
		;
}

struct backlog {
	struct loop_prepare prepare;
	struct loop *loop;
	struct loop_fd fds[2];
	int pipes[2][2];
	unsigned int left;
};

/* Longer than its part; the next one is left. */
static void on_fd(struct loop_fd *fd, int events)
{
	char byte;

	(void)events;
	assert_int_equal(read(fd->fd, &byte, 1), 1);
	burn(fd->loop, LOOP_TURN_NS / 6);
}

/* As a message queue whose descriptor tells of new messages only. */
static bool on_backlog(struct loop_prepare *prepare)
{
	struct backlog *backlog = container_of(prepare, struct backlog, prepare);

	if (!backlog->left)
		return false;
	burn(backlog->loop, LOOP_TURN_NS / 2);
	return --backlog->left > 0;
}

static void backlog_round(struct backlog *backlog)
{
	backlog->left = 0;
	for (int i = 0; i < 2; i++)
		assert_int_equal(write(backlog->pipes[i][1], "x", 1), 1);
	loop_turn(backlog->loop, 0); /* serves one; the other one is left */
	backlog->left = 3;
	while (backlog->left) {
		uint64_t begin_ns = loop_clock_ns(backlog->loop);

		loop_turn(backlog->loop, LOOP_NS_PER_S / 10);
		if (backlog->left)
			assert_true(loop_clock_ns(backlog->loop) - begin_ns <
				    LOOP_NS_PER_S / 20);
	}
}

/* Also if its turn is cut between it and what was left, as happens in most rounds. */
static void hook_with_a_backlog_keeps_the_loop_awake(void **state)
{
	struct backlog b = {.prepare.on_prepare = on_backlog};

	(void)state;
	assert_int_equal(loop_new(&b.loop), 0);
	loop_prepare_add(b.loop, &b.prepare);
	for (int i = 0; i < 2; i++) {
		assert_int_equal(pipe(b.pipes[i]), 0);
		loop_fd_init(&b.fds[i], b.loop, b.pipes[i][0], on_fd);
		assert_int_equal(loop_fd_set(&b.fds[i], LOOP_READ), 0);
	}
	for (int round = 0; round < 10; round++)
		backlog_round(&b);
	loop_prepare_remove(&b.prepare);
	for (int i = 0; i < 2; i++) {
		loop_fd_stop(&b.fds[i]);
		close(b.pipes[i][0]);
		close(b.pipes[i][1]);
	}
	loop_free(b.loop);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(parts_slow_run_one_callback_a_turn),
		cmocka_unit_test(defers_cut_off_precede_newer_ones),
		cmocka_unit_test(fds_always_ready_are_served_in_turn),
		cmocka_unit_test(enough_is_false_on_a_virtual_loop),
		cmocka_unit_test(enough_is_true_on_a_counting_virtual_loop),
		cmocka_unit_test(hook_with_a_backlog_keeps_the_loop_awake),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
