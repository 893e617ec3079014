/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages for which a daemon had no memory: each costs what it was for, or time, and
 * never the peering. Two daemons on a virtual loop; one message of a kind is handed
 * to the real handshake as peers do that have only its beginning.
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
#include "tests/lib/cluster.h"

static const struct cache geometry = {.layers = 2,
				      .pages = 16,
				      .page_tokens = 4,
				      .units = 4,
				      .total_units = 4,
				      .unit_bytes = 32};

struct pair {
	struct cluster c;
	struct session *prefill, *decode;
	struct cache src, dst;
};

static struct {
	struct peers_callbacks real;
	enum wire_type type;
	unsigned int calls;
	uint64_t epoch;
} lack;

static int on_message(void *owner, struct peer *peer, const struct wire_header *h,
		      struct cursor *body)
{
	size_t len = cursor_left(body);
	struct cursor head;

	if (h->type != lack.type || lack.calls)
		return lack.real.on_message(owner, peer, h, body);
	lack.calls++;
	lack.epoch = peer->epoch;
	cursor_read(&head, body->base + body->pos,
		    len < PEER_LACK_BYTES ? len : PEER_LACK_BYTES);
	return lack.real.on_lack(owner, peer, h, &head);
}

/* The next message of this type that the node is told. */
static void lack_of(struct pair *p, unsigned int node, enum wire_type type)
{
	struct peers *peers = p->c.nodes[node].kvd.peers;

	lack.type = type;
	lack.calls = 0;
	lack.real = peers->callbacks;
	peers->callbacks.on_message = on_message;
}

static void assert_lacked(const struct pair *p, unsigned int node)
{
	const struct list *peers = peers_list(p->c.nodes[node].kvd.peers);
	const struct peer *peer = list_first(peers, struct peer, link);

	assert_int_equal(lack.calls, 1);
	assert_int_equal(peer->state, PEER_UP);
	assert_int_equal(peer->epoch, lack.epoch);
}

static int setup(void **state)
{
	struct pair *p = calloc(1, sizeof(*p));

	cluster_new(&p->c, 1, 2);
	p->prefill = cluster_engine(&p->c, 0, "prefill");
	p->decode = cluster_engine(&p->c, 1, "decode");
	p->src = p->dst = geometry;
	cluster_cache(&p->c, p->prefill, "kv", 0, &p->src);
	cluster_cache(&p->c, p->decode, "kv", 0, &p->dst);
	memset(p->src.base, 0x11, p->src.bytes);
	*state = p;
	return 0;
}

static int teardown(void **state)
{
	struct pair *p = *state;

	cluster_free(&p->c);
	cache_close(&p->src);
	cache_close(&p->dst);
	free(p);
	return 0;
}

static void begin(struct pair *p, unsigned long long room)
{
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.open','room':'%llu','role':'send','pool':%llu}", room,
		   (unsigned long long)p->src.pool);
	cluster_ok(
		&p->c, p->decode,
		"{'cmd':'room.open','room':'%llu','role':'recv','pool':%llu,'sources':["
		"'%s']}",
		room, (unsigned long long)p->dst.pool, p->c.nodes[0].endpoint);
	cluster_ok(
		&p->c, p->decode,
		"{'cmd':'room.bind','room':'%llu','views':{'kv':{'pages':[7,2,8,12]}}}",
		room);
}

static void succeeds(struct pair *p, unsigned long long room)
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

static void pool_without_memory_is_announced_again(void **state)
{
	struct pair *p = *state;

	lack_of(p, 1, WIRE_T_REGISTER);
	succeeds(p, 1);
	assert_lacked(p, 1);
}

static void request_without_memory_costs_its_room(void **state)
{
	struct pair *p = *state;
	struct room *room;

	lack_of(p, 0, WIRE_T_TRANSFER_INFO);
	begin(p, 1);
	cluster_until_state(&p->c, p->decode, "recv", 1, KVD_FAILED);
	room = rooms_find(p->c.nodes[1].kvd.rooms, p->decode, ROOM_RECV, 1);
	assert_int_equal(room->error.code, ERR_NOMEM);
	succeeds(p, 2);
	assert_lacked(p, 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(pool_without_memory_is_announced_again),
		TEST(request_without_memory_costs_its_room),
	};

	return cmocka_run_group_tests_name("lack", tests, NULL, NULL);
}
