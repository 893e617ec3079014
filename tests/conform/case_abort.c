/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stops of every kind, before, during and after the bytes.
 *
 * A stop "during" proves itself: the driver watches the destination until some
 * of it is written and some is not, stops, and afterwards counts in memory what
 * was written. When all of it arrived all the same the transfer was too short
 * and the case tries again with a larger one. The torn memory's hash is taken
 * inside the done callback and compared a second later.
 */
#include <string.h>

#include "daemon/base/mem.h"
#include "tests/conform/conform.h"

/* On a machine with other work a transfer may end before this process runs again. A
 * try takes five times its bytes of memory, which a small machine must have. */
#define TRY_NS (40 * 1000 * MS)
#define TRY_BYTES_MAX (128ull << 20)
#define ROW 1024u
#define GAP 64u

enum stop { STOP_CANCEL, STOP_REVOKE, STOP_BOTH, STOP_CLOSE_INIT, STOP_CLOSE_ANS };

static struct deal *flight_new(struct world *world, enum xp_kind kind, struct end *src,
			       struct end *dst, uint64_t bytes, bool poison)
{
	uint64_t rows = bytes / ROW;
	struct area *from = area_new(world, src, MEMORY_SEALED, bytes);
	struct area *to = area_new(world, dst, MEMORY_SEALED, rows * (ROW + GAP));
	const struct plan_run run = {
		.len = ROW, .count = rows, .src_stride = ROW, .dst_stride = ROW + GAP};
	struct deal *deal = deal_simple(world, kind, from, to, &run, 1);

	deal->poison = poison;
	return deal;
}

static bool done_or_flying(struct deal *deal)
{
	return deal_flying(deal) || deal_op(deal).dones;
}

static void stop_now(struct deal *deal, enum stop stop)
{
	switch (stop) {
	case STOP_CANCEL:
		deal_cancel(deal, ERR_ABORTED);
		deal_cancel(deal, ERR_ABORTED);
		return;
	case STOP_REVOKE:
		deal_revoke(deal, ERR_SESSION, "the test revokes");
		deal_revoke(deal, ERR_SESSION, "the test revokes");
		return;
	case STOP_BOTH:
		deal_cancel(deal, ERR_ABORTED);
		deal_revoke(deal, ERR_SESSION, "the test revokes");
		return;
	case STOP_CLOSE_INIT:
		end_peer_close(deal->init, deal->ans);
		return;
	case STOP_CLOSE_ANS:
		end_peer_close(deal->ans, deal->init);
		return;
	}
}

/* After a stop: both sides agree where they must. */
static void check_stopped(struct deal *deal)
{
	struct outcome op, in;

	/* the request may reach the other side only now */
	AWAIT(deal->init->world, (in = deal_in(deal), !in.there || in.dones > 0));
	op = deal_op(deal);
	CHECK(op.dones == 1, "on_done came %u times", op.dones);
	CHECK(!in.there || in.dones == 1, "on_inbound_done came %u times", in.dones);
	if (deal->kind == XP_WRITE && op.code == ERR_OK)
		CHECK(in.there && in.code == ERR_OK,
		      "the source says success, the destination %s: %s",
		      err_name(in.code), in.text);
	CHECK(op.moved <= deal->bytes && in.moved <= deal->bytes, "moved too much");
}

/* The memory side of a stop. True when bytes were in flight. */
static bool check_memory(struct deal *deal)
{
	struct outcome dst_side = deal->kind == XP_WRITE ? deal_in(deal) : deal_op(deal);
	struct area *to = deal->dst_places[0].area, *from = deal->src_places[0].area;
	uint64_t total = 0;
	bool success = dst_side.dones == 1 && dst_side.code == ERR_OK;

	deal_torn(deal);
	total = deal->written;
	if (deal->poison)
		area_resync(from);
	if (dst_side.hash)
		CHECK(dst_side.hash == area_hash(to),
		      "the destination changed after its done");
	else
		CHECK(total == 0, "%llu bytes of a transfer that never landed",
		      (unsigned long long)total);
	CHECK(!success || total > deal->bytes - deal->bytes / 64,
	      "success without the bytes");
	area_verify(to);
	if (!success && dst_side.hash)
		area_still(to, dst_side.hash);
	/* a few bytes of old and new are equal by chance */
	return !success && total > 0 && total < deal->bytes - deal->bytes / 64;
}

