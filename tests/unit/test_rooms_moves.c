/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moves have one owner and one end, and a request has one answer, at each step where it
 * may end and for each cause. In-process cluster, virtual time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/loop/offload.h"
#include "daemon/room/room.h"
#include "daemon/room/room_trace.h"
#include "daemon/room/rooms_set.h"
#include "daemon/session/region.h"
#include "proto/kvd_status.h"
#include "tests/lib/room_pair.h"

#define MS LOOP_NS_PER_MS

static const struct cache geometry = {.layers = 2,
				      .pages = 16,
				      .page_tokens = 4,
				      .units = 4,
				      .total_units = 4,
				      .unit_bytes = 32};

static int setup(void **state)
{
	struct room_pair *p = room_pair_new(&geometry, 1);

	memset(p->src.base, 0x11, p->src.bytes);
	*state = p;
	return 0;
}

/* The word stored by an engine's stream: in the last page of its cache, which no room
 * names. */
static uint64_t *word_of(const struct cache *cache)
{
	return (uint64_t *)(cache->base + cache->bytes - sizeof(uint64_t));
}

/* ",'wait':{…}" for that word to reach 1. */
static const char *wait_for(const struct cache *cache, char *buf, size_t size)
{
	*word_of(cache) = 0;
	snprintf(buf, size,
		 ",'wait':{'kind':'seq','region':%llu,'offset':%llu,'value':'1'}",
		 (unsigned long long)cache->region,
		 (unsigned long long)(cache->bytes - sizeof(uint64_t)));
	return buf;
}

static void open_both(struct room_pair *p, uint64_t room, const char *bind_wait)
{
	room_pair_open_send(p, room);
	room_pair_open_recv(p, room);
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.bind','room':'%llu','views':{'kv':{'pages':[7,2,8,12]}}"
		   "%s}",
		   (unsigned long long)room, bind_wait);
	cluster_until_state(&p->c, p->prefill, "send", room, KVD_WAITING_FOR_INPUT);
}

#define CHUNKS 4u /* of a page each */

static void send_chunk_of(struct room_pair *p, uint64_t room, unsigned int seq,
			  const char *wait)
{
	static const unsigned int pages[CHUNKS] = {3, 4, 9, 1};

	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.send','room':'%llu','seq':%u,'last':%s,'views':{'kv':{"
		   "'pages':[%u],'first_token':%u}}%s}",
		   (unsigned long long)room, seq, seq == CHUNKS - 1 ? "true" : "false",
		   pages[seq], seq * 4, wait);
}

static struct room *room_at(struct room_pair *p, unsigned int node, enum room_role role,
			    uint64_t number)
{
	return rooms_find(rooms_of(&p->c.nodes[node].kvd), node ? p->decode : p->prefill,
			  role, number);
}

/* Where the region's memory is registered with the pair's transport. */
static struct xp_reg **registration(const struct room_pair *p, const struct cache *cache)
{
	struct region *region = region_find(cache->session, cache->region);

	(void)p;
	assert_non_null(region);
	for (unsigned int t = 0; t < TRANSPORTS_MAX; t++) {
		if (region->regs[t])
			return &region->regs[t];
	}
	fail_msg("region %ju is registered nowhere", (uintmax_t)cache->region);
	return NULL;
}

static void works(struct room_pair *p, uint64_t room)
{
	open_both(p, room, "");
	for (unsigned int seq = 0; seq < CHUNKS; seq++)
		send_chunk_of(p, room, seq, "");
	cluster_until_state(&p->c, p->decode, "recv", room, KVD_SUCCESS);
	cluster_until_state(&p->c, p->prefill, "send", room, KVD_SUCCESS);
}

/* The memory cannot be used with the peer's transport (a dma-buf region whose peer has
 * only tcp): detected when the first chunk is sent, after its wait. */
