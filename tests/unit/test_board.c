/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Boards, and directories on them, over peers over link_mem in virtual time. Node 0 keeps
 * the board, and in some cases node 1 another; the others publish and watch.
 */
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
#include "daemon/cluster/board_directory.h"
#include "daemon/cluster/board_impl.h"
#include "daemon/cluster/record.h"
#include "daemon/peer/peer_impl.h"
#include "tests/lib/peer_at.h"
#include "tests/sim/link_mem.h"

#define MS LOOP_NS_PER_MS
#define S LOOP_NS_PER_S
#define NODES 4
#define LEASE_NS (3 * S)
#define SEEN_MAX 512

struct node {
	struct link *link;
	struct peers *peers;
	struct board *board;
	struct directory *directory;
	unsigned int downs, told_bytes, tolds;
	struct err why;
};

static struct fixture {
	struct loop *loop;
	struct mem_hub *hub;
	struct board_options options;
	struct peers_options peers_options;
	struct node n[NODES];
} f;

/* ---- nodes ---- */

static void on_up(void *owner, struct peer *peer)
{
	struct node *node = owner;

	if (node->directory)
		board_directory_peer_up(node->directory, peer);
}

static void on_down(void *owner, struct peer *peer)
{
	struct node *node = owner;

	node->downs++;
	node->why = peer->why;
	board_peer_down(node->board, peer);
	if (node->directory)
		board_directory_peer_down(node->directory, peer);
}

static void on_refused(void *owner, struct peer *peer)
{
	struct node *node = owner;

	if (node->directory)
		board_directory_peer_refused(node->directory, peer);
}

static int on_message(void *owner, struct peer *peer, const struct wire_header *h,
		      struct cursor *body)
{
	struct node *node = owner;

	if (board_handles(h->type))
		return board_on_message(node->board, peer, h->type, body);
	assert_true(board_directory_handles(h->type));
	if (h->type == WIRE_T_BOARD_TOLD) {
		node->tolds++;
		node->told_bytes += h->body_len;
	}
	return node->directory
		       ? board_directory_on_message(node->directory, peer, h->type, body)
		       : 0;
}

static const char *endpoint(unsigned int i)
{
	static char text[NODES][32];

	snprintf(text[i], sizeof(text[i]), "tcp://10.0.0.%u:7400", i);
	return text[i];
}

static void node_start(unsigned int i)
{
	struct node *node = &f.n[i];
	struct peers_callbacks callbacks = {.owner = node,
					    .on_up = on_up,
					    .on_down = on_down,
					    .on_refused = on_refused,
					    .on_message = on_message};
	struct peers_args args = {.loop = f.loop,
				  .callbacks = &callbacks,
				  .options = &f.peers_options,
				  .name = "node"};

	memset(node, 0, sizeof(*node));
	assert_int_equal(link_mem_new(f.hub, endpoint(i), "", &node->link), 0);
	args.link = node->link;
	assert_int_equal(peers_new(&args, &node->peers), 0);
	assert_int_equal(board_new(f.loop, &f.options, &node->board), 0);
}

static int directory_open(unsigned int i, const char *one, const char *two)
{
	struct board_directory_args args = {.loop = f.loop,
					    .peers = f.n[i].peers,
					    .board = f.n[i].board,
					    .own = endpoint(i),
					    .endpoints = {one, two},
					    .count = two ? 2 : 1,
					    .lease_ns = LEASE_NS};

	return board_directory_new(&args, &f.n[i].directory);
}

static void directory_close(unsigned int i)
{
	if (f.n[i].directory)
		f.n[i].directory->ops->free(f.n[i].directory);
	f.n[i].directory = NULL;
}

static void node_stop(unsigned int i)
{
	struct node *node = &f.n[i];

	if (!node->link)
		return;
	directory_close(i);
	board_free(node->board);
	node->board = NULL;
	peers_free(node->peers);
	node->link->ops->free(node->link);
	node->link = NULL;
}

