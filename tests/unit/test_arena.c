/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arena from outside: what it gives lies in the memory and apart, what it takes back
 * was free to go, and nobody loses more than is needed.
 *
 * Directed cases first: one rule of arena.h each, on a memory of 128 slabs of eight
 * grains. Then a model: owners, sizes, pins, touches and gives at random, with a table of
 * slabs kept beside the arena by offsets alone. From that table each refusal and each
 * eviction is judged: was there really no room, and did only leave what had to?
 */
#include "tests/lib/arena_world.h"

/* ---- slots ---- */

static void slot_too_large_is_too_big(void **state)
{
	static const uint64_t sizes[] = {SLAB + 1,	 SLAB + GRAIN,	     MEMORY,
					 UINT64_MAX / 2, UINT64_MAX - GRAIN, UINT64_MAX};
	struct world w;

	(void)state;
	world_init(&w, 1, 2);
	world_put(&w, 0, 0, SLAB);
	for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
		world_refused(world_pinned(&w, 0, 1, sizes[i]), ERR_TOOBIG);
		assert_non_null(strstr(err_last()->text, "32768"));
		assert_false(world_here(&w.things[1]));
		arena_unpin(&w.things[1].item);
	}
	assert_int_equal(w.left_count, 0);
	world_fini(&w);
}

/* All of it can be had, whatever its size: but for what is less than a grain a slab. */
static void memory_of_any_size_is_used(void **state)
{
	static const uint64_t sizes[] = {
		ARENA_SLABS * GRAIN, (UINT64_C(1) << 20) + 12345, UINT64_C(1000) << 20,
		UINT64_C(100) << 30, (UINT64_C(1) << 38) + 4096,  UINT64_C(1) << 40,
	};
	struct world w;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
		uint64_t end = 0;

		world_of(&w, sizes[i], 1, ARENA_SLABS);
		for (size_t k = 0; k < ARENA_SLABS; k++) {
			world_put(&w, 0, k, w.slab_bytes);
			if (arena_offset(&w.things[k].slots[0]) > end)
				end = arena_offset(&w.things[k].slots[0]);
		}
		end += w.slab_bytes;
		assert_true(w.left_count == 0 && end <= sizes[i]);
		assert_true(sizes[i] - end < ARENA_SLABS * GRAIN);
		world_fini(&w);
	}
}

/* ---- pins ---- */

static void arena_all_pinned_is_a_limit(void **state)
{
	struct world w;

	(void)state;
	world_init(&w, 2, GRAINS + 1);
	for (size_t i = 0; i < GRAINS; i++)
		assert_int_equal(world_pinned(&w, 0, i, GRAIN), 0);
	assert_int_equal(arena_owner_pinned(w.owners[0]), MEMORY);
	for (uint64_t size = GRAIN; size <= SLAB; size += GRAIN) {
		for (uint32_t owner = 0; owner < 2; owner++) {
			world_refused(world_pinned(&w, owner, GRAINS, size), ERR_LIMIT);
			arena_unpin(&w.things[GRAINS].item);
		}
	}
	assert_int_equal(w.left_count, 0);
	assert_int_equal(world_count_here(&w, 0, GRAINS), GRAINS);
	arena_unpin(&w.things[77].item); /* one may leave, and does */
	world_put(&w, 0, GRAINS, GRAIN);
	assert_int_equal(w.left_count, 1);
	assert_ptr_equal(w.left[0], &w.things[77]);
	world_fini(&w);
}

