/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tcp: what its daemon does with a peer that it cannot trust. The peer is this
 * program with plain sockets and the wire's own codec, so it may send what it
 * likes, stop in the middle of a frame, or say nothing; b is the real backend.
 * What an honest pair does is the conformance suite's matter.
 */
#include "tests/lib/tcp_raw.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/transport/tcp/tcp_impl.h"
#include "tests/lib/limits.h"

#define STREAMS RAW_STREAMS
#define FRAME RAW_FRAME

/* ---- who may come in ---- */

static void token_wrong_is_refused(void **state)
{
	uint8_t dialer[XP_TOKEN_BYTES], dialed[XP_TOKEN_BYTES];
	int fd = raw_connect();

	(void)state;
	((struct tcp_transport *)up_b.t)->acceptor.wait_ns = 200 * LOOP_NS_PER_MS;
	raw_b_waits();
	raw_token_of(2, dialer);
	raw_token_of(1, dialed);
	dialer[XP_TOKEN_BYTES - 1] ^= 1;
	raw_hello(fd, dialer, dialed);
	await(raw_ended(fd));
	assert_false(up_b.ready || up_b.lost);
	close(fd);
	((struct tcp_transport *)up_b.t)->acceptor.wait_ns = UP_WAIT_NS;
	fd = raw_connect();
	assert_true(raw_control(fd)); /* the forger did not make it give up */
	raw_seals_end();
	close(fd);
}

/* Who saw a hello can repeat it, or what is left of it changed: its name alone opens
 * nothing. */
static void hello_of_another_with_any_bit_turned_is_refused(void **state)
{
	uint8_t dialer[XP_TOKEN_BYTES], dialed[XP_TOKEN_BYTES], buf[TCP_HELLO_BYTES];
	struct tcp_hello hello;

	(void)state;
	raw_b_waits();
	raw_token_of(2, dialer);
	raw_token_of(1, dialed);
	for (size_t bit = 0; bit < 8 * TCP_HELLO_BYTES; bit += 7) {
		int fd = raw_connect();

		hello = (struct tcp_hello){.role = TCP_CONTROL,
					   .streams = STREAMS,
					   .crypto = TCP_CRYPTO_AES128GCM};
		assert_int_equal(tcp_keys_begin(&raw.keys, dialer, dialed), 0);
		assert_int_equal(tcp_keys_control(&raw.keys, &hello, buf), 0);
		buf[bit / 8] ^= (uint8_t)(1u << bit % 8);
		raw_send(fd, buf, sizeof(buf));
		/* another's name waits for its time; all else is shown out */
		if (bit / 8 < 16 || bit / 8 >= 16 + TCP_ID_BYTES)
			await(raw_ended(fd));
		close(fd);
		assert_false(up_b.lost);
	}
	raw_join_now();
	raw_stream_works(0);
	raw_close();
}

static void token_serves_once(void **state)
{
	int again = raw_connect(), repeated = raw_connect();
	uint8_t dialer[XP_TOKEN_BYTES], dialed[XP_TOKEN_BYTES];
	struct tcp_keys keys = raw.keys;

	(void)state;
	((struct tcp_transport *)up_b.t)->acceptor.wait_ns = 200 * LOOP_NS_PER_MS;
	raw_token_of(2, dialer);
	raw_token_of(1, dialed);
	raw_hello(again, dialer, dialed);
	raw_send(repeated, keys.control, sizeof(keys.control));
	await(raw_ended(again) && raw_ended(repeated));
	close(again);
	close(repeated);
	raw_stream_works(0);
	raw_stream_works(1);
}

static void stream_serves_one_peer_once(void **state)
{
	int again = raw_connect(), forged = raw_connect(), beyond = raw_connect();

	(void)state;
	raw_send(again, raw.said, sizeof(raw.said)); /* the last stream's, repeated */
	raw_stream_hello(beyond, STREAMS);
	raw.said[40] ^= 8;
	raw_send(forged, raw.said, sizeof(raw.said));
	await(raw_ended(again) && raw_ended(forged) && raw_ended(beyond));
	close(again);
	close(forged);
	close(beyond);
	raw_stream_works(0);
	raw_stream_works(1);
}

