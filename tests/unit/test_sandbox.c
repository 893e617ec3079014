/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What each kind of process has given up is refused, and the rest is not. Each call is
 * made in a process of its own, with wrong arguments: the kernel's own answer to them is
 * any but ENOSYS, which the same call shows without a sandbox.
 */
#include "daemon/gate/sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/gate/landlock.h"
#include "tests/lib/tmp.h"

#define FREE (-1)	  /* no sandbox */
#define KILLED 1000	  /* outcome, beside errno */
#define NOBODY (1L << 30) /* no process has this number */

struct
try {
	const char *what;
	long number;
	long args[6];
};

/* Nobody may. */
static const struct try for_nobody[] = {
	{"execve", SYS_execve, {0}},
	{"a namespace", SYS_clone, {CLONE_NEWUSER | CLONE_FS}},
	{"clone3", SYS_clone3, {0}},
	{"unshare", SYS_unshare, {0}},
	{"setns", SYS_setns, {-1}},
	{"ptrace", SYS_ptrace, {PTRACE_PEEKDATA, NOBODY}},
	{"process_vm_readv", SYS_process_vm_readv, {NOBODY, 0, 0, 0, 0, 1}},
	{"a signal", SYS_kill, {NOBODY, SIGTERM}},
	{"a signal to a thread", SYS_tgkill, {NOBODY, NOBODY, SIGKILL}},
	{"mount", SYS_mount, {0}},
	{"chroot", SYS_chroot, {0}},
	{"bpf", SYS_bpf, {-1}},
	{"keyctl", SYS_keyctl, {-1}},
	{"init_module", SYS_init_module, {0}},
	{"kexec_load", SYS_kexec_load, {0, 0, 0, -1}},
	{"io_uring_setup", SYS_io_uring_setup, {0}},
	{"userfaultfd", SYS_userfaultfd, {-1}},
	{"perf_event_open", SYS_perf_event_open, {0}},
	{"open_by_handle_at", SYS_open_by_handle_at, {-1}},
	{"mknodat", SYS_mknodat, {-1}},
	{"setxattr", SYS_setxattr, {0}},
	{"setresuid", SYS_setresuid, {-1, -1, -1}},
	{"capset", SYS_capset, {0}},
	{"shmget", SYS_shmget, {0}},
	{"personality", SYS_personality, {0xffffffff}},
	{"limits of others", SYS_prlimit64, {NOBODY}},
	{"prctl(PR_SET_DUMPABLE)", SYS_prctl, {PR_SET_DUMPABLE, 99}},
	{"a socket of AF_ALG", SYS_socket, {AF_ALG, -1}},
	{"a socket of AF_PACKET", SYS_socket, {AF_PACKET, -1}},
	{"TIOCSTI", SYS_ioctl, {-1, TIOCSTI}},
};

/* The main process may, those of the gate not. */
static const struct try for_main[] = {
	{"statfs", SYS_statfs, {0}},
	{"a socket", SYS_socket, {AF_INET, -1}},
	{"connect", SYS_connect, {-1}},
	{"write", SYS_write, {-1}},
	{"ioctl", SYS_ioctl, {-1, FIONREAD}},
	{"memfd_create", SYS_memfd_create, {0, -1}},
	{"mprotect", SYS_mprotect, {1}},
	{"pidfd_open", SYS_pidfd_open, {-1}},
	{"unlinkat", SYS_unlinkat, {-1, (long)"x"}},
};

/* The warden may; nobody else. */
static const struct try for_warden[] = {
	{"a process", SYS_clone, {CLONE_SIGHAND}},
	{"SIGKILL", SYS_kill, {NOBODY, SIGKILL}},
	{"wait4", SYS_wait4, {-1, 0, -1}},
};

static void enter(int kind)
{
	if (kind > SANDBOX_WARDEN)
		enter(SANDBOX_WARDEN);
	if (kind != FREE && sandbox_enter((enum sandbox_kind)kind) < 0)
		_exit(255);
}

