/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Admission to a room: tickets, named peers, the daemons of one user. Requests of others
 * do not affect it, at any time. In-process cluster, virtual time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/metrics.h"
#include "daemon/room/room.h"
#include "daemon/room/rooms.h"
#include "daemon/room/rooms_set.h"
#include "proto/kvd_status.h"
#include "tests/lib/cluster.h"

#define MS LOOP_NS_PER_MS
#define AT_ONCE (100 * MS)
#define TICKET "000102030405060708090a0b0c0d0e0f"
#define OTHER "ff0102030405060708090a0b0c0d0e0f"

enum { PREFILL, DECODE, THIEF };

/* node 0 prefills, node 1 decodes, node 2 is not to have it */
struct trio {
	struct cluster c;
	struct session *engines[3];
	struct cache caches[3];
};

static struct trio *trio_new(const char *const *users)
{
	static const char *const names[] = {"prefill", "decode", "thief"};
	struct trio *p = calloc(1, sizeof(*p));

	cluster_users(users);
	cluster_new(&p->c, 11, 3);
	cluster_users(NULL);
	for (unsigned int i = 0; i < 3; i++) {
		p->engines[i] = cluster_engine(&p->c, i, names[i]);
		p->caches[i] = cluster_geometry;
		cluster_cache(&p->c, p->engines[i], "kv", 0, &p->caches[i]);
		memset(p->caches[i].base, (int)(0x11 * (i + 1)), p->caches[i].bytes);
	}
	return p;
}

/* Without keys: everybody is of one user. */
static int setup(void **state)
{
	*state = trio_new(NULL);
	return 0;
}

/* With keys, each of another user. */
static int setup_users(void **state)
{
	static const char *const users[] = {"anna", "bert", "carl"};

	*state = trio_new(users);
	return 0;
}

/* With keys: 0 and 1 are of one user. */
static int setup_kin(void **state)
{
	static const char *const users[] = {"anna", "anna", "carl"};

	*state = trio_new(users);
	return 0;
}

static int teardown(void **state)
{
	struct trio *p = *state;

	cluster_free(&p->c);
	for (unsigned int i = 0; i < 3; i++)
		cache_close(&p->caches[i]);
	free(p);
	return 0;
}

/* `more`: further members of room.open, with a comma in front. */
static void open_room(struct trio *p, unsigned int node, const char *role,
		      uint64_t number, const char *more)
{
	bool sink = strcmp(role, "recv") == 0 || strcmp(role, "pull") == 0;
	bool pull = strcmp(role, "pull") == 0 || strcmp(role, "offer") == 0;

	cluster_ok(&p->c, p->engines[node],
		   "{'cmd':'room.open','room':'%llu','role':'%s','pool':%llu%s%s%s}",
		   (unsigned long long)number, role,
		   (unsigned long long)p->caches[node].pool,
		   sink ? ",'sources':['tcp://10.0.0.1:7400']" : "",
		   pull ? ",'views':{'kv':{'pages':[3,4]}}" : "", more);
}

static void bind(struct trio *p, unsigned int node, uint64_t number)
{
	cluster_ok(&p->c, p->engines[node],
		   "{'cmd':'room.bind','room':'%llu','views':{'kv':{'pages':[7,2]}}}",
		   (unsigned long long)number);
}

static void send_all(struct trio *p, uint64_t number)
{
	cluster_ok(&p->c, p->engines[PREFILL],
		   "{'cmd':'room.send','room':'%llu','seq':0,'last':true,'views':{'kv':"
		   "{'pages':[3,4]}}}",
		   (unsigned long long)number);
}

static struct rooms *rooms_at(struct trio *p, unsigned int node)
{
	return rooms_of(&p->c.nodes[node].kvd);
}

static void said(struct trio *p, unsigned int node, enum room_role role, uint64_t number,
		 enum err_code code, const char *words)
{
	struct room *room = rooms_find(rooms_at(p, node), p->engines[node], role, number);

