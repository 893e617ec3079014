/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A room that cannot start at one side ends at the other, at once and with the same text,
 * also one that opens later; and messages for one opening of a number do not affect
 * others. In-process cluster, virtual time.
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
#include "daemon/room/room.h"
#include "daemon/room/rooms.h"
#include "daemon/room/rooms_set.h"
#include "proto/kvd_status.h"
#include "tests/lib/cluster.h"

#define MS LOOP_NS_PER_MS
#define AT_ONCE (100 * MS) /* virtual: time of some messages */

/* nodes 0 and 2 prefill, each with half of the heads, node 1 decodes */
struct trio {
	struct cluster c;
	struct session *engines[3];
	struct cache caches[3];
};

static int setup(void **state)
{
	static const char *const names[] = {"prefill", "decode", "other"};
	struct trio *p = calloc(1, sizeof(*p));

	cluster_new(&p->c, 11, 3);
	for (unsigned int i = 0; i < 3; i++) {
		p->engines[i] = cluster_engine(&p->c, i, names[i]);
		p->caches[i] = cluster_geometry;
		p->caches[i].units = i == 1 ? 4 : 2;
		p->caches[i].first_unit = i == 2 ? 2 : 0;
		cluster_cache(&p->c, p->engines[i], "kv", i == 2, &p->caches[i]);
		memset(p->caches[i].base, (int)(0x11 * (i + 1)), p->caches[i].bytes);
	}
	*state = p;
	return 0;
}

static int teardown(void **state)
{
	struct trio *p = *state;

	for (unsigned int i = 0; i < 3; i++)
		p->c.nodes[i].kvd.draining = false;
	cluster_free(&p->c);
	for (unsigned int i = 0; i < 3; i++)
		cache_close(&p->caches[i]);
	free(p);
	return 0;
}

static void open_send(struct trio *p, unsigned int node, uint64_t room)
{
	cluster_ok(&p->c, p->engines[node],
		   "{'cmd':'room.open','room':'%llu','role':'send','pool':%llu}",
		   (unsigned long long)room, (unsigned long long)p->caches[node].pool);
}

/* Of node 1, from the given nodes. */
static void open_recv(struct trio *p, uint64_t room, const char *sources)
{
	cluster_ok(&p->c, p->engines[1],
		   "{'cmd':'room.open','room':'%llu','role':'recv','pool':%llu,"
		   "'sources':[%s],'timeouts':{'bootstrap_ms':2000}}",
		   (unsigned long long)room, (unsigned long long)p->caches[1].pool,
		   sources);
}

#define BOTH "'tcp://10.0.0.1:7400','tcp://10.0.0.3:7400'"
#define FIRST "'tcp://10.0.0.1:7400'"

static void bind(struct trio *p, uint64_t room)
{
	cluster_ok(&p->c, p->engines[1],
		   "{'cmd':'room.bind','room':'%llu','views':{'kv':{'pages':[7,2]}}}",
		   (unsigned long long)room);
}

static void send_all(struct trio *p, unsigned int node, uint64_t room)
{
	cluster_ok(&p->c, p->engines[node],
		   "{'cmd':'room.send','room':'%llu','seq':0,'last':true,'views':{'kv':"
		   "{'pages':[3,4]}}}",
		   (unsigned long long)room);
}

static void end(struct trio *p, unsigned int node, const char *role, uint64_t room)
{
	cluster_ok(&p->c, p->engines[node],
		   "{'cmd':'room.abort','room':'%llu','role':'%s','reason':'enough'}",
		   (unsigned long long)room, role);
}

static void close_room(struct trio *p, unsigned int node, const char *role, uint64_t room)
{
	cluster_until_state(&p->c, p->engines[node], role, room, KVD_FAILED);
	cluster_ok(&p->c, p->engines[node],
		   "{'cmd':'room.close','room':'%llu','role':'%s'}",
		   (unsigned long long)room, role);
}

static struct rooms *rooms_at(struct trio *p, unsigned int node)
{
	return rooms_of(&p->c.nodes[node].kvd);
}

static struct room *room_at(struct trio *p, unsigned int node, enum room_role role,
			    uint64_t number)
{
	struct room *room = rooms_find(rooms_at(p, node), p->engines[node], role, number);

	assert_non_null(room);
	return room;
}

static void said(struct trio *p, unsigned int node, enum room_role role, uint64_t number,
		 enum err_code code, const char *words)
{
	const struct err *err = room_at(p, node, role, number)->error;

