/* SPDX-License-Identifier: Apache-2.0 */
/* Rooms of several sources where a turn has time for one step: one of the cover, of the
 * requests, of the reads. They end well, and at any time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "daemon/room/room.h"
#include "daemon/room/rooms.h"
#include "proto/kvd_status.h"
#include "tests/lib/room_pair.h"

#define SOURCES 6u
#define LAYERS 5u
#define ROOM 9u
#define S LOOP_NS_PER_S

struct world {
	struct room_pair *p;
	struct session *engines[SOURCES];
	struct cache parts[SOURCES]; /* a head each */
	const char *role, *there;
};

static void world_new(struct world *w, const char *role, const char *there)
{
	static const struct cache geometry = {.layers = LAYERS,
					      .pages = 16,
					      .page_tokens = 4,
					      .units = SOURCES,
					      .total_units = SOURCES,
					      .unit_bytes = 32};

	*w = (struct world){.role = role, .there = there};
	w->p = room_pair_new(&geometry, 1);
	for (unsigned int i = 0; i < SOURCES; i++) {
		w->engines[i] = cluster_engine(&w->p->c, 0, "part");
		w->parts[i] = geometry;
		w->parts[i].units = 1;
		w->parts[i].first_unit = i;
		cluster_cache(&w->p->c, w->engines[i], "part", i, &w->parts[i]);
		memset(w->parts[i].base, 7, w->parts[i].bytes);
	}
}

static void world_free(struct world *w)
{
	void *state = w->p;

	loop_virtual_parts(w->p->c.loop, 0);
	room_pair_teardown(&state);
	for (unsigned int i = 0; i < SOURCES; i++)
		cache_close(&w->parts[i]);
}

/* Both roles; a recv's pages are bound when it is open. */
static void open_all(struct world *w)
{
	const char *views = "'views':{'kv':{'pages':[7,2],'tokens':[0,7]}}";
	bool pull = strcmp(w->role, "pull") == 0;
	char sources[100 * SOURCES], *at = sources;

	for (unsigned int i = 0; i < SOURCES; i++)
		at += sprintf(at, "%s{'endpoint':'%s','pool':'part','rank':%u}",
			      i ? "," : "", w->p->c.nodes[0].endpoint, i);
	cluster_ok(&w->p->c, w->p->decode,
		   "{'cmd':'room.open','room':'%u','role':'%s','pool':%llu,'sources':[%s]"
		   "%s%s}",
		   ROOM, w->role, (unsigned long long)w->p->dst.pool, sources,
		   pull ? "," : "", pull ? views : "");
	if (!pull)
		cluster_ok(&w->p->c, w->p->decode, "{'cmd':'room.bind','room':'%u',%s}",
			   ROOM, views);
}

static void open_there(struct world *w)
{
	const char *views = "'views':{'kv':{'pages':[3,4],'tokens':[0,7]}}";
	bool pull = strcmp(w->role, "pull") == 0;

	for (unsigned int i = 0; i < SOURCES; i++) {
		cluster_ok(&w->p->c, w->engines[i],
			   "{'cmd':'room.open','room':'%u','role':'%s','pool':%llu%s%s}",
			   ROOM, w->there, (unsigned long long)w->parts[i].pool,
			   pull ? "," : "", pull ? views : "");
		if (!pull)
			cluster_ok(&w->p->c, w->engines[i],
				   "{'cmd':'room.send','room':'%u','seq':0,'last':"
				   "true,%s}",
				   ROOM, views);
	}
}

static const struct room *room_of(const struct world *w)
{
	enum room_role role = strcmp(w->role, "pull") == 0 ? ROOM_PULL : ROOM_RECV;

	return rooms_find(rooms_of(&w->p->c.nodes[1].kvd), w->p->decode, role, ROOM);
}

struct counts {
	unsigned int asked, covered, reads;
};

static struct counts counts_of(const struct world *w)
{
	const struct room *room = room_of(w);
	struct counts n = {0};
	const struct party *party;

	list_foreach(party, &room->parties, link) {
		n.asked += party_asked(party);
		n.covered += party->wants != NULL;
		n.reads += party->due.reads;
	}
	return n;
}

static unsigned int most(unsigned int a, unsigned int before, unsigned int after)
{
	return after - before > a ? after - before : a;
}

static void ends_well(const char *role, const char *there)
{
	struct counts before, after, each = {0};
	unsigned int making = 0;
	struct world w;

	world_new(&w, role, there);
	open_there(&w);
	loop_virtual_parts(w.p->c.loop, 1);
	open_all(&w);
	after = counts_of(&w);
	while (!room_terminal(room_of(&w))) {
		before = after;
		assert_true(loop_turn(w.p->c.loop, S));
		making += room_of(&w)->bind.covering != NULL;
		after = counts_of(&w);
		each.asked = most(each.asked, before.asked, after.asked);
		each.covered = most(each.covered, before.covered, after.covered);
		each.reads = most(each.reads, before.reads, after.reads);
	}
	assert_int_equal(sm_state(&room_of(&w)->sm), ROOM_SUCCESS);
	assert_int_equal(each.asked, 1);
	assert_int_equal(each.covered, 1);
	assert_int_equal(each.reads, strcmp(role, "pull") == 0);
	assert_true(making >= SOURCES + LAYERS);
	assert_int_equal(*cache_at(&w.p->dst, LAYERS - 1, 1, 2, 2, SOURCES - 1, 31), 7);
	world_free(&w);
}

static void pull_in_turns_ends_well(void **state)
{
	(void)state;
	ends_well("pull", "offer");
}

static void recv_in_turns_ends_well(void **state)
{
	(void)state;
	ends_well("recv", "send");
}

enum end { ABORT, ENGINE_DIES, SOURCE_DIES, ENDS };

static bool end_at(struct world *w, enum end end, unsigned int turns)
{
	while (turns-- > 0 && room_live(room_of(w)))
		loop_turn(w->p->c.loop, S);
	if (!room_live(room_of(w)) || sm_state(&room_of(w)->sm) == ROOM_SUCCESS)
		return false;
	if (end == ABORT)
		cluster_ok(&w->p->c, w->p->decode, "{'cmd':'room.abort','room':'%u'}",
			   ROOM);
	else if (end == ENGINE_DIES)
		cluster_engine_dies(&w->p->c, w->p->decode);
	else
		cluster_crash(&w->p->c, 0, MEM_CRASH_KILLED);
	return true;
}

/* It may succeed without a source that has confirmed. */
static bool has_ended(void *arg)
{
	return room_terminal(room_of(arg));
}

/* The room ends after any number of turns. */
static void room_in_turns_may_end_at_any_time(void **state)
{
	(void)state;
	for (unsigned int pull = 0; pull < 2; pull++)
		for (enum end end = ABORT; end < ENDS; end++) {
			bool again = true;

			for (unsigned int turns = 0; again; turns += 3) {
				struct world w;

				world_new(&w, pull ? "pull" : "recv",
					  pull ? "offer" : "send");
				open_there(&w);
				loop_virtual_parts(w.p->c.loop, 1);
				open_all(&w);
				again = end_at(&w, end, turns);
				if (again && end != ENGINE_DIES)
					cluster_until(&w.p->c, has_ended, &w, "end");
				world_free(&w);
			}
		}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(pull_in_turns_ends_well),
		cmocka_unit_test(recv_in_turns_ends_well),
		cmocka_unit_test(room_in_turns_may_end_at_any_time),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
