/* SPDX-License-Identifier: Apache-2.0 */
/* link_zmq over real loopback sockets. A raw ZeroMQ socket of the test acts as the
 * hostile client. To show that an event does not happen, the tests wait for a later
 * one that must. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <zmq.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/link/link_curve.h"
#include "tests/lib/zmqnet.h"

#define MS LOOP_NS_PER_MS
/* the two daemons */
#define a zmqnet_a
#define b zmqnet_b

/* ---- plain links ---- */

static void frames_arrive_in_order(void **state)
{
	struct link_line *line;
	uint64_t sum = 0;
	uint64_t sent = 0;

	(void)state;
	zmqnet_listen(&a);
	zmqnet_listen(&b);
	assert_int_equal(strncmp(b.link->endpoint, "tcp://127.0.0.1:", 16), 0);
	line = zmqnet_dial(&a, b.link->endpoint);
	zmqnet_wait(a.lines_up == 1);
	while (sent < 3000) {
		if (a.link->ops->send(line, &sent, sizeof(sent)) < 0) {
			assert_int_equal(err_last()->code, ERR_LIMIT);
			loop_turn(zmqnet_loop, MS);
			continue;
		}
		sum = sum * 1000003 + sent++;
	}
	zmqnet_wait(b.frames == 3000);
	assert_int_equal(b.sum, sum);
	assert_string_equal(b.user, "");
	assert_int_equal(link_zmq_stats(b.link)->frames_in, 3000);
	a.link->ops->hangup(line);
}

static void frames_flood_is_handed_up_in_turns(void **state)
{
	struct link_line *line;
	unsigned int most = 0, before, sent = 0;
	bool backlog = false;
	uint64_t word = 1;

	(void)state;
	zmqnet_listen(&a);
	zmqnet_listen(&b);
	line = zmqnet_dial(&a, b.link->endpoint);
	zmqnet_wait(a.lines_up == 1);
	/* b's loop is stopped while a sends; until b once had a backlog */
	while (!backlog && sent < 1000000) {
		for (unsigned int i = 0; i < 4000; i++)
			sent += a.link->ops->send(line, &word, sizeof(word)) == 0;
		while (b.frames < sent) {
			before = b.frames;
			loop_turn(zmqnet_loop, 10 * MS);
			if (b.frames - before > most)
				most = b.frames - before;
			backlog |= b.link->backlog;
		}
	}
	assert_true(backlog);
	assert_in_range(most, 2, 512); /* two budgets: prepare hook and fd */
	zmqnet_wait(!b.link->backlog);
	a.link->ops->hangup(line);
}

/* All resolution of names, libzmq's too, ends here: a name server that is down. */
int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
		struct addrinfo **list_p)
{
	int (*next)(const char *, const char *, const struct addrinfo *,
		    struct addrinfo **);

	if (!host || !strstr(host, ".invalid")) {
		*(void **)&next = dlsym(RTLD_NEXT, "getaddrinfo");
		if (host && strcmp(host, "localhost") == 0)
			host = "127.0.0.1"; /* a bare machine has no /etc/hosts */
		return next(host, service, hints, list_p);
	}
	poll(NULL, 0, 5000);
	return EAI_AGAIN;
}

static void names_hold_no_line_up(void **state)
{
	struct link_line *nobody[8], *line; /* 40 s, one after the other */
	char endpoint[LINK_ENDPOINT_MAX];

	(void)state;
	zmqnet_listen(&a);
	zmqnet_listen(&b);
	for (unsigned int i = 0; i < ARRAY_LEN(nobody); i++) {
		snprintf(endpoint, sizeof(endpoint), "tcp://nobody-%u.invalid:7400", i);
		nobody[i] = zmqnet_dial(&a, endpoint);
		assert_true(zmqnet_send(&a, nobody[i], "x") < 0);
	}
	line = zmqnet_dial(&a, b.link->endpoint);
	zmqnet_wait(a.lines_up == 1);
	assert_int_equal(zmqnet_send(&a, line, "one"), 0);
	zmqnet_wait(b.frames == 1);
	for (unsigned int i = 0; i < ARRAY_LEN(nobody); i++)
		a.link->ops->hangup(nobody[i]); /* its query may still be open */
	a.link->ops->hangup(line);
}

