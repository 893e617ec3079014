/* SPDX-License-Identifier: Apache-2.0 */
/* Peers that no work waits for: few pings, and a death that is noticed later, but in time
 * as soon as there is work. In virtual time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "daemon/base/log.h"
#include "daemon/loop/loop.h"
#include "daemon/peer/peer_impl.h"
#include "tests/lib/peernet.h"
#include "tests/sim/link_mem.h"

#define MS LOOP_NS_PER_MS

/* Both sides; pings are rare. */
static struct peer *join_quiet(void)
{
	struct peer *peer = peernet_join();

	net.n[0].unused = net.n[1].unused = true;
	peernet_run(5 * LOOP_NS_PER_S);
	return peer;
}

static void cut_both(bool cut)
{
	struct mem_path path = {.delay_ns = PEERNET_DELAY_NS, .cut = cut};

	mem_hub_set_path(net.hub, peernet_endpoint(0), peernet_endpoint(1), &path);
	mem_hub_set_path(net.hub, peernet_endpoint(1), peernet_endpoint(0), &path);
}

static uint64_t frames_in(uint64_t ns)
{
	uint64_t before = net.n[0].peers->stats.frames_out;

	peernet_run(ns);
	return net.n[0].peers->stats.frames_out - before;
}

/* PINGs and PONGs: 10 a second, 2 a second. */
static void unused_peers_are_pinged_a_fifth_as_often(void **state)
{
	(void)state;
	peernet_join();
	assert_in_range(frames_in(10 * LOOP_NS_PER_S), 98, 102);
	net.n[0].unused = net.n[1].unused = true;
	peernet_run(2 * LOOP_NS_PER_S);
	assert_in_range(frames_in(10 * LOOP_NS_PER_S), 18, 22);
	assert_int_equal(net.n[0].downs + net.n[1].downs, 0);
}

/* The other one only answers. */
static void one_side_may_be_unused(void **state)
{
	(void)state;
	join_quiet();
	net.n[1].unused = false;
	peernet_run(2 * LOOP_NS_PER_S);
	assert_in_range(frames_in(10 * LOOP_NS_PER_S), 58, 62);
	cut_both(true);
	peernet_run(802 * MS);
	assert_int_equal(net.n[1].downs, 1);
	peernet_run(LOOP_NS_PER_S + 200 * MS);
	assert_int_equal(net.n[0].downs, 1);
}

static void silence_of_an_unused_peer_is_death_a_second_later(void **state)
{
	uint64_t cut_ns;

	(void)state;
	join_quiet();
	for (unsigned int i = 0; i < 2; i++) {
		uint64_t dead_ns = i ? 3000 * MS : 800 * MS;

		net.n[0].peers->options.dead_after_ns = dead_ns;
		net.n[1].peers->options.dead_after_ns = dead_ns;
		net.n[0].downs = net.n[1].downs = 0;
		cut_both(true);
		cut_ns = loop_now_ns(net.loop);
		peernet_run(dead_ns + 1200 * MS);
		for (unsigned int n = 0; n < 2; n++) {
			assert_int_equal(net.n[n].downs, 1);
			assert_true(net.n[n].down_ns - cut_ns >= dead_ns * 3 / 4);
		}
		cut_both(false);
		peernet_run(10 * LOOP_NS_PER_S);
	}
}

/* No quiet between a message that is not answered and the death. */
static void peer_that_dies_with_a_message_is_not_quiet(void **state)
{
	struct peer *peer = peernet_join();
	uint64_t cut_ns;

	(void)state;
	net.n[0].unused = net.n[1].unused = true;
	net.n[0].peers->options.dead_after_ns = 3000 * MS;
	assert_int_equal(peernet_lease(peer, 1, true), 0);
	peernet_run(100 * MS);
	cut_both(true);
	cut_ns = loop_now_ns(net.loop);
	peernet_run(3300 * MS);
	assert_int_equal(net.n[0].downs, 1);
	assert_true(net.n[0].down_ns - cut_ns <= 3300 * MS);
}

/* A killed daemon's connection ends at once. */
static void end_of_the_connection_ends_quiet(void **state)
{
	(void)state;
	join_quiet();
	peernet_crash(1, MEM_CRASH_KILLED);
	peernet_run(900 * MS);
	assert_int_equal(net.n[0].downs, 1);
}

/* Up to a second of silence is usual, so it is no evidence. */
static void message_to_an_unused_peer_that_died_is_death_in_time(void **state)
{
	struct peer *peer = join_quiet();

	(void)state;
	for (unsigned int i = 0; i < 10; i++) {
		uint64_t sent_ns;
		unsigned int downs = net.n[0].downs;

		peernet_run((170 * i % 1000) * MS);
		cut_both(true);
		peernet_run(100 * i * MS);
		assert_int_equal(sm_state(&peer->sm), PEER_UP);
		sent_ns = loop_now_ns(net.loop);
		assert_int_equal(peernet_lease(peer, i, true), 0);
		peernet_run(802 * MS);
		assert_int_equal(net.n[0].downs, downs + 1);
		assert_true(i > 0 || net.n[0].down_ns - sent_ns >= 700 * MS);
		peernet_run(10 * LOOP_NS_PER_S);
		cut_both(false);
		peernet_run(10 * LOOP_NS_PER_S);
		assert_int_equal(sm_state(&peer->sm), PEER_UP);
	}
}

/* Work without a message: found at the next tick. */
static void peer_that_is_used_again_is_pinged_often(void **state)
{
	(void)state;
	join_quiet();
	net.n[0].unused = false;
	cut_both(true);
	peernet_run(1100 * MS + 802 * MS);
	assert_int_equal(net.n[0].downs, 1);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, peernet_setup, peernet_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(unused_peers_are_pinged_a_fifth_as_often),
		TEST(one_side_may_be_unused),
		TEST(silence_of_an_unused_peer_is_death_a_second_later),
		TEST(peer_that_dies_with_a_message_is_not_quiet),
		TEST(end_of_the_connection_ends_quiet),
		TEST(message_to_an_unused_peer_that_died_is_death_in_time),
		TEST(peer_that_is_used_again_is_pinged_often),
	};

	log_set_level(LOG_LEVEL_ERROR);
	return cmocka_run_group_tests_name("peer_quiet", tests, NULL, NULL);
}