static void reconnect(struct world *world, struct deal *deal)
{
	struct end *init = deal->init, *ans = deal->ans;

	CHECK(AWAIT(world, !end_peer(init, ans).open || end_peer(init, ans).lost),
	      "the other side does not learn that the peer closed");
	CHECK(AWAIT(world, !end_peer(ans, init).open || end_peer(ans, init).lost),
	      "the other side does not learn that the peer closed");
	end_peer_close(init, ans);
	end_peer_close(ans, init);
}

static bool stop_try(struct world *world, enum xp_kind kind, struct end *src,
		     struct end *dst, enum stop stop, uint64_t bytes)
{
	struct deal *deal = flight_new(world, kind, src, dst, bytes, true);
	bool closes = stop == STOP_CLOSE_INIT || stop == STOP_CLOSE_ANS;
	uint64_t until_ns = world_now_ns(world) + wait_ns;
	struct area *from = deal->src_places[0].area, *to = deal->dst_places[0].area;
	bool caught;

	CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
	while (!done_or_flying(deal)) {
		CHECK(world_now_ns(world) < until_ns, "no byte moves");
		world_step(world, 20000);
	}
	stop_now(deal, stop);
	if (closes)
		reconnect(world, deal);
	world_settle(world);
	check_stopped(deal);
	caught = check_memory(deal);
	if (closes) {
		area_key_drop(from, dst);
		area_key_drop(to, src);
		world_connect(world, world->end[0],
			      world->end[src == world->end[0] ? dst->index : src->index]);
	}
	deal_free(deal);
	if (!caught) {
		area_leave(from);
		area_leave(to);
	}
	return caught;
}

static void stop_in_flight(struct world *world, enum xp_kind kind, struct end *src,
			   struct end *dst, enum stop stop)
{
	uint64_t bytes = world->big_bytes, until_ns = world_now_ns(world) + TRY_NS;

	for (unsigned int i = 0; i == 0 || world_now_ns(world) < until_ns; i++) {
		if (stop_try(world, kind, src, dst, stop, bytes))
			return;
		if (i > 0 && bytes < TRY_BYTES_MAX)
			bytes *= 2;
	}
	FAIL("never in flight at the stop, up to %llu bytes", (unsigned long long)bytes);
}

static void both_ways(struct world *world, enum xp_kind kind, enum stop stop)
{
	stop_in_flight(world, kind, world->end[0], world->end[1], stop);
	stop_in_flight(world, kind, world->end[1], world->end[0], stop);
}

static void cancel_write_during(struct world *world)
{
	both_ways(world, XP_WRITE, STOP_CANCEL);
}

static void cancel_read_during(struct world *world)
{
	both_ways(world, XP_READ, STOP_CANCEL);
}

static void revoke_write_during(struct world *world)
{
	both_ways(world, XP_WRITE, STOP_REVOKE);
}

static void stop_both_during(struct world *world)
{
	both_ways(world, XP_WRITE, STOP_BOTH);
	both_ways(world, XP_READ, STOP_BOTH);
}

static void close_during(struct world *world)
{
	stop_in_flight(world, XP_WRITE, world->end[0], world->end[1], STOP_CLOSE_INIT);
	stop_in_flight(world, XP_WRITE, world->end[0], world->end[1], STOP_CLOSE_ANS);
	stop_in_flight(world, XP_READ, world->end[0], world->end[1], STOP_CLOSE_INIT);
	stop_in_flight(world, XP_READ, world->end[0], world->end[1], STOP_CLOSE_ANS);
}

/* A READ whose source takes it back: where the source serves, it may stop the
 * bytes; where the destination reads by itself, the check must not pass. */
static void revoke_read(struct world *world)
{
	for (unsigned int way = 0; way < 2; way++) {
		struct deal *deal = flight_new(world, XP_READ, world->end[way],
					       world->end[!way], world->big_bytes, true);
		struct outcome op;

		end_policy(world->end[way], POLICY_HOLD);
		CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
		CHECK(AWAIT(world, deal_asked(deal)), "no request");
		deal_revoke(deal, ERR_LEASE, "the lease has ended");
		world_settle(world);
		op = deal_op(deal);
		CHECK(op.code == ERR_LEASE && strstr(op.text, "the lease has ended"),
		      "the reader got %s: %s", err_name(op.code), op.text);
		check_stopped(deal);
		check_memory(deal);
		end_policy(world->end[way], POLICY_LAND);
	}
}