/* Another size wants slabs, and in every second there is a pin. */
static void content_pinned_stays_when_slabs_are_cleared(void **state)
{
	struct world w;

	(void)state;
	world_init(&w, 2, GRAINS + 3 * ARENA_SLABS);
	world_put_many(&w, 0, 0, GRAINS, GRAIN);
	for (size_t i = 3; i < GRAINS; i += 2 * SLAB_GRAINS)
		arena_pin(&w.things[i].item);
	world_put_many(&w, 0, GRAINS, ARENA_SLABS, SLAB);     /* its own other size */
	world_put_many(&w, 1, GRAINS + ARENA_SLABS, 8, SLAB); /* somebody else */
	for (size_t i = 3; i < GRAINS; i += 2 * SLAB_GRAINS)
		assert_true(world_here(&w.things[i]));
	/* slabs with a pin keep all they have; the others went */
	assert_int_equal(world_count_here(&w, 0, GRAINS), GRAINS / 2);
	assert_int_equal(world_slabs_of(&w, 1), 8);
	for (size_t i = 3; i < GRAINS; i += 2 * SLAB_GRAINS)
		arena_unpin(&w.things[i].item);
	world_put_many(&w, 1, GRAINS + ARENA_SLABS + 8, ARENA_SLABS, SLAB);
	assert_int_equal(world_slabs_of(&w, 1), ARENA_SLABS / 2);
	world_fini(&w);
}

/* ---- shares ---- */

static void owner_within_its_share_keeps_its_content(void **state)
{
	for (uint32_t owners = 2; owners <= 5; owners++) {
		uint32_t share = ARENA_SLABS / owners;
		size_t own = (size_t)share * SLAB_GRAINS, first = own * (owners - 1);
		struct world w;

		(void)state;
		world_init(&w, owners, first + 3 * GRAINS);
		for (uint32_t i = 0; i + 1 < owners; i++) {
			assert_int_equal(arena_owner_share(w.owners[i]), share * SLAB);
			world_put_many(&w, i, own * i, own, GRAIN);
			assert_int_equal(world_slabs_of(&w, i), share);
		}
		world_put_many(&w, owners - 1, first, 2 * GRAINS, GRAIN);
		world_put_many(&w, owners - 1, first + 2 * GRAINS, ARENA_SLABS, SLAB);
		assert_int_equal(world_count_here(&w, 0, first), first);
		for (uint32_t i = 0; i + 1 < owners; i++) /* a put of one costs itself */
			world_put(&w, i, first + 3 * GRAINS - 1 - i, SLAB - GRAIN);
		assert_true(world_count_here(&w, 0, first) >=
			    first - SLAB_GRAINS * (owners - 1));
		world_fini(&w);
	}
}

static void owner_below_share_gets_its_share(void **state)
{
	for (uint32_t owners = 2; owners <= 5; owners++) {
		uint32_t share = ARENA_SLABS / owners, rest = ARENA_SLABS % owners;
		size_t own = (size_t)share * SLAB_GRAINS;
		struct world w;

		(void)state;
		world_init(&w, owners, GRAINS + own * owners + 2 * GRAINS);
		world_put_many(&w, 0, 0, GRAINS,
			       GRAIN); /* while nobody else wants them */
		assert_int_equal(world_slabs_of(&w, 0), ARENA_SLABS);
		for (uint32_t i = 1; i < owners; i++) {
			w.left_count = 0;
			world_put_many(&w, i, GRAINS + own * i, own, GRAIN);
			assert_int_equal(world_slabs_of(&w, i), share);
			assert_int_equal(w.left_count, own); /* as much as it took */
			for (size_t k = 0; k < w.left_count; k++)
				assert_int_equal(w.left[k]->owner, 0);
		}
		assert_int_equal(world_slabs_of(&w, 0), share + rest);
		assert_int_equal(world_count_here(&w, 0, GRAINS),
				 (share + rest) * SLAB_GRAINS);
		/* what it wants beyond that is its own loss */
		world_put_many(&w, 1, GRAINS + own * owners, 2 * GRAINS, GRAIN);
		for (uint32_t i = 2; i < owners; i++)
			assert_int_equal(world_count_here(&w, GRAINS + own * i, own),
					 own);
		assert_int_equal(world_slabs_of(&w, 0) + world_slabs_of(&w, 1),
				 2 * share + rest);
		assert_true(world_slabs_of(&w, 0) >= share);
		world_fini(&w);
	}
}

/* ---- who leaves ---- */

