/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every room reports what it is blocked on: each role in each state, and both sides of a
 * blocked room. Lists can select blocked rooms, and name the rooms that peers request and
 * no engine has opened; ended rooms are remembered. In-process cluster, virtual time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/loop/offload.h"
#include "daemon/room/room.h"
#include "daemon/room/rooms_set.h"
#include "daemon/room/rooms_history.h"
#include "proto/kvd_status.h"
#include "tests/lib/cluster.h"
#include "tests/lib/log_lines.h"

#define MS LOOP_NS_PER_MS

/* node 0 prefills, node 1 decodes */
struct pair {
	struct cluster c;
	struct session *prefill, *decode;
	struct cache src, dst;
};

static int setup(void **state)
{
	struct pair *p = calloc(1, sizeof(*p));

	cluster_new(&p->c, 5, 2);
	p->prefill = cluster_engine(&p->c, 0, "vllm");
	p->decode = cluster_engine(&p->c, 1, "sglang");
	p->prefill->admin = p->decode->admin = true;
	p->src = p->dst = cluster_geometry;
	cluster_cache(&p->c, p->prefill, "kv", 0, &p->src);
	cluster_cache(&p->c, p->decode, "kv", 0, &p->dst);
	*state = p;
	return 0;
}

static int teardown(void **state)
{
	struct pair *p = *state;

	offload_hold(p->c.nodes[0].kvd.offload, false);
	offload_hold(p->c.nodes[1].kvd.offload, false);
	cluster_free(&p->c);
	cache_close(&p->src);
	cache_close(&p->dst);
	free(p);
	return 0;
}

static void settle(struct pair *p)
{
	cluster_run(&p->c, 50 * MS);
}

static void open_send(struct pair *p, uint64_t room)
{
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.open','room':'%llu','role':'send','pool':%llu}",
		   (unsigned long long)room, (unsigned long long)p->src.pool);
}

static void open_recv(struct pair *p, uint64_t room)
{
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'%llu','role':'recv','pool':%llu,"
		   "'sources':['%s']}",
		   (unsigned long long)room, (unsigned long long)p->dst.pool,
		   p->c.nodes[0].endpoint);
}

static void bind(struct pair *p, uint64_t room, const char *more)
{
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.bind','room':'%llu','views':{'kv':{'pages':[7,2,8,12]}}"
		   "%s}",
		   (unsigned long long)room, more);
}

/* Tokens [begin, end) of consecutive pages. */
static void send_part(struct pair *p, uint64_t room, unsigned int seq, unsigned int begin,
		      unsigned int end, bool last)
{
	char pages[64] = "";
	size_t n = 0;

	for (unsigned int page = begin / 4; page < end / 4; page++)
		n += (size_t)snprintf(pages + n, sizeof(pages) - n, "%s%u", n ? "," : "",
				      page);
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.send','room':'%llu','seq':%u,'last':%s,'views':{'kv':{"
		   "'pages':[%s],'first_token':%u}}}",
		   (unsigned long long)room, seq, last ? "true" : "false", pages, begin);
}

static void offer(struct pair *p, uint64_t room)
{
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.open','room':'%llu','role':'offer','pool':%llu,"
		   "'lease_ms':9000,'views':{'kv':{'pages':[3]}}}",
		   (unsigned long long)room, (unsigned long long)p->src.pool);
}

static void pull(struct pair *p, uint64_t room, const char *more)
{
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'%llu','role':'pull','pool':%llu,"
		   "'sources':['%s'],'views':{'kv':{'pages':[7]}}%s}",
		   (unsigned long long)room, (unsigned long long)p->dst.pool,
		   p->c.nodes[0].endpoint, more);
}

/* A word that never reaches its value. */
static const char *never(const struct cache *cache)
{
	static char text[120];

	snprintf(text, sizeof(text),
		 ",'wait':{'kind':'seq','region':%llu,'offset':0,'value':'%llu'}",
		 (unsigned long long)cache->region, (unsigned long long)UINT64_MAX);
	return text;
}

static cJSON *show(struct pair *p, struct session *engine, const char *role,
		   uint64_t room)
{
	return cluster_call(&p->c, engine,
			    "{'cmd':'room.show','room':'%llu','role':'%s'}",
			    (unsigned long long)room, role);
}

