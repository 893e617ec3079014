/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ring of events: the contents of a room's chain, overwritten events, and the limit
 * of a room. Names of requests cross with a short and with a long TRANSFER_INFO, and
 * invalid names of a hostile daemon are ignored. In-process cluster, virtual time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/request/commands.h"
#include "daemon/room/room.h"
#include "daemon/room/room_trace.h"
#include "daemon/room/rooms_set.h"
#include "daemon/room/rooms_history.h"
#include "proto/kvd_status.h"
#include "tests/lib/cluster.h"

#define MS LOOP_NS_PER_MS
#define TRACEPARENT "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

static const struct cache geometry = {.layers = 1,
				      .pages = 9000,
				      .page_tokens = 1,
				      .units = 1,
				      .total_units = 1,
				      .unit_bytes = 4};

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
	p->src = p->dst = geometry;
	cluster_cache(&p->c, p->prefill, "kv", 0, &p->src);
	cluster_cache(&p->c, p->decode, "kv", 0, &p->dst);
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

static struct room *open_send(struct pair *p, unsigned int room)
{
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.open','room':'%u','role':'send','pool':%llu}", room,
		   (unsigned long long)p->src.pool);
	return rooms_find(rooms_of(&p->c.nodes[0].kvd), p->prefill, ROOM_SEND, room);
}

static struct room *open_recv(struct pair *p, unsigned int room, const char *names)
{
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'%u','role':'recv','pool':%llu,"
		   "'sources':['%s']%s}",
		   room, (unsigned long long)p->dst.pool, p->c.nodes[0].endpoint, names);
	return rooms_find(rooms_of(&p->c.nodes[1].kvd), p->decode, ROOM_RECV, room);
}

static void bind(struct pair *p, unsigned int room, const char *pages)
{
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.bind','room':'%u','views':{'kv':{'pages':[%s]}}}", room,
		   pages);
}

static void give(struct pair *p, unsigned int room, const char *pages)
{
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.send','room':'%u','seq':0,'last':true,'views':{'kv':{"
		   "'pages':[%s]}}}",
		   room, pages);
	cluster_until_state(&p->c, p->decode, "recv", room, KVD_SUCCESS);
	cluster_until_state(&p->c, p->prefill, "send", room, KVD_SUCCESS);
}

/* How many of them the room's chain has; UINT_MAX: it is cut. */
static unsigned int chain(struct rooms *rooms, const struct room_trace *trace,
			  enum trace_what what)
{
	unsigned int found = 0;

	for (uint64_t next = trace->last; next;) {
		const struct trace_event *event = trace_at(&rooms->trace, next - 1);

		if (!event)
			return UINT32_MAX;
		found += event->what == what;
		next = event->back ? next - event->back : 0;
	}
	return found;
}

static void rooms_keep_their_own_events(void **state)
{
	struct pair *p = *state;
	struct rooms *rooms = rooms_of(&p->c.nodes[1].kvd);
	struct room *one = open_recv(p, 1, ""), *two = open_recv(p, 2, "");

	open_send(p, 1);
	open_send(p, 2);
	bind(p, 2, "7");
	bind(p, 1, "3");
	cluster_run(&p->c, 50 * MS);
	give(p, 1, "1");
	assert_int_equal(chain(rooms, &one->trace, TRACE_MOVED), 1);
	assert_int_equal(chain(rooms, &two->trace, TRACE_MOVED), 0);
	for (unsigned int i = TRACE_BOUND; i <= TRACE_ACK_IN; i++) {
		bool of_recv = i != TRACE_INFO_IN && i != TRACE_ACK_OUT;

		assert_int_equal(chain(rooms, &one->trace, i), of_recv);
		assert_int_equal(chain(rooms, &two->trace, i), of_recv);
	}
	assert_int_equal(chain(rooms, &one->trace, TRACE_STATE), 3);
	assert_int_equal(chain(rooms, &two->trace, TRACE_STATE), 1);
}

