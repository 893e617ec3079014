/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_trip: what a round trip of so many bytes takes between two processes of this host
 * over a socket and nothing else: the limit that an attend's way is held against. For
 * each line `BYTES COUNT` on stdin a line of JSON with the median of COUNT round trips,
 * in us: over a Unix socket and over TCP, with both sides asleep in their reads, and with
 * both looking again and again, each on a core of its own.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/clock.h"

#define BYTES_MAX (8u << 20)
#define COUNT_MAX 1000u

static uint8_t bytes[BYTES_MAX];

struct line {
	const char *name;
	int fd;
	bool spins;
};

static void need(bool ok, const char *what)
{
	if (ok)
		return;
	perror(what);
	exit(1);
}

static cpu_set_t all; /* cores that there are */

/* The first or the second core; -1: any. */
static void stay_on(int number)
{
	cpu_set_t one = all;

	for (int cpu = 0; number >= 0 && cpu < CPU_SETSIZE; cpu++) {
		if (!CPU_ISSET(cpu, &all) || number-- > 0)
			continue;
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
	}
	sched_setaffinity(0, sizeof(one), &one);
}

static void move_all(const struct line *line, size_t count, bool out)
{
	int flags = MSG_NOSIGNAL | (line->spins ? MSG_DONTWAIT : 0);

	for (size_t at = 0; at < count;) {
		ssize_t n = out ? send(line->fd, bytes + at, count - at, flags)
				: recv(line->fd, bytes + at, count - at, flags);

		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			continue;
		if (n <= 0)
			exit(n == 0 && !out ? 0 : 1);
		at += (size_t)n;
	}
}

/* The other process: it is told how many bytes make a message. */
static void echo(const struct line *line)
{
	uint64_t count;

	prctl(PR_SET_PDEATHSIG, SIGTERM);
	for (;;) {
		const struct line asleep = {.fd = line->fd};
		uint64_t head[2];

		move_all(&asleep, sizeof(head), false);
		memcpy(head, bytes, sizeof(head));
		for (count = head[1]; count > 0; count--) {
			move_all(line, head[0], false);
			move_all(line, head[0], true);
		}
	}
}

static void pair_unix(int fds[2])
{
	need(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0, "socketpair");
}

static void pair_tcp(int fds[2])
{
	struct sockaddr_in at = {.sin_family = AF_INET,
				 .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(at);
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);

	need(listener >= 0 && bind(listener, (struct sockaddr *)&at, len) == 0 &&
		     listen(listener, 1) == 0 &&
		     getsockname(listener, (struct sockaddr *)&at, &len) == 0,
	     "listen");
	fds[0] = socket(AF_INET, SOCK_STREAM, 0);
	need(fds[0] >= 0 && connect(fds[0], (struct sockaddr *)&at, len) == 0, "connect");
	fds[1] = accept(listener, NULL, NULL);
	need(fds[1] >= 0, "accept");
	close(listener);
	for (unsigned int i = 0; i < 2; i++)
		setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

static struct line line_new(const char *name, void (*pair)(int fds[2]), bool spins)
{
	struct line line = {.name = name, .spins = spins};
	int fds[2];
	pid_t pid;

	pair(fds);
	pid = fork();
	need(pid >= 0, "fork");
	if (pid == 0) {
		close(fds[0]);
		line.fd = fds[1];
		if (spins)
			stay_on(1);
		echo(&line);
	}
	close(fds[1]);
	line.fd = fds[0];
	return line;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double trip_us(const struct line *line, uint64_t size, uint64_t count)
{
	const struct line asleep = {.fd = line->fd};
	const uint64_t head[2] = {size, count};
	double us[COUNT_MAX];

	stay_on(line->spins ? 0 : -1);
	memcpy(bytes, head, sizeof(head));
	move_all(&asleep, sizeof(head), true);
	for (uint64_t i = 0; i < count; i++) {
		double begin = clock_us();

		move_all(line, size, true);
		move_all(line, size, false);
		us[i] = clock_us() - begin;
	}
	qsort(us, count, sizeof(*us), by_value);
	return us[count / 2];
}

int main(void)
{
	struct line lines[4];
	unsigned long size, count;

	need(sched_getaffinity(0, sizeof(all), &all) == 0, "affinity");
	lines[0] = line_new("unix sleeping", pair_unix, false);
	lines[1] = line_new("unix spinning", pair_unix, true);
	lines[2] = line_new("tcp sleeping", pair_tcp, false);
	lines[3] = line_new("tcp spinning", pair_tcp, true);

	while (scanf("%lu %lu", &size, &count) == 2 && size && size <= BYTES_MAX &&
	       count && count <= COUNT_MAX) {
		for (unsigned int i = 0; i < 4; i++)
			printf("%s\"%s\": %.2f", i ? ", " : "{", lines[i].name,
			       trip_us(&lines[i], size, count));
		printf("}\n");
		fflush(stdout);
	}
	return 0;
}
