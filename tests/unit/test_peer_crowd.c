/* SPDX-License-Identifier: Apache-2.0 */
/* Ten thousand peers of one daemon: look-ups do not scan them, and removals are spread
 * over turns. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/peer/peer_impl.h"
#include "tests/lib/peer_at.h"
#include "tests/lib/peernet.h"

#define CROWD 10000u
#define DIALLED 100u
/* In one bucket: ten on average, so this many occur once in 10^25 runs. */
#define BUCKET_MAX 64u

static struct peer *crowd[CROWD];

static void crowd_endpoint(unsigned int i, char text[LINK_ENDPOINT_MAX])
{
	snprintf(text, LINK_ENDPOINT_MAX, "tcp://10.1.%u.%u:7400", i / 256, i % 256);
}

static int crowd_setup(void **state)
{
	(void)state;
	peernet_open(1, 0);
	net.options.peers_max = 2 * CROWD;
	net.options.hello_retry_ns = net.options.redial_max_ns = 3600 * LOOP_NS_PER_S;
	peernet_start(0);
	return 0;
}

static void dial_crowd(void)
{
	char text[LINK_ENDPOINT_MAX];

	for (unsigned int i = 0; i < CROWD; i++) {
		crowd_endpoint(i, text);
		assert_int_equal(peers_dial(net.n[0].peers, text, NULL, &crowd[i]), 0);
	}
	assert_int_equal(net.n[0].peers->count, CROWD);
}

static unsigned int longest(struct list buckets[PEER_BUCKETS])
{
	unsigned int most = 0;

	for (unsigned int i = 0; i < PEER_BUCKETS; i++) {
		unsigned int n = 0;

		for (struct list *at = buckets[i].next; at != &buckets[i]; at = at->next)
			n++;
		most = n > most ? n : most;
	}
	return most;
}

static void peers_of_a_crowd_are_found_without_a_walk(void **state)
{
	struct peers *peers = net.n[0].peers;
	char text[LINK_ENDPOINT_MAX];

	(void)state;
	dial_crowd();
	for (unsigned int i = 0; i < CROWD; i++) {
		crowd_endpoint(i, text);
		assert_ptr_equal(peer_at(peers, text), crowd[i]);
		assert_ptr_equal(
			peering_find_nonce(peers, impl_of(crowd[i])->next.nonce)->owner,
			crowd[i]->impl);
		assert_ptr_equal(
			peering_find(peers, impl_of(crowd[i])->next.epoch_in)->owner,
			crowd[i]->impl);
	}
	assert_null(peer_at(peers, "tcp://10.2.0.0:7400"));
	assert_in_range(longest(peers->endpoints), CROWD / PEER_BUCKETS, BUCKET_MAX);
	assert_in_range(longest(peers->nonces), CROWD / PEER_BUCKETS, BUCKET_MAX);
	assert_in_range(longest(peers->epochs), CROWD / PEER_BUCKETS, BUCKET_MAX);
	for (unsigned int i = 0; i < CROWD; i++)
		peer_release(crowd[i]);
	peernet_run(LOOP_NS_PER_S);
	assert_int_equal(peers->count, 0);
	assert_int_equal(longest(peers->endpoints) + longest(peers->nonces), 0);
	assert_int_equal(peers->unreached, 0);
}

/* The rest of a share is known without counting all of its peers. */
static void shares_of_a_crowd_are_returned(void **state)
{
	const struct peer_client clients[] = {{.uid = 1, .session = 1},
					      {.uid = 1, .session = 2},
					      {.uid = 2, .session = 3}};
	struct peers *peers = net.n[0].peers;
	unsigned int got[2][ARRAY_LEN(clients)] = {{0}}, total = 0;
	char text[LINK_ENDPOINT_MAX];

	(void)state;
	for (unsigned int round = 0; round < 2; round++) {
		total = 0;
		for (unsigned int c = 0; c < ARRAY_LEN(clients); c++) {
			for (; total < CROWD; total++) {
				crowd_endpoint(total, text);
				if (peers_dial(peers, text, &clients[c], &crowd[total]) <
				    0)
					break;
				got[round][c]++;
			}
			assert_int_equal(err_last()->code, ERR_LIMIT);
			err_clear();
		}
		assert_int_equal(peers->unreached, total);
		assert_int_equal(idmap_count(&peers->users), 2);
		assert_int_equal(idmap_count(&peers->sessions), ARRAY_LEN(clients));
		while (total)
			peer_release(crowd[--total]);
		peernet_run(LOOP_NS_PER_S);
		assert_int_equal(peers->count + peers->unreached, 0);
		assert_int_equal(
			idmap_count(&peers->users) + idmap_count(&peers->sessions), 0);
	}
	assert_true(got[0][0] > 0);
	assert_int_equal(got[0][0], got[0][1]);
	assert_memory_equal(got[0], got[1], sizeof(got[0]));
}

