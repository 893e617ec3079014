/* SPDX-License-Identifier: Apache-2.0 */
/*
 * board_net: nodes with a board each, and directories on these, over peers over link_mem
 * in virtual time. Node 0 keeps the board of all. One at a time.
 */
#ifndef KVD_TESTS_BOARD_NET_H
#define KVD_TESTS_BOARD_NET_H

#include "daemon/cluster/board_directory.h"
#include "daemon/cluster/board_impl.h"
#include "daemon/peer/peer_impl.h"
#include "tests/sim/link_mem.h"

#define MS LOOP_NS_PER_MS
#define S LOOP_NS_PER_S
#define NODES 4
#define LEASE_NS (3 * S)
#define NET_SEEN_MAX 512

struct board_node {
	struct link *link;
	struct peers *peers;
	struct board *board;
	struct directory *directory;
	unsigned int downs, told_bytes, tolds;
	struct err why;
};

struct board_net {
	struct loop *loop;
	struct mem_hub *hub;
	struct board_options options;
	struct peers_options peers_options;
	struct board_node n[NODES];
};
extern struct board_net f;

struct net_said {
	struct publication publication;
	unsigned int done;
	struct err err;
};

struct net_seen {
	struct watch watch;
	unsigned int synced, events, count;
	bool ends; /* in the first call */
	struct {
		struct place place;
		char record[64], load[64];
	} at[NET_SEEN_MAX];
};

const char *endpoint(unsigned int i);
void node_start(unsigned int i);
void node_stop(unsigned int i);
/* On the boards at one or two endpoints; "": the own one. */
int directory_open(unsigned int i, const char *one, const char *two);
void directory_close(unsigned int i);
void run_for(uint64_t ns);
int board_net_setup(void **state);	/* a directory at each node, on node 0's board */
int board_net_setup_bare(void **state); /* none */
int board_net_teardown(void **state);

struct place place_of(const char *worker, uint32_t tp);
int say(unsigned int node, struct net_said *said, struct place place, const char *record,
	const char *load);
void must_say(unsigned int node, struct net_said *said, struct place place,
	      const char *record);
void look(unsigned int node, struct net_seen *seen, bool loads);
void seen_init(struct net_seen *seen);
/* "none": it is not there. */
const char *record_at(const struct net_seen *seen, struct place place);
const char *load_at(const struct net_seen *seen, struct place place);

#endif
