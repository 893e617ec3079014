/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_zmq and link_curve over real loopback sockets, on the real loop. A raw
 * ZeroMQ socket of the test plays the hostile client. Waits are on conditions
 * with a deadline; what must not happen is waited for behind something that
 * must (a later frame, a refusal).
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <zmq.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config.h"
#include "daemon/link_curve.h"
#include "daemon/loop.h"
#include "daemon/peer.h"

#define MS LOOP_NS_PER_MS
#define DEADLINE_NS (20 * LOOP_NS_PER_S)

struct node {
	struct config config;
	struct link *link;
	struct peers *peers;
	unsigned int frames, lines_up, lines_down, ups, downs;
	size_t last_len;
	uint8_t last[64];
	uint64_t sum; /* of the first 8 bytes of each frame, in order: a hash */
	char user[LINK_USER_MAX];
	struct err why;
};

static struct loop *loop;
static struct node a, b;
static char dir[64];
static char keys[3][2][41]; /* a, b, mallory: public, secret */

/* ---- waiting ---- */

#define wait_until(condition)                                         \
	do {                                                          \
		uint64_t end_ns_ = loop_clock_ns(loop) + DEADLINE_NS; \
		while (!(condition)) {                                \
			assert_true(loop_clock_ns(loop) < end_ns_);   \
			loop_turn(loop, 10 * MS);                     \
		}                                                     \
	} while (0)

static void turn_for(uint64_t ns)
{
	uint64_t end_ns = loop_clock_ns(loop) + ns;

	while (loop_clock_ns(loop) < end_ns)
		loop_turn(loop, 5 * MS);
}

/* ---- nodes ---- */

static void on_frame(void *owner, const struct link_frame *frame)
{
	struct node *node = owner;
	uint64_t word = 0;

	node->frames++;
	node->last_len = frame->len;
	memcpy(node->last, frame->data, frame->len < 64 ? frame->len : 64);
	memcpy(&word, frame->data, frame->len < 8 ? frame->len : 8);
	node->sum = node->sum * 1000003 + word;
	memcpy(node->user, frame->user, sizeof(node->user));
}

static void on_line(void *owner, void *line_owner, bool connected)
{
	struct node *node = owner;

	(void)line_owner;
	if (connected)
		node->lines_up++;
	else
		node->lines_down++;
}

static void node_defaults(struct node *node)
{
	memset(node, 0, sizeof(*node));
	strcpy(node->config.listen, "tcp://127.0.0.1:0");
	node->config.peers_max = 16;
	node->config.peer_queue_frames = 1000;
	node->config.peer_message_bytes = 1 << 20;
	node->config.ping_interval_ns = 50 * MS;
	node->config.dead_after_ns = 400 * MS;
}

static void node_listen(struct node *node)
{
	assert_int_equal(link_zmq_new(loop, &node->config, &node->link), 0);
	node->link->owner = node;
	node->link->on_frame = on_frame;
	node->link->on_line = on_line;
}

static void node_stop(struct node *node)
{
	peers_free(node->peers);
	node->peers = NULL;
	if (node->link)
		node->link->ops->free(node->link);
	node->link = NULL;
}

static struct link_line *dial(struct node *from, const char *endpoint)
{
	struct link_line *line = NULL;

	assert_int_equal(from->link->ops->dial(from->link, endpoint, from, &line), 0);
	return line;
}

static int send_text(struct node *from, struct link_line *line, const char *text)
{
	return from->link->ops->send(line, text, strlen(text));
}

static void plain_endpoint(const struct node *node, char text[LINK_ENDPOINT_MAX])
{
	snprintf(text, LINK_ENDPOINT_MAX, "%.*s", (int)strcspn(node->link->endpoint, "#"),
		 node->link->endpoint);
}

/* ---- files and keys ---- */

static void path_of(char path[CONFIG_PATH_BYTES], const char *name)
{
	snprintf(path, CONFIG_PATH_BYTES, "%s/%s", dir, name);
}

static void write_file(const char *name, mode_t mode, const char *text)
{
	char path[CONFIG_PATH_BYTES];
	int fd;

	path_of(path, name);
	unlink(path);
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	assert_int_equal(write(fd, text, strlen(text)), strlen(text));
	assert_int_equal(fchmod(fd, mode), 0);
	close(fd);
}

/* Keys of a and b, each other's in the allow file. */
static void use_curve(struct node *node, unsigned int key)
{
	static const char *const secrets[] = {"a.secret", "b.secret", "m.secret"};

	write_file(secrets[key], 0600, keys[key][1]);
	path_of(node->config.curve_secret_file, secrets[key]);
	path_of(node->config.curve_allow_file, "allow");
}

