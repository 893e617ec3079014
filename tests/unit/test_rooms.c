/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rooms end to end on the in-process cluster: the commands that engines speak,
 * the real handshake, rooms, planner and fences, over the fake transport.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/loop/offload.h"
#include "daemon/room/rooms.h"
#include "daemon/session/status.h"
#include "proto/kvd_status.h"
#include "tests/lib/room_pair.h"

static const struct cache geometry = {.layers = 4,
				      .pages = 16,
				      .page_tokens = 4,
				      .units = 4,
				      .total_units = 4,
				      .unit_bytes = 32,
				      .aux_slots = 4,
				      .aux_bytes = 64};

static uint8_t pattern(unsigned int layer, unsigned int field, unsigned int token,
		       unsigned int unit, unsigned int b)
{
	return (uint8_t)(1 + layer * 7 + field * 31 + token * 13 + unit * 5 + b);
}

static void fill(const struct cache *k, const unsigned int *pages, unsigned int tokens)
{
	for (unsigned int l = 0; l < k->layers; l++)
		for (unsigned int f = 0; f < 2; f++)
			for (unsigned int t = 0; t < tokens; t++)
				for (unsigned int u = 0; u < k->units; u++)
					for (unsigned int b = 0; b < k->unit_bytes; b++)
						*cache_at(k, l, f,
							  pages[t / k->page_tokens],
							  t % k->page_tokens,
							  u + k->first_unit, b) =
							pattern(l, f, t,
								u + k->first_unit, b);
}

static bool arrived(const struct cache *k, const unsigned int *pages, unsigned int from,
		    unsigned int tokens)
{
	for (unsigned int l = 0; l < k->layers; l++)
		for (unsigned int f = 0; f < 2; f++)
			for (unsigned int t = from; t < tokens; t++)
				for (unsigned int u = 0; u < k->units; u++)
					for (unsigned int b = 0; b < k->unit_bytes; b++)
						if (*cache_at(k, l, f,
							      pages[t / k->page_tokens],
							      t % k->page_tokens,
							      u + k->first_unit, b) !=
						    pattern(l, f, t, u + k->first_unit,
							    b))
							return false;
	return true;
}

static uint64_t nonzero(const struct cache *k)
{
	uint64_t n = 0;

	for (uint64_t i = 0; i < k->bytes; i++)
		n += k->base[i] != 0;
	return n;
}

static int setup(void **state)
{
	*state = room_pair_new(&geometry, 1);
	return 0;
}

static int setup_one_daemon(void **state)
{
	*state = room_pair_new(&geometry, 0);
	return 0;
}

static const unsigned int src_pages[] = {3, 4, 9, 1};
static const unsigned int dst_pages[] = {7, 2, 8, 12};

static void bind(struct room_pair *p, uint64_t room)
{
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.bind','room':'%llu','views':{'kv':{'pages':[7,2,8,12],"
		   "'tokens':[0,14]}},'aux':2}",
		   (unsigned long long)room);
}

static void send_two_chunks(struct room_pair *p, uint64_t room)
{
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.send','room':'%llu','seq':0,'views':{'kv':{'pages':[3,4]"
		   "}}}",
		   (unsigned long long)room);
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.send','room':'%llu','seq':1,'last':true,'aux':1,'views':"
		   "{'kv':{'pages':[9,1],'first_token':8,'tokens':[8,14]}}}",
		   (unsigned long long)room);
}

static void check_push(struct room_pair *p, uint64_t room)
{
	cluster_until_state(&p->c, p->decode, "recv", room, KVD_SUCCESS);
	cluster_until_state(&p->c, p->prefill, "send", room, KVD_SUCCESS);
	assert_true(arrived(&p->dst, dst_pages, 0, 14));
	assert_memory_equal(cache_aux(&p->dst, 2), "aux bytes of the request", 24);
	/* nothing else was touched: 14 tokens of all layers and one aux slot */
	assert_true(nonzero(&p->dst) <= 14u * 4 * 2 * 4 * 32 + 24);
}

static void prepare(struct room_pair *p)
{
	fill(&p->src, src_pages, 14);
	memcpy(cache_aux(&p->src, 1), "aux bytes of the request", 24);
}

static void push_sender_first_succeeds(void **state)
{
	struct room_pair *p = *state;

	prepare(p);
	room_pair_open_send(p, 42);
	send_two_chunks(p, 42); /* queued until the receiver is there */
	room_pair_open_recv(p, 42);
	bind(p, 42);
	check_push(p, 42);
}

