/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Names are evicted as bytes are. The numbers of spaces, kinds of parts and users in a
 * store are limited, and engines make new ones all the time: each update of a model's
 * weights is another revision. When the limit is reached, the space that has been unused
 * for longest is evicted, of the users with more than an equal share; if all of these are
 * in use, one of the requesting user. A space stays while a session has it open, another
 * daemon queries its chunks, or one of them is pinned or in an engine's pages.
 *
 * An evicted space can no longer be found and does not count. Its chunks, up to a
 * million, are freed in later turns.
 *
 * Spaces found in files at a start have no users, so the age of their parts counts: the
 * latest stay.
 */
#include <assert.h>

#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/store/files_class.h"
#include "daemon/store/store_impl.h"

#define SLICE STORE_IDS_MAX /* parts a turn */

/* ---- order of eviction ---- */

static uint64_t space_generation(const struct store_space *space)
{
	uint64_t generation = 0;

	for (unsigned int i = 0; i < STORE_CLASSES_MAX; i++) {
		const struct store_class *class = space->classes[i];

		if (class && class->generation > generation)
			generation = class->generation;
	}
	return generation;
}

static bool is_older(uint64_t used, uint64_t generation, uint64_t than_used,
		     uint64_t than_generation)
{
	return used != than_used ? used < than_used : generation < than_generation;
}

static bool class_may_leave(const struct store_class *class)
{
	return !class->published && !class->layout && list_empty(&class->waiting);
}

static bool space_may_leave(const struct store_space *space, uint64_t generation)
{
	if (space->handles || space->pinned || space->published ||
	    (generation != STORE_NOW &&
	     (space->used || space_generation(space) >= generation)))
		return false;
	for (unsigned int i = 0; i < STORE_CLASSES_MAX; i++) {
		if (space->classes[i] && !class_may_leave(space->classes[i]))
			return false;
	}
	return true;
}

/* ---- spaces ---- */

static void space_leave(struct store_space *space)
{
	struct store_tenant *tenant = space->tenant;
	struct store *store = space->store;

	log_debug("store", space->model, "a space is evicted for another one",
		  "revision=\"%s\" chunks=%llu", space->revision,
		  (unsigned long long)space->chunks);
	list_remove(&space->link);
	list_push_back(&store->going, &space->link);
	space->going = true;
	store->space_count--;
	tenant->spaces--;
	tenant->going++;
	store->class_count -= space->class_count;
	tenant->classes -= space->class_count;
	for (unsigned int i = 0; i < STORE_CLASSES_MAX; i++) {
		struct store_class *class = space->classes[i];

		if (class && class->words && class->words->class == class)
			class->words->class = NULL;
	}
	store->figures.spaces_evicted++;
	loop_defer(store->kvd->loop, &store->going_go);
}

/* Of this tenant; NULL: of those with more than their share. */
static struct store_space *space_oldest(const struct store *store,
					const struct store_tenant *tenant,
					uint64_t generation, bool classes)
{
	unsigned int share = STORE_SPACES_MAX / store->tenant_count;
	struct store_space *space, *oldest = NULL;

	list_foreach(space, &store->spaces, link) {
		if ((tenant ? space->tenant != tenant : space->tenant->spaces <= share) ||
		    (classes && !space->class_count) ||
		    !space_may_leave(space, generation))
			continue;
		if (!oldest || is_older(space->used, space_generation(space),
					oldest->used, space_generation(oldest)))
			oldest = space;
	}
	return oldest;
}

bool store_evict_space(const struct store_tenant *tenant, uint64_t generation,
		       bool classes)
{
	const struct store *store = tenant->store;
	struct store_space *oldest = space_oldest(store, NULL, generation, classes);

	if (!oldest)
		oldest = space_oldest(store, tenant, generation, classes);
	if (oldest)
		space_leave(oldest);
	return oldest != NULL;
}

/* ---- classes ---- */

/* Frees unpinned parts of chunks, of the first `most`. Returns the number of scanned
 * ones. */