/* ---- before the bytes ---- */

static struct deal *small_deal(struct world *world, enum xp_kind kind, struct end *src,
			       struct end *dst)
{
	return flight_new(world, kind, src, dst, 16 * ROW, false);
}

static void check_untouched(struct deal *deal)
{
	area_verify(deal->dst_places[0].area);
}

/* All that init sent has arrived when what it sends now has. */
static void follow_up(struct world *world, struct deal *deal)
{
	struct deal *message = deal_message(world, deal->init, deal->ans);

	CHECK(deal_post(message, HEADER_BYTES) == 0, "post: %s", message->refused.text);
	world_settle(world);
	CHECK(deal_op(message).code == ERR_OK, "a message after a cancel fails");
	deal_free(message);
}

static void cancel_before(struct world *world)
{
	for (unsigned int way = 0; way < 4; way++) {
		struct deal *deal =
			small_deal(world, way & 1 ? XP_READ : XP_WRITE,
				   world->end[way >> 1], world->end[!(way >> 1)]);
		struct outcome op;

		CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
		deal_cancel(deal, ERR_ABORTED);
		CHECK(deal_op(deal).dones <= 1, "done inside cancel");
		follow_up(world, deal);
		check_stopped(deal);
		op = deal_op(deal);
		CHECK(op.code == ERR_OK || op.code == ERR_ABORTED ||
			      op.code == ERR_CANCELED,
		      "canceled with %s: %s", err_name(op.code), op.text);
		check_memory(deal);
	}
}

/* Nobody answers; the initiator gives up. */
static void cancel_unanswered(struct world *world)
{
	for (unsigned int way = 0; way < 2; way++) {
		struct deal *deal =
			small_deal(world, XP_WRITE, world->end[way], world->end[!way]);
		struct outcome op, in;

		end_policy(world->end[!way], POLICY_HOLD);
		CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
		CHECK(AWAIT(world, deal_asked(deal)), "no request");
		deal_cancel(deal, way ? 0 : ERR_ABORTED);
		world_settle(world);
		op = deal_op(deal);
		in = deal_in(deal);
		CHECK(op.code == ERR_ABORTED || op.code == ERR_CANCELED,
		      "canceled with %s: %s", err_name(op.code), op.text);
		CHECK(in.code != ERR_OK, "an inbound that nobody answered succeeded");
		check_untouched(deal);
		end_policy(world->end[!way], POLICY_LAND);
	}
}

static void cancel_message(struct world *world)
{
	struct deal *deal = deal_message(world, world->end[0], world->end[1]);

	end_policy(world->end[1], POLICY_HOLD);
	CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
	CHECK(AWAIT(world, deal_asked(deal)), "no request");
	deal_cancel(deal, ERR_ABORTED);
	world_settle(world);
	check_stopped(deal);
	CHECK(deal_op(deal).code != ERR_OK, "a canceled message succeeded");
}

static void revoke_before_land(struct world *world)
{
	for (unsigned int way = 0; way < 2; way++) {
		struct deal *deal =
			small_deal(world, XP_WRITE, world->end[way], world->end[!way]);
		struct outcome op, in;

		end_policy(world->end[!way], POLICY_HOLD);
		CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
		CHECK(AWAIT(world, deal_asked(deal)), "no request");
		deal_revoke(deal, ERR_SESSION, "the engine is gone");
		world_settle(world);
		op = deal_op(deal);
		in = deal_in(deal);
		CHECK(in.code == ERR_SESSION, "the answerer got %s", err_name(in.code));
		CHECK(op.code == ERR_SESSION && strstr(op.text, "the engine is gone"),
		      "the initiator got %s: %s", err_name(op.code), op.text);
		check_untouched(deal);
		end_policy(world->end[!way], POLICY_LAND);
	}
}

static void revoke_after_land(struct world *world)
{
	for (unsigned int way = 0; way < 2; way++) {
		struct deal *deal =
			small_deal(world, XP_WRITE, world->end[way], world->end[!way]);

		end_policy(world->end[!way], POLICY_HOLD);
		CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
		CHECK(AWAIT(world, deal_asked(deal)), "no request");
		deal_land(deal);
		deal_revoke(deal, ERR_SESSION, "the engine is gone");
		world_settle(world);
		check_stopped(deal);
		check_memory(deal);
		end_policy(world->end[!way], POLICY_LAND);
	}
}

/* ---- refusals ---- */