/* A receiver waits only for its bytes: no message is sent before them. */
static void push_queued_chunk_is_posted_before_the_acknowledgement(void **state)
{
	struct room_pair *p = *state;
	struct kvd *kvd = &p->c.nodes[0].kvd;
	const struct remote *remote;
	uint64_t before;

	prepare(p);
	for (uint64_t room = 41; room <= 42; room++) {
		room_pair_open_send(p, room);
		send_two_chunks(p, room);
		room_pair_open_recv(p, room);
		if (room == 42) /* the daemons know each other by now */
			break;
		bind(p, room);
		check_push(p, room);
	}
	remote = list_first(handshake_remotes(kvd->handshake), struct remote, link);
	before = remote->peer->messages_out;
	bind(p, 42);
	while (remote->peer->messages_out == before) {
		assert_int_equal(metrics_get(&kvd->metrics, METRIC_CHUNKS_SENT), 2);
		assert_true(loop_turn(p->c.loop, LOOP_NS_PER_S));
	}
	assert_true(remote->line.ops_posted > 0);
	check_push(p, 42);
}

static void push_receiver_first_succeeds(void **state)
{
	struct room_pair *p = *state;

	prepare(p);
	room_pair_open_recv(p, 43);
	bind(p, 43);
	cluster_run(&p->c, LOOP_NS_PER_S);
	room_pair_open_send(p, 43);
	cluster_until_state(&p->c, p->prefill, "send", 43, KVD_WAITING_FOR_INPUT);
	send_two_chunks(p, 43);
	check_push(p, 43);
	cluster_ok(&p->c, p->decode, "{'cmd':'room.close','room':'43'}");
	cluster_ok(&p->c, p->prefill, "{'cmd':'room.close','room':'43'}");
}

/* The contents of its slot of the status page. */
static struct kvd_status_slot slot_of(const struct session *session,
				      const struct room *room)
{
	struct kvd_status_slot slot;

	assert_int_equal(pread(status_page_fd(session->status), &slot, sizeof(slot),
			       (off_t)(sizeof(struct kvd_status_header) +
				       room->slot * sizeof(slot))),
			 sizeof(slot));
	return slot;
}

static void push_slot_has_sender_facts(void **state)
{
	struct room_pair *p = *state;
	const struct room *tx, *rx;
	struct kvd_status_slot slot;

	prepare(p);
	room_pair_open_send(p, 45);
	tx = rooms_find(rooms_of(&p->c.nodes[0].kvd), p->prefill, ROOM_SEND, 45);
	slot = slot_of(p->prefill, tx);
	assert_int_equal(kvd_more_first_token(slot.more), -1);
	room_pair_open_recv(p, 45);
	/* "aux" would be token 0 */
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.bind','room':'45','views':{'kv':{'pages':[2,8,12],"
		   "'first_token':4,'tokens':[4,14]}},'aux':2}");
	cluster_until_state(&p->c, p->prefill, "send", 45, KVD_WAITING_FOR_INPUT);
	slot = slot_of(p->prefill, tx);
	assert_int_equal(kvd_more_first_token(slot.more), 4);
	assert_int_equal(kvd_more_done(slot.more), 0);
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.send','room':'45','seq':0,'views':{'kv':{'pages':[4],"
		   "'first_token':4}}}");
	cluster_run(&p->c, LOOP_NS_PER_S);
	slot = slot_of(p->prefill, tx);
	assert_int_equal(kvd_more_done(slot.more), 1);
	assert_int_equal(kvd_more_rows(slot.more), tx->used.rows);
	assert_true(tx->used.rows > 0);
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.send','room':'45','seq':1,'last':true,'aux':1,'views':"
		   "{'kv':{'pages':[9,1],'first_token':8,'tokens':[8,14]}}}");
	cluster_until_state(&p->c, p->prefill, "send", 45, KVD_SUCCESS);
	slot = slot_of(p->prefill, tx);
	assert_int_equal(kvd_more_done(slot.more), 2);
	/* a second lay between the chunks */
	assert_true(kvd_more_moved_us(slot.more) >= 1000000);
	assert_int_equal(kvd_more_first_token(slot.more), 4);
	rx = rooms_find(rooms_of(&p->c.nodes[1].kvd), p->decode, ROOM_RECV, 45);
	slot = slot_of(p->decode, rx);
	assert_int_equal(kvd_more_first_token(slot.more), -1);
	assert_int_equal(kvd_more_rows(slot.more), rx->used.rows);
}