static void waits_for(struct pair *p, struct session *engine, const char *role,
		      uint64_t room, const char *state, const char *what, const char *who)
{
	cJSON *record = show(p, engine, role, room);
	const cJSON *waits = cJSON_GetObjectItem(record, "waits_for");
	const char *is = cJSON_GetStringValue(cJSON_GetObjectItem(record, "state_name"));
	const char *says = cJSON_GetStringValue(cJSON_GetObjectItem(waits, "what"));
	const char *whom = cJSON_GetStringValue(cJSON_GetObjectItem(waits, "who"));

	if (!is || strcmp(is, state) || !says || !strstr(says, what) || !whom ||
	    strcmp(whom, who))
		fail_msg("%s, waits for %s: %s; not %s, %s: %s", is ? is : "-",
			 whom ? whom : "-", says ? says : "-", state, who, what);
	assert_true(cJSON_GetNumberValue(cJSON_GetObjectItem(waits, "since_ms")) >= 0);
	assert_true(cJSON_GetNumberValue(cJSON_GetObjectItem(waits, "until_ms")) > 0);
	cJSON_Delete(record);
}

#define PREFILL "peer n0"
#define DECODE "peer n1"

/* ---- each role in each state, and the other side of it ---- */

static void receiver_waits_for_missing_daemon(void **state)
{
	struct pair *p = *state;

	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'1','role':'recv','pool':%llu,'sources':["
		   "'tcp://10.0.0.9:7400']}",
		   (unsigned long long)p->dst.pool);
	cluster_run(&p->c, LOOP_NS_PER_S);
	waits_for(p, p->decode, "recv", 1, "bootstrapping",
		  "peer tcp://10.0.0.9:7400: ", "peer tcp://10.0.0.9:7400");
}

static void receiver_waits_for_an_engine_to_register_its_pool(void **state)
{
	struct pair *p = *state;

	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'2','role':'recv','pool':%llu,'sources':[{"
		   "'endpoint':'%s','pool':'late'}]}",
		   (unsigned long long)p->dst.pool, p->c.nodes[0].endpoint);
	settle(p);
	waits_for(p, p->decode, "recv", 2, "bootstrapping",
		  "an engine of " PREFILL " to register pool 'late'", PREFILL);
}

static void sender_waits_for_receiver_and_receiver_for_engine(void **state)
{
	struct pair *p = *state;

	open_send(p, 3);
	open_recv(p, 3);
	settle(p);
	waits_for(p, p->prefill, "send", 3, "bootstrapping",
		  "a receiver to bind its pages (0 of 1)", "a receiver");
	waits_for(p, p->decode, "recv", 3, "waiting_for_input",
		  "engine 'sglang' to bind pages", "engine 'sglang'");
}

static void receiver_waits_for_the_room_to_open_there(void **state)
{
	struct pair *p = *state;

	open_recv(p, 4);
	bind(p, 4, "");
	settle(p);
	waits_for(p, p->decode, "recv", 4, "waiting_for_input",
		  "an engine of " PREFILL " (pool 'kv') to open room 4", PREFILL);
}

static void both_sides_wait_for_the_first_chunk(void **state)
{
	struct pair *p = *state;

	open_send(p, 5);
	open_recv(p, 5);
	bind(p, 5, "");
	settle(p);
	waits_for(p, p->prefill, "send", 5, "waiting_for_input",
		  "engine 'vllm' to send its first chunk", "engine 'vllm'");
	waits_for(p, p->decode, "recv", 5, "waiting_for_input",
		  "the next chunk of " PREFILL " (lacks tokens 0-16 of 0-16, view kv)",
		  PREFILL);
}

static void both_sides_wait_for_missing_chunk(void **state)
{
	struct pair *p = *state;

	open_send(p, 6);
	open_recv(p, 6);
	bind(p, 6, "");
	settle(p);
	send_part(p, 6, 0, 0, 4, false);
	send_part(p, 6, 2, 8, 16, false);
	settle(p);
	for (unsigned int i = 0; i < 2; i++)
		assert_int_equal(rooms_moving(rooms_of(&p->c.nodes[i].kvd)), 1);
	waits_for(
		p, p->prefill, "send", 6, "transferring",
		"engine 'vllm' to send its next chunk (has sent 2, the latest is seq 2)",
		"engine 'vllm'");
	waits_for(p, p->decode, "recv", 6, "transferring",
		  "the next chunk of " PREFILL " (lacks tokens 4-8 of 0-16, view kv)",
		  PREFILL);
}

static void both_sides_wait_for_stalled_bytes(void **state)
{
	struct pair *p = *state;

	fake_hub_profile(p->c.bytes)->slice_bytes = 64;
	open_send(p, 7);
	open_recv(p, 7);
	bind(p, 7, "");
	settle(p);
	fake_link_down(p->c.nodes[0].kvd.transports[0], p->c.nodes[1].kvd.transports[0],
		       true);
	send_part(p, 7, 0, 0, 16, true);
	settle(p);
	waits_for(p, p->prefill, "send", 7, "transferring", "bytes to " DECODE " (",
		  DECODE);
	waits_for(p, p->decode, "recv", 7, "waiting_for_input",
		  "the next chunk of " PREFILL, PREFILL);
}

static void rooms_wait_for_status_word_of_their_engine(void **state)
{
	struct pair *p = *state;

	memset(p->src.base, 0, 8);
	memset(p->dst.base, 0, 8);
	open_send(p, 8);
	open_recv(p, 8);
	bind(p, 8, never(&p->dst));
	settle(p);
	send_part(p, 8, 0, 0, 16, true);
	settle(p);
	waits_for(p, p->decode, "recv", 8, "transferring",
		  "engine 'sglang' to reach its wait point", "engine 'sglang'");
	waits_for(p, p->prefill, "send", 8, "transferring", "bytes to " DECODE, DECODE);
	/* ... and a sender for its own */
	open_send(p, 9);
	open_recv(p, 9);
	bind(p, 9, "");
	settle(p);
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.send','room':'9','seq':0,'views':{'kv':{'pages':[1]}}"
		   "%s}",
		   never(&p->src));
	settle(p);
	waits_for(p, p->prefill, "send", 9, "transferring",
		  "engine 'vllm' to reach its wait point", "engine 'vllm'");
}

