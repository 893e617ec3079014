/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/room_pair.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

struct room_pair *room_pair_new(const struct cache *geometry, unsigned int decode_node)
{
	struct room_pair *p = calloc(1, sizeof(*p));

	assert_non_null(p);
	cluster_new(&p->c, 1, 2);
	p->prefill = cluster_engine(&p->c, 0, "prefill");
	p->decode = cluster_engine(&p->c, decode_node, "decode");
	p->src = p->dst = *geometry;
	cluster_cache(&p->c, p->prefill, "kv", 0, &p->src);
	cluster_cache(&p->c, p->decode, "kv", 0, &p->dst);
	return p;
}

int room_pair_teardown(void **state)
{
	struct room_pair *p = *state;

	cluster_free(&p->c);
	cache_close(&p->src);
	cache_close(&p->dst);
	free(p);
	return 0;
}

void room_pair_open_send(struct room_pair *p, uint64_t room)
{
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.open','room':'%llu','role':'send','pool':%llu}",
		   (unsigned long long)room, (unsigned long long)p->src.pool);
}

void room_pair_open_recv(struct room_pair *p, uint64_t room)
{
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'%llu','role':'recv','pool':%llu,"
		   "'sources':['%s']}",
		   (unsigned long long)room, (unsigned long long)p->dst.pool,
		   p->c.nodes[0].endpoint);
}
