/* SPDX-License-Identifier: Apache-2.0 */
/* arena_world: an arena with owners and things that lie in it, for its tests. */
#ifndef KVD_TESTS_ARENA_WORLD_H
#define KVD_TESTS_ARENA_WORLD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/store/arena.h"
#include "tests/lib/plan_random.h"

#define GRAIN UINT64_C(4096)
#define SLAB_GRAINS 8u
#define SLAB (SLAB_GRAINS * GRAIN)
#define MEMORY (ARENA_SLABS * SLAB)
#define GRAINS (ARENA_SLABS * SLAB_GRAINS)
#define THING_SLOTS 8u
#define OWNERS_MAX ARENA_SLABS

struct thing {
	struct arena_item item;
	struct arena_slot slots[THING_SLOTS];
	uint64_t sizes[THING_SLOTS];
	uint32_t owner;
	/* bits, when it left: the slabs that it had slots in, their sizes in grains */
	uint64_t left_slabs[2], left_sizes;
};

struct world {
	struct arena *arena;
	struct arena_owner *owners[OWNERS_MAX];
	uint32_t owner_count;
	struct thing *things;
	size_t count;
	uint64_t slab_bytes;
	struct thing *left[65536]; /* since left_count was 0 */
	size_t left_count;
	int64_t live;
	void (*on_give)(struct world *w, struct thing *t, uint32_t slot);
	void *model;
};

bool world_here(const struct thing *t);
void world_give(struct world *w, struct thing *t, uint32_t i);
void world_give_all(struct world *w, struct thing *t);
void world_of(struct world *w, uint64_t bytes, uint32_t owners, size_t count);
void world_init(struct world *w, uint32_t owners, size_t count);
/* All goes back, and nothing is left over. */
void world_fini(struct world *w);
/* One slot more for a thing that is pinned. */
int world_more(struct world *w, uint32_t owner, struct thing *t, uint64_t bytes);
int world_pinned(struct world *w, uint32_t owner, size_t i, uint64_t bytes);
void world_put(struct world *w, uint32_t owner, size_t i, uint64_t bytes);
void world_put_many(struct world *w, uint32_t owner, size_t first, size_t count,
		    uint64_t bytes);
size_t world_count_here(const struct world *w, size_t first, size_t count);
uint64_t world_slabs_of(const struct world *w, uint32_t owner);
void world_refused(int r, enum err_code code);

void world_on_evict(void *arg, struct arena_item *item);

#endif
