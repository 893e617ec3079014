/* SPDX-License-Identifier: Apache-2.0 */
/* Boards and directories on them: entries, leases, boards that go and come. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "tests/lib/board_net.h"

/* ---- entries ---- */

static void entries_are_seen_by_all_who_watch(void **state)
{
	static struct net_seen here, there, late;
	static struct net_said one, two;

	(void)state;
	look(0, &here, true);
	look(2, &there, false);
	run_for(100 * MS);
	assert_int_equal(here.synced, 1);
	assert_int_equal(there.synced, 1);
	must_say(0, &one, place_of("", 0), "{\"a\":0}");
	must_say(1, &two, place_of("w", 1), "{\"a\":1}");
	look(3, &late, true);
	run_for(100 * MS);
	for (struct net_seen *seen = &here;; seen = seen == &here ? &there : &late) {
		assert_int_equal(seen->count, 2);
		assert_string_equal(record_at(seen, place_of("", 0)), "{\"a\":0}");
		assert_string_equal(record_at(seen, place_of("w", 1)), "{\"a\":1}");
		if (seen == &late)
			break;
	}
	assert_int_equal(late.synced, 1);
	/* another record, and its end */
	assert_int_equal(
		f.n[1].directory->ops->update(&two.publication, "{\"a\":2}", NULL), 0);
	run_for(100 * MS);
	assert_string_equal(record_at(&there, place_of("w", 1)), "{\"a\":2}");
	f.n[1].directory->ops->withdraw(&two.publication);
	f.n[1].directory->ops->withdraw(&two.publication);
	run_for(100 * MS);
	assert_int_equal(here.count + there.count + late.count, 3);
	assert_int_equal(board_count(f.n[0].board), 1);
}

static void loads_are_told_to_those_who_want_them(void **state)
{
	static struct net_seen loads, records;
	static struct net_said said;
	unsigned int events, tolds;

	(void)state;
	assert_int_equal(say(1, &said, place_of("w", 0), "{}", "{\"n\":1}"), 0);
	look(2, &loads, true);
	look(3, &records, false);
	run_for(100 * MS);
	assert_string_equal(load_at(&loads, place_of("w", 0)), "{\"n\":1}");
	assert_string_equal(load_at(&records, place_of("w", 0)), "-");
	events = records.events;
	tolds = f.n[3].tolds;
	for (int i = 0; i < 5; i++) {
		char text[32];

		snprintf(text, sizeof(text), "{\"n\":%d}", i + 2);
		assert_int_equal(
			f.n[1].directory->ops->update(&said.publication, NULL, text), 0);
		run_for(50 * MS);
		assert_string_equal(load_at(&loads, place_of("w", 0)), text);
		assert_string_equal(record_at(&loads, place_of("w", 0)), "{}");
	}
	/* the others get no message */
	assert_int_equal(records.events, events);
	assert_int_equal(f.n[3].tolds, tolds);
	/* and a record after loads is told with the latest of these */
	assert_int_equal(
		f.n[1].directory->ops->update(&said.publication, "{\"b\":1}", NULL), 0);
	run_for(50 * MS);
	assert_string_equal(record_at(&records, place_of("w", 0)), "{\"b\":1}");
	assert_string_equal(load_at(&loads, place_of("w", 0)), "{\"n\":6}");
}

static void place_of_another_daemon_is_refused(void **state)
{
	static struct net_said mine, theirs;

	(void)state;
	must_say(1, &mine, place_of("w", 0), "{}");
	assert_int_equal(say(2, &theirs, place_of("w", 0), "{}", NULL), 0);
	run_for(LEASE_NS); /* it is asked for twice */
	assert_int_equal(theirs.done, 1);
	assert_int_equal(theirs.err.code, ERR_EXIST);
	assert_non_null(strstr(theirs.err.text, "published by tcp://10.0.0.1:7400"));
	assert_null(theirs.publication.impl);
	/* it is not tried again behind its owner's back */
	f.n[1].directory->ops->withdraw(&mine.publication);
	run_for(20 * LEASE_NS);
	assert_int_equal(board_count(f.n[0].board), 0);
	must_say(2, &theirs, place_of("w", 0), "{}");
}

