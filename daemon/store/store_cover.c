/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which classes together hold the needs of a rank is computed by cover; once for each
 * class, and for each set of classes of which none serves by itself, because thousands of
 * chunks have the same. Engines may make another set of each chunk: then a call computes
 * a few, and the chunks after these are misses.
 */
#include "daemon/plan/cover.h"
#include "daemon/store/store_impl.h"

uint64_t store_cover_layouts(const struct store_handle *handle,
			     const struct layout *const *layouts, unsigned int count,
			     bool *lack_p)
{
	struct cover_source sources[STORE_CLASSES_MAX];
	struct layout ranked[STORE_CLASSES_MAX]; /* engines' pools may be of one rank */
	unsigned int index[STORE_CLASSES_MAX], n = 0;
	struct cover *cover mem_cleanup(cover_freep) = NULL;
	uint64_t used = 0;

	for (unsigned int i = 0; i < count && i < STORE_CLASSES_MAX; i++) {
		if (!layouts[i])
			continue;
		if (layout_compatible(layouts[i], handle->canon->layout,
				      &layout_from_source) < 0) {
			err_clear(); /* of other layers' kinds: no source */
			continue;
		}
		ranked[n] = *layouts[i];
		ranked[n].rank = i;
		sources[n].layout = &ranked[n];
		index[n++] = i;
	}
	handle->space->store->covers += n > 0;
	if (n == 0 ||
	    cover_make(sources, n, handle->canon->layout, NULL, 0, 0, &cover) < 0) {
		*lack_p |= n && err_last()->code == ERR_NOMEM;
		err_clear();
		return 0;
	}
	for (unsigned int i = 0; i < n; i++) {
		if (cover->per_source[i].count)
			used |= UINT64_C(1) << index[i];
	}
	return used;
}

/* The classes of `mask` that the cover uses. */
static uint64_t cover_ask(const struct store_handle *handle, uint64_t mask, bool *lack_p)
{
	const struct layout *layouts[STORE_CLASSES_MAX] = {NULL};

	for (unsigned int i = 0; i < STORE_CLASSES_MAX; i++) {
		if (mask >> i & 1)
			layouts[i] = handle->space->classes[i]->canon->layout;
	}
	return store_cover_layouts(handle, layouts, STORE_CLASSES_MAX, lack_p);
}

/* Each class of `mask` by itself, once. */
static void covers_learn(struct store_handle *handle, uint64_t mask)
{
	struct store_covers *covers = &handle->covers;

	for (uint64_t left = mask & ~covers->asked; left; left &= left - 1) {
		unsigned int i = (unsigned int)__builtin_ctzll(left);
		uint64_t bit = UINT64_C(1) << i;
		bool lack = false;

		if (canon_equal(handle->space->classes[i]->canon, handle->canon))
			covers->own |= bit;
		else if (cover_ask(handle, bit, &lack))
			covers->alone |= bit;
		if (!lack)
			covers->asked |= bit;
	}
}

/* Known results. False: none applies. */
static bool covers_know(const struct store_covers *covers, uint64_t mask,
			uint64_t *used_p)
{
	for (unsigned int i = 0; i < STORE_COVERS_MAX; i++) {
		const struct store_cover *one = &covers->of[i];

		*used_p = one->used;
		if (one->used ? !(one->used & ~mask) : one->mask == mask)
			return true;
	}
	return false;
}

/* One class alone if one serves, the own layout first: the longest rows, the fewest
 * rooms. */
static uint64_t cover_some(struct store_handle *handle, uint64_t mask,
			   unsigned int *left_p)
{
	struct store_covers *covers = &handle->covers;
	bool lack = false;
	uint64_t used;

	covers_learn(handle, mask);
	used = mask & covers->own ? mask & covers->own : mask & covers->alone;
	used &= -used;
	if (used || !(mask & (mask - 1)) || covers_know(covers, mask, &used))
		return used;
	if (*left_p == 0)
		return 0;
	--*left_p;
	used = cover_ask(handle, mask, &lack);
	if (used || !lack) /* otherwise a temporary miss: not to be remembered */
		covers->of[covers->next++ % STORE_COVERS_MAX] =
			(struct store_cover){.mask = mask, .used = used};
	return used;
}

/* The store's own slots first: they stay while held. */
uint64_t store_cover_some(struct store_handle *handle, uint64_t mask,
			  unsigned int *left_p)
{
	struct store_covers *covers = &handle->covers;
	uint64_t kept = mask & ~handle->space->published, used;

	if (covers->changes != handle->space->class_changes)
		*covers = (struct store_covers){.changes = handle->space->class_changes};
	used = kept ? cover_some(handle, kept, left_p) : 0;
	return used || kept == mask ? used : cover_some(handle, mask, left_p);
}

uint64_t store_cover(struct store_handle *handle, uint64_t mask)
{
	unsigned int left = 2; /* kept ones, and all */

	return store_cover_some(handle, mask, &left);
}