static uint32_t class_sweep(struct store_class *class, uint32_t most)
{
	struct store_part *part;
	uint32_t n = 0;

	list_foreach_safe(part, &class->all, class_link) {
		if (n == most)
			break;
		n++;
		if (!part->chunk->item.pins)
			store_part_drop(part);
	}
	return n;
}

/* Checks as many parts as a turn may free. */
static bool class_is_pinned(const struct store_class *class)
{
	const struct store_part *part;
	uint32_t n = 0;

	list_foreach(part, &class->all, class_link) {
		if (part->chunk->item.pins)
			return true;
		if (++n == SLICE)
			break;
	}
	return false;
}

static struct store_class *class_oldest(const struct store_space *space,
					uint64_t generation)
{
	struct store_class *oldest = NULL;

	for (unsigned int i = 0; i < STORE_CLASSES_MAX; i++) {
		struct store_class *class = space->classes[i];

		if (!class || class->users || !class_may_leave(class) ||
		    (generation != STORE_NOW &&
		     (class->used || class->generation >= generation)))
			continue;
		if ((!oldest || is_older(class->used, class->generation, oldest->used,
					 oldest->generation)) &&
		    !class_is_pinned(class))
			oldest = class;
	}
	return oldest;
}

bool store_evict_class(struct store_space *space, uint64_t generation)
{
	struct store_class *oldest = class_oldest(space, generation);

	if (!oldest)
		return false;
	class_sweep(oldest, SLICE);
	if (oldest->parts)
		return false; /* the next call continues */
	store_class_drop(oldest);
	return true;
}

/* ---- users ---- */

/* The last use of a user's spaces; false: one of them cannot be evicted. */
static bool tenant_may_leave(const struct store_tenant *tenant, uint64_t *used_p)
{
	const struct store_space *space;

	*used_p = 0;
	if (!tenant->spaces)
		return false; /* it is new, or evicted */
	list_foreach(space, &tenant->store->spaces, link) {
		if (space->tenant != tenant)
			continue;
		if (!space_may_leave(space, STORE_NOW))
			return false;
		*used_p = space->used > *used_p ? space->used : *used_p;
	}
	return true;
}

bool store_evict_tenant(struct store *store)
{
	struct store_tenant *tenant, *oldest = NULL;
	struct store_space *space;
	uint64_t used, least = 0;

	list_foreach(tenant, &store->tenants, link) {
		if (tenant_may_leave(tenant, &used) && (!oldest || used < least)) {
			oldest = tenant;
			least = used;
		}
	}
	if (!oldest)
		return false;
	list_foreach_safe(space, &store->spaces, link) {
		if (space->tenant == oldest)
			space_leave(space);
	}
	oldest->left = true;
	store->tenant_count--;
	return true;
}

/* ---- evicted spaces ---- */

/* As class_sweep(). */
static uint32_t space_sweep(struct store_space *space, uint32_t most)
{
	uint32_t n = 0;

	for (unsigned int i = 0; i < STORE_CLASSES_MAX; i++) {
		struct store_class *class = space->classes[i];

		if (!class)
			continue;
		n += class_sweep(class, most - n);
		if (class->parts)
			break;
		store_class_drop(class);
	}
	return n;
}

static void on_going_go(struct loop_defer *defer)
{
	struct store *store = container_of(defer, struct store, going_go);
	uint32_t left = SLICE;

	while (!list_empty(&store->going)) {
		struct store_space *space =
			list_first(&store->going, struct store_space, link);

		left -= space_sweep(space, left);
		if (space->class_count) {
			loop_defer(store->kvd->loop, &store->going_go);
			return;
		}
		assert(!space->chunks);
		store_space_free(space);
		store_tidy(store); /* its user may be the last one's */
	}
}

void store_evict_init(struct store *store)
{
	list_init(&store->going);
	loop_defer_init(&store->going_go, on_going_go);
}

void store_evict_fini(struct store *store)
{
	while (!list_empty(&store->going))
		on_going_go(&store->going_go);
	loop_defer_cancel(&store->going_go);
}
