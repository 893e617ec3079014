/* SPDX-License-Identifier: Apache-2.0 */
/* One daemon a name, also after one died without a word. */
#include "daemon/loop/lock.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "tests/lib/tmp.h"

static char dir[48];

static const char *path_of(const char *name)
{
	static char path[100];

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	return path;
}

static void lock_taken_holds_the_pid_and_drop_removes_it(void **state)
{
	struct lock lock;
	char text[32] = "";
	mode_t mask = umask(0);
	struct stat st;
	FILE *file;

	(void)state;
	assert_int_equal(lock_take(&lock, dir, "a"), 0);
	file = fopen(path_of("a.lock"), "r");
	assert_non_null(file);
	assert_non_null(fgets(text, sizeof(text), file));
	fclose(file);
	assert_int_equal(atoi(text), getpid());
	/* who can open it can wait for it in flock(), and has it when we crash */
	assert_int_equal(stat(path_of("a.lock"), &st), 0);
	assert_int_equal(st.st_mode & 0777, 0600);
	umask(mask);
	lock_drop(&lock);
	lock_drop(&lock);
	assert_int_equal(access(path_of("a.lock"), F_OK), -1);
}

/* A child that holds the lock until it is killed; its pid. */
static pid_t holder(void)
{
	int pipes[2];
	char c = 0;
	pid_t pid;

	assert_int_equal(pipe(pipes), 0);
	pid = fork();
	if (pid == 0) {
		struct lock lock;

		c = lock_take(&lock, dir, "b") == 0 ? 'y' : 'n';
		if (write(pipes[1], &c, 1) != 1)
			_exit(1);
		for (;;)
			pause();
	}
	close(pipes[1]);
	assert_int_equal(read(pipes[0], &c, 1), 1);
	close(pipes[0]);
	assert_int_equal(c, 'y');
	return pid;
}

static void lock_removed_is_made_again_and_a_successors_stays(void **state)
{
	struct lock lock, next;

	(void)state;
	assert_int_equal(lock_take(&lock, dir, "r"), 0);
	assert_int_equal(lock_look(&lock), 0);
	assert_int_equal(unlink(path_of("r.lock")), 0);
	assert_int_equal(lock_look(&lock), LOCK_MADE_AGAIN);
	assert_int_equal(lock_look(&lock), 0);
	assert_int_equal(lock_take(&next, dir, "r"), -EBUSY);
	/* another one was quicker */
	assert_int_equal(unlink(path_of("r.lock")), 0);
	assert_int_equal(lock_take(&next, dir, "r"), 0);
	assert_int_equal(lock_look(&lock), -EBUSY);
	lock_drop(&lock);
	assert_int_equal(access(path_of("r.lock"), F_OK), 0);
	lock_drop(&next);
	assert_int_equal(access(path_of("r.lock"), F_OK), -1);
	assert_int_equal(lock_look(&lock), 0); /* not held */
}

static void lock_held_is_refused_by_pid_and_free_after_a_kill(void **state)
{
	pid_t pid = holder();
	char words[32];
	struct lock lock;

	(void)state;
	assert_int_equal(lock_take(&lock, dir, "b"), -EBUSY);
	snprintf(words, sizeof(words), "pid %d", pid);
	assert_non_null(strstr(err_last()->text, words));
	assert_int_equal(lock.fd, -1);
	assert_int_equal(lock_take(&lock, dir, "other"), 0); /* a name of its own */
	lock_drop(&lock);
	kill(pid, SIGKILL);
	assert_int_equal(waitpid(pid, NULL, 0), pid);
	assert_int_equal(access(path_of("b.lock"), F_OK), 0); /* left behind */
	assert_int_equal(lock_take(&lock, dir, "b"), 0);
	lock_drop(&lock);
}

/* A holder that was killed but is not through with its exit: its memory is gone,
 * its descriptors are not. A zombie's pid in the file, and somebody else's open
 * descriptor that keeps the lock, look just like it. */
static void lock_of_a_dying_holder_is_waited_for(void **state)
{
	pid_t keeper, zombie = fork();
	struct lock lock;
	int pipes[2];
	char c;

	(void)state;
	if (zombie == 0)
		_exit(0);
	assert_int_equal(waitid(P_PID, (id_t)zombie, &(siginfo_t){0}, WEXITED | WNOWAIT),
			 0);
	assert_int_equal(pipe(pipes), 0);
	keeper = fork();
	if (keeper == 0) {
		int fd = open(path_of("z.lock"), O_RDWR | O_CREAT, 0644);

		if (flock(fd, LOCK_EX) < 0 || dprintf(fd, "%d\n", (int)zombie) < 0 ||
		    write(pipes[1], "y", 1) != 1)
			_exit(1);
		poll(NULL, 0, 200);
		_exit(0); /* the kernel is through */
	}
	assert_int_equal(read(pipes[0], &c, 1), 1);
	assert_int_equal(lock_take(&lock, dir, "z"), 0);
	lock_drop(&lock);
	assert_int_equal(waitpid(keeper, NULL, 0), keeper);
	assert_int_equal(waitpid(zombie, NULL, 0), zombie);
	close(pipes[0]);
	close(pipes[1]);
}