static void write_allow(bool with_b)
{
	char text[400];

	snprintf(text, sizeof(text), "# daemons\n\nalice %s\n%s%s%s", keys[0][0],
		 with_b ? "  bob\t" : "", with_b ? keys[1][0] : "",
		 with_b ? "  nodeb 10.9.9.9:7400 \r\n" : "");
	write_file("allow", 0644, text);
}

static int setup(void **state)
{
	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	node_defaults(&a);
	node_defaults(&b);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	node_stop(&a);
	node_stop(&b);
	loop_free(loop);
	return 0;
}

/* ---- plain links ---- */

static void frames_arrive_in_order(void **state)
{
	struct link_line *line;
	uint64_t sum = 0;
	uint64_t sent = 0;

	(void)state;
	node_listen(&a);
	node_listen(&b);
	assert_int_equal(strncmp(b.link->endpoint, "tcp://127.0.0.1:", 16), 0);
	line = dial(&a, b.link->endpoint);
	wait_until(a.lines_up == 1);
	while (sent < 3000) {
		if (a.link->ops->send(line, &sent, sizeof(sent)) < 0) {
			assert_int_equal(err_last()->code, ERR_LIMIT);
			loop_turn(loop, MS);
			continue;
		}
		sum = sum * 1000003 + sent++;
	}
	wait_until(b.frames == 3000);
	assert_int_equal(b.sum, sum);
	assert_string_equal(b.user, "");
	assert_int_equal(link_zmq_stats(b.link)->frames_in, 3000);
	a.link->ops->hangup(line);
}

static void frames_flood_is_handed_up_in_turns(void **state)
{
	struct link_line *line;
	unsigned int most = 0, before;
	uint64_t word = 1;

	(void)state;
	a.config.peer_queue_frames = b.config.peer_queue_frames = 5000;
	node_listen(&a);
	node_listen(&b);
	line = dial(&a, b.link->endpoint);
	wait_until(a.lines_up == 1);
	for (unsigned int i = 0; i < 4000; i++)
		assert_int_equal(a.link->ops->send(line, &word, sizeof(word)), 0);
	usleep(100000); /* let the I/O threads carry them: b's loop stands still */
	while (b.frames < 4000) {
		before = b.frames;
		loop_turn(loop, 10 * MS);
		if (b.frames - before > most)
			most = b.frames - before;
	}
	assert_in_range(most, 2, 512); /* two budgets: prepare hook and fd */
	wait_until(!b.link->backlog);
	a.link->ops->hangup(line);
}

