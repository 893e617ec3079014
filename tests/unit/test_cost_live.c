/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a daemon measures, and what its page then says: echoes, pulls of one size and of
 * many, rounds that drift, peers that go and come; each function without memory.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/cost/live.h"

#define NOW 100u

static const uint8_t key[COST_KEY_BYTES] = {7};
static const struct live_way way = {.key = key, .transport = "tcp", .now_s = NOW};

static int setup(void **state)
{
	struct live *live;

	assert_int_equal(live_new(&live), 0);
	*state = live;
	return 0;
}

static int teardown(void **state)
{
	live_free(*state);
	return 0;
}

/* fixed us, and B/us, with a little scatter. */
static void measure(struct fit *fit, double fixed, double rate)
{
	static const double bytes[] = {0, 2304, 36864, 294912};

	for (unsigned int i = 0; i < 4; i++)
		for (int n = -2; n <= 2; n++)
			assert_true(fit_add(fit, bytes[i],
					    (fixed + bytes[i] / rate) * (1 + 0.01 * n)));
}

static void calibrated(struct live *live, double fixed, double rate)
{
	struct fit fit = {.count = 0};

	measure(&fit, fixed, rate);
	assert_int_equal(live_echoes(live, &way, &fit), 0);
}

static struct cost_peer told(const struct live *live)
{
	struct cost_peer peer;

	assert_int_equal(cost_page_peer(live_page(live), key, &peer), 0);
	return peer;
}

/* How attention was lately, of a peer or of home. */
static struct cost_figure lately(const struct live *live, const uint8_t *of,
				 const struct cost_shape *shape)
{
	struct cost_speed speed;

	assert_int_equal(cost_page_speed(live_page(live), of, shape, COST_HOST, &speed),
			 0);
	return speed.attend;
}

static void near(double value, double want, double part)
{
	if (fabs(value - want) > part * want)
		fail_msg("%g is not %g", value, want);
}

static void echoes_price_pulls_with_uncertainty(void **state)
{
	struct live *live = *state;
	struct cost_peer peer;

	assert_false(live_knows(live, key));
	calibrated(live, 20, 2000);
	assert_true(live_knows(live, key));
	peer = told(live);
	assert_int_equal(peer.link_count, 1);
	assert_string_equal(peer.links[0].name, "tcp");
	near(peer.links[0].probe.value, 20, 0.01);
	near(peer.links[0].bandwidth.value, 2000, 0.01);
	near(peer.links[0].pull_probe.value, 20, 0.01);
	near(peer.links[0].pull_bandwidth.error, 1000, 0.01);
	assert_int_equal(peer.stale, 0);
}

static void echoes_not_growing_are_refused(void **state)
{
	struct live *live = *state;
	struct cost_peer peer;
	struct fit fit = {.count = 0};

	assert_true(fit_add(&fit, 0, 20) && fit_add(&fit, 1000, 10));
	assert_true(live_echoes(live, &way, &fit) < 0);
	assert_int_equal(err_last()->code, ERR_STATE);
	assert_int_equal(cost_page_peer(live_page(live), key, &peer), COST_PAGE_NONE);
}

static void pulls_of_many_sizes_make_a_line(void **state)
{
	struct live *live = *state;
	struct cost_peer peer;

	for (unsigned int i = 0; i < 200; i++) {
		double bytes = 65536.0 * (1 + i % 40);

		live_pull(live, &way, bytes,
			  (80 + bytes / 3000) * (1 + 0.02 * ((int)(i % 3) - 1)));
	}
	peer = told(live);
	near(peer.links[0].pull_probe.value, 80, 0.3);
	near(peer.links[0].pull_bandwidth.value, 3000, 0.05);
	assert_true(peer.links[0].pull_bandwidth.error < 300);
	assert_int_equal(peer.links[0].probe.count, 0); /* no echo came: no routing */
}