	assert_int_equal(
		cluster_state(&p->c, p->engines[node], room_role_names[role], number),
		KVD_FAILED);
	if (err->code != code || !strstr(err->text, words))
		fail_msg("%s: %s; not %s: %s", err_name(err->code), err->text,
			 err_name(code), words);
}

static void waits(struct trio *p, unsigned int node, uint64_t number)
{
	assert_int_equal(cluster_state(&p->c, p->engines[node], "send", number),
			 KVD_BOOTSTRAPPING);
}

/* A whole room, from both sources: the daemons know each other. */
static void meet(struct trio *p)
{
	static uint64_t number = 9000;

	number++;
	open_recv(p, number, BOTH);
	bind(p, number);
	for (unsigned int i = 0; i < 3; i += 2) {
		open_send(p, i, number);
		send_all(p, i, number);
	}
	for (unsigned int i = 0; i < 3; i += 2)
		cluster_until_state(&p->c, p->engines[i], "send", number, KVD_SUCCESS);
	cluster_until_state(&p->c, p->engines[1], "recv", number, KVD_SUCCESS);
}

/* ---- why a receiver cannot start ---- */

static void receiver_not_covered_fails_its_sender(void **state)
{
	struct trio *p = *state;

	open_send(p, 0, 1);
	open_recv(p, 1, FIRST);
	bind(p, 1);
	cluster_run(&p->c, AT_ONCE);
	said(p, 1, ROOM_RECV, 1, ERR_COVER, "no source holds");
	said(p, 0, ROOM_SEND, 1, ERR_COVER, "peer tcp://10.0.0.2:7400 instance ");
	said(p, 0, ROOM_SEND, 1, ERR_COVER, "no source holds");
}

static void receiver_with_another_layout_fails_its_sender(void **state)
{
	struct trio *p = *state;
	struct session *engine = cluster_engine(&p->c, 1, "other model");
	struct cache cache = cluster_geometry;

	cache.unit_bytes = 64;
	cluster_cache(&p->c, engine, "kv", 0, &cache);
	open_send(p, 0, 2);
	cluster_ok(&p->c, engine,
		   "{'cmd':'room.open','room':'2','role':'recv','pool':%llu,'sources':["
		   "'%s']}",
		   (unsigned long long)cache.pool, p->c.nodes[0].endpoint);
	cluster_run(&p->c, AT_ONCE);
	assert_int_equal(cluster_state(&p->c, engine, "recv", 2), KVD_FAILED);
	said(p, 0, ROOM_SEND, 2, ERR_LAYOUT,
	     "unit_bytes 64 (the destination), 32 (the source)");
	cluster_engine_dies(&p->c, engine);
	cluster_run(&p->c, LOOP_NS_PER_S);
	cache_close(&cache);
}

static void unreachable_source_fails_the_others(void **state)
{
	struct trio *p = *state;

	open_send(p, 0, 3);
	open_recv(p, 3, FIRST ",'tcp://10.0.0.9:7400'");
	cluster_until_state(&p->c, p->engines[1], "recv", 3, KVD_FAILED);
	cluster_run(&p->c, AT_ONCE);
	said(p, 0, ROOM_SEND, 3, ERR_TIMEOUT, "tcp://10.0.0.9:7400");
	said(p, 0, ROOM_SEND, 3, ERR_TIMEOUT, "cannot be reached");
}

static void receiver_without_a_transport_fails_its_sender(void **state)
{
	struct trio *p = *state;
	struct setting_words *require = &p->c.nodes[1].config.require;

	open_send(p, 0, 4);
	open_recv(p, 4, FIRST);
	/* room.open is refused where nothing can fulfil it: so only now */
	snprintf(require->word[0], sizeof(require->word[0]), "verbs");
	require->count = 1;
	cluster_run(&p->c, AT_ONCE);
	said(p, 1, ROOM_RECV, 4, ERR_REQUIRE, "no transport: fake: not in `require`");
	said(p, 0, ROOM_SEND, 4, ERR_REQUIRE, "no transport: fake: not in `require`");
	require->count = 0;
}

static void receiver_aborted_fails_its_sender(void **state)
{
	struct trio *p = *state;

	open_send(p, 0, 5);
	open_recv(p, 5, FIRST);
	cluster_until_state(&p->c, p->engines[1], "recv", 5, KVD_WAITING_FOR_INPUT);
	end(p, 1, "recv", 5);
	cluster_run(&p->c, AT_ONCE);
	said(p, 0, ROOM_SEND, 5, ERR_ABORTED, "aborted by its engine 'decode'");
	said(p, 0, ROOM_SEND, 5, ERR_ABORTED, "enough");
}

