/* SPDX-License-Identifier: Apache-2.0 */
/*
 * limits: what a test needs of the machine or of its user, or it is skipped by name.
 */
#ifndef KVD_TESTS_LIMITS_H
#define KVD_TESTS_LIMITS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* Room for so many file descriptors: the soft limit is raised. */
static inline void need_fds(rlim_t count)
{
	struct rlimit limit;

	assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
	if (limit.rlim_cur >= count)
		return;
	limit.rlim_cur = count;
	if (setrlimit(RLIMIT_NOFILE, &limit) == 0)
		return;
	print_message("needs %ju file descriptors (ulimit -n)\n", (uintmax_t)count);
	skip();
}

/* May this process become that user? Root may not where it has no CAP_SETUID, or in a
 * user namespace without that number. */
static inline bool may_become(uid_t uid)
{
	int status = -1;
	pid_t pid = fork();

	if (pid == 0)
		_exit(setresgid(uid, uid, uid) < 0 || setresuid(uid, uid, uid) < 0);
	return waitpid(pid, &status, 0) == pid && status == 0;
}

static inline void need_to_become(uid_t uid)
{
	if (may_become(uid))
		return;
	print_message("needs to become user %u (root)\n", (unsigned int)uid);
	skip();
}

#endif
