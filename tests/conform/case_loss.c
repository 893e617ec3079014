/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peers that go away. Each case ends its world (an end is dead); the next one
 * gets a new world.
 */
#include <signal.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "tests/conform/conform.h"

#define FLIGHTS 4u
#define FLIGHT_BYTES_MAX (64ull << 20)

static const struct plan_run small_run = {.len = 5000, .count = 1};

static struct deal *sized_deal(struct world *world, enum xp_kind kind, struct end *src,
			       struct end *dst, uint64_t bytes)
{
	struct area *from = area_new(world, src, MEMORY_SEALED, bytes);
	struct area *to = area_new(world, dst, MEMORY_SEALED, bytes + bytes / 8);
	const struct plan_run run = {.len = 4096,
				     .count = bytes / 4096,
				     .src_stride = 4096,
				     .dst_stride = 4608};

	return deal_simple(world, kind, from, to, &run, 1);
}

static struct deal *big_deal(struct world *world, enum xp_kind kind, struct end *src,
			     struct end *dst)
{
	return sized_deal(world, kind, src, dst, 2 * world->big_bytes);
}

static bool any_flying(struct deal *const *deals, size_t count)
{
	bool any = false;

	for (size_t i = 0; i < count; i++)
		any = any || deal_flying(deals[i]);
	return any;
}

static void check_lost(struct world *world, struct end *end, struct end *other)
{
	struct peer_state state;

	CHECK(AWAIT(world, end_peer(end, other).lost > 0), "on_peer_lost never comes");
	state = end_peer(end, other);
	CHECK(state.lost == 1, "on_peer_lost came %u times", state.lost);
	/* of a killed process the kernel may take registrations before queue pairs */
	CHECK(state.code == ERR_PEER || state.code == ERR_TRANSPORT ||
		      (state.code == ERR_REVOKED && strstr(state.text, "remote access")),
	      "lost with %s: %s", err_name(state.code), state.text);
}

/* What the living end's side of a deal must be. */
static void check_survivor(struct deal *deal, const struct end *living)
{
	struct area *to = deal->dst_places[0].area;
	struct outcome side;

	deal_torn(deal);
	side = deal->init == living ? deal_op(deal) : deal_in(deal);
	if (deal->init != living && !side.there)
		return;
	CHECK(side.dones == 1, "%u dones at the living end", side.dones);
	if (deal->dst == living && side.hash) {
		CHECK(side.hash == area_hash(to), "memory changed after done");
		if (side.code == ERR_OK)
			CHECK(deal->written > deal->bytes - deal->bytes / 64,
			      "success without the bytes");
		area_verify(to);
		area_still(to, side.hash);
	}
}

/* False: all ended before this process saw any of them move. */
static bool fly_both_ways(struct world *world, struct deal *deals[FLIGHTS],
			  uint64_t bytes)
{
	struct end *a = world->end[0], *b = world->end[1];

	deals[0] = sized_deal(world, XP_WRITE, a, b, bytes);
	deals[1] = sized_deal(world, XP_WRITE, b, a, bytes);
	deals[2] = sized_deal(world, XP_READ, a, b, bytes);
	deals[3] = sized_deal(world, XP_READ, b, a, bytes);
	for (size_t i = 0; i < FLIGHTS; i++)
		CHECK(deal_post(deals[i], HEADER_BYTES) == 0, "post: %s",
		      deals[i]->refused.text);
	while (!any_flying(deals, FLIGHTS)) {
		if (world_settled(world))
			return false;
		world_step(world, 20000);
	}
	return true;
}

/* It has ended before anybody looked. */
static void arrive(struct deal *deal)
{
	struct area *from = deal->src_places[0].area, *to = deal->dst_places[0].area;

	deal_succeeded(deal);
	area_verify(to);
	deal_free(deal);
	area_free(from);
	area_free(to);
}

static void kill_in_flight(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];
	uint64_t bytes = 2 * world->big_bytes, until_ns = world_now_ns(world) + wait_ns;
	struct deal *deals[FLIGHTS];
	struct deal *late;

	while (!fly_both_ways(world, deals, bytes)) {
		CHECK(world_now_ns(world) < until_ns, "no byte moves");
		for (size_t i = 0; i < FLIGHTS; i++)
			arrive(deals[i]);
		bytes *= bytes < FLIGHT_BYTES_MAX ? 2 : 1;
	}
	world_kill(world, b);
	check_lost(world, a, b);
	CHECK(end_settled(a), "dones are missing after on_peer_lost");
	for (size_t i = 0; i < FLIGHTS; i++)
		check_survivor(deals[i], a);
	late = deal_message(world, a, b);
	CHECK(deal_post(late, HEADER_BYTES) < 0, "a post to a lost peer was taken");
	world_run_ns(world, 50 * MS);
	CHECK(end_peer(a, b).lost == 1, "on_peer_lost came again");
	end_peer_close(a, b);
}

