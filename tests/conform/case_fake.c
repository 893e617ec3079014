/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake's scripted faults: each does what fake.h says and nothing else, and
 * the contract holds through all of them. The simulation stands on this.
 */
#include <string.h>

#include "daemon/base/mem.h"
#include "tests/sim/fake.h"
#include "tests/conform/conform.h"

#define LEN (256u << 10)

static struct transport *node_of(struct end *end)
{
	return puppet_transport(end->puppet);
}

static struct deal *whole(struct world *world, enum xp_kind kind, struct end *src,
			  struct end *dst)
{
	const struct plan_run run = {.len = LEN, .count = 1};

	return deal_simple(world, kind, area_new(world, src, MEMORY_LINEAR, LEN),
			   area_new(world, dst, MEMORY_LINEAR, LEN), &run, 1);
}

static void script(struct world *world, struct fake_rule rule)
{
	fake_script_clear(world->hub);
	CHECK(fake_script(world->hub, &rule) == 0, "no memory");
}

static void check_failed(struct deal *deal, enum err_code code)
{
	struct outcome op = deal_op(deal);

	CHECK(op.dones == 1 && op.code == code, "it ended with %s: %s", err_name(op.code),
	      op.text);
	deal_torn(deal);
}

static void refused_posts(struct world *world)
{
	struct deal *deal = whole(world, XP_WRITE, world->end[0], world->end[1]);

	script(world, (struct fake_rule){.fault = FAKE_REFUSE, .times = 1});
	CHECK(deal_post(deal, HEADER_BYTES) < 0 && deal->refused.code == ERR_TRANSPORT,
	      "not refused");
	script(world, (struct fake_rule){.fault = FAKE_NOMEM, .times = 1});
	deal = whole(world, XP_READ, world->end[0], world->end[1]);
	CHECK(deal_post(deal, HEADER_BYTES) < 0 && deal->refused.code == ERR_NOMEM,
	      "not refused");
	deal_run(whole(world, XP_READ, world->end[0], world->end[1]));
	script(world, (struct fake_rule){.fault = FAKE_NOMEM_THERE,
					 .times = 1,
					 .kinds = 1u << XP_WRITE});
	deal = whole(world, XP_WRITE, world->end[0], world->end[1]);
	CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
	world_settle(world);
	CHECK(!deal_in(deal).there, "on_request came");
	check_failed(deal, ERR_NOMEM);
	CHECK(deal->written == 0, "bytes of a refused request");
}

static void op_error(struct world *world)
{
	for (unsigned int kind = XP_WRITE; kind <= XP_READ; kind++) {
		struct deal *deal =
			whole(world, (enum xp_kind)kind, world->end[0], world->end[1]);

		script(world, (struct fake_rule){.fault = FAKE_ERROR,
						 .times = 1,
						 .at_bytes = LEN / 2});
		CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
		world_settle(world);
		check_failed(deal, ERR_TRANSPORT);
		CHECK(deal->written < deal->bytes, "all bytes of a failed transfer");
		deal_run(whole(world, (enum xp_kind)kind, world->end[0], world->end[1]));
	}
}

static void stuck_until_stopped(struct world *world)
{
	for (unsigned int way = 0; way < 3; way++) {
		struct deal *deal = whole(world, way == 1 ? XP_READ : XP_WRITE,
					  world->end[0], world->end[1]);
		uint64_t moved;

		script(world, (struct fake_rule){.fault = FAKE_STUCK,
						 .times = 1,
						 .at_bytes = LEN / 4});
		CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
		world_run_ns(world, 10 * LOOP_NS_PER_S);
		moved = deal_op(deal).moved;
		CHECK(deal_op(deal).dones == 0 && moved >= LEN / 4 && moved < LEN,
		      "not stuck: %llu", (unsigned long long)moved);
		world_run_ns(world, 100 * LOOP_NS_PER_S);
		CHECK(deal_op(deal).moved == moved, "a stuck transfer moved");
		if (way == 2)
			deal_revoke(deal, ERR_STALL, "no byte moved");
		else
			deal_cancel(deal, ERR_STALL);
		world_settle(world);
		check_failed(deal, ERR_STALL);
	}
}

static void stuck_message(struct world *world)
{
	struct deal *stuck = deal_message(world, world->end[0], world->end[1]);

	script(world, (struct fake_rule){.fault = FAKE_STUCK, .times = 1});
	CHECK(deal_post(stuck, HEADER_BYTES) == 0, "post: %s", stuck->refused.text);
	world_run_ns(world, 10 * LOOP_NS_PER_S);
	CHECK(!deal_in(stuck).there && deal_op(stuck).dones == 0, "not stuck");
	deal_cancel(stuck, ERR_TIMEOUT);
	world_settle(world);
	CHECK(deal_op(stuck).code == ERR_TIMEOUT, "it ended with %s",
	      err_name(deal_op(stuck).code));
}

