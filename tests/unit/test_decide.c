/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvd_decide(): an engine's case and a page's constants; what is refused, what is not
 * priced, and what a page that changes beside it changes.
 */
#include "lib/kvd.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/cost/page.h"

/* DeepSeek-V2-Lite, one token a step, its document at one holder. */
static struct kvd_cost_holder one_holder;
static const struct kvd_decide_args plain = {.kind = KVD_COST_MLA,
					     .layers = 27,
					     .heads = 16,
					     .dqk = 576,
					     .dv = 512,
					     .steps = 1,
					     .holders = &one_holder,
					     .holder_count = 1,
					     .shifted = true};

static int setup(void **state)
{
	struct kvd_cost_page *page;

	one_holder = (struct kvd_cost_holder){.tokens = 32768};
	if (kvd_cost_preset("h100-ibgda", &page) != 0)
		return -1;
	*state = page;
	return 0;
}

static int teardown(void **state)
{
	kvd_cost_close(*state);
	return 0;
}

/* Pages are the daemon's to write. */
static struct cost_page *inside(void **state)
{
	return *state;
}

static void choice_follows_the_steps(void **state)
{
	struct kvd_decide_args args = plain;
	struct kvd_decide_result r;

	assert_int_equal(kvd_decide(&args, *state, &r), 0);
	assert_int_equal(r.way, KVD_COST_ROUTE);
	assert_true(r.sure && !r.replicate);
	assert_true(fabs(r.even_steps - 51.66) < 0.1);
	assert_true(isinf(r.local.us));
	assert_string_equal(r.transport, "preset");
	assert_true(r.route.us < r.fetch.us && r.route.error_us > 0);
	assert_true(fabs(r.once.us - 43793) < 1);
	args.steps = 500;
	assert_int_equal(kvd_decide(&args, *state, &r), 0);
	assert_int_equal(r.way, KVD_COST_FETCH);
	assert_true(r.sure);
}

static void unknown_steps_are_rented(void **state)
{
	struct kvd_decide_args args = plain;
	struct kvd_decide_result r;

	args.steps = 0;
	args.steps_made = 10;
	assert_int_equal(kvd_decide(&args, *state, &r), 0);
	assert_int_equal(r.way, KVD_COST_ROUTE);
	args.steps_made = 100;
	args.last = KVD_COST_ROUTE;
	assert_int_equal(kvd_decide(&args, *state, &r), 0);
	assert_int_equal(r.way, KVD_COST_FETCH);
}

static void close_call_keeps_the_last_choice(void **state)
{
	struct kvd_decide_args args = plain;
	struct kvd_decide_result r;

	args.steps = 52; /* of 51.66 */
	for (enum kvd_cost_way last = KVD_COST_ROUTE; last <= KVD_COST_FETCH; last++) {
		args.last = last;
		assert_int_equal(kvd_decide(&args, *state, &r), 0);
		assert_int_equal(r.way, last);
		assert_false(r.sure);
	}
	args.last = KVD_COST_LOCAL; /* which is not possible */
	assert_int_equal(kvd_decide(&args, *state, &r), 0);
	assert_int_equal(r.way, KVD_COST_FETCH);
}

static void decide_uses_engine_values(void **state)
{
	struct kvd_decide_args args = plain;
	struct kvd_decide_result r, with;

	assert_int_equal(kvd_decide(&args, *state, &r), 0);
	args.recompute_us = 1;
	assert_int_equal(kvd_decide(&args, *state, &with), 0);
	assert_true(fabs(with.local.us - 27 * 32768 - 27 * with.attend.us) < 1);
	args.hidden_us = 1e9;
	assert_int_equal(kvd_decide(&args, *state, &with), 0);
	assert_true(with.route.us == 0 && isinf(with.even_steps));
	args.attend_us = 3;
	assert_int_equal(kvd_decide(&args, *state, &with), 0);
	assert_true(with.attend.us == 3);
	args.no_pages = true;
	assert_int_equal(kvd_decide(&args, *state, &with), 0);
	assert_true(isinf(with.fetch.us) && isinf(with.local.us));
	assert_int_equal(with.way, KVD_COST_ROUTE);
}

static void decide_accepts_bytes_per_token(void **state)
{
	struct kvd_decide_args args = plain;
	struct kvd_decide_result r, fp8;

	assert_int_equal(kvd_decide(&args, *state, &r), 0);
	args.token_bytes = 656;
	assert_int_equal(kvd_decide(&args, *state, &fp8), 0);
	assert_true(fabs((r.once.us - fp8.once.us) - 27 * 32768 * (1152 - 656) / 25e3) <
		    1);
	args = plain;
	args.kind = KVD_COST_GQA;
	args.heads = 32;
	args.kv_heads = 8;
	args.dqk = args.dv = 128;
	args.layers = 32;
	args.shifted = false;
	assert_int_equal(kvd_decide(&args, *state, &r), 0);
	assert_true(fabs(r.even_steps - 175.1) < 0.2);
}

