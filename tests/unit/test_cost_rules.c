/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What must follow from the closed form, on random inputs. No line of the model says any
 * of these rules; each is written here as the publication or the derivation in
 * docs/route.md states it.
 */
#include "daemon/cost/cost.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/lib/cost_setup.h"

#define ROUNDS 2000

static uint64_t dice = UINT64_C(0x9e3779b97f4a7c15);

/* Evenly in the logarithm. */
static double between(double low, double high)
{
	dice ^= dice << 13;
	dice ^= dice >> 7;
	dice ^= dice << 17;
	return low * pow(high / low, (double)(dice >> 11) * 0x1p-53);
}

static double whole(double low, double high)
{
	return floor(between(low, high + 0.999));
}

static bool flip(void)
{
	return between(1, 4) < 2;
}

/* Two sums of the same terms in another order. */
static void assert_near(double a, double b)
{
	if (fabs(a - b) > 1e-9 * (fabs(a) + fabs(b)) + 1e-9)
		fail_msg("%.17g is not %.17g", a, b);
}

static void link_draw(struct cost_link *link)
{
	double probe = between(0.5, 100), rate = between(100, 50e3);

	*link = (struct cost_link){.probe = cost_known(probe),
				   .bandwidth = cost_known(rate),
				   .pull_probe = cost_known(probe),
				   .pull_bandwidth = cost_known(rate)};
}

/* Any request, model and fabric; home and holders alike. */
static void draw(struct cost_setup *s)
{
	double dqk = whole(32, 600);

	setup_make(s, "h100-ibgda", &setup_v2_lite, whole(16, 200e3));
	s->c.shape = flip() ? cost_shape_mla((uint32_t)whole(1, 128), (uint32_t)dqk,
					     (uint32_t)whole(16, dqk), 2, flip() ? 2 : 4)
			    : cost_shape_gqa(32, (uint32_t)whole(1, 32), (uint32_t)dqk,
					     (uint32_t)dqk, 2, 2);
	link_draw(&s->link);
	s->link.turn = cost_known(between(0.1, 20));
	s->compute = (struct cost_compute){.fixed = cost_known(between(0.1, 50)),
					   .row = cost_known(between(1e-3, 1)),
					   .memory = cost_known(between(1e4, 3e6)),
					   .flops = cost_known(between(1e5, 1e9)),
					   .gather = cost_known(between(1, 4))};
	s->c.home.merge = cost_known(between(0.1, 10));
	s->c.home.merge_row = cost_known(between(1e-4, 0.1));
	s->c.home.splice_token = cost_known(between(1e-5, 0.1));
	s->c.layers = whole(1, 80);
	s->c.steps = whole(1, 5000);
	s->c.query = whole(1, 32);
	s->c.shifted = flip();
	s->c.recompute = flip() ? between(0.01, 2) : 0;
}

/* One layer and step, the same link for both, nothing but bytes and attention. */
static void draw_plain(struct cost_setup *s)
{
	draw(s);
	s->link.turn = cost_known(0);
	s->c.home = (struct cost_home){.merge = cost_known(0)};
	s->c.layers = s->c.steps = 1;
	s->c.recompute = 0;
}

static enum cost_way way_of(const struct cost_setup *s)
{
	struct cost_prices p = setup_prices(s);

	return cost_choose(&p, COST_NONE).way;
}

/* ---- the six ---- */

static void route_holds_until_the_queries_outweigh_the_chunk(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < ROUNDS; i++) {
		struct cost_setup s;
		double row, rows, even;

		draw_plain(&s);
		row = s.c.shape.q_bytes + (double)s.c.shape.partial_bytes;
		even = s.c.shape.token_bytes * s.holders[0].tokens / row;
		rows = even * between(0.1, 10);
		s.c.query = rows / s.c.shape.heads;
		if (fabs(rows / even - 1) > 1e-3)
			assert_int_equal(way_of(&s),
					 rows < even ? COST_ROUTE : COST_FETCH);
	}
}