static void receiver_of_dead_engine_fails_both_senders(void **state)
{
	struct trio *p = *state;

	open_send(p, 0, 6);
	open_send(p, 2, 6);
	open_recv(p, 6, BOTH);
	cluster_until_state(&p->c, p->engines[1], "recv", 6, KVD_WAITING_FOR_INPUT);
	cluster_engine_dies(&p->c, p->engines[1]);
	cluster_run(&p->c, AT_ONCE);
	said(p, 0, ROOM_SEND, 6, ERR_SESSION, "engine 'decode'");
	said(p, 2, ROOM_SEND, 6, ERR_SESSION, "engine 'decode'");
	cluster_run(&p->c, LOOP_NS_PER_S);
}

/* One of two receivers cannot start: the other learns it from the sender. */
static void other_receivers_of_the_sender_are_notified(void **state)
{
	struct trio *p = *state;

	cluster_ok(&p->c, p->engines[1],
		   "{'cmd':'room.open','room':'7','role':'send','pool':%llu}",
		   (unsigned long long)p->caches[1].pool);
	for (unsigned int i = 0; i < 3; i += 2) {
		cluster_ok(&p->c, p->engines[i],
			   "{'cmd':'room.open','room':'7','role':'recv','pool':%llu,"
			   "'receivers':2,'sources':['%s']}",
			   (unsigned long long)p->caches[i].pool, p->c.nodes[1].endpoint);
		cluster_until_state(&p->c, p->engines[i], "recv", 7,
				    KVD_WAITING_FOR_INPUT);
	}
	cluster_ok(&p->c, p->engines[0],
		   "{'cmd':'room.bind','room':'7','views':{'kv':{'pages':[7,2]}}}");
	cluster_run(&p->c, AT_ONCE);
	waits(p, 1, 7);
	end(p, 2, "recv", 7);
	cluster_run(&p->c, AT_ONCE);
	said(p, 1, ROOM_SEND, 7, ERR_ABORTED, "engine 'other'");
	said(p, 0, ROOM_RECV, 7, ERR_ABORTED, "engine 'other'");
}

/* ---- senders that open later ---- */

static void sender_opened_later_fails_at_once(void **state)
{
	struct trio *p = *state;

	meet(p);
	open_recv(p, 10, FIRST);
	bind(p, 10);
	close_room(p, 1, "recv", 10);
	cluster_run(&p->c, 5 * LOOP_NS_PER_S);
	open_send(p, 0, 10);
	cluster_run(&p->c, AT_ONCE);
	said(p, 0, ROOM_SEND, 10, ERR_COVER, "no source holds");
	/* the other got no request */
	open_send(p, 2, 10);
	cluster_run(&p->c, AT_ONCE);
	waits(p, 2, 10);
	end(p, 2, "send", 10);
}

/* It had introduced itself, and its request waited for the room. */
static void sender_opened_after_receiver_abort_fails(void **state)
{
	struct trio *p = *state;

	open_recv(p, 11, BOTH);
	bind(p, 11);
	cluster_run(&p->c, AT_ONCE);
	end(p, 1, "recv", 11);
	cluster_run(&p->c, AT_ONCE);
	open_send(p, 2, 11);
	cluster_run(&p->c, AT_ONCE);
	said(p, 2, ROOM_SEND, 11, ERR_ABORTED, "enough");
}

/* The room that it waited for ended with that engine. */
static void sender_of_engine_after_dead_one_waits(void **state)
{
	struct trio *p = *state;
	struct cache cache = p->caches[0];
	struct session *engine;

	open_recv(p, 12, FIRST);
	cluster_run(&p->c, AT_ONCE);
	cluster_engine_dies(&p->c, p->engines[0]);
	cluster_run(&p->c, AT_ONCE);
	said(p, 1, ROOM_RECV, 12, ERR_SESSION, "withdrew pool 'kv'");
	assert_int_equal(rooms_at(p, 0)->early_count, 0);
	engine = cluster_engine(&p->c, 0, "prefill again");
	cluster_cache(&p->c, engine, "kv", 0, &cache);
	cluster_ok(&p->c, engine,
		   "{'cmd':'room.open','room':'12','role':'send','pool':%llu}",
		   (unsigned long long)cache.pool);
	cluster_run(&p->c, AT_ONCE);
	assert_int_equal(cluster_state(&p->c, engine, "send", 12), KVD_BOOTSTRAPPING);
	cluster_engine_dies(&p->c, engine);
	cluster_run(&p->c, LOOP_NS_PER_S);
	cache_close(&cache);
}