/* The cause of the failure is visible in both. */
static void slot_failed_names_the_other_side(void **state)
{
	struct room_pair *p = *state;
	const struct room *tx, *rx;

	room_pair_open_send(p, 46);
	room_pair_open_recv(p, 46);
	bind(p, 46);
	cluster_until_state(&p->c, p->prefill, "send", 46, KVD_WAITING_FOR_INPUT);
	cluster_ok(&p->c, p->prefill, "{'cmd':'room.abort','room':'46'}");
	cluster_until_state(&p->c, p->decode, "recv", 46, KVD_FAILED);
	tx = rooms_find(rooms_of(&p->c.nodes[0].kvd), p->prefill, ROOM_SEND, 46);
	rx = rooms_find(rooms_of(&p->c.nodes[1].kvd), p->decode, ROOM_RECV, 46);
	assert_false(kvd_word_flags(slot_of(p->prefill, tx).word) & KVD_FLAG_REMOTE);
	assert_true(kvd_word_flags(slot_of(p->decode, rx).word) & KVD_FLAG_REMOTE);
}

static void push_same_chunk_again_is_one_chunk(void **state)
{
	struct room_pair *p = *state;

	prepare(p);
	room_pair_open_send(p, 1);
	room_pair_open_recv(p, 1);
	bind(p, 1);
	for (int i = 0; i < 2; i++)
		cluster_ok(&p->c, p->prefill,
			   "{'cmd':'room.send','room':'1','seq':0,'views':{'kv':{'pages':"
			   "[3,4,9,1],'tokens':[0,14]}},'aux':1,'last':true}");
	check_push(p, 1);
}

static void push_overlap_is_edup(void **state)
{
	struct room_pair *p = *state;

	room_pair_open_send(p, 2);
	room_pair_open_recv(p, 2);
	bind(p, 2);
	cluster_ok(
		&p->c, p->prefill,
		"{'cmd':'room.send','room':'2','seq':0,'views':{'kv':{'pages':[3,4]}}}");
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.send','room':'2','seq':1,'views':{'kv':{'pages':[4],"
		   "'first_token':4}}}");
	cluster_until_state(&p->c, p->decode, "recv", 2, KVD_FAILED);
	cluster_until_state(&p->c, p->prefill, "send", 2, KVD_FAILED);
	assert_int_equal(rooms_find(rooms_of(&p->c.nodes[1].kvd), p->decode, ROOM_RECV, 2)
				 ->error->code,
			 ERR_DUP);
	assert_int_equal(
		rooms_find(rooms_of(&p->c.nodes[0].kvd), p->prefill, ROOM_SEND, 2)
			->error->code,
		ERR_DUP);
}

static void push_last_with_less_is_eshort(void **state)
{
	struct room_pair *p = *state;

	room_pair_open_send(p, 3);
	room_pair_open_recv(p, 3);
	bind(p, 3);
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.send','room':'3','seq':0,'last':true,'views':{'kv':{'"
		   "pages':"
		   "[3,4]}}}");
	cluster_until_state(&p->c, p->decode, "recv", 3, KVD_FAILED);
	cluster_until_state(&p->c, p->prefill, "send", 3, KVD_FAILED);
	assert_int_equal(rooms_find(rooms_of(&p->c.nodes[1].kvd), p->decode, ROOM_RECV, 3)
				 ->error->code,
			 ERR_SHORT);
}

static void push_failed_reports_landed_pages(void **state)
{
	struct room_pair *p = *state;
	cJSON *answer;

	prepare(p);
	room_pair_open_send(p, 4);
	room_pair_open_recv(p, 4);
	bind(p, 4);
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.send','room':'4','seq':0,'views':{'kv':{'pages':[4],"
		   "'first_token':4}}}");
	cluster_run(&p->c, LOOP_NS_PER_S);
	cluster_ok(&p->c, p->prefill, "{'cmd':'room.abort','room':'4','reason':'test'}");
	cluster_until_state(&p->c, p->decode, "recv", 4, KVD_FAILED);
	answer = cluster_call(&p->c, p->decode, "{'cmd':'room.show','room':'4'}");
	assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(
				    cJSON_GetObjectItem(answer, "landed"), "kv")),
			    "02");
	cJSON_Delete(answer);
}

static void push_on_one_daemon_succeeds(void **state)
{
	struct room_pair *p = *state;

	prepare(p);
	room_pair_open_recv(p, 44);
	bind(p, 44);
	room_pair_open_send(p, 44);
	send_two_chunks(p, 44);
	check_push(p, 44);
}

