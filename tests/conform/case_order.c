/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many transfers: order of requests, messages, headers, both directions at
 * once, two peers at once, answers that come late or in another order.
 */
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "tests/conform/conform.h"

#define MANY 400u

static uint64_t in_sequence_index(struct end *end, uint32_t sequence)
{
	return end_call(end, CMD_IN_FIND, sequence, 0, 0, 0).v[0];
}

/* Requests arrived in the order of their posts; the check of a READ comes after
 * its bytes, so it has no place in the order. */
static void check_order(struct deal *const *deals, size_t count)
{
	uint64_t last = 0;
	bool any = false;

	for (size_t i = 0; i < count; i++) {
		uint64_t at = in_sequence_index(deals[i]->ans, deals[i]->sequence);

		if (deals[i]->kind == XP_READ && deal_in(deals[i]).kind == XP_CHECK)
			continue;
		CHECK(at != PUPPET_NONE, "post %zu never arrived", i);
		CHECK(!any || at > last, "post %zu overtook the one before it", i);
		last = at;
		any = true;
	}
}

static void order_messages(struct world *world)
{
	struct deal *deals[MANY];

	for (size_t i = 0; i < MANY; i++) {
		deals[i] = deal_message(world, world->end[0], world->end[1]);
		CHECK(deal_post(deals[i], 12 + i % 100) == 0, "post: %s",
		      deals[i]->refused.text);
	}
	world_settle(world);
	for (size_t i = 0; i < MANY; i++)
		deal_succeeded(deals[i]);
	check_order(deals, MANY);
}

/* Data of all sizes, and a message behind each. */
static void order_mixed(struct world *world)
{
	struct area *from = area_new(world, world->end[1], MEMORY_SEALED, 1 << 20);
	struct area *to = area_new(world, world->end[0], MEMORY_SEALED, 1 << 20);
	struct deal *deals[MANY];

	for (size_t i = 0; i < MANY; i++) {
		uint64_t len = 1 + world_random(world, i % 7 ? 2000 : 2500);
		struct plan_run run = {.src = world_random(world, 1 << 19),
				       .dst = i * 2600,
				       .len = len,
				       .count = 1};

		deals[i] = i % 2 ? deal_message(world, world->end[1], world->end[0])
				 : deal_simple(world, XP_WRITE, from, to, &run, 1);
	}
	for (size_t i = 0; i < MANY; i++)
		CHECK(deal_post(deals[i], HEADER_BYTES) == 0, "post: %s",
		      deals[i]->refused.text);
	world_settle(world);
	for (size_t i = 0; i < MANY; i++)
		deal_succeeded(deals[i]);
	check_order(deals, MANY);
}

/* A message behind a large WRITE may arrive first only as a request; its place
 * in the order stays. Answers are given in another order. */
static void order_late_answers(struct world *world)
{
	struct area *from = area_new(world, world->end[0], MEMORY_SEALED, 1 << 20);
	struct area *to = area_new(world, world->end[1], MEMORY_SEALED, 1 << 20);
	struct deal *deals[32];

	end_policy(world->end[1], POLICY_HOLD);
	for (size_t i = 0; i < ARRAY_LEN(deals); i++) {
		struct plan_run run = {.src = i * 30000,
				       .dst = (31 - i) * 30000,
				       .len = 20000 + i,
				       .count = 1};

		deals[i] = deal_simple(world, XP_WRITE, from, to, &run, 1);
		CHECK(deal_post(deals[i], HEADER_BYTES) == 0, "post: %s",
		      deals[i]->refused.text);
	}
	for (size_t i = 0; i < ARRAY_LEN(deals); i++)
		CHECK(AWAIT(world, deal_asked(deals[i])),
		      "request %zu waits for the answer to an earlier one", i);
	world_run_ns(world, 100 * MS);
	CHECK(deal_op(deals[0]).dones == 0, "done without an answer");
	for (size_t i = ARRAY_LEN(deals); i-- > 0;)
		deal_land(deals[i]);
	world_settle(world);
	for (size_t i = 0; i < ARRAY_LEN(deals); i++)
		deal_succeeded(deals[i]);
	check_order(deals, ARRAY_LEN(deals));
}

/* ---- headers ---- */

static void header_pass(struct world *world, size_t len, bool with_bytes)
{
	struct area *from = area_new(world, world->end[0], MEMORY_SEALED, 5000);
	struct area *to = area_new(world, world->end[1], MEMORY_SEALED, 5000);
	const struct plan_run run = {.src = 1, .dst = 2, .len = 4990, .count = 1};
	struct deal *deal = with_bytes
				    ? deal_simple(world, XP_WRITE, from, to, &run, 1)
				    : deal_message(world, world->end[0], world->end[1]);
	uint64_t before = end_requests(world->end[1]);

	end_policy(world->end[1], POLICY_HOLD);
	CHECK(deal_post(deal, len) == 0, "post with a header of %zu: %s", len,
	      deal->refused.text);
	CHECK(AWAIT(world, end_requests(world->end[1]) == before + 1), "no request");
	deal_land(deal);
	world_settle(world);
	deal_succeeded(deal);
	end_policy(world->end[1], POLICY_LAND);
}

static void header_sizes(struct world *world)
{
	static const size_t sizes[] = {0,     1,     11,     12,      4096,	    65535,
				       65536, 65537, 262144, 1 << 20, XP_HEADER_MAX};

	for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
		header_pass(world, sizes[i], false);
		header_pass(world, sizes[i], true);
	}
}

