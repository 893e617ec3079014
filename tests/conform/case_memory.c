/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kinds of memory on both ends, and memory that goes away: unregistered, cut by
 * its owner, its process killed, its key dropped, in the middle of a transfer.
 */
#include <string.h>

#include "daemon/base/mem.h"
#include "tests/conform/conform.h"

#define LEN (300u << 10)
#define TRIES 32u

static const struct plan_run strided = {.src = 10,
					.dst = 20,
					.len = 250,
					.count = 1000,
					.src_stride = 255,
					.dst_stride = 260};

static void kinds_move(struct world *world, enum memory_kind src_kind,
		       enum memory_kind dst_kind)
{
	for (unsigned int way = 0; way < 4; way++) {
		struct area *from = area_new(world, world->end[way & 1], src_kind, LEN);
		struct area *to = area_new(world, world->end[!(way & 1)], dst_kind, LEN);
		struct deal *deal = deal_simple(world, way < 2 ? XP_WRITE : XP_READ, from,
						to, &strided, 1);

		deal_run(deal);
		area_verify(to);
		deal_free(deal);
		area_free(from);
		area_free(to);
	}
}

#define KINDS(name, src, dst)                 \
	static void name(struct world *world) \
	{                                     \
		kinds_move(world, src, dst);  \
	}
KINDS(sealed_guarded, MEMORY_SEALED, MEMORY_GUARDED)
KINDS(sealed_vm, MEMORY_SEALED, MEMORY_VM)
KINDS(sealed_linear, MEMORY_SEALED, MEMORY_LINEAR)
KINDS(guarded_sealed, MEMORY_GUARDED, MEMORY_SEALED)
KINDS(guarded_guarded, MEMORY_GUARDED, MEMORY_GUARDED)
KINDS(vm_sealed, MEMORY_VM, MEMORY_SEALED)
KINDS(vm_vm, MEMORY_VM, MEMORY_VM)
KINDS(vm_guarded, MEMORY_VM, MEMORY_GUARDED)
KINDS(linear_sealed, MEMORY_LINEAR, MEMORY_SEALED)
KINDS(linear_linear, MEMORY_LINEAR, MEMORY_LINEAR)

/* Half a transfer's buffers of one kind, half of another. */
static void kinds_mixed(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];
	struct place src[2] = {{area_new(world, a, MEMORY_SEALED, LEN), 100, LEN - 100},
			       {area_new(world, a, MEMORY_GUARDED, LEN), 0, LEN}};
	struct place dst[2] = {{area_new(world, b, MEMORY_GUARDED, LEN), 0, LEN},
			       {area_new(world, b, MEMORY_LINEAR, LEN), 33, LEN - 33}};
	const struct plan_run runs[] = {
		{.len = 1000, .count = 50, .src_stride = 1001, .dst_stride = 2000},
		{.len = 500,
		 .count = 50,
		 .src_stride = 600,
		 .dst_stride = 700,
		 .dst_buffer = 1,
		 .src_buffer = 1},
		{.src = 90000,
		 .len = 3000,
		 .count = 3,
		 .src_stride = -3000,
		 .dst = 110000,
		 .dst_stride = 3000,
		 .src_buffer = 1},
	};

	deal_run(deal_new(world, XP_WRITE, a, b, src, 2, dst, 2, runs, ARRAY_LEN(runs)));
	deal_run(deal_new(world, XP_READ, a, b, src, 2, dst, 2, runs, ARRAY_LEN(runs)));
}

/* ---- memory that goes away ---- */

static bool done_or_flying(struct deal *deal)
{
	return deal_flying(deal) || deal_op(deal).dones;
}

/* Post a transfer over two such areas and come back when it is under way. */
static struct deal *take_off(struct world *world, enum xp_kind kind, struct end *src,
			     struct end *dst, enum memory_kind src_kind,
			     enum memory_kind dst_kind, uint64_t bytes)
{
	struct area *from = area_new(world, src, src_kind, bytes);
	struct area *to = area_new(world, dst, dst_kind, bytes * 2);
	const struct plan_run run = {
		.len = 512, .count = bytes / 512, .src_stride = 512, .dst_stride = 1024};
	struct deal *deal = deal_simple(world, kind, from, to, &run, 1);
	uint64_t until_ns = world_now_ns(world) + wait_ns;

	CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
	while (!done_or_flying(deal)) {
		CHECK(world_now_ns(world) < until_ns, "no byte moves");
		world_step(world, 20000);
	}
	return deal;
}

/* The region is unregistered while its bytes move: the op's own references keep
 * the memory; after done it is deregistered and gone. */
static void unref_in_flight(struct world *world)
{
	for (unsigned int way = 0; way < 4; way++) {
		struct deal *deal =
			take_off(world, way & 1 ? XP_READ : XP_WRITE,
				 world->end[way >> 1], world->end[!(way >> 1)],
				 MEMORY_SEALED, MEMORY_SEALED, world->big_bytes);

		area_unref(deal->src_places[0].area);
		area_unref(deal->dst_places[0].area);
		world_settle(world);
		deal_succeeded(deal);
		area_verify(deal->dst_places[0].area);
		area_dereg(deal->src_places[0].area);
		area_dereg(deal->dst_places[0].area);
	}
}

/* After done the backend holds nothing but its registrations. */
static uint64_t refs_of(struct area *area)
{
	return end_call(area->at, CMD_MEM_STATE, area->slot, 0, 0, 0).v[0];
}

static void refs_return(struct world *world)
{
	for (unsigned int way = 0; way < 2; way++) {
		struct area *from = area_new(world, world->end[0], MEMORY_SEALED, LEN);
		struct area *to = area_new(world, world->end[1], MEMORY_SEALED, LEN);
		struct deal *deal = deal_simple(world, way ? XP_READ : XP_WRITE, from, to,
						&strided, 1);
		uint64_t before_from = refs_of(from), before_to = refs_of(to);

		deal_run(deal);
		CHECK(AWAIT(world,
			    refs_of(from) == before_from && refs_of(to) == before_to),
		      "references on memory stay after done");
	}
}

/* The destination takes its memory back in the middle, and late bytes come for
 * memory that is not registered any more. */
static void late_for_unregistered(struct world *world)
{
	for (unsigned int way = 0; way < 2; way++) {
		struct end *src = world->end[way], *dst = world->end[!way];
		struct deal *deal = take_off(world, XP_WRITE, src, dst, MEMORY_SEALED,
					     MEMORY_SEALED, world->big_bytes);
		struct area *to = deal->dst_places[0].area;
		struct outcome in;

		deal_revoke(deal, ERR_SESSION, "unregistered");
		CHECK(AWAIT(world, deal_in(deal).dones), "revoke does not end");
		in = deal_in(deal);
		area_key_drop(to, src);
		area_dereg(to);
		area_unref(to);
		world_settle(world);
		deal_torn(deal);
		CHECK(in.hash == area_hash(to), "late bytes were written");
		area_verify(to);
		/* the same connection, other memory */
		deal_run(deal_simple(
			world, XP_WRITE, area_new(world, src, MEMORY_SEALED, LEN),
			area_new(world, dst, MEMORY_SEALED, LEN), &strided, 1));
	}
}

/* Keys dropped while a transfer uses them: it ends well or with an error, but
 * it ends, and what it wrote is right. */
static void key_drop_in_flight(struct world *world)
{
	for (unsigned int way = 0; way < 4; way++) {
		struct end *src = world->end[way >> 1], *dst = world->end[!(way >> 1)];
		struct deal *deal =
			take_off(world, way & 1 ? XP_READ : XP_WRITE, src, dst,
				 MEMORY_SEALED, MEMORY_SEALED, world->big_bytes);

		area_key_drop(deal->src_places[0].area, dst);
		area_key_drop(deal->dst_places[0].area, src);
		world_settle(world);
		if (deal_op(deal).code == ERR_OK)
			deal_succeeded(deal);
		else
			deal_torn(deal);
		area_verify(deal->dst_places[0].area);
	}
}