static void open_offer(struct room_pair *p, uint64_t room, unsigned int lease_ms)
{
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.open','room':'%llu','role':'offer','pool':%llu,'views':{"
		   "'kv':"
		   "{'pages':[3,4,9,1],'tokens':[0,14]}},'aux':1,'lease_ms':%u}",
		   (unsigned long long)room, (unsigned long long)p->src.pool, lease_ms);
}

static void open_pull(struct room_pair *p, uint64_t room, const char *remote)
{
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'%llu','role':'pull','pool':%llu,'sources':"
		   "['%s'],"
		   "'views':{'kv':{'pages':[7,2,8,12],'tokens':[0,14]}},'aux':2%s}",
		   (unsigned long long)room, (unsigned long long)p->dst.pool,
		   p->c.nodes[0].endpoint, remote);
}

static void check_pull(struct room_pair *p, uint64_t room)
{
	cluster_until_state(&p->c, p->decode, "pull", room, KVD_SUCCESS);
	cluster_until_state(&p->c, p->prefill, "offer", room, KVD_SUCCESS);
	assert_true(arrived(&p->dst, dst_pages, 0, 14));
	assert_memory_equal(cache_aux(&p->dst, 2), "aux bytes of the request", 24);
}

static void pull_offer_first_succeeds(void **state)
{
	struct room_pair *p = *state;

	prepare(p);
	open_offer(p, 5, 1000);
	open_pull(p, 5, "");
	check_pull(p, 5);
}

static void pull_before_offer_succeeds(void **state)
{
	struct room_pair *p = *state;

	prepare(p);
	open_pull(p, 6,
		  ",'remote':[{'views':{'kv':{'pages':[3,4,9,1],'tokens':[0,14]},'aux':"
		  "{'pages':[1]}}}]");
	cluster_run(&p->c, LOOP_NS_PER_S);
	open_offer(p, 6, 1000);
	check_pull(p, 6);
}

/* A long line: its lists were read by a helper, and are not copied. */
static void pull_takes_the_pages_of_its_line(void **state)
{
	struct room_pair *p = *state;
	const struct kvd *kvd = &p->c.nodes[1].kvd;
	char remote[5000];
	const struct room *pull;
	const cJSON *kv;

	prepare(p);
	snprintf(remote, sizeof(remote),
		 ",'remote':[{'views':{'kv':{'pages':[3,4,9,1],'tokens':[0,14]},'aux':"
		 "{'pages':[1]}}}]%4500s",
		 "");
	open_pull(p, 16, remote);
	pull = rooms_find(rooms_of(kvd), p->decode, ROOM_PULL, 16);
	kv = cJSON_GetObjectItem(
		list_first(&pull->parties, struct party, link)->due.theirs_json, "kv");
	assert_true(cJSON_IsRaw(cJSON_GetObjectItem(kv, "pages")));
	open_offer(p, 16, 1000);
	check_pull(p, 16);
	open_pull(p, 17, remote); /* no offer follows */
	cluster_ok(&p->c, p->decode, "{'cmd':'room.abort','room':'17','role':'pull'}");
	cluster_until_state(&p->c, p->decode, "pull", 17, KVD_FAILED);
}

static void pull_checked_at_destination_succeeds(void **state)
{
	struct room_pair *p = *state;

	fake_hub_profile(p->c.bytes)->check = true;
	fake_hub_profile(p->c.bytes)->need_keys = true;
	prepare(p);
	open_offer(p, 7, 1000);
	open_pull(p, 7, "");
	check_pull(p, 7);
}

static void pull_of_pages_not_offered_fails(void **state)
{
	struct room_pair *p = *state;

	open_offer(p, 8, 1000);
	open_pull(p, 8,
		  ",'remote':[{'views':{'kv':{'pages':[3,5,9,1],'tokens':[0,14]},'aux':"
		  "{'pages':[1]}}}]");
	cluster_until_state(&p->c, p->decode, "pull", 8, KVD_FAILED);
	assert_int_equal(nonzero(&p->dst), 0);
}

static void offer_without_puller_ends_with_its_lease(void **state)
{
	struct room_pair *p = *state;
	uint64_t begin = loop_now_ns(p->c.loop);

	open_offer(p, 9, 500);
	cluster_until_state(&p->c, p->prefill, "offer", 9, KVD_FAILED);
	assert_true(loop_now_ns(p->c.loop) - begin >= 500 * LOOP_NS_PER_MS);
	assert_true(loop_now_ns(p->c.loop) - begin <= 1000 * LOOP_NS_PER_MS);
}