static uint64_t duration(struct world *world, struct fake_rule rule)
{
	struct deal *deal = whole(world, XP_WRITE, world->end[0], world->end[1]);
	uint64_t begin_ns = world_now_ns(world);

	script(world, rule);
	deal_run(deal);
	return world_now_ns(world) - begin_ns;
}

static void slow_and_late(struct world *world)
{
	uint64_t plain_ns =
		duration(world, (struct fake_rule){.fault = FAKE_SLOW, .factor = 1});
	uint64_t slow_ns =
		duration(world, (struct fake_rule){.fault = FAKE_SLOW, .factor = 200});
	uint64_t late_ns =
		duration(world, (struct fake_rule){.fault = FAKE_LATE,
						   .at_bytes = LEN / 2,
						   .extra_ns = 3 * LOOP_NS_PER_S});

	CHECK(slow_ns > 5 * plain_ns, "slow is not slow");
	CHECK(late_ns >= 3 * LOOP_NS_PER_S, "late is not late");
}

/* A slice that is 3 s late holds up the fence, or is thrown away; never does it
 * land behind it. */
static void late_slice_and_stop(struct world *world)
{
	bool discard = fake_hub_profile(world->hub)->discard;

	for (unsigned int way = 0; way < 2; way++) {
		struct deal *deal = whole(world, XP_WRITE, world->end[0], world->end[1]);
		struct area *to = deal->dst_places[0].area;
		uint64_t stop_ns;

		script(world, (struct fake_rule){.fault = FAKE_LATE,
						 .times = 1,
						 .at_bytes = LEN / 2,
						 .extra_ns = 3 * LOOP_NS_PER_S});
		CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
		world_run_ns(world, LOOP_NS_PER_S);
		stop_ns = world_now_ns(world);
		if (way)
			deal_revoke(deal, ERR_SESSION, "gone");
		else
			deal_cancel(deal, ERR_ABORTED);
		world_settle(world);
		CHECK(discard == (world_now_ns(world) - stop_ns < LOOP_NS_PER_S),
		      "the fence took %llu ns",
		      (unsigned long long)(world_now_ns(world) - stop_ns));
		check_failed(deal, way ? ERR_SESSION : ERR_ABORTED);
		world_run_ns(world, 5 * LOOP_NS_PER_S);
		CHECK(deal_in(deal).hash == area_hash(to), "a late slice landed");
	}
}

static void cut_link(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];
	struct deal *deal = whole(world, XP_WRITE, a, b);

	script(world,
	       (struct fake_rule){.fault = FAKE_CUT, .times = 1, .at_bytes = LEN / 2});
	CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
	CHECK(AWAIT(world, end_peer(a, b).lost && end_peer(b, a).lost), "nobody is told");
	world_settle(world);
	deal_torn(deal);
	CHECK(deal_in(deal).hash == area_hash(deal->dst_places[0].area),
	      "memory changed after done");
	area_still(deal->dst_places[0].area, deal_in(deal).hash);
	world->spent = true;
}

static void vanish(struct world *world, enum fake_fault fault)
{
	struct end *a = world->end[0], *b = world->end[1];
	struct deal *deal = whole(world, XP_WRITE, fault == FAKE_VANISH_FROM ? b : a,
				  fault == FAKE_VANISH_FROM ? a : b);

	script(world,
	       (struct fake_rule){.fault = fault, .times = 1, .at_bytes = LEN / 2});
	CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
	CHECK(AWAIT(world, end_peer(a, b).lost), "nobody is told");
	CHECK(end_settled(a), "dones are missing");
	b->alive = false;
	world->spent = true;
	deal_torn(deal);
	area_still(deal->dst_places[0].area, area_hash(deal->dst_places[0].area));
}

static void vanish_source(struct world *world)
{
	vanish(world, FAKE_VANISH_FROM);
}

static void vanish_destination(struct world *world)
{
	vanish(world, FAKE_VANISH_TO);
}

static void freeze_and_thaw(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];
	struct deal *deal = whole(world, XP_WRITE, a, b);
	struct deal *message = deal_message(world, a, b);

	fake_node_freeze(node_of(b), true);
	CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
	CHECK(deal_post(message, HEADER_BYTES) == 0, "post: %s", message->refused.text);
	world_run_ns(world, 20 * LOOP_NS_PER_S);
	CHECK(!deal_in(deal).there || fake_hub_profile(world->hub)->check,
	      "a frozen node took a request");
	fake_node_freeze(node_of(b), false);
	world_settle(world);
	deal_succeeded(deal);
	deal_succeeded(message);
}