static void run_for(uint64_t ns)
{
	uint64_t end_ns = loop_now_ns(f.loop) + ns;

	while (loop_now_ns(f.loop) < end_ns)
		loop_turn(f.loop, end_ns - loop_now_ns(f.loop));
	for (int i = 0; i < 100 && loop_turn(f.loop, 0); i++)
		;
}

static int setup_with(unsigned int directories)
{
	memset(&f, 0, sizeof(f));
	board_options_default(&f.options);
	f.options.young_ns = LEASE_NS;
	peers_options_default(&f.peers_options);
	assert_int_equal(loop_new_virtual(1, &f.loop), 0);
	assert_int_equal(mem_hub_new(f.loop, &f.hub), 0);
	mem_hub_set_default(f.hub, &(struct mem_path){.delay_ns = 50000});
	for (unsigned int i = 0; i < NODES; i++)
		node_start(i);
	for (unsigned int i = 0; i < directories; i++)
		assert_int_equal(directory_open(i, i ? endpoint(0) : "", NULL), 0);
	run_for(directories ? 2 * LEASE_NS : 1); /* the board is not young any more */
	return 0;
}

static int setup(void **state)
{
	(void)state;
	return setup_with(NODES);
}

static int setup_bare(void **state)
{
	(void)state;
	return setup_with(0);
}

static int teardown(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < NODES; i++)
		node_stop(i);
	mem_hub_free(f.hub);
	loop_free(f.loop);
	return 0;
}

/* ---- who says, who sees ---- */

struct said {
	struct publication publication;
	unsigned int done;
	struct err err;
};

struct seen {
	struct watch watch;
	unsigned int synced, events, count;
	bool ends; /* in the first call */
	struct {
		struct place place;
		char record[64], load[64];
	} at[SEEN_MAX];
};

static void on_done(struct publication *publication, const struct err *err)
{
	struct said *said = container_of(publication, struct said, publication);

	said->done++;
	said->err = err ? *err : (struct err){.code = ERR_OK};
}

static struct place place_of(const char *worker, uint32_t tp)
{
	struct place place = {.group = "prefill", .rank = {tp}};

	snprintf(place.worker, sizeof(place.worker), "%s", worker);
	return place;
}

static int say(unsigned int node, struct said *said, struct place place,
	       const char *record, const char *load)
{
	struct directory *directory = f.n[node].directory;

	memset(said, 0, sizeof(*said));
	said->publication.on_done = on_done;
	return directory->ops->publish(directory, &said->publication, &place, record,
				       load);
}

static void must_say(unsigned int node, struct said *said, struct place place,
		     const char *record)
{
	assert_int_equal(say(node, said, place, record, NULL), 0);
	assert_int_equal(said->done, 0);
	run_for(100 * MS);
	assert_int_equal(said->done, 1);
	assert_int_equal(said->err.code, ERR_OK);
}

static int seen_find(const struct seen *seen, const struct place *place)
{
	for (unsigned int i = 0; i < seen->count; i++) {
		if (place_equal(&seen->at[i].place, place))
			return (int)i;
	}
	return -1;
}

static void on_entry(struct watch *watch, const struct place *place, const char *record,
		     const char *load)
{
	struct seen *seen = container_of(watch, struct seen, watch);
	int i = seen_find(seen, place);

	seen->events++;
	if (!record) {
		assert_true(i >= 0);
		seen->at[i] = seen->at[--seen->count];
	} else {
		if (i < 0)
			i = (int)seen->count++;
		assert_in_range(i, 0, SEEN_MAX - 1);
		seen->at[i].place = *place;
		snprintf(seen->at[i].record, sizeof(seen->at[i].record), "%s", record);
		snprintf(seen->at[i].load, sizeof(seen->at[i].load), "%s",
			 load ? load : "-");
	}
	if (seen->ends)
		f.n[3].directory->ops->unwatch(watch);
}

static void on_synced(struct watch *watch)
{
	container_of(watch, struct seen, watch)->synced++;
}