static void early_aborts_are_bounded_in_time(void **state)
{
	struct trio *p = *state;
	const uint64_t ttl = p->c.nodes[0].config.early_request_ttl_ns;

	meet(p);
	for (uint64_t n = 20; n < 24; n++) {
		open_recv(p, n, FIRST);
		end(p, 1, "recv", n);
		close_room(p, 1, "recv", n);
		cluster_run(&p->c, ttl / 8);
	}
	assert_int_equal(rooms_at(p, 0)->early_count, 4);
	cluster_run(&p->c, ttl * 5 / 8);
	assert_int_equal(rooms_at(p, 0)->early_count, 2);
	open_send(p, 0, 20);
	open_send(p, 0, 23);
	cluster_run(&p->c, AT_ONCE);
	waits(p, 0, 20);
	said(p, 0, ROOM_SEND, 23, ERR_ABORTED, "enough");
	cluster_run(&p->c, ttl);
	assert_int_equal(rooms_at(p, 0)->early_count, 0);
	end(p, 0, "send", 20);
}

static void early_aborts_are_bounded_in_number(void **state)
{
	struct trio *p = *state;

	meet(p);
	p->c.nodes[0].config.early_requests_max = 3;
	for (uint64_t n = 30; n < 36; n++) {
		open_recv(p, n, FIRST);
		end(p, 1, "recv", n);
	}
	cluster_run(&p->c, AT_ONCE);
	assert_int_equal(rooms_at(p, 0)->early_count, 3);
	/* requests of others have their own places */
	open_recv(p, 40, BOTH);
	bind(p, 40);
	cluster_run(&p->c, AT_ONCE);
	assert_int_equal(rooms_at(p, 0)->orphan_count, 1);
	open_send(p, 0, 35);
	cluster_run(&p->c, AT_ONCE);
	waits(p, 0, 35);
	end(p, 0, "send", 35);
	end(p, 1, "recv", 40);
}

/* ---- numbers that are used again ---- */

static void succeed(struct trio *p, uint64_t room)
{
	/* the receiver first: an ABORT that it takes back is not met */
	open_recv(p, room, BOTH);
	cluster_run(&p->c, AT_ONCE);
	for (unsigned int i = 0; i < 3; i += 2) {
		open_send(p, i, room);
		send_all(p, i, room);
	}
	bind(p, room);
	cluster_until_state(&p->c, p->engines[1], "recv", room, KVD_SUCCESS);
	cluster_until_state(&p->c, p->engines[0], "send", room, KVD_SUCCESS);
	cluster_until_state(&p->c, p->engines[2], "send", room, KVD_SUCCESS);
}

/* The senders were slow: they open for the second attempt only. */
static void receiver_reopened_revokes_its_abort(void **state)
{
	struct trio *p = *state;

	for (unsigned int times = 0; times < 3; times++) {
		open_recv(p, 50, BOTH);
		end(p, 1, "recv", 50);
		close_room(p, 1, "recv", 50);
	}
	cluster_run(&p->c, AT_ONCE);
	open_recv(p, 50, BOTH);
	cluster_run(&p->c, AT_ONCE);
	assert_int_equal(rooms_at(p, 0)->early_count, 0);
	assert_int_equal(rooms_at(p, 2)->early_count, 0);
	open_send(p, 0, 50);
	cluster_run(&p->c, AT_ONCE);
	end(p, 1, "recv", 50);
	close_room(p, 1, "recv", 50);
	close_room(p, 0, "send", 50);
	succeed(p, 50);
}

static struct remote *line_to(struct trio *p, unsigned int from, unsigned int to)
{
	struct remote *line;

	assert_int_equal(handshake_reach(p->c.nodes[from].kvd.handshake,
					 p->c.nodes[to].endpoint, NULL, &line),
			 0);
	return line;
}

static void tell(struct trio *p, const struct wire_abort *msg)
{
	struct remote *line = line_to(p, 1, 0);

	assert_int_equal(handshake_send_abort(line, msg), 0);
	cluster_run(&p->c, AT_ONCE);
	handshake_release(line);
}

/* Repeat the ABORT of the receiver's daemon for room `number`. */
static struct wire_abort abort_of(struct trio *p, uint64_t number, uint64_t pool)
{
	return (struct wire_abort){
		.room = number,
		.from_role = ROOM_RECV,
		.from_gen = room_at(p, 1, ROOM_RECV, number)->gen,
		.pool = pool,
		.code = ERR_ABORTED,
		.text = "from the past",
	};
}