static void room_waits_for_a_free_transfer_slot(void **state)
{
	struct pair *p = *state;
	struct room *room;
	struct party *party;

	open_send(p, 10);
	open_recv(p, 10);
	bind(p, 10, "");
	settle(p);
	room = rooms_find(rooms_of(&p->c.nodes[0].kvd), p->prefill, ROOM_SEND, 10);
	party = list_first(&room->parties, struct party, link);
	party->remote->line.ops_posted += 1u << 20; /* of others */
	send_part(p, 10, 0, 0, 16, true);
	settle(p);
	waits_for(p, p->prefill, "send", 10, "transferring",
		  "a free transfer slot to " DECODE " (1048576 posted", DECODE);
	party->remote->line.ops_posted -= 1u << 20;
	cluster_ok(&p->c, p->prefill, "{'cmd':'room.abort','room':'10'}");
	settle(p);
}

static void both_sides_of_a_pull_name_their_peer(void **state)
{
	struct pair *p = *state;

	memset(p->dst.base, 0, 8);
	pull(p, 20, "");
	settle(p);
	waits_for(p, p->decode, "pull", 20, "waiting_for_input",
		  "an engine of " PREFILL " (pool 'kv') to offer room 20", PREFILL);
	offer(p, 21);
	settle(p);
	waits_for(p, p->prefill, "offer", 21, "waiting_for_input", "a puller (0 of 1)",
		  "a puller");
	pull(p, 21, never(&p->dst));
	settle(p);
	waits_for(p, p->decode, "pull", 21, "waiting_for_input",
		  "engine 'sglang' to reach its wait point", "engine 'sglang'");
	waits_for(p, p->prefill, "offer", 21, "waiting_for_input",
		  DECODE " to read the pages", DECODE);
}

static void pull_waits_for_bytes(void **state)
{
	struct pair *p = *state;

	memset(p->dst.base, 0, 8);
	offer(p, 22);
	pull(p, 22, never(&p->dst));
	settle(p);
	fake_link_down(p->c.nodes[0].kvd.transports[0], p->c.nodes[1].kvd.transports[0],
		       true);
	memset(p->dst.base, 0xff, 8); /* the word is there */
	settle(p);
	waits_for(p, p->decode, "pull", 22, "transferring", "bytes from " PREFILL,
		  PREFILL);
}