static void fetch_is_amortised_and_wins_past_the_break_even(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < ROUNDS; i++) {
		struct cost_setup s;
		struct cost_prices p, q;
		double home;

		draw(&s);
		s.c.recompute = 0;
		p = setup_prices(&s);
		home = s.c.layers * p.attend.us;
		assert_near(p.fetch.us / s.c.steps - home, p.once.us / s.c.steps);
		s.c.steps *= 2;
		q = setup_prices(&s);
		assert_near(q.once.us, p.once.us);
		assert_near(q.route.us, 2 * p.route.us);
		assert_near(q.even, p.even);
		if (fabs(s.c.steps / p.even - 1) > 1e-6)
			assert_int_equal(way_of(&s),
					 s.c.steps > p.even ? COST_FETCH : COST_ROUTE);
	}
}

/* Of two ways that bring KV home the one with the fixed costs wins large chunks. */
static void local_is_for_small_chunks(void **state)
{
	unsigned int seen = 0;

	(void)state;
	for (unsigned int i = 0; i < ROUNDS; i++) {
		struct cost_setup s;
		struct cost_prices p;
		double a_token;

		draw(&s);
		a_token = s.c.shape.token_bytes / s.link.pull_bandwidth.value +
			  s.c.home.splice_token.value;
		s.c.recompute = a_token * between(1.1, 20); /* else always */
		p = setup_prices(&s);
		if (p.local.us < p.fetch.us) {
			seen++;
			s.holders[0].tokens /= 2;
			p = setup_prices(&s);
			assert_true(p.local.us < p.fetch.us);
		}
		s.holders[0].tokens = 1e9;
		p = setup_prices(&s);
		assert_true(p.local.us > p.fetch.us);
		s.c.recompute = 0;
		assert_int_not_equal(way_of(&s), COST_LOCAL);
	}
	assert_true(seen > ROUNDS / 20);
}

static void congestion_changes_no_decision(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < ROUNDS; i++) {
		struct cost_setup s;
		enum cost_way before;
		struct cost_prices p;

		draw_plain(&s);
		before = way_of(&s);
		s.link.congestion = cost_known(between(1, 2.2));
		assert_int_equal(way_of(&s), before);

		/* one layer's rows beside the splice of 27, as they were compared */
		setup_make(&s, "h100-ibgda", &setup_v2_lite, whole(256, 8192));
		s.c.query = between(1, 1024) / s.c.shape.heads;
		s.link.congestion = cost_known(2.2);
		p = setup_prices(&s);
		assert_true(p.round.us < cost_splice(&s.c.home, 27, 2048).us / 8);
	}
}

static void probe_beats_bandwidth_for_few_rows(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < ROUNDS; i++) {
		struct cost_link links[2];
		struct cost_holder holder = {.links = links, .link_count = 2};
		const struct cost_link *link;
		double even, bytes;

		link_draw(&links[0]);
		links[1] = links[0];
		links[1].probe.value *= between(1.1, 20); /* wider, and slower to begin */
		links[1].bandwidth.value *= between(1.1, 20);
		even = (links[1].probe.value - links[0].probe.value) /
		       (1 / links[0].bandwidth.value - 1 / links[1].bandwidth.value);
		bytes = even * between(0.01, 100);
		cost_transfer(&holder, bytes, &link);
		if (fabs(bytes / even - 1) > 1e-6)
			assert_ptr_equal(link, &links[bytes > even]);
	}
}

static void selection_routes_flat_and_gathers_by_holder(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < ROUNDS; i++) {
		struct cost_setup s;
		struct cost_prices one, p;

		draw(&s);
		s.c.selected = true;
		s.c.home.merge_row = cost_known(0);
		s.holders[0].selected = fmin(whole(64, 4096), s.holders[0].tokens);
		one = setup_prices(&s);
		for (unsigned int n = 2; n <= 7; n++) {
			double more = (n - 1) * s.link.pull_probe.value;

			setup_spread(&s, n);
			p = setup_prices(&s);
			assert_true(p.round.us <= one.round.us * (1 + 1e-12));
			assert_near(p.fetch.us,
				    one.fetch.us + s.c.steps * s.c.layers * more);
		}
	}
}

/* ---- and these ---- */

