/* SPDX-License-Identifier: Apache-2.0 */
/* peer over link_mem in virtual time: coming up, messages, going down, callbacks
 * that act, our own lateness. */
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

/* ---- coming up ---- */

static void dial_of_present_daemon_is_up_on_both_sides(void **state)
{
	struct peer *a, *b;

	(void)state;
	a = peernet_dial(0, 1);
	assert_int_equal(sm_state(&a->sm), PEER_DIALING);
	assert_int_equal(a->holds, 1);
	peernet_run(10 * MS);
	assert_string_equal(net.log, "0up 1up ");
	b = peernet_only(1);
	assert_ptr_equal(peernet_only(0), a);
	assert_memory_equal(a->instance, peers_instance(net.n[1].peers), 16);
	assert_memory_equal(b->instance, peers_instance(net.n[0].peers), 16);
	assert_int_equal(strlen(a->instance_text), 32);
	assert_string_equal(a->name, "node1");
	assert_string_equal(b->endpoint, peernet_endpoint(0));
	assert_memory_equal(a->token_in, b->token_out, 16);
	assert_memory_equal(a->token_out, b->token_in, 16);
	assert_memory_not_equal(a->token_in, a->token_out, 16);
	assert_true(a->same_host && b->same_host && !a->self);
	assert_int_equal(a->lower + b->lower, 1);
	assert_int_equal(a->lower, memcmp(b->instance, a->instance, 16) < 0);
	assert_int_equal(a->features, PEER_FEATURE_BASE | PEER_FEATURE_CHUNKS);
	assert_int_equal(a->address_count, 2);
	assert_string_equal(a->addresses[0].transport, "shm");
	assert_int_equal(a->addresses[0].len, 3);
	assert_memory_equal(a->addresses[0].data, "xyz", 3);
	assert_string_equal(a->addresses[1].transport, "fake");
	assert_int_equal(a->addresses[1].len, 0);
	assert_ptr_equal(peers_by_instance(net.n[0].peers, a->instance), a);
	assert_ptr_equal(peer_at(net.n[0].peers, peernet_endpoint(1)), a);
	assert_null(peer_at(net.n[0].peers, "nonsense"));
	assert_int_equal(a->rtt_ns, 2 * PEERNET_DELAY_NS);
	peernet_run(5 * LOOP_NS_PER_S);
	assert_int_equal(sm_state(&a->sm), PEER_UP);
	assert_int_equal(a->missed_pings + b->missed_pings, 0);
	assert_int_equal(net.n[0].peers->stats.stale_frames, 0);
}

static void dial_of_other_host_is_not_same_host(void **state)
{
	(void)state;
	peernet_start(2);
	struct peer *peer = peernet_dial(0, 2);

	peernet_run(10 * MS);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	assert_false(peer->same_host);
}

static void dial_before_daemon_exists_is_up_later(void **state)
{
	struct peer *peer = peernet_dial(0, 2);

	(void)state;
	peernet_run(10 * LOOP_NS_PER_S);
	assert_int_equal(sm_state(&peer->sm), PEER_DIALING);
	assert_int_equal(peer->why.code, ERR_PEER);
	assert_string_equal(peer->why.text, "peer tcp://10.0.0.2:7400 cannot be "
					    "reached: nobody listens");
	peernet_start(2);
	peernet_run(2 * LOOP_NS_PER_S);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	assert_int_equal(peer->why.code, ERR_OK);
}

static void dial_of_bad_endpoint_refused(void **state)
{
	struct peer *peer;

	(void)state;
	assert_true(peers_dial(net.n[0].peers, "10.0.0.1:7400", NULL, &peer) < 0);
	assert_int_equal(err_last()->code, ERR_INVAL);
	assert_int_equal(net.n[0].peers->count, 0);
}

static void dial_twice_gives_one_held_peer(void **state)
{
	struct peer *peer = peernet_dial(0, 1);

	(void)state;
	assert_ptr_equal(peernet_dial(0, 1), peer);
	peernet_run(10 * MS);
	assert_ptr_equal(peernet_dial(0, 1), peer);
	assert_int_equal(peer->holds, 3);
	assert_int_equal(net.n[0].ups, 1);
	/* in the other direction it is the same peering */
	assert_ptr_equal(peernet_dial(1, 0), peernet_only(1));
	peernet_run(2 * LOOP_NS_PER_S);
	assert_string_equal(net.log, "0up 1up ");
}

