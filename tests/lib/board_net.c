/* SPDX-License-Identifier: Apache-2.0 */
/* Callbacks of peers go to the node's board and directory, as groups.c hands them on. */
#include "tests/lib/board_net.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"

struct board_net f;

/* ---- nodes ---- */

static void on_up(void *owner, struct peer *peer)
{
	struct board_node *node = owner;

	if (node->directory)
		board_directory_peer_up(node->directory, peer);
}

static void on_down(void *owner, struct peer *peer)
{
	struct board_node *node = owner;

	node->downs++;
	node->why = peer->why;
	board_peer_down(node->board, peer);
	if (node->directory)
		board_directory_peer_down(node->directory, peer);
}

static void on_refused(void *owner, struct peer *peer)
{
	struct board_node *node = owner;

	if (node->directory)
		board_directory_peer_refused(node->directory, peer);
}

static int on_message(void *owner, struct peer *peer, const struct wire_header *h,
		      struct cursor *body)
{
	struct board_node *node = owner;

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

const char *endpoint(unsigned int i)
{
	static char text[NODES][32];

	snprintf(text[i], sizeof(text[i]), "tcp://10.0.0.%u:7400", i);
	return text[i];
}

void node_start(unsigned int i)
{
	struct board_node *node = &f.n[i];
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

int directory_open(unsigned int i, const char *one, const char *two)
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

void directory_close(unsigned int i)
{
	if (f.n[i].directory)
		f.n[i].directory->ops->free(f.n[i].directory);
	f.n[i].directory = NULL;
}

void node_stop(unsigned int i)
{
	struct board_node *node = &f.n[i];

	if (!node->link)
		return;
	directory_close(i);
	board_free(node->board);
	node->board = NULL;
	peers_free(node->peers);
	node->link->ops->free(node->link);
	node->link = NULL;
}

void run_for(uint64_t ns)
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

int board_net_setup(void **state)
{
	(void)state;
	return setup_with(NODES);
}

int board_net_setup_bare(void **state)
{
	(void)state;
	return setup_with(0);
}

int board_net_teardown(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < NODES; i++)
		node_stop(i);
	mem_hub_free(f.hub);
	loop_free(f.loop);
	return 0;
}

/* ---- who says, who sees ---- */

static void on_done(struct publication *publication, const struct err *err)
{
	struct net_said *said = container_of(publication, struct net_said, publication);

	said->done++;
	said->err = err ? *err : (struct err){.code = ERR_OK};
}

struct place place_of(const char *worker, uint32_t tp)
{
	struct place place = {.group = "prefill", .rank = {tp}};

	snprintf(place.worker, sizeof(place.worker), "%s", worker);
	return place;
}

int say(unsigned int node, struct net_said *said, struct place place, const char *record,
	const char *load)
{
	struct directory *directory = f.n[node].directory;

	memset(said, 0, sizeof(*said));
	said->publication.on_done = on_done;
	return directory->ops->publish(directory, &said->publication, &place, record,
				       load);
}

void must_say(unsigned int node, struct net_said *said, struct place place,
	      const char *record)
{
	assert_int_equal(say(node, said, place, record, NULL), 0);
	assert_int_equal(said->done, 0);
	run_for(100 * MS);
	assert_int_equal(said->done, 1);
	assert_int_equal(said->err.code, ERR_OK);
}

static int seen_find(const struct net_seen *seen, const struct place *place)
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
	struct net_seen *seen = container_of(watch, struct net_seen, watch);
	int i = seen_find(seen, place);

	seen->events++;
	if (!record) {
		assert_true(i >= 0);
		seen->at[i] = seen->at[--seen->count];
	} else {
		if (i < 0)
			i = (int)seen->count++;
		assert_in_range(i, 0, NET_SEEN_MAX - 1);
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
	container_of(watch, struct net_seen, watch)->synced++;
}

void seen_init(struct net_seen *seen)
{
	memset(seen, 0, sizeof(*seen));
	seen->watch.on_entry = on_entry;
	seen->watch.on_synced = on_synced;
}

void look(unsigned int node, struct net_seen *seen, bool loads)
{
	struct directory *directory = f.n[node].directory;

	seen_init(seen);
	assert_int_equal(directory->ops->watch(directory, &seen->watch, "prefill", loads),
			 0);
}

const char *record_at(const struct net_seen *seen, struct place place)
{
	int i = seen_find(seen, &place);

	return i < 0 ? "none" : seen->at[i].record;
}

const char *load_at(const struct net_seen *seen, struct place place)
{
	int i = seen_find(seen, &place);

	return i < 0 ? "none" : seen->at[i].load;
}