/* The source unregisters while the destination still has its key: a READ with
 * it fails, or reads the memory as it is. */
static void key_after_dereg(struct world *world)
{
	struct area *from = area_new(world, world->end[0], MEMORY_SEALED, LEN);
	struct area *to = area_new(world, world->end[1], MEMORY_SEALED, LEN);
	struct deal *deal = deal_simple(world, XP_READ, from, to, &strided, 1);

	end_policy(world->end[0], POLICY_HOLD);
	area_dereg(from);
	if (deal_post(deal, HEADER_BYTES) < 0)
		return;
	CHECK(AWAIT(world, deal_asked(deal) || deal_op(deal).dones), "nothing happens");
	deal_refuse(deal, ERR_REVOKED, "not exported any more");
	world_settle(world);
	CHECK(deal_op(deal).code != ERR_OK, "a READ of unregistered memory succeeded");
	deal_torn(deal);
}

/* A fault costs its op, nothing else. */
static void check_fault(struct world *world, struct deal *deal)
{
	struct outcome op = deal_op(deal), in = deal_in(deal);

	CHECK(op.dones == 1 && (!in.there || in.dones == 1), "dones are missing");
	CHECK(op.code == ERR_OK || op.code == ERR_FAULT, "failed with %s: %s",
	      err_name(op.code), op.text);
	if (in.there)
		CHECK(in.code == ERR_OK || in.code == ERR_FAULT, "inbound %s: %s",
		      err_name(in.code), in.text);
	CHECK(!end_peer(world->end[0], world->end[1]).lost, "the peer was lost");
	deal_run(deal_simple(
		world, deal->kind, area_new(world, deal->src, MEMORY_SEALED, LEN),
		area_new(world, deal->dst, MEMORY_SEALED, LEN), &strided, 1));
}

/* Hit in the middle, both kinds both ways; what had been moved before may have been
 * all, on a machine that lets us wait: then once more, and with more bytes. */
static unsigned int faults_in_flight(struct world *world, enum memory_kind src_kind,
				     enum memory_kind dst_kind,
				     void (*hit)(struct deal *))
{
	bool shm = src_kind == MEMORY_GUARDED || dst_kind == MEMORY_GUARDED;
	unsigned int faults = 0;

	for (unsigned int i = 0; i < 4 || (i < TRIES && !faults); i++) {
		unsigned int way = i % 4;
		struct deal *deal = take_off(
			world, way & 1 ? XP_READ : XP_WRITE, world->end[way >> 1],
			world->end[!(way >> 1)], src_kind, dst_kind,
			/* a container's /dev/shm has 64 MiB */
			(i < TRIES / 2 || shm ? 2 : 4) * world->big_bytes);
		struct area *from = deal->src_places[0].area;
		struct area *to = deal->dst_places[0].area;

		hit(deal);
		world_settle(world);
		check_fault(world, deal);
		faults += deal_op(deal).code == ERR_FAULT;
		area_verify(from); /* of the destination nothing is promised */
		deal_free(deal);
		area_free(from);
		area_free(to);
	}
	return faults;
}

static void hit_source_by_cut(struct deal *deal)
{
	area_cut(deal->src_places[0].area, 4096);
}

static void hit_destination_by_cut(struct deal *deal)
{
	area_cut(deal->dst_places[0].area, 4096);
}

static void cut_source(struct world *world)
{
	CHECK(faults_in_flight(world, MEMORY_GUARDED, MEMORY_SEALED, hit_source_by_cut) >
		      0,
	      "no transfer was hit by the cut");
}

static void cut_destination(struct world *world)
{
	CHECK(faults_in_flight(world, MEMORY_SEALED, MEMORY_GUARDED,
			       hit_destination_by_cut) > 0,
	      "no transfer was hit by the cut");
}