static void room_aborted_by_peer_waits_for_the_fence(void **state)
{
	struct pair *p = *state;

	open_send(p, 30);
	open_recv(p, 30);
	bind(p, 30, "");
	settle(p);
	/* a slice that cannot be canceled */
	assert_int_equal(
		fake_script(p->c.bytes, &(struct fake_rule){.fault = FAKE_LATE,
							    .times = 1,
							    .extra_ns = LOOP_NS_PER_S}),
		0);
	send_part(p, 30, 0, 0, 16, true);
	settle(p);
	cluster_ok(&p->c, p->prefill, "{'cmd':'room.abort','room':'30','role':'send'}");
	settle(p);
	waits_for(p, p->prefill, "send", 30, "aborting", "the fence of " DECODE, DECODE);
	cluster_until_state(&p->c, p->prefill, "send", 30, KVD_FAILED);
}

static void room_ended_waits_for_nothing(void **state)
{
	struct pair *p = *state;
	cJSON *record;

	open_send(p, 31);
	open_recv(p, 31);
	bind(p, 31, "");
	send_part(p, 31, 0, 0, 16, true);
	cluster_until_state(&p->c, p->prefill, "send", 31, KVD_SUCCESS);
	record = show(p, p->prefill, "send", 31);
	assert_null(cJSON_GetObjectItem(record, "waits_for"));
	cJSON_Delete(record);
}

/* ---- lists ---- */

static cJSON *list(struct pair *p, struct session *engine, const char *more,
		   unsigned int want)
{
	cJSON *reply =
		cluster_call(&p->c, engine, "{'cmd':'room.list','all':true%s}", more);
	cJSON *rooms = cJSON_GetObjectItem(reply, "rooms");

	if ((unsigned int)cJSON_GetArraySize(rooms) != want) {
		char *text = cJSON_Print(reply);

		fail_msg("not %u rooms%s: %s", want, more, text);
	}
	return reply;
}

static void listed(struct pair *p, struct session *engine, const char *more,
		   unsigned int want)
{
	cJSON_Delete(list(p, engine, more, want));
}

static void lists_show_requested_rooms(void **state)
{
	struct pair *p = *state;

	open_recv(p, 40);
	bind(p, 40, "");
	open_recv(p, 41);
	cluster_run(&p->c, 40 * LOOP_NS_PER_S);
	open_send(p, 42);
	open_recv(p, 42);
	settle(p);
	cluster_ok(&p->c, p->decode, "{'cmd':'room.abort','room':'41'}");
	settle(p);
	listed(p, p->decode, "", 3);
	listed(p, p->decode, ",'stuck_ms':30000", 1);
	listed(p, p->decode, ",'failed':true", 1);
	listed(p, p->decode, ",'state':'waiting_for_input'", 2);
	listed(p, p->decode, ",'state':'unopened'", 0);
	listed(p, p->decode, ",'room':'42'", 1);
	listed(p, p->decode, ",'peer':'n0'", 3);
	listed(p, p->decode, ",'peer':'tcp://10.0.0.1:7400'", 3);
	listed(p, p->decode, ",'peer':'tcp://10.0.0.1:740'", 0);
	listed(p, p->decode, ",'peer':'nobody'", 0);
}

static void requests_for_rooms_not_open_are_listed(void **state)
{
	struct pair *p = *state;
	cJSON *reply, *room;

	open_recv(p, 50);
	bind(p, 50, "");
	pull(p, 51, "");
	cluster_run(&p->c, 5 * LOOP_NS_PER_S);
	listed(p, p->prefill, "", 2);
	listed(p, p->prefill, ",'state':'failed'", 0);
	listed(p, p->prefill, ",'stuck_ms':60000", 0);
	listed(p, p->prefill, ",'peer':'n1'", 2);
	reply = list(p, p->prefill, ",'room':'50','stuck_ms':4000", 1);
	room = cJSON_GetArrayItem(cJSON_GetObjectItem(reply, "rooms"), 0);
	assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(room, "state_name")),
			    "unopened");
	assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(room, "role")),
			    "send");
	room = cJSON_GetObjectItem(room, "waits_for");
	assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(room, "what")),
			    "an engine here to open it, as requested by " DECODE);
	cJSON_Delete(reply);
	reply = list(p, p->prefill, ",'room':'51','state':'unopened'", 1);
	cJSON_Delete(reply);
	open_send(p, 50);
	settle(p);
	listed(p, p->prefill, ",'room':'50','state':'unopened'", 0);
	listed(p, p->prefill, ",'room':'50'", 1);
}