static void send_to_nobody_refused(void **state)
{
	struct link_line *line;

	(void)state;
	node_listen(&a);
	line = dial(&a, "tcp://127.0.0.1:1");
	turn_for(100 * MS);
	assert_true(send_text(&a, line, "x") < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	assert_int_equal(a.lines_up, 0);
	a.link->ops->hangup(line);
}

static void line_connects_when_the_other_comes(void **state)
{
	struct link_line *line;
	char endpoint[LINK_ENDPOINT_MAX];

	(void)state;
	node_listen(&a);
	node_listen(&b);
	plain_endpoint(&b, endpoint);
	line = dial(&a, endpoint);
	wait_until(a.lines_up == 1);
	assert_int_equal(send_text(&a, line, "one"), 0);
	wait_until(b.frames == 1);
	node_stop(&b);
	wait_until(a.lines_down == 1);
	assert_true(send_text(&a, line, "lost") < 0);
	node_defaults(&b);
	strcpy(b.config.listen, endpoint);
	node_listen(&b);
	assert_string_equal(b.link->endpoint, endpoint);
	wait_until(a.lines_up == 2);
	assert_int_equal(send_text(&a, line, "two"), 0);
	wait_until(b.frames == 1);
	assert_memory_equal(b.last, "two", 3);
	a.link->ops->hangup(line);
}

static void hangup_still_sends_what_was_sent(void **state)
{
	(void)state;
	node_listen(&a);
	node_listen(&b);
	for (unsigned int i = 1; i <= 20; i++) {
		struct link_line *line = dial(&a, b.link->endpoint);

		wait_until(a.lines_up == i);
		assert_int_equal(send_text(&a, line, "bye"), 0);
		a.link->ops->hangup(line);
		wait_until(b.frames == i);
	}
}

static void queue_of_a_frozen_daemon_is_bounded(void **state)
{
	struct link_line *line;
	uint8_t frame[4096] = {0};
	unsigned int sent = 0;

	(void)state;
	a.config.peer_queue_frames = b.config.peer_queue_frames = 64;
	node_listen(&a);
	node_listen(&b);
	line = dial(&a, b.link->endpoint);
	wait_until(a.lines_up == 1);
	/* nobody turns the loop: b does not receive. Sockets' buffers fill too. */
	for (unsigned int quiet = 0; quiet < 200;) {
		if (a.link->ops->send(line, frame, sizeof(frame)) == 0) {
			sent++;
			quiet = 0;
			assert_true(sent < 20000);
			continue;
		}
		assert_int_equal(err_last()->code, ERR_LIMIT);
		usleep(1000);
		quiet++;
	}
	assert_true(sent >= 64);
	/* it wakes up: the line says so, and what was taken arrives */
	wait_until(b.frames == sent);
	wait_until(a.link->ops->send(line, frame, 1) == 0);
	wait_until(b.frames == sent + 1);
	assert_int_equal(b.last_len, 1);
	a.link->ops->hangup(line);
}

static void endpoint_is_filled_in(void **state)
{
	char want[LINK_ENDPOINT_MAX];

	(void)state;
	node_listen(&a);
	snprintf(b.config.advertise, sizeof(b.config.advertise),
		 "tcp://Node-B.example:0");
	node_listen(&b);
	assert_int_equal(strncmp(b.link->endpoint, "tcp://node-b.example:", 21), 0);
	assert_true(atoi(b.link->endpoint + 21) > 0);
	node_stop(&b);
	node_defaults(&b);
	strcpy(b.config.advertise, "tcp://node-b:7777");
	node_listen(&b);
	assert_string_equal(b.link->endpoint, "tcp://node-b:7777");
	/* one spelling */
	assert_int_equal(b.link->ops->canonical(b.link, "tcp://NODE-b:7777", want), 0);
	assert_string_equal(want, "tcp://node-b:7777");
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
	node_listen(&a);
	node_listen(&b);
	line = dial(&a, b.link->endpoint);
	wait_until(a.lines_up == 1);
	assert_int_equal(send_text(&a, line, "six"), 0);
	wait_until(b.frames == 1);
	a.link->ops->hangup(line);
}

static void assert_no_link(struct node *node, const char *words)
{
	assert_true(link_zmq_new(loop, &node->config, &node->link) < 0);
	assert_int_equal(err_last()->code, ERR_CONFIG);
	assert_non_null(strstr(err_last()->text, words));
	node->link = NULL;
}

static void listen_beyond_loopback_without_keys_refused(void **state)
{
	(void)state;
	strcpy(a.config.advertise, "tcp://127.0.0.1:0");
	strcpy(a.config.listen, "tcp://0.0.0.0:0");
	assert_no_link(&a, "insecure = yes");
	strcpy(a.config.listen, "tcp://*:0");
	assert_no_link(&a, "insecure = yes");
	strcpy(a.config.listen, "tcp://[::]:0");
	assert_no_link(&a, "insecure = yes");
	a.config.insecure = true;
	strcpy(a.config.listen, "tcp://0.0.0.0:0");
	node_listen(&a);
	node_stop(&a);
	a.config.advertise[0] = '\0';
	assert_no_link(&a, "set advertise");
	/* and with keys it may */
	node_defaults(&a);
	use_curve(&a, 0);
	write_allow(true);
	strcpy(a.config.listen, "tcp://0.0.0.0:0");
	strcpy(a.config.advertise, "tcp://127.0.0.1:0");
	node_listen(&a);
}

static void listen_on_a_bad_or_taken_address_refused(void **state)
{
	(void)state;
	node_listen(&a);
	plain_endpoint(&a, b.config.listen);
	assert_no_link(&b, "Address already in use");
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
	node_listen(&a);
	for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
		assert_true(a.link->ops->dial(a.link, bad[i], &a, &line) < 0);
		assert_int_equal(err_last()->code, ERR_INVAL);
	}
}

/* ---- hostile clients ---- */

static void *client_of(void *context, const struct node *node)
{
	void *socket = zmq_socket(context, ZMQ_DEALER);
	char endpoint[LINK_ENDPOINT_MAX];
	int zero = 0;

	plain_endpoint(node, endpoint);
	zmq_setsockopt(socket, ZMQ_LINGER, &zero, sizeof(zero));
	assert_int_equal(zmq_connect(socket, endpoint), 0);
	return socket;
}