static void pulls_of_one_size_make_a_rate(void **state)
{
	struct live *live = *state;
	struct cost_peer peer;

	calibrated(live, 20, 2000);
	for (unsigned int i = 0; i < 10; i++)
		live_pull(live, &way, 1 << 20, 20 + (1 << 20) / 3000.0);
	peer = told(live);
	near(peer.links[0].pull_bandwidth.value, 3000, 0.01);
	near(peer.links[0].pull_probe.value, 20, 0.01);
	assert_int_equal(peer.links[0].pull_probe.count, 10);
	/* and a network that has changed shows */
	for (unsigned int i = 0; i < 100; i++)
		live_pull(live, &way, 1 << 20, 20 + (1 << 20) / 1000.0);
	near(told(live).links[0].pull_bandwidth.value, 1000, 0.02);
	/* what is no measurement changes nothing */
	live_pull(live, &way, 0, 5);
	live_pull(live, &way, 5, 0);
	near(told(live).links[0].pull_bandwidth.value, 1000, 0.02);
}

static void rounds_slower_raise_congestion(void **state)
{
	struct live *live = *state;
	struct live_round round = {.shape = cost_shape_mla(16, 576, 512, 2, 4),
				   .query = 1,
				   .tokens = 1024,
				   .bytes = 16 * (1152 + 2056),
				   .queue_us = 5,
				   .attend_us = 40};
	double way_us = 20 + round.bytes / 2000;
	unsigned int n = 0;

	assert_false(live_round(live, &way, &round)); /* nobody knows this peer */
	calibrated(live, 20, 2000);
	round.us = way_us + 45;
	assert_false(live_round(live, &way, &round));
	near(told(live).links[0].congestion.value, 1, 0.02);
	near(told(live).wait[COST_HOST].value, 5, 0.02);
	round.us = 20 * way_us + 45;
	/* congestion is in the price: it predicts soon, again */
	while (!live_round(live, &way, &round) && n < 1000)
		n++;
	assert_int_equal(n, 1000);
	assert_false(live_stale(live, key));
	near(told(live).links[0].congestion.value, 20, 0.02);
	calibrated(live, 20, 2000);
	assert_int_equal(told(live).links[0].congestion.count, 0);
}

/* Rows wake a thread, which echoes do not: 20 us of an echo are 70 of a round. */
static void rounds_of_several_sizes_give_turn_time(void **state)
{
	struct live *live = *state;
	struct live_round round = {.shape = cost_shape_mla(16, 576, 512, 2, 4),
				   .query = 1,
				   .tokens = 1024,
				   .queue_us = 5,
				   .attend_us = 40};

	calibrated(live, 20, 2000);
	for (unsigned int i = 0; i < 200; i++) {
		round.bytes = (double)(1 + i % 8) * 16 * (1152 + 2056);
		round.us = (70 + round.bytes / 2000) * 1.5 + 45;
		live_round(live, &way, &round);
	}
	near(told(live).links[0].turn.value, 50, 0.02);
	near(told(live).links[0].congestion.value, 1.5, 0.02);
	calibrated(live, 20, 2000);
	near(told(live).links[0].turn.value + 1, 1, 0);
}

static double drawn(uint64_t *dice)
{
	*dice ^= *dice << 13;
	*dice ^= *dice >> 7;
	*dice ^= *dice << 17;
	return (double)(*dice >> 11) / (double)(UINT64_C(1) << 53);
}

/* Two sizes whose times scatter more than they differ: a line through a dozen of them is
 * often level, or falls. */
static void noisy_rounds(struct live *live, double rate)
{
	static const double sizes[] = {51328, 102656}, jitter = 20;
	struct live_round round = {.shape = cost_shape_mla(16, 576, 512, 2, 4),
				   .query = 1,
				   .tokens = 1024,
				   .attend_us = 40};
	uint64_t dice = 88172645463325252u;

	calibrated(live, 20, rate);
	for (unsigned int i = 0; i < 20000; i++) {
		struct cost_peer peer;
		struct cost_holder holder = {.links = peer.links, .link_count = 1};
		const struct cost_link *link;

		round.bytes = sizes[drawn(&dice) < 0.5];
		round.us = 70 + round.bytes / rate + round.attend_us -
			   jitter * log(1 - drawn(&dice));
		live_round(live, &way, &round);
		peer = told(live);
		for (unsigned int n = 0; n < 2 && i >= 32; n++) {
			double us = cost_transfer(&holder, sizes[n], &link).us;
			double want = 70 + jitter + sizes[n] / rate;

			if (us > 2 * want || us < want / 2)
				fail_msg("round %u: %g us, not %g", i, us, want);
		}
		if (i >= 32) {
			assert_true(peer.links[0].turn.error > 0);
			assert_true(peer.links[0].turn.value < 200);
		}
	}
}