/* ---- history ---- */

static cJSON *history(struct pair *p, struct session *engine, const char *more,
		      unsigned int want)
{
	cJSON *reply = cluster_call(&p->c, engine, "{'cmd':'room.history'%s}", more);

	if ((unsigned int)cJSON_GetArraySize(cJSON_GetObjectItem(reply, "rooms")) != want)
		fail_msg("not %u: %s", want, cJSON_Print(reply));
	return reply;
}

static void ended_rooms_are_remembered_when_they_are_closed(void **state)
{
	struct pair *p = *state;
	cJSON *reply, *room;

	assert_null(rooms_of(&p->c.nodes[0].kvd)->history.ring); /* costs nothing yet */
	open_send(p, 60);
	open_recv(p, 60);
	bind(p, 60, "");
	send_part(p, 60, 0, 0, 20, true); /* a page more than is bound */
	cluster_until_state(&p->c, p->prefill, "send", 60, KVD_SUCCESS);
	open_send(p, 61);
	cluster_run(&p->c, 20 * LOOP_NS_PER_S);
	cluster_ok(&p->c, p->prefill, "{'cmd':'room.abort','room':'61','reason':'why'}");
	settle(p);
	for (unsigned int n = 60; n < 62; n++)
		cluster_ok(&p->c, p->prefill, "{'cmd':'room.close','room':'%u'}", n);
	reply = history(p, p->prefill, "", 2);
	room = cJSON_GetArrayItem(cJSON_GetObjectItem(reply, "rooms"), 0);
	assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(room, "room")),
			    "61");
	assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(room, "state_name")),
			    "failed");
	assert_non_null(strstr(cJSON_GetStringValue(cJSON_GetObjectItem(
				       cJSON_GetObjectItem(room, "error"), "message")),
			       "aborted by its engine 'vllm'"));
	room = cJSON_GetArrayItem(cJSON_GetObjectItem(reply, "rooms"), 1);
	assert_null(cJSON_GetObjectItem(room, "error"));
	assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(room, "peer")),
			    DECODE);
	assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(room, "engine")),
			    "vllm");
	assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(room, "transport")),
			    "fake");
	assert_int_equal(cJSON_GetNumberValue(cJSON_GetObjectItem(room, "tokens")), 16);
	assert_int_equal(
		cJSON_GetNumberValue(cJSON_GetObjectItem(room, "surplus_tokens")), 4);
	assert_int_equal(cJSON_GetNumberValue(cJSON_GetObjectItem(room, "bytes")),
			 4 * 2 * 16 * 4 * 32);
	cJSON_Delete(reply);
	cJSON_Delete(history(p, p->prefill, ",'failed':true", 1));
	cJSON_Delete(history(p, p->prefill, ",'code':'EABORTED'", 1));
	cJSON_Delete(history(p, p->prefill, ",'code':'ESHORT'", 0));
	cJSON_Delete(history(p, p->prefill, ",'since_ms':1000", 1));
	cJSON_Delete(history(p, p->prefill, ",'room':'60'", 1));
	/* the receiver's side reports the same for tokens that were not bound */
	reply = history(p, p->decode, ",'room':'60'", 1);
	room = cJSON_GetArrayItem(cJSON_GetObjectItem(reply, "rooms"), 0);
	assert_int_equal(
		cJSON_GetNumberValue(cJSON_GetObjectItem(room, "surplus_tokens")), 4);
	cJSON_Delete(reply);
}

