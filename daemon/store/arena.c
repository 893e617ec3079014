/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slabs, because runs of any length fragment when some of them are pinned, and because a
 * slab that is emptied can serve any size.
 *
 * What leaves is chosen by S3-FIFO (Yang et al., SOSP 2023), a pair of queues a shelf:
 * content comes to the small queue, which has a tenth; what was hit there goes on to the
 * main one, the rest leaves and is remembered by its key for a while, and comes to the
 * main queue if it comes again meanwhile. In the main queue a hit is another round. Only
 * what is not pinned is in a queue, so a victim is always at hand; a round is bounded,
 * for a full main queue of hits would be walked thrice.
 *
 * An owner with several shelves (ranks of another tensor parallelism, another chunk
 * length) would keep slabs of sizes that nobody writes any more: a shelf that needs room
 * compares its next victim with those of the owner's other shelves, and where another's
 * is older a slab of that shelf is cleared.
 */
#include "daemon/store/arena.h"

#include <assert.h>
#include <errno.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define GRAIN UINT64_C(4096)
#define SLOTS_MAX (1u << 20) /* of the whole arena: what the index may hold */
#define SMALL_SHARE 10u	     /* a tenth of the slots */
#define HITS_MAX 3u
#define ROUND_MAX 64u  /* second chances for one victim */
#define TRIES_MAX 256u /* victims for one slot */
#define NO_INDEX UINT32_MAX

struct arena_slab {
	struct list link;	   /* free, or in its shelf: with room, or full */
	struct arena_shelf *shelf; /* NULL: free */
	uint64_t offset;
	uint32_t slots, used;
	uint32_t pinned; /* slots of pinned items */
	uint32_t free;	 /* the first free index; NO_INDEX: none */
	union {
		struct arena_slot *slot;
		uintptr_t next; /* of a free one: (index behind it << 1) | 1 */
	} * at;
};

struct arena_shelf {
	struct list link; /* in its owner's */
	struct arena_owner *owner;
	uint64_t slot_bytes;
	struct list roomy, full; /* slabs */
	uint32_t slabs, slots, used;
	struct list small, main; /* items */
	uint32_t small_count, main_count;
	uint64_t *ghosts; /* keys of what has left, by key */
	uint64_t ghost_mask;
};

struct arena_owner {
	struct list link;
	struct arena *arena;
	struct list shelves;
	uint32_t slabs;
	uint64_t pinned_bytes;
};

struct arena {
	struct arena_slab slabs[ARENA_SLABS];
	uint32_t slab_count;
	uint64_t slab_bytes, slot_least;
	struct list free;
	uint32_t free_count;
	struct list owners;
	uint32_t owner_count;
	uint64_t tick, evicted;
	void (*on_evict)(void *arg, struct arena_item *item);
	void *arg;
};

int arena_new(uint64_t bytes, void (*on_evict)(void *arg, struct arena_item *item),
	      void *arg, struct arena **arena_p)
{
	struct arena *arena = mem_zalloc(sizeof(*arena));
	uint64_t slab = bytes / ARENA_SLABS / GRAIN * GRAIN;

	assert(slab > 0);
	if (!arena)
		return err_pass(-ENOMEM);
	arena->slab_bytes = slab;
	arena->slot_least = (bytes / SLOTS_MAX + GRAIN - 1) / GRAIN * GRAIN;
	arena->slab_count = ARENA_SLABS;
	arena->on_evict = on_evict;
	arena->arg = arg;
	list_init(&arena->free);
	list_init(&arena->owners);
	for (uint32_t i = 0; i < arena->slab_count; i++) {
		arena->slabs[i].offset = i * slab;
		list_push_back(&arena->free, &arena->slabs[i].link);
	}
	arena->free_count = arena->slab_count;
	*arena_p = arena;
	return 0;
}

void arena_free(struct arena *arena)
{
	assert(!arena || list_empty(&arena->owners));
	mem_free(arena);
}

uint64_t arena_slot_most(const struct arena *arena)
{
	return arena->slab_bytes;
}

void arena_figures(const struct arena *arena, struct arena_figures *figures_p)
{
	*figures_p = (struct arena_figures){.slab_bytes = arena->slab_bytes,
					    .slabs_free = arena->free_count,
					    .evicted = arena->evicted};
}

/* ---- owners, shelves ---- */

int arena_owner_new(struct arena *arena, struct arena_owner **owner_p)
{
	struct arena_owner *owner = mem_zalloc(sizeof(*owner));

	if (!owner)
		return err_pass(-ENOMEM);
	owner->arena = arena;
	list_init(&owner->shelves);
	list_push_back(&arena->owners, &owner->link);
	arena->owner_count++;
	*owner_p = owner;
	return 0;
}

