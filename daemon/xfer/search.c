/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every entry must lie in one region as a whole: the innermost that holds it, so that a
 * sub-range registered on its own takes precedence. Buffers are numbered in the order in
 * which the entries need them. Both rules hold for own and for remote lists alike: the
 * daemons at both ends search for the same list, one as the owner of the memory and one
 * as the attached side, and must make the same plan of it.
 *
 * A search works on a copy of the session's region map, with every region in it pinned,
 * so that a helper can search while the loop continues; regions that no entry needed are
 * unpinned at the end. A region that is being unregistered meanwhile waits for the pin,
 * and results in it are invalid. A remote list needs no copy: the regions of a remote
 * pool never change, and the pool is held.
 */
#include "daemon/xfer/search.h"

#include <assert.h>
#include <errno.h>

#include "daemon/base/mem.h"
#include "daemon/handshake/handshake.h"
#include "daemon/session/region.h"
#include "daemon/session/region_map.h"
#include "daemon/session/session.h"

struct search {
	struct session *session; /* local */
	/* local: a copy, its regions pinned; remote: the pool's */
	struct region_map *map;
	uint32_t *numbers;	      /* of its entries: the buffer, 0: none yet */
	struct remote_pool *pool;     /* remote: held */
	struct remote_region **order; /* remote: of each buffer */
	uint64_t version;
	unsigned int transport_index;
	struct places *places; /* found */
};

/* ---- places ---- */

static struct places *places_ref(struct places *places)
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
	mem_free_large(places->at, places->count * sizeof(*places->at));
	mem_free(places);
}

void places_unref(struct places *places)
{
	assert(places->refs > 0);
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
	places->count = dlist->entry_count;
	places->at = mem_calloc(dlist->entry_count, sizeof(*places->at));
	places->buffers = mem_calloc(buffers, sizeof(*places->buffers));
	places->regions = local ? mem_calloc(buffers, sizeof(*places->regions)) : NULL;
	if (!places->at || !places->buffers || (local && !places->regions)) {
		places_free(places);
		return NULL;
	}
	return places;
}

/* ---- known results ---- */

struct places *search_known_local(const struct dlist *dlist,
				  const struct session *session,
				  unsigned int transport_index)
{
	struct places *places = dlist->places;

	return places && !places->pool && places->version == session->regions_version &&
			       places->transport_index == transport_index
		       ? places_ref(places)
		       : NULL;
}

/* ---- begin ---- */

static int numbers_new(struct search *search)
{
	search->numbers =
		mem_calloc(region_map_count(search->map) + 1, sizeof(*search->numbers));
	return search->numbers ? 0 : err_pass(-ENOMEM);
}

int search_begin_local(struct session *session, unsigned int transport_index,
		       struct search **search_p)
{
	struct search *search = mem_zalloc(sizeof(*search));
	int r;

	assert(session->region_map);
	if (!search)
		return err_pass(-ENOMEM);
	search->session = session;
	search->version = session->regions_version;
	search->transport_index = transport_index;
	r = region_map_copy(session->region_map, &search->map);
	if (r >= 0) {
		for (size_t i = 0; i < region_map_count(search->map); i++)
			region_pin(region_map_at(search->map, i));
		r = numbers_new(search);
	}
	if (r < 0) {
		search_free(search);
		return err_pass(r);
	}
	*search_p = search;
	return 0;
}

/* Once per pool, whose regions never change. One without an address, or past the end of
 * all, contains nothing. */
static int sort_regions(struct remote_pool *pool)
{
	struct region_map *map = NULL;
	uint64_t end;
	int r;

	if (pool->by_address)
		return 0;
	r = region_map_new(&map);
	for (uint32_t i = 0; r >= 0 && i < pool->region_count; i++) {
		struct remote_region *region = &pool->regions[i];

		if (region->address && region->length &&
		    !__builtin_add_overflow(region->address, region->length, &end))
			r = region_map_add(map, region->address, region->length, region);
	}
	if (r < 0) {
		region_map_free(map);
		return err_pass(r);
	}
	region_map_sort(map);
	pool->by_address = map;
	return 0;
}

int search_begin_remote(struct remote_pool *pool, struct search **search_p)
{
	struct search *search = mem_zalloc(sizeof(*search));
	int r;

	if (!search)
		return err_pass(-ENOMEM);
	search->pool = pool;
	handshake_pool_use(pool);
	r = sort_regions(pool);
	search->map = pool->by_address;
	if (r >= 0)
		r = numbers_new(search);
	if (r >= 0) {
		search->order = mem_calloc(region_map_count(search->map) + 1,
					   sizeof(struct remote_region *));
		r = search->order ? 0 : -ENOMEM;
	}
	if (r < 0) {
		search_free(search);
		return err_pass(r);
	}
	*search_p = search;
	return 0;
}

/* ---- run: any thread ---- */