static void link_down_and_up(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];
	struct deal *deal = whole(world, XP_WRITE, a, b);

	fake_link_down(node_of(a), node_of(b), true);
	CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
	world_run_ns(world, 20 * LOOP_NS_PER_S);
	CHECK(deal_op(deal).dones == 0, "it passed a link that is down");
	fake_link_down(node_of(a), node_of(b), false);
	world_settle(world);
	deal_succeeded(deal);
}

/* Every allocation of a post fails once: refused or done, nothing lost. */
static void allocations_fail(struct world *world)
{
	for (uint64_t nth = 1; nth < 40; nth++) {
		struct deal *deal = whole(world, nth & 1 ? XP_WRITE : XP_READ,
					  world->end[0], world->end[1]);
		int r;

		end_call(deal->init, CMD_FAIL_ALLOC, nth, 0, 0, 0);
		r = deal_post(deal, 4096);
		if (r == 0)
			world_settle(world);
		end_call(deal->init, CMD_FAIL_ALLOC, 0, 0, 0, 0);
		if (r == 0 && deal_op(deal).code == ERR_OK)
			deal_succeeded(deal);
		else if (r == 0)
			check_failed(deal, ERR_NOMEM);
		else
			CHECK(deal->refused.code == ERR_NOMEM, "refused with %s",
			      err_name(deal->refused.code));
	}
	CHECK(!end_peer(world->end[0], world->end[1]).lost, "the peer was lost");
}

/* ---- a seed is a run ---- */

static uint64_t storm(struct world *world, uint64_t seed)
{
	struct world *other;
	struct fake_profile *profile;
	uint64_t digest;
	int r = world_new(world->backend, false, seed, &other);

	CHECK(r == 0, "world: %s", err_last()->text);
	profile = fake_hub_profile(other->hub);
	profile->refuse_pm = profile->nomem_pm = profile->error_pm = 50;
	profile->slow_pm = profile->late_pm = profile->stuck_pm = 50;
	for (unsigned int i = 0; i < 60; i++) {
		struct deal *deal =
			whole(other, i & 1 ? XP_WRITE : XP_READ,
			      other->end[i & 2 ? 1 : 0], other->end[i & 2 ? 0 : 1]);

		if (deal_post(deal, HEADER_BYTES) < 0)
			continue;
		if (i % 5 == 0)
			deal_cancel(deal, ERR_ABORTED);
	}
	world_run_ns(other, 20 * LOOP_NS_PER_S);
	for (unsigned int i = 0; i < 2; i++) {
		struct deal *deal;

		list_foreach(deal, &other->deals, link) {
			if (deal->posted && !deal_op(deal).dones)
				deal_cancel(deal, ERR_STALL);
		}
		world_settle(other);
	}
	digest = fake_digest(other->hub);
	while (!list_empty(&other->deals)) {
		struct deal *deal = list_first(&other->deals, struct deal, link);

		if (deal->posted)
			deal_torn(deal);
		deal_free(deal);
	}
	while (!list_empty(&other->areas))
		area_free(list_first(&other->areas, struct area, link));
	CHECK(world_free(other), "the storm's world does not end");
	return digest;
}

static void seed_repeats(struct world *world)
{
	uint64_t first = storm(world, 7);

	CHECK(storm(world, 7) == first, "the same seed gave another run");
	CHECK(storm(world, 8) != first, "another seed gave the same run");
}

const struct conform_case cases_fake[] = {
	{"fake: refused posts", refused_posts, NEED_FAKE},
	{"fake: an op's error", op_error, NEED_FAKE},
	{"fake: stuck until stopped", stuck_until_stopped, NEED_FAKE},
	{"fake: stuck message", stuck_message, NEED_FAKE},
	{"fake: slow and late", slow_and_late, NEED_FAKE},
	{"fake: a late slice and a stop", late_slice_and_stop, NEED_FAKE},
	{"fake: freeze and thaw", freeze_and_thaw, NEED_FAKE | NEED_TWO},
	{"fake: link down and up", link_down_and_up, NEED_FAKE | NEED_TWO},
	{"fake: allocations fail", allocations_fail, NEED_FAKE},
	{"fake: a seed repeats", seed_repeats, NEED_FAKE},
	{"fake: cut in flight", cut_link, NEED_FAKE | NEED_TWO},
	{"fake: the source vanishes", vanish_source, NEED_FAKE | NEED_TWO},
	{"fake: the destination vanishes", vanish_destination, NEED_FAKE | NEED_TWO},
	{NULL, NULL, 0},
};