static void bad_entries_are_refused_here(void **state)
{
	struct place place = place_of("-", 0);
	char *text = calloc(1, DIRECTORY_RECORD_MAX + 2);
	static struct net_said said;

	(void)state;
	assert_true(say(1, &said, place, "{}", NULL) < 0);
	assert_int_equal(err_last()->code, ERR_INVAL);
	place = place_of("a\nb", 0);
	assert_true(say(1, &said, place, "{}", NULL) < 0);
	place = place_of("w", PLACE_SIZE_MAX);
	assert_true(say(1, &said, place, "{}", NULL) < 0);
	assert_non_null(strstr(err_last()->text, "tp_rank"));
	memset(text, 'x', DIRECTORY_RECORD_MAX + 1);
	assert_true(say(1, &said, place_of("w", 0), text, NULL) < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	text[DIRECTORY_LOAD_MAX + 1] = '\0';
	assert_true(say(1, &said, place_of("w", 0), "{}", text) < 0);
	text[DIRECTORY_LOAD_MAX] = '\0';
	assert_int_equal(say(1, &said, place_of("w", 0), "{}", text), 0);
	free(text);
}

static void watch_may_end_in_its_own_call(void **state)
{
	static struct net_seen seen;
	static struct net_said one, two;

	(void)state;
	must_say(1, &one, place_of("a", 0), "{}");
	must_say(1, &two, place_of("b", 0), "{}");
	look(3, &seen, true);
	seen.ends = true;
	run_for(100 * MS);
	assert_int_equal(seen.events, 1);
	assert_int_equal(seen.synced, 0);
	assert_null(seen.watch.impl);
	assert_int_equal(board_watches(f.n[0].board), 0);
}

/* ---- leases ---- */

static void entries_of_a_dead_daemon_stay_for_its_lease(void **state)
{
	static struct net_seen seen;
	static struct net_said said;

	(void)state;
	look(2, &seen, false);
	must_say(1, &said, place_of("w", 0), "{}");
	link_mem_crash(f.n[1].link, MEM_CRASH_POWER);
	run_for(LEASE_NS);
	assert_int_equal(seen.count, 1);
	run_for(2 * S);
	assert_int_equal(seen.count, 0);
	assert_int_equal(board_count(f.n[0].board), 0);
}

static void successor_has_the_places_at_once(void **state)
{
	static struct net_seen seen;
	static struct net_said said, next;

	(void)state;
	look(2, &seen, false);
	must_say(1, &said, place_of("w", 0), "{\"of\":1}");
	link_mem_crash(f.n[1].link, MEM_CRASH_POWER);
	run_for(2 * S);
	/* a stranger has not */
	assert_int_equal(say(3, &next, place_of("w", 0), "{}", NULL), 0);
	run_for(100 * MS);
	assert_int_equal(next.done, 0);
	f.n[3].directory->ops->withdraw(&next.publication);
	node_stop(1);
	node_start(1);
	assert_int_equal(directory_open(1, endpoint(0), NULL), 0);
	must_say(1, &next, place_of("w", 0), "{\"of\":2}");
	assert_string_equal(record_at(&seen, place_of("w", 0)), "{\"of\":2}");
	run_for(3 * LEASE_NS);
	assert_int_equal(seen.count, 1);
}

static void line_that_breaks_for_a_moment_takes_nothing_away(void **state)
{
	const struct mem_path cut = {.delay_ns = 50000, .cut = true};
	const struct mem_path good = {.delay_ns = 50000};
	static struct net_seen seen;
	static struct net_said stays, goes;
	unsigned int events;

	(void)state;
	look(2, &seen, false);
	must_say(1, &stays, place_of("a", 0), "{}");
	must_say(1, &goes, place_of("b", 0), "{}");
	events = seen.events;
	assert_int_equal(mem_hub_set_path(f.hub, endpoint(1), endpoint(0), &cut), 0);
	assert_int_equal(mem_hub_set_path(f.hub, endpoint(0), endpoint(1), &cut), 0);
	run_for(1500 * MS);
	assert_true(f.n[0].downs > 0);
	f.n[1].directory->ops->withdraw(&goes.publication);
	assert_int_equal(mem_hub_set_path(f.hub, endpoint(1), endpoint(0), &good), 0);
	assert_int_equal(mem_hub_set_path(f.hub, endpoint(0), endpoint(1), &good), 0);
	run_for(1 * S);
	assert_int_equal(seen.events, events);
	/* what it did not say again goes when the lease is over */
	run_for(3 * LEASE_NS);
	assert_int_equal(seen.count, 1);
	assert_string_equal(record_at(&seen, place_of("a", 0)), "{}");
}

/* ---- the board goes and comes ---- */

static void restarted_board_has_all_again_and_nothing_flickers(void **state)
{
	static struct net_seen seen;
	static struct net_said one, two;
	struct directory_state now;
	unsigned int events;

	(void)state;
	look(2, &seen, false);
	must_say(1, &one, place_of("a", 0), "{}");
	must_say(3, &two, place_of("b", 0), "{}");
	events = seen.events;
	node_stop(0);
	run_for(2 * S);
	f.n[2].directory->ops->state(f.n[2].directory, &now);
	assert_false(now.up);
	assert_int_not_equal(now.why.code, ERR_OK);
	assert_int_equal(seen.count, 2); /* what is known goes on */
	/* one of the two has gone for good meanwhile */
	link_mem_crash(f.n[3].link, MEM_CRASH_POWER);
	node_start(0);
	run_for(2 * S);
	f.n[2].directory->ops->state(f.n[2].directory, &now);
	assert_true(now.up);
	assert_int_equal(seen.count, 2);
	assert_int_equal(seen.events, events);
	run_for(3 * LEASE_NS);
	assert_int_equal(seen.count, 1);
	assert_string_equal(record_at(&seen, place_of("a", 0)), "{}");
}

static void reconnected_watch_costs_what_changed(void **state)
{
	static struct net_seen seen;
	static struct net_said said[200];
	const struct mem_path cut = {.delay_ns = 50000, .cut = true};
	const struct mem_path good = {.delay_ns = 50000};
	unsigned int bytes;

	(void)state;
	look(2, &seen, false);
	for (unsigned int i = 0; i < 200; i++)
		must_say(1, &said[i], place_of("w", i), "{\"a\":\"0123456789\"}");
	assert_int_equal(seen.count, 200);
	assert_int_equal(mem_hub_set_path(f.hub, endpoint(2), endpoint(0), &cut), 0);
	assert_int_equal(mem_hub_set_path(f.hub, endpoint(0), endpoint(2), &cut), 0);
	run_for(2 * S);
	f.n[1].directory->ops->withdraw(&said[7].publication);
	assert_int_equal(
		f.n[1].directory->ops->update(&said[8].publication, "{\"a\":1}", NULL),
		0);
	run_for(100 * MS);
	assert_int_equal(seen.count, 200);
	bytes = f.n[2].told_bytes;
	assert_int_equal(mem_hub_set_path(f.hub, endpoint(2), endpoint(0), &good), 0);
	assert_int_equal(mem_hub_set_path(f.hub, endpoint(0), endpoint(2), &good), 0);
	run_for(3 * S);
	assert_int_equal(seen.count, 199);
	assert_string_equal(record_at(&seen, place_of("w", 8)), "{\"a\":1}");
	assert_in_range(f.n[2].told_bytes - bytes, 1, 400);
}

static void second_board_takes_over(void **state)
{
	static struct net_seen seen;
	static struct net_said said;
	struct directory_state now;

	(void)state;
	assert_int_equal(directory_open(2, endpoint(0), endpoint(1)), 0);
	assert_int_equal(directory_open(3, endpoint(0), endpoint(1)), 0);
	run_for(2 * LEASE_NS);
	look(3, &seen, false);
	must_say(2, &said, place_of("w", 0), "{}");
	assert_int_equal(board_count(f.n[0].board), 1);
	assert_int_equal(board_count(f.n[1].board), 1);
	node_stop(0);
	run_for(3 * S);
	f.n[3].directory->ops->state(f.n[3].directory, &now);
	assert_true(now.up);
	assert_int_equal(seen.count, 1);
	assert_int_equal(
		f.n[2].directory->ops->update(&said.publication, "{\"b\":1}", NULL), 0);
	run_for(100 * MS);
	assert_string_equal(record_at(&seen, place_of("w", 0)), "{\"b\":1}");
	/* and is said at the first when that is back */
	node_start(0);
	run_for(5 * S);
	assert_int_equal(board_count(f.n[0].board), 1);
}

static void publication_waits_for_its_board(void **state)
{
	static struct net_said said;

	(void)state;
	node_stop(0);
	run_for(2 * S);
	assert_int_equal(say(1, &said, place_of("w", 0), "{}", NULL), 0);
	run_for(5 * S);
	assert_int_equal(said.done, 0);
	node_start(0);
	run_for(5 * S);
	assert_int_equal(said.done, 1);
	assert_int_equal(said.err.code, ERR_OK);
}

static void older_daemon_is_named(void **state)
{
	struct directory_state now;
	struct peer *peer;

	(void)state;
	assert_int_equal(peers_dial(f.n[1].peers, endpoint(0), &peer), 0);
	run_for(10 * MS);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	peer->features &= ~PEER_FEATURE_BOARD;
	assert_int_equal(directory_open(1, endpoint(0), NULL), 0);
	run_for(10 * MS);
	f.n[1].directory->ops->state(f.n[1].directory, &now);
	assert_false(now.up);
	assert_int_equal(now.why.code, ERR_VERSION);
	assert_non_null(strstr(now.why.text, "upgrade it"));
	peer_release(peer);
}

/* ---- many, and little memory ---- */

static void large_group_is_told_in_parts(void **state)
{
	static struct net_seen seen;
	static struct net_said said[500];
	char *text = calloc(1, 2000);

	(void)state;
	text[0] = '{';
	memset(text + 1, ' ', 1997);
	text[1998] = '}';
	for (unsigned int i = 0; i < 500; i++)
		assert_int_equal(say(1, &said[i], place_of("w", i), text, NULL), 0);
	run_for(5 * S);
	assert_int_equal(board_count(f.n[0].board), 500);
	look(2, &seen, false);
	run_for(5 * S);
	assert_int_equal(seen.count, 500);
	assert_int_equal(seen.synced, 1);
	assert_int_equal(f.n[0].downs, 0);
	/* more go than the board remembers: the watch has the rest all the same */
	for (unsigned int i = 0; i < 400; i++)
		f.n[1].directory->ops->withdraw(&said[i].publication);
	run_for(S);
	assert_int_equal(seen.count, 100);
	free(text);
}

static void order_of_change_is_found_from_either_side(void **state)
{
	struct roster roster;
	struct roster_entry *entry;
	struct place last = place_of("", 0);

	(void)state;
	roster_init(&roster, 7);
	assert_null(roster_behind(&roster, 7, &last));
	srand(1);
	for (unsigned int i = 0; i < 20000; i++) {
		struct place place = place_of("w", (uint32_t)(rand() % 600));
		uint64_t since = roster.rev - (uint64_t)(rand() % 700) % roster.rev;
		char text[16];

		snprintf(text, sizeof(text), "%u", i);
		entry = roster_find(&roster, &place);
		if (entry && rand() % 2)
			roster_drop(&roster, entry);
		else
			assert_int_equal(roster_put(&roster, &place, text, NULL, &entry),
					 1);
		entry = roster_after(&roster, since);
		assert_ptr_equal(roster_behind(&roster, since, &last), entry);
		if (entry) {
			assert_true(entry->changed > since);
			assert_ptr_equal(
				roster_behind(&roster, entry->changed, &entry->place),
				roster_next(&roster, entry));
			last = entry->place;
		}
		assert_true(roster.gone_count <= ROSTER_GONE_MAX);
	}
	roster_fini(&roster);
}

static struct net_said parted[500];

/* A watch at node 2 is told a part of a large group, and no more yet. */
static void told_a_part(struct net_seen *seen)
{
	const struct mem_path cut = {.delay_ns = 50000, .cut = true};
	char *text = calloc(1, 2000);

	text[0] = '{';
	memset(text + 1, ' ', 1997);
	text[1998] = '}';
	for (unsigned int i = 0; i < 500; i++)
		assert_int_equal(say(1, &parted[i], place_of("w", i), text, NULL), 0);
	free(text);
	run_for(5 * S);
	/* these are told last, and have records from before the others' */
	for (unsigned int i = 0; i < 100; i++)
		assert_int_equal(f.n[1].directory->ops->update(&parted[i].publication,
							       NULL, "{\"n\":1}"),
				 0);
	run_for(S);
	mem_hub_set_queue_max(f.hub, 4);
	look(2, seen, false);
	for (unsigned int i = 0; i < 1000 && !seen->count; i++)
		run_for(50000);
	assert_int_equal(mem_hub_set_path(f.hub, endpoint(0), endpoint(2), &cut), 0);
	assert_int_equal(mem_hub_set_path(f.hub, endpoint(2), endpoint(0), &cut), 0);
	run_for(MS);
	assert_in_range(seen->count, 1, 400);
	assert_int_equal(seen->synced, 0);
}

static void told_the_rest(void)
{
	const struct mem_path good = {.delay_ns = 50000};

	mem_hub_set_queue_max(f.hub, 1000);
	assert_int_equal(mem_hub_set_path(f.hub, endpoint(0), endpoint(2), &good), 0);
	assert_int_equal(mem_hub_set_path(f.hub, endpoint(2), endpoint(0), &good), 0);
	run_for(10 * S);
}

static void what_goes_while_a_group_is_told_is_not_kept(void **state)
{
	static struct net_seen seen;
	const char *record;

	(void)state;
	told_a_part(&seen);
	assert_string_not_equal(record_at(&seen, place_of("w", 100)), "none");
	for (unsigned int i = 100; i < 110; i++)
		f.n[1].directory->ops->withdraw(&parted[i].publication);
	told_the_rest();
	assert_int_equal(f.n[0].downs, 0);
	assert_int_equal(seen.synced, 1);
	record = record_at(&seen, place_of("w", 100));
	assert_string_equal(record, "none");
	assert_int_equal(seen.count, 490);
}

static void what_goes_and_is_forgotten_meanwhile_is_not_kept(void **state)
{
	static struct net_seen seen;

	(void)state;
	told_a_part(&seen);
	for (unsigned int i = 100; i < 500; i++)
		f.n[1].directory->ops->withdraw(&parted[i].publication);
	told_the_rest();
	assert_int_equal(seen.count, 100);
}

static void telling_that_broke_off_leaves_nothing_out(void **state)
{
	static struct net_seen seen;

	(void)state;
	told_a_part(&seen);
	run_for(3 * S);
	assert_true(f.n[0].downs > 0);
	told_the_rest();
	assert_int_equal(seen.synced, 1);
	assert_int_equal(seen.count, 500);
}

static void allocation_failures_cost_nothing_for_good(void **state)
{
	static struct net_seen seen;

	(void)state;
	board_net_teardown(NULL);
	for (uint64_t n = 1; n < 200; n++) {
		static struct net_said said;
		bool reached;

		board_net_setup(NULL);
		mem_fail_at(n);
		if (say(1, &said, place_of("w", 0), "{}", "{}") < 0) {
			assert_int_equal(err_last()->code, ERR_NOMEM);
			assert_null(said.publication.impl);
			assert_int_equal(say(1, &said, place_of("w", 0), "{}", "{}"), 0);
		}
		seen_init(&seen);
		if (f.n[2].directory->ops->watch(f.n[2].directory, &seen.watch, "prefill",
						 true) < 0)
			look(2, &seen, true);
		run_for(5 * S);
		reached = mem_count() >= n;
		mem_fail_at(0);
		/* a refusal for want of memory ends it, as any does */
		if (said.err.code != ERR_OK) {
			assert_int_equal(said.err.code, ERR_NOMEM);
			assert_int_equal(say(1, &said, place_of("w", 0), "{}", "{}"), 0);
		}
		run_for(10 * S);
		assert_int_equal(said.done, 1);
		assert_int_equal(said.err.code, ERR_OK);
		assert_int_equal(seen.count, 1);
		assert_string_equal(load_at(&seen, place_of("w", 0)), "{}");
		board_net_teardown(NULL);
		if (!reached)
			break;
	}
	board_net_setup(NULL);
}

#define TEST(name) \
	cmocka_unit_test_setup_teardown(name, board_net_setup, board_net_teardown)
#define BARE(name) \
	cmocka_unit_test_setup_teardown(name, board_net_setup_bare, board_net_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(entries_are_seen_by_all_who_watch),
		TEST(loads_are_told_to_those_who_want_them),
		TEST(place_of_another_daemon_is_refused),
		TEST(bad_entries_are_refused_here),
		TEST(watch_may_end_in_its_own_call),
		TEST(entries_of_a_dead_daemon_stay_for_its_lease),
		TEST(successor_has_the_places_at_once),
		TEST(line_that_breaks_for_a_moment_takes_nothing_away),
		TEST(restarted_board_has_all_again_and_nothing_flickers),
		TEST(reconnected_watch_costs_what_changed),
		BARE(second_board_takes_over),
		TEST(publication_waits_for_its_board),
		BARE(older_daemon_is_named),
		TEST(large_group_is_told_in_parts),
		cmocka_unit_test(order_of_change_is_found_from_either_side),
		TEST(what_goes_while_a_group_is_told_is_not_kept),
		TEST(what_goes_and_is_forgotten_meanwhile_is_not_kept),
		TEST(telling_that_broke_off_leaves_nothing_out),
		TEST(allocation_failures_cost_nothing_for_good),
	};

	log_set_level(LOG_LEVEL_ERROR);
	return cmocka_run_group_tests_name("board", tests, NULL, NULL);
}
