/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slabs, because runs of any length fragment when some of them are pinned, and because an
 * emptied slab can serve any size.
 *
 * Victims are chosen by S3-FIFO (Yang et al., SOSP 2023), with a pair of queues a shelf.
 * New content enters the small queue, which has a tenth. Content with a hit moves on to
 * the main queue. The rest is evicted and its key is remembered for a while; if it is
 * added again meanwhile, it enters the main queue. A hit in the main queue earns another
 * round. Only unpinned content is in a queue, so a victim is always available. A round is
 * bounded: otherwise a full main queue of hits would be scanned three times.
 *
 * An owner with several shelves (ranks of another tensor parallelism, another chunk
 * length) would keep slabs of sizes that are no longer written. So a shelf without free
 * slots compares its next victim with those of the owner's other shelves; if another's is
 * older, a slab of that shelf is cleared.
 */
#include "daemon/store/arena.h"

#include <assert.h>
#include <errno.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define GRAIN UINT64_C(4096)
#define SLOTS_MAX (1u << 20) /* of the whole arena: the limit of the index */
#define SMALL_SHARE 10u	     /* a tenth of the evictable content */
#define HITS_MAX 3u
#define ROUND_MAX 1024u /* second chances for one victim: a chain's length */
#define TRIES_MAX 256u	/* victims for one slot */
#define CLEAR_MAX 32u	/* items of a slab evicted in one arena_take_some() */
#define NO_INDEX UINT32_MAX
#define GHOSTS_LEAST 64u
#define IDLE_MAX 4u /* shelves without slots that remember evicted keys */

struct arena_slab {
	struct list link;		   /* free, or in its shelf: with room, or full */
	struct arena_shelf *shelf;	   /* NULL: free */
	struct arena_owner *pending_owner; /* it takes no more content, and is this one's
					   once it is empty */
	uint64_t offset;
	uint32_t slots, used;
	uint32_t pinned;  /* slots of pinned items */
	uint32_t free;	  /* the first free index; NO_INDEX: none */
	uint32_t placed;  /* arena_place(): the free index before the last one */
	uint32_t cleared; /* with a next owner: evicted up to this index */
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
	uint32_t slabs, slots;
	struct list small, main; /* items */
	uint32_t small_count, main_count;
	uint64_t *ghosts; /* keys of evicted content, by key */
	uint64_t ghost_mask;
	bool has_ghosts; /* there is one */
};

struct arena_owner {
	struct list link;
	struct arena *arena;
	struct list shelves;
	uint64_t serial;
	uint32_t slabs;
	struct arena_slab *awaits; /* the slab that it gets next */
	uint64_t pinned_bytes;
};

