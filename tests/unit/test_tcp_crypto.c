/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tcp's sealed connections: what two ends agree on, and that nobody in between makes it
 * less; that they move all that open ones move; and what a wrong record costs.
 */
#include "tests/lib/tcp_raw.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

static struct tcp_transport *transport_of(struct up_node *n)
{
	return (struct tcp_transport *)n->t;
}

static const struct tcp_peer *peer_of(const struct up_node *n)
{
	return (const struct tcp_peer *)n->peer;
}

/* ---- what holds ---- */

static void assert_told(const struct up_node *n, enum tcp_crypto want)
{
	const char *told = peer_of(n)->net.base.crypto;

	if (want == TCP_CRYPTO_NONE)
		assert_null(told);
	else
		assert_string_equal(told, tcp_crypto_word(want));
}

static void stronger_wish_holds_at_both_ends(void **state)
{
	(void)state;
	for (unsigned int a = 0; a <= TCP_CRYPTO_END; a++) {
		for (unsigned int b = 0; b <= TCP_CRYPTO_END; b++) {
			/* auto, between loopback addresses */
			unsigned int wish_a = a < TCP_CRYPTO_END ? a : 0;
			unsigned int wish_b = b < TCP_CRYPTO_END ? b : 0;
			unsigned int want = wish_a > wish_b ? wish_a : wish_b;

			transport_of(&up_a)->crypto = (enum tcp_crypto)a;
			transport_of(&up_b)->crypto = (enum tcp_crypto)b;
			if (a + b == 0)
				up_join();
			else
				up_rejoin();
			assert_int_equal(peer_of(&up_a)->crypto, want);
			assert_int_equal(peer_of(&up_b)->crypto, want);
			assert_told(&up_a, (enum tcp_crypto)want);
			assert_told(&up_b, (enum tcp_crypto)want);
		}
	}
}

static void sealed_connections_move_every_shape(void **state)
{
	(void)state;
	transport_of(&up_b)->crypto = TCP_CRYPTO_AES128GCM;
	for (unsigned int turn = 0; turn < 2; turn++) {
		if (turn == 0)
			up_join();
		else
			up_rejoin();
		assert_int_equal(peer_of(&up_a)->crypto, TCP_CRYPTO_AES128GCM);
		up_every_shape(XP_WRITE, turn == 0, turn == 1);
		up_every_shape(XP_READ, turn == 1, turn == 0);
	}
}

/* ---- in between ---- */

/* The address that a dials: between the two, byte by byte. */
static struct {
	int door, here, there;
	uint8_t address[XP_ADDRESS_MAX];
	size_t address_len;
} between;

static void between_begin(void)
{
	struct tcp_address address;
	socklen_t len = sizeof(address.list[0]);

	assert_int_equal(tcp_address_get(up_b.t->address, up_b.t->address_len, &address),
			 0);
	between.there = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_int_equal(connect(between.there, &address.list[0].any,
				 tcp_sockaddr_len(&address.list[0])),
			 0);
	address.list[0].v4.sin_port = 0;
	address.count = 1;
	between.door = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_int_equal(bind(between.door, &address.list[0].any, len), 0);
	assert_int_equal(listen(between.door, 8), 0);
	assert_int_equal(getsockname(between.door, &address.list[0].any, &len), 0);
	assert_int_equal(tcp_address_put(&address, between.address, &between.address_len),
			 0);
}

static void between_end(void)
{
	close(between.door);
	close(between.here);
	close(between.there);
}

static void pass_hello(int from, int to, size_t at, uint8_t turned)
{
	uint8_t buf[TCP_HELLO_BYTES];
	size_t got = 0;

	while (got < sizeof(buf)) {
		ssize_t n = recv(from, buf + got, sizeof(buf) - got, MSG_DONTWAIT);

		assert_true(n > 0 || (n < 0 && errno == EAGAIN));
		got += n > 0 ? (size_t)n : 0;
		up_turn();
	}
	buf[at] ^= turned;
	assert_int_equal(send(to, buf, sizeof(buf), MSG_NOSIGNAL), sizeof(buf));
}