static void shelf_free(struct arena_shelf *shelf)
{
	assert(shelf->slabs == 0 && list_empty(&shelf->small) &&
	       list_empty(&shelf->main));
	list_remove(&shelf->link);
	mem_free(shelf->ghosts);
	mem_free(shelf);
}

void arena_owner_free(struct arena_owner *owner)
{
	struct arena_shelf *shelf;

	if (!owner)
		return;
	assert(owner->slabs == 0 && owner->pinned_bytes == 0);
	list_foreach_safe(shelf, &owner->shelves, link)
		shelf_free(shelf);
	list_remove(&owner->link);
	owner->arena->owner_count--;
	mem_free(owner);
}

uint64_t arena_owner_bytes(const struct arena_owner *owner)
{
	return owner->slabs * owner->arena->slab_bytes;
}

static uint32_t share(const struct arena_owner *owner)
{
	return owner->arena->slab_count / owner->arena->owner_count;
}

uint64_t arena_owner_share(const struct arena_owner *owner)
{
	return share(owner) * owner->arena->slab_bytes;
}

uint64_t arena_owner_pinned(const struct arena_owner *owner)
{
	return owner->pinned_bytes;
}

static uint64_t ghosts_for(const struct arena *arena, uint64_t slot_bytes)
{
	uint64_t want = arena->slab_count * (arena->slab_bytes / slot_bytes), n = 64;

	while (n < want)
		n *= 2;
	return n;
}

static struct arena_shelf *shelf_of(struct arena_owner *owner, uint64_t slot_bytes)
{
	struct arena_shelf *shelf;
	uint64_t ghosts = ghosts_for(owner->arena, slot_bytes);

	list_foreach(shelf, &owner->shelves, link) {
		if (shelf->slot_bytes == slot_bytes)
			return shelf;
	}
	shelf = mem_zalloc(sizeof(*shelf));
	if (!shelf)
		return NULL;
	shelf->ghosts = mem_calloc(ghosts, sizeof(*shelf->ghosts));
	if (!shelf->ghosts) {
		mem_free(shelf);
		return NULL;
	}
	shelf->ghost_mask = ghosts - 1;
	shelf->owner = owner;
	shelf->slot_bytes = slot_bytes;
	list_init(&shelf->roomy);
	list_init(&shelf->full);
	list_init(&shelf->small);
	list_init(&shelf->main);
	list_push_back(&owner->shelves, &shelf->link);
	return shelf;
}

/* ---- slabs and slots ---- */

static int slab_join(struct arena_slab *slab, struct arena_shelf *shelf)
{
	struct arena *arena = shelf->owner->arena;

	assert(!slab->shelf && slab->used == 0);
	slab->slots = (uint32_t)(arena->slab_bytes / shelf->slot_bytes);
	slab->at = mem_calloc(slab->slots, sizeof(*slab->at));
	if (!slab->at)
		return err_pass(-ENOMEM);
	for (uint32_t i = 0; i < slab->slots; i++)
		slab->at[i].next = ((uintptr_t)i + 1) << 1 | 1;
	slab->at[slab->slots - 1].next = (uintptr_t)NO_INDEX << 1 | 1;
	slab->free = 0;
	slab->shelf = shelf;
	list_remove(&slab->link);
	list_push_back(&shelf->roomy, &slab->link);
	arena->free_count--;
	shelf->slabs++;
	shelf->slots += slab->slots;
	shelf->owner->slabs++;
	return 0;
}

static void slab_leave(struct arena_slab *slab)
{
	struct arena_shelf *shelf = slab->shelf;
	struct arena *arena = shelf->owner->arena;

	assert(slab->used == 0 && slab->pinned == 0);
	shelf->slabs--;
	shelf->slots -= slab->slots;
	shelf->owner->slabs--;
	mem_free(slab->at);
	slab->at = NULL;
	slab->shelf = NULL;
	list_remove(&slab->link);
	list_push_front(&arena->free, &slab->link); /* its pages are warm */
	arena->free_count++;
}

static void slab_take(struct arena_slab *slab, struct arena_slot *slot)
{
	assert(slab->free != NO_INDEX);
	slot->slab = slab;
	slot->index = slab->free;
	slab->free = (uint32_t)(slab->at[slot->index].next >> 1);
	slab->at[slot->index].slot = slot;
	slab->used++;
	slab->shelf->used++;
	if (slab->free == NO_INDEX) {
		list_remove(&slab->link);
		list_push_back(&slab->shelf->full, &slab->link);
	}
}

