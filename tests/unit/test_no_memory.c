/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peer messages whose handler finds no memory: each allocation that one makes fails once.
 * It costs the room, or the peering, which comes up again; the next room succeeds, and
 * nothing is left of the first.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/peer/peer_impl.h"
#include "daemon/room/room.h"
#include "daemon/room/rooms.h"
#include "proto/kvd_status.h"
#include "tests/lib/room_pair.h"

static const struct cache geometry = {.layers = 2,
				      .pages = 16,
				      .page_tokens = 4,
				      .units = 4,
				      .total_units = 4,
				      .unit_bytes = 32};

static struct {
	struct peers_callbacks real;
	enum wire_type type;
	uint64_t nth; /* allocation that fails; 0: the message came */
	bool failed;
} lost;

static int on_message(void *owner, struct peer *peer, const struct wire_header *h,
		      struct cursor *body)
{
	int r;

	if (h->type != lost.type || !lost.nth)
		return lost.real.on_message(owner, peer, h, body);
	mem_fail_at(lost.nth);
	r = lost.real.on_message(owner, peer, h, body);
	lost.failed = mem_count() >= lost.nth;
	lost.nth = 0;
	mem_fail_at(0);
	return r;
}

/* The next message of this type that the node is told. */
static void lose(struct room_pair *p, unsigned int node, enum wire_type type,
		 uint64_t nth)
{
	struct peers *peers = p->c.nodes[node].kvd.peers;

	lost.type = type;
	lost.nth = nth;
	lost.failed = false;
	lost.real = peers->callbacks;
	peers->callbacks.on_message = on_message;
}

static int setup(void **state)
{
	struct room_pair *p = room_pair_new(&geometry, 1);

	memset(p->src.base, 0x11, p->src.bytes);
	*state = p;
	return 0;
}

static void begin(struct room_pair *p, unsigned long long room)
{
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.open','room':'%llu','role':'send','pool':%llu}", room,
		   (unsigned long long)p->src.pool);
	room_pair_open_recv(p, room);
	cluster_ok(
		&p->c, p->decode,
		"{'cmd':'room.bind','room':'%llu','views':{'kv':{'pages':[7,2,8,12]}}}",
		room);
}

static void succeeds(struct room_pair *p, unsigned long long room)
{
	begin(p, room);
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.send','room':'%llu','seq':0,'last':true,'views':{'kv':{"
		   "'pages':[3,4,9,1]}}}",
		   room);
	cluster_until_state(&p->c, p->decode, "recv", room, KVD_SUCCESS);
	cluster_until_state(&p->c, p->prefill, "send", room, KVD_SUCCESS);
	assert_int_equal(*cache_at(&p->dst, 1, 1, 8, 3, 2, 5), 0x11);
}

static bool has_ended(void *arg)
{
	struct room_pair *p = arg;
	int state = cluster_state(&p->c, p->decode, "recv", 1);

	return state == KVD_FAILED || state == KVD_WAITING_FOR_INPUT;
}

/* Room 1 is begun while the message's nth allocation fails; room 2 succeeds. */
static bool survives(void **state, unsigned int node, enum wire_type type, uint64_t nth)
{
	struct room_pair *p = *state;
	bool failed;

	lose(p, node, type, nth);
	begin(p, 1);
	cluster_until(&p->c, has_ended, p, "room 1 waits or has failed");
	failed = lost.failed;
	succeeds(p, 2);
	return failed;
}

static void sweep(void **state, unsigned int node, enum wire_type type)
{
	uint64_t nth = 1;

	while (survives(state, node, type, nth)) {
		nth++;
		room_pair_teardown(state);
		setup(state);
	}
	assert_true(nth > 1);
}

static void register_without_memory_ends_the_peering_at_most(void **state)
{
	sweep(state, 1, WIRE_T_REGISTER);
}

static void transfer_info_without_memory_ends_its_room_at_most(void **state)
{
	sweep(state, 0, WIRE_T_TRANSFER_INFO);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, room_pair_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(register_without_memory_ends_the_peering_at_most),
		TEST(transfer_info_without_memory_ends_its_room_at_most),
	};

	return cmocka_run_group_tests_name("no_memory", tests, NULL, NULL);
}