static void dialer_without_streams_is_abandoned(void **state)
{
	(void)state;
	/* long enough for what comes before */
	((struct tcp_transport *)up_b.t)->acceptor.wait_ns = 1500 * LOOP_NS_PER_MS;
	raw_b_waits();
	raw.control = raw_connect();
	assert_true(raw_control(raw.control));
	raw.stream[0] = raw_connect();
	assert_true(raw_stream(raw.stream[0], 0));
	raw.stream[1] = -1;
	await(up_b.lost);
	assert_int_equal(up_b.lost_why.code, ERR_TIMEOUT);
	assert_non_null(strstr(up_b.lost_why.text, "1 of 2 streams"));
	raw_close();
}

static void connection_slow_to_prove_is_closed_without_effect(void **state)
{
	uint8_t buf[TCP_HELLO_BYTES];
	const struct tcp_hello hello = {.role = TCP_CONTROL, .streams = 1};
	int slow = raw_connect();
	unsigned int sent = 0;

	(void)state;
	((struct tcp_transport *)up_b.t)->acceptor.wait_ns = 300 * LOOP_NS_PER_MS;
	tcp_hello_put(&hello, buf);
	while (!raw_ended(slow)) {
		if (sent < sizeof(buf) - 1)
			raw_send(slow, &buf[sent++], 1);
		up_spin_ms(10);
	}
	close(slow);
	raw_stream_works(0);
}

/* Thousands who knock, with nothing, half a hello, garbage, an unknown peering or an
 * unknown session, faster than any of them is timed out. The door has a limit, and both
 * who is inside and who comes in between are served. */
static void flood_of_connections_has_no_effect(void **state)
{
	enum { KNOCKS = 3000, OPEN = 200 };
	struct tcp_transport *transport = (struct tcp_transport *)up_b.t;
	uint8_t buf[TCP_HELLO_BYTES];
	struct tcp_hello hello = {.streams = 1};
	int fds[OPEN];

	(void)state;
	need_fds(1024);
	memset(fds, -1, sizeof(fds));
	for (unsigned int i = 0; i < KNOCKS; i++) {
		int *fd = &fds[i % OPEN];

		if (*fd >= 0)
			close(*fd);
		*fd = raw_connect();
		memset(hello.id, (int)(3 + i % 200), sizeof(hello.id));
		hello.role = i % 5 == 3 ? TCP_STREAM : TCP_CONTROL;
		tcp_hello_put(&hello, buf);
		if (i % 5 == 2)
			memset(buf, (int)i, sizeof(buf));
		raw_send(*fd, buf, i % 5 == 0 ? 0 : i % 5 == 1 ? 39 : sizeof(buf));
		loop_turn(up_loop, 0);
		assert_in_range(transport->acceptor.counts[0], 0, TCP_PENDING_MAX);
		assert_in_range(transport->acceptor.counts[1], 0, TCP_PENDING_MAX);
		if (i % 500 != 250)
			continue;
		raw_stream_works(i % STREAMS);
		raw_close();
		await(up_b.lost);
		up_close(&up_b);
		raw_join();
	}
	for (unsigned int i = 0; i < OPEN; i++)
		close(fds[i]);
	await(transport->acceptor.counts[0] == 0); /* the others wait for their time */
	raw_stream_works(0);
	raw_stream_works(1);
}

/* ---- frames out of rule ---- */