	assert_non_null(room);
	assert_int_equal(
		cluster_state(&p->c, p->engines[node], room_role_names[role], number),
		KVD_FAILED);
	if (room->error->code != code || !strstr(room->error->text, words))
		fail_msg("%s: %s; not %s: %s", err_name(room->error->code),
			 room->error->text, err_name(code), words);
}

static uint64_t unauthorized(struct trio *p)
{
	return metrics_get(&p->c.nodes[PREFILL].kvd.metrics, METRIC_ROOM_UNAUTHORIZED);
}

static void untouched(const struct cache *cache)
{
	for (uint64_t i = 0; i < cache->bytes; i++)
		assert_int_equal(cache->base[i], cache->base[cache->bytes - 1]);
}

/* The prefill room and its true receiver succeed, and the thief has nothing. */
static void handed_over(struct trio *p, uint64_t number)
{
	send_all(p, number);
	cluster_until_state(&p->c, p->engines[DECODE], "recv", number, KVD_SUCCESS);
	cluster_until_state(&p->c, p->engines[PREFILL], "send", number, KVD_SUCCESS);
	assert_int_equal(*cache_at(&p->caches[DECODE], 0, 0, 7, 0, 0, 0), 0x11);
	untouched(&p->caches[THIEF]);
}

/* ---- tickets ---- */

static void receiver_with_another_ticket_is_refused(void **state)
{
	struct trio *p = *state;

	open_room(p, PREFILL, "send", 42, ",'ticket':'" TICKET "'");
	open_room(p, THIEF, "recv", 42, ",'ticket':'" OTHER "'");
	bind(p, THIEF, 42);
	cluster_run(&p->c, AT_ONCE);
	said(p, THIEF, ROOM_RECV, 42, ERR_AUTH, "ticket: does not match that of room 42");
	assert_int_equal(unauthorized(p), 1);
	open_room(p, DECODE, "recv", 42, ",'ticket':'" TICKET "'");
	bind(p, DECODE, 42);
	handed_over(p, 42);
}

static void receiver_without_a_ticket_is_refused(void **state)
{
	struct trio *p = *state;

	open_room(p, PREFILL, "send", 42, ",'ticket':'" TICKET "'");
	open_room(p, THIEF, "recv", 42, "");
	bind(p, THIEF, 42);
	cluster_run(&p->c, AT_ONCE);
	said(p, THIEF, ROOM_RECV, 42, ERR_AUTH, "ticket: ");
	open_room(p, DECODE, "recv", 42, ",'ticket':'" TICKET "'");
	bind(p, DECODE, 42);
	handed_over(p, 42);
}

/* A page list that is written in later turns carries it, too. */
static void ticket_arrives_with_long_page_list(void **state)
{
	struct trio *p = *state;

	open_room(p, PREFILL, "send", 42, ",'ticket':'" TICKET "'");
	open_room(p, DECODE, "recv", 42,
		  ",'ticket':'" TICKET "','request_id':'one','traceparent':"
		  "'00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'");
	bind(p, DECODE, 42);
	handed_over(p, 42);
}

static void puller_with_another_ticket_is_refused(void **state)
{
	struct trio *p = *state;

	open_room(p, PREFILL, "offer", 42, ",'ticket':'" TICKET "'");
	open_room(p, THIEF, "pull", 42, ",'ticket':'" OTHER "'");
	cluster_run(&p->c, AT_ONCE);
	said(p, THIEF, ROOM_PULL, 42, ERR_AUTH, "match that of room 42");
	assert_int_equal(unauthorized(p), 1);
	untouched(&p->caches[THIEF]);
	open_room(p, DECODE, "pull", 42, ",'ticket':'" TICKET "'");
	cluster_until_state(&p->c, p->engines[DECODE], "pull", 42, KVD_SUCCESS);
	cluster_until_state(&p->c, p->engines[PREFILL], "offer", 42, KVD_SUCCESS);
}

