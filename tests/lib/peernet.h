/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peernet: a few daemons' peers on one hub, in virtual time, for the tests of
 * peer. Node i listens at tcp://10.0.0.i:7400 as user "user<i>"; nodes 0 and 1
 * share a host. Messages are LEASEs with a number in the field `room`.
 */
#ifndef KVD_TESTS_PEERNET_H
#define KVD_TESTS_PEERNET_H

#include "tests/sim/link_mem.h"
#include "daemon/loop/loop.h"
#include "daemon/peer/peer.h"

#define PEERNET_NODES 4
#define PEERNET_DELAY_NS 50000u

struct peernet_tapped {
	uint8_t *data;
	size_t len;
	char user[LINK_USER_MAX];
};

struct peernet_node {
	char endpoint[LINK_ENDPOINT_MAX];
	struct link *link;
	struct peers *peers;
	unsigned int ups, downs, refusals, messages;
	struct peer *last; /* of the last on_up, on_down or on_refused */
	struct err why;
	uint64_t down_ns;
	uint64_t numbers[8192];		/* stamps of LEASE.room, in order */
	int answer;			/* of on_message; negative: refuse */
	struct account *account;	/* of all its peers */
	uint64_t epochs[PEERNET_NODES]; /* chaos: of the other nodes */
	void (*hook)(struct peernet_node *node, struct peer *peer, const char *event);
	/* of messages that are no LEASE; else there are none */
	void (*on_other)(struct peernet_node *node, struct peer *peer,
			 const struct wire_header *h, struct cursor *body);
	bool unused; /* no work waits for its peers */
	/* tap */
	struct peernet_tapped *tap;
	unsigned int tap_count;
	void (*on_frame)(void *owner, const struct link_frame *frame);
	void *owner;
};

struct peernet {
	struct loop *loop;
	struct mem_hub *hub;
	struct peers_options options;
	struct peernet_node n[PEERNET_NODES];
	char log[400]; /* events in order, "0up 1up …" */
};

extern struct peernet net;

/* A fresh hub with the first `nodes` running. setup: seed 1, two of them. */
void peernet_open(uint64_t seed, unsigned int nodes);
int peernet_setup(void **state);
int peernet_teardown(void **state);
void peernet_start(unsigned int i);
void peernet_stop(unsigned int i);
void peernet_crash(unsigned int i, enum mem_crash how);
void peernet_run(uint64_t ns); /* virtual time */
const char *peernet_endpoint(unsigned int i);
struct peer *peernet_dial(unsigned int from, unsigned int to);
struct peer *peernet_join(void);	      /* 0 dials 1, both come up; 0's peer */
struct peer *peernet_only(unsigned int node); /* its only peer */
int peernet_lease(struct peer *peer, uint64_t number, bool reliable);

/* From now on what comes in is recorded too; and hand a frame to a node as if it
 * had come. */
void peernet_tap(struct peernet_node *node);
void peernet_inject(struct peernet_node *node, const uint8_t *data, size_t len,
		    const char *user);

#endif