static void noise_of_two_sizes_prices_no_round_wrong(void **state)
{
	noisy_rounds(*state, 2000);
	noisy_rounds(*state, 6000);
}

/* What a pull took has the congestion in it: it is not counted twice. */
static void pulls_prices_ignore_congestion(void **state)
{
	struct live *live = *state;
	struct live_round round = {.shape = cost_shape_mla(16, 576, 512, 2, 4),
				   .query = 1,
				   .tokens = 1024,
				   .bytes = 16 * (1152 + 2056),
				   .attend_us = 40};
	struct cost_holder holder = {.link_count = 1};
	struct cost_peer peer;

	calibrated(live, 20, 2000);
	for (unsigned int i = 0; i < 100; i++) {
		double bytes = 1e6 * (1 + i % 9);

		live_pull(live, &way, bytes, 300 + bytes / 3000);
	}
	round.us = 7 * (20 + round.bytes / 2000) + 40;
	for (unsigned int i = 0; i < 100; i++)
		live_round(live, &way, &round);
	peer = told(live);
	near(peer.links[0].congestion.value, 7, 0.02);
	holder.links = peer.links;
	near(cost_pull(&holder, 3e6).us, 1300, 0.02);
	calibrated(live, 20, 2000);
	peer = told(live);
	near(cost_pull(&holder, 3e6).us, 1300, 0.02);
}

/* Who was alone, and then is one of many, and alone again. */
static void rounds_report_requester_count(void **state)
{
	struct live *live = *state;
	struct live_round round = {.shape = cost_shape_mla(16, 576, 512, 2, 4),
				   .query = 1,
				   .tokens = 1024,
				   .bytes = 16 * (1152 + 2056),
				   .us = 100,
				   .attend_us = 40,
				   .requesters = 1};

	calibrated(live, 20, 2000);
	live_round(live, &way, &round);
	near(told(live).requesters[COST_HOST], 1, 0);
	round.requesters = 24;
	for (unsigned int i = 0; i < 16; i++) {
		live_round(live, &way, &round);
		live_pull(live, &way, 1e6, 100); /* tells nothing of it */
	}
	assert_true(told(live).requesters[COST_HOST] > COST_FAN_IN_FLAT);
	for (unsigned int i = 0; i < 100; i++)
		live_round(live, &way, &round);
	near(told(live).requesters[COST_HOST], 24, 0.01);
	round.requesters = 1;
	for (unsigned int i = 0; i < 200; i++)
		live_round(live, &way, &round);
	near(told(live).requesters[COST_HOST], 1, 0.01);
}

/* It is in the price of that holder, and no calibration is needed, nor would help. */
static void rounds_with_another_kernel_speed_make_a_factor(void **state)
{
	struct live *live = *state;
	const struct cost_shape shape = cost_shape_mla(16, 576, 512, 2, 4);
	const struct cost_compute compute = {.fixed = cost_known(10),
					     .memory = cost_known(10000),
					     .flops = cost_known(1e6)};
	struct live_round round = {.shape = shape,
				   .query = 1,
				   .tokens = 2048,
				   .bytes = 16 * (1152 + 2056),
				   .requesters = 1};
	double plain = cost_attend(&compute, &shape, 1, 2048, false).us;

	calibrated(live, 20, 2000);
	assert_int_equal(live_speed(live, key, &shape, COST_HOST, &compute), 0);
	assert_int_equal(lately(live, key, &shape).count, 0);
	round.attend_us = 7 * plain;
	round.us = 20 + round.bytes / 2000 + round.attend_us;
	for (unsigned int i = 0; i < 1000; i++)
		assert_false(live_round(live, &way, &round));
	near(lately(live, key, &shape).value, 7, 0.01);
	assert_int_equal(told(live).stale, 0);
	calibrated(live, 20, 2000); /* speeds are not measured anew; and if they are */
	assert_int_equal(live_speed(live, key, &shape, COST_HOST, &compute), 0);
	near(lately(live, key, &shape).value, 7, 0.01);
	/* a call of many takes as long as decisions price it */
	round.requesters = 4 * COST_FAN_IN_FLAT;
	round.attend_us = 4 * plain;
	for (unsigned int i = 0; i < 200; i++)
		live_round(live, &way, &round);
	near(lately(live, key, &shape).value, 1, 0.01);
	/* what a peer says of itself has bounds, and a kernel of no time is not unknown
	 */
	round.attend_us = 4e9;
	round.us = 5e9;
	for (unsigned int i = 0; i < 200; i++)
		live_round(live, &way, &round);
	assert_true(lately(live, key, &shape).value <= 1000);
	round.attend_us = 0;
	for (unsigned int i = 0; i < 1000; i++)
		live_round(live, &way, &round);
	assert_true(lately(live, key, &shape).value > 0 &&
		    lately(live, key, &shape).value < 0.01);
}

