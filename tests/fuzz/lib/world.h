/* SPDX-License-Identifier: Apache-2.0 */
/*
 * world: two daemons of the in-process cluster for the fuzzer, in virtual time. Node 0 is
 * the one that must hold; an engine on it, and node 1 with its engine, say what the input
 * says. Both engines have a cache; a room and an attachment of theirs are under way.
 */
#ifndef KVD_TESTS_FUZZ_LIB_WORLD_H
#define KVD_TESTS_FUZZ_LIB_WORLD_H

#include "tests/lib/cluster.h"

#define WORLD_ROOM 5u

struct world {
	struct cluster c;
	struct session *engines[2];
	struct cache caches[2];
};

void world_begin(struct world *w);
/* Node 1 dies; node 0 must come to an end with everything, and leave nothing. */
void world_end(struct world *w);
/* A line of a node's engine, with a descriptor (taken; -1: none). Its answer is not
 * waited for. */
void world_say(struct world *w, unsigned int node, const char *line, size_t len, int fd);
/* The peer that node 1 is to node 0, or the other way; NULL: not up. */
struct peer *world_peer(struct world *w, unsigned int of_node);

#endif