/* Already cut when the transfer begins. */
static void cut_before(struct world *world)
{
	for (unsigned int way = 0; way < 4; way++) {
		struct area *from =
			area_new(world, world->end[way >> 1],
				 way & 1 ? MEMORY_GUARDED : MEMORY_SEALED, LEN);
		struct area *to = area_new(world, world->end[!(way >> 1)],
					   way & 1 ? MEMORY_SEALED : MEMORY_GUARDED, LEN);
		struct deal *deal = deal_simple(world, XP_WRITE, from, to, &strided, 1);

		area_cut(way & 1 ? from : to, 0);
		to->unchecked = true;
		if (deal_post(deal, HEADER_BYTES) == 0) {
			world_settle(world);
			CHECK(deal_op(deal).code == ERR_FAULT, "it ended with %s: %s",
			      err_name(deal_op(deal).code), deal_op(deal).text);
			check_fault(world, deal);
		} else {
			CHECK(deal->refused.code == ERR_FAULT, "refused with %s",
			      err_name(deal->refused.code));
		}
	}
}

static void hit_source_by_death(struct deal *deal)
{
	area_owner_kill(deal->src_places[0].area);
}

static void hit_destination_by_death(struct deal *deal)
{
	area_owner_kill(deal->dst_places[0].area);
}

static void owner_dies_source(struct world *world)
{
	CHECK(faults_in_flight(world, MEMORY_VM, MEMORY_SEALED, hit_source_by_death) > 0,
	      "no transfer was hit by the owner's death");
}

static void owner_dies_destination(struct world *world)
{
	CHECK(faults_in_flight(world, MEMORY_SEALED, MEMORY_VM,
			       hit_destination_by_death) > 0,
	      "no transfer was hit by the owner's death");
}

/* Register and deregister again and again, with keys. */
static void register_again(struct world *world)
{
	for (unsigned int i = 0; i < 40; i++) {
		struct area *from =
			area_new(world, world->end[i & 1], MEMORY_SEALED, 5000);
		struct area *to =
			area_new(world, world->end[!(i & 1)], MEMORY_SEALED, 5000);
		const struct plan_run run = {.src = i, .dst = 9, .len = 4000, .count = 1};
		struct deal *deal =
			deal_simple(world, i & 2 ? XP_READ : XP_WRITE, from, to, &run, 1);

		deal_run(deal);
		area_verify(to);
		deal_free(deal);
		area_free(from);
		area_free(to);
	}
}

const struct conform_case cases_memory[] = {
	{"memory: sealed to guarded", sealed_guarded, HEAVY},
	{"memory: sealed to vm", sealed_vm, HEAVY},
	{"memory: sealed to linear", sealed_linear, HEAVY},
	{"memory: guarded to sealed", guarded_sealed, HEAVY},
	{"memory: guarded to guarded", guarded_guarded, HEAVY},
	{"memory: vm to sealed", vm_sealed, HEAVY},
	{"memory: vm to vm", vm_vm, HEAVY},
	{"memory: vm to guarded", vm_guarded, HEAVY},
	{"memory: linear to sealed", linear_sealed, HEAVY},
	{"memory: linear to linear", linear_linear, HEAVY},
	{"memory: mixed in one transfer", kinds_mixed, HEAVY},
	{"memory: registered again and again", register_again, HEAVY},
	{"memory: references return", refs_return, 0},
	{"memory: unregistered in flight", unref_in_flight, 0},
	{"memory: late bytes for unregistered memory", late_for_unregistered, 0},
	{"memory: keys dropped in flight", key_drop_in_flight, 0},
	{"memory: key of unregistered memory", key_after_dereg, 0},
	{"memory: source cut in flight", cut_source, HEAVY},
	{"memory: destination cut in flight", cut_destination, HEAVY},
	{"memory: cut before", cut_before, 0},
	{"memory: source's owner dies in flight", owner_dies_source, HEAVY},
	{"memory: destination's owner dies in flight", owner_dies_destination, HEAVY},
	{NULL, NULL, 0},
};
