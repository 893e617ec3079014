/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every entry must lie in one region as a whole. Which region: the innermost that
 * holds it, so that a sub-range registered on its own wins.
 *
 * A search works on a copy of the session's region map, with every region in it
 * pinned, so that a helper can look while the loop goes on; those that no entry
 * needed are let go at the end. A region that is being unregistered meanwhile waits
 * for the pin, and what was found in it does not count any more. A remote list needs
 * no copy: the regions of a remote pool never change, and the pool is held.
 */
#include "daemon/search.h"

#include <assert.h>
#include <errno.h>

#include "daemon/base/mem.h"
#include "daemon/handshake.h"
#include "daemon/region.h"
#include "daemon/region_map.h"
#include "daemon/session.h"

struct search {
	struct session *session;  /* local */
	struct region_map *map;	  /* local: a copy, its regions pinned */
	uint32_t *numbers;	  /* of its entries: the buffer, 0: none yet */
	struct remote_pool *pool; /* remote: held */
	uint64_t version;
	unsigned int transport_index;
	struct places *places; /* found */
};

/* ---- places ---- */

struct places *places_ref(struct places *places)
{
	if (places)
		places->refs++;
	return places;
}

static void places_free(struct places *places)
{
	if (!places)
		return;
	mem_free(places->regions);
	mem_free(places->buffers);
	mem_free(places->at);
	mem_free(places);
}

void places_unref(struct places *places)
{
	if (--places->refs > 0)
		return;
	for (uint32_t i = 0; places->regions && i < places->buffer_count; i++)
		region_unpin(places->regions[i]);
	if (places->pool)
		handshake_pool_unuse(places->pool);
	places_free(places);
}

static struct places *places_new(const struct dlist *dlist, size_t buffers, bool local)
{
	struct places *places = mem_zalloc(sizeof(*places));

	if (!places)
		return NULL;
	places->refs = 1;
	places->at = mem_calloc(dlist->entry_count, sizeof(*places->at));
	places->buffers = mem_calloc(buffers, sizeof(*places->buffers));
	places->regions = local ? mem_calloc(buffers, sizeof(*places->regions)) : NULL;
	if (!places->at || !places->buffers || (local && !places->regions)) {
		places_free(places);
		return NULL;
	}
	return places;
}

/* ---- what is known ---- */

struct places *search_known_local(const struct dlist *dlist, const struct session *session,
				  unsigned int transport_index)
{
	struct places *places = dlist->places;

	return places && !places->pool && places->version == session->regions_version &&
			       places->transport_index == transport_index
		       ? places_ref(places)
		       : NULL;
}

struct places *search_known_remote(const struct dlist *dlist, const struct remote_pool *pool)
{
	struct places *places = dlist->places;

	return places && places->pool == pool ? places_ref(places) : NULL;
}

/* ---- begin ---- */

static void unpin_all(struct search *search)
{
	for (size_t i = 0; search->map && i < region_map_count(search->map); i++)
		region_unpin(region_map_region(search->map, i));
}

int search_begin_local(struct session *session, unsigned int transport_index,
		       struct search **search_p)
{
	struct search *search = mem_zalloc(sizeof(*search));
	int r;

	if (!search)
		return err_pass(-ENOMEM);
	search->session = session;
	search->version = session->regions_version;
	search->transport_index = transport_index;
	r = region_map_copy(session->region_map, &search->map);
	if (r >= 0) {
		for (size_t i = 0; i < region_map_count(search->map); i++)
			region_pin(region_map_region(search->map, i));
		search->numbers = mem_calloc(region_map_count(search->map),
					     sizeof(*search->numbers));
		r = search->numbers ? 0 : -ENOMEM;
	}
	if (r < 0) {
		search_free(search);
		return err_pass(r);
	}
	*search_p = search;
	return 0;
}

int search_begin_remote(struct remote_pool *pool, struct search **search_p)
{
	struct search *search = mem_zalloc(sizeof(*search));

	if (!search)
		return err_pass(-ENOMEM);
	search->pool = pool;
	handshake_pool_use(pool);
	*search_p = search;
	return 0;
}

/* ---- run: any thread ---- */

static int not_found(const struct dlist_entry *e, uint32_t i, uint64_t span)
{
	return err_raise(ERR_NOTFOUND, "descs[%u]: [%#llx, +%llu) is not registered", i,
			 (unsigned long long)e->address, (unsigned long long)span);
}

/* The buffer of entry `at` of the map. */
static int buffer_of(struct search *search, struct places *places, size_t at,
		     uint32_t *buffer_p)
{
	struct region *region = region_map_region(search->map, at);
	struct xp_reg *reg = region->regs[search->transport_index];

	if (!search->numbers[at]) {
		if (!reg)
			return err_raise(ERR_IMPORT, "region %llu (%s) cannot be used with this "
					 "peer's transport", (unsigned long long)region->id,
					 region_kind_name(region->kind));
		places->regions[places->buffer_count] = region;
		places->buffers[places->buffer_count].reg = reg;
		places->buffers[places->buffer_count].length = region->length;
		search->numbers[at] = ++places->buffer_count;
	}
	*buffer_p = search->numbers[at] - 1;
	return 0;
}

