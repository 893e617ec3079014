/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Things are items with slots of their own; one that leaves gives its slots back, as
 * arena.h wants, and is noted with the slabs and sizes that it lay in.
 */
#include "tests/lib/arena_world.h"

bool world_here(const struct thing *t)
{
	for (uint32_t i = 0; i < THING_SLOTS; i++) {
		if (t->slots[i].slab)
			return true;
	}
	return false;
}

void world_give(struct world *w, struct thing *t, uint32_t i)
{
	if (t->slots[i].slab && w->on_give)
		w->on_give(w, t, i);
	arena_give(&t->slots[i]);
	arena_give(&t->slots[i]); /* again: nothing */
	assert_null(t->slots[i].slab);
	t->sizes[i] = 0;
}

void world_give_all(struct world *w, struct thing *t)
{
	for (uint32_t i = 0; i < THING_SLOTS; i++)
		world_give(w, t, i);
}

void world_on_evict(void *arg, struct arena_item *item)
{
	struct world *w = arg;
	struct thing *t = container_of(item, struct thing, item);

	assert_int_equal(item->pins, 0);
	assert_true(world_here(t));
	t->left_slabs[0] = t->left_slabs[1] = t->left_sizes = 0;
	for (uint32_t i = 0; i < THING_SLOTS; i++) {
		uint64_t slab;

		if (!t->slots[i].slab)
			continue;
		slab = arena_offset(&t->slots[i]) / w->slab_bytes;
		t->left_slabs[slab / 64] |= UINT64_C(1) << slab % 64;
		t->left_sizes |= UINT64_C(1) << t->sizes[i] / GRAIN;
	}
	world_give_all(w, t);
	assert_true(w->left_count < ARRAY_LEN(w->left));
	w->left[w->left_count++] = t;
}

void world_of(struct world *w, uint64_t bytes, uint32_t owners, size_t count)
{
	struct arena_figures figures;

	*w = (struct world){.owner_count = owners, .count = count, .live = mem_live()};
	w->things = calloc(count, sizeof(*w->things));
	assert_non_null(w->things);
	assert_int_equal(arena_new(bytes, world_on_evict, w, &w->arena), 0);
	for (uint32_t i = 0; i < owners; i++)
		assert_int_equal(arena_owner_new(w->arena, &w->owners[i]), 0);
	for (size_t i = 0; i < count; i++)
		arena_item_init(&w->things[i].item, i + 1);
	arena_figures(w->arena, &figures);
	w->slab_bytes = figures.slab_bytes;
	assert_int_equal(figures.slabs_free, ARENA_SLABS);
	assert_int_equal(figures.evicted, 0);
}

void world_init(struct world *w, uint32_t owners, size_t count)
{
	world_of(w, MEMORY, owners, count);
}

/* All goes back, and nothing is left over. */
void world_fini(struct world *w)
{
	struct arena_figures figures;

	for (size_t i = 0; i < w->count; i++) {
		while (w->things[i].item.pins)
			arena_unpin(&w->things[i].item);
		world_give_all(w, &w->things[i]);
		arena_item_fini(&w->things[i].item);
	}
	arena_figures(w->arena, &figures);
	assert_int_equal(figures.slabs_free, ARENA_SLABS);
	assert_true(figures.evicted >= w->left_count);
	for (uint32_t i = 0; i < w->owner_count; i++) {
		assert_int_equal(arena_owner_bytes(w->owners[i]), 0);
		assert_int_equal(arena_owner_pinned(w->owners[i]), 0);
		arena_owner_free(w->owners[i]);
	}
	arena_free(w->arena);
	assert_int_equal(mem_live(), w->live);
	free(w->things);
}

/* One slot more for a thing that is pinned. */
int world_more(struct world *w, uint32_t owner, struct thing *t, uint64_t bytes)
{
	uint32_t i = 0;
	int r;

	while (t->slots[i].slab)
		i++;
	assert_true(i < THING_SLOTS);
	t->owner = owner;
	r = arena_take(w->owners[owner], bytes, &t->item, &t->slots[i]);
	if (r >= 0)
		t->sizes[i] = (bytes + GRAIN - 1) / GRAIN * GRAIN;
	return r;
}

int world_pinned(struct world *w, uint32_t owner, size_t i, uint64_t bytes)
{
	arena_pin(&w->things[i].item);
	return world_more(w, owner, &w->things[i], bytes);
}

void world_put(struct world *w, uint32_t owner, size_t i, uint64_t bytes)
{
	assert_int_equal(world_pinned(w, owner, i, bytes), 0);
	arena_unpin(&w->things[i].item);
}

void world_put_many(struct world *w, uint32_t owner, size_t first, size_t count,
		    uint64_t bytes)
{
	for (size_t i = first; i < first + count; i++)
		world_put(w, owner, i, bytes);
}

size_t world_count_here(const struct world *w, size_t first, size_t count)
{
	size_t n = 0;

	for (size_t i = first; i < first + count; i++)
		n += world_here(&w->things[i]);
	return n;
}

uint64_t world_slabs_of(const struct world *w, uint32_t owner)
{
	return arena_owner_bytes(w->owners[owner]) / w->slab_bytes;
}

void world_refused(int r, enum err_code code)
{
	assert_true(r < 0);
	assert_int_equal(err_last()->code, code);
}