static void pull_heartbeats_keep_a_slow_offer_alive(void **state)
{
	struct room_pair *p = *state;

	prepare(p);
	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->window = 1;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 50 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 50 * LOOP_NS_PER_MS;
	open_offer(p, 10, 400);
	open_pull(p, 10, "");
	check_pull(p, 10);
}

static void abort_fences_before_failed(void **state)
{
	struct room_pair *p = *state;
	uint8_t *before = malloc(p->dst.bytes);

	prepare(p);
	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 5 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 20 * LOOP_NS_PER_MS;
	for (uint64_t room = 100; room < 120; room++) {
		struct room *recv;

		room_pair_open_send(p, room);
		room_pair_open_recv(p, room);
		bind(p, room);
		send_two_chunks(p, room);
		cluster_until_state(&p->c, p->decode, "recv", room, KVD_TRANSFERRING);
		cluster_run(&p->c, (room - 100) * 3 * LOOP_NS_PER_MS);
		recv = rooms_find(rooms_of(&p->c.nodes[1].kvd), p->decode, ROOM_RECV,
				  room);
		if (room_terminal(recv))
			continue;
		if (room % 2)
			cluster_ok(&p->c, p->decode, "{'cmd':'room.abort','room':'%llu'}",
				   (unsigned long long)room);
		else
			cluster_ok(&p->c, p->prefill,
				   "{'cmd':'room.abort','room':'%llu'}",
				   (unsigned long long)room);
		cluster_until_state(&p->c, p->decode, "recv", room, KVD_FAILED);
		memcpy(before, p->dst.base, p->dst.bytes);
		cluster_until_state(&p->c, p->prefill, "send", room, KVD_FAILED);
		cluster_run(&p->c, LOOP_NS_PER_S);
		assert_memory_equal(before, p->dst.base, p->dst.bytes);
		memset(p->dst.base, 0, p->dst.bytes);
	}
	free(before);
}

/* The transport ends an inbound operation by itself, while the room lives. */
static void transport_error_fails_both_sides(void **state)
{
	struct room_pair *p = *state;
	struct fake_rule rule = {.fault = FAKE_ERROR, .at_bytes = 1024, .times = 1};

	prepare(p);
	assert_int_equal(fake_script(p->c.bytes, &rule), 0);
	room_pair_open_send(p, 130);
	room_pair_open_recv(p, 130);
	bind(p, 130);
	send_two_chunks(p, 130);
	cluster_until_state(&p->c, p->decode, "recv", 130, KVD_FAILED);
	cluster_until_state(&p->c, p->prefill, "send", 130, KVD_FAILED);
	assert_int_equal(
		rooms_find(rooms_of(&p->c.nodes[1].kvd), p->decode, ROOM_RECV, 130)
			->error->code,
		ERR_TRANSPORT);
	open_offer(p, 131, 1000);
	rule.times = 1;
	assert_int_equal(fake_script(p->c.bytes, &rule), 0);
	open_pull(p, 131, "");
	cluster_until_state(&p->c, p->decode, "pull", 131, KVD_FAILED);
	cluster_until_state(&p->c, p->prefill, "offer", 131, KVD_FAILED);
}

/* A chunk so large that a helper plans it slowly: the room ends first, from either
 * side, by the engine or by the loss of the peer. */
