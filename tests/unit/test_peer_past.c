/* SPDX-License-Identifier: Apache-2.0 */
/* Former peers: which are remembered, for how long, and as one; log lines for peers
 * that never come up. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/peer/peer_impl.h"
#include "tests/lib/log_lines.h"
#include "tests/lib/peernet.h"

#define MS LOOP_NS_PER_MS
#define S LOOP_NS_PER_S

static unsigned int past_count(unsigned int node)
{
	const struct peer_past *past;
	unsigned int n = 0;

	list_foreach(past, peers_past(net.n[node].peers), link)
		n++;
	return n;
}

static const struct peer_past *past_only(unsigned int node)
{
	assert_int_equal(past_count(node), 1);
	return list_first(peers_past(net.n[node].peers), struct peer_past, link);
}

static void peer_lost_is_kept_for_ten_minutes(void **state)
{
	struct peer *peer = peernet_join();
	const struct peer_past *past;
	uint64_t begin_ns;

	(void)state;
	assert_string_equal(peer->product, "kvd " KVD_VERSION);
	peer_count_bytes(peer, true, 4096);
	begin_ns = loop_now_ns(net.loop);
	peer->totals.rooms = 3;
	peernet_crash(1, MEM_CRASH_POWER);
	peernet_run(S);
	assert_int_equal(past_count(0), 0); /* held: it is shown as it is */
	peer_release(peer);
	peernet_run(S);
	past = past_only(0);
	assert_string_equal(past->endpoint, peernet_endpoint(1));
	assert_string_equal(past->known_as, "user1");
	assert_string_equal(past->name, "node1");
	assert_string_equal(past->product, "kvd " KVD_VERSION);
	assert_int_equal(past->totals.bytes_out, 4096);
	assert_int_equal(past->totals.rooms, 3);
	assert_int_equal(past->totals.downs, 1);
	assert_int_equal(past->totals.error.code, ERR_PEER);
	assert_non_null(strstr(past->totals.error.text, "tcp://10.0.0.1:7400"));
	/* tried in vain: the loss is the same one */
	peer_release(peernet_dial(0, 1));
	peernet_run(S);
	assert_true(past_only(0)->since_ns - begin_ns <= S);
	assert_int_equal(past_only(0)->totals.bytes_out, 4096);
	peernet_run(590 * S);
	assert_int_equal(past_count(0), 1);
	peernet_run(20 * S);
	assert_int_equal(past_count(0), 0);
}

static void peer_restarting_repeatedly_is_one_entry(void **state)
{
	struct peer *peer;

	(void)state;
	for (unsigned int i = 0; i < 20; i++) {
		peer = peernet_dial(0, 1);
		peernet_run(S);
		assert_int_equal(sm_state(&peer->sm), PEER_UP);
		assert_int_equal(past_count(0), 0);
		assert_int_equal(peer->totals.downs, i); /* its totals continue */
		assert_true(loop_now_ns(net.loop) - peer->since_ns <= S);
		peernet_crash(1, MEM_CRASH_KILLED);
		peernet_run(2 * S);
		peer_release(peer);
		peernet_run(S);
		assert_int_equal(past_only(0)->totals.downs, i + 1);
		peernet_start(1);
	}
}

static void peers_never_reached_are_bounded(void **state)
{
	char endpoint[LINK_ENDPOINT_MAX];
	struct peer *peer;

	(void)state;
	for (unsigned int i = 0; i < 300; i++) {
		snprintf(endpoint, sizeof(endpoint), "tcp://10.1.%u.%u:7400", i / 200,
			 i % 200);
		assert_int_equal(peers_dial(net.n[0].peers, endpoint, NULL, &peer), 0);
		peernet_run(100 * MS);
		assert_non_null(strstr(peer->why.text, "cannot be reached"));
		peer_release(peer);
		peernet_run(10 * MS);
	}
	assert_int_equal(past_count(0), 256);
	assert_int_equal(list_first(peers_past(net.n[0].peers), struct peer_past, link)
				 ->totals.error.code,
			 ERR_PEER);
}

static unsigned int failures_logged(struct peer *peer, enum err_code code)
{
	struct err why;
	unsigned int lines;

	err_set(&why, code, "a reason");
	log_set_level(LOG_LEVEL_WARN);
	log_lines_begin();
	for (unsigned int i = 0; i < 600; i++) {
		peer_attempt_failed(impl_of(peer), &why);
		peernet_run(LOOP_NS_PER_S);
	}
	lines = log_lines_with(log_lines_end(), "not reached");
	log_set_level(LOG_LEVEL_ERROR);
	return lines;
}

static void attempts_failing_equally_are_logged_once_a_minute(void **state)
{
	struct peer *peer = peernet_dial(0, 2);

	(void)state;
	assert_int_equal(failures_logged(peer, ERR_VERSION), 10);
	assert_int_equal(failures_logged(peer, ERR_AUTH), 10); /* another reason */
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, peernet_setup, peernet_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(peer_lost_is_kept_for_ten_minutes),
		TEST(peer_restarting_repeatedly_is_one_entry),
		TEST(peers_never_reached_are_bounded),
		TEST(attempts_failing_equally_are_logged_once_a_minute),
	};

	log_set_level(LOG_LEVEL_ERROR);
	return cmocka_run_group_tests_name("peer_past", tests, NULL, NULL);
}
