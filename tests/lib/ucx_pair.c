/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Children are this program, run again with an environment variable that says what to
 * be, because libucp cannot be used on both sides of a fork.
 */
#include "tests/lib/ucx_pair.h"

#include <fcntl.h>
#include <glob.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- children ---- */

static void __attribute__((noreturn)) child_peer(enum xp_kind kind)
{
	static struct up_op op;
	static const struct plan_run run = {.len = 64 * MIB, .count = 1};
	struct plan *plan;
	struct up_place place;
	uint8_t address[XP_ADDRESS_MAX];
	struct xp_peer_args args = {.address = address, .owner = &up_a, .dial = true};
	pid_t parent = getppid();
	ssize_t n;

	up_begin(NULL);
	up_b.t->ops->close(up_b.t);
	up_b.t = NULL;
	memset(args.token_in, 2, sizeof(args.token_in));
	memset(args.token_out, 1, sizeof(args.token_out));
	assert_true(write(4, up_a.t->address, up_a.t->address_len) > 0);
	n = read(3, address, sizeof(address));
	assert_true(n > 0);
	args.address_len = (size_t)n;
	assert_int_equal(up_a.t->ops->peer_open(up_a.t, &args, &up_a.peer), 0);
	await(up_a.ready);
	plan = up_plan(&run, 1);
	up_place_init(&place, &up_a, 64 * MIB, false);
	memset(place.memory->base, 0x77, 64 * MIB);
	up_op_init(&op, kind, plan, &place, &place);
	assert_int_equal(up_a.t->ops->post(up_a.peer, &op.op), 0);
	while (getppid() == parent)
		up_turn();
	_exit(0); /* the test failed */
}

pid_t up_child_start(const char *how, struct up_node *n)
{
	uint8_t address[XP_ADDRESS_MAX];
	struct xp_peer_args args = {.address = address, .owner = n};
	int in[2], out[2];
	ssize_t len;
	pid_t pid;

	assert_int_equal(pipe(in), 0);
	assert_int_equal(pipe(out), 0);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		int r = fcntl(in[0], F_DUPFD, 10), w = fcntl(out[1], F_DUPFD, 10);

		dup2(r, 3);
		dup2(w, 4);
		setenv("KVD_TEST_UCX_CHILD", how, 1);
		execl("/proc/self/exe", "test_ucx", NULL);
		_exit(127);
	}
	close(in[0]);
	close(out[1]);
	len = read(out[0], address, sizeof(address));
	assert_true(len > 0);
	args.address_len = (size_t)len;
	memset(args.token_in, 1, sizeof(args.token_in));
	memset(args.token_out, 2, sizeof(args.token_out));
	assert_int_equal(n->t->ops->peer_open(n->t, &args, &n->peer), 0);
	assert_true(write(in[1], n->t->address, n->t->address_len) > 0);
	close(in[1]);
	close(out[0]);
	return pid;
}

static int run_self(const char *library)
{
	int status;
	pid_t pid = fork();

	assert_true(pid >= 0);
	if (pid == 0) {
		setenv("KVD_TEST_UCX_LIBRARY", library, 1);
		setenv("KVD_TEST_UCX_CHILD", "all", 1);
		execl("/proc/self/exe", "test_ucx", NULL);
		_exit(127);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

static void library_of_the_operator_passes_the_same(void **state)
{
	const char *other = getenv("KVD_TEST_UCX_OTHER");
	glob_t found = {0};

	(void)state;
	if (!other && glob("/usr/local/lib/python3*/dist-packages/libucx/lib/libucp.so.0",
			   0, NULL, &found) == 0)
		other = found.gl_pathv[0];
	if (!other) {
		print_message("SKIP: needs KVD_TEST_UCX_OTHER=.../libucp.so.0 or an "
			      "installed libucx wheel\n");
		skip();
	}
	assert_int_equal(run_self(other), 0);
	globfree(&found);
}

int up_run_tests(const char *name, const struct CMUnitTest *tests, size_t count)
{
	const struct CMUnitTest other[] = {
		cmocka_unit_test(library_of_the_operator_passes_the_same),
	};
	const char *how = getenv("KVD_TEST_UCX_CHILD");
	int failed;

	up_transport = &ucx_transport;
	signal(SIGPIPE, SIG_IGN);
	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	if (how && !strcmp(how, "writer"))
		child_peer(XP_WRITE);
	if (how && !strcmp(how, "reader"))
		child_peer(XP_READ);
	failed = _cmocka_run_group_tests(name, tests, count, NULL, NULL);
	if (!failed && !how)
		failed = cmocka_run_group_tests_name(name, other, NULL, NULL);
	return failed != 0;
}