static unsigned int lines_open(void)
{
	unsigned int n = 0;

	for (unsigned int i = 0; i < CROWD; i++)
		n += crowd[i] && impl_of(crowd[i])->line;
	return n;
}

/* As one room with many sources does; some of them are released before their turn. */
static void peers_of_a_crowd_are_dialled_one_a_turn_when_time_is_short(void **state)
{
	unsigned int before = 0, most = 0, turns = 0;

	(void)state;
	loop_virtual_parts(net.loop, 1);
	dial_crowd();
	assert_int_equal(lines_open(), 0);
	for (unsigned int i = DIALLED; i < CROWD; i++)
		peer_release(mem_steal(crowd[i]));
	while (lines_open() < DIALLED) {
		before = lines_open();
		loop_turn(net.loop, 0);
		before = lines_open() - before;
		most = before > most ? before : most;
		assert_true(++turns < 2 * CROWD);
	}
	assert_int_equal(most, 1);
	loop_virtual_parts(net.loop, 0);
	peernet_run(LOOP_NS_PER_S);
	assert_int_equal(net.n[0].peers->count, DIALLED);
	for (unsigned int i = 0; i < DIALLED; i++)
		peer_release(crowd[i]);
	peernet_run(LOOP_NS_PER_S);
	assert_int_equal(net.n[0].peers->count, 0);
}

struct timed_dial {
	struct loop_timer timer;
	struct loop_defer other;
	unsigned int turns_left; /* of the crowd's dials, when `other` ran */
};

static void on_time_to_dial(struct loop_timer *timer)
{
	struct timed_dial *d = container_of(timer, struct timed_dial, timer);
	char text[LINK_ENDPOINT_MAX];

	for (unsigned int i = 0; i < DIALLED; i++) {
		crowd_endpoint(i, text);
		assert_int_equal(peers_dial(net.n[0].peers, text, NULL, &crowd[i]), 0);
	}
	loop_defer(net.loop, &d->other);
}

static void on_other_call(struct loop_defer *defer)
{
	container_of(defer, struct timed_dial, other)->turns_left =
		DIALLED - lines_open();
}

static unsigned int lines_of_node(void)
{
	struct peer *peer;
	unsigned int n = 0;

	list_foreach(peer, &net.n[0].peers->all, link)
		n += impl_of(peer)->line != NULL;
	return n;
}

/* HELLOs arrive while a crowd is dialled: they are answered by lines, too. Other deferred
 * calls do not wait for the crowd. */
static void lines_are_opened_one_a_turn_whoever_dials(void **state)
{
	unsigned int before, most = 0, turns = 0;
	struct timed_dial d;

	(void)state;
	for (unsigned int i = 1; i < PEERNET_NODES; i++)
		peernet_start(i);
	loop_timer_init(&d.timer, net.loop, on_time_to_dial);
	loop_defer_init(&d.other, on_other_call);
	loop_virtual_parts(net.loop, 1);
	for (unsigned int i = 1; i < PEERNET_NODES; i++)
		peernet_dial(i, 0);
	/* connected after two, the first HELLO is here after three */
	loop_timer_start(&d.timer, 3 * PEERNET_DELAY_NS);
	while (net.n[0].ups < PEERNET_NODES - 1 || lines_open() < DIALLED) {
		before = lines_of_node();
		loop_turn(net.loop, LOOP_NS_PER_MS);
		before = lines_of_node() - before;
		most = before > most ? before : most;
		assert_true(++turns < 10 * DIALLED);
	}
	assert_int_equal(most, 1);
	assert_in_range(d.turns_left, DIALLED - 2, DIALLED);
	loop_virtual_parts(net.loop, 0);
	for (unsigned int i = 0; i < DIALLED; i++)
		peer_release(crowd[i]);
	peernet_run(LOOP_NS_PER_S);
	assert_int_equal(peers_in(net.n[0].peers, PEER_UP), PEERNET_NODES - 1);
}