static void end_while_a_helper_plans_is_fenced(void **state)
{
	struct room_pair *p = *state;
	struct cache src = {.layers = 1,
			    .pages = 2100,
			    .page_tokens = 1,
			    .units = 1,
			    .total_units = 1,
			    .unit_bytes = 8},
		     dst = src;
	struct offload *helpers[] = {p->c.nodes[0].kvd.offload,
				     p->c.nodes[1].kvd.offload};

	cluster_cache(&p->c, p->prefill, "big", 0, &src);
	cluster_cache(&p->c, p->decode, "big", 0, &dst);
	for (unsigned int n = 0; n < 12; n++) {
		unsigned long long room = 900 + n;
		unsigned int slow = n & 1, how = n / 2 % 3;
		bool pull = n >= 6;

		cluster_ok(&p->c, p->prefill,
			   pull ? "{'cmd':'room.open','room':'%llu','role':'offer','pool'"
				  ":%llu,"
				  "'views':{'kv':{'pages':[[0,2100]],'tokens':[0,2100]}},"
				  "'lease_ms':9000}"
				: "{'cmd':'room.open','room':'%llu','role':'send','pool':"
				  "%llu}",
			   room, (unsigned long long)src.pool);
		offload_hold(helpers[slow], true);
		cluster_ok(&p->c, p->decode,
			   pull ? "{'cmd':'room.open','room':'%llu','role':'pull','pool':"
				  "%llu,"
				  "'sources':[{'endpoint':'%s','pool':'big'}],"
				  "'views':{'kv':{'pages':[[0,2100]],'tokens':[0,2100]}}}"
				: "{'cmd':'room.open','room':'%llu','role':'recv','pool':"
				  "%llu,"
				  "'sources':[{'endpoint':'%s','pool':'big'}]}",
			   room, (unsigned long long)dst.pool, p->c.nodes[0].endpoint);
		if (!pull) {
			cluster_ok(&p->c, p->decode,
				   "{'cmd':'room.bind','room':'%llu','views':{'kv':"
				   "{'pages':[[0,2100]],'tokens':[0,2100]}}}",
				   room);
			cluster_ok(
				&p->c, p->prefill,
				"{'cmd':'room.send','room':'%llu','seq':0,'last':true,"
				"'views':{'kv':{'pages':[[0,2100]],'tokens':[0,2100]}}}",
				room);
		}
		cluster_run(&p->c, 100 * LOOP_NS_PER_MS);
		assert_int_not_equal(offload_pending(helpers[slow]), 0);
		if (how == 2)
			fake_link_cut(fake_hub_node(p->c.bytes, 0),
				      fake_hub_node(p->c.bytes, 1));
		else
			cluster_ok(&p->c, how ? p->decode : p->prefill,
				   "{'cmd':'room.abort','room':'%llu'}", room);
		cluster_run(&p->c, 500 * LOOP_NS_PER_MS);
		offload_hold(helpers[slow], false);
		cluster_until_state(&p->c, p->decode, pull ? "pull" : "recv", room,
				    KVD_FAILED);
		cluster_until_state(&p->c, p->prefill, pull ? "offer" : "send", room,
				    KVD_FAILED);
	}
	cache_close(&src);
	cache_close(&dst);
}

static void engine_death_fails_the_other_side(void **state)
{
	struct room_pair *p = *state;
	struct room *recv;

	room_pair_open_send(p, 11);
	room_pair_open_recv(p, 11);
	bind(p, 11);
	cluster_until_state(&p->c, p->prefill, "send", 11, KVD_WAITING_FOR_INPUT);
	cluster_engine_dies(&p->c, p->prefill);
	cluster_until_state(&p->c, p->decode, "recv", 11, KVD_FAILED);
	recv = rooms_find(rooms_of(&p->c.nodes[1].kvd), p->decode, ROOM_RECV, 11);
	assert_int_equal(recv->error->code, ERR_SESSION);
	assert_non_null(strstr(recv->error->text, "prefill"));
}

static void receiver_of_aborted_and_closed_sender_is_notified(void **state)
{
	struct room_pair *p = *state;

	room_pair_open_send(p, 12);
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.abort','room':'12','reason':'user left'}");
	cluster_until_state(&p->c, p->prefill, "send", 12, KVD_FAILED);
	cluster_ok(&p->c, p->prefill, "{'cmd':'room.close','room':'12'}");
	room_pair_open_recv(p, 12);
	bind(p, 12);
	cluster_until_state(&p->c, p->decode, "recv", 12, KVD_FAILED);
	assert_non_null(
		strstr(rooms_find(rooms_of(&p->c.nodes[1].kvd), p->decode, ROOM_RECV, 12)
			       ->error->text,
		       "user left"));
}

static void layouts_contradicting_are_named(void **state)
{
	struct room_pair *p = *state;
	struct session *other = cluster_engine(&p->c, 1, "other");
	struct cache odd = geometry;
	struct room *recv;

	odd.unit_bytes = 16;
	cluster_cache(&p->c, other, "kv", 0, &odd);
	cluster_ok(&p->c, other,
		   "{'cmd':'room.open','room':'13','role':'recv','pool':%llu,'sources':['"
		   "%s']}",
		   (unsigned long long)odd.pool, p->c.nodes[0].endpoint);
	cluster_until_state(&p->c, other, "recv", 13, KVD_FAILED);
	recv = rooms_find(rooms_of(&p->c.nodes[1].kvd), other, ROOM_RECV, 13);
	assert_int_equal(recv->error->code, ERR_LAYOUT);
	assert_non_null(strstr(recv->error->text, "unit_bytes"));
	cluster_engine_dies(&p->c, other);
	cluster_run(&p->c, LOOP_NS_PER_S);
	cache_close(&odd);
}