static void chunk_of_unusable_memory_fails_its_room_after_the_wait(void **state)
{
	struct room_pair *p = *state;
	struct xp_reg **where = registration(p, &p->src), *reg = *where;
	char wait[128];

	wait_for(&p->src, wait, sizeof(wait));
	open_both(p, 1, "");
	send_chunk_of(p, 1, 0, wait);
	send_chunk_of(p, 1, 1, wait);
	cluster_run(&p->c, 10 * MS);
	assert_int_equal(room_at(p, 0, ROOM_SEND, 1)->busy, 2);
	*where = NULL;
	*word_of(&p->src) = 1;
	cluster_until_state(&p->c, p->prefill, "send", 1, KVD_FAILED);
	cluster_until_state(&p->c, p->decode, "recv", 1, KVD_FAILED);
	*where = reg;
	room_failed_with(room_at(p, 0, ROOM_SEND, 1), ERR_IMPORT, "cannot be used with");
	assert_int_equal(room_at(p, 0, ROOM_SEND, 1)->busy, 0);
	works(p, 2);
}

/* The same, where the wait's end finds no memory for the table of buffers. */
static void chunk_without_memory_for_buffers_fails_its_room_after_the_wait(void **state)
{
	struct room_pair *p = *state;
	char wait[128];

	wait_for(&p->src, wait, sizeof(wait));
	open_both(p, 1, "");
	send_chunk_of(p, 1, 0, wait);
	cluster_run(&p->c, 10 * MS);
	*word_of(&p->src) = 1;
	mem_fail_from(1);
	cluster_run(&p->c, 10 * MS);
	mem_fail_at(0);
	cluster_until_state(&p->c, p->prefill, "send", 1, KVD_FAILED);
	cluster_until_state(&p->c, p->decode, "recv", 1, KVD_FAILED);
	assert_int_equal(room_at(p, 0, ROOM_SEND, 1)->busy, 0);
	cluster_run(&p->c, LOOP_NS_PER_S);
	works(p, 2);
}

static bool holds_two(void *arg)
{
	const struct room *recv = room_at(arg, 1, ROOM_RECV, 1);
	const struct move *move;
	unsigned int waiting = 0;

	list_foreach(move, &recv->moves, link)
		waiting += move_phase(move) == MOVE_WAITING;
	return waiting == 2;
}

/* Chunks that wait for the receiver's stream, whose memory then cannot be used: the
 * first one that would be written fails the room, which answers both, each once. */
static void chunks_waiting_to_land_are_refused_once(void **state)
{
	struct room_pair *p = *state;
	struct xp_reg **where = registration(p, &p->dst), *reg = *where;
	char wait[128];

	open_both(p, 1, wait_for(&p->dst, wait, sizeof(wait)));
	send_chunk_of(p, 1, 0, "");
	send_chunk_of(p, 1, 1, "");
	cluster_until(&p->c, holds_two, p, "two chunks that wait");
	*where = NULL;
	*word_of(&p->dst) = 1;
	cluster_until_state(&p->c, p->decode, "recv", 1, KVD_FAILED);
	cluster_until_state(&p->c, p->prefill, "send", 1, KVD_FAILED);
	*where = reg;
	room_failed_with(room_at(p, 1, ROOM_RECV, 1), ERR_IMPORT, "cannot be used with");
	assert_int_equal(room_at(p, 1, ROOM_RECV, 1)->busy, 0);
	assert_int_equal(room_at(p, 1, ROOM_RECV, 1)->bytes, 0);
	works(p, 2);
}

static unsigned int pins(const struct cache *cache)
{
	return region_find(cache->session, cache->region)->pins;
}

/* An ended room keeps nothing of its wait, even while it is open: before the wait is
 * over, once it is, and without a wait. */
static void region_of_a_word_is_free_when_its_room_has_ended(void **state)
{
	struct room_pair *p = *state;
	unsigned int before = pins(&p->dst);
	char wait[128];

	for (unsigned int room = 1; room <= 3; room++) {
		wait_for(&p->dst, wait, sizeof(wait));
		*word_of(&p->dst) = room == 2;
		open_both(p, room, wait);
		assert_int_equal(pins(&p->dst), before + 1);
		if (room == 3) {
			cluster_ok(&p->c, p->decode,
				   "{'cmd':'room.abort','room':'3','role':'recv'}");
			cluster_until_state(&p->c, p->decode, "recv", 3, KVD_FAILED);
			assert_int_equal(pins(&p->dst), before);
			continue;
		}
		for (unsigned int seq = 0; seq < CHUNKS; seq++)
			send_chunk_of(p, room, seq, "");
		cluster_run(&p->c, 10 * MS);
		*word_of(&p->dst) = 1;
		cluster_until_state(&p->c, p->decode, "recv", room, KVD_SUCCESS);
		assert_int_equal(pins(&p->dst), before);
	}
}

