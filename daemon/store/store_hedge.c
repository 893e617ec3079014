/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A late subtransfer has a second source: the other daemon that holds its chunks. Two
 * sources never write the same pages, so the hedge fills slots of the memory, as a put
 * does. If it completes first, the late subtransfer is ended, and once it is quiesced the
 * chunks are fetched from memory. Otherwise the hedge is of no use, unless others pin its
 * chunks too: a fetch that hedges chunks which are being filled already waits for those,
 * and requests the rest.
 *
 * It is a move of its own, and no move waits for its end: a fetch whose subtransfer has
 * completed is over, however long the other daemon takes to release.
 *
 * Chunks pinned by a hedge are space that puts lack: none starts when more than half of
 * the user's share is pinned.
 */
#include "daemon/base/context.h"
#include "daemon/config/config.h"
#include "daemon/store/far.h"
#include "daemon/store/store_impl.h"

static int hedge_chunk(const struct store_move *fetch, uint32_t i,
		       struct store_chunk **chunk_p)
{
	const struct store_hold *hold = fetch->hold;
	uint64_t place = fetch->first + i;
	const uint8_t *id =
		hold->far_ids +
		(size_t)(store_entry_place(fetch, i) - hold->here) * STORE_ID_BYTES;

	return err_pass(store_chunk_get(hold->handle->space, id,
					hold->anywhere ? STORE_ANYWHERE : place,
					fetch->entries[i].tokens, chunk_p));
}

/* A slot for one chunk of the subtransfer; chunks in memory, or being loaded, are
 * skipped. The hedge does not wait for parts that an engine fills. */
static int hedge_entry(struct store_move *hedge, struct store_move *fetch, uint32_t i)
{
	struct store_entry *own = &fetch->entries[i],
			   *entry = &hedge->entries[hedge->count];
	struct store_part *part;
	int r = own->chunk ? 0 : hedge_chunk(fetch, i, &own->chunk);

	if (r < 0)
		return err_pass(r);
	entry->chunk = own->chunk;
	entry->tokens = own->tokens;
	store_chunk_pin(entry->chunk);
	hedge->count++;
	part = store_part_find(entry->chunk, hedge->class);
	if (store_cover(hedge->handle, store_chunk_ready(entry->chunk)))
		return 0;
	if (part && part->file != PART_UNFILED)
		return err_pass(store_part_load(part));
	if (part)
		return part->memory == PART_HEDGING
			       ? 0
			       : err_raise(ERR_BUSY, "an engine is writing it");
	if (entry->chunk->gone)
		return err_raise(ERR_NOTFOUND, "the chunk was dropped");
	return err_pass(
		store_part_new(entry->chunk, hedge->class, PART_HEDGING, &entry->part));
}

static int hedge_new(struct store_move *fetch, const struct store_leg *leg,
		     struct far_hold *from)
{
	struct store_move_args args = {.pool = NULL};
	struct store_move *hedge;
	int r = store_move_new(fetch->handle, STORE_HEDGE, leg->count, &args, &hedge);

	if (r < 0)
		return err_pass(r);
	hedge->dropped = true; /* freed when it has ended */
	hedge->hold = fetch->hold;
	store_hold_ref(hedge->hold);
	hedge->from = from;
	hedge->first = fetch->first + leg->first;
	hedge->begin = hedge->end = hedge->first * fetch->handle->space->tokens;
	list_push_back(&fetch->store->hedges, &hedge->hedge_link);
	if (!hedge->class->pool)
		list_push_back(&hedge->class->waiting, &hedge->class_wait.link);
	for (uint32_t i = leg->first; i < leg->first + leg->count && r >= 0; i++) {
		r = hedge_entry(hedge, fetch, i);
		hedge->end += fetch->entries[i].tokens;
	}
	if (r < 0) {
		struct err why;

		err_take(&why);
		store_move_abort(hedge, &why);
	}
	store_move_begin(hedge, 0);
	return hedge->error.code == ERR_OK;
}

void store_hedge(struct store_leg *leg)
{
	struct store_move *move = leg->move;
	const struct arena_owner *owner = move->handle->space->tenant->owner;
	struct store *store = move->store;
	const struct store_hold *hold = move->hold;
	struct far_hold *from = far_hold_other(
		hold->far, leg->far, store_entry_place(move, leg->first), leg->count);
	int r;

	if (!from || leg->error.code != ERR_OK || store->kvd->draining ||
	    !store->kvd->config->chunk_hedge ||
	    arena_owner_pinned(owner) > arena_owner_share(owner) / 2)
		return;
	/* a second pull from a paused daemon is no guess */
	if ((!far_is_left_out(store->far, far_hold_remote(leg->far)) ||
	     far_is_left_out(store->far, far_hold_remote(from))) &&
	    !pace_budget_spend(&store->hedging))
		return;
	leg->hedged = true;
	store_move_park(move);
	r = hedge_new(move, leg, from);
	if (r < 0)
		err_clear(); /* continue without it */
	store->figures.remote.hedges += r > 0;
}

static bool leg_is_there(const struct store_leg *leg)
{
	const struct store_move *move = leg->move;
	uint32_t i = leg->first;

	while (i < leg->first + leg->count && move->entries[i].chunk &&
	       store_cover(move->handle, store_chunk_ready(move->entries[i].chunk)))
		i++;
	return i == leg->first + leg->count;
}

void store_hedge_overtakes(struct store_move *move)
{
	struct store_leg *leg;
	struct err why;

	list_foreach(leg, &move->legs, link) {
		if (!leg->hedged || leg->error.code != ERR_OK || !leg_is_there(leg))
			continue;
		err_set(&why, ERR_CANCELED, "another daemon's chunks arrived first");
		leg->beaten = true;
		store_leg_abort(leg, &why);
	}
}

/* Do others pin the chunks that it fills? */
static bool hedge_is_wanted(const struct store_move *hedge)
{
	for (uint32_t i = 0; i < hedge->count; i++) {
		const struct store_entry *entry = &hedge->entries[i];

		if (entry->part && entry->chunk->item.pins > 1)
			return true;
	}
	return false;
}

static void hedges_look(struct store *store)
{
	struct store_move *hedge;
	struct err why;

	err_set(&why, ERR_CANCELED, "no longer needed");
	list_foreach_safe(hedge, &store->hedges, hedge_link) {
		if (!hedge_is_wanted(hedge))
			store_move_abort(hedge, &why);
	}
}

void store_hedge_let_go(struct store_move *move, uint32_t first, uint32_t count)
{
	bool any = false;

	for (uint32_t i = first + count; i-- > first;) {
		struct store_entry *entry = &move->entries[i];

		if (!entry->chunk || !store_entry_far(move, i))
			continue;
		store_chunk_unpin(entry->chunk);
		entry->chunk = NULL;
		any = true;
	}
	if (any)
		hedges_look(move->store);
}