static void history_is_per_session_and_paged(void **state)
{
	struct pair *p = *state;
	struct session *other = cluster_engine(&p->c, 0, "another");
	char more[64] = "";
	unsigned int seen = 0;

	other->admin = false;
	for (uint64_t n = 100; n < 107; n++) {
		open_send(p, n);
		cluster_ok(&p->c, p->prefill, "{'cmd':'room.abort','room':'%llu'}",
			   (unsigned long long)n);
		settle(p);
	}
	for (;;) {
		cJSON *reply = cluster_call(&p->c, p->prefill,
					    "{'cmd':'room.history','limit':3%s}", more);
		const cJSON *rooms = cJSON_GetObjectItem(reply, "rooms"), *room;
		const char *next =
			cJSON_GetStringValue(cJSON_GetObjectItem(reply, "next"));
		bool last = !next;

		cJSON_ArrayForEach(room, rooms) {
			char number[8];

			snprintf(number, sizeof(number), "%u", 106 - seen++);
			assert_string_equal(
				cJSON_GetStringValue(cJSON_GetObjectItem(room, "room")),
				number);
		}
		if (next)
			snprintf(more, sizeof(more), ",'before':'%s'", next);
		cJSON_Delete(reply);
		if (last)
			break;
		assert_int_equal(seen % 3, 0);
	}
	assert_int_equal(seen, 7);
	cJSON_Delete(history(p, other, "", 0));
	cluster_refused(&p->c, other, "EPERM", "{'cmd':'room.history','all':true}");
	cluster_engine_dies(&p->c, other);
	settle(p);
}

static void history_drops_the_oldest(void **state)
{
	struct pair *p = *state;
	cJSON *reply;

	for (uint64_t n = 0; n < HISTORY_ROOMS + 10; n++) {
		open_send(p, 1000);
		cluster_ok(&p->c, p->prefill, "{'cmd':'room.abort','room':'1000'}");
		cluster_until_state(&p->c, p->prefill, "send", 1000, KVD_FAILED);
		cluster_ok(&p->c, p->prefill, "{'cmd':'room.close','room':'1000'}");
	}
	reply = history(p, p->prefill, ",'limit':4096", HISTORY_ROOMS);
	assert_null(cJSON_GetObjectItem(reply, "next"));
	cJSON_Delete(reply);
}

/* ---- short texts ---- */

static void page_bound_twice_is_refused(void **state)
{
	struct pair *p = *state;
	char pages[400] = "";
	size_t n = 0;
	cJSON *reply;

	open_recv(p, 70);
	settle(p);
	reply = cluster_call(&p->c, p->decode,
			     "{'cmd':'room.bind','room':'70','views':{'kv':{'pages':[7,3,"
			     "8,3]}}}");
	assert_non_null(strstr(cJSON_GetStringValue(cJSON_GetObjectItem(
				       cJSON_GetObjectItem(reply, "error"), "message")),
			       "views.kv.pages[3]: page 3 is bound twice"));
	cJSON_Delete(reply);
	cluster_refused(&p->c, p->decode, "EDUP",
			"{'cmd':'room.open','room':'71','role':'pull','pool':%llu,"
			"'sources':['%s'],'views':{'kv':{'pages':[5,5]}}}",
			(unsigned long long)p->dst.pool, p->c.nodes[0].endpoint);
	/* a list that is too long to compare each with each */
	for (unsigned int i = 0; i < 40; i++)
		n += (size_t)snprintf(pages + n, sizeof(pages) - n, "%s%u", i ? "," : "",
				      i % 16);
	cluster_refused(&p->c, p->decode, "EDUP",
			"{'cmd':'room.bind','room':'70','views':{'kv':{'pages':[%s]}}}",
			pages);
	/* the room is as it was */
	bind(p, 70, "");
	open_send(p, 70);
	send_part(p, 70, 0, 0, 16, true);
	cluster_until_state(&p->c, p->decode, "recv", 70, KVD_SUCCESS);
}

static void bind_of_failed_room_has_its_reason(void **state)
{
	struct pair *p = *state;
	cJSON *reply;

	open_recv(p, 80);
	cluster_ok(&p->c, p->decode, "{'cmd':'room.abort','room':'80','reason':'gone'}");
	settle(p);
	reply = cluster_call(&p->c, p->decode,
			     "{'cmd':'room.bind','room':'80','views':{'kv':{'pages':[7]}}"
			     "}");
	assert_non_null(strstr(cJSON_GetStringValue(cJSON_GetObjectItem(
				       cJSON_GetObjectItem(reply, "error"), "message")),
			       "room 80 failed: EABORTED: aborted by its engine "
			       "'sglang'"));
	cJSON_Delete(reply);
}