static int not_found(const struct dlist_entry *e, uint32_t i, uint64_t span)
{
	return err_raise(ERR_NOTFOUND,
			 "descs[%u]: [%#llx, +%llu) is not registered, or not in the "
			 "regions of the secret",
			 i, (unsigned long long)e->address, (unsigned long long)span);
}

static int buffer_local(const struct search *search, struct places *places,
			struct region *region)
{
	bool files = search->transport_index == SEARCH_FILES;
	struct xp_reg *reg = files ? NULL : region->regs[search->transport_index];

	if (files && region->kind != REGION_FILE)
		return err_raise(ERR_INVAL,
				 "region %llu (%s) in a list of files: a list holds "
				 "either files or memory",
				 (unsigned long long)region->id,
				 region_kind_name(region->kind));
	if (!files && !reg)
		return err_raise(ERR_IMPORT,
				 "region %llu (%s) is not supported by this peer's "
				 "transport",
				 (unsigned long long)region->id,
				 region_kind_name(region->kind));
	places->regions[places->buffer_count] = region;
	places->buffers[places->buffer_count].reg = reg;
	places->buffers[places->buffer_count].length = region->length;
	return 0;
}

/* The buffer of entry `at` of the map. */
static int search_buffer_of(struct search *search, struct places *places, size_t at,
			    uint32_t *buffer_p)
{
	void *region = region_map_at(search->map, at);
	int r = 0;

	if (!search->numbers[at]) {
		if (search->pool)
			search->order[places->buffer_count] = region;
		else
			r = buffer_local(search, places, region);
		if (r < 0)
			return err_pass(r);
		search->numbers[at] = ++places->buffer_count;
	}
	*buffer_p = search->numbers[at] - 1;
	return 0;
}

static int places_find(struct search *search, const struct dlist *dlist,
		       struct places *places)
{
	for (uint32_t i = 0; i < dlist->entry_count; i++) {
		const struct dlist_entry *e = &dlist->entries[i];
		uint64_t span = 0;
		size_t at = 0;
		int r = dlist_entry_span(e, i, &span);

		if (r >= 0 && !region_map_index(search->map, e->address, span, &at))
			r = not_found(e, i, span);
		if (r >= 0)
			r = search_buffer_of(search, places, at, &places->at[i].buffer);
		if (r < 0)
			return err_pass(r);
		places->at[i].offset = e->address - region_map_start(search->map, at);
	}
	return 0;
}

int search_run(struct search *search, const struct dlist *dlist)
{
	struct places *places =
		places_new(dlist, region_map_count(search->map), !search->pool);
	int r;

	assert(!search->places);
	if (!places)
		return err_pass(-ENOMEM);
	r = places_find(search, dlist, places);
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
	for (size_t i = 0;
	     !search->pool && search->map && i < region_map_count(search->map); i++)
		region_unpin(region_map_at(search->map, i));
	if (search->pool)
		handshake_pool_unuse(search->pool);
	else
		region_map_free(search->map);
	mem_free(search->numbers);
	mem_free(search->order);
	mem_free(search);
}

/* Keys are read here: they may not have been ready when the search started. */
static void keep_remote(struct places *places, const struct search *search)
{
	places->pool = search->pool;
	handshake_pool_use(places->pool);
	for (uint32_t i = 0; i < places->buffer_count; i++) {
		const struct remote_region *region = search->order[i];

		places->buffers[i].key = region->key;
		places->buffers[i].length = region->length;
	}
}

static int keep_local(struct places *places, const struct search *search)
{
	for (uint32_t i = 0; i < places->buffer_count; i++) {
		if (sm_state(&places->regions[i]->sm) != REGION_READY)
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
		keep_remote(places, search);
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

/* ---- all of it ---- */

int locate_run(struct located *at)
{
	return at->search ? search_run(at->search, at->dlist) : 0;
}

int locate_end(struct located *at)
{
	return at->search ? search_end(mem_steal(at->search), at->dlist, &at->places) : 0;
}

static int locate_now(struct located *at)
{
	int r = at->dlist->entry_count <= SEARCH_INLINE ? locate_run(at) : 1;

	return r == 0 ? locate_end(at) : r < 0 ? err_pass(r) : 0;
}

int locate_local(struct located *at, struct session *session,
		 unsigned int transport_index)
{
	int r;

	at->places = search_known_local(at->dlist, session, transport_index);
	if (at->places)
		return 0;
	r = search_begin_local(session, transport_index, &at->search);
	return r < 0 ? err_pass(r) : locate_now(at);
}

int locate_remote(struct located *at, struct remote_pool *pool)
{
	struct places *known = at->dlist->places;
	int r;

	at->places = known && known->pool == pool ? places_ref(known) : NULL;
	if (at->places)
		return 0;
	r = search_begin_remote(pool, &at->search);
	return r < 0 ? err_pass(r) : locate_now(at);
}

const struct places *locate_found(const struct located *at)
{
	return at->search ? search_found(at->search) : at->places;
}

void locate_drop(struct located *at)
{
	search_free(at->search);
	if (at->places)
		places_unref(at->places);
	at->search = NULL;
	at->places = NULL;
}