static void lock_in_a_bad_place_is_refused(void **state)
{
	static char far[600];
	struct lock lock;

	(void)state;
	assert_true(lock_take(&lock, "/nonexistent", "a") < 0);
	assert_non_null(strstr(err_last()->text, "/nonexistent/a.lock"));
	memset(far, 'x', sizeof(far) - 1);
	assert_int_equal(lock_take(&lock, far, "a"), -EINVAL);
	assert_int_equal(symlink("/etc/passwd", path_of("c.lock")), 0);
	assert_true(lock_take(&lock, dir, "c") < 0); /* never through a link */
	unlink(path_of("c.lock"));
	assert_int_equal(mkfifo(path_of("d.lock"), 0600), 0);
	assert_true(lock_take(&lock, dir, "d") < 0);
	unlink(path_of("d.lock"));
}

/* ---- sockets ---- */

static int socket_at(struct lock_socket *made, const char *path)
{
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	assert_true(fd >= 0);
	if (lock_socket_bind(made, fd, "an_option", path, 0600, 1) == 0)
		return fd;
	close(fd);
	return -1;
}

static void socket_left_behind_is_replaced_and_a_living_one_refused(void **state)
{
	struct lock_socket first, second;
	char words[200];
	int again, fd = socket_at(&first, path_of("s"));

	(void)state;
	assert_true(fd >= 0);
	assert_int_equal(first.made.st_mode & 0777, 0600);
	assert_int_equal(lock_socket_look(&first), 0);
	assert_int_equal(socket_at(&second, path_of("s")), -1);
	assert_int_equal(err_last()->code, ERR_CONFIG);
	snprintf(words, sizeof(words),
		 "an_option = %s: pid %d listens there; give each "
		 "daemon its own",
		 path_of("s"), getpid());
	assert_string_equal(err_last()->text, words);
	lock_socket_drop(&second); /* never its own */
	assert_int_equal(access(path_of("s"), F_OK), 0);
	assert_int_equal(shutdown(fd, SHUT_RDWR), 0); /* ended, but for its inode */
	again = socket_at(&second, path_of("s"));
	assert_true(again >= 0);
	assert_int_equal(lock_socket_look(&first), -EBUSY);
	lock_socket_drop(&first); /* not any more */
	assert_int_equal(access(path_of("s"), F_OK), 0);
	assert_int_equal(unlink(path_of("s")), 0);
	assert_int_equal(lock_socket_look(&second), LOCK_SOCKET_GONE);
	lock_socket_drop(&second);
	lock_socket_drop(&second);
	assert_int_equal(access(path_of("s"), F_OK), -1);
	close(fd);
	close(again);
}

static void socket_over_a_file_or_too_long_is_refused(void **state)
{
	static char far[200];
	struct lock_socket made;

	(void)state;
	assert_int_equal(mkfifo(path_of("f"), 0600), 0);
	assert_int_equal(socket_at(&made, path_of("f")), -1);
	assert_non_null(strstr(err_last()->text, "exists and is no socket"));
	lock_socket_drop(&made);
	assert_int_equal(unlink(path_of("f")), 0);
	memset(far, '/', sizeof(far) - 1);
	assert_int_equal(socket_at(&made, far), -1);
	assert_non_null(strstr(err_last()->text, "limit 107 bytes"));
	lock_socket_drop(&made);
}

static int make_dir(void **state)
{
	(void)state;
	return mkdtemp(tmp_path(dir, sizeof(dir), "kvd-lock-XXXXXX")) ? 0 : -1;
}

static int remove_dir(void **state)
{
	(void)state;
	return rmdir(dir);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(lock_taken_holds_the_pid_and_drop_removes_it),
		cmocka_unit_test(lock_removed_is_made_again_and_a_successors_stays),
		cmocka_unit_test(lock_held_is_refused_by_pid_and_free_after_a_kill),
		cmocka_unit_test(lock_of_a_dying_holder_is_waited_for),
		cmocka_unit_test(lock_in_a_bad_place_is_refused),
		cmocka_unit_test(socket_left_behind_is_replaced_and_a_living_one_refused),
		cmocka_unit_test(socket_over_a_file_or_too_long_is_refused),
	};

	return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