/* A receiver that ends before its TRANSFER_INFO fails a sender, an unauthorized one
 * does not. */
static void abort_unauthorized_has_no_effect(void **state)
{
	struct trio *p = *state;
	const char *const tickets[] = {"", ",'ticket':'" OTHER "'"};

	for (unsigned int i = 0; i < 2; i++) { /* while it is open, and before */
		if (i == 0)
			open_room(p, PREFILL, "send", 42, ",'ticket':'" TICKET "'");
		for (unsigned int k = 0; k < 2; k++) {
			open_room(p, THIEF, "recv", 42 + i, tickets[k]);
			cluster_run(&p->c, AT_ONCE); /* its source is met */
			cluster_ok(&p->c, p->engines[THIEF],
				   "{'cmd':'room.abort','room':'%u','role':'recv'}",
				   42 + i);
			cluster_until_state(&p->c, p->engines[THIEF], "recv", 42 + i,
					    KVD_FAILED);
			cluster_ok(&p->c, p->engines[THIEF],
				   "{'cmd':'room.close','room':'%u'}", 42 + i);
		}
		cluster_run(&p->c, AT_ONCE);
		if (i == 1)
			open_room(p, PREFILL, "send", 43, ",'ticket':'" TICKET "'");
		open_room(p, DECODE, "recv", 42 + i, ",'ticket':'" TICKET "'");
		bind(p, DECODE, 42 + i);
		handed_over(p, 42 + i);
	}
	open_room(p, PREFILL, "send", 44, ",'ticket':'" TICKET "'");
	open_room(p, DECODE, "recv", 44, ",'ticket':'" TICKET "'");
	cluster_run(&p->c, AT_ONCE);
	cluster_ok(&p->c, p->engines[DECODE],
		   "{'cmd':'room.abort','room':'44','role':'recv','reason':'enough'}");
	cluster_run(&p->c, AT_ONCE);
	said(p, PREFILL, ROOM_SEND, 44, ERR_ABORTED, "enough");
}

static void ticket_of_a_wrong_form_is_refused(void **state)
{
	static const char *const wrong[] = {
		"'ticket':''",
		"'ticket':'0102'",
		"'ticket':'" TICKET "00'",
		"'ticket':'zz0102030405060708090a0b0c0d0e0f'",
		"'ticket':'00000000000000000000000000000000'",
		"'ticket':7",
		"'peers':[]",
		"'peers':['']",
		"'peers':[7]",
		"'peers':'anna'",
		"'peers':['0123456789012345678901234567890123456789012345678901234567890"
		"123']",
	};
	struct trio *p = *state;

	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
		cluster_refused(&p->c, p->engines[PREFILL], "EINVAL",
				"{'cmd':'room.open','room':'1','role':'send','pool':%llu"
				",%s}",
				(unsigned long long)p->caches[PREFILL].pool, wrong[i]);
}

static void ticket_is_in_no_record(void **state)
{
	struct trio *p = *state;
	char *text;
	cJSON *answer;

	open_room(p, PREFILL, "send", 42,
		  ",'ticket':'" TICKET "','peers':['anna','bert']");
	answer = cluster_call(&p->c, p->engines[PREFILL],
			      "{'cmd':'room.show','room':'42'}");
	text = cJSON_PrintUnformatted(answer);
	assert_non_null(strstr(text, "\"ticket\":true"));
	assert_non_null(strstr(text, "\"admits\":[\"anna\",\"bert\"]"));
	assert_null(strstr(text, TICKET));
	cJSON_free(text);
	cJSON_Delete(answer);
}

/* ---- numbers that are asked for in advance ---- */

#define SQUATTED 3500

