/* SPDX-License-Identifier: Apache-2.0 */
/* systemd's two protocols, against sockets of our own. */
#include "daemon/loop/notify.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "tests/lib/tmp.h"

/* A datagram socket where systemd's would be; '@' names are abstract. */
static int listen_as_systemd(const char *name)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	memcpy(addr.sun_path, name, strlen(name));
	if (*name == '@')
		addr.sun_path[0] = '\0';
	assert_int_equal(
		bind(fd, (struct sockaddr *)&addr,
		     (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(name))),
		0);
	setenv("NOTIFY_SOCKET", name, 1);
	return fd;
}

static void expect(int fd, const char *text)
{
	char buf[1024];
	ssize_t n = recv(fd, buf, sizeof(buf) - 1, 0);

	assert_true(n >= 0);
	buf[n] = '\0';
	assert_string_equal(buf, text);
}

static void talk(int fd)
{
	notify_ready("serving");
	expect(fd, "READY=1\nSTATUS=serving");
	notify_reloading(UINT64_C(1234567));
	expect(fd, "RELOADING=1\nMONOTONIC_USEC=1234");
	notify_watchdog();
	expect(fd, "WATCHDOG=1");
	notify_stopping("bye");
	expect(fd, "STOPPING=1\nSTATUS=bye");
}

static void notify_reaches_path_and_abstract_sockets(void **state)
{
	char name[64], file[32];
	int fd;

	(void)state;
	fd = listen_as_systemd(tmp_name(name, sizeof(name), "@kvd-test"));
	talk(fd);
	close(fd);
	tmp_name(file, sizeof(file), "kvd-notify");
	fd = listen_as_systemd(tmp_path(name, sizeof(name), file));
	talk(fd);
	close(fd);
	unlink(name);
	unsetenv("NOTIFY_SOCKET");
}

static void notify_without_or_with_a_dead_systemd_is_harmless(void **state)
{
	static char far[300];
	char name[64];
	int fd, sent = 0;

	(void)state;
	unsetenv("NOTIFY_SOCKET");
	notify_ready("x");
	setenv("NOTIFY_SOCKET", "relative", 1);
	notify_ready("x");
	memset(far, '/', sizeof(far) - 1);
	setenv("NOTIFY_SOCKET", far, 1);
	notify_ready("x");
	setenv("NOTIFY_SOCKET", "/nonexistent/notify", 1);
	notify_ready("x");
	/* one that never reads: its queue fills, nothing blocks */
	fd = listen_as_systemd(tmp_name(name, sizeof(name), "@kvd-full"));
	for (; sent < 5000; sent++)
		notify_watchdog();
	for (sent = 0; recv(fd, far, sizeof(far), 0) > 0; sent++)
		;
	assert_true(sent > 0 && sent < 5000);
	close(fd);
	unsetenv("NOTIFY_SOCKET");
}

static void watchdog_interval_is_this_process_s(void **state)
{
	char pid[16];

	(void)state;
	unsetenv("WATCHDOG_USEC");
	assert_int_equal(notify_watchdog_ns(), 0);
	setenv("WATCHDOG_USEC", "5000000", 1);
	assert_int_equal(notify_watchdog_ns(), UINT64_C(5000000000));
	setenv("WATCHDOG_PID", "1", 1);
	assert_int_equal(notify_watchdog_ns(), 0);
	snprintf(pid, sizeof(pid), "%d", getpid());
	setenv("WATCHDOG_PID", pid, 1);
	assert_int_equal(notify_watchdog_ns(), UINT64_C(5000000000));
	setenv("WATCHDOG_USEC", "5s", 1);
	assert_int_equal(notify_watchdog_ns(), 0);
	setenv("WATCHDOG_USEC", "18446744073709551615", 1);
	assert_int_equal(notify_watchdog_ns(), 0);
	unsetenv("WATCHDOG_USEC");
	unsetenv("WATCHDOG_PID");
}

/* In a child with `fd` as fd 3 and LISTEN_FDS=count: 0 = taken as it should be,
 * 1 = none, 2 = refused. */