static void messages_of_other_parts_are_dropped(void **state)
{
	void *context = zmq_ctx_new(), *client;

	(void)state;
	node_listen(&b);
	client = client_of(context, &b);
	for (unsigned int parts = 2; parts < 700; parts += 97) {
		for (unsigned int i = 1; i < parts; i++)
			assert_int_equal(zmq_send(client, "x", 1, ZMQ_SNDMORE), 1);
		assert_int_equal(zmq_send(client, "x", 1, 0), 1);
	}
	assert_int_equal(zmq_send(client, "good", 4, 0), 4);
	wait_until(b.frames == 1);
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
	node_listen(&b);
	client = client_of(context, &b);
	assert_int_equal(zmq_send(client, big, 65536, 0), 65536);
	wait_until(b.frames == 1);
	assert_int_equal(b.last_len, 65536);
	assert_int_equal(zmq_send(client, big, 65537, 0), 65537);
	/* the client's library connects again; the next one is heard */
	wait_until(zmq_send(client, "small", 5, ZMQ_DONTWAIT) == 5 &&
		   (turn_for(20 * MS), 1) && b.frames >= 2);
	assert_int_equal(b.last_len, 5);
	zmq_close(client);
	zmq_ctx_term(context);
	free(big);
}

static void identity_of_a_client_means_nothing(void **state)
{
	void *context = zmq_ctx_new();
	void *one = zmq_socket(context, ZMQ_DEALER),
	     *two = zmq_socket(context, ZMQ_DEALER);
	char endpoint[LINK_ENDPOINT_MAX];
	int zero = 0;

	(void)state;
	node_listen(&b);
	plain_endpoint(&b, endpoint);
	zmq_setsockopt(one, ZMQ_LINGER, &zero, sizeof(zero));
	zmq_setsockopt(two, ZMQ_LINGER, &zero, sizeof(zero));
	zmq_setsockopt(one, ZMQ_IDENTITY, "same", 4);
	zmq_setsockopt(two, ZMQ_IDENTITY, "other", 5);
	assert_int_equal(zmq_connect(one, endpoint), 0);
	assert_int_equal(zmq_connect(two, endpoint), 0);
	assert_int_equal(zmq_send(one, "1", 1, 0), 1);
	assert_int_equal(zmq_send(two, "2", 1, 0), 1);
	wait_until(b.frames == 2);
	assert_string_equal(b.user, "");
	zmq_close(one);
	zmq_close(two);
	zmq_ctx_term(context);
}

