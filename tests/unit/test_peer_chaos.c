/* SPDX-License-Identifier: Apache-2.0 */
/* peer in sweeps: every allocation fails once; random breaks, partitions and
 * crashes over many seeds. */
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
#include "tests/sim/link_mem.h"
#include "daemon/loop/loop.h"
#include "daemon/peer/peer_impl.h"
#include "tests/lib/peernet.h"
#include "tests/lib/peer_at.h"

#define MS LOOP_NS_PER_MS

/* ---- sweeps ---- */

static void allocation_failures_cost_time_only(void **state)
{
	(void)state;
	peernet_teardown(NULL);
	for (uint64_t n = 1; n < 400; n++) {
		peernet_open(n, 2);
		struct peer *peer = NULL;
		bool failed;

		mem_fail_at(n);
		failed = peers_dial(net.n[0].peers, peernet_endpoint(1), NULL, &peer) < 0;
		if (failed) {
			assert_int_equal(err_last()->code, ERR_NOMEM);
			assert_int_equal(peers_dial(net.n[0].peers, peernet_endpoint(1),
						    NULL, &peer),
					 0);
		}
		peernet_run(20 * LOOP_NS_PER_S);
		for (unsigned int i = 0; i < 20; i++) {
			if (sm_state(&peer->sm) == PEER_UP &&
			    peernet_lease(peer, i, true) < 0)
				assert_int_equal(err_last()->code, ERR_NOMEM);
			peernet_run(500 * MS);
		}
		assert_int_equal(sm_state(&peer->sm), PEER_UP);
		assert_int_equal(sm_state(&peernet_only(1)->sm), PEER_UP);
		bool reached = mem_count() >= n;

		mem_fail_at(0);
		peernet_teardown(NULL);
		if (!reached)
			break;
	}
	peernet_open(1, 2);
}

/* Random dials, breaks, cuts, crashes; each node numbers its messages in each epoch,
 * and a receiver checks that it gets 1, 2, 3 … without a gap. */
static int chaos_message(void *owner, struct peer *peer, const struct wire_header *h,
			 struct cursor *body)
{
	struct peernet_node *node = owner;
	struct wire_lease m;
	unsigned int from = (unsigned int)atoi(peer->name + 4);

	(void)h;
	assert_int_equal(wire_lease_get(body, &m), 0);
	if (node->epochs[from] != peer->epoch) {
		node->epochs[from] = peer->epoch;
		node->numbers[from] = 0;
	}
	assert_int_equal(m.room, ++node->numbers[from]);
	node->messages++;
	return 0;
}

static void chaos_start(unsigned int i)
{
	struct peernet_node *node = &net.n[i];
	struct peers_callbacks callbacks = {.owner = node, .on_message = chaos_message};
	char name[16], user[16];
	struct peers_args args = {.loop = net.loop,
				  .callbacks = &callbacks,
				  .options = &net.options,
				  .name = name};

	memset(node, 0, sizeof(*node));
	snprintf(name, sizeof(name), "node%u", i);
	snprintf(user, sizeof(user), "user%u", i);
	assert_int_equal(link_mem_new(net.hub, peernet_endpoint(i), user, &node->link),
			 0);
	args.link = node->link;
	assert_int_equal(peers_new(&args, &node->peers), 0);
	for (unsigned int k = 0; k < PEERNET_NODES; k++)
		peernet_dial(i, k);
}

static void chaos_send(void)
{
	for (unsigned int i = 0; i < PEERNET_NODES; i++) {
		struct peer *peer;

		list_foreach(peer, &net.n[i].peers->all, link) {
			/* user carries the number of the last message */
			if (sm_state(&peer->sm) != PEER_UP)
				continue;
			uint64_t *last = peer->user;

			if (!last || last[0] != peer->epoch) {
				free(last);
				last = peer->user = calloc(2, sizeof(*last));
				last[0] = peer->epoch;
			}
			if (peernet_lease(peer, last[1] + 1, true) == 0)
				last[1]++;
		}
	}
}