/* Whatever is left of it is its beginning. */
static void chain_unpinned_from_its_end_leaves_from_its_end(void **state)
{
	enum { CHAIN = 100 };
	struct world w;

	(void)state;
	for (unsigned int touches = 0; touches < 4; touches++) {
		world_init(&w, 1, CHAIN + 3 * GRAINS);
		for (size_t i = 0; i < CHAIN; i++)
			assert_int_equal(world_pinned(&w, 0, i, GRAIN), 0);
		for (size_t i = 0; i < CHAIN * touches; i++)
			arena_touch(&w.things[i % CHAIN].item);
		for (size_t i = CHAIN; i-- > 0;)
			arena_unpin(&w.things[i].item);
		for (size_t i = CHAIN; i < w.count; i++) {
			size_t left = world_count_here(&w, 0, CHAIN);

			assert_int_equal(world_count_here(&w, 0, left), left);
			world_put(&w, 0, i, GRAIN);
			if (touches && i % 2) /* they push from the main queue, too */
				arena_touch(&w.things[i].item);
		}
		assert_true(world_count_here(&w, 0, CHAIN) < CHAIN);
		world_fini(&w);
	}
}

static void content_hit_outlives_content_not_hit(void **state)
{
	struct world w;

	(void)state;
	world_init(&w, 1, 2 * GRAINS);
	world_put_many(&w, 0, 0, GRAINS, GRAIN); /* each second is asked for */
	for (size_t i = 0; i < GRAINS; i += 2)
		arena_touch(&w.things[i].item);
	world_put_many(&w, 0, GRAINS, GRAINS / 2, GRAIN);
	assert_int_equal(w.left_count, GRAINS / 2);
	for (size_t i = 0; i < GRAINS; i++)
		assert_int_equal(world_here(&w.things[i]), i % 2 == 0);
	for (size_t i = 0; i < w.count; i++)
		world_give_all(&w, &w.things[i]);
	w.left_count = 0;
	world_put_many(&w, 0, 0, GRAINS,
		       GRAIN); /* the older half is: a round has an end */
	for (size_t i = 0; i < GRAINS / 2; i++)
		arena_touch(&w.things[i].item);
	world_put_many(&w, 0, GRAINS, GRAINS / 3, GRAIN);
	assert_true(GRAINS / 2 - world_count_here(&w, 0, GRAINS / 2) <= GRAINS / 2 / 64);
	world_fini(&w);
}

static void item_reinserted_enters_main_queue(void **state)
{
	struct world w;

	(void)state;
	world_init(&w, 1, 4 * GRAINS);
	world_put_many(&w, 0, 0, GRAINS, GRAIN);
	for (size_t i = 0; i < GRAINS; i++)
		assert_false(w.things[i].item.kept);
	world_put_many(&w, 0, GRAINS, 20, GRAIN);
	assert_int_equal(world_count_here(&w, 0, 20), 0);
	world_put_many(&w, 0, 0, 20, GRAIN); /* not touched even once */
	for (size_t i = 0; i < 20; i++)
		assert_true(w.things[i].item.kept);
	world_put_many(&w, 0, GRAINS + 20, 2 * GRAINS, GRAIN);
	assert_int_equal(world_count_here(&w, 0, 20), 20);
	world_fini(&w);
}

/* ---- against FIFO ---- */

struct ratio {
	double arena, fifo; /* of the working set's requests */
};

/* As the store asks: what is there is held, read and let go; what is not is put, `slots`
 * slots an item. A third of the requests are of a working set of two thirds of the
 * memory, the rest never come again. */
static struct ratio scan(uint32_t slots)
{
	enum { STEPS = 60000, WARM = 20000 };
	size_t capacity = GRAINS / slots, set = capacity * 2 / 3, asked = 0;
	size_t arena_hits = 0, fifo_hits = 0, next = set;
	size_t *fifo = calloc(set + STEPS, sizeof(*fifo)), fifo_puts = 0;
	struct world w;
	uint64_t seed = 42;

