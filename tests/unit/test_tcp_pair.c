/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tcp between two honest ends of this process, where its own inside is of interest:
 * which streams carry the bytes, and what checksums change. What any transport
 * must do is the conformance suite's matter, what a dishonest peer may do test_tcp's.
 */
#include "tests/lib/transport_pair.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/transport/tcp/tcp_impl.h"

#define STREAMS 4u

static struct tcp_transport *a_transport(void)
{
	return (struct tcp_transport *)up_a.t;
}

static struct tcp_transport *b_transport(void)
{
	return (struct tcp_transport *)up_b.t;
}

/* Bytes that this end has sent, and the other acknowledged. */
static uint64_t acknowledged(int fd)
{
	struct tcp_info info = {0};
	socklen_t len = sizeof(info);

	assert_int_equal(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len), 0);
	return info.tcpi_bytes_acked;
}

/* ---- streams ---- */

static bool all_were_used(const struct tcp_peer *peer)
{
	for (unsigned int i = 0; i < peer->stream_count; i++)
		if (acknowledged(peer->streams[i].fd) < TCP_DATA_MAX)
			return false;
	return true;
}

/* As many as the one who has fewer wants. Large transfers use all of them, where
 * their threads get a core at all. */
static void streams_are_agreed_and_share_a_transfer(void **state)
{
	uint64_t end = loop_clock_ns(up_loop) + UP_WAIT_NS, total = 0;
	const struct tcp_peer *peer;
	struct up_big big;

	(void)state;
	a_transport()->stream_count = STREAMS + 3;
	b_transport()->stream_count = STREAMS;
	up_join();
	peer = (const struct tcp_peer *)up_a.peer;
	assert_int_equal(peer->stream_count, STREAMS);
	assert_int_equal(((const struct tcp_peer *)up_b.peer)->stream_count, STREAMS);
	do {
		up_big_start(&big, XP_WRITE, false);
		await(big.op.done);
		assert_int_equal(big.op.op.result, 0);
		up_big_end(&big);
		assert_true(loop_clock_ns(up_loop) < end);
	} while (!all_were_used(peer));
	for (unsigned int i = 0; i < STREAMS; i++)
		total += acknowledged(peer->streams[i].fd);
	assert_true(total >= 64 * MIB - STREAMS * TCP_DATA_MAX);
	assert_true(acknowledged(peer->line.fd) < 64 * KIB);
}

/* A page is in the request itself: no stream is woken for it. */
static void small_transfer_is_in_its_request(void **state)
{
	const struct tcp_peer *peer;
	struct up_place src, dst;
	struct up_op op;
	struct plan *plan =
		up_plan(&(struct plan_run){.len = TCP_EAGER_MAX, .count = 1}, 1);

	(void)state;
	up_join();
	peer = (const struct tcp_peer *)up_a.peer;
	up_place_init(&src, &up_a, MIB, false);
	up_place_init(&dst, &up_b, MIB, false);
	memset(src.memory->base, 0x41, MIB);
	up_op_init(&op, XP_WRITE, plan, &src, &dst);
	up_b.sides = op.op.sides;
	assert_int_equal(up_a.t->ops->post(up_a.peer, &op.op), 0);
	await(op.done);
	assert_int_equal(op.op.result, 0);
	assert_memory_equal(src.memory->base, dst.memory->base, TCP_EAGER_MAX);
	assert_true(acknowledged(peer->line.fd) >= TCP_EAGER_MAX);
	for (unsigned int i = 0; i < peer->stream_count; i++)
		assert_true(acknowledged(peer->streams[i].fd) < 256);
	up_place_fini(&src, &up_a);
	up_place_fini(&dst, &up_b);
	plan_free(plan);
}

int main(void)
{
#define PAIR(test) cmocka_unit_test_setup_teardown(test, up_begin, up_end)
	const struct CMUnitTest tests[] = {
		PAIR(streams_are_agreed_and_share_a_transfer),
		PAIR(small_transfer_is_in_its_request),
	};

	up_transport = &tcp_transport;
	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests_name("tcp_pair", tests, NULL, NULL);
}
