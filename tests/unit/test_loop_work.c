/* SPDX-License-Identifier: Apache-2.0 */
/* Work in steps, some a turn. */
#include "daemon/loop/work.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

struct count {
	struct loop_work work;
	unsigned int left, steps, done;
	unsigned int restart_at, stop_at; /* steps; 0: never */
};

static bool count_step(struct loop_work *work)
{
	struct count *count = container_of(work, struct count, work);

	count->steps++;
	count->left -= count->left > 0;
	if (count->steps == count->restart_at) {
		count->left++;
		loop_work_start(work);
	}
	if (count->steps == count->stop_at)
		loop_work_stop(work);
	return count->left > 0;
}

static void count_done(struct loop_work *work)
{
	container_of(work, struct count, work)->done++;
}

static struct loop *count_new(struct count *count, unsigned int left)
{
	struct loop *loop;

	assert_int_equal(loop_new_virtual(1, &loop), 0);
	*count = (struct count){.left = left};
	loop_work_init(&count->work, loop, count_step, count_done);
	return loop;
}

static void work_with_time_is_over_at_once(void **state)
{
	struct count count;
	struct loop *loop = count_new(&count, 5);

	(void)state;
	loop_work_start(&count.work);
	assert_int_equal(count.steps, 5);
	assert_int_equal(count.done, 1);
	assert_false(loop_work_running(&count.work));
	count.left = 3; /* and may run again, from the next turn on */
	loop_work_defer(&count.work);
	assert_true(loop_work_running(&count.work));
	assert_int_equal(count.steps, 5);
	loop_turn(loop, 0);
	assert_int_equal(count.steps, 8);
	assert_int_equal(count.done, 2);
	loop_free(loop);
}

static void work_without_time_makes_a_step_a_turn(void **state)
{
	struct count count;
	struct loop *loop = count_new(&count, 4);

	(void)state;
	loop_virtual_parts(loop, 1);
	loop_work_start(&count.work);
	for (unsigned int turn = 1; turn < 4; turn++) {
		assert_int_equal(count.steps, turn);
		assert_int_equal(count.done, 0);
		loop_work_start(&count.work); /* it runs: nothing changes */
		assert_int_equal(count.steps, turn);
		loop_turn(loop, 0);
	}
	assert_int_equal(count.steps, 4);
	assert_int_equal(count.done, 1);
	assert_false(loop_turn(loop, 0));
	loop_free(loop);
}

static void work_stopped_runs_no_further(void **state)
{
	struct count count;
	struct loop *loop = count_new(&count, 4);

	(void)state;
	loop_virtual_parts(loop, 1);
	loop_work_start(&count.work);
	loop_work_stop(&count.work);
	loop_work_stop(&count.work);
	assert_false(loop_turn(loop, 0));
	count.stop_at = 3; /* by its own step */
	loop_work_start(&count.work);
	assert_int_equal(count.steps, 2);
	loop_turn(loop, 0);
	assert_false(loop_work_running(&count.work));
	assert_false(loop_turn(loop, 0));
	assert_int_equal(count.steps, 3);
	assert_int_equal(count.done, 0);
	loop_free(loop);
}

/* What its last step begins is not lost. */
static void work_restarted_by_its_last_step_continues(void **state)
{
	struct count count;
	struct loop *loop = count_new(&count, 2);

	(void)state;
	count.restart_at = 2;
	loop_work_start(&count.work);
	assert_int_equal(count.steps, 3);
	assert_int_equal(count.done, 1);
	loop_free(loop);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(work_with_time_is_over_at_once),
		cmocka_unit_test(work_without_time_makes_a_step_a_turn),
		cmocka_unit_test(work_stopped_runs_no_further),
		cmocka_unit_test(work_restarted_by_its_last_step_continues),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