	assert_non_null(fifo); /* its how manieth put it was */
	world_init(&w, 1, set + STEPS);
	for (size_t step = 0; step < STEPS; step++) {
		bool hot = random_below(&seed, 3) == 0;
		size_t i = hot ? random_below(&seed, (uint32_t)set) : next++;
		struct thing *t = &w.things[i];
		bool hit = world_here(t), counts = hot && step >= WARM;

		arena_pin(&t->item);
		if (hit)
			arena_touch(&t->item);
		for (uint32_t k = 0; k < slots && !hit; k++)
			assert_int_equal(world_more(&w, 0, t, GRAIN), 0);
		arena_unpin(&t->item);
		asked += counts;
		arena_hits += counts && hit;
		hit = fifo[i] && fifo_puts - fifo[i] < capacity;
		fifo_hits += counts && hit;
		if (!hit)
			fifo[i] = ++fifo_puts;
	}
	free(fifo);
	world_fini(&w);
	return (struct ratio){(double)arena_hits / (double)asked,
			      (double)fifo_hits / (double)asked};
}

static void scan_keeps_content_in_use(void **state)
{
	static const uint32_t slots[] = {1, 2, 4, 8}; /* ranks that share a chunk */
	struct ratio r[ARRAY_LEN(slots)];

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(slots); i++) {
		r[i] = scan(slots[i]);
		print_message("%u slots an item: %.3f of the working set's requests "
			      "hit, FIFO %.3f\n",
			      slots[i], r[i].arena, r[i].fifo);
	}
	for (size_t i = 0; i < ARRAY_LEN(slots); i++)
		assert_true(r[i].arena > 0.9 && r[i].fifo < 0.7);
}

/* ---- sizes and shelves ---- */

/* A size that nobody writes any more: slab by slab, the oldest first, and no more. */
static void memory_of_an_old_size_moves_to_the_new_one(void **state)
{
	struct world w;
	size_t large = GRAINS, small = GRAINS + 2 * ARENA_SLABS;

	(void)state;
	world_init(&w, 1, small + 2 * GRAINS);
	world_put_many(&w, 0, 0, GRAINS, GRAIN);
	for (size_t i = 0; i < ARENA_SLABS; i++) {
		world_put(&w, 0, large + i, SLAB);
		assert_int_equal(w.left_count, SLAB_GRAINS * (i + 1));
		assert_int_equal(world_count_here(&w, 0, SLAB_GRAINS * (i + 1)), 0);
	}
	w.left_count = 0; /* now none of the old size is left */
	world_put_many(&w, 0, large + ARENA_SLABS, ARENA_SLABS, SLAB);
	assert_int_equal(w.left_count, ARENA_SLABS);
	w.left_count = 0; /* and back */
	for (size_t i = 0; i < GRAINS; i++) {
		world_put(&w, 0, small + i, GRAIN);
		assert_int_equal(w.left_count, i / SLAB_GRAINS + 1);
	}
	world_put(&w, 0, large, SLAB); /* in the end both: it is not the oldest */
	world_put_many(&w, 0, 0, GRAINS / 2, GRAIN);
	assert_true(world_here(&w.things[large]));
	world_fini(&w);
}

/* The first part of a chunk failed, the second is there: it leaves like any other. */
static void item_without_first_slot_is_evictable(void **state)
{
	struct world w;
	size_t n = ARENA_SLABS - 1;

	(void)state;
	for (unsigned int other = 0; other < 3; other++) {
		world_init(&w, 2, n + 2);
		for (size_t i = 0; i < n; i++) {
			assert_int_equal(world_pinned(&w, 0, i, GRAIN), 0);
			assert_int_equal(world_more(&w, 0, &w.things[i], SLAB), 0);
			if (i % 2) /* in its queue, or not yet */
				world_give(&w, &w.things[i], 0);
			arena_unpin(&w.things[i].item);
			world_give(&w, &w.things[i], 0);
		}
		assert_int_equal(world_pinned(&w, 0, n, SLAB),
				 0); /* the last free slab */
		/* its own size, another one, another owner */
		world_put(&w, other == 2, n + 1, other == 1 ? SLAB / 2 : SLAB);
		assert_int_equal(w.left_count, 1);
		assert_ptr_equal(w.left[0], &w.things[0]); /* the oldest */
		assert_true(world_here(&w.things[n]));
		world_fini(&w);
	}
}

