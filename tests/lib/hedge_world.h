/* SPDX-License-Identifier: Apache-2.0 */
/* hedge_world: nodes 0 and 1 hold the same chunks, node 0 one more, so it is asked first.
 * Node 2 fetches. A byte is its place's. */
#ifndef KVD_TESTS_HEDGE_WORLD_H
#define KVD_TESTS_HEDGE_WORLD_H

#include "daemon/store/store_figures.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/cluster_store.h"

#define REQUESTER 2u
#define NODES 3u
#define TOKENS 16u
#define CHUNKS 3u /* that both have */
#define PAGES 4u  /* of a chunk */
#define MEMORY_BYTES (UINT64_C(4) << 20)
#define MS LOOP_NS_PER_MS
#define LATE (1000 * MS) /* of a holder that is not known */
#define MARK 0x5a

struct hedge_world {
	struct cluster c;
	struct session *engine[NODES];
	struct cache cache[NODES];
	struct cache other; /* a second one of the requester's engine */
	struct cache
		half[4]; /* lower and upper heads, of the first and of the requester */
	uint64_t space[NODES];
	uint64_t hold, move;
};

struct store *hedge_store(struct hedge_world *w);
struct store_remote_figures hedge_remote_figures(struct hedge_world *w);
struct transport *hedge_bytes(struct hedge_world *w, unsigned int node);
/* Its bytes are their places'. */
void hedge_fill(struct cache *cache);
/* Of pages [0, pages) all bytes are right, of the others none was touched. */
bool hedge_holds(const struct cache *cache, unsigned int pages);
/* Numbers and ids for a command, until the next call. */
const char *hedge_pages(unsigned int count);
const char *hedge_ids(unsigned int seed, unsigned int count);
void hedge_put(struct hedge_world *w, unsigned int node, unsigned int seed,
	       unsigned int count);
uint64_t hedge_hold(struct hedge_world *w, unsigned int seed, unsigned int count,
		    unsigned int remote_ms);
/* Of the hold's first chunks, to a cache of the requester's; `more`: fields of the
 * command.
 */
uint64_t hedge_fetch_to(struct hedge_world *w, const struct cache *cache,
			unsigned int chunks, const char *more);
/* All that both have. */
uint64_t hedge_fetch(struct hedge_world *w);
/* What the requester reads of the node next lands after 3 s. */
void hedge_reads_late(struct hedge_world *w, unsigned int node);
unsigned int hedge_state(struct hedge_world *w, uint64_t move);
/* The move of the world. */
bool hedge_is_over(void *arg);
void hedge_succeeds(struct hedge_world *w);
/* All that the hedges took of the memory is given back, or is content. */
void hedge_nothing_is_left(struct hedge_world *w);

int hedge_setup(void **state);
int hedge_teardown(void **state);

#endif