static void dial_from_both_sides_gives_one_peer(void **state)
{
	(void)state;
	peernet_teardown(NULL);
	for (uint64_t seed = 0; seed < 300; seed++) {
		peernet_open(seed, 2);
		mem_hub_set_default(net.hub, &(struct mem_path){.delay_ns = 1000,
								.jitter_ns = 60 * MS});
		peernet_dial(0, 1);
		peernet_run(loop_random_u64(net.loop) % (30 * MS));
		peernet_dial(1, 0);
		peernet_run(2 * LOOP_NS_PER_S);
		struct peer *a = peernet_only(0), *b = peernet_only(1);

		assert_int_equal(sm_state(&a->sm), PEER_UP);
		assert_int_equal(sm_state(&b->sm), PEER_UP);
		assert_int_equal(net.n[0].ups + net.n[1].ups, 2);
		assert_int_equal(net.n[0].downs + net.n[1].downs, 0);
		assert_memory_equal(a->token_in, b->token_out, 16);
		assert_memory_equal(a->token_out, b->token_in, 16);
		assert_int_equal(peernet_lease(a, 1, true), 0);
		assert_int_equal(peernet_lease(b, 2, true), 0);
		peernet_run(200 * MS);
		assert_int_equal(net.n[0].messages + net.n[1].messages, 2);
		peernet_teardown(NULL);
	}
	peernet_open(1, 2);
}

static void dial_of_self_loops_back(void **state)
{
	struct peer *self = peernet_dial(0, 0);

	(void)state;
	assert_int_equal(net.n[0].ups, 0);
	loop_turn(net.loop, 0);
	assert_int_equal(sm_state(&self->sm), PEER_UP);
	assert_true(self->self && self->same_host && !self->lower);
	assert_memory_equal(self->token_in, self->token_out, 16);
	assert_memory_equal(self->instance, peers_instance(net.n[0].peers), 16);
	assert_int_equal(self->address_count, 2);
	assert_int_equal(peernet_lease(self, 1, false), 0);
	assert_int_equal(peernet_lease(self, 2, true), 0);
	assert_int_equal(net.n[0].messages, 0); /* never from inside send */
	loop_turn(net.loop, 0);
	assert_int_equal(net.n[0].messages, 2);
	assert_int_equal(net.n[0].numbers[0], 1);
	assert_int_equal(net.n[0].numbers[1], 2);
	/* a killed one is up again while held */
	peer_kill(self, &(struct err){.code = ERR_PROTO, .text = "x"});
	assert_int_equal(net.n[0].downs, 1);
	assert_true(peernet_lease(self, 3, true) < 0);
	peernet_run(LOOP_NS_PER_S);
	assert_int_equal(net.n[0].ups, 2);
	assert_int_equal(self->epoch, 2);
	assert_int_equal(mem_hub_stats(net.hub)->sent, 0);
}

static void dial_of_self_by_another_name_is_found_out(void **state)
{
	struct peer *one, *two;

	(void)state;
	assert_int_equal(
		mem_hub_alias(net.hub, "tcp://localhost:7400", peernet_endpoint(0)), 0);
	assert_int_equal(mem_hub_alias(net.hub, "tcp://myself:7400", peernet_endpoint(0)),
			 0);
	assert_int_equal(peers_dial(net.n[0].peers, "tcp://localhost:7400", NULL, &one),
			 0);
	peernet_run(LOOP_NS_PER_S);
	assert_int_equal(sm_state(&one->sm), PEER_UP);
	assert_true(one->self);
	/* a second name for it gets that error */
	assert_int_equal(peers_dial(net.n[0].peers, "tcp://myself:7400", NULL, &two), 0);
	peernet_run(LOOP_NS_PER_S);
	assert_int_not_equal(sm_state(&two->sm), PEER_UP);
	assert_int_equal(net.n[0].why.code, ERR_EXIST);
	/* and its advertised name is the self peer */
	assert_ptr_equal(peernet_dial(0, 0), one);
}

static void dial_by_two_names_gives_one_up(void **state)
{
	struct peer *alias, *plain = peernet_dial(0, 1);

	(void)state;
	assert_int_equal(mem_hub_alias(net.hub, "tcp://one:7400", peernet_endpoint(1)),
			 0);
	assert_int_equal(peers_dial(net.n[0].peers, "tcp://one:7400", NULL, &alias), 0);
	peernet_run(5 * LOOP_NS_PER_S);
	assert_int_equal(
		(sm_state(&plain->sm) == PEER_UP) + (sm_state(&alias->sm) == PEER_UP), 1);
	assert_int_equal(net.n[0].downs + net.n[1].downs, 0);
	assert_int_equal(net.n[0].why.code, ERR_EXIST);
	struct peer *loser = sm_state(&plain->sm) == PEER_UP ? alias : plain;
	struct peer *winner = sm_state(&plain->sm) == PEER_UP ? plain : alias;

	/* the other takes over when the first is given up */
	peer_release(winner);
	peernet_crash(1, MEM_CRASH_KILLED);
	peernet_run(2 * LOOP_NS_PER_S);
	peernet_start(1);
	peernet_run(5 * LOOP_NS_PER_S);
	assert_int_equal(sm_state(&loser->sm), PEER_UP);
}