static void garbage_on_the_port_hurts_nobody(void **state)
{
	static const char *const lines[] = {"GET / HTTP/1.1\r\n\r\n",
					    "\xff\0\0\0\0\0\0\0\x01\x7f",
					    "\xff\0\0\0\0\0\0\0\x01\x7f\x03\0CURVE"};
	struct link_line *line;

	(void)state;
	node_listen(&a);
	node_listen(&b);
	for (unsigned int i = 0; i < 60; i++) {
		struct sockaddr_in addr = {.sin_family = AF_INET};
		int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

		addr.sin_port = htons((uint16_t)atoi(strrchr(b.link->endpoint, ':') + 1));
		addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		assert_int_equal(connect(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
		assert_true(send(fd, lines[i % 3], i % 3 ? 10 : 18, MSG_NOSIGNAL) > 0);
		close(fd);
	}
	line = dial(&a, b.link->endpoint);
	wait_until(a.lines_up == 1);
	assert_int_equal(send_text(&a, line, "still here"), 0);
	wait_until(b.frames == 1);
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
	node_listen(&a);
	zmq_setsockopt(server, ZMQ_LINGER, &zero, sizeof(zero));
	assert_int_equal(zmq_bind(server, "tcp://127.0.0.1:*"), 0);
	assert_int_equal(zmq_getsockopt(server, ZMQ_LAST_ENDPOINT, endpoint, &size), 0);
	line = dial(&a, endpoint);
	wait_until(a.lines_up == 1);
	assert_int_equal(send_text(&a, line, "hello"), 0);
	n = zmq_recv(server, id, sizeof(id), 0);
	assert_int_equal(n, 5);
	assert_int_equal(zmq_recv(server, endpoint, sizeof(endpoint), 0), 5);
	for (unsigned int i = 0; i < 5000; i++) {
		zmq_send(server, id, (size_t)n, ZMQ_SNDMORE | ZMQ_DONTWAIT);
		zmq_send(server, "boo", 3, ZMQ_DONTWAIT);
		if (i % 100 == 0)
			loop_turn(loop, 0);
	}
	wait_until(link_zmq_stats(a.link)->bad_frames > 10);
	assert_int_equal(a.frames, 0);
	assert_int_equal(send_text(&a, line, "hello"), 0);
	a.link->ops->hangup(line);
	zmq_close(server);
	zmq_ctx_term(context);
}

/* ---- CURVE ---- */

static void curve_allowed_daemons_speak(void **state)
{
	struct link_line *line, *back;
	char endpoint[LINK_ENDPOINT_MAX];

	(void)state;
	write_allow(true);
	use_curve(&a, 0);
	use_curve(&b, 1);
	node_listen(&a);
	node_listen(&b);
	assert_string_equal(strchr(b.link->endpoint, '#') + 1, keys[1][0]);
	line = dial(&a, b.link->endpoint);
	back = dial(&b, a.link->endpoint);
	wait_until(a.lines_up == 1 && b.lines_up == 1);
	assert_int_equal(send_text(&a, line, "from a"), 0);
	assert_int_equal(send_text(&b, back, "from b"), 0);
	wait_until(a.frames == 1 && b.frames == 1);
	assert_string_equal(b.user, "alice");
	assert_string_equal(a.user, "bob");
	/* without its key, an address that no line names cannot be dialled */
	plain_endpoint(&b, endpoint);
	a.link->ops->hangup(line);
	assert_true(a.link->ops->dial(a.link, endpoint, &a, &line) < 0);
	assert_int_equal(err_last()->code, ERR_AUTH);
	b.link->ops->hangup(back);
}

static void curve_key_is_found_by_host(void **state)
{
	char text[300], name[LINK_ENDPOINT_MAX];
	struct link_line *line;
	char plain[LINK_ENDPOINT_MAX];

	(void)state;
	write_allow(true);
	use_curve(&b, 1);
	node_listen(&b);
	plain_endpoint(&b, plain);
	snprintf(text, sizeof(text), "alice %s\nbob %s x.example 127.0.0.1:%s\n",
		 keys[0][0], keys[1][0], strrchr(plain, ':') + 1);
	write_file("allow", 0600, text);
	use_curve(&a, 0);
	node_listen(&a);
	line = dial(&a, plain);
	wait_until(a.lines_up == 1);
	assert_int_equal(send_text(&a, line, "x"), 0);
	wait_until(b.frames == 1);
	a.link->ops->hangup(line);
	/* one spelling for all the names of it */
	assert_int_equal(a.link->ops->canonical(a.link, plain, name), 0);
	assert_string_equal(name, b.link->endpoint);
	assert_int_equal(a.link->ops->canonical(a.link, "tcp://X.example:99", name), 0);
	snprintf(text, sizeof(text), "tcp://x.example:99#%s", keys[1][0]);
	assert_string_equal(name, text);
	plain_endpoint(&a, plain);
	assert_int_equal(a.link->ops->canonical(a.link, plain, name), 0);
	assert_string_equal(name, a.link->endpoint);
	/* a key that is not allowed, wherever it comes from */
	snprintf(text, sizeof(text), "tcp://10.0.0.1:1#%s", keys[2][0]);
	assert_true(a.link->ops->canonical(a.link, text, name) < 0);
	assert_int_equal(err_last()->code, ERR_AUTH);
}

/* A client that speaks CURVE with mallory's key, or none at all. */
static void *curve_client(void *context, const struct node *node, int key)
{
	void *socket = zmq_socket(context, ZMQ_DEALER);
	char endpoint[LINK_ENDPOINT_MAX];
	int zero = 0, one = 1;

	plain_endpoint(node, endpoint);
	zmq_setsockopt(socket, ZMQ_LINGER, &zero, sizeof(zero));
	zmq_setsockopt(socket, ZMQ_IMMEDIATE, &one, sizeof(one));
	if (key >= 0) {
		zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, keys[1][0], 40);
		zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, keys[key][0], 40);
		zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, keys[key][1], 40);
	}
	return socket;
}

static bool monitor_saw(void *monitor, unsigned int wanted)
{
	for (;;) {
		zmq_msg_t msg;
		uint16_t event;

		zmq_msg_init(&msg);
		if (zmq_msg_recv(&msg, monitor, ZMQ_DONTWAIT) < 0)
			return false;
		memcpy(&event, zmq_msg_data(&msg), sizeof(event));
		zmq_msg_close(&msg);
		zmq_msg_init(&msg);
		zmq_msg_recv(&msg, monitor, 0); /* the address */
		zmq_msg_close(&msg);
		if (event & wanted)
			return true;
	}
}

