/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_hops: what a request over TCP cannot do without, between two processes of
 * this host that block in their reads: the limit that a room's latency is held
 * against. For each line `N` on stdin a line of JSON with three lists of N times
 * in seconds, taken in turn:
 *
 *   zmq      a control message one way (half a round trip), DEALER to ROUTER
 *   tcp      64 KiB one way (half a round trip of 64 KiB), TCP_NODELAY
 *   socket   two hops on a Unix socket (a round trip): an engine's request to its
 *            daemon and the answer
 */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>
#include <zmq.h>

#include "daemon/base/clock.h"
#include "tests/bench/rows.h"

#define PAGE_BYTES 65536u
#define MESSAGE_BYTES 256u
#define WARM_UP 50u

static uint8_t page[PAGE_BYTES];

static void need(bool ok, const char *what)
{
	if (ok)
		return;
	perror(what);
	exit(1);
}

static void move_all(int fd, size_t bytes, bool out)
{
	for (size_t at = 0; at < bytes;) {
		ssize_t n = out ? send(fd, page + at, bytes - at, MSG_NOSIGNAL)
				: recv(fd, page + at, bytes - at, 0);

		if (n <= 0)
			exit(n == 0 && !out ? 0 : 1);
		at += (size_t)n;
	}
}

/* The other process: whatever comes goes back. */
static void child_begin(void)
{
	prctl(PR_SET_PDEATHSIG, SIGTERM);
}

static int unix_echo(void)
{
	int fds[2];

	need(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0, "socketpair");
	if (fork() == 0) {
		child_begin();
		close(fds[0]);
		for (;;) {
			move_all(fds[1], MESSAGE_BYTES, false);
			move_all(fds[1], MESSAGE_BYTES, true);
		}
	}
	close(fds[1]);
	return fds[0];
}

static int tcp_echo(void)
{
	struct sockaddr_in at = {.sin_family = AF_INET,
				 .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(at);
	int listener = socket(AF_INET, SOCK_STREAM, 0), fd, one = 1;

	need(bind(listener, (struct sockaddr *)&at, len) == 0 &&
		     listen(listener, 1) == 0 &&
		     getsockname(listener, (struct sockaddr *)&at, &len) == 0,
	     "listen");
	if (fork() == 0) {
		child_begin();
		fd = accept(listener, NULL, NULL);
		need(fd >= 0, "accept");
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
		for (;;) {
			move_all(fd, PAGE_BYTES, false);
			move_all(fd, PAGE_BYTES, true);
		}
	}
	close(listener);
	fd = socket(AF_INET, SOCK_STREAM, 0);
	need(connect(fd, (struct sockaddr *)&at, len) == 0, "connect");
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	return fd;
}

static void zmq_echo_run(int endpoint_fd)
{
	void *context = zmq_ctx_new(), *router = zmq_socket(context, ZMQ_ROUTER);
	char endpoint[128] = "", id[64], text[MESSAGE_BYTES];
	size_t len = sizeof(endpoint);

	child_begin();
	need(zmq_bind(router, "tcp://127.0.0.1:*") == 0 &&
		     zmq_getsockopt(router, ZMQ_LAST_ENDPOINT, endpoint, &len) == 0 &&
		     write(endpoint_fd, endpoint, sizeof(endpoint)) == sizeof(endpoint),
	     "zmq");
	for (;;) {
		int n = zmq_recv(router, id, sizeof(id), 0);

		need(n > 0 && zmq_recv(router, text, sizeof(text), 0) == MESSAGE_BYTES &&
			     zmq_send(router, id, (size_t)n, ZMQ_SNDMORE) == n &&
			     zmq_send(router, text, sizeof(text), 0) == MESSAGE_BYTES,
		     "zmq");
	}
}

static void *zmq_echo(void)
{
	char endpoint[128];
	void *dealer;
	int fds[2];

	need(pipe(fds) == 0, "pipe");
	if (fork() == 0)
		zmq_echo_run(fds[1]);
	need(read(fds[0], endpoint, sizeof(endpoint)) == sizeof(endpoint),
	     "zmq endpoint");
	dealer = zmq_socket(zmq_ctx_new(), ZMQ_DEALER);
	need(zmq_connect(dealer, endpoint) == 0, "zmq_connect");
	return dealer;
}

static double zmq_s(void *dealer)
{
	char text[MESSAGE_BYTES] = "";
	double begin = clock_s();

	need(zmq_send(dealer, text, sizeof(text), 0) == MESSAGE_BYTES &&
		     zmq_recv(dealer, text, sizeof(text), 0) == MESSAGE_BYTES,
	     "zmq");
	return clock_s() - begin;
}

static double echo_s(int fd, size_t bytes)
{
	double begin = clock_s();

	move_all(fd, bytes, true);
	move_all(fd, bytes, false);
	return clock_s() - begin;
}

static void print_list(const char *name, const double *seconds, unsigned int n)
{
	printf("\"%s\":[", name);
	for (unsigned int i = 0; i < n; i++)
		printf("%s%.9f", i ? "," : "", seconds[i]);
	printf("]");
}

static void hops(unsigned int n, void *dealer, int tcp, int unix_fd)
{
	double *zmq_times = calloc(n, sizeof(double)),
	       *tcp_times = calloc(n, sizeof(double));
	double *unix_times = calloc(n, sizeof(double));

	need(zmq_times && tcp_times && unix_times, "calloc");
	for (unsigned int i = 0; i < n; i++) {
		zmq_times[i] = zmq_s(dealer) / 2;
		tcp_times[i] = echo_s(tcp, PAGE_BYTES) / 2;
		unix_times[i] = echo_s(unix_fd, MESSAGE_BYTES);
	}
	printf("{");
	print_list("zmq", zmq_times, n);
	printf(",");
	print_list("tcp", tcp_times, n);
	printf(",");
	print_list("socket", unix_times, n);
	printf("}\n");
	fflush(stdout);
	free(zmq_times);
	free(tcp_times);
	free(unix_times);
}

int main(void)
{
	int unix_fd = unix_echo(), tcp = tcp_echo();
	void *dealer = zmq_echo(); /* last: its threads do not live through a fork */
	char line[32];

	for (unsigned int i = 0; i < WARM_UP; i++) {
		zmq_s(dealer);
		echo_s(tcp, PAGE_BYTES);
		echo_s(unix_fd, MESSAGE_BYTES);
	}
	while (fgets(line, sizeof(line), stdin))
		hops((unsigned int)atoi(line), dealer, tcp, unix_fd);
	return 0;
}