static void frames_out_of_rule_lose_the_peer(void **state)
{
	const struct tcp_head bad[] = {
		{.type = TCP_GO, .id = 5},
		{.type = TCP_DONE, .id = 1},
		{.type = TCP_CANCEL, .id = 1},
		{.type = TCP_REQUEST, .id = 1, .code = 9},
		{.type = TCP_REQUEST, .id = 1, .code = XP_CHECK},
		{.type = TCP_REQUEST,
		 .id = 1,
		 .code = XP_READ,
		 .flags = TCP_FLAG_EAGER,
		 .at = 4,
		 .length = 4},
		{.type = TCP_DATA, .id = 1, .length = 9},
		{.type = TCP_GO, .id = 1, .length = 7},
	};
	static const char *const words[] = {
		"unknown transfer", "unknown transfer", "never requested", "kind 9",
		"kind 2",	    "carries",		"type 6",	   "7 bytes"};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
		raw_head(raw.control, bad[i]);
		raw_send(raw.control, "1234", 4);
		raw_assert_thrown_out(words[i]);
	}
	raw_head(raw.control, (struct tcp_head){.type = TCP_REQUEST, .id = 7});
	raw_head(raw.control, (struct tcp_head){.type = TCP_REQUEST, .id = 7});
	raw_assert_thrown_out("after 7");
	memset(raw_bytes, 0xee, 64);
	raw_send(raw.control, raw_bytes, 64);
	raw_assert_thrown_out("magic");
	raw_stream_works(1);
}

static void stream_frames_out_of_rule_lose_the_peer(void **state)
{
	const struct tcp_head bad[] = {
		{.type = TCP_DATA, .id = 99, .length = 9},
		{.type = TCP_SERVE, .id = 1, .length = 9},
		{.type = TCP_DATA, .id = 1, .at = 2 * FRAME - 8, .length = 9},
		{.type = TCP_DATA, .id = 1, .at = 2 * FRAME, .length = 1},
		{.type = TCP_DATA, .id = 1, .at = UINT64_MAX - 9, .length = 9},
		{.type = TCP_GO, .id = 1},
		{.type = TCP_DATA, .id = 1, .length = TCP_DATA_MAX + 1},
	};
	static const char *const words[] = {"never requested",
					    "never requested",
					    "past",
					    "past",
					    "past",
					    "type 2",
					    "bytes"};
	uint8_t trailer[TCP_TRAILER_BYTES] = "BADx";

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
		raw_expect_go(raw_ask(XP_WRITE, 2));
		raw_head(raw.stream[i % STREAMS], bad[i]);
		raw_assert_thrown_out(words[i]);
	}
	raw_expect_go(raw_ask(XP_WRITE, 2));
	raw_frame(0, 1, 0, 1, true);
	raw_head(raw.stream[1],
		 (struct tcp_head){
			 .type = TCP_DATA, .id = 1, .at = FRAME - 1, .length = 10});
	raw_assert_thrown_out("twice");
	raw_expect_go(raw_ask(XP_WRITE, 2));
	raw_head(raw.stream[0],
		 (struct tcp_head){.type = TCP_DATA, .id = 1, .length = 10});
	raw_send(raw.stream[0], raw_bytes, 10);
	raw_send(raw.stream[0], trailer, sizeof(trailer));
	raw_assert_thrown_out("mark");
	raw_stream_works(0);
}

static void answer_before_the_bytes_loses_the_peer(void **state)
{
	struct up_op op;

	(void)state;
	plan_free(raw_plan);
	raw_plan = up_plan(&(struct plan_run){.len = MIB, .count = 1}, 1);
	up_op_init(&op, XP_WRITE, raw_plan, &raw_place, NULL);
	assert_int_equal(up_b.t->ops->post(up_b.peer, &op.op), 0);
	assert_int_equal(raw_next_head(raw.control, false, raw_bytes).type, TCP_REQUEST);
	raw_head(raw.control, (struct tcp_head){.type = TCP_DONE, .id = 1});
	await(op.done);
	assert_int_equal(op.op.err.code, ERR_PROTO);
	raw_assert_thrown_out("last byte");
}

/* ---- in the middle of a frame ---- */

/* Looks at memory that an I/O thread may be writing: through the kernel, so that
 * a race that is meant is none. */
static uint8_t peek(uint64_t at)
{
	uint8_t byte = 0;
	const struct iovec near = {&byte, 1}, far = {raw_place.memory->base + at, 1};

	assert_int_equal(process_vm_readv(getpid(), &near, 1, &far, 1, 0), 1);
	return byte;
}

/* The engine that is written is still at once, though half of a frame is under
 * way and its sender waits; then the rest of it lands nowhere. */
