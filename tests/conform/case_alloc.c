/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Want of memory. Each allocation of a transfer, of a connection, of a registration
 * and of a key fails once, at either side, and then:
 *
 * - every call and every transfer comes to an end, once, and says ENOMEM or that the
 *   peer is lost; success is still success at both sides; memory is old or new;
 * - a transfer costs itself, not the connection; a connection that was not made is
 *   made when it is tried again, and works;
 * - nothing stays behind: the same worlds end cleanly, and leak checkers look on.
 *
 * Allocations are counted in the end's loop thread; of a registration in its helper.
 */
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "tests/conform/conform.h"

#define ALLOCATIONS_MAX 400u /* of one of these; there are some dozens */
#define LONG_BYTES (300u << 10)

struct tally {
	unsigned int failed, lost; /* allocations; connections that they cost */
};

static void arm(struct end *end, uint64_t nth, enum puppet_fail when)
{
	end_call(end, CMD_FAIL_ALLOC, nth, when, 0, 0);
}

/* Whether the nth was reached. */
static bool disarm(struct end *end, uint64_t nth)
{
	return end_call(end, CMD_FAIL_ALLOC, 0, FAIL_FROM_POST, 0, 0).v[0] >= nth;
}

static bool is_lost(struct end *a, struct end *b)
{
	return end_peer(a, b).lost || end_peer(b, a).lost;
}

/* Keys are of a connection: areas that live on get new ones when asked. */
static void connect_anew(struct world *world, struct end *a, struct end *b)
{
	struct area *area;

	list_foreach(area, &world->areas, link) {
		for (uint32_t i = 0; i < 2; i++)
			area_key_drop(area, world->end[i]);
	}
	end_peer_close(a, b);
	if (a != b)
		end_peer_close(b, a);
	world_connect(world, a, b);
}

/* ---- transfers ---- */

static void check_end(struct deal *deal, bool lost)
{
	struct outcome op = deal_op(deal), in = deal_in(deal);

	CHECK(op.dones == 1, "on_done came %u times", op.dones);
	CHECK(!in.there || in.dones == 1, "on_inbound_done came %u times", in.dones);
	if (op.code == ERR_OK) {
		deal_succeeded(deal);
		return;
	}
	CHECK(lost || op.code == ERR_NOMEM, "the op failed: %s: %s", err_name(op.code),
	      op.text);
	deal_torn(deal);
}

/* Rows of `len` with gaps between them: short ones are packed. */
static bool transfer_with(struct world *world, struct area *src, struct area *dst,
			  enum xp_kind kind, uint64_t len, struct end *victim,
			  uint64_t nth, struct tally *tally)
{
	struct plan_run run = {.dst = 7,
			       .len = len,
			       .count = LONG_BYTES / len / 2,
			       .src_stride = (int64_t)len + 5,
			       .dst_stride = (int64_t)len + 3};
	struct deal *deal = deal_simple(world, kind, src, dst, &run, 1);
	struct end *init = deal->init, *ans = deal->ans;
	bool failed, lost;
	int r;

	arm(victim, nth, FAIL_FROM_NOW);
	r = deal_post(deal, HEADER_BYTES);
	if (r == 0)
		world_settle(world);
	failed = disarm(victim, nth);
	lost = is_lost(init, ans);
	if (r < 0)
		CHECK(deal->refused.code == ERR_NOMEM && failed &&
			      (victim == init || world->hub), /* which has one thread */
		      "post: %s", deal->refused.text);
	else if (failed)
		check_end(deal, lost);
	else
		deal_succeeded(deal);
	CHECK(failed || !lost, "the peer is lost: %s", end_peer(init, ans).text);
	deal_free(deal);
	tally->failed += failed;
	tally->lost += lost;
	if (lost)
		connect_anew(world, world->end[0], world->end[1]);
	return failed;
}

static void transfers_between(struct world *world, enum xp_kind kind, struct end *src,
			      struct end *dst, uint64_t len)
{
	struct area *from = area_new(world, src, MEMORY_SEALED, LONG_BYTES);
	struct area *to = area_new(world, dst, MEMORY_SEALED, LONG_BYTES);
	struct tally tally = {0};