static void numbers_taken_in_advance_have_no_effect(void **state)
{
	struct trio *p = *state;

	p->c.nodes[THIEF].config.rooms_max = 8000;
	for (uint64_t i = 1; i <= SQUATTED; i++) {
		open_room(p, THIEF, "recv", i, i % 2 ? ",'ticket':'" OTHER "'" : "");
		bind(p, THIEF, i);
	}
	cluster_run(&p->c, AT_ONCE);
	assert_in_range(rooms_at(p, PREFILL)->orphan_count, 3000, SQUATTED);
	open_room(p, DECODE, "recv", 1234, ",'ticket':'" TICKET "'");
	bind(p, DECODE, 1234);
	cluster_run(&p->c, AT_ONCE);
	open_room(p, PREFILL, "send", 1234, ",'ticket':'" TICKET "'");
	handed_over(p, 1234);
	said(p, THIEF, ROOM_RECV, 1234, ERR_AUTH,
	     "ticket: room 1234 does not admit this daemon");
	/* and one whose receiver opens later */
	open_room(p, PREFILL, "send", 1235, ",'ticket':'" TICKET "'");
	cluster_run(&p->c, AT_ONCE);
	open_room(p, DECODE, "recv", 1235, ",'ticket':'" TICKET "'");
	bind(p, DECODE, 1235);
	handed_over(p, 1235);
}

/* All places are taken, and all for one number. */
static void squatters_give_way(void **state)
{
	struct trio *p = *state;

	p->c.nodes[PREFILL].config.early_requests_max = 300;
	for (uint64_t i = 1; i <= 400; i++) {
		open_room(p, THIEF, "recv", i, "");
		bind(p, THIEF, i);
	}
	cluster_run(&p->c, AT_ONCE);
	for (uint64_t i = 500; i < 600; i++) { /* more than the eighth that is kept */
		open_room(p, DECODE, "recv", i, ",'ticket':'" TICKET "'");
		bind(p, DECODE, i);
	}
	cluster_run(&p->c, AT_ONCE);
	assert_true(rooms_at(p, PREFILL)->orphan_count <= 300);
	said(p, THIEF, ROOM_RECV, 1, ERR_LIMIT, "early_requests 300");
	for (uint64_t i = 500; i < 600; i++) {
		open_room(p, PREFILL, "send", i, ",'ticket':'" TICKET "'");
		handed_over(p, i);
	}
}

/* ---- users ---- */

static void room_without_a_ticket_is_for_daemons_of_one_user(void **state)
{
	struct trio *p = *state;

	open_room(p, THIEF, "recv", 42, "");
	bind(p, THIEF, 42);
	cluster_run(&p->c, AT_ONCE);
	open_room(p, PREFILL, "send", 42, "");
	open_room(p, PREFILL, "send", 43, "");
	cluster_run(&p->c, AT_ONCE);
	open_room(p, THIEF, "recv", 43, ",'ticket':'" TICKET "'");
	bind(p, THIEF, 43);
	cluster_run(&p->c, AT_ONCE);
	said(p, THIEF, ROOM_RECV, 42, ERR_AUTH, "room 42 does not admit this daemon");
	said(p, THIEF, ROOM_RECV, 43, ERR_AUTH,
	     "ticket: room 43 has none, and daemon 'carl' is of another user");
	assert_int_equal(unauthorized(p), 2);
	open_room(p, DECODE, "recv", 42, "");
	bind(p, DECODE, 42);
	handed_over(p, 42);
}

static void ticket_admits_another_user(void **state)
{
	struct trio *p = *state;

	open_room(p, PREFILL, "send", 42, ",'ticket':'" TICKET "'");
	open_room(p, DECODE, "recv", 42, ",'ticket':'" TICKET "'");
	bind(p, DECODE, 42);
	handed_over(p, 42);
}