/* Content whose first slot lies in a slab with pins, and whose second would do. */
static void item_with_pinned_first_slab_is_evictable(void **state)
{
	struct world w;
	size_t n = SLAB_GRAINS;

	(void)state;
	for (unsigned int other = 0; other < 3; other++) {
		world_init(&w, 2, ARENA_SLABS + 2);
		assert_int_equal(world_pinned(&w, 0, 0, GRAIN),
				 0); /* in the first slab */
		for (size_t i = 1; i < n; i++) {
			assert_int_equal(world_pinned(&w, 0, i, GRAIN), 0);
			assert_int_equal(world_more(&w, 0, &w.things[i], SLAB), 0);
			arena_unpin(&w.things[i].item);
		}
		for (size_t i = n; i < ARENA_SLABS; i++)
			assert_int_equal(world_pinned(&w, 0, i, SLAB), 0);
		world_put(&w, other == 2, ARENA_SLABS, other == 1 ? SLAB / 2 : SLAB);
		assert_int_equal(w.left_count, 1);
		assert_true(world_here(&w.things[0]));
		assert_int_equal(world_count_here(&w, n, ARENA_SLABS - n),
				 ARENA_SLABS - n);
		world_fini(&w);
	}
}

/* ---- without memory ---- */

static void same_figures(const struct world *w, uint64_t slabs_free, uint64_t bytes)
{
	struct arena_figures figures;

	arena_figures(w->arena, &figures);
	assert_int_equal(figures.slabs_free, slabs_free);
	assert_int_equal(arena_owner_bytes(w->owners[0]), bytes);
	assert_int_equal(arena_owner_pinned(w->owners[0]), 0);
}

/* Each allocation of a take fails in turn. How many failed. */
static uint32_t fail_each(struct world *w, size_t i, uint64_t bytes)
{
	struct thing *t = &w->things[i];
	uint32_t n = 1;

	arena_pin(&t->item);
	for (;; n++) {
		int r;

		mem_fail_at(n);
		r = world_more(w, 0, t, bytes);
		mem_fail_at(0);
		if (r >= 0)
			break;
		world_refused(r, ERR_NOMEM);
		assert_false(world_here(t));
		assert_int_equal(arena_owner_pinned(w->owners[0]), 0);
	}
	arena_unpin(&t->item);
	return n - 1;
}

static void arena_without_memory_is_unchanged(void **state)
{
	struct arena_owner *owner;
	struct arena *arena;
	struct world w;
	int64_t live = mem_live();

	(void)state;
	mem_fail_at(1);
	world_refused(arena_new(MEMORY, world_on_evict, NULL, &arena), ERR_NOMEM);
	mem_fail_at(0);
	assert_int_equal(mem_live(), live);
	world_init(&w, 1, GRAINS + 3);
	mem_fail_at(1);
	world_refused(arena_owner_new(w.arena, &owner), ERR_NOMEM);
	mem_fail_at(0);
	assert_int_equal(arena_owner_share(w.owners[0]), MEMORY);
	assert_true(fail_each(&w, 0, GRAIN) >= 2); /* a new size */
	same_figures(&w, ARENA_SLABS - 1, SLAB);
	assert_int_equal(fail_each(&w, 1, GRAIN), 0); /* a slot that is there */
	world_put_many(&w, 0, 2, GRAINS - 2, GRAIN);
	assert_int_equal(fail_each(&w, GRAINS, GRAIN), 0);
	assert_int_equal(w.left_count, 1);
	w.left_count = 0; /* another size: at most the slab that it gets is lost */
	assert_true(fail_each(&w, GRAINS + 1, SLAB) >= 2);
	assert_int_equal(w.left_count, SLAB_GRAINS);
	same_figures(&w, 0, MEMORY);
	world_fini(&w);
}

/* ---- pins of others ---- */

