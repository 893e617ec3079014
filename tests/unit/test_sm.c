/* SPDX-License-Identifier: Apache-2.0 */
/* Checked state machines: moves that are not in the table end the process. */
#include "daemon/base/sm.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/mem.h"

enum { SHUT, OPEN, BROKEN };

static const struct sm_state door_states[] = {
	[SHUT] = {"shut", SM_TO(OPEN) | SM_TO(BROKEN)},
	[OPEN] = {"open", SM_TO(SHUT)},
	[BROKEN] = {"broken", 0},
};

struct door {
	struct sm sm;
	unsigned int guests;
	unsigned int checks, last_from;
};

/* a door that is not open has no guests */
static bool door_invariant(const struct sm *sm, unsigned int from)
{
	struct door *door = container_of(sm, struct door, sm);

	door->checks++;
	door->last_from = from;
	return sm_state(sm) == OPEN || door->guests == 0;
}

static const struct sm_table door_table = {.name = "door",
					   .states = door_states,
					   .count = ARRAY_LEN(door_states),
					   .invariant = door_invariant};

static void sm_allowed_moves_run_the_invariant(void **state)
{
	struct door door = {0};

	(void)state;
	sm_init(&door.sm, &door_table, SHUT);
	assert_int_equal(door.checks, 1);
	assert_true(sm_can(&door.sm, OPEN));
	assert_false(sm_can(&door.sm, SHUT));
	assert_false(sm_can(&door.sm, 99));
	sm_move(&door.sm, OPEN);
	assert_int_equal(door.checks, 2);
	assert_int_equal(door.last_from, SHUT);
	assert_string_equal(sm_name(&door.sm), "open");
	sm_move(&door.sm, SHUT);
	sm_move(&door.sm, BROKEN);
	assert_false(sm_can(&door.sm, OPEN));
	assert_int_equal(sm_state(&door.sm), BROKEN);
	assert_string_equal(sm_name_of(&door_table, 99), "?");
}

/* How a child that runs `fn` ends: the signal, 0 for a normal end. */
static int death_of(void (*fn)(struct door *door))
{
	struct door door = {0};
	int status;
	pid_t pid = fork();

	if (pid == 0) {
		const struct rlimit no_core = {0, 0};

		signal(SIGABRT, SIG_DFL);
		setrlimit(RLIMIT_CORE, &no_core);
		close(STDERR_FILENO);
		sm_init(&door.sm, &door_table, SHUT);
		fn(&door);
		_exit(0);
	}
	assert_true(pid > 0);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void move_legal(struct door *door)
{
	door->guests = 1;
	sm_move(&door->sm, OPEN);
}

static void move_illegal(struct door *door)
{
	sm_move(&door->sm, SHUT);
}

static void move_breaking(struct door *door)
{
	door->guests = 1;
	sm_move(&door->sm, BROKEN);
}

static void sm_illegal_move_or_broken_invariant_aborts(void **state)
{
	(void)state;
	assert_int_equal(death_of(move_legal), 0);
	assert_int_equal(death_of(move_illegal), SIGABRT);
	assert_int_equal(death_of(move_breaking), SIGABRT);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(sm_allowed_moves_run_the_invariant),
		cmocka_unit_test(sm_illegal_move_or_broken_invariant_aborts),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