/* A transfer whose plan a helper makes, on both sides; the node's helper is slow. */
static void begin_in_planning(struct room_pair *p, struct cache big[2], unsigned int slow)
{
	big[0] = big[1] = (struct cache){.layers = 1,
					 .pages = 2100,
					 .page_tokens = 1,
					 .units = 1,
					 .total_units = 1,
					 .unit_bytes = 8};
	cluster_cache(&p->c, p->prefill, "big", 0, &big[0]);
	cluster_cache(&p->c, p->decode, "big", 0, &big[1]);
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.open','room':'1','role':'send','pool':%llu}",
		   (unsigned long long)big[0].pool);
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'1','role':'recv','pool':%llu,"
		   "'sources':[{'endpoint':'%s','pool':'big'}]}",
		   (unsigned long long)big[1].pool, p->c.nodes[0].endpoint);
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.bind','room':'1','views':{'kv':{'pages':[[0,2100]]}}}");
	cluster_run(&p->c, 10 * MS);
	offload_hold(p->c.nodes[slow].kvd.offload, true);
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.send','room':'1','seq':0,'last':true,"
		   "'views':{'kv':{'pages':[[0,2100]]}}}");
	cluster_run(&p->c, 10 * MS);
	assert_int_not_equal(offload_pending(p->c.nodes[slow].kvd.offload), 0);
}

static void end_in_planning(struct room_pair *p, struct cache big[2], unsigned int slow)
{
	offload_hold(p->c.nodes[slow].kvd.offload, false);
	cluster_until_state(&p->c, p->decode, "recv", 1, KVD_FAILED);
	cluster_until_state(&p->c, p->prefill, "send", 1, KVD_FAILED);
	assert_int_equal(room_at(p, 1, ROOM_RECV, 1)->bytes, 0);
	cache_close(&big[0]);
	cache_close(&big[1]);
}

/* A slow helper plans the chunk: the end of the room answers the request at once, is
 * not terminal before the helper is done, and the planned bytes are not written. */
static void chunk_in_planning_when_its_room_fails_ends_with_its_helper(void **state)
{
	struct room_pair *p = *state;
	struct cache big[2];
	struct room *send;

	begin_in_planning(p, big, 1);
	cluster_ok(&p->c, p->decode, "{'cmd':'room.abort','room':'1'}");
	cluster_run(&p->c, 100 * MS);
	/* there nothing is in flight any more; here the helper is at it */
	send = room_at(p, 0, ROOM_SEND, 1);
	assert_int_equal(sm_state(&send->sm), ROOM_FAILED);
	assert_int_equal(room_at(p, 1, ROOM_RECV, 1)->busy, 1);
	assert_int_equal(sm_state(&room_at(p, 1, ROOM_RECV, 1)->sm), ROOM_ABORTING);
	end_in_planning(p, big, 1);
}

/* Its plan is the helper's alone: the trace of its end knows no bytes yet. */
static void plan_in_progress_is_not_read(void **state)
{
	struct room_pair *p = *state;
	const struct trace_event *event;
	struct cache big[2];
	struct room *send;

	begin_in_planning(p, big, 0);
	send = room_at(p, 0, ROOM_SEND, 1);
	assert_non_null(list_first(&send->moves, struct move, link)->plan);
	cluster_ok(&p->c, p->prefill, "{'cmd':'room.abort','room':'1'}");
	event = trace_at(&rooms_of(&p->c.nodes[0].kvd)->trace, send->trace.last - 1);
	for (; event->what != TRACE_OVER; event -= event->back)
		assert_int_not_equal(event->back, 0);
	assert_int_equal(event->value, 0);
	end_in_planning(p, big, 0);
}

static unsigned int dispatched(const struct room *room)
{
	const struct chunk *chunk;
	unsigned int n = 0;

	list_foreach(chunk, &room->send.chunks, link)
		n += chunk->dispatched;
	return n;
}