static void revoke_in_mid_frame_is_quiesced_and_keeps_stream(void **state)
{
	struct err why;
	uint64_t id;

	(void)state;
	up_b.answer = ANSWER_HOLD;
	id = raw_ask(XP_WRITE, 3);
	await(up_b.held);
	up_b.t->ops->land(up_b.held, &up_b.sides, NULL);
	raw_expect_go(id);
	raw_frame(0, id, 0, 0x11, true);
	memset(raw_bytes, 0x22, FRAME);
	raw_head(raw.stream[0],
		 (struct tcp_head){
			 .type = TCP_DATA, .id = id, .at = FRAME, .length = FRAME});
	raw_send(raw.stream[0], raw_bytes, FRAME / 2);
	await(peek(FRAME + 500 + FRAME / 2 - 1) == 0x22);
	err_set(&why, ERR_SESSION, "the engine is gone");
	up_b.t->ops->revoke(up_b.held, &why);
	await(up_b.dones == 1);
	assert_int_equal(up_b.done_err.code, ERR_SESSION);
	memset(raw_place.memory->base, 0x33, 8 * MIB);
	assert_int_equal(raw_expect_done(id).code, ERR_SESSION);
	memset(raw_bytes, 0x22, FRAME);
	raw_send(raw.stream[0], raw_bytes, FRAME - FRAME / 2);
	raw_trailer(raw.stream[0], true);
	raw_frame(0, id, 2 * FRAME, 0x44, true);
	raw_frame(1, id, 2 * FRAME, 0x44, true);
	up_spin_ms(100);
	for (uint64_t i = 0; i < 8 * MIB; i++)
		if (raw_place.memory->base[i] != 0x33)
			fail_msg("byte %ju was written after the end", (uintmax_t)i);
	raw_stream_works(0);
	raw_stream_works(1);
}

/* A sender that gave up fills its frame with anything and says so. */
static void void_frame_does_not_count(void **state)
{
	struct tcp_head cancel = {.type = TCP_CANCEL, .code = ERR_ABORTED};
	uint64_t id;

	(void)state;
	id = raw_ask(XP_WRITE, 2);
	raw_expect_go(id);
	raw_frame(0, id, 0, 0x11, true);
	raw_frame(0, id, FRAME, 0, false);
	up_spin_ms(50);
	assert_int_equal(up_b.dones, 0);
	cancel.id = id;
	raw_head(raw.control, cancel);
	assert_int_equal(raw_expect_done(id).code, ERR_ABORTED);
	assert_int_equal(up_b.failures, 1);
	raw_stream_works(0);
}

/* b's thread has filled that stream, until it is read from. */
static bool raw_is_stuck(unsigned int stream)
{
	const struct tcp_peer *peer = (const struct tcp_peer *)up_b.peer;
	struct pollfd there = {.fd = peer->streams[stream].fd, .events = POLLOUT};
	struct pollfd here = {.fd = raw.stream[stream], .events = POLLIN};

	return poll(&there, 1, 0) == 0 && poll(&here, 1, 0) == 1;
}

/* The other way: b serves a READ, its reader takes half of a frame and waits; b's
 * engine is still at once, and the frame ends void. */