static void abort_repeated_harms_no_other_room(void **state)
{
	struct trio *p = *state;
	struct wire_abort msg;

	meet(p);
	for (unsigned int by_number = 0; by_number < 2; by_number++) {
		const uint64_t n = 60 + by_number;

		open_send(p, 0, n);
		open_recv(p, n, FIRST);
		msg = abort_of(p, n, by_number ? 0 : p->caches[0].pool);
		tell(p, &msg);
		said(p, 0, ROOM_SEND, n, ERR_ABORTED, "from the past");
		tell(p, &msg); /* it has failed already */
		close_room(p, 0, "send", n);
		tell(p, &msg); /* it is closed */
		open_send(p, 0, n);
		cluster_run(&p->c, AT_ONCE);
		waits(p, 0, n);
		tell(p, &msg); /* it is another room */
		waits(p, 0, n);
		end(p, 1, "recv", n);
		cluster_run(&p->c, AT_ONCE);
		/* the receiver's own, of the same generation: so it has to time out */
		close_room(p, 1, "recv", n);
		end(p, 0, "send", n);
		close_room(p, 0, "send", n);
	}
}

/* It was in transit while the room that it means failed and was closed. */
static void abort_late_harms_no_other_room(void **state)
{
	struct trio *p = *state;
	struct wire_abort msg;

	meet(p);
	open_send(p, 0, 65);
	open_recv(p, 65, FIRST);
	msg = abort_of(p, 65, p->caches[0].pool);
	end(p, 0, "send", 65);
	close_room(p, 0, "send", 65);
	tell(p, &msg);
	assert_int_equal(rooms_at(p, 0)->early_count, 0);
	open_send(p, 0, 65);
	cluster_run(&p->c, AT_ONCE);
	waits(p, 0, 65);
	end(p, 0, "send", 65);
	end(p, 1, "recv", 65);
}

static void room_with_all_its_receivers_is_not_harmed(void **state)
{
	struct trio *p = *state;
	struct wire_abort msg;

	open_recv(p, 70, BOTH);
	bind(p, 70);
	open_send(p, 0, 70);
	open_send(p, 2, 70);
	cluster_until_state(&p->c, p->engines[0], "send", 70, KVD_WAITING_FOR_INPUT);
	msg = abort_of(p, 70, p->caches[0].pool);
	msg.from_gen++;
	tell(p, &msg);
	msg.pool = 0;
	tell(p, &msg);
	msg.pool = p->caches[0].pool + 77;
	msg.from_gen++;
	tell(p, &msg);
	send_all(p, 0, 70);
	send_all(p, 2, 70);
	cluster_until_state(&p->c, p->engines[1], "recv", 70, KVD_SUCCESS);
}

/* The line ends before the message: nothing is sent, and the room has its own timeout. */
static void abort_lost_leaves_the_timeout(void **state)
{
	struct trio *p = *state;

	meet(p);
	cluster_ok(&p->c, p->engines[0],
		   "{'cmd':'room.open','room':'80','role':'send','pool':%llu,"
		   "'timeouts':{'bootstrap_ms':4000}}",
		   (unsigned long long)p->caches[0].pool);
	open_recv(p, 80, FIRST);
	cluster_until_state(&p->c, p->engines[1], "recv", 80, KVD_WAITING_FOR_INPUT);
	mem_hub_partition(p->c.links, p->c.nodes[0].endpoint, p->c.nodes[1].endpoint,
			  true);
	end(p, 1, "recv", 80);
	cluster_until_state(&p->c, p->engines[1], "recv", 80, KVD_FAILED);
	mem_hub_break(p->c.links, p->c.nodes[1].endpoint, p->c.nodes[0].endpoint);
	mem_hub_partition(p->c.links, p->c.nodes[0].endpoint, p->c.nodes[1].endpoint,
			  false);
	cluster_until_state(&p->c, p->engines[0], "send", 80, KVD_FAILED);
	close_room(p, 0, "send", 80);
	close_room(p, 1, "recv", 80);
	succeed(p, 80);
}

/* ---- a number that the receiver uses again first ---- */

static void succeeds(struct trio *p, uint64_t number)
{
	send_all(p, 0, number);
	cluster_until_state(&p->c, p->engines[0], "send", number, KVD_SUCCESS);
	cluster_until_state(&p->c, p->engines[1], "recv", number, KVD_SUCCESS);
}