static void events_overwritten_are_dropped(void **state)
{
	struct pair *p = *state;
	struct rooms *rooms = rooms_of(&p->c.nodes[1].kvd);
	struct room *old = open_recv(p, 1, ""), *busy = NULL;

	room_trace(old, TRACE_BOUND, NULL, 0);
	for (unsigned int i = 0; rooms->trace.count <= TRACE_EVENTS; i++) {
		if (i % TRACE_ROOM_EVENTS == 0)
			busy = open_recv(p, 100 + i, "");
		room_trace(busy, TRACE_ABORT_IN, NULL, 0);
	}
	room_trace(open_recv(p, 2, ""), TRACE_BOUND, NULL, 0);
	room_trace(old, TRACE_BOUND, NULL, 0);
	cluster_run(&p->c, 50 * MS);
	/* its chain ends where the others have written over it */
	assert_int_equal(chain(rooms, &old->trace, TRACE_BOUND), UINT32_MAX);
	assert_null(trace_at(&rooms->trace, 0));
	assert_null(trace_at(&rooms->trace, rooms->trace.count));
	assert_non_null(trace_at(&rooms->trace, rooms->trace.count - 1));
	assert_null(trace_at(&rooms->trace, UINT64_MAX));
}

/* Of the room's only such event. */
static uint64_t time_of(struct rooms *rooms, const struct room_trace *trace,
			enum trace_what what)
{
	const struct trace_event *found = NULL;

	for (uint64_t next = trace->last; next;) {
		const struct trace_event *event = trace_at(&rooms->trace, next - 1);

		assert_non_null(event);
		assert_false(found && event->what == what);
		found = event->what == what ? event : found;
		next = event->back ? next - event->back : 0;
	}
	assert_non_null(found);
	return found->at_ns;
}

/* Eight slices, each in flight for 10 ms. */
static void first_byte_is_before_the_last(void **state)
{
	struct pair *p = *state;
	struct room *recv = open_recv(p, 1, ""), *send = open_send(p, 1);
	const struct room *rooms[] = {send, recv};
	uint64_t begun[2], first[2], moved[2];

	fake_hub_profile(p->c.bytes)->slice_bytes = 4;
	fake_hub_profile(p->c.bytes)->window = 1;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 10 * MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 10 * MS;
	bind(p, 1, "3,5,7,9,11,13,15,17");
	give(p, 1, "1,2,3,4,5,6,7,8");
	for (unsigned int i = 0; i < 2; i++) {
		struct rooms *all = rooms_of(&p->c.nodes[i].kvd);

		begun[i] =
			time_of(all, &rooms[i]->trace, i ? TRACE_ADMITTED : TRACE_POSTED);
		first[i] = time_of(all, &rooms[i]->trace, TRACE_FIRST);
		moved[i] = time_of(all, &rooms[i]->trace, TRACE_MOVED);
		assert_true(begun[i] <= first[i] && first[i] + 60 * MS <= moved[i]);
	}
	/* it lands after it has left */
	assert_true(first[0] + 10 * MS <= first[1]);
}

/* A peer that repeats a message forever overwrites its own room's part only. */
static void room_writes_so_many_events_and_its_states(void **state)
{
	struct pair *p = *state;
	struct rooms *rooms = rooms_of(&p->c.nodes[1].kvd);
	struct room *room = open_recv(p, 1, "");

	for (unsigned int i = 0; i < 2 * TRACE_ROOM_EVENTS; i++)
		room_trace(room, TRACE_ABORT_IN, NULL, 0);
	assert_int_equal(chain(rooms, &room->trace, TRACE_ABORT_IN), TRACE_ROOM_EVENTS);
	cluster_ok(&p->c, p->decode, "{'cmd':'room.abort','room':'1'}");
	cluster_run(&p->c, 50 * MS);
	assert_int_equal(sm_state(&room->sm), ROOM_FAILED);
	assert_true(chain(rooms, &room->trace, TRACE_STATE) >= 2);
	assert_int_equal(chain(rooms, &room->trace, TRACE_ABORT_IN), TRACE_ROOM_EVENTS);
}