static int run_local(struct search *search, const struct dlist *dlist, struct places *places)
{
	for (uint32_t i = 0; i < dlist->entry_count; i++) {
		const struct dlist_entry *e = &dlist->entries[i];
		uint64_t span = 0;
		size_t at = 0;
		int r = dlist_entry_span(e, i, &span);

		if (r >= 0 && !region_map_index(search->map, e->address, span, &at))
			r = not_found(e, i, span);
		if (r >= 0)
			r = buffer_of(search, places, at, &places->at[i].buffer);
		if (r < 0)
			return err_pass(r);
		places->at[i].offset = e->address - region_map_region(search->map, at)->address;
	}
	return 0;
}

static const struct remote_region *region_in(const struct remote_pool *pool,
					     const struct dlist_entry *e, uint64_t span)
{
	const struct remote_region *best = NULL;

	for (uint32_t i = 0; i < pool->region_count; i++) {
		const struct remote_region *r = &pool->regions[i];

		if (r->address && e->address >= r->address && span <= r->length &&
		    e->address - r->address <= r->length - span &&
		    (!best || r->length < best->length))
			best = r;
	}
	return best;
}

static int run_remote(const struct remote_pool *pool, const struct dlist *dlist,
		      struct places *places)
{
	const struct remote_region *region = NULL;

	for (uint32_t i = 0; i < dlist->entry_count; i++) {
		const struct dlist_entry *e = &dlist->entries[i];
		uint64_t span = 0;
		int r = dlist_entry_span(e, i, &span);

		if (r < 0)
			return err_pass(r);
		/* neighbours mostly share a region */
		if (!region || e->address < region->address ||
		    e->address - region->address > region->length ||
		    span > region->length - (e->address - region->address))
			region = region_in(pool, e, span);
		if (!region)
			return not_found(e, i, span);
		places->at[i].buffer = (uint32_t)(region - pool->regions);
		places->at[i].offset = e->address - region->address;
	}
	places->buffer_count = pool->region_count;
	return 0;
}

int search_run(struct search *search, const struct dlist *dlist)
{
	size_t buffers = search->pool ? search->pool->region_count
				      : region_map_count(search->map);
	struct places *places = places_new(dlist, buffers, !search->pool);
	int r;

	if (!places)
		return err_pass(-ENOMEM);
	r = search->pool ? run_remote(search->pool, dlist, places)
			 : run_local(search, dlist, places);
	if (r < 0) {
		places_free(places);
		return err_pass(r);
	}
	search->places = places;
	return 0;
}

const struct places *search_found(const struct search *search)
{
	return search->places;
}

/* ---- end ---- */

void search_free(struct search *search)
{
	if (!search)
		return;
	places_free(search->places);
	unpin_all(search);
	region_map_free(search->map);
	if (search->pool)
		handshake_pool_unuse(search->pool);
	mem_free(search->numbers);
	mem_free(search);
}

/* Keys are read here: they may not have been there when the search began. */
static void keep_remote(struct places *places, struct remote_pool *pool)
{
	places->pool = pool;
	handshake_pool_use(pool);
	for (uint32_t i = 0; i < pool->region_count; i++) {
		places->buffers[i].key = pool->regions[i].key;
		places->buffers[i].length = pool->regions[i].length;
	}
}

static int keep_local(struct places *places, const struct search *search)
{
	for (uint32_t i = 0; i < places->buffer_count; i++) {
		if (places->regions[i]->state != REGION_READY)
			return err_raise(ERR_REVOKED, "region %llu was unregistered",
					 (unsigned long long)places->regions[i]->id);
	}
	for (uint32_t i = 0; i < places->buffer_count; i++)
		region_pin(places->regions[i]);
	places->version = search->version;
	places->transport_index = search->transport_index;
	return 0;
}

int search_end(struct search *search, struct dlist *dlist, struct places **places_p)
{
	static uint64_t serial;
	struct places *places = search->places;
	int r = 0;

	assert(places);
	if (search->pool)
		keep_remote(places, search->pool);
	else
		r = keep_local(places, search);
	if (r >= 0) {
		search->places = NULL;
		places->serial = ++serial;
		if (dlist->places)
			places_unref(dlist->places);
		dlist->places = places_ref(places);
		*places_p = places;
	}
	search_free(search);
	return r < 0 ? err_pass(r) : 0;
}

/* ---- at once ---- */

static int search_now(struct search *search, struct dlist *dlist, struct places **places_p)
{
	int r = search_run(search, dlist);

	if (r < 0) {
		search_free(search);
		return err_pass(r);
	}
	return search_end(search, dlist, places_p);
}

int search_local(struct dlist *dlist, struct session *session, unsigned int transport_index,
		 struct places **places_p)
{
	struct search *search = NULL;
	int r;

	*places_p = search_known_local(dlist, session, transport_index);
	if (*places_p)
		return 0;
	r = search_begin_local(session, transport_index, &search);
	return r < 0 ? err_pass(r) : search_now(search, dlist, places_p);
}

int search_remote(struct dlist *dlist, struct remote_pool *pool, struct places **places_p)
{
	struct search *search = NULL;
	int r;

	*places_p = search_known_remote(dlist, pool);
	if (*places_p)
		return 0;
	r = search_begin_remote(pool, &search);
	return r < 0 ? err_pass(r) : search_now(search, dlist, places_p);
}