static void refused_with_words(struct world *world)
{
	for (unsigned int way = 0; way < 4; way++) {
		struct end *src = world->end[way & 1], *dst = world->end[!(way & 1)];
		struct deal *deal =
			small_deal(world, way < 2 ? XP_WRITE : XP_READ, src, dst);
		struct outcome op, in;

		end_policy(deal->ans, POLICY_HOLD);
		CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
		CHECK(AWAIT(world, deal_asked(deal)), "no request");
		deal_refuse(deal, ERR_LAYOUT,
			    "view kv layer 3: unit_bytes 256 here, 128 there");
		world_settle(world);
		op = deal_op(deal);
		in = deal_in(deal);
		CHECK(op.code == ERR_LAYOUT && strstr(op.text, "256 here, 128 there"),
		      "the initiator got %s: %s", err_name(op.code), op.text);
		CHECK(in.dones == 1 && in.code == ERR_LAYOUT, "the answerer got %s",
		      err_name(in.code));
		if (deal->kind == XP_WRITE)
			check_untouched(deal);
		else
			check_memory(deal); /* it may have read before it asked */
		end_policy(deal->ans, POLICY_LAND);
	}
}

static void refused_message(struct world *world)
{
	struct deal *deal = deal_message(world, world->end[0], world->end[1]);

	end_policy(world->end[1], POLICY_HOLD);
	CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
	CHECK(AWAIT(world, deal_asked(deal)), "no request");
	deal_refuse(deal, ERR_NOTFOUND, "no such session");
	world_settle(world);
	CHECK(deal_op(deal).code == ERR_NOTFOUND, "the initiator got %s",
	      err_name(deal_op(deal).code));
}

/* The two sides made different plans: no byte, ERR_PLAN on both. */
static void plan_of_other_size(struct world *world)
{
	static const uint64_t lens[] = {ROW - 1, ROW + 1, 1};

	for (unsigned int i = 0; i < 2 * ARRAY_LEN(lens); i++) {
		struct end *src = world->end[i & 1], *dst = world->end[!(i & 1)];
		struct deal *deal = small_deal(world, XP_WRITE, src, dst);
		const struct plan_run other = {.len = lens[i / 2],
					       .count = 16,
					       .src_stride = ROW,
					       .dst_stride = ROW + GAP};
		struct outcome op, in;

		deal_answer_with(deal, &other, 1);
		CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
		world_settle(world);
		op = deal_op(deal);
		in = deal_in(deal);
		CHECK(op.code == ERR_PLAN, "the initiator got %s: %s", err_name(op.code),
		      op.text);
		CHECK(in.code == ERR_PLAN, "the answerer got %s: %s", err_name(in.code),
		      in.text);
		check_untouched(deal);
	}
}

/* The answerer's own plan leaves its own buffers. */
static void land_out_of_range(struct world *world)
{
	struct deal *deal = small_deal(world, XP_WRITE, world->end[0], world->end[1]);
	const struct plan_run other = {
		.len = ROW, .count = 16, .src_stride = ROW, .dst_stride = 1 << 20};
	struct outcome op, in;

	deal_answer_with(deal, &other, 1);
	CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
	world_settle(world);
	op = deal_op(deal);
	in = deal_in(deal);
	CHECK(in.code == ERR_RANGE, "the answerer got %s: %s", err_name(in.code),
	      in.text);
	CHECK(op.code == ERR_RANGE, "the initiator got %s: %s", err_name(op.code),
	      op.text);
	check_untouched(deal);
}

static void post_out_of_range(struct world *world)
{
	static const struct plan_run bad[] = {
		{.src = 16 * ROW - 10, .len = 11, .count = 1},
		{.len = ROW, .count = 17, .src_stride = ROW},
		{.len = ROW, .count = 1, .src_buffer = 1},
	};
	struct area *from = area_new(world, world->end[0], MEMORY_SEALED, 16 * ROW);
	struct area *to = area_new(world, world->end[1], MEMORY_SEALED, 16 * ROW);

	for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
		struct plan_run run = bad[i];
		struct deal *deal;

		run.dst_stride = 1;
		deal = deal_simple(world, XP_WRITE, from, to, &run, 1);
		CHECK(deal_post(deal, HEADER_BYTES) < 0, "run %zu was taken", i);
		CHECK(deal->refused.code == ERR_RANGE, "run %zu refused with %s: %s", i,
		      err_name(deal->refused.code), deal->refused.text);
		/* mirrored: the destination of a READ */
		run = (struct plan_run){.src = 0,
					.dst = bad[i].src,
					.len = bad[i].len,
					.count = bad[i].count,
					.src_stride = 0,
					.dst_stride = bad[i].src_stride,
					.dst_buffer = bad[i].src_buffer};
		deal = deal_simple(world, XP_READ, to, from, &run, 1);
		CHECK(deal_post(deal, HEADER_BYTES) < 0, "READ of run %zu was taken", i);
		CHECK(deal->refused.code == ERR_RANGE, "READ %zu refused with %s: %s", i,
		      err_name(deal->refused.code), deal->refused.text);
	}
}