static void ended_room_keeps_events_and_names(void **state)
{
	struct pair *p = *state;
	struct rooms *rooms = rooms_of(&p->c.nodes[1].kvd);
	const struct ended_room *ended;

	open_send(p, 1);
	open_recv(p, 1, ",'request_id':'r-1'");
	bind(p, 1, "3");
	give(p, 1, "1");
	cluster_ok(&p->c, p->decode, "{'cmd':'room.close','room':'1'}");
	ended = history_at(&rooms->history, 0);
	assert_int_equal(chain(rooms, &ended->trace, TRACE_MOVED), 1);
	assert_string_equal(ended->names->request_id, "r-1");
	assert_string_equal(ended->names->traceparent, "");
}

static void names_cross_to_the_sender(void **state)
{
	struct pair *p = *state;
	struct room *send;
	char pages[9000 * 5];
	size_t n = 0;

	for (unsigned int i = 0; i < 9000; i++) /* no two neighbours: a run each */
		n += (size_t)snprintf(pages + n, sizeof(pages) - n, "%s%u", i ? "," : "",
				      i % 2 ? 8999 - i / 2 : i / 2);
	for (unsigned int room = 1; room <= 2; room++) {
		open_recv(p, room,
			  ",'request_id':'cmpl-1','traceparent':'" TRACEPARENT "'");
		send = open_send(p, room);
		bind(p, room, room == 1 ? "3" : pages);
		cluster_run(&p->c, 50 * MS);
		assert_non_null(send->names);
		assert_true(send->names->from_peer);
		assert_string_equal(send->names->request_id, "cmpl-1");
		assert_string_equal(send->names->traceparent, TRACEPARENT);
		give(p, room, room == 1 ? "1" : pages);
	}
}

/* A hostile daemon omits its own check. */
static void names_of_lying_peer_are_left_out(void **state)
{
	static const struct {
		const char *request_id, *traceparent;
		const char *kept; /* of both; NULL: nothing */
	} lies[] = {
		{"a\" code=\"OK", "", NULL},
		{"\xc3\xa9\x1b[2J", TRACEPARENT "-00", NULL},
		{"good", "00-zz", "good"},
		{"two words", TRACEPARENT, TRACEPARENT},
		{"", "", NULL},
	};
	struct pair *p = *state;

	for (unsigned int i = 0; i < ARRAY_LEN(lies); i++) {
		struct room *recv = open_recv(p, i, ",'request_id':'x'"), *send;

		send = open_send(p, i);
		snprintf(recv->names->request_id, sizeof(recv->names->request_id), "%s",
			 lies[i].request_id);
		snprintf(recv->names->traceparent, sizeof(recv->names->traceparent),
			 "%.55s", lies[i].traceparent);
		if (strlen(lies[i].traceparent) > TRACEPARENT_CHARS)
			recv->names->traceparent[3] = '\t';
		bind(p, i, "3");
		cluster_run(&p->c, 50 * MS);
		assert_int_equal(sm_state(&send->sm), ROOM_WAITING);
		assert_int_equal(!!send->names, !!lies[i].kept);
		if (!send->names)
			continue;
		assert_true(!*send->names->request_id || !*send->names->traceparent);
		assert_string_equal(*send->names->request_id ? send->names->request_id
							     : send->names->traceparent,
				    lies[i].kept);
	}
}

/* Of a session that is no administrator's. */
static void trace_of_other_user_is_empty(void **state)
{
	struct pair *p = *state;
	struct session *stranger = cluster_engine(&p->c, 1, "stranger");
	const char *const asked[] = {"{'cmd':'room.trace','room':'1'}",
				     "{'cmd':'room.trace','room':'1','pages':true}"};

	stranger->admin = p->decode->admin = false;
	open_recv(p, 1, "");
	bind(p, 1, "3,5");
	cluster_run(&p->c, 50 * MS);
	for (unsigned int i = 0; i < ARRAY_LEN(asked); i++) {
		cJSON *reply = cluster_call(&p->c, stranger, "%s", asked[i]);
		cJSON *own = cluster_call(&p->c, p->decode, "%s", asked[i]);

		assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(reply, "rooms")),
				 0);
		assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(own, "rooms")),
				 1);
		cJSON_Delete(reply);
		cJSON_Delete(own);
	}
	cluster_refused(&p->c, stranger, "EPERM",
			"{'cmd':'room.trace','room':'1','all':true}");
	cluster_refused(&p->c, stranger, "ENOTFOUND", "{'cmd':'pool.layout','pool':%llu}",
			(unsigned long long)p->dst.pool);
	cluster_ok(&p->c, p->decode, "{'cmd':'pool.layout','pool':%llu}",
		   (unsigned long long)p->dst.pool);
	stranger->admin = true;
	cluster_ok(&p->c, stranger, "{'cmd':'pool.layout','pool':%llu}",
		   (unsigned long long)p->dst.pool);
}