static void connect_by(struct up_node *n, const uint8_t *address, size_t len)
{
	struct xp_peer_args args = {
		.address = address, .address_len = len, .owner = n, .dial = n == &up_a};

	memset(args.token_in, n == &up_a, sizeof(args.token_in));
	memset(args.token_out, n != &up_a, sizeof(args.token_out));
	assert_int_equal(n->t->ops->peer_open(n->t, &args, &n->peer), 0);
}

#define CRYPTO_AT 8u /* of a hello: what its sender wants */

/* He who turns the wish of either end into none is found out, by the other end, and no
 * connection comes of it. */
static void handshake_changed_in_transit_is_refused(void **state)
{
	(void)state;
	for (unsigned int dialer = 0; dialer < 2; dialer++) {
		transport_of(&up_a)->acceptor.wait_ns = LOOP_NS_PER_S;
		transport_of(&up_b)->acceptor.wait_ns = LOOP_NS_PER_S;
		transport_of(&up_a)->crypto =
			dialer ? TCP_CRYPTO_AES128GCM : TCP_CRYPTO_NONE;
		transport_of(&up_b)->crypto =
			dialer ? TCP_CRYPTO_NONE : TCP_CRYPTO_AES128GCM;
		between_begin();
		connect_by(&up_b, up_b.t->address, up_b.t->address_len);
		connect_by(&up_a, between.address, between.address_len);
		between.here = accept(between.door, NULL, NULL);
		assert_true(between.here >= 0);
		pass_hello(between.here, between.there, CRYPTO_AT,
			   dialer ? TCP_CRYPTO_AES128GCM : 0);
		if (dialer) {
			uint8_t byte;

			/* b hangs up, and waits for its true peer */
			await(recv(between.there, &byte, 1, MSG_DONTWAIT) == 0 ||
			      errno == ECONNRESET);
			assert_false(up_b.lost || up_b.ready);
		} else {
			pass_hello(between.there, between.here, CRYPTO_AT,
				   TCP_CRYPTO_AES128GCM);
		}
		await(up_a.lost);
		assert_int_equal(up_a.lost_why.code, ERR_TIMEOUT);
		assert_false(up_a.ready || up_b.ready);
		between_end();
		up_close(&up_a);
		up_close(&up_b);
		up_a.lost = up_a.closed = up_b.lost = up_b.closed = false;
	}
}

/* The same by an end that has the tokens: it may not ask for less than the other one. */
static void answer_with_less_is_refused_by_name(void **state)
{
	struct tcp_hello hello = {
		.role = TCP_WELCOME, .streams = 1, .crypto = TCP_CRYPTO_NONE};
	uint8_t buf[TCP_HELLO_BYTES], tokens[2][XP_TOKEN_BYTES];
	struct tcp_peer *peer;
	struct tcp_keys keys;

	(void)state;
	memset(tokens[0], 0, XP_TOKEN_BYTES);
	memset(tokens[1], 1, XP_TOKEN_BYTES);
	transport_of(&up_a)->crypto = TCP_CRYPTO_AES128GCM;
	transport_of(&up_a)->acceptor.wait_ns = LOOP_NS_PER_S;
	between_begin();
	connect_by(&up_a, between.address, between.address_len);
	peer = (struct tcp_peer *)up_a.peer;
	between.here = accept(between.door, NULL, NULL);
	for (size_t got = 0; got < sizeof(buf);) {
		ssize_t n =
			recv(between.here, buf + got, sizeof(buf) - got, MSG_DONTWAIT);

		got += n > 0 ? (size_t)n : 0;
		up_turn();
	}
	assert_int_equal(tcp_keys_begin(&keys, tokens[0], tokens[1]), 0);
	assert_int_equal(tcp_keys_take_control(&keys, buf), 0);
	assert_int_equal(tcp_keys_welcome(&keys, &hello, buf), 0);
	assert_int_equal(send(between.here, buf, sizeof(buf), MSG_NOSIGNAL), sizeof(buf));
	await(!peer->dial); /* refused: it will try again */
	assert_int_equal(sm_state(&peer->net.sm), NET_PEER_OPENING);
	await(up_a.lost);
	assert_false(up_a.ready);
	assert_non_null(strstr(up_a.lost_why.text, "answers with tcp_crypto none; "
						   "this daemon requires aes128gcm"));
	between_end();
}