/* ---- after ---- */

static void stop_after_done(struct world *world)
{
	struct deal *deal = small_deal(world, XP_WRITE, world->end[0], world->end[1]);

	deal_run(deal);
	deal_cancel(deal, ERR_ABORTED); /* the puppet knows that it is done */
	deal_revoke(deal, ERR_SESSION, "too late");
	world_run_ns(world, 20 * MS);
	CHECK(deal_op(deal).code == ERR_OK && deal_in(deal).code == ERR_OK,
	      "an outcome changed after done");
}

/* Many stops in a crowd: those that were left alone must arrive. */
static void cancel_some_of_many(struct world *world)
{
	enum { COUNT = 120, ROOM = 70000 };
	struct area *from = area_new(world, world->end[0], MEMORY_SEALED, 1 << 20);
	struct area *to = area_new(world, world->end[1], MEMORY_SEALED, COUNT * ROOM);
	struct deal *deals[COUNT];

	for (size_t i = 0; i < COUNT; i++) {
		struct plan_run run = {.src = world_random(world, 1 << 19),
				       .dst = i * ROOM,
				       .len = 1 + world_random(world, 65000),
				       .count = 1};

		deals[i] = deal_simple(world, XP_WRITE, from, to, &run, 1);
		CHECK(deal_post(deals[i], HEADER_BYTES) == 0, "post: %s",
		      deals[i]->refused.text);
		if (i % 3 == 1)
			deal_cancel(deals[i], ERR_ABORTED);
		if (i % 7 == 6 && i > 6)
			deal_revoke(deals[i - 6], ERR_SESSION, "the test revokes");
	}
	world_settle(world);
	for (size_t i = 0; i < COUNT; i++) {
		check_stopped(deals[i]);
		if (deal_in(deals[i]).there && deal_in(deals[i]).code == ERR_OK &&
		    deal_op(deals[i]).code == ERR_OK)
			deal_succeeded(deals[i]);
		else
			deal_torn(deals[i]);
		CHECK(i % 3 == 1 || i % 7 == 0 || deal_op(deals[i]).code == ERR_OK,
		      "transfer %zu was not stopped but failed: %s", i,
		      deal_op(deals[i]).text);
	}
}

static void usable_again(struct world *world)
{
	for (unsigned int way = 0; way < 4; way++)
		deal_run(small_deal(world, way & 1 ? XP_READ : XP_WRITE,
				    world->end[way >> 1], world->end[!(way >> 1)]));
}

const struct conform_case cases_abort[] = {
	{"abort: cancel right after post", cancel_before, 0},
	{"abort: cancel without an answer", cancel_unanswered, 0},
	{"abort: cancel a message", cancel_message, 0},
	{"abort: cancel a write in flight", cancel_write_during, 0},
	{"abort: cancel a read in flight", cancel_read_during, 0},
	{"abort: revoke before land", revoke_before_land, 0},
	{"abort: revoke right after land", revoke_after_land, 0},
	{"abort: revoke a write in flight", revoke_write_during, 0},
	{"abort: revoke a read", revoke_read, 0},
	{"abort: cancel and revoke in flight", stop_both_during, 0},
	{"abort: close the peer in flight", close_during, NEED_TWO},
	{"abort: refused, with the words", refused_with_words, 0},
	{"abort: a refused message", refused_message, 0},
	{"abort: a plan of another size", plan_of_other_size, 0},
	{"abort: land outside the buffers", land_out_of_range, 0},
	{"abort: post outside the buffers", post_out_of_range, 0},
	{"abort: too late", stop_after_done, 0},
	{"abort: some of many", cancel_some_of_many, 0},
	{"abort: usable again", usable_again, 0},
	{NULL, NULL, 0},
};