static void holder_without_attention_is_fetched_from(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < ROUNDS; i++) {
		struct cost_setup s;
		struct cost_prices p;

		draw(&s);
		s.c.recompute = 0;
		setup_spread(&s, 3);
		s.holders[1].compute = NULL;
		p = setup_prices(&s);
		assert_true(isinf(p.route.us));
		assert_true(p.even == 0);
		assert_int_equal(cost_choose(&p, COST_ROUTE).way, COST_FETCH);
		assert_false(cost_choose(&p, COST_ROUTE).sure); /* perhaps it can */
		s.holders[1].no_attend = true;
		p = setup_prices(&s);
		assert_true(cost_choose(&p, COST_ROUTE).sure);
		s.c.no_pages = true;
		assert_int_equal(way_of(&s), COST_NONE);
		setup_spread(&s, 3);
		assert_int_equal(way_of(&s), COST_ROUTE);
	}
}

static void busy_holder_is_repriced_and_to_be_replicated(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < ROUNDS; i++) {
		struct cost_setup s;
		struct cost_prices one, p;
		double n = whole(2, 64);

		draw(&s);
		one = setup_prices(&s);
		s.holders[0].requesters = n;
		p = setup_prices(&s);
		assert_true(p.replicate == (n > 8));
		assert_near(p.round.us - one.round.us,
			    one.attend.us * (fmax(1, n / 8) - 1));
		assert_near(p.fetch.us, one.fetch.us);
		setup_spread(&s, 2);
		s.holders[1].requesters = 9;
		assert_true(setup_prices(&s).replicate);
		assert_int_equal(setup_prices(&s).slowest, 1);
	}
}

/* Layers, steps, heads and the attention at home are in each way's price. */
static void layers_steps_heads_and_home_count(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < ROUNDS; i++) {
		struct cost_setup s;
		struct cost_prices p, q;
		double rows, more;

		draw(&s);
		s.c.recompute = between(0.01, 2);
		p = setup_prices(&s);
		s.c.layers *= 2;
		q = setup_prices(&s);
		assert_near(q.route.us, 2 * p.route.us);
		assert_near(q.local.us, 2 * p.local.us);
		assert_near(q.fetch.us + s.link.pull_probe.value, 2 * p.fetch.us);
		s.c.layers /= 2;

		s.c.attend_us = p.attend.us + 7; /* at home alone */
		q = setup_prices(&s);
		more = 7 * s.c.layers * s.c.steps;
		assert_near(q.fetch.us - p.fetch.us, more);
		assert_near(q.local.us - p.local.us, more);
		assert_near(q.route.us, p.route.us);
		s.c.attend_us = 0;

		s.compute.flops = s.compute.memory = cost_known(1e30);
		p = setup_prices(&s);
		rows = s.c.query * s.c.shape.heads;
		s.c.shape.heads *= 2;
		q = setup_prices(&s);
		more = rows * ((s.c.shape.q_bytes + (double)s.c.shape.partial_bytes) /
				       s.link.bandwidth.value +
			       s.c.home.merge_row.value + s.compute.row.value);
		assert_near(q.round.us - p.round.us, more);
	}
}

/* Each term once, with numbers that no other term has; the sums are worked out by hand.
 */
