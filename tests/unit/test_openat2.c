/* SPDX-License-Identifier: Apache-2.0 */
/* A look at a name says the same with openat2() and where a filter has taken that away.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <seccomp.h>

#include "daemon/base/openat2.h"
#include "tests/lib/tmp.h"

static char dir[PATH_MAX];

/* As the unit's filter (RestrictSUIDSGID=). */
static void take_openat2_away(void)
{
	scmp_filter_ctx filter = seccomp_init(SCMP_ACT_ALLOW);

	if (!filter || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
	    seccomp_rule_add(filter, SCMP_ACT_ERRNO(ENOSYS), SCMP_SYS(openat2), 0) < 0 ||
	    seccomp_load(filter) < 0)
		_exit(77);
	seccomp_release(filter);
	if (syscall(SYS_openat2, AT_FDCWD, ".", NULL, 0) == 0 || errno != ENOSYS)
		_exit(78);
}

static void path_of(const char *name, char *path, size_t size)
{
	snprintf(path, size, "%s/%s", dir, name);
}

static int names_are_judged(void)
{
	char byte, path[PATH_MAX + 16];
	int fd, file;

	fd = openat2_path(dir, "file");
	if (fd < 0 || read(fd, &byte, 1) >= 0 || errno != EBADF)
		return 1;
	file = openat2_reopen(fd, O_RDONLY | O_NONBLOCK);
	if (file < 0 || read(file, &byte, 1) != 1 || byte != 'x')
		return 2;
	if (openat2_path(dir, "none") >= 0 || errno != ENOENT)
		return 3;
	fd = openat2_path(dir, "fifo"); /* it has no writer */
	if (fd < 0)
		return 4;
	/* the link itself, which nothing opens */
	fd = openat2_path(dir, "link");
	if (fd < 0 || openat2_reopen(fd, O_RDONLY) >= 0 || errno != ELOOP)
		return 5;
	path_of("folder", path, sizeof(path));
	fd = openat2_path(dir, "folder");
	if (fd < 0)
		return 6;
	if (mount("none", path, "tmpfs", 0, NULL) < 0)
		return errno == EPERM ? 0 : 7;
	fd = openat2_path(dir, "folder");
	return fd < 0 && errno == EXDEV ? 0 : 8;
}

static int in_a_child(bool filtered)
{
	int status;
	pid_t pid = fork();

	if (pid == 0) {
		/* without the right to, nothing is mounted */
		if (unshare(CLONE_NEWNS) == 0 &&
		    mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
			_exit(79);
		if (filtered)
			take_openat2_away();
		_exit(names_are_judged());
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	return WEXITSTATUS(status);
}

static void names_are_judged_by_openat2(void **state)
{
	(void)state;
	assert_int_equal(in_a_child(false), 0);
}

static void names_are_judged_without_openat2(void **state)
{
	int status = in_a_child(true);

	(void)state;
	if (status == 77) {
		print_message("needs a seccomp filter\n");
		skip();
	}
	assert_int_equal(status, 0);
}

static int begin(void **state)
{
	char path[PATH_MAX + 16];
	int fd;

	(void)state;
	assert_non_null(mkdtemp(tmp_path(dir, sizeof(dir), "kvd-openat2-XXXXXX")));
	path_of("file", path, sizeof(path));
	fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	assert_int_equal(write(fd, "x", 1), 1);
	close(fd);
	path_of("fifo", path, sizeof(path));
	assert_int_equal(mkfifo(path, 0600), 0);
	path_of("link", path, sizeof(path));
	assert_int_equal(symlink("file", path), 0);
	path_of("folder", path, sizeof(path));
	return mkdir(path, 0700);
}

static int end(void **state)
{
	static const char *const names[] = {"file", "fifo", "link", "folder"};
	char path[PATH_MAX + 16];

	(void)state;
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		path_of(names[i], path, sizeof(path));
		(void)remove(path);
	}
	return rmdir(dir);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(names_are_judged_by_openat2),
		cmocka_unit_test(names_are_judged_without_openat2),
	};

	return cmocka_run_group_tests(tests, begin, end);
}