uint64_t arena_offset(const struct arena_slot *slot)
{
	assert(slot->slab);
	return slot->slab->offset + slot->index * slot->slab->shelf->slot_bytes;
}

/* Its slots count as pinned, or not any more. */
static void slot_pinned(const struct arena_slot *slot, bool pinned)
{
	struct arena_shelf *shelf = slot->slab->shelf;

	slot->slab->pinned += pinned ? 1u : UINT32_MAX;
	shelf->owner->pinned_bytes += pinned ? shelf->slot_bytes : -shelf->slot_bytes;
}

static void queue_leave(struct arena_item *item)
{
	if (list_empty(&item->link))
		return;
	list_remove(&item->link);
	if (item->kept)
		item->shelf->main_count--;
	else
		item->shelf->small_count--;
}

static void queue_join(struct arena_item *item)
{
	struct arena_shelf *shelf = item->shelf;

	assert(item->pins == 0 && list_empty(&item->link));
	item->tick = ++shelf->owner->arena->tick;
	list_push_back(item->kept ? &shelf->main : &shelf->small, &item->link);
	if (item->kept)
		shelf->main_count++;
	else
		shelf->small_count++;
}

void arena_give(struct arena_slot *slot)
{
	struct arena_slab *slab = slot->slab;
	struct arena_item *item = slot->item;

	if (!slab)
		return;
	if (item->pins)
		slot_pinned(slot, false);
	list_remove(&slot->of_item);
	if (list_empty(&item->slots)) { /* its shelf may go */
		queue_leave(item);
		item->shelf = NULL;
	}
	slab->at[slot->index].next = (uintptr_t)slab->free << 1 | 1;
	if (slab->free == NO_INDEX) {
		list_remove(&slab->link);
		list_push_back(&slab->shelf->roomy, &slab->link);
	}
	slab->free = slot->index;
	slab->used--;
	slab->shelf->used--;
	slot->slab = NULL;
	if (slab->used == 0)
		slab_leave(slab);
}

/* ---- items ---- */

void arena_item_init(struct arena_item *item, uint64_t key)
{
	*item = (struct arena_item){.key = key};
	list_init(&item->link);
	list_init(&item->slots);
}

void arena_item_fini(struct arena_item *item)
{
	assert(list_empty(&item->slots) && list_empty(&item->link));
}

void arena_pin(struct arena_item *item)
{
	const struct arena_slot *slot;

	if (item->pins++)
		return;
	if (item->shelf)
		queue_leave(item);
	list_foreach(slot, &item->slots, of_item)
		slot_pinned(slot, true);
}

void arena_unpin(struct arena_item *item)
{
	const struct arena_slot *slot;

	assert(item->pins > 0);
	if (--item->pins)
		return;
	list_foreach(slot, &item->slots, of_item)
		slot_pinned(slot, false);
	if (item->shelf)
		queue_join(item);
}

void arena_touch(struct arena_item *item)
{
	if (item->hits < HITS_MAX)
		item->hits++;
}

/* ---- victims ---- */

static void ghost_add(struct arena_shelf *shelf, uint64_t key)
{
	shelf->ghosts[key & shelf->ghost_mask] = key;
}

static bool ghost_take(struct arena_shelf *shelf, uint64_t key)
{
	uint64_t *at = &shelf->ghosts[key & shelf->ghost_mask];

	if (*at != key)
		return false;
	*at = 0;
	return true;
}

/* Who leaves next, still in its queue; NULL: all are pinned. */
static struct arena_item *shelf_victim(struct arena_shelf *shelf)
{
	for (unsigned int round = 0;; round++) {
		bool small = shelf->small_count * SMALL_SHARE > shelf->used ||
			     list_empty(&shelf->main);
		struct arena_item *item = list_first(small ? &shelf->small : &shelf->main,
						     struct arena_item, link);

		if (!item || item->hits == 0 || round >= ROUND_MAX)
			return item;
		queue_leave(item);
		item->hits = item->kept ? (uint8_t)(item->hits - 1) : 0;
		item->kept = true;
		queue_join(item);
	}
}

static void evict(struct arena *arena, struct arena_item *item)
{
	assert(item->pins == 0);
	if (!item->kept)
		ghost_add(item->shelf, item->key);
	arena->evicted++;
	arena->on_evict(arena->arg, item);
}

/* All content of the slab leaves, and the slab with it. */
static void slab_clear(struct arena *arena, struct arena_slab *slab)
{
	const struct arena_shelf *shelf = slab->shelf;

	assert(slab->pinned == 0);
	for (uint32_t i = 0; i < slab->slots && slab->shelf == shelf; i++) {
		if (!(slab->at[i].next & 1))
			evict(arena, slab->at[i].slot->item);
	}
	assert(!slab->shelf);
}