/* ---- records of rooms and peers ---- */

/* A room that is served at once, or after so long. */
static const char *lines_of_push(struct pair *p, uint64_t room, uint64_t after_ns)
{
	log_lines_begin();
	open_recv(p, room);
	bind(p, room, "");
	open_send(p, room);
	cluster_run(&p->c, after_ns);
	send_part(p, room, 0, 0, 16, true);
	cluster_until_state(&p->c, p->decode, "recv", room, KVD_SUCCESS);
	cluster_until_state(&p->c, p->prefill, "send", room, KVD_SUCCESS);
	return log_lines_end();
}

static void rooms_are_logged_per_option(void **state)
{
	struct pair *p = *state;
	int threshold = log_threshold;
	static const struct {
		enum log_rooms option;
		unsigned int quick, slow;
	} cases[] = {
		{LOG_ROOMS_FAILED, 0, 0}, {LOG_ROOMS_SLOW, 0, 2}, {LOG_ROOMS_ALL, 2, 2}};

	log_set_level(LOG_LEVEL_INFO);
	for (unsigned int i = 0; i < ARRAY_LEN(cases); i++) {
		const char *lines;

		p->c.nodes[0].config.log_rooms = cases[i].option;
		p->c.nodes[1].config.log_rooms = cases[i].option;
		lines = lines_of_push(p, 100 + i, 0);
		assert_int_equal(log_lines_with(lines, ": success "), cases[i].quick);
		lines = lines_of_push(p, 200 + i, 2 * LOOP_NS_PER_S);
		assert_int_equal(log_lines_with(lines, ": success "), cases[i].slow);
	}
	log_set_level((enum log_level)threshold);
}

/* The record of the aborting side shows that the other side is quiet, too. */
static void abort_received_is_answered(void **state)
{
	struct pair *p = *state;
	cJSON *record;

	open_recv(p, 90);
	bind(p, 90, "");
	open_send(p, 90);
	settle(p);
	cluster_ok(&p->c, p->prefill, "{'cmd':'room.abort','room':'90','reason':'gone'}");
	cluster_until_state(&p->c, p->decode, "recv", 90, KVD_FAILED);
	settle(p);
	record = show(p, p->prefill, "send", 90);
	assert_true(cJSON_IsTrue(cJSON_GetObjectItem(
		cJSON_GetArrayItem(cJSON_GetObjectItem(record, "peers"), 0),
		"quiesced")));
	cJSON_Delete(record);
}

int main(void)
{
#define CASE(test) cmocka_unit_test_setup_teardown(test, setup, teardown)
	const struct CMUnitTest tests[] = {
		CASE(receiver_waits_for_missing_daemon),
		CASE(receiver_waits_for_an_engine_to_register_its_pool),
		CASE(sender_waits_for_receiver_and_receiver_for_engine),
		CASE(receiver_waits_for_the_room_to_open_there),
		CASE(both_sides_wait_for_the_first_chunk),
		CASE(both_sides_wait_for_missing_chunk),
		CASE(both_sides_wait_for_stalled_bytes),
		CASE(rooms_wait_for_status_word_of_their_engine),
		CASE(room_waits_for_a_free_transfer_slot),
		CASE(both_sides_of_a_pull_name_their_peer),
		CASE(pull_waits_for_bytes),
		CASE(room_aborted_by_peer_waits_for_the_fence),
		CASE(room_ended_waits_for_nothing),
		CASE(lists_show_requested_rooms),
		CASE(requests_for_rooms_not_open_are_listed),
		CASE(ended_rooms_are_remembered_when_they_are_closed),
		CASE(history_is_per_session_and_paged),
		CASE(history_drops_the_oldest),
		CASE(page_bound_twice_is_refused),
		CASE(bind_of_failed_room_has_its_reason),
		CASE(rooms_are_logged_per_option),
		CASE(abort_received_is_answered),
	};

	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests_name("rooms_waits", tests, NULL, NULL);
}