/* Node 1's whole cache from node 0 alone. */
static void whole_source(struct trio *p)
{
	cluster_ok(&p->c, p->engines[0], "{'cmd':'pool.unregister','pool':%llu}",
		   (unsigned long long)p->caches[0].pool);
	cache_close(&p->caches[0]);
	p->caches[0] = p->caches[1];
	cluster_cache(&p->c, p->engines[0], "all", 0, &p->caches[0]);
	cluster_run(&p->c, AT_ONCE);
}

/* How the number's first rooms end: by the receiver, which was a party of its sender or
 * had not spoken; or well. */
enum first_end { END_OF_PARTY, END_OF_SILENT, END_WELL, FIRST_ENDS };

static void first_rooms(struct trio *p, uint64_t number, enum first_end how)
{
	open_send(p, 0, number);
	open_recv(p, number, FIRST);
	if (how != END_OF_SILENT) {
		bind(p, number);
		cluster_until_state(&p->c, p->engines[0], "send", number,
				    KVD_WAITING_FOR_INPUT);
	}
	if (how == END_WELL)
		succeeds(p, number);
	else
		end(p, 1, "recv", number);
	cluster_run(&p->c, AT_ONCE);
	cluster_ok(&p->c, p->engines[1],
		   "{'cmd':'room.close','room':'%llu','role':'recv'}",
		   (unsigned long long)number);
}

static void close_first_sender(struct trio *p, uint64_t number)
{
	cluster_ok(&p->c, p->engines[0],
		   "{'cmd':'room.close','room':'%llu','role':'send'}",
		   (unsigned long long)number);
}

static void receiver_first_again_waits_for_its_own_sender(void **state)
{
	struct trio *p = *state;
	uint64_t n = 100;

	whole_source(p);
	for (unsigned int how = 0; how < FIRST_ENDS; how++) {
		for (unsigned int closed = 0; closed < 2; closed++, n++) {
			first_rooms(p, n, (enum first_end)how);
			if (closed)
				close_first_sender(p, n);
			open_recv(p, n, FIRST);
			bind(p, n);
			cluster_run(&p->c, AT_ONCE);
			assert_int_equal(cluster_state(&p->c, p->engines[1], "recv", n),
					 KVD_WAITING_FOR_INPUT);
			if (!closed)
				close_first_sender(p, n);
			open_send(p, 0, n);
			cluster_run(&p->c, AT_ONCE);
			succeeds(p, n);
		}
	}
}

/* It ends, too, before its own sender opens: that one is notified. */
static void sender_receives_end_of_receiver_first_again(void **state)
{
	struct trio *p = *state;
	uint64_t n = 110;

	whole_source(p);
	for (unsigned int how = 0; how < FIRST_ENDS; how++) {
		for (unsigned int kind = 0; kind < 4; kind++, n++) {
			bool closed = kind & 1, bound = kind & 2;

			first_rooms(p, n, (enum first_end)how);
			if (closed)
				close_first_sender(p, n);
			open_recv(p, n, FIRST);
			if (bound)
				bind(p, n);
			cluster_run(&p->c, AT_ONCE);
			end(p, 1, "recv", n);
			cluster_run(&p->c, AT_ONCE);
			if (!closed)
				close_first_sender(p, n);
			open_send(p, 0, n);
			cluster_run(&p->c, AT_ONCE);
			said(p, 0, ROOM_SEND, n, ERR_ABORTED, "enough");
			close_room(p, 0, "send", n);
			/* and it is over for the one after that */
			open_send(p, 0, n);
			cluster_run(&p->c, AT_ONCE);
			waits(p, 0, n);
			end(p, 0, "send", n);
		}
	}
}

/* The receiver did not know the sender's generation yet when it ended, and meanwhile
 * that one ended itself and its number was opened again. */
static void abort_of_the_last_rooms_receiver_harms_no_sender(void **state)
{
	struct trio *p = *state;
	struct wire_abort msg;

	open_recv(p, 130, BOTH);
	bind(p, 130);
	open_send(p, 0, 130);
	cluster_run(&p->c, AT_ONCE);
	msg = abort_of(p, 130, p->caches[0].pool);
	msg.from_pool = p->caches[1].pool;
	end(p, 0, "send", 130);
	close_room(p, 0, "send", 130);
	open_send(p, 0, 130);
	tell(p, &msg);
	waits(p, 0, 130);
	/* the control: another of that pool is this room's */
	msg.from_gen++;
	tell(p, &msg);
	said(p, 0, ROOM_SEND, 130, ERR_ABORTED, "from the past");
}