static void every_term_is_in_the_sums(void **state)
{
	static const double tokens[] = {5, 7, 9};
	struct cost_prices p;
	struct cost_setup s;

	(void)state;
	setup_make(&s, "h100-ibgda", &setup_v2_lite, 1);
	s.c.shape = (struct cost_shape){.heads = 4,
					.kv_heads = 1,
					.dqk = 8,
					.dv = 4,
					.q_bytes = 16,
					.partial_bytes = 12,
					.token_bytes = 16};
	s.link = (struct cost_link){.probe = cost_known(1),
				    .turn = cost_known(0.25),
				    .bandwidth = cost_known(4),
				    .pull_probe = cost_known(1.5),
				    .pull_bandwidth = cost_known(8)};
	s.compute = (struct cost_compute){.fixed = cost_known(2),
					  .row = cost_known(0.0625),
					  .memory = cost_known(10),
					  .flops = cost_known(48),
					  .call = 36,
					  .gather = cost_known(3)};
	s.c.home = (struct cost_home){.merge = cost_known(0.75),
				      .merge_row = cost_known(0.125),
				      .splice = cost_known(11),
				      .splice_token = cost_known(0.5)};
	s.c.query = 2;
	s.c.layers = 3;
	s.c.recompute = 0.2;
	s.c.shifted = true;
	setup_spread(&s, 3);
	for (unsigned int i = 0; i < 3; i++) {
		s.holders[i].tokens = s.holders[i].selected = tokens[i];
		s.holders[i].wait = cost_known(0.5);
	}
	p = setup_prices(&s);
	/* 5 + 7 + 9 tokens of 16 B and 3 layers at 8 B/us; 3 (11 + 21 / 2) */
	assert_near(p.once.us, 3 * 1.5 + 126 + 64.5);
	/* 8 rows; 21 tokens read in each of 168 / 36 calls; 2 * 12 FLOP for each of 8
	 * rows with each of them */
	assert_near(p.attend.us, 2 + 0.5 + 21 * 16 / 10.0 * 168 / 36 + 21 * 4);
	/* 8 rows there and back; 9 tokens attended; 8 rows of 3 holders merged */
	assert_near(p.round.us, 1.25 + 8 * 28 / 4.0 + 0.5 + 2 + 0.5 + 2 * 9 * 16 / 10.0 +
					9 * 4 + 0.75 + 3);
	assert_near(p.local.us, 0.2 * 3 * 21 + 3 * p.attend.us);
	assert_int_equal(p.slowest, 2);
	s.c.shifted = false;
	s.c.selected = true;
	p = setup_prices(&s);
	/* indices: 4 B for each of 2 query tokens; reads of 2 choices, 3 times as dear */
	assert_near(p.round.us, 1.25 + (8 * 28 + 4 * 9 * 2) / 4.0 + 0.5 + 2 + 0.5 +
					9 * 2 * 3 * 16 / 10.0 + 9 * 4 + 0.75 + 3);
	assert_near(p.attend.us, 2 + 0.5 + 21 * 2 * 3 * 16 / 10.0 + 21 * 4);
	assert_near(p.once.us, 0);
	/* gathered in each layer and step: 21 tokens of 16 B for 2 query tokens */
	assert_near(p.fetch.us, 3 * (3 * 1.5 + 21 * 16 * 2 / 8.0 + p.attend.us));
	s.holders[2].requesters = 16; /* twice what is had at one's price */
	p = setup_prices(&s);
	assert_near(p.round.us, 1.25 + (8 * 28 + 4 * 9 * 2) / 4.0 + 0.5 +
					2 * (2 + 0.5 + 9 * 2 * 3 * 16 / 10.0 + 9 * 4) +
					0.75 + 3);
}

static void hidden_time_makes_route_free_at_most(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < ROUNDS; i++) {
		struct cost_setup s;
		struct cost_prices p;

		draw(&s);
		p = setup_prices(&s);
		s.c.hidden = p.round.us * 0.5;
		assert_near(setup_prices(&s).route.us, p.route.us / 2);
		s.c.hidden = p.round.us * 3;
		assert_true(setup_prices(&s).route.us == 0);
		assert_true(isinf(setup_prices(&s).even));
		assert_int_equal(way_of(&s), COST_ROUTE);
	}
}

/* Steps are not known: what is paid in all is at most twice what was best. */
static void rental_costs_at_most_twice_the_better(void **state)
{
	double worst = 0;

	(void)state;
	for (unsigned int i = 0; i < ROUNDS; i++) {
		struct cost_setup s;
		struct cost_prices p;
		double paid = 0, steps = whole(1, 3000), made;
		double route, fetch, home, best;

		draw(&s);
		s.c.recompute = 0;
		s.c.steps = 1;
		p = setup_prices(&s);
		route = p.route.us;
		home = s.c.layers * p.attend.us;
		fetch = p.once.us;
		for (made = 0; made < steps; made++) {
			s.c.steps = cost_steps(0, made);
			if (way_of(&s) == COST_FETCH)
				break;
			paid += route;
		}
		if (made < steps)
			paid += fetch + (steps - made) * home;
		best = fmin(steps * route, fetch + steps * home);
		worst = fmax(worst, paid / best);
		assert_true(paid <= 2 * best * (1 + 1e-9));
	}
	printf("the most that was paid: %.3f of the better\n", worst);
	assert_true(worst >
		    1.5); /* requests that end at the worst moment were among them */
}