static void chaos_stop(unsigned int i)
{
	struct peer *peer;

	list_foreach(peer, &net.n[i].peers->all, link)
		free(peer->user);
	peernet_stop(i);
}

static void chaos_step(void)
{
	unsigned int a = (unsigned int)(loop_random_u64(net.loop) % PEERNET_NODES);
	unsigned int b = (unsigned int)(loop_random_u64(net.loop) % PEERNET_NODES);

	switch (loop_random_u64(net.loop) % 8) {
	case 0:
		mem_hub_break(net.hub, peernet_endpoint(a), peernet_endpoint(b));
		break;
	case 1:
		assert_int_equal(
			mem_hub_partition(net.hub, peernet_endpoint(a),
					  peernet_endpoint(b),
					  a != b && loop_random_u64(net.loop) % 2),
			0);
		break;
	case 2:
		link_mem_crash(net.n[a].link, loop_random_u64(net.loop) % 2
						      ? MEM_CRASH_KILLED
						      : MEM_CRASH_POWER);
		chaos_stop(a);
		peernet_run(loop_random_u64(net.loop) % LOOP_NS_PER_S);
		chaos_start(a);
		break;
	case 3:
		link_mem_freeze(net.n[a].link, true);
		peernet_run(loop_random_u64(net.loop) % LOOP_NS_PER_S);
		link_mem_freeze(net.n[a].link, false);
		break;
	default:
		chaos_send();
	}
	peernet_run(loop_random_u64(net.loop) % (200 * MS));
}

static uint64_t chaos(uint64_t seed)
{
	uint64_t messages = 0;

	peernet_open(seed, 0);
	mem_hub_set_default(net.hub, &(struct mem_path){.delay_ns = 20000,
							.jitter_ns = 2 * MS,
							.break_ppm = 2000});
	for (unsigned int i = 0; i < PEERNET_NODES; i++)
		chaos_start(i);
	for (unsigned int step = 0; step < 150; step++)
		chaos_step();
	mem_hub_set_default(net.hub, &(struct mem_path){.delay_ns = 20000});
	for (unsigned int a = 0; a < PEERNET_NODES; a++)
		for (unsigned int b = 0; b < PEERNET_NODES; b++)
			mem_hub_set_path(net.hub, peernet_endpoint(a),
					 peernet_endpoint(b),
					 &(struct mem_path){.delay_ns = 20000});
	peernet_run(20 * LOOP_NS_PER_S);
	for (unsigned int i = 0; i < PEERNET_NODES; i++) {
		assert_int_equal(net.n[i].peers->count, PEERNET_NODES);
		for (unsigned int k = 0; k < PEERNET_NODES; k++) {
			struct peer *peer = peer_at(net.n[i].peers, peernet_endpoint(k));

			assert_int_equal(sm_state(&peer->sm), PEER_UP);
			assert_memory_equal(peer->instance,
					    peers_instance(net.n[k].peers), 16);
			messages = messages * 31 + peer->epoch + peer->messages_in;
		}
	}
	chaos_send();
	peernet_run(LOOP_NS_PER_S);
	for (unsigned int i = 0; i < PEERNET_NODES; i++) {
		messages = messages * 31 + net.n[i].messages;
		chaos_stop(i);
	}
	peernet_teardown(NULL);
	return messages;
}

static void chaos_heals_and_loses_nothing_inside_an_epoch(void **state)
{
	(void)state;
	peernet_teardown(NULL);
	log_set_level(LOG_LEVEL_ERROR);
	for (uint64_t seed = 1; seed <= 60; seed++)
		chaos(seed);
	assert_int_equal(chaos(3), chaos(3)); /* a seed replays */
	log_set_level(LOG_LEVEL_INFO);
	peernet_open(1, 2);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, peernet_setup, peernet_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(allocation_failures_cost_time_only),
		TEST(chaos_heals_and_loses_nothing_inside_an_epoch),
	};

	log_set_level(LOG_LEVEL_ERROR);
	return cmocka_run_group_tests_name("peer_chaos", tests, NULL, NULL);
}