/* A pool with overlapping fields may be read, never written. */
static void receiving_into_overlapping_fields_is_refused(void **state)
{
	struct room_pair *p = *state;
	cJSON *answer = cluster_call(
		&p->c, p->decode,
		"{'cmd':'pool.register','name':'odd','regions':[{'region':%llu}],'layout'"
		":"
		"{'rank':0,'buffers':[4096],'views':{'kv':{'page_tokens':1,'pages':2,'"
		"layers':"
		"[{'layer':0,'fields':[{'name':'k','buffer':0,'offset':0,'page_stride':"
		"64,"
		"'token_stride':64,'unit_stride':64,'unit_bytes':64,'first_unit':0,'"
		"units':1,"
		"'total_units':1},{'name':'v','buffer':0,'offset':32,'page_stride':64,"
		"'token_stride':64,'unit_stride':64,'unit_bytes':64,'first_unit':0,'"
		"units':1,"
		"'total_units':1}]}]}}}}",
		(unsigned long long)p->dst.region);
	unsigned long long pool =
		(unsigned long long)cJSON_GetObjectItem(answer, "pool")->valuedouble;

	cJSON_Delete(answer);
	cluster_refused(&p->c, p->decode, "ELAYOUT",
			"{'cmd':'room.open','room':'18','role':'recv','pool':%llu,'"
			"sources':['%s']}",
			pool, p->c.nodes[0].endpoint);
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'18','role':'send','pool':%llu}", pool);
}

/* Two prefill ranks with half the heads each, one decode rank with all. */
static void push_from_two_ranks_succeeds(void **state)
{
	struct room_pair *p = *state;
	struct session *ranks[2];
	struct cache halves[2];

	for (unsigned int i = 0; i < 2; i++) {
		halves[i] = geometry;
		halves[i].units = 2;
		halves[i].first_unit = 2 * i;
		ranks[i] = cluster_engine(&p->c, 0, i ? "rank 1" : "rank 0");
		cluster_cache(&p->c, ranks[i], "tp", i, &halves[i]);
		fill(&halves[i], src_pages, 14);
		memcpy(cache_aux(&halves[i], 1), "aux bytes of the request", 24);
	}
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'14','role':'recv','pool':%llu,'sources':["
		   "{'endpoint':'%s','pool':'tp','rank':0},{'endpoint':'%s','pool':'tp','"
		   "rank':1}]}",
		   (unsigned long long)p->dst.pool, p->c.nodes[0].endpoint,
		   p->c.nodes[0].endpoint);
	bind(p, 14);
	for (unsigned int i = 0; i < 2; i++) {
		cluster_ok(&p->c, ranks[i],
			   "{'cmd':'room.open','room':'14','role':'send','pool':%llu}",
			   (unsigned long long)halves[i].pool);
		cluster_ok(&p->c, ranks[i],
			   "{'cmd':'room.send','room':'14','seq':0,'last':true,'aux':1,'"
			   "views':"
			   "{'kv':{'pages':[3,4,9,1],'tokens':[0,14]}}}");
		assert_int_not_equal(cluster_state(&p->c, p->decode, "recv", 14),
				     KVD_SUCCESS);
	}
	cluster_until_state(&p->c, p->decode, "recv", 14, KVD_SUCCESS);
	for (unsigned int i = 0; i < 2; i++)
		cluster_until_state(&p->c, ranks[i], "send", 14, KVD_SUCCESS);
	assert_true(arrived(&p->dst, dst_pages, 0, 14));
	assert_memory_equal(cache_aux(&p->dst, 2), "aux bytes of the request", 24);
	for (unsigned int i = 0; i < 2; i++) {
		cluster_engine_dies(&p->c, ranks[i]);
		cluster_run(&p->c, LOOP_NS_PER_S);
		cache_close(&halves[i]);
	}
}