static void unsure_choice_stays(void **state)
{
	unsigned int stayed = 0, moved = 0;

	(void)state;
	for (unsigned int i = 0; i < ROUNDS; i++) {
		double us[3], error[3], e;
		struct cost_prices p = {0};
		struct cost_price *way[] = {&p.route, &p.fetch, &p.local};
		enum cost_way last = (enum cost_way)whole(1, 3);
		struct cost_choice choice;
		unsigned int best = 0;
		bool clear = true;

		for (unsigned int w = 0; w < 3; w++) {
			us[w] = between(50, 200);
			error[w] = between(0.1, 50);
			*way[w] = (struct cost_price){us[w], error[w] * error[w]};
			best = us[w] < us[best] ? w : best;
		}
		for (unsigned int w = 0; w < 3; w++) {
			e = hypot(error[w], error[best]);
			clear = clear && (w == best || us[w] - us[best] >= 2 * e);
		}
		choice = cost_choose(&p, last);
		assert_true(choice.sure == clear);
		e = hypot(error[last - 1], error[best]);
		if (last - 1 != best && us[last - 1] - us[best] < 2 * e) {
			assert_int_equal(choice.way, last);
			stayed++;
		} else {
			assert_int_equal(choice.way, best + 1);
			moved++;
		}
		p.stale = true; /* then nobody is sure, and nothing moves */
		choice = cost_choose(&p, last);
		assert_false(choice.sure);
		assert_int_equal(choice.way, last);
	}
	assert_true(stayed > 100 && moved > 100);
}

/* Home is slower than it was measured by as much as rows here took, and as long as there
 * were none by as much as at the holder; then that error is in both prices. */
static void home_is_as_it_was_lately(void **state)
{
	struct cost_setup s;
	struct cost_prices p;
	double plain, apart;

	(void)state;
	setup_make(&s, "h100-ibgda", &setup_v2_lite, 8192);
	plain = setup_prices(&s).attend.us;
	s.holders[0].attend = (struct cost_figure){.value = 3, .error = 0.5};
	p = setup_prices(&s);
	assert_near(p.attend.us, 3 * plain);
	assert_near(p.shared_route, plain * plain / 4);
	s.holders[0].requesters = 2 * COST_FAN_IN_FLAT; /* twice there, once at home */
	assert_near(setup_prices(&s).shared_route, plain * plain / 2);
	s.holders[0].requesters = 1;
	apart = p.route.variance;
	s.c.attend = (struct cost_figure){.value = 2, .error = 0.25};
	p = setup_prices(&s);
	assert_near(p.attend.us, 2 * plain);
	assert_near(p.attend.variance, plain * plain / 16);
	assert_near(p.route.variance, apart);
	assert_near(p.shared_route, 0);
	s.c.compute = NULL; /* then it is the holder in all */
	p = setup_prices(&s);
	assert_near(p.attend.us, 3 * plain);
	assert_near(p.shared_route, p.attend.variance);
}

/* A constant's error moves a price as the constant does: by the price's slope. */
static void every_error_is_in_the_variance(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < ROUNDS; i++) {
		struct cost_setup s;
		struct cost_figure *const figures[] = {&s.link.probe,
						       &s.link.turn,
						       &s.link.bandwidth,
						       &s.link.pull_probe,
						       &s.link.pull_bandwidth,
						       &s.link.congestion,
						       &s.compute.fixed,
						       &s.compute.row,
						       &s.compute.memory,
						       &s.compute.flops,
						       &s.c.home.merge,
						       &s.c.home.merge_row,
						       &s.c.home.splice,
						       &s.c.home.splice_token,
						       &s.holders[0].wait,
						       &s.holders[0].attend,
						       &s.c.attend};
		struct cost_figure *f = figures[i % 17];
		struct cost_prices p, q;
		double step;

		draw(&s);
		s.link.congestion = cost_known(between(0.5, 4));
		s.holders[0].wait = cost_known(between(1, 100));
		s.holders[0].attend = cost_known(between(0.5, 4));
		s.holders[0].requesters = whole(1, 32);
		s.c.attend = cost_known(between(0.5, 4));
		s.link.model_error = s.c.home.splice.error = 0;
		step = 1e-4 * f->value;
		f->error = step;
		p = setup_prices(&s);
		f->value += step;
		q = setup_prices(&s);
		if (fabs(sqrt(p.route.variance) - fabs(q.route.us - p.route.us)) >
			    2e-3 * sqrt(p.route.variance) + 1e-9 * p.route.us ||
		    fabs(sqrt(p.fetch.variance) - fabs(q.fetch.us - p.fetch.us)) >
			    2e-3 * sqrt(p.fetch.variance) + 1e-9 * p.fetch.us)
			fail_msg("figure %u: route %g, not %g; fetch %g, not %g", i % 17,
				 sqrt(p.route.variance), q.route.us - p.route.us,
				 sqrt(p.fetch.variance), q.fetch.us - p.fetch.us);
	}
}