/* What was measured of one transport says nothing of the next. */
static void other_transport_is_another_link(void **state)
{
	static const struct live_way shm = {.key = key, .transport = "shm", .now_s = NOW};
	struct live *live = *state;
	struct cost_peer peer;

	calibrated(live, 20, 2000);
	for (unsigned int i = 0; i < 10; i++)
		live_pull(live, &way, 1e6, 1e5);
	live_pull(live, &shm, 1e6, 100);
	peer = told(live);
	assert_int_equal(peer.link_count, 1);
	assert_string_equal(peer.links[0].name, "shm");
	assert_false(live_knows(live, key));
	near(peer.links[0].pull_bandwidth.value, 1e4, 1e-6);
}

/* Whatever the times, no constant of a pull is negative. */
static void pulls_on_no_line_have_constants(void **state)
{
	struct live *live = *state;
	struct cost_link link;

	for (unsigned int i = 0; i < 20; i++) /* through -500 us at 0 bytes */
		live_pull(live, &way, i % 2 ? 1e6 : 2e6, i % 2 ? 500 : 1500);
	link = told(live).links[0];
	assert_true(link.pull_probe.value >= 0 && link.pull_bandwidth.value > 0);
	live_drop(live, key);
	calibrated(live, 1000, 2000); /* an echo takes longer than the pulls */
	for (unsigned int i = 0; i < 20; i++)
		live_pull(live, &way, 1e6, 100);
	link = told(live).links[0];
	assert_true(link.pull_probe.value >= 0 && link.pull_bandwidth.value > 0);
}

/* The first rounds after a calibration tell no turn, and those before it are no more. */
static void calibration_restarts_the_turn(void **state)
{
	struct live *live = *state;
	struct live_round round = {
		.shape = cost_shape_mla(16, 576, 512, 2, 4), .query = 1, .tokens = 1024};

	for (unsigned int k = 0; k < 2; k++) {
		calibrated(live, 20, 2000);
		for (unsigned int i = 0; i < 4; i++) {
			assert_true(told(live).links[0].turn.value == 0);
			round.bytes = (1 + i) * 51328.0;
			round.us = 70 + round.bytes / 2000;
			live_round(live, &way, &round);
		}
		assert_true(told(live).links[0].turn.value > 0);
	}
}

/* A holder that says it took longer than the round did tells nothing of the way. */
static void rounds_without_path_time_change_nothing(void **state)
{
	struct live *live = *state;
	struct live_round round = {.shape = cost_shape_mla(16, 576, 512, 2, 4),
				   .query = 1,
				   .tokens = 1024,
				   .bytes = 51328,
				   .us = 50,
				   .attend_us = 4e9,
				   .queue_us = 4e9};

	calibrated(live, 20, 2000);
	for (unsigned int i = 0; i < 3 * FIT_DRIFT_RUN; i++)
		assert_false(live_round(live, &way, &round));
	assert_int_equal(told(live).links[0].congestion.count, 0);
	round.attend_us = round.queue_us = 0;
	round.us = 1e15;
	live_round(live, &way, &round);
	assert_true(told(live).links[0].congestion.value == 1e3);
}

/* A way that is now this and now that: its mean predicts none of the two. */
static void paths_with_jumps_are_stale(void **state)
{
	struct live *live = *state;
	struct live_round round = {.shape = cost_shape_mla(16, 576, 512, 2, 4),
				   .query = 1,
				   .tokens = 2048,
				   .bytes = 16 * (1152 + 2056),
				   .attend_us = 2000};
	double plain = 20 + round.bytes / 2000;
	unsigned int n = 0;

	calibrated(live, 20, 2000);
	round.us = plain + 2000;
	live_round(live, &way, &round);
	do
		round.us = (n % 2 ? 1 : 20) * plain + 2000;
	while (!live_round(live, &way, &round) && ++n < 1000);
	assert_int_equal(n, FIT_DRIFT_RUN - 1);
	assert_int_equal(told(live).stale, 1);
	assert_true(live_stale(live, key));
	assert_false(live_round(live, &way, &round)); /* told once */
	calibrated(live, 20, 2000);
	assert_int_equal(told(live).stale, 0);
}