static void line_by_name_connects_and_reconnects(void **state)
{
	struct link_line *line;
	char by_name[LINK_ENDPOINT_MAX], plain[LINK_ENDPOINT_MAX];

	(void)state;
	zmqnet_listen(&a);
	zmqnet_listen(&b);
	zmqnet_plain(&b, plain);
	snprintf(by_name, sizeof(by_name), "tcp://LocalHost%s", strrchr(plain, ':'));
	line = zmqnet_dial(&a, by_name);
	zmqnet_wait(a.lines_up == 1);
	assert_int_equal(zmqnet_send(&a, line, "one"), 0);
	zmqnet_wait(b.frames == 1);
	zmqnet_stop(&b);
	zmqnet_wait(a.lines_down == 1);
	zmqnet_defaults(&b);
	strcpy(b.config.listen, plain);
	zmqnet_listen(&b);
	zmqnet_wait(a.lines_up == 2);
	assert_int_equal(zmqnet_send(&a, line, "two"), 0);
	a.link->ops->hangup(line);
}

static unsigned int dials, dials_failing;

int zmq_connect(void *socket, const char *address)
{
	int (*next)(void *, const char *);

	bool line = strncmp(address, "tcp:", 4) == 0;

	dials += line;
	if (line && dials_failing) {
		dials_failing--;
		errno = ENOMEM;
		return -1;
	}
	*(void **)&next = dlsym(RTLD_NEXT, "zmq_connect");
	return next(socket, address);
}

/* libzmq has no memory for it just now, and the name has no second address. */
static void line_by_name_not_dialable_is_dialled_again(void **state)
{
	struct link_line *line;
	char by_name[LINK_ENDPOINT_MAX], plain[LINK_ENDPOINT_MAX];

	(void)state;
	zmqnet_listen(&a);
	zmqnet_listen(&b);
	zmqnet_plain(&b, plain);
	snprintf(by_name, sizeof(by_name), "tcp://localhost%s", strrchr(plain, ':'));
	dials = 0;
	dials_failing = 1;
	line = zmqnet_dial(&a, by_name);
	zmqnet_wait(dials == 1);
	assert_int_equal(dials_failing, 0);
	assert_true(zmqnet_send(&a, line, "one") < 0);
	zmqnet_wait(a.lines_up == 1);
	assert_int_equal(dials, 2);
	assert_int_equal(zmqnet_send(&a, line, "one"), 0);
	zmqnet_wait(b.frames == 1);
	a.link->ops->hangup(line);
}