static void look(unsigned int node, struct seen *seen, bool loads)
{
	struct directory *directory = f.n[node].directory;

	memset(seen, 0, sizeof(*seen));
	seen->watch.on_entry = on_entry;
	seen->watch.on_synced = on_synced;
	assert_int_equal(directory->ops->watch(directory, &seen->watch, "prefill", loads),
			 0);
}

static const char *record_at(const struct seen *seen, struct place place)
{
	int i = seen_find(seen, &place);

	return i < 0 ? "none" : seen->at[i].record;
}

static const char *load_at(const struct seen *seen, struct place place)
{
	int i = seen_find(seen, &place);

	return i < 0 ? "none" : seen->at[i].load;
}

/* ---- entries ---- */

static void entries_are_seen_by_all_who_watch(void **state)
{
	static struct seen here, there, late;
	struct said one, two;

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
	for (struct seen *seen = &here;; seen = seen == &here ? &there : &late) {
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
	static struct seen loads, records;
	struct said said;
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
	struct said mine, theirs;

	(void)state;
	must_say(1, &mine, place_of("w", 0), "{}");
	assert_int_equal(say(2, &theirs, place_of("w", 0), "{}", NULL), 0);
	run_for(100 * MS);
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
	char *text = calloc(1, DIRECTORY_RECORD_MAX + 1);
	struct said said;

	(void)state;
	assert_true(say(1, &said, place, "{}", NULL) < 0);
	assert_int_equal(err_last()->code, ERR_INVAL);
	place = place_of("a\nb", 0);
	assert_true(say(1, &said, place, "{}", NULL) < 0);
	place = place_of("w", PLACE_SIZE_MAX);
	assert_true(say(1, &said, place, "{}", NULL) < 0);
	assert_non_null(strstr(err_last()->text, "tp_rank"));
	memset(text, 'x', DIRECTORY_RECORD_MAX);
	assert_true(say(1, &said, place_of("w", 0), text, NULL) < 0);
	assert_int_equal(err_last()->code, ERR_TOOBIG);
	text[DIRECTORY_LOAD_MAX] = '\0';
	assert_true(say(1, &said, place_of("w", 0), "{}", text) < 0);
	text[DIRECTORY_LOAD_MAX - 1] = '\0';
	assert_int_equal(say(1, &said, place_of("w", 0), "{}", text), 0);
	free(text);
}

static void watch_may_end_in_its_own_call(void **state)
{
	static struct seen seen;
	struct said one, two;

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
	static struct seen seen;
	struct said said;

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
	static struct seen seen;
	struct said said, next;

	(void)state;
	look(2, &seen, false);
	must_say(1, &said, place_of("w", 0), "{\"of\":1}");
	link_mem_crash(f.n[1].link, MEM_CRASH_POWER);
	run_for(2 * S);
	/* a stranger has not */
	assert_int_equal(say(3, &next, place_of("w", 0), "{}", NULL), 0);
	run_for(100 * MS);
	assert_int_equal(next.err.code, ERR_EXIST);
	assert_non_null(strstr(next.err.text, "which is away"));
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
	static struct seen seen;
	struct said stays, goes;
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
	static struct seen seen;
	struct said one, two;
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
	static struct seen seen;
	static struct said said[200];
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
	static struct seen seen;
	struct said said;
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
	struct said said;

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

/* ---- what others say ---- */

static struct peer *join(void)
{
	struct peer *peer = NULL;

	assert_int_equal(peers_dial(f.n[1].peers, endpoint(0), &peer), 0);
	run_for(S);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	return peer;
}

#define RAW(name, NAME, ...)                                                            \
	do {                                                                            \
		struct wire_##name m_ = __VA_ARGS__;                                    \
		uint8_t body_[9000];                                                    \
		struct cursor c_;                                                       \
		cursor_write(&c_, body_, sizeof(body_));                                \
		assert_int_equal(wire_##name##_put(&c_, &m_), 0);                       \
		assert_int_equal(peer_send_reliable(peer_at(f.n[1].peers, endpoint(0)), \
						    WIRE_T_##NAME, body_, c_.pos),      \
				 0);                                                    \
		run_for(20 * MS);                                                       \
	} while (0)

static struct wire_blob blob_of(const char *text)
{
	return (struct wire_blob){text, strlen(text)};
}

static void hostile_puts_are_refused(void **state)
{
	static char large[DIRECTORY_RECORD_MAX + 1];
	char instance[33];

	(void)state;
	join();
	memset(large, 'x', sizeof(large) - 1);
	RAW(board_put, BOARD_PUT, {.group = "", .record = blob_of("{}")});
	RAW(board_put, BOARD_PUT,
	    {.group = "g", .tp = 1u << 31, .record = blob_of("{}")});
	RAW(board_put, BOARD_PUT, {.group = "g", .worker = "-", .record = blob_of("{}")});
	RAW(board_put, BOARD_PUT, {.group = "g", .record = blob_of(large)});
	RAW(board_put, BOARD_PUT, {.group = "g", .record = {"a\0b", 3}});
	RAW(board_put, BOARD_PUT, {.group = "g", .load = blob_of("{}")});
	/* as another daemon, and with a name that is no instance */
	RAW(board_put, BOARD_PUT,
	    {.group = "kvd.daemons",
	     .worker = "00112233445566778899aabbccddeeff",
	     .record = blob_of("{}")});
	RAW(board_put, BOARD_PUT, {.group = "kvd.homes", .record = blob_of("{}")});
	assert_int_equal(board_count(f.n[0].board), 0);
	assert_int_equal(f.n[0].downs, 0);
	/* of itself it may say what it likes, for as long as the board allows */
	snprintf(instance, sizeof(instance), "%s",
		 peer_at(f.n[0].peers, endpoint(1))->instance_text);
	struct wire_board_put own = {
		.group = "kvd.daemons", .lease_ms = UINT64_MAX, .record = blob_of("{}")};

	strcpy(own.worker, instance);
	RAW(board_put, BOARD_PUT, own);
	assert_int_equal(board_count(f.n[0].board), 1);
	node_stop(1);
	run_for(f.options.lease_max_ns + 2 * S);
	assert_int_equal(board_count(f.n[0].board), 0);
	node_start(1);
}

static void body_cut_short_ends_the_peer(void **state)
{
	const struct wire_board_put m = {.group = "g", .record = {"{}", 2}};
	uint8_t body[256];
	struct cursor c;

	(void)state;
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_board_put_put(&c, &m), 0);
	for (size_t len = 0; len < c.pos; len += 7) {
		unsigned int downs = f.n[0].downs;

		join();
		assert_int_equal(peer_send_reliable(peer_at(f.n[1].peers, endpoint(0)),
						    WIRE_T_BOARD_PUT, body, len),
				 0);
		run_for(20 * MS);
		assert_int_equal(f.n[0].downs, downs + 1);
		assert_int_equal(f.n[0].why.code, ERR_PROTO);
		run_for(10 * S);
	}
}

static void floods_of_one_peer_are_bounded(void **state)
{
	char text[32];

	(void)state;
	node_stop(0);
	f.options.owner_entries_max = 20;
	f.options.owner_watches_max = 10;
	f.options.group_entries_max = 15;
	node_start(0);
	join();
	for (unsigned int i = 0; i < 100; i++)
		RAW(board_put, BOARD_PUT,
		    {.group = "g", .tp = i, .record = blob_of("{}")});
	assert_int_equal(board_count(f.n[0].board), 15);
	for (unsigned int i = 0; i < 100; i++)
		RAW(board_put, BOARD_PUT,
		    {.group = "h", .tp = i, .record = blob_of("{}")});
	assert_int_equal(board_count(f.n[0].board), 20);
	for (unsigned int i = 0; i < 100; i++) {
		struct wire_board_watch m = {.cookie = i};

		snprintf(text, sizeof(text), "w%u", i);
		strcpy(m.group, text);
		RAW(board_watch, BOARD_WATCH, m);
	}
	assert_int_equal(board_watches(f.n[0].board), 10);
	/* the same one again and again is one, and so is each answer */
	unsigned int tolds = f.n[1].tolds;

	for (unsigned int i = 0; i < 50; i++)
		RAW(board_watch, BOARD_WATCH, {.cookie = 3, .group = "w3"});
	assert_int_equal(board_watches(f.n[0].board), 10);
	assert_in_range(f.n[1].tolds - tolds, 1, 50);
	assert_int_equal(f.n[0].downs, 0);
	/* all of it goes with the peer and its lease, which it never named */
	node_stop(1);
	run_for(5 * S);
	assert_int_equal(board_watches(f.n[0].board) + board_count(f.n[0].board), 0);
	assert_int_equal(strmap_count(&f.n[0].board->groups), 0);
	assert_true(list_empty(&f.n[0].board->owners));
	node_start(1);
}

/* ---- what a board says ---- */

static uint64_t last_cookie;

static int steal_cookie(void *owner, struct peer *peer, const struct wire_header *h,
			struct cursor *body)
{
	struct wire_board_watch m;

	(void)owner;
	(void)peer;
	if (h->type == WIRE_T_BOARD_WATCH && wire_board_watch_get(body, &m) == 0)
		last_cookie = m.cookie;
	return 0;
}

static void entry_bytes(struct cursor *c, unsigned int what, const char *worker,
			uint32_t tp, const char *record, size_t more)
{
	cursor_put_u16(
		c, (uint16_t)(1 + 2 + strlen(worker) + 16 + 8 + strlen(record) + more));
	cursor_put_u8(c, (uint8_t)what);
	cursor_put_str(c, worker);
	cursor_put_u32(c, tp);
	for (unsigned int i = 1; i < PLACE_AXES; i++)
		cursor_put_u32(c, 0);
	cursor_put_blob(c, record, strlen(record));
	cursor_put_blob(c, "", 0);
	for (size_t i = 0; i < more; i++)
		cursor_put_u8(c, 9);
}

/* Node 0 is a board of our own making. */
static void told(unsigned int flags, const struct cursor *entries, uint32_t count)
{
	struct wire_board_told m = {.cookie = last_cookie,
				    .flags = (uint8_t)flags,
				    .revision = 5,
				    .young_ms = UINT64_MAX};
	uint8_t blob[8192], body[9000];
	struct cursor c;

	cursor_write(&c, blob, sizeof(blob));
	cursor_put_u32(&c, count);
	cursor_put_bytes(&c, entries->base, entries->pos);
	m.entries = (struct wire_blob){blob, c.pos};
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_board_told_put(&c, &m), 0);
	assert_int_equal(peer_send_reliable(peer_at(f.n[0].peers, endpoint(1)),
					    WIRE_T_BOARD_TOLD, body, c.pos),
			 0);
	run_for(20 * MS);
}

static void hostile_board_is_checked(void **state)
{
	static struct seen seen;
	struct directory_state now;
	uint8_t bytes[8192];
	struct cursor c;

	(void)state;
	f.n[0].peers->callbacks.on_message = steal_cookie;
	assert_int_equal(directory_open(1, endpoint(0), NULL), 0);
	look(1, &seen, true);
	run_for(S);
	cursor_write(&c, bytes, sizeof(bytes));
	entry_bytes(&c, 1, "good", 0, "{}", 11); /* a newer board's: longer */
	entry_bytes(&c, 1, "-", 0, "{}", 0);
	entry_bytes(&c, 1, "a\tb", 0, "{}", 0);
	entry_bytes(&c, 1, "far", PLACE_SIZE_MAX, "{}", 0);
	entry_bytes(&c, 1, "empty", 0, "", 0);
	entry_bytes(&c, 2, "load of what is not there", 0, "", 0);
	entry_bytes(&c, 0, "gone, and never was", 0, "", 0);
	told(3, &c, 7);
	assert_int_equal(seen.count, 1);
	assert_int_equal(seen.synced, 1);
	f.n[1].directory->ops->state(f.n[1].directory, &now);
	assert_int_equal(now.refused, 5);
	/* nothing of it any more: held for as long as a young board may ask for at most
	 */
	cursor_write(&c, bytes, sizeof(bytes));
	told(3, &c, 0);
	assert_int_equal(seen.count, 1);
	run_for(610 * S);
	assert_int_equal(seen.count, 0);
	assert_int_equal(f.n[1].downs, 0);
	/* more entries than there are bytes */
	told(3, &c, UINT32_MAX);
	assert_int_equal(f.n[1].downs, 1);
	assert_int_equal(f.n[1].why.code, ERR_PROTO);
}

static void answers_that_nobody_asked_for_are_ignored(void **state)
{
	(void)state;
	join();
	directory_open(1, endpoint(0), NULL);
	run_for(S);
	struct wire_board_ack ack = {.cookie = 77, .code = ERR_EXIST};
	struct wire_board_told m = {.cookie = 78, .flags = 3};
	uint8_t body[600];
	struct cursor c;

	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_board_ack_put(&c, &ack), 0);
	assert_int_equal(peer_send_reliable(peer_at(f.n[0].peers, endpoint(1)),
					    WIRE_T_BOARD_ACK, body, c.pos),
			 0);
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_board_told_put(&c, &m), 0);
	assert_int_equal(peer_send_reliable(peer_at(f.n[0].peers, endpoint(1)),
					    WIRE_T_BOARD_TOLD, body, c.pos),
			 0);
	run_for(S);
	assert_int_equal(f.n[1].downs, 0);
}