/* One prefill rank with all heads, two decode ranks with half each. */
static void push_to_two_receivers_succeeds(void **state)
{
	struct room_pair *p = *state;
	struct session *ranks[2];
	struct cache halves[2];

	prepare(p);
	for (unsigned int i = 0; i < 2; i++) {
		halves[i] = geometry;
		halves[i].units = 2;
		halves[i].first_unit = 2 * i;
		ranks[i] = cluster_engine(&p->c, 1, i ? "rank 1" : "rank 0");
		cluster_cache(&p->c, ranks[i], "kv", i, &halves[i]);
		cluster_ok(&p->c, ranks[i],
			   "{'cmd':'room.open','room':'15','role':'recv','pool':%llu,'"
			   "receivers':2,"
			   "'sources':['%s']}",
			   (unsigned long long)halves[i].pool, p->c.nodes[0].endpoint);
		cluster_ok(&p->c, ranks[i],
			   "{'cmd':'room.bind','room':'15','views':{'kv':{'pages':[7,2,8,"
			   "12],"
			   "'tokens':[0,14]}},'aux':2}");
	}
	room_pair_open_send(p, 15);
	send_two_chunks(p, 15);
	for (unsigned int i = 0; i < 2; i++) {
		cluster_until_state(&p->c, ranks[i], "recv", 15, KVD_SUCCESS);
		assert_true(arrived(&halves[i], dst_pages, 0, 14));
		assert_memory_equal(cache_aux(&halves[i], 2), "aux bytes of the request",
				    24);
	}
	cluster_until_state(&p->c, p->prefill, "send", 15, KVD_SUCCESS);
	for (unsigned int i = 0; i < 2; i++) {
		cluster_engine_dies(&p->c, ranks[i]);
		cluster_run(&p->c, LOOP_NS_PER_S);
		cache_close(&halves[i]);
	}
}

static void peer_restart_fails_rooms_and_allows_new_ones(void **state)
{
	struct room_pair *p = *state;
	struct room *recv;

	prepare(p);
	room_pair_open_send(p, 16);
	room_pair_open_recv(p, 16);
	bind(p, 16);
	cluster_until_state(&p->c, p->prefill, "send", 16, KVD_WAITING_FOR_INPUT);
	mem_hub_partition(p->c.links, p->c.nodes[0].endpoint, p->c.nodes[1].endpoint,
			  true);
	cluster_until_state(&p->c, p->decode, "recv", 16, KVD_FAILED);
	cluster_until_state(&p->c, p->prefill, "send", 16, KVD_FAILED);
	recv = rooms_find(rooms_of(&p->c.nodes[1].kvd), p->decode, ROOM_RECV, 16);
	assert_int_equal(recv->error->code, ERR_PEER);
	mem_hub_partition(p->c.links, p->c.nodes[0].endpoint, p->c.nodes[1].endpoint,
			  false);
	room_pair_open_recv(p, 17);
	bind(p, 17);
	room_pair_open_send(p, 17);
	send_two_chunks(p, 17);
	check_push(p, 17);
}

/* Its address holds it: without, all machines would be one to it. */
static void transport_has_boot_id_of_daemon(void **state)
{
	struct kvd *kvd = &((struct room_pair *)*state)->c.nodes[0].kvd;

	assert_memory_equal(kvd->transports[0]->env.boot_id, kvd->boot_id,
			    sizeof(kvd->boot_id));
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, room_pair_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(push_sender_first_succeeds),
		CASE(push_queued_chunk_is_posted_before_the_acknowledgement),
		CASE(push_receiver_first_succeeds),
		CASE(push_same_chunk_again_is_one_chunk),
		CASE(push_slot_has_sender_facts),
		CASE(slot_failed_names_the_other_side),
		CASE(push_overlap_is_edup),
		CASE(push_last_with_less_is_eshort),
		CASE(push_failed_reports_landed_pages),
		CASE(transport_has_boot_id_of_daemon),
		cmocka_unit_test_setup_teardown(push_on_one_daemon_succeeds,
						setup_one_daemon, room_pair_teardown),
		CASE(pull_offer_first_succeeds),
		CASE(pull_before_offer_succeeds),
		CASE(pull_takes_the_pages_of_its_line),
		CASE(pull_checked_at_destination_succeeds),
		CASE(pull_of_pages_not_offered_fails),
		CASE(offer_without_puller_ends_with_its_lease),
		CASE(pull_heartbeats_keep_a_slow_offer_alive),
		CASE(abort_fences_before_failed),
		CASE(transport_error_fails_both_sides),
		CASE(end_while_a_helper_plans_is_fenced),
		CASE(engine_death_fails_the_other_side),
		CASE(receiver_of_aborted_and_closed_sender_is_notified),
		CASE(layouts_contradicting_are_named),
		CASE(receiving_into_overlapping_fields_is_refused),
		CASE(push_from_two_ranks_succeeds),
		CASE(push_to_two_receivers_succeeds),
		CASE(peer_restart_fails_rooms_and_allows_new_ones),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	int failed = cmocka_run_group_tests_name("rooms", tests, NULL, NULL);

	cluster_short_parts();
	return failed +
	       cmocka_run_group_tests_name("rooms, long lists", tests, NULL, NULL);
}