/* A late partner is still notified of the end of the room that it missed. */
static void receiver_unknown_to_ended_sender_is_notified(void **state)
{
	struct trio *p = *state;

	whole_source(p);
	for (uint64_t n = 140; n < 142; n++) {
		open_send(p, 0, n);
		open_recv(p, n, FIRST);
		cluster_run(&p->c, AT_ONCE);
		end(p, 0, "send", n);
		if (n == 141)
			close_room(p, 0, "send", n);
		bind(p, n);
		cluster_run(&p->c, AT_ONCE);
		said(p, 1, ROOM_RECV, n, ERR_ABORTED, "enough");
	}
}

/* ---- sources that are not connected yet ---- */

static void end_before_connection_is_sent_after_it(void **state)
{
	struct trio *p = *state;

	open_send(p, 0, 150);
	open_recv(p, 150, FIRST);
	end(p, 1, "recv", 150);
	close_room(p, 1, "recv", 150);
	assert_int_equal(rooms_at(p, 1)->deferred_abort_count, 1);
	cluster_run(&p->c, AT_ONCE);
	said(p, 0, ROOM_SEND, 150, ERR_ABORTED, "enough");
	assert_int_equal(rooms_at(p, 1)->deferred_abort_count, 0);
}

static void end_before_the_connection_is_revoked(void **state)
{
	struct trio *p = *state;

	open_recv(p, 151, FIRST);
	end(p, 1, "recv", 151);
	close_room(p, 1, "recv", 151);
	open_recv(p, 151, FIRST);
	assert_int_equal(rooms_at(p, 1)->deferred_abort_count, 0);
	open_send(p, 0, 151);
	cluster_run(&p->c, AT_ONCE);
	waits(p, 0, 151);
	end(p, 0, "send", 151);
}

/* The dial is not answered: pending messages are few, charged, and dropped. */
static void end_not_deliverable_is_bounded(void **state)
{
	struct trio *p = *state;
	const struct account *account = p->engines[1]->account;
	const uint64_t ttl = p->c.nodes[1].config.connect_timeout_ns;

	p->c.nodes[1].config.early_requests_max = 3;
	for (uint64_t n = 160; n < 165; n++) {
		open_recv(p, n, "'tcp://10.0.0.9:7400'");
		end(p, 1, "recv", n);
		close_room(p, 1, "recv", n);
	}
	assert_int_equal(rooms_at(p, 1)->deferred_abort_count, 3);
	assert_int_equal(account->objects[ACCOUNT_ORPHANS], 3);
	cluster_run(&p->c, ttl / 2);
	assert_int_equal(rooms_at(p, 1)->deferred_abort_count, 3);
	cluster_run(&p->c, ttl);
	assert_int_equal(rooms_at(p, 1)->deferred_abort_count, 0);
	assert_int_equal(account->objects[ACCOUNT_ORPHANS], 0);
	assert_true(list_empty(handshake_remotes(p->c.nodes[1].kvd.handshake)));
}

/* The daemon that the room knew has ended; the rooms of the next one are others. */
static void end_is_not_sent_to_other_instance(void **state)
{
	struct trio *p = *state;
	struct session *engine;
	struct cache cache = p->caches[0];
	unsigned int again;

	meet(p);
	open_recv(p, 170, FIRST);
	cluster_until_state(&p->c, p->engines[1], "recv", 170, KVD_WAITING_FOR_INPUT);
	cluster_crash(&p->c, 0, MEM_CRASH_KILLED);
	cluster_until_state(&p->c, p->engines[1], "recv", 170, KVD_FAILED);
	/* that room has failed because the source was lost: it has nothing to send */
	assert_int_equal(rooms_at(p, 1)->deferred_abort_count, 0);
	open_recv(p, 171, FIRST);
	end(p, 1, "recv", 171);
	assert_int_equal(rooms_at(p, 1)->deferred_abort_count, 1);
	again = cluster_restart(&p->c, 0);
	engine = cluster_engine(&p->c, again, "prefill again");
	cluster_cache(&p->c, engine, "kv", 0, &cache);
	cluster_ok(&p->c, engine,
		   "{'cmd':'room.open','room':'171','role':'send','pool':%llu}",
		   (unsigned long long)cache.pool);
	cluster_run(&p->c, 3 * LOOP_NS_PER_S);
	assert_int_equal(rooms_at(p, 1)->deferred_abort_count, 0);
	assert_int_equal(cluster_state(&p->c, engine, "send", 171), KVD_BOOTSTRAPPING);
	cluster_engine_dies(&p->c, engine);
	cluster_run(&p->c, LOOP_NS_PER_S);
	cache_close(&cache);
}

