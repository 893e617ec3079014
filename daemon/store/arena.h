/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arena: which bytes of a fixed memory are whose slots, and which item is evicted when a
 * slot is wanted and none is free.
 *
 * The memory is cut into equal slabs. A slab belongs to one shelf (an owner's slots of
 * one size) until all of its slots are free. Slots contain items: an item has slots of
 * one owner, perhaps on several shelves, and is evicted as a whole.
 *
 * Each owner has an equal share of the slabs, at least one: with more owners than slabs,
 * an owner gets less than its share. An owner may have more while no other owner needs
 * the slabs. The excess is evicted first: an owner within its share loses nothing to
 * others.
 *
 * Pure; callbacks are called from inside arena_take() alone.
 */
#ifndef KVD_STORE_ARENA_H
#define KVD_STORE_ARENA_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/list.h"

#define ARENA_SLABS 128u

struct arena;
struct arena_owner;
struct arena_shelf;
struct arena_slab;

/* Content: embedded in its owner. */
struct arena_item {
	struct list link;	   /* in a queue of its shelf's, or unlinked */
	struct list slots;	   /* struct arena_slot.of_item */
	struct arena_shelf *shelf; /* of the first slot; NULL: none yet */
	uint64_t key;  /* a hash, recognized when evicted content is added again */
	uint64_t tick; /* when it was queued at the end */
	uint32_t pins;
	uint8_t hits; /* 0 … 3, since then */
	bool kept;    /* was hit: it is of the main queue */
};

struct arena_slot {
	struct list of_item;
	struct arena_item *item;
	struct arena_slab *slab; /* NULL: none */
	uint32_t index;
};

/* `bytes` of memory: at least ARENA_SLABS grains of 4 KiB are used. on_evict: the item is
 * evicted: give back its slots. */
int arena_new(uint64_t bytes, void (*on_evict)(void *arg, struct arena_item *item),
	      void *arg, struct arena **arena_p);
void arena_free(struct arena *arena); /* no slot is taken */

/* The largest slot that it has. */
uint64_t arena_slot_most(const struct arena *arena);

int arena_owner_new(struct arena *arena, struct arena_owner **owner_p);
/* More sizes than a few have been used and have no slots now. */
bool arena_crowded(const struct arena *arena);
/* Forgets such sizes. Not from inside arena_take(). NULL is fine. */
void arena_tidy(struct arena *arena);
void arena_owner_free(struct arena_owner *owner);	      /* has no slots */
uint64_t arena_owner_bytes(const struct arena_owner *owner);  /* of its slabs */
uint64_t arena_owner_share(const struct arena_owner *owner);  /* safe from other owners */
uint64_t arena_owner_pinned(const struct arena_owner *owner); /* of slots */

void arena_item_init(struct arena_item *item, uint64_t key);
/* A slot for the item, which is pinned. Unpinned content is evicted for it. ARENA_LATER:
 * a part of it was evicted; call again, in this turn or another. ERR_TOOBIG; ERR_LIMIT:
 * all evictable content is pinned; ERR_NOMEM. */
enum { ARENA_LATER = 1 };
int arena_take_some(struct arena_owner *owner, uint64_t bytes, struct arena_item *item,
		    struct arena_slot *slot);
/* The same in one turn, which may be long. */
static inline int arena_take(struct arena_owner *owner, uint64_t bytes,
			     struct arena_item *item, struct arena_slot *slot)
{
	int r;

	do
		r = arena_take_some(owner, bytes, item, slot);
	while (r == ARENA_LATER);
	return r;
}
void arena_give(struct arena_slot *slot); /* idempotent */
uint64_t arena_offset(const struct arena_slot *slot);

/* ---- of memory whose slabs are files ---- */
uint32_t arena_slab_of(const struct arena_slot *slot);
/* Of its slots; 0: unowned. */
uint64_t arena_slab_size(const struct arena *arena, uint32_t slab);
uint64_t arena_slab_owner(const struct arena *arena, uint32_t slab); /* a serial; 0 */
/* Of the slot that so many bytes take. */
uint64_t arena_slot_size(const struct arena *arena, uint64_t bytes);
/* This very slot, of an unowned slab or one that has slots of that size and owner, as
 * arena_take(). Within a slab in rising order. ERR_EXIST, ERR_RANGE, ERR_NOMEM. */
int arena_place(struct arena_owner *owner, uint64_t bytes, uint32_t slab, uint32_t index,
		struct arena_item *item, struct arena_slot *slot);
/* At most so many slabs are in use at a time, or as many as are now. */
void arena_limit(struct arena *arena, uint32_t slabs);
uint32_t arena_slabs_used(const struct arena *arena);

/* Pinned content is never evicted. Unpinned content moves to the end of its queue. Of a
 * chain of content unpin the end first: it is evicted first. */
void arena_pin(struct arena_item *item);
void arena_unpin(struct arena_item *item);
void arena_touch(struct arena_item *item); /* it was requested */
/* Removes it from its queue: its owner frees it. No pins, no slots. */
void arena_item_fini(struct arena_item *item);

struct arena_figures {
	uint64_t slab_bytes, slabs_free;
	uint64_t evicted; /* items, ever */
	uint64_t looks;	  /* slots scanned for free ones */
	uint64_t ghosts;  /* keys that can be remembered */
};
void arena_figures(const struct arena *arena, struct arena_figures *figures_p);

#endif
