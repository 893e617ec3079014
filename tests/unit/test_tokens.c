/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tokens: two daemons of one host are two descriptions of one file. Times are
 * the test's.
 */
#include "daemon/memory/tokens.h"
#include "tests/lib/tmp.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

struct test {
	char dir[64], path[128];
	struct tokens *a, *b;
	uint64_t now_ns;
};

static struct tokens *opened(const struct test *t, unsigned int count)
{
	struct tokens *tokens = NULL;

	assert_int_equal(tokens_open(t->path, count, &tokens), 0);
	return tokens;
}

static int setup(void **state)
{
	struct test *t = calloc(1, sizeof(*t));

	assert_non_null(mkdtemp(tmp_path(t->dir, sizeof(t->dir), "kvd-tokens-XXXXXX")));
	snprintf(t->path, sizeof(t->path), "%s/copy.tokens", t->dir);
	t->now_ns = 1000000000;
	t->a = opened(t, 3);
	t->b = opened(t, 3);
	*state = t;
	return 0;
}

static int teardown(void **state)
{
	struct test *t = *state;

	tokens_free(t->a);
	tokens_free(t->b);
	unlink(t->path);
	rmdir(t->dir);
	free(t);
	return 0;
}

/* As many threads as it may have. */
static unsigned int runs(struct test *t, struct tokens *tokens, unsigned int running)
{
	while (tokens_may_run(tokens, running, t->now_ns))
		running++;
	return running;
}

static void daemon_alone_runs_one_and_all_tokens(void **state)
{
	struct test *t = *state;

	assert_int_equal(runs(t, t->a, 0), 4);
	assert_int_equal(tokens_held(t->a), 3);
	tokens_settle(t->a, 2, false, t->now_ns);
	assert_int_equal(tokens_held(t->a), 1);
	tokens_settle(t->a, 0, false, t->now_ns);
	assert_int_equal(tokens_held(t->a), 0);
}

static void daemons_together_share_the_tokens(void **state)
{
	struct test *t = *state;

	assert_true(tokens_may_run(t->a, 0, t->now_ns));
	assert_true(tokens_may_run(t->a, 1, t->now_ns));
	assert_int_equal(runs(t, t->b, 0), 3);
	assert_false(tokens_may_run(t->a, 2, t->now_ns));
	tokens_settle(t->b, 0, false, t->now_ns);
	assert_int_equal(runs(t, t->a, 2), 4);
	assert_int_equal(runs(t, t->b, 0), 1); /* always one */
}

static void token_held_long_is_passed_to_waiter(void **state)
{
	struct test *t = *state;

	assert_int_equal(runs(t, t->a, 0), 4);
	t->now_ns += TOKENS_HOLD_NS;
	tokens_settle(t->a, 3, true, t->now_ns);
	assert_int_equal(tokens_held(t->a), 3); /* nobody waits */
	assert_int_equal(runs(t, t->b, 0), 1);
	tokens_settle(t->a, 3, true, t->now_ns + TOKENS_HOLD_NS / 2);
	assert_int_equal(tokens_held(t->a), 3);
	t->now_ns += TOKENS_HOLD_NS;
	tokens_settle(t->a, 3, true, t->now_ns);
	assert_int_equal(tokens_held(t->a), 2);
	assert_false(tokens_may_run(t->a, 3, t->now_ns)); /* it rests */
	assert_int_equal(runs(t, t->b, 1), 2);
	t->now_ns += TOKENS_REST_NS;
	assert_false(tokens_may_run(t->a, 3, t->now_ns));
	tokens_settle(t->b, 0, false, t->now_ns);
	assert_true(tokens_may_run(t->a, 3, t->now_ns));
}

static void tokens_of_a_killed_daemon_are_free(void **state)
{
	struct test *t = *state;
	int pipes[2], status;
	pid_t child;
	char c;

	assert_int_equal(pipe(pipes), 0);
	child = fork();
	if (child == 0) {
		struct tokens *mine = NULL;

		if (tokens_open(t->path, 3, &mine) < 0 || runs(t, mine, 0) != 4 ||
		    write(pipes[1], "x", 1) != 1)
			_exit(1);
		pause();
	}
	assert_int_equal(read(pipes[0], &c, 1), 1);
	assert_int_equal(runs(t, t->b, 0), 1);
	kill(child, SIGKILL);
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(runs(t, t->b, 1), 4);
	close(pipes[0]);
	close(pipes[1]);
}

static void budget_of_none_allows_one(void **state)
{
	struct test *t = *state;
	struct tokens *none = NULL;

	assert_int_equal(tokens_open("/nonexistent/x", 0, &none), 0);
	assert_int_equal(runs(t, none, 0), 1);
	tokens_settle(none, 0, false, t->now_ns);
	tokens_free(none);
	assert_int_equal(tokens_open("/nonexistent/x", 1, &none), -EIO);
	assert_true(tokens_may_run(NULL, 1000, 0));
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		CASE(daemon_alone_runs_one_and_all_tokens),
		CASE(daemons_together_share_the_tokens),
		CASE(token_held_long_is_passed_to_waiter),
		CASE(tokens_of_a_killed_daemon_are_free),
		CASE(budget_of_none_allows_one),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
