/* SPDX-License-Identifier: Apache-2.0 */
/*
 * limits: what a test needs of the machine or of its user, or it is skipped by name.
 */
#ifndef KVD_TESTS_LIMITS_H
#define KVD_TESTS_LIMITS_H

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
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

/* One that cannot be sealed, also where the kernel makes all others so that they can
 * (vm.memfd_noexec). */
static inline int memfd_unsealable(void)
{
	int fd = memfd_create("unsealable", MFD_CLOEXEC | 0x10); /* MFD_EXEC */

	if (fd < 0 && errno == EINVAL) /* before Linux 6.3 */
		fd = memfd_create("unsealable", MFD_CLOEXEC);
	if (fd < 0 && errno == EACCES) {
		print_message(
			"needs a memfd that cannot be sealed (vm.memfd_noexec = 2)\n");
		skip();
	}
	assert_true(fd >= 0);
	return fd;
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