/* ---- daemons of before ---- */

static struct wire_blob old_rank(uint8_t *buf, size_t size, uint32_t tp, uint32_t tp_size,
				 const char *at)
{
	struct cursor c;

	cursor_write(&c, buf, size);
	cursor_put_u16(&c, (uint16_t)(32 + 6 + strlen(at) + 2 + 3 + 4));
	for (unsigned int i = 0; i < PLACE_AXES; i++) {
		cursor_put_u32(&c, i ? 0 : tp);
		cursor_put_u32(&c, i ? 1 : tp_size);
	}
	cursor_put_str(&c, at);
	cursor_put_str(&c, "kv");
	cursor_put_str(&c, "sum");
	cursor_put_u32(&c, 7); /* a later release's */
	assert_false(c.bad);
	return (struct wire_blob){buf, c.pos};
}

static struct wire_route route;
static uint8_t route_ranks[4096];

static int keep_route(void *owner, struct peer *peer, const struct wire_header *h,
		      struct cursor *body)
{
	(void)owner;
	(void)peer;
	if (h->type == WIRE_T_ROUTE) {
		assert_int_equal(wire_route_get(body, &route), 0);
		assert_in_range(route.ranks.len, 0, sizeof(route_ranks));
		if (route.ranks.len)
			memcpy(route_ranks, route.ranks.data, route.ranks.len);
	}
	return 0;
}