/* 0, errno, or KILLED by the sandbox. */
static int outcome(int kind, const struct try *t)
{
	int status = 0;
	pid_t pid = fork();

	assert_true(pid >= 0);
	if (pid == 0) {
		const long *a = t->args;

		enter(kind);
		_exit(syscall(t->number, a[0], a[1], a[2], a[3], a[4], a[5]) < 0 ? errno
										 : 0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	if (WIFSIGNALED(status)) {
		assert_int_equal(WTERMSIG(status), SIGSYS);
		return KILLED;
	}
	return WEXITSTATUS(status);
}

static bool is_refused(int kind, const struct try *t)
{
	int got = outcome(kind, t);

	assert_int_not_equal(got, 255);
	return kind == SANDBOX_MAIN
		       ? got == ENOSYS || (t->number == SYS_ioctl && got == EPERM)
		       : got == KILLED;
}

static void check_all(const struct try *list, size_t count, int kind, bool refused)
{
	for (size_t i = 0; i < count; i++) {
		const struct try *t = &list[i];

		if (outcome(FREE, t) == ENOSYS)
			continue; /* this kernel has no such call */
		if (is_refused(kind, t) != refused)
			fail_msg("%s: kind %d, %d (free: %d)", t->what, kind,
				 outcome(kind, t), outcome(FREE, t));
	}
}

static void need_sandbox(void)
{
	assert_int_equal(sandbox_prepare(true), 0);
	if (!*sandbox_words()) {
		print_message("skipped: %s\n", sandbox_lacks());
		skip();
	}
}

static void calls_unused_are_refused_to_all(void **state)
{
	(void)state;
	need_sandbox();
	for (int kind = SANDBOX_MAIN; kind <= SANDBOX_OPEN; kind++)
		check_all(for_nobody, ARRAY_LEN(for_nobody), kind, true);
}

static void calls_of_main_are_refused_to_the_gate(void **state)
{
	(void)state;
	need_sandbox();
	check_all(for_main, ARRAY_LEN(for_main), SANDBOX_MAIN, false);
	for (int kind = SANDBOX_WARDEN; kind <= SANDBOX_VM; kind++)
		check_all(for_main, ARRAY_LEN(for_main), kind, true);
}

static void files_are_opened_by_their_owners(void **state)
{
	static const struct try opening = {"openat", SYS_openat, {-1, (long)"x"}};

	(void)state;
	need_sandbox();
	check_all(&opening, 1, SANDBOX_MAIN, false);
	check_all(&opening, 1, SANDBOX_OPEN, false);
	check_all(&opening, 1, SANDBOX_GATE, true);
	check_all(&opening, 1, SANDBOX_VM, true);
}

static void calls_of_the_warden_are_refused_to_its_children(void **state)
{
	(void)state;
	need_sandbox();
	check_all(for_warden, ARRAY_LEN(for_warden), SANDBOX_WARDEN, false);
	check_all(for_warden, ARRAY_LEN(for_warden), SANDBOX_MAIN, true);
	check_all(for_warden, ARRAY_LEN(for_warden), SANDBOX_GATE, true);
	check_all(for_warden, ARRAY_LEN(for_warden), SANDBOX_VM, true);
	check_all(for_warden, ARRAY_LEN(for_warden), SANDBOX_OPEN, true);
}

struct waiter {
	pthread_barrier_t entered;
	int got;
};

static void *execve_later(void *arg)
{
	struct waiter *w = arg;

	pthread_barrier_wait(&w->entered);
	w->got = syscall(SYS_execve, NULL, NULL, NULL) < 0 ? errno : 0;
	return NULL;
}

static int thread_is_refused(bool before)
{
	struct waiter w;
	pthread_t thread;

	pthread_barrier_init(&w.entered, NULL, 2);
	if (!before)
		enter(SANDBOX_MAIN);
	if (pthread_create(&thread, NULL, execve_later, &w) != 0)
		return 100;
	if (before)
		enter(SANDBOX_MAIN);
	pthread_barrier_wait(&w.entered);
	pthread_join(thread, NULL);
	return w.got == ENOSYS ? 0 : 101;
}

/* Threads that were there before, and that come later. */
static void threads_of_main_are_all_in_it(void **state)
{
	(void)state;
	need_sandbox();
	for (int before = 0; before <= 1; before++) {
		int status = -1;
		pid_t pid = fork();

		if (pid == 0)
			_exit(thread_is_refused(before != 0));
		assert_int_equal(waitpid(pid, &status, 0), pid);
		assert_int_equal(status, 0);
	}
}

/* ---- files ---- */

struct places {
	char in[64], out[64], file[80], fresh[80], fresh_in[80];
	pid_t other;
};

static int opened(const char *path, int flags)
{
	cleanup_close int fd = open(path, flags | O_CLOEXEC, 0600);

	return fd < 0 ? errno : 0;
}

static int opened_again(unsigned int flags)
{
	cleanup_close int fd = memfd_create("test", MFD_CLOEXEC | flags);
	char path[40];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return fd < 0 && flags ? 0 : opened(path, O_RDWR);
}

static int answer(int r)
{
	return r < 0 ? errno : 0;
}

/* The number of the first that is not as wanted, with or without; 0: none. */
static int files_check(const struct places *p, bool given_up)
{
	int no = given_up ? EACCES : 0;
	char memory[40];

	snprintf(memory, sizeof(memory), "/proc/%d/mem", (int)p->other);
	if (opened(p->file, O_RDONLY) || opened("/proc/self/mem", O_RDONLY) ||
	    opened("/dev/null", O_RDWR) || opened("/dev/shm", O_RDONLY))
		return 1;
	if (opened(p->fresh_in, O_RDWR | O_CREAT) || answer(unlink(p->fresh_in)) ||
	    answer(mkdir(p->fresh_in, 0700)) || answer(rmdir(p->fresh_in)))
		return 2;
	if (opened_again(0) || opened_again(MFD_HUGETLB))
		return 3;
	if (opened(p->file, O_WRONLY) != no || opened(p->file, O_RDWR) != no)
		return 4;
	if (answer(mkdir(p->fresh, 0700)) != no || (!no && rmdir(p->fresh) < 0))
		return 5;
	if (answer(symlink("x", p->fresh)) != no || (!no && unlink(p->fresh) < 0))
		return 6;
	if (opened(p->fresh, O_WRONLY | O_CREAT) != no || answer(unlink(p->file)) != no)
		return 7;
	return opened(memory, O_RDWR) == no ? 0 : 8;
}

static void files_elsewhere_are_not_changed(void **state)
{
	struct places p;

	(void)state;
	need_sandbox();
	if (landlock_version() < 3) /* before, files could be cut */
		skip();
	for (int given_up = 0; given_up <= 1; given_up++) {
		const char *const in[] = {p.in, "/nonexistent", NULL};
		pid_t pid;
		int status;

		assert_non_null(mkdtemp(tmp_path(p.in, sizeof(p.in), "in-XXXXXX")));
		assert_non_null(mkdtemp(tmp_path(p.out, sizeof(p.out), "out-XXXXXX")));
		snprintf(p.file, sizeof(p.file), "%s/file", p.out);
		snprintf(p.fresh, sizeof(p.fresh), "%s/new", p.out);
		snprintf(p.fresh_in, sizeof(p.fresh_in), "%s/new", p.in);
		assert_int_equal(opened(p.file, O_WRONLY | O_CREAT), 0);
		p.other = getpid();
		pid = fork();
		if (pid == 0) {
			if (given_up && sandbox_files(in) < 0)
				_exit(100);
			_exit(files_check(&p, given_up != 0));
		}
		assert_int_equal(waitpid(pid, &status, 0), pid);
		assert_int_equal(WEXITSTATUS(status), 0);
		assert_true(WIFEXITED(status));
		unlink(p.file);
		unlink(p.fresh);
		assert_int_equal(rmdir(p.in), 0);
		assert_int_equal(rmdir(p.out), 0);
	}
}

static void landlock_nothing_refuses_every_file(void **state)
{
	int status;
	pid_t pid;

	(void)state;
	need_sandbox();
	if (landlock_version() == 0)
		skip();
	pid = fork();
	if (pid == 0) {
		if (opened("/proc/self/status", O_RDONLY) || landlock_nothing() < 0)
			_exit(1);
		_exit(opened("/proc/self/status", O_RDONLY) == EACCES &&
				      opened("/", O_RDONLY) == EACCES
			      ? 0
			      : 2);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
}

static void sandbox_off_is_not_entered(void **state)
{
	int status = -1;
	pid_t pid = fork();

	(void)state;
	if (pid == 0) {
		if (sandbox_prepare(false) < 0 || *sandbox_words() || !*sandbox_lacks())
			_exit(1);
		enter(SANDBOX_GATE);
		_exit(access("/", F_OK) == 0 ? 0 : 2);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(sandbox_off_is_not_entered),
		cmocka_unit_test(calls_unused_are_refused_to_all),
		cmocka_unit_test(calls_of_main_are_refused_to_the_gate),
		cmocka_unit_test(files_are_opened_by_their_owners),
		cmocka_unit_test(calls_of_the_warden_are_refused_to_its_children),
		cmocka_unit_test(threads_of_main_are_all_in_it),
		cmocka_unit_test(files_elsewhere_are_not_changed),
		cmocka_unit_test(landlock_nothing_refuses_every_file),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