static void selection_is_priced_by_holders(void **state)
{
	struct kvd_cost_holder holders[4] = {0};
	struct kvd_decide_args args = plain;
	struct kvd_decide_result one, four;

	args.selected = true;
	one_holder.selected = 2048;
	assert_int_equal(kvd_decide(&args, *state, &one), 0);
	for (unsigned int i = 0; i < 4; i++)
		holders[i] = (struct kvd_cost_holder){.tokens = 8192, .selected = 512};
	args.holders = holders;
	args.holder_count = 4;
	assert_int_equal(kvd_decide(&args, *state, &four), 0);
	assert_true(four.round.us <= one.round.us);
	assert_true(fabs(four.fetch.us - one.fetch.us - 27 * 3 * 25) < 1e-6);
}

static void bad_arguments_are_refused(void **state)
{
#define BAD(member, value)                                                      \
	do {                                                                    \
		struct kvd_decide_args args_ = plain;                           \
		args_.member = (value);                                         \
		assert_int_equal(kvd_decide(&args_, *state, &r), -KVD_E_INVAL); \
		assert_int_equal(r.way, KVD_COST_NONE);                         \
	} while (0)
	struct kvd_cost_holder many[KVD_COST_HOLDERS_MAX + 1] = {0};
	struct kvd_decide_result r;

	BAD(kind, (enum kvd_cost_kind)7);
	BAD(kind, KVD_COST_GQA); /* kv_heads */
	BAD(layers, 0);
	BAD(heads, 0);
	BAD(heads, UINT32_MAX);
	BAD(dqk, 0);
	BAD(dv, UINT32_MAX);
	BAD(value_bytes, 9);
	BAD(out_bytes, 9);
	BAD(holders, NULL);
	BAD(holder_count, 0);
	BAD(holder_count, KVD_COST_HOLDERS_MAX + 1);
	BAD(last, (enum kvd_cost_way)9);
	BAD(attend_us, NAN);
	BAD(hidden_us, -1);
	BAD(recompute_us, INFINITY);
	many[0].tokens = UINT64_MAX;
	BAD(holders, many);
	many[0] = (struct kvd_cost_holder){.tokens = 1, .selected = 2};
	BAD(holders, many);
	assert_int_equal(kvd_decide(&plain, NULL, &r), -KVD_E_INVAL);
#undef BAD
}

static void decide_missing_page_value_is_not_guessed(void **state)
{
	struct kvd_decide_args args = plain;
	struct kvd_decide_result r;
	struct cost_peer peer;

	one_holder.peer[3] = 1; /* nobody */
	assert_int_equal(kvd_decide(&args, *state, &r), -KVD_E_NOTFOUND);
	args.recompute_us = 1;
	assert_int_equal(kvd_decide(&args, *state, &r), 0);
	assert_int_equal(r.way, KVD_COST_LOCAL);
	assert_false(r.sure); /* the others may be better: nobody knows */

	/* a peer whose attention nobody measured; and one that attends to nothing */
	assert_int_equal(cost_page_peer(inside(state), cost_self, &peer), 0);
	memcpy(peer.key, one_holder.peer, sizeof(peer.key));
	assert_int_equal(cost_page_set_peer(inside(state), &peer), 0);
	args.recompute_us = 0;
	args.last = KVD_COST_ROUTE;
	assert_int_equal(kvd_decide(&args, *state, &r), 0);
	assert_int_equal(r.way, KVD_COST_FETCH);
	assert_true(isinf(r.route.us) && r.even_steps == 0);
	assert_false(r.sure);
	peer.no_attend[COST_HOST] = 1;
	assert_int_equal(cost_page_set_peer(inside(state), &peer), 0);
	assert_int_equal(kvd_decide(&args, *state, &r), 0);
	assert_int_equal(r.way, KVD_COST_FETCH);
	assert_true(r.sure);
	/* nor is a fetch from where nobody pulled; where there are no pages there is none
	 */
	one_holder.peer[3] = 0;
	assert_int_equal(cost_page_peer(inside(state), cost_self, &peer), 0);
	peer.links[0].pull_probe.count = 0;
	assert_int_equal(cost_page_set_peer(inside(state), &peer), 0);
	assert_int_equal(kvd_decide(&args, *state, &r), 0);
	assert_int_equal(r.way, KVD_COST_ROUTE);
	assert_false(r.sure);
	args.no_pages = true;
	assert_int_equal(kvd_decide(&args, *state, &r), 0);
	assert_true(r.sure);
}