static void send_without_peer_is_refused(void **state)
{
	struct link_line *line;

	(void)state;
	zmqnet_listen(&a);
	line = zmqnet_dial(&a, "tcp://127.0.0.1:1");
	zmqnet_turn(100 * MS);
	assert_true(zmqnet_send(&a, line, "x") < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	assert_int_equal(a.lines_up, 0);
	a.link->ops->hangup(line);
}

static void line_connects_when_listener_starts(void **state)
{
	struct link_line *line;
	char endpoint[LINK_ENDPOINT_MAX];

	(void)state;
	zmqnet_listen(&a);
	zmqnet_listen(&b);
	zmqnet_plain(&b, endpoint);
	line = zmqnet_dial(&a, endpoint);
	zmqnet_wait(a.lines_up == 1);
	assert_int_equal(zmqnet_send(&a, line, "one"), 0);
	zmqnet_wait(b.frames == 1);
	zmqnet_stop(&b);
	zmqnet_wait(a.lines_down == 1);
	assert_true(zmqnet_send(&a, line, "lost") < 0);
	zmqnet_defaults(&b);
	strcpy(b.config.listen, endpoint);
	zmqnet_listen(&b);
	assert_string_equal(b.link->endpoint, endpoint);
	zmqnet_wait(a.lines_up == 2);
	assert_int_equal(zmqnet_send(&a, line, "two"), 0);
	zmqnet_wait(b.frames == 1);
	assert_memory_equal(b.last, "two", 3);
	a.link->ops->hangup(line);
}

static void hangup_flushes_sent_messages(void **state)
{
	(void)state;
	zmqnet_listen(&a);
	zmqnet_listen(&b);
	for (unsigned int i = 1; i <= 20; i++) {
		struct link_line *line = zmqnet_dial(&a, b.link->endpoint);

		zmqnet_wait(a.lines_up == i);
		assert_int_equal(zmqnet_send(&a, line, "bye"), 0);
		a.link->ops->hangup(line);
		zmqnet_wait(b.frames == i);
	}
}

static void queue_of_a_frozen_daemon_is_bounded(void **state)
{
	struct link_line *line;
	uint8_t frame[4096] = {0};
	unsigned int sent = 0, refused = 0;

	(void)state;
	zmqnet_listen(&a);
	zmqnet_listen(&b);
	line = zmqnet_dial(&a, b.link->endpoint);
	zmqnet_wait(a.lines_up == 1);
	/* the loop does not run: b does not receive. Sockets' buffers fill too. It
	 * must be short: b's missing heartbeats end the connection. */
	while (refused < 1000 && sent < 20000) {
		if (a.link->ops->send(line, frame, sizeof(frame)) == 0) {
			sent++;
			continue;
		}
		assert_int_equal(err_last()->code, ERR_LIMIT);
		refused++;
	}
	assert_true(sent < 20000);
	assert_true(sent >= 4096);
	/* it continues: the line reports it, and accepted frames arrive */
	zmqnet_wait(b.frames == sent);
	zmqnet_wait(a.link->ops->send(line, frame, 1) == 0);
	zmqnet_wait(b.frames == sent + 1);
	assert_int_equal(b.last_len, 1);
	a.link->ops->hangup(line);
}

static void endpoint_is_filled_in(void **state)
{
	char want[LINK_ENDPOINT_MAX];

	(void)state;
	zmqnet_listen(&a);
	snprintf(b.config.advertise, sizeof(b.config.advertise),
		 "tcp://Node-B.example:0");
	zmqnet_listen(&b);
	assert_int_equal(strncmp(b.link->endpoint, "tcp://node-b.example:", 21), 0);
	assert_true(atoi(b.link->endpoint + 21) > 0);
	zmqnet_stop(&b);
	zmqnet_defaults(&b);
	strcpy(b.config.advertise, "tcp://node-b:7777");
	zmqnet_listen(&b);
	assert_string_equal(b.link->endpoint, "tcp://node-b:7777");
	/* one spelling */
	assert_int_equal(b.link->ops->canonical(b.link, "tcp://NODE-b:7777", want), 0);
	assert_string_equal(want, "tcp://node-b:7777");
}

static void port_of_a_dying_predecessor_is_waited_for(void **state)
{
	struct sockaddr_in addr = {.sin_family = AF_INET,
				   .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(addr);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	pid_t pid;

	(void)state;
	assert_int_equal(bind(fd, (struct sockaddr *)&addr, len), 0);
	assert_int_equal(listen(fd, 1), 0);
	assert_int_equal(getsockname(fd, (struct sockaddr *)&addr, &len), 0);
	snprintf(a.config.listen, sizeof(a.config.listen), "tcp://127.0.0.1:%u",
		 ntohs(addr.sin_port));
	/* a permanent owner of the port is an error that names the port */
	assert_true(link_zmq_new(zmqnet_loop, &a.config, &a.link) < 0);
	assert_int_equal(err_last()->code, ERR_IO); /* it may become free */
	assert_non_null(strstr(err_last()->text, a.config.listen));
	err_clear();
	pid = fork();
	if (pid == 0) {
		poll(NULL, 0, 100); /* its exit takes so long */
		_exit(0);
	}
	close(fd);
	zmqnet_listen(&a);
	assert_int_equal(waitpid(pid, NULL, 0), pid);
	zmqnet_stop(&a);
}

static void listen_over_ipv6_works(void **state)
{
	int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct sockaddr_in6 addr = {.sin6_family = AF_INET6,
				    .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	bool have = fd >= 0 && bind(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0;
	struct link_line *line;

	(void)state;
	if (fd >= 0)
		close(fd);
	if (!have) {
		print_message("skipped: no IPv6 loopback on this machine\n");
		skip();
	}
	strcpy(b.config.listen, "tcp://[::1]:0");
	zmqnet_listen(&a);
	zmqnet_listen(&b);
	line = zmqnet_dial(&a, b.link->endpoint);
	zmqnet_wait(a.lines_up == 1);
	assert_int_equal(zmqnet_send(&a, line, "six"), 0);
	zmqnet_wait(b.frames == 1);
	a.link->ops->hangup(line);
}

static void assert_no_link(struct zmqnet_node *node, const char *words)
{
	assert_true(link_zmq_new(zmqnet_loop, &node->config, &node->link) < 0);
	assert_int_equal(err_last()->code, ERR_CONFIG);
	assert_non_null(strstr(err_last()->text, words));
	node->link = NULL;
}

/* Loopback is no exception: no place for a key is no daemon. */
static void listen_without_keys_refused(void **state)
{
	static const char *const listen[] = {"tcp://127.0.0.1:0", "tcp://0.0.0.0:0",
					     "tcp://[::]:0"};

	(void)state;
	a.config.insecure = false;
	strcpy(a.config.keys_dir, "/none/keys");
	for (size_t i = 0; i < ARRAY_LEN(listen); i++) {
		strcpy(a.config.advertise, "tcp://127.0.0.1:0");
		strcpy(a.config.listen, listen[i]);
		assert_no_link(&a, "insecure = yes");
		assert_non_null(strstr(err_last()->text, "/none/keys"));
	}
	a.config.insecure = true;
	strcpy(a.config.listen, "tcp://0.0.0.0:0");
	zmqnet_listen(&a);
	zmqnet_stop(&a);
	a.config.advertise[0] = '\0';
	assert_no_link(&a, "set advertise");
	/* and with keys it may */
	zmqnet_defaults(&a);
	zmqnet_use_curve(&a, 0);
	zmqnet_allow(true);
	strcpy(a.config.listen, "tcp://0.0.0.0:0");
	strcpy(a.config.advertise, "tcp://127.0.0.1:0");
	zmqnet_listen(&a);
}

static void listen_on_a_bad_or_taken_address_refused(void **state)
{
	(void)state;
	zmqnet_listen(&a);
	zmqnet_plain(&a, b.config.listen);
	assert_true(link_zmq_new(zmqnet_loop, &b.config, &b.link) < 0);
	assert_int_equal(err_last()->code, ERR_IO);
	assert_non_null(strstr(err_last()->text, "Address already in use"));
	b.link = NULL;
	strcpy(b.config.listen, "tcp://127.0.0.1:77777");
	assert_no_link(&b, "listen = ");
}

static void dial_of_bad_endpoint_refused(void **state)
{
	static const char *const bad[] = {"tcp://127.0.0.1", "inproc://zeromq.zap.01",
					  "ipc:///tmp/x", "tcp://127.0.0.1:1#short",
					  "tcp://127.0.0.1:1#"};
	struct link_line *line;

	(void)state;
	zmqnet_listen(&a);
	for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
		assert_true(a.link->ops->dial(a.link, bad[i], &a, &line) < 0);
		assert_int_equal(err_last()->code, ERR_INVAL);
	}
}

/* ---- hostile clients ---- */

static void *client_of(void *context, const struct zmqnet_node *node)
{
	void *socket = zmq_socket(context, ZMQ_DEALER);
	char endpoint[LINK_ENDPOINT_MAX];
	int zero = 0;

	zmqnet_plain(node, endpoint);
	zmq_setsockopt(socket, ZMQ_LINGER, &zero, sizeof(zero));
	assert_int_equal(zmq_connect(socket, endpoint), 0);
	return socket;
}

static void messages_of_other_parts_are_dropped(void **state)
{
	void *context = zmq_ctx_new(), *client;

	(void)state;
	zmqnet_listen(&b);
	client = client_of(context, &b);
	for (unsigned int parts = 2; parts < 700; parts += 97) {
		for (unsigned int i = 1; i < parts; i++)
			assert_int_equal(zmq_send(client, "x", 1, ZMQ_SNDMORE), 1);
		assert_int_equal(zmq_send(client, "x", 1, 0), 1);
	}
	assert_int_equal(zmq_send(client, "good", 4, 0), 4);
	zmqnet_wait(b.frames == 1);
	assert_memory_equal(b.last, "good", 4);
	assert_int_equal(link_zmq_stats(b.link)->bad_frames, 8);
	zmq_close(client);
	zmq_ctx_term(context);
}

static void message_over_the_cap_closes_its_connection(void **state)
{
	void *context = zmq_ctx_new(), *client;
	uint8_t *big = calloc(1, 70000);

	(void)state;
	b.config.peer_message_bytes = 65536;
	zmqnet_listen(&b);
	client = client_of(context, &b);
	assert_int_equal(zmq_send(client, big, 65536, 0), 65536);
	zmqnet_wait(b.frames == 1);
	assert_int_equal(b.last_len, 65536);
	assert_int_equal(zmq_send(client, big, 65537, 0), 65537);
	/* the client's library connects again; the next one is received */
	zmqnet_wait(zmq_send(client, "small", 5, ZMQ_DONTWAIT) == 5 &&
		    (zmqnet_turn(20 * MS), 1) && b.frames >= 2);
	assert_int_equal(b.last_len, 5);
	zmq_close(client);
	zmq_ctx_term(context);
	free(big);
}

static void identity_of_a_client_is_ignored(void **state)
{
	void *context = zmq_ctx_new();
	void *one = zmq_socket(context, ZMQ_DEALER),
	     *two = zmq_socket(context, ZMQ_DEALER);
	char endpoint[LINK_ENDPOINT_MAX];
	int zero = 0;

	(void)state;
	zmqnet_listen(&b);
	zmqnet_plain(&b, endpoint);
	zmq_setsockopt(one, ZMQ_LINGER, &zero, sizeof(zero));
	zmq_setsockopt(two, ZMQ_LINGER, &zero, sizeof(zero));
	zmq_setsockopt(one, ZMQ_IDENTITY, "same", 4);
	zmq_setsockopt(two, ZMQ_IDENTITY, "other", 5);
	assert_int_equal(zmq_connect(one, endpoint), 0);
	assert_int_equal(zmq_connect(two, endpoint), 0);
	assert_int_equal(zmq_send(one, "1", 1, 0), 1);
	assert_int_equal(zmq_send(two, "2", 1, 0), 1);
	zmqnet_wait(b.frames == 2);
	assert_string_equal(b.user, "");
	zmq_close(one);
	zmq_close(two);
	zmq_ctx_term(context);
}

static void garbage_on_the_port_harms_no_peer(void **state)
{
	static const char *const lines[] = {"GET / HTTP/1.1\r\n\r\n",
					    "\xff\0\0\0\0\0\0\0\x01\x7f",
					    "\xff\0\0\0\0\0\0\0\x01\x7f\x03\0CURVE"};
	struct link_line *line;

	(void)state;
	zmqnet_listen(&a);
	zmqnet_listen(&b);
	for (unsigned int i = 0; i < 60; i++) {
		struct sockaddr_in addr = {.sin_family = AF_INET};
		int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

		addr.sin_port = htons((uint16_t)atoi(strrchr(b.link->endpoint, ':') + 1));
		addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		assert_int_equal(connect(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
		assert_true(send(fd, lines[i % 3], i % 3 ? 10 : 18, MSG_NOSIGNAL) > 0);
		close(fd);
	}
	line = zmqnet_dial(&a, b.link->endpoint);
	zmqnet_wait(a.lines_up == 1);
	assert_int_equal(zmqnet_send(&a, line, "still here"), 0);
	zmqnet_wait(b.frames == 1);
	a.link->ops->hangup(line);
}

static void frames_sent_to_a_line_are_dropped(void **state)
{
	void *context = zmq_ctx_new();
	void *server = zmq_socket(context, ZMQ_ROUTER);
	char endpoint[LINK_ENDPOINT_MAX], id[16];
	size_t size = sizeof(endpoint);
	struct link_line *line;
	int zero = 0, n;

	(void)state;
	zmqnet_listen(&a);
	zmq_setsockopt(server, ZMQ_LINGER, &zero, sizeof(zero));
	assert_int_equal(zmq_bind(server, "tcp://127.0.0.1:*"), 0);
	assert_int_equal(zmq_getsockopt(server, ZMQ_LAST_ENDPOINT, endpoint, &size), 0);
	line = zmqnet_dial(&a, endpoint);
	zmqnet_wait(a.lines_up == 1);
	assert_int_equal(zmqnet_send(&a, line, "hello"), 0);
	n = zmq_recv(server, id, sizeof(id), 0);
	assert_int_equal(n, 5);
	assert_int_equal(zmq_recv(server, endpoint, sizeof(endpoint), 0), 5);
	for (unsigned int i = 0; i < 5000; i++) {
		zmq_send(server, id, (size_t)n, ZMQ_SNDMORE | ZMQ_DONTWAIT);
		zmq_send(server, "boo", 3, ZMQ_DONTWAIT);
		if (i % 100 == 0)
			loop_turn(zmqnet_loop, 0);
	}
	zmqnet_wait(link_zmq_stats(a.link)->bad_frames > 10);
	assert_int_equal(a.frames, 0);
	assert_int_equal(zmqnet_send(&a, line, "hello"), 0);
	a.link->ops->hangup(line);
	zmq_close(server);
	zmq_ctx_term(context);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, zmqnet_setup, zmqnet_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(frames_arrive_in_order),
		TEST(frames_flood_is_handed_up_in_turns),
		TEST(send_without_peer_is_refused),
		TEST(names_hold_no_line_up),
		TEST(line_by_name_connects_and_reconnects),
		TEST(line_by_name_not_dialable_is_dialled_again),
		TEST(line_connects_when_listener_starts),
		TEST(hangup_flushes_sent_messages),
		TEST(queue_of_a_frozen_daemon_is_bounded),
		TEST(endpoint_is_filled_in),
		TEST(port_of_a_dying_predecessor_is_waited_for),
		TEST(listen_over_ipv6_works),
		TEST(listen_without_keys_refused),
		TEST(listen_on_a_bad_or_taken_address_refused),
		TEST(dial_of_bad_endpoint_refused),
		TEST(messages_of_other_parts_are_dropped),
		TEST(message_over_the_cap_closes_its_connection),
		TEST(identity_of_a_client_is_ignored),
		TEST(garbage_on_the_port_harms_no_peer),
		TEST(frames_sent_to_a_line_are_dropped),
	};

	log_set_level(LOG_LEVEL_ERROR);
	return cmocka_run_group_tests_name("link_zmq", tests, zmqnet_group_setup,
					   zmqnet_group_teardown);
}