	for (unsigned int i = 0; i < 2; i++) {
		uint64_t nth = 1;

		while (transfer_with(world, from, to, kind, len, world->end[i], nth,
				     &tally))
			CHECK(++nth < ALLOCATIONS_MAX, "it never ends");
	}
	printf("# %s, rows of %llu: %u allocations failed\n",
	       kind == XP_WRITE ? "write" : "read", (unsigned long long)len,
	       tally.failed);
	CHECK(tally.lost == 0, "%u of %u lost allocations cost the connection",
	      tally.lost, tally.failed);
	area_free(from);
	area_free(to);
}

static void alloc_transfers(struct world *world)
{
	static const uint64_t lens[] = {64, LONG_BYTES / 2 - 64};

	for (size_t i = 0; i < ARRAY_LEN(lens); i++) {
		transfers_between(world, XP_WRITE, world->end[0], world->end[1], lens[i]);
		transfers_between(world, XP_READ, world->end[0], world->end[1], lens[i]);
	}
}

static void alloc_messages(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];

	for (unsigned int i = 0; i < 2; i++) {
		bool failed = true;

		for (uint64_t nth = 1; failed; nth++) {
			struct deal *deal = deal_message(world, a, b);
			bool lost;
			int r;

			CHECK(nth < ALLOCATIONS_MAX, "it never ends");
			arm(world->end[i], nth, FAIL_FROM_NOW);
			r = deal_post(deal, 2000);
			if (r == 0)
				world_settle(world);
			failed = disarm(world->end[i], nth);
			lost = is_lost(a, b);
			if (r == 0)
				check_end(deal, lost && failed);
			else
				CHECK(failed && deal->refused.code == ERR_NOMEM,
				      "post: %s", deal->refused.text);
			deal_free(deal);
			if (lost)
				connect_anew(world, a, b);
		}
	}
}

/* ---- connections ---- */

static bool both_ready(struct end *a, struct end *b)
{
	return end_peer(a, b).ready && end_peer(b, a).ready;
}

/* One of them may never hear of the other: its daemon would be told by the other. */
static bool peers_decided(struct end *a, struct end *b)
{
	return both_ready(a, b) || is_lost(a, b);
}

static bool connect_with(struct world *world, struct end *victim, uint64_t nth,
			 struct tally *tally)
{
	struct end *a = world->end[0], *b = world->end[1];
	uint8_t(*tokens)[ENDS_MAX][XP_TOKEN_BYTES] = world->tokens;
	struct err err = {0};
	bool failed;
	int r;

	end_peer_close(a, b);
	if (b != a)
		end_peer_close(b, a);
	for (unsigned int i = 0; i < XP_TOKEN_BYTES; i++) {
		tokens[0][b->index][i] = (uint8_t)world_random(world, 256);
		tokens[b->index][0][i] = (uint8_t)world_random(world, 256);
	}
	arm(victim, nth, FAIL_FROM_NOW);
	r = end_peer_open(a, b, false, tokens[b->index][0], tokens[0][b->index], &err);
	if (r == 0 && b != a)
		r = end_peer_open(b, a, true, tokens[0][b->index], tokens[b->index][0],
				  &err);
	if (r == 0)
		CHECK(AWAIT(world, peers_decided(a, b)),
		      "neither ready nor lost: A is%s ready, B is%s, allocation %ju of "
		      "%c",
		      end_peer(a, b).ready ? "" : " not",
		      end_peer(b, a).ready ? "" : " not", (uintmax_t)nth,
		      'A' + (char)victim->index);
	failed = disarm(victim, nth);
	CHECK(r == 0 || (failed && err.code == ERR_NOMEM), "peer_open: %s", err.text);
	CHECK(failed || (r == 0 && both_ready(a, b)), "lost for nothing: %s %s",
	      end_peer(a, b).text, end_peer(b, a).text);
	tally->failed += failed;
	tally->lost += r < 0 || !both_ready(a, b);
	return failed;
}

static void alloc_connections(struct world *world)
{
	struct tally tally = {0};

	for (unsigned int i = 0; i < 2; i++) {
		uint64_t nth = 1;

		while (connect_with(world, world->end[i], nth, &tally))
			CHECK(++nth < ALLOCATIONS_MAX, "it never ends");
	}
	printf("# connecting: %u allocations failed, %u cost the connection\n",
	       tally.failed, tally.lost);
	/* and one that works */
	connect_anew(world, world->end[0], world->end[1]);
	transfers_between(world, XP_WRITE, world->end[0], world->end[1], 4096);
}

/* ---- memory and keys ---- */

static struct reply mem_state(struct area *area)
{
	struct cmd cmd = {.type = CMD_MEM_STATE, .a = {area->slot}};
	const void *blob;
	int fd;