static void dial_by_name_replaces_incoming_connection(void **state)
{
	struct peer *alias;

	(void)state;
	assert_int_equal(mem_hub_alias(net.hub, "tcp://one:7400", peernet_endpoint(1)),
			 0);
	peernet_dial(1, 0);
	peernet_run(10 * MS);
	assert_string_equal(net.log, "1up 0up ");
	assert_int_equal(peers_dial(net.n[0].peers, "tcp://one:7400", NULL, &alias), 0);
	peernet_run(5 * LOOP_NS_PER_S);
	assert_int_equal(sm_state(&alias->sm), PEER_UP);
	assert_ptr_equal(peernet_only(0), alias);
	assert_int_equal(sm_state(&peernet_only(1)->sm), PEER_UP);
	assert_memory_equal(alias->token_in, peernet_only(1)->token_out, 16);
	assert_int_equal(net.n[0].downs, 1);
	assert_int_equal(net.n[1].downs, 1);
	/* and its real name now leads to the same object */
	assert_ptr_equal(peernet_dial(0, 1), alias);
}

/* ---- messages ---- */

static void messages_arrive_once_and_in_order(void **state)
{
	struct peer *peer = peernet_join();

	(void)state;
	mem_hub_set_default(net.hub,
			    &(struct mem_path){.delay_ns = 1000, .jitter_ns = 500000});
	for (unsigned int i = 0; i < 900; i++)
		assert_int_equal(peernet_lease(peer, i, i % 3 == 0), 0);
	peernet_run(50 * MS);
	assert_int_equal(net.n[1].messages, 900);
	for (unsigned int i = 0; i < 900; i++)
		assert_int_equal(net.n[1].numbers[i], i);
	assert_int_equal(peernet_only(1)->messages_in, 900);
	assert_true(peer->messages_out >= 900);
}

static void message_too_big_refused(void **state)
{
	static const uint8_t body[100];

	(void)state;
	net.options.message_bytes = 8192;
	peernet_start(2);
	peernet_start(3);
	struct peer *peer = peernet_dial(2, 3);
	uint8_t *big = calloc(1, 9000);

	peernet_run(10 * MS);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	assert_true(peer_send(peer, WIRE_T_LEASE, body, 65) < 0);
	assert_int_equal(err_last()->code, ERR_TOOBIG);
	assert_true(peer_send_reliable(peer, WIRE_T_OFFER, big, 8192 - 95) < 0);
	assert_int_equal(err_last()->code, ERR_TOOBIG);
	peernet_run(10 * MS);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	free(big);
}

static void reliable_waits_for_a_full_line_in_order(void **state)
{
	struct peer *peer = peernet_join();
	unsigned int refused = 0;

	(void)state;
	mem_hub_set_queue_max(net.hub, 4);
	for (unsigned int i = 0; i < 50; i++) {
		assert_int_equal(peernet_lease(peer, i, true), 0);
		/* it must not overtake */
		if (i >= 4)
			refused += peernet_lease(peer, 1000, false) < 0;
	}
	assert_int_equal(refused, 46);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	peernet_run(200 * MS);
	assert_int_equal(net.n[1].messages, 50);
	for (unsigned int i = 0; i < 50; i++)
		assert_int_equal(net.n[1].numbers[i], i);
}