static void curve_strangers_are_kept_out(void **state)
{
	static const unsigned int refusals[] = {
		[0] = ZMQ_EVENT_HANDSHAKE_FAILED_AUTH |
		      ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL,
		[1] = ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
		      ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_DISCONNECTED,
	};
	void *context = zmq_ctx_new();

	(void)state;
	write_allow(true);
	use_curve(&b, 1);
	node_listen(&b);
	for (unsigned int i = 0; i < 2; i++) {
		void *client = curve_client(context, &b, i == 0 ? 2 : -1);
		void *monitor = zmq_socket(context, ZMQ_PAIR);
		char endpoint[LINK_ENDPOINT_MAX], name[32];

		snprintf(name, sizeof(name), "inproc://monitor%u", i);
		assert_int_equal(zmq_socket_monitor(client, name, ZMQ_EVENT_ALL), 0);
		assert_int_equal(zmq_connect(monitor, name), 0);
		plain_endpoint(&b, endpoint);
		assert_int_equal(zmq_connect(client, endpoint), 0);
		wait_until(monitor_saw(monitor, refusals[i]));
		assert_int_equal(zmq_send(client, "x", 1, ZMQ_DONTWAIT), -1);
		assert_int_equal(errno, EAGAIN);
		zmq_close(client);
		zmq_close(monitor);
	}
	assert_int_equal(b.frames, 0);
	zmq_ctx_term(context);
}

static void curve_stranger_cannot_pose_as_the_server(void **state)
{
	struct link_line *line;
	char endpoint[LINK_ENDPOINT_MAX], lie[LINK_ENDPOINT_MAX + 41];
	char text[300];

	(void)state;
	/* mallory listens where bob should be; she allows everybody */
	snprintf(text, sizeof(text), "alice %s\nbob %s\n", keys[0][0], keys[1][0]);
	write_file("allow", 0600, text);
	use_curve(&b, 2);
	node_listen(&b);
	use_curve(&a, 0);
	node_listen(&a);
	plain_endpoint(&b, endpoint);
	snprintf(lie, sizeof(lie), "%.80s#%s", endpoint, keys[1][0]);
	line = dial(&a, lie);
	turn_for(300 * MS);
	assert_int_equal(a.lines_up, 0);
	assert_true(send_text(&a, line, "secret") < 0);
	a.link->ops->hangup(line);
	assert_int_equal(b.frames, 0);
}

static void curve_reload_admits_and_strikes(void **state)
{
	struct link_line *line;
	char path[CONFIG_PATH_BYTES];

	(void)state;
	write_allow(true);
	use_curve(&a, 0);
	use_curve(&b, 1);
	node_listen(&a);
	node_listen(&b);
	path_of(path, "allow");
	line = dial(&b, a.link->endpoint);
	wait_until(b.lines_up == 1);
	assert_int_equal(send_text(&b, line, "one"), 0);
	wait_until(a.frames == 1);
	/* a broken file changes nothing */
	write_file("allow", 0644, "alice what?\n");
	assert_true(link_zmq_reload(a.link, path) < 0);
	assert_int_equal(err_last()->code, ERR_CONFIG);
	assert_non_null(strstr(err_last()->text, "allow:1: must be: NAME"));
	assert_int_equal(send_text(&b, line, "two"), 0);
	wait_until(a.frames == 2);
	/* bob is struck: he still has his connection, but nobody listens */
	write_allow(false);
	assert_int_equal(link_zmq_reload(a.link, path), 0);
	assert_int_equal(send_text(&b, line, "three"), 0);
	wait_until(link_zmq_stats(a.link)->revoked == 1);
	assert_int_equal(a.frames, 2);
	write_allow(true);
	assert_int_equal(link_zmq_reload(a.link, path), 0);
	assert_int_equal(send_text(&b, line, "four"), 0);
	wait_until(a.frames == 3);
	b.link->ops->hangup(line);
}