	return end_call_full(area->at, &cmd, NULL, -1, &blob, &fd);
}

static void registrations_at(struct world *world, struct end *end)
{
	struct area *area = area_new(world, end, MEMORY_SEALED, 65536);
	struct reply state;
	uint64_t nth, count;

	for (nth = 1;; nth++) {
		area_dereg(area);
		arm(end, nth, FAIL_IN_REG);
		end_call(end, CMD_MEM_REG, area->slot, 0, 0, 0);
		CHECK(AWAIT(world, mem_state(area).v[2] == 0), "mem_reg does not end");
		count = end_call(end, CMD_FAIL_ALLOC, 0, 0, 0, 0).v[1];
		state = mem_state(area);
		area->deregged = !state.v[3];
		if (count < nth)
			break;
		CHECK(!state.v[3] ? state.v[5] == ERR_NOMEM : true, "mem_reg: %s",
		      err_name((enum err_code)state.v[5]));
		CHECK(nth < ALLOCATIONS_MAX, "it never ends");
	}
	CHECK(state.v[3], "mem_reg fails for nothing");
	area_free(area);
}

static void keys_between(struct world *world, struct end *owner, struct end *other)
{
	struct area *area = area_new(world, owner, MEMORY_SEALED, 65536);
	struct cmd pack = {.type = CMD_KEY_PACK, .a = {area->slot, other->index}};
	struct cmd unpack = {.type = CMD_KEY_UNPACK, .a = {0, owner->index}};
	const void *blob;
	uint8_t key[XP_KEY_MAX];
	struct reply reply;
	bool failed = true;
	int fd;

	for (uint64_t nth = 1; failed; nth++) {
		CHECK(nth < ALLOCATIONS_MAX, "it never ends");
		arm(owner, nth, FAIL_FROM_NOW);
		reply = end_call_full(owner, &pack, NULL, -1, &blob, &fd);
		failed = disarm(owner, nth);
		CHECK(reply.result == 0 || (failed && reply.err.code == ERR_NOMEM),
		      "key_pack: %s", reply.err.text);
	}
	/* the blob is gone with the next answer */
	reply = end_call_full(owner, &pack, NULL, -1, &blob, &fd);
	unpack.blob_len = reply.blob_len;
	memcpy(key, blob, reply.blob_len);
	failed = true;
	for (uint64_t nth = 1; failed; nth++) {
		uint64_t state = 2;

		CHECK(nth < ALLOCATIONS_MAX, "it never ends");
		unpack.a[0] = slot_take(&other->keys, PUPPET_KEYS);
		arm(other, nth, FAIL_FROM_NOW);
		reply = end_call_full(other, &unpack, key, -1, &blob, &fd);
		if (reply.result == 0)
			CHECK(AWAIT(world, (state = end_call(other, CMD_KEY_STATE,
							     unpack.a[0], 0, 0, 0)
							    .v[0]) != 0 ||
						   is_lost(owner, other)),
			      "a key that is neither ready nor failed");
		failed = disarm(other, nth);
		if (!failed && reply.result < 0 && reply.err.code == ERR_PEER) {
			/* the try before cost the connection, which shows only now */
			CHECK(nth > 1 && AWAIT(world, is_lost(owner, other)),
			      "key_unpack: %s", reply.err.text);
			failed = true;
			nth--;
		} else {
			CHECK(failed || state == 1, "a key fails for nothing");
			CHECK(reply.result == 0 || reply.err.code == ERR_NOMEM,
			      "key_unpack: %s", reply.err.text);
		}
		end_call(other, CMD_KEY_DROP, unpack.a[0], 0, 0, 0);
		other->keys.used[unpack.a[0]] = false;
		if (is_lost(owner, other))
			connect_anew(world, world->end[0], world->end[1]);
	}
	area_free(area);
}

static void alloc_memory(struct world *world)
{
	registrations_at(world, world->end[0]);
	registrations_at(world, world->end[1]);
	keys_between(world, world->end[0], world->end[1]);
	keys_between(world, world->end[1], world->end[0]);
}

const struct conform_case cases_alloc[] = {
	{"alloc: transfers without memory", alloc_transfers, HEAVY},
	{"alloc: messages without memory", alloc_messages, 0},
	{"alloc: connections without memory", alloc_connections, HEAVY},
	{"alloc: registrations and keys without memory", alloc_memory, 0},
	{NULL, NULL, 0},
};