static void load_of_a_peer_counts(void **state)
{
	const struct cost_shape any = {0};
	struct kvd_decide_result before, r;
	struct cost_speed speed;
	struct cost_peer peer;

	assert_int_equal(kvd_decide(&plain, *state, &before), 0);
	assert_int_equal(cost_page_peer(inside(state), cost_self, &peer), 0);
	peer.wait[COST_HOST] = cost_known(100);
	peer.requesters[COST_HOST] = 16;
	assert_int_equal(cost_page_set_peer(inside(state), &peer), 0);
	assert_int_equal(kvd_decide(&plain, *state, &r), 0);
	assert_true(r.replicate);
	assert_true(fabs(r.round.us - before.round.us - 100 - before.attend.us) < 1e-6);
	/* times what its speed says, for each of the two */
	assert_int_equal(
		cost_page_speed(inside(state), cost_self, &any, COST_HOST, &speed), 0);
	speed.attend = cost_known(3);
	speed.attend.error = 0.5;
	assert_int_equal(cost_page_set_speed(inside(state), &speed), 0);
	assert_int_equal(kvd_decide(&plain, *state, &r), 0);
	assert_true(fabs(r.round.us - before.round.us - 100 - 5 * before.attend.us) <
		    1e-6);
	assert_true(r.round.error_us >= before.attend.us);
	/* home is of the same speed here */
	assert_true(fabs(r.attend.us - 3 * before.attend.us) < 1e-6);
	peer.stale = 1;
	assert_int_equal(cost_page_set_peer(inside(state), &peer), 0);
	assert_int_equal(kvd_decide(&plain, *state, &r), 0);
	assert_false(r.sure);
}

/* The same peer, with the same link: its GPUs have a price, a load and a refusal of their
 * own. A preset's is of either memory. */
static void memory_of_a_gpu_has_its_own_price(void **state)
{
	const struct cost_shape shape = cost_shape_mla(16, 576, 512, 2, 2);
	struct kvd_cost_holder there = one_holder;
	struct kvd_decide_args args = plain;
	struct kvd_decide_result host, r;
	struct cost_speed speed;
	struct cost_peer peer;

	args.holders = &there;
	assert_int_equal(kvd_decide(&args, *state, &host), 0);
	there.gpu = true;
	assert_int_equal(kvd_decide(&args, *state, &r), 0);
	assert_true(r.round.us == host.round.us);
	assert_int_equal(
		cost_page_speed(inside(state), cost_self, &shape, COST_GPU, &speed), 0);
	speed.shape = shape;
	speed.kind = COST_GPU;
	speed.compute.fixed.value += 50;
	assert_int_equal(cost_page_set_speed(inside(state), &speed), 0);
	assert_int_equal(cost_page_peer(inside(state), cost_self, &peer), 0);
	peer.wait[COST_GPU] = cost_known(7);
	peer.requesters[COST_GPU] = 2 * COST_FAN_IN_FLAT;
	peer.no_attend[COST_HOST] = 1;
	assert_int_equal(cost_page_set_peer(inside(state), &peer), 0);
	assert_int_equal(kvd_decide(&args, *state, &r), 0);
	assert_true(r.replicate);
	assert_true(fabs(r.round.us - host.round.us - 7 - 2 * 50 - host.attend.us) <
		    1e-6);
	there.gpu = false;
	assert_int_equal(kvd_decide(&args, *state, &r), 0);
	assert_false(r.replicate);
	assert_true(r.round.us == host.round.us);
}

static void unknown_fabric_is_refused(void **state)
{
	struct kvd_cost_page *page;

	(void)state;
	assert_int_equal(kvd_cost_preset("tin-cans", &page), -KVD_E_NOTFOUND);
	assert_null(page);
	assert_int_equal(kvd_cost_preset(NULL, &page), -KVD_E_NOTFOUND);
	kvd_cost_close(NULL);
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
	const struct CMUnitTest tests[] = {
		TEST(choice_follows_the_steps),
		TEST(unknown_steps_are_rented),
		TEST(close_call_keeps_the_last_choice),
		TEST(decide_uses_engine_values),
		TEST(decide_accepts_bytes_per_token),
		TEST(selection_is_priced_by_holders),
		TEST(bad_arguments_are_refused),
		TEST(decide_missing_page_value_is_not_guessed),
		TEST(load_of_a_peer_counts),
		TEST(memory_of_a_gpu_has_its_own_price),
		TEST(unknown_fabric_is_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