/* An owner under load has pins in each slab at all times, though no pin stays. */
static void owner_gets_share_from_owner_with_pins_everywhere(void **state)
{
	struct thing *held[ARENA_SLABS];
	struct world w;
	size_t next = GRAINS;

	(void)state;
	world_init(&w, 2, 32 * GRAINS);
	world_put_many(&w, 0, 0, GRAINS, GRAIN);
	for (size_t i = 0; i < ARENA_SLABS; i++) {
		held[i] = &w.things[i * SLAB_GRAINS];
		arena_pin(&held[i]->item);
	}
	for (size_t i = 0; i < 16 * ARENA_SLABS; i++) {
		struct thing **old = &held[i % ARENA_SLABS];
		struct thing *t = &w.things[i % ARENA_SLABS * SLAB_GRAINS +
					    i / ARENA_SLABS % SLAB_GRAINS];

		if (world_pinned(&w, 1, next, SLAB) < 0)
			assert_int_equal(err_last()->code, ERR_LIMIT);
		arena_unpin(&w.things[next++].item);
		if (t == *old || !*old)
			continue;
		if (world_here(t))
			arena_pin(&t->item); /* the next before the last */
		arena_unpin(&(*old)->item);
		*old = world_here(t) ? t : NULL;
	}
	assert_true(world_slabs_of(&w, 1) >= 8);
	world_fini(&w);
}

/* Shares are of what may be in use: of ten slabs here, not of all. */
static void owner_gets_its_share_of_few_slabs(void **state)
{
	struct world w;

	(void)state;
	world_init(&w, 2, 4 * GRAINS);
	arena_limit(w.arena, 10);
	world_put_many(&w, 0, 0, 20 * SLAB_GRAINS, GRAIN);
	assert_int_equal(world_slabs_of(&w, 0), 10);
	world_put_many(&w, 1, GRAINS, 20 * SLAB_GRAINS, GRAIN);
	assert_int_equal(world_slabs_of(&w, 0), 5);
	assert_int_equal(world_slabs_of(&w, 1), 5);
	assert_int_equal(arena_slabs_used(w.arena), 10);
	world_fini(&w);
}