static void source_revoked_in_mid_frame_ends_it_void(void **state)
{
	bool good;
	uint8_t buf[TCP_TRAILER_BYTES];
	struct tcp_head head, done;
	struct err why;
	bool found = false;
	uint64_t id;

	(void)state;
	up_b.answer = ANSWER_HOLD;
	memset(raw_place.memory->base, 0x5a, 8 * MIB);
	id = raw_ask(XP_READ, 80);
	await(up_b.held);
	up_b.t->ops->land(up_b.held, &up_b.sides, NULL);
	head = raw_next_head(raw.stream[0], true, NULL);
	assert_int_equal(head.type, TCP_SERVE);
	assert_true(raw_recv(raw.stream[0], raw_bytes, 1000));
	await(raw_is_stuck(0) && raw_is_stuck(1));
	up_spin_ms(100); /* the sockets fill up */
	err_set(&why, ERR_LEASE, "the lease has ended");
	up_b.t->ops->revoke(up_b.held, &why);
	await(up_b.dones == 1);
	memset(raw_place.memory->base, 0xff, 8 * MIB);
	done = raw_expect_done(id);
	assert_int_equal(done.code, ERR_LEASE);
	head.length -= 1000;
	for (unsigned int i = 0; i < STREAMS; i++) {
		struct tcp_head at = head;

		if (i > 0)
			at = raw_next_head(raw.stream[i], true, NULL);
		do {
			memset(raw_bytes, 0, sizeof(raw_bytes));
			assert_true(raw_recv(raw.stream[i], raw_bytes, at.length));
			assert_true(raw_recv(raw.stream[i], buf, sizeof(buf)));
			assert_int_equal(tcp_trailer_get(buf, &good), 0);
			for (uint32_t b = 0; b < at.length && good; b++)
				assert_int_equal(raw_bytes[b], 0x5a);
			found |= !good;
			if (good)
				at = raw_next_head(raw.stream[i], true, NULL);
		} while (good);
	}
	assert_true(found);
	raw_stream_works(0);
	raw_stream_works(1);
}

/* ---- turns ---- */

/* More requests than a turn has time for, in one go and then silence: all are taken,
 * in order, though the socket has nothing to tell any more. */
static void requests_of_one_read_are_all_answered(void **state)
{
	enum { REQUESTS = 340 };
	uint8_t heads[REQUESTS][TCP_HEAD_BYTES];

	(void)state;
	up_b.answer = ANSWER_LAND;
	for (uint64_t i = 0; i < REQUESTS; i++)
		tcp_head_put(
			&(struct tcp_head){.type = TCP_REQUEST, .id = raw.next_id + i},
			heads[i]);
	raw_send(raw.control, heads, sizeof(heads));
	for (uint64_t i = 0; i < REQUESTS; i++)
		assert_int_equal(raw_expect_done(raw.next_id++).code, ERR_OK);
	raw_stream_works(0);
}

/* A small transfer beside a large one that was first has every other frame. */
static void small_transfer_passes_a_large_one(void **state)
{
	static const uint64_t mib[] = {0, 64, 2};
	struct plan *plans[3];
	uint64_t left[3] = {0};
	bool good;
	uint8_t buf[TCP_TRAILER_BYTES];
	struct tcp_head head;
	struct up_op ops[3];

	(void)state;
	for (uint64_t id = 1; id <= 2; id++) {
		plans[id] = up_plan(&(struct plan_run){.len = MIB,
						       .count = mib[id],
						       .dst_stride = MIB},
				    1);
		up_op_init(&ops[id], XP_WRITE, plans[id], &raw_place, NULL);
		assert_int_equal(up_b.t->ops->post(up_b.peer, &ops[id].op), 0);
		head = raw_next_head(raw.control, false, raw_bytes);
		assert_int_equal(head.type, TCP_REQUEST);
		assert_int_equal(head.id, id);
		left[id] = mib[id] * MIB;
		raw_head(raw.control, (struct tcp_head){.type = TCP_GO, .id = id});
		up_spin_ms(20); /* the sockets fill up with the first one's frames */
	}
	for (unsigned int i = 0; left[2] > 0; i++) {
		head = raw_next_head(raw.stream[i % STREAMS], true, raw_bytes);
		assert_in_range(head.id, 1, 2);
		left[head.id] -= head.length;
		assert_true(raw_recv(raw.stream[i % STREAMS], buf, sizeof(buf)));
		assert_int_equal(tcp_trailer_get(buf, &good), 0);
		assert_true(good);
	}
	assert_true(left[1] > mib[1] * MIB / 3);
	raw_close();
	await(ops[1].done && ops[2].done);
	plan_free(plans[1]);
	plan_free(plans[2]);
}

/* ---- a peer that is silent ---- */