/* A turn writes so much; the count of pages is whole. */
static void long_page_lists_are_cut(void **state)
{
	struct pair *p = *state;
	char pages[9000 * 5];
	cJSON *reply, *view;
	size_t n = 0;

	for (unsigned int i = 0; i < 9000; i++)
		n += (size_t)snprintf(pages + n, sizeof(pages) - n, "%s%u", i ? "," : "",
				      i < 8 ? i : 9007 - i);
	open_recv(p, 1, "");
	bind(p, 1, pages);
	reply = cluster_call(&p->c, p->decode,
			     "{'cmd':'room.trace','room':'1','pages':true}");
	view = cJSON_GetArrayItem(
		cJSON_GetObjectItem(
			cJSON_GetArrayItem(cJSON_GetObjectItem(reply, "rooms"), 0),
			"views"),
		0);
	assert_int_equal(cJSON_GetNumberValue(cJSON_GetObjectItem(view, "pages")), 9000);
	assert_true(cJSON_IsTrue(cJSON_GetObjectItem(view, "runs_cut")));
	assert_in_range(cJSON_GetArraySize(cJSON_GetObjectItem(view, "runs")), 100, 1000);
	view = cJSON_GetArrayItem(cJSON_GetObjectItem(view, "runs"), 0);
	assert_int_equal(cJSON_GetNumberValue(cJSON_GetArrayItem(view, 0)), 0);
	assert_int_equal(cJSON_GetNumberValue(cJSON_GetArrayItem(view, 1)), 8);
	cJSON_Delete(reply);
}

/* A pool of so many views of one page each, over the region of a cache. */
static uint64_t pool_of_views(struct pair *p, const struct cache *cache,
			      unsigned int views)
{
	char *text = malloc(256 * (size_t)views);
	uint64_t pool;
	cJSON *reply;
	size_t n = 0;

	for (unsigned int i = 0; i < views; i++)
		n += (size_t)sprintf(text + n,
				     "%s'v%u':{'page_tokens':1,'pages':1,'layers':[{"
				     "'layer':0,'fields':[{'name':'k','buffer':0,"
				     "'offset':%u,'page_stride':4,'token_stride':4,"
				     "'unit_stride':4,'unit_bytes':4,'first_unit':0,"
				     "'units':1,'total_units':1}]}]}",
				     i ? "," : "", i, 4 * i);
	reply = cluster_call(&p->c, cache->session,
			     "{'cmd':'pool.register','name':'many','regions':[{'region':"
			     "%llu}],'layout':{'rank':0,'buffers':[%llu],'views':{%s}}}",
			     (unsigned long long)cache->region,
			     (unsigned long long)cache->bytes, text);
	assert_non_null(cJSON_GetObjectItem(reply, "pool"));
	pool = (uint64_t)cJSON_GetNumberValue(cJSON_GetObjectItem(reply, "pool"));
	cJSON_Delete(reply);
	free(text);
	return pool;
}

#define MANY_VIEWS 33u /* of two receivers: more than are shown */