struct arena {
	struct arena_slab slabs[ARENA_SLABS];
	uint32_t slab_count;
	uint64_t slab_bytes, slot_least;
	struct list free;
	uint32_t free_count, limit; /* limit: of slabs that are not free */
	struct list owners;
	uint32_t owner_count;
	uint64_t owners_ever;
	uint64_t tick, evicted;
	uint32_t waiting_owners; /* owners that await a slab */
	uint32_t idle;		 /* shelves without a slab */
	uint64_t looks;		 /* slots scanned for evictable content */
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
	arena->free_count = arena->limit = arena->slab_count;
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

static uint64_t arena_ghosts(const struct arena *arena)
{
	const struct arena_owner *owner;
	const struct arena_shelf *shelf;
	uint64_t ghosts = 0;

	list_foreach(owner, &arena->owners, link) {
		list_foreach(shelf, &owner->shelves, link)
			ghosts += shelf->ghost_mask + 1;
	}
	return ghosts;
}

void arena_figures(const struct arena *arena, struct arena_figures *figures_p)
{
	*figures_p = (struct arena_figures){.slab_bytes = arena->slab_bytes,
					    .slabs_free = arena->free_count,
					    .evicted = arena->evicted,
					    .looks = arena->looks,
					    .ghosts = arena_ghosts(arena)};
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
	owner->serial = ++arena->owners_ever;
	*owner_p = owner;
	return 0;
}

static void shelf_free(struct arena_shelf *shelf)
{
	assert(shelf->slabs == 0 && list_empty(&shelf->small) &&
	       list_empty(&shelf->main));
	shelf->owner->arena->idle--;
	list_remove(&shelf->link);
	mem_free(shelf->ghosts);
	mem_free(shelf);
}

/* It has no next owner any more. */
static void slab_restore(struct arena_slab *slab)
{
	if (!slab)
		return;
	slab->pending_owner->awaits = NULL;
	slab->pending_owner->arena->waiting_owners--;
	slab->pending_owner = NULL;
	list_remove(&slab->link);
	list_push_back(slab->free == NO_INDEX ? &slab->shelf->full : &slab->shelf->roomy,
		       &slab->link);
}

void arena_owner_free(struct arena_owner *owner)
{
	struct arena_shelf *shelf;

	if (!owner)
		return;
	assert(owner->slabs == 0 && owner->pinned_bytes == 0);
	slab_restore(owner->awaits);
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

bool arena_crowded(const struct arena *arena)
{
	return arena->idle > IDLE_MAX;
}

void arena_tidy(struct arena *arena)
{
	struct arena_owner *owner;
	struct arena_shelf *shelf;

	if (!arena)
		return;
	list_foreach(owner, &arena->owners, link) {
		list_foreach_safe(shelf, &owner->shelves, link) {
			if (shelf->slabs == 0)
				shelf_free(shelf);
		}
	}
}

/* Of the usable slabs; at least one, as an owner's only slab must be within its share. */
static uint32_t share(const struct arena_owner *owner)
{
	const struct arena *arena = owner->arena;
	uint32_t slabs =
		arena->limit < arena->slab_count ? arena->limit : arena->slab_count;

	return slabs > arena->owner_count ? slabs / arena->owner_count : 1;
}

uint64_t arena_owner_share(const struct arena_owner *owner)
{
	return share(owner) * owner->arena->slab_bytes;
}

uint64_t arena_owner_pinned(const struct arena_owner *owner)
{
	return owner->pinned_bytes;
}

/* As many as it has slots, so that all shelves together remember a few integers for each
 * slot that the memory may be cut into, whoever owns them. Shrinks only below half, so
 * that a change of a slab more or fewer does not copy them each time. Without memory for
 * new ones the old ones stay, too. */
static void ghosts_fit(struct arena_shelf *shelf)
{
	uint64_t have = shelf->ghost_mask + 1, want = GHOSTS_LEAST;
	uint64_t *ghosts;

	while (want < shelf->slots)
		want *= 2;
	if (have == want || have == 2 * want)
		return;
	ghosts = mem_calloc(want, sizeof(*ghosts));
	if (!ghosts) {
		err_clear();
		return;
	}
	for (uint64_t i = 0; i < have && shelf->has_ghosts; i++) {
		if (shelf->ghosts[i])
			ghosts[shelf->ghosts[i] & (want - 1)] = shelf->ghosts[i];
	}
	mem_free(shelf->ghosts);
	shelf->ghosts = ghosts;
	shelf->ghost_mask = want - 1;
}

static struct arena_shelf *shelf_of(struct arena_owner *owner, uint64_t slot_bytes)
{
	struct arena_shelf *shelf;

	list_foreach(shelf, &owner->shelves, link) {
		if (shelf->slot_bytes == slot_bytes)
			return shelf;
	}
	shelf = mem_zalloc(sizeof(*shelf));
	if (!shelf)
		return NULL;
	shelf->ghosts = mem_calloc(GHOSTS_LEAST, sizeof(*shelf->ghosts));
	if (!shelf->ghosts) {
		mem_free(shelf);
		return NULL;
	}
	shelf->ghost_mask = GHOSTS_LEAST - 1;
	shelf->owner = owner;
	shelf->slot_bytes = slot_bytes;
	list_init(&shelf->roomy);
	list_init(&shelf->full);
	list_init(&shelf->small);
	list_init(&shelf->main);
	list_push_back(&owner->shelves, &shelf->link);
	owner->arena->idle++;
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
	slab->placed = NO_INDEX;
	slab->shelf = shelf;
	list_remove(&slab->link);
	list_push_back(&shelf->roomy, &slab->link);
	arena->free_count--;
	arena->idle -= shelf->slabs++ == 0;
	shelf->slots += slab->slots;
	ghosts_fit(shelf);
	shelf->owner->slabs++;
	slab_restore(shelf->owner->awaits); /* it has one now */
	return 0;
}

/* An owner within its share gives nothing. */
static void owner_restore_slabs(struct arena_owner *owner)
{
	struct arena *arena = owner->arena;

	if (!arena->waiting_owners || owner->slabs > share(owner))
		return;
	for (uint32_t i = 0; i < arena->slab_count; i++) {
		struct arena_slab *slab = &arena->slabs[i];

		if (slab->pending_owner && slab->shelf->owner == owner)
			slab_restore(slab);
	}
}

static void slab_leave(struct arena_slab *slab)
{
	struct arena_shelf *shelf = slab->shelf;
	struct arena *arena = shelf->owner->arena;

	assert(slab->used == 0 && slab->pinned == 0);
	arena->idle += --shelf->slabs == 0;
	shelf->slots -= slab->slots;
	if (shelf->slabs) /* otherwise it keeps its keys, or is freed (IDLE_MAX) */
		ghosts_fit(shelf);
	shelf->owner->slabs--;
	if (slab->pending_owner) {
		slab->pending_owner->awaits = NULL;
		arena->waiting_owners--;
	}
	slab->pending_owner = NULL;
	mem_free(slab->at);
	slab->at = NULL;
	slab->shelf = NULL;
	list_remove(&slab->link);
	list_push_front(&arena->free, &slab->link); /* its pages are warm */
	arena->free_count++;
	owner_restore_slabs(shelf->owner);
}

static void slab_take(struct arena_slab *slab, struct arena_slot *slot)
{
	assert(slab->free != NO_INDEX);
	slot->slab = slab;
	slot->index = slab->free;
	slab->free = (uint32_t)(slab->at[slot->index].next >> 1);
	slab->at[slot->index].slot = slot;
	slab->used++;
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

/* Puts it into a queue of a shelf that it has a slot of. */
static void item_settle(struct arena_item *item)
{
	bool queued = !list_empty(&item->link);
	const struct arena_slot *slot;

	list_foreach(slot, &item->slots, of_item) {
		if (slot->slab->shelf == item->shelf)
			return;
	}
	queue_leave(item);
	slot = list_first(&item->slots, struct arena_slot, of_item);
	item->shelf = slot ? slot->slab->shelf : NULL; /* its shelf may be freed */
	if (queued && slot)
		queue_join(item);
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
	item_settle(item);
	slab->at[slot->index].next = (uintptr_t)slab->free << 1 | 1;
	if (slab->free == NO_INDEX && !slab->pending_owner) {
		list_remove(&slab->link);
		list_push_back(&slab->shelf->roomy, &slab->link);
	}
	slab->free = slot->index;
	slab->used--;
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

static bool ghost_take(struct arena_shelf *shelf, uint64_t key)
{
	uint64_t *at = &shelf->ghosts[key & shelf->ghost_mask];

	if (*at != key)
		return false;
	*at = 0;
	return true;
}

/* The next victim, still in its queue; NULL: all are pinned. */
static struct arena_item *shelf_victim(struct arena_shelf *shelf)
{
	for (unsigned int round = 0;; round++) {
		uint32_t queued = shelf->small_count + shelf->main_count;
		bool small = shelf->small_count * SMALL_SHARE > queued ||
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
	if (!item->kept) {
		item->shelf->ghosts[item->key & item->shelf->ghost_mask] = item->key;
		item->shelf->has_ghosts = true;
	}
	queue_leave(item);
	arena->evicted++;
	arena->on_evict(arena->arg, item);
}

/* Unpinned content of the slab, in slot *at_p or after it, which becomes its slot. Its
 * queue may be another shelf's. */
static struct arena_item *slab_unpinned(const struct arena_slab *slab, uint32_t *at_p)
{
	for (uint32_t i = *at_p; i < slab->slots && slab->pinned < slab->used; i++) {
		slab->shelf->owner->arena->looks++;
		*at_p = i;
		if (!(slab->at[i].next & 1) && slab->at[i].slot->item->pins == 0)
			return slab->at[i].slot->item;
	}
	return NULL;
}

/* That of the shelf's next victim, else another; NULL: each has pinned slots. */
static struct arena_slab *slab_to_clear(struct arena_shelf *shelf, uint64_t *tick_p)
{
	const struct arena_item *item = shelf_victim(shelf);
	const struct arena_slot *slot;
	struct arena_slab *slab;
	uint32_t at = 0;

	*tick_p = item ? item->tick : 0;
	if (item) {
		list_foreach(slot, &item->slots, of_item) {
			if (slot->slab->shelf == shelf && slot->slab->pinned == 0)
				return slot->slab;
		}
	}
	list_foreach(slab, &shelf->roomy, link) {
		if (slab->pinned == 0)
			goto out;
	}
	list_foreach(slab, &shelf->full, link) {
		if (slab->pinned == 0)
			goto out;
	}
	return NULL;
out:
	if (!item)
		*tick_p = slab_unpinned(slab, &at)->tick;
	return slab;
}

/* The owner's that has waited longest, except on the shelf `but`. */
static struct arena_slab *oldest_slab(struct arena_owner *owner,
				      const struct arena_shelf *but, uint64_t *tick_p)
{
	struct arena_slab *oldest = NULL;
	struct arena_shelf *shelf;

	*tick_p = UINT64_MAX;
	list_foreach(shelf, &owner->shelves, link) {
		uint64_t tick;
		struct arena_slab *slab =
			shelf == but ? NULL : slab_to_clear(shelf, &tick);

		if (slab && tick < *tick_p) {
			oldest = slab;
			*tick_p = tick;
		}
	}
	return oldest;
}

/* It takes no more content, and is the next owner's when all of it was evicted: see
 * pending_owner_clears(). */
static void slab_clear(struct arena_slab *slab, struct arena_owner *pending_owner)
{
	if (slab->pending_owner)
		slab_restore(slab);
	if (pending_owner->awaits)
		slab_restore(pending_owner->awaits);
	slab->cleared = 0;
	slab->pending_owner = pending_owner;
	pending_owner->awaits = slab;
	pending_owner->arena->waiting_owners++;
	list_remove(&slab->link);
	list_push_back(&slab->shelf->full, &slab->link);
}

/* Evicts unpinned content in the slab that the owner awaits, some of it a call. True:
 * some was evicted. */
static bool pending_owner_clears(const struct arena_owner *owner)
{
	struct arena_slab *slab = owner->awaits;
	struct arena_item *item;
	unsigned int n = 0;

	while (n < CLEAR_MAX && slab && slab->pending_owner == owner &&
	       (item = slab_unpinned(slab, &slab->cleared))) {
		evict(owner->arena, item);
		n++;
	}
	return n > 0;
}

/* Each slab of an owner over its share has pins. One of them takes no more content and
 * its unpinned content is evicted; once the rest is unpinned, the slab is the next
 * owner's. One at a time. */
static int slab_reassign(struct arena_owner *from, struct arena_owner *pending_owner)
{
	struct arena_slab *best = NULL;

	for (uint32_t i = 0; i < from->arena->slab_count; i++) {
		struct arena_slab *slab = &from->arena->slabs[i];

		if (slab->shelf && slab->shelf->owner == from && !slab->pending_owner &&
		    (!best || slab->pinned < best->pinned))
			best = slab;
	}
	if (best)
		slab_clear(best, pending_owner);
	return best != NULL;
}

/* A free slab of another owner over its share: the one with the most slabs gives. Outcome
 * 1: one is being cleared. */
static int claim_from_others(struct arena_owner *owner)
{
	struct arena_slab *slab = NULL;
	struct arena_owner *other, *rich = NULL;
	uint32_t most = share(owner);

	if (owner->slabs >= most)
		return 0;
	list_foreach(other, &owner->arena->owners, link) {
		uint64_t tick;
		struct arena_slab *its =
			other->slabs > most ? oldest_slab(other, NULL, &tick) : NULL;

		if (its) {
			slab = its;
			most = other->slabs;
		}
		if (other->slabs > (rich ? rich->slabs : share(owner)))
			rich = other;
	}
	if (slab)
		slab_clear(slab, owner);
	else if (rich && !owner->awaits)
		return slab_reassign(rich, owner);
	return slab != NULL;
}

static struct arena_item *own_victim(struct arena_shelf *shelf)
{
	struct arena_item *item = shelf_victim(shelf);
	const struct arena_slab *slab;

	list_foreach(slab, &shelf->full, link) {
		uint32_t at = 0;

		if (item)
			break;
		item = slab_unpinned(slab, &at);
	}
	return item;
}

/* Evicts content of the owner's own. Outcome 1: done, or in progress. */
static int evict_own(struct arena_shelf *shelf)
{
	struct arena_owner *owner = shelf->owner;
	struct arena_item *own = own_victim(shelf);
	uint64_t tick;
	struct arena_slab *slab = oldest_slab(owner, shelf, &tick);

	if (slab && (!own || tick < own->tick)) {
		slab_clear(slab, owner);
		return 1;
	}
	if (!own)
		return 0;
	evict(owner->arena, own);
	return 1;
}

static int shelf_make_room(struct arena_shelf *shelf)
{
	struct arena *arena = shelf->owner->arena;

	for (unsigned int i = 0; i < TRIES_MAX && list_empty(&shelf->roomy); i++) {
		struct arena_slab *slab =
			list_first(&arena->free, struct arena_slab, link);

		if (slab && arena->slab_count - arena->free_count < arena->limit)
			return err_pass(slab_join(slab, shelf));
		if (pending_owner_clears(shelf->owner))
			return ARENA_LATER;
		if (!claim_from_others(shelf->owner) && !evict_own(shelf))
			break;
	}
	if (!list_empty(&shelf->roomy))
		return 0;
	return err_raise(ERR_LIMIT, "no free slot: all chunks are held or in use");
}

uint64_t arena_slot_size(const struct arena *arena, uint64_t bytes)
{
	uint64_t size = (bytes + GRAIN - 1) / GRAIN * GRAIN;

	return size < arena->slot_least ? arena->slot_least : size;
}

/* The slot is the item's. */
static void slot_join(struct arena_slot *slot, struct arena_item *item)
{
	struct arena_shelf *shelf = slot->slab->shelf;

	slot->item = item;
	list_push_back(&item->slots, &slot->of_item);
	if (!item->shelf) {
		item->shelf = shelf;
		item->kept = ghost_take(shelf, item->key);
	}
	slot_pinned(slot, true);
}

int arena_take_some(struct arena_owner *owner, uint64_t bytes, struct arena_item *item,
		    struct arena_slot *slot)
{
	struct arena *arena = owner->arena;
	uint64_t size = arena_slot_size(arena, bytes);
	struct arena_shelf *shelf;
	int r;

	assert(item->pins > 0 && bytes > 0);
	if (bytes > arena->slab_bytes) /* `size` may have wrapped */
		return err_raise(
			ERR_TOOBIG,
			"a part of a chunk takes %llu bytes (limit %llu); use fewer "
			"tokens per chunk, or raise chunk_memory",
			(unsigned long long)bytes, (unsigned long long)arena->slab_bytes);
	shelf = shelf_of(owner, size);
	if (!shelf)
		return err_pass(-ENOMEM);
	r = shelf_make_room(shelf);
	if (r != 0)
		return r < 0 ? err_pass(r) : r;
	slab_take(list_first(&shelf->roomy, struct arena_slab, link), slot);
	slot_join(slot, item);
	return 0;
}

/* ---- slabs that are files ---- */

uint32_t arena_slab_of(const struct arena_slot *slot)
{
	return (uint32_t)(slot->slab - slot->slab->shelf->owner->arena->slabs);
}

uint64_t arena_slab_size(const struct arena *arena, uint32_t slab)
{
	const struct arena_shelf *shelf = arena->slabs[slab].shelf;

	return shelf ? shelf->slot_bytes : 0;
}

uint64_t arena_slab_owner(const struct arena *arena, uint32_t slab)
{
	const struct arena_shelf *shelf = arena->slabs[slab].shelf;

	return shelf ? shelf->owner->serial : 0;
}

void arena_limit(struct arena *arena, uint32_t slabs)
{
	arena->limit = slabs;
}

uint32_t arena_slabs_used(const struct arena *arena)
{
	return arena->slab_count - arena->free_count;
}

static uint32_t free_behind(const struct arena_slab *slab, uint32_t index)
{
	return index == NO_INDEX ? slab->free : (uint32_t)(slab->at[index].next >> 1);
}

/* Removes it from the list of free ones, which is sorted up to it. */
static int slab_pick(struct arena_slab *slab, uint32_t index)
{
	uint32_t next = free_behind(slab, slab->placed);

	while (next < index) { /* NO_INDEX is none of them */
		slab->placed = next;
		next = free_behind(slab, next);
	}
	if (next != index)
		return err_raise(ERR_EXIST, "slot %u of this slab is in use", index);
	next = free_behind(slab, index);
	if (slab->placed == NO_INDEX)
		slab->free = next;
	else
		slab->at[slab->placed].next = (uintptr_t)next << 1 | 1;
	return 0;
}

int arena_place(struct arena_owner *owner, uint64_t bytes, uint32_t slab, uint32_t index,
		struct arena_item *item, struct arena_slot *slot)
{
	struct arena *arena = owner->arena;
	uint64_t size = arena_slot_size(arena, bytes);
	struct arena_shelf *shelf;
	struct arena_slab *at;
	int r = 0;

	assert(item->pins > 0);
	if (slab >= arena->slab_count || bytes > arena->slab_bytes ||
	    index >= arena->slab_bytes / size)
		return err_raise(ERR_RANGE, "slab %u has no slot %u of %llu bytes", slab,
				 index, (unsigned long long)size);
	at = &arena->slabs[slab];
	shelf = shelf_of(owner, size);
	if (!shelf)
		return err_pass(-ENOMEM);
	if (!at->shelf)
		r = slab_join(at, shelf);
	else if (at->shelf != shelf)
		r = err_raise(ERR_EXIST, "slab %u belongs to another user", slab);
	if (r >= 0)
		r = slab_pick(at, index);
	if (r < 0)
		return err_pass(r);
	slot->slab = at;
	slot->index = index;
	at->at[index].slot = slot;
	at->used++;
	if (at->free == NO_INDEX) {
		list_remove(&at->link);
		list_push_back(&shelf->full, &at->link);
	}
	slot_join(slot, item);
	return 0;
}