/* What is in both prices alike says nothing about which is lower. */
static void shared_error_does_not_hide_a_difference(void **state)
{
	struct cost_setup s;
	struct cost_prices p;

	(void)state;
	setup_make(&s, "h100-ibgda", &setup_v2_lite, 2048);
	s.link.model_error = 0;
	s.c.recompute = 1;
	s.c.steps = 1000;
	s.compute.fixed.error = 15; /* of 20 */
	p = setup_prices(&s);
	assert_int_equal(cost_choose(&p, COST_ROUTE).way, COST_ROUTE); /* two machines */
	assert_int_equal(cost_choose(&p, COST_LOCAL).way, COST_FETCH); /* the same home */
	s.c.compute = NULL;
	p = setup_prices(&s);
	assert_int_equal(cost_choose(&p, COST_ROUTE).way, COST_FETCH);
	assert_true(cost_choose(&p, COST_ROUTE).sure);
	s.c.hidden = p.round.us; /* then no error of the holder's is left in route */
	p = setup_prices(&s);
	assert_int_equal(cost_choose(&p, COST_NONE).way, COST_ROUTE);
}

/* Whatever is missing, zero or absurd: a price is a number of at least 0, or INFINITY. */
static void prices_are_numbers(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < ROUNDS; i++) {
		struct cost_setup s;
		struct cost_prices p;
		struct cost_figure *const figures[] = {
			&s.link.probe,	    &s.link.turn,	    &s.link.bandwidth,
			&s.link.pull_probe, &s.link.pull_bandwidth, &s.compute.fixed,
			&s.compute.memory,  &s.compute.flops,	    &s.c.home.merge,
			&s.c.home.splice,   &s.link.congestion,	    &s.compute.row};

		draw(&s);
		for (unsigned int n = 0; n < 3; n++) {
			struct cost_figure *f = figures[(unsigned int)whole(1, 12) - 1];

			*f = flip() ? (struct cost_figure){0} : cost_known(0);
			f->error = flip() ? 0 : 1e6;
		}
		s.c.hidden = flip() ? 0 : 1e12;
		s.c.no_pages = flip();
		s.c.selected = flip();
		setup_spread(&s, (unsigned int)whole(1, 8));
		p = setup_prices(&s);
		assert_true(p.route.us >= 0 && p.fetch.us >= 0 && p.local.us >= 0);
		assert_true(p.even >= 0);
		assert_false(isnan(p.route.variance) && !isinf(p.route.us));
		assert_false(isnan(p.fetch.variance) && !isinf(p.fetch.us));
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(route_holds_until_the_queries_outweigh_the_chunk),
		cmocka_unit_test(fetch_is_amortised_and_wins_past_the_break_even),
		cmocka_unit_test(local_is_for_small_chunks),
		cmocka_unit_test(congestion_changes_no_decision),
		cmocka_unit_test(probe_beats_bandwidth_for_few_rows),
		cmocka_unit_test(selection_routes_flat_and_gathers_by_holder),
		cmocka_unit_test(holder_without_attention_is_fetched_from),
		cmocka_unit_test(busy_holder_is_repriced_and_to_be_replicated),
		cmocka_unit_test(layers_steps_heads_and_home_count),
		cmocka_unit_test(every_term_is_in_the_sums),
		cmocka_unit_test(hidden_time_makes_route_free_at_most),
		cmocka_unit_test(rental_costs_at_most_twice_the_better),
		cmocka_unit_test(unsure_choice_stays),
		cmocka_unit_test(home_is_as_it_was_lately),
		cmocka_unit_test(shared_error_does_not_hide_a_difference),
		cmocka_unit_test(every_error_is_in_the_variance),
		cmocka_unit_test(prices_are_numbers),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