static void reliable_over_its_bound_takes_the_peer_down_later(void **state)
{
	struct peer *peer = peernet_join();
	int r = 0;

	(void)state;
	peer_hold(peer);
	assert_int_equal(mem_hub_partition(net.hub, peernet_endpoint(0),
					   peernet_endpoint(1), true),
			 0);
	mem_hub_set_queue_max(net.hub, 4);
	for (unsigned int i = 0; i < 1000000 && r == 0; i++)
		r = peernet_lease(peer, i, true);
	assert_true(r < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	assert_int_equal(net.n[0].downs, 0); /* not inside the call */
	assert_true(peernet_lease(peer, 0, false) < 0);
	assert_int_equal(err_last()->code, ERR_PEER);
	loop_turn(net.loop, 0);
	assert_int_equal(net.n[0].downs, 1);
	assert_int_equal(net.n[0].why.code, ERR_LIMIT);
	peer_release(peer);
}

static void bad_message_takes_the_peer_down_with_bye(void **state)
{
	struct peer *peer = peernet_join();

	(void)state;
	net.n[1].answer = -1;
	assert_int_equal(peernet_lease(peer, 1, true), 0);
	assert_int_equal(peernet_lease(peer, 2, true), 0);
	peernet_run(1 * MS);
	assert_int_equal(net.n[1].messages, 1);
	assert_int_equal(net.n[1].downs, 1);
	assert_int_equal(net.n[0].downs, 1);
	assert_int_equal(net.n[0].why.code, ERR_PROTO);
	assert_non_null(strstr(net.n[0].why.text, "reports: \"the test wants it so\""));
}

static void line_losing_frames_ends_the_peering(void **state)
{
	struct peer *peer = peernet_join();
	unsigned int breaks = 0;

	(void)state;
	while (!net.n[1].downs) {
		for (unsigned int i = 0; i < 5; i++)
			assert_int_equal(peernet_lease(peer, i, true), 0);
		mem_hub_break(net.hub, peernet_endpoint(0), peernet_endpoint(1));
		peernet_run(300 * MS);
		assert_true(++breaks < 100);
	}
	/* every received sequence is a prefix: 0 1 2 3 4 0 1 2 3 4 0 1 … */
	for (unsigned int i = 0; i < net.n[1].messages; i++)
		assert_int_equal(net.n[1].numbers[i], i % 5);
	assert_int_equal(net.n[1].why.code, ERR_TRANSPORT);
	assert_non_null(strstr(net.n[1].why.text, "lost"));
	peernet_run(LOOP_NS_PER_S);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	assert_int_equal(peer->epoch, 2);
}

/* ---- going down ---- */

static void close_sends_bye_with_reason(void **state)
{
	struct peer *peer = peernet_join(), *other;

	(void)state;
	peers_close(net.n[1].peers, ERR_DRAIN, "maintenance");
	assert_int_equal(net.n[1].downs, 1);
	assert_true(peers_dial(net.n[1].peers, peernet_endpoint(0), NULL, &other) < 0);
	assert_int_equal(err_last()->code, ERR_DRAIN);
	peernet_run(1 * MS);
	assert_int_equal(net.n[0].downs, 1);
	assert_int_equal(net.n[0].why.code, ERR_DRAIN);
	assert_non_null(strstr(net.n[0].why.text, "tcp://10.0.0.1:7400 instance "));
	assert_non_null(strstr(net.n[0].why.text, "reports: \"maintenance\""));
	/* it stays away: no HELLO is answered */
	peernet_run(3 * LOOP_NS_PER_S);
	assert_int_equal(net.n[1].ups, 1);
	assert_int_not_equal(sm_state(&peer->sm), PEER_UP);
}

static void kill_redials_while_held(void **state)
{
	struct peer *peer = peernet_join();
	struct err why;

	(void)state;
	err_set(&why, ERR_TRANSPORT, "its queue pair died");
	peer_kill(peer, &why);
	assert_int_equal(net.n[0].downs, 1);
	assert_int_equal(peer->why.code, ERR_TRANSPORT);
	peernet_run(1 * MS);
	assert_int_equal(net.n[1].downs, 1);
	assert_int_equal(net.n[1].why.code, ERR_TRANSPORT);
	peernet_run(200 * MS);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	assert_int_equal(peer->epoch, 2);
	peer_release(peer);
	peer_kill(peer, &why);
	peernet_run(3 * LOOP_NS_PER_S);
	assert_int_equal(net.n[0].peers->count, 0);
	assert_int_equal(net.n[1].peers->count, 0);
	/* no peers: nothing wakes the loop any more */
	assert_false(loop_turn(net.loop, 3600 * LOOP_NS_PER_S));
}

static void release_of_idle_peer_sends_bye_in_time(void **state)
{
	(void)state;
	net.options.idle_after_ns = 5 * LOOP_NS_PER_S;
	peernet_start(2);
	struct peer *peer = peernet_dial(2, 1);

	peernet_run(10 * MS);
	peer_release(peer);
	peernet_run(3 * LOOP_NS_PER_S);
	assert_int_equal(peernet_lease(peer, 1, true), 0);
	peernet_run(3 * LOOP_NS_PER_S);
	assert_int_equal(sm_state(&peer->sm), PEER_UP); /* it was used since */
	peernet_run(3 * LOOP_NS_PER_S);
	assert_int_equal(net.n[2].downs, 1);
	assert_int_equal(net.n[1].downs, 1);
	assert_int_equal(net.n[1].why.code, ERR_CANCELED);
	assert_int_equal(net.n[2].peers->count, 0);
	assert_int_equal(net.n[1].peers->count, 0);
}

static void release_while_dialling_frees_it(void **state)
{
	struct peer *peer = peernet_dial(0, 3);

	(void)state;
	peernet_run(LOOP_NS_PER_S);
	peer_release(peer);
	peernet_run(1);
	assert_int_equal(net.n[0].peers->count, 0);
	assert_false(loop_turn(net.loop, 3600 * LOOP_NS_PER_S));
}

static void silence_is_death_within_the_bound(void **state)
{
	static const enum mem_crash hows[] = {MEM_CRASH_KILLED, MEM_CRASH_POWER};

	(void)state;
	peernet_teardown(NULL);
	for (unsigned int round = 0; round < 40; round++) {
		peernet_open(round, 2);
		struct peer *peer = peernet_join();

		peernet_run(LOOP_NS_PER_S + round * 7 * MS);
		uint64_t dead_ns = loop_now_ns(net.loop);

		peernet_crash(1, hows[round % 2]);
		peernet_run(2 * LOOP_NS_PER_S);
		assert_int_equal(net.n[0].downs, 1);
		/* the last ping was at most an interval old */
		assert_true(net.n[0].down_ns - dead_ns <= 800 * MS + PEERNET_DELAY_NS);
		assert_true(net.n[0].down_ns - dead_ns >= 600 * MS - PEERNET_DELAY_NS);
		assert_int_equal(net.n[0].why.code, ERR_PEER);
		assert_non_null(strstr(net.n[0].why.text,
				       "peer user1 tcp://10.0.0.1:7400 instance "));
		assert_non_null(strstr(net.n[0].why.text, "missed 4 pings"));
		assert_int_equal(sm_state(&peer->sm), PEER_DIALING); /* held: redialled */
		peernet_teardown(NULL);
	}
	peernet_open(1, 2);
}

static void partition_is_detected_by_both_and_heals(void **state)
{
	struct peer *peer = peernet_join();

	(void)state;
	for (unsigned int way = 0; way < 3; way++) {
		unsigned int downs = way + 1;
		struct mem_path cut = {.delay_ns = PEERNET_DELAY_NS, .cut = true};
		struct mem_path open = {.delay_ns = PEERNET_DELAY_NS};
		uint64_t cut_ns = loop_now_ns(net.loop);

		if (way != 1)
			mem_hub_set_path(net.hub, peernet_endpoint(0),
					 peernet_endpoint(1), &cut);
		if (way != 0)
			mem_hub_set_path(net.hub, peernet_endpoint(1),
					 peernet_endpoint(0), &cut);
		peernet_lease(peer, way, true); /* may be held by the network for long */
		peernet_run(LOOP_NS_PER_S);
		for (unsigned int i = 0; i < 2; i++) {
			assert_int_equal(net.n[i].downs, downs);
			assert_true(net.n[i].down_ns - cut_ns <= 802 * MS);
		}
		peernet_run(10 * LOOP_NS_PER_S);
		mem_hub_set_path(net.hub, peernet_endpoint(0), peernet_endpoint(1),
				 &open);
		mem_hub_set_path(net.hub, peernet_endpoint(1), peernet_endpoint(0),
				 &open);
		unsigned int before = net.n[1].messages;

		peernet_run(4 * LOOP_NS_PER_S);
		assert_int_equal(sm_state(&peer->sm), PEER_UP);
		assert_int_equal(peer->epoch, way + 2);
		/* frames held by the partition are late: none is delivered */
		assert_int_equal(net.n[1].messages, before);
		assert_int_equal(net.n[0].downs, downs);
		assert_int_equal(net.n[1].downs, downs);
	}
	assert_true(net.n[1].peers->stats.stale_frames > 0);
}

/* Half open: frames of `from` vanish in transit, those to it arrive. The side that
 * receives nothing sends BYE, and both know within a second. */
static void half_open(unsigned int from)
{
	struct mem_path cut = {.delay_ns = PEERNET_DELAY_NS, .cut = true};
	unsigned int to = 1 - from;
	uint64_t begin_ns;

	peernet_join();
	mem_hub_set_path(net.hub, peernet_endpoint(from), peernet_endpoint(to), &cut);
	begin_ns = loop_now_ns(net.loop);
	peernet_run(1000 * MS);
	assert_int_equal(net.n[0].downs, 1);
	assert_int_equal(net.n[1].downs, 1);
	for (unsigned int i = 0; i < 2; i++)
		assert_true(net.n[i].down_ns - begin_ns < 1000 * MS);
	assert_non_null(strstr(net.n[to].why.text, "missed 4 pings"));
	assert_non_null(strstr(net.n[to].why.text, peernet_endpoint(from)));
	assert_non_null(strstr(net.n[from].why.text, "reports: \"peer user"));
	/* it got the reason: the other side received nothing from us */
	assert_non_null(strstr(net.n[from].why.text, "missed 4 pings"));
}

/* TCP without ACKs: a little more arrives, then nothing, and no BYE. A side that is
 * not received learns it by its unanswered pings. */
static void line_half_open_is_detected_in_time(void **state)
{
	struct mem_path cut = {.delay_ns = PEERNET_DELAY_NS, .cut = true};
	uint64_t begin_ns;

	(void)state;
	peernet_join();
	peernet_run(LOOP_NS_PER_S);
	mem_hub_set_path(net.hub, peernet_endpoint(0), peernet_endpoint(1), &cut);
	begin_ns = loop_now_ns(net.loop);
	/* two more pings, as seen: up to here new bytes are still sent */
	peernet_run(600 * MS + PEERNET_DELAY_NS);
	mem_hub_set_path(net.hub, peernet_endpoint(1), peernet_endpoint(0), &cut);
	peernet_run(400 * MS);
	assert_int_equal(net.n[0].downs, 1);
	assert_true(net.n[0].down_ns - begin_ns < 950 * MS);
	assert_non_null(strstr(net.n[0].why.text, "missed 4 pings (no answer"));
}

/* An answer may take longer than the next ping: that is no silence. */
static void slow_line_is_not_dead(void **state)
{
	struct mem_path slow = {.delay_ns = 250 * MS};

	(void)state;
	peernet_join();
	for (unsigned int i = 0; i < 2; i++)
		mem_hub_set_path(net.hub, peernet_endpoint(i), peernet_endpoint(1 - i),
				 &slow);
	peernet_run(20 * LOOP_NS_PER_S);
	assert_int_equal(net.n[0].downs + net.n[1].downs, 0);
}

static void line_half_open_out_is_detected_by_both(void **state)
{
	(void)state;
	half_open(0);
}

static void line_half_open_in_is_detected_by_both(void **state)
{
	(void)state;
	half_open(1);
}

static void restart_takes_the_old_instance_down_first(void **state)
{
	struct peer *peer = peernet_join();
	uint8_t old[16];

	(void)state;
	memcpy(old, peer->instance, 16);
	net.log[0] = '\0';
	peernet_crash(1, MEM_CRASH_KILLED);
	peernet_run(50 * MS);
	peernet_start(1);
	struct peer *back = peernet_dial(1, 0); /* the restarted daemon dials at once */

	peernet_run(200 * MS);
	assert_string_equal(net.log, "0down 1up 0up ");
	assert_int_equal(net.n[0].why.code, ERR_RESTART);
	assert_non_null(strstr(net.n[0].why.text, "tcp://10.0.0.1:7400 instance "));
	assert_ptr_equal(peernet_only(0), peer);
	assert_int_equal(peer->epoch, 2);
	assert_memory_not_equal(peer->instance, old, 16);
	assert_null(peers_by_instance(net.n[0].peers, old));
	assert_memory_equal(peer->token_out, back->token_in, 16);
	peernet_run(3 * LOOP_NS_PER_S);
	assert_int_equal(net.n[0].downs, 1);
}

static void restart_is_found_by_redialling(void **state)
{
	struct peer *peer = peernet_join();

	(void)state;
	peernet_crash(1, MEM_CRASH_POWER);
	peernet_run(500 * MS);
	peernet_start(1);
	peernet_run(3 * LOOP_NS_PER_S);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	assert_int_equal(peer->epoch, 2);
	assert_memory_equal(peer->instance, peers_instance(net.n[1].peers), 16);
}

static void restart_is_found_when_the_line_connects_again(void **state)
{
	struct peer *peer = peernet_join();
	char was[9], is[9];
	uint64_t begin_ns;

	(void)state;
	snprintf(was, sizeof(was), "%.8s", peer->instance_text);
	peernet_crash(1, MEM_CRASH_KILLED);
	begin_ns = loop_now_ns(net.loop);
	peernet_run(40 * MS);
	peernet_start(1); /* and does not dial: it knows of no room */
	peernet_run(200 * MS);
	/* long before the dead_after timeout */
	assert_int_equal(net.n[0].downs, 1);
	assert_true(net.n[0].down_ns - begin_ns < 100 * MS);
	assert_int_equal(net.n[0].why.code, ERR_RESTART);
	for (int i = 0; i < 4; i++)
		snprintf(is + 2 * i, 3, "%02x", peers_instance(net.n[1].peers)[i]);
	assert_non_null(
		strstr(net.n[0].why.text, "peer user1 tcp://10.0.0.1:7400 instance "));
	assert_non_null(strstr(net.n[0].why.text, was));
	assert_non_null(strstr(net.n[0].why.text, is));
	assert_string_not_equal(was, is);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	assert_int_equal(peer->epoch, 2);
	peernet_run(3 * LOOP_NS_PER_S);
	assert_int_equal(net.n[0].downs, 1);
	assert_int_equal(net.n[0].refusals + net.n[1].refusals, 0);
}

/* The cable was out for a moment: the same daemon answers, and nothing changes. */
static void line_connected_again_to_the_same_daemon_changes_nothing(void **state)
{
	struct peer *peer = peernet_join();

	(void)state;
	for (int i = 0; i < 3; i++) {
		mem_hub_break(net.hub, peernet_endpoint(0), peernet_endpoint(1));
		peernet_run(100 * MS);
	}
	peernet_run(2 * LOOP_NS_PER_S);
	assert_int_equal(net.n[0].downs + net.n[1].downs, 0);
	assert_int_equal(peer->epoch, 1);
	assert_int_equal(peernet_lease(peer, 5, true), 0);
	peernet_run(10 * MS);
	assert_int_equal(net.n[1].messages, 1);
}

static void frames_of_old_epoch_are_ignored(void **state)
{
	struct peer *peer = peernet_join();
	unsigned int old;
	uint64_t before;

	(void)state;
	peernet_tap(&net.n[1]);
	for (unsigned int i = 0; i < 10; i++)
		assert_int_equal(peernet_lease(peer, i, true), 0);
	peernet_run(500 * MS);
	assert_int_equal(net.n[1].messages, 10);
	old = net.n[1].tap_count;
	peer_kill(peer, &(struct err){.code = ERR_TRANSPORT, .text = "x"});
	peernet_run(LOOP_NS_PER_S);
	assert_int_equal(peer->epoch, 2);
	before = net.n[1].peers->stats.stale_frames;
	for (unsigned int i = 0; i < old; i++)
		peernet_inject(&net.n[1], net.n[1].tap[i].data, net.n[1].tap[i].len,
			       net.n[1].tap[i].user);
	assert_int_equal(net.n[1].peers->stats.stale_frames, before + old);
	peernet_run(2 * LOOP_NS_PER_S);
	assert_int_equal(net.n[1].messages, 10);
	assert_int_equal(net.n[1].downs, 1);
	assert_int_equal(net.n[0].downs, 1);
}

/* ---- callbacks that act ---- */

static void hook_kill(struct peernet_node *node, struct peer *peer, const char *event)
{
	struct err why;

	(void)node;
	err_set(&why, ERR_TRANSPORT, "killed in %s", event);
	peer_kill(peer, &why);
}

static void hook_release(struct peernet_node *node, struct peer *peer, const char *event)
{
	(void)event;
	node->hook = NULL;
	peer_release(peer);
}

static void hook_close(struct peernet_node *node, struct peer *peer, const char *event)
{
	(void)peer;
	(void)event;
	node->hook = NULL;
	peers_close(node->peers, ERR_DRAIN, "closed in a callback");
}

static void hook_redial(struct peernet_node *node, struct peer *peer, const char *event)
{
	struct peer *again;

	if (strcmp(event, "down") != 0)
		return;
	node->hook = NULL;
	assert_int_equal(peers_dial(node->peers, peer->endpoint, NULL, &again), 0);
	assert_ptr_equal(again, peer);
}

static void callbacks_may_do_anything(void **state)
{
	static void (*const hooks[])(struct peernet_node *, struct peer *,
				     const char *) = {hook_kill, hook_release, hook_close,
						      hook_redial};

	(void)state;
	peernet_teardown(NULL);
	for (unsigned int who = 0; who < 2; who++) {
		for (unsigned int i = 0; i < ARRAY_LEN(hooks); i++) {
			peernet_open(i, 2);
			net.n[who].hook = hooks[i];
			if (who == 1 && hooks[i] == hook_release)
				net.n[who].hook = NULL; /* it holds nothing */
			peernet_dial(0, 1);
			peernet_run(300 * MS);
			peernet_crash(1, MEM_CRASH_KILLED);
			peernet_run(2 * LOOP_NS_PER_S);
			peernet_start(1);
			peernet_run(2 * LOOP_NS_PER_S);
			if (hooks[i] == hook_redial)
				assert_int_equal(sm_state(&peernet_only(0)->sm), PEER_UP);
			peernet_teardown(NULL);
		}
	}
	peernet_open(1, 2);
}

/* ---- our own lateness ---- */

static void burn(uint64_t ns)
{
	uint64_t end_ns = loop_clock_ns(net.loop) + ns;

	while (loop_clock_ns(net.loop) < end_ns)
		;
}

static void turn_for(uint64_t ns)
{
	uint64_t end_ns = loop_clock_ns(net.loop) + ns;

	while (loop_clock_ns(net.loop) < end_ns)
		loop_turn(net.loop, 5 * MS);
}

/* Both daemons run on this real loop: when it is stopped, neither is dead. */
static void stall_of_own_loop_keeps_peers(void **state)
{
	(void)state;
	peernet_teardown(NULL);
	memset(&net, 0, sizeof(net));
	peers_options_default(&net.options);
	net.options.ping_interval_ns = 30 * MS;
	net.options.dead_after_ns = 120 * MS;
	assert_int_equal(loop_new(&net.loop), 0);
	assert_int_equal(mem_hub_new(net.loop, &net.hub), 0);
	mem_hub_set_default(net.hub, &(struct mem_path){.delay_ns = PEERNET_DELAY_NS});
	peernet_start(0);
	peernet_start(1);
	peernet_dial(0, 1);
	while (!net.n[0].ups || !net.n[1].ups)
		loop_turn(net.loop, 5 * MS);
	for (unsigned int i = 0; i < 3; i++) {
		turn_for(50 * MS);
		burn(400 * MS);
	}
	turn_for(200 * MS);
	assert_int_equal(net.n[0].downs + net.n[1].downs, 0);
	/* but one that is dead is found dead, also behind a stall */
	link_mem_crash(net.n[1].link, MEM_CRASH_POWER);
	burn(200 * MS);
	uint64_t start_ns = loop_clock_ns(net.loop);

	while (!net.n[0].downs && loop_clock_ns(net.loop) < start_ns + 10 * LOOP_NS_PER_S)
		loop_turn(net.loop, 5 * MS);
	assert_int_equal(net.n[0].downs, 1);
	assert_true(net.n[0].down_ns - start_ns >= 100 * MS);
}

static void unread_frames_make_the_verdict_wait(void **state)
{
	(void)state;
	peernet_join();
	net.n[0].link->backlog = true;
	peernet_run(LOOP_NS_PER_S);
	uint64_t dead_ns = loop_now_ns(net.loop);

	peernet_crash(1, MEM_CRASH_POWER);
	peernet_run(1200 * MS);
	assert_int_equal(net.n[0].downs, 0);
	peernet_run(LOOP_NS_PER_S);
	assert_int_equal(net.n[0].downs, 1);
	assert_true(net.n[0].down_ns - dead_ns <= 1600 * MS + PEERNET_DELAY_NS);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, peernet_setup, peernet_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(dial_of_present_daemon_is_up_on_both_sides),
		TEST(dial_of_other_host_is_not_same_host),
		TEST(dial_before_daemon_exists_is_up_later),
		TEST(dial_of_bad_endpoint_refused),
		TEST(dial_twice_gives_one_held_peer),
		TEST(dial_from_both_sides_gives_one_peer),
		TEST(dial_of_self_loops_back),
		TEST(dial_of_self_by_another_name_is_found_out),
		TEST(dial_by_two_names_gives_one_up),
		TEST(dial_by_name_replaces_incoming_connection),
		TEST(messages_arrive_once_and_in_order),
		TEST(message_too_big_refused),
		TEST(reliable_waits_for_a_full_line_in_order),
		TEST(reliable_over_its_bound_takes_the_peer_down_later),
		TEST(bad_message_takes_the_peer_down_with_bye),
		TEST(line_losing_frames_ends_the_peering),
		TEST(close_sends_bye_with_reason),
		TEST(kill_redials_while_held),
		TEST(release_of_idle_peer_sends_bye_in_time),
		TEST(release_while_dialling_frees_it),
		TEST(silence_is_death_within_the_bound),
		TEST(partition_is_detected_by_both_and_heals),
		TEST(restart_takes_the_old_instance_down_first),
		TEST(line_half_open_out_is_detected_by_both),
		TEST(line_half_open_is_detected_in_time),
		TEST(slow_line_is_not_dead),
		TEST(line_half_open_in_is_detected_by_both),
		TEST(restart_is_found_by_redialling),
		TEST(restart_is_found_when_the_line_connects_again),
		TEST(line_connected_again_to_the_same_daemon_changes_nothing),
		TEST(frames_of_old_epoch_are_ignored),
		TEST(callbacks_may_do_anything),
		TEST(stall_of_own_loop_keeps_peers),
		TEST(unread_frames_make_the_verdict_wait),
	};

	log_set_level(LOG_LEVEL_ERROR);
	return cmocka_run_group_tests_name("peer", tests, NULL, NULL);
}
