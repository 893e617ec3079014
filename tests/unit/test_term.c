/* SPDX-License-Identifier: Apache-2.0 */
/* The terminal as a program leaves it that is stopped and continued (^Z, fg). The rest of
 * it: tests/integration/test_top.py. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <pty.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>
#include <utmp.h>

#include "ctl/term.h"

#define ENTERED "\033[?1049h"
#define LEFT "\033[?1049l"
#define LAST "that was all"

/* What the child wrote until its last word. */
static void read_all(int fd, char *text, size_t size)
{
	size_t n = 0;

	for (*text = '\0'; !strstr(text, LAST);) {
		ssize_t got = read(fd, text + n, size - 1 - n);

		assert_true(got > 0);
		n += (size_t)got;
		text[n] = '\0';
	}
}

static unsigned int count(const char *text, const char *words)
{
	unsigned int n = 0;

	for (; (text = strstr(text, words)); text++)
		n++;
	return n;
}

/* Is stopped with it open, or after it has closed it. */
static void terminal_child(bool closed)
{
	if (term_open() < 0)
		_exit(2);
	if (closed)
		term_close();
	raise(SIGTSTP);
	if (!closed)
		term_close();
	(void)!write(STDOUT_FILENO, LAST, strlen(LAST));
	pause();
	_exit(1);
}

static void stopped(bool closed, unsigned int times)
{
	struct termios before, after;
	int fd, other, status;
	char text[256];
	pid_t pid;

	assert_int_equal(openpty(&fd, &other, NULL, NULL, NULL), 0);
	assert_int_equal(tcgetattr(other, &before), 0);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		if (login_tty(other) < 0)
			_exit(3);
		terminal_child(closed);
	}
	assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
	assert_true(WIFSTOPPED(status));
	assert_int_equal(tcgetattr(other, &after), 0);
	assert_int_equal(after.c_lflag, before.c_lflag);
	assert_int_equal(kill(pid, SIGCONT), 0);
	read_all(fd, text, sizeof(text));
	assert_int_equal(tcgetattr(other, &after), 0);
	assert_int_equal(after.c_lflag, before.c_lflag);
	assert_int_equal(kill(pid, SIGKILL), 0);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	close(other);
	close(fd);
	assert_int_equal(count(text, ENTERED), times);
	assert_int_equal(count(text, LEFT), times);
}

static void terminal_open_is_taken_again(void **state)
{
	(void)state;
	stopped(false, 2);
}

static void terminal_restored_stays_restored(void **state)
{
	(void)state;
	stopped(true, 1);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(terminal_open_is_taken_again),
		cmocka_unit_test(terminal_restored_stays_restored),
	};

	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests_name("term", tests, NULL, NULL);
}