static void connections_end_without_reply(void **state)
{
	struct tcp_peer *peer = (struct tcp_peer *)up_b.peer;
	int fds[] = {peer->line.fd, peer->streams[0].fd, peer->streams[1].fd};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(fds); i++) {
		int value = 0;
		socklen_t len = sizeof(value);

		assert_int_equal(
			getsockopt(fds[i], IPPROTO_TCP, TCP_USER_TIMEOUT, &value, &len),
			0);
		assert_in_range(value, 1, 10000);
		assert_int_equal(
			getsockopt(fds[i], SOL_SOCKET, SO_KEEPALIVE, &value, &len), 0);
		assert_int_equal(value, 1);
	}
	/* one stream of two: the peer is lost, and told why */
	close(raw.stream[1]);
	raw.stream[1] = -1;
	await(up_b.lost);
	assert_int_equal(up_b.lost_why.code, ERR_PEER);
	assert_int_equal(raw_next_head(raw.control, false, raw_bytes).type, TCP_BYE);
}

/* The clock runs for a fence that is due before the farewell's end: the end is not
 * forgotten over it. */
static void close_with_an_earlier_deadline_ends(void **state)
{
	struct err why;
	struct up_op op;

	(void)state;
	((struct tcp_transport *)up_b.t)->net.fence_ns = 20 * LOOP_NS_PER_MS;
	plan_free(raw_plan);
	raw_plan = up_plan(&(struct plan_run){.len = MIB, .count = 1}, 1);
	up_op_init(&op, XP_WRITE, raw_plan, &raw_place, NULL);
	assert_int_equal(up_b.t->ops->post(up_b.peer, &op.op), 0);
	assert_int_equal(raw_next_head(raw.control, false, raw_bytes).type, TCP_REQUEST);
	err_set(&why, ERR_ABORTED, "enough");
	up_b.t->ops->cancel(&op.op, &why);
	up_close(&up_b); /* he neither answers nor hangs up */
	assert_int_equal(op.done, 1);
}

/* Requests without end, and nobody reads the answers: the memory for them has a
 * limit, and the loop never waits. */
static void peer_never_reading_reaches_a_limit(void **state)
{
	uint8_t buf[TCP_HEAD_BYTES];
	int small = 4096;

	(void)state;
	(void)setsockopt(raw.control, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
	up_b.answer = ANSWER_HOLD;
	for (uint64_t id = 1; !up_b.lost; id++) {
		tcp_head_put(&(struct tcp_head){.type = TCP_REQUEST, .id = id}, buf);
		if (send(raw.control, buf, sizeof(buf), MSG_NOSIGNAL | MSG_DONTWAIT) <
		    0) {
			if (errno != EAGAIN)
				break;
			id--;
		}
		loop_turn(up_loop, 0);
	}
	raw_assert_thrown_out("unfinished requests");
}

static void *flood_line(void *arg)
{
	static const uint8_t much[256 << 10];

	(void)arg;
	while (send(raw.control, much, sizeof(much), MSG_NOSIGNAL) > 0)
		;
	return NULL;
}

static void on_flooded_closed(void *arg)
{
	struct up_node *n = arg;

	n->closed = true;
	n->peer = NULL;
}

static uint64_t own_cpu_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
	return (uint64_t)now.tv_sec * LOOP_NS_PER_S + (uint64_t)now.tv_nsec;
}

/* After BYE what comes is read and forgotten, no faster than a turn allows. */
static void line_busy_without_pause_keeps_turns_short(void **state)
{
	uint64_t longest = 0, end = loop_clock_ns(up_loop) + 10 * LOOP_NS_PER_S;
	pthread_t flood;

	(void)state;
	assert_int_equal(fcntl(raw.control, F_SETFL, 0), 0);
	up_b.t->ops->peer_close(up_b.peer, on_flooded_closed, &up_b);
	assert_int_equal(pthread_create(&flood, NULL, flood_line, NULL), 0);
	while (!up_b.closed && loop_clock_ns(up_loop) < end) {
		uint64_t began = own_cpu_ns(), took;

		up_turn();
		took = own_cpu_ns() - began;
		longest = took > longest ? took : longest;
	}
	assert_true(up_b.closed);
	pthread_join(flood, NULL);
	if (longest > 20 * LOOP_NS_PER_MS)
		fail_msg("a turn took %ju us", (uintmax_t)longest / 1000);
}