static void kill_unanswered(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];
	struct deal *mine = big_deal(world, XP_WRITE, a, b);
	struct deal *theirs = big_deal(world, XP_WRITE, b, a);

	end_policy(a, POLICY_HOLD);
	end_policy(b, POLICY_HOLD);
	CHECK(deal_post(mine, HEADER_BYTES) == 0, "post: %s", mine->refused.text);
	CHECK(deal_post(theirs, HEADER_BYTES) == 0, "post: %s", theirs->refused.text);
	CHECK(AWAIT(world, deal_asked(mine) && deal_asked(theirs)), "no request");
	world_kill(world, b);
	check_lost(world, a, b);
	CHECK(end_settled(a), "dones are missing after on_peer_lost");
	CHECK(deal_op(mine).code != ERR_OK && deal_in(theirs).code != ERR_OK,
	      "something succeeded");
	area_verify(theirs->dst_places[0].area);
	deal_land(theirs); /* nobody is there: must be harmless */
	end_peer_close(a, b);
}

static void kill_idle(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];

	deal_run(deal_message(world, a, b));
	deal_run(deal_message(world, b, a));
	world_kill(world, b);
	check_lost(world, a, b);
	end_peer_close(a, b);
}

/* One peer dies; what goes on with the other does not notice. */
static void kill_beside(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1], *c = world->end[2];
	struct deal *deals[4] = {
		big_deal(world, XP_WRITE, a, b), big_deal(world, XP_READ, b, a),
		big_deal(world, XP_WRITE, a, c), big_deal(world, XP_READ, c, a)};

	for (size_t i = 0; i < 4; i++)
		CHECK(deal_post(deals[i], HEADER_BYTES) == 0, "post: %s",
		      deals[i]->refused.text);
	CHECK(AWAIT(world, any_flying(deals + 2, 2) || deal_op(deals[2]).dones),
	      "no byte moves");
	world_kill(world, c);
	check_lost(world, a, c);
	CHECK(AWAIT(world, end_settled(a) && end_settled(b)), "dones are missing");
	deal_succeeded(deals[0]);
	deal_succeeded(deals[1]);
	check_survivor(deals[2], a);
	check_survivor(deals[3], a);
	deal_run(deal_simple(world, XP_WRITE, area_new(world, b, MEMORY_SEALED, 5000),
			     area_new(world, a, MEMORY_SEALED, 5000), &small_run, 1));
	CHECK(!end_peer(a, b).lost, "the other peer was lost too");
	end_peer_close(a, c);
}

/* A frozen peer holds transfers up; then it dies, or wakes. */
static void freeze_and_wake(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];
	struct deal *deal = big_deal(world, XP_WRITE, a, b);
	struct deal *message = deal_message(world, a, b);

	end_signal(b, SIGSTOP);
	CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
	CHECK(deal_post(message, HEADER_BYTES) == 0, "post: %s", message->refused.text);
	world_run_ns(world, 100 * MS);
	end_signal(b, SIGCONT);
	world_settle(world);
	deal_succeeded(deal);
	deal_succeeded(message);
}

static void freeze_and_die(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];
	struct deal *deal = big_deal(world, XP_WRITE, a, b);

	end_signal(b, SIGSTOP);
	CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
	deal_cancel(deal, ERR_ABORTED);
	world_run_ns(world, 100 * MS);
	world_kill(world, b);
	check_lost(world, a, b);
	CHECK(end_settled(a), "dones are missing after on_peer_lost");
	end_peer_close(a, b);
}

/* A peer that says good-bye is lost for the other, which may close and connect
 * anew; what was valid before is not. */
static void close_and_reconnect(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];

	for (unsigned int i = 0; i < 4; i++) {
		struct end *first = i & 1 ? b : a, *second = i & 1 ? a : b;

		deal_run(deal_message(world, a, b));
		end_peer_close(first, second);
		CHECK(AWAIT(world, end_peer(second, first).lost == 1),
		      "the other side is not told");
		end_peer_close(second, first);
		world_connect(world, a, b);
		deal_run(deal_simple(world, i & 2 ? XP_READ : XP_WRITE,
				     area_new(world, b, MEMORY_SEALED, 5000),
				     area_new(world, a, MEMORY_SEALED, 5000), &small_run,
				     1));
	}
}

const struct conform_case cases_loss[] = {
	{"loss: close and reconnect", close_and_reconnect, NEED_TWO},
	{"loss: frozen, then awake", freeze_and_wake, NEED_PROCESS},
	{"loss: frozen, then dead", freeze_and_die, NEED_PROCESS},
	{"loss: killed when idle", kill_idle, NEED_TWO},
	{"loss: killed with requests unanswered", kill_unanswered, NEED_TWO},
	{"loss: killed in flight, both ways", kill_in_flight, NEED_TWO},
	{"loss: killed beside another peer", kill_beside, NEED_THREE},
	{NULL, NULL, 0},
};
