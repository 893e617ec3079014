/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is sent and received goes through a seal where the connection has one: it is found
 * by the descriptor, so that a test says the same things either way. Waiting turns b's
 * loop.
 */
#include "tests/lib/tcp_raw.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

struct raw raw;
struct up_place raw_place;
struct plan *raw_plan;
uint8_t raw_bytes[TCP_DATA_MAX];

/* ---- plain sockets ---- */

int raw_connect(void)
{
	struct tcp_address address;
	int fd;

	assert_int_equal(tcp_address_get(up_b.t->address, up_b.t->address_len, &address),
			 0);
	fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_true(fd >= 0);
	assert_int_equal(
		connect(fd, &address.list[0].any, tcp_sockaddr_len(&address.list[0])), 0);
	return fd;
}

static struct raw_seal *seal_of(int fd)
{
	for (unsigned int i = 0; i <= RAW_STREAMS; i++)
		if (raw.seals[i].seal && raw.seals[i].fd == fd)
			return &raw.seals[i];
	return NULL;
}

static ssize_t raw_send_some(int fd, const void *from, size_t len)
{
	struct raw_seal *seal = seal_of(fd);
	struct iovec iov = {(void *)(uintptr_t)from, len};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

	return seal ? tcp_seal_sendmsg(seal->seal, fd, &msg)
		    : sendmsg(fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static ssize_t raw_recv_some(int fd, void *to, size_t len)
{
	struct raw_seal *seal = seal_of(fd);
	struct iovec iov = {to, len};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

	return seal ? tcp_seal_recvmsg(seal->open, fd, &msg)
		    : recvmsg(fd, &msg, MSG_DONTWAIT);
}

void raw_send(int fd, const void *from, size_t len)
{
	struct raw_seal *seal = seal_of(fd);
	const uint8_t *p = from;

	while (len > 0 || (seal && tcp_seal_busy(seal->seal))) {
		ssize_t n = raw_send_some(fd, p, len);

		if (n < 0 && errno != EAGAIN)
			return; /* he hung up: what the test looks at shows it */
		if (n > 0) {
			p += n;
			len -= (size_t)n;
		} else {
			up_turn();
		}
	}
}

/* False: he hung up instead. */
bool raw_recv(int fd, void *to, size_t len)
{
	uint64_t end = loop_clock_ns(up_loop) + UP_WAIT_NS;
	uint8_t *p = to;

	while (len > 0) {
		ssize_t n = raw_recv_some(fd, p, len);

		if (n == 0 || (n < 0 && errno != EAGAIN))
			return false;
		if (n > 0) {
			p += n;
			len -= (size_t)n;
		} else {
			assert_true(loop_clock_ns(up_loop) < end);
			loop_turn(up_loop, LOOP_NS_PER_MS);
		}
	}
	return true;
}

bool raw_ended(int fd)
{
	uint8_t byte;
	ssize_t n = recv(fd, &byte, 1, MSG_DONTWAIT);

	return n == 0 || (n < 0 && errno != EAGAIN);
}

/* ---- the protocol, by hand ---- */

/* The records of the n-th connection, from here on. */
static void raw_seal_begin(unsigned int n, int fd, const struct tcp_traffic *traffic)
{
	struct raw_seal *seal = &raw.seals[n];

	if (raw.crypto == TCP_CRYPTO_NONE)
		return;
	seal->fd = fd;
	assert_int_equal(tcp_seal_new(&traffic->dialer, "b", &seal->seal), 0);
	assert_int_equal(tcp_seal_new(&traffic->dialed, "b", &seal->open), 0);
	tcp_seal_lend(seal->seal, seal->records[0], TCP_RECORD_BYTES);
	tcp_seal_lend(seal->open, seal->records[1], TCP_RECORD_BYTES);
}

void raw_seals_end(void)
{
	for (unsigned int i = 0; i <= RAW_STREAMS; i++) {
		tcp_seal_free(raw.seals[i].seal);
		tcp_seal_free(raw.seals[i].open);
		raw.seals[i].seal = raw.seals[i].open = NULL;
	}
}

/* A control line's by who has these tokens. */
void raw_hello(int fd, const uint8_t *dialer, const uint8_t *dialed)
{
	struct tcp_hello hello = {
		.role = TCP_CONTROL, .streams = RAW_STREAMS, .crypto = raw.wish};

	loop_random(up_loop, hello.nonce, sizeof(hello.nonce));
	assert_int_equal(tcp_keys_begin(&raw.keys, dialer, dialed), 0);
	assert_int_equal(tcp_keys_control(&raw.keys, &hello, raw.said), 0);
	raw_send(fd, raw.said, sizeof(raw.said));
}

void raw_stream_hello(int fd, unsigned int number)
{
	struct tcp_hello hello = {.role = TCP_STREAM, .number = (uint16_t)number};

	loop_random(up_loop, hello.nonce, sizeof(hello.nonce));
	assert_int_equal(tcp_keys_stream(&raw.keys, &hello, raw.said), 0);
	raw_send(fd, raw.said, sizeof(raw.said));
}

void raw_token_of(uint8_t value, uint8_t token[XP_TOKEN_BYTES])
{
	memset(token, value, XP_TOKEN_BYTES);
}

/* b waits for who knows tokens 2, the dialer's, and 1. */
void raw_b_waits(void)
{
	struct xp_peer_args args = {.address = up_b.t->address,
				    .address_len = up_b.t->address_len,
				    .account = raw.account,
				    .owner = &up_b};

	raw_token_of(2, args.token_in);
	raw_token_of(1, args.token_out);
	up_b.ready = up_b.lost = up_b.closed = false;
	up_b.requests = up_b.dones = up_b.failures = 0;
	assert_int_equal(up_b.t->ops->peer_open(up_b.t, &args, &up_b.peer), 0);
}

bool raw_control(int fd)
{
	uint8_t dialer[XP_TOKEN_BYTES], dialed[XP_TOKEN_BYTES], buf[TCP_HELLO_BYTES];
	struct tcp_hello hello;

	raw_token_of(2, dialer);
	raw_token_of(1, dialed);
	raw_hello(fd, dialer, dialed);
	if (!raw_recv(fd, buf, sizeof(buf)))
		return false;
	assert_int_equal(tcp_hello_get(buf, &hello), 0);
	assert_int_equal(hello.role, TCP_WELCOME);
	assert_int_equal(hello.streams, RAW_STREAMS);
	assert_int_equal(tcp_keys_take_welcome(&raw.keys, buf), 0);
	raw.crypto = hello.crypto;
	raw_seal_begin(0, fd, &raw.keys.line);
	return true;
}

bool raw_stream(int fd, unsigned int number)
{
	uint8_t buf[TCP_HELLO_BYTES];
	struct tcp_traffic traffic;
	struct tcp_hello hello;

	raw_stream_hello(fd, number);
	if (!raw_recv(fd, buf, sizeof(buf)))
		return false;
	assert_int_equal(tcp_hello_get(buf, &hello), 0);
	assert_int_equal(hello.role, TCP_STREAM_OK);
	assert_int_equal(tcp_keys_take_stream_ok(&raw.keys, raw.said, buf, &traffic), 0);
	raw_seal_begin(1 + number, fd, &traffic);
	return true;
}

void raw_join_now(void)
{
	raw.control = raw_connect();
	assert_true(raw_control(raw.control));
	for (unsigned int i = 0; i < RAW_STREAMS; i++) {
		raw.stream[i] = raw_connect();
		assert_true(raw_stream(raw.stream[i], i));
	}
	await(up_b.ready);
	raw.next_id = 1;
}

void raw_join(void)
{
	raw_b_waits();
	raw_join_now();
}

void raw_close(void)
{
	raw_seals_end();
	close(raw.control);
	for (unsigned int i = 0; i < RAW_STREAMS; i++)
		close(raw.stream[i]);
}

void raw_head(int fd, struct tcp_head head)
{
	uint8_t buf[TCP_HEAD_BYTES];

	tcp_head_put(&head, buf);
	raw_send(fd, buf, sizeof(buf));
}

void raw_trailer(int fd, bool good)
{
	uint8_t buf[TCP_TRAILER_BYTES];

	tcp_trailer_put(good, buf);
	raw_send(fd, buf, sizeof(buf));
}

struct tcp_head raw_next_head(int fd, bool data, void *payload)
{
	struct tcp_head head = {0};
	uint8_t buf[TCP_HEAD_BYTES];

	do { /* BEATs come when they like */
		assert_true(raw_recv(fd, buf, sizeof(buf)));
		assert_int_equal(tcp_head_get(buf, data, &head), 0);
	} while (head.type == TCP_BEAT);
	if (head.length > 0 && payload)
		assert_true(raw_recv(fd, payload, head.length));
	return head;
}

/* Ask b to take `rows` rows of 100 000 bytes; the transfer's number. */
uint64_t raw_ask(enum xp_kind kind, uint64_t rows)
{
	struct plan_run run = {.len = RAW_FRAME,
			       .count = rows,
			       .src_stride = RAW_FRAME,
			       .dst_stride = RAW_FRAME + 500};

	plan_free(raw_plan);
	if (kind == XP_READ)
		run.src_stride += 500;
	raw_plan = up_plan(&run, 1);
	up_b.sides = (struct xp_sides){.plan = raw_plan,
				       .src = &raw_place.buffer,
				       .src_count = 1,
				       .dst = &raw_place.buffer,
				       .dst_count = 1};
	raw_head(raw.control, (struct tcp_head){.type = TCP_REQUEST,
						.id = raw.next_id,
						.at = raw_plan->bytes,
						.code = kind});
	return raw.next_id++;
}

void raw_expect_go(uint64_t id)
{
	struct tcp_head head = raw_next_head(raw.control, false, raw_bytes);

	assert_int_equal(head.type, TCP_GO);
	assert_int_equal(head.id, id);
}

struct tcp_head raw_expect_done(uint64_t id)
{
	struct tcp_head head = raw_next_head(raw.control, false, raw_bytes);

	assert_int_equal(head.type, TCP_DONE);
	assert_int_equal(head.id, id);
	return head;
}

void raw_frame(unsigned int stream, uint64_t id, uint64_t at, uint8_t fill, bool good)
{
	memset(raw_bytes, fill, RAW_FRAME);
	raw_head(raw.stream[stream],
		 (struct tcp_head){
			 .type = TCP_DATA, .id = id, .at = at, .length = RAW_FRAME});
	raw_send(raw.stream[stream], raw_bytes, RAW_FRAME);
	raw_trailer(raw.stream[stream], good);
}

/* A whole WRITE over that stream: the connection still works. */
void raw_stream_works(unsigned int stream)
{
	enum up_answer answer = up_b.answer;
	uint64_t id;

	up_b.answer = ANSWER_LAND;
	id = raw_ask(XP_WRITE, 2);
	raw_expect_go(id);
	raw_frame(stream, id, RAW_FRAME, 0xd2, true);
	raw_frame(stream, id, 0, 0xd1, true);
	assert_int_equal(raw_expect_done(id).code, ERR_OK);
	assert_int_equal(raw_place.memory->base[RAW_FRAME - 1], 0xd1);
	assert_int_equal(raw_place.memory->base[RAW_FRAME + 500], 0xd2);
	up_b.answer = answer;
	assert_false(up_b.lost);
}

void raw_assert_thrown_out(const char *words)
{
	await(up_b.lost);
	assert_int_equal(up_b.lost_why.code, ERR_PROTO);
	if (!strstr(up_b.lost_why.text, words))
		fail_msg("\"%s\" is not in \"%s\"", words, up_b.lost_why.text);
	raw_close();
	up_close(&up_b);
	raw_join();
}

int raw_begin(void **state)
{
	up_begin(state);
	up_place_init(&raw_place, &up_b, 8 * MIB, false);
	memset(raw_place.memory->base, 0xa5, 8 * MIB);
	return 0;
}

int raw_begin_joined(void **state)
{
	raw_begin(state);
	raw_join();
	return 0;
}

int raw_end(void **state)
{
	plan_free(raw_plan);
	raw_plan = NULL;
	up_place_fini(&raw_place, &up_b);
	return up_end(state);
}

int raw_end_joined(void **state)
{
	raw_close();
	return raw_end(state);
}
