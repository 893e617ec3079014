/* SPDX-License-Identifier: Apache-2.0 */
/* room_pair: a cluster of two nodes, a prefill and a decode engine, and their caches. */
#ifndef KVD_TESTS_ROOM_PAIR_H
#define KVD_TESTS_ROOM_PAIR_H

#include "tests/lib/cluster.h"

struct room_pair {
	struct cluster c;
	struct session *prefill, *decode; /* node 0 prefills */
	struct cache src, dst;
};

/* On the heap; both caches have this geometry. decode_node 0: one daemon for both. */
struct room_pair *room_pair_new(const struct cache *geometry, unsigned int decode_node);
int room_pair_teardown(void **state);
void room_pair_open_send(struct room_pair *p, uint64_t room);
void room_pair_open_recv(struct room_pair *p, uint64_t room);

#endif