static void daemon_of_before_publishes_and_asks(void **state)
{
	static struct seen seen;
	struct record record;
	uint8_t buf[512];
	struct said said;
	struct cursor c;

	(void)state;
	directory_close(1);
	f.n[1].peers->callbacks.on_message = keep_route;
	join();
	look(2, &seen, false);
	RAW(route_publish, ROUTE_PUBLISH,
	    {.cookie = 5,
	     .ttl_ms = 5000,
	     .group = "prefill",
	     .rank = old_rank(buf, sizeof(buf), 1, 2, endpoint(1))});
	assert_int_equal(seen.count, 1);
	const struct roster_entry *entry =
		roster_find(&board_group_find(f.n[0].board, "prefill")->roster,
			    &(struct place){.group = "prefill", .rank = {1}});

	assert_non_null(entry);
	assert_int_equal(record_read(entry->record, &record), 0);
	assert_string_equal(record.endpoint, endpoint(1));
	assert_string_equal(record.pools[0].name, "kv");
	assert_string_equal(record.summary, "sum");
	assert_int_equal(record.size[PLACE_TP], 2);
	/* what newer ones say, it reads */
	record_init(&record);
	strcpy(record.instance, "00112233445566778899aabbccddeeff");
	strcpy(record.endpoint, endpoint(3));
	char text[DIRECTORY_RECORD_MAX];

	assert_int_equal(record_make(&record, text), 0);
	must_say(3, &said, (struct place){.group = "prefill"}, text);
	RAW(route_query, ROUTE_QUERY, {.cookie = 9, .group = "prefill"});
	assert_int_equal(route.cookie, 9);
	assert_int_equal(route.code, 0);
	cursor_read(&c, route_ranks, route.ranks.len);
	assert_int_equal(cursor_get_u32(&c), 2);
	RAW(route_query, ROUTE_QUERY, {.cookie = 10, .group = "nobody"});
	assert_int_equal(route.code, ERR_NOTFOUND);
	/* mistakes of its engine, and its own */
	RAW(route_publish, ROUTE_PUBLISH,
	    {.cookie = 6,
	     .group = "prefill",
	     .rank = old_rank(buf, sizeof(buf), 2, 2, endpoint(1))});
	RAW(route_publish, ROUTE_PUBLISH,
	    {.cookie = 6,
	     .group = "prefill",
	     .rank = old_rank(buf, sizeof(buf), 0, 2, "file:///etc/x")});
	assert_int_equal(board_count(f.n[0].board), 2);
	RAW(route_withdraw, ROUTE_WITHDRAW,
	    {.group = "prefill", .rank = old_rank(buf, sizeof(buf), 1, 2, endpoint(1))});
	assert_int_equal(board_count(f.n[0].board), 1);
	assert_int_equal(f.n[0].downs, 0);
	RAW(route_publish, ROUTE_PUBLISH, {.group = "prefill", .rank = {buf, 9}});
	assert_int_equal(f.n[0].downs, 1);
	f.n[1].directory = NULL;
}