/* That of the item, else another of its shelf; NULL: each has pinned slots. */
static struct arena_slab *slab_to_clear(const struct arena_item *item)
{
	struct arena_shelf *shelf = item->shelf;
	struct arena_slab *slab =
		list_first(&item->slots, struct arena_slot, of_item)->slab;

	if (slab->shelf == shelf && slab->pinned == 0)
		return slab;
	list_foreach(slab, &shelf->roomy, link) {
		if (slab->pinned == 0)
			return slab;
	}
	list_foreach(slab, &shelf->full, link) {
		if (slab->pinned == 0)
			return slab;
	}
	return NULL;
}

/* The owner's oldest next victim on a shelf other than `but`. */
static struct arena_item *oldest_victim(struct arena_owner *owner,
					const struct arena_shelf *but)
{
	struct arena_item *oldest = NULL;
	struct arena_shelf *shelf;

	list_foreach(shelf, &owner->shelves, link) {
		struct arena_item *item = shelf == but ? NULL : shelf_victim(shelf);

		if (item && (!oldest || item->tick < oldest->tick) && slab_to_clear(item))
			oldest = item;
	}
	return oldest;
}

/* Of those with more than their share, who has most. */
static struct arena_owner *over_share(struct arena *arena, const struct arena_owner *but)
{
	struct arena_owner *owner, *most = NULL;

	list_foreach(owner, &arena->owners, link) {
		if (owner != but && owner->slabs > share(owner) &&
		    (!most || owner->slabs > most->slabs) && oldest_victim(owner, NULL))
			most = owner;
	}
	return most;
}

/* A free slab that others have too many of. Outcome 1: one is free now. */
static int claim_from_others(struct arena_owner *owner)
{
	struct arena_owner *other;

	if (owner->slabs >= share(owner))
		return 0;
	other = over_share(owner->arena, owner);
	if (!other)
		return 0;
	slab_clear(owner->arena, slab_to_clear(oldest_victim(other, NULL)));
	return 1;
}

/* Something of the owner's own leaves. Outcome 1: it did. */
static int evict_own(struct arena_shelf *shelf)
{
	struct arena_owner *owner = shelf->owner;
	struct arena_item *own = shelf_victim(shelf);
	struct arena_item *other = oldest_victim(owner, shelf);

	if (other && (!own || other->tick < own->tick)) {
		slab_clear(owner->arena, slab_to_clear(other));
		return 1;
	}
	if (!own)
		return 0;
	evict(owner->arena, own);
	return 1;
}

static int make_room(struct arena_shelf *shelf)
{
	struct arena *arena = shelf->owner->arena;

	for (unsigned int i = 0; i < TRIES_MAX && list_empty(&shelf->roomy); i++) {
		struct arena_slab *slab =
			list_first(&arena->free, struct arena_slab, link);

		if (slab)
			return slab_join(slab, shelf);
		if (!claim_from_others(shelf->owner) && !evict_own(shelf))
			break;
	}
	if (!list_empty(&shelf->roomy))
		return 0;
	return err_raise(ERR_LIMIT,
			 "no room for chunks: all that may leave is held or in use");
}

int arena_take(struct arena_owner *owner, uint64_t bytes, struct arena_item *item,
	       struct arena_slot *slot)
{
	struct arena *arena = owner->arena;
	uint64_t size = (bytes + GRAIN - 1) / GRAIN * GRAIN;
	struct arena_shelf *shelf;
	int r;

	assert(item->pins > 0 && bytes > 0);
	if (size < arena->slot_least)
		size = arena->slot_least;
	if (size > arena->slab_bytes)
		return err_raise(
			ERR_TOOBIG,
			"a part of a chunk takes %llu bytes, this store's limit is "
			"%llu: take fewer tokens a chunk, or raise chunk_memory",
			(unsigned long long)bytes, (unsigned long long)arena->slab_bytes);
	shelf = shelf_of(owner, size);
	if (!shelf)
		return err_pass(-ENOMEM);
	r = make_room(shelf);
	if (r < 0)
		return err_pass(r);
	slot->item = item;
	slab_take(list_first(&shelf->roomy, struct arena_slab, link), slot);
	list_push_back(&item->slots, &slot->of_item);
	if (!item->shelf) {
		item->shelf = shelf;
		item->kept = ghost_take(shelf, item->key);
	}
	slot_pinned(slot, true);
	return 0;
}
