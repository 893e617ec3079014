/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arena against a model of it, at random: what lies where, and each refusal and
 * eviction is judged: was there really no room, and did only leave what had to?
 */
#include "tests/lib/arena_world.h"

/* ---- a model ---- */

/* A slab as it shows from outside. */
struct seen {
	uint32_t owner, used, pinned;
	uint64_t size;
};

struct model {
	struct world w;
	struct seen slabs[ARENA_SLABS];
	uint64_t seed;
	size_t taken, limits, cleared;
};

static struct seen *seen_of(struct world *w, const struct thing *t, uint32_t slot)
{
	struct model *m = w->model;

	return &m->slabs[arena_offset(&t->slots[slot]) / SLAB];
}

static void model_gives(struct world *w, struct thing *t, uint32_t slot)
{
	struct seen *seen = seen_of(w, t, slot);

	assert_true(seen->used > 0);
	seen->used--;
	seen->pinned -= t->item.pins > 0;
}

/* Its first pin, or its last off: then the table changes. */
static void model_pin(struct world *w, struct thing *t, bool pin)
{
	if (pin)
		arena_pin(&t->item);
	else
		arena_unpin(&t->item);
	for (uint32_t i = 0; i < THING_SLOTS && t->item.pins == pin; i++) {
		if (t->slots[i].slab)
			seen_of(w, t, i)->pinned += pin ? 1u : UINT32_MAX;
	}
}

static bool model_room(const struct model *m, uint32_t owner, uint64_t size)
{
	for (size_t i = 0; i < ARENA_SLABS; i++) {
		const struct seen *s = &m->slabs[i];

		if (s->used == 0 ||
		    (s->owner == owner && s->size == size && s->used < SLAB / size))
			return true;
	}
	return false;
}

/* Was there anything that might have left for it? */
static bool model_could(const struct model *m, uint32_t owner, uint64_t size)
{
	uint64_t share = ARENA_SLABS / m->w.owner_count;

	for (size_t i = 0; i < ARENA_SLABS; i++) {
		const struct seen *s = &m->slabs[i];

		if (s->owner == owner && s->size == size && s->pinned < s->used)
			return true;
		if (s->pinned)
			continue;
		if (s->owner == owner || (world_slabs_of(&m->w, owner) < share &&
					  world_slabs_of(&m->w, s->owner) > share))
			return true;
	}
	return false;
}

/* Nobody left who need not: one item of this size, or those of one slab, of the owner
 * itself; and those of one slab of another that had too much. */
static void model_judge(struct model *m, uint32_t owner, uint64_t size,
			const uint64_t *before)
{
	const struct world *w = &m->w;
	uint64_t share = ARENA_SLABS / w->owner_count;
	uint64_t common[2][2] = {{UINT64_MAX, UINT64_MAX}, {UINT64_MAX, UINT64_MAX}};
	size_t count[2] = {0, 0};
	const struct thing *own = NULL, *other = NULL;

	for (size_t i = 0; i < w->left_count; i++) {
		bool its = w->left[i]->owner == owner;

		if (!its && other)
			assert_int_equal(w->left[i]->owner, other->owner);
		if (its)
			own = w->left[i];
		else
			other = w->left[i];
		common[its][0] &= w->left[i]->left_slabs[0];
		common[its][1] &= w->left[i]->left_slabs[1];
		count[its]++;
	}
	if (other) {
		assert_true(before[other->owner] > share && before[owner] < share);
		assert_true(common[0][0] || common[0][1]);
		m->cleared++;
	}
	if (!own || (count[1] == 1 && own->left_sizes >> size / GRAIN & 1))
		return;
	m->cleared++;
	assert_true(common[1][0] || common[1][1]);
}

/* Another has less than its share, and perhaps waits for a slab of this one's. */
static bool model_somebody_waits(const struct model *m, uint32_t owner)
{
	uint64_t share = ARENA_SLABS / m->w.owner_count;

	for (uint32_t i = 0; i < m->w.owner_count; i++) {
		if (i != owner && world_slabs_of(&m->w, i) < share &&
		    world_slabs_of(&m->w, owner) > share)
			return true;
	}
	return false;
}

static int model_take(struct model *m, uint32_t owner, struct thing *t, uint64_t size)
{
	struct world *w = &m->w;
	bool room = model_room(m, owner, size), waited = model_somebody_waits(m, owner);
	uint64_t before[OWNERS_MAX];
	struct seen *seen;
	uint32_t slot = 0;
	int r;

	for (uint32_t i = 0; i < w->owner_count; i++)
		before[i] = world_slabs_of(w, i);
	while (t->slots[slot].slab)
		slot++;
	w->left_count = 0;
	r = world_more(w, owner, t, size);
	if (r < 0) {
		assert_int_equal(err_last()->code, ERR_LIMIT);
		if (w->left_count) /* of a slab that is to be the owner's */
			model_judge(m, owner, size, before);
		else if (!waited)
			assert_false(room || model_could(m, owner, size));
		m->limits++;
		return r;
	}
	seen = seen_of(w, t, slot);
	assert_true(seen->used == 0 || (seen->owner == owner && seen->size == size));
	*seen = (struct seen){owner, seen->used + 1, seen->pinned + 1, size};
	m->taken++;
	if (!waited)
		assert_int_equal(w->left_count == 0, room);
	if (w->left_count)
		model_judge(m, owner, size, before);
	return 0;
}