/* And is told when: who may not ask now asks then. */
static void peer_is_queried_periodically_even_if_gone(void **state)
{
	struct live *live = *state;
	struct cost_peer peer;

	assert_int_equal(live_ask(live, key, 1000, 60), 0);
	assert_int_equal(live_ask(live, key, 1010, 60), 50);
	calibrated(live, 20, 2000);
	live_drop(live, key);
	assert_int_equal(cost_page_peer(live_page(live), key, &peer), COST_PAGE_NONE);
	assert_false(live_knows(live, key));
	assert_int_equal(live_ask(live, key, 1059, 60), 1);
	assert_int_equal(live_ask(live, key, 1060, 60), 0);
	live_no_attend(live, key, COST_HOST, true);
	assert_int_equal(cost_page_peer(live_page(live), key, &peer), COST_PAGE_NONE);
	live_drop(live, key);
	live_drop(live, key);
}

static void peers_gone_are_replaced(void **state)
{
	struct live *live = *state;
	struct fit fit = {.count = 0};

	measure(&fit, 20, 2000);
	for (unsigned int i = 0; i < 3 * COST_PAGE_PEERS; i++) {
		uint8_t other[COST_KEY_BYTES] = {1, (uint8_t)i, (uint8_t)(i >> 8)};
		const struct live_way w = {other, "shm", NOW};

		assert_int_equal(live_ask(live, other, 1000, 60), 0);
		assert_int_equal(live_echoes(live, &w, &fit), 0);
		if (i % 2)
			live_drop(live, other);
		if (i >= COST_PAGE_PEERS) {
			uint8_t old[COST_KEY_BYTES] = {1};
			unsigned int n = i - COST_PAGE_PEERS;

			memcpy(old + 1, (uint8_t[]){(uint8_t)n, (uint8_t)(n >> 8)}, 2);
			live_drop(live, old);
		}
	}
	for (unsigned int i = 0; i < COST_PAGE_PEERS; i++) {
		uint8_t other[COST_KEY_BYTES] = {2, (uint8_t)i};
		const struct live_way w = {other, "shm", NOW};
		int r = live_echoes(live, &w, &fit);

		if (r < 0) {
			assert_int_equal(err_last()->code, ERR_LIMIT);
			return;
		}
	}
	fail_msg("the page has no end");
}

static void speeds_and_home_are_in_the_page(void **state)
{
	struct live *live = *state;
	const struct cost_shape shape = cost_shape_gqa(32, 8, 128, 128, 2, 4);
	const struct cost_compute compute = {
		.fixed = cost_known(3), .memory = cost_known(5), .flops = cost_known(9)};
	const struct cost_home home = {.merge = cost_known(1)};
	struct cost_home seen_home;
	struct cost_speed seen;
	unsigned int at = 0;

	assert_int_equal(live_speed(live, cost_self, &shape, COST_HOST, &compute), 0);
	assert_int_equal(
		cost_page_speed(live_page(live), cost_self, &shape, COST_HOST, &seen), 0);
	near(seen.compute.flops.value, 9, 1e-9);
	assert_true(cost_page_speed_at(live_page(live), &at, &seen));
	assert_false(cost_page_speed_at(live_page(live), &at, &seen));
	live_home(live, &home);
	assert_int_equal(cost_page_home(live_page(live), &seen_home), 0);
	near(seen_home.merge.value, 1, 1e-9);
}