/* Packets that are dropped: here of a listener whose queue is full. */
static int door_waiting[4];

static void door_fill(void)
{
	struct sockaddr_storage at;
	socklen_t len = sizeof(at);

	between_begin();
	assert_int_equal(listen(between.door, 0), 0);
	assert_int_equal(getsockname(between.door, (struct sockaddr *)&at, &len), 0);
	for (size_t i = 0; i < ARRAY_LEN(door_waiting); i++) {
		door_waiting[i] =
			socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
		(void)connect(door_waiting[i], (struct sockaddr *)&at, len);
	}
}

static void door_empty(void)
{
	between.here = accept(between.door, NULL, NULL);
	for (size_t i = 0; i < ARRAY_LEN(door_waiting); i++)
		close(door_waiting[i]);
	between_end();
}

static void connection_without_reply_names_address_and_option(void **state)
{
	(void)state;
	transport_of(&up_a)->acceptor.wait_ns = LOOP_NS_PER_S / 2;
	door_fill();
	connect_by(&up_a, between.address, between.address_len);
	await(up_a.lost);
	assert_memory_equal(up_a.lost_why.text, "no data connection to 127.0.0.1:", 32);
	assert_non_null(strstr(up_a.lost_why.text, "(tcp_listen): timed out"));
	door_empty();
}

/* Each of several addresses has its part of the time. */
static void address_without_reply_leaves_time_for_next(void **state)
{
	struct tcp_address address, other;
	uint8_t both[XP_ADDRESS_MAX];
	size_t len;

	(void)state;
	transport_of(&up_a)->acceptor.wait_ns = 2 * LOOP_NS_PER_S;
	door_fill();
	assert_int_equal(tcp_address_get(between.address, between.address_len, &address),
			 0);
	assert_int_equal(tcp_address_get(up_b.t->address, up_b.t->address_len, &other),
			 0);
	address.list[address.count++] = other.list[0];
	assert_int_equal(tcp_address_put(&address, both, &len), 0);
	connect_by(&up_b, up_b.t->address, up_b.t->address_len);
	connect_by(&up_a, both, len);
	await(up_a.ready && up_b.ready);
	door_empty();
}

/* ---- wrong records ---- */

/* What the other side reads when its peer is lost for that. */
static void assert_not_authentic(void)
{
	await(up_b.lost);
	assert_int_equal(up_b.lost_why.code, ERR_AUTH);
	if (!strstr(up_b.lost_why.text, "tcp: authentication failed"))
		fail_msg("\"%s\"", up_b.lost_why.text);
	while (raw_next_head(raw.control, false, raw_bytes).type != TCP_BYE)
		;
	if (!strstr((const char *)raw_bytes, "authentication failed"))
		fail_msg("BYE: %.200s", (const char *)raw_bytes);
	raw_close();
	up_close(&up_b);
	raw_join();
}

/* A record of the n-th connection that is not sent. */
static size_t raw_record(unsigned int n, const void *from, size_t len, uint8_t *record)
{
	struct tcp_seal *seal = raw.seals[n].seal;
	struct iovec iov = {(void *)(uintptr_t)from, len};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
	size_t bytes_n;

	assert_int_equal(tcp_seal_put(seal, &msg), len);
	bytes_n = seal->end;
	memcpy(record, seal->buf, bytes_n);
	seal->pos = seal->end = 0;
	return bytes_n;
}

static void send_bare(int fd, const void *from, size_t len)
{
	assert_int_equal(send(fd, from, len, MSG_NOSIGNAL), len);
}

/* On the control line and on streams: dropped, repeated, swapped, of another stream,
 * changed, not sealed at all. */