static void model_check(struct model *m)
{
	static bool grains[GRAINS];
	struct world *w = &m->w;
	struct arena_figures figures;
	uint64_t pinned_bytes[OWNERS_MAX] = {0}, slabs[OWNERS_MAX] = {0}, used = 0;
	struct seen seen[ARENA_SLABS] = {{0}};

	memset(grains, 0, sizeof(grains));
	for (size_t i = 0; i < w->count; i++) {
		const struct thing *t = &w->things[i];

		for (uint32_t k = 0; k < THING_SLOTS; k++) {
			uint64_t offset, size = t->sizes[k];

			if (!t->slots[k].slab)
				continue;
			offset = arena_offset(&t->slots[k]);
			assert_true(offset % GRAIN == 0 && offset + size <= MEMORY);
			for (uint64_t g = 0; g < size / GRAIN; g++) {
				assert_false(grains[offset / GRAIN + g]);
				grains[offset / GRAIN + g] = true;
			}
			slabs[t->owner] += seen[offset / SLAB].used == 0;
			seen[offset / SLAB].used++;
			seen[offset / SLAB].pinned += t->item.pins > 0;
			pinned_bytes[t->owner] += t->item.pins ? size : 0;
		}
	}
	for (size_t i = 0; i < ARENA_SLABS; i++) {
		assert_int_equal(seen[i].used, m->slabs[i].used);
		assert_int_equal(seen[i].pinned, m->slabs[i].pinned);
	}
	arena_figures(w->arena, &figures);
	for (uint32_t i = 0; i < w->owner_count; i++) {
		assert_int_equal(arena_owner_pinned(w->owners[i]), pinned_bytes[i]);
		assert_int_equal(arena_owner_bytes(w->owners[i]), slabs[i] * SLAB);
		used += slabs[i] * SLAB;
	}
	assert_int_equal(figures.slabs_free * figures.slab_bytes + used, MEMORY);
}

/* New content of one to three parts; how much of it stays pinned goes by `hold`. */
static void model_put(struct model *m, struct thing *t, uint32_t hold)
{
	static const uint32_t grains[] = {1, 2, 3, 5, 8};
	uint32_t parts = 1 + random_below(&m->seed, 3);
	int r = 0;

	if (!world_here(t))
		t->owner = random_below(&m->seed, m->w.owner_count);
	model_pin(&m->w, t, true);
	for (uint32_t i = 0; i < parts && r >= 0 && !t->slots[THING_SLOTS - 3].slab; i++)
		r = model_take(m, t->owner, t,
			       grains[random_below(&m->seed, ARRAY_LEN(grains))] * GRAIN);
	if (!world_here(t) || random_below(&m->seed, 100) >= hold)
		model_pin(&m->w, t, false);
}

static void model_step(struct model *m, uint32_t hold)
{
	struct world *w = &m->w;
	struct thing *t = &w->things[random_below(&m->seed, (uint32_t)w->count)];
	uint32_t what = random_below(&m->seed, 100);

	if (what < 45)
		model_put(m, t, hold);
	else if (what < 60)
		arena_touch(&t->item);
	else if (what < 70 && world_here(t) && t->item.pins < 3 && hold)
		model_pin(w, t, true);
	else if (what < 94 && t->item.pins)
		model_pin(w, t, false);
	else if (what >= 94 && what < 98)
		world_give(w, t, random_below(&m->seed, 3));
	else if (what >= 98)
		world_give_all(w, t);
}

static void arena_at_random_keeps_invariants(void **state)
{
	static const uint32_t holds[] = {0, 10, 40, 20};
	size_t taken = 0, limits = 0, cleared = 0;

	(void)state;
	for (uint64_t seed = 1; seed <= 6; seed++) {
		struct model m = {.seed = seed};

		world_init(&m.w, 1 + (uint32_t)seed % 5, 700);
		m.w.model = &m;
		m.w.on_give = model_gives;
		for (size_t step = 0; step < 60000; step++) {
			model_step(&m, holds[step / 5000 % ARRAY_LEN(holds)]);
			if (step % 50 == 0)
				model_check(&m);
		}
		taken += m.taken;
		limits += m.limits;
		cleared += m.cleared;
		m.w.on_give = NULL;
		world_fini(&m.w);
	}
	print_message("%zu slots taken, %zu refused, %zu slabs cleared\n", taken, limits,
		      cleared);
	assert_true(taken > 100000 && limits > 1000 && cleared > 1000);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(arena_at_random_keeps_invariants),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