/* Given before there is a receiver: no turn is as long as all of them together. */
static void chunks_waiting_for_receiver_are_sent_in_turns(void **state)
{
	struct room_pair *p = *state;
	struct room *send;

	room_pair_open_send(p, 1);
	for (unsigned int i = 0; i < CHUNKS; i++)
		send_chunk_of(p, 1, i, "");
	send = room_at(p, 0, ROOM_SEND, 1);
	room_pair_open_recv(p, 1);
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.bind','room':'1','views':{'kv':{'pages':[7,2,8,12]}}}");
	loop_virtual_parts(p->c.loop, 1);
	for (unsigned int before = dispatched(send), now; before < CHUNKS; before = now) {
		loop_turn(p->c.loop, LOOP_NS_PER_S);
		now = dispatched(send);
		assert_true(now <= before + 1);
	}
	loop_virtual_parts(p->c.loop, 0);
	cluster_until_state(&p->c, p->decode, "recv", 1, KVD_SUCCESS);
	cluster_until_state(&p->c, p->prefill, "send", 1, KVD_SUCCESS);
}

static void chunks_past_the_cap_of_a_room_are_refused(void **state)
{
	struct room_pair *p = *state;
	struct room *send;

	room_pair_open_send(p, 1);
	send = room_at(p, 0, ROOM_SEND, 1);
	for (unsigned int i = 0; i < ROOM_CHUNKS_MAX; i++) {
		struct chunk *chunk = mem_zalloc(sizeof(*chunk));

		assert_non_null(chunk);
		chunk->seq = i;
		assert_int_equal(send_chunk(send, chunk), 0);
	}
	cluster_refused(&p->c, p->prefill, "ELIMIT",
			"{'cmd':'room.send','room':'1','seq':%u,"
			"'views':{'kv':{'pages':[3]}}}",
			ROOM_CHUNKS_MAX);
	/* a retry is no new one */
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.send','room':'1','seq':0,"
		   "'views':{'kv':{'pages':[3]}}}");
	assert_int_equal(sm_state(&send->sm), ROOM_BOOT);
}

/* Of a chunk that is over its number is kept, and those in a row are one interval. */
static void chunks_ended_take_no_memory(void **state)
{
	struct room_pair *p = *state;
	const struct account *account = p->prefill->account;
	struct room *send;
	int64_t blocks = 0;

	open_both(p, 1, "");
	send = room_at(p, 0, ROOM_SEND, 1);
	for (unsigned int i = 0; i < 2000; i++) {
		cluster_ok(&p->c, p->prefill,
			   "{'cmd':'room.send','room':'1','seq':%u,'views':{'kv':{"
			   "'pages':[3],'first_token':%u}}}",
			   i, 4096 + 4 * i); /* no room has bound those */
		cluster_run(&p->c, MS);
		if (i == 100)
			blocks = mem_live();
	}
	assert_true(mem_live() < blocks + 20);
	assert_true(list_empty(&send->send.chunks));
	assert_int_equal(send->send.chunks_given, 2000);
	assert_int_equal(send->send.given.sets[0].count, 1);
	assert_true(account->bytes[ACCOUNT_CHUNKS] < 256);
	cluster_ok(&p->c, p->prefill, /* a retry */
		   "{'cmd':'room.send','room':'1','seq':7,'views':{'kv':{'pages':[3]}}}");
	assert_int_equal(send->send.chunks_given, 2000);
	cluster_ok(&p->c, p->prefill, /* the highest number there is */
		   "{'cmd':'room.send','room':'1','seq':9007199254740991,'last':true,"
		   "'views':{'kv':{'pages':[1,2,3,4]}}}");
	cluster_until_state(&p->c, p->decode, "recv", 1, KVD_SUCCESS);
	cluster_until_state(&p->c, p->prefill, "send", 1, KVD_SUCCESS);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, room_pair_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(chunks_ended_take_no_memory),
		CASE(chunk_of_unusable_memory_fails_its_room_after_the_wait),
		CASE(chunk_without_memory_for_buffers_fails_its_room_after_the_wait),
		CASE(chunks_waiting_to_land_are_refused_once),
		CASE(region_of_a_word_is_free_when_its_room_has_ended),
		CASE(chunk_in_planning_when_its_room_fails_ends_with_its_helper),
		CASE(plan_in_progress_is_not_read),
		CASE(chunks_waiting_for_receiver_are_sent_in_turns),
		CASE(chunks_past_the_cap_of_a_room_are_refused),
	};

	return cmocka_run_group_tests_name("rooms_moves", tests, NULL, NULL);
}