static void header_too_big(struct world *world)
{
	struct deal *deal = deal_message(world, world->end[0], world->end[1]);

	CHECK(deal_post(deal, XP_HEADER_MAX + 1) < 0,
	      "a header over the limit was taken");
	CHECK(deal->refused.code == ERR_TOOBIG, "refused with %s: %s",
	      err_name(deal->refused.code), deal->refused.text);
	deal_run(deal_message(world, world->end[0], world->end[1]));
}

/* READs carry headers of the same sizes. */
static void header_read(struct world *world)
{
	static const size_t sizes[] = {12, 65536, XP_HEADER_MAX};
	struct area *from = area_new(world, world->end[0], MEMORY_SEALED, 5000);
	struct area *to = area_new(world, world->end[1], MEMORY_SEALED, 5000);
	const struct plan_run run = {.src = 1, .dst = 2, .len = 4990, .count = 1};

	for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
		struct deal *deal = deal_simple(world, XP_READ, from, to, &run, 1);

		CHECK(deal_post(deal, sizes[i]) == 0, "post: %s", deal->refused.text);
		world_settle(world);
		deal_succeeded(deal);
	}
}

/* ---- at once ---- */

struct flock {
	struct deal *deals[MANY];
	size_t count;
};

/* `count` transfers of shuffled sizes, disjoint in the destination. */
static void flock_make(struct world *world, struct flock *flock, size_t count,
		       enum xp_kind kind, struct end *src, struct end *dst)
{
	const uint64_t room = 30000;
	struct area *from = area_new(world, src, MEMORY_SEALED, 2 << 20);
	struct area *to = area_new(world, dst, MEMORY_SEALED, count * room);

	for (size_t i = 0; i < count; i++) {
		uint64_t rows = 1 + world_random(world, 20);
		uint64_t len = 1 + world_random(world, i % 5 ? 100 : 1400);
		struct plan_run run = {.src = world_random(world, 1 << 20),
				       .dst = i * room,
				       .len = len,
				       .count = rows,
				       .src_stride = (int64_t)len + 3,
				       .dst_stride = (int64_t)len + 5};

		flock->deals[flock->count++] =
			deal_simple(world, kind, from, to, &run, 1);
	}
}

static void flock_post(struct world *world, struct flock *flock)
{
	for (size_t i = flock->count; i-- > 1;) { /* shuffle */
		size_t j = world_random(world, i + 1);
		struct deal *deal = flock->deals[i];

		flock->deals[i] = flock->deals[j];
		flock->deals[j] = deal;
	}
	for (size_t i = 0; i < flock->count; i++)
		CHECK(deal_post(flock->deals[i], HEADER_BYTES) == 0, "post: %s",
		      flock->deals[i]->refused.text);
	world_settle(world);
	for (size_t i = 0; i < flock->count; i++)
		deal_succeeded(flock->deals[i]);
}

static void many_in_flight(struct world *world)
{
	struct flock flock = {0};

	flock_make(world, &flock, 200, XP_WRITE, world->end[0], world->end[1]);
	flock_make(world, &flock, 200, XP_READ, world->end[0], world->end[1]);
	flock_post(world, &flock);
}

static void both_directions(struct world *world)
{
	struct flock flock = {0};

	flock_make(world, &flock, 100, XP_WRITE, world->end[0], world->end[1]);
	flock_make(world, &flock, 100, XP_WRITE, world->end[1], world->end[0]);
	flock_make(world, &flock, 100, XP_READ, world->end[0], world->end[1]);
	flock_make(world, &flock, 100, XP_READ, world->end[1], world->end[0]);
	flock_post(world, &flock);
}

static void two_peers(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1], *c = world->end[2];
	struct flock flock = {0};

	flock_make(world, &flock, 60, XP_WRITE, a, b);
	flock_make(world, &flock, 60, XP_WRITE, c, a);
	flock_make(world, &flock, 60, XP_READ, b, a);
	flock_make(world, &flock, 60, XP_READ, a, c);
	flock_post(world, &flock);
}

/* The two directions do not wait for each other: large one way, an answered
 * message the other way. */
static void messages_pass_data(struct world *world)
{
	uint64_t n = world->big_bytes * 2;
	struct area *from = area_new(world, world->end[0], MEMORY_SEALED, n);
	struct area *to = area_new(world, world->end[1], MEMORY_SEALED, n);
	const struct plan_run run = {.len = n, .count = 1};
	struct deal *large = deal_simple(world, XP_WRITE, from, to, &run, 1);
	struct deal *small = deal_message(world, world->end[0], world->end[1]);

	CHECK(deal_post(large, HEADER_BYTES) == 0, "post: %s", large->refused.text);
	CHECK(deal_post(small, HEADER_BYTES) == 0, "post: %s", small->refused.text);
	world_settle(world);
	deal_succeeded(large);
	deal_succeeded(small);
	check_order((struct deal *[]){large, small}, 2);
}

const struct conform_case cases_order[] = {
	{"order: messages", order_messages, 0},
	{"order: data and messages", order_mixed, HEAVY},
	{"order: answers in another order, late", order_late_answers, 0},
	{"order: a message behind data", messages_pass_data, HEAVY},
	{"header: 0 bytes to the limit", header_sizes, 0},
	{"header: over the limit is refused", header_too_big, 0},
	{"header: of a read", header_read, 0},
	{"many: in flight, sizes shuffled", many_in_flight, HEAVY},
	{"many: both directions and kinds", both_directions, HEAVY},
	{"many: two peers at once", two_peers, NEED_THREE},
	{NULL, NULL, 0},
};