static void curve_files_are_checked(void **state)
{
	static const struct {
		mode_t mode;
		const char *text, *words;
	} secrets[] = {
		{0600, "", "must be a secret key"},
		{0600, "# only a comment\n", "must be a secret key"},
		{0600, "tooshort\n", "s:1: must be a secret key"},
		{0600, "\n\nBAD KEY\n", "s:3: must be a secret key"},
		{0640, NULL, "mode 0640 lets others"},
		{0604, NULL, "mode 0604 lets others"},
	};
	static const char *const lists[] = {
		"alice\n",
	};
	char path[CONFIG_PATH_BYTES], text[400];
	struct curve_allow *allow;
	struct curve_keys got;

	(void)state;
	path_of(path, "s");
	for (size_t i = 0; i < ARRAY_LEN(secrets); i++) {
		write_file("s", secrets[i].mode,
			   secrets[i].text ? secrets[i].text : keys[0][1]);
		assert_true(curve_keys_load(path, &got) < 0);
		assert_int_equal(err_last()->code, ERR_CONFIG);
		assert_non_null(strstr(err_last()->text, secrets[i].words));
	}
	snprintf(text, sizeof(text), "%s\n%s\n", keys[0][1], keys[1][1]);
	write_file("s", 0600, text);
	assert_true(curve_keys_load(path, &got) < 0);
	assert_non_null(strstr(err_last()->text, "s:2: a second key"));
	assert_true(curve_keys_load("/nonexistent/s", &got) < 0);
	assert_true(curve_keys_load("/dev/zero", &got) < 0);
	snprintf(text, sizeof(text), "# mine\n  %s \r\n", keys[0][1]);
	write_file("s", 0400, text);
	assert_int_equal(curve_keys_load(path, &got), 0);
	assert_string_equal(got.public_key, keys[0][0]);
	assert_string_equal(got.secret_key, keys[0][1]);

	path_of(path, "l");
	write_file("l", 0600, lists[0]);
	assert_true(curve_allow_load(path, &allow) < 0);
	snprintf(text, sizeof(text), "a %s\nb %s\n", keys[0][0], keys[0][0]);
	write_file("l", 0600, text);
	assert_true(curve_allow_load(path, &allow) < 0);
	assert_non_null(strstr(err_last()->text, "l:2: key "));
	snprintf(text, sizeof(text), "a %s h1\nb %s h2 H1\n", keys[0][0], keys[1][0]);
	write_file("l", 0600, text);
	assert_true(curve_allow_load(path, &allow) < 0);
	assert_non_null(strstr(err_last()->text, "l:2: host H1 is there already"));
	snprintf(text, sizeof(text), "a %s\n", keys[0][0]);
	write_file("l", 0666, text);
	assert_true(curve_allow_load(path, &allow) < 0);
	assert_non_null(strstr(err_last()->text, "anybody may write"));
	write_file("l", 0644, "# nobody\n");
	assert_int_equal(curve_allow_load(path, &allow), 0);
	assert_null(curve_allow_name(allow, keys[0][0]));
	curve_allow_free(allow);
}

static void keygen_makes_pairs(void **state)
{
	char one[2][41], two[2][41], public[41];

	(void)state;
	assert_int_equal(link_keygen(one[0], one[1]), 0);
	assert_int_equal(link_keygen(two[0], two[1]), 0);
	assert_string_not_equal(one[1], two[1]);
	assert_int_equal(zmq_curve_public(public, one[1]), 0);
	assert_string_equal(public, one[0]);
	assert_true(curve_key_check(one[0], strlen(one[0])));
}

/* ---- peers over it ---- */

static void on_up(void *owner, struct peer *peer)
{
	struct node *node = owner;

	(void)peer;
	node->ups++;
}

static void on_down(void *owner, struct peer *peer)
{
	struct node *node = owner;

	node->downs++;
	node->why = peer->why;
}

static int on_message(void *owner, struct peer *peer, const struct wire_header *h,
		      struct cursor *body)
{
	struct node *node = owner;

	(void)peer;
	(void)h;
	(void)body;
	node->frames++;
	return 0;
}

static void node_peers(struct node *node, const char *name)
{
	struct peers_callbacks callbacks = {.owner = node,
					    .on_up = on_up,
					    .on_down = on_down,
					    .on_message = on_message};
	struct peers_args args = {.loop = loop,
				  .config = &node->config,
				  .callbacks = &callbacks,
				  .name = name};

	assert_int_equal(link_zmq_new(loop, &node->config, &node->link), 0);
	args.link = node->link;
	assert_int_equal(peers_new(&args, &node->peers), 0);
}

static void peers_life_over_sockets(void **state)
{
	struct peer *peer, *back;

	(void)state;
	for (unsigned int curve = 0; curve < 2; curve++) {
		node_defaults(&a);
		node_defaults(&b);
		if (curve) {
			write_allow(true);
			use_curve(&a, 0);
			use_curve(&b, 1);
		}
		node_peers(&a, "a");
		node_peers(&b, "b");
		/* both at once */
		assert_int_equal(peers_dial(a.peers, b.link->endpoint, &peer), 0);
		assert_int_equal(peers_dial(b.peers, a.link->endpoint, &back), 0);
		wait_until(a.ups && b.ups);
		assert_int_equal(peers_count(a.peers), 1);
		assert_int_equal(peers_count(b.peers), 1);
		assert_memory_equal(peer->token_in, back->token_out, 16);
		assert_int_equal(peer_send_reliable(peer, WIRE_T_LEASE, "x", 1), 0);
		wait_until(b.frames == 1);
		wait_until(peer->rtt_ns > 0);
		/* restart of b on the same port */
		plain_endpoint(&b, b.config.listen);
		struct config config = b.config;

		node_stop(&b);
		memset(&b, 0, sizeof(b));
		b.config = config;
		node_peers(&b, "b");
		wait_until(a.ups == 2 && b.ups == 1);
		assert_int_equal(a.downs, 1);
		assert_int_equal(peer->epoch, 2);
		/* goodbye is heard, not guessed */
		peers_close(b.peers, ERR_DRAIN, "evening");
		wait_until(a.downs == 2);
		assert_int_equal(a.why.code, ERR_DRAIN);
		node_stop(&a);
		node_stop(&b);
	}
}