/* ---- many, and little memory ---- */

static void large_group_is_told_in_parts(void **state)
{
	static struct seen seen;
	static struct said said[500];
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

static void allocation_failures_cost_nothing_for_good(void **state)
{
	static struct seen seen;

	(void)state;
	teardown(NULL);
	for (uint64_t n = 1; n < 200; n++) {
		struct said said;
		bool reached;

		setup(NULL);
		mem_fail_at(n);
		if (say(1, &said, place_of("w", 0), "{}", "{}") < 0) {
			assert_int_equal(err_last()->code, ERR_NOMEM);
			assert_null(said.publication.impl);
			assert_int_equal(say(1, &said, place_of("w", 0), "{}", "{}"), 0);
		}
		memset(&seen, 0, sizeof(seen));
		seen.watch.on_entry = on_entry;
		seen.watch.on_synced = on_synced;
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
		teardown(NULL);
		if (!reached)
			break;
	}
	setup(NULL);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
#define BARE(name) cmocka_unit_test_setup_teardown(name, setup_bare, teardown)

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
		BARE(hostile_puts_are_refused),
		BARE(body_cut_short_ends_the_peer),
		BARE(floods_of_one_peer_are_bounded),
		BARE(hostile_board_is_checked),
		BARE(answers_that_nobody_asked_for_are_ignored),
		TEST(daemon_of_before_publishes_and_asks),
		TEST(large_group_is_told_in_parts),
		TEST(allocation_failures_cost_nothing_for_good),
	};

	log_set_level(LOG_LEVEL_ERROR);
	return cmocka_run_group_tests_name("board", tests, NULL, NULL);
}