/* All are released at once. */
static void peers_of_a_crowd_leave_one_a_turn_when_time_is_short(void **state)
{
	struct peers *peers = net.n[0].peers;
	unsigned int before, turns = 0;

	(void)state;
	dial_crowd();
	loop_virtual_parts(net.loop, 1);
	for (unsigned int i = 0; i < CROWD; i++)
		peer_release(crowd[i]);
	while (peers->count) {
		before = peers->count;
		loop_turn(net.loop, 0);
		assert_in_range(before - peers->count, 0, 2);
		assert_true(++turns < 2 * CROWD);
	}
	loop_virtual_parts(net.loop, 0);
}

/* The daemon that was dialled answers. */
static void welcome(unsigned int i)
{
	struct peer_impl *impl = impl_of(crowd[i]);
	struct wire_hello m = {.version_min = WIRE_VERSION_MIN,
			       .version_max = WIRE_VERSION_MAX,
			       .features = PEER_FEATURE_BASE,
			       .nonce = impl->next.nonce};
	struct wire_header h = {
		.version = WIRE_VERSION_MAX, .type = WIRE_T_WELCOME, .epoch = 1 + i};
	uint8_t frame[700], body[600];
	struct cursor c;

	impl->hellos = 1; /* as if there were a listener */
	memcpy(h.sender, &i, sizeof(i));
	h.sender[15] = 1;
	memcpy(h.target, peers_instance(net.n[0].peers), sizeof(h.target));
	crowd_endpoint(i, m.endpoint);
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_hello_put(&c, &m), 0);
	h.body_len = (uint32_t)c.pos;
	wire_frame_put(frame, &h, body);
	peernet_inject(&net.n[0], frame, WIRE_HEADER_BYTES + c.pos, "crowd");
}

/* All fall silent at once, as behind a switch that is lost. */
static void peers_of_a_crowd_are_lost_one_a_turn_when_time_is_short(void **state)
{
	struct peers *peers = net.n[0].peers;
	unsigned int before, most = 0;
	uint64_t turns = 0;

	(void)state;
	dial_crowd();
	for (unsigned int i = 0; i < CROWD; i++)
		welcome(i);
	assert_int_equal(peers_in(peers, PEER_UP), CROWD);
	assert_int_equal(peers->unreached, 0);
	for (unsigned int i = 0; i < CROWD; i++)
		assert_ptr_equal(peers_by_instance(peers, crowd[i]->instance), crowd[i]);
	assert_in_range(longest(peers->instances), CROWD / PEER_BUCKETS, BUCKET_MAX);
	loop_virtual_parts(net.loop, 1);
	while (peers_in(peers, PEER_UP)) {
		before = peers_in(peers, PEER_UP);
		loop_turn(net.loop, LOOP_NS_PER_S);
		before -= peers_in(peers, PEER_UP);
		most = before > most ? before : most;
		assert_true(++turns < 100 * CROWD);
	}
	assert_int_equal(most, 1);
	loop_virtual_parts(net.loop, 0);
	assert_int_equal(longest(peers->instances), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
#define TEST(f) cmocka_unit_test_setup_teardown(f, crowd_setup, peernet_teardown)
		TEST(peers_of_a_crowd_are_found_without_a_walk),
		TEST(shares_of_a_crowd_are_returned),
		TEST(peers_of_a_crowd_are_dialled_one_a_turn_when_time_is_short),
		TEST(lines_are_opened_one_a_turn_whoever_dials),
		TEST(peers_of_a_crowd_leave_one_a_turn_when_time_is_short),
		TEST(peers_of_a_crowd_are_lost_one_a_turn_when_time_is_short),
#undef TEST
	};

	log_set_level(LOG_LEVEL_ERROR);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