static void peer_instance_is_bound_to_its_key(void **state)
{
	void *context = zmq_ctx_new(), *client;
	struct wire_header h = {.version = 1, .type = WIRE_T_HELLO, .epoch = 99};
	struct wire_hello m = {.version_min = 1, .version_max = 1, .features = 1};
	uint8_t frame[2048], body[1900];
	char endpoint[LINK_ENDPOINT_MAX], text[300];
	struct peer *peer;
	struct cursor c;

	(void)state;
	snprintf(text, sizeof(text), "alice %s\nbob %s\nmallory %s\n", keys[0][0],
		 keys[1][0], keys[2][0]);
	write_file("allow", 0600, text);
	use_curve(&a, 0);
	use_curve(&b, 1);
	node_peers(&a, "a");
	node_peers(&b, "b");
	assert_int_equal(peers_dial(a.peers, b.link->endpoint, &peer), 0);
	wait_until(a.ups && b.ups);
	/* mallory, allowed too, speaks in alice's name */
	client = curve_client(context, &b, 2);
	plain_endpoint(&b, endpoint);
	assert_int_equal(zmq_connect(client, endpoint), 0);
	memcpy(h.sender, peers_instance(a.peers), 16);
	strcpy(m.endpoint, a.link->endpoint);
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_hello_put(&c, &m), 0);
	h.body_len = (uint32_t)c.pos;
	wire_frame_put(frame, &h, body);
	wait_until(zmq_send(client, frame, WIRE_HEADER_BYTES + c.pos, ZMQ_DONTWAIT) > 0);
	wait_until(peers_stats(b.peers)->foreign_user == 1);
	assert_int_equal(a.downs + b.downs, 0);
	zmq_close(client);
	zmq_ctx_term(context);
}

static int group_setup(void **state)
{
	(void)state;
	snprintf(dir, sizeof(dir), "/tmp/kvd-test-link-XXXXXX");
	assert_non_null(mkdtemp(dir));
	for (unsigned int i = 0; i < 3; i++)
		assert_int_equal(link_keygen(keys[i][0], keys[i][1]), 0);
	return 0;
}

static int group_teardown(void **state)
{
	static const char *const names[] = {"a.secret", "b.secret", "m.secret",
					    "allow",	"s",	    "l"};
	char path[CONFIG_PATH_BYTES];

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(names); i++) {
		path_of(path, names[i]);
		unlink(path);
	}
	return rmdir(dir);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(frames_arrive_in_order),
		TEST(frames_flood_is_handed_up_in_turns),
		TEST(send_to_nobody_refused),
		TEST(line_connects_when_the_other_comes),
		TEST(hangup_still_sends_what_was_sent),
		TEST(queue_of_a_frozen_daemon_is_bounded),
		TEST(endpoint_is_filled_in),
		TEST(listen_over_ipv6_works),
		TEST(listen_beyond_loopback_without_keys_refused),
		TEST(listen_on_a_bad_or_taken_address_refused),
		TEST(dial_of_bad_endpoint_refused),
		TEST(messages_of_other_parts_are_dropped),
		TEST(message_over_the_cap_closes_its_connection),
		TEST(identity_of_a_client_means_nothing),
		TEST(garbage_on_the_port_hurts_nobody),
		TEST(frames_sent_to_a_line_are_dropped),
		TEST(curve_allowed_daemons_speak),
		TEST(curve_key_is_found_by_host),
		TEST(curve_strangers_are_kept_out),
		TEST(curve_stranger_cannot_pose_as_the_server),
		TEST(curve_reload_admits_and_strikes),
		TEST(curve_files_are_checked),
		cmocka_unit_test(keygen_makes_pairs),
		TEST(peers_life_over_sockets),
		TEST(peer_instance_is_bound_to_its_key),
	};

	log_set_level(LOG_LEVEL_ERROR);
	return cmocka_run_group_tests_name("link_zmq", tests, group_setup,
					   group_teardown);
}