/* More owners than slabs that may be in use: each may have one. */
static void owner_of_many_has_a_share(void **state)
{
	struct world w;

	(void)state;
	world_init(&w, 8, GRAINS);
	arena_limit(w.arena, 4);
	for (uint32_t i = 0; i < 8; i++)
		assert_int_equal(arena_owner_share(w.owners[i]), SLAB);
	world_put_many(&w, 0, 0, 4 * SLAB_GRAINS, GRAIN);
	for (uint32_t i = 1; i < 4; i++)
		world_put(&w, i, 4 * SLAB_GRAINS + i, GRAIN);
	for (uint32_t i = 0; i < 4; i++)
		assert_int_equal(world_slabs_of(&w, i), 1);
	assert_true(world_pinned(&w, 4, 5 * SLAB_GRAINS, GRAIN) < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	arena_unpin(&w.things[5 * SLAB_GRAINS].item);
	world_fini(&w);
}

static uint64_t looks(const struct world *w)
{
	struct arena_figures figures;

	arena_figures(w->arena, &figures);
	return figures.looks;
}

/* Of a thousand slots in each slab the last one is pinned. */
static void slab_reassigned_is_cleared_in_one_pass(void **state)
{
	const size_t each = 1024, all = ARENA_SLABS * each;
	uint64_t before;
	struct world w;

	(void)state;
	world_of(&w, all * GRAIN, 2, all + 1);
	world_put_many(&w, 0, 0, all, GRAIN);
	for (size_t i = 1; i <= ARENA_SLABS; i++)
		arena_pin(&w.things[i * each - 1].item);
	before = looks(&w);
	assert_true(world_pinned(&w, 1, all, GRAIN) < 0); /* it awaits one */
	assert_int_equal(w.left_count, each - 1);
	assert_in_range(looks(&w) - before, each - 1, 2 * each);
	arena_unpin(&w.things[all].item);
	for (size_t i = 1; i <= ARENA_SLABS; i++)
		arena_unpin(&w.things[i * each - 1].item);
	world_fini(&w);
}

static void sizes_without_content_are_dropped(void **state)
{
	int64_t live = 0;
	struct world w;

	(void)state;
	world_init(&w, 2, 64);
	world_put(&w, 0, 0, GRAIN);
	world_put(&w, 1, 1, GRAIN);
	for (uint64_t round = 0; round < 3; round++) {
		for (size_t size = 2; size <= SLAB_GRAINS; size++) {
			size_t i = size + 8 * round;

			assert_int_equal(arena_crowded(w.arena), size > 6);
			world_put(&w, size % 2, i, size * GRAIN);
			world_give_all(&w, &w.things[i]);
		}
		arena_tidy(w.arena);
		assert_false(arena_crowded(w.arena));
		assert_int_equal(mem_live(), round ? live : mem_live());
		live = mem_live();
	}
	assert_true(world_here(&w.things[0]) && world_here(&w.things[1]));
	world_fini(&w);
}

static uint64_t ghosts(const struct world *w)
{
	struct arena_figures figures;

	arena_figures(w->arena, &figures);
	return figures.ghosts;
}

/* What has left is remembered by four words a slot at most, however many users and sizes
 * there are. */
static void ghosts_take_memory_per_slot(void **state)
{
	const size_t each = 1024, all = ARENA_SLABS * each;
	struct world w;

	(void)state;
	world_of(&w, all * GRAIN, ARENA_SLABS, all + ARENA_SLABS);
	world_put_many(&w, 0, 0, all, GRAIN);
	assert_in_range(ghosts(&w), all, 4 * all);
	for (uint32_t owner = 1; owner < ARENA_SLABS;
	     owner++) { /* each takes its share */
		world_put(&w, owner, all + owner, owner % 2 ? GRAIN : 2 * GRAIN);
		assert_in_range(ghosts(&w), each / 2, 4 * all);
		w.left_count = 0;
	}
	assert_int_equal(arena_owner_bytes(w.owners[0]), each * GRAIN);
	assert_in_range(ghosts(&w), each / 2, ARENA_SLABS * 2 * each);
	world_fini(&w);
}

/* Memory that grows and shrinks forgets nothing that it has room to remember. */
static void ghosts_grow_with_memory(void **state)
{
	const size_t each = 1024, seen = 2 * each;
	uint64_t before;
	size_t kept = 0;
	struct world w;

	(void)state;
	world_of(&w, ARENA_SLABS * each * GRAIN, 1, 64 * each);
	arena_limit(w.arena, 2);
	world_put_many(&w, 0, 0, seen, GRAIN);
	world_put_many(&w, 0, seen, seen, GRAIN); /* all before leave */
	assert_int_equal(world_count_here(&w, 0, seen), 0);
	before = ghosts(&w);
	arena_limit(w.arena, 16);
	world_put_many(&w, 0, 2 * seen, 10 * each, GRAIN);
	assert_true(ghosts(&w) >= 4 * before);
	world_put_many(&w, 0, 0, seen, GRAIN);
	for (size_t i = 0; i < seen; i++)
		kept += w.things[i].item.kept;
	assert_true(kept > seen / 2); /* keys that met in the small table left one */
	world_fini(&w);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(slot_too_large_is_too_big),
		cmocka_unit_test(memory_of_any_size_is_used),
		cmocka_unit_test(arena_all_pinned_is_a_limit),
		cmocka_unit_test(content_pinned_stays_when_slabs_are_cleared),
		cmocka_unit_test(owner_within_its_share_keeps_its_content),
		cmocka_unit_test(owner_below_share_gets_its_share),
		cmocka_unit_test(chain_unpinned_from_its_end_leaves_from_its_end),
		cmocka_unit_test(content_hit_outlives_content_not_hit),
		cmocka_unit_test(item_reinserted_enters_main_queue),
		cmocka_unit_test(scan_keeps_content_in_use),
		cmocka_unit_test(memory_of_an_old_size_moves_to_the_new_one),
		cmocka_unit_test(item_without_first_slot_is_evictable),
		cmocka_unit_test(item_with_pinned_first_slab_is_evictable),
		cmocka_unit_test(arena_without_memory_is_unchanged),
		cmocka_unit_test(owner_gets_share_from_owner_with_pins_everywhere),
		cmocka_unit_test(owner_gets_its_share_of_few_slabs),
		cmocka_unit_test(owner_of_many_has_a_share),
		cmocka_unit_test(slab_reassigned_is_cleared_in_one_pass),
		cmocka_unit_test(sizes_without_content_are_dropped),
		cmocka_unit_test(ghosts_take_memory_per_slot),
		cmocka_unit_test(ghosts_grow_with_memory),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