/* What was measured twice is as sure as the two agree. */
static void speeds_changed_have_larger_error(void **state)
{
	struct live *live = *state;
	const struct cost_shape shape = cost_shape_gqa(32, 8, 128, 128, 2, 4);
	struct cost_compute compute = {.fixed = cost_known(3),
				       .row = cost_known(1),
				       .memory = cost_known(5000),
				       .flops = cost_known(900)};
	struct cost_home home = {.merge = cost_known(1), .splice_token = cost_known(2)};
	struct cost_home seen_home;
	struct cost_speed seen;

	for (unsigned int i = 0; i < 2; i++) {
		assert_int_equal(live_speed(live, cost_self, &shape, COST_HOST, &compute),
				 0);
		live_home(live, &home);
		assert_int_equal(cost_page_speed(live_page(live), cost_self, &shape,
						 COST_HOST, &seen),
				 0);
		assert_true(seen.compute.flops.error == 0);
	}
	compute.flops.value = 600;
	compute.fixed.value = 7;
	home.splice_token.value = 5;
	assert_int_equal(live_speed(live, cost_self, &shape, COST_HOST, &compute), 0);
	live_home(live, &home);
	assert_int_equal(
		cost_page_speed(live_page(live), cost_self, &shape, COST_HOST, &seen), 0);
	near(seen.compute.flops.error, 300, 1e-9);
	near(seen.compute.fixed.error, 4, 1e-9);
	assert_true(seen.compute.row.error == 0);
	assert_int_equal(cost_page_home(live_page(live), &seen_home), 0);
	near(seen_home.splice_token.error, 3, 1e-9);
	assert_true(seen_home.merge.error == 0);
}

/* What is attended to here makes home's factor, as rounds make a holder's, and of its own
 * geometry alone. */
static void rows_at_home_make_its_factor(void **state)
{
	struct live *live = *state;
	const struct cost_shape shape = cost_shape_gqa(32, 8, 128, 128, 2, 4);
	const struct cost_shape other = cost_shape_mla(16, 576, 512, 2, 4);
	const struct cost_compute compute = {.fixed = cost_known(3),
					     .memory = cost_known(5e3),
					     .flops = cost_known(9e5)};
	struct live_round round = {
		.shape = shape, .query = 1, .tokens = 500, .requesters = 1};

	round.attend_us = 3 * cost_attend(&compute, &shape, 1, 500, false).us;
	live_home_round(live, &round, NOW); /* of no known speed */
	assert_int_equal(live_speed(live, cost_self, &shape, COST_HOST, &compute), 0);
	assert_int_equal(live_speed(live, cost_self, &other, COST_HOST, &compute), 0);
	assert_int_equal(lately(live, cost_self, &shape).count, 0);
	for (unsigned int i = 0; i < 200; i++)
		live_home_round(live, &round, NOW);
	assert_int_equal(live_speed(live, cost_self, &shape, COST_HOST, &compute), 0);
	near(lately(live, cost_self, &shape).value, 3, 0.01);
	assert_int_equal(lately(live, cost_self, &other).count, 0);
}

static void peer_without_memory_is_refused(void **state)
{
	struct live *live = *state, *other;
	struct fit fit = {.count = 0};

	measure(&fit, 20, 2000);
	mem_fail_at(1);
	assert_true(live_echoes(live, &way, &fit) < 0);
	mem_fail_at(1);
	live_pull(live, &way, 1000, 10);
	mem_fail_at(1);
	assert_int_equal(live_ask(live, key, 5, 1), 1);
	for (unsigned int n = 1; n <= 2; n++) {
		mem_fail_at(n);
		assert_true(live_new(&other) < 0);
	}
	mem_fail_at(0);
	err_clear();
	calibrated(live, 20, 2000);
	live_free(NULL);
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(echoes_price_pulls_with_uncertainty),
		CASE(echoes_not_growing_are_refused),
		CASE(pulls_of_many_sizes_make_a_line),
		CASE(pulls_of_one_size_make_a_rate),
		CASE(rounds_slower_raise_congestion),
		CASE(rounds_of_several_sizes_give_turn_time),
		CASE(noise_of_two_sizes_prices_no_round_wrong),
		CASE(pulls_prices_ignore_congestion),
		CASE(rounds_report_requester_count),
		CASE(rounds_with_another_kernel_speed_make_a_factor),
		CASE(other_transport_is_another_link),
		CASE(pulls_on_no_line_have_constants),
		CASE(calibration_restarts_the_turn),
		CASE(rounds_without_path_time_change_nothing),
		CASE(paths_with_jumps_are_stale),
		CASE(peer_is_queried_periodically_even_if_gone),
		CASE(peers_gone_are_replaced),
		CASE(speeds_and_home_are_in_the_page),
		CASE(speeds_changed_have_larger_error),
		CASE(rows_at_home_make_its_factor),
		CASE(peer_without_memory_is_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