static void only_named_peers_are_admitted(void **state)
{
	struct trio *p = *state;

	open_room(p, PREFILL, "send", 42, ",'ticket':'" TICKET "','peers':['bert']");
	open_room(p, THIEF, "recv", 42, ",'ticket':'" TICKET "'");
	bind(p, THIEF, 42);
	cluster_run(&p->c, AT_ONCE);
	said(p, THIEF, ROOM_RECV, 42, ERR_AUTH,
	     "peers: room 42 does not admit daemon 'carl'");
	open_room(p, DECODE, "recv", 42, ",'ticket':'" TICKET "'");
	bind(p, DECODE, 42);
	handed_over(p, 42);
	/* a name without a ticket */
	open_room(p, PREFILL, "send", 43, ",'peers':['anna','bert']");
	open_room(p, DECODE, "recv", 43, "");
	bind(p, DECODE, 43);
	handed_over(p, 43);
}

/* A source that is not among the peers gets neither ticket nor pages. */
static void receiver_names_its_sources(void **state)
{
	struct trio *p = *state;

	open_room(p, PREFILL, "send", 42, ",'ticket':'" TICKET "'");
	open_room(p, DECODE, "recv", 42, ",'ticket':'" TICKET "','peers':['carl']");
	bind(p, DECODE, 42);
	cluster_run(&p->c, AT_ONCE);
	said(p, DECODE, ROOM_RECV, 42, ERR_AUTH,
	     "peers: does not name source anna tcp://10.0.0.1:7400");
	assert_int_equal(cluster_state(&p->c, p->engines[PREFILL], "send", 42),
			 KVD_BOOTSTRAPPING);
	cluster_ok(&p->c, p->engines[DECODE], "{'cmd':'room.close','room':'42'}");
	open_room(p, DECODE, "recv", 42, ",'ticket':'" TICKET "','peers':['anna']");
	bind(p, DECODE, 42);
	handed_over(p, 42);
}

/* The reason of a room's end is not revealed to unauthorized peers. */
static void tombstone_answers_authorized_peers(void **state)
{
	struct trio *p = *state;

	open_room(p, PREFILL, "send", 42, ",'ticket':'" TICKET "'");
	cluster_ok(&p->c, p->engines[PREFILL],
		   "{'cmd':'room.abort','room':'42','reason':'private'}");
	cluster_until_state(&p->c, p->engines[PREFILL], "send", 42, KVD_FAILED);
	cluster_ok(&p->c, p->engines[PREFILL], "{'cmd':'room.close','room':'42'}");
	open_room(p, THIEF, "recv", 42, "");
	bind(p, THIEF, 42);
	open_room(p, DECODE, "recv", 42, ",'ticket':'" TICKET "'");
	bind(p, DECODE, 42);
	cluster_run(&p->c, AT_ONCE);
	said(p, DECODE, ROOM_RECV, 42, ERR_ABORTED, "private");
	assert_int_equal(cluster_state(&p->c, p->engines[THIEF], "recv", 42),
			 KVD_WAITING_FOR_INPUT);
	cluster_run(&p->c, p->c.nodes[PREFILL].config.early_request_ttl_ns);
	said(p, THIEF, ROOM_RECV, 42, ERR_TIMEOUT, "no engine opened room 42");
}

#define CASE(name, setup) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(receiver_with_another_ticket_is_refused, setup),
		CASE(receiver_without_a_ticket_is_refused, setup),
		CASE(ticket_arrives_with_long_page_list, setup),
		CASE(puller_with_another_ticket_is_refused, setup),
		CASE(abort_unauthorized_has_no_effect, setup),
		CASE(ticket_of_a_wrong_form_is_refused, setup),
		CASE(ticket_is_in_no_record, setup),
		CASE(numbers_taken_in_advance_have_no_effect, setup),
		CASE(squatters_give_way, setup),
		CASE(room_without_a_ticket_is_for_daemons_of_one_user, setup_kin),
		CASE(ticket_admits_another_user, setup_users),
		CASE(only_named_peers_are_admitted, setup_users),
		CASE(receiver_names_its_sources, setup_users),
		CASE(tombstone_answers_authorized_peers, setup_users),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