/* What of it has come is its principal's, however many daemons that is. */
static void request_started_is_charged(void **state)
{
	struct accounts accounts = {.limit = 64 * MIB};
	struct account *account = account_get(&accounts, "peer", "fleet");
	struct tcp_head head = {.type = TCP_REQUEST, .id = 1, .length = 3 * MIB / 2};
	struct charge other = {0};
	uint8_t *payload = mem_zalloc(head.length);

	(void)state;
	raw.account = account;
	raw_join();
	charge_force(&other, account, ACCOUNT_PARTS, 3 * MIB);
	raw_head(raw.control, head);
	raw_send(raw.control, payload, MIB);
	assert_int_equal(raw_expect_done(1).code, ERR_LIMIT);
	assert_memory_equal(raw_bytes, "peer:fleet: parts: ", 19);
	raw_send(raw.control, payload, head.length - MIB);
	charge_drop(&other);

	head.id = 2;
	raw_head(raw.control, head);
	raw_send(raw.control, payload, MIB);
	await(account->bytes[ACCOUNT_PARTS] == head.length);
	raw_send(raw.control, payload, head.length - MIB);
	await(account->bytes[ACCOUNT_PARTS] == 0 && up_b.requests == 1);
	raw_expect_done(2);

	head.id = 3;
	raw_head(raw.control, head);
	raw_send(raw.control, payload, MIB);
	await(account->bytes[ACCOUNT_PARTS] == head.length);
	raw_close();
	up_close(&up_b);
	raw.account = NULL;
	account_unref(account);
	assert_true(accounts_idle(&accounts));
	mem_free(payload);
}

int main(void)
{
#define ALONE(test) cmocka_unit_test_setup_teardown(test, raw_begin, raw_end)
#define JOINED(test) \
	cmocka_unit_test_setup_teardown(test, raw_begin_joined, raw_end_joined)
	const struct CMUnitTest tests[] = {
		ALONE(token_wrong_is_refused),
		ALONE(hello_of_another_with_any_bit_turned_is_refused),
		ALONE(dialer_without_streams_is_abandoned),
		JOINED(token_serves_once),
		JOINED(stream_serves_one_peer_once),
		JOINED(connection_slow_to_prove_is_closed_without_effect),
		JOINED(flood_of_connections_has_no_effect),
		JOINED(frames_out_of_rule_lose_the_peer),
		JOINED(stream_frames_out_of_rule_lose_the_peer),
		JOINED(answer_before_the_bytes_loses_the_peer),
		JOINED(revoke_in_mid_frame_is_quiesced_and_keeps_stream),
		JOINED(void_frame_does_not_count),
		JOINED(source_revoked_in_mid_frame_ends_it_void),
		JOINED(requests_of_one_read_are_all_answered),
		JOINED(small_transfer_passes_a_large_one),
		JOINED(connections_end_without_reply),
		JOINED(close_with_an_earlier_deadline_ends),
		JOINED(peer_never_reading_reaches_a_limit),
		JOINED(line_busy_without_pause_keeps_turns_short),
		ALONE(request_started_is_charged),
	};

	const struct CMUnitTest sealed[] = {
		JOINED(token_serves_once),
		JOINED(stream_serves_one_peer_once),
		JOINED(frames_out_of_rule_lose_the_peer),
		JOINED(stream_frames_out_of_rule_lose_the_peer),
		JOINED(answer_before_the_bytes_loses_the_peer),
		JOINED(void_frame_does_not_count),
		JOINED(requests_of_one_read_are_all_answered),
		JOINED(small_transfer_passes_a_large_one),
	};
	int failed;

	up_transport = &tcp_transport;
	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	failed = cmocka_run_group_tests_name("tcp", tests, NULL, NULL);
	raw.wish = TCP_CRYPTO_AES128GCM;
	failed += cmocka_run_group_tests_name("tcp, aes128gcm", sealed, NULL, NULL);
	return failed;
}