/* ---- the mirror ---- */

static void sender_ended_early_notifies_known_receivers(void **state)
{
	struct trio *p = *state;

	cluster_ok(&p->c, p->engines[1],
		   "{'cmd':'room.open','room':'90','role':'send','pool':%llu}",
		   (unsigned long long)p->caches[1].pool);
	for (unsigned int i = 0; i < 3; i += 2)
		cluster_ok(&p->c, p->engines[i],
			   "{'cmd':'room.open','room':'90','role':'recv','pool':%llu,"
			   "'receivers':2,'sources':['%s']}",
			   (unsigned long long)p->caches[i].pool, p->c.nodes[1].endpoint);
	cluster_ok(&p->c, p->engines[0],
		   "{'cmd':'room.bind','room':'90','views':{'kv':{'pages':[7,2]}}}");
	cluster_run(&p->c, AT_ONCE);
	end(p, 1, "send", 90);
	cluster_run(&p->c, AT_ONCE);
	said(p, 0, ROOM_RECV, 90, ERR_ABORTED, "enough");
	/* the other one is notified when it would start */
	close_room(p, 1, "send", 90);
	cluster_ok(&p->c, p->engines[2],
		   "{'cmd':'room.bind','room':'90','views':{'kv':{'pages':[7,2]}}}");
	cluster_run(&p->c, AT_ONCE);
	said(p, 2, ROOM_RECV, 90, ERR_ABORTED, "enough");
}

static void offer_ended_before_puller_refuses_it(void **state)
{
	struct trio *p = *state;

	cluster_ok(&p->c, p->engines[1],
		   "{'cmd':'room.open','room':'91','role':'offer','pool':%llu,"
		   "'views':{'kv':{'pages':[3]}}}",
		   (unsigned long long)p->caches[1].pool);
	end(p, 1, "offer", 91);
	for (unsigned int closed = 0; closed < 2; closed++) {
		cluster_ok(&p->c, p->engines[0],
			   "{'cmd':'room.open','room':'91','role':'pull','pool':%llu,"
			   "'sources':['%s'],'views':{'kv':{'pages':[7]}}}",
			   (unsigned long long)p->caches[0].pool, p->c.nodes[1].endpoint);
		cluster_run(&p->c, AT_ONCE);
		said(p, 0, ROOM_PULL, 91, ERR_ABORTED, "enough");
		close_room(p, 0, "pull", 91);
		if (!closed)
			close_room(p, 1, "offer", 91);
	}
}

int main(void)
{
#define CASE(test) cmocka_unit_test_setup_teardown(test, setup, teardown)
	const struct CMUnitTest tests[] = {
		CASE(receiver_not_covered_fails_its_sender),
		CASE(receiver_with_another_layout_fails_its_sender),
		CASE(unreachable_source_fails_the_others),
		CASE(receiver_without_a_transport_fails_its_sender),
		CASE(receiver_aborted_fails_its_sender),
		CASE(receiver_of_dead_engine_fails_both_senders),
		CASE(other_receivers_of_the_sender_are_notified),
		CASE(sender_opened_later_fails_at_once),
		CASE(sender_opened_after_receiver_abort_fails),
		CASE(sender_of_engine_after_dead_one_waits),
		CASE(early_aborts_are_bounded_in_time),
		CASE(early_aborts_are_bounded_in_number),
		CASE(receiver_reopened_revokes_its_abort),
		CASE(abort_repeated_harms_no_other_room),
		CASE(abort_late_harms_no_other_room),
		CASE(room_with_all_its_receivers_is_not_harmed),
		CASE(abort_lost_leaves_the_timeout),
		CASE(receiver_first_again_waits_for_its_own_sender),
		CASE(sender_receives_end_of_receiver_first_again),
		CASE(abort_of_the_last_rooms_receiver_harms_no_sender),
		CASE(receiver_unknown_to_ended_sender_is_notified),
		CASE(end_before_connection_is_sent_after_it),
		CASE(end_before_the_connection_is_revoked),
		CASE(end_not_deliverable_is_bounded),
		CASE(end_is_not_sent_to_other_instance),
		CASE(sender_ended_early_notifies_known_receivers),
		CASE(offer_ended_before_puller_refuses_it),
	};

	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests_name("rooms_early", tests, NULL, NULL);
}