static int activate(int fd, const char *count, bool mine)
{
	int status, got = 77;
	pid_t pid = fork();

	if (pid == 0) {
		char text[16];

		if (fd >= 0 && (dup2(fd, 3) != 3))
			_exit(90);
		snprintf(text, sizeof(text), "%d", mine ? getpid() : 1);
		setenv("LISTEN_PID", text, 1);
		setenv("LISTEN_FDS", count, 1);
		if (notify_listen_fd(&got) < 0)
			_exit(err_last()->code == ERR_CONFIG ? 2 : 91);
		if (getenv("LISTEN_FDS") || getenv("LISTEN_PID"))
			_exit(92);
		if (got == -1)
			_exit(1);
		if (got != 3 || !(fcntl(3, F_GETFD) & FD_CLOEXEC) ||
		    !(fcntl(3, F_GETFL) & O_NONBLOCK))
			_exit(93);
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	return WEXITSTATUS(status);
}

/* In a child with a socket and a file as fds 3 and 4: 0 = each is taken as what it is. */
static int activate_named(int sock, int file, const char *names)
{
	int status, got = 77, low;
	pid_t pid = fork();

	if (pid == 0) {
		char text[16];

		low = fcntl(file, F_DUPFD, 10);
		if (dup2(sock, 3) != 3 || dup2(low, 4) != 4)
			_exit(90);
		snprintf(text, sizeof(text), "%d", getpid());
		setenv("LISTEN_PID", text, 1);
		setenv("LISTEN_FDS", "2", 1);
		setenv("LISTEN_FDNAMES", names, 1);
		if (notify_listen_fd(&got) < 0)
			_exit(2);
		if (got != 3 || notify_kept_fd("kvd-b") != -1)
			_exit(91);
		if (notify_kept_fd("kvd-a") != 4 || notify_kept_fd("kvd-a") != -1)
			_exit(92);
		_exit(fcntl(4, F_GETFD) & FD_CLOEXEC ? 0 : 93);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	return WEXITSTATUS(status);
}

static void fd_stored_is_returned_by_name(void **state)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int good = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int file = open("/dev/null", O_RDWR | O_CLOEXEC);

	(void)state;
	assert_int_equal(bind(good, (struct sockaddr *)&addr, sizeof(sa_family_t)), 0);
	assert_int_equal(listen(good, 1), 0);
	assert_int_equal(activate_named(good, file, "kvd.socket:kvd-a"), 0);
	assert_int_equal(activate_named(good, file, "kvd.socket:other"), 2);
	assert_int_equal(activate_named(good, file, "kvd-b:kvd-a"), 91); /* no socket */
	assert_int_equal(activate_named(good, file, ""), 2);
	close(good);
	close(file);
}

static void listen_fd_only_a_listening_stream_socket_is_taken(void **state)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int idle = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int good = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int dgram = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);

	(void)state;
	/* autobind: an abstract name of the kernel's choice */
	assert_int_equal(bind(good, (struct sockaddr *)&addr, sizeof(sa_family_t)), 0);
	assert_int_equal(listen(good, 1), 0);
	assert_int_equal(activate(good, "1", true), 0);
	assert_int_equal(activate(good, "1", false), 1); /* for another process */
	assert_int_equal(activate(good, "0", true), 1);
	assert_int_equal(activate(good, "x", true), 1);
	assert_int_equal(activate(good, "2", true), 2);
	assert_int_equal(activate(idle, "1", true), 2);
	assert_int_equal(activate(dgram, "1", true), 2);
	assert_int_equal(activate(null, "1", true), 2);
	close(idle);
	close(good);
	close(dgram);
	close(null);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(notify_reaches_path_and_abstract_sockets),
		cmocka_unit_test(notify_without_or_with_a_dead_systemd_is_harmless),
		cmocka_unit_test(watchdog_interval_is_this_process_s),
		cmocka_unit_test(listen_fd_only_a_listening_stream_socket_is_taken),
		cmocka_unit_test(fd_stored_is_returned_by_name),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