static void record_invalid_loses_the_peer_at_once(void **state)
{
	uint8_t head[TCP_HEAD_BYTES], first[2 * TCP_HEAD_BYTES],
		second[2 * TCP_HEAD_BYTES];
	const struct tcp_head heads[] = {{.type = TCP_REQUEST, .id = 1},
					 {.type = TCP_DATA, .id = 1, .length = 10}};
	size_t n;

	(void)state;
	for (unsigned int at = 0; at < 2; at++) {
		for (unsigned int what = 0; what < 6; what++) {
			int fd = at ? raw.stream[0] : raw.control;

			up_b.answer = ANSWER_LAND;
			if (at)
				raw_expect_go(raw_ask(XP_WRITE, 2));
			tcp_head_put(&heads[at], head);
			n = raw_record(at, head, sizeof(head), first);
			(void)raw_record(what == 3 ? 2 : at, head, sizeof(head), second);
			switch (what) {
			case 0: /* the first is dropped */
			case 3: /* another stream's */
				send_bare(fd, second, n);
				break;
			case 1:
				send_bare(fd, first, n);
				send_bare(fd, first, n);
				break;
			case 2:
				send_bare(fd, second, n);
				send_bare(fd, first, n);
				break;
			case 4:
				first[n / 2] ^= 1;
				send_bare(fd, first, n);
				break;
			default:
				send_bare(fd, head, sizeof(head));
			}
			assert_not_authentic();
		}
	}
	raw_stream_works(0);
	raw_stream_works(1);
}

/* All of a frame but its trailer is there, and then a record is wrong: no byte of the
 * frame has come to the engine's memory. */
static void rows_are_untouched_until_their_frame_is_whole(void **state)
{
	uint8_t record[TCP_RECORD_BYTES];
	struct tcp_head head = {.type = TCP_DATA, .length = RAW_FRAME};
	bool kernel;
	size_t n;

	(void)state;
	memset(raw_place.memory->base, 0x33, 8 * MIB);
	head.id = raw_ask(XP_WRITE, 2);
	raw_expect_go(head.id);
	/* a kernel opens records into the rows: each is authentic, the frame may not be
	 */
	kernel = !peer_of(&up_b)->streams[0].rx.seal;
	memset(raw_bytes, 0x44, RAW_FRAME);
	raw_head(raw.stream[0], head);
	raw_send(raw.stream[0], raw_bytes, RAW_FRAME - 100);
	up_spin_ms(50);
	n = raw_record(1, raw_bytes, 100, record);
	record[n - 1] ^= 1;
	send_bare(raw.stream[0], record, n);
	assert_not_authentic();
	for (uint64_t i = 0; i < 8 * MIB; i++)
		if (raw_place.memory->base[i] != 0x33 &&
		    !(kernel && raw_place.memory->base[i] == 0x44))
			fail_msg("byte %ju was written", (uintmax_t)i);
	raw_stream_works(0);
}

static int begin_sealed(void **state)
{
	raw.wish = TCP_CRYPTO_AES128GCM;
	return raw_begin_joined(state);
}

int main(void)
{
#define PAIR(test) cmocka_unit_test_setup_teardown(test, up_begin, up_end)
#define RAW(test, begin) cmocka_unit_test_setup_teardown(test, begin, raw_end_joined)
	const struct CMUnitTest tests[] = {
		PAIR(stronger_wish_holds_at_both_ends),
		PAIR(sealed_connections_move_every_shape),
		PAIR(handshake_changed_in_transit_is_refused),
		PAIR(answer_with_less_is_refused_by_name),
		PAIR(connection_without_reply_names_address_and_option),
		PAIR(address_without_reply_leaves_time_for_next),
		RAW(record_invalid_loses_the_peer_at_once, begin_sealed),
		RAW(rows_are_untouched_until_their_frame_is_whole, begin_sealed),
	};

	up_transport = &tcp_transport;
	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests_name("tcp crypto", tests, NULL, NULL);
}