static void open_many(struct pair *p, struct cache *cache)
{
	char text[MANY_VIEWS * 32] = "";
	size_t n = 0;

	cluster_ok(&p->c, cache->session,
		   "{'cmd':'room.open','room':'1','role':'recv','pool':%llu,"
		   "'receivers':2,'sources':[{'endpoint':'%s','pool':'many'}]}",
		   (unsigned long long)pool_of_views(p, cache, MANY_VIEWS),
		   p->c.nodes[0].endpoint);
	for (unsigned int i = 0; i < MANY_VIEWS; i++)
		n += (size_t)snprintf(text + n, sizeof(text) - n, "%s'v%u':{'pages':[0]}",
				      i ? "," : "", i);
	cluster_ok(&p->c, cache->session, "{'cmd':'room.bind','room':'1','views':{%s}}",
		   text);
}

/* One turn writes them all. */
static void views_of_many_receivers_are_cut(void **state)
{
	struct pair *p = *state;
	struct session *other = cluster_engine(&p->c, 1, "other");
	struct cache second = geometry;
	cJSON *reply, *room;

	cluster_cache(&p->c, other, "kv", 0, &second);
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.open','room':'1','role':'send','pool':%llu}",
		   (unsigned long long)pool_of_views(p, &p->src, MANY_VIEWS));
	open_many(p, &p->dst);
	open_many(p, &second);
	cluster_until_state(&p->c, p->prefill, "send", 1, KVD_WAITING_FOR_INPUT);
	reply = cluster_call(&p->c, p->prefill,
			     "{'cmd':'room.trace','room':'1','pages':true}");
	room = cJSON_GetArrayItem(cJSON_GetObjectItem(reply, "rooms"), 0);
	assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(room, "views")), 64);
	assert_true(cJSON_IsTrue(cJSON_GetObjectItem(room, "views_cut")));
	cJSON_Delete(reply);
	reply = cluster_call(&p->c, p->decode, "{'cmd':'room.trace','room':'1'}");
	room = cJSON_GetArrayItem(cJSON_GetObjectItem(reply, "rooms"), 0);
	assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(room, "views")),
			 MANY_VIEWS);
	assert_null(cJSON_GetObjectItem(room, "views_cut"));
	cJSON_Delete(reply);
	cache_close(&second);
}

static void on_answer(void *arg, const char *text, size_t len)
{
	*(char **)arg = strndup(text, len);
}

/* Each room's head is large enough to fill a turn. And a room that ends and is closed
 * while the reply is written is not reported again as an ended one. */
static void room_closed_during_list_is_listed_once(void **state)
{
	struct pair *p = *state;
	struct request *req;
	char *text = NULL;
	cJSON *reply;

	open_recv(p, 1, "");
	open_send(p, 1);
	bind(p, 1, "3");
	give(p, 1, "1");
	loop_virtual_parts(p->c.loop, 1);
	req = request_new(p->decode, 1, NULL, 0);
	assert_non_null(req);
	req->line = cJSON_Parse("{\"cmd\":\"room.trace\",\"room\":\"1\"}");
	req->on_answer = on_answer;
	req->on_answer_arg = &text;
	commands_dispatch(req);
	assert_null(text);
	cluster_ok(&p->c, p->decode, "{'cmd':'room.close','room':'1'}");
	assert_null(rooms_find(rooms_of(&p->c.nodes[1].kvd), p->decode, ROOM_RECV, 1));
	cluster_run(&p->c, 10 * MS);
	loop_virtual_parts(p->c.loop, 0);
	assert_non_null(text);
	reply = cJSON_Parse(text);
	assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(reply, "rooms")), 1);
	cJSON_Delete(reply);
	free(text);
}

int main(void)
{
#define CASE(test) cmocka_unit_test_setup_teardown(test, setup, teardown)
	const struct CMUnitTest tests[] = {
		CASE(rooms_keep_their_own_events),
		CASE(first_byte_is_before_the_last),
		CASE(events_overwritten_are_dropped),
		CASE(room_writes_so_many_events_and_its_states),
		CASE(ended_room_keeps_events_and_names),
		CASE(names_cross_to_the_sender),
		CASE(names_of_lying_peer_are_left_out),
		CASE(trace_of_other_user_is_empty),
		CASE(long_page_lists_are_cut),
		CASE(views_of_many_receivers_are_cut),
		CASE(room_closed_during_list_is_listed_once),
	};

	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests_name("rooms_trace", tests, NULL, NULL);
}
